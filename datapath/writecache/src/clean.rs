//! Cleaning: when positions on the overflow disk run short, the live blocks of the segment where that is worth most are
//! moved to a segment of the cleaned stream, and its position is free again.
//!
//! Cleaning always gets on: it may always fill one segment of RAM, whatever the limits say by now,
//! [`crate::spill::RESERVED_POSITIONS`] positions are kept for it, and a victim has at least [`MIN_GAIN`]
//! dead slots.

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

/// Dead slots that make cleaning a segment worth its reading and writing.
pub const MIN_GAIN: u32 = if UNDER_MODEL_CHECKER { 1 } else { 16 };

/// A segment that was read in vain is tried again after this at the latest.
const STUCK: Duration = Duration::from_millis(100);

/// One that the disk does not read is left alone for this long, and longer each time, while there are others.
const UNREAD: Duration = if UNDER_MODEL_CHECKER { Duration::ZERO } else { Duration::from_millis(100) };

/// But not longer than this, or than so many times what the read took: a disk that tries for long before it says no would
/// do nothing else.
const UNREAD_MOST: Duration = Duration::from_secs(30);
const UNREAD_TIMES: u32 = 32;

/// So many segments that the disk does not read at one time are logged each.
const UNREAD_LOGGED: usize = 8;

/// So many segments are remembered of a look at all of them: one is as good as another that is worth a little less, and the records of a
/// large cache take long to go through.
const RANKED: usize = 16;

/// But one of so many at most: what few segments are worth changes much with each that is cleaned.
const OF_CANDIDATES: usize = 64;

/// An age beyond this, 2 TiB of writes, is no more: generations jump where a persistent cache is opened, and segments
/// of earlier times with little dead in them would be cleaned before anything that was written since.
const OLDEST: u64 = 1 << 20;

/// What cleaning a segment is worth: the slots that it frees for each one that it copies, times its age in segments written since.
///
/// In an old segment little dies any more, so what it frees stays free; a young one is soon emptier by itself. Where all blocks die
/// equally soon, age tells nothing and does no harm. (Rosenblum and Ousterhout, 1992: cost-benefit.)
fn worth(live: u32, age: u64) -> u64 {
    let dead = u64::from(u32::from(SLOT_COUNT).saturating_sub(live));
    (dead * u64::from(SLOT_COUNT)).saturating_mul(age.min(OLDEST) + 1) / u64::from(live.max(1))
}

/// When the disk did not read a segment last, and how long that counts.
#[derive(Clone, Copy, Debug)]
struct Unread {
    since: Instant,
    pause: Duration,
}

impl Unread {
    fn is_over(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= self.pause
    }

    /// Where there is no other segment, it is tried again sooner.
    fn is_over_for_want_of_others(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= self.pause.min(STUCK)
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
    /// Writes of segments (by generation) with blocks that are damaged: left alone.
    damaged: Mutex<HashSet<u64>>,
    /// Those that the disk did not read, which may pass. A few places that stay unreadable must not keep cleaning from
    /// all others, and they age into those most worth it.
    unread: Mutex<HashMap<u64, Unread>>,
    /// The best of the last look at all segments, with their generations, and the best one at the end.
    ranked: Mutex<Vec<(SegmentId, u64)>>,
    /// Dead slots of segments on disk, as of the last look at all of them.
    dead_slots: AtomicU64,
    /// Looks at all segments.
    #[cfg(test)]
    dedup_schedule: std::sync::atomic::AtomicU32,
    /// When the last one was read in vain: no room for what lives in it, or somebody is just taking that away. Forgotten
    /// when something was freed or written.
    stuck_since: Mutex<Option<Instant>>,
}

impl Cleaner {
    /// The staging buffer of a segment that was read and not moved yet.
    pub(crate) fn take_buffer(&self) -> Option<AlignedBuffer> {
        let job = self.read.lock().take()?;
        job.otherwise.answered();
        Some(job.buffer)
    }

    /// Whether the last one was read in vain a moment ago, and nothing has changed since: so it would be again.
    fn is_stuck(&self) -> bool {
        let mut since = self.stuck_since.lock();
        if UNDER_MODEL_CHECKER {
            // Time stands still: one rest, in which others go on.
            return since.take().is_some();
        }
        since.is_some_and(|since| since.elapsed() < STUCK)
    }

    /// There may be room again.
    pub(crate) fn unstick(&self) {
        *self.stuck_since.lock() = None;
    }

    /// Dead slots of segments on disk, about: what cleaning could bring.
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
        overflow.runs_low() || self.disk_full.load(Ordering::Relaxed) || overflow.lacks_space(LOW_POSITIONS)
    }

    /// Whether what is cleaned would find a slot: a persistent cache begins a segment only where that has a place on disk.
    fn has_place_for_cleaned(&self, overflow: &Overflow) -> bool {
        let Some(persist) = &self.persist else { return true };
        self.log.lock().filling(Stream::Cleaned).is_some() || persist.could_reserve(overflow)
    }

    /// Begins to clean a segment, where that is due and none is being cleaned.
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
        // Where only those are left that are left alone, nothing but time brings one back.
        let nothing = || if self.cleaner.unread.lock().is_empty() { Begun::All } else { Begun::DiskRests };
        begun.unwrap_or_else(nothing)
    }

    fn not_busy_otherwise(self: &Arc<Self>) -> UnlessAnswered {
        // A job is kept by the cache itself, which is not to keep the cache.
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

    /// The segment whose cleaning is worth most: of those that were at the last look at all, while one of them still serves.
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
        let (best, longest_ago) = self.look_for_victims(now);
        *ranked = best;
        ranked.last().map(|(id, _)| *id).or(longest_ago)
    }

    /// A segment that can be cleaned, and is worth it: with what lives in it, and its generation.
    fn candidate(&self, id: SegmentId, damaged: &HashSet<u64>) -> Option<(SegmentId, u32, u64)> {
        let segment = self.segments.get(id)?;
        let (state, live, generation) = (segment.word().state(), segment.live(), segment.generation());
        let is_there = matches!(state, State::Spilled | State::Clean) && !damaged.contains(&generation);
        // Where nothing lives, who took the last of it away is about to give all back.
        let is_worth = live > 0 && live + MIN_GAIN <= u32::from(SLOT_COUNT);
        (is_there && is_worth).then_some((id, live, generation))
    }

    /// Looks at all segments: those worth most, and one to take for want of others.
    fn look_for_victims(&self, now: Instant) -> (Vec<(SegmentId, u64)>, Option<SegmentId>) {
        #[cfg(test)]
        self.cleaner.dedup_schedule.fetch_add(1, Ordering::Relaxed);
        let numbers = self.log.lock().numbers_used();
        let mut unread = self.cleaner.unread.lock();
        let mut damaged = self.cleaner.damaged.lock();
        if damaged.len() > numbers as usize {
            // Most of them are gone, discarded or written anew.
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
        let count = RANKED.min(best.len() / OF_CANDIDATES).max(1);
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

    /// Leaves a segment alone that the disk did not read, and does not ask the disk again at once.
    fn unread(&self, job: &Job, error: &io::Error) {
        let now = Instant::now();
        let mut unread = self.cleaner.unread.lock();
        let before = unread.get(&job.generation).map(|unread| unread.pause);
        let pause = before.map_or(UNREAD, |pause| (pause * 2).min(UNREAD_MOST));
        let took = if UNDER_MODEL_CHECKER { Duration::ZERO } else { job.began.elapsed() };
        let pause = pause.max(took * UNREAD_TIMES);
        unread.insert(job.generation, Unread { since: now, pause });
        if before.is_none() && unread.len() <= UNREAD_LOGGED {
            self.warn(&format_args!(
                "position {} of the overflow disk could not be read for cleaning: {error}; it stays where it is and is \
                 tried again, others are cleaned meanwhile; {}",
                job.position,
                self.advice()
            ));
        }
        *self.cleaner.stuck_since.lock() = Some(now);
    }

    /// Moves the live blocks of the segment that was read, as far as there is room.
    pub(crate) fn move_cleaned(&self, overflow: &Overflow) {
        let Some(mut job) = self.cleaner.read.lock().take() else { return };
        let (mut whole, before) = (true, self.counters.cleaned_blocks.load(Ordering::Relaxed));
        while whole && usize::from(job.next) < SLOTS {
            // A clean copy goes for what is moved as for what is written: what is left would have to be read once more.
            whole = self.move_slot(overflow, &mut job)
                || (self.make_room() && self.move_slot(overflow, &mut job));
            job.next += 1;
        }
        let is_in_vain = self.counters.cleaned_blocks.load(Ordering::Relaxed) == before
            && self.segments.get(job.id).is_some_and(|segment| segment.generation() == job.generation);
        // Without room the rest stays where it is: a job that waited for room would keep a staging buffer
        // that spilling needs to make that room.
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

    /// Moves one slot, where it is live. `false`: no room now.
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
                    let what = "is not what was written, as cleaning found: its reads fail, and its segment stays where it is";
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
        // Half dead for a long time is better than nearly dead just now, and not after as long.
        assert!(worth(slots / 2, 1000) > worth(slots / 8, 10));
        assert!(worth(slots / 2, 1000) < worth(slots / 8, 1000));
        assert_eq!(worth(slots, u64::MAX - 1), 0);
        assert!(worth(0, u64::MAX - 1) > worth(0, 0));
        // From before a jump of the generations, and with hardly anything to gain.
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

    /// So many segments on disk, with one live block each; a later one is younger.
    fn spilled(cache: &WriteCache, count: u32) {
        cache.log.lock().restore(&(0..count).collect::<Vec<u32>>());
        for number in 0..count {
            let segment = cache.segments.get(SegmentId(number)).unwrap();
            segment.claim(Slot(0), BlockNumber(number));
            segment.set_generation(u64::from(number) + 1);
            segment.set_word(crate::segment::Word::new(State::Spilled, 0));
        }
    }

    /// Takes one victim, as where its cleaning begins.
    fn take_victim(cache: &WriteCache) -> Option<u32> {
        let id = cache.victim()?;
        cache.cleaner.ranked.lock().retain(|(ranked, _)| *ranked != id);
        Some(id.0)
    }

    #[test]
    fn so_many_victims_cost_one_look_at_all_segments() {
        let host = crate::Host::start(u64::MAX).unwrap();
        let cache = cache(&host);
        let count = (RANKED * OF_CANDIDATES) as u32;
        spilled(&cache, count);
        let dedup_schedule = || cache.cleaner.dedup_schedule.load(Ordering::Relaxed);
        // Until a staging buffer is there it is the same one.
        assert!(cache.victim() == Some(SegmentId(0)) && cache.victim() == Some(SegmentId(0)));
        for oldest in 0..RANKED as u32 {
            assert_eq!(take_victim(&cache), Some(oldest));
            assert_eq!(dedup_schedule(), 1);
            cache
                .segments
                .get(SegmentId(oldest))
                .unwrap()
                .set_word(crate::segment::Word::new(State::Free, 0));
        }
        // There are fewer of them now.
        assert_eq!((take_victim(&cache), dedup_schedule()), (Some(16), 2));
        // Those that were written anew, died, or are left alone are passed over.
        let segment = |number| cache.segments.get(SegmentId(number)).unwrap();
        segment(17).set_generation(5000);
        segment(18).kill(Slot(0));
        let unread = Unread { since: Instant::now(), pause: Duration::from_secs(3600) };
        cache.cleaner.unread.lock().insert(segment(19).generation(), unread);
        cache.cleaner.damaged.lock().insert(segment(20).generation());
        assert_eq!((take_victim(&cache), dedup_schedule()), (Some(21), 2));
    }

    #[test]
    fn of_few_segments_each_victim_is_the_best() {
        let host = crate::Host::start(u64::MAX).unwrap();
        let cache = cache(&host);
        spilled(&cache, OF_CANDIDATES as u32);
        for oldest in 0..4 {
            assert_eq!(take_victim(&cache), Some(oldest));
            cache
                .segments
                .get(SegmentId(oldest))
                .unwrap()
                .set_word(crate::segment::Word::new(State::Free, 0));
            assert_eq!(cache.cleaner.dedup_schedule.load(Ordering::Relaxed), oldest + 1);
        }
    }

    #[test]
    fn a_job_that_is_taken_over_undoes_nothing_and_one_that_is_lost_all_of_it() {
        let dir = tempfile::tempdir().unwrap();
        // Its thread does not run, and moves nothing.
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
        // As a disk that flips bits for long has it.
        cache.cleaner.damaged.lock().extend(0..1000);
        assert!(cache.victim().is_none());
        assert!(cache.cleaner.damaged.lock().iter().eq([&77]));
    }
}
