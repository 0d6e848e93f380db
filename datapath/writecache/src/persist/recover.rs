//! Opens an existing cache: replays the committed records of its map into an empty cache, whose segments are
//! all on disk. The cost is proportional to the map, not to the data.
//!
//! A segment gets the number of its position, so that no table from one to the other is needed.

use std::io::{self, Read, Seek};
use std::ops::ControlFlow;

use super::format::{self, HEADER_BYTES, NO_BLOCK, Part, Record};
use super::scan::{Scan, Window};
use crate::map::{LeafWrite, Map, split};
use crate::partial::{Sectors, is_left, slots};
use crate::segment::{Segment, SegmentTable, State, Word};
use crate::units::{BlockNumber, Location, SECTORS, SLOTS, SegmentId, Slot};

/// The recovered segments.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Positions with live slots, ascending; they are also the numbers of their segments.
    pub used: Vec<u32>,
    /// Number of live slots in them.
    pub blocks: u64,
    /// Number of slots that the map itself contains, live or not.
    pub encrypted: u64,
}

/// The record at this offset contradicts earlier ones, or the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contradiction(pub u64);

/// Replays the valid records. The outer error: they cannot be read.
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
            Record::Encrypted { position, generation, first_slot, blocks, .. } => {
                numbers = numbers.max(position.saturating_add(1));
                encrypted += blocks.len() as u64;
                extent(map, segments, position, generation, first_slot, blocks)
            }
            Record::Parts(parts) => {
                let positions = parts.iter().filter_map(|part| Some(part.slot?.0));
                numbers = positions.fold(numbers, |most, position| most.max(position.saturating_add(1)));
                self::parts(map, segments, parts)
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
    let Some(segment) = begun(segments, position, generation) else { return ControlFlow::Break(()) };
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
        put(segments, &mut leaf, (index, block), Location::at(SegmentId(position), Slot(slot)))?;
    }
    ControlFlow::Continue(())
}

/// The segment of a position whose slots have this generation. `None`: the generation contradicts earlier
/// records.
fn begun(segments: &SegmentTable, position: u32, generation: u64) -> Option<&Segment> {
    let segment = if position < SegmentId::LIMIT { segments.get(SegmentId(position)) } else { None }?;
    if segment.position().is_none() || segment.generation() != generation {
        // A position is used again only when all its slots are dead.
        if segment.live() > 0 {
            return None;
        }
        segment.set_position(Some(position));
        segment.set_generation(generation);
        segment.set_word(Word::new(State::Spilled, 0));
    }
    Some(segment)
}

fn parts(map: &Map, segments: &SegmentTable, parts: format::Parts<'_>) -> ControlFlow<()> {
    for Part { block, sectors, slot } in parts.iter() {
        let (number, index) = split(BlockNumber(block));
        let leaf = if u64::from(block) < map.blocks() { map.write(number) } else { None };
        let Some(mut leaf) = leaf else { return ControlFlow::Break(()) };
        let to = match slot {
            None => Location::ZERO,
            Some((position, generation, slot)) => {
                let Some(segment) = begun(segments, position, generation) else {
                    return ControlFlow::Break(());
                };
                match segment.owner(Slot(slot)) {
                    None => segment.claim(Slot(slot), BlockNumber(block)),
                    Some(owner) if owner.0 == block => {}
                    Some(owner) if is_shared(&leaf, owner, block) => {}
                    Some(_) => return ControlFlow::Break(()),
                }
                Location::at(SegmentId(position), Slot(slot))
            }
        };
        let mut all = leaf.sectors(index);
        let named = (0..).zip(&mut all).filter(|(sector, _)| sectors >> sector & 1 == 1);
        named.for_each(|(_, place)| *place = to);
        put_sectors(segments, &mut leaf, (index, block), &all)?;
        // A whole block shares its slot neither with the block before it, which would own a shared slot, nor
        // with the next one.
        if let Some((id, slot)) = to.place()
            && leaf.get(index) == to
        {
            let owner = segments.get(id).and_then(|segment| segment.owner(slot));
            let is_shared = index + 1 < SLOTS && leaf.names(index + 1, to);
            if owner != Some(BlockNumber(block)) || is_shared {
                return ControlFlow::Break(());
            }
        }
    }
    ControlFlow::Continue(())
}

/// Whether a block may have sectors in a slot of this owner: only if the owner is the block before it in the
/// same leaf, and a partial block, too.
fn is_shared(leaf: &LeafWrite<'_>, owner: BlockNumber, block: u32) -> bool {
    let ((owners_leaf, index), (leaf_number, _)) = (split(owner), split(BlockNumber(block)));
    let is_next = owner.0.checked_add(1) == Some(block) && owners_leaf == leaf_number;
    is_next && leaf.get(index).entry().is_some()
}

/// Moves a whole block, and frees the slots that it leaves.
fn put(
    segments: &SegmentTable,
    leaf: &mut LeafWrite<'_>,
    (index, block): (usize, u32),
    to: Location,
) -> ControlFlow<()> {
    let old = leaf.get(index);
    if old.entry().is_some() {
        return put_sectors(segments, leaf, (index, block), &[to; SECTORS]);
    }
    leaf.set(index, to);
    if let Some((segment, slot)) = old.place().and_then(|(id, slot)| Some((segments.get(id)?, slot))) {
        segment.kill(slot);
    }
    ControlFlow::Continue(())
}

/// Moves sectors of a block, and frees the slots that it leaves.
fn put_sectors(
    segments: &SegmentTable,
    leaf: &mut LeafWrite<'_>,
    (index, block): (usize, u32),
    to: &Sectors,
) -> ControlFlow<()> {
    let (number, _) = split(BlockNumber(block));
    let before = leaf.sectors(index);
    if !leaf.set_sectors(index, to) {
        return ControlFlow::Break(());
    }
    for old in slots(&before).filter(|old| !to.contains(old)) {
        let place = old.place().and_then(|(id, slot)| Some((segments.get(id)?, slot)));
        if let Some((segment, slot)) = place
            && is_left(segment, leaf, number, old)
        {
            segment.kill(slot);
        }
    }
    ControlFlow::Continue(())
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
            for (index, block) in (start..SLOTS).zip(block..).take(here as usize) {
                put(segments, &mut leaf, (index, block), to)?;
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
    fn sectors_are_where_the_last_record_of_each_puts_them() {
        let part = |block, sectors, slot| Part { block, sectors, slot: Some((3, 5, slot)) };
        let (recovered, map) = replayed(5000, |encoder| {
            encoder.extent(2, 4, 0, &[7, 8]);
            // The end of one block and the beginning of the next one, in one slot.
            encoder.parts(&[part(7, 0xe0, 0), part(8, 0x1f, 0), part(20, 0x01, 1)]);
            encoder.parts(&[Part { block: 20, sectors: 0x03, slot: None }, part(8, 0x01, 2)]);
            // The first block leaves the slot, which then belongs to the second.
            encoder.ranges(true, &[(7, 1)]);
            encoder.parts(&[part(30, 0x0f, 4), part(31, 0x0f, 5), part(31, 0xf0, 5)]);
            encoder.extent(6, 7, 1, &[30]);
        })
        .unwrap();
        let at = |position, slot| Location::at(SegmentId(position), Slot(slot));
        let (base, shared) = (at(2, 1), at(3, 0));
        let sectors = |block| {
            let (leaf, index) = split(BlockNumber(block));
            map.read(leaf).unwrap().now().sectors(index)
        };
        assert_eq!(sectors(7), [Location::ZERO; SECTORS]);
        assert_eq!(sectors(8), [at(3, 2), shared, shared, shared, shared, base, base, base]);
        let absent = [Location::ABSENT; SECTORS];
        let zero = Location::ZERO;
        assert_eq!(sectors(20)[..2], [zero; 2]);
        assert_eq!(sectors(20)[2..], absent[2..]);
        assert_eq!((sectors(30), sectors(31)), ([at(6, 1); SECTORS], [at(3, 5); SECTORS]));
        // Position 2 has the slot of block 8; 3 has the shared slot and the slots of blocks 8 and 31; 6 has
        // that of block 30.
        assert_eq!(recovered, Recovered { used: vec![2, 3, 6], blocks: 5, encrypted: 0 });
        assert_eq!((map.partial_blocks(), map.partial_slots()), (2, 3));
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
        let part = |block, sectors, slot| Part { block, sectors, slot: Some((0, 5, slot)) };
        assert!(replayed(100, |e| e.parts(&[part(100, 1, 0)])).is_err());
        assert!(
            replayed(100, |e| e.parts(&[Part { block: 1, sectors: 1, slot: Some((u32::MAX, 5, 0)) }]))
                .is_err()
        );
        // Blocks that are not consecutive, or in reverse order; and the first block whole, before or after.
        for pair in [[7, 9], [8, 7]] {
            assert!(replayed(100, |e| e.parts(&pair.map(|block| part(block, 1, 0)))).is_err());
        }
        let whole_before = |encoder: &mut Encoder| {
            encoder.extent(0, 5, 0, &[7]);
            encoder.parts(&[part(8, 1, 0)]);
        };
        assert!(replayed(100, whole_before).is_err());
        assert!(replayed(100, |e| e.parts(&[part(7, 1, 0), part(8, 1, 0), part(7, 0xfe, 0)])).is_err());
        // The second block is whole.
        assert!(replayed(100, |e| e.parts(&[part(7, 1, 0), part(8, 0xff, 0)])).is_err());
        assert!(replayed(100, |e| e.parts(&[part(7, 1, 0), part(8, 0xfe, 0), part(8, 1, 0)])).is_err());
        // Blocks of two leaves.
        assert!(replayed(1000, |e| e.parts(&[part(511, 1, 0), part(512, 1, 0)])).is_err());
    }
}
