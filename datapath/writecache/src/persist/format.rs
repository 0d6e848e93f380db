//! Encodes and decodes the bytes of a persistent cache's `map` file, without file access. The format is
//! described in `docs/format-cache.md`.
//!
//! A map is a [`Header`] and records. Each record has a checksum and a sequence number. The records before a
//! [`Record::Commit`] are valid together with it, or not at all.

use crate::overflow::encrypt::{ENCRYPTED_SLOT_BYTES, TAG_BYTES};
use crate::units::SLOT_COUNT;

/// The first bytes of the file.
pub const MAGIC: [u8; 8] = *b"HWCACHE\n";

/// The format's version. No other version is read.
pub const VERSION: u32 = 1;

/// Bytes of the header.
pub const HEADER_BYTES: usize = 128;

/// Bytes in front of each record's body.
pub const RECORD_HEADER_BYTES: usize = 16;

/// In an extent: the slot has no block.
pub const NO_BLOCK: u32 = u32::MAX;

/// The most ranges in one record.
pub const MAX_RANGES: usize = 1024;

/// The most parts of blocks in one record.
pub const MAX_PARTS: usize = 256;

/// Bytes of a part of a block in a record.
const PART_BYTES: usize = 24;

/// In a part: its sectors are zero, and in no slot.
const PART_ZERO: u8 = 1;

/// The most encrypted slots in one record.
pub const MAX_ENCRYPTED: usize = 16;

/// Bytes of the longest record.
pub const MAX_RECORD_BYTES: usize = RECORD_HEADER_BYTES + 16 + MAX_ENCRYPTED * (4 + ENCRYPTED_SLOT_BYTES);

const KIND_EXTENT: u8 = 1;
const KIND_ABSENT: u8 = 2;
const KIND_ZERO: u8 = 3;
const KIND_COMMIT: u8 = 4;
const KIND_ENCRYPTED: u8 = 5;
const KIND_PARTS: u8 = 6;

/// The number of header bytes that the key check covers.
pub const CHECKED_BYTES: usize = 56;

/// Identifies the cache, its base and its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Size of the volume.
    pub size_bytes: u64,
    /// Identity of the base over which the cache was made.
    pub base_id: [u8; 32],
    /// Authentication tag over the bytes before it, under the cache's key: see [`SlotKey::check`](crate::overflow::encrypt::SlotKey::check).
    pub key_check: [u8; TAG_BYTES],
    /// Sequence number of the first record.
    pub first_sequence: u64,
}

/// Why a header cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderFault {
    /// Not a map, or only a part of a map.
    NotAMap,
    /// A version that this program does not support.
    Version(u32),
    /// The checksum does not match.
    Damaged,
}

/// One record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record<'a> {
    /// Blocks in slots of a position that were written with one generation.
    Extent {
        /// Position in the `data` file.
        position: u32,
        /// Generation with which the slots are encrypted.
        generation: u64,
        /// Slot of the first block.
        first_slot: u16,
        /// The blocks, in order of slots; [`NO_BLOCK`] for a slot without one.
        blocks: Words<'a>,
    },
    /// Like `Extent`, with the encrypted slots, which need not be in the `data` file. A slot that parts name
    /// has [`NO_BLOCK`] here.
    Encrypted {
        /// Position in the `data` file.
        position: u32,
        /// Generation with which the slots are encrypted.
        generation: u64,
        /// Slot of the first block.
        first_slot: u16,
        /// The blocks, in order of slots.
        blocks: Words<'a>,
        /// The slots with the same bytes as in the `data` file, one for each block.
        slots: &'a [u8],
    },
    /// Ranges of blocks (first, count) that are as in the image.
    Absent(Words<'a>),
    /// Ranges of blocks (first, count) that read as zeroes.
    Zero(Words<'a>),
    /// Sectors of blocks. The other sectors of these blocks stay where they are.
    Parts(Parts<'a>),
    /// All records before it are valid.
    Commit {
        /// Number of the commit: one more than that of the commit before.
        epoch: u64,
        /// No generation from this one on was used.
        generation_limit: u64,
    },
}

/// The place of some sectors of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The block.
    pub block: u32,
    /// A bit for each of its sectors, the lowest for the first sector; not 0.
    pub sectors: u8,
    /// Position, generation and slot of these sectors; `None`: they are zero.
    pub slot: Option<(u32, u64, u16)>,
}

impl Part {
    fn encode(&self) -> [u8; PART_BYTES] {
        let mut bytes = [0; PART_BYTES];
        put(&mut bytes, 0, &self.block.to_le_bytes());
        if let Some((position, generation, slot)) = self.slot {
            put(&mut bytes, 4, &position.to_le_bytes());
            put(&mut bytes, 8, &generation.to_le_bytes());
            put(&mut bytes, 16, &slot.to_le_bytes());
        }
        let kind = if self.slot.is_none() { PART_ZERO } else { 0 };
        put(&mut bytes, 18, &[self.sectors, kind]);
        bytes
    }

    /// Decodes a part. `None`: the bytes are invalid.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let (block, sectors) = (u32_at(bytes, 0)?, *bytes.get(18)?);
        let (position, generation, slot) = (u32_at(bytes, 4)?, u64_at(bytes, 8)?, u16_at(bytes, 16)?);
        let slot = match *bytes.get(19)? {
            0 if slot < SLOT_COUNT => Some((position, generation, slot)),
            PART_ZERO if (position, generation, slot) == (0, 0, 0) => None,
            _ => return None,
        };
        (sectors != 0 && u32_at(bytes, 20)? == 0).then_some(Self { block, sectors, slot })
    }
}

/// Parts of blocks, as in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts<'a>(&'a [u8]);

impl<'a> Parts<'a> {
    /// `None`: a part is invalid.
    fn new(bytes: &'a [u8]) -> Option<Self> {
        bytes.chunks_exact(PART_BYTES).all(|bytes| Part::decode(bytes).is_some()).then_some(Self(bytes))
    }

    /// The parts in order.
    pub fn iter(self) -> impl Iterator<Item = Part> + 'a {
        self.0.chunks_exact(PART_BYTES).filter_map(Part::decode)
    }
}

/// Little-endian 32-bit numbers, as in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Words<'a>(&'a [u8]);

impl<'a> Words<'a> {
    /// The numbers in order.
    pub fn iter(self) -> impl Iterator<Item = u32> + 'a {
        self.0.chunks_exact(4).map(|b| b.try_into().map_or(0, u32::from_le_bytes))
    }

    /// The numbers in pairs.
    pub fn pairs(self) -> impl Iterator<Item = (u32, u32)> + 'a {
        let half = |b: &[u8]| b.try_into().map_or(0, u32::from_le_bytes);
        self.0.chunks_exact(8).map(move |pair| {
            let (first, second) = pair.split_at(4);
            (half(first), half(second))
        })
    }

    /// How many there are.
    pub fn len(self) -> usize {
        self.0.len() / 4
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.0.is_empty()
    }
}

fn put(into: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = into.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    array(bytes, at).map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    array(bytes, at).map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    array(bytes, at).map(u64::from_le_bytes)
}

impl Header {
    /// The part of the header that identifies the cache: the input of the key check.
    pub fn checked_part(size_bytes: u64, base_id: &[u8; 32]) -> [u8; CHECKED_BYTES] {
        let mut bytes = [0; CHECKED_BYTES];
        put(&mut bytes, 0, &MAGIC);
        put(&mut bytes, 8, &VERSION.to_le_bytes());
        put(&mut bytes, 12, &128u32.to_le_bytes());
        put(&mut bytes, 16, &size_bytes.to_le_bytes());
        put(&mut bytes, 24, base_id);
        bytes
    }

    /// The header's bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        put(&mut bytes, 0, &Self::checked_part(self.size_bytes, &self.base_id));
        put(&mut bytes, CHECKED_BYTES, &self.key_check);
        put(&mut bytes, 72, &self.first_sequence.to_le_bytes());
        let sum = crc32c::crc32c(bytes.get(..124).unwrap_or_default());
        put(&mut bytes, 124, &sum.to_le_bytes());
        bytes
    }

    /// Reads a header.
    pub fn decode(bytes: &[u8]) -> Result<Self, HeaderFault> {
        if array::<8>(bytes, 0) != Some(MAGIC) {
            return Err(HeaderFault::NotAMap);
        }
        let version = u32_at(bytes, 8).ok_or(HeaderFault::NotAMap)?;
        if version != VERSION {
            return Err(HeaderFault::Version(version));
        }
        let head = bytes.get(..124).ok_or(HeaderFault::NotAMap)?;
        if u32_at(bytes, 124) != Some(crc32c::crc32c(head)) || u32_at(bytes, 12) != Some(128) {
            return Err(HeaderFault::Damaged);
        }
        let part = || {
            Some(Self {
                size_bytes: u64_at(bytes, 16)?,
                base_id: array(bytes, 24)?,
                key_check: array(bytes, CHECKED_BYTES)?,
                first_sequence: u64_at(bytes, 72)?,
            })
        };
        part().ok_or(HeaderFault::NotAMap)
    }
}

/// Appends records to a buffer, each with the next sequence number.
#[derive(Debug)]
pub struct Encoder {
    bytes: Vec<u8>,
    sequence: u64,
    encrypted_bytes: u64,
}

impl Encoder {
    /// Starts with this sequence number.
    pub fn new(sequence: u64) -> Self {
        Self::with_room(sequence, 0)
    }

    /// Like [`Encoder::new`], with space for this many bytes.
    pub fn with_room(sequence: u64, bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes), sequence, encrypted_bytes: 0 }
    }

    /// Bytes of encrypted slots in its records.
    pub fn encrypted_bytes(&self) -> u64 {
        self.encrypted_bytes
    }

    /// Bytes of memory in use.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether it has no record.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The bytes, and the sequence number of the record after them.
    pub fn finish(self) -> (Vec<u8>, u64) {
        (self.bytes, self.sequence)
    }

    fn record(&mut self, kind: u8, count: usize, head: &[u8], words: &[u32], slots: &[u8]) {
        let start = self.bytes.len();
        let count = u16::try_from(count).unwrap_or(u16::MAX);
        self.bytes.extend([0, 0, 0, 0, kind, 0]);
        self.bytes.extend(count.to_le_bytes());
        self.bytes.extend(self.sequence.to_le_bytes());
        self.bytes.extend(head);
        words.iter().for_each(|word| self.bytes.extend(word.to_le_bytes()));
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        self.bytes.extend(slots);
        self.encrypted_bytes += slots.len() as u64;
        let sum = crc32c::crc32c(self.bytes.get(start + 4..).unwrap_or_default());
        put(&mut self.bytes, start, &sum.to_le_bytes());
        self.sequence += 1;
    }

    /// Adds blocks in consecutive slots, at most a segment's.
    pub fn extent(&mut self, position: u32, generation: u64, first_slot: u16, blocks: &[u32]) {
        self.record(KIND_EXTENT, blocks.len(), &extent_head(position, generation, first_slot), blocks, &[]);
    }

    /// Adds blocks in consecutive slots, with the encrypted slots: at most [`MAX_ENCRYPTED`].
    pub fn encrypted(
        &mut self,
        (position, generation): (u32, u64),
        first_slot: u16,
        blocks: &[u32],
        slots: &[u8],
    ) {
        debug_assert_eq!(slots.len(), blocks.len() * ENCRYPTED_SLOT_BYTES);
        let head = extent_head(position, generation, first_slot);
        self.record(KIND_ENCRYPTED, blocks.len(), &head, blocks, slots);
    }

    /// Adds ranges of blocks that are absent, or zero.
    pub fn ranges(&mut self, zero: bool, ranges: &[(u32, u32)]) {
        let kind = if zero { KIND_ZERO } else { KIND_ABSENT };
        for some in ranges.chunks(MAX_RANGES) {
            let words: Vec<u32> = some.iter().flat_map(|(first, count)| [*first, *count]).collect();
            self.record(kind, some.len(), &[], &words, &[]);
        }
    }

    /// Adds sectors of blocks.
    pub fn parts(&mut self, parts: &[Part]) {
        for some in parts.chunks(MAX_PARTS) {
            let body: Vec<u8> = some.iter().flat_map(Part::encode).collect();
            self.record(KIND_PARTS, some.len(), &body, &[], &[]);
        }
    }

    /// Ends an epoch.
    pub fn commit(&mut self, epoch: u64, generation_limit: u64) {
        let mut head = [0; 16];
        put(&mut head, 0, &epoch.to_le_bytes());
        put(&mut head, 8, &generation_limit.to_le_bytes());
        self.record(KIND_COMMIT, 0, &head, &[], &[]);
    }
}

fn extent_head(position: u32, generation: u64, first_slot: u16) -> [u8; 16] {
    let mut head = [0; 16];
    put(&mut head, 0, &position.to_le_bytes());
    put(&mut head, 4, &first_slot.to_le_bytes());
    put(&mut head, 8, &generation.to_le_bytes());
    head
}

/// Bytes of the block numbers of an extent.
fn blocks_bytes(count: usize) -> usize {
    (count * 4).next_multiple_of(8)
}

/// Decodes the record at `at`: its sequence number, the record, and the offset of the next one. `None`: there
/// is no complete and undamaged record.
pub fn decode(bytes: &[u8], at: usize) -> Option<(u64, Record<'_>, usize)> {
    let rest = bytes.get(at..)?;
    let kind = *rest.get(4)?;
    let count = usize::from(u16_at(rest, 6)?);
    let body_bytes = match kind {
        KIND_EXTENT if count <= usize::from(SLOT_COUNT) => 16 + blocks_bytes(count),
        KIND_ENCRYPTED if count <= MAX_ENCRYPTED => 16 + blocks_bytes(count) + count * ENCRYPTED_SLOT_BYTES,
        KIND_ABSENT | KIND_ZERO if count <= MAX_RANGES => count * 8,
        KIND_PARTS if count <= MAX_PARTS => count * PART_BYTES,
        KIND_COMMIT if count == 0 => 16,
        _ => return None,
    };
    let end = RECORD_HEADER_BYTES + body_bytes;
    if u32_at(rest, 0)? != crc32c::crc32c(rest.get(4..end)?) {
        return None;
    }
    let body = rest.get(RECORD_HEADER_BYTES..end)?;
    let record = match kind {
        KIND_EXTENT | KIND_ENCRYPTED => {
            let first_slot = u16_at(body, 4)?;
            if usize::from(first_slot) + count > usize::from(SLOT_COUNT) {
                return None;
            }
            let (position, generation) = (u32_at(body, 0)?, u64_at(body, 8)?);
            let blocks = Words(body.get(16..16 + count * 4)?);
            if kind == KIND_EXTENT {
                Record::Extent { position, generation, first_slot, blocks }
            } else {
                let slots = body.get(16 + blocks_bytes(count)..)?;
                Record::Encrypted { position, generation, first_slot, blocks, slots }
            }
        }
        KIND_ABSENT => Record::Absent(Words(body)),
        KIND_ZERO => Record::Zero(Words(body)),
        KIND_PARTS => Record::Parts(Parts::new(body)?),
        _ => Record::Commit { epoch: u64_at(body, 0)?, generation_limit: u64_at(body, 8)? },
    };
    Some((u64_at(rest, 8)?, record, at + end))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::overflow::encrypt::SlotKey;

    fn header() -> Header {
        let size_bytes = 1 << 30;
        Header { size_bytes, base_id: [0xab; 32], key_check: [0xcd; 16], first_sequence: 7 }
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    #[test]
    fn the_bytes_are_those_of_the_document() {
        let expected = format!(
            "{}{}{}{}{}{}{}{}{}",
            "485743414348450a",
            "01000000",
            "80000000",
            "0000004000000000",
            "ab".repeat(32),
            "cd".repeat(16),
            "0700000000000000",
            "00".repeat(44),
            hex(&crc32c::crc32c(&header().encode()[..124]).to_le_bytes()),
        );
        assert_eq!(hex(&header().encode()), expected);
        let mut encoder = Encoder::new(7);
        encoder.extent(3, 0x1122, 5, &[9, NO_BLOCK, 11]);
        encoder.ranges(false, &[(1, 2)]);
        encoder.ranges(true, &[(3, 4), (5, 6)]);
        let slot: Vec<u8> = (0..ENCRYPTED_SLOT_BYTES).map(|at| (at % 251) as u8).collect();
        encoder.encrypted((4, 0x3344), 6, &[12], &slot);
        let in_slot = Part { block: 13, sectors: 0xe0, slot: Some((4, 0x3344, 7)) };
        encoder.parts(&[in_slot, Part { block: 14, sectors: 0x1f, slot: None }]);
        encoder.commit(8, 99);
        let (bytes, next) = encoder.finish();
        assert_eq!(next, 13);
        let body = [
            "........01000300070000000000000003000000050000002211000000000000",
            "09000000ffffffff0b00000000000000",
            "........020001000800000000000000",
            "0100000002000000",
            "........030002000900000000000000",
            "03000000040000000500000006000000",
            "........050001000a00000000000000",
            "04000000060000004433000000000000",
            "0c00000000000000",
            &hex(&slot),
            "........060002000b00000000000000",
            "0d0000000400000044330000000000000700e00000000000",
            "0e00000000000000000000000000000000001f0100000000",
            "........040000000c00000000000000",
            "08000000000000006300000000000000",
        ]
        .concat();
        let got = hex(&bytes);
        assert_eq!(got.len(), body.len());
        for (at, (got, expected)) in got.chars().zip(body.chars()).enumerate() {
            assert!(expected == '.' || got == expected, "digit {at} of {}", hex(&bytes));
        }
        // The CRC32C of a known text, so that the polynomial is checked, too.
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(u32_at(&bytes, bytes.len() - 32), Some(crc32c::crc32c(&bytes[bytes.len() - 28..])));
    }

    /// Compares with other implementations of AES-GCM and HMAC (Python's `cryptography` and `hmac`).
    #[test]
    fn the_key_checks_are_those_of_the_document() {
        let key = SlotKey::from_bytes(&[7; 16]).unwrap();
        let check = |size_bytes, base_id| {
            hex(&key.check(VERSION, &Header::checked_part(size_bytes, &base_id)).unwrap())
        };
        assert_eq!(check(1 << 30, [0xab; 32]), "708078518ab403339677a102f021af2d");
        assert_eq!(check(1 << 31, [0xab; 32]), "cd0b0a21f36614a81154e59c17397ca6");
    }

    #[test]
    fn what_was_encoded_is_decoded() {
        assert_eq!(Header::decode(&header().encode()), Ok(header()));
        let mut encoder = Encoder::new(1);
        encoder.extent(4, 77, SLOT_COUNT - 3, &[1, 2, 3]);
        encoder.encrypted((5, 78), 2, &[8, 9], &[7; 2 * ENCRYPTED_SLOT_BYTES]);
        let parts: Vec<Part> = (0..MAX_PARTS as u32 + 1)
            .map(|block| Part {
                block,
                sectors: 1 << (block % 8),
                slot: (block % 3 > 0).then_some((block, 79, SLOT_COUNT - 1)),
            })
            .collect();
        encoder.parts(&parts);
        encoder.commit(1, 2);
        let (bytes, _) = encoder.finish();
        let (sequence, record, next) = decode(&bytes, 0).unwrap();
        let Record::Extent { position, generation, first_slot, blocks } = record else { panic!() };
        assert_eq!((sequence, position, generation, first_slot), (1, 4, 77, SLOT_COUNT - 3));
        assert_eq!(blocks.iter().collect::<Vec<_>>(), vec![1, 2, 3]);
        let (sequence, record, next) = decode(&bytes, next).unwrap();
        let Record::Encrypted { position, generation, first_slot, blocks, slots } = record else { panic!() };
        assert_eq!((sequence, position, generation, first_slot), (2, 5, 78, 2));
        assert_eq!(blocks.iter().collect::<Vec<_>>(), vec![8, 9]);
        assert_eq!(slots, [7; 2 * ENCRYPTED_SLOT_BYTES]);
        let (sequence, Record::Parts(some), next) = decode(&bytes, next).unwrap() else { panic!() };
        let (_, Record::Parts(last), next) = decode(&bytes, next).unwrap() else { panic!() };
        assert_eq!((sequence, some.iter().chain(last.iter()).collect::<Vec<_>>()), (3, parts));
        assert_eq!(
            decode(&bytes, next),
            Some((5, Record::Commit { epoch: 1, generation_limit: 2 }, bytes.len()))
        );
    }

    #[test]
    fn other_versions_and_damaged_headers_are_told_apart() {
        let mut bytes = header().encode();
        for version in [0, 2, 3] {
            bytes[8] = version;
            assert_eq!(Header::decode(&bytes), Err(HeaderFault::Version(version.into())));
        }
        bytes[8] = 1;
        bytes[30] ^= 1;
        assert_eq!(Header::decode(&bytes), Err(HeaderFault::Damaged));
        assert_eq!(Header::decode(b"HWCA"), Err(HeaderFault::NotAMap));
        assert_eq!(Header::decode(&header().encode()[..100]), Err(HeaderFault::NotAMap));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..4096)) {
            let _ = Header::decode(&bytes);
            for at in 0..bytes.len() {
                if let Some((_, _, next)) = decode(&bytes, at) {
                    prop_assert!(next > at && next <= bytes.len());
                }
            }
        }
    }
}
