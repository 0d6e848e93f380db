//! Step 5 of the data path for remote stores: a store that is read from a list of HTTP(S) servers.
//!
//! ```text
//!   Object::read_checked --> read: choose the fastest server --> transfer --> connection (TCP, TLS)
//!                              |  late: the same again from a second one        |
//!                              |  failed or wrong: the next one                 v
//!                              |                                         check by the caller
//!                              +--> no server left: wait, log -- probe thread: one is back --> continue
//! ```
//!
//! # Guarantees
//! - Returned bytes have the requested hash, or were accepted by the caller's check. A server that gives
//!   wrong bytes, a body without an end or a redirect is put aside, with a message.
//! - If an object is cut short on a server, or the server cannot read it, only reads that need it are
//!   affected: they continue at other servers, and fail if no server has it.
//! - A read continues without an error while at least one server has the bytes. When all are gone, reads
//!   wait, log that once, and continue when a server is back, for as long as the store is open.
//! - If an object that is checked only as a whole was wrong, the next reading is from other servers. The same
//!   holds for a part that is passed on without a check, and that its receiver found wrong.
//! - If some server has holes in an object, the object is read as a whole from one server while that is
//!   available: from the one with the fewest bytes in holes. No server is blamed for a whole that was not
//!   read with caches bypassed, or whose list of holes is unknown.
//! - A read that waits uses no thread if its caller has other work
//!   ([`Object::read_or_wait`](headwater_store::Object::read_or_wait)).
//! - A read that is late is sent to a second server; the first answer counts.
//! - A token goes only to the servers of the [`Options`] that contain it, and never unencrypted over a
//!   network. A daemon shows its own only to servers that were named when it was started: the caller ensures
//!   that.
//!
//! # Limits
//! - [`SERVERS_MAX`] servers; a connection for each read under way, [`Limits::idle_connections`] kept idle.
//! - Opening, and looking up images, does not wait for servers that are gone: it fails and gives the reason
//!   for each one. An answer to it may take 15 s, and one more for each 16 KiB that arrived.
//! - Opening, looking up and reads that fail fast wait for servers that answer 503 or 429 with `Retry-After`,
//!   for as long as [`Options::while_busy`] says: by default 30 s each.
//! - A body is at most as long as was requested; a head has at most 16 KiB.
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
