//! Extended headers: 64-bit lengths, announced payloads, and replies that are always chunks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::fixture::{Fixture, Raw};
use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, Op, Request, blocking,
};
use headwater_nbd::wire::handshake::{GoData, MetaContextData, option, reply};
use headwater_nbd::wire::reply::EXTENDED_CHUNK_BYTES;
use headwater_nbd::wire::transmission::{
    RequestHead, chunk, command, command_flag, decode_block_status_extended, decode_error, decode_hole, state,
};
use headwater_nbd::{Address, Limits, Server, SingleExport};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, Waits};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A disk of any size that stores only the written blocks of 4 KiB. It accepts whole blocks only.
struct Sparse {
    size_bytes: u64,
    blocks: Mutex<BTreeMap<u64, Vec<u8>>>,
}

impl Sparse {
    fn forget(&self, range: ByteRange) {
        self.blocks.lock().unwrap().retain(|at, _| *at < range.offset() || *at >= range.end());
    }
}

impl Device for Sparse {
    fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: self.size_bytes,
            logical_block_bytes: 4096,
            physical_block_bytes: 4096,
            read_only: false,
            volatile_cache: true,
        }
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        match op {
            Op::Read { range, into } => {
                into.fill(0);
                for (at, block) in self.blocks.lock().unwrap().range(range.offset()..range.end()) {
                    into[(at - range.offset()) as usize..][..4096].copy_from_slice(block);
                }
            }
            Op::Write { range, from, .. } => {
                let blocks = (range.offset()..).step_by(4096).zip(from.chunks(4096).map(<[u8]>::to_vec));
                self.blocks.lock().unwrap().extend(blocks);
            }
            Op::WriteZeroes { range, .. } | Op::Discard { range } => self.forget(range),
            Op::Flush => {}
        }
        Ok(Attempt::Done)
    }

    fn submit(&self, request: Request, done: Completion) {
        // All other requests are answered at once.
        assert!(matches!(request, Request::Prefetch { .. }));
        done.complete(Ok(()), Vec::new());
    }

    fn extents(&self, range: ByteRange, max: usize) -> Result<Vec<Extent>, IoError> {
        let mut extents = Vec::new();
        let mut at = range.offset();
        for start in self.blocks.lock().unwrap().range(range.offset()..range.end()).map(|(at, _)| *at) {
            if start > at {
                extents.push(Extent { len: start - at, kind: ExtentKind::Hole });
            }
            extents.push(Extent { len: 4096, kind: ExtentKind::Data });
            at = start + 4096;
        }
        extents.push(Extent { len: range.end() - at, kind: ExtentKind::Hole });
        extents.truncate(max);
        Ok(extents)
    }
}

struct Extended(Raw);

#[derive(Debug, PartialEq)]
struct Reply {
    kind: u16,
    cookie: u64,
    offset: u64,
    payload: Vec<u8>,
}

impl Extended {
    fn start(fixture: &Fixture) -> Self {
        Self::over(fixture.raw())
    }

    fn over(mut raw: Raw) -> Self {
        raw.greet();
        raw.option(option::EXTENDED_HEADERS, &[]);
        assert_eq!(raw.answer().0, reply::ACK);
        let mut data = Vec::new();
        MetaContextData { name: "", queries: vec!["base:allocation"] }.encode(&mut data);
        raw.option(option::SET_META_CONTEXT, &data);
        assert_eq!(raw.answers().len(), 2);
        data.clear();
        GoData { name: "", wanted: vec![] }.encode(&mut data);
        raw.option(option::GO, &data);
        assert_eq!(raw.answers().last().unwrap().0, reply::ACK);
        Self(raw)
    }

    fn send(&mut self, command: u16, flags: u16, offset: u64, length: u64, payload: &[u8]) {
        // The cookie is the inverted offset, so that each reply can be checked by itself.
        let head = RequestHead { flags, command, cookie: !offset, offset, length };
        self.0.send(&head.encode_extended());
        self.0.send(payload);
    }

    fn write(&mut self, offset: u64, payload: &[u8]) {
        self.send(command::WRITE, command_flag::PAYLOAD_LEN, offset, payload.len() as u64, payload);
    }

    fn reply(&mut self) -> Reply {
        let head: [u8; EXTENDED_CHUNK_BYTES] = self.0.take();
        assert_eq!(head[..6], [0x6e, 0x8a, 0x27, 0x8c, 0, 1], "no last extended chunk");
        let number = |at: usize| u64::from_be_bytes(*head[at..].first_chunk().unwrap());
        let payload = self.0.take_vec(number(24) as usize);
        let kind = u16::from_be_bytes([head[6], head[7]]);
        let reply = Reply { kind, cookie: number(8), offset: number(16), payload };
        assert_eq!(reply.cookie, !reply.offset, "a reply to no request");
        reply
    }

    fn is_done(&mut self, offset: u64) {
        let expected = Reply { kind: chunk::NONE, cookie: !offset, offset, payload: Vec::new() };
        assert_eq!(self.reply(), expected);
    }

    fn error(&mut self, code: u32, about: &str) {
        let reply = self.reply();
        assert_eq!(reply.kind, chunk::ERROR);
        let (found, message) = decode_error(&reply.payload).unwrap();
        assert!(found == code && message.contains(about), "{found}: {message}");
    }
}

#[test]
fn lengths_beyond_32_bits_are_one_request() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let disk = Arc::new(Sparse { size_bytes: 9 * GIB, blocks: Mutex::default() });
    let export = SingleExport::new(disk.clone(), "");
    let _server = Server::bind(Address::Unix(path.clone()), export, Limits::default()).unwrap();
    let mut client = Extended::over(Raw::connect(&path));
    client.write(8 * GIB, &[5; 4096]);
    client.is_done(8 * GIB);
    client.send(command::BLOCK_STATUS, 0, 0, 9 * GIB, &[]);
    let reply = client.reply();
    assert_eq!(reply.kind, chunk::BLOCK_STATUS_EXTENDED);
    let (_, extents) = decode_block_status_extended(&reply.payload).unwrap();
    let hole = u64::from(state::HOLE | state::ZERO);
    assert_eq!(extents, [(8 * GIB, hole), (4096, 0), (GIB - 4096, hole)]);
    for (number, flags) in [(command::TRIM, 0), (command::WRITE_ZEROES, command_flag::FUA)] {
        client.write(4096, &[6; 4096]);
        client.is_done(4096);
        client.send(number, flags, 0, 9 * GIB, &[]);
        client.is_done(0);
        client.send(command::READ, 0, 4096, 4096, &[]);
        let reply = client.reply();
        assert_eq!((reply.kind, decode_hole(&reply.payload)), (chunk::OFFSET_HOLE, Ok((4096, 4096))));
    }
    assert!(disk.blocks.lock().unwrap().is_empty());
    client.send(command::CACHE, 0, 0, 9 * GIB, &[]);
    client.is_done(0);
    client.send(command::FLUSH, 0, 0, 0, &[]);
    client.is_done(0);
}

#[test]
fn random_requests_agree_with_the_model() {
    let options = ReferenceOptions { waits: Waits::PerMille(400), ..Default::default() };
    let fixture = Fixture::new(ReferenceDisk::with_options(MIB, options));
    let mut client = Extended::start(&fixture);
    let mut model = vec![0; MIB as usize];
    let mut rng = Rng::new(77);
    for round in 0..400_u32 {
        let offset = rng.below(MIB / 512) * 512;
        let len = (1 + rng.below(64)).min((MIB - offset) / 512) * 512;
        let place = offset as usize..(offset + len) as usize;
        match rng.below(4) {
            0 => {
                let payload = vec![round as u8; len as usize];
                // QEMU does not set this flag.
                let flags = if round % 2 == 0 { command_flag::PAYLOAD_LEN } else { 0 };
                client.send(command::WRITE, flags, offset, len, &payload);
                client.is_done(offset);
                model[place].copy_from_slice(&payload);
            }
            1 => {
                client.send(command::WRITE_ZEROES, 0, offset, len, &[]);
                client.is_done(offset);
                model[place].fill(0);
            }
            _ => {
                client.send(command::READ, 0, offset, len, &[]);
                let reply = client.reply();
                match reply.kind {
                    chunk::OFFSET_DATA => {
                        assert_eq!(reply.payload[..8], offset.to_be_bytes());
                        assert!(reply.payload[8..] == model[place], "round {round} reads something else");
                    }
                    kind => {
                        assert_eq!(kind, chunk::OFFSET_HOLE);
                        assert!(model[place].iter().all(|byte| *byte == 0), "round {round} reads zeroes");
                    }
                }
            }
        }
    }
    let mut all = vec![0; MIB as usize];
    blocking::read(&*fixture.disk, 0, &mut all).unwrap();
    assert!(all == model);
    assert_eq!(fixture.disk.geometry().size_bytes, MIB);
}

#[test]
fn unexpected_payloads_are_read_and_refused() {
    let limits = Limits { request_bytes: 64 << 10, longest_request_bytes: 64 << 10, ..Limits::default() };
    let fixture = Fixture::with_limits(ReferenceDisk::new(MIB), limits);
    let mut client = Extended::start(&fixture);
    // After each of them, the server still finds the next header.
    client.send(command::READ, command_flag::PAYLOAD_LEN, 0, 512, &[1; 512]);
    client.error(22, "takes no payload");
    client.send(command::BLOCK_STATUS, command_flag::PAYLOAD_LEN, 0, 12, &[0; 12]);
    client.error(22, "takes no payload");
    client.send(command::READ, 0, 0, 1 << 40, &[]);
    client.error(22, "past");
    client.send(command::WRITE_ZEROES, 0, 512, u64::MAX - 1023, &[]);
    client.error(28, "past");
    client.send(command::TRIM, 0, 4096, u64::MAX, &[]);
    client.error(22, "64 bits");
    client.write(MIB, &[1; 512]);
    client.error(28, "past");
    client.send(command::WRITE, 0, MIB, 512, &[1; 512]);
    client.error(28, "past");
    assert!(fixture.disk.contents().iter().all(|byte| *byte == 0));
    client.write(0, &[9; 512]);
    client.is_done(0);
    for length in [(64 << 10) + 1, 1 << 40, u64::MAX] {
        let mut client = Extended::start(&fixture);
        client.send(command::WRITE, command_flag::PAYLOAD_LEN, 0, length, &[]);
        client.0.ends();
        let mut client = Extended::start(&fixture);
        client.send(command::WRITE, 0, 0, length, &[]);
        client.0.ends();
    }
    let mut compact = Extended::start(&fixture);
    compact.0.request(command::READ, 0, 1, 0, 512);
    // The magic of another header form: the server cannot find the next header. Four more bytes complete this
    // one.
    compact.0.send(&[0; 4]);
    compact.0.ends();
    fixture.is_alive();
}

#[test]
fn forms_are_agreed_on_in_order() {
    let fixture = Fixture::new(ReferenceDisk::new(MIB));
    let mut raw = fixture.raw();
    raw.greet();
    raw.option(option::EXTENDED_HEADERS, b"x");
    assert_eq!(raw.answer().0, reply::ERR_INVALID);
    raw.option(option::STRUCTURED_REPLY, &[]);
    assert_eq!(raw.answer().0, reply::ACK);
    raw.option(option::EXTENDED_HEADERS, &[]);
    assert_eq!(raw.answer().0, reply::ACK);
    raw.option(option::STRUCTURED_REPLY, &[]);
    assert_eq!(raw.answer().0, reply::ERR_EXT_HEADER_REQD);
}
