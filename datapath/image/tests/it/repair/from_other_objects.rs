//! Repairs from other data objects, in which the same store or another one with another history has the same
//! chunks.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{CHUNK_BYTES, Noting, check, object_path, place, repair_object, spoil};
use crate::fixture::{disk_of, files, flip, import_bytes, noise, read_all, store};
use headwater_image::import::LEVEL_DEFAULT;
use headwater_image::{Cancel, ChunkCache, ImportOptions, VerifyRound, VersionReader, repair, verify_in};
use headwater_store::{LocalDir, Store, Version};
use headwater_testkit::Rng;

/// A compressed chunk of [`Sites`], and an uncompressed one.
const PACKED: u64 = 3;
const AS_IT_IS: u64 = 11;

/// Bytes that each level of zstd compresses differently, always the same ones for one seed.
fn words(into: &mut [u8], seed: u64) {
    let mut rng = Rng::new(seed);
    let mut words = vec![0; 64 * 16];
    rng.fill(&mut words);
    for place in into.chunks_mut(16) {
        let word = rng.index(64) * 16;
        place.copy_from_slice(&words[word..word + place.len()]);
    }
}

/// Two stores with the same disk. The store `there` has only this disk. In the store `here`, most chunks are
/// in the data object of an older version.
struct Sites {
    dir: tempfile::TempDir,
    here: LocalDir,
    older: Version,
    newest: Version,
    there_dir: tempfile::TempDir,
    there: LocalDir,
    theirs: Version,
    disk: Vec<u8>,
}

impl Sites {
    /// In `there` the disk is compressed with this level, in `here` with the default level.
    fn new(level_there: i32) -> Self {
        let ((dir, here), (there_dir, there)) = (store(), store());
        let mut disk = vec![0; 16 * CHUNK_BYTES];
        words(&mut disk[..8 * CHUNK_BYTES], 1);
        noise(&mut disk[8 * CHUNK_BYTES..], 2);
        let older = import_bytes(&here, "disk", &disk).version;
        words(&mut disk[..CHUNK_BYTES], 3);
        let newest = import_bytes(&here, "disk", &disk).version;
        let mut options = ImportOptions::new("disk".parse().unwrap(), 1_700_000_000);
        options.level = level_there;
        let source = disk_of(disk.clone());
        let theirs = headwater_image::import(source, &there, &options, &mut |_| {}).unwrap().version;
        let [packed, as_it_is] = [PACKED, AS_IT_IS].map(|index| place(&here, &newest, index));
        assert_eq!([packed.0, as_it_is.0], [older.objects[0]; 2]);
        assert!((packed.1.stored_bytes as usize) < CHUNK_BYTES);
        assert_eq!(as_it_is.1.stored_bytes as usize, CHUNK_BYTES);
        assert!(there.open_object(older.objects[0]).is_err());
        Self { dir, here, older, newest, there_dir, there, theirs, disk }
    }

    /// The data object of the older version.
    fn shared(&self) -> PathBuf {
        object_path(self.dir.path(), &self.older)
    }

    fn spoil(&self, indices: &[u64]) {
        for index in indices {
            spoil(self.dir.path(), place(&self.here, &self.newest, *index));
        }
    }

    /// Repairs the newest version from the other store.
    fn repair_object(&self) -> headwater_image::Repaired {
        repair_object(&self.here, &self.newest, &[Arc::new(self.there.clone())])
    }

    /// Repairs a compressed chunk. The repair must fail for exactly this reason and change nothing.
    fn must_refuse(&self, says: &str) {
        self.spoil(&[PACKED]);
        let (bytes, listed) = (fs::read(self.shared()).unwrap(), files(self.dir.path()));
        let done = self.repair_object();
        assert_eq!((done.chunks, done.objects, done.left.damaged_chunks), (0, 0, 1));
        assert_eq!(done.reasons.len(), 1, "{:?}", done.reasons);
        assert!(done.reasons[0].contains(says), "{:?}", done.reasons);
        assert!(fs::read(self.shared()).unwrap() == bytes);
        assert_eq!(files(self.dir.path()), listed);
    }
}

#[test]
fn a_chunk_is_repaired_from_another_object_of_another_store() {
    let sites = Sites::new(LEVEL_DEFAULT);
    let good = fs::read(sites.shared()).unwrap();
    let reader = VersionReader::open(&sites.here, sites.newest.manifest, ChunkCache::new(0)).unwrap();
    let there = Arc::new(Noting::new(sites.there.clone()));
    let sources: [Arc<dyn Store>; 1] = [there.clone()];
    for spoilt in [&[PACKED][..], &[AS_IT_IS], &[PACKED, PACKED + 1, AS_IT_IS, AS_IT_IS + 1]] {
        sites.spoil(spoilt);
        assert!(fs::read(sites.shared()).unwrap() != good);
        there.take_read();
        let done = repair_object(&sites.here, &sites.newest, &sources);
        assert_eq!((done.chunks, done.objects), (spoilt.len() as u64, 0), "{:?}", done.reasons);
        assert!(done.left.is_sound() && done.reasons.is_empty(), "{:?}", done.reasons);
        assert!(fs::read(sites.shared()).unwrap() == good);
        // Who has it open reads the right bytes, too.
        assert!(read_all(reader.as_ref()) == sites.disk);
        let read_bytes = there.take_read();
        let most_bytes = (spoilt.len() * CHUNK_BYTES) as u64;
        assert!((1..=most_bytes).contains(&read_bytes), "{read_bytes} bytes of data objects were read there");
    }
    assert!(check(&sites.here, &sites.older).is_sound());
    assert!(files(sites.dir.path()).iter().all(|(name, _)| !name.starts_with("tmp/")));
}

#[test]
fn only_stores_without_an_answer_are_asked_again() {
    let sites = Sites::new(LEVEL_DEFAULT);
    sites.spoil(&[PACKED]);
    let repair_object = |version: &Version, round: &VerifyRound, sources: &[Arc<dyn Store>]| {
        let found = verify_in(&sites.here, version.manifest, round, &Cancel::new(), &mut |_| {}).unwrap();
        assert_eq!(found.damaged_chunks, 1);
        let (manifest, how) = (version.manifest, (round, sources));
        repair(&sites.here, manifest, &found, how, &Cancel::new(), &mut |_| {}).unwrap()
    };
    let (_empty_dir, empty) = store();
    let (round, lacking): (_, [Arc<dyn Store>; 1]) = (VerifyRound::new(None), [Arc::new(empty)]);
    for (version, is_known) in [(&sites.older, false), (&sites.newest, true)] {
        let done = repair_object(version, &round, &lacking);
        assert_eq!((done.chunks, done.reasons.len()), (0, 1), "{:?}", done.reasons);
        assert_eq!(done.reasons[0].contains("searched for another version"), is_known, "{:?}", done.reasons);
    }

    let there = Arc::new(Noting::new(sites.there.clone()));
    let (round, sources): (_, [Arc<dyn Store>; 1]) = (VerifyRound::new(None), [there.clone()]);
    there.falters.store(1, Ordering::Relaxed);
    let done = repair_object(&sites.older, &round, &sources);
    assert_eq!((done.chunks, done.left.damaged_chunks), (0, 1));
    assert!(done.reasons[0].contains("it does not answer"), "{:?}", done.reasons);
    let done = repair_object(&sites.newest, &round, &sources);
    assert_eq!((done.chunks, done.left.is_sound()), (1, true), "{:?}", done.reasons);
}

/// Repairs the older and the newest version in turn, this many times. Returns how many manifests each repair
/// read in both stores, and why the damaged chunk stays.
fn repaired_in_turn(sites: &Sites, there: &Arc<Noting>, times: usize) -> Vec<(usize, usize, String)> {
    let (here, round) = (Noting::new(sites.here.clone()), VerifyRound::new(None));
    let sources: [Arc<dyn Store>; 1] = [Arc::clone(there) as Arc<dyn Store>];
    let versions = [&sites.older, &sites.newest].into_iter().cycle().take(times);
    let mended = versions.map(|version| {
        let found = verify_in(&here, version.manifest, &round, &Cancel::new(), &mut |_| {}).unwrap();
        assert_eq!(found.damaged_chunks, 1);
        here.take_asked();
        there.take_asked();
        let how = (&round, sources.as_slice());
        let done = repair(&here, version.manifest, &found, how, &Cancel::new(), &mut |_| {}).unwrap();
        assert_eq!((done.chunks, done.reasons.len()), (0, 1), "{:?}", done.reasons);
        (here.take_asked(), there.take_asked(), done.reasons[0].clone())
    });
    mended.collect()
}

#[test]
fn a_damaged_copy_is_searched_for_once_per_round() {
    let sites = Sites::new(LEVEL_DEFAULT);
    sites.spoil(&[PACKED]);
    spoil(sites.there_dir.path(), place(&sites.there, &sites.theirs, PACKED));
    let there = Arc::new(Noting::new(sites.there.clone()));
    // Each repair reads the manifest of the version. The first one also reads all manifests of both stores.
    let mended = repaired_in_turn(&sites, &there, 3);
    let read: Vec<_> = mended.iter().map(|(here, there, _)| (*here, *there)).collect();
    assert_eq!(read, [(1 + 2, 1), (1, 0), (1, 0)]);
    assert!(mended[0].2.contains("cannot be used"), "{}", mended[0].2);
    assert!(mended[1].2.contains("searched for another version"), "{}", mended[1].2);
}

#[test]
fn a_silent_store_is_skipped_for_the_round() {
    let sites = Sites::new(LEVEL_DEFAULT);
    sites.spoil(&[PACKED]);
    let there = Arc::new(Noting::new(sites.there.clone()));
    there.falters.store(usize::MAX, Ordering::Relaxed);
    let mended = repaired_in_turn(&sites, &there, 5);
    let read: Vec<_> = mended.iter().map(|(here, there, _)| (*here, *there)).collect();
    assert_eq!(read, [(1 + 2, 1), (1, 1), (1, 1), (1, 0), (1, 0)]);
    for (number, (_, _, why)) in mended.iter().enumerate() {
        assert_eq!(why.contains("it does not answer"), number < 3, "{why}");
        assert_eq!(why.contains("the next round reads them again"), number >= 3, "{why}");
    }
    // In the next round the store is asked again.
    there.falters.store(0, Ordering::Relaxed);
    let done = repair_object(&sites.here, &sites.newest, &[there]);
    assert_eq!((done.chunks, done.left.is_sound()), (1, true), "{:?}", done.reasons);
}

#[test]
fn a_differently_compressed_chunk_is_refused_without_changes() {
    // Compressed to another length.
    let sites = Sites::new(19);
    let here = place(&sites.here, &sites.newest, PACKED).1;
    let there = place(&sites.there, &sites.theirs, PACKED).1;
    assert_ne!(here.stored_bytes, there.stored_bytes);
    sites.must_refuse("in another compression");

    // Compressed to the same length with one different byte: no reader looks at this bit of the header of a
    // frame.
    let sites = Sites::new(LEVEL_DEFAULT);
    let (object, chunk) = place(&sites.there, &sites.theirs, PACKED);
    let theirs = sites.there_dir.path().join("objects").join(object.to_string());
    let unused_bit_at = chunk.offset + 4;
    flip(&theirs, unused_bit_at);
    assert!(check(&sites.there, &sites.theirs).is_sound());
    sites.must_refuse("with them the object's hash is wrong");
    flip(&theirs, unused_bit_at);
    let done = sites.repair_object();
    assert_eq!((done.chunks, done.left.is_sound()), (1, true), "{:?}", done.reasons);
}

#[test]
fn with_more_damage_only_uncompressed_chunks_come_from_other_objects() {
    let sites = Sites::new(LEVEL_DEFAULT);
    // Only the older version needs this chunk, and no other store has it.
    spoil(sites.dir.path(), place(&sites.here, &sites.older, 0));
    sites.spoil(&[PACKED, AS_IT_IS]);
    let done = sites.repair_object();
    assert_eq!((done.chunks, done.left.damaged_chunks), (1, 1), "{:?}", done.reasons);
    assert_eq!(done.left.damaged[0].image_offset, PACKED * CHUNK_BYTES as u64);
    assert_eq!(done.reasons.len(), 1, "{:?}", done.reasons);
    assert!(done.reasons[0].contains("the object has other damage"), "{:?}", done.reasons);
    assert_eq!(check(&sites.here, &sites.older).damaged_chunks, 2);
}

#[test]
fn a_chunk_is_repaired_from_another_object_of_the_same_store() {
    let (dir, here) = store();
    let mut disk = vec![0; 4 * CHUNK_BYTES];
    words(&mut disk, 1);
    let version = import_bytes(&here, "disk", &disk).version;
    let path = object_path(dir.path(), &version);
    let good = fs::read(&path).unwrap();
    spoil(dir.path(), place(&here, &version, 2));
    // An import of the same disk finds the damage, and stores the chunk again.
    assert_eq!(import_bytes(&here, "again", &disk).damaged_chunks, 1);
    let done = repair_object(&here, &version, &[]);
    assert_eq!((done.chunks, done.left.is_sound()), (1, true), "{:?}", done.reasons);
    assert!(fs::read(&path).unwrap() == good);
}
