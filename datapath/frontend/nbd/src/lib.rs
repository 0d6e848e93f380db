//! Network block device: a server that answers RAM hits on the connection's own thread, and a client that is
//! a `Device`.
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
//! - One `recv` takes all requests that have arrived, and one `send` answers all that could be finished at
//!   once. Write payloads are used where they were received, and reads go directly into the reply batch. No
//!   request needs an allocation, a task or a lock.
//! - A request that must wait does not delay later ones: replies are sent in the order of completion.
//! - A write is given to the device only when its whole payload has arrived. If the client disconnects before
//!   that, nothing of it is written, except of a write that is longer than the device's limit, which is
//!   stored in parts.
//! - A client that sends garbage, gives false lengths, or never reads its replies, affects only its own
//!   connection, and costs bounded memory ([`Limits`]).
//! - All connections of an export see the effect of `flush`, `FUA` and answered writes (multi-conn).
//!
//! # Limits
//! All are fields of [`Limits`], with their units; the defaults are for a host that serves its own machines.
//!
//! # Errors
//! [`BindError`] and [`client::ConnectError`] say what was tried and what to do. Device errors are mapped to
//! the protocol's codes in one place: [`NbdError`]. Faults of clients are logged with the client and the
//! reason, at a bounded rate.
//!
//! # Not here
//! No oldstyle handshake, no pre-shared keys (PSK), no resize. [`Exports`] defines what an export is and who
//! may open it.
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
