//! Reads a version as a read-only disk, the base below write caches of machines. Nothing here writes.
//!
//! # A read
//! 1. The chunk map gives the place of each chunk that the range touches, or says that the chunk is zero.
//! 2. Zero chunks are filled, chunks in the chunk cache are copied. If that was all, the request is completed
//!    on the caller's thread, without an allocation or a system call ([`Device::try_now`]).
//! 3. Otherwise `submit` joins the fetch of each missing chunk. The first request for a chunk queues the
//!    fetch; others wait for the same fetch. If another version has the chunk in another object, that object
//!    is fetched too, because one of the two may be damaged, or on a server that is away.
//! 4. A thread of the fetch pool reads the chunk's range of its object (adjacent chunks in one read),
//!    decompresses it, checks its hash, puts it into the cache, and copies it for each waiting request. The
//!    last piece completes the request. A chunk of a remote store is then written to the disk cache. Chunks
//!    in the disk cache are read by threads that never wait for servers, because all threads of the other
//!    pool may be waiting for them. A read that waits for unreachable servers occupies no thread.
//! 5. For a sequential reader the next chunks are prefetched ([`crate::readahead`]); for a boot, those that
//!    earlier boots read ([`crate::trace`]).

use std::borrow::Cow;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, Op, Request, SharedSlice,
};
use headwater_store::{Hash, Object, Pin, Store, StoreErrorKind};

use crate::chunk_cache::{ChunkCache, ChunkPlace, Joined, Waiter};
use crate::chunk_map::{ChunkMap, NotRead};
use crate::disk_cache::{DiskCache, RetainedVersion};
use crate::error::ImageError;
use crate::fetch::{Fetch, Fetching, MergeLimit, Source, group};
use crate::fetch_pool::{FetchPool, Once, PREFETCH_MAX_BYTES, Place, Task, Urgency, read_only};
use crate::manifest::{ChunkRef, Manifest, ObjectRef};
use crate::outline::Outline;
use crate::pending::{PendingRead, Piece, copy_piece, root, wrong_buffer};
use crate::readahead::Readahead;
use crate::trace::{Recorder, Trace};
use crate::units::{usize_of, usize_of_u32};

/// The most bytes that are prefetched for a sequential reader.
pub const READAHEAD_MAX_BYTES: u64 = 2 << 20;
/// The same for a remote store.
pub const READAHEAD_REMOTE_MAX_BYTES: u64 = 8 << 20;
/// A reader's window uses at most the size of the chunk cache divided by this.
const READAHEAD_CACHE_SHARE: u64 = 8;

/// A version of an image, open for reading. While it is open, the version cannot be removed from the store.
pub struct VersionReader {
    id: Hash,
    map: Arc<ChunkMap>,
    /// For work that continues after a call has returned.
    me: Weak<Self>,
    objects: Vec<Arc<dyn Object>>,
    cache: Arc<ChunkCache>,
    pool: Arc<FetchPool>,
    /// Threads that read chunks of a remote store from the local disk.
    kept_pool: Option<Arc<FetchPool>>,
    is_remote: bool,
    readahead: Readahead,
    recorder: OnceLock<Recorder>,
    /// The number of reasons to suppress readahead: boot traces being fetched, because a trace predicts
    /// better, and a caller that disabled readahead.
    prefetches: AtomicUsize,
    /// Retains the version's chunks in the local disk cache.
    kept: OnceLock<RetainedVersion>,
    _pin: Pin,
}

impl VersionReader {
    /// Opens the version with this manifest. Chunks are kept in `cache`, which all readers of the host share.
    pub fn open(store: &dyn Store, manifest: Hash, cache: Arc<ChunkCache>) -> Result<Arc<Self>, ImageError> {
        let disk = cache.disk().filter(|_| store.is_remote());
        let pin = pin(store, manifest, disk.map(Arc::as_ref))
            .map_err(|e| e.context(format!("cannot open version {}", manifest.short())))?;
        Self::open_pinned(store, manifest, cache, pin)
    }

    /// As [`VersionReader::open`], with a pin of the caller, who controls when it is released.
    pub fn open_pinned(
        store: &dyn Store,
        manifest: Hash,
        cache: Arc<ChunkCache>,
        pin: Pin,
    ) -> Result<Arc<Self>, ImageError> {
        let opening = |e: ImageError| e.context(format!("cannot open version {}", manifest.short()));
        let is_remote = store.is_remote();
        let disk = cache.disk().filter(|_| is_remote);
        let mut was_read = false;
        let read = || {
            was_read = true;
            ChunkMap::open(store, manifest, disk.map(Arc::as_ref))
        };
        let map = cache.maps().get(manifest, read).map_err(opening)?;
        if let Some(disk) = disk.filter(|_| !was_read) {
            use_kept_manifest(store, manifest, disk);
        }
        let objects = open_objects(store, map.outline()).map_err(opening)?;
        let place = if is_remote { Place::Remote } else { Place::Here };
        let pool = FetchPool::shared(place).map_err(|e| opening(e.into()))?;
        let kept_pool = disk.map(|_| FetchPool::shared(Place::Here)).transpose();
        let kept_pool = kept_pool.map_err(|e| opening(e.into()))?;
        let window = if is_remote { READAHEAD_REMOTE_MAX_BYTES } else { READAHEAD_MAX_BYTES };
        let window = window.min(cache.capacity_bytes() / READAHEAD_CACHE_SHARE);
        Ok(Arc::new_cyclic(|me| Self {
            id: manifest,
            readahead: Readahead::new(window / u64::from(map.outline().chunk_bytes()).max(1)),
            map,
            me: Weak::clone(me),
            objects,
            cache,
            pool,
            kept_pool,
            is_remote,
            recorder: OnceLock::new(),
            prefetches: AtomicUsize::new(0),
            kept: OnceLock::new(),
            _pin: pin,
        }))
    }

    /// Starts to record, for at most `lasts`, which chunks are read first. Only the first call has an effect.
    pub fn record(&self, lasts: Duration) {
        let (chunks, chunk_bytes) = (self.outline().chunks(), self.outline().chunk_bytes());
        self.recorder.get_or_init(|| Recorder::start(self.id, chunks, chunk_bytes, lasts));
    }

    /// Ends the recording, and returns the result; `None` if nothing was recorded.
    pub fn recorded(&self) -> Option<Trace> {
        let trace = self.recorder.get()?.finish();
        (!trace.chunks.is_empty()).then_some(trace)
    }

    /// Whether the recording has ended because its time is over.
    pub fn is_recording_over(&self) -> bool {
        self.recorder.get().is_some_and(Recorder::is_over)
    }

    /// Whether the version is read across a network.
    pub fn is_remote(&self) -> bool {
        self.is_remote
    }

    /// Disables readahead from now on.
    pub fn stop_readahead(&self) {
        self.prefetches.fetch_add(1, Ordering::Relaxed);
    }

    /// Suspends readahead until the returned value is dropped.
    pub(crate) fn begin_prefetch(&self) -> Prefetching<'_> {
        self.prefetches.fetch_add(1, Ordering::Relaxed);
        Prefetching(&self.prefetches)
    }

    pub(crate) fn cache(&self) -> &Arc<ChunkCache> {
        &self.cache
    }

    pub(crate) fn keep_on_disk(&self, kept: RetainedVersion) {
        // A second retention has no further effect.
        let _ = self.kept.set(kept);
    }

    /// What fetches of chunks of an object need.
    pub(crate) fn object(&self, number: usize) -> Option<Source> {
        let object = Arc::clone(self.objects.get(number)?);
        let (cache, is_remote) = (Arc::clone(&self.cache), self.is_remote);
        Some(Source { object, cache, chunk_bytes: usize_of_u32(self.outline().chunk_bytes()), is_remote })
    }

    /// The version's identity.
    pub fn id(&self) -> Hash {
        self.id
    }

    /// Which of its chunks have data.
    pub fn outline(&self) -> &Outline {
        self.map.outline()
    }

    /// The manifest of the version. It may have to be read for this.
    pub fn manifest(&self) -> Result<Cow<'_, Manifest>, ImageError> {
        self.map
            .whole()
            .map_err(|e| e.context(format!("cannot read the manifest of version {}", self.id.short())))
    }

    /// The numbers of the chunks that a range touches.
    fn numbers(&self, range: ByteRange) -> Range<u64> {
        let chunk_bytes = u64::from(self.outline().chunk_bytes());
        range.offset() / chunk_bytes..range.end().div_ceil(chunk_bytes)
    }

    /// Calls `then` when the places of these chunks are known, or cannot be read: now, or on a thread of the
    /// pool that reads them.
    fn when_mapped(
        &self,
        chunks: Range<u64>,
        urgency: Urgency,
        done: Completion,
        then: impl FnOnce(&Self, Result<(), IoError>, Completion) + Send + 'static,
    ) {
        if self.map.has(chunks.clone()) {
            return then(self, Ok(()), done);
        }
        // The caller has a reference, so this cannot fail.
        let Some(me) = self.me.upgrade() else { return };
        let (done, held) = root(done);
        self.push_map_task(urgency, move || {
            then(&me, me.map.load(chunks).map_err(IoError::from), done);
            // The receiver of the last answer may drop the version.
            drop(me);
            drop(held);
        });
    }

    fn push_map_task(&self, urgency: Urgency, task: impl FnOnce() + Send + 'static) {
        let task = Box::new(Once(task));
        match urgency {
            Urgency::Waited => self.pool.push_task(task),
            Urgency::Ahead => self.pool.push_task_ahead(Vec::new(), task),
        }
    }

    /// The stored bytes that must be fetched for a read of this range.
    pub(crate) fn absent_bytes(&self, range: ByteRange) -> u64 {
        // If this fails, the read that follows reports it.
        let _ = self.map.load(self.numbers(range));
        let chunks = self.pieces(range).filter_map(|piece| self.map.chunk(piece.index).ok().flatten());
        let absent = chunks.filter(|chunk| !self.cache.is_known(&chunk.hash));
        absent.map(|chunk| u64::from(chunk.stored_bytes)).sum()
    }

    /// The parts of `range` inside one chunk each, in order.
    fn pieces(&self, range: ByteRange) -> impl Iterator<Item = Piece> {
        let chunk_bytes = u64::from(self.outline().chunk_bytes());
        let mut at = range.offset();
        std::iter::from_fn(move || {
            let left = range.end().checked_sub(at).filter(|left| *left > 0)?;
            let within = at % chunk_bytes;
            let len = left.min(chunk_bytes - within);
            let piece = Piece {
                index: at / chunk_bytes,
                from: usize_of(within),
                len: usize_of(len),
                to: usize_of(at - range.offset()),
            };
            at += len;
            Some(piece)
        })
    }

    /// Fills the pieces that need no fetch, and calls `missing` for each of the others. Returns at the first
    /// missing piece if `missing` returns so.
    fn read_now(
        &self,
        recorder: Option<&Recorder>,
        range: ByteRange,
        into: &mut [u8],
        mut missing: impl FnMut(Piece, ChunkRef) -> bool,
    ) -> Result<(), IoError> {
        for piece in self.pieces(range) {
            let target = into.get_mut(piece.to..).and_then(|tail| tail.get_mut(..piece.len));
            let target = target.ok_or_else(wrong_buffer)?;
            let Some(chunk) = self.map.chunk(piece.index)? else {
                target.fill(0);
                continue;
            };
            if let Some(recorder) = recorder {
                recorder.touch(piece.index);
            }
            match self.cache.get(&chunk.hash) {
                Some(bytes) => copy_piece(&bytes, piece, target)?,
                None if missing(piece, *chunk) => {}
                None => return Ok(()),
            }
        }
        Ok(())
    }

    /// Whether the last of several chunks is missing. Sequential reads get it last, so this detects a read
    /// that must wait before the earlier chunks are copied.
    fn lacks_last(&self, range: ByteRange) -> bool {
        let number = |byte: u64| byte / u64::from(self.outline().chunk_bytes());
        let last = number(range.end().saturating_sub(1));
        let lacks =
            |chunk: Option<&ChunkRef>| chunk.is_some_and(|chunk| self.cache.peek(&chunk.hash).is_none());
        last > number(range.offset()) && self.map.chunk(last).map_or(true, lacks)
    }

    fn submit_read(&self, is_recorded: bool, range: ByteRange, buffer: Vec<u8>, done: Completion) {
        self.when_mapped(self.numbers(range), Urgency::Waited, done, move |me, mapped, done| match mapped {
            Ok(()) => me.submit_mapped(is_recorded, range, buffer, done),
            Err(error) => done.complete(Err(error), buffer),
        });
    }

    fn submit_mapped(&self, is_recorded: bool, range: ByteRange, mut buffer: Vec<u8>, done: Completion) {
        let recorder = self.recorder.get().filter(|_| is_recorded);
        let mut missing = Vec::new();
        let result = self.read_now(recorder, range, &mut buffer, |piece, chunk| {
            missing.push((piece, chunk));
            true
        });
        if missing.is_empty() || result.is_err() {
            return done.complete(result, buffer);
        }
        let read = PendingRead::start(missing.len(), buffer, done);
        let (mut must_fetch, mut joined) = (Vec::new(), Vec::new());
        for (piece, chunk) in missing {
            let read = Arc::clone(&read);
            let waiter: Waiter = Box::new(move |bytes| read.piece_is_here(piece, bytes));
            match self.join(chunk, Urgency::Waited, waiter) {
                Some(chunk) => must_fetch.push(chunk),
                None => joined.push(chunk.hash),
            }
        }
        self.promote(&joined);
        self.fetch(must_fetch, Urgency::Waited, self.merge_limit());
        self.read_ahead(range, true);
    }

    fn try_recorded(&self, recorder: Option<&Recorder>, op: Op<'_>) -> Result<Attempt, IoError> {
        match op {
            Op::Read { range, into } => {
                if self.lacks_last(range) || !self.map.has(self.numbers(range)) {
                    return Ok(Attempt::MustWait);
                }
                let mut complete = true;
                self.read_now(recorder, range, into, |_, _| {
                    complete = false;
                    false
                })?;
                if complete {
                    self.read_ahead(range, false);
                }
                Ok(if complete { Attempt::Done } else { Attempt::MustWait })
            }
            Op::Flush => Ok(Attempt::Done),
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Discard { .. } => Err(read_only()),
        }
    }

    fn submit_recorded(&self, is_recorded: bool, request: Request, done: Completion) {
        match request {
            Request::Read { range, buffer } => self.submit_read(is_recorded, range, buffer, done),
            Request::Prefetch { range } => self.submit_prefetch(range, done),
            Request::Flush => done.complete(Ok(()), Vec::new()),
            other => done.complete(Err(read_only()), other.into_buffer()),
        }
    }

    /// Prefetches the next chunks for a sequential reader.
    fn read_ahead(&self, range: ByteRange, missed: bool) {
        if self.prefetches.load(Ordering::Relaxed) > 0 {
            return;
        }
        let chunk_bytes = u64::from(self.outline().chunk_bytes());
        let first = range.offset() / chunk_bytes;
        let last = range.end().saturating_sub(1) / chunk_bytes;
        if let Some(ahead) = self.readahead.read(first, last, missed) {
            let ahead = ahead.start..ahead.end.min(self.outline().chunks());
            if self.map.has(ahead.clone()) {
                return self.fetch_range_ahead(ahead);
            }
            if self.pool.room_ahead() == 0 {
                return;
            }
            // This keeps the version in use only while the chunks are queued. A read of the chunks reports
            // errors.
            let (map, me) = (Arc::clone(&self.map), Weak::clone(&self.me));
            self.push_map_task(Urgency::Ahead, move || {
                if map.load(ahead.clone()).is_ok()
                    && let Some(me) = me.upgrade()
                {
                    me.fetch_range_ahead(ahead);
                }
            });
        }
    }

    fn fetch_range_ahead(&self, chunks: Range<u64>) {
        let absent = chunks.filter_map(|index| self.map.chunk(index).ok().flatten().copied());
        let mut must_fetch = Vec::new();
        for chunk in self.with_room_ahead(absent.filter(|chunk| !self.cache.is_known(&chunk.hash))) {
            must_fetch.extend(self.join(chunk, Urgency::Ahead, Box::new(|_| {})));
        }
        self.cache.count_ahead(must_fetch.len());
        self.fetch(must_fetch, Urgency::Ahead, self.merge_limit());
    }

    /// Prefetches chunks; `waiter` creates the callback for each of them.
    pub(crate) fn fetch_ahead(&self, chunks: Vec<ChunkRef>, waiter: &dyn Fn(&ChunkRef) -> Waiter) {
        let mut must_fetch = Vec::new();
        for chunk in chunks {
            must_fetch.extend(self.join(chunk, Urgency::Ahead, waiter(&chunk)));
        }
        self.cache.count_ahead(must_fetch.len());
        self.fetch(must_fetch, Urgency::Ahead, MergeLimit::AHEAD);
    }

    /// The first of these chunks, as many as fit into the queue of prefetches.
    fn with_room_ahead(&self, chunks: impl IntoIterator<Item = ChunkRef>) -> Vec<ChunkRef> {
        let mut with_room = Vec::new();
        for (pool, chunks) in self.by_pool(chunks) {
            let groups = group(chunks, self.merge_limit()).into_iter();
            with_room.extend(groups.take(pool.room_ahead()).flatten());
        }
        with_room
    }

    /// Groups the chunks by the pool that fetches them.
    fn by_pool(&self, chunks: impl IntoIterator<Item = ChunkRef>) -> Vec<(&Arc<FetchPool>, Vec<ChunkRef>)> {
        let (Some(kept_pool), Some(disk)) = (&self.kept_pool, self.cache.disk()) else {
            return vec![(&self.pool, chunks.into_iter().collect())];
        };
        let (kept, others) = chunks.into_iter().partition(|chunk| disk.has(&chunk.hash));
        vec![(kept_pool, kept), (&self.pool, others)]
    }

    fn promote(&self, chunks: &[Hash]) {
        self.pool.promote(chunks);
        if let Some(pool) = &self.kept_pool {
            pool.promote(chunks);
        }
    }

    fn merge_limit(&self) -> MergeLimit {
        if self.is_remote { MergeLimit::REMOTE } else { MergeLimit::HERE }
    }

    /// Fetches missing chunks at the beginning of the range into the cache, after reads that a request waits
    /// for. Does nothing if many prefetches are queued already.
    fn submit_prefetch(&self, range: ByteRange, done: Completion) {
        let range = range.clipped_to(range.offset().saturating_add(PREFETCH_MAX_BYTES));
        let chunks = self.numbers(range);
        if self.pool.room_ahead() == 0 && !self.map.has(chunks.clone()) {
            return done.complete(Ok(()), Vec::new());
        }
        self.when_mapped(chunks, Urgency::Ahead, done, move |me, mapped, done| match mapped {
            Ok(()) => me.prefetch_mapped(range, done),
            Err(error) => done.complete(Err(error), Vec::new()),
        });
    }

    fn prefetch_mapped(&self, range: ByteRange, done: Completion) {
        let absent = |piece: Piece| {
            let chunk = self.map.chunk(piece.index).ok().flatten();
            chunk.filter(|chunk| self.cache.get(&chunk.hash).is_none()).copied()
        };
        let missing: Vec<ChunkRef> = self.pieces(range).filter_map(absent).collect();
        let missing = self.with_room_ahead(missing);
        if missing.is_empty() {
            return done.complete(Ok(()), Vec::new());
        }
        let read = PendingRead::start(missing.len(), Vec::new(), done);
        let nothing = Piece { index: 0, from: 0, len: 0, to: 0 };
        let mut must_fetch = Vec::new();
        for chunk in missing {
            let read = Arc::clone(&read);
            let waiter: Waiter = Box::new(move |bytes| read.piece_is_here(nothing, bytes));
            must_fetch.extend(self.join(chunk, Urgency::Ahead, waiter));
        }
        self.cache.count_ahead(must_fetch.len());
        self.fetch(must_fetch, Urgency::Ahead, self.merge_limit());
    }

    /// Registers `waiter` for the chunk. Returns the chunk if it must be fetched: then others may already
    /// wait for it, and the caller must call [`VersionReader::fetch`].
    fn join(&self, chunk: ChunkRef, urgency: Urgency, waiter: Waiter) -> Option<ChunkRef> {
        let joined = self.cache.join(&chunk.hash, self.place(&chunk), urgency, waiter);
        (joined == Joined::MustFetch).then_some(chunk)
    }

    /// The place of a chunk in this version.
    fn place(&self, chunk: &ChunkRef) -> ChunkPlace {
        let object = self.outline().objects().get(usize_of_u32(chunk.object));
        // A parsed manifest refers to no object that it lacks.
        ChunkPlace::new(object.map_or(Hash([0; 32]), |object| object.id), chunk)
    }

    fn fetch(&self, chunks: Vec<ChunkRef>, urgency: Urgency, limit: MergeLimit) {
        for (pool, chunks) in self.by_pool(chunks) {
            for group in group(chunks, limit) {
                self.fetch_group(pool, group, urgency);
            }
        }
    }

    fn fetch_group(&self, pool: &Arc<FetchPool>, group: Vec<ChunkRef>, urgency: Urgency) {
        let source = group.first().and_then(|chunk| self.object(usize_of_u32(chunk.object)));
        let chunks: Vec<Hash> = group.iter().map(|chunk| chunk.hash).collect();
        let fetch = |chunk: ChunkRef| Fetch::new(&self.cache, chunk, self.place(&chunk));
        let fetches: Vec<Fetch> = group.into_iter().map(fetch).collect();
        // Dropping a fetch answers its waiters with an error. A parsed manifest refers to no object that it
        // lacks.
        let Some(source) = source else { return };
        let other = (!Arc::ptr_eq(pool, &self.pool)).then(|| Arc::clone(&self.pool));
        let task: Box<dyn Task> = match other {
            None => Box::new(Fetching::new(source, fetches, urgency)),
            // The chunks are no longer adjacent, so they are fetched one by one.
            Some(other) => Box::new(Once(move || {
                for fetch in source.fetch_kept(fetches) {
                    other.push_task(Box::new(Fetching::new(source.clone(), vec![fetch], urgency)));
                }
            })),
        };
        match urgency {
            Urgency::Waited => pool.push_task(task),
            Urgency::Ahead => {
                let mut wanted = chunks.clone();
                pool.push_task_ahead(chunks, task);
                // A read that joined before this was queued did not find it in the queue.
                wanted.retain(|chunk| self.cache.is_waited_for(chunk));
                pool.promote(&wanted);
            }
        }
    }
}

/// Counts a boot trace that is being fetched.
pub(crate) struct Prefetching<'a>(&'a AtomicUsize);

impl Drop for Prefetching<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Prevents the removal of a version. If its manifest is cached on the local disk, the version can be pinned
/// and opened while the store cannot be reached. The pin takes effect when the store is back.
pub fn pin(store: &dyn Store, id: Hash, disk: Option<&DiskCache>) -> Result<Pin, ImageError> {
    let is_kept = || disk.is_some_and(|disk| disk.manifest(id).is_some());
    match store.pin(id) {
        Err(e) if e.kind() == StoreErrorKind::Unreachable && is_kept() => {
            tracing::warn!(version = %id.short(), error = %e, "the store cannot be reached: a version in use is pinned when the store is back");
            Ok(store.pin_later(id)?)
        }
        pinned => Ok(pinned?),
    }
}

/// Marks the cached manifest as used now, although another reader has it in memory. Caches it again if other
/// manifests have displaced it.
fn use_kept_manifest(store: &dyn Store, id: Hash, disk: &DiskCache) {
    if let Ok(false) = disk.use_manifest(id)
        && let Ok(bytes) = store.manifest(id)
    {
        disk.keep_manifest(id, &bytes);
    }
}

/// Opens the objects to which a manifest refers.
pub(crate) fn open_objects(store: &dyn Store, outline: &Outline) -> Result<Vec<Arc<dyn Object>>, ImageError> {
    let open = |object: &ObjectRef| store.open_object_of(object.id, object.len_bytes);
    Ok(outline.objects().iter().map(open).collect::<Result<_, _>>()?)
}

impl Device for VersionReader {
    fn geometry(&self) -> Geometry {
        Geometry {
            logical_block_bytes: self.outline().sector_bytes(),
            ..read_only_geometry(self.outline().size_bytes())
        }
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        self.try_recorded(self.recorder.get(), op)
    }

    fn peek(&self, range: ByteRange, into: &mut [u8]) -> bool {
        self.pieces(range).all(|piece| {
            let target = into.get_mut(piece.to..).and_then(|tail| tail.get_mut(..piece.len));
            let Some(target) = target else { return false };
            match self.map.chunk(piece.index) {
                Ok(Some(chunk)) => self
                    .cache
                    .peek(&chunk.hash)
                    .is_some_and(|bytes| copy_piece(&bytes, piece, target).is_ok()),
                Ok(None) => {
                    target.fill(0);
                    true
                }
                Err(NotRead) => false,
            }
        })
    }

    /// Returns chunks in the cache. Zero chunks are not in memory, so a range that contains one is not
    /// shared.
    fn read_shared(&self, range: ByteRange, parts: &mut Vec<SharedSlice>) -> bool {
        let before = parts.len();
        let slices = |piece: Piece| {
            let chunk = self.cache.get(&self.map.chunk(piece.index).ok()??.hash)?;
            SharedSlice::new(chunk, piece.from, piece.len)
        };
        let is_whole = self.pieces(range).all(|piece| slices(piece).map(|part| parts.push(part)).is_some());
        if !is_whole {
            parts.truncate(before);
            return false;
        }
        // It counts as a read of the range.
        if let Some(recorder) = self.recorder.get() {
            self.pieces(range).for_each(|piece| recorder.touch(piece.index));
        }
        self.read_ahead(range, false);
        true
    }

    fn unrecorded(self: Arc<Self>) -> Option<Arc<dyn Device>> {
        Some(Arc::new(Unrecorded(self)))
    }

    fn submit(&self, request: Request, done: Completion) {
        self.submit_recorded(true, request, done);
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        let chunk_bytes = u64::from(self.outline().chunk_bytes());
        let mut out = Vec::new();
        let mut at = range.offset();
        while at < range.end() && out.len() < max_extents.max(1) {
            let index = at / chunk_bytes;
            let (data, chunks) = self.outline().run_at(index);
            let end = index.saturating_add(chunks).saturating_mul(chunk_bytes).min(range.end());
            let len = end.checked_sub(at).filter(|len| *len > 0).ok_or_else(wrong_buffer)?;
            let kind = if data { ExtentKind::Data } else { ExtentKind::Hole };
            out.push(Extent { len, kind });
            at = end;
        }
        Ok(out)
    }
}

impl std::fmt::Debug for VersionReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (id, size) = (self.id.short(), self.outline().size_bytes());
        f.debug_struct("VersionReader").field("id", &id).field("size_bytes", &size).finish_non_exhaustive()
    }
}

/// A version without recording, for readers of [`Device::unrecorded`].
struct Unrecorded(Arc<VersionReader>);

impl Device for Unrecorded {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        self.0.try_recorded(None, op)
    }

    fn peek(&self, range: ByteRange, into: &mut [u8]) -> bool {
        self.0.peek(range, into)
    }

    fn submit(&self, request: Request, done: Completion) {
        self.0.submit_recorded(false, request, done);
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        self.0.extents(range, max_extents)
    }
}

/// The geometry of a read-only disk.
pub(crate) fn read_only_geometry(size_bytes: u64) -> Geometry {
    Geometry {
        size_bytes,
        logical_block_bytes: 512,
        physical_block_bytes: 4096,
        read_only: true,
        volatile_cache: false,
    }
}
