//! Launching QEMU so that it ends with the daemon, however the daemon ends.
//!
//! A machine whose daemon is gone has no disk any more, so it must not go on. The kernel ends a process together
//! with its parent when it was asked to (`PR_SET_PDEATHSIG`), with two catches:
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
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

use tokio::process::{Child, Command};
use tokio::runtime::Handle;
use tokio::sync::{OnceCell, oneshot};

use crate::binary;

/// Asks the kernel to end this process with its parent, and becomes another program.
const WRAPPER: &str = "setpriv";

/// What it is told.
const ARGUMENTS: [&str; 2] = ["--pdeathsig", "KILL"];

struct Job {
    command: Command,
    /// Where the child is waited for.
    runtime: Handle,
    answer: oneshot::Sender<std::io::Result<Child>>,
}

/// The command that runs QEMU and ends it with this process, where the host can do that.
pub(crate) async fn command(qemu: &Path) -> Command {
    static WRAPPER_PATH: OnceCell<Option<PathBuf>> = OnceCell::const_new();
    match WRAPPER_PATH.get_or_init(|| wrapper(qemu)).await {
        Some(wrapper) => wrapped(wrapper, qemu),
        None => Command::new(qemu),
    }
}

fn wrapped(wrapper: &Path, qemu: &Path) -> Command {
    let mut command = Command::new(wrapper);
    command.args(ARGUMENTS).arg(qemu);
    command
}

/// The wrapper, found out by using it: there are others of its name that cannot do this.
async fn wrapper(qemu: &Path) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let reason = match find_and_try(qemu, &path).await {
        Ok(wrapper) => return Some(wrapper),
        Err(reason) => reason,
    };
    tracing::warn!(reason, "machines would outlive a daemon that is killed, until it starts again");
    None
}

async fn find_and_try(qemu: &Path, path: &OsStr) -> Result<PathBuf, String> {
    let wrapper = binary::find_in(WRAPPER, path)
        .map_err(|_| format!("{WRAPPER} is not installed; on Debian: apt-get install util-linux"))?;
    let mut trial = wrapped(&wrapper, qemu);
    trial.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let describe = |what: String| format!("{} does not run QEMU: {what}", wrapper.display());
    match trial.status().await {
        Ok(status) if status.success() => Ok(wrapper),
        Ok(status) => Err(describe(status.to_string())),
        Err(error) => Err(describe(error.to_string())),
    }
}

/// Starts a process from the thread that lives as long as this process.
pub(crate) async fn spawn(command: Command) -> std::io::Result<Child> {
    static THREAD: OnceLock<Result<Sender<Job>, std::io::ErrorKind>> = OnceLock::new();
    let (answer, outcome) = oneshot::channel();
    let job = Job { command, runtime: Handle::current(), answer };
    let thread = THREAD.get_or_init(|| start_thread().map_err(|error| error.kind()));
    let thread = thread.as_ref().map_err(|kind| std::io::Error::from(*kind))?;
    let ended = || std::io::Error::other("the thread that starts processes has ended");
    thread.send(job).map_err(|_| ended())?;
    outcome.await.map_err(|_| ended())?
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
    use super::*;

    /// The signal that a process gets with its parent's end: `setpriv --dump` of the wrapped program tells.
    #[tokio::test]
    async fn the_wrapped_program_dies_with_its_parent() {
        let setpriv =
            binary::find_in(WRAPPER, OsStr::new("/usr/bin:/bin")).expect("apt-get install util-linux");
        let output = wrapped(&setpriv, &setpriv).arg("--dump").output().await.unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("Parent death signal: KILL"), "{text}");
    }

    #[tokio::test]
    async fn a_wrapper_that_cannot_do_it_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let missing = find_and_try(Path::new("/bin/true"), dir.path().as_os_str()).await.unwrap_err();
        assert!(missing.contains("apt-get install util-linux"), "{missing}");
        let other = dir.path().join(WRAPPER);
        std::os::unix::fs::symlink("/bin/false", &other).unwrap();
        let useless = find_and_try(Path::new("/bin/true"), dir.path().as_os_str()).await.unwrap_err();
        assert!(useless.contains("exit status: 1"), "{useless}");
    }

    #[tokio::test]
    async fn what_cannot_be_started_is_an_error() {
        let error = spawn(Command::new("/nowhere/qemu")).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    }
}
