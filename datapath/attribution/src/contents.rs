//! The result of a scan of a machine's write cache: which classes of data, files, directories and partitions its
//! changed blocks belong to. `scan` fills it in.

use std::collections::BTreeMap;

use crate::changed::Held;

/// The purpose of changed blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Files and directories.
    File,
    /// Free in the file system: deleted and not trimmed, or written and not yet committed by the guest.
    Free,
    /// The journal or log of the file system.
    Journal,
    /// Swap partitions, swap files, page files, hibernation.
    Swap,
    /// What file systems keep for themselves.
    Metadata,
    /// In a partition whose file system is damaged or not supported.
    Unknown,
    /// Outside of all partitions: the partition table, and boot loaders.
    Outside,
}

/// A file or a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// The number of its partition; 0 is the whole disk.
    pub partition: u32,
    /// From the root of its file system, as the file system has it. `None`: its path is not known.
    pub path: Option<Vec<u8>>,
    /// Its number in the file system: of an inode, a record or a cluster.
    pub id: u64,
    /// Its purpose. Of a directory always [`Class::File`].
    pub class: Class,
    /// Its bytes in the write cache. Of a directory with everything below it.
    pub held: Held,
}

/// A partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionContents {
    /// From 1; 0 is the whole disk.
    pub number: u32,
    /// What is in it, in a few words.
    pub kind: String,
    /// Its bytes in the write cache.
    pub held: Held,
    /// Sentences about incomplete figures.
    pub remarks: Vec<String>,
}

/// The result of a scan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// All changed blocks.
    pub held: Held,
    /// By class. The sum is [`Contents::held`].
    pub classes: BTreeMap<Class, Held>,
    /// All partitions that have something in the write cache.
    pub partitions: Vec<PartitionContents>,
    /// The largest files, largest first: at most [`ITEMS_MAX`](crate::scan::ITEMS_MAX).
    pub files: Vec<Item>,
    /// How many files have something in the write cache.
    pub files_total: u64,
    /// The largest directories, largest first, each with everything below it: at most as many as files.
    pub directories: Vec<Item>,
    /// Space that `fstrim` or its like would give back at most: [`Class::Free`] of each partition, by its number.
    pub free: BTreeMap<u32, Held>,
}

impl Contents {
    /// Adds bytes to a class, and not to `held`.
    pub(crate) fn count(&mut self, class: Class, held: Held) {
        if held != Held::default() {
            self.classes.entry(class).or_default().plus(held);
        }
    }
}
