//! Rate-limited warnings about clients, guests and disks, so that neither a hostile nor a failing one can
//! fill a log, or hide warnings about others.
//!
//! If a log has many sources, it prints in each window of ten seconds:
//!
//! | lines | for |
//! |---|---|
//! | any number up to the limit | the first line of each source |
//! | up to half of the limit | further lines of a source, for each source up to a quarter of the limit |
//!
//! A source is a host or a process. A client that connects again from another port or with another name is
//! the same source.

use std::fmt::Display;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

const WINDOW: Duration = Duration::from_secs(10);

/// Prints a limited number of warnings in ten seconds, and counts the others.
#[derive(Debug)]
pub struct FaultLog {
    /// The part of the program, such as a front-end or the write cache.
    part: &'static str,
    limit: u32,
    /// The most lines of one source, and up to how many lines in total it gets more than one.
    share: u32,
    repeats: u32,
    window: Mutex<Window>,
}

#[derive(Debug)]
struct Window {
    started: Instant,
    printed: u32,
    kept_back: u64,
    /// Sources that were mentioned, and how often: at most `limit`.
    sources: Vec<(String, u32)>,
}

impl Window {
    fn new(now: Instant) -> Self {
        Self { started: now, printed: 0, kept_back: 0, sources: Vec::new() }
    }
}

impl FaultLog {
    /// Creates a log for one device. Each line starts with `part`; at most `limit` lines are printed in ten
    /// seconds.
    pub fn new(part: &'static str, limit: u32) -> Self {
        let window = Mutex::new(Window::new(Instant::now()));
        Self { part, limit, share: limit, repeats: limit, window }
    }

    /// As [`FaultLog::new`], for a server of many clients, each of which gets its share of the lines.
    pub fn shared(part: &'static str, limit: u32) -> Self {
        Self { share: (limit / 4).max(1), repeats: limit.div_ceil(2), ..Self::new(part, limit) }
    }

    /// Prints a warning, unless the limit is reached.
    pub fn warn(&self, who: &dyn Display, what: &dyn Display) {
        if self.may_tell(who) {
            tracing::warn!("{}: {who}: {what}", self.part);
        }
    }

    /// As [`FaultLog::warn`], for lost data: prints an error.
    pub fn error(&self, who: &dyn Display, what: &dyn Display) {
        if self.may_tell(who) {
            tracing::error!("{}: {who}: {what}", self.part);
        }
    }

    /// Whether the caller may print a line of its own.
    pub fn may_tell(&self, who: &dyn Display) -> bool {
        let Some(kept_back) = self.admit(Instant::now(), who) else { return false };
        if kept_back > 0 {
            tracing::warn!(kept_back, "{}: further warnings were kept back to bound the log", self.part);
        }
        true
    }

    /// Returns `None` if the line must be kept back, otherwise the number of lines kept back in the
    /// previous window.
    fn admit(&self, now: Instant, who: &dyn Display) -> Option<u64> {
        let mut window = self.window.lock();
        let mut kept_back = 0;
        if now.saturating_duration_since(window.started) >= WINDOW {
            kept_back = window.kept_back;
            *window = Window::new(now);
        }
        if window.printed < self.limit {
            let who = who.to_string();
            let source = source(&who);
            let may_repeat = window.printed < self.repeats;
            let is_admitted = match window.sources.iter_mut().find(|(known, _)| known == source) {
                Some((_, printed)) if may_repeat && *printed < self.share => {
                    *printed = printed.saturating_add(1);
                    true
                }
                Some(_) => false,
                None => {
                    window.sources.push((source.to_owned(), 1));
                    true
                }
            };
            if is_admitted {
                window.printed = window.printed.saturating_add(1);
                return Some(kept_back);
            }
        }
        window.kept_back = window.kept_back.saturating_add(1);
        None
    }
}

/// The host or process in a description such as "client 192.0.2.7:1234", "NAME at 192.0.2.7:1234" or "client
/// process 77".
fn source(who: &str) -> &str {
    let last = who.rsplit(' ').next().unwrap_or(who);
    match last.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => last,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_passes_its_limit_and_reports_suppressed_lines() {
        let log = FaultLog::new("test", 2);
        let start = Instant::now();
        let admit = |seconds| log.admit(start + Duration::from_secs(seconds), &"disk");
        assert_eq!([admit(0), admit(0), admit(0), admit(9)], [Some(0), Some(0), None, None]);
        assert_eq!([admit(11), admit(12), admit(13)], [Some(2), Some(0), None]);
    }

    #[test]
    fn a_noisy_client_does_not_hide_the_others() {
        let log = FaultLog::shared("test", 20);
        let start = Instant::now();
        let printed = |who: &str, times: u32| (0..times).filter(|_| log.admit(start, &who).is_some()).count();
        // Each time from another port, and with other names.
        let noise: usize = (0..500)
            .map(|port| {
                printed(&format!("client 192.0.2.1:{port}"), 1)
                    + printed(&format!("n{port} at 192.0.2.1:7"), 1)
            })
            .sum();
        assert_eq!(noise, 5);
        assert_eq!(printed("client 192.0.2.2:1", 1), 1);
        assert_eq!(printed("client [2001:db8::1]:1", 2), 2);
        // However many sources repeat their warnings, others are mentioned once.
        let noise: usize = (10..15).map(|process| printed(&format!("client process {process}"), 100)).sum();
        assert_eq!(noise, 2 + 4);
        assert_eq!(printed("client 192.0.2.3:1", 9), 1);
        assert_eq!(printed("listener", 9), 1);
        let others: usize = (0..100).map(|host| printed(&format!("client 198.51.100.{host}:1"), 3)).sum();
        assert_eq!(5 + 1 + 2 + 6 + 1 + 1 + others, 20, "the limit of all");
        assert_eq!(log.window.lock().sources.len(), 2 + 1 + 5 + 2 + others);
        // A new window starts.
        assert!(log.admit(start + WINDOW, &"client 192.0.2.1:1").is_some_and(|kept_back| kept_back > 1000));
        assert_eq!(log.window.lock().sources.len(), 1);
    }
}
