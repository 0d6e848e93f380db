//! Properties that must hold for every message from `/dev/fuse`; used by the fuzzers in `fuzz/` and by a
//! bounded test.
//!
//! Each message is decoded twice: by [`crate::wire`], and by the offsets of the structures in `linux/fuse.h`,
//! which are listed here. The two must agree on which messages are refused, and on each field of the others.

use crate::wire::{Body, HEADER_BYTES, Message, Request, WRITE_DATA_AT};

/// A check of bytes from a fuzzer or a test.
pub type Oracle = fn(&[u8]);

/// All checks, with their names and seed bytes.
pub fn targets() -> Vec<(&'static str, Oracle, Vec<Vec<u8>>)> {
    let message = |opcode: u32| {
        let head = Body::default().u32(128).u32(opcode).u64(7).u64(2).u64(3).u64(4);
        let body = (1..12).fold(head, |body, number| body.u64(number << 33 | number));
        body.0
    };
    let opcodes = [1, 2, 3, 4, 6, 14, 15, 16, 17, 18, 20, 26, 27, 28, 29, 30, 38, 43, 46];
    let mut messages: Vec<Vec<u8>> = opcodes.map(message).to_vec();
    let init = Body::default().u32(104).u32(26).u64(1).zeroes(24);
    messages.push(init.u32(7).u32(45).u32(1 << 20).u32(1 << 30).u32(1 << 4).zeroes(44).0);
    messages.push([Body::default().u32(45).u32(1).u64(1).u64(1).zeroes(16).0, b"disk\0".to_vec()].concat());
    vec![("fuse_request", fuse_request, messages)]
}

/// The field of `N` bytes at an offset of the structure behind the header.
fn field<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    let start = HEADER_BYTES + offset;
    bytes.get(start..start + N)?.try_into().ok()
}

fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    field(bytes, offset).map(u32::from_ne_bytes)
}

fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    field(bytes, offset).map(u64::from_ne_bytes)
}

/// `FUSE_INIT_EXT`: there is a second word of flags.
const MORE_FLAGS: u64 = 1 << 30;

/// The request according to the structures of `linux/fuse.h`, up to their last field that is used.
fn expected(opcode: u32, bytes: &[u8]) -> Option<Request<'_>> {
    Some(match opcode {
        // LOOKUP: a name, up to its first zero byte.
        1 => {
            let name = bytes.get(HEADER_BYTES..)?;
            let len = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
            Request::Lookup { name: name.get(..len)? }
        }
        // FORGET, BATCH_FORGET
        2 | 42 => Request::Forget,
        3 => Request::GetAttr,
        // fuse_setattr_in: valid 0, size 16, mode 68, uid 76, gid 80
        4 => Request::SetAttr {
            valid: u32_at(bytes, 0)?,
            size_bytes: u64_at(bytes, 16)?,
            mode: u32_at(bytes, 68)?,
            uid: u32_at(bytes, 76)?,
            gid: u32_at(bytes, 80)?,
        },
        // SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, CREATE, RENAME2, TMPFILE
        6 | 8 | 9 | 10 | 11 | 12 | 13 | 35 | 45 | 51 => Request::ModifyDirectory,
        // fuse_open_in: flags 0
        14 => Request::Open { flags: u32_at(bytes, 0)? },
        // fuse_read_in and fuse_write_in: offset 8, size 16, flags 32
        15 => {
            u32_at(bytes, 32)?;
            Request::Read { offset: u64_at(bytes, 8)?, len: u32_at(bytes, 16)? }
        }
        16 => {
            Request::Write { offset: u64_at(bytes, 8)?, len: u32_at(bytes, 16)?, flags: u32_at(bytes, 32)? }
        }
        28 => {
            u32_at(bytes, 32)?;
            Request::ReadDir { offset: u64_at(bytes, 8)?, len: u32_at(bytes, 16)? }
        }
        17 => Request::StatFs,
        18 | 29 => Request::Release,
        20 => Request::Fsync,
        // fuse_init_in: major 0, minor 4, max_readahead 8, flags 12, flags2 16
        26 => {
            let low = u64::from(u32_at(bytes, 12)?);
            let high = if low & MORE_FLAGS == 0 { 0 } else { u64::from(u32_at(bytes, 16)?) };
            Request::Init {
                major: u32_at(bytes, 0)?,
                minor: u32_at(bytes, 4)?,
                max_readahead: u32_at(bytes, 8)?,
                flags: high * (1 << 32) + low,
            }
        }
        27 => Request::OpenDir,
        30 => Request::FsyncDir,
        38 => Request::Destroy,
        // fuse_fallocate_in: offset 8, length 16, mode 24
        43 => Request::Fallocate {
            offset: u64_at(bytes, 8)?,
            len: u64_at(bytes, 16)?,
            mode: u32_at(bytes, 24)?,
        },
        // fuse_lseek_in: offset 8, whence 16
        46 => Request::Seek { offset: u64_at(bytes, 8)?, whence: u32_at(bytes, 16)? },
        _ => Request::Other,
    })
}

/// Checks one message of the kernel.
pub fn fuse_request(bytes: &[u8]) {
    let header = || {
        let head = bytes.get(..HEADER_BYTES)?;
        let opcode = u32::from_ne_bytes(head.get(4..8)?.try_into().ok()?);
        let unique = u64::from_ne_bytes(head.get(8..16)?.try_into().ok()?);
        let node = u64::from_ne_bytes(head.get(16..24)?.try_into().ok()?);
        Some(Message { unique, node, request: expected(opcode, bytes)? })
    };
    let decoded = Message::decode(bytes);
    assert_eq!(decoded, header());
    if let Some(Message { request: Request::Write { .. }, .. }) = decoded {
        // The last used field is four bytes before the data.
        assert!(bytes.len() >= WRITE_DATA_AT - 4, "a write without its structure");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small version of the fuzzers' work.
    #[test]
    fn no_bytes_break_a_promise() {
        headwater_testkit::mutate::all(targets());
    }

    #[test]
    fn every_message_is_taken_from_its_last_field_on_and_refused_before() {
        for opcode in 0..60u32 {
            let mut bytes = Body::default().u32(160).u32(opcode).u64(7).u64(2).zeroes(120).0;
            while !bytes.is_empty() {
                fuse_request(&bytes);
                bytes.pop();
            }
        }
    }
}
