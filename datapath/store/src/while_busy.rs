//! How long a request waits for a server that answers that it is busy, and who is informed about the wait.
//! It does not apply to servers that cannot be reached: for those see `retrying`.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Called with the reason of a wait. `false` ends the wait.
type OnWait = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// How long requests wait for a busy server, and who is informed. It does not apply to servers that cannot be
/// reached.
#[derive(Clone)]
pub struct WhileBusy {
    longest: Duration,
    on_wait: Option<OnWait>,
}

impl Default for WhileBusy {
    /// The longest time that a user who waits for an image should be kept waiting.
    fn default() -> Self {
        Self { longest: Self::LONGEST, on_wait: None }
    }
}

impl fmt::Debug for WhileBusy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WhileBusy").field("longest", &self.longest).finish_non_exhaustive()
    }
}

impl WhileBusy {
    /// The longest wait of one request, unless something else is chosen.
    pub const LONGEST: Duration = Duration::from_secs(30);
    /// How often `on_wait` is called during a wait.
    const REPORT_INTERVAL: Duration = Duration::from_millis(500);

    /// Requests fail at once.
    pub fn not_at_all() -> Self {
        Self { longest: Duration::ZERO, on_wait: None }
    }

    /// Requests wait without a limit. `on_wait` is called about twice a second with the reason; `false` ends
    /// the wait.
    pub fn as_long_as(on_wait: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        Self { longest: Duration::MAX, on_wait: Some(Arc::new(on_wait)) }
    }

    /// A copy of this policy in which requests wait at most for this time.
    pub fn at_most(&self, longest: Duration) -> Self {
        Self { longest: self.longest.min(longest), on_wait: self.on_wait.clone() }
    }

    /// Whether a request keeps waiting after it has waited for this time.
    pub fn allows_waiting(&self, waited: Duration) -> bool {
        waited <= self.longest && !self.longest.is_zero()
    }

    /// The deadline of a request that began to wait at `since`. `None`: there is no limit.
    pub fn until(&self, since: Instant) -> Option<Instant> {
        since.checked_add(self.longest)
    }

    /// Reports why a request waits. `false`: it must stop waiting.
    pub fn report(&self, why: &str) -> bool {
        self.on_wait.as_ref().is_none_or(|on_wait| on_wait(why))
    }

    /// Waits for `pause`, and reports the reason about twice a second. `false`: a report ended the wait.
    pub(crate) async fn pause_and_report(&self, pause: Duration, why: &str) -> bool {
        let until = Instant::now() + pause;
        while self.report(why) {
            let now = Instant::now();
            if now >= until {
                return true;
            }
            tokio::time::sleep(until.duration_since(now).min(Self::REPORT_INTERVAL)).await;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_waits_for_a_busy_server_up_to_its_limit() {
        let second = Duration::from_secs(1);
        assert!(
            WhileBusy::default().allows_waiting(second * 30)
                && !WhileBusy::default().allows_waiting(second * 31)
        );
        assert!(!WhileBusy::not_at_all().allows_waiting(Duration::ZERO));
        let long = WhileBusy::as_long_as(|_| true);
        assert!(long.allows_waiting(second * 1_000_000) && long.until(Instant::now()).is_none());
        assert!(!long.at_most(second).allows_waiting(second * 2));
    }
}
