//! Who fills a write cache: the owner of each changed block of a disk, by the metadata of the disk's file systems.
//!
//! ```text
//!   write cache --> Changed: runs of blocks, and where each is (RAM, packed, disk)
//!                      |
//!   disk --partitions--> file systems --scan--> Run: claims its changed sectors for their owner --> bytes by owner
//!                                          \--> Name: a name and its directory                  --> paths, directories
//! ```
//! Sectors that no file claims are free: those of files that were deleted and not trimmed, and those that the guest wrote a
//! moment ago and whose metadata it has not written yet.
//!
//! # Guarantees
//! - Each changed byte is counted once, by the first owner that claims it.
//! - A disk that makes no sense ends in [`Class::Unknown`] with a remark, and never in a panic or without an end.
//! - Memory is bounded by the constants of [`changed`] and [`scan`], and by those of the readers, not by what the disk says.
//!
//! # Limits
//! - [`changed::RUNS_MAX`] runs and [`changed::BLOCKS_MAX`] blocks. More of them are an error.
//! - [`scan::OWNERS_MAX`] files and [`scan::NAMES_BYTES_MAX`] bytes of names for a file system. The rest is counted without
//!   its path, and a remark says so.
//!
//! # Errors
//! A [`headwater_filesystems::Fault`], if there are too many changes, or if the scan was cancelled.
//!
//! # Not here
//! Reading the write cache, freezing it, and advice.
//!
//! Start reading at [`scan::scan`].

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

pub mod changed;
pub mod contents;
pub mod escape;
pub mod scan;

mod claims;

pub use changed::{Changed, Held, Place};
pub use contents::{Class, Contents, Item, PartitionContents};
pub use escape::escaped;
pub use scan::scan;
