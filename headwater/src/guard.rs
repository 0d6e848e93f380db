//! `headwater guard`: ends machines of a node whose lease is over, if the daemon is gone or hangs.
//!
//! The daemon writes the end of its lease to a file, and ends machines itself when the lease is over. This process
//! reads the file. It ends when its daemon is gone and there was nothing to end for a while. The next daemon
//! starts another guard.

use std::fs::{File, TryLockError};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use headwater_qemu::{RunFiles, kill_machines};
use headwater_service::backend::{Clock as _, SystemClock};
use headwater_service::fleet::fence::LeaseFile;
use rustix::process::getppid;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::data_dir::DataDir;
use crate::fleet::membership;

/// How often the file is read.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// How long the guard waits for the daemon to end the machines itself. The controller waits longer than that.
const DAEMON_FIRST_MS: u64 = 500;

/// How long the guard stays without a daemon and with nothing to end.
const UNUSED: Duration = Duration::from_secs(60);

/// How often a daemon checks whether its guard runs.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The file with the lease of a node.
pub fn lease_file(data_dir: &DataDir) -> PathBuf {
    membership::dir_of(data_dir).join("lease.json")
}

/// Takes the lock of the guard. `None`: another guard runs.
fn lock(data_dir: &DataDir) -> std::io::Result<Option<File>> {
    let file = File::create(membership::dir_of(data_dir).join("guard.lock"))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Runs until its daemon is gone and there is nothing to guard.
pub async fn run(data_dir: &DataDir) -> anyhow::Result<u8> {
    let Some(_lock) = lock(data_dir).context("cannot lock the guard of this node")? else { return Ok(0) };
    let daemon = getppid();
    let mut unused_since = Instant::now();
    while unused_since.elapsed() < UNUSED && membership::dir_of(data_dir).exists() {
        tokio::time::sleep(POLL_INTERVAL).await;
        // A process whose parent has ended gets another parent.
        let is_used = check(data_dir).await || getppid() == daemon;
        if is_used {
            unused_since = Instant::now();
        }
    }
    Ok(0)
}

/// Ends the machines if the lease is over. Returns whether there is a lease, or there were machines.
async fn check(data_dir: &DataDir) -> bool {
    // Machines of an earlier boot of the host have ended with it.
    let file = LeaseFile::read(&lease_file(data_dir));
    let ends_at_ms = file.as_ref().and_then(LeaseFile::ends_at_ms);
    let (Some(file), Some(ends_at_ms)) = (file, ends_at_ms) else { return false };
    if SystemClock.since_boot_ms() < ends_at_ms.saturating_add(DAEMON_FIRST_MS) {
        return true;
    }
    let may_be_on = |name: &String| RunFiles::new(&data_dir.run().join(name)).pid_file().exists();
    if !file.machines.iter().any(may_be_on) {
        return false;
    }
    let killed = kill_machines(&data_dir.run(), &file.machines).await;
    for machine in &killed {
        let directory = machine.run_dir.display().to_string();
        if machine.ended {
            tracing::warn!(
                directory,
                "ended a machine: the lease of this node is over, and another host may run it"
            );
        } else {
            tracing::error!(
                directory,
                pid = machine.pid,
                "cannot end a machine that another host may run; it is tried again"
            );
        }
    }
    !killed.is_empty()
}

/// Keeps a guard running until `stop` is true. It is started before a machine is fenced, so that no machine runs
/// without it.
pub async fn keep(data_dir: DataDir, mut stop: watch::Receiver<bool>) -> std::io::Result<()> {
    loop {
        if let Err(error) = start_unless_there(&data_dir) {
            tracing::error!(
                "cannot start the guard, so machines that another host may run would keep running if this daemon is killed: {error}"
            );
        }
        tokio::select! {
            () = tokio::time::sleep(CHECK_INTERVAL) => {}
            () = stopped(&mut stop) => return Ok(()),
        }
    }
}

fn start_unless_there(data_dir: &DataDir) -> std::io::Result<()> {
    if lock(data_dir)?.is_none() {
        return Ok(());
    }
    // The running program itself, even if its file was replaced.
    let mut command = std::process::Command::new("/proc/self/exe");
    // In its own process group, so that Ctrl-C in the daemon's terminal does not end it.
    command.arg0("headwater").process_group(0);
    command.arg("--data-dir").arg(data_dir.path()).arg("guard").env_remove("NOTIFY_SOCKET");
    command.env_remove("PGPASSWORD").env_remove("CREDENTIALS_DIRECTORY");
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = tokio::process::Command::from(command).spawn()?;
    // Reaps it, so that it does not become a zombie.
    tokio::spawn(async move { child.wait().await });
    Ok(())
}

/// Waits until the daemon ends.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender was dropped, which is an end too.
    let _ = stop.wait_for(|stop| *stop).await;
}
