//! The answers of the guest of a machine that is on, and when the guest was asked.

use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long nobody asks again after a guest gave no address. Each time it is twice as long.
const AGAIN_FIRST: Duration = Duration::from_secs(5);
const AGAIN_LONGEST: Duration = Duration::from_secs(300);

/// How often it is looked whether users have logged off.
const USERS_EVERY: Duration = Duration::from_secs(5);

/// The answers of a guest.
#[derive(Debug, Default)]
pub(crate) struct GuestFacts(Mutex<Facts>);

#[derive(Debug, Default)]
struct Facts {
    addresses: Option<Vec<IpAddr>>,
    /// When it may be asked again.
    next_ask: Option<Instant>,
    pause: Option<Duration>,
    next_users: Option<Instant>,
    was_logged_in: bool,
    /// Whether its last answer was that nobody is logged in.
    saw_nobody: bool,
}

impl GuestFacts {
    fn lock(&self) -> MutexGuard<'_, Facts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its addresses, if it has said any.
    pub(crate) fn addresses(&self) -> Option<Vec<IpAddr>> {
        self.lock().addresses.clone()
    }

    /// Whether to ask for its addresses now. A caller that gets true asks.
    pub(crate) fn may_ask_addresses(&self) -> bool {
        let mut facts = self.lock();
        let now = Instant::now();
        if facts.addresses.is_some() || facts.next_ask.is_some_and(|next| next > now) {
            return false;
        }
        let pause = facts.pause.map_or(AGAIN_FIRST, |pause| (pause * 2).min(AGAIN_LONGEST));
        facts.pause = Some(pause);
        facts.next_ask = Some(now + pause);
        true
    }

    /// It said these. None yet: it is asked again.
    pub(crate) fn set_addresses(&self, addresses: Vec<IpAddr>) {
        if !addresses.is_empty() {
            self.lock().addresses = Some(addresses);
        }
    }

    /// It said nothing.
    pub(crate) fn no_answer(&self) {
        self.lock().addresses = None;
    }

    /// Whether to ask now who is logged in.
    pub(crate) fn may_ask_users(&self) -> bool {
        let mut facts = self.lock();
        let now = Instant::now();
        if facts.next_users.is_some_and(|next| next > now) {
            return false;
        }
        facts.next_users = Some(now + USERS_EVERY);
        true
    }

    /// So many users are logged in. Returns whether the last one has logged off since: two answers in a row say so.
    pub(crate) fn saw_users(&self, count: usize) -> bool {
        let mut facts = self.lock();
        let has_left = facts.was_logged_in && facts.saw_nobody && count == 0;
        facts.was_logged_in = count > 0 || (facts.was_logged_in && !has_left);
        facts.saw_nobody = count == 0;
        has_left
    }
}
