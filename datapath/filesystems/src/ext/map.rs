//! Where the blocks of a file are: trees of extents, and the older pointers with up to three levels of indirect blocks.

use super::blocks::Blocks;
use super::inode::Inode;
use crate::fields::{u16_at, u32_at};
use crate::units::{u64_of, usize_of};
use crate::{Fault, fault};

const EXTENT_MAGIC: u16 = 0xf30a;
const ENTRY_BYTES: usize = 12;
/// No tree is deeper: 340^5 extents are more than there are blocks in a file.
const DEPTH_MAX: u16 = 5;
/// An extent that is longer than this is allocated and not yet written.
const WRITTEN_MAX: u64 = 32_768;
/// Pointers in an inode to blocks of the file. Three more lead to indirect blocks.
const DIRECT: u64 = 12;

/// Blocks of a file that follow one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// The first of them, counted in the file.
    pub(super) first: u64,
    pub(super) blocks: u64,
    /// The first of them on the disk. `None`: they read as zeroes.
    pub(super) on_disk: Option<u64>,
}

impl Piece {
    pub(super) fn end(&self) -> u64 {
        self.first.saturating_add(self.blocks)
    }
}

/// An extent of a leaf.
#[derive(Clone, Copy)]
struct Extent {
    first: u64,
    blocks: u64,
    on_disk: u64,
    is_written: bool,
}

/// A node of a tree of extents.
struct ExtentNode {
    bytes: Vec<u8>,
    depth: u16,
    entries: usize,
}

impl ExtentNode {
    /// The root, or a node below one of this depth.
    fn of(bytes: Vec<u8>, above: Option<u16>) -> Result<Self, Fault> {
        let (entries, depth) = (usize::from(u16_at(&bytes, 2)), u16_at(&bytes, 6));
        let fits = entries <= bytes.len().saturating_sub(ENTRY_BYTES) / ENTRY_BYTES;
        let is_below = above.map_or(depth <= DEPTH_MAX, |above| above.checked_sub(1) == Some(depth));
        if u16_at(&bytes, 0) != EXTENT_MAGIC || !fits || !is_below {
            return Err(fault("a node of an extent tree is damaged"));
        }
        Ok(Self { bytes, depth, entries })
    }

    fn entry(&self, index: usize) -> &[u8] {
        let at = (index + 1) * ENTRY_BYTES;
        self.bytes.get(at..at + ENTRY_BYTES).unwrap_or_default()
    }

    fn first_of(&self, index: usize) -> u64 {
        u32_at(self.entry(index), 0).into()
    }

    /// The block of a node below.
    fn child(&self, index: usize) -> u64 {
        let entry = self.entry(index);
        u64::from(u16_at(entry, 8)) << 32 | u64::from(u32_at(entry, 4))
    }

    fn extent(&self, index: usize) -> Extent {
        let entry = self.entry(index);
        let len = u64::from(u16_at(entry, 4));
        let is_written = len <= WRITTEN_MAX;
        Extent {
            first: u32_at(entry, 0).into(),
            blocks: if is_written { len } else { len - WRITTEN_MAX },
            on_disk: u64::from(u16_at(entry, 6)) << 32 | u64::from(u32_at(entry, 8)),
            is_written,
        }
    }

    /// The last entry that begins at a block or before it.
    fn entry_of(&self, logical: u64) -> Option<usize> {
        let (mut low, mut high) = (0, self.entries);
        while low < high {
            let middle = low.midpoint(high);
            if self.first_of(middle) <= logical {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low.checked_sub(1)
    }
}

/// The range of blocks that the file system has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) first: u64,
    pub(super) end: u64,
}

impl Bounds {
    fn check(self, first: u64, blocks: u64) -> Result<u64, Fault> {
        let end = first.checked_add(blocks).filter(|end| *end <= self.end && first >= self.first.max(1));
        end.map(|_| first).ok_or_else(|| {
            fault(format!(
                "a file has {blocks} block(s) from block {first} on, which are not all in the blocks {} to {}",
                self.first,
                self.end.saturating_sub(1)
            ))
        })
    }
}

/// The piece of a file that a block is in.
pub(super) fn find(blocks: &mut Blocks, bounds: Bounds, inode: &Inode, logical: u64) -> Result<Piece, Fault> {
    let piece = if inode.has_extents() {
        find_extent(blocks, bounds, inode, logical)?
    } else {
        find_pointer(blocks, bounds, inode, logical)?
    };
    match (piece.first..piece.end()).contains(&logical) {
        true => Ok(piece),
        false => Err(fault("the extents of a file are not sorted")),
    }
}

fn find_extent(blocks: &mut Blocks, bounds: Bounds, inode: &Inode, logical: u64) -> Result<Piece, Fault> {
    let mut node = ExtentNode::of(inode.map.to_vec(), None)?;
    let mut end = u64::MAX;
    loop {
        let found = node.entry_of(logical);
        let next = found.map_or(0, |index| index + 1);
        if next < node.entries {
            end = end.min(node.first_of(next));
        }
        let hole = Piece { first: logical, blocks: end.saturating_sub(logical), on_disk: None };
        let Some(index) = found else { return Ok(hole) };
        if node.depth > 0 {
            let child = bounds.check(node.child(index), 1)?;
            node = ExtentNode::of(blocks.block(child)?, Some(node.depth))?;
            continue;
        }
        let extent = node.extent(index);
        if logical >= extent.first + extent.blocks {
            return Ok(hole);
        }
        let on_disk = bounds.check(extent.on_disk, extent.blocks)?;
        let on_disk = extent.is_written.then_some(on_disk);
        return Ok(Piece { first: extent.first, blocks: extent.blocks, on_disk });
    }
}

/// The pointer at this place of a block of them, and those after it that continue it.
fn piece_of(pointers: &[u8], index: usize, first: u64, bounds: Bounds) -> Result<Piece, Fault> {
    let pointer = |index: usize| u64::from(u32_at(pointers, index * 4));
    let start = pointer(index);
    let continues = |count: &usize| match start {
        0 => pointer(index + count) == 0,
        _ => pointer(index + count) == start + u64_of(*count),
    };
    let count = u64_of((0..pointers.len() / 4 - index).take_while(continues).count());
    let on_disk = if start == 0 { None } else { Some(bounds.check(start, count)?) };
    Ok(Piece { first, blocks: count, on_disk })
}

fn find_pointer(blocks: &mut Blocks, bounds: Bounds, inode: &Inode, logical: u64) -> Result<Piece, Fault> {
    let per_block = blocks.block_bytes() / 4;
    let direct = inode.map.get(..48).unwrap_or_default();
    if logical < DIRECT {
        return piece_of(direct, usize_of(logical), logical, bounds);
    }
    // Where the blocks of a level begin in the file, and how many a pointer of the inode stands for.
    let (mut start, mut span) = (DIRECT, per_block);
    for level in 0..3 {
        if logical < start + span {
            let mut pointer = u64::from(u32_at(&inode.map, 48 + 4 * level));
            loop {
                if pointer == 0 {
                    return Ok(Piece { first: start, blocks: span, on_disk: None });
                }
                let pointers = blocks.block(bounds.check(pointer, 1)?)?;
                span /= per_block;
                let index = (logical - start) / span;
                if span == 1 {
                    return piece_of(&pointers, usize_of(index), logical, bounds);
                }
                start += index * span;
                pointer = u64::from(u32_at(&pointers, usize_of(index) * 4));
            }
        }
        start += span;
        span = span.saturating_mul(per_block);
    }
    Ok(Piece { first: start, blocks: u64::MAX - start, on_disk: None })
}

/// How many blocks all files may claim together. Damaged maps lead in circles.
#[derive(Debug)]
pub(super) struct Claims {
    pub(super) left: u64,
}

impl Claims {
    fn spend(&mut self, blocks: u64) -> Result<(), Fault> {
        let left = self.left.checked_sub(blocks.max(1));
        self.left = left.unwrap_or(0);
        left.map(drop).ok_or_else(Self::refusal)
    }

    pub(super) fn refusal() -> Fault {
        fault("its files claim far more blocks than it has")
    }
}

/// What [`each`] calls with the first of some blocks, and how many these are.
pub(super) type EachRun<'a> = dyn FnMut(u64, u64) -> Result<(), Fault> + 'a;

/// Calls `found` with all blocks of a file, those that say where the others are among them.
pub(super) fn each(
    blocks: &mut Blocks,
    bounds: Bounds,
    inode: &Inode,
    claims: &mut Claims,
    found: &mut EachRun<'_>,
) -> Result<(), Fault> {
    let mut each = Each { blocks, bounds, claims, found };
    if inode.has_extents() {
        let root = ExtentNode::of(inode.map.to_vec(), None)?;
        return each.extents(&root);
    }
    for slot in 0..15usize {
        let pointer = u32_at(&inode.map, slot * 4).into();
        each.pointer(pointer, slot.saturating_sub(11))?;
    }
    Ok(())
}

struct Each<'a, 'f> {
    blocks: &'a mut Blocks,
    bounds: Bounds,
    claims: &'a mut Claims,
    found: &'a mut EachRun<'f>,
}

impl Each<'_, '_> {
    fn note(&mut self, first: u64, blocks: u64) -> Result<(), Fault> {
        self.claims.spend(blocks)?;
        (self.found)(self.bounds.check(first, blocks)?, blocks)
    }

    fn extents(&mut self, node: &ExtentNode) -> Result<(), Fault> {
        for index in 0..node.entries {
            if node.depth == 0 {
                let extent = node.extent(index);
                self.note(extent.on_disk, extent.blocks)?;
            } else {
                let child = node.child(index);
                self.note(child, 1)?;
                let child = ExtentNode::of(self.blocks.block(child)?, Some(node.depth))?;
                self.extents(&child)?;
            }
        }
        Ok(())
    }

    /// A pointer to a block of the file, or to an indirect block with so many levels.
    fn pointer(&mut self, pointer: u64, levels: usize) -> Result<(), Fault> {
        if pointer == 0 {
            return Ok(());
        }
        self.note(pointer, 1)?;
        if levels == 0 {
            return Ok(());
        }
        let pointers = self.blocks.block(pointer)?;
        for pointer in pointers.chunks_exact(4) {
            self.pointer(u32_at(pointer, 0).into(), levels - 1)?;
        }
        Ok(())
    }
}
