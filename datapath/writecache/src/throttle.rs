//! Throttling: slows a writer that is faster than the overflow disk, write by write, before it has to wait
//! for space.
//!
//! Without throttling, a writer runs at memory speed until no slot is left, then waits until a whole segment
//! is written to disk, and so on: one write in five hundred takes as long as the five hundred together. So
//! when RAM becomes short, each write that took a slot gets the time that the disk needs for a slot, more of
//! it the less space is left. A write that comes before this time is over is answered later, in one of two
//! ways:
//!
//! - A single writer on a fast disk spins, because the wait is shorter than a switch to another thread: at
//!   most [`MOST_NS`], by one thread of a host at a time, with no lock held, and never by the host's own
//!   thread.
//! - If the disk needs longer than that for a slot, or two spinning writers met in the last [`CROWDED_NS`],
//!   the disk time of all slots that were taken is added up. While the sum is more than [`AHEAD_NS`] ahead of
//!   the clock, writes are queued ([`crate::write_queue`]) until the disk has nearly caught up ([`LEFT_NS`]).
//!   Writes that come meanwhile are queued, too: otherwise they would use up the time for which the queued
//!   ones wait.
//!
//! Experiments and measurements are in `docs/decisions/0012-sealing-and-pacing.md` and
//! `docs/decisions/0029-pacing-by-account.md`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::sync::{UNDER_MODEL_CHECKER, chance};
use crate::units::SLOTS;

/// The longest delay of one write by spinning.
const MOST_NS: u64 = 5_000;

/// After two writers met, no writer spins for this time.
const CROWDED_NS: u64 = 100_000_000;

/// How far writers may be ahead of a disk for which no writer spins.
const AHEAD_NS: u64 = 500_000;

/// How far they are ahead when the queued writes continue: until a thread has woken up for them, the rest of
/// the time has passed, too.
const LEFT_NS: u64 = AHEAD_NS / 4;

/// No write waits longer than this for the disk's speed, which was measured in the past and may have changed.
pub const MOST_AHEAD: Duration = Duration::from_nanos(MOST_AHEAD_NS);
const MOST_AHEAD_NS: u64 = 100_000_000;

/// A longer pause between two segments does not show how fast the disk is.
const LONGEST_INTERVAL_NS: u64 = 1_000_000_000;

/// The thread that spins, for all caches of a host.
#[derive(Debug)]
pub struct Spinner {
    start: Instant,
    busy: AtomicBool,
    crowded_until_ns: AtomicU64,
    /// The time of a test's clock; 0 if none was set.
    #[cfg(test)]
    set_ns: AtomicU64,
}

impl Default for Spinner {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            busy: AtomicBool::new(false),
            crowded_until_ns: AtomicU64::new(0),
            #[cfg(test)]
            set_ns: AtomicU64::new(0),
        }
    }
}

impl Spinner {
    /// Stops the clock at this time, which must not be 0.
    #[cfg(test)]
    pub fn set_clock(&self, now_ns: u64) {
        self.set_ns.store(now_ns, Ordering::Relaxed);
    }

    fn now_ns(&self) -> u64 {
        #[cfg(test)]
        if let now_ns @ 1.. = self.set_ns.load(Ordering::Relaxed) {
            return now_ns;
        }
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Measures the disk of one cache, and delays its writers.
#[derive(Debug, Default)]
pub struct Throttle {
    /// The least time between the answers of two writes that took a slot; 0 while there is space.
    delay_ns: AtomicU64,
    /// When the last such write was answered.
    answered_ns: AtomicU64,
    /// Time that the disk needs for a slot, smoothed.
    slot_ns: AtomicU64,
    /// When the last segment was written, if others were being written then, so that the disk has been busy
    /// since; otherwise 0.
    written_ns: AtomicU64,
    /// Number of segments that are being written.
    in_flight: AtomicU64,
    /// Time that the disk needs for a slot, for the sum of disk times; 0 while there is space.
    meter_ns: AtomicU64,
    /// When the disk time of all slots that were taken is over.
    due_ns: AtomicU64,
    /// Whether writes are queued.
    parked: AtomicBool,
    /// Number of writes that were delayed.
    throttled_writes: AtomicU64,
}

/// The space of a cache, in segments.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Segments that may be in RAM.
    pub allowed: u32,
    /// Segments of `allowed` that cannot be used before a segment is written to disk.
    pub taken: u32,
}

impl Room {
    fn free(self) -> u64 {
        u64::from(self.allowed.saturating_sub(self.taken))
    }

    /// With more than this free, no writer is delayed.
    fn high(self) -> u64 {
        u64::from((self.allowed / 4).max(2))
    }

    fn is_short(self) -> bool {
        self.free() <= self.high()
    }
}

impl Throttle {
    /// Delays a writer that took a slot until the slot's time is over.
    #[inline]
    pub fn wait(&self, spinner: &Spinner) {
        let delay_ns = self.delay_ns.load(Ordering::Relaxed);
        if delay_ns != 0 && !UNDER_MODEL_CHECKER {
            self.spin(delay_ns, spinner);
        }
    }

    #[cold]
    fn spin(&self, delay_ns: u64, spinner: &Spinner) {
        let now_ns = spinner.now_ns();
        if now_ns < spinner.crowded_until_ns.load(Ordering::Relaxed) {
            return;
        }
        if spinner.busy.swap(true, Ordering::Acquire) {
            spinner.crowded_until_ns.store(now_ns + CROWDED_NS, Ordering::Relaxed);
            return;
        }
        // The time since the last answer counts; time that a writer did not use before that is lost.
        let due_ns = self.answered_ns.load(Ordering::Relaxed) + delay_ns;
        let until_ns = due_ns.clamp(now_ns, now_ns + MOST_NS);
        self.answered_ns.store(until_ns, Ordering::Relaxed);
        if until_ns > now_ns {
            self.throttled_writes.fetch_add(1, Ordering::Relaxed);
        }
        while spinner.now_ns() < until_ns {
            std::hint::spin_loop();
        }
        spinner.busy.store(false, Ordering::Release);
    }

    /// Adds the disk time of a slot that was taken.
    #[inline]
    pub fn took_slot(&self, spinner: &Spinner) {
        let meter_ns = self.meter_ns.load(Ordering::Relaxed);
        if meter_ns != 0 && !UNDER_MODEL_CHECKER {
            let now_ns = spinner.now_ns();
            let due_ns = self.due_ns.load(Ordering::Relaxed).max(now_ns) + meter_ns;
            // If two threads store at once, one slot may be lost; if this thread is suspended in between, all
            // slots of that time. Writers are then ahead once more by as much as they are allowed to be.
            self.due_ns.store(due_ns.min(now_ns + MOST_AHEAD_NS), Ordering::Relaxed);
        }
    }

    /// Whether a write that would take a slot has to wait until the disk has caught up, on a disk for which
    /// no writer spins.
    #[inline]
    pub fn is_ahead(&self, spinner: &Spinner) -> bool {
        if UNDER_MODEL_CHECKER {
            // Time stands still under the model checker: chance decides who is ahead.
            return self.parked.load(Ordering::Relaxed) || chance();
        }
        self.meter_ns.load(Ordering::Relaxed) != 0 && self.is_far_ahead(spinner)
    }

    #[cold]
    fn is_far_ahead(&self, spinner: &Spinner) -> bool {
        if self.parked.load(Ordering::Relaxed) {
            return true;
        }
        let now_ns = spinner.now_ns();
        let ahead_ns = self.due_ns.load(Ordering::Relaxed).saturating_sub(now_ns);
        let nobody_spins = self.delay_ns.load(Ordering::Relaxed) == 0
            || now_ns < spinner.crowded_until_ns.load(Ordering::Relaxed);
        nobody_spins && ahead_ns > AHEAD_NS
    }

    /// The time until the queued writes continue.
    pub fn ahead(&self, spinner: &Spinner) -> Duration {
        if UNDER_MODEL_CHECKER || self.meter_ns.load(Ordering::Relaxed) == 0 {
            return Duration::ZERO;
        }
        let left_ns = spinner.now_ns().saturating_add(LEFT_NS);
        Duration::from_nanos(self.due_ns.load(Ordering::Relaxed).saturating_sub(left_ns))
    }

    /// Marks that writes are queued, so that all writes that come meanwhile are queued, too.
    pub fn park(&self) {
        self.parked.store(true, Ordering::Relaxed);
    }

    /// Counts a delayed write.
    pub fn count_throttled(&self) {
        self.throttled_writes.fetch_add(1, Ordering::Relaxed);
    }

    /// Marks that no write is queued any more.
    pub fn unpark(&self) {
        self.parked.store(false, Ordering::Relaxed);
    }

    /// Number of delayed writes; a write whose time was over when it came does not count.
    pub fn throttled_writes(&self) -> u64 {
        self.throttled_writes.load(Ordering::Relaxed)
    }

    /// Called before a segment is written. [`Throttle::written`] or [`Throttle::wrote_nothing`] follows.
    pub fn writes(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    /// Called if the segment had no live slots.
    pub fn wrote_nothing(&self) {
        if self.in_flight.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.written_ns.store(0, Ordering::Relaxed);
        }
    }

    /// Called when the segment was written, or failed to be.
    pub fn written(&self, is_written: bool, room: Room, spinner: &Spinner) {
        let others = self.in_flight.fetch_sub(1, Ordering::Relaxed) > 1;
        self.landed(is_written, others, room, spinner);
    }

    /// Like [`Throttle::written`], if the caller knows whether others are being written.
    pub fn landed(&self, is_written: bool, others: bool, room: Room, spinner: &Spinner) {
        let now_ns = spinner.now_ns();
        let before_ns = self.written_ns.swap(if others { now_ns } else { 0 }, Ordering::Relaxed);
        let interval_ns = now_ns.saturating_sub(before_ns);
        if is_written && before_ns != 0 && interval_ns < LONGEST_INTERVAL_NS {
            let slot_ns = interval_ns / SLOTS as u64;
            let old_ns = self.slot_ns.load(Ordering::Relaxed);
            let smooth_ns = if old_ns == 0 { slot_ns } else { (old_ns * 7 + slot_ns) / 8 };
            self.slot_ns.store(smooth_ns, Ordering::Relaxed);
        }
        self.set(room);
    }

    fn set(&self, room: Room) {
        let slot_ns = self.slot_ns.load(Ordering::Relaxed);
        self.delay_ns.store(delay_ns(slot_ns, room), Ordering::Relaxed);
        self.meter(paced_ns(slot_ns, room));
    }

    fn meter(&self, meter_ns: u64) {
        self.meter_ns.store(meter_ns, Ordering::Relaxed);
        if meter_ns == 0 {
            // The sum contains slots that may be free by now: the next sum begins at nothing.
            self.due_ns.store(0, Ordering::Relaxed);
        }
    }

    /// Whether writers are delayed, or would be if they were faster.
    pub fn is_on(&self) -> bool {
        self.meter_ns.load(Ordering::Relaxed) != 0
    }

    /// Ends throttling if space became free without a segment being written, as after a discard.
    pub fn check_space(&self, room: Room) {
        if !room.is_short() {
            self.set(room);
        }
    }

    /// Throttles as if space were short and the disk needed this long for a slot.
    #[cfg(test)]
    pub fn delay_for(&self, slot_ns: u64) {
        self.delay_ns.store(slot_ns, Ordering::Relaxed);
    }

    /// Like [`Throttle::delay_for`], with the sum of disk times.
    #[cfg(test)]
    pub fn account_for(&self, slot_ns: u64) {
        self.meter_ns.store(slot_ns, Ordering::Relaxed);
    }

    /// Called after a change of a limit: writers are not delayed until the throttle has measured again.
    pub fn reset(&self) {
        self.delay_ns.store(0, Ordering::Relaxed);
        self.meter(0);
    }
}

/// The delay of a spinning writer.
fn delay_ns(slot_ns: u64, room: Room) -> u64 {
    if slot_ns > MOST_NS { 0 } else { paced_ns(slot_ns, room).min(MOST_NS) }
}

/// Zero while more than a quarter of the RAM is free; below that, from 0.7 to 1.3 of the disk's time for a
/// slot.
fn paced_ns(slot_ns: u64, room: Room) -> u64 {
    let (free, high) = (room.free(), room.high());
    if !room.is_short() {
        return 0;
    }
    slot_ns * (13 * high - 6 * free) / (10 * high)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(free: u32) -> Room {
        Room { allowed: 28, taken: 28 - free }
    }

    #[test]
    fn the_delay_grows_as_room_gets_short() {
        assert_eq!(delay_ns(2_000, room(8)), 0);
        let delays: Vec<u64> = (0..=7).rev().map(|free| delay_ns(2_000, room(free))).collect();
        assert_eq!((delays[0], delays[7]), (1_400, 2_600));
        assert!(delays.is_sorted());
    }

    #[test]
    fn nobody_spins_for_a_slow_disk_and_an_account_is_kept_of_each() {
        assert_eq!(delay_ns(MOST_NS + 1, room(0)), 0);
        assert_eq!(paced_ns(20_000, room(0)), 26_000);
        assert_eq!((paced_ns(20_000, room(8)), paced_ns(0, room(0))), (0, 0));
        assert_eq!(delay_ns(0, room(0)), 0);
        assert_eq!(delay_ns(MOST_NS, room(0)), MOST_NS);
    }

    #[test]
    fn a_pause_is_no_measure_of_the_disk() {
        let (throttle, spinner) = (Throttle::default(), Spinner::default());
        let written = |at_ms: u64, is_written, others| {
            spinner.set_clock(at_ms * 1_000_000);
            throttle.landed(is_written, others, room(0), &spinner);
            throttle.slot_ns.load(Ordering::Relaxed)
        };
        let slot_ns = |ms: u64| ms * 1_000_000 / SLOTS as u64;
        // One at a time: no other segment was being written.
        assert_eq!((written(100, true, false), written(300, true, false)), (0, 0));
        // For the first of two after a pause, the measured time includes the pause. The time from there to
        // the second is the disk's.
        assert_eq!(written(500, true, true), 0);
        assert_eq!(written(502, true, false), slot_ns(2));
        assert_eq!((written(700, true, true), written(702, true, false)), (slot_ns(2), slot_ns(2)));
        // A failed write says nothing about the speed, except that the disk was busy with the next one.
        assert_eq!((written(800, true, true), written(850, false, true)), (slot_ns(2), slot_ns(2)));
        assert_eq!(written(852, true, false), slot_ns(2));
        // A segment was prepared after one that was written, but had nothing to write: a pause.
        throttle.writes();
        throttle.writes();
        spinner.set_clock(900_000_000);
        throttle.written(true, room(0), &spinner);
        throttle.wrote_nothing();
        assert_eq!(written(950, true, false), slot_ns(2));
        // Or it was written.
        throttle.writes();
        throttle.writes();
        for at_ms in [1_000, 1_010] {
            spinner.set_clock(at_ms * 1_000_000);
            throttle.written(true, room(0), &spinner);
        }
        assert_eq!(throttle.slot_ns.load(Ordering::Relaxed), (7 * slot_ns(2) + slot_ns(10)) / 8);
        throttle.slot_ns.store(slot_ns(2), Ordering::Relaxed);
        assert_eq!(
            (written(5_000, true, true), written(6_001, true, true)),
            (slot_ns(2), slot_ns(2)),
            "too long"
        );
    }

    #[test]
    fn writers_that_meet_do_not_spin() {
        let (throttle, spinner) = (Throttle::default(), Spinner::default());
        // Longer than any pause of this thread, so that each write's time is not over yet.
        throttle.delay_for(1 << 50);
        throttle.wait(&spinner);
        assert!(throttle.answered_ns.load(Ordering::Relaxed) > 0 && !spinner.busy.load(Ordering::Relaxed));
        assert_eq!(throttle.throttled_writes(), 1);
        spinner.busy.store(true, Ordering::Relaxed);
        // Would spin for ever if it waited for the other thread.
        throttle.wait(&spinner);
        assert!(spinner.crowded_until_ns.load(Ordering::Relaxed) > 0);
        // Alone again, but no writer spins yet.
        spinner.busy.store(false, Ordering::Relaxed);
        spinner.crowded_until_ns.store(u64::MAX, Ordering::Relaxed);
        throttle.wait(&spinner);
        throttle.reset();
        throttle.wait(&spinner);
        assert_eq!(throttle.throttled_writes(), 1, "a write that does not wait is not counted");
    }

    #[test]
    fn who_is_ahead_of_a_slow_disk_waits_until_it_has_caught_up() {
        const SLOT_NS: u64 = 100_000;
        let (throttle, spinner) = (Throttle::default(), Spinner::default());
        let start_ns = 1_000_000_000;
        spinner.set_clock(start_ns);
        let take = |slots: u32| (0..slots).for_each(|_| throttle.took_slot(&spinner));
        take(1000);
        assert!(!throttle.is_ahead(&spinner), "there is room");
        throttle.account_for(SLOT_NS);
        take(5);
        assert!(!throttle.is_ahead(&spinner), "by {AHEAD_NS} ns");
        take(1);
        assert!(throttle.is_ahead(&spinner));
        assert_eq!(throttle.ahead(&spinner), Duration::from_nanos(600_000 - LEFT_NS));
        // A write that comes while others are queued goes behind them, even if it would not have to wait by
        // itself.
        spinner.set_clock(start_ns + 200_000);
        assert!(!throttle.is_ahead(&spinner));
        throttle.park();
        assert!(throttle.is_ahead(&spinner));
        // Also if a writer spins.
        throttle.delay_for(SLOT_NS);
        assert!(throttle.is_ahead(&spinner));
        spinner.set_clock(start_ns + 600_000 - LEFT_NS);
        assert!(
            throttle.ahead(&spinner).is_zero() && throttle.is_ahead(&spinner),
            "the host's thread is late"
        );
        throttle.delay_for(0);
        throttle.unpark();
        assert!(!throttle.is_ahead(&spinner));
        take(100_000);
        assert_eq!(throttle.ahead(&spinner), Duration::from_nanos(MOST_AHEAD_NS - LEFT_NS));
        // A change of the limits resets the throttle, as does space that becomes free in another way.
        for end in
            [|throttle: &Throttle| throttle.reset(), |throttle: &Throttle| throttle.check_space(room(8))]
        {
            throttle.account_for(1 << 40);
            take(1);
            throttle.check_space(room(7));
            assert!(throttle.is_on());
            end(&throttle);
            assert!(!throttle.is_on() && throttle.ahead(&spinner).is_zero() && !throttle.is_ahead(&spinner));
            // If space becomes short again, earlier writes do not count.
            throttle.account_for(SLOT_NS);
            assert!(throttle.ahead(&spinner).is_zero());
        }
    }

    /// Two writers that need a microsecond for a write, on a disk that needs twenty.
    #[test]
    fn writers_go_evenly_at_the_pace_of_the_disk_instead_of_stopping() {
        const SLOT_NS: u64 = 20_000;
        const WRITE_NS: u64 = 1_000;
        const SLOTS_EACH: u64 = 1_000;
        let (throttle, spinner) = (Throttle::default(), Spinner::default());
        throttle.account_for(SLOT_NS);
        let start_ns = 1_000_000_000;
        let mut comes_ns = [start_ns, start_ns + WRITE_NS / 2];
        let (mut wrote, mut waited_ns, mut longest_ns) = ([0, 0], [0, 0], 0);
        let now_ns = loop {
            let writer = usize::from(comes_ns[1] < comes_ns[0]);
            let now_ns = comes_ns[writer];
            if wrote == [SLOTS_EACH; 2] || wrote[writer] == 2 * SLOTS_EACH {
                break now_ns;
            }
            spinner.set_clock(now_ns);
            if throttle.ahead(&spinner).is_zero() {
                // As the host's thread does when it lets them continue.
                throttle.unpark();
            }
            comes_ns[writer] += if throttle.is_ahead(&spinner) {
                throttle.park();
                let wait_ns = u64::try_from(throttle.ahead(&spinner).as_nanos()).unwrap();
                waited_ns[writer] += wait_ns;
                longest_ns = longest_ns.max(wait_ns);
                wait_ns
            } else {
                throttle.took_slot(&spinner);
                wrote[writer] += 1;
                WRITE_NS
            };
        };
        assert!(longest_ns > 0 && longest_ns <= AHEAD_NS + 2 * SLOT_NS - LEFT_NS, "{longest_ns} ns at once");
        assert!(wrote[0].abs_diff(wrote[1]) * 50 <= SLOTS_EACH, "{wrote:?}");
        assert!(waited_ns[0].abs_diff(waited_ns[1]) * 50 <= waited_ns[0], "{waited_ns:?}");
        let disk_ns = (wrote[0] + wrote[1]) * SLOT_NS;
        assert!(
            (now_ns - start_ns).abs_diff(disk_ns) <= AHEAD_NS + 2 * SLOT_NS,
            "{} of {disk_ns} ns",
            now_ns - start_ns
        );
    }

    #[test]
    fn who_spins_is_not_parked_unless_there_are_others() {
        let (throttle, spinner) = (Throttle::default(), Spinner::default());
        spinner.set_clock(1);
        throttle.account_for(MOST_AHEAD_NS);
        throttle.delay_for(1_000);
        throttle.took_slot(&spinner);
        assert!(!throttle.is_ahead(&spinner));
        spinner.crowded_until_ns.store(u64::MAX, Ordering::Relaxed);
        assert!(throttle.is_ahead(&spinner));
    }

    #[test]
    fn a_lone_writer_takes_as_long_as_the_disk() {
        const WRITES: u32 = 1_000;
        let (throttle, spinner) = (Throttle::default(), Spinner::default());
        throttle.delay_for(4_000);
        let start = Instant::now();
        (0..WRITES).for_each(|_| throttle.wait(&spinner));
        // The first write's time is over by then, and each other write is answered at least 4 us after the
        // one before.
        let least = Duration::from_nanos(4_000) * (WRITES - 1);
        assert!(start.elapsed() >= least, "{:?}", start.elapsed());
    }
}
