//! Compares two versions: chunks, 4 KiB blocks, and files of readable file systems.
//!
//! ```text
//!   manifests --hashes differ--> chunks --both read and compared--> 4 KiB blocks
//!   partitions (GPT, MBR, or the whole disk) --readable in both, and blocks changed--> files
//! ```
//! Only chunks whose hashes differ are read to count blocks. A file system is read if its partition changed
//! and it is ext2, ext3, ext4, FAT or NTFS in both versions. Other partitions are listed without their
//! contents. The crate headwater-filesystems reads file systems.
//!
//! - [`tree`]: opens the file systems of a disk. [`named`]: reads single files by name.
//! - [`files`]: compares two file systems. [`touched`]: reads one file system to find its damaged files.
//!   [`allowance`]: limits how many bytes of files both read. [`small`]: reads a few files of one file system
//!   by their paths.

mod allowance;
#[cfg(test)]
mod crafted;
mod files;
mod named;
mod small;
mod touched;
pub(crate) mod tree;

use std::sync::Arc;

use headwater_block::{Device, blocking};
use headwater_store::{Hash, Store};

use crate::chunk_cache::ChunkCache;
use crate::error::ImageError;
use crate::manifest::Manifest;
use crate::progress::{Cancel, Progress};
use crate::reader::VersionReader;
use crate::units::{usize_of, usize_of_u32};

pub use files::{CHANGED_FILES_BYTES_MAX, CHANGED_FILES_MAX, ChangedFile, FileChange};
pub use headwater_filesystems::partitions::PARTITIONS_MAX;
pub use named::{partitions_with, read_file};
pub use small::{SMALL_FILE_BYTES_MAX, SMALL_FILES_MAX, SmallFile, SmallFiles, small_files};
pub use touched::{TOUCHED_FILES_MAX, TOUCHED_PATHS_BYTES_MAX, Touched, files_touched};

/// The unit in which changed bytes are counted.
pub const DIFF_BLOCK_BYTES: usize = 4096;
/// Memory for chunks while files are compared.
const CHUNKS_BYTES: u64 = 64 << 20;

/// What changed from one version to another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// Size of the older image.
    pub from_bytes: u64,
    /// Size of the newer image.
    pub to_bytes: u64,
    /// Chunks of the larger image that differ.
    pub changed_chunks: u64,
    /// Bytes in blocks of [`DIFF_BLOCK_BYTES`] that differ.
    pub changed_bytes: u64,
    /// The partitions of the newer image.
    pub partitions: Vec<PartitionDifference>,
}

/// What changed in one partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionDifference {
    /// Its number, from 1; 0 is the whole disk.
    pub number: u32,
    /// Where it starts, in bytes.
    pub offset_bytes: u64,
    /// Its length, in bytes.
    pub len_bytes: u64,
    /// Bytes in changed blocks.
    pub changed_bytes: u64,
    /// Changed files, by path; `None` if nothing changed or no file system could be read.
    pub files: Option<Vec<ChangedFile>>,
    /// Why files are missing, why the list is incomplete, or why files were not read.
    pub remark: Option<String>,
}

/// The progress of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiffProgress {
    /// It compares the chunks whose hashes differ.
    Chunks(Progress),
    /// It compares files. The total is not known.
    Files {
        /// Bytes of files that were read of both versions and compared.
        compared_bytes: u64,
    },
}

/// Compares two versions of one store.
pub fn diff(
    store: &dyn Store,
    from: Hash,
    to: Hash,
    cancel: &Cancel,
    progress: &mut dyn FnMut(DiffProgress),
) -> Result<Difference, ImageError> {
    // One cache for both versions: a chunk that both have is fetched once if both read it one after the
    // other.
    let cache = ChunkCache::new(CHUNKS_BYTES);
    let from = VersionReader::open(store, from, Arc::clone(&cache))?;
    let to = VersionReader::open(store, to, cache)?;
    let mut found = Difference {
        from_bytes: from.outline().size_bytes(),
        to_bytes: to.outline().size_bytes(),
        ..Difference::default()
    };
    let changed =
        changed_blocks(&from, &to, &mut found, cancel, &mut |at| progress(DiffProgress::Chunks(at)))?;
    let (from, to): (Arc<dyn Device>, Arc<dyn Device>) = (from, to);
    found.changed_bytes = changed.iter().map(|(start, end)| end - start).sum();
    let mut list_bytes_left = CHANGED_FILES_BYTES_MAX;
    let mut compared_bytes = 0_u64;
    let mut compared = |bytes: u64| {
        compared_bytes = compared_bytes.saturating_add(bytes);
        progress(DiffProgress::Files { compared_bytes });
    };
    for partition in tree::find(to.as_ref())? {
        cancel.check("the comparison")?;
        let inside = |(start, end): &(u64, u64)| {
            let last = partition.offset_bytes.saturating_add(partition.len_bytes);
            (*end).min(last).saturating_sub((*start).max(partition.offset_bytes))
        };
        let changed_bytes = changed.iter().map(inside).sum();
        let (files, remark) = if changed_bytes == 0 {
            (None, None)
        } else {
            compared(0);
            files::compare(&from, &to, &partition, &mut list_bytes_left, cancel, &mut compared)?
        };
        found.partitions.push(PartitionDifference {
            number: partition.number,
            offset_bytes: partition.offset_bytes,
            len_bytes: partition.len_bytes,
            changed_bytes,
            files,
            remark,
        });
    }
    Ok(found)
}

/// The ranges of changed blocks, ascending. If the images differ in size, the part that only one of them has
/// counts as changed unless it is zero.
fn changed_blocks(
    from: &VersionReader,
    to: &VersionReader,
    found: &mut Difference,
    cancel: &Cancel,
    progress: &mut dyn FnMut(Progress),
) -> Result<Vec<(u64, u64)>, ImageError> {
    let indices = changed_chunks(&*from.manifest()?, &*to.manifest()?);
    let chunk_bytes = u64::from(to.outline().chunk_bytes());
    found.changed_chunks = u64::try_from(indices.len()).unwrap_or(u64::MAX);
    let total_bytes = found.changed_chunks.saturating_mul(chunk_bytes);
    let (mut old, mut new) = (chunk_buffer(to), chunk_buffer(to));
    let mut changed: Vec<(u64, u64)> = Vec::new();
    for (done, index) in (0u64..).zip(indices) {
        cancel.check("the comparison")?;
        let offset = index.saturating_mul(chunk_bytes);
        read_padded(from, offset, &mut old)?;
        read_padded(to, offset, &mut new)?;
        let blocks = old.chunks(DIFF_BLOCK_BYTES).zip(new.chunks(DIFF_BLOCK_BYTES));
        let mut at = offset;
        for (before, after) in blocks {
            let end = at.saturating_add(u64::try_from(after.len()).unwrap_or(0));
            if before != after {
                match changed.last_mut() {
                    Some(last) if last.1 == at => last.1 = end,
                    _ => changed.push((at, end)),
                }
            }
            at = end;
        }
        progress(Progress { done_bytes: (done + 1).saturating_mul(chunk_bytes), total_bytes });
    }
    Ok(changed)
}

fn chunk_buffer(version: &VersionReader) -> Vec<u8> {
    vec![0; usize_of_u32(version.outline().chunk_bytes())]
}

/// Reads a chunk; bytes after the end of the image are zero.
fn read_padded(version: &VersionReader, offset: u64, into: &mut [u8]) -> Result<(), ImageError> {
    let size_bytes = version.outline().size_bytes();
    let len = usize_of(size_bytes.saturating_sub(offset)).min(into.len());
    let (inside, after) = into.split_at_mut(len);
    after.fill(0);
    if !inside.is_empty() {
        blocking::read(version, offset, inside)?;
    }
    Ok(())
}

/// Numbers of the chunks whose content differs.
fn changed_chunks(from: &Manifest, to: &Manifest) -> Vec<u64> {
    let (mut old, mut new) = (from.data().peekable(), to.data().peekable());
    let mut out = Vec::new();
    loop {
        match (old.peek(), new.peek()) {
            (Some((a, before)), Some((b, after))) if a == b => {
                if before.hash != after.hash {
                    out.push(*a);
                }
                old.next();
                new.next();
            }
            (Some((a, _)), Some((b, _))) if a < b => {
                out.push(*a);
                old.next();
            }
            (Some((a, _)), None) => {
                out.push(*a);
                old.next();
            }
            (_, Some((b, _))) => {
                out.push(*b);
                new.next();
            }
            (None, None) => return out,
        }
    }
}
