//! Writes the log, and text beside it on standard error and standard output, through queues, so that a slow reader of these
//! never blocks the process.

mod queue;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fs::File;
use std::os::fd::AsFd;
use std::panic::PanicHookInfo;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};
use indicatif::ProgressBar;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::cli::LogFormat;
use queue::LogQueue;

const ADVICE: &str = "use 'off', 'error', 'warn', 'info', 'debug' or 'trace', or a comma-separated list of parts like headwater_service=debug";

/// The log of this process, and whether it goes to standard error. Unset in commands without a log.
static LOG: OnceLock<(LogQueue, bool)> = OnceLock::new();

/// Changes the filter of the log on standard error.
type SetFilter = Box<dyn Fn(EnvFilter) -> anyhow::Result<()> + Send + Sync>;

static FILTER: OnceLock<SetFilter> = OnceLock::new();

/// Whether [`aside`] writes directly, because the log has ended.
static IS_OVER: AtomicBool = AtomicBool::new(false);

/// The queue for [`aloud`]. `None`: there is no standard output.
static OUTPUT: OnceLock<Option<LogQueue>> = OnceLock::new();

/// Logs to standard error, including panics and the text of [`aside`].
pub fn to_stderr(filter: &str, format: LogFormat) -> anyhow::Result<()> {
    let filter = parse(filter)?;
    // Not `std::io::stderr`, whose lock would be held while a reader blocks.
    let output = std::io::stderr().as_fd().try_clone_to_owned().context("cannot write to standard error")?;
    let log = LogQueue::start(output.into(), format)?;
    let _ = LOG.set((log.clone(), true));
    std::panic::set_hook(Box::new(log_panic));
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(log).log_internal_errors(false);
    match format {
        LogFormat::Text => {
            let builder = builder.with_ansi(false).with_filter_reloading();
            let handle = builder.reload_handle();
            let _ = FILTER.set(Box::new(move |filter| Ok(handle.reload(filter)?)));
            builder.init();
        }
        LogFormat::Json => {
            let builder = builder.json().with_filter_reloading();
            let handle = builder.reload_handle();
            let _ = FILTER.set(Box::new(move |filter| Ok(handle.reload(filter)?)));
            builder.init();
        }
    }
    Ok(())
}

/// Fails for an invalid filter.
pub fn check_filter(text: &str) -> anyhow::Result<()> {
    parse(text).map(drop)
}

/// Changes the filter of the log on standard error.
pub fn set_filter(text: &str) -> anyhow::Result<()> {
    let filter = parse(text)?;
    let set = FILTER.get().context("there is no log")?;
    set(filter).context("cannot change what is logged")
}

/// Keeps log lines on standard error from being mixed with this progress bar.
pub fn keep_clear_of(bar: &ProgressBar) {
    if let Some((log, true)) = LOG.get() {
        log.keep_clear_of(bar);
    }
}

/// Writes to standard error, in order with the log.
pub fn aside(text: &str) {
    match LOG.get() {
        Some((log, true)) if !IS_OVER.load(Ordering::Relaxed) => log.push(text.as_bytes()),
        _ => {
            use std::io::Write;
            // Ignored: if standard error is closed, nobody wants to read it.
            let _ = std::io::stderr().write_all(text.as_bytes());
        }
    }
}

/// Writes to standard output without blocking, for commands that serve: machines and signals do not wait for a
/// reader.
pub fn aloud(text: &str) {
    let start = || {
        let output = std::io::stdout().as_fd().try_clone_to_owned().ok()?;
        LogQueue::start(output.into(), LogFormat::Text).ok()
    };
    if let Some(output) = OUTPUT.get_or_init(start) {
        output.push(text.as_bytes());
    }
}

/// Waits until the log is written, with a short timeout.
pub fn flush() {
    let log = LOG.get().map(|(log, _)| log);
    log.into_iter().chain(OUTPUT.get().and_then(Option::as_ref)).for_each(LogQueue::flush);
}

/// Ends the log of a command that serves nobody: waits without a timeout until the log is written. After that, [`aside`]
/// writes directly. A log whose reader is slow would otherwise lose lines, and the error is the only output of
/// such a command.
pub fn end() {
    if let Some((log, true)) = LOG.get() {
        log.drain();
    }
    IS_OVER.store(true, Ordering::Relaxed);
}

/// Logs a panic. Rust's own hook would block on a reader of standard error.
fn log_panic(panic: &PanicHookInfo<'_>) {
    let Some((log, _)) = LOG.get() else { return };
    let thread = std::thread::current();
    let mut text = format!("thread '{}' {panic}", thread.name().unwrap_or("<unnamed>"));
    let backtrace = Backtrace::capture();
    if backtrace.status() == BacktraceStatus::Captured {
        text = format!("{text}\nstack backtrace:\n{backtrace}");
    }
    log.note("ERROR", &text);
    // This may be the process's last action.
    log.flush();
}

/// Parses a filter strictly. `EnvFilter` would take a misspelt level for a target and log nothing.
fn parse(text: &str) -> anyhow::Result<EnvFilter> {
    let refused = |why: String| {
        let problem = Problem::new(ProblemKind::Invalid, format!("'{text}' is not a log filter: {why}"));
        problem.advise(ADVICE)
    };
    for part in text.split(',').filter(|_| !text.is_empty()) {
        // Without a level, a span has all levels.
        if part.ends_with(']') {
            continue;
        }
        let level = part.rsplit_once('=').map_or(part, |(_, level)| level);
        if part.is_empty() {
            return Err(refused("one of its parts is empty".to_owned()).into());
        }
        if level.is_empty() || level.parse::<LevelFilter>().is_err() {
            return Err(refused(format!("'{level}' is not a level")).into());
        }
    }
    EnvFilter::try_new(text).map_err(|e| refused(e.to_string()).into())
}

/// Logs to a file, so that the terminal stays free. Panics and text of [`aside`] do not go to the file.
pub fn to_file(path: &Path) -> anyhow::Result<()> {
    let file = File::create(path).with_context(|| format!("cannot write the log {}", path.display()))?;
    let log = LogQueue::start(file, LogFormat::Text)?;
    let _ = LOG.set((log.clone(), false));
    let builder = tracing_subscriber::fmt().with_env_filter(EnvFilter::new("info")).with_ansi(false);
    builder.with_writer(log).log_internal_errors(false).init();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_with_a_part_that_would_be_ignored_is_refused() {
        let sound = [
            "",
            "info",
            "WARN",
            "off",
            "headwater_service=debug",
            "info,headwater_nbd=trace,hyper=off",
            "[span]",
        ];
        for text in sound {
            assert!(parse(text).is_ok(), "{text}");
        }
        let odd = [
            "inof",
            "headwater_service",
            "headwater_service=dbug",
            "nonsense=,,",
            "info,",
            "x=",
            "info,inof",
        ];
        for text in odd {
            let error = parse(text).unwrap_err();
            let problem = error.downcast_ref::<Problem>().unwrap();
            assert_eq!(problem.kind, ProblemKind::Invalid, "{text}");
            assert!(problem.to_string().contains("is not a log filter"), "{problem}");
        }
    }
}
