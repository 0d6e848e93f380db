//! What is in a partition, by its magic numbers: file systems that are read, and everything else, which is only named.

use crate::crc::crc32_from;
use crate::ext::{is_ext, kind_of};
use crate::fat::is_fat;
use crate::fields::{has, u16_at, u32_at};
use crate::{Bytes, Fault, lvm, ntfs};

/// The longest beginning that has magic numbers: that of a Reiser4 or a Btrfs ends at 68 KiB.
const BEGIN_BYTES: usize = 72 << 10;
/// An area of swap is known by the end of its first page, whose length depends on the machine.
const PAGES_BYTES: [usize; 4] = [4096, 8192, 16_384, 65_536];

macro_rules! kinds {
    ($($(#[doc = $doc:literal])+ $kind:ident => $name:literal),+ $(,)?) => {
        /// A file system, or something else that fills a partition.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind {
            $($(#[doc = $doc])+ $kind),+
        }

        impl Kind {
            /// Its name, for messages.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name),+
                }
            }
        }
    };
}

kinds! {
    /// No journal, and no features of ext4.
    Ext2 => "ext2",
    /// A journal, and no features of ext4.
    Ext3 => "ext3",
    /// Any feature of ext4.
    Ext4 => "ext4",
    /// FAT12, FAT16 or FAT32.
    Fat => "FAT",
    /// NTFS.
    Ntfs => "NTFS",
    /// The journal of an ext3 or ext4 on another device.
    ExtJournal => "the journal of an ext3 or ext4 on another device",
    /// exFAT.
    ExFat => "exFAT",
    /// ReFS of Windows.
    Refs => "ReFS",
    /// A BitLocker volume.
    BitLocker => "BitLocker, encrypted",
    /// A LUKS volume.
    Luks => "LUKS, encrypted",
    /// XFS.
    Xfs => "XFS",
    /// Btrfs.
    Btrfs => "Btrfs",
    /// F2FS.
    F2fs => "F2FS",
    /// JFS.
    Jfs => "JFS",
    /// ReiserFS.
    Reiser => "ReiserFS",
    /// NILFS2.
    Nilfs => "NILFS2",
    /// Bcachefs.
    Bcachefs => "Bcachefs",
    /// A disk of a ZFS pool.
    Zfs => "ZFS",
    /// UFS of the BSDs.
    Ufs => "UFS",
    /// HFS+ of macOS.
    HfsPlus => "HFS+",
    /// APFS of macOS.
    Apfs => "APFS",
    /// VMFS of ESXi.
    Vmfs => "VMFS",
    /// SquashFS.
    Squash => "SquashFS",
    /// EROFS.
    Erofs => "EROFS",
    /// ISO 9660, as on CDs.
    Iso9660 => "ISO 9660",
    /// UDF, as on DVDs.
    Udf => "UDF",
    /// Swap space of Linux.
    Swap => "swap space",
    /// A physical volume of LVM2.
    Lvm => "LVM",
    /// A member of a Linux software RAID.
    Raid => "a member of a Linux RAID",
    /// Bcache.
    Bcache => "Bcache",
    /// VDO: compressed and deduplicated.
    Vdo => "VDO",
}

impl Kind {
    /// Whether [`crate::open`] reads it.
    pub fn is_read(self) -> bool {
        matches!(self, Self::Ext2 | Self::Ext3 | Self::Ext4 | Self::Fat | Self::Ntfs)
    }

    /// Whether [`crate::open_for_scan`] finds the owners of its blocks.
    pub fn is_scanned(self) -> bool {
        self.is_read() || matches!(self, Self::Xfs | Self::Btrfs)
    }
}

/// What was found, and what it says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// What it is.
    pub kind: Kind,
    /// The volumes of an LVM, as `group/volume`, as far as they can be read.
    pub volumes: Vec<String>,
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.kind.name())?;
        if !self.volumes.is_empty() {
            write!(f, " with the volumes {}", self.volumes.join(", "))?;
        }
        Ok(())
    }
}

/// Magic numbers of what contains others, at their places. These come first: a RAID member or a BitLocker volume can hold an old one.
const CONTAINERS: &[(Kind, usize, &[u8])] = &[
    (Kind::Luks, 0, b"LUKS\xba\xbe"),
    (Kind::Raid, 0, b"\xfc\x4e\x2b\xa9"),
    (Kind::Raid, 4096, b"\xfc\x4e\x2b\xa9"),
    (Kind::BitLocker, 3, b"-FVE-FS-"),
    (Kind::Bcache, 4096 + 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
    (Kind::Vdo, 0, b"dmvdo001"),
];
/// Magic numbers of file systems at their places. Those beyond the first sector can also be data of a FAT or an NTFS.
const MAGIC: &[(Kind, usize, &[u8])] = &[
    (Kind::Bcachefs, 4096 + 24, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"),
    (Kind::ExFat, 3, b"EXFAT   "),
    (Kind::Refs, 3, b"ReFS\0\0\0\0"),
    (Kind::Xfs, 0, b"XFSB"),
    (Kind::Squash, 0, b"hsqs"),
    (Kind::Squash, 0, b"sqsh"),
    (Kind::Apfs, 32, b"NXSB"),
    (Kind::F2fs, 1024, b"\x10\x20\xf5\xf2"),
    (Kind::Erofs, 1024, b"\xe2\xe1\xf5\xe0"),
    (Kind::HfsPlus, 1024, b"H+\0\x04"),
    (Kind::HfsPlus, 1024, b"HX\0\x05"),
    (Kind::Btrfs, 0x1_0040, b"_BHRfS_M"),
    (Kind::Reiser, 0x1_0034, b"ReIsErFs"),
    (Kind::Reiser, 0x1_0034, b"ReIsEr2Fs"),
    (Kind::Reiser, 0x1_0034, b"ReIsEr3Fs"),
    (Kind::Jfs, 0x8000, b"JFS1"),
    (Kind::Iso9660, 0x8001, b"CD001"),
    (Kind::Udf, 0x8001, b"BEA01"),
    (Kind::Ufs, 8192 + 1372, b"\x54\x19\x01\x00"),
    (Kind::Ufs, 65_536 + 1372, b"\x19\x01\x54\x19"),
];
/// No superblock of NILFS2 is shorter: its sum ends there.
const NILFS_BYTES_MIN: usize = 20;
/// Beyond the beginning: VMFS 5 and 6.
const VMFS_AT: u64 = 0x10_0000;
const VMFS: [&[u8]; 2] = [b"\x0d\xd0\x01\xc0", b"\x5e\xf1\xab\x2f"];
/// Superblocks of a ZFS, of which a label has 128, from here on.
const ZFS_AT: u64 = 128 << 10;
const ZFS_BYTES: usize = 128 << 10;
const ZFS: [u8; 8] = 0x00ba_b10c_u64.to_le_bytes();
/// The superblock of a RAID of version 0.90 is in the last 64 KiB that are whole, one of version 1.0 8 KiB before the end.
const RAID_UNIT: u64 = 64 << 10;
const RAID_END: u64 = 8 << 10;

/// What is in a partition, if that is known.
pub fn identify(bytes: &mut Bytes) -> Result<Option<Found>, Fault> {
    let mut begin = vec![0; BEGIN_BYTES.min(crate::units::usize_of(bytes.len()))];
    bytes.read(0, &mut begin)?;
    let of_kind = |kind| Ok(Some(Found { kind, volumes: Vec::new() }));
    if let Some(label) = lvm::label_of(&begin) {
        let volumes = lvm::volumes(bytes, &label).unwrap_or_default();
        return Ok(Some(Found { kind: Kind::Lvm, volumes }));
    }
    let known = |list: &[(Kind, usize, &[u8])]| {
        list.iter().find(|(_, at, magic)| has(&begin, *at, magic)).map(|(kind, ..)| *kind)
    };
    if let Some(kind) = known(CONTAINERS) {
        return of_kind(kind);
    }
    // Their boot sectors say more than a magic number that can be a part of a file.
    if let Some(boot) = begin.first_chunk() {
        if is_fat(boot) {
            return of_kind(Kind::Fat);
        }
        if ntfs::is_one(boot) {
            return of_kind(Kind::Ntfs);
        }
    }
    if let Some(kind) = known(MAGIC) {
        return of_kind(kind);
    }
    if begin.get(1024..).is_some_and(is_nilfs) {
        return of_kind(Kind::Nilfs);
    }
    let is_swap =
        |page: &usize| has(&begin, page - 10, b"SWAPSPACE2") || has(&begin, page - 10, b"SWAP-SPACE");
    if PAGES_BYTES.iter().any(is_swap) {
        return of_kind(Kind::Swap);
    }
    // The end comes first: a RAID of version 1.0 or 0.90 begins with the file system that is in it.
    if is_raid_by_its_end(bytes)? {
        return of_kind(Kind::Raid);
    }
    if let Some(superblock) = begin.get(1024..).filter(|superblock| is_ext(superblock)) {
        return of_kind(kind_of(superblock));
    }
    if is_far(bytes, VMFS_AT, &VMFS)? {
        return of_kind(Kind::Vmfs);
    }
    if is_zfs(bytes)? {
        return of_kind(Kind::Zfs);
    }
    Ok(None)
}

/// The magic number of NILFS2 has two bytes, so the sum of its superblock counts as well.
fn is_nilfs(superblock: &[u8]) -> bool {
    let bytes = usize::from(u16_at(superblock, 8));
    let Some(summed) = superblock.get(..bytes).filter(|_| (NILFS_BYTES_MIN..=1024).contains(&bytes)) else {
        return false;
    };
    let mut summed = summed.to_vec();
    // The sum counts as zero in the sum.
    summed.get_mut(16..20).unwrap_or_default().fill(0);
    has(superblock, 6, b"\x34\x34") && crc32_from(u32_at(superblock, 12), &summed) == u32_at(superblock, 16)
}

fn is_far(bytes: &mut Bytes, at: u64, magic: &[&[u8]]) -> Result<bool, Fault> {
    if bytes.len() < at + 8 {
        return Ok(false);
    }
    let mut found = [0; 8];
    bytes.read(at, &mut found)?;
    Ok(magic.iter().any(|magic| found.starts_with(magic)))
}

fn is_raid_by_its_end(bytes: &mut Bytes) -> Result<bool, Fault> {
    const MAGIC: [&[u8]; 1] = [b"\xfc\x4e\x2b\xa9"];
    let Some(last) = (bytes.len() / RAID_UNIT).checked_sub(1) else { return Ok(false) };
    let late = bytes.len().saturating_sub(RAID_END) / 4096 * 4096;
    Ok(is_far(bytes, last * RAID_UNIT, &MAGIC)? || is_far(bytes, late, &MAGIC)?)
}

fn is_zfs(bytes: &mut Bytes) -> Result<bool, Fault> {
    if bytes.len() < ZFS_AT + crate::units::u64_of(ZFS_BYTES) {
        return Ok(false);
    }
    let mut superblocks = vec![0; ZFS_BYTES];
    bytes.read(ZFS_AT, &mut superblocks)?;
    let is_one = |block: &[u8]| block.starts_with(&ZFS) || u32_at(block, 4).swap_bytes() == 0x00ba_b10c;
    Ok(superblocks.chunks(1024).any(is_one))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use headwater_block::Device;
    use headwater_testkit::{ReferenceDisk, ReferenceOptions, run};

    use super::*;
    use crate::Partition;

    /// What a disk with these bytes is, which programs of a package made on an empty file.
    fn made(package: &str, (program, arguments): (&str, &[&str]), put: &[(usize, &[u8])]) -> Option<Kind> {
        let dir = tempfile::tempdir().unwrap();
        let raw = dir.path().join("disk.raw");
        std::fs::File::create(&raw).unwrap().set_len(160 << 20).unwrap();
        run(package, program, &[arguments, &[raw.to_str().unwrap()]].concat());
        let mut bytes = std::fs::read(&raw).unwrap();
        for (at, magic) in put {
            bytes[*at..][..magic.len()].copy_from_slice(magic);
        }
        let whole = Partition { number: 0, offset_bytes: 0, len_bytes: bytes.len() as u64 };
        let disk: Arc<dyn Device> =
            Arc::new(ReferenceDisk::with_contents(bytes, ReferenceOptions::default()));
        identify(&mut Bytes::new(Arc::new(disk), &whole)).unwrap().map(|found| found.kind)
    }

    #[test]
    fn a_boot_sector_counts_before_magic_numbers_in_files() {
        let strange: [(usize, &[u8]); 4] = [
            (1024, b"\x10\x20\xf5\xf2"),
            (0x1_0040, b"_BHRfS_M"),
            (0x8001, b"CD001"),
            (4096 - 10, b"SWAPSPACE2"),
        ];
        for put in strange {
            assert_eq!(made("ntfs-3g", ("mkntfs", &["-qFQ"]), &[put]), Some(Kind::Ntfs), "{put:?}");
            assert_eq!(made("dosfstools", ("mkfs.vfat", &[]), &[put]), Some(Kind::Fat), "{put:?}");
        }
        // A volume that BitLocker took over.
        assert_eq!(made("ntfs-3g", ("mkntfs", &["-qFQ"]), &[(3, b"-FVE-FS-")]), Some(Kind::BitLocker));
    }

    #[test]
    fn nilfs_is_known_by_the_sum_of_its_superblock() {
        let nilfs = ("mkfs.nilfs2", &["-q"][..]);
        assert_eq!(made("nilfs-tools", nilfs, &[]), Some(Kind::Nilfs));
        assert_eq!(made("nilfs-tools", nilfs, &[(1024 + 100, b"x")]), None);
        assert_eq!(made("coreutils", ("true", &[]), &[(1024 + 6, b"\x34\x34")]), None);
    }
}
