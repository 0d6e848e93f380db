//! The thread of a persistent cache: it writes segments and commits epochs.

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use headwater_block::{IoError, IoErrorKind};

use super::directory::ID_BYTES;
use super::epoch::Epoch;
use super::format::{Encoder, Part};
use super::{Change, FlushDone, Persist};
use crate::cache::WriteCache;
use crate::counters::count;
use crate::memory::{AlignedBuffer, with_frozen};
use crate::overflow::Overflow;
use crate::overflow::encrypt::{ENCRYPTED_SEGMENT_BYTES, ENCRYPTED_SLOT_BYTES};
use crate::panic_guard::{UnlessAnswered, without_panic};
use crate::partial::{Sectors, slots};
use crate::sync::{mpsc, thread};
use crate::units::{BlockNumber, Location, SLOT_COUNT, SegmentId, Slot};

/// Number of segments that are written to disk at the same time.
const DEPTH: usize = 2;
/// RAM of their buffers.
pub const BUFFERS_BYTES: u64 = (DEPTH * ENCRYPTED_SEGMENT_BYTES) as u64;

/// A write of a segment's slots: from the first that is not on disk up to `end`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub(super) id: SegmentId,
    pub(super) end: u16,
}

/// The result of a job; with its buffer, unless the write was dropped without an answer.
type Landed = (Job, io::Result<()>, Option<AlignedBuffer>);

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
                let mut requests = self.requests.lock();
                while !(requests.stop || requests.commit || requests.spill || !requests.waiters.is_empty()) {
                    self.wake.wait(&mut requests);
                }
                if requests.stop && requests.waiters.is_empty() {
                    return;
                }
                let commit = std::mem::take(&mut requests.commit) || !requests.waiters.is_empty();
                let spill = std::mem::take(&mut requests.spill);
                requests.spilling = spill;
                (commit, spill)
            };
            let Some(cache) = cache.upgrade() else { return self.refuse_flushes(&closed) };
            let Some(overflow) = cache.overflow.clone() else { return self.refuse_flushes(&closed) };
            let round = || {
                if commit {
                    cache.commit(self, &overflow);
                }
                if spill {
                    cache.save_cold(self, &overflow);
                }
            };
            if !without_panic("the thread of a persistent cache", round) {
                self.give_up();
                // Do not retry at once.
                overflow.failed();
            }
            if spill {
                self.requests.lock().spilling = false;
            }
            cache.host.signal();
        }
    }

    /// Called when the state of the present commit is unknown: nothing can be made durable until the cache is
    /// opened again.
    fn give_up(&self) {
        self.journal.lock().set_broken();
        self.broken.store(true, Ordering::Release);
        self.failed.store(true, Ordering::Release);
        let mut pending = self.pending.lock();
        pending.end_commit();
        pending.end();
    }

    fn refuse_flushes(&self, error: &IoError) {
        let waiters = std::mem::take(&mut self.requests.lock().waiters);
        waiters.into_iter().for_each(|done| done(Err(error.clone())));
    }

    /// Refuses writes, flushes, ends the thread and lets others open the cache. Returns the result of the
    /// flush.
    pub fn close(&self) -> Result<(), IoError> {
        {
            // Between two writes: admitted writes end before the last commit, and no later write is answered
            // as done.
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
            Err(IoError::new(IoErrorKind::Device, "a bug lost the last flush of a persistent cache, so its last writes may be lost: please report this"))
        });
        self.stop();
        if thread.join().is_err() {
            tracing::error!("a bug ended the thread that commits a persistent cache: please report this");
        }
        // After the last commit, which may need the space that is claimed for it.
        *self.shut.lock() = true;
        self.pending.lock().end();
        self.lock.release();
        flushed
    }
}

impl WriteCache {
    /// Writes cold segments until there is enough space, or until a flush waits.
    fn save_cold(&self, persist: &Persist, overflow: &Overflow) {
        let (tried, failed) = (Cell::new(false), Cell::new(false));
        let mut next = || {
            if failed.get() || persist.flush_waits() || !self.wants_spill() {
                return None;
            }
            let id = self.log.lock().freeze_victim(&self.segments, false)?;
            let segment = self.segments.get(id)?;
            // Threads that saw the segment as writable have finished when each of its leaves was locked once
            // more.
            self.map.sweep(segment.live_slots().map(|(_, block)| block));
            tried.set(true);
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
            self.report_write(saved);
            // Throttled writes may continue earlier now.
            self.host.signal();
        };
        // Each failure is logged.
        let _ = self.save(persist, overflow, &mut next, &mut over);
        // This does not show whether commits work, because they write elsewhere, too.
        if tried.get() {
            set_failed(&persist.spill_failed, overflow, failed.get());
        }
    }

    /// Encrypts and writes the jobs that `next` returns, a few at a time, and reports for each whether it
    /// succeeded. Returns the first error.
    pub(super) fn save(
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
                persist.buffers_made_bytes.fetch_sub(ENCRYPTED_SEGMENT_BYTES as u64, Ordering::Relaxed);
                self.host.give_ram(ENCRYPTED_SEGMENT_BYTES as u64);
            }
            buffer
        };
        loop {
            if buffers.is_empty() && flying < DEPTH {
                let made = AlignedBuffer::new(ENCRYPTED_SEGMENT_BYTES);
                let bytes = made.as_ref().map_or(0, |buffer| buffer.len() as u64);
                persist.buffers_made_bytes.fetch_add(bytes, Ordering::Relaxed);
                self.host.add_ram(bytes);
                buffers.extend(made);
            }
            let buffer = match buffers.pop() {
                Some(buffer) => buffer,
                None => {
                    // A buffer comes back, or there is no memory at all.
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
        // The receiver waits for all jobs that were sent.
        let given_up = tx.clone();
        let otherwise = UnlessAnswered::new(move || {
            let _ = given_up.send((job, Err(io::Error::other("the write ended without an answer")), None));
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
            // A commit wrote the segment's last slots just before it was closed.
            return done(job, Ok(()), buffer);
        }
        let generation = segment.generation();
        let align = overflow.align();
        let from = usize::from(segment.saved()) * ENCRYPTED_SLOT_BYTES;
        let start = from - from % align;
        let end = (usize::from(job.end) * ENCRYPTED_SLOT_BYTES)
            .next_multiple_of(align)
            .min(ENCRYPTED_SEGMENT_BYTES);
        // The sector in which the last increment ended is written again, with the same bytes.
        let first = segment.saved().saturating_sub(1);
        let mut encrypted = [0u8; ENCRYPTED_SLOT_BYTES];
        for slot in first..job.end {
            let at = usize::from(slot) * ENCRYPTED_SLOT_BYTES;
            let sealed_well = with_frozen(address, Slot(slot), |plain| {
                overflow.encrypt(generation, Slot(slot), plain, &mut encrypted)
            });
            if !sealed_well {
                return done(job, Err(io::Error::other("a block could not be encrypted")), buffer);
            }
            let skip = start.saturating_sub(at);
            let into = (at + skip).saturating_sub(start);
            if let (Some(from), Some(into)) = (
                encrypted.get(skip..),
                buffer.get_mut(into..into + ENCRYPTED_SLOT_BYTES.saturating_sub(skip)),
            ) {
                into.copy_from_slice(from);
            }
        }
        // Nothing of the buffer's earlier contents is written.
        let used = usize::from(job.end) * ENCRYPTED_SLOT_BYTES - start;
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
                count(&self.counters.spilled_bytes, slots * ENCRYPTED_SLOT_BYTES as u64);
            }
            Err(error) => {
                count(&self.counters.disk_errors, 1);
                self.warn(&format_args!(
                    "a segment could not be written to the persistent cache: {error}; its changes stay in RAM, and are not durable yet"
                ));
            }
        }
        result
    }

    /// Commits all changes up to now.
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
        // Changes that cannot be committed any more are not retried.
        set_failed(&persist.failed, overflow, result.is_err() && !broken);
        let Epoch { mut changes, mut freed, waiters, .. } = epoch;
        match &result {
            Ok(()) => {
                // In this order: a thread that finds the space knows that nothing needs it any more.
                persist.pending.lock().end_commit();
                freed.into_iter().for_each(|position| overflow.give_position(position));
                self.cleaner.unstick();
                count(&persist.commits, 1);
            }
            Err(error) => {
                if !broken && !had_failed {
                    self.warn(&format_args!(
                        "a flush failed: {error}; its changes are written with the next flush"
                    ));
                }
                if broken && !persist.broken.swap(true, Ordering::AcqRel) {
                    tracing::error!(volume = self.name, %error, "a persistent cache cannot be made durable any more: writes since its last flush may be lost, and all flushes fail until it is opened again; check the disk that has this cache");
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

    /// Logs in the open epoch where blocks are now.
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

    /// Logs in the open epoch where the sectors of a block are now that were elsewhere before. None of them
    /// became absent: only whole blocks become absent.
    pub(crate) fn note_sectors(&self, block: BlockNumber, before: &Sectors, now: &Sectors) {
        let Some(persist) = &self.persist else { return };
        let changed = (0..).zip(before.iter().zip(now)).filter(|(_, (before, now))| before != now);
        let changed = changed.fold(0u8, |bits, (sector, _)| bits | 1 << sector);
        self.parts_of(block, now, changed).for_each(|part| persist.note(part.into()));
    }

    /// The given sectors of a block: one part for each of their places, without absent sectors.
    pub(super) fn parts_of<'a>(
        &'a self,
        block: BlockNumber,
        sectors: &'a Sectors,
        which: u8,
    ) -> impl Iterator<Item = Part> + 'a {
        slots(sectors).chain([Location::ZERO]).filter_map(move |place| {
            let here = (0..).zip(sectors).filter(|(_, sector)| **sector == place);
            let bits = here.fold(0u8, |bits, (sector, _)| bits | 1 << sector) & which;
            let slot = match place.place() {
                None => None,
                Some((id, slot)) => {
                    let segment = self.segments.get(id)?;
                    Some((segment.position()?, segment.generation(), slot.0))
                }
            };
            (bits != 0).then_some(Part { block: block.0, sectors: bits, slot })
        })
    }

    /// Whether a flush has nothing to do.
    pub fn is_durable(&self) -> bool {
        self.persist.as_ref().is_none_or(|persist| persist.is_durable())
    }

    /// Makes all earlier writes durable. `done` is called on the cache's own thread, or at once if the cache
    /// is not persistent.
    pub fn flush(&self, done: FlushDone) {
        match &self.persist {
            Some(persist) => persist.flush(done),
            None => done(Ok(())),
        }
    }

    /// Whether all flushes fail until a persistent cache is opened again, because its disk failed at a flush.
    pub fn is_broken(&self) -> bool {
        self.persist.as_ref().is_some_and(|persist| persist.is_broken())
    }

    /// Whether the last write to the disk of a persistent cache failed or found no space.
    pub fn is_failing(&self) -> bool {
        self.persist.as_ref().is_some_and(|persist| persist.disk_fails() || persist.is_broken())
    }

    /// Whether the cache is persistent.
    pub fn is_persistent(&self) -> bool {
        self.persist.is_some()
    }

    /// Whether a persistent cache was made by this open.
    pub fn is_new(&self) -> bool {
        self.persist.as_ref().is_some_and(|persist| persist.is_new())
    }

    /// A number that identifies a persistent cache, whatever its name is.
    pub fn persistent_id(&self) -> Option<[u8; ID_BYTES]> {
        self.persist.as_ref().map(|persist| persist.id())
    }
}

fn set_failed(which: &AtomicBool, overflow: &Overflow, failed: bool) {
    which.store(failed, Ordering::Release);
    if failed {
        // Do not retry at once.
        overflow.failed();
    }
}
