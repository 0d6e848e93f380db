//! What servers of several front-ends have in common: where they listen, whom they let in, how connections receive and send, and how
//! all of it ends.
//!
//! ```text
//!  Listener --accept--> Acceptor --Seat--> a thread: FrontEnd::serve --> Socket
//!                          |     <-leaves-                                 ^
//!                       Register --cut the oldest half-open one, or all ---+
//! ```
//!
//! # Guarantees
//! - The file of a unix socket goes with its [`Listener`]; one that a dead process has left is replaced, and nothing else is.
//! - Those who connect and say nothing keep nobody out ([`Limits::half_open`]), and no more are served than [`Limits::connections`].
//!   Nor does one who takes all of these: who has none gets a place of whoever has most ([`Owner`]).
//! - When [`Acceptor::stop`] returns, nobody is accepted any more, and every connection has ended but for those whose front-end did not
//!   notice within a second that they were cut.
//! - A peer that takes something of what is sent, however little, is waited for; one that takes nothing is not ([`Stall`]).
//!
//! # Limits
//! [`Limits`], which a front-end makes of its own.
//!
//! # Errors
//! [`BindError`] says what was tried and what to do.
//!
//! # Not here
//! No protocol, and no runtime: servers in asynchronous code have listeners of their own. Nothing of a front-end with one client at a
//! time (vhost-user) but where it listens.
//!
//! Start reading at [`acceptor`].

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

pub mod acceptor;
pub mod host_port;
pub mod listener;
pub mod register;
pub mod socket;
pub mod stall;

pub use acceptor::{Acceptor, FrontEnd};
pub use listener::{BindError, Listener, Peer, UNIX_PATH_BYTES};
pub use register::{Limits, NotOpened, Owner, Permit, Register};
pub use socket::{Received, Socket};
pub use stall::Stall;
