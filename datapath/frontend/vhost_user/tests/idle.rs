//! Many machines in one process that do nothing: their threads sleep, and each costs little memory.

mod guest;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use guest::Guest;
use headwater_testkit::ReferenceDisk;
use headwater_vhost_user::{Options, Server};

const MACHINES: usize = 64;

/// What a machine may take besides its disk and its own memory.
const MOST_BYTES_EACH: u64 = 1 << 20;

/// Numbers behind a name in `/proc/self/...`.
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

/// How often they slept.
fn sleeps(threads: &[PathBuf]) -> u64 {
    threads.iter().map(|task| field(&task.join("status"), "voluntary_ctxt_switches:")).sum()
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
    // They look for a while before they sleep; on a busy host it takes them longer to get there.
    let mut seen = (sleeps(&threads), 0);
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(300));
        seen = (sleeps(&threads), seen.0);
        if seen.0 == seen.1 {
            break;
        }
    }
    assert_eq!(seen.0, seen.1, "threads of idle machines are woken");
    for (_, guest) in &mut machines {
        assert_eq!(guest.request(0, 0, &[], 512), (0, vec![7; 512]));
    }
}
