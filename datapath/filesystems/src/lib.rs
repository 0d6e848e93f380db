//! Read-only readers of the file systems of guests: names, metadata, contents, and which file owns a block.
//!
//! ```text
//!   disk --partitions()--> partition --Bytes--> identify() --> name of a kind that is not read (LUKS, VDO ..)
//!                                          \--> open() --> FileSystem: list, read, link      (by directory)
//!                                          |                        \--> scan --> Owners: block -> file -> path (one pass)
//!                                          \--> open_for_scan() --> scan --> Owners              (XFS and Btrfs, too)
//! ```
//!
//! [`placement`] has the places of a file system's bytes on the disk: one piece in a partition, several in a logical volume.
//! [`boot_records`] says what firmware finds on a disk, and [`efi`] whether its loader is signed.
//!
//! # Guarantees
//! - Nothing is written, and nothing that is read is trusted: impossible values give a [`Fault`], never a panic.
//! - Reading a directory tree with a cycle ends: see [`Visits`]. So does reading a chain or an index with a cycle.
//! - Memory is bounded by the constants of [`visits`], [`owners`] and of each reader, not by what a superblock claims.
//!
//! # Limits
//! - Read: ext2, ext3, ext4 ([`ext`]), FAT12, FAT16, FAT32 and NTFS. Of XFS ([`xfs`]) and Btrfs ([`btrfs`]) only the owners of blocks are read. All others of
//!   [`Kind`] are only named. Linear volumes of LVM ([`lvm`]) are found.
//! - At most [`visits::ENTRIES_MAX`] entries, [`visits::DEPTH_MAX`] levels and [`visits::PATH_BYTES_MAX`] bytes in a path
//!   are read. An index of owners takes at most [`owners::OWNERS_BYTES_MAX`] bytes.
//!
//! # Errors
//! A [`Fault`] is a sentence for people. No caller acts differently for different faults. [`PartitionsError`] says which
//! read failed in the search for partitions.
//!
//! # Not here
//! Writing, repairing, and file systems over several disks.
//!
//! Start reading at [`file_system`].

#![cfg_attr(
    not(test),
    warn(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::todo,
        clippy::unimplemented,
        clippy::indexing_slicing,
        clippy::string_slice,
        clippy::get_unwrap,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss
    )
)]

pub mod boot;
pub mod btrfs;
pub mod bytes;
pub mod efi;
pub mod ext;
pub mod fat;
pub mod fault;
pub mod file_system;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod kind;
pub mod lvm;
pub mod names;
pub mod ntfs;
pub mod owners;
pub mod partitions;
pub mod placement;
pub mod visits;
pub mod xfs;

mod crc;
mod fields;
mod units;

pub use boot::{BootRecords, boot_records};
pub use bytes::{Bytes, ReadAt};
pub use crc::crc32;
pub use fault::{Fault, fault};
pub use file_system::{Entries, FileSystem, Node, NodeKind, Owner, Scan, Scanned, open, open_for_scan};
pub use kind::{Found, Kind, identify};
pub use lvm::{LogicalVolume, logical_volumes};
pub use names::Names;
pub use owners::{OwnedRun, Owners};
pub use partitions::{GPT_START_BYTES, Partition, Partitions, PartitionsError, gpt_sector_bytes, partitions};
pub use placement::{Placed, Placement};
pub use visits::Visits;
