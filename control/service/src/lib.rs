//! The control plane of one host: who boots what, as an HTTP API over a database and three backends.
//!
//! ```text
//!   client --HTTP, unix socket--> server --> operations/  (one file each: errors, OpenAPI text, handler)
//!                                               |
//!                                life/  start, stop, reset, watch, reconcile
//!                                 |            |            |            |
//!                              Database      Images       Disks     Hypervisor       (backend/: traits)
//! ```
//!
//! # How to add an operation
//! 1. A file in `operations/`: its errors with [`answer::Explain`], a handler of a dozen lines with its
//!    `#[utoipa::path]`.
//! 2. One line in [`operations::router`].
//! 3. `HEADWATER_BLESS=1 cargo test -p headwater-service --test openapi` writes `docs/openapi.json` anew.
//!
//! # Guarantees
//! - What is wanted of a machine and every change of its state are in the database, together with an event
//!   that says who, what and when, before the change is answered.
//! - One machine's changes happen one after the other; a client that hangs up does not leave one half done.
//! - A machine changes its image version only when it starts, and one whose disk is kept when it is reset.
//! - One machine at a time edits an image; what it did becomes a version or leaves no trace, also where the daemon
//!   dies in between.
//! - A scheduled promotion is carried out once, when the clock has reached its time, also after a restart and
//!   whatever the clock does.
//! - After a daemon that died, [`Service::recover`] ends what it left, and says `lost` of what ran.
//! - A machine that was claimed is given to somebody else only after it was reset.
//! - A long operation is a task: it goes on if its client is gone. One that is cancelled leaves nothing behind, a pull whole versions.
//!
//! # Limits
//! - [`tasks::MAX_TASKS`] long operations at once, [`lifecycle::STOP_GRACE_MS`] for a guest to switch itself off,
//!   [`server::MAX_SOCKET_PATH_BYTES`] for a socket's path.
//!
//! # Errors
//! Every failure is a [`headwater_api::Problem`]; operations keep enums of their own and map them once.
//!
//! # Not here
//! No disk request passes through this crate, and it knows neither the data path nor QEMU. No accounts of people: the
//! socket belongs to its owner, and TCP takes the directory's [`token::Token`], a named token with a role, or a session of the [`web`]
//! console. TCP beyond the loopback interface needs TLS, whose certificates the caller of [`server::Port::bind`] has.
//!
//! Start reading at [`lifecycle`].

mod advice;
mod alarms;
mod answer;
pub mod backend;
mod caller;
mod catalogs;
mod claims;
mod clock_hours;
mod console;
mod damage;
mod extract;
pub mod fleet;
mod hints;
mod identity;
pub mod lifecycle;
pub mod operations;
mod promotions;
mod retention;
mod scope;
pub mod server;
mod state;
mod store_view_cache;
mod targets;
pub mod tasks;
mod template;
pub mod token;
mod uses;
pub mod web;

pub use damage::{Findings, UnreadableList, touches};
pub use state::{Parts, Service};
pub use targets::TargetBoot;
pub use token::Token;
