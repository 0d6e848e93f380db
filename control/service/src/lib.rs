//! The control plane: the HTTP API for images, machines, catalogs and hosts, over a database and three backends.
//!
//! ```text
//!   client --HTTP, unix socket--> server --> operations/  (one file each: errors, OpenAPI text, handler)
//!                                               |
//!                                lifecycle/  start, stop, reset, watch, recover
//!                                 |            |            |            |
//!                              Database      Images       Disks     Hypervisor       (backend/: traits)
//! ```
//!
//! # How to add an operation
//! 1. A file in `operations/`: its errors with [`answer::Explain`], a handler of a dozen lines with its
//!    `#[utoipa::path]`.
//! 2. Its `mod` line and its entry in `routes()` in `operations/mod.rs`.
//! 3. `HEADWATER_BLESS=1 cargo test -p headwater-service --test openapi` updates `docs/openapi.json`.
//!
//! # Guarantees
//! - The wanted state of a machine, and every change of its state, are in the database together with an event
//!   that says who, what and when, before the change is answered.
//! - Changes of one machine are serialised; a client that disconnects does not leave a change half done.
//! - A machine changes its image version only when it starts; with a persistent disk, only when it is reset.
//! - One machine at a time has a maintenance session of an image. Its changes become a version or leave no trace, even if
//!   the daemon dies in between.
//! - A scheduled promotion happens once, when the clock has reached its time, also after a restart and
//!   if the clock is set.
//! - If a daemon died, [`Service::recover`] of the next one ends what it left behind, and records machines that ended as
//!   `lost`.
//! - A machine that was claimed goes to another holder only after it was reset.
//! - A long operation is a task: it continues if its client disconnects. A cancelled task leaves nothing behind; a
//!   cancelled pull leaves complete versions.
//!
//! # Limits
//! - [`tasks::MAX_TASKS`] concurrent long operations, [`lifecycle::STOP_GRACE_MS`] for a guest to shut down,
//!   [`server::MAX_SOCKET_PATH_BYTES`] for a socket's path.
//!
//! # Errors
//! Every failure is a [`headwater_api::Problem`]; operations have their own enums, which are converted once.
//!
//! # Not here
//! No disk request passes through this crate, and it knows neither the data plane nor QEMU. There are no user accounts: the
//! unix socket belongs to its owner, and TCP accepts the directory's [`token::Token`], a named token with a role, whose
//! holder has its secret or a client certificate, or a session of the [`web`] console. An identity provider can give people
//! named tokens. TCP beyond the loopback interface needs TLS; the caller of [`server::Port::bind`] provides the certificates.
//!
//! Start reading at [`lifecycle`].

mod advice;
mod alarms;
mod answer;
pub mod backend;
mod caller;
mod catalogs;
mod certificate;
mod claims;
mod clock_hours;
mod cloud_catalogs;
mod connections;
mod console;
mod damage;
mod extract;
pub mod fleet;
mod hints;
mod identity;
pub mod lifecycle;
mod login;
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
