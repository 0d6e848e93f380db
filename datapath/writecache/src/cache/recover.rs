//! Takes over a cache that another process left in a file, in its state after that process's last answered
//! request.
//!
//! First the whole file is read and checked, without a change. Then the file is updated to the state of this
//! process. If this process ends meanwhile, the next one can repeat each step of the update.

use std::collections::BTreeSet;
use std::fs::File;
use std::sync::Arc;

use headwater_block::{IoError, IoErrorKind};

use super::{CacheOptions, Parts, WriteCache, check, refuse_persistent};
use crate::host::HostShared;
use crate::log::Log;
use crate::map::Map;
use crate::memory::MemoryPool;
use crate::memory_file::{Found, Handed, Handover, Head, KeyBytes, KeyPage, MemoryFile};
use crate::overflow::Overflow;
use crate::packed::Packed;
use crate::segment::{SegmentTable, State};
use crate::units::{SEGMENT_BYTES, SegmentId};

/// How far the first new generation is above the last known one.
const GENERATIONS_APART: u64 = 1 << 20;

/// The segments that another process left, and their places.
struct Segments {
    table: SegmentTable,
    log: Log,
    pool: Arc<MemoryPool>,
    /// Positions on the overflow disk that hold segments.
    positions: BTreeSet<u32>,
    /// Positions to which a write of the other process may still be in flight.
    doubtful: Vec<u32>,
}

impl WriteCache {
    /// Opens the cache that another process left, which has ended. `options` are those with which it was
    /// opened; limits may differ.
    ///
    /// An error of kind [`IoErrorKind::Corrupt`] says that the file contradicts itself. After any error the
    /// file is unchanged.
    pub fn recover(
        left: Handover,
        options: &CacheOptions,
        host: &Arc<HostShared>,
    ) -> Result<Arc<Self>, IoError> {
        let blocks = check(options)?;
        refuse_persistent(options)?;
        let given_up = |why: String| {
            let why = format!(
                "the memory of write cache '{}' cannot be recovered: {why}; the machine's writes are lost: start the machine again",
                options.name
            );
            IoError::new(IoErrorKind::Corrupt, why)
        };
        let (memory, head) = MemoryFile::open(File::from(left.memory)).map_err(given_up)?;
        if memory.blocks() != blocks {
            return Err(given_up(format!(
                "it belongs to a volume of {} blocks, and this volume has {blocks}",
                memory.blocks()
            )));
        }
        let found = Found::read(&memory).map_err(given_up)?;
        let handed = handed(&head, left.overflow, left.key, options).map_err(given_up)?;
        let lacks = || given_up("this process has not enough address space or memory for it".into());
        let map = Map::with_file(blocks, Some(Arc::clone(&memory)));
        let segments = Segments::new(&memory, &found).ok_or_else(lacks)?;
        let generation = found.generation.saturating_add(GENERATIONS_APART);
        let taken: BTreeSet<u32> =
            segments.positions.iter().chain(&segments.doubtful).chain(&found.given_up).copied().collect();
        let taken: Vec<u32> = taken.into_iter().collect();
        let overflow = match (&options.overflow, handed) {
            (Some(place), Some(handed)) => {
                let engine = Arc::clone(&host.engine);
                Some(Overflow::adopt(place, engine, handed, &memory, &taken, generation)?)
            }
            _ => None,
        };
        memory.reserve_given_up(&segments.doubtful).ok_or_else(lacks)?;
        let Found { leaves, packed, .. } = found;
        map.adopt(leaves).ok_or_else(lacks)?;

        // From here on the file changes.
        segments.publish(&memory, &packed);
        if let Some(overflow) = &overflow {
            overflow.punch_free();
        }
        let Segments { table, log, pool, .. } = segments;
        let parts =
            Parts { map, segments: table, log, persist: None, overflow, memory: Some((memory, pool)) };
        let cache = Self::of_parts(options, host, parts);
        cache.count_recovered(packed);
        host.register(&cache);
        host.signal();
        Ok(cache)
    }

    /// Reports the recovered memory to the host's budget.
    fn count_recovered(&self, packed: Vec<(SegmentId, Packed)>) {
        for (id, packed) in packed {
            self.host.add_ram(packed.bytes());
            self.packed.insert(id, packed);
        }
        let log = self.log.lock();
        self.host.add_ram(u64::from(log.ram_segments) * SEGMENT_BYTES as u64);
        self.report_index(&log);
    }
}

/// The overflow and its key, from the handed-over descriptors. `None`: the cache has none.
fn handed(
    head: &Head,
    overflow: Option<std::os::fd::OwnedFd>,
    page: Option<std::os::fd::OwnedFd>,
    options: &CacheOptions,
) -> Result<Option<Handed>, String> {
    if head.has_overflow != options.overflow.is_some() {
        let (had, now) = if head.has_overflow { ("an", "has none") } else { ("no", "needs one") };
        return Err(format!("it has {had} overflow disk, but the present cache mode {now}"));
    }
    if !head.has_overflow {
        return Ok(None);
    }
    let file = File::from(overflow.ok_or("its overflow file was not handed over")?);
    let page = page.map(KeyPage::from_fd);
    let key = match (&head.key, &page) {
        (Some(key), _) => KeyBytes::new(key),
        (None, Some(page)) => {
            page.read().map_err(|e| format!("the key of its overflow file cannot be read: {e}"))?
        }
        (None, None) => return Err("the key of its overflow file was not handed over".into()),
    };
    Ok(Some(Handed { file, key, page }))
}

impl Segments {
    /// Maps the segments in this process. `None`: it has not enough address space.
    fn new(memory: &Arc<MemoryFile>, found: &Found) -> Option<Self> {
        let table = SegmentTable::with_file(SegmentId::LIMIT, Some(Arc::clone(memory)));
        let pool = MemoryPool::in_file(Arc::clone(memory));
        let used: BTreeSet<u32> =
            found.segments.values().filter_map(|segment| segment.record.piece).collect();
        let addresses = pool.adopt(&used)?;
        let (mut positions, mut doubtful) = (BTreeSet::new(), Vec::new());
        for (number, left) in &found.segments {
            let segment = table.get(SegmentId(*number))?;
            let address = match &left.record.piece {
                Some(memory) => *addresses.get(memory)?,
                None => 0,
            };
            left.live().for_each(|(slot, block)| segment.claim(slot, block));
            segment.adopt(&left.record, address);
            positions.extend(segment.position());
            if matches!(left.record.state, State::Frozen | State::PackedFrozen) {
                doubtful.extend(left.record.position);
            }
        }
        // Segments without live blocks are free, whatever their records say; but a write of them may be in
        // flight.
        doubtful.extend(found.dead_under_way());
        table.reserve(SegmentId(found.numbers.saturating_sub(1))).then_some(())?;
        let mut log = Log::default();
        log.adopt(&table, found.numbers);
        Some(Self { table, log, pool, positions, doubtful })
    }

    /// Updates the file to this state, and frees all space that no segment uses.
    fn publish(&self, memory: &MemoryFile, packed: &[(SegmentId, Packed)]) {
        // A position that was given up stays given up, even if this process ends before the record says that
        // no segment has it.
        self.doubtful.iter().for_each(|position| memory.give_up(*position));
        for number in 0..self.log.numbers_used() {
            if let Some(segment) = self.table.get(SegmentId(number)) {
                segment.publish();
            }
        }
        let runs = packed.iter().filter_map(|(_, packed)| Some((packed.offset()?, packed.file_bytes())));
        memory.taken_over(|piece| self.pool.has_number(piece), &runs.collect());
    }
}
