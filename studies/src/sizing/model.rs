//! A model of the write cache. It predicts how much a cache with a given RAM limit spills for a recorded trace.
//!
//! It is a log of segments of 2 MiB in RAM, with the rules of the real cache for filling, packing (compressing in RAM),
//! spilling and evicting, but without data, threads and a disk. `docs/write-cache.md` explains the rules.
//!
//! Two simplifications: the disk never runs out of space, so segments are never cleaned; and moving segments takes no
//! time.

use std::collections::VecDeque;

use crate::trace::blocks::{Action, Blocks, Step};

const SLOTS: usize = 512;
const SEGMENT_BYTES: u64 = 2 << 20;
const BLOCK_BYTES: u64 = 4096;

/// Segments that the cache may always use.
const MIN_SEGMENTS: u64 = 4;

/// Segments that the index must leave free, if the limit allows.
const SEGMENTS_BESIDE_INDEX: u64 = 8;

/// A dirty segment with at most this many live slots is filled again.
const REFILL_LIVE: u16 = 384;

/// The size of a table of the map, and of the record of a segment.
const TABLE_BYTES: u64 = 2048;
const RECORD_BYTES: u64 = 2048 + 56;

/// The staging buffers of a host with one cache.
const STAGING_BYTES: u64 = 3 * 512 * 4112;

/// The overhead of a packed segment in addition to its blocks.
const PACKED_BESIDES_BYTES: u64 = 2200;

const ABSENT: u32 = u32::MAX;
const ZERO: u32 = u32::MAX - 1;
const DEAD: u32 = u32::MAX;

/// Counts of the cache, in blocks of 4 KiB unless the name says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    /// Written blocks, including zeroes.
    pub written: u64,
    /// Written blocks that replaced a block in RAM.
    pub in_place: u64,
    /// Blocks written to the overflow disk.
    pub spilled: u64,
    /// Writes to the overflow disk.
    pub spilled_segments: u64,
    /// Blocks read from RAM.
    pub read_ram: u64,
    /// Blocks read from packed segments in RAM.
    pub read_packed: u64,
    /// Blocks read from the overflow disk.
    pub read_disk: u64,
    /// Blocks read as zeroes.
    pub read_zero: u64,
    /// Blocks read from the image.
    pub read_image: u64,
    /// The most live blocks at one time.
    pub peak_live: u64,
}

impl Counts {
    /// The share of written blocks that were never written to the overflow disk.
    pub fn ram_share(&self) -> f64 {
        1.0 - (self.spilled as f64 / self.written.max(1) as f64).min(1.0)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Without blocks.
    Free,
    /// Takes the next writes; in RAM.
    Filling,
    /// Full, and only in RAM.
    Dirty,
    /// In RAM, and on the overflow disk.
    Clean,
    /// Compressed, and only in RAM.
    Packed,
    /// Only on the overflow disk.
    Spilled,
}

#[derive(Debug)]
struct Segment {
    state: State,
    live: u16,
    next: usize,
    is_touched: bool,
    is_unpackable: bool,
    packed_bytes: u64,
    /// The block in each slot.
    slots: Box<[u32; SLOTS]>,
}

/// The model cache of one disk.
pub struct Cache<'a> {
    ram_bytes: u64,
    tables_of: &'a [u32],
    table_live: Vec<u16>,
    tables: u64,
    places: Vec<u32>,
    /// The compressed size of each block, in sixteenths of 4 KiB.
    packed_sixteenths: Vec<u8>,
    segments: Vec<Segment>,
    free: Vec<u32>,
    filling: Option<u32>,
    dirty: VecDeque<u32>,
    unpackable: VecDeque<u32>,
    packed: VecDeque<u32>,
    clean: VecDeque<u32>,
    refill: VecDeque<u32>,
    ram_segments: u64,
    dirty_segments: u64,
    packed_bytes: u64,
    live: u64,
    counts: Counts,
}

impl<'a> Cache<'a> {
    /// An empty cache with a RAM limit.
    pub fn new(blocks: &'a Blocks, ram_bytes: u64) -> Self {
        Self {
            ram_bytes,
            tables_of: &blocks.tables,
            table_live: vec![0; blocks.tables.last().map_or(0, |last| *last as usize + 1)],
            tables: 0,
            places: vec![ABSENT; blocks.count as usize],
            packed_sixteenths: vec![16; blocks.count as usize],
            segments: Vec::new(),
            free: Vec::new(),
            filling: None,
            dirty: VecDeque::new(),
            unpackable: VecDeque::new(),
            packed: VecDeque::new(),
            clean: VecDeque::new(),
            refill: VecDeque::new(),
            ram_segments: 0,
            dirty_segments: 0,
            packed_bytes: 0,
            live: 0,
            counts: Counts::default(),
        }
    }

    /// Processes a part of a request.
    pub fn step(&mut self, step: &Step) {
        if step.action == Action::Read {
            self.counts.read_image += u64::from(step.others);
        }
        for block in step.first..step.first + step.count {
            match step.action {
                Action::Read => self.read(block),
                Action::Write(sixteenths) => {
                    self.counts.written += 1;
                    self.write(block, sixteenths);
                }
                Action::Zero => {
                    self.counts.written += 1;
                    self.replace(block, ZERO);
                }
                Action::Forget => self.replace(block, ABSENT),
            }
        }
    }

    /// The number of live blocks.
    pub fn live(&self) -> u64 {
        self.live
    }

    /// RAM of segments, of packed segments and of the index.
    pub fn used_bytes(&self) -> u64 {
        self.ram_segments * SEGMENT_BYTES + self.packed_bytes + self.index_bytes()
    }

    /// The counts so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    fn read(&mut self, block: u32) {
        let place = self.places[block as usize];
        let count = match place {
            ABSENT => &mut self.counts.read_image,
            ZERO => &mut self.counts.read_zero,
            _ => {
                let segment = &mut self.segments[(place >> 9) as usize];
                match segment.state {
                    State::Packed => &mut self.counts.read_packed,
                    State::Spilled => &mut self.counts.read_disk,
                    _ => {
                        segment.is_touched = true;
                        &mut self.counts.read_ram
                    }
                }
            }
        };
        *count += 1;
    }

    fn write(&mut self, block: u32, sixteenths: u8) {
        let place = self.places[block as usize];
        if place < ZERO {
            let segment = &mut self.segments[(place >> 9) as usize];
            if matches!(segment.state, State::Filling | State::Dirty) {
                segment.is_touched = true;
                self.packed_sixteenths[block as usize] = sixteenths;
                self.counts.in_place += 1;
                return;
            }
        }
        let place = self.take_slot(block);
        self.replace(block, place);
        self.packed_sixteenths[block as usize] = sixteenths;
    }

    /// Points a block to another place, and frees its old slot.
    fn replace(&mut self, block: u32, to: u32) {
        let old = std::mem::replace(&mut self.places[block as usize], to);
        let table = &mut self.table_live[self.tables_of[block as usize] as usize];
        match (old == ABSENT, to == ABSENT) {
            (true, false) => {
                self.tables += u64::from(*table == 0);
                *table += 1;
            }
            (false, true) => {
                *table -= 1;
                self.tables -= u64::from(*table == 0);
            }
            _ => {}
        }
        self.live += u64::from(to < ZERO);
        if old < ZERO {
            self.live -= 1;
            self.kill(old);
        }
        self.counts.peak_live = self.counts.peak_live.max(self.live);
    }

    fn kill(&mut self, place: u32) {
        let id = place >> 9;
        let segment = &mut self.segments[id as usize];
        segment.slots[(place & 511) as usize] = DEAD;
        segment.live -= 1;
        if segment.live == 0 {
            self.release(id);
        } else if segment.live == REFILL_LIVE && segment.state == State::Dirty {
            self.refill.push_back(id);
        }
    }

    fn release(&mut self, id: u32) {
        let segment = &mut self.segments[id as usize];
        match segment.state {
            State::Dirty => {
                (self.dirty_segments, self.ram_segments) = (self.dirty_segments - 1, self.ram_segments - 1)
            }
            State::Clean => self.ram_segments -= 1,
            State::Packed => self.packed_bytes -= segment.packed_bytes,
            State::Spilled => {}
            State::Free | State::Filling => return,
        }
        segment.state = State::Free;
        self.free.push(id);
    }

    fn take_slot(&mut self, block: u32) -> u32 {
        loop {
            if let Some(place) = self.claim(block) {
                return place;
            }
            if !self.refill_one() {
                self.open_next();
            }
            self.balance();
        }
    }

    fn claim(&mut self, block: u32) -> Option<u32> {
        let id = self.filling?;
        let segment = &mut self.segments[id as usize];
        let dead = segment.slots[segment.next.min(SLOTS)..].iter().position(|owner| *owner == DEAD);
        let slot = match dead {
            Some(ahead) => segment.next + ahead,
            None if segment.live == 0 => 0,
            None => {
                self.filling = None;
                segment.state = State::Dirty;
                self.dirty_segments += 1;
                self.dirty.push_back(id);
                if segment.live <= REFILL_LIVE {
                    self.refill.push_back(id);
                }
                return None;
            }
        };
        segment.next = slot + 1;
        segment.slots[slot] = block;
        segment.live += 1;
        Some(id << 9 | slot as u32)
    }

    fn refill_one(&mut self) -> bool {
        while let Some(id) = self.refill.pop_front() {
            let segment = &self.segments[id as usize];
            if segment.state == State::Dirty && segment.live <= REFILL_LIVE {
                self.dirty_segments -= 1;
                self.open(id);
                return true;
            }
        }
        false
    }

    fn open_next(&mut self) {
        // One segment stays free for moved blocks.
        while self.ram_segments + 1 >= self.allowed_segments() {
            // The real cache would make the write wait for the disk here.
            if !self.evict() && !self.spill() {
                break;
            }
        }
        let id = self.free.pop().unwrap_or_else(|| {
            self.segments.push(Segment {
                state: State::Free,
                live: 0,
                next: 0,
                is_touched: false,
                is_unpackable: false,
                packed_bytes: 0,
                slots: Box::new([DEAD; SLOTS]),
            });
            self.segments.len() as u32 - 1
        });
        let segment = &mut self.segments[id as usize];
        segment.is_touched = false;
        segment.slots.fill(DEAD);
        self.ram_segments += 1;
        self.open(id);
    }

    fn open(&mut self, id: u32) {
        let segment = &mut self.segments[id as usize];
        (segment.state, segment.next, segment.is_unpackable) = (State::Filling, 0, false);
        self.filling = Some(id);
    }

    /// Does what the cache's background thread does: while too much is dirty, packs segments that compress well enough, then
    /// spills.
    fn balance(&mut self) {
        while self.dirty_segments > self.dirty_limit() && self.packed_bytes < self.packed_limit_bytes() {
            let Some(id) = self.coldest_untried() else { break };
            if !self.pack(id) {
                self.segments[id as usize].is_unpackable = true;
                self.unpackable.push_back(id);
            }
        }
        while self.dirty_segments > self.dirty_limit() || self.packed_bytes > self.packed_limit_bytes() {
            if !self.spill() {
                break;
            }
        }
        while self.ram_segments > self.allowed_segments() && self.evict() {}
    }

    fn is_dirty(&self, id: u32) -> bool {
        self.segments[id as usize].state == State::Dirty
    }

    /// The coldest dirty segment that nobody tried to pack yet, by the second-chance algorithm. It stays dirty.
    fn coldest_untried(&mut self) -> Option<u32> {
        let mut chances = self.dirty.len();
        while let Some(id) = self.dirty.pop_front() {
            let segment = &mut self.segments[id as usize];
            if segment.state != State::Dirty || segment.is_unpackable {
                continue;
            }
            if chances > 0 && std::mem::take(&mut segment.is_touched) {
                chances -= 1;
                self.dirty.push_back(id);
                continue;
            }
            return Some(id);
        }
        None
    }

    fn pack(&mut self, id: u32) -> bool {
        let segment = &mut self.segments[id as usize];
        let owners = segment.slots.iter().filter(|owner| **owner != DEAD);
        let sixteenths: u64 = owners.map(|owner| u64::from(self.packed_sixteenths[*owner as usize])).sum();
        let (packed, whole) = (sixteenths * BLOCK_BYTES / 16, u64::from(segment.live) * BLOCK_BYTES);
        if packed * 10 > whole * 7 {
            return false;
        }
        segment.state = State::Packed;
        segment.packed_bytes = packed + PACKED_BESIDES_BYTES;
        self.packed_bytes += segment.packed_bytes;
        self.dirty_segments -= 1;
        self.ram_segments -= 1;
        self.packed.push_back(id);
        true
    }

    /// Writes a cold segment to the disk. Returns whether there was one.
    fn spill(&mut self) -> bool {
        if self.packed_bytes >= self.packed_limit_bytes() {
            while let Some(id) = self.packed.pop_front() {
                let segment = &mut self.segments[id as usize];
                if segment.state == State::Packed {
                    self.packed_bytes -= segment.packed_bytes;
                    segment.state = State::Spilled;
                    self.count_spilled(id);
                    return true;
                }
            }
        }
        let mut victim = None;
        while let Some(id) = self.unpackable.pop_front() {
            if self.is_dirty(id) && self.segments[id as usize].is_unpackable {
                victim = Some(id);
                break;
            }
        }
        let Some(id) = victim.or_else(|| self.coldest_untried()) else { return false };
        self.segments[id as usize].state = State::Clean;
        self.dirty_segments -= 1;
        self.clean.push_back(id);
        self.count_spilled(id);
        true
    }

    fn count_spilled(&mut self, id: u32) {
        self.counts.spilled += u64::from(self.segments[id as usize].live);
        self.counts.spilled_segments += 1;
    }

    /// Evicts the coldest clean copy. Returns whether there was one.
    fn evict(&mut self) -> bool {
        let mut chances = self.clean.len();
        while let Some(id) = self.clean.pop_front() {
            let segment = &mut self.segments[id as usize];
            if segment.state != State::Clean {
                continue;
            }
            if chances > 0 && std::mem::take(&mut segment.is_touched) {
                chances -= 1;
                self.clean.push_back(id);
                continue;
            }
            segment.state = State::Spilled;
            self.ram_segments -= 1;
            return true;
        }
        false
    }

    fn index_bytes(&self) -> u64 {
        self.tables * TABLE_BYTES + self.segments.len() as u64 * RECORD_BYTES
    }

    fn index_estimate_bytes(&self) -> u64 {
        self.index_bytes().max(self.tables * TABLE_BYTES * 2)
    }

    fn least_segments(&self) -> u64 {
        let without_index = self.ram_bytes.saturating_sub(STAGING_BYTES) / SEGMENT_BYTES;
        without_index.clamp(MIN_SEGMENTS, SEGMENTS_BESIDE_INDEX)
    }

    fn allowed_segments(&self) -> u64 {
        let fixed = self.index_bytes() + self.packed_bytes + STAGING_BYTES;
        (self.ram_bytes.saturating_sub(fixed) / SEGMENT_BYTES).max(self.least_segments())
    }

    fn dirty_limit(&self) -> u64 {
        let taken = (self.index_estimate_bytes() + self.packed_bytes + STAGING_BYTES).div_ceil(SEGMENT_BYTES);
        let left = (self.ram_bytes / SEGMENT_BYTES).saturating_sub(taken + 1);
        left.max(self.least_segments()) * 7 / 10
    }

    fn packed_limit_bytes(&self) -> u64 {
        let unpacked = self.index_estimate_bytes() + STAGING_BYTES + self.least_segments() * SEGMENT_BYTES;
        (self.ram_bytes / 2).min(self.ram_bytes.saturating_sub(unpacked))
    }
}

/// The counts of a cache with this limit after all requests of a disk.
pub fn replay(blocks: &Blocks, ram_bytes: u64) -> Counts {
    let mut cache = Cache::new(blocks, ram_bytes);
    blocks.steps.iter().for_each(|step| cache.step(step));
    cache.counts()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Requests on a disk with this many blocks.
    fn blocks(count: u32, steps: impl Iterator<Item = (u32, u32, Action)>) -> Blocks {
        let step = |(first, count, action)| Step { time_us: 0, first, count, others: 0, action };
        Blocks {
            count,
            steps: steps.map(step).collect(),
            tables: (0..count).map(|block| block / 512).collect(),
            end_bytes: u64::from(count) * BLOCK_BYTES,
            written_bytes: 0,
        }
    }

    fn sequential(mib: u32, sixteenths: u8) -> Blocks {
        blocks(mib * 256, (0..mib * 256).map(move |block| (block, 1, Action::Write(sixteenths))))
    }

    #[test]
    fn only_data_that_does_not_fit_is_spilled() {
        let disk = sequential(64, 16);
        assert_eq!(
            replay(&disk, 256 * MIB),
            Counts { written: 16_384, peak_live: 16_384, ..Counts::default() }
        );
        let small = replay(&disk, 32 * MIB);
        // 32 MiB hold 16 segments. Without staging buffers, index and one spare segment, 11 remain, of which 7 may be
        // dirty.
        let left = 64 / 2 - 1 - 7;
        assert_eq!((small.spilled_segments, small.spilled), (left, left * 512));
        assert!(replay(&disk, 16 * MIB).spilled > small.spilled);
    }

    #[test]
    fn overwrites_and_discards_of_blocks_in_ram_spill_nothing() {
        let rounds = (0..20).flat_map(|_| (0..4096).map(|block| (block, 1, Action::Write(16))));
        let again = replay(&blocks(4096, rounds), 64 * MIB);
        assert_eq!((again.spilled, again.in_place), (0, 19 * 4096));
        // 20 files of 16 MiB, each discarded before the next is written.
        let files = (0..20_u32)
            .flat_map(|file| [(file * 4096, 4096, Action::Write(16)), (file * 4096, 4096, Action::Forget)]);
        let forgotten = replay(&blocks(20 * 4096, files), 64 * MIB);
        assert_eq!((forgotten.spilled, forgotten.written, forgotten.peak_live), (0, 81_920, 4096));
    }

    #[test]
    fn compressible_data_stays_in_ram_longer() {
        let (plain, packs) = (sequential(96, 16), sequential(96, 4));
        assert!(replay(&plain, 64 * MIB).spilled > 0);
        assert_eq!(replay(&packs, 64 * MIB).spilled, 0);
    }

    #[test]
    fn reads_are_counted_by_the_place_of_their_blocks() {
        let mut steps: Vec<(u32, u32, Action)> =
            (0..64 * 256).map(|block| (block, 1, Action::Write(16))).collect();
        steps.extend([(0, 10, Action::Read), (64 * 256 - 10, 10, Action::Read), (5, 2, Action::Zero)]);
        steps.extend([(5, 2, Action::Read), (7, 1, Action::Forget), (7, 1, Action::Read)]);
        let counts = replay(&blocks(64 * 256, steps.into_iter()), 32 * MIB);
        let found = (counts.read_disk, counts.read_ram, counts.read_zero, counts.read_image);
        assert_eq!(found, (10, 10, 2, 1));
    }
}
