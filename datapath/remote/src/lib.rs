//! A store that is read from a list of HTTP(S) servers. Step 5 of the data path, for remote stores.
//!
//! ```text
//!   Object::read_checked --> read: choose the fastest server --> transfer --> connection (TCP, TLS)
//!                              |  late: the same request to a second one       |
//!                              |  failed or wrong: the next one                v
//! ```
//!
//! # Guarantees
//! - Returned bytes have the requested hash, or were accepted by the caller's check. A server that sends
//!   wrong bytes, a body without an end or a redirect is put aside, with a warning.
//! - If an object is shortened on a server, or the server cannot read it, only reads of that object are
//!   affected: they continue at other servers, and fail if no server has it.
//! - A read continues without an error while at least one server has the bytes. If no server can be reached,
//!   reads wait, log that once, and continue when a server is back, for as long as the store is open.
//! - If the hash of a whole object was wrong, the object is read again from other servers. The same holds for
//!   a part that a relay passed on without a check, and that its receiver found wrong.
//! - A *hole* is a range of an object whose bytes a server deleted, because none of its versions needs them.
//!   If a server has holes in an object, the whole object is read from one server while that is available:
//!   from the one with the fewest bytes in holes. No server is blamed for a wrong hash if caches were used,
//!   or if its list of holes is unknown.
//! - A read that waits uses no thread if its caller supports that
//!   ([`Object::read_or_wait`](headwater_store::Object::read_or_wait)).
//! - A read that is late is sent to a second server; the first answer counts.
//! - A token goes only to the servers of the [`Options`] that contain it, and never unencrypted over a
//!   network. The caller must pass a daemon's own token only with servers that were named when the daemon was
//!   started.
//!
//! # Limits
//! - At most [`SERVERS_MAX`] servers; one connection for each read in progress, and
//!   [`Limits::idle_connections`] idle ones.
//! - Opening, and looking up images, does not wait for servers that cannot be reached: it fails with the
//!   reason for each server. An answer may take 15 s, plus one second for each 16 KiB that arrived.
//! - Opening, looking up and reads that fail fast wait for servers that answer 503 or 429 with `Retry-After`,
//!   for the time of [`Options::while_busy`]: by default 30 s each.
//! - A body is at most as long as requested; the head of an answer has at most 16 KiB.
//!
//! # Errors
//! [`StoreError`](headwater_store::StoreError), with the answer of each server.
//!
//! # Not here
//! Writing; caching and readahead (`headwater-image`); HTTP/2, proxies, cookies, compression of bodies. The
//! protocol is in `docs/http-store.md`.
//!
//! Start reading at [`remote_store`], then [`read`] and [`servers`].

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

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod hole_lists;
pub mod limits;
pub mod read;
pub mod remote_store;
pub mod servers;
pub mod status;
pub mod url;

mod attempt;
mod blame;
mod connection;
mod failed_files;
mod head;
mod health;
mod holes;
mod probe;
mod relay_order;
mod server;
mod speed;
mod tls;
mod transfer;

pub use limits::Limits;
pub use remote_store::{Options, RemoteStore};
pub use servers::SERVERS_MAX;
pub use status::{Counters, ServerState, ServerStatus, Status};
pub use url::ServerUrl;
