//! Reads single files of a disk by their names, for callers outside of this crate that know the name of one
//! file.
//!
//! Names are followed through directories, but not through symbolic links.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use headwater_block::{Device, size};
use headwater_filesystems::{Fault, FileSystem, Node, NodeKind, Partition, Visits, fault};

use crate::diff::tree;
use crate::error::{ImageError, ImageErrorKind};
use crate::units::{u64_of, usize_of};

/// The most directory entries that are examined for one name.
const ENTRIES_MAX: u64 = 1_000_000;

/// The numbers of the partitions that have an entry with this path; 0 is the whole disk. Partitions whose
/// file system cannot be read are left out.
pub fn partitions_with(disk: &Arc<dyn Device>, path: &str) -> Result<Vec<u32>, ImageError> {
    let mut found = Vec::new();
    for partition in tree::find_readable(disk.as_ref())?.partitions {
        let outcome = in_tree(disk, &partition, |tree| find(tree, path));
        if matches!(outcome, Ok(Some(_))) {
            found.push(partition.number);
        }
    }
    Ok(found)
}

/// The bytes of a file in a partition; `None` if there is no such file.
pub fn read_file(
    disk: &Arc<dyn Device>,
    partition: u32,
    path: &str,
    most_bytes: u64,
) -> Result<Option<Vec<u8>>, ImageError> {
    let failed = |kind, why: &dyn std::fmt::Display| {
        ImageError::new(kind, format!("cannot read {path} in partition {partition}: {why}"))
    };
    let mut all = tree::find_readable(disk.as_ref())?.partitions.into_iter();
    let Some(partition) = all.find(|found| found.number == partition) else { return Ok(None) };
    let read = in_tree(disk, &partition, |tree| {
        let Some(node) = find(tree, path)?.filter(|node| node.kind == NodeKind::File) else {
            return Ok(None);
        };
        if node.size_bytes > most_bytes {
            return Ok(Some(Err(node.size_bytes)));
        }
        let mut bytes = vec![0; usize_of(node.size_bytes)];
        let mut have = 0;
        while let Some(rest) = bytes.get_mut(have..).filter(|rest| !rest.is_empty()) {
            match tree.read(&node, u64_of(have), rest)? {
                0 => return Err(fault("it is shorter than its directory entry says")),
                len => have += len,
            }
        }
        Ok(Some(Ok(bytes)))
    });
    match read {
        Ok(None) => Ok(None),
        Ok(Some(Ok(bytes))) => Ok(Some(bytes)),
        Ok(Some(Err(bytes))) => {
            let why =
                format!("it has {}, and the limit is {}", size::format(bytes), size::format(most_bytes));
            Err(failed(ImageErrorKind::Invalid, &why))
        }
        Err(fault) => Err(failed(ImageErrorKind::Damaged, &fault)),
    }
}

fn in_tree<T>(
    disk: &Arc<dyn Device>,
    partition: &Partition,
    work: impl FnOnce(&mut dyn FileSystem) -> Result<T, Fault>,
) -> Result<T, Fault> {
    // Malicious file systems must not end the process, even if a crate panics on them.
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let mut tree = tree::open(disk, partition)?;
        work(&mut *tree)
    }));
    outcome.unwrap_or_else(|_| Err(fault("the file system is too damaged to be read")))
}

fn find(tree: &mut dyn FileSystem, path: &str) -> Result<Option<Node>, Fault> {
    let mut visits = Visits::of(ENTRIES_MAX, || false);
    let mut node = tree.root();
    for name in path.split('/').filter(|name| !name.is_empty()) {
        if node.kind != NodeKind::Directory {
            return Ok(None);
        }
        match tree.list(&node, &mut visits)?.remove(name.as_bytes()) {
            Some(found) => node = found,
            None => return Ok(None),
        }
    }
    match node.fault.take() {
        Some(fault) => Err(fault),
        None => Ok(Some(node)),
    }
}
