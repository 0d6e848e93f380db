//! Messages from other threads to a queue's thread: answers of the device, and orders of the control thread.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use headwater_block::{Inbox, Outcome};

use super::job::Job;
use super::signal::Signal;
use crate::memory::GuestMemory;

/// The queue's inbox for these messages.
pub(crate) type PostBox = Inbox<Post>;

/// A message for a queue's thread.
pub(crate) enum Post {
    /// The device has answered.
    Answer(Job, Outcome),
    /// The machine's memory was replaced; acknowledged when new requests no longer use the old memory.
    Memory(Arc<GuestMemory>, SyncSender<()>),
    /// Use this descriptor for interrupts from now on; `None`: no interrupts.
    Call(Option<Signal>),
    /// Use this descriptor to report broken rings.
    Error(Option<Signal>),
    /// Take no more requests, and end when those taken are answered.
    Stop,
}
