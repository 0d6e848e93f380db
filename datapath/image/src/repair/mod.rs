//! Repair: right bytes from another store or server in place of what a verification found damaged.
//!
//! A version has the same objects everywhere, so a damaged chunk is at the same place of the same object elsewhere. It is
//! read there and checked against the hash in the manifest before it is put in place. What cannot be repaired stays as it is.
//!
//! An object is copied as a whole where it is lost or has the wrong length; where it is damaged in what this version does not need, and that
//! is to be checked with this version (`VerifyRound`), or the store writes objects only as a whole; and where much of it is damaged
//! (`is_for_a_copy`). Of the last, what cannot be copied, as without room for it twice, is repaired chunk by chunk all the same.
//!
//! Stores in which versions came in another order have equal chunks in other objects. So a chunk of an object that no source has is looked
//! for by its hash (`ByHash`), in the store itself and then in the sources. What is right when unpacked may still be other bytes than
//! the object had: another level or release of zstd packs otherwise, mostly into another length, and the object would not have the hash
//! any more that is its name, so that nobody could copy it.
//!
//! | the chunk is | taken from another object |
//! |---|---|
//! | stored as it is | like any right bytes: its hash leaves no others |
//! | packed into another length | never |
//! | packed into the same length | with all else that is damaged in the object, which is written anew as a whole: the store takes it only with its hash |
//!
//! A manifest is named by its hash and the same everywhere, too: [`repair_manifest`] comes first, for without it nothing
//! is known of a version.

mod by_hash;
mod patched;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::sync::Arc;

use headwater_store::{Hash, Holes, Object, Patch, Store, StoreError, StoreErrorKind};

use self::by_hash::ByHash;
use self::patched::Patched;
use crate::chunk::unpack;
use crate::error::{ImageError, ImageErrorKind};
use crate::manifest::{ChunkRef, Manifest, ObjectRef};
use crate::progress::{Cancel, Progress};
use crate::units::{u64_of, usize_of_u32};
use crate::verify::{DamagedChunk, Verified, open_of, verify_in};
use crate::verify_round::VerifyRound;

/// Right bytes that wait in memory to be put in place, but for those of one chunk.
const PATCHES_MAX_BYTES: usize = 32 << 20;

/// A copy reads an object in one go, and patches ask a source for each chunk: so it may read so many times what they would.
const COPY_MAX_TIMES: u64 = 16;

/// Why an object that was copied is not copied again.
const COPIED_BEFORE: &str =
    "it was copied in this repair, and is damaged again: the disk of the store may be failing";
/// Why packed chunks of other objects are not tried.
const MORE_IS_DAMAGED: &str =
    "more is damaged in it, so that its hash could not say whether they are packed in the same way";
/// Why packed chunks of other objects are refused.
const NOT_THE_SAME: &str =
    "with them its hash is not its name: another level or zstd packed them, or it is damaged elsewhere too";

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

/// How far a repair is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RepairProgress {
    /// It puts right what is listed as damaged.
    Repairing {
        /// Chunks and data objects that were tried.
        done: u64,
        /// Chunks and data objects that are listed.
        listed: u64,
        /// Bytes of data objects that were copied or written anew, as a whole.
        copied_bytes: u64,
    },
    /// It verifies the version again.
    Verifying(Progress),
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
                store.repair_manifest(manifest, &bytes)?;
                return Ok(true);
            }
            Err(e) => why = format!("{}: {e}", source.shown()),
        }
    }
    Err(ImageError::new(found.kind(), format!("{found}; it cannot be repaired: {why}")))
}

/// Repairs what [`verify_in`] found in the version with this manifest, from the first of `sources` that has it or from another data
/// object, and verifies the version again, in the same round, where something was done: what was right then is not read again.
/// Where more chunks are damaged than are listed, it goes on with the next ones for as long as they get fewer, and it goes on with data
/// objects of which only now all damaged chunks are right, so that more of them was looked at. `progress` is told how far it is.
pub fn repair(
    store: &dyn Store,
    manifest: Hash,
    found: &Verified,
    (round, sources): (&VerifyRound, &[Arc<dyn Store>]),
    cancel: &Cancel,
    progress: &mut dyn FnMut(RepairProgress),
) -> Result<Repaired, ImageError> {
    if found.is_sound() {
        return Ok(Repaired::default());
    }
    let _pin = store.pin(manifest)?;
    let parsed = Manifest::decode(&store.manifest(manifest)?)?;
    let repair = Repair::new(store, &parsed, (round, sources), cancel, progress);
    let mut outcome = Repaired { left: found.clone(), ..Repaired::default() };
    let mut known: BTreeSet<Hash> = found.objects.iter().map(|object| object.object).collect();
    loop {
        let before = (outcome.chunks, outcome.objects);
        // What could not be repaired is tried, and told, again.
        outcome.reasons.clear();
        repair.listed(&mut outcome)?;
        if (outcome.chunks, outcome.objects) == before {
            return Ok(outcome);
        }
        let again = &mut |at| repair.tell(RepairProgress::Verifying(at));
        let left = verify_in(store, manifest, round, cancel, again)?;
        let is_fewer = left.damaged_chunks < outcome.left.damaged_chunks;
        let had_more = outcome.left.unlisted() > 0;
        outcome.left = left;
        // Each of them once: so it ends.
        let new = outcome.left.objects.iter().filter(|object| known.insert(object.object)).count();
        let goes_on = (had_more && is_fewer) || new > 0;
        if outcome.left.is_sound() || !goes_on {
            return Ok(outcome);
        }
    }
}

/// One repair.
struct Repair<'a> {
    store: &'a dyn Store,
    manifest: &'a Manifest,
    sources: &'a [Arc<dyn Store>],
    /// The store itself, then the sources.
    by_hash: Vec<ByHash<'a>>,
    round: &'a VerifyRound,
    cancel: &'a Cancel,
    /// Objects that were to be copied, and why they are not again. Each is tried once, as a copy may take long to fail.
    tried: RefCell<BTreeMap<Hash, String>>,
    /// Whoever is told how far it is.
    progress: RefCell<&'a mut dyn FnMut(RepairProgress)>,
    at: At,
}

/// How far a repair of what is listed is, as [`RepairProgress::Repairing`] has it.
#[derive(Default)]
struct At {
    done: Cell<u64>,
    listed: Cell<u64>,
    copied_bytes: Cell<u64>,
}

impl<'a> Repair<'a> {
    fn new(
        store: &'a dyn Store,
        manifest: &'a Manifest,
        (round, sources): (&'a VerifyRound, &'a [Arc<dyn Store>]),
        cancel: &'a Cancel,
        progress: &'a mut dyn FnMut(RepairProgress),
    ) -> Self {
        let own = ByHash::new(store, round, true);
        let theirs = sources.iter().map(|source| ByHash::new(source.as_ref(), round, false));
        let by_hash = iter::once(own).chain(theirs).collect();
        let (progress, at, tried) = (RefCell::new(progress), At::default(), RefCell::default());
        Self { store, manifest, sources, by_hash, round, cancel, tried, progress, at }
    }

    fn tell(&self, at: RepairProgress) {
        // It is free: who is told knows nothing of this repair, and cannot come back to it.
        if let Ok(mut progress) = self.progress.try_borrow_mut() {
            (*progress)(at);
        }
    }

    /// So many of what is listed are dealt with.
    fn tell_done(&self, done: u64) {
        self.at.done.set(done);
        let (listed, copied_bytes) = (self.at.listed.get(), self.at.copied_bytes.get());
        self.tell(RepairProgress::Repairing { done, listed, copied_bytes });
    }

    /// One chunk more is.
    fn tell_one_more(&self) {
        self.tell_done(self.at.done.get().saturating_add(1));
    }

    fn tell_copied(&self, copied_bytes: u64) {
        self.at.copied_bytes.set(copied_bytes);
        self.tell_done(self.at.done.get());
    }

    /// Repairs what is listed as damaged, and notes what came of it.
    fn listed(&self, outcome: &mut Repaired) -> Result<(), ImageError> {
        let found = outcome.left.clone();
        let listed = u64_of(found.objects.len()).saturating_add(u64_of(found.damaged.len()));
        self.at.listed.set(listed);
        self.tell_done(0);
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
        // With an object that was copied, its chunks are right, too.
        let mut left: u64 = by_object.values().map(|damaged| u64_of(damaged.len())).sum();
        self.tell_done(listed.saturating_sub(left));
        by_object.into_iter().try_for_each(|(object, damaged)| {
            let is_lost = found.objects.iter().any(|lost| lost.object == object);
            left = left.saturating_sub(u64_of(damaged.len()));
            self.chunks(object, &damaged, is_lost, outcome)?;
            self.tell_done(listed.saturating_sub(left));
            Ok(())
        })
    }

    /// Repairs chunks of one object, as many at a time as there is room for. A store across a network writes objects only as a
    /// whole: there one with more damage than that is copied, and elsewhere one of which much is damaged, if that can be. With `is_lost` the
    /// object is no good as a whole, and could not be copied.
    fn chunks(
        &self,
        object: Hash,
        damaged: &[&DamagedChunk],
        is_lost: bool,
        outcome: &mut Repaired,
    ) -> Result<(), ImageError> {
        let all_bytes: u64 = damaged.iter().map(|chunk| u64::from(chunk.stored_bytes)).sum();
        if self.store.is_remote() && all_bytes > u64_of(PATCHES_MAX_BYTES) {
            let why = format!("object {object} is damaged in {} places", damaged.len());
            self.whole(object, &why, outcome);
            return Ok(());
        }
        if !is_lost
            && self.object(object).is_ok_and(|it| is_for_a_copy(it.len_bytes, all_bytes, &outcome.left))
            && self.copy_first(object, outcome)
        {
            return Ok(());
        }
        let (mut patches, mut bytes) = (Vec::new(), 0usize);
        let (mut missing, mut stays_damaged) = (Vec::new(), false);
        let mut damaged = damaged.iter().peekable();
        while let Some(chunk) = damaged.next() {
            self.cancel.check("the repair")?;
            match self.right_bytes(chunk, is_lost) {
                Ok(patch) => {
                    bytes = bytes.saturating_add(patch.bytes.len());
                    patches.push(patch);
                    self.tell_one_more();
                }
                Err(why) if self.is_packed(chunk) && !is_lost => missing.push((*chunk, why)),
                Err(why) => {
                    outcome.reasons.push(format!("{chunk}: {why}"));
                    stays_damaged = true;
                    self.tell_one_more();
                }
            }
            // An object that is written only as a whole gets all at once, and what is missing is looked for at the end.
            let must_wait = self.store.is_remote() && !missing.is_empty();
            let is_due = bytes >= PATCHES_MAX_BYTES || damaged.peek().is_none();
            if must_wait || !is_due || patches.is_empty() {
                continue;
            }
            let is_done = match self.store.repair_object(object, &patches) {
                Ok(()) => {
                    outcome.chunks += u64_of(patches.len());
                    patches.clear();
                    bytes = 0;
                    continue;
                }
                Err(e) if e.kind() == StoreErrorKind::Damaged => self.whole(object, &e, outcome),
                Err(e) => {
                    outcome.reasons.push(e.to_string());
                    false
                }
            };
            if !is_done {
                outcome.reasons.extend(missing.iter().map(|(chunk, why)| format!("{chunk}: {why}")));
            }
            return Ok(());
        }
        self.with_other_objects(object, missing, patches, stays_damaged, outcome)
    }

    /// Repairs packed chunks of an object, which no source has in it, with equal ones of other objects, together with `patches`: where
    /// nothing that is known stays damaged in it, as only the hash of all of it says whether they are packed in the same way.
    fn with_other_objects(
        &self,
        object: Hash,
        missing: Vec<(&DamagedChunk, String)>,
        mut patches: Vec<Patch>,
        mut stays_damaged: bool,
        outcome: &mut Repaired,
    ) -> Result<(), ImageError> {
        self.cancel.check("the repair")?;
        let has_waited = !patches.is_empty();
        let all_bytes: u64 = missing.iter().map(|(chunk, _)| u64::from(chunk.stored_bytes)).sum();
        if all_bytes > u64_of(PATCHES_MAX_BYTES) {
            outcome.reasons.push(format!(
                "data object {object}: no source has it, {all_bytes} bytes of packed chunks are damaged, \
                 and at most {PATCHES_MAX_BYTES} are taken from other ones"
            ));
            return Ok(());
        }
        for (chunk, why) in missing {
            self.cancel.check("the repair")?;
            match self.of_other_object(chunk) {
                Ok(patch) => patches.push(patch),
                Err(other) => {
                    outcome.reasons.push(format!("{chunk}: {why}; {other}"));
                    stays_damaged = true;
                }
            }
            self.tell_one_more();
        }
        if patches.is_empty() {
            return Ok(());
        }
        let count = u64_of(patches.len());
        let rewritten =
            if stays_damaged { Err(MORE_IS_DAMAGED.to_owned()) } else { self.rewrite(object, patches)? };
        match rewritten {
            Ok(()) => outcome.chunks += count,
            Err(why) => {
                let why =
                    format!("data object {object}: no packed chunks of other ones are written to it: {why}");
                if has_waited {
                    self.whole(object, &why, outcome);
                } else {
                    outcome.reasons.push(why);
                }
            }
        }
        Ok(())
    }

    /// Writes an object anew, with these patches, or says why not. The store takes it only with the hash that is its name.
    fn rewrite(&self, object: Hash, patches: Vec<Patch>) -> Result<Result<(), String>, ImageError> {
        let Err(e) = self.write_patched(object, patches) else { return Ok(Ok(())) };
        self.cancel.check("the repair")?;
        if e.kind() == StoreErrorKind::Damaged {
            tracing::debug!(%object, error = %e, "it is not right with packed chunks of other data objects");
            return Ok(Err(NOT_THE_SAME.to_owned()));
        }
        Ok(Err(e.to_string()))
    }

    fn write_patched(&self, object: Hash, mut patches: Vec<Patch>) -> Result<(), StoreError> {
        patches.sort_by_key(|patch| patch.offset);
        let patched = Patched { damaged: self.store.open_object(object)?, patches };
        let mut read_bytes = 0_u64;
        let before = self.at.copied_bytes.get();
        let mut go_on = |bytes: u64| {
            self.round.take(bytes.saturating_sub(read_bytes), self.cancel);
            read_bytes = bytes;
            self.tell_copied(before.saturating_add(bytes));
            self.go_on()
        };
        let mut publication = self.store.publish()?;
        headwater_store::copy_object(publication.as_mut(), &patched, &mut go_on)
    }

    /// Copies an object of which much is damaged, unless that was tried before. Returns whether it is right now.
    fn copy_first(&self, object: Hash, outcome: &mut Repaired) -> bool {
        if self.tried_before(object).is_some() {
            return false;
        }
        match self.copy_object(object) {
            Ok(()) => {
                outcome.objects += 1;
                true
            }
            Err(why) => {
                tracing::info!(%object, why, "much of it is damaged, and is repaired chunk by chunk, as it cannot be copied");
                false
            }
        }
    }

    /// Copies an object as a whole, which `why` asks for. Returns whether it is right now.
    fn whole(&self, object: Hash, why: &dyn std::fmt::Display, outcome: &mut Repaired) -> bool {
        let copied = self.copy_object(object);
        match &copied {
            Ok(()) => outcome.objects += 1,
            Err(e) => outcome.reasons.push(format!("{why}; nor can it be copied as a whole: {e}")),
        }
        copied.is_ok()
    }

    /// Copies an object from the first source that has it, unless that was tried before.
    fn copy_object(&self, id: Hash) -> Result<(), String> {
        if let Some(why) = self.tried_before(id) {
            return Err(why);
        }
        let copied = self.copy_from_sources(id);
        let why_not_again = copied.clone().err().unwrap_or_else(|| COPIED_BEFORE.to_owned());
        // It is free: nobody holds it for longer than this.
        if let Ok(mut tried) = self.tried.try_borrow_mut() {
            tried.insert(id, why_not_again);
        }
        copied
    }

    /// Why an object is not to be copied once more.
    fn tried_before(&self, id: Hash) -> Option<String> {
        self.tried.try_borrow().ok().and_then(|tried| tried.get(&id).cloned())
    }

    /// Those that have all that the version needs of it come first; of the others the rest is taken from what is here.
    fn copy_from_sources(&self, id: Hash) -> Result<(), String> {
        let ObjectRef { id, len_bytes } = self.object(id)?;
        let mut why = "no other store was named".to_owned();
        let before = self.at.copied_bytes.get();
        let mut go_on = |bytes: u64| {
            self.tell_copied(before.saturating_add(bytes));
            self.go_on()
        };
        let mut lacking = Vec::new();
        let mut copy = |object: &dyn Object, why: &mut String| {
            let outcome = self.store.publish().and_then(|mut publication| {
                headwater_store::copy_object(publication.as_mut(), object, &mut go_on)
            });
            match outcome {
                Ok(()) => Ok(true),
                // It takes as much room from another source.
                Err(e) if e.kind() == StoreErrorKind::NoSpace => Err(e.to_string()),
                Err(e) => {
                    *why = e.to_string();
                    Ok(false)
                }
            }
        };
        for source in self.sources {
            let object = match source.open_object_of(id, len_bytes) {
                Ok(object) => object,
                Err(e) => {
                    why = e.to_string();
                    continue;
                }
            };
            let mut holes = object.holes();
            // Of several servers not all may have been heard. Where none was, another source is asked first.
            if holes.as_ref().is_ok_and(|holes| self.lacks(id, holes))
                && let Ok(now) = object.holes_uncached()
            {
                holes = Ok(now);
            }
            match holes {
                Ok(holes) if self.lacks(id, &holes) => lacking.push((source.shown(), object)),
                Ok(_) => {
                    if copy(object.as_ref(), &mut why)? {
                        return Ok(());
                    }
                }
                Err(e) => why = e.to_string(),
            }
        }
        for (shown, object) in lacking {
            let own = self.store.open_object(id).and_then(|own| own.holes());
            let is_enough = own.is_ok_and(|own| !self.lacks(id, &own));
            if !is_enough {
                why = format!("{shown} has given back some of what this version needs of it");
            } else if copy(object.as_ref(), &mut why)? {
                return Ok(());
            }
        }
        Err(why)
    }

    /// Whether something is gone of an object that the version needs.
    fn lacks(&self, id: Hash, holes: &Holes) -> bool {
        let number = self.manifest.objects().iter().position(|object| object.id == id);
        let stretch =
            |chunk: &ChunkRef| chunk.offset..chunk.offset.saturating_add(u64::from(chunk.stored_bytes));
        let chunks = self.manifest.data().map(|(_, chunk)| chunk);
        !holes.is_empty()
            && chunks
                .filter(|chunk| Some(usize_of_u32(chunk.object)) == number)
                .any(|chunk| holes.overlap(&stretch(chunk)))
    }

    fn go_on(&self) -> Result<(), StoreError> {
        if self.cancel.is_cancelled() {
            return Err(StoreError::new(StoreErrorKind::Io, "the repair was cancelled"));
        }
        Ok(())
    }

    /// The right bytes of a chunk, as they are stored: those of the same object in a source, or else of any object, where no other bytes
    /// can be right.
    fn right_bytes(&self, damaged: &DamagedChunk, is_lost: bool) -> Result<Patch, String> {
        let (chunk, object) = (self.chunk(damaged)?, self.object(damaged.object)?);
        let mut why = "no other store was named".to_owned();
        for source in self.sources {
            match read_checked(source.as_ref(), object, chunk, self.manifest.chunk_bytes(), unpack_as_packed)
            {
                Ok(bytes) => return Ok(Patch { offset: chunk.offset, bytes }),
                Err(e) => why = format!("{}: {e}", source.shown()),
            }
        }
        if is_lost || self.is_packed(damaged) {
            return Err(why);
        }
        self.of_other_object(damaged).map_err(|other| format!("{why}; {other}"))
    }

    /// Bytes of the same length as another object has them, from which the right chunk is unpacked.
    fn of_other_object(&self, damaged: &DamagedChunk) -> Result<Patch, String> {
        let chunk = self.chunk(damaged)?;
        let mut reasons = Vec::new();
        for by_hash in &self.by_hash {
            match by_hash.read(chunk, damaged.object, self.manifest, self.cancel) {
                Ok(bytes) => return Ok(Patch { offset: chunk.offset, bytes }),
                Err(why) => reasons.push(format!("{}: {why}", by_hash.store.shown())),
            }
        }
        Err(reasons.join("; "))
    }

    fn chunk(&self, damaged: &DamagedChunk) -> Result<&ChunkRef, String> {
        let index = damaged.image_offset / u64::from(self.manifest.chunk_bytes());
        self.manifest.chunk(index).ok_or_else(|| "it is not in the manifest".to_owned())
    }

    /// A data object of the version, with the length that it must have.
    fn object(&self, id: Hash) -> Result<ObjectRef, String> {
        let object = self.manifest.objects().iter().find(|object| object.id == id);
        object.copied().ok_or_else(|| "it is not in the manifest".to_owned())
    }

    fn is_packed(&self, damaged: &DamagedChunk) -> bool {
        damaged.stored_bytes != self.manifest.chunk_bytes()
    }
}

/// Whether so much of an object is damaged that all of it is to be copied, if that can be. `listed_bytes` of it are listed. Where more is
/// damaged than is listed, each list that was mended has all that is still damaged read again, to find the next one: with a million
/// chunks that would be a hundred times. A little of a large object is mended chunk by chunk all the same: a copy has it twice for a
/// while, and machines need the room.
fn is_for_a_copy(len_bytes: u64, listed_bytes: u64, found: &Verified) -> bool {
    let lists = found.damaged_chunks.div_ceil(u64_of(found.damaged.len()).max(1));
    if lists <= 1 && listed_bytes <= u64_of(PATCHES_MAX_BYTES) {
        return false;
    }
    // It is taken to have its share of what is not listed.
    let damaged_bytes = listed_bytes.saturating_mul(lists);
    len_bytes <= damaged_bytes.saturating_mul(lists).saturating_mul(COPY_MAX_TIMES)
}

/// Unpacks a chunk and checks its hash.
type Unpack = fn(&[u8], &mut [u8], &Hash) -> Result<(), ImageError>;

fn read_checked(
    source: &dyn Store,
    object: ObjectRef,
    chunk: &ChunkRef,
    chunk_bytes: u32,
    unpack: Unpack,
) -> Result<Vec<u8>, ImageError> {
    let object = open_of(source, &object)?;
    let mut stored = vec![0; usize_of_u32(chunk.stored_bytes)];
    let mut content = vec![0; usize_of_u32(chunk_bytes)];
    object.read_checked(chunk.offset, &mut stored, &mut |stored| {
        unpack(stored, &mut content, &chunk.hash)
            .map_err(|e| StoreError::new(StoreErrorKind::Damaged, e.to_string()))
    })?;
    Ok(stored)
}

/// As [`unpack`], and refuses a packed chunk with the one bit set that RFC 8878 has decoders ignore: in place of the right one it would
/// give right chunks, and an object without the hash that is its name. Another packing of the same content and length gets
/// past this; a copy of the object finds it.
fn unpack_as_packed(stored: &[u8], into: &mut [u8], hash: &Hash) -> Result<(), ImageError> {
    // The descriptor of a frame, behind its magic number, and the unused bit of it (RFC 8878, 3.1.1.1.1.3).
    const DESCRIPTOR: usize = 4;
    const UNUSED: u8 = 1 << 4;
    if stored.len() != into.len() && stored.get(DESCRIPTOR).is_some_and(|byte| byte & UNUSED != 0) {
        let why = "a bit is set in it that unpacking ignores, so that its object would not have its hash";
        return Err(ImageError::new(ImageErrorKind::Damaged, why));
    }
    unpack(stored, into, hash)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::Packer;

    #[test]
    fn much_damage_is_for_a_copy_and_a_little_of_a_large_object_is_not() {
        const MIB: u64 = 1 << 20;
        let chunk = DamagedChunk {
            image_offset: 0,
            image_bytes: 4096,
            object: Hash([0; 32]),
            object_offset: 16,
            stored_bytes: 4096,
            reason: "it is wrong".to_owned(),
        };
        // Of so many damaged chunks ten are listed.
        let found = |damaged_chunks| Verified {
            damaged_chunks,
            damaged: vec![chunk.clone(); 10],
            ..Verified::default()
        };
        // All are listed: what fits into memory is put in place at once.
        assert!(!is_for_a_copy(32 * MIB, 32 * MIB, &found(10)));
        assert!(is_for_a_copy(33 * MIB, 33 * MIB, &found(10)));
        assert!(is_for_a_copy(16 * 33 * MIB, 33 * MIB, &found(10)));
        assert!(!is_for_a_copy(16 * 33 * MIB + 1, 33 * MIB, &found(10)));
        // More are damaged than are listed.
        assert!(is_for_a_copy(MIB, MIB / 10, &found(100)));
        assert!(is_for_a_copy(16 * 4 * MIB, MIB, &found(20)));
        assert!(!is_for_a_copy(16 * 4 * MIB + 1, MIB, &found(20)));
        assert!(!is_for_a_copy(MIB, 0, &found(100)));
    }

    #[test]
    fn a_bit_that_unpacking_ignores_is_not_put_in_place() {
        let chunk: Vec<u8> = (0..4096u32).map(|at| (at / 64) as u8).collect();
        let (hash, mut out) = (Hash::of(&chunk), vec![0; 4096]);
        let mut packed = vec![0; 4096];
        let len = Packer::new(3).unwrap().pack(&chunk, &mut packed);
        packed.truncate(len);
        unpack_as_packed(&packed, &mut out, &hash).unwrap();
        packed[4] ^= 1 << 4;
        unpack(&packed, &mut out, &hash).unwrap();
        let refused = unpack_as_packed(&packed, &mut out, &hash).unwrap_err();
        assert_eq!(refused.kind(), ImageErrorKind::Damaged);
        // What is stored as it is has bits of its own.
        let mut chunk = chunk;
        chunk[4] |= 1 << 4;
        unpack_as_packed(&chunk, &mut out, &Hash::of(&chunk)).unwrap();
    }
}
