//! Network block device: a server that answers RAM hits on the connection's own thread, and a client that is a `Device`.
//!
//! ```text
//!  socket --recv--> [receive buffer] --whole requests--> Device::try_now --Done--> [reply batch] --send--> socket
//!                                                            |                          ^
//!                                                        MustWait                       | next batch, or eventfd
//!                                                            v                          | when the thread sleeps
//!                                                     Device::submit --completion--> [inbox]
//! ```
//!
//! # Guarantees
//! - One `recv` takes all requests that have arrived, one `send` answers all that could be finished at once.
//!   Write payloads are used where they were received, reads go straight into the reply batch: no
//!   allocation, task or lock for each request.
//! - A request that must wait does not hold up those behind it: replies leave in the order of completion.
//! - A write is given to the device only when its payload is here as a whole; a client that hangs up in the
//!   middle of one has not written any of it.
//! - A client that sends garbage, lies about lengths, or never reads its replies costs its own connection, and
//!   bounded memory ([`Limits`]); others go on.
//! - `flush`, `FUA` and answered writes are seen by all connections of an export (multi-conn).
//!
//! # Limits
//! All are fields of [`Limits`], with their units; the defaults are for a host that serves its own machines.
//!
//! # Errors
//! [`BindError`] and [`client::ConnectError`] say what was tried and what to do. Device errors are mapped to the protocol's
//! codes in one place: [`NbdError`]. Faults of clients are logged with who and why, at a bounded rate.
//!
//! # Not here
//! No oldstyle handshake, no keys shared beforehand (PSK), no resize. What an export is and who may open it is the
//! business of [`Exports`].
//!
//! Start reading at [`server`], then `server/connection.rs`. The protocol as supported is in `docs/nbd.md`.

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

pub mod address;
pub mod client;
pub mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod limits;
pub mod server;
mod socket;
pub mod tls;
pub mod wire;

pub use address::{Address, AddressError};
pub use client::{Client, NbdUri};
pub use error::NbdError;
pub use headwater_connections::BindError;
pub use limits::Limits;
pub use server::{
    Described, Export, ExportInfo, Exports, NamedExports, NotOpened, Options, Right, Server, SingleExport,
};
pub use tls::{ClientIdentity, ServerTls, ServerTlsOptions, TlsError};
