//! Decides how long a front-end's thread polls for requests before it sleeps.
//!
//! Waking a thread costs many times what a request served from RAM costs, so the thread of a busy queue or
//! connection polls for a while first. Whether that pays off is learnt from earlier idle times:
//!
//! | the thread | idle time | next time |
//! |---|---|---|
//! | polled, and found a request | | it polls again, and earlier failures are forgotten |
//! | polled without success | | it sleeps at once for the next 1, 3, 7 .. 255 times: each failure in a row doubles the number |
//! | slept at once | so short that polling might have found the request | it polls, unless sleeps remain from an earlier failure |
//! | slept at once | longer | it sleeps at once: an idle machine costs no processor time |
//!
//! The idle time that a sleeping thread measures includes its own wake-up, which is often longer than the
//! polling window. Without an allowance for that, a queue that once slept would never poll again.

use std::time::{Duration, Instant};

/// The allowance for a wake-up, on a host that is itself a virtual machine.
const WAKE_UP: Duration = Duration::from_micros(60);

/// The most sleeps in a row after a failure.
const MOST_SLEEPS: u32 = 255;

/// What was learnt about one queue or connection.
#[derive(Debug)]
pub struct Polling {
    window: Duration,
    longest: Duration,
    /// Sleeps that remain after failures.
    sleeps: u32,
    /// Number of sleeps set by the last failure.
    penalty: u32,
}

impl Polling {
    /// Starts without polling. A `longest` of zero disables polling.
    pub fn new(longest: Duration) -> Self {
        Self { window: Duration::ZERO, longest, sleeps: 0, penalty: 0 }
    }

    /// How long to poll now.
    pub fn window(&self) -> Duration {
        self.window
    }

    /// Receives with `receive`, whose argument says whether to wait: first polls without waiting, for as long
    /// as that pays off, then waits.
    pub fn receive<T, E>(
        &mut self,
        mut receive: impl FnMut(bool) -> Result<T, E>,
        is_something: impl Fn(&T) -> bool,
    ) -> Result<T, E> {
        let started = Instant::now();
        while started.elapsed() < self.window {
            let received = receive(false)?;
            if is_something(&received) {
                self.found();
                return Ok(received);
            }
            // The peer may need this processor.
            std::thread::yield_now();
        }
        let received = receive(true);
        self.slept(started.elapsed());
        received
    }

    /// Polling found a request.
    pub fn found(&mut self) {
        self.penalty = 0;
    }

    /// The thread slept, and a request came after `idle`, which includes the time of polling.
    pub fn slept(&mut self, idle: Duration) {
        if !self.window.is_zero() {
            self.window = Duration::ZERO;
            self.penalty = self.penalty.saturating_mul(2).saturating_add(1).min(MOST_SLEEPS);
            self.sleeps = self.penalty;
        } else if self.sleeps > 0 {
            self.sleeps = self.sleeps.saturating_sub(1);
        } else if idle <= self.longest.saturating_add(WAKE_UP) {
            self.window = self.longest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST: Duration = Duration::from_micros(32);
    const SHORT: Duration = Duration::from_micros(50);
    const LONG: Duration = Duration::from_millis(5);

    #[test]
    fn a_busy_queue_is_watched_and_an_idle_one_is_not() {
        let mut polling = Polling::new(LONGEST);
        polling.slept(LONG);
        assert!(polling.window().is_zero());
        polling.slept(SHORT);
        assert_eq!(polling.window(), LONGEST);
        polling.found();
        assert_eq!(polling.window(), LONGEST);
        for _ in 0..100 {
            polling.slept(LONG);
            assert!(polling.window().is_zero());
        }
        let mut never = Polling::new(Duration::ZERO);
        never.slept(Duration::from_micros(1));
        assert!(never.window().is_zero());
    }

    #[test]
    fn it_waits_only_when_nothing_was_found() {
        let mut polling = Polling::new(Duration::from_secs(60));
        let mut asked = Vec::new();
        let mut receive = |polling: &mut Polling, at: usize| {
            asked.clear();
            let received = polling.receive(
                |wait| {
                    asked.push(wait);
                    Ok::<_, ()>((asked.len() == at).then_some(at))
                },
                Option::is_some,
            );
            assert_eq!(received, Ok(Some(at)));
            asked.clone()
        };
        assert_eq!(receive(&mut polling, 1), [true], "at first it waits");
        assert_eq!(receive(&mut polling, 3), [false; 3], "after a short idle time it polls");
        let mut never = Polling::new(Duration::ZERO);
        assert_eq!(receive(&mut never, 1), [true]);
        assert_eq!(receive(&mut never, 1), [true]);
    }

    /// Counts the useless polls of a thousand requests that always come a little too late.
    #[test]
    fn useless_polling_becomes_rare_and_success_resets_it() {
        let mut polling = Polling::new(LONGEST);
        let mut vain = 0;
        for _ in 0..1000 {
            vain += u32::from(!polling.window().is_zero());
            polling.slept(SHORT);
        }
        assert!((5..15).contains(&vain), "{vain} times");
        while polling.window().is_zero() {
            polling.slept(SHORT);
        }
        polling.found();
        polling.slept(LONG);
        polling.slept(SHORT);
        polling.slept(SHORT);
        assert_eq!(polling.window(), LONGEST, "one sleep after the first failure");
    }
}
