//! What a completion needs to become a reply.

use crate::wire::reply::Answered;

/// Goes with a request to the device and comes back with its answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ticket {
    pub(super) to: Answered,
    pub(super) command: u16,
    /// What the request counts in bytes in flight.
    pub(super) bytes: usize,
    /// Where in its buffer a read's data is: the bytes before it belong to the same sector.
    pub(super) skip: usize,
    /// How many bytes of data a read has.
    pub(super) data_bytes: usize,
    /// Whether it may wait for room in the device.
    pub(super) needs_room: bool,
}
