//! The file descriptors that a child process inherits while a machine is connected. A process of its own,
//! because it examines all its descriptors.

#[path = "it/guest/mod.rs"]
#[expect(dead_code, reason = "it is for others, too")]
mod guest;

use std::sync::Arc;

use guest::Guest;
use headwater_testkit::ReferenceDisk;
use headwater_vhost_user::{Options, Server};

#[test]
fn programs_that_are_started_get_nothing_of_a_machine() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(ReferenceDisk::new(1 << 20));
    let server = Server::bind(&dir.path().join("disk"), disk, Options::default()).unwrap();
    let mut guest = Guest::start(server.path());
    assert_eq!(guest.request(1, 0, &[7; 512], 0).0, 0);
    // Both ends of the connection are in this process, and the test driver's own descriptors have the flag.
    let mut seen = 0;
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let path = entry.unwrap().path();
        let Ok(target) = std::fs::read_link(&path) else { continue };
        let what = target.to_string_lossy().into_owned();
        if !what.contains("eventfd") && !what.contains("memfd:") {
            continue;
        }
        let number = path.file_name().unwrap().to_string_lossy().into_owned();
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}")).unwrap();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
        let close_on_exec = i64::from_str_radix(flags, 8).unwrap() & i64::from(libc::O_CLOEXEC) != 0;
        assert!(close_on_exec, "{what} has flags {flags}");
        seen += 1;
    }
    // The driver itself has four.
    assert!(seen > 4, "{seen}");
}
