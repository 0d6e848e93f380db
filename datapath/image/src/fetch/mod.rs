//! Fetches chunks: reads them from the chunk cache on disk or from the store, decompresses and checks them.
//! Adjacent chunks are fetched in one read.
//!
//! This module reads, checks and caches chunks. [`task`] has the fetches that a request may wait for: tasks that a pool
//! of threads carries out.

mod task;

#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_block::Pages;
use headwater_store::{Check, Object, ReadFor, StoreError, StoreErrorKind, Waiting};

pub(crate) use self::task::{Fetch, Fetching};
use crate::chunk;
use crate::chunk_cache::ChunkCache;
use crate::disk_cache::DiskCache;
use crate::error::{ImageError, ImageErrorKind};
use crate::manifest::ChunkRef;
use crate::units::{u64_of, usize_of_u32};

/// How often a background copy that waits for its store checks whether it can continue or must end.
const COPY_LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// How many chunks and bytes one read may have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MergeLimit {
    pub chunks: usize,
    pub stored_bytes: u64,
}

impl MergeLimit {
    /// For a store on this host: the system reads ahead by itself, and several threads decompress sooner.
    pub(crate) const HERE: Self = Self { chunks: 4, stored_bytes: 256 << 10 };
    /// For a remote store, where each request takes a round trip.
    pub(crate) const REMOTE: Self = Self { chunks: 16, stored_bytes: 512 << 10 };
    /// For the chunks of a boot trace: smaller, so that it does not delay a read that a request waits for.
    pub(crate) const AHEAD: Self = Self { chunks: 8, stored_bytes: 128 << 10 };
    /// For a background copy, which no request waits for.
    pub(crate) const COPY: Self = Self { chunks: 32, stored_bytes: 1 << 20 };
}

/// Divides a list of chunks into groups that are adjacent in one object.
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
    /// Compressed chunks. Only few threads fetch, so this memory is bounded.
    static PACKED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Reads, decompresses and checks a chunk. `into` has the chunk's length.
pub(crate) fn fetch_chunk(
    object: &dyn Object,
    chunk: &ChunkRef,
    mut into: Vec<u8>,
) -> Result<Vec<u8>, ImageError> {
    fetch_group(object, std::slice::from_ref(chunk), std::slice::from_mut(&mut into))?;
    Ok(into)
}

/// As [`fetch_chunk`] for adjacent chunks, in one read. Each buffer of `into` has a chunk's length, and there
/// are at least as many buffers as chunks.
pub(crate) fn fetch_group(
    object: &dyn Object,
    chunks: &[ChunkRef],
    into: &mut [Vec<u8>],
) -> Result<(), ImageError> {
    let mut next = 0;
    PACKED.with_borrow_mut(|packed| {
        read_group(object, chunks, packed, None, &mut |chunk, stored| {
            if chunks.first() == Some(chunk) {
                // The check begins again: one server's bytes were wrong, and another server sends them.
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

/// The error for a read by a store that did not run the check. The buffers may have other chunks.
fn unchecked() -> ImageError {
    ImageError::new(ImageErrorKind::Io, "a bug: the store did not check the chunks that it read")
}

/// Decompresses and checks one chunk of `object`.
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

/// The object, caches and settings that all fetches of a data object share.
#[derive(Clone)]
pub(crate) struct Source {
    pub object: Arc<dyn Object>,
    pub cache: Arc<ChunkCache>,
    pub chunk_bytes: usize,
    /// Whether the store is on another host. Only then the local disk cache is used.
    pub is_remote: bool,
}

impl Source {
    /// Completes fetches of chunks that are on the local disk. Returns those whose chunks are missing or
    /// damaged there.
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

    /// Reads adjacent chunks in one read. `None`: the read waits for its store, and must be repeated with the
    /// same `waiting`.
    fn read(
        &self,
        chunks: &[ChunkRef],
        packed: &mut Vec<u8>,
        waiting: &mut Waiting,
    ) -> Result<Option<Vec<Pages>>, ImageError> {
        // Allocated after bytes have arrived, because a waiting read is repeated many times.
        let mut unpacked: Vec<Pages> = Vec::new();
        let mut no_memory = None;
        let mut next = 0;
        let is_read =
            read_group(self.object.as_ref(), chunks, packed, Some(waiting), &mut |chunk, stored| {
                if chunks.first() == Some(chunk) {
                    // The check begins again: one server's bytes were wrong, and another server sends them.
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
            // The error does not come from the store, so no other server is asked or waited for.
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

    /// The local disk cache for reads of this store.
    fn keeps_on(&self) -> Option<&DiskCache> {
        self.cache.disk().filter(|_| self.is_remote).map(Arc::as_ref)
    }

    /// Copies adjacent chunks to the local disk, checked, without keeping them in memory. Stops if `is_over`
    /// returns true, even while the store is away.
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

    /// Reads back chunks from the local disk and checks them: those that an earlier process wrote, once in
    /// each process, and those that could not be synced. The latter are written once more, and need not be
    /// fetched from the store again. Wrong chunks are removed from the index.
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
                        // Writes only a chunk that the cache lacks, because it could not be synced.
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

fn unasked(chunk: &ChunkRef) -> StoreError {
    StoreError::new(StoreErrorKind::Io, format!("a bug: chunk {} was read but not requested", chunk.hash))
}

type EachChunk<'a> = dyn FnMut(&ChunkRef, &[u8]) -> Result<(), StoreError> + 'a;

/// Returns `false` if the read waits. Without `waiting` the call itself waits.
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

/// The part of each chunk in the compressed bytes of the group.
fn stored_of<'a>(chunks: &'a [ChunkRef], packed: &'a [u8]) -> impl Iterator<Item = (&'a ChunkRef, &'a [u8])> {
    let mut rest = packed;
    chunks.iter().map(move |chunk| {
        let (stored, tail) = rest.split_at_checked(usize_of_u32(chunk.stored_bytes)).unwrap_or((rest, &[]));
        rest = tail;
        (chunk, stored)
    })
}
