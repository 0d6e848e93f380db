//! Finds where each chunk (piece) of an open version is stored: in which data object, and at which offset.
//! The manifest of a version, a file of the store, lists this; the chunk map is that list in memory.
//!
//! A manifest is normally read as a whole. If a manifest is long and its store can read and check parts of it
//! ([`Store::manifest_parts`]), only the [`Outline`] is read when the version is opened: the header, the data objects,
//! and which chunks have data, so chunks of zeroes are known at once. Each chunk with data has an entry. The entries
//! are read page by page when they are first needed. So opening takes the same time whatever the version's
//! size, and the map needs memory only for the used ranges of the disk. With a chunk cache on the local disk, the
//! manifest is always read as a whole, because the cache keeps whole manifests.
//!
//! A *part* is the unit that the store can check alone; a *page* is the unit that the map reads, and lies in one or two
//! parts.
//!
//! A lookup never reads from the store. A caller that finds a page missing calls [`ChunkMap::load`], on a
//! thread that may wait for a disk.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use headwater_block::{IoError, IoErrorKind};
use headwater_store::{Hash, Parts, Store, StoreErrorKind};

use crate::disk_cache::DiskCache;
use crate::error::ImageError;
use crate::manifest::{CHUNK_BYTES, ChunkRef, Manifest, decode_chunks};
use crate::outline::{HEADER_BYTES, Header, Outline};
use crate::units::{u64_of, usize_of};

/// Entries in a page: 48 KiB of the manifest, so that a page lies in one or two of its parts. With chunks of
/// 64 KiB it covers 64 MiB of a disk.
const PAGE_CHUNKS: usize = 1024;

/// The outline of a version. If the store can read parts of a long manifest, only the outline is read.
pub fn outline_of(store: &dyn Store, version: Hash) -> Result<Outline, ImageError> {
    Ok(ChunkMap::open(store, version, None)?.outline().clone())
}

/// The chunk map of an open version.
pub(crate) enum ChunkMap {
    Whole(Manifest),
    Paged(Pages),
}

/// The lookup needs a page that has not been read yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotRead;

impl From<NotRead> for IoError {
    fn from(_: NotRead) -> Self {
        Self::new(IoErrorKind::Device, "a bug: the part of the manifest with this chunk was not read")
    }
}

impl ChunkMap {
    /// Opens the map of a version of `store`. If the manifest is to be kept on the local disk, it is read as
    /// a whole.
    pub(crate) fn open(store: &dyn Store, id: Hash, disk: Option<&DiskCache>) -> Result<Self, ImageError> {
        let parts = if disk.is_none() { store.manifest_parts(id)? } else { None };
        match parts {
            Some(parts) => Self::in_parts(parts),
            None => read_manifest(store, id, disk).map(Self::Whole),
        }
    }

    /// The map of a manifest that is read in parts.
    pub(crate) fn in_parts(parts: Arc<dyn Parts>) -> Result<Self, ImageError> {
        Pages::open(parts).map(Self::Paged)
    }

    pub(crate) fn outline(&self) -> &Outline {
        match self {
            Self::Whole(manifest) => manifest,
            Self::Paged(pages) => &pages.outline,
        }
    }

    /// The chunk with number `index`; `None` if the chunk has only zeroes.
    pub(crate) fn chunk(&self, index: u64) -> Result<Option<&ChunkRef>, NotRead> {
        match self {
            Self::Whole(manifest) => Ok(manifest.chunk(index)),
            Self::Paged(pages) => pages.chunk(index),
        }
    }

    /// Whether all of these chunks can be looked up without reading.
    pub(crate) fn has(&self, chunks: Range<u64>) -> bool {
        match self {
            Self::Whole(_) => true,
            Self::Paged(pages) => pages.missing(chunks).next().is_none(),
        }
    }

    /// Reads the pages that are needed to look these chunks up. Waits for a disk.
    pub(crate) fn load(&self, chunks: Range<u64>) -> Result<(), ImageError> {
        match self {
            Self::Whole(_) => Ok(()),
            Self::Paged(pages) => pages.missing(chunks).try_for_each(|page| pages.load(page)),
        }
    }

    /// The whole manifest. If it is read in parts, this reads all of them.
    pub(crate) fn whole(&self) -> Result<Cow<'_, Manifest>, ImageError> {
        match self {
            Self::Whole(manifest) => Ok(Cow::Borrowed(manifest)),
            Self::Paged(pages) => {
                let bytes = pages.parts.read(0..pages.parts.len_bytes())?;
                Manifest::decode(&bytes).map(Cow::Owned)
            }
        }
    }
}

/// The chunks of a manifest that is read in parts.
pub(crate) struct Pages {
    outline: Outline,
    parts: Arc<dyn Parts>,
    /// Where the chunk entries begin in the manifest.
    chunks_at: u64,
    pages: Vec<OnceLock<Box<[ChunkRef]>>>,
}

impl Pages {
    fn open(parts: Arc<dyn Parts>) -> Result<Self, ImageError> {
        let len_bytes = parts.len_bytes();
        let header_bytes = u64_of(HEADER_BYTES);
        let header = Header::decode(&parts.read(0..header_bytes.min(len_bytes))?)?;
        let chunks_at = header.chunks_at(len_bytes)?;
        let outline = Outline::decode(&header, &parts.read(header_bytes..chunks_at)?)?;
        let pages = usize_of(outline.data_chunks()).div_ceil(PAGE_CHUNKS);
        let pages = std::iter::repeat_with(OnceLock::new).take(pages).collect();
        Ok(Self { outline, parts, chunks_at, pages })
    }

    fn chunk(&self, index: u64) -> Result<Option<&ChunkRef>, NotRead> {
        let Some(entry) = self.outline.entry_of(index) else { return Ok(None) };
        let page = self.pages.get(entry / PAGE_CHUNKS).and_then(OnceLock::get).ok_or(NotRead)?;
        page.get(entry % PAGE_CHUNKS).map(Some).ok_or(NotRead)
    }

    /// The pages of these chunks that have not been read.
    fn missing(&self, chunks: Range<u64>) -> impl Iterator<Item = usize> {
        let entries = self.outline.entries_before(chunks.start)..self.outline.entries_before(chunks.end);
        let pages = if entries.is_empty() {
            0..0
        } else {
            entries.start / PAGE_CHUNKS..entries.end.div_ceil(PAGE_CHUNKS)
        };
        pages.filter(|page| self.pages.get(*page).is_some_and(|page| page.get().is_none()))
    }

    fn load(&self, number: usize) -> Result<(), ImageError> {
        let Some(page) = self.pages.get(number) else { return Ok(()) };
        let first = number.saturating_mul(PAGE_CHUNKS);
        let end = usize_of(self.outline.data_chunks()).min(first.saturating_add(PAGE_CHUNKS));
        let at = |entry: usize| self.chunks_at.saturating_add(u64_of(entry.saturating_mul(CHUNK_BYTES)));
        let chunks = decode_chunks(&self.parts.read(at(first)..at(end))?);
        for (entry, chunk) in (first..).zip(&chunks) {
            self.outline.check_chunk(|| self.outline.numbers().nth(entry).unwrap_or(0), chunk)?;
        }
        // Another reader that needed the page may have read it already.
        let _ = page.set(chunks.into_boxed_slice());
        Ok(())
    }
}

/// Reads, parses and checks a whole manifest. With `disk`, the manifest is kept there, and read from there if the store
/// cannot be reached or has an I/O error.
pub(crate) fn read_manifest(
    store: &dyn Store,
    id: Hash,
    disk: Option<&DiskCache>,
) -> Result<Manifest, ImageError> {
    let bytes = match (store.manifest(id), disk) {
        (Ok(bytes), Some(disk)) => {
            disk.keep_manifest(id, &bytes);
            bytes
        }
        (Err(e), Some(disk)) if matches!(e.kind(), StoreErrorKind::Unreachable | StoreErrorKind::Io) => {
            let Some(bytes) = disk.manifest(id) else { return Err(e.into()) };
            tracing::warn!(version = %id.short(), error = %e, "no server gives the manifest of a version: the version is opened with the manifest in the chunk cache");
            bytes
        }
        (found, _) => found?,
    };
    Manifest::decode(&bytes)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use headwater_store::{StoreError, StoreErrorKind};
    use proptest::prelude::*;

    use super::*;
    use crate::error::ImageErrorKind;
    use crate::manifest::{ManifestBuilder, ObjectRef};

    const CHUNK: u32 = 65_536;

    /// A manifest in memory.
    #[derive(Default)]
    struct InMemory {
        bytes: Vec<u8>,
        read_bytes: AtomicU64,
        fails: AtomicBool,
    }

    impl Parts for InMemory {
        fn len_bytes(&self) -> u64 {
            u64_of(self.bytes.len())
        }

        fn read(&self, range: Range<u64>) -> Result<Vec<u8>, StoreError> {
            if self.fails.load(Ordering::Relaxed) {
                return Err(StoreError::new(StoreErrorKind::Io, "the disk is gone"));
            }
            self.read_bytes.fetch_add(range.end - range.start, Ordering::Relaxed);
            let part = self.bytes.get(usize_of(range.start)..usize_of(range.end));
            part.map(<[u8]>::to_vec).ok_or_else(|| StoreError::new(StoreErrorKind::Damaged, "out of range"))
        }
    }

    /// A manifest of `chunks` chunks in two objects; `has` says which of them have data.
    fn manifest(chunks: u64, has: impl Fn(u64) -> bool) -> Manifest {
        let objects = [b"a", b"b"].map(|name| ObjectRef { id: Hash::of(name), len_bytes: 1 << 40 });
        let mut builder = ManifestBuilder::new(chunks * u64::from(CHUNK), CHUNK, None);
        for index in (0..chunks).filter(|index| has(*index)) {
            let hash = Hash::of(&index.to_le_bytes());
            let object = u32::try_from(index % 3 / 2).unwrap();
            builder.push(index, ChunkRef { hash, object, stored_bytes: 100, offset: 16 + index * 100 });
        }
        builder.finish(&objects).unwrap()
    }

    fn pages(bytes: Vec<u8>) -> (Arc<InMemory>, Result<ChunkMap, ImageError>) {
        let parts = Arc::new(InMemory { bytes, ..InMemory::default() });
        let map = ChunkMap::in_parts(Arc::clone(&parts) as Arc<dyn Parts>);
        (parts, map)
    }

    #[test]
    fn pages_are_read_once_when_needed_and_never_by_a_lookup() {
        let whole = manifest(5000, |index| index != 2000);
        let (parts, map) = pages(whole.encode());
        let map = map.unwrap();
        let read = || parts.read_bytes.swap(0, Ordering::Relaxed);
        assert_eq!(read(), u64_of(whole.entries_offset()), "the part before the chunk entries");
        assert_eq!(*map.outline(), *whole);
        // Which chunks are zero is known from the beginning.
        assert_eq!((map.chunk(2000), map.chunk(5000)), (Ok(None), Ok(None)));
        assert_eq!(map.chunk(1023), Err(NotRead));
        assert!(!map.has(1023..1024) && map.has(2000..2001) && map.has(5000..9000) && map.has(7..7));
        map.load(1023..1024).unwrap();
        assert_eq!(read(), 48 * 1024);
        assert_eq!(map.chunk(1023), Ok(whole.chunk(1023)));
        assert_eq!(map.chunk(1024), Err(NotRead));
        assert!(map.has(0..1024) && !map.has(1023..1025));
        map.load(0..1025).unwrap();
        assert_eq!(read(), 48 * 1024, "the first page is in memory");
        // The hole shifts the entries behind it by one: chunk 4096 is the second to last of the fourth page.
        map.load(4095..5000).unwrap();
        assert_eq!(read(), 48 * (4999 - 3 * 1024), "the last page is short");
        assert!(!map.has(0..5000));
        map.load(0..u64::MAX).unwrap();
        assert!(map.has(0..5000) && (0..5001).all(|index| map.chunk(index) == Ok(whole.chunk(index))));
        read();
        assert_eq!(*map.whole().unwrap(), whole);
    }

    #[test]
    fn a_page_that_failed_to_load_is_read_later() {
        let whole = manifest(3000, |_| true);
        let (parts, map) = pages(whole.encode());
        let map = map.unwrap();
        parts.fails.store(true, Ordering::Relaxed);
        assert_eq!(map.load(0..1).unwrap_err().kind(), ImageErrorKind::Io);
        assert_eq!(map.chunk(0), Err(NotRead));
        assert_eq!(map.whole().unwrap_err().kind(), ImageErrorKind::Io);
        parts.fails.store(false, Ordering::Relaxed);
        map.load(0..1).unwrap();
        assert_eq!(map.chunk(0), Ok(whole.chunk(0)));
    }

    #[test]
    fn a_chunk_outside_its_object_is_damage() {
        let whole = manifest(3001, |index| index != 7);
        let entry = whole.entries_offset() + 48 * 1500;
        for (at, value) in [(32, 2u64.to_le_bytes()), (36, [0; 8]), (40, (1u64 << 40).to_le_bytes())] {
            let mut bytes = whole.encode();
            let value = if at == 40 { &value[..] } else { &value[..4] };
            bytes[entry + at..][..value.len()].copy_from_slice(value);
            let (_, map) = pages(bytes);
            let map = map.unwrap();
            let error = map.load(1501..1502).unwrap_err();
            assert_eq!(error.kind(), ImageErrorKind::Damaged, "byte {at}");
            assert!(error.to_string().contains("chunk 1501 "), "{error}");
            assert_eq!(map.chunk(1501), Err(NotRead));
            assert!(map.load(0..1).is_ok() && map.load(2050..2051).is_ok());
        }
    }

    #[test]
    fn a_manifest_of_wrong_length_is_not_opened_in_parts() {
        let whole = manifest(3000, |index| index % 2 == 0).encode();
        for len in [0, 1, 79, 80, 100, whole.len() - 1] {
            assert_eq!(
                pages(whole[..len].to_vec()).1.err().unwrap().kind(),
                ImageErrorKind::Damaged,
                "{len} bytes"
            );
        }
        assert!(pages([&whole[..], &[0]].concat()).1.is_err());
    }

    proptest! {
        #[test]
        fn parts_of_a_manifest_agree_with_the_whole(
            step in 1u64..4, from in 0u64..5000, len in 0u64..3000,
        ) {
            let whole = manifest(5000, |index| index % step == 0 || index > 4000);
            let (_, map) = pages(whole.encode());
            let map = map.unwrap();
            let range = from..from + len;
            map.load(range.clone()).unwrap();
            prop_assert!(map.has(range.clone()));
            for index in range {
                prop_assert_eq!(map.chunk(index), Ok(whole.chunk(index)));
            }
        }
    }
}
