//! The map: the location of the newest contents of each block of the volume.
//!
//! Two levels: groups of 512 leaves (1 GiB of disk), made at their first write, and leaves of 512 locations
//! (2 MiB of disk). A leaf whose blocks are all absent or all zero has no table.
//!
//! The leaf's lock guards more than its locations: **while it is held, the contents of the slots that the
//! leaf points to stay where they are.** A thread that moves a segment (freezes it for writing, or frees its
//! RAM) first changes the segment's state, then locks and unlocks each leaf that has blocks in it
//! ([`Map::sweep`]). After that no thread uses the old state. So the hit path needs no reference count and no
//! epoch, only the lock that it takes anyway.
//!
//! Lock order: leaf, then the log, then the overflow's positions, then the memory pool. A thread that holds a
//! leaf's lock waits for no other leaf ([`Map::try_write`] locks more without waiting).
//!
//! # A frozen map
//! [`Map::freeze`] stores an odd number; that store is the instant of the freeze. A thread that locks a leaf
//! to change its blocks reads the number *while it holds the lock*. If the number is odd and the leaf has not
//! seen it yet, the leaf's locations are copied first. So only leaves that change are copied; a reader of the
//! frozen map uses the copy if there is one, or else the leaf itself. A thread that read the old number held
//! the lock earlier, so its change is complete when the frozen map is read. A change that began after another
//! one was answered sees the number if the other one did. The slots in a copy are neither overwritten nor
//! freed; they may move like all others.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use crate::index_memory::{Piece, publish};
use crate::memory_file::{MemoryFile, Table};
use crate::partial::{PARTIAL_BYTES, PartialTable, Sectors, slots};
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use crate::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard, UNDER_MODEL_CHECKER};
use crate::units::{BlockNumber, Location, SECTORS, SLOTS};

const LEAVES_PER_GROUP: usize = SLOTS;

/// Size of a leaf's table in bytes.
pub const TABLE_BYTES: u64 = (SLOTS * size_of::<Location>()) as u64;

/// The locations of one leaf: 2 MiB of disk.
#[derive(Clone, Debug, Default)]
pub enum Leaf {
    /// No block was changed.
    #[default]
    Absent,
    /// Every block reads as zeroes.
    Zero,
    /// Any other state, with the sectors of partial blocks if there are any.
    Table(Piece<Location>, Option<Box<PartialTable>>),
}

impl Leaf {
    /// The location of the block with this index in the leaf.
    #[inline]
    pub fn get(&self, index: usize) -> Location {
        match self {
            Leaf::Absent => Location::ABSENT,
            Leaf::Zero => Location::ZERO,
            Leaf::Table(table, _) => table.get(index).copied().unwrap_or(Location::ABSENT),
        }
    }

    /// The location of each sector of the block. If it is not a partial block, all sectors have the same
    /// location.
    pub fn sectors(&self, index: usize) -> Sectors {
        let word = self.get(index);
        match (word.entry(), self) {
            (Some(entry), Leaf::Table(_, Some(partial))) => partial.get(entry),
            _ => [word; SECTORS],
        }
    }

    /// Whether the block, or a sector of it, is in this slot.
    #[inline]
    pub fn names(&self, index: usize, slot: Location) -> bool {
        let word = self.get(index);
        word == slot || (word.entry().is_some() && self.sectors(index).contains(&slot))
    }

    fn table_bytes(&self) -> u64 {
        match self {
            Leaf::Absent | Leaf::Zero => 0,
            Leaf::Table(..) => TABLE_BYTES,
        }
    }

    /// Index memory of the leaf, in bytes.
    fn bytes(&self) -> u64 {
        match self {
            Leaf::Absent | Leaf::Zero => 0,
            Leaf::Table(_, partial) => TABLE_BYTES + partial.as_ref().map_or(0, |partial| partial.bytes()),
        }
    }

    fn uniform(&self) -> Option<Location> {
        match self {
            Leaf::Absent => Some(Location::ABSENT),
            Leaf::Zero => Some(Location::ZERO),
            Leaf::Table(..) => None,
        }
    }
}

/// The present state of a leaf, and its state when the map was frozen.
#[derive(Debug, Default)]
pub struct LeafState {
    now: Leaf,
    /// The leaf at the freeze `seen`, if it may have changed since.
    kept: Option<Leaf>,
    /// The freeze that `kept` belongs to.
    seen: u32,
}

impl LeafState {
    /// The location of the block with this index in the leaf.
    #[inline]
    pub fn get(&self, index: usize) -> Location {
        self.now.get(index)
    }

    /// All locations.
    pub fn now(&self) -> &Leaf {
        &self.now
    }

    /// All locations at the freeze `freeze`.
    pub fn at(&self, freeze: u32) -> &Leaf {
        match &self.kept {
            Some(kept) if self.seen == freeze => kept,
            _ => &self.now,
        }
    }

    /// Whether a frozen map needs this slot.
    #[inline]
    pub fn keeps(&self, index: usize, location: Location) -> bool {
        self.kept.as_ref().is_some_and(|kept| kept.names(index, location))
    }

    /// Whether the block needs this slot, now or in a frozen map.
    pub fn needs(&self, index: usize, slot: Location) -> bool {
        self.now.names(index, slot) || self.keeps(index, slot)
    }
}

/// A leaf and its lock, in a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
struct Line(RwLock<LeafState>);

const _: () = assert!(UNDER_MODEL_CHECKER || size_of::<Line>() == 64);

type Group = Box<[Line]>;

/// The space that partial blocks take.
#[derive(Debug, Default)]
struct Partial {
    /// Bytes of their tables.
    bytes: AtomicU64,
    /// Number of partial blocks.
    blocks: AtomicU64,
    /// Number of their slots; a slot counts once for each block that has sectors in it.
    slots: AtomicU64,
}

/// The map of one volume.
pub struct Map {
    groups: Box<[OnceLock<Group>]>,
    blocks: u64,
    table_bytes: AtomicU64,
    partial: Partial,
    /// Odd while the map is frozen: the number of that freeze.
    freeze: AtomicU32,
    /// True from the beginning of a freeze until the last leaf has dropped its copy.
    frozen: AtomicBool,
    /// The file with the tables and their directory, if they outlive the process.
    file: Option<Arc<MemoryFile>>,
}

/// A leaf locked for reading: the contents of its blocks stay in place.
pub type LeafRead<'a> = RwLockReadGuard<'a, LeafState>;

/// A leaf locked for writing.
pub struct LeafWrite<'a> {
    leaf: RwLockWriteGuard<'a, LeafState>,
    map: &'a Map,
    number: usize,
}

/// A proof that a leaf is locked, so that slots of its blocks may be touched.
pub trait LeafHeld {}
impl LeafHeld for LeafRead<'_> {}
impl LeafHeld for LeafWrite<'_> {}

/// Leaf number and index in the leaf.
#[inline]
pub fn split(block: BlockNumber) -> (usize, usize) {
    let block = block.0 as usize;
    (block / SLOTS, block % SLOTS)
}

impl Map {
    /// An empty map for a volume of this many blocks.
    pub fn new(blocks: u64) -> Self {
        Self::with_file(blocks, None)
    }

    /// Like [`Map::new`], with tables in a file.
    pub(crate) fn with_file(blocks: u64, file: Option<Arc<MemoryFile>>) -> Self {
        let leaves = blocks.div_ceil(SLOTS as u64);
        let groups = leaves.div_ceil(LEAVES_PER_GROUP as u64);
        let groups = (0..groups).map(|_| OnceLock::new()).collect();
        Self {
            groups,
            blocks,
            table_bytes: AtomicU64::new(0),
            partial: Partial::default(),
            freeze: AtomicU32::new(0),
            frozen: AtomicBool::new(false),
            file,
        }
    }

    /// Adds the leaves that another process left; the directory has memory for them. `None`: this process has
    /// no memory.
    pub(crate) fn adopt(&self, leaves: Vec<(usize, Leaf)>) -> Option<()> {
        let counts = &self.partial;
        for (number, found) in leaves {
            let mut leaf = self.relocate(number)?;
            self.table_bytes.fetch_add(found.table_bytes(), Ordering::Relaxed);
            counts.bytes.fetch_add(found.bytes() - found.table_bytes(), Ordering::Relaxed);
            for index in 0..SLOTS {
                if found.get(index).entry().is_some() {
                    counts.blocks.fetch_add(1, Ordering::Relaxed);
                    counts.slots.fetch_add(slots(&found.sectors(index)).count() as u64, Ordering::Relaxed);
                }
            }
            leaf.leaf.now = found;
        }
        Some(())
    }

    /// Whether a leaf without a table can get one, and one with a table partial blocks. `false`: the file
    /// system of the memory file is full.
    #[inline]
    pub(crate) fn has_index_space(&self) -> bool {
        self.file.as_ref().is_none_or(|file| file.pieces.has_spare())
    }

    /// Blocks of the volume.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Bytes of leaf tables in use, for the budget.
    pub fn table_bytes(&self) -> u64 {
        self.table_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of the tables of partial blocks in use, for the budget.
    pub fn partial_bytes(&self) -> u64 {
        self.partial.bytes.load(Ordering::Relaxed)
    }

    /// Partial blocks.
    pub fn partial_blocks(&self) -> u64 {
        self.partial.blocks.load(Ordering::Relaxed)
    }

    /// Slots of partial blocks. A slot that two of them share counts twice.
    pub fn partial_slots(&self) -> u64 {
        self.partial.slots.load(Ordering::Relaxed)
    }

    /// Slots that partial blocks have beyond one for each of them.
    pub fn partial_surplus(&self) -> u64 {
        self.partial_slots().saturating_sub(self.partial_blocks())
    }

    /// Locks a leaf for reading. `None`: no block of its group was ever changed.
    #[inline]
    pub fn read(&self, leaf: usize) -> Option<LeafRead<'_>> {
        let group = self.groups.get(leaf / LEAVES_PER_GROUP)?.get()?;
        Some(group.get(leaf % LEAVES_PER_GROUP)?.0.read())
    }

    /// Locks a leaf to change its blocks. `None`: the leaf is past the end of the volume, or the memory file
    /// has no space for its group.
    #[inline]
    pub fn write(&self, leaf: usize) -> Option<LeafWrite<'_>> {
        self.relocate(leaf).map(|leaf| self.for_change(leaf))
    }

    /// Like [`Map::write`], for a thread that moves blocks without changing their contents.
    #[inline]
    pub fn relocate(&self, leaf: usize) -> Option<LeafWrite<'_>> {
        let group = self.groups.get(leaf / LEAVES_PER_GROUP)?;
        let group = match group.get() {
            Some(group) => group,
            None => self.make_group(leaf / LEAVES_PER_GROUP, group)?,
        };
        Some(LeafWrite { leaf: group.get(leaf % LEAVES_PER_GROUP)?.0.write(), map: self, number: leaf })
    }

    #[cold]
    fn make_group<'a>(&self, number: usize, group: &'a OnceLock<Group>) -> Option<&'a Group> {
        if self.file.as_ref().is_some_and(|file| !file.reserve_group(number)) {
            return None;
        }
        Some(group.get_or_init(|| (0..LEAVES_PER_GROUP).map(|_| Line::default()).collect()))
    }

    /// Like [`Map::write`], but only if the leaf's group exists and the leaf is not locked.
    #[inline]
    pub fn try_write(&self, leaf: usize) -> Option<LeafWrite<'_>> {
        let group = self.groups.get(leaf / LEAVES_PER_GROUP)?.get()?;
        let (number, line) = (leaf, group.get(leaf % LEAVES_PER_GROUP)?);
        Some(self.for_change(LeafWrite { leaf: line.0.try_write()?, map: self, number }))
    }

    /// Prepares a leaf that was just locked for a change: copies it for a frozen map if necessary.
    #[inline]
    fn for_change<'a>(&self, mut leaf: LeafWrite<'a>) -> LeafWrite<'a> {
        let freeze = self.freeze.load(Ordering::SeqCst);
        if freeze % 2 == 1 && leaf.leaf.seen != freeze {
            leaf.keep(freeze);
        }
        leaf
    }

    /// Freezes the map at this instant. Returns the number of the freeze, or `None` if an earlier freeze has
    /// not ended.
    pub fn freeze(&self) -> Option<u32> {
        if self.frozen.swap(true, Ordering::SeqCst) {
            return None;
        }
        Some(self.freeze.fetch_add(1, Ordering::SeqCst).wrapping_add(1))
    }

    /// Whether slots may be in use that only a frozen map needs.
    pub fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::SeqCst)
    }

    /// Ends a freeze. Calls `dead` with each leaf, locked, its number, and the slots that its blocks had in
    /// the frozen map and no longer have.
    pub fn thaw(&self, mut dead: impl FnMut(&mut LeafWrite<'_>, usize, &[Location])) {
        self.freeze.fetch_add(1, Ordering::SeqCst);
        let mut slots = Vec::new();
        for (number, group) in self.groups.iter().enumerate() {
            let Some(group) = group.get() else { continue };
            for (index, leaf) in group.iter().enumerate() {
                // A thread that read the old number holds this lock, or held it earlier.
                let number = number * LEAVES_PER_GROUP + index;
                let mut leaf = LeafWrite { leaf: leaf.0.write(), map: self, number };
                slots.clear();
                leaf.forget(&mut slots);
                if !slots.is_empty() {
                    dead(&mut leaf, number, &slots);
                }
            }
        }
        self.frozen.store(false, Ordering::SeqCst);
    }

    /// Whether no block of this leaf's group was ever changed, so that a discard can skip the group.
    pub fn group_is_untouched(&self, leaf: usize) -> bool {
        self.groups.get(leaf / LEAVES_PER_GROUP).is_none_or(|g| g.get().is_none())
    }

    /// Calls `each` with the ranges of zero blocks (first, count), ascending. For a checkpoint, during which
    /// the map does not change.
    pub fn zero_ranges(&self, mut each: impl FnMut((u32, u32))) {
        let mut last: Option<(u32, u32)> = None;
        let mut push = |first: usize, count: usize| {
            let (Ok(first), Ok(count)) = (u32::try_from(first), u32::try_from(count)) else { return };
            match &mut last {
                Some((start, len)) if *start + *len == first => *len += count,
                _ => last.replace((first, count)).into_iter().for_each(&mut each),
            }
        };
        for (number, group) in self.groups.iter().enumerate() {
            let Some(group) = group.get() else { continue };
            for (index, leaf) in group.iter().enumerate() {
                let first = (number * LEAVES_PER_GROUP + index) * SLOTS;
                match leaf.0.read().now() {
                    Leaf::Absent => {}
                    // The last leaf may extend past the end of the volume.
                    Leaf::Zero => {
                        let end = usize::try_from(self.blocks).unwrap_or(usize::MAX);
                        push(first, SLOTS.min(end.saturating_sub(first)));
                    }
                    Leaf::Table(table, _) => {
                        let zero = table.iter().enumerate().filter(|(_, l)| **l == Location::ZERO);
                        zero.for_each(|(index, _)| push(first + index, 1));
                    }
                }
            }
        }
        last.into_iter().for_each(each);
    }

    /// Calls `each` with the partial blocks, ascending. For a checkpoint, during which the map does not
    /// change.
    pub fn each_partial(&self, mut each: impl FnMut(BlockNumber, &Sectors)) {
        for (number, group) in self.groups.iter().enumerate() {
            let Some(group) = group.get() else { continue };
            for (index, leaf) in group.iter().enumerate() {
                let leaf = leaf.0.read();
                let Leaf::Table(table, Some(partial)) = leaf.now() else { continue };
                let first = (number * LEAVES_PER_GROUP + index) * SLOTS;
                for (block, word) in (first..).zip(table.iter()) {
                    if let (Some(entry), Ok(block)) = (word.entry(), u32::try_from(block)) {
                        each(BlockNumber(block), &partial.get(entry));
                    }
                }
            }
        }
    }

    /// Waits until all threads that locked the leaf of one of these blocks before this call have unlocked it.
    pub fn sweep(&self, blocks: impl Iterator<Item = BlockNumber>) {
        let mut last = usize::MAX;
        for block in blocks {
            let (leaf, _) = split(block);
            if leaf != last {
                drop(self.relocate(leaf));
                last = leaf;
            }
        }
    }
}

impl LeafWrite<'_> {
    /// The location of the block.
    #[inline]
    pub fn get(&self, index: usize) -> Location {
        self.leaf.get(index)
    }

    /// The location of each sector of the block.
    pub fn sectors(&self, index: usize) -> Sectors {
        self.leaf.now.sectors(index)
    }

    /// Sets the location of a block that is not a partial block. The caller frees the old slot, if there was
    /// one.
    #[inline]
    pub fn set(&mut self, index: usize, location: Location) {
        debug_assert!(self.get(index).entry().is_none(), "the entry of a partial block would stay");
        if let Leaf::Table(table, _) = &mut self.leaf.now {
            if let Some(entry) = table.get_mut(index) {
                publish(entry, location);
            }
            return;
        }
        let Some(fill) = self.leaf.now.uniform() else { return };
        if fill != location {
            self.make_table(fill, Some((index, location)));
        }
    }

    /// Makes a table for a leaf without one. In a memory file's directory, the table appears together with
    /// `change`.
    #[cold]
    fn make_table(&mut self, fill: Location, change: Option<(usize, Location)>) {
        let (mut table, number) = self.new_piece(fill);
        if let Some((index, location)) = change
            && let Some(entry) = table.get_mut(index)
        {
            publish(entry, location);
        }
        self.name_table(number.map(Table::Piece));
        self.leaf.now = Leaf::Table(table, None);
        self.map.table_bytes.fetch_add(TABLE_BYTES, Ordering::Relaxed);
    }

    /// Makes a piece; also returns its number in the memory file.
    fn new_piece(&self, fill: Location) -> (Piece<Location>, Option<u32>) {
        match &self.map.file {
            None => (Piece::new(|| fill), None),
            Some(file) => {
                let (piece, number) = Piece::new_in(&file.pieces, fill);
                (piece, Some(number))
            }
        }
    }

    fn name_table(&self, table: Option<Table>) {
        if let (Some(file), Some(table)) = (&self.map.file, table) {
            file.name_table(self.number, table);
        }
    }

    fn name_partial(&self, place: usize, piece: Option<u32>) {
        if let Some(file) = &self.map.file {
            file.name_partial(self.number, place, piece);
        }
    }

    /// Whether the leaf has no table, so that a change makes one.
    #[inline]
    pub(crate) fn is_uniform(&self) -> bool {
        !matches!(self.leaf.now, Leaf::Table(..))
    }

    /// Whether `count` more blocks can become partial blocks.
    pub fn takes_partial(&self, count: usize) -> bool {
        match &self.leaf.now {
            Leaf::Table(_, Some(partial)) => partial.free_entries() >= count,
            _ => true,
        }
    }

    /// Sets the location of each sector of the block: it becomes a partial block, unless all sectors have the
    /// same location. The caller frees the old slots. `false`: the leaf takes no more partial blocks
    /// ([`LeafWrite::takes_partial`]), and nothing has changed.
    #[must_use]
    pub fn set_sectors(&mut self, index: usize, sectors: &Sectors) -> bool {
        let whole = sectors.first().copied().filter(|first| sectors.iter().all(|sector| sector == first));
        let old = self.get(index).entry();
        let old_slots = if old.is_some() { slots(&self.sectors(index)).count() } else { 0 };
        let counts = &self.map.partial;
        if let Some(whole) = whole {
            let Some(entry) = old else {
                self.set(index, whole);
                return true;
            };
            // The block's word first: from then on no reader uses the table of partial blocks for this block.
            self.put(index, whole);
            self.drop_entry(entry);
            counts.blocks.fetch_sub(1, Ordering::Relaxed);
            counts.slots.fetch_sub(old_slots as u64, Ordering::Relaxed);
            return true;
        }
        if let Some(fill) = self.leaf.now.uniform() {
            self.make_table(fill, None);
        }
        match old {
            Some(entry) => {
                if let Leaf::Table(_, Some(partial)) = &mut self.leaf.now {
                    partial.set(entry, sectors);
                }
            }
            None => {
                let Some(entry) = self.add_entry(sectors) else { return false };
                self.put(index, Location::partial(entry));
                counts.blocks.fetch_add(1, Ordering::Relaxed);
            }
        }
        counts.slots.fetch_add(slots(sectors).count() as u64, Ordering::Relaxed);
        counts.slots.fetch_sub(old_slots as u64, Ordering::Relaxed);
        true
    }

    fn put(&mut self, index: usize, word: Location) {
        if let Leaf::Table(table, _) = &mut self.leaf.now
            && let Some(place) = table.get_mut(index)
        {
            publish(place, word);
        }
    }

    /// Adds an entry to the table of partial blocks. `None`: the table is full.
    fn add_entry(&mut self, sectors: &Sectors) -> Option<u16> {
        while let Leaf::Table(_, partial) = &self.leaf.now
            && let Some(place) = partial.as_ref().map_or(Some(0), |partial| partial.missing_piece())
        {
            let (piece, number) = self.new_piece(Location::ABSENT);
            if number.is_some() {
                self.name_partial(place, number);
            }
            let Leaf::Table(_, partial) = &mut self.leaf.now else { return None };
            partial.get_or_insert_default().push(piece);
            self.map.partial.bytes.fetch_add(PARTIAL_BYTES, Ordering::Relaxed);
        }
        let Leaf::Table(_, Some(partial)) = &mut self.leaf.now else { return None };
        partial.add(sectors)
    }

    fn drop_entry(&mut self, entry: usize) {
        let Leaf::Table(_, Some(partial)) = &mut self.leaf.now else { return };
        partial.remove(entry);
        let (before, needed) = (partial.pieces(), partial.needed_pieces());
        if needed == before {
            return;
        }
        // The last one first, so that the directory never names a piece without those before it.
        (needed..before).rev().for_each(|place| self.name_partial(place, None));
        self.map.partial.bytes.fetch_sub((before - needed) as u64 * PARTIAL_BYTES, Ordering::Relaxed);
        let Leaf::Table(_, partial) = &mut self.leaf.now else { return };
        match partial {
            Some(partial) if needed > 0 => partial.truncate(needed),
            _ => *partial = None,
        }
    }

    /// Records that the contents of a slot have moved to another one, for all sectors of the block in it. The
    /// caller frees the old slot.
    pub fn moved(&mut self, index: usize, from: Location, to: Location) {
        rename(&mut self.leaf.now, index, from, to);
    }

    /// Drops the table if all blocks are zero, or all are absent. Called after discards.
    pub fn fold(&mut self) {
        let Leaf::Table(table, None) = &self.leaf.now else { return };
        let Some(first) = table.first().copied() else { return };
        if first.place().is_some() || table.iter().any(|entry| *entry != first) {
            return;
        }
        let (now, table) = match first {
            Location::ZERO => (Leaf::Zero, Table::Zero),
            _ => (Leaf::Absent, Table::Absent),
        };
        self.name_table(Some(table));
        self.leaf.now = now;
        self.map.table_bytes.fetch_sub(TABLE_BYTES, Ordering::Relaxed);
    }

    /// Whether a frozen map needs this slot: then it is neither overwritten nor freed.
    #[inline]
    pub fn keeps(&self, index: usize, location: Location) -> bool {
        self.leaf.keeps(index, location)
    }

    /// Whether the block, or a sector of it, is in this slot now.
    pub fn names(&self, index: usize, slot: Location) -> bool {
        self.leaf.now.names(index, slot)
    }

    /// Whether the block needs this slot, now or in a frozen map.
    pub fn needs(&self, index: usize, slot: Location) -> bool {
        self.leaf.needs(index, slot)
    }

    /// Records that a slot that a frozen map needs has moved.
    pub fn moved_kept(&mut self, index: usize, from: Location, to: Location) {
        if let Some(kept) = &mut self.leaf.kept {
            rename(kept, index, from, to);
        }
    }

    /// Copies the leaf for a frozen map, before its first change.
    #[cold]
    fn keep(&mut self, freeze: u32) {
        // A copy of an earlier freeze can only be of a leaf that was new at that freeze's end, and names no
        // slot.
        debug_assert!(!matches!(self.leaf.kept, Some(Leaf::Table(..))), "a freeze was not over");
        self.map.table_bytes.fetch_add(self.leaf.now.bytes(), Ordering::Relaxed);
        self.leaf.kept = Some(self.leaf.now.clone());
        self.leaf.seen = freeze;
    }

    /// Drops the copy. Adds to `freed` the slots that blocks had at the freeze and no longer have; a slot that
    /// was shared by two such blocks twice.
    fn forget(&mut self, freed: &mut Vec<Location>) {
        let Some(kept) = self.leaf.kept.take() else { return };
        let Leaf::Table(table, _) = &kept else { return };
        for (index, old) in table.iter().enumerate() {
            if old.entry().is_some() {
                let before = kept.sectors(index);
                freed.extend(slots(&before).filter(|slot| !self.leaf.now.names(index, *slot)));
            } else if old.place().is_some() && !self.leaf.now.names(index, *old) {
                freed.push(*old);
            }
        }
        self.map.table_bytes.fetch_sub(kept.bytes(), Ordering::Relaxed);
    }
}

/// Replaces a slot of a block by another one.
fn rename(leaf: &mut Leaf, index: usize, from: Location, to: Location) {
    let sectors = leaf.sectors(index);
    let Leaf::Table(table, partial) = leaf else { return };
    let Some(word) = table.get_mut(index) else { return };
    match (word.entry(), partial) {
        (Some(entry), Some(partial)) => {
            partial.set(entry, &sectors.map(|sector| if sector == from { to } else { sector }));
        }
        _ if *word == from => publish(word, to),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{SegmentId, Slot};

    #[test]
    fn a_leaf_has_a_table_only_while_it_needs_one() {
        let map = Map::new(4 << 18);
        assert!(map.read(3).is_none());
        let mut leaf = map.write(3).unwrap();
        leaf.set(5, Location::ABSENT);
        assert_eq!(map.table_bytes(), 0);
        leaf.set(5, Location::at(SegmentId(1), Slot(2)));
        assert_eq!(map.table_bytes(), TABLE_BYTES);
        assert_eq!(leaf.get(4), Location::ABSENT);
        for index in 0..SLOTS {
            leaf.set(index, Location::ZERO);
        }
        leaf.fold();
        assert_eq!(map.table_bytes(), 0);
        assert_eq!(leaf.get(511), Location::ZERO);
    }

    #[test]
    fn a_frozen_map_stays_as_it_was() {
        let at = |slot| Location::at(SegmentId(1), Slot(slot));
        let map = Map::new(4 << 18);
        map.write(3).unwrap().set(5, at(2));
        let freeze = map.freeze().unwrap();
        assert!(map.freeze().is_none(), "one at a time");
        {
            let mut leaf = map.relocate(3).unwrap();
            // The block moved before any change, so the frozen map finds it at its new location.
            leaf.set(5, at(7));
            assert!(!leaf.keeps(5, at(7)));
        }
        let mut leaf = map.write(3).unwrap();
        assert!(leaf.keeps(5, at(7)) && !leaf.keeps(5, at(2)));
        leaf.set(5, at(8));
        leaf.set(6, at(9));
        leaf.moved_kept(5, at(7), at(10));
        drop(leaf);
        map.write(900).unwrap().set(0, at(11));
        let seen = |leaf: usize, index: usize| map.read(leaf).unwrap().at(freeze).get(index);
        assert_eq!((seen(3, 5), seen(3, 6), seen(900, 0)), (at(10), Location::ABSENT, Location::ABSENT));
        assert_eq!(map.table_bytes(), 3 * TABLE_BYTES);
        let mut dead = Vec::new();
        map.thaw(|_, _, slots| dead.extend_from_slice(slots));
        assert_eq!((dead, map.table_bytes()), (vec![at(10)], 2 * TABLE_BYTES));
        assert_eq!(map.read(3).unwrap().get(5), at(8));
        assert!(map.freeze().is_some());
    }

    #[test]
    fn sectors_of_a_partial_block_are_in_several_slots_and_in_a_frozen_map() {
        let at = |slot| Location::at(SegmentId(1), Slot(slot));
        let mixed = |first: Location, rest: Location| -> Sectors {
            std::array::from_fn(|sector| if sector < 3 { first } else { rest })
        };
        let map = Map::new(4 << 18);
        let mut leaf = map.write(3).unwrap();
        assert!(leaf.set_sectors(5, &mixed(at(1), Location::ABSENT)));
        assert!(leaf.set_sectors(6, &mixed(at(2), at(1))));
        assert_eq!((map.partial_blocks(), map.partial_surplus()), (2, 1));
        assert_eq!((map.table_bytes(), map.partial_bytes()), (TABLE_BYTES, TABLE_BYTES));
        assert!(leaf.needs(5, at(1)) && leaf.needs(6, at(1)) && !leaf.needs(5, at(2)));
        leaf.moved(6, at(1), at(3));
        assert_eq!(leaf.sectors(6), mixed(at(2), at(3)));
        drop(leaf);
        let freeze = map.freeze().unwrap();
        let mut leaf = map.write(3).unwrap();
        assert!(leaf.set_sectors(6, &[at(9); SECTORS]));
        assert_eq!((leaf.get(6), map.partial_blocks()), (at(9), 1));
        assert!(leaf.keeps(6, at(2)) && leaf.keeps(6, at(3)) && !leaf.keeps(6, at(9)));
        leaf.moved_kept(6, at(3), at(4));
        assert!(leaf.set_sectors(5, &[Location::ZERO; SECTORS]));
        drop(leaf);
        assert_eq!((map.partial_blocks(), map.partial_bytes(), map.partial_surplus()), (0, 0, 0));
        assert_eq!(map.read(3).unwrap().at(freeze).sectors(6), mixed(at(2), at(4)));
        let mut dead = Vec::new();
        map.thaw(|_, leaf, slots| {
            assert_eq!(leaf, 3);
            dead.extend_from_slice(slots);
        });
        assert_eq!((dead, map.table_bytes()), (vec![at(1), at(2), at(4)], TABLE_BYTES));
    }

    #[test]
    fn a_leaf_past_the_end_is_refused() {
        let map = Map::new(512);
        assert!(map.write(0).is_some());
        assert!(map.write(512).is_none());
    }
}
