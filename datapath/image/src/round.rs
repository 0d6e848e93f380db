//! A round of checks: version after version of one store, at one rate, each chunk once.

use std::collections::HashSet;
use std::sync::Arc;

use headwater_block::{Attempt, ByteRange, Completion, Device, Extent, Geometry, IoError, Op, Request};
use headwater_store::Hash;
use parking_lot::Mutex;

use crate::manifest::ChunkRef;
use crate::pace::Pace;
use crate::progress::Cancel;
use crate::reader::VersionReader;

/// Chunks that are remembered, at most: 448 GiB of data at 64 KiB. They take 72 MiB; what is found after that is read again for
/// each version that has it.
pub const SOUND_MAX: usize = 7 << 20;

/// Chunks of which it is remembered that no store has them. Others are looked for again for each version that has them.
const UNFOUND_MAX: usize = 100_000;

/// What the checks of a round have in common. Only what was right is remembered: what is damaged is told of each version.
#[derive(Debug)]
pub struct Round {
    pace: Arc<Pace>,
    sound: Mutex<HashSet<u64>>,
    /// Damaged chunks that are in no other data object of any store.
    unfound: Mutex<HashSet<Hash>>,
}

impl Round {
    /// At no more than so many stored bytes a second; `None` for as fast as possible.
    pub fn new(bytes_per_s: Option<u64>) -> Self {
        Self { pace: Arc::new(Pace::new(bytes_per_s)), sound: Mutex::default(), unfound: Mutex::default() }
    }

    /// Waits until `bytes` more may be read.
    pub(crate) fn take(&self, bytes: u64, cancel: &Cancel) {
        self.pace.take(bytes, || cancel.is_cancelled());
    }

    /// Whether a chunk was found right in its place.
    pub(crate) fn is_sound(&self, place: Place) -> bool {
        self.sound.lock().contains(&place.0)
    }

    pub(crate) fn found_sound(&self, place: Place) {
        let mut sound = self.sound.lock();
        if sound.len() < SOUND_MAX {
            sound.insert(place.0);
        }
    }

    /// Whether a chunk was looked for in vain: all manifests of all stores are read for that.
    pub(crate) fn is_unfound(&self, chunk: &Hash) -> bool {
        self.unfound.lock().contains(chunk)
    }

    pub(crate) fn not_found(&self, chunk: Hash) {
        let mut unfound = self.unfound.lock();
        if unfound.len() < UNFOUND_MAX {
            unfound.insert(chunk);
        }
    }

    /// The version as a disk that is read at the round's rate.
    pub(crate) fn paced(&self, version: Arc<VersionReader>, cancel: &Cancel) -> Arc<dyn Device> {
        if !self.pace.is_limited() {
            return version;
        }
        // What is fetched ahead would not be waited for.
        version.stop_readahead();
        Arc::new(Paced { version, pace: Arc::clone(&self.pace), cancel: cancel.clone() })
    }
}

/// A chunk in its place: 64 bits of a hash of both. Of as many as are remembered two are alike once in some hundred thousand rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place(u64);

impl Place {
    pub(crate) fn new(object: &Hash, chunk: &ChunkRef) -> Self {
        let (offset, len) = (chunk.offset.to_le_bytes(), chunk.stored_bytes.to_le_bytes());
        let all = Hash::of(&[object.0.as_slice(), &offset, &len, &chunk.hash.0].concat());
        Self(u64::from_le_bytes(all.0.first_chunk().copied().unwrap_or_default()))
    }
}

/// A version of which what is not in memory is read at a rate. Whoever reads it waits, and no thread that others need.
struct Paced {
    version: Arc<VersionReader>,
    pace: Arc<Pace>,
    cancel: Cancel,
}

impl Device for Paced {
    fn geometry(&self) -> Geometry {
        self.version.geometry()
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        self.version.try_now(op)
    }

    fn submit(&self, request: Request, done: Completion) {
        if let Request::Read { range, .. } = &request {
            self.pace.take(self.version.absent_bytes(*range), || self.cancel.is_cancelled());
        }
        self.version.submit(request, done);
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        self.version.extents(range, max_extents)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_known_by_its_place_and_its_contents() {
        let round = Round::new(None);
        let chunk = |offset, stored_bytes, contents: &[u8]| ChunkRef {
            hash: Hash::of(contents),
            object: 0,
            offset,
            stored_bytes,
        };
        let (one, two) = (Hash::of(b"one"), Hash::of(b"two"));
        round.found_sound(Place::new(&one, &chunk(16, 100, b"a")));
        assert!(round.is_sound(Place::new(&one, &chunk(16, 100, b"a"))));
        for (object, chunk) in [
            (two, chunk(16, 100, b"a")),
            (one, chunk(17, 100, b"a")),
            (one, chunk(16, 101, b"a")),
            (one, chunk(16, 100, b"b")),
        ] {
            assert!(!round.is_sound(Place::new(&object, &chunk)));
        }
    }
}
