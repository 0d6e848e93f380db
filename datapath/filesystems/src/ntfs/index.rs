//! The index of a directory: its entries, without the order that its tree gives them.
//!
//! Paths come from the records of the files. The indexes are read only for the names of files whose records cannot be read.
//! An index is a B-tree of blocks. The tree is not followed: all blocks that the bitmap of the index marks as used are read in
//! order. So a damaged tree cannot cause an endless loop, and the block numbers (VCN) of child nodes are not needed.

use super::fields::{place_at, u16_at, u32_at, u64_at};
use super::record::{FileName, NameKind, Reference, fix_up, types};
use super::volume::{Contents, Volume};
use crate::units::usize_of;
use crate::{Fault, fault};

/// The name of the attributes that are the index of names: `$I30` in UTF-16.
const NAMES: &[u8] = b"$\0I\x003\x000\0";
pub(super) fn is_names(name: &[u8]) -> bool {
    name == NAMES
}

/// The longest index of a directory: a million names of 255 letters.
const INDEX_BYTES_MAX: u64 = 1 << 30;
const LAST_ENTRY: u16 = 2;

/// Calls `found` with each entry of a directory that has a full name, which is any name except the short one (8.3) that stands
/// beside a long one. `bytes_left` is how many bytes of blocks may still be read, in all directories together.
pub(super) fn each_entry(
    volume: &mut Volume,
    directory: u64,
    bytes_left: &mut u64,
    found: &mut dyn FnMut(Reference, FileName<'_>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let missing = |what: &str| fault(format!("a directory has no {what}"));
    let root =
        volume.contents(directory, types::INDEX_ROOT, &is_names)?.ok_or_else(|| missing("index root"))?;
    let Contents::Resident(root) = root else { return Err(missing("index root in its file record")) };
    entries(root.get(16..).unwrap_or_default(), found)?;
    let Some(blocks) = volume.contents(directory, types::INDEX_ALLOCATION, &is_names)? else { return Ok(()) };
    let size_bytes = blocks.size_bytes();
    if size_bytes > INDEX_BYTES_MAX {
        return Err(fault(format!(
            "the index of a directory has {size_bytes} bytes; at most {INDEX_BYTES_MAX} are read"
        )));
    }
    let bitmap = volume
        .contents(directory, types::BITMAP, &is_names)?
        .ok_or_else(|| missing("bitmap of its index"))?;
    let block_bytes = volume.layout.index_bytes;
    let count = size_bytes / block_bytes;
    let bitmap_bytes_max = (INDEX_BYTES_MAX / 512) / 8;
    if bitmap.size_bytes() > bitmap_bytes_max {
        return Err(fault(format!(
            "the bitmap of a directory's index has {} bytes; at most {bitmap_bytes_max} are read",
            bitmap.size_bytes()
        )));
    }
    let bitmap = volume.whole(&bitmap)?;
    let mut block = vec![0; usize_of(block_bytes)];
    for number in (0..count).filter(|number| is_set(&bitmap, *number)) {
        *bytes_left = bytes_left
            .checked_sub(block_bytes)
            .ok_or_else(|| fault("the indexes of the directories are together longer than their volume"))?;
        volume.read(&blocks, number.saturating_mul(block_bytes), &mut block)?;
        fix_up(&mut block, *b"INDX")?;
        if u64_at(&block, 16) != Some(vcn_of(number, block_bytes, volume.layout.cluster_bytes)) {
            return Err(fault("the index of a directory has a block with the number (VCN) of another block"));
        }
        entries(block.get(24..).unwrap_or_default(), found)?;
    }
    Ok(())
}

/// The number (VCN) that the header of a block must contain. It counts clusters, or 512 bytes if clusters are larger than blocks.
fn vcn_of(number: u64, block_bytes: u64, cluster_bytes: u64) -> u64 {
    let unit = if cluster_bytes > block_bytes { 512 } else { cluster_bytes };
    number.saturating_mul(block_bytes / unit)
}

/// Whether a bit of a bitmap is set.
pub(super) fn is_set(bitmap: &[u8], number: u64) -> bool {
    bitmap.get(usize_of(number / 8)).is_some_and(|byte| byte >> (number % 8) & 1 == 1)
}

/// The entries behind the header of a node.
fn entries(
    node: &[u8],
    found: &mut dyn FnMut(Reference, FileName<'_>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let unsound =
        || fault("the index of a directory is damaged: the length or the place of an entry is wrong");
    let begin = u32_at(node, 0).ok_or_else(unsound)?;
    let end = u32_at(node, 4).ok_or_else(unsound)?;
    let mut rest = node.get(usize_of(begin.into())..usize_of(end.into())).ok_or_else(unsound)?;
    loop {
        let len = place_at(rest, 8).filter(|len| *len >= 16).ok_or_else(unsound)?;
        let (entry, after) = rest.split_at_checked(len).ok_or_else(unsound)?;
        if u16_at(entry, 12).ok_or_else(unsound)? & LAST_ENTRY != 0 {
            return Ok(());
        }
        rest = after;
        let key = place_at(entry, 10).and_then(|len| entry.get(16..)?.get(..len));
        let name = key.and_then(FileName::of).ok_or_else(unsound)?;
        let record = Reference::of(u64_at(entry, 0).ok_or_else(unsound)?);
        if name.kind == NameKind::Full {
            found(record, name)?;
        }
    }
}
