//! The mark of a device's owner. Device numbers are reused, so a record of `/dev/nbd0` does not prove that
//! the device of that number is still the recorded one. Each device carries, in the kernel, the mark of the
//! process that made it, and the mark is checked before the device is removed.

use serde::{Deserialize, Serialize};

/// Identifies the process that made a device. The mark stays with the device when another process takes it
/// over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Process id.
    pub pid: u32,
    /// The thread that made the device: kernels before 5.14 report only this number for an NBD device.
    pub thread: u32,
    /// When the process started, in the kernel's ticks, because process ids are reused. 0: unknown, because
    /// /proc could not be read, or the record is from an earlier version, which gave devices no marks.
    pub started: u64,
}

/// The number that all ublk devices of earlier versions carry: "headwatr".
const EARLIER_VERSIONS_NUMBER: u64 = 0x6865_6164_7761_7472;

/// The owner of a device, relative to a given mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The device has the given mark.
    Ours,
    /// The device with this device number has another mark.
    Others,
    /// There is no such device, or it is not connected.
    Nobody,
    /// The kernel did not say, for lack of permission or memory for instance. The device may have the given
    /// mark.
    Unknown,
}

impl Mark {
    /// The mark for a device that the calling thread is about to make.
    pub fn of_this_thread() -> Self {
        let pid = std::process::id();
        // A link to "PID/task/THREAD".
        let link = std::fs::read_link("/proc/thread-self").ok();
        let thread = link.as_deref().and_then(|link| link.file_name()?.to_str()?.parse().ok());
        Self { pid, thread: thread.unwrap_or(pid), started: start_ticks(pid).unwrap_or(0) }
    }

    /// Whether the process is still running.
    pub fn is_alive(&self) -> bool {
        start_ticks(self.pid) == Some(self.started)
    }

    /// The mark as text, for the kernel's NBD client.
    pub(crate) fn text(&self) -> String {
        format!("headwater-{}-{}-{}", self.pid, self.thread, self.started)
    }

    /// The mark as a number, for ublk; unique among the processes of one boot.
    pub(crate) fn number(&self) -> u64 {
        if self.started == 0 {
            return EARLIER_VERSIONS_NUMBER;
        }
        // Process ids have at most 22 bits.
        EARLIER_VERSIONS_NUMBER ^ (self.started << 22 | u64::from(self.pid))
    }
}

/// When a process started: field 22 of `/proc/PID/stat`. `None` if there is no such process, or if it is a
/// zombie.
pub(crate) fn start_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name may contain blanks and parentheses.
    let (_, behind) = stat.rsplit_once(')')?;
    let mut fields = behind.split_ascii_whitespace();
    let is_dead = matches!(fields.next()?, "Z" | "X");
    let ticks = fields.nth(18)?.parse().ok()?;
    (!is_dead).then_some(ticks)
}
