//! Compares the files of two file systems: ext2, ext3, ext4, FAT and NTFS.
//!
//! Two entries of one path are equal if type, size, attributes, time of modification and link target agree.
//! If only the time differs, the contents are read and compared, as far as [`Allowance`] permits. A file
//! whose contents are not compared counts as changed, and a remark says so.
//!
//! A time can be set to anything: some images are built with one time for all files, and copies keep times.
//! The location of files on the disk is not known for all kinds of file systems, so comparing all contents
//! reads the whole image. This is done only if blocks changed but no file with other contents was found. Then
//! files with equal times are read and compared, too. Files that are too long or cannot be read count as
//! equal, and a remark says so. If this second comparison fails as a whole, for example because of damage,
//! the results of the first comparison stay.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use headwater_block::Device;
use headwater_filesystems::visits::DEPTH_MAX;
use headwater_filesystems::{Entries, Fault, FileSystem, Node, NodeKind, Partition, Visits, fault};

use crate::diff::allowance::Allowance;
use crate::diff::tree::{self, READABLE};
use crate::error::ImageError;
use crate::progress::Cancel;
use crate::units::{u64_of, usize_of};

/// The most changed files of a partition that are listed.
pub const CHANGED_FILES_MAX: usize = 100_000;
/// The most memory for the lists of changed files of all partitions. Most of it is paths.
pub const CHANGED_FILES_BYTES_MAX: usize = 64 << 20;
/// How many bytes of a file are compared at a time.
pub(super) const COMPARE_BYTES: usize = 1 << 20;

/// What happened to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileChange {
    /// The file is new. If it is a directory, everything in it is new and listed too.
    Added,
    /// The file was removed.
    Removed,
    /// Content, type or link target differs; or the time differs, and the content is too long to be read.
    Changed,
    /// Owner, mode or time differs; the content is equal.
    Attributes,
}

/// A file that differs between the two versions, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedFile {
    /// Its path in the file system.
    pub path: String,
    /// What happened to it.
    pub change: FileChange,
    /// Its new size, or the size before it was removed.
    pub size_bytes: u64,
}

type Found = (Option<Vec<ChangedFile>>, Option<String>);

/// Compares the file systems in a partition of two versions. If a file system cannot be read, the result is a
/// remark. The list of changed files uses memory from `list_bytes_left`; while all contents are compared, a
/// second list needs as much. `compared` is called with the number of additional bytes of files that were
/// compared.
pub(super) fn compare(
    from: &Arc<dyn Device>,
    to: &Arc<dyn Device>,
    partition: &Partition,
    list_bytes_left: &mut usize,
    cancel: &Cancel,
    compared: &mut dyn FnMut(u64),
) -> Result<Found, ImageError> {
    let list_bytes = *list_bytes_left;
    let mut walked = |uncompared| -> Result<Walk<'_>, Fault> {
        let mut walk = Walk {
            cancel,
            changed: Vec::new(),
            list_bytes_left: list_bytes,
            cut: false,
            visits: tree::visits(cancel),
            allowance: Allowance::of(partition),
            unread: 0,
            uncompared,
            state: None,
        };
        // Malicious file systems must not end the process, even if a crate panics on them.
        let outcome = catch_unwind(AssertUnwindSafe(|| -> Result<(), Fault> {
            let (old, new) = (tree::open(from, partition)?, tree::open(to, partition)?);
            walk.state = remark_on_state(old.remark(), new.remark());
            let mut trees = Trees { old, new, compared: &mut *compared };
            let root = (trees.old.root(), trees.new.root());
            walk.directory(&mut trees, &root.0, &root.1, 0)
        }));
        outcome.unwrap_or_else(|_| Err(fault("it is damaged"))).map(|()| walk)
    };
    let first = walked(None);
    cancel.check("the comparison")?;
    let first = match first {
        Ok(first) => first,
        Err(why) => {
            return Ok((None, Some(format!("{READABLE} that can be read in both versions: {why}"))));
        }
    };
    let (walk, not_compared) = if first.has_other_contents() {
        (first, None)
    } else {
        match walked(Some(0)) {
            Ok(second) => (second, None),
            Err(why) => (first, Some(why)),
        }
    };
    cancel.check("the comparison")?;
    *list_bytes_left = walk.list_bytes_left;
    let mut remarks = Vec::new();
    if walk.cut {
        remarks.push(format!(
            "more than {CHANGED_FILES_MAX} files changed, or the list takes more than {} MiB; \
             the others are not listed",
            CHANGED_FILES_BYTES_MAX >> 20
        ));
    }
    remarks.extend(walk.state);
    remarks.extend(walk.visits.remark());
    if walk.unread > 0 {
        remarks.push(format!(
            "files that claim more bytes than the partition has, alone or together, \
             count as changed and were not read: {}",
            walk.unread
        ));
    }
    if let Some(files @ 1..) = walk.uncompared {
        remarks.push(format!(
            "files with the same size and time of modification that claim more bytes than the partition has, alone or \
             together, or that cannot be read, were not compared: {files}"
        ));
    }
    if let Some(why) = not_compared {
        remarks.push(format!(
            "files with the same size and time of modification were not compared, since reading them failed: {why}"
        ));
    }
    let mut changed = walk.changed;
    changed.sort_by(|a, b| a.path.cmp(&b.path));
    Ok((Some(changed), (!remarks.is_empty()).then(|| remarks.join("; "))))
}

/// One file system before and after.
struct Trees<'a> {
    old: Box<dyn FileSystem>,
    new: Box<dyn FileSystem>,
    /// Called with the number of additional bytes of files that were compared.
    compared: &'a mut dyn FnMut(u64),
}

struct Walk<'a> {
    cancel: &'a Cancel,
    changed: Vec<ChangedFile>,
    list_bytes_left: usize,
    cut: bool,
    visits: Visits,
    allowance: Allowance,
    /// Files that count as changed because they are longer than the allowance.
    unread: u64,
    /// Files with equal size and time whose contents should have been compared and were not. `None`: contents
    /// of such files are not compared.
    uncompared: Option<u64>,
    /// A remark on the state of the file systems, such as a journal that was not replayed.
    state: Option<String>,
}

/// Combines the remarks on both versions' file systems into one sentence. One of them may have been read
/// without its journal.
fn remark_on_state(old: Option<String>, new: Option<String>) -> Option<String> {
    match (old, new) {
        (None, None) => None,
        (Some(old), Some(new)) if old == new => Some(format!("the file system of both versions: {old}")),
        (Some(old), Some(new)) => {
            Some(format!("the file system of the older version: {old}; that of the newer version: {new}"))
        }
        (Some(old), None) => Some(format!("the file system of the older version: {old}")),
        (None, Some(new)) => Some(format!("the file system of the newer version: {new}")),
    }
}

impl Walk<'_> {
    /// Whether an entry with other contents was found.
    fn has_other_contents(&self) -> bool {
        self.changed.iter().any(|file| file.change != FileChange::Attributes)
    }

    fn note(&mut self, node: &Node, change: FileChange) {
        if self.changed.len() >= CHANGED_FILES_MAX {
            self.cut = true;
            return;
        }
        let path = String::from_utf8_lossy(&node.path).into_owned();
        let bytes = size_of::<ChangedFile>() + path.capacity();
        let Some(left) = self.list_bytes_left.checked_sub(bytes) else {
            self.cut = true;
            return;
        };
        self.list_bytes_left = left;
        self.changed.push(ChangedFile { path, change, size_bytes: node.size_bytes });
    }

    /// Lists a directory. An incomplete list is an error here, because changes could be missed.
    fn list(&mut self, tree: &mut dyn FileSystem, directory: &Node) -> Result<Entries, Fault> {
        let entries = tree.list(directory, &mut self.visits)?;
        match entries.values().find_map(|entry| entry.fault.clone()) {
            Some(fault) => Err(fault),
            None => Ok(entries),
        }
    }

    /// Compares a directory that is nested `depth` levels deep.
    fn directory(
        &mut self,
        trees: &mut Trees<'_>,
        old: &Node,
        new: &Node,
        depth: usize,
    ) -> Result<(), Fault> {
        if depth >= DEPTH_MAX {
            self.visits.cut();
            return Ok(());
        }
        let held_bytes = self.visits.held_bytes();
        let mut before = self.list(&mut *trees.old, old)?;
        for (name, now) in self.list(&mut *trees.new, new)? {
            if self.cancel.is_cancelled() {
                return Ok(());
            }
            match before.remove(&name) {
                None => self.all(&mut *trees.new, &now, FileChange::Added, depth + 1)?,
                Some(was) if was.kind != now.kind => {
                    self.all(&mut *trees.old, &was, FileChange::Removed, depth + 1)?;
                    self.all(&mut *trees.new, &now, FileChange::Added, depth + 1)?;
                }
                Some(was) => {
                    if let Some(change) = self.file(trees, &was, &now)? {
                        self.note(&now, change);
                    }
                    if now.kind == NodeKind::Directory {
                        self.directory(trees, &was, &now, depth + 1)?;
                    }
                }
            }
        }
        for was in before.into_values() {
            self.all(&mut *trees.old, &was, FileChange::Removed, depth + 1)?;
        }
        self.visits.release_to(held_bytes);
        Ok(())
    }

    /// Records an entry at this depth, and everything in it, as added or removed.
    fn all(
        &mut self,
        tree: &mut dyn FileSystem,
        node: &Node,
        change: FileChange,
        depth: usize,
    ) -> Result<(), Fault> {
        self.note(node, change);
        if node.kind != NodeKind::Directory || self.cancel.is_cancelled() {
            return Ok(());
        }
        if depth >= DEPTH_MAX {
            self.visits.cut();
            return Ok(());
        }
        let held_bytes = self.visits.held_bytes();
        for inner in self.list(tree, node)?.into_values() {
            self.all(tree, &inner, change, depth + 1)?;
        }
        self.visits.release_to(held_bytes);
        Ok(())
    }

    fn file(&mut self, trees: &mut Trees<'_>, was: &Node, now: &Node) -> Result<Option<FileChange>, Fault> {
        let same_time = was.modified == now.modified;
        let is_directory = now.kind == NodeKind::Directory;
        let attributes = (was.attributes != now.attributes || (!same_time && !is_directory))
            .then_some(FileChange::Attributes);
        let differs = match now.kind {
            NodeKind::Link => trees.old.link(was)? != trees.new.link(now)?,
            NodeKind::File if was.size_bytes != now.size_bytes => true,
            NodeKind::File if !same_time && self.is_too_long(now) => {
                self.unread += 1;
                true
            }
            NodeKind::File if !same_time => self.contents_differ(trees, was, now)?,
            NodeKind::File => self.is_found_to_differ(trees, was, now),
            _ => false,
        };
        Ok(if differs { Some(FileChange::Changed) } else { attributes })
    }

    /// Whether a file is longer than the allowance.
    fn is_too_long(&self, node: &Node) -> bool {
        self.allowance.of_file(node.size_bytes) < node.size_bytes
    }

    /// Whether a file with equal size and time has other contents, if contents are to be compared and can be
    /// read.
    fn is_found_to_differ(&mut self, trees: &mut Trees<'_>, was: &Node, now: &Node) -> bool {
        let Some(uncompared) = self.uncompared else { return false };
        if !self.is_too_long(now)
            && let Ok(differs) = self.contents_differ(trees, was, now)
        {
            return differs;
        }
        self.uncompared = Some(uncompared + 1);
        false
    }

    /// Compares the contents of two files of equal size.
    fn contents_differ(&mut self, trees: &mut Trees<'_>, was: &Node, now: &Node) -> Result<bool, Fault> {
        self.allowance.spend(now.size_bytes);
        // Most files are short.
        let len = COMPARE_BYTES.min(usize_of(now.size_bytes));
        let (mut before, mut after) = (vec![0; len], vec![0; len]);
        let mut at = 0;
        while !self.cancel.is_cancelled() {
            let (old, new) = (trees.old.read(was, at, &mut before)?, trees.new.read(now, at, &mut after)?);
            (trees.compared)(u64_of(new));
            if before.get(..old) != after.get(..new) {
                return Ok(true);
            }
            if new == 0 {
                break;
            }
            at = at.saturating_add(u64_of(new));
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use headwater_block::{Attempt, ByteRange, Completion, Extent, Geometry, IoError, Op, Request};

    use super::*;
    use crate::diff::crafted::{ROOT_AT, device, entry, fat_in_itself};
    use headwater_filesystems::visits::PATH_BYTES_MAX;

    /// Runs a comparison with this much memory for its list.
    fn compared(from: Vec<u8>, to: Vec<u8>, mut list_bytes: usize) -> Found {
        let ((from, partition), (to, _)) = (device(from), device(to));
        compare(&from, &to, &partition, &mut list_bytes, &Cancel::new(), &mut |_| {}).unwrap()
    }

    /// Runs a comparison in which such a directory is new.
    fn added(disk: Vec<u8>, list_bytes: usize) -> (Vec<String>, String) {
        let mut before = disk.clone();
        before[ROOT_AT] = 0;
        let (files, remark) = compared(before, disk, list_bytes);
        let files = files.unwrap();
        assert!(files.iter().all(|file| file.change == FileChange::Added));
        (files.into_iter().map(|file| file.path).collect(), remark.unwrap())
    }

    #[test]
    fn directories_that_contain_themselves_do_not_take_all_memory() {
        let disk = fat_in_itself("", 1000);
        let (files, remark) = compared(disk.clone(), disk, CHANGED_FILES_BYTES_MAX);
        assert_eq!(files, None);
        let remark = remark.unwrap();
        assert!(remark.contains("more than 256 MiB"), "{remark}");
    }

    #[test]
    fn too_deep_directories_are_a_remark() {
        let disk = fat_in_itself("", 1);
        let (files, remark) = compared(disk.clone(), disk.clone(), CHANGED_FILES_BYTES_MAX);
        assert_eq!(files, Some(Vec::new()));
        let remark = remark.unwrap();
        assert!(remark.contains("deeper than 256 directories"), "{remark}");
        let (paths, remark) = added(disk, CHANGED_FILES_BYTES_MAX);
        assert_eq!(paths.iter().map(|path| path.matches('/').count()).max(), Some(DEPTH_MAX));
        assert!(remark.contains("deeper than 256 directories"), "{remark}");
    }

    #[test]
    fn too_long_paths_are_a_remark() {
        let name = "n".repeat(247);
        let (paths, remark) = added(fat_in_itself(&name, 1), CHANGED_FILES_BYTES_MAX);
        let longest = paths.iter().map(String::len).max().unwrap();
        assert!((PATH_BYTES_MAX - name.len()..=PATH_BYTES_MAX).contains(&longest), "{longest}");
        assert!(remark.contains("more than 4096 bytes"), "{remark}");
    }

    #[test]
    fn the_list_of_changed_files_has_a_memory_limit() {
        let (paths, remark) = added(fat_in_itself("", 10), 1000);
        let bytes: usize = paths.iter().map(|path| size_of::<ChangedFile>() + path.len()).sum();
        assert!(!paths.is_empty() && bytes <= 1000, "{bytes}");
        assert!(remark.contains("the others are not listed"), "{remark}");
    }

    /// A disk on which every read except at its beginning panics, like a crate that cannot handle damage.
    struct Surprising(Arc<dyn Device>);

    impl Device for Surprising {
        fn geometry(&self) -> Geometry {
            self.0.geometry()
        }

        fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
            assert!(!matches!(&op, Op::Read { range, .. } if range.offset() > 0), "a surprise");
            self.0.try_now(op)
        }

        fn submit(&self, request: Request, done: Completion) {
            self.0.submit(request, done);
        }

        fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
            self.0.extents(range, max_extents)
        }
    }

    #[test]
    fn first_results_stay_if_comparing_all_contents_fails() {
        // A file of a whole cluster, which is read only to compare contents, and a file of which only the
        // time differs.
        let mut before = fat_in_itself("", 0);
        before[ROOT_AT..ROOT_AT + 32].copy_from_slice(&entry(b"LARGE      ", 0x20, 2));
        before[ROOT_AT + 28..ROOT_AT + 32].copy_from_slice(&65_536_u32.to_le_bytes());
        before[ROOT_AT + 32..ROOT_AT + 64].copy_from_slice(&entry(b"TOUCHED    ", 0x20, 0));
        let mut after = before.clone();
        after[ROOT_AT + 32 + 24] = 1;
        let ((from, partition), (to, _)) = (device(before), device(after));
        let touched =
            vec![ChangedFile { path: "/TOUCHED".to_owned(), change: FileChange::Attributes, size_bytes: 0 }];
        let look = |from: &Arc<dyn Device>| {
            let mut list_bytes = CHANGED_FILES_BYTES_MAX;
            let found = compare(from, &to, &partition, &mut list_bytes, &Cancel::new(), &mut |_| {}).unwrap();
            (found, list_bytes)
        };
        let (found, left_bytes) = look(&from);
        assert_eq!(found, (Some(touched.clone()), None));
        let surprising: Arc<dyn Device> = Arc::new(Surprising(from));
        let ((files, remark), left_as_well) = look(&surprising);
        assert_eq!((files, left_as_well), (Some(touched), left_bytes));
        let remark = remark.unwrap();
        assert!(remark.contains("were not compared") && remark.ends_with("it is damaged"), "{remark}");
    }
}
