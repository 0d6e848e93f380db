//! One machine's disk while in use: a write cache over a base (an image version, a raw file, or nothing).
//!
//! ```text
//!  Device::try_now / submit
//!     read:  1 write cache, RAM   2 write cache, zero   3 write cache, overflow disk   4 base
//!     write: the write cache, always; the base is never written
//!  freeze -> FrozenView, a Device of one instant, while requests go on
//! ```
//!
//! # Guarantees
//! - Two volumes over one base share nothing that can be written.
//! - A read or write of whole blocks that finds them in RAM is finished by `try_now`.
//! - A whole block that equals the image's data in memory takes no space, and frees the space of the block's
//!   earlier contents (if the block is overwritten in place, only a sample and runs are compared).
//! - A write of sectors of a block reads nothing first. Where sectors have to be merged with the rest of the
//!   block, the block's lock is held. So two writes to different sectors of one block both survive.
//! - With a persistent write cache, a flush and a write with FUA are answered when they are durable.
//!   Otherwise a flush is a no-op, because a machine's writes are forgotten at its next boot.
//! - A volume in a file ([`Volume::open_in`]) outlives its process: the next process finds all answered
//!   writes.
//! - A read that waits only for the base keeps only the base alive, however long the base takes. A view that
//!   is dropped, or a volume that is closed, meanwhile frees its memory at once.
//!
//! # Limits
//! - Volumes up to 16 TiB less 8 KiB; the size is the base's size; logical blocks of 512 bytes.
//! - One thread for discards and zero writes longer than 1 GiB, one after another, while there are any.
//!
//! # Errors
//! The errors of the write cache and of the base, unchanged.
//!
//! # Not here
//! No protocol, no machine, and no lifecycle beyond open and close.
//!
//! Start reading at [`volume`], then [`read`] and [`write`] for what cannot be finished at once.

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

mod clearing;
pub mod counters;
mod elide;
pub mod freeze;
pub mod latency;
pub mod options;
pub mod pieces;
pub mod read;
mod together;
pub mod volume;
pub mod write;

pub use counters::{ReadOps, VolumeCounters};
pub use freeze::{ChangedRun, FrozenView};
pub use headwater_writecache::{Handover, Residence, Shortage};
pub use latency::{Latency, LatencySnapshot};
pub use options::{
    Buffering, CacheMode, DEFAULT_PAUSE_LIMIT, DEFAULT_WEIGHT, LittleSpace, PersistentOptions, VolumeOptions,
    disk_mode_ram_bytes,
};
pub use volume::Volume;
