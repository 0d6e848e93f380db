//! Making room in the chunk cache: the oldest segment goes, after what is to stay of it is elsewhere.
//!
//! 1. What is not to stay leaves the index.
//! 2. Everything else, and what still arrives in the segment meanwhile, is copied to the file `moving`. Nobody else knows
//!    that file, and readers go on to find the chunks where they were.
//! 3. The copy gets a segment's name and is the newest one, the index points into it, and the oldest one is removed.
//!
//! 1 and 3 are each done under the lock, 2 without it; a chunk that is put meanwhile and finds no room is not put. There is
//! always room for the copy, because nothing else takes the last segment's worth of the limit.
//!
//! When 2 fails, or the process ends before 3, the copy is removed and the segment stays. Where nothing in it belongs to
//! a version that is kept it goes all the same, since a disk that is full only becomes less full that way.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use headwater_store::Hash;

use crate::disk_cache::segment::{RECORD_HEADER_BYTES, record_header};
use crate::disk_cache::{DiskCache, Place, Segment, State, open_own};
use crate::index::HashTable;
use crate::units::{u64_of, usize_of_u32};

const MOVING: &str = "moving";
/// How many chunks are not put after a move that failed: a disk that fails is not to be kept busy by trying again.
const PASSES: u32 = 256;

/// A segment to be.
struct Copied {
    file: File,
    len: u64,
    is_synced: bool,
    /// Where each chunk starts in it.
    places: HashTable<u64>,
}

/// Removes what a process left that ended while it moved something.
pub(super) fn remove_rest(dir: &Path) -> io::Result<()> {
    match fs::remove_file(dir.join(MOVING)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

impl DiskCache {
    /// Whether so many bytes more leave the room that moving needs.
    pub(super) fn has_room(&self, state: &State, len: u64) -> bool {
        state.bytes.saturating_add(len).saturating_add(self.segment_bytes) <= self.capacity_bytes
    }

    /// Room for a record in the newest segment. `None`: there is none now.
    pub(super) fn claim(&self, len: u64) -> io::Result<Option<(u64, Arc<File>, u64)>> {
        let mut rounds = 0;
        loop {
            let mut state = self.state.lock();
            if self.has_room(&state, len) {
                let (full, fresh_from) = (self.segment_bytes, state.fresh_from);
                if let Some(newest) = state.segments.back_mut()
                    && newest.number >= fresh_from
                    && newest.len + len <= full
                {
                    let offset = newest.len;
                    newest.len += len;
                    let claimed = (newest.number, Arc::clone(&newest.file), offset);
                    state.bytes += len;
                    return Ok(Some(claimed));
                }
                self.begin_segment(&mut state)?;
                continue;
            }
            // Once around, all there is is kept or was used.
            if state.moving || rounds > state.segments.len() {
                return Ok(None);
            }
            if state.passes > 0 {
                state.passes -= 1;
                return Ok(None);
            }
            rounds += 1;
            state.moving = true;
            self.thin_oldest(&mut state);
            drop(state);
            let moved = self.move_oldest();
            let mut state = self.state.lock();
            state.moving = false;
            if let Err(e) = moved {
                return Err(self.after_failure(&mut state, &e));
            }
        }
    }

    fn begin_segment(&self, state: &mut State) -> io::Result<()> {
        let number = state.next_number;
        let path = self.dir.join(format!("segment-{number}"));
        let file = open_own(File::options().read(true).write(true).create(true).truncate(true), &path)?;
        state.next_number += 1;
        state.segments.push_back(Segment { number, path, file: Arc::new(file), len: 0, hashes: Vec::new() });
        Ok(())
    }

    /// Takes what is not to stay of the oldest segment out of the index.
    fn thin_oldest(&self, state: &mut State) {
        let State { index, segments, kept, .. } = state;
        let Some(oldest) = segments.front_mut() else { return };
        let (mut used_bytes, mut evicted) = (0, 0);
        oldest.hashes.retain(|hash| {
            let Some(place) = index.get(hash).filter(|place| place.segment == oldest.number) else {
                return false;
            };
            let is_kept = kept.iter().any(|version| version.chunks.contains_key(hash));
            // At most half of it, or else nothing would be gained.
            let is_worth = place.used && used_bytes < oldest.len / 2;
            if is_kept || is_worth {
                used_bytes += u64::from(place.len);
                return true;
            }
            index.remove(hash);
            evicted += 1;
            false
        });
        self.counters.evictions.fetch_add(evicted, Ordering::Relaxed);
    }

    /// Copies what is in the oldest segment, and puts the copy in its place.
    fn move_oldest(&self) -> io::Result<()> {
        let mut copied: Option<Copied> = None;
        let mut stored = Vec::new();
        loop {
            let mut state = self.state.lock();
            let Some(oldest) = state.segments.front() else { return Ok(()) };
            let is_copied = |hash: &Hash| copied.as_ref().is_some_and(|copy| copy.places.contains_key(hash));
            let left: Vec<(Hash, Place)> =
                places_in(&state, oldest).filter(|(hash, _)| !is_copied(hash)).collect();
            if left.is_empty() {
                if let Some(copy) = copied.as_mut().filter(|copy| !copy.is_synced) {
                    // What is moved may have been durable, and a power cut must not take it away.
                    drop(state);
                    copy.file.sync_all()?;
                    copy.is_synced = true;
                    continue;
                }
                return self.replace_oldest(&mut state, copied.take());
            }
            let from = Arc::clone(&oldest.file);
            drop(state);
            let copy = match &mut copied {
                Some(copy) => copy,
                none => none.insert(Copied::create(&self.dir)?),
            };
            for (hash, place) in left {
                stored.resize(usize_of_u32(place.len), 0);
                match from.read_exact_at(&mut stored, place.offset) {
                    Ok(()) => copy.append(&hash, place.len, &stored)?,
                    // It is lost whatever becomes of the segment.
                    Err(e) => self.forget(&hash, &e),
                }
            }
        }
    }

    fn replace_oldest(&self, state: &mut State, copied: Option<Copied>) -> io::Result<()> {
        let Some(number) = state.segments.front().map(|oldest| oldest.number) else { return Ok(()) };
        if let Some(copy) = copied {
            let segment = state.next_number;
            let path = self.dir.join(format!("segment-{segment}"));
            fs::rename(self.dir.join(MOVING), &path)?;
            state.next_number += 1;
            let mut hashes = Vec::with_capacity(copy.places.len());
            for (hash, offset) in copy.places {
                // It may have been forgotten meanwhile, and put elsewhere.
                if let Some(place) = state.index.get_mut(&hash).filter(|place| place.segment == number) {
                    *place = Place { segment, offset, len: place.len, used: false };
                    hashes.push(hash);
                }
            }
            state.bytes += copy.len;
            let file = Arc::new(copy.file);
            state.segments.push_back(Segment { number: segment, path, file, len: copy.len, hashes });
        }
        self.remove_oldest(state);
        Ok(())
    }

    /// Removes the oldest segment with all that is still in it; `false` where there is none.
    pub(super) fn remove_oldest(&self, state: &mut State) -> bool {
        let Some(oldest) = state.segments.pop_front() else { return false };
        state.bytes = state.bytes.saturating_sub(oldest.len);
        let mut evicted = 0;
        for hash in &oldest.hashes {
            if state.index.get(hash).is_some_and(|place| place.segment == oldest.number) {
                state.index.remove(hash);
                evicted += 1;
            }
        }
        self.counters.evictions.fetch_add(evicted, Ordering::Relaxed);
        if let Err(e) = fs::remove_file(&oldest.path) {
            tracing::warn!(path = %oldest.path.display(), error = %e, "cannot remove a segment of the chunk cache");
        }
        true
    }

    /// Removes segments that are longer than segments are, which a cache with a larger limit left.
    pub(super) fn remove_longer(&self, state: &mut State) {
        let (shorter, longer) =
            std::mem::take(&mut state.segments).into_iter().partition(|it| it.len <= self.segment_bytes);
        state.segments = longer;
        while self.remove_oldest(state) {}
        state.segments = shorter;
    }

    /// Makes an end of a move that failed. Returns the error in full.
    fn after_failure(&self, state: &mut State, error: &io::Error) -> io::Error {
        if let Err(e) = remove_rest(&self.dir) {
            tracing::warn!(dir = %self.dir.display(), error = %e, "cannot remove the rest of a failed move");
        }
        state.passes = PASSES;
        let Some(oldest) = state.segments.front() else {
            return io::Error::new(error.kind(), error.to_string());
        };
        let shown = oldest.path.display().to_string();
        let is_kept = |hash: &Hash| state.kept.iter().any(|version| version.chunks.contains_key(hash));
        let must_stay = places_in(state, oldest).any(|(hash, _)| is_kept(&hash));
        let outcome = if must_stay {
            "it holds chunks of a version that is kept, and stays"
        } else {
            self.remove_oldest(state);
            "nothing in it is kept, and it is removed"
        };
        let why = format!("cannot copy what is to stay of {shown} ({outcome}): {error}");
        io::Error::new(error.kind(), why)
    }
}

/// What the index finds in a segment.
fn places_in<'a>(state: &'a State, segment: &'a Segment) -> impl Iterator<Item = (Hash, Place)> + 'a {
    let place = |hash| state.index.get(hash).copied().filter(|place| place.segment == segment.number);
    segment.hashes.iter().filter_map(move |hash| Some((*hash, place(hash)?)))
}

impl Copied {
    fn create(dir: &Path) -> io::Result<Self> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true);
        let file = open_own(&mut options, &dir.join(MOVING))?;
        Ok(Self { file, len: 0, is_synced: false, places: HashTable::default() })
    }

    fn append(&mut self, hash: &Hash, stored_bytes: u32, stored: &[u8]) -> io::Result<()> {
        let mut record = record_header(hash, stored_bytes).to_vec();
        record.extend_from_slice(stored);
        self.is_synced = false;
        self.file.write_all_at(&record, self.len)?;
        self.places.insert(*hash, self.len + u64_of(RECORD_HEADER_BYTES));
        self.len += u64_of(record.len());
        Ok(())
    }
}
