//! Completions that the thread of a connection or queue takes itself, instead of being woken for each.
//!
//! | the disk's answer | wake-ups of threads |
//! |---|---|
//! | taken by a thread of the engine, posted to the connection's | one for the engine's thread, one for the connection's |
//! | taken by the connection's thread when it comes round | none while it is busy, else one |

use std::os::fd::BorrowedFd;

/// What one thread has submitted to a device and takes the answers of; see [`crate::Device::completion_queue`].
///
/// # Contract
/// - It stays on the thread that asked for it; requests of other threads are not touched.
/// - Requests may wait in it until the next [`CompletionQueue::take`]: call that before sleeping.
/// - Whoever sleeps also watches [`CompletionQueue::ready`].
/// - Dropping it waits until the disk has answered what it has of this thread.
pub trait CompletionQueue {
    /// Starts what waits here, and completes what is over, on this thread. Costs no system call where there is neither.
    fn take(&self);

    /// Whether something is over. Costs no system call.
    fn is_ready(&self) -> bool;

    /// Readable when something is over, until the next [`CompletionQueue::take`].
    fn ready(&self) -> BorrowedFd<'_>;
}
