//! The manifest: the list of the chunks of a version. Encodes and decodes it, without I/O.
//!
//! ```text
//!   header 88 bytes | objects, 40 bytes each | runs, 16 bytes each | chunks, 48 bytes each
//! ```
//! A run is a range of consecutive chunks with data. Chunks outside all runs are zero and need no space. The
//! chunk entries follow one another in the order of the runs. So the size of a manifest, in a file and in
//! memory, depends on the amount of data in the image and not on its size. Finding a chunk is one binary
//! search, and never looks into parent versions.
//!
//! Everything is checked when a manifest is parsed, so that its users need not check: runs are ascending and
//! inside the image, every chunk is inside its object, every object is used. Equal manifests have equal bytes, so
//! the BLAKE3 of the bytes identifies a version. The format is described byte by byte in `docs/format.md`.

use std::ops::{Deref, Range};

use headwater_store::{Hash, Needs, StoreError, StoreErrorKind};

use crate::error::{ImageError, ImageErrorKind};
use crate::outline::{HEADER_BYTES, Header, Outline, field};
use crate::units::{u64_of, usize_of, usize_of_u32};

/// The largest image: 64 TiB.
pub const IMAGE_MAX_BYTES: u64 = 64 << 40;

/// The longest data object: the header of 16 bytes, and all chunks of the largest image, uncompressed.
pub(crate) const OBJECT_MAX_BYTES: u64 = 16 + IMAGE_MAX_BYTES;

/// Bytes of a chunk's entry.
pub(crate) const CHUNK_BYTES: usize = 48;

/// The place of a chunk's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkRef {
    /// BLAKE3 of the chunk's content.
    pub hash: Hash,
    /// An index into [`Outline::objects`].
    pub object: u32,
    /// Length in the object. If it equals the chunk size, the chunk is not compressed.
    pub stored_bytes: u32,
    /// Its offset in the object.
    pub offset: u64,
}

/// A data object that a version needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectRef {
    /// Its name.
    pub id: Hash,
    /// Its length.
    pub len_bytes: u64,
}

/// Lists the objects, and their ranges, that a version needs from a store.
#[derive(Clone, Copy, Debug, Default)]
pub struct Manifests;

impl Needs for Manifests {
    fn objects(&self, manifest: &[u8]) -> Result<Vec<(Hash, u64)>, StoreError> {
        let parsed = parse(manifest)?;
        Ok(parsed.objects().iter().map(|object| (object.id, object.len_bytes)).collect())
    }

    fn stretches(&self, manifest: &[u8], needed: &mut dyn FnMut(Hash, Range<u64>)) -> Result<(), StoreError> {
        let parsed = parse(manifest)?;
        for (_, chunk) in parsed.data() {
            if let Some(object) = parsed.objects().get(usize_of_u32(chunk.object)) {
                needed(object.id, chunk.offset..chunk.offset.saturating_add(u64::from(chunk.stored_bytes)));
            }
        }
        Ok(())
    }
}

fn parse(manifest: &[u8]) -> Result<Manifest, StoreError> {
    Manifest::decode(manifest).map_err(|e| {
        let kind = match e.kind() {
            ImageErrorKind::Unsupported => StoreErrorKind::UnknownFormat,
            _ => StoreErrorKind::Damaged,
        };
        StoreError::new(kind, e.to_string())
    })
}

/// A parsed and checked manifest: an [`Outline`], and where each chunk is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    outline: Outline,
    refs: Vec<ChunkRef>,
}

impl Deref for Manifest {
    type Target = Outline;

    fn deref(&self) -> &Outline {
        &self.outline
    }
}

/// Collects the chunks of a new manifest, in order.
#[derive(Debug)]
pub struct ManifestBuilder(Manifest);

impl ManifestBuilder {
    /// A manifest with no data yet.
    pub fn new(size_bytes: u64, chunk_bytes: u32, parent: Option<Hash>) -> Self {
        Self(Manifest { outline: Outline::new(size_bytes, chunk_bytes, parent), refs: Vec::new() })
    }

    /// Sets the disk's sector size, which is 512 bytes by default, and whether the disk boots with UEFI only.
    pub fn set_disk_properties(&mut self, sector_bytes: u32, is_uefi_only: bool) {
        self.0.outline.set_disk_properties(sector_bytes, is_uefi_only);
    }

    /// Adds the chunk with number `index`; the numbers must ascend.
    pub fn push(&mut self, index: u64, chunk: ChunkRef) {
        self.0.outline.push(index);
        self.0.refs.push(chunk);
    }

    /// How many chunks hold data.
    pub fn data_chunks(&self) -> u64 {
        self.0.data_chunks()
    }

    /// Its length so far in bytes, without its objects.
    pub(crate) fn encoded_bytes(&self) -> u64 {
        let chunks_bytes = self.0.refs.len().saturating_mul(CHUNK_BYTES);
        u64_of(self.0.outline.entries_offset().saturating_add(chunks_bytes))
    }

    /// The chunks added so far, in order.
    pub(crate) fn chunks(&self) -> &[ChunkRef] {
        &self.0.refs
    }

    /// Whether it describes the same bytes in chunks of the same size as another manifest, wherever these are stored.
    pub fn has_bytes_of(&self, other: &Manifest) -> bool {
        self.0.has_bytes_of(other)
    }

    /// Finishes it. `objects` are those to which the chunks' numbers refer. Unused ones are left out, and the
    /// others are ordered by first use.
    pub fn finish(self, objects: &[ObjectRef]) -> Result<Manifest, ImageError> {
        let mut manifest = self.0;
        let mut new_number: Vec<Option<u32>> = vec![None; objects.len()];
        let mut used = Vec::new();
        for chunk in &mut manifest.refs {
            let at = usize_of_u32(chunk.object);
            let (Some(number), Some(object)) = (new_number.get_mut(at), objects.get(at)) else {
                return Err(damaged("a chunk is in an object that is not listed"));
            };
            chunk.object = match *number {
                Some(number) => number,
                None => {
                    let next =
                        u32::try_from(used.len()).map_err(|_| damaged("it refers to too many objects"))?;
                    used.push(*object);
                    *number = Some(next);
                    next
                }
            };
        }
        manifest.outline.set_objects(used);
        manifest.check()?;
        Ok(manifest)
    }
}

pub(crate) fn damaged(why: impl std::fmt::Display) -> ImageError {
    ImageError::new(ImageErrorKind::Damaged, format!("the manifest is damaged: {why}"))
}

impl Manifest {
    /// The chunk with number `index`; `None` if it is zero.
    pub fn chunk(&self, index: u64) -> Option<&ChunkRef> {
        self.refs.get(self.outline.entry_of(index)?)
    }

    /// Whether the disk has the same bytes, sector size and chunk size as another one, wherever the bytes are stored.
    /// Equal bytes in chunks of another size count as different.
    pub fn has_bytes_of(&self, other: &Self) -> bool {
        self.size_bytes() == other.size_bytes()
            && self.sector_bytes() == other.sector_bytes()
            && self.chunk_bytes() == other.chunk_bytes()
            && self.data_chunks() == other.data_chunks()
            && self.data().zip(other.data()).all(|((a, x), (b, y))| a == b && x.hash == y.hash)
    }

    /// All chunks with data, in order, with their numbers.
    pub fn data(&self) -> impl Iterator<Item = (u64, &ChunkRef)> {
        self.outline.numbers().zip(self.refs.iter())
    }

    /// The bytes, whose BLAKE3 is the identity of the version.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.outline.entries_offset() + self.refs.len() * CHUNK_BYTES);
        self.outline.encode(&mut out);
        for chunk in &self.refs {
            out.extend_from_slice(&chunk.hash.0);
            out.extend_from_slice(&chunk.object.to_le_bytes());
            out.extend_from_slice(&chunk.stored_bytes.to_le_bytes());
            out.extend_from_slice(&chunk.offset.to_le_bytes());
        }
        out
    }

    /// Parses and checks. The memory is proportional to the length of `bytes`, whatever they claim.
    pub fn decode(bytes: &[u8]) -> Result<Self, ImageError> {
        let header = Header::decode(bytes)?;
        let chunks_at = usize_of(header.chunks_at(u64_of(bytes.len()))?);
        let (tables, refs) = bytes.split_at_checked(chunks_at).unwrap_or_default();
        let outline = Outline::decode(&header, tables.get(HEADER_BYTES..).unwrap_or_default())?;
        let manifest = Self { outline, refs: decode_chunks(refs) };
        manifest.check_refs()?;
        Ok(manifest)
    }

    /// Checks everything that the users of a manifest rely on.
    fn check(&self) -> Result<(), ImageError> {
        self.outline.check()?;
        self.check_refs()
    }

    fn check_refs(&self) -> Result<(), ImageError> {
        let mut next_object = 0;
        for (number, chunk) in self.data() {
            if chunk.object > next_object {
                return Err(damaged("its objects are not in the order of their use"));
            }
            if chunk.object == next_object {
                next_object += 1;
            }
            self.outline.check_chunk(|| number, chunk)?;
        }
        if usize_of_u32(next_object) != self.objects().len() {
            return Err(damaged("it lists an object that no chunk uses"));
        }
        Ok(())
    }
}

/// Chunk entries as they are written; nothing is checked.
pub(crate) fn decode_chunks(bytes: &[u8]) -> Vec<ChunkRef> {
    bytes.as_chunks::<CHUNK_BYTES>().0.iter().map(decode_chunk).collect()
}

fn decode_chunk(bytes: &[u8; CHUNK_BYTES]) -> ChunkRef {
    let mut rest = bytes.as_slice();
    ChunkRef {
        hash: Hash(field(&mut rest)),
        object: u32::from_le_bytes(field(&mut rest)),
        stored_bytes: u32::from_le_bytes(field(&mut rest)),
        offset: u64::from_le_bytes(field(&mut rest)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CHUNK: u32 = 65_536;

    fn chunk(object: u32, offset: u64) -> ChunkRef {
        ChunkRef { hash: Hash::of(&offset.to_le_bytes()), object, stored_bytes: 100, offset }
    }

    fn sample() -> Manifest {
        let objects =
            ["a", "unused", "b"].map(|name| ObjectRef { id: Hash::of(name.as_bytes()), len_bytes: 1000 });
        let mut builder = ManifestBuilder::new(10 * u64::from(CHUNK) - 512, CHUNK, None);
        for (index, object, offset) in [(1, 2, 16), (2, 0, 16), (3, 2, 116), (9, 2, 16)] {
            builder.push(index, chunk(object, offset));
        }
        builder.finish(&objects).unwrap()
    }

    #[test]
    fn a_builder_computes_the_length_of_the_manifest() {
        let manifest = sample();
        let mut builder = ManifestBuilder::new(manifest.size_bytes(), CHUNK, None);
        manifest.data().for_each(|(number, chunk)| builder.push(number, *chunk));
        let objects_bytes = 40 * u64_of(manifest.objects().len());
        assert_eq!(builder.encoded_bytes() + objects_bytes, u64_of(manifest.encode().len()));
    }

    #[test]
    fn golden_bytes() {
        let manifest = sample();
        let bytes = manifest.encode();
        assert_eq!(bytes.len(), 88 + 2 * 40 + 2 * 16 + 4 * 48);
        assert_eq!(&bytes[..24], b"HWMANIF\n\x01\0\0\0\0\0\x01\0\0\xfe\x09\0\0\0\0\0");
        assert_eq!(
            Hash::of(&bytes).to_string(),
            "bd4b472a6a65cfbd15dd53f291760995cbc5f07c33dcd5308cb7162af0aa1d49",
            "the format changed: give it a new number and read the old one too"
        );
        assert_eq!(Manifest::decode(&bytes).unwrap(), manifest);
    }

    #[test]
    fn lookups() {
        let manifest = sample();
        assert_eq!(manifest.chunks(), 10);
        let has: Vec<bool> = (0..12).map(|i| manifest.chunk(i).is_some()).collect();
        let expected: Vec<bool> = (0..12).map(|i| [1, 2, 3, 9].contains(&i)).collect();
        assert_eq!(has, expected);
        assert_eq!(manifest.run_at(0), (false, 1));
        assert_eq!(manifest.run_at(2), (true, 2));
        assert_eq!(manifest.run_at(4), (false, 5));
        assert_eq!(manifest.run_at(9), (true, 1));
        // The unused object is removed, the others are numbered by first use.
        assert_eq!(
            manifest.objects().iter().map(|o| o.id).collect::<Vec<_>>(),
            [Hash::of(b"b"), Hash::of(b"a")]
        );
        assert_eq!(
            manifest.data().map(|(i, c)| (i, c.object)).collect::<Vec<_>>(),
            [(1, 0), (2, 1), (3, 0), (9, 0)]
        );
    }

    #[test]
    fn a_later_format_is_refused_as_such() {
        let mut bytes = sample().encode();
        bytes[8] = 2;
        assert_eq!(Manifest::decode(&bytes).unwrap_err().kind(), ImageErrorKind::Unsupported);
    }

    #[test]
    fn chunks_and_runs_outside_their_bounds_are_refused() {
        let good = sample().encode();
        let first_len = 88 + 32;
        let first_run = 88 + 80;
        let first_chunk = first_run + 32;
        let patch = |at: usize, value: &[u8]| {
            let mut bytes = good.clone();
            bytes[at..at + value.len()].copy_from_slice(value);
            Manifest::decode(&bytes).unwrap_err().to_string()
        };
        for (at, value, says) in [
            (16, &(u64::MAX - 511).to_le_bytes()[..], "size of an image"),
            (16, &(1u64 << 63).to_le_bytes(), "size of an image"),
            (16, &0u64.to_le_bytes(), "size of an image"),
            (16, &1000u64.to_le_bytes(), "size of an image"),
            (16, &(5 * u64::from(CHUNK)).to_le_bytes(), "runs"),
            (12, &65_535u32.to_le_bytes(), "size of a chunk"),
            (80, &1024u32.to_le_bytes(), "size of a sector"),
            (80, &4096u32.to_le_bytes(), "with sectors of 4096"),
            (84, &[2], "unknown disk flags"),
            (24, &u64::MAX.to_le_bytes(), "counts"),
            (40, &(u64::MAX / 48).to_le_bytes(), "counts"),
            (first_len, &(OBJECT_MAX_BYTES + 1).to_le_bytes(), "the maximum is"),
            (first_len, &u64::MAX.to_le_bytes(), "the maximum is"),
            (first_run, &9u64.to_le_bytes(), "runs"),
            (first_run + 8, &u64::MAX.to_le_bytes(), "runs"),
            (first_run + 8, &0u64.to_le_bytes(), "runs"),
            (first_chunk + 32, &7u32.to_le_bytes(), "order of their use"),
            (first_chunk + 36, &0u32.to_le_bytes(), "beyond its object"),
            (first_chunk + 36, &(CHUNK + 1).to_le_bytes(), "beyond its object"),
            (first_chunk + 40, &901u64.to_le_bytes(), "beyond its object"),
            (first_chunk + 40, &(1u64 << 63).to_le_bytes(), "beyond its object"),
            (first_chunk + 40, &u64::MAX.to_le_bytes(), "beyond its object"),
        ] {
            let error = patch(at, value);
            assert!(error.contains(says), "byte {at}: {error}");
        }
    }

    #[test]
    fn an_object_is_at_most_the_largest_image_with_header() {
        let longest = |len_bytes: u64| {
            let mut bytes = sample().encode();
            bytes[88 + 32..88 + 40].copy_from_slice(&len_bytes.to_le_bytes());
            Manifests.objects(&bytes)
        };
        assert_eq!(longest(OBJECT_MAX_BYTES).unwrap()[0].1, OBJECT_MAX_BYTES);
        // `Damaged`: a copy of the store skips this version, and copies the others.
        assert_eq!(longest(OBJECT_MAX_BYTES + 1).unwrap_err().kind(), StoreErrorKind::Damaged);
    }

    #[test]
    fn manifests_of_wrong_length_are_refused() {
        let good = sample().encode();
        for len in 0..good.len() {
            Manifest::decode(&good[..len]).unwrap_err();
        }
        Manifest::decode(&[&good[..], &[0]].concat()).unwrap_err();
    }

    proptest! {
        #[test]
        fn any_manifest_survives_the_round_trip(
            chunks in proptest::collection::btree_map(0u64..200, (0u32..3, 0u64..900), 0..60),
        ) {
            let objects = (0..3u8).map(|n| ObjectRef { id: Hash::of(&[n]), len_bytes: 1000 }).collect::<Vec<_>>();
            let mut builder = ManifestBuilder::new(200 * u64::from(CHUNK), CHUNK, Some(Hash::of(b"p")));
            for (index, (object, offset)) in &chunks {
                builder.push(*index, chunk(*object, *offset));
            }
            let manifest = builder.finish(&objects).unwrap();
            let again = Manifest::decode(&manifest.encode()).unwrap();
            prop_assert_eq!(&again, &manifest);
            for index in 0..200 {
                prop_assert_eq!(again.chunk(index).map(|c| c.offset), chunks.get(&index).map(|c| c.1));
                let (data, len) = again.run_at(index);
                prop_assert!(len > 0);
                for i in index..index + len {
                    prop_assert_eq!(data, chunks.contains_key(&i));
                }
            }
        }

        #[test]
        fn no_bytes_make_it_panic(at in 0usize..400, value in any::<[u8; 8]>(), cut in 0usize..400) {
            let mut bytes = sample().encode();
            let at = at % (bytes.len() - 8);
            bytes[at..at + 8].copy_from_slice(&value);
            bytes.truncate(bytes.len().saturating_sub(cut % 100));
            if let Ok(manifest) = Manifest::decode(&bytes) {
                // An accepted encoding is the only encoding of its content.
                prop_assert_eq!(manifest.encode(), bytes);
            }
        }
    }
}
