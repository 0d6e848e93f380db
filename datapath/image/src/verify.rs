//! Verifies a version: reads everything that it needs, compares it with its hashes, and lists the damage.
//! It changes nothing: `repair` does.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use headwater_store::{Hash, Object, Store, StoreError, StoreErrorKind, hash_of};

use crate::chunk::header_fault;
use crate::error::ImageError;
use crate::manifest::{ChunkRef, Manifest, ObjectRef};
use crate::progress::{Cancel, Progress};
use crate::units::{u64_of, usize_of_u32};
use crate::verify_round::{ChunkKey, VerifyRound};
use crate::walk::Walk;

/// The most damaged chunks that are listed; further ones are only counted.
pub const DAMAGED_LISTED_MAX: usize = 10_000;

/// The name of the operation, for people.
const WHAT: &str = "verification";
/// The fault of an object in which only bytes that no version needs are damaged.
const NOT_ITS_HASH: &str = "its hash is not the one in its name. The chunks of this version are undamaged, but another part of the object is damaged. Versions \
     that need the object cannot be copied from this store. Repair it from a store that has the object";

/// The result of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Chunks that were checked, with any result: now, or earlier in the same round.
    pub chunks: u64,
    /// Chunks that are damaged.
    pub damaged_chunks: u64,
    /// The first [`DAMAGED_LISTED_MAX`] of them, in the order of the image.
    pub damaged: Vec<DamagedChunk>,
    /// The data objects with damaged chunks, even if none of the chunks is listed.
    pub objects_with_damaged_chunks: HashSet<Hash>,
    /// Data objects that are lost, have the wrong length or a bad header, or do not have their hash.
    pub objects: Vec<DamagedObject>,
}

impl Verified {
    /// Whether nothing is damaged.
    pub fn is_sound(&self) -> bool {
        self.damaged_chunks == 0 && self.objects.is_empty()
    }

    /// The number of damaged chunks that are not listed.
    pub fn unlisted(&self) -> u64 {
        self.damaged_chunks.saturating_sub(u64_of(self.damaged.len()))
    }

    /// The number of damaged chunks that are neither listed nor in a lost object. If an object is lost, all
    /// of its chunks are known to be lost.
    pub(crate) fn unlisted_in_existing_objects(&self) -> u64 {
        let lost: HashMap<Hash, u64> = self.objects.iter().filter_map(DamagedObject::lost).collect();
        let listed = self.damaged.iter().filter(|chunk| !lost.contains_key(&chunk.object)).count();
        let known = lost.values().fold(u64_of(listed), |sum, chunks| sum.saturating_add(*chunks));
        self.damaged_chunks.saturating_sub(known)
    }

    /// The damage, one line for each item. The last line says how many chunks are not listed, and what that
    /// means. The chunks of a lost data object have no lines of their own.
    pub fn damage(&self) -> Vec<String> {
        let mut damage: Vec<String> = self.objects.iter().map(ToString::to_string).collect();
        let lost = self.objects.iter().filter(|object| object.lost_chunks.is_some());
        let lost: HashSet<Hash> = lost.map(|object| object.object).collect();
        let listed = self.damaged.iter().filter(|chunk| !lost.contains(&chunk.object));
        damage.extend(listed.map(ToString::to_string));
        let more = self.unlisted_in_existing_objects();
        if more > 0 {
            damage.push(format!(
                "damaged chunks that are not listed: {more}; each version that needs any part of their data objects is \
                 reported as affected"
            ));
        }
        damage
    }
}

/// A chunk whose bytes differ from those that were written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedChunk {
    /// Its offset in the image.
    pub image_offset: u64,
    /// How many bytes of the image are affected.
    pub image_bytes: u64,
    /// The data object that contains it.
    pub object: Hash,
    /// Its offset in the object.
    pub object_offset: u64,
    /// Its length in the object.
    pub stored_bytes: u32,
    /// What is wrong with it.
    pub reason: String,
}

/// A data object that is lost, has the wrong length or a bad header, or does not have its hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedObject {
    /// Its name.
    pub object: Hash,
    /// What is wrong with it.
    pub reason: String,
    /// If the object is lost: how many chunks of the version are in it.
    pub lost_chunks: Option<u64>,
}

impl DamagedObject {
    /// The object, and how many chunks are lost with it.
    fn lost(&self) -> Option<(Hash, u64)> {
        self.lost_chunks.map(|chunks| (self.object, chunks))
    }
}

impl std::fmt::Display for DamagedObject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "data object {}: {}", self.object, self.reason)?;
        match self.lost_chunks {
            Some(chunks) => write!(f, "; it is lost, with {chunks} chunks of this version"),
            None => Ok(()),
        }
    }
}

impl std::fmt::Display for DamagedChunk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "bytes {}+{} of the image (at {}+{} of object {}): {}",
            self.image_offset,
            self.image_bytes,
            self.object_offset,
            self.stored_bytes,
            self.object,
            self.reason
        )
    }
}

/// Reads the whole version with this manifest and checks all of it. If no other version needs one of its data
/// objects, the unneeded parts of that object are checked as well. Damage is part of the result and does not
/// end the verification. An error means that the manifest itself cannot be read, that the store did not
/// answer, so that nothing is known about the rest, or that it was cancelled.
pub fn verify(
    store: &dyn Store,
    manifest: Hash,
    cancel: &Cancel,
    progress: &mut dyn FnMut(Progress),
) -> Result<Verified, ImageError> {
    verify_in(store, manifest, &VerifyRound::new(None), cancel, progress)
}

/// As [`verify`], in a round of checks: what was found right in the round is not read again. The unneeded
/// parts of a data object are checked, and reported, with the last version that needs the object.
pub fn verify_in(
    store: &dyn Store,
    manifest: Hash,
    round: &VerifyRound,
    cancel: &Cancel,
    progress: &mut dyn FnMut(Progress),
) -> Result<Verified, ImageError> {
    let _pin = store.pin(manifest)?;
    let bytes = store.manifest(manifest)?;
    round.take(u64_of(bytes.len()), cancel);
    let parsed = Manifest::decode(&bytes)?;
    let mut result = Verified::default();
    let mut objects: Vec<Option<Arc<dyn Object>>> = Vec::new();
    for object in parsed.objects() {
        let (opened, reason) = open_object(store, object, parsed.chunk_bytes())?;
        let lost_chunks = opened.is_none().then_some(0);
        result.objects.extend(reason.map(|reason| DamagedObject { object: object.id, reason, lost_chunks }));
        objects.push(opened);
    }
    let mut lost: HashMap<Hash, u64> = result.objects.iter().filter_map(DamagedObject::lost).collect();
    let mut wholes = round.due_as_wholes(store, manifest, &parsed)?;
    wholes.retain(|whole| result.objects.iter().all(|lost| lost.object != whole.id));

    let (image_bytes, chunk_bytes) = (parsed.size_bytes(), u64::from(parsed.chunk_bytes()));
    let wholes_bytes = wholes.iter().fold(0_u64, |sum, whole| sum.saturating_add(whole.len_bytes));
    let total_bytes = image_bytes.saturating_add(wholes_bytes);
    let mut done_bytes = 0_u64;
    let mut tell = |to_bytes: u64| {
        // A second read from another server must not decrease the progress.
        done_bytes = done_bytes.max(to_bytes);
        progress(Progress { done_bytes, total_bytes });
    };
    let mut passed_bytes = image_bytes.saturating_sub(parsed.data_chunks() * chunk_bytes);
    tell(passed_bytes);
    let walk = Walk {
        manifest: &parsed,
        objects: &objects,
        is_remote: store.is_remote(),
        round: Some(round),
        cancel,
        what: WHAT,
    };
    walk.run(
        |index, chunk, bytes| judge(&parsed, round, (index, chunk), bytes),
        |chunks, found| {
            result.chunks += chunks;
            for damaged in found {
                result.damaged_chunks += 1;
                result.objects_with_damaged_chunks.insert(damaged.object);
                if let Some(chunks) = lost.get_mut(&damaged.object) {
                    *chunks = chunks.saturating_add(1);
                }
                if result.damaged.len() < DAMAGED_LISTED_MAX {
                    result.damaged.push(damaged);
                }
            }
            passed_bytes = passed_bytes.saturating_add(chunks * chunk_bytes).min(image_bytes);
            tell(passed_bytes);
        },
    )?;
    for object in &mut result.objects {
        object.lost_chunks = lost.get(&object.object).copied();
    }
    result.damaged.sort_by_key(|damaged| damaged.image_offset);
    let read = &mut |bytes: u64| tell(image_bytes.saturating_add(bytes));
    result.objects.extend(read_wholes(
        store,
        (&wholes, &result.objects_with_damaged_chunks),
        (round, cancel),
        read,
    )?);
    Ok(result)
}

/// Checks a chunk of a version that was read, and returns its damage.
fn judge(
    version: &Manifest,
    round: &VerifyRound,
    (index, chunk): (u64, &ChunkRef),
    bytes: Result<&[u8], ImageError>,
) -> Result<Option<DamagedChunk>, ImageError> {
    let number = usize_of_u32(chunk.object);
    let object = version.objects().get(number).map_or(Hash([0; 32]), |o| o.id);
    let e = match bytes {
        Ok(_) => {
            round.found_sound(ChunkKey::new(&object, chunk));
            return Ok(None);
        }
        Err(e) if e.kind().is_damage() => e,
        Err(e) => return Err(e.context("cannot finish the verification of the version")),
    };
    let chunk_bytes = u64::from(version.chunk_bytes());
    let image_offset = index * chunk_bytes;
    Ok(Some(DamagedChunk {
        image_offset,
        image_bytes: chunk_bytes.min(version.size_bytes() - image_offset),
        object,
        object_offset: chunk.offset,
        stored_bytes: chunk.stored_bytes,
        reason: e.to_string(),
    }))
}

/// Reads data objects as a whole and returns the bad ones. An object with damaged chunks is not read, because
/// its hash shows nothing new. It is checked after the chunks have been repaired. `read` is called with the
/// number of bytes of all objects that were processed.
fn read_wholes(
    store: &dyn Store,
    (wholes, damaged): (&[ObjectRef], &HashSet<Hash>),
    (round, cancel): (&VerifyRound, &Cancel),
    read: &mut dyn FnMut(u64),
) -> Result<Vec<DamagedObject>, ImageError> {
    let (mut found, mut before) = (Vec::new(), 0_u64);
    for object in wholes {
        if !damaged.contains(&object.id) {
            let read = &mut |bytes: u64| read(before.saturating_add(bytes));
            match whole_fault(store, object, (round, cancel), read)? {
                None => round.found_whole(object.id),
                Some(reason) => found.push(DamagedObject { object: object.id, reason, lost_chunks: None }),
            }
        }
        before = before.saturating_add(object.len_bytes);
        read(before);
    }
    Ok(found)
}

/// The fault of a whole data object in which no chunk was found damaged.
fn whole_fault(
    store: &dyn Store,
    object: &ObjectRef,
    (round, cancel): (&VerifyRound, &Cancel),
    read: &mut dyn FnMut(u64),
) -> Result<Option<String>, ImageError> {
    // Opened again: while the chunks were read, a repair may have replaced the file.
    let opened = match open_of(store, object) {
        Ok(opened) => opened,
        Err(e) => return damage(e).map(Some),
    };
    loop {
        let mut read_bytes = 0_u64;
        let hash = hash_of(opened.as_ref(), &mut |bytes| {
            read(read_bytes);
            read_bytes = read_bytes.saturating_add(u64_of(bytes));
            round.take(u64_of(bytes), cancel);
            match cancel.is_cancelled() {
                true => Err(StoreError::new(StoreErrorKind::Io, "it was cancelled")),
                false => Ok(()),
            }
        });
        cancel.check(WHAT)?;
        match hash {
            Ok(hash) if hash == object.id => return Ok(None),
            // The wrong bytes came from one of several servers: the next read uses another one.
            Ok(_) if opened.was_wrong() => {}
            Ok(_) => return Ok(Some(NOT_ITS_HASH.to_owned())),
            Err(e) => return damage(e).map(Some),
        }
    }
}

/// A data object, if it exists, and the fault of its length or header.
type Opened = (Option<Arc<dyn Object>>, Option<String>);

/// Opens a data object if that is possible at all, and returns the fault of its length or header.
fn open_object(store: &dyn Store, object: &ObjectRef, chunk_bytes: u32) -> Result<Opened, ImageError> {
    let opened = match open_of(store, object) {
        Ok(opened) => opened,
        Err(e) => return Ok((None, Some(damage(e)?))),
    };
    let mut header = [0; 16];
    let reason = if opened.len_bytes() != object.len_bytes {
        Some(format!("it has {} bytes instead of {}", opened.len_bytes(), object.len_bytes))
    } else if let Err(e) = opened.read_range(0, &mut header) {
        Some(damage(e)?)
    } else {
        header_fault(&header, chunk_bytes)
    };
    Ok((Some(opened), reason))
}

/// The damage of an object that a store cannot give; an error if the failure shows nothing about the object.
fn damage(e: StoreError) -> Result<String, ImageError> {
    let e = ImageError::from(e);
    if e.kind().is_damage() { Ok(e.to_string()) } else { Err(e.context("cannot verify the data object")) }
}

/// Opens a data object. In a single store, an object of the wrong length can still be read up to its end. In
/// a store with several servers only one of them reported that length, so the object is opened with the
/// length from the manifest and read from the others.
pub(crate) fn open_of(store: &dyn Store, object: &ObjectRef) -> Result<Arc<dyn Object>, StoreError> {
    let opened = store.open_object(object.id)?;
    if opened.len_bytes() != object.len_bytes && opened.was_wrong() {
        return store.open_object_of(object.id, object.len_bytes);
    }
    Ok(opened)
}

#[cfg(test)]
mod tests {
    use headwater_store::{Image, ImageName, Pin, Publication, Removed, StoreErrorKind};

    use super::*;

    /// An object with several copies, one of which reports a length of 3 bytes.
    struct Places;

    struct OnePlace(u64);

    fn not_asked<T>() -> Result<T, StoreError> {
        Err(StoreError::new(StoreErrorKind::Invalid, "this is never called"))
    }

    impl Object for OnePlace {
        fn id(&self) -> Hash {
            Hash([0; 32])
        }

        fn len_bytes(&self) -> u64 {
            self.0
        }

        fn read_range(&self, _: u64, _: &mut [u8]) -> Result<(), StoreError> {
            not_asked()
        }

        fn was_wrong(&self) -> bool {
            true
        }
    }

    impl Store for Places {
        fn chunk_bytes(&self) -> u32 {
            4096
        }

        fn images(&self) -> Result<Vec<Image>, StoreError> {
            not_asked()
        }

        fn image(&self, _: &ImageName) -> Result<Option<Image>, StoreError> {
            not_asked()
        }

        fn manifest(&self, _: Hash) -> Result<Vec<u8>, StoreError> {
            not_asked()
        }

        fn open_object(&self, _: Hash) -> Result<Arc<dyn Object>, StoreError> {
            Ok(Arc::new(OnePlace(3)))
        }

        fn open_object_of(&self, _: Hash, len_bytes: u64) -> Result<Arc<dyn Object>, StoreError> {
            Ok(Arc::new(OnePlace(len_bytes)))
        }

        fn pin(&self, _: Hash) -> Result<Pin, StoreError> {
            not_asked()
        }

        fn publish(&self) -> Result<Box<dyn Publication>, StoreError> {
            not_asked()
        }

        fn change(
            &self,
            _: &ImageName,
            _: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>,
        ) -> Result<(), StoreError> {
            not_asked()
        }

        fn remove(&self, _: &ImageName, _: Option<u32>) -> Result<Removed, StoreError> {
            not_asked()
        }
    }

    #[test]
    fn the_length_of_an_object_comes_from_the_manifest() {
        let object = ObjectRef { id: Hash([0; 32]), len_bytes: 5000 };
        assert_eq!(open_of(&Places, &object).unwrap().len_bytes(), 5000);
    }

    #[test]
    fn damage_beyond_the_list_is_counted() {
        let chunk = DamagedChunk {
            image_offset: 0,
            image_bytes: 4096,
            object: Hash([0; 32]),
            object_offset: 16,
            stored_bytes: 100,
            reason: "it is wrong".to_owned(),
        };
        let mut found = Verified { damaged_chunks: 1, damaged: vec![chunk.clone()], ..Verified::default() };
        assert_eq!(found.damage(), [chunk.to_string()]);
        found.damaged_chunks = 12;
        let damage = found.damage();
        assert_eq!((damage.len(), &damage[0], found.unlisted()), (2, &chunk.to_string(), 11));
        assert!(damage[1].starts_with("damaged chunks that are not listed: 11;"), "{damage:?}");
    }

    #[test]
    fn a_lost_object_has_one_line_for_all_of_its_chunks() {
        let chunk = |object| DamagedChunk {
            image_offset: 0,
            image_bytes: 4096,
            object: Hash([object; 32]),
            object_offset: 16,
            stored_bytes: 100,
            reason: "it is wrong".to_owned(),
        };
        let reason = "there is none".to_owned();
        let lost = DamagedObject { object: Hash([1; 32]), reason, lost_chunks: Some(12_000) };
        let found = Verified {
            damaged_chunks: 12_002,
            damaged: vec![chunk(1), chunk(0), chunk(1)],
            objects: vec![lost.clone()],
            ..Verified::default()
        };
        let damage = found.damage();
        assert_eq!(damage[..2], [lost.to_string(), chunk(0).to_string()], "{damage:?}");
        assert!(
            damage[0].ends_with("there is none; it is lost, with 12000 chunks of this version"),
            "{damage:?}"
        );
        assert!(
            damage.len() == 3 && damage[2].starts_with("damaged chunks that are not listed: 1;"),
            "{damage:?}"
        );
    }
}
