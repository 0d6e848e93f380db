//! A snapshot of the write cache: its state at one instant, from which a version is made while the machine continues.
//! At most one exists. It contains no data of the image: a block that was never written reads as [`Found::Absent`].
//!
//! Freezing changes one number ([`crate::map`] says why that is enough), so it takes as long with 4 GB of
//! changes as with none. Afterwards the first change in each leaf (the locations of [`SLOTS`] blocks) copies
//! these locations, 2 KiB. A write to a block of the snapshot takes a new slot. The old slot is kept until the
//! snapshot is dropped, and counts towards the cache's limits; it may be packed, spilled or cleaned like all
//! others.

use std::sync::Arc;

use headwater_block::{IoError, IoErrorKind};

use super::read::{EachPart, without_slot};
use super::{BLOCK, Found, Kind, Residence, WriteCache};
use crate::map::{Leaf, split};
use crate::memory::copy_out;
use crate::units::{BlockNumber, SLOTS};

/// A frozen state of a cache. Dropping it frees the slots that only it needed.
pub struct FrozenCache {
    cache: Arc<WriteCache>,
    freeze: u32,
}

impl WriteCache {
    /// Keeps the state of this moment: all writes that were answered before are in it, and none that begin
    /// afterwards. Of writes in flight, each block is either old or new as a whole. Fails while an earlier
    /// state is kept.
    pub fn freeze(self: &Arc<Self>) -> Result<FrozenCache, IoError> {
        let Some(freeze) = self.map.freeze() else {
            return Err(IoError::new(
                IoErrorKind::Invalid,
                "the volume is frozen already: only one version can be made from it at a time",
            ));
        };
        Ok(FrozenCache { cache: Arc::clone(self), freeze })
    }
}

impl FrozenCache {
    /// The cache, from which blocks on disk are fetched that [`FrozenCache::read`] found.
    pub fn cache(&self) -> &Arc<WriteCache> {
        &self.cache
    }

    /// Like [`WriteCache::read`], for the frozen state. It does not count as a read of the machine, or as a
    /// use of the segment.
    pub fn read(&self, block: BlockNumber, skip: usize, into: &mut [u8]) -> Found {
        let cache = &*self.cache;
        let (leaf, index) = split(block);
        let Some(leaf) = cache.map.read(leaf) else { return Found::Absent };
        let location = leaf.at(self.freeze).get(index);
        let Some((id, slot)) = location.place() else {
            return without_slot(location, into);
        };
        let Some(segment) = cache.segments.get(id) else { return Found::Absent };
        let word = segment.word();
        if let Some(address) = word.ram() {
            copy_out(address, slot, skip, into, &leaf);
            return Found::Done(Residence::Ram);
        }
        let mut whole = [0u8; BLOCK];
        if word.is_packed() && cache.unpack(id, slot, &mut whole) {
            let Some(part) = whole.get(skip..skip.saturating_add(into.len())) else { return Found::Absent };
            into.copy_from_slice(part);
            return Found::Done(Residence::Packed);
        }
        Found::Spilled(cache.ticket(block, id, slot))
    }

    /// Like [`WriteCache::read_parts`], for the frozen state.
    pub fn read_parts(&self, block: BlockNumber, skip: usize, into: &mut [u8], each: EachPart<'_>) {
        let (leaf, index) = split(block);
        let Some(leaf) = self.cache.map.read(leaf) else { return each(0, into.len(), Found::Absent) };
        let sectors = leaf.at(self.freeze).sectors(index);
        self.cache.read_sectors((block, &leaf), &sectors, (skip, into), each);
    }

    /// Calls `each` with all blocks of the frozen state that take a slot, in order: the first block of a run,
    /// its length, and its residence at this moment, which may change in the next. No lock is held during the
    /// calls. Stops at the first error of `each`.
    pub fn places<E>(
        &self,
        each: &mut dyn FnMut(BlockNumber, u32, Residence) -> Result<(), E>,
    ) -> Result<(), E> {
        let cache = &*self.cache;
        let blocks = cache.map.blocks();
        let mut first = 0u64;
        let mut runs: Vec<(BlockNumber, u32, Residence)> = Vec::new();
        while let Some(start) = u32::try_from(first).ok().filter(|_| first < blocks) {
            let (number, _) = split(BlockNumber(start));
            if let Some(state) = cache.map.read(number)
                && let leaf @ Leaf::Table(..) = state.at(self.freeze)
            {
                for (block, index) in (start..).zip(0..SLOTS) {
                    let place = cache.residence_of_slot(leaf, index);
                    match runs.last_mut() {
                        _ if matches!(place, Residence::Absent | Residence::Zero) => {}
                        Some((of, len, last)) if *last == place && of.0 + *len == block => *len += 1,
                        _ => runs.push((BlockNumber(block), 1, place)),
                    }
                }
            }
            runs.drain(..).try_for_each(|(block, len, place)| each(block, len, place))?;
            first += SLOTS as u64;
        }
        Ok(())
    }

    /// Like [`WriteCache::run_at`], for the frozen state.
    pub fn run_at(&self, first: BlockNumber, end: BlockNumber) -> (Kind, u32) {
        self.cache.run_of(first, end, |leaf| leaf.at(self.freeze))
    }
}

impl Drop for FrozenCache {
    fn drop(&mut self) {
        let cache = &*self.cache;
        cache.map.thaw(|leaf, number, slots| {
            // With the leaf locked, so that an epoch of a persistent cache has either all of a position's
            // slots freed or none.
            slots.iter().for_each(|slot| cache.release_slot(leaf, number, *slot));
        });
        cache.host.signal();
    }
}

impl std::fmt::Debug for FrozenCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FrozenCache").field("freeze", &self.freeze).finish_non_exhaustive()
    }
}
