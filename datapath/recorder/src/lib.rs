//! Records which requests a machine sends to its disk, and reads such records: never what the requests carry.
//!
//! ```text
//!   front-end --> RecordedDevice --> volume
//!                      |  try_send, never waits
//!                 queue of 65,536 requests --> thread: zstd --> file --> Reader
//! ```
//!
//! # Guarantees
//! - A request never waits for the recording. If the queue is full, the request is left out, and the record says how many were.
//! - A recording that cannot be written ends, and the disk goes on.
//! - The file has times, kinds, places and classes of contents. No contents can be had from it.
//!
//! # Limits
//! - A file has [`MOST_REQUESTS`] requests; then the recording ends, and says so.
//! - [`QUEUED_REQUESTS`] requests of 24 bytes wait for the thread; [`MOST_VOLUMES`] volumes share a file.
//! - After a crash, the file lacks at most the last [`FLUSH_INTERVAL`].
//!
//! # Errors
//! [`ReadError`] says at which byte of the unpacked record a file is broken.
//!
//! # Not here
//! What is made of a record: `headwater-study sizing`.
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
