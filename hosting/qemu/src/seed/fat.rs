//! Writes a FAT12 file system with a few files in its root directory: all that a seed disk needs.
//!
//! ```text
//!   sector 0      1 .. 12   13 .. 24   25 .. 32         33 ..
//!   boot sector   FAT       its copy   root directory   clusters 2, 3, ... (files, each in one run)
//! ```
//! Every file has a long name. The short names are only there because the format demands them.

const SECTOR_BYTES: usize = 512;
const SECTORS_PER_CLUSTER: u8 = 4;
const CLUSTER_BYTES: usize = SECTOR_BYTES * 4;
/// A file system with 4085 or more clusters is FAT16 by definition.
const MAX_CLUSTERS: usize = 4084;
/// Some tools do not accept smaller disks.
const MIN_CLUSTERS: usize = 180;
/// 1.5 bytes for each cluster and for the two reserved entries.
const FAT_SECTORS: u16 = 12;
const ROOT_ENTRIES: u16 = 128;
const ENTRY_BYTES: usize = 32;
/// UTF-16 units of a long name in one directory entry, at these offsets.
const NAME_OFFSETS: [usize; 13] = [1, 3, 5, 7, 9, 14, 16, 18, 20, 22, 24, 28, 30];
const FIRST_CLUSTER: usize = 2;
const END_OF_FILE: u16 = 0xfff;
const MEDIA_FIXED: u8 = 0xf8;
const ATTRIBUTE_LABEL: u8 = 0x08;
const ATTRIBUTE_READ_ONLY: u8 = 0x01;
const ATTRIBUTE_LONG_NAME: u8 = 0x0f;
/// 1 January 1980, the first possible day: the disk must not depend on the clock.
const DATE: u16 = (1 << 5) | 1;

/// The bytes of a file system that holds `files` (ASCII name, content), or `None` if they do not fit.
pub(super) fn image(label: &str, volume_id: u32, files: &[(String, Vec<u8>)]) -> Option<Vec<u8>> {
    let mut fat = vec![0; usize::from(FAT_SECTORS) * SECTOR_BYTES];
    set_entry(&mut fat, 0, 0xf00 | u16::from(MEDIA_FIXED));
    set_entry(&mut fat, 1, END_OF_FILE);
    let mut root = Vec::new();
    let label = padded(label);
    root.extend_from_slice(&entry(label, ATTRIBUTE_LABEL, 0, 0));
    let mut data = Vec::new();
    for (number, (name, content)) in files.iter().enumerate() {
        let first = FIRST_CLUSTER + data.len() / CLUSTER_BYTES;
        let clusters = content.len().div_ceil(CLUSTER_BYTES);
        if first + clusters > FIRST_CLUSTER + MAX_CLUSTERS {
            return None;
        }
        for cluster in first..first + clusters {
            let last = cluster + 1 == first + clusters;
            set_entry(&mut fat, cluster, if last { END_OF_FILE } else { u16::try_from(cluster + 1).ok()? });
        }
        data.extend_from_slice(content);
        data.resize(data.len().next_multiple_of(CLUSTER_BYTES), 0);
        let short = padded(&format!("FILE{number:04}"));
        root.extend_from_slice(&long_name(name, short));
        let start = if content.is_empty() { 0 } else { u16::try_from(first).ok()? };
        root.extend_from_slice(&entry(short, ATTRIBUTE_READ_ONLY, start, u32::try_from(content.len()).ok()?));
    }
    let root_bytes = usize::from(ROOT_ENTRIES) * ENTRY_BYTES;
    if root.len() > root_bytes {
        return None;
    }
    root.resize(root_bytes, 0);
    data.resize(data.len().max(MIN_CLUSTERS * CLUSTER_BYTES), 0);

    let mut image = vec![0; SECTOR_BYTES];
    for part in [&fat, &fat, &root, &data] {
        image.extend_from_slice(part);
    }
    let sectors = u16::try_from(image.len() / SECTOR_BYTES).ok()?;
    image.get_mut(..SECTOR_BYTES)?.copy_from_slice(&boot_sector(label, volume_id, sectors));
    Some(image)
}

fn boot_sector(label: [u8; 11], volume_id: u32, sectors: u16) -> [u8; SECTOR_BYTES] {
    let fields: [&[u8]; 21] = [
        &[0xeb, 0x3c, 0x90],
        b"HEADWATR",
        &512_u16.to_le_bytes(),
        &[SECTORS_PER_CLUSTER],
        &1_u16.to_le_bytes(), // reserved sectors: this one
        &[2],                 // FATs
        &ROOT_ENTRIES.to_le_bytes(),
        &sectors.to_le_bytes(),
        &[MEDIA_FIXED],
        &FAT_SECTORS.to_le_bytes(),
        &32_u16.to_le_bytes(), // sectors a track and heads: nobody looks, but they must not be 0
        &64_u16.to_le_bytes(),
        &0_u32.to_le_bytes(), // hidden sectors
        &0_u32.to_le_bytes(), // sectors, where 16 bits are too few
        &[0x80],              // drive number
        &[0],
        &[0x29], // extended boot signature: serial number, label and type follow
        &volume_id.to_le_bytes(),
        &label,
        b"FAT12   ",
        &[0xf4, 0xeb, 0xfd], // hlt; jmp: nothing boots from here
    ];
    let mut sector = [0; SECTOR_BYTES];
    let bytes = fields.concat();
    for (to, from) in sector.iter_mut().zip(bytes) {
        *to = from;
    }
    sector[SECTOR_BYTES - 2] = 0x55;
    sector[SECTOR_BYTES - 1] = 0xaa;
    sector
}

/// An 8.3 name, or a label, without its dot.
fn padded(name: &str) -> [u8; 11] {
    let mut out = [b' '; 11];
    for (to, from) in out.iter_mut().zip(name.bytes()) {
        *to = from;
    }
    out
}

fn entry(name: [u8; 11], attributes: u8, first_cluster: u16, size_bytes: u32) -> [u8; ENTRY_BYTES] {
    let mut entry = [0; ENTRY_BYTES];
    entry[..11].copy_from_slice(&name);
    entry[11] = attributes;
    entry[16..18].copy_from_slice(&DATE.to_le_bytes()); // created
    entry[18..20].copy_from_slice(&DATE.to_le_bytes()); // accessed
    entry[24..26].copy_from_slice(&DATE.to_le_bytes()); // modified
    entry[26..28].copy_from_slice(&first_cluster.to_le_bytes());
    entry[28..32].copy_from_slice(&size_bytes.to_le_bytes());
    entry
}

/// The entries before a file's own one: its name in pieces of 13, the last piece first.
fn long_name(name: &str, short: [u8; 11]) -> Vec<u8> {
    let checksum = short.iter().fold(0_u8, |sum, &byte| sum.rotate_right(1).wrapping_add(byte));
    // The name ends with one 0 and is filled up with 0xffff, unless it fills its last piece.
    let mut units: Vec<u16> = name.encode_utf16().collect();
    if !units.len().is_multiple_of(NAME_OFFSETS.len()) {
        units.push(0);
        units.resize(units.len().next_multiple_of(NAME_OFFSETS.len()), 0xffff);
    }
    let pieces = units.chunks(NAME_OFFSETS.len());
    let count = pieces.len();
    let mut out = Vec::new();
    for (number, piece) in pieces.enumerate().rev() {
        let mut entry = [0; ENTRY_BYTES];
        let last = if number + 1 == count { 0x40 } else { 0 };
        // Names here have a few pieces; 20 are possible.
        entry[0] = u8::try_from(number + 1).unwrap_or(u8::MAX) | last;
        entry[11] = ATTRIBUTE_LONG_NAME;
        entry[13] = checksum;
        for (&offset, unit) in NAME_OFFSETS.iter().zip(piece) {
            entry[offset..offset + 2].copy_from_slice(&unit.to_le_bytes());
        }
        out.extend_from_slice(&entry);
    }
    out
}

/// Entries have 12 bits: two of them share three bytes.
fn set_entry(fat: &mut [u8], cluster: usize, value: u16) {
    let at = cluster + cluster / 2;
    let [low, high] = value.to_le_bytes();
    if cluster.is_multiple_of(2) {
        fat[at] = low;
        fat[at + 1] = (fat[at + 1] & 0xf0) | (high & 0x0f);
    } else {
        fat[at] = (fat[at] & 0x0f) | (low << 4);
        fat[at + 1] = (high << 4) | (low >> 4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_much_is_refused() {
        let most = MAX_CLUSTERS * CLUSTER_BYTES;
        assert!(image("X", 0, &[("a".into(), vec![1; most])]).is_some());
        assert!(image("X", 0, &[("a".into(), vec![1; most + 1])]).is_none());
        let many: Vec<_> = (0..100).map(|n| (format!("file{n}"), Vec::new())).collect();
        assert!(image("X", 0, &many).is_none());
    }

    #[test]
    fn entries_of_twelve_bits_do_not_disturb_each_other() {
        let mut fat = [0; 6];
        set_entry(&mut fat, 0, 0xabc);
        set_entry(&mut fat, 1, 0xdef);
        set_entry(&mut fat, 2, 0x123);
        set_entry(&mut fat, 1, 0x456);
        assert_eq!(fat, [0xbc, 0x6a, 0x45, 0x23, 0x01, 0]);
    }
}
