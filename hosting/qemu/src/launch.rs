//! Launching QEMU, and tying it to this process if its disk ends with this process.
//!
//! A machine whose disk is gone must not continue. On request the kernel ends a process together with its parent
//! (`PR_SET_PDEATHSIG`), with two restrictions:
//!
//! - The child itself must make the request. `setpriv` (util-linux) does that and then becomes QEMU, under the same
//!   process number. Code of ours between `fork` and `exec` could do it too, but would take `vfork` away from the
//!   standard library: forking a daemon with gigabytes of write cache copies its page tables, and makes every
//!   write into the cache a page fault until the child has become QEMU.
//! - "Parent" means the thread, not the process. So one thread launches all machines, and lives as long as the
//!   process; a thread of a runtime's pool may end while its machine should go on.
//!
//! If the host has no such `setpriv`, or the daemon dies before the request, QEMU is left behind, and
//! [`crate::sweep_orphans`] finds it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};

use tokio::process::{Child, Command};
use tokio::runtime::Handle;
use tokio::sync::{OnceCell, oneshot};

use crate::binary;

/// The program that asks the kernel to kill it together with its parent, and then executes another program.
const WRAPPER: &str = "setpriv";

/// Its arguments in front of the other program.
const ARGUMENTS: [&str; 2] = ["--pdeathsig", "KILL"];

/// Prefixes of the daemon's own environment variables: keys of buckets, passwords, settings.
const OWN_VARIABLES: [&str; 4] = ["AWS_", "CREDENTIALS_DIRECTORY", "HEADWATER_", "PG"];

struct Job {
    command: Command,
    /// The runtime that waits for the child.
    runtime: Handle,
    answer: oneshot::Sender<std::io::Result<Child>>,
}

/// When a virtual machine ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lifetime {
    /// With this process, if the host can do that: the disk is served from here.
    #[default]
    WithParent,
    /// When it is stopped, or ends by itself: the disk is served by another process.
    Own,
}

/// The command that runs QEMU for this lifetime.
pub(crate) async fn command(qemu: &Path, lifetime: Lifetime) -> Command {
    if lifetime == Lifetime::Own {
        return program(qemu);
    }
    static WRAPPER_PATH: OnceCell<Option<PathBuf>> = OnceCell::const_new();
    let path = std::env::var_os("PATH").unwrap_or_default();
    match wrapper(&WRAPPER_PATH, qemu, &path).await {
        Some(wrapper) => wrapped(&wrapper, qemu),
        None => program(qemu),
    }
}

/// A command whose environment lacks the daemon's own variables.
pub(crate) fn program(path: &Path) -> Command {
    let mut command = Command::new(path);
    without_own_variables(command.as_std_mut());
    command
}

/// Removes the daemon's own variables from a program's environment, because a guest that takes over its QEMU can read
/// them.
pub fn without_own_variables(command: &mut std::process::Command) {
    for (name, _) in std::env::vars_os() {
        if OWN_VARIABLES.iter().any(|own| name.as_encoded_bytes().starts_with(own.as_bytes())) {
            command.env_remove(name);
        }
    }
}

fn wrapped(wrapper: &Path, qemu: &Path) -> Command {
    let mut command = program(wrapper);
    command.args(ARGUMENTS).arg(qemu);
    command
}

/// Why there is no wrapper.
#[derive(Debug)]
enum Unusable {
    /// A later attempt would fail too.
    ForGood(String),
    /// The trial failed for a passing reason, for instance a limit on processes or files.
    Now(String),
}

/// The wrapper, if the host has one. The result is cached, except after a passing failure.
async fn wrapper(known: &OnceCell<Option<PathBuf>>, qemu: &Path, path: &OsStr) -> Option<PathBuf> {
    let trial = || async {
        match find_and_try(qemu, path).await {
            Ok(wrapper) => Ok(Some(wrapper)),
            Err(Unusable::ForGood(reason)) => {
                tracing::warn!(
                    reason,
                    "if the daemon is killed, its machines keep running until it starts again"
                );
                Ok(None)
            }
            Err(Unusable::Now(reason)) => Err(reason),
        }
    };
    match known.get_or_try_init(trial).await {
        Ok(wrapper) => wrapper.clone(),
        Err(reason) => {
            tracing::warn!(
                reason,
                "if the daemon is killed, this machine keeps running until it starts again"
            );
            None
        }
    }
}

/// Finds the wrapper and runs it once, because other programs of this name lack the option.
async fn find_and_try(qemu: &Path, path: &OsStr) -> Result<PathBuf, Unusable> {
    let wrapper = binary::find_in(WRAPPER, "util-linux", path).map_err(|_| {
        Unusable::ForGood(format!("{WRAPPER} is not installed; on Debian: apt-get install util-linux"))
    })?;
    let mut trial = wrapped(&wrapper, qemu);
    trial.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let describe = |what: String| format!("{} does not run QEMU: {what}", wrapper.display());
    match trial.status().await {
        Ok(status) if status.success() => Ok(wrapper),
        Ok(status) if status.code().is_some() => Err(Unusable::ForGood(describe(status.to_string()))),
        // Another process ended it with a signal.
        Ok(status) => Err(Unusable::Now(describe(status.to_string()))),
        Err(error) => Err(Unusable::Now(describe(error.to_string()))),
    }
}

/// Starts a process from the thread that lives as long as this process.
pub(crate) async fn spawn(command: Command) -> std::io::Result<Child> {
    static THREAD: Mutex<Option<Sender<Job>>> = Mutex::new(None);
    let (answer, outcome) = oneshot::channel();
    let job = Job { command, runtime: Handle::current(), answer };
    let thread = cached(&THREAD, start_thread)?;
    let ended = || std::io::Error::other("the thread that starts processes has ended");
    thread.send(job).map_err(|_| ended())?;
    outcome.await.map_err(|_| ended())?
}

/// Returns a cached value, or makes and caches it. If making it fails, the next caller tries again.
fn cached<T: Clone>(
    made: &Mutex<Option<T>>,
    make: impl FnOnce() -> std::io::Result<T>,
) -> std::io::Result<T> {
    let mut made = made.lock().unwrap_or_else(PoisonError::into_inner);
    match &*made {
        Some(made) => Ok(made.clone()),
        None => Ok(made.insert(make()?).clone()),
    }
}

fn start_thread() -> std::io::Result<Sender<Job>> {
    let (sender, jobs) = channel::<Job>();
    std::thread::Builder::new().name("hw-launch".into()).spawn(move || {
        for mut job in jobs {
            let _entered = job.runtime.enter();
            // If the caller has gone, dropping the child ends it.
            let _ = job.answer.send(job.command.spawn());
        }
    })?;
    Ok(sender)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// `setpriv --dump`, as the wrapped program, prints the signal that it gets at its parent's end.
    #[tokio::test]
    async fn the_wrapped_program_dies_with_its_parent() {
        let setpriv = binary::find_in(WRAPPER, "util-linux", OsStr::new("/usr/bin:/bin"))
            .expect("apt-get install util-linux");
        let output = wrapped(&setpriv, &setpriv).arg("--dump").output().await.unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("Parent death signal: KILL"), "{text}");
    }

    #[tokio::test]
    async fn a_wrapper_without_the_option_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().as_os_str();
        let missing = find_and_try(Path::new("/bin/true"), path).await.unwrap_err();
        assert!(
            matches!(&missing, Unusable::ForGood(why) if why.contains("apt-get install util-linux")),
            "{missing:?}"
        );
        let other = dir.path().join(WRAPPER);
        std::os::unix::fs::symlink("/bin/false", &other).unwrap();
        let useless = find_and_try(Path::new("/bin/true"), path).await.unwrap_err();
        assert!(matches!(&useless, Unusable::ForGood(why) if why.contains("exit status: 1")), "{useless:?}");
    }

    #[tokio::test]
    async fn a_wrapper_that_could_not_be_tried_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let (path, file) = (dir.path().as_os_str(), dir.path().join(WRAPPER));
        let known = OnceCell::new();
        let wrapper = async || wrapper(&known, Path::new("/bin/true"), path).await;
        // The kernel cannot execute the file.
        std::fs::write(&file, "\0").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(wrapper().await, None);
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/bin/true", &file).unwrap();
        assert_eq!(wrapper().await, Some(file.clone()));
        // That result is cached.
        std::fs::remove_file(&file).unwrap();
        assert_eq!(wrapper().await, Some(file));
    }

    #[test]
    fn the_next_caller_makes_a_value_that_failed_before() {
        let made = Mutex::new(None);
        let error = cached(&made, || Err::<u8, _>(std::io::ErrorKind::WouldBlock.into())).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
        assert_eq!(cached(&made, || Ok(1)).unwrap(), 1);
        assert_eq!(cached(&made, || Ok(2)).unwrap(), 1);
    }

    #[tokio::test]
    async fn a_program_that_cannot_start_is_an_error() {
        let error = spawn(Command::new("/nowhere/qemu")).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    }
}
