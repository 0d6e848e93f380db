//! A version as a read-only disk.
//!
//! # A read
//! 1. The chunk map says, for each chunk that the range touches, zero or where it is.
//! 2. Zero: fill. In the chunk cache: copy. If that was all, the request is done on the caller's thread,
//!    without an allocation or a system call ([`Device::try_now`]).
//! 3. Otherwise `submit` joins the fetch of each missing chunk. Whoever comes first for a chunk queues the
//!    fetch, the others wait for the same.
//! 4. A thread of the fetch pool reads the chunk's range of its object, unpacks it, checks its hash, puts it
//!    into the cache and copies from it for each request that waits. The last piece of a request answers it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, IoErrorKind, Lent, Op,
    Request,
};
use headwater_store::{Hash, Object, Pin, Store};
use parking_lot::Mutex;

use crate::chunk;
use crate::chunk_cache::{ChunkCache, Joined};
use crate::error::{ImageError, ImageErrorKind};
use crate::fetch_pool::{FetchPool, read_only};
use crate::manifest::{ChunkRef, Manifest};
use crate::units::{usize_of, usize_of_u32};

/// A version of an image, open for reading. It cannot be removed from the store meanwhile.
pub struct VersionReader {
    id: Hash,
    manifest: Manifest,
    objects: Vec<Arc<dyn Object>>,
    cache: Arc<ChunkCache>,
    pool: Arc<FetchPool>,
    _pin: Pin,
}

impl VersionReader {
    /// Opens the version with this manifest. Chunks are kept in `cache`, which all readers of the host share.
    pub fn open(store: &dyn Store, manifest: Hash, cache: Arc<ChunkCache>) -> Result<Arc<Self>, ImageError> {
        let opening = |e: ImageError| e.context(format!("cannot open version {}", manifest.short()));
        let pin = store.pin(manifest).map_err(|e| opening(e.into()))?;
        let (parsed, objects) = open_version(store, manifest).map_err(opening)?;
        let pool = FetchPool::shared().map_err(|e| opening(e.into()))?;
        Ok(Arc::new(Self { id: manifest, manifest: parsed, objects, cache, pool, _pin: pin }))
    }

    /// The version's identity.
    pub fn id(&self) -> Hash {
        self.id
    }

    /// What the version consists of.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The parts of `range` that lie in one chunk each, in order.
    fn pieces(&self, range: ByteRange) -> impl Iterator<Item = Piece> {
        let chunk_bytes = u64::from(self.manifest.chunk_bytes());
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

    /// Fills what needs no fetch; calls `missing` for each of the other pieces. Returns at the first missing
    /// one if that says so.
    fn read_now(
        &self,
        range: ByteRange,
        into: &mut [u8],
        mut missing: impl FnMut(Piece, ChunkRef) -> bool,
    ) -> Result<(), IoError> {
        for piece in self.pieces(range) {
            let target = into.get_mut(piece.to..).and_then(|tail| tail.get_mut(..piece.len));
            let target = target.ok_or_else(wrong_buffer)?;
            let Some(chunk) = self.manifest.chunk(piece.index) else {
                target.fill(0);
                continue;
            };
            match self.cache.get(&chunk.hash) {
                Some(bytes) => copy_piece(&bytes, piece, target)?,
                None if missing(piece, *chunk) => {}
                None => return Ok(()),
            }
        }
        Ok(())
    }

    fn submit_read(&self, range: ByteRange, mut buffer: Vec<u8>, done: Completion) {
        let mut missing = Vec::new();
        let result = self.read_now(range, &mut buffer, |piece, chunk| {
            missing.push((piece, chunk));
            true
        });
        if missing.is_empty() || result.is_err() {
            return done.complete(result, buffer);
        }
        let read = Arc::new(PendingRead {
            left: AtomicUsize::new(missing.len()),
            state: Mutex::new(ReadState { buffer, result: Ok(()), done: Some(done) }),
        });
        for (piece, chunk) in missing {
            let read = Arc::clone(&read);
            self.join(chunk, Box::new(move |bytes| read.piece_is_here(piece, bytes)));
        }
    }

    /// Brings what is missing of the range into the cache.
    fn submit_prefetch(&self, range: ByteRange, done: Completion) {
        let absent = |piece: Piece| {
            self.manifest.chunk(piece.index).filter(|chunk| self.cache.get(&chunk.hash).is_none()).copied()
        };
        let missing: Vec<ChunkRef> = self.pieces(range).filter_map(absent).collect();
        if missing.is_empty() {
            return done.complete(Ok(()), Vec::new());
        }
        let read = Arc::new(PendingRead {
            left: AtomicUsize::new(missing.len()),
            state: Mutex::new(ReadState { buffer: Vec::new(), result: Ok(()), done: Some(done) }),
        });
        let nothing = Piece { index: 0, from: 0, len: 0, to: 0 };
        for chunk in missing {
            let read = Arc::clone(&read);
            self.join(chunk, Box::new(move |bytes| read.piece_is_here(nothing, bytes)));
        }
    }

    fn join(&self, chunk: ChunkRef, waiter: crate::chunk_cache::Waiter) {
        if self.cache.join(&chunk.hash, waiter) == Joined::Waiting {
            return;
        }
        // From here on a fetch is under way that others may wait for: it must end with `fetched`.
        let mut fetch = Fetch { cache: Arc::clone(&self.cache), hash: chunk.hash, ended: false };
        let Some(object) = self.objects.get(usize_of_u32(chunk.object)).map(Arc::clone) else {
            return fetch.end(Err(IoError::new(IoErrorKind::Corrupt, "the chunk lies in no object")));
        };
        let chunk_bytes = usize_of_u32(self.manifest.chunk_bytes());
        self.pool.push(move || {
            let outcome = fetch_chunk(object.as_ref(), &chunk, fetch.cache.buffer(chunk_bytes));
            fetch.end(outcome.map_err(IoError::from));
        });
    }
}

/// Reads, parses and checks the manifest, and opens what it refers to.
pub(crate) fn open_version(
    store: &dyn Store,
    id: Hash,
) -> Result<(Manifest, Vec<Arc<dyn Object>>), ImageError> {
    let manifest = Manifest::decode(&store.manifest(id)?)?;
    let open = |object: &crate::manifest::ObjectRef| {
        let opened = store.open_object(object.id)?;
        if opened.len_bytes() == object.len_bytes {
            return Ok(opened);
        }
        Err(ImageError::new(
            ImageErrorKind::Damaged,
            format!(
                "the data object {} has {} bytes instead of {}",
                object.id,
                opened.len_bytes(),
                object.len_bytes
            ),
        ))
    };
    let objects = manifest.objects().iter().map(open).collect::<Result<_, _>>()?;
    Ok((manifest, objects))
}

thread_local! {
    /// The packed chunk. The threads that fetch are few, so this is bounded.
    static PACKED: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Reads, unpacks and checks a chunk. `into` has the chunk's length.
pub(crate) fn fetch_chunk(
    object: &dyn Object,
    chunk: &ChunkRef,
    mut into: Vec<u8>,
) -> Result<Vec<u8>, ImageError> {
    PACKED.with_borrow_mut(|packed| {
        packed.resize(usize_of_u32(chunk.stored_bytes), 0);
        object.read_range(chunk.offset, packed)?;
        chunk::unpack(packed, &mut into, &chunk.hash).map_err(|e| {
            e.context(format!(
                "the chunk at {}+{} of data object {} is damaged",
                chunk.offset,
                chunk.stored_bytes,
                object.id()
            ))
        })
    })?;
    Ok(into)
}

/// Part of a request that lies in one chunk.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// Number of the chunk.
    index: u64,
    /// Where it starts in the chunk.
    from: usize,
    len: usize,
    /// Where it goes in the request's buffer.
    to: usize,
}

fn copy_piece(chunk: &[u8], piece: Piece, target: &mut [u8]) -> Result<(), IoError> {
    let source = chunk.get(piece.from..).and_then(|tail| tail.get(..target.len()));
    target.copy_from_slice(source.ok_or_else(wrong_buffer)?);
    Ok(())
}

fn wrong_buffer() -> IoError {
    IoError::new(IoErrorKind::Invalid, "the buffer does not have the length of the request")
}

/// A fetch under way. Whatever happens to it, those who wait are told.
struct Fetch {
    cache: Arc<ChunkCache>,
    hash: Hash,
    ended: bool,
}

impl Fetch {
    fn end(&mut self, outcome: Result<Vec<u8>, IoError>) {
        self.ended = true;
        self.cache.fetched(&self.hash, outcome);
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        if !self.ended {
            self.end(Err(IoError::new(IoErrorKind::Device, "reading the chunk was given up")));
        }
    }
}

/// A request that waits for chunks.
struct PendingRead {
    /// Pieces that are not here yet.
    left: AtomicUsize,
    state: Mutex<ReadState>,
}

struct ReadState {
    buffer: Vec<u8>,
    result: Result<(), IoError>,
    done: Option<Completion>,
}

impl PendingRead {
    fn piece_is_here(&self, piece: Piece, bytes: Result<&[u8], &IoError>) {
        let mut state = self.state.lock();
        let copied = bytes.map_err(IoError::clone).and_then(|bytes| {
            let target = state.buffer.get_mut(piece.to..).and_then(|tail| tail.get_mut(..piece.len));
            copy_piece(bytes, piece, target.ok_or_else(wrong_buffer)?)
        });
        if let Err(e) = copied {
            state.result = Err(e);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        let result = std::mem::replace(&mut state.result, Ok(()));
        let buffer = std::mem::take(&mut state.buffer);
        let done = state.done.take();
        drop(state);
        if let Some(done) = done {
            done.complete(result, buffer);
        }
    }
}

impl Device for VersionReader {
    fn geometry(&self) -> Geometry {
        read_only_geometry(self.manifest.size_bytes())
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        match op {
            Op::Read { range, into } => {
                let mut complete = true;
                self.read_now(range, into, |_, _| {
                    complete = false;
                    false
                })?;
                Ok(if complete { Attempt::Done } else { Attempt::MustWait })
            }
            Op::Flush => Ok(Attempt::Done),
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Discard { .. } => Err(read_only()),
        }
    }

    /// Chunks that are in the cache. Those of zeroes are nowhere, so a range with one is not lent.
    fn lend(&self, range: ByteRange, parts: &mut Vec<Lent>) -> bool {
        let before = parts.len();
        let lent = |piece: Piece| {
            let chunk = self.cache.get(&self.manifest.chunk(piece.index)?.hash)?;
            Lent::new(chunk, piece.from, piece.len)
        };
        let is_whole = self.pieces(range).all(|piece| lent(piece).map(|part| parts.push(part)).is_some());
        if !is_whole {
            parts.truncate(before);
        }
        is_whole
    }

    fn submit(&self, request: Request, done: Completion) {
        match request {
            Request::Read { range, buffer } => self.submit_read(range, buffer, done),
            Request::Prefetch { range } => self.submit_prefetch(range, done),
            Request::Flush => done.complete(Ok(()), Vec::new()),
            other => done.complete(Err(read_only()), other.into_buffer()),
        }
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        let chunk_bytes = u64::from(self.manifest.chunk_bytes());
        let mut out = Vec::new();
        let mut at = range.offset();
        while at < range.end() && out.len() < max_extents.max(1) {
            let index = at / chunk_bytes;
            let (data, chunks) = self.manifest.run_at(index);
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
        let (id, size) = (self.id.short(), self.manifest.size_bytes());
        f.debug_struct("VersionReader").field("id", &id).field("size_bytes", &size).finish_non_exhaustive()
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
