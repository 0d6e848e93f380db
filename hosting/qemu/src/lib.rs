//! Starts machines under QEMU on this host, watches them, and gives each guest its identity.
//!
//! ```text
//!   GuestSpec --check, arguments--> QEMU (child process)
//!                                    |  qmp.sock      Qmp: commands, events      <- Supervisor -> GuestState
//!                                    |  agent.sock    Agent: ping, exec          <- wait_booted, callers
//!                                    |  console.sock  a terminal                 <- callers
//!                                    |  console.log   "login:"                   <- Supervisor
//!                                    |  vnc.sock      its screen                 <- viewers
//!                                    |  tpm.sock      swtpm (child process): its TPM
//!                                    +- disk: vhost-user or NBD over a unix socket; seed disk: Identity as NoCloud (seed)
//! ```
//!
//! # Guarantees
//! - KVM is used only after a probe guest has run on it ([`probe_acceleration`]). Otherwise the result has the reason.
//! - If [`Guest::start`] fails, it leaves nothing running, and the error has QEMU's output.
//! - An end of QEMU that was not requested is [`ExitReason::Crashed`], with QEMU's last lines.
//! - If a write finds no space on the disk, the machine is paused, and the write is tried again until there is space.
//! - With [`Lifetime::WithParent`], QEMU ends with the process that started it, even if that process is killed. The
//!   host must have util-linux.
//! - A TPM (swtpm) ends with its QEMU.
//! - With [`Lifetime::Own`], QEMU continues when that process ends, and [`Guest::adopt`] takes it over.
//! - [`kill_machines`] kills the QEMU processes of some machines at once, because another host may run these machines.
//! - [`sweep_orphans`] ends the QEMU processes of a daemon that was killed, except adopted ones, and no others.
//!
//! # Limits
//! - 1 to [`spec::MAX_CPUS`] processors, [`spec::MIN_MEMORY_BYTES`] to the host's memory; socket paths up
//!   to 107 bytes; user data up to [`seed::MAX_USER_DATA_BYTES`]; standard output and standard error of a
//!   command in the guest up to 16 MiB each. A console log that reaches 16 MiB becomes `console.log.old`, which replaces
//!   the earlier one.
//! - x86-64 guests that boot from a virtio disk, with BIOS, or with UEFI with or without Secure Boot.
//! - A screen of at most [`screen::MAX_SCREEN_BYTES`].
//!
//! # Errors
//! [`Error`]: a kind for each case in which a caller may act differently, and a message that says what to do.
//!
//! # Not here
//! Image, write cache, disk server: another program serves the disk on a socket. Database and policy: the control plane
//! decides whether a crashed machine starts again. Migration. Certificates of a TPM's maker. Making or changing a bridge: machines
//! only become ports of an existing one.
//!
//! Start reading at [`guest`].

pub mod agent;
mod binary;
pub mod bridge;
mod console_log;
pub mod error;
pub mod firmware;
pub mod guest;
mod idle_window;
mod launch;
pub mod orphan;
pub mod probe;
mod process;
pub mod qmp;
pub mod screen;
pub mod seed;
pub mod spec;
mod supervise;
pub mod tpm;

pub use agent::{Agent, Exec, ExecOutput, Generalised};
pub use error::{Error, Result};
pub use firmware::UefiFiles;
pub use guest::{Boot, BootSign, Exit, ExitReason, Guest, GuestState, MonitorStatus, Phase};
pub use launch::{Lifetime, without_own_variables};
pub use orphan::{Orphan, kill_machines, sweep_orphans};
pub use probe::{Acceleration, Version, probe_acceleration};
pub use qmp::{Event, Qmp};
pub use seed::{CardAddress, Identity, SshHostKey};
pub use spec::{
    Disk, DiskTransport, Display, Firmware, GuestSpec, MacAddress, Network, OnReboot, RunFiles,
    SCRATCH_SERIAL, check_size, disk_serial,
};
