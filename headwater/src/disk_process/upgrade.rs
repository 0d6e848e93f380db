//! `headwater upgrade`: the disk process is replaced by that of another program, and machines go on.
//!
//! ```text
//!   headwater upgrade --- DIR/keeper.sock: the open program ---> keeper: checks it
//!                                                                  |  SIGUSR1
//!   old disk process: begins no more calls, checks its disks, answers what it has, saves persistent disks, ends with code HANDED_OVER
//!                                                                  |  descriptors
//!   new disk process: takes the disks over as after a crash, and says that it serves
//! ```
//! A program that does not fit is refused before anything happens, and so is an upgrade while a disk cannot be handed over: the old
//! disk process says so, and goes on. If the new process does not serve in time, it gives the disks back as the old one handed them over,
//! and the keeper starts the old program again. A process that hangs is not killed while it may have persistent disks. The program comes from the user and never from the disk process, which may not start programs.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::process::Command;

use super::kept::{Message, PROGRAM, receive, send, watched};
use super::protocol;
use crate::data_dir::DataDir;

/// The version of the messages between keeper and disk process, and of what is kept: settings and requests.
const KEEPER_VERSION: u32 = 2;

/// How long a new program may take to say its versions, and the user's command to send it.
const CHECK_WITHIN: Duration = Duration::from_secs(5);

/// How long the user's command waits for the keeper, which has limits of its own.
const ANSWER_WITHIN: Duration = Duration::from_secs(180);

/// The code of a disk process that has handed its disks over.
pub const HANDED_OVER: u8 = 75;

/// Connections of users that wait.
const BACKLOG: i32 = 4;

/// What a program must have in common with the one whose disks it takes over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    program: String,
    keeper: u32,
    memory_format: u32,
    persistent: u32,
    protocol: u32,
}

impl Versions {
    /// Those of this program.
    pub fn own() -> Self {
        Self {
            program: env!("CARGO_PKG_VERSION").to_owned(),
            keeper: KEEPER_VERSION,
            memory_format: headwater_writecache::MEMORY_VERSION,
            persistent: headwater_writecache::PERSISTENT_VERSION,
            protocol: protocol::VERSION,
        }
    }

    /// The version of the program, for people.
    pub fn program(&self) -> &str {
        &self.program
    }

    /// Why a program cannot take the disks over from this one.
    fn refuse(&self, next: &Self) -> Result<(), String> {
        let formats = [
            ("the descriptors that are handed over", self.keeper, next.keeper),
            ("the memory of write caches", self.memory_format, next.memory_format),
            ("persistent disks", self.persistent, next.persistent),
        ];
        for (what, has, needs) in formats {
            if has != needs {
                return Err(format!(
                    "the new program (version {}) has version {needs} of {what}, and machines that are on have version {has}",
                    next.program
                ));
            }
        }
        if next.protocol < self.protocol {
            return Err(format!(
                "the new program (version {}) speaks version {} of the protocol of daemons, which is older than {}",
                next.program, next.protocol, self.protocol
            ));
        }
        Ok(())
    }
}

/// A user who waits for an upgrade, and the program.
pub(super) struct Asked {
    pub(super) program: OwnedFd,
    asker: AsyncFd<OwnedFd>,
}

impl Asked {
    /// A user who is connected with a socket that does not block.
    #[cfg(test)]
    pub(super) fn new(program: OwnedFd, asker: OwnedFd) -> std::io::Result<Self> {
        Ok(Self { program, asker: watched(asker)? })
    }

    /// Tells the user what came of it. Whoever has gone meanwhile finds it in the log.
    pub(super) async fn answer(self, outcome: Result<String, String>) {
        match &outcome {
            Ok(text) => tracing::info!("upgrade of the disk process: {text}"),
            Err(text) => tracing::error!("upgrade of the disk process: {text}"),
        }
        let message: Message<OwnedFd> = match outcome {
            Ok(text) => Message::Done(text),
            Err(text) => Message::Failed(text),
        };
        let sent = self.asker.async_io(Interest::WRITABLE, |socket| send(socket.as_fd(), &message));
        let _ = tokio::time::timeout(CHECK_WITHIN, sent).await;
    }
}

/// Listens for users with new programs.
pub(super) fn listen(data_dir: &DataDir) -> anyhow::Result<OwnedFd> {
    let path = data_dir.keeper_socket();
    let listen = || -> std::io::Result<OwnedFd> {
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        // The owner's alone: the umask of the process says so.
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path)?)?;
        rustix::net::listen(&socket, BACKLOG)?;
        Ok(socket)
    };
    listen().with_context(|| format!("cannot listen on {}", path.display()))
}

/// The next user who connects.
pub(super) async fn accept(listener: &AsyncFd<OwnedFd>) -> std::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    listener.async_io(Interest::READABLE, |socket| Ok(rustix::net::accept_with(socket, flags)?)).await
}

/// Takes the program of a user who has connected. `None`: there is none.
pub(super) async fn receive_program(asker: OwnedFd, disk_process: Option<u32>) -> Option<Asked> {
    let peer = sockopt::socket_peercred(&asker).ok()?;
    let (own, pid) = (rustix::process::geteuid(), u32::try_from(peer.pid.as_raw_nonzero().get()).ok());
    // The disk process may not choose what is started: it would leave its sandbox so.
    if (peer.uid != own && !peer.uid.is_root()) || (pid.is_some() && pid == disk_process) {
        tracing::warn!(?pid, "refusing a program from a process that may not upgrade the disk process");
        return None;
    }
    let asker = watched(asker).ok()?;
    let received = asker.async_io(Interest::READABLE, |socket| receive(socket.as_fd()));
    match tokio::time::timeout(CHECK_WITHIN, received).await {
        Ok(Ok(Some(Message::Put(name, program)))) if name == PROGRAM => Some(Asked { program, asker }),
        _ => None,
    }
}

/// The command that runs an open program with the arguments of this one.
pub(super) fn command(program: Option<&OwnedFd>) -> Command {
    // By the number of this process, so that an interpreter of the program can open it, too.
    let path = match program {
        Some(program) => format!("/proc/{}/fd/{}", std::process::id(), program.as_raw_fd()),
        // This very program, also if its file was replaced meanwhile.
        None => "/proc/self/exe".to_owned(),
    };
    let mut command = Command::new(path);
    command.arg0("headwater").args(std::env::args_os().skip(1)).stdout(Stdio::null());
    command
}

/// Refuses a program that somebody could have put there who may not replace the one that runs: QEMU and the disk process run as the user
/// of the keeper, and could connect.
fn check_owner(program: &OwnedFd) -> Result<(), String> {
    let own = std::fs::metadata("/proc/self/exe").map_err(|error| error.to_string())?;
    let new = rustix::fs::fstat(program).map_err(|error| error.to_string())?;
    if new.st_uid != 0 && new.st_uid != own.uid() {
        return Err(format!(
            "the new program's file is owned by uid {}, but it must be owned by root or uid {}: change its owner (chown)",
            new.st_uid,
            own.uid()
        ));
    }
    if new.st_mode & 0o022 != 0 {
        return Err("the new program's file can be written by others than its owner: remove that permission (chmod go-w)".to_owned());
    }
    Ok(())
}

/// Whether a program can take the disks over from the program that `serves` them: it runs, and its versions fit. Returns its versions, or
/// why not.
pub(super) async fn check(program: &OwnedFd, serves: &Versions) -> Result<Versions, String> {
    let unchanged = "; nothing has changed";
    check_owner(program).map_err(|why| why + unchanged)?;
    let mut command = command(Some(program));
    command.arg("--versions").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let output = tokio::time::timeout(CHECK_WITHIN, command.kill_on_drop(true).output()).await;
    let output = match output {
        Err(_) => {
            let within = CHECK_WITHIN.as_secs();
            return Err(format!(
                "the new program has not reported its versions within {within} s{unchanged}"
            ));
        }
        Ok(Err(error)) => return Err(format!("the new program cannot be started: {error}{unchanged}")),
        Ok(Ok(output)) => output,
    };
    if !output.status.success() {
        return Err(format!("the new program cannot report its versions ({}){unchanged}", output.status));
    }
    let versions: Versions = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("the new program does not report its versions: {error}{unchanged}"))?;
    serves
        .refuse(&versions)
        .map_err(|why| format!("{why}: stop the machines and restart the disk process instead{unchanged}"))?;
    Ok(versions)
}

/// Asks the keeper of a data directory to have another program serve the disks. Returns what it says.
pub fn upgrade(data_dir: &DataDir, program: &Path) -> anyhow::Result<String> {
    let file = File::open(program).with_context(|| format!("cannot open {}", program.display()))?;
    let path = data_dir.keeper_socket();
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    if let Err(error) = rustix::net::connect(&socket, &SocketAddrUnix::new(&path)?) {
        return Err(no_keeper(data_dir, &path, error).into());
    }
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(ANSWER_WITHIN))?;
    send(socket.as_fd(), &Message::Put(PROGRAM.to_owned(), file)).context("cannot send the program")?;
    match receive(socket.as_fd()) {
        Ok(Some(Message::Done(text))) => Ok(text),
        Ok(Some(Message::Failed(text))) => {
            Err(Problem::new(ProblemKind::Failed, format!("the disk process is not upgraded: {text}")).into())
        }
        Ok(_) => {
            let message = "the keeper of disks has refused the program, or has ended";
            let advice = "its log says why; run this as the user of the daemon, or as root";
            Err(Problem::new(ProblemKind::Failed, message).advise(advice).into())
        }
        Err(error) => Err(error).context("the keeper of disks does not answer"),
    }
}

/// Why the socket of the keeper cannot be used, and what to do.
fn no_keeper(data_dir: &DataDir, path: &Path, error: rustix::io::Errno) -> Problem {
    if !matches!(error, rustix::io::Errno::NOENT | rustix::io::Errno::CONNREFUSED) {
        let message = format!("cannot connect to the keeper of disks at {}: {error}", path.display());
        return Problem::new(ProblemKind::Failed, message)
            .advise("run this as the user of the daemon, or as root");
    }
    let message = format!("no keeper of disks answers at {}: {error}", path.display());
    // It is not used, so nobody has to answer.
    if UnixStream::connect(data_dir.disks_socket()).is_ok() {
        let advice = "a disk process runs without a keeper: its machines go on, and it cannot be upgraded; stop them and restart it";
        return Problem::new(ProblemKind::Conflict, message).advise(advice);
    }
    let advice = "no disk process runs: 'headwater serve' starts that of the program that is installed";
    Problem::new(ProblemKind::NotFound, message).advise(advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_with_other_formats_or_an_older_protocol_is_refused() {
        let own = Versions::own();
        assert_eq!(own.refuse(&own), Ok(()));
        assert_eq!(own.refuse(&Versions { protocol: own.protocol + 1, ..own.clone() }), Ok(()));
        for (other, word) in [
            (Versions { protocol: own.protocol - 1, ..own.clone() }, "protocol"),
            (Versions { memory_format: own.memory_format + 1, ..own.clone() }, "memory of write caches"),
            (Versions { persistent: own.persistent + 1, ..own.clone() }, "persistent disks"),
            (Versions { keeper: own.keeper + 1, ..own.clone() }, "descriptors"),
        ] {
            let why = own.refuse(&other).unwrap_err();
            assert!(why.contains(word), "{why}");
        }
    }

    #[test]
    fn the_disk_process_may_not_choose_the_next_program() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let is_taken = |disk_process| {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
            let (here, there) = pair.unwrap();
            let program = File::open("/proc/self/exe").unwrap();
            send(here.as_fd(), &Message::Put(PROGRAM.to_owned(), program)).unwrap();
            runtime.block_on(async { receive_program(there, disk_process).await.is_some() })
        };
        assert!(is_taken(None) && is_taken(Some(1)));
        assert!(!is_taken(Some(std::process::id())));
    }
}
