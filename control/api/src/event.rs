//! The history: who changed what, and when.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The most events that one answer has; older ones are asked for with `before`.
pub const MAX_EVENTS: u32 = 1000;

/// One change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Counts up; the order of events.
    pub id: i64,
    /// When.
    pub at_ms: u64,
    /// Who: `uid 1000 (anna)` for a client of the socket, `uid 1000` if `/etc/passwd` has no name, `token NAME`, `tcp 127.0.0.1:5000` with
    /// the token of the data directory, or `daemon`. `console of ` and one of these: a session of the web console, and who asked for its link.
    pub caller: String,
    /// On what: `machine web-1`, `image debian`.
    pub subject: String,
    /// What happened: `created`, `start`, `state`, ...
    pub action: String,
    /// In words.
    pub detail: String,
}

/// Some events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventList {
    /// Newest first, or oldest first if they were asked for by `after`.
    pub events: Vec<Event>,
}
