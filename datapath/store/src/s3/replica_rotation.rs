//! Chooses which of several copies of an object is read, so that a reader that got wrong bytes gets them from
//! other copies.
//!
//! It is unknown which copy the wrong bytes came from, and each reader asks again with a newly opened object.
//! So the store counts how often the same bytes were requested again, and answers from the other copies in
//! turn.

use std::collections::VecDeque;

use parking_lot::Mutex;

use crate::hash::Hash;

/// How many reads are counted: those of the last minutes, if a copy is damaged in many places. A read that
/// was dropped is counted from zero again.
const COUNTED_MAX: usize = 1024;

/// Which copies a read uses.
#[derive(Clone, Copy, Debug)]
pub(super) enum Replica {
    /// A normal read: the copies that always come first.
    Usual,
    /// A read after wrong bytes, which prefers other copies. Contains how often other copies were requested
    /// before.
    Other(usize),
    /// A numbered full re-read of the object: each one leaves out another copy.
    Reading(u32),
}

/// Counts repeated reads after wrong bytes. The lock is never held across I/O.
#[derive(Debug, Default)]
pub(super) struct ReplicaRotation {
    /// Object, offset in it, and number of reads. The most recent entry is last.
    counted: Mutex<VecDeque<(Hash, u64, usize)>>,
}

impl ReplicaRotation {
    /// Counts a read at this offset. Each offset has its own count, because a request is read in several
    /// pieces. Each piece must come from another copy when the request is repeated.
    pub(super) fn next(&self, object: Hash, offset: u64) -> Replica {
        let mut counted = self.counted.lock();
        let known = counted.iter().position(|(id, at, _)| *id == object && *at == offset);
        let times = known.and_then(|known| counted.remove(known)).map_or(0, |(_, _, times)| times);
        if counted.len() >= COUNTED_MAX {
            counted.pop_front();
        }
        counted.push_back((object, offset, times.wrapping_add(1)));
        Replica::Other(times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_offset_is_counted_and_recent_counts_are_kept() {
        let replica_rotation = ReplicaRotation::default();
        let (one, other) = (Hash::of(b"one"), Hash::of(b"other"));
        let times = |object: Hash, offset: u64| match replica_rotation.next(object, offset) {
            Replica::Other(times) => times,
            turn => panic!("{turn:?}"),
        };
        for before in 0..3 {
            for (object, offset) in [(one, 0), (one, 4096), (other, 0)] {
                assert_eq!(times(object, offset), before);
            }
        }
        for offset in 0..COUNTED_MAX as u64 - 1 {
            times(Hash::of(b"many"), offset);
            assert!(replica_rotation.counted.lock().len() <= COUNTED_MAX);
        }
        // Of the three entries only the last one is left.
        assert_eq!(times(other, 0), 3);
        assert_eq!(times(one, 0), 0);
    }
}
