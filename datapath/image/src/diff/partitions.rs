//! Where the partitions of a disk are: GPT, MBR with primary partitions, or one file system on the whole disk.

use headwater_block::{Device, blocking};

use crate::error::ImageError;
use crate::units::usize_of_u32;

/// The most partitions that are looked at.
pub const PARTITIONS_MAX: usize = 128;

const SECTOR_BYTES: u64 = 512;

/// A partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Partition {
    /// From 1; 0 is the whole disk.
    pub(crate) number: u32,
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u64,
}

/// The partitions of a disk; the whole disk where it has none that make sense.
pub(crate) fn find(disk: &dyn Device) -> Result<Vec<Partition>, ImageError> {
    let size_bytes = disk.geometry().size_bytes;
    let mut first = [0; 512];
    blocking::read(disk, 0, &mut first)?;
    let mut header = [0; 512];
    if size_bytes >= 2 * SECTOR_BYTES {
        blocking::read(disk, SECTOR_BYTES, &mut header)?;
    }
    let mut found = if header.starts_with(b"EFI PART") { gpt(disk, &header)? } else { mbr(&first) };
    found.retain(|partition| {
        let end = partition.offset_bytes.checked_add(partition.len_bytes);
        partition.len_bytes > 0 && partition.offset_bytes > 0 && end.is_some_and(|end| end <= size_bytes)
    });
    if found.is_empty() {
        found.push(Partition { number: 0, offset_bytes: 0, len_bytes: size_bytes });
    }
    Ok(found)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|tail| tail.first_chunk()).map_or(0, |four| u32::from_le_bytes(*four))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|tail| tail.first_chunk()).map_or(0, |eight| u64::from_le_bytes(*eight))
}

fn gpt(disk: &dyn Device, header: &[u8]) -> Result<Vec<Partition>, ImageError> {
    let table = u64_at(header, 72).saturating_mul(SECTOR_BYTES);
    let count = usize_of_u32(u32_at(header, 80)).min(PARTITIONS_MAX);
    let entry_bytes = usize_of_u32(u32_at(header, 84));
    // Devices are read in whole sectors, whatever the table says of its length.
    let len = count.saturating_mul(entry_bytes).next_multiple_of(512);
    let fits = table.checked_add(u64::try_from(len).unwrap_or(u64::MAX));
    if !(128..=4096).contains(&entry_bytes) || fits.is_none_or(|end| end > disk.geometry().size_bytes) {
        return Ok(Vec::new());
    }
    let mut entries = vec![0; len];
    blocking::read(disk, table, &mut entries)?;
    let partition = |(number, entry): (u32, &[u8])| {
        let unused = entry.iter().take(16).all(|byte| *byte == 0);
        let (first, last) = (u64_at(entry, 32), u64_at(entry, 40));
        (!unused && last >= first).then(|| Partition {
            number,
            offset_bytes: first.saturating_mul(SECTOR_BYTES),
            len_bytes: (last - first).saturating_add(1).saturating_mul(SECTOR_BYTES),
        })
    };
    Ok((1u32..).zip(entries.chunks_exact(entry_bytes).take(count)).filter_map(partition).collect())
}

fn mbr(first: &[u8]) -> Vec<Partition> {
    // A file system's boot sector has the same mark, but no four entries that make sense.
    let marked = first.get(510..512) == Some(&[0x55, 0xaa]);
    let entries = first.get(446..510).filter(|_| marked).unwrap_or_default();
    let partition = |(number, entry): (u32, &[u8])| {
        let (status, kind) = (entry.first()?, entry.get(4)?);
        let sane = matches!(status, 0 | 0x80) && *kind != 0;
        sane.then(|| Partition {
            number,
            offset_bytes: u64::from(u32_at(entry, 8)) * SECTOR_BYTES,
            len_bytes: u64::from(u32_at(entry, 12)) * SECTOR_BYTES,
        })
    };
    (1u32..).zip(entries.chunks_exact(16)).filter_map(partition).collect()
}
