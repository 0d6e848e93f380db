//! The wire format: encoding and decoding of PDUs and text, without sockets.
//!
//! A PDU is a basic header segment of 48 bytes ([`Bhs`]), additional header segments, an optional header
//! digest, a data segment padded to four bytes, and an optional data digest. All numbers are big-endian.
//!
//! - [`header`]: what all PDUs have in common.
//! - [`request`]: PDUs from initiators; [`response`]: PDUs from targets. Each PDU is a struct with `decode`
//!   and `encode`, so that the tests' client can use the same definitions.
//! - `table`: a macro that makes such a struct from a table of its fields.
//! - [`text`]: `key=value` pairs.
//! - [`digest`]: CRC32C of headers and data.

pub mod digest;
pub mod header;
pub mod request;
pub mod response;
mod table;
pub mod text;

pub use header::{BHS_BYTES, Bhs, Opcode, RESERVED_TAG};

/// The header of an iSCSI PDU that cannot be used, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct WireError(pub &'static str);
