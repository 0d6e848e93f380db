//! The ordered part of an import, on one thread: takes the workers' results in the order of the image, and
//! writes each distinct new chunk to the data object at the position of its first use in the image.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use headwater_store::{Hash, MANIFEST_MAX_BYTES, Publication};

use crate::chunk::object_header;
use crate::error::{ImageError, ImageErrorKind};
use crate::import::chunks_of;
use crate::import::known::KnownChunks;
use crate::import::worker::{Done, Found, Work};
use crate::index::{ChunkIndex, HashTable};
use crate::manifest::{CHUNK_BYTES, ChunkRef, Manifest, ManifestBuilder};
use crate::progress::Cancel;
use crate::units::{u64_of, usize_of_u32};

/// Compressed chunks are given to the store in pieces of about this size.
const WRITE_BYTES: usize = 1 << 20;
/// How long the writer waits for the workers before it checks whether it should stop, because a source may
/// hang.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// Receives from the workers, and checks for cancellation while there is nothing to receive.
pub(super) struct Feed<'a> {
    pub(super) done: &'a mpsc::Receiver<Done>,
    pub(super) cancel: &'a Cancel,
    /// Called with how much of the image is processed.
    pub(super) progress: &'a mut dyn FnMut(u64),
    pub(super) done_bytes: u64,
}

impl Feed<'_> {
    /// The next `Work` to arrive, in any order. `None` if no more will come.
    fn next(&mut self) -> Result<Option<Box<Work>>, ImageError> {
        loop {
            match self.done.recv_timeout(LOOK_INTERVAL) {
                Ok(work) => return work.map(Some),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => self.look()?,
            }
        }
    }

    /// The progress callback may cancel here.
    fn look(&mut self) -> Result<(), ImageError> {
        (self.progress)(self.done_bytes);
        self.cancel.check("the import")
    }
}

/// The chunks of the parent version, in order. Those that no `Work` replaces stay.
pub(super) struct Parent<'a> {
    chunks: std::iter::Peekable<Box<dyn Iterator<Item = (u64, &'a ChunkRef)> + 'a>>,
    manifest: &'a Manifest,
    index: &'a ChunkIndex,
    known: &'a KnownChunks<'a>,
    /// It has the size of a chunk.
    buffer: Vec<u8>,
}

impl<'a> Parent<'a> {
    pub(super) fn new(manifest: &'a Manifest, index: &'a ChunkIndex, known: &'a KnownChunks<'a>) -> Self {
        let chunks: Box<dyn Iterator<Item = (u64, &ChunkRef)>> = Box::new(manifest.data());
        let buffer = vec![0; usize_of_u32(manifest.chunk_bytes())];
        Self { chunks: chunks.peekable(), manifest, index, known, buffer }
    }

    /// The next chunk before chunk `end`.
    fn next_before(&mut self, end: u64) -> Option<(u64, &'a ChunkRef)> {
        self.chunks.next_if(|(number, _)| *number < end)
    }

    /// The place of a chunk in the store.
    fn place_of(&mut self, chunk: &ChunkRef) -> Option<ChunkRef> {
        // Another version may have stored the chunk again. If it has no other place, or cannot be read there,
        // its place does not change.
        if self.index.avoids(self.manifest, chunk)
            && !self.index.is_only_avoided(&chunk.hash)
            && let Ok(Some(elsewhere)) = self.known.find(&chunk.hash, &mut self.buffer)
        {
            return Some(elsewhere);
        }
        self.index.find_as_in(self.manifest, chunk)
    }
}

/// The result of a [`Writer`].
pub(super) struct Written {
    pub(super) builder: ManifestBuilder,
    /// Chunks in the data object.
    pub(super) chunks: u64,
    /// Its length.
    pub(super) object_bytes: u64,
    /// Bytes that were read from the source.
    pub(super) read_bytes: u64,
}

pub(super) struct Writer<'a> {
    publication: &'a mut dyn Publication,
    builder: ManifestBuilder,
    parent: Option<Parent<'a>>,
    chunk_bytes: u32,
    read_bytes: u64,
    /// The number of the new data object in the manifest.
    own_object: u32,
    /// Bytes that have not been given to the store yet.
    buffer: Vec<u8>,
    /// Where the next chunk starts in the data object.
    offset: u64,
    /// Chunks in the data object.
    written: HashTable<ChunkRef>,
    /// Works that arrived before their turn, by sequence.
    early: BTreeMap<u64, Box<Work>>,
    /// The compressed chunks in `early`: sequence, start and length.
    early_chunks: HashTable<(u64, usize, usize)>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(
        publication: &'a mut dyn Publication,
        (builder, parent): (ManifestBuilder, Option<Parent<'a>>),
        chunk_bytes: u32,
        own_object: u32,
    ) -> Self {
        Self {
            publication,
            builder,
            parent,
            chunk_bytes,
            read_bytes: 0,
            own_object,
            buffer: Vec::with_capacity(WRITE_BYTES * 2),
            offset: 0,
            written: HashTable::default(),
            early: BTreeMap::new(),
            early_chunks: HashTable::default(),
        }
    }

    pub(super) fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// Writes what arrives until the workers have finished.
    pub(super) fn run(
        &mut self,
        feed: &mut Feed<'_>,
        free: &mpsc::Sender<Box<Work>>,
    ) -> Result<(), ImageError> {
        let mut turn = 0;
        loop {
            while !self.early.contains_key(&turn) {
                if !self.receive(feed)? {
                    // All workers have finished, so no Work is missing before those that arrived.
                    return if self.early.is_empty() { Ok(()) } else { Err(lost()) };
                }
            }
            let Some(work) = self.early.remove(&turn) else {
                return Err(lost());
            };
            self.write(&work, feed)?;
            feed.done_bytes = work.batch.offset.saturating_add(work.batch.len);
            feed.look()?;
            turn += 1;
            // If the workers have finished, it is no longer needed.
            let _ = free.send(work);
        }
    }

    /// Receives one more `Work`. `false` if no more will come.
    fn receive(&mut self, feed: &mut Feed<'_>) -> Result<bool, ImageError> {
        let Some(work) = feed.next()? else {
            return Ok(false);
        };
        for found in &work.found {
            if let Found::Packed { hash, start, len } = found {
                self.early_chunks.insert(*hash, (work.batch.sequence, *start, *len));
            }
        }
        self.early.insert(work.batch.sequence, work);
        Ok(true)
    }

    fn write(&mut self, work: &Work, feed: &mut Feed<'_>) -> Result<(), ImageError> {
        debug_assert_eq!(work.found.len(), chunks_of(work.batch.len, self.chunk_bytes));
        let first = work.batch.offset / u64::from(self.chunk_bytes);
        self.keep_before(first)?;
        self.read_bytes = self.read_bytes.saturating_add(work.batch.len);
        if let Some(parent) = &mut self.parent {
            // They are replaced.
            while parent.next_before(first.saturating_add(u64_of(work.found.len()))).is_some() {}
        }
        for (index, found) in (first..).zip(&work.found) {
            let chunk = match found {
                Found::Zero => continue,
                Found::Known(known) => *known,
                Found::Packed { hash, start, len } => {
                    self.early_chunks.remove(hash);
                    match self.written.get(hash) {
                        Some(written) => *written,
                        None => self.append(*hash, work.output.get(*start..start + len).ok_or_else(lost)?)?,
                    }
                }
                Found::Elsewhere(hash) => match self.written.get(hash) {
                    Some(written) => *written,
                    None => self.fetch_early(*hash, feed)?,
                },
            };
            list(&mut self.builder, index, chunk, self.chunk_bytes)?;
        }
        Ok(())
    }

    /// Takes the parent's chunks up to `end`.
    fn keep_before(&mut self, end: u64) -> Result<(), ImageError> {
        let Some(parent) = &mut self.parent else { return Ok(()) };
        while let Some((number, chunk)) = parent.next_before(end) {
            let chunk = parent.place_of(chunk).ok_or_else(|| {
                ImageError::new(
                    ImageErrorKind::Damaged,
                    format!("chunk {number} of the parent version is no longer in the store; 'headwater image verify' shows the damage"),
                )
            })?;
            list(&mut self.builder, number, chunk, self.chunk_bytes)?;
        }
        Ok(())
    }

    /// Finds a chunk that is used here for the first time in the image, although a worker compressed it as
    /// part of a later `Work`.
    fn fetch_early(&mut self, hash: Hash, feed: &mut Feed<'_>) -> Result<ChunkRef, ImageError> {
        loop {
            if let Some((sequence, start, len)) = self.early_chunks.get(&hash).copied() {
                // Taken out while its bytes are copied, because `append` needs all of `self`.
                let work = self.early.remove(&sequence).ok_or_else(lost)?;
                let chunk = self.append(hash, work.output.get(start..start + len).ok_or_else(lost)?)?;
                self.early.insert(sequence, work);
                return Ok(chunk);
            }
            if !self.receive(feed)? {
                return Err(lost());
            }
        }
    }

    fn append(&mut self, hash: Hash, packed: &[u8]) -> Result<ChunkRef, ImageError> {
        if self.offset == 0 {
            let header = object_header(self.chunk_bytes);
            self.buffer.extend_from_slice(&header);
            self.offset = u64_of(header.len());
        }
        let stored_bytes = u32::try_from(packed.len()).map_err(|_| lost())?;
        let chunk = ChunkRef { hash, object: self.own_object, stored_bytes, offset: self.offset };
        self.offset += u64::from(stored_bytes);
        self.buffer.extend_from_slice(packed);
        self.written.insert(hash, chunk);
        if self.buffer.len() >= WRITE_BYTES {
            self.publication.append(&self.buffer)?;
            self.buffer.clear();
        }
        Ok(chunk)
    }

    /// Writes the remaining bytes.
    pub(super) fn finish(mut self) -> Result<Written, ImageError> {
        self.keep_before(u64::MAX)?;
        if !self.buffer.is_empty() {
            self.publication.append(&self.buffer)?;
        }
        let Self { builder, written, offset: object_bytes, read_bytes, .. } = self;
        Ok(Written { builder, chunks: u64_of(written.len()), object_bytes, read_bytes })
    }
}

/// Adds a chunk to the manifest, unless the manifest would become too long. This is checked here and not at
/// the end, when everything would have been read, compressed and stored for nothing.
fn list(
    builder: &mut ManifestBuilder,
    number: u64,
    chunk: ChunkRef,
    chunk_bytes: u32,
) -> Result<(), ImageError> {
    check_length(builder.encoded_bytes(), chunk_bytes)?;
    builder.push(number, chunk);
    Ok(())
}

/// Fails if the manifest has its maximum length and cannot take one more chunk.
fn check_length(manifest_bytes: u64, chunk_bytes: u32) -> Result<(), ImageError> {
    if manifest_bytes <= MANIFEST_MAX_BYTES {
        return Ok(());
    }
    let chunks = MANIFEST_MAX_BYTES / u64_of(CHUNK_BYTES);
    let data = headwater_block::size::format(chunks.saturating_mul(u64::from(chunk_bytes)));
    Err(ImageError::new(
        ImageErrorKind::Invalid,
        format!("the disk has more data than a version can have: {data} (holes and zeroes do not count)"),
    ))
}

fn lost() -> ImageError {
    ImageError::new(
        ImageErrorKind::Io,
        "the import lost a part of the image; this is a bug, please report it",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_that_is_too_long_is_refused() {
        check_length(MANIFEST_MAX_BYTES, 65_536).unwrap();
        let error = check_length(MANIFEST_MAX_BYTES + 1, 65_536).unwrap_err();
        assert_eq!(error.kind(), ImageErrorKind::Invalid);
        assert!(error.to_string().contains("1.3 TiB"), "{error}");
    }
}
