//! Reads an inode, reports the blocks of its data and attribute forks with their owner, and reads directories.
//! Does not read the contents of files.

use super::{Pass, Xfs};
use crate::fields::{be16_at, be32_at, be64_at, has, u8_at};
use crate::units::{u64_of, usize_of};
use crate::{Fault, Owner, fault};

/// The most extents of a directory: half a gigabyte of entries if each extent has one block of 4 KiB.
const DIRECTORY_EXTENTS_MAX: usize = 128 << 10;
const LEVELS_MAX: u16 = 9;
const RECORD_BYTES: usize = 16;

/// How a fork has its contents.
const LOCAL: u8 = 1;
const EXTENTS: u8 = 2;
const TREE: u8 = 3;

/// Bits of the flags and of the mode of an inode.
const REALTIME: u16 = 1;
const MANY_EXTENTS: u64 = 0x10;
const KIND: u16 = 0xf000;
const DIRECTORY: u16 = 0x4000;

/// Blocks of a file that follow one another in the file and on the disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// The number of its first block in the file.
    pub(super) offset: u64,
    /// The number of its first block on the disk as XFS stores it: the allocation group in the upper bits, the block in the
    /// group in the lower ones.
    pub(super) block: u64,
    pub(super) count: u64,
}

impl Extent {
    fn parse(record: &[u8]) -> Self {
        let (high, low) = (be64_at(record, 0), be64_at(record, 8));
        Self {
            // The first bit marks an unwritten extent, which takes space too.
            offset: (high >> 9) & ((1 << 54) - 1),
            block: ((high & 0x1ff) << 43) | (low >> 21),
            count: low & ((1 << 21) - 1),
        }
    }
}

/// A fork of an inode.
struct Fork<'a> {
    format: u8,
    extents: u64,
    bytes: &'a [u8],
}

impl Xfs {
    /// Processes an inode that is in use.
    pub(super) fn inode(&mut self, id: u64, raw: &[u8], pass: &mut Pass<'_>) -> Result<(), Fault> {
        pass.visits.add().inspect_err(|why| pass.end = Some(why.clone()))?;
        let is_v3 = u8_at(raw, 4) >= 3;
        if !has(raw, 0, b"IN") || (is_v3 && be64_at(raw, 152) != id) {
            return Err(fault("its inode is damaged"));
        }
        let (mode, flags) = (be16_at(raw, 2), be16_at(raw, 90));
        let core = if is_v3 { 176 } else { 100 };
        let has_many = is_v3 && be64_at(raw, 120) & MANY_EXTENTS != 0;
        let literal = raw.get(core..).unwrap_or_default();
        let split = usize::from(u8_at(raw, 82)) * 8;
        let (data, attributes) = match split {
            0 => (literal, &[][..]),
            _ => literal.split_at_checked(split).ok_or_else(|| fault("its inode is damaged"))?,
        };
        let owner = if self.superblock.own_inodes.contains(&id) { Owner::Metadata } else { Owner::File(id) };
        let extents = if has_many { be64_at(raw, 24) } else { be32_at(raw, 76).into() };
        let data = Fork { format: u8_at(raw, 5), extents, bytes: data };
        let is_directory = mode & KIND == DIRECTORY;
        let mut of_directory = Vec::new();
        if flags & REALTIME == 0 || is_directory {
            self.fork(&data, owner, pass, is_directory.then_some(&mut of_directory))?;
        }
        if !attributes.is_empty() {
            let extents = if has_many { be32_at(raw, 76).into() } else { be16_at(raw, 80).into() };
            self.fork(&Fork { format: u8_at(raw, 83), extents, bytes: attributes }, owner, pass, None)?;
        }
        match (is_directory, data.format) {
            (true, LOCAL) => self.local_directory(id, data.bytes, pass),
            (true, _) => self.directory(id, of_directory, pass),
            _ => Ok(()),
        }
    }

    /// Reports the blocks of a fork. Their extents are added to `kept`, if it is given.
    fn fork(
        &mut self,
        fork: &Fork<'_>,
        owner: Owner,
        pass: &mut Pass<'_>,
        mut kept: Option<&mut Vec<Extent>>,
    ) -> Result<(), Fault> {
        match fork.format {
            EXTENTS => {
                let len = usize_of(fork.extents).checked_mul(RECORD_BYTES);
                let records = len.and_then(|len| fork.bytes.get(..len));
                let records = records.ok_or_else(|| fault("it has more extents than fit into its inode"))?;
                self.records(records, owner, pass, &mut kept)
            }
            TREE => self.extent_tree(fork.bytes, owner, pass, kept),
            _ => Ok(()),
        }
    }

    fn records(
        &mut self,
        records: &[u8],
        owner: Owner,
        pass: &mut Pass<'_>,
        kept: &mut Option<&mut Vec<Extent>>,
    ) -> Result<(), Fault> {
        for record in records.chunks_exact(RECORD_BYTES) {
            let extent = Extent::parse(record);
            pass.run(self.superblock.bytes_of(extent.block, extent.count)?, owner)?;
            if let Some(kept) = kept {
                if kept.len() >= DIRECTORY_EXTENTS_MAX {
                    return Err(fault("it is a directory of too many extents"));
                }
                kept.push(extent);
            }
        }
        Ok(())
    }

    /// The extents of a fork that has more of them than fit into its inode.
    fn extent_tree(
        &mut self,
        root: &[u8],
        owner: Owner,
        pass: &mut Pass<'_>,
        mut kept: Option<&mut Vec<Extent>>,
    ) -> Result<(), Fault> {
        let damaged = || fault("the tree of its extents is damaged");
        let head = if self.superblock.is_v5 { 72 } else { 24 };
        let magic = if self.superblock.is_v5 { b"BMA3" } else { b"BMAP" };
        let pointers = |records: &[u8], count: usize| -> Result<Vec<u64>, Fault> {
            let most = records.len() / 16;
            let pointers = records.get(most * 8..).filter(|_| count <= most).ok_or_else(damaged)?;
            Ok((0..count).map(|at| be64_at(pointers, at * 8)).collect())
        };
        let (level, count) = (be16_at(root, 0), usize::from(be16_at(root, 2)));
        let below = level.checked_sub(1).filter(|below| *below < LEVELS_MAX).ok_or_else(damaged)?;
        let first = pointers(root.get(4..).unwrap_or_default(), count)?;
        let mut waiting: Vec<(u64, u16)> = first.into_iter().rev().map(|block| (block, below)).collect();
        let mut block = vec![0; usize_of(self.superblock.block_bytes)];
        while let Some((number, level)) = waiting.pop() {
            let bytes = self.superblock.bytes_of(number, 1)?;
            pass.read(1)?;
            self.bytes.read(bytes.start, &mut block)?;
            let count = usize::from(be16_at(&block, 6));
            if !has(&block, 0, magic) || be16_at(&block, 4) != level {
                return Err(damaged());
            }
            pass.run(bytes, owner)?;
            let records = block.get(head..).unwrap_or_default();
            if level > 0 {
                let below = level - 1;
                waiting.extend(pointers(records, count)?.into_iter().rev().map(|block| (block, below)));
                continue;
            }
            let records = records.get(..count.saturating_mul(RECORD_BYTES)).ok_or_else(damaged)?;
            self.records(records, owner, pass, &mut kept)?;
        }
        Ok(())
    }

    /// The bytes of a block of a directory, which may be several blocks of the file system.
    pub(super) fn directory_bytes(&self) -> usize {
        usize_of(self.superblock.block_bytes << self.superblock.directory_bits)
    }

    /// Reads one block by its number as XFS stores it (see `Extent::block`).
    pub(super) fn read_block(
        &mut self,
        block: u64,
        into: &mut [u8],
        pass: &mut Pass<'_>,
    ) -> Result<(), Fault> {
        let bytes = self.superblock.bytes_of(block, 1)?;
        pass.read(1)?;
        debug_assert_eq!(u64_of(into.len()), bytes.end - bytes.start);
        self.bytes.read(bytes.start, into)
    }
}
