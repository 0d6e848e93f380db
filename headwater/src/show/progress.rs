//! Shows the progress of a long operation: a bar with rate and remaining time on a terminal, plain lines elsewhere.

use std::future::Future;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use headwater_api::Progress;
use headwater_block::size;
use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use crate::client::tasks::Step;
use crate::logging;

/// A wait for an answer is explained after this time.
const REPORT_AFTER: Duration = Duration::from_secs(1);

/// Waits for an answer without progress. If it is slow, prints what it waits for, unless `quiet` is set.
pub async fn said_if_slow<T>(quiet: bool, what: &str, answer: impl Future<Output = T>) -> T {
    let mut answer = std::pin::pin!(answer);
    match tokio::time::timeout(REPORT_AFTER, &mut answer).await {
        Ok(answer) => answer,
        Err(_) => {
            if !quiet {
                super::aside(&format!("{what}\n"));
            }
            answer.await
        }
    }
}

/// The shortest time between two lines if the output is not a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Shows the progress of one operation on standard error.
pub enum Shown {
    /// As a bar.
    Bar {
        /// The bar.
        bar: ProgressBar,
        /// What the bar shows.
        drawn: Drawn,
        /// Whether a wait for other tasks was reported.
        waits: bool,
    },
    /// As lines.
    Lines {
        /// The operation.
        what: String,
        /// When it began; from then on the rate counts. Holes of a disk are done at once, before that.
        began: Instant,
        /// The bytes that were done then. `None`: nothing is known yet.
        first_bytes: Option<u64>,
        /// When the last line was printed.
        last: Instant,
        /// Whether a wait for other tasks was reported.
        waits: bool,
    },
    /// Not at all, for --json.
    Silent,
}

/// The contents of a bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drawn {
    /// Nothing yet.
    Nothing,
    /// The present step, in words.
    Words,
    /// Bytes of a known total.
    Bytes,
    /// All bytes are done, and a last step without bytes runs, such as writing a list.
    Through,
    /// Bytes of an unknown total.
    Read,
}

impl Drawn {
    fn template(self) -> &'static str {
        match self {
            Self::Nothing => "",
            Self::Words => "{msg}: {prefix}",
            Self::Bytes => "{msg} {wide_bar} {percent:>3}% {bytes}/{total_bytes} {bytes_per_sec}, {left}",
            Self::Through => "{msg} {wide_bar} {total_bytes} done, finishing",
            Self::Read => "{msg}: {bytes} read, {bytes_per_sec}",
        }
    }

    /// Changes the contents to `to`. Returns whether that is a change.
    fn change(&mut self, bar: &ProgressBar, to: Self) -> bool {
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
    /// Begins to show an operation; with `quiet` nothing is shown.
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
        // Hidden until something is known, because an empty bar would look full.
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::hidden());
        bar.set_message(what.to_owned());
        logging::keep_clear_of(&bar);
        Self::Bar { bar, drawn: Drawn::Nothing, waits: false }
    }

    /// Shows a new progress.
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
                    // The rate is measured from the beginning of the work.
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

    /// Shows the present step in words, if no bytes can be counted.
    pub fn doing(&mut self, doing: &str) {
        let doing = super::printable(doing);
        match self {
            Self::Silent => {}
            Self::Bar { bar, drawn, .. } => {
                let is_new = drawn.change(bar, Drawn::Words);
                bar.set_prefix(doing);
                unhide(bar);
                if is_new {
                    // There may be no further update for minutes.
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

    /// Shows the number of bytes so far, of an unknown total.
    pub fn read(&mut self, bytes: u64) {
        match self {
            Self::Silent => {}
            Self::Bar { bar, drawn, .. } => {
                drawn.change(bar, Drawn::Read);
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

    /// Reports once that it waits for other tasks. `running` is their number.
    fn wait(&mut self, running: u64) {
        let (what, waits) = match self {
            Self::Silent => return,
            Self::Bar { bar, waits, .. } => (bar.message(), waits),
            Self::Lines { what, waits, .. } => (what.clone(), waits),
        };
        if std::mem::replace(waits, true) {
            return;
        }
        super::aside(&format!(
            "{what}: waiting, because {running} other long operations of the daemon run\n"
        ));
    }

    /// Ends the display.
    pub fn end(&self) {
        if let Self::Bar { bar, .. } = self {
            bar.finish_and_clear();
        }
    }
}

/// Whether a line is due. If so, records that it is printed.
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

/// The remaining time of a bar. It is unknown without a rate, because the bar would otherwise say 0 seconds.
fn left(state: &ProgressState, out: &mut dyn std::fmt::Write) {
    // Writing to the drawing cannot fail.
    let _ = if state.per_sec() >= 1.0 {
        write!(out, "{:#} left", HumanDuration(state.eta()))
    } else {
        out.write_str("time left unknown")
    };
}

fn draw(bar: &ProgressBar, drawn: &mut Drawn, progress: &Progress) {
    let Progress { done_bytes, total_bytes, .. } = *progress;
    if total_bytes == 0 {
        // Not begun.
        return;
    }
    let begins = !matches!(drawn, Drawn::Bytes | Drawn::Through);
    drawn.change(bar, if done_bytes >= total_bytes { Drawn::Through } else { Drawn::Bytes });
    bar.set_length(total_bytes);
    bar.set_position(done_bytes);
    if begins {
        // What was done before says nothing about the rate.
        bar.reset_eta();
        unhide(bar);
    }
}

/// The line after `passed` time, since `first_bytes` were done.
fn text(what: &str, progress: &Progress, first_bytes: u64, passed: Duration) -> String {
    let Progress { done_bytes, total_bytes, .. } = *progress;
    if total_bytes == 0 {
        return format!("{what}: the total is not known yet");
    }
    let rate = rate(done_bytes.saturating_sub(first_bytes), passed);
    let percent = (u128::from(done_bytes) * 100).checked_div(u128::from(total_bytes)).unwrap_or(0);
    let left = total_bytes.saturating_sub(done_bytes).checked_div(rate);
    let left = left.map_or_else(|| "time left unknown".to_owned(), |left| format!("{left} s left"));
    let (done, total, rate) = (size::format(done_bytes), size::format(total_bytes), size::format(rate));
    format!("{what}: {percent}%, {done} of {total}, {rate}/s, {left}")
}

/// Bytes per second.
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
        assert_eq!(line, "import x: 25%, 100.0 MiB of 400.0 MiB, 50.0 MiB/s, 6 s left");
        let stands_still = text("x", &of(0, 1 << 20), 0, Duration::ZERO);
        assert_eq!(stands_still, "x: 0%, 0 B of 1.0 MiB, 0 B/s, time left unknown");
        let unknown = text("x", &Progress::default(), 0, Duration::ZERO);
        assert_eq!(unknown, "x: the total is not known yet");
        // Of a disk that is mostly holes.
        let progress = of((90 << 30) + (250 << 20), 100 << 30);
        let line = text("x", &progress, 90 << 30, Duration::from_secs(5));
        assert!(line.ends_with("50.0 MiB/s, 199 s left"), "{line}");
    }

    #[test]
    fn a_bar_that_stands_still_does_not_say_that_it_is_about_to_end() {
        let bar = ProgressBar::with_draw_target(Some(100 << 20), ProgressDrawTarget::hidden());
        let mut told = String::new();
        bar.update(|state| left(state, &mut told));
        assert_eq!(told, "time left unknown");
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
