//! Repeats requests that Azure could not answer, and makes all requests of a group wait while Azure asks one of them to wait.
//!
//! | answer | what happens |
//! |---|---|
//! | 429, 503 with `Retry-After` | all requests of the group wait so long, at most 5 minutes |
//! | 429 without it | all wait: 4 s, doubled with each time up to 2 minutes |
//! | 408, 500, 502, 503, 504, no answer | this request waits as long, the others go on |
//! | anything else | is given to the caller |
//!
//! Up to a quarter is added to a wait, so that several programs do not come back at one instant.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::StatusCode;

use crate::clock::Clock;
use crate::error::{AzureError, AzureErrorKind};
use crate::http::{Answer, SendError};

/// How requests are repeated.
#[derive(Clone, Debug)]
pub struct PacerOptions {
    /// The first wait without `Retry-After`.
    pub first_wait: Duration,
    /// The longest wait without `Retry-After`.
    pub longest_wait: Duration,
    /// The longest wait that Azure may ask for.
    pub retry_after_max: Duration,
    /// How often a request is sent.
    pub attempts: u32,
    /// The seed of the random numbers.
    pub seed: u64,
}

impl PacerOptions {
    /// What Azure's documents advise.
    pub const fn new(seed: u64) -> Self {
        Self {
            first_wait: Duration::from_secs(4),
            longest_wait: Duration::from_secs(120),
            retry_after_max: Duration::from_secs(300),
            attempts: 8,
            seed,
        }
    }
}

/// Of one group of requests, such as those of a subscription in a region.
#[derive(Debug)]
pub struct Pacer {
    options: PacerOptions,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Nothing is sent before.
    not_before: Duration,
    /// The next random number comes from this one.
    random: u64,
}

impl Pacer {
    /// A pacer of a group that has not sent anything yet.
    pub fn new(options: PacerOptions, clock: Arc<dyn Clock>) -> Self {
        let state = State { not_before: Duration::ZERO, random: options.seed };
        Self { options, clock, state: Mutex::new(state) }
    }

    /// Sends a request until there is an answer that is not to be repeated. `action` begins the error.
    ///
    /// The request must have the same effect whether it is carried out once or twice, because it is repeated after a lost
    /// answer.
    pub async fn send<F>(&self, action: &str, mut request: impl FnMut() -> F) -> Result<Answer, AzureError>
    where
        F: Future<Output = Result<Answer, SendError>>,
    {
        let mut may_be_done = false;
        let mut attempt = 0;
        loop {
            self.wait().await;
            let answered = request().await;
            attempt += 1;
            let (why, asked) = match &answered {
                Ok(answer) if !is_transient(answer.status) => return Ok(answer.clone()),
                Ok(answer) => (format!("Azure answers {}", answer.status), answer.retry_after()),
                Err(error) => {
                    may_be_done |= error.may_be_done;
                    (error.why.clone(), None)
                }
            };
            let is_throttled = answered.is_ok_and(|answer| answer.status == StatusCode::TOO_MANY_REQUESTS);
            let holds_all = is_throttled || asked.is_some();
            let delay = self.delay(attempt, asked);
            if holds_all {
                // Also if this request is given up: Azure has asked all to wait.
                self.hold(delay);
            }
            if attempt >= self.options.attempts {
                let kind = if may_be_done { AzureErrorKind::Unknown } else { AzureErrorKind::Unavailable };
                let times = if attempt == 1 { "once".to_owned() } else { format!("{attempt} times") };
                let what = format!("{action}: tried {times}; the last time: {why}");
                let advice = "try again later; what was done is not done again";
                return Err(AzureError::new(kind, what).advise(advice));
            }
            if !holds_all {
                self.clock.sleep(delay).await;
            }
        }
    }

    /// How long to wait after the attempt of this number.
    fn delay(&self, attempt: u32, asked: Option<Duration>) -> Duration {
        let delay = match asked {
            Some(asked) => asked.min(self.options.retry_after_max),
            None => {
                let doubled = 2u32.saturating_pow(attempt.saturating_sub(1));
                self.options.first_wait.saturating_mul(doubled).min(self.options.longest_wait)
            }
        };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // Knuth's generator, of which the upper bits are taken.
        state.random =
            state.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let part = u32::try_from(state.random >> 48).unwrap_or_default();
        delay + delay.saturating_mul(part) / (4 << 16)
    }

    fn hold(&self, delay: Duration) {
        let until = self.clock.now().saturating_add(delay);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.not_before = state.not_before.max(until);
    }

    /// Waits until the group may send. Another request may be told to wait meanwhile, so it looks again.
    async fn wait(&self) {
        loop {
            let until = self.state.lock().unwrap_or_else(PoisonError::into_inner).not_before;
            match until.checked_sub(self.clock.now()) {
                Some(left) if !left.is_zero() => self.clock.sleep(left).await,
                _ => return,
            }
        }
    }
}

fn is_transient(status: StatusCode) -> bool {
    matches!(status.as_u16(), 408 | 429 | 500 | 502 | 503 | 504)
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use bytes::Bytes;
    use hyper::HeaderMap;

    use super::*;

    /// A wait is over at once, and the clock shows that it was.
    #[derive(Debug, Default)]
    struct Fast(Mutex<Duration>);

    #[async_trait]
    impl Clock for Fast {
        fn now(&self) -> Duration {
            *self.0.lock().unwrap()
        }

        async fn sleep(&self, duration: Duration) {
            *self.0.lock().unwrap() += duration;
        }
    }

    fn pacer() -> (Pacer, Arc<Fast>) {
        let clock = Arc::new(Fast::default());
        (Pacer::new(PacerOptions::new(1), clock.clone()), clock)
    }

    fn answer(status: u16, retry_after: Option<&str>) -> Result<Answer, SendError> {
        let mut headers = HeaderMap::new();
        if let Some(text) = retry_after {
            headers.insert("retry-after", text.parse().unwrap());
        }
        Ok(Answer { status: StatusCode::from_u16(status).unwrap(), headers, body: Bytes::new() })
    }

    type Answering = fn() -> Result<Answer, SendError>;

    /// Gives these answers, the last of them from then on. The result, and the seconds at which each was asked for.
    async fn run(
        (pacer, clock): &(Pacer, Arc<Fast>),
        answers: &[Answering],
    ) -> (Result<u16, AzureErrorKind>, Vec<u64>) {
        let mut asked = Vec::new();
        let sent = pacer.send("cannot try", || {
            let answer = answers.get(asked.len()).or(answers.last()).unwrap()();
            asked.push(clock.now().as_secs());
            async { answer }
        });
        let sent = sent.await.map(|answer| answer.status.as_u16()).map_err(|error| error.kind());
        (sent, asked)
    }

    /// Up to a quarter is added to each.
    fn assert_gaps(times: &[u64], expected: &[u64]) {
        let gaps: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(gaps.len(), expected.len(), "{times:?}");
        for (gap, least) in gaps.iter().zip(expected) {
            assert!((*least..=least + least / 4 + 1).contains(gap), "{gaps:?} instead of {expected:?}");
        }
    }

    #[tokio::test]
    async fn waits_are_those_that_azure_asks_for_or_doubled() {
        let asked: [Answering; 3] =
            [|| answer(429, Some("7")), || answer(503, Some("86400")), || answer(201, None)];
        let (sent, times) = run(&pacer(), &asked).await;
        assert_eq!(sent, Ok(201));
        assert_gaps(&times, &[7, 300]);
        for status in [|| answer(429, None), || answer(500, None)] {
            let (sent, times) = run(&pacer(), &[status]).await;
            assert_eq!(sent, Err(AzureErrorKind::Unavailable));
            assert_gaps(&times, &[4, 8, 16, 32, 64, 120, 120]);
        }
    }

    #[tokio::test]
    async fn an_answer_that_was_lost_is_unknown() {
        let lost = || Err(SendError { may_be_done: true, why: "cut off".to_owned() });
        let refused = || Err(SendError { may_be_done: false, why: "nobody listens".to_owned() });
        assert_eq!(run(&pacer(), &[lost, refused]).await.0, Err(AzureErrorKind::Unknown));
        assert_eq!(run(&pacer(), &[refused]).await.0, Err(AzureErrorKind::Unavailable));
        // A refused request is not repeated.
        assert_eq!(run(&pacer(), &[|| answer(403, None)]).await, (Ok(403), vec![0]));
    }

    #[tokio::test]
    async fn one_request_that_is_throttled_makes_all_wait() {
        let (mut pacer, clock) = pacer();
        pacer.options.attempts = 1;
        let both = (pacer, clock);
        assert_eq!(run(&both, &[|| answer(429, Some("40"))]).await.1, [0]);
        let (sent, times) = run(&both, &[|| answer(200, None)]).await;
        assert!(sent == Ok(200) && times[0] >= 40, "{times:?}");
        // A server that has failed once does not stop the others.
        assert_eq!(run(&both, &[|| answer(500, None)]).await.1, times);
        assert_eq!(run(&both, &[|| answer(200, None)]).await.1, times);
    }
}
