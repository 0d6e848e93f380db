//! Pacing: a writer that is faster than the overflow disk is slowed down write by write, before it has to wait.
//!
//! Without it a writer runs at memory speed until no slot is left, then waits for a whole segment to be written
//! out, and so on: one write of five hundred takes as long as the five hundred. Where RAM gets short each write
//! that took a slot therefore has the time that the disk takes for a slot, more as less room is left. Who comes
//! before that time is over is answered later, in one of two ways:
//!
//! - A lone writer on a fast disk spins, for the wait is shorter than a hand-over to another thread: at most
//!   [`MOST_NS`], on one thread of a host, with no lock held, and never the host's own thread.
//! - Where the disk takes longer than that for a slot, or two spinning writers have met in the last [`CROWDED_NS`], an
//!   account is kept of the slots that were taken. What comes while it is more than [`AHEAD_NS`] ahead of the disk is
//!   parked ([`crate::write_queue`]) until the disk has all but caught up ([`LEFT_NS`]), and so is all that comes meanwhile: otherwise
//!   those who come later would use up the time that the parked ones wait for.
//!
//! What was tried and measured is in `docs/decisions/0012-sealing-and-pacing.md` and
//! `docs/decisions/0029-pacing-by-account.md`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::sync::{UNDER_MODEL_CHECKER, chance};
use crate::units::SLOTS;

/// The longest delay of one write.
const MOST_NS: u64 = 5_000;

/// After two writers met, nobody spins for so long.
const CROWDED_NS: u64 = 100_000_000;

/// So far writers may be ahead of a disk for which nobody spins.
const AHEAD_NS: u64 = 500_000;

/// And so far when those that were parked go on: until a thread has woken up for them, the rest is over, too.
const LEFT_NS: u64 = AHEAD_NS / 4;

/// Nobody waits longer than this for the pace of a disk: what it is was measured, and may be over.
pub const MOST_AHEAD: Duration = Duration::from_nanos(MOST_AHEAD_NS);
const MOST_AHEAD_NS: u64 = 100_000_000;

/// Longer pauses between two segments do not tell how fast the disk is.
const LONGEST_INTERVAL_NS: u64 = 1_000_000_000;

/// Who spins, on all caches of a host.
#[derive(Debug)]
pub struct Spinner {
    start: Instant,
    busy: AtomicBool,
    crowded_until_ns: AtomicU64,
    /// What the clock says in a test that has set it.
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
    /// Stops the clock at this time, which is not 0.
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

/// How fast the writers of one cache may go.
#[derive(Debug, Default)]
pub struct Throttle {
    /// From one answer of a write that took a slot to the next; 0 while there is room.
    delay_ns: AtomicU64,
    /// When the last such write was answered.
    answered_ns: AtomicU64,
    /// What the disk takes for a slot, smoothed.
    slot_ns: AtomicU64,
    /// When the last segment was written, if more were on their way then: the disk has had something to do since. 0 if not.
    written_ns: AtomicU64,
    /// Segments on their way to the disk.
    on_their_way: AtomicU64,
    /// What the disk takes for a slot while room is short, for the account; 0 while there is room.
    meter_ns: AtomicU64,
    /// When all slots that were taken have had their time: the account.
    due_ns: AtomicU64,
    /// Writes are parked.
    parked: AtomicBool,
    /// Writes that were answered later.
    throttled_writes: AtomicU64,
}

/// The room of a cache, in segments.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// That may be in RAM.
    pub allowed: u32,
    /// Of which cannot be taken without writing something out first.
    pub taken: u32,
}

impl Room {
    fn free(self) -> u64 {
        u64::from(self.allowed.saturating_sub(self.taken))
    }

    /// With more than this free nobody is slowed down.
    fn high(self) -> u64 {
        u64::from((self.allowed / 4).max(2))
    }

    fn is_short(self) -> bool {
        self.free() <= self.high()
    }
}

impl Throttle {
    /// Lets a writer that took a slot go on when that slot's time has come.
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
        // The time since the last answer counts; what a writer did not use before that is gone.
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

    /// A slot was taken: its time is put down to the account.
    #[inline]
    pub fn took_slot(&self, spinner: &Spinner) {
        let meter_ns = self.meter_ns.load(Ordering::Relaxed);
        if meter_ns != 0 && !UNDER_MODEL_CHECKER {
            let now_ns = spinner.now_ns();
            let due_ns = self.due_ns.load(Ordering::Relaxed).max(now_ns) + meter_ns;
            // Of two at a time one may be lost, and where this thread stood still in between, those of that time: writers are
            // then ahead by as much as they were allowed to be, once more.
            self.due_ns.store(due_ns.min(now_ns + MOST_AHEAD_NS), Ordering::Relaxed);
        }
    }

    /// Whether a write that would take a slot has to wait until the disk has caught up, for which nobody spins.
    #[inline]
    pub fn is_ahead(&self, spinner: &Spinner) -> bool {
        if UNDER_MODEL_CHECKER {
            // Time stands still there: it is chance who is ahead.
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

    /// How long it is until those that are parked go on.
    pub fn ahead(&self, spinner: &Spinner) -> Duration {
        if UNDER_MODEL_CHECKER || self.meter_ns.load(Ordering::Relaxed) == 0 {
            return Duration::ZERO;
        }
        let left_ns = spinner.now_ns().saturating_add(LEFT_NS);
        Duration::from_nanos(self.due_ns.load(Ordering::Relaxed).saturating_sub(left_ns))
    }

    /// Writes are parked until then: all that come meanwhile are to be, too.
    pub fn park(&self) {
        self.parked.store(true, Ordering::Relaxed);
    }

    /// A write was parked.
    pub fn count_throttled(&self) {
        self.throttled_writes.fetch_add(1, Ordering::Relaxed);
    }

    /// None is parked any more.
    pub fn unpark(&self) {
        self.parked.store(false, Ordering::Relaxed);
    }

    /// Writes that were answered later: not those whose time had come.
    pub fn throttled_writes(&self) -> u64 {
        self.throttled_writes.load(Ordering::Relaxed)
    }

    /// A segment is made ready for the disk. Then follows [`Throttle::written`] or [`Throttle::wrote_nothing`].
    pub fn writes(&self) {
        self.on_their_way.fetch_add(1, Ordering::Relaxed);
    }

    /// Nothing of it was left to be written.
    pub fn wrote_nothing(&self) {
        if self.on_their_way.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.written_ns.store(0, Ordering::Relaxed);
        }
    }

    /// It has been written, or not.
    pub fn written(&self, is_written: bool, room: Room, spinner: &Spinner) {
        let others = self.on_their_way.fetch_sub(1, Ordering::Relaxed) > 1;
        self.landed(is_written, others, room, spinner);
    }

    /// The same, where somebody else knows whether others are on their way.
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
            // What was put down is of slots that may be free by now: the next account begins with nothing.
            self.due_ns.store(0, Ordering::Relaxed);
        }
    }

    /// Whether writers are slowed down, or would be if they were faster.
    pub fn is_on(&self) -> bool {
        self.meter_ns.load(Ordering::Relaxed) != 0
    }

    /// Ends pacing where there is room again without a segment having been written, as after a discard.
    pub fn look(&self, room: Room) {
        if !room.is_short() {
            self.set(room);
        }
    }

    /// As where room is short, and the disk takes so long for a slot.
    #[cfg(test)]
    pub fn delay_for(&self, slot_ns: u64) {
        self.delay_ns.store(slot_ns, Ordering::Relaxed);
    }

    /// The same of the account.
    #[cfg(test)]
    pub fn account_for(&self, slot_ns: u64) {
        self.meter_ns.store(slot_ns, Ordering::Relaxed);
    }

    /// A limit was changed: nobody is slowed down until it is clear what for.
    pub fn reset(&self) {
        self.delay_ns.store(0, Ordering::Relaxed);
        self.meter(0);
    }
}

/// The same for who spins.
fn delay_ns(slot_ns: u64, room: Room) -> u64 {
    if slot_ns > MOST_NS { 0 } else { paced_ns(slot_ns, room).min(MOST_NS) }
}

/// Nothing while more than a quarter of the RAM is free; then 0.7 of what the disk takes for a slot, up to 1.3.
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
        // One at a time: nothing was on its way since the one before.
        assert_eq!((written(100, true, false), written(300, true, false)), (0, 0));
        // The first of two after a pause: what it took began with the pause. From there to the second is what the disk takes.
        assert_eq!(written(500, true, true), 0);
        assert_eq!(written(502, true, false), slot_ns(2));
        assert_eq!((written(700, true, true), written(702, true, false)), (slot_ns(2), slot_ns(2)));
        // One that failed tells nothing, but that the next has been on its way since.
        assert_eq!((written(800, true, true), written(850, false, true)), (slot_ns(2), slot_ns(2)));
        assert_eq!(written(852, true, false), slot_ns(2));
        // What was made ready behind one that was written, and was not: a pause.
        throttle.writes();
        throttle.writes();
        spinner.set_clock(900_000_000);
        throttle.written(true, room(0), &spinner);
        throttle.wrote_nothing();
        assert_eq!(written(950, true, false), slot_ns(2));
        // Or was.
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
        // Longer than any pause of this thread, so that each write's time is still to come.
        throttle.delay_for(1 << 50);
        throttle.wait(&spinner);
        assert!(throttle.answered_ns.load(Ordering::Relaxed) > 0 && !spinner.busy.load(Ordering::Relaxed));
        assert_eq!(throttle.throttled_writes(), 1);
        spinner.busy.store(true, Ordering::Relaxed);
        // Would spin for ever if it waited for the other.
        throttle.wait(&spinner);
        assert!(spinner.crowded_until_ns.load(Ordering::Relaxed) > 0);
        // Alone again, and nobody spins yet.
        spinner.busy.store(false, Ordering::Relaxed);
        spinner.crowded_until_ns.store(u64::MAX, Ordering::Relaxed);
        throttle.wait(&spinner);
        throttle.reset();
        throttle.wait(&spinner);
        assert_eq!(throttle.throttled_writes(), 1, "who does not wait is not counted");
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
        // Who comes while others are parked goes behind them, though it would not wait for itself.
        spinner.set_clock(start_ns + 200_000);
        assert!(!throttle.is_ahead(&spinner));
        throttle.park();
        assert!(throttle.is_ahead(&spinner));
        // Also where somebody spins.
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
        // A change of the limits begins anew, and so does room that comes from elsewhere.
        for end in [|throttle: &Throttle| throttle.reset(), |throttle: &Throttle| throttle.look(room(8))] {
            throttle.account_for(1 << 40);
            take(1);
            throttle.look(room(7));
            assert!(throttle.is_on());
            end(&throttle);
            assert!(!throttle.is_on() && throttle.ahead(&spinner).is_zero() && !throttle.is_ahead(&spinner));
            // Where room gets short again, nobody pays for what was written before.
            throttle.account_for(SLOT_NS);
            assert!(throttle.ahead(&spinner).is_zero());
        }
    }

    /// Two writers that take a microsecond for a write, before a disk that takes twenty.
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
                // As the host's thread does that lets them go on.
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
        // The first one's time has come by then, and each other is answered 4 us after the one before at least.
        let least = Duration::from_nanos(4_000) * (WRITES - 1);
        assert!(start.elapsed() >= least, "{:?}", start.elapsed());
    }
}
