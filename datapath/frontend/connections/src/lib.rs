//! What servers of several front-ends have in common: where they listen, and how connections receive and send.
//!
//! # Guarantees
//! - The file of a unix socket goes with its [`Listener`]; one that a dead process has left is replaced, and nothing else is.
//!
//! # Errors
//! [`BindError`] says what was tried and what to do.
//!
//! # Not here
//! No protocol, and no runtime: servers in asynchronous code have listeners of their own.
//!
//! Start reading at [`listener`].

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

pub mod host_port;
pub mod listener;
pub mod socket;
pub mod stall;

pub use listener::{BindError, Listener, Peer, UNIX_PATH_BYTES};
pub use socket::{Received, Socket};
pub use stall::Stall;
