//! A cache of uncompressed, checked chunks in memory, shared by all machines of the host. (`disk_cache`
//! keeps compressed chunks on a local disk.)
//!
//! A chunk's *place* is a data object and an offset in it. Equal chunks can have several places.
//!
//! | state of a chunk | a reader looks it up | a fetch succeeds | a fetch fails |
//! |---|---|---|---|
//! | absent | the state becomes *fetching*, and the reader must fetch the chunk | | |
//! | fetching from this place | the reader joins the waiters | the state becomes *ready*, and all waiters get the chunk, whatever their place | the waiters for this place get the error; if no waiter is left, the state becomes *absent* |
//! | fetching from other places only | the reader joins the waiters, and must fetch the chunk from its place | as above | as above |
//! | ready | the reader gets the chunk | stays *ready* | stays *ready* |
//!
//! So a chunk is fetched once from each place however many requests wait for it, and it is checked once,
//! before it becomes *ready*.
//!
//! Chunks are found by hash: two versions with an equal chunk share it. They may refer to it in different
//! places, because a later version stored it again. Then it is fetched from each place: one place may be
//! damaged or on a server that is away, while another is good. The first fetch that succeeds serves all
//! waiters.
//!
//! A prefetch joins the waiters, too, but nobody waits for its answer. A fetch is urgent as soon as one of
//! its waiters is a real read.
//!
//! The cache is divided into shards. If a shard is full, the oldest chunk is dropped, unless it was used
//! since it was last examined. Then it is kept once more (second chance).
//!
//! # Lock order
//! One shard's lock at a time. It is never held while a waiter is called, nor across I/O.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use headwater_block::{IoError, Pages, SharedPages};
use headwater_store::Hash;
use parking_lot::Mutex;

use crate::disk_cache::DiskCache;
use crate::error::ImageError;
use crate::fetch_pool::Urgency;
use crate::index::HashTable;
use crate::manifest::ChunkRef;
use crate::open_maps::OpenMaps;
use crate::units::{u64_of, usize_of};

/// The most shards, each with a lock of its own.
const SHARDS_MAX: usize = 64;
/// The smallest shard. Without this limit a small cache would be divided into many tiny shards.
const SHARD_MIN_BYTES: u64 = 4 << 20;
/// Memory of dropped chunks that is kept for the next fetches: as much as two long reads of a remote store
/// need for decompressed chunks.
const SPARE_MAX_BYTES: usize = 2 << 20;

/// A checked chunk.
pub(crate) type Chunk = SharedPages;

/// Called once, with the chunk or with the error.
pub(crate) type Waiter = Box<dyn FnOnce(Result<&[u8], &IoError>) + Send>;

/// The place from which a chunk is fetched. Equal chunks may be in several objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChunkPlace {
    object: Hash,
    offset: u64,
    stored_bytes: u32,
}

impl ChunkPlace {
    /// The place of a chunk that a manifest refers to in this object.
    pub(crate) fn new(object: Hash, chunk: &ChunkRef) -> Self {
        Self { object, offset: chunk.offset, stored_bytes: chunk.stored_bytes }
    }
}

/// A waiter for a chunk, and the place from which it expects the chunk.
struct Waiting {
    place: ChunkPlace,
    /// Whether a read waits for it. Otherwise it is a prefetch.
    is_urgent: bool,
    tell: Waiter,
}

enum Slot {
    Ready {
        chunk: Chunk,
        used: bool,
    },
    /// At least one waiter. The chunk is fetched once from each of their places.
    Fetching(Vec<Waiting>),
}

#[derive(Default)]
struct Shard {
    slots: HashTable<Slot>,
    /// Ready chunks, oldest first.
    order: VecDeque<Hash>,
    bytes: u64,
}

/// Counters of a chunk cache since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkCacheCounters {
    /// Lookups that found the chunk.
    pub hits: u64,
    /// Fetches: one each time that a chunk was needed and absent.
    pub fetches: u64,
    /// Requests that joined a fetch in progress.
    pub joined: u64,
    /// Fetches of chunks that failed, for instance because the chunk is damaged.
    pub failures: u64,
    /// Chunks dropped to make space.
    pub evictions: u64,
    /// Chunks that were prefetched; `fetches` includes them.
    pub ahead: u64,
    /// Bytes that were read from stores, as stored (compressed).
    pub fetched_bytes: u64,
    /// Memory of the cached chunks.
    pub held_bytes: u64,
    /// The limit of that memory.
    pub capacity_bytes: u64,
}

#[derive(Default)]
struct Counters {
    hits: AtomicU64,
    fetches: AtomicU64,
    joined: AtomicU64,
    failures: AtomicU64,
    evictions: AtomicU64,
    ahead: AtomicU64,
    fetched_bytes: AtomicU64,
}

/// A cache of chunks with a limit in bytes, shared by all readers of the host.
///
/// It holds at most its capacity (or one chunk per shard, if the capacity is smaller than that). In addition
/// there are the chunks being fetched: one read of a store for each of [`crate::FETCH_THREADS`], and memory
/// for the next ones (2 MiB, or one chunk). With a disk cache, chunks of remote stores are kept there too.
pub struct ChunkCache {
    shards: Vec<Mutex<Shard>>,
    shard_bytes: u64,
    spare: Mutex<Vec<Pages>>,
    disk: Option<Arc<DiskCache>>,
    maps: OpenMaps,
    counters: Counters,
}

/// The result of [`ChunkCache::join`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Joined {
    /// The waiter was called, or the thread that fetches the chunk will call it.
    Waiting,
    /// The waiter is registered. The caller must fetch the chunk and call [`ChunkCache::fetched`].
    MustFetch,
}

impl ChunkCache {
    /// A cache that holds at most `capacity_bytes` of chunks.
    pub fn new(capacity_bytes: u64) -> Arc<Self> {
        Self::over(capacity_bytes, None)
    }

    /// As [`ChunkCache::new`], with a cache on the local disk for chunks of remote stores.
    pub fn with_disk(capacity_bytes: u64, disk: Arc<DiskCache>) -> Arc<Self> {
        Self::over(capacity_bytes, Some(disk))
    }

    fn over(capacity_bytes: u64, disk: Option<Arc<DiskCache>>) -> Arc<Self> {
        let shards = usize_of((capacity_bytes / SHARD_MIN_BYTES).max(1)).min(SHARDS_MAX);
        Arc::new(Self {
            shards: (0..shards).map(|_| Mutex::default()).collect(),
            shard_bytes: capacity_bytes / u64_of(shards),
            spare: Mutex::default(),
            disk,
            maps: OpenMaps::default(),
            counters: Counters::default(),
        })
    }

    /// The cache on the local disk, if there is one.
    pub fn disk(&self) -> Option<&Arc<DiskCache>> {
        self.disk.as_ref()
    }

    /// The chunk maps that readers with this cache have open.
    pub(crate) fn maps(&self) -> &OpenMaps {
        &self.maps
    }

    /// The limit of the memory of chunks.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.shard_bytes * u64_of(self.shards.len())
    }

    /// Whether a chunk is in memory or being fetched.
    pub(crate) fn is_known(&self, hash: &Hash) -> bool {
        self.shard(hash).is_some_and(|shard| shard.lock().slots.contains_key(hash))
    }

    /// Whether a read waits for a chunk that is being fetched, not only prefetches.
    pub(crate) fn is_waited_for(&self, hash: &Hash) -> bool {
        self.is_awaited(hash, |waiting| waiting.is_urgent)
    }

    /// Whether a request still waits for a chunk from this place. The chunk may have arrived from another
    /// place already.
    pub(crate) fn is_awaited_from(&self, hash: &Hash, place: &ChunkPlace) -> bool {
        self.is_awaited(hash, |waiting| waiting.place == *place)
    }

    fn is_awaited(&self, hash: &Hash, by: impl Fn(&Waiting) -> bool) -> bool {
        let is_so = |slot: &Slot| matches!(slot, Slot::Fetching(waiting) if waiting.iter().any(&by));
        self.shard(hash).is_some_and(|shard| shard.lock().slots.get(hash).is_some_and(is_so))
    }

    pub(crate) fn count_ahead(&self, chunks: usize) {
        self.counters.ahead.fetch_add(u64_of(chunks), Ordering::Relaxed);
    }

    pub(crate) fn count_fetched(&self, bytes: u64) {
        self.counters.fetched_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counters, and the memory in use.
    pub fn counters(&self) -> ChunkCacheCounters {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ChunkCacheCounters {
            hits: value(&self.counters.hits),
            fetches: value(&self.counters.fetches),
            joined: value(&self.counters.joined),
            failures: value(&self.counters.failures),
            evictions: value(&self.counters.evictions),
            ahead: value(&self.counters.ahead),
            fetched_bytes: value(&self.counters.fetched_bytes),
            held_bytes: self.shards.iter().map(|shard| shard.lock().bytes).sum(),
            capacity_bytes: self.capacity_bytes(),
        }
    }

    fn shard(&self, hash: &Hash) -> Option<&Mutex<Shard>> {
        // The hash table mixes the whole hash with random numbers of this process, so any byte can select the
        // shard.
        let [.., last] = hash.0;
        self.shards.get(usize::from(last) % self.shards.len())
    }

    /// The chunk, if it is in memory. The lookup does not count as a use.
    pub(crate) fn peek(&self, hash: &Hash) -> Option<Chunk> {
        match self.shard(hash)?.lock().slots.get(hash) {
            Some(Slot::Ready { chunk, .. }) => Some(chunk.clone()),
            _ => None,
        }
    }

    /// The chunk, if it is in memory. Allocates nothing.
    pub(crate) fn get(&self, hash: &Hash) -> Option<Chunk> {
        let mut shard = self.shard(hash)?.lock();
        match shard.slots.get_mut(hash) {
            Some(Slot::Ready { chunk, used }) => {
                *used = true;
                let chunk = chunk.clone();
                drop(shard);
                self.counters.hits.fetch_add(1, Ordering::Relaxed);
                Some(chunk)
            }
            _ => None,
        }
    }

    /// Calls `waiter` with the chunk, at once or when it has been fetched from this place or another one.
    pub(crate) fn join(&self, hash: &Hash, place: ChunkPlace, urgency: Urgency, waiter: Waiter) -> Joined {
        let Some(shard) = self.shard(hash) else {
            return Joined::MustFetch;
        };
        let joins = Waiting { place, is_urgent: urgency == Urgency::Waited, tell: waiter };
        let mut shard = shard.lock();
        let chunk = match shard.slots.entry(*hash) {
            Entry::Vacant(absent) => {
                absent.insert(Slot::Fetching(vec![joins]));
                self.counters.fetches.fetch_add(1, Ordering::Relaxed);
                return Joined::MustFetch;
            }
            Entry::Occupied(mut slot) => match slot.get_mut() {
                Slot::Fetching(waiting) => {
                    let is_coming = waiting.iter().any(|other| other.place == place);
                    waiting.push(joins);
                    if !is_coming {
                        self.counters.fetches.fetch_add(1, Ordering::Relaxed);
                        return Joined::MustFetch;
                    }
                    self.counters.joined.fetch_add(1, Ordering::Relaxed);
                    return Joined::Waiting;
                }
                // The chunk arrived between the caller's lookup and now.
                Slot::Ready { chunk, used } => {
                    *used = true;
                    chunk.clone()
                }
            },
        };
        drop(shard);
        self.counters.hits.fetch_add(1, Ordering::Relaxed);
        (joins.tell)(Ok(&chunk));
        Joined::Waiting
    }

    /// Ends a fetch from this place. On success it stores the chunk, makes space, and calls all waiters. On
    /// failure it calls the waiters for this place.
    pub(crate) fn fetched(&self, hash: &Hash, place: &ChunkPlace, outcome: Result<Pages, IoError>) {
        let outcome = outcome.map(Pages::share);
        let mut evicted = Vec::new();
        let mut told = Vec::new();
        if let Some(shard) = self.shard(hash) {
            let mut shard = shard.lock();
            told = match &outcome {
                Ok(chunk) => shard.came(hash, chunk, self.shard_bytes, &mut evicted),
                Err(_) => shard.did_not_come(hash, place),
            };
        }
        self.counters.evictions.fetch_add(u64_of(evicted.len()), Ordering::Relaxed);
        self.keep_spare(evicted);
        match &outcome {
            Ok(chunk) => told.into_iter().for_each(|waiting| (waiting.tell)(Ok(chunk))),
            Err(e) => {
                self.counters.failures.fetch_add(1, Ordering::Relaxed);
                told.into_iter().for_each(|waiting| (waiting.tell)(Err(e)));
            }
        }
    }

    /// Memory for `count` chunks of `len` bytes, with arbitrary content. Reuses memory of dropped chunks.
    pub(crate) fn pages(&self, count: usize, len: usize) -> Result<Vec<Pages>, ImageError> {
        let mut pages: Vec<Pages> = {
            let mut spare = self.spare.lock();
            let first = spare.len().saturating_sub(count);
            spare.drain(first..).collect()
        };
        // Memory of another length is freed without the lock, because each free is a system call.
        pages.retain(|pages| pages.len() == len);
        let missing = count.saturating_sub(pages.len());
        if missing > 0 {
            let new = Pages::many(missing, len).map_err(|e| {
                ImageError::from_os(format!("cannot get memory for {missing} chunks of {len} bytes"), &e)
            })?;
            pages.extend(new);
        }
        Ok(pages)
    }

    fn keep_spare(&self, evicted: Vec<Chunk>) {
        for chunk in evicted {
            // One thread at a time: freeing surplus memory is a system call, and other threads should not
            // wait for it.
            if self.spare.lock().iter().map(Pages::memory_bytes).sum::<usize>() >= SPARE_MAX_BYTES {
                return;
            }
            // The memory is not reused while a reader still copies from the chunk.
            if let Some(pages) = chunk.take_back() {
                self.spare.lock().push(pages);
            }
        }
    }
}

impl Shard {
    /// Stores a chunk, unless it arrived from another place before. Returns all its waiters.
    fn came(
        &mut self,
        hash: &Hash,
        chunk: &Chunk,
        limit_bytes: u64,
        evicted: &mut Vec<Chunk>,
    ) -> Vec<Waiting> {
        let waiting = match self.slots.get_mut(hash) {
            Some(Slot::Ready { .. }) => return Vec::new(),
            Some(Slot::Fetching(waiting)) => std::mem::take(waiting),
            None => Vec::new(),
        };
        // Space is made before the chunk is in the queue itself: if all other chunks were used, it would be
        // the first to be dropped.
        let bytes = u64_of(chunk.memory_bytes());
        self.make_room(bytes, limit_bytes, evicted);
        self.bytes += bytes;
        self.order.push_back(*hash);
        self.slots.insert(*hash, Slot::Ready { chunk: chunk.clone(), used: false });
        waiting
    }

    /// Returns the waiters for a chunk from a place that failed. Waiters for other places keep waiting.
    fn did_not_come(&mut self, hash: &Hash, place: &ChunkPlace) -> Vec<Waiting> {
        let Some(Slot::Fetching(waiting)) = self.slots.get_mut(hash) else { return Vec::new() };
        let told = waiting.extract_if(.., |waiting| waiting.place == *place).collect();
        if waiting.is_empty() {
            self.slots.remove(hash);
        }
        told
    }

    /// Drops chunks until `bytes` more fit, or none is left.
    fn make_room(&mut self, bytes: u64, limit_bytes: u64, evicted: &mut Vec<Chunk>) {
        while self.bytes.saturating_add(bytes) > limit_bytes {
            let Some(hash) = self.order.pop_front() else {
                return;
            };
            match self.slots.entry(hash) {
                Entry::Occupied(mut slot) => {
                    if let Slot::Ready { used, .. } = slot.get_mut()
                        && std::mem::take(used)
                    {
                        self.order.push_back(hash);
                        continue;
                    }
                    if let Slot::Ready { chunk, .. } = slot.remove() {
                        self.bytes = self.bytes.saturating_sub(u64_of(chunk.memory_bytes()));
                        evicted.push(chunk);
                    }
                }
                Entry::Vacant(_) => {}
            }
        }
    }
}

impl std::fmt::Debug for ChunkCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChunkCache").field("counters", &self.counters()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headwater_block::IoErrorKind;
    use std::sync::mpsc;

    fn hash(n: u8) -> Hash {
        Hash::of(&[n])
    }

    /// A place in one of several objects.
    fn place(object: u8) -> ChunkPlace {
        ChunkPlace { object: hash(object), offset: 16, stored_bytes: 4096 }
    }

    fn chunk(n: u8) -> Result<Pages, IoError> {
        Ok(Pages::copy_of(&[n; 4096]).unwrap())
    }

    fn fill(cache: &ChunkCache, n: u8, len: usize) {
        assert_eq!(cache.join(&hash(n), place(0), Urgency::Waited, Box::new(|_| {})), Joined::MustFetch);
        cache.fetched(&hash(n), &place(0), Ok(Pages::copy_of(&vec![n; len]).unwrap()));
    }

    /// The memory that a chunk occupies on this machine.
    fn memory_bytes(len: usize) -> u64 {
        u64_of(Pages::new(len).unwrap().memory_bytes())
    }

    #[test]
    fn a_chunk_is_fetched_once_for_all_waiters() {
        let cache = ChunkCache::new(1 << 20);
        let (tx, rx) = mpsc::channel();
        let waiter = |tx: &mpsc::Sender<usize>| -> Waiter {
            let tx = tx.clone();
            Box::new(move |chunk| tx.send(chunk.unwrap().len()).unwrap())
        };
        let join = |tx| cache.join(&hash(1), place(0), Urgency::Waited, waiter(tx));
        assert_eq!(join(&tx), Joined::MustFetch);
        for _ in 0..5 {
            assert_eq!(join(&tx), Joined::Waiting);
        }
        assert!(rx.try_recv().is_err());
        cache.fetched(&hash(1), &place(0), chunk(1));
        assert_eq!(rx.try_iter().collect::<Vec<_>>(), [4096; 6]);
        assert_eq!(join(&tx), Joined::Waiting);
        assert_eq!(rx.try_iter().count(), 1);
        let counters = cache.counters();
        assert_eq!((counters.fetches, counters.joined, counters.hits), (1, 5, 1));
    }

    #[test]
    fn prefetches_alone_do_not_make_a_chunk_urgent() {
        let cache = ChunkCache::new(1 << 20);
        let join = |n, urgency| cache.join(&hash(n), place(0), urgency, Box::new(|_| {}));
        assert!(!cache.is_waited_for(&hash(1)));
        assert_eq!(join(1, Urgency::Ahead), Joined::MustFetch);
        assert_eq!(join(1, Urgency::Ahead), Joined::Waiting);
        assert!(!cache.is_waited_for(&hash(1)));
        assert_eq!(join(1, Urgency::Waited), Joined::Waiting);
        assert!(cache.is_waited_for(&hash(1)));
        assert_eq!(join(1, Urgency::Ahead), Joined::Waiting);
        assert!(cache.is_waited_for(&hash(1)));
        assert_eq!(join(2, Urgency::Waited), Joined::MustFetch);
        assert!(cache.is_waited_for(&hash(2)) && !cache.is_waited_for(&hash(3)));
        // The chunk is in memory.
        cache.fetched(&hash(1), &place(0), chunk(1));
        assert!(!cache.is_waited_for(&hash(1)));
    }

    #[test]
    fn a_failed_fetch_is_reported_to_all_waiters_and_retried() {
        let cache = ChunkCache::new(1 << 20);
        let (tx, rx) = mpsc::channel();
        let waiter: Waiter = Box::new(move |chunk| tx.send(chunk.unwrap_err().kind()).unwrap());
        assert_eq!(cache.join(&hash(1), place(0), Urgency::Waited, waiter), Joined::MustFetch);
        cache.fetched(&hash(1), &place(0), Err(IoError::new(IoErrorKind::Corrupt, "bad")));
        assert_eq!(rx.recv().unwrap(), IoErrorKind::Corrupt);
        assert!(cache.get(&hash(1)).is_none());
        fill(&cache, 1, 4096);
        assert!(cache.get(&hash(1)).is_some());
        assert_eq!(cache.counters().failures, 1);
    }

    #[test]
    fn a_slow_or_failing_place_does_not_delay_other_places() {
        let cache = ChunkCache::new(1 << 20);
        let (tx, rx) = mpsc::channel();
        let join = |who: &'static str, object| {
            let tx = tx.clone();
            let tell = move |chunk: Result<&[u8], &IoError>| tx.send((who, chunk.is_ok())).unwrap();
            cache.join(&hash(1), place(object), Urgency::Waited, Box::new(tell))
        };
        let bad = || Err(IoError::new(IoErrorKind::Corrupt, "bad"));
        let told = || rx.try_iter().collect::<Vec<_>>();
        assert_eq!(join("a", 0), Joined::MustFetch);
        assert_eq!(join("b", 1), Joined::MustFetch);
        assert_eq!((join("c", 1), join("d", 0)), (Joined::Waiting, Joined::Waiting));
        // The first place is damaged, which says nothing about the other place.
        cache.fetched(&hash(1), &place(0), bad());
        assert_eq!(told(), [("a", false), ("d", false)]);
        assert!(cache.is_waited_for(&hash(1)) && cache.is_awaited_from(&hash(1), &place(1)));
        assert!(!cache.is_awaited_from(&hash(1), &place(0)));
        // The fetch is tried again, and does not answer. A chunk that arrives serves all waiters.
        assert_eq!(join("e", 0), Joined::MustFetch);
        cache.fetched(&hash(1), &place(1), chunk(1));
        assert_eq!(told(), [("b", true), ("c", true), ("e", true)]);
        // However that fetch ends, the chunk stays and counts once.
        let held_bytes = cache.counters().held_bytes;
        cache.fetched(&hash(1), &place(0), bad());
        cache.fetched(&hash(1), &place(0), chunk(1));
        assert!(told().is_empty() && cache.get(&hash(1)).is_some());
        let counters = cache.counters();
        assert_eq!((counters.held_bytes, counters.fetches, counters.joined), (held_bytes, 3, 2));
        assert_eq!((counters.failures, counters.evictions), (2, 0));
        // After the last waiter nothing is left.
        assert_eq!(cache.join(&hash(2), place(0), Urgency::Waited, Box::new(|_| {})), Joined::MustFetch);
        cache.fetched(&hash(2), &place(0), bad());
        assert!(!cache.is_known(&hash(2)));
    }

    #[test]
    fn a_new_chunk_stays_if_all_others_were_used() {
        let cache = ChunkCache::new(10 * memory_bytes(4096));
        for n in 0..10 {
            fill(&cache, n, 4096);
            assert!(cache.get(&hash(n)).is_some());
        }
        fill(&cache, 10, 4096);
        assert!(cache.get(&hash(10)).is_some());
        assert_eq!((0..10).filter(|n| cache.get(&hash(*n)).is_some()).count(), 9);
    }

    #[test]
    fn memory_of_dropped_chunks_is_kept_for_long_reads() {
        const LEN: usize = 65_536;
        let cache = ChunkCache::new(64 * memory_bytes(LEN));
        (0..64).for_each(|n| fill(&cache, n, LEN));
        assert_eq!(cache.spare.lock().len(), 0);
        // A read of 16 chunks has all of its memory before others are dropped.
        (64..80).for_each(|n| fill(&cache, n, LEN));
        assert_eq!(cache.spare.lock().len(), 16);
        let taken = cache.pages(16, LEN).unwrap();
        assert_eq!((taken.len(), cache.spare.lock().len()), (16, 0));
        (80..200).for_each(|n| fill(&cache, n, LEN));
        let spare_bytes: usize = cache.spare.lock().iter().map(Pages::memory_bytes).sum();
        let limit = SPARE_MAX_BYTES..SPARE_MAX_BYTES + usize_of(memory_bytes(LEN));
        assert!(limit.contains(&spare_bytes), "{spare_bytes}");
    }

    #[test]
    fn the_cache_keeps_its_limit_and_used_chunks() {
        let cache = ChunkCache::new(10 * memory_bytes(4096));
        fill(&cache, 0, 4096);
        for n in 1..100 {
            assert!(cache.get(&hash(0)).is_some(), "before {n}");
            fill(&cache, n, 4096);
            assert!(cache.counters().held_bytes <= 10 * memory_bytes(4096));
        }
        assert!(cache.get(&hash(98)).is_some());
        assert!(cache.get(&hash(50)).is_none());
        assert_eq!(cache.counters().evictions, 90);
        // A cache without capacity still holds the last chunk.
        let none = ChunkCache::new(0);
        fill(&none, 1, 4096);
        fill(&none, 2, 4096);
        assert_eq!(none.counters().held_bytes, memory_bytes(4096));
    }
}
