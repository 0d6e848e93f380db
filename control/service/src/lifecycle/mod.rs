//! The lifecycle of a machine: every change of its state is made here.
//!
//! ```text
//!   start   resolve version -> open disk -> start VM -> booting    (failure: closed again, state stopped)
//!   watch   guest is up -> running; VM ended -> disk closed, stopped or crashed;
//!           guest rebooted -> disk discarded, restarted with retries, after a growing pause if it keeps rebooting
//!   stop    stopping -> ACPI -> after the grace time kill -> disk closed, stopped
//!   reset   kill, disk forgotten; a machine that ran is started again on a pristine disk
//!   edit    begins a maintenance session: a private disk over an image's newest version; seal makes a version of it
//!   seal    of a machine that runs: a snapshot of its disk becomes a version
//!   generalise  before that, a machine's identity is removed in its guest, and searched on its disk
//!   limits  in the database and in the open disk, at once
//!   alarm   its disk has no space or is not made durable, or no server of its image answers: shown, and in the history
//!   recover after an earlier daemon: machines that kept running are taken over, orphans ended, others recorded as lost
//!   resume  machines that were on when the last daemon ended are restarted, if that was requested
//! ```
//!
//! # Locking
//! Every change of a machine holds its lock (`Service::turn_of`) from reading the record to saving it. A task that has
//! waited for the lock checks that the machine still exists and has the same identity. The watcher takes the same lock,
//! and does nothing if the VM that ended is not the machine's present one: a stop that waits for the end of the VM holds
//! the lock and cleans up itself.
//!
//! Killing needs no lock, so that `stop --force` can interrupt a graceful stop. A holder of the lock asks the store through
//! `Service::unless_given_up`, so that a store that hangs does not prevent a stop. Exceptions are opening the disk and
//! retaining its version. A seal releases the lock while the guest syncs, and then checks that the machine
//! was not restarted.
//!
//! The operations of the API, the tasks and the daemon call this module. Disks, VMs and the store are behind traits
//! (`backend`); machines of other hosts are in `fleet`, and machines in clouds in `cloud.rs`.

mod active;
mod adopt;
pub(crate) mod alarm;
pub(crate) mod boot;
pub(crate) mod cloud;
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

/// How long a guest may take to shut down before it is killed.
pub const STOP_GRACE_MS: u64 = 30_000;

/// How often counters are sampled for the rate of requests, and wanted and actual state are compared.
pub const TICK_MS: u64 = 1_000;
