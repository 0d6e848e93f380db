//! Decides which ranges of an object become holes: those that no version needs, divided into nodes of the
//! hash tree. [`crate::LocalDir`] deletes them.

use std::ops::Range;

use blake3::hazmat::{HasherExt, Mode, merge_subtrees_non_root};

use crate::error::StoreError;
use crate::holes::{HOLE_BYTES_MIN, HOLES_MAX, Hole, Holes, Node};

/// How much is read and hashed at a time. A power of two.
const PIECE_BYTES: u64 = 1 << 20;

/// Which blocks of an object are needed.
#[derive(Debug)]
pub(crate) struct Needed {
    /// The number of blocks that can be holes, counted from the first block.
    blocks: u64,
    /// One bit for each block.
    bits: Vec<u64>,
}

impl Needed {
    /// Creates a map for an object of this length, in which only the header is needed.
    pub(crate) fn of(len_bytes: u64) -> Self {
        // Bytes after the last full block are never a hole.
        let blocks = len_bytes / HOLE_BYTES_MIN;
        let words = usize::try_from(blocks.div_ceil(64)).unwrap_or(usize::MAX);
        let mut needed = Self { blocks, bits: vec![0; words] };
        needed.mark(&(0..1));
        needed
    }

    /// Marks a range as needed.
    pub(crate) fn mark(&mut self, stretch: &Range<u64>) {
        if stretch.is_empty() {
            return;
        }
        let (first, end) = (stretch.start / HOLE_BYTES_MIN, stretch.end.div_ceil(HOLE_BYTES_MIN));
        let mut block = first;
        while block < end.min(self.blocks) {
            let Some(word) = usize::try_from(block / 64).ok().and_then(|at| self.bits.get_mut(at)) else {
                return;
            };
            // To the end of the word or of the stretch, whichever comes first.
            let until = (block / 64 + 1).saturating_mul(64).min(end).min(self.blocks);
            let count = until.saturating_sub(block);
            let ones = if count >= 64 { u64::MAX } else { (1 << count) - 1 };
            *word |= ones << (block % 64);
            block = until;
        }
    }

    /// Whether any part of a range is needed.
    fn is_any(&self, stretch: &Range<u64>) -> bool {
        let first = stretch.start / HOLE_BYTES_MIN;
        self.unneeded_from(first)
            .is_none_or(|unneeded| unneeded.start > stretch.start || unneeded.end < stretch.end)
    }

    /// Ranges of full blocks that are not needed.
    fn unneeded(&self) -> impl Iterator<Item = Range<u64>> {
        let next = |before: &Range<u64>| self.unneeded_from(before.end / HOLE_BYTES_MIN);
        std::iter::successors(self.unneeded_from(0), next)
    }

    /// The first unneeded range that ends after this block, shortened to begin at the block or later.
    fn unneeded_from(&self, mut block: u64) -> Option<Range<u64>> {
        let mut begun = None;
        while block < self.blocks {
            let word = usize::try_from(block / 64).ok().and_then(|at| self.bits.get(at))? >> (block % 64);
            let left = 64 - block % 64;
            let needed = u64::from(word.trailing_ones()).min(left);
            if needed > 0 {
                if begun.is_some() {
                    break;
                }
                block = block.saturating_add(needed);
                continue;
            }
            begun = begun.or(Some(block));
            block = block.saturating_add(u64::from(word.trailing_zeros()).min(left));
        }
        let place = |block: u64| block.min(self.blocks).saturating_mul(HOLE_BYTES_MIN);
        begun.map(|first| place(first)..place(block))
    }
}

/// The longest node that begins where the range begins and ends inside it. No range begins at 0, because the
/// header is needed.
fn longest_node(stretch: &Range<u64>) -> u64 {
    let left = stretch.end.saturating_sub(stretch.start);
    (1 << stretch.start.trailing_zeros().min(63)).min(1 << left.checked_ilog2().unwrap_or(0))
}

/// The nodes that make up a range.
fn nodes(stretch: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
    let mut left = stretch;
    std::iter::from_fn(move || {
        if left.is_empty() {
            return None;
        }
        let node = (left.start, longest_node(&left));
        left.start = left.start.saturating_add(node.1);
        Some(node)
    })
}

/// Reads bytes of an object at an offset.
pub(crate) type ReadAt<'a> = dyn FnMut(u64, &mut [u8]) -> Result<(), StoreError> + 'a;

/// The holes that an object may have.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The earlier holes, and new ones where nothing is needed. If a list cannot hold all of them, the
    /// longest ones.
    pub(crate) holes: Holes,
    /// The earlier holes in which nothing is needed.
    pub(crate) free: Holes,
}

/// Plans the holes of an object. Bytes that become a hole are read to compute their node, but are not
/// checked. If they are wrong, the object's hash is wrong, as before. If a version needs something in an
/// existing hole, no holes are added: first a repair must restore the bytes.
pub(crate) fn plan_holes(needed: &Needed, before: &Holes, read: &mut ReadAt<'_>) -> Result<Plan, StoreError> {
    plan_at_most(HOLES_MAX, needed, before, read)
}

fn plan_at_most(
    most: usize,
    needed: &Needed,
    before: &Holes,
    read: &mut ReadAt<'_>,
) -> Result<Plan, StoreError> {
    let is_free = |hole: &&Hole| !needed.is_any(&(hole.offset..hole.end()));
    let free = Holes(before.0.iter().filter(is_free).copied().collect());
    if free != *before {
        return Ok(Plan { holes: before.clone(), free });
    }
    let mut shortest = HOLE_BYTES_MIN;
    let is_long = |shortest: u64| move |node: &(u64, u64)| node.1 >= shortest;
    let room = most.saturating_sub(before.0.len());
    while needed.unneeded().flat_map(nodes).filter(is_long(shortest)).nth(room).is_some() {
        shortest = shortest.saturating_mul(2);
    }
    let mut making = Making { before, read, piece: Vec::new() };
    let mut holes = Holes::default();
    for (offset, len) in needed.unneeded().flat_map(nodes).filter(is_long(shortest)) {
        holes.0.push(Hole { offset, len, node: making.node(offset, len)? });
    }
    let (_, others) = before.below(&holes, true);
    holes.0.extend(others);
    holes.0.sort_by_key(|hole| hole.offset);
    Ok(Plan { holes, free })
}

struct Making<'a, 'b> {
    before: &'a Holes,
    read: &'a mut ReadAt<'b>,
    piece: Vec<u8>,
}

impl Making<'_, '_> {
    /// Computes the node above a range, which must be a node. The recursion stops at known nodes and at
    /// ranges that are read in one piece, so its depth is at most the number of bits of a length.
    fn node(&mut self, offset: u64, len: u64) -> Result<Node, StoreError> {
        if let Some(node) = self.before.node(offset, len) {
            return Ok(node);
        }
        let is_there = !self.before.overlap(&(offset..offset.saturating_add(len)));
        if len <= HOLE_BYTES_MIN || is_there && len <= PIECE_BYTES {
            self.piece.resize(usize::try_from(len).unwrap_or(0), 0);
            (self.read)(offset, &mut self.piece)?;
            let mut hasher = blake3::Hasher::new();
            return Ok(hasher.set_input_offset(offset).update(&self.piece).finalize_non_root());
        }
        let half = len / 2;
        let (left, right) = (self.node(offset, half)?, self.node(offset.saturating_add(half), half)?);
        Ok(merge_subtrees_non_root(&left, &right, Mode::Hash))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const K: u64 = 1024;

    #[test]
    fn first_needed_and_incomplete_last_blocks_are_never_holes() {
        let mut needed = Needed::of(42 * K);
        assert_eq!(needed.unneeded().collect::<Vec<_>>(), std::slice::from_ref(&(4 * K..40 * K)));
        needed.mark(&(9 * K..9 * K));
        needed.mark(&(9 * K..9 * K + 1));
        needed.mark(&(15 * K..17 * K));
        assert!(needed.unneeded().eq([4 * K..8 * K, 20 * K..40 * K]));
        needed.mark(&(36 * K..u64::MAX));
        assert!(needed.unneeded().eq([4 * K..8 * K, 20 * K..36 * K]));
        for len in [0, 1, 4095, 4096, 8191] {
            assert!(Needed::of(len).unneeded().next().is_none(), "{len}");
        }
    }

    #[test]
    fn long_stretches_are_marked_like_short_ones() {
        let blocks = 1000;
        for (from, to) in [(0, 1000), (1, 64), (63, 65), (64, 128), (70, 700), (999, 1000)] {
            let mut needed = Needed::of(blocks * HOLE_BYTES_MIN);
            needed.mark(&(from * HOLE_BYTES_MIN..to * HOLE_BYTES_MIN));
            for block in 0..blocks {
                let place = block * HOLE_BYTES_MIN..(block + 1) * HOLE_BYTES_MIN;
                assert_eq!(
                    needed.is_any(&place),
                    block == 0 || (from..to).contains(&block),
                    "{from} {to} {block}"
                );
            }
        }
    }

    #[test]
    fn holes_grow_without_reading_existing_holes() {
        let bytes: Vec<u8> = (0..5000 * K + 3).map(|at| (at / 3 + at / 1000) as u8).collect();
        let mut needed = Needed::of(bytes.len() as u64);
        for stretch in [5 * K..6 * K, 100 * K..101 * K, 2000 * K..2050 * K, 4096 * K..4100 * K] {
            needed.mark(&stretch);
        }
        let read = |gone: &Holes, offset: u64, into: &mut [u8]| {
            assert!(
                !gone.overlap(&(offset..offset + into.len() as u64)),
                "{offset} was read, and is in a hole"
            );
            into.copy_from_slice(&bytes[offset as usize..][..into.len()]);
        };
        let plan = |needed: &Needed, before: &Holes| {
            plan_holes(needed, before, &mut |offset, into| {
                read(before, offset, into);
                Ok(())
            })
            .unwrap()
        };
        let none = Holes::default();
        let first = plan(&needed, &none);
        assert_eq!(first.free, none);
        let mut needed_later = Needed::of(bytes.len() as u64);
        needed_later.mark(&(2000 * K..2010 * K));
        let later = plan(&needed_later, &first.holes);
        assert_eq!((&later.holes, &later.free), (&plan(&needed_later, &none).holes, &first.holes));
        assert!(later.holes.bytes() > first.holes.bytes());
        // The same plan again reads nothing.
        let again = plan_holes(&needed_later, &later.holes, &mut |_, _| panic!("read")).unwrap();
        assert_eq!((&again.holes, &again.free), (&later.holes, &later.holes));
        // A range in a hole is needed: the holes stay, and no more are added.
        let contradicted = plan_holes(&needed, &later.holes, &mut |_, _| panic!("read")).unwrap();
        assert_eq!(contradicted.holes, later.holes);
        assert!(!contradicted.free.is_empty() && contradicted.free.bytes() < later.holes.bytes());
        let needs = [5 * K..6 * K, 100 * K..101 * K, 2000 * K..2050 * K, 4096 * K..4100 * K];
        assert!(needs.iter().all(|stretch| !contradicted.free.overlap(stretch)));
    }

    #[test]
    fn an_object_gets_the_longest_holes_that_fit_a_list() {
        let bytes: Vec<u8> = (0..1000 * K).map(|at| (at / 3 + at / 1000) as u8).collect();
        let mut needed = Needed::of(bytes.len() as u64);
        // Holes of 4 to 64 KiB.
        let mut at = 4 * K;
        for number in 0..60 {
            at += (4 * K) << (number % 5);
            needed.mark(&(at..at + 1));
            at += 4 * K;
        }
        let mut read = |offset: u64, into: &mut [u8]| {
            into.copy_from_slice(&bytes[offset as usize..][..into.len()]);
            Ok(())
        };
        let all = plan_at_most(usize::MAX, &needed, &Holes::default(), &mut read).unwrap().holes;
        let mut before = all.bytes();
        for most in [all.0.len(), all.0.len() - 1, 20, 5, 1, 0] {
            let some = plan_at_most(most, &needed, &Holes::default(), &mut read).unwrap().holes;
            assert!(some.0.len() <= most && some.bytes() <= before, "{most}: {}", some.0.len());
            assert_eq!(some.common(&all), some);
            // Earlier holes stay, and others are added as long as there is space.
            let more = plan_at_most(usize::MAX, &needed, &some, &mut read).unwrap().holes;
            assert_eq!(more, all);
            let same = plan_at_most(most, &needed, &some, &mut read).unwrap().holes;
            assert_eq!(same.common(&some), some);
            before = some.bytes();
        }
    }
}
