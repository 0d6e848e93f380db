//! Handles Ctrl-C and SIGTERM: ends the processes that this program started, removes the work directory, and exits.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

static STARTED: Mutex<Vec<u32>> = Mutex::new(Vec::new());

/// Exit code of shells for a program that was ended by SIGINT. Used for SIGTERM, too.
const INTERRUPTED: i32 = 130;

/// Registers a process that an interrupt must end.
pub fn register(pid: u32) {
    lock().push(pid);
}

/// Unregisters a process after it was waited for.
pub fn unregister(pid: u32) {
    lock().retain(|started| *started != pid);
}

fn lock() -> std::sync::MutexGuard<'static, Vec<u32>> {
    STARTED.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The directories of this run for disks and for sockets. Dropping this removes them.
pub struct WorkDir([PathBuf; 2]);

impl WorkDir {
    /// Creates both directories, empty, and installs the signal handler. Deletes the work directory of an earlier
    /// run. Fails if the work directory has other files, or if the directory for sockets exists.
    pub fn create(path: &Path, sockets: &Path) -> Result<Self> {
        const MARK: &str = ".headwater-measure";
        if path.exists() {
            if !path.join(MARK).exists() && std::fs::read_dir(path)?.next().is_some() {
                bail!(
                    "the work directory {} contains files of another program; choose another directory, or an empty one",
                    path.display()
                );
            }
            std::fs::remove_dir_all(path).with_context(|| format!("cannot empty {}", path.display()))?;
        }
        std::fs::create_dir_all(path)
            .and_then(|()| std::fs::write(path.join(MARK), ""))
            .with_context(|| format!("cannot create the work directory {}", path.display()))?;
        std::fs::create_dir(sockets)
            .with_context(|| format!("cannot create the directory for sockets, {}", sockets.display()))?;
        let folders = [path.to_owned(), sockets.to_owned()];
        clean_up_on_signals(folders.clone())?;
        Ok(Self(folders))
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        for folder in &self.0 {
            if let Err(error) = std::fs::remove_dir_all(folder) {
                eprintln!("cannot remove {}: {error}", folder.display());
            }
        }
    }
}

fn clean_up_on_signals(folders: [PathBuf; 2]) -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    let runtime = runtime.context("cannot listen for signals")?;
    std::thread::spawn(move || {
        runtime.block_on(async {
            let (Ok(mut interrupt), Ok(mut terminate)) =
                (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
            else {
                return;
            };
            tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
            eprintln!("\ninterrupted: ending the programs that were started, and removing their files");
            for pid in lock().iter() {
                // The process may have ended already.
                let _ = i32::try_from(*pid)
                    .ok()
                    .and_then(Pid::from_raw)
                    .map(|pid| kill_process(pid, Signal::KILL));
            }
            for folder in &folders {
                let _ = std::fs::remove_dir_all(folder);
            }
            std::process::exit(INTERRUPTED);
        });
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_foreign_directory_is_not_removed() {
        let parent = tempfile::tempdir().unwrap();
        std::fs::write(parent.path().join("precious"), "x").unwrap();
        let error = WorkDir::create(parent.path(), &parent.path().join("s")).err().unwrap();
        assert!(error.to_string().contains("contains files of another program"), "{error}");
        assert!(parent.path().join("precious").exists());
        let own = parent.path().join("own");
        drop(WorkDir::create(&own, &parent.path().join("s")).unwrap());
        assert!(!own.exists() && !parent.path().join("s").exists());
    }
}
