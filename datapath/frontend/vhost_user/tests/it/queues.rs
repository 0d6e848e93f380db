//! The device as a well-behaved guest sees it: requests in all shapes, interrupts, stopping, and the other
//! features.

mod closed;

use crate::guest::{
    self, F_CONFIG_WCE, F_EVENT_IDX, F_FLUSH, F_INDIRECT, FREE, GUEST, Guest, INDIRECT, NEXT, SIZE, WRITE,
    encode,
};
use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, Geometry, IoError, IoErrorKind, Op, Request, blocking,
};
use headwater_testkit::vhost::{Setup, VhostDisk};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Waits, wait_until};
use headwater_vhost_user::{BindError, Limits, Options, Positions, Server};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag};

const OK: u8 = 0;
const IOERR: u8 = 1;

struct Bench {
    _dir: tempfile::TempDir,
    disk: Arc<ReferenceDisk>,
    server: Server,
}

impl Bench {
    fn new(options: ReferenceOptions) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let disk = Arc::new(ReferenceDisk::with_options(1 << 20, options));
        let options = Options {
            name: "lab-1".into(),
            serial: "a serial number that is too long".into(),
            limits: Limits { no_space_retry_ms: 5, ..Limits::default() },
            ..Options::default()
        };
        let server = Server::bind(&dir.path().join("disk"), Arc::clone(&disk) as _, options).unwrap();
        Self { _dir: dir, disk, server }
    }

    fn path(&self) -> &Path {
        self.server.path()
    }
}

fn late() -> ReferenceOptions {
    ReferenceOptions { waits: Waits::Always, ..Default::default() }
}

/// Offers a write of one sector full of `byte`, with chain and buffers of its own.
fn offer_write(guest: &mut Guest, number: u16, sector: u64, byte: u8) {
    let at = FREE + 0x1000 * u64::from(number);
    guest.write(at, &[&1_u32.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes(), &[byte; 512]].concat());
    guest.write(at + 0x800, &[0xee]);
    guest.chain(number * 2, &[(at, 16 + 512, 0), (at + 0x800, 1, WRITE)]);
    guest.offer(number * 2);
}

fn status_of(guest: &Guest, number: u16) -> u8 {
    guest.read(FREE + 0x1000 * u64::from(number) + 0x800, 1)[0]
}

#[test]
fn requests_may_be_divided_in_any_way() {
    let bench = Bench::new(ReferenceOptions::default());
    let mut guest = Guest::start(bench.path());
    let data: Vec<u8> = (0..8192_u32).map(|i| (i * 31 / 7) as u8).collect();
    assert_eq!(guest.request(1, 8, &data, 0).0, OK);
    assert_eq!(&bench.disk.contents()[4096..][..8192], data);
    assert_eq!(guest.request(0, 8, &[], 8192), (OK, data.clone()));

    // The header in three parts, one of them empty; data in odd parts, the last of which also has the status.
    guest.write(FREE, &[&0_u32.to_le_bytes()[..], &[0; 4], &8_u64.to_le_bytes()].concat());
    let out = FREE + 0x2000;
    let parts = [
        (FREE, 3, 0),
        (FREE, 0, 0),
        (FREE + 3, 12, 0),
        (FREE + 15, 1, 0),
        (out, 1000, WRITE),
        (out + 1000, 5, WRITE),
        (out + 1005, 8192 - 1005 + 1, WRITE),
    ];
    guest.chain(5, &parts);
    guest.offer(5);
    guest.kick();
    assert_eq!(guest.next_used(), (5, 8193));
    assert_eq!(guest.read(out, 8193), [&data[..], &[OK]].concat());

    // The same in an indirect table.
    guest.write(out, &[0xee; 8193]);
    let mut table: Vec<_> = Vec::new();
    for (number, (addr, len, flags)) in parts.iter().enumerate() {
        table.push((*addr, *len, flags | NEXT, number as u16 + 1));
    }
    table.last_mut().unwrap().2 = WRITE;
    guest.write(FREE + 0x1000, &encode(&table));
    guest.descriptor(1, (FREE + 0x1000, 16 * table.len() as u32, INDIRECT, 0));
    guest.offer(1);
    guest.kick();
    assert_eq!(guest.next_used(), (1, 8193));
    assert_eq!(guest.read(out, 8193), [&data[..], &[OK]].concat());
}

#[test]
fn writes_that_came_together_are_stored_together_and_each_has_its_own_answer() {
    const BLOCKS: usize = 8192;
    let bench = Bench::new(ReferenceOptions::default());
    let mut guest = Guest::start(bench.path());
    // Several rounds, because the queue's thread may be so quick that it finds one request at a time.
    for round in 0_u8..=255 {
        let byte = |number: u16| round.wrapping_mul(11).wrapping_add(number as u8);
        // The last three are invalid: past the end, not of whole blocks, out of memory. Each fails by itself.
        for (number, sector) in [0_u64, 16, 32, 48, 2048 - 8, 1025, 512].into_iter().enumerate() {
            let number = number as u16;
            let at = FREE + 0x4000 * u64::from(number);
            let header = [&1_u32.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
            guest.write(at, &[&header[..], &[byte(number); BLOCKS]].concat());
            guest.write(at + 0x3000, &[0xee]);
            let status = (at + 0x3000, 1, WRITE);
            match number {
                6 => guest.chain(12, &[(at, 16, 0), (1 << 40, 4096, 0), status]),
                _ => guest.chain(number * 2, &[(at, 16 + BLOCKS as u32, 0), status]),
            }
            guest.offer(number * 2);
        }
        guest.kick();
        let mut answered: Vec<_> = (0..7).map(|_| guest.next_used().0 / 2).collect();
        answered.sort_unstable();
        assert_eq!(answered, (0..7).collect::<Vec<_>>());
        let statuses = (0..7).map(|number| guest.read(FREE + 0x4000 * number + 0x3000, 1)[0]);
        assert_eq!(statuses.collect::<Vec<_>>(), [OK, OK, OK, OK, IOERR, OK, IOERR]);
        let mut expected = vec![0; 1 << 20];
        for (number, at) in [(0, 0), (1, BLOCKS), (2, 2 * BLOCKS), (3, 3 * BLOCKS), (5, 512 * 1025)] {
            expected[at..at + BLOCKS].fill(byte(number));
        }
        assert!(bench.disk.contents() == expected);
        if bench.disk.counts().together > 0 {
            return;
        }
    }
    panic!("no writes were ever given to the disk together");
}

/// A write whose data is in buffers of these lengths, apart from each other, the last one at the lowest
/// address. Returns the status.
fn write_scattered(guest: &mut Guest, sector: u64, lengths: &[u32], data: &[u8]) -> u8 {
    let (header, table, status, places) = (FREE, FREE + 0x1000, FREE + 0x3000, FREE + 0x10000);
    guest.write(header, &[&1_u32.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat());
    guest.write(status, &[0xee]);
    let mut parts = vec![(header, 16, NEXT, 1)];
    let mut at = 0;
    for (number, len) in lengths.iter().enumerate() {
        let place = places + 0x11000 * (lengths.len() - 1 - number) as u64;
        guest.write(place, &data[at..at + *len as usize]);
        at += *len as usize;
        parts.push((place, *len, NEXT, number as u16 + 2));
    }
    parts.push((status, 1, WRITE, 0));
    guest.write(table, &encode(&parts));
    guest.descriptor(0, (table, 16 * parts.len() as u32, INDIRECT, 0));
    guest.offer(0);
    guest.kick();
    assert_eq!(guest.next_used(), (0, 1));
    guest.read(status, 1)[0]
}

#[test]
fn the_blocks_of_a_scattered_write_are_stored_together() {
    let shapes: [&[u32]; 7] = [
        &[4096; 2],
        &[4096; 16],
        &[4096; 40],
        &[4096, 8192, 512],
        &[4096, 4096, 65536, 4096, 4096],
        &[69632, 4096, 32768, 32768, 4096],
        // Not of whole blocks.
        &[4096, 512, 4096],
    ];
    let some_wait = ReferenceOptions { waits: Waits::PerMille(100), ..Default::default() };
    for (options, features) in [
        (ReferenceOptions::default(), F_FLUSH | F_INDIRECT),
        (some_wait, F_FLUSH | F_INDIRECT),
        // Write-through: each buffer is made durable by itself.
        (ReferenceOptions::default(), F_INDIRECT),
    ] {
        let waits = options.waits;
        let bench = Bench::new(options);
        let mut guest = Guest::with_features(bench.path(), features);
        let mut expected = vec![0; 1 << 20];
        let mut buffers = 0;
        for round in 0..20_usize {
            for (number, lengths) in shapes.iter().enumerate() {
                let len = lengths.iter().sum::<u32>() as usize;
                let at = BLOCK * ((round * 37 + number * 11) % (256 - 48));
                let data: Vec<u8> = (at..at + len).map(|i| (i / 64 * 7 + i + round * 13) as u8).collect();
                assert_eq!(write_scattered(&mut guest, at as u64 / 512, lengths, &data), OK);
                expected[at..at + len].copy_from_slice(&data);
                assert!(bench.disk.contents() == expected, "{waits:?}, round {round}, {lengths:?}");
                buffers += if number == 6 { 1 } else { lengths.len() as u64 };
            }
        }
        let counts = bench.disk.counts();
        match (waits, features & F_FLUSH) {
            (Waits::Never, 0) => assert_eq!((counts.fua, counts.together), (buffers, 0)),
            // No block is written twice.
            (Waits::Never, _) => {
                assert_eq!((counts.writes, counts.submitted), (buffers, 0));
                assert!(
                    (buffers / 2..buffers).contains(&counts.together),
                    "{} of {buffers}",
                    counts.together
                );
            }
            _ => assert!(counts.together > 0 && counts.submitted > 0, "{counts:?}"),
        }
    }
}

#[test]
fn flushes_discards_zero_writes_and_the_serial_number() {
    for options in [ReferenceOptions::default(), late()] {
        let bench = Bench::new(options);
        let mut guest = Guest::start(bench.path());
        assert_eq!(guest.request(1, 0, &[5; 16384], 0).0, OK);
        let range = |sector: u64, sectors: u32, flags: u32| {
            [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
        };
        let discard = [range(0, 1, 0), range(2, 2, 0), range(8, 8, 0)].concat();
        assert_eq!(guest.request(11, 0, &discard, 0).0, OK);
        assert_eq!(guest.request(13, 0, &[range(16, 4, 0), range(24, 4, 1)].concat(), 0).0, OK);
        assert_eq!(guest.request(4, 0, &[], 0).0, OK);
        let contents = bench.disk.contents();
        let zero: Vec<bool> = (0..32).map(|sector| contents[sector * 512] == 0).collect();
        let expected: Vec<bool> =
            (0..32).map(|s| matches!(s, 0 | 2 | 3 | 8..=15 | 16..=19 | 24..=27)).collect();
        assert_eq!(zero, expected);
        let counts = bench.disk.counts();
        assert_eq!((counts.discards, counts.zeroes, counts.unmapping_zeroes, counts.flushes), (3, 2, 1, 1));
        let (status, id) = guest.request(8, 0, &[], 20);
        assert_eq!((status, &id[..]), (OK, &b"a serial number that"[..]));
        assert_eq!(guest.request(8, 0, &[], 8).1, b"a serial");
    }
}

#[test]
fn a_failing_device_returns_errors_and_continues() {
    for options in [ReferenceOptions::default(), late()] {
        let bench = Bench::new(options);
        let mut guest = Guest::start(bench.path());
        bench.disk.fail(ByteRange::new(4096, 4096).unwrap(), IoErrorKind::Device);
        assert_eq!(guest.request(0, 8, &[], 512).0, IOERR);
        assert_eq!(guest.request(1, 8, &[1; 512], 0).0, IOERR);
        assert_eq!(guest.request(1, 0, &[1; 512], 0).0, OK);
        bench.disk.heal();
        assert_eq!(guest.request(0, 8, &[], 512), (OK, vec![0; 512]));
    }
}

#[test]
fn a_write_that_finds_no_room_waits_until_there_is_and_holds_nobody_up() {
    for options in [ReferenceOptions::default(), late()] {
        let bench = Bench::new(options);
        let mut guest = Guest::start(bench.path());
        bench.disk.fail(ByteRange::new(4096, 4096).unwrap(), IoErrorKind::NoSpace);
        offer_write(&mut guest, 0, 8, 1);
        offer_write(&mut guest, 1, 0, 2);
        guest.kick();
        assert_eq!(guest.next_used().0, 2, "the write that needs no room is answered first");
        let tries = bench.disk.counts().writes;
        wait_until("it is tried again", || bench.disk.counts().writes >= tries + 3);
        assert_eq!(status_of(&guest, 0), 0xee);
        wait_until("one write waits for room", || bench.server.waiting_writes() == 1);
        bench.disk.heal();
        assert_eq!(guest.next_used().0, 0);
        assert_eq!(bench.server.waiting_writes(), 0);
        assert_eq!(status_of(&guest, 0), OK);
        assert_eq!(bench.disk.contents()[4096], 1);

        // If the machine stops its disk meanwhile, the write stays in the ring, and stopping does not block.
        bench.disk.fail(ByteRange::new(4096, 4096).unwrap(), IoErrorKind::NoSpace);
        offer_write(&mut guest, 2, 8, 3);
        guest.kick();
        let tries = bench.disk.counts().writes;
        wait_until("it is tried again", || bench.disk.counts().writes >= tries + 2);
        assert_eq!((guest.stop_queue(), bench.server.waiting_writes()), (2, 0));
        assert_eq!(status_of(&guest, 2), 0xee);
    }
}

/// Number of 4 KiB blocks that these tests' limit admits at a time.
const LET_IN: usize = 4;
const BLOCK: usize = 4096;

fn with_little_in_flight(dir: &Path) -> (Arc<ReferenceDisk>, Server) {
    let disk = Arc::new(ReferenceDisk::with_options(1 << 20, late()));
    let limits = Limits { bytes_in_flight: LET_IN * BLOCK, no_space_retry_ms: 5, ..Limits::default() };
    let options = Options { limits, ..Options::default() };
    let server = Server::bind(&dir.join("s"), Arc::clone(&disk) as _, options).unwrap();
    (disk, server)
}

/// Sends the disk a write for each of its blocks; the receiver gets the results.
fn write_blocks(client: &VhostDisk, blocks: usize) -> Receiver<bool> {
    let (sender, results) = channel();
    for number in 0..blocks {
        let range = ByteRange::new((number * BLOCK) as u64, BLOCK as u64).unwrap();
        let sender = sender.clone();
        let done = Completion::new(move |outcome| {
            // The receiver is gone if a check has failed.
            let _ = sender.send(outcome.result.is_ok());
        });
        client.submit(Request::Write { range, buffer: vec![number as u8 + 1; BLOCK], fua: false }, done);
    }
    results
}

#[test]
fn data_in_flight_stays_within_the_limit() {
    for queues in [1, 2, 4] {
        let dir = tempfile::tempdir().unwrap();
        let (disk, server) = with_little_in_flight(dir.path());
        let client = VhostDisk::connect(server.path(), Setup { queues, event_idx: true });
        disk.hold();
        // As many as the client sends at once, so that all of them are in the rings.
        let blocks = 16 * queues;
        let results = write_blocks(&client, blocks);
        wait_until("as many as may are let in", || disk.waiting() >= LET_IN);
        // Time for more writes to arrive, if the limit did not hold.
        std::thread::sleep(std::time::Duration::from_millis(200));
        assert_eq!(disk.waiting(), LET_IN, "{queues} queues");
        disk.release();
        assert_eq!(results.iter().take(blocks).filter(|ok| *ok).count(), blocks);
        assert_eq!(disk.most_waiting(), LET_IN as u64, "{queues} queues");
        let contents = disk.contents();
        assert!((0..blocks).all(|number| contents[number * BLOCK] == number as u8 + 1));
    }
}

/// A disk whose writes wait, like those of a full write cache, while all other requests are answered.
struct FullDisk {
    disk: ReferenceDisk,
    waiting: Mutex<Vec<(Request, Completion)>>,
    is_full: AtomicBool,
}

impl FullDisk {
    /// Fails the waiting writes, like a volume that is closed.
    fn close(&self) {
        for (request, done) in std::mem::take(&mut *self.waiting.lock().unwrap()) {
            let closed = IoError::new(IoErrorKind::Closed, "the disk is closed");
            done.complete(Err(closed), request.into_buffer());
        }
    }

    fn make_room(&self) {
        self.is_full.store(false, Ordering::SeqCst);
        for (request, done) in std::mem::take(&mut *self.waiting.lock().unwrap()) {
            self.disk.submit(request, done);
        }
    }
}

impl Device for FullDisk {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        match op {
            Op::Write { .. } => Ok(Attempt::MustWait),
            other => self.disk.try_now(other),
        }
    }

    fn submit(&self, request: Request, done: Completion) {
        let mut waiting = self.waiting.lock().unwrap();
        if matches!(request, Request::Write { .. }) && self.is_full.load(Ordering::SeqCst) {
            return waiting.push((request, done));
        }
        drop(waiting);
        self.disk.submit(request, done);
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        self.disk.extents(range, max_extents)
    }
}

#[test]
fn reads_and_discards_continue_while_writes_wait() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(FullDisk {
        disk: ReferenceDisk::with_options(1 << 20, late()),
        waiting: Mutex::default(),
        is_full: AtomicBool::new(true),
    });
    let limits = Limits { bytes_in_flight: LET_IN * BLOCK, ..Limits::default() };
    let server =
        Server::bind(&dir.path().join("s"), Arc::clone(&disk) as _, Options { limits, ..Options::default() });
    let server = server.unwrap();
    let client = VhostDisk::connect(server.path(), Setup { queues: 1, event_idx: true });
    let results = write_blocks(&client, 12);
    wait_until("as many as may are let in", || disk.waiting.lock().unwrap().len() >= LET_IN);
    let mut block = [0xee; BLOCK];
    for number in 0..8 {
        blocking::read(&client, (20 + number) * BLOCK as u64, &mut block).unwrap();
        assert_eq!(block, [0; BLOCK]);
    }
    let range = ByteRange::new(20 * BLOCK as u64, BLOCK as u64).unwrap();
    blocking::wait(&client, Request::Discard { range }).unwrap();
    assert_eq!(disk.waiting.lock().unwrap().len(), LET_IN, "no more than the limit says");
    assert!(results.try_recv().is_err());
    disk.make_room();
    assert_eq!(results.iter().take(12).filter(|ok| *ok).count(), 12);
    let contents = disk.disk.contents();
    assert!((0..12).all(|number| contents[number * BLOCK] == number as u8 + 1));
}

#[test]
fn stopping_a_queue_leaves_writes_in_the_ring_that_the_disk_has_not() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(FullDisk {
        disk: ReferenceDisk::new(1 << 20),
        waiting: Mutex::default(),
        is_full: AtomicBool::new(true),
    });
    let limits = Limits { bytes_in_flight: 2 * 512, ..Limits::default() };
    let server =
        Server::bind(&dir.path().join("s"), Arc::clone(&disk) as _, Options { limits, ..Options::default() });
    let server = server.unwrap();
    let mut guest = Guest::start(server.path());
    for number in 0..7 {
        offer_write(&mut guest, number, u64::from(number), number as u8 + 1);
    }
    guest.kick();
    wait_until("two requests reach the disk", || disk.waiting.lock().unwrap().len() >= 2);
    let stopped = std::thread::scope(|scope| {
        scope.spawn(|| {
            // The server has received the message by then, on a busy host too.
            std::thread::sleep(std::time::Duration::from_secs(10));
            disk.make_room();
        });
        guest.stop_queue()
    });
    assert_eq!(stopped, 2);
    assert_eq!(
        (0..7).map(|number| status_of(&guest, number)).collect::<Vec<_>>(),
        [0, 0, 0xee, 0xee, 0xee, 0xee, 0xee]
    );
    guest.continue_queue(2);
    guest.kick();
    let used: Vec<u16> = (0..7).map(|_| guest.next_used().0).collect();
    assert_eq!(used, [0, 2, 4, 6, 8, 10, 12]);
    assert!((0..7).all(|number| disk.disk.contents()[number * 512] == number as u8 + 1));
}

#[test]
fn stopping_a_queue_leaves_writes_in_the_ring_in_whatever_order_they_wait() {
    const SECTORS: u64 = BLOCK as u64 / 512;
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(FullDisk {
        disk: ReferenceDisk::new(1 << 20),
        waiting: Mutex::default(),
        is_full: AtomicBool::new(true),
    });
    let limits = Limits { bytes_in_flight: 1, ..Limits::default() };
    let server =
        Server::bind(&dir.path().join("s"), Arc::clone(&disk) as _, Options { limits, ..Options::default() });
    let server = server.unwrap();
    let mut guest = Guest::start(server.path());
    assert_eq!(guest.stop_queue(), 0);
    // All are in the ring before the queue starts, so that they are one batch. Those in one buffer are
    // combined, and so they wait after the others.
    let mut heads = Vec::new();
    let mut next = 0;
    for number in 0..6_u16 {
        let at = FREE + 0x2000 * u64::from(number);
        let header =
            [&1_u32.to_le_bytes()[..], &[0; 4], &(u64::from(number) * SECTORS).to_le_bytes()].concat();
        guest.write(at, &[&header[..], &[number as u8 + 1; BLOCK], &[0xee]].concat());
        let (data, status) = ((at, 16 + BLOCK as u32, 0), (at + 16 + BLOCK as u64, 1, WRITE));
        let parts = match number % 2 {
            0 => vec![data, status],
            _ => vec![(at, 1000, 0), (at + 1000, 16 + BLOCK as u32 - 1000, 0), status],
        };
        guest.chain(next, &parts);
        guest.offer(next);
        heads.push(next);
        next += parts.len() as u16;
    }
    guest.continue_queue(0);
    guest.kick();
    // The disk gets the second one first.
    wait_until("a request reaches the disk", || !disk.waiting.lock().unwrap().is_empty());
    let stopped = std::thread::scope(|scope| {
        scope.spawn(|| {
            // The server has received the message by then, on a busy host too.
            std::thread::sleep(std::time::Duration::from_secs(10));
            disk.make_room();
        });
        guest.stop_queue()
    });
    assert_eq!((stopped, guest.used_index()), (2, 2), "all that came after it is in the ring");
    let statuses = |guest: &Guest| {
        let status = |number: u64| guest.read(FREE + 0x2000 * number + 16 + BLOCK as u64, 1)[0];
        (0..6).map(status).collect::<Vec<u8>>()
    };
    assert_eq!(statuses(&guest), [0, 0, 0xee, 0xee, 0xee, 0xee]);
    guest.continue_queue(2);
    guest.kick();
    let mut used: Vec<u16> = (0..6).map(|_| guest.next_used().0).collect();
    used.sort_unstable();
    assert_eq!((used, statuses(&guest)), (heads, vec![OK; 6]));
    assert!((0..6).all(|number| disk.disk.contents()[number * BLOCK] == number as u8 + 1));
}

#[test]
fn stopping_a_queue_leaves_writes_in_the_ring_that_found_no_room() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(ReferenceDisk::with_options(1 << 20, late()));
    let limits = Limits { no_space_retry_ms: 3_600_000, ..Limits::default() };
    let options = Options { limits, ..Options::default() };
    let server = Server::bind(&dir.path().join("s"), Arc::clone(&disk) as _, options).unwrap();
    let mut guest = Guest::start(server.path());
    disk.fail(ByteRange::new(0, 1 << 19).unwrap(), IoErrorKind::NoSpace);
    let offer = |guest: &mut Guest, numbers: std::ops::Range<u16>| {
        for number in numbers {
            offer_write(guest, number, u64::from(number), number as u8 + 1);
        }
        guest.kick();
    };
    let wait_for_starved = |count| {
        wait_until("so many wait for room", || server.waiting_writes() == count);
    };
    let statuses = |guest: &Guest| (0..5).map(|number| status_of(guest, number)).collect::<Vec<_>>();
    offer(&mut guest, 0..5);
    wait_for_starved(5);
    assert_eq!((guest.stop_queue(), server.waiting_writes()), (0, 0));
    assert_eq!(statuses(&guest), [0xee; 5]);
    guest.continue_queue(0);
    guest.kick();
    wait_for_starved(5);
    // Because a later request was answered, stopping must answer them too.
    offer_write(&mut guest, 5, 1500, 6);
    guest.kick();
    assert_eq!(guest.next_used().0, 10);
    offer(&mut guest, 6..7);
    wait_for_starved(6);
    assert_eq!((guest.stop_queue(), server.waiting_writes()), (6, 0));
    assert_eq!((statuses(&guest), status_of(&guest, 6)), (vec![IOERR; 5], 0xee));
    (0..5).for_each(|_| assert!(guest.next_used().0 < 10));
    disk.heal();
    guest.continue_queue(6);
    guest.kick();
    assert_eq!((guest.next_used().0, status_of(&guest, 6)), (12, OK));
}

#[test]
fn writes_that_found_no_room_do_not_all_come_back_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, server) = with_little_in_flight(dir.path());
    let client = VhostDisk::connect(server.path(), Setup { queues: 1, event_idx: true });
    disk.fail(ByteRange::new(0, 1 << 20).unwrap(), IoErrorKind::NoSpace);
    let results = write_blocks(&client, 16);
    // Some are being retried at any moment.
    wait_until("all wait for room or are tried", || {
        !(server.waiting_writes() + LET_IN < 16 || disk.counts().writes < 16)
    });
    disk.hold();
    std::thread::sleep(std::time::Duration::from_millis(200));
    disk.heal();
    disk.release();
    assert_eq!(results.iter().take(16).filter(|ok| *ok).count(), 16);
    assert_eq!((disk.most_waiting(), server.waiting_writes()), (LET_IN as u64, 0));
}

#[test]
fn stopping_a_queue_finishes_only_taken_requests() {
    let bench = Bench::new(late());
    let mut guest = Guest::start(bench.path());
    bench.disk.hold();
    for number in 0..5 {
        offer_write(&mut guest, number, u64::from(number), 1);
    }
    guest.kick();
    wait_until("five writes reach the disk", || bench.disk.waiting() >= 5);
    let disk = Arc::clone(&bench.disk);
    let releaser = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        disk.release();
    });
    assert_eq!(guest.stop_queue(), 5);
    releaser.join().unwrap();
    assert_eq!(guest.used_index(), 5);
    assert!((0..5).all(|number| status_of(&guest, number) == OK));
    assert_eq!(bench.disk.waiting(), 0);

    // Offered while the queue is stopped: received when it starts again, without a kick.
    offer_write(&mut guest, 5, 9, 4);
    assert_eq!(guest.used_index(), 5);
    guest.continue_queue(5);
    for _ in 0..6 {
        guest.next_used();
    }
    assert_eq!(status_of(&guest, 5), OK);
    assert_eq!(bench.disk.contents()[9 * 512], 4);

    // Disabling stops it in the same way, and enabling continues it.
    guest.frontend.set_vring_enable(0, false).unwrap();
    offer_write(&mut guest, 6, 10, 5);
    guest.kick();
    assert_eq!(guest.used_index(), 6);
    guest.frontend.set_vring_enable(0, true).unwrap();
    assert_eq!(guest.next_used().0, 12);
}

#[test]
fn interrupts_come_once_a_batch_and_only_when_they_are_wanted() {
    let bench = Bench::new(ReferenceOptions::default());
    let mut guest = Guest::connect(bench.path(), F_FLUSH | F_INDIRECT | F_EVENT_IDX);
    // All are in the ring before the queue starts, so that they are one batch; an interrupt is wanted after
    // the third.
    guest.start_queue(0);
    assert_eq!(guest.stop_queue(), 0);
    guest.set_used_event(2);
    for number in 0..6 {
        offer_write(&mut guest, number, 0, 1);
    }
    guest::taken(&guest.call);
    guest.continue_queue(0);
    for _ in 0..6 {
        guest.next_used();
    }
    guest.stop_queue();
    assert_eq!(guest.call.read().unwrap(), 1, "one for all");

    guest.set_used_event(100);
    offer_write(&mut guest, 0, 0, 1);
    guest.continue_queue(6);
    guest.next_used();
    guest.stop_queue();
    assert!(!guest::taken(&guest.call), "not wanted");
}

#[test]
fn indices_wrap_around() {
    let bench = Bench::new(ReferenceOptions::default());
    for features in [0, F_EVENT_IDX] {
        let mut guest = Guest::connect(bench.path(), features);
        guest.start_queue(0);
        for count in 0..u16::MAX / 2 + 50 {
            let byte = count as u8;
            assert_eq!(guest.request(1, 0, &[byte; 512], 0).0, OK);
            assert_eq!(guest.request(0, 0, &[], 512), (OK, vec![byte; 512]));
        }
        assert_eq!(guest.stop_queue(), 98);
    }
}

#[test]
fn a_guest_without_flush_or_with_write_through_gets_durable_writes() {
    let bench = Bench::new(ReferenceOptions::default());
    let mut guest = Guest::with_features(bench.path(), 0);
    guest.request(1, 0, &[1; 512], 0);
    assert_eq!(bench.disk.counts().fua, 1);
    drop(guest);
    let mut guest = Guest::with_features(bench.path(), F_FLUSH | F_CONFIG_WCE);
    guest.request(1, 0, &[1; 512], 0);
    assert_eq!(bench.disk.counts().fua, 1);
    assert_eq!(guest.config(32, 1), [1]);
    guest.frontend.set_config(32, VhostUserConfigFlags::WRITABLE, &[0]).unwrap();
    assert_eq!(guest.config(32, 1), [0]);
    guest.request(1, 0, &[1; 512], 0);
    assert_eq!(bench.disk.counts().fua, 2);
    // A reset of the guest keeps the setting, and so does a new connection of the same machine.
    guest.frontend.set_features(guest.frontend.get_features().unwrap()).unwrap();
    guest.request(1, 0, &[1; 512], 0);
    assert_eq!(bench.disk.counts().fua, 3);
    drop(guest);
    let mut guest = Guest::with_features(bench.path(), F_FLUSH | F_CONFIG_WCE);
    assert_eq!(guest.config(32, 1), [0]);
    guest.request(1, 0, &[1; 512], 0);
    assert_eq!(bench.disk.counts().fua, 4);
    // No other field can be written, and no other value; the guest keeps its disk.
    for (offset, bytes) in [(0, &[7][..]), (32, &[2][..]), (32, &[1, 0][..])] {
        guest.frontend.set_config(offset, VhostUserConfigFlags::WRITABLE, bytes).unwrap();
    }
    assert_eq!((guest.config(0, 8), guest.config(32, 2)), (2048_u64.to_le_bytes().to_vec(), vec![0, 0]));
    assert_eq!(guest.request(1, 0, &[1; 512], 0).0, OK);
}

#[test]
fn a_driver_may_choose_write_through_before_it_says_which_features_it_takes() {
    let bench = Bench::new(ReferenceOptions::default());
    let memory = guest::sealable_memory();
    let features = F_FLUSH | F_CONFIG_WCE;
    let mut guest = Guest::connect_after(bench.path(), features, memory, |frontend| {
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        frontend.set_config(32, VhostUserConfigFlags::WRITABLE, &[0]).unwrap();
        assert_eq!(frontend.get_config(32, 1, VhostUserConfigFlags::empty(), &[0]).unwrap().1, [0]);
    });
    guest.start_queue(0);
    assert_eq!(guest.request(1, 0, &[1; 512], 0).0, OK);
    assert_eq!(bench.disk.counts().fua, 1);
}

#[test]
fn the_configuration_space_is_as_long_as_it_is_asked_for() {
    let bench = Bench::new(ReferenceOptions::default());
    let mut guest = Guest::start(bench.path());
    let space = guest.config(0, 100);
    assert_eq!(space[..8], (2048_u64).to_le_bytes());
    assert_eq!(space[34..36], 64_u16.to_le_bytes());
    assert!(space[60..].iter().all(|byte| *byte == 0));
    assert_eq!(guest.frontend.get_queue_num().unwrap(), 64);
}

#[test]
fn stopping_the_server_answers_taken_requests() {
    let bench = Bench::new(late());
    let mut guest = Guest::start(bench.path());
    bench.disk.hold();
    for number in 0..SIZE / 2 {
        offer_write(&mut guest, number, u64::from(number), 1);
    }
    guest.kick();
    wait_until("all writes reach the disk", || bench.disk.waiting() >= usize::from(SIZE / 2));
    std::thread::scope(|scope| {
        scope.spawn(|| bench.server.stop());
        std::thread::sleep(std::time::Duration::from_millis(50));
        bench.disk.release();
    });
    assert_eq!(guest.used_index(), SIZE / 2);
    assert!(!bench.path().exists());
    bench.server.stop();
}

#[test]
fn a_device_that_never_answers_does_not_keep_the_server_from_stopping() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(ReferenceDisk::with_options(1 << 20, late()));
    disk.hold();
    let limits = Limits { stop_timeout_ms: 50, ..Limits::default() };
    let options = Options { limits, ..Options::default() };
    let server = Server::bind(&dir.path().join("s"), Arc::clone(&disk) as _, options).unwrap();
    let mut guest = Guest::start(server.path());
    offer_write(&mut guest, 0, 0, 1);
    guest.kick();
    wait_until("the write reaches the disk", || disk.waiting() != 0);
    server.stop();
    assert_eq!(guest.used_index(), 0);
    disk.release();
    assert_eq!(guest.next_used().0, 0, "the queue ends by itself later");
}

#[test]
fn a_running_machine_continues_only_on_its_own_disk() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(ReferenceDisk::new(1 << 20));
    let path = dir.path().join("s");
    let bind = |resume| Server::bind(&path, Arc::clone(&disk) as _, Options { resume, ..Options::default() });
    let server = bind(None).unwrap();
    let guest = Guest::connect(server.path(), 0);
    assert!(!guest.try_start(7, 7), "it has used another server");
    // A machine that starts from its beginning is accepted, and then it may stop and continue.
    let mut guest = Guest::start(server.path());
    assert_eq!(guest.request(1, 0, &[1; 512], 0).0, OK);
    assert_eq!(guest.stop_queue(), 1);
    guest.continue_queue(1);
    assert_eq!(guest.request(0, 0, &[], 512), (OK, vec![1; 512]));
    drop(guest);
    // Dropping a server stops it. A second stop changes nothing.
    server.stop();
    let stood = server.positions();
    server.stop();
    assert_eq!((stood.to_string(), server.positions()), ("2".into(), stood.clone()));
    drop(server);
    let goes_on = |resume: &Positions, base, used| {
        let server = bind(Some(resume.clone())).unwrap();
        let goes_on = Guest::connect(server.path(), 0).try_start(base, used);
        server.stop();
        (goes_on, server.positions())
    };
    assert_eq!(goes_on(&stood, 3, 3), (false, stood.clone()), "it stands elsewhere");
    assert_eq!(goes_on(&stood, 2, 2), (true, stood.clone()));
    // The front-end read the ring before the last answer was written.
    assert_eq!(goes_on(&stood, 1, 2), (true, stood.clone()));
    assert_eq!(goes_on(&stood, 1, 1), (false, stood.clone()), "answers are missing");
    assert!(!goes_on(&Positions::parse("- 2").unwrap(), 2, 2).0, "another queue's");
}

#[test]
fn a_running_machine_at_entry_0_differs_from_a_reset_one() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(ReferenceDisk::new(1 << 20));
    let path = dir.path().join("s");
    let starts = |resume: &str, used: u16, answers: u16| {
        let resume = Some(Positions::parse(resume).unwrap());
        let options = Options { resume, ..Options::default() };
        let server = Server::bind(&path, Arc::clone(&disk) as _, options).unwrap();
        let guest = Guest::connect(server.path(), 0);
        // Answers of earlier requests in the ring.
        for index in 0..answers {
            guest.set_used_element(index, (index % 4 * 4, 513));
        }
        guest.try_start(0, used)
    };
    assert!(starts("-", 0, 0), "reset, with new rings");
    assert!(starts("-", 0, SIZE - 1), "not all are answers");
    assert!(!starts("-", 0, SIZE), "it went round, and nobody knows what it lost");
    assert!(starts("0", 0, SIZE), "it went round, and ended here");
    assert!(starts("7", 0, SIZE), "reset, by a driver that leaves old answers in its ring");
    assert!(!starts("-", 5, 5), "a front-end that did not ask the ring");
    assert!(!starts("7", 5, 5), "as before, and answers are missing");
    assert!(starts("5", 5, 5), "it ended here");
}

#[test]
fn a_machine_whose_server_crashed_when_it_stood_at_entry_0_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(ReferenceDisk::new(1 << 20));
    let path = dir.path().join("s");
    let bind = |resume| Server::bind(&path, Arc::clone(&disk) as _, Options { resume, ..Options::default() });
    let last_round = u16::MAX - SIZE + 1;
    let server = bind(Some(Positions::parse(&last_round.to_string()).unwrap())).unwrap();
    let mut guest = Guest::connect(server.path(), 0);
    guest.start_queue(last_round);
    for _ in 0..SIZE {
        assert_eq!(guest.request(1, 0, &[1; 512], 0).0, OK);
    }
    assert_eq!(guest.used_index(), 0);
    let rings = guest.read(GUEST, 0x20000);
    drop(guest);
    server.stop();
    assert_eq!(server.positions().to_string(), "0");
    // The machine continues if its position is known, and only then.
    for (resume, goes_on) in [("0", true), ("-", false)] {
        let server = bind(Some(Positions::parse(resume).unwrap())).unwrap();
        let guest = Guest::connect(server.path(), 0);
        guest.write(GUEST, &rings);
        assert_eq!(guest.try_start(0, 0), goes_on, "{resume}");
    }
}

#[test]
fn a_queue_that_was_given_up_has_no_position() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(ReferenceDisk::with_options(1 << 20, late()));
    disk.hold();
    let limits = Limits { stop_timeout_ms: 50, ..Limits::default() };
    let options = Options { limits, ..Options::default() };
    let server = Server::bind(&dir.path().join("s"), Arc::clone(&disk) as _, options).unwrap();
    let mut guest = Guest::start(server.path());
    offer_write(&mut guest, 0, 0, 1);
    guest.kick();
    wait_until("the write reaches the disk", || disk.waiting() != 0);
    server.stop();
    assert_eq!(server.positions().to_string(), "-");
    disk.release();
    guest.next_used();
}

#[test]
fn each_way_in_which_listening_fails_has_its_message() {
    let dir = tempfile::tempdir().unwrap();
    let bind = |path: &Path| Server::bind(path, Arc::new(ReferenceDisk::new(4096)), Options::default());
    let path = dir.path().join("s");
    let first = bind(&path).unwrap();
    assert!(matches!(bind(&path), Err(BindError::PathInUse { .. })));
    drop(first);
    // A stale socket of a process that died.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    drop(bind(&path).unwrap());
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(bind(&path), Err(BindError::NotASocket { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    assert!(matches!(bind(&dir.path().join("none/s")), Err(BindError::NoDirectory { .. })));
    let long = dir.path().join("x".repeat(120));
    let error = bind(&long).err().unwrap().to_string();
    assert!(error.contains("107") && error.contains("shorter"), "{error}");
}
