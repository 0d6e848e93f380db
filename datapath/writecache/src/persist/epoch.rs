//! Closes an epoch between two writes, and commits it to the map.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::Ordering;

use headwater_block::IoError;

use super::commit::Job;
use super::format::{Encoder, MAX_ENCRYPTED, MAX_PARTS, MAX_RANGES, NO_BLOCK, Part};
use super::journal::Journal;
use super::{Change, FlushDone, LOW_GENERATIONS, Persist};
use crate::cache::WriteCache;
use crate::counters::count;
use crate::map::split;
use crate::memory::with_frozen;
use crate::overflow::Overflow;
use crate::overflow::encrypt::{ENCRYPTED_SEGMENT_BYTES, ENCRYPTED_SLOT_BYTES};
use crate::segment::State;
use crate::sync::UNDER_MODEL_CHECKER;
use crate::units::{Location, SECTORS, SLOT_COUNT, SegmentId, Slot};

/// Approximate size of a full segment's record in a checkpoint, in bytes.
const CHECKPOINT_SEGMENT_BYTES: u64 = if UNDER_MODEL_CHECKER { 16 } else { 2080 };

/// If an epoch has more slots than this, they are written to the data file only: writing them twice would
/// cost more than a sync.
const MOST_ENCRYPTED: usize = if UNDER_MODEL_CHECKER { 2 } else { 16 };

/// The most changes that name slots in an epoch whose slots go into the map. Several changes may name one
/// slot: each write of further sectors does.
const MOST_NAMING: usize = 8 * MOST_ENCRYPTED;

/// Approximate size of a slot of a partial block in a checkpoint, in bytes.
const CHECKPOINT_PART_BYTES: u64 = 24;

/// Slots of a closed epoch that are only in RAM.
struct Fresh {
    address: usize,
    position: u32,
    generation: u64,
    first: u16,
    end: u16,
}

/// A closed epoch.
pub(super) struct Epoch {
    /// In the order of the writes.
    pub(super) changes: Vec<Change>,
    /// Positions that are free when the epoch is committed.
    pub(super) freed: Vec<u32>,
    pub(super) jobs: Vec<Job>,
    /// All live blocks, if the map is to be replaced: 4 bytes for each block, once.
    pub(super) checkpoint: Option<Encoder>,
    pub(super) waiters: Vec<FlushDone>,
}

impl WriteCache {
    /// Closes the epoch between two writes.
    pub(super) fn close_epoch(&self, persist: &Persist, overflow: &Overflow) -> Epoch {
        // First the flushes, then the epoch, so that all writes that were answered before the flushes are in
        // it.
        let waiters = std::mem::take(&mut persist.requests.lock().waiters);
        let mut checkpoint = {
            let used = overflow.used_bytes() / ENCRYPTED_SEGMENT_BYTES as u64;
            let bytes = used * CHECKPOINT_SEGMENT_BYTES + self.map.partial_slots() * CHECKPOINT_PART_BYTES;
            let journal = persist.journal.lock();
            // Allocates for all records before the gate is closed; unused space takes no memory.
            journal
                .wants_checkpoint(bytes)
                .then(|| Encoder::with_room(journal.sequence(), usize::try_from(bytes).unwrap_or_default()))
        };
        let gate = persist.gate.write();
        let mut pending = persist.pending.lock();
        let changes = std::mem::take(&mut pending.changes);
        let freed = std::mem::take(&mut pending.freed);
        pending.committing = true;
        pending.committing_changes = changes.len();
        drop(pending);
        let jobs = self.log.lock().close_epoch(&self.segments);
        match &mut checkpoint {
            Some(records) if !changes.is_empty() => self.whole_state(records),
            _ => checkpoint = None,
        }
        drop(gate);
        let jobs = jobs.into_iter().map(|(id, end)| Job { id, end }).collect();
        Epoch { changes, freed, jobs, checkpoint, waiters }
    }

    /// All live blocks. The gate is closed.
    fn whole_state(&self, records: &mut Encoder) {
        let numbers = self.log.lock().numbers_used();
        // Slots that only a frozen view needs end with the process. The map cannot be frozen or changed
        // meanwhile. Slots of partial blocks are added below.
        let is_all_whole = !self.map.is_frozen() && self.map.partial_blocks() == 0;
        let mut blocks: Vec<u32> = Vec::with_capacity(usize::from(SLOT_COUNT));
        for number in 0..numbers {
            let Some(segment) = self.segments.get(SegmentId(number)) else { continue };
            let Some(position) = segment.position() else { continue };
            if segment.live() == 0 || segment.word().state() == State::Free {
                continue;
            }
            // Neighbours in a segment are mostly of one leaf, which is locked once for all of them.
            let mut leaf = None;
            let mut owner = |slot| {
                let block = segment.owner(Slot(slot))?;
                if is_all_whole {
                    return Some(block.0);
                }
                let (of, index) = split(block);
                if leaf.as_ref().is_none_or(|(locked, _)| *locked != of) {
                    // Unlock it before another one is locked.
                    leaf = None;
                    leaf = Some((of, self.map.read(of)?));
                }
                let here = Location::at(SegmentId(number), Slot(slot));
                leaf.as_ref().is_some_and(|(_, leaf)| leaf.get(index) == here).then_some(block.0)
            };
            let Some(first) = (0..SLOT_COUNT).find(|slot| owner(*slot).is_some()) else { continue };
            blocks.clear();
            blocks.extend((first..SLOT_COUNT).map(|slot| owner(slot).unwrap_or(NO_BLOCK)));
            while blocks.last() == Some(&NO_BLOCK) {
                blocks.pop();
            }
            records.extent(position, segment.generation(), first, &blocks);
        }
        let mut ranges: Vec<(u32, u32)> = Vec::with_capacity(MAX_RANGES);
        self.map.zero_ranges(|range| {
            ranges.push(range);
            if ranges.len() == MAX_RANGES {
                records.ranges(true, &ranges);
                ranges.clear();
            }
        });
        records.ranges(true, &ranges);
        let mut parts: Vec<Part> = Vec::with_capacity(MAX_PARTS);
        self.map.each_partial(|block, sectors| {
            parts.extend(self.parts_of(block, sectors, u8::MAX));
            if parts.len() + SECTORS > MAX_PARTS {
                records.parts(&parts);
                parts.clear();
            }
        });
        records.parts(&parts);
    }

    /// Makes the epoch durable: few slots go into the map only, more into the data file first.
    pub(super) fn write_epoch(
        &self,
        persist: &Persist,
        overflow: &Overflow,
        epoch: &Epoch,
        checkpoint: Option<Encoder>,
    ) -> Result<(), IoError> {
        let mut journal = persist.journal.lock();
        let next = persist.next_generation.load(Ordering::Relaxed);
        let reserve = next + LOW_GENERATIONS > journal.generation_limit();
        let encrypted =
            if checkpoint.is_none() { self.encrypt(persist, overflow, epoch, &journal) } else { None };
        let done = match encrypted {
            Some(_) if epoch.changes.is_empty() && !reserve => {
                self.unpin(&epoch.jobs);
                Ok(())
            }
            Some(records) => self.append_encrypted(&mut journal, epoch, records, reserve),
            None => self.save_then_append(persist, overflow, epoch, &mut journal, (checkpoint, reserve)),
        };
        // If that fails, no new segments are begun.
        let _ = persist.room.claim(persist.pending_changes());
        done.map_err(|e| journal.error(e))?;
        persist.generation_limit.store(journal.generation_limit(), Ordering::Release);
        Ok(())
    }

    /// The records of an epoch with its slots in them: one write and one sync make it durable. `None`, so
    /// that the slots go to the data file: the epoch has too many, the map has no space for them, or slots in
    /// the data file become valid with this commit. Also after a failure, because writing the data file shows
    /// whether the disk works again; and if RAM is short, because writing segments frees some, which spilling
    /// cannot do while the next flush always waits.
    fn encrypt(
        &self,
        persist: &Persist,
        overflow: &Overflow,
        epoch: &Epoch,
        journal: &Journal,
    ) -> Option<Encoder> {
        if persist.disk_fails() || !journal.takes_encrypted() || self.wants_spill() {
            return None;
        }
        let fresh: Vec<Fresh> = epoch.jobs.iter().filter_map(|job| self.fresh(*job)).collect();
        let slots: usize = fresh.iter().map(|fresh| usize::from(fresh.end - fresh.first)).sum();
        let bytes = (slots * ENCRYPTED_SLOT_BYTES) as u64;
        if slots > MOST_ENCRYPTED || !persist.room.is_enough_beside(bytes, persist.pending_changes()) {
            return None;
        }
        // All slots that it names must be among these jobs: others were written by a spill or a failed
        // commit, or are dead already.
        let naming = || epoch.changes.iter().filter_map(|change| change.slot()).take(MOST_NAMING + 1);
        if naming().count() > MOST_NAMING || naming().collect::<BTreeSet<_>>().len() != slots {
            return None;
        }
        let mut records = Encoder::with_room(journal.sequence(), slots * (ENCRYPTED_SLOT_BYTES + 64));
        let mut all = true;
        let mut named = BTreeSet::new();
        encode(&epoch.changes, &mut records, &mut |records, (position, generation), slot, blocks| {
            // Parts may name a slot again, after other parts or a whole block. The slot's contents are in the
            // first of these records.
            let are_new = (slot..)
                .zip(blocks)
                .fold(false, |are_new, (slot, _)| are_new | named.insert((position, generation, slot)));
            if !are_new {
                return;
            }
            let of_it = fresh.iter().find(|it| {
                it.position == position
                    && it.generation == generation
                    && slot >= it.first
                    && usize::from(slot) + blocks.len() <= usize::from(it.end)
            });
            let Some(fresh) = of_it else { return all = false };
            for (some, slot) in blocks.chunks(MAX_ENCRYPTED).zip((slot..).step_by(MAX_ENCRYPTED)) {
                let mut encrypted = vec![0; some.len() * ENCRYPTED_SLOT_BYTES];
                for (into, slot) in encrypted.chunks_exact_mut(ENCRYPTED_SLOT_BYTES).zip(slot..) {
                    all &= with_frozen(fresh.address, Slot(slot), |plain| {
                        overflow.encrypt(generation, Slot(slot), plain, into)
                    });
                }
                records.encrypted((position, generation), slot, some, &encrypted);
            }
        });
        all.then_some(records)
    }

    /// The slots of a job that are not durable.
    fn fresh(&self, job: Job) -> Option<Fresh> {
        let segment = self.segments.get(job.id)?;
        let first = segment.saved().max(segment.logged());
        let (address, position) = (segment.word().ram()?, segment.position()?);
        let generation = segment.generation();
        (first < job.end).then_some(Fresh { address, position, generation, first, end: job.end })
    }

    fn append_encrypted(
        &self,
        journal: &mut Journal,
        epoch: &Epoch,
        records: Encoder,
        reserve: bool,
    ) -> io::Result<()> {
        let done = journal.append(records, reserve).inspect_err(|_| count(&self.counters.disk_errors, 1));
        for job in epoch.jobs.iter().filter(|_| done.is_ok()) {
            if let Some(segment) = self.segments.get(job.id) {
                segment.set_logged(job.end);
            }
        }
        // Not earlier, because these must still be the same segments.
        self.unpin(&epoch.jobs);
        done
    }

    /// Writes all slots of closed epochs that are not in the data file, syncs it, and then adds a commit to
    /// the map or replaces the map.
    fn save_then_append(
        &self,
        persist: &Persist,
        overflow: &Overflow,
        epoch: &Epoch,
        journal: &mut Journal,
        (checkpoint, reserve): (Option<Encoder>, bool),
    ) -> io::Result<()> {
        let mut jobs = epoch.jobs.iter().copied();
        let saved = self.save(persist, overflow, &mut || jobs.next(), &mut |_, _| {});
        self.unpin(&epoch.jobs);
        saved?;
        if epoch.changes.is_empty() && !reserve {
            return Ok(());
        }
        if persist.unsynced.swap(false, Ordering::AcqRel)
            && let Err(error) = overflow.sync()
        {
            count(&self.counters.disk_errors, 1);
            // The kernel may have dropped data that it could not write, and reports that only once.
            journal.set_broken();
            return Err(error);
        }
        let failed = |_: &io::Error| count(&self.counters.disk_errors, 1);
        let replaced = checkpoint.map(|everything| journal.checkpoint(everything).inspect_err(failed));
        match replaced {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) if journal.is_broken() => Err(error),
            // If there is no space for a new map, the old one grows, for which space is reserved.
            Some(Err(error)) => {
                self.warn(&format_args!(
                    "the map of the persistent cache could not be replaced by a shorter one, so it grows: {error}"
                ));
                append(journal, &epoch.changes, reserve).inspect_err(failed)
            }
            None => append(journal, &epoch.changes, reserve).inspect_err(failed),
        }
    }

    fn unpin(&self, jobs: &[Job]) {
        for job in jobs {
            let Some(segment) = self.segments.get(job.id) else { continue };
            let released = self.log.lock().unpin(segment, job.id);
            self.take_back(released);
        }
    }
}

fn append(journal: &mut Journal, changes: &[Change], reserve: bool) -> io::Result<()> {
    let mut records = Encoder::new(journal.sequence());
    encode(changes, &mut records, &mut plainly);
    journal.append(records, reserve)
}

/// Adds the record of blocks in consecutive slots of a position and a generation.
type AddExtent<'a> = &'a mut dyn FnMut(&mut Encoder, (u32, u64), u16, &[u32]);

/// For slots in the data file. A slot of parts then needs no record of its own.
fn plainly(encoder: &mut Encoder, (position, generation): (u32, u64), first_slot: u16, blocks: &[u32]) {
    if blocks != [NO_BLOCK] {
        encoder.extent(position, generation, first_slot, blocks);
    }
}

/// Encodes changes in order; changes in consecutive slots become one record. `extent` is called with
/// [`NO_BLOCK`] for the slot of each part, before the record of the parts.
fn encode(changes: &[Change], encoder: &mut Encoder, extent: AddExtent<'_>) {
    let mut blocks: Vec<u32> = Vec::new();
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    let mut parts: Vec<Part> = Vec::new();
    let mut rest = changes.iter().copied().peekable();
    while let Some(change) = rest.next() {
        match change {
            Change::Slot { block, position, slot, generation } => {
                blocks.clear();
                blocks.push(block);
                let mut last = slot;
                while let Some(Change::Slot { block, slot, .. }) = rest.next_if(|next| {
                    matches!(next, Change::Slot { position: p, slot: s, generation: g, .. }
                        if *p == position && *g == generation && last.checked_add(1) == Some(*s))
                }) {
                    blocks.push(block);
                    last = slot;
                }
                extent(encoder, (position, generation), slot, &blocks);
            }
            Change::Sectors { .. } | Change::ZeroSectors { .. } => {
                parts.clear();
                parts.extend(change.part());
                while let Some(next) = rest.next_if(|next| next.part().is_some()) {
                    parts.extend(next.part());
                }
                for (position, generation, slot) in parts.iter().filter_map(|part| part.slot) {
                    extent(encoder, (position, generation), slot, &[NO_BLOCK]);
                }
                encoder.parts(&parts);
            }
            Change::Range { first, count, zero } => {
                ranges.clear();
                ranges.push((first, count));
                while let Some(Change::Range { first, count, .. }) =
                    rest.next_if(|next| matches!(next, Change::Range { zero: z, .. } if *z == zero))
                {
                    ranges.push((first, count));
                }
                encoder.ranges(zero, &ranges);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::persist::format::{Record, decode};

    #[test]
    fn neighbours_share_a_record_and_order_is_kept() {
        let slot = |block, position, slot| Change::Slot { block, position, slot, generation: 9 };
        let range = |first, zero| Change::Range { first, count: 1, zero };
        let changes =
            [slot(5, 1, 0), slot(6, 1, 1), slot(7, 1, 3), range(5, true), range(6, true), range(7, false)];
        let zero = |block| Change::ZeroSectors { block, sectors: 1 };
        let sectors = Change::Sectors { block: 8, sectors: 2, position: 1, slot: 4, generation: 9 };
        let changes = [&changes[..], &[zero(7), sectors, range(9, true), zero(9)]].concat();
        let mut encoder = Encoder::new(1);
        encode(&changes, &mut encoder, &mut plainly);
        let (bytes, _) = encoder.finish();
        let mut seen = Vec::new();
        let mut at = 0;
        while let Some((_, record, next)) = decode(&bytes, at) {
            seen.push(match record {
                Record::Extent { first_slot, blocks, .. } | Record::Encrypted { first_slot, blocks, .. } => {
                    (u32::from(first_slot), blocks.len())
                }
                Record::Zero(ranges) => (100, ranges.len()),
                Record::Absent(ranges) => (200, ranges.len()),
                Record::Parts(parts) => (400, parts.iter().count()),
                Record::Commit { .. } => (300, 0),
            });
            at = next;
        }
        assert_eq!(seen, vec![(0, 2), (3, 1), (100, 4), (200, 2), (400, 2), (100, 2), (400, 1)]);
    }
}
