//! The queue of writes that wait for space, and the refusal with "no space".
//!
//! A write that finds no slot is queued, in order of arrival. The host's thread retries the queued writes
//! whenever space may have become free; a write that has waited for the cache's pause limit is refused. From
//! then on the cache counts as full: a write that finds no slot is refused as soon as it is clear that
//! nothing in progress will free one, until there is space again or a limit is changed. The host's thread
//! checks for space whenever anything was freed, so a cache whose machine only discards does not stay full
//! either.
//!
//! Before the cache is full, writes that are ahead of the disk are throttled ([`crate::throttle`]). They wait
//! in a queue of their own, because there is space for them, until the disk has caught up. Then they are
//! released, in order of arrival, for at most `SERVING_TIME_MAX` at a time; any that then find no space join
//! the queue above.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use headwater_block::{IoError, IoErrorKind};

use crate::cache::WriteCache;
use crate::counters::count;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Mutex, UNDER_MODEL_CHECKER};
use crate::throttle::MOST_AHEAD;

/// A write that has waited for this time is logged.
const LOG_AFTER: Duration = Duration::from_secs(2);

/// The host's thread releases throttled writes for at most this time, then does other work.
const SERVING_TIME_MAX: Duration = Duration::from_millis(2);

/// The result of a write that was retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryResult {
    /// It was stored.
    Stored,
    /// It failed, or has to fetch a block first and may be queued again. Whether there is space is unknown.
    Gone,
}

/// A write that can be retried.
pub trait QueuedWrite: Send {
    /// Retries the write; returns it if there is still no space.
    fn retry(self: Box<Self>) -> Result<RetryResult, Box<dyn QueuedWrite>>;

    /// Ends with an error.
    fn refuse(self: Box<Self>, error: IoError);
}

struct Entry {
    write: Box<dyn QueuedWrite>,
    since: Instant,
}

fn as_count(entries: &VecDeque<Entry>) -> u64 {
    u64::try_from(entries.len()).unwrap_or(u64::MAX)
}

/// The state of writes that find no space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shortage {
    /// Writes are refused: one waited for the whole pause limit, and nothing in progress frees space.
    pub refusing: bool,
    /// How long the first write in the queue has waited.
    pub waited: Duration,
}

/// The writes of one cache that wait: for space, or throttled.
#[derive(Default)]
pub struct Waiting {
    /// Writes that wait for space.
    queue: Mutex<VecDeque<Entry>>,
    count: AtomicUsize,
    full: AtomicBool,
    /// Whether the log says that writes wait.
    logged: std::sync::atomic::AtomicBool,
    closed: AtomicBool,
    /// Throttled writes, which wait until the disk has caught up.
    throttled: Mutex<VecDeque<Entry>>,
    /// The command that raises the limits, if the cache's owner named one.
    raised_by: std::sync::OnceLock<String>,
}

impl Waiting {
    /// Whether any write waits.
    #[inline]
    pub fn any(&self) -> bool {
        self.count.load(Ordering::Acquire) != 0
    }

    /// Whether free space has to be reported: a write waits, or the cache counts as full.
    #[inline]
    pub fn wants_room(&self) -> bool {
        self.any() || self.is_full()
    }

    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.full.load(Ordering::Acquire)
    }

    /// Whether a refusal or the log has said that there is no space.
    fn has_reported(&self) -> bool {
        self.is_full() || self.logged.load(Ordering::Relaxed)
    }

    /// Called when there is space: the cache does not count as full any more. Returns whether it did.
    fn note_space(&self) -> bool {
        self.logged.store(false, Ordering::Relaxed);
        self.is_full() && self.full.swap(false, Ordering::AcqRel)
    }

    /// Adds an entry at the end; returns it if the volume is closed. The flag is checked under the queue's
    /// lock, so that nothing is added after the last entries were refused.
    fn enqueue(&self, entry: Entry) -> Result<(), Entry> {
        let mut queue = self.queue.lock();
        if self.closed.load(Ordering::Acquire) {
            return Err(entry);
        }
        queue.push_back(entry);
        self.count.store(queue.len(), Ordering::Release);
        Ok(())
    }

    /// Takes all entries. Until some are put back, new writes do not queue: otherwise they would all go
    /// through the host's thread, one by one, as long as there is always another one that waits.
    fn take_all(&self) -> VecDeque<Entry> {
        let mut queue = self.queue.lock();
        self.count.store(0, Ordering::Release);
        std::mem::take(&mut *queue)
    }

    /// Puts entries back that found no space, before entries that were added meanwhile.
    fn put_back(&self, mut entries: VecDeque<Entry>) -> Result<(), VecDeque<Entry>> {
        let mut queue = self.queue.lock();
        if self.closed.load(Ordering::Acquire) {
            return Err(entries);
        }
        entries.append(&mut queue);
        *queue = entries;
        self.count.store(queue.len(), Ordering::Release);
        Ok(())
    }
}

impl WriteCache {
    /// Sets the command that log messages name for raising the limits. Only the first call has an effect.
    pub fn advise(&self, command: String) {
        let _ = self.waiting.raised_by.set(command);
    }

    /// The state of writes that find no space, at this moment.
    pub fn shortage(&self) -> Shortage {
        let first = self.waiting.queue.lock().front().map(|entry| entry.since);
        Shortage {
            refusing: self.waiting.is_full(),
            waited: first.map_or(Duration::ZERO, |since| since.elapsed()),
        }
    }

    /// Queues a write until the disk has caught up with earlier writes: the answer to
    /// [`WriteResult::Throttled`](crate::WriteResult::Throttled).
    pub fn queue_for_disk(&self, write: Box<dyn QueuedWrite>) {
        let entry = Entry { write, since: Instant::now() };
        let mut throttled = self.waiting.throttled.lock();
        if self.waiting.closed.load(Ordering::Acquire) {
            drop(throttled);
            return self.queue_for_space(entry.write);
        }
        throttled.push_back(entry);
        self.throttle.park();
        self.throttle.count_throttled();
        self.host.throttled_writes.fetch_add(1, Ordering::AcqRel);
        let is_first = throttled.len() == 1;
        drop(throttled);
        if is_first {
            // From now on the host's thread has to release the queue in time.
            self.host.signal();
        }
    }

    /// Releases the throttled writes if the disk has caught up, or if the first has waited for long enough.
    /// Returns when that will be.
    pub(crate) fn serve_throttled(&self, now: Instant) -> Option<Instant> {
        let mut entries = {
            let mut throttled = self.waiting.throttled.lock();
            let waited = now.saturating_duration_since(throttled.front()?.since);
            let left = self.throttle.ahead(&self.host.spinner).min(MOST_AHEAD.saturating_sub(waited));
            if !left.is_zero() {
                return now.checked_add(left);
            }
            self.throttle.unpark();
            // All of them at once: if a write panics, this round ends.
            self.host.throttled_writes.fetch_sub(as_count(&throttled), Ordering::AcqRel);
            std::mem::take(&mut *throttled)
        };
        let began = Instant::now();
        while let Some(entry) = entries.pop_front() {
            if let Err(write) = entry.write.retry() {
                self.queue_for_space(write);
            }
            // Time stands still while schedules are explored.
            if !UNDER_MODEL_CHECKER && began.elapsed() >= SERVING_TIME_MAX {
                break;
            }
        }
        self.put_back_throttled(entries)
    }

    /// Puts throttled writes back for which the host's thread had no time, before later ones. Returns when it
    /// continues.
    fn put_back_throttled(&self, mut entries: VecDeque<Entry>) -> Option<Instant> {
        if entries.is_empty() {
            return None;
        }
        let mut throttled = self.waiting.throttled.lock();
        if self.waiting.closed.load(Ordering::Acquire) {
            drop(throttled);
            self.refuse_closed_throttled(entries);
            return None;
        }
        self.throttle.park();
        self.host.throttled_writes.fetch_add(as_count(&entries), Ordering::AcqRel);
        entries.append(&mut throttled);
        *throttled = entries;
        Some(Instant::now())
    }

    /// Refuses throttled writes, because the volume is closed.
    fn refuse_closed_throttled(&self, entries: VecDeque<Entry>) {
        // This refuses each of them.
        entries.into_iter().for_each(|entry| self.queue_for_space(entry.write));
    }

    /// Queues a write until there is space for it.
    pub fn queue_for_space(&self, write: Box<dyn QueuedWrite>) {
        count(&self.counters.paused_writes, 1);
        self.host.waiting_writes.fetch_add(1, Ordering::AcqRel);
        let entry = Entry { write, since: Instant::now() };
        if let Err(entry) = self.waiting.enqueue(entry) {
            self.refuse_closed(entry);
        }
        self.host.signal();
    }

    /// Refuses a write because the volume is closed.
    fn refuse_closed(&self, entry: Entry) {
        self.waited(entry.since);
        entry.write.refuse(IoError::new(IoErrorKind::Closed, "the volume is closed"));
    }

    fn refuse(&self, write: Box<dyn QueuedWrite>) {
        count(&self.counters.refused_writes, 1);
        write.refuse(IoError::new(
            IoErrorKind::NoSpace,
            "the write cache is full: raise its RAM or disk limit, or free space in the guest",
        ));
    }

    /// Called after a change of a limit: waiting writes get the whole pause limit again.
    pub(crate) fn not_full(&self) {
        self.waiting.full.store(false, Ordering::Release);
        self.waiting.logged.store(false, Ordering::Relaxed);
        self.throttle.reset();
    }

    /// If writes were refused, or the log says that they wait, and none waits now: checks whether there is
    /// space again. Called at the end of a round of the host's thread.
    pub(crate) fn check_for_space(&self) {
        if self.waiting.has_reported() && !self.waiting.any() && self.would_find_room() {
            self.note_space();
        }
    }

    fn note_space(&self) {
        if self.waiting.note_space() && self.may_log_space() {
            tracing::info!("volume '{}': the write cache has space again", self.name);
        }
    }

    /// Whether another log line about space is allowed. Without this limit, a machine that discards and
    /// writes at its limit would fill the log.
    fn may_log_space(&self) -> bool {
        self.shortages.may_tell(&self.name)
    }

    /// Retries the queued writes. `hopeless`: nothing in progress frees space. Returns when the next write
    /// has to be refused.
    pub(crate) fn serve_waiting(&self, now: Instant, hopeless: bool) -> Option<Instant> {
        if !self.waiting.any() {
            return None;
        }
        let mut entries = self.waiting.take_all();
        while let Some(entry) = entries.pop_front() {
            match entry.write.retry() {
                Ok(retried) => {
                    self.waited(entry.since);
                    if retried == RetryResult::Stored {
                        self.note_space();
                    }
                }
                Err(write)
                    if now.saturating_duration_since(entry.since) >= self.pause_limit
                        || (hopeless && self.waiting.is_full()) =>
                {
                    self.waited(entry.since);
                    if !self.waiting.full.swap(true, Ordering::AcqRel) && self.may_log_space() {
                        tracing::error!(
                            pause_s = self.pause_limit.as_secs_f64(),
                            "volume '{}': the write cache is full; writes are refused until there is space: {}",
                            self.name,
                            self.advice_on_space()
                        );
                    }
                    self.refuse(write);
                }
                Err(write) => {
                    let logged = self.log_waiting(now.saturating_duration_since(entry.since));
                    let next_step_after =
                        if logged { self.pause_limit } else { LOG_AFTER.min(self.pause_limit) };
                    let deadline = entry.since.checked_add(next_step_after);
                    entries.push_front(Entry { write, since: entry.since });
                    match self.waiting.put_back(entries) {
                        Ok(()) => return deadline,
                        Err(left) => {
                            left.into_iter().for_each(|entry| self.refuse_closed(entry));
                            return None;
                        }
                    }
                }
            }
        }
        None
    }

    /// For a message: what to do for more space. If the host's limit is the cause, raising the cache's own would
    /// not help.
    fn advice_on_space(&self) -> String {
        let is_on_disk = self.overflow.is_some();
        let limits = if is_on_disk { "RAM or disk limit" } else { "RAM limit" };
        let command = self.waiting.raised_by.get();
        let command = command.map_or_else(String::new, |command| format!(" with '{command}'"));
        let mut text = format!("raise its {limits}{command}");
        if self.has_less_than_its_limit() {
            text.push_str(
                ", but first that of all write caches (--cache-ram), because it leaves this cache less",
            );
        }
        if is_on_disk {
            text.push_str("; or free space on the overflow disk");
        }
        text
    }

    /// Logs that writes wait, once for each time that they do. Returns whether it has been logged.
    fn log_waiting(&self, waited: Duration) -> bool {
        if UNDER_MODEL_CHECKER {
            return true;
        }
        let due = waited >= LOG_AFTER;
        if due && !self.waiting.logged.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                waited_s = waited.as_secs_f64(),
                pause_s = self.pause_limit.as_secs_f64(),
                "volume '{}': writes wait for space in the write cache: {}",
                self.name,
                self.advice_on_space()
            );
        }
        due
    }

    fn waited(&self, since: Instant) {
        self.host.waiting_writes.fetch_sub(1, Ordering::AcqRel);
        let ns = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        count(&self.counters.paused_ns, ns);
    }

    /// Refuses all waiting writes, now and from now on: the volume is closing. A persistent cache is flushed;
    /// the result is that of the flush.
    pub fn close(&self) -> Result<(), IoError> {
        let left = {
            let mut queue = self.waiting.queue.lock();
            self.waiting.closed.store(true, Ordering::Release);
            self.waiting.count.store(0, Ordering::Release);
            std::mem::take(&mut *queue)
        };
        left.into_iter().for_each(|entry| self.refuse_closed(entry));
        let throttled = std::mem::take(&mut *self.waiting.throttled.lock());
        self.host.throttled_writes.fetch_sub(as_count(&throttled), Ordering::AcqRel);
        self.refuse_closed_throttled(throttled);
        self.persist.as_ref().map_or(Ok(()), |persist| persist.close())
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use std::sync::{Arc, mpsc};

    use headwater_block::BLOCK_BYTES;
    use headwater_testkit::wait_until;

    use super::*;
    use crate::cache::{
        Admission, CacheOptions, LittleSpace, OverflowOptions, Residence, UnloggedBlocks, WriteResult,
    };
    use crate::host::{Host, STAGING_BUFFERS};
    use crate::overflow::buffering::Buffering;
    use crate::overflow::io::open_engine;
    use crate::pressure::NoPressure;
    use crate::units::{BlockNumber, Location};

    const DATA: [u8; BLOCK_BYTES as usize] = [7; BLOCK_BYTES as usize];

    const MIB: u64 = 1 << 20;

    fn host() -> Host {
        // The host's thread is not started: the tests run its rounds.
        Host::prepare(u64::MAX, open_engine().unwrap(), NoPressure).0
    }

    fn options() -> CacheOptions {
        CacheOptions {
            name: "tested".into(),
            size_bytes: 1 << 30,
            ram_bytes: 32 * MIB,
            weight: crate::DEFAULT_WEIGHT,
            overflow: None,
            pause_limit: Duration::from_secs(3600),
            persistent: None,
            base: None,
        }
    }

    fn cache(host: &Host) -> Arc<WriteCache> {
        WriteCache::open(&options(), &host.shared()).unwrap()
    }

    /// Fills a cache with incompressible blocks until there is no space and nothing in progress would free
    /// any. Returns the first block that was not stored.
    fn fill(cache: &Arc<WriteCache>) -> u32 {
        let mut rng = headwater_testkit::Rng::new(2);
        let moves = || cache.log.lock().frozen_segments > 0 || cache.cleaner.is_busy();
        let mut block = 0;
        wait_until("it is full", || {
            let (moved, before) = (moves(), block);
            loop {
                match cache.write(BlockNumber(block), &rng.bytes(DATA.len()), Admission::Waited) {
                    WriteResult::Done => block += 1,
                    _ if cache.make_room() => {}
                    _ => break,
                }
            }
            let _ = cache.work(Instant::now());
            !moved && block == before && !moves() && !cache.log.lock().has_untried()
        });
        block
    }

    /// A write of a block that reports its result.
    struct Write {
        cache: Arc<WriteCache>,
        block: u32,
        takes: Duration,
        answer: mpsc::Sender<Result<(), IoErrorKind>>,
    }

    impl QueuedWrite for Write {
        fn retry(self: Box<Self>) -> Result<RetryResult, Box<dyn QueuedWrite>> {
            std::thread::sleep(self.takes);
            while self.cache.write(BlockNumber(self.block), &DATA, Admission::Waited) != WriteResult::Done {
                if !self.cache.make_room() {
                    return Err(self);
                }
            }
            self.answer.send(Ok(())).unwrap();
            Ok(RetryResult::Stored)
        }

        fn refuse(self: Box<Self>, error: IoError) {
            self.answer.send(Err(error.kind())).unwrap();
        }
    }

    type Answer = mpsc::Receiver<Result<(), IoErrorKind>>;

    fn write(cache: &Arc<WriteCache>, block: u32, takes: Duration) -> (Box<Write>, Answer) {
        let (answer, answered) = mpsc::channel();
        (Box::new(Write { cache: Arc::clone(cache), block, takes, answer }), answered)
    }

    fn park(cache: &Arc<WriteCache>, block: u32, takes: Duration) -> Answer {
        let (write, answered) = write(cache, block, takes);
        cache.queue_for_disk(write);
        answered
    }

    fn wait_for_room(cache: &Arc<WriteCache>, block: u32) -> Answer {
        let (write, answered) = write(cache, block, Duration::ZERO);
        cache.queue_for_space(write);
        answered
    }

    const START_NS: u64 = 1_000_000_000;
    const SLOT_NS: u64 = 100_000;

    fn new(cache: &WriteCache, block: u32) -> WriteResult {
        cache.write(BlockNumber(block), &DATA, Admission::New)
    }

    /// A cache with little space whose writers are ahead of the disk by 0.6 ms, and the first block that was
    /// not stored.
    fn ahead(host: &Host) -> (Arc<WriteCache>, u32) {
        let cache = cache(host);
        let spinner = &cache.host.spinner;
        spinner.set_clock(START_NS);
        let mut rng = headwater_testkit::Rng::new(1);
        let mut block = 0;
        while !cache.throttle.is_on() {
            for _ in 0..crate::units::SLOTS {
                // Incompressible.
                assert_eq!(
                    cache.write(BlockNumber(block), &rng.bytes(DATA.len()), Admission::New),
                    WriteResult::Done
                );
                block += 1;
            }
            cache.throttle.account_for(SLOT_NS);
            // This ends throttling if there is space.
            let _ = cache.work(Instant::now());
        }
        while new(&cache, block) == WriteResult::Done {
            block += 1;
        }
        assert_eq!(
            (new(&cache, block), new(&cache, 0)),
            (WriteResult::Throttled, WriteResult::Done),
            "one is in place"
        );
        (cache, block)
    }

    #[test]
    fn a_write_that_waits_for_the_disk_goes_on_when_it_has_caught_up() {
        let host = host();
        let (cache, block) = ahead(&host);
        let spinner = &cache.host.spinner;
        let [first, second] = [block, block + 1].map(|block| park(&cache, block, Duration::ZERO));
        assert_eq!(cache.host.throttled_writes.load(Ordering::Relaxed), 2);
        spinner.set_clock(START_NS + 4 * SLOT_NS);
        let now = Instant::now();
        let next = cache.work(now).deadline.unwrap();
        assert!(next > now && next < now + Duration::from_secs(10));
        assert!(first.try_recv().is_err() && second.try_recv().is_err());
        // By itself it would not have to wait any more.
        assert_eq!(new(&cache, block + 2), WriteResult::Throttled, "there are others before it");
        assert_eq!(
            cache.write(BlockNumber(block + 3), &DATA, Admission::Rest),
            WriteResult::Done,
            "it has begun"
        );
        spinner.set_clock(START_NS + 6 * SLOT_NS);
        assert_eq!(cache.work(Instant::now()).deadline, None);
        assert_eq!((first.try_recv(), second.try_recv()), (Ok(Ok(())), Ok(Ok(()))));
        assert_eq!(new(&cache, block + 2), WriteResult::Done);
        assert_eq!(cache.host.throttled_writes.load(Ordering::Relaxed), 0);
        let counted = cache.snapshot();
        assert_eq!((counted.throttled_writes, counted.paused_writes), (2, 0));
    }

    #[test]
    fn nobody_waits_for_the_disk_for_ever() {
        let host = host();
        let (cache, block) = ahead(&host);
        let before = Instant::now();
        let answered = park(&cache, block, Duration::ZERO);
        let after = Instant::now();
        // The clock that counts the disk's work stands still.
        assert!(cache.serve_throttled(before + MOST_AHEAD - Duration::from_nanos(1)).is_some());
        assert!(answered.try_recv().is_err());
        assert!(cache.serve_throttled(after + MOST_AHEAD).is_none());
        assert_eq!(answered.try_recv(), Ok(Ok(())));
    }

    #[test]
    fn another_limit_ends_the_wait_for_the_disk() {
        let host = host();
        let (cache, block) = ahead(&host);
        let answered = park(&cache, block, Duration::ZERO);
        cache.set_ram_bytes(48 * MIB);
        let _ = cache.work(Instant::now());
        assert_eq!(answered.try_recv(), Ok(Ok(())));
        assert!(!cache.throttle.is_on());
    }

    #[test]
    fn those_that_go_on_do_not_take_the_hosts_thread_for_long() {
        let host = host();
        let (cache, block) = ahead(&host);
        let all = [0, 1, 2].map(|next| park(&cache, block + next, SERVING_TIME_MAX));
        for turn in 1..=all.len() {
            cache.host.spinner.set_clock(START_NS + (6 + turn as u64) * SLOT_NS);
            let next = cache.serve_throttled(Instant::now());
            assert_eq!(next.is_some(), turn < all.len());
            let served = all.each_ref().map(|answered| answered.try_recv().is_ok());
            assert_eq!(served, [0, 1, 2].map(|place| place + 1 == turn), "one at a time, in order");
            assert_eq!(cache.host.throttled_writes.load(Ordering::Relaxed), (all.len() - turn) as u64);
        }
    }

    #[test]
    fn a_write_that_waits_for_the_disk_is_refused_when_its_cache_is_closed() {
        let host = host();
        let (cache, block) = ahead(&host);
        let answered = park(&cache, block, Duration::ZERO);
        cache.close().unwrap();
        assert_eq!(answered.try_recv(), Ok(Err(IoErrorKind::Closed)));
        assert_eq!(park(&cache, block, Duration::ZERO).try_recv(), Ok(Err(IoErrorKind::Closed)));
        assert!(answered.try_recv().is_err(), "answered twice");
        assert_eq!(cache.host.throttled_writes.load(Ordering::Relaxed), 0);
        assert_eq!(cache.host.waiting_writes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn the_host_has_those_go_on_that_wait_for_the_disk() {
        let host = Host::start(u64::MAX).unwrap();
        let cache = cache(&host);
        for block in [0, 10, 20] {
            cache.throttle.account_for(1 << 40);
            assert_eq!(cache.write(BlockNumber(block), &DATA, Admission::Rest), WriteResult::Done);
            // It finds that there is space.
            assert_eq!(park(&cache, block + 1, Duration::ZERO).recv().unwrap(), Ok(()));
        }
    }

    #[test]
    fn a_full_cache_refuses_nothing_while_cleaning_waits_for_a_staging_buffer() {
        let dir = tempfile::tempdir().unwrap();
        let host = host();
        let place = OverflowOptions {
            at: dir.path().to_owned(),
            limit_bytes: 32 * MIB,
            buffering: Buffering::Buffered,
            little_space: LittleSpace::Refused,
        };
        let options = CacheOptions { overflow: Some(place), ..options() };
        let cache = WriteCache::open(&options, &host.shared()).unwrap();
        let block = fill(&cache);
        let refused = wait_for_room(&cache, block);
        // On a busy host, a segment may still be on its way to the disk.
        wait_until("the write is refused", || {
            let _ = cache.work(Instant::now() + cache.pause_limit);
            refused.try_recv() == Ok(Err(IoErrorKind::NoSpace))
        });
        assert!(cache.waiting.is_full());
        // Other caches of the host have all staging buffers.
        let buffers: Vec<_> = (0..STAGING_BUFFERS).map(|_| cache.host.take_staging().unwrap()).collect();
        // Dead blocks on the disk are worth cleaning; dead blocks in RAM would give space at once.
        let is_on_disk = |number: &u32| cache.residence(BlockNumber(*number)) == Residence::Disk;
        for number in (0..block).step_by(3).filter(is_on_disk) {
            cache.clear(BlockNumber(number), BlockNumber(number + 1), Location::ZERO, UnloggedBlocks::Stay);
        }
        let answered = wait_for_room(&cache, block);
        let _ = cache.work(Instant::now());
        assert_eq!(answered.try_recv(), Err(mpsc::TryRecvError::Empty), "it is refused for want of a buffer");
        buffers.into_iter().for_each(|buffer| cache.host.give_staging(buffer));
        let mut answer = None;
        wait_until("it is answered", || {
            let _ = cache.work(Instant::now());
            answer = answered.try_recv().ok();
            answer.is_some()
        });
        assert_eq!(answer, Some(Ok(())));
        assert!(cache.snapshot().cleaned_segments > 0 && !cache.waiting.is_full());
    }

    /// A write whose block has moved meanwhile, so that it has to fetch the rest again.
    struct Moved(mpsc::Sender<()>);

    impl QueuedWrite for Moved {
        fn retry(self: Box<Self>) -> Result<RetryResult, Box<dyn QueuedWrite>> {
            self.0.send(()).unwrap();
            Ok(RetryResult::Gone)
        }

        fn refuse(self: Box<Self>, error: IoError) {
            panic!("it is refused: {error}");
        }
    }

    #[test]
    fn a_write_that_goes_on_elsewhere_is_no_sign_of_room() {
        let host = host();
        let cache = cache(&host);
        let block = fill(&cache);
        cache.waiting.full.store(true, Ordering::Release);
        let (sender, moved) = mpsc::channel();
        cache.queue_for_space(Box::new(Moved(sender)));
        let _ = cache.work(Instant::now());
        assert!(moved.try_recv().is_ok() && cache.waiting.is_full());
        assert_eq!(cache.host.waiting_writes.load(Ordering::Relaxed), 0);
        // The next write is refused at once.
        let refused = wait_for_room(&cache, block);
        let _ = cache.work(Instant::now());
        assert_eq!(refused.try_recv(), Ok(Err(IoErrorKind::NoSpace)));
        cache.clear(BlockNumber(0), BlockNumber(block), Location::ZERO, UnloggedBlocks::Stay);
        let _ = cache.work(Instant::now());
        assert!(!cache.waiting.is_full(), "there is room");
    }

    #[test]
    fn that_writes_wait_is_told_anew_once_there_was_room() {
        let host = host();
        let cache = cache(&host);
        cache.waiting.logged.store(true, Ordering::Relaxed);
        let (sender, moved) = mpsc::channel();
        cache.queue_for_space(Box::new(Moved(sender)));
        let _ = cache.work(Instant::now());
        assert!(moved.try_recv().is_ok() && !cache.waiting.logged.load(Ordering::Relaxed));
    }
}
