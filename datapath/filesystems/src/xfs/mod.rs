//! XFS: the owners of its blocks, by one pass over its inodes.
//!
//! ```text
//!   allocation group: superblock | AGF | AGI | AGFL (a sector each) | trees, chunks of inodes, data ..
//!                                  |     |      \--> blocks that trees take next
//!                                  |     \--> tree of inodes --> chunks of 64 inodes --> extents, directories
//!                                  \--> trees of free space, reverse map, reference counts
//! ```
//! Versions 4 and 5. The log is not applied: what the guest changed in the last seconds may be missing. Files on a realtime device have no
//! blocks here.

mod directory;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod inode;

use std::ops::Range;

use crate::fields::{be16_at, be32_at, be64_at, has, u8_at};
use crate::file_system::Scan;
use crate::units::{u64_of, usize_of};
use crate::{Bytes, Fault, Owner, Scanned, Visits, fault};

/// The most chunks of inodes in an allocation group: 268 million inodes, in 64 MiB of memory.
const CHUNKS_MAX: usize = 4 << 20;
/// Inodes of a chunk.
const CHUNK_INODES: u32 = 64;
/// Inodes that are in use or not together, in a chunk with holes.
const PART_INODES: u32 = 4;
/// The length of a record of the tree of inodes.
const RECORD_BYTES: usize = 16;
/// The most levels of a tree.
const LEVELS_MAX: u32 = 9;

/// Incompatible features that are read: types in directories, chunks with holes, another UUID in metadata, times after 2038, a repair that
/// is needed, more extents, exchange of ranges, pointers to parents.
const INCOMPATIBLE_READ: u32 = 0xff;
const HAS_TYPES: u32 = 0x01;
const HAS_HOLES: u32 = 0x02;
const NEEDS_REPAIR: u32 = 0x10;
/// Compatible features that have trees of their own.
const HAS_FREE_INODES: u32 = 0x01;
const HAS_REVERSE_MAP: u32 = 0x02;
const HAS_REFERENCE_COUNTS: u32 = 0x04;
/// Of version 4.
const DIRECTORIES_V2: u16 = 0x2000;
const TYPES_V4: u32 = 0x200;

/// The superblock.
#[derive(Clone, Debug)]
struct Superblock {
    is_v5: bool,
    block_bytes: u64,
    blocks: u64,
    group_blocks: u64,
    groups: u64,
    /// The bits of a block's number that are its number in its group.
    group_bits: u32,
    sector_bytes: u64,
    inode_bytes: usize,
    /// The bits of an inode's number that are its place in its block.
    inode_bits: u32,
    directory_bits: u32,
    root: u64,
    log: Range<u64>,
    /// Inodes of quotas and of the realtime device.
    own_inodes: Vec<u64>,
    has_types: bool,
    has_holes: bool,
    needs_repair: bool,
    compatible: u32,
}

impl Superblock {
    fn parse(sector: &[u8], len_bytes: u64) -> Result<Self, Fault> {
        let version = be16_at(sector, 100) & 0xf;
        let (incompatible, features2) = (be32_at(sector, 216), be32_at(sector, 200));
        let is_v5 = version == 5;
        if !has(sector, 0, b"XFSB") || !matches!(version, 4 | 5) {
            return Err(fault("it is not an XFS of version 4 or 5"));
        }
        if is_v5 && incompatible & !INCOMPATIBLE_READ != 0 {
            return Err(fault(format!("it has features that headwater cannot read: {incompatible:#x}")));
        }
        if !is_v5 && be16_at(sector, 100) & DIRECTORIES_V2 == 0 {
            return Err(fault("it has directories of version 1, which headwater cannot read"));
        }
        let [block_bits, sector_bits, inode_size_bits, inode_bits, group_bits] =
            [120, 121, 122, 123, 124].map(|at| u32::from(u8_at(sector, at)));
        let directory_bits = u32::from(u8_at(sector, 192));
        let (blocks, group_blocks) = (be64_at(sector, 8), u64::from(be32_at(sector, 84)));
        let groups = u64::from(be32_at(sector, 88));
        let is_sane = (9..=16).contains(&block_bits)
            && (9..=15).contains(&sector_bits)
            && (8..=11).contains(&inode_size_bits)
            && inode_bits.checked_add(inode_size_bits) == Some(block_bits)
            && (1..=31).contains(&group_bits)
            && group_blocks.next_power_of_two() <= 1 << group_bits
            && group_blocks > 0
            && directory_bits + block_bits <= 16
            && groups > 0
            && groups.saturating_sub(1).saturating_mul(group_blocks) < blocks
            && groups.saturating_mul(group_blocks) >= blocks;
        let block_bytes = 1_u64 << block_bits.min(16);
        if !is_sane || blocks.checked_mul(block_bytes).is_none_or(|bytes| bytes > len_bytes) {
            return Err(fault("its superblock is invalid"));
        }
        let mut superblock = Self {
            is_v5,
            block_bytes,
            blocks,
            group_blocks,
            groups,
            group_bits,
            sector_bytes: 1 << sector_bits,
            inode_bytes: 1 << inode_size_bits,
            inode_bits,
            directory_bits,
            root: be64_at(sector, 56),
            log: 0..0,
            own_inodes: [64, 72, 160, 168, 232].map(|at| be64_at(sector, at)).to_vec(),
            has_types: if is_v5 { incompatible & HAS_TYPES != 0 } else { features2 & TYPES_V4 != 0 },
            has_holes: is_v5 && incompatible & HAS_HOLES != 0,
            needs_repair: is_v5 && incompatible & NEEDS_REPAIR != 0,
            compatible: if is_v5 { be32_at(sector, 212) } else { 0 },
        };
        superblock.own_inodes.retain(|inode| !matches!(*inode, 0 | u64::MAX));
        let (log, log_blocks) = (be64_at(sector, 48), u64::from(be32_at(sector, 96)));
        if log != 0 {
            superblock.log = superblock.bytes_of(log, log_blocks)?;
        }
        Ok(superblock)
    }

    /// The first byte of an allocation group.
    fn group_start(&self, group: u64) -> u64 {
        group.saturating_mul(self.group_blocks).saturating_mul(self.block_bytes)
    }

    /// The bytes of blocks that follow one another in an allocation group.
    fn bytes_in(&self, group: u64, block: u64, count: u64) -> Result<Range<u64>, Fault> {
        let first = group.saturating_mul(self.group_blocks).saturating_add(block);
        let end = first.saturating_add(count);
        let is_inside =
            group < self.groups && block.saturating_add(count) <= self.group_blocks && end <= self.blocks;
        if !is_inside {
            return Err(fault("it has blocks outside of their allocation group"));
        }
        Ok(first.saturating_mul(self.block_bytes)..end.saturating_mul(self.block_bytes))
    }

    /// The bytes of blocks by the number that files have for the first of them.
    fn bytes_of(&self, block: u64, count: u64) -> Result<Range<u64>, Fault> {
        self.bytes_in(block >> self.group_bits, block & ((1 << self.group_bits) - 1), count)
    }
}

/// Takes the records of a leaf, and their number.
type TakesRecords<'a> = dyn FnMut(&[u8], usize) -> Result<(), Fault> + 'a;

/// A tree of an allocation group.
struct Tree {
    root: u64,
    levels: u32,
    /// The magic number of its blocks, of version 4 and 5.
    magic: [&'static [u8; 4]; 2],
    /// The length of the keys of an inner block.
    key_bytes: usize,
}

/// Inodes that follow one another.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    first: u32,
    /// A bit for each four inodes that are not there.
    holes: u16,
    /// A bit for each inode that is not in use.
    free: u64,
}

/// What a scan keeps meanwhile.
struct Pass<'a> {
    visits: &'a mut Visits,
    found: &'a mut dyn FnMut(Scanned) -> Result<(), Fault>,
    /// How many blocks of metadata may still be read: each belongs to one tree, directory or chunk.
    left: u64,
    /// Why the scan ends, if it does: no damage of a single file.
    end: Option<Fault>,
}

impl Pass<'_> {
    fn tell(&mut self, scanned: Scanned) -> Result<(), Fault> {
        let told = self.visits.check().and_then(|()| (self.found)(scanned));
        told.inspect_err(|why| self.end = Some(why.clone()))
    }

    fn run(&mut self, bytes: Range<u64>, owner: Owner) -> Result<(), Fault> {
        self.tell(Scanned::Run { bytes, owner })
    }

    fn name(&mut self, id: u64, parent: u64, name: &[u8]) -> Result<(), Fault> {
        self.visits.add().inspect_err(|why| self.end = Some(why.clone()))?;
        self.tell(Scanned::Name { id, parent, name: name.to_vec() })
    }

    /// Counts blocks of metadata that are read.
    fn read(&mut self, blocks: u64) -> Result<(), Fault> {
        self.left =
            self.left.checked_sub(blocks).ok_or_else(|| fault("its B-trees are too large, or loops"))?;
        Ok(())
    }

    /// Goes on after damage of a file or of a group, unless the scan is to end.
    fn damage(&mut self, id: u64, damage: Result<(), Fault>) -> Result<(), Fault> {
        match (damage, &self.end) {
            (_, Some(end)) => Err(end.clone()),
            (Err(why), None) => self.tell(Scanned::Unreadable { id, why }),
            (Ok(()), None) => Ok(()),
        }
    }
}

/// An XFS.
pub struct Xfs {
    bytes: Bytes,
    superblock: Superblock,
}

impl Xfs {
    /// Opens the file system of a partition.
    pub fn open(mut bytes: Bytes) -> Result<Self, Fault> {
        let mut sector = [0; 512];
        bytes.read(0, &mut sector)?;
        let superblock = Superblock::parse(&sector, bytes.len())?;
        Ok(Self { bytes, superblock })
    }

    fn group(&mut self, group: u64, pass: &mut Pass<'_>) -> Result<(), Fault> {
        let own = self.superblock.clone();
        let (start, sector) = (own.group_start(group), usize_of(own.sector_bytes));
        let mut head = vec![0; 4 * sector];
        self.bytes.read(start, &mut head)?;
        let head_bytes = u64_of(head.len()).next_multiple_of(own.block_bytes);
        pass.run(start..start.saturating_add(head_bytes), Owner::Metadata)?;
        let part = |number: usize| head.get(number * sector..).unwrap_or_default();
        let (space, inodes, list) = (part(1), part(2), part(3));
        if !has(space, 0, b"XAGF") || !has(inodes, 0, b"XAGI") {
            return Err(fault(format!("the headers of allocation group {group} are damaged")));
        }
        self.free_list(group, space, list, pass)?;
        let tree = |header: &[u8], root: usize, levels: usize, magic, key_bytes| Tree {
            root: be32_at(header, root).into(),
            levels: be32_at(header, levels),
            magic,
            key_bytes,
        };
        let mut trees =
            vec![tree(space, 16, 28, [b"ABTB", b"AB3B"], 8), tree(space, 20, 32, [b"ABTC", b"AB3C"], 8)];
        if own.compatible & HAS_REVERSE_MAP != 0 {
            trees.push(tree(space, 24, 36, [b"RMB3", b"RMB3"], 40));
        }
        if own.compatible & HAS_REFERENCE_COUNTS != 0 {
            trees.push(tree(space, 88, 92, [b"R3FC", b"R3FC"], 4));
        }
        if own.compatible & HAS_FREE_INODES != 0 {
            trees.push(tree(inodes, 328, 332, [b"FIB3", b"FIB3"], 4));
        }
        for tree in trees {
            self.tree(group, &tree, pass, &mut |_, _| Ok(()))?;
        }
        let mut chunks = Vec::new();
        let has_holes = own.has_holes;
        self.tree(group, &tree(inodes, 20, 24, [b"IABT", b"IAB3"], 4), pass, &mut |records, count| {
            let records = count.checked_mul(RECORD_BYTES).and_then(|len| records.get(..len));
            let records = records.ok_or_else(|| fault("the tree of inodes is damaged"))?;
            for record in records.chunks_exact(RECORD_BYTES) {
                let holes = if has_holes { be16_at(record, 4) } else { 0 };
                chunks.push(Chunk { first: be32_at(record, 0), holes, free: be64_at(record, 8) });
            }
            if chunks.len() > CHUNKS_MAX {
                return Err(fault(format!("allocation group {group} has too many inodes")));
            }
            Ok(())
        })?;
        for chunk in chunks {
            let read = self.chunk(group, chunk, pass);
            pass.damage(self.inode_number(group, chunk.first), read)?;
        }
        Ok(())
    }

    /// Blocks that the trees of a group take next.
    fn free_list(&mut self, group: u64, space: &[u8], list: &[u8], pass: &mut Pass<'_>) -> Result<(), Fault> {
        let head = if self.superblock.is_v5 { 36 } else { 0 };
        let entries = (self.superblock.sector_bytes - head) / 4;
        let (first, count) = (u64::from(be32_at(space, 40)), u64::from(be32_at(space, 48)));
        if first >= entries || count > entries {
            return Err(fault(format!("the list of free blocks of allocation group {group} is damaged")));
        }
        for entry in first..first + count {
            let block = be32_at(list, usize_of(head + entry % entries * 4));
            pass.run(self.superblock.bytes_in(group, block.into(), 1)?, Owner::Metadata)?;
        }
        Ok(())
    }

    /// Walks a tree, and hands over the records of each leaf and their number.
    fn tree(
        &mut self,
        group: u64,
        tree: &Tree,
        pass: &mut Pass<'_>,
        leaf: &mut TakesRecords<'_>,
    ) -> Result<(), Fault> {
        let damaged = || fault(format!("a tree of allocation group {group} is damaged"));
        let head = if self.superblock.is_v5 { 56 } else { 16 };
        if !(1..=LEVELS_MAX).contains(&tree.levels) {
            return Err(damaged());
        }
        let mut block = vec![0; usize_of(self.superblock.block_bytes)];
        let mut waiting = vec![(tree.root, tree.levels - 1)];
        while let Some((number, level)) = waiting.pop() {
            let bytes = self.superblock.bytes_in(group, number, 1)?;
            pass.read(1)?;
            self.bytes.read(bytes.start, &mut block)?;
            let count = usize::from(be16_at(&block, 6));
            let [of_v4, of_v5] = tree.magic;
            let magic = if self.superblock.is_v5 { of_v5 } else { of_v4 };
            if !has(&block, 0, magic) || u32::from(be16_at(&block, 4)) != level {
                return Err(damaged());
            }
            pass.run(bytes, Owner::Metadata)?;
            let records = block.get(head..).unwrap_or_default();
            if level == 0 {
                leaf(records, count)?;
                continue;
            }
            let most = records.len() / (tree.key_bytes + 4);
            if count > most {
                return Err(damaged());
            }
            let pointers = records.get(most * tree.key_bytes..).unwrap_or_default();
            waiting.extend((0..count).map(|at| (u64::from(be32_at(pointers, at * 4)), level - 1)));
        }
        Ok(())
    }

    fn inode_number(&self, group: u64, inode: u32) -> u64 {
        group.checked_shl(self.superblock.group_bits + self.superblock.inode_bits).unwrap_or(u64::MAX)
            | u64::from(inode)
    }

    fn chunk(&mut self, group: u64, chunk: Chunk, pass: &mut Pass<'_>) -> Result<(), Fault> {
        let (inode_bytes, inode_bits) = (self.superblock.inode_bytes, self.superblock.inode_bits);
        let mut part = vec![0; inode_bytes * usize_of(PART_INODES.into())];
        for number in (0..CHUNK_INODES).step_by(usize_of(PART_INODES.into())) {
            if (chunk.holes >> (number / PART_INODES)) & 1 == 1 {
                continue;
            }
            let first = chunk
                .first
                .checked_add(number)
                .ok_or_else(|| fault("an entry of an inode B-tree is invalid"))?;
            let block = u64::from(first >> inode_bits);
            let within = u64::from(first & ((1 << inode_bits) - 1)) * u64_of(inode_bytes);
            let blocks = (within + u64_of(part.len())).div_ceil(self.superblock.block_bytes);
            let start = self.superblock.bytes_in(group, block, blocks)?.start + within;
            pass.read(1)?;
            self.bytes.read(start, &mut part)?;
            pass.run(start..start + u64_of(part.len()), Owner::Metadata)?;
            for (at, raw) in (0_u32..).zip(part.chunks_exact(inode_bytes)) {
                if (chunk.free >> (number + at)) & 1 == 1 {
                    continue;
                }
                let id = self.inode_number(group, first + at);
                let read = self.inode(id, raw, pass);
                pass.damage(id, read)?;
            }
        }
        Ok(())
    }
}

impl Scan for Xfs {
    fn root_id(&self) -> u64 {
        self.superblock.root
    }

    fn remark(&self) -> Option<String> {
        let repair = if self.superblock.needs_repair { "it needs xfs_repair; " } else { "" };
        Some(format!(
            "{repair}its log was not read: what the guest changed in the last minute may be missing"
        ))
    }

    fn scan(
        &mut self,
        visits: &mut Visits,
        found: &mut dyn FnMut(Scanned) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        // Parts of chunks that share a block are read one after the other.
        let left = self.superblock.blocks.saturating_mul(4).saturating_add(64);
        let mut pass = Pass { visits, found, left, end: None };
        let log = self.superblock.log.clone();
        if !log.is_empty() {
            pass.run(log, Owner::Journal)?;
        }
        for group in 0..self.superblock.groups {
            let read = self.group(group, &mut pass);
            pass.damage(group, read)?;
        }
        Ok(())
    }
}
