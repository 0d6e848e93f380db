//! The transmission phase: requests, simple replies, structured reply chunks and their payloads.

use super::{Fields, WireError};

const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Length of a request without its payload.
pub const REQUEST_BYTES: usize = 28;
/// Length of a simple reply without its payload, and of the part of a chunk's head before its length.
pub const REPLY_BYTES: usize = 16;
/// Length of a structured reply chunk's head.
pub const CHUNK_BYTES: usize = 20;

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
    /// Bytes.
    pub length: u32,
}

impl RequestHead {
    /// The bytes on the wire.
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut out = Fixed::new();
        out.put(&REQUEST_MAGIC.to_be_bytes());
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
            length: fields.u32()?,
        })
    }
}

/// A simple reply; a successful read's data follows it.
pub fn simple_reply(error: u32, cookie: u64) -> [u8; REPLY_BYTES] {
    let mut out = Fixed::new();
    out.put(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    out.put(&error.to_be_bytes());
    out.put(&cookie.to_be_bytes());
    out.bytes
}

/// The head of a chunk whose payload has `length` bytes.
pub fn chunk_head(flags: u16, kind: u16, cookie: u64, length: u32) -> [u8; CHUNK_BYTES] {
    let mut out = Fixed::new();
    out.put(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
    out.put(&flags.to_be_bytes());
    out.put(&kind.to_be_bytes());
    out.put(&cookie.to_be_bytes());
    out.put(&length.to_be_bytes());
    out.bytes
}

/// Length of [`data_chunk_head`].
pub const DATA_HEAD_BYTES: usize = CHUNK_BYTES + 8;

/// All of an `OFFSET_DATA` chunk that comes before its data, as the only chunk of its reply.
/// `None` where the length does not fit the protocol.
pub fn data_chunk_head(cookie: u64, offset: u64, data_bytes: usize) -> Option<[u8; DATA_HEAD_BYTES]> {
    let length = u32::try_from(data_bytes).ok()?.checked_add(8)?;
    let mut out = Fixed::new();
    out.put(&chunk_head(chunk::FLAG_DONE, chunk::OFFSET_DATA, cookie, length));
    out.put(&offset.to_be_bytes());
    Some(out.bytes)
}

/// Length of [`hole_chunk`].
pub const HOLE_BYTES: usize = CHUNK_BYTES + 12;

/// An `OFFSET_HOLE` chunk, as the only chunk of its reply.
pub fn hole_chunk(cookie: u64, offset: u64, length: u32) -> [u8; HOLE_BYTES] {
    let mut out = Fixed::new();
    out.put(&chunk_head(chunk::FLAG_DONE, chunk::OFFSET_HOLE, cookie, 12));
    out.put(&offset.to_be_bytes());
    out.put(&length.to_be_bytes());
    out.bytes
}

/// Longest error message that is sent.
pub const MESSAGE_BYTES: usize = 512;

/// An `ERROR` chunk, as the last chunk of its reply. The message is cut to [`MESSAGE_BYTES`].
pub fn error_chunk(out: &mut Vec<u8>, cookie: u64, error: u32, message: &str) {
    let message = cut(message, MESSAGE_BYTES);
    // Both fit: the message was cut.
    let message_len = u16::try_from(message.len()).unwrap_or(0);
    let length = u32::from(message_len).saturating_add(6);
    out.extend_from_slice(&chunk_head(chunk::FLAG_DONE, chunk::ERROR, cookie, length));
    out.extend_from_slice(&error.to_be_bytes());
    out.extend_from_slice(&message_len.to_be_bytes());
    out.extend_from_slice(message.as_bytes());
}

/// A `BLOCK_STATUS` chunk, as the only chunk of its reply: pairs of length and [`state`] flags.
pub fn block_status_chunk(out: &mut Vec<u8>, cookie: u64, context: u32, extents: &[(u32, u32)]) {
    let length = u32::try_from(extents.len()).unwrap_or(u32::MAX).saturating_mul(8).saturating_add(4);
    out.extend_from_slice(&chunk_head(chunk::FLAG_DONE, chunk::BLOCK_STATUS, cookie, length));
    out.extend_from_slice(&context.to_be_bytes());
    for (len, flags) in extents {
        out.extend_from_slice(&len.to_be_bytes());
        out.extend_from_slice(&flags.to_be_bytes());
    }
}

/// Cuts a string to at most `limit` bytes at a character's end.
fn cut(text: &str, limit: usize) -> &str {
    let end = (0..=limit.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    text.get(..end).unwrap_or("")
}

/// The first [`REPLY_BYTES`] of any reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyHead {
    /// A simple reply, complete but for a read's data.
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

/// Reads the payload of an error chunk: error and message. What follows the message is left alone.
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
    fn replies_have_the_bytes_of_the_protocol() {
        assert_eq!(simple_reply(5, 9), [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 9]);
        let head = data_chunk_head(9, 0x1000, 512).unwrap();
        assert_eq!(head[..8], [0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 1]);
        assert_eq!(head[16..], [0, 0, 2, 8, 0, 0, 0, 0, 0, 0, 0x10, 0]);
        assert!(data_chunk_head(9, 0, usize::try_from(u32::MAX).unwrap()).is_none());
    }

    #[test]
    fn long_messages_are_cut_at_a_character() {
        let mut out = Vec::new();
        error_chunk(&mut out, 1, 5, &"\u{e9}".repeat(MESSAGE_BYTES));
        let (_, message) = decode_error(&out[CHUNK_BYTES..]).unwrap();
        assert_eq!(message.len(), MESSAGE_BYTES);
        assert!(message.chars().all(|c| c == '\u{e9}'));
    }

    proptest! {
        #[test]
        fn requests_survive_the_wire(flags: u16, command: u16, cookie: u64, offset: u64, length: u32) {
            let head = RequestHead { flags, command, cookie, offset, length };
            prop_assert_eq!(RequestHead::decode(&head.encode()), Ok(head));
        }

        #[test]
        fn random_requests_are_refused_unless_they_have_the_magic(bytes: [u8; REQUEST_BYTES]) {
            match RequestHead::decode(&bytes) {
                Ok(head) => prop_assert_eq!(head.encode(), bytes),
                Err(_) => prop_assert_ne!(&bytes[..4], &REQUEST_MAGIC.to_be_bytes()[..]),
            }
        }

        #[test]
        fn replies_survive_the_wire(error: u32, cookie: u64, flags: u16, kind: u16, length: u32) {
            let simple = ReplyHead::decode(&simple_reply(error, cookie));
            prop_assert_eq!(simple, Ok(ReplyHead::Simple { error, cookie }));
            let bytes = chunk_head(flags, kind, cookie, length);
            let (head, len) = bytes.split_first_chunk().unwrap();
            prop_assert_eq!(ReplyHead::decode(head), Ok(ReplyHead::Chunk { flags, kind, cookie }));
            prop_assert_eq!(len, &length.to_be_bytes()[..]);
        }

        #[test]
        fn payloads_survive_the_wire(
            cookie: u64, error: u32, message in "\\PC{0,80}", offset: u64, length: u32, context: u32,
            extents in prop::collection::vec(any::<(u32, u32)>(), 1..40),
        ) {
            let mut out = Vec::new();
            error_chunk(&mut out, cookie, error, &message);
            prop_assert_eq!(decode_error(&out[CHUNK_BYTES..]), Ok((error, message)));
            let hole = hole_chunk(cookie, offset, length);
            prop_assert_eq!(decode_hole(&hole[CHUNK_BYTES..]), Ok((offset, length)));
            out.clear();
            block_status_chunk(&mut out, cookie, context, &extents);
            prop_assert_eq!(decode_block_status(&out[CHUNK_BYTES..]), Ok((context, extents)));
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
        }
    }
}
