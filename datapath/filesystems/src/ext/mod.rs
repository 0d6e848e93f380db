//! ext2, ext3 and ext4.
//!
//! ```text
//!   superblock -> descriptors of groups -> tables of inodes -> map: extents or pointers -> blocks
//!       |                                                                         |-> directories: names -> inodes
//!       +-> journal: committed blocks lie over the disk, for everything that is read
//! ```
//! Read are blocks of 1 to 64 KiB, inodes of 128 bytes and more, extents and the older pointers, directories with and without
//! an index, contents in inodes, 64-bit block numbers, meta groups, flexible groups, clusters (`bigalloc`) and both kinds of
//! sparse superblocks. Contents and names that the guest encrypted are read as they are stored.
//!
//! Checksums of metadata are not checked: an image is checked by its chunks, and a reader has to cope with wrong metadata in
//! any case. Those of the journal are, because they say where it ends. Names of extended attributes are not read.
//!
//! Start reading at [`Ext`]. [`superblock`] has the layout, [`journal`] what lies over the disk, [`map`] where the blocks of a
//! file are, [`scan`] the owners of all blocks.

mod blocks;
mod directory;
mod inode;
mod journal;
mod map;
mod scan;
mod superblock;

use self::blocks::Blocks;
use self::inode::Inode;
use self::journal::JournalBlocks;
use self::map::{Bounds, Piece};
use self::superblock::{Group, SUPERBLOCK_AT, SUPERBLOCK_BYTES, Superblock};
use crate::units::{u64_of, usize_of};
use crate::{Bytes, Entries, Fault, FileSystem, Kind, Node, NodeKind, Scanned, Visits, fault};

pub(crate) use self::superblock::{is_ext, kind_of};

const ROOT: u64 = 2;
/// The longest target of a symbolic link: it lies in one block.
const LINK_BYTES_MAX: u64 = 64 << 10;
/// The longest directory. Without large directories, Linux makes none that is longer than 2 GiB.
const DIRECTORY_BYTES_MAX: u64 = 2 << 30;

/// What is done with each name of a directory: the inode and the name.
type EachName<'a> = dyn FnMut(&mut Visits, u64, &[u8]) -> Result<(), Fault> + 'a;

/// An ext file system.
pub struct Ext {
    kind: Kind,
    superblock: Superblock,
    blocks: Blocks,
    remark: Option<String>,
    /// The inode that was read last, and the piece of it.
    open: Option<(u64, Inode)>,
    piece: Option<(u64, Piece)>,
}

impl Ext {
    /// Opens one, and reads its journal if it was not unmounted.
    pub fn open(mut bytes: Bytes) -> Result<Self, Fault> {
        let mut block = [0; SUPERBLOCK_BYTES];
        bytes.read(SUPERBLOCK_AT, &mut block)?;
        let superblock = Superblock::of(&block, bytes.len())?;
        let blocks = Blocks::new(bytes, superblock.block_bytes);
        let kind = kind_of(&block);
        let mut ext = Self { kind, superblock, blocks, remark: None, open: None, piece: None };
        if ext.superblock.needs_recovery() && ext.superblock.has_journal() {
            ext.recover()?;
        }
        Ok(ext)
    }

    fn recover(&mut self) -> Result<(), Fault> {
        let number = self.superblock.journal;
        if number == 0 {
            self.remark = Some("it was not unmounted, and its journal is on another device".to_owned());
            return Ok(());
        }
        let inode = self.inode(number)?;
        let block_bytes = self.superblock.block_bytes;
        let committed = journal::committed(&mut OfFile { ext: self, number, inode }, block_bytes)?;
        self.remark = committed.remark;
        self.blocks.put_over(committed.blocks);
        // The superblock can be in the journal as well. What was read by the old one may be read in another way now.
        let mut block = [0; SUPERBLOCK_BYTES];
        self.blocks.read(SUPERBLOCK_AT, &mut block)?;
        self.superblock = Superblock::of(&block, self.blocks.len_bytes())?;
        if self.superblock.block_bytes != block_bytes {
            return Err(fault("the superblock in its journal has another block size"));
        }
        (self.open, self.piece) = (None, None);
        Ok(())
    }

    fn bounds(&self) -> Bounds {
        Bounds { first: self.superblock.first_block, end: self.superblock.blocks }
    }

    fn group(&mut self, group: u64) -> Result<Group, Fault> {
        let mut descriptor = Group::buffer(&self.superblock);
        self.blocks.read(self.superblock.descriptor_at(group), &mut descriptor)?;
        Ok(Group::of(&descriptor, &self.superblock))
    }

    fn inode(&mut self, number: u64) -> Result<Inode, Fault> {
        if let Some((_, open)) = self.open.as_ref().filter(|(open, _)| *open == number) {
            return Ok(open.clone());
        }
        let (group, at) = inode::place_of(number, &self.superblock)?;
        let table = self.group(group)?.inode_table.saturating_mul(self.superblock.block_bytes);
        let mut bytes = inode::buffer(&self.superblock);
        self.blocks.read(table.saturating_add(at), &mut bytes)?;
        let inode = Inode::of(&bytes, &self.superblock);
        self.open = Some((number, inode.clone()));
        Ok(inode)
    }

    /// The piece of a file that a block is in.
    fn piece(&mut self, number: u64, inode: &Inode, logical: u64) -> Result<Piece, Fault> {
        let is_in =
            |(of, piece): &&(u64, Piece)| *of == number && (piece.first..piece.end()).contains(&logical);
        if let Some((_, piece)) = self.piece.as_ref().filter(is_in) {
            return Ok(*piece);
        }
        let bounds = self.bounds();
        let piece = map::find(&mut self.blocks, bounds, inode, logical)?;
        self.piece = Some((number, piece));
        Ok(piece)
    }

    fn contents(&mut self, number: u64, inode: &Inode, at: u64, into: &mut [u8]) -> Result<usize, Fault> {
        let len = usize_of(inode.size_bytes.saturating_sub(at)).min(into.len());
        let into = into.get_mut(..len).unwrap_or_default();
        if let Some((first, second)) = inode.inline() {
            let value = first.iter().chain(second).copied().chain(std::iter::repeat(0));
            into.iter_mut().zip(value.skip(usize_of(at))).for_each(|(to, from)| *to = from);
            return Ok(len);
        }
        if !inode.has_blocks() {
            return Err(fault(format!("inode {number} has no contents")));
        }
        let block_bytes = self.superblock.block_bytes;
        let mut done = 0;
        while done < len {
            let from = at.saturating_add(u64_of(done));
            let piece = self.piece(number, inode, from / block_bytes)?;
            let skip = from - piece.first.saturating_mul(block_bytes);
            let left = piece.blocks.saturating_mul(block_bytes).saturating_sub(skip);
            let rest = into.get_mut(done..).unwrap_or_default();
            let piece_len = usize_of(left).min(rest.len()).max(1);
            let part = rest.get_mut(..piece_len).unwrap_or_default();
            match piece.on_disk {
                Some(first) => {
                    self.blocks.read(first.saturating_mul(block_bytes).saturating_add(skip), part)?
                }
                None => part.fill(0),
            }
            done += piece_len;
        }
        Ok(len)
    }

    /// Calls `found` with all names in a directory. Holes are skipped, as Linux does.
    fn names(&mut self, number: u64, visits: &mut Visits, found: &mut EachName<'_>) -> Result<(), Fault> {
        let inode = self.inode(number)?;
        if inode.kind() != NodeKind::Directory {
            return Err(fault(format!("inode {number} is not a directory")));
        }
        if let Some((first, second)) = inode.inline() {
            // The first four bytes are the parent.
            for part in [first.get(4..).unwrap_or_default(), second] {
                directory::each_entry(part, &self.superblock, |id, name| {
                    visits.add()?;
                    found(visits, id, name)
                })?;
            }
            return Ok(());
        }
        let block_bytes = self.superblock.block_bytes;
        if inode.size_bytes > DIRECTORY_BYTES_MAX.min(self.blocks.len_bytes()) {
            return Err(fault(format!(
                "a directory has {} bytes, more than its file system or {DIRECTORY_BYTES_MAX}",
                inode.size_bytes
            )));
        }
        let (mut logical, end) = (0, inode.size_bytes / block_bytes);
        while logical < end {
            visits.check()?;
            let piece = self.piece(number, &inode, logical)?;
            let Some(first) = piece.on_disk else {
                logical = piece.end();
                continue;
            };
            let block = self.blocks.block(first + (logical - piece.first))?;
            directory::each_entry(&block, &self.superblock, |id, name| {
                visits.add()?;
                found(visits, id, name)
            })?;
            logical += 1;
        }
        Ok(())
    }
}

/// A journal that is a file of its file system.
struct OfFile<'a> {
    ext: &'a mut Ext,
    number: u64,
    inode: Inode,
}

impl JournalBlocks for OfFile<'_> {
    fn place(&mut self, block: u64) -> Result<u64, Fault> {
        let piece = self.ext.piece(self.number, &self.inode, block)?;
        let first = piece.on_disk.ok_or_else(|| fault("its journal has a hole"))?;
        Ok((first + (block - piece.first)).saturating_mul(self.ext.superblock.block_bytes))
    }

    fn read(&mut self, block: u64) -> Result<Vec<u8>, Fault> {
        let place = self.place(block)?;
        self.ext.blocks.block(place / self.ext.superblock.block_bytes)
    }
}

impl FileSystem for Ext {
    fn kind(&self) -> Kind {
        self.kind
    }

    fn root(&self) -> Node {
        Node::root(ROOT)
    }

    fn remark(&self) -> Option<String> {
        self.remark.clone()
    }

    fn list(&mut self, directory: &Node, visits: &mut Visits) -> Result<Entries, Fault> {
        let mut names = Vec::new();
        self.names(directory.id, visits, &mut |visits, id, name| {
            if visits.hold(directory, name)? {
                names.push((id, name.to_vec()));
            }
            Ok(())
        })?;
        let mut out = Entries::new();
        for (id, name) in names {
            visits.check()?;
            let path = directory.child(&name);
            let node = self.inode(id).and_then(|inode| inode.node(path, id));
            let node = node.unwrap_or_else(|why| Node::unreadable(directory.child(&name), why));
            out.insert(name, node);
        }
        Ok(out)
    }

    fn read(&mut self, file: &Node, at: u64, into: &mut [u8]) -> Result<usize, Fault> {
        let inode = self.inode(file.id)?;
        self.contents(file.id, &inode, at, into)
    }

    fn link(&mut self, link: &Node) -> Result<Vec<u8>, Fault> {
        if link.size_bytes > LINK_BYTES_MAX {
            let size = link.size_bytes;
            return Err(fault(format!("a symbolic link of {size} bytes is longer than {LINK_BYTES_MAX}")));
        }
        let mut target = vec![0; usize_of(link.size_bytes)];
        let len = self.read(link, 0, &mut target)?;
        target.truncate(len);
        Ok(target)
    }

    fn scan(
        &mut self,
        visits: &mut Visits,
        found: &mut dyn FnMut(Scanned) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        self.scan_all(visits, found)
    }
}
