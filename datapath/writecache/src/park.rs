//! Writes that wait for space: the last steps of the ladder before "no space".
//!
//! A write that finds no slot is parked, in order of arrival. The host's thread tries the parked ones again
//! whenever space may have come back; one that has waited for the cache's pause limit is refused. From then
//! on the cache counts as full: a write that finds no slot is refused as soon as it is clear that nothing is
//! on its way that would free one, until there is room again or a limit is changed. The host's thread looks for room
//! whenever something was freed, so that a machine that only discards is no longer called full either.
//!
//! Before it comes to that, writes that are ahead of the disk are parked until it has caught up ([`crate::pace`]): apart, for
//! there is room for them. They go on all at once; of those that find none then, it is as above.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use headwater_block::{IoError, IoErrorKind};

use crate::cache::WriteCache;
use crate::counters::count;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{EXPLORED, Mutex};

/// A write that has waited for so long is worth a line in the log.
const TOLD_AFTER: Duration = Duration::from_secs(2);

/// A write that can be tried again.
pub trait Parked: Send {
    /// Tries again; gives itself back where there is still no room.
    fn retry(self: Box<Self>) -> Result<(), Box<dyn Parked>>;

    /// Ends with an error.
    fn refuse(self: Box<Self>, error: IoError);
}

struct Entry {
    write: Box<dyn Parked>,
    since: Instant,
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
    paced: Mutex<VecDeque<Box<dyn Parked>>>,
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
    /// Whether writes wait for space, or for a disk that is far behind; new ones then queue behind them.
    #[inline]
    pub fn has_waiting(&self) -> bool {
        self.waiting.any() || self.pace.is_ahead(&self.host.spinner)
    }

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

    /// Parks a write until there is room for it, or where writers are ahead of the disk, until it has caught up.
    pub fn park(&self, write: Box<dyn Parked>) {
        if self.waiting.any() || !self.pace.is_ahead(&self.host.spinner) {
            return self.park_for_room(write);
        }
        let mut paced = self.waiting.paced.lock();
        if self.waiting.closed.load(Ordering::Acquire) {
            drop(paced);
            return self.park_for_room(write);
        }
        paced.push_back(write);
        let is_first = paced.len() == 1;
        drop(paced);
        self.pace.count_parked();
        if is_first {
            // From now on its thread has to know when they go on.
            self.host.signal();
        }
    }

    /// Lets those go on that wait for the disk, once it has caught up. Returns when it will have.
    pub(crate) fn serve_paced(&self) -> Option<Instant> {
        let mut paced = self.waiting.paced.lock();
        if paced.is_empty() {
            return None;
        }
        let ahead = self.pace.ahead(&self.host.spinner);
        if !ahead.is_zero() {
            return Instant::now().checked_add(ahead);
        }
        let writes = std::mem::take(&mut *paced);
        drop(paced);
        for write in writes {
            if let Err(write) = write.retry() {
                self.park_for_room(write);
            }
        }
        None
    }

    fn park_for_room(&self, write: Box<dyn Parked>) {
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

    fn refuse(&self, write: Box<dyn Parked>) {
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
        self.pace.reset();
    }

    /// Where writes were refused and none waits: looks whether there is room by now. At the end of a turn of the host's thread.
    pub(crate) fn look_for_room(&self) {
        if self.waiting.is_full() && !self.waiting.any() && self.would_find_room() {
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
                Ok(()) => {
                    self.waited(entry.since);
                    self.has_room();
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
                    let look_again = if told { self.pause_limit } else { TOLD_AFTER.min(self.pause_limit) };
                    let deadline = entry.since.checked_add(look_again);
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
        if EXPLORED {
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
        // It is closed by now, and so they are refused.
        paced.into_iter().for_each(|write| self.park_for_room(write));
        self.persist.as_ref().map_or(Ok(()), |persist| persist.close())
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use std::sync::{Arc, mpsc};

    use headwater_block::BLOCK_BYTES;
    use headwater_testkit::wait_until;

    use super::*;
    use crate::cache::{CacheOptions, Turn, Wrote};
    use crate::host::Host;
    use crate::units::BlockNumber;

    const DATA: [u8; BLOCK_BYTES as usize] = [7; BLOCK_BYTES as usize];

    fn cache(host: &Host) -> Arc<WriteCache> {
        let options = CacheOptions {
            name: "tested".into(),
            size_bytes: 1 << 30,
            ram_bytes: 64 << 20,
            weight: crate::DEFAULT_WEIGHT,
            overflow: None,
            pause_limit: Duration::from_secs(3600),
            persistent: None,
            beneath: None,
        };
        WriteCache::open(&options, &host.shared()).unwrap()
    }

    /// A write of a block, which says how it ended.
    struct Write {
        cache: Arc<WriteCache>,
        block: u32,
        answer: mpsc::Sender<Result<(), IoErrorKind>>,
    }

    impl Parked for Write {
        fn retry(self: Box<Self>) -> Result<(), Box<dyn Parked>> {
            if self.cache.write(BlockNumber(self.block), &DATA, Turn::Waited) != Wrote::Done {
                return Err(self);
            }
            self.answer.send(Ok(())).unwrap();
            Ok(())
        }

        fn refuse(self: Box<Self>, error: IoError) {
            self.answer.send(Err(error.kind())).unwrap();
        }
    }

    /// Parks a write as one that is ahead of the disk. As nothing is short here, the host's thread may find that out before.
    fn park_ahead(cache: &Arc<WriteCache>, block: u32) -> mpsc::Receiver<Result<(), IoErrorKind>> {
        let before = cache.snapshot();
        let (answer, answered) = mpsc::channel();
        cache.pace.account_for(1 << 40);
        assert_eq!(cache.write(BlockNumber(block), &DATA, Turn::Rest), Wrote::Done);
        assert_eq!(cache.write(BlockNumber(block), &DATA, Turn::New), Wrote::Done, "in place");
        cache.park(Box::new(Write { cache: Arc::clone(cache), block: block + 1, answer }));
        let after = cache.snapshot();
        assert_eq!(after.paced_writes + after.paused_writes, before.paced_writes + before.paused_writes + 1);
        answered
    }

    #[test]
    fn a_write_that_waits_for_the_disk_goes_on_where_there_is_room() {
        let host = Host::start(u64::MAX).unwrap();
        let cache = cache(&host);
        for block in [0, 10, 20] {
            assert_eq!(park_ahead(&cache, block).recv().unwrap(), Ok(()));
        }
        assert!(cache.snapshot().paced_writes > 0);
        // Another limit: nobody knows yet how fast it is written out.
        let answered = park_ahead(&cache, 30);
        cache.set_ram_bytes(48 << 20);
        assert_eq!(answered.recv().unwrap(), Ok(()));
        wait_until("nobody is slowed down", || !cache.has_waiting() && !cache.pace.is_on());
    }

    #[test]
    fn a_write_that_waits_for_the_disk_is_refused_when_its_cache_is_closed() {
        let host = Host::start(u64::MAX).unwrap();
        for _ in 0..20 {
            let cache = cache(&host);
            let answered = park_ahead(&cache, 0);
            cache.close().unwrap();
            // Unless the disk had caught up just before.
            assert!(matches!(answered.recv().unwrap(), Ok(()) | Err(IoErrorKind::Closed)));
            assert!(answered.try_recv().is_err(), "answered twice");
        }
    }
}
