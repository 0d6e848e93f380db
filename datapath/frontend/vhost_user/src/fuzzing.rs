//! Properties that must hold for everything that a guest puts into its memory and a front-end sends: for the
//! fuzzers in `fuzz/`, and for a bounded test.
//!
//! - `vhost_chain`: a descriptor table and the memory to which it points. A second implementation follows it
//!   over a plain array of bytes. Both must find the same buffers, header and status, or both nothing.
//! - `vhost_messages`: a connection's messages, with descriptors where they belong. Every reply must be one
//!   that the protocol allows for a message that was sent, in order, with the prescribed contents.

use std::collections::HashSet;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, Op, Request,
};
use rustix::fs::MemfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use vhost::vhost_user::BackendReqHandler;

use crate::config_space;
use crate::control::Control;
use crate::disk::Disk;
use crate::memory::{Addresses, GuestMemory, RegionSpec};
use crate::queue::RingAddresses;
use crate::queue::chain::Chain;
use crate::queue::request::{Command, Header, Piece, Status, decode_ranges};
use crate::queue::rings::Rings;
use crate::server::Options;

/// A check that a fuzzer or a test calls with bytes.
pub type Oracle = fn(&[u8]);

/// All checks, each with a name and seed bytes.
pub fn targets() -> Vec<(&'static str, Oracle, Vec<Vec<u8>>)> {
    vec![("vhost_chain", vhost_chain, chains()), ("vhost_messages", vhost_messages, vec![session()])]
}

const ENTRIES: u16 = 16;
/// Regions by guest address, length, and offset in the file. The first two are adjacent for the guest, though
/// not in the file, so that a buffer may cross from one into the other. Before the third there is a gap.
const REGIONS: [(u64, usize, u64); 3] =
    [(0x1000, 0x1000, 0x1000), (0x2000, 0x800, 0), (0x2a00, 0x200, 0x2000)];
const MEMORY_BYTES: usize = 0x1a00;
/// Where the rings are in the first region.
const AVAILABLE: u64 = 256;
const USED: u64 = 512;

/// A descriptor: address, length, flags, next.
type Descriptor = (u64, u32, u16, u16);
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

fn descriptors(list: &[Descriptor]) -> Vec<u8> {
    let bytes = |&(addr, len, flags, next): &Descriptor| {
        [&addr.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat()
    };
    list.iter().flat_map(bytes).collect()
}

fn chains() -> Vec<Vec<u8>> {
    let request = |kind: u8, data: &[u8], list: &[Descriptor]| {
        // Head, whether tables may be indirect, and memory: the table, and the request at 0x1400.
        let mut bytes = vec![0, 0, 1];
        bytes.extend(descriptors(list));
        bytes.resize(3 + 0x400, 0);
        bytes.extend([kind, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend(data);
        bytes
    };
    // A descriptor at 0x1fe8, and 16 bytes after it that lie in two regions.
    let crossing = |behind: &[u8], list: &[Descriptor]| {
        let mut bytes = request(0, &[], list);
        bytes.resize(3 + 0xfe8, 0);
        bytes.extend(descriptors(&[(0x1400, 16, NEXT, 1)]));
        bytes.extend(behind);
        bytes
    };
    let header = [8, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0];
    let table = descriptors(&[(0x1400, 16, NEXT, 1), (0x1800, 512, NEXT | WRITE, 2), (0x1a00, 1, WRITE, 0)]);
    let range = [4u64.to_le_bytes(), (1u64 << 32 | 8).to_le_bytes()].concat();
    vec![
        request(0, &[], &[(0x1400, 16, NEXT, 1), (0x1800, 512, NEXT | WRITE, 2), (0x1a00, 1, WRITE, 0)]),
        request(
            1,
            &[7; 100],
            &[(0x1400, 5, NEXT, 3), (0, 0, 0, 0), (0x1a00, 1, WRITE, 0), (0x1405, 523, NEXT, 2)],
        ),
        request(0, &table, &[(0x1410, 48, INDIRECT, 0)]),
        request(13, &range, &[(0x1400, 32, NEXT, 1), (0x17f0, 17, WRITE, 0)]),
        request(11, &range, &[(0x1400, 32, NEXT, 1), (0x17f0, 17, WRITE, 0)]),
        crossing(&header, &[(0x1ff8, 16, NEXT, 1), (0x1e00, 0x400, NEXT | WRITE, 2), (0x2a00, 1, WRITE, 0)]),
        crossing(&descriptors(&[(0x2a00, 1, WRITE, 0)]), &[(0x1fe8, 32, INDIRECT, 0)]),
    ]
}

struct Guest {
    memory: Arc<GuestMemory>,
    rings: Rings,
}

fn memfd(len: u64) -> std::io::Result<File> {
    let file: File = rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC)?.into();
    file.set_len(len)?;
    Ok(file)
}

impl Guest {
    fn new() -> Option<Self> {
        let file = memfd(0x3000).ok()?;
        let mut memory = GuestMemory::new(Addresses::new(1 << 40));
        for (guest, len, file_offset) in REGIONS {
            let len = u64::try_from(len).ok()?;
            memory = memory.with(RegionSpec { guest, user: guest, len, file_offset }, &file).ok()?;
        }
        let memory = Arc::new(memory);
        let start = REGIONS[0].0;
        let addresses =
            RingAddresses { descriptors: start, available: start + AVAILABLE, used: start + USED };
        let rings = Rings::new(&memory, ENTRIES, addresses, false).ok()?;
        Some(Self { memory, rings })
    }
}

thread_local! {
    static GUEST: Option<Guest> = Guest::new();
}

/// The guest's memory as plain bytes, one region after the other.
struct Plain(Vec<u8>);

impl Plain {
    /// The place of the byte at a guest address.
    fn place(addr: u64) -> Option<usize> {
        let mut before = 0;
        for (start, region_bytes, _) in REGIONS {
            if (start..start + u64::try_from(region_bytes).ok()?).contains(&addr) {
                return Some(before + usize::try_from(addr - start).ok()?);
            }
            before += region_bytes;
        }
        None
    }

    fn at(&self, addr: u64, len: u64) -> Option<&[u8]> {
        let first = Self::place(addr)?;
        // Each byte must exist; then they are adjacent here too.
        for offset in 1..len {
            Self::place(addr.checked_add(offset)?)?;
        }
        self.0.get(first..first + usize::try_from(len).ok()?)
    }

    fn descriptor(&self, table: u64, index: u64) -> Option<Descriptor> {
        let bytes = self.at(table.wrapping_add(16 * index), 16)?;
        let part = |from: usize, to: usize| {
            bytes
                .get(from..to)
                .unwrap_or_default()
                .iter()
                .rev()
                .fold(0u64, |number, byte| number << 8 | u64::from(*byte))
        };
        let small = |from: usize| u16::try_from(part(from, from + 2)).unwrap_or(0);
        Some((part(0, 8), u32::try_from(part(8, 12)).ok()?, small(12), small(14)))
    }

    /// The parts of a request from a table of `count` entries, or `None` if it is invalid.
    fn walk(
        &self,
        table: u64,
        count: u64,
        head: u64,
        indirect: bool,
        in_table: bool,
    ) -> Option<Vec<Descriptor>> {
        let (mut parts, mut seen, mut next) = (Vec::new(), HashSet::new(), head);
        loop {
            if next >= count || !seen.insert(next) {
                return None;
            }
            let part = self.descriptor(table, next)?;
            if part.2 & INDIRECT != 0 {
                let is_possible = part.1.is_multiple_of(16) && (16..=16_384).contains(&part.1);
                if in_table || !indirect || part.2 & NEXT != 0 || !is_possible {
                    return None;
                }
                parts.extend(self.walk(part.0, u64::from(part.1) / 16, 0, indirect, true)?);
                return Some(parts);
            }
            parts.push(part);
            if part.2 & NEXT == 0 {
                return Some(parts);
            }
            next = u64::from(part.3);
        }
    }
}

/// The buffers to read and to write, in order: address and length.
type Lists = (Vec<(u64, u32)>, Vec<(u64, u32)>);

fn split(parts: &[Descriptor]) -> Option<Lists> {
    let (mut readable, mut writable) = (Vec::new(), Vec::new());
    for (addr, len, flags, _) in parts {
        if flags & WRITE == 0 && !writable.is_empty() {
            return None;
        }
        let list = if flags & WRITE == 0 { &mut readable } else { &mut writable };
        if *len > 0 {
            list.push((*addr, *len));
        }
    }
    Some((readable, writable))
}

fn found(chain: &Chain) -> Lists {
    let list = |buffers: &[crate::queue::chain::Buffer]| buffers.iter().map(|b| (b.addr, b.len)).collect();
    (list(&chain.readable), list(&chain.writable))
}

/// Two bytes of the head, one that says whether tables may be indirect, and the guest's memory.
pub fn vhost_chain(bytes: &[u8]) {
    let Some(([low, high, indirect], content)) = bytes.split_first_chunk() else { return };
    let (head, indirect) = (u16::from_le_bytes([*low, *high]), indirect & 1 != 0);
    let mut plain = Plain(vec![0; MEMORY_BYTES]);
    for (to, from) in plain.0.iter_mut().zip(content) {
        *to = *from;
    }
    GUEST.with(|guest| {
        let Some(guest) = guest else { panic!("no memory for a guest") };
        let mut before = 0;
        for (start, len, _) in REGIONS {
            let segment = guest.memory.segment(start, u64::try_from(len).unwrap_or(0));
            let Some(mut segment) = segment else { panic!("a region is missing") };
            segment.copy_from(plain.0.get(before..before + len).unwrap_or_default());
            before += len;
        }
        follow(guest, &plain, head, indirect);
    });
}

fn follow(guest: &Guest, plain: &Plain, head: u16, indirect: bool) {
    let mut chain = Chain::default();
    let loaded = chain.load(&guest.rings, head, indirect);
    let parts = plain.walk(REGIONS[0].0, u64::from(ENTRIES), u64::from(head), indirect, false);
    let expected = parts.and_then(|parts| split(&parts));
    let Some((mut readable, mut writable)) = expected else {
        assert!(loaded.is_err(), "a chain that breaks the rules was taken: {:?}", found(&chain));
        return;
    };
    assert!(loaded.is_ok(), "a chain that keeps the rules was refused: {loaded:?}");
    assert_eq!(found(&chain), (readable.clone(), writable.clone()));

    // The last byte that the device writes.
    let status = writable.pop().and_then(|(addr, len)| {
        if len > 1 {
            writable.push((addr, len - 1));
        }
        addr.checked_add(u64::from(len) - 1)
    });
    if status.is_some() {
        assert_eq!(chain.take_status(), status);
        assert_eq!(found(&chain).1, writable);
    } else if found(&chain).1.is_empty() {
        assert_eq!(chain.take_status(), None);
        return;
    }

    // The first 16 bytes that it reads.
    let mut header = Vec::new();
    while header.len() < 16 {
        let Some((addr, len)) = readable.first().copied() else { break };
        let take = len.min(u32::try_from(16 - header.len()).unwrap_or(0));
        let Some(piece) = plain.at(addr, u64::from(take)) else {
            header.clear();
            break;
        };
        header.extend_from_slice(piece);
        readable.remove(0);
        if take < len {
            readable.insert(0, (addr.wrapping_add(u64::from(take)), len - take));
        }
    }
    let taken: Option<[u8; 16]> = chain.take_header(&guest.memory);
    let header: Option<[u8; 16]> = header.try_into().ok();
    assert_eq!(taken, header);
    let Some(header) = header else { return };
    assert_eq!(found(&chain).0, readable);
    request(header, &readable, plain);
}

fn request(header: [u8; 16], readable: &[(u64, u32)], plain: &Plain) {
    let little = |from: usize, len: usize| {
        header.iter().skip(from).take(len).rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte))
    };
    let decoded = Header::decode(header);
    let command = match little(0, 4) {
        0 => Command::Read,
        1 => Command::Write,
        4 => Command::Flush,
        8 => Command::Id,
        11 => Command::Discard,
        13 => Command::WriteZeroes,
        other => Command::Unknown(u32::try_from(other).unwrap_or(u32::MAX)),
    };
    let offset = u64::try_from(u128::from(little(8, 8)) * 512).ok();
    assert_eq!(decoded, Header { command, offset });
    let mut list = Vec::new();
    for (addr, len) in readable {
        let Some(piece) = plain.at(*addr, u64::from(*len)) else { return };
        list.extend_from_slice(piece);
    }
    for command in [Command::Discard, Command::WriteZeroes] {
        assert_eq!(decode_ranges(&list, command).map_err(|(status, _)| status), ranges(&list, command));
    }
}

fn ranges(list: &[u8], command: Command) -> Result<Vec<Piece>, Status> {
    if list.is_empty() || !list.len().is_multiple_of(16) {
        return Err(Status::IoError);
    }
    let mut pieces = Vec::new();
    for range in list.chunks(16) {
        let little = |from: usize, len: usize| {
            range
                .iter()
                .skip(from)
                .take(len)
                .rev()
                .fold(0u128, |number, byte| number << 8 | u128::from(*byte))
        };
        let (start, len, flags) = (little(0, 8) * 512, little(8, 4) * 512, little(12, 4));
        // UNMAP is a flag of zero writes only.
        if flags > u128::from(command == Command::WriteZeroes) {
            return Err(Status::Unsupported);
        }
        let fits = len <= 2 << 30 && start + len <= u128::from(u64::MAX);
        let range = u64::try_from(start).ok().zip(u64::try_from(len).ok()).filter(|_| fits);
        let range = range.and_then(|(start, len)| ByteRange::new(start, len)).ok_or(Status::IoError)?;
        pieces.push(Piece { range, may_unmap: command == Command::Discard || flags == 1 });
    }
    Ok(pieces)
}

/// A disk of 1 MiB that is empty and stores nothing.
struct Empty;

impl Device for Empty {
    fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: 1 << 20,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            read_only: false,
            volatile_cache: true,
        }
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        if let Op::Read { into, .. } = op {
            into.fill(0);
        }
        Ok(Attempt::Done)
    }

    fn submit(&self, request: Request, done: Completion) {
        done.complete(Ok(()), request.into_buffer());
    }

    fn extents(&self, range: ByteRange, _: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Hole }])
    }
}

const HEADER_BYTES: usize = 12;
/// The most bytes that a message has after its header.
const BODY_BYTES: usize = 0x1000;
const NEED_REPLY: u32 = 8;
const QUEUES: u64 = 64;
/// `SET_MEM_TABLE`, `SET_VRING_KICK`, `CALL` and `ERR`, `ADD_MEM_REG`, `SET_INFLIGHT_FD`: messages with a descriptor.
const WITH_DESCRIPTOR: [u32; 6] = [5, 12, 13, 14, 32, 37];

fn message(code: u32, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len()).unwrap_or(0);
    [&code.to_le_bytes()[..], &(1 | NEED_REPLY).to_le_bytes(), &len.to_le_bytes(), body].concat()
}

/// All messages of a front-end, from start to end.
fn session() -> Vec<u8> {
    let numbers = |list: &[u64]| list.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
    let words = |list: &[u32]| list.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
    let region = numbers(&[0x1000, 0x8000, 0x7000_0000, 0]);
    let rings = [words(&[0, 0]), numbers(&[0x7000_0000, 0x7000_2000, 0x7000_1000, 0])].concat();
    let config = [words(&[0, 60, 0]), vec![0; 60]].concat();
    // The first of a kind asks for no answer, the second does.
    let mut unanswered = message(16, &numbers(&[1]));
    unanswered[4] = 1;
    [
        message(3, &[]),
        message(1, &[]),
        message(15, &[]),
        unanswered,
        message(16, &numbers(&[1 | 1 << 3 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 15])),
        message(17, &[]),
        message(2, &numbers(&[1 << 9 | 1 << 28 | 1 << 30 | 1 << 32])),
        message(24, &config),
        message(36, &[]),
        message(5, &[words(&[1, 0]), region.clone()].concat()),
        message(31, &numbers(&[0, 0, 1 | 16 << 16])),
        message(32, &numbers(&[320, 0, 1 | 16 << 16])),
        message(8, &words(&[0, 16])),
        message(10, &words(&[0, 0])),
        message(9, &rings),
        message(13, &numbers(&[0])),
        message(12, &numbers(&[0])),
        message(18, &words(&[0, 1])),
        message(11, &words(&[0, 0])),
        message(37, &[numbers(&[0]), numbers(&[0x10_0000, 0x1000, 0x7800_0000, 0])].concat()),
        message(38, &[numbers(&[0]), numbers(&[0x10_0000, 0x1000, 0x7800_0000, 0])].concat()),
        message(34, &[]),
    ]
    .concat()
}

/// The messages of a stream: code, flags and body, as each header says.
fn messages(mut bytes: &[u8]) -> Vec<(u32, u32, &[u8])> {
    let mut out = Vec::new();
    while let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() {
        let word = |at: usize| {
            header.iter().skip(at).take(4).rev().fold(0u32, |number, byte| number << 8 | u32::from(*byte))
        };
        let len = usize::try_from(word(8)).unwrap_or(usize::MAX).min(rest.len()).min(BODY_BYTES);
        let (body, rest) = rest.split_at(len);
        out.push((word(0), word(4), body));
        bytes = rest;
    }
    out
}

/// What a front-end sends: complete messages, cut messages, and other bytes.
pub fn vhost_messages(bytes: &[u8]) {
    let Ok((ours, theirs)) = UnixStream::pair() else { panic!("no sockets") };
    let (Ok(file), Ok(event)) =
        (memfd(1 << 16), rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK))
    else {
        panic!("no file descriptors")
    };
    let sent = messages(bytes);
    let mut rest = bytes;
    for (code, _, body) in &sent {
        let (message, after) = rest.split_at((HEADER_BYTES + body.len()).min(rest.len()));
        rest = after;
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptor = if matches!(code, 5 | 37) { [file.as_fd()] } else { [event.as_fd()] };
        if WITH_DESCRIPTOR.contains(code) {
            control.push(SendAncillaryMessage::ScmRights(&descriptor));
        }
        let parts = [std::io::IoSlice::new(message)];
        let sent =
            rustix::net::sendmsg(&ours, &parts, &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        // What does not fit into the socket is not sent, because nobody reads yet.
        if sent != Ok(message.len()) {
            break;
        }
    }
    let _ = ours.shutdown(std::net::Shutdown::Write);

    let disk = Arc::new(Disk::new(Arc::new(Empty), Options::default()));
    let control = Arc::new(Mutex::new(Control::new(Arc::clone(&disk), Box::new(|| false))));
    let mut handler = BackendReqHandler::from_stream(theirs, Arc::clone(&control));
    while handler.handle_request().is_ok() {}
    drop(handler);
    let mut control = control.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    assert!(control.stop_all(), "a queue did not end");
    drop(control);
    let mut answers = Vec::new();
    let _ = std::io::Read::read_to_end(&mut &ours, &mut answers);
    check_replies(&sent, &answers, &disk);
}

/// Requests that are always answered, because the answer is their purpose.
const ALWAYS_ANSWERED: [u32; 10] = [1, 11, 15, 17, 24, 31, 36, 41, 42, 43];

fn check_replies(sent: &[(u32, u32, &[u8])], answers: &[u8], disk: &Disk) {
    let mut asked = sent.iter();
    let mut total = 0;
    for (code, flags, body) in messages(answers) {
        total += HEADER_BYTES + body.len();
        assert_eq!(flags & 7, 5, "a reply to {code} without version 1 and the flag of replies: {flags:#x}");
        // Others are answered only on request, so an earlier message of the same kind may not have been
        // answered.
        let has_answer = |flags: u32| ALWAYS_ANSWERED.contains(&code) || flags & NEED_REPLY != 0;
        let question = asked.find(|(asked, flags, _)| *asked == code && has_answer(*flags));
        let Some((_, _, asked_body)) = question else {
            panic!("a reply to {code}, which was not sent, or did not ask for one")
        };
        let little = |from: usize, len: usize| {
            body.iter().skip(from).take(len).rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte))
        };
        match code {
            // VIRTIO_BLK_F_*, VIRTIO_F_* and VHOST_USER_F_PROTOCOL_FEATURES
            1 => {
                let bits = [1, 2, 6, 9, 10, 11, 12, 13, 14, 28, 29, 30, 32];
                assert_eq!(little(0, 8), bits.iter().fold(0, |set, bit| set | 1u64 << bit));
            }
            // MQ, REPLY_ACK, CONFIG, INFLIGHT_SHMFD, RESET_DEVICE, CONFIGURE_MEM_SLOTS
            15 => assert_eq!(little(0, 8), 1 | 1 << 3 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 15),
            // A region for as many queues and entries as were asked for.
            31 => {
                assert_eq!(body.get(16..20), asked_body.get(16..20));
                assert!(little(0, 8) >= 64 && little(8, 8) == 0 && little(16, 2) <= QUEUES);
            }
            17 => assert_eq!(little(0, 8), QUEUES),
            36 => assert_eq!(little(0, 8), 256),
            11 => {
                let index =
                    asked_body.iter().take(4).rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
                assert!(little(0, 4) == index && index < QUEUES && little(4, 4) <= 0xffff);
            }
            // Messages about a machine's state that is migrated: always answered by a number. That we do not
            // offer this changes nothing.
            42 | 43 => assert_eq!(body.len(), 8, "the state of a device is a number"),
            // The same for objects that back-ends share: without a descriptor there is none.
            41 => assert_eq!(body.len(), 0, "there is no shared object"),
            24 if body.is_empty() => {}
            24 => config(body, disk),
            _ => assert_eq!(body.len(), 8, "an acknowledgement has one number"),
        }
    }
    assert_eq!(total, answers.len(), "replies have other lengths than their headers say");
}

/// Offset, length, flags and the existing bytes of the configuration space; zeroes after its end.
fn config(body: &[u8], disk: &Disk) {
    let word = |at: usize| {
        body.iter().skip(at).take(4).rev().fold(0usize, |number, byte| number << 8 | usize::from(*byte))
    };
    let (offset, len) = (word(0), word(4));
    let given = body.get(12..).unwrap_or_default();
    if given.is_empty() {
        return;
    }
    assert!(given.len() == len && offset + len <= 256, "{len} bytes at {offset}");
    let either = [true, false].map(|write_back| {
        let mut space = config_space::bytes(&disk.geometry, 64, write_back).to_vec();
        space.resize(256, 0);
        space.get(offset..offset + len).map(<[u8]>::to_vec)
    });
    assert!(either.iter().any(|space| space.as_deref() == Some(given)), "another configuration space");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small version of the fuzzers' work.
    #[test]
    fn no_bytes_break_a_promise() {
        headwater_testkit::mutate::all(targets());
    }
}
