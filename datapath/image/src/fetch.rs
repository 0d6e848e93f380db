//! Fetching chunks: from the local disk cache, or from the store, several that lie side by side in one read.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_block::{IoError, IoErrorKind, Pages};
use headwater_store::{Check, Object, ReadFor, StoreError, StoreErrorKind, Waiting};

use crate::chunk;
use crate::chunk_cache::{ChunkCache, ChunkPlace};
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
    place: ChunkPlace,
    ended: bool,
}

impl Fetch {
    /// For a chunk that [`ChunkCache::join`] said must be fetched from this place.
    pub(crate) fn new(cache: &Arc<ChunkCache>, chunk: ChunkRef, place: ChunkPlace) -> Self {
        Self { cache: Arc::clone(cache), chunk, place, ended: false }
    }

    pub(crate) fn end(mut self, outcome: Result<Pages, IoError>) {
        self.tell(outcome);
    }

    /// The same where it is a part of a read that goes on. Once only: whoever comes after that begins another one.
    fn tell(&mut self, outcome: Result<Pages, IoError>) {
        if !std::mem::replace(&mut self.ended, true) {
            self.cache.fetched(&self.chunk.hash, &self.place, outcome);
        }
    }

    /// Whether anybody still waits for it.
    fn is_needed(&self) -> bool {
        !self.ended && self.cache.is_awaited_from(&self.chunk.hash, &self.place)
    }

    /// Ends it where nobody waits for it: whoever comes now begins another one.
    fn end_unneeded(mut self) {
        self.ended = true;
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        if !self.ended {
            self.tell(Err(IoError::new(IoErrorKind::Device, "reading the chunk was given up")));
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

    /// Reads back those of the chunks that an earlier process left on the local disk, once in each process, and those that could not
    /// be synced: these are put once more, and need not come from the store again. What is not what it should be is forgotten.
    pub(crate) fn read_back(&self, chunks: &[ChunkRef], is_over: impl Fn() -> bool) {
        let Some(disk) = self.cache.disk() else { return };
        PACKED.with_borrow_mut(|packed| {
            let mut bytes = vec![0; self.chunk_bytes];
            for chunk in chunks.iter().take_while(|_| !is_over()) {
                if !disk.get_unread(&chunk.hash, packed) {
                    continue;
                }
                match chunk::unpack(packed, &mut bytes, &chunk.hash) {
                    Ok(()) => {
                        disk.was_right(&chunk.hash);
                        // What is not lacking is not put again.
                        disk.put(&chunk.hash, packed);
                    }
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
    /// It was not run yet.
    is_new: bool,
    /// The read that waits for its store, with all that it was asked for: of that some may have come otherwise, and ended.
    asked: Vec<Fetch>,
    waiting: Waiting,
    /// What is left to be read after it, each in one read.
    parts: VecDeque<Vec<Fetch>>,
    /// What was read and is still to be kept on the local disk, packed: that may make room first, which nobody is to wait for.
    to_keep: Vec<(Vec<ChunkRef>, Vec<u8>)>,
}

impl Fetching {
    pub(crate) fn new(source: Source, fetches: Vec<Fetch>, urgency: Urgency) -> Self {
        Self {
            source,
            is_ahead: urgency == Urgency::Ahead,
            is_new: true,
            asked: Vec::new(),
            waiting: Waiting::default(),
            parts: VecDeque::from([fetches]),
            to_keep: Vec::new(),
        }
    }

    /// What has not ended.
    fn left(&self) -> impl Iterator<Item = &Fetch> {
        self.asked.iter().chain(self.parts.iter().flatten()).filter(|fetch| !fetch.ended)
    }

    /// Whether the read that waits is to be asked for again.
    fn goes_on(&self, now: Instant) -> bool {
        // A store may have kept room for what somebody waits for.
        self.waiting.is_due(now) || (self.waiting.read_for() == ReadFor::Later && self.is_waited_for())
    }

    /// Whether something came while this waited for its store: to the local disk, with a copy, or from another place.
    fn has_come(&self) -> bool {
        let disk = self.source.keeps_on();
        let is_here = |fetch: &Fetch| disk.is_some_and(|disk| disk.has_now(&fetch.chunk.hash));
        self.left().any(|fetch| !fetch.is_needed() || is_here(fetch))
    }

    /// Takes out what is on the local disk, and what came from another place. The read that waits goes on as it was asked for: its
    /// bytes may be on their way, and whoever is away is asked less and less often.
    fn take_out(&mut self, packed: &mut Vec<u8>) {
        for fetch in self.asked.iter_mut().filter(|fetch| !fetch.ended) {
            if !fetch.is_needed() {
                fetch.ended = true;
            } else if let Some(bytes) = self.source.kept_on_disk(&fetch.chunk, packed) {
                fetch.tell(Ok(bytes));
            }
        }
        let mut parts = VecDeque::new();
        for part in self.parts.drain(..) {
            let mut rest = Vec::new();
            for fetch in part {
                match self.source.kept_on_disk(&fetch.chunk, packed) {
                    Some(bytes) => fetch.end(Ok(bytes)),
                    None if fetch.is_needed() => {
                        rest.push(fetch);
                        continue;
                    }
                    None => fetch.end_unneeded(),
                }
                // What lies before this one is not beside what comes after it.
                parts.push_back(std::mem::take(&mut rest));
            }
            parts.push_back(rest);
        }
        self.parts = parts;
    }

    /// Gives the read that waits up where nobody needs anything of it any more.
    fn give_up_unneeded(&mut self) {
        if !self.asked.iter().any(Fetch::is_needed) {
            self.asked.drain(..).for_each(Fetch::end_unneeded);
            self.waiting = Waiting::default();
        }
    }

    /// Whether there is something to read: the next part, where no read waits.
    fn has_next(&mut self) -> bool {
        while self.asked.is_empty() {
            let Some(part) = self.parts.pop_front() else { return false };
            self.asked = part;
        }
        true
    }

    /// Reads what was asked for. Whether it waits.
    fn read_asked(&mut self, packed: &mut Vec<u8>) -> bool {
        let chunks: Vec<ChunkRef> = self.asked.iter().map(|fetch| fetch.chunk).collect();
        let read = self.source.read(&chunks, packed, &mut self.waiting);
        let Some(read) = read.transpose() else { return true };
        let asked = std::mem::take(&mut self.asked);
        match read {
            Ok(unpacked) => {
                asked.into_iter().zip(unpacked).for_each(|(fetch, bytes)| fetch.end(Ok(bytes)));
                if self.source.keeps_on().is_some() {
                    self.to_keep.push((chunks, std::mem::take(packed)));
                }
            }
            // Damage is that of one chunk: the others are good.
            Err(e) if e.kind() == ImageErrorKind::Damaged && asked.len() > 1 => {
                let left = asked.into_iter().filter(|fetch| !fetch.ended);
                left.rev().for_each(|fetch| self.parts.push_front(vec![fetch]));
            }
            Err(e) => {
                let error = IoError::from(e);
                for fetch in asked.into_iter().filter(|fetch| !fetch.ended) {
                    // It may have come with a copy while this waited.
                    let kept = self.source.kept_on_disk(&fetch.chunk, packed);
                    fetch.end(kept.ok_or_else(|| error.clone()));
                }
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
                if self.source.keeps_on().is_some() {
                    self.take_out(packed);
                }
            } else {
                // A copy or another version's fetch may bring something while this waits. Where the read is due all of it may be here.
                if !self.goes_on(Instant::now()) && self.has_come() {
                    self.take_out(packed);
                }
                self.give_up_unneeded();
                // What waits is not asked for again before its time because others came.
                if !self.goes_on(Instant::now()) {
                    return Some(self as Box<dyn Task>);
                }
            }
            while self.has_next() {
                let later = self.is_ahead && !self.is_waited_for();
                self.waiting.set_read_for(if later { ReadFor::Later } else { ReadFor::Now });
                if self.read_asked(packed) {
                    return Some(self as Box<dyn Task>);
                }
            }
            self.keep(packed);
            None
        })
    }

    fn is_due(&self, now: Instant) -> bool {
        self.goes_on(now) || self.has_come()
    }

    fn is_waited_for(&self) -> bool {
        self.left().any(|fetch| self.source.cache.is_waited_for(&fetch.chunk.hash))
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
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use headwater_store::Hash;

    use super::*;
    use crate::chunk_cache::Joined;
    use crate::disk_cache::DISK_CACHE_MIN_BYTES;
    use crate::disk_cache::tests::sync_in_vain;

    /// Chunks of 4 KiB as they are.
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

    /// Three of them, side by side.
    fn three_chunks() -> (Vec<u8>, Vec<ChunkRef>) {
        let bytes: Vec<u8> = (1..=3).flat_map(|n| [n; 4096]).collect();
        let chunks = bytes.chunks(4096).zip(0..).map(|(chunk, n)| ChunkRef {
            hash: Hash::of(chunk),
            object: 0,
            stored_bytes: 4096,
            offset: n * 4096,
        });
        let chunks = chunks.collect();
        (bytes, chunks)
    }

    /// An object whose server is away, for good.
    struct Away;

    impl Object for Away {
        fn id(&self) -> Hash {
            Hash([0; 32])
        }

        fn len_bytes(&self) -> u64 {
            3 * 4096
        }

        fn read_range(&self, _: u64, _: &mut [u8]) -> Result<(), StoreError> {
            Err(StoreError::new(StoreErrorKind::Unreachable, "it is away"))
        }

        fn read_or_wait(
            &self,
            _: u64,
            _: &mut [u8],
            _: &mut Check<'_>,
            waiting: &mut Waiting,
        ) -> Result<bool, StoreError> {
            waiting.begin((), |_| false);
            Ok(false)
        }
    }

    #[test]
    fn what_comes_while_a_read_waits_for_its_store_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let disk = DiskCache::open(dir.path(), DISK_CACHE_MIN_BYTES).unwrap();
        let cache = ChunkCache::with_disk(1 << 20, Arc::clone(&disk));
        let (bytes, chunks) = three_chunks();
        let told = Arc::new(Mutex::new(Vec::new()));
        let join = |chunk: &ChunkRef, object: Hash| {
            let (told, place) = (Arc::clone(&told), ChunkPlace::new(object, chunk));
            let tell = move |chunk: Result<&[u8], &IoError>| told.lock().unwrap().push(chunk.unwrap()[0]);
            assert_eq!(cache.join(&chunk.hash, place, Urgency::Waited, Box::new(tell)), Joined::MustFetch);
            Fetch::new(&cache, *chunk, place)
        };
        let fetches = chunks.iter().map(|chunk| join(chunk, Away.id())).collect();
        let source =
            Source { object: Arc::new(Away), cache: Arc::clone(&cache), chunk_bytes: 4096, is_remote: true };
        let task = Box::new(Fetching::new(source, fetches, Urgency::Waited)).run().expect("it does not wait");
        assert!(!task.is_due(Instant::now()));
        // Another version has the last one elsewhere, and a copy brings the one in the middle.
        join(&chunks[2], Hash([1; 32])).end(Ok(Pages::copy_of(&bytes[8192..]).unwrap()));
        disk.put(&chunks[1].hash, &bytes[4096..8192]);
        assert_eq!(*told.lock().unwrap(), [3, 3]);
        assert!(task.is_due(Instant::now()));
        let task = task.run().expect("it does not wait for the first one");
        assert_eq!(*told.lock().unwrap(), [3, 3, 2]);
        assert!(!task.is_due(Instant::now()));
        disk.put(&chunks[0].hash, &bytes[..4096]);
        assert!(task.is_due(Instant::now()) && task.run().is_none());
        assert_eq!(*told.lock().unwrap(), [3, 3, 2, 1]);
    }

    /// The same as [`Bytes`], on their way until they are here.
    struct Coming {
        bytes: Vec<u8>,
        are_here: Arc<AtomicBool>,
        /// How often they were asked for, and given up.
        asked: AtomicU64,
        given_up: Arc<AtomicU64>,
    }

    /// Bytes on their way.
    struct Transfer(Arc<AtomicU64>);

    impl Drop for Transfer {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    impl Object for Coming {
        fn id(&self) -> Hash {
            Hash([0; 32])
        }

        fn len_bytes(&self) -> u64 {
            u64_of(self.bytes.len())
        }

        fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
            let at = usize::try_from(offset).unwrap();
            into.copy_from_slice(&self.bytes[at..at + into.len()]);
            Ok(())
        }

        fn read_or_wait(
            &self,
            offset: u64,
            into: &mut [u8],
            check: &mut Check<'_>,
            waiting: &mut Waiting,
        ) -> Result<bool, StoreError> {
            let transfer = waiting.end::<Transfer>().unwrap_or_else(|| {
                self.asked.fetch_add(1, Ordering::SeqCst);
                Transfer(Arc::clone(&self.given_up))
            });
            if !self.are_here.load(Ordering::SeqCst) {
                let are_here = Arc::clone(&self.are_here);
                waiting.begin(transfer, move |_| are_here.load(Ordering::SeqCst));
                return Ok(false);
            }
            self.read_checked(offset, into, check)?;
            // It is over, and not given up.
            self.given_up.fetch_sub(1, Ordering::SeqCst);
            Ok(true)
        }
    }

    #[test]
    fn what_is_on_its_way_is_not_asked_for_again_because_a_part_of_it_came_otherwise() {
        for is_late in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let disk = DiskCache::open(dir.path(), DISK_CACHE_MIN_BYTES).unwrap();
            let cache = ChunkCache::with_disk(1 << 20, Arc::clone(&disk));
            let (bytes, chunks) = three_chunks();
            let told = Arc::new(Mutex::new(Vec::new()));
            let join = |chunk: &ChunkRef, object: Hash| {
                let (told, place) = (Arc::clone(&told), ChunkPlace::new(object, chunk));
                let tell = move |chunk: Result<&[u8], &IoError>| told.lock().unwrap().push(chunk.unwrap()[0]);
                let joined = cache.join(&chunk.hash, place, Urgency::Waited, Box::new(tell));
                assert_eq!(joined, Joined::MustFetch);
                Fetch::new(&cache, *chunk, place)
            };
            let (are_here, given_up) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
            let object = Arc::new(Coming {
                bytes: bytes.clone(),
                are_here: Arc::clone(&are_here),
                asked: AtomicU64::new(0),
                given_up: Arc::clone(&given_up),
            });
            let counts = || (object.asked.load(Ordering::SeqCst), given_up.load(Ordering::SeqCst));
            let start = |chunks: &[ChunkRef]| {
                let fetches = chunks.iter().map(|chunk| join(chunk, Hash([0; 32]))).collect();
                let source = Source {
                    object: Arc::clone(&object) as Arc<dyn Object>,
                    cache: Arc::clone(&cache),
                    chunk_bytes: 4096,
                    is_remote: true,
                };
                let task = Box::new(Fetching::new(source, fetches, Urgency::Waited));
                task.run().expect("it does not wait")
            };
            let mut task = start(&chunks);
            // Another version has the last one elsewhere, and a copy brings the one in the middle.
            join(&chunks[2], Hash([1; 32])).end(Ok(Pages::copy_of(&bytes[8192..]).unwrap()));
            disk.put(&chunks[1].hash, &bytes[4096..8192]);
            assert!(task.is_due(Instant::now()));
            if is_late {
                // Whoever waits for these is told, and the other one goes on coming.
                task = task.run().expect("it does not wait for the first one");
                assert_eq!(*told.lock().unwrap(), [3, 3, 2]);
                assert!(!task.is_due(Instant::now()));
            }
            are_here.store(true, Ordering::SeqCst);
            assert!(task.is_due(Instant::now()) && task.run().is_none());
            let mut told_last = told.lock().unwrap().split_off(2);
            told_last.sort_unstable();
            assert_eq!(told_last, [1, 2]);
            assert_eq!(counts(), (1, 0), "what was on its way was given up");
            assert_eq!(cache.counters().fetched_bytes, 3 * 4096);

            // Nobody needs what is on its way any more.
            are_here.store(false, Ordering::SeqCst);
            let other = [4_u8; 4096];
            let chunk = ChunkRef { hash: Hash::of(&other), object: 0, stored_bytes: 4096, offset: 0 };
            let task = start(&[chunk]);
            disk.put(&chunk.hash, &other);
            assert!(task.is_due(Instant::now()) && task.run().is_none());
            assert_eq!((told.lock().unwrap().last(), counts()), (Some(&4), (2, 1)));
        }
    }

    #[test]
    fn what_could_not_be_synced_is_put_once_more_and_not_fetched() {
        let dir = tempfile::tempdir().unwrap();
        let disk = DiskCache::open(dir.path(), DISK_CACHE_MIN_BYTES).unwrap();
        let (bytes, chunks) = three_chunks();
        // Of the last one there is something else.
        chunks.iter().zip([&bytes[..4096], &bytes[4096..8192], &[9; 4096][..]]).for_each(
            |(chunk, stored)| {
                disk.put(&chunk.hash, stored);
            },
        );
        sync_in_vain(&disk, 0);
        assert!(chunks.iter().all(|chunk| disk.lacks(&chunk.hash) && disk.has(&chunk.hash)));
        let cache = ChunkCache::with_disk(1 << 20, Arc::clone(&disk));
        let object = Arc::new(Bytes(Vec::new()));
        Source { object, cache, chunk_bytes: 4096, is_remote: true }.read_back(&chunks, || false);
        disk.sync().unwrap();
        let durable: Vec<bool> = chunks.iter().map(|chunk| disk.is_durable(&chunk.hash)).collect();
        assert_eq!((durable, disk.has(&chunks[2].hash)), (vec![true, true, false], false));
        assert_eq!((disk.counters().writes, disk.counters().damaged), (5, 1));
        // Once is enough.
        assert!(!disk.get_unread(&chunks[0].hash, &mut Vec::new()));
    }

    #[test]
    fn whoever_waits_is_answered_before_what_came_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let disk = DiskCache::open(dir.path(), DISK_CACHE_MIN_BYTES).unwrap();
        let cache = ChunkCache::with_disk(1 << 20, Arc::clone(&disk));
        let (bytes, chunks) = three_chunks();
        // The one in the middle is here: those beside it are read one after the other.
        disk.put(&chunks[1].hash, &bytes[4096..8192]);
        let kept_then = Arc::new(Mutex::new(Vec::new()));
        let fetch = |chunk: &ChunkRef| {
            let (disk, kept_then) = (Arc::clone(&disk), Arc::clone(&kept_then));
            let waiter = move |chunk: Result<&[u8], &IoError>| {
                assert_eq!(chunk.unwrap().len(), 4096);
                kept_then.lock().unwrap().push(disk.counters().writes);
            };
            let place = ChunkPlace::new(Hash([0; 32]), chunk);
            assert_eq!(cache.join(&chunk.hash, place, Urgency::Waited, Box::new(waiter)), Joined::MustFetch);
            Fetch::new(&cache, *chunk, place)
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
