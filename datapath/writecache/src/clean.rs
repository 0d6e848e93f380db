//! Cleaning (compaction of segments on disk): when positions on the overflow disk run short, it moves the
//! live blocks of a segment to a new segment of the cleaned stream, which frees the segment's position. It
//! takes the segment for which that is worth most.
//!
//! Cleaning always makes progress: it may fill one segment of RAM whatever the limits are,
//! [`crate::spill::RESERVED_POSITIONS`] positions are reserved for it, and a segment is cleaned only if it
//! has at least [`MIN_GAIN`] dead slots.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use headwater_block::BLOCK_BYTES;

use crate::cache::{Ticket, WriteCache};
use crate::counters::count;
use crate::log::Stream;
use crate::map::split;
use crate::memory::{AlignedBuffer, copy_in};
use crate::overflow::encrypt::ENCRYPTED_SLOT_BYTES;
use crate::overflow::{LOW_POSITIONS, Overflow};
use crate::panic_guard::UnlessAnswered;
use crate::segment::State;
use crate::spill::Begun;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, UNDER_MODEL_CHECKER};
use crate::units::{BlockNumber, Location, SLOT_COUNT, SLOTS, SegmentId, Slot};

/// The least number of dead slots that makes cleaning a segment worth its reading and writing.
pub const MIN_GAIN: u32 = if UNDER_MODEL_CHECKER { 1 } else { 16 };

/// If the blocks of a segment could not be moved after it was read, cleaning tries again after this time at
/// the latest.
const STUCK_RETRY: Duration = Duration::from_millis(100);

/// A segment that the disk failed to read is skipped for this time, doubled with each failure, while there
/// are other segments.
const SKIP_UNREAD: Duration = if UNDER_MODEL_CHECKER { Duration::ZERO } else { Duration::from_millis(100) };

/// The longest such time: this, or [`SKIP_READ_TIMES`] times the duration of the failed read if that is more.
const SKIP_UNREAD_MAX: Duration = Duration::from_secs(30);
const SKIP_READ_TIMES: u32 = 32;

/// The most segments with failed reads that are logged one by one.
const UNREAD_LOGS_MAX: usize = 8;

/// How many of the best segments a scan of all segments remembers: a segment that is worth a little less is
/// as good, and scanning the records of a large cache takes long.
const RANKED: usize = 16;

/// But at most one in this many candidates: if there are few segments, the worth of each changes much with
/// each that is cleaned.
const CANDIDATES_PER_RANKED: usize = 64;

/// The largest age that counts, 2 TiB of writes. Generations jump when a persistent cache is opened, and
/// older segments with few dead slots would otherwise be cleaned before all that were written since.
const AGE_MAX: u64 = 1 << 20;

/// The worth of cleaning a segment: the slots that it frees for each block that it copies, times the
/// segment's age in segments written since.
///
/// In an old segment few blocks die any more, so what is freed stays free; a young segment becomes emptier by
/// itself. If all blocks die equally soon, age tells nothing and does no harm. (Rosenblum and Ousterhout,
/// 1992: cost-benefit.)
fn worth(live: u32, age: u64) -> u64 {
    let dead = u64::from(u32::from(SLOT_COUNT).saturating_sub(live));
    (dead * u64::from(SLOT_COUNT)).saturating_mul(age.min(AGE_MAX) + 1) / u64::from(live.max(1))
}

/// The last failed read of a segment, and how long the segment is skipped.
#[derive(Clone, Copy, Debug)]
struct Unread {
    since: Instant,
    pause: Duration,
}

impl Unread {
    fn is_over(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= self.pause
    }

    /// Whether the segment is tried again earlier because there is no other one.
    fn is_over_for_want_of_others(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= self.pause.min(STUCK_RETRY)
    }
}

struct Job {
    id: SegmentId,
    position: u32,
    generation: u64,
    buffer: AlignedBuffer,
    next: u16,
    began: Instant,
    otherwise: UnlessAnswered,
}

/// The state of cleaning of one cache: at most one segment at a time.
#[derive(Default)]
pub struct Cleaner {
    busy: AtomicBool,
    read: Mutex<Option<Job>>,
    /// Segments with damaged blocks, by generation: not cleaned.
    damaged: Mutex<HashSet<u64>>,
    /// Segments that the disk failed to read, which may be temporary. Without this list, a few segments that
    /// stay unreadable would age into those most worth it and keep cleaning from all others.
    unread: Mutex<HashMap<u64, Unread>>,
    /// The best segments of the last scan, with their generations; the best one is last.
    ranked: Mutex<Vec<(SegmentId, u64)>>,
    /// Dead slots of segments on disk, as of the last scan.
    dead_slots: AtomicU64,
    /// Number of scans.
    #[cfg(test)]
    scans: std::sync::atomic::AtomicU32,
    /// When the blocks of the last segment could not be moved after it was read: there was no space for them,
    /// or they were just being freed. Reset when space was freed or anything was written.
    stuck_since: Mutex<Option<Instant>>,
}

impl Cleaner {
    /// The staging buffer of a segment that was read and not moved yet.
    pub(crate) fn take_buffer(&self) -> Option<AlignedBuffer> {
        let job = self.read.lock().take()?;
        job.otherwise.answered();
        Some(job.buffer)
    }

    /// Whether the blocks of the last segment could not be moved a moment ago and nothing has changed since.
    fn is_stuck(&self) -> bool {
        let mut since = self.stuck_since.lock();
        if UNDER_MODEL_CHECKER {
            // Time stands still under the model checker: rest once, so that others continue.
            return since.take().is_some();
        }
        since.is_some_and(|since| since.elapsed() < STUCK_RETRY)
    }

    /// Tries again: there may be space now.
    pub(crate) fn unstick(&self) {
        *self.stuck_since.lock() = None;
    }

    /// Approximate number of dead slots of segments on disk: the slots that cleaning could free.
    pub(crate) fn dead_slots(&self) -> u64 {
        self.dead_slots.load(Ordering::Relaxed)
    }

    /// Whether a segment is being cleaned.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Acquire)
    }
}

impl WriteCache {
    fn wants_clean(&self, overflow: &Overflow) -> bool {
        overflow.runs_low()
            || self.disk_failed_or_full.load(Ordering::Relaxed)
            || overflow.lacks_space(LOW_POSITIONS)
    }

    /// Whether moved blocks would find a slot: a persistent cache begins a segment only if it can reserve a
    /// position on disk.
    fn has_place_for_cleaned(&self, overflow: &Overflow) -> bool {
        let Some(persist) = &self.persist else { return true };
        self.log.lock().filling(Stream::Cleaned).is_some() || persist.could_reserve(overflow)
    }

    /// Starts to clean a segment, if that is due and none is being cleaned.
    pub(crate) fn clean(self: &Arc<Self>, overflow: &Arc<Overflow>) -> Begun {
        if !self.wants_clean(overflow) || self.log.lock().has_dirty_cleaned(&self.segments) {
            return Begun::All;
        }
        if overflow.is_resting() || self.cleaner.is_stuck() || !self.has_place_for_cleaned(overflow) {
            return Begun::DiskRests;
        }
        if self.cleaner.busy.swap(true, Ordering::AcqRel) {
            return Begun::All;
        }
        let otherwise = self.not_busy_otherwise();
        let begun = self.begin_clean(overflow);
        otherwise.answered();
        if begun == Some(Begun::All) {
            return Begun::All;
        }
        self.cleaner.busy.store(false, Ordering::Release);
        // If only skipped segments are left, cleaning continues after some time.
        let nothing = || if self.cleaner.unread.lock().is_empty() { Begun::All } else { Begun::DiskRests };
        begun.unwrap_or_else(nothing)
    }

    fn not_busy_otherwise(self: &Arc<Self>) -> UnlessAnswered {
        // The job belongs to the cache, so it must not keep the cache alive.
        let this = Arc::downgrade(self);
        UnlessAnswered::new(move || {
            if let Some(this) = this.upgrade() {
                this.cleaner.busy.store(false, Ordering::Release);
                this.host.signal();
            }
        })
    }

    /// `None`: there is nothing to clean now.
    fn begin_clean(self: &Arc<Self>, overflow: &Arc<Overflow>) -> Option<Begun> {
        let id = self.victim()?;
        let segment = self.segments.get(id)?;
        let Some(buffer) = self.host.take_staging() else { return Some(Begun::LacksBuffer) };
        self.cleaner.ranked.lock().retain(|(ranked, _)| *ranked != id);
        let host = Arc::clone(&self.host);
        let otherwise = self.not_busy_otherwise().after(move || host.lost_staging());
        let evicted = self.log.lock().evict(segment, id);
        if let Some((id, memory)) = evicted {
            self.forget_ram(id, memory);
        }
        let (state, position, generation) =
            (segment.word().state(), segment.position(), segment.generation());
        let (State::Spilled, Some(position)) = (state, position) else {
            otherwise.answered();
            self.host.give_staging(buffer);
            return None;
        };
        let (this, began) = (Arc::clone(self), Instant::now());
        overflow.read_segment(position, buffer, move |result, buffer| {
            this.read_for_cleaning(
                Job { id, position, generation, buffer, next: 0, began, otherwise },
                result,
            );
        });
        Some(Begun::All)
    }

    /// The segment that is worth most: from the list of the last scan, as long as one of that list is still
    /// suitable.
    fn victim(&self) -> Option<SegmentId> {
        let now = Instant::now();
        let mut ranked = self.cleaner.ranked.lock();
        while let Some((id, generation)) = ranked.last() {
            let is_left_alone =
                || self.cleaner.unread.lock().get(generation).is_some_and(|u| !u.is_over(now));
            let found = self.candidate(*id, &self.cleaner.damaged.lock());
            if found.is_some_and(|(_, _, found)| found == *generation) && !is_left_alone() {
                return Some(*id);
            }
            ranked.pop();
        }
        let (best, longest_ago) = self.scan_for_victims(now);
        *ranked = best;
        ranked.last().map(|(id, _)| *id).or(longest_ago)
    }

    /// Checks a segment: returns it with its number of live blocks and its generation, if it can be cleaned
    /// and is worth it.
    fn candidate(&self, id: SegmentId, damaged: &HashSet<u64>) -> Option<(SegmentId, u32, u64)> {
        let segment = self.segments.get(id)?;
        let (state, live, generation) = (segment.word().state(), segment.live(), segment.generation());
        let is_there = matches!(state, State::Spilled | State::Clean) && !damaged.contains(&generation);
        // If nothing lives in it, the thread that freed the last block is about to release the segment.
        let is_worth = live > 0 && live + MIN_GAIN <= u32::from(SLOT_COUNT);
        (is_there && is_worth).then_some((id, live, generation))
    }

    /// Scans all segments. Returns those worth most, and a skipped segment to take if there are no others.
    fn scan_for_victims(&self, now: Instant) -> (Vec<(SegmentId, u64)>, Option<SegmentId>) {
        #[cfg(test)]
        self.cleaner.scans.fetch_add(1, Ordering::Relaxed);
        let numbers = self.log.lock().numbers_used();
        let mut unread = self.cleaner.unread.lock();
        let mut damaged = self.cleaner.damaged.lock();
        if damaged.len() > numbers as usize {
            // Most of these segments were freed or rewritten meanwhile.
            let generation = |number| Some(self.segments.get(SegmentId(number))?.generation());
            let there: HashSet<u64> = (0..numbers).filter_map(generation).collect();
            damaged.retain(|generation| there.contains(generation));
        }
        let candidates: Vec<(SegmentId, u32, u64)> =
            (0..numbers).filter_map(|number| self.candidate(SegmentId(number), &damaged)).collect();
        if !unread.is_empty() {
            let there: HashSet<u64> = candidates.iter().map(|(_, _, generation)| *generation).collect();
            unread.retain(|generation, _| there.contains(generation));
        }
        let dead =
            |(_, live, _): &(SegmentId, u32, u64)| u64::from(u32::from(SLOT_COUNT).saturating_sub(*live));
        self.cleaner.dead_slots.store(candidates.iter().map(dead).sum(), Ordering::Relaxed);
        let newest = candidates.iter().map(|(_, _, generation)| *generation).max().unwrap_or_default();
        let is_left_alone = |generation: &u64| unread.get(generation).is_some_and(|u| !u.is_over(now));
        let mut best: Vec<(u64, SegmentId, u64)> = candidates
            .iter()
            .filter(|(_, _, generation)| !is_left_alone(generation))
            .map(|(id, live, generation)| (worth(*live, newest - generation), *id, *generation))
            .collect();
        let count = RANKED.min(best.len() / CANDIDATES_PER_RANKED).max(1);
        if count < best.len() {
            best.select_nth_unstable_by(count, |one, other| other.cmp(one));
            best.truncate(count);
        }
        best.sort_unstable();
        let longest_ago = || {
            let tried =
                candidates.iter().filter_map(|(id, _, generation)| Some((id, unread.get(generation)?)));
            let (id, last) = tried.min_by_key(|(_, unread)| unread.since)?;
            last.is_over_for_want_of_others(now).then_some(*id)
        };
        let longest_ago = if best.is_empty() { longest_ago() } else { None };
        (best.into_iter().map(|(_, id, generation)| (id, generation)).collect(), longest_ago)
    }

    fn read_for_cleaning(&self, job: Job, result: io::Result<()>) {
        match result {
            Ok(()) => {
                self.cleaner.unread.lock().remove(&job.generation);
                *self.cleaner.read.lock() = Some(job);
            }
            Err(error) => {
                count(&self.counters.disk_errors, 1);
                self.unread(&job, &error);
                job.otherwise.answered();
                self.host.give_staging(job.buffer);
                self.cleaner.busy.store(false, Ordering::Release);
            }
        }
        self.host.signal();
    }

    /// Skips a segment that the disk failed to read, and does not start another read at once.
    fn unread(&self, job: &Job, error: &io::Error) {
        let now = Instant::now();
        let mut unread = self.cleaner.unread.lock();
        let before = unread.get(&job.generation).map(|unread| unread.pause);
        let pause = before.map_or(SKIP_UNREAD, |pause| (pause * 2).min(SKIP_UNREAD_MAX));
        let took = if UNDER_MODEL_CHECKER { Duration::ZERO } else { job.began.elapsed() };
        let pause = pause.max(took * SKIP_READ_TIMES);
        unread.insert(job.generation, Unread { since: now, pause });
        if before.is_none() && unread.len() <= UNREAD_LOGS_MAX {
            self.warn(&format_args!(
                "position {} of the overflow disk could not be read for cleaning: {error}; its segment stays where it is, \
                 other segments are cleaned, and the read is tried again; {}",
                job.position,
                self.advice()
            ));
        }
        *self.cleaner.stuck_since.lock() = Some(now);
    }

    /// Moves the live blocks of the segment that was read, as far as there is space.
    pub(crate) fn move_cleaned(&self, overflow: &Overflow) {
        let Some(mut job) = self.cleaner.read.lock().take() else { return };
        let (mut whole, before) = (true, self.counters.cleaned_blocks.load(Ordering::Relaxed));
        while whole && usize::from(job.next) < SLOTS {
            // A clean copy is evicted for moved blocks as for written ones: otherwise the rest would have to
            // be read again.
            whole = self.move_slot(overflow, &mut job)
                || (self.make_room() && self.move_slot(overflow, &mut job));
            job.next += 1;
        }
        let is_in_vain = self.counters.cleaned_blocks.load(Ordering::Relaxed) == before
            && self.segments.get(job.id).is_some_and(|segment| segment.generation() == job.generation);
        // Without space the rest stays in place: a job that waits for space would keep a staging buffer that
        // spilling needs to make space.
        if whole {
            count(&self.counters.cleaned_segments, 1);
        }
        if !whole || is_in_vain {
            *self.cleaner.stuck_since.lock() = Some(Instant::now());
        }
        job.otherwise.answered();
        self.host.give_staging(job.buffer);
        self.cleaner.busy.store(false, Ordering::Release);
    }

    /// Moves one slot, if it is live. `false`: no space now.
    fn move_slot(&self, overflow: &Overflow, job: &mut Job) -> bool {
        let slot = Slot(job.next);
        let Some(segment) = self.segments.get(job.id) else { return true };
        let Some(block) = segment.owner(slot) else { return true };
        let ticket = Ticket { block, id: job.id, slot, position: job.position, generation: job.generation };
        if !self.is_current(&ticket) {
            return true;
        }
        let start = usize::from(slot.0) * ENCRYPTED_SLOT_BYTES;
        let mut plain = [0u8; BLOCK_BYTES as usize];
        let opened = job
            .buffer
            .get(start..start + ENCRYPTED_SLOT_BYTES)
            .is_some_and(|encrypted| overflow.open_slot(job.generation, slot, encrypted, &mut plain));
        if !opened {
            if self.is_current(&ticket) {
                count(&self.counters.corrupt_blocks, 1);
                if self.cleaner.damaged.lock().insert(job.generation) {
                    let (place, advice) = (self.place_of(&ticket), self.advice());
                    let what = "is damaged (found by cleaning): reads of the block fail, and its segment stays where it is";
                    self.faults.error(&"disk", &format_args!("{place} {what}; {advice}"));
                }
            }
            return true;
        }
        self.move_block(block, &ticket, &plain)
    }

    fn move_block(&self, block: BlockNumber, ticket: &Ticket, plain: &[u8]) -> bool {
        let _entered = self.enter();
        let (leaf, index) = split(block);
        let Some(mut leaf) = self.map.relocate(leaf) else { return true };
        let old = Location::at(ticket.id, ticket.slot);
        if !self.holds(ticket, old) || !leaf.needs(index, old) {
            return true;
        }
        let Some(new) = self.take_slot(Stream::Cleaned, block) else { return false };
        copy_in(new.address, new.slot, 0, plain, &leaf);
        let to = Location::at(new.id, new.slot);
        // The next block may share the slot.
        for (index, block) in [(index, block), (index + 1, BlockNumber(block.0.saturating_add(1)))] {
            if index >= SLOTS {
                continue;
            }
            leaf.moved_kept(index, old, to);
            if leaf.get(index) == old {
                leaf.moved(index, old, to);
                self.note(block, 1, to);
            } else if leaf.names(index, old) {
                let before = leaf.sectors(index);
                leaf.moved(index, old, to);
                self.note_sectors(block, &before, &leaf.sectors(index));
            }
        }
        self.kill(old);
        count(&self.counters.cleaned_blocks, 1);
        true
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use headwater_testkit::wait_until;

    use super::*;
    use crate::cache::{Admission, WriteResult};
    use crate::host::STAGING_BUFFERS;
    use crate::overflow::io::open_engine;
    use crate::pressure::NoPressure;

    #[test]
    fn the_emptier_or_older_of_two_is_worth_more() {
        let slots = u32::from(SLOT_COUNT);
        assert!(worth(slots / 4, 10) > worth(slots / 2, 10));
        assert!(worth(slots / 2, 100) > worth(slots / 2, 10));
        // A segment that was half dead for long is better than one that is nearly dead since a moment ago,
        // but not if it is not as old.
        assert!(worth(slots / 2, 1000) > worth(slots / 8, 10));
        assert!(worth(slots / 2, 1000) < worth(slots / 8, 1000));
        assert_eq!(worth(slots, u64::MAX - 1), 0);
        assert!(worth(0, u64::MAX - 1) > worth(0, 0));
        // A segment from before a jump of the generations, with hardly anything to gain.
        assert!(worth(slots - 1, 1 << 49) < worth(slots / 64, 1000));
    }

    fn cache(host: &crate::Host) -> Arc<WriteCache> {
        cache_with(host, None)
    }

    fn cache_with(host: &crate::Host, overflow: Option<crate::OverflowOptions>) -> Arc<WriteCache> {
        let options = crate::CacheOptions {
            name: "test".into(),
            size_bytes: 1 << 30,
            ram_bytes: 32 << 20,
            weight: crate::DEFAULT_WEIGHT,
            overflow,
            pause_limit: Duration::ZERO,
            persistent: None,
            base: None,
        };
        WriteCache::open(&options, &host.shared()).unwrap()
    }

    /// Makes this many segments on disk with one live block each; later ones are younger.
    fn spilled(cache: &WriteCache, count: u32) {
        cache.log.lock().restore(&(0..count).collect::<Vec<u32>>());
        for number in 0..count {
            let segment = cache.segments.get(SegmentId(number)).unwrap();
            segment.claim(Slot(0), BlockNumber(number));
            segment.set_generation(u64::from(number) + 1);
            segment.set_word(crate::segment::Word::new(State::Spilled, 0));
        }
    }

    /// Takes one segment, as at the start of its cleaning.
    fn take_victim(cache: &WriteCache) -> Option<u32> {
        let id = cache.victim()?;
        cache.cleaner.ranked.lock().retain(|(ranked, _)| *ranked != id);
        Some(id.0)
    }

    #[test]
    fn so_many_victims_cost_one_look_at_all_segments() {
        let host = crate::Host::start(u64::MAX).unwrap();
        let cache = cache(&host);
        let count = (RANKED * CANDIDATES_PER_RANKED) as u32;
        spilled(&cache, count);
        let scans = || cache.cleaner.scans.load(Ordering::Relaxed);
        // As long as there is no staging buffer, it is the same segment.
        assert!(cache.victim() == Some(SegmentId(0)) && cache.victim() == Some(SegmentId(0)));
        for oldest in 0..RANKED as u32 {
            assert_eq!(take_victim(&cache), Some(oldest));
            assert_eq!(scans(), 1);
            cache
                .segments
                .get(SegmentId(oldest))
                .unwrap()
                .set_word(crate::segment::Word::new(State::Free, 0));
        }
        // Now there are fewer segments.
        assert_eq!((take_victim(&cache), scans()), (Some(16), 2));
        // Segments that were rewritten, freed or skipped are passed over.
        let segment = |number| cache.segments.get(SegmentId(number)).unwrap();
        segment(17).set_generation(5000);
        segment(18).kill(Slot(0));
        let unread = Unread { since: Instant::now(), pause: Duration::from_secs(3600) };
        cache.cleaner.unread.lock().insert(segment(19).generation(), unread);
        cache.cleaner.damaged.lock().insert(segment(20).generation());
        assert_eq!((take_victim(&cache), scans()), (Some(21), 2));
    }

    #[test]
    fn of_few_segments_each_victim_is_the_best() {
        let host = crate::Host::start(u64::MAX).unwrap();
        let cache = cache(&host);
        spilled(&cache, CANDIDATES_PER_RANKED as u32);
        for oldest in 0..4 {
            assert_eq!(take_victim(&cache), Some(oldest));
            cache
                .segments
                .get(SegmentId(oldest))
                .unwrap()
                .set_word(crate::segment::Word::new(State::Free, 0));
            assert_eq!(cache.cleaner.scans.load(Ordering::Relaxed), oldest + 1);
        }
    }

    #[test]
    fn a_job_that_is_taken_over_undoes_nothing_and_one_that_is_lost_all_of_it() {
        let dir = tempfile::tempdir().unwrap();
        // The host's thread is not started, so it moves nothing.
        let (host, _run) = crate::Host::prepare(u64::MAX, open_engine().unwrap(), NoPressure);
        let place = crate::OverflowOptions {
            at: dir.path().to_owned(),
            limit_bytes: 64 << 20,
            buffering: crate::Buffering::Buffered,
            little_space: crate::LittleSpace::Refused,
        };
        let cache = cache_with(&host, Some(place));
        let overflow = Arc::clone(cache.overflow.as_ref().unwrap());
        spilled(&cache, 1);
        let position = overflow.take_position().unwrap();
        cache.segments.get(SegmentId(0)).unwrap().set_position(Some(position));
        let read = || {
            cache.cleaner.busy.store(true, Ordering::Release);
            assert_eq!(cache.begin_clean(&overflow), Some(Begun::All));
            wait_until("the segment is read", || cache.cleaner.read.lock().is_some());
        };
        read();
        let buffer = cache.cleaner.take_buffer().unwrap();
        assert!(cache.cleaner.is_busy(), "another one could begin before this one has ended");
        cache.host.give_staging(buffer);
        read();
        let job = cache.cleaner.read.lock().take();
        drop(job);
        assert!(!cache.cleaner.is_busy());
        let buffers = (0..STAGING_BUFFERS).filter_map(|_| cache.host.take_staging());
        assert_eq!(
            buffers.count(),
            STAGING_BUFFERS,
            "another buffer takes the place of the one that was lost"
        );
    }

    #[test]
    fn what_is_known_of_damage_is_forgotten_with_its_segments() {
        let host = crate::Host::start(u64::MAX).unwrap();
        let cache = cache(&host);
        assert_eq!(
            cache.write(BlockNumber(0), &[1; BLOCK_BYTES as usize], Admission::New),
            WriteResult::Done
        );
        let written = cache.segments.get(SegmentId(0)).unwrap();
        written.set_generation(77);
        // As if the disk had flipped bits for long.
        cache.cleaner.damaged.lock().extend(0..1000);
        assert!(cache.victim().is_none());
        assert!(cache.cleaner.damaged.lock().iter().eq([&77]));
    }
}
