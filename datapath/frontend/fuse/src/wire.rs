//! Encodes and decodes the FUSE protocol: requests are decoded, answers encoded. No descriptors, no state.
//!
//! Numbers are in the host's byte order. Names and layouts are those of `linux/fuse.h`, version 7.31 and later.

use std::time::Duration;

use rustix::io::Errno;

/// Size of `fuse_in_header`.
pub(crate) const HEADER_BYTES: usize = 40;
/// Offset of a write's data: after the header and `fuse_write_in`.
pub(crate) const WRITE_DATA_AT: usize = HEADER_BYTES + 40;
/// Size of `fuse_out_header`.
pub(crate) const ANSWER_HEADER_BYTES: usize = 16;

/// The protocol version, and the oldest minor version that has all that is used.
pub(crate) const MAJOR: u32 = 7;
pub(crate) const MINOR: u32 = 40;
pub(crate) const OLDEST_MINOR: u32 = 31;

// Flags of `FUSE_INIT`, the upper 32 in `flags2`.
pub(crate) const ASYNC_READ: u64 = 1;
pub(crate) const BIG_WRITES: u64 = 1 << 5;
pub(crate) const ASYNC_DIO: u64 = 1 << 15;
pub(crate) const PARALLEL_DIROPS: u64 = 1 << 18;
pub(crate) const MAX_PAGES: u64 = 1 << 22;
pub(crate) const INIT_EXT: u64 = 1 << 30;
pub(crate) const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;

// Flags of the answer to `FUSE_OPEN`.
pub(crate) const FOPEN_DIRECT_IO: u32 = 1;
pub(crate) const FOPEN_NOFLUSH: u32 = 1 << 5;
pub(crate) const FOPEN_PARALLEL_DIRECT_WRITES: u32 = 1 << 6;

// The fields that a `FUSE_SETATTR` sets.
pub(crate) const SET_MODE: u32 = 1;
pub(crate) const SET_UID: u32 = 1 << 1;
pub(crate) const SET_GID: u32 = 1 << 2;
pub(crate) const SET_SIZE: u32 = 1 << 3;

/// A request of the kernel.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Request<'a> {
    Init {
        major: u32,
        minor: u32,
        max_readahead: u32,
        flags: u64,
    },
    Lookup {
        name: &'a [u8],
    },
    /// No answer is expected.
    Forget,
    GetAttr,
    SetAttr {
        valid: u32,
        size_bytes: u64,
        mode: u32,
        uid: u32,
        gid: u32,
    },
    Open {
        flags: u32,
    },
    OpenDir,
    Read {
        offset: u64,
        len: u32,
    },
    Write {
        offset: u64,
        len: u32,
        flags: u32,
    },
    ReadDir {
        offset: u64,
        len: u32,
    },
    StatFs,
    Fsync,
    FsyncDir,
    Release,
    Fallocate {
        offset: u64,
        len: u64,
        mode: u32,
    },
    Seek {
        offset: u64,
        whence: u32,
    },
    Destroy,
    /// Creates, removes or renames files.
    ModifyDirectory,
    /// A request that is not supported; the kernel then works without it.
    Other,
}

/// A request with the header fields that all requests have.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Message<'a> {
    pub(crate) unique: u64,
    pub(crate) node: u64,
    pub(crate) request: Request<'a>,
}

/// Reads fields one after the other.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn u32(&mut self) -> Option<u32> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_ne_bytes(*first))
    }

    fn u64(&mut self) -> Option<u64> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_ne_bytes(*first))
    }

    fn skip(&mut self, bytes: usize) -> Option<()> {
        self.0 = self.0.get(bytes..)?;
        Some(())
    }
}

impl<'a> Message<'a> {
    /// Decodes the bytes of one read of `/dev/fuse`; `None` if they are shorter than the request says.
    pub(crate) fn decode(bytes: &'a [u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        let (_len, opcode) = (fields.u32()?, fields.u32()?);
        let (unique, node) = (fields.u64()?, fields.u64()?);
        fields.skip(16)?;
        let request = Request::decode(opcode, fields)?;
        Some(Self { unique, node, request })
    }
}

impl<'a> Request<'a> {
    fn decode(opcode: u32, mut fields: Fields<'a>) -> Option<Self> {
        Some(match opcode {
            1 => Request::Lookup { name: fields.0.split(|byte| *byte == 0).next()? },
            2 | 42 => Request::Forget,
            3 => Request::GetAttr,
            4 => {
                let valid = fields.u32()?;
                fields.skip(12)?;
                let size_bytes = fields.u64()?;
                fields.skip(44)?;
                let mode = fields.u32()?;
                fields.skip(4)?;
                Request::SetAttr { valid, size_bytes, mode, uid: fields.u32()?, gid: fields.u32()? }
            }
            // SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, CREATE, RENAME2, TMPFILE
            6 | 8..=13 | 35 | 45 | 51 => Request::ModifyDirectory,
            14 => Request::Open { flags: fields.u32()? },
            15 | 16 | 28 => {
                fields.skip(8)?;
                let (offset, len) = (fields.u64()?, fields.u32()?);
                fields.skip(12)?;
                let flags = fields.u32()?;
                match opcode {
                    15 => Request::Read { offset, len },
                    16 => Request::Write { offset, len, flags },
                    _ => Request::ReadDir { offset, len },
                }
            }
            17 => Request::StatFs,
            18 | 29 => Request::Release,
            20 => Request::Fsync,
            26 => {
                let (major, minor) = (fields.u32()?, fields.u32()?);
                let (max_readahead, low) = (fields.u32()?, u64::from(fields.u32()?));
                let high = if low & INIT_EXT == 0 { 0 } else { u64::from(fields.u32()?) };
                Request::Init { major, minor, max_readahead, flags: low | high << 32 }
            }
            27 => Request::OpenDir,
            30 => Request::FsyncDir,
            38 => Request::Destroy,
            43 => {
                fields.skip(8)?;
                let (offset, len) = (fields.u64()?, fields.u64()?);
                Request::Fallocate { offset, len, mode: fields.u32()? }
            }
            46 => {
                fields.skip(8)?;
                Request::Seek { offset: fields.u64()?, whence: fields.u32()? }
            }
            _ => Request::Other,
        })
    }
}

/// `fuse_out_header`.
pub(crate) fn answer_header(
    unique: u64,
    body_bytes: usize,
    error: Option<Errno>,
) -> [u8; ANSWER_HEADER_BYTES] {
    let len = u32::try_from(body_bytes.saturating_add(ANSWER_HEADER_BYTES)).unwrap_or(u32::MAX);
    let error = error.map_or(0, |errno| errno.raw_os_error().saturating_neg());
    let mut out = [0; ANSWER_HEADER_BYTES];
    let fields = len.to_ne_bytes().into_iter().chain(error.to_ne_bytes()).chain(unique.to_ne_bytes());
    out.iter_mut().zip(fields).for_each(|(to, from)| *to = from);
    out
}

/// Builds the body of an answer.
#[derive(Default)]
pub(crate) struct Body(pub(crate) Vec<u8>);

impl Body {
    pub(crate) fn u16(mut self, value: u16) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    pub(crate) fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    pub(crate) fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    pub(crate) fn zeroes(mut self, bytes: usize) -> Self {
        self.0.resize(self.0.len().saturating_add(bytes), 0);
        self
    }
}

/// The values that the answer to `FUSE_INIT` agrees to.
pub(crate) struct Agreed {
    pub(crate) minor: u32,
    pub(crate) max_readahead: u32,
    pub(crate) flags: u64,
    pub(crate) max_background: u16,
    pub(crate) max_write: u32,
}

impl Agreed {
    /// `fuse_init_out`.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let [low, high] = halves(self.flags);
        let max_pages = u16::try_from(self.max_write / 4096).unwrap_or(u16::MAX);
        let congested = self.max_background.saturating_sub(self.max_background / 4);
        let body = Body::default().u32(MAJOR).u32(self.minor).u32(self.max_readahead).u32(low);
        let body = body.u16(self.max_background).u16(congested.max(1)).u32(self.max_write).u32(1);
        body.u16(max_pages).u16(0).u32(high).zeroes(28).0
    }
}

fn halves(value: u64) -> [u32; 2] {
    let part = |shift: u32| u32::try_from(value >> shift & u64::from(u32::MAX)).unwrap_or(0);
    [part(0), part(32)]
}

/// `fuse_attr`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attributes {
    pub(crate) node: u64,
    pub(crate) size_bytes: u64,
    pub(crate) blocks: u64,
    /// Since 1970; used for all three times.
    pub(crate) time: Duration,
    pub(crate) mode: u32,
    pub(crate) links: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl Attributes {
    fn append(&self, body: Body) -> Body {
        let (seconds, nanoseconds) = (self.time.as_secs(), self.time.subsec_nanos());
        let body = body.u64(self.node).u64(self.size_bytes).u64(self.blocks);
        let body = body.u64(seconds).u64(seconds).u64(seconds);
        let body = body.u32(nanoseconds).u32(nanoseconds).u32(nanoseconds);
        body.u32(self.mode).u32(self.links).u32(self.uid).u32(self.gid).u32(0).u32(4096).u32(0)
    }

    /// `fuse_attr_out`.
    pub(crate) fn encode(&self, valid_s: u64) -> Vec<u8> {
        self.append(Body::default().u64(valid_s).u64(0)).0
    }

    /// `fuse_entry_out`; names never change, so the kernel may keep them.
    pub(crate) fn encode_entry(&self, valid_s: u64) -> Vec<u8> {
        let body = Body::default().u64(self.node).u64(0).u64(u64::from(u32::MAX)).u64(valid_s).u64(0);
        self.append(body).0
    }
}

/// `fuse_dirent`, padded.
pub(crate) fn directory_entry(body: Body, node: u64, next: u64, name: &[u8], is_directory: bool) -> Body {
    let kind = if is_directory { 4 } else { 8 };
    let name_bytes = u32::try_from(name.len()).unwrap_or(u32::MAX);
    let mut body = body.u64(node).u64(next).u32(name_bytes).u32(kind);
    body.0.extend(name);
    body.zeroes(name.len().next_multiple_of(8).saturating_sub(name.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message with these fields after the header.
    fn message(opcode: u32, body: Body) -> Vec<u8> {
        let head = Body::default().u32(0).u32(opcode).u64(7).u64(2).zeroes(16);
        [head.0, body.0].concat()
    }

    fn decoded(bytes: &[u8]) -> Request<'_> {
        let message = Message::decode(bytes).unwrap();
        assert_eq!((message.unique, message.node), (7, 2));
        message.request
    }

    #[test]
    fn requests_are_decoded() {
        let write = Body::default().u64(1).u64(8192).u32(3).u32(0).u64(0).u32(0o10000).u32(0);
        let bytes = message(16, Body([write.0, b"abc".to_vec()].concat()));
        assert_eq!(decoded(&bytes), Request::Write { offset: 8192, len: 3, flags: 0o10000 });
        assert_eq!(&bytes[WRITE_DATA_AT..], b"abc");
        let lookup = message(1, Body(b"disk\0".to_vec()));
        assert_eq!(decoded(&lookup), Request::Lookup { name: b"disk" });
        let set =
            Body::default().u32(SET_SIZE).u32(0).u64(0).u64(99).zeroes(44).u32(0o600).u32(0).u32(5).u32(6);
        let set = message(4, set.u32(0));
        let expected = Request::SetAttr { valid: SET_SIZE, size_bytes: 99, mode: 0o600, uid: 5, gid: 6 };
        assert_eq!(decoded(&set), expected);
        let punch = message(43, Body::default().u64(0).u64(4096).u64(512).u32(3).u32(0));
        assert_eq!(decoded(&punch), Request::Fallocate { offset: 4096, len: 512, mode: 3 });
        let init = message(26, Body::default().u32(7).u32(45).u32(0).u32(1 << 30 | 1).u32(1 << 4).zeroes(44));
        let flags = 1 << 36 | 1 << 30 | 1;
        assert_eq!(decoded(&init), Request::Init { major: 7, minor: 45, max_readahead: 0, flags });
        assert_eq!(decoded(&message(4711, Body::default())), Request::Other);
    }

    #[test]
    fn every_truncated_message_is_refused_or_whole() {
        let body = Body::default().zeroes(120);
        for opcode in 0..60 {
            let bytes = message(opcode, Body(body.0.clone()));
            for len in 0..bytes.len() {
                // Checks only that nothing panics, and that bytes shorter than a header are refused.
                assert!(Message::decode(&bytes[..len]).is_none() || len >= HEADER_BYTES);
            }
        }
    }

    #[test]
    fn answers_have_the_sizes_of_the_header_file() {
        let agreed =
            Agreed { minor: 40, max_readahead: 0, flags: 1 << 36, max_background: 64, max_write: 1 << 20 };
        let init = agreed.encode();
        assert_eq!(init.len(), 64);
        assert_eq!(u16::from_ne_bytes(init[28..30].try_into().unwrap()), 256);
        assert_eq!(u32::from_ne_bytes(init[32..36].try_into().unwrap()), 1 << 4);
        let file = Attributes {
            node: 2,
            size_bytes: 1 << 30,
            blocks: 0,
            time: Duration::from_secs(1),
            mode: 0o100_600,
            links: 1,
            uid: 0,
            gid: 0,
        };
        assert_eq!(file.encode(1).len(), 104);
        assert_eq!(file.encode_entry(1).len(), 128);
        assert_eq!(directory_entry(Body::default(), 2, 3, b"disk", false).0.len(), 32);
        let header = answer_header(7, 8, Some(Errno::NOSPC));
        assert_eq!(header[..4], 24_u32.to_ne_bytes());
        assert_eq!(header[4..8], (-28_i32).to_ne_bytes());
    }
}
