//! One pass over the metadata: the owner of each block, and the names of all files.
//!
//! The tables of inodes are read one after the other. The directories that are found there are read at once, so nothing is
//! looked up by its path. What a group says was never used is not read.

use std::collections::HashSet;

use super::Ext;
use super::inode::Inode;
use super::map::{self, Claims};
use crate::units::{u64_of, usize_of};
use crate::{Fault, NodeKind, Owner, Scanned, Visits, fault};

/// How much of a table of inodes is read at a time.
const PASS_BYTES: u64 = 256 << 10;
/// Blocks of extended attributes that several files can share.
const ATTRIBUTE_BLOCKS_MAX: usize = 4 << 20;
/// All files together may claim this many times the blocks of the file system. Files that share blocks are rare.
const CLAIM_TIMES: u64 = 4;

/// What a scan keeps meanwhile.
struct Pass<'a> {
    visits: &'a mut Visits,
    found: &'a mut dyn FnMut(Scanned) -> Result<(), Fault>,
    claims: Claims,
    attribute_blocks: HashSet<u64>,
    block_bytes: u64,
}

impl Pass<'_> {
    fn metadata(&mut self, first: u64, blocks: u64) -> Result<(), Fault> {
        self.run(first, blocks, Owner::Metadata)
    }

    fn run(&mut self, first: u64, blocks: u64, owner: Owner) -> Result<(), Fault> {
        let start = first.saturating_mul(self.block_bytes);
        let bytes = start..start.saturating_add(blocks.saturating_mul(self.block_bytes));
        (self.found)(Scanned::Run { bytes, owner })
    }
}

impl Ext {
    pub(super) fn scan_all(
        &mut self,
        visits: &mut Visits,
        found: &mut dyn FnMut(Scanned) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let mut pass = Pass {
            visits,
            found,
            claims: Claims { left: self.superblock.blocks.saturating_mul(CLAIM_TIMES) },
            attribute_blocks: HashSet::new(),
            block_bytes: self.superblock.block_bytes,
        };
        // The boot sector, and the superblock behind it.
        pass.metadata(0, self.superblock.superblock_block() + 1)?;
        if self.superblock.mount_protection > 0 {
            pass.metadata(self.superblock.mount_protection, 1)?;
        }
        for group in 0..self.superblock.groups {
            pass.visits.check()?;
            self.layout_of(group, &mut pass)?;
        }
        for group in 0..self.superblock.groups {
            self.inodes_of(group, &mut pass)?;
        }
        Ok(())
    }

    /// The copies of superblock and descriptors, bitmaps and table of inodes of a group.
    fn layout_of(&mut self, group: u64, pass: &mut Pass<'_>) -> Result<(), Fault> {
        let superblock = &self.superblock;
        if superblock.has_copy(group) {
            let first = if group == 0 { superblock.superblock_block() } else { superblock.group_at(group) };
            let end = first + 1 + superblock.descriptor_blocks();
            // The first superblock was noted with the boot sector.
            let start = if group == 0 { first + 1 } else { first };
            pass.metadata(start, end - start)?;
        }
        if let Some(block) = superblock.meta_copy(group) {
            pass.metadata(block, 1)?;
        }
        let table_blocks = superblock.table_blocks();
        let described = self.group(group)?;
        pass.metadata(described.block_bitmap, 1)?;
        pass.metadata(described.inode_bitmap, 1)?;
        pass.metadata(described.inode_table, table_blocks)
    }

    fn inodes_of(&mut self, group: u64, pass: &mut Pass<'_>) -> Result<(), Fault> {
        let described = self.group(group)?;
        let superblock = &self.superblock;
        let (inode_bytes, per_group) = (superblock.inode_bytes, superblock.inodes_per_group);
        let used = per_group.saturating_sub(described.unused_inodes);
        let table = described.inode_table.saturating_mul(superblock.block_bytes);
        let at_once = PASS_BYTES / inode_bytes;
        let mut number = 0;
        while number < used {
            pass.visits.check()?;
            let count = at_once.min(used - number);
            let mut piece = vec![0; usize_of(count.saturating_mul(inode_bytes))];
            let at = table.saturating_add(number.saturating_mul(inode_bytes));
            let first = group.saturating_mul(per_group).saturating_add(number).saturating_add(1);
            if let Err(why) = self.blocks.read(at, &mut piece) {
                // The other inodes can be read all the same.
                (pass.found)(Scanned::Unreadable { id: first, why })?;
                piece.fill(0);
            }
            for (index, bytes) in piece.chunks(usize_of(inode_bytes)).enumerate() {
                let id = first.saturating_add(u64_of(index));
                if bytes.iter().take(128).any(|byte| *byte != 0) {
                    let inode = Inode::of(bytes, &self.superblock);
                    self.file(id, &inode, pass)?;
                }
            }
            number += count;
        }
        Ok(())
    }

    fn owner_of(&self, id: u64) -> Owner {
        let superblock = &self.superblock;
        match id {
            super::ROOT => Owner::File(id),
            _ if id == superblock.journal => Owner::Journal,
            _ if id < superblock.first_inode || superblock.special.contains(&id) => Owner::Metadata,
            _ => Owner::File(id),
        }
    }

    fn file(&mut self, id: u64, inode: &Inode, pass: &mut Pass<'_>) -> Result<(), Fault> {
        let is_own = id < self.superblock.first_inode;
        if !inode.is_linked() && !is_own {
            return Ok(());
        }
        pass.visits.add()?;
        let owner = self.owner_of(id);
        if let Err(why) = self.runs_of(inode, owner, pass) {
            pass.visits.check()?;
            if pass.claims.left == 0 {
                return Err(Claims::refusal());
            }
            (pass.found)(Scanned::Unreadable { id, why })?;
        }
        if inode.kind() != NodeKind::Directory || owner != Owner::File(id) {
            return Ok(());
        }
        let Pass { visits, found, .. } = pass;
        let mut refused = None;
        let names = self.names(id, visits, &mut |_, named, name| {
            let name = Scanned::Name { id: named, parent: id, name: name.to_vec() };
            found(name).inspect_err(|why| refused = Some(why.clone()))
        });
        visits.check()?;
        match (names, refused) {
            (_, Some(why)) => Err(why),
            (Err(why), None) => found(Scanned::Unreadable { id, why }),
            (Ok(()), None) => Ok(()),
        }
    }

    fn runs_of(&mut self, inode: &Inode, owner: Owner, pass: &mut Pass<'_>) -> Result<(), Fault> {
        let attributes = inode.attributes_block;
        if attributes > 0 && pass.attribute_blocks.insert(attributes) {
            if pass.attribute_blocks.len() > ATTRIBUTE_BLOCKS_MAX {
                let most = ATTRIBUTE_BLOCKS_MAX;
                return Err(fault(format!(
                    "it has more than {most} blocks of extended attributes, the limit"
                )));
            }
            pass.run(attributes, 1, owner)?;
        }
        if !inode.has_blocks() {
            return Ok(());
        }
        let bounds = self.bounds();
        let Pass { claims, found, block_bytes, .. } = pass;
        map::each(&mut self.blocks, bounds, inode, claims, &mut |first, blocks| {
            let start = first.saturating_mul(*block_bytes);
            let bytes = start..start.saturating_add(blocks.saturating_mul(*block_bytes));
            found(Scanned::Run { bytes, owner })
        })
    }
}
