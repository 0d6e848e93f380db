//! Where the partitions of a disk are: GPT, MBR with primary and logical partitions, or one file system on the whole disk.
//!
//! ```text
//!   first sector           extended partition
//!   | 1 | 2, extended | .. | table: 5, next | 5 ..... | table: 6, next | 6 ... | table: 7 | 7 ..... |
//! ```
//! An extended partition begins with a table like that of the first sector, which has one logical partition and a link to the
//! next table. The place of a partition counts from its table on, that of a table from the start of the extended partition on.
//! A table can lie before the one that links to it: fdisk makes such chains where a partition was deleted and another one made
//! in its place. Anybody may have made the tables, so what each says is checked, and none is read twice.
//!
//! A GPT counts if the first sector says that there is one and its header is whole. Otherwise it is what a disk had before
//! it got an MBR. The copy at the end of the disk is for repairs: Linux does not look at it either, except by a boot option.
//!
//! All places are in sectors of the disk, of 512 or 4,096 bytes. A table of an MBR has 512 bytes on all disks.

use headwater_block::IoError;

use crate::bytes::read_any;
use crate::units::{u64_of, usize_of_u32};
use crate::{ReadAt, crc32};

/// The most partitions that are looked at, and the most tables that are read of an extended partition.
pub const PARTITIONS_MAX: usize = 128;

/// Bytes of the start of a disk that hold the header of a GPT, however large the sectors are.
pub const GPT_START_BYTES: usize = 8192;
/// The sizes that sectors have.
const SECTORS_BYTES: [u32; 2] = [512, 4096];
/// The type of an MBR's entry that stands for a GPT, one of four in a hybrid MBR.
const PROTECTIVE: u8 = 0xee;
/// The shortest header of a GPT. The longest one is a sector.
const GPT_HEADER_BYTES: usize = 92;
/// The types of extended partitions: of DOS, of Windows 95, of Linux.
const EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];
/// The number of the first logical partition, however many primary ones there are.
const LOGICAL_FROM: u32 = 5;

pub(crate) type Sector = [u8; 512];

/// A partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    /// From 1; 0 is the whole disk.
    pub number: u32,
    /// Where it starts.
    pub offset_bytes: u64,
    /// Its length.
    pub len_bytes: u64,
}

impl std::fmt::Display for Partition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.number {
            0 => f.write_str("the whole disk"),
            number => write!(f, "partition {number}"),
        }
    }
}

/// The partitions of a disk, as far as their tables can be read.
#[derive(Debug)]
pub struct Partitions {
    /// By number. The whole disk, if it has no partitions that make sense.
    pub partitions: Vec<Partition>,
    /// Why logical partitions may be missing: one of their tables cannot be read.
    pub unread: Option<PartitionsError>,
}

/// A table of partitions that cannot be read.
#[derive(Debug)]
pub struct PartitionsError {
    /// Which table, unless it is the first sector or the GPT.
    pub tried: Option<String>,
    /// Why.
    pub source: IoError,
}

impl From<IoError> for PartitionsError {
    fn from(source: IoError) -> Self {
        Self { tried: None, source }
    }
}

impl std::fmt::Display for PartitionsError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.tried {
            Some(tried) => write!(f, "{tried}: {}", self.source),
            None => write!(f, "cannot read the table of partitions: {}", self.source),
        }
    }
}

impl std::error::Error for PartitionsError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// Finds the partitions of a disk whose sectors have so many bytes: 512 or 4,096.
pub fn partitions(disk: &dyn ReadAt, sector_bytes: u64) -> Result<Partitions, PartitionsError> {
    let disk = Disk::new(disk, sector_bytes);
    let first = disk.table(0)?;
    let mut found = match disk.gpt_header(&first)? {
        Some(header) => Partitions { partitions: disk.gpt(&header)?, unread: None },
        None => disk.mbr(&first),
    };
    found.partitions.retain(|partition| {
        let end = partition.offset_bytes.checked_add(partition.len_bytes);
        let is_inside = end.is_some_and(|end| end <= disk.size_bytes);
        partition.len_bytes > 0 && partition.offset_bytes > 0 && is_inside
    });
    if found.partitions.is_empty() && found.unread.is_none() {
        found.partitions.push(Partition { number: 0, offset_bytes: 0, len_bytes: disk.size_bytes });
    }
    Ok(found)
}

/// The size of the sectors of a disk with a GPT, whose header is in the second sector; `None` without a GPT. `start` is the start of the
/// disk, of which [`GPT_START_BYTES`] are enough.
pub fn gpt_sector_bytes(start: &[u8]) -> Option<u32> {
    if !is_protective(start.first_chunk()?) {
        return None;
    }
    SECTORS_BYTES.into_iter().find(|size| {
        let header = start.get(usize_of_u32(*size)..).and_then(|rest| rest.first_chunk());
        header.is_some_and(is_gpt)
    })
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|tail| tail.first_chunk()).map_or(0, |four| u32::from_le_bytes(*four))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|tail| tail.first_chunk()).map_or(0, |eight| u64::from_le_bytes(*eight))
}

/// Whether a sector is the whole header of a GPT.
fn is_gpt(header: &Sector) -> bool {
    let mut summed = *header;
    // Its sum counts as zero in the sum.
    summed.get_mut(16..20).unwrap_or_default().fill(0);
    let summed = summed.get(..usize_of_u32(u32_at(header, 12))).unwrap_or_default();
    let is_long_enough = summed.len() >= GPT_HEADER_BYTES;
    header.starts_with(b"EFI PART") && is_long_enough && crc32(summed) == u32_at(header, 16)
}

/// Whether a first sector says that a GPT follows.
fn is_protective(first: &Sector) -> bool {
    entries(first).iter().any(|entry| entry.kind == PROTECTIVE)
}

/// A stretch of the disk, in sectors. Both are sums of a few numbers of 32 bits.
#[derive(Clone, Copy)]
struct Sectors {
    first: u64,
    len: u64,
}

impl Sectors {
    fn end(self) -> u64 {
        self.first + self.len
    }
}

/// An entry of a table.
pub(crate) struct Entry {
    status: u8,
    pub(crate) kind: u8,
    place: Sectors,
}

impl Entry {
    /// Whether boot code may start the partition.
    pub(crate) fn is_active(&self) -> bool {
        self.status == 0x80
    }

    fn is_extended(&self) -> bool {
        EXTENDED.contains(&self.kind)
    }
}

/// The four entries of a table; none of a sector without its mark.
fn entries(table: &Sector) -> Vec<Entry> {
    let is_marked = table.ends_with(&[0x55, 0xaa]);
    let entries = table.get(446..510).filter(|_| is_marked).unwrap_or_default();
    let entry = |entry: &[u8]| {
        let byte = |at: usize| entry.get(at).copied().unwrap_or_default();
        let place = Sectors { first: u64::from(u32_at(entry, 8)), len: u64::from(u32_at(entry, 12)) };
        Entry { status: byte(0), kind: byte(4), place }
    };
    entries.chunks_exact(16).map(entry).collect()
}

/// The entries of a first sector that make sense, and their numbers. A file system's boot sector has the same mark, but no four entries that do.
pub(crate) fn primary(first: &Sector) -> impl Iterator<Item = (u32, Entry)> {
    let entries = (1u32..).zip(entries(first));
    entries.filter(|(_, entry)| matches!(entry.status, 0 | 0x80) && entry.kind != 0)
}

/// A disk, and how long its sectors are.
pub(crate) struct Disk<'a> {
    disk: &'a dyn ReadAt,
    sector_bytes: u64,
    size_bytes: u64,
}

impl<'a> Disk<'a> {
    pub(crate) fn new(disk: &'a dyn ReadAt, sector_bytes: u64) -> Self {
        Self { disk, sector_bytes, size_bytes: disk.len_bytes() }
    }

    /// The header of a GPT, if the first sector says that there is one and it is whole.
    pub(crate) fn gpt_header(&self, first: &Sector) -> Result<Option<Sector>, IoError> {
        if !is_protective(first) || self.size_bytes < 2 * self.sector_bytes {
            return Ok(None);
        }
        Ok(Some(self.table(1)?).filter(is_gpt))
    }

    /// The first bytes of a sector: the table, or the header, that is in it.
    pub(crate) fn table(&self, sector: u64) -> Result<Sector, IoError> {
        let mut table = [0; 512];
        read_any(self.disk, sector.saturating_mul(self.sector_bytes), &mut table)?;
        Ok(table)
    }

    fn partition(&self, place: Sectors, number: u32) -> Partition {
        let (offset_bytes, len_bytes) = (place.first * self.sector_bytes, place.len * self.sector_bytes);
        Partition { number, offset_bytes, len_bytes }
    }

    /// The entries of a GPT, used or not; none if the header says what cannot be.
    pub(crate) fn gpt_entries(&self, header: &[u8]) -> Result<Vec<Vec<u8>>, IoError> {
        let table = u64_at(header, 72).saturating_mul(self.sector_bytes);
        let count = usize_of_u32(u32_at(header, 80)).min(PARTITIONS_MAX);
        let entry_bytes = usize_of_u32(u32_at(header, 84));
        let len = count.saturating_mul(entry_bytes);
        let fits = table.checked_add(u64_of(len).next_multiple_of(self.sector_bytes));
        if !(128..=4096).contains(&entry_bytes) || fits.is_none_or(|end| end > self.size_bytes) {
            return Ok(Vec::new());
        }
        let mut entries = vec![0; len];
        read_any(self.disk, table, &mut entries)?;
        Ok(entries.chunks_exact(entry_bytes).map(<[u8]>::to_vec).collect())
    }

    fn gpt(&self, header: &[u8]) -> Result<Vec<Partition>, IoError> {
        let partition = |(number, entry): (u32, &Vec<u8>)| {
            let unused = entry.iter().take(16).all(|byte| *byte == 0);
            let (first, last) = (u64_at(entry, 32), u64_at(entry, 40));
            (!unused && last >= first).then(|| Partition {
                number,
                offset_bytes: first.saturating_mul(self.sector_bytes),
                len_bytes: (last - first).saturating_add(1).saturating_mul(self.sector_bytes),
            })
        };
        Ok((1u32..).zip(&self.gpt_entries(header)?).filter_map(partition).collect())
    }

    fn mbr(&self, first: &Sector) -> Partitions {
        let (mut partitions, mut logical, mut unread) = (Vec::new(), Vec::new(), None);
        for (number, entry) in primary(first) {
            if !entry.is_extended() {
                partitions.push(self.partition(entry.place, number));
            } else if unread.is_none() {
                // Behind a table that cannot be read nobody knows the numbers.
                unread = self.find_logical(entry.place, &mut logical).err();
            }
        }
        partitions.extend((LOGICAL_FROM..).zip(logical).map(|(number, place)| self.partition(place, number)));
        partitions.truncate(PARTITIONS_MAX);
        Partitions { partitions, unread }
    }

    /// Adds the logical partitions of an extended one, in the order in which Linux numbers them. The chain ends with a table that
    /// has no link, that lies outside of the extended partition or of the disk, or that was read before.
    fn find_logical(&self, extended: Sectors, logical: &mut Vec<Sectors>) -> Result<(), PartitionsError> {
        let end = extended.end().min(self.size_bytes / self.sector_bytes);
        let mut seen = Vec::new();
        // A table, and how much of the disk it is about. No link leads to before the extended partition.
        let mut at = extended;
        while (1..end).contains(&at.first) && !seen.contains(&at.first) && seen.len() < PARTITIONS_MAX {
            seen.push(at.first);
            let sector = self.table(at.first).map_err(|source| {
                let tried = format!("cannot read the table of logical partitions in sector {}", at.first);
                PartitionsError { tried: Some(tried), source }
            })?;
            let table = entries(&sector);
            for (slot, entry) in table.iter().enumerate() {
                let place = Sectors { first: at.first + entry.place.first, len: entry.place.len };
                // The third and the fourth are not used, but by OS/2, and can be anything.
                let is_sane = slot < 2 || place.end() <= at.end().min(extended.end());
                if entry.place.len > 0 && !entry.is_extended() && is_sane {
                    logical.push(place);
                }
            }
            let link = table.iter().find(|entry| entry.place.len > 0 && entry.is_extended());
            let Some(link) = link else { break };
            at = Sectors { first: extended.first + link.place.first, len: link.place.len };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use headwater_block::{ByteRange, Device, IoErrorKind};
    use headwater_testkit::{ReferenceDisk, ReferenceOptions};

    use super::*;

    const DISK_SECTORS: usize = 4096;
    /// The partitions of [`disk`]: number, first sector, length.
    const PARTITIONS: [(u32, u64, u64); 4] = [(1, 100, 200), (3, 3500, 100), (5, 1010, 90), (6, 1520, 80)];
    const PRIMARY: [(u32, u64, u64); 2] = [PARTITIONS[0], PARTITIONS[1]];

    /// Puts an entry into the table of a sector: type, first sector and length.
    fn put(disk: &mut [u8], sector: usize, slot: usize, (kind, first, len): (u8, u32, u32)) {
        let table = &mut disk[sector * 512..][..512];
        let entry = &mut table[446 + 16 * slot..][..16];
        entry[4] = kind;
        entry[8..12].copy_from_slice(&first.to_le_bytes());
        entry[12..].copy_from_slice(&len.to_le_bytes());
        table[510..].copy_from_slice(&[0x55, 0xaa]);
    }

    /// An extended partition from 1000 to 3000 between two primary ones, with tables at its start and at 1500.
    fn disk() -> Vec<u8> {
        let mut disk = vec![0; DISK_SECTORS * 512];
        put(&mut disk, 0, 0, (0x83, 100, 200));
        put(&mut disk, 0, 1, (0x0f, 1000, 2000));
        put(&mut disk, 0, 2, (0x07, 3500, 100));
        put(&mut disk, 1000, 0, (0x83, 10, 90));
        put(&mut disk, 1000, 1, (0x05, 500, 300));
        put(&mut disk, 1500, 0, (0x83, 20, 80));
        disk
    }

    /// The partition of [`put_gpt`].
    const OF_GPT: [(u32, u64, u64); 1] = [(2, 50, 100)];

    /// Puts a GPT with a header of this length behind the first sector, which does not say so yet.
    fn put_gpt(disk: &mut [u8], header_bytes: u32) {
        let entry = &mut disk[2 * 512 + 128..][..128];
        entry[..16].fill(7);
        entry[32..40].copy_from_slice(&50u64.to_le_bytes());
        entry[40..48].copy_from_slice(&149u64.to_le_bytes());
        let header = &mut disk[512..2 * 512];
        header[..8].copy_from_slice(b"EFI PART");
        header[12..16].copy_from_slice(&header_bytes.to_le_bytes());
        header[16..20].fill(0);
        header[72..80].copy_from_slice(&2u64.to_le_bytes());
        header[80..84].copy_from_slice(&4u32.to_le_bytes());
        header[84..88].copy_from_slice(&128u32.to_le_bytes());
        let sum = crc32(&disk[512..][..header_bytes as usize]);
        disk[512 + 16..512 + 20].copy_from_slice(&sum.to_le_bytes());
    }

    fn device(bytes: &[u8]) -> ReferenceDisk {
        ReferenceDisk::with_contents(bytes.to_vec(), ReferenceOptions::default())
    }

    fn shown(partitions: &[Partition]) -> Vec<(u32, u64, u64)> {
        partitions.iter().map(|p| (p.number, p.offset_bytes / 512, p.len_bytes / 512)).collect()
    }

    fn found(bytes: &[u8]) -> Vec<(u32, u64, u64)> {
        let found = read(&device(bytes));
        assert!(found.unread.is_none());
        shown(&found.partitions)
    }

    fn read(disk: &ReferenceDisk) -> Partitions {
        partitions(&(disk as &dyn Device), 512).unwrap()
    }

    #[test]
    fn logical_partitions_have_the_numbers_from_five_on() {
        for kind in [0x05, 0x0f, 0x85] {
            let mut disk = disk();
            put(&mut disk, 0, 1, (kind, 1000, 2000));
            put(&mut disk, 1000, 1, (kind, 500, 300));
            assert_eq!(found(&disk), PARTITIONS, "{kind}");
        }
        // A table that lies before the one that links to it, and one without a partition.
        let mut back = disk();
        put(&mut back, 1500, 1, (0x05, 200, 100));
        put(&mut back, 1200, 0, (0x83, 5, 50));
        assert_eq!(found(&back), [&PARTITIONS[..], &[(7, 1205, 50)][..]].concat());
        put(&mut back, 1500, 0, (0, 0, 0));
        assert_eq!(found(&back), [&PARTITIONS[..3], &[(6, 1205, 50)][..]].concat());
        // One that does not fit on the disk has its number all the same.
        let mut long = disk();
        put(&mut long, 1000, 0, (0x83, 10, 1 << 20));
        assert_eq!(found(&long), [&PRIMARY[..], &PARTITIONS[3..]].concat());
    }

    #[test]
    fn a_gpt_counts_where_the_first_sector_says_so() {
        let mut stale = disk();
        put_gpt(&mut stale, 92);
        assert_eq!(found(&stale), PARTITIONS);
        for slot in 0..4 {
            let mut disk = stale.clone();
            put(&mut disk, 0, slot, (PROTECTIVE, 1, 49));
            assert_eq!(found(&disk), OF_GPT, "{slot}");
            // Without its mark the first sector says nothing, and the whole disk is one.
            disk[511] = 0;
            assert_eq!(found(&disk), [(0, 0, DISK_SECTORS as u64)], "{slot}");
        }
    }

    #[test]
    fn a_gpt_whose_header_is_damaged_does_not_count() {
        let mut good = disk();
        put(&mut good, 0, 3, (PROTECTIVE, 1, 49));
        let of_mbr = [&PRIMARY[..], &[(4, 1, 49)][..], &PARTITIONS[2..]].concat();
        assert_eq!(found(&good), of_mbr);
        for (header_bytes, counts) in [(0, false), (91, false), (92, true), (512, true), (513, false)] {
            put_gpt(&mut good, header_bytes);
            assert_eq!(found(&good) == OF_GPT, counts, "{header_bytes}");
            assert_eq!(found(&good) == of_mbr, !counts, "{header_bytes}");
        }
        put_gpt(&mut good, 92);
        assert_eq!(found(&good), OF_GPT);
        for at in [0, 8, 12, 16, 19, 24, 56, 72, 91] {
            let mut disk = good.clone();
            disk[512 + at] ^= 1;
            assert_eq!(found(&disk), of_mbr, "{at}");
        }
    }

    #[test]
    fn a_chain_of_tables_that_leads_nowhere_ends() {
        // To the first table, to itself, outside of the extended partition, and to where no sector has a number of 32 bits.
        for link in [0, 500, 2000, u32::MAX] {
            let mut disk = disk();
            put(&mut disk, 1500, 1, (0x05, link, 300));
            put(&mut disk, 3000, 0, (0x83, 1, 50));
            assert_eq!(found(&disk), PARTITIONS, "{link}");
        }
        // Outside of the disk.
        let mut disk = disk();
        put(&mut disk, 0, 1, (0x0f, 1000, u32::MAX));
        for link in [3096, 1 << 20, u32::MAX] {
            put(&mut disk, 1500, 1, (0x05, link, u32::MAX));
            assert_eq!(found(&disk), PARTITIONS, "{link}");
        }
        for extended in [0, 4096, u32::MAX] {
            put(&mut disk, 0, 1, (0x0f, extended, u32::MAX));
            assert_eq!(found(&disk), PRIMARY, "{extended}");
        }
    }

    #[test]
    fn a_table_without_a_mark_is_none() {
        let mut disk = disk();
        disk[1500 * 512 + 510] = 0;
        assert_eq!(found(&disk), PARTITIONS[..3]);
        disk[1000 * 512 + 511] = 0;
        assert_eq!(found(&disk), PRIMARY);
    }

    #[test]
    fn the_third_and_fourth_entry_of_a_table_count_where_they_fit() {
        let mut disk = disk();
        // The first table is about 2000 sectors, the second one about 300.
        put(&mut disk, 1000, 2, (0x83, 1950, 50));
        put(&mut disk, 1000, 3, (0x83, 1951, 50));
        put(&mut disk, 1500, 2, (0x83, 290, 11));
        put(&mut disk, 1500, 3, (0x83, 290, 10));
        let logical = [(5, 1010, 90), (6, 2950, 50), (7, 1520, 80), (8, 1790, 10)];
        assert_eq!(found(&disk), [&PRIMARY[..], &logical[..]].concat());
    }

    #[test]
    fn a_chain_without_an_end_is_followed_no_further_than_it_may() {
        let mut disk = disk();
        for number in 0..300u32 {
            let table = 1000 + 4 * number as usize;
            put(&mut disk, table, 0, (0x83, 1, 2));
            put(&mut disk, table, 1, (0x05, 4 * (number + 1), 4));
        }
        let all = found(&disk);
        assert_eq!((all.len(), all[PARTITIONS_MAX - 1]), (PARTITIONS_MAX, (130, 1501, 2)));
        // Tables without partitions are read, too.
        for number in 0..300 {
            put(&mut disk, 1000 + 4 * number, 0, (0, 0, 0));
        }
        let device = device(&disk);
        assert_eq!(shown(&read(&device).partitions), PRIMARY);
        assert_eq!(device.counts().reads, 1 + PARTITIONS_MAX as u64);
    }

    #[test]
    fn a_table_that_cannot_be_read_hides_only_what_is_behind_it() {
        let device = device(&disk());
        device.fail(ByteRange::new(1500 * 512, 512).unwrap(), IoErrorKind::Corrupt);
        let found = read(&device);
        let error = found.unread.unwrap();
        assert_eq!(error.source.kind(), IoErrorKind::Corrupt);
        assert!(error.to_string().contains("logical partitions in sector 1500"), "{error}");
        assert_eq!(shown(&found.partitions), PARTITIONS[..3]);
    }

    /// A disk of which each sector became a longer one, with the same beginning.
    fn with_long_sectors(disk: &[u8]) -> Vec<u8> {
        let mut long = vec![0; disk.len() * 8];
        for (from, to) in disk.chunks(512).zip(long.chunks_mut(4096)) {
            to[..512].copy_from_slice(from);
        }
        long
    }

    #[test]
    fn tables_of_a_disk_with_long_sectors_count_in_these() {
        let long = |disk: &[u8], sector_bytes| {
            let found = partitions(&with_long_sectors(disk), sector_bytes).unwrap();
            let in_sectors = |p: &Partition| (p.number, p.offset_bytes / 4096, p.len_bytes / 4096);
            found.partitions.iter().map(in_sectors).collect::<Vec<_>>()
        };
        assert_eq!(long(&disk(), 4096), PARTITIONS);
        let mut with_gpt = disk();
        put_gpt(&mut with_gpt, 92);
        put(&mut with_gpt, 0, 0, (PROTECTIVE, 1, 49));
        // A sector of the table holds more entries than before, and the first one of these is empty.
        let mut bytes = with_long_sectors(&with_gpt);
        bytes[2 * 4096..][..512].copy_from_slice(&with_gpt[2 * 512..][..512]);
        let found = partitions(&bytes, 4096).unwrap().partitions;
        assert_eq!(found, [Partition { number: 2, offset_bytes: 50 * 4096, len_bytes: 100 * 4096 }]);
        assert_ne!(partitions(&bytes, 512).unwrap().partitions, found);
    }
}
