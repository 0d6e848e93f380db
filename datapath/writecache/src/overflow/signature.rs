//! Detects data on a block device that is to become an overflow disk, as mkfs and pvcreate do: by the
//! signatures of file systems, partition tables and containers at its start. Not detected are for example ZFS,
//! bcache, and md metadata at the end of a device. An overflow disk has no signature of its own, because all of
//! it is encrypted; an earlier overflow disk on the device is no obstacle.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// How many bytes from the start are read: up to the superblock of Btrfs at 64 KiB.
const CHECKED_BYTES: u64 = 68 << 10;

/// Offset, signature, and name. Only signatures that encrypted bytes do not have by chance: at least four
/// bytes.
const KNOWN: &[(usize, &[u8], &str)] = &[
    (0, b"XFSB", "an XFS file system"),
    (0, b"LUKS\xba\xbe", "an encrypted LUKS container"),
    (0, b"\xfc\x4e\x2b\xa9", "a member of an md RAID"),
    (4096, b"\xfc\x4e\x2b\xa9", "a member of an md RAID"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (54, b"FAT1", "a FAT file system"),
    (82, b"FAT32", "a FAT file system"),
    (512, b"EFI PART", "a partition table (GPT)"),
    (4096, b"EFI PART", "a partition table (GPT)"),
    (0, b"LABELONE", "a volume of LVM"),
    (512, b"LABELONE", "a volume of LVM"),
    (1024, b"LABELONE", "a volume of LVM"),
    (1536, b"LABELONE", "a volume of LVM"),
    (4086, b"SWAPSPACE2", "swap space"),
    (65_526, b"SWAPSPACE2", "swap space"),
    (1024, b"\x10\x20\xf5\xf2", "an F2FS file system"),
    (32_769, b"CD001", "an ISO 9660 file system"),
    (0x1_0040, b"_BHRfS_M", "a Btrfs file system"),
];

/// The known kind of data on a device, if any.
pub(super) fn found(device: &Path) -> std::io::Result<Option<&'static str>> {
    let mut start = Vec::new();
    File::open(device)?.take(CHECKED_BYTES).read_to_end(&mut start)?;
    Ok(known(&start))
}

fn known(start: &[u8]) -> Option<&'static str> {
    let marked =
        |(at, mark, _): &&(usize, &[u8], _)| start.get(*at..).is_some_and(|tail| tail.starts_with(mark));
    if let Some((_, _, what)) = KNOWN.iter().find(marked) {
        return Some(*what);
    }
    if is_ext(start) {
        return Some("an ext2, ext3 or ext4 file system");
    }
    is_partitioned(start).then_some("a partition table (MBR)")
}

/// The signature has two bytes only, so the revision and the block size must be valid, too.
fn is_ext(start: &[u8]) -> bool {
    let word = |at: usize| {
        start.get(1024 + at..).and_then(|tail| tail.first_chunk()).map(|it| u32::from_le_bytes(*it))
    };
    let mark = start.get(1080..1082);
    mark == Some(b"\x53\xef") && word(76).is_some_and(|it| it <= 1) && word(24).is_some_and(|it| it <= 6)
}

/// Likewise for a partition table: the status byte of each of its four entries must be 0 or 0x80, and at least
/// one entry must have a type.
fn is_partitioned(start: &[u8]) -> bool {
    let entries = start.get(446..510).unwrap_or_default().chunks_exact(16);
    let mut types = entries.clone().filter_map(|entry| entry.get(4));
    let mut states = entries.filter_map(|entry| entry.first());
    start.get(510..512) == Some(b"\x55\xaa")
        && types.any(|it| *it != 0)
        && states.all(|it| matches!(it, 0 | 0x80))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn data_of_other_programs_is_recognised() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (program, options, says) in
            [("/sbin/mkfs.ext4", vec!["-q", "-F"], "ext4"), ("/sbin/mkswap", vec!["-q"], "swap")]
        {
            file.as_file().set_len(0).unwrap();
            file.as_file().set_len(16 << 20).unwrap();
            assert_eq!(found(file.path()).unwrap(), None);
            let made = Command::new(program).args(options).arg(file.path()).status();
            assert!(made.expect("e2fsprogs and util-linux are there").success());
            let what = found(file.path()).unwrap().unwrap_or_default();
            assert!(what.contains(says), "{program}: {what}");
        }
        let mut table = vec![0; 512];
        table[510..].copy_from_slice(b"\x55\xaa");
        assert_eq!(known(&table), None);
        table[450] = 0x83;
        assert!(known(&table).unwrap().contains("MBR"));
        table[446] = 7;
        assert_eq!(known(&table), None);
        assert_eq!(known(b"short"), None);
    }
}
