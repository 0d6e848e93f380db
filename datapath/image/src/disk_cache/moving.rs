//! Makes space in the chunk cache: removes a segment after its remaining chunks have been copied to another
//! one. It chooses the oldest segment whose removal frees a quarter of its length, or otherwise the one that
//! frees most. A segment of retained chunks only would just be rewritten. A segment that could not be synced
//! is removed before all others.
//!
//! In the names here, a chunk is `kept` if a retained version needs it, and it `stays` if it is copied: all
//! kept chunks, and some others that were used.
//!
//! 1. The segment becomes the first one, and the chunks to drop are removed from the index.
//! 2. All other chunks, including those that still arrive in the segment, are copied to the file `moving`. No
//!    other thread knows that file, and readers continue to use the old segment.
//! 3. The copy is renamed to a segment. Chunks that arrived in the old segment in the meantime are copied,
//!    too.
//! 4. The copy becomes the newest segment, the index points into it, and the old segment is removed.
//!
//! Steps 1 and 4 each run under the lock, except for the removal itself; 2 and 3 run without it. A chunk that
//! is written in the meantime and finds no space is not cached. There is always space for the copy, because
//! the last segment's worth of the limit is reserved for it.
//!
//! If 2 or 3 fails, or the process ends before 3, the copy is removed and the segment stays. If the process
//! ends before 4, the segment whose chunks exist twice is removed first. If a segment has no chunk of a
//! retained version, it is removed even though the copy failed, because that is the only way to free space on
//! a full disk.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use headwater_store::Hash;

use crate::disk_cache::segment::{RECORD_HEADER_BYTES, record_header};
use crate::disk_cache::{DiskCache, Place, Segment, State, Synced, open_own};
use crate::index::HashTable;
use crate::units::{u64_of, usize_of_u32};

const MOVING: &str = "moving";
/// How many chunks are not cached after a failed move, or if no segment's removal frees space. A failing disk
/// should not be kept busy with retries.
const PASSES: u32 = 256;
/// A segment is chosen before younger ones if its removal frees at least 1 / `WORTH_MOVING` of its length.
/// Freeing less is not worth the copying while other segments free more.
const WORTH_MOVING: u64 = 4;

/// How many segments are examined for one that is worth moving, once a candidate is known. Readers wait
/// during the search.
const MOST_LOOKED_AT: usize = 64;

/// The chunks of a segment that is removed, by what happens to them.
#[derive(Default)]
struct SegmentChunks {
    stay: Vec<Hash>,
    stay_bytes: u64,
    /// Chunks in the index that need not stay.
    go: Vec<Hash>,
}

/// The copy that becomes a segment.
struct Copied {
    file: File,
    /// Its number and path as a segment, once it has them.
    name: Option<(u64, PathBuf)>,
    len: u64,
    is_synced: bool,
    /// The offset of each chunk in it.
    places: HashTable<u64>,
}

/// Removes the file of a process that ended during a move.
pub(super) fn remove_rest(dir: &Path) -> io::Result<()> {
    match fs::remove_file(dir.join(MOVING)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

impl DiskCache {
    /// Whether `len` more bytes leave the space that moving needs.
    pub(super) fn has_room(&self, state: &State, len: u64) -> bool {
        state.bytes.saturating_add(len).saturating_add(self.segment_bytes) <= self.capacity_bytes
    }

    /// Reserves space for a record in the newest segment. `None`: there is none now. It removes any number of
    /// segments without chunks to copy, but copies the chunks of at most one, because the caller has other
    /// work.
    pub(super) fn claim(&self, len: u64) -> io::Result<Option<(u64, Arc<File>, u64)>> {
        let mut has_moved = false;
        loop {
            let mut state = self.state.lock();
            if self.has_room(&state, len) {
                if let Some(claimed) = self.claim_in_newest(&mut state, len) {
                    return Ok(Some(claimed));
                }
                drop(state);
                self.begin_segment(len)?;
                continue;
            }
            if state.moving || has_moved {
                return Ok(None);
            }
            if state.passes > 0 {
                state.passes -= 1;
                return Ok(None);
            }
            state.moving = true;
            drop(state);
            let moved = self.choose().map(|number| self.move_segment(number)).transpose();
            let mut state = self.state.lock();
            state.moving = false;
            match moved {
                Ok(Some(is_copied)) => has_moved = is_copied,
                Ok(None) => {
                    state.passes = PASSES;
                    return Ok(None);
                }
                Err(e) => return Err(self.after_failure(&mut state, &e)),
            }
        }
    }

    /// The segment to remove; `None` if everything must stay. Among the first segments it takes one whose
    /// removal frees enough. No other thread removes a segment in the meantime.
    fn choose(&self) -> Option<u64> {
        let numbers = may_go(&self.state.lock());
        let mut best = None;
        for (looked_at, number) in numbers.iter().enumerate() {
            if looked_at >= MOST_LOOKED_AT && best.is_some() {
                break;
            }
            // One segment at a time, because readers wait for this lock.
            let state = self.state.lock();
            let Some(segment) = state.segments.iter().find(|segment| segment.number == *number) else {
                continue;
            };
            let gives = segment.len.saturating_sub(part(&state, segment).stay_bytes);
            if gives >= segment.len / WORTH_MOVING {
                return Some(*number);
            }
            if gives > best.map_or(0, |(most, _)| most) {
                best = Some((gives, *number));
            }
        }
        best.map(|(_, number)| number)
    }

    /// Makes space. Returns whether chunks were copied.
    fn move_segment(&self, number: u64) -> io::Result<bool> {
        let mut state = self.state.lock();
        let at = state.segments.iter().position(|segment| segment.number == number);
        if let Some(chosen) = at.and_then(|at| state.segments.remove(at)) {
            state.segments.push_front(chosen);
        }
        let has_more = self.thin_first(&mut state);
        drop(state);
        if let Some(gone) = self.move_first()? {
            // Without the lock, because readers wait for it, and freeing the space takes time.
            let freed_bytes = unlink(gone);
            let mut state = self.state.lock();
            state.bytes = state.bytes.saturating_sub(freed_bytes);
        }
        Ok(has_more)
    }

    /// Reserves space in the newest segment, if the record fits.
    fn claim_in_newest(&self, state: &mut State, len: u64) -> Option<(u64, Arc<File>, u64)> {
        let newest = self.newest(state, len)?;
        let offset = newest.len;
        newest.len += len;
        let claimed = (newest.number, Arc::clone(&newest.file), offset);
        state.bytes += len;
        Some(claimed)
    }

    fn newest<'a>(&self, state: &'a mut State, len: u64) -> Option<&'a mut Segment> {
        let fresh_from = state.fresh_from;
        let newest = state.segments.back_mut()?;
        let takes_more = newest.number >= fresh_from && !newest.is_lost;
        (takes_more && newest.len + len <= self.segment_bytes).then_some(newest)
    }

    /// Creates a segment, unless another thread has done so. A disk that is slow to create a file delays no
    /// reader.
    fn begin_segment(&self, len: u64) -> io::Result<()> {
        let _alone = self.beginning.lock();
        let mut state = self.state.lock();
        if self.newest(&mut state, len).is_some() {
            return Ok(());
        }
        let (number, path) = self.next_name(&mut state);
        drop(state);
        let file = open_own(File::options().read(true).write(true).create(true).truncate(true), &path)?;
        self.state.lock().segments.push_back(Segment::new(number, path, file, 0, Vec::new()));
        Ok(())
    }

    /// The number and path of the next segment. No other caller gets the same.
    fn next_name(&self, state: &mut State) -> (u64, PathBuf) {
        let number = state.next_number;
        state.next_number += 1;
        (number, self.dir.join(format!("segment-{number}")))
    }

    /// Removes the chunks of the first segment that do not stay from the index. Returns whether any stay.
    fn thin_first(&self, state: &mut State) -> bool {
        let Some(first) = state.segments.front() else { return false };
        let SegmentChunks { stay, go, .. } = part(state, first);
        for hash in &go {
            state.index.remove(hash);
        }
        self.counters.evictions.fetch_add(u64_of(go.len()), Ordering::Relaxed);
        let stays = !stay.is_empty();
        if let Some(first) = state.segments.front_mut() {
            first.hashes = stay;
        }
        stays
    }

    /// Copies the chunks of the first segment, and replaces it by the copy. Returns the removed segment.
    fn move_first(&self) -> io::Result<Option<Segment>> {
        let mut copied: Option<Copied> = None;
        let moved = self.copy_first(&mut copied);
        // If the copy cannot be removed, the next move cleans it up.
        if moved.is_err()
            && let Some((_, path)) = copied.and_then(|copy| copy.name)
            && let Err(e) = fs::rename(&path, self.dir.join(MOVING))
        {
            tracing::warn!(path = %path.display(), error = %e, "cannot remove the segment of a failed move");
        }
        moved
    }

    fn copy_first(&self, copied: &mut Option<Copied>) -> io::Result<Option<Segment>> {
        let mut stored = Vec::new();
        loop {
            let mut state = self.state.lock();
            let Some(first) = state.segments.front() else { return Ok(None) };
            let is_copied = |hash: &Hash| copied.as_ref().is_some_and(|copy| copy.places.contains_key(hash));
            let left: Vec<(Hash, Place)> =
                places_in(&state, first).filter(|(hash, _)| !is_copied(hash)).collect();
            if left.is_empty() {
                if let Some(copy) = copied.as_mut().filter(|copy| !copy.is_synced) {
                    // The moved chunks may have been durable, and a power cut must not lose them.
                    drop(state);
                    copy.file.sync_all()?;
                    copy.is_synced = true;
                    continue;
                }
                if let Some(copy) = copied.as_mut().filter(|copy| copy.name.is_none()) {
                    let name = self.next_name(&mut state);
                    drop(state);
                    fs::rename(self.dir.join(MOVING), &name.1)?;
                    copy.name = Some(name);
                    continue;
                }
                return Ok(self.replace_first(&mut state, copied.take()));
            }
            let from = Arc::clone(&first.file);
            drop(state);
            let copy = match &mut *copied {
                Some(copy) => copy,
                none => none.insert(Copied::create(&self.dir)?),
            };
            for (hash, place) in left {
                stored.resize(usize_of_u32(place.len), 0);
                match from.read_exact_at(&mut stored, place.offset) {
                    Ok(()) => copy.append(&hash, place.len, &stored)?,
                    // The copy is lost, whatever happens to the segment.
                    Err(e) => self.forget(&hash, &e),
                }
            }
        }
    }

    fn replace_first(&self, state: &mut State, copied: Option<Copied>) -> Option<Segment> {
        let number = state.segments.front()?.number;
        if let Some(copy) = copied
            && let Some((segment, path)) = copy.name
        {
            let mut hashes = Vec::with_capacity(copy.places.len());
            for (hash, offset) in copy.places {
                // The chunk may have been removed from the index, and written to another segment.
                if let Some(place) = state.index.get_mut(&hash).filter(|place| place.segment == number) {
                    // The copy was synced before it was renamed. If the original could not be synced, its
                    // bytes may be wrong.
                    let synced = if place.synced == Synced::Failed { Synced::Failed } else { Synced::Yes };
                    *place = Place { segment, offset, used: false, synced, ..*place };
                    hashes.push(hash);
                }
            }
            state.bytes += copy.len;
            state.segments.push_back(Segment::new(segment, path, copy.file, copy.len, hashes));
        }
        self.take_first(state)
    }

    /// Removes the first segment with all chunks that are still in it; `false` if there is none.
    pub(super) fn remove_first(&self, state: &mut State) -> bool {
        let Some(first) = self.take_first(state) else { return false };
        state.bytes = state.bytes.saturating_sub(unlink(first));
        true
    }

    /// Removes the first segment, with all chunks that are still in it, from the index. Its file still exists
    /// and counts.
    fn take_first(&self, state: &mut State) -> Option<Segment> {
        let first = state.segments.pop_front()?;
        let mut evicted = 0;
        for hash in &first.hashes {
            if state.index.get(hash).is_some_and(|place| place.segment == first.number) {
                state.index.remove(hash);
                evicted += 1;
            }
        }
        self.counters.evictions.fetch_add(evicted, Ordering::Relaxed);
        Some(first)
    }

    /// Removes segments that are longer than the segment length. A cache with a larger limit created them.
    pub(super) fn remove_longer(&self, state: &mut State) {
        let (shorter, longer) =
            std::mem::take(&mut state.segments).into_iter().partition(|it| it.len <= self.segment_bytes);
        state.segments = longer;
        while self.remove_first(state) {}
        state.segments = shorter;
    }

    /// Cleans up after a failed move. Returns the complete error.
    fn after_failure(&self, state: &mut State, error: &io::Error) -> io::Error {
        if let Err(e) = remove_rest(&self.dir) {
            tracing::warn!(dir = %self.dir.display(), error = %e, "cannot remove the file of a failed move");
        }
        state.passes = PASSES;
        let Some(first) = state.segments.front() else {
            return io::Error::new(error.kind(), error.to_string());
        };
        let shown = first.path.display().to_string();
        let is_kept = |hash: &Hash| state.kept.iter().any(|version| version.chunks.contains_key(hash));
        let must_stay = places_in(state, first).any(|(hash, _)| is_kept(&hash));
        let outcome = if must_stay {
            "This file stays, because it has chunks of a version that was copied to this host (--hydrate): free space on \
             that disk"
        } else {
            self.remove_first(state);
            "This file was removed, because its chunks can be fetched again"
        };
        let why = format!(
            "cannot make space in the chunk cache: copying the needed chunks of {shown} to a new file failed: {error}. \
             {outcome}"
        );
        io::Error::new(error.kind(), why)
    }
}

/// Removes a segment's file, and closes it. Returns its length.
fn unlink(segment: Segment) -> u64 {
    if let Err(e) = fs::remove_file(&segment.path) {
        tracing::warn!(path = %segment.path.display(), error = %e, "cannot remove a segment of the chunk cache");
    }
    segment.len
}

/// The chunks of a segment in the index.
pub(super) fn places_in<'a>(
    state: &'a State,
    segment: &'a Segment,
) -> impl Iterator<Item = (Hash, Place)> + 'a {
    let place = |hash| state.index.get(hash).copied().filter(|place| place.segment == segment.number);
    segment.hashes.iter().filter_map(move |hash| Some((*hash, place(hash)?)))
}

/// The segments that may be removed, in the order in which they are examined. Chunks that could not be synced
/// count as missing anyway, so their segments come first.
fn may_go(state: &State) -> Vec<u64> {
    // The newest segment is being filled, as long as that is possible.
    let newest = state.segments.back().filter(|newest| !newest.is_lost).map(|newest| newest.number);
    let others = state.segments.iter().filter(|segment| Some(segment.number) != newest);
    let (lost, sound): (Vec<&Segment>, Vec<&Segment>) = others.partition(|segment| segment.is_lost);
    lost.into_iter().chain(sound).map(|segment| segment.number).collect()
}

/// Decides which chunks of a segment stay: all of retained versions, and of the others those that were used,
/// up to half of the segment. A chunk that could not be synced never stays.
fn part(state: &State, segment: &Segment) -> SegmentChunks {
    let record_bytes = |place: &Place| u64::from(place.len) + u64_of(RECORD_HEADER_BYTES);
    let is_kept = |hash: &Hash| state.kept.iter().any(|version| version.chunks.contains_key(hash));
    let may_stay = |place: &Place| place.synced != Synced::Failed;
    let (kept, others): (Vec<_>, Vec<_>) =
        places_in(state, segment).partition(|(hash, place)| may_stay(place) && is_kept(hash));
    let mut parted = SegmentChunks {
        stay_bytes: kept.iter().map(|(_, place)| record_bytes(place)).sum(),
        ..SegmentChunks::default()
    };
    parted.stay = kept.into_iter().map(|(hash, _)| hash).collect();
    for (hash, place) in others {
        if place.used && may_stay(&place) && parted.stay_bytes < segment.len / 2 {
            parted.stay_bytes += record_bytes(&place);
            parted.stay.push(hash);
        } else {
            parted.go.push(hash);
        }
    }
    parted
}

impl Copied {
    fn create(dir: &Path) -> io::Result<Self> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true);
        let file = open_own(&mut options, &dir.join(MOVING))?;
        Ok(Self { file, name: None, len: 0, is_synced: false, places: HashTable::default() })
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
