//! Manages the positions on the overflow disk: claims space for them from the file system, hands them out,
//! and punches out free ones.
//!
//! A position is the space of one encrypted segment on the overflow disk. It is in use, ready (free, and its
//! space is reserved), punched (free, and its space was returned) or doubtful (its last write failed). This
//! module only reserves and frees positions; others write to them.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;

use rustix::fs::FallocateFlags;

use super::Overflow;
use super::encrypt::ENCRYPTED_SEGMENT_BYTES;
use super::place::device_bytes;
use crate::memory_file::crash;
use crate::units::SegmentId;

/// Number of positions that are claimed at a time, if there is space: this gives fewer, larger extents.
const GROW_POSITIONS: u32 = 16;

/// The most runs of positions that are punched out at a time: the thread that does it also serves writers.
const TRIM_RUNS: usize = 32;

/// The most positions in these runs (1 GiB).
const TRIM_POSITIONS: usize = 512;

/// Number of free positions that stay claimed for the next spills. Further ones are punched out, except near
/// the limit.
pub const KEEP_POSITIONS: usize = 16;

/// Positions run low when at most this part of the limit is free.
const LOW_POSITIONS_DIVISOR: u32 = 32;

/// Positions run low at the latest when only this many are free.
pub const LOW_POSITIONS: u32 = 6;

/// Number of doubtful positions (whose last write failed) that stay claimed, for
/// [`Overflow::take_for_cleaning`], which claims none.
const KEEP_DOUBTFUL: usize = 4;

/// Why there is no position.
#[derive(Debug)]
pub enum NoPosition {
    /// The volume's disk limit is reached.
    Limit,
    /// The file system is full, or refused.
    Disk(io::Error),
}

#[derive(Debug, Default)]
pub(super) struct Positions {
    limit: u32,
    /// Number of positions in use by segments.
    used: u32,
    /// Free positions whose space is reserved.
    ready: Vec<u32>,
    /// Free positions whose space was returned to the file system, or is returned by [`Overflow::punch_free`]
    /// after a restart.
    punched: Vec<u32>,
    /// Positions whose last write failed, oldest first: used again if there is no other.
    doubtful: VecDeque<u32>,
    /// Older positions of this kind, whose space was returned to the file system.
    doubtful_punched: VecDeque<u32>,
    /// One past the highest position ever claimed.
    end: u32,
    /// Whether the file system refused space at the last try.
    refused: bool,
}

impl Positions {
    /// Positions that are in use or claimed or failed: if none was punched out, as many as there ever were.
    fn taken(&self) -> u32 {
        let others = self.ready.len() + self.doubtful.len() + self.doubtful_punched.len();
        self.used.saturating_add(u32::try_from(others).unwrap_or(u32::MAX))
    }

    /// Number of positions left below the limit.
    fn free(&self) -> u32 {
        self.limit.saturating_sub(self.used)
    }

    fn low(&self) -> u32 {
        (self.limit / LOW_POSITIONS_DIVISOR).max(LOW_POSITIONS)
    }

    /// Number of free positions that stay claimed. Near the limit, cleaning frees positions that are taken a
    /// moment later, so as many stay claimed as cleaning keeps free. Otherwise they would be punched out and
    /// claimed again all the time.
    fn keep(&self) -> usize {
        if self.free() > 2 * self.low() {
            return KEEP_POSITIONS;
        }
        // Above a lowered limit, only `KEEP_POSITIONS` stay claimed.
        KEEP_POSITIONS.max(self.low().min(self.free()) as usize)
    }
}

impl Overflow {
    /// Changes the disk limit in bytes. Positions above a lowered limit stay in use.
    pub fn set_limit_bytes(&self, limit_bytes: u64) {
        let mut bytes = limit_bytes;
        if self.is_device {
            bytes = bytes.min(device_bytes(&self.file));
        }
        let limit = bytes / ENCRYPTED_SEGMENT_BYTES as u64;
        // There are not more segment numbers.
        self.positions.lock().limit =
            u32::try_from(limit).map_or(SegmentId::LIMIT, |n| n.min(SegmentId::LIMIT));
    }

    /// Positions left below the limit.
    pub fn free_positions(&self) -> u32 {
        self.positions.lock().free()
    }

    /// The limit, in positions.
    pub fn limit_positions(&self) -> u32 {
        self.positions.lock().limit
    }

    /// Whether so few positions are free that cleaning has to begin.
    pub fn runs_low(&self) -> bool {
        let positions = self.positions.lock();
        positions.free() <= positions.low()
    }

    /// Disk space that holds segments, in bytes.
    pub fn used_bytes(&self) -> u64 {
        u64::from(self.positions.lock().used) * ENCRYPTED_SEGMENT_BYTES as u64
    }

    /// Takes a position. May block in the file system; called by the host's thread only.
    pub fn take_position(&self) -> Result<u32, NoPosition> {
        {
            let mut positions = self.positions.lock();
            if positions.used >= positions.limit {
                return Err(NoPosition::Limit);
            }
            positions.used += 1;
            if let Some(position) = positions.ready.pop() {
                return Ok(position);
            }
        }
        self.claim_one(false)
    }

    /// Takes a claimed position regardless of the limit, for a segment of the cleaned stream, because
    /// cleaning frees more than it takes. If there is no other, a doubtful one. Claims none; only
    /// [`Overflow::take_beyond`] does.
    pub fn take_for_cleaning(&self) -> Option<u32> {
        let mut positions = self.positions.lock();
        let position = positions.ready.pop().or_else(|| positions.doubtful.pop_front())?;
        positions.used += 1;
        Some(position)
    }

    /// Takes a position for a segment of the cleaned stream when [`Overflow::take_position`] failed because
    /// of `why`: like [`Overflow::take_for_cleaning`], or else by claiming one beyond the limit, if only the
    /// limit is the reason. There is only one at a time, because nothing else is cleaned until the segment is
    /// written. May block in the file system; called by the host's thread only.
    pub fn take_beyond(&self, why: NoPosition) -> Result<u32, NoPosition> {
        match (self.take_for_cleaning(), why) {
            (Some(position), _) => Ok(position),
            (None, NoPosition::Limit) => {
                self.positions.lock().used += 1;
                self.claim_one(true)
            }
            (None, why) => Err(why),
        }
    }

    /// Claims a position that was counted as used already, and some more, which are ready then. `beyond`:
    /// regardless of the limit.
    fn claim_one(&self, beyond: bool) -> Result<u32, NoPosition> {
        let (position, grow) = {
            let mut positions = self.positions.lock();
            match positions.punched.pop() {
                Some(position) => (position, 1),
                None if !beyond && positions.taken() > positions.limit => {
                    drop(positions);
                    return self.take_doubtful(NoPosition::Limit);
                }
                None => {
                    let room = positions.limit.saturating_sub(positions.taken()).saturating_add(1);
                    (positions.end, GROW_POSITIONS.min(room).max(1))
                }
            }
        };
        if self.is_past_device(position) {
            return self.take_doubtful(NoPosition::Limit);
        }
        let mut claimed = grow;
        let mut result = self.claim(position, grow);
        if result.is_err() && grow > 1 {
            claimed = 1;
            result = self.claim(position, 1);
        }
        let mut positions = self.positions.lock();
        positions.refused = result.is_err();
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
                drop(positions);
                self.take_doubtful(NoPosition::Disk(error))
            }
        }
    }

    /// Whether a position ends past the end of the device. A device does not grow, unlike a file.
    fn is_past_device(&self, position: u32) -> bool {
        self.is_device && Self::offset_of(position.saturating_add(1)) > device_bytes(&self.file)
    }

    /// Takes a doubtful position, as the last resort for a position that was counted as used already.
    fn take_doubtful(&self, mut otherwise: NoPosition) -> Result<u32, NoPosition> {
        // If the file system has no space, it has none for these positions either.
        let may_claim = matches!(otherwise, NoPosition::Limit);
        let punched = may_claim.then(|| self.positions.lock().doubtful_punched.pop_front()).flatten();
        if let Some(position) = punched {
            let result = self.claim(position, 1);
            let mut positions = self.positions.lock();
            positions.refused = result.is_err();
            match result {
                Ok(()) => return Ok(position),
                Err(error) => {
                    positions.doubtful_punched.push_front(position);
                    otherwise = NoPosition::Disk(error);
                }
            }
        }
        let mut positions = self.positions.lock();
        positions.doubtful.pop_front().ok_or_else(|| {
            positions.used = positions.used.saturating_sub(1);
            otherwise
        })
    }

    fn claim(&self, position: u32, count: u32) -> io::Result<()> {
        if self.no_fallocate.load(Ordering::Relaxed) {
            return Ok(());
        }
        let offset = Self::offset_of(position);
        let len = u64::from(count) * ENCRYPTED_SEGMENT_BYTES as u64;
        match rustix::fs::fallocate(&*self.file, FallocateFlags::empty(), offset, len) {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::OPNOTSUPP) => {
                tracing::warn!(
                    "the file system of the overflow disk cannot reserve space (fallocate); lack of space is noticed only when data is written"
                );
                self.no_fallocate.store(true, Ordering::Relaxed);
                Ok(())
            }
            Err(error) => {
                // Some file systems keep the space that they allocated before they ran out, which other users
                // may need.
                self.punch_range(offset, len);
                Err(error.into())
            }
        }
    }

    /// Whether the file system refused space at the last try, and at most `ready` claimed positions are left.
    pub fn lacks_space(&self, ready: u32) -> bool {
        let positions = self.positions.lock();
        positions.refused && positions.ready.len() <= ready as usize
    }

    /// After a restart: these positions (ascending) are in use, and no others. The space of the others is
    /// freed.
    pub fn restore(&self, used: &[u32]) {
        self.mark_used(used);
        self.punch_free();
    }

    /// Returns the space of all positions in `punched` to the file system. Called once after
    /// `mark_used`, while none of them is claimed.
    pub(crate) fn punch_free(&self) {
        let free = self.positions.lock().punched.clone();
        self.punch(&free);
    }

    /// Like [`Overflow::restore`], but leaves the space of the others to [`Overflow::punch_free`].
    pub(super) fn mark_used(&self, used: &[u32]) {
        let in_file =
            u32::try_from(self.file_bytes().div_ceil(ENCRYPTED_SEGMENT_BYTES as u64)).unwrap_or(u32::MAX);
        let end = used.last().map_or(0, |last| last + 1).max(in_file.min(SegmentId::LIMIT));
        let mut taken = used.iter().copied().peekable();
        let mut free: Vec<u32> = (0..end).filter(|position| taken.next_if_eq(position).is_none()).collect();
        free.reverse();
        let mut positions = self.positions.lock();
        positions.used = u32::try_from(used.len()).unwrap_or(u32::MAX);
        positions.end = end;
        positions.punched = free;
    }

    /// Takes a claimed position if `keep` more are left below the limit. Makes no I/O.
    pub fn take_ready(&self, keep: u32) -> Option<u32> {
        let mut positions = self.positions.lock();
        // As many must also be claimed: the limit does not help if the file system has no space.
        if positions.used.saturating_add(keep) >= positions.limit || positions.ready.len() <= keep as usize {
            return None;
        }
        let position = positions.ready.pop()?;
        positions.used += 1;
        Some(position)
    }

    /// Number of free positions whose space is reserved.
    pub fn ready_positions(&self) -> usize {
        self.positions.lock().ready.len()
    }

    /// Claims positions until `wanted` are ready, or no more can be claimed. If the used positions are at the
    /// limit already and none is ready, claims a position beyond the limit, so that cleaning can continue. May
    /// block in the file system.
    pub fn prepare(&self, wanted: usize) -> Result<(), NoPosition> {
        loop {
            let beyond = {
                let mut positions = self.positions.lock();
                let ready = positions.ready.len();
                let taken = positions.used.saturating_add(u32::try_from(ready).unwrap_or(u32::MAX));
                let beyond = taken >= positions.limit;
                if ready >= wanted || (beyond && (ready > 0 || positions.used < positions.limit)) {
                    return Ok(());
                }
                positions.used += 1;
                beyond
            };
            match self.claim_one(beyond) {
                Ok(position) => self.give_position(position),
                Err(NoPosition::Limit) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns the space of one claimed position to the file system, if more than `keep` are claimed. Returns
    /// whether it did.
    pub fn punch_one(&self, keep: u32) -> bool {
        let position = {
            let mut positions = self.positions.lock();
            if positions.ready.len() <= keep as usize {
                return false;
            }
            positions.ready.pop()
        };
        let Some(position) = position else { return false };
        self.punch(&[position]);
        self.positions.lock().punched.push(position);
        true
    }

    /// Frees a position.
    pub fn give_position(&self, position: u32) {
        let mut positions = self.positions.lock();
        positions.used = positions.used.saturating_sub(1);
        positions.ready.push(position);
    }

    /// Frees a position whose write failed: others are used before it.
    pub fn give_position_last(&self, position: u32) {
        let mut positions = self.positions.lock();
        positions.used = positions.used.saturating_sub(1);
        positions.doubtful.push_back(position);
    }

    /// Whether [`Overflow::trim`] has work to do.
    pub fn wants_trim(&self) -> bool {
        let positions = self.positions.lock();
        positions.ready.len() > positions.keep() || positions.doubtful.len() > KEEP_DOUBTFUL
    }

    /// Returns the space of free positions to the file system, a part at a time, as long as
    /// [`Overflow::wants_trim`] returns true. The lowest positions stay claimed.
    pub fn trim(&self) {
        let surplus: Vec<u32> = {
            let mut positions = self.positions.lock();
            let most = positions.ready.len().saturating_sub(positions.keep()).min(TRIM_POSITIONS);
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
        self.trim_doubtful();
    }

    /// Like [`Overflow::trim`], for doubtful positions: otherwise a disk that fails for long would be claimed
    /// up to the limit.
    fn trim_doubtful(&self) {
        let surplus: Vec<u32> = {
            let mut positions = self.positions.lock();
            let count = positions.doubtful.len().saturating_sub(KEEP_DOUBTFUL).min(TRIM_RUNS);
            positions.doubtful.drain(..count).collect()
        };
        surplus.iter().for_each(|position| self.punch(&[*position]));
        self.positions.lock().doubtful_punched.extend(surplus);
    }

    /// Punches out positions; neighbouring ones in descending order together.
    fn punch(&self, positions: &[u32]) {
        for run in positions.chunk_by(|one, next| *one == next + 1) {
            let Some(lowest) = run.last() else { continue };
            self.punch_range(Self::offset_of(*lowest), run.len() as u64 * ENCRYPTED_SEGMENT_BYTES as u64);
        }
    }

    fn punch_range(&self, offset: u64, len: u64) {
        if crash::is_dead() {
            return;
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(error) = rustix::fs::fallocate(&*self.file, flags, offset, len) {
            tracing::debug!(%error, "overflow space could not be punched out");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;

    use headwater_testkit::wait_until;

    use super::*;
    use crate::cache::{LittleSpace, OverflowOptions};
    use crate::overflow::buffering::{Buffering, Chosen, OpenFile};
    use crate::overflow::encrypt::SlotKey;
    use crate::overflow::io::ThreadEngine;
    use crate::units::Slot;

    fn open_file(at: &Path, open: OpenFile<'_>) -> Overflow {
        let place = OverflowOptions {
            at: at.into(),
            limit_bytes: 0,
            buffering: Buffering::Buffered,
            little_space: LittleSpace::Refused,
        };
        let chosen = Chosen { direct: false, text: "buffered".to_owned() };
        let engine = std::sync::Arc::new(ThreadEngine::open().unwrap());
        let key = SlotKey::random().unwrap();
        Overflow::open_with(&place, chosen, engine, key, open).unwrap()
    }

    #[test]
    fn a_file_system_that_reserves_nothing_gives_positions_all_the_same() {
        // A regular file of a file system without `fallocate`.
        let open = |_: bool| File::options().read(true).write(true).open("/proc/self/comm");
        let overflow = open_file(Path::new("/proc"), &open);
        overflow.set_limit_bytes(64 << 20);
        assert!(!overflow.no_fallocate.load(Ordering::Relaxed));
        overflow.prepare(8).unwrap();
        assert!(overflow.no_fallocate.load(Ordering::Relaxed) && !overflow.lacks_space(0));
        assert!(overflow.ready_positions() >= 8 && overflow.take_ready(0).is_some());
    }

    #[test]
    fn near_the_limit_what_cleaning_keeps_free_stays_claimed() {
        const LIMIT: u32 = 3200;
        const LOW: u32 = 100;
        // A file system without `fallocate` grants as many as are wanted.
        let open = |_: bool| File::options().read(true).write(true).open("/proc/self/comm");
        let overflow = open_file(Path::new("/proc"), &open);
        let set_limit =
            |positions: u32| overflow.set_limit_bytes(u64::from(positions) * ENCRYPTED_SEGMENT_BYTES as u64);
        let trim = || {
            while overflow.wants_trim() {
                overflow.trim()
            }
        };
        set_limit(LIMIT);
        let mut taken: Vec<u32> = (0..LIMIT - 96).map(|_| overflow.take_position().unwrap()).collect();
        taken.drain(..LOW as usize).for_each(|position| overflow.give_position(position));
        trim();
        assert_eq!(overflow.ready_positions(), LOW as usize);
        // After five more it is not near the limit any more.
        taken.drain(..5).for_each(|position| overflow.give_position(position));
        trim();
        assert_eq!(overflow.ready_positions(), KEEP_POSITIONS);
        taken.drain(320..).for_each(|position| overflow.give_position(position));
        trim();
        assert_eq!(overflow.ready_positions(), KEEP_POSITIONS);
        // Above a lowered limit, no more stay claimed either.
        taken.extend((0..LIMIT - 320).map(|_| overflow.take_position().unwrap()));
        set_limit(LIMIT / 2);
        taken.drain(..LOW as usize).for_each(|position| overflow.give_position(position));
        trim();
        assert_eq!(overflow.ready_positions(), KEEP_POSITIONS);
    }

    #[test]
    fn beyond_a_limit_that_was_lowered_there_is_a_place_for_what_was_cleaned() {
        let dir = tempfile::tempdir().unwrap();
        let overflow = open_file(dir.path(), &|_| tempfile::tempfile_in(dir.path()));
        let set_limit =
            |positions: u32| overflow.set_limit_bytes(u64::from(positions) * ENCRYPTED_SEGMENT_BYTES as u64);
        let used = || overflow.used_bytes() / ENCRYPTED_SEGMENT_BYTES as u64;
        set_limit(40);
        let mut taken: Vec<u32> = (0..38).map(|_| overflow.take_position().unwrap()).collect();
        taken.drain(..30).for_each(|position| overflow.give_position(position));
        while overflow.wants_trim() {
            overflow.trim();
        }
        assert_eq!(overflow.ready_positions(), KEEP_POSITIONS);
        // All claimed positions are in use, and others were punched out.
        taken.extend((0..KEEP_POSITIONS).map(|_| overflow.take_position().unwrap()));
        assert!(overflow.ready_positions() == 0 && !overflow.positions.lock().punched.is_empty());
        set_limit(10);
        let Err(why) = overflow.take_position() else { panic!("the limit is exceeded") };
        let position = overflow.take_beyond(why).unwrap();
        assert!(!taken.contains(&position) && used() == taken.len() as u64 + 1, "{position}");
        overflow.give_position(position);
        // A claimed position is taken before another one is claimed.
        assert_eq!(overflow.take_beyond(NoPosition::Limit).unwrap(), position);
        // A file system without space has none for this either.
        let full = NoPosition::Disk(io::ErrorKind::StorageFull.into());
        assert!(matches!(overflow.take_beyond(full), Err(NoPosition::Disk(_))));
        assert_eq!(used(), taken.len() as u64 + 1);
    }

    #[test]
    fn beyond_a_limit_that_was_lowered_a_device_has_no_place_past_its_end() {
        const PLACES: u32 = 20;
        let dir = tempfile::tempdir().unwrap();
        let mut overflow = open_file(dir.path(), &|_| tempfile::tempfile_in(dir.path()));
        // Like a device: the size is fixed, and nothing is reserved.
        overflow.is_device = true;
        overflow.no_fallocate.store(true, Ordering::Relaxed);
        let device_bytes = u64::from(PLACES) * ENCRYPTED_SEGMENT_BYTES as u64 + 4096;
        overflow.file.set_len(device_bytes).unwrap();
        overflow.set_limit_bytes(device_bytes);
        let mut taken: Vec<u32> = (0..PLACES).map(|_| overflow.take_position().unwrap()).collect();
        assert!(matches!(overflow.take_position(), Err(NoPosition::Limit)));
        overflow.set_limit_bytes(device_bytes / 4);
        assert!(matches!(overflow.take_beyond(NoPosition::Limit), Err(NoPosition::Limit)));
        overflow.prepare(1).unwrap();
        assert_eq!((overflow.ready_positions(), overflow.free_positions()), (0, 0));
        assert_eq!(overflow.used_bytes(), u64::from(PLACES) * ENCRYPTED_SEGMENT_BYTES as u64);
        // Within the file there are positions beyond the limit.
        let given = taken.pop().unwrap();
        overflow.give_position(given);
        assert!(overflow.punch_one(0) && overflow.ready_positions() == 0);
        assert_eq!(overflow.take_beyond(NoPosition::Limit).unwrap(), given);
    }

    #[test]
    fn read_buffers_are_kept_while_there_are_reads() {
        let dir = tempfile::tempdir().unwrap();
        let overflow = std::sync::Arc::new(open_file(dir.path(), &|_| tempfile::tempfile_in(dir.path())));
        overflow.file.set_len(ENCRYPTED_SEGMENT_BYTES as u64).unwrap();
        let kept = || overflow.buffers.lock().free.len();
        for _ in 0..2 {
            assert!(overflow.begins_to_keep_buffers() && !overflow.begins_to_keep_buffers());
            let (tell, told) = std::sync::mpsc::channel();
            overflow.read_slots(0, Slot(0), 1, move |read| tell.send(read.is_ok()).unwrap());
            assert!(told.recv().unwrap());
            wait_until("the buffer comes back", || kept() == 1);
            overflow.trim_buffers();
            assert!(kept() == 1 && overflow.has_spare_buffers(), "one was taken since the last time");
            overflow.trim_buffers();
            assert!(kept() == 0 && !overflow.has_spare_buffers());
        }
    }

    #[test]
    fn places_that_could_not_be_written_count_towards_the_limit_and_are_the_last_resort() {
        const LIMIT: u32 = 20;
        let dir = tempfile::tempdir().unwrap();
        let overflow = open_file(dir.path(), &|_| tempfile::tempfile_in(dir.path()));
        overflow.set_limit_bytes(u64::from(LIMIT) * ENCRYPTED_SEGMENT_BYTES as u64);
        // Each is tried once before any is tried again, then those that were tried longest ago.
        for round in 0..3 {
            for expected in 0..LIMIT {
                let position = overflow.take_position().unwrap();
                assert_eq!(position, expected, "round {round}");
                overflow.give_position_last(position);
                if expected % 7 == 0 {
                    overflow.trim();
                }
            }
        }
        while overflow.wants_trim() {
            overflow.trim();
        }
        let claimed = |overflow: &Overflow| overflow.file.metadata().unwrap().blocks() * 512;
        // Plus the metadata of the file system.
        let most = KEEP_DOUBTFUL as u64 * ENCRYPTED_SEGMENT_BYTES as u64 + (64 << 10);
        assert!(claimed(&overflow) <= most, "{} bytes are claimed", claimed(&overflow));
        // All of them work again, and are claimed before they are written.
        let mut taken: Vec<u32> = (0..LIMIT).map(|_| overflow.take_position().unwrap()).collect();
        assert!(matches!(overflow.take_position(), Err(NoPosition::Limit)));
        taken.sort_unstable();
        assert!(taken.into_iter().eq(0..LIMIT));
        assert!(claimed(&overflow) >= u64::from(LIMIT) * ENCRYPTED_SEGMENT_BYTES as u64);
    }
}
