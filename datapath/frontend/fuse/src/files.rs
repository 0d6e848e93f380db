//! The directory and its one file: names, attributes, and the positions of data and holes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime};

use headwater_block::{ByteRange, ExtentKind, IoError};
use parking_lot::Mutex;
use rustix::io::Errno;

use crate::data::Disk;
use crate::wire::{Attributes, Body, SET_GID, SET_MODE, SET_SIZE, SET_UID, directory_entry};

/// Inode number of the directory; fixed by the kernel.
pub(crate) const DIRECTORY: u64 = 1;
/// Inode number of the file.
pub(crate) const FILE: u64 = 2;

/// How long the kernel may cache attributes, in seconds.
pub(crate) const ATTRIBUTES_VALID_S: u64 = 1;
/// The most extents that are examined to compute the space that the file occupies; the rest counts as data.
const COUNTED_EXTENTS: usize = 4096;
/// How long the computed space is cached.
const BLOCKS_VALID: Duration = Duration::from_secs(1);

/// Extents that a search requests at a time.
const EXTENTS_AT_A_TIME: usize = 256;

const FILE_TYPE: u32 = 0o100_000;
const DIRECTORY_TYPE: u32 = 0o040_000;
const PERMISSIONS: u32 = 0o7777;

/// The directory and the file.
pub(crate) struct Files {
    disk: Arc<Disk>,
    pub(crate) name: Vec<u8>,
    clock: fn() -> SystemTime,
    directory_mode: u32,
    mode: AtomicU32,
    uid: AtomicU32,
    gid: AtomicU32,
    changing: Mutex<Changing>,
}

struct Changing {
    modified: Duration,
    blocks: Option<(Instant, u64)>,
}

/// Result of a search for data or a hole: its offset.
pub(crate) type Found = Result<u64, Errno>;

impl Files {
    pub(crate) fn new(disk: Arc<Disk>, name: Vec<u8>, clock: fn() -> SystemTime, allow_other: bool) -> Self {
        let changing = Mutex::new(Changing { modified: since_epoch(clock), blocks: None });
        let write = if disk.geometry.read_only { 0 } else { 0o200 };
        Self {
            disk,
            name,
            clock,
            directory_mode: if allow_other { 0o555 } else { 0o500 },
            mode: AtomicU32::new(0o400 | write),
            uid: AtomicU32::new(rustix::process::getuid().as_raw()),
            gid: AtomicU32::new(rustix::process::getgid().as_raw()),
            changing,
        }
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.disk.geometry.size_bytes
    }

    /// Attributes of a node.
    pub(crate) fn attributes(&self, node: u64) -> Result<Attributes, Errno> {
        let owner = |field: &AtomicU32| field.load(Ordering::Relaxed);
        let (uid, gid) = (owner(&self.uid), owner(&self.gid));
        match node {
            DIRECTORY => Ok(Attributes {
                node,
                size_bytes: 0,
                blocks: 0,
                time: self.changing.lock().modified,
                mode: DIRECTORY_TYPE | self.directory_mode,
                links: 2,
                uid,
                gid,
            }),
            FILE => {
                let (time, blocks) = self.time_and_blocks();
                let mode = FILE_TYPE | owner(&self.mode);
                let size_bytes = self.size_bytes();
                Ok(Attributes { node, size_bytes, blocks, time, mode, links: 1, uid, gid })
            }
            _ => Err(Errno::NOENT),
        }
    }

    fn time_and_blocks(&self) -> (Duration, u64) {
        let mut changing = self.changing.lock();
        if self.disk.written.swap(false, Ordering::Relaxed) {
            changing.modified = since_epoch(self.clock);
        }
        let now = Instant::now();
        let blocks = match changing.blocks {
            Some((at, blocks)) if now.saturating_duration_since(at) < BLOCKS_VALID => blocks,
            _ => {
                let blocks = self.count_blocks();
                changing.blocks = Some((now, blocks));
                blocks
            }
        };
        (changing.modified, blocks)
    }

    /// Units of 512 bytes that hold data, so that `cp` and `du` treat the file as sparse.
    fn count_blocks(&self) -> u64 {
        let (mut at, size) = (0_u64, self.size_bytes());
        let (mut data, mut left) = (0_u64, COUNTED_EXTENTS);
        while at < size && left > 0 {
            let Some(range) = ByteRange::new(at, size.saturating_sub(at)) else { break };
            let Ok(extents) = self.disk.device.extents(range, left.min(EXTENTS_AT_A_TIME)) else { break };
            if extents.is_empty() {
                break;
            }
            left = left.saturating_sub(extents.len());
            for extent in extents {
                at = at.saturating_add(extent.len);
                if extent.kind != ExtentKind::Hole {
                    data = data.saturating_add(extent.len);
                }
            }
        }
        data.saturating_add(size.saturating_sub(at)).div_ceil(512)
    }

    /// `FUSE_LOOKUP` in the directory.
    pub(crate) fn lookup(&self, node: u64, name: &[u8]) -> Result<Attributes, Errno> {
        if node != DIRECTORY {
            return Err(Errno::NOTDIR);
        }
        if name == self.name { self.attributes(FILE) } else { Err(Errno::NOENT) }
    }

    /// `FUSE_SETATTR`: owner and permissions are kept while the server runs; times are noted; the size cannot
    /// change.
    pub(crate) fn set(
        &self,
        node: u64,
        valid: u32,
        wanted_bytes: u64,
        (mode, uid, gid): (u32, u32, u32),
    ) -> Result<Attributes, Errno> {
        if valid & SET_SIZE != 0 && (node != FILE || wanted_bytes != self.size_bytes()) {
            self.disk.warn(&format_args!(
                "a program wanted to give the file {wanted_bytes} bytes, but a disk keeps its size of {} bytes; \
                 write without truncating (dd conv=notrunc, qemu-img convert -n)",
                self.size_bytes()
            ));
            return Err(Errno::PERM);
        }
        let owner_or_mode = valid & (SET_MODE | SET_UID | SET_GID) != 0;
        if node != FILE && owner_or_mode {
            return Err(Errno::PERM);
        }
        for (flag, field, value) in
            [(SET_MODE, &self.mode, mode & PERMISSIONS), (SET_UID, &self.uid, uid), (SET_GID, &self.gid, gid)]
        {
            if valid & flag != 0 {
                field.store(value, Ordering::Relaxed);
            }
        }
        self.attributes(node)
    }

    /// `FUSE_READDIR` from entry number `offset` on.
    pub(crate) fn list(&self, node: u64, offset: u64, len: u32) -> Result<Vec<u8>, Errno> {
        if node != DIRECTORY {
            return Err(Errno::NOTDIR);
        }
        let room = usize::try_from(len).unwrap_or(usize::MAX);
        let mut body = Body::default();
        for (number, (node, name)) in
            (0_u64..).zip([(DIRECTORY, &b"."[..]), (DIRECTORY, b".."), (FILE, &self.name)])
        {
            if number < offset {
                continue;
            }
            let next = number.saturating_add(1);
            let longer = directory_entry(Body(body.0.clone()), node, next, name, node == DIRECTORY);
            if longer.0.len() > room {
                break;
            }
            body = longer;
        }
        Ok(body.0)
    }

    /// `FUSE_STATFS`: a full file system with one file.
    pub(crate) fn statistics(&self) -> Vec<u8> {
        let blocks = self.size_bytes().div_ceil(4096);
        let body = Body::default().u64(blocks).u64(0).u64(0).u64(2).u64(0);
        body.u32(4096).u32(255).u32(4096).zeroes(28).0
    }

    /// `SEEK_DATA` and `SEEK_HOLE`. There is always a hole at the end.
    pub(crate) fn seek(&self, offset: u64, for_data: bool) -> Found {
        let size = self.size_bytes();
        if offset >= size {
            return Err(Errno::NXIO);
        }
        let block = u64::from(self.disk.geometry.logical_block_bytes);
        let mut at = offset.saturating_sub(offset.checked_rem(block).unwrap_or(0));
        while at < size {
            let failed = |error: IoError| self.disk.failed(&"a search for data or holes", &error);
            let range = ByteRange::new(at, size.saturating_sub(at)).ok_or(Errno::INVAL)?;
            let extents = self.disk.device.extents(range, EXTENTS_AT_A_TIME).map_err(failed)?;
            if extents.is_empty() {
                return Err(Errno::IO);
            }
            for extent in extents {
                if (extent.kind == ExtentKind::Data) == for_data {
                    return Ok(at.max(offset));
                }
                at = at.saturating_add(extent.len);
            }
        }
        if for_data { Err(Errno::NXIO) } else { Ok(size) }
    }
}

fn since_epoch(clock: fn() -> SystemTime) -> Duration {
    clock().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}
