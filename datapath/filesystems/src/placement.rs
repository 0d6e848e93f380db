//! The places of the bytes of a file system on a disk: one piece in a partition, several in a logical volume.

use std::ops::Range;
use std::sync::Arc;

use headwater_block::IoError;

use crate::bytes::read_any;
use crate::units::{u64_of, usize_of};
use crate::{Partition, ReadAt};

/// Bytes that follow one another in a file system and on its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    /// In the file system.
    start: u64,
    /// On the disk.
    at: u64,
    len: u64,
}

/// The places of the bytes of a file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// From the first byte on, without gaps.
    pieces: Vec<Piece>,
}

impl Placement {
    /// All of a partition.
    pub fn of(partition: &Partition) -> Self {
        let mut placement = Self::default();
        placement.add(partition.offset_bytes, partition.len_bytes);
        placement
    }

    /// Adds bytes of the disk at the end.
    pub fn add(&mut self, at: u64, len: u64) {
        let start = self.len_bytes();
        match self.pieces.last_mut() {
            Some(last) if last.at.checked_add(last.len) == Some(at) => {
                last.len = last.len.saturating_add(len)
            }
            _ => self.pieces.push(Piece { start, at, len }),
        }
    }

    /// How many bytes there are.
    pub fn len_bytes(&self) -> u64 {
        self.pieces.last().map_or(0, |last| last.start.saturating_add(last.len))
    }

    /// The places of a range on the disk, as far as it is within the file system.
    pub fn on_disk(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let first = self.pieces.partition_point(|piece| piece.start.saturating_add(piece.len) <= range.start);
        let rest = self.pieces.get(first..).unwrap_or_default();
        let end = range.end;
        rest.iter().take_while(move |piece| piece.start < end).map(move |piece| {
            let from = range.start.max(piece.start) - piece.start;
            let to = end.min(piece.start.saturating_add(piece.len)) - piece.start;
            piece.at.saturating_add(from)..piece.at.saturating_add(to.max(from))
        })
    }
}

/// The bytes of a file system that lies in pieces, as a disk of its own.
pub struct Placed {
    disk: Arc<dyn ReadAt>,
    placement: Placement,
}

impl Placed {
    /// These places of a disk.
    pub fn new(disk: Arc<dyn ReadAt>, placement: Placement) -> Self {
        Self { disk, placement }
    }
}

impl ReadAt for Placed {
    fn len_bytes(&self) -> u64 {
        self.placement.len_bytes()
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<(), IoError> {
        let (end, mut rest) = (at.saturating_add(u64_of(into.len())), into);
        for place in self.placement.on_disk(at..end) {
            let taken = std::mem::take(&mut rest);
            let len = usize_of(place.end - place.start).min(taken.len());
            let (piece, after) = taken.split_at_mut(len);
            read_any(&*self.disk, place.start, piece)?;
            rest = after;
        }
        if rest.is_empty() {
            return Ok(());
        }
        Err(IoError::new(headwater_block::IoErrorKind::Invalid, "a read past the end of a volume"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_where_its_pieces_are() {
        let mut placement = Placement::default();
        for (at, len) in [(100, 10), (110, 10), (50, 10), (200, 5)] {
            placement.add(at, len);
        }
        assert_eq!(placement.len_bytes(), 35);
        // A table of all bytes, made by hand.
        let bytes: Vec<u64> = (100..120).chain(50..60).chain(200..205).collect();
        for start in 0..40 {
            for end in start..40 {
                let found: Vec<u64> = placement.on_disk(start..end).flatten().collect();
                let expected = &bytes[35.min(start as usize)..35.min(end as usize)];
                assert_eq!(found, expected, "{start}..{end}");
            }
        }
    }
}
