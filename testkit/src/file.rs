//! A file, or a block device of the kernel, as a [`Device`], to run the conformance suite through the program
//! that created it.
//!
//! A block device is read and written past the page cache, so that the compared data has passed through its
//! driver.
#![expect(unsafe_code, reason = "discarding and zeroing a block device are ioctls without a safe call")]

use std::fs::{File, OpenOptions};
use std::io::IoSlice;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex};

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, IoErrorKind, Op, Request,
};
use rustix::fs::{FallocateFlags, OFlags, SeekFrom};
use rustix::io::{Errno, ReadWriteFlags};
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};

/// `BLKDISCARD` and `BLKZEROOUT`: offset and length in bytes.
const DISCARD: Opcode = opcode::none(0x12, 119);
const ZERO_OUT: Opcode = opcode::none(0x12, 127);

/// The memory alignment that direct I/O may require, on every device.
const MEMORY_ALIGNMENT: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Regular,
    Block,
}

/// The file as a device.
pub struct FileDevice {
    file: Arc<File>,
    kind: Kind,
    geometry: Geometry,
    /// Seeking moves the file's position, which is shared.
    seeking: Mutex<()>,
}

impl FileDevice {
    /// A regular file whose blocks have `logical_block_bytes`, which may be 1.
    pub fn open(path: &Path, read_only: bool, logical_block_bytes: u32) -> std::io::Result<Self> {
        let file = OpenOptions::new().read(true).write(!read_only).open(path)?;
        let geometry = Geometry {
            size_bytes: file.metadata()?.len(),
            logical_block_bytes,
            physical_block_bytes: 4096,
            read_only,
            volatile_cache: true,
        };
        Ok(Self { file: Arc::new(file), kind: Kind::Regular, geometry, seeking: Mutex::new(()) })
    }

    /// A block device that is writable, and that nobody else uses.
    pub fn open_block_device(path: &Path) -> std::io::Result<Self> {
        let flags = OFlags::DIRECT | OFlags::EXCL;
        let file =
            OpenOptions::new().read(true).write(true).custom_flags(flags.bits().cast_signed()).open(path)?;
        let geometry = Geometry {
            // Its metadata does not contain the length.
            size_bytes: rustix::fs::seek(&file, SeekFrom::End(0))?,
            logical_block_bytes: rustix::fs::ioctl_blksszget(&file)?,
            physical_block_bytes: rustix::fs::ioctl_blkpbszget(&file)?,
            read_only: false,
            volatile_cache: true,
        };
        Ok(Self { file: Arc::new(file), kind: Kind::Block, geometry, seeking: Mutex::new(()) })
    }
}

impl Device for FileDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn try_now(&self, _op: Op<'_>) -> Result<Attempt, IoError> {
        Ok(Attempt::MustWait)
    }

    fn submit(&self, mut request: Request, done: Completion) {
        let (file, kind, read_only) = (Arc::clone(&self.file), self.kind, self.geometry.read_only);
        // One thread each, so that the requests of a round are in flight together.
        std::thread::spawn(move || {
            let changes =
                !matches!(request, Request::Read { .. } | Request::Prefetch { .. } | Request::Flush);
            let result = match kind {
                _ if changes && read_only => Err(Errno::ROFS.into()),
                Kind::Regular => on_file(&file, &mut request),
                Kind::Block => on_block_device(&file, &mut request),
            };
            done.complete(result.map_err(io_error), request.into_buffer());
        });
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        if self.kind == Kind::Block {
            // The kernel does not report the contents of a block device.
            return Ok(vec![Extent { len: range.len(), kind: ExtentKind::Data }]);
        }
        let _seeking = self.seeking.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut extents = Vec::new();
        let mut at = range.offset();
        while at < range.end() && extents.len() < max_extents {
            let data = match rustix::fs::seek(&*self.file, SeekFrom::Data(at)) {
                Ok(data) => data,
                Err(Errno::NXIO) => self.geometry.size_bytes,
                Err(errno) => return Err(io_error(errno.into())),
            };
            let (end, kind) = if data == at {
                let hole = rustix::fs::seek(&*self.file, SeekFrom::Hole(at));
                (hole.map_err(|errno| io_error(errno.into()))?, ExtentKind::Data)
            } else {
                (data, ExtentKind::Hole)
            };
            assert!(end > at, "a search from {at} ended at {end}");
            let end = end.min(range.end());
            extents.push(Extent { len: end - at, kind });
            at = end;
        }
        Ok(extents)
    }
}

fn on_file(file: &File, request: &mut Request) -> std::io::Result<()> {
    let clear = |mode: FallocateFlags, range: &ByteRange, fua: bool| {
        rustix::fs::fallocate(file, mode, range.offset(), range.len())?;
        if fua { file.sync_data() } else { Ok(()) }
    };
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match request {
        Request::Read { range, buffer } => file.read_exact_at(buffer, range.offset()),
        Request::Write { range, buffer, fua } => {
            file.write_all_at(buffer, range.offset())?;
            if *fua { file.sync_data() } else { Ok(()) }
        }
        Request::WriteZeroes { range, may_unmap: true, fua } => clear(punch, range, *fua),
        Request::WriteZeroes { range, may_unmap: false, fua } => {
            clear(FallocateFlags::ZERO_RANGE, range, *fua)
        }
        Request::Discard { range } => clear(punch, range, false),
        Request::Flush => file.sync_all(),
        Request::Prefetch { .. } => Ok(()),
    }
}

fn on_block_device(file: &File, request: &mut Request) -> std::io::Result<()> {
    match request {
        Request::Read { range, buffer } => {
            let mut memory = Aligned::new(buffer.len());
            file.read_exact_at(memory.bytes(), range.offset())?;
            buffer.copy_from_slice(memory.bytes());
            Ok(())
        }
        Request::Write { range, buffer, fua } => {
            let mut memory = Aligned::new(buffer.len());
            memory.bytes().copy_from_slice(buffer);
            // With this flag the kernel sends a write that is durable by itself, if the device supports it.
            let flags = if *fua { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
            let mut written = 0;
            while written < buffer.len() {
                let rest = [IoSlice::new(&memory.bytes()[written..])];
                match rustix::io::pwritev2(file, &rest, range.offset() + written as u64, flags) {
                    Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
                    Ok(bytes) => written += bytes,
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
            Ok(())
        }
        Request::WriteZeroes { range, may_unmap, fua } => {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let punched = match *may_unmap {
                true => rustix::fs::fallocate(file, punch, range.offset(), range.len()),
                false => Err(Errno::OPNOTSUPP),
            };
            match punched {
                // If a device cannot punch holes, the kernel writes zeroes.
                Err(Errno::OPNOTSUPP) => range_command::<ZERO_OUT>(file, *range)?,
                punched => punched?,
            }
            if *fua { file.sync_data() } else { Ok(()) }
        }
        Request::Discard { range } => range_command::<DISCARD>(file, *range),
        Request::Flush => file.sync_all(),
        Request::Prefetch { .. } => Ok(()),
    }
}

fn range_command<const COMMAND: Opcode>(file: &File, range: ByteRange) -> std::io::Result<()> {
    // SAFETY: both commands take a pointer to an offset and a length of 64 bits each, which they only read.
    unsafe { ioctl(file, Setter::<COMMAND, [u64; 2]>::new([range.offset(), range.len()])) }?;
    Ok(())
}

/// Memory for direct I/O.
struct Aligned {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    fn new(len: usize) -> Self {
        let memory = vec![0; len + MEMORY_ALIGNMENT];
        let start = memory.as_ptr().align_offset(MEMORY_ALIGNMENT);
        Self { memory, start, len }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

fn io_error(error: std::io::Error) -> IoError {
    let kind = match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::ROFS) => IoErrorKind::ReadOnly,
        Some(Errno::NOSPC) => IoErrorKind::NoSpace,
        _ => IoErrorKind::Device,
    };
    IoError::with_source(kind, error.to_string(), error)
}
