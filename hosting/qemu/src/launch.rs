//! Launching QEMU, and tying it to this process if its disk ends with this process.
//!
//! A machine whose disk is gone must not go on. The kernel ends a process together with its parent when it was asked to
//! (`PR_SET_PDEATHSIG`), with two catches:
//!
//! - It must be asked by the child itself. `setpriv` (util-linux) does that and then becomes QEMU, under the same
//!   process number. Code of ours between `fork` and `exec` could do it too, but would take `vfork` away from the
//!   standard library: forking a daemon with gigabytes of write cache copies its page tables, and makes every
//!   write into the cache a page fault until the child has become QEMU.
//! - "Parent" means the thread, not the process. So one thread launches all machines, and lives as long as the
//!   process; a thread of a runtime's pool may end while its machine should go on.
//!
//! Where there is no such `setpriv`, or the daemon dies in the moment before it has asked, QEMU is left behind, and
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

/// Asks the kernel to end this process with its parent, and becomes another program.
const WRAPPER: &str = "setpriv";

/// What it is told.
const ARGUMENTS: [&str; 2] = ["--pdeathsig", "KILL"];

/// What the names of variables begin with that are for the daemon: keys of buckets, passwords, settings.
const OWN_VARIABLES: [&str; 2] = ["AWS_", "HEADWATER_"];

struct Job {
    command: Command,
    /// Where the child is waited for.
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

/// A program of others.
pub(crate) fn program(path: &Path) -> Command {
    let mut command = Command::new(path);
    without_own_variables(command.as_std_mut());
    command
}

/// Keeps from a program what of the environment is for this one: a guest that takes over its QEMU has what that has.
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
    /// It will not be there later either.
    ForGood(String),
    /// It could not be tried, as where the host has no process or file left for it.
    Now(String),
}

/// The wrapper. What it is, is remembered; that it could not be tried is not.
async fn wrapper(known: &OnceCell<Option<PathBuf>>, qemu: &Path, path: &OsStr) -> Option<PathBuf> {
    let trial = || async {
        match find_and_try(qemu, path).await {
            Ok(wrapper) => Ok(Some(wrapper)),
            Err(Unusable::ForGood(reason)) => {
                tracing::warn!(
                    reason,
                    "machines would outlive a daemon that is killed, until it starts again"
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
                "this machine would outlive a daemon that is killed, until it starts again"
            );
            None
        }
    }
}

/// Found out by using it: there are others of its name that cannot do this.
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
        // Somebody else ended it.
        Ok(status) => Err(Unusable::Now(describe(status.to_string()))),
        Err(error) => Err(Unusable::Now(describe(error.to_string()))),
    }
}

/// Starts a process from the thread that lives as long as this process.
pub(crate) async fn spawn(command: Command) -> std::io::Result<Child> {
    static THREAD: Mutex<Option<Sender<Job>>> = Mutex::new(None);
    let (answer, outcome) = oneshot::channel();
    let job = Job { command, runtime: Handle::current(), answer };
    let thread = kept(&THREAD, start_thread)?;
    let ended = || std::io::Error::other("the thread that starts processes has ended");
    thread.send(job).map_err(|_| ended())?;
    outcome.await.map_err(|_| ended())?
}

/// What is made once. Where that fails, the next caller tries again.
fn kept<T: Clone>(made: &Mutex<Option<T>>, make: impl FnOnce() -> std::io::Result<T>) -> std::io::Result<T> {
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
            // A caller that has gone takes the child with it.
            let _ = job.answer.send(job.command.spawn());
        }
    })?;
    Ok(sender)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// The signal that a process gets with its parent's end: `setpriv --dump` of the wrapped program tells.
    #[tokio::test]
    async fn the_wrapped_program_dies_with_its_parent() {
        let setpriv = binary::find_in(WRAPPER, "util-linux", OsStr::new("/usr/bin:/bin"))
            .expect("apt-get install util-linux");
        let output = wrapped(&setpriv, &setpriv).arg("--dump").output().await.unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("Parent death signal: KILL"), "{text}");
    }

    #[tokio::test]
    async fn a_wrapper_that_cannot_do_it_is_not_used() {
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
        // The kernel does not get as far as running it.
        std::fs::write(&file, "\0").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(wrapper().await, None);
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/bin/true", &file).unwrap();
        assert_eq!(wrapper().await, Some(file.clone()));
        // That is remembered.
        std::fs::remove_file(&file).unwrap();
        assert_eq!(wrapper().await, Some(file));
    }

    #[test]
    fn what_could_not_be_made_is_made_by_the_next() {
        let made = Mutex::new(None);
        let error = kept(&made, || Err::<u8, _>(std::io::ErrorKind::WouldBlock.into())).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
        assert_eq!(kept(&made, || Ok(1)).unwrap(), 1);
        assert_eq!(kept(&made, || Ok(2)).unwrap(), 1);
    }

    #[tokio::test]
    async fn what_cannot_be_started_is_an_error() {
        let error = spawn(Command::new("/nowhere/qemu")).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    }
}
