//! The parts that all caches of a process share: memory, the disk engine, and one thread that spills and
//! cleans segments, divides the RAM among the caches, returns free memory, and wakes waiting writes.
//!
//! The thread sleeps without a time-out while there is no work, so an idle host uses no CPU. While caches
//! have RAM in use, it checks once a second for memory pressure, and for blocks that equal the image.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::budget::{Budget, Divider};
use crate::cache::{DedupSchedule, WriteCache};
use crate::index_memory;
use crate::memory::{AlignedBuffer, MemoryPool, SegmentMemory};
use crate::overflow::encrypt::ENCRYPTED_SEGMENT_BYTES;
use crate::overflow::io::{IoEngine, open_engine};
use crate::packed::Packer;
use crate::panic_guard::without_panic;
use crate::pressure::{Extent, Monitor, NoPressure, PressureSource, SystemPressure};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex, UNDER_MODEL_CHECKER};
use crate::throttle::Spinner;
use crate::units::SEGMENT_BYTES;

/// Number of buffers for segments that are being written to or read from disk, for all caches together.
pub const STAGING_BUFFERS: usize = 3;

/// The interval at which free memory is returned to the system and surplus overflow space is punched out. A
/// thread that frees a segment wakes the host's thread, so freed memory is returned within this time plus one
/// round.
const TRIM_INTERVAL: Duration = Duration::from_millis(if UNDER_MODEL_CHECKER { 0 } else { 300 });

/// The interval while there is more to return or to punch out.
const TRIM_MORE_INTERVAL: Duration = Duration::from_millis(if UNDER_MODEL_CHECKER { 0 } else { 10 });

/// The time after which a cache whose disk failed is tried again.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// State that the caches of a host share; see the module's documentation.
pub struct HostShared {
    pub(crate) pool: Arc<MemoryPool>,
    pub(crate) engine: Arc<dyn IoEngine>,
    pub(crate) packer: Mutex<Packer>,
    staging: Mutex<Staging>,
    signal: Mutex<bool>,
    wake: Condvar,
    stop: AtomicBool,
    caches: Mutex<Vec<Weak<WriteCache>>>,
    pub(crate) budget: Budget,
    pressure_shrinks: AtomicU64,
    pressure_source: &'static str,
    /// Writes of all caches that wait for space.
    pub(crate) waiting_writes: AtomicU64,
    /// Writes of all caches that wait until a disk has caught up.
    pub(crate) throttled_writes: AtomicU64,
    pub(crate) spinner: Spinner,
}

#[derive(Default)]
struct Staging {
    free: Vec<AlignedBuffer>,
    made: usize,
    /// Whether a buffer was taken since the last trim.
    taken: bool,
    /// Whether a buffer was requested when there was none.
    wanted: bool,
}

/// Temporary memory of a segment's size for one round; counted in the budget while it exists.
pub(crate) struct Scratch<'a> {
    host: &'a HostShared,
    memory: Option<SegmentMemory>,
}

impl Scratch<'_> {
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        self.memory.as_mut().map(SegmentMemory::bytes).unwrap_or_default()
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.host.pool.give(memory);
            self.host.give_ram(SEGMENT_BYTES as u64);
        }
    }
}

/// A host's counters at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct HostSnapshot {
    /// RAM that all caches together may use, as configured.
    pub configured_limit_bytes: u64,
    /// The limit now: as configured, or less under memory pressure.
    pub limit_bytes: u64,
    /// RAM in use by all caches, including staging buffers.
    pub used_bytes: u64,
    /// How often memory pressure lowered the limit.
    pub pressure_shrinks: u64,
    /// The source of memory pressure: `PSI`, or `cgroup limit and MemAvailable`; `none` if pressure is
    /// ignored.
    pub pressure_source: String,
    /// Open caches.
    pub caches: u64,
}

/// The owner of a host. Dropping it ends the thread when the last cache was dropped.
pub struct Host {
    shared: Arc<HostShared>,
}

impl Host {
    /// Starts the host. `limit_bytes` bounds the RAM of all its caches together.
    pub fn start(limit_bytes: u64) -> Result<Self, String> {
        let engine = open_engine().map_err(|e| format!("cannot start the disk I/O of write caches: {e}"))?;
        Self::with_parts(limit_bytes, engine, SystemPressure::new())
    }

    /// Like [`Host::start`], with a given disk engine and without memory pressure: for tests that inject
    /// faults.
    pub fn with_engine(limit_bytes: u64, engine: Arc<dyn IoEngine>) -> Result<Self, String> {
        Self::with_parts(limit_bytes, engine, NoPressure)
    }

    /// Like [`Host::start`], with a given disk engine and a given source of memory pressure.
    pub fn with_parts(
        limit_bytes: u64,
        engine: Arc<dyn IoEngine>,
        pressure: impl PressureSource,
    ) -> Result<Self, String> {
        let (host, run) = Self::prepare(limit_bytes, engine, pressure);
        std::thread::Builder::new()
            .name("hw-cache".into())
            .spawn(run)
            .map_err(|e| format!("cannot start the thread of write caches: {e}"))?;
        Ok(host)
    }

    /// Like [`Host::with_engine`]; the caller runs the thread's function on a thread of the
    /// model checker.
    #[cfg(feature = "shuttle")]
    pub fn without_thread(limit_bytes: u64, engine: Arc<dyn IoEngine>) -> (Self, impl FnOnce() + Send) {
        Self::prepare(limit_bytes, engine, NoPressure)
    }

    /// Makes a host, and the function for its thread.
    pub(crate) fn prepare(
        limit_bytes: u64,
        engine: Arc<dyn IoEngine>,
        pressure: impl PressureSource,
    ) -> (Self, impl FnOnce() + Send + 'static) {
        let shared = Arc::new(HostShared {
            pool: MemoryPool::new(),
            engine,
            packer: Mutex::default(),
            staging: Mutex::default(),
            signal: Mutex::new(false),
            wake: Condvar::new(),
            stop: AtomicBool::new(false),
            caches: Mutex::default(),
            budget: Budget::new(limit_bytes),
            pressure_shrinks: AtomicU64::new(0),
            pressure_source: pressure.name(),
            waiting_writes: AtomicU64::new(0),
            throttled_writes: AtomicU64::new(0),
            spinner: Spinner::default(),
        });
        let worker = Arc::clone(&shared);
        let monitor = Monitor::new(Box::new(pressure));
        (Self { shared }, move || worker.run(monitor))
    }

    /// The shared state, for opening caches.
    pub fn shared(&self) -> Arc<HostShared> {
        Arc::clone(&self.shared)
    }

    /// Changes the limit of all caches together.
    pub fn set_limit_bytes(&self, limit_bytes: u64) {
        self.shared.budget.set_configured_bytes(limit_bytes);
        self.shared.signal();
    }

    /// RAM in use by all caches.
    pub fn used_bytes(&self) -> u64 {
        self.shared.budget.used_bytes()
    }

    /// The counters at this moment.
    pub fn snapshot(&self) -> HostSnapshot {
        let budget = &self.shared.budget;
        let caches = self.shared.caches.lock().iter().filter(|c| c.strong_count() > 0).count();
        HostSnapshot {
            configured_limit_bytes: budget.configured_bytes(),
            limit_bytes: budget.limit_bytes(),
            used_bytes: budget.used_bytes(),
            pressure_shrinks: self.shared.pressure_shrinks(),
            pressure_source: self.shared.pressure_source.to_owned(),
            caches: caches as u64,
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.signal();
    }
}

/// State that only the host's thread uses.
struct Parts {
    monitor: Monitor,
    divider: Divider,
    dedup_schedule: DedupSchedule,
    /// Index of the cache with which a round begins.
    first: usize,
    last_trim: Option<Instant>,
    trim_after: Duration,
}

impl Parts {
    fn new(monitor: Monitor) -> Self {
        let (divider, dedup_schedule) = (Divider::default(), DedupSchedule::default());
        Self { monitor, divider, dedup_schedule, first: 0, last_trim: None, trim_after: TRIM_INTERVAL }
    }

    /// Whether the last trim was long enough ago.
    fn may_trim(&self, now: Instant) -> bool {
        self.last_trim.is_none_or(|last| now.duration_since(last) >= self.trim_after)
    }
}

/// When the next round is due, unless the thread is woken before: at `at`, or when `after` is over, if that is
/// earlier.
struct Next {
    at: Option<Instant>,
    after: Option<Duration>,
}

impl HostShared {
    /// Wakes the host's thread.
    pub fn signal(&self) {
        let mut pending = self.signal.lock();
        if !*pending {
            *pending = true;
            self.wake.notify_one();
        }
    }

    /// Wakes the host's thread if a write of any cache waits for space.
    pub(crate) fn signal_if_waiting(&self) {
        if self.waiting_writes.load(Ordering::Acquire) != 0 {
            self.signal();
        }
    }

    pub(crate) fn register(&self, cache: &Arc<WriteCache>) {
        let mut caches = self.caches.lock();
        caches.retain(|c| c.strong_count() > 0);
        caches.push(Arc::downgrade(cache));
    }

    /// Counts `bytes` as used if they fit under the host's limit. Returns whether they did.
    pub(crate) fn take_ram(&self, bytes: u64) -> bool {
        self.budget.take(bytes)
    }

    /// Counts RAM that is used even above the limit (index).
    pub(crate) fn add_ram(&self, bytes: u64) {
        self.budget.add(bytes);
    }

    pub(crate) fn give_ram(&self, bytes: u64) {
        self.budget.give(bytes);
    }

    /// Memory for this round, even above the limit: without it nothing can be packed. `None`: the system has
    /// none.
    pub(crate) fn scratch(&self) -> Option<Scratch<'_>> {
        let memory = self.pool.take()?;
        self.add_ram(SEGMENT_BYTES as u64);
        Some(Scratch { host: self, memory: Some(memory) })
    }

    /// Takes a staging buffer; `None` if all are in use.
    pub(crate) fn take_staging(&self) -> Option<AlignedBuffer> {
        let mut staging = self.staging.lock();
        staging.taken = true;
        if let Some(buffer) = staging.free.pop() {
            return Some(buffer);
        }
        if staging.made == STAGING_BUFFERS {
            staging.wanted = true;
            return None;
        }
        let buffer = AlignedBuffer::new(ENCRYPTED_SEGMENT_BYTES)?;
        staging.made += 1;
        // Even above the limit: without staging buffers no segment moves. Shares leave space for them.
        self.budget.add(ENCRYPTED_SEGMENT_BYTES as u64);
        Some(buffer)
    }

    /// Whether there are unused staging buffers.
    fn has_spare_staging(&self) -> bool {
        !self.staging.lock().free.is_empty()
    }

    /// Returns the staging buffers to the system if none was taken since the last call.
    fn trim_staging(&self) {
        let mut staging = self.staging.lock();
        if std::mem::take(&mut staging.taken) {
            return;
        }
        let spare = std::mem::take(&mut staging.free);
        staging.made = staging.made.saturating_sub(spare.len());
        self.budget.give((spare.len() * ENCRYPTED_SEGMENT_BYTES) as u64);
    }

    /// Gives a staging buffer back, and wakes the thread if a cache requested a buffer when there was none.
    /// Without this wake-up, the thread might sleep on although that cache has work: for instance, another
    /// cache ends a cleaning that freed nothing, and signals nothing.
    pub(crate) fn give_staging(&self, buffer: AlignedBuffer) {
        let mut staging = self.staging.lock();
        staging.free.push(buffer);
        let wanted = std::mem::take(&mut staging.wanted);
        drop(staging);
        if wanted {
            self.signal();
        }
    }

    /// Called when a staging buffer was dropped: another one may be made.
    pub(crate) fn lost_staging(&self) {
        let mut staging = self.staging.lock();
        staging.made = staging.made.saturating_sub(1);
        let wanted = std::mem::take(&mut staging.wanted);
        drop(staging);
        self.give_ram(ENCRYPTED_SEGMENT_BYTES as u64);
        if wanted {
            self.signal();
        }
    }

    fn live_caches(&self) -> Vec<Arc<WriteCache>> {
        self.caches.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// How often memory pressure lowered the limit.
    pub(crate) fn pressure_shrinks(&self) -> u64 {
        self.pressure_shrinks.load(Ordering::Relaxed)
    }

    /// Checks for memory pressure and divides the limit, each if it is due. Returns when the next one is due.
    fn divide(&self, caches: &[Arc<WriteCache>], parts: &mut Parts, now: Instant) -> Option<Instant> {
        let next_check = parts.monitor.check(&self.budget, now, || Extent {
            least_bytes: caches.iter().map(|c| c.holding().least_bytes).sum(),
            most_bytes: caches.iter().fold(0, |sum: u64, c| sum.saturating_add(c.holding().max_bytes)),
        });
        self.pressure_shrinks.store(parts.monitor.shrinks(), Ordering::Relaxed);
        if !parts.divider.is_due(&self.budget) {
            return next_check;
        }
        let holdings: Vec<_> = caches.iter().map(|c| (&c.share, c.holding())).collect();
        let before: Vec<u64> = caches.iter().map(|c| c.share.bytes()).collect();
        let due = parts.divider.divide_if_due(&self.budget, now, &holdings);
        for (cache, before) in caches.iter().zip(before) {
            if cache.share.bytes() > before {
                // Whether a larger share gives space to waiting or refused writes is checked later in this
                // round. Mostly it does not, because the cache is at its own limit.
                cache.throttle.reset();
            }
        }
        next_check.into_iter().chain(due).min()
    }

    fn run(&self, monitor: Monitor) {
        let mut parts = Parts::new(monitor);
        loop {
            let caches = self.live_caches();
            if self.stop.load(Ordering::Acquire) && caches.is_empty() {
                return;
            }
            let next = self.run_round(&caches, &mut parts, Instant::now());
            drop(caches);
            let until = next.at.map(|at| at.saturating_duration_since(Instant::now()));
            self.sleep(until.into_iter().chain(next.after).min());
        }
    }

    /// Runs one round: does the work of all caches that can be done now.
    fn run_round(&self, caches: &[Arc<WriteCache>], parts: &mut Parts, now: Instant) -> Next {
        // Each round begins with another cache, so that all caches get staging buffers.
        parts.first = parts.first.wrapping_add(1);
        let (before, after) = caches.split_at(parts.first % caches.len().max(1));
        let mut deadline = self.divide(caches, parts, now);
        let mut failed = false;
        for cache in after.iter().chain(before) {
            let mut done = None;
            // If a cache's work panics, it is tried again later, and the other caches' work continues.
            failed |= !without_panic("the thread of the write caches", || done = Some(cache.work(now)));
            failed |= done.as_ref().is_some_and(|done| done.disk_failed);
            deadline = deadline.into_iter().chain(done.and_then(|done| done.deadline)).min();
        }
        let next_check = parts.dedup_schedule.run(after.iter().chain(before).map(|cache| &**cache), now);
        let trim_due = self.trim(caches, parts, now);
        Next {
            at: deadline.into_iter().chain(next_check).min(),
            after: trim_due
                .then_some(parts.trim_after)
                .into_iter()
                .chain(failed.then_some(RETRY_INTERVAL))
                .min(),
        }
    }

    /// Returns free memory to the system, if that is due. Returns whether there was any when it was called.
    fn trim(&self, caches: &[Arc<WriteCache>], parts: &mut Parts, now: Instant) -> bool {
        let is_due = self.pool.warm_bytes() > 0
            || self.has_spare_staging()
            || index_memory::wants_trim()
            || caches.iter().any(|c| c.wants_trim() || c.has_spare_buffers());
        if is_due && parts.may_trim(now) {
            let has_more_ram = self.pool.trim();
            index_memory::trim();
            self.trim_staging();
            caches.iter().for_each(|c| c.trim());
            parts.last_trim = Some(now);
            let more = has_more_ram || caches.iter().any(|c| c.wants_trim());
            parts.trim_after = if more { TRIM_MORE_INTERVAL } else { TRIM_INTERVAL };
        }
        is_due
    }

    fn sleep(&self, limit: Option<Duration>) {
        let mut pending = self.signal.lock();
        while !*pending {
            match limit {
                None => self.wake.wait(&mut pending),
                Some(limit) => {
                    self.wake.wait_for(&mut pending, limit);
                    break;
                }
            }
        }
        *pending = false;
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use std::sync::mpsc;

    use headwater_block::{BLOCK_BYTES, IoError};
    use headwater_testkit::{Rng, wait_until};

    use super::*;
    use crate::overflow::io::{Direction, IoOp, open_engine};
    use crate::spill::PACKING_TIME_MAX;
    use crate::units::{BlockNumber, Location};
    use crate::{
        Admission, CacheOptions, DEFAULT_WEIGHT, QueuedWrite, RetryResult, UnloggedBlocks, WriteResult,
    };

    const MIB: u64 = 1 << 20;

    fn in_ram_only(size_bytes: u64, host: &Arc<HostShared>) -> Arc<WriteCache> {
        let options = CacheOptions {
            name: "tested".into(),
            size_bytes,
            ram_bytes: 64 * MIB,
            weight: DEFAULT_WEIGHT,
            overflow: None,
            pause_limit: Duration::ZERO,
            persistent: None,
            base: None,
        };
        WriteCache::open(&options, host).unwrap()
    }

    #[test]
    fn a_host_looks_at_what_the_system_tells_of_memory_pressure() {
        let source = Host::start(u64::MAX).unwrap().snapshot().pressure_source;
        let psi = std::fs::read_to_string("/proc/pressure/memory");
        let has_psi = psi.is_ok_and(|text| text.starts_with("some "));
        assert_eq!(source, if has_psi { "PSI" } else { "cgroup limit and MemAvailable" });
    }

    #[test]
    fn a_staging_buffer_that_comes_back_wakes_the_thread_where_one_was_wanted() {
        let (host, _run) = Host::prepare(u64::MAX, open_engine().unwrap(), NoPressure);
        let shared = host.shared();
        let is_woken = || std::mem::take(&mut *shared.signal.lock());
        let mut taken: Vec<_> = (0..STAGING_BUFFERS).map(|_| shared.take_staging().unwrap()).collect();
        shared.give_staging(taken.pop().unwrap());
        assert!(!is_woken(), "nobody waits for it");
        taken.extend(shared.take_staging());
        assert!(shared.take_staging().is_none());
        shared.give_staging(taken.pop().unwrap());
        assert!(is_woken());
        // A lost buffer can be replaced.
        taken.extend(shared.take_staging());
        assert!(shared.take_staging().is_none());
        drop(taken.pop());
        shared.lost_staging();
        assert!(is_woken());
    }

    /// Rounds of the thread with a set clock: as many as the thread would run, each at its time.
    #[test]
    fn what_is_discarded_is_the_systems_again_within_a_second() {
        const BLOCKS: u32 = 4096;
        let (host, _run) = Host::prepare(u64::MAX, open_engine().unwrap(), NoPressure);
        let shared = host.shared();
        let cache = in_ram_only(u64::from(BLOCKS * BLOCK_BYTES), &shared);
        let mut parts = Parts::new(Monitor::new(Box::new(NoPressure)));
        let mut now = Instant::now();
        for round in 0..3 {
            for block in 0..BLOCKS {
                let wrote = cache.write(BlockNumber(block), &[7; BLOCK_BYTES as usize], Admission::New);
                assert_eq!(wrote, WriteResult::Done);
            }
            // A round just before memory is freed: the latest that the next trim can be.
            let _ = shared.run_round(&shared.live_caches(), &mut parts, now);
            parts.last_trim = Some(now);
            *shared.signal.lock() = false;
            cache.clear(BlockNumber(0), BlockNumber(BLOCKS), Location::ZERO, UnloggedBlocks::Stay);
            assert!(*shared.signal.lock(), "round {round}: the thread is not woken");
            let freed = now;
            let free = shared.pool.warm_bytes();
            assert!(free > u64::from(BLOCKS * BLOCK_BYTES) / 2, "round {round}: {free} bytes are free");
            loop {
                let next = shared.run_round(&shared.live_caches(), &mut parts, now);
                if shared.pool.warm_bytes() == 0 {
                    break;
                }
                let slept = next.at.map(|at| at.saturating_duration_since(now));
                now += slept.into_iter().chain(next.after).min().expect("a round is due");
                assert!(now < freed + Duration::from_secs(1), "round {round}: the memory is still in use");
            }
            now += Duration::from_millis(1);
        }
    }

    /// A write of an incompressible block.
    struct Waits {
        cache: Arc<WriteCache>,
        block: u32,
        answer: mpsc::Sender<bool>,
    }

    impl QueuedWrite for Waits {
        fn retry(self: Box<Self>) -> Result<RetryResult, Box<dyn QueuedWrite>> {
            let data = Rng::new(u64::from(self.block)).bytes(BLOCK_BYTES as usize);
            if self.cache.write(BlockNumber(self.block), &data, Admission::Waited) != WriteResult::Done {
                return Err(self);
            }
            self.answer.send(true).unwrap();
            Ok(RetryResult::Stored)
        }

        fn refuse(self: Box<Self>, _: IoError) {
            self.answer.send(false).unwrap();
        }
    }

    /// Memory as of a large cache that was closed.
    #[test]
    fn much_free_memory_goes_back_in_parts_that_follow_soon() {
        let (host, _run) = Host::prepare(u64::MAX, open_engine().unwrap(), NoPressure);
        let shared = host.shared();
        let mut parts = Parts::new(Monitor::new(Box::new(NoPressure)));
        let pieces: Vec<_> = (0..1000).map(|_| shared.pool.take().unwrap()).collect();
        pieces.into_iter().for_each(|piece| shared.pool.give(piece));
        let (mut now, mut turns) = (Instant::now(), 0);
        while shared.pool.warm_bytes() > 0 {
            let before = shared.pool.warm_bytes();
            let next = shared.run_round(&[], &mut parts, now);
            let returned = before - shared.pool.warm_bytes();
            assert!((1..=128 * MIB).contains(&returned), "{returned} bytes in a round");
            turns += 1;
            if shared.pool.warm_bytes() > 0 {
                assert_eq!(next.after, Some(TRIM_MORE_INTERVAL));
                // Other rounds meanwhile return nothing.
                let _ = shared.run_round(&[], &mut parts, now);
                assert_eq!(shared.pool.warm_bytes(), before - returned);
            }
            now += TRIM_MORE_INTERVAL;
        }
        assert_eq!(turns, 16);
    }

    fn waiting_write(cache: &Arc<WriteCache>) -> mpsc::Receiver<bool> {
        let (answer, answered) = mpsc::channel();
        for block in 0.. {
            let write = Waits { cache: Arc::clone(cache), block, answer: answer.clone() };
            if let Err(write) = Box::new(write).retry() {
                cache.queue_for_space(write);
                return answered;
            }
            assert!(answered.recv().unwrap());
        }
        unreachable!("it has less RAM than blocks");
    }

    /// A cache whose limit was lowered has much to pack, while another cache has work, too.
    #[test]
    fn a_cache_that_packs_much_does_not_keep_the_writes_of_others_waiting() {
        const SEGMENTS: u32 = 120;
        let dir = tempfile::tempdir().unwrap();
        let (host, _run) = Host::prepare(u64::MAX, open_engine().unwrap(), NoPressure);
        let shared = host.shared();
        let open = |ram_bytes, overflow| {
            let options = CacheOptions {
                name: "tested".into(),
                size_bytes: 1 << 40,
                ram_bytes,
                weight: DEFAULT_WEIGHT,
                overflow,
                pause_limit: Duration::from_secs(24 * 3600),
                persistent: None,
                base: None,
            };
            WriteCache::open(&options, &shared).unwrap()
        };
        let place = crate::OverflowOptions {
            at: dir.path().to_owned(),
            limit_bytes: 64 * MIB,
            buffering: crate::Buffering::Buffered,
            little_space: crate::LittleSpace::Refused,
        };
        let (packs, waits) = (open(1 << 30, Some(place)), open(16 * MIB, None));
        for block in 0..SEGMENTS * 512 {
            let wrote = packs.write(BlockNumber(block), &[7; BLOCK_BYTES as usize], Admission::New);
            assert_eq!(wrote, WriteResult::Done);
        }
        let answered = waiting_write(&waits);
        packs.set_ram_bytes(48 * MIB);
        let mut parts = Parts::new(Monitor::new(Box::new(NoPressure)));
        let packed = || packs.snapshot().packed_segments;
        // With a clock that is ahead, no round takes long; with one that is behind, each does.
        let (ahead, behind) = (Instant::now() + Duration::from_secs(3600), Instant::now() - PACKING_TIME_MAX);
        // Whether the next round follows at once.
        let mut turn = |now| {
            *shared.signal.lock() = false;
            let _ = shared.run_round(&shared.live_caches(), &mut parts, now);
            *shared.signal.lock()
        };
        for number in 1..=10 {
            assert!(turn(ahead));
            assert_eq!(packed(), number, "one in each round while others wait");
        }
        assert!(answered.try_recv().is_err());
        waits.set_ram_bytes(32 * MIB);
        assert!(turn(behind));
        assert!(answered.try_recv().unwrap() && packed() == 11, "it is answered while the other one packs");
        assert!(turn(behind));
        assert_eq!(packed(), 12, "one in each round that takes long");
        turn(ahead);
        assert!(packed() > u64::from(SEGMENTS / 2), "{:?}", packs.snapshot());
        assert_eq!(packs.snapshot().disk_used_bytes, 0, "what packs is not spilled because it had to wait");
    }

    #[test]
    fn what_is_packed_passes_through_memory_that_is_counted_and_not_dumped() {
        use crate::overflow::key_memory::tests::flags_of;
        let (host, _run) = Host::prepare(u64::MAX, open_engine().unwrap(), NoPressure);
        let shared = host.shared();
        let mut scratch = shared.scratch().unwrap();
        scratch.bytes().fill(1);
        assert!(flags_of(scratch.bytes().as_ptr().addr()).iter().any(|flag| flag == "dd"));
        assert_eq!((host.used_bytes(), shared.pool.warm_bytes()), (SEGMENT_BYTES as u64, 0));
        drop(scratch);
        assert_eq!((host.used_bytes(), shared.pool.warm_bytes()), (0, SEGMENT_BYTES as u64));
    }

    /// Counts reads of whole segments.
    struct CountsReads {
        real: Arc<dyn IoEngine>,
        reads: std::sync::atomic::AtomicU64,
    }

    impl IoEngine for CountsReads {
        fn submit(&self, op: IoOp) {
            if op.direction == Direction::Read && op.len == ENCRYPTED_SEGMENT_BYTES {
                self.reads.fetch_add(1, Ordering::Relaxed);
            }
            self.real.submit(op);
        }

        fn sync(&self, file: &std::fs::File) -> std::io::Result<()> {
            self.real.sync(file)
        }
    }

    /// Moved blocks take the RAM of clean copies, of which this cache is full.
    #[test]
    fn a_segment_is_read_once_to_be_cleaned() {
        const BLOCKS: u32 = 34 * 512;
        let dir = tempfile::tempdir().unwrap();
        let engine = Arc::new(CountsReads { real: open_engine().unwrap(), reads: AtomicU64::new(0) });
        let (host, _run) = Host::prepare(u64::MAX, engine.clone(), NoPressure);
        let shared = host.shared();
        let options = CacheOptions {
            name: "tested".into(),
            size_bytes: 1 << 30,
            ram_bytes: 40 * MIB,
            weight: DEFAULT_WEIGHT,
            overflow: Some(crate::OverflowOptions {
                at: dir.path().to_owned(),
                limit_bytes: 100 * MIB,
                buffering: crate::Buffering::Buffered,
                little_space: crate::LittleSpace::Refused,
            }),
            pause_limit: Duration::from_secs(24 * 3600),
            persistent: None,
            base: None,
        };
        let cache = WriteCache::open(&options, &shared).unwrap();
        let mut parts = Parts::new(Monitor::new(Box::new(NoPressure)));
        let mut turn = || {
            let _ = shared.run_round(&shared.live_caches(), &mut parts, Instant::now());
        };
        let mut rng = Rng::new(1);
        for number in 0..BLOCKS {
            let data = rng.bytes(BLOCK_BYTES as usize);
            wait_until("there is room", || {
                let wrote = cache.write(BlockNumber(number), &data, Admission::New);
                if wrote != WriteResult::Done && !cache.make_room() {
                    turn();
                }
                wrote == WriteResult::Done
            });
        }
        wait_until("nothing is on its way to the disk", || {
            turn();
            cache.log.lock().frozen_segments == 0
        });
        // Each segment is worth cleaning, and two of them fill more than one.
        for number in (0..BLOCKS).step_by(3) {
            cache.clear(BlockNumber(number), BlockNumber(number + 1), Location::ZERO, UnloggedBlocks::Stay);
        }
        assert_eq!(engine.reads.load(Ordering::Relaxed), 0);
        let used_bytes = cache.snapshot().disk_used_bytes;
        cache.set_disk_bytes(used_bytes + 3 * ENCRYPTED_SEGMENT_BYTES as u64);
        wait_until("places are free again", || {
            turn();
            cache.snapshot().disk_used_bytes + 3 * ENCRYPTED_SEGMENT_BYTES as u64 <= used_bytes
                && !cache.cleaner.is_busy()
        });
        let cleaned = cache.snapshot().cleaned_segments;
        assert!(cleaned > 6, "{:?}", cache.snapshot());
        assert_eq!(engine.reads.load(Ordering::Relaxed), cleaned);
    }

    #[test]
    fn a_share_that_rises_without_room_leaves_a_full_cache_full() {
        let (host, _run) = Host::prepare(u64::MAX, open_engine().unwrap(), NoPressure);
        let shared = host.shared();
        let cache = in_ram_only(1 << 30, &shared);
        let mut parts = Parts::new(Monitor::new(Box::new(NoPressure)));
        let mut now = Instant::now();
        let mut turn_at = |limit_bytes| {
            host.set_limit_bytes(limit_bytes);
            now += Duration::from_millis(200);
            let _ = shared.run_round(&shared.live_caches(), &mut parts, now);
        };
        cache.set_ram_bytes(16 * MIB);
        let answered = waiting_write(&cache);
        turn_at(u64::MAX);
        assert!(!answered.recv().unwrap() && cache.waiting.is_full(), "it is full at its own limit");
        for limit_mib in [9, 10, 11, 12] {
            let before = cache.share.bytes();
            turn_at(limit_mib * MIB);
            assert!(limit_mib == 9 || cache.share.bytes() > before, "its share rises at {limit_mib} MiB");
            assert!(cache.waiting.is_full(), "there is no room at {limit_mib} MiB");
        }
        // At the host's limit, a larger share gives space.
        cache.set_ram_bytes(64 * MIB);
        let (answer, answered) = mpsc::channel();
        let write = Waits { cache: Arc::clone(&cache), block: u32::MAX >> 14, answer };
        cache.queue_for_space(Box::new(write));
        turn_at(12 * MIB);
        assert!(!answered.recv().unwrap() && cache.waiting.is_full(), "it is full at the host's limit");
        turn_at(64 * MIB);
        assert!(!cache.waiting.is_full(), "there is room");
    }
}
