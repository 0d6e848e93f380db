//! iSCSI (RFC 7143): a target that answers RAM hits on the connection's own thread.
//!
//! ```text
//!  socket --recv--> [receive buffer] --whole PDUs--> commands --Nexus::try_now--Done--> [reply batch] --send--> socket
//!                                                       |             |                      ^
//!                                          data wanted: R2T       MustWait                   | next batch, or eventfd
//!                                                                     v                      | when the thread sleeps
//!                                                       Nexus::execute --completion--> [inbox]
//! ```
//!
//! # Guarantees
//! - One `recv` takes all PDUs that have arrived, and one `send` answers all that could be finished at once.
//!   Immediate data is used where it was received, and reads go directly into the reply batch after their
//!   header. None of them needs an allocation, a task or a lock.
//! - A command that must wait does not delay later commands, except that an ordered command waits for earlier
//!   ones.
//! - A write is given to the device when all of its data has arrived. If the initiator disconnects before
//!   that, nothing is written.
//! - An initiator that sends garbage, gives false lengths, or never takes its replies affects only its own
//!   connection, and costs bounded memory ([`Limits`]). Unfinished logins cannot keep other initiators out.
//! - A second login of the same session ends the first one, and starts when the first one's commands have
//!   ended.
//!
//! # Limits
//! All are fields of [`Limits`], with their units. One connection for each session; error recovery level 0.
//!
//! # Errors
//! [`BindError`] says what was tried and what to do. Device errors become SCSI sense in `headwater-scsi`.
//! Faults of initiators are logged with the initiator and the reason, at a bounded rate.
//!
//! # Not here
//! No SCSI: commands, sense and reservations are those of `headwater-scsi`. No iSNS, no IPsec, no Kerberos or
//! SRP, no iSER, no recovery within a session (levels 1 and 2), no bidirectional commands.
//!
//! Start reading at [`server`], then `server/session.rs`. The protocol as supported is in `docs/iscsi.md`.

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
pub mod chap_file;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod limits;
pub mod login;
pub mod name;
pub mod server;
pub mod targets;
pub mod wire;

pub use address::{Address, AddressError};
pub use headwater_connections::BindError;
pub use limits::Limits;
pub use login::chap::{Accounts, Secret};
pub use name::{IscsiName, NameError};
pub use server::Server;
pub use targets::{Denied, FixedTargets, Offer, Targets};
