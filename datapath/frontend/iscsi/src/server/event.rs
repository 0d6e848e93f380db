//! What other threads tell a session's thread.

use headwater_scsi::{FunctionResult, Outcome};

/// What happened.
#[derive(Debug)]
pub(super) enum Event {
    /// A task ended.
    Task {
        /// Its initiator task tag.
        tag: u32,
        /// Its serial number in the session.
        serial: u64,
        /// How.
        outcome: Outcome,
    },
    /// A task management function ended.
    Managed {
        /// The serial number of the function.
        serial: u64,
        /// How.
        result: FunctionResult,
    },
}
