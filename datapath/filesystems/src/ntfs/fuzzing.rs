//! An oracle for any bytes that are read as an NTFS, and a small volume to begin with.
//!
//! Bytes are pieces of a disk: a first sector, a count of sectors, and these. Update sequences are put right first, or
//! no change of a record would be looked at.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use headwater_block::{IoError, IoErrorKind};

use super::Ntfs;
use super::boot::STRIDE_BYTES;
use super::fields::{place_at, u16_at};
use crate::units::{u64_of, usize_of};
use crate::{Bytes, Fault, FileSystem, Node, NodeKind, Owner, Partition, ReadAt, Scanned, Visits};

/// The largest disk.
const SECTORS_MAX: usize = 4096;
/// How many files are read, and how much of each.
const FILES_READ: usize = 50;
const READ_BYTES: usize = 64 << 10;
/// The most that one step may read of such a disk: with more than this, somebody waits for damaged tables.
const STEP_BYTES_MAX: u64 = 4 << 30;

struct Disk {
    bytes: Vec<u8>,
    read_bytes: AtomicU64,
}

impl ReadAt for Disk {
    fn len_bytes(&self) -> u64 {
        u64_of(self.bytes.len())
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<(), IoError> {
        self.read_bytes.fetch_add(u64_of(into.len()), Ordering::Relaxed);
        let part = self.bytes.get(usize_of(at)..).and_then(|rest| rest.get(..into.len()));
        let part = part.ok_or_else(|| IoError::new(IoErrorKind::Invalid, "past the end"))?;
        into.copy_from_slice(part);
        Ok(())
    }
}

/// The disk that pieces are of.
fn disk_of(mut pieces: &[u8]) -> Vec<u8> {
    let mut disk = Vec::new();
    while let Some((head, rest)) = pieces.split_first_chunk::<4>() {
        let first = usize::from(u16::from_le_bytes([head[0], head[1]])) % SECTORS_MAX;
        let count = usize::from(u16::from_le_bytes([head[2], head[3]])).min(SECTORS_MAX - first);
        let (data, rest) = rest.split_at(rest.len().min(count * STRIDE_BYTES));
        pieces = rest;
        disk.resize(disk.len().max((first + count) * STRIDE_BYTES), 0);
        if let Some(place) = disk.get_mut(first * STRIDE_BYTES..).and_then(|rest| rest.get_mut(..data.len()))
        {
            place.copy_from_slice(data);
        }
    }
    for at in (0..disk.len()).step_by(STRIDE_BYTES) {
        seal(&mut disk, at);
    }
    disk
}

/// Puts the numbers of a record's update sequence right.
fn seal(disk: &mut [u8], at: usize) {
    let Some(record) = disk.get_mut(at..) else { return };
    let is_record = [&b"FILE"[..], b"INDX", b"RSTR"].iter().any(|magic| record.starts_with(magic));
    let (Some(place), Some(count)) = (place_at(record, 4), place_at(record, 6)) else { return };
    let Some(number) = u16_at(record, place).filter(|_| is_record) else { return };
    for stride in record.chunks_exact_mut(STRIDE_BYTES).take(count.saturating_sub(1)) {
        if let Some(mark) = stride.last_chunk_mut() {
            *mark = number.to_le_bytes();
        }
    }
}

/// The pieces of a disk: its sectors that are not zero.
fn pieces_of(disk: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let is_used = |sector: &[u8]| sector.iter().any(|byte| *byte != 0);
    let sectors: Vec<&[u8]> = disk.chunks(STRIDE_BYTES).collect();
    let mut first = 0;
    for stretch in sectors.chunk_by(|a, b| is_used(a) == is_used(b)) {
        if stretch.first().is_some_and(|sector| is_used(sector)) {
            for number in [first, stretch.len()] {
                out.extend_from_slice(&u16::try_from(number).unwrap_or(0).to_le_bytes());
            }
            stretch.iter().for_each(|sector| out.extend_from_slice(sector));
        }
        first += stretch.len();
    }
    // The last sector says how long it is.
    let last = u16::try_from(sectors.len().saturating_sub(1)).unwrap_or(0);
    out.extend_from_slice(&[last.to_le_bytes(), 1u16.to_le_bytes()].concat());
    out
}

fn reader(disk: &Arc<Disk>) -> Result<Ntfs, Fault> {
    let partition = Partition { number: 0, offset_bytes: 0, len_bytes: disk.len_bytes() };
    Ntfs::open(Bytes::new(disk.clone(), &partition))
}

struct Look {
    disk: Arc<Disk>,
    ntfs: Ntfs,
    visits: Visits,
}

impl Look {
    fn step<R>(&mut self, work: impl FnOnce(&mut Ntfs, &mut Visits) -> R) -> R {
        let before = self.disk.read_bytes.load(Ordering::Relaxed);
        let result = work(&mut self.ntfs, &mut self.visits);
        let took = self.disk.read_bytes.load(Ordering::Relaxed).saturating_sub(before);
        assert!(took <= STEP_BYTES_MAX, "one step read {took} bytes");
        result
    }

    /// Reads a file at once, in parts, and at its end.
    fn file(&mut self, file: &Node) {
        let (mut whole, mut parts) = (vec![0xaa; READ_BYTES], vec![0x55; READ_BYTES]);
        let Ok(len) = self.step(|ntfs, _| ntfs.read(file, 0, &mut whole)) else { return };
        assert!(u64_of(len) <= file.size_bytes, "{len} bytes were read of {file:?}");
        let mut at = 0;
        for part in parts.chunks_mut(9000) {
            let len = self.step(|ntfs, _| ntfs.read(file, u64_of(at), part));
            assert!(len.is_ok(), "{file:?} cannot be read in parts: {len:?}");
            let len = len.unwrap_or(0);
            at += len;
            if len < part.len() {
                break;
            }
        }
        assert!(whole.get(..len) == parts.get(..at), "{file:?} reads differently in parts");
        let _ = self.step(|ntfs, _| ntfs.read(file, file.size_bytes.saturating_sub(100), &mut whole));
    }
}

/// An NTFS: whatever is read is bounded; the walk by directories ends and finds nothing that the scan does not; runs lie in the
/// partition; files read the same however they are read.
pub fn ntfs_volume(pieces: &[u8]) {
    let disk = Arc::new(Disk { bytes: disk_of(pieces), read_bytes: AtomicU64::new(0) });
    let Ok(ntfs) = reader(&disk) else { return };
    let mut look = Look { disk, ntfs, visits: Visits::new(|| false) };
    let mut names: BTreeMap<u64, BTreeSet<(u64, Vec<u8>)>> = BTreeMap::new();
    let mut unreadable = BTreeSet::new();
    let len_bytes = look.disk.len_bytes();
    let scanned = look.step(|ntfs, visits| {
        ntfs.scan(visits, &mut |scanned| {
            match scanned {
                Scanned::Run { bytes, owner } => {
                    let is_sound = bytes.start < bytes.end && bytes.end <= len_bytes;
                    assert!(is_sound, "{owner:?} has {bytes:?} of {len_bytes} bytes");
                    assert!(!matches!(owner, Owner::File(id) if id < 5), "{owner:?}");
                }
                Scanned::Name { id, parent, name } => {
                    assert!(!name.is_empty() && !name.contains(&b'/'), "{name:?}");
                    names.entry(id).or_default().insert((parent, name));
                }
                Scanned::Unreadable { id, .. } => drop(unreadable.insert(id)),
            }
            Ok(())
        })
    });
    let Ok(()) = scanned else { return };
    let count: usize = names.values().map(BTreeSet::len).sum();
    let (mut left, mut seen, mut read) = (vec![look.ntfs.root()], 0, 0);
    while let Some(directory) = left.pop() {
        let Ok(entries) = look.step(|ntfs, visits| ntfs.list(&directory, visits)) else { continue };
        for (name, node) in entries {
            seen += 1;
            assert!(seen <= count, "there are more than {count} entries");
            assert!(node.path == directory.child(&name), "{name:?} has the path {:?}", node.path);
            if node.fault.is_some() {
                continue;
            }
            let is_scanned =
                names.get(&node.id).is_some_and(|its| its.contains(&(directory.id, name.clone())));
            assert!(is_scanned && !unreadable.contains(&node.id), "the scan does not find {node:?}");
            match node.kind {
                NodeKind::Directory => left.push(node),
                NodeKind::Link => drop(look.step(|ntfs, _| ntfs.link(&node))),
                NodeKind::File if read < FILES_READ => {
                    read += 1;
                    look.file(&node);
                }
                NodeKind::File | NodeKind::Other => {}
            }
        }
    }
}

/// Bytes to begin with.
pub fn ntfs_samples() -> Vec<Vec<u8>> {
    vec![pieces_of(&crafted::volume())]
}

/// A volume with one of each, made here: no tool makes it that small.
pub(super) mod crafted {
    use super::super::record::types;
    use super::STRIDE_BYTES;

    const MFT_CLUSTER: u8 = 16;
    const RECORDS: usize = 40;
    const RECORD_BYTES: usize = 1024;
    const ROOT: u64 = 5 | 5 << 48;
    const DIRECTORY: u64 = 24 | 1 << 48;
    fn utf16(name: &str) -> Vec<u8> {
        name.encode_utf16().flat_map(u16::to_le_bytes).collect()
    }

    fn padded(mut attribute: Vec<u8>) -> Vec<u8> {
        attribute.resize(attribute.len().next_multiple_of(8), 0);
        let len = u32::try_from(attribute.len()).unwrap_or(0).to_le_bytes();
        put(&mut attribute, 4, &len);
        attribute
    }

    fn put(into: &mut [u8], at: usize, bytes: &[u8]) {
        if let Some(place) = into.get_mut(at..).and_then(|rest| rest.get_mut(..bytes.len())) {
            place.copy_from_slice(bytes);
        }
    }

    fn small(value: usize) -> u8 {
        u8::try_from(value).unwrap_or(0)
    }

    fn resident(kind: u32, name: &str, value: &[u8]) -> Vec<u8> {
        let name = utf16(name);
        let value_at = (24 + name.len()).next_multiple_of(8);
        let mut out = vec![0; value_at];
        put(&mut out, 0, &kind.to_le_bytes());
        put(&mut out, 8, &[0, small(name.len() / 2), 24, 0]);
        put(&mut out, 16, &u32::try_from(value.len()).unwrap_or(0).to_le_bytes());
        put(&mut out, 20, &[small(value_at), 0]);
        put(&mut out, 24, &name);
        out.extend_from_slice(value);
        padded(out)
    }

    /// An attribute in clusters, whose first and last one are these.
    fn clusters(kind: u32, name: &str, (first, last): (u64, u64), size_bytes: u64, runs: &[u8]) -> Vec<u8> {
        let name = utf16(name);
        let runs_at = (64 + name.len()).next_multiple_of(8);
        let mut out = vec![0; runs_at];
        put(&mut out, 0, &kind.to_le_bytes());
        put(&mut out, 8, &[1, small(name.len() / 2), 64, 0]);
        put(&mut out, 16, &first.to_le_bytes());
        put(&mut out, 24, &last.to_le_bytes());
        put(&mut out, 32, &[small(runs_at), 0]);
        for at in [40, 48, 56] {
            put(&mut out, at, &size_bytes.to_le_bytes());
        }
        put(&mut out, 64, &name);
        out.extend_from_slice(runs);
        out.push(0);
        padded(out)
    }

    fn standard(attributes: u32) -> Vec<u8> {
        let mut value = vec![0; 72];
        put(&mut value, 8, &1000u64.to_le_bytes());
        put(&mut value, 32, &attributes.to_le_bytes());
        resident(types::STANDARD_INFORMATION, "", &value)
    }

    fn name_value(parent: u64, kind: u8, name: &str) -> Vec<u8> {
        let name = utf16(name);
        let mut value = vec![0; 66];
        put(&mut value, 0, &parent.to_le_bytes());
        put(&mut value, 64, &[small(name.len() / 2), kind]);
        value.extend_from_slice(&name);
        value
    }

    fn file_name(parent: u64, kind: u8, name: &str) -> Vec<u8> {
        resident(types::FILE_NAME, "", &name_value(parent, kind, name))
    }

    fn listed(kind: u32, first: u64, record: u64) -> Vec<u8> {
        let mut entry = vec![0; 32];
        put(&mut entry, 0, &kind.to_le_bytes());
        put(&mut entry, 4, &[32, 0, 0, 26]);
        put(&mut entry, 8, &first.to_le_bytes());
        put(&mut entry, 16, &(record | 1 << 48).to_le_bytes());
        entry
    }

    fn index_entry(record: u64, flags: u8, key: &[u8]) -> Vec<u8> {
        let mut entry = vec![0; 16];
        put(&mut entry, 0, &record.to_le_bytes());
        entry.extend_from_slice(key);
        entry.resize(entry.len().next_multiple_of(8), 0);
        let len = small(entry.len());
        put(&mut entry, 8, &[len, 0, small(key.len()), 0, flags]);
        entry
    }

    fn node(entries: &[u8], begin: usize) -> Vec<u8> {
        let mut out = vec![0; begin];
        put(&mut out, 0, &[small(begin)]);
        put(&mut out, 4, &u32::try_from(begin + entries.len()).unwrap_or(0).to_le_bytes());
        out.extend_from_slice(entries);
        out
    }

    fn update_sequence(record: &mut [u8], at: u8) {
        let count = record.len() / STRIDE_BYTES + 1;
        put(record, 4, &[at, 0, small(count), 0]);
        put(record, at.into(), &[9, 9]);
        for stride in 0..count - 1 {
            let mark = stride * STRIDE_BYTES + STRIDE_BYTES - 2;
            let kept: Vec<u8> = record.get(mark..mark + 2).unwrap_or_default().to_vec();
            put(record, usize::from(at) + 2 + 2 * stride, &kept);
            put(record, mark, &[9, 9]);
        }
    }

    fn record(sequence: u8, flags: u8, base: u64, attributes: &[Vec<u8>]) -> Vec<u8> {
        let mut out = vec![0; 56];
        put(&mut out, 0, b"FILE");
        put(&mut out, 16, &[sequence, 0, 1, 0, 56, 0, flags, 0]);
        put(&mut out, 32, &base.to_le_bytes());
        out.extend_from_slice(&attributes.concat());
        out.extend_from_slice(&[0xff; 4]);
        let used = u32::try_from(out.len()).unwrap_or(0);
        put(&mut out, 24, &used.to_le_bytes());
        out.resize(RECORD_BYTES, 0);
        update_sequence(&mut out, 48);
        out
    }

    /// The root of an index, without entries of its own.
    fn index_root() -> Vec<u8> {
        let node = node(&index_entry(0, 2, &[]), 16);
        resident(types::INDEX_ROOT, "$I30", &[&[0x30, 0, 0, 0][..], &[0; 12], &node].concat())
    }

    /// The directory's index: of a file that can be read, and of one that cannot.
    fn index_block() -> Vec<u8> {
        let entries = [
            index_entry(26 | 1 << 48, 0, &name_value(DIRECTORY, 0, "large")),
            index_entry(31 | 1 << 48, 0, &name_value(DIRECTORY, 0, "lost")),
            index_entry(0, 2, &[]),
        ];
        let mut block = vec![0; 24];
        put(&mut block, 0, b"INDX");
        block.extend_from_slice(&node(&entries.concat(), 40));
        block.resize(1024, 0);
        update_sequence(&mut block, 40);
        block
    }

    fn records() -> Vec<(usize, Vec<u8>)> {
        let mft_bytes = 1024 * 40;
        let link: Vec<u8> =
            [&[0u8, 0, 4, 0, 4, 0, 4, 0, 1, 0, 0, 0][..], &utf16("up"), &utf16("up")].concat();
        let reparse = [&0xa000_000cu32.to_le_bytes()[..], &[small(link.len()), 0, 0, 0], &link].concat();
        let list = [
            listed(types::STANDARD_INFORMATION, 0, 26),
            listed(types::FILE_NAME, 0, 26),
            listed(types::DATA, 0, 27),
            listed(types::DATA, 4, 28),
        ];
        // Its place needs two bytes, or it would be negative.
        let mut packed = clusters(types::DATA, "", (0, 15), 8192, &[0x21, 1, 130, 0, 0x01, 15]);
        put(&mut packed, 12, &[1]);
        put(&mut packed, 34, &[4]);
        vec![
            (
                0,
                record(
                    1,
                    1,
                    0,
                    &[
                        standard(6),
                        file_name(ROOT, 3, "$MFT"),
                        clusters(types::DATA, "", (0, 79), mft_bytes, &[0x11, 80, MFT_CLUSTER]),
                        resident(types::BITMAP, "", &[0x21, 0, 0, 0xff, 0, 0, 0, 0]),
                    ],
                ),
            ),
            (5, record(5, 3, 0, &[standard(6), file_name(ROOT, 3, "."), index_root()])),
            (
                24,
                record(
                    1,
                    3,
                    0,
                    &[
                        standard(0),
                        file_name(ROOT, 3, "dir"),
                        index_root(),
                        clusters(types::INDEX_ALLOCATION, "$I30", (0, 1), 1024, &[0x11, 2, 100]),
                        resident(types::BITMAP, "$I30", &[1, 0, 0, 0, 0, 0, 0, 0]),
                    ],
                ),
            ),
            (
                25,
                record(
                    1,
                    1,
                    0,
                    &[
                        standard(32),
                        file_name(ROOT, 2, "HELLO~1"),
                        file_name(ROOT, 1, "hello"),
                        resident(types::DATA, "", b"hello, world"),
                        resident(types::DATA, "s", b"stream"),
                    ],
                ),
            ),
            (
                26,
                record(
                    1,
                    1,
                    0,
                    &[
                        standard(32),
                        resident(types::ATTRIBUTE_LIST, "", &list.concat()),
                        file_name(DIRECTORY, 0, "large"),
                    ],
                ),
            ),
            (27, record(1, 1, 26 | 1 << 48, &[clusters(types::DATA, "", (0, 3), 4000, &[0x11, 4, 110])])),
            (
                28,
                record(1, 1, 26 | 1 << 48, &[clusters(types::DATA, "", (4, 7), 0, &[0x01, 2, 0x11, 2, 120])]),
            ),
            (29, record(1, 1, 0, &[standard(0x820), file_name(ROOT, 3, "packed"), packed])),
            (
                30,
                record(
                    1,
                    1,
                    0,
                    &[
                        standard(0x400),
                        file_name(ROOT, 3, "link"),
                        resident(types::REPARSE_POINT, "", &reparse),
                    ],
                ),
            ),
        ]
    }

    /// The whole disk.
    pub(in super::super) fn volume() -> Vec<u8> {
        let mut disk = vec![0; 200 * STRIDE_BYTES];
        put(&mut disk, 3, b"NTFS    ");
        put(&mut disk, 11, &[0, 2, 1]);
        put(&mut disk, 40, &199u64.to_le_bytes());
        put(&mut disk, 48, &u64::from(MFT_CLUSTER).to_le_bytes());
        put(&mut disk, 64, &[0xf6, 0, 0, 0, 0xf6]);
        put(&mut disk, 510, &[0x55, 0xaa]);
        let mft_at = usize::from(MFT_CLUSTER) * STRIDE_BYTES;
        for (number, record) in records() {
            put(&mut disk, mft_at + number * RECORD_BYTES, &record);
        }
        put(&mut disk, 100 * STRIDE_BYTES, &index_block());
        put(&mut disk, 110 * STRIDE_BYTES, &[b'x'; 4 * STRIDE_BYTES]);
        put(&mut disk, 120 * STRIDE_BYTES, &[b'y'; 2 * STRIDE_BYTES]);
        put(&mut disk, 130 * STRIDE_BYTES, &super::super::lznt1::EXAMPLE);
        const { assert!(RECORDS * RECORD_BYTES == 80 * STRIDE_BYTES) };
        disk
    }
}

#[cfg(test)]
mod tests {
    use super::super::lznt1::EXAMPLE_TEXT;
    use super::*;

    #[test]
    fn the_crafted_volume_is_read_as_it_was_made() {
        let disk = disk_of(&ntfs_samples()[0]);
        assert!(disk == crafted::volume(), "pieces are not the disk");
        let disk = Arc::new(Disk { bytes: disk, read_bytes: AtomicU64::new(0) });
        let mut ntfs = reader(&disk).unwrap();
        let mut visits = Visits::new(|| false);
        let root = ntfs.root();
        let entries = ntfs.list(&root, &mut visits).unwrap();
        let names: Vec<_> = entries.keys().map(|name| String::from_utf8_lossy(name)).collect();
        assert_eq!(names, ["dir", "hello", "hello:s", "link", "packed"]);
        let read = |ntfs: &mut Ntfs, node: &Node| {
            let mut out = vec![0; 9000];
            let len = ntfs.read(node, 0, &mut out).unwrap();
            out.truncate(len);
            out
        };
        assert_eq!(read(&mut ntfs, &entries[&b"hello"[..]]), b"hello, world");
        assert_eq!(read(&mut ntfs, &entries[&b"hello:s"[..]]), b"stream");
        assert_eq!(ntfs.link(&entries[&b"link"[..]]).unwrap(), b"up");
        let packed = read(&mut ntfs, &entries[&b"packed"[..]]);
        let text = EXAMPLE_TEXT;
        assert!(
            packed.len() == 8192
                && packed.starts_with(text)
                && packed[text.len()..] == [0; 8192][text.len()..]
        );
        let inner = ntfs.list(&entries[&b"dir"[..]], &mut visits).unwrap();
        let large = read(&mut ntfs, &inner[&b"large"[..]]);
        let expected = [vec![b'x'; 2048], vec![0; 1024], vec![b'y'; 928]].concat();
        assert!(large == expected, "{}", large.len());
        assert!(inner[&b"lost"[..]].fault.is_some());
    }
}
