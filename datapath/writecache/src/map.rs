//! The map: for each block of the volume, where its newest contents are.
//!
//! Two levels: groups of 512 leaves (1 GiB of disk), made when first written to, and leaves of 512
//! locations (2 MiB of disk). A leaf that is all absent or all zero has no table.
//!
//! The leaf's lock guards more than its locations: **while it is held, the contents of the slots that the
//! leaf points to stay where they are.** Whoever wants to move a segment (freeze it for writing out, take
//! its RAM away) first changes the segment's state, then locks and unlocks each leaf that has blocks in it
//! ([`Map::sweep`]); after that nobody uses the old state any more. So the hit path needs no reference
//! count and no epoch, only the lock that it takes anyway.
//!
//! Lock order: leaf, then the log, then the overflow's positions, then the memory pool. Never two leaves.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use crate::units::{BlockNumber, Location, SLOTS};

const LEAVES_PER_GROUP: usize = SLOTS;

/// 512 locations.
type Table = [Location; SLOTS];

/// Bytes that a leaf's table takes.
pub const TABLE_BYTES: u64 = (SLOTS * size_of::<Location>()) as u64;

/// One leaf: 2 MiB of disk.
#[derive(Debug, Default)]
pub enum Leaf {
    /// No block was changed.
    #[default]
    Absent,
    /// Every block reads as zeroes.
    Zero,
    /// Anything else.
    Table(Box<Table>),
}

impl Leaf {
    /// Where the block with this index in the leaf is.
    #[inline]
    pub fn get(&self, index: usize) -> Location {
        match self {
            Leaf::Absent => Location::ABSENT,
            Leaf::Zero => Location::ZERO,
            Leaf::Table(table) => table.get(index).copied().unwrap_or(Location::ABSENT),
        }
    }

    fn uniform(&self) -> Option<Location> {
        match self {
            Leaf::Absent => Some(Location::ABSENT),
            Leaf::Zero => Some(Location::ZERO),
            Leaf::Table(_) => None,
        }
    }
}

type Group = Box<[RwLock<Leaf>]>;

/// The map of one volume.
pub struct Map {
    groups: Box<[OnceLock<Group>]>,
    blocks: u64,
    table_bytes: AtomicU64,
}

/// A leaf locked for reading: the contents of its blocks stay in place.
pub type LeafRead<'a> = RwLockReadGuard<'a, Leaf>;

/// A leaf locked for writing.
pub struct LeafWrite<'a> {
    leaf: RwLockWriteGuard<'a, Leaf>,
    map: &'a Map,
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
    /// An empty map for a volume of so many blocks.
    pub fn new(blocks: u64) -> Self {
        let leaves = blocks.div_ceil(SLOTS as u64);
        let groups = leaves.div_ceil(LEAVES_PER_GROUP as u64);
        let groups = (0..groups).map(|_| OnceLock::new()).collect();
        Self { groups, blocks, table_bytes: AtomicU64::new(0) }
    }

    /// Blocks of the volume.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Bytes of leaf tables in use, for the budget.
    pub fn table_bytes(&self) -> u64 {
        self.table_bytes.load(Ordering::Relaxed)
    }

    /// Locks a leaf for reading. `None`: nothing in its whole group was ever changed.
    #[inline]
    pub fn read(&self, leaf: usize) -> Option<LeafRead<'_>> {
        let group = self.groups.get(leaf / LEAVES_PER_GROUP)?.get()?;
        Some(group.get(leaf % LEAVES_PER_GROUP)?.read())
    }

    /// Locks a leaf for writing. `None` only for a leaf past the end of the volume.
    #[inline]
    pub fn write(&self, leaf: usize) -> Option<LeafWrite<'_>> {
        let group = self.groups.get(leaf / LEAVES_PER_GROUP)?;
        let group = group.get_or_init(|| (0..LEAVES_PER_GROUP).map(|_| RwLock::default()).collect());
        Some(LeafWrite { leaf: group.get(leaf % LEAVES_PER_GROUP)?.write(), map: self })
    }

    /// Whether nothing in this leaf's group was ever changed, so that a discard can skip it.
    pub fn group_is_untouched(&self, leaf: usize) -> bool {
        self.groups.get(leaf / LEAVES_PER_GROUP).is_none_or(|g| g.get().is_none())
    }

    /// The ranges of blocks (first, count) that read as zeroes, ascending. For a checkpoint, while nobody
    /// changes the map.
    pub fn zero_ranges(&self) -> Vec<(u32, u32)> {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        let mut push = |first: usize, count: usize| {
            let (Ok(first), Ok(count)) = (u32::try_from(first), u32::try_from(count)) else { return };
            match ranges.last_mut() {
                Some((start, len)) if *start + *len == first => *len += count,
                _ => ranges.push((first, count)),
            }
        };
        for (number, group) in self.groups.iter().enumerate() {
            let Some(group) = group.get() else { continue };
            for (index, leaf) in group.iter().enumerate() {
                let first = (number * LEAVES_PER_GROUP + index) * SLOTS;
                match &*leaf.read() {
                    Leaf::Absent => {}
                    // The last leaf may be longer than the volume.
                    Leaf::Zero => {
                        let end = usize::try_from(self.blocks).unwrap_or(usize::MAX);
                        push(first, SLOTS.min(end.saturating_sub(first)));
                    }
                    Leaf::Table(table) => {
                        let zero = table.iter().enumerate().filter(|(_, l)| **l == Location::ZERO);
                        zero.for_each(|(index, _)| push(first + index, 1));
                    }
                }
            }
        }
        ranges
    }

    /// Waits until everybody who locked the leaf of one of these blocks before this call has unlocked it.
    pub fn sweep(&self, blocks: impl Iterator<Item = BlockNumber>) {
        let mut last = usize::MAX;
        for block in blocks {
            let (leaf, _) = split(block);
            if leaf != last {
                drop(self.write(leaf));
                last = leaf;
            }
        }
    }
}

impl LeafWrite<'_> {
    /// Where the block is.
    #[inline]
    pub fn get(&self, index: usize) -> Location {
        self.leaf.get(index)
    }

    /// Sets where the block is. The old slot, if there was one, is the caller's to give back.
    #[inline]
    pub fn set(&mut self, index: usize, location: Location) {
        if let Leaf::Table(table) = &mut *self.leaf {
            if let Some(entry) = table.get_mut(index) {
                *entry = location;
            }
            return;
        }
        let Some(fill) = self.leaf.uniform() else { return };
        if fill == location {
            return;
        }
        let mut table = Box::new([fill; SLOTS]);
        if let Some(entry) = table.get_mut(index) {
            *entry = location;
        }
        *self.leaf = Leaf::Table(table);
        self.map.table_bytes.fetch_add(TABLE_BYTES, Ordering::Relaxed);
    }

    /// Drops the table where every block is zero, or every block absent. Called after discards.
    pub fn fold(&mut self) {
        let Leaf::Table(table) = &*self.leaf else { return };
        let Some(first) = table.first().copied() else { return };
        if first.place().is_some() || table.iter().any(|entry| *entry != first) {
            return;
        }
        *self.leaf = if first == Location::ZERO { Leaf::Zero } else { Leaf::Absent };
        self.map.table_bytes.fetch_sub(TABLE_BYTES, Ordering::Relaxed);
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
    fn a_leaf_past_the_end_is_refused() {
        let map = Map::new(512);
        assert!(map.write(0).is_some());
        assert!(map.write(512).is_none());
    }
}
