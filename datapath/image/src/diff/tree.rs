//! A file system as a tree of entries, whatever its kind: what comparing files and finding damaged ones needs of it.
//!
//! The bytes are those of an image, which anybody may have made. So nothing here trusts them: what cannot be is a
//! [`Fault`], and a visit has limits, so that directories which contain themselves end: the number of entries, the memory
//! that lists of them take, how deep they lie and how long their paths are.

use std::collections::BTreeMap;
use std::sync::Arc;

use headwater_block::{Device, blocking};

use crate::diff::partitions::Partition;
use crate::diff::{ext, fat, ntfs};
use crate::progress::Cancel;
use crate::units::{u64_of, usize_of};

/// The most entries of one file system that are visited.
pub(crate) const ENTRIES_MAX: u64 = 20_000_000;
/// The most memory for lists of directories, of all that are held at a time: one for each level, of both versions.
pub(crate) const LISTS_BYTES_MAX: usize = 256 << 20;
/// The deepest directory that is looked into.
pub(crate) const DEPTH_MAX: usize = 256;
/// The longest path that is looked at. Linux takes none that is longer.
pub(crate) const PATH_BYTES_MAX: usize = 4096;
/// What an entry of a list takes beside its name and path. A map's own tables may be half empty.
const ENTRY_BYTES: usize = 2 * (size_of::<Node>() + size_of::<Vec<u8>>());
/// The unit in which devices are read.
const SECTOR_BYTES: u64 = 512;
/// How much is read at a time where only a few bytes are wanted.
const PAGE_BYTES: usize = 64 << 10;

/// Why something of a file system cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault(pub(crate) String);

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// A fault in a few words.
pub(crate) fn fault(why: impl std::fmt::Display) -> Fault {
    Fault(why.to_string())
}

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Directory,
    File,
    /// A symbolic link.
    Link,
    /// A device, socket or pipe, or what only its own system understands.
    Other,
}

/// An entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    /// From the root, with slashes.
    pub(crate) path: Vec<u8>,
    pub(crate) kind: Kind,
    pub(crate) size_bytes: u64,
    /// When its content was changed last, in the file system's own unit.
    pub(crate) modified: u128,
    /// Owner, mode, flags: whatever else it has, packed.
    pub(crate) attributes: u128,
    /// Where the file system finds it again: a cluster, a record. Not compared.
    pub(crate) place: u64,
    /// Why nothing but its name is known: what the name stands for cannot be read.
    pub(crate) fault: Option<Fault>,
}

impl Node {
    /// The directory that everything is in, at this place.
    pub(crate) fn root(place: u64) -> Self {
        Self {
            path: b"/".to_vec(),
            kind: Kind::Directory,
            size_bytes: 0,
            modified: 0,
            attributes: 0,
            place,
            fault: None,
        }
    }

    /// An entry of which only the name can be read.
    pub(crate) fn unreadable(path: Vec<u8>, why: Fault) -> Self {
        Self { path, kind: Kind::Other, fault: Some(why), ..Self::root(0) }
    }

    /// The path of an entry in this directory.
    pub(crate) fn child(&self, name: &[u8]) -> Vec<u8> {
        let start = if self.path == b"/" { &[][..] } else { &self.path };
        [start, b"/", name].concat()
    }
}

/// The entries of a directory, by name.
pub(crate) type Entries = BTreeMap<Vec<u8>, Node>;

/// A file system.
pub(crate) trait Tree {
    /// The directory that everything is in.
    fn root(&self) -> Node;

    /// What is in a directory, without `.` and `..`. Each entry is counted, and its memory too, before it is kept. One that
    /// cannot be read is among them, with its fault: the others can be all the same.
    fn list(&mut self, directory: &Node, visits: &mut Visits) -> Result<Entries, Fault>;

    /// Fills `into` with what a file has from `at` on; less only at its end. Returns how much.
    fn read(&mut self, file: &Node, at: u64, into: &mut [u8]) -> Result<usize, Fault>;

    /// Where a symbolic link points; not asked of a file system that never says [`Kind::Link`].
    fn link(&mut self, link: &Node) -> Result<Vec<u8>, Fault> {
        Err(fault(format!("{} is no link", String::from_utf8_lossy(&link.path))))
    }
}

/// The kinds that are read, for messages.
pub(crate) const READABLE: &str = "no ext2, ext3, ext4, FAT or NTFS";
/// Why where none of them is there at all.
pub(crate) const NONE: &str = "there is none";

/// Opens the file system in a partition.
pub(crate) fn open(disk: &Arc<dyn Device>, partition: &Partition) -> Result<Box<dyn Tree>, Fault> {
    let mut bytes = Bytes::new(disk, partition);
    let mut boot = [0; 512];
    bytes.read(0, &mut boot)?;
    if fat::is_one(&boot) {
        return Ok(Box::new(fat::Fat::open(bytes, &boot)?));
    }
    if ntfs::is_one(&boot) {
        return Ok(Box::new(ntfs::Ntfs::open(bytes)?));
    }
    // The last one, so that it says where there is none.
    Ok(Box::new(ext::Ext::open(bytes)?))
}

/// The bytes of a partition, in any pieces.
pub(crate) struct Bytes {
    disk: Arc<dyn Device>,
    partition: Partition,
    /// What was read last, and from where.
    page: Vec<u8>,
    page_at: u64,
}

impl Bytes {
    fn new(disk: &Arc<dyn Device>, partition: &Partition) -> Self {
        Self { disk: Arc::clone(disk), partition: *partition, page: Vec::new(), page_at: 0 }
    }

    pub(crate) fn len(&self) -> u64 {
        self.partition.len_bytes
    }

    /// Fills `into` from `at`, which must all lie in the partition.
    pub(crate) fn read(&mut self, at: u64, into: &mut [u8]) -> Result<(), Fault> {
        let end = at.checked_add(u64_of(into.len())).filter(|end| *end <= self.len());
        let end = end.ok_or_else(|| fault("it reaches past the end of its partition"))?;
        if into.len() >= PAGE_BYTES {
            let found = self.fetch(at, end)?;
            into.copy_from_slice(found.get(..into.len()).unwrap_or_default());
            return Ok(());
        }
        let mut done = 0;
        while done < into.len() {
            let from = at + u64_of(done);
            if !(self.page_at..self.page_at + u64_of(self.page.len())).contains(&from) {
                let start = from / u64_of(PAGE_BYTES) * u64_of(PAGE_BYTES);
                self.page = self.fetch(start, (start + u64_of(PAGE_BYTES)).min(self.len()))?;
                self.page_at = start;
            }
            let found = self.page.get(usize_of(from - self.page_at)..).unwrap_or_default();
            let rest = into.get_mut(done..).unwrap_or_default();
            let len = found.len().min(rest.len());
            if let (Some(to), Some(from)) = (rest.get_mut(..len), found.get(..len)) {
                to.copy_from_slice(from);
            }
            done += len;
        }
        Ok(())
    }

    fn fetch(&self, at: u64, end: u64) -> Result<Vec<u8>, Fault> {
        // Devices are read in whole sectors.
        let start = (self.partition.offset_bytes + at) / SECTOR_BYTES * SECTOR_BYTES;
        let skip = usize_of(self.partition.offset_bytes + at - start);
        let mut sectors = vec![0; (skip + usize_of(end - at)).next_multiple_of(512)];
        blocking::read(self.disk.as_ref(), start, &mut sectors).map_err(fault)?;
        sectors.drain(..skip);
        sectors.truncate(usize_of(end - at));
        Ok(sectors)
    }
}

/// Counts the entries that are visited and the memory of their lists, and ends the visit where it was cancelled.
pub(crate) struct Visits {
    left: u64,
    /// What the lists take that are held now.
    held_bytes: usize,
    /// The limit that was reached.
    over: Option<Fault>,
    /// Whether something lies too deep to be looked into.
    is_cut: bool,
    cancel: Cancel,
}

impl Visits {
    pub(crate) fn new(cancel: &Cancel) -> Self {
        Self::of(ENTRIES_MAX, cancel)
    }

    /// No more than so many.
    pub(crate) fn of(entries: u64, cancel: &Cancel) -> Self {
        Self { left: entries, held_bytes: 0, over: None, is_cut: false, cancel: cancel.clone() }
    }

    /// Counts one more; a fault where that is too many, or where nobody wants to know any more.
    pub(crate) fn add(&mut self) -> Result<(), Fault> {
        if self.left == 0 {
            self.over = Some(fault(format!(
                "it has more than {ENTRIES_MAX} entries, or directories that contain themselves"
            )));
        }
        self.left = self.left.saturating_sub(1);
        self.check()
    }

    /// Counts what an entry of this name takes in the list of its directory. `false`: its path is too long for a list.
    pub(crate) fn hold(&mut self, directory: &Node, name: &[u8]) -> Result<bool, Fault> {
        let path_bytes = directory.path.len() + 1 + name.len();
        if path_bytes > PATH_BYTES_MAX {
            self.cut();
            return Ok(false);
        }
        self.held_bytes += ENTRY_BYTES + name.len() + path_bytes;
        if self.held_bytes > LISTS_BYTES_MAX {
            let why = fault(format!(
                "lists of its directories take more than {} MiB, or directories contain themselves",
                LISTS_BYTES_MAX >> 20
            ));
            self.over = Some(why.clone());
            return Err(why);
        }
        Ok(true)
    }

    /// What the lists take that are held now.
    pub(crate) fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Gives back what was held after there were so many bytes: those lists are gone.
    pub(crate) fn release_to(&mut self, held_bytes: usize) {
        self.held_bytes = held_bytes;
    }

    /// Notes that something is left out because it lies too deep.
    pub(crate) fn cut(&mut self) {
        self.is_cut = true;
    }

    /// What is to be said where something was left out.
    pub(crate) fn remark(&self) -> Option<String> {
        self.is_cut.then(|| {
            format!(
                "what lies deeper than {DEPTH_MAX} directories, or has a path of more than \
                 {PATH_BYTES_MAX} bytes, was not looked into"
            )
        })
    }

    /// The fault that ends the visit as a whole, and not only that of one directory.
    pub(crate) fn check(&self) -> Result<(), Fault> {
        if self.cancel.is_cancelled() {
            return Err(fault("the visit was cancelled"));
        }
        self.over.clone().map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_lists_has_a_limit_and_is_given_back() {
        let mut visits = Visits::new(&Cancel::new());
        let (root, name) = (Node::root(0), [b'n'; 4000]);
        assert!(visits.hold(&root, &name).unwrap());
        let one_bytes = visits.held_bytes();
        assert!(one_bytes >= size_of::<Node>() + 8000);
        let most = LISTS_BYTES_MAX / one_bytes;
        for _ in 0..2 * most {
            visits.release_to(0);
            assert!(visits.hold(&root, &name).unwrap());
        }
        for _ in 1..most {
            assert!(visits.hold(&root, &name).unwrap());
        }
        let refused = visits.hold(&root, &name).unwrap_err();
        assert!(refused.to_string().contains("more than 256 MiB"), "{refused}");
        // For good: what was being listed is not whole.
        visits.release_to(0);
        assert_eq!((visits.check(), visits.add()), (Err(refused.clone()), Err(refused)));
    }

    #[test]
    fn a_path_that_is_too_long_is_left_out_with_a_remark() {
        let mut visits = Visits::new(&Cancel::new());
        let directory = Node { path: vec![b'/'; 4000], ..Node::root(0) };
        assert!(visits.hold(&directory, &[b'n'; 95]).unwrap());
        assert_eq!(visits.remark(), None);
        let held_bytes = visits.held_bytes();
        assert!(!visits.hold(&directory, &[b'n'; 96]).unwrap());
        assert_eq!(visits.held_bytes(), held_bytes);
        assert!(visits.remark().unwrap().contains("more than 4096 bytes"));
    }
}
