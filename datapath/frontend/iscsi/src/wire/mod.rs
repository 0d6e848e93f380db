//! The wire: pure encoding and decoding of PDUs and text, without sockets.
//!
//! A PDU is a basic header segment of 48 bytes ([`Bhs`]), additional header segments, an optional header digest,
//! a data segment padded to four bytes, and an optional data digest. All numbers are big-endian.
//!
//! - [`header`]: what all PDUs have in common.
//! - [`request`]: what initiators send; [`response`]: what targets send. Each PDU is a struct with `decode` and
//!   `encode`, so that the tests' client speaks with the same words.
//! - `table`: what makes such a struct of a table of its fields.
//! - [`text`]: `key=value` pairs.
//! - [`digest`]: CRC32C of headers and data.

pub mod digest;
pub mod header;
pub mod request;
pub mod response;
mod table;
pub mod text;

pub use header::{BHS_BYTES, Bhs, Opcode, RESERVED_TAG};

/// A header that is none of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct WireError(pub &'static str);
