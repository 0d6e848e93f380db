//! Claims file system space for the map in advance, so that a commit does not find the file system full. The map is the file of a
//! persistent cache that records which slot has which block.
//!
//! The space is claimed after the end of the map, whose length stays the same. New segments are begun only while the claimed space
//! suffices for all logged changes plus a margin. The margin is for discards: they are always accepted, because space is freed when they
//! are committed.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::FallocateFlags;

use crate::sync::Mutex;

/// The most that one change takes in the map, in bytes: the record of a single block in its slot.
const CHANGE_BYTES: u64 = 40;

/// Space that is claimed in addition to that of the logged changes, in bytes.
const AHEAD_BYTES: u64 = 1 << 20;

/// Bytes of [`AHEAD_BYTES`] that are left for discards, and for the segment being filled.
const MARGIN_BYTES: u64 = 256 << 10;

/// The claimed space of a map.
#[derive(Debug)]
pub struct MapSpace {
    map: Mutex<Claimed>,
    /// Bytes claimed after the end of the map; readable without the lock.
    bytes: AtomicU64,
}

#[derive(Debug)]
struct Claimed {
    file: Arc<File>,
    tail: u64,
    /// Offset of the end of the claimed space.
    end: u64,
    /// How often the map was truncated.
    cuts: u64,
}

impl MapSpace {
    /// For a map of `tail` bytes, with nothing claimed.
    pub fn new(file: Arc<File>, tail: u64) -> Self {
        Self { map: Mutex::new(Claimed { file, tail, end: tail, cuts: 0 }), bytes: AtomicU64::new(0) }
    }

    /// Whether there is enough space for this many changes, and a margin.
    pub fn is_enough(&self, changes: usize) -> bool {
        self.is_enough_beside(0, changes)
    }

    /// Like [`MapSpace::is_enough`], if `bytes` are used in addition.
    pub fn is_enough_beside(&self, bytes: u64, changes: usize) -> bool {
        let wanted = (changes as u64).saturating_mul(CHANGE_BYTES) + MARGIN_BYTES;
        self.bytes.load(Ordering::Acquire) >= wanted.saturating_add(bytes)
    }

    /// End of the claimed space; the end of the map, if the file system cannot reserve space.
    pub fn claimed_end(&self) -> u64 {
        let map = self.map.lock();
        if map.end == u64::MAX { map.tail } else { map.end }
    }

    /// Claims enough for this many changes and later ones. May block in the file system.
    pub fn claim(&self, changes: usize) -> io::Result<()> {
        let wanted = (changes as u64).saturating_mul(CHANGE_BYTES) + AHEAD_BYTES;
        if self.bytes.load(Ordering::Acquire) >= wanted - AHEAD_BYTES / 2 {
            return Ok(());
        }
        let (file, tail, cuts) = {
            let map = self.map.lock();
            (Arc::clone(&map.file), map.tail, map.cuts)
        };
        let mut end = tail + wanted;
        match rustix::fs::fallocate(&*file, FallocateFlags::KEEP_SIZE, tail, wanted) {
            Ok(()) => {}
            Err(rustix::io::Errno::OPNOTSUPP) => {
                tracing::warn!(
                    "the file system of a persistent cache cannot reserve space (fallocate) for the cache's map file: if it becomes full, flushes fail, so leave it free space"
                );
                end = u64::MAX;
            }
            Err(error) => return Err(error.into()),
        }
        let mut map = self.map.lock();
        // Otherwise the map was replaced or truncated meanwhile.
        if Arc::ptr_eq(&map.file, &file) && map.cuts == cuts {
            map.end = map.end.max(end);
            self.show(&map);
        }
        Ok(())
    }

    /// Called when the map ends at `tail`.
    pub fn moved(&self, file: &Arc<File>, tail: u64) {
        let mut map = self.map.lock();
        if !Arc::ptr_eq(&map.file, file) {
            *map = Claimed { file: Arc::clone(file), tail, end: tail, cuts: 0 };
        }
        map.tail = tail;
        map.end = map.end.max(tail);
        self.show(&map);
    }

    /// Called when the map was truncated, and the space claimed after its end was freed.
    pub fn cut(&self) {
        let mut map = self.map.lock();
        map.cuts += 1;
        if map.end != u64::MAX {
            map.end = map.tail;
        }
        self.show(&map);
    }

    fn show(&self, map: &Claimed) {
        self.bytes.store(map.end.saturating_sub(map.tail), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_that_cannot_reserve_space_counts_as_free() {
        // A regular file of a file system without `fallocate`.
        let file = File::options().write(true).open("/proc/self/comm").unwrap();
        let space = MapSpace::new(Arc::new(file), 0);
        space.claim(0).unwrap();
        assert!(space.is_enough(1 << 30));
        space.cut();
        assert!(space.is_enough(1 << 30));
    }

    #[test]
    fn claimed_space_is_enough_for_the_logged_changes() {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let space = MapSpace::new(Arc::clone(&file), 0);
        assert!(!space.is_enough(0));
        space.claim(0).unwrap();
        assert!(space.is_enough(19_000) && !space.is_enough(20_000));
        assert!(space.is_enough_beside(360_000, 10_000) && !space.is_enough_beside(400_000, 10_000));
        space.claim(100_000).unwrap();
        assert!(space.is_enough(100_000));
        space.moved(&file, 4 << 20);
        assert!(space.is_enough(10_000) && !space.is_enough(100_000));
        space.cut();
        assert!(!space.is_enough(0));
        // Nothing is claimed for another file yet.
        space.claim(0).unwrap();
        space.moved(&Arc::new(tempfile::tempfile().unwrap()), 100);
        assert!(!space.is_enough(0));
    }
}
