//! Chunks: where bytes with a logical address are on the disk.

use std::collections::BTreeMap;
use std::ops::Range;

use super::CHUNK_ITEM;
use crate::fields::{u8_at, u16_at, u64_at};
use crate::{Fault, fault};

/// The most chunks: of 16 TiB in the smallest ones that there are.
const CHUNKS_MAX: usize = 1 << 20;
const CHUNK_BYTES: usize = 48;
const STRIPE_BYTES: usize = 32;
const KEY_BYTES: usize = 17;

/// Kinds of chunks that have all bytes in each of their places: none of these, or DUP.
const PROFILES: u64 = 0x7f8;
const DUP: u64 = 0x20;

#[derive(Clone, Debug)]
struct Chunk {
    len: u64,
    /// On the disk.
    places: Vec<u64>,
}

/// All chunks, by their logical addresses.
#[derive(Clone, Debug)]
pub(super) struct Places {
    chunks: BTreeMap<u64, Chunk>,
    disk_bytes: u64,
}

impl Places {
    pub(super) fn new(disk_bytes: u64) -> Self {
        Self { chunks: BTreeMap::new(), disk_bytes }
    }

    /// Adds a chunk, and returns how long its item is.
    pub(super) fn add(&mut self, address: u64, item: &[u8]) -> Result<usize, Fault> {
        let (len, profile) = (u64_at(item, 0), u64_at(item, 24) & PROFILES);
        let count = usize::from(u16_at(item, 44));
        if !matches!(profile, 0 | DUP) {
            return Err(fault("its RAID profile spreads it over several disks"));
        }
        let stripes = item.get(CHUNK_BYTES..).and_then(|rest| rest.get(..count * STRIPE_BYTES));
        let stripes = stripes.filter(|_| (1..=2).contains(&count) && len > 0);
        let stripes = stripes.ok_or_else(|| fault("an entry of the Btrfs chunk tree is invalid"))?;
        let places: Vec<u64> = stripes.chunks_exact(STRIPE_BYTES).map(|stripe| u64_at(stripe, 8)).collect();
        let fits = |at: &u64| at.checked_add(len).is_some_and(|end| end <= self.disk_bytes);
        if !places.iter().all(fits) || address.checked_add(len).is_none() || self.chunks.len() >= CHUNKS_MAX {
            return Err(fault("the Btrfs chunk tree has too many entries, or one outside of the disk"));
        }
        self.chunks.insert(address, Chunk { len, places });
        Ok(CHUNK_BYTES + count * STRIPE_BYTES)
    }

    /// Adds the chunks of a superblock: keys and items one after the other.
    pub(super) fn add_all(&mut self, mut array: &[u8]) -> Result<(), Fault> {
        while let Some((key, rest)) = array.split_at_checked(KEY_BYTES) {
            if u8_at(key, 8) != CHUNK_ITEM {
                return Err(fault("its superblock is invalid"));
            }
            let len = self.add(u64_at(key, 9), rest)?;
            array = rest.get(len..).unwrap_or_default();
        }
        Ok(())
    }

    /// All places of bytes that follow one another.
    pub(super) fn of(&self, address: u64, len: u64) -> Result<Vec<Range<u64>>, Fault> {
        let nowhere = || {
            fault(format!(
                "the Btrfs chunk tree has no entry for logical address {address:#x} ({len} bytes), so the file system may \
                 be damaged: check it in the guest"
            ))
        };
        let (start, chunk) = self.chunks.range(..=address).next_back().ok_or_else(nowhere)?;
        let within = address - start;
        if within.checked_add(len).is_none_or(|end| end > chunk.len) {
            return Err(nowhere());
        }
        Ok(chunk.places.iter().map(|place| place + within..place + within + len).collect())
    }
}
