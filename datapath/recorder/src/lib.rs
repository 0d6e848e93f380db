//! Records the requests that a machine sends to its disk, and reads these recordings. The data of the
//! requests is not recorded.
//!
//! ```text
//!   front-end --> RecordedDevice --> volume
//!                      |  try_send, never waits
//!                 queue of 65,536 requests --> thread: zstd --> file --> Reader
//! ```
//!
//! # Guarantees
//! - A request never waits for the recording. If the queue is full, the request is not recorded, and the
//!   recording says how many requests were dropped.
//! - If the recording cannot be written, it ends, and the disk works on.
//! - The file has times, kinds, offsets and content classes. The data cannot be derived from it.
//!
//! # Limits
//! - A file has at most [`MOST_REQUESTS`] requests. Then the recording ends, and its summary says so.
//! - [`QUEUED_REQUESTS`] requests of 24 bytes wait for the thread; [`MOST_VOLUMES`] volumes share a file.
//! - After a crash, the file lacks at most the last [`FLUSH_INTERVAL`].
//!
//! # Errors
//! [`ReadError`] says at which byte of the decompressed recording a file is damaged.
//!
//! # Not here
//! Analysis of recordings: `headwater-study sizing`.
//!
//! Start reading at [`format`].

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

pub mod content;
pub mod format;
pub mod recorder;

mod device;

pub use content::Content;
pub use format::{Entry, Kind, MOST_VOLUMES, ReadError, Reader, Record};
pub use recorder::{FLUSH_INTERVAL, MOST_REQUESTS, QUEUED_REQUESTS, Recorder, Summary};
