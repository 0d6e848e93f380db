//! Verify: read everything that a version needs, and name what is damaged.

use std::sync::Arc;

use headwater_store::{Hash, Object, Store, StoreError};

use crate::chunk::header_fault;
use crate::error::ImageError;
use crate::manifest::{Manifest, ObjectRef};
use crate::progress::{Cancel, Progress};
use crate::round::{Place, Round};
use crate::units::{u64_of, usize_of_u32};
use crate::walk::Walk;

/// The most damaged chunks that are listed; more are counted.
pub const DAMAGED_LISTED_MAX: usize = 10_000;

/// What a verification found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Chunks that were checked, whatever came out: now, or earlier in the same round.
    pub chunks: u64,
    /// Chunks that are damaged.
    pub damaged_chunks: u64,
    /// The first [`DAMAGED_LISTED_MAX`] of them, by their place in the image.
    pub damaged: Vec<DamagedChunk>,
    /// Data objects that are lost or damaged as a whole.
    pub objects: Vec<DamagedObject>,
}

impl Verified {
    /// Whether all is as it was written.
    pub fn is_sound(&self) -> bool {
        self.damaged_chunks == 0 && self.objects.is_empty()
    }

    /// What is damaged, a line each; the last one says how many chunks more there are than are listed.
    pub fn damage(&self) -> Vec<String> {
        let objects =
            self.objects.iter().map(|object| format!("data object {}: {}", object.object, object.reason));
        let mut damage: Vec<String> = objects.chain(self.damaged.iter().map(ToString::to_string)).collect();
        let more = self.damaged_chunks.saturating_sub(u64_of(self.damaged.len()));
        if more > 0 {
            damage.push(format!("{more} chunks more"));
        }
        damage
    }
}

/// A chunk whose bytes are not what was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedChunk {
    /// Where it starts in the image.
    pub image_offset: u64,
    /// How many bytes of the image are concerned.
    pub image_bytes: u64,
    /// The data object it is in.
    pub object: Hash,
    /// Where it starts there.
    pub object_offset: u64,
    /// How long it is there.
    pub stored_bytes: u32,
    /// What is wrong with it.
    pub reason: String,
}

/// A data object that is lost or damaged as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedObject {
    /// Its name.
    pub object: Hash,
    /// What is wrong with it.
    pub reason: String,
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

/// Reads the whole version with this manifest and checks all of it. Damage is part of the answer and does not
/// end it; an error means that the manifest itself cannot be read, that the store did not answer, so that nothing is known
/// of the rest, or that it was cancelled.
pub fn verify(
    store: &dyn Store,
    manifest: Hash,
    cancel: &Cancel,
    progress: &mut dyn FnMut(Progress),
) -> Result<Verified, ImageError> {
    verify_in(store, manifest, &Round::new(None), cancel, progress)
}

/// As [`verify`], in a round of checks: what was found right in it is not read again.
pub fn verify_in(
    store: &dyn Store,
    manifest: Hash,
    round: &Round,
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
        result.objects.extend(reason.map(|reason| DamagedObject { object: object.id, reason }));
        objects.push(opened);
    }

    let chunk_bytes = u64::from(parsed.chunk_bytes());
    let total_bytes = parsed.size_bytes();
    let data_bytes = parsed.data_chunks() * chunk_bytes;
    let mut done_bytes = total_bytes.saturating_sub(data_bytes);
    progress(Progress { done_bytes, total_bytes });
    let walk = Walk {
        manifest: &parsed,
        objects: &objects,
        is_remote: store.is_remote(),
        round: Some(round),
        cancel,
        what: "verification",
    };
    walk.run(
        |index, chunk, bytes| {
            let number = usize_of_u32(chunk.object);
            let object = parsed.objects().get(number).map_or(Hash([0; 32]), |o| o.id);
            let e = match bytes {
                Ok(_) => {
                    round.found_sound(Place::new(&object, chunk));
                    return Ok(None);
                }
                Err(e) if e.kind().is_damage() => e,
                Err(e) => return Err(e.context("cannot verify it to the end")),
            };
            let image_offset = index * chunk_bytes;
            Ok(Some(DamagedChunk {
                image_offset,
                image_bytes: chunk_bytes.min(total_bytes - image_offset),
                object,
                object_offset: chunk.offset,
                stored_bytes: chunk.stored_bytes,
                reason: e.to_string(),
            }))
        },
        |chunks, found| {
            result.chunks += chunks;
            for damaged in found {
                result.damaged_chunks += 1;
                if result.damaged.len() < DAMAGED_LISTED_MAX {
                    result.damaged.push(damaged);
                }
            }
            done_bytes = done_bytes.saturating_add(chunks * chunk_bytes).min(total_bytes);
            progress(Progress { done_bytes, total_bytes });
        },
    )?;
    result.damaged.sort_by_key(|damaged| damaged.image_offset);
    Ok(result)
}

/// A data object, if it is there, and what is wrong with it as a whole.
type Opened = (Option<Arc<dyn Object>>, Option<String>);

/// Opens a data object if that is possible at all, and says what is wrong with it as a whole.
fn open_object(store: &dyn Store, object: &ObjectRef, chunk_bytes: u32) -> Result<Opened, ImageError> {
    let damage = |e: StoreError| {
        let e = ImageError::from(e);
        if e.kind().is_damage() { Ok(Some(e.to_string())) } else { Err(e.context("cannot verify it")) }
    };
    let opened = match open_of(store, object) {
        Ok(opened) => opened,
        Err(e) => return Ok((None, damage(e)?)),
    };
    let mut header = [0; 16];
    let reason = if opened.len_bytes() != object.len_bytes {
        Some(format!("it has {} bytes instead of {}", opened.len_bytes(), object.len_bytes))
    } else if let Err(e) = opened.read_range(0, &mut header) {
        damage(e)?
    } else {
        header_fault(&header, chunk_bytes)
    };
    Ok((Some(opened), reason))
}

/// Opens a data object. One of the wrong length can be read where it is, but for a store that has it in several places: there only
/// one of them said so, and it is read from those that have it with the length of the manifest.
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

    /// An object in several places, one of which says that it has 3 bytes.
    struct Places;

    struct OnePlace(u64);

    fn not_asked<T>() -> Result<T, StoreError> {
        Err(StoreError::new(StoreErrorKind::Invalid, "nobody asks that"))
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
    fn the_manifest_says_how_long_an_object_is_and_not_the_first_place() {
        let object = ObjectRef { id: Hash([0; 32]), len_bytes: 5000 };
        assert_eq!(open_of(&Places, &object).unwrap().len_bytes(), 5000);
    }

    #[test]
    fn what_is_not_listed_is_counted() {
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
        assert_eq!(found.damage(), [chunk.to_string(), "11 chunks more".to_owned()]);
    }
}
