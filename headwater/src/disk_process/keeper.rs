//! The keeper: the parent of the disk process. It holds what the next disk process needs, and starts that process if one crashes.
//!
//! ```text
//!   headwater disks (keeper) --starts, hands all descriptors over--> headwater disks (disk process)
//!          ^------------------- put NAME, remove NAME ------------------------------+
//! ```
//! It holds descriptors under names, and never maps or reads one. A disk process that ends with code 0 was asked to end, and so the
//! keeper ends too.
//!
//! | the disk process ended | next |
//! |---|---|
//! | with code 0, or the keeper was told to end | the keeper ends |
//! | by SIGKILL: somebody, or the kernel for want of memory | another one, always |
//! | otherwise, while it took a disk over, and it was the third time within a minute | another one, without that disk |
//! | otherwise, for the fourth time within a minute | the keeper ends, and all machines with it |
//! | otherwise | another one; after two times within a minute it takes the disks over one by one, and waits after each |

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::process::{Child, Command};

use super::kept::{LISTENER, LOCK, MEMORY, Message, SETTINGS, is_of, is_request, receive, send, watched};
use super::server::lock;
use crate::data_dir::DataDir;
use crate::signals::EndSignals;

/// How often a disk process may crash within [`CRASHES_WITHIN`] before the keeper gives up.
const MAX_CRASHES: usize = 3;
/// The crash, within that time, after which a disk is given up that is being taken over.
const MAX_CRASHES_OF_A_DISK: usize = 3;
/// The crashes after which disks are taken over one by one.
const CRASHES_UNTIL_CAREFUL: usize = 2;
const CRASHES_WITHIN: Duration = Duration::from_secs(60);

/// Only the child of a keeper has this variable.
const KEPT: &str = "HEADWATER_KEPT";
const CAREFUL: &str = "careful";

/// Whether a keeper has started this process.
pub fn is_kept() -> bool {
    std::env::var_os(KEPT).is_some()
}

/// Whether this process is to take the disks over one by one: the ones before it have crashed, and one of the disks may be why.
pub fn is_careful() -> bool {
    std::env::var_os(KEPT).is_some_and(|how| how == CAREFUL)
}

/// Keeps disk processes until one ends in order, or too many crash. Returns the exit code.
pub fn keep(data_dir: &DataDir) -> anyhow::Result<u8> {
    let lock = lock(data_dir)?;
    let mut kept = BTreeMap::from([(LOCK.to_owned(), OwnedFd::from(lock))]);
    match memory_directory(data_dir) {
        Ok(directory) => drop(kept.insert(MEMORY.to_owned(), directory)),
        Err(why) => tracing::debug!("the memory of write caches has no tmpfs with huge pages: {why}"),
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("cannot start the keeper of disks")?.block_on(keep_on(kept))
}

/// A tmpfs that was mounted for the memory of write caches, below the data directory.
fn memory_directory(data_dir: &DataDir) -> Result<OwnedFd, String> {
    /// `fstatfs` names a tmpfs so.
    const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;
    let path = data_dir.memory();
    let failed = |error: rustix::io::Errno| format!("{}: {error}", path.display());
    let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    let directory = rustix::fs::open(path.as_path(), flags, rustix::fs::Mode::empty()).map_err(failed)?;
    let is_tmpfs = rustix::fs::fstatfs(&directory).map_err(failed)?.f_type == TMPFS_MAGIC;
    if is_tmpfs { Ok(directory) } else { Err(format!("{} is no tmpfs", path.display())) }
}

/// What the keeper knows.
struct Keeping {
    kept: BTreeMap<String, OwnedFd>,
    /// The UUID of the machine whose disk is being taken over, or nothing.
    taken_over: String,
    crashes: Crashes,
}

/// When disk processes crashed, within [`CRASHES_WITHIN`].
#[derive(Default)]
struct Crashes(VecDeque<Instant>);

/// What follows a crash.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    GoOn,
    /// Without the disk that was being taken over.
    Fence,
    GiveUp,
}

impl Crashes {
    fn count(&mut self, now: Instant, is_of_a_disk: bool) -> Next {
        self.0.push_back(now);
        self.0.retain(|at| now.duration_since(*at) < CRASHES_WITHIN);
        if is_of_a_disk && self.0.len() >= MAX_CRASHES_OF_A_DISK {
            // The others have nothing to do with them.
            self.0.clear();
            return Next::Fence;
        }
        if self.0.len() > MAX_CRASHES { Next::GiveUp } else { Next::GoOn }
    }

    fn is_careful(&self) -> bool {
        self.0.len() >= CRASHES_UNTIL_CAREFUL
    }
}

async fn keep_on(kept: BTreeMap<String, OwnedFd>) -> anyhow::Result<u8> {
    let mut signals = EndSignals::catch_with(false)?;
    let _hang_up = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup())?;
    let mut keeping = Keeping { kept, taken_over: String::new(), crashes: Crashes::default() };
    loop {
        let (status, is_asked) = keeping.run_one(&mut signals).await?;
        if is_asked || status.success() || !keeping.kept.contains_key(SETTINGS) {
            // Nobody has used the process, or somebody has ended it.
            let code = status.code().and_then(|code| u8::try_from(code).ok());
            return Ok(code.unwrap_or(1));
        }
        keeping.after_crash(status)?;
    }
}

impl Keeping {
    /// Decides whether there is another disk process, and with which disks.
    fn after_crash(&mut self, status: ExitStatus) -> anyhow::Result<()> {
        let uuid = std::mem::take(&mut self.taken_over);
        if status.signal() == Some(rustix::process::Signal::KILL.as_raw()) {
            // That is no mistake of the process, so it is not counted.
            tracing::error!("the disk process was killed: the next one takes its disks over");
            return Ok(());
        }
        match self.crashes.count(Instant::now(), !uuid.is_empty()) {
            Next::GoOn => {
                let disks = self.kept.keys().filter(|name| is_request(name)).count();
                tracing::error!(
                    disks,
                    "the disk process has crashed ({status}): the next one takes its disks over"
                );
                Ok(())
            }
            Next::Fence => {
                tracing::error!(
                    uuid,
                    "a disk is given up, and its machine with it: the disk process has crashed {MAX_CRASHES_OF_A_DISK} times within {} s, \
                     the last time ({status}) when it took this disk over; the log of the disk process says why",
                    CRASHES_WITHIN.as_secs()
                );
                self.kept.retain(|name, _| !is_of(name, &uuid));
                Ok(())
            }
            Next::GiveUp => {
                let message = format!(
                    "the disk process has crashed {} times within {} s, the last time with {status}",
                    self.crashes.0.len(),
                    CRASHES_WITHIN.as_secs()
                );
                let advice = "what its machines wrote is lost; its log says why it crashed";
                Err(Problem::new(ProblemKind::Failed, message).advise(advice).into())
            }
        }
    }

    /// Runs a disk process to its end. Returns whether a signal asked for that.
    async fn run_one(&mut self, signals: &mut EndSignals) -> anyhow::Result<(ExitStatus, bool)> {
        let failed = "cannot start the disk process";
        let (ours, theirs) = pair().context(failed)?;
        let mut child = start(theirs, self.crashes.is_careful()).context(failed)?;
        rustix::io::ioctl_fionbio(&ours, true).context(failed)?;
        let ours = watched(ours).context(failed)?;
        let mut is_asked = false;
        let mut is_open = hand_over(&ours, &self.kept).await;
        let status = loop {
            tokio::select! {
                status = child.wait() => break status.context("cannot wait for the disk process")?,
                signal = signals.next() => {
                    tracing::debug!(signal, "the disk process is told to end");
                    is_asked = true;
                    tell(&child, rustix::process::Signal::TERM);
                }
                message = ours.async_io(Interest::READABLE, |socket| receive(socket.as_fd())), if is_open => {
                    is_open = self.note(message);
                }
            }
        };
        // What it sent before its end counts.
        while self.note(receive(ours.get_ref().as_fd())) {}
        Ok((status, is_asked))
    }

    /// Does what the disk process asks for. `false`: it asks for nothing now, or never again.
    fn note(&mut self, message: std::io::Result<Option<Message<OwnedFd>>>) -> bool {
        match message {
            Ok(Some(Message::Put(name, fd))) => drop(self.kept.insert(name, fd)),
            Ok(Some(Message::Remove(name))) if ![LOCK, LISTENER, MEMORY].contains(&&*name) => {
                self.kept.remove(&name);
            }
            Ok(Some(Message::TakesOver(uuid))) => self.taken_over = uuid,
            Ok(Some(Message::Remove(_) | Message::All)) => {}
            Ok(None) | Err(_) => return false,
        }
        true
    }
}

/// A pair of sockets that keep the boundaries of messages.
fn pair() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
}

/// The program of the keeper, as the disk process. Its standard input is the socket of the keeper.
fn start(socket: OwnedFd, is_careful: bool) -> std::io::Result<Child> {
    // This very program, also if its file was replaced meanwhile.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("headwater")
        .args(std::env::args_os().skip(1))
        .env(KEPT, if is_careful { CAREFUL } else { "1" });
    command.stdin(Stdio::from(socket)).stdout(Stdio::null()).spawn()
}

fn tell(child: &Child, signal: rustix::process::Signal) {
    let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(rustix::process::Pid::from_raw);
    if let Some(pid) = pid
        && let Err(error) = rustix::process::kill_process(pid, signal)
    {
        tracing::warn!(%error, "cannot send a signal to the disk process");
    }
}

/// Gives the disk process all that is kept. `false`: it has ended before it took that.
async fn hand_over(socket: &AsyncFd<OwnedFd>, kept: &BTreeMap<String, OwnedFd>) -> bool {
    for (name, fd) in kept {
        let message = Message::Put(name.clone(), fd);
        let sent = socket.async_io(Interest::WRITABLE, |socket| send(socket.as_fd(), &message));
        if sent.await.is_err() {
            return false;
        }
    }
    let all = Message::<&OwnedFd>::All;
    socket.async_io(Interest::WRITABLE, |socket| send(socket.as_fd(), &all)).await.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_crashes_within_a_minute_count() {
        let (mut crashes, begun) = (Crashes::default(), Instant::now());
        for _ in 0..MAX_CRASHES {
            assert_eq!(crashes.count(begun, false), Next::GoOn);
        }
        assert!(crashes.is_careful());
        assert_eq!(crashes.count(begun + CRASHES_WITHIN, false), Next::GoOn);
        assert!(!crashes.is_careful());
        for _ in 1..MAX_CRASHES {
            assert_eq!(crashes.count(begun + CRASHES_WITHIN, false), Next::GoOn);
        }
        assert_eq!(crashes.count(begun + CRASHES_WITHIN, false), Next::GiveUp);
    }

    #[test]
    fn a_disk_is_given_up_alone() {
        let (mut crashes, begun) = (Crashes::default(), Instant::now());
        assert_eq!(crashes.count(begun, false), Next::GoOn);
        assert_eq!(crashes.count(begun, true), Next::GoOn);
        assert_eq!(crashes.count(begun, true), Next::Fence);
        // Another disk has as many attempts.
        assert_eq!(crashes.count(begun, true), Next::GoOn);
        assert_eq!(crashes.count(begun, true), Next::GoOn);
        assert_eq!(crashes.count(begun, true), Next::Fence);
    }
}
