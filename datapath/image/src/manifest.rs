//! The manifest: what a version consists of. Pure: bytes in, bytes out.
//!
//! ```text
//!   header 80 bytes | objects, 40 bytes each | runs, 16 bytes each | chunks, 48 bytes each
//! ```
//! A run is a stretch of consecutive chunks that hold data; what no run covers is zero and takes nothing. The
//! chunks follow one another in the order of the runs. So the size of a manifest, in a file and in memory,
//! follows the data of the image and not its size, and finding a chunk is one binary search, never a chain.
//!
//! Everything is checked when a manifest is parsed, so that nobody who uses one has to: runs are ascending
//! and inside the image, every chunk lies inside its object, every object is used. One content has one
//! encoding, therefore the BLAKE3 of the bytes identifies a version. Byte by byte: `docs/format.md`.

use headwater_store::{Hash, StoreError, StoreErrorKind, VERSION_OBJECTS_MAX};

use crate::error::{ImageError, ImageErrorKind};
use crate::units::{u64_of, usize_of, usize_of_u32};

/// The largest image: 64 TiB.
pub const IMAGE_MAX_BYTES: u64 = 64 << 40;

const MAGIC: [u8; 8] = *b"HWMANIF\n";
const FORMAT: u32 = 1;
const HEADER_BYTES: usize = 80;
const OBJECT_BYTES: usize = 40;
const RUN_BYTES: usize = 16;
const CHUNK_BYTES: usize = 48;

/// Where the bytes of a chunk are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkRef {
    /// BLAKE3 of the chunk's content.
    pub hash: Hash,
    /// Which of [`Manifest::objects`].
    pub object: u32,
    /// Length in the object; the chunk size itself means: not compressed.
    pub stored_bytes: u32,
    /// Where it starts in the object.
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

/// The data objects that the version with this manifest needs, for [`headwater_store::copy()`].
pub fn objects_of(manifest: &[u8]) -> Result<Vec<Hash>, StoreError> {
    let parsed = Manifest::decode(manifest).map_err(|e| {
        let kind = match e.kind() {
            ImageErrorKind::Unsupported => StoreErrorKind::UnknownFormat,
            _ => StoreErrorKind::Damaged,
        };
        StoreError::new(kind, e.to_string())
    })?;
    Ok(parsed.objects().iter().map(|object| object.id).collect())
}

/// `len` consecutive chunks with data, from chunk `start`; their refs start at `first_ref`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    start: u64,
    len: u64,
    first_ref: usize,
}

/// A parsed and checked manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    size_bytes: u64,
    chunk_bytes: u32,
    parent: Option<Hash>,
    objects: Vec<ObjectRef>,
    runs: Vec<Run>,
    refs: Vec<ChunkRef>,
}

/// Collects the chunks of a new manifest, in order.
#[derive(Debug)]
pub struct ManifestBuilder(Manifest);

impl ManifestBuilder {
    /// A manifest with no data yet.
    pub fn new(size_bytes: u64, chunk_bytes: u32, parent: Option<Hash>) -> Self {
        let (objects, runs, refs) = (Vec::new(), Vec::new(), Vec::new());
        Self(Manifest { size_bytes, chunk_bytes, parent, objects, runs, refs })
    }

    /// Adds the chunk with number `index`; numbers ascend.
    pub fn push(&mut self, index: u64, chunk: ChunkRef) {
        let first_ref = self.0.refs.len();
        self.0.refs.push(chunk);
        match self.0.runs.last_mut() {
            Some(run) if run.start.saturating_add(run.len) == index => run.len += 1,
            _ => self.0.runs.push(Run { start: index, len: 1, first_ref }),
        }
    }

    /// Ends it. `objects` are those that the chunks' numbers mean; unused ones are left out and the others
    /// are ordered by first use.
    pub fn finish(self, objects: &[ObjectRef]) -> Result<Manifest, ImageError> {
        let mut manifest = self.0;
        let mut new_number: Vec<Option<u32>> = vec![None; objects.len()];
        let mut used = Vec::new();
        for chunk in &mut manifest.refs {
            let at = usize_of_u32(chunk.object);
            let (Some(number), Some(object)) = (new_number.get_mut(at), objects.get(at)) else {
                return Err(damaged("a chunk lies in an object that is not listed"));
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
        manifest.objects = used;
        manifest.check()?;
        Ok(manifest)
    }
}

fn damaged(why: impl std::fmt::Display) -> ImageError {
    ImageError::new(ImageErrorKind::Damaged, format!("the manifest is damaged: {why}"))
}

impl Manifest {
    /// Size of the image.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Size of a chunk. The last one of the image is filled up with zeroes.
    pub fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// The version that this one was made from.
    pub fn parent(&self) -> Option<Hash> {
        self.parent
    }

    /// The data objects.
    pub fn objects(&self) -> &[ObjectRef] {
        &self.objects
    }

    /// Number of chunks that hold data.
    pub fn data_chunks(&self) -> u64 {
        u64_of(self.refs.len())
    }

    /// Number of chunks of the image, with and without data.
    pub fn chunks(&self) -> u64 {
        self.size_bytes.div_ceil(u64::from(self.chunk_bytes))
    }

    /// The chunk with number `index`; `None` if it is zero.
    pub fn chunk(&self, index: u64) -> Option<&ChunkRef> {
        let run = self.runs.get(self.last_run_from(index)?)?;
        let within = index - run.start;
        if within >= run.len {
            return None;
        }
        self.refs.get(run.first_ref.checked_add(usize_of(within))?)
    }

    /// Whether chunk `index` holds data, and for how many chunks from there that stays so, at most to the
    /// end of the image.
    pub fn run_at(&self, index: u64) -> (bool, u64) {
        let at = self.last_run_from(index);
        if let Some(run) = at.and_then(|at| self.runs.get(at)) {
            let within = index - run.start;
            if within < run.len {
                return (true, run.len - within);
            }
        }
        let next = self.runs.get(at.map_or(0, |at| at + 1)).map_or(self.chunks(), |run| run.start);
        (false, next.saturating_sub(index))
    }

    /// All chunks that hold data, in order, with their numbers.
    pub fn data(&self) -> impl Iterator<Item = (u64, &ChunkRef)> {
        let numbers = self.runs.iter().flat_map(|run| run.start..run.start.saturating_add(run.len));
        numbers.zip(self.refs.iter())
    }

    /// Number of the last run that starts at `index` or before it.
    fn last_run_from(&self, index: u64) -> Option<usize> {
        self.runs.partition_point(|run| run.start <= index).checked_sub(1)
    }

    /// The bytes, whose BLAKE3 is the identity of the version.
    pub fn encode(&self) -> Vec<u8> {
        let len = HEADER_BYTES
            + self.objects.len() * OBJECT_BYTES
            + self.runs.len() * RUN_BYTES
            + self.refs.len() * CHUNK_BYTES;
        let mut out = Vec::with_capacity(len);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&FORMAT.to_le_bytes());
        out.extend_from_slice(&self.chunk_bytes.to_le_bytes());
        out.extend_from_slice(&self.size_bytes.to_le_bytes());
        out.extend_from_slice(&u64_of(self.objects.len()).to_le_bytes());
        out.extend_from_slice(&u64_of(self.runs.len()).to_le_bytes());
        out.extend_from_slice(&u64_of(self.refs.len()).to_le_bytes());
        out.extend_from_slice(&self.parent.map_or([0; 32], |parent| parent.0));
        for object in &self.objects {
            out.extend_from_slice(&object.id.0);
            out.extend_from_slice(&object.len_bytes.to_le_bytes());
        }
        for run in &self.runs {
            out.extend_from_slice(&run.start.to_le_bytes());
            out.extend_from_slice(&run.len.to_le_bytes());
        }
        for chunk in &self.refs {
            out.extend_from_slice(&chunk.hash.0);
            out.extend_from_slice(&chunk.object.to_le_bytes());
            out.extend_from_slice(&chunk.stored_bytes.to_le_bytes());
            out.extend_from_slice(&chunk.offset.to_le_bytes());
        }
        out
    }

    /// Parses and checks. Takes memory in proportion to `bytes`, whatever they claim.
    pub fn decode(bytes: &[u8]) -> Result<Self, ImageError> {
        let mut rest = bytes;
        let header = Header::decode(&mut rest)?;
        let tables = [(header.objects, OBJECT_BYTES), (header.runs, RUN_BYTES), (header.refs, CHUNK_BYTES)];
        let mut expected = 0u64;
        for (count, each) in tables {
            expected = count
                .checked_mul(u64_of(each))
                .and_then(|len| expected.checked_add(len))
                .ok_or_else(|| damaged("it claims to be longer than 64 bits can say"))?;
        }
        if expected != u64_of(rest.len()) {
            return Err(damaged(format!("{expected} bytes should follow its header, not {}", rest.len())));
        }
        let mut table = |(count, each): (u64, usize)| {
            let (table, tail) = rest.split_at_checked(usize_of(count) * each).unwrap_or((&[], &[]));
            rest = tail;
            table
        };
        let [objects, runs, refs] = tables.map(&mut table);
        let mut first_ref = 0usize;
        let manifest = Self {
            size_bytes: header.size_bytes,
            chunk_bytes: header.chunk_bytes,
            parent: header.parent,
            objects: objects.as_chunks::<OBJECT_BYTES>().0.iter().map(decode_object).collect(),
            runs: runs
                .as_chunks::<RUN_BYTES>()
                .0
                .iter()
                .map(|bytes| {
                    let (start, len) = decode_run(bytes);
                    let run = Run { start, len, first_ref };
                    first_ref = first_ref.saturating_add(usize_of(len));
                    run
                })
                .collect(),
            refs: refs.as_chunks::<CHUNK_BYTES>().0.iter().map(decode_chunk).collect(),
        };
        manifest.check()?;
        Ok(manifest)
    }

    /// Everything that the users of a manifest rely on.
    fn check(&self) -> Result<(), ImageError> {
        if !self.size_bytes.is_multiple_of(512) || self.size_bytes == 0 || self.size_bytes > IMAGE_MAX_BYTES {
            return Err(damaged(format!("{} bytes is not the size of an image", self.size_bytes)));
        }
        let sizes = headwater_store::CHUNK_BYTES_MIN..=headwater_store::CHUNK_BYTES_MAX;
        if !self.chunk_bytes.is_power_of_two() || !sizes.contains(&self.chunk_bytes) {
            return Err(damaged(format!("{} bytes is not the size of a chunk", self.chunk_bytes)));
        }
        if self.objects.len() > VERSION_OBJECTS_MAX {
            return Err(damaged(format!("it refers to {} objects", self.objects.len())));
        }
        self.check_runs()?;
        let mut next_object = 0;
        for (number, chunk) in self.data() {
            if chunk.object > next_object {
                return Err(damaged("its objects are not in the order of their use"));
            }
            if chunk.object == next_object {
                next_object += 1;
            }
            let Some(object) = self.objects.get(usize_of_u32(chunk.object)) else {
                return Err(damaged(format!("chunk {number} lies in an object that is not listed")));
            };
            let end = chunk.offset.checked_add(u64::from(chunk.stored_bytes));
            let fits = chunk.stored_bytes != 0
                && chunk.stored_bytes <= self.chunk_bytes
                && end.is_some_and(|end| end <= object.len_bytes);
            if !fits {
                return Err(damaged(format!("chunk {number} reaches out of its object")));
            }
        }
        if usize_of_u32(next_object) != self.objects.len() {
            return Err(damaged("it lists an object that it does not use"));
        }
        Ok(())
    }

    fn check_runs(&self) -> Result<(), ImageError> {
        let mut total = 0u64;
        // Where the run before ended. Adjoining runs would be a second way to write one.
        let mut end_before: Option<u64> = None;
        for run in &self.runs {
            let end = run.start.checked_add(run.len).filter(|end| *end <= self.chunks());
            let apart = end_before.is_none_or(|before| before < run.start);
            let (Some(end), true, true) = (end, apart, run.len > 0) else {
                return Err(damaged("its runs are not in order, or reach out of the image"));
            };
            end_before = Some(end);
            total += run.len;
        }
        if total != self.data_chunks() {
            return Err(damaged("its runs and its chunks do not match"));
        }
        Ok(())
    }
}

struct Header {
    chunk_bytes: u32,
    size_bytes: u64,
    objects: u64,
    runs: u64,
    refs: u64,
    parent: Option<Hash>,
}

impl Header {
    fn decode(rest: &mut &[u8]) -> Result<Self, ImageError> {
        let short = || damaged("it is cut short");
        if take::<8>(rest).ok_or_else(short)? != MAGIC {
            return Err(damaged("it does not start as a manifest does"));
        }
        let format = u32::from_le_bytes(take(rest).ok_or_else(short)?);
        if format != FORMAT {
            return Err(ImageError::new(
                ImageErrorKind::Unsupported,
                format!(
                    "the manifest has format {format}; this release reads format {FORMAT}: use the release that \
                     wrote it, or a later one"
                ),
            ));
        }
        let chunk_bytes = u32::from_le_bytes(take(rest).ok_or_else(short)?);
        let mut number = || take(rest).map(u64::from_le_bytes).ok_or_else(short);
        let (size_bytes, objects, runs, refs) = (number()?, number()?, number()?, number()?);
        let parent = take::<32>(rest).ok_or_else(short)?;
        let parent = (parent != [0; 32]).then_some(Hash(parent));
        Ok(Self { chunk_bytes, size_bytes, objects, runs, refs, parent })
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (head, tail) = rest.split_first_chunk::<N>()?;
    *rest = tail;
    Some(*head)
}

/// The next `N` bytes of a table's entry, whose length is known to suffice.
fn field<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    take(rest).unwrap_or([0; N])
}

fn decode_object(bytes: &[u8; OBJECT_BYTES]) -> ObjectRef {
    let mut rest = bytes.as_slice();
    ObjectRef { id: Hash(field(&mut rest)), len_bytes: u64::from_le_bytes(field(&mut rest)) }
}

fn decode_run(bytes: &[u8; RUN_BYTES]) -> (u64, u64) {
    let mut rest = bytes.as_slice();
    (u64::from_le_bytes(field(&mut rest)), u64::from_le_bytes(field(&mut rest)))
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
    fn golden_bytes() {
        let manifest = sample();
        let bytes = manifest.encode();
        assert_eq!(bytes.len(), 80 + 2 * 40 + 2 * 16 + 4 * 48);
        assert_eq!(&bytes[..24], b"HWMANIF\n\x01\0\0\0\0\0\x01\0\0\xfe\x09\0\0\0\0\0");
        assert_eq!(
            Hash::of(&bytes).to_string(),
            "8baa5f9349c7479219c48e512280dece3e6c493672bb167a1b925b96c9d1fbbe",
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
        // The unused object is gone, the others are numbered by first use.
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
    fn nothing_may_reach_out_of_its_object_or_of_the_image() {
        let good = sample().encode();
        let first_run = 80 + 80;
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
            (24, &u64::MAX.to_le_bytes(), "claims"),
            (40, &(u64::MAX / 48).to_le_bytes(), "claims"),
            (first_run, &9u64.to_le_bytes(), "runs"),
            (first_run + 8, &u64::MAX.to_le_bytes(), "runs"),
            (first_run + 8, &0u64.to_le_bytes(), "runs"),
            (first_chunk + 32, &7u32.to_le_bytes(), "order of their use"),
            (first_chunk + 36, &0u32.to_le_bytes(), "out of its object"),
            (first_chunk + 36, &(CHUNK + 1).to_le_bytes(), "out of its object"),
            (first_chunk + 40, &901u64.to_le_bytes(), "out of its object"),
            (first_chunk + 40, &(1u64 << 63).to_le_bytes(), "out of its object"),
            (first_chunk + 40, &u64::MAX.to_le_bytes(), "out of its object"),
        ] {
            let error = patch(at, value);
            assert!(error.contains(says), "byte {at}: {error}");
        }
    }

    #[test]
    fn a_manifest_that_is_cut_anywhere_or_goes_on_is_refused() {
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
                // Whatever was accepted is the one encoding of what it says.
                prop_assert_eq!(manifest.encode(), bytes);
            }
        }
    }
}
