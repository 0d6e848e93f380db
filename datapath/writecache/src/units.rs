//! Numbers as types of their own, so that they are not mixed up: blocks, segments, slots, and locations of
//! blocks.

use headwater_block::BLOCK_BYTES;

use crate::sync::UNDER_MODEL_CHECKER;

/// Slots in a segment.
pub const SLOTS: usize = SLOT_COUNT as usize;

/// [`SLOTS`] as `u16`. Few under the model checker, so that a short test fills, packs, spills and cleans
/// segments.
pub const SLOT_COUNT: u16 = if UNDER_MODEL_CHECKER { 4 } else { 512 };

/// Bytes of a segment's slots in RAM: 2 MiB (16 KiB under the model checker).
pub const SEGMENT_BYTES: usize = SLOTS * BLOCK_BYTES as usize;

/// Sectors in a block.
pub const SECTORS: usize = 8;

/// Bytes of a sector, the least that a machine writes.
pub const SECTOR_BYTES: usize = BLOCK_BYTES as usize / SECTORS;

/// Number of a 4 KiB block of the volume. 32 bits cover 16 TiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockNumber(pub u32);

/// Number of a segment, 23 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SegmentId(pub u32);

impl SegmentId {
    /// One past the highest usable number: the locations of segment 2^23 - 1 would collide with the reserved
    /// locations.
    pub const LIMIT: u32 = if UNDER_MODEL_CHECKER { 1 << 6 } else { (1 << 23) - 1 };
}

/// The index of a slot in its segment, below [`SLOT_COUNT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot(pub u16);

/// The location of a block's newest contents, in the 4 bytes of a map entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Location(u32);

impl Location {
    /// The block was not changed: the image has it.
    pub const ABSENT: Self = Self(u32::MAX);
    /// The block reads as zeroes.
    pub const ZERO: Self = Self(u32::MAX - 1);

    /// Values from here on are not slots: [`SegmentId::LIMIT`] keeps them free.
    const FIRST_RESERVED: u32 = u32::MAX - 511;
    /// The most partial blocks of a leaf, the part of the map for 512 blocks.
    pub(crate) const MOST_PARTIAL: usize = 510;

    /// The sectors of the block are in several places, listed in this entry of the leaf's table of partial
    /// blocks.
    pub(crate) const fn partial(entry: u16) -> Self {
        Self(Self::FIRST_RESERVED + entry as u32)
    }

    /// The entry in the leaf's table of partial blocks, if the block is a partial block.
    #[inline]
    pub(crate) fn entry(self) -> Option<usize> {
        let is_entry = (Self::FIRST_RESERVED..Self::ZERO.0).contains(&self.0);
        is_entry.then_some((self.0.wrapping_sub(Self::FIRST_RESERVED)) as usize)
    }

    /// A slot of a segment.
    pub const fn at(segment: SegmentId, slot: Slot) -> Self {
        Self((segment.0 << 9) | (slot.0 as u32 & 511))
    }

    /// The four bytes of the location, as stored.
    pub(crate) const fn bits(self) -> u32 {
        self.0
    }

    /// The segment and slot, or `None` for the reserved values.
    pub fn place(self) -> Option<(SegmentId, Slot)> {
        if self.0 >= Self::FIRST_RESERVED {
            return None;
        }
        let slot = u16::try_from(self.0 & 511).unwrap_or(0);
        Some((SegmentId(self.0 >> 9), Slot(slot)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_keeps_segment_and_slot() {
        for (segment, slot) in [(0, 0), (0, 511), (77, 3), (SegmentId::LIMIT - 1, 511)] {
            let location = Location::at(SegmentId(segment), Slot(slot));
            assert_eq!(location.place(), Some((SegmentId(segment), Slot(slot))));
        }
        assert_eq!(Location::ABSENT.place(), None);
        assert_eq!(Location::ZERO.place(), None);
        for entry in [0, 1, Location::MOST_PARTIAL as u16 - 1] {
            let partial = Location::partial(entry);
            assert_eq!((partial.place(), partial.entry()), (None, Some(usize::from(entry))));
        }
        assert_eq!((Location::ZERO.entry(), Location::ABSENT.entry()), (None, None));
        assert_eq!(Location::at(SegmentId(SegmentId::LIMIT - 1), Slot(511)).entry(), None);
    }
}
