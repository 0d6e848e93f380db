//! The latest answers of a guest agent (addresses, users who are logged in), and when the agent may be asked again. Each `Active` has
//! one; this file asks nobody itself.

use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The pause after the agent reported no address. It doubles each time.
const FIRST_PAUSE: Duration = Duration::from_secs(5);
const AGAIN_LONGEST: Duration = Duration::from_secs(300);

/// How often the agent is asked whether users have logged off.
const USERS_INTERVAL: Duration = Duration::from_secs(5);

/// The latest answers of a guest agent.
#[derive(Debug, Default)]
pub(crate) struct GuestFacts(Mutex<Facts>);

#[derive(Debug, Default)]
struct Facts {
    addresses: Option<Vec<IpAddr>>,
    /// When the agent may be asked for addresses again.
    next_ask: Option<Instant>,
    pause: Option<Duration>,
    next_users: Option<Instant>,
    /// A question about users has no answer yet.
    asks_users: bool,
    was_logged_in: bool,
    /// Whether its last answer was that nobody is logged in.
    saw_nobody: bool,
}

impl GuestFacts {
    fn lock(&self) -> MutexGuard<'_, Facts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The guest's addresses, if the agent has reported any.
    pub(crate) fn addresses(&self) -> Option<Vec<IpAddr>> {
        self.lock().addresses.clone()
    }

    /// Whether to ask for addresses now. After `true`, the caller must ask.
    pub(crate) fn may_ask_addresses(&self) -> bool {
        let mut facts = self.lock();
        let now = Instant::now();
        if facts.addresses.is_some() || facts.next_ask.is_some_and(|next| next > now) {
            return false;
        }
        let pause = facts.pause.map_or(FIRST_PAUSE, |pause| (pause * 2).min(AGAIN_LONGEST));
        facts.pause = Some(pause);
        facts.next_ask = Some(now + pause);
        true
    }

    /// Records the reported addresses. If there are none, the agent is asked again later.
    pub(crate) fn set_addresses(&self, addresses: Vec<IpAddr>) {
        if !addresses.is_empty() {
            self.lock().addresses = Some(addresses);
        }
    }

    /// Records that the agent did not answer.
    pub(crate) fn no_answer(&self) {
        self.lock().addresses = None;
    }

    /// Whether to ask now who is logged in. After `true`, the caller must ask, and then call [`GuestFacts::users_asked`].
    pub(crate) fn may_ask_users(&self) -> bool {
        let mut facts = self.lock();
        if facts.asks_users || facts.next_users.is_some_and(|next| next > Instant::now()) {
            return false;
        }
        facts.asks_users = true;
        true
    }

    /// The question about users has been answered, or was given up.
    pub(crate) fn users_asked(&self) {
        let mut facts = self.lock();
        facts.asks_users = false;
        facts.next_users = Some(Instant::now() + USERS_INTERVAL);
    }

    /// Records the number of users who are logged in. Returns whether the last one has logged off, which needs two such
    /// answers in a row; further ones say it again.
    pub(crate) fn saw_users(&self, count: usize) -> bool {
        let mut facts = self.lock();
        let has_left = facts.was_logged_in && facts.saw_nobody && count == 0;
        facts.was_logged_in |= count > 0;
        facts.saw_nobody = count == 0;
        has_left
    }
}
