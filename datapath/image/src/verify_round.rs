//! A round of verifications: version after version of one store, at one rate, each chunk once. A scrub (the
//! check of a store in the background) is made of such rounds.
//!
//! Some bytes of a data object may not be needed by any version. No version's check covers them, but if they
//! are damaged, the object cannot be copied. The hash of an object covers all its bytes, so only reading the
//! whole object shows whether it is right. A round reads such an object once, together with the last of the
//! versions that need it. It does not read it if one of these versions has all chunks of the object. Every
//! object has such a version until a version is removed: the one for which the object was made. So bytes are
//! read twice only after a removal.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use headwater_block::{Attempt, ByteRange, Completion, Device, Extent, Geometry, IoError, Op, Request};
use headwater_store::{Hash, Image, Store, StoreErrorKind};
use parking_lot::Mutex;

use crate::chunk::object_header;
use crate::error::ImageError;
use crate::manifest::{ChunkRef, Manifest, ObjectRef};
use crate::progress::Cancel;
use crate::rate_limit::RateLimit;
use crate::reader::VersionReader;
use crate::units::{u64_of, usize_of_u32};

/// The most chunks that are remembered as undamaged: 448 GiB of data at 64 KiB. They need 72 MiB. Chunks
/// beyond that are read again for each version that has them.
pub const SOUND_MAX: usize = 7 << 20;

/// The most places of chunks that are remembered as not found elsewhere, for all stores together. They need
/// 5 MiB. Other chunks are searched again for each version that has them.
const UNFOUND_MAX: usize = 400_000;

/// After this many failed requests for the places of a version's chunks, a store is not asked again, because
/// each request may read all its manifests.
pub(crate) const FAILURES_MAX: u32 = 3;

/// The shared state of a round. Only right chunks are remembered: a damaged chunk is reported for each
/// version.
#[derive(Debug)]
pub struct VerifyRound {
    rate_limit: Arc<RateLimit>,
    sound: Mutex<HashSet<u64>>,
    /// Damaged chunks that are in no other data object of a store.
    unfound: Mutex<HashSet<u64>>,
    /// For each store, by its displayed name, the number of versions in a row for which it did not give the
    /// places of chunks.
    failures: Mutex<HashMap<String, u32>>,
    wholes: Mutex<WholeObjects>,
}

impl VerifyRound {
    /// A round that reads at most this many stored bytes a second; `None` for no limit.
    pub fn new(bytes_per_s: Option<u64>) -> Self {
        let rate_limit = Arc::new(RateLimit::new(bytes_per_s));
        let (sound, unfound) = (Mutex::default(), Mutex::default());
        Self { rate_limit, sound, unfound, failures: Mutex::default(), wholes: Mutex::default() }
    }

    /// Waits until `bytes` more may be read.
    pub(crate) fn take(&self, bytes: u64, cancel: &Cancel) {
        self.rate_limit.take(bytes, || cancel.is_cancelled());
    }

    /// Whether a chunk was found right in its place.
    pub(crate) fn is_sound(&self, place: ChunkKey) -> bool {
        self.sound.lock().contains(&place.0)
    }

    pub(crate) fn found_sound(&self, place: ChunkKey) {
        let mut sound = self.sound.lock();
        if sound.len() < SOUND_MAX {
            sound.insert(place.0);
        }
    }

    /// Whether an earlier search for a chunk, as it is compressed in this place ([`ChunkKey::sought_in`]),
    /// found nothing. A search reads all manifests of a store.
    pub(crate) fn is_unfound(&self, place: ChunkKey) -> bool {
        self.unfound.lock().contains(&place.0)
    }

    /// Records that the store answered, and has the chunk in no other data object.
    pub(crate) fn not_found(&self, place: ChunkKey) {
        let mut unfound = self.unfound.lock();
        if unfound.len() < UNFOUND_MAX {
            unfound.insert(place.0);
        }
    }

    /// Whether a store failed so often that it is no longer asked for the places of chunks.
    pub(crate) fn is_given_up(&self, store: &str) -> bool {
        self.failures.lock().get(store).is_some_and(|versions| *versions >= FAILURES_MAX)
    }

    /// Records whether a store gave the places of chunks of a version. What counts is the number of failures
    /// in a row.
    pub(crate) fn has_told(&self, store: &str, has_told: bool) {
        let mut failures = self.failures.lock();
        if has_told {
            failures.remove(store);
            return;
        }
        let versions = failures.entry(store.to_owned()).or_default();
        *versions = versions.saturating_add(1);
    }

    /// Begins to verify a version. Returns which of its data objects must be read as a whole afterwards.
    /// These are objects that no other version needs that is still to be verified in this round, and of which
    /// no version has all chunks. If a store does not list its versions, this is unknown, and the result is
    /// empty.
    pub(crate) fn due_as_wholes(
        &self,
        store: &dyn Store,
        manifest: Hash,
        version: &Manifest,
    ) -> Result<Vec<ObjectRef>, ImageError> {
        if !self.wholes.lock().begin(manifest, version) {
            return Ok(Vec::new());
        }
        let is_listed = self.wholes.lock().lists.is_some();
        if !is_listed {
            let Some(images) = listed(store)? else { return Ok(Vec::new()) };
            self.wholes.lock().list(&images);
        }
        Ok(self.wholes.lock().due(version))
    }

    /// Records that a data object has the hash in its name.
    pub(crate) fn found_whole(&self, object: Hash) {
        self.wholes.lock().settled.insert(object);
    }

    /// The version as a disk that is read at the round's rate.
    pub(crate) fn paced(&self, version: Arc<VersionReader>, cancel: &Cancel) -> Arc<dyn Device> {
        if !self.rate_limit.is_limited() {
            return version;
        }
        // Prefetched chunks would bypass the rate limit.
        version.stop_readahead();
        Arc::new(RateLimited { version, rate_limit: Arc::clone(&self.rate_limit), cancel: cancel.clone() })
    }
}

/// The images of a store; `None` for a plain web server that has no list of them, has only a web page, or
/// does not show it.
fn listed(store: &dyn Store) -> Result<Option<Vec<Image>>, ImageError> {
    match store.listed() {
        Ok(listed) => Ok(Some(listed.images)),
        Err(e) if store.is_remote() && e.kind() != StoreErrorKind::Unreachable => {
            tracing::debug!(error = %e, "no data object is checked as a whole");
            Ok(None)
        }
        Err(e) => Err(ImageError::from(e).context("cannot find out which versions need its data objects")),
    }
}

/// Which data objects must still be read as a whole. It has as many entries as the lists of versions have
/// versions and objects, and these lists are in memory anyway.
#[derive(Debug, Default)]
struct WholeObjects {
    /// Manifests whose versions were verified, or are being verified.
    verified: HashSet<Hash>,
    /// `None`: not needed so far.
    lists: Option<Lists>,
    /// Objects that need not be read as a whole any more: a verified version has all their chunks, or they
    /// have the hash in their name. Bad objects are not in it and are read again, because they may have been
    /// repaired.
    settled: HashSet<Hash>,
}

/// The contents of a store's lists of versions.
#[derive(Debug, Default)]
struct Lists {
    /// Manifests whose versions have not been verified yet.
    left: HashSet<Hash>,
    /// How many of these need each object.
    needed_by: HashMap<Hash, u64>,
}

impl WholeObjects {
    /// Begins to verify a version. Returns whether it has any object that may have to be read as a whole.
    fn begin(&mut self, manifest: Hash, version: &Manifest) -> bool {
        self.settled.extend(held_whole(version));
        self.verified.insert(manifest);
        // A version may be verified more than once, after repairs.
        if let Some(lists) = &mut self.lists
            && lists.left.remove(&manifest)
        {
            for object in version.objects() {
                if let Some(versions) = lists.needed_by.get_mut(&object.id) {
                    *versions = versions.saturating_sub(1);
                }
            }
        }
        version.objects().iter().any(|object| !self.settled.contains(&object.id))
    }

    fn list(&mut self, images: &[Image]) {
        let mut lists = Lists::default();
        for version in images.iter().flat_map(|image| &image.versions) {
            // Versions with the same contents have one manifest.
            if self.verified.contains(&version.manifest) || !lists.left.insert(version.manifest) {
                continue;
            }
            for object in &version.objects {
                *lists.needed_by.entry(*object).or_default() += 1;
            }
        }
        self.lists = Some(lists);
    }

    fn due(&self, version: &Manifest) -> Vec<ObjectRef> {
        let Some(lists) = &self.lists else { return Vec::new() };
        let is_last = |id: &Hash| lists.needed_by.get(id).is_none_or(|versions| *versions == 0);
        let objects = version.objects().iter();
        objects.filter(|object| !self.settled.contains(&object.id) && is_last(&object.id)).copied().collect()
    }
}

/// The data objects of which a version has all chunks. An import writes the chunks of its object in the order
/// of their first use in its image. A version that has them in another order is not recognised, and its
/// object is then read once more.
fn held_whole(version: &Manifest) -> impl Iterator<Item = Hash> {
    let header_bytes = u64_of(object_header(version.chunk_bytes()).len());
    let mut ends = vec![header_bytes; version.objects().len()];
    for (_, chunk) in version.data() {
        if let Some(end) = ends.get_mut(usize_of_u32(chunk.object))
            && *end == chunk.offset
        {
            *end = end.saturating_add(u64::from(chunk.stored_bytes));
        }
    }
    let objects = version.objects().iter().zip(ends);
    objects.filter(|(object, end)| object.len_bytes == *end).map(|(object, _)| object.id)
}

/// A chunk at its place: 64 bits of a hash of both. With as many as are remembered, two collide once in some
/// hundred thousand rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkKey(u64);

impl ChunkKey {
    pub(crate) fn new(object: &Hash, chunk: &ChunkRef) -> Self {
        let (offset, len) = (chunk.offset.to_le_bytes(), chunk.stored_bytes.to_le_bytes());
        let all = Hash::of(&[object.0.as_slice(), &offset, &len, &chunk.hash.0].concat());
        Self::of(&all)
    }

    /// The key for a search of the chunk in a store, outside this place.
    pub(crate) fn sought_in(self, store: &str) -> Self {
        Self::of(&Hash::of(&[self.0.to_le_bytes().as_slice(), store.as_bytes()].concat()))
    }

    fn of(all: &Hash) -> Self {
        Self(u64::from_le_bytes(all.0.first_chunk().copied().unwrap_or_default()))
    }
}

/// A version that is read at a limited rate, except from memory. The reader's own thread waits, and no thread
/// that others need.
struct RateLimited {
    version: Arc<VersionReader>,
    rate_limit: Arc<RateLimit>,
    cancel: Cancel,
}

impl Device for RateLimited {
    fn geometry(&self) -> Geometry {
        self.version.geometry()
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        self.version.try_now(op)
    }

    fn submit(&self, request: Request, done: Completion) {
        if let Request::Read { range, .. } = &request {
            self.rate_limit.take(self.version.absent_bytes(*range), || self.cancel.is_cancelled());
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
    use crate::manifest::ManifestBuilder;

    #[test]
    fn a_chunk_is_known_by_its_place_and_its_contents() {
        let round = VerifyRound::new(None);
        let chunk = |offset, stored_bytes, contents: &[u8]| ChunkRef {
            hash: Hash::of(contents),
            object: 0,
            offset,
            stored_bytes,
        };
        let (one, two) = (Hash::of(b"one"), Hash::of(b"two"));
        round.found_sound(ChunkKey::new(&one, &chunk(16, 100, b"a")));
        assert!(round.is_sound(ChunkKey::new(&one, &chunk(16, 100, b"a"))));
        for (object, chunk) in [
            (two, chunk(16, 100, b"a")),
            (one, chunk(17, 100, b"a")),
            (one, chunk(16, 101, b"a")),
            (one, chunk(16, 100, b"b")),
        ] {
            assert!(!round.is_sound(ChunkKey::new(&object, &chunk)));
        }
        // A chunk compressed to the same length was not found; one of another length may exist.
        round.not_found(ChunkKey::new(&one, &chunk(16, 100, b"a")));
        assert!(round.is_unfound(ChunkKey::new(&one, &chunk(16, 100, b"a"))));
        assert!(!round.is_unfound(ChunkKey::new(&one, &chunk(16, 101, b"a"))));
        assert!(!round.is_unfound(ChunkKey::new(&two, &chunk(16, 100, b"a"))));
        // One store may have what another one lacks.
        let place = ChunkKey::new(&two, &chunk(16, 100, b"a"));
        round.not_found(place.sought_in("/one"));
        assert!(round.is_unfound(place.sought_in("/one")));
        assert!(!round.is_unfound(place.sought_in("/two")) && !round.is_unfound(place));
    }

    #[test]
    fn only_a_repeatedly_failing_store_is_not_asked_again() {
        let round = VerifyRound::new(None);
        for _ in 1..FAILURES_MAX {
            round.has_told("/one", false);
        }
        // A single success resets the count.
        round.has_told("/one", true);
        for _ in 0..FAILURES_MAX {
            assert!(!round.is_given_up("/one"));
            round.has_told("/one", false);
        }
        assert!(round.is_given_up("/one") && !round.is_given_up("/two"));
        assert!(!VerifyRound::new(None).is_given_up("/one"));
    }

    #[test]
    fn a_version_has_a_whole_object_only_with_all_its_chunks() {
        let objects = [b"a", b"b"].map(|name| ObjectRef { id: Hash::of(name), len_bytes: 16 + 300 });
        let held = |chunks: &[(u32, u64)]| {
            let mut builder = ManifestBuilder::new(64 * 4096, 4096, None);
            for (index, (object, offset)) in (0..).zip(chunks) {
                let hash = Hash::of(&offset.to_le_bytes());
                builder.push(index, ChunkRef { hash, object: *object, stored_bytes: 100, offset: *offset });
            }
            held_whole(&builder.finish(&objects).unwrap()).collect::<Vec<_>>()
        };
        let [a, b] = objects.map(|object| object.id);
        // Even if it has some of them twice, and others in between.
        assert_eq!(held(&[(0, 16), (0, 116), (1, 16), (0, 16), (0, 216)]), [a]);
        assert_eq!(held(&[(1, 16), (0, 16), (1, 116), (0, 116), (0, 216), (1, 216)]), [b, a]);
        let none: [Hash; 0] = [];
        for lacking in [&[(0, 116), (0, 216)][..], &[(0, 16), (0, 216)], &[(0, 16), (0, 116)]] {
            assert_eq!(held(lacking), none, "{lacking:?}");
        }
    }
}
