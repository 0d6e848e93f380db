//! Stopping while the disk does not answer requests, or is closed while they wait.

use std::time::Duration;

use super::*;

#[test]
fn waiting_writes_of_a_closed_disk_stay_in_the_ring() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(ReferenceDisk::with_options(1 << 20, late()));
    let limits = Limits { stop_timeout_ms: 100, ..Limits::default() };
    let options = |resume| Options { resume, limits: limits.clone(), ..Options::default() };
    let server = Server::bind(&dir.path().join("s"), Arc::clone(&disk) as _, options(None)).unwrap();
    let mut guest = Guest::start(server.path());
    disk.hold();
    offer_write(&mut guest, 0, 8, 1);
    guest.kick();
    wait_until("the write reaches the disk", || disk.waiting() == 1);
    server.stop();
    assert_eq!(server.positions().to_string(), "-");
    disk.fail(ByteRange::new(4096, 4096).unwrap(), IoErrorKind::Closed);
    disk.release();
    wait_until("the queue has ended", || server.positions().to_string() == "0");
    assert_eq!((status_of(&guest, 0), guest.used_index()), (0xee, 0));

    // The same machine connects again.
    let stands = server.positions();
    drop(server);
    disk.heal();
    let server = Server::bind(&dir.path().join("s"), Arc::clone(&disk) as _, options(Some(stands))).unwrap();
    let mut guest = Guest::connect_with(server.path(), F_FLUSH | F_INDIRECT, guest.memory);
    guest.continue_queue(0);
    assert_eq!((guest.next_used(), status_of(&guest, 0)), ((0, 1), OK));
    assert_eq!(disk.contents()[4096], 1);
}

#[test]
fn a_refused_write_before_later_answers_leaves_no_position() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(FullDisk {
        disk: ReferenceDisk::new(1 << 20),
        waiting: Mutex::default(),
        is_full: AtomicBool::new(true),
    });
    let limits = Limits { stop_timeout_ms: 100, ..Limits::default() };
    let options = Options { limits, ..Options::default() };
    let server = Server::bind(&dir.path().join("s"), Arc::clone(&disk) as _, options).unwrap();
    let mut guest = Guest::start(server.path());
    offer_write(&mut guest, 3, 8, 1);
    guest.kick();
    wait_until("the write reaches the disk", || disk.waiting.lock().unwrap().len() == 1);
    assert_eq!(guest.request(0, 0, &[], 512), (OK, vec![0; 512]));
    server.stop();
    disk.close();
    assert_eq!(server.positions().to_string(), "-");
    drop(server);
    // The queue's thread holds the disk as long as the thread lives.
    wait_until("the queue has ended", || Arc::strong_count(&disk) == 1);
    assert_eq!((status_of(&guest, 3), guest.used_index()), (0xee, 1));
}

#[test]
fn a_queue_given_up_during_get_base_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(ReferenceDisk::with_options(1 << 20, late()));
    let limits = Limits { stop_timeout_ms: 100, ..Limits::default() };
    let options = Options { limits, ..Options::default() };
    let server = Server::bind(&dir.path().join("s"), Arc::clone(&disk) as _, options).unwrap();
    let mut guest = Guest::start(server.path());
    disk.hold();
    offer_write(&mut guest, 0, 8, 1);
    guest.kick();
    wait_until("the write reaches the disk", || disk.waiting() == 1);
    let base = std::thread::scope(|scope| {
        scope.spawn(|| {
            // The server has received the message by then, on a busy host too.
            std::thread::sleep(Duration::from_secs(10));
            server.stop();
        });
        guest.frontend.get_vring_base(0)
    });
    assert!(base.is_err(), "it is told an entry that is not the right one: {base:?}");
    disk.fail(ByteRange::new(4096, 4096).unwrap(), IoErrorKind::Closed);
    let stands = std::thread::scope(|scope| {
        scope.spawn(|| {
            // `positions` waits by then.
            std::thread::sleep(Duration::from_millis(100));
            disk.release();
        });
        server.positions()
    });
    assert_eq!(stands.to_string(), "0");
    assert_eq!((status_of(&guest, 0), guest.used_index()), (0xee, 0));
}

#[test]
fn a_queue_whose_requests_a_closed_disk_did_not_answer_has_no_base() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(FullDisk {
        disk: ReferenceDisk::new(1 << 20),
        waiting: Mutex::default(),
        is_full: AtomicBool::new(true),
    });
    let server = Server::bind(&dir.path().join("s"), Arc::clone(&disk) as _, Options::default()).unwrap();
    let mut guest = Guest::start(server.path());
    offer_write(&mut guest, 3, 8, 1);
    guest.kick();
    wait_until("the write reaches the disk", || disk.waiting.lock().unwrap().len() == 1);
    assert_eq!(guest.request(0, 0, &[], 512), (OK, vec![0; 512]));
    disk.close();
    let base = guest.frontend.get_vring_base(0);
    assert!(base.is_err(), "it is told an entry that is not the right one: {base:?}");
    server.stop();
    assert_eq!(server.positions().to_string(), "-");
    assert_eq!((status_of(&guest, 3), guest.used_index()), (0xee, 1));
}
