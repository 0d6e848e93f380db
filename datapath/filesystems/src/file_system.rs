//! What is asked of a file system, whatever its kind.
//!
//! Two ways lead through one. By directory ([`FileSystem::list`]): for comparing files, and for the names of damaged files.
//! In one pass over the metadata ([`FileSystem::scan`]): for the owners of blocks, which [`crate::Owners`] keeps.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::btrfs::Btrfs;
use crate::ext::Ext;
use crate::fat::Fat;
use crate::kind::{Kind, identify};
use crate::ntfs::Ntfs;
use crate::visits::Visits;
use crate::xfs::Xfs;
use crate::{Bytes, Fault, fault};

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// A directory.
    Directory,
    /// A file with contents.
    File,
    /// A symbolic link.
    Link,
    /// A device, socket or pipe, or something that only its own system understands.
    Other,
}

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// From the root, with slashes.
    pub path: Vec<u8>,
    /// What it is.
    pub kind: NodeKind,
    /// The length of its contents.
    pub size_bytes: u64,
    /// When its contents were changed last, in the file system's own unit.
    pub modified: u128,
    /// Owner, mode, flags: whatever else it has, packed.
    pub attributes: u128,
    /// Where the file system finds it again: an inode, a record, a cluster. The same as in [`Owner::File`]. Not compared.
    pub id: u64,
    /// Why nothing except its name is known: what the name stands for cannot be read.
    pub fault: Option<Fault>,
}

impl Node {
    /// The root directory, with this id.
    pub fn root(id: u64) -> Self {
        Self {
            path: b"/".to_vec(),
            kind: NodeKind::Directory,
            size_bytes: 0,
            modified: 0,
            attributes: 0,
            id,
            fault: None,
        }
    }

    /// An entry of which only the name can be read.
    pub fn unreadable(path: Vec<u8>, why: Fault) -> Self {
        Self { path, kind: NodeKind::Other, fault: Some(why), ..Self::root(0) }
    }

    /// The path of an entry in this directory.
    pub fn child(&self, name: &[u8]) -> Vec<u8> {
        let start = if self.path == b"/" { &[][..] } else { &self.path };
        [start, b"/", name].concat()
    }
}

/// The entries of a directory, by name.
pub type Entries = BTreeMap<Vec<u8>, Node>;

/// Who a block belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    /// A file or a directory: its contents, and the blocks that say where they are.
    File(u64),
    /// The journal or log of the file system.
    Journal,
    /// Superblocks, tables, bitmaps: everything else that the file system keeps for itself.
    Metadata,
}

/// A piece of what [`FileSystem::scan`] finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scanned {
    /// Bytes of the partition that belong to somebody.
    Run {
        /// Which bytes.
        bytes: Range<u64>,
        /// To whom.
        owner: Owner,
    },
    /// A name of a file, in the directory `parent`. A file with several names has several of these.
    Name {
        /// The file.
        id: u64,
        /// Its directory.
        parent: u64,
        /// Its name there.
        name: Vec<u8>,
    },
    /// A file whose blocks, or a directory whose entries, cannot be read to the end.
    Unreadable {
        /// The file.
        id: u64,
        /// Why.
        why: Fault,
    },
}

/// A file system that is read.
pub trait FileSystem: Send {
    /// What it is.
    fn kind(&self) -> Kind;

    /// The root directory.
    fn root(&self) -> Node;

    /// What a reader of the answers has to know of the state of the file system, if anything: a journal that was not read.
    fn remark(&self) -> Option<String> {
        None
    }

    /// What is in a directory, without `.` and `..`. Each entry and its memory are counted by `visits` before it is kept. An
    /// entry that cannot be read is in the list, with its fault, because the others can be read all the same.
    fn list(&mut self, directory: &Node, visits: &mut Visits) -> Result<Entries, Fault>;

    /// Fills `into` with the contents of a file from `at`; less only at its end. Returns how much.
    fn read(&mut self, file: &Node, at: u64, into: &mut [u8]) -> Result<usize, Fault>;

    /// Where a symbolic link points. Not called for a file system that never says [`NodeKind::Link`].
    fn link(&mut self, link: &Node) -> Result<Vec<u8>, Fault> {
        Err(fault(format!("{} is not a link", String::from_utf8_lossy(&link.path))))
    }

    /// Reads all metadata once and calls `found` with every run of blocks in use and every name, in any order. The root has
    /// no name. `visits` counts the files and the names. A fault of `found` or of `visits` ends the scan; damage of one
    /// file does not.
    fn scan(
        &mut self,
        visits: &mut Visits,
        found: &mut dyn FnMut(Scanned) -> Result<(), Fault>,
    ) -> Result<(), Fault>;
}

/// A file system of which only the owners of blocks are asked for.
pub trait Scan: Send {
    /// The number of the root directory.
    fn root_id(&self) -> u64;

    /// As [`FileSystem::remark`].
    fn remark(&self) -> Option<String>;

    /// As [`FileSystem::scan`].
    fn scan(
        &mut self,
        visits: &mut Visits,
        found: &mut dyn FnMut(Scanned) -> Result<(), Fault>,
    ) -> Result<(), Fault>;
}

/// A file system that is read in all ways.
struct Whole(Box<dyn FileSystem>);

impl Scan for Whole {
    fn root_id(&self) -> u64 {
        self.0.root().id
    }

    fn remark(&self) -> Option<String> {
        self.0.remark()
    }

    fn scan(
        &mut self,
        visits: &mut Visits,
        found: &mut dyn FnMut(Scanned) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        self.0.scan(visits, found)
    }
}

/// Opens the file system in a partition for a scan. More kinds can be scanned than [`open`] reads.
pub fn open_for_scan(mut bytes: Bytes) -> Result<Box<dyn Scan>, Fault> {
    match identify(&mut bytes)?.map(|found| found.kind) {
        Some(Kind::Xfs) => Ok(Box::new(Xfs::open(bytes)?)),
        Some(Kind::Btrfs) => Ok(Box::new(Btrfs::open(bytes)?)),
        _ => Ok(Box::new(Whole(open(bytes)?))),
    }
}

/// Opens the file system in a partition. For a kind that is not read, or none, the fault says what there is.
pub fn open(mut bytes: Bytes) -> Result<Box<dyn FileSystem>, Fault> {
    let Some(found) = identify(&mut bytes)? else {
        return Err(fault("there is none"));
    };
    match found.kind {
        Kind::Ntfs => Ok(Box::new(Ntfs::open(bytes)?)),
        Kind::Ext2 | Kind::Ext3 | Kind::Ext4 => Ok(Box::new(Ext::open(bytes)?)),
        Kind::Fat => Ok(Box::new(Fat::open(bytes)?)),
        _ => Err(fault(format!("it is {found}, which headwater cannot read"))),
    }
}
