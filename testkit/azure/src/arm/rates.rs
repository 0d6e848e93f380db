//! Azure's limits on requests for virtual machines: token buckets for each subscription and for each machine, from
//! Microsoft's page "Compute throttling limits".

use std::collections::HashMap;
use std::time::Duration;

/// Requests that share limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Class {
    Put,
    Delete,
    /// Actions of a machine.
    Update,
    Get,
    List,
    Operation,
}

impl Class {
    /// Tokens a minute, and tokens of a full bucket: of the subscription and of one machine.
    const fn limits(self) -> ((f64, f64), Option<(f64, f64)>) {
        match self {
            Self::Put | Self::Delete | Self::Update => ((500.0, 1500.0), Some((4.0, 12.0))),
            Self::Get => ((8000.0, 24_000.0), Some((12.0, 36.0))),
            Self::List => ((300.0, 900.0), None),
            Self::Operation => ((5000.0, 15_000.0), Some((15.0, 45.0))),
        }
    }
}

#[derive(Debug)]
struct Bucket {
    tokens: f64,
    at: Duration,
}

#[derive(Debug, Default)]
pub(super) struct Rates {
    buckets: HashMap<(Class, String), Bucket>,
}

impl Rates {
    /// Takes a token of the subscription and of the machine. Returns the time until both have a token if one has not.
    pub(super) fn take(&mut self, now: Duration, class: Class, machine: &str) -> Result<(), Duration> {
        let (all, one) = class.limits();
        let mut wait = self.missing(now, class, "", all);
        if let Some(one) = one {
            wait = wait.max(self.missing(now, class, machine, one));
        }
        if !wait.is_zero() {
            return Err(wait);
        }
        for name in ["", machine] {
            if let Some(bucket) = self.buckets.get_mut(&(class, name.to_owned())) {
                bucket.tokens -= 1.0;
            }
        }
        Ok(())
    }

    /// Fills the bucket, and returns the time until it has a token.
    fn missing(&mut self, now: Duration, class: Class, name: &str, limits: (f64, f64)) -> Duration {
        let (a_minute, full) = limits;
        let bucket = self.buckets.entry((class, name.to_owned())).or_insert(Bucket { tokens: full, at: now });
        let passed_s = now.saturating_sub(bucket.at).as_secs_f64();
        bucket.tokens = (bucket.tokens + passed_s * a_minute / 60.0).min(full);
        bucket.at = now;
        if bucket.tokens >= 1.0 {
            return Duration::ZERO;
        }
        Duration::from_secs_f64((1.0 - bucket.tokens) * 60.0 / a_minute)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_machine_has_fewer_tokens_than_the_subscription() {
        let mut rates = Rates::default();
        let now = Duration::from_secs(100);
        for _ in 0..12 {
            assert_eq!(rates.take(now, Class::Put, "a"), Ok(()));
        }
        assert_eq!(rates.take(now, Class::Put, "a"), Err(Duration::from_secs(15)));
        assert_eq!(rates.take(now, Class::Put, "b"), Ok(()));
        let later = now + Duration::from_secs(15);
        assert_eq!(rates.take(later, Class::Put, "a"), Ok(()));
        // The bucket of the subscription was full again.
        for number in 0..1499 {
            assert_eq!(rates.take(later, Class::Put, &format!("machine-{number}")), Ok(()), "{number}");
        }
        assert!(rates.take(later, Class::Put, "another").is_err());
    }
}
