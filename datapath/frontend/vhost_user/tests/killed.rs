//! A server process is killed again and again while a driver keeps requests in flight.

#[path = "it/guest/mod.rs"]
#[expect(dead_code, reason = "it is for others, too")]
mod guest;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::Duration;

use guest::{FREE, Guest, WRITE, sealable_memory};
use headwater_testkit::{FileDevice, Rng, wait_until};
use headwater_vhost_user::{Options, Server};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;

/// The directory of the server. The variable is set in the child only.
const PLACE: &str = "HEADWATER_KILLED_TEST";
const DISK_BYTES: usize = 256 << 10;
const BLOCK: usize = 4096;
const KILLS: usize = 40;
/// Requests in flight: a chain has three descriptors.
const DEPTH: u16 = 5;

/// The server's process. Without the variable, this test checks nothing.
#[test]
fn child() {
    let Some(place) = std::env::var_os(PLACE) else { return };
    let place = Path::new(&place);
    let disk = FileDevice::open(&place.join("disk"), false, 512).unwrap();
    let options = Options { recovered: true, ..Options::default() };
    let _server = Server::bind(&place.join("new"), Arc::new(disk), options).unwrap();
    std::fs::rename(place.join("new"), place.join("socket")).unwrap();
    loop {
        std::thread::sleep(Duration::from_secs(60));
    }
}

fn start(place: &Path) -> Child {
    let _ = std::fs::remove_file(place.join("socket"));
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture"]).env(PLACE, place);
    let child = command.spawn().unwrap();
    wait_until("the server listens", || place.join("socket").exists());
    child
}

/// Connects with the machine's memory and the region of requests in flight. The first connection creates the
/// region.
fn connect(place: &Path, memory: File, region: &mut Option<(VhostUserInflight, File)>) -> Guest {
    Guest::connect_after(&place.join("socket"), 0, memory, |frontend| {
        let (shape, file) = region.get_or_insert_with(|| {
            frontend.get_inflight_fd(&VhostUserInflight::new(0, 0, 1, guest::SIZE)).unwrap()
        });
        frontend.set_inflight_fd(shape, file.as_raw_fd()).unwrap();
    })
}

#[test]
fn a_server_that_is_killed_under_load_loses_no_write() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path();
    let mut expected = vec![0_u8; DISK_BYTES];
    std::fs::write(place.join("disk"), &expected).unwrap();
    let mut rng = Rng::new(7);
    let mut region = None;
    let memory = sealable_memory();
    let mut server = start(place);
    let mut guest = connect(place, memory.try_clone().unwrap(), &mut region);
    guest.start_queue(0);
    let mut in_flight = 0;
    for kill in 0..KILLS {
        let rounds = 1 + rng.below(40);
        for round in 0..rounds {
            // Each request has its own blocks, so that the order of answers does not matter.
            for slot in 0..DEPTH {
                let block = usize::from(slot) + usize::from(DEPTH) * rng.below(12) as usize;
                let bytes = [(kill * 40 + round as usize) as u8 ^ rng.below(256) as u8; BLOCK];
                expected[block * BLOCK..][..BLOCK].copy_from_slice(&bytes);
                let at = FREE + 0x2000 * u64::from(slot);
                let sector = (block * BLOCK / 512) as u64;
                guest.write(at, &[&1_u32.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat());
                guest.write(at + 0x1000, &bytes);
                guest.write(at + 0x20, &[0xee]);
                guest.chain(slot * 3, &[(at, 16, 0), (at + 0x1000, BLOCK as u32, 0), (at + 0x20, 1, WRITE)]);
                guest.offer(slot * 3);
                in_flight += 1;
            }
            guest.kick();
            if round + 1 == rounds {
                break;
            }
            answers(&mut guest, &mut in_flight);
        }
        std::thread::sleep(Duration::from_micros(rng.below(300)));
        // By its process id: it is a child of this process.
        server.kill().unwrap();
        server.wait().unwrap();
        server = start(place);
        let mut next = connect(place, memory.try_clone().unwrap(), &mut region);
        (next.available, next.used) = (guest.available, guest.used);
        guest = next;
        guest.continue_queue(guest.used_index());
        answers(&mut guest, &mut in_flight);
    }
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(std::fs::read(place.join("disk")).unwrap() == expected, "the disk has not what was answered");
}

/// Waits for the answers of all requests in flight: each arrives once, and without an error.
fn answers(guest: &mut Guest, in_flight: &mut usize) {
    let mut heads = Vec::new();
    while *in_flight > 0 {
        let (head, _) = guest.next_used();
        assert!(!heads.contains(&head), "request {head} has two answers");
        let slot = u64::from(head / 3);
        assert_eq!(guest.read(FREE + 0x2000 * slot + 0x20, 1), [0], "an error");
        heads.push(head);
        *in_flight -= 1;
    }
    assert_eq!(guest.used_index(), guest.used, "an answer to no request");
}

#[test]
fn without_the_device_of_the_killed_server_its_machine_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(headwater_testkit::ReferenceDisk::new(1 << 20));
    let bind = |recovered| {
        let options = Options { recovered, ..Options::default() };
        Server::bind(&dir.path().join("socket"), Arc::clone(&disk) as _, options).unwrap()
    };
    let mut region = None;
    let server = bind(false);
    let memory = sealable_memory();
    let mut guest = connect(dir.path(), memory.try_clone().unwrap(), &mut region);
    guest.start_queue(0);
    assert_eq!(guest.request(1, 0, &[1; 512], 0).0, 0);
    drop((guest, server));
    for (recovered, with_region) in [(false, true), (true, false), (true, true)] {
        let server = bind(recovered);
        let mut given = if with_region { region.take() } else { None };
        let guest = match with_region {
            true => connect(dir.path(), memory.try_clone().unwrap(), &mut given),
            false => Guest::connect_with(server.path(), 0, memory.try_clone().unwrap()),
        };
        assert_eq!(guest.try_start(1, 1), recovered && with_region, "{recovered} {with_region}");
        region = region.or(given);
    }
}
