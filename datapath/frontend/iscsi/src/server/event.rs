//! Events that other threads report to a session's thread.

use headwater_scsi::{FunctionResult, Outcome};

/// An event.
#[derive(Debug)]
pub(super) enum Event {
    /// A task ended.
    Task {
        /// Its initiator task tag.
        tag: u32,
        /// Its serial number in the session.
        serial: u64,
        /// Its outcome.
        outcome: Outcome,
    },
    /// A task management function ended.
    Managed {
        /// The serial number of the function.
        serial: u64,
        /// Its result.
        result: FunctionResult,
    },
}
