//! Runs helper programs of a study, and keeps directories with named files. None of them outlives the study.
//!
//! Dropping a value ends its program or removes its directory. [`clean_up_and_exit`] does that for all of them if the
//! program must exit immediately.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rustix::process::{Pid, Signal, kill_process};

/// How many bytes of a program's last output an error quotes.
const LAST_OUTPUT_BYTES: usize = 2000;

/// The interval between two checks of a program.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// How long a program may take to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(3);

/// The same limit if this program exits immediately.
const SHORT_GRACE: Duration = Duration::from_millis(500);

/// The programs and directories that exist.
struct Left {
    processes: Vec<Pid>,
    directories: Vec<PathBuf>,
}

static LEFT: Mutex<Left> = Mutex::new(Left { processes: Vec::new(), directories: Vec::new() });

fn left() -> MutexGuard<'static, Left> {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends all programs, removes all directories, and exits without dropping the values.
pub fn clean_up_and_exit(code: i32) -> ! {
    // The lock is held until the exit, so that no other thread starts a program or creates a directory.
    let left = left();
    for pid in &left.processes {
        let _ = kill_process(*pid, Signal::TERM);
    }
    if !left.processes.is_empty() {
        // fio ends its workers in this time.
        std::thread::sleep(SHORT_GRACE);
    }
    for pid in &left.processes {
        // The program may have ended already.
        let _ = kill_process(*pid, Signal::KILL);
    }
    for directory in &left.directories {
        let _ = std::fs::remove_dir_all(directory);
    }
    std::process::exit(code)
}

/// Whether a program is in PATH.
pub fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// A new directory. Dropping it removes it with its contents.
#[derive(Debug)]
pub struct Directory(tempfile::TempDir);

impl Directory {
    /// Creates it inside another directory.
    pub fn new_in(dir: &Path) -> Result<Self> {
        let made = tempfile::tempdir_in(dir);
        let made = made.with_context(|| format!("cannot create a directory in {}", dir.display()))?;
        left().directories.push(made.path().to_owned());
        Ok(Self(made))
    }

    /// Creates it in the directory for temporary files, because the path of a socket must be short.
    pub fn new() -> Result<Self> {
        Self::new_in(&std::env::temp_dir())
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // Under the lock, so that the directory stays registered until it is removed.
        let mut left = left();
        let _ = std::fs::remove_dir_all(self.0.path());
        left.directories.retain(|directory| directory != self.0.path());
    }
}

/// A running program.
pub struct Started {
    child: Child,
    pid: Pid,
    name: String,
    output: File,
    words: File,
    ended: Option<ExitStatus>,
}

impl Started {
    /// Starts a program. A Ctrl-C in the terminal does not reach it: the study ends it.
    pub fn start(name: &str, command: &mut Command) -> Result<Self> {
        let file = || tempfile::tempfile().context("cannot create a temporary file");
        let (output, words) = (file()?, file()?);
        command.stdin(Stdio::null());
        command.stdout(output.try_clone().context("cannot duplicate a file descriptor")?);
        command.stderr(words.try_clone().context("cannot duplicate a file descriptor")?);
        command.process_group(0);
        // Under the lock, so that every started program is registered.
        let mut left = left();
        let child = command.spawn().with_context(|| format!("cannot run {name}"))?;
        let pid = Pid::from_child(&child);
        left.processes.push(pid);
        Ok(Self { child, pid, name: name.to_owned(), output, words, ended: None })
    }

    /// Its PID.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Sends a signal if the program still runs.
    pub fn signal(&mut self, signal: Signal) {
        if matches!(self.status(), Ok(None)) {
            let _ = kill_process(self.pid, signal);
        }
    }

    fn status(&mut self) -> Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            let mut left = left();
            self.ended = self.child.try_wait().with_context(|| format!("cannot wait for {}", self.name))?;
            if self.ended.is_some() {
                left.processes.retain(|pid| *pid != self.pid);
            }
        }
        Ok(self.ended)
    }

    /// Fails if the program has ended.
    pub fn check(&mut self) -> Result<()> {
        match self.status()? {
            None => Ok(()),
            Some(status) => {
                let words = self.last_output();
                Err(anyhow!("{} ended ({status}): {words}", self.name))
            }
        }
    }

    /// Waits until the program has made something available. `is_there` returns `None` as long as it is not.
    pub fn wait_for<T>(
        &mut self,
        what: &str,
        timeout: Duration,
        mut is_there: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let began = Instant::now();
        loop {
            if let Some(found) = is_there()? {
                return Ok(found);
            }
            self.check()?;
            if began.elapsed() > timeout {
                let words = self.last_output();
                return Err(anyhow!("{} has no {what} after {} s: {words}", self.name, timeout.as_secs()));
            }
            std::thread::sleep(CHECK_INTERVAL);
        }
    }

    /// Waits until the program ends, and returns its output. `None`: `should_stop` returned true, and the program was
    /// ended.
    pub fn output(mut self, should_stop: impl Fn() -> bool) -> Result<Option<String>> {
        loop {
            match self.status()? {
                Some(status) if status.success() => return text_of(&mut self.output).map(Some),
                Some(_) => return self.check().map(|()| None),
                None if should_stop() => return Ok(None),
                None => std::thread::sleep(CHECK_INTERVAL),
            }
        }
    }

    /// Ends the program with SIGTERM, and with SIGKILL after `timeout`.
    pub fn stop(mut self, timeout: Duration) {
        self.signal(Signal::TERM);
        let began = Instant::now();
        while began.elapsed() < timeout && matches!(self.status(), Ok(None)) {
            std::thread::sleep(CHECK_INTERVAL);
        }
    }

    fn last_output(&mut self) -> String {
        let words = text_of(&mut self.words).unwrap_or_default();
        let words = words.trim();
        let begin = words.len().saturating_sub(LAST_OUTPUT_BYTES);
        let begin = (begin..words.len()).find(|begin| words.is_char_boundary(*begin)).unwrap_or(0);
        if words.is_empty() { "it printed nothing".into() } else { words[begin..].to_owned() }
    }
}

fn text_of(file: &mut File) -> Result<String> {
    let mut bytes = Vec::new();
    file.rewind()
        .and_then(|()| file.read_to_end(&mut bytes))
        .context("cannot read the output of a program")?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl Drop for Started {
    fn drop(&mut self) {
        if self.ended.is_some() {
            return;
        }
        // fio ends its workers only on SIGTERM.
        let _ = kill_process(self.pid, Signal::TERM);
        let begun = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && begun.elapsed() < GRACE {
            std::thread::sleep(CHECK_INTERVAL);
        }
        let mut left = left();
        let _ = self.child.kill();
        let _ = self.child.wait();
        left.processes.retain(|pid| *pid != self.pid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Started {
        Started::start("the shell", Command::new("sh").args(["-c", script])).unwrap()
    }

    fn is_running(pid: Pid) -> bool {
        rustix::process::test_kill_process(pid).is_ok()
    }

    #[test]
    fn a_dropped_program_and_its_directory_are_gone() {
        let started = shell("sleep 1000");
        let pid = started.pid();
        assert!(is_running(pid));
        drop(started);
        assert!(!is_running(pid));
        let directory = Directory::new().unwrap();
        let path = directory.path().to_owned();
        std::fs::write(path.join("file"), "x").unwrap();
        drop(directory);
        assert!(!path.exists());
        let left = left();
        assert!(!left.processes.contains(&pid) && !left.directories.contains(&path));
    }

    #[test]
    fn a_program_that_fails_is_quoted() {
        assert_eq!(shell("echo fine").output(|| false).unwrap().as_deref(), Some("fine\n"));
        let error = shell("echo no such disk >&2; exit 3").output(|| false).unwrap_err().to_string();
        assert!(error.contains("the shell ended") && error.ends_with("no such disk"), "{error}");
        assert!(shell("sleep 1000").output(|| true).unwrap().is_none());
        let mut silent = shell("exit 4");
        let waited = silent.wait_for("socket", Duration::from_secs(60), || Ok(None::<()>));
        assert!(waited.unwrap_err().to_string().ends_with("it printed nothing"));
    }
}
