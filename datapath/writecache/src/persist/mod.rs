//! Persistent caches: what a volume flushed is there after a restart, a crash or a power cut.
//!
//! ```text
//!   write -> slot in RAM, change noted in the open epoch
//!                                |
//!   FLUSH -> close the epoch -> seal and write its slots -> sync data -> add a commit to the map -> sync -> answer
//!            (gate: no write       \______________ the cache's own thread; writes go on ______________/
//!             is half done)     few slots: seal them into the commit, and nothing to data
//! ```
//! An **epoch** is what was written between two commits. Legal outcomes of a crash: the state at the end of a
//! committed epoch, at or after the last answered flush; since the gate closes an epoch between two writes,
//! that is a prefix of the writes.
//!
//! What makes it so:
//! - A slot that belongs to a closed epoch is not overwritten in place: the block takes a new slot, in order
//!   of claiming, and a slot is claimed once in the life of its segment. So nothing that a commit names
//!   changes afterwards.
//! - A segment gets its position and generation when it is begun, and only as many are begun as there are
//!   positions, and as the map has space claimed for: whatever was accepted can be flushed. Increments of a segment are written at its slots'
//!   places; the sector that two increments share is written again with the same bytes.
//! - A position that was freed is used again only after a commit that knows that it is free.
//! - A commit of few slots has them in the map, for their first sync: one write and one sync make it durable. The data file gets
//!   them with the next commit of more, or with a spill; a map that is replaced has none, as all is in the data file by then. What
//!   a crash keeps from getting there is put there at opening (`restore.rs`), with the bytes that are in the map.
//! - Generations are reserved ahead by commits, so that no nonce is used twice, whatever a crash drops.
//!
//! Commits also happen without a flush: when positions wait to be free, or many changes were noted. The
//! cache's thread alone writes segments, so a commit and spilling never meet.
//!
//! Lock order: the gate before a leaf, and what is pending after everything else.

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

/// What makes a cache persistent.
#[derive(Clone, PartialEq, Eq)]
pub struct PersistentOptions {
    /// Name of the cache: a directory of this name under the overflow's directory.
    pub name: String,
    /// The key that its blocks are sealed with. The caller keeps it, not beside the cache.
    pub key: [u8; 16],
    /// Identity of the base: a cache is opened over the base it was made over, and no other.
    pub base_id: [u8; 32],
}

impl PersistentOptions {
    /// Refuses names of caches that are not plain file names.
    pub fn check_name(name: &str) -> Result<(), IoError> {
        journal::check_name(name)
    }
}

impl Drop for PersistentOptions {
    /// The key is in the cache's protected memory by now, and this copy is in ordinary memory, which is swapped and dumped.
    fn drop(&mut self) {
        self.key.fill(0);
        // So that no compiler leaves it out.
        std::hint::black_box(&self.key);
    }
}

impl std::fmt::Debug for PersistentOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PersistentOptions").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The file of a cache's directory that holds its segments.
pub const DATA_FILE: &str = "data";

/// Changes noted in an epoch before it is committed without a flush: 6 MiB of memory, 1 GiB of blocks.
const MAX_CHANGES: usize = if UNDER_MODEL_CHECKER { 24 } else { 256 << 10 };

/// Changes noted in an epoch at most, but for those that are bounded by themselves: 12 MiB of memory. A write that needs no
/// place on disk takes one then; of those there are only so many, and what a discard or zero write clears has to be in one.
const MOST_CHANGES: usize = 2 * MAX_CHANGES;

/// The same with those that are being committed: where that fails, they are noted again.
const MOST_IN_ALL: usize = MOST_CHANGES + MAX_CHANGES;

/// Segments that may be begun before the map has to reserve more generations.
const LOW_GENERATIONS: u64 = 1 << 16;

/// Positions kept claimed for the segments to be begun next.
pub const READY_POSITIONS: usize = 8;

/// Freed positions that wait for a commit, at most.
const MAX_FREED: usize = if UNDER_MODEL_CHECKER { 4 } else { 64 };

/// The answer to a flush.
pub type FlushDone = Box<dyn FnOnce(Result<(), IoError>) + Send>;

/// One change of the map: flat, because a cache may hold many of them.
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
        /// Zero rather than absent.
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
    /// The part of a block that it is about.
    fn part(self) -> Option<Part> {
        match self {
            Change::Sectors { block, sectors, position, slot, generation } => {
                Some(Part { block, sectors, slot: Some((position, generation, slot)) })
            }
            Change::ZeroSectors { block, sectors } => Some(Part { block, sectors, slot: None }),
            Change::Slot { .. } | Change::Range { .. } => None,
        }
    }

    /// Position, generation and slot that it names.
    fn slot(self) -> Option<(u32, u64, u16)> {
        match self {
            Change::Slot { position, slot, generation, .. }
            | Change::Sectors { position, slot, generation, .. } => Some((position, generation, slot)),
            Change::ZeroSectors { .. } | Change::Range { .. } => None,
        }
    }

    /// Takes the next change into this one if the two are one: a range that begins where this one ends, because discards come in
    /// small pieces, side by side; or further sectors of the same block in the same slot, because small writes come so.
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

/// What the open epoch has brought so far.
#[derive(Default)]
struct Pending {
    changes: Vec<Change>,
    /// Positions that are free once this epoch is committed.
    freed: Vec<u32>,
    /// A closed epoch is being committed.
    committing: bool,
    /// The changes in it: their space in the map is not used up yet.
    committing_changes: usize,
    /// There is no commit any more.
    ended: bool,
}

impl Pending {
    /// There is no commit any more, so the changes are of no use. One stays: not all is durable.
    fn end(&mut self) {
        self.ended = true;
        self.changes.truncate(1);
        self.changes.shrink_to_fit();
    }

    /// The changes, also those that are being committed.
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

/// What the cache's thread was asked to do.
#[derive(Default)]
struct Asked {
    waiters: Vec<FlushDone>,
    commit: bool,
    spill: bool,
    /// It is at it.
    spilling: bool,
    stop: bool,
}

/// What a segment gets when it is begun.
#[derive(Clone, Copy, Debug)]
pub struct Reserved {
    /// Its place on disk.
    pub position: u32,
    /// What its slots are sealed with.
    pub generation: u64,
}

/// The persistent side of a cache.
pub struct Persist {
    gate: RwLock<()>,
    pending: Mutex<Pending>,
    asked: Mutex<Asked>,
    wake: Condvar,
    journal: Mutex<Journal>,
    room: Arc<MapSpace>,
    /// Buffers of the thread, made when first needed.
    buffers: parking_lot::Mutex<Vec<AlignedBuffer>>,
    buffers_made_bytes: AtomicU64,
    /// They were, since the last look.
    buffers_used: AtomicBool,
    /// A checkpoint that is being written.
    checkpoint_bytes: AtomicU64,
    next_generation: AtomicU64,
    generation_limit: AtomicU64,
    /// Slots were written since the data was last synced.
    unsynced: AtomicBool,
    /// The last commit failed.
    failed: AtomicBool,
    /// The last spill failed, and there is still something to spill.
    spill_failed: AtomicBool,
    /// No commit succeeds any more; see [`Persist::is_broken`].
    broken: AtomicBool,
    closed: AtomicBool,
    /// The files may be another's by now; see [`Persist::while_open`].
    shut: Mutex<bool>,
    commits: AtomicU64,
    thread: Mutex<Option<thread::JoinHandle<()>>>,
    lock: Lock,
    id: [u8; ID_BYTES],
    is_new: bool,
}

/// A persistent cache's parts, as they are after opening.
pub struct Recovery {
    /// The persistent side.
    pub persist: Arc<Persist>,
    /// The data file.
    pub overflow: Overflow,
    /// What was found.
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
                "{} is shorter than its map says: blocks of the cache are missing; check that disk, or remove {} to begin with an empty cache",
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
            |e| IoError::from_os(format!("cannot write what was flushed to {}", data.display()), e);
        directory::open_rw(&data, false)
            .and_then(|file| restore::put_back((records, scan), segments, &file, &**engine))
            .map_err(unwritten)?;
    }
    // A new cache has its map before anything else: data without one is taken for a cache that lost it.
    journal.begin(found.is_none(), first_generation)?;
    // A failure here is no matter: the first write finds out.
    let _ = overflow.prepare(READY_POSITIONS);
    // The same here.
    let _ = journal.room().claim(0);
    let limit = journal.generation_limit();
    let persist = Persist {
        gate: RwLock::default(),
        pending: Mutex::default(),
        asked: Mutex::default(),
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
    /// What tells this cache from every other one, whatever they are called.
    pub fn id(&self) -> [u8; ID_BYTES] {
        self.id
    }

    /// Whether it was made when it was opened.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// To be held while the map is changed: an epoch does not end meanwhile.
    #[inline]
    pub fn enter(&self) -> RwLockReadGuard<'_, ()> {
        self.gate.read()
    }

    /// The same for what a machine asks for. `None` once the cache is being closed: what is let in is in the last commit, and what
    /// is not must not be answered as if it were.
    #[inline]
    pub fn enter_to_write(&self) -> Option<RwLockReadGuard<'_, ()>> {
        let entered = self.enter();
        (!self.is_closed()).then_some(entered)
    }

    /// Notes a change in the open epoch. The gate is entered.
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
            self.ask(|asked| asked.commit = true);
        }
    }

    /// Whether a write may note a change that takes no place on disk. Where not, a commit was asked for, and the write takes a
    /// place: of those there are only so many.
    pub fn takes_notes(&self) -> bool {
        self.pending.lock().takes_notes()
    }

    /// The same for a part of a block. Its record is three times as long as that of a range, so the map has to have space for it, too.
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

    /// Claims space for the map, so that what is pending can be committed, and what is written until the next time.
    /// Blocks for the file system.
    pub fn claim_map(&self) -> io::Result<()> {
        self.room.claim(self.pending_changes())
    }

    /// Whether the map has space for what is pending and more.
    pub fn has_map_room(&self) -> bool {
        self.room.is_enough(self.pending_changes())
    }

    /// A position is free, once a commit knows it.
    pub fn freed(&self, position: u32) {
        self.pending.lock().freed.push(position);
    }

    /// Whether segments may be begun, as far as that is not a matter of their place.
    fn may_begin(&self) -> bool {
        !self.closed.load(Ordering::Acquire)
            && self.next_generation.load(Ordering::Relaxed) < self.generation_limit.load(Ordering::Acquire)
    }

    /// Whether there is a place for a segment that cleaning fills.
    pub fn could_reserve(&self, overflow: &Overflow) -> bool {
        self.may_begin() && overflow.ready_positions() > 0
    }

    /// Whether there is a place for a segment that the machine fills: one that is claimed, besides those of cleaning, and room
    /// in the map.
    pub fn could_begin(&self, overflow: &Overflow) -> bool {
        self.may_begin()
            && overflow.free_positions() > RESERVED_POSITIONS
            && overflow.ready_positions() > RESERVED_POSITIONS as usize
            && self.room.is_enough(self.pending_changes())
    }

    /// Position and generation for a new segment; some of both are left for cleaning.
    pub fn reserve(&self, overflow: &Overflow, stream: Stream) -> Option<Reserved> {
        if !self.may_begin() {
            return None;
        }
        let position = match stream {
            Stream::Fresh if !self.room.is_enough(self.pending_changes()) => return None,
            Stream::Fresh => overflow.take_ready(RESERVED_POSITIONS)?,
            Stream::Cleaned => overflow.take_for_cleaning()?,
        };
        // Called under the log's lock, so that nobody else takes the last one.
        let generation = self.next_generation.fetch_add(1, Ordering::Relaxed);
        Some(Reserved { position, generation })
    }

    /// RAM of the thread: its buffers, and a checkpoint. The thread holds them for as long as it writes, so their lock is
    /// not asked.
    pub fn buffer_bytes(&self) -> u64 {
        self.buffers_made_bytes.load(Ordering::Relaxed) + self.checkpoint_bytes.load(Ordering::Relaxed)
    }

    /// Whether the thread has buffers that it may not need.
    pub fn has_spare_buffers(&self) -> bool {
        !UNDER_MODEL_CHECKER && self.buffers_made_bytes.load(Ordering::Relaxed) > 0
    }

    /// Gives the thread's buffers back to the system, where it took none since the last call. How many bytes that was.
    pub fn trim_buffers(&self) -> u64 {
        if self.buffers_used.swap(false, Ordering::Relaxed) {
            return 0;
        }
        let Some(mut buffers) = self.buffers.try_lock() else { return 0 };
        let bytes = buffers.drain(..).map(|buffer| buffer.len() as u64).sum();
        self.buffers_made_bytes.fetch_sub(bytes, Ordering::Relaxed);
        bytes
    }

    fn ask(&self, change: impl FnOnce(&mut Asked)) {
        change(&mut self.asked.lock());
        self.wake.notify_one();
    }

    /// Asks for cold segments to be written, where there are any.
    pub fn ask_spill(&self, wanted: bool) {
        if wanted {
            self.ask(|asked| asked.spill = true);
        } else {
            self.spill_failed.store(false, Ordering::Release);
        }
    }

    /// Asks for a commit, where one would make room: positions wait for it, and they are wanted.
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
            self.ask(|asked| asked.commit = true);
        }
    }

    /// Asks for a commit, where there is something to commit.
    pub fn ask_for_commit(&self) {
        let due = {
            let pending = self.pending.lock();
            !pending.committing && !pending.changes.is_empty()
        };
        if due && !self.is_broken() {
            self.ask(|asked| asked.commit = true);
        }
    }

    /// Whether so many positions wait for a commit that some would be given back to the file system after it. A machine
    /// that discards and then has nothing to flush would keep them for as long as it is idle.
    pub fn holds_surplus(&self) -> bool {
        let pending = self.pending.lock();
        // After a failure the next flush tries again.
        let fails = self.has_failed() || self.is_broken();
        !pending.committing && pending.freed.len() > KEEP_POSITIONS && !fails
    }

    /// Whether positions are on their way back, or cold segments to the disk.
    pub fn brings_room(&self) -> bool {
        {
            let asked = self.asked.lock();
            if asked.spill || asked.spilling {
                return true;
            }
        }
        self.frees_places()
    }

    /// Whether positions are on their way back. Where the last commit failed they are so only while the next one is tried: the
    /// disk may stay as it is for long, or for good.
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

    /// Does what claims or frees space of the files, unless the cache gave them up: who opens it next owns all that this one
    /// takes for free. [`Persist::close`] alone waits for it, so that none of it falls behind the next opening.
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

    /// Whether the disk failed at the last try, at a commit or a spill.
    pub fn disk_fails(&self) -> bool {
        self.has_failed() || self.spill_failed.load(Ordering::Acquire)
    }

    /// Whether no flush succeeds any more until the cache is opened again: a sync failed, or what replaces the map. The system
    /// may have dropped what it could not write, and says of it afterwards that it is durable.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// Commits since the cache was opened.
    pub fn commits(&self) -> u64 {
        self.commits.load(Ordering::Relaxed)
    }

    /// Makes what was written before durable; `done` is called on the cache's thread.
    pub fn flush(&self, done: FlushDone) {
        let mut asked = self.asked.lock();
        if asked.stop {
            drop(asked);
            return done(Err(IoError::new(IoErrorKind::Closed, "the volume is closed")));
        }
        asked.waiters.push(done);
        drop(asked);
        self.wake.notify_one();
    }

    /// Ends the thread; what was not flushed may be lost.
    pub fn stop(&self) {
        self.closed.store(true, Ordering::Release);
        self.ask(|asked| asked.stop = true);
    }

    /// Whether a flush waits that the thread does not work on yet.
    fn flush_waits(&self) -> bool {
        let asked = self.asked.lock();
        asked.stop || asked.commit || !asked.waiters.is_empty()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests;
