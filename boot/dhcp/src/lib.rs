//! DHCPv4 for network boot: packet parser and writer, the choice of an answer to firmware, leases, and the DHCP
//! client of the agent.
//!
//! ```text
//!   datagram --Packet::parse--> Query --decide(known machine, history)--> Verdict --Answer::packet--> datagram
//!                                 Leases::handle(table, now) --> Outcome --> datagram        (full DHCP only)
//!   lease of the agent: discover() --> offer --> request() --> ack --> Lease
//! ```
//!
//! # Guarantees
//! - No sockets, no clock, no panic: bytes, tables and times are arguments.
//! - A machine that is not registered gets no answer from [`decide`](mod@decide): another boot server may own it.
//! - An answer of [`decide`](mod@decide) carries no address: the site's DHCP server gives the address (proxy DHCP),
//!   or [`leases`] does.
//! - No address has two clients at a time. This holds over restarts too if the caller stores records before it sends
//!   an answer.
//!
//! # Limits
//! [`PACKET_BYTES_MAX`] for a packet, [`history::MACHINES_MAX`] machines in the history, [`history::LOADERS_MAX`] loaders in
//! [`history::LOADER_WINDOW_MS`] without a script before a machine counts as looping, [`subnet::RANGE_MAX`] addresses of a range.
//!
//! # Errors
//! [`PacketError`] says why a packet cannot be parsed. A packet that is not for a boot server gives
//! [`Verdict::Silent`] with a reason.
//!
//! # Not here
//! Subnet selection by options (RFC 3011, RFC 3527), DHCPv6.
//!
//! Start reading at [`decide`](mod@decide).

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

pub mod client;
pub mod decide;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod history;
pub mod leases;
pub mod mac;
pub mod packet;
pub mod site;
pub mod subnet;

pub use client::{Lease, discover, renew, request};
pub use decide::{Answer, Arch, Form, Loader, Port, Reason, Server, Verdict, choose, decide, with_loader};
pub use history::{Histories, Past};
pub use leases::{Leases, Outcome, Record};
pub use mac::Mac;
pub use packet::{MessageType, PACKET_BYTES_MAX, Packet, PacketError, option};
pub use subnet::{Subnet, SubnetError, Subnets};
