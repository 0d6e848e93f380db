//! The life of a machine: every change of its state is made here.
//!
//! ```text
//!   start   resolve version -> open disk -> start VM -> booting    (failure: closed again, state stopped)
//!   watch   guest is up -> running; VM ended -> disk closed, stopped or crashed;
//!           guest restarted -> disk forgotten, started again until that works, after a pause where it does nothing else
//!   stop    stopping -> ACPI -> after the grace time kill -> disk closed, stopped
//!   reset   kill, disk forgotten; a machine that ran is started again on a pristine disk
//!   edit    a machine gets a private disk over an image's newest version; seal makes a version of it
//!   seal    of a machine that runs: its disk at one moment becomes a version
//!   generalise  a machine's identity is removed in its guest before that, and looked for on its disk
//!   limits  in the database and in the open disk, at once
//!   alarm   its disk has no room or is not made durable, or no server of its image answers: shown, and in the history
//!   recover after an earlier daemon: machines that went on are taken over, orphans ended, what has ended is lost
//!   resume  what was on when the last daemon ended is started again, if that is wanted
//! ```
//!
//! # Who may change what
//! Whoever changes a machine holds its lock (`Service::turn_of`) from reading the record to saving it; who has waited for
//! it may find that the machine is gone, and its name another's. The
//! watcher takes the same lock, and does nothing where the VM that ended is not the machine's present one:
//! a stop that waits for the end of the VM holds the lock and does the cleaning itself.
//!
//! Killing needs no lock: `stop --force` breaks into a graceful stop that waits. Whoever has the lock asks the store through
//! `Service::unless_given_up`, so that a store that hangs keeps nobody from stopping the machine; but to open its disk, or to
//! have a version held for it, is waited for. A seal lets go of the lock while the guest writes out, and looks then whether the
//! machine is on as it was.

mod active;
mod adopt;
pub(crate) mod alarm;
pub(crate) mod boot;
pub(crate) mod disk_readers;
mod error;
mod generalise;
pub(crate) mod guest_facts;
mod limits;
pub(crate) mod maintenance;
pub(crate) mod pending_events;
mod record;
mod recover;
mod restart;
mod rotate;
pub(crate) mod scheme;
mod seal;
mod start;
mod stop;
pub(crate) mod store_waits;
#[cfg(test)]
pub(crate) mod tests;
mod watch;

pub use active::Active;
pub(crate) use active::DISPLAYS_MAX;
pub use disk_readers::{OfflineDisk, ReadableDisk};
pub use error::LifecycleError;
pub use recover::{Verdict, verdict};
pub(crate) use restart::FENCED;
pub(crate) use start::StartReason;

/// How long a guest may take to switch itself off before it is killed.
pub const STOP_GRACE_MS: u64 = 30_000;

/// How often counters are sampled for the rate of requests, and wanted and actual state are compared.
pub const TICK_MS: u64 = 1_000;
