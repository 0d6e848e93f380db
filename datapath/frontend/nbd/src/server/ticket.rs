//! What a completion needs to become a reply.

use crate::wire::reply::Answered;

/// Goes with a request to the device and comes back with its answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ticket {
    pub(super) to: Answered,
    pub(super) command: u16,
    /// What the request counts in bytes in flight.
    pub(super) bytes: usize,
    /// Whether it may wait for room in the device.
    pub(super) needs_room: bool,
}
