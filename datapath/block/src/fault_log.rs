//! Warnings about clients, guests and disks at a bounded rate, so that neither a hostile one nor one that fails can fill a log.
//!
//! Nor can it hide the others. Of what a log with many sources tells in ten seconds
//!
//! | lines | are for |
//! |---|---|
//! | all | the first one of each source |
//! | the first half | further ones of a source, up to a quarter of all |
//!
//! A source is a host or a process: whoever connects again, from another port or with another name, is the same.

use std::fmt::Display;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

const WINDOW: Duration = Duration::from_secs(10);

/// Tells what goes wrong, some lines in ten seconds, and counts the rest.
#[derive(Debug)]
pub struct FaultLog {
    /// Whose it is: a front-end's, or a write cache's.
    part: &'static str,
    limit: u32,
    /// Lines of one source, and up to how many of all it gets more than one.
    share: u32,
    repeats: u32,
    window: Mutex<Window>,
}

#[derive(Debug)]
struct Window {
    started: Instant,
    told: u32,
    kept_back: u64,
    /// Who was told of, and how often: at most `limit`.
    sources: Vec<(String, u32)>,
}

impl Window {
    fn new(now: Instant) -> Self {
        Self { started: now, told: 0, kept_back: 0, sources: Vec::new() }
    }
}

impl FaultLog {
    /// For one device of a part of the program of this name, which starts each line; at most `limit` lines in ten seconds.
    pub fn new(part: &'static str, limit: u32) -> Self {
        let window = Mutex::new(Window::new(Instant::now()));
        Self { part, limit, share: limit, repeats: limit, window }
    }

    /// The same for a server of many clients, each of which gets its share.
    pub fn shared(part: &'static str, limit: u32) -> Self {
        Self { share: (limit / 4).max(1), repeats: limit.div_ceil(2), ..Self::new(part, limit) }
    }

    /// Tells who did what, unless too much was told lately.
    pub fn warn(&self, who: &dyn Display, what: &dyn Display) {
        if self.may_tell(who) {
            tracing::warn!("{}: {who}: {what}", self.part);
        }
    }

    /// The same of what is lost.
    pub fn error(&self, who: &dyn Display, what: &dyn Display) {
        if self.may_tell(who) {
            tracing::error!("{}: {who}: {what}", self.part);
        }
    }

    /// Whether a line of the caller's own may be told.
    pub fn may_tell(&self, who: &dyn Display) -> bool {
        let Some(kept_back) = self.admit(Instant::now(), who) else { return false };
        if kept_back > 0 {
            tracing::warn!(kept_back, "{}: further warnings were kept back to bound the log", self.part);
        }
        true
    }

    /// `None` to keep quiet, else how many were kept back in the window before.
    fn admit(&self, now: Instant, who: &dyn Display) -> Option<u64> {
        let mut window = self.window.lock();
        let mut kept_back = 0;
        if now.saturating_duration_since(window.started) >= WINDOW {
            kept_back = window.kept_back;
            *window = Window::new(now);
        }
        if window.told < self.limit {
            let who = who.to_string();
            let source = source(&who);
            let may_repeat = window.told < self.repeats;
            let is_admitted = match window.sources.iter_mut().find(|(known, _)| known == source) {
                Some((_, told)) if may_repeat && *told < self.share => {
                    *told = told.saturating_add(1);
                    true
                }
                Some(_) => false,
                None => {
                    window.sources.push((source.to_owned(), 1));
                    true
                }
            };
            if is_admitted {
                window.told = window.told.saturating_add(1);
                return Some(kept_back);
            }
        }
        window.kept_back = window.kept_back.saturating_add(1);
        None
    }
}

/// The host or process of one who is described as "client 192.0.2.7:1234", "NAME at 192.0.2.7:1234" or "client process 77".
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
        let told = |who: &str, times: u32| (0..times).filter(|_| log.admit(start, &who).is_some()).count();
        // From another port each time, and under other names.
        let noise: usize = (0..500)
            .map(|port| {
                told(&format!("client 192.0.2.1:{port}"), 1) + told(&format!("n{port} at 192.0.2.1:7"), 1)
            })
            .sum();
        assert_eq!(noise, 5);
        assert_eq!(told("client 192.0.2.2:1", 1), 1);
        assert_eq!(told("client [2001:db8::1]:1", 2), 2);
        // However many make noise, others are told of once.
        let noise: usize = (10..15).map(|process| told(&format!("client process {process}"), 100)).sum();
        assert_eq!(noise, 2 + 4);
        assert_eq!(told("client 192.0.2.3:1", 9), 1);
        assert_eq!(told("listener", 9), 1);
        let others: usize = (0..100).map(|host| told(&format!("client 198.51.100.{host}:1"), 3)).sum();
        assert_eq!(5 + 1 + 2 + 6 + 1 + 1 + others, 20, "the limit of all");
        assert_eq!(log.window.lock().sources.len(), 2 + 1 + 5 + 2 + others);
        // And all begins anew.
        assert!(log.admit(start + WINDOW, &"client 192.0.2.1:1").is_some_and(|kept_back| kept_back > 1000));
        assert_eq!(log.window.lock().sources.len(), 1);
    }
}
