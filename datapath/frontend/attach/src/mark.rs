//! Whose a device is: numbers are used again, so a record of `/dev/nbd0` does not say that it still is the device that was
//! recorded. Each device carries the mark of the process that made it, in the kernel, and is looked at before it is removed.

use serde::{Deserialize, Serialize};

/// Who made a device. It stays with the device when another process goes on with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Process.
    pub pid: u32,
    /// Its thread that asked the kernel, which is what kernels before 5.14 tell of an NBD device.
    pub thread: u32,
    /// When the process started, in the kernel's ticks: numbers of processes are used again. 0: it gave its devices no mark of
    /// their own, as earlier versions did.
    pub started: u64,
}

/// What ublk devices of earlier versions carry, whoever made them: "headwatr".
const ANYBODYS_NUMBER: u64 = 0x6865_6164_7761_7472;

/// Whose a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// It has the mark that was asked for.
    Ours,
    /// There is another one with its number.
    Others,
    /// There is no such device, or it is not connected.
    Nobody,
    /// The kernel did not say, for lack of permission or memory for instance. It may be ours.
    Unknown,
}

impl Mark {
    /// For what the calling thread is about to make.
    pub fn of_this_thread() -> Self {
        let pid = std::process::id();
        // A link to "PID/task/THREAD".
        let link = std::fs::read_link("/proc/thread-self").ok();
        let thread = link.as_deref().and_then(|link| link.file_name()?.to_str()?.parse().ok());
        Self { pid, thread: thread.unwrap_or(pid), started: start_ticks(pid).unwrap_or(0) }
    }

    /// Whether the process lives.
    pub fn is_alive(&self) -> bool {
        start_ticks(self.pid) == Some(self.started)
    }

    /// As the kernel's NBD client keeps it.
    pub(crate) fn text(&self) -> String {
        format!("headwater-{}-{}-{}", self.pid, self.thread, self.started)
    }

    /// As ublk keeps it: another number for each process of the same boot.
    pub(crate) fn number(&self) -> u64 {
        if self.started == 0 {
            return ANYBODYS_NUMBER;
        }
        // Process numbers have at most 22 bits.
        ANYBODYS_NUMBER ^ (self.started << 22 | u64::from(self.pid))
    }
}

/// When a process started, field 22 of `/proc/PID/stat`; `None` where there is no such process, or only what its
/// parent has not taken note of yet.
pub(crate) fn start_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program may have blanks and parentheses.
    let (_, behind) = stat.rsplit_once(')')?;
    let mut fields = behind.split_ascii_whitespace();
    let is_dead = matches!(fields.next()?, "Z" | "X");
    let ticks = fields.nth(18)?.parse().ok()?;
    (!is_dead).then_some(ticks)
}
