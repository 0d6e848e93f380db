//! The changed blocks of a disk, and where each of them is.

use headwater_block::BLOCK_BYTES;
use headwater_filesystems::{Fault, fault};

/// The most runs of blocks: 64 MiB of memory. A gap, or another place, begins another run.
pub const RUNS_MAX: usize = 4 << 20;
/// The most blocks: 512 GiB. A scan takes a byte of memory for each of them.
pub const BLOCKS_MAX: u32 = 128 << 20;

/// The place of a changed block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In RAM.
    Ram,
    /// In RAM, packed.
    Packed,
    /// On the overflow disk.
    Disk,
}

/// Bytes of a disk, by the place of their newest contents. A packed block counts with its unpacked size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Held {
    /// In RAM.
    pub ram_bytes: u64,
    /// In RAM, packed.
    pub packed_bytes: u64,
    /// On the overflow disk.
    pub disk_bytes: u64,
}

impl Held {
    /// In all places.
    pub fn total_bytes(&self) -> u64 {
        self.ram_bytes.saturating_add(self.packed_bytes).saturating_add(self.disk_bytes)
    }

    /// Adds bytes of a place.
    pub fn add(&mut self, place: Place, bytes: u64) {
        let sum = match place {
            Place::Ram => &mut self.ram_bytes,
            Place::Packed => &mut self.packed_bytes,
            Place::Disk => &mut self.disk_bytes,
        };
        *sum = sum.saturating_add(bytes);
    }

    /// Adds what another one has.
    pub fn plus(&mut self, other: Self) {
        self.add(Place::Ram, other.ram_bytes);
        self.add(Place::Packed, other.packed_bytes);
        self.add(Place::Disk, other.disk_bytes);
    }
}

/// Changed blocks that follow one another and are in the same place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) first: u32,
    pub(crate) blocks: u32,
    /// How many changed blocks there are before these.
    pub(crate) before: u32,
    pub(crate) place: Place,
}

impl Run {
    pub(crate) fn end(&self) -> u64 {
        u64::from(self.first) + u64::from(self.blocks)
    }
}

/// All changed blocks of a disk, ascending. A block that reads as zeroes and takes no slot is not among them.
#[derive(Debug, Default)]
pub struct Changed {
    runs: Vec<Run>,
    blocks: u32,
}

impl Changed {
    /// Adds blocks, which must lie after all that were added before.
    pub fn add(&mut self, first: u32, blocks: u32, place: Place) -> Result<(), Fault> {
        let is_full = self.runs.len() >= RUNS_MAX;
        let last = self.runs.last_mut();
        let end = last.as_ref().map_or(0, |last| last.end());
        let before = self.blocks;
        if blocks == 0 {
            return Ok(());
        }
        if u64::from(first) < end {
            return Err(fault(format!("block {first} was noted before")));
        }
        self.blocks = before.checked_add(blocks).filter(|all| *all <= BLOCKS_MAX).ok_or_else(|| {
            let gib = (u64::from(BLOCKS_MAX) * u64::from(BLOCK_BYTES)) >> 30;
            fault(format!("its write cache has more than {gib} GiB, which is more than a scan takes"))
        })?;
        match last {
            Some(last) if last.place == place && u64::from(first) == end => last.blocks += blocks,
            _ if is_full => {
                return Err(fault(format!(
                    "its write cache is in more than {RUNS_MAX} pieces, which is more than a scan takes"
                )));
            }
            _ => self.runs.push(Run { first, blocks, before, place }),
        }
        Ok(())
    }

    /// How many blocks.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// The runs that end after this block.
    pub(crate) fn runs_after(&self, block: u64) -> &[Run] {
        let first = self.runs.partition_point(|run| run.end() <= block);
        self.runs.get(first..).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_follow_one_another_are_one_run() {
        let mut changed = Changed::default();
        for block in 0..1000 {
            changed.add(block, 1, Place::Ram).unwrap();
        }
        changed.add(1000, 5, Place::Disk).unwrap();
        changed.add(2000, 5, Place::Disk).unwrap();
        assert_eq!((changed.runs.len(), changed.blocks()), (3, 1010));
        assert!(changed.add(2004, 1, Place::Ram).is_err());
        assert_eq!(changed.runs_after(1004).len(), 2);
        assert_eq!(changed.runs_after(1005).len(), 1);
    }

    #[test]
    fn runs_and_blocks_have_limits() {
        let mut long = Changed::default();
        long.add(0, BLOCKS_MAX, Place::Disk).unwrap();
        let refused = long.add(BLOCKS_MAX, 1, Place::Disk).unwrap_err();
        assert!(refused.to_string().contains("more than 512 GiB"), "{refused}");
        let mut scattered = Changed::default();
        for run in 0..RUNS_MAX {
            scattered.add(2 * run as u32, 1, Place::Ram).unwrap();
        }
        assert!(scattered.add(2 * RUNS_MAX as u32, 1, Place::Ram).is_err());
    }
}
