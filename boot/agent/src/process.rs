//! Prepares the agent's process to serve a root disk: its name, locked memory, working directory, and the clock.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::configure_io_flusher_behavior;
use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};

/// systemd does not kill a process of root whose first argument begins with `@` (systemd.io/ROOT_STORAGE_DAEMONS).
const NAME: &str = "@headwater-agent";
/// The clock is set if it is wrong by more than this.
const CLOCK_MAY_BE_OFF: Duration = Duration::from_secs(600);

/// Executes the agent again under the name that systemd spares, unless it already has that name.
pub(crate) fn rename_self() -> io::Result<()> {
    if std::env::args().next().is_some_and(|name| name.starts_with('@')) {
        return Ok(());
    }
    Err(Command::new("/proc/self/exe").arg0(NAME).exec())
}

/// Tells the kernel to keep the process in memory. A failure is only logged: it is normal if a developer runs the
/// agent by hand.
pub(crate) fn protect() {
    let refused = |what: &str, why: &dyn std::fmt::Display| {
        tracing::warn!("the agent is less safe than it should be: {what}: {why}");
    };
    if let Err(why) = fs::write("/proc/self/oom_score_adj", "-1000") {
        refused("the kernel may kill the agent if memory is short", &why);
    }
    // Before any thread starts, because threads inherit the setting: a process that serves a disk must not wait for
    // writes to that disk when it allocates memory.
    if let Err(why) = configure_io_flusher_behavior(true) {
        refused("the agent may wait for its own disk if memory is short", &why);
    }
    // `ONFAULT` locks only pages that are in use: the write cache grows as it fills.
    if let Err(why) = mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT) {
        refused("the memory of the agent may be swapped out", &why);
    }
}

/// Moves the settings to a directory that outlives the initramfs, and makes it the working directory.
pub(crate) fn take_files(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    fs::set_permissions(to, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        fs::copy(entry.path(), to.join(entry.file_name()))?;
        fs::remove_file(entry.path())?;
    }
    std::env::set_current_dir(to)
}

/// Sets the clock if it is far off: with a wrong clock, the certificates of the image servers could not be verified.
pub(crate) fn set_clock(now_ms: u64) {
    let now_s = clock_gettime(ClockId::Realtime).tv_sec;
    let server_s = i64::try_from(now_ms / 1000).unwrap_or(now_s);
    if now_s.abs_diff(server_s) <= CLOCK_MAY_BE_OFF.as_secs() {
        return;
    }
    match clock_settime(ClockId::Realtime, Timespec { tv_sec: server_s, tv_nsec: 0 }) {
        Ok(()) => tracing::warn!(
            "the clock was wrong by {} s; it was set to the boot server's time",
            now_s.abs_diff(server_s)
        ),
        Err(why) => {
            tracing::warn!("the clock is wrong by {} s and cannot be set: {why}", now_s.abs_diff(server_s))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn settings_are_moved_to_where_only_root_reads_them() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("run/headwater"));
        fs::create_dir(&from).unwrap();
        fs::write(from.join("token"), "secret").unwrap();
        take_files(&from, &to).unwrap();
        assert_eq!(fs::read_to_string("token").unwrap(), "secret");
        assert!(!from.join("token").exists());
        assert_eq!(fs::metadata(&to).unwrap().permissions().mode() & 0o777, 0o700);
    }
}
