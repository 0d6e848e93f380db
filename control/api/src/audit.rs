//! The audit: events as lines that form a hash chain. A line that is changed, removed or inserted afterwards does not fit
//! to the lines after it, so whoever has a later line can show that it was.
//!
//! A line is exactly `{"chain":"HASH","event":EVENT}`. HASH is 64 hexadecimal digits: the SHA-256 of the HASH of the line
//! before it, a line feed, and the bytes of EVENT. The first event of a history follows 64 zeros.
//!
//! The daemon's own events about machines (their states) are not in the audit: the history removes them early.

use std::fmt::Write;

use aws_lc_rs::digest::{SHA256, digest};
use serde::Deserialize;

use crate::Event;

/// What the first event of a history follows.
pub const BEGINNING: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// What is before the hash in a line.
const BEFORE_HASH: &str = r#"{"chain":""#;

/// What is between the hash and the event.
const BEFORE_EVENT: &str = r#"","event":"#;

/// Whether an event belongs to the audit.
pub fn has(caller: &str, subject: &str) -> bool {
    caller != "daemon" || !subject.starts_with("machine ")
}

/// The text of an event, of which the hash is calculated.
pub fn text_of(event: &Event) -> String {
    // Text keys, numbers, and values that came from JSON can be written.
    serde_json::to_string(event).unwrap_or_default()
}

/// The hash of an event that follows the event with the hash `previous`.
pub fn hash(previous: &str, text: &str) -> String {
    let mut out = String::with_capacity(BEGINNING.len());
    for byte in digest(&SHA256, format!("{previous}\n{text}").as_bytes()).as_ref() {
        let _ = write!(out, "{byte:02x}");
    }
    out
}

/// A line, without the line feed.
pub fn line(hash: &str, text: &str) -> String {
    format!("{BEFORE_HASH}{hash}{BEFORE_EVENT}{text}}}")
}

/// Why a line does not follow the line before it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuditError {
    /// It is none.
    #[error("line {number} is not a line of an audit log")]
    NotALine {
        /// Its number, from 1.
        number: u64,
    },
    /// The hash is that of something else.
    #[error(
        "event {event} does not follow event {after}: one of them was changed, or events between them were removed"
    )]
    Broken {
        /// The event whose hash is wrong.
        event: i64,
        /// The event before it.
        after: i64,
    },
}

/// Checks lines one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditCheck {
    /// The first event.
    pub first: Option<Seen>,
    /// The last event.
    pub last: Option<Seen>,
    /// Whether the first event is the first of its history. If not, its own hash could not be checked.
    pub is_whole: bool,
    /// How many lines were checked.
    pub lines: u64,
    hash: String,
    first_line: String,
}

/// An event that was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Seen {
    /// Its number.
    pub id: i64,
    /// Its time.
    pub at_ms: u64,
}

impl AuditCheck {
    /// Checks the next line. After an error, the check is as it was before.
    pub fn add(&mut self, line: &str) -> Result<(), AuditError> {
        let not_a_line = || AuditError::NotALine { number: self.lines.saturating_add(1) };
        let (found, text) = parts(line).ok_or_else(not_a_line)?;
        let seen: Seen = serde_json::from_str(text).map_err(|_| not_a_line())?;
        match self.last {
            None => self.is_whole = hash(BEGINNING, text) == found,
            Some(last) if hash(&self.hash, text) != found => {
                return Err(AuditError::Broken { event: seen.id, after: last.id });
            }
            Some(_) => {}
        }
        if self.first.is_none() {
            self.first = Some(seen);
            line.clone_into(&mut self.first_line);
        }
        self.last = Some(seen);
        found.clone_into(&mut self.hash);
        self.lines = self.lines.saturating_add(1);
        Ok(())
    }

    /// Whether a line is the last one that was checked.
    pub fn ends_with(&self, line: &str) -> bool {
        parts(line).is_some_and(|(hash, _)| hash == self.hash)
    }

    /// Whether a line of the daemon agrees with the first line that was checked. If the daemon has removed that event, there is nothing to
    /// compare.
    pub fn begins_like(&self, line: &str) -> bool {
        let mut of_daemon = Self::default();
        of_daemon.add(line).is_ok()
            && (of_daemon.first.map(|first| first.id) != self.first.map(|first| first.id)
                || of_daemon.first_line == self.first_line)
    }

    /// The hash of the last line. It is different if any line before it is.
    pub fn hash(&self) -> &str {
        &self.hash
    }
}

/// The hash and the event of a line.
fn parts(line: &str) -> Option<(&str, &str)> {
    let (hash, rest) = line.strip_prefix(BEFORE_HASH)?.split_at_checked(BEGINNING.len())?;
    let text = rest.strip_prefix(BEFORE_EVENT)?.strip_suffix('}')?;
    hash.bytes().all(|byte| byte.is_ascii_hexdigit()).then_some((hash, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(id: i64) -> Event {
        Event {
            id,
            at_ms: 1_000,
            caller: "uid 0 (root)".into(),
            subject: "image \"gr\u{f6}\u{df}e\"".into(),
            action: "promoted".into(),
            detail: String::new(),
            change: crate::Change::of("version", 1, 2),
        }
    }

    fn chain(count: i64) -> Vec<String> {
        let mut previous = BEGINNING.to_owned();
        let next = |id| {
            let text = text_of(&event(id));
            previous = hash(&previous, &text);
            line(&previous, &text)
        };
        (1..=count).map(next).collect()
    }

    fn check(lines: &[String]) -> Result<AuditCheck, AuditError> {
        let mut check = AuditCheck::default();
        lines.iter().try_for_each(|line| check.add(line))?;
        Ok(check)
    }

    #[test]
    fn a_line_is_as_it_is_documented() {
        let event = r#"{"id":1,"at_ms":1000,"caller":"uid 0 (root)","subject":"image \"GROESSE\"","action":"promoted","detail":"","change":{"before":{"version":1},"after":{"version":2}}}"#
            .replace("GROESSE", "gr\u{f6}\u{df}e");
        // By sha256sum.
        let hash = "6dcd751928976c1cb58d35f2442e7218606969c68eac8c7d61546a083852c930";
        assert_eq!(chain(1), [format!(r#"{{"chain":"{hash}","event":{event}}}"#)]);
    }

    #[test]
    fn whatever_is_done_to_a_line_is_found_at_the_next_one() {
        let lines = chain(5);
        let whole = check(&lines).unwrap();
        assert!(whole.is_whole && whole.lines == 5);
        assert_eq!(whole.last, Some(Seen { id: 5, at_ms: 1_000 }));
        assert_eq!(whole.hash(), &lines[4][10..74]);
        // A history whose oldest events are gone.
        let rest = check(&lines[2..]).unwrap();
        assert!(!rest.is_whole && rest.hash() == whole.hash());
        for at in 0..lines.len() - 1 {
            let mut changed = lines.clone();
            changed[at] = changed[at].replace("root", "anna");
            // The hash of a first line is checked only by the line before it, so it is taken for one in the middle.
            let found = check(&changed);
            assert!(found.as_ref().map_or(true, |check| at == 0 && !check.is_whole), "{at}: {found:?}");
            let mut removed = lines.clone();
            removed.remove(at);
            assert!(check(&removed).map_or(true, |check| at == 0 && !check.is_whole), "{at}");
            let mut swapped = lines.clone();
            swapped.swap(at, at + 1);
            assert!(check(&swapped).is_err(), "{at}");
        }
        let rehashed = {
            let text = text_of(&event(9));
            line(&hash(&lines[0][10..74], &text), &text)
        };
        let broken = check(&[lines[0].clone(), rehashed, lines[2].clone()]).unwrap_err();
        assert_eq!(broken, AuditError::Broken { event: 3, after: 9 });
    }

    #[test]
    fn other_lines_are_refused() {
        let good = chain(1).remove(0);
        for bad in ["", "{}", &good[1..], &good[..good.len() - 1], &good.replacen("\",\"", "\", \"", 1)] {
            assert_eq!(check(&[bad.to_owned()]), Err(AuditError::NotALine { number: 1 }), "{bad}");
        }
        assert!(!has("daemon", "machine a") && has("daemon", "image a") && has("uid 0", "machine a"));
    }
}
