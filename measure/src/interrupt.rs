//! Ctrl-C and SIGTERM: end the processes that were started here, remove the work directory, exit.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

static STARTED: Mutex<Vec<u32>> = Mutex::new(Vec::new());

/// Exit code of a program that ended on SIGINT, as shells print it.
const INTERRUPTED: i32 = 130;

/// Notes a process that an interrupt ends.
pub fn note_started(pid: u32) {
    lock().push(pid);
}

/// Forgets it once it has been waited for.
pub fn note_ended(pid: u32) {
    lock().retain(|started| *started != pid);
}

fn lock() -> std::sync::MutexGuard<'static, Vec<u32>> {
    STARTED.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The directories of this run's disks and of its sockets, removed at the end.
pub struct WorkDir([PathBuf; 2]);

impl WorkDir {
    /// Creates both, empty. A work directory that this program did not make is refused.
    pub fn create(path: &Path, sockets: &Path) -> Result<Self> {
        const MARK: &str = ".headwater-measure";
        if path.exists() {
            if !path.join(MARK).exists() && std::fs::read_dir(path)?.next().is_some() {
                bail!("the work directory {} is in use by something else; name an empty one", path.display());
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
            eprintln!("\ninterrupted: ending what was started, removing its files");
            for pid in lock().iter() {
                // A process that is gone already is what is wanted.
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
    fn a_directory_of_somebody_else_is_left_alone() {
        let parent = tempfile::tempdir().unwrap();
        std::fs::write(parent.path().join("precious"), "x").unwrap();
        let error = WorkDir::create(parent.path(), &parent.path().join("s")).err().unwrap();
        assert!(error.to_string().contains("in use by something else"), "{error}");
        assert!(parent.path().join("precious").exists());
        let own = parent.path().join("own");
        drop(WorkDir::create(&own, &parent.path().join("s")).unwrap());
        assert!(!own.exists() && !parent.path().join("s").exists());
    }
}
