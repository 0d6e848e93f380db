//! How long requests wait for a server that answers that it is busy.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Called with the reason of a wait. `false` ends the wait.
type Told = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// How long requests wait for a busy server, and who is informed. A server that cannot be reached is not
/// waited for in this way.
#[derive(Clone)]
pub struct WhileBusy {
    longest: Duration,
    told: Option<Told>,
}

impl Default for WhileBusy {
    /// The longest time that a user who waits for an image should be kept waiting.
    fn default() -> Self {
        Self { longest: Self::LONGEST, told: None }
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
    /// How often `told` is called during a wait.
    const TELL_EVERY: Duration = Duration::from_millis(500);

    /// A request fails at once.
    pub fn not_at_all() -> Self {
        Self { longest: Duration::ZERO, told: None }
    }

    /// A request waits as long as it takes. `told` is called about twice a second with the reason; `false`
    /// ends the wait.
    pub fn as_long_as(told: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        Self { longest: Duration::MAX, told: Some(Arc::new(told)) }
    }

    /// The same, but at most for this time.
    pub fn at_most(&self, longest: Duration) -> Self {
        Self { longest: self.longest.min(longest), told: self.told.clone() }
    }

    /// Whether a request keeps waiting after this time.
    pub fn goes_on(&self, waited: Duration) -> bool {
        waited <= self.longest && !self.longest.is_zero()
    }

    /// The deadline of a request that began to wait at `since`. `None`: it waits as long as it takes.
    pub fn until(&self, since: Instant) -> Option<Instant> {
        since.checked_add(self.longest)
    }

    /// Reports why a request waits. `false`: it must stop waiting.
    pub fn tell(&self, why: &str) -> bool {
        self.told.as_ref().is_none_or(|told| told(why))
    }

    /// Waits and reports the reason meanwhile. `false`: the wait was ended.
    pub(crate) async fn wait_later(&self, pause: Duration, why: &str) -> bool {
        let until = Instant::now() + pause;
        while self.tell(why) {
            let now = Instant::now();
            if now >= until {
                return true;
            }
            tokio::time::sleep(until.duration_since(now).min(Self::TELL_EVERY)).await;
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
        assert!(WhileBusy::default().goes_on(second * 30) && !WhileBusy::default().goes_on(second * 31));
        assert!(!WhileBusy::not_at_all().goes_on(Duration::ZERO));
        let long = WhileBusy::as_long_as(|_| true);
        assert!(long.goes_on(second * 1_000_000) && long.until(Instant::now()).is_none());
        assert!(!long.at_most(second).goes_on(second * 2));
    }
}
