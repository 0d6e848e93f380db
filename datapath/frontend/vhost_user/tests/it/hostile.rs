//! Guests and front-ends that break the rules. Only their own disk stops: the process and other machines
//! continue.

use crate::guest::{self, FREE, GUEST, Guest, INDIRECT, MEMORY_BYTES, NEXT, PATIENCE, SIZE, WRITE, encode};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, Waits, wait_until};
use headwater_vhost_user::{Limits, Options, Server};
use rustix::fs::{MemfdFlags, SealFlags};
use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

/// Two machines in one process: one breaks the rules, and the other one must not be affected.
struct Two {
    _dir: tempfile::TempDir,
    bad: Server,
    good: Server,
}

impl Two {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let bind = |name: &str| {
            let disk = Arc::new(ReferenceDisk::new(1 << 20));
            let options = Options { name: name.into(), ..Options::default() };
            Server::bind(&dir.path().join(name), disk, options).unwrap()
        };
        Self { bad: bind("bad"), good: bind("good"), _dir: dir }
    }
}

fn works(guest: &mut Guest) {
    assert_eq!(guest.request(1, 8, &[7; 512], 0).0, OK);
    assert_eq!(guest.request(0, 8, &[], 512), (OK, vec![7; 512]));
}

/// A header of a read at sector 0.
fn read_header(guest: &Guest) -> (u64, u32, u16) {
    guest.write(FREE, &[0; 16]);
    (FREE, 16, 0)
}

const STATUS: (u64, u32, u16) = (FREE + 0x1000, 1, WRITE);
const DATA: (u64, u32, u16) = (FREE + 0x2000, 512, WRITE);
const OUTSIDE: u64 = GUEST + MEMORY_BYTES;

/// Lets the guest do something that breaks its queue. After that the queue can be reset and works again.
fn breaks(what: &str, act: impl Fn(&mut Guest)) {
    let two = Two::start();
    let mut good = Guest::start(two.good.path());
    let mut bad = Guest::start(two.bad.path());
    works(&mut bad);
    println!("{what}");
    act(&mut bad);
    bad.kick();
    bad.wait_broken();
    works(&mut good);
    let used = bad.used_index();
    bad.offer(0);
    bad.kick();
    // A broken queue takes no requests. It reports its position, and can be started again.
    bad.stop_queue();
    assert_eq!(bad.used_index(), used, "{what}");
    bad.start_queue(0);
    works(&mut bad);
    works(&mut good);
}

#[test]
fn chains_that_loop_or_leave_the_table_stop_the_queue() {
    breaks("a loop", |guest| {
        guest.descriptor(0, (FREE, 16, NEXT, 1));
        guest.descriptor(1, (FREE, 16, NEXT, 0));
        guest.offer(0);
    });
    breaks("a descriptor that is its own successor", |guest| {
        guest.descriptor(3, (FREE, 16, NEXT | WRITE, 3));
        guest.offer(3);
    });
    breaks("a head outside of the table", |guest| guest.offer(SIZE));
    breaks("a successor outside of the table", |guest| {
        guest.descriptor(0, (FREE, 16, NEXT, 0xffff));
        guest.offer(0);
    });
    breaks("an available index far ahead", |guest| guest.set_available_index(1000));
}

#[test]
fn indirect_tables_that_are_wrong_stop_the_queue() {
    let with_table = |len: u32, flags: u16, table: &'static [(u64, u32, u16, u16)]| {
        move |guest: &mut Guest| {
            guest.write(FREE + 0x8000, &encode(table));
            guest.descriptor(0, (FREE + 0x8000, len, INDIRECT | flags, 1));
            guest.offer(0);
        }
    };
    breaks("an empty table", with_table(0, 0, &[]));
    breaks("a table of 17 bytes", with_table(17, 0, &[]));
    breaks("a huge table", with_table(0xffff_fff0, 0, &[]));
    breaks("a table that goes on", with_table(16, NEXT, &[]));
    breaks("a table in a table", with_table(32, 0, &[(FREE, 16, INDIRECT, 0)]));
    breaks("a loop in a table", with_table(32, 0, &[(FREE, 16, NEXT, 1), (FREE, 16, NEXT, 0)]));
    breaks("a successor outside of a table", with_table(32, 0, &[(FREE, 16, NEXT, 2)]));
    breaks("a table outside of memory", |guest| {
        guest.descriptor(0, (OUTSIDE, 64, INDIRECT, 0));
        guest.offer(0);
    });
    breaks("a table that ends outside of memory", |guest| {
        guest.write(OUTSIDE - 16, &encode(&[(FREE, 16, NEXT, 1)]));
        guest.descriptor(0, (OUTSIDE - 16, 64, INDIRECT, 0));
        guest.offer(0);
    });
    breaks("a table at the end of all addresses", |guest| {
        guest.descriptor(0, (u64::MAX - 15, 64, INDIRECT, 0));
        guest.offer(0);
    });
}

#[test]
fn requests_that_cannot_be_answered_stop_the_queue() {
    let offers = |parts: Vec<(u64, u32, u16)>| {
        move |guest: &mut Guest| {
            read_header(guest);
            guest.chain(0, &parts);
            guest.offer(0);
        }
    };
    breaks("no status byte", offers(vec![(FREE, 16, 0)]));
    breaks("an empty status", offers(vec![(FREE, 16, 0), (FREE + 64, 0, WRITE)]));
    breaks("a status outside of memory", offers(vec![(FREE, 16, 0), (OUTSIDE, 1, WRITE)]));
    breaks("a status at the end of all addresses", offers(vec![(FREE, 16, 0), (u64::MAX, 2, WRITE)]));
    breaks("to read behind to write", offers(vec![(FREE, 16, 0), STATUS, (FREE, 16, 0)]));
}

#[test]
fn requests_that_cannot_be_carried_out_are_answered_with_an_error() {
    let two = Two::start();
    let mut guest = Guest::start(two.bad.path());
    let sectors = (1_u64 << 20) / 512;
    assert_eq!(guest.request(0, sectors, &[], 512).0, IOERR, "past the end");
    assert_eq!(guest.request(0, sectors - 1, &[], 1024).0, IOERR, "over the end");
    assert_eq!(guest.request(0, u64::MAX, &[], 512).0, IOERR, "past 64 bits");
    assert_eq!(guest.request(0, 0, &[], 511).0, IOERR, "unaligned");
    assert_eq!(guest.request(1, 0, &[1; 513], 0).0, IOERR, "unaligned");
    assert_eq!(guest.request(1, u64::MAX / 512, &[1; 512], 0).0, IOERR, "past 64 bits");
    assert_eq!(guest.request(77, 0, &[], 0).0, UNSUPP, "unknown");
    assert_eq!(guest.request(11, 0, &[0; 15], 0).0, IOERR, "half a range");
    assert_eq!(guest.request(11, 0, &[], 0).0, IOERR, "no range");
    assert_eq!(guest.request(11, 0, &[0; 16 * 17], 0).0, IOERR, "too many ranges");
    assert_eq!(guest.request(13, 0, &[0xff; 16], 0).0, UNSUPP, "unknown flags");
    let past = [&sectors.to_le_bytes()[..], &8_u32.to_le_bytes(), &0_u32.to_le_bytes()].concat();
    assert_eq!(guest.request(11, 0, &past, 0).0, IOERR, "a discard past the end");
    works(&mut guest);

    let mut odd = |what: &str, parts: &[(u64, u32, u16)]| {
        read_header(&guest);
        guest.write(STATUS.0, &[0xee]);
        guest.chain(0, parts);
        guest.offer(0);
        guest.kick();
        guest.next_used();
        assert_eq!(guest.read(STATUS.0, 1), [IOERR], "{what}");
    };
    let header = (FREE, 16, 0);
    odd("no header", &[STATUS]);
    odd("half a header", &[(FREE, 8, 0), STATUS]);
    odd("a header outside of memory", &[(OUTSIDE - 8, 16, 0), STATUS]);
    odd("data outside of memory", &[header, (OUTSIDE, 512, WRITE), STATUS]);
    odd("data over the end of memory", &[header, (OUTSIDE - 256, 512, WRITE), STATUS]);
    odd("data at the end of all addresses", &[header, (u64::MAX - 10, 512, WRITE), STATUS]);
    odd("some data outside of memory", &[header, DATA, (OUTSIDE, 512, WRITE), STATUS]);
    odd("4 GiB", &[header, (FREE, 0xffff_fe00, WRITE), STATUS]);
    odd("36 GiB", &{
        let mut parts = vec![header];
        parts.extend([(FREE, 0xffff_fe00, WRITE); 9]);
        parts.push(STATUS);
        parts
    });
    works(&mut guest);
}

/// The data of long requests: all of their buffers are this memory.
const PIECE: u64 = FREE + 0x4_0000;
/// As large as a buffer may be (`SIZE_MAX`).
const PIECE_BYTES: usize = 256 << 10;

/// A request of this many bytes at sector 0, in an indirect table. Returns its status, and how many bytes
/// were written.
fn long_request(guest: &mut Guest, kind: u32, len: usize) -> (u8, u32) {
    guest.write(FREE, &[&kind.to_le_bytes()[..], &[0; 12]].concat());
    guest.write(STATUS.0, &[0xee]);
    let flags = if kind == 0 { WRITE } else { 0 };
    let mut parts = vec![(FREE, 16, 0)];
    parts.extend((0..len).step_by(PIECE_BYTES).map(|at| (PIECE, (len - at).min(PIECE_BYTES) as u32, flags)));
    parts.push(STATUS);
    let last = parts.len() - 1;
    let linked = |(index, &(addr, len, flags)): (usize, &(u64, u32, u16))| {
        let next = if index == last { (flags, 0) } else { (flags | NEXT, index as u16 + 1) };
        (addr, len, next.0, next.1)
    };
    let table: Vec<_> = parts.iter().enumerate().map(linked).collect();
    guest.write(FREE + 0x8000, &encode(&table));
    guest.descriptor(0, (FREE + 0x8000, 16 * table.len() as u32, INDIRECT, 0));
    guest.offer(0);
    guest.kick();
    let (_, written) = guest.next_used();
    (guest.read(STATUS.0, 1)[0], written)
}

#[test]
fn the_longest_requests_are_carried_out_and_longer_ones_are_not() {
    const MIB: usize = 1 << 20;
    let mut rng = Rng::new(11);
    let (old, new) = (rng.bytes(PIECE_BYTES), rng.bytes(PIECE_BYTES));
    let all_old = old.repeat(33 * MIB / PIECE_BYTES);
    for waits in [Waits::Never, Waits::Always] {
        let options = ReferenceOptions { waits, ..Default::default() };
        // The longest request that a driver may send, the longest that is accepted, and one sector more.
        for (len, status) in [(126 * PIECE_BYTES, OK), (32 * MIB, OK), (32 * MIB + 512, IOERR)] {
            let what = format!("{len} bytes, {waits:?}");
            let dir = tempfile::tempdir().unwrap();
            let disk = Arc::new(ReferenceDisk::with_contents(all_old.clone(), options.clone()));
            let server =
                Server::bind(&dir.path().join("s"), Arc::clone(&disk) as _, Options::default()).unwrap();
            let mut guest = Guest::start(server.path());
            let is_done = status == OK;

            let (read, written) = long_request(&mut guest, 0, len);
            assert_eq!((read, written as usize), (status, if is_done { len + 1 } else { 1 }), "{what}");
            let expected = if is_done { &old } else { &vec![0; PIECE_BYTES] };
            assert!(&guest.read(PIECE, PIECE_BYTES) == expected, "what was read, {what}");

            guest.write(PIECE, &new);
            assert_eq!(long_request(&mut guest, 1, len), (status, 1), "{what}");
            let contents = disk.contents();
            let stored = if is_done { len } else { 0 };
            assert!(contents[..stored] == new.repeat(33 * MIB / PIECE_BYTES)[..stored], "{what}");
            assert!(contents[stored..] == all_old[stored..], "behind what was written, {what}");
            works(&mut guest);
        }
    }
}

#[test]
fn rings_full_of_garbage_harm_nobody_else() {
    let two = Two::start();
    let mut good = Guest::start(two.good.path());
    for seed in 0..150 {
        let mut rng = Rng::new(seed);
        let mut bad = Guest::with_features(two.bad.path(), guest::F_INDIRECT | guest::F_EVENT_IDX);
        // Addresses and lengths that are sometimes valid, so that all of the code is reached.
        for index in 0..SIZE {
            let addr = match rng.below(4) {
                0 => rng.next_u64(),
                1 => OUTSIDE - rng.below(64),
                _ => FREE + rng.below(0x8000),
            };
            let len = if rng.chance(1, 4) { rng.next_u64() as u32 } else { 1 + rng.below(1024) as u32 };
            let len = if rng.chance(1, 2) { len & !511 } else { len };
            let flags = (rng.below(8) as u16) & if rng.chance(1, 8) { 7 } else { 3 };
            bad.descriptor(index, (addr, len, flags, rng.below(u64::from(SIZE) + 1) as u16));
        }
        for at in (0..0x8000).step_by(16) {
            let kind = [0, 1, 4, 8, 11, 13, 99][rng.below(7) as usize];
            bad.write(FREE + at, &encode(&[(kind, rng.below(3) as u32, 0, 0)]));
        }
        for _ in 0..SIZE {
            let heads = u64::from(SIZE) + u64::from(rng.chance(1, 16));
            bad.offer(rng.below(heads) as u16);
        }
        bad.kick();
        if rng.chance(1, 2) {
            bad.stop_queue();
        }
    }
    works(&mut good);
    let mut again = Guest::start(two.bad.path());
    works(&mut again);
}

#[test]
fn memory_that_goes_away_under_a_running_queue_breaks_that_queue_only() {
    let dir = tempfile::tempdir().unwrap();
    let options = ReferenceOptions { waits: Waits::Always, ..Default::default() };
    let disk = Arc::new(ReferenceDisk::with_options(1 << 20, options));
    disk.hold();
    let server = Server::bind(&dir.path().join("s"), Arc::clone(&disk) as _, Options::default()).unwrap();
    let mut guest = Guest::start(server.path());
    let header = read_header(&guest);
    guest.chain(0, &[header, DATA, STATUS]);
    guest.offer(0);
    guest.kick();
    wait_until("the request reaches the disk", || disk.waiting() != 0);
    guest.frontend.remove_mem_region(&guest::region(&guest.memory)).unwrap();
    guest.wait_broken();
    // The request in flight still finds its buffers.
    disk.release();
    guest.stop_queue();
    let memory = guest.memory.try_clone().unwrap();
    guest.frontend.add_mem_region(&guest::region(&memory)).unwrap();
    guest.start_queue(0);
    works(&mut guest);
    server.stop();
}

#[test]
fn a_vanished_front_end_leaves_the_disk_usable() {
    let dir = tempfile::tempdir().unwrap();
    let options = ReferenceOptions { waits: Waits::Always, ..Default::default() };
    let disk = Arc::new(ReferenceDisk::with_options(1 << 20, options));
    let server = Server::bind(&dir.path().join("s"), Arc::clone(&disk) as _, Options::default()).unwrap();
    disk.hold();
    let mut guest = Guest::start(server.path());
    guest.write(FREE, &[&1_u32.to_le_bytes()[..], &[0; 12], &[9; 512]].concat());
    guest.chain(0, &[(FREE, 16 + 512, 0), STATUS]);
    guest.offer(0);
    guest.kick();
    wait_until("the request reaches the disk", || disk.waiting() != 0);
    drop(guest);
    disk.release();
    // A request that was received is executed, and the next machine is served.
    let mut next = Guest::start(server.path());
    assert_eq!(next.request(0, 0, &[], 512), (OK, vec![9; 512]));
}

#[test]
fn a_second_front_end_is_turned_away_while_the_first_one_is_served() {
    let two = Two::start();
    let mut guest = Guest::start(two.bad.path());
    let mut second = UnixStream::connect(two.bad.path()).unwrap();
    assert_eq!(std::io::Read::read(&mut second, &mut [0; 1]).unwrap(), 0);
    works(&mut guest);
    assert!(two.bad.is_connected());
}

#[test]
fn memory_that_can_be_taken_away_is_refused_where_it_must_be_sealed() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { sealed_memory: true, ..Options::default() };
    let server = Server::bind(&dir.path().join("s"), Arc::new(ReferenceDisk::new(1 << 20)), options).unwrap();
    let good = |what: &str| {
        println!("{what}");
        works(&mut Guest::start(server.path()));
    };
    good("a memfd that is sealed by the server");
    let memfd =
        |flags| -> File { rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC | flags).unwrap().into() };
    let sealed = memfd(MemfdFlags::ALLOW_SEALING);
    rustix::fs::fcntl_add_seals(&sealed, SealFlags::SEAL).unwrap();
    let files = [sealed, memfd(MemfdFlags::empty()), tempfile::tempfile().unwrap()];
    for (number, file) in files.into_iter().enumerate() {
        file.set_len(MEMORY_BYTES).unwrap();
        let guest = Guest::connect(server.path(), 0);
        assert!(guest.frontend.set_mem_table(&[guest::region(&file)]).is_err(), "file {number}");
        file.set_len(0).unwrap();
        drop(guest);
        good("the next one");
    }
}

#[test]
fn memory_beyond_the_mapping_limit_is_refused() {
    let two = Two::start();
    let mut good = Guest::start(two.good.path());
    let file: File =
        rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap().into();
    // The file is empty.
    file.set_len(8 << 40).unwrap();
    let region = |size: u64| {
        let mut region = guest::region(&file);
        (region.guest_phys_addr, region.userspace_addr, region.memory_size) = (1 << 50, 1 << 50, size);
        region
    };
    for size in [1 << 40, 8 << 40] {
        let mut guest = Guest::start(two.bad.path());
        assert!(guest.frontend.add_mem_region(&region(size)).is_err(), "{size:#x}");
    }
    works(&mut good);
    // The same again, before a queue runs: it replaces the earlier state.
    let again = Guest::connect(two.bad.path(), 0);
    for _ in 0..2 {
        again.frontend.set_mem_table(&[region(600 << 30)]).unwrap();
    }
    drop(again);
    let mut guest = Guest::start(two.bad.path());
    guest.frontend.add_mem_region(&region(1 << 39)).unwrap();
    works(&mut guest);
    works(&mut good);
}

#[test]
fn a_front_end_that_takes_no_interrupts_and_no_errors_holds_up_nothing() {
    let two = Two::start();
    // Event counters at their maximum, so that a write to them blocks.
    let full = || {
        let event = EventFd::new(EFD_CLOEXEC).unwrap();
        event.write(u64::MAX - 1).unwrap();
        event
    };
    let mut guest = Guest::connect(two.bad.path(), 0);
    (guest.call, guest.error) = (full(), full());
    guest.start_queue(0);
    guest.write(FREE, &[0; 16]);
    guest.chain(0, &[(FREE, 16, 0), DATA, STATUS]);
    guest.offer(0);
    guest.kick();
    wait_until("it is answered", || guest.used_index() == 1);
    // The queue is broken, which is reported through the other descriptor.
    guest.offer(SIZE);
    guest.kick();
    drop(guest);
    wait_until("the connection is over", || !two.bad.is_connected());
    works(&mut Guest::start(two.bad.path()));
}

/// Messages that need no body: `GET_FEATURES`, `SET_OWNER`, `RESET_OWNER` and `GET_PROTOCOL_FEATURES`.
const WITHOUT_BODY: [u8; 4] = [1, 3, 4, 15];
/// `CHECK_DEVICE_STATE`: it is always answered, with an error if its body is wrong.
const ALWAYS_ANSWERED: [u8; 1] = [43];

#[test]
fn messages_that_are_none_cost_the_connection() {
    let two = Two::start();
    let mut rng = Rng::new(5);
    // Waits until the server ends the connection.
    let ends = |stream: &mut UnixStream, what: &[u8]| {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        if let Err(error) = std::io::Read::read_to_end(stream, &mut Vec::new()) {
            // The server has not read all bytes.
            assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{:x?}", &what[..what.len().min(16)]);
        }
    };
    let send = |bytes: &[u8]| {
        let mut stream = UnixStream::connect(two.bad.path()).unwrap();
        // The server may close the connection before it has read everything.
        let _ = stream.write_all(bytes);
        stream
    };
    for len in [12, 13, 64, 4096, 100_000] {
        let bytes = rng.bytes(len);
        ends(&mut send(&bytes), &bytes);
    }
    // A legal header with an impossible length, and each message with a short body, or with none if it needs
    // one.
    let too_long = [1, 0, 0, 0, 1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];
    ends(&mut send(&too_long), &too_long);
    for request in (0..48).filter(|request| !ALWAYS_ANSWERED.contains(request)) {
        let short = [request, 0, 0, 0, 1, 0, 0, 0, 4, 0, 0, 0, 1, 2, 3, 4];
        ends(&mut send(&short), &short);
        if !WITHOUT_BODY.contains(&request) {
            let empty = [request, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0];
            ends(&mut send(&empty), &empty);
        }
    }
    // The server waits for the rest of a header, until the client ends its direction.
    for len in [1, 11] {
        let bytes = rng.bytes(len);
        let mut stream = send(&bytes);
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        ends(&mut stream, &bytes);
    }
    let mut guest = Guest::start(two.bad.path());
    works(&mut guest);
}

#[test]
fn a_front_end_that_stops_in_the_middle_of_a_message_holds_up_nobody() {
    let two = Two::start();
    let mut good = Guest::start(two.good.path());
    let mut slow = UnixStream::connect(two.bad.path()).unwrap();
    // The start of a header, and of a body.
    slow.write_all(&[1, 0, 0, 0, 1]).unwrap();
    wait_until("the slow one is connected", || two.bad.is_connected());
    works(&mut good);
    two.bad.stop();
    assert!(!two.bad.path().exists());
    works(&mut good);

    // A front-end that connects meanwhile is refused at once.
    let dir = tempfile::tempdir().unwrap();
    let server = with_message_timeout(&dir, 600_000);
    let mut slow = UnixStream::connect(server.path()).unwrap();
    slow.write_all(&[1, 0, 0, 0, 1]).unwrap();
    wait_until("the slow one is connected", || server.is_connected());
    ends(&mut UnixStream::connect(server.path()).unwrap());
}

/// Waits for the server to end a connection. If bytes were sent that the server did not read, this is a
/// reset.
fn ends(stream: &mut UnixStream) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    match std::io::Read::read(stream, &mut [0; 1]) {
        Ok(count) => assert_eq!(count, 0),
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
    }
}

/// A server with this time-out for messages.
fn with_message_timeout(dir: &tempfile::TempDir, message_timeout_ms: u64) -> Server {
    let limits = Limits { message_timeout_ms, ..Limits::default() };
    let options = Options { limits, ..Options::default() };
    Server::bind(&dir.path().join("s"), Arc::new(ReferenceDisk::new(1 << 20)), options).unwrap()
}

#[test]
fn an_incomplete_message_does_not_block_the_next_front_end() {
    let dir = tempfile::tempdir().unwrap();
    let server = with_message_timeout(&dir, 300);
    // A part of a header; a header without its body; and a part of a body.
    let header = [8, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0];
    for part in [&header[..5], &header, &[&header[..], &[0; 7]].concat()] {
        let mut slow = UnixStream::connect(server.path()).unwrap();
        slow.write_all(part).unwrap();
        wait_until("the slow one is connected", || server.is_connected());
        ends(&mut slow);
        wait_until("its place is free", || !server.is_connected());
        works(&mut Guest::start(server.path()));
    }
    // An out-of-band byte makes the socket readable, but cannot be received as the body.
    let mut odd = UnixStream::connect(server.path()).unwrap();
    odd.write_all(&[8, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]).unwrap();
    // Kernels before 5.15 have no out-of-band data in such sockets: then this is a header without its body,
    // too.
    let _ = rustix::net::send(&odd, &[7], rustix::net::SendFlags::OOB);
    ends(&mut odd);
    wait_until("its place is free", || !server.is_connected());
    works(&mut Guest::start(server.path()));
    // A front-end that sends requests and never reads replies.
    let mut not_reading = UnixStream::connect(server.path()).unwrap();
    not_reading.set_nonblocking(true).unwrap();
    let ask = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    wait_until("it is disconnected", || match not_reading.write(&ask) {
        Ok(_) => false,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    });
    wait_until("its place is free", || !server.is_connected());
    works(&mut Guest::start(server.path()));
    // A front-end that sends a byte at a time without end is disconnected, too.
    let slow = UnixStream::connect(server.path()).unwrap();
    let dripping = std::thread::spawn(move || {
        let mut slow = slow;
        // A message of 4 KiB, the maximum.
        let _ = slow.write_all(&[5, 0, 0, 0, 1, 0, 0, 0, 0, 0x10, 0, 0]);
        (0..4000).all(|_| {
            std::thread::sleep(Duration::from_millis(20));
            slow.write_all(&[0]).is_ok()
        })
    });
    assert!(!dripping.join().unwrap(), "all of it was waited for");
    // The limit is for one message. A machine that has set up its disk may send nothing for any time.
    let mut guest = Guest::start(server.path());
    std::thread::sleep(Duration::from_millis(700));
    ends(&mut UnixStream::connect(server.path()).unwrap());
    works(&mut guest);
}

#[test]
fn a_silent_front_end_gives_way_to_another() {
    let dir = tempfile::tempdir().unwrap();
    let server = with_message_timeout(&dir, 300);
    let mut silent = UnixStream::connect(server.path()).unwrap();
    wait_until("the silent one is connected", || server.is_connected());
    let mut next = None;
    wait_until("the next one is let in", || {
        let mut stream = UnixStream::connect(server.path()).unwrap();
        // GET_FEATURES.
        let _ = stream.write_all(&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        next = std::io::Read::read_exact(&mut stream, &mut [0; 20]).is_ok().then_some(stream);
        next.is_some()
    });
    ends(&mut silent);
    drop(next);
    wait_until("its place is free", || !server.is_connected());
    works(&mut Guest::start(server.path()));
}

/// Requests features until the server reads no more requests, because its replies are not read.
fn ask_and_never_read(connection: &UnixStream) {
    connection.set_nonblocking(true).unwrap();
    let mut connection = connection;
    let (mut unread, mut looks) = (0, 0);
    while looks < 20 {
        let ask = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
        match connection.write(&ask) {
            Ok(sent) => assert_eq!(sent, ask.len()),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                // It has stopped when there are replies, and their number does not change.
                std::thread::sleep(Duration::from_millis(10));
                let replies = rustix::io::ioctl_fionread(connection).unwrap();
                looks = if replies == unread && replies > 0 { looks + 1 } else { 0 };
                unread = replies;
            }
        }
    }
}

#[test]
fn a_front_end_that_never_reads_does_not_keep_the_server_from_stopping() {
    let two = Two::start();
    let mut good = Guest::start(two.good.path());
    let mut bad = Guest::start(two.bad.path());
    works(&mut bad);
    ask_and_never_read(&bad.connection);
    // Its disk is still served, and so is the other one.
    works(&mut bad);
    works(&mut good);
    let Two { bad: server, good: other, _dir } = two;
    let (sender, stood) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        server.stop();
        sender.send((server.positions().to_string(), server.path().exists()))
    });
    // Its queue has ended properly nevertheless.
    assert_eq!(stood.recv_timeout(PATIENCE), Ok(("4".into(), false)));
    works(&mut good);
    drop(other);
}

#[test]
fn wishes_that_cannot_be_granted_are_refused() {
    let two = Two::start();
    let guest = Guest::start(two.bad.path());
    for size in [0, 3, 2048] {
        assert!(guest.frontend.set_vring_num(1, size).is_err(), "{size} entries");
    }
    drop(guest);
    let guest = Guest::start(two.bad.path());
    assert!(guest.frontend.set_vring_num(0, 32).is_err(), "a running queue");
    drop(guest);
    let guest = Guest::connect(two.bad.path(), 0);
    assert!(guest.frontend.set_features(1 << 34).is_err(), "packed rings");
    drop(guest);
    let guest = Guest::connect(two.bad.path(), 0);
    let mut region = guest::region(&guest.memory);
    region.memory_size += 4096;
    assert!(guest.frontend.set_mem_table(&[region]).is_err(), "more memory than the file has");
    drop(guest);
    works(&mut Guest::start(two.bad.path()));
}
