//! The cache that another process left in a file, as it was after that process's last answered request.
//!
//! First all of it is read and checked, and nothing is changed. Then the file is made to say what the cache is now: each step of that can
//! be done again by the next process, if this one ends meanwhile.

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

/// The first generation is so far above the last one that is known.
const GENERATIONS_APART: u64 = 1 << 20;

/// Segments and where they are, as another process left them.
struct Segments {
    table: SegmentTable,
    log: Log,
    pool: Arc<MemoryPool>,
    /// Places on the overflow disk that hold segments.
    positions: BTreeSet<u32>,
    /// Places to which a write may still be under way.
    doubtful: Vec<u32>,
}

impl WriteCache {
    /// Opens the cache that another process left, which has ended. `options` are those by which it was opened; limits may differ.
    ///
    /// An error of kind [`IoErrorKind::Corrupt`] says that what it left contradicts itself. Then, and after every other error, nothing of
    /// it has changed.
    pub fn recover(
        left: Handover,
        options: &CacheOptions,
        host: &Arc<HostShared>,
    ) -> Result<Arc<Self>, IoError> {
        let blocks = check(options)?;
        refuse_persistent(options)?;
        let given_up = |why: String| {
            let why = format!(
                "the memory of write cache '{}' is given up, because {why}; what its machine wrote is lost: start the machine again",
                options.name
            );
            IoError::new(IoErrorKind::Corrupt, why)
        };
        let (memory, head) = MemoryFile::open(File::from(left.memory)).map_err(given_up)?;
        if memory.blocks() != blocks {
            return Err(given_up(format!(
                "it is of {} blocks, and the volume has {blocks}",
                memory.blocks()
            )));
        }
        let found = Found::read(&memory).map_err(given_up)?;
        let handed = handed(&head, left.overflow, left.key, options).map_err(given_up)?;
        let lacks = || given_up("this process has no address space or memory for it".into());
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

    /// Tells the host's budget what is there.
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

/// The overflow and its key. `None`: the cache has none.
fn handed(
    head: &Head,
    overflow: Option<std::os::fd::OwnedFd>,
    page: Option<std::os::fd::OwnedFd>,
    options: &CacheOptions,
) -> Result<Option<Handed>, String> {
    if head.has_overflow != options.overflow.is_some() {
        let had = if head.has_overflow { "an" } else { "no" };
        return Err(format!("it had {had} overflow disk, and is to be opened otherwise"));
    }
    if !head.has_overflow {
        return Ok(None);
    }
    let file = File::from(overflow.ok_or("its overflow was not handed over")?);
    let page = page.map(KeyPage::from_fd);
    let key = match (&head.key, &page) {
        (Some(key), _) => KeyBytes::new(key),
        (None, Some(page)) => {
            page.read().map_err(|e| format!("the key of its overflow cannot be read: {e}"))?
        }
        (None, None) => return Err("the key of its overflow was not handed over".into()),
    };
    Ok(Some(Handed { file, key, page }))
}

impl Segments {
    /// Takes them over in this process. `None`: it has no address space for them.
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
        // The records of segments in which nothing lives any more are free, whatever they say; but a write may be under way.
        doubtful.extend(found.dead_under_way());
        table.reserve(SegmentId(found.numbers.saturating_sub(1))).then_some(())?;
        let mut log = Log::default();
        log.adopt(&table, found.numbers);
        Some(Self { table, log, pool, positions, doubtful })
    }

    /// Makes the file say what they are now, and gives back what no segment has.
    fn publish(&self, memory: &MemoryFile, packed: &[(SegmentId, Packed)]) {
        // A place that was given up stays so, also if this process ends before the record says that it is no segment's.
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
