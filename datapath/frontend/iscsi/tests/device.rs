//! The conformance suite for devices, through the whole front-end: an initiator that is a `Device`.

mod fixture;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fixture::raw::{Answer, Raw};
use fixture::{Fixture, PATIENCE};
use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, IoErrorKind, Op, Request,
};
use headwater_iscsi::Limits;
use headwater_iscsi::wire::Opcode;
use headwater_iscsi::wire::request::ScsiCommand;
use headwater_testkit::conformance::{Options, check};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Waits};

/// A session with any number of commands under way.
struct Session {
    raw: Mutex<Raw>,
    /// Where the answers of each command go, by its tag.
    commands: Arc<Mutex<HashMap<u32, Sender<Answer>>>>,
}

impl Session {
    fn new(raw: Raw) -> Self {
        let mut taker = raw.taker();
        // Between rounds nothing comes; who waits for an answer has a limit of its own.
        taker.stream.set_read_timeout(None).unwrap();
        let commands: Arc<Mutex<HashMap<u32, Sender<Answer>>>> = Arc::default();
        std::thread::spawn({
            let commands = Arc::clone(&commands);
            move || {
                while taker.stream.peek(&mut [0]).is_ok_and(|bytes| bytes > 0) {
                    let answer = taker.take();
                    let tag = u32::from_be_bytes(answer.header[16..20].try_into().unwrap());
                    // Others are pings of the target, which need no answer.
                    if let Some(command) = commands.lock().unwrap().get(&tag) {
                        let _ = command.send(answer);
                    }
                }
                // Nobody needs to wait any more.
                commands.lock().unwrap().clear();
            }
        });
        Self { raw: Mutex::new(raw), commands }
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
        let sessions = (0..sessions).map(|_| Session::new(fixture.session(keys))).collect();
        Arc::new(Self {
            sessions: Arc::new(sessions),
            next: AtomicUsize::new(0),
            geometry: fixture.disk.geometry(),
        })
    }
}

impl Session {
    fn run(&self, request: &Request) -> Result<Vec<u8>, IoError> {
        let (range, data) = match request {
            Request::Read { range, .. } => (*range, None),
            Request::Write { range, buffer, .. } => (*range, Some(&buffer[..])),
            Request::Discard { range } => (*range, Some(&[][..])),
            Request::WriteZeroes { range, .. } => (*range, Some(&[0_u8; 512][..])),
            Request::Flush | Request::Prefetch { .. } => (ByteRange::new(0, 0).unwrap(), None),
        };
        let (lba, blocks) = (range.offset() / 512, (range.len() / 512) as u32);
        let mut cdb = [0_u8; 16];
        cdb[2..10].copy_from_slice(&lba.to_be_bytes());
        cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
        let unmap = unmap_list(lba, blocks);
        let data = match request {
            Request::Read { .. } => {
                cdb[0] = 0x88;
                data
            }
            Request::Write { fua, .. } => {
                cdb[0] = 0x8a;
                cdb[1] = if *fua { 8 } else { 0 };
                data
            }
            Request::WriteZeroes { may_unmap, .. } => {
                cdb[0] = 0x93;
                cdb[1] = if *may_unmap { 8 } else { 0 };
                data
            }
            Request::Discard { .. } => {
                cdb = [0; 16];
                cdb[0] = 0x42;
                cdb[8] = unmap.len() as u8;
                Some(&unmap[..])
            }
            Request::Flush | Request::Prefetch { .. } => {
                cdb = [0; 16];
                cdb[0] = 0x35;
                None
            }
        };
        self.exchange(cdb, data, range.len() as u32, matches!(request, Request::Read { .. }))
    }

    /// One command with its data; half of a write is immediate.
    fn exchange(
        &self,
        cdb: [u8; 16],
        data: Option<&[u8]>,
        bytes: u32,
        read: bool,
    ) -> Result<Vec<u8>, IoError> {
        let (sender, answers) = channel();
        let mut raw = self.raw.lock().unwrap();
        let command = raw.scsi(&cdb);
        let tag = command.task_tag;
        self.commands.lock().unwrap().insert(tag, sender);
        let expected_bytes = data.map_or(if read { bytes } else { 0 }, |data| data.len() as u32);
        let command = ScsiCommand { write: data.is_some(), read, expected_bytes, ..command };
        let immediate =
            data.map_or(0, |data| if data.len() <= 512 { data.len() } else { (data.len() / 2).min(8192) });
        raw.pdu(&command.encode(), data.map_or(&[], |data| &data[..immediate]));
        drop(raw);
        let mut data_in = Vec::new();
        let result = loop {
            let answer = answers.recv_timeout(PATIENCE).expect("an answer");
            match answer.opcode() {
                Opcode::ReadyToTransfer => {
                    let r2t = answer.r2t();
                    let (at, end) = (r2t.offset as usize, (r2t.offset + r2t.desired_bytes) as usize);
                    let pieces: Vec<&[u8]> = data.unwrap()[at..end].chunks(60_000).collect();
                    let mut offset = r2t.offset;
                    for (data_sn, piece) in pieces.iter().enumerate() {
                        // Others may send between two pieces.
                        let mut raw = self.raw.lock().unwrap();
                        raw.data_out(&r2t, data_sn as u32, offset, data_sn + 1 == pieces.len(), piece);
                        offset += piece.len() as u32;
                    }
                }
                Opcode::DataIn => {
                    data_in.extend_from_slice(&answer.data);
                    if answer.data_in().status.is_some() {
                        break Ok(data_in);
                    }
                }
                Opcode::ScsiResponse if answer.scsi().status == 0 => break Ok(data_in),
                Opcode::ScsiResponse => {
                    let sense = answer.sense();
                    let kind = if sense.0 == 7 { IoErrorKind::ReadOnly } else { IoErrorKind::Device };
                    break Err(IoError::new(kind, format!("sense {sense:x?}")));
                }
                _ => panic!("{answer:?}"),
            }
        };
        self.commands.lock().unwrap().remove(&tag);
        result
    }
}

fn unmap_list(lba: u64, blocks: u32) -> Vec<u8> {
    let mut list = vec![0, 22, 0, 16, 0, 0, 0, 0];
    list.extend_from_slice(&lba.to_be_bytes());
    list.extend_from_slice(&blocks.to_be_bytes());
    list.extend_from_slice(&[0; 4]);
    list
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
        let session = self.next.fetch_add(1, Ordering::Relaxed) % sessions.len();
        // A thread each, so that requests of a round are in flight together, also in one session.
        std::thread::spawn(move || match (sessions[session].run(&request), request) {
            (Ok(data_in), Request::Read { .. }) => done.complete(Ok(()), data_in),
            (result, request) => done.complete(result.map(drop), request.into_buffer()),
        });
    }

    fn extents(&self, range: ByteRange, _max_extents: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Data }])
    }
}

#[test]
fn a_disk_behind_iscsi_passes_the_suite_for_devices() {
    let small = [
        ("MaxRecvDataSegmentLength", "4096"),
        ("MaxBurstLength", "16384"),
        ("FirstBurstLength", "8192"),
        ("DataDigest", "CRC32C"),
    ];
    let large =
        [("MaxRecvDataSegmentLength", "262144"), ("MaxOutstandingR2T", "4"), ("HeaderDigest", "CRC32C")];
    for (seed, waits, keys) in
        [(1, Waits::Never, &large[..]), (2, Waits::PerMille(500), &small[..]), (3, Waits::Always, &large[..])]
    {
        // So slow that requests which are sent together wait together.
        let delay = Duration::from_micros(200);
        let disk = ReferenceOptions { waits, seed, delay, ..ReferenceOptions::default() };
        // So little memory that commands wait for each other's.
        let limits = Limits {
            bytes_executing: 64 << 10,
            bytes_collected: 64 << 10,
            max_burst_bytes: 128 << 10,
            ..Limits::default()
        };
        let fixture = Fixture::with(ReferenceDisk::with_options(16 << 20, disk), limits, None);
        let device = Initiator::device(&fixture, 4, keys);
        let options = Options { operations: 200, ..Options::seeded(seed) };
        check(&device, &options);
        if waits == Waits::Always {
            let most = fixture.disk.most_waiting();
            assert!(most > u64::from(options.threads), "at most {most} requests overlapped");
        }
    }
}
