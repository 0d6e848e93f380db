//! The files that damage touches: those that cannot be read.
//!
//! Every file of a file system that can be read in a damaged partition (ext2, ext3, ext4, FAT, NTFS) is read; reading fails
//! where a chunk that it needs is damaged. So what is listed is exactly what users miss, whatever the layout. Of files
//! that claim more than [`Allowance`] lets be read, a remark says that they were not read to the end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use headwater_block::Device;
use headwater_store::{Hash, Store};

use crate::chunk_cache::ChunkCache;
use crate::diff::allowance::Allowance;
use crate::diff::files::{COMPARE_BYTES, DEPTH_MAX};
use crate::diff::partitions::{self, Partition};
use crate::diff::tree::{self, Fault, Kind, Node, READABLE, Tree, Visits};
use crate::error::ImageError;
use crate::progress::Cancel;
use crate::reader::VersionReader;
use crate::round::Round;
use crate::units::u64_of;
use crate::verify::DamagedChunk;

/// The most files that are listed.
pub const TOUCHED_FILES_MAX: usize = 10_000;
/// Memory for chunks meanwhile.
const CHUNKS_BYTES: u64 = 64 << 20;

/// What damage touches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Files and directories that cannot be read, by partition and path.
    pub files: Vec<String>,
    /// What could not be looked into, and why.
    pub remarks: Vec<String>,
}

/// Finds the files of a version that the damaged chunks touch, at the rate of the round. A version that cannot be opened is a remark.
pub fn files_touched(
    store: &dyn Store,
    manifest: Hash,
    damaged: &[DamagedChunk],
    round: &Round,
    cancel: &Cancel,
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
    let found = match partitions::find_readable(version.as_ref()) {
        Ok(found) => found,
        Err(e) => {
            touched.remarks.push(format!("the partition table cannot be read: {e}"));
            return Ok(touched);
        }
    };
    if let Some(e) = found.unread {
        touched.remarks.push(format!("logical partitions may be missing: {e}"));
    }
    for partition in found.partitions {
        let end = partition.offset_bytes.saturating_add(partition.len_bytes);
        let is_damaged = damaged.iter().any(|chunk| {
            chunk.image_offset < end
                && chunk.image_offset.saturating_add(chunk.image_bytes) > partition.offset_bytes
        });
        if is_damaged {
            look_into(&version, &partition, cancel, &mut touched);
        }
        cancel.check("the search for damaged files")?;
    }
    Ok(touched)
}

fn look_into(disk: &Arc<dyn Device>, partition: &Partition, cancel: &Cancel, touched: &mut Touched) {
    let prefix = format!("partition {}: ", partition.number);
    let mut walk = Walk {
        cancel,
        prefix,
        files: Vec::new(),
        visits: Visits::new(cancel),
        allowance: Allowance::of(partition),
        unread: 0,
        first_unread: None,
    };
    // Hostile bytes must not end the caller, whatever a crate makes of them.
    let outcome = catch_unwind(AssertUnwindSafe(|| -> Result<(), Fault> {
        let mut tree = tree::open(disk, partition)?;
        let root = tree.root();
        walk.directory(&mut *tree, &root, 0)
    }));
    touched.files.append(&mut walk.files);
    let number = partition.number;
    match outcome {
        Ok(Ok(())) => {}
        Ok(Err(e)) => touched.remarks.push(format!("partition {number} is {READABLE} that can be read: {e}")),
        Err(_) => touched.remarks.push(format!("partition {number} is too damaged to be looked into")),
    }
    if let Some(first) = walk.first_unread {
        touched.remarks.push(format!(
            "partition {number} has files that claim more than it holds, alone or together, \
             and were not read to the end: {}, the first is {first}",
            walk.unread
        ));
    }
}

struct Walk<'a> {
    cancel: &'a Cancel,
    prefix: String,
    files: Vec<String>,
    visits: Visits,
    allowance: Allowance,
    /// Files that were not read to the end, and the path of the first one.
    unread: u64,
    first_unread: Option<String>,
}

impl Walk<'_> {
    fn note(&mut self, node: &Node) {
        if self.files.len() < TOUCHED_FILES_MAX {
            self.files.push(format!("{}{}", self.prefix, String::from_utf8_lossy(&node.path)));
        }
    }

    fn directory(&mut self, tree: &mut dyn Tree, directory: &Node, depth: usize) -> Result<(), Fault> {
        let Ok(entries) = tree.list(directory, &mut self.visits) else {
            self.visits.check()?;
            self.note(directory);
            return Ok(());
        };
        for node in entries.into_values() {
            if self.cancel.is_cancelled() || depth >= DEPTH_MAX {
                return Ok(());
            }
            if node.kind == Kind::Directory {
                self.directory(tree, &node, depth + 1)?;
            } else if node.fault.is_some() || !self.is_readable(tree, &node) {
                self.note(&node);
            }
        }
        Ok(())
    }

    /// Whether an entry can be read, as far as the allowance goes.
    fn is_readable(&mut self, tree: &mut dyn Tree, node: &Node) -> bool {
        match node.kind {
            Kind::Link => return tree.link(node).is_ok(),
            Kind::File => {}
            Kind::Directory | Kind::Other => return true,
        }
        let most_bytes = self.allowance.of_file(node.size_bytes);
        let mut buffer = vec![0; COMPARE_BYTES];
        let mut at = 0u64;
        let mut is_readable = true;
        while !self.cancel.is_cancelled() {
            // Its end is read for, too: so an empty file is opened.
            if (most_bytes..node.size_bytes).contains(&at) {
                self.note_unread(node);
                break;
            }
            match tree.read(node, at, &mut buffer) {
                Ok(0) => break,
                Ok(len) => at = at.saturating_add(u64_of(len)),
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
