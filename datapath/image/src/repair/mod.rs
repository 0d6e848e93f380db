//! Repair: replaces damaged bytes that a verification found by right bytes from another store or server.
//!
//! A version has the same objects in all stores, so another store has a damaged chunk at the same offset of
//! the same object. It is read there and checked against the hash in the manifest before it is written. What
//! cannot be repaired stays as it is.
//!
//! # Whole copies
//! An object is copied as a whole in these cases:
//! - It is lost or has the wrong length.
//! - It is damaged in a part that this version does not need, and that is to be checked with this version
//!   (`VerifyRound`).
//! - More than 32 MiB of it is damaged, and the store can only rewrite whole objects (S3).
//! - So much of it is damaged that a copy is cheaper (`is_for_a_copy`). If it cannot be copied, for example
//!   because there is no space for two copies, it is repaired chunk by chunk instead.
//!
//! # Chunks of other objects
//! Stores to which versions were added in another order have equal chunks in other objects. So if no source
//! has the object, its chunk is searched by its hash (`ByHash`), in the store itself and then in the sources.
//! The content of such a chunk is right, but its compressed bytes can differ, because another level or
//! release of zstd compresses differently, usually to another length. With other bytes the object would no
//! longer have the hash in its name, and could no longer be copied.
//!
//! | the chunk in the other object is | it is used |
//! |---|---|
//! | stored uncompressed | like any right bytes: its hash determines its bytes |
//! | compressed to another length | never |
//! | compressed to the same length | together with repairs of all other damage in the object, which is rewritten as a whole: the store accepts it only if its hash is right |
//!
//! A manifest is named by its hash and the same in all stores, too. [`repair_manifest`] comes first, because
//! without its manifest nothing is known about a version.

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

/// The most right bytes in memory that wait to be written, not counting those of one chunk.
const PATCHES_MAX_BYTES: usize = 32 << 20;

/// A copy reads an object sequentially, while patches request each chunk from a source. So a copy may read
/// this many times the bytes that patches would.
const COPY_MAX_TIMES: u64 = 16;

/// Why an object that was copied is not copied again.
const COPIED_BEFORE: &str =
    "it was copied in this repair, and is damaged again: the disk of the store may be failing";
/// Why compressed chunks of other objects are not tried.
const MORE_IS_DAMAGED: &str =
    "more of it is damaged, so its hash cannot show whether they are compressed in the same way";
/// Why compressed chunks of other objects are refused.
const NOT_THE_SAME: &str = "with them the object's hash is wrong: they were compressed with another level or release of zstd, or the object has other damage";

/// The result of a repair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repaired {
    /// Chunks that were repaired.
    pub chunks: u64,
    /// Objects that were copied as a whole.
    pub objects: u64,
    /// The remaining damage.
    pub left: Verified,
    /// Why something could not be repaired, one line each.
    pub reasons: Vec<String>,
}

/// The progress of a repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RepairProgress {
    /// It repairs the listed damage.
    Repairing {
        /// Chunks and data objects that were tried.
        done: u64,
        /// Chunks and data objects that are listed.
        listed: u64,
        /// Bytes of data objects that were copied or rewritten as a whole.
        copied_bytes: u64,
    },
    /// It verifies the version again.
    Verifying(Progress),
}

/// Repairs the lost or damaged manifest of a version that this store lists, from the first of `sources` that
/// has it. Returns whether a repair was necessary.
pub fn repair_manifest(
    store: &dyn Store,
    manifest: Hash,
    sources: &[Arc<dyn Store>],
) -> Result<bool, ImageError> {
    let Err(found) = store.manifest(manifest) else { return Ok(false) };
    let found = ImageError::from(found);
    // The manifest of a version that was removed in the meantime must not be restored.
    let is_listed =
        store.listed()?.images.iter().any(|image| image.versions.iter().any(|v| v.manifest == manifest));
    if !is_listed {
        return Err(found);
    }
    let mut why = "no other store was given".to_owned();
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

/// Repairs the damage that [`verify_in`] found in the version with this manifest, from the first of `sources`
/// that has the bytes, or from another data object. If something was repaired, it verifies the version again
/// in the same round, without rereading chunks that were right.
/// If more chunks are damaged than are listed, it continues with the next ones for as long as their number
/// decreases. It also continues with data objects of which all damaged chunks are right now, because their
/// whole content can then be checked. `progress` is called with the progress.
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
        // Everything that could not be repaired is tried, and reported, again.
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
        // Each object counts once, so the loop ends.
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
    /// Objects that were to be copied, and why they are not copied again. Each is tried once, because a copy
    /// may take long to fail.
    tried: RefCell<BTreeMap<Hash, String>>,
    /// Called with the progress.
    progress: RefCell<&'a mut dyn FnMut(RepairProgress)>,
    at: At,
}

/// The progress of repairing the listed damage, as in [`RepairProgress::Repairing`].
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
        // The borrow succeeds: the callback does not know this repair and cannot call it.
        if let Ok(mut progress) = self.progress.try_borrow_mut() {
            (*progress)(at);
        }
    }

    /// Reports that `done` of the listed items are finished.
    fn tell_done(&self, done: u64) {
        self.at.done.set(done);
        let (listed, copied_bytes) = (self.at.listed.get(), self.at.copied_bytes.get());
        self.tell(RepairProgress::Repairing { done, listed, copied_bytes });
    }

    /// Reports one more finished chunk.
    fn tell_one_more(&self) {
        self.tell_done(self.at.done.get().saturating_add(1));
    }

    fn tell_copied(&self, copied_bytes: u64) {
        self.at.copied_bytes.set(copied_bytes);
        self.tell_done(self.at.done.get());
    }

    /// Repairs the listed damage, and records the result.
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
        // If an object was copied, its chunks are right, too.
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

    /// Repairs chunks of one object, as many at a time as fit into memory. A remote store writes objects only
    /// as a whole, so there an object with more damage than that is copied. In other stores an object with
    /// much damage is copied if possible. With `is_lost` the whole object is unusable, and could not be
    /// copied.
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
            // An object that is written only as a whole gets all patches at once, and missing chunks are
            // searched at the end.
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

    /// Repairs compressed chunks that no source has in this object with equal chunks of other objects,
    /// together with `patches`. No other known damage may remain in the object, because only the hash of the
    /// whole object shows whether the chunks are compressed in the same way.
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
                "data object {object}: no source has it, {all_bytes} bytes of compressed chunks are damaged, \
                 and at most {PATCHES_MAX_BYTES} are taken from other data objects"
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
                let why = format!(
                    "data object {object}: cannot replace its damaged chunks with copies from other data objects: {why}"
                );
                if has_waited {
                    self.whole(object, &why, outcome);
                } else {
                    outcome.reasons.push(why);
                }
            }
        }
        Ok(())
    }

    /// Rewrites an object with these patches, or returns the reason if that fails. The store accepts it only
    /// with the hash in its name.
    fn rewrite(&self, object: Hash, patches: Vec<Patch>) -> Result<Result<(), String>, ImageError> {
        let Err(e) = self.write_patched(object, patches) else { return Ok(Ok(())) };
        self.cancel.check("the repair")?;
        if e.kind() == StoreErrorKind::Damaged {
            tracing::debug!(%object, error = %e, "with compressed chunks of other data objects an object does not have the right hash");
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

    /// Copies an object with much damage, unless that was tried before. Returns whether it is right now.
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
                tracing::info!(%object, why, "a data object with much damage cannot be copied: it is repaired chunk by chunk");
                false
            }
        }
    }

    /// Copies an object as a whole for the reason `why`. Returns whether it is right now.
    fn whole(&self, object: Hash, why: &dyn std::fmt::Display, outcome: &mut Repaired) -> bool {
        let copied = self.copy_object(object);
        match &copied {
            Ok(()) => outcome.objects += 1,
            Err(e) => outcome.reasons.push(format!("{why}; it cannot be copied as a whole either: {e}")),
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
        // The borrow succeeds: no other caller holds it.
        if let Ok(mut tried) = self.tried.try_borrow_mut() {
            tried.insert(id, why_not_again);
        }
        copied
    }

    /// The reason not to copy an object once more.
    fn tried_before(&self, id: Hash) -> Option<String> {
        self.tried.try_borrow().ok().and_then(|tried| tried.get(&id).cloned())
    }

    /// Sources that have everything that the version needs of the object come first. A copy from another
    /// source takes the remaining bytes from the existing object.
    fn copy_from_sources(&self, id: Hash) -> Result<(), String> {
        let ObjectRef { id, len_bytes } = self.object(id)?;
        let mut why = "no other store was given".to_owned();
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
                // A copy from another source needs the same space.
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
            // If only some servers of the source answered, the list of holes may be wrong: request it again. If none
            // answered, try another source first.
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
                why = format!("{shown} has deleted parts of the object that this version needs");
            } else if copy(object.as_ref(), &mut why)? {
                return Ok(());
            }
        }
        Err(why)
    }

    /// Whether the version needs something in these holes of an object.
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

    /// The right stored bytes of a chunk: from the same object in a source or, if only one sequence of bytes
    /// can be right, from any object.
    fn right_bytes(&self, damaged: &DamagedChunk, is_lost: bool) -> Result<Patch, String> {
        let (chunk, object) = (self.chunk(damaged)?, self.object(damaged.object)?);
        let mut why = "no other store was given".to_owned();
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

    /// Bytes of the same length from another object, which decompress to the right chunk.
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

/// Whether so much of an object is damaged that the whole object should be copied if possible.
///
/// `found` lists a limited number of damaged chunks; `listed_bytes` is the size of those in this object. If more
/// chunks are damaged, all remaining damage is read again after each repaired list, to find the next list. With a
/// million damaged chunks that would be a hundred times. If only a little of a large object is damaged, it is still
/// repaired chunk by chunk, because a copy temporarily needs the space of the object twice.
fn is_for_a_copy(len_bytes: u64, listed_bytes: u64, found: &Verified) -> bool {
    let lists = found.damaged_chunks.div_ceil(u64_of(found.damaged.len()).max(1));
    if lists <= 1 && listed_bytes <= u64_of(PATCHES_MAX_BYTES) {
        return false;
    }
    // Assumes that the unlisted damage is distributed like the listed damage.
    let damaged_bytes = listed_bytes.saturating_mul(lists);
    len_bytes <= damaged_bytes.saturating_mul(lists).saturating_mul(COPY_MAX_TIMES)
}

/// Decompresses a chunk and checks its hash.
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

/// As [`unpack`], but refuses a compressed chunk with the one bit set that RFC 8878 tells decoders to ignore.
/// Such a chunk would decompress correctly, but the object would not have the hash in its name. Another
/// compression of the same content and length is not detected here; a copy of the object detects it.
fn unpack_as_packed(stored: &[u8], into: &mut [u8], hash: &Hash) -> Result<(), ImageError> {
    // The descriptor of a frame, after its magic number, and its unused bit (RFC 8878, 3.1.1.1.1.3).
    const DESCRIPTOR: usize = 4;
    const UNUSED: u8 = 1 << 4;
    if stored.len() != into.len() && stored.get(DESCRIPTOR).is_some_and(|byte| byte & UNUSED != 0) {
        let why = "the unused bit in the header of its zstd frame is set: it decompresses correctly, but the data \
                   object with it would not match its hash";
        return Err(ImageError::new(ImageErrorKind::Damaged, why));
    }
    unpack(stored, into, hash)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::Packer;

    #[test]
    fn much_damage_is_copied_and_little_damage_patched() {
        const MIB: u64 = 1 << 20;
        let chunk = DamagedChunk {
            image_offset: 0,
            image_bytes: 4096,
            object: Hash([0; 32]),
            object_offset: 16,
            stored_bytes: 4096,
            reason: "it is wrong".to_owned(),
        };
        // Ten of these damaged chunks are listed.
        let found = |damaged_chunks| Verified {
            damaged_chunks,
            damaged: vec![chunk.clone(); 10],
            ..Verified::default()
        };
        // All are listed: as much as fits into memory is written at once.
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
    fn a_chunk_with_an_ignored_zstd_bit_is_refused() {
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
        // An uncompressed chunk has no such bit.
        let mut chunk = chunk;
        chunk[4] |= 1 << 4;
        unpack_as_packed(&chunk, &mut out, &Hash::of(&chunk)).unwrap();
    }
}
