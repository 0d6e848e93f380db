//! The partial blocks of a leaf: blocks whose sectors are in several places.
//!
//! A write of a part of a block takes a slot for that part alone and reads nothing. From then on the block's
//! word in the map is [`Location::partial`], and this table has the place of each of its sectors: a slot,
//! zero, or absent. A sector has the same offset in each slot as in its block, so a block has at most eight
//! slots, and the end of a block and the beginning of the next one fit into one slot: a *shared slot*.
//!
//! Whole blocks pay nothing for this: a leaf without partial blocks has no table.
//!
//! | slots | owner in the segment's record | overwritten in place |
//! |---|---|---|
//! | with sectors of one block | that block | any sector |
//! | shared by a block and the next one of the same leaf | the first of the two that has sectors there | sectors that the writer's block has there |

use std::collections::BTreeSet;

use crate::index_memory::{Piece, publish};
use crate::map::{LeafWrite, split};
use crate::segment::Segment;
use crate::units::{BlockNumber, Location, SECTORS, SLOTS};

/// The place of each sector of a block: slots, [`Location::ZERO`] or [`Location::ABSENT`].
pub type Sectors = [Location; SECTORS];

/// Bytes of index memory that the table grows by.
pub const PARTIAL_BYTES: u64 = (SLOTS * size_of::<Location>()) as u64;

/// Words of the bit set of entries in use.
const WORDS: usize = Location::MOST_PARTIAL.div_ceil(64);

/// The table of a leaf.
#[derive(Clone, Debug, Default)]
pub struct PartialTable {
    used: [u64; WORDS],
    /// The sectors of all entries, one entry after the other.
    pieces: Vec<Piece<Location>>,
}

/// The distinct slots among these sectors.
pub fn slots(sectors: &Sectors) -> impl Iterator<Item = Location> + '_ {
    let is_first = |at: usize, slot: &Location| !sectors.iter().take(at).any(|before| before == slot);
    sectors
        .iter()
        .enumerate()
        .filter(move |(at, slot)| slot.place().is_some() && is_first(*at, slot))
        .map(|(_, slot)| *slot)
}

/// Whether a slot is dead after a block of this leaf has left it. It is not while the leaf needs it: for the
/// block that shares it, which becomes its owner, or for a frozen view.
pub fn is_left(segment: &Segment, leaf: &LeafWrite<'_>, number: usize, at: Location) -> bool {
    let Some((_, slot)) = at.place() else { return false };
    // The slot may have been freed already, and belong to another leaf.
    let Some(owner) = segment.owner(slot) else { return false };
    let (of, index) = split(owner);
    if of != number || leaf.needs(index, at) {
        return false;
    }
    let is_shared = index + 1 < SLOTS && leaf.needs(index + 1, at);
    if is_shared {
        segment.set_owner(slot, BlockNumber(owner.0.saturating_add(1)));
    }
    !is_shared
}

impl PartialTable {
    /// Index memory of the table, in bytes.
    pub fn bytes(&self) -> u64 {
        self.pieces.len() as u64 * PARTIAL_BYTES
    }

    /// Number of free entries.
    pub fn free_entries(&self) -> usize {
        let used: u32 = self.used.iter().map(|bits| bits.count_ones()).sum();
        Location::MOST_PARTIAL.saturating_sub(used as usize)
    }

    fn free_entry(&self) -> Option<usize> {
        let (word, bits) = self.used.iter().enumerate().find(|(_, bits)| **bits != u64::MAX)?;
        let entry = word * 64 + bits.trailing_ones() as usize;
        (entry < Location::MOST_PARTIAL).then_some(entry)
    }

    /// The sectors of an entry.
    pub fn get(&self, entry: usize) -> Sectors {
        let mut sectors = [Location::ABSENT; SECTORS];
        for (sector, at) in sectors.iter_mut().zip(entry * SECTORS..) {
            let found = self.pieces.get(at / SLOTS).and_then(|piece| piece.get(at % SLOTS));
            *sector = found.copied().unwrap_or(Location::ABSENT);
        }
        sectors
    }

    /// Changes the sectors of an entry.
    pub fn set(&mut self, entry: usize, sectors: &Sectors) {
        for (sector, at) in sectors.iter().zip(entry * SECTORS..) {
            if let Some(place) = self.pieces.get_mut(at / SLOTS).and_then(|piece| piece.get_mut(at % SLOTS)) {
                publish(place, *sector);
            }
        }
    }

    /// A table with these pieces and these entries in use. `None`: a piece is missing.
    pub(crate) fn adopt(pieces: Vec<Piece<Location>>, entries: &BTreeSet<usize>) -> Option<Self> {
        let mut table = Self { pieces, ..Self::default() };
        entries.iter().for_each(|entry| table.mark(*entry, true));
        (!table.pieces.is_empty()).then_some(table)
    }

    fn mark(&mut self, entry: usize, is_used: bool) {
        let bit = 1 << (entry % 64);
        if let Some(bits) = self.used.get_mut(entry / 64) {
            *bits = if is_used { *bits | bit } else { *bits & !bit };
        }
    }

    /// The index of the piece that a new entry needs, if it is missing.
    pub fn missing_piece(&self) -> Option<usize> {
        let entry = self.free_entry()?;
        (self.pieces.len() * SLOTS < (entry + 1) * SECTORS).then_some(self.pieces.len())
    }

    /// Adds a piece whose sectors are all absent.
    pub fn push(&mut self, piece: Piece<Location>) {
        self.pieces.push(piece);
    }

    /// Adds an entry. `None`: the table is full, or a piece is missing ([`PartialTable::missing_piece`]).
    pub fn add(&mut self, sectors: &Sectors) -> Option<u16> {
        let entry = self.free_entry().filter(|_| self.missing_piece().is_none())?;
        self.mark(entry, true);
        self.set(entry, sectors);
        u16::try_from(entry).ok()
    }

    /// Frees an entry.
    pub fn remove(&mut self, entry: usize) {
        self.mark(entry, false);
    }

    /// Number of pieces.
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Number of pieces up to the last one that has entries in use.
    pub fn needed_pieces(&self) -> usize {
        let is_used =
            |entry: &usize| self.used.get(entry / 64).is_some_and(|bits| bits >> (entry % 64) & 1 == 1);
        let end = (0..Location::MOST_PARTIAL).rev().find(is_used).map_or(0, |last| (last + 1) * SECTORS);
        end.div_ceil(SLOTS)
    }

    /// Frees the pieces from this index on.
    pub fn truncate(&mut self, pieces: usize) {
        self.pieces.truncate(pieces);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{SegmentId, Slot};

    fn sectors(first: u16) -> Sectors {
        std::array::from_fn(|sector| Location::at(SegmentId(1), Slot(first + sector as u16 / 3)))
    }

    fn add(table: &mut PartialTable, sectors: &Sectors) -> Option<u16> {
        while table.missing_piece().is_some() {
            table.push(Piece::new(|| Location::ABSENT));
        }
        table.add(sectors)
    }

    fn remove(table: &mut PartialTable, entry: usize) {
        table.remove(entry);
        table.truncate(table.needed_pieces());
    }

    #[test]
    fn entries_keep_their_sectors_and_their_memory_comes_back() {
        let mut table = PartialTable::default();
        let all: Vec<u16> = (0..).map_while(|first| add(&mut table, &sectors(first % 500))).collect();
        assert_eq!(all.len(), Location::MOST_PARTIAL);
        assert_eq!(table.free_entries(), 0);
        for entry in &all {
            assert_eq!(table.get(usize::from(*entry)), sectors(*entry % 500), "entry {entry}");
        }
        let bytes = table.bytes();
        assert_eq!(bytes, (all.len() * size_of::<Sectors>()).next_multiple_of(2048) as u64);
        remove(&mut table, 3);
        assert_eq!((table.bytes(), add(&mut table, &sectors(7))), (bytes, Some(3)));
        all.iter().skip(64).for_each(|entry| remove(&mut table, usize::from(*entry)));
        assert_eq!(table.bytes(), 2048);
        assert_eq!(table.get(63), sectors(63));
        all.iter().take(64).for_each(|entry| remove(&mut table, usize::from(*entry)));
        assert!(table.used == [0; WORDS] && table.bytes() == 0);
    }

    #[test]
    fn a_slot_is_listed_once() {
        let mut some = sectors(4);
        some[0] = Location::ZERO;
        some[5] = Location::at(SegmentId(1), Slot(4));
        some[7] = Location::ABSENT;
        let at = |slot| Location::at(SegmentId(1), Slot(slot));
        assert_eq!(slots(&some).collect::<Vec<_>>(), [at(4), at(5), at(6)]);
    }
}
