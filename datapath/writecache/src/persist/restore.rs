//! Restores the slots that commits stored only in the map: when a cache is opened, those that are still live
//! are written to their positions in the data file, before anything else is written there.
//!
//! A position gets another generation only after a durable commit has recorded that it is free. So if the map
//! names a live slot, nothing else was written there. Writing it again with the same bytes is harmless, if it
//! was there already or if this is repeated after a crash. Slots that are not live any more are skipped.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek};

use rustix::fs::FallocateFlags;

use super::format::{HEADER_BYTES, NO_BLOCK, Record};
use super::scan::{Scan, Window};
use crate::overflow::Overflow;
use crate::overflow::encrypt::{ENCRYPTED_SEGMENT_BYTES, ENCRYPTED_SLOT_BYTES};
use crate::overflow::io::IoEngine;
use crate::segment::SegmentTable;
use crate::units::{BlockNumber, SegmentId, Slot};

/// Called with a slot: position, slot and its encrypted bytes.
type Each<'a> = &'a mut dyn FnMut(u32, Slot, &[u8]) -> io::Result<()>;

/// Calls `each` for the encrypted slots in the map that are live after its replay.
fn live_slots<R: Read + Seek>(
    (records, scan): (&mut Window<R>, &Scan),
    segments: &SegmentTable,
    each: Each<'_>,
) -> io::Result<()> {
    let mut at = HEADER_BYTES as u64;
    while at < scan.end {
        let Some((_, record, next)) = records.record(at)? else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the map changed while it was read"));
        };
        if let Record::Encrypted { position, generation, first_slot, blocks, slots } = record
            && let Some(segment) = segments.get(SegmentId(position))
            && segment.position() == Some(position)
            && segment.generation() == generation
        {
            let slots = slots.chunks_exact(ENCRYPTED_SLOT_BYTES);
            for ((slot, block), encrypted) in (first_slot..).map(Slot).zip(blocks.iter()).zip(slots) {
                // If the record names no block, parts name the slot: it is live while any of them is.
                let owner = segment.owner(slot);
                if owner == Some(BlockNumber(block)) || (block == NO_BLOCK && owner.is_some()) {
                    each(position, slot, encrypted)?;
                }
            }
        }
        at = next;
    }
    Ok(())
}

/// Whether the map contains all live slots of these positions: then nothing is lost if the data file does
/// not.
pub fn holds_all<R: Read + Seek>(
    map: (&mut Window<R>, &Scan),
    segments: &SegmentTable,
    positions: &[u32],
) -> io::Result<bool> {
    let mut held: BTreeMap<u32, u32> = BTreeMap::new();
    live_slots(map, segments, &mut |position, _, _| {
        *held.entry(position).or_default() += 1;
        Ok(())
    })?;
    let is_held = |position: &u32| {
        segments.get(SegmentId(*position)).is_some_and(|segment| held.get(position) == Some(&segment.live()))
    };
    Ok(positions.iter().all(is_held))
}

/// Consecutive live slots in the data file. If each was written by itself, the kernel would first read the
/// pages at both its ends.
#[derive(Default)]
struct Run {
    /// Its offset in the file.
    start: u64,
    /// At most as many as a position has.
    slots: Vec<u8>,
}

impl Run {
    fn takes(&self, at: u64) -> bool {
        self.start + self.slots.len() as u64 == at && self.slots.len() < ENCRYPTED_SEGMENT_BYTES
    }

    /// Writes the run, and begins the next one.
    fn write(&mut self, data: &File, engine: &dyn IoEngine, next: u64) -> io::Result<()> {
        if !self.slots.is_empty() {
            engine.write_at(data, &self.slots, self.start)?;
        }
        self.start = next;
        self.slots.clear();
        Ok(())
    }
}

/// Writes the slots to `data`, which is open through the page cache, and syncs it. Returns their number.
pub fn put_back<R: Read + Seek>(
    map: (&mut Window<R>, &Scan),
    segments: &SegmentTable,
    data: &File,
    engine: &dyn IoEngine,
) -> io::Result<u64> {
    let (mut count, mut claimed, mut run) = (0, None, Run::default());
    live_slots(map, segments, &mut |position, slot, encrypted| {
        let start = Overflow::offset_of(position);
        if claimed != Some(position) {
            claim(data, start, engine)?;
            claimed = Some(position);
        }
        count += 1;
        let at = start + u64::from(slot.0) * ENCRYPTED_SLOT_BYTES as u64;
        if !run.takes(at) {
            run.write(data, engine, at)?;
        }
        run.slots.extend_from_slice(encrypted);
        Ok(())
    })?;
    if count > 0 {
        run.write(data, engine, 0)?;
        engine.sync(data)?;
    }
    Ok(count)
}

/// A crash may have taken back claimed space, and with it the end of the file; reads there cover more than
/// the slots alone.
fn claim(data: &File, start: u64, engine: &dyn IoEngine) -> io::Result<()> {
    let len = ENCRYPTED_SEGMENT_BYTES as u64;
    match rustix::fs::fallocate(data, FallocateFlags::empty(), start, len) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP) if data.metadata()?.len() < start + len => {
            engine.set_len(data, start + len)
        }
        Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
