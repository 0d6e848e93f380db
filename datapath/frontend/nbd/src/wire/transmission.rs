//! The transmission phase: requests in both directions, and parsing of simple replies, structured reply
//! chunks and their payloads.

use super::{Fields, WireError};

const REQUEST_MAGIC: u32 = 0x2560_9513;
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Length of a request without its payload.
pub const REQUEST_BYTES: usize = 28;
/// The same with extended headers.
pub const EXTENDED_REQUEST_BYTES: usize = 32;
/// Length of a simple reply without its payload, and of the part of a chunk's head before its length.
pub const REPLY_BYTES: usize = 16;

/// Requests by their number (`NBD_CMD_*`).
pub mod command {
    /// Read.
    pub const READ: u16 = 0;
    /// Write; the only one with a payload.
    pub const WRITE: u16 = 1;
    /// Disconnect; has no reply.
    pub const DISC: u16 = 2;
    /// Make earlier writes durable.
    pub const FLUSH: u16 = 3;
    /// Discard.
    pub const TRIM: u16 = 4;
    /// Prefetch.
    pub const CACHE: u16 = 5;
    /// Write zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Ask for extents.
    pub const BLOCK_STATUS: u16 = 7;

    /// The name of a command for people: its name in the protocol, or its number.
    pub struct Named(pub u16);

    impl std::fmt::Display for Named {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            let name = match self.0 {
                READ => "NBD_CMD_READ",
                WRITE => "NBD_CMD_WRITE",
                DISC => "NBD_CMD_DISC",
                FLUSH => "NBD_CMD_FLUSH",
                TRIM => "NBD_CMD_TRIM",
                CACHE => "NBD_CMD_CACHE",
                WRITE_ZEROES => "NBD_CMD_WRITE_ZEROES",
                BLOCK_STATUS => "NBD_CMD_BLOCK_STATUS",
                other => return write!(f, "command {other}"),
            };
            f.write_str(name)
        }
    }
}

/// Flags of requests (`NBD_CMD_FLAG_*`).
pub mod command_flag {
    /// Durable before it is answered.
    pub const FUA: u16 = 1 << 0;
    /// Zero writes: keep the space allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Reads: one chunk only.
    pub const DF: u16 = 1 << 2;
    /// Block status: one extent only.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Zero writes: fail with `ENOTSUP` rather than be slow.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// With extended headers: the length is that of the payload that follows.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Chunks by their type (`NBD_REPLY_TYPE_*`).
pub mod chunk {
    /// Nothing; only ends a reply.
    pub const NONE: u16 = 0;
    /// Offset and data.
    pub const OFFSET_DATA: u16 = 1;
    /// Offset and length of zeroes.
    pub const OFFSET_HOLE: u16 = 2;
    /// Context and extents.
    pub const BLOCK_STATUS: u16 = 5;
    /// The same with 64-bit lengths.
    pub const BLOCK_STATUS_EXTENDED: u16 = 6;
    /// An error of the whole request.
    pub const ERROR: u16 = (1 << 15) | 1;
    /// An error at an offset.
    pub const ERROR_OFFSET: u16 = (1 << 15) | 2;
    /// The bit that makes a type an error.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// The flag of the last chunk of a reply.
    pub const FLAG_DONE: u16 = 1;
}

/// Flags of an extent in `base:allocation` (`NBD_STATE_*`).
pub mod state {
    /// Takes no space.
    pub const HOLE: u32 = 1;
    /// Reads as zeroes.
    pub const ZERO: u32 = 2;
}

/// A request without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHead {
    /// [`command_flag`].
    pub flags: u16,
    /// [`command`].
    pub command: u16,
    /// The client's number for the request, echoed in replies.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes; below 2^32 without extended headers.
    pub length: u64,
}

impl RequestHead {
    /// The bytes on the wire, without extended headers.
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut out = Fixed::new();
        out.put(&REQUEST_MAGIC.to_be_bytes());
        out.put(&self.flags.to_be_bytes());
        out.put(&self.command.to_be_bytes());
        out.put(&self.cookie.to_be_bytes());
        out.put(&self.offset.to_be_bytes());
        out.put(&u32::try_from(self.length).unwrap_or(u32::MAX).to_be_bytes());
        out.bytes
    }

    /// The bytes on the wire, with extended headers.
    pub fn encode_extended(&self) -> [u8; EXTENDED_REQUEST_BYTES] {
        let mut out = Fixed::new();
        out.put(&EXTENDED_REQUEST_MAGIC.to_be_bytes());
        out.put(&self.flags.to_be_bytes());
        out.put(&self.command.to_be_bytes());
        out.put(&self.cookie.to_be_bytes());
        out.put(&self.offset.to_be_bytes());
        out.put(&self.length.to_be_bytes());
        out.bytes
    }

    /// Reads one request; its command and flags may be unknown ones.
    pub fn decode(bytes: &[u8; REQUEST_BYTES]) -> Result<Self, WireError> {
        let mut fields = Fields::new("request", bytes);
        expect_magic("request", fields.u32()?, REQUEST_MAGIC)?;
        Ok(Self {
            flags: fields.u16()?,
            command: fields.u16()?,
            cookie: fields.u64()?,
            offset: fields.u64()?,
            length: fields.u32()?.into(),
        })
    }

    /// The same with extended headers.
    pub fn decode_extended(bytes: &[u8; EXTENDED_REQUEST_BYTES]) -> Result<Self, WireError> {
        let mut fields = Fields::new("extended request", bytes);
        expect_magic("extended request", fields.u32()?, EXTENDED_REQUEST_MAGIC)?;
        Ok(Self {
            flags: fields.u16()?,
            command: fields.u16()?,
            cookie: fields.u64()?,
            offset: fields.u64()?,
            length: fields.u64()?,
        })
    }
}

/// The first [`REPLY_BYTES`] of any reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyHead {
    /// A simple reply, complete except for a read's data.
    Simple {
        /// 0 or an error.
        error: u32,
        /// Which request.
        cookie: u64,
    },
    /// A chunk; the length of its payload follows as 4 bytes.
    Chunk {
        /// [`chunk::FLAG_DONE`].
        flags: u16,
        /// [`chunk`].
        kind: u16,
        /// Which request.
        cookie: u64,
    },
}

impl ReplyHead {
    /// Reads the start of a reply.
    pub fn decode(bytes: &[u8; REPLY_BYTES]) -> Result<Self, WireError> {
        let mut fields = Fields::new("reply", bytes);
        let magic = fields.u32()?;
        if magic == STRUCTURED_REPLY_MAGIC {
            return Ok(Self::Chunk { flags: fields.u16()?, kind: fields.u16()?, cookie: fields.u64()? });
        }
        expect_magic("reply", magic, SIMPLE_REPLY_MAGIC)?;
        Ok(Self::Simple { error: fields.u32()?, cookie: fields.u64()? })
    }
}

/// Reads the payload of an error chunk: error and message. Bytes after the message are ignored.
pub fn decode_error(payload: &[u8]) -> Result<(u32, String), WireError> {
    let mut fields = Fields::new("error chunk", payload);
    let error = fields.u32()?;
    let length = fields.u16()?;
    let Some(message) = fields.rest().get(..usize::from(length)) else {
        return Err(WireError::Malformed { what: "error chunk", why: "its message ends past its end" });
    };
    Ok((error, String::from_utf8_lossy(message).into_owned()))
}

/// Reads the payload of a hole chunk: offset and length.
pub fn decode_hole(payload: &[u8]) -> Result<(u64, u32), WireError> {
    let mut fields = Fields::new("hole chunk", payload);
    let hole = (fields.u64()?, fields.u32()?);
    fields.end()?;
    Ok(hole)
}

/// Reads the payload of a block status chunk: context, and pairs of length and flags.
pub fn decode_block_status(payload: &[u8]) -> Result<(u32, Vec<(u32, u32)>), WireError> {
    let mut fields = Fields::new("block status chunk", payload);
    let context = fields.u32()?;
    let (pairs, left) = fields.rest().as_chunks::<8>();
    if !left.is_empty() || pairs.is_empty() {
        return Err(WireError::Malformed { what: "block status chunk", why: "its extents do not fill it" });
    }
    let mut extents = Vec::with_capacity(pairs.len());
    for pair in pairs {
        let mut fields = Fields::new("block status chunk", pair);
        extents.push((fields.u32()?, fields.u32()?));
    }
    Ok((context, extents))
}

/// Reads the payload of an extended block status chunk: context, and pairs of length and flags.
pub fn decode_block_status_extended(payload: &[u8]) -> Result<(u32, Vec<(u64, u64)>), WireError> {
    let mut fields = Fields::new("block status chunk", payload);
    let (context, count) = (fields.u32()?, fields.u32()?);
    let (pairs, left) = fields.rest().as_chunks::<16>();
    // With a count of 0 the length decides.
    let is_counted = count == 0 || usize::try_from(count) == Ok(pairs.len());
    if !left.is_empty() || pairs.is_empty() || !is_counted {
        return Err(WireError::Malformed { what: "block status chunk", why: "its extents do not fill it" });
    }
    let mut extents = Vec::with_capacity(pairs.len());
    for pair in pairs {
        let mut fields = Fields::new("block status chunk", pair);
        extents.push((fields.u64()?, fields.u64()?));
    }
    Ok((context, extents))
}

fn expect_magic(what: &'static str, found: u32, expected: u32) -> Result<(), WireError> {
    if found == expected {
        return Ok(());
    }
    Err(WireError::BadMagic { what, found: found.into(), expected: expected.into() })
}

/// A structure of a fixed length that is filled from its start.
struct Fixed<const N: usize> {
    bytes: [u8; N],
    used: usize,
}

impl<const N: usize> Fixed<N> {
    fn new() -> Self {
        Self { bytes: [0; N], used: 0 }
    }

    #[inline]
    fn put(&mut self, field: &[u8]) {
        let end = self.used.saturating_add(field.len());
        debug_assert!(end <= N, "a field passes the end of its structure");
        if let Some(place) = self.bytes.get_mut(self.used..end) {
            place.copy_from_slice(field);
        }
        self.used = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_request_has_the_bytes_of_the_protocol() {
        let head = RequestHead {
            flags: command_flag::FUA,
            command: command::WRITE,
            cookie: 0x0102_0304_0506_0708,
            offset: 0x1000,
            length: 0x200,
        };
        let bytes = head.encode();
        assert_eq!(bytes[..8], [0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1]);
        assert_eq!(bytes[8..16], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(bytes[16..], [0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 2, 0]);
    }

    #[test]
    fn commands_have_the_names_of_the_protocol() {
        let names: Vec<String> = (0..9).map(|number| command::Named(number).to_string()).collect();
        let expected = [
            "NBD_CMD_READ",
            "NBD_CMD_WRITE",
            "NBD_CMD_DISC",
            "NBD_CMD_FLUSH",
            "NBD_CMD_TRIM",
            "NBD_CMD_CACHE",
            "NBD_CMD_WRITE_ZEROES",
            "NBD_CMD_BLOCK_STATUS",
            "command 8",
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn an_extended_request_has_the_bytes_of_the_protocol() {
        let head = RequestHead {
            flags: command_flag::PAYLOAD_LEN,
            command: command::WRITE,
            cookie: 1,
            offset: 2,
            length: 0x0102_0304_0506_0708,
        };
        let bytes = head.encode_extended();
        assert_eq!(bytes[..8], [0x21, 0xe4, 0x1c, 0x71, 0, 0x20, 0, 1]);
        assert_eq!(bytes[8..24], [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2]);
        assert_eq!(bytes[24..], [1, 2, 3, 4, 5, 6, 7, 8]);
    }

    proptest! {
        #[test]
        fn requests_survive_the_wire(flags: u16, command: u16, cookie: u64, offset: u64, length: u32, long: u64) {
            let head = RequestHead { flags, command, cookie, offset, length: length.into() };
            prop_assert_eq!(RequestHead::decode(&head.encode()), Ok(head));
            let head = RequestHead { length: long, ..head };
            prop_assert_eq!(RequestHead::decode_extended(&head.encode_extended()), Ok(head));
        }

        #[test]
        fn random_requests_are_refused_unless_they_have_the_magic(bytes: [u8; REQUEST_BYTES]) {
            match RequestHead::decode(&bytes) {
                Ok(head) => prop_assert_eq!(head.encode(), bytes),
                Err(_) => prop_assert_ne!(&bytes[..4], &REQUEST_MAGIC.to_be_bytes()[..]),
            }
        }

        #[test]
        fn random_payloads_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode_hole(&bytes);
            if let Ok((_, message)) = decode_error(&bytes) {
                prop_assert!(bytes.len() >= 6 && message.len() <= 3 * (bytes.len() - 6));
            }
            if let Ok((_, extents)) = decode_block_status(&bytes) {
                prop_assert_eq!(bytes.len(), 4 + 8 * extents.len());
            }
            if let Ok((_, extents)) = decode_block_status_extended(&bytes) {
                prop_assert_eq!(bytes.len(), 8 + 16 * extents.len());
            }
        }
    }
}
