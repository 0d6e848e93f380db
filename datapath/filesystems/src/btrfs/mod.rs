//! Btrfs on one device: finds the owner of each block by one pass over the trees. `headwater cache contents` uses it. The data of files is
//! not read.
//!
//! ```text
//!   superblock --> chunk tree: logical address --> places on the disk (two of each with DUP)
//!             \--> root tree --> trees of subvolumes: inodes, names, extents --> owners and paths
//!                          \--> extent tree: blocks of all trees             --> metadata
//! ```
//! The last transaction that the guest committed is read. What the guest wrote after it counts as free: a guest commits every 30 seconds,
//! unless the mount option `commit` says otherwise. The log tree, which has files that were synced since, is not replayed.
//!
//! A block that several subvolumes share belongs to the subvolume that changed last. File systems over several disks, zoned file systems and
//! file systems with extent tree v2 are refused.

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod node;
mod places;

use std::collections::{BTreeMap, HashSet};

use crate::fields::{has, u8_at, u16_at, u32_at, u64_at};
use crate::file_system::Scan;
use crate::units::{u64_of, usize_of};
use crate::{Bytes, Fault, Owner, Scanned, Visits, fault};
use node::{Key, Root};
use places::Places;

/// The places of the superblock and its copies.
const SUPERBLOCKS: [u64; 3] = [64 << 10, 64 << 20, 256 << 30];
const SUPERBLOCK_BYTES: usize = 4096;
/// The beginning of the disk that Btrfs does not use: boot loaders do.
const RESERVED_BYTES: u64 = 1 << 20;

/// Incompatible features that are read. File systems with RAID pass this mask; the check for one disk refuses them.
const INCOMPATIBLE_READ: u64 = 0x1_0fff;

/// The most blocks of trees: 64 GiB of them, in 64 MiB of memory.
const NODES_MAX: usize = 4 << 20;
/// The most subvolumes.
const SUBVOLUMES_MAX: usize = 1 << 15;
/// The bits of an inode's number in its subvolume. The bits above them have the index of the subvolume.
const INODE_BITS: u32 = 48;
/// The inode of the root directory of each subvolume.
const ROOT_DIRECTORY: u64 = 256;

/// Trees.
const EXTENT_TREE: u64 = 2;
const TOP_SUBVOLUME: u64 = 5;
const FIRST_SUBVOLUME: u64 = 256;
/// Above this are trees of the file system itself.
const LAST_SUBVOLUME: u64 = u64::MAX - 256;

/// Kinds of items.
const INODE_REF: u8 = 12;
const INODE_EXTREF: u8 = 13;
const EXTENT_DATA: u8 = 108;
const ROOT_ITEM: u8 = 132;
const ROOT_BACKREF: u8 = 144;
const EXTENT_ITEM: u8 = 168;
const METADATA_ITEM: u8 = 169;
const CHUNK_ITEM: u8 = 228;

/// An extent of a tree.
const IS_TREE_BLOCK: u64 = 2;
/// An extent whose contents are in the item itself.
const INLINE: u8 = 0;

struct Superblock {
    address: u64,
    roots: Root,
    chunks: Root,
    node_bytes: u64,
    has_log: bool,
}

impl Superblock {
    fn parse(raw: &[u8]) -> Result<Self, Fault> {
        if !has(raw, 64, b"_BHRfS_M") {
            return Err(fault("it has no superblock"));
        }
        let (devices, incompatible) = (u64_at(raw, 136), u64_at(raw, 188));
        if devices != 1 {
            return Err(fault(format!("it spans {devices} disks, and only one disk can be read")));
        }
        if incompatible & !INCOMPATIBLE_READ != 0 {
            return Err(fault(format!("it has features that headwater cannot read: {incompatible:#x}")));
        }
        let node_bytes = u64::from(u32_at(raw, 148));
        if !(4096..=65_536).contains(&node_bytes) || !node_bytes.is_power_of_two() {
            return Err(fault("its superblock is invalid"));
        }
        Ok(Self {
            address: u64_at(raw, 48),
            roots: Root { address: u64_at(raw, 80), level: u8_at(raw, 198) },
            chunks: Root { address: u64_at(raw, 88), level: u8_at(raw, 199) },
            node_bytes,
            has_log: u64_at(raw, 96) != 0,
        })
    }
}

/// A subvolume, or another tree.
#[derive(Clone, Copy, Debug)]
struct Tree {
    id: u64,
    generation: u64,
    root: Root,
}

/// A name of a subvolume in a directory of another one.
#[derive(Clone, Debug)]
struct Mount {
    child: u64,
    parent: u64,
    directory: u64,
    name: Vec<u8>,
}

/// The state of one scan.
struct Pass<'a> {
    visits: &'a mut Visits,
    found: &'a mut dyn FnMut(Scanned) -> Result<(), Fault>,
    places: &'a Places,
    /// Blocks of trees that were read.
    seen: HashSet<u64>,
    /// The error that ends the whole scan, as opposed to damage in one tree.
    end: Option<Fault>,
}

impl Pass<'_> {
    /// Passes a result to the caller. If the caller refuses it, or a limit is reached, the scan ends.
    fn tell(&mut self, scanned: Scanned) -> Result<(), Fault> {
        let told = self.visits.check().and_then(|()| (self.found)(scanned));
        told.inspect_err(|why| self.end = Some(why.clone()))
    }

    /// Claims the bytes at a logical address for an owner, at all their places on the disk.
    fn run(&mut self, address: u64, len: u64, owner: Owner) -> Result<(), Fault> {
        for bytes in self.places.of(address, len)? {
            self.tell(Scanned::Run { bytes, owner })?;
        }
        Ok(())
    }

    /// Reports that the inode `id` has this name in the directory `parent`.
    fn name(&mut self, id: u64, parent: u64, name: &[u8]) -> Result<(), Fault> {
        if name.is_empty() || name.len() > 255 {
            return Err(fault("a directory entry has a name of an invalid length"));
        }
        self.visits.add().inspect_err(|why| self.end = Some(why.clone()))?;
        self.tell(Scanned::Name { id, parent, name: name.to_vec() })
    }

    /// Reports the damage of a tree, if there is any, and lets the scan continue, unless the whole scan must end.
    fn damage(&mut self, id: u64, damage: Result<(), Fault>) -> Result<(), Fault> {
        match (damage, &self.end) {
            (_, Some(end)) => Err(end.clone()),
            (Err(why), None) => self.tell(Scanned::Unreadable { id, why }),
            (Ok(()), None) => Ok(()),
        }
    }
}

/// A number for an inode that is unique in the file system: the subvolume's index is in the high bits. The top-level subvolume has index 0, so
/// its inodes keep their numbers.
fn id_of(subvolume: usize, inode: u64) -> Result<u64, Fault> {
    if inode >> INODE_BITS != 0 {
        return Err(fault("an inode has a number that is too large"));
    }
    Ok((u64_of(subvolume) << INODE_BITS) | inode)
}

/// A Btrfs.
pub struct Btrfs {
    bytes: Bytes,
    superblock: Superblock,
    places: Places,
}

impl Btrfs {
    /// Opens the file system of a partition.
    pub fn open(mut bytes: Bytes) -> Result<Self, Fault> {
        let mut raw = vec![0; SUPERBLOCK_BYTES];
        bytes.read(SUPERBLOCKS[0], &mut raw)?;
        let superblock = Superblock::parse(&raw)?;
        if superblock.address != SUPERBLOCKS[0] {
            return Err(fault("its superblock is invalid"));
        }
        let len = usize_of(u32_at(&raw, 160).into()).min(2048);
        let mut places = Places::new(bytes.len());
        places.add_all(raw.get(811..811 + len).unwrap_or_default())?;
        let mut btrfs = Self { bytes, superblock, places };
        let (mut seen, root) = (HashSet::new(), btrfs.superblock.chunks);
        // Chunks of this tree's own blocks are in the superblock.
        let known = btrfs.places.clone();
        let mut all = btrfs.places.clone();
        btrfs.walk(root, &known, &mut seen, &mut |key, data| {
            if key.kind == CHUNK_ITEM { all.add(key.offset, data).map(drop) } else { Ok(()) }
        })?;
        btrfs.places = all;
        Ok(btrfs)
    }

    /// The trees, the newest first, and the names of subvolumes.
    fn trees(&mut self, pass: &mut Pass<'_>) -> Result<(Vec<Tree>, Vec<Mount>), Fault> {
        let (mut trees, mut mounts) = (BTreeMap::new(), Vec::new());
        let root = self.superblock.roots;
        let mut own = Vec::new();
        let places = pass.places;
        self.walk(root, places, &mut pass.seen, &mut |key, data| {
            match key.kind {
                ROOT_ITEM => {
                    let root = Root { address: u64_at(data, 176), level: u8_at(data, 238) };
                    let tree = Tree { id: key.object, generation: u64_at(data, 160), root };
                    trees.insert(key.object, tree);
                }
                ROOT_BACKREF if mounts.len() < SUBVOLUMES_MAX => {
                    let len = usize::from(u16_at(data, 16));
                    let name = data.get(18..).and_then(|rest| rest.get(..len)).unwrap_or_default().to_vec();
                    let (child, parent) = (key.object, key.offset);
                    mounts.push(Mount { child, parent, directory: u64_at(data, 0), name });
                }
                // The cache of free space is a file of this tree.
                EXTENT_DATA if own.len() < NODES_MAX => own.extend(extent(data)),
                _ => {}
            }
            Ok(())
        })?;
        for (address, len) in own {
            pass.run(address, len, Owner::Metadata)?;
        }
        let mut trees: Vec<Tree> = trees.into_values().collect();
        trees.sort_by_key(|tree| std::cmp::Reverse((tree.generation, tree.id)));
        Ok((trees, mounts))
    }

    /// Reports the names and extents of the files of a subvolume.
    fn subvolume(&mut self, number: usize, root: Root, pass: &mut Pass<'_>) -> Result<(), Fault> {
        let mut items = Vec::new();
        let (places, mut seen) = (pass.places, std::mem::take(&mut pass.seen));
        // A leaf at a time: both the walk and its result need the pass.
        let walked = self.walk_leaves(root, places, &mut seen, &mut |leaf| {
            pass.visits.check().inspect_err(|why| pass.end = Some(why.clone()))?;
            items.clear();
            leaf.each(&mut |key, data| of_subvolume(number, key, data, &mut items))?;
            for item in items.drain(..) {
                match item {
                    Item::Name { id, parent, name } => pass.name(id, parent, &name)?,
                    Item::Extent { id, address, len } => pass.run(address, len, Owner::File(id))?,
                }
            }
            Ok(())
        });
        pass.seen = seen;
        walked
    }

    /// Claims the blocks of all trees, which are in the extent tree.
    fn metadata(&mut self, root: Root, pass: &mut Pass<'_>) -> Result<(), Fault> {
        let node_bytes = self.superblock.node_bytes;
        let (places, mut seen) = (pass.places, std::mem::take(&mut pass.seen));
        let walked = self.walk(root, places, &mut seen, &mut |key, data| match key.kind {
            METADATA_ITEM => pass.run(key.object, node_bytes, Owner::Metadata),
            EXTENT_ITEM if u64_at(data, 16) & IS_TREE_BLOCK != 0 => {
                pass.run(key.object, node_bytes, Owner::Metadata)
            }
            _ => Ok(()),
        });
        pass.seen = seen;
        walked
    }
}

/// A name or an extent of a file of a subvolume.
enum Item {
    Name { id: u64, parent: u64, name: Vec<u8> },
    Extent { id: u64, address: u64, len: u64 },
}

/// The logical address and length of an extent. `None`: it has no blocks.
fn extent(data: &[u8]) -> Option<(u64, u64)> {
    let (address, len) = (u64_at(data, 21), u64_at(data, 29));
    (u8_at(data, 20) != INLINE && address != 0 && len != 0).then_some((address, len))
}

/// Adds the names or the extent in an item of a subvolume's tree.
fn of_subvolume(number: usize, key: &Key, data: &[u8], items: &mut Vec<Item>) -> Result<(), Fault> {
    // The bytes before a name: INODE_REF has its index in the directory and its length; INODE_EXTREF has its directory before these.
    let (head, is_far) = if key.kind == INODE_EXTREF { (18, true) } else { (10, false) };
    match key.kind {
        INODE_REF | INODE_EXTREF => {
            let mut rest = data;
            while let Some((front, after)) = rest.split_at_checked(head) {
                let len = usize::from(u16_at(front, head - 2));
                let parent = if is_far { u64_at(front, 0) } else { key.offset };
                let (name, next) =
                    after.split_at_checked(len).ok_or_else(|| fault("a name is longer than its item"))?;
                // The root directory is in itself.
                if key.object != parent && name != b".." {
                    let (id, parent) = (id_of(number, key.object)?, id_of(number, parent)?);
                    items.push(Item::Name { id, parent, name: name.to_vec() });
                }
                rest = next;
            }
        }
        EXTENT_DATA => {
            if let Some((address, len)) = extent(data) {
                items.push(Item::Extent { id: id_of(number, key.object)?, address, len });
            }
        }
        _ => {}
    }
    Ok(())
}

impl Scan for Btrfs {
    fn root_id(&self) -> u64 {
        ROOT_DIRECTORY
    }

    fn remark(&self) -> Option<String> {
        let log = "its log tree was not read: files synced since the last commit may have more blocks";
        self.superblock.has_log.then(|| log.to_owned())
    }

    fn scan(
        &mut self,
        visits: &mut Visits,
        found: &mut dyn FnMut(Scanned) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let places = self.places.clone();
        let mut pass = Pass { visits, found, places: &places, seen: HashSet::new(), end: None };
        let len_bytes = self.bytes.len();
        pass.tell(Scanned::Run { bytes: 0..RESERVED_BYTES.min(len_bytes), owner: Owner::Metadata })?;
        for at in SUPERBLOCKS.into_iter().filter(|at| at + u64_of(SUPERBLOCK_BYTES) <= len_bytes).skip(1) {
            pass.tell(Scanned::Run { bytes: at..at + u64_of(SUPERBLOCK_BYTES), owner: Owner::Metadata })?;
        }
        let (trees, mounts) = match self.trees(&mut pass) {
            Ok(found) => found,
            Err(why) => return pass.damage(0, Err(why)),
        };
        let is_subvolume =
            |tree: &&Tree| tree.id == TOP_SUBVOLUME || (FIRST_SUBVOLUME..LAST_SUBVOLUME).contains(&tree.id);
        // The top-level subvolume has index 0, whenever it changed. The index of others follows from when they changed.
        let mut numbers = BTreeMap::from([(TOP_SUBVOLUME, 0)]);
        for tree in trees.iter().filter(is_subvolume).take(SUBVOLUMES_MAX - 1) {
            let next = numbers.len();
            numbers.entry(tree.id).or_insert(next);
        }
        for Mount { child, parent, directory, name } in mounts {
            let of = |id: &u64, inode| numbers.get(id).map(|number| id_of(*number, inode));
            if let (Some(child), Some(parent)) = (of(&child, ROOT_DIRECTORY), of(&parent, directory)) {
                let named = child.and_then(|child| pass.name(child, parent?, &name));
                pass.damage(0, named)?;
            }
        }
        for tree in trees.iter().filter(is_subvolume) {
            let Some(number) = numbers.get(&tree.id) else {
                pass.damage(tree.id, Err(fault("there are too many subvolumes")))?;
                continue;
            };
            let read = self.subvolume(*number, tree.root, &mut pass);
            pass.damage(tree.id, read)?;
        }
        // The extent tree lists the blocks of all trees, which remain. Its own blocks are not yet in `seen`.
        let extents = trees.iter().find(|tree| tree.id == EXTENT_TREE);
        let read = match extents {
            Some(tree) => self.metadata(tree.root, &mut pass),
            None => Err(fault("it has no extent tree")),
        };
        pass.damage(0, read)
    }
}
