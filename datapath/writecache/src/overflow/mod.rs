//! The overflow disk of one volume: positions for spilled segments, which are encrypted and read with direct
//! I/O.
//!
//! A position is [`encrypt::ENCRYPTED_SEGMENT_BYTES`] long. Space is reserved ("claimed") with `fallocate`
//! before a segment is written there, so that a full host file system is noticed before data is accepted.
//! Space is returned by punching a hole. The file of an ephemeral cache has no name, so it disappears with
//! the process, however that ends. The file of a persistent cache has a name; [`crate::persist`] says which
//! of its contents are valid.
//!
//! | file | contents |
//! |---|---|
//! | `place` | opens the file or device, and checks its space |
//! | `signature` | detects other data on a device |
//! | `positions` | claims, uses, frees and punches out positions |
//! | `buffering` | decides between direct and buffered I/O |
//! | `io`, `uring` | execute reads and writes |
//! | `encrypt`, `gcm`, `key_memory` | encrypt slots and protect the key |

pub mod buffering;
pub mod encrypt;
pub mod gcm;
pub mod io;
pub mod key_memory;
mod place;
mod positions;
mod signature;
pub mod uring;

use std::fs::File;
use std::io as stdio;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use headwater_block::{CompletionQueue, IoError, IoErrorKind};

use self::buffering::{Chosen, OpenFile};
use self::encrypt::{ENCRYPTED_SEGMENT_BYTES, ENCRYPTED_SLOT_BYTES, SlotKey};
use self::io::{Direction, IoEngine, IoOp};
pub use self::place::{BRIEF_NAME, check_directory};
use self::place::{check_space, direct_alignment, is_memory, open_file};
use self::positions::Positions;
pub use self::positions::{KEEP_POSITIONS, LOW_POSITIONS, NoPosition};
use crate::cache::{LittleSpace, OverflowOptions};
use crate::memory::AlignedBuffer;
use crate::memory_file::{Handed, KeyPage, KeyPlace, MemoryFile, crash};
use crate::persist::directory::open_rw;
use crate::sync::{Mutex, UNDER_MODEL_CHECKER, thread};
use crate::units::Slot;

/// After a failed write, the disk gets no writes for this time: it may recover.
const REST: Duration = Duration::from_millis(if UNDER_MODEL_CHECKER { 0 } else { 50 });

/// The most slots of one read (264 KiB).
pub const MAX_READ_SLOTS: usize = 64;

/// The most small read buffers that are kept for reuse while there are reads.
const KEEP_BUFFERS: usize = 64;

/// Space for two neighbouring slots at any alignment: a read of 4 KiB from any sector on needs both, if the
/// writes came in order.
const SMALL_BUFFER_BYTES: usize = 16384;

/// One volume's overflow.
pub struct Overflow {
    file: Arc<File>,
    engine: Arc<dyn IoEngine>,
    key: SlotKey,
    align: usize,
    buffering: Chosen,
    is_device: bool,
    /// Directory or block device, for messages.
    at: PathBuf,
    positions: Mutex<Positions>,
    failed_at: Mutex<Option<Instant>>,
    generation: AtomicU64,
    buffers: Mutex<Buffers>,
    /// Whether the host's thread knows that there may be such buffers.
    buffers_known: AtomicBool,
    no_fallocate: AtomicBool,
    operations: Operations,
    /// The parts that outlive the process.
    surviving: Option<Surviving>,
}

/// The parts of an overflow that the next process needs, if it outlives this one.
struct Surviving {
    memory: Arc<MemoryFile>,
    /// The page with the key, if it is not in the memory file.
    key: Option<KeyPage>,
}

/// The operations of the disk: numbers and bytes, by direction.
#[derive(Default)]
struct Operations {
    read: AtomicU64,
    read_bytes: AtomicU64,
    write: AtomicU64,
    write_bytes: AtomicU64,
}

/// Reads and writes of an overflow disk, so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskOperations {
    /// Reads.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Writes.
    pub writes: u64,
    /// Their bytes.
    pub write_bytes: u64,
}

/// Small read buffers, for reuse.
#[derive(Default)]
struct Buffers {
    free: Vec<AlignedBuffer>,
    /// Whether one was taken since the last trim.
    taken: bool,
}

/// Slots as they were read from the disk, still encrypted.
pub struct EncryptedRun<'a> {
    /// Consecutive encrypted slots.
    pub bytes: &'a [u8],
}

impl EncryptedRun<'_> {
    /// The encrypted slot with this index in the run.
    pub fn slot(&self, index: usize) -> Option<&[u8]> {
        self.bytes.get(index * ENCRYPTED_SLOT_BYTES..(index + 1) * ENCRYPTED_SLOT_BYTES)
    }
}

/// The error of an overflow that cannot be opened.
fn device(why: String) -> IoError {
    IoError::new(IoErrorKind::Device, why)
}

impl Overflow {
    /// Opens the overflow of an ephemeral cache: a directory, in which an unnamed file is made, or a block
    /// device.
    pub fn open(place: &OverflowOptions, engine: Arc<dyn IoEngine>) -> Result<Self, IoError> {
        let at = &place.at;
        let open = |direct| open_file(at, direct);
        let chosen = buffering::choose(place.buffering, at, &open)?;
        let key = SlotKey::random().map_err(device)?;
        Self::open_with(place, chosen, engine, key, &open)
    }

    /// Like [`Overflow::open`], for a cache whose memory is in a file and outlives the process.
    pub(crate) fn open_surviving(
        place: &OverflowOptions,
        engine: Arc<dyn IoEngine>,
        make_memory: impl FnOnce(&KeyPlace) -> Result<Arc<MemoryFile>, IoError>,
    ) -> Result<(Self, Arc<MemoryFile>), IoError> {
        let at = &place.at;
        let open = |direct| open_file(at, direct);
        let chosen = buffering::choose(place.buffering, at, &open)?;
        let (key_place, key) = KeyPlace::random().map_err(device)?;
        let slot_key = SlotKey::from_bytes(&key).map_err(device)?;
        let mut overflow = Self::open_with(place, chosen, engine, slot_key, &open)?;
        let memory = make_memory(&key_place)?;
        let key = match key_place {
            KeyPlace::Page(page) => Some(page),
            KeyPlace::Head(_) => None,
        };
        overflow.surviving = Some(Surviving { memory: Arc::clone(&memory), key });
        Ok((overflow, memory))
    }

    /// Takes over the overflow that another process left; these positions (ascending) are in use. Does not
    /// change it.
    pub(crate) fn adopt(
        place: &OverflowOptions,
        engine: Arc<dyn IoEngine>,
        handed: Handed,
        memory: &Arc<MemoryFile>,
        taken: &[u32],
        generation: u64,
    ) -> Result<Self, IoError> {
        let flags = rustix::fs::fcntl_getfl(&handed.file);
        let flags =
            flags.map_err(|e| device(format!("the overflow that was handed over is not a file: {e}")))?;
        let direct = flags.contains(rustix::fs::OFlags::DIRECT);
        let text = if direct { "direct" } else { "buffered" }.to_owned();
        let key = SlotKey::from_bytes(&handed.key).map_err(device)?;
        // A cache that is taken over is not refused for lack of space.
        let place = OverflowOptions { little_space: LittleSpace::Accepted, ..place.clone() };
        let file = Mutex::new(Some(handed.file));
        let given = |_: bool| file.lock().take().ok_or_else(|| stdio::ErrorKind::NotFound.into());
        let mut overflow = Self::open_with(&place, Chosen { direct, text }, engine, key, &given)?;
        overflow.surviving = Some(Surviving { memory: Arc::clone(memory), key: handed.page });
        overflow.generation = AtomicU64::new(generation);
        overflow.mark_used(taken);
        Ok(overflow)
    }

    /// The descriptors that the next process needs: of the overflow, and of the page with its key.
    pub(crate) fn handover(&self) -> stdio::Result<(std::os::fd::OwnedFd, Option<std::os::fd::OwnedFd>)> {
        let key = self.surviving.as_ref().and_then(|surviving| surviving.key.as_ref());
        Ok((self.file.try_clone()?.into(), key.map(KeyPage::duplicate).transpose()?))
    }

    /// Frees all space, for a cache that was ended. Nothing uses it any more.
    pub(crate) fn end(&self) {
        if !self.is_device
            && let Err(error) = self.file.set_len(0)
        {
            tracing::warn!(%error, "the disk space of a write cache that has ended could not be freed");
        }
    }

    /// Opens the overflow of a persistent cache: a file with a name.
    pub fn open_named(
        place: &OverflowOptions,
        data: &Path,
        engine: Arc<dyn IoEngine>,
        key: SlotKey,
    ) -> Result<Self, IoError> {
        // The measurement writes to another file in the same directory.
        let chosen = buffering::choose(place.buffering, &place.at, &|direct| open_file(&place.at, direct))?;
        Self::open_with(place, chosen, engine, key, &|direct| open_rw(data, direct))
    }

    fn open_with(
        place: &OverflowOptions,
        buffering: Chosen,
        engine: Arc<dyn IoEngine>,
        key: SlotKey,
        open_file: OpenFile<'_>,
    ) -> Result<Self, IoError> {
        let (at, limit_bytes) = (&place.at, place.limit_bytes);
        let tried = |e: stdio::Error| {
            IoError::from_os(format!("cannot make an overflow file in {}: {e}", at.display()), e)
        };
        let file = open_file(buffering.direct).map_err(|error| match error.kind() {
            stdio::ErrorKind::InvalidInput if buffering.direct => device(buffering::no_direct(at)),
            _ => tried(error),
        })?;
        if place.little_space != LittleSpace::Accepted
            && let Err(error) = check_space(&file, at, limit_bytes)
        {
            if place.little_space == LittleSpace::Refused {
                return Err(error);
            }
            tracing::warn!(path = %at.display(), "a write cache was opened although its disk limit is more than the free space: {error}");
        }
        if is_memory(&file) {
            tracing::warn!(
                path = %at.display(),
                "the overflow is on a file system in memory (tmpfs), which counts against no RAM limit: choose a directory on a disk"
            );
        }
        let is_device = file.metadata().map_err(tried)?.file_type().is_block_device();
        let align = if buffering.direct { direct_alignment(&file) } else { 1 };
        let overflow = Self {
            file: Arc::new(file),
            engine,
            key,
            align,
            buffering,
            is_device,
            at: at.clone(),
            positions: Mutex::default(),
            failed_at: Mutex::default(),
            generation: AtomicU64::new(1),
            buffers: Mutex::default(),
            buffers_known: AtomicBool::new(false),
            no_fallocate: AtomicBool::new(is_device),
            operations: Operations::default(),
            surviving: None,
        };
        overflow.set_limit_bytes(limit_bytes);
        Ok(overflow)
    }

    /// The operations of the disk so far.
    pub fn operations(&self) -> DiskOperations {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let of = &self.operations;
        DiskOperations {
            reads: load(&of.read),
            read_bytes: load(&of.read_bytes),
            writes: load(&of.write),
            write_bytes: load(&of.write_bytes),
        }
    }

    /// Counts an operation and passes it to the engine.
    fn submit(&self, op: IoOp) {
        if crash::is_dead() {
            // In a test the process has ended, so the operation is not answered.
            let _unanswered = std::mem::ManuallyDrop::new(op);
            return;
        }
        let of = &self.operations;
        let (count, bytes) = match op.direction {
            Direction::Read => (&of.read, &of.read_bytes),
            Direction::Write => (&of.write, &of.write_bytes),
        };
        count.fetch_add(1, Ordering::Relaxed);
        bytes.fetch_add(op.len as u64, Ordering::Relaxed);
        self.engine.submit(op);
    }

    /// See [`IoEngine::completion_queue`].
    pub fn completion_queue(&self) -> Option<Box<dyn CompletionQueue>> {
        self.engine.completion_queue()
    }

    /// Refuses a limit that the file system cannot hold now.
    pub fn check_limit_bytes(&self, limit_bytes: u64) -> Result<(), IoError> {
        check_space(&self.file, &self.at, limit_bytes)
    }

    /// The kind of I/O, and for `auto` the reason.
    pub fn buffering(&self) -> &str {
        &self.buffering.text
    }

    /// Length of the file in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.file.metadata().map_or(0, |m| m.len())
    }

    /// Offset of a position in the file.
    pub fn offset_of(position: u32) -> u64 {
        u64::from(position) * ENCRYPTED_SEGMENT_BYTES as u64
    }

    /// Makes all written data durable. Blocks.
    pub fn sync(&self) -> stdio::Result<()> {
        self.engine.sync(&self.file)
    }

    /// The alignment of offsets and lengths of reads and writes, in bytes.
    pub fn align(&self) -> usize {
        self.align
    }

    /// Writes `buffer[..len]` at offset `start` of a position; both are multiples of the alignment.
    pub fn write_range(
        &self,
        position: u32,
        (start, len): (usize, usize),
        buffer: AlignedBuffer,
        done: impl FnOnce(stdio::Result<()>, AlignedBuffer) + Send + 'static,
    ) {
        self.submit(IoOp {
            file: Arc::clone(&self.file),
            direction: Direction::Write,
            offset: Self::offset_of(position) + start as u64,
            buffer,
            len,
            done: Box::new(done),
        });
    }

    /// Called when a write has failed: the disk gets no writes for a while.
    pub fn failed(&self) {
        *self.failed_at.lock() = Some(Instant::now());
        if UNDER_MODEL_CHECKER {
            // Under the model checker the pause takes no time, so a retrying thread could run alone for ever.
            thread::yield_now();
        }
    }

    /// Whether a write failed a moment ago, so that the disk gets none now.
    pub fn is_resting(&self) -> bool {
        self.failed_at.lock().is_some_and(|at| at.elapsed() < REST)
    }

    /// The generation of the next write of a segment.
    pub fn next_generation(&self) -> u64 {
        let generation = self.generation.fetch_add(1, Ordering::Relaxed);
        if let Some(surviving) = &self.surviving {
            // Stored before any encryption with it: the next process starts above it.
            surviving.memory.used_generation(generation);
        }
        generation
    }

    /// Encrypts a block as one slot.
    pub fn encrypt(&self, generation: u64, slot: Slot, plain: &[u8], encrypted: &mut [u8]) -> bool {
        self.key.encrypt(generation, slot, plain, encrypted)
    }

    /// How the key is kept from swap, for statistics.
    pub fn key_memory(&self) -> &'static str {
        self.key.protection().name()
    }

    /// Decrypts a slot. `false`: it is damaged, or another slot.
    pub fn open_slot(&self, generation: u64, slot: Slot, encrypted: &[u8], into: &mut [u8]) -> bool {
        self.key.open(generation, slot, encrypted, into)
    }

    /// Writes a whole encrypted segment.
    pub fn write_segment(
        &self,
        position: u32,
        buffer: AlignedBuffer,
        done: impl FnOnce(stdio::Result<()>, AlignedBuffer) + Send + 'static,
    ) {
        self.submit(IoOp {
            file: Arc::clone(&self.file),
            direction: Direction::Write,
            offset: Self::offset_of(position),
            buffer,
            len: ENCRYPTED_SEGMENT_BYTES,
            done: Box::new(done),
        });
    }

    /// Reads a whole encrypted segment into `buffer`.
    pub fn read_segment(
        &self,
        position: u32,
        buffer: AlignedBuffer,
        done: impl FnOnce(stdio::Result<()>, AlignedBuffer) + Send + 'static,
    ) {
        self.submit(IoOp {
            file: Arc::clone(&self.file),
            direction: Direction::Read,
            offset: Self::offset_of(position),
            buffer,
            len: ENCRYPTED_SEGMENT_BYTES,
            done: Box::new(done),
        });
    }

    /// Reads `count` consecutive slots and passes them, still encrypted, to `done`, on a disk thread or in
    /// the calling thread's [`CompletionQueue`].
    pub fn read_slots(
        self: &Arc<Self>,
        position: u32,
        first: Slot,
        count: usize,
        done: impl FnOnce(stdio::Result<EncryptedRun<'_>>) + Send + 'static,
    ) {
        let start = usize::from(first.0) * ENCRYPTED_SLOT_BYTES;
        let end = (start + count.min(MAX_READ_SLOTS) * ENCRYPTED_SLOT_BYTES).min(ENCRYPTED_SEGMENT_BYTES);
        let aligned = start - start % self.align;
        let len = (end - aligned).next_multiple_of(self.align).min(ENCRYPTED_SEGMENT_BYTES - aligned);
        let Some(buffer) = self.take_buffer(len) else {
            done(Err(stdio::ErrorKind::OutOfMemory.into()));
            return;
        };
        let this = Arc::clone(self);
        self.submit(IoOp {
            file: Arc::clone(&self.file),
            direction: Direction::Read,
            offset: Self::offset_of(position) + aligned as u64,
            buffer,
            len,
            done: Box::new(move |result, buffer| {
                match (result, buffer.get(start - aligned..end - aligned)) {
                    (Ok(()), Some(bytes)) => done(Ok(EncryptedRun { bytes })),
                    (Ok(()), None) => done(Err(stdio::ErrorKind::UnexpectedEof.into())),
                    (Err(error), _) => done(Err(error)),
                }
                this.give_buffer(buffer);
            }),
        });
    }

    fn take_buffer(&self, len: usize) -> Option<AlignedBuffer> {
        if len <= SMALL_BUFFER_BYTES {
            let kept = {
                let mut buffers = self.buffers.lock();
                buffers.taken = true;
                buffers.free.pop()
            };
            return kept.or_else(|| AlignedBuffer::new(SMALL_BUFFER_BYTES));
        }
        AlignedBuffer::new(len)
    }

    /// Called before a read. Returns whether the caller must wake the host's thread, because there will be
    /// buffers to free.
    pub fn begins_to_keep_buffers(&self) -> bool {
        !self.has_spare_buffers() && !self.buffers_known.swap(true, Ordering::Relaxed)
    }

    /// Whether there may be unused read buffers.
    pub fn has_spare_buffers(&self) -> bool {
        self.buffers_known.load(Ordering::Relaxed)
    }

    /// Returns read buffers to the system if none was taken since the last call.
    pub fn trim_buffers(&self) {
        let mut buffers = self.buffers.lock();
        if UNDER_MODEL_CHECKER || std::mem::take(&mut buffers.taken) {
            return;
        }
        // Buffers that are given back from now on are freed, until the next read.
        self.buffers_known.store(false, Ordering::Relaxed);
        let spare = std::mem::take(&mut buffers.free);
        drop(buffers);
        drop(spare);
    }

    fn give_buffer(&self, buffer: AlignedBuffer) {
        if buffer.len() == SMALL_BUFFER_BYTES {
            let mut buffers = self.buffers.lock();
            if buffers.free.len() < KEEP_BUFFERS && self.has_spare_buffers() {
                buffers.free.push(buffer);
            }
        }
    }
}
