//! Finds and ends QEMU processes that outlived the daemon that started them, because `launch` could not tie them to
//! it.
//!
//! An orphan is recognised by its pid file (process number and start time) and by its command line, which has the path
//! of its monitor socket in the run directory. If either does not match, the process is never touched.
//!
//! The daemon may also die between starting QEMU and writing the pid file. So a process without a pid file is
//! recognised by its command line alone. Only the daemon that holds the data directory's lock starts machines in the
//! directory named there. A daemon in a container may have another directory at the same path, so the directory itself
//! is compared too.
//!
//! A left-over swtpm is recognised by its command line in the same way. Nearly always it has ended with its QEMU.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs::DirEntry;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::process::ProcessId;
use crate::spec::{RunFiles, socket_chardev};
use crate::tpm;

/// How long an orphan may take to end by itself. Its disk is gone with the daemon, so it has nothing to save.
const GRACE: Duration = Duration::from_secs(2);

/// How long examining one process may take.
const EXAMINE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long to wait until killed machines have ended.
const KILL_TIMEOUT: Duration = Duration::from_secs(15);

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

/// Ends every QEMU that an earlier daemon left behind under `run_root` (one directory for each machine), and removes
/// its sockets and pid files. Directories with a name in `adopted` are left alone. The caller must hold the lock of the
/// data directory, and must not have started any machine.
pub async fn sweep_orphans(run_root: &Path, adopted: &[String]) -> Result<Vec<Orphan>> {
    let (root, adopted) = (run_root.to_path_buf(), adopted.to_vec());
    let describe = Error::io("look for orphaned machines in", run_root);
    tokio::task::spawn_blocking(move || sweep(&root, &adopted))
        .await
        .unwrap_or_else(|error| Err(std::io::Error::other(error)))
        .map_err(describe)
}

/// Kills the QEMUs of these machines under `run_root`, all at the same time, and waits until they are gone. Returns those that ran.
///
/// Another host is about to start these machines. So a process that hangs, or a disk that does not answer, must not delay the end of
/// the others: each machine has a thread of its own, and no file is written or removed.
pub async fn kill_machines(run_root: &Path, names: &[String]) -> Vec<Orphan> {
    let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    let machines: Vec<RunFiles> = names.iter().map(|name| RunFiles::new(&run_root.join(name))).collect();
    for files in machines.clone() {
        let sender = sender.clone();
        std::thread::spawn(move || {
            if let Some(id) = left_process(&files) {
                // If that took too long, the receiver is gone.
                let _ = sender.send(killed(&files, id));
            }
        });
    }
    // Also kills processes whose pid file is missing or names another process.
    std::thread::spawn(move || {
        for Process { id, command_line, .. } in examine_processes(&HashSet::new()).processes {
            let is_its = |files: &&RunFiles| {
                let marker = socket_chardev("qmp", &files.monitor_socket());
                command_line.iter().any(|argument| argument == OsStr::new(&marker))
                    && is_in(&files.dir, id.pid)
            };
            if let Some(files) = machines.iter().find(is_its).cloned() {
                let sender = sender.clone();
                std::thread::spawn(move || sender.send(killed(&files, id)));
            }
        }
    });
    let mut orphans: Vec<Orphan> = Vec::new();
    let collecting = async {
        while let Some(orphan) = receiver.recv().await {
            if orphans.iter().all(|other| other.pid != orphan.pid) {
                orphans.push(orphan);
            }
        }
    };
    // Threads that hang in the kernel are left behind.
    let _ = tokio::time::timeout(KILL_TIMEOUT, collecting).await;
    orphans
}

fn killed(files: &RunFiles, id: ProcessId) -> Orphan {
    // After an error the process may still run.
    let ended = id.end(Duration::ZERO).unwrap_or(false);
    Orphan { run_dir: files.dir.clone(), pid: id.pid, ended }
}

fn sweep(run_root: &Path, adopted: &[String]) -> std::io::Result<Vec<Orphan>> {
    let mut orphans = Vec::new();
    let entries = match std::fs::read_dir(run_root) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(orphans),
        other => other?,
    };
    let mut machines = Vec::new();
    for entry in entries {
        let entry = entry?;
        let is_adopted = adopted.iter().any(|name| entry.file_name() == OsStr::new(name));
        if entry.file_type()?.is_dir() && !is_adopted {
            let files = RunFiles::new(&entry.path());
            let line = std::fs::read_to_string(files.pid_file()).ok();
            let named = line.and_then(|line| ProcessId::from_line(&line));
            machines.push((files, named));
        }
    }
    if machines.is_empty() {
        return Ok(orphans);
    }
    let named: HashSet<u32> = machines.iter().filter_map(|(_, named)| named.map(|it| it.pid)).collect();
    let Seen { processes, skipped } = examine_processes(&named);
    for (files, named) in machines {
        let marker = socket_chardev("qmp", &files.monitor_socket());
        let is_ours = |seen: &&Process| {
            let known = seen.is_emulator || named == Some(seen.id);
            let is_marked = || seen.command_line.iter().any(|argument| argument == OsStr::new(&marker));
            known && is_marked() && is_in(&files.dir, seen.id.pid)
        };
        for Process { id, .. } in processes.iter().filter(is_ours) {
            let ended = id.end(GRACE)?;
            tracing::warn!(pid = id.pid, run_dir = %files.dir.display(), ended, "ended a left-over QEMU");
            orphans.push(Orphan { run_dir: files.dir.clone(), pid: id.pid, ended });
        }
        let control = tpm::control_argument(&files);
        let is_tpm = |seen: &&Process| {
            seen.is_emulator && seen.command_line.contains(&control) && is_in(&files.dir, seen.id.pid)
        };
        for Process { id, .. } in processes.iter().filter(is_tpm) {
            if !id.end(GRACE)? {
                orphans.push(Orphan { run_dir: files.dir.clone(), pid: id.pid, ended: false });
            }
        }
        if let Some(stuck) = named.filter(|named| skipped.contains(&named.pid)) {
            // The skipped process may be the machine's QEMU.
            orphans.push(Orphan { run_dir: files.dir.clone(), pid: stuck.pid, ended: false });
            continue;
        }
        remove_orphans(&files)?;
    }
    Ok(orphans)
}

/// A process that may be a machine's.
struct Process {
    id: ProcessId,
    is_emulator: bool,
    command_line: Vec<OsString>,
}

/// The result of examining all processes of the host.
struct Seen<T> {
    processes: Vec<T>,
    /// Processes that could not be examined in time.
    skipped: Vec<u32>,
}

/// Examines the QEMU processes of this host, and the processes that pid files name, once for all machines.
fn examine_processes(named: &HashSet<u32>) -> Seen<Process> {
    let number = |entry: DirEntry| entry.file_name().to_str().and_then(|name| name.parse().ok());
    let pids = std::fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(number).collect();
    let user = rustix::process::geteuid();
    let named = named.clone();
    examine_all(pids, move |pid| {
        // This user can neither have started nor end a process of another user.
        let owner = std::fs::metadata(format!("/proc/{pid}")).ok()?.uid();
        if !user.is_root() && owner != user.as_raw() {
            return None;
        }
        let is_emulator = is_emulator(pid);
        if !is_emulator && !named.contains(&pid) {
            return None;
        }
        let id = ProcessId::of(pid)?;
        Some(Process { id, is_emulator, command_line: id.command_line()? })
    })
}

/// Examines all processes, and skips those that take too long: a process that is stuck in the kernel can block the
/// thread that examines it. That thread is left behind until it is unblocked.
fn examine_all<T: Send + 'static>(
    pids: Vec<u32>,
    look: impl Fn(u32) -> Option<T> + Send + Sync + 'static,
) -> Seen<T> {
    let look = Arc::new(look);
    let mut seen = Seen { processes: Vec::new(), skipped: Vec::new() };
    let mut rest = pids;
    while !rest.is_empty() {
        let (sender, receiver) = mpsc::channel();
        let (looking, there) = (Arc::clone(&look), rest.clone());
        std::thread::spawn(move || there.into_iter().all(|pid| sender.send(looking(pid)).is_ok()));
        let mut done = 0;
        while let Some(&pid) = rest.get(done) {
            done += 1;
            if let Ok(found) = receiver.recv_timeout(EXAMINE_TIMEOUT) {
                seen.processes.extend(found);
                continue;
            }
            tracing::warn!(
                pid,
                "skipped a process that cannot be examined: it seems to be stuck in the kernel"
            );
            seen.skipped.push(pid);
            break;
        }
        rest.drain(..done);
    }
    seen
}

/// Whether the program of a process is a QEMU or a swtpm, so that an editor or a shell whose command line quotes
/// the same path is left alone.
fn is_emulator(pid: u32) -> bool {
    std::fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|program| {
        let is_one = |name: &OsStr| name == "swtpm" || name.as_bytes().starts_with(b"qemu-system-");
        program.file_name().is_some_and(is_one)
    })
}

/// Whether this path leads a process to the same directory as this daemon. In a container, or with other mounts, the
/// same path may belong to another daemon's machine.
fn is_in(dir: &Path, pid: u32) -> bool {
    let Ok(ours) = std::fs::metadata(dir) else { return false };
    let (flags, mode) = (OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let below = dir.strip_prefix("/").unwrap_or(dir);
    // Symbolic links on the path are resolved within the process's root, including absolute ones.
    let theirs = rustix::fs::open(format!("/proc/{pid}/root"), flags, mode)
        .and_then(|root| rustix::fs::openat2(root, below, flags, mode, ResolveFlags::IN_ROOT))
        .and_then(rustix::fs::fstat);
    match theirs {
        Ok(theirs) => (ours.dev(), ours.ino()) == (theirs.st_dev, theirs.st_ino),
        Err(error) => !matches!(error, Errno::NOENT | Errno::NOTDIR),
    }
}

/// The QEMU that an earlier daemon started in this directory and that still runs. `None` if no process certainly
/// belongs to the machine.
pub(crate) fn left_process(files: &RunFiles) -> Option<ProcessId> {
    let line = std::fs::read_to_string(files.pid_file()).ok()?;
    let id = ProcessId::from_line(&line)?;
    let marker = socket_chardev("qmp", &files.monitor_socket());
    let is_marked = id.command_line()?.iter().any(|argument| argument == OsStr::new(&marker));
    (is_marked && is_in(&files.dir, id.pid)).then_some(id)
}

/// Removes the files that are useful only while QEMU runs. Logs stay, to explain what happened.
pub(crate) fn remove_orphans(files: &RunFiles) -> std::io::Result<()> {
    let sockets =
        [files.monitor_socket(), files.agent_socket(), files.console_socket(), files.display_socket()];
    let others = [files.tpm_socket(), files.tpm_pid_file(), files.screen_dump(), files.pid_file()];
    for path in sockets.into_iter().chain(others) {
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    tpm::remove_state(&files.tpm_state())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stuck_process_does_not_prevent_examining_others() {
        let (_held, stuck) = mpsc::channel::<()>();
        let stuck = std::sync::Mutex::new(stuck);
        let seen = examine_all(vec![1, 2, 3, 4], move |pid| {
            if pid == 2 {
                let _ = stuck.lock().unwrap().recv();
            }
            (pid != 4).then_some(pid)
        });
        assert_eq!((seen.processes, seen.skipped), (vec![1, 3], vec![2]));
    }
}
