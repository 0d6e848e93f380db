//! Reopening: the committed records of a map are replayed into an empty cache, whose segments are all on
//! disk. What it costs is proportional to the map, not to the data.
//!
//! A segment gets the number of its position, so that no table from one to the other is needed.

use std::io::{self, Read, Seek};
use std::ops::ControlFlow;

use super::format::{self, HEADER_BYTES, NO_BLOCK, Record};
use super::scan::{Scan, Window};
use crate::map::{Map, split};
use crate::segment::{Segment, SegmentTable, State, Word};
use crate::units::{BlockNumber, Location, SLOTS, SegmentId, Slot};

/// What was recovered.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Positions that hold live slots, ascending: also the numbers of their segments.
    pub used: Vec<u32>,
    /// Live slots in them.
    pub blocks: u64,
    /// Slots that the map holds itself, live or not.
    pub encrypted: u64,
}

/// The record at this byte contradicts those before it, or the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contradiction(pub u64);

/// Replays the records that count. The outer error: they cannot be read.
pub fn replay<R: Read + Seek>(
    records: &mut Window<R>,
    scan: &Scan,
    map: &Map,
    segments: &SegmentTable,
) -> io::Result<Result<Recovered, Contradiction>> {
    let mut at = HEADER_BYTES as u64;
    let (mut numbers, mut encrypted) = (0, 0);
    while at < scan.end {
        let Some((_, record, next)) = records.record(at)? else { return Ok(Err(Contradiction(at))) };
        let applied = match record {
            Record::Extent { position, generation, first_slot, blocks } => {
                numbers = numbers.max(position.saturating_add(1));
                extent(map, segments, position, generation, first_slot, blocks)
            }
            Record::Sealed { position, generation, first_slot, blocks, .. } => {
                numbers = numbers.max(position.saturating_add(1));
                encrypted += blocks.len() as u64;
                extent(map, segments, position, generation, first_slot, blocks)
            }
            Record::Absent(ranges) => clear(map, segments, ranges, Location::ABSENT),
            Record::Zero(ranges) => clear(map, segments, ranges, Location::ZERO),
            Record::Commit { .. } => ControlFlow::Continue(()),
        };
        if applied.is_break() {
            return Ok(Err(Contradiction(at)));
        }
        at = next;
    }
    let mut recovered = Recovered { encrypted, ..Recovered::default() };
    for number in 0..numbers {
        let Some(segment) = segments.get(SegmentId(number)) else { continue };
        if segment.live() > 0 {
            recovered.used.push(number);
            recovered.blocks += u64::from(segment.live());
        } else {
            segment.set_word(Word::new(State::Free, 0));
            segment.set_position(None);
        }
    }
    Ok(Ok(recovered))
}

fn extent(
    map: &Map,
    segments: &SegmentTable,
    position: u32,
    generation: u64,
    first_slot: u16,
    blocks: format::Words<'_>,
) -> ControlFlow<()> {
    let id = SegmentId(position);
    let segment = if position < SegmentId::LIMIT { segments.get(id) } else { None };
    let Some(segment) = segment else { return ControlFlow::Break(()) };
    if segment.position().is_none() || segment.generation() != generation {
        // A position is used again only when nothing in it was live any more.
        if segment.live() > 0 {
            return ControlFlow::Break(());
        }
        segment.set_position(Some(position));
        segment.set_generation(generation);
        segment.set_word(Word::new(State::Spilled, 0));
    }
    for (slot, block) in (first_slot..).zip(blocks.iter()) {
        if block == NO_BLOCK {
            continue;
        }
        if u64::from(block) >= map.blocks() || segment.owner(Slot(slot)).is_some() {
            return ControlFlow::Break(());
        }
        segment.claim(Slot(slot), BlockNumber(block));
        let (leaf, index) = split(BlockNumber(block));
        let Some(mut leaf) = map.write(leaf) else { return ControlFlow::Break(()) };
        let old = leaf.get(index);
        leaf.set(index, Location::at(id, Slot(slot)));
        kill(segments, old);
    }
    ControlFlow::Continue(())
}

fn kill(segments: &SegmentTable, old: Location) {
    if let Some(segment) = old.place().and_then(|(id, slot)| Some((segments.get(id)?, slot))) {
        let (segment, slot): (&Segment, Slot) = segment;
        segment.kill(slot);
    }
}

fn clear(map: &Map, segments: &SegmentTable, ranges: format::Words<'_>, to: Location) -> ControlFlow<()> {
    for (first, count) in ranges.pairs() {
        let end = u64::from(first) + u64::from(count);
        if end > map.blocks() {
            return ControlFlow::Break(());
        }
        let mut block = first;
        let mut left = count;
        while left > 0 {
            let (leaf_number, start) = split(BlockNumber(block));
            let here = u32::try_from(SLOTS - start).unwrap_or(1).min(left);
            let Some(mut leaf) = map.write(leaf_number) else { return ControlFlow::Break(()) };
            for index in start..start + here as usize {
                let old = leaf.get(index);
                leaf.set(index, to);
                kill(segments, old);
            }
            leaf.fold();
            block += here;
            left -= here;
        }
    }
    ControlFlow::Continue(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::persist::format::Encoder;

    fn replayed(blocks: u64, fill: impl FnOnce(&mut Encoder)) -> Result<(Recovered, Map), Contradiction> {
        let mut encoder = Encoder::new(1);
        fill(&mut encoder);
        encoder.commit(1, 10);
        let (records, next_sequence) = encoder.finish();
        let mut bytes = vec![0; HEADER_BYTES];
        bytes.extend(records);
        let scan = Scan { end: bytes.len() as u64, next_sequence, epoch: 1, generation_limit: 10 };
        let map = Map::new(blocks);
        let segments = SegmentTable::new(SegmentId::LIMIT);
        let mut records = Window::new(std::io::Cursor::new(bytes)).unwrap();
        replay(&mut records, &scan, &map, &segments).unwrap().map(|recovered| (recovered, map))
    }

    fn at(map: &Map, block: u32) -> Location {
        let (leaf, index) = split(BlockNumber(block));
        map.read(leaf).map_or(Location::ABSENT, |leaf| leaf.get(index))
    }

    #[test]
    fn the_last_record_of_a_block_counts() {
        let (recovered, map) = replayed(5000, |encoder| {
            encoder.extent(2, 5, 0, &[7, 8, 9]);
            encoder.extent(4, 6, 3, &[8, NO_BLOCK, 4999]);
            encoder.ranges(true, &[(9, 1)]);
            encoder.ranges(false, &[(4000, 1000)]);
        })
        .unwrap();
        assert_eq!(recovered, Recovered { used: vec![2, 4], blocks: 2, encrypted: 0 });
        assert_eq!(at(&map, 7), Location::at(SegmentId(2), Slot(0)));
        assert_eq!(at(&map, 8), Location::at(SegmentId(4), Slot(3)));
        assert_eq!(at(&map, 9), Location::ZERO);
        assert_eq!(at(&map, 4999), Location::ABSENT);
    }

    #[test]
    fn a_position_is_used_again_once_it_is_empty() {
        let (recovered, map) = replayed(100, |encoder| {
            encoder.extent(0, 5, 0, &[1]);
            encoder.extent(1, 6, 0, &[1]);
            encoder.extent(0, 7, 0, &[2]);
        })
        .unwrap();
        assert_eq!(recovered.used, vec![0, 1]);
        assert_eq!(at(&map, 2), Location::at(SegmentId(0), Slot(0)));
    }

    #[test]
    fn records_that_cannot_be_true_are_refused() {
        assert!(replayed(100, |e| e.extent(0, 5, 0, &[100])).is_err());
        assert!(replayed(100, |e| e.extent(u32::MAX, 5, 0, &[1])).is_err());
        assert!(replayed(100, |e| e.ranges(true, &[(99, 2)])).is_err());
        assert!(replayed(100, |e| e.ranges(true, &[(u32::MAX, u32::MAX)])).is_err());
        let twice = |encoder: &mut Encoder| {
            encoder.extent(0, 5, 0, &[1]);
            encoder.extent(0, 5, 0, &[2]);
        };
        assert!(replayed(100, twice).is_err());
        let too_early = |encoder: &mut Encoder| {
            encoder.extent(0, 5, 0, &[1]);
            encoder.extent(0, 6, 1, &[2]);
        };
        assert!(replayed(100, too_early).is_err());
    }
}
