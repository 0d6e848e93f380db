//! Holes in data objects: ranges that no version of a store needs, and whose bytes the store deleted.
//!
//! An object is named by the hash of all its bytes, including those in holes. BLAKE3 hashes a tree (section
//! 2.1 of the BLAKE3 paper), so the hash of the object depends on a range only through the node above it.
//! [`Holes`] stores these nodes. With them [`ObjectHashing`] computes the object's hash without the bytes in
//! the holes. So an object with holes can be checked, and copied to other stores, like any other. The nodes
//! need not be trusted: with wrong nodes the hash differs from the object's name.
//!
//! A hole is a complete node of the tree, of at least [`HOLE_BYTES_MIN`]; a longer range consists of several
//! holes. The first block is never a hole, because it has the object's header. An incomplete last block is
//! never a hole either.
//!
//! Start reading at [`Holes`]; [`punch`] decides where holes are made.

mod filled;
mod hashing;
mod punch;

use std::ops::Range;

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;

pub(crate) use filled::Filled;
pub use hashing::{ObjectHashing, hash_of};
pub(crate) use punch::{Needed, Plan, plan_holes};

/// The shortest hole: the block of most file systems.
pub const HOLE_BYTES_MIN: u64 = 4096;

/// The longest encoded list. An object that would get more holes than fit gets the longest ones.
pub const HOLES_MAX_BYTES: u64 = 32 << 20;

/// The number of holes that fit into a list: 2.7 GB of the shortest holes.
const HOLES_MAX: usize = 699_000;

const MAGIC: [u8; 8] = *b"HWHOLES\n";
const FORMAT: u32 = 1;
const HEADER_BYTES: usize = 32;
const HOLE_ENTRY_BYTES: usize = 48;

/// A node of the tree over an object.
pub(crate) type Node = [u8; 32];

/// A range of an object that is not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hole {
    /// A multiple of `len`.
    offset: u64,
    /// A power of two.
    len: u64,
    /// The tree node above the range, from which the object's hash is computed.
    node: Node,
}

impl Hole {
    fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }
}

/// The holes of a data object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holes(Vec<Hole>);

impl Holes {
    /// Whether the object has no holes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many bytes are in holes.
    pub fn bytes(&self) -> u64 {
        self.0.iter().fold(0, |sum, hole| sum.saturating_add(hole.len))
    }

    /// Whether a range overlaps a hole.
    pub fn overlap(&self, stretch: &Range<u64>) -> bool {
        let first = self.0.partition_point(|hole| hole.end() <= stretch.start);
        !stretch.is_empty() && self.0.get(first).is_some_and(|hole| hole.offset < stretch.end)
    }

    /// The ranges in holes, in order; adjacent holes are merged.
    pub fn stretches(&self) -> Vec<Range<u64>> {
        let mut stretches: Vec<Range<u64>> = Vec::new();
        for hole in &self.0 {
            match stretches.last_mut() {
                Some(before) if before.end == hole.offset => before.end = hole.end(),
                _ => stretches.push(hole.offset..hole.end()),
            }
        }
        stretches
    }

    /// The parts of a range that are in holes, in order.
    pub(crate) fn within(&self, stretch: &Range<u64>) -> Vec<Range<u64>> {
        let first = self.0.partition_point(|hole| hole.end() <= stretch.start);
        let holes = self.0.get(first..).unwrap_or_default().iter();
        let holes = holes.take_while(|hole| hole.offset < stretch.end);
        holes.map(|hole| hole.offset.max(stretch.start)..hole.end().min(stretch.end)).collect()
    }

    /// The number of nodes.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Whether the byte at an offset is in a hole, and the offset at which that changes, at most `u64::MAX`.
    pub fn run_at(&self, offset: u64) -> (bool, u64) {
        let mut rest = self.0.iter().skip(self.0.partition_point(|hole| hole.end() <= offset)).peekable();
        match rest.next_if(|hole| hole.offset <= offset) {
            None => (false, rest.peek().map_or(u64::MAX, |hole| hole.offset)),
            Some(first) => {
                let mut end = first.end();
                while let Some(next) = rest.next_if(|hole| hole.offset == end) {
                    end = next.end();
                }
                (true, end)
            }
        }
    }

    /// The holes that both lists of the same object have.
    pub fn common(&self, other: &Self) -> Self {
        let (mut ours, _) = self.below(other, true);
        let (theirs, _) = other.below(self, false);
        ours.extend(theirs);
        ours.sort_by_key(|hole| hole.offset);
        Self(ours)
    }

    /// Splits these holes into those inside a hole of `others`, and the rest. Two nodes of a tree are either
    /// disjoint or one contains the other.
    fn below(&self, others: &Self, or_same: bool) -> (Vec<Hole>, Vec<Hole>) {
        self.0.iter().partition(|hole| {
            let at = others.0.partition_point(|above| above.end() <= hole.offset);
            let above = others.0.get(at).filter(|above| above.offset <= hole.offset);
            above.is_some_and(|above| hole.end() <= above.end() && (or_same || hole.len < above.len))
        })
    }

    /// The node above a range, if the range is exactly one hole.
    fn node(&self, offset: u64, len: u64) -> Option<Node> {
        let at = self.0.partition_point(|hole| hole.offset < offset);
        self.0.get(at).filter(|hole| (hole.offset, hole.len) == (offset, len)).map(|hole| hole.node)
    }

    /// The file's bytes, as in `docs/format.md`, for an object of this length.
    pub fn encode(&self, len_bytes: u64) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER_BYTES + self.0.len() * HOLE_ENTRY_BYTES + 32);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&FORMAT.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&len_bytes.to_le_bytes());
        out.extend_from_slice(&u64::try_from(self.0.len()).unwrap_or(u64::MAX).to_le_bytes());
        for hole in &self.0 {
            out.extend_from_slice(&hole.offset.to_le_bytes());
            out.extend_from_slice(&hole.len.to_le_bytes());
            out.extend_from_slice(&hole.node);
        }
        let sum = Hash::of(&out);
        out.extend_from_slice(&sum.0);
        out
    }

    /// Decodes the holes of an object of this length. `place` says where the bytes were read from.
    pub fn decode(place: &str, bytes: &[u8], len_bytes: u64) -> Result<Self, StoreError> {
        let damaged = |why: &str| {
            StoreError::new(StoreErrorKind::Damaged, format!("the list of holes {place} is damaged: {why}"))
        };
        let cut = || damaged("it is incomplete");
        let (magic, rest) = bytes.split_first_chunk::<8>().ok_or_else(cut)?;
        let (format, rest) = rest.split_first_chunk::<4>().ok_or_else(cut)?;
        if *magic != MAGIC {
            return Err(damaged("it does not start as such a file does"));
        }
        let format = u32::from_le_bytes(*format);
        if format != FORMAT {
            return Err(StoreError::new(
                StoreErrorKind::UnknownFormat,
                format!(
                    "the list of holes {place} has format {format}; this release reads format {FORMAT}: use the release \
                     that made it, or a later one"
                ),
            ));
        }
        let (_, rest) = rest.split_first_chunk::<20>().ok_or_else(cut)?;
        let (entries, _) = rest.split_last_chunk::<32>().ok_or_else(cut)?;
        let holes = Self(entries.as_chunks::<HOLE_ENTRY_BYTES>().0.iter().map(hole_of).collect());
        // One comparison checks everything that is fixed: length, reserved bytes, number of holes and
        // checksum.
        if holes.encode(len_bytes) != bytes {
            return Err(damaged("its checksum does not match, or it belongs to an object of another length"));
        }
        let mut end = HOLE_BYTES_MIN;
        for hole in &holes.0 {
            let is_node =
                hole.len.is_power_of_two() && hole.len >= HOLE_BYTES_MIN && hole.offset % hole.len == 0;
            let is_next = hole.offset >= end && hole.len <= len_bytes.saturating_sub(hole.offset);
            if !is_node || !is_next {
                return Err(damaged("it has a hole at an impossible offset"));
            }
            end = hole.end();
        }
        Ok(holes)
    }
}

impl Holes {
    /// Holes of the shortest length at these blocks, with nodes of no real object, for tests of code that
    /// reads lists.
    #[doc(hidden)]
    pub fn of_blocks(blocks: &[u64]) -> Self {
        let hole = |block: &u64| Hole {
            offset: block.saturating_mul(HOLE_BYTES_MIN),
            len: HOLE_BYTES_MIN,
            node: [0; 32],
        };
        Self(blocks.iter().map(hole).collect())
    }
}

fn hole_of(entry: &[u8; HOLE_ENTRY_BYTES]) -> Hole {
    let word = |at: usize| {
        let bytes = entry.get(at..).and_then(|rest| rest.first_chunk::<8>());
        bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
    };
    let node = entry.last_chunk::<32>().copied().unwrap_or_default();
    Hole { offset: word(0), len: word(8), node }
}

#[cfg(test)]
mod tests {
    use super::*;

    const K: u64 = 1024;

    /// Holes at these offsets and lengths, each of which is a node.
    pub(super) fn holes(places: &[(u64, u64)]) -> Holes {
        let hole = |(offset, len): &(u64, u64)| Hole { offset: *offset, len: *len, node: [7; 32] };
        Holes(places.iter().map(hole).collect())
    }

    #[test]
    fn the_longest_list_can_be_read() {
        let longest = (HEADER_BYTES + HOLES_MAX * HOLE_ENTRY_BYTES + 32) as u64;
        assert!(longest <= HOLES_MAX_BYTES && longest * 101 / 100 > HOLES_MAX_BYTES, "{longest}");
    }

    #[test]
    fn golden_bytes() {
        let bytes = holes(&[(8 * K, 8 * K), (32 * K, 4 * K)]).encode(40_000);
        assert_eq!(bytes.len(), 32 + 2 * 48 + 32);
        assert_eq!(&bytes[..16], b"HWHOLES\n\x01\0\0\0\0\0\0\0");
        assert_eq!(&bytes[16..32], b"\x40\x9c\0\0\0\0\0\0\x02\0\0\0\0\0\0\0");
        assert_eq!(&bytes[32..48], b"\0\x20\0\0\0\0\0\0\0\x20\0\0\0\0\0\0");
        assert_eq!(bytes[48..80], [7; 32]);
        assert_eq!(&bytes[80..96], b"\0\x80\0\0\0\0\0\0\0\x10\0\0\0\0\0\0");
        assert_eq!(Hash(bytes[128..].try_into().unwrap()), Hash::of(&bytes[..128]));
    }

    #[test]
    fn lists_round_trip_and_any_changed_byte_is_refused() {
        let holes = holes(&[(8 * K, 8 * K), (16 * K, 16 * K), (32 * K, 4 * K)]);
        let bytes = holes.encode(40_000);
        assert_eq!(Holes::decode("x", &bytes, 40_000).unwrap(), holes);
        assert!(Holes::decode("x", &bytes, 40_001).is_err());
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            let kind = Holes::decode("x", &bytes, 40_000).unwrap_err().kind();
            let later =
                if (8..12).contains(&at) { StoreErrorKind::UnknownFormat } else { StoreErrorKind::Damaged };
            assert_eq!(kind, later, "byte {at}");
        }
        for cut in 0..bytes.len() {
            assert!(Holes::decode("x", &bytes[..cut], 40_000).is_err(), "{cut} bytes");
        }
    }

    #[test]
    fn holes_that_no_object_can_have_are_refused() {
        let len_bytes = 40 * K;
        let outcome = |places: &[(u64, u64)]| Holes::decode("x", &holes(places).encode(len_bytes), len_bytes);
        assert!(outcome(&[]).is_ok() && outcome(&[(36 * K, 4 * K)]).is_ok());
        let odd: [&[(u64, u64)]; 9] = [
            // The first block; an incomplete block; past the end; far past the end.
            &[(0, 4 * K)],
            &[(4 * K, 2 * K)],
            &[(40 * K, 4 * K)],
            &[(1 << 63, 1 << 63)],
            // Not a node.
            &[(4 * K, 8 * K)],
            &[(12 * K, 12 * K)],
            &[(8 * K, 0)],
            // Unsorted; one within the other.
            &[(16 * K, 4 * K), (8 * K, 4 * K)],
            &[(8 * K, 8 * K), (12 * K, 4 * K)],
        ];
        for places in odd {
            assert_eq!(outcome(places).unwrap_err().kind(), StoreErrorKind::Damaged, "{places:?}");
        }
    }

    #[test]
    fn adjacent_holes_are_merged_and_overlaps_found() {
        let holes = holes(&[(4 * K, 4 * K), (8 * K, 8 * K), (32 * K, 4 * K)]);
        assert_eq!(holes.stretches(), [4 * K..16 * K, 32 * K..36 * K]);
        assert_eq!(holes.bytes(), 16 * K);
        let overlaps = [(0, 1, false), (0, 4 * K, false), (0, 4 * K + 1, true), (15 * K, 16 * K, true)];
        let more =
            [(16 * K, 32 * K, false), (20 * K, 33 * K, true), (36 * K, 99 * K, false), (9 * K, 9 * K, false)];
        for (from, to, is) in overlaps.into_iter().chain(more) {
            assert_eq!(holes.overlap(&(from..to)), is, "{from}..{to}");
        }
        let runs = [(0, false, 4 * K), (4 * K, true, 16 * K), (9 * K, true, 16 * K), (16 * K, false, 32 * K)];
        for (at, is_gone, end) in runs.into_iter().chain([(36 * K, false, u64::MAX)]) {
            assert_eq!(holes.run_at(at), (is_gone, end), "{at}");
        }
    }

    #[test]
    fn common_holes_use_the_nodes_of_both_lists() {
        let one = holes(&[(8 * K, 8 * K), (32 * K, 4 * K), (48 * K, 4 * K)]);
        let two = holes(&[(4 * K, 4 * K), (12 * K, 4 * K), (32 * K, 16 * K), (48 * K, 4 * K)]);
        let both = holes(&[(12 * K, 4 * K), (32 * K, 4 * K), (48 * K, 4 * K)]);
        assert_eq!((one.common(&two), two.common(&one)), (both.clone(), both));
        assert_eq!((one.common(&one), one.common(&Holes::default())), (one.clone(), Holes::default()));
    }
}
