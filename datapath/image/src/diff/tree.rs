//! Opens the file systems of a disk (partitions, or the whole disk), for the comparison of files and the
//! search for damaged files.

use std::sync::Arc;

use headwater_block::Device;
use headwater_filesystems::{
    Bytes, Fault, FileSystem, Partition, Partitions, PartitionsError, Visits, partitions,
};

use crate::error::ImageError;
use crate::progress::Cancel;

/// The kinds that can be read, for messages.
pub(crate) const READABLE: &str = "no ext2, ext3, ext4, FAT or NTFS";

/// Opens the file system in a partition.
pub(crate) fn open(disk: &Arc<dyn Device>, partition: &Partition) -> Result<Box<dyn FileSystem>, Fault> {
    headwater_filesystems::open(Bytes::new(Arc::new(Arc::clone(disk)), partition))
}

/// The limits of a walk through a file system that ends if it is cancelled.
pub(crate) fn visits(cancel: &Cancel) -> Visits {
    let cancel = cancel.clone();
    Visits::new(move || cancel.is_cancelled())
}

/// The partitions of a disk; the whole disk if it has no valid partition.
pub(crate) fn find(disk: &dyn Device) -> Result<Vec<Partition>, ImageError> {
    let found = find_readable(disk)?;
    match found.unread {
        Some(e) => Err(image_error(e)),
        None => Ok(found.partitions),
    }
}

/// As [`find`], even if a table of logical partitions cannot be read.
pub(crate) fn find_readable(disk: &dyn Device) -> Result<Partitions, ImageError> {
    partitions(&disk, disk.geometry().logical_block_bytes.into()).map_err(image_error)
}

/// An error that names the table that cannot be read.
fn image_error(e: PartitionsError) -> ImageError {
    match e.tried {
        Some(tried) => ImageError::from(e.source).context(tried),
        None => e.source.into(),
    }
}
