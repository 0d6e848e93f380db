//! Repair: right bytes from another store or server in place of what a verification found damaged.
//!
//! A version has the same objects everywhere, so a damaged chunk is at the same place of the same object elsewhere. It is
//! read there and checked against the hash in the manifest before it is put in place; where an object is lost or has the
//! wrong length, it is copied as a whole, and also where the store writes an object only as a whole and it is damaged in
//! other places too, which this version does not need. What cannot be repaired stays as it is.
//!
//! A manifest is named by its hash and the same everywhere, too: [`repair_manifest`] comes first, for without it nothing
//! is known of a version.

use std::collections::BTreeMap;
use std::sync::Arc;

use headwater_store::{Hash, Patch, Store, StoreErrorKind};

use crate::chunk::unpack;
use crate::error::ImageError;
use crate::manifest::{ChunkRef, Manifest};
use crate::progress::Cancel;
use crate::units::usize_of_u32;
use crate::verify::{DamagedChunk, Verified, verify};

/// What a repair did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repaired {
    /// Chunks that are right again.
    pub chunks: u64,
    /// Objects that were copied as a whole.
    pub objects: u64,
    /// What is still damaged.
    pub left: Verified,
    /// Why something could not be repaired, one line each.
    pub reasons: Vec<String>,
}

/// Puts the manifest of a version that this store lists right, where it is lost or damaged, from the first of `sources` that has
/// it. Returns whether there was anything to do.
pub fn repair_manifest(
    store: &dyn Store,
    manifest: Hash,
    sources: &[Arc<dyn Store>],
) -> Result<bool, ImageError> {
    let Err(found) = store.manifest(manifest) else { return Ok(false) };
    let found = ImageError::from(found);
    // One of a version that was removed meanwhile must not come back.
    let is_listed =
        store.listed()?.images.iter().any(|image| image.versions.iter().any(|v| v.manifest == manifest));
    if !is_listed {
        return Err(found);
    }
    let mut why = "no other store was named".to_owned();
    for source in sources {
        let bytes = source.manifest(manifest).map_err(ImageError::from);
        match bytes.and_then(|bytes| Manifest::decode(&bytes).map(|_| bytes)) {
            Ok(bytes) => {
                store.mend_manifest(manifest, &bytes)?;
                return Ok(true);
            }
            Err(e) => why = format!("{}: {e}", source.shown()),
        }
    }
    Err(ImageError::new(found.kind(), format!("{found}; it cannot be repaired: {why}")))
}

/// Repairs what [`verify`] found in the version with this manifest, from the first of `sources` that has it, and
/// verifies the version again where something was done.
pub fn repair(
    store: &dyn Store,
    manifest: Hash,
    found: &Verified,
    sources: &[Arc<dyn Store>],
    cancel: &Cancel,
) -> Result<Repaired, ImageError> {
    let mut outcome = Repaired::default();
    if found.is_sound() {
        return Ok(outcome);
    }
    let _pin = store.pin(manifest)?;
    let parsed = Manifest::decode(&store.manifest(manifest)?)?;
    let mut whole = Vec::new();
    for lost in &found.objects {
        cancel.check("the repair")?;
        match copy_object(store, lost.object, sources) {
            Ok(()) => {
                outcome.objects += 1;
                whole.push(lost.object);
            }
            Err(why) => outcome.reasons.push(format!("data object {}: {why}", lost.object)),
        }
    }
    let mut patches: BTreeMap<Hash, Vec<Patch>> = BTreeMap::new();
    for damaged in found.damaged.iter().filter(|damaged| !whole.contains(&damaged.object)) {
        cancel.check("the repair")?;
        match right_bytes(&parsed, damaged, sources) {
            Ok(patch) => patches.entry(damaged.object).or_default().push(patch),
            Err(why) => outcome.reasons.push(format!("{damaged}: {why}")),
        }
    }
    for (object, patches) in patches {
        match store.mend(object, &patches) {
            Ok(()) => outcome.chunks += u64::try_from(patches.len()).unwrap_or(u64::MAX),
            Err(e) if e.kind() == StoreErrorKind::Damaged => match copy_object(store, object, sources) {
                Ok(()) => outcome.objects += 1,
                Err(why) => outcome.reasons.push(format!("{e}; nor can it be copied as a whole: {why}")),
            },
            Err(e) => outcome.reasons.push(e.to_string()),
        }
    }
    outcome.left = if outcome.chunks + outcome.objects > 0 {
        verify(store, manifest, cancel, &mut |_| {})?
    } else {
        found.clone()
    };
    Ok(outcome)
}

fn copy_object(store: &dyn Store, id: Hash, sources: &[Arc<dyn Store>]) -> Result<(), String> {
    let mut why = "no other store was named".to_owned();
    for source in sources {
        let to = headwater_store::copy_object;
        let copied = source
            .open_object(id)
            .and_then(|object| to(store.publish()?.as_mut(), object.as_ref(), &mut |_| Ok(())));
        match copied {
            Ok(()) => return Ok(()),
            Err(e) => why = e.to_string(),
        }
    }
    Err(why)
}

/// The right bytes of a chunk, as they are stored.
fn right_bytes(
    manifest: &Manifest,
    damaged: &DamagedChunk,
    sources: &[Arc<dyn Store>],
) -> Result<Patch, String> {
    let index = damaged.image_offset / u64::from(manifest.chunk_bytes());
    let chunk = manifest.chunk(index).ok_or("it is not in the manifest")?;
    let mut why = "no other store was named".to_owned();
    for source in sources {
        match read_checked(source.as_ref(), damaged.object, chunk, manifest.chunk_bytes()) {
            Ok(bytes) => return Ok(Patch { offset: chunk.offset, bytes }),
            Err(e) => why = format!("{}: {e}", source.shown()),
        }
    }
    Err(why)
}

fn read_checked(
    source: &dyn Store,
    object: Hash,
    chunk: &ChunkRef,
    chunk_bytes: u32,
) -> Result<Vec<u8>, ImageError> {
    let object = source.open_object(object)?;
    let mut stored = vec![0; usize_of_u32(chunk.stored_bytes)];
    let mut content = vec![0; usize_of_u32(chunk_bytes)];
    object.read_checked(chunk.offset, &mut stored, &mut |stored| {
        unpack(stored, &mut content, &chunk.hash).map_err(|e| {
            headwater_store::StoreError::new(headwater_store::StoreErrorKind::Damaged, e.to_string())
        })
    })?;
    Ok(stored)
}
