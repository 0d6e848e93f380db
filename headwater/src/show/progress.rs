//! How far a long operation is: a bar with rate and time left on a terminal, plain lines elsewhere.

use std::future::Future;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use headwater_api::Progress;
use headwater_block::size;
use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use crate::client::tasks::Step;
use crate::logging;

/// After how long it is said what an answer is waited for.
const PATIENCE: Duration = Duration::from_secs(1);

/// Waits for an answer that has no progress, and says what for where it takes its time; `quiet` says nothing.
pub async fn said_if_slow<T>(quiet: bool, what: &str, answer: impl Future<Output = T>) -> T {
    let mut answer = std::pin::pin!(answer);
    match tokio::time::timeout(PATIENCE, &mut answer).await {
        Ok(answer) => answer,
        Err(_) => {
            if !quiet {
                super::aside(&format!("{what}\n"));
            }
            answer.await
        }
    }
}

/// Elsewhere than on a terminal a line is printed this often at most.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Shows the progress of one operation on the standard error.
pub enum Shown {
    /// A bar.
    Bar {
        /// It.
        bar: ProgressBar,
        /// What it shows.
        drawn: Drawn,
        /// Whether it was said that it waits.
        waits: bool,
    },
    /// Lines.
    Lines {
        /// What is done.
        what: String,
        /// When it began, and what was done by then: holes of a disk are done at once.
        began: Instant,
        /// `None`: nothing is known yet.
        first_bytes: Option<u64>,
        /// When a line was printed last.
        last: Instant,
        /// Whether it waits, as was said.
        waits: bool,
    },
    /// Nothing: a program reads along.
    Silent,
}

/// What a bar shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drawn {
    /// Nothing yet.
    Nothing,
    /// What is done, in words.
    Words,
    /// Bytes, of so many.
    Bytes,
    /// That all bytes are done. What comes after the last one, such as a list that is written, has none to count.
    Through,
    /// Bytes, of nobody knows how many.
    Read,
}

impl Drawn {
    fn template(self) -> &'static str {
        match self {
            Self::Nothing => "",
            Self::Words => "{msg}: {prefix}",
            Self::Bytes => "{msg} {wide_bar} {percent:>3}% {bytes}/{total_bytes} {bytes_per_sec} left {left}",
            Self::Through => "{msg} {wide_bar} {total_bytes} done, finishing",
            Self::Read => "{msg}: {bytes} read, {bytes_per_sec}",
        }
    }

    /// Has the bar show `to` from now on. Returns whether that is something else than before.
    fn turn(&mut self, bar: &ProgressBar, to: Self) -> bool {
        if *self == to {
            return false;
        }
        if let Ok(style) = ProgressStyle::with_template(to.template()) {
            bar.set_style(style.progress_chars("=> ").with_key("left", left));
        }
        *self = to;
        true
    }
}

impl Shown {
    /// Begins to show; `quiet` shows nothing.
    pub fn begin(what: &str, quiet: bool) -> Self {
        if quiet {
            return Self::Silent;
        }
        if !std::io::stderr().is_terminal() {
            let now = Instant::now();
            return Self::Lines {
                what: what.to_owned(),
                began: now,
                first_bytes: None,
                last: now,
                waits: false,
            };
        }
        // Nothing is known yet: a bar of no bytes would be a full one.
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::hidden());
        bar.set_message(what.to_owned());
        logging::keep_clear_of(&bar);
        Self::Bar { bar, drawn: Drawn::Nothing, waits: false }
    }

    /// It is that far now.
    pub fn update(&mut self, step: impl Into<Step>) {
        let progress = match step.into() {
            Step::Progress(Progress { doing: Some(doing), .. }) => return self.doing(&doing),
            Step::Progress(progress) => progress,
            Step::Waiting(running) => return self.wait(running),
        };
        match self {
            Self::Silent => {}
            Self::Bar { bar, drawn, .. } => draw(bar, drawn, &progress),
            Self::Lines { what, began, first_bytes, last, waits } => {
                let now = Instant::now();
                if std::mem::take(waits) || (first_bytes.is_none() && progress.total_bytes > 0) {
                    // The rate is that of the work.
                    (*began, *first_bytes) = (now, Some(progress.done_bytes));
                }
                if is_due(last, now) {
                    let passed = now.duration_since(*began);
                    let text = text(what, &progress, first_bytes.unwrap_or(0), passed);
                    super::aside(&format!("{text}\n"));
                }
            }
        }
    }

    /// It does that now, in words, where there are no bytes to count.
    pub fn doing(&mut self, doing: &str) {
        let doing = super::printable(doing);
        match self {
            Self::Silent => {}
            Self::Bar { bar, drawn, .. } => {
                let is_new = drawn.turn(bar, Drawn::Words);
                bar.set_prefix(doing);
                unhide(bar);
                if is_new {
                    // There may be nothing more to tell for minutes.
                    bar.force_draw();
                }
            }
            Self::Lines { what, last, .. } => {
                if is_due(last, Instant::now()) {
                    super::aside(&format!("{what}: {doing}\n"));
                }
            }
        }
    }

    /// So many bytes were read, of nobody knows how many.
    pub fn read(&mut self, bytes: u64) {
        match self {
            Self::Silent => {}
            Self::Bar { bar, drawn, .. } => {
                drawn.turn(bar, Drawn::Read);
                unhide(bar);
                bar.set_position(bytes);
            }
            Self::Lines { what, began, last, .. } => {
                let now = Instant::now();
                if is_due(last, now) {
                    let rate = size::format(rate(bytes, now.duration_since(*began)));
                    super::aside(&format!("{what}: {} read, {rate}/s\n", size::format(bytes)));
                }
            }
        }
    }

    /// It waits for others, of which so many run: said once.
    fn wait(&mut self, running: u64) {
        let (what, waits) = match self {
            Self::Silent => return,
            Self::Bar { bar, waits, .. } => (bar.message(), waits),
            Self::Lines { what, waits, .. } => (what.clone(), waits),
        };
        if std::mem::replace(waits, true) {
            return;
        }
        super::aside(&format!("{what}: waits, as {running} other long operations of the daemon run\n"));
    }

    /// It is over.
    pub fn end(&self) {
        if let Self::Bar { bar, .. } = self {
            bar.finish_and_clear();
        }
    }
}

/// Whether it is time for a line, and then notes that there is one.
fn is_due(last: &mut Instant, now: Instant) -> bool {
    let is_due = now.duration_since(*last) >= LINE_INTERVAL;
    if is_due {
        *last = now;
    }
    is_due
}

fn unhide(bar: &ProgressBar) {
    if bar.is_hidden() {
        bar.set_draw_target(ProgressDrawTarget::stderr());
    }
}

/// How long a bar has to go on at its rate. Without one nobody knows: it would say 0 seconds.
fn left(state: &ProgressState, out: &mut dyn std::fmt::Write) {
    // What is drawn cannot fail.
    let _ = if state.per_sec() >= 1.0 {
        write!(out, "{:#}", HumanDuration(state.eta()))
    } else {
        out.write_str("unknown")
    };
}

fn draw(bar: &ProgressBar, drawn: &mut Drawn, progress: &Progress) {
    let Progress { done_bytes, total_bytes, .. } = *progress;
    if total_bytes == 0 {
        // Not begun.
        return;
    }
    let begins = !matches!(drawn, Drawn::Bytes | Drawn::Through);
    drawn.turn(bar, if done_bytes >= total_bytes { Drawn::Through } else { Drawn::Bytes });
    bar.set_length(total_bytes);
    bar.set_position(done_bytes);
    if begins {
        // What was done by then says nothing of the rate.
        bar.reset_eta();
        unhide(bar);
    }
}

/// `passed` since `first_bytes` were done.
fn text(what: &str, progress: &Progress, first_bytes: u64, passed: Duration) -> String {
    let Progress { done_bytes, total_bytes, .. } = *progress;
    if total_bytes == 0 {
        return format!("{what}: it is not known yet how much there is to do");
    }
    let rate = rate(done_bytes.saturating_sub(first_bytes), passed);
    let percent = (u128::from(done_bytes) * 100).checked_div(u128::from(total_bytes)).unwrap_or(0);
    let left = total_bytes.saturating_sub(done_bytes).checked_div(rate);
    let left = left.map_or_else(|| "unknown".to_owned(), |left| format!("{left} s"));
    let (done, total, rate) = (size::format(done_bytes), size::format(total_bytes), size::format(rate));
    format!("{what}: {percent}%, {done} of {total}, {rate}/s, left {left}")
}

/// Bytes a second.
fn rate(bytes: u64, passed: Duration) -> u64 {
    let passed_ms = passed.as_millis().max(1);
    u64::try_from(u128::from(bytes) * 1000 / passed_ms).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(done_bytes: u64, total_bytes: u64) -> Progress {
        Progress { done_bytes, total_bytes, doing: None }
    }

    #[test]
    fn a_line_tells_rate_and_time_left() {
        let line = text("import x", &of(100 << 20, 400 << 20), 0, Duration::from_secs(2));
        assert_eq!(line, "import x: 25%, 100.0 MiB of 400.0 MiB, 50.0 MiB/s, left 6 s");
        let stands_still = text("x", &of(0, 1 << 20), 0, Duration::ZERO);
        assert_eq!(stands_still, "x: 0%, 0 B of 1.0 MiB, 0 B/s, left unknown");
        let unknown = text("x", &Progress::default(), 0, Duration::ZERO);
        assert_eq!(unknown, "x: it is not known yet how much there is to do");
        // Of a disk that is mostly holes.
        let progress = of((90 << 30) + (250 << 20), 100 << 30);
        let line = text("x", &progress, 90 << 30, Duration::from_secs(5));
        assert!(line.ends_with("50.0 MiB/s, left 199 s"), "{line}");
    }

    #[test]
    fn a_bar_that_stands_still_does_not_say_that_it_is_about_to_end() {
        let bar = ProgressBar::with_draw_target(Some(100 << 20), ProgressDrawTarget::hidden());
        let mut told = String::new();
        bar.update(|state| left(state, &mut told));
        assert_eq!(told, "unknown");
    }

    #[test]
    fn a_bar_shows_words_before_bytes_and_after_them() {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::hidden());
        let mut shown = Shown::Bar { bar: bar.clone(), drawn: Drawn::Nothing, waits: false };
        let mut becomes = |step: Progress, expected: Drawn| {
            shown.update(step);
            assert!(matches!(&shown, Shown::Bar { drawn, .. } if *drawn == expected));
        };
        let doing = |words: &str| Progress { doing: Some(words.to_owned()), ..of(9, 9) };
        becomes(of(0, 0), Drawn::Nothing);
        becomes(doing("reading manifests: 1 of 2 versions"), Drawn::Words);
        assert_eq!(bar.prefix(), "reading manifests: 1 of 2 versions");
        becomes(of(1, 9), Drawn::Bytes);
        assert_eq!((bar.position(), bar.length()), (1, Some(9)));
        becomes(of(9, 9), Drawn::Through);
        becomes(doing("repairing: 0 of 1 places"), Drawn::Words);
        assert_eq!(bar.prefix(), "repairing: 0 of 1 places");
    }
}
