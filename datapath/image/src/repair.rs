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

use headwater_store::{Hash, Patch, Store, StoreError, StoreErrorKind};

use crate::chunk::unpack;
use crate::error::ImageError;
use crate::manifest::{ChunkRef, Manifest};
use crate::progress::Cancel;
use crate::round::Round;
use crate::units::{u64_of, usize_of_u32};
use crate::verify::{DamagedChunk, Verified, verify_in};

/// Right bytes that wait in memory to be put in place, but for those of one chunk.
const PATCHES_MAX_BYTES: usize = 32 << 20;

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

/// Repairs what [`verify_in`] found in the version with this manifest, from the first of `sources` that has it, and
/// verifies the version again, in the same round, where something was done: what was right then is not read again.
/// Where more chunks are damaged than are listed, it goes on with the next ones for as long as they get fewer.
pub fn repair(
    store: &dyn Store,
    manifest: Hash,
    found: &Verified,
    sources: &[Arc<dyn Store>],
    round: &Round,
    cancel: &Cancel,
) -> Result<Repaired, ImageError> {
    if found.is_sound() {
        return Ok(Repaired::default());
    }
    let _pin = store.pin(manifest)?;
    let parsed = Manifest::decode(&store.manifest(manifest)?)?;
    let repair = Repair { store, manifest: &parsed, sources, cancel };
    let mut outcome = Repaired { left: found.clone(), ..Repaired::default() };
    loop {
        let before = (outcome.chunks, outcome.objects);
        // What could not be repaired is tried, and told, again.
        outcome.reasons.clear();
        repair.listed(&mut outcome)?;
        if (outcome.chunks, outcome.objects) == before {
            return Ok(outcome);
        }
        let left = verify_in(store, manifest, round, cancel, &mut |_| {})?;
        let is_fewer = left.damaged_chunks < outcome.left.damaged_chunks;
        let had_more = outcome.left.damaged_chunks > u64_of(outcome.left.damaged.len());
        outcome.left = left;
        if outcome.left.is_sound() || !had_more || !is_fewer {
            return Ok(outcome);
        }
    }
}

/// One repair.
struct Repair<'a> {
    store: &'a dyn Store,
    manifest: &'a Manifest,
    sources: &'a [Arc<dyn Store>],
    cancel: &'a Cancel,
}

impl Repair<'_> {
    /// Repairs what is listed as damaged, and notes what came of it.
    fn listed(&self, outcome: &mut Repaired) -> Result<(), ImageError> {
        let found = outcome.left.clone();
        let mut whole = Vec::new();
        for lost in &found.objects {
            self.cancel.check("the repair")?;
            match self.copy_object(lost.object) {
                Ok(()) => {
                    outcome.objects += 1;
                    whole.push(lost.object);
                }
                Err(why) => outcome.reasons.push(format!("data object {}: {why}", lost.object)),
            }
        }
        let mut by_object: BTreeMap<Hash, Vec<&DamagedChunk>> = BTreeMap::new();
        for damaged in found.damaged.iter().filter(|damaged| !whole.contains(&damaged.object)) {
            by_object.entry(damaged.object).or_default().push(damaged);
        }
        by_object.into_iter().try_for_each(|(object, damaged)| self.chunks(object, &damaged, outcome))
    }

    /// Repairs chunks of one object, as many at a time as there is room for. A store across a network writes objects only as a
    /// whole: there one with more damage than that is copied.
    fn chunks(
        &self,
        object: Hash,
        damaged: &[&DamagedChunk],
        outcome: &mut Repaired,
    ) -> Result<(), ImageError> {
        let all_bytes: u64 = damaged.iter().map(|chunk| u64::from(chunk.stored_bytes)).sum();
        if self.store.is_remote() && all_bytes > u64_of(PATCHES_MAX_BYTES) {
            let why = format!("object {object} is damaged in {} places", damaged.len());
            self.whole(object, &why, outcome);
            return Ok(());
        }
        let (mut patches, mut bytes) = (Vec::new(), 0usize);
        let mut damaged = damaged.iter().peekable();
        while let Some(chunk) = damaged.next() {
            self.cancel.check("the repair")?;
            match right_bytes(self.manifest, chunk, self.sources) {
                Ok(patch) => {
                    bytes = bytes.saturating_add(patch.bytes.len());
                    patches.push(patch);
                }
                Err(why) => outcome.reasons.push(format!("{chunk}: {why}")),
            }
            let is_due = bytes >= PATCHES_MAX_BYTES || damaged.peek().is_none();
            if !is_due || patches.is_empty() {
                continue;
            }
            match self.store.mend(object, &patches) {
                Ok(()) => outcome.chunks += u64_of(patches.len()),
                Err(e) if e.kind() == StoreErrorKind::Damaged => {
                    self.whole(object, &e, outcome);
                    return Ok(());
                }
                Err(e) => {
                    outcome.reasons.push(e.to_string());
                    return Ok(());
                }
            }
            patches.clear();
            bytes = 0;
        }
        Ok(())
    }

    fn whole(&self, object: Hash, why: &dyn std::fmt::Display, outcome: &mut Repaired) {
        match self.copy_object(object) {
            Ok(()) => outcome.objects += 1,
            Err(e) => outcome.reasons.push(format!("{why}; nor can it be copied as a whole: {e}")),
        }
    }

    fn copy_object(&self, id: Hash) -> Result<(), String> {
        let mut why = "no other store was named".to_owned();
        let mut go_on = |_: u64| {
            let stopped = || StoreError::new(StoreErrorKind::Io, "the repair was cancelled");
            if self.cancel.is_cancelled() { Err(stopped()) } else { Ok(()) }
        };
        for source in self.sources {
            let to = headwater_store::copy_object;
            let copied = source
                .open_object(id)
                .and_then(|object| to(self.store.publish()?.as_mut(), object.as_ref(), &mut go_on));
            match copied {
                Ok(()) => return Ok(()),
                Err(e) => why = e.to_string(),
            }
        }
        Err(why)
    }
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
