//! The bytes of the NBD protocol: encoding and decoding without sockets and without panics.
//!
//! - [`handshake`]: the greeting, options and their replies.
//! - [`transmission`]: requests, and replies as a client reads them. [`reply`]: replies as a server writes
//!   them.
//!
//! All numbers are big-endian. Each decoder takes exactly the bytes of its structure, and its errors say why
//! they are wrong. Nothing here allocates memory by a length that came from the peer.

pub mod handshake;
pub mod reply;
pub mod transmission;

/// Why bytes from a peer are not what the protocol allows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A magic number is wrong: the peer speaks another protocol, or the stream is out of step.
    #[error("{what} starts with {found:#x} instead of {expected:#x}")]
    BadMagic {
        /// Which structure.
        what: &'static str,
        /// The value that was found.
        found: u64,
        /// The expected value.
        expected: u64,
    },
    /// A structure ends before its fields do, or its inner lengths contradict each other.
    #[error("{what} is malformed: {why}")]
    Malformed {
        /// Which structure.
        what: &'static str,
        /// What does not fit.
        why: &'static str,
    },
    /// A length is over a limit.
    #[error("the {what} has {found} bytes, and at most {limit} are allowed")]
    TooLong {
        /// Which structure.
        what: &'static str,
        /// Its length.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A name is not UTF-8.
    #[error("{what} is not UTF-8")]
    NotUtf8 {
        /// Which string.
        what: &'static str,
    },
}

/// Takes fixed-size fields off the front of a slice.
pub(crate) struct Fields<'a> {
    what: &'static str,
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(crate) fn new(what: &'static str, bytes: &'a [u8]) -> Self {
        Self { what, rest: bytes }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let Some((head, rest)) = self.rest.split_first_chunk::<N>() else {
            return Err(WireError::Malformed { what: self.what, why: "it is too short" });
        };
        self.rest = rest;
        Ok(*head)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, WireError> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, WireError> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, WireError> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string of `len` bytes, at most `limit`.
    pub(crate) fn text(&mut self, len: u32, limit: u32) -> Result<&'a str, WireError> {
        if len > limit {
            return Err(WireError::TooLong { what: self.what, found: len.into(), limit: limit.into() });
        }
        let Some((head, rest)) = usize::try_from(len).ok().and_then(|len| self.rest.split_at_checked(len))
        else {
            return Err(WireError::Malformed { what: self.what, why: "a string ends past its end" });
        };
        self.rest = rest;
        std::str::from_utf8(head).map_err(|_| WireError::NotUtf8 { what: self.what })
    }

    pub(crate) fn rest(self) -> &'a [u8] {
        self.rest
    }

    /// Checks that nothing is left.
    pub(crate) fn end(self) -> Result<(), WireError> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(WireError::Malformed { what: self.what, why: "bytes are left over" })
        }
    }
}
