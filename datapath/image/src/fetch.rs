//! Fetching chunks: from the local disk cache, or from the store, several that lie side by side in one read.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_block::{IoError, IoErrorKind, Pages};
use headwater_store::{Check, Object, ReadFor, StoreError, StoreErrorKind, Waiting};

use crate::chunk;
use crate::chunk_cache::ChunkCache;
use crate::disk_cache::DiskCache;
use crate::error::{ImageError, ImageErrorKind};
use crate::fetch_pool::{Task, Urgency};
use crate::manifest::ChunkRef;
use crate::units::{u64_of, usize_of_u32};

/// How often a copy that waits for its store looks whether it can go on, or is to end.
const COPY_LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// How much is read at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MergeLimit {
    pub chunks: usize,
    pub stored_bytes: u64,
}

impl MergeLimit {
    /// From a store on this host: the system reads ahead by itself, and several threads unpack sooner.
    pub(crate) const HERE: Self = Self { chunks: 4, stored_bytes: 256 << 10 };
    /// From one across a network, where each request takes a round trip.
    pub(crate) const REMOTE: Self = Self { chunks: 16, stored_bytes: 512 << 10 };
    /// Ahead of time: smaller, so that what somebody waits for does not stand behind much.
    pub(crate) const AHEAD: Self = Self { chunks: 8, stored_bytes: 128 << 10 };
    /// What nobody waits for at all.
    pub(crate) const COPY: Self = Self { chunks: 32, stored_bytes: 1 << 20 };
}

/// Cuts a list of chunks into groups that lie side by side in one object.
pub(crate) fn group(chunks: impl IntoIterator<Item = ChunkRef>, limit: MergeLimit) -> Vec<Vec<ChunkRef>> {
    let mut groups: Vec<Vec<ChunkRef>> = Vec::new();
    let mut stored_bytes = 0;
    for chunk in chunks {
        let len = u64::from(chunk.stored_bytes);
        if let Some(group) = groups.last_mut()
            && let Some(last) = group.last()
            && last.object == chunk.object
            && last.offset.checked_add(u64::from(last.stored_bytes)) == Some(chunk.offset)
            && group.len() < limit.chunks
            && stored_bytes + len <= limit.stored_bytes
        {
            group.push(chunk);
            stored_bytes += len;
            continue;
        }
        stored_bytes = len;
        groups.push(vec![chunk]);
    }
    groups
}

thread_local! {
    /// Packed chunks. The threads that fetch are few, so this is bounded.
    static PACKED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Reads, unpacks and checks a chunk. `into` has the chunk's length.
pub(crate) fn fetch_chunk(
    object: &dyn Object,
    chunk: &ChunkRef,
    mut into: Vec<u8>,
) -> Result<Vec<u8>, ImageError> {
    fetch_group(object, std::slice::from_ref(chunk), std::slice::from_mut(&mut into))?;
    Ok(into)
}

/// The same of chunks that lie side by side, in one read. Of `into` each has a chunk's length, and there are as many at least.
pub(crate) fn fetch_group(
    object: &dyn Object,
    chunks: &[ChunkRef],
    into: &mut [Vec<u8>],
) -> Result<(), ImageError> {
    let mut next = 0;
    PACKED.with_borrow_mut(|packed| {
        read_group(object, chunks, packed, None, &mut |chunk, stored| {
            if chunks.first() == Some(chunk) {
                // Bytes of another server were refused before.
                next = 0;
            }
            let bytes = into.get_mut(next).ok_or_else(|| unasked(chunk))?;
            next += 1;
            unpack_one(object, chunk, stored, bytes)
        })
    })?;
    if next != chunks.len() {
        return Err(unchecked());
    }
    Ok(())
}

/// An object that passes its checks by. What the buffers hold may be of other chunks.
fn unchecked() -> ImageError {
    ImageError::new(ImageErrorKind::Io, "chunks were not checked, and are not used")
}

/// Unpacks and checks one chunk of `object`.
fn unpack_one(
    object: &dyn Object,
    chunk: &ChunkRef,
    packed: &[u8],
    into: &mut [u8],
) -> Result<(), StoreError> {
    chunk::unpack(packed, into, &chunk.hash).map_err(|e| {
        let kind = match e.kind() {
            ImageErrorKind::Damaged => StoreErrorKind::Damaged,
            _ => StoreErrorKind::Io,
        };
        let (at, len, id) = (chunk.offset, chunk.stored_bytes, object.id());
        StoreError::new(kind, format!("the chunk at {at}+{len} of data object {id} is damaged: {e}"))
    })
}

/// A fetch of a chunk under way. Whatever happens to it, those who wait are told.
pub(crate) struct Fetch {
    cache: Arc<ChunkCache>,
    pub chunk: ChunkRef,
    ended: bool,
}

impl Fetch {
    /// For a chunk that [`ChunkCache::join`] said must be fetched.
    pub(crate) fn new(cache: &Arc<ChunkCache>, chunk: ChunkRef) -> Self {
        Self { cache: Arc::clone(cache), chunk, ended: false }
    }

    pub(crate) fn end(mut self, outcome: Result<Pages, IoError>) {
        self.ended = true;
        self.cache.fetched(&self.chunk.hash, outcome);
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        if !self.ended {
            let given_up = IoError::new(IoErrorKind::Device, "reading the chunk was given up");
            self.cache.fetched(&self.chunk.hash, Err(given_up));
        }
    }
}

/// What fetches have in common.
#[derive(Clone)]
pub(crate) struct Source {
    pub object: Arc<dyn Object>,
    pub cache: Arc<ChunkCache>,
    pub chunk_bytes: usize,
    /// Whether what is fetched is looked for, and kept, on the local disk.
    pub is_remote: bool,
}

impl Source {
    /// Carries out fetches of chunks that are on the local disk. Returns those whose chunks are not there, or damaged.
    pub(crate) fn fetch_kept(&self, fetches: Vec<Fetch>) -> Vec<Fetch> {
        PACKED.with_borrow_mut(|packed| {
            let mut missing = Vec::new();
            for fetch in fetches {
                match self.kept_on_disk(&fetch.chunk, packed) {
                    Some(bytes) => fetch.end(Ok(bytes)),
                    None => missing.push(fetch),
                }
            }
            missing
        })
    }

    fn kept_on_disk(&self, chunk: &ChunkRef, packed: &mut Vec<u8>) -> Option<Pages> {
        let disk = self.keeps_on()?;
        if !disk.get(&chunk.hash, packed) {
            return None;
        }
        let mut bytes = self.cache.pages(1, self.chunk_bytes).ok()?.pop()?;
        match chunk::unpack(packed, &mut bytes, &chunk.hash) {
            Ok(()) => Some(bytes),
            Err(e) => {
                disk.forget(&chunk.hash, &e);
                None
            }
        }
    }

    /// Reads chunks that lie side by side, in one read. `None`: it waits for its store, and is to be tried again with this
    /// `waiting`.
    fn read(
        &self,
        chunks: &[ChunkRef],
        packed: &mut Vec<u8>,
        waiting: &mut Waiting,
    ) -> Result<Option<Vec<Pages>>, ImageError> {
        // Gotten once bytes have come: a read that waits looks again and again.
        let mut unpacked: Vec<Pages> = Vec::new();
        let mut no_memory = None;
        let mut next = 0;
        let is_read =
            read_group(self.object.as_ref(), chunks, packed, Some(waiting), &mut |chunk, stored| {
                if chunks.first() == Some(chunk) {
                    // Bytes of another server were refused before.
                    next = 0;
                }
                if unpacked.is_empty() {
                    unpacked = self.cache.pages(chunks.len(), self.chunk_bytes).map_err(|e| {
                        let told = StoreError::new(StoreErrorKind::Io, e.to_string());
                        no_memory = Some(e);
                        told
                    })?;
                }
                let bytes = unpacked.get_mut(next);
                next += 1;
                let bytes = bytes.ok_or_else(|| unasked(chunk))?;
                unpack_one(self.object.as_ref(), chunk, stored, bytes)
            });
        match (is_read, no_memory) {
            (Ok(true), _) => {}
            // It is not the store's, so that nothing else is asked or waited for.
            (_, Some(e)) => {
                *waiting = Waiting::default();
                return Err(e);
            }
            (Ok(false), None) => return Ok(None),
            (Err(e), None) => return Err(e),
        }
        if next != chunks.len() {
            return Err(unchecked());
        }
        self.cache.count_fetched(u64_of(packed.len()));
        Ok(Some(unpacked))
    }

    /// Where what is read of this store is kept on the local disk.
    fn keeps_on(&self) -> Option<&DiskCache> {
        self.cache.disk().filter(|_| self.is_remote).map(Arc::as_ref)
    }

    /// Copies chunks that lie side by side to the local disk, checked, without keeping them in memory. Gives up when `is_over`
    /// says so, also while the store is away.
    pub(crate) fn copy_to_disk(
        &self,
        chunks: &[ChunkRef],
        is_over: impl Fn() -> bool,
    ) -> Result<(), ImageError> {
        let mut waiting = Waiting::default();
        waiting.set_read_for(ReadFor::Copy);
        PACKED.with_borrow_mut(|packed| {
            let object = self.object.as_ref();
            let mut bytes = vec![0; self.chunk_bytes];
            let mut check = |chunk: &ChunkRef, stored: &[u8]| unpack_one(object, chunk, stored, &mut bytes);
            while !is_over() {
                if read_group(object, chunks, packed, Some(&mut waiting), &mut check)? {
                    self.cache.count_fetched(u64_of(packed.len()));
                    if let Some(disk) = self.cache.disk() {
                        put_each(disk, chunks, packed);
                    }
                    break;
                }
                loop {
                    std::thread::sleep(COPY_LOOK_INTERVAL);
                    if is_over() || waiting.is_due(Instant::now()) {
                        break;
                    }
                }
            }
            Ok(())
        })
    }

    /// Reads back those of the chunks that an earlier process left on the local disk, once in each process. What is not what it
    /// should be is forgotten.
    pub(crate) fn read_back(&self, chunks: &[ChunkRef], is_over: impl Fn() -> bool) {
        let Some(disk) = self.cache.disk() else { return };
        PACKED.with_borrow_mut(|packed| {
            let mut bytes = vec![0; self.chunk_bytes];
            for chunk in chunks.iter().take_while(|_| !is_over()) {
                if !disk.get_unread(&chunk.hash, packed) {
                    continue;
                }
                match chunk::unpack(packed, &mut bytes, &chunk.hash) {
                    Ok(()) => disk.was_right(&chunk.hash),
                    Err(e) => disk.forget(&chunk.hash, &e),
                }
            }
        });
    }
}

fn put_each(disk: &DiskCache, chunks: &[ChunkRef], packed: &[u8]) {
    stored_of(chunks, packed).for_each(|(chunk, stored)| disk.put(&chunk.hash, stored));
}

/// Fetches of chunks that lie side by side: one task of a pool.
pub(crate) struct Fetching {
    source: Source,
    /// Nobody waited for it when it was made.
    is_ahead: bool,
    /// What is on the local disk was not looked for yet.
    is_new: bool,
    /// What is left to be read, each in one read.
    parts: VecDeque<Vec<Fetch>>,
    /// Of the first part.
    waiting: Waiting,
    /// What was read and is still to be kept on the local disk, packed: that may make room first, which nobody is to wait for.
    to_keep: Vec<(Vec<ChunkRef>, Vec<u8>)>,
}

impl Fetching {
    pub(crate) fn new(source: Source, fetches: Vec<Fetch>, urgency: Urgency) -> Self {
        let parts = VecDeque::from([fetches]);
        let is_ahead = urgency == Urgency::Ahead;
        Self { source, is_ahead, is_new: true, parts, waiting: Waiting::default(), to_keep: Vec::new() }
    }

    /// Takes out what is on the local disk.
    fn take_kept(&mut self, packed: &mut Vec<u8>) {
        let mut part = Vec::new();
        let mut parts = VecDeque::new();
        for fetch in self.parts.drain(..).flatten() {
            match self.source.kept_on_disk(&fetch.chunk, packed) {
                Some(bytes) => {
                    fetch.end(Ok(bytes));
                    // What lies before this one is not beside what comes after it.
                    parts.push_back(std::mem::take(&mut part));
                }
                None => part.push(fetch),
            }
        }
        parts.push_back(part);
        self.parts = parts;
    }

    /// Reads the first part. Whether it waits, and is still there.
    fn read_first(&mut self, packed: &mut Vec<u8>) -> bool {
        let Some(part) = self.parts.pop_front().filter(|part| !part.is_empty()) else { return false };
        let chunks: Vec<ChunkRef> = part.iter().map(|fetch| fetch.chunk).collect();
        match self.source.read(&chunks, packed, &mut self.waiting) {
            Ok(Some(unpacked)) => {
                part.into_iter().zip(unpacked).for_each(|(fetch, bytes)| fetch.end(Ok(bytes)));
                if self.source.keeps_on().is_some() {
                    self.to_keep.push((chunks, std::mem::take(packed)));
                }
            }
            Ok(None) => {
                self.parts.push_front(part);
                return true;
            }
            // Damage is that of one chunk: the others are good.
            Err(e) if e.kind() == ImageErrorKind::Damaged && part.len() > 1 => {
                part.into_iter().rev().for_each(|fetch| self.parts.push_front(vec![fetch]));
            }
            Err(e) => {
                let error = IoError::from(e);
                part.into_iter().for_each(|fetch| fetch.end(Err(error.clone())));
            }
        }
        false
    }

    /// Keeps what was read on the local disk, as far as that takes it. The memory is used again.
    fn keep(&mut self, packed: &mut Vec<u8>) {
        for (chunks, stored) in self.to_keep.drain(..) {
            if let Some(disk) = self.source.keeps_on() {
                put_each(disk, &chunks, &stored);
            }
            *packed = stored;
        }
    }
}

impl Task for Fetching {
    fn run(mut self: Box<Self>) -> Option<Box<dyn Task>> {
        PACKED.with_borrow_mut(|packed| {
            if std::mem::take(&mut self.is_new) {
                self.take_kept(packed);
            }
            while !self.parts.is_empty() {
                let later = self.is_ahead && !self.is_waited_for();
                self.waiting.set_read_for(if later { ReadFor::Later } else { ReadFor::Now });
                if self.read_first(packed) {
                    return Some(self as Box<dyn Task>);
                }
            }
            self.keep(packed);
            None
        })
    }

    fn is_due(&self, now: Instant) -> bool {
        // A store may have kept room for what somebody waits for.
        self.waiting.is_due(now) || (self.waiting.read_for() == ReadFor::Later && self.is_waited_for())
    }

    fn is_waited_for(&self) -> bool {
        self.parts.iter().flatten().any(|fetch| self.source.cache.is_waited_for(&fetch.chunk.hash))
    }
}

fn unasked(chunk: &ChunkRef) -> StoreError {
    StoreError::new(StoreErrorKind::Io, format!("chunk {} was not asked for", chunk.hash))
}

type EachChunk<'a> = dyn FnMut(&ChunkRef, &[u8]) -> Result<(), StoreError> + 'a;

/// `false`: the read waits. Without `waiting` it does so here.
fn read_group(
    object: &dyn Object,
    chunks: &[ChunkRef],
    packed: &mut Vec<u8>,
    waiting: Option<&mut Waiting>,
    check: &mut EachChunk<'_>,
) -> Result<bool, ImageError> {
    let Some(first) = chunks.first() else { return Ok(true) };
    packed.resize(chunks.iter().map(|chunk| usize_of_u32(chunk.stored_bytes)).sum(), 0);
    let check: &mut Check<'_> =
        &mut |bytes| stored_of(chunks, bytes).try_for_each(|(chunk, stored)| check(chunk, stored));
    Ok(match waiting {
        Some(waiting) => object.read_or_wait(first.offset, packed, check, waiting)?,
        None => object.read_checked(first.offset, packed, check).map(|()| true)?,
    })
}

/// What each of the chunks is in the bytes of all.
fn stored_of<'a>(chunks: &'a [ChunkRef], packed: &'a [u8]) -> impl Iterator<Item = (&'a ChunkRef, &'a [u8])> {
    let mut rest = packed;
    chunks.iter().map(move |chunk| {
        let (stored, tail) = rest.split_at_checked(usize_of_u32(chunk.stored_bytes)).unwrap_or((rest, &[]));
        rest = tail;
        (chunk, stored)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use headwater_store::Hash;

    use super::*;
    use crate::chunk_cache::Joined;
    use crate::disk_cache::DISK_CACHE_MIN_BYTES;

    /// Three chunks of 4 KiB as they are.
    struct Bytes(Vec<u8>);

    impl Object for Bytes {
        fn id(&self) -> Hash {
            Hash([0; 32])
        }

        fn len_bytes(&self) -> u64 {
            u64_of(self.0.len())
        }

        fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
            let at = usize::try_from(offset).unwrap();
            into.copy_from_slice(&self.0[at..at + into.len()]);
            Ok(())
        }
    }

    #[test]
    fn whoever_waits_is_answered_before_what_came_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let disk = DiskCache::open(dir.path(), DISK_CACHE_MIN_BYTES).unwrap();
        let cache = ChunkCache::with_disk(1 << 20, Arc::clone(&disk));
        let bytes: Vec<u8> = (1..=3).flat_map(|n| [n; 4096]).collect();
        let chunks: Vec<ChunkRef> = bytes
            .chunks(4096)
            .zip(0..)
            .map(|(chunk, n)| ChunkRef {
                hash: Hash::of(chunk),
                object: 0,
                stored_bytes: 4096,
                offset: n * 4096,
            })
            .collect();
        // The one in the middle is here: those beside it are read one after the other.
        disk.put(&chunks[1].hash, &bytes[4096..8192]);
        let kept_then = Arc::new(Mutex::new(Vec::new()));
        let fetch = |chunk: &ChunkRef| {
            let (disk, kept_then) = (Arc::clone(&disk), Arc::clone(&kept_then));
            let waiter = move |chunk: Result<&[u8], &IoError>| {
                assert_eq!(chunk.unwrap().len(), 4096);
                kept_then.lock().unwrap().push(disk.counters().writes);
            };
            assert_eq!(cache.join(&chunk.hash, Urgency::Waited, Box::new(waiter)), Joined::MustFetch);
            Fetch::new(&cache, *chunk)
        };
        let fetches = chunks.iter().map(fetch).collect();
        let object = Arc::new(Bytes(bytes));
        let source = Source { object, cache: Arc::clone(&cache), chunk_bytes: 4096, is_remote: true };
        assert!(Box::new(Fetching::new(source, fetches, Urgency::Waited)).run().is_none());
        assert_eq!(*kept_then.lock().unwrap(), [1; 3]);
        assert!(chunks.iter().all(|chunk| disk.has(&chunk.hash)));
    }

    #[test]
    fn what_an_earlier_process_left_is_read_back_once_also_where_it_was_moved() {
        let dir = tempfile::tempdir().unwrap();
        let open = || DiskCache::open(dir.path(), DISK_CACHE_MIN_BYTES).unwrap();
        let chunk_of = |n: u8| {
            let bytes = [n; 4096];
            ChunkRef { hash: Hash::of(&bytes), object: 0, stored_bytes: 4096, offset: u64::from(n) * 4096 }
        };
        let chunks: Vec<ChunkRef> = (0..4).map(chunk_of).collect();
        let before = open();
        // Of the first one there is something else.
        before.put(&chunks[0].hash, &[9; 4096]);
        (1..3).for_each(|n: u8| before.put(&chunks[usize::from(n)].hash, &[n; 4096]));
        drop(before);
        let disk = open();
        disk.put(&chunks[3].hash, &[3; 4096]);
        let packed = &mut Vec::new();
        // What this process put is not read back.
        let unread: Vec<bool> = chunks.iter().map(|chunk| disk.get_unread(&chunk.hash, packed)).collect();
        assert_eq!(unread, [true, true, true, false]);
        let cache = ChunkCache::with_disk(1 << 20, Arc::clone(&disk));
        let source =
            Source { object: Arc::new(Bytes(Vec::new())), cache, chunk_bytes: 4096, is_remote: true };
        // Given up at once.
        source.read_back(&chunks, || true);
        assert!(disk.get_unread(&chunks[1].hash, packed) && disk.counters().damaged == 0);
        source.read_back(&chunks[..2], || false);
        let unread: Vec<bool> = chunks.iter().map(|chunk| disk.get_unread(&chunk.hash, packed)).collect();
        assert_eq!(unread, [false, false, true, false]);
        assert_eq!(disk.counters().damaged, 1);
        assert!(!disk.has(&chunks[0].hash) && chunks[1..].iter().all(|chunk| disk.has(&chunk.hash)));
        // A segment that goes takes what is known of its chunks along.
        let of_both = [(chunks[1].hash, 4096), (chunks[2].hash, 4096)];
        let _kept = disk.keep(Hash([1; 32]), of_both.into_iter()).unwrap();
        let large = vec![7; 1 << 20];
        (0..70_u32).for_each(|n| disk.put(&Hash::of(&n.to_le_bytes()), &large));
        assert!(!dir.path().join("segment-0").exists(), "the first segment was not moved");
        assert!(disk.has(&chunks[1].hash) && !disk.get_unread(&chunks[1].hash, packed));
        assert!(disk.get_unread(&chunks[2].hash, packed));
    }

    #[test]
    fn only_what_lies_side_by_side_is_read_at_once() {
        let chunk =
            |object, offset, stored_bytes| ChunkRef { hash: Hash([0; 32]), object, stored_bytes, offset };
        let limit = MergeLimit { chunks: 3, stored_bytes: 1000 };
        let sizes = |chunks: &[ChunkRef]| {
            group(chunks.iter().copied(), limit).iter().map(Vec::len).collect::<Vec<_>>()
        };
        assert_eq!(sizes(&[]), [0; 0]);
        // Side by side; a gap; another object; too many; too long.
        assert_eq!(sizes(&[chunk(0, 0, 100), chunk(0, 100, 50), chunk(0, 150, 10)]), [3]);
        assert_eq!(sizes(&[chunk(0, 0, 100), chunk(0, 101, 50)]), [1, 1]);
        assert_eq!(sizes(&[chunk(0, 0, 100), chunk(1, 100, 50)]), [1, 1]);
        assert_eq!(sizes(&(0..4).map(|n| chunk(0, n * 10, 10)).collect::<Vec<_>>()), [3, 1]);
        assert_eq!(sizes(&[chunk(0, 0, 600), chunk(0, 600, 401)]), [1, 1]);
        assert_eq!(sizes(&[chunk(0, 0, 5000)]), [1]);
    }
}
