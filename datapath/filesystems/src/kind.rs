//! What is in a partition, by its magic numbers: file systems that are read, and those that are only named.

use crate::fat::is_fat;
use crate::{Bytes, Fault, lvm};

/// A file system, or something else that fills a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// ext2: no journal and no features of ext4.
    Ext2,
    /// ext3: a journal and no features of ext4.
    Ext3,
    /// ext4.
    Ext4,
    /// FAT12, FAT16 or FAT32.
    Fat,
    /// NTFS.
    Ntfs,
    /// The journal of an ext3 or ext4 on another device.
    ExtJournal,
    /// LVM physical volume.
    Lvm,
}

/// What was found, and what it says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// What it is.
    pub kind: Kind,
    /// More about it: the volumes of an LVM.
    pub details: Option<String>,
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.kind)?;
        match &self.details {
            Some(details) => write!(f, " ({details})"),
            None => Ok(()),
        }
    }
}

/// What is in a partition, if that is known.
pub fn identify(bytes: &mut Bytes) -> Result<Option<Found>, Fault> {
    let mut boot = [0; 512];
    bytes.read(0, &mut boot)?;
    if is_fat(&boot) {
        return Ok(Some(Found { kind: Kind::Fat, details: None }));
    }
    let _ = lvm::volumes(bytes)?;
    Ok(None)
}
