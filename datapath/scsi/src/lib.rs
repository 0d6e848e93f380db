//! SCSI block devices (SPC-4, SBC-3, SAM-5) over [`headwater_block::Device`], for any transport.
//!
//! ```text
//!   transport --Command--> Nexus::try_now -----Done-----> reply (same thread, data in the transport's buffer)
//!      |                      |
//!      |                      +--MustWait--> Nexus::execute(Task, done) --> Outcome (any thread)
//!      +------Function------> Nexus::manage (aborts and resets)
//!
//!   Target ----- Nexus (one I_T nexus: an initiator port's session)
//!      |           |  unit attentions
//!      +-- LUN -- LogicalUnit ----- Device
//!                  mode pages, reservations, tasks in flight
//! ```
//!
//! # Guarantees
//! - Each task is answered exactly once. An aborted task is answered without a [`Reply`]: the transport sends
//!   nothing.
//! - A device only gets requests that keep its contract. No CDB and no parameter list makes this crate panic.
//! - [`Nexus::try_now`] neither waits nor allocates for reads and writes that the device can execute at once.
//! - A management function is answered after the tasks that it aborts have ended.
//!
//! # Limits
//! - CDBs of 6, 10, 12 and 16 bytes; transfers of up to [`Options::transfer_bytes`].
//! - 4096 tasks of a unit that wait or run, 256 persistent registrations, 16 unit attentions of a nexus.
//!
//! # Errors
//! None are returned: the initiator is informed by status and sense data. Errors of the device are also
//! logged, less often the more there are.
//!
//! # Not here
//! No sockets, and nothing of iSCSI: names and TransportIDs are bytes from the transport. No threads, except
//! one for each unit that received commands of several steps (COMPARE AND WRITE, long VERIFY and WRITE SAME,
//! UNMAP lists).
//!
//! What is supported in detail: `docs/scsi.md`. Start reading at [`target`].

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

mod cdb;
mod control;
mod copies;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod identity;
mod inquiry;
mod link;
mod medium;
mod mode;
mod opcodes;
mod queue;
mod reservation;
mod run;
pub mod sense;
pub mod target;
pub mod task;
pub mod unit;
mod wire;
mod worker;

pub use identity::{Identity, Initiator};
pub use sense::{Code, Sense, SenseKey, Status};
pub use target::{Nexus, Target};
pub use task::{
    Arrival, Attribute, Cdb, Command, Expected, Function, FunctionResult, Lun, Now, Outcome, Reply, Task,
};
pub use unit::{LogicalUnit, Options};
