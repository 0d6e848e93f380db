//! The parts that the servers of several front-ends share: listening, limits on connections, sockets, and an
//! orderly stop.
//!
//! ```text
//!  Listener --accept--> Acceptor --Permit--> a thread: FrontEnd::serve --> Socket
//!                          |     <- drop -                                 ^
//!                       Register --cut the oldest half-open one, or all ---+
//! ```
//!
//! # Guarantees
//! - Dropping a [`Listener`] removes the file of its unix socket. Binding replaces a socket file that a dead
//!   process left, and no other file.
//! - Clients that connect and send nothing do not keep others out ([`Limits::half_open`]). At most
//!   [`Limits::connections`] are served.
//!   If one [`Owner`] has most of them, a client without a connection gets one of that owner's.
//! - When [`Acceptor::stop`] returns, no connection is accepted any more, and every connection has ended,
//!   except if its front-end needs more than a second to notice that it was cut.
//! - A peer that accepts only a few bytes is waited for; a peer that accepts none within the limit is not
//!   ([`Stall`]).
//!
//! # Limits
//! [`Limits`]; each front-end fills in its own.
//!
//! # Errors
//! [`BindError`] says what was tried and what to do.
//!
//! # Not here
//! No protocol and no async runtime: asynchronous servers have listeners of their own. vhost-user, which has
//! one client at a time, uses only [`Listener`].
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
