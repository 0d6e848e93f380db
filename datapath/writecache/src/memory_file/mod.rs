//! Keeps the memory of a write cache in a file that outlives the process.
//!
//! ```text
//!  head | positions given up | directory | records | pieces | segments | packed segments
//!
//!           the directory has for each leaf the number of the piece with its table, and of the pieces with its
//!           partial blocks; words of tables name slots; a segment's record says where its slots are
//! ```
//!
//! The file is a memfd, or a file of a tmpfs without a name. A keeper process holds its descriptor and gives
//! it to the next process, which finds the stores of the last one (`check`; decision 38 says which). A killed
//! process leaves the stores of each of its threads up to some point in that thread's order. So the order of
//! stores matters here, and each is a `Release`. The order is:
//!
//! 1. the bytes of a slot;
//! 2. the sectors of a partial block, and the contents of new pieces;
//! 3. the directory, which names these pieces;
//! 4. the word of the block: from this store on, the write counts;
//! 5. after that, the old slot, piece or position may be used again.
//!
//! The state of a segment is stored after the resources that it names exist, and before resources that it no
//! longer names are used again.
//!
//! A cache without a file needs none of this: its tables and segments are memory of the process alone.
//!
//! | file | contents |
//! |---|---|
//! | `mapping` | mappings of parts of the file, and their pages |
//! | `pieces` | allocates the tables of leaves and of partial blocks |
//! | `packed_space` | allocates space for packed segments |
//! | `record` | the stored record of a segment |
//! | `key_page` | the key of the overflow, for the next process |
//! | `check` | reads the file and checks it for contradictions |
//! | `crash` | for tests: ends the process between two stores |

mod check;
pub(crate) mod crash;
mod key_page;
mod mapping;
mod packed_space;
mod pieces;
mod record;
#[cfg(all(test, not(feature = "shuttle")))]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use headwater_block::{IoError, IoErrorKind};

pub(crate) use self::check::Found;
pub use self::key_page::Handover;
pub(crate) use self::key_page::{Handed, KeyBytes, KeyPage, KeyPlace};
use self::mapping::PAGE;
pub(crate) use self::mapping::{Mapping, Run, give_back, reserve};
use self::packed_space::PackedSpace;
pub(crate) use self::pieces::FilePieces;
pub(crate) use self::record::{Record, RecordValue};
use crate::overflow::gcm::KEY_BYTES;
use crate::sync::UNDER_MODEL_CHECKER;
use crate::units::{SEGMENT_BYTES, SLOT_COUNT, SLOTS, SegmentId};

/// The version of the layout. A process that does not know it changes nothing.
pub const VERSION: u32 = 1;

const MAGIC: [u8; 8] = *b"HWMEMRY\n";

/// The number of bytes of the head that its checksum covers.
const CHECKED: usize = 96;

const GENERATION_AT: usize = 128;
const STATE_AT: usize = 136;

/// A cache may be recovered from the file.
const IN_USE: u32 = 1;
/// The cache was ended, and its contents were dropped.
const ENDED: u32 = 2;

/// Offset of the bit set of positions on the overflow disk that were given up.
const GIVEN_UP_AT: u64 = 1 << 20;
const GIVEN_UP_BYTES: u64 = SegmentId::LIMIT as u64 / 8 + 1;

const UNIT: u64 = SEGMENT_BYTES as u64;
const DIRECTORY_AT: u64 = 2 << 20;

/// The most pieces of partial blocks of a leaf.
pub(crate) const PARTIAL_PIECES: usize = 8;

/// The entry of a leaf in the directory: the numbers of its table's piece and of its pieces of partial
/// blocks; the rest is unused.
const ENTRY_BYTES: u64 = 40;
const _: () = assert!(ENTRY_BYTES >= (1 + PARTIAL_PIECES as u64) * 4);

/// Number of leaves whose entries are reserved together: whole pages.
const GROUP_LEAVES: u64 = 512;
const GROUP_BYTES: u64 = GROUP_LEAVES * ENTRY_BYTES;
const _: () = assert!(GROUP_BYTES.is_multiple_of(PAGE as u64));

/// Number of records that are reserved together.
const RECORD_GROUP: u32 = 512;
const RECORD_BYTES: u64 = size_of::<record::Stored>() as u64;
const RECORDS_BYTES: u64 = (SegmentId::LIMIT as u64 + 1) * RECORD_BYTES;

const SEGMENTS_BYTES: u64 = (SegmentId::LIMIT as u64 + 1) * UNIT;
/// As many bytes as the packed segments would take uncompressed.
const PACKED_BYTES: u64 = SEGMENTS_BYTES;

/// The offset of each region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    blocks: u64,
    records_at: u64,
    pieces_at: u64,
    segments_at: u64,
    packed_at: u64,
    end: u64,
}

impl Layout {
    fn new(blocks: u64) -> Self {
        let leaves = blocks.div_ceil(SLOTS as u64);
        let directory = leaves.div_ceil(GROUP_LEAVES) * GROUP_BYTES;
        let records_at = (DIRECTORY_AT + directory).next_multiple_of(UNIT);
        let pieces_at = (records_at + RECORDS_BYTES).next_multiple_of(UNIT);
        let segments_at = pieces_at + pieces::region_bytes(leaves);
        let packed_at = segments_at + SEGMENTS_BYTES;
        Self { blocks, records_at, pieces_at, segments_at, packed_at, end: packed_at + PACKED_BYTES }
    }

    fn leaves(&self) -> u64 {
        self.blocks.div_ceil(SLOTS as u64)
    }
}

/// The contents of the head.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Head {
    layout: Layout,
    pub(crate) has_overflow: bool,
    /// The key of the overflow, if it is not in a page of its own.
    pub(crate) key: Option<[u8; KEY_BYTES]>,
}

impl Head {
    fn encode(&self) -> [u8; CHECKED + 4] {
        let layout = &self.layout;
        let numbers = [layout.records_at, layout.pieces_at, layout.segments_at, layout.packed_at, layout.end];
        let mut bytes = Vec::with_capacity(CHECKED + 4);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(u32::from(SLOT_COUNT).to_le_bytes());
        bytes.extend(layout.blocks.to_le_bytes());
        numbers.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
        bytes.extend(u32::from(self.has_overflow).to_le_bytes());
        bytes.extend(u32::from(self.key.is_some()).to_le_bytes());
        bytes.extend(self.key.unwrap_or_default());
        let mut head = [0; CHECKED + 4];
        for (place, byte) in head.iter_mut().zip(bytes) {
            *place = byte;
        }
        let (checked, sum) = head.split_at_mut(CHECKED);
        sum.copy_from_slice(&crc32c::crc32c(checked).to_le_bytes());
        head
    }

    /// Decodes the head of a file; the error says why the file cannot be used.
    fn decode(bytes: &[u8]) -> Result<Self, String> {
        let number = |at: usize| bytes.get(at..at + 8)?.first_chunk().copied().map(u64::from_le_bytes);
        let small = |at: usize| bytes.get(at..at + 4)?.first_chunk().copied().map(u32::from_le_bytes);
        if bytes.get(..8) != Some(&MAGIC) {
            return Err("it is not the memory of a write cache".into());
        }
        match small(8) {
            Some(VERSION) => {}
            other => {
                let found = other.unwrap_or(0);
                return Err(format!("it has format {found}; this release reads format {VERSION}"));
            }
        }
        let sum = bytes.get(..CHECKED).map(crc32c::crc32c);
        if sum.is_none() || sum != small(CHECKED) {
            return Err("the checksum of its head is wrong".into());
        }
        let blocks = number(16).unwrap_or(0);
        let key: Option<[u8; KEY_BYTES]> = bytes.get(72..).and_then(|bytes| bytes.first_chunk().copied());
        let head = Self {
            layout: Layout::new(blocks.min(1 << 32)),
            has_overflow: small(64) == Some(1),
            key: key.filter(|_| small(68) == Some(1)),
        };
        if bytes.get(..CHECKED + 4) != Some(&head.encode()) {
            return Err("its layout is not that of this release".into());
        }
        Ok(head)
    }
}

/// A memory file; see the module's documentation.
#[derive(Debug)]
pub(crate) struct MemoryFile {
    file: File,
    layout: Layout,
    /// The mapping of head, positions given up, directory and records.
    index: Mapping,
    pub(crate) pieces: Arc<FilePieces>,
    packed: PackedSpace,
    /// Groups of records whose pages are reserved.
    record_groups: AtomicU32,
    /// Whether the process hands the file over: then dropped parts stay in the file.
    handed_over: AtomicBool,
}

impl MemoryFile {
    /// Makes a memory file of `file`, whose contents are removed first.
    pub(crate) fn create(file: File, blocks: u64, overflow: Option<&KeyPlace>) -> Result<Arc<Self>, IoError> {
        let failed = |e: std::io::Error| {
            IoError::from_os(format!("cannot prepare the memory of a write cache in a file: {e}"), e)
        };
        if UNDER_MODEL_CHECKER {
            return Err(IoError::new(IoErrorKind::Invalid, "the model checker has no memory files"));
        }
        let layout = Layout::new(blocks);
        let key = match overflow {
            Some(KeyPlace::Head(key)) => Some(**key),
            _ => None,
        };
        let head = Head { layout, has_overflow: overflow.is_some(), key };
        file.set_len(0).map_err(failed)?;
        file.set_len(layout.end).map_err(failed)?;
        let mut page = vec![0; PAGE];
        for (place, byte) in page.iter_mut().zip(head.encode()) {
            *place = byte;
        }
        file.write_all_at(&page, 0).map_err(failed)?;
        let this = Self::map(file, layout, false).map_err(failed)?;
        this.index.u32_at(STATE_AT).into_iter().for_each(|state| state.store(IN_USE, Ordering::Release));
        if key.is_some() && !this.index.lock_page(0) {
            tracing::warn!(
                "the key of a write cache in a file cannot be locked in memory, so it may reach this host's swap: raise the limit of \
                 locked memory (`ulimit -l`, in a systemd unit LimitMEMLOCK=), or encrypt the swap"
            );
        }
        Ok(this)
    }

    /// Opens a file that another process left, and reads its head. Changes nothing.
    pub(crate) fn open(file: File) -> Result<(Arc<Self>, Head), String> {
        let unread = |e: std::io::Error| format!("it cannot be read: {e}");
        let mut page = [0; PAGE];
        if file.metadata().map_err(unread)?.len() < PAGE as u64 {
            return Err("it is empty".into());
        }
        file.read_exact_at(&mut page, 0).map_err(unread)?;
        let head = Head::decode(&page)?;
        if file.metadata().map_err(unread)?.len() < head.layout.end {
            return Err("it is shorter than its head says".into());
        }
        let state: Option<&[u8; 4]> = page.get(STATE_AT..).and_then(|bytes| bytes.first_chunk());
        match state.map(|bytes| u32::from_le_bytes(*bytes)) {
            Some(IN_USE) => {}
            Some(ENDED) => return Err("its write cache was ended".into()),
            _ => return Err("its creation was not completed".into()),
        }
        let this = Self::map(file, head.layout, true).map_err(unread)?;
        if head.key.is_some() {
            this.index.lock_page(0);
        }
        Ok((this, head))
    }

    fn map(file: File, layout: Layout, handed_over: bool) -> std::io::Result<Arc<Self>> {
        let len = usize::try_from(layout.pieces_at).map_err(std::io::Error::other)?;
        let index = Mapping::new(&file, 0, len, PAGE)?;
        let pieces = FilePieces::new(file.try_clone()?, layout.pieces_at);
        let packed = PackedSpace::new(layout.packed_at, layout.end);
        let (record_groups, handed_over) = (AtomicU32::new(0), AtomicBool::new(handed_over));
        Ok(Arc::new(Self { file, layout, index, pieces, packed, record_groups, handed_over }))
    }

    /// The file.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Number of blocks of the volume.
    pub(crate) fn blocks(&self) -> u64 {
        self.layout.blocks
    }

    /// Maps the memory of this many segments from this one on, at an address that is a multiple of 2 MiB.
    pub(crate) fn map_segments(&self, first: u32, count: usize) -> std::io::Result<Mapping> {
        let mapping =
            Mapping::new(&self.file, self.segment_offset(first), count * SEGMENT_BYTES, SEGMENT_BYTES)?;
        mapping.prefer_huge_pages();
        Ok(mapping)
    }

    /// Offset of a segment's memory in the file.
    pub(crate) fn segment_offset(&self, number: u32) -> u64 {
        self.layout.segments_at + u64::from(number) * UNIT
    }

    /// Reserves pages of a part of the index mapping.
    fn reserve_index(&self, at: u64, len: u64) -> bool {
        let (Ok(from), Ok(len)) = (usize::try_from(at), usize::try_from(len)) else { return false };
        reserve(&self.file, (self.index.address() + from, at), len)
    }

    /// Reserves pages for the directory entries of a group of leaves, before the first of them is stored.
    pub(crate) fn reserve_group(&self, group: usize) -> bool {
        self.reserve_index(DIRECTORY_AT + group as u64 * GROUP_BYTES, GROUP_BYTES)
    }

    /// Reserves pages for the record of a segment. Under the log's lock.
    pub(crate) fn reserve_record(&self, id: SegmentId) -> bool {
        let wanted = id.0 / RECORD_GROUP + 1;
        let have = self.record_groups.load(Ordering::Relaxed);
        if have >= wanted {
            return true;
        }
        let group_bytes = u64::from(RECORD_GROUP) * RECORD_BYTES;
        let at = self.layout.records_at + u64::from(have) * group_bytes;
        let is_there = self.reserve_index(at, u64::from(wanted - have) * group_bytes);
        if is_there {
            self.record_groups.store(wanted, Ordering::Relaxed);
        }
        is_there
    }

    /// The address of the record of a segment. It is mapped as long as the file exists, and its page is
    /// reserved before the first store.
    fn address_of_record(&self, id: SegmentId) -> Option<usize> {
        let at = self.layout.records_at + u64::from(id.0.min(SegmentId::LIMIT)) * RECORD_BYTES;
        usize::try_from(at).ok()?.checked_add(self.index.address())
    }

    fn entry(&self, leaf: usize, number: usize) -> Option<&AtomicU32> {
        let at = DIRECTORY_AT + leaf as u64 * ENTRY_BYTES + number as u64 * 4;
        self.index.u32_at(usize::try_from(at).ok()?)
    }

    fn store_entry(&self, leaf: usize, number: usize, value: u32) {
        crash::point();
        if let Some(entry) = self.entry(leaf, number)
            && !crash::is_dead()
        {
            entry.store(value, Ordering::Release);
        }
    }

    /// Stores in the directory which table a leaf has. A named table is complete.
    pub(crate) fn name_table(&self, leaf: usize, table: Table) {
        self.store_entry(leaf, 0, table.encode());
    }

    /// Stores in the directory a piece of a leaf's partial blocks, which is complete, or `None` when it is
    /// not used any more.
    pub(crate) fn name_partial(&self, leaf: usize, place: usize, piece: Option<u32>) {
        self.store_entry(leaf, 1 + place.min(PARTIAL_PIECES - 1), piece.map_or(0, |piece| piece + 1));
    }

    /// Stores that generations up to this one are used, before the first use.
    pub(crate) fn used_generation(&self, generation: u64) {
        crash::point();
        if let Some(most) = self.index.u64_at(GENERATION_AT)
            && !crash::is_dead()
        {
            most.fetch_max(generation, Ordering::AcqRel);
        }
    }

    fn last_generation(&self) -> u64 {
        self.index.u64_at(GENERATION_AT).map_or(0, |most| most.load(Ordering::Acquire))
    }

    /// Reserves pages for positions that may be given up. `None`: the file system is full.
    pub(crate) fn reserve_given_up(&self, positions: &[u32]) -> Option<()> {
        let pages: BTreeSet<u64> =
            positions.iter().map(|position| u64::from(position / 8) / PAGE as u64).collect();
        pages
            .into_iter()
            .all(|page| self.reserve_index(GIVEN_UP_AT + page * PAGE as u64, PAGE as u64))
            .then_some(())
    }

    /// Records that a position on the overflow disk is given up for this cache. Its page was reserved.
    pub(crate) fn give_up(&self, position: u32) {
        crash::point();
        let at = usize::try_from(GIVEN_UP_AT).unwrap_or(0) + position as usize / 32 * 4;
        if let Some(bits) = self.index.u32_at(at)
            && !crash::is_dead()
        {
            bits.fetch_or(1 << (position % 32), Ordering::AcqRel);
        }
    }

    /// Allocates memory for a packed segment. `None`: there is none.
    pub(crate) fn take_run(self: &Arc<Self>, len: usize) -> Option<Run> {
        let (address, len, offset) = self.packed.take(&self.file, len)?;
        Run::new(Arc::clone(self), address, len, offset)
    }

    /// Takes over the memory of another process's packed segment. `None`: the place is invalid, or taken.
    pub(crate) fn adopt_run(self: &Arc<Self>, offset: u64, len: usize) -> Option<Run> {
        let (address, len) = self.packed.adopt(&self.file, offset, len)?;
        Run::new(Arc::clone(self), address, len, offset)
    }

    fn give_run(&self, offset: u64, (address, len): (usize, usize)) {
        if !self.handed_over.load(Ordering::Acquire) {
            give_back(address, len);
            self.packed.give(offset, len);
        }
    }

    /// Ends a recovery: frees the memory of segments without an owner, packed segments except these runs, and
    /// pages of the index without a piece. From now on, dropped parts are freed.
    pub(crate) fn taken_over(&self, is_used: impl Fn(u32) -> bool, packed: &BTreeMap<u64, u64>) {
        self.pieces.adopted_all();
        let layout = &self.layout;
        for page in self.pages_of(layout.pieces_at..layout.segments_at, PAGE as u64) {
            if !self.pieces.is_page_reserved(page) {
                self.punch(page, PAGE as u64);
            }
        }
        for at in self.pages_of(layout.segments_at..layout.packed_at, UNIT) {
            let number = u32::try_from((at - layout.segments_at) / UNIT);
            if !number.is_ok_and(&is_used) {
                self.punch(at, UNIT);
            }
        }
        for at in self.pages_of(layout.packed_at..layout.end, PAGE as u64) {
            let run = packed.range(..=at).next_back();
            if run.is_none_or(|(start, len)| start + len <= at) {
                self.punch(at, PAGE as u64);
            }
        }
        self.handed_over.store(false, Ordering::Release);
    }

    /// The offsets of the units of a part of the file that may have data.
    fn pages_of(&self, range: Range<u64>, unit: u64) -> Vec<u64> {
        let parts = check::data(&self.file, range.clone()).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot find the unused memory of a write cache: it stays in use, and no data is affected");
            Vec::new()
        });
        let first = |part: &Range<u64>| range.start + (part.start - range.start) / unit * unit;
        let units =
            |part: Range<u64>| (first(&part)..part.end).step_by(usize::try_from(unit).unwrap_or(PAGE));
        parts.into_iter().flat_map(units).collect()
    }

    fn punch(&self, at: u64, len: u64) {
        crash::point();
        if crash::is_dead() {
            return;
        }
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        if let Err(error) = rustix::fs::fallocate(&self.file, flags, at, len) {
            tracing::warn!(%error, "cannot return unused memory of a write cache to the kernel: it stays in use, and no data is affected");
        }
    }

    /// From now on, dropped parts stay in the file.
    pub(crate) fn hand_over(&self) {
        self.handed_over.store(true, Ordering::Release);
    }

    /// Ends the cache: frees the contents, so that another process cannot use the file. Nothing uses them any
    /// more.
    pub(crate) fn end(&self) {
        if let Some(state) = self.index.u32_at(STATE_AT) {
            state.store(ENDED, Ordering::Release);
        }
        self.punch(PAGE as u64, self.layout.end - PAGE as u64);
    }
}

/// A leaf's table according to the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Table {
    /// No block was changed.
    Absent,
    /// Every block reads as zeroes.
    Zero,
    /// The number of the piece with its words.
    Piece(u32),
}

impl Table {
    fn encode(self) -> u32 {
        match self {
            Table::Absent => 0,
            Table::Zero => 1,
            Table::Piece(number) => number + 2,
        }
    }

    fn decode(value: u32) -> Self {
        match value {
            0 => Table::Absent,
            1 => Table::Zero,
            number => Table::Piece(number - 2),
        }
    }
}
