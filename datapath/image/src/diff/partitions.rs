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
//! A GPT counts where the first sector says that there is one and its header is whole. Otherwise it is what a disk had before
//! it got an MBR. The copy at the end of the disk is for repairs: Linux does not look at it either unless it is told to.

use headwater_block::{Device, blocking};

use crate::error::ImageError;
use crate::units::usize_of_u32;

/// The most partitions that are looked at, and the most tables that are read of an extended partition.
pub const PARTITIONS_MAX: usize = 128;

const SECTOR_BYTES: u64 = 512;
/// The type of an MBR's entry that stands for a GPT, one of four in a hybrid MBR.
const PROTECTIVE: u8 = 0xee;
/// The shortest header of a GPT. The longest one is a sector.
const GPT_HEADER_BYTES: usize = 92;
/// The types of extended partitions: of DOS, of Windows 95, of Linux.
const EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];
/// The number of the first logical partition, however many primary ones there are.
const LOGICAL_FROM: u32 = 5;

type Sector = [u8; 512];

/// A partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Partition {
    /// From 1; 0 is the whole disk.
    pub(crate) number: u32,
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u64,
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
pub(crate) struct Found {
    /// By number.
    pub(crate) partitions: Vec<Partition>,
    /// Why logical ones may be missing: one of their tables cannot be read.
    pub(crate) unread: Option<ImageError>,
}

/// The partitions of a disk; the whole disk where it has none that make sense.
pub(crate) fn find(disk: &dyn Device) -> Result<Vec<Partition>, ImageError> {
    let found = find_readable(disk)?;
    match found.unread {
        Some(e) => Err(e),
        None => Ok(found.partitions),
    }
}

/// The same, also where a table of logical partitions cannot be read.
pub(crate) fn find_readable(disk: &dyn Device) -> Result<Found, ImageError> {
    let size_bytes = disk.geometry().size_bytes;
    let mut first = [0; 512];
    blocking::read(disk, 0, &mut first)?;
    let mut header = [0; 512];
    if size_bytes >= 2 * SECTOR_BYTES {
        blocking::read(disk, SECTOR_BYTES, &mut header)?;
    }
    let is_protected = entries(&first).iter().any(|entry| entry.kind == PROTECTIVE);
    let mut found = if is_protected && is_gpt(&header) {
        Found { partitions: gpt(disk, &header)?, unread: None }
    } else {
        mbr(disk, &first)
    };
    found.partitions.retain(|partition| {
        let end = partition.offset_bytes.checked_add(partition.len_bytes);
        partition.len_bytes > 0 && partition.offset_bytes > 0 && end.is_some_and(|end| end <= size_bytes)
    });
    if found.partitions.is_empty() && found.unread.is_none() {
        found.partitions.push(Partition { number: 0, offset_bytes: 0, len_bytes: size_bytes });
    }
    Ok(found)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|tail| tail.first_chunk()).map_or(0, |four| u32::from_le_bytes(*four))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|tail| tail.first_chunk()).map_or(0, |eight| u64::from_le_bytes(*eight))
}

/// CRC-32 as in UEFI 2.10, section 5.3, and as in Ethernet: of a sector, so that a table does not pay.
pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    let bit = |crc: u32| if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
    !bytes.iter().fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| bit(crc)))
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

    fn partition(self, number: u32) -> Partition {
        Partition { number, offset_bytes: self.first * SECTOR_BYTES, len_bytes: self.len * SECTOR_BYTES }
    }
}

/// An entry of a table.
struct Entry {
    status: u8,
    kind: u8,
    place: Sectors,
}

impl Entry {
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

fn mbr(disk: &dyn Device, first: &Sector) -> Found {
    let (mut partitions, mut logical, mut unread) = (Vec::new(), Vec::new(), None);
    for (number, entry) in (1u32..).zip(entries(first)) {
        // A file system's boot sector has the same mark, but no four entries that make sense.
        if !matches!(entry.status, 0 | 0x80) || entry.kind == 0 {
            continue;
        }
        if !entry.is_extended() {
            partitions.push(entry.place.partition(number));
        } else if unread.is_none() {
            // Behind a table that cannot be read nobody knows the numbers.
            unread = find_logical(disk, entry.place, &mut logical).err();
        }
    }
    partitions.extend((LOGICAL_FROM..).zip(logical).map(|(number, place)| place.partition(number)));
    partitions.truncate(PARTITIONS_MAX);
    Found { partitions, unread }
}

/// Adds the logical partitions of an extended one, in the order in which Linux numbers them. The chain ends with a table that
/// has no link, that lies outside of the extended partition or of the disk, or that was read before.
fn find_logical(disk: &dyn Device, extended: Sectors, logical: &mut Vec<Sectors>) -> Result<(), ImageError> {
    let end = extended.end().min(disk.geometry().size_bytes / SECTOR_BYTES);
    let mut seen = Vec::new();
    // A table, and how much of the disk it is about. No link leads to before the extended partition.
    let mut at = extended;
    while (1..end).contains(&at.first) && !seen.contains(&at.first) && seen.len() < PARTITIONS_MAX {
        seen.push(at.first);
        let mut sector = [0; 512];
        blocking::read(disk, at.first * SECTOR_BYTES, &mut sector).map_err(|e| {
            let tried = format!("cannot read the table of logical partitions in sector {}", at.first);
            ImageError::from(e).context(tried)
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

#[cfg(test)]
mod tests {
    use headwater_block::{ByteRange, IoErrorKind};
    use headwater_testkit::{ReferenceDisk, ReferenceOptions};

    use super::*;
    use crate::error::ImageErrorKind;

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
        shown(&find(&device(bytes)).unwrap())
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
    fn the_sum_is_that_of_the_specification() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
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
        assert_eq!(shown(&find(&device).unwrap()), PRIMARY);
        assert_eq!(device.counts().reads, 2 + PARTITIONS_MAX as u64);
    }

    #[test]
    fn a_table_that_cannot_be_read_hides_only_what_is_behind_it() {
        let device = device(&disk());
        device.fail(ByteRange::new(1500 * 512, 512).unwrap(), IoErrorKind::Corrupt);
        let error = find(&device).unwrap_err();
        assert_eq!(error.kind(), ImageErrorKind::Damaged);
        assert!(error.to_string().contains("logical partitions in sector 1500"), "{error}");
        let found = find_readable(&device).unwrap();
        assert_eq!(shown(&found.partitions), PARTITIONS[..3]);
        assert!(found.unread.is_some());
    }
}
