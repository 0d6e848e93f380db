//! The overflow disk of one volume: positions for spilled segments, sealed and read with direct I/O.
//!
//! A position is [`seal::SEALED_SEGMENT_BYTES`] long. Space is claimed with `fallocate` before a segment
//! is written there, so that a full host file system is found before data is accepted, and returned with a
//! punched hole. The file of an ephemeral cache has no name: it is gone with the process, however that ends.
//! That of a persistent cache has one, and [`crate::persist`] says what of it counts.

pub mod buffering;
pub mod gcm;
pub mod io;
pub mod key_memory;
pub mod seal;
pub mod uring;

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io as stdio;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, OFlags};

use self::buffering::{Chosen, OpenFile};
use self::io::{Direction, IoEngine, IoOp};
use self::seal::{SEALED_SEGMENT_BYTES, SEALED_SLOT_BYTES, SealKey};
use crate::cache::OverflowOptions;
use crate::memory::AlignedBuffer;
use crate::sync::{EXPLORED, Mutex};
use crate::units::{SegmentId, Slot};

/// Positions claimed at once, while there is room: fewer, larger extents.
const GROW_POSITIONS: u32 = 16;

/// Runs of positions punched out in one go: the thread that does it also serves writers.
const TRIM_RUNS: usize = 32;

/// Positions in these runs at most (1 GiB).
const TRIM_POSITIONS: usize = 512;

/// After a failed write the disk is left alone so long: it may come back, and is not asked in vain.
const REST: Duration = Duration::from_millis(if EXPLORED { 0 } else { 50 });

/// Free positions that stay claimed for the next spills; what is beyond is punched out.
const KEEP_POSITIONS: usize = 16;

/// Slots read at once at most (264 KiB).
pub const MAX_READ_SLOTS: usize = 64;

/// Small read buffers kept for reuse.
const KEEP_BUFFERS: usize = 64;

/// Why there is no position.
#[derive(Debug)]
pub enum NoPosition {
    /// The volume's disk limit is reached.
    Limit,
    /// The file system is full, or refused.
    Disk(stdio::Error),
}

#[derive(Debug, Default)]
struct Positions {
    limit: u32,
    /// In use by segments.
    used: u32,
    /// Claimed and free.
    ready: Vec<u32>,
    /// Given back to the file system.
    punched: Vec<u32>,
    /// Could not be written the last time: tried again when there is no other.
    doubtful: VecDeque<u32>,
    /// One past the highest position ever claimed.
    end: u32,
}

impl Positions {
    /// The last resort of a claim that was counted already: a place that failed the last time.
    fn take_doubtful(&mut self, otherwise: NoPosition) -> Result<u32, NoPosition> {
        self.doubtful.pop_front().ok_or_else(|| {
            self.used = self.used.saturating_sub(1);
            otherwise
        })
    }
}

/// One volume's overflow.
pub struct Overflow {
    file: Arc<File>,
    engine: Arc<dyn IoEngine>,
    key: SealKey,
    align: usize,
    buffering: Chosen,
    is_device: bool,
    positions: Mutex<Positions>,
    failed_at: Mutex<Option<Instant>>,
    generation: AtomicU64,
    buffers: Mutex<Vec<AlignedBuffer>>,
    no_fallocate: AtomicBool,
}

/// Slots as they came from the disk, not yet opened.
pub struct SealedRun<'a> {
    /// Consecutive sealed slots.
    pub bytes: &'a [u8],
}

impl SealedRun<'_> {
    /// The sealed slot with this index in the run.
    pub fn slot(&self, index: usize) -> Option<&[u8]> {
        self.bytes.get(index * SEALED_SLOT_BYTES..(index + 1) * SEALED_SLOT_BYTES)
    }
}

/// How to open an overflow file or device without a name of its own.
fn open_file(at: &Path, direct: bool) -> stdio::Result<File> {
    let flag = |flags: OFlags| i32::try_from(flags.bits()).unwrap_or(0);
    let direct_flag = if direct { flag(OFlags::DIRECT) } else { 0 };
    let kind = std::fs::metadata(at)?.file_type();
    if kind.is_block_device() {
        let exclusive = flag(OFlags::EXCL);
        return OpenOptions::new().read(true).write(true).custom_flags(direct_flag | exclusive).open(at);
    }
    if !kind.is_dir() {
        return Err(stdio::Error::new(stdio::ErrorKind::NotADirectory, "not a directory or block device"));
    }
    let unnamed = OpenOptions::new()
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(flag(OFlags::TMPFILE) | direct_flag)
        .open(at);
    match unnamed {
        // File systems without O_TMPFILE: make a name and take it away at once.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            static NEXT: AtomicU64 = AtomicU64::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = at.join(format!(".headwater-overflow-{}-{number}", std::process::id()));
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .mode(0o600)
                .custom_flags(direct_flag)
                .open(&name)?;
            std::fs::remove_file(&name)?;
            Ok(file)
        }
        other => other,
    }
}

fn open_named_file(at: &Path, direct: bool) -> stdio::Result<File> {
    let flags = if direct { i32::try_from(OFlags::DIRECT.bits()).unwrap_or(0) } else { 0 };
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(flags)
        .open(at)
}

impl Overflow {
    /// Opens the overflow of an ephemeral cache: a directory, in which an unnamed file is made, or a block
    /// device.
    pub fn open(place: &OverflowOptions, engine: Arc<dyn IoEngine>) -> Result<Self, String> {
        let at = &place.at;
        let open = |direct| open_file(at, direct);
        let chosen = buffering::choose(place.buffering, at, &open)?;
        Self::open_with(place, chosen, engine, SealKey::random()?, &open)
    }

    /// Opens the overflow of a persistent cache: a file with a name.
    pub fn open_named(
        place: &OverflowOptions,
        data: &Path,
        engine: Arc<dyn IoEngine>,
        key: SealKey,
    ) -> Result<Self, String> {
        // What is measured is written to a file beside it.
        let chosen = buffering::choose(place.buffering, &place.at, &|direct| open_file(&place.at, direct))?;
        Self::open_with(place, chosen, engine, key, &|direct| open_named_file(data, direct))
    }

    fn open_with(
        place: &OverflowOptions,
        buffering: Chosen,
        engine: Arc<dyn IoEngine>,
        key: SealKey,
        open_file: OpenFile<'_>,
    ) -> Result<Self, String> {
        let (at, limit_bytes) = (&place.at, place.limit_bytes);
        let tried = |e: stdio::Error| format!("cannot make an overflow file in {}: {e}", at.display());
        let file = open_file(buffering.direct).map_err(|error| match error.kind() {
            stdio::ErrorKind::InvalidInput if buffering.direct => buffering::no_direct(at),
            _ => tried(error),
        })?;
        check_space(&file, at, limit_bytes)?;
        let is_device = file.metadata().map_err(tried)?.file_type().is_block_device();
        let align = if buffering.direct { direct_alignment(&file) } else { 1 };
        let overflow = Self {
            file: Arc::new(file),
            engine,
            key,
            align,
            buffering,
            is_device,
            positions: Mutex::default(),
            failed_at: Mutex::default(),
            generation: AtomicU64::new(1),
            buffers: Mutex::default(),
            no_fallocate: AtomicBool::new(is_device),
        };
        overflow.set_limit_bytes(limit_bytes);
        Ok(overflow)
    }

    /// How it is written and read, and for `auto` why.
    pub fn buffering(&self) -> &str {
        &self.buffering.text
    }

    /// Changes how much disk the volume may use. What is over a lower limit is not taken away.
    pub fn set_limit_bytes(&self, limit_bytes: u64) {
        let mut bytes = limit_bytes;
        if self.is_device {
            let size = std::io::Seek::seek(&mut &*self.file, stdio::SeekFrom::End(0)).unwrap_or(0);
            bytes = bytes.min(size);
        }
        let limit = bytes / SEALED_SEGMENT_BYTES as u64;
        // There are not more segments.
        self.positions.lock().limit =
            u32::try_from(limit).map_or(SegmentId::LIMIT, |n| n.min(SegmentId::LIMIT));
    }

    /// Disk limit in positions.
    pub fn limit_positions(&self) -> u32 {
        self.positions.lock().limit
    }

    /// Positions left below the limit.
    pub fn free_positions(&self) -> u32 {
        let positions = self.positions.lock();
        positions.limit.saturating_sub(positions.used)
    }

    /// Bytes of disk that hold segments.
    pub fn used_bytes(&self) -> u64 {
        u64::from(self.positions.lock().used) * SEALED_SEGMENT_BYTES as u64
    }

    /// Claims a position. Blocks for the file system; called by the host's thread only.
    pub fn take_position(&self) -> Result<u32, NoPosition> {
        let (position, grow) = {
            let mut positions = self.positions.lock();
            if positions.used >= positions.limit {
                return Err(NoPosition::Limit);
            }
            positions.used += 1;
            if let Some(position) = positions.ready.pop() {
                return Ok(position);
            }
            let doubtful = u32::try_from(positions.doubtful.len()).unwrap_or(u32::MAX);
            match positions.punched.pop() {
                Some(position) => (position, 1),
                None if positions.used.saturating_add(doubtful) > positions.limit => {
                    return positions.take_doubtful(NoPosition::Limit);
                }
                None => {
                    let room = positions.limit.saturating_sub(positions.used).saturating_add(1);
                    (positions.end, GROW_POSITIONS.min(room).max(1))
                }
            }
        };
        let mut claimed = grow;
        let mut result = self.claim(position, grow);
        if result.is_err() && grow > 1 {
            claimed = 1;
            result = self.claim(position, 1);
        }
        let mut positions = self.positions.lock();
        match result {
            Ok(()) => {
                positions.end = positions.end.max(position.saturating_add(claimed));
                positions.ready.extend((position + 1..position + claimed).rev());
                Ok(position)
            }
            Err(error) => {
                if position < positions.end {
                    positions.punched.push(position);
                }
                positions.take_doubtful(NoPosition::Disk(error))
            }
        }
    }

    fn claim(&self, position: u32, count: u32) -> stdio::Result<()> {
        if self.no_fallocate.load(Ordering::Relaxed) {
            return Ok(());
        }
        let offset = Self::offset_of(position);
        let len = u64::from(count) * SEALED_SEGMENT_BYTES as u64;
        match rustix::fs::fallocate(&*self.file, FallocateFlags::empty(), offset, len) {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::OPNOTSUPP) => {
                tracing::warn!(
                    "the file system of the overflow cannot reserve space; it is found full only when written"
                );
                self.no_fallocate.store(true, Ordering::Relaxed);
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// After a restart: these positions (ascending) are in use, and no other is. What the others hold goes.
    pub fn restore(&self, used: &[u32]) {
        let in_file =
            u32::try_from(self.file_bytes().div_ceil(SEALED_SEGMENT_BYTES as u64)).unwrap_or(u32::MAX);
        let end = used.last().map_or(0, |last| last + 1).max(in_file.min(SegmentId::LIMIT));
        let mut taken = used.iter().copied().peekable();
        let mut free: Vec<u32> = (0..end).filter(|position| taken.next_if_eq(position).is_none()).collect();
        free.reverse();
        self.punch(&free);
        let mut positions = self.positions.lock();
        positions.used = u32::try_from(used.len()).unwrap_or(u32::MAX);
        positions.end = end;
        positions.punched = free;
    }

    /// A position that is claimed already, where `keep` more are left below the limit: no I/O.
    pub fn take_ready(&self, keep: u32) -> Option<u32> {
        let mut positions = self.positions.lock();
        if positions.used.saturating_add(keep) >= positions.limit {
            return None;
        }
        let position = positions.ready.pop()?;
        positions.used += 1;
        Some(position)
    }

    /// How long the file is.
    pub fn file_bytes(&self) -> u64 {
        self.file.metadata().map_or(0, |m| m.len())
    }

    /// Where a position begins in the file.
    pub fn offset_of(position: u32) -> u64 {
        u64::from(position) * SEALED_SEGMENT_BYTES as u64
    }

    /// Positions that [`Overflow::take_ready`] can give.
    pub fn ready_positions(&self) -> usize {
        self.positions.lock().ready.len()
    }

    /// Claims positions until so many are ready, or no more are to be had. Blocks for the file system.
    pub fn prepare(&self, wanted: usize) -> Result<(), NoPosition> {
        let mut claimed = Vec::new();
        let mut result = Ok(());
        while self.ready_positions() + claimed.len() < wanted {
            match self.take_position() {
                Ok(position) => claimed.push(position),
                Err(NoPosition::Limit) => break,
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        claimed.into_iter().for_each(|position| self.give_position(position));
        result
    }

    /// Makes everything written durable. Blocks.
    pub fn sync(&self) -> stdio::Result<()> {
        self.engine.sync(&self.file)
    }

    /// What offsets and lengths of reads and writes must be multiples of.
    pub fn align(&self) -> usize {
        self.align
    }

    /// Writes `buffer[..len]` at `start` bytes into a position; both are multiples of the alignment.
    pub fn write_range(
        &self,
        position: u32,
        (start, len): (usize, usize),
        buffer: AlignedBuffer,
        done: impl FnOnce(stdio::Result<()>, AlignedBuffer) + Send + 'static,
    ) {
        self.engine.submit(IoOp {
            file: Arc::clone(&self.file),
            direction: Direction::Write,
            offset: Self::offset_of(position) + start as u64,
            buffer,
            len,
            done: Box::new(done),
        });
    }

    /// Gives a position back.
    pub fn give_position(&self, position: u32) {
        let mut positions = self.positions.lock();
        positions.used = positions.used.saturating_sub(1);
        positions.ready.push(position);
    }

    /// Gives back a position that could not be written: others are tried before it.
    pub fn give_position_last(&self, position: u32) {
        let mut positions = self.positions.lock();
        positions.used = positions.used.saturating_sub(1);
        positions.doubtful.push_back(position);
    }

    /// A write failed: the disk is left alone for a while.
    pub fn failed(&self) {
        *self.failed_at.lock() = Some(Instant::now());
    }

    /// Whether a write failed a moment ago.
    pub fn is_resting(&self) -> bool {
        self.failed_at.lock().is_some_and(|at| at.elapsed() < REST)
    }

    /// Whether [`Overflow::trim`] has something to do.
    pub fn wants_trim(&self) -> bool {
        self.positions.lock().ready.len() > KEEP_POSITIONS
    }

    /// Returns the space of free positions to the file system: a part of it at a time, while
    /// [`Overflow::wants_trim`] says that there is more. The lowest positions stay.
    pub fn trim(&self) {
        let surplus: Vec<u32> = {
            let mut positions = self.positions.lock();
            let most = positions.ready.len().saturating_sub(KEEP_POSITIONS).min(TRIM_POSITIONS);
            positions.ready.sort_unstable_by(|one, other| other.cmp(one));
            let mut runs = 0;
            let mut before = None;
            let count = positions
                .ready
                .iter()
                .take(most)
                .take_while(|position| {
                    runs += usize::from(before != position.checked_add(1));
                    before = Some(**position);
                    runs <= TRIM_RUNS
                })
                .count();
            positions.ready.drain(..count).collect()
        };
        self.punch(&surplus);
        self.positions.lock().punched.extend(surplus);
    }

    /// Punches positions out; those in descending order side by side at once.
    fn punch(&self, positions: &[u32]) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for run in positions.chunk_by(|one, next| *one == next + 1) {
            let Some(lowest) = run.last() else { continue };
            let len = run.len() as u64 * SEALED_SEGMENT_BYTES as u64;
            if let Err(error) = rustix::fs::fallocate(&*self.file, flags, Self::offset_of(*lowest), len) {
                tracing::debug!(%error, "overflow space could not be punched out");
            }
        }
    }

    /// The number for the next write of a segment.
    pub fn next_generation(&self) -> u64 {
        self.generation.fetch_add(1, Ordering::Relaxed)
    }

    /// Seals a block as one slot.
    pub fn seal(&self, generation: u64, slot: Slot, plain: &[u8], sealed: &mut [u8]) -> bool {
        self.key.seal(generation, slot, plain, sealed)
    }

    /// How the key is kept from swap, for statistics.
    pub fn key_memory(&self) -> &'static str {
        self.key.protection().name()
    }

    /// Opens one sealed slot. `false`: damaged, or not the one that was asked for.
    pub fn open_slot(&self, generation: u64, slot: Slot, sealed: &[u8], into: &mut [u8]) -> bool {
        self.key.open(generation, slot, sealed, into)
    }

    /// Writes a whole sealed segment.
    pub fn write_segment(
        &self,
        position: u32,
        buffer: AlignedBuffer,
        done: impl FnOnce(stdio::Result<()>, AlignedBuffer) + Send + 'static,
    ) {
        self.engine.submit(IoOp {
            file: Arc::clone(&self.file),
            direction: Direction::Write,
            offset: Self::offset_of(position),
            buffer,
            len: SEALED_SEGMENT_BYTES,
            done: Box::new(done),
        });
    }

    /// Reads a whole sealed segment into `buffer`.
    pub fn read_segment(
        &self,
        position: u32,
        buffer: AlignedBuffer,
        done: impl FnOnce(stdio::Result<()>, AlignedBuffer) + Send + 'static,
    ) {
        self.engine.submit(IoOp {
            file: Arc::clone(&self.file),
            direction: Direction::Read,
            offset: Self::offset_of(position),
            buffer,
            len: SEALED_SEGMENT_BYTES,
            done: Box::new(done),
        });
    }

    /// Reads `count` consecutive slots and gives them, still sealed, to `done` on a disk thread.
    pub fn read_slots(
        self: &Arc<Self>,
        position: u32,
        first: Slot,
        count: usize,
        done: impl FnOnce(stdio::Result<SealedRun<'_>>) + Send + 'static,
    ) {
        let start = usize::from(first.0) * SEALED_SLOT_BYTES;
        let end = (start + count.min(MAX_READ_SLOTS) * SEALED_SLOT_BYTES).min(SEALED_SEGMENT_BYTES);
        let aligned = start - start % self.align;
        let len = (end - aligned).next_multiple_of(self.align).min(SEALED_SEGMENT_BYTES - aligned);
        let Some(buffer) = self.take_buffer(len) else {
            done(Err(stdio::ErrorKind::OutOfMemory.into()));
            return;
        };
        let this = Arc::clone(self);
        self.engine.submit(IoOp {
            file: Arc::clone(&self.file),
            direction: Direction::Read,
            offset: Self::offset_of(position) + aligned as u64,
            buffer,
            len,
            done: Box::new(move |result, buffer| {
                match (result, buffer.get(start - aligned..end - aligned)) {
                    (Ok(()), Some(bytes)) => done(Ok(SealedRun { bytes })),
                    (Ok(()), None) => done(Err(stdio::ErrorKind::UnexpectedEof.into())),
                    (Err(error), _) => done(Err(error)),
                }
                this.give_buffer(buffer);
            }),
        });
    }

    fn take_buffer(&self, len: usize) -> Option<AlignedBuffer> {
        if len <= SMALL_BUFFER_BYTES {
            let kept = self.buffers.lock().pop();
            return kept.or_else(|| AlignedBuffer::new(SMALL_BUFFER_BYTES));
        }
        AlignedBuffer::new(len)
    }

    fn give_buffer(&self, buffer: AlignedBuffer) {
        if buffer.len() == SMALL_BUFFER_BYTES {
            let mut buffers = self.buffers.lock();
            if buffers.len() < KEEP_BUFFERS {
                buffers.push(buffer);
            }
        }
    }
}

/// Refuses a limit that the file system cannot hold now: better before a machine runs than in its middle.
fn check_space(file: &File, at: &Path, limit_bytes: u64) -> Result<(), String> {
    let Ok(space) = rustix::fs::fstatvfs(file) else { return Ok(()) };
    let metadata = file.metadata();
    let is_file = metadata.as_ref().is_ok_and(|m| m.is_file());
    // What a persistent cache has already is its own.
    let own = metadata.map_or(0, |m| m.blocks().saturating_mul(512));
    let free = space.f_bavail.saturating_mul(space.f_frsize).saturating_add(own);
    if is_file && free < limit_bytes {
        return Err(format!(
            "the write cache may take {} on disk, and {} has only {} free: choose another directory or a lower limit",
            headwater_block::size::format(limit_bytes),
            at.display(),
            headwater_block::size::format(free),
        ));
    }
    Ok(())
}

/// Enough for one slot at any alignment.
const SMALL_BUFFER_BYTES: usize = 8192;

/// What direct I/O wants offsets and lengths to be multiples of: asked from the kernel, 4096 where it does
/// not say.
fn direct_alignment(file: &File) -> usize {
    use rustix::fs::{AtFlags, StatxFlags};
    let asked = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    match asked {
        Ok(answer) if answer.stx_dio_offset_align != 0 => {
            usize::try_from(answer.stx_dio_offset_align).unwrap_or(4096).clamp(512, 4096)
        }
        _ => 4096,
    }
}
