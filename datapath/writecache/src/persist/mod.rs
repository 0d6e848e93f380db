//! Persistent caches: everything that a volume has flushed is there after a restart, a crash or a power cut.
//!
//! ```text
//!   write -> slot in RAM, change logged in the open epoch
//!                                |
//!   FLUSH -> close the epoch -> encrypt and write its slots -> sync data -> add a commit to the map -> sync -> answer
//!            (gate: no write       \______________ the cache's own thread; writes go on ______________/
//!             is half done)     few slots: encrypted in the commit, nothing to data
//! ```
//! An **epoch** consists of the writes between two commits. Legal outcomes of a crash: the state at the end
//! of a committed epoch, at or after the last answered flush. Because the gate closes an epoch between two
//! writes, that state is a prefix of the writes.
//!
//! This rests on the following rules:
//! - A slot that belongs to a closed epoch is not overwritten in place: the block takes a new slot. Slots are
//!   claimed in order, and each only once in the lifetime of its segment. So nothing that a commit names
//!   changes afterwards.
//! - A segment gets its position and generation when it is begun. Only as many are begun as there are
//!   positions and claimed space in the map, so all accepted writes can be flushed. Each increment of a
//!   segment is written at its slots' offsets; the sector that two increments share is written again with the
//!   same bytes.
//! - A freed position is used again only after a commit that records that it is free.
//! - A commit of few slots contains them in the map for their first sync, so one write and one sync make it
//!   durable. They are written to the data file with the next larger commit, or with a spill. A replaced map
//!   contains none, because all slots are in the data file by then. If a crash prevents that, they are
//!   written to the data file at the next opening (`restore.rs`), with the bytes from the map.
//! - Commits reserve generations in advance, so no nonce is used twice, whatever a crash loses.
//!
//! Commits also happen without a flush: when freed positions wait for one, or when many changes were logged.
//! Only the cache's thread writes segments, so commits and spilling never run at the same time.
//!
//! Lock order: the gate before a leaf, and `pending` after everything else.

pub mod commit;
pub mod directory;
mod epoch;
pub mod format;
pub mod journal;
mod map_space;
pub mod recover;
mod restore;
pub mod scan;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use headwater_block::{IoError, IoErrorKind};

pub use self::commit::BUFFERS_BYTES;
use self::directory::{ID_BYTES, Lock};
use self::format::Part;
use self::journal::{Journal, Opened};
use self::map_space::MapSpace;
use self::recover::{Contradiction, Recovered};
use crate::cache::OverflowOptions;
use crate::log::Stream;
use crate::map::Map;
use crate::memory::AlignedBuffer;
use crate::overflow::encrypt::SlotKey;
use crate::overflow::io::IoEngine;
use crate::overflow::{KEEP_POSITIONS, Overflow};
use crate::segment::SegmentTable;
use crate::spill::RESERVED_POSITIONS;
use crate::sync::{Condvar, Mutex, RwLock, RwLockReadGuard, UNDER_MODEL_CHECKER, thread};

/// Options that make a cache persistent.
#[derive(Clone, PartialEq, Eq)]
pub struct PersistentOptions {
    /// Name of the cache: a directory of this name under the overflow's directory.
    pub name: String,
    /// The key with which its blocks are encrypted. The caller stores it, in another place than the cache.
    pub key: [u8; 16],
    /// Identity of the base: a cache is opened only over the base over which it was made.
    pub base_id: [u8; 32],
}

impl PersistentOptions {
    /// Refuses names of caches that are not plain file names.
    pub fn check_name(name: &str) -> Result<(), IoError> {
        journal::check_name(name)
    }
}

impl Drop for PersistentOptions {
    /// The key is in the cache's protected memory by now; this copy is in ordinary memory, which may be
    /// swapped and dumped.
    fn drop(&mut self) {
        self.key.fill(0);
        // So that the compiler does not omit the wiping.
        std::hint::black_box(&self.key);
    }
}

impl std::fmt::Debug for PersistentOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PersistentOptions").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The file in a cache's directory with its segments.
pub const DATA_FILE: &str = "data";

/// Number of changes in an epoch after which it is committed without a flush: 6 MiB of memory, 1 GiB of
/// blocks.
const MAX_CHANGES: usize = if UNDER_MODEL_CHECKER { 24 } else { 256 << 10 };

/// The most changes in an epoch, except those that are bounded otherwise: 12 MiB of memory. With more, a
/// write that needs no slot takes one, and slots are limited; a discard or zero write then clears only blocks
/// in slots.
const MOST_CHANGES: usize = 2 * MAX_CHANGES;

/// The same limit together with changes that are being committed: if the commit fails, they are logged again.
const MOST_IN_ALL: usize = MOST_CHANGES + MAX_CHANGES;

/// If fewer generations are left than this, the map has to reserve more.
const LOW_GENERATIONS: u64 = 1 << 16;

/// Number of positions that stay claimed for the next segments.
pub const READY_POSITIONS: usize = 8;

/// The most freed positions that wait for a commit.
const MAX_FREED: usize = if UNDER_MODEL_CHECKER { 4 } else { 64 };

/// Receives the result of a flush.
pub type FlushDone = Box<dyn FnOnce(Result<(), IoError>) + Send>;

/// A change of the map. Of fixed size without pointers, because a cache may have many of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The block is in this slot now.
    Slot {
        /// The block.
        block: u32,
        /// Position of its segment.
        position: u32,
        /// The slot.
        slot: u16,
        /// Generation of the segment.
        generation: u64,
    },
    /// Sectors of the block are in this slot now.
    Sectors {
        /// The block.
        block: u32,
        /// A bit for each of its sectors.
        sectors: u8,
        /// Position of its segment.
        position: u32,
        /// The slot.
        slot: u16,
        /// Generation of the segment.
        generation: u64,
    },
    /// Sectors of the block are zero, and in no slot.
    ZeroSectors {
        /// The block.
        block: u32,
        /// A bit for each of its sectors.
        sectors: u8,
    },
    /// The blocks are absent, or zero.
    Range {
        /// First block.
        first: u32,
        /// How many.
        count: u32,
        /// Zero instead of absent.
        zero: bool,
    },
}

const _: () = assert!(size_of::<Change>() == 24);

impl From<Part> for Change {
    fn from(part: Part) -> Self {
        let Part { block, sectors, slot } = part;
        match slot {
            Some((position, generation, slot)) => {
                Change::Sectors { block, sectors, position, slot, generation }
            }
            None => Change::ZeroSectors { block, sectors },
        }
    }
}

impl Change {
    /// The part of a block that the change concerns.
    fn part(self) -> Option<Part> {
        match self {
            Change::Sectors { block, sectors, position, slot, generation } => {
                Some(Part { block, sectors, slot: Some((position, generation, slot)) })
            }
            Change::ZeroSectors { block, sectors } => Some(Part { block, sectors, slot: None }),
            Change::Slot { .. } | Change::Range { .. } => None,
        }
    }

    /// Position, generation and slot that the change names.
    fn slot(self) -> Option<(u32, u64, u16)> {
        match self {
            Change::Slot { position, slot, generation, .. }
            | Change::Sectors { position, slot, generation, .. } => Some((position, generation, slot)),
            Change::ZeroSectors { .. } | Change::Range { .. } => None,
        }
    }

    /// Merges the next change into this one if possible: a range that begins where this one ends, because
    /// discards come in small consecutive pieces; or further sectors of the same block in the same slot,
    /// because small writes come like that.
    fn is_continued_by(&mut self, next: &Change) -> bool {
        match (self, next) {
            (
                Change::Sectors { block, sectors, position, slot, generation },
                Change::Sectors { block: of, sectors: more, position: p, slot: s, generation: g },
            ) if (*block, *position, *slot, *generation) == (*of, *p, *s, *g) => {
                *sectors |= more;
                true
            }
            (Change::ZeroSectors { block, sectors }, Change::ZeroSectors { block: of, sectors: more })
                if block == of =>
            {
                *sectors |= more;
                true
            }
            (
                Change::Range { first, count, zero },
                Change::Range { first: next, count: more, zero: also },
            ) if zero == also && first.checked_add(*count) == Some(*next) => {
                count.checked_add(*more).is_some_and(|sum| {
                    *count = sum;
                    true
                })
            }
            _ => false,
        }
    }
}

/// The changes of the open epoch.
#[derive(Default)]
struct Pending {
    changes: Vec<Change>,
    /// Positions that are free when this epoch is committed.
    freed: Vec<u32>,
    /// Whether a closed epoch is being committed.
    committing: bool,
    /// Number of changes in that epoch: their space in the map is not used yet.
    committing_changes: usize,
    /// Whether there will be no further commit.
    ended: bool,
}

impl Pending {
    /// There will be no further commit, so the changes are not needed. One is kept: it shows that not
    /// everything is durable.
    fn end(&mut self) {
        self.ended = true;
        self.changes.truncate(1);
        self.changes.shrink_to_fit();
    }

    /// The number of changes, including those that are being committed.
    fn in_all(&self) -> usize {
        self.changes.len() + self.committing_changes
    }

    /// See [`Persist::takes_notes`].
    fn takes_notes(&self) -> bool {
        self.changes.len() < MOST_CHANGES && self.in_all() < MOST_IN_ALL
    }

    fn end_commit(&mut self) {
        self.committing = false;
        self.committing_changes = 0;
    }
}

/// The requests to the cache's thread.
#[derive(Default)]
struct Requests {
    waiters: Vec<FlushDone>,
    commit: bool,
    spill: bool,
    /// Whether the thread is spilling.
    spilling: bool,
    stop: bool,
}

/// The resources of a new segment.
#[derive(Clone, Copy, Debug)]
pub struct Reserved {
    /// Its position on disk.
    pub position: u32,
    /// The generation with which its slots are encrypted.
    pub generation: u64,
}

/// The persistent side of a cache.
pub struct Persist {
    gate: RwLock<()>,
    pending: Mutex<Pending>,
    requests: Mutex<Requests>,
    wake: Condvar,
    journal: Mutex<Journal>,
    room: Arc<MapSpace>,
    /// Buffers of the thread, made when first needed.
    buffers: parking_lot::Mutex<Vec<AlignedBuffer>>,
    buffers_made_bytes: AtomicU64,
    /// Whether they were used since the last check.
    buffers_used: AtomicBool,
    /// Size of the checkpoint that is being written, in bytes.
    checkpoint_bytes: AtomicU64,
    next_generation: AtomicU64,
    generation_limit: AtomicU64,
    /// Whether slots were written since the data file was last synced.
    unsynced: AtomicBool,
    /// Whether the last commit failed.
    failed: AtomicBool,
    /// Whether the last spill failed, and there is still something to spill.
    spill_failed: AtomicBool,
    /// Whether no further commit can succeed; see [`Persist::is_broken`].
    broken: AtomicBool,
    closed: AtomicBool,
    /// Whether another process may own the files by now; see [`Persist::while_open`].
    shut: Mutex<bool>,
    commits: AtomicU64,
    thread: Mutex<Option<thread::JoinHandle<()>>>,
    lock: Lock,
    id: [u8; ID_BYTES],
    is_new: bool,
}

/// The parts of a persistent cache after opening.
pub struct Recovery {
    /// The persistent side.
    pub persist: Arc<Persist>,
    /// The data file.
    pub overflow: Overflow,
    /// The recovered state.
    pub recovered: Recovered,
}

/// Opens or makes a persistent cache, and replays its map into `map` and `segments`.
pub fn open(
    place: &OverflowOptions,
    options: &PersistentOptions,
    size_bytes: u64,
    engine: &Arc<dyn IoEngine>,
    (map, segments): (&Map, &SegmentTable),
) -> Result<Recovery, IoError> {
    let parent = place.at.as_path();
    let device = |why: String| IoError::new(IoErrorKind::Device, why);
    let key = SlotKey::from_bytes(&options.key).map_err(device)?;
    let Opened { mut journal, lock, data, recovered: mut found, first_generation, id } =
        Journal::open(parent, options, size_bytes, &key, engine)?;
    let overflow = Overflow::open_named(place, &data, Arc::clone(engine), key)?;
    let dir = parent.join(&options.name);
    let recovered = match &mut found {
        None => Recovered::default(),
        Some((records, scan)) => recover::replay(records, scan, map, segments)
            .map_err(|e| IoError::from_os(format!("cannot read the map in {}", dir.display()), e))?
            .map_err(|Contradiction(at)| journal::damaged(&dir, at))?,
    };
    let beyond = recovered.used.partition_point(|at| Overflow::offset_of(*at) < overflow.file_bytes());
    let beyond = recovered.used.get(beyond..).unwrap_or_default();
    let unread = |e| IoError::from_os(format!("cannot read the map in {}", dir.display()), e);
    if let Some((records, scan)) = &mut found
        && !beyond.is_empty()
        && !restore::holds_all((records, scan), segments, beyond).map_err(unread)?
    {
        return Err(IoError::new(
            IoErrorKind::Corrupt,
            format!(
                "{} is shorter than its map says: blocks of the cache are missing; check the disk that contains the file, or remove {} to start with an empty cache",
                data.display(),
                dir.display()
            ),
        ));
    }
    overflow.restore(&recovered.used);
    if let Some((records, scan)) = &mut found
        && recovered.encrypted > 0
    {
        let unwritten =
            |e| IoError::from_os(format!("cannot restore flushed slots in {}", data.display()), e);
        directory::open_rw(&data, false)
            .and_then(|file| restore::put_back((records, scan), segments, &file, &**engine))
            .map_err(unwritten)?;
    }
    // A new cache gets its map before anything else: data without a map is taken for a cache that lost it.
    journal.begin(found.is_none(), first_generation)?;
    // A failure is ignored here: the first write reports it.
    let _ = overflow.prepare(READY_POSITIONS);
    // As above.
    let _ = journal.room().claim(0);
    let limit = journal.generation_limit();
    let persist = Persist {
        gate: RwLock::default(),
        pending: Mutex::default(),
        requests: Mutex::default(),
        wake: Condvar::new(),
        room: journal.room(),
        journal: Mutex::new(journal),
        buffers: parking_lot::Mutex::default(),
        buffers_made_bytes: AtomicU64::new(0),
        buffers_used: AtomicBool::new(false),
        checkpoint_bytes: AtomicU64::new(0),
        next_generation: AtomicU64::new(first_generation),
        generation_limit: AtomicU64::new(limit),
        unsynced: AtomicBool::new(false),
        failed: AtomicBool::new(false),
        spill_failed: AtomicBool::new(false),
        broken: AtomicBool::new(false),
        closed: AtomicBool::new(false),
        shut: Mutex::default(),
        commits: AtomicU64::new(0),
        thread: Mutex::default(),
        lock,
        id,
        is_new: found.is_none(),
    };
    Ok(Recovery { persist: Arc::new(persist), overflow, recovered })
}

impl Persist {
    /// The identity of this cache, whatever its name is.
    pub fn id(&self) -> [u8; ID_BYTES] {
        self.id
    }

    /// Whether the cache was made by this open.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// Held while the map is changed, so that no epoch ends meanwhile.
    #[inline]
    pub fn enter(&self) -> RwLockReadGuard<'_, ()> {
        self.gate.read()
    }

    /// Like [`Persist::enter`], for a machine's requests. `None` once the cache is being closed: an admitted
    /// write is in the last commit; any other must not be answered as done.
    #[inline]
    pub fn enter_to_write(&self) -> Option<RwLockReadGuard<'_, ()>> {
        let entered = self.enter();
        (!self.is_closed()).then_some(entered)
    }

    /// Logs a change in the open epoch. The gate is entered.
    pub fn note(&self, change: Change) {
        let mut pending = self.pending.lock();
        if pending.ended && !pending.changes.is_empty() {
            return;
        }
        if pending.changes.last_mut().is_some_and(|last| last.is_continued_by(&change)) {
            return;
        }
        pending.changes.push(change);
        let many = pending.changes.len() == MAX_CHANGES;
        drop(pending);
        if many {
            self.request(|requests| requests.commit = true);
        }
    }

    /// Whether a write may log a change that takes no slot. If not, a commit was requested, and the write
    /// takes a slot, of which there is a limited number.
    pub fn takes_notes(&self) -> bool {
        self.pending.lock().takes_notes()
    }

    /// Like [`Persist::takes_notes`], for a part of a block. Its record is three times as long as that of a
    /// range, so the map must have space for it, too.
    pub fn takes_part_notes(&self) -> bool {
        let (takes_notes, changes) = {
            let pending = self.pending.lock();
            (pending.takes_notes(), pending.in_all())
        };
        takes_notes && self.room.is_enough(changes)
    }

    fn pending_changes(&self) -> usize {
        self.pending.lock().in_all()
    }

    /// Claims space for the map: for committing the pending changes, and for later ones. May block in the
    /// file system.
    pub fn claim_map(&self) -> io::Result<()> {
        self.room.claim(self.pending_changes())
    }

    /// Whether the map has space for the pending changes and more.
    pub fn has_map_room(&self) -> bool {
        self.room.is_enough(self.pending_changes())
    }

    /// Records that a position is free after the next commit.
    pub fn freed(&self, position: u32) {
        self.pending.lock().freed.push(position);
    }

    /// Whether segments may be begun, apart from their positions.
    fn may_begin(&self) -> bool {
        !self.closed.load(Ordering::Acquire)
            && self.next_generation.load(Ordering::Relaxed) < self.generation_limit.load(Ordering::Acquire)
    }

    /// Whether there is a position for a segment of the cleaned stream.
    pub fn could_reserve(&self, overflow: &Overflow) -> bool {
        self.may_begin() && overflow.ready_positions() > 0
    }

    /// Whether there is a position for a segment of the fresh stream: a claimed one besides those for
    /// cleaning, and space in the map.
    pub fn could_begin(&self, overflow: &Overflow) -> bool {
        self.may_begin()
            && overflow.free_positions() > RESERVED_POSITIONS
            && overflow.ready_positions() > RESERVED_POSITIONS as usize
            && self.room.is_enough(self.pending_changes())
    }

    /// Reserves position and generation for a new segment. Some of both are kept for cleaning.
    pub fn reserve(&self, overflow: &Overflow, stream: Stream) -> Option<Reserved> {
        if !self.may_begin() {
            return None;
        }
        let position = match stream {
            Stream::Fresh if !self.room.is_enough(self.pending_changes()) => return None,
            Stream::Fresh => overflow.take_ready(RESERVED_POSITIONS)?,
            Stream::Cleaned => overflow.take_for_cleaning()?,
        };
        // Called under the log's lock, so that no other thread takes the last one.
        let generation = self.next_generation.fetch_add(1, Ordering::Relaxed);
        Some(Reserved { position, generation })
    }

    /// RAM of the thread in bytes: its buffers, and a checkpoint. Does not take the buffers' lock, which the
    /// thread holds while it writes.
    pub fn buffer_bytes(&self) -> u64 {
        self.buffers_made_bytes.load(Ordering::Relaxed) + self.checkpoint_bytes.load(Ordering::Relaxed)
    }

    /// Whether the thread has buffers that it may not need.
    pub fn has_spare_buffers(&self) -> bool {
        !UNDER_MODEL_CHECKER && self.buffers_made_bytes.load(Ordering::Relaxed) > 0
    }

    /// Frees the thread's buffers if it used none since the last call. Returns the number of freed bytes.
    pub fn trim_buffers(&self) -> u64 {
        if self.buffers_used.swap(false, Ordering::Relaxed) {
            return 0;
        }
        let Some(mut buffers) = self.buffers.try_lock() else { return 0 };
        let bytes = buffers.drain(..).map(|buffer| buffer.len() as u64).sum();
        self.buffers_made_bytes.fetch_sub(bytes, Ordering::Relaxed);
        bytes
    }

    fn request(&self, change: impl FnOnce(&mut Requests)) {
        change(&mut self.requests.lock());
        self.wake.notify_one();
    }

    /// Requests that cold segments be written, if there are any.
    pub fn ask_spill(&self, wanted: bool) {
        if wanted {
            self.request(|requests| requests.spill = true);
        } else {
            self.spill_failed.store(false, Ordering::Release);
        }
    }

    /// Requests a commit if one would free space: positions wait for it, and they are needed.
    pub fn ask_for_room(&self, wanted: bool) {
        if self.is_broken() {
            return;
        }
        let low = self.next_generation.load(Ordering::Relaxed) + LOW_GENERATIONS
            > self.generation_limit.load(Ordering::Relaxed);
        let due = {
            let pending = self.pending.lock();
            !pending.committing
                && ((wanted && !pending.freed.is_empty())
                    || pending.freed.len() >= MAX_FREED
                    || pending.changes.len() >= MAX_CHANGES)
        };
        if due || low {
            self.request(|requests| requests.commit = true);
        }
    }

    /// Requests a commit if there is anything to commit.
    pub fn ask_for_commit(&self) {
        let due = {
            let pending = self.pending.lock();
            !pending.committing && !pending.changes.is_empty()
        };
        if due && !self.is_broken() {
            self.request(|requests| requests.commit = true);
        }
    }

    /// Whether so many positions wait for a commit that some would be returned to the file system after it.
    /// Without this check, a machine that discards and then has nothing to flush would keep them as long as
    /// it is idle.
    pub fn holds_surplus(&self) -> bool {
        let pending = self.pending.lock();
        // After a failure, the next flush retries.
        let fails = self.has_failed() || self.is_broken();
        !pending.committing && pending.freed.len() > KEEP_POSITIONS && !fails
    }

    /// Whether positions are being freed, or cold segments being written.
    pub fn brings_room(&self) -> bool {
        {
            let requests = self.requests.lock();
            if requests.spill || requests.spilling {
                return true;
            }
        }
        self.frees_places()
    }

    /// Whether positions are being freed. If the last commit failed, only while the next one is tried: the
    /// disk may fail for long, or for ever.
    pub fn frees_places(&self) -> bool {
        let fails = self.has_failed() || self.is_broken();
        let pending = self.pending.lock();
        pending.committing || (!fails && !pending.freed.is_empty())
    }

    /// Whether everything written so far is durable.
    pub fn is_durable(&self) -> bool {
        let pending = self.pending.lock();
        let fails = self.has_failed() || self.is_broken();
        pending.changes.is_empty() && !pending.committing && !fails
    }

    /// Runs work that claims or frees space of the files, unless the cache was closed: the next process that
    /// opens it owns all space that this one considers free. Only [`Persist::close`] waits for such work, so
    /// that none of it runs after the next opening.
    pub fn while_open<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        let shut = self.shut.lock();
        (!*shut).then(work)
    }

    /// Whether it was closed, or is being closed.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Whether the last commit failed.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Whether the last access to the disk failed, at a commit or a spill.
    pub fn disk_fails(&self) -> bool {
        self.has_failed() || self.spill_failed.load(Ordering::Acquire)
    }

    /// Whether all flushes fail until the cache is opened again: a sync failed, or the replacement of the
    /// map. The system may have dropped data that it could not write, and reports it as durable afterwards.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// Commits since the cache was opened.
    pub fn commits(&self) -> u64 {
        self.commits.load(Ordering::Relaxed)
    }

    /// Makes all earlier writes durable; `done` is called on the cache's thread.
    pub fn flush(&self, done: FlushDone) {
        let mut requests = self.requests.lock();
        if requests.stop {
            drop(requests);
            return done(Err(IoError::new(IoErrorKind::Closed, "the volume is closed")));
        }
        requests.waiters.push(done);
        drop(requests);
        self.wake.notify_one();
    }

    /// Ends the thread. Writes that were not flushed may be lost.
    pub fn stop(&self) {
        self.closed.store(true, Ordering::Release);
        self.request(|requests| requests.stop = true);
    }

    /// Whether a flush waits on which the thread does not work yet.
    fn flush_waits(&self) -> bool {
        let requests = self.requests.lock();
        requests.stop || requests.commit || !requests.waiters.is_empty()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests;
