//! The data needed to turn a completion into a reply.

use crate::wire::reply::Answered;

/// Accompanies a request to the device and comes back with its answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ticket {
    pub(super) to: Answered,
    pub(super) command: u16,
    /// How many bytes in flight the request counts as.
    pub(super) bytes: usize,
    /// The offset of a read's data in its buffer: the bytes before it belong to the same sector.
    pub(super) skip: usize,
    /// The length of a read's data, in bytes.
    pub(super) data_bytes: usize,
    /// Whether it may wait for space in the device.
    pub(super) needs_room: bool,
}
