//! An inode: what a file is, its times, and where its contents begin.

use super::superblock::{Superblock, incompat};
use crate::fields::{has, u8_at, u16_at, u32_at};
use crate::units::{usize_of, usize_of_u32};
use crate::{Fault, Node, NodeKind, fault};

/// The part that all inodes have.
const SHORT_BYTES: usize = 128;
/// The map of its blocks, or a short target of a link, or contents.
const MAP: std::ops::Range<usize> = 0x28..0x64;
const EXTENTS: u32 = 0x8_0000;
const INLINE: u32 = 0x1000_0000;
/// The magic number of extended attributes in an inode, and the attribute that has more of inline contents.
const ATTRIBUTES_MAGIC: u32 = 0xea02_0000;
const SYSTEM: u8 = 7;
const DATA: &[u8] = b"data";

/// An inode that is in use.
#[derive(Clone, Debug)]
pub(super) struct Inode {
    mode: u16,
    owner: u64,
    pub(super) size_bytes: u64,
    modified: u128,
    flags: u32,
    /// Blocks and clusters that it counts as its own. Zero: no block is its own.
    pub(super) map: [u8; 60],
    /// A block with extended attributes, or 0.
    pub(super) attributes_block: u64,
    /// What the inode has of inline contents beside its map.
    inline_rest: Vec<u8>,
    is_linked: bool,
}

impl Inode {
    /// Reads one, whatever it says.
    pub(super) fn of(bytes: &[u8], superblock: &Superblock) -> Self {
        let mode = u16_at(bytes, 0);
        let extra = if bytes.len() > SHORT_BYTES { usize::from(u16_at(bytes, 0x80)) } else { 0 };
        let flags = u32_at(bytes, 0x20);
        let has_high_size = kind_of(mode) == NodeKind::File || superblock.has(incompat::LARGE_DIRECTORIES);
        let high_size = if has_high_size { u64::from(u32_at(bytes, 0x6c)) << 32 } else { 0 };
        let modified_extra = if extra >= 12 { u32_at(bytes, 0x88) } else { 0 };
        let short = |at: usize| u64::from(u16_at(bytes, at));
        let wide = if superblock.has(incompat::WIDE) { short(0x76) << 32 } else { 0 };
        let map = bytes.get(MAP).and_then(|map| map.try_into().ok()).unwrap_or([0; 60]);
        let inline_rest = match flags & INLINE {
            0 => Vec::new(),
            _ => inline_rest(bytes.get(SHORT_BYTES.saturating_add(extra)..).unwrap_or_default()),
        };
        Self {
            mode,
            owner: (short(2) | short(0x78) << 16) << 32 | short(0x18) | short(0x7a) << 16,
            size_bytes: high_size | u64::from(u32_at(bytes, 4)),
            modified: time(u32_at(bytes, 0x10), modified_extra),
            flags,
            map,
            attributes_block: wide | u64::from(u32_at(bytes, 0x68)),
            inline_rest,
            is_linked: mode != 0 && u16_at(bytes, 0x1a) != 0,
        }
    }

    pub(super) fn kind(&self) -> NodeKind {
        kind_of(self.mode)
    }

    /// Whether a directory may name it.
    pub(super) fn is_linked(&self) -> bool {
        self.is_linked
    }

    pub(super) fn has_extents(&self) -> bool {
        self.flags & EXTENTS != 0
    }

    /// Whether its map leads to blocks. It does not for devices, and for contents and links that are in the inode itself.
    pub(super) fn has_blocks(&self) -> bool {
        match self.kind() {
            _ if self.flags & INLINE != 0 => false,
            NodeKind::Link => !self.is_short_link(),
            NodeKind::Other => self.mode == 0,
            NodeKind::File | NodeKind::Directory => true,
        }
    }

    fn is_short_link(&self) -> bool {
        self.kind() == NodeKind::Link && self.size_bytes < 60
    }

    /// Contents that are in the inode itself: in its map, and further ones.
    pub(super) fn inline(&self) -> Option<(&[u8], &[u8])> {
        if self.flags & INLINE != 0 {
            Some((&self.map, &self.inline_rest))
        } else if self.is_short_link() {
            Some((&self.map, &[]))
        } else {
            None
        }
    }

    /// The inode as an entry of a directory.
    pub(super) fn node(&self, path: Vec<u8>, id: u64) -> Result<Node, Fault> {
        if !self.is_linked {
            return Err(fault(format!("inode {id} is not in use")));
        }
        Ok(Node {
            path,
            kind: self.kind(),
            size_bytes: self.size_bytes,
            modified: self.modified,
            attributes: u128::from(self.owner) << 32 | u128::from(self.mode),
            id,
            fault: None,
        })
    }
}

fn kind_of(mode: u16) -> NodeKind {
    match mode & 0xf000 {
        0x4000 => NodeKind::Directory,
        0x8000 => NodeKind::File,
        0xa000 => NodeKind::Link,
        _ => NodeKind::Other,
    }
}

/// Seconds since 1970, and nanoseconds in the lower half.
fn time(seconds: u32, extra: u32) -> u128 {
    let seconds = i64::from(seconds.cast_signed()) + (i64::from(extra & 3) << 32);
    u128::from(seconds.cast_unsigned()) << 32 | u128::from(extra >> 2)
}

/// The value of the attribute `system.data`; empty if there is none.
fn inline_rest(attributes: &[u8]) -> Vec<u8> {
    if u32_at(attributes, 0) != ATTRIBUTES_MAGIC {
        return Vec::new();
    }
    let all = attributes.get(4..).unwrap_or_default();
    let mut rest = all;
    while u32_at(rest, 0) != 0 {
        let name_bytes = usize::from(u8_at(rest, 0));
        if u8_at(rest, 1) == SYSTEM && name_bytes == DATA.len() && has(rest, 16, DATA) {
            let (at, len) = (usize::from(u16_at(rest, 2)), usize_of_u32(u32_at(rest, 8)));
            let value = all.get(at..).and_then(|value| value.get(..len));
            return value.map(<[u8]>::to_vec).unwrap_or_default();
        }
        rest = rest.get((16 + name_bytes).next_multiple_of(4)..).unwrap_or_default();
    }
    Vec::new()
}

/// Where an inode is: the number of its group, and its place in the table there.
pub(super) fn place_of(number: u64, superblock: &Superblock) -> Result<(u64, u64), Fault> {
    if !(1..=superblock.inodes).contains(&number) {
        return Err(fault(format!("there is no inode {number}: inodes are 1 to {}", superblock.inodes)));
    }
    let index = number - 1;
    Ok((index / superblock.inodes_per_group, index % superblock.inodes_per_group * superblock.inode_bytes))
}

/// A place to read one into.
pub(super) fn buffer(superblock: &Superblock) -> Vec<u8> {
    vec![0; usize_of(superblock.inode_bytes)]
}
