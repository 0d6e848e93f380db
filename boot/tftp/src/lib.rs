//! TFTP for network boot (RFC 1350, with the options of RFC 2348, 2349 and 7440): packet parser and writer, and one
//! transfer as a state machine.
//!
//! ```text
//!   datagram --Packet::parse--> Request --Transfer::start--> datagrams to send
//!                               Ack ------Transfer::received> datagrams to send, or done
//!                               silence --Transfer::timed_out--> the same datagrams again, or given up
//! ```
//!
//! # Guarantees
//! - No sockets, no clock, no panic. Only reads are supported; a write is refused.
//! - Block numbers roll over to 0: a file may have more than 65,535 blocks.
//! - A duplicate acknowledgement causes no duplicate data.
//!
//! # Limits
//! [`BLOCK_BYTES_MAX`] for a block, [`WINDOW_MAX`] blocks in flight, [`TRIES_MAX`] retransmissions without an answer,
//! [`REQUEST_BYTES_MAX`] for a request.
//!
//! # Errors
//! [`PacketError`] names the part of a datagram that cannot be parsed; a client gets a [`Packet::Error`].
//!
//! # Not here
//! Writing, netascii, multicast, sockets and files (`headwater-boot-server`).
//!
//! Start reading at [`transfer`].

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

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod packet;
pub mod transfer;

pub use packet::{ErrorCode, Packet, PacketError, REQUEST_BYTES_MAX, Request};
pub use transfer::{BLOCK_BYTES_MAX, Step, TRIES_MAX, Transfer, WINDOW_MAX, refusal};
