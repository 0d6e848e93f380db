//! The TPM 2.0 of a machine: one swtpm process for each run.
//!
//! ```text
//!   guest -- tpm-crb -- QEMU -- tpm.sock -- swtpm -- a directory with its state
//! ```
//! swtpm takes one connection and ends when that closes, so it ends with its QEMU, however that ends and whoever
//! watches. A swtpm that QEMU never reached is left behind, and [`crate::sweep_orphans`] ends it.

use std::ffi::OsString;
use std::fs::{DirBuilder, File};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Child;
use tokio::time::Instant;

use crate::binary;
use crate::error::{Error, Result};
use crate::launch::{self, Lifetime};
use crate::process::{ProcessId, Watched};
use crate::spec::RunFiles;
use crate::supervise;

/// The emulator of a TPM.
const SWTPM: &str = "swtpm";

/// The packages that have it, by distribution.
const PACKAGES: &str = "Debian and Ubuntu: 'apt-get install swtpm', Fedora, Arch and openSUSE: package swtpm";

/// How long swtpm may take to open its socket. Generous for hosts under load.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Pause between two checks whether the socket is open.
const CHECK_PAUSE: Duration = Duration::from_millis(5);

/// How long swtpm may take to end after QEMU.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// The error if this host cannot give a machine a TPM.
pub fn check() -> Result<()> {
    find().map(drop)
}

fn find() -> Result<PathBuf> {
    binary::find_in(SWTPM, PACKAGES, &std::env::var_os("PATH").unwrap_or_default())
}

/// Starts the TPM of a machine, and returns when it takes a connection. `state` is its directory. The state of a TPM
/// that ends with its run ([`RunFiles::tpm_state`]) is new.
pub(crate) async fn start(
    machine: &str,
    files: &RunFiles,
    state: &Path,
    lifetime: Lifetime,
) -> Result<Watched> {
    let swtpm = find()?;
    if state == files.tpm_state() {
        remove_state(state).map_err(Error::io("remove the earlier state of the TPM", state))?;
    }
    // Its keys are the guest's secrets.
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(state)
        .map_err(Error::io("create the directory of the TPM", state))?;
    let log_path = files.tpm_log();
    let open = Error::io("open the log", &log_path);
    let log = File::options().write(true).create(true).truncate(true).mode(0o600).open(&log_path);
    let log = log.map_err(open)?;
    let stdout = log.try_clone().map_err(Error::io("open the log", &log_path))?;
    let mut command = launch::command(&swtpm, lifetime).await;
    command
        .args(arguments(files, state))
        .stdin(Stdio::null())
        .stdout(stdout)
        .stderr(log)
        .process_group(0)
        .kill_on_drop(lifetime == Lifetime::WithParent);
    let mut child = launch::spawn(command).await.map_err(Error::io("run", &swtpm))?;
    let ready = until_ready(machine, files, &mut child).await;
    if ready.is_err() {
        // A child that has ended already gives an error that says nothing new.
        let _ = child.kill().await;
    }
    ready.map(|()| Watched::Child(child))
}

async fn until_ready(machine: &str, files: &RunFiles, child: &mut Child) -> Result<()> {
    if let Some(process) = child.id().and_then(ProcessId::of) {
        let pid_file = files.tpm_pid_file();
        std::fs::write(&pid_file, process.to_line()).map_err(Error::io("write the pid file", &pid_file))?;
    }
    let deadline = Instant::now() + START_TIMEOUT;
    while !files.tpm_socket().exists() {
        let ended = child.try_wait().map_err(Error::io("wait for the TPM of", &files.dir))?;
        if ended.is_none() && Instant::now() < deadline {
            tokio::time::sleep(CHECK_PAUSE).await;
            continue;
        }
        let status = ended
            .map_or_else(|| format!("no socket within {} s", START_TIMEOUT.as_secs()), |it| it.to_string());
        return Err(Error::TpmFailed { machine: machine.to_owned(), status, output: last_output(files) });
    }
    Ok(())
}

/// The last lines of swtpm's log.
pub(crate) fn last_output(files: &RunFiles) -> String {
    supervise::last_lines(&files.tpm_log()).join("; ")
}

fn arguments(files: &RunFiles, state: &Path) -> Vec<OsString> {
    // swtpm has no escape for a comma, see `GuestSpec::check`.
    let mut dir = OsString::from("dir=");
    dir.push(state);
    dir.push(",mode=0600");
    let words = ["socket", "--tpm2", "--terminate", "--tpmstate"].map(OsString::from);
    words.into_iter().chain([dir, "--ctrl".into(), control_argument(files)]).collect()
}

/// The argument that names the socket. An orphan is recognised by it, see [`crate::orphan`].
pub(crate) fn control_argument(files: &RunFiles) -> OsString {
    let mut control = OsString::from("type=unixio,path=");
    control.push(files.tpm_socket());
    control.push(",mode=0600");
    control
}

/// The swtpm of a machine that an earlier process started. `None` if it has ended.
pub(crate) fn left(files: &RunFiles) -> Option<Watched> {
    let line = std::fs::read_to_string(files.tpm_pid_file()).ok()?;
    let process = ProcessId::from_line(&line)?;
    let control = control_argument(files);
    let is_marked = process.command_line()?.contains(&control);
    if is_marked { Watched::adopt(process).ok().flatten() } else { None }
}

/// Waits for the end of a TPM whose QEMU has ended, and kills it after a timeout: the next run needs its state.
pub(crate) async fn end(machine: &str, mut tpm: Watched) {
    if tokio::time::timeout(END_TIMEOUT, tpm.wait()).await.is_ok() {
        return;
    }
    tracing::warn!(machine, "the TPM did not end with QEMU, so it is killed");
    if let Err(error) = tpm.kill() {
        tracing::warn!(machine, %error, "the TPM cannot be killed");
    } else {
        tpm.wait().await;
    }
}

/// Removes the state of a TPM.
pub(crate) fn remove_state(state: &Path) -> std::io::Result<()> {
    match std::fs::remove_dir_all(state) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_swtpm_gets_the_name_of_the_package() {
        let dir = tempfile::tempdir().unwrap();
        let error = binary::find_in(SWTPM, PACKAGES, dir.path().as_os_str()).unwrap_err().to_string();
        assert!(
            error.contains("'swtpm' is not installed") && error.contains("apt-get install swtpm"),
            "{error}"
        );
    }
}
