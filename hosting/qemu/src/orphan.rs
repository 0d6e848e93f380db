//! QEMU processes that outlived the daemon that started them: those that `launch` could not tie to it.
//!
//! An orphan is known by its pid file (process number and start time) and by its command line, which
//! holds the path of its monitor socket in the run directory. A process for which either does not fit is
//! never touched. The daemon may also die in the moment between starting QEMU and writing the pid file,
//! so processes without one are looked for by the command line alone, which names a directory that only
//! the one daemon that holds the data directory's lock starts machines in.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::process::ProcessId;
use crate::spec::{RunFiles, socket_chardev};

/// How long an orphan may take to end by itself. Its disk is gone with the daemon, so there is nothing
/// that it could still save.
const GRACE: Duration = Duration::from_secs(2);

/// An orphan that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orphan {
    /// The run directory of its machine.
    pub run_dir: PathBuf,
    /// Its process number.
    pub pid: u32,
    /// Whether it is gone now. If not, it hangs in the kernel and its machine must not be started.
    pub ended: bool,
}

/// Ends every QEMU that a former daemon left behind under `run_root` (one directory for each machine),
/// and removes its sockets and pid files. To be called while holding the lock of the data directory and
/// before any machine is started.
pub async fn sweep_orphans(run_root: &Path) -> Result<Vec<Orphan>> {
    let root = run_root.to_path_buf();
    let describe = Error::io("look for left-over machines in", run_root);
    tokio::task::spawn_blocking(move || sweep(&root))
        .await
        .unwrap_or_else(|error| Err(std::io::Error::other(error)))
        .map_err(describe)
}

fn sweep(run_root: &Path) -> std::io::Result<Vec<Orphan>> {
    let mut orphans = Vec::new();
    let entries = match std::fs::read_dir(run_root) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(orphans),
        other => other?,
    };
    for entry in entries {
        let entry = entry?;
        if !entry.file_type()?.is_dir() {
            continue;
        }
        let files = RunFiles::new(&entry.path());
        for process in find(&files) {
            let ended = process.end(GRACE)?;
            tracing::warn!(pid = process.pid, run_dir = %files.dir.display(), ended, "ended a left-over QEMU");
            orphans.push(Orphan { run_dir: files.dir.clone(), pid: process.pid, ended });
        }
        remove_leftovers(&files)?;
    }
    Ok(orphans)
}

/// The processes that belong to a run directory: the one of the pid file first.
fn find(files: &RunFiles) -> Vec<ProcessId> {
    let marker = socket_chardev("qmp", &files.monitor_socket());
    let is_ours = |process: &ProcessId| {
        process.command_line().is_some_and(|line| line.iter().any(|argument| argument == OsStr::new(&marker)))
    };
    let named = std::fs::read_to_string(files.pid_file())
        .ok()
        .and_then(|line| ProcessId::from_line(&line))
        .filter(is_ours);
    let mut found: Vec<ProcessId> = named.into_iter().collect();
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    for entry in all {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if !is_emulator(pid) || found.iter().any(|process| process.pid == pid) {
            continue;
        }
        found.extend(ProcessId::of(pid).filter(is_ours));
    }
    found
}

/// Whether the program of a process is a QEMU, so that an editor or a shell whose command line quotes
/// the same path is left alone.
fn is_emulator(pid: u32) -> bool {
    std::fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|program| {
        program.file_name().is_some_and(|name| name.as_bytes().starts_with(b"qemu-system-"))
    })
}

/// Removes what only makes sense while QEMU runs. Logs stay, for whoever asks what happened.
pub(crate) fn remove_leftovers(files: &RunFiles) -> std::io::Result<()> {
    for path in [files.monitor_socket(), files.agent_socket(), files.console_socket(), files.pid_file()] {
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}
