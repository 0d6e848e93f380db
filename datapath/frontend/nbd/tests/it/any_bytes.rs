//! A client that does not query block sizes: requests of any bytes, and longer ones than other clients may
//! send.

use std::time::Duration;

use crate::fixture::{Fixture, Raw};
use headwater_block::{ByteRange, IoErrorKind};
use headwater_nbd::wire::handshake::option;
use headwater_nbd::wire::transmission::{
    REPLY_BYTES, ReplyHead, chunk, command, command_flag, decode_block_status,
};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, Waits, run, wait_until};

const MIB: u64 = 1 << 20;

fn disk(size_bytes: u64, logical_block_bytes: u32, waits: Waits) -> ReferenceDisk {
    let contents = Rng::new(5).bytes(size_bytes as usize);
    let options = ReferenceOptions { logical_block_bytes, waits, ..Default::default() };
    ReferenceDisk::with_contents(contents, options)
}

/// Opens the export by the oldest option (EXPORT_NAME), which transfers no block sizes.
fn old_client(fixture: &Fixture) -> Raw {
    let mut raw = fixture.raw();
    raw.take::<18>();
    raw.send(&3_u32.to_be_bytes());
    raw.option(option::EXPORT_NAME, b"");
    raw.take::<10>();
    raw
}

fn write(raw: &mut Raw, flags: u16, offset: u64, data: &[u8]) {
    raw.request(command::WRITE, flags, !offset, offset, data.len() as u32);
    raw.send(data);
}

#[test]
fn random_requests_of_any_bytes_match_the_model() {
    for (sector, waits) in [(512, Waits::Never), (512, Waits::PerMille(500)), (4096, Waits::PerMille(500))] {
        let fixture = Fixture::new(disk(MIB, sector, waits));
        let mut raw = old_client(&fixture);
        let mut model = fixture.disk.contents();
        let mut rng = Rng::new(u64::from(sector));
        for round in 0..500_u32 {
            let longest = *[3, 700, 9000, 300_000].get(rng.below(4) as usize).unwrap();
            let offset = rng.below(MIB);
            let len = rng.between(1, longest).min(MIB - offset);
            let place = offset as usize..(offset + len) as usize;
            let flags = if rng.chance(1, 8) { command_flag::FUA } else { 0 };
            match rng.below(5) {
                0 | 1 => {
                    let data = rng.bytes(len as usize);
                    write(&mut raw, flags, offset, &data);
                    model[place].copy_from_slice(&data);
                }
                2 => {
                    let number = if rng.chance(1, 2) { command::TRIM } else { command::WRITE_ZEROES };
                    raw.request(number, flags, !offset, offset, len as u32);
                    model[place].fill(0);
                }
                3 => raw.request(command::CACHE, 0, !offset, offset, len as u32),
                _ => {
                    raw.request(command::READ, 0, !offset, offset, len as u32);
                    assert_eq!(raw.simple(), (0, !offset), "round {round}");
                    assert!(raw.take_vec(len as usize) == model[place], "round {round}: {offset}+{len}");
                    continue;
                }
            }
            assert_eq!(raw.simple(), (0, !offset), "round {round}");
        }
        assert!(fixture.disk.contents() == model, "sectors of {sector} bytes");
        assert!(fixture.disk.counts().flushes > 0);
    }
}

#[test]
fn reads_of_any_bytes_in_flight_together_get_their_own_data() {
    let fixture = Fixture::new(disk(MIB, 512, Waits::Always));
    let model = fixture.disk.contents();
    let mut raw = fixture.started(true);
    for number in 0..64_u64 {
        raw.request(command::READ, 0, number, number * 3001 + 1, 777);
    }
    for _ in 0..64 {
        let (kind, number, payload) = raw.chunk();
        let at = number * 3001 + 1;
        assert_eq!((kind, &payload[..8]), (chunk::OFFSET_DATA, &at.to_be_bytes()[..]));
        assert!(payload[8..] == model[at as usize..][..777]);
    }
}

#[test]
fn a_partial_write_waits_for_the_whole_one_before_it() {
    let fixture = Fixture::new(disk(MIB, 512, Waits::Always));
    let mut raw = old_client(&fixture);
    fixture.disk.hold();
    write(&mut raw, 0, 0, &[1; 1024]);
    write(&mut raw, 0, 100, &[2; 200]);
    wait_until("the first write waits", || fixture.disk.waiting() == 1);
    fixture.disk.release();
    assert_eq!((raw.simple(), raw.simple()), ((0, !0), (0, !100)));
    let contents = fixture.disk.contents();
    assert!(contents[..100].iter().chain(&contents[300..1024]).all(|byte| *byte == 1));
    assert!(contents[100..300].iter().all(|byte| *byte == 2));
}

#[test]
fn connections_that_write_one_sector_lose_no_byte() {
    let options =
        ReferenceOptions { waits: Waits::Always, delay: Duration::from_micros(50), ..Default::default() };
    let fixture = Fixture::new(ReferenceDisk::with_options(MIB, options));
    let clients = 4_u64;
    std::thread::scope(|scope| {
        for client in 0..clients {
            let mut raw = old_client(&fixture);
            scope.spawn(move || {
                for at in (client..1024).step_by(clients as usize) {
                    write(&mut raw, 0, at, &[client as u8 + 1]);
                    assert_eq!(raw.simple(), (0, !at));
                }
            });
        }
    });
    let expected: Vec<u8> = (0..1024).map(|at| (at % clients) as u8 + 1).collect();
    assert!(fixture.disk.contents()[..1024] == expected);
}

/// One connection changes parts of a sector while another one changes the whole sector. In either order, the
/// sector then has the bytes of the whole change, and the part's bytes are those of one of the two changes.
#[test]
fn a_partial_write_loses_no_whole_write_of_another_connection() {
    const ROUNDS: u64 = 600;
    for delay_us in [0, 50] {
        let options = ReferenceOptions {
            waits: Waits::PerMille(700),
            delay: Duration::from_micros(delay_us),
            ..Default::default()
        };
        let fixture = Fixture::new(ReferenceDisk::with_options(64 << 10, options));
        let (mut parts, mut whole) = (old_client(&fixture), old_client(&fixture));
        let mut rng = Rng::new(delay_us);
        for round in 0..ROUNDS {
            let sector = rng.below(4) * 512;
            let mark = round as u8 | 1;
            let before = fixture.disk.contents()[sector as usize..][..512].to_vec();
            let clears = rng.below(3);
            let new = if clears == 0 { before[0].wrapping_add(1) | 1 } else { 0 };
            let first = rng.chance(1, 2);
            for is_part in [first, !first] {
                if is_part {
                    write(&mut parts, 0, sector + 100, &[mark; 50]);
                    write(&mut parts, 0, sector + 300, &[mark; 1]);
                } else if clears == 0 {
                    write(&mut whole, 0, sector, &[new; 512]);
                } else {
                    let number = if clears == 1 { command::TRIM } else { command::WRITE_ZEROES };
                    whole.request(number, 0, !sector, sector, 512);
                }
            }
            assert_eq!(whole.simple(), (0, !sector));
            assert_eq!((parts.simple().0, parts.simple().0), (0, 0));
            let contents = fixture.disk.contents();
            let found = &contents[sector as usize..][..512];
            let is_kept = |(at, byte): (usize, &u8)| {
                *byte == new || ((100..150).contains(&at) || at == 300) && *byte == mark
            };
            assert!(found.iter().enumerate().all(is_kept), "round {round}: {new} and {mark} gave {found:?}");
        }
    }
}

/// Neither kind of write starves while the other kind continues without a pause.
#[test]
fn partial_and_whole_writes_of_several_connections_all_end() {
    let options = ReferenceOptions {
        waits: Waits::PerMille(500),
        delay: Duration::from_micros(20),
        ..Default::default()
    };
    let fixture = Fixture::new(ReferenceDisk::with_options(MIB, options));
    std::thread::scope(|scope| {
        for client in 0..4_u64 {
            let mut raw = old_client(&fixture);
            scope.spawn(move || {
                let len = if client < 2 { 700 } else { 512 };
                for burst in 0..20_u64 {
                    for n in 0..32 {
                        write(
                            &mut raw,
                            0,
                            (client * 400 + burst * 32 + n) * 512,
                            &[client as u8 + 1; 700][..len],
                        );
                    }
                    for _ in 0..32 {
                        assert_eq!(raw.simple().0, 0);
                    }
                }
            });
        }
    });
    let contents = fixture.disk.contents();
    for sector in 0..1000_usize {
        let owner = contents[sector * 512];
        assert!(contents[sector * 512..][..100].iter().all(|byte| *byte == owner), "sector {sector}");
    }
}

#[test]
fn requests_of_64_mib_are_carried_out_in_parts() {
    let fixture = Fixture::new(disk(72 * MIB, 512, Waits::Never));
    let before = fixture.disk.contents();
    let (offset, len) = (4099, 64 * MIB as usize);
    let data = Rng::new(9).bytes(len);
    let mut raw = old_client(&fixture);
    write(&mut raw, command_flag::FUA, offset, &data);
    assert_eq!(raw.simple(), (0, !offset));
    // No part is longer than the receive buffer, so the data needs no other memory.
    assert!(fixture.disk.counts().writes >= 256, "{:?}", fixture.disk.counts());
    let contents = fixture.disk.contents();
    assert!(contents[4099..][..len] == data, "the data differs");
    assert!(contents[..4099] == before[..4099] && contents[4099 + len..] == before[4099 + len..]);

    raw.request(command::READ, 0, 7, offset, len as u32);
    wait_until("the read has begun", || fixture.server.shared_bytes_used() > 0);
    assert!(fixture.server.shared_bytes_used() <= MIB);
    assert_eq!(raw.simple(), (0, 7));
    assert!(raw.take_vec(len) == data, "the read differs");

    let mut chunks = fixture.started(true);
    chunks.request(command::READ, 0, 8, offset, len as u32);
    let mut found = vec![0; len];
    let mut is_last = false;
    while !is_last {
        let ReplyHead::Chunk { flags, kind, cookie } =
            ReplyHead::decode(&chunks.take::<REPLY_BYTES>()).unwrap()
        else {
            panic!("a simple reply to a read");
        };
        assert_eq!((kind, cookie), (chunk::OFFSET_DATA, 8));
        is_last = flags == chunk::FLAG_DONE;
        let bytes = u32::from_be_bytes(chunks.take()) as usize - 8;
        let at = (u64::from_be_bytes(chunks.take()) - offset) as usize;
        found[at..at + bytes].copy_from_slice(&chunks.take_vec(bytes));
    }
    assert!(found == data, "the read in chunks differs");
    chunks.request(command::READ, command_flag::DF, 9, offset, len as u32);
    assert_eq!(chunks.error().0, 75);
    chunks.request(command::READ, 0, 10, 0, 512);
    assert_eq!(chunks.chunk().1, 10);
}

#[test]
fn a_part_that_fails_is_the_error_of_its_request() {
    let fixture = Fixture::new(disk(48 * MIB, 512, Waits::PerMille(300)));
    let broken = ByteRange::new(20 * MIB, 4096).unwrap();
    fixture.disk.fail(broken, IoErrorKind::Device);
    let len = 40 * MIB as u32;
    let mut raw = fixture.started(true);
    write(&mut raw, 0, 1, &vec![3; len as usize]);
    assert_eq!(raw.error().0, 5, "its data is taken all the same");
    raw.request(command::TRIM, 0, 2, 20 * MIB + 1, 100);
    assert_eq!(raw.error().0, 5);
    raw.request(command::READ, 0, 3, 20 * MIB - 1, 2);
    assert_eq!(raw.error().0, 5);
    raw.request(command::READ, 0, 4, 0, 512);
    assert_eq!(raw.chunk().1, 4);

    // A simple reply has announced the data already: the server closes the connection, so that the client
    // does not take other bytes for the data.
    let mut raw = old_client(&fixture);
    raw.request(command::READ, 0, 5, 0, len);
    assert_eq!(raw.simple(), (0, 5));
    let mut rest = Vec::new();
    let _ = std::io::Read::read_to_end(&mut raw.0, &mut rest);
    assert_eq!(rest.len() as u64, 20 * MIB);
    fixture.is_alive();
}

#[test]
fn extents_of_any_bytes_begin_and_end_where_asked() {
    let fixture = Fixture::new(ReferenceDisk::new(MIB));
    let mut raw = fixture.started(true);
    raw.request(command::WRITE, 0, 1, 4096, 4096);
    raw.send(&[1; 4096]);
    assert_eq!(raw.simple(), (0, 1));
    raw.request(command::BLOCK_STATUS, 0, 2, 4000, 5000);
    let (_, extents) = decode_block_status(&raw.chunk().2).unwrap();
    assert_eq!(extents, [(96, 3), (4096, 0), (808, 3)]);
}

#[test]
fn libnbd_without_its_checks_writes_and_reads_any_bytes() {
    let fixture = Fixture::new(disk(48 * MIB, 512, Waits::PerMille(300)));
    let mut model = fixture.disk.contents();
    let script = format!(
        "import nbd\n\
         h = nbd.NBD()\n\
         h.set_strict_mode(0)\n\
         h.connect_uri({:?})\n\
         h.pwrite(b'x' * 1000, 12345)\n\
         h.zero(333, 70001)\n\
         h.trim(5000, 90001, nbd.CMD_FLAG_FUA)\n\
         assert h.pread(1002, 12344)[1:-1] == b'x' * 1000\n\
         cookies = [h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray([n] * 7)), 200000 + 7 * n) for n in range(64)]\n\
         while h.aio_in_flight() > 0: h.poll(-1)\n\
         assert all(h.aio_command_completed(cookie) for cookie in cookies)\n\
         assert h.pread(40 * 1024 * 1024 + 1, 3)[12342:13342] == b'x' * 1000\n\
         h.shutdown()\n",
        fixture.server.uri()
    );
    run("python3-libnbd", "/usr/bin/python3", &["-c", &script]);
    model[12345..][..1000].fill(b'x');
    model[70001..][..333].fill(0);
    model[90001..][..5000].fill(0);
    for number in 0..64 {
        model[200_000 + 7 * number..][..7].fill(number as u8);
    }
    assert!(fixture.disk.contents() == model);
}
