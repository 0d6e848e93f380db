//! The files that damage touches: those that cannot be read.
//!
//! Every file of an ext2, ext3 or ext4 file system in a damaged partition is read; reading fails where a chunk that it
//! needs is damaged. So what is listed is exactly what users miss, whatever the layout of the file system.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use ext4_view::{Ext4, Ext4Error, Metadata, PathBuf};
use headwater_store::{Hash, Store};

use crate::chunk_cache::ChunkCache;
use crate::diff::files::{COMPARE_BYTES, DEPTH_MAX, entries, fill, load};
use crate::diff::partitions::{self, Partition};
use crate::error::ImageError;
use crate::progress::Cancel;
use crate::reader::VersionReader;
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

/// Finds the files of a version that the damaged chunks touch. A version that cannot be opened is a remark.
pub fn files_touched(
    store: &dyn Store,
    manifest: Hash,
    damaged: &[DamagedChunk],
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
    let found = match partitions::find(&version) {
        Ok(found) => found,
        Err(e) => {
            touched.remarks.push(format!("the partition table cannot be read: {e}"));
            return Ok(touched);
        }
    };
    for partition in found {
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

fn look_into(version: &Arc<VersionReader>, partition: &Partition, cancel: &Cancel, touched: &mut Touched) {
    let mut walk = Walk { cancel, prefix: format!("partition {}: ", partition.number), files: Vec::new() };
    // Hostile bytes must not end the caller, whatever the crate makes of them.
    let outcome = catch_unwind(AssertUnwindSafe(|| -> Result<(), Ext4Error> {
        let fs = load(version, partition)?;
        walk.directory(&fs, &PathBuf::new("/"), 0);
        Ok(())
    }));
    touched.files.append(&mut walk.files);
    let number = partition.number;
    match outcome {
        Ok(Ok(())) => {}
        Ok(Err(e)) => {
            touched
                .remarks
                .push(format!("partition {number} is no ext2, ext3 or ext4 that can be read: {e}"));
        }
        Err(_) => touched.remarks.push(format!("partition {number} is too damaged to be looked into")),
    }
}

struct Walk<'a> {
    cancel: &'a Cancel,
    prefix: String,
    files: Vec<String>,
}

impl Walk<'_> {
    fn note(&mut self, path: &PathBuf) {
        if self.files.len() < TOUCHED_FILES_MAX {
            self.files.push(format!("{}{}", self.prefix, String::from_utf8_lossy(path.as_ref())));
        }
    }

    fn directory(&mut self, fs: &Ext4, path: &PathBuf, depth: usize) {
        let Ok(entries) = entries(fs, path) else { return self.note(path) };
        for (path, metadata) in entries.into_values() {
            if self.cancel.is_cancelled() || depth >= DEPTH_MAX {
                return;
            }
            if metadata.is_dir() {
                self.directory(fs, &path, depth + 1);
            } else if !self.is_readable(fs, &path, &metadata) {
                self.note(&path);
            }
        }
    }

    fn is_readable(&self, fs: &Ext4, path: &PathBuf, metadata: &Metadata) -> bool {
        if metadata.is_symlink() {
            return fs.read_link(path).is_ok();
        }
        if !metadata.file_type().is_regular_file() {
            return true;
        }
        let Ok(mut file) = fs.open(path) else { return false };
        let mut buffer = vec![0; COMPARE_BYTES];
        while !self.cancel.is_cancelled() {
            match fill(&mut file, &mut buffer) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(_) => return false,
            }
        }
        true
    }
}
