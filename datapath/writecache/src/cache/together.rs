//! Blocks that are overwritten where they are, several together.
//!
//! A hit costs its copy, and most of that is waiting: for the slot's old contents, which come from memory only to be overwritten,
//! and at the leaf's unlocking for the new ones to be on their way. Stores past the processor's caches need no old contents, but
//! each unlocking waits for them. So the leaves of several blocks are locked first, then all blocks are copied, and there is one
//! wait for all of them (`docs/decisions/0023-overwrites-together.md`).
//!
//! Several leaves are locked here at once, which is done nowhere else. None is waited for: they are taken where they are
//! free, so that nobody waits in a circle.

use super::write::is_zero;
use super::{BLOCK, Now, WriteCache};
use crate::counters::Hot;
use crate::map::{LeafWrite, TABLE_BYTES, split};
use crate::memory::{copy_in, copy_in_past_caches, settle};
use crate::units::{BlockNumber, SEGMENT_BYTES, Slot};

/// Blocks that are copied together at most.
pub const TOGETHER: usize = 16;

/// A cache with less data than this may be in the processor's caches as a whole, and stays there.
const LEAST_BYTES: u64 = 32 << 20;

/// A whole block to be written.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a> {
    /// Which one.
    pub number: BlockNumber,
    /// Its new contents.
    pub data: &'a [u8; BLOCK],
}

impl WriteCache {
    /// Overwrites those of the blocks (at most [`TOGETHER`]) that can be where they are, and says in `done` which; the others are as
    /// before. In a persistent cache a block that follows on one of those, as in one request, is one of them too. For `same` see [`WriteCache::write_unless`]; a block of which it says so is left alone, too.
    pub fn overwrite_together(
        &self,
        blocks: &[Block<'_>],
        done: &mut [bool],
        same: impl Fn(&Block<'_>, Now) -> bool,
    ) {
        done.fill(false);
        let past_caches = self.is_large();
        let Ok(_entered) = self.enter_to_write() else { return };
        let mut leaves: [Option<(usize, LeafWrite<'_>)>; TOGETHER] = Default::default();
        let mut places: [Option<(usize, usize, Slot)>; TOGETHER] = [None; TOGETHER];
        // A request that waits in its middle is committed as far as it came, which is to be its beginning.
        let is_ordered = self.persist.is_some();
        let mut after_left = None;
        for (block, place) in blocks.iter().zip(&mut places) {
            if !(is_ordered && after_left == Some(block.number.0)) {
                *place = self.place_in(&mut leaves, block, &same);
            }
            after_left = place.is_none().then(|| block.number.0.wrapping_add(1));
        }
        let mut copied = 0;
        for ((block, place), done) in blocks.iter().zip(places).zip(done) {
            let Some((leaf, address, slot)) = place else { continue };
            let Some(Some((_, leaf))) = leaves.get(leaf) else { continue };
            if past_caches {
                copy_in_past_caches(address, slot, block.data, leaf);
            } else {
                copy_in(address, slot, 0, block.data, leaf);
            }
            *done = true;
            copied += 1;
        }
        settle();
        self.counters.hot(Hot::WriteInPlace, copied);
    }

    /// Where a block is overwritten: the number of its leaf among those that are locked, and its slot.
    #[inline]
    fn place_in<'a>(
        &'a self,
        leaves: &mut [Option<(usize, LeafWrite<'a>)>; TOGETHER],
        block: &Block<'_>,
        same: &impl Fn(&Block<'_>, Now) -> bool,
    ) -> Option<(usize, usize, Slot)> {
        if is_zero(block.data) {
            return None;
        }
        let (number, index) = split(block.number);
        let mut at = 0;
        let leaf = loop {
            match leaves.get_mut(at)? {
                Some((there, _)) if *there != number => at += 1,
                Some((_, leaf)) => break &*leaf,
                free @ None => break &free.insert((number, self.map.try_write(number)?)).1,
            }
        };
        let old = leaf.get(index);
        let (id, slot) = old.place()?;
        let segment = self.segments.get(id)?;
        let address = segment.writable(slot)?;
        if leaf.keeps(index, old) || same(block, Now::InPlace) {
            return None;
        }
        segment.touch_to_write();
        Some((at, address, slot))
    }

    fn is_large(&self) -> bool {
        self.map.table_bytes() * (SEGMENT_BYTES as u64 / TABLE_BYTES) >= LEAST_BYTES
    }
}
