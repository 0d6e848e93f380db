//! `headwater export --persistent`: killed in the middle of writing, it goes on from a state that it was in at or
//! after the last flush; ended in order, from the last one.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::support::{Daemon, headwater, headwater_on_full_disk, pseudo_random, run, short_dir, signal};
use headwater_block::{ByteRange, Completion, Device, IoErrorKind, Request, blocking};
use headwater_nbd::client::Client;
use headwater_testkit::vhost::{Setup, VhostDisk};
use headwater_testkit::wait_until;

const BLOCK: usize = 4096;
const BLOCKS: usize = 4096;

fn export(dir: &Path, source: &str, more: &[&str]) -> Command {
    let mut command = headwater();
    let address = format!("unix:{}", dir.join("nbd").display());
    command.arg("--data-dir").arg(dir.join("data")).args(["export", source, "--nbd", &address]);
    command
        .args(["--ram", "16M", "--disk", "64M", "--persistent", "work", "--cache-dir"])
        .arg(dir.join("cache"));
    command.env("HEADWATER_RUN_DIR", dir.join("run")).args(more).stdin(Stdio::null());
    command
}

/// Starts it and waits until it listens. Returns its URI too.
fn start(dir: &Path) -> (Child, String) {
    start_over(dir, "null:16M")
}

fn start_over(dir: &Path, source: &str) -> (Child, String) {
    start_with(dir, source, &[])
}

fn start_with(dir: &Path, source: &str, more: &[&str]) -> (Child, String) {
    let _ = std::fs::remove_file(dir.join("nbd"));
    let mut child = export(dir, source, more).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut uri = String::new();
    BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut uri).expect("it prints");
    assert!(uri.starts_with("nbd"), "it printed {uri:?}");
    (child, uri.trim().to_owned())
}

/// Which write the block holds the whole of; 0: none.
fn version_in(block: &[u8]) -> u64 {
    let word = |chunk: &[u8]| u64::from_le_bytes(chunk.try_into().expect("8 bytes"));
    let version = word(&block[..8]);
    assert!(block.chunks(8).all(|chunk| word(chunk) == version), "a block is torn");
    version
}

/// The writes of all lives: entry `n` is the block that write `n + 1` went to.
#[derive(Default)]
struct Oracle {
    writes: Vec<usize>,
    flushed: u64,
}

impl Oracle {
    /// What is there must be the first so many writes; the others are forgotten.
    fn check(&mut self, device: &dyn Device) {
        let mut disk = vec![0; BLOCKS * BLOCK];
        blocking::read(device, 0, &mut disk).expect("it reads");
        let found: Vec<u64> = disk.chunks(BLOCK).map(version_in).collect();
        let last = found.iter().copied().max().unwrap_or(0);
        assert!(last >= self.flushed, "write {} was flushed, and {last} is the last there", self.flushed);
        let mut expected = vec![0; BLOCKS];
        for (version, block) in (1..=last).zip(&self.writes) {
            expected[*block] = version;
        }
        assert!(found == expected, "not the first {last} writes");
        self.writes.truncate(last as usize);
        self.flushed = last;
    }

    /// Writes until it fails, with a flush now and then.
    fn write(&mut self, device: &dyn Device, stop: &AtomicBool, answered: &AtomicUsize, seed: usize) {
        let mut at = seed;
        while !stop.load(Ordering::Relaxed) {
            at = (at * 1_103_515_245 + 12_345) % (1 << 31);
            let block = (at >> 8) % BLOCKS;
            self.writes.push(block);
            let version = self.writes.len() as u64;
            let data = version.to_le_bytes().repeat(BLOCK / 8);
            if blocking::write(device, (block * BLOCK) as u64, &data).is_err() {
                return;
            }
            answered.fetch_add(1, Ordering::Relaxed);
            if at.is_multiple_of(67) {
                if blocking::flush(device).is_err() {
                    return;
                }
                self.flushed = version;
            }
        }
    }
}

#[test]
fn what_was_flushed_survives_kill_9_and_everything_survives_an_orderly_end() {
    let dir = short_dir();
    std::fs::create_dir(dir.path().join("cache")).unwrap();
    let mut oracle = Oracle::default();
    for round in 0..6usize {
        let (mut child, uri) = start(dir.path());
        let client: Arc<Client> = Client::open(&uri).expect("it listens");
        assert!(client.geometry().volatile_cache);
        oracle.check(&*client);
        let (stop, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| oracle.write(&*client, &stop, &answered, round + 1));
            std::thread::sleep(Duration::from_millis(200 + 150 * round as u64));
            wait_until("something is written", || answered.load(Ordering::Relaxed) > 100);
            if round == 4 {
                stop.store(true, Ordering::Relaxed);
                writer.join().unwrap();
                signal(child.id(), "TERM");
            } else {
                child.kill().unwrap();
                writer.join().unwrap();
            }
        });
        let status = child.wait().unwrap();
        if round == 4 {
            assert!(status.success(), "{status}");
            oracle.flushed = oracle.writes.len() as u64;
        }
    }
    assert!(oracle.flushed > 100, "{} writes in all", oracle.flushed);
}

#[test]
fn what_does_not_fit_is_refused_in_one_line() {
    let dir = short_dir();
    std::fs::create_dir(dir.path().join("cache")).unwrap();
    let (mut child, _) = start(dir.path());
    let key = dir.path().join("data/keys/work");
    assert!(key.is_file());
    let fails_with = |code: i32, source: &str, more: &[&str], words: &[&str]| {
        let mut command = export(dir.path(), source, more);
        run(&mut command).fails(code, words);
    };
    fails_with(4, "null:16M", &[], &["in use: another process, or another disk of this process"]);
    signal(child.id(), "TERM");
    assert!(child.wait().unwrap().success());
    fails_with(2, "null:32M", &[], &["belongs to base"]);
    std::fs::rename(&key, dir.path().join("data/keys/other")).unwrap();
    fails_with(3, "null:16M", &[], &["cannot use the key", "keys/work", "--key-file"]);
    std::fs::write(&key, "00112233445566778899aabbccddeeff\n").unwrap();
    fails_with(1, "null:16M", &[], &["chmod 600"]);
    std::fs::remove_file(&key).unwrap();
    let other = dir.path().join("data/keys/other");
    let other = ["--key-file", other.to_str().unwrap(), "--cache", "ram"];
    fails_with(2, "null:16M", &other, &["needs a disk"]);
}

#[test]
fn what_was_answered_is_there_after_an_end_in_the_middle_of_writing() {
    let dir = short_dir();
    std::fs::create_dir(dir.path().join("cache")).unwrap();
    for round in 1..=4u8 {
        let (mut child, uri) = start(dir.path());
        let written = AtomicUsize::new(0);
        let writers = [0, 1, 2, 3];
        // Each has its part of the disk, and no flush.
        let ended = std::thread::scope(|scope| {
            let writers = writers.map(|number| {
                let client: Arc<Client> = Client::open(&uri).expect("it listens");
                let written = &written;
                scope.spawn(move || {
                    for block in 0..BLOCKS / 4 {
                        let at = ((number * BLOCKS / 4 + block) * BLOCK) as u64;
                        if let Err(error) = blocking::write(&*client, at, &[round; BLOCK]) {
                            return (block, Some(error));
                        }
                        written.fetch_add(1, Ordering::Relaxed);
                    }
                    (BLOCKS / 4, None)
                })
            });
            wait_until("something is written", || written.load(Ordering::Relaxed) > 200 * usize::from(round));
            signal(child.id(), "TERM");
            writers.map(|writer| writer.join().unwrap())
        });
        assert!(child.wait().unwrap().success());
        let (mut child, uri) = start(dir.path());
        let mut disk = vec![0; BLOCKS * BLOCK];
        blocking::read(&*Client::open(&uri).expect("it listens"), 0, &mut disk).expect("it reads");
        signal(child.id(), "TERM");
        assert!(child.wait().unwrap().success());
        for (number, (answered, error)) in writers.into_iter().zip(ended) {
            let first = number * BLOCKS / 4;
            let blocks = disk.chunks(BLOCK).skip(first).take(answered);
            let lost = blocks.filter(|block| block.iter().any(|byte| *byte != round)).count();
            assert_eq!(lost, 0, "of {answered} blocks that were answered before {error:?}");
        }
    }
}

/// It is in the machine's ring again, with no error, and the note says that the machine stands before it.
#[test]
fn a_write_over_vhost_user_that_waits_for_room_at_an_orderly_end_is_left_to_the_next_export() {
    let dir = short_dir();
    std::fs::create_dir(dir.path().join("cache")).unwrap();
    let (log, socket) = (dir.path().join("log"), dir.path().join("vhost"));
    let more = ["--pause", "3600", "--vhost-user", socket.to_str().unwrap()];
    let mut command = export(dir.path(), "null:1G", &more);
    command.stderr(std::fs::File::create(&log).unwrap());
    let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
    let mut uri = String::new();
    BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut uri).expect("it prints");
    let machine = VhostDisk::connect(&socket, Setup { queues: 1, event_idx: true });
    let is_told = || std::fs::read_to_string(&log).unwrap().contains("writes wait for space");
    let (tell, answers) = channel();
    let mut written = 0;
    loop {
        let range = ByteRange::new(written << 20, 1 << 20).unwrap();
        let buffer = pseudo_random(1 << 20, written);
        let tell = tell.clone();
        let done = Completion::new(move |outcome| {
            // Nobody waits for it any more where a check has failed.
            let _ = tell.send(outcome.result.is_ok());
        });
        machine.submit(Request::Write { range, buffer, fua: false }, done);
        let mut answer = None;
        wait_until("it is written or waits", || {
            answer = answers.try_recv().ok();
            answer.is_some() || is_told()
        });
        match answer {
            Some(is_ok) => assert!(is_ok, "write {written} failed"),
            None => break,
        }
        written += 1;
    }
    signal(child.id(), "TERM");
    assert!(child.wait().unwrap().success());
    assert_ne!(answers.try_recv(), Ok(false));
    let note = std::fs::read_to_string(dir.path().join("cache").join("work").join("vhost-user")).unwrap();
    // One that had waited for long on a busy host may have found room at last.
    let possible = [written, written + 1].map(|entry| entry.to_string());
    assert!(possible.contains(&note.trim().to_owned()), "{note} behind {written} writes");
}

#[test]
fn an_end_whose_last_writes_find_no_room_is_a_failure() {
    let dir = short_dir();
    std::fs::create_dir(dir.path().join("cache")).unwrap();
    let mut command = headwater_on_full_disk(1 << 30);
    let plain = export(dir.path(), "null:16M", &[]);
    command.args(plain.get_args()).envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.stdin(Stdio::null());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut uri = String::new();
    BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut uri).expect("it prints");
    let client: Arc<Client> = Client::open(uri.trim()).expect("it listens");
    blocking::write(&*client, 0, &[1; BLOCK]).unwrap();
    // The disk has given the room that it promised to others.
    let pid = child.id().to_string();
    run(Command::new("prlimit").args(["--pid", &pid, "--fsize=512"])).ok();
    let flushed = blocking::flush(&*client).map_err(|error| error.kind());
    let list =
        || run(headwater().env("HEADWATER_RUN_DIR", dir.path().join("run")).args(["cache", "list"])).ok();
    let mut listed = String::new();
    // Who is slow to answer is left out.
    wait_until("it is listed", || {
        listed = list();
        listed.lines().any(|line| line.starts_with(&pid))
    });
    let state = listed.lines().find(|line| line.starts_with(&pid)).map(ToOwned::to_owned);
    signal(child.id(), "TERM");
    let ended = child.wait_with_output().unwrap();
    assert_eq!(flushed, Err(IoErrorKind::NoSpace));
    assert!(state.as_ref().is_some_and(|line| line.contains("flushes fail")), "{listed}");
    let told = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(5), "{told}");
    assert!(told.lines().last().unwrap().contains("since the last flush may be lost"), "{told}");
}

#[test]
fn a_start_that_fails_leaves_nothing_behind() {
    let dir = short_dir();
    std::fs::create_dir(dir.path().join("cache")).unwrap();
    let count = |of: &str| std::fs::read_dir(dir.path().join(of)).map_or(0, Iterator::count);
    let persistent = |name: &str, more: &[&str]| {
        let mut command = export(dir.path(), "null:16M", more);
        let args: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
        command = headwater();
        command.args(args.into_iter().map(|arg| if arg == "work" { name.into() } else { arg }));
        run(command.stdin(Stdio::null()))
    };
    for name in ["", "a b", ".hidden", "a/b"] {
        persistent(name, &[]).fails(2, &["is not a valid name for a persistent cache"]);
        assert!(!dir.path().join("data/keys").exists(), "'{name}'");
    }
    let busy = std::os::unix::net::UnixListener::bind(dir.path().join("nbd")).unwrap();
    persistent("work", &[]).fails(4, &["nbd"]);
    drop(busy);
    std::fs::remove_file(dir.path().join("nbd")).unwrap();
    persistent("work", &["--fuse", "/missing/disk"]).fails(3, &["/missing/disk"]);
    // The key stays: other caches may have been made with it.
    assert_eq!((count("cache"), count("data/keys")), (0, 1));
    // Of a directory that was there, what is not the cache's stays.
    let own = dir.path().join("cache").join("work");
    std::fs::create_dir(&own).unwrap();
    std::fs::write(own.join("mine"), "mine").unwrap();
    persistent("work", &["--fuse", "/missing/disk"]).fails(3, &["/missing/disk"]);
    assert_eq!(std::fs::read_dir(&own).unwrap().count(), 1);
    std::fs::remove_dir_all(&own).unwrap();
    // One that was there before stays, and so does its key.
    let (mut child, _) = start(dir.path());
    signal(child.id(), "TERM");
    assert!(child.wait().unwrap().success());
    persistent("work", &["--fuse", "/missing/disk"]).fails(3, &["/missing/disk"]);
    assert_eq!((count("cache"), count("data/keys")), (1, 1));
}

#[test]
fn a_backing_file_that_changed_is_another_base() {
    let dir = short_dir();
    std::fs::create_dir(dir.path().join("cache")).unwrap();
    let (base, top) = (dir.path().join("base.qcow2"), dir.path().join("top.qcow2"));
    let (base, top) = (base.to_str().unwrap(), top.to_str().unwrap());
    let qemu = |program: &str, args: &[&str]| run(Command::new(program).args(args)).ok();
    qemu("qemu-img", &["create", "-q", "-f", "qcow2", base, "16M"]);
    qemu("qemu-img", &["create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", top]);
    // The second time the base is as it was.
    for _ in 0..2 {
        let (mut child, _) = start_over(dir.path(), top);
        signal(child.id(), "TERM");
        assert!(child.wait().unwrap().success());
    }
    qemu("qemu-io", &["-f", "qcow2", "-c", "write -P 7 1M 64k", base]);
    // Where it is not refused, it ends all the same.
    run(&mut export(dir.path(), top, &["--fuse", "/missing/disk"]))
        .fails(2, &["belongs to base", "Restore the files"]);
}

/// Only root may make its loop device.
#[test]
fn a_block_device_is_no_base_of_a_persistent_cache() {
    let dir = short_dir();
    std::fs::create_dir(dir.path().join("cache")).unwrap();
    let disk = dir.path().join("disk");
    std::fs::write(&disk, vec![1; 16 << 20]).unwrap();
    let tool = |args: &[&str]| run(Command::new("/sbin/losetup").args(args)).ok();
    let device = tool(&["--find", "--show", disk.to_str().unwrap()]);
    let device = device.trim();
    // Where it is not refused, it ends all the same.
    let refused = run(&mut export(dir.path(), device, &["--fuse", "/missing/disk"]));
    tool(&["--detach", device]);
    refused.fails(2, &[device, "headwater image import"]);
}

/// The file has the size of the disk that it describes, so that both disks have the same size.
#[test]
fn a_cache_over_a_file_as_raw_is_none_over_what_its_bytes_say() {
    const SIZE: u64 = 16 << 20;
    for is_backed in [false, true] {
        let dir = short_dir();
        std::fs::create_dir(dir.path().join("cache")).unwrap();
        let (base, trap) = (dir.path().join("base.qcow2"), dir.path().join("trap.raw"));
        let (base, trap) = (base.to_str().unwrap(), trap.to_str().unwrap());
        let create = |args: &[&str]| {
            run(Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).args(args)).ok()
        };
        create(&[base, "16M"]);
        if is_backed {
            create(&["-b", base, "-F", "qcow2", trap]);
        } else {
            create(&[trap, "16M"]);
        }
        std::fs::File::options().write(true).open(trap).unwrap().set_len(SIZE).unwrap();
        let raw = ["--format", "raw"];
        let (mut child, uri) = start_with(dir.path(), trap, &raw);
        let client = Client::open(&uri).expect("it listens");
        assert_eq!(client.geometry().size_bytes, SIZE);
        blocking::write(&*client, 0, &[9; BLOCK]).unwrap();
        drop(client);
        signal(child.id(), "TERM");
        assert!(child.wait().unwrap().success());

        // Where it is not refused, it ends all the same.
        for more in [&[][..], &["--format", "qcow2"][..]] {
            let more = [more, &["--fuse", "/missing/disk"][..]].concat();
            run(&mut export(dir.path(), trap, &more)).fails(2, &["belongs to base", "the same --format"]);
        }
        let (mut child, uri) = start_with(dir.path(), trap, &raw);
        let client = Client::open(&uri).expect("it listens");
        let mut found = [0; BLOCK];
        blocking::read(&*client, 0, &mut found).unwrap();
        assert_eq!(found, [9; BLOCK]);
        drop(client);
        signal(child.id(), "TERM");
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn a_start_that_fails_leaves_the_note_that_lets_a_machine_go_on() {
    let dir = short_dir();
    std::fs::create_dir(dir.path().join("cache")).unwrap();
    let (mut child, _) = start(dir.path());
    signal(child.id(), "TERM");
    assert!(child.wait().unwrap().success());
    let note = dir.path().join("cache").join("work").join("vhost-user");
    let socket = dir.path().join("machine");
    let socket = ["--vhost-user", socket.to_str().unwrap()];
    let taken = dir.path().join("taken");
    let _other = std::os::unix::net::UnixListener::bind(&taken).unwrap();
    let taken = ["--vhost-user", taken.to_str().unwrap()];
    let nowhere = ["--fuse", "/missing/disk"];
    for (more, code) in
        [([socket, nowhere].concat(), 3), (nowhere.to_vec(), 3), ([taken, nowhere].concat(), 4)]
    {
        std::fs::write(&note, "write-through 7 -\n").unwrap();
        let ran = run(&mut export(dir.path(), "null:16M", &more));
        assert_eq!(ran.code, code, "{ran:?}");
        assert_eq!(std::fs::read_to_string(&note).unwrap(), "write-through 7 -\n", "{more:?}");
    }
}

#[test]
fn another_version_of_an_image_is_another_base() {
    let dir = short_dir();
    let daemon = Daemon::start();
    let raw = daemon.path().join("disk.raw");
    for byte in [1, 2] {
        std::fs::write(&raw, vec![byte; 16 << 20]).unwrap();
        daemon.cli(&["image", "import", raw.to_str().unwrap()]).ok();
    }
    let versions = daemon.cli(&["--json", "image", "versions", "disk"]).ok();
    let (_, data) = daemon.terminate();
    std::fs::rename(data.path(), dir.path().join("data")).unwrap();
    let _ = std::fs::create_dir(dir.path().join("cache"));
    let open = |image_byte: u8, block: u8, found: [u8; 2]| {
        let (mut child, uri) = start_over(dir.path(), &format!("disk@{image_byte}"));
        let client = Client::open(&uri).expect("it listens");
        let mut bytes = vec![0; 2 * BLOCK];
        blocking::read(&*client, 0, &mut bytes).unwrap();
        assert_eq!([bytes[0], bytes[BLOCK]], found);
        blocking::write(&*client, 0, &[block; BLOCK]).unwrap();
        drop(client);
        signal(child.id(), "TERM");
        assert!(child.wait().unwrap().success());
    };
    open(1, 7, [1, 1]);
    // The refusal names both by their hashes.
    let versions: serde_json::Value = serde_json::from_str(&versions).unwrap();
    let hash = |number: u64| {
        let versions = versions["versions"].as_array().or(versions.as_array()).expect("a list");
        let version = versions.iter().find(|version| version["number"] == number).expect("a version");
        version["hash"].as_str().expect("text").to_owned()
    };
    let mut other = export(dir.path(), "disk@2", &["--fuse", "/missing/disk"]);
    run(&mut other).fails(2, &["belongs to base", &hash(1), &hash(2)]);
    open(1, 8, [7, 1]);
}
