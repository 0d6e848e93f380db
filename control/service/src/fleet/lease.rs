//! The lease that a controller gives to a node: until its end, the node may run machines that another host could be given.
//!
//! ```text
//!   controller                                   node
//!     | --- renewal 7, has heard 6 --------------> |   the lease ends T after the node answered 6
//!     | <-- answer, recorded at time n ----------- |   renewal 7 was answered at n
//!     |  hears answer 7 at time c, and c >= n      |
//!     |  checks that it has the database           |
//!     | --- renewal 8, has heard 7 --------------> |   the lease ends at n + T
//! ```
//!
//! # Why no two hosts run one machine
//! - A node counts from the time at which it answered, the controller from the later time at which it heard the answer. So
//!   a delay only makes the node's lease end earlier than the controller assumes.
//! - The controller tells a node that it heard an answer only after it has checked that it has the database. So a
//!   controller that takes the database over later, and counts from its own start, waits longer than the lease of any node.
//! - The controller gives machines to another host [`margin_ms`] after the lease has ended by its own clock. By then the
//!   node has ended its machines, unless one clock runs faster than the other by more than that margin, which is at least
//!   10 % of the lease.
//!
//! This file has only the rules, without connections and timers: `loss.rs` of the controller and `fence.rs` of the node use
//! them, and `lease_model.rs` tests them.
//!
//! Times are milliseconds of a clock that also counts while the host is suspended, and that cannot be set. Times of two
//! hosts are not compared.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// The most answers that are remembered until the controller has heard them.
const ANSWERS_MAX: usize = 64;

/// The request with which a controller renews a lease. It is sent repeatedly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Renewal {
    /// Its number, which grows within a connection.
    pub number: u64,
    /// The number of the newest renewal whose answer was heard while the database was this controller's.
    pub heard: Option<u64>,
    /// How long the lease lasts.
    pub lease_ms: u64,
}

/// The node's view of its lease.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeLease {
    /// The renewals of this connection that were answered, and when.
    answered: VecDeque<(u64, u64)>,
    ends_at_ms: Option<u64>,
}

impl NodeLease {
    /// A lease that an earlier daemon of the node got.
    pub fn until(ends_at_ms: Option<u64>) -> Self {
        Self { answered: VecDeque::new(), ends_at_ms }
    }

    /// A new connection begins, and with it new numbers.
    pub fn connected(&mut self) {
        self.answered.clear();
    }

    /// Records that a renewal is answered now.
    pub fn answer(&mut self, renewal: Renewal, now_ms: u64) {
        let heard = renewal.heard.and_then(|heard| self.answered.iter().find(|it| it.0 == heard));
        if let Some((number, at_ms)) = heard.copied() {
            let ends_at_ms = at_ms.saturating_add(renewal.lease_ms);
            self.ends_at_ms = Some(self.ends_at_ms.map_or(ends_at_ms, |former| former.max(ends_at_ms)));
            self.answered.retain(|it| it.0 >= number);
        }
        if self.answered.len() >= ANSWERS_MAX {
            self.answered.pop_front();
        }
        self.answered.push_back((renewal.number, now_ms));
    }

    /// When the lease ends. `None`: there never was one.
    pub fn ends_at_ms(&self) -> Option<u64> {
        self.ends_at_ms
    }

    /// Whether the machines that another host may be given must be off.
    pub fn is_over(&self, now_ms: u64) -> bool {
        self.ends_at_ms.is_none_or(|ends_at_ms| now_ms >= ends_at_ms)
    }
}

/// How long the controller waits after the end of a lease.
pub const fn margin_ms(lease_ms: u64) -> u64 {
    lease_ms / 10 + 2_000
}

/// From when on the controller may give the machines of a host to another host, if it last heard the node at `heard_at_ms`.
pub const fn movable_from_ms(heard_at_ms: u64, lease_ms: u64) -> u64 {
    heard_at_ms.saturating_add(lease_ms).saturating_add(margin_ms(lease_ms))
}

/// The interval between renewals.
pub const fn interval_ms(lease_ms: u64) -> u64 {
    lease_ms / 10
}

/// The controller's view of the renewals of one connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Renewals {
    number: u64,
    heard: Option<u64>,
}

impl Renewals {
    /// The next renewal to send.
    pub fn next(&mut self, lease_ms: u64) -> Renewal {
        self.number += 1;
        Renewal { number: self.number, heard: self.heard, lease_ms }
    }

    /// Records that the answer to this renewal was heard, and that the database was this controller's after that.
    pub fn heard(&mut self, number: u64) {
        self.heard = self.heard.max(Some(number));
    }
}
