//! Reads the memory file before a write cache is recovered from it, and checks it. Layout and terms: `super`.
//!
//! It repairs nothing. After a single contradiction the cache is not recovered, because other parts may be
//! wrong, too. The main checks are:
//!
//! - A slot belongs to one block, and its segment is in use. Exception: two partial blocks of one leaf, one
//!   after the other, may share a slot if each has other sectors in it.
//! - A piece belongs to one leaf, and an entry of a table of partial blocks to one block.
//! - Leaves and blocks are not past the end of the volume.
//! - No two segments have the same memory or the same position on the overflow disk, and no segment has a
//!   position that was given up.
//! - The compressed data of a packed segment has all blocks of the segment.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use rustix::fs::SeekFrom;

use super::record::RecordValue;
use super::{
    DIRECTORY_AT, ENTRY_BYTES, GIVEN_UP_AT, GIVEN_UP_BYTES, GROUP_BYTES, MemoryFile, PARTIAL_PIECES,
    RECORD_BYTES, RECORDS_BYTES, Table,
};
use crate::index_memory::Piece;
use crate::map::Leaf;
use crate::packed::Packed;
use crate::partial::{PartialTable, Sectors};
use crate::segment::State;
use crate::units::{BlockNumber, Location, SECTORS, SLOTS, SegmentId, Slot};

/// Why a cache cannot be recovered.
type Why = String;

/// The parts of a range of a file that may have data. The holes between them are zero and are skipped:
/// reading them through a mapping would allocate memory.
pub(super) fn data(file: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let mut found = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let start = match rustix::fs::seek(file.as_fd(), SeekFrom::Data(at)) {
            Ok(start) if start < range.end => start,
            Ok(_) | Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(file.as_fd(), SeekFrom::Hole(start))?.min(range.end);
        found.push(start..end);
        at = end.max(start + 1);
    }
    Ok(found)
}

/// The bytes of a range of a file up to the last one that may have data, with zeroes for holes.
fn contents(file: &File, range: Range<u64>) -> io::Result<Vec<u8>> {
    let parts = data(file, range.clone())?;
    let len = parts.last().map_or(0, |last| last.end - range.start);
    let mut bytes = vec![0; usize::try_from(len).map_err(io::Error::other)?];
    for part in parts {
        let place = usize::try_from(part.start - range.start).map_err(io::Error::other)?;
        let part_len = usize::try_from(part.end - part.start).map_err(io::Error::other)?;
        if let Some(into) = bytes.get_mut(place..place + part_len) {
            file.read_exact_at(into, part.start)?;
        }
    }
    Ok(bytes)
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word))
}

/// The blocks that have sectors in a slot.
#[derive(Clone, Copy, Debug)]
struct Use {
    /// The first of the blocks.
    owner: u32,
    /// A bit for each sector.
    sectors: u8,
    /// Whether another block may have sectors there.
    is_partial: bool,
}

/// A segment that is in use.
#[derive(Debug)]
pub(crate) struct FoundSegment {
    pub(crate) record: RecordValue,
    slots: Vec<Option<Use>>,
}

impl FoundSegment {
    /// Its live slots, and their owners.
    pub(crate) fn live(&self) -> impl Iterator<Item = (Slot, BlockNumber)> + '_ {
        let used = (0..).zip(&self.slots).filter_map(|(slot, used)| Some((slot, used.as_ref()?)));
        used.map(|(slot, used)| (Slot(slot), BlockNumber(used.owner)))
    }
}

/// The contents of a memory file.
#[derive(Default)]
pub(crate) struct Found {
    /// Segments that blocks' words name, by number.
    pub(crate) segments: BTreeMap<u32, FoundSegment>,
    /// Records that are not free, of segments that no block names: these segments can be freed.
    dead: Vec<RecordValue>,
    /// One past the highest number of a segment in use.
    pub(crate) numbers: u32,
    /// Positions on the overflow disk that were given up.
    pub(crate) given_up: BTreeSet<u32>,
    /// Leaves that are not absent.
    pub(crate) leaves: Vec<(usize, Leaf)>,
    /// Packed segments.
    pub(crate) packed: Vec<(SegmentId, Packed)>,
    /// The highest generation that was used.
    pub(crate) generation: u64,
}

struct Checker<'a> {
    file: &'a std::sync::Arc<MemoryFile>,
    records: BTreeMap<u32, RecordValue>,
    found: Found,
}

impl Found {
    /// Positions of segments without live blocks, to which a write may be in flight.
    pub(crate) fn dead_under_way(&self) -> impl Iterator<Item = u32> + '_ {
        let is_under_way =
            |record: &&RecordValue| matches!(record.state, State::Frozen | State::PackedFrozen);
        self.dead.iter().filter(is_under_way).filter_map(|record| record.position)
    }

    /// Reads and checks the whole file.
    pub(crate) fn read(file: &std::sync::Arc<MemoryFile>) -> Result<Self, Why> {
        let unread = |what: &str, e: io::Error| format!("{what} cannot be read: {e}");
        let mut checker = Checker { file, records: BTreeMap::new(), found: Self::default() };
        checker.found.given_up = given_up(file).map_err(|e| unread("the positions that were given up", e))?;
        let records = file.layout.records_at..file.layout.records_at + RECORDS_BYTES;
        let records = contents(file.file(), records).map_err(|e| unread("the records of segments", e))?;
        checker.read_records(&records)?;
        let leaves = file.layout.leaves();
        let directory = DIRECTORY_AT..file.layout.records_at;
        let parts = data(file.file(), directory).map_err(|e| unread("the directory", e))?;
        for part in parts {
            // Whole groups, because entries cross page boundaries.
            let group = |at: u64| (at - DIRECTORY_AT) / GROUP_BYTES;
            let first = DIRECTORY_AT + group(part.start) * GROUP_BYTES;
            let entries = contents(file.file(), first..part.end).map_err(|e| unread("the directory", e))?;
            let number = (first - DIRECTORY_AT) / ENTRY_BYTES;
            for (leaf, entry) in (number..).zip(entries.chunks(usize::try_from(ENTRY_BYTES).unwrap_or(1))) {
                checker.read_entry(leaf, leaves, entry)?;
            }
        }
        checker.finish()
    }
}

pub(super) fn given_up(file: &MemoryFile) -> io::Result<BTreeSet<u32>> {
    let bytes = contents(file.file(), GIVEN_UP_AT..GIVEN_UP_AT + GIVEN_UP_BYTES.next_multiple_of(4))?;
    let numbers = (0..).step_by(32).zip(words(&bytes)).filter(|(_, bits)| *bits != 0);
    Ok(numbers
        .flat_map(|(first, bits): (u32, u32)| {
            (0..32).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| first + bit)
        })
        .collect())
}

impl Checker<'_> {
    fn read_records(&mut self, bytes: &[u8]) -> Result<(), Why> {
        let record_bytes = usize::try_from(RECORD_BYTES).unwrap_or(1);
        for (number, bytes) in (0..SegmentId::LIMIT).zip(bytes.chunks(record_bytes)) {
            let record = RecordValue::decode(bytes)
                .ok_or_else(|| format!("the record of segment {number} has an unknown state"))?;
            self.found.generation = self.found.generation.max(record.generation);
            if record.state != State::Free {
                self.records.insert(number, record);
            }
        }
        self.found.generation = self.found.generation.max(self.file.last_generation());
        self.found.numbers = self.records.last_key_value().map_or(0, |(last, _)| last + 1);
        Ok(())
    }

    fn read_entry(&mut self, number: u64, leaves: u64, entry: &[u8]) -> Result<(), Why> {
        let mut values = words(entry);
        let table = Table::decode(values.next().unwrap_or(0));
        let partial: Vec<Option<u32>> =
            values.take(PARTIAL_PIECES).map(|value| value.checked_sub(1)).collect();
        let has_partial = partial.iter().any(|piece| piece.is_some());
        if !matches!(table, Table::Piece(_)) && has_partial {
            return Err(format!("leaf {number} has partial blocks and no table"));
        }
        if table == Table::Absent {
            return Ok(());
        }
        let leaf = usize::try_from(number).map_err(|e| e.to_string())?;
        if number >= leaves {
            return Err(format!("leaf {number} is past the end of the volume, which has {leaves} leaves"));
        }
        let Table::Piece(table) = table else {
            self.found.leaves.push((leaf, Leaf::Zero));
            return Ok(());
        };
        let table = self.piece(leaf, table)?;
        let (mut pieces, mut named) = (Vec::new(), 0);
        // Pieces are named in order, so none may be missing before a later one.
        for piece in partial {
            match piece {
                Some(piece) if pieces.len() == named => pieces.push(self.piece(leaf, piece)?),
                Some(_) => {
                    return Err(format!(
                        "a table of partial blocks of leaf {leaf} of the block index is missing"
                    ));
                }
                None => {}
            }
            named += 1;
        }
        let mut entries = BTreeSet::new();
        for (index, word) in table.iter().enumerate() {
            let block = u64::try_from(leaf * SLOTS + index).map_err(|e| e.to_string())?;
            self.read_word(block, *word, &pieces, &mut entries)?;
        }
        let partial = PartialTable::adopt(pieces, &entries);
        self.found.leaves.push((leaf, Leaf::Table(table, partial.map(Box::new))));
        Ok(())
    }

    fn piece(&self, leaf: usize, number: u32) -> Result<Piece<Location>, Why> {
        let most = (self.file.layout.segments_at - self.file.layout.pieces_at) / 2048;
        let is_there = u64::from(number) < most;
        let piece = if is_there { Piece::adopt(&self.file.pieces, number) } else { None };
        piece.ok_or_else(|| {
            format!(
                "leaf {leaf} of the block index refers to table {number}, which does not exist or already belongs \
                 to another leaf"
            )
        })
    }

    fn read_word(
        &mut self,
        block: u64,
        word: Location,
        pieces: &[Piece<Location>],
        entries: &mut BTreeSet<usize>,
    ) -> Result<(), Why> {
        let is_past = block >= self.file.blocks();
        let Some(entry) = word.entry() else {
            if word.place().is_none() {
                return Ok(());
            }
            if is_past {
                return Err(format!("block {block} is past the end of the volume"));
            }
            return self.name(block, word, 0xff, false);
        };
        let sectors = sectors_of(pieces, entry)
            .filter(|_| !is_past)
            .ok_or_else(|| format!("block {block} is a partial block whose sectors are not in the table"))?;
        if !entries.insert(entry) {
            return Err(format!("block {block} and another one have the same sectors"));
        }
        for (at, place) in sectors.iter().enumerate() {
            if place.entry().is_some() {
                return Err(format!("a sector of block {block} is a partial block"));
            }
            let is_first = !sectors.iter().take(at).any(|before| before == place);
            if place.place().is_some() && is_first {
                let here = |(_, other): &(usize, &Location)| *other == place;
                let mask = sectors.iter().enumerate().filter(here).fold(0u8, |mask, (at, _)| mask | 1 << at);
                self.name(block, *place, mask, true)?;
            }
        }
        Ok(())
    }

    /// Records that a block has these sectors in a slot.
    fn name(&mut self, block: u64, at: Location, sectors: u8, is_partial: bool) -> Result<(), Why> {
        let Some((id, slot)) = at.place() else { return Ok(()) };
        let block = u32::try_from(block).map_err(|e| e.to_string())?;
        let record = self
            .records
            .get(&id.0)
            .ok_or_else(|| format!("block {block} is in segment {}, which is not in use", id.0))?;
        let segment = self
            .found
            .segments
            .entry(id.0)
            .or_insert_with(|| FoundSegment { record: *record, slots: vec![None; SLOTS] });
        let Some(place) = segment.slots.get_mut(usize::from(slot.0)) else { return Ok(()) };
        let mine = Use { owner: block, sectors, is_partial };
        match place {
            None => *place = Some(mine),
            Some(used) => {
                // Leaves and their blocks are read in order.
                let is_next = used.owner + 1 == block && !(block as usize).is_multiple_of(SLOTS);
                let shares = is_next && used.is_partial && is_partial && used.sectors & sectors == 0;
                if !shares {
                    return Err(format!(
                        "slot {} of segment {} is that of block {} and that of block {block}",
                        slot.0, id.0, used.owner
                    ));
                }
                // A third block cannot share the slot.
                *used = Use { owner: used.owner, sectors: 0xff, is_partial: false };
            }
        }
        Ok(())
    }

    /// Checks the records of the segments, after all blocks' words were read.
    fn finish(mut self) -> Result<Found, Why> {
        let (mut memories, mut positions) = (BTreeMap::new(), BTreeMap::new());
        for (number, segment) in &self.found.segments {
            let record = &segment.record;
            let wrong = |what: &str| Err(format!("segment {number} is {:?}, and {what}", record.state));
            let has_memory =
                matches!(record.state, State::Filling | State::Dirty | State::Frozen | State::Clean);
            if has_memory != record.piece.is_some() {
                return wrong("its memory does not fit this state");
            }
            if let Some(memory) = record.piece
                && let Some(other) = memories.insert(memory, *number)
            {
                return wrong(&format!("segment {other} has the same memory"));
            }
            if record.piece.is_some_and(|memory| memory >= SegmentId::LIMIT) {
                return wrong("its memory is past the end of the file");
            }
            if matches!(record.state, State::Clean | State::Spilled) {
                let Some(position) = record.position.filter(|position| *position < SegmentId::LIMIT) else {
                    return wrong("has no position on disk");
                };
                if let Some(other) = positions.insert(position, *number) {
                    return wrong(&format!("segment {other} has the same position on disk"));
                }
                if self.found.given_up.contains(&position) {
                    return wrong("its position on disk was given up");
                }
            }
        }
        for (number, segment) in &self.found.segments {
            if !matches!(segment.record.state, State::Packed | State::PackedFrozen) {
                continue;
            }
            let packed = Packed::adopt(self.file, segment.record.packed).ok_or_else(|| {
                format!("the compressed data of segment {number} is damaged, or belongs to another segment")
            })?;
            if segment.live().any(|(slot, _)| !packed.has(slot)) {
                return Err(format!("segment {number} has a block that is missing in its compressed data"));
            }
            self.found.packed.push((SegmentId(*number), packed));
        }
        let is_named = |number: &u32| self.found.segments.contains_key(number);
        let dead = self.records.iter().filter(|(number, _)| !is_named(number));
        self.found.dead = dead.map(|(_, record)| *record).collect();
        Ok(self.found)
    }
}

/// The sectors of an entry of a leaf's table of partial blocks.
fn sectors_of(pieces: &[Piece<Location>], entry: usize) -> Option<Sectors> {
    let first = entry * SECTORS;
    let piece = pieces.get(first / SLOTS)?;
    piece.get(first % SLOTS..)?.first_chunk().copied()
}
