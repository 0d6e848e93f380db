//! A host that starts while every server of its images is gone: what was copied to it needs none, and what was not waits.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::support::{self, Daemon, headwater, pseudo_random, run, short_dir, signal, tiny_disk};
use headwater_block::blocking;
use headwater_testkit::s3::{KEY_ID, KEY_SECRET, S3Server, serve_if_asked};
use headwater_testkit::{FileServer, HttpFault, test_name, wait_until};

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn with_keys(command: &mut Command) -> &mut Command {
    command.env("AWS_ACCESS_KEY_ID", KEY_ID).env("AWS_SECRET_ACCESS_KEY", KEY_SECRET)
}

/// A data directory with the images `disk` and `other` in its store, and the bytes of the first one.
fn store() -> (tempfile::TempDir, Vec<u8>) {
    let daemon = Daemon::start();
    let bytes = [tiny_disk(), pseudo_random(8 << 20, 3)].concat();
    for (name, bytes) in [("disk", bytes.as_slice()), ("other", &tiny_disk())] {
        let raw = daemon.path().join(format!("{name}.raw"));
        std::fs::write(&raw, bytes).expect("the disk is written");
        daemon.cli(&["image", "import", text(&raw)]).ok();
    }
    (daemon.terminate().1, bytes)
}

/// An export of a store's image over NBD.
struct Export {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    uri: String,
    dir: tempfile::TempDir,
}

impl Export {
    fn start(image: &str, from: &str, more: &[&str]) -> Self {
        let dir = short_dir();
        let mut command = headwater();
        with_keys(&mut command)
            .args(["export", image, "--from", from, "--cache", "ram", "--readahead", "off"])
            .args(["--boot-trace", "off"])
            .args(more)
            .arg(format!("--nbd=unix:{}", dir.path().join("nbd").display()))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(dir.path().join("log")).expect("a log"));
        let mut child = command.spawn().expect("it starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let uri = lines.next().and_then(Result::ok).unwrap_or_default();
        let export = Self { child, lines, uri, dir };
        assert!(export.uri.starts_with("nbd+unix:"), "{}", export.log());
        export
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).expect("the log")
    }

    fn wait_until_copied(&mut self) {
        let copied =
            self.lines.by_ref().map_while(Result::ok).find(|line| line.contains("no server is needed"));
        assert!(copied.is_some(), "{}", self.log());
    }

    fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>, headwater_block::IoError> {
        let client = headwater_nbd::Client::open(&self.uri).expect("it can be read");
        let mut bytes = vec![0; len];
        blocking::read(&*client, offset, &mut bytes).map(|()| bytes)
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        signal(self.child.id(), "TERM");
        let _ = self.child.wait();
    }
}

/// A daemon that copies images of a store to this chunk cache.
fn serve(dir: tempfile::TempDir, from: &str, chunk_cache: &str) -> Daemon {
    Daemon::start_in(dir, |command| {
        with_keys(command).args(["--store", from, "--chunk-cache", chunk_cache, "--hydrate", "max"]);
    })
}

/// Whether all of the image of the machine `lab` is on this host.
fn is_copied(daemon: &Daemon) -> bool {
    let disk = &daemon.machine("lab")["disk"];
    disk["to_copy_bytes"].as_u64() > Some(8 << 20) && disk["copied_bytes"] == disk["to_copy_bytes"]
}

/// Exports the image and boots a machine from it, copied to this host; and both once more after `kill`.
fn is_copied_and_starts_again(from: &str, bytes: &[u8], kill: impl FnOnce()) {
    let caches = short_dir();
    let place = |name: &str| format!("{}:64M", caches.path().join(name).display());
    let (exported, booted) = (place("export"), place("serve"));
    let export = || Export::start("disk", from, &["--chunk-cache", &exported, "--hydrate", "max"]);
    let serve = |dir| serve(dir, from, &booted);
    let mut first = export();
    first.wait_until_copied();
    drop(first);
    let daemon = serve(short_dir());
    daemon.cli(&["machine", "create", "lab", "disk", "--memory", "64M", "--cache", "ram"]).ok();
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    wait_until("all of the image is here", || is_copied(&daemon));
    daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
    let (code, dir) = daemon.terminate();
    assert_eq!(code, Some(0));

    kill();
    let mut again = export();
    again.wait_until_copied();
    assert!(again.read(0, bytes.len()).expect("no server is needed") == bytes);
    for said in ["the store cannot be reached", "using its last known versions", "since="] {
        wait_until(format!("the log has '{said}'"), || again.log().contains(said));
    }
    drop(again);
    let daemon = serve(dir);
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    wait_until("it knows that all of the image is here", || is_copied(&daemon));
    daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
}

#[test]
fn what_was_copied_starts_again_while_all_servers_are_gone() {
    let (dir, bytes) = store();
    let root = dir.path().join("store");
    let (mut a, mut b) = (FileServer::start(&root, None), FileServer::start(&root, None));
    let from = format!("{},{}", a.url(), b.url());
    is_copied_and_starts_again(&from, &bytes, || {
        a.kill();
        b.kill();
    });
}

#[test]
fn what_was_copied_starts_again_while_its_bucket_is_gone() {
    serve_if_asked();
    let (dir, bytes) = store();
    let keys = tempfile::tempdir().expect("a directory");
    let mut server =
        S3Server::start(keys.path(), test_name(what_was_copied_starts_again_while_its_bucket_is_gone));
    server.bucket("outage");
    let url = format!("s3://outage/golden?endpoint=http://{}", server.address());
    run(with_keys(&mut headwater()).args(["store", "copy", text(&dir.path().join("store")), &url, "disk@1"]))
        .ok();
    is_copied_and_starts_again(&url, &bytes, || server.kill());
}

#[test]
fn what_was_copied_starts_again_while_the_directory_of_its_server_is_gone() {
    let (dir, _) = store();
    let (root, away) = (dir.path().join("store"), dir.path().join("away"));
    let server = FileServer::start(&root, None);
    let caches = short_dir();
    let place = format!("{}:64M", caches.path().join("serve").display());
    let daemon = serve(short_dir(), &server.url(), &place);
    daemon.cli(&["machine", "create", "lab", "disk", "--memory", "64M", "--cache", "ram"]).ok();
    let boots = |daemon: &Daemon| {
        daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
        wait_until("all of the image is here", || is_copied(daemon));
        daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
    };
    boots(&daemon);
    // The server is there, and answers that nothing is: to a daemon that goes on, and to the next one.
    std::fs::rename(&root, &away).expect("it is moved");
    boots(&daemon);
    let (code, data) = daemon.terminate();
    assert_eq!(code, Some(0));
    boots(&serve(data, &server.url(), &place));
}

#[test]
fn operations_on_images_do_not_wait_for_a_server_that_goes_silent() {
    let (dir, _) = store();
    let server = FileServer::start(&dir.path().join("store"), None);
    let daemon = Daemon::start_in(short_dir(), |command| {
        command.args(["--store", &server.url()]);
    });
    let out = daemon.path().join("out.raw");
    // An object is opened with its first byte.
    server.fail(HttpFault::HangAfter(1));
    for args in [&["verify", "disk"][..], &["diff", "disk", "other"], &["export", "disk", text(&out)]] {
        let mut command = headwater();
        command.arg("--data-dir").arg(daemon.path()).arg("image").args(args);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts");
        wait_until(format!("{args:?} ends"), || child.try_wait().expect("a child").is_some());
        let ended = support::Ran::from(child.wait_with_output().expect("it ended"));
        assert_eq!(ended.code, 1, "{ended:?}");
        assert!(ended.err.contains("no server gives"), "{ended:?}");
    }
}

#[test]
fn what_is_here_in_part_starts_and_waits_for_the_rest() {
    let (dir, bytes) = store();
    let mut server = FileServer::start(&dir.path().join("store"), None);
    let caches = short_dir();
    let place = format!("{}:64M", caches.path().join("chunks").display());
    let url = server.url();
    let first = Export::start("disk", &url, &["--chunk-cache", &place]);
    assert!(first.read(0, 4096).expect("it is read") == bytes[..4096]);
    let segment = caches.path().join("chunks").join("segment-0");
    wait_until("it is kept", || std::fs::metadata(&segment).is_ok_and(|segment| segment.len() > 0));
    drop(first);
    server.kill();
    let again = Export::start("disk", &url, &["--chunk-cache", &place]);
    assert!(again.read(0, 4096).expect("it is here") == bytes[..4096]);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| again.read(4 << 20, 4096));
        wait_until("it says that reads wait", || again.log().contains("reads wait until one is back"));
        assert!(!reading.is_finished());
        server.revive();
        assert!(reading.join().expect("it ends").expect("it is read") == bytes[4 << 20..][..4096]);
    });
    drop(again);

    // What was never opened here is not known, and neither is anything of another store.
    server.kill();
    let refused = |image: &str, from: &str| {
        let export = ["export", image, "--from", from, "--nbd=unix:/tmp/x", "--chunk-cache", &place];
        let refused = run(headwater().args(export));
        assert_eq!(refused.code, 1, "{refused:?}");
        let why = refused.err.lines().last().unwrap_or_default();
        assert!(
            why.starts_with("headwater: ") && why.contains(from) && why.contains("refused"),
            "{refused:?}"
        );
    };
    refused("other", &url);
    refused("disk", &format!("{url}/elsewhere"));
}
