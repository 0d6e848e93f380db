//! Identifies a process so that it cannot be confused with another process of the same number, and waits for its end.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags, Signal};
use tokio::process::Child;

/// A process number together with the time when that process started, in clock ticks since boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessId {
    /// The number, which the system gives out again later.
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`.
    pub start_ticks: u64,
}

impl ProcessId {
    /// The process that has this number now.
    pub fn of(pid: u32) -> Option<Self> {
        let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
        Some(Self { pid, start_ticks: parse_start_ticks(&stat)? })
    }

    /// Its command line; `None` if the process is gone, or its number belongs to another process now.
    pub fn command_line(&self) -> Option<Vec<OsString>> {
        let bytes = std::fs::read(format!("/proc/{}/cmdline", self.pid)).ok()?;
        // Checked after reading, so the line belongs to the right process.
        (Self::of(self.pid)? == *self)
            .then(|| bytes.split(|&b| b == 0).map(|part| OsString::from_vec(part.to_vec())).collect())
    }

    /// As a line of a pid file.
    pub fn to_line(self) -> String {
        format!("{} {}\n", self.pid, self.start_ticks)
    }

    /// From a line of a pid file.
    pub fn from_line(line: &str) -> Option<Self> {
        let (pid, start_ticks) = line.trim().split_once(' ')?;
        Some(Self { pid: pid.parse().ok()?, start_ticks: start_ticks.parse().ok()? })
    }

    /// Ends the process: `SIGTERM`, then `SIGKILL` after `grace`. Returns whether it is gone. Blocks.
    pub fn end(&self, grace: Duration) -> std::io::Result<bool> {
        let Some(handle) = self.open()? else { return Ok(true) };
        for (signal, timeout) in [(Signal::TERM, grace), (Signal::KILL, Duration::from_secs(10))] {
            match rustix::process::pidfd_send_signal(&handle, signal) {
                Err(rustix::io::Errno::SRCH) => return Ok(true),
                other => other?,
            }
            let limit = rustix::event::Timespec {
                tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: timeout.subsec_nanos().into(),
            };
            // The handle becomes readable when the process ends.
            let mut fds = [PollFd::new(&handle, PollFlags::IN)];
            if rustix::event::poll(&mut fds, Some(&limit))? > 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// A handle (pidfd) of this process; `None` if it is gone. The handle is opened before the identity is checked, so
    /// a number that is reused in between fails the check.
    fn open(&self) -> std::io::Result<Option<OwnedFd>> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        let handle = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            other => other?,
        };
        Ok((Self::of(self.pid) == Some(*self)).then_some(handle))
    }
}

/// Pause between two checks whether an adopted process has ended. The kernel notifies the parent only.
const ADOPTED_LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// A process that this program waits for.
#[derive(Debug)]
pub(crate) enum Watched {
    /// This program started it.
    Child(Child),
    /// An earlier program started it.
    Adopted(OwnedFd),
}

/// How a process ended.
#[derive(Debug)]
pub(crate) struct Ended(Option<std::io::Result<std::process::ExitStatus>>);

impl Ended {
    /// Whether it exited with code 0. `None`: only the parent of the process knows.
    pub fn is_success(&self) -> Option<bool> {
        self.0.as_ref().map(|status| status.as_ref().is_ok_and(std::process::ExitStatus::success))
    }
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Some(Ok(status)) => status.fmt(f),
            Some(Err(error)) => write!(f, "unknown: {error}"),
            None => f.write_str("exit status unknown: an earlier daemon started it"),
        }
    }
}

impl Watched {
    /// Takes over a process that is not a child. `None`: it has ended.
    pub fn adopt(process: ProcessId) -> std::io::Result<Option<Self>> {
        let Some(handle) = process.open()? else { return Ok(None) };
        // The handle of a zombie opens as well.
        Ok(if has_ended(&handle)? { None } else { Some(Self::Adopted(handle)) })
    }

    /// Waits for its end.
    pub async fn wait(&mut self) -> Ended {
        match self {
            Self::Child(child) => Ended(Some(child.wait().await)),
            Self::Adopted(handle) => loop {
                match has_ended(handle) {
                    Ok(true) => return Ended(None),
                    Ok(false) => tokio::time::sleep(ADOPTED_LOOK_INTERVAL).await,
                    Err(error) => return Ended(Some(Err(error))),
                }
            },
        }
    }

    /// Kills it, and does not wait for its end.
    pub fn kill(&mut self) -> std::io::Result<()> {
        match self {
            Self::Child(child) => child.start_kill(),
            Self::Adopted(handle) => match rustix::process::pidfd_send_signal(&*handle, Signal::KILL) {
                Err(rustix::io::Errno::SRCH) => Ok(()),
                other => Ok(other?),
            },
        }
    }
}

/// Whether a process has ended: its handle is readable then.
fn has_ended(handle: &OwnedFd) -> std::io::Result<bool> {
    let mut fds = [PollFd::new(handle, PollFlags::IN)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    Ok(rustix::event::poll(&mut fds, Some(&now))? > 0)
}

/// The command name, in parentheses, may itself hold spaces and parentheses: count from the last one.
fn parse_start_ticks(stat: &[u8]) -> Option<u64> {
    let end = stat.iter().rposition(|&b| b == b')')?;
    let rest = std::str::from_utf8(stat.get(end + 1..)?).ok()?;
    // The first field after the name is number 3.
    rest.split_ascii_whitespace().nth(22 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_name_may_contain_parentheses_and_spaces() {
        let mut stat = b"7 (a) b (c) S".to_vec();
        for field in 4..=22 {
            stat.extend_from_slice(format!(" {field}00").as_bytes());
        }
        assert_eq!(parse_start_ticks(&stat), Some(2200));
    }

    #[tokio::test]
    async fn an_adopted_process_is_waited_for_and_killed() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let id = ProcessId::of(child.id()).unwrap();
        let mut watched = Watched::adopt(id).unwrap().unwrap();
        assert!(tokio::time::timeout(Duration::from_millis(50), watched.wait()).await.is_err());
        watched.kill().unwrap();
        let ended = watched.wait().await;
        assert_eq!(ended.is_success(), None);
        assert!(ended.to_string().contains("earlier daemon"), "{ended}");
        // It is a zombie until its parent has waited for it.
        assert!(Watched::adopt(id).unwrap().is_none());
        child.wait().unwrap();
        assert!(Watched::adopt(id).unwrap().is_none());
        watched.kill().unwrap();
    }

    #[test]
    fn a_process_is_ended_but_not_a_later_one_with_its_number() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let real = ProcessId::of(child.id()).unwrap();
        assert_eq!(ProcessId::from_line(&real.to_line()), Some(real));
        let earlier = ProcessId { start_ticks: real.start_ticks - 1, ..real };
        assert!(earlier.command_line().is_none());
        assert!(earlier.end(Duration::ZERO).unwrap(), "the earlier process is gone");
        assert!(child.try_wait().unwrap().is_none(), "the other process was left alone");
        assert!(real.end(Duration::from_secs(5)).unwrap());
        assert!(child.wait().unwrap().code().is_none());
    }
}
