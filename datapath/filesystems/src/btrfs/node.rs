//! Blocks of trees: inner ones with pointers, leaves with items.

use std::collections::HashSet;

use super::{Btrfs, NODES_MAX, Places};
use crate::fields::{u8_at, u32_at, u64_at};
use crate::units::{usize_of, usize_of_u32};
use crate::{Fault, fault};

/// The header of each block.
const HEADER_BYTES: usize = 101;
const ITEM_BYTES: usize = 25;
const POINTER_BYTES: usize = 33;
/// The most levels.
const LEVEL_MAX: u8 = 7;

/// The key of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) object: u64,
    pub(super) kind: u8,
    pub(super) offset: u64,
}

/// Takes the items of a tree.
pub(super) type TakesItem<'a> = dyn FnMut(&Key, &[u8]) -> Result<(), Fault> + 'a;

/// The first block of a tree.
#[derive(Clone, Copy, Debug)]
pub(super) struct Root {
    pub(super) address: u64,
    pub(super) level: u8,
}

/// A leaf.
pub(super) struct Leaf<'a> {
    block: &'a [u8],
    items: usize,
}

impl Leaf<'_> {
    /// Hands over each item.
    pub(super) fn each(&self, item: &mut TakesItem<'_>) -> Result<(), Fault> {
        let body = self.block.get(HEADER_BYTES..).unwrap_or_default();
        // Items that overlap would be as many names as the square of a block's bytes.
        let mut left = body.len();
        for head in body.chunks_exact(ITEM_BYTES).take(self.items) {
            let key = Key { object: u64_at(head, 0), kind: u8_at(head, 8), offset: u64_at(head, 9) };
            let (at, len) = (usize_of_u32(u32_at(head, 17)), usize_of_u32(u32_at(head, 21)));
            left = left.checked_sub(len).ok_or_else(|| fault("the items of a tree block overlap"))?;
            let data = body.get(at..).and_then(|rest| rest.get(..len));
            item(&key, data.ok_or_else(|| fault("an item lies outside of its tree block"))?)?;
        }
        Ok(())
    }
}

impl Btrfs {
    /// Walks a tree, and hands over all items of blocks that were not read before.
    pub(super) fn walk(
        &mut self,
        root: Root,
        places: &Places,
        seen: &mut HashSet<u64>,
        item: &mut TakesItem<'_>,
    ) -> Result<(), Fault> {
        self.walk_leaves(root, places, seen, &mut |leaf| leaf.each(item))
    }

    /// The same by leaf.
    pub(super) fn walk_leaves(
        &mut self,
        root: Root,
        places: &Places,
        seen: &mut HashSet<u64>,
        found: &mut dyn FnMut(&Leaf<'_>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        if root.level > LEVEL_MAX {
            return Err(fault("a tree has too many levels"));
        }
        let mut block = vec![0; usize_of(self.superblock.node_bytes)];
        let mut waiting = vec![(root.address, root.level)];
        while let Some((address, level)) = waiting.pop() {
            if !seen.insert(address) {
                continue;
            }
            if seen.len() > NODES_MAX {
                return Err(fault("its trees have too many blocks"));
            }
            let first = places.of(address, self.superblock.node_bytes)?.into_iter().next();
            let at = first.ok_or_else(|| fault("a tree block has no place on the disk"))?;
            self.bytes.read(at.start, &mut block)?;
            if u64_at(&block, 48) != address || u8_at(&block, 100) != level {
                return Err(fault(format!("the tree block at logical address {address:#x} is damaged")));
            }
            let items = usize_of_u32(u32_at(&block, 96));
            if level == 0 {
                found(&Leaf { block: &block, items })?;
                continue;
            }
            let body = block.get(HEADER_BYTES..).unwrap_or_default();
            let pointers = body.chunks_exact(POINTER_BYTES).take(items);
            waiting.extend(pointers.map(|pointer| (u64_at(pointer, 17), level - 1)));
        }
        Ok(())
    }
}
