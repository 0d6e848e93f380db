//! The history: who changed what, and when. An [`Event`] is one change, for `headwater events` and for auditors. (The
//! progress of a running operation is in [`crate::task_event`].)

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The most events of one answer. Older events are requested with `before`.
pub const MAX_EVENTS: u32 = 1000;

/// One change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// The number of the event. Later events have larger numbers.
    pub id: i64,
    /// When it happened.
    pub at_ms: u64,
    /// Who caused it: `uid 1000 (anna)` for a client of the socket, `uid 1000` if `/etc/passwd` has no name, `token NAME`,
    /// `oidc NAME (SUBJECT)` for a login, `tcp 127.0.0.1:5000` with the token of the data directory, or `daemon`.
    /// `console of ` before one of these means a session of the web console whose link that caller created.
    pub caller: String,
    /// The subject: `machine web-1`, `image debian`.
    pub subject: String,
    /// The action: `created`, `start`, `state`, ...
    pub action: String,
    /// A sentence that describes the event.
    pub detail: String,
}

/// A list of events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventList {
    /// Newest first, or oldest first if they were asked for by `after`.
    pub events: Vec<Event>,
}
