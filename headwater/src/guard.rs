//! `headwater guard`: ends machines of a node whose lease is over, although the daemon is gone or stands still.
//!
//! The daemon writes the end of its lease to a file, and ends machines itself when the lease is over. This process looks at the file. It ends
//! when its daemon is gone and there was nothing to end for a while. The next daemon starts another one.

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

/// How often the file is looked at.
const LOOK: Duration = Duration::from_millis(250);

/// How long a daemon gets to end the machines itself, in milliseconds. The controller waits for longer.
const DAEMON_FIRST_MS: u64 = 500;

/// How long it stays without a daemon and with nothing to end.
const UNUSED: Duration = Duration::from_secs(60);

/// How often a daemon looks whether its guard is there.
const KEEP: Duration = Duration::from_secs(1);

/// The file with the lease of a node.
pub fn lease_file(data_dir: &DataDir) -> PathBuf {
    membership::dir_of(data_dir).join("lease.json")
}

/// The lock of the guard. `None`: there is a guard.
fn lock(data_dir: &DataDir) -> std::io::Result<Option<File>> {
    let file = File::create(membership::dir_of(data_dir).join("guard.lock"))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Guards until its daemon is gone, and there is nothing to guard.
pub async fn run(data_dir: &DataDir) -> anyhow::Result<u8> {
    let Some(_lock) = lock(data_dir).context("cannot lock the guard of this node")? else { return Ok(0) };
    let daemon = getppid();
    let mut unused_since = Instant::now();
    while unused_since.elapsed() < UNUSED && membership::dir_of(data_dir).exists() {
        tokio::time::sleep(LOOK).await;
        // A process whose parent ends gets another one.
        let is_used = look(data_dir).await || getppid() == daemon;
        if is_used {
            unused_since = Instant::now();
        }
    }
    Ok(0)
}

/// Ends the machines if the lease is over. Whether there is a lease, or there were machines.
async fn look(data_dir: &DataDir) -> bool {
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
                "cannot end a machine that another host may run, and tries again"
            );
        }
    }
    !killed.is_empty()
}

/// Keeps a guard there until `stop` says true. It is there before a machine is fenced, so that no machine goes on without it.
pub async fn keep(data_dir: DataDir, mut stop: watch::Receiver<bool>) -> std::io::Result<()> {
    loop {
        if let Err(error) = start_unless_there(&data_dir) {
            tracing::error!(
                "cannot start the guard, so machines that another host may run go on if this daemon is killed: {error}"
            );
        }
        tokio::select! {
            () = tokio::time::sleep(KEEP) => {}
            () = stopped(&mut stop) => return Ok(()),
        }
    }
}

fn start_unless_there(data_dir: &DataDir) -> std::io::Result<()> {
    if lock(data_dir)?.is_none() {
        return Ok(());
    }
    // This very program, also if its file was replaced meanwhile.
    let mut command = std::process::Command::new("/proc/self/exe");
    // Ctrl-C in the terminal of the daemon is not for it.
    command.arg0("headwater").process_group(0);
    command.arg("--data-dir").arg(data_dir.path()).arg("guard").env_remove("NOTIFY_SOCKET");
    command.env_remove("PGPASSWORD").env_remove("CREDENTIALS_DIRECTORY");
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = tokio::process::Command::from(command).spawn()?;
    // So that it does not stay behind as a zombie.
    tokio::spawn(async move { child.wait().await });
    Ok(())
}

/// Waits until the daemon ends.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, which is an end too.
    let _ = stop.wait_for(|stop| *stop).await;
}
