//! Clients that send garbage or false lengths, hang up or never read: each loses only its own connection, and
//! the server continues.

#[path = "it/fixture/mod.rs"]
#[expect(dead_code, reason = "it is for others, too")]
mod fixture;

use std::io::Write;
use std::time::Duration;

use fixture::{Fixture, Raw};
use headwater_nbd::Limits;
use headwater_nbd::wire::handshake::{GoData, MetaContextData, option, reply};
use headwater_nbd::wire::transmission::{chunk, command, command_flag, decode_block_status, decode_hole};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, Waits, alone, resident_bytes, wait_until};

const MIB: u64 = 1 << 20;

fn fixture() -> Fixture {
    Fixture::new(ReferenceDisk::new(MIB))
}

#[test]
fn a_handshake_of_garbage_ends_the_connection() {
    let fixture = fixture();
    let mut rng = Rng::new(5);
    for round in 0..40 {
        let mut raw = fixture.raw();
        if round % 2 == 0 {
            raw.greet();
        }
        let len = rng.between(1, 5000) as usize;
        // The server may close before everything is sent.
        let _ = raw.0.write_all(&rng.bytes(len));
        let _ = raw.0.shutdown(std::net::Shutdown::Write);
        let mut rest = Vec::new();
        let _ = std::io::Read::read_to_end(&mut raw.0, &mut rest);
        assert!(rest.len() < 100);
    }
    fixture.wait_for_connections(0);
    fixture.is_alive();
}

#[test]
fn a_huge_option_is_refused_without_taking_it() {
    let fixture = fixture();
    for length in [65_537_u32, u32::MAX] {
        let mut raw = fixture.raw();
        raw.greet();
        raw.send(b"IHAVEOPT");
        raw.send(&option::GO.to_be_bytes());
        raw.send(&length.to_be_bytes());
        assert_eq!(raw.answer().0, reply::ERR_TOO_BIG);
        raw.ends();
    }
    fixture.is_alive();
}

#[test]
fn malformed_options_are_answered_and_the_handshake_continues() {
    let fixture = fixture();
    let mut raw = fixture.raw();
    raw.greet();
    let mut long_name = Vec::new();
    GoData { name: &"n".repeat(5000), wanted: vec![] }.encode(&mut long_name);
    let mut early = Vec::new();
    MetaContextData { name: "", queries: vec!["base:allocation"] }.encode(&mut early);
    for (number, data, expected) in [
        (option::GO, &b"\0\0"[..], reply::ERR_INVALID),
        (option::GO, b"\xff\xff\xff\xff\0\0", reply::ERR_TOO_BIG),
        (option::GO, b"\0\0\0\x02\xff\xfe\0\0", reply::ERR_INVALID),
        (option::GO, &long_name, reply::ERR_TOO_BIG),
        (option::LIST, b"x", reply::ERR_INVALID),
        (option::SET_META_CONTEXT, &early, reply::ERR_INVALID),
        (option::STRUCTURED_REPLY, b"x", reply::ERR_INVALID),
        (option::STARTTLS, b"", reply::ERR_POLICY),
        (0xdead_beef, b"abc", reply::ERR_UNSUP),
    ] {
        raw.option(number, data);
        let answers = raw.answers();
        assert_eq!(answers.len(), 1);
        assert_eq!(answers[0].0, expected, "option {number} {:?}", String::from_utf8_lossy(&answers[0].1));
    }
    raw.option(option::LIST, &[]);
    assert_eq!(raw.answers().len(), 2);
    raw.option(option::ABORT, &[]);
    assert_eq!(raw.answer().0, reply::ACK);
    raw.ends();
}

#[test]
fn endless_options_end_the_connection() {
    let fixture = fixture();
    let mut raw = fixture.raw();
    raw.greet();
    for _ in 0..64 {
        raw.option(option::LIST, &[]);
        assert_eq!(raw.answers().len(), 2);
    }
    raw.option(option::LIST, &[]);
    raw.ends();
    fixture.is_alive();
}

#[test]
fn the_old_way_to_choose_an_export_works() {
    let fixture = fixture();
    let mut raw = fixture.raw();
    raw.take::<18>();
    raw.send(&1_u32.to_be_bytes());
    raw.option(option::EXPORT_NAME, b"any");
    assert_eq!(u64::from_be_bytes(raw.take()), MIB);
    let flags = u16::from_be_bytes(raw.take());
    assert_eq!(flags & 1, 1);
    assert_eq!(raw.take::<124>(), [0; 124]);
    raw.request(command::READ, 0, 7, 0, 512);
    assert_eq!(raw.simple(), (0, 7));
    assert_eq!(raw.take::<512>(), [0; 512]);
}

#[test]
fn requests_that_do_not_fit_are_answered_and_leave_the_stream_in_step() {
    let fixture = fixture();
    let mut raw = fixture.started(true);
    for (number, flags, offset, length, code) in [
        (command::READ, 0, MIB, 512, 22),
        (command::READ, 0, u64::MAX - 100, 512, 22),
        (command::READ, 0, 0, 0, 22),
        (command::READ, 0, 0, u32::MAX, 22),
        (command::READ, command_flag::REQ_ONE, 0, 512, 22),
        (command::TRIM, 0, MIB - 512, 1024, 22),
        (command::TRIM, 0, u64::MAX - 100, 512, 22),
        (command::WRITE_ZEROES, 0, MIB, 512, 28),
        (command::WRITE_ZEROES, 0, MIB - 511, 512, 28),
        (command::CACHE, 0, MIB, 512, 22),
        (command::BLOCK_STATUS, 0, MIB, 512, 22),
        (99, 0, 0, 512, 22),
    ] {
        raw.request(number, flags, 5, offset, length);
        let (found, cookie, message) = raw.error();
        assert_eq!((found, cookie), (code, 5), "command {number} {offset}+{length}: {message}");
        assert!(!message.is_empty());
    }
    // Refused writes: their payload, short or long, is read and discarded.
    for (flags, offset, length, code) in [
        (0, MIB, 512, 28),
        (0, u64::MAX, 512, 28),
        (0, MIB - 511, 512, 28),
        (0, MIB - 4096, 1 << 20, 28),
        (command_flag::DF, 0, 512, 22),
    ] {
        raw.request(command::WRITE, flags, 6, offset, length);
        raw.send(&vec![0x25; length as usize]);
        assert_eq!(raw.error().0, code, "write {offset}+{length}");
    }
    raw.request(command::WRITE, 0, 8, 512, 512);
    raw.send(&[3; 512]);
    assert_eq!(raw.simple(), (0, 8));
    let contents = fixture.disk.contents();
    assert_eq!(contents[512..1024], [3; 512]);
    assert!(contents[..512].iter().chain(&contents[1024..]).all(|b| *b == 0));
}

#[test]
fn a_write_longer_than_the_limit_ends_the_connection() {
    let fixture = Fixture::new(ReferenceDisk::new(80 * MIB));
    for length in [(64 << 20) + 1, u32::MAX] {
        let mut raw = fixture.started(true);
        raw.request(command::WRITE, 0, 1, 0, length);
        raw.ends();
    }
    fixture.is_alive();
}

#[test]
fn a_request_without_the_magic_ends_the_connection() {
    let fixture = fixture();
    let mut raw = fixture.started(true);
    raw.request(command::READ, 0, 1, 0, 512);
    raw.send(&[0xee; 28]);
    // Earlier requests may be answered. Then the connection ends.
    let mut rest = Vec::new();
    let _ = std::io::Read::read_to_end(&mut raw.0, &mut rest);
    assert!(rest.len() <= 32);
    fixture.is_alive();
}

#[test]
fn hanging_up_in_the_middle_of_a_write_writes_nothing() {
    let fixture = fixture();
    let mut other = fixture.started(true);
    for (length, sent) in [(4096, 4095), (4096, 0), (65_536, 65_535), (524_288, 300_000)] {
        let mut raw = fixture.started(false);
        raw.request(command::WRITE, 0, 1, 0, length);
        raw.send(&vec![7; sent]);
        drop(raw);
        fixture.wait_for_connections(1);
    }
    assert!(fixture.disk.contents().iter().all(|b| *b == 0));
    assert_eq!(fixture.disk.counts().writes, 0);
    other.request(command::FLUSH, 0, 2, 0, 0);
    assert_eq!(other.simple(), (0, 2));
}

#[test]
fn hanging_up_with_requests_in_flight_harms_nobody() {
    let options = ReferenceOptions { waits: Waits::Always, ..Default::default() };
    let fixture = Fixture::new(ReferenceDisk::with_options(MIB, options));
    fixture.disk.hold();
    let mut raw = fixture.started(true);
    for cookie in 0..10 {
        raw.request(command::READ, 0, cookie, cookie * 4096, 4096);
    }
    wait_until("ten reads", || fixture.disk.waiting() == 10);
    drop(raw);
    fixture.disk.release();
    fixture.wait_for_connections(0);
    fixture.is_alive();
}

#[test]
fn too_many_connections_are_closed_at_once() {
    let limits = Limits { connections: 3, ..Limits::default() };
    let fixture = Fixture::with_limits(ReferenceDisk::new(MIB), limits);
    let mut three: Vec<Raw> = (0..3).map(|_| fixture.started(true)).collect();
    fixture.raw().ends();
    three.pop();
    fixture.wait_for_connections(2);
    fixture.is_alive();
}

#[test]
fn half_open_handshakes_are_closed_in_time() {
    let limits = Limits { handshake_timeout_ms: 2_000, ..Limits::default() };
    let fixture = Fixture::with_limits(ReferenceDisk::new(MIB), limits);
    let mut silent = fixture.raw();
    let mut dripping = fixture.raw();
    dripping.take::<18>();
    for byte in b"\0\0\0\x03".iter().chain(b"IHAVEOPT".iter().cycle()) {
        if dripping.0.write_all(&[*byte]).is_err() || fixture.server.connections() == 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    silent.take::<18>();
    silent.ends();
    fixture.wait_for_connections(0);
    // The time-out covers only the handshake.
    let mut raw = fixture.started_in_time();
    std::thread::sleep(Duration::from_millis(2_500));
    raw.request(command::READ, 0, 1, 0, 512);
    raw.chunk();
}

#[test]
fn a_thousand_half_open_handshakes_keep_nobody_out() {
    let _alone = alone();
    let limits = Limits { half_open: 50, handshake_timeout_ms: 8_000, ..Limits::default() };
    let fixture = Fixture::with_limits(ReferenceDisk::new(MIB), limits);
    let mut working = fixture.started(true);
    let mut held = Vec::new();
    let (before, mut most) = (resident_bytes(), 0);
    for round in 0..1000 {
        // Some send nothing, and some send half of an option.
        let mut raw = fixture.raw();
        if round % 2 == 0 {
            let _ = raw.0.write_all(b"\0\0\0\x03IHAVEO");
        }
        held.push(raw);
        if round % 250 == 0 {
            fixture.is_alive();
        }
        most = most.max(resident_bytes());
    }
    fixture.is_alive();
    // The connections that were closed for others have freed their memory. Each remaining one has its thread,
    // and no buffers yet.
    let taken = most.max(resident_bytes()).saturating_sub(before);
    assert!(taken < 32 << 20, "{taken} bytes");
    wait_until("most to be closed", || fixture.server.connections() <= 51);
    // The others are closed when the handshake's time-out expires, even if they do not hang up. The one that
    // finished its handshake stays.
    fixture.wait_for_connections(1);
    working.request(command::READ, 0, 1, 0, 512);
    working.chunk();
    drop(held);
}

#[test]
fn a_client_that_never_reads_is_not_served_without_end() {
    let options = ReferenceOptions { waits: Waits::Always, ..Default::default() };
    let limits = Limits { requests_in_flight: 16, stop_timeout_ms: 100, ..Limits::default() };
    let fixture = Fixture::with_limits(ReferenceDisk::with_options(MIB, options), limits);
    let mut greedy = fixture.started(true);
    greedy.0.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let mut sent = 0;
    let request = headwater_nbd::wire::transmission::RequestHead {
        flags: 0,
        command: command::READ,
        cookie: 1,
        offset: 0,
        length: 65_536,
    };
    // Not zeroes, which would be answered with holes.
    let mut writer = fixture.started(true);
    writer.request(command::WRITE, 0, 1, 0, 65_536);
    writer.send(&[1; 65_536]);
    assert_eq!(writer.simple(), (0, 1));
    while sent < 200_000 && greedy.0.write_all(&request.encode()).is_ok() {
        sent += 1;
    }
    // The buffers of sockets and receivers hold some thousands. The server has read far less from the device
    // than was requested.
    assert!(sent < 200_000, "{sent} requests were taken");
    let reads = fixture.disk.counts().reads;
    assert!(reads < 200, "{reads} reads of 64 KiB for a client that reads nothing");
    assert!(fixture.disk.most_waiting() <= 17);
    fixture.is_alive();
    fixture.server.stop();
    assert_eq!(fixture.server.connections(), 0);
}

/// Fifty clients that request 32 MiB each and receive nothing share one budget. Other clients are served, and
/// the waiting ones are served later.
#[test]
fn greedy_readers_share_one_budget() {
    let _alone = alone();
    let fixture = Fixture::new(ReferenceDisk::with_contents(vec![7; 32 << 20], ReferenceOptions::default()));
    let before = resident_bytes();
    let mut greedy: Vec<_> = (0..50).map(|_| fixture.started(false)).collect();
    greedy.iter_mut().for_each(|raw| raw.request(command::READ, 0, 1, 0, 32 << 20));
    wait_until("the budget is taken", || fixture.server.shared_bytes_used() > 170 << 20);
    let mut other = fixture.started(false);
    for cookie in 0..100 {
        other.request(command::READ, 0, cookie, 0, 256 << 10);
        assert_eq!(other.simple(), (0, cookie));
        other.take_vec(256 << 10);
    }
    let taken = resident_bytes().saturating_sub(before);
    assert!(fixture.server.shared_bytes_used() <= 256 << 20);
    // This includes other buffers of connections, and those of the sockets.
    assert!(taken < 450 << 20, "{taken} bytes");
    // The waiting clients get their data when those before them receive theirs or leave.
    std::thread::scope(|scope| {
        for mut raw in greedy {
            scope.spawn(move || {
                assert_eq!(raw.simple(), (0, 1));
                assert!(raw.take_vec(32 << 20).iter().all(|byte| *byte == 7));
            });
        }
    });
    fixture.wait_for_connections(1);
    wait_until("all is given back", || fixture.server.shared_bytes_used() == 0);
}

/// The same with writes that the device does not answer at first. All are stored in the end.
#[test]
fn greedy_writers_share_one_budget_and_leave_room_for_reads() {
    let _alone = alone();
    let options = ReferenceOptions { waits: Waits::Always, ..Default::default() };
    let fixture = Fixture::new(ReferenceDisk::with_options(32 * MIB, options));
    fixture.disk.hold();
    let writers: Vec<_> = (0..20_u8)
        .map(|number| {
            let mut raw = fixture.started(false);
            std::thread::spawn(move || {
                for cookie in 0..3 {
                    raw.request(command::WRITE, 0, cookie, 0, 16 << 20);
                    raw.send(&vec![number; 16 << 20]);
                }
                let mut answers: Vec<_> = (0..3).map(|_| raw.simple()).collect();
                answers.sort_unstable();
                assert_eq!(answers, [(0, 0), (0, 1), (0, 2)]);
            })
        })
        .collect();
    wait_until("writes have taken what they may", || fixture.server.shared_bytes_used() > 170 << 20);
    assert!(fixture.server.shared_bytes_used() <= 192 << 20);
    let mut reader = fixture.started(false);
    reader.request(command::READ, 0, 9, 0, 16 << 20);
    wait_until("a read is under way besides", || fixture.server.shared_bytes_used() > 192 << 20);
    fixture.disk.release();
    assert_eq!(reader.simple(), (0, 9));
    reader.take_vec(16 << 20);
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    wait_until("all is given back", || fixture.server.shared_bytes_used() == 0);
}

#[test]
fn a_stalled_write_does_not_keep_its_memory() {
    let _alone = alone();
    let limits = Limits { shared_bytes: 64 << 20, send_stall_ms: 200, ..Limits::default() };
    let fixture = Fixture::with_limits(ReferenceDisk::new(32 * MIB), limits);
    let mut stopped = fixture.started(false);
    stopped.request(command::WRITE, 0, 1, 0, 32 << 20);
    stopped.send(&[1; 1000]);
    wait_until("its memory is set aside", || fixture.server.shared_bytes_used() > 0);
    let mut other = fixture.started(false);
    other.request(command::WRITE, 0, 2, 0, 32 << 20);
    other.send(&vec![2; 32 << 20]);
    assert_eq!(other.simple(), (0, 2));
    stopped.ends();
    assert!(fixture.disk.contents().iter().all(|byte| *byte == 2));
}

#[test]
fn a_stalled_write_behind_a_hanging_read_frees_its_memory() {
    let _alone = alone();
    let limits = Limits { shared_bytes: 64 << 20, send_stall_ms: 200, ..Limits::default() };
    let options = ReferenceOptions { waits: Waits::Always, ..Default::default() };
    let fixture = Fixture::with_limits(ReferenceDisk::with_options(32 * MIB, options), limits);
    fixture.disk.hold();
    let mut stopped = fixture.started(false);
    stopped.request(command::READ, 0, 1, 0, 4096);
    stopped.request(command::WRITE, 0, 2, 0, 32 << 20);
    wait_until("its memory is set aside", || fixture.server.shared_bytes_used() > 0);
    let mut other = fixture.started(false);
    other.request(command::WRITE, 0, 3, 0, 32 << 20);
    other.send(&vec![3; 32 << 20]);
    wait_until("both are at the disk", || fixture.disk.waiting() == 2);
    fixture.disk.release();
    assert_eq!(other.simple(), (0, 3));
    stopped.ends();
    assert!(fixture.disk.contents().iter().all(|byte| *byte == 3));
}

#[test]
fn a_trickling_write_does_not_keep_its_memory() {
    let _alone = alone();
    let limits = Limits { shared_bytes: 64 << 20, send_stall_ms: 500, ..Limits::default() };
    let fixture = Fixture::with_limits(ReferenceDisk::new(32 * MIB), limits);
    let mut slow = fixture.started(false);
    slow.request(command::WRITE, 0, 1, 0, 32 << 20);
    slow.send(&[1; 1000]);
    wait_until("its memory is set aside", || fixture.server.shared_bytes_used() > 0);
    let mut other = fixture.started(false);
    other.request(command::WRITE, 0, 2, 0, 32 << 20);
    let writing = std::thread::spawn(move || {
        other.send(&vec![2; 32 << 20]);
        other.simple()
    });
    // Waiting for all of it would take too long.
    wait_until("the other's write is done", || {
        // The client continues until the server closes the connection.
        let _ = slow.0.write(&[1; 10]);
        writing.is_finished()
    });
    assert_eq!(writing.join().unwrap(), (0, 2));
    assert!(fixture.disk.contents().iter().all(|byte| *byte == 2));
}

#[test]
fn all_zero_reads_are_holes_and_others_are_data() {
    let fixture = fixture();
    let mut raw = fixture.started(true);
    raw.request(command::WRITE, command_flag::FUA, 1, 131_072, 512);
    raw.send(&[1; 512]);
    assert_eq!(raw.simple(), (0, 1));
    for (flags, offset, length) in [(0, 0, 4096), (command_flag::DF, 0, 100 << 10)] {
        raw.request(command::READ, flags, 2, offset, length);
        let (kind, _, payload) = raw.chunk();
        assert_eq!((kind, decode_hole(&payload)), (chunk::OFFSET_HOLE, Ok((offset, length))));
    }
    for length in [4096_u32, 200 << 10] {
        raw.request(command::READ, command_flag::DF, 3, 131_072, length);
        let (kind, _, payload) = raw.chunk();
        assert_eq!((kind, payload.len()), (chunk::OFFSET_DATA, length as usize + 8));
        assert_eq!(payload[..8], 131_072_u64.to_be_bytes());
        assert!(payload[8..520].iter().all(|b| *b == 1) && payload[520..].iter().all(|b| *b == 0));
    }
}

#[test]
fn block_status_tells_extents_and_obeys_req_one() {
    let fixture = fixture();
    let mut raw = fixture.started(true);
    raw.request(command::WRITE, 0, 1, 4096, 4096);
    raw.send(&[1; 4096]);
    raw.request(command::WRITE_ZEROES, command_flag::NO_HOLE, 2, 8192, 4096);
    assert_eq!((raw.simple(), raw.simple()), ((0, 1), (0, 2)));
    raw.request(command::BLOCK_STATUS, 0, 3, 0, 16_384);
    let (kind, _, payload) = raw.chunk();
    assert_eq!(kind, chunk::BLOCK_STATUS);
    let (_, extents) = decode_block_status(&payload).unwrap();
    assert_eq!(extents, [(4096, 3), (4096, 0), (4096, 2), (4096, 3)]);
    raw.request(command::BLOCK_STATUS, command_flag::REQ_ONE, 4, 512, 16_384);
    let (_, extents) = decode_block_status(&raw.chunk().2).unwrap();
    assert_eq!(extents, [(3584, 3)]);
    let mut plain = fixture.started(false);
    plain.request(command::BLOCK_STATUS, 0, 5, 0, 512);
    assert_eq!(plain.simple(), (22, 5));
}

#[test]
fn fast_zero_is_refused_where_it_would_have_to_wait() {
    for (waits, code) in [(Waits::Never, 0), (Waits::Always, 95)] {
        let options = ReferenceOptions { waits, ..Default::default() };
        let fixture = Fixture::new(ReferenceDisk::with_options(MIB, options));
        let mut raw = fixture.started(false);
        raw.request(command::WRITE_ZEROES, command_flag::FAST_ZERO, 1, 0, 65_536);
        assert_eq!(raw.simple(), (code, 1));
    }
}

#[test]
fn fast_zero_of_parts_of_blocks_is_refused_before_anything_is_zero() {
    let fixture = Fixture::new(ReferenceDisk::with_contents(vec![7; 1 << 20], ReferenceOptions::default()));
    let mut raw = fixture.started(false);
    for (offset, length) in [(512, 8192), (4096, 4608)] {
        raw.request(command::WRITE_ZEROES, command_flag::FAST_ZERO, 1, offset, length);
        assert_eq!(raw.simple(), (95, 1));
    }
    assert!(fixture.disk.contents().iter().all(|byte| *byte == 7));
    // A range that ends at the end of the disk counts as if it ended at the end of a block.
    raw.request(command::WRITE_ZEROES, command_flag::FAST_ZERO, 2, MIB - 4096, 4096);
    assert_eq!(raw.simple(), (0, 2));
}

#[test]
fn a_read_only_export_refuses_all_changes() {
    let options = ReferenceOptions { read_only: true, ..Default::default() };
    let fixture = Fixture::new(ReferenceDisk::with_options(MIB, options));
    let mut raw = fixture.started(false);
    raw.request(command::WRITE, 0, 1, 0, 512);
    raw.send(&[1; 512]);
    raw.request(command::TRIM, 0, 2, 0, 512);
    raw.request(command::WRITE_ZEROES, 0, 3, 0, 512);
    assert_eq!((raw.simple(), raw.simple(), raw.simple()), ((1, 1), (1, 2), (1, 3)));
    assert_eq!(fixture.disk.counts().writes, 0);
}

#[test]
fn random_bytes_after_the_handshake_never_stop_the_server() {
    let fixture = fixture();
    let mut rng = Rng::new(77);
    for _ in 0..40 {
        let mut raw = fixture.started(rng.chance(1, 2));
        // Requests that are well-formed at their start and random in the rest.
        for _ in 0..rng.between(1, 30) {
            let mut bytes = rng.bytes(28);
            bytes[..4].copy_from_slice(&[0x25, 0x60, 0x95, 0x13]);
            bytes[6] = 0;
            bytes[7] %= 10;
            if rng.chance(1, 2) {
                bytes[16..25].fill(0);
            }
            if raw.0.write_all(&bytes).is_err() {
                break;
            }
        }
        drop(raw);
    }
    fixture.wait_for_connections(0);
    fixture.is_alive();
}
