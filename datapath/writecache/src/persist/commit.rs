//! The thread of a persistent cache: writing segments, and committing epochs.

use std::cell::Cell;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use headwater_block::{IoError, IoErrorKind};

use super::directory::ID_BYTES;
use super::format::{Encoder, MAX_RANGES, NO_BLOCK};
use super::journal::Journal;
use super::{Change, FlushDone, LOW_GENERATIONS, Persist};
use crate::cache::WriteCache;
use crate::containment::{Otherwise, survives};
use crate::counters::count;
use crate::memory::{AlignedBuffer, with_frozen};
use crate::overflow::Overflow;
use crate::overflow::seal::{SEALED_SEGMENT_BYTES, SEALED_SLOT_BYTES};
use crate::segment::State;
use crate::sync::{EXPLORED, mpsc, thread};
use crate::units::{BlockNumber, Location, SLOT_COUNT, SegmentId, Slot};

/// Segments on their way to the disk at once.
const DEPTH: usize = 2;
/// RAM that they take.
pub const BUFFERS_BYTES: u64 = (DEPTH * SEALED_SEGMENT_BYTES) as u64;

/// Bytes of a full segment's record in a checkpoint, about.
const CHECKPOINT_SEGMENT_BYTES: u64 = if EXPLORED { 16 } else { 2080 };

/// Slots of a segment that are to be written: from the first that is not on disk up to `end`.
#[derive(Clone, Copy, Debug)]
struct Job {
    id: SegmentId,
    end: u16,
}

/// What came of a job, and its buffer, unless a write was given up with it.
type Landed = (Job, io::Result<()>, Option<AlignedBuffer>);

/// A closed epoch.
struct Epoch {
    changes: Vec<Change>,
    freed: Vec<u32>,
    jobs: Vec<Job>,
    /// Everything that is live, where the map is to be replaced: 4 bytes for each block, once.
    checkpoint: Option<Encoder>,
    waiters: Vec<FlushDone>,
}

impl Persist {
    /// Starts the thread.
    pub fn start(self: &Arc<Self>, cache: &Arc<WriteCache>) -> Result<(), IoError> {
        let persist = Arc::clone(self);
        let cache = Arc::downgrade(cache);
        let thread = thread::Builder::new()
            .name("hw-persist".into())
            .spawn(move || persist.run(&cache))
            .map_err(|e| IoError::from_os("cannot start the thread of a persistent cache", e))?;
        *self.thread.lock() = Some(thread);
        Ok(())
    }

    fn run(&self, cache: &Weak<WriteCache>) {
        let closed = IoError::new(IoErrorKind::Closed, "the volume is closed");
        loop {
            let (commit, spill) = {
                let mut asked = self.asked.lock();
                while !(asked.stop || asked.commit || asked.spill || !asked.waiters.is_empty()) {
                    self.wake.wait(&mut asked);
                }
                if asked.stop && asked.waiters.is_empty() {
                    return;
                }
                let commit = std::mem::take(&mut asked.commit) || !asked.waiters.is_empty();
                let spill = std::mem::take(&mut asked.spill);
                asked.spilling = spill;
                (commit, spill)
            };
            let Some(cache) = cache.upgrade() else { return self.refuse_flushes(&closed) };
            let Some(overflow) = cache.overflow.clone() else { return self.refuse_flushes(&closed) };
            let turn = || {
                if commit {
                    cache.commit(self, &overflow);
                }
                if spill {
                    cache.save_cold(self, &overflow);
                }
            };
            if !survives("the thread of a persistent cache", turn) {
                self.give_up();
                // Not tried again at once.
                overflow.failed();
            }
            if spill {
                self.asked.lock().spilling = false;
            }
            cache.host.signal();
        }
    }

    /// What was being committed is not known any more: nothing can be made durable until the cache is opened again.
    fn give_up(&self) {
        self.journal.lock().set_broken();
        self.broken.store(true, Ordering::Release);
        self.failed.store(true, Ordering::Release);
        let mut pending = self.pending.lock();
        pending.end_commit();
        pending.end();
    }

    fn refuse_flushes(&self, error: &IoError) {
        let waiters = std::mem::take(&mut self.asked.lock().waiters);
        waiters.into_iter().for_each(|done| done(Err(error.clone())));
    }

    /// Refuses writes, flushes, ends the thread and lets others open the cache. What came of the flush.
    pub fn close(&self) -> Result<(), IoError> {
        {
            // Between two writes: those that were let in end before the last commit, and no other one is answered as done.
            let _gate = self.gate.write();
            self.closed.store(true, Ordering::Release);
        }
        let Some(thread) = self.thread.lock().take() else { return Ok(()) };
        let (tx, rx) = mpsc::channel();
        self.flush(Box::new(move |result| {
            // The receiver waits for it.
            let _ = tx.send(result);
        }));
        let flushed = rx.recv().unwrap_or_else(|_| {
            Err(IoError::new(IoErrorKind::Device, "the last flush was given up by a bug"))
        });
        self.stop();
        if thread.join().is_err() {
            tracing::error!("the thread of a persistent cache has failed");
        }
        // After the last commit, which may need space that is claimed for it.
        *self.shut.lock() = true;
        self.pending.lock().end();
        if let Err(error) = rustix::fs::flock(&self.lock, rustix::fs::FlockOperation::Unlock) {
            tracing::debug!(%error, "the lock of a persistent cache goes with its file");
        }
        flushed
    }
}

impl WriteCache {
    /// Writes cold segments until there is enough room, or a flush waits.
    fn save_cold(&self, persist: &Persist, overflow: &Overflow) {
        let failed = Cell::new(false);
        let mut next = || {
            if failed.get() || persist.flush_waits() || !self.wants_spill() {
                return None;
            }
            let id = self.log.lock().freeze_victim(&self.segments, false)?;
            let segment = self.segments.get(id)?;
            // Those who saw the segment as writable have left once each of its leaves was locked again.
            self.map.sweep(segment.live_slots().map(|(_, block)| block));
            Some(Job { id, end: SLOT_COUNT })
        };
        let mut over = |job: Job, saved: bool| {
            failed.set(failed.get() || !saved);
            let Some(segment) = self.segments.get(job.id) else { return };
            let released = {
                let mut log = self.log.lock();
                if saved { log.thaw(segment, job.id, true) } else { log.thaw_unsaved(segment, job.id) }
            };
            self.take_back(released);
        };
        // Of each that failed the log has it.
        let _ = self.save(persist, overflow, &mut next, &mut over);
        self.set_failed(persist, overflow, failed.get());
    }

    fn set_failed(&self, persist: &Persist, overflow: &Overflow, failed: bool) {
        persist.failed.store(failed, Ordering::Release);
        if failed {
            // Not tried again at once.
            overflow.failed();
        }
    }

    /// Seals and writes the jobs that `next` gives, a few at a time, and says of each whether it worked. The first error.
    fn save(
        &self,
        persist: &Persist,
        overflow: &Overflow,
        next: &mut dyn FnMut() -> Option<Job>,
        over: &mut dyn FnMut(Job, bool),
    ) -> io::Result<()> {
        let (tx, rx) = mpsc::channel::<Landed>();
        let mut all = Ok(());
        let mut flying = 0;
        let mut buffers = persist.buffers.lock();
        persist.buffers_used.store(true, Ordering::Relaxed);
        let mut land = |(job, result, buffer): Landed| {
            let result = self.landed(job, result);
            over(job, result.is_ok());
            if all.is_ok() {
                all = result;
            }
            if buffer.is_none() {
                persist.buffers_made_bytes.fetch_sub(SEALED_SEGMENT_BYTES as u64, Ordering::Relaxed);
                self.host.give_ram(SEALED_SEGMENT_BYTES as u64);
            }
            buffer
        };
        loop {
            if buffers.is_empty() && flying < DEPTH {
                let made = AlignedBuffer::new(SEALED_SEGMENT_BYTES);
                let bytes = made.as_ref().map_or(0, |buffer| buffer.len() as u64);
                persist.buffers_made_bytes.fetch_add(bytes, Ordering::Relaxed);
                self.host.add_ram(bytes);
                buffers.extend(made);
            }
            let buffer = match buffers.pop() {
                Some(buffer) => buffer,
                None => {
                    // One is in flight, or there is no memory at all.
                    if flying == 0 {
                        thread::sleep(std::time::Duration::from_millis(10));
                        continue;
                    }
                    let Ok(landed) = rx.recv() else { break };
                    flying -= 1;
                    let Some(buffer) = land(landed) else { continue };
                    buffer
                }
            };
            let Some(job) = next() else {
                buffers.push(buffer);
                break;
            };
            flying += 1;
            persist.unsynced.store(true, Ordering::Release);
            self.launch(overflow, job, buffer, tx.clone());
        }
        drop(tx);
        while let Ok(landed) = rx.recv() {
            buffers.extend(land(landed));
        }
        all
    }

    fn launch(&self, overflow: &Overflow, job: Job, mut buffer: AlignedBuffer, tx: mpsc::Sender<Landed>) {
        // The receiver waits for all that were sent.
        let given_up = tx.clone();
        let otherwise = Otherwise::new(move || {
            let _ = given_up.send((job, Err(io::Error::other("its write was given up")), None));
        });
        let done = move |job, result, buffer| {
            otherwise.answered();
            let _ = tx.send((job, result, Some(buffer)));
        };
        let Some(segment) = self.segments.get(job.id) else {
            return done(job, Err(io::ErrorKind::NotFound.into()), buffer);
        };
        let (Some(address), Some(position)) = (segment.word().ram(), segment.position()) else {
            return done(job, Err(io::ErrorKind::NotFound.into()), buffer);
        };
        if segment.saved() >= job.end {
            // A commit wrote its last slots just before it was closed.
            return done(job, Ok(()), buffer);
        }
        let generation = segment.generation();
        let align = overflow.align();
        let from = usize::from(segment.saved()) * SEALED_SLOT_BYTES;
        let start = from - from % align;
        let end =
            (usize::from(job.end) * SEALED_SLOT_BYTES).next_multiple_of(align).min(SEALED_SEGMENT_BYTES);
        // The sector where the last increment ended is written again, with the same bytes.
        let first = segment.saved().saturating_sub(1);
        let mut sealed = [0u8; SEALED_SLOT_BYTES];
        for slot in first..job.end {
            let at = usize::from(slot) * SEALED_SLOT_BYTES;
            let sealed_well = with_frozen(address, Slot(slot), |plain| {
                overflow.seal(generation, Slot(slot), plain, &mut sealed)
            });
            if !sealed_well {
                return done(job, Err(io::Error::other("a block could not be sealed")), buffer);
            }
            let skip = start.saturating_sub(at);
            let into = (at + skip).saturating_sub(start);
            if let (Some(from), Some(into)) =
                (sealed.get(skip..), buffer.get_mut(into..into + SEALED_SLOT_BYTES.saturating_sub(skip)))
            {
                into.copy_from_slice(from);
            }
        }
        // Nothing of what the buffer held before goes out.
        let used = usize::from(job.end) * SEALED_SLOT_BYTES - start;
        if let Some(rest) = buffer.get_mut(used..end - start) {
            rest.fill(0);
        }
        overflow.write_range(position, (start, end - start), buffer, move |result, buffer| {
            done(job, result, buffer);
        });
    }

    fn landed(&self, job: Job, result: io::Result<()>) -> io::Result<()> {
        let Some(segment) = self.segments.get(job.id) else { return Err(io::ErrorKind::NotFound.into()) };
        match &result {
            Ok(()) => {
                let slots = u64::from(job.end.saturating_sub(segment.saved()));
                segment.set_saved(job.end);
                count(&self.counters.spilled_segments, u64::from(job.end == SLOT_COUNT));
                count(&self.counters.spilled_blocks, slots);
                count(&self.counters.spilled_bytes, slots * SEALED_SLOT_BYTES as u64);
            }
            Err(error) => {
                count(&self.counters.disk_errors, 1);
                tracing::warn!(%error, "a segment could not be written to the persistent cache; it stays in RAM");
            }
        }
        result
    }

    /// Commits what was written up to now.
    fn commit(&self, persist: &Persist, overflow: &Overflow) {
        if persist.is_broken() {
            let error = persist.journal.lock().error(io::Error::other("an earlier write or sync failed"));
            return persist.refuse_flushes(&error);
        }
        let mut epoch = self.close_epoch(persist, overflow);
        let checkpoint = epoch.checkpoint.take();
        let checkpoint_bytes = checkpoint.as_ref().map_or(0, Encoder::len) as u64;
        persist.checkpoint_bytes.store(checkpoint_bytes, Ordering::Relaxed);
        self.host.add_ram(checkpoint_bytes);
        let result = self.write_epoch(persist, overflow, &epoch, checkpoint);
        persist.checkpoint_bytes.store(0, Ordering::Relaxed);
        self.host.give_ram(checkpoint_bytes);
        let broken = result.is_err() && persist.journal.lock().is_broken();
        let had_failed = persist.has_failed();
        // Of what is given up nothing is tried again.
        self.set_failed(persist, overflow, result.is_err() && !broken);
        let Epoch { mut changes, mut freed, waiters, .. } = epoch;
        match &result {
            Ok(()) => {
                // In this order: whoever finds the room knows that nothing of it is needed any more.
                persist.pending.lock().end_commit();
                freed.into_iter().for_each(|position| overflow.give_position(position));
                self.cleaner.unstick();
                count(&persist.commits, 1);
            }
            Err(error) => {
                if !broken && !had_failed {
                    tracing::warn!(%error, "a flush of a persistent cache failed; it is tried again with the next");
                }
                if broken && !persist.broken.swap(true, Ordering::AcqRel) {
                    tracing::error!(%error, "no flush of a persistent cache succeeds any more until it is opened again");
                }
                let mut pending = persist.pending.lock();
                changes.append(&mut pending.changes);
                freed.append(&mut pending.freed);
                pending.changes = changes;
                pending.freed = freed;
                pending.end_commit();
                if broken {
                    pending.end();
                }
            }
        }
        waiters.into_iter().for_each(|done| done(result.clone()));
    }

    /// Ends the epoch between two writes.
    fn close_epoch(&self, persist: &Persist, overflow: &Overflow) -> Epoch {
        // First the flushes, then the epoch: what was answered before them is in it.
        let waiters = std::mem::take(&mut persist.asked.lock().waiters);
        let mut checkpoint = {
            let used = overflow.used_bytes() / SEALED_SEGMENT_BYTES as u64;
            let bytes = used * CHECKPOINT_SEGMENT_BYTES;
            let journal = persist.journal.lock();
            // With room for all before the gate is closed; what is not used of it takes no memory.
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

    /// Everything that the map names. With the gate closed.
    fn whole_state(&self, records: &mut Encoder) {
        let numbers = self.log.lock().numbers_used();
        // What only a frozen view needs ends with the process. Nobody can freeze and change anything meanwhile.
        let frozen = self.map.is_frozen();
        let mut blocks: Vec<u32> = Vec::with_capacity(usize::from(SLOT_COUNT));
        for number in 0..numbers {
            let Some(segment) = self.segments.get(SegmentId(number)) else { continue };
            let Some(position) = segment.position() else { continue };
            if segment.live() == 0 || segment.word().state() == State::Free {
                continue;
            }
            let owner = |slot| {
                let block = segment.owner(Slot(slot))?;
                let here = Location::at(SegmentId(number), Slot(slot));
                (!frozen || self.is_at(block, here)).then_some(block.0)
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
    }

    fn write_epoch(
        &self,
        persist: &Persist,
        overflow: &Overflow,
        epoch: &Epoch,
        checkpoint: Option<Encoder>,
    ) -> Result<(), IoError> {
        let mut journal = persist.journal.lock();
        let mut jobs = epoch.jobs.iter().copied();
        let saved = self.save(persist, overflow, &mut || jobs.next(), &mut |_, _| {});
        self.unpin(&epoch.jobs);
        saved.map_err(|e| journal.error(e))?;
        let next = persist.next_generation.load(Ordering::Relaxed);
        let reserve = next + LOW_GENERATIONS > journal.generation_limit();
        if epoch.changes.is_empty() && !reserve {
            return Ok(());
        }
        if persist.unsynced.swap(false, Ordering::AcqRel)
            && let Err(error) = overflow.sync()
        {
            count(&self.counters.disk_errors, 1);
            // The kernel may have dropped what it could not write, and forgets that it did.
            journal.set_broken();
            return Err(journal.error(error));
        }
        let failed = |_: &io::Error| count(&self.counters.disk_errors, 1);
        let replaced = checkpoint.map(|everything| journal.checkpoint(everything).inspect_err(failed));
        let done = match replaced {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) if journal.is_broken() => Err(error),
            // Without room for a new map the old one grows, which has room.
            Some(Err(error)) => {
                tracing::warn!(%error, "the map of a persistent cache could not be replaced by a shorter one, and grows");
                append(&mut journal, &epoch.changes, reserve).inspect_err(failed)
            }
            None => append(&mut journal, &epoch.changes, reserve).inspect_err(failed),
        };
        // Where that fails, no new segments are begun.
        let _ = persist.room.claim(persist.pending_changes());
        done.map_err(|e| journal.error(e))?;
        persist.generation_limit.store(journal.generation_limit(), Ordering::Release);
        Ok(())
    }

    fn unpin(&self, jobs: &[Job]) {
        for job in jobs {
            let Some(segment) = self.segments.get(job.id) else { continue };
            let released = self.log.lock().unpin(segment, job.id);
            self.take_back(released);
        }
    }

    /// Notes in the open epoch where blocks are now.
    pub(crate) fn note(&self, first: BlockNumber, blocks: u32, to: Location) {
        let Some(persist) = &self.persist else { return };
        let change = match to.place() {
            None => Change::Range { first: first.0, count: blocks, zero: to == Location::ZERO },
            Some((id, slot)) => {
                let Some(segment) = self.segments.get(id) else { return };
                let Some(position) = segment.position() else { return };
                Change::Slot { block: first.0, position, slot: slot.0, generation: segment.generation() }
            }
        };
        persist.note(change);
    }

    /// Whether a flush has nothing to do.
    pub fn is_durable(&self) -> bool {
        self.persist.as_ref().is_none_or(|persist| persist.is_durable())
    }

    /// Makes what was written before durable. `done` is called on the cache's own thread, or at once for a
    /// cache that is not persistent.
    pub fn flush(&self, done: FlushDone) {
        match &self.persist {
            Some(persist) => persist.flush(done),
            None => done(Ok(())),
        }
    }

    /// Whether no flush succeeds any more until a persistent cache is opened again, because its disk failed at one.
    pub fn is_broken(&self) -> bool {
        self.persist.as_ref().is_some_and(|persist| persist.is_broken())
    }

    /// Whether the disk of a persistent cache failed or had no room at the last try.
    pub fn is_failing(&self) -> bool {
        self.persist.as_ref().is_some_and(|persist| persist.has_failed() || persist.is_broken())
    }

    /// Whether what is flushed survives.
    pub fn is_persistent(&self) -> bool {
        self.persist.is_some()
    }

    /// Whether a persistent cache was made when it was opened.
    pub fn is_new(&self) -> bool {
        self.persist.as_ref().is_some_and(|persist| persist.is_new())
    }

    /// What tells a persistent cache from every other one, whatever they are called.
    pub fn persistent_id(&self) -> Option<[u8; ID_BYTES]> {
        self.persist.as_ref().map(|persist| persist.id())
    }
}

fn append(journal: &mut Journal, changes: &[Change], reserve: bool) -> io::Result<()> {
    let mut records = Encoder::new(journal.sequence());
    encode(changes, &mut records);
    journal.append(records, reserve)
}

/// Changes in order, those in slots side by side as one record.
fn encode(changes: &[Change], encoder: &mut Encoder) {
    let mut blocks: Vec<u32> = Vec::new();
    let mut ranges: Vec<(u32, u32)> = Vec::new();
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
                encoder.extent(position, generation, slot, &blocks);
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
        let mut encoder = Encoder::new(1);
        encode(&changes, &mut encoder);
        let (bytes, _) = encoder.finish();
        let mut seen = Vec::new();
        let mut at = 0;
        while let Some((_, record, next)) = decode(&bytes, at) {
            seen.push(match record {
                Record::Extent { first_slot, blocks, .. } => (u32::from(first_slot), blocks.len()),
                Record::Zero(ranges) => (100, ranges.len()),
                Record::Absent(ranges) => (200, ranges.len()),
                Record::Commit { .. } => (300, 0),
            });
            at = next;
        }
        assert_eq!(seen, vec![(0, 2), (3, 1), (100, 4), (200, 2)]);
    }
}
