//! Recognises the answer of a busy server that says when to retry: status 503 or 429 with `Retry-After`.
//! Only parses: `bucket` waits and retries.

use std::fmt;
use std::time::Duration;

/// The longest time to wait before the request is sent again.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// The wait if `Retry-After` is a date. Dates are not read, because clocks differ.
const WAIT_FOR_A_DATE: Duration = Duration::from_millis(500);

/// The answer of a busy server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Busy {
    pub(super) status: u16,
    /// The time after which to retry.
    pub(super) wait: Duration,
    /// The body.
    pub(super) body: String,
}

impl Busy {
    /// Parses an answer with this status and this header. `None`: the server is not busy, or does not say
    /// when to retry.
    pub(super) fn of(status: u16, retry_after: Option<&str>, body: &[u8]) -> Option<Self> {
        let retry_after = retry_after.filter(|_| matches!(status, 429 | 503))?;
        let wait = retry_after.trim().parse().map_or(WAIT_FOR_A_DATE, Duration::from_secs);
        Some(Self { status, wait: wait.min(WAIT_MAX), body: String::from_utf8_lossy(body).into_owned() })
    }
}

impl fmt::Display for Busy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "status code: {}: {}", self.status, self.body)
    }
}

impl std::error::Error for Busy {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_answer_with_retry_after_is_busy() {
        let wait_ms =
            |status, retry_after| Busy::of(status, retry_after, b"").map(|busy| busy.wait.as_millis());
        assert_eq!(wait_ms(503, Some("2")), Some(2000));
        assert_eq!(wait_ms(429, Some(" 0 ")), Some(0));
        assert_eq!(wait_ms(503, Some("86400")), Some(30_000));
        assert_eq!(wait_ms(503, Some("Mon, 23 Nov 2026 03:00:00 GMT")), Some(500));
        assert_eq!((wait_ms(503, None), wait_ms(500, Some("2"))), (None, None));
    }
}
