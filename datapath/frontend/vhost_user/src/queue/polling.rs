//! How long a queue's thread looks for requests before it sleeps.
//!
//! A kick and a wake-up cost more than a request that is served from RAM, so a busy queue looks for a while. How
//! long is learnt from how long the queue was idle each time:
//!
//! | the queue was idle | the next window |
//! |---|---|
//! | no longer than the window: looking paid off | stays |
//! | longer than the window, but no longer than the longest one | doubles, from 4 us |
//! | longer than the longest window | none: an idle queue sleeps at once |

use std::time::Duration;

/// The first window after none.
const SHORTEST: Duration = Duration::from_micros(4);

/// The window of one queue.
#[derive(Debug)]
pub(crate) struct Polling {
    window: Duration,
    longest: Duration,
}

impl Polling {
    /// Starts without a window. `longest` zero never looks.
    pub(crate) fn new(longest: Duration) -> Self {
        Self { window: Duration::ZERO, longest }
    }

    /// How long to look now.
    pub(crate) fn window(&self) -> Duration {
        self.window
    }

    /// Learns from one idle time, from the last request done to the next one found.
    pub(crate) fn was_idle(&mut self, idle: Duration) {
        if idle <= self.window {
            return;
        }
        self.window = if idle > self.longest {
            Duration::ZERO
        } else {
            self.window.saturating_mul(2).max(SHORTEST).min(self.longest)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_grows_to_its_limit_while_it_pays_off_and_goes_when_idle() {
        let us = Duration::from_micros;
        let mut polling = Polling::new(us(32));
        let mut windows = Vec::new();
        for idle in [20, 20, 20, 20, 20, 30, 32, 5000, 5000] {
            polling.was_idle(us(idle));
            windows.push(polling.window());
        }
        assert_eq!(windows, [4, 8, 16, 32, 32, 32, 32, 0, 0].map(us));
        let mut never = Polling::new(Duration::ZERO);
        never.was_idle(us(1));
        assert_eq!(never.window(), Duration::ZERO);
    }
}
