//! The part of a manifest before its chunk entries: header, objects and runs. It is small, because its size
//! depends on the number of objects and runs, and not on the number of chunks.
//!
//! Each chunk with data has an entry in the manifest. The entries are in the order of the chunks' numbers.

use headwater_store::{Hash, VERSION_OBJECTS_MAX};

use crate::error::{ImageError, ImageErrorKind};
use crate::inspection::{LARGE_SECTOR_BYTES, SECTOR_BYTES, why_bios_cannot_boot};
use crate::manifest::{CHUNK_BYTES, ChunkRef, IMAGE_MAX_BYTES, OBJECT_MAX_BYTES, ObjectRef, damaged};
use crate::units::{u64_of, usize_of, usize_of_u32};

/// Bytes of a manifest's header.
pub(crate) const HEADER_BYTES: usize = 88;

const MAGIC: [u8; 8] = *b"HWMANIF\n";
const FORMAT: u32 = 1;
/// A flag: the disk boots with UEFI only.
const UEFI_ONLY: u32 = 1;
const OBJECT_BYTES: usize = 40;
const RUN_BYTES: usize = 16;

/// `len` consecutive chunks with data, from chunk `start`. The first of them has the entry `first_ref`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    start: u64,
    len: u64,
    first_ref: usize,
}

/// Which chunks of a version have data, and which objects it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outline {
    size_bytes: u64,
    chunk_bytes: u32,
    sector_bytes: u32,
    is_uefi_only: bool,
    parent: Option<Hash>,
    objects: Vec<ObjectRef>,
    runs: Vec<Run>,
    /// Number of chunk entries, which is the number of chunks with data.
    refs: usize,
}

impl Outline {
    /// The outline of a version without data.
    pub(crate) fn new(size_bytes: u64, chunk_bytes: u32, parent: Option<Hash>) -> Self {
        Self {
            size_bytes,
            chunk_bytes,
            sector_bytes: SECTOR_BYTES,
            is_uefi_only: false,
            parent,
            objects: Vec::new(),
            runs: Vec::new(),
            refs: 0,
        }
    }

    /// Adds the chunk with number `index`; the numbers must ascend.
    pub(crate) fn push(&mut self, index: u64) {
        let first_ref = self.refs;
        self.refs += 1;
        match self.runs.last_mut() {
            Some(run) if run.start.saturating_add(run.len) == index => run.len += 1,
            _ => self.runs.push(Run { start: index, len: 1, first_ref }),
        }
    }

    pub(crate) fn set_disk_properties(&mut self, sector_bytes: u32, is_uefi_only: bool) {
        self.sector_bytes = sector_bytes;
        self.is_uefi_only = is_uefi_only;
    }

    /// Whether the disk boots with UEFI only, as found when the version was made.
    pub fn is_uefi_only(&self) -> bool {
        self.is_uefi_only
    }

    /// Why a BIOS cannot boot the disk, as found when the version was made.
    pub fn why_bios_cannot_boot(&self) -> Option<String> {
        why_bios_cannot_boot(self.sector_bytes, self.is_uefi_only)
    }

    pub(crate) fn set_objects(&mut self, objects: Vec<ObjectRef>) {
        self.objects = objects;
    }

    /// Size of the image.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Size of a chunk. The last chunk of the image is padded with zeroes.
    pub fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// Size of the disk's sectors: 512 or 4,096.
    pub fn sector_bytes(&self) -> u32 {
        self.sector_bytes
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
        u64_of(self.refs)
    }

    /// Number of chunks of the image, with and without data.
    pub fn chunks(&self) -> u64 {
        self.size_bytes.div_ceil(u64::from(self.chunk_bytes))
    }

    /// Whether chunk `index` has data, and for how many chunks from there that is the same, at most to the
    /// end of the image.
    pub fn run_at(&self, index: u64) -> (bool, u64) {
        let at = self.last_run_until(index);
        if let Some(run) = at.and_then(|at| self.runs.get(at)) {
            let within = index - run.start;
            if within < run.len {
                return (true, run.len - within);
            }
        }
        let next = self.runs.get(at.map_or(0, |at| at + 1)).map_or(self.chunks(), |run| run.start);
        (false, next.saturating_sub(index))
    }

    /// The number of the entry of chunk `index`. `None`: the chunk has no data.
    pub(crate) fn entry_of(&self, index: u64) -> Option<usize> {
        let run = self.runs.get(self.last_run_until(index)?)?;
        let within = index - run.start;
        if within >= run.len {
            return None;
        }
        run.first_ref.checked_add(usize_of(within))
    }

    /// The number of entries of chunks before chunk `index`.
    pub(crate) fn entries_before(&self, index: u64) -> usize {
        let run = self.last_run_until(index).and_then(|at| self.runs.get(at));
        run.map_or(0, |run| run.first_ref.saturating_add(usize_of((index - run.start).min(run.len))))
    }

    /// The numbers of all chunks with data, in order.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u64> {
        self.runs.iter().flat_map(|run| run.start..run.start.saturating_add(run.len))
    }

    /// The number of the last run that starts at `index` or before it.
    fn last_run_until(&self, index: u64) -> Option<usize> {
        self.runs.partition_point(|run| run.start <= index).checked_sub(1)
    }

    /// The offset of the chunk entries in the encoded manifest.
    pub(crate) fn entries_offset(&self) -> usize {
        HEADER_BYTES + self.objects.len() * OBJECT_BYTES + self.runs.len() * RUN_BYTES
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&FORMAT.to_le_bytes());
        out.extend_from_slice(&self.chunk_bytes.to_le_bytes());
        out.extend_from_slice(&self.size_bytes.to_le_bytes());
        out.extend_from_slice(&u64_of(self.objects.len()).to_le_bytes());
        out.extend_from_slice(&u64_of(self.runs.len()).to_le_bytes());
        out.extend_from_slice(&u64_of(self.refs).to_le_bytes());
        out.extend_from_slice(&self.parent.map_or([0; 32], |parent| parent.0));
        out.extend_from_slice(&self.sector_bytes.to_le_bytes());
        out.extend_from_slice(&(if self.is_uefi_only { UEFI_ONLY } else { 0 }).to_le_bytes());
        for object in &self.objects {
            out.extend_from_slice(&object.id.0);
            out.extend_from_slice(&object.len_bytes.to_le_bytes());
        }
        for run in &self.runs {
            out.extend_from_slice(&run.start.to_le_bytes());
            out.extend_from_slice(&run.len.to_le_bytes());
        }
    }

    /// Parses and checks the tables after the header. The memory is proportional to the length of `tables`.
    pub(crate) fn decode(header: &Header, tables: &[u8]) -> Result<Self, ImageError> {
        let (objects, runs) = tables
            .split_at_checked(usize_of(header.objects).saturating_mul(OBJECT_BYTES))
            .ok_or_else(|| damaged("it is incomplete"))?;
        let mut first_ref = 0usize;
        let outline = Self {
            size_bytes: header.size_bytes,
            chunk_bytes: header.chunk_bytes,
            sector_bytes: header.sector_bytes,
            is_uefi_only: header.is_uefi_only()?,
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
            refs: usize_of(header.refs),
        };
        outline.check()?;
        Ok(outline)
    }

    /// Checks everything on which users of the outline rely.
    pub(crate) fn check(&self) -> Result<(), ImageError> {
        if !self.size_bytes.is_multiple_of(512) || self.size_bytes == 0 || self.size_bytes > IMAGE_MAX_BYTES {
            return Err(damaged(format!("{} bytes is not the size of an image", self.size_bytes)));
        }
        if !matches!(self.sector_bytes, SECTOR_BYTES | LARGE_SECTOR_BYTES) {
            return Err(damaged(format!("{} bytes is not the size of a sector", self.sector_bytes)));
        }
        if !self.size_bytes.is_multiple_of(u64::from(self.sector_bytes)) {
            let (size, sector) = (self.size_bytes, self.sector_bytes);
            return Err(damaged(format!(
                "{size} bytes is not the size of an image with sectors of {sector}"
            )));
        }
        let sizes = headwater_store::CHUNK_BYTES_MIN..=headwater_store::CHUNK_BYTES_MAX;
        if !self.chunk_bytes.is_power_of_two() || !sizes.contains(&self.chunk_bytes) {
            return Err(damaged(format!("{} bytes is not the size of a chunk", self.chunk_bytes)));
        }
        if self.objects.len() > VERSION_OBJECTS_MAX {
            let count = self.objects.len();
            return Err(damaged(format!(
                "it refers to {count} objects; the maximum is {VERSION_OBJECTS_MAX}"
            )));
        }
        // A copy of an object needs memory and disk space in proportion to its length.
        if let Some(object) = self.objects.iter().find(|object| object.len_bytes > OBJECT_MAX_BYTES) {
            return Err(damaged(format!(
                "the data object {} is listed with {} bytes; the maximum is {OBJECT_MAX_BYTES}",
                object.id, object.len_bytes
            )));
        }
        let mut total = 0u64;
        // The end of the previous run. Adjacent runs would be a second encoding of one run.
        let mut end_before: Option<u64> = None;
        for run in &self.runs {
            let end = run.start.checked_add(run.len).filter(|end| *end <= self.chunks());
            let apart = end_before.is_none_or(|before| before < run.start);
            let (Some(end), true, true) = (end, apart, run.len > 0) else {
                return Err(damaged("its runs are not in order, or extend beyond the image"));
            };
            end_before = Some(end);
            total += run.len;
        }
        if total != self.data_chunks() {
            return Err(damaged("its runs and its chunks do not match"));
        }
        Ok(())
    }

    /// Checks that a chunk is inside its object. `number` returns the chunk's number for messages, and is
    /// rarely called.
    pub(crate) fn check_chunk(
        &self,
        number: impl FnOnce() -> u64,
        chunk: &ChunkRef,
    ) -> Result<(), ImageError> {
        let Some(object) = self.objects.get(usize_of_u32(chunk.object)) else {
            let number = number();
            return Err(damaged(format!("chunk {number} is in an object that is not listed")));
        };
        let end = chunk.offset.checked_add(u64::from(chunk.stored_bytes));
        let fits = chunk.stored_bytes != 0
            && chunk.stored_bytes <= self.chunk_bytes
            && end.is_some_and(|end| end <= object.len_bytes);
        if fits { Ok(()) } else { Err(damaged(format!("chunk {} extends beyond its object", number()))) }
    }
}

/// The counts and sizes in the header.
#[derive(Debug)]
pub(crate) struct Header {
    chunk_bytes: u32,
    sector_bytes: u32,
    flags: u32,
    size_bytes: u64,
    objects: u64,
    runs: u64,
    refs: u64,
    parent: Option<Hash>,
}

impl Header {
    /// Parses the first bytes of a manifest.
    pub(crate) fn decode(mut rest: &[u8]) -> Result<Self, ImageError> {
        let short = || damaged("it is incomplete");
        if take::<8>(&mut rest).ok_or_else(short)? != MAGIC {
            return Err(damaged("its first bytes are wrong"));
        }
        let format = u32::from_le_bytes(take(&mut rest).ok_or_else(short)?);
        if format != FORMAT {
            return Err(ImageError::new(
                ImageErrorKind::Unsupported,
                format!(
                    "the manifest has format {format}; this release reads format {FORMAT}: use the release that \
                     wrote it, or a later one"
                ),
            ));
        }
        let chunk_bytes = u32::from_le_bytes(take(&mut rest).ok_or_else(short)?);
        let mut number = || take(&mut rest).map(u64::from_le_bytes).ok_or_else(short);
        let (size_bytes, objects, runs, refs) = (number()?, number()?, number()?, number()?);
        let parent = take::<32>(&mut rest).ok_or_else(short)?;
        let parent = (parent != [0; 32]).then_some(Hash(parent));
        let sector_bytes = u32::from_le_bytes(take(&mut rest).ok_or_else(short)?);
        let flags = u32::from_le_bytes(take(&mut rest).ok_or_else(short)?);
        Ok(Self { chunk_bytes, sector_bytes, flags, size_bytes, objects, runs, refs, parent })
    }

    fn is_uefi_only(&self) -> Result<bool, ImageError> {
        match self.flags {
            0 => Ok(false),
            UEFI_ONLY => Ok(true),
            flags => Err(damaged(format!("unknown disk flags {flags:#x}"))),
        }
    }

    /// The offset of the chunk entries in a manifest of `len_bytes`. Fails if that length does not follow from
    /// the header.
    pub(crate) fn chunks_at(&self, len_bytes: u64) -> Result<u64, ImageError> {
        let tables = [(self.objects, OBJECT_BYTES), (self.runs, RUN_BYTES), (self.refs, CHUNK_BYTES)];
        let mut expected = 0u64;
        for (count, each) in tables {
            expected = count
                .checked_mul(u64_of(each))
                .and_then(|len| expected.checked_add(len))
                .ok_or_else(|| damaged("the header's counts overflow 64 bits"))?;
        }
        let follow = len_bytes.saturating_sub(u64_of(HEADER_BYTES));
        if expected != follow {
            return Err(damaged(format!("{expected} bytes should follow its header, not {follow}")));
        }
        Ok(len_bytes.saturating_sub(self.refs.saturating_mul(u64_of(CHUNK_BYTES))))
    }
}

/// The next bytes.
pub(crate) fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (head, tail) = rest.split_first_chunk::<N>()?;
    *rest = tail;
    Some(*head)
}

/// The next `N` bytes of a table's entry, whose length is known to be sufficient.
pub(crate) fn field<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
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
