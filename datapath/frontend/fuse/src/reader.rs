//! A thread that receives requests of the kernel and answers them.

use std::sync::Arc;

use rustix::io::Errno;

use crate::channel::{Channel, Taken};
use crate::data::{Asker, Disk};
use crate::files::{ATTRIBUTES_VALID_S, FILE, Files};
use crate::limits::MAX_TRANSFER_BYTES;
use crate::parts::Clear;
use crate::wire::{
    ANSWER_HEADER_BYTES, ASYNC_DIO, ASYNC_READ, Agreed, BIG_WRITES, Body, DIRECT_IO_ALLOW_MMAP,
    FOPEN_DIRECT_IO, FOPEN_NOFLUSH, FOPEN_PARALLEL_DIRECT_WRITES, INIT_EXT, MAJOR, MAX_PAGES, MINOR, Message,
    OLDEST_MINOR, PARALLEL_DIROPS, Request, WRITE_DATA_AT,
};

/// Size of the request buffer: the kernel refuses to fill a shorter one.
const REQUEST_BYTES: usize = MAX_TRANSFER_BYTES as usize + 8192;
const REPLY_BYTES: usize = MAX_TRANSFER_BYTES as usize + ANSWER_HEADER_BYTES + 8192;

// Flags of `fallocate` (`linux/falloc.h`).
const KEEP_SIZE: u32 = 1;
const PUNCH_HOLE: u32 = 2;
const ZERO_RANGE: u32 = 16;

const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

/// Mask of the access mode in the flags of `open`.
const ACCESS_MODE: u32 = 3;

/// One thread's descriptor and buffers.
pub(crate) struct Reader {
    pub(crate) disk: Arc<Disk>,
    files: Arc<Files>,
    channel: Arc<Channel>,
    background_requests: u16,
    request: Vec<u8>,
    reply: Vec<u8>,
}

impl Reader {
    pub(crate) fn new(
        disk: Arc<Disk>,
        files: Arc<Files>,
        channel: Arc<Channel>,
        background_requests: u16,
    ) -> Self {
        // Zeroed memory is not allocated until it is touched.
        let (request, reply) = (vec![0; REQUEST_BYTES], vec![0; REPLY_BYTES]);
        Self { disk, files, channel, background_requests, request, reply }
    }

    /// Serves one request; `None` when no more requests will come.
    pub(crate) fn serve_one(&mut self) -> Option<()> {
        match self.channel.take(&mut self.request) {
            Ok(Taken::Request(len)) => self.serve(len),
            Ok(Taken::Nothing) => {}
            Ok(Taken::Unmounted) => return None,
            Err(errno) => {
                // Out of memory, which may be temporary.
                self.disk.warn(&format_args!("cannot take a request from the kernel: {errno}"));
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
        }
        Some(())
    }

    fn serve(&mut self, len: usize) {
        let bytes = self.request.get(..len).unwrap_or_default();
        let Some(Message { unique, node, request }) = Message::decode(bytes) else {
            let opcode = bytes.get(4..8).unwrap_or_default();
            self.disk.warn(&format_args!("a request of {len} bytes is too short for its kind {opcode:?}"));
            if let Some(Ok(unique)) = bytes.get(8..16).map(<[u8; 8]>::try_from) {
                self.channel.fail(u64::from_ne_bytes(unique), Errno::INVAL);
            }
            return;
        };
        let asker = Asker { channel: Arc::clone(&self.channel), unique };
        match request {
            Request::Read { offset, len } if node == FILE => {
                self.disk.read(asker, offset, len, &mut self.reply);
            }
            Request::Write { offset, len, flags } if node == FILE => {
                let end = usize::try_from(len).unwrap_or(usize::MAX).saturating_add(WRITE_DATA_AT);
                match bytes.get(WRITE_DATA_AT..end) {
                    Some(data) => self.disk.write(asker, offset, data, flags),
                    None => asker.fail(Errno::INVAL),
                }
            }
            Request::Fsync => self.disk.flush(asker),
            Request::Fallocate { offset, len, mode } => self.allocate(asker, offset, len, mode),
            Request::Init { major, minor, max_readahead, flags } => {
                self.agree(&asker, (major, minor), max_readahead, flags);
            }
            Request::Forget => {}
            request => match self.look_up(node, &request) {
                Ok(body) => asker.answer(&body),
                Err(errno) => asker.fail(errno),
            },
        }
    }

    /// Answers requests about names and attributes.
    fn look_up(&self, node: u64, request: &Request<'_>) -> Result<Vec<u8>, Errno> {
        let files = &self.files;
        match *request {
            Request::Lookup { name } => Ok(files.lookup(node, name)?.encode_entry(ATTRIBUTES_VALID_S)),
            Request::GetAttr => Ok(files.attributes(node)?.encode(ATTRIBUTES_VALID_S)),
            Request::SetAttr { valid, size_bytes, mode, uid, gid } => {
                Ok(files.set(node, valid, size_bytes, (mode, uid, gid))?.encode(ATTRIBUTES_VALID_S))
            }
            Request::Open { flags } => {
                if self.disk.geometry.read_only && flags & ACCESS_MODE != 0 {
                    return Err(Errno::ROFS);
                }
                // Nothing is cached between a program and the volume: an answered write is in the volume, and
                // a write that finds no space fails in the program that wrote. So nothing needs to be flushed
                // when a descriptor is closed (NOFLUSH). With a flush, the kernel would wait at each close
                // for all writes in flight, also when a program starts another one while writes wait for
                // space.
                let open = FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES | FOPEN_NOFLUSH;
                Ok(Body::default().u64(0).u32(open).u32(0).0)
            }
            Request::OpenDir => Ok(Body::default().u64(0).u32(0).u32(0).0),
            Request::ReadDir { offset, len } => files.list(node, offset, len),
            Request::StatFs => Ok(files.statistics()),
            Request::Seek { offset, whence: SEEK_DATA } => {
                Ok(Body::default().u64(files.seek(offset, true)?).0)
            }
            Request::Seek { offset, whence: SEEK_HOLE } => {
                Ok(Body::default().u64(files.seek(offset, false)?).0)
            }
            Request::Seek { .. } => Err(Errno::INVAL),
            Request::FsyncDir | Request::Release | Request::Destroy => Ok(Vec::new()),
            // The directory always has exactly one file.
            Request::ModifyDirectory => Err(Errno::PERM),
            Request::Read { .. } | Request::Write { .. } => Err(Errno::ISDIR),
            _ => Err(Errno::NOSYS),
        }
    }

    fn allocate(&self, asker: Asker, offset: u64, len: u64, mode: u32) {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.files.size_bytes());
        if mode == PUNCH_HOLE | KEEP_SIZE {
            return self.disk.clear(asker, offset, len, Clear::Hole);
        }
        if mode & !KEEP_SIZE == ZERO_RANGE {
            if mode & KEEP_SIZE == 0 && !fits {
                return asker.fail(Errno::NOSPC);
            }
            return self.disk.clear(asker, offset, len, Clear::Zero);
        }
        // Space for later writes cannot be reserved, and ranges cannot be removed from the file.
        asker.fail(Errno::OPNOTSUPP);
    }

    fn agree(&self, asker: &Asker, (major, minor): (u32, u32), max_readahead: u32, flags: u64) {
        if major < MAJOR || (major == MAJOR && minor < OLDEST_MINOR) {
            self.disk.warn(&format_args!(
                "the kernel speaks FUSE {major}.{minor}, and at least {MAJOR}.{OLDEST_MINOR} (Linux 5.4) is needed"
            ));
            return asker.fail(Errno::PROTO);
        }
        let wanted = ASYNC_READ
            | BIG_WRITES
            | ASYNC_DIO
            | PARALLEL_DIROPS
            | MAX_PAGES
            | INIT_EXT
            | DIRECT_IO_ALLOW_MMAP;
        let agreed = Agreed {
            minor: minor.min(MINOR),
            max_readahead,
            flags: flags & wanted,
            max_background: self.background_requests,
            max_write: MAX_TRANSFER_BYTES,
        };
        asker.answer(&agreed.encode());
    }
}
