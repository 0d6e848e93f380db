//! The conformance suite of devices, through the whole front-end: an initiator that implements `Device`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::fixture::raw::{Answer, Raw};
use crate::fixture::{Fixture, PATIENCE};
use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, IoErrorKind, Op, Request,
};
use headwater_iscsi::Limits;
use headwater_iscsi::wire::Opcode;
use headwater_iscsi::wire::request::ScsiCommand;
use headwater_testkit::conformance::{self, Options};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Waits};

/// As many as the target returns in one reply to GET LBA STATUS.
const DESCRIPTORS: usize = 1024;

/// Small segments and bursts, so that long transfers take many PDUs.
const SMALL: [(&str, &str); 4] = [
    ("MaxRecvDataSegmentLength", "4096"),
    ("MaxBurstLength", "16384"),
    ("FirstBurstLength", "8192"),
    ("DataDigest", "CRC32C"),
];

const LARGE: [(&str, &str); 3] =
    [("MaxRecvDataSegmentLength", "262144"), ("MaxOutstandingR2T", "4"), ("HeaderDigest", "CRC32C")];

/// A session with any number of commands in flight.
struct Session {
    raw: Mutex<Raw>,
    /// The channel for the reply of each command, by its task tag.
    commands: Arc<Mutex<HashMap<u32, Sender<Answer>>>>,
    block_bytes: u64,
}

impl Session {
    fn new(raw: Raw, block_bytes: u64) -> Self {
        let mut taker = raw.taker();
        // Between rounds nothing is received; waiting for a reply has its own time-out.
        taker.stream.set_read_timeout(None).unwrap();
        let commands: Arc<Mutex<HashMap<u32, Sender<Answer>>>> = Arc::default();
        std::thread::spawn({
            let commands = Arc::clone(&commands);
            move || {
                while taker.stream.peek(&mut [0]).is_ok_and(|bytes| bytes > 0) {
                    let answer = taker.take();
                    let tag = u32::from_be_bytes(answer.header[16..20].try_into().unwrap());
                    // PDUs without a waiting command are pings of the target, which need no answer.
                    if let Some(command) = commands.lock().unwrap().get(&tag) {
                        let _ = command.send(answer);
                    }
                }
                // The senders are dropped: all waiting commands fail.
                commands.lock().unwrap().clear();
            }
        });
        Self { raw: Mutex::new(raw), commands, block_bytes }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.raw.lock().unwrap().stream.shutdown(std::net::Shutdown::Both);
    }
}

struct Initiator {
    sessions: Arc<Vec<Session>>,
    next: AtomicUsize,
    geometry: Geometry,
}

impl Initiator {
    fn device(fixture: &Fixture, sessions: usize, keys: &[(&str, &str)]) -> Arc<dyn Device> {
        let mut raws: Vec<Raw> = (0..sessions).map(|_| fixture.session(keys)).collect();
        let geometry = learn_geometry(&mut raws[0]);
        let block_bytes = u64::from(geometry.logical_block_bytes);
        let sessions = raws.into_iter().map(|raw| Session::new(raw, block_bytes)).collect();
        Arc::new(Self { sessions: Arc::new(sessions), next: AtomicUsize::new(0), geometry })
    }

    /// The sessions are used in rotation.
    fn next_session(&self) -> usize {
        self.next.fetch_add(1, Ordering::Relaxed) % self.sessions.len()
    }
}

/// Reads a disk's properties like an initiator: READ CAPACITY (16), and MODE SENSE (10) of the caching page.
fn learn_geometry(raw: &mut Raw) -> Geometry {
    let mut cdb = [0_u8; 16];
    (cdb[0], cdb[1], cdb[13]) = (0x9e, 0x10, 32);
    let tag = raw.command(&cdb, 32, None);
    let capacity = raw.data(tag, 32);
    let last_block = u64::from_be_bytes(capacity[..8].try_into().unwrap());
    let logical_block_bytes = u32::from_be_bytes(capacity[8..12].try_into().unwrap());
    // Without block descriptors: a header of 8 bytes, and the page.
    let tag = raw.command(&[0x5a, 8, 8, 0, 0, 0, 0, 0, 28, 0], 28, None);
    let modes = raw.data(tag, 28);
    assert_eq!(modes[8], 8, "the caching page: {modes:02x?}");
    Geometry {
        size_bytes: (last_block + 1) * u64::from(logical_block_bytes),
        logical_block_bytes,
        physical_block_bytes: logical_block_bytes << (capacity[13] & 0x0f),
        read_only: modes[3] & 0x80 != 0,
        volatile_cache: modes[10] & 0x04 != 0,
    }
}

impl Session {
    fn run(&self, request: &Request) -> Result<Vec<u8>, IoError> {
        let if_set = |is_set: &bool| if *is_set { 8_u8 } else { 0 };
        match request {
            Request::Read { range, .. } => self.exchange(self.cdb(0x88, 0, *range), None, range.len() as u32),
            Request::Write { range, buffer, fua } => {
                self.exchange(self.cdb(0x8a, if_set(fua), *range), Some(&buffer[..]), 0)
            }
            Request::WriteZeroes { range, may_unmap, fua } => {
                let block = vec![0_u8; self.block_bytes as usize];
                let done = self.exchange(self.cdb(0x93, if_set(may_unmap), *range), Some(&block[..]), 0)?;
                // WRITE SAME has no FUA.
                if *fua { self.flush() } else { Ok(done) }
            }
            Request::Discard { range } => {
                let list = self.unmap_list(*range);
                let mut cdb = [0_u8; 16];
                (cdb[0], cdb[8]) = (0x42, list.len() as u8);
                self.exchange(cdb, Some(&list[..]), 0)
            }
            Request::Prefetch { range } => self.exchange(self.cdb(0x90, 0, *range), None, 0),
            Request::Flush => self.flush(),
        }
    }

    fn flush(&self) -> Result<Vec<u8>, IoError> {
        let mut cdb = [0_u8; 16];
        cdb[0] = 0x35;
        self.exchange(cdb, None, 0)
    }

    /// A command of the medium with its 64-bit address.
    fn cdb(&self, operation: u8, flags: u8, range: ByteRange) -> [u8; 16] {
        let mut cdb = [0_u8; 16];
        (cdb[0], cdb[1]) = (operation, flags);
        cdb[2..10].copy_from_slice(&(range.offset() / self.block_bytes).to_be_bytes());
        cdb[10..14].copy_from_slice(&self.blocks(range).to_be_bytes());
        cdb
    }

    fn blocks(&self, range: ByteRange) -> u32 {
        (range.len() / self.block_bytes) as u32
    }

    fn unmap_list(&self, range: ByteRange) -> Vec<u8> {
        let mut list = vec![0, 22, 0, 16, 0, 0, 0, 0];
        list.extend_from_slice(&(range.offset() / self.block_bytes).to_be_bytes());
        list.extend_from_slice(&self.blocks(range).to_be_bytes());
        list.extend_from_slice(&[0; 4]);
        list
    }

    /// GET LBA STATUS. Its runs extend to the end of the disk; only those that begin in `range` count, up to
    /// its end.
    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        let allocation_bytes = (8 + 16 * max_extents.min(DESCRIPTORS)) as u32;
        let mut cdb = [0_u8; 16];
        (cdb[0], cdb[1]) = (0x9e, 0x12);
        cdb[2..10].copy_from_slice(&(range.offset() / self.block_bytes).to_be_bytes());
        cdb[10..14].copy_from_slice(&allocation_bytes.to_be_bytes());
        let data = self.exchange(cdb, None, allocation_bytes)?;
        let told_bytes = u32::from_be_bytes(data[..4].try_into().unwrap());
        assert_eq!(told_bytes as usize + 4, data.len(), "extents of {range}: length of the answer");
        let mut extents = Vec::new();
        let mut at = range.offset();
        for descriptor in data[8..].chunks_exact(16) {
            if at == range.end() {
                break;
            }
            let lba = u64::from_be_bytes(descriptor[..8].try_into().unwrap());
            let blocks = u32::from_be_bytes(descriptor[8..12].try_into().unwrap());
            assert_eq!(lba * self.block_bytes, at, "extents of {range}: where a run begins");
            let kind = match descriptor[12] & 0x0f {
                0 => ExtentKind::Data,
                1 => ExtentKind::Hole,
                other => panic!("extents of {range}: provisioning status {other}"),
            };
            let len = (u64::from(blocks) * self.block_bytes).min(range.end() - at);
            extents.push(Extent { len, kind });
            at += len;
        }
        Ok(extents)
    }

    /// Executes one command: sends its data, half of it immediate, or reads up to this many bytes.
    fn exchange(&self, cdb: [u8; 16], sent: Option<&[u8]>, read_bytes: u32) -> Result<Vec<u8>, IoError> {
        let (sender, answers) = channel();
        let mut raw = self.raw.lock().unwrap();
        let command = raw.scsi(&cdb);
        let tag = command.task_tag;
        self.commands.lock().unwrap().insert(tag, sender);
        let expected_bytes = sent.map_or(read_bytes, |data| data.len() as u32);
        let command = ScsiCommand { write: sent.is_some(), read: read_bytes > 0, expected_bytes, ..command };
        let immediate =
            sent.map_or(0, |data| if data.len() <= 512 { data.len() } else { (data.len() / 2).min(8192) });
        raw.pdu(&command.encode(), sent.map_or(&[], |data| &data[..immediate]));
        drop(raw);
        let mut data_in = Vec::new();
        let result = loop {
            let answer = answers.recv_timeout(PATIENCE).expect("an answer");
            match answer.opcode() {
                Opcode::ReadyToTransfer => {
                    let r2t = answer.r2t();
                    let (at, end) = (r2t.offset as usize, (r2t.offset + r2t.desired_bytes) as usize);
                    let pieces: Vec<&[u8]> = sent.unwrap()[at..end].chunks(60_000).collect();
                    let mut offset = r2t.offset;
                    for (data_sn, piece) in pieces.iter().enumerate() {
                        // Others may send between two PDUs of the data.
                        let mut raw = self.raw.lock().unwrap();
                        raw.data_out(&r2t, data_sn as u32, offset, data_sn + 1 == pieces.len(), piece);
                        offset += piece.len() as u32;
                    }
                }
                Opcode::DataIn => {
                    let head = answer.data_in();
                    assert_eq!(head.offset as usize, data_in.len(), "{head:?}");
                    data_in.extend_from_slice(&answer.data);
                    if let Some((status, _)) = head.status {
                        assert_eq!(status, 0, "{head:?}");
                        break Ok(data_in);
                    }
                }
                Opcode::ScsiResponse if answer.scsi().status == 0 => break Ok(data_in),
                Opcode::ScsiResponse => {
                    let sense = answer.sense();
                    // Other reasons why writing is impossible have the same sense key.
                    let kind = if sense == (7, 0x2700) { IoErrorKind::ReadOnly } else { IoErrorKind::Device };
                    break Err(IoError::new(kind, format!("sense {sense:x?}")));
                }
                _ => panic!("{answer:?}"),
            }
        };
        self.commands.lock().unwrap().remove(&tag);
        result
    }
}

impl Device for Initiator {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn try_now(&self, _op: Op<'_>) -> Result<Attempt, IoError> {
        Ok(Attempt::MustWait)
    }

    fn submit(&self, request: Request, done: Completion) {
        let sessions = Arc::clone(&self.sessions);
        let session = self.next_session();
        // A thread for each request, so that those of a round are in flight together, also in one session.
        std::thread::spawn(move || match (sessions[session].run(&request), request) {
            (Ok(data_in), Request::Read { .. }) => done.complete(Ok(()), data_in),
            (result, request) => done.complete(result.map(drop), request.into_buffer()),
        });
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        self.sessions[self.next_session()].extents(range, max_extents)
    }
}

/// The holes of a device.
fn holes(device: &dyn Device) -> Vec<ByteRange> {
    let range = |offset, len| ByteRange::new(offset, len).unwrap();
    let end = device.geometry().size_bytes;
    let mut holes: Vec<ByteRange> = Vec::new();
    let mut at = 0;
    while at < end {
        let extents = device.extents(range(at, end - at), 100).unwrap();
        assert!(!extents.is_empty(), "no extents at {at}");
        for Extent { len, kind } in extents {
            match (kind, holes.last_mut()) {
                // A reply may end in the middle of a hole.
                (ExtentKind::Hole, Some(last)) if last.end() == at => {
                    *last = range(last.offset(), last.len() + len);
                }
                (ExtentKind::Hole, _) => holes.push(range(at, len)),
                _ => {}
            }
            at += len;
        }
    }
    holes
}

/// Runs the suite over four sessions with these keys, and then checks the disk itself.
fn check(disk: ReferenceDisk, keys: &[(&str, &str)], seed: u64) -> Arc<ReferenceDisk> {
    // So little memory that commands wait for each other's.
    let limits = Limits {
        bytes_executing: 64 << 10,
        bytes_collected: 64 << 10,
        max_burst_bytes: 128 << 10,
        ..Limits::default()
    };
    let fixture = Fixture::with(disk, limits, None);
    let device = Initiator::device(&fixture, 4, keys);
    assert_eq!(device.geometry(), fixture.disk.geometry());
    let options = Options { operations: 400, ..Options::seeded(seed) };
    let model = conformance::check(&device, &options);
    // The suite alone would be content with a target that calls everything mapped.
    let (reported, actual) = (holes(&*device), holes(&*fixture.disk));
    assert!(
        reported == actual,
        "seed {seed}: holes by GET LBA STATUS: {reported:?}\nof the disk: {actual:?}"
    );
    drop(device);
    fixture.wait_for_connections(0);
    conformance::verify(&*fixture.disk, &model);
    Arc::clone(&fixture.disk)
}

/// So slow that requests which are sent together wait together.
fn slow(waits: Waits, seed: u64) -> ReferenceOptions {
    ReferenceOptions { waits, seed, delay: Duration::from_micros(200), ..ReferenceOptions::default() }
}

#[test]
fn a_disk_that_answers_at_once_passes_the_suite() {
    let disk = check(ReferenceDisk::with_options(16 << 20, slow(Waits::Never, 1)), &LARGE, 1);
    assert!(!holes(&*disk).is_empty());
    let counts = disk.counts();
    // What has a command of its own in SCSI came through as what it is.
    for (count, what) in [
        (counts.fua, "with FUA"),
        (counts.unmapping_zeroes, "zero writes that unmap"),
        (counts.zeroes - counts.unmapping_zeroes, "zero writes that do not"),
        (counts.discards, "discards"),
        (counts.flushes, "flushes"),
        (counts.prefetches, "prefetches"),
    ] {
        assert_ne!(count, 0, "{what}");
    }
}

#[test]
fn a_disk_that_answers_late_and_out_of_order_passes_the_suite() {
    check(ReferenceDisk::with_options(16 << 20, slow(Waits::PerMille(500), 2)), &SMALL, 2);
    let disk = check(ReferenceDisk::with_options(16 << 20, slow(Waits::Always, 3)), &LARGE, 3);
    let (most, threads) = (disk.most_waiting(), Options::default().threads);
    assert!(most > u64::from(threads), "at most {most} requests overlapped");
}

#[test]
fn blocks_of_4096_bytes_and_no_cache_to_flush_pass_the_suite() {
    for (seed, waits, keys) in [(4, Waits::Never, &LARGE[..]), (5, Waits::PerMille(300), &SMALL[..])] {
        let options =
            ReferenceOptions { logical_block_bytes: 4096, volatile_cache: false, ..slow(waits, seed) };
        check(ReferenceDisk::with_options(16 << 20, options), keys, seed);
    }
}

#[test]
fn a_read_only_disk_refuses_writes_and_stays_as_it_is() {
    let contents: Vec<u8> = (0..8_u32 << 20).map(|i| (i / 512 * 7 + i) as u8).collect();
    for (seed, logical_block_bytes, keys) in [(6, 512, &SMALL[..]), (7, 4096, &LARGE[..])] {
        let options =
            ReferenceOptions { logical_block_bytes, read_only: true, ..slow(Waits::PerMille(200), seed) };
        let disk = check(ReferenceDisk::with_contents(contents.clone(), options), keys, seed);
        assert!(disk.contents() == contents);
    }
}
