//! Writes of parts of blocks, without reading the rest of the block first.
//!
//! | state of the block | effect of a write of some of its sectors |
//! |---|---|
//! | the block is whole, or has all written sectors in slots that may be overwritten | overwrites these slots |
//! | all other sectors are in RAM, packed, zero, or fetched | makes a whole block in one slot |
//! | a partial block with a slot of its own that may be overwritten | writes into that slot |
//! | otherwise | takes a slot for these sectors only: the block becomes a partial block |
//!
//! A request that covers the end of one block and the beginning of the next takes one slot for both
//! ([`WriteCache::write_pair`]).
//!
//! A partial block has its sectors in several slots. Such blocks take index memory, and more slots than whole
//! ones. If they would take too much of either ([`WriteCache::takes_partial`]), the rest of the block is
//! fetched first, and the block is stored whole. The rest is also fetched for a write that does not begin and
//! end at sector boundaries, and for zeroes if the rest is in a slot, because the block may be all zero then.

use std::ops::Range;

use headwater_block::BLOCK_BYTES;

use super::write::is_zero;
use super::{Admission, BLOCK, Old, WriteCache, WriteResult};
use crate::counters::Hot;
use crate::log::Stream;
use crate::map::{LeafWrite, split};
use crate::memory::{copy_in, copy_out};
use crate::partial::{PARTIAL_BYTES, Sectors, is_left, slots};
use crate::units::{BlockNumber, Location, SECTOR_BYTES, SECTORS, SLOT_COUNT, SLOTS, SegmentId, Slot};

static ZEROES: [u8; BLOCK] = [0; BLOCK];

/// This part of all slots may be surplus slots of partial blocks (more than one each), even if there is no
/// other free space.
const SURPLUS_PART: u64 = 16;

/// In addition, this part of the free or dead slots on the overflow disk.
const FREE_PART: u64 = 4;

/// A fetched part of a block: its place, and the contents of its whole slot or the block of the image.
pub type FetchedOld = (Old, Vec<u8>);

/// The part of a block that is written.
#[derive(Clone, Copy)]
struct Part<'a> {
    skip: usize,
    data: &'a [u8],
}

impl Part<'_> {
    fn end(&self) -> usize {
        self.skip.saturating_add(self.data.len())
    }

    /// The sectors that it covers, if it covers whole sectors.
    fn sectors(&self) -> Option<Range<usize>> {
        let is_aligned =
            self.skip.is_multiple_of(SECTOR_BYTES) && self.data.len().is_multiple_of(SECTOR_BYTES);
        (is_aligned && self.end() <= BLOCK && !self.data.is_empty())
            .then(|| self.skip / SECTOR_BYTES..self.end() / SECTOR_BYTES)
    }

    /// Points the sectors of this part to a slot.
    fn put_in(&self, mut sectors: Sectors, place: Location) -> Option<Sectors> {
        sectors.get_mut(self.sectors()?)?.fill(place);
        Some(sectors)
    }
}

/// The block that is written, in its leaf.
struct Target<'l, 'm> {
    leaf: &'l mut LeafWrite<'m>,
    index: usize,
    block: BlockNumber,
    took_slot: bool,
}

/// A slot that may be overwritten.
#[derive(Clone, Copy, Debug)]
struct Open {
    address: usize,
    slot: Slot,
}

/// Overwrites the sectors of a part, each in its slot. Sectors in one slot are copied together.
fn copy_sectors(open: &[Option<Open>; SECTORS], part: Part<'_>, leaf: &LeafWrite<'_>) {
    let mut sector = part.skip / SECTOR_BYTES;
    while let Some(Some(first)) = open.get(sector) {
        let is_same = |open: &&Option<Open>| {
            open.is_some_and(|open| (open.address, open.slot.0) == (first.address, first.slot.0))
        };
        let count = open.iter().skip(sector).take_while(is_same).count();
        let (start, end) = (sector * SECTOR_BYTES, (sector + count) * SECTOR_BYTES);
        let Some(from) = part.data.get(start.saturating_sub(part.skip)..end.saturating_sub(part.skip)) else {
            return;
        };
        copy_in(first.address, first.slot, start, from, leaf);
        sector += count;
    }
}

impl WriteCache {
    /// Stores a part of a block. `same` returns whether the image is known to have the same bytes there. It
    /// is called if no part of the block was changed, under the block's lock, so it must neither wait nor use
    /// the cache.
    pub fn write_part(
        &self,
        block: BlockNumber,
        skip: usize,
        data: &[u8],
        admission: Admission,
        same: impl FnOnce() -> bool,
    ) -> WriteResult {
        self.write_at_pace(admission, |this| this.merge_now(block, Part { skip, data }, &[], admission, same))
    }

    /// Stores a part of a block of which other parts were fetched. If more parts are needed, because the
    /// block changed meanwhile or its sectors are in several places, the result asks for them.
    pub fn merge(
        &self,
        block: BlockNumber,
        skip: usize,
        data: &[u8],
        fetched: &[FetchedOld],
        admission: Admission,
    ) -> WriteResult {
        self.write_at_pace(admission, |this| {
            this.merge_now(block, Part { skip, data }, fetched, admission, || false)
        })
    }

    /// Stores the end of a block and the beginning of the next one, at most [`BLOCK`] bytes in all, in one
    /// slot or in place. `None`: each has to be written by itself. For `same` see [`WriteCache::write_part`].
    pub fn write_pair(
        &self,
        block: BlockNumber,
        skip: usize,
        data: &[u8],
        admission: Admission,
        same: impl FnOnce() -> bool,
    ) -> Option<WriteResult> {
        let (first, second) = data.split_at_checked(BLOCK.checked_sub(skip)?)?;
        let parts = [Part { skip, data: first }, Part { skip: 0, data: second }];
        let is_pair = parts.iter().all(|part| part.sectors().is_some()) && data.len() <= BLOCK;
        if !is_pair || split(block).1 + 1 >= SLOTS {
            return None;
        }
        let mut alone = false;
        let wrote =
            self.write_at_pace(admission, |this| match this.pair_now(block, parts, admission, same) {
                Some(wrote) => wrote,
                None => {
                    alone = true;
                    (WriteResult::Done, false)
                }
            });
        (!alone).then_some(wrote)
    }

    fn write_at_pace(
        &self,
        admission: Admission,
        write: impl FnOnce(&Self) -> (WriteResult, bool),
    ) -> WriteResult {
        let (wrote, took_slot) = write(self);
        if took_slot && admission != Admission::Waited {
            self.throttle.wait(&self.host.spinner);
        }
        wrote
    }

    /// Also returns whether it took a slot.
    fn merge_now(
        &self,
        block: BlockNumber,
        part: Part<'_>,
        fetched: &[FetchedOld],
        admission: Admission,
        same: impl FnOnce() -> bool,
    ) -> (WriteResult, bool) {
        let Ok(_entered) = self.enter_to_write() else { return (WriteResult::Closed, false) };
        let (leaf, index) = split(block);
        let Some(mut leaf) = self.map.write(leaf) else { return (self.no_room(admission), false) };
        if !is_zero(part.data) && self.overwrite_whole(&leaf, index, part) {
            self.counters.hot(Hot::WriteInPlace, 1);
            return (WriteResult::Done, false);
        }
        let mut target = Target { leaf: &mut leaf, index, block, took_slot: false };
        let wrote = self.write_elsewhere(&mut target, part, fetched, admission, same);
        (wrote, target.took_slot)
    }

    /// Overwrites a part of a whole block, if its slot may be overwritten. Returns whether it did.
    #[inline]
    fn overwrite_whole(&self, leaf: &LeafWrite<'_>, index: usize, part: Part<'_>) -> bool {
        let Some(open) = self.open_slot(leaf, index, leaf.get(index)) else { return false };
        copy_in(open.address, open.slot, part.skip, part.data, leaf);
        true
    }

    /// The slot of a block's sectors, if it may be overwritten; marks the segment as written to. Called once
    /// for each write: a thread that moves the segment first changes the segment's state and then waits until
    /// the leaf is unlocked. So the slot stays valid for this write, but a second call might give another
    /// answer.
    #[inline]
    fn open_slot(&self, leaf: &LeafWrite<'_>, index: usize, at: Location) -> Option<Open> {
        let (id, slot) = at.place()?;
        let segment = self.segments.get(id)?;
        let address = segment.writable(slot)?;
        if leaf.keeps(index, at) {
            return None;
        }
        segment.touch_to_write();
        Some(Open { address, slot })
    }

    /// The slots of the sectors that a part writes, if all of them may be overwritten.
    fn open_sectors(
        &self,
        leaf: &LeafWrite<'_>,
        index: usize,
        (sectors, part): (&Sectors, Part<'_>),
    ) -> Option<[Option<Open>; SECTORS]> {
        let range = part.sectors()?;
        let mut all = [None; SECTORS];
        let mut last: Option<(Location, Open)> = None;
        for (open, at) in all.get_mut(range.clone())?.iter_mut().zip(sectors.get(range)?) {
            let slot = match last {
                Some((before, slot)) if before == *at => slot,
                _ => self.open_slot(leaf, index, *at)?,
            };
            last = Some((*at, slot));
            *open = Some(slot);
        }
        Some(all)
    }

    #[inline(never)]
    fn write_elsewhere(
        &self,
        target: &mut Target<'_, '_>,
        part: Part<'_>,
        fetched: &[FetchedOld],
        admission: Admission,
        same: impl FnOnce() -> bool,
    ) -> WriteResult {
        let sectors = target.leaf.sectors(target.index);
        if !is_zero(part.data) && self.overwrite_sectors(target, &sectors, part) {
            return WriteResult::Done;
        }
        let mut whole = [0; BLOCK];
        let missing = self.gather(target, &sectors, part, fetched, &mut whole);
        let is_absent = sectors.iter().all(|sector| *sector == Location::ABSENT);
        let is_image = || {
            let image = fetched.iter().find(|(old, _)| *old == Old::Absent);
            image.map_or_else(same, |(_, bytes)| bytes.get(part.skip..part.end()) == Some(part.data))
        };
        if is_absent && is_image() {
            // The block stays absent.
            let which = if is_zero(part.data) { Hot::ElidedZero } else { Hot::ElidedEqual };
            self.counters.hot(which, 1);
            return WriteResult::Done;
        }
        let Some(into) = whole.get_mut(part.skip..part.end()) else { return WriteResult::NoRoom };
        into.copy_from_slice(part.data);
        // Only zeroes make a block zero.
        if missing.is_none() && is_zero(part.data) && is_zero(&whole) {
            let is_zero = sectors.iter().all(|sector| *sector == Location::ZERO);
            if is_zero || (self.takes_notes() && !self.lacks_index_space(target.leaf)) {
                return self.set_zero(target.leaf, target.index, target.block);
            }
        }
        if is_zero(part.data) && self.overwrite_sectors(target, &sectors, part) {
            return WriteResult::Done;
        }
        let Some(missing) = missing else {
            let wrote = self.store(target.leaf, target.index, target.block, &whole, admission);
            target.took_slot = wrote == WriteResult::Done;
            return wrote;
        };
        if fetched.is_empty()
            && let Some(wrote) = self.store_part(target, &sectors, part, admission)
        {
            return wrote;
        }
        WriteResult::NeedOld(missing)
    }

    /// Overwrites a part in place, if all of its slots may be overwritten. Returns whether it did.
    fn overwrite_sectors(&self, target: &Target<'_, '_>, sectors: &Sectors, part: Part<'_>) -> bool {
        let open = self.open_sectors(target.leaf, target.index, (sectors, part));
        if let Some(open) = &open {
            copy_sectors(open, part, target.leaf);
        }
        let done = open.is_some() || self.overwrite_whole(target.leaf, target.index, part);
        if done {
            self.counters.hot(Hot::WriteInPlace, 1);
        }
        done
    }

    /// Copies the other sectors of a block. Returns the first that has to be fetched.
    fn gather(
        &self,
        target: &Target<'_, '_>,
        sectors: &Sectors,
        part: Part<'_>,
        fetched: &[FetchedOld],
        whole: &mut [u8; BLOCK],
    ) -> Option<Old> {
        let mut unpacked: Option<(Location, [u8; BLOCK])> = None;
        for (place, start) in sectors.iter().zip((0..).step_by(SECTOR_BYTES)) {
            let end = start + SECTOR_BYTES;
            if part.skip <= start && part.end() >= end {
                continue;
            }
            let Some(into) = whole.get_mut(start..end) else { continue };
            let mut copy = |from: &[u8]| {
                let from = from.get(start..end);
                from.map(|from| into.copy_from_slice(from)).is_some()
            };
            let Some((id, slot)) = place.place() else {
                if *place == Location::ABSENT {
                    let image = fetched.iter().find(|(old, _)| *old == Old::Absent);
                    if !image.is_some_and(|(_, bytes)| copy(bytes)) {
                        return Some(Old::Absent);
                    }
                }
                continue;
            };
            let word = self.segments.get(id).map(|segment| segment.word());
            if let Some(address) = word.and_then(|word| word.ram()) {
                copy_out(address, slot, start, into, target.leaf);
                continue;
            }
            if word.is_some_and(|word| word.is_packed()) {
                if unpacked.as_ref().is_none_or(|(at, _)| at != place) {
                    let mut bytes = [0; BLOCK];
                    unpacked = self.unpack(id, slot, &mut bytes).then_some((*place, bytes));
                }
                if unpacked.as_ref().is_some_and(|(_, bytes)| copy(bytes)) {
                    continue;
                }
            }
            let is_it = |old: &Old| matches!(old, Old::Spilled(ticket) if self.holds(ticket, *place));
            let found = fetched.iter().find(|(old, _)| is_it(old));
            if !found.is_some_and(|(_, bytes)| copy(bytes)) {
                return Some(Old::Spilled(self.ticket(target.block, id, slot)));
            }
        }
        None
    }

    /// A slot that only this block uses and that may be overwritten.
    fn slot_of_its_own(
        &self,
        leaf: &LeafWrite<'_>,
        index: usize,
        block: BlockNumber,
        sectors: &Sectors,
    ) -> Option<(Location, Open)> {
        let own = |at: Location| {
            let owner = at.place().and_then(|(id, slot)| self.segments.get(id)?.owner(slot));
            let is_shared = index + 1 < SLOTS && leaf.needs(index + 1, at);
            if owner != Some(block) || is_shared {
                return None;
            }
            Some((at, self.open_slot(leaf, index, at)?))
        };
        slots(sectors).find_map(own)
    }

    /// Stores sectors of a block in a slot, wherever the others are. `None`: the leaf or the cache takes no
    /// partial block.
    fn store_part(
        &self,
        target: &mut Target<'_, '_>,
        sectors: &Sectors,
        part: Part<'_>,
        admission: Admission,
    ) -> Option<WriteResult> {
        let Target { leaf, index, block, took_slot } = target;
        if !self.takes_partial(leaf, *index, 1) {
            return None;
        }
        if is_zero(part.data) {
            let zero = part.put_in(*sectors, Location::ZERO)?;
            // The sectors in slots may be zero, too, and then the block would take no space: fetch them to
            // find out.
            if zero.iter().any(|sector| sector.place().is_some()) || !self.takes_part_notes() {
                return None;
            }
            self.counters.hot(Hot::ElidedZero, 1);
            return self.put_sectors(leaf, *index, *block, sectors, &zero).then_some(WriteResult::Done);
        }
        // A change with a new slot is bounded by the space of the persistent map; a change without one is
        // not.
        if self.takes_part_notes()
            && let Some((at, open)) = self.slot_of_its_own(leaf, *index, *block, sectors)
        {
            let changed = part.put_in(*sectors, at)?;
            copy_in(open.address, open.slot, part.skip, part.data, leaf);
            self.counters.hot(Hot::WriteInPlace, 1);
            return self.put_sectors(leaf, *index, *block, sectors, &changed).then_some(WriteResult::Done);
        }
        if let Some(queues) = self.queues(admission) {
            return Some(queues);
        }
        let Some(new) = self.take_slot(Stream::Fresh, *block) else { return Some(WriteResult::NoRoom) };
        // The slot's other bytes are zeroed: no contents of another block go to the disk, and zeroes compress
        // well.
        let (before, after) = (ZEROES.get(..part.skip)?, ZEROES.get(part.end()..)?);
        copy_in(new.address, new.slot, 0, before, leaf);
        copy_in(new.address, new.slot, part.skip, part.data, leaf);
        copy_in(new.address, new.slot, part.end(), after, leaf);
        let changed = part.put_in(*sectors, Location::at(new.id, new.slot))?;
        // There was space for it above, under the same lock.
        let _ = self.put_sectors(leaf, *index, *block, sectors, &changed);
        *took_slot = true;
        self.counters.hot(Hot::WriteNew, 1);
        self.throttle.took_slot(&self.host.spinner);
        Some(WriteResult::Done)
    }

    /// Also returns whether it took a slot. `None`: each part has to be written by itself.
    fn pair_now(
        &self,
        block: BlockNumber,
        parts: [Part<'_>; 2],
        admission: Admission,
        same: impl FnOnce() -> bool,
    ) -> Option<(WriteResult, bool)> {
        let Ok(_entered) = self.enter_to_write() else { return Some((WriteResult::Closed, false)) };
        let (leaf, index) = split(block);
        let mut leaf = self.map.write(leaf)?;
        let [first, second] = parts;
        if is_zero(first.data) || is_zero(second.data) {
            return None;
        }
        // Both blocks are whole and in RAM, as nearly always if the cache fits into RAM.
        if let Some(open) = self.open_slot(&leaf, index, leaf.get(index))
            && let Some(next) = self.open_slot(&leaf, index + 1, leaf.get(index + 1))
        {
            copy_in(open.address, open.slot, first.skip, first.data, &leaf);
            copy_in(next.address, next.slot, 0, second.data, &leaf);
            self.counters.hot(Hot::WriteInPlace, 2);
            return Some((WriteResult::Done, false));
        }
        let sectors = [leaf.sectors(index), leaf.sectors(index + 1)];
        let [ours, next] = &sectors;
        if let Some(open) = self.open_sectors(&leaf, index, (ours, first))
            && let Some(next_open) = self.open_sectors(&leaf, index + 1, (next, second))
        {
            copy_sectors(&open, first, &leaf);
            copy_sectors(&next_open, second, &leaf);
            self.counters.hot(Hot::WriteInPlace, 2);
            return Some((WriteResult::Done, false));
        }
        let is_absent = |sectors: &Sectors| sectors.iter().all(|sector| *sector == Location::ABSENT);
        if is_absent(ours) && is_absent(next) && same() {
            self.counters.hot(Hot::ElidedEqual, 2);
            return Some((WriteResult::Done, false));
        }
        let next_block = BlockNumber(block.0.checked_add(1)?);
        let targets = [(index, block, ours, first), (index + 1, next_block, next, second)];
        for (index, block, sectors, part) in targets {
            let is_apart = self.takes_partial(&leaf, index, 2)
                && self.slot_of_its_own(&leaf, index, block, sectors).is_none()
                && !self.is_at_hand(sectors, part);
            if !is_apart {
                return None;
            }
        }
        if let Some(queues) = self.queues(admission) {
            return Some((queues, false));
        }
        let Some(new) = self.take_slot(Stream::Fresh, block) else {
            return Some((WriteResult::NoRoom, false));
        };
        let place = Location::at(new.id, new.slot);
        copy_in(new.address, new.slot, first.skip, first.data, &leaf);
        copy_in(new.address, new.slot, 0, second.data, &leaf);
        // The bytes of neither part. Together the parts are not longer than a slot.
        if let Some(gap) = ZEROES.get(second.end()..first.skip) {
            copy_in(new.address, new.slot, second.end(), gap, &leaf);
        }
        for (index, block, sectors, part) in targets {
            let changed = part.put_in(*sectors, place)?;
            let _ = self.put_sectors(&mut leaf, index, block, sectors, &changed);
        }
        self.counters.hot(Hot::WriteNew, 2);
        self.throttle.took_slot(&self.host.spinner);
        Some((WriteResult::Done, true))
    }

    /// Whether all other sectors of a block are in RAM, and some of them in a slot, which becomes free if the
    /// block is stored whole.
    fn is_at_hand(&self, sectors: &Sectors, part: Part<'_>) -> bool {
        let stays = |sector: usize| part.sectors().is_none_or(|range| !range.contains(&sector));
        let mut others =
            sectors.iter().enumerate().filter(|(sector, _)| stays(*sector)).map(|(_, place)| place);
        let is_in_ram = |id: SegmentId| {
            let word = self.segments.get(id).map(|segment| segment.word());
            word.is_some_and(|word| word.ram().is_some() || word.is_packed())
        };
        let has_slot = sectors.iter().any(|place| place.place().is_some());
        has_slot
            && others
                .all(|place| *place == Location::ZERO || place.place().is_some_and(|(id, _)| is_in_ram(id)))
    }

    /// Whether `count` more blocks of the leaf may become partial blocks, or this one is a partial block and
    /// may have more slots.
    fn takes_partial(&self, leaf: &LeafWrite<'_>, index: usize, count: usize) -> bool {
        let is_partial = leaf.get(index).entry().is_some();
        let has_index = || self.has_index_for_partial() && self.map.has_index_space();
        if !is_partial && (!leaf.takes_partial(count) || !has_index()) {
            return false;
        }
        self.map.partial_surplus() < self.most_surplus()
    }

    /// Whether a persistent cache can log the places of sectors that take no new slot.
    fn takes_part_notes(&self) -> bool {
        self.persist.as_ref().is_none_or(|persist| persist.takes_part_notes())
    }

    /// Like [`WriteCache::replace_sectors`], for a write: logged for the next commit of a persistent cache.
    fn put_sectors(
        &self,
        leaf: &mut LeafWrite<'_>,
        index: usize,
        block: BlockNumber,
        before: &Sectors,
        to: &Sectors,
    ) -> bool {
        let done = self.replace_sectors(leaf, index, block, to);
        if done {
            self.note_sectors(block, before, to);
        }
        done
    }

    /// Moves sectors of a block, and frees the slots that it leaves. `false`: the leaf takes no more partial
    /// blocks.
    pub(super) fn replace_sectors(
        &self,
        leaf: &mut LeafWrite<'_>,
        index: usize,
        block: BlockNumber,
        to: &Sectors,
    ) -> bool {
        let before = leaf.sectors(index);
        if !leaf.set_sectors(index, to) {
            return false;
        }
        let (number, _) = split(block);
        slots(&before)
            .filter(|slot| !to.contains(slot))
            .for_each(|slot| self.release_slot(leaf, number, slot));
        true
    }

    /// Frees a slot that a block of this leaf has left, unless it is still needed: by the block that shares
    /// it, or by a frozen view.
    pub(super) fn release_slot(&self, leaf: &LeafWrite<'_>, number: usize, at: Location) {
        let Some(segment) = at.place().and_then(|(id, _)| self.segments.get(id)) else { return };
        if is_left(segment, leaf, number, at) {
            self.kill(at);
        }
    }

    /// Whether the tables of partial blocks may grow: they may take three eighths of the RAM.
    fn has_index_for_partial(&self) -> bool {
        (self.map.partial_bytes() + PARTIAL_BYTES).saturating_mul(8)
            <= self.ram_limit_bytes().saturating_mul(3)
    }

    /// How many slots partial blocks may have beyond one each.
    fn most_surplus(&self) -> u64 {
        let Some(overflow) = &self.overflow else {
            return self.ram_limit_bytes() / u64::from(BLOCK_BYTES) / SURPLUS_PART;
        };
        let free = u64::from(overflow.free_positions()) * u64::from(SLOT_COUNT);
        let all = u64::from(overflow.limit_positions()) * u64::from(SLOT_COUNT);
        let least = all / SURPLUS_PART;
        least + least.min(free.max(self.cleaner.dead_slots()) / FREE_PART)
    }
}

const _: () = assert!(SECTORS * SECTOR_BYTES == BLOCK);
