//! A log that cannot be written, or that nobody reads: disks are served as before, and the process ends as it should.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::support::{self, Watchdog, headwater, run, short_dir, signal};
use headwater_block::{IoErrorKind, blocking};
use headwater_nbd::Client;
use headwater_nbd::client::ClientOptions;
use headwater_testkit::wait_until;

const MIB: u64 = 1 << 20;

fn full_device() -> OwnedFd {
    File::options().write(true).open("/dev/full").expect("it can be written").into()
}

/// A pipe that is full, and whoever could read it.
fn full_pipe() -> (std::io::PipeReader, OwnedFd) {
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    let size = rustix::pipe::fcntl_setpipe_size(&writer, 4096).expect("a page is the least");
    writer.write_all(&vec![b'.'; size]).expect("as much as fits");
    (reader, writer.into())
}

fn pipe_without_reader() -> OwnedFd {
    std::io::pipe().expect("a pipe").1.into()
}

/// An export whose cache is full after 16 MiB, and its log says so.
fn export(dir: &Path, log: OwnedFd) -> (Child, String) {
    let mut command = headwater();
    command.args(["export", "null:64M", "--cache", "ram", "--ram", "16M", "--pause", "1", "--log", "trace"]);
    command.arg(format!("--nbd=unix:{}", dir.join("nbd.sock").display()));
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("text");
    assert!(line.starts_with("nbd+unix:"), "{line}");
    (child, line.trim().to_owned())
}

/// Writes until there is no room, reads what was written, and ends the export.
fn is_served(dir: &Path, log: OwnedFd, end: &str) {
    let (mut child, uri) = export(dir, log);
    let _watchdog = Watchdog::on(child.id());
    let client = Client::connect(&uri.parse().expect("a URI"), &ClientOptions::default());
    let client = client.expect("it connects");
    let piece = support::pseudo_random(1 << 20, 5);
    let mut written = (0..64).map(|number| blocking::write(&*client, number * MIB, &piece));
    let refused = written.find_map(Result::err).expect("a cache of 16 MiB does not take 64 MiB");
    assert_eq!(refused.kind(), IoErrorKind::NoSpace, "{refused}");
    let mut read = vec![0; piece.len()];
    blocking::read(&*client, 0, &mut read).expect("it reads");
    assert!(read == piece);
    signal(child.id(), end);
    let status = child.wait().expect("it ends");
    assert!(status.success(), "{status}");
}

#[test]
fn an_export_whose_log_cannot_be_written_serves_and_ends() {
    let dir = short_dir();
    is_served(dir.path(), full_device(), "TERM");
    is_served(dir.path(), pipe_without_reader(), "INT");
}

#[test]
fn an_export_whose_log_nobody_reads_serves_and_ends() {
    let dir = short_dir();
    let (_reader, writer) = full_pipe();
    is_served(dir.path(), writer, "TERM");
}

#[test]
fn a_daemon_whose_log_cannot_be_written_or_is_not_read_serves_and_ends() {
    let (_reader, writer) = full_pipe();
    for (log, end) in [(full_device(), "TERM"), (pipe_without_reader(), "INT"), (writer, "TERM")] {
        let dir = short_dir();
        let mut command = headwater();
        command.args(["serve", "--log", "trace", "--data-dir"]).arg(dir.path()).stdin(Stdio::null());
        let mut child = command.stderr(log).spawn().expect("it starts");
        let _watchdog = Watchdog::on(child.id());
        let list =
            |command: &mut Command| run(command.arg("--data-dir").arg(dir.path()).args(["machine", "list"]));
        wait_until("it answers", || list(&mut headwater()).code == 0);
        signal(child.id(), end);
        let status = child.wait().expect("it ends");
        assert!(status.success(), "{status}");
    }
}

#[test]
fn an_error_is_not_held_up_by_a_log_that_nobody_reads() {
    let (_reader, writer) = full_pipe();
    let mut command = headwater();
    command.args(["export", "/nowhere/disk.raw", "--nbd", "unix:/nowhere/nbd.sock"]);
    let mut child = command.stdin(Stdio::null()).stderr(writer).spawn().expect("it starts");
    let _watchdog = Watchdog::on(child.id());
    assert_eq!(child.wait().expect("it ends").code(), Some(3));
}

#[test]
fn an_export_whose_counters_nobody_reads_ends() {
    let dir = short_dir();
    let (reader, writer) = std::io::pipe().expect("a pipe");
    rustix::pipe::fcntl_setpipe_size(&writer, 4096).expect("a page is the least");
    let stats = dir.path().join("stats.json");
    let mut command = headwater();
    command.args(["export", "null:64M", "--cache", "ram", "--ram", "16M"]);
    command.arg(format!("--nbd=unix:{}", dir.path().join("nbd.sock").display())).arg("--stats").arg(&stats);
    let mut child =
        command.stdin(Stdio::null()).stdout(writer).stderr(Stdio::null()).spawn().expect("it starts");
    let _watchdog = Watchdog::on(child.id());
    let mut output = BufReader::new(reader);
    output.read_line(&mut String::new()).expect("text");
    // Each is a table of more than a kilobyte, and a file that is another one then.
    for _ in 0..16 {
        let before = std::fs::metadata(&stats).expect("it is there").ino();
        signal(child.id(), "USR1");
        wait_until("the counters are written", || {
            std::fs::metadata(&stats).is_ok_and(|now| now.ino() != before)
        });
    }
    signal(child.id(), "TERM");
    assert!(child.wait().expect("it ends").success());
    drop(output);
}
