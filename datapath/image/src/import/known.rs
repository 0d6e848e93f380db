//! Looks up chunks that the store already has, and reads them back before a new version refers to them.
//!
//! Without this check, a chunk that was damaged in the store would make every later version of the same bytes
//! unreadable, although its source is good. So an import reads each distinct chunk that it refers to once,
//! decompresses it and compares its hash. If the chunk is damaged, or the disk cannot read it, another copy
//! of it is used, if the store has one. If no copy is intact, the chunk counts as new and is stored again; if
//! the whole disk fails, that write fails too. Older versions keep the damaged chunk, and `image verify` finds
//! it. If the store cannot be read for another reason, the state of the chunk is unknown: the import fails
//! instead of storing everything a second time.
//!
//! An import does not refer to chunks in mostly unused objects ([`ChunkIndex::avoid_sparse`]): it stores such
//! chunks again, and [`KnownChunks::carried`] counts them.
//!
//! If the source has the bytes of the newest version, the import returns that version instead of a new one,
//! but only if the chunks of that version are intact: [`KnownChunks::is_intact_or_remote`] checks those that
//! the new version would not refer to, and [`KnownChunks::found_damage`] records a failure. For this check, a
//! chunk that cannot be read for any reason counts as damaged: then a new version is made.
//!
//! Chunks of a remote store are not read back, because that would cost more than the import saves.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use headwater_store::{Hash, Object, Store};
use parking_lot::Mutex;

use crate::error::ImageError;
use crate::fetch::fetch_chunk;
use crate::index::{ChunkIndex, HashTable};
use crate::manifest::ChunkRef;
use crate::units::usize_of_u32;

/// Number of locks, so that workers rarely wait for one another.
const PARTS: usize = 16;

pub(super) struct KnownChunks<'a> {
    store: &'a dyn Store,
    index: &'a ChunkIndex,
    /// Which copy of a chunk is undamaged, counted from 0; `None`: no copy is.
    read: [Mutex<HashTable<Option<u32>>>; PARTS],
    /// Data objects that were needed so far; `None` if one cannot be opened.
    objects: Mutex<HashMap<u32, Option<Arc<dyn Object>>>>,
    damaged: AtomicU64,
    /// How often a chunk was found only in objects that are avoided.
    compacted: AtomicU64,
}

impl<'a> KnownChunks<'a> {
    pub(super) fn new(store: &'a dyn Store, index: &'a ChunkIndex) -> Self {
        let (read, objects) = (Default::default(), Mutex::default());
        Self { store, index, read, objects, damaged: AtomicU64::new(0), compacted: AtomicU64::new(0) }
    }

    /// Distinct chunks whose first copy in the store was damaged.
    pub(super) fn damaged(&self) -> u64 {
        self.damaged.load(Ordering::Relaxed)
    }

    /// How many chunks were stored again only so that an object is not needed for them. Equal chunks may
    /// count several times.
    pub(super) fn compacted(&self) -> u64 {
        self.compacted.load(Ordering::Relaxed)
    }

    /// The place of an undamaged copy of the chunk in the store. `buffer` has the size of a chunk.
    pub(super) fn find(&self, hash: &Hash, buffer: &mut Vec<u8>) -> Result<Option<ChunkRef>, ImageError> {
        let Some(first) = self.index.find(hash) else {
            if self.index.is_only_avoided(hash) {
                self.compacted.fetch_add(1, Ordering::Relaxed);
            }
            return Ok(None);
        };
        if self.store.is_remote() {
            return Ok(Some(first));
        }
        let [.., last] = hash.0;
        let Some(part) = self.read.get(usize::from(last) % PARTS) else { return Ok(None) };
        let read = part.lock().get(hash).copied();
        let copy = match read {
            Some(copy) => copy,
            None => {
                // Two workers may read it concurrently, with the same result.
                let copy = self.first_intact(hash, buffer)?;
                if part.lock().insert(*hash, copy).is_none() && copy != Some(0) {
                    self.damaged.fetch_add(1, Ordering::Relaxed);
                }
                copy
            }
        };
        let mut copies = (0..).zip(self.index.copies(hash));
        Ok(copies.find(|(number, _)| Some(*number) == copy).map(|(_, chunk)| chunk))
    }

    fn first_intact(&self, hash: &Hash, buffer: &mut Vec<u8>) -> Result<Option<u32>, ImageError> {
        for (number, chunk) in (0..).zip(self.index.copies(hash)) {
            if self.is_intact(&chunk, buffer)? {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    /// Whether the bytes at a place are those of its chunk; `true` without a check if the store is remote. A
    /// chunk that cannot be read is not intact.
    pub(super) fn is_intact_or_remote(&self, chunk: &ChunkRef) -> bool {
        let mut buffer = vec![0; usize_of_u32(self.store.chunk_bytes())];
        self.store.is_remote() || self.is_intact(chunk, &mut buffer).unwrap_or(false)
    }

    /// Makes [`damaged`](Self::damaged) at least 1, because a chunk of the newest version is damaged.
    pub(super) fn found_damage(&self) {
        self.damaged.fetch_max(1, Ordering::Relaxed);
    }

    fn is_intact(&self, chunk: &ChunkRef, buffer: &mut Vec<u8>) -> Result<bool, ImageError> {
        let Some(object) = self.object(chunk.object)? else { return Ok(false) };
        let len = buffer.len();
        match fetch_chunk(object.as_ref(), chunk, std::mem::take(buffer)) {
            Ok(bytes) => {
                *buffer = bytes;
                Ok(true)
            }
            Err(e) if e.kind().is_damage() => {
                buffer.resize(len, 0);
                tracing::debug!(error = %e, "a chunk in the store is damaged: this copy of it is not used");
                Ok(false)
            }
            Err(e) => Err(e.context("cannot read back a chunk that the store has")),
        }
    }

    fn object(&self, number: u32) -> Result<Option<Arc<dyn Object>>, ImageError> {
        let mut objects = self.objects.lock();
        if let Some(object) = objects.get(&number) {
            return Ok(object.clone());
        }
        let Some(object) = self.index.object(number) else { return Ok(None) };
        let opened = match self.store.open_object_of(object.id, object.len_bytes).map_err(ImageError::from) {
            Ok(opened) => Some(opened),
            Err(e) if e.kind().is_damage() => None,
            Err(e) => return Err(e.context("cannot read back a chunk that the store has")),
        };
        objects.insert(number, opened.clone());
        Ok(opened)
    }
}
