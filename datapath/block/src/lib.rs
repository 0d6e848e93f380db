//! The common vocabulary of the data path: units, ranges, errors and the [`Device`] trait.
//!
//! ```text
//!   front-end  --Op-->  Device::try_now  --Done-------->  reply (same thread)
//!                          |
//!                          +--MustWait--> Device::submit(Request, Completion) --> reply (any thread)
//! ```
//!
//! # Guarantees
//! - A front-end checks ranges with [`Geometry::check`] before it calls a device. A device checks again only
//!   if a wrong range would be unsound.
//! - What can be finished without I/O and without waiting is finished by [`Device::try_now`] on the
//!   caller's thread. Everything else goes through [`Device::submit`] and is completed exactly once.
//! - [`Completion`] cannot be lost: dropping one unanswered answers it with an error.
//!
//! # Limits
//! - [`BLOCK_BYTES`] is 4096; offsets and lengths of requests are multiples of the device's logical
//!   block (512 or 4096 bytes); a request is at most [`MAX_REQUEST_BYTES`] long, a machine's disk [`VOLUME_MAX_BYTES`].
//!
//! # Not here
//! No threads, no runtime, no protocol, and no disk I/O except reading small configuration files
//! ([`small_file`]). Management (limits, statistics, sealing) is not part of `Device`: each implementation
//! offers its own.
//!
//! It also contains what front-ends share: [`inbox`] and [`polling`] (how their threads are woken), [`pages`]
//! (memory that sockets send from), [`tcp`] (options of connections) and [`fault_log`].
//!
//! Start reading at [`device`].

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

pub mod blocking;
pub mod budget;
pub mod completion;
pub mod completion_queue;
pub mod device;
pub mod error;
pub mod fault_log;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod inbox;
pub mod pages;
pub mod polling;
pub mod range;
pub mod size;
pub mod small_file;
pub mod tcp;

mod copy_alignment;

pub use budget::{Budget, Share};
pub use completion::{Completion, Outcome};
pub use completion_queue::CompletionQueue;
pub use device::{Attempt, Device, Extent, ExtentKind, Geometry, Op, Request};
pub use error::{IoError, IoErrorKind};
pub use fault_log::FaultLog;
pub use inbox::Inbox;
pub use pages::{Pages, SharedPages, SharedSlice};
pub use polling::Polling;
pub use range::{BLOCK_BYTES, BLOCK_SHIFT, ByteRange, MAX_REQUEST_BYTES, VOLUME_MAX_BYTES};
