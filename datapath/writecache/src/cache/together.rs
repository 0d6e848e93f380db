//! Overwrites several blocks in place at once.
//!
//! Most of the time of an overwrite in place is waiting: for the slot's old contents, which are loaded from
//! memory only to be overwritten, and, when the leaf is unlocked, for the new contents to reach memory.
//! Non-temporal stores need no old contents, but each unlocking waits for them. So the leaves of several
//! blocks are locked first, then all blocks are copied, and there is one wait for all of them
//! (`docs/decisions/0023-overwrites-together.md`).
//!
//! This is the only place where a thread locks several leaves. It waits for none of them: a leaf that is
//! locked is skipped, so no deadlock is possible.

use super::write::is_zero;
use super::{BLOCK, Now, WriteCache};
use crate::counters::Hot;
use crate::map::{LeafWrite, TABLE_BYTES, split};
use crate::memory::{copy_in, copy_in_past_caches, settle};
use crate::units::{BlockNumber, SEGMENT_BYTES, Slot};

/// The most blocks that are copied together.
pub const TOGETHER: usize = 16;

/// Not used for a cache with less data than this: all of it may be in the processor's caches, and should stay
/// there.
const LEAST_BYTES: u64 = 32 << 20;

/// A whole block to write.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a> {
    /// The block's number.
    pub number: BlockNumber,
    /// Its new contents.
    pub data: &'a [u8; BLOCK],
}

impl WriteCache {
    /// Overwrites those of the blocks (at most [`TOGETHER`]) that can be overwritten in place, and sets their
    /// flags in `done`; the others are unchanged. In a persistent cache, a block that directly follows one that
    /// is unchanged stays unchanged, too, because both may belong to one request. For `same` see
    /// [`WriteCache::write_unless`]; blocks for which it returns true stay unchanged.
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
        // If a request has to wait, a commit contains the part that is stored, which must be the beginning of
        // the request.
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

    /// The place where a block is overwritten: the index of its leaf among the locked ones, and its slot.
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
