//! Retries requests that failed temporarily. If Azure asks one request of a group to wait, all requests of the group
//! wait.
//!
//! | answer | reaction |
//! |---|---|
//! | 429 or 503 with `Retry-After` | all requests of the group wait for that time, at most 5 minutes |
//! | 429 without `Retry-After` | all requests of the group wait for 4 s, doubled with each attempt up to 2 minutes |
//! | 408, 500, 502, 503, 504, or no answer | only this request waits, for the same times |
//! | any other | the answer is returned to the caller |
//! | any, and less than a tenth of an allowance remains | all requests of the group wait for a second |
//!
//! Azure names what remains of its allowances in `x-ms-ratelimit-remaining-resource`. Their size is not known, so the
//! largest figure that was seen counts as the size.
//!
//! A random part of up to a quarter is added to each wait, so that several programs do not retry at the same instant.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::StatusCode;

use crate::clock::Clock;
use crate::error::{AzureError, AzureErrorKind};
use crate::http::{Answer, SendError};

/// The parameters of retries.
#[derive(Clone, Debug)]
pub struct PacerOptions {
    /// The first wait without `Retry-After`.
    pub first_wait: Duration,
    /// The longest wait without `Retry-After`.
    pub longest_wait: Duration,
    /// The longest wait that Azure may ask for.
    pub retry_after_max: Duration,
    /// The most attempts for one request.
    pub attempts: u32,
    /// The seed of the random parts of waits.
    pub seed: u64,
}

impl PacerOptions {
    /// The values that Azure's documentation recommends.
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

/// The pacer of one group of requests, such as those of a subscription in a region.
#[derive(Debug)]
pub struct Pacer {
    options: PacerOptions,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// No request of the group is sent before this time.
    not_before: Duration,
    /// The state of the random number generator.
    random: u64,
    /// The largest remainder of each of Azure's allowances.
    allowances: HashMap<String, u64>,
}

/// The header that names what remains of allowances, such as `Microsoft.Compute/PutVM3Min;237,..`.
const REMAINING_HEADER: &str = "x-ms-ratelimit-remaining-resource";

/// The most allowances that are watched. Azure has about ten for machines.
const ALLOWANCES_MAX: usize = 64;

/// The wait after an answer with little left of an allowance.
const SLOW_WAIT: Duration = Duration::from_secs(1);

impl Pacer {
    /// A pacer for a group that has sent no request yet.
    pub fn new(options: PacerOptions, clock: Arc<dyn Clock>) -> Self {
        let state = State { not_before: Duration::ZERO, random: options.seed, allowances: HashMap::new() };
        Self { options, clock, state: Mutex::new(state) }
    }

    /// Sends a request until its answer is not a temporary failure. `action` is the beginning of the error message.
    ///
    /// The request must have the same effect if it is executed twice, because it is repeated after a lost answer.
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
            if answered.as_ref().is_ok_and(|answer| self.is_low(answer)) {
                self.hold(SLOW_WAIT);
            }
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
                // Even if this request is given up, because Azure has asked the whole group to wait.
                self.hold(delay);
            }
            if attempt >= self.options.attempts {
                let kind = if may_be_done { AzureErrorKind::Unknown } else { AzureErrorKind::Unavailable };
                let times = if attempt == 1 { "once".to_owned() } else { format!("{attempt} times") };
                let what = format!("{action}: tried {times}; the last attempt: {why}");
                let advice = "try again later; completed steps are not repeated";
                return Err(AzureError::new(kind, what).advise(advice));
            }
            if !holds_all {
                self.clock.sleep(delay).await;
            }
        }
    }

    /// The wait after this attempt. `asked`: the wait that Azure asks for.
    fn delay(&self, attempt: u32, asked: Option<Duration>) -> Duration {
        let delay = match asked {
            Some(asked) => asked.min(self.options.retry_after_max),
            None => {
                let doubled = 2u32.saturating_pow(attempt.saturating_sub(1));
                self.options.first_wait.saturating_mul(doubled).min(self.options.longest_wait)
            }
        };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // Knuth's linear congruential generator; its upper bits are used.
        state.random =
            state.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let part = u32::try_from(state.random >> 48).unwrap_or_default();
        delay + delay.saturating_mul(part) / (4 << 16)
    }

    /// Whether less than a tenth of an allowance remains.
    fn is_low(&self, answer: &Answer) -> bool {
        let named = answer.header(REMAINING_HEADER).unwrap_or_default().split(',');
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut is_low = false;
        for (name, left) in named.filter_map(|it| it.trim().split_once(';')) {
            let Ok(left) = left.parse::<u64>() else { continue };
            if state.allowances.len() >= ALLOWANCES_MAX && !state.allowances.contains_key(name) {
                continue;
            }
            let most = state.allowances.entry(name.to_owned()).or_default();
            *most = left.max(*most);
            is_low |= left < *most / 10;
        }
        is_low
    }

    fn hold(&self, delay: Duration) {
        let until = self.clock.now().saturating_add(delay);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.not_before = state.not_before.max(until);
    }

    /// Waits until the group may send. Another request may prolong the wait meanwhile, so the time is checked again
    /// afterwards.
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

    /// A clock whose waits end at once; the clock advances by the wait.
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

    /// Answers with these in turn, and then always with the last one. Returns the result, and the second of each
    /// request.
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

    /// Each gap may be longer by a quarter.
    fn assert_gaps(times: &[u64], expected: &[u64]) {
        let gaps: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(gaps.len(), expected.len(), "{times:?}");
        for (gap, least) in gaps.iter().zip(expected) {
            assert!((*least..=least + least / 4 + 1).contains(gap), "{gaps:?} instead of {expected:?}");
        }
    }

    #[tokio::test]
    async fn waits_follow_retry_after_or_are_doubled() {
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
        // A refused request is not retried.
        assert_eq!(run(&pacer(), &[|| answer(403, None)]).await, (Ok(403), vec![0]));
    }

    #[tokio::test]
    async fn requests_slow_down_before_an_allowance_is_used_up() {
        let left = |left: &'static str| {
            let mut answer = answer(200, None).unwrap();
            answer.headers.insert(REMAINING_HEADER, left.parse().unwrap());
            Ok(answer)
        };
        let both = pacer();
        let plenty: Answering = || answer(200, None);
        for (what, waits) in [
            ("Microsoft.Compute/PutVM3Min;100,Microsoft.Compute/PutVM30Min;1000", false),
            ("Microsoft.Compute/PutVM3Min;10, Microsoft.Compute/PutVM30Min;900", false),
            ("Microsoft.Compute/PutVM3Min;9,Microsoft.Compute/PutVM30Min;900", true),
            ("Microsoft.Compute/PutVM3Min;50,Microsoft.Compute/PutVM30Min;99", true),
            ("nonsense;,;;1,a;b", false),
        ] {
            let before = both.1.now();
            both.0.send("cannot try", || async { left(what) }).await.unwrap();
            run(&both, &[plenty]).await.0.unwrap();
            assert_eq!(both.1.now() > before, waits, "{what}");
        }
    }

    #[tokio::test]
    async fn one_request_that_is_throttled_makes_all_wait() {
        let (mut pacer, clock) = pacer();
        pacer.options.attempts = 1;
        let both = (pacer, clock);
        assert_eq!(run(&both, &[|| answer(429, Some("40"))]).await.1, [0]);
        let (sent, times) = run(&both, &[|| answer(200, None)]).await;
        assert!(sent == Ok(200) && times[0] >= 40, "{times:?}");
        // A server error of one request does not delay the others.
        assert_eq!(run(&both, &[|| answer(500, None)]).await.1, times);
        assert_eq!(run(&both, &[|| answer(200, None)]).await.1, times);
    }
}
