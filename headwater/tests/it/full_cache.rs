//! A write cache that is full, with writes that wait for room: reads and discards of the same client go on, over each front-end.
//!
//! More writes wait than the front-end's limits of requests and bytes in flight let wait. Over vhost-user the same is tested in its crate.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use crate::support::{headwater, pseudo_random, short_dir, signal};
use headwater_block::{ByteRange, Completion, Device, IoError, Request, blocking};
use headwater_nbd::Client;
use headwater_nbd::client::ClientOptions;
use headwater_testkit::wait_until;

const MIB: u64 = 1 << 20;

/// More than any test takes, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(100);

/// What is written while there is no room goes here and behind.
const LATER: u64 = 512 * MIB;

/// An empty disk of 1 GiB with a cache of 16 MiB, whose writes wait for longer than a test takes.
struct Export {
    child: Child,
    /// Where clients find it over NBD.
    nbd: String,
    /// The line of the other front-end.
    line: String,
    stats: PathBuf,
    /// Its end ends the watchdog.
    _done: Sender<()>,
}

/// A program that waits for an answer over FUSE cannot be killed: then the server is, and the test fails.
fn watch(server: u32) -> Sender<()> {
    let (done, wait) = channel();
    std::thread::spawn(move || {
        if wait.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            eprintln!("the export is killed after {} s", PATIENCE.as_secs());
            // Not by a program: to start one may have to wait as well.
            let server = server.try_into().ok().and_then(rustix::process::Pid::from_raw).expect("a process");
            let _ = rustix::process::kill_process(server, rustix::process::Signal::KILL);
        }
    });
    done
}

impl Export {
    fn start(dir: &Path, other: &[&str]) -> Self {
        let stats = dir.join("stats.json");
        let mut command = headwater();
        command.args(["export", "null:1G", "--cache", "ram", "--ram", "16M", "--pause", "3600", "--stats"]);
        command.arg(&stats).arg(format!("--nbd=unix:{}", dir.join("nbd.sock").display())).args(other);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("it starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut line = || lines.next().expect("a line for each front-end").expect("text");
        let nbd = line();
        let line = if other.is_empty() { String::new() } else { line() };
        std::thread::spawn(move || lines.for_each(drop));
        let done = watch(child.id());
        Self { child, nbd, line, stats, _done: done }
    }

    /// A client that has as much in flight as it is told to.
    fn client(&self) -> Arc<Client> {
        let options = ClientOptions {
            silence_limit_ms: Some(60_000),
            commands_in_flight: 1024,
            bytes_in_flight: 1 << 30,
            ..ClientOptions::default()
        };
        Client::connect(&self.nbd.parse().expect("a URI"), &options).expect("it connects")
    }

    /// How many writes had to wait for room.
    fn paused(&self) -> u64 {
        std::fs::remove_file(&self.stats).expect("there were counters before");
        signal(self.child.id(), "USR1");
        wait_until("the counters are written", || self.stats.exists());
        let stats: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&self.stats).expect("it can be read")).expect("JSON");
        stats["cache"]["paused_writes"].as_u64().expect("a number")
    }

    /// Writes from the start of the disk on until a write waits. How much was stored.
    fn fill(&self, client: &Arc<Client>) -> u64 {
        self.fill_with(client, data)
    }

    fn fill_with(&self, client: &Arc<Client>, data: impl Fn(u64, u64) -> Vec<u8>) -> u64 {
        let writes = Writes::default();
        for number in 0..256 {
            writes.submit_data(client, number * MIB, data(number * MIB, MIB));
            let mut is_done = false;
            wait_until("it is written or waits", || {
                is_done = writes.done.try_recv().is_ok_and(|result| result.is_ok());
                is_done || self.paused() > 0
            });
            if !is_done {
                return number * MIB;
            }
        }
        panic!("a cache of 16 MiB took 256 MiB");
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        // Nobody waits for what waits for room.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(mount) = self.line.strip_prefix("fuse:").and_then(|file| Path::new(file).parent()) {
            let _ = Command::new("umount").arg("-l").arg(mount).status();
        }
    }
}

/// Writes that were submitted, and their results.
struct Writes {
    tell: Sender<Result<(), IoError>>,
    done: Receiver<Result<(), IoError>>,
}

impl Default for Writes {
    fn default() -> Self {
        let (tell, done) = channel();
        Self { tell, done }
    }
}

impl Writes {
    fn submit(&self, client: &Arc<Client>, offset: u64, len: u64) {
        self.submit_data(client, offset, data(offset, len));
    }

    fn submit_data(&self, client: &Arc<Client>, offset: u64, buffer: Vec<u8>) {
        let range = ByteRange::new(offset, buffer.len() as u64).expect("a range");
        let tell = self.tell.clone();
        let done = Completion::new(move |outcome| drop(tell.send(outcome.result)));
        client.submit(Request::Write { range, buffer, fua: false }, done);
    }

    fn all_waiting(&self) -> bool {
        self.done.try_recv().is_err()
    }
}

/// What is written there.
fn data(offset: u64, len: u64) -> Vec<u8> {
    pseudo_random(usize::try_from(len).expect("small"), offset + 1)
}

/// What packs, so that a part of one of its blocks cannot be changed without more room.
fn packing(offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = data(offset, len);
    bytes.chunks_mut(4096).for_each(|block| block[1024..].fill(7));
    bytes
}

/// What was written there is read.
fn reads(client: &Client, offset: u64, len: u64) {
    let mut bytes = vec![0; usize::try_from(len).expect("small")];
    blocking::read(client, offset, &mut bytes).expect("it reads");
    assert!(bytes == data(offset, len), "other bytes at {offset}");
}

#[test]
fn over_nbd_reads_and_discards_pass_writes_that_wait() {
    // With the one that is waiting already, as many as the server takes: 128 requests, or 64 MiB.
    for (count, len) in [(127, 4096), (63, MIB)] {
        let dir = short_dir();
        let export = Export::start(dir.path(), &[]);
        let client = export.client();
        let filled = export.fill(&client);
        let writes = Writes::default();
        (0..count).for_each(|number| writes.submit(&client, LATER + number * len, len));
        for number in 0..filled / MIB {
            reads(&client, number * MIB, MIB);
        }
        blocking::flush(&*client).expect("it flushes");
        assert_eq!(export.paused(), count + 1, "all wait");
        assert!(writes.all_waiting());
        blocking::discard(&*client, 0, filled).expect("it discards");
        // There is room now, for all or for some.
        writes.done.recv().expect("a result").expect("it is written");
        reads(&client, LATER, len);
        if count * len < filled {
            (1..count).for_each(|_| writes.done.recv().expect("a result").expect("it is written"));
            (0..count).for_each(|number| reads(&client, LATER + number * len, len));
        }
    }
}

#[test]
fn over_nbd_a_second_connection_makes_room_for_one_that_has_stopped() {
    let dir = short_dir();
    let export = Export::start(dir.path(), &[]);
    let client = export.client();
    let filled = export.fill(&client);
    let writes = Writes::default();
    // More than are taken: the socket is not read any more.
    (0..300).for_each(|number| writes.submit(&client, LATER + number * 4096, 4096));
    wait_until("as many wait as may", || export.paused() == 128);
    let second = export.client();
    reads(&second, 0, MIB);
    blocking::discard(&*second, 0, filled).expect("it discards");
    (0..300).for_each(|_| writes.done.recv().expect("a result").expect("it is written"));
    (0..300).for_each(|number| reads(&client, LATER + number * 4096, 4096));
}

#[test]
fn over_iscsi_reads_and_unmaps_pass_writes_that_wait() {
    let dir = short_dir();
    let target = "iqn.2026-01.org.example:disk";
    let export = Export::start(dir.path(), &["--iscsi", "tcp:127.0.0.1:0", "--iscsi-target", target]);
    let filled = export.fill(&export.client());
    // 64 MiB may be under way and 32 MiB be collected.
    const COUNT: u64 = 200;
    let mut command = Command::new("qemu-io");
    command.args(["-f", "raw", &export.line]);
    for number in 0..COUNT {
        command.arg("-c").arg(format!("aio_write -P 7 {} 1M", LATER + number * MIB));
    }
    command.args(["-c", "read 0 1M", "-c", "discard 0 1M", "-c", "read -P 0 0 1M", "-c", "read 900M 16M"]);
    // The first writes are done once there is room.
    command.arg("-c").arg(format!("discard 1M {}", filled - MIB));
    command.arg("-c").arg("aio_flush");
    let mut client = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("qemu-io is needed: apt-get install qemu-utils");
    let (tell, said) = channel();
    let lines = BufReader::new(client.stdout.take().expect("piped")).lines();
    std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| tell.send(line)));
    let mut seen: Vec<String> = Vec::new();
    let mut missing = vec![
        "read 1048576/1048576 bytes at offset 0",
        "discard 1048576/1048576 bytes at offset 0",
        "read 1048576/1048576 bytes at offset 0",
        "read 16777216/16777216 bytes at offset 943718400",
        "discard ",
        "wrote 1048576/1048576 bytes at offset",
    ];
    let patience = Duration::from_secs(60);
    while !missing.is_empty() {
        let Ok(line) = said.recv_timeout(patience) else { break };
        if line.starts_with(missing[0]) {
            missing.remove(0);
        }
        seen.push(line);
    }
    let _ = client.kill();
    let _ = client.wait();
    let paused = export.paused();
    assert!(missing.is_empty(), "{missing:?} did not come: {seen:?}");
    assert!(!seen.iter().any(|line| line.contains("failed")), "{seen:?}");
    assert!(paused > 64, "{paused} writes waited");
}

#[test]
fn over_fuse_reads_pass_writes_that_wait() {
    use std::os::unix::fs::FileExt;
    let dir = short_dir();
    let mount = dir.path().join("mount");
    std::fs::create_dir(&mount).expect("it can be made");
    let export = Export::start(dir.path(), &["--fuse", mount.to_str().expect("UTF-8")]);
    let client = export.client();
    let filled = export.fill(&client);
    let file = std::fs::File::options().read(true).write(true).open(mount.join("disk")).expect("it opens");
    let file = Arc::new(file);
    // One waits already.
    const COUNT: u64 = 127;
    let writers: Vec<_> = (0..COUNT)
        .map(|number| {
            let file = Arc::clone(&file);
            std::thread::spawn(move || {
                // At a page's start, or the kernel cuts it into two that are no whole blocks.
                let offset = LATER + number * MIB;
                let mut bytes = vec![0; (MIB + 4096) as usize];
                let start = bytes.as_ptr().align_offset(4096);
                let page = &mut bytes[start..start + MIB as usize];
                page.copy_from_slice(&data(offset, MIB));
                file.write_all_at(page, offset)
            })
        })
        .collect();
    wait_until("all writes wait", || export.paused() == COUNT + 1);
    let mut bytes = vec![0; 1 << 20];
    for number in 0..filled / MIB {
        file.read_exact_at(&mut bytes, number * MIB).expect("it reads");
        assert!(bytes == data(number * MIB, MIB));
    }
    assert!(writers.iter().all(|writer| !writer.is_finished()));
    blocking::discard(&*client, 0, filled).expect("it discards");
    wait_until("one is written", || writers.iter().any(|writer| writer.is_finished()));
    drop(export);
    // The rest fails with the mount.
    let written = writers.into_iter().filter_map(|writer| writer.join().expect("no panic").ok()).count();
    assert!(written > 0);
}

/// Its whole blocks bring the room that the parts of blocks at its ends need.
#[test]
fn over_fuse_a_hole_that_ends_within_blocks_makes_its_own_room() {
    use std::os::unix::fs::FileExt;
    let dir = short_dir();
    let mount = dir.path().join("mount");
    std::fs::create_dir(&mount).expect("it can be made");
    let export = Export::start(dir.path(), &["--fuse", mount.to_str().expect("UTF-8")]);
    let filled = export.fill_with(&export.client(), packing);
    let file = std::fs::File::options().read(true).write(true).open(mount.join("disk")).expect("it opens");
    let mode = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, mode, 100, filled - 300).expect("a hole is punched");
    let mut bytes = vec![0; MIB as usize];
    for at in (0..filled).step_by(MIB as usize) {
        let mut expected = vec![0; MIB as usize];
        if at == 0 {
            expected[..100].copy_from_slice(&packing(0, MIB)[..100]);
        }
        if at + MIB == filled {
            let end = expected.len() - 200;
            expected[end..].copy_from_slice(&packing(at, MIB)[end..]);
        }
        file.read_exact_at(&mut bytes, at).expect("it reads");
        assert!(bytes == expected, "other bytes at {at}");
    }
}
