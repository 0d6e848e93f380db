//! Offers a volume as one regular file in a directory, for tools that want a file: Firecracker, loop devices,
//! `qemu-img`, `dd`.
//!
//! ```text
//!   tool --read, write--> kernel (FUSE) --/dev/fuse--> [reader threads] --Device::try_now--Done--> answer, same thread
//!                                                            |
//!                                                        MustWait --> Device::submit --> answer from the device's thread
//! ```
//!
//! # Guarantees
//! - A request that the device answers at once costs two system calls (receive and answer), and no task or
//!   allocation.
//! - Nothing is cached between a tool and the volume: a write that was answered is in the volume, a write
//!   that finds no space fails with `ENOSPC` in the program that wrote, and `fsync` is a flush of the volume.
//! - Writes of any length at any offset are right. Concurrent writes to different parts of one block lose nothing.
//! - A mount that a dead server left is replaced; a directory that is in use or has files in it is refused.
//! - The server unmounts at its end. Programs that still have the file open then get errors and do not hang. Exception: if a
//!   helper program made the mount, it stays until these programs close the file ([`Server::stop`]).
//!
//! # Limits
//! [`Limits`], with units. A request has at most 1 MiB; longer reads and writes are split by the kernel.
//!
//! # Errors
//! [`MountError`] says what was tried and what to do. Device errors become `EINVAL`, `EROFS`, `ENOSPC`,
//! `EIO`, `ESHUTDOWN` or `EOPNOTSUPP`; errors that are not the program's own fault are logged, at a bounded
//! rate.
//!
//! # Not here
//! The file has one size: it cannot be truncated or extended. No second file, no links, no extended attributes, no
//! locks across hosts (the kernel's local ones work).
//!
//! Start reading at [`Server`], then `reader.rs`. What is supported is in `docs/fuse.md`.

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

mod channel;
mod clone;
mod data;
mod files;
mod flow;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod limits;
mod mount;
mod mounts;
mod parts;
mod reader;
mod server;
mod wire;

pub use limits::Limits;
pub use mount::MountError;
pub use server::{Options, Server};
