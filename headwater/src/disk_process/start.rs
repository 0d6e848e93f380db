//! Connects the daemon to the disk process of its data directory, or starts one if none listens. Called at the start of the daemon. After
//! that, the keeper restarts a disk process that crashes, and the daemon starts none.

use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};

use super::client::{self, Begun, DiskClient};
use super::protocol::Failure;
use super::server;
use super::settings::Settings;
use crate::cli::LogFormat;
use crate::data_dir::DataDir;

/// How long a started process may take until it listens.
const START_PATIENCE: Duration = Duration::from_secs(30);

/// How long a service manager may take to restart the process.
const RESTART_PATIENCE: Duration = Duration::from_secs(15);

/// How often the process may end while a daemon connects.
const MAX_ENDS: u32 = 3;

/// The interval at which the daemon checks whether the process listens.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// Connects to the disk process of a data directory, and starts it if none listens. The caller has the lock of the
/// directory.
pub fn connect(
    data_dir: &DataDir,
    settings: &Settings,
    log: (&str, LogFormat),
    say: &dyn Fn(&str),
) -> anyhow::Result<DiskClient> {
    let socket = data_dir.disks_socket();
    let mut ends = 0;
    loop {
        if !is_there(data_dir)? {
            // A process that ends stops listening first and releases its lock last; a new process would fail at that
            // lock.
            if socket.exists() && !is_gone_soon(data_dir) {
                return Err(does_not_end());
            }
            say("starting the disk process");
            start(data_dir, log)?;
        }
        match client::begin(&socket, settings.clone(), say) {
            Ok(Begun::Ready(client)) => return Ok(client),
            // Nobody used it, so it ended after it was found. Or it crashed, and its keeper starts another one.
            Err(error)
                if error.kind() == ProblemKind::Unavailable
                    && ends < MAX_ENDS
                    && (is_there(data_dir)? || is_gone_soon(data_dir)) =>
            {
                tracing::info!(%error, "the disk process has ended: another one is used");
                ends += 1;
            }
            Err(error) => return Err(Failure::from(&error).into_problem().into()),
            Ok(Begun::Ends { restarted }) => {
                say("waiting for the end of an earlier disk process");
                if !is_gone_soon(data_dir) {
                    return Err(does_not_end());
                }
                let begun = Instant::now();
                while restarted && !is_there(data_dir)? && begun.elapsed() < RESTART_PATIENCE {
                    std::thread::sleep(LOOK_INTERVAL);
                }
            }
        }
    }
}

/// Whether a process listens.
fn is_there(data_dir: &DataDir) -> anyhow::Result<bool> {
    let socket = data_dir.disks_socket();
    match UnixStream::connect(&socket) {
        Ok(_) => Ok(true),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => Ok(false),
        Err(e) => {
            Err(e).with_context(|| format!("cannot connect to the disk process at {}", socket.display()))
        }
    }
}

/// Waits for the end of a process that is ending.
fn is_gone_soon(data_dir: &DataDir) -> bool {
    let begun = Instant::now();
    // It releases its lock last.
    while server::lock(data_dir).is_err() {
        if begun.elapsed() > START_PATIENCE {
            return false;
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
    true
}

fn does_not_end() -> anyhow::Error {
    let message = "cannot start the disk process: an earlier disk process does not end";
    let advice = "see in its log why; it may be stopped, or a disk of the host may hang";
    Problem::new(ProblemKind::Conflict, message).advise(advice).into()
}

fn start(data_dir: &DataDir, (filter, format): (&str, LogFormat)) -> anyhow::Result<()> {
    let failed = "cannot start the disk process";
    // The program of this process, even if its file was replaced meanwhile.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("headwater").arg("--data-dir").arg(data_dir.path()).args(["disks", "--end-unused", "--log"]);
    command.arg(filter).args(["--log-format", format.name()]).env_remove("NOTIFY_SOCKET");
    // The disk process does not use the database.
    command.env_remove("PGPASSWORD").env_remove("CREDENTIALS_DIRECTORY");
    // Ctrl-C in the daemon's terminal must not end it.
    let child = command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).spawn();
    let mut child = child.context(failed)?;
    let begun = Instant::now();
    while !is_there(data_dir)? {
        if let Some(status) = child.try_wait().context(failed)? {
            let message = format!("{failed}: it ended ({status})");
            return Err(Problem::new(ProblemKind::Failed, message).advise("its log has the reason").into());
        }
        if begun.elapsed() > START_PATIENCE {
            let message = format!("{failed}: it does not listen after {} s", START_PATIENCE.as_secs());
            return Err(Problem::new(ProblemKind::Failed, message).advise("its log may say why").into());
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
    wait_for_end(child);
    Ok(())
}

/// Waits for the end of the process on a thread, so that it does not stay behind as a zombie.
fn wait_for_end(mut child: Child) {
    let waiting =
        std::thread::Builder::new().name("hw-disks-wait".into()).spawn(move || match child.wait() {
            Ok(status) if status.success() => tracing::debug!("the disk process has ended"),
            Ok(status) => tracing::error!(%status, "the disk process has failed"),
            Err(error) => tracing::warn!(%error, "cannot wait for the disk process"),
        });
    if let Err(error) = waiting {
        tracing::warn!(%error, "cannot start a thread that waits for the end of the disk process");
    }
}
