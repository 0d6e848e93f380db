//! Finding the disk process, or starting it.

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

/// How long a process that was started may take to listen.
const START_PATIENCE: Duration = Duration::from_secs(30);

/// How long a service manager may take to start the process again.
const RESTART_PATIENCE: Duration = Duration::from_secs(15);

/// How often a process may end while a daemon begins to use it.
const MAX_ENDS: u32 = 3;

/// How often it is looked whether it does.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// Uses the disk process of a data directory, and starts it if there is none. The lock of the directory is held.
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
            // A process that ends listens no longer, and keeps its lock to the last: a new one would find that.
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

/// Waits for the end of a process that ends.
fn is_gone_soon(data_dir: &DataDir) -> bool {
    let begun = Instant::now();
    // Its lock goes last, with all that it has.
    while server::lock(data_dir).is_err() {
        if begun.elapsed() > START_PATIENCE {
            return false;
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
    true
}

fn does_not_end() -> anyhow::Error {
    Problem::new(ProblemKind::Conflict, "an earlier disk process does not end").into()
}

fn start(data_dir: &DataDir, (filter, format): (&str, LogFormat)) -> anyhow::Result<()> {
    let failed = "cannot start the disk process";
    // This very program, also if its file was replaced meanwhile.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("headwater").arg("--data-dir").arg(data_dir.path()).args(["disks", "--end-unused", "--log"]);
    command.arg(filter).args(["--log-format", format.name()]).env_remove("NOTIFY_SOCKET");
    // It has nothing to do with the database.
    command.env_remove("PGPASSWORD").env_remove("CREDENTIALS_DIRECTORY");
    // Ctrl-C in the terminal of the daemon is not for it.
    let child = command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).spawn();
    let mut child = child.context(failed)?;
    let begun = Instant::now();
    while !is_there(data_dir)? {
        if let Some(status) = child.try_wait().context(failed)? {
            let message = format!("{failed}: it ended ({status})");
            return Err(Problem::new(ProblemKind::Failed, message).advise("its log says why").into());
        }
        if begun.elapsed() > START_PATIENCE {
            let message = format!("{failed}: it does not listen after {} s", START_PATIENCE.as_secs());
            return Err(Problem::new(ProblemKind::Failed, message).into());
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
    wait_for_end(child);
    Ok(())
}

/// Waits for its end on a thread, so that it does not stay behind as a zombie.
fn wait_for_end(mut child: Child) {
    let waiting =
        std::thread::Builder::new().name("hw-disks-wait".into()).spawn(move || match child.wait() {
            Ok(status) if status.success() => tracing::debug!("the disk process has ended"),
            Ok(status) => tracing::error!(%status, "the disk process has failed"),
            Err(error) => tracing::warn!(%error, "cannot wait for the disk process"),
        });
    if let Err(error) = waiting {
        tracing::warn!(%error, "nobody waits for the end of the disk process");
    }
}
