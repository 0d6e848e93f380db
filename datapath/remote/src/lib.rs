//! Step 5 of the data path, from afar: a store that is read from a list of HTTP(S) servers.
//!
//! ```text
//!   Object::read_checked --> read: choose the fastest server --> transfer --> connection (TCP, TLS)
//!                              |  late: the same again from a second one        |
//!                              |  failed or wrong: the next one                 v
//!                              |                                         check by the caller
//!                              +--> nobody left: wait, say so -- probe thread: one is back --> go on
//! ```
//!
//! # Guarantees
//! - What is returned has the hash that was asked for, or was accepted by the caller's check; a server that
//!   gives wrong bytes, a body without an end or a redirect is put aside, with a message.
//! - An object that is cut short on a server, or that it cannot read, concerns the reads that need it: they go on at others, and
//!   are an error where nobody has it.
//! - A read goes on without an error while at least one server has the bytes. When all are gone, reads wait,
//!   say so once, and go on when one is back, for as long as the store is open.
//! - Of an object that is checked only as a whole, and was wrong, the next reading is from other servers. So is that of a part
//!   which is handed on without a check, and which who asked for it found wrong.
//! - An object of which something is gone on a server is read as a whole from one of them, as long as that one is there: from the one on
//!   which the least is gone. Nobody is blamed for a whole that was not read past caches, or of which the list of what is gone is not known.
//! - A read that waits takes no thread where its caller has other things to do
//!   ([`Object::read_or_wait`](headwater_store::Object::read_or_wait)).
//! - A read that is late is asked for a second time from another server; the first answer counts.
//! - A token goes only to the servers of the [`Options`] that it is in, and never unencrypted over a network. A daemon shows its own only to
//!   servers that were named when it was started: that is the caller's doing.
//!
//! # Limits
//! - [`SERVERS_MAX`] servers; a connection for each read under way, [`Limits::idle_connections`] kept idle.
//! - Opening, and looking up images, does not wait for servers that are gone: it fails and says why each one did. An answer to it
//!   has 15 s, and one more for each 16 KiB that have come.
//! - Opening, looking up and impatient reads wait for servers that answer 503 or 429 with `Retry-After`, for as long as
//!   [`Options::while_busy`] says: 30 s each, unless something else is chosen.
//! - A body is at most as long as what was asked for; a head has at most 16 KiB.
//!
//! # Errors
//! [`StoreError`](headwater_store::StoreError), with what each server answered.
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
