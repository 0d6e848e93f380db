//! Writes that wait for space: the last steps of the ladder before "no space".
//!
//! A write that finds no slot is parked, in order of arrival. The host's thread tries the parked ones again
//! whenever space may have come back; one that has waited for the cache's pause limit is refused. From then
//! on the cache counts as full: a write that finds no slot is refused as soon as it is clear that nothing is
//! on its way that would free one, until there is room again or a limit is changed. The host's thread looks for room
//! whenever something was freed, so that a machine that only discards is no longer called full either.
//!
//! Before it comes to that, writes that are ahead of the disk are parked until it has caught up ([`crate::throttle`]): apart, for
//! there is room for them. They go on all at once, in order of arrival; of those that find none then, it is as above.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use headwater_block::{IoError, IoErrorKind};

use crate::cache::WriteCache;
use crate::counters::count;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Mutex, UNDER_MODEL_CHECKER};
use crate::throttle::MOST_AHEAD;

/// A write that has waited for so long is worth a line in the log.
const TOLD_AFTER: Duration = Duration::from_secs(2);

/// Those that waited for the disk are let go on for so long before the host's thread does something else.
const SERVING_TURN: Duration = Duration::from_millis(2);

/// What became of a write that was tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryResult {
    /// There was room for it.
    Stored,
    /// It went on elsewhere, and may come again; or it failed. That does not tell whether there is room.
    Gone,
}

/// A write that can be tried again.
pub trait QueuedWrite: Send {
    /// Tries again; gives itself back where there is still no room.
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

/// How writes fare that find no room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shortage {
    /// Writes are refused: one waited for the whole of the pause limit, and nothing frees space.
    pub refusing: bool,
    /// How long the write that came first has waited.
    pub waited: Duration,
}

/// The parked writes of one cache.
#[derive(Default)]
pub struct Waiting {
    queue: Mutex<VecDeque<Entry>>,
    count: AtomicUsize,
    full: AtomicBool,
    /// The log has it that writes wait.
    told: std::sync::atomic::AtomicBool,
    closed: AtomicBool,
    /// Those that wait for the disk to catch up.
    paced: Mutex<VecDeque<Entry>>,
    /// What raises the limits, where the cache's owner said so.
    raised_by: std::sync::OnceLock<String>,
}

impl Waiting {
    /// Whether any write waits.
    #[inline]
    pub fn any(&self) -> bool {
        self.count.load(Ordering::Acquire) != 0
    }

    /// Whether somebody wants to hear of room: a write that waits, or who was told that the cache is full.
    #[inline]
    pub fn wants_room(&self) -> bool {
        self.any() || self.is_full()
    }

    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.full.load(Ordering::Acquire)
    }

    /// Whether somebody was told that there is no room: a write that was refused, or the log.
    fn has_told(&self) -> bool {
        self.is_full() || self.told.load(Ordering::Relaxed)
    }

    /// There is room: the cache does not count as full any more. Whether it did.
    fn has_room(&self) -> bool {
        self.told.store(false, Ordering::Relaxed);
        self.is_full() && self.full.swap(false, Ordering::AcqRel)
    }

    /// Adds an entry at the end; gives it back once the volume is closed. The flag is looked at under the
    /// queue's lock, so that nothing is added after the last ones were refused.
    fn enqueue(&self, entry: Entry) -> Result<(), Entry> {
        let mut queue = self.queue.lock();
        if self.closed.load(Ordering::Acquire) {
            return Err(entry);
        }
        queue.push_back(entry);
        self.count.store(queue.len(), Ordering::Release);
        Ok(())
    }

    /// Takes all that wait. Until some are put back, new writes do not queue: they would all go through the
    /// host's thread, one by one, as long as there is always another that waits.
    fn take_all(&self) -> VecDeque<Entry> {
        let mut queue = self.queue.lock();
        self.count.store(0, Ordering::Release);
        std::mem::take(&mut *queue)
    }

    /// Puts those that found no room back, before what came meanwhile.
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
    /// Has the log name the command that raises the limits. The first one stays.
    pub fn advise(&self, command: String) {
        let _ = self.waiting.raised_by.set(command);
    }

    /// How writes that find no room fare at this moment.
    pub fn shortage(&self) -> Shortage {
        let first = self.waiting.queue.lock().front().map(|entry| entry.since);
        Shortage {
            refusing: self.waiting.is_full(),
            waited: first.map_or(Duration::ZERO, |since| since.elapsed()),
        }
    }

    /// Parks a write until the disk has caught up with those before it: the answer to [`WriteResult::Throttled`](crate::Wrote::Ahead).
    pub fn queue_for_disk(&self, write: Box<dyn QueuedWrite>) {
        let entry = Entry { write, since: Instant::now() };
        let mut paced = self.waiting.paced.lock();
        if self.waiting.closed.load(Ordering::Acquire) {
            drop(paced);
            return self.queue_for_space(entry.write);
        }
        paced.push_back(entry);
        self.throttle.park();
        self.throttle.count_throttled();
        self.host.throttled_writes.fetch_add(1, Ordering::AcqRel);
        let is_first = paced.len() == 1;
        drop(paced);
        if is_first {
            // From now on its thread has to know when they go on.
            self.host.signal();
        }
    }

    /// Lets those go on that wait for the disk, once it has caught up, or the first has waited for long enough. Returns when that
    /// will be.
    pub(crate) fn serve_throttled(&self, now: Instant) -> Option<Instant> {
        let mut entries = {
            let mut paced = self.waiting.paced.lock();
            let waited = now.saturating_duration_since(paced.front()?.since);
            let left = self.throttle.ahead(&self.host.spinner).min(MOST_AHEAD.saturating_sub(waited));
            if !left.is_zero() {
                return now.checked_add(left);
            }
            self.throttle.unpark();
            // Of them all: a write that panics ends this turn.
            self.host.throttled_writes.fetch_sub(as_count(&paced), Ordering::AcqRel);
            std::mem::take(&mut *paced)
        };
        let began = Instant::now();
        while let Some(entry) = entries.pop_front() {
            if let Err(write) = entry.write.retry() {
                self.queue_for_space(write);
            }
            // Time stands still where schedules are explored.
            if !UNDER_MODEL_CHECKER && began.elapsed() >= SERVING_TURN {
                break;
            }
        }
        self.put_back_throttled(entries)
    }

    /// Puts those back that the host's thread had no time for, before what came meanwhile. Returns when it goes on.
    fn put_back_throttled(&self, mut entries: VecDeque<Entry>) -> Option<Instant> {
        if entries.is_empty() {
            return None;
        }
        let mut paced = self.waiting.paced.lock();
        if self.waiting.closed.load(Ordering::Acquire) {
            drop(paced);
            self.leave_throttled(entries);
            return None;
        }
        self.throttle.park();
        self.host.throttled_writes.fetch_add(as_count(&entries), Ordering::AcqRel);
        entries.append(&mut paced);
        *paced = entries;
        Some(Instant::now())
    }

    /// Refuses writes that wait for the disk, because the volume is closed.
    fn leave_throttled(&self, entries: VecDeque<Entry>) {
        // Which refuses each.
        entries.into_iter().for_each(|entry| self.queue_for_space(entry.write));
    }

    /// Parks a write until there is room for it.
    pub fn queue_for_space(&self, write: Box<dyn QueuedWrite>) {
        count(&self.counters.paused_writes, 1);
        self.host.waiting_writes.fetch_add(1, Ordering::AcqRel);
        let entry = Entry { write, since: Instant::now() };
        if let Err(entry) = self.waiting.enqueue(entry) {
            self.leave(entry);
        }
        self.host.signal();
    }

    /// Refuses a write because the volume is closed.
    fn leave(&self, entry: Entry) {
        self.waited(entry.since);
        entry.write.refuse(IoError::new(IoErrorKind::Closed, "the volume is closed"));
    }

    fn refuse(&self, write: Box<dyn QueuedWrite>) {
        count(&self.counters.refused_writes, 1);
        write.refuse(IoError::new(
            IoErrorKind::NoSpace,
            "the write cache is full: raise its RAM or disk limit, or free space in the machine",
        ));
    }

    /// A limit was changed: what waits gets its whole time again.
    pub(crate) fn not_full(&self) {
        self.waiting.full.store(false, Ordering::Release);
        self.waiting.told.store(false, Ordering::Relaxed);
        self.throttle.reset();
    }

    /// Where writes were refused, or the log has it that they wait, and none does: looks whether there is room by now. At the end of
    /// a turn of the host's thread.
    pub(crate) fn look_for_room(&self) {
        if self.waiting.has_told() && !self.waiting.any() && self.would_find_room() {
            self.has_room();
        }
    }

    fn has_room(&self) {
        if self.waiting.has_room() && self.may_tell_of_room() {
            tracing::info!("volume '{}': the write cache has room again", self.name);
        }
    }

    /// Whether the log takes another line about room. Without a pause a machine that discards and writes at its limit would fill it.
    fn may_tell_of_room(&self) -> bool {
        self.shortages.may_tell(&self.name)
    }

    /// Tries the parked writes again. `hopeless`: nothing is on its way that would free space. Returns when
    /// the next one is to be refused.
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
                        self.has_room();
                    }
                }
                Err(write)
                    if now.saturating_duration_since(entry.since) >= self.pause_limit
                        || (hopeless && self.waiting.is_full()) =>
                {
                    self.waited(entry.since);
                    if !self.waiting.full.swap(true, Ordering::AcqRel) && self.may_tell_of_room() {
                        tracing::error!(
                            pause_s = self.pause_limit.as_secs_f64(),
                            "volume '{}': the write cache is full; writes are refused until space is there{}",
                            self.name,
                            self.raised_by()
                        );
                    }
                    self.refuse(write);
                }
                Err(write) => {
                    let told = self.tell(now.saturating_duration_since(entry.since));
                    let scan_for_duplicates =
                        if told { self.pause_limit } else { TOLD_AFTER.min(self.pause_limit) };
                    let deadline = entry.since.checked_add(scan_for_duplicates);
                    entries.push_front(Entry { write, since: entry.since });
                    match self.waiting.put_back(entries) {
                        Ok(()) => return deadline,
                        Err(left) => {
                            left.into_iter().for_each(|entry| self.leave(entry));
                            return None;
                        }
                    }
                }
            }
        }
        None
    }

    /// For a message: what raises the limits, in parentheses. Its own would not help where the host's is what is short.
    fn raised_by(&self) -> String {
        let command = self.waiting.raised_by.get();
        let mut text = command.map_or_else(String::new, |command| format!(" ('{command}')"));
        if self.has_less_than_its_limit() {
            text.push_str(", after that of all write caches together (--cache-ram), which leaves it less");
        }
        text
    }

    /// Has the log say that writes wait, once for each time that they do. Whether it does by now.
    fn tell(&self, waited: Duration) -> bool {
        if UNDER_MODEL_CHECKER {
            return true;
        }
        let due = waited >= TOLD_AFTER;
        if due && !self.waiting.told.swap(true, Ordering::Relaxed) {
            let raised_by = self.raised_by();
            let what_to_do = if self.overflow.is_some() {
                format!("raise its RAM or disk limit{raised_by}, or free space on the overflow disk")
            } else {
                format!("raise its RAM limit{raised_by}")
            };
            tracing::warn!(
                waited_s = waited.as_secs_f64(),
                pause_s = self.pause_limit.as_secs_f64(),
                "volume '{}': writes wait for room in the write cache: {what_to_do}",
                self.name
            );
        }
        due
    }

    fn waited(&self, since: Instant) {
        self.host.waiting_writes.fetch_sub(1, Ordering::AcqRel);
        let ns = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        count(&self.counters.paused_ns, ns);
    }

    /// Refuses what waits, now and from now on: the volume is closing. A persistent cache is flushed, and this says what came of it.
    pub fn close(&self) -> Result<(), IoError> {
        let left = {
            let mut queue = self.waiting.queue.lock();
            self.waiting.closed.store(true, Ordering::Release);
            self.waiting.count.store(0, Ordering::Release);
            std::mem::take(&mut *queue)
        };
        left.into_iter().for_each(|entry| self.leave(entry));
        let paced = std::mem::take(&mut *self.waiting.paced.lock());
        self.host.throttled_writes.fetch_sub(as_count(&paced), Ordering::AcqRel);
        self.leave_throttled(paced);
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
        // Its thread does not run: the tests take its turns.
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

    /// Fills a cache with what does not get smaller, until there is no room and nothing moves that would make some. The first block
    /// that it has not.
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

    /// A write of a block, which says how it ended.
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

    /// A cache with little room whose writers are ahead of the disk by 0.6 ms, and the next block that it has not.
    fn ahead(host: &Host) -> (Arc<WriteCache>, u32) {
        let cache = cache(host);
        let spinner = &cache.host.spinner;
        spinner.set_clock(START_NS);
        let mut rng = headwater_testkit::Rng::new(1);
        let mut block = 0;
        while !cache.throttle.is_on() {
            for _ in 0..crate::units::SLOTS {
                // Nothing that gets smaller.
                assert_eq!(
                    cache.write(BlockNumber(block), &rng.bytes(DATA.len()), Admission::New),
                    WriteResult::Done
                );
                block += 1;
            }
            cache.throttle.account_for(SLOT_NS);
            // Which ends pacing where there is room.
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
        // It would not have to wait for itself by now.
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
        // The clock that counts what the disk has done stands still.
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
        let all = [0, 1, 2].map(|next| park(&cache, block + next, SERVING_TURN));
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
            // It finds that there is room.
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
        let _ = cache.work(Instant::now() + cache.pause_limit);
        assert!(refused.try_recv() == Ok(Err(IoErrorKind::NoSpace)) && cache.waiting.is_full());
        // Other caches of the host have them all.
        let buffers: Vec<_> = (0..STAGING_BUFFERS).map(|_| cache.host.take_staging().unwrap()).collect();
        // What dies on the disk is worth cleaning; in RAM it would be room.
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

    /// A write whose block has moved meanwhile, so that it has to fetch the rest of it once more.
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
        let (tell, told) = mpsc::channel();
        cache.queue_for_space(Box::new(Moved(tell)));
        let _ = cache.work(Instant::now());
        assert!(told.try_recv().is_ok() && cache.waiting.is_full());
        assert_eq!(cache.host.waiting_writes.load(Ordering::Relaxed), 0);
        // The next one is refused at once.
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
        cache.waiting.told.store(true, Ordering::Relaxed);
        let (tell, told) = mpsc::channel();
        cache.queue_for_space(Box::new(Moved(tell)));
        let _ = cache.work(Instant::now());
        assert!(told.try_recv().is_ok() && !cache.waiting.told.load(Ordering::Relaxed));
    }
}
