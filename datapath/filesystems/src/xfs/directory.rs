//! Directories: the names in the inode itself, or in blocks of entries. Their indexes are not read.

use super::inode::Extent;
use super::{Pass, Xfs};
use crate::fields::{be16_at, be32_at, be64_at, has, u8_at};
use crate::units::{u64_of, usize_of, usize_of_u32};
use crate::{Fault, fault};

/// Behind this place in a directory are its indexes.
const INDEX_AT: u64 = 32 << 30;
/// Marks bytes of a block that have no entry.
const UNUSED: u16 = 0xffff;

impl Xfs {
    /// A directory whose entries are in its inode.
    pub(super) fn local_directory(
        &mut self,
        id: u64,
        bytes: &[u8],
        pass: &mut Pass<'_>,
    ) -> Result<(), Fault> {
        let (count, is_long) = (u8_at(bytes, 0), u8_at(bytes, 1) > 0);
        let inode_bytes = if is_long { 8 } else { 4 };
        let type_bytes = usize::from(self.superblock.has_types);
        let mut rest = bytes.get(2 + inode_bytes..).unwrap_or_default();
        for _ in 0..count {
            let len = usize::from(u8_at(rest, 0));
            let whole = rest.split_at_checked(3 + len + type_bytes + inode_bytes);
            let (entry, after) = whole.filter(|_| len > 0).ok_or_else(|| fault("its entries are damaged"))?;
            let name = entry.get(3..3 + len).unwrap_or_default();
            let inode_at = 3 + len + type_bytes;
            let inode = if is_long { be64_at(entry, inode_at) } else { be32_at(entry, inode_at).into() };
            pass.name(inode, id, name)?;
            rest = after;
        }
        Ok(())
    }

    /// A directory whose entries are in blocks.
    pub(super) fn directory(
        &mut self,
        id: u64,
        mut extents: Vec<Extent>,
        pass: &mut Pass<'_>,
    ) -> Result<(), Fault> {
        extents.sort_unstable_by_key(|extent| extent.offset);
        let block_bytes = self.superblock.block_bytes;
        let blocks_in_one = 1_u64 << self.superblock.directory_bits;
        let mut buffer = vec![0; self.directory_bytes()];
        let (mut current, mut filled) = (u64::MAX, 0);
        for extent in extents {
            for number in 0..extent.count {
                let offset = extent.offset.saturating_add(number);
                if offset.saturating_mul(block_bytes) >= INDEX_AT {
                    return Ok(());
                }
                if offset / blocks_in_one != current {
                    (current, filled) = (offset / blocks_in_one, 0);
                }
                let at = usize_of(offset % blocks_in_one * block_bytes);
                let place = buffer.get_mut(at..).and_then(|rest| rest.get_mut(..usize_of(block_bytes)));
                let place = place.ok_or_else(|| fault("its directory blocks are damaged"))?;
                self.read_block(extent.block.saturating_add(number), place, pass)?;
                filled += 1;
                if filled == blocks_in_one {
                    self.entries(id, &buffer, pass)?;
                }
            }
        }
        Ok(())
    }

    fn entries(&self, id: u64, block: &[u8], pass: &mut Pass<'_>) -> Result<(), Fault> {
        let damaged = || fault("a block of its entries is damaged");
        let is_one_of = |magics: [&[u8; 4]; 2]| magics.iter().any(|magic| has(block, 0, *magic));
        let (is_single, is_data) = (is_one_of([b"XD2B", b"XDB3"]), is_one_of([b"XD2D", b"XDD3"]));
        if !is_single && !is_data {
            return Err(damaged());
        }
        let mut at = if self.superblock.is_v5 { 64 } else { 16 };
        let mut end = block.len();
        if is_single {
            // Behind the entries of the only block are their hashes, and how many these are.
            let tail = end.checked_sub(8).ok_or_else(damaged)?;
            let hashes = usize_of_u32(be32_at(block, tail)).checked_mul(8).ok_or_else(damaged)?;
            end = tail.checked_sub(hashes).ok_or_else(damaged)?;
        }
        let type_bytes = usize::from(self.superblock.has_types);
        while at < end {
            if be16_at(block, at) == UNUSED {
                let len = usize::from(be16_at(block, at + 2));
                if len < 8 || !u64_of(len).is_multiple_of(8) {
                    return Err(damaged());
                }
                at += len;
                continue;
            }
            let (inode, len) = (be64_at(block, at), usize::from(u8_at(block, at + 8)));
            let next = (at + 8 + 1 + len + type_bytes + 2).next_multiple_of(8);
            let name =
                block.get(at + 9..at + 9 + len).filter(|_| len > 0 && next <= end).ok_or_else(damaged)?;
            if name != b"." && name != b".." {
                pass.name(inode, id, name)?;
            }
            at = next;
        }
        Ok(())
    }
}
