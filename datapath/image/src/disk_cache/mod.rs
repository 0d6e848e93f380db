//! A cache of compressed chunks of remote images on a local disk, with a size limit, for all volumes of a
//! process. Only chunks of stores on other hosts are cached. Uncompressed chunks are in [`crate::chunk_cache`].
//!
//! ```text
//!   DIR/cache          identifies the directory as a cache
//!   DIR/lock           locked by the one process that uses it
//!   DIR/segment-N      records, one after another; N increases
//!   DIR/lost-N         a segment that could not be synced: it is read while it exists, and nothing in it counts as durable
//!   DIR/moving         the next segment, to which the remaining chunks of a segment are copied before that is removed
//!   DIR/traces/HASH    boot traces that were recorded here
//!   DIR/manifests/HASH manifests of versions that were opened
//!   DIR/stores/HASH    the settings and lists of their stores: see [`stores`]
//! ```
//! A record is a chunk as it is in the store, preceded by its hash and length. Chunks are appended to the
//! newest segment. If the cache is full, a segment is removed: the oldest one whose removal frees enough
//! ([`moving`]). The chunks of that segment that were used since they were written, or that belong to a retained
//! version, are first copied to a new segment. A retained version is one of which the cache must keep all chunks
//! while it is open, because it was, or is being, copied completely (hydration).
//!
//! # Guarantees
//! - The reader checks every chunk of the cache, like a chunk from a server. A wrong chunk is removed from
//!   the index and fetched again.
//! - Chunks that need not be durable are not synced: after a crash a record is either complete or detectably
//!   damaged. Four things are synced: `cache`, the files that are needed to open a version without servers,
//!   boot traces, and the chunks of a version that is reported as complete ([`DiskCache::sync`]).
//! - The segment files never exceed the limit. A full or failing disk disables caching, not reading.
//! - Chunks of a retained version are removed only after they were copied to another segment. If copying
//!   fails, their segment stays. A chunk that could not be synced is read as before, but counts as missing:
//!   it can be written once more, and it is the first to be removed.
//!
//! # Lock order
//! `keeping`; `syncing`, `beginning`, `state`. Every read waits for `state`, so it is not held across I/O,
//! except when a segment is removed because it could not be moved.

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
/// The number of segments of a cache, unless they would be too large or too small.
const SEGMENTS: u64 = 16;
const SEGMENT_MIN_BYTES: u64 = 4 << 20;
const SEGMENT_MAX_BYTES: u64 = 64 << 20;
/// Segments that are read concurrently when a cache is opened, each on a thread: after a start of the host
/// each record in them is a read that waits for the disk.
const SCANS_AT_A_TIME: usize = 8;
/// How much of the cache, in parts of 16, retained versions may use. The rest is needed to move them.
const KEPT_SHARE: u64 = 13;

const MARK_FILE: &str = "cache";
/// The name of the file `cache` while it is written.
const MARK_PART: &str = "cache-part";
const MARK: &[u8] = b"HWCHUNKS\x01\0\0\0\0\0\0\0";

#[derive(Clone, Copy, Debug)]
struct Place {
    segment: u64,
    offset: u64,
    len: u32,
    used: bool,
    /// An earlier process wrote the chunk, and it has not been checked since.
    is_unread: bool,
    synced: Synced,
}

impl Place {
    fn new(segment: u64, offset: u64, len: u32) -> Self {
        Self { segment, offset, len, used: false, is_unread: false, synced: Synced::NotYet }
    }
}

/// Whether a chunk survives a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Synced {
    NotYet,
    Yes,
    /// A sync failed. No later sync can show what is on the disk. Every read is still checked.
    Failed,
}

#[derive(Debug)]
struct Segment {
    number: u64,
    path: PathBuf,
    file: Arc<File>,
    /// The length that is in use or reserved for writers.
    len: u64,
    hashes: Vec<Hash>,
    /// A sync failed. No chunk is added any more, because it is unknown which pages are on the disk.
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
    /// Whether writing failed, and that was logged.
    failing: bool,
    /// Set while a thread makes space.
    moving: bool,
    /// How many chunks are not cached before the cache tries again to make space, after that failed.
    passes: u32,
    /// This process created the segments from this number on. An older one may end with an incomplete record,
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

/// The chunks of a version that must stay.
#[derive(Debug)]
struct KeptVersion {
    /// The chunks, with the lengths of their records.
    chunks: HashTable<u64>,
}

/// Counters of the cache since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskCacheCounters {
    /// Lookups that found the chunk.
    pub hits: u64,
    /// Lookups that did not find the chunk.
    pub misses: u64,
    /// Chunks written.
    pub writes: u64,
    /// Chunks dropped to make space.
    pub evictions: u64,
    /// Chunks whose bytes were wrong or could not be read, and that were fetched again.
    pub damaged: u64,
    /// Writes that failed.
    pub failures: u64,
    /// The size of the files in bytes.
    pub held_bytes: u64,
    /// The limit of that size.
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
    /// Held while a thread decides whether one more version can be retained.
    keeping: Mutex<()>,
    /// Held while a segment's file is created. Only threads that write chunks wait for it.
    beginning: Mutex<()>,
    /// Held while the cache is synced: if two threads sync a file, the system reports a failure to only one
    /// of them.
    syncing: Mutex<()>,
    counters: Counters,
}

impl DiskCache {
    /// Opens the cache in `dir`, which is created if it does not exist, with its earlier content.
    pub fn open(dir: &Path, capacity_bytes: u64) -> Result<Arc<Self>, ImageError> {
        let failed = |e: std::io::Error| {
            ImageError::from_os(format!("cannot use {} as a chunk cache", dir.display()), &e)
        };
        if capacity_bytes < DISK_CACHE_MIN_BYTES {
            return Err(ImageError::new(
                ImageErrorKind::Invalid,
                format!(
                    "a chunk cache of {} in {} is too small: the minimum is {}",
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

    /// Counters, and how full it is.
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

    /// Reads the existing segments.
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
            // In order: if a chunk exists twice, the newer one counts.
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
        // The limit may be smaller than before. No version is retained yet. The space for moving a segment is
        // reserved for the present segment length, so longer segments are removed, wherever they are.
        self.remove_longer(&mut state);
        // If moving a segment was interrupted, its chunks exist twice. Such a segment is removed before all
        // others: its other chunks were about to be dropped.
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

    /// Fills `into` with the stored bytes of a chunk, if they are cached.
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

    /// Fills `into` with the stored bytes of a chunk that must still be read back: an earlier process wrote
    /// it and nobody has confirmed it with [`Self::was_right`], or it could not be synced. The call does not
    /// count as a use.
    pub(crate) fn get_unread(&self, hash: &Hash, into: &mut Vec<u8>) -> bool {
        let found = {
            let state = self.state.lock();
            let is_doubtful = |place: &Place| place.is_unread || place.synced == Synced::Failed;
            let place = state.index.get(hash).copied().filter(is_doubtful);
            place.and_then(|place| Some((place, state.file_of(place)?)))
        };
        found.is_some_and(|(place, file)| self.read(hash, place, &file, into))
    }

    /// Confirms that the stored bytes are those of the chunk.
    pub(crate) fn was_right(&self, hash: &Hash) {
        if let Some(place) = self.state.lock().index.get_mut(hash) {
            place.is_unread = false;
        }
    }

    /// Whether a chunk is cached; reads nothing.
    pub(crate) fn has(&self, hash: &Hash) -> bool {
        self.state.lock().index.contains_key(hash)
    }

    /// Whether a chunk should be written: it is not cached, or could not be synced.
    pub(crate) fn lacks(&self, hash: &Hash) -> bool {
        self.state.lock().index.get(hash).is_none_or(|place| place.synced == Synced::Failed)
    }

    /// Whether a chunk is cached and survives a power cut.
    pub(crate) fn is_durable(&self, hash: &Hash) -> bool {
        self.state.lock().index.get(hash).is_some_and(|place| place.synced == Synced::Yes)
    }

    /// Whether a chunk is cached, answered without waiting for other threads.
    pub(crate) fn has_now(&self, hash: &Hash) -> bool {
        self.state.try_lock().is_some_and(|state| state.index.contains_key(hash))
    }

    /// Removes a chunk whose stored bytes were wrong from the index.
    pub(crate) fn forget(&self, hash: &Hash, why: &dyn std::fmt::Display) {
        if self.state.lock().index.remove(hash).is_some() {
            self.counters.damaged.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(chunk = %hash, dir = %self.dir.display(), %why,
                "a chunk in the local cache is damaged and is fetched again");
        }
    }

    /// The longest record that is cached. Longer records would waste space in segments.
    fn record_max_bytes(&self) -> u64 {
        self.segment_bytes / 2
    }

    /// Writes the stored bytes of a chunk to the cache.
    pub(crate) fn put(&self, hash: &Hash, stored: &[u8]) {
        if let Err(e) = self.try_put(hash, stored) {
            self.counters.failures.fetch_add(1, Ordering::Relaxed);
            let mut state = self.state.lock();
            if !std::mem::replace(&mut state.failing, true) {
                tracing::warn!(dir = %self.dir.display(), error = %e,
                    "cannot write to the chunk cache; new chunks are not cached");
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
        // The segment may have been removed by now, or a failed sync may have lost the bytes.
        if let Some(segment) = state.segment_mut(number).filter(|segment| !segment.is_lost) {
            segment.hashes.push(*hash);
            let offset = offset + u64_of(RECORD_HEADER_BYTES);
            state.index.insert(*hash, Place::new(number, offset, stored_bytes));
            self.counters.writes.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// How much of the cache is free for chunks that may be evicted: everything except the retained versions.
    pub fn room_bytes(&self) -> u64 {
        let kept = self.state.lock().kept.clone();
        self.keeps_at_most_bytes().saturating_sub(bytes_of(&kept))
    }

    fn keeps_at_most_bytes(&self) -> u64 {
        self.capacity_bytes / SEGMENTS * KEPT_SHARE
    }

    /// Retains the chunks of a version, once they are cached, until the returned value is dropped.
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
                 bytes the cache takes chunks of at most {}: make the cache larger",
                manifest.short(),
                self.dir.display(),
                self.capacity_bytes,
                self.record_max_bytes()
            );
            return Err(ImageError::new(ImageErrorKind::NoSpace, why));
        }
        // Versions that are released in the meantime only leave more space.
        let _one_at_a_time = self.keeping.lock();
        let others = self.state.lock().kept.clone();
        let others_bytes = bytes_of(&others);
        let more_bytes = version.bytes_beside(&others);
        let room = self.keeps_at_most_bytes();
        if others_bytes + more_bytes > room {
            return Err(ImageError::new(
                ImageErrorKind::NoSpace,
                format!(
                    "version {} does not fit into the chunk cache {}: it needs {more_bytes} bytes in addition to the \
                     {others_bytes} of other retained versions, and of {} bytes at most {room} can be retained: make the \
                     cache larger",
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

/// The size of the records of all these versions.
fn bytes_of(kept: &[Arc<KeptVersion>]) -> u64 {
    let added_bytes =
        |(n, version): (usize, &Arc<KeptVersion>)| version.bytes_beside(kept.get(..n).unwrap_or_default());
    kept.iter().enumerate().map(added_bytes).sum()
}

impl KeptVersion {
    /// The size of its records that none of `others` has. A chunk is stored once, however many versions have
    /// it.
    fn bytes_beside(&self, others: &[Arc<Self>]) -> u64 {
        let is_new = |hash: &Hash| !others.iter().any(|other| other.chunks.contains_key(hash));
        self.chunks.iter().filter(|(hash, _)| is_new(hash)).map(|(_, len)| len).sum()
    }
}

/// Retains a version in the cache until it is dropped.
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

/// Opens a file of the cache, readable only by its owner, because it has parts of disks. It follows no link,
/// because another user may have put one there if the directory is writable for others.
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

/// Creates a directory of the cache if it is missing, accessible only to its owner.
fn make_own(dir: &Path) -> std::io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// The content of the file `cache` of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// A cache of this format.
    Ours,
    /// A full disk or a power cut interrupted an earlier release that created the cache.
    Begun,
    /// Anything else: the directory is not used.
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

/// Marks the directory as a cache. A directory with other files in it is refused.
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
                    format!("{} is not a chunk cache of this release: use another directory", dir.display());
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
                "{} is not a chunk cache, and is not empty (it has {}): choose another directory",
                dir.display(),
                name.display()
            );
            return Err(ImageError::new(ImageErrorKind::Invalid, why));
        }
    }
    // Durable before any other file is created: without it the directory would be refused.
    open_own(File::options().create(true).truncate(true).write(true), &part)
        .and_then(|mut file| file.write_all(MARK).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&part, &path))
        .and_then(|()| File::open(dir)?.sync_all())
        .map_err(failed)
}

#[cfg(test)]
pub(crate) mod tests;
