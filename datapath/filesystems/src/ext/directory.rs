//! The entries of a directory. A directory with an index is read like one without: the nodes of the index look like free space.

use super::superblock::{Superblock, incompat};
use crate::fields::{u8_at, u16_at, u32_at};
use crate::units::usize_of;
use crate::{Fault, fault};

const HEADER_BYTES: usize = 8;

/// Calls `found` with the inode and the name of each entry of a block, without `.` and `..`.
pub(super) fn each_entry(
    block: &[u8],
    superblock: &Superblock,
    mut found: impl FnMut(u64, &[u8]) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let mut rest = block;
    while !rest.is_empty() {
        let len = match u16_at(rest, 4) {
            // The length of a block of 64 KiB has 17 bits.
            0 | u16::MAX if superblock.block_bytes == 65_536 => usize_of(superblock.block_bytes),
            len => usize::from(len & !3) | usize::from(len & 3) << 16,
        };
        let name_bytes = match superblock.has(incompat::FILE_TYPE) {
            true => usize::from(u8_at(rest, 6)),
            false => usize::from(u16_at(rest, 6)),
        };
        let entry = rest.split_at_checked(len).filter(|_| len >= HEADER_BYTES && len % 4 == 0);
        let (entry, after) = entry.ok_or_else(|| fault("a directory entry has an invalid length"))?;
        rest = after;
        let inode = u32_at(entry, 0);
        if inode == 0 {
            continue;
        }
        let name = entry.get(HEADER_BYTES..HEADER_BYTES + name_bytes).filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| fault("a directory entry has an invalid name"))?;
        if name != b"." && name != b".." {
            found(inode.into(), name)?;
        }
    }
    Ok(())
}
