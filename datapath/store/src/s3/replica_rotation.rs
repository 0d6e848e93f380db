//! From which of several copies of an object is read: from others by who found wrong what came of it.
//!
//! Nobody says from which copy wrong bytes came, and each asks for better ones with an object that is opened anew. So the store counts how
//! often it was asked so for the same bytes, and answers from the other copies in turn.

use std::collections::VecDeque;

use parking_lot::Mutex;

use crate::hash::Hash;

/// So many reads are counted: those of the last minutes, where a copy is damaged in many places. What is forgotten is counted anew.
const COUNTED_MAX: usize = 1024;

/// Who reads, and so from which copies.
#[derive(Clone, Copy, Debug)]
pub(super) enum Replica {
    /// Somebody, from those that are always read first.
    Usual,
    /// Who found wrong what these gave, from the others; so often others were asked before.
    Other(usize),
    /// Who reads all of the object once more and counts that: another copy is left out each time.
    Reading(u32),
}

/// Reads by those who found wrong what they got before. The lock is never held across I/O.
#[derive(Debug, Default)]
pub(super) struct ReplicaRotation {
    /// An object, where in it was read and how often; who was counted last is at the end.
    counted: Mutex<VecDeque<(Hash, u64, usize)>>,
}

impl ReplicaRotation {
    /// Counts a read of what is at this place. Each place has a count of its own: an answer is read in several pieces, and each of them is to
    /// come from another copy when the same is asked for again.
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
    fn each_place_of_each_object_is_counted_and_those_asked_for_last_are_kept() {
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
        // One of the three is left, the last.
        assert_eq!(times(other, 0), 3);
        assert_eq!(times(one, 0), 0);
    }
}
