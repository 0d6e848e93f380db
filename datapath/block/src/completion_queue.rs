//! Lets the thread of a connection or queue reap the completions of its own requests, so that it is not woken
//! for each one.
//!
//! | the disk's completion is reaped by | wake-ups of threads |
//! |---|---|
//! | a thread of the device, and posted to the connection's thread | two: the device's thread and the connection's |
//! | the connection's thread, in its event loop | none while the thread is busy, otherwise one |

use std::os::fd::BorrowedFd;

/// The requests that one thread has submitted to a device, and their completions; see
/// [`crate::Device::completion_queue`].
///
/// # Contract
/// - It stays on the thread that requested it; requests of other threads are not affected.
/// - Requests may wait in it until the next [`CompletionQueue::take`]: call that before sleeping.
/// - A thread that sleeps must also watch [`CompletionQueue::ready`].
/// - Dropping it waits until the disk has answered all requests of this thread.
pub trait CompletionQueue {
    /// Starts waiting requests, and completes finished ones on this thread. Costs no system call if there are
    /// none.
    fn take(&self);

    /// Whether a request is finished. Costs no system call.
    fn is_ready(&self) -> bool;

    /// Readable if a request is finished, until the next [`CompletionQueue::take`].
    fn ready(&self) -> BorrowedFd<'_>;
}
