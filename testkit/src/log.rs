//! What a test program logs, as an operator would read it: who it was about, why, and how often.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use tracing_subscriber::filter::LevelFilter;

use crate::wait_until;

/// The lines that this process logs, each as the program would write it, without colours. There is one for a process, and so for
/// a test program; clones are the same one.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Gathers warnings and errors from now on.
    pub fn of_warnings() -> Self {
        Self::gather(LevelFilter::WARN)
    }

    /// Gathers all that is said at level debug, too.
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

    /// All that was logged since it was last taken.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock()).into_owned()
    }

    /// The same, and takes it.
    pub fn take(&self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut *self.0.lock())).into_owned()
    }

    /// Those lines that have all of these words.
    pub fn lines_with(&self, words: &[&str]) -> Vec<String> {
        let text = self.text();
        text.lines().filter(|line| words.iter().all(|word| line.contains(word))).map(str::to_owned).collect()
    }

    /// Waits for these words.
    pub fn wait_for(&self, words: &str) {
        wait_until(words, || self.text().contains(words));
    }

    /// Takes all, and checks the lines with this word of a case that began then: nobody has more than its share of the warnings, which is
    /// a quarter of 20 in ten seconds, and one line says how many were kept back. A busy host may take longer than ten seconds.
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
