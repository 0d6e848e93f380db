//! Attaches a volume as a block device of the Linux kernel: through ublk if the kernel has it, or else
//! through the kernel's NBD client.
//!
//! ```text
//!   /dev/ublkbN --> kernel --io_uring--> [queue threads] --Device::try_now--Done--> commit, same thread
//!                                              |    ^
//!                                          MustWait | post box, eventfd
//!                                              v    |
//!                                        Device::submit
//!
//!   /dev/nbdN --> kernel --unix socket--> an NBD server of the same volume in this process (not in this crate)
//! ```
//!
//! # Guarantees
//! - [`choose`] says which way is used and why; there is no silent fallback.
//! - If the server of a device with [`Options::survives`] dies, the kernel keeps the device's requests until
//!   the next server takes it over ([`Options::resume`]), or until they time out. Any other device ends with
//!   its server.
//! - Devices that a dead server left are found ([`Registry::all`], [`Registry::intents`]) and can be removed.
//!   A device that belongs to another program by now is not touched ([`Mark`]).
//! - A flush of the kernel is a flush of the volume; on a [`write_through`] device, a change is durable when
//!   it is answered.
//!
//! # Limits
//! [`Options`], with units: memory is at most `queues * depth * max_io_bytes`, of which only touched pages count, and a
//! second buffer for each request that waits.
//!
//! # Errors
//! [`AttachError`] says what was tried and why it failed. Errors of the volume become those of the block device, and are
//! logged at a bounded rate.
//!
//! # Not here
//! No NBD server: the caller runs one, and passes its socket. No zero copy, no unprivileged ublk devices, no resize.
//!
//! Start reading at [`Attached`], then `ublk/mod.rs`. What is supported is in `docs/attach.md`.

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

mod error;
mod kernel_nbd;
mod mark;
mod registry;
mod ublk;
mod write_through;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;

use headwater_block::Device;

pub use error::AttachError;
pub use mark::{Mark, Owner};
pub use registry::{Intent, Record, Registry};
pub use write_through::write_through;

/// How the kernel reaches the volume's server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// ublk: requests come to this process through io_uring.
    Ublk,
    /// The kernel's NBD client over a local socket.
    Nbd,
}

impl Way {
    /// Path of device number `number`.
    pub fn device(self, number: u32) -> String {
        match self {
            Way::Ublk => format!("/dev/ublkb{number}"),
            Way::Nbd => format!("/dev/nbd{number}"),
        }
    }
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Way::Ublk => "ublk",
            Way::Nbd => "kernel NBD",
        })
    }
}

/// Chooses a way that this kernel supports. The second part of the result says why, for messages.
pub fn choose(wanted: Option<Way>) -> Result<(Way, String), AttachError> {
    match wanted {
        Some(Way::Ublk) => {
            ublk::is_there().map(|()| (Way::Ublk, "as asked".into())).map_err(AttachError::Missing)
        }
        Some(Way::Nbd) => {
            kernel_nbd::is_there().map(|()| (Way::Nbd, "as asked".into())).map_err(AttachError::Missing)
        }
        None => match ublk::is_there() {
            Ok(()) => Ok((Way::Ublk, "this kernel has it".into())),
            Err(without_ublk) => match kernel_nbd::is_there() {
                Ok(()) => Ok((Way::Nbd, without_ublk)),
                Err(without_nbd) => Err(AttachError::Missing(format!("{without_ublk}; {without_nbd}"))),
            },
        },
    }
}

/// How a device is attached.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of the device; `None`: the kernel chooses.
    pub number: Option<u32>,
    /// Queues, each with a thread (ublk; NBD has one connection).
    pub queues: u16,
    /// Requests in flight for each queue (ublk), at most 1024.
    pub depth: u16,
    /// Longest request in bytes (ublk).
    pub max_io_bytes: u32,
    /// Whether the device waits for another server if this one dies. Safe only if no answered write can be
    /// lost: see [`write_through`].
    pub survives: bool,
    /// How long requests wait for another server, in seconds (only NBD; ublk waits until the device is
    /// detached).
    pub dead_server_timeout_s: u64,
    /// Take over this device, whose server has died.
    pub resume: Option<u32>,
    /// The mark of the process that makes the device, or that made the device to take over.
    pub mark: Mark,
    /// Path of the socket on which an NBD server of the same volume listens (NBD).
    pub nbd_socket: PathBuf,
    /// Warnings about a device in ten seconds (ublk; the NBD server has its own limit); further ones are
    /// counted.
    pub warnings_per_10_s: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            number: None,
            queues: 1,
            depth: 128,
            max_io_bytes: 512 << 10,
            survives: false,
            dead_server_timeout_s: 60,
            resume: None,
            mark: Mark::of_this_thread(),
            nbd_socket: PathBuf::new(),
            warnings_per_10_s: 20,
        }
    }
}

enum Kind {
    Ublk(ublk::Ublk),
    Nbd(kernel_nbd::KernelNbd),
}

/// A block device of the kernel. Dropping it removes the device.
pub struct Attached {
    kind: Kind,
}

impl Attached {
    /// Attaches the device, or takes over one whose server died. The device can be used when this returns.
    pub fn start(way: Way, device: &Arc<dyn Device>, options: &Options) -> Result<Self, AttachError> {
        let kind = match way {
            Way::Ublk => Kind::Ublk(ublk::Ublk::start(device, options)?),
            Way::Nbd => Kind::Nbd(kernel_nbd::KernelNbd::start(&device.geometry(), options)?),
        };
        Ok(Self { kind })
    }

    /// Number of the device.
    pub fn number(&self) -> u32 {
        match &self.kind {
            Kind::Ublk(ublk) => ublk.number(),
            Kind::Nbd(nbd) => nbd.number(),
        }
    }

    /// Whether the device was removed by another program.
    pub fn is_gone(&self) -> bool {
        match &self.kind {
            Kind::Ublk(ublk) => ublk.is_gone(),
            Kind::Nbd(nbd) => nbd.is_gone(),
        }
    }

    /// Removes the device. Programs that still use it get errors. A second call does nothing. `false`: the
    /// device may still exist.
    pub fn stop(&self) -> bool {
        match &self.kind {
            Kind::Ublk(ublk) => ublk.stop(),
            Kind::Nbd(nbd) => nbd.stop(),
        }
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Whether a device with this mark waits for a new server because its own died; `None`: the kernel did not
/// say.
pub fn is_waiting(way: Way, number: u32, mark: &Mark) -> Option<bool> {
    match way {
        Way::Ublk => ublk::is_waiting(number, mark),
        Way::Nbd => match kernel_nbd::owner(number, mark) {
            Owner::Unknown => None,
            owner => Some(owner == Owner::Ours),
        },
    }
}

/// The owner of the device.
pub fn owner(way: Way, number: u32, mark: &Mark) -> Owner {
    match way {
        Way::Ublk => ublk::owner(number, mark),
        Way::Nbd => kernel_nbd::owner(number, mark),
    }
}

/// The devices that have this mark ([`Owner::Ours`]), and those that may have it ([`Owner::Unknown`]).
pub fn find(way: Way, mark: &Mark) -> std::io::Result<Vec<(u32, Owner)>> {
    let (dir, prefix) = match way {
        Way::Ublk => ("/dev", "ublkc"),
        Way::Nbd => ("/sys/block", "nbd"),
    };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(prefix)?.parse().ok());
        let Some(number) = number else { continue };
        let owner = owner(way, number, mark);
        if matches!(owner, Owner::Ours | Owner::Unknown) {
            found.push((number, owner));
        }
    }
    Ok(found)
}

/// Removes a device whose server died, if it has this mark. Returns its owner; [`Owner::Unknown`]: it may
/// have this mark and still exist.
pub fn remove(way: Way, number: u32, mark: &Mark) -> Owner {
    let owner = owner(way, number, mark);
    let is_left = owner == Owner::Ours
        && !match way {
            Way::Ublk => ublk::remove(number),
            Way::Nbd => kernel_nbd::remove(number),
        };
    if is_left { Owner::Unknown } else { owner }
}

/// Whether a device is mounted, used by another block device, or opened exclusively.
pub fn is_in_use(way: Way, number: u32) -> bool {
    use rustix::fs::{Mode, OFlags};
    let open = rustix::fs::open(
        way.device(number),
        OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NONBLOCK,
        Mode::empty(),
    );
    matches!(open, Err(rustix::io::Errno::BUSY))
}

/// Loads a kernel module, if possible; the caller checks for its device file afterwards.
fn load_module(name: &str) {
    for program in ["/sbin/modprobe", "modprobe"] {
        let mut command = Command::new(program);
        command.args(["-q", name]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        if command.status().is_ok() {
            return;
        }
    }
}
