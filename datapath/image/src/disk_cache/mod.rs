//! Chunks of remote images on a local disk, bounded, for all volumes of a process.
//!
//! ```text
//!   DIR/cache          what the directory is
//!   DIR/lock           locked by the one process that uses it
//!   DIR/segment-N      records, one after another; N counts up
//!   DIR/lost-N         one that could not be synced: it is read as long as it is there, and nothing in it counts as durable
//!   DIR/moving         the segment to be, while what is to stay of one that goes is copied
//!   DIR/traces/HASH    boot traces that were recorded here
//!   DIR/manifests/HASH manifests of versions that were opened
//!   DIR/stores/HASH    what their stores were: see [`stores`]
//! ```
//! A record is a chunk as it is in the store, with its hash and length in front. Chunks are appended to the newest
//! segment; when there is no room the oldest segment that is not kept as a whole goes, and what was used since it came, or
//! belongs to a version that is kept, is copied to a new one first ([`moving`]).
//!
//! # Guarantees
//! - What comes out is checked by the reader like what comes from a server; a chunk that is not what it should
//!   be is forgotten and fetched again.
//! - What does not need to be durable is not synced: after a crash a record is whole, or is noticed not to be. Synced are
//!   `cache`, what it takes to open a version without servers, boot traces, and the chunks of one that is said to be here ([`DiskCache::sync`]).
//! - The files of segments never take more than the limit. A disk that is full or fails costs the cache, not
//!   the read.
//! - What belongs to a version that is kept goes only when it is elsewhere: until it was copied, and where that fails, its
//!   segment stays. What cannot be synced is read as before, but is lacking: it can be put once more, and is the first to go.
//!
//! # Lock order
//! `keeping`; `syncing`, `beginning`, `state`. `state`, which every read waits for, is not held across I/O, but where a segment is
//! removed because it could not be moved.

mod manifests;
mod moving;
pub(crate) mod segment;
mod sidecars;
pub(crate) mod stores;
mod sync;
mod traces;

use std::collections::VecDeque;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use headwater_block::size;
use headwater_store::Hash;
use parking_lot::Mutex;

use crate::disk_cache::segment::{RECORD_HEADER_BYTES, record_header, scan};
use crate::error::{ImageError, ImageErrorKind};
use crate::index::HashTable;
use crate::side_by_side::side_by_side;
use crate::units::{u64_of, usize_of_u32};

/// The smallest cache.
pub const DISK_CACHE_MIN_BYTES: u64 = 64 << 20;
/// A cache has so many segments, unless they would be too large or too small.
const SEGMENTS: u64 = 16;
const SEGMENT_MIN_BYTES: u64 = 4 << 20;
const SEGMENT_MAX_BYTES: u64 = 64 << 20;
/// Segments that are read at a time when a cache is opened, on a thread each: after a start of the host each record in them is a read
/// that waits for the disk.
const SCANS_AT_A_TIME: usize = 8;
/// How much of the cache, in parts of 16, versions that are kept may fill: the rest is room to move them.
const KEPT_SHARE: u64 = 13;

const MARK_FILE: &str = "cache";
/// The mark while it is written.
const MARK_PART: &str = "cache-part";
const MARK: &[u8] = b"HWCHUNKS\x01\0\0\0\0\0\0\0";

#[derive(Clone, Copy, Debug)]
struct Place {
    segment: u64,
    offset: u64,
    len: u32,
    used: bool,
    /// An earlier process wrote it, and nobody has looked since whether it is what it should be.
    is_unread: bool,
    synced: Synced,
}

impl Place {
    fn new(segment: u64, offset: u64, len: u32) -> Self {
        Self { segment, offset, len, used: false, is_unread: false, synced: Synced::NotYet }
    }
}

/// Whether what is in a place outlasts a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Synced {
    NotYet,
    Yes,
    /// That failed, and no later sync tells: nobody knows what is on the disk. As long as it is read it is checked.
    Failed,
}

#[derive(Debug)]
struct Segment {
    number: u64,
    path: PathBuf,
    file: Arc<File>,
    /// Claimed so far.
    len: u64,
    hashes: Vec<Hash>,
    /// A sync failed. Nothing is put here any more: nobody knows which of its pages are on the disk.
    is_lost: bool,
}

impl Segment {
    fn new(number: u64, path: PathBuf, file: File, len: u64, hashes: Vec<Hash>) -> Self {
        Self { number, path, file: Arc::new(file), len, hashes, is_lost: false }
    }
}

#[derive(Debug, Default)]
struct State {
    index: HashTable<Place>,
    segments: VecDeque<Segment>,
    next_number: u64,
    bytes: u64,
    kept: Vec<Arc<KeptVersion>>,
    /// Whether writing failed, and was said to fail.
    failing: bool,
    /// While a thread makes room.
    moving: bool,
    /// So many chunks are not put before room is made again: making it failed.
    passes: u32,
    /// Segments from this number on were begun by this process. The end of an older one may be half a record,
    /// so nothing is appended to it.
    fresh_from: u64,
}

impl State {
    fn file_of(&self, place: Place) -> Option<Arc<File>> {
        let segment = self.segments.iter().find(|segment| segment.number == place.segment)?;
        Some(Arc::clone(&segment.file))
    }

    fn segment_mut(&mut self, number: u64) -> Option<&mut Segment> {
        self.segments.iter_mut().find(|segment| segment.number == number)
    }
}

/// The chunks of a version that must not go.
#[derive(Debug)]
struct KeptVersion {
    /// With the length of each one's record.
    chunks: HashTable<u64>,
}

/// What the cache did since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskCacheCounters {
    /// Chunks that were found.
    pub hits: u64,
    /// Chunks that were looked for in vain.
    pub misses: u64,
    /// Chunks written.
    pub writes: u64,
    /// Chunks dropped to make room.
    pub evictions: u64,
    /// Chunks that were not what they should be, and were fetched again.
    pub damaged: u64,
    /// Writes that failed.
    pub failures: u64,
    /// Bytes that the files take.
    pub held_bytes: u64,
    /// The most that they may take.
    pub capacity_bytes: u64,
}

#[derive(Debug, Default)]
struct Counters {
    hits: AtomicU64,
    misses: AtomicU64,
    writes: AtomicU64,
    evictions: AtomicU64,
    damaged: AtomicU64,
    failures: AtomicU64,
}

/// A cache of stored chunks in a directory.
#[derive(Debug)]
pub struct DiskCache {
    dir: PathBuf,
    _lock: File,
    capacity_bytes: u64,
    segment_bytes: u64,
    state: Mutex<State>,
    /// Held while it is decided whether one more version can be kept.
    keeping: Mutex<()>,
    /// Held while a segment's file is made. Only those who put wait for it.
    beginning: Mutex<()>,
    /// Held while what is here is synced: of two who sync a file at a time, the system tells only one that it failed.
    syncing: Mutex<()>,
    counters: Counters,
}

impl DiskCache {
    /// Opens the cache in `dir`, which is made if it does not exist, with what it held before.
    pub fn open(dir: &Path, capacity_bytes: u64) -> Result<Arc<Self>, ImageError> {
        let failed = |e: std::io::Error| {
            ImageError::from_os(format!("cannot use {} as a chunk cache", dir.display()), &e)
        };
        if capacity_bytes < DISK_CACHE_MIN_BYTES {
            return Err(ImageError::new(
                ImageErrorKind::Invalid,
                format!(
                    "a chunk cache of {} in {} is too small: it takes {} or more",
                    size::format(capacity_bytes),
                    dir.display(),
                    size::format(DISK_CACHE_MIN_BYTES)
                ),
            ));
        }
        make_own(dir).map_err(failed)?;
        let lock = open_own(File::options().create(true).truncate(false).write(true), &dir.join("lock"))
            .map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let why = format!(
                    "the chunk cache {} is in use by another process: one 'headwater serve' shares it between all \
                     its machines; give each other process a directory of its own",
                    dir.display()
                );
                return Err(ImageError::new(ImageErrorKind::Busy, why));
            }
            Err(TryLockError::Error(e)) => return Err(failed(e)),
        }
        mark(dir)?;
        let segment_bytes = (capacity_bytes / SEGMENTS).clamp(SEGMENT_MIN_BYTES, SEGMENT_MAX_BYTES);
        let cache = Self {
            dir: dir.to_owned(),
            _lock: lock,
            capacity_bytes,
            segment_bytes,
            state: Mutex::default(),
            keeping: Mutex::default(),
            beginning: Mutex::default(),
            syncing: Mutex::default(),
            counters: Counters::default(),
        };
        cache.load().map_err(failed)?;
        Ok(Arc::new(cache))
    }

    /// What it did, and how full it is.
    pub fn counters(&self) -> DiskCacheCounters {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DiskCacheCounters {
            hits: value(&self.counters.hits),
            misses: value(&self.counters.misses),
            writes: value(&self.counters.writes),
            evictions: value(&self.counters.evictions),
            damaged: value(&self.counters.damaged),
            failures: value(&self.counters.failures),
            held_bytes: self.state.lock().bytes,
            capacity_bytes: self.capacity_bytes,
        }
    }

    /// Reads the segments that are there.
    fn load(&self) -> Result<(), std::io::Error> {
        moving::remove_rest(&self.dir)?;
        self.manifests().remove_rest()?;
        self.stores().remove_rest()?;
        self.traces().remove_rest()?;
        let mut found: Vec<(u64, PathBuf)> = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let number = name.strip_prefix("segment-").or_else(|| name.strip_prefix(sync::LOST));
            if let Some(number) = number.and_then(|number| number.parse().ok()) {
                found.push((number, path));
            }
        }
        found.sort_unstable();
        for some in found.chunks(SCANS_AT_A_TIME) {
            let opened: Vec<_> =
                some.iter().map(|(_, path)| open_segment(path)).collect::<Result<_, std::io::Error>>()?;
            let scanned = side_by_side("chunk-cache", &opened, |(file, len)| scan(file, *len))?;
            let mut state = self.state.lock();
            // In order: of a chunk that is there twice, the newer one counts.
            for (((number, path), (file, len)), records) in some.iter().zip(opened).zip(scanned) {
                let (number, path) = (*number, path.clone());
                let is_lost = sync::is_lost(&path);
                let synced = if is_lost { Synced::Failed } else { Synced::NotYet };
                state.next_number = number + 1;
                let mut hashes = Vec::with_capacity(records.len());
                for (hash, offset, stored_bytes) in records {
                    let place = Place { is_unread: true, synced, ..Place::new(number, offset, stored_bytes) };
                    state.index.insert(hash, place);
                    hashes.push(hash);
                }
                state.bytes += len;
                let segment = Segment::new(number, path, file, len, hashes);
                state.segments.push_back(Segment { is_lost, ..segment });
            }
        }
        let mut state = self.state.lock();
        // The limit may be a smaller one than before. Nothing is kept yet. Room to move a segment is there for the length
        // that segments have now, so longer ones go, wherever they are.
        self.remove_longer(&mut state);
        // One of which something is there twice, since moving it was cut short, goes before all others: what of it is nowhere else was to go.
        let segments = std::mem::take(&mut state.segments);
        let is_moved = |segment: &Segment| {
            let found = moving::places_in(&state, segment).count();
            found == 0 || found < segment.hashes.len()
        };
        let (gone, rest): (Vec<_>, Vec<_>) = segments.into_iter().partition(is_moved);
        state.segments = gone.into_iter().chain(rest).collect();
        while !self.has_room(&state, 0) && self.remove_first(&mut state) {}
        state.fresh_from = state.next_number;
        Ok(())
    }

    /// Fills `into` with the stored bytes of a chunk, if they are here.
    pub(crate) fn get(&self, hash: &Hash, into: &mut Vec<u8>) -> bool {
        let found = {
            let mut state = self.state.lock();
            let place = state.index.get_mut(hash).map(|place| {
                place.used = true;
                *place
            });
            place.and_then(|place| Some((place, state.file_of(place)?)))
        };
        let Some((place, file)) = found else {
            self.counters.misses.fetch_add(1, Ordering::Relaxed);
            return false;
        };
        let is_read = self.read(hash, place, &file, into);
        if is_read {
            self.counters.hits.fetch_add(1, Ordering::Relaxed);
        }
        is_read
    }

    fn read(&self, hash: &Hash, place: Place, file: &File, into: &mut Vec<u8>) -> bool {
        into.resize(usize_of_u32(place.len), 0);
        file.read_exact_at(into, place.offset).inspect_err(|e| self.forget(hash, e)).is_ok()
    }

    /// Fills `into` with the stored bytes of a chunk that an earlier process left here, until somebody says that
    /// it [was right](Self::was_right), and of one that could not be synced. Neither counted nor kept for that.
    pub(crate) fn get_unread(&self, hash: &Hash, into: &mut Vec<u8>) -> bool {
        let found = {
            let state = self.state.lock();
            let is_doubtful = |place: &Place| place.is_unread || place.synced == Synced::Failed;
            let place = state.index.get(hash).copied().filter(is_doubtful);
            place.and_then(|place| Some((place, state.file_of(place)?)))
        };
        found.is_some_and(|(place, file)| self.read(hash, place, &file, into))
    }

    /// What is here is the chunk.
    pub(crate) fn was_right(&self, hash: &Hash) {
        if let Some(place) = self.state.lock().index.get_mut(hash) {
            place.is_unread = false;
        }
    }

    /// Whether a chunk is here; nothing is read.
    pub(crate) fn has(&self, hash: &Hash) -> bool {
        self.state.lock().index.contains_key(hash)
    }

    /// Whether a chunk is to be put: it is not here, or could not be synced.
    pub(crate) fn lacks(&self, hash: &Hash) -> bool {
        self.state.lock().index.get(hash).is_none_or(|place| place.synced == Synced::Failed)
    }

    /// Whether a chunk is here, and outlasts a power cut.
    pub(crate) fn is_durable(&self, hash: &Hash) -> bool {
        self.state.lock().index.get(hash).is_some_and(|place| place.synced == Synced::Yes)
    }

    /// Whether it is here as far as it can be told at this moment, without waiting for others.
    pub(crate) fn has_now(&self, hash: &Hash) -> bool {
        self.state.try_lock().is_some_and(|state| state.index.contains_key(hash))
    }

    /// What was here was not the chunk.
    pub(crate) fn forget(&self, hash: &Hash, why: &dyn std::fmt::Display) {
        if self.state.lock().index.remove(hash).is_some() {
            self.counters.damaged.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(chunk = %hash, dir = %self.dir.display(), %why,
                "a chunk in the local cache is damaged and is fetched again");
        }
    }

    /// The longest record that is kept: segments would be filled badly with longer ones.
    fn record_max_bytes(&self) -> u64 {
        self.segment_bytes / 2
    }

    /// Keeps the stored bytes of a chunk.
    pub(crate) fn put(&self, hash: &Hash, stored: &[u8]) {
        if let Err(e) = self.try_put(hash, stored) {
            self.counters.failures.fetch_add(1, Ordering::Relaxed);
            let mut state = self.state.lock();
            if !std::mem::replace(&mut state.failing, true) {
                tracing::warn!(dir = %self.dir.display(), error = %e,
                    "cannot write to the chunk cache; reads go on without it");
            }
        }
    }

    fn try_put(&self, hash: &Hash, stored: &[u8]) -> Result<(), std::io::Error> {
        let len = u64_of(stored.len() + RECORD_HEADER_BYTES);
        let Ok(stored_bytes) = u32::try_from(stored.len()) else { return Ok(()) };
        if len > self.record_max_bytes() || !self.lacks(hash) {
            return Ok(());
        }
        let Some((number, file, offset)) = self.claim(len)? else { return Ok(()) };
        let mut record = record_header(hash, stored_bytes).to_vec();
        record.extend_from_slice(stored);
        file.write_all_at(&record, offset)?;
        let mut state = self.state.lock();
        state.failing = false;
        // The segment may be gone again, or a sync that failed may have lost what was just written.
        if let Some(segment) = state.segment_mut(number).filter(|segment| !segment.is_lost) {
            segment.hashes.push(*hash);
            let offset = offset + u64_of(RECORD_HEADER_BYTES);
            state.index.insert(*hash, Place::new(number, offset, stored_bytes));
            self.counters.writes.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// How much of what may go can come, before what came first goes for it: what the versions leave that are kept.
    pub fn room_bytes(&self) -> u64 {
        let kept = self.state.lock().kept.clone();
        self.keeps_at_most_bytes().saturating_sub(bytes_of(&kept))
    }

    fn keeps_at_most_bytes(&self) -> u64 {
        self.capacity_bytes / SEGMENTS * KEPT_SHARE
    }

    /// Keeps the chunks of a version from going, once they are here, while the answer lives.
    pub(crate) fn keep(
        self: &Arc<Self>,
        manifest: Hash,
        chunks: impl Iterator<Item = (Hash, u32)>,
    ) -> Result<RetainedVersion, ImageError> {
        let mut version = KeptVersion { chunks: HashTable::default() };
        let mut largest = 0;
        for (hash, stored_bytes) in chunks {
            let len = u64::from(stored_bytes) + u64_of(RECORD_HEADER_BYTES);
            version.chunks.insert(hash, len);
            largest = len.max(largest);
        }
        if largest > self.record_max_bytes() {
            let why = format!(
                "version {} does not fit into the chunk cache {}: one of its chunks takes {largest} bytes, and with {} \
                 bytes the cache takes chunks of at most {}: make it larger",
                manifest.short(),
                self.dir.display(),
                self.capacity_bytes,
                self.record_max_bytes()
            );
            return Err(ImageError::new(ImageErrorKind::NoSpace, why));
        }
        // Versions that go meanwhile only leave more room.
        let _one_at_a_time = self.keeping.lock();
        let others = self.state.lock().kept.clone();
        let others_bytes = bytes_of(&others);
        let more_bytes = version.bytes_beside(&others);
        let room = self.keeps_at_most_bytes();
        if others_bytes + more_bytes > room {
            return Err(ImageError::new(
                ImageErrorKind::NoSpace,
                format!(
                    "version {} does not fit into the chunk cache {}: it takes {more_bytes} bytes beside the \
                     {others_bytes} that are kept for other versions, and of {} bytes at most {room} can be kept: make \
                     the cache larger",
                    manifest.short(),
                    self.dir.display(),
                    self.capacity_bytes
                ),
            ));
        }
        let version = Arc::new(version);
        self.state.lock().kept.push(Arc::clone(&version));
        Ok(RetainedVersion { cache: Arc::clone(self), version })
    }
}

/// What the records of all of them take.
fn bytes_of(kept: &[Arc<KeptVersion>]) -> u64 {
    let sidecars =
        |(n, version): (usize, &Arc<KeptVersion>)| version.bytes_beside(kept.get(..n).unwrap_or_default());
    kept.iter().enumerate().map(sidecars).sum()
}

impl KeptVersion {
    /// What its records take beside those of others: each chunk is kept once, however many versions have it.
    fn bytes_beside(&self, others: &[Arc<Self>]) -> u64 {
        let is_new = |hash: &Hash| !others.iter().any(|other| other.chunks.contains_key(hash));
        self.chunks.iter().filter(|(hash, _)| is_new(hash)).map(|(_, len)| len).sum()
    }
}

/// Keeps a version in the cache while it lives.
#[derive(Debug)]
pub(crate) struct RetainedVersion {
    cache: Arc<DiskCache>,
    version: Arc<KeptVersion>,
}

impl Drop for RetainedVersion {
    fn drop(&mut self) {
        self.cache.state.lock().kept.retain(|version| !Arc::ptr_eq(version, &self.version));
    }
}

/// Opens a file of the cache, for its owner only: it holds parts of disks. No link is followed, which another user may have
/// put there where others can write.
fn open_own(options: &mut OpenOptions, path: &Path) -> std::io::Result<File> {
    let no_follow = i32::try_from(rustix::fs::OFlags::NOFOLLOW.bits()).unwrap_or(0);
    options.mode(0o600).custom_flags(no_follow).open(path)
}

/// A segment's file, and its length.
fn open_segment(path: &Path) -> std::io::Result<(File, u64)> {
    let file = open_own(File::options().read(true).write(true), path)?;
    let len = file.metadata()?.len();
    Ok((file, len))
}

/// Makes a directory of the cache where it is missing, for its owner only.
fn make_own(dir: &Path) -> std::io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// What the file `cache` of a directory says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// A cache of this release.
    Ours,
    /// A full disk, or a power cut, came while an earlier release made it.
    Begun,
    /// Anything else, which is left alone.
    Foreign,
}

impl Mark {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        if bytes == MARK {
            return Self::Ours;
        }
        let is_begun = bytes.len() <= MARK.len() && bytes.iter().all(|byte| *byte == 0);
        if is_begun { Self::Begun } else { Self::Foreign }
    }
}

/// Marks the directory as a cache. One with other files in it is not taken over.
fn mark(dir: &Path) -> Result<(), ImageError> {
    let (path, part) = (dir.join(MARK_FILE), dir.join(MARK_PART));
    let failed =
        |e: std::io::Error| ImageError::from_os(format!("cannot use {} as a chunk cache", dir.display()), &e);
    let is_begun = match fs::read(&path) {
        Ok(bytes) => match Mark::of(&bytes) {
            Mark::Ours => return Ok(()),
            Mark::Begun => true,
            Mark::Foreign => {
                let why =
                    format!("{} is no chunk cache of this release: choose another directory", dir.display());
                return Err(ImageError::new(ImageErrorKind::Unsupported, why));
            }
        },
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => false,
        Err(e) => return Err(failed(e)),
    };
    for entry in fs::read_dir(dir).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if name != "lock" && name != MARK_PART && !(is_begun && name == MARK_FILE) {
            let why = format!(
                "{} is no chunk cache, and is not empty (it holds {}): choose another directory",
                dir.display(),
                name.display()
            );
            return Err(ImageError::new(ImageErrorKind::Invalid, why));
        }
    }
    // Durable before anything is beside it: without it the directory would be refused.
    open_own(File::options().create(true).truncate(true).write(true), &part)
        .and_then(|mut file| file.write_all(MARK).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&part, &path))
        .and_then(|()| File::open(dir)?.sync_all())
        .map_err(failed)
}

#[cfg(test)]
pub(crate) mod tests;
