//! Stores and clears whole blocks. A write replaces the data in the block's slot if that slot is writable in
//! RAM; otherwise it takes a new slot and frees the old one. Not here: reads, and writes of parts of blocks.

use super::{Admission, Cleared, Now, UnloggedBlocks, WriteCache, WriteResult};
use crate::counters::Hot;
use crate::log::{REFILL_LIVE, Stream};
use crate::map::{LeafWrite, split};
use crate::memory::copy_in;
use crate::segment::State;
use crate::sync::RwLockReadGuard;
use crate::units::{BlockNumber, Location, SECTORS, SLOTS};

/// The host is informed at once when the size of the index crosses a multiple of 64 KiB, the tables of 64 MiB
/// of disk.
const INDEX_STEP_BITS: u32 = 16;

/// The error of a persistent cache that takes no more writes.
pub(super) struct Closed;

impl WriteCache {
    /// Stores a whole block.
    #[inline]
    pub fn write(&self, block: BlockNumber, data: &[u8], admission: Admission) -> WriteResult {
        self.write_unless(block, data, admission, |_| false)
    }

    /// Stores a whole block, unless the image has the same contents: then the block becomes absent, and its
    /// slot is freed, if the log has space for that ([`WriteCache::takes_notes`]). `same` gets the state of the block before anything is copied, and returns whether the
    /// image has the same contents. It runs under the block's lock, so it must neither wait nor use the
    /// cache.
    #[inline]
    pub fn write_unless(
        &self,
        block: BlockNumber,
        data: &[u8],
        admission: Admission,
        same: impl FnOnce(Now) -> bool,
    ) -> WriteResult {
        let (wrote, took_slot) = self.write_unthrottled(block, data, admission, same);
        if took_slot && admission != Admission::Waited {
            self.throttle.wait(&self.host.spinner);
        }
        wrote
    }

    /// Like [`WriteCache::write_unless`], without throttling. Also returns whether it took a slot.
    #[inline]
    fn write_unthrottled(
        &self,
        block: BlockNumber,
        data: &[u8],
        admission: Admission,
        same: impl FnOnce(Now) -> bool,
    ) -> (WriteResult, bool) {
        let Ok(_entered) = self.enter_to_write() else { return (WriteResult::Closed, false) };
        let (leaf, index) = split(block);
        let Some(mut leaf) = self.map.write(leaf) else { return (self.no_room(admission), false) };
        if is_zero(data) && (leaf.get(index) == Location::ZERO || self.takes_notes()) {
            if self.lacks_index_space(&leaf) {
                return (self.no_room(admission), false);
            }
            return (self.set_zero(&mut leaf, index, block), false);
        }
        let old = leaf.get(index);
        if let Some((id, slot)) = old.place()
            && let Some(segment) = self.segments.get(id)
            && let Some(address) = segment.writable(slot)
            && !leaf.keeps(index, old)
        {
            if same(Now::InPlace) && self.takes_notes() {
                return (self.elide(&mut leaf, index, block), false);
            }
            segment.touch_to_write();
            copy_in(address, slot, 0, data, &leaf);
            self.counters.hot(Hot::WriteInPlace, 1);
            return (WriteResult::Done, false);
        }
        if same(Now::Elsewhere)
            && (old == Location::ABSENT || (self.takes_notes() && !self.lacks_index_space(&leaf)))
        {
            return (self.elide(&mut leaf, index, block), false);
        }
        let wrote = self.store(&mut leaf, index, block, data, admission);
        (wrote, wrote == WriteResult::Done)
    }

    /// Whether a change of this leaf would need a table for which the memory file has no space.
    #[inline]
    pub(super) fn lacks_index_space(&self, leaf: &LeafWrite<'_>) -> bool {
        leaf.is_uniform() && !self.map.has_index_space()
    }

    /// Whether blocks without slots can be cleared: both the log of the persistent map and the table of their
    /// leaf take memory.
    pub fn takes_clears(&self) -> bool {
        self.takes_notes() && self.map.has_index_space()
    }

    /// Whether the index has changed so much that the host should be informed. The host's thread then
    /// examines all caches.
    fn is_other_index(&self, tables_bytes: u64) -> bool {
        self.map.table_bytes() >> INDEX_STEP_BITS != tables_bytes >> INDEX_STEP_BITS
    }

    /// Whether the log has space for a block that becomes zero or absent, a change that takes no slot. The
    /// log of a persistent cache has none while too many changes wait for a commit. Then a write stores even
    /// zeroes or the image's contents in a slot, and [`WriteCache::clear`] leaves blocks without slots
    /// unchanged, or stops before them.
    pub fn takes_notes(&self) -> bool {
        self.persist.as_ref().is_none_or(|persist| persist.takes_notes())
    }

    /// Makes the block zero.
    pub(super) fn set_zero(&self, leaf: &mut LeafWrite<'_>, index: usize, block: BlockNumber) -> WriteResult {
        let tables_bytes = self.map.table_bytes();
        if leaf.get(index) != Location::ZERO {
            self.note(block, 1, Location::ZERO);
        }
        self.replace(leaf, index, block, Location::ZERO);
        // Zeroing a whole disk must not fill the index.
        leaf.fold();
        if self.is_other_index(tables_bytes) {
            self.host.signal();
        }
        self.counters.hot(Hot::ElidedZero, 1);
        WriteResult::Done
    }

    /// Makes the block absent, because the image has the same contents.
    #[cold]
    pub(super) fn elide(&self, leaf: &mut LeafWrite<'_>, index: usize, block: BlockNumber) -> WriteResult {
        if leaf.get(index) != Location::ABSENT {
            self.note(block, 1, Location::ABSENT);
            self.replace(leaf, index, block, Location::ABSENT);
        }
        if index == SLOTS - 1 {
            // If a whole leaf was written, its table is freed, too; checking at each block would cost too
            // much.
            leaf.fold();
        }
        self.counters.hot(Hot::ElidedEqual, 1);
        WriteResult::Done
    }

    /// Makes the whole blocks `first..end` absent or zero.
    pub fn clear(
        &self,
        first: BlockNumber,
        end: BlockNumber,
        to: Location,
        unlogged: UnloggedBlocks,
    ) -> Cleared {
        let mut block = first.0;
        let mut cleared = 0;
        let mut came = Cleared::All;
        let tables_bytes = self.map.table_bytes();
        while block < end.0 {
            let (leaf_number, start) = split(BlockNumber(block));
            let count = u32::try_from(SLOTS - start).unwrap_or(1).min(end.0 - block);
            block += count;
            if to == Location::ABSENT && self.map.group_is_untouched(leaf_number) {
                continue;
            }
            let Ok(_entered) = self.enter_to_write() else {
                came = Cleared::Closed;
                break;
            };
            let first = BlockNumber(block - count);
            let leaf = self.map.write(leaf_number).filter(|leaf| !self.lacks_index_space(leaf));
            let Some(mut leaf) = leaf else {
                if self.memory.is_none() {
                    // The leaf is past the end of the volume.
                    break;
                }
                // The blocks stay unchanged, or the zero write waits.
                if unlogged == UnloggedBlocks::Wait {
                    came = Cleared::UpTo(first);
                    break;
                }
                continue;
            };
            let range = start..start + count as usize;
            let notes_all = self.takes_notes();
            // If the log is full, only blocks with a slot or a partial-block entry are cleared. Their number
            // is limited, because slots and the index memory of partial blocks are, so the log cannot grow
            // without limit. A partial block may have no slot at all, if its sectors are zero and absent.
            let is_bounded = |at: Location| at.place().is_some() || at.entry().is_some();
            let changes = |at: Location| at != to && (notes_all || is_bounded(at));
            if !notes_all && unlogged == UnloggedBlocks::Wait {
                let waits = |index| leaf.get(index) != to && !is_bounded(leaf.get(index));
                if range.clone().any(waits) {
                    came = Cleared::UpTo(first);
                    break;
                }
            }
            if self.persist.is_some() && notes_all && range.clone().any(|index| changes(leaf.get(index))) {
                self.note(first, count, to);
            }
            for (index, number) in range.zip(first.0..) {
                if changes(leaf.get(index)) {
                    if !notes_all {
                        self.note(BlockNumber(number), 1, to);
                    }
                    self.replace(&mut leaf, index, BlockNumber(number), to);
                    cleared += 1;
                }
            }
            leaf.fold();
        }
        self.counters.hot(Hot::Discarded, cleared);
        if self.is_other_index(tables_bytes) || self.waiting.wants_room() || self.pool.warm_bytes() > 0 {
            self.host.signal();
        }
        came
    }

    /// Whether a write has to wait before it takes anything, and for what.
    #[inline]
    pub(super) fn queues(&self, admission: Admission) -> Option<WriteResult> {
        match admission {
            Admission::New | Admission::Rest if self.waiting.any() => Some(WriteResult::Queued),
            Admission::New if self.throttle.is_ahead(&self.host.spinner) => Some(WriteResult::Throttled),
            _ => None,
        }
    }

    /// The result if there is no memory for a table of the index.
    pub(super) fn no_room(&self, admission: Admission) -> WriteResult {
        self.queues(admission).unwrap_or(WriteResult::NoRoom)
    }

    pub(super) fn store(
        &self,
        leaf: &mut LeafWrite<'_>,
        index: usize,
        block: BlockNumber,
        data: &[u8],
        admission: Admission,
    ) -> WriteResult {
        if let Some(queues) = self.queues(admission) {
            return queues;
        }
        if self.lacks_index_space(leaf) {
            return WriteResult::NoRoom;
        }
        let Some(new) = self.take_slot(Stream::Fresh, block) else { return WriteResult::NoRoom };
        // Prefetches the record of the old slot's segment while the data is copied: it is as cold as the
        // block.
        if let Some((id, slot)) = leaf.get(index).place()
            && let Some(segment) = self.segments.get(id)
        {
            segment.expect_kill(slot);
        }
        copy_in(new.address, new.slot, 0, data, leaf);
        self.replace(leaf, index, block, Location::at(new.id, new.slot));
        self.note(block, 1, Location::at(new.id, new.slot));
        self.counters.hot(Hot::WriteNew, 1);
        self.throttle.took_slot(&self.host.spinner);
        WriteResult::Done
    }

    /// Keeps an epoch of a persistent cache from ending while the map is changed.
    #[inline]
    pub(crate) fn enter(&self) -> Option<RwLockReadGuard<'_, ()>> {
        self.persist.as_ref().map(|persist| persist.enter())
    }

    /// Like [`WriteCache::enter`], for the machine's requests, which are refused once the cache is being
    /// closed.
    #[inline]
    pub(super) fn enter_to_write(&self) -> Result<Option<RwLockReadGuard<'_, ()>>, Closed> {
        let Some(persist) = &self.persist else { return Ok(None) };
        persist.enter_to_write().map(Some).ok_or(Closed)
    }

    /// Points a block to another location and frees its old slot, unless a frozen view needs it.
    pub(crate) fn replace(&self, leaf: &mut LeafWrite<'_>, index: usize, block: BlockNumber, to: Location) {
        let old = leaf.get(index);
        if old.entry().is_some() {
            // A whole block always fits.
            let _ = self.replace_sectors(leaf, index, block, &[to; SECTORS]);
            return;
        }
        leaf.set(index, to);
        if !leaf.keeps(index, old) {
            self.kill(old);
        }
    }

    /// Frees a slot that is not needed any more. The block's leaf is locked.
    pub(crate) fn kill(&self, slot: Location) {
        let Some((id, slot)) = slot.place() else { return };
        let Some(segment) = self.segments.get(id) else { return };
        let live = segment.kill(slot);
        if live == 0 {
            self.release(segment, id);
        } else if live == REFILL_LIVE && segment.word().state() == State::Dirty {
            self.log.lock().has_room(id);
            if self.waiting.wants_room() {
                self.host.signal();
            }
        }
    }
}

/// Whether all bytes are zero. Data with other bytes nearly always has one in its first 64 bytes.
pub(super) fn is_zero(data: &[u8]) -> bool {
    let (head, rest) = data.split_at(data.len().min(64));
    head.iter().all(|b| *b == 0) && rest.chunks(256).all(|c| c.iter().fold(0, |sum, b| sum | b) == 0)
}

#[cfg(test)]
mod tests {
    use super::is_zero;

    #[test]
    fn zero_blocks_are_recognised() {
        let mut block = vec![0u8; 4096];
        assert!(is_zero(&block));
        for at in [0, 63, 64, 255, 256, 4095] {
            block[at] = 1;
            assert!(!is_zero(&block), "byte {at}");
            block[at] = 0;
        }
    }
}
