//! Captures the log lines of a test program, so that a test can check them as an operator would read them.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use tracing_subscriber::filter::LevelFilter;

use crate::wait_until;

/// The captured lines, each as the program would write it, without colours. There is one capture for each
/// process, and so for each test program; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Captures warnings and errors from now on.
    pub fn of_warnings() -> Self {
        Self::gather(LevelFilter::WARN)
    }

    /// Captures everything from level debug on.
    pub fn of_details() -> Self {
        Self::gather(LevelFilter::DEBUG)
    }

    fn gather(level: LevelFilter) -> Self {
        let log = Self::default();
        let writer = log.clone();
        let lines = tracing_subscriber::fmt().with_writer(move || Sink(writer.clone()));
        lines.with_max_level(level).with_ansi(false).init();
        log
    }

    /// All lines since the last [`Log::take`].
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock()).into_owned()
    }

    /// Returns the same text, and clears it.
    pub fn take(&self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut *self.0.lock())).into_owned()
    }

    /// The lines that contain all of these words.
    pub fn lines_with(&self, words: &[&str]) -> Vec<String> {
        let text = self.text();
        text.lines().filter(|line| words.iter().all(|word| line.contains(word))).map(str::to_owned).collect()
    }

    /// Waits until these words are logged.
    pub fn wait_for(&self, words: &str) {
        wait_until(words, || self.text().contains(words));
    }

    /// Takes all lines, and checks those with `word` from a case that began at `since`. One client may cause
    /// at most a quarter of the 20 warnings in ten seconds, and one line must report how many were
    /// suppressed. A busy host may take longer than ten seconds.
    ///
    /// # Panics
    /// If there are more, or none.
    pub fn take_bounded(&self, word: &str, since: Instant) {
        let text = self.take();
        let lines = text.lines().filter(|line| line.contains(word)).count() as u64;
        let windows = 1 + since.elapsed().as_secs() / 10;
        assert!((1..=6 * windows).contains(&lines), "{lines} lines: {text}");
    }
}

struct Sink(Log);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.0.lock().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
