//! Programs that a study starts, and directories with named files: neither outlives the study.
//!
//! Each is ended or removed when it is dropped. [`clean_up_and_exit`] does that for all of them when the program ends at once.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rustix::process::{Pid, Signal, kill_process};

/// How much of a program's last words an error shows.
const LAST_WORDS_BYTES: usize = 2000;

/// From one look at a program to the next.
const LOOK: Duration = Duration::from_millis(20);

/// How long a program may take to end when it is told to.
const GRACE: Duration = Duration::from_secs(3);

/// The same if this program ends at once.
const SHORT_GRACE: Duration = Duration::from_millis(500);

/// What has to go if the program ends at once.
struct Left {
    processes: Vec<Pid>,
    directories: Vec<PathBuf>,
}

static LEFT: Mutex<Left> = Mutex::new(Left { processes: Vec::new(), directories: Vec::new() });

fn left() -> MutexGuard<'static, Left> {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends all programs, removes all directories, and ends this program without dropping them.
pub fn clean_up_and_exit(code: i32) -> ! {
    // Locked to the end, so that no other thread starts a program or makes a directory.
    let left = left();
    for pid in &left.processes {
        let _ = kill_process(*pid, Signal::TERM);
    }
    if !left.processes.is_empty() {
        // fio ends its workers meanwhile.
        std::thread::sleep(SHORT_GRACE);
    }
    for pid in &left.processes {
        // A program that has ended by itself is what is wanted.
        let _ = kill_process(*pid, Signal::KILL);
    }
    for directory in &left.directories {
        let _ = std::fs::remove_dir_all(directory);
    }
    std::process::exit(code)
}

/// Whether a program can be run.
pub fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// A new directory, removed with all that is in it when this is dropped.
#[derive(Debug)]
pub struct Directory(tempfile::TempDir);

impl Directory {
    /// Makes it in another directory.
    pub fn new_in(dir: &Path) -> Result<Self> {
        let made = tempfile::tempdir_in(dir);
        let made = made.with_context(|| format!("cannot make a directory in {}", dir.display()))?;
        left().directories.push(made.path().to_owned());
        Ok(Self(made))
    }

    /// Makes it where temporary files are: a socket's path has to be short.
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
        // Under the lock, so that the directory is not forgotten while it is still there.
        let mut left = left();
        let _ = std::fs::remove_dir_all(self.0.path());
        left.directories.retain(|directory| directory != self.0.path());
    }
}

/// A program that runs.
pub struct Started {
    child: Child,
    pid: Pid,
    name: String,
    output: File,
    words: File,
    ended: Option<ExitStatus>,
}

impl Started {
    /// Starts it. A Ctrl-C in the terminal does not reach it: the study ends it in its own time.
    pub fn start(name: &str, command: &mut Command) -> Result<Self> {
        let file = || tempfile::tempfile().context("cannot make a temporary file");
        let (output, words) = (file()?, file()?);
        command.stdin(Stdio::null());
        command.stdout(output.try_clone().context("cannot share a file")?);
        command.stderr(words.try_clone().context("cannot share a file")?);
        command.process_group(0);
        // Under the lock: a program that is started is also noted.
        let mut left = left();
        let child = command.spawn().with_context(|| format!("cannot run {name}"))?;
        let pid = Pid::from_child(&child);
        left.processes.push(pid);
        Ok(Self { child, pid, name: name.to_owned(), output, words, ended: None })
    }

    /// Its process number.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Sends a signal, if it still runs.
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

    /// Fails if it has ended.
    pub fn check(&mut self) -> Result<()> {
        match self.status()? {
            None => Ok(()),
            Some(status) => {
                let words = self.last_words();
                Err(anyhow!("{} ended ({status}): {words}", self.name))
            }
        }
    }

    /// Waits until something is there that the program makes. `None` from `is_there`: not yet.
    pub fn wait_for<T>(
        &mut self,
        what: &str,
        patience: Duration,
        mut is_there: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let began = Instant::now();
        loop {
            if let Some(found) = is_there()? {
                return Ok(found);
            }
            self.check()?;
            if began.elapsed() > patience {
                let words = self.last_words();
                return Err(anyhow!("{} has no {what} after {} s: {words}", self.name, patience.as_secs()));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Waits for its end, and returns what it printed. `None`: `should_stop` was true, and the program was ended.
    pub fn output(mut self, should_stop: impl Fn() -> bool) -> Result<Option<String>> {
        loop {
            match self.status()? {
                Some(status) if status.success() => return text_of(&mut self.output).map(Some),
                Some(_) => return self.check().map(|()| None),
                None if should_stop() => return Ok(None),
                None => std::thread::sleep(LOOK),
            }
        }
    }

    /// Asks it to end, and waits. A program that takes longer is killed.
    pub fn stop(mut self, patience: Duration) {
        self.signal(Signal::TERM);
        let began = Instant::now();
        while began.elapsed() < patience && matches!(self.status(), Ok(None)) {
            std::thread::sleep(LOOK);
        }
    }

    fn last_words(&mut self) -> String {
        let words = text_of(&mut self.words).unwrap_or_default();
        let words = words.trim();
        let begin = words.len().saturating_sub(LAST_WORDS_BYTES);
        let begin = (begin..words.len()).find(|begin| words.is_char_boundary(*begin)).unwrap_or(0);
        if words.is_empty() { "it said nothing".into() } else { words[begin..].to_owned() }
    }
}

fn text_of(file: &mut File) -> Result<String> {
    let mut bytes = Vec::new();
    file.rewind()
        .and_then(|()| file.read_to_end(&mut bytes))
        .context("cannot read what a program printed")?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl Drop for Started {
    fn drop(&mut self) {
        if self.ended.is_some() {
            return;
        }
        // fio ends its workers only if it is told to.
        let _ = kill_process(self.pid, Signal::TERM);
        let begun = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && begun.elapsed() < GRACE {
            std::thread::sleep(LOOK);
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
        assert!(waited.unwrap_err().to_string().ends_with("it said nothing"));
    }
}
