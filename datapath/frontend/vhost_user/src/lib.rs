//! vhost-user-blk: a machine's disk through shared memory, with hits served in the queue's own thread.
//!
//! ```text
//!  QEMU --messages over a unix socket--> [control thread] --memory, rings, start, stop--+
//!                                                                                       v
//!  guest --available ring (shared memory)--> [queue thread] --Device::try_now on guest memory--Done--> used ring
//!            kick only if it sleeps             |       ^                                               one interrupt
//!                                            MustWait   | inbox: next round   , or eventfd              a batch
//!                                               v       | when the thread sleeps
//!                                       Device::submit -+
//! ```
//!
//! # Guarantees
//! - A hit costs no system call, task, lock or allocation of this crate. Data moves once, between guest
//!   memory and the device.
//! - A request that must wait does not delay later ones: requests are answered in the order of completion.
//! - A queue stops cleanly: requests that it took are finished and answered before the front-end learns its
//!   position. If a closed device refuses a request, the guest sees no error: the request goes back into the
//!   ring, or the queue has no position ([`Server::positions`]).
//! - A server that is killed leaves a mark for each request that it took and did not answer, in memory that
//!   the front-end keeps. If the device lost nothing either, the next server continues with these requests
//!   ([`Options::recovered`]).
//! - Whatever bytes a guest puts into its rings, it can damage only its own disk. A request that can be
//!   answered is answered with an error, and a queue with invalid rings is stopped until the machine resets
//!   its disk. Other queues continue.
//! - A write that finds no space waits and gets no error, because guests treat any error as a broken disk.
//! - An idle machine costs no processor time: threads sleep in the kernel.
//!
//! # Limits
//! [`Limits`], with units. Queues have up to 1024 entries, requests up to 126 buffers of 256 KiB. One
//! front-end at a time for each server; as many servers in a process as there are descriptors and threads
//! for.
//!
//! # Errors
//! [`BindError`] says what was tried and what to do. Device errors become `VIRTIO_BLK_S_IOERR`, or
//! `VIRTIO_BLK_S_UNSUPP`, the only two that the protocol has. Faults are logged with the machine and the
//! reason, at a bounded rate.
//!
//! # Not here
//! No packed rings, no live migration (logging of changed memory), no resize.
//!
//! Start reading at [`Server`], then `queue/thread.rs`. The supported part of the protocol is in
//! `docs/vhost-user.md`.

#![cfg_attr(
    not(test),
    warn(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::todo,
        clippy::unimplemented,
        clippy::indexing_slicing,
        clippy::string_slice,
        clippy::get_unwrap,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss
    )
)]

mod arrival;
mod config_space;
mod control;
mod disk;
mod fault;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod limits;
mod memory;
mod positions;
mod queue;
mod server;

pub use headwater_connections::BindError;
pub use limits::Limits;
pub use positions::Positions;
pub use server::{Options, SERIAL_BYTES, Server};
