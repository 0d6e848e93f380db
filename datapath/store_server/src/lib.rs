//! Serves the versions of a store to other hosts, over HTTP/1.1 and HTTP/2. Step 5 of the data path for other
//! hosts.
//!
//! ```text
//!   TCP --> TLS --> HTTP --> token --> path --> Store: list of versions, manifest, range of an object
//!                                        |
//!                                        lease: a requested version is not removed for an hour
//! ```
//!
//! # Guarantees
//! - Paths and bytes are those of a store's directory, so any web server can replace this one
//!   (`docs/http-store.md`). Nothing can be written.
//! - Without TLS it listens on loopback only; elsewhere it also requires tokens. Tokens are kept as hashes.
//! - Memory is bounded although clients may read slowly. An answer has at most three pieces of
//!   [`PIECE_BYTES`] in memory, a connection [`CONNECTION_PIECES_BYTES`], the server [`PIECES_BYTES`]. Each
//!   answer has at most [`SMALL_PIECE_BYTES`] more, with which it continues if others use all of that.
//!   Manifests, lists and traces in memory use at most [`CONTENTS_BYTES`] in addition, each once. A single
//!   larger one is allowed; then requests for others are refused.
//!
//! # Limits
//! - [`CONNECTIONS_MAX`] connections, [`STREAMS_MAX`] concurrent requests on an HTTP/2 connection; more wait.
//!   A connection without an admitted request is closed for a new one: at once if there are
//!   [`UNAUTHENTICATED_MANY`] of them, otherwise after [`UNAUTHENTICATED_GRACE`].
//! - [`IDLE_TIMEOUT`] until a request has arrived completely, and for a client that reads nothing of its
//!   answer; pings do not count.
//! - [`ADMISSION_TIMEOUT`] for a connection until the first request with a token.
//! - [`READS_MAX`] threads block on the store; a request that waits for one longer than [`READ_WAIT`] is
//!   refused.
//! - [`LEASES_MAX`] versions are pinned for [`LEASE`]. If several requests need the same manifest, trace or
//!   list of holes, it is read once for all of them.
//!
//! # Errors
//! [`ServeError`] if a store cannot be served at all. A client gets a status and a problem document (JSON);
//! the log has the reason.
//!
//! # Not here
//! Reading from such a server (`headwater-remote`), writing, the API of the control plane.
//!
//! Start reading at [`answer`].

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

pub mod answer;
pub mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod server;
pub mod tls;
pub mod tokens;

mod body;
mod contents;
mod leases;
mod once;
mod progress;
mod range;
mod reads;
mod send_memory;
pub use body::PIECE_BYTES;
pub use contents::CONTENTS_BYTES;
pub use error::ServeError;
pub use leases::{LEASE, LEASES_MAX};
pub use reads::{READ_WAIT, READS_MAX};
pub use send_memory::{CONNECTION_PIECES_BYTES, PIECES_BYTES, SMALL_PIECE_BYTES};
pub use server::{
    ADMISSION_TIMEOUT, CONNECTIONS_MAX, IDLE_TIMEOUT, Limits, Options, STREAMS_MAX, StoreServer, TlsFiles,
    UNAUTHENTICATED_GRACE, UNAUTHENTICATED_MANY,
};
pub use tokens::{TOKEN_FILE_MAX_BYTES, TokenFile, TokenName, token_line};
