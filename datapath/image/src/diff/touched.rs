//! Finds the files that cannot be read because of damage.
//!
//! Every file of a readable file system (ext2, ext3, ext4, FAT, NTFS) in a damaged partition is read. The
//! read fails if a chunk that the file needs is damaged. So the list has exactly the unreadable files,
//! whatever the layout. If files claim more bytes than [`Allowance`] permits, a remark says that they were
//! not read to the end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use headwater_block::Device;
use headwater_filesystems::visits::DEPTH_MAX;
use headwater_filesystems::{Fault, FileSystem, Node, NodeKind, Partition, Visits};
use headwater_store::{Hash, Store};

use crate::chunk_cache::ChunkCache;
use crate::diff::allowance::Allowance;
use crate::diff::files::COMPARE_BYTES;
use crate::diff::tree::{self, READABLE};
use crate::error::ImageError;
use crate::progress::Cancel;
use crate::reader::VersionReader;
use crate::units::u64_of;
use crate::verify::Verified;
use crate::verify_round::VerifyRound;

/// The most files that are listed.
pub const TOUCHED_FILES_MAX: usize = 10_000;
/// The most bytes of all their paths together.
pub const TOUCHED_PATHS_BYTES_MAX: usize = 8 << 20;
/// Memory for chunks during the search.
const CHUNKS_BYTES: u64 = 64 << 20;

/// The files that damage affects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Files and directories that cannot be read, by partition and path.
    pub files: Vec<String>,
    /// What could not be examined, and why.
    pub remarks: Vec<String>,
}

/// Finds the files of a version that the damaged chunks affect, at the rate limit of the round. If more
/// chunks are damaged than are listed, all partitions are examined. If the version cannot be opened, the
/// result is a remark. `progress` is called with the number of bytes of files that were read.
pub fn files_touched(
    store: &dyn Store,
    manifest: Hash,
    damage: &Verified,
    round: &VerifyRound,
    cancel: &Cancel,
    progress: &mut dyn FnMut(u64),
) -> Result<Touched, ImageError> {
    let mut touched = Touched::default();
    let version = match VersionReader::open(store, manifest, ChunkCache::new(CHUNKS_BYTES)) {
        Ok(version) => version,
        Err(e) => {
            touched.remarks.push(e.to_string());
            return Ok(touched);
        }
    };
    let version = round.paced(version, cancel);
    let found = match tree::find_readable(version.as_ref()) {
        Ok(found) => found,
        Err(e) => {
            touched.remarks.push(format!("the partition table cannot be read: {e}"));
            return Ok(touched);
        }
    };
    if let Some(e) = found.unread {
        touched.remarks.push(format!("logical partitions may be missing: {e}"));
    }
    let mut read_bytes = 0_u64;
    let mut read = |bytes: u64| {
        read_bytes = read_bytes.saturating_add(bytes);
        progress(read_bytes);
    };
    read(0);
    for partition in found.partitions {
        let end = partition.offset_bytes.saturating_add(partition.len_bytes);
        let mut listed = damage.damaged.iter();
        let is_damaged = listed.any(|chunk| {
            chunk.image_offset < end
                && chunk.image_offset.saturating_add(chunk.image_bytes) > partition.offset_bytes
        });
        if is_damaged || damage.unlisted() > 0 {
            look_into(&version, &partition, cancel, &mut touched, &mut read);
        }
        cancel.check("the search for damaged files")?;
    }
    Ok(touched)
}

fn look_into(
    disk: &Arc<dyn Device>,
    partition: &Partition,
    cancel: &Cancel,
    touched: &mut Touched,
    read: &mut dyn FnMut(u64),
) {
    let prefix = format!("{partition}: ");
    let listed_bytes: usize = touched.files.iter().map(String::len).sum();
    let mut walk = Walk {
        cancel,
        prefix,
        files: std::mem::take(&mut touched.files),
        paths_bytes_left: TOUCHED_PATHS_BYTES_MAX.saturating_sub(listed_bytes),
        is_cut: false,
        visits: tree::visits(cancel),
        allowance: Allowance::of(partition),
        unread: 0,
        first_unread: None,
        read,
    };
    // Malicious file systems must not end the process, even if a crate panics on them.
    let outcome = catch_unwind(AssertUnwindSafe(|| -> Result<(), Fault> {
        let mut tree = tree::open(disk, partition)?;
        let root = tree.root();
        walk.directory(&mut *tree, &root, 0)
    }));
    touched.files = walk.files;
    match outcome {
        Ok(Ok(())) => {}
        Ok(Err(e)) => touched.remarks.push(format!("{partition} is {READABLE} that can be read: {e}")),
        Err(_) => touched.remarks.push(format!("{partition} is too damaged to be read")),
    }
    if walk.is_cut {
        touched.remarks.push(format!(
            "{partition} has more damaged files than are listed: they are more than {TOUCHED_FILES_MAX}, \
             or their paths have more than {} MiB",
            TOUCHED_PATHS_BYTES_MAX >> 20
        ));
    }
    if let Some(cut) = walk.visits.remark() {
        touched.remarks.push(format!("{partition}: {cut}"));
    }
    if let Some(first) = walk.first_unread {
        touched.remarks.push(format!(
            "{partition} has files that claim more bytes than it has, alone or together, \
             and were not read to the end: {}, the first is {first}",
            walk.unread
        ));
    }
}

struct Walk<'a> {
    cancel: &'a Cancel,
    prefix: String,
    files: Vec<String>,
    paths_bytes_left: usize,
    /// Whether the list is incomplete.
    is_cut: bool,
    visits: Visits,
    allowance: Allowance,
    /// The number of files that were not read to the end, and the path of the first of them.
    unread: u64,
    first_unread: Option<String>,
    /// Called with the number of additional bytes that were read.
    read: &'a mut dyn FnMut(u64),
}

impl Walk<'_> {
    fn note(&mut self, node: &Node) {
        let file = format!("{}{}", self.prefix, String::from_utf8_lossy(&node.path));
        match self.paths_bytes_left.checked_sub(file.len()) {
            Some(left) if self.files.len() < TOUCHED_FILES_MAX => {
                self.paths_bytes_left = left;
                self.files.push(file);
            }
            _ => self.is_cut = true,
        }
    }

    /// Examines a directory that is nested `depth` levels deep.
    fn directory(&mut self, tree: &mut dyn FileSystem, directory: &Node, depth: usize) -> Result<(), Fault> {
        if depth >= DEPTH_MAX {
            self.visits.cut();
            return Ok(());
        }
        let held_bytes = self.visits.held_bytes();
        let Ok(entries) = tree.list(directory, &mut self.visits) else {
            self.visits.check()?;
            self.visits.release_to(held_bytes);
            self.note(directory);
            return Ok(());
        };
        for node in entries.into_values() {
            if self.cancel.is_cancelled() {
                return Ok(());
            }
            if node.kind == NodeKind::Directory {
                self.directory(tree, &node, depth + 1)?;
            } else if node.fault.is_some() || !self.is_readable(tree, &node) {
                self.note(&node);
            }
        }
        self.visits.release_to(held_bytes);
        Ok(())
    }

    /// Whether an entry can be read, as far as the allowance permits.
    fn is_readable(&mut self, tree: &mut dyn FileSystem, node: &Node) -> bool {
        match node.kind {
            NodeKind::Link => return tree.link(node).is_ok(),
            NodeKind::File => {}
            NodeKind::Directory | NodeKind::Other => return true,
        }
        let most_bytes = self.allowance.of_file(node.size_bytes);
        let mut buffer = vec![0; COMPARE_BYTES];
        let mut at = 0u64;
        let mut is_readable = true;
        while !self.cancel.is_cancelled() {
            // The end is read too, even of an empty file, so that the file is opened.
            if (most_bytes..node.size_bytes).contains(&at) {
                self.note_unread(node);
                break;
            }
            match tree.read(node, at, &mut buffer) {
                Ok(0) => break,
                Ok(len) => {
                    at = at.saturating_add(u64_of(len));
                    (self.read)(u64_of(len));
                }
                Err(_) => {
                    is_readable = false;
                    break;
                }
            }
        }
        self.allowance.spend(at);
        is_readable
    }

    fn note_unread(&mut self, node: &Node) {
        self.unread += 1;
        if self.first_unread.is_none() {
            self.first_unread = Some(String::from_utf8_lossy(&node.path).into_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diff::crafted::{CLUSTER_AT, device, fat_in_itself};

    fn looked_into(disk: Vec<u8>, mut touched: Touched) -> Touched {
        let (disk, partition) = device(disk);
        look_into(&disk, &partition, &Cancel::new(), &mut touched, &mut |_| {});
        touched
    }

    #[test]
    fn directories_that_contain_themselves_do_not_take_all_memory() {
        let touched = looked_into(fat_in_itself("", 2000), Touched::default());
        assert_eq!((touched.files.len(), touched.remarks.len()), (0, 1), "{:?}", touched.remarks);
        assert!(touched.remarks[0].contains("more than 256 MiB"), "{:?}", touched.remarks);
    }

    #[test]
    fn too_deep_directories_are_a_remark() {
        for name in [String::new(), "n".repeat(247)] {
            let touched = looked_into(fat_in_itself(&name, 1), Touched::default());
            assert_eq!((touched.files.len(), touched.remarks.len()), (0, 1), "{:?}", touched.remarks);
            assert!(touched.remarks[0].contains("were skipped"), "{:?}", touched.remarks);
        }
    }

    #[test]
    fn the_paths_of_damaged_files_have_a_memory_limit() {
        let mut disk = fat_in_itself("", 1);
        // The directory's entry for itself now claims a byte, and has no cluster.
        disk[CLUSTER_AT + 32 + 28] = 1;
        let before = "x".repeat(TOUCHED_PATHS_BYTES_MAX - 100);
        let touched = looked_into(disk, Touched { files: vec![before], remarks: Vec::new() });
        let bytes: usize = touched.files.iter().map(String::len).sum();
        assert!(touched.files.len() > 1 && bytes <= TOUCHED_PATHS_BYTES_MAX, "{bytes}");
        assert!(touched.remarks[0].contains("more damaged files than are listed"), "{:?}", touched.remarks);
    }
}
