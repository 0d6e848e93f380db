//! What other threads tell a queue's thread: answers of the device, and orders of the control thread.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use headwater_block::{Inbox, Outcome};

use super::job::Job;
use super::signal::Signal;
use crate::memory::GuestMemory;

/// Where they wait for it.
pub(crate) type PostBox = Inbox<Post>;

/// Something for a queue's thread.
pub(crate) enum Post {
    /// The device has answered.
    Answer(Job, Outcome),
    /// The machine's memory is another one now; acknowledged when the old one is not used for new requests.
    Memory(Arc<GuestMemory>, SyncSender<()>),
    /// Interrupt here from now on, or never.
    Call(Option<Signal>),
    /// Tell broken rings here.
    Error(Option<Signal>),
    /// Take no more requests, and end when those taken are answered.
    Stop,
}
