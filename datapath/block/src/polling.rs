//! How long a front-end's thread looks for requests before it sleeps.
//!
//! To be woken costs many times what a request costs that is served from RAM, so the thread of a busy queue or connection
//! looks for a while first. Whether that pays off is learnt from how long nothing came each time:
//!
//! | the thread | nothing came for | then |
//! |---|---|---|
//! | looked, and found something | | it goes on looking, and earlier failures are forgotten |
//! | looked in vain | | it sleeps at once for the next 1, 3, 7 .. 255 times: each failure in a row doubles them |
//! | slept at once | so shortly that looking might have found it | it looks the next time, unless it still has to sleep |
//! | slept at once | longer | it sleeps at once again: an idle machine costs nothing |
//!
//! What a thread that slept sees as idle time has its own wake-up in it, which is often longer than the window: without
//! room for that, a queue that once slept would never look again.

use std::time::{Duration, Instant};

/// What a wake-up may take, on a host that is itself a virtual machine.
const WAKE_UP: Duration = Duration::from_micros(60);

/// Most sleeps in a row after a failure.
const MOST_SLEEPS: u32 = 255;

/// What the thread of one queue or connection has learnt.
#[derive(Debug)]
pub struct Polling {
    window: Duration,
    longest: Duration,
    /// Sleeps still to be done after failures.
    sleeps: u32,
    /// Sleeps that the last failure cost.
    penalty: u32,
}

impl Polling {
    /// Starts without looking. `longest` zero never looks.
    pub fn new(longest: Duration) -> Self {
        Self { window: Duration::ZERO, longest, sleeps: 0, penalty: 0 }
    }

    /// How long to look now.
    pub fn window(&self) -> Duration {
        self.window
    }

    /// Receives with `receive`, which is told whether to wait: without waiting for as long as looking pays off, then waiting.
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
            // The peer may need this very processor to go on.
            std::thread::yield_now();
        }
        let received = receive(true);
        self.slept(started.elapsed());
        received
    }

    /// Looking has found something.
    pub fn found(&mut self) {
        self.penalty = 0;
    }

    /// The thread slept, and something came after this time, the window included.
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
        assert_eq!(receive(&mut polling, 3), [false; 3], "what came soon is looked for the next time");
        let mut never = Polling::new(Duration::ZERO);
        assert_eq!(receive(&mut never, 1), [true]);
        assert_eq!(receive(&mut never, 1), [true]);
    }

    /// Of a thousand requests that always come a little too late, how many are watched for in vain?
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
