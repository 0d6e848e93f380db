//! `headwater export --from`: a real client reads an image of servers that die and come back, and needs none in the end.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::support::{
    self, Daemon, headwater, headwater_on_full_disk, pseudo_random, run, short_dir, signal,
};
use headwater_image::{Manifest, Trace};
use headwater_store::{Access, LocalDir, Store};
use headwater_testkit::{FileServer, HttpFault, TestTls, wait_until};

const IMAGE_BYTES: usize = 48 << 20;

/// A store with the image `disk`, in `DIR/store`, and the image's bytes.
fn store() -> (tempfile::TempDir, Vec<u8>) {
    let daemon = Daemon::start();
    let mut bytes = pseudo_random(IMAGE_BYTES, 11);
    bytes[8 << 20..16 << 20].fill(0);
    let raw = daemon.path().join("disk.raw");
    std::fs::write(&raw, &bytes).expect("the disk is written");
    daemon.cli(&["image", "import", raw.to_str().expect("text")]).ok();
    let (code, dir) = daemon.terminate();
    assert_eq!(code, Some(0));
    (dir, bytes)
}

struct Export {
    child: Child,
    dir: tempfile::TempDir,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Export {
    fn start(from: &str, change: impl FnOnce(&Path, &mut Command)) -> Self {
        Self::start_as(headwater(), from, change)
    }

    fn start_as(mut command: Command, from: &str, change: impl FnOnce(&Path, &mut Command)) -> Self {
        let dir = short_dir();
        command
            .args(["export", "disk", "--from", from, "--log", "info", "--cache", "ram", "--stats"])
            .arg(dir.path().join("stats"))
            .arg(format!("--nbd=unix:{}", dir.path().join("nbd").display()));
        change(dir.path(), &mut command);
        let log = std::fs::File::create(dir.path().join("log")).expect("a log");
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).spawn().expect("it starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let first = lines.next().and_then(Result::ok).unwrap_or_default();
        let export = Self { child, dir, lines };
        assert!(first.starts_with("nbd+unix:"), "{first} {}", export.log());
        export
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).expect("the log")
    }

    /// Those of how the image was read.
    fn image(&self) -> serde_json::Value {
        self.stats()["image"].clone()
    }

    /// The counters of now.
    fn stats(&self) -> serde_json::Value {
        let stats = self.dir.path().join("stats");
        std::fs::remove_file(&stats).unwrap_or_default();
        signal(self.child.id(), "USR1");
        wait_until("the counters are written", || stats.exists());
        let text = std::fs::read_to_string(stats).expect("the counters");
        serde_json::from_str(&text).expect("JSON")
    }

    /// Reads the whole disk with libnbd's tool.
    fn copy(&self, name: &str) -> (Child, PathBuf) {
        let out = self.dir.path().join(name);
        let uri = format!("nbd+unix:///?socket={}", self.dir.path().join("nbd").display());
        let child = Command::new("nbdcopy").arg("--connections=1").arg(uri).arg(&out).spawn();
        (child.expect("nbdcopy is there: apt-get install libnbd-bin"), out)
    }

    /// The first MiB, through a client of our own.
    fn beginning(&self) -> Vec<u8> {
        let uri = format!("nbd+unix:///?socket={}", self.dir.path().join("nbd").display());
        let client = headwater_nbd::Client::open(&uri).expect("it opens");
        let mut bytes = vec![0; 1 << 20];
        headwater_block::blocking::read(&*client, 0, &mut bytes).expect("it reads");
        bytes
    }

    fn read(&self, name: &str) -> Vec<u8> {
        let (mut copying, out) = self.copy(name);
        assert!(copying.wait().expect("it ends").success());
        std::fs::read(out).expect("the copy")
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        signal(self.child.id(), "TERM");
        let _ = self.child.wait();
    }
}

#[test]
fn an_image_of_servers_is_read_through_their_failures_and_then_needs_none() {
    let (dir, bytes) = store();
    let tls = TestTls::new();
    let root = dir.path().join("store");
    let (mut a, mut b) = (FileServer::start(&root, Some(&tls)), FileServer::start(&root, Some(&tls)));
    let from = format!("{},{}", a.url(), b.url());
    let start = |change: &dyn Fn(&Path, &mut Command)| {
        Export::start(&from, |dir, command| {
            let ca = dir.join("ca.pem");
            std::fs::write(&ca, &tls.ca_pem).expect("the authority is written");
            command.arg("--ca").arg(ca);
            change(dir, command);
        })
    };

    // One of the two dies while the disk is read, and then both are away for a while.
    let export = start(&|_, _| {});
    assert!(export.beginning() == bytes[..1 << 20]);
    a.fail(HttpFault::Hang);
    b.fail(HttpFault::Hang);
    let (by_a, by_b) = (a.object_requests(), b.object_requests());
    let (mut copying, out) = export.copy("first");
    wait_until("one of them is asked", || a.object_requests() > by_a || b.object_requests() > by_b);
    a.kill();
    wait_until("the other one is asked", || b.object_requests() > by_b);
    b.kill();
    wait_until("reads wait and the log says so", || export.log().contains("reads wait until one is back"));
    assert!(copying.try_wait().expect("it can be asked").is_none(), "the copy ended without a server");
    b.fail(HttpFault::None);
    b.revive();
    assert!(copying.wait().expect("it ends").success());
    assert!(std::fs::read(out).expect("the copy") == bytes);
    wait_until("the log says that they go on", || export.log().contains("reads go on"));
    let image = export.image();
    assert!(image["waits"].as_u64() >= Some(1) && image["servers_up"].as_u64() >= Some(1), "{image}");
    assert!(image["ahead"].as_u64() > Some(100), "{image}");
    drop(export);

    // A copy on this host, made in the background, is enough.
    a.revive();
    let cache = short_dir();
    let place = format!("{}:128M", cache.path().join("chunks").display());
    let mut export = start(&|_, command| {
        command.args(["--chunk-cache", &place, "--hydrate", "max"]);
    });
    let copied =
        export.lines.by_ref().map_while(Result::ok).find(|line| line.contains("no server is needed"));
    assert!(copied.is_some(), "{}", export.log());
    a.kill();
    b.kill();
    assert!(export.read("second") == bytes);
    let image = export.image();
    assert_eq!(image["waits"], 0, "{image}");
    assert!(image["disk_hits"].as_u64() > Some(100), "{image}");
    assert_eq!(support::open_to_others(cache.path()), Vec::<PathBuf>::new());
    drop(export);

    // Without servers nothing is opened, and it says why.
    let refused = run(headwater().args(["export", "disk", "--nbd=unix:/tmp/x", "--from", &from]));
    refused.fails(1, &[&a.url(), "refused"]);
}

#[test]
fn a_server_that_lies_is_told_of_and_costs_no_read_unless_it_is_the_only_one() {
    let (dir, bytes) = store();
    let root = dir.path().join("store");
    let (liar, honest) = (FileServer::start(&root, None), FileServer::start(&root, None));
    // The honest one is slow, so that the other one is asked.
    honest.fail(HttpFault::Delay(std::time::Duration::from_millis(50)));
    for (lie, says) in [
        (HttpFault::WrongBytes, "sent wrong bytes: for"),
        (HttpFault::Redirect("http://127.0.0.1:9/".into()), "answers wrongly and is put aside"),
    ] {
        liar.fail_all(HttpFault::None);
        let export = Export::start(&format!("{},{}", liar.url(), honest.url()), |_, _| {});
        liar.fail_all(lie);
        assert!(export.read("out") == bytes);
        let told = |of: &FileServer| {
            let log = export.log();
            log.lines().any(|line| line.contains(says) && line.contains(&of.url()))
        };
        wait_until("the log says who lies", || told(&liar));
        assert!(!told(&honest), "{}", export.log());
        let image = export.image();
        assert_eq!((&image["waits"], &image["failures"]), (&0.into(), &0.into()), "{image}");
    }

    // From the liar alone there is nothing to be had; that is an error of each read, and no end of the program.
    liar.fail_all(HttpFault::None);
    let export = Export::start(&liar.url(), |_, _| {});
    liar.fail(HttpFault::WrongBytes);
    let (mut copying, _) = export.copy("none");
    assert!(!copying.wait().expect("it ends").success());
    let uri = format!("nbd+unix:///?socket={}", export.dir.path().join("nbd").display());
    let client = headwater_nbd::Client::open(&uri).expect("it opens");
    let error = headwater_block::blocking::read(&*client, 0, &mut vec![0; 4096]).expect_err("wrong bytes");
    assert_eq!(error.kind(), headwater_block::IoErrorKind::Device, "{error}");
    drop(client);
    // It goes on, as soon as the bytes are right.
    liar.fail(HttpFault::None);
    assert!(export.read("after") == bytes);
}

#[test]
fn a_boot_trace_that_servers_have_is_fetched_ahead_unless_it_is_switched_off() {
    let (dir, bytes) = store();
    let root = dir.path().join("store");
    let boot: Vec<u64> = (0..40).map(|n| 256 + n * 41 % 512).collect();
    let there = LocalDir::open(&root, Access::Read).expect("the store");
    let manifest = there.images().expect("a list")[0].versions[0].manifest;
    let touched: Vec<_> = boot.iter().map(|chunk| (*chunk, 0)).collect();
    let trace = Trace::of_boot(manifest, &touched);
    there.set_trace(manifest, Some(&trace.encode())).expect("readers may");
    let whole = Manifest::decode(&there.manifest(manifest).expect("it is there")).expect("it is intact");
    let stored_bytes = trace.stored_bytes(&whole);
    let mut server = FileServer::start(&root, None);
    let read = |export: &Export, chunk: u64| {
        let uri = format!("nbd+unix:///?socket={}", export.dir.path().join("nbd").display());
        let client = headwater_nbd::Client::open(&uri).expect("it opens");
        let mut into = vec![0; 1 << 16];
        headwater_block::blocking::read(&*client, chunk << 16, &mut into).expect("it reads");
        assert!(into == bytes[(chunk as usize) << 16..][..1 << 16], "chunk {chunk}");
    };
    let off = Export::start(&server.url(), |_, command| {
        command.args(["--boot-trace", "off", "--readahead", "off"]);
    });
    read(&off, boot[0]);
    assert_eq!(off.image()["ahead"], 0);
    drop(off);
    let export = Export::start(&server.url(), |_, command| {
        command.args(["--readahead", "off"]);
    });
    // They count as fetched ahead when they are asked for.
    wait_until("all of the boot is here", || export.image()["store_bytes"] == stored_bytes);
    assert_eq!(export.image()["ahead"], boot.len());
    server.kill();
    boot.iter().for_each(|chunk| read(&export, *chunk));
    assert_eq!(export.image()["waits"], 0);
}

#[test]
fn a_boot_is_recorded_and_fetched_ahead_the_next_time() {
    let (dir, _) = store();
    let server = FileServer::start(&dir.path().join("store"), None);
    let cache = short_dir();
    let place = format!("{}:128M", cache.path().display());
    // With memory for all of it on a small host too: what went would be fetched again.
    let export = || {
        Export::start(&server.url(), |_, command| {
            command.args(["--chunk-cache", &place, "--chunk-memory", "128M"]);
        })
    };
    let first = export();
    first.read("first");
    wait_until("all of it is kept", || first.image()["disk_writes"] == 640);
    drop(first);
    assert!(cache.path().join("traces").exists(), "nothing was recorded");
    // The chunks are gone, what was recorded is not.
    for entry in std::fs::read_dir(cache.path()).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.display().to_string().contains("segment-") {
            std::fs::remove_file(path).expect("it goes");
        }
    }
    let second = export();
    wait_until("the boot is fetched ahead", || second.image()["fetches"].as_u64() == Some(640));
    assert_eq!(second.image()["ahead"], 640, "{}", second.image());
}

#[test]
fn a_chunk_cache_that_is_of_no_use_is_told() {
    let (dir, bytes) = store();
    let cache = short_dir();
    let place = format!("{}:64M", cache.path().display());
    let export = Export::start(dir.path().join("store").to_str().expect("a name"), |_, command| {
        command.args(["--chunk-cache", &place, "--hydrate", "max"]);
    });
    wait_until("the log says so", || export.log().contains("the store is on this host, so --chunk-cache"));
    assert!(export.read("out") == bytes);
}

#[test]
fn a_full_disk_below_the_chunk_cache_costs_the_cache_and_not_the_read() {
    let (dir, bytes) = store();
    let server = FileServer::start(&dir.path().join("store"), None);
    let cache = short_dir();
    let place = format!("{}:64M", cache.path().display());
    let with_cache = |_: &Path, command: &mut Command| {
        command.args(["--chunk-cache", &place]);
    };
    // Of each segment of 4 MiB the first quarter can be written.
    let export = Export::start_as(headwater_on_full_disk(1 << 20), &server.url(), with_cache);
    assert!(export.read("first") == bytes);
    let image = export.image();
    let written = image["disk_writes"].as_u64().expect("a number");
    assert!(written > 0 && written < 640, "{image}");
    assert_eq!(image["failures"], 0, "{image}");
    wait_until("the log says why", || export.log().contains("new chunks are not cached"));
    drop(export);

    // What could be written is sound, and the cache is one again when there is room.
    let export = Export::start(&server.url(), with_cache);
    assert!(export.read("second") == bytes);
    let image = export.image();
    assert!(image["disk_hits"].as_u64() > Some(0) && image["disk_damaged"] == 0, "{image}");
    assert!(image["disk_writes"].as_u64() > Some(0), "{image}");
    assert!(!export.log().contains("new chunks are not cached"), "{}", export.log());
}

#[test]
fn what_is_written_as_the_image_has_it_is_found_equal() {
    let (dir, bytes) = store();
    let export = Export::start(dir.path().join("store").to_str().expect("a name"), |_, _| {});
    let read = export.beginning();
    assert!(read == bytes[..read.len()]);
    let uri = format!("nbd+unix:///?socket={}", export.dir.path().join("nbd").display());
    let client = headwater_nbd::Client::open(&uri).expect("it opens");
    headwater_block::blocking::write(&*client, 0, &read).expect("it is written");
    // Also by the second look, a moment later.
    wait_until("all blocks are found equal", || export.stats()["cache"]["elided_equal_blocks"] == 256);
}
