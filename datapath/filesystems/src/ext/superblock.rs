//! The superblock: sizes, features and where the descriptors of block groups are.

use crate::fields::{has, u8_at, u16_at, u32_at, u64_at};
use crate::units::usize_of;
use crate::{Fault, Kind, fault};

/// The superblock's offset in the partition, and its length.
pub(super) const SUPERBLOCK_AT: u64 = 1024;
pub(super) const SUPERBLOCK_BYTES: usize = 1024;
const MAGIC_AT: usize = 0x38;
const MAGIC: [u8; 2] = [0x53, 0xef];
/// The largest `s_log_block_size`: blocks have 2^(10 + this) bytes, and Linux reads blocks of at most 64 KiB.
const LOG_BLOCK_BYTES_MAX: u32 = 6;
/// The most block groups: with the usual 128 MiB each, 512 TiB.
const GROUPS_MAX: u64 = 1 << 22;

/// The `incompat` features: a reader that lacks one cannot read the file system.
pub(super) mod incompat {
    pub(crate) const FILE_TYPE: u32 = 0x2;
    pub(crate) const RECOVER: u32 = 0x4;
    pub(crate) const JOURNAL_DEVICE: u32 = 0x8;
    pub(crate) const META_BG: u32 = 0x10;
    /// 64BIT: numbers of blocks have more than 32 bits.
    pub(crate) const WIDE: u32 = 0x80;
    /// The `incompat` features that this reader supports.
    pub(crate) const KNOWN: u32 = FILE_TYPE
        | RECOVER
        | META_BG
        | WIDE
        | 0x40 // extents
        | 0x100 // multiple mount protection
        | 0x200 // flexible groups
        | 0x400 // large extended attributes
        | 0x2000 // seed of checksums
        | 0x4000 // large directories
        | 0x8000 // inline data
        | 0x1_0000 // encryption: names and contents are read as they are stored
        | 0x2_0000; // casefold: names match in upper and lower case
    pub(crate) const OF_EXT2: u32 = FILE_TYPE | META_BG;
    pub(crate) const OF_EXT3: u32 = OF_EXT2 | RECOVER;
    pub(crate) const MULTIPLE_MOUNT: u32 = 0x100;
    pub(crate) const LARGE_DIRECTORIES: u32 = 0x4000;
}

mod compat {
    pub(super) const JOURNAL: u32 = 0x4;
    pub(super) const SPARSE_SUPER_2: u32 = 0x200;
}

/// The `ro_compat` features: only a writer must know them, and some change what a reader may rely on.
mod ro_compat {
    pub(super) const SPARSE_SUPER: u32 = 0x1;
    pub(super) const GDT_CSUM: u32 = 0x10;
    pub(super) const METADATA_CSUM: u32 = 0x400;
    /// Sparse superblocks, large files, directories as trees.
    pub(super) const OF_EXT3: u32 = 0x7;
}

/// What the superblock says.
#[derive(Clone, Debug)]
pub(super) struct Superblock {
    pub(super) block_bytes: u64,
    pub(super) blocks: u64,
    pub(super) first_block: u64,
    pub(super) blocks_per_group: u64,
    pub(super) groups: u64,
    pub(super) inodes: u64,
    pub(super) inodes_per_group: u64,
    pub(super) inode_bytes: u64,
    pub(super) descriptor_bytes: u64,
    pub(super) incompat: u32,
    compat: u32,
    ro_compat: u32,
    first_meta_bg: u64,
    backups: [u32; 2],
    pub(super) first_inode: u64,
    /// The inode of the internal journal; 0 if the file system has none.
    pub(super) journal: u64,
    /// Inodes of the quota files and of the list of orphans.
    pub(super) special: [u64; 4],
    pub(super) mount_protection: u64,
}

/// Whether this is the superblock of an ext file system.
pub(crate) fn is_ext(superblock: &[u8]) -> bool {
    has(superblock, MAGIC_AT, &MAGIC)
}

/// What an ext file system is called, by its features.
pub(crate) fn kind_of(superblock: &[u8]) -> Kind {
    let (compat, incompat, ro_compat) =
        (u32_at(superblock, 0x5c), u32_at(superblock, 0x60), u32_at(superblock, 0x64));
    match () {
        () if incompat & incompat::JOURNAL_DEVICE != 0 => Kind::ExtJournal,
        () if incompat & !incompat::OF_EXT3 != 0 || ro_compat & !ro_compat::OF_EXT3 != 0 => Kind::Ext4,
        () if compat & compat::JOURNAL != 0 => Kind::Ext3,
        () if incompat & !incompat::OF_EXT2 != 0 => Kind::Ext4,
        () => Kind::Ext2,
    }
}

impl Superblock {
    /// Reads a superblock of a partition of this length.
    pub(super) fn of(block: &[u8], partition_bytes: u64) -> Result<Self, Fault> {
        if !is_ext(block) {
            return Err(fault("it has no superblock of ext2, ext3 or ext4"));
        }
        let log_block_bytes = u32_at(block, 0x18);
        if log_block_bytes > LOG_BLOCK_BYTES_MAX {
            let log = u64::from(log_block_bytes) + 10;
            return Err(fault(format!("its superblock is invalid: it has blocks of 2^{log} bytes")));
        }
        let (compat, incompat, ro_compat) = (u32_at(block, 0x5c), u32_at(block, 0x60), u32_at(block, 0x64));
        let unknown = incompat & !incompat::KNOWN;
        if unknown != 0 {
            let why = format!("it has features that headwater cannot read: {unknown:#x} of \"incompat\"");
            return Err(fault(why));
        }
        let is_wide = incompat & incompat::WIDE != 0;
        let is_old = u32_at(block, 0x4c) == 0;
        let high = if is_wide { u64::from(u32_at(block, 0x150)) << 32 } else { 0 };
        let or = |given: u64, is_given: bool, usual: u64| if is_given { given } else { usual };
        let mut found = Self {
            block_bytes: 1024 << log_block_bytes,
            blocks: high | u64::from(u32_at(block, 0x4)),
            first_block: u32_at(block, 0x14).into(),
            blocks_per_group: u32_at(block, 0x20).into(),
            groups: 0,
            inodes: u32_at(block, 0).into(),
            inodes_per_group: u32_at(block, 0x28).into(),
            inode_bytes: or(u16_at(block, 0x58).into(), !is_old, 128),
            descriptor_bytes: or(u16_at(block, 0xfe).into(), is_wide, 32),
            incompat,
            compat,
            ro_compat,
            first_meta_bg: u32_at(block, 0x104).into(),
            backups: [u32_at(block, 0x24c), u32_at(block, 0x250)],
            first_inode: or(u32_at(block, 0x54).into(), !is_old, 11),
            journal: or(u32_at(block, 0xe0).into(), compat & compat::JOURNAL != 0, 0),
            special: [0x240, 0x244, 0x26c, 0x280].map(|at| u32_at(block, at).into()),
            mount_protection: match incompat & incompat::MULTIPLE_MOUNT {
                0 => 0,
                _ => u64_at(block, 0x168),
            },
        };
        if u8_at(block, 0x175) > 1 {
            return Err(fault("it has checksums of an unknown kind"));
        }
        found.check(partition_bytes)?;
        Ok(found)
    }

    fn check(&mut self, partition_bytes: u64) -> Result<(), Fault> {
        let bits = self.block_bytes * 8;
        // With clusters, groups have more blocks than a block has bits: up to as many times as a cluster has blocks.
        let is_sound = self.blocks_per_group > 0
            && self.blocks_per_group <= bits << 16
            && self.blocks > self.first_block
            && self.inodes_per_group > 0
            && self.inodes_per_group <= bits
            && self.inode_bytes.is_power_of_two()
            && (128..=self.block_bytes).contains(&self.inode_bytes)
            && self.descriptor_bytes.is_power_of_two()
            && (32..=1024).contains(&self.descriptor_bytes);
        if !is_sound {
            return Err(fault("its superblock is invalid"));
        }
        self.groups = (self.blocks - self.first_block).div_ceil(self.blocks_per_group);
        if self.groups > GROUPS_MAX {
            return Err(fault(format!("it has {} block groups, more than {GROUPS_MAX}", self.groups)));
        }
        if self.blocks > partition_bytes / self.block_bytes {
            let bytes = self.blocks.saturating_mul(self.block_bytes);
            return Err(fault(format!(
                "the file system is larger than its partition: {bytes} bytes in {partition_bytes}"
            )));
        }
        self.inodes = self.inodes.min(self.groups.saturating_mul(self.inodes_per_group));
        Ok(())
    }

    /// Whether the file system was not unmounted, so the journal must be replayed.
    pub(super) fn needs_recovery(&self) -> bool {
        self.incompat & incompat::RECOVER != 0
    }

    pub(super) fn has_journal(&self) -> bool {
        self.compat & compat::JOURNAL != 0
    }

    pub(super) fn has(&self, incompat: u32) -> bool {
        self.incompat & incompat != 0
    }

    /// Whether descriptors say which inodes were never used.
    pub(super) fn has_group_sums(&self) -> bool {
        self.ro_compat & (ro_compat::GDT_CSUM | ro_compat::METADATA_CSUM) != 0
    }

    pub(super) fn group_at(&self, group: u64) -> u64 {
        self.first_block.saturating_add(group.saturating_mul(self.blocks_per_group))
    }

    /// The block of the first superblock.
    pub(super) fn superblock_block(&self) -> u64 {
        SUPERBLOCK_AT / self.block_bytes
    }

    /// Whether a group begins with a copy of the superblock.
    pub(super) fn has_copy(&self, group: u64) -> bool {
        if group == 0 {
            return true;
        }
        if self.compat & compat::SPARSE_SUPER_2 != 0 {
            return self.backups.iter().any(|backup| u64::from(*backup) == group);
        }
        let is_power = |base: u64| {
            let mut power = base;
            while power < group {
                power *= base;
            }
            power == group
        };
        self.ro_compat & ro_compat::SPARSE_SUPER == 0
            || group == 1
            || [3, 5, 7].iter().any(|base| is_power(*base))
    }

    fn descriptors_per_block(&self) -> u64 {
        self.block_bytes / self.descriptor_bytes
    }

    /// How many blocks of descriptors follow each copy of the superblock.
    pub(super) fn descriptor_blocks(&self) -> u64 {
        let all = self.groups.div_ceil(self.descriptors_per_block());
        if self.has(incompat::META_BG) { all.min(self.first_meta_bg) } else { all }
    }

    /// With META_BG, block groups are combined into meta block groups: as many as have their descriptors in one block, which is
    /// in the meta block group itself. Returns the first group of the meta block group that holds the descriptor of `group`,
    /// and the number of its groups. `None`: the descriptor is in the table after the superblock.
    fn meta_group(&self, group: u64) -> Option<(u64, u64)> {
        let groups = self.descriptors_per_block();
        let is_meta = self.has(incompat::META_BG) && group / groups >= self.first_meta_bg;
        is_meta.then_some((group / groups * groups, groups))
    }

    /// The block in this group that holds the descriptors of its meta block group: the group's first block, or the one after
    /// its copy of the superblock.
    fn meta_descriptors(&self, group: u64) -> u64 {
        // With blocks of 1 KiB, the first superblock is in block 1. If the first group begins with block 0, that block is before it.
        let is_shifted = group == 0 && self.first_block == 0 && self.block_bytes == 1024;
        self.group_at(group) + u64::from(self.has_copy(group)) + u64::from(is_shifted)
    }

    /// The block in this group that holds the descriptors of its meta block group: only the first, second and last group of a
    /// meta block group have one.
    pub(super) fn meta_copy(&self, group: u64) -> Option<u64> {
        let (first, groups) = self.meta_group(group)?;
        let number = group - first;
        let is_kept = number < 2 || number == groups - 1;
        is_kept.then(|| self.meta_descriptors(group))
    }

    /// Where the descriptor of a group is, in bytes.
    pub(super) fn descriptor_at(&self, group: u64) -> u64 {
        let per_block = self.descriptors_per_block();
        let block = match self.meta_group(group) {
            Some((first, _)) => self.meta_descriptors(first),
            None => self.superblock_block() + 1 + group / per_block,
        };
        block.saturating_mul(self.block_bytes).saturating_add(group % per_block * self.descriptor_bytes)
    }

    /// How many blocks the inodes of a group take.
    pub(super) fn table_blocks(&self) -> u64 {
        (self.inodes_per_group * self.inode_bytes).div_ceil(self.block_bytes)
    }
}

/// The descriptor of a block group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub(super) block_bitmap: u64,
    pub(super) inode_bitmap: u64,
    pub(super) inode_table: u64,
    /// Inodes at the end of the table that were never used.
    pub(super) unused_inodes: u64,
}

impl Group {
    pub(super) fn of(descriptor: &[u8], superblock: &Superblock) -> Self {
        const INODES_UNUSED: u16 = 1;
        let is_wide = descriptor.len() >= 64;
        let high = |at: usize| if is_wide { u64::from(u32_at(descriptor, at)) << 32 } else { 0 };
        let high_short = if is_wide { u64::from(u16_at(descriptor, 0x32)) << 16 } else { 0 };
        let unused_inodes = match u16_at(descriptor, 0x12) & INODES_UNUSED {
            _ if !superblock.has_group_sums() => 0,
            0 => high_short | u64::from(u16_at(descriptor, 0x1c)),
            _ => superblock.inodes_per_group,
        };
        Self {
            block_bitmap: high(0x20) | u64::from(u32_at(descriptor, 0)),
            inode_bitmap: high(0x24) | u64::from(u32_at(descriptor, 4)),
            inode_table: high(0x28) | u64::from(u32_at(descriptor, 8)),
            unused_inodes: unused_inodes.min(superblock.inodes_per_group),
        }
    }

    /// A buffer for one descriptor.
    pub(super) fn buffer(superblock: &Superblock) -> Vec<u8> {
        vec![0; usize_of(superblock.descriptor_bytes)]
    }
}
