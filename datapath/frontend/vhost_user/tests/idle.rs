//! Many idle machines in one process: their threads sleep and take no processor time, and each machine takes
//! little memory.

#[path = "it/guest/mod.rs"]
#[expect(dead_code, reason = "it is for others, too")]
mod guest;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use guest::Guest;
use headwater_testkit::ReferenceDisk;
use headwater_vhost_user::{Options, Server};

const MACHINES: usize = 64;

/// The most memory that a machine may take besides its disk and its own memory.
const MOST_BYTES_EACH: u64 = 1 << 20;

/// The most processor time that all threads together may take in a second, in ticks: a thread that spins
/// takes up to a hundred.
const MOST_TICKS: u64 = 2;

/// The number after a name in `/proc/self/...`.
fn field(path: &std::path::Path, name: &str) -> u64 {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("0");
    line.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0)
}

/// Anonymous memory: guests' memory is shared, and not counted.
fn private_bytes() -> u64 {
    field("/proc/self/status".as_ref(), "RssAnon:") * 1024
}

/// The threads of servers.
fn threads() -> Vec<PathBuf> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|entry| entry.unwrap().path());
    let ours =
        |task: &PathBuf| std::fs::read_to_string(task.join("comm")).is_ok_and(|c| c.starts_with("vhost-"));
    tasks.filter(ours).collect()
}

/// How often these threads slept.
fn sleeps(threads: &[PathBuf]) -> u64 {
    threads.iter().map(|task| field(&task.join("status"), "voluntary_ctxt_switches:")).sum()
}

/// The processor time of these threads, in the kernel's ticks (10 ms on most systems). A thread that spins
/// never sleeps, so its number of sleeps alone would make it look idle.
fn ticks(threads: &[PathBuf]) -> u64 {
    let of = |task: &PathBuf| -> Option<u64> {
        let stat = std::fs::read_to_string(task.join("stat")).ok()?;
        // The name may have spaces; the state and ten numbers follow it, then the times in user space and in
        // the kernel.
        let (_, after_name) = stat.rsplit_once(')')?;
        let mut numbers = after_name.split_whitespace().skip(11).map(str::parse::<u64>);
        Some(numbers.next()?.ok()? + numbers.next()?.ok()?)
    };
    threads.iter().map(|task| of(task).unwrap()).sum()
}

#[test]
fn idle_machines_sleep_and_are_small() {
    let dir = tempfile::tempdir().unwrap();
    let disks: Vec<_> = (0..MACHINES).map(|_| Arc::new(ReferenceDisk::new(64 << 10))).collect();
    let before = private_bytes();
    let mut machines: Vec<(Server, Guest)> = Vec::new();
    for (number, disk) in disks.iter().enumerate() {
        let path = dir.path().join(number.to_string());
        let server = Server::bind(&path, Arc::clone(disk) as _, Options::default()).unwrap();
        let guest = Guest::start(server.path());
        machines.push((server, guest));
    }
    for (_, guest) in &mut machines {
        assert_eq!(guest.request(1, 0, &[7; 512], 0).0, 0);
        assert_eq!(guest.request(0, 0, &[], 512), (0, vec![7; 512]));
    }
    let each = private_bytes().saturating_sub(before) / MACHINES as u64;
    println!("{} KiB each", each >> 10);
    assert!(each < MOST_BYTES_EACH, "{each} bytes each");

    let threads = threads();
    assert_eq!(threads.len(), 2 * MACHINES, "one for messages and one for the queue");
    // The threads poll for a while before they sleep, longer on a busy host.
    let mut before = (sleeps(&threads), ticks(&threads));
    let mut still = (false, false);
    for _ in 0..60 {
        std::thread::sleep(Duration::from_secs(1));
        let now = (sleeps(&threads), ticks(&threads));
        still = (now.0 == before.0, now.1 <= before.1 + MOST_TICKS);
        before = now;
        if still == (true, true) {
            break;
        }
    }
    assert!(still.0, "threads of idle machines are woken");
    assert!(still.1, "threads of idle machines take processor time");
    for (_, guest) in &mut machines {
        assert_eq!(guest.request(0, 0, &[], 512), (0, vec![7; 512]));
    }
}
