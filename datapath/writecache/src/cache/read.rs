//! Reads, and queries about blocks.

use super::{BLOCK, Found, Kind, ReadTally, Residence, Ticket, WriteCache};
use crate::counters::Hot;
use crate::map::{Leaf, LeafRead, LeafState, split};
use crate::memory::copy_out;
use crate::partial::Sectors;
use crate::segment::NOWHERE;
use crate::units::{BlockNumber, Location, SECTOR_BYTES, SLOTS, SegmentId, Slot};

/// Called with each place that a part of a read comes from: the part's first byte and length within the read,
/// and the result for it.
pub type EachPart<'a> = &'a mut dyn FnMut(usize, usize, Found);

impl WriteCache {
    /// Copies `into.len()` bytes of a block, from its byte `skip` on. The caller counts the result.
    #[inline]
    pub fn read(&self, block: BlockNumber, skip: usize, into: &mut [u8]) -> Found {
        let (leaf, index) = split(block);
        let Some(leaf) = self.map.read(leaf) else { return Found::Absent };
        let location = leaf.get(index);
        let Some((id, slot)) = location.place() else {
            return without_slot(location, into);
        };
        let Some(segment) = self.segments.get(id) else { return Found::Absent };
        let word = segment.word();
        if let Some(address) = word.ram() {
            segment.touch();
            copy_out(address, slot, skip, into, &leaf);
            return Found::Done(Residence::Ram);
        }
        let mut whole = [0u8; BLOCK];
        if word.is_packed() && self.unpack(id, slot, &mut whole) {
            let Some(part) = whole.get(skip..skip.saturating_add(into.len())) else { return Found::Absent };
            into.copy_from_slice(part);
            return Found::Done(Residence::Packed);
        }
        Found::Spilled(self.ticket(block, id, slot))
    }

    /// Like [`WriteCache::read`], for a partial block: copies the parts in RAM, and calls `each` for each
    /// place, in order. All of it is looked up at one moment.
    pub fn read_parts(&self, block: BlockNumber, skip: usize, into: &mut [u8], each: EachPart<'_>) {
        let (leaf, index) = split(block);
        let Some(leaf) = self.map.read(leaf) else { return each(0, into.len(), Found::Absent) };
        let sectors = leaf.now().sectors(index);
        self.read_sectors((block, &leaf), &sectors, (skip, into), each);
    }

    /// Like [`WriteCache::read_parts`], for known sectors of a block whose leaf is locked.
    pub(super) fn read_sectors(
        &self,
        (block, leaf): (BlockNumber, &LeafRead<'_>),
        sectors: &Sectors,
        (skip, into): (usize, &mut [u8]),
        each: EachPart<'_>,
    ) {
        let mut at = 0;
        while at < into.len() {
            let first = (skip + at) / SECTOR_BYTES;
            let Some(place) = sectors.get(first) else { return };
            let count = sectors.iter().skip(first).take_while(|sector| *sector == place).count();
            let end = ((first + count) * SECTOR_BYTES - skip).min(into.len());
            let Some(part) = into.get_mut(at..end) else { return };
            let found = self.read_from(block, *place, (skip + at, part), leaf);
            each(at, end - at, found);
            at = end;
        }
    }

    /// Copies a part of a block from its place.
    fn read_from(
        &self,
        block: BlockNumber,
        place: Location,
        (skip, into): (usize, &mut [u8]),
        leaf: &LeafRead<'_>,
    ) -> Found {
        let Some((id, slot)) = place.place() else { return without_slot(place, into) };
        let Some(segment) = self.segments.get(id) else { return Found::Absent };
        let word = segment.word();
        if let Some(address) = word.ram() {
            segment.touch();
            copy_out(address, slot, skip, into, leaf);
            return Found::Done(Residence::Ram);
        }
        let mut whole = [0u8; BLOCK];
        if word.is_packed()
            && self.unpack(id, slot, &mut whole)
            && let Some(part) = whole.get(skip..skip.saturating_add(into.len()))
        {
            into.copy_from_slice(part);
            return Found::Done(Residence::Packed);
        }
        Found::Spilled(self.ticket(block, id, slot))
    }

    /// Counts the blocks that a machine's request read.
    #[inline]
    pub fn count_reads(&self, tally: ReadTally) {
        for (which, blocks) in
            [(Hot::ReadRam, tally.ram), (Hot::ReadZero, tally.zero), (Hot::ReadPacked, tally.packed)]
        {
            if blocks > 0 {
                self.counters.hot(which, blocks);
            }
        }
    }

    /// The place of a block at this moment, for statistics: it may move at any time.
    pub fn residence(&self, block: BlockNumber) -> Residence {
        let (leaf, index) = split(block);
        let Some(leaf) = self.map.read(leaf) else { return Residence::Absent };
        let location = leaf.get(index);
        // For a partial block, the place of its first sector.
        let location =
            location.entry().and_then(|_| leaf.now().sectors(index).first().copied()).unwrap_or(location);
        self.residence_at(location)
    }

    /// The place of a block of a leaf. For a partial block, the place of its first sector that has a slot.
    pub(super) fn residence_of_slot(&self, leaf: &Leaf, index: usize) -> Residence {
        let location = leaf.get(index);
        let slot = match location.entry() {
            Some(_) => leaf.sectors(index).into_iter().find(|sector| sector.place().is_some()),
            None => Some(location),
        };
        slot.map_or(Residence::Zero, |slot| self.residence_at(slot))
    }

    fn residence_at(&self, location: Location) -> Residence {
        let Some((id, _)) = location.place() else {
            return if location == Location::ABSENT { Residence::Absent } else { Residence::Zero };
        };
        match self.segments.get(id).map(|segment| segment.word()) {
            Some(word) if word.ram().is_some() => Residence::Ram,
            Some(word) if word.is_packed() => Residence::Packed,
            Some(_) => Residence::Disk,
            None => Residence::Absent,
        }
    }

    pub(crate) fn unpack(&self, id: SegmentId, slot: Slot, into: &mut [u8; BLOCK]) -> bool {
        self.packed.get(id).is_some_and(|packed| packed.unpack(slot, into))
    }

    pub(super) fn ticket(&self, block: BlockNumber, id: SegmentId, slot: Slot) -> Ticket {
        let segment = self.segments.get(id);
        Ticket {
            block,
            id,
            slot,
            position: segment.and_then(|s| s.position()).unwrap_or(NOWHERE),
            generation: segment.map_or(0, |s| s.generation()),
        }
    }

    /// Whether the slot is still where the ticket says.
    pub(crate) fn holds(&self, ticket: &Ticket, location: Location) -> bool {
        location == Location::at(ticket.id, ticket.slot)
            && self
                .segments
                .get(ticket.id)
                .is_some_and(|s| s.position() == Some(ticket.position) && s.generation() == ticket.generation)
    }

    /// Whether the block, or a sector of it, is still where the ticket says, or a frozen view needs it there.
    pub fn is_current(&self, ticket: &Ticket) -> bool {
        let (leaf, index) = split(ticket.block);
        let named = Location::at(ticket.id, ticket.slot);
        self.map.read(leaf).is_some_and(|leaf| leaf.needs(index, named) && self.holds(ticket, named))
    }

    /// The kind of the block `first`, and how many blocks from there, below `end`, are of the same kind.
    pub fn run_at(&self, first: BlockNumber, end: BlockNumber) -> (Kind, u32) {
        self.run_of(first, end, |leaf| leaf.now())
    }

    /// Like [`WriteCache::run_at`], for the state of each leaf that `side` selects.
    pub(super) fn run_of(
        &self,
        first: BlockNumber,
        end: BlockNumber,
        side: impl Fn(&LeafState) -> &Leaf,
    ) -> (Kind, u32) {
        let mut block = first.0;
        let mut found = None;
        while block < end.0 {
            let (leaf_number, start) = split(BlockNumber(block));
            let rest = u32::try_from(SLOTS - start).unwrap_or(1).min(end.0 - block);
            let leaf = self.map.read(leaf_number);
            let leaf = leaf.as_deref().map(&side);
            let of = |index: usize| Kind::of(leaf.map_or(Location::ABSENT, |l| l.get(index)));
            let kind = *found.get_or_insert_with(|| of(start));
            let same = match leaf {
                Some(Leaf::Table(..)) => {
                    (start..start + rest as usize).take_while(|index| of(*index) == kind).count()
                }
                _ if of(start) == kind => rest as usize,
                _ => 0,
            };
            let same = u32::try_from(same).unwrap_or(rest);
            block += same;
            if same < rest {
                break;
            }
        }
        (found.unwrap_or(Kind::Absent), block - first.0)
    }
}

/// The result for a block without a slot.
#[inline]
pub(super) fn without_slot(word: Location, into: &mut [u8]) -> Found {
    if word == Location::ABSENT {
        return Found::Absent;
    }
    if word == Location::ZERO {
        into.fill(0);
        return Found::Done(Residence::Zero);
    }
    Found::Partial
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use std::time::Duration;

    use headwater_testkit::Rng;

    use super::*;
    use crate::budget::DEFAULT_WEIGHT;
    use crate::cache::{Admission, CacheOptions, WriteResult};
    use crate::host::Host;
    use crate::overflow::io::open_engine;

    /// The segment that is evicted first after `uses`, of three full segments of which none was used before.
    fn coldest_after(uses: impl FnOnce(&WriteCache)) -> SegmentId {
        let host = Host::with_engine(u64::MAX, open_engine().unwrap()).unwrap();
        let options = CacheOptions {
            name: "tested".into(),
            size_bytes: 1 << 30,
            ram_bytes: 64 << 20,
            weight: DEFAULT_WEIGHT,
            overflow: None,
            pause_limit: Duration::ZERO,
            persistent: None,
            base: None,
        };
        let cache = WriteCache::open(&options, &host.shared()).unwrap();
        let data = Rng::new(1).bytes(BLOCK);
        // The block that finds no slot in the third segment closes that segment.
        for block in 0..=3 * u32::from(crate::units::SLOT_COUNT) {
            assert_eq!(cache.write(BlockNumber(block), &data, Admission::New), WriteResult::Done);
        }
        let segment = |id| cache.segments.get(SegmentId(id)).unwrap();
        (0..3).for_each(|id| {
            segment(id).take_touch();
        });
        uses(&cache);
        let mut log = cache.log.lock();
        let coldest = log.freeze_coldest(&cache.segments).unwrap();
        assert!(log.thaw(segment(coldest.0), coldest, false).is_none());
        coldest
    }

    #[test]
    fn what_the_machine_reads_is_not_the_coldest() {
        assert_eq!(coldest_after(|_| ()), SegmentId(0), "the oldest");
        let read = |cache: &WriteCache| {
            assert_eq!(cache.read(BlockNumber(0), 0, &mut [0; 512]), Found::Done(Residence::Ram));
        };
        assert_eq!(coldest_after(read), SegmentId(1));
    }

    #[test]
    fn what_the_machine_overwrites_is_not_the_coldest() {
        let other = Rng::new(2).bytes(BLOCK);
        let in_place = |wrote: WriteResult, cache: &WriteCache| {
            assert_eq!((wrote, cache.counters.total(Hot::WriteInPlace)), (WriteResult::Done, 1));
        };
        let overwrite =
            |cache: &WriteCache| in_place(cache.write(BlockNumber(0), &other, Admission::New), cache);
        assert_eq!(coldest_after(overwrite), SegmentId(1));
        let overwrite_part = |cache: &WriteCache| {
            in_place(cache.write_part(BlockNumber(0), 512, &other[..512], Admission::New, || false), cache)
        };
        assert_eq!(coldest_after(overwrite_part), SegmentId(1), "a part");
    }
}
