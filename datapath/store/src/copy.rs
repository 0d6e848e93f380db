//! Copies versions from one store to another. It copies only what the target lacks, verifies it, and writes
//! references last.
//!
//! ```text
//!   1 pin each version at the source, read its manifest: which objects does the target lack?
//!   then, version by version:
//!   2 copy these objects and check their hashes, continuing where an earlier copy stopped
//!   3 write the manifest, and the version's entry in the image's list
//!   4 copy the boot trace; for production's version, set production; after an image's last version, its channels
//! ```
//! During a copy the target reclaims nothing. An interrupted copy leaves complete objects, and one incomplete
//! object that the next copy continues. A version is listed only after all of it exists.
//!
//! If the source has only a part of a version, that version is not copied, but the others are. The same holds
//! if an object is damaged in the target and the source does not have all of it. If the target fails, or the
//! source cannot be reached, the copy ends.
//!
//! If some servers of a source do not answer, the source may report more holes in an object than it has. So
//! if the target still lacks something after a version's objects were copied, these objects are requested
//! from the source once more.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::copied::CopiedImage;
use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::holes::Holes;
use crate::name::ImageName;
use crate::needs::Needs;
use crate::refs::{Channel, Image, Pointer, Version};
use crate::store::{Object, Pin, Publication, Store};

/// Memory for manifests of versions that are copied later. Manifests beyond it are read a second time.
const MANIFESTS_MAX_BYTES: usize = 64 << 20;

/// The progress of a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyProgress {
    /// Bytes of missing objects that have been copied.
    pub done_bytes: u64,
    /// Bytes of missing objects. The number grows until all manifests are read, and if an object is copied
    /// again.
    pub total_bytes: u64,
    /// Versions that the copy should bring to the target.
    pub versions: u64,
    /// Versions whose manifests were read to find what is missing.
    pub read_versions: u64,
    /// Versions that are finished: copied, or failed with a known reason.
    pub done_versions: u64,
}

/// What a copy did.
#[derive(Clone, Debug, Default)]
pub struct Copied {
    /// Versions that are new in the target.
    pub versions: u32,
    /// Versions that the target had already.
    pub present: u32,
    /// Objects that were copied.
    pub objects: u32,
    /// Their bytes.
    pub bytes: u64,
    /// Images whose channels, scheduled promotions, notes or retired versions were changed to match the
    /// source.
    pub followed: u32,
    /// Versions that were not copied.
    pub failed: Vec<NotCopied>,
}

/// A version that was not copied.
#[derive(Clone, Debug)]
pub struct NotCopied {
    /// Its image.
    pub image: ImageName,
    /// Its number.
    pub number: u32,
    /// Why it was not copied.
    pub error: StoreError,
}

/// Called from time to time; an error ends the copy.
pub type OnProgress<'a> = dyn FnMut(CopyProgress) -> Result<(), StoreError> + 'a;

/// Called with the changes of each image when the image is finished, even if the copy then ends with an
/// error. Not called for an unchanged image.
pub type OnImage<'a> = dyn FnMut(CopiedImage) + 'a;

/// The outcome of one version or object. The outer error ends the copy; the inner error affects only this
/// version.
type Outcome<T> = Result<Result<T, StoreError>, StoreError>;

/// Copies versions, each under its own number. With `channels`, the channels of their images are set as in
/// the source. Lists of versions are not signed, so a version is copied only if the list names the same
/// objects as the manifest. Versions that the source does not have completely are in [`Copied::failed`].
pub fn copy(
    source: &dyn Store,
    target: &dyn Store,
    what: &[(Image, Vec<Version>)],
    needs: &dyn Needs,
    channels: bool,
    progress: &mut OnProgress<'_>,
) -> Result<Copied, StoreError> {
    copy_telling(source, target, what, needs, channels, (progress, &mut |_| {}))
}

/// As [`copy`], for a caller that must know what was changed in each image.
pub fn copy_telling(
    source: &dyn Store,
    target: &dyn Store,
    what: &[(Image, Vec<Version>)],
    needs: &dyn Needs,
    channels: bool,
    (progress, told): (&mut OnProgress<'_>, &mut OnImage<'_>),
) -> Result<Copied, StoreError> {
    refuse_other_chunks(source, target)?;
    let at = CopyProgress { versions: what.iter().map(versions_of).sum(), ..CopyProgress::default() };
    // Reading the lists of versions may take long, and the user may want to stop the copy meanwhile.
    refuse_conflicts(target, what, &mut || progress(at))?;
    let mut copying = Copying {
        source,
        target,
        needs,
        channels,
        holder: target.publish()?,
        missing: BTreeSet::new(),
        there: BTreeMap::new(),
        again: BTreeSet::new(),
        no_good: BTreeMap::new(),
        settled_bytes: 0,
        traced: BTreeSet::new(),
        room_bytes: MANIFESTS_MAX_BYTES,
        at,
        copied: Copied::default(),
    };
    let planned = copying.plan(what, progress)?;
    progress(copying.at)?;
    for (image, versions) in planned {
        copying.image(image, versions, (&mut *progress, &mut *told))?;
    }
    Ok(copying.copied)
}

fn versions_of((_, versions): &(Image, Vec<Version>)) -> u64 {
    u64::try_from(versions.len()).unwrap_or(u64::MAX)
}

fn refuse_other_chunks(source: &dyn Store, target: &dyn Store) -> Result<(), StoreError> {
    if source.chunk_bytes() == target.chunk_bytes() {
        return Ok(());
    }
    Err(StoreError::new(
        StoreErrorKind::Invalid,
        format!(
            "cannot copy from {} to {}: their chunk sizes are {} and {} bytes. Export the image and import it \
             there, or copy to a new store",
            source.shown(),
            target.shown(),
            source.chunk_bytes(),
            target.chunk_bytes()
        ),
    ))
}

/// A version whose manifest was read.
struct Planned<'a> {
    version: &'a Version,
    /// `None`: the manifest is read again when it is needed.
    manifest: Option<Vec<u8>>,
    /// The objects that the version needs, and their lengths.
    objects: Vec<(Hash, u64)>,
    /// Keeps the version from being removed at the source until it is copied, which may take hours. `None`:
    /// the target has the version already.
    pin: Option<Pin>,
}

impl Planned<'_> {
    /// Keeps the manifest in memory, if there is space.
    fn keep(&mut self, manifest: Vec<u8>, room_bytes: &mut usize) {
        if let Some(left) = room_bytes.checked_sub(manifest.len()) {
            *room_bytes = left;
            self.manifest = Some(manifest);
        }
    }
}

/// One copy.
struct Copying<'a> {
    source: &'a dyn Store,
    target: &'a dyn Store,
    needs: &'a dyn Needs,
    channels: bool,
    /// Held to the end, so that the target reclaims nothing that this copy wrote or needs.
    holder: Box<dyn Publication>,
    /// Objects that the target does not have yet.
    missing: BTreeSet<Hash>,
    /// The holes of objects that the target has.
    there: BTreeMap<Hash, Arc<Holes>>,
    /// Objects that were incomplete after they had been copied, and were requested from the source once more.
    again: BTreeSet<Hash>,
    /// Objects, with lengths, that the source does not have completely. They are not read again for other
    /// versions.
    no_good: BTreeMap<(Hash, u64), StoreError>,
    /// Bytes of objects that are complete. The bytes of a failed object count in the progress until the next
    /// object begins.
    settled_bytes: u64,
    /// Manifests whose boot traces were copied. Several versions may have the same manifest.
    traced: BTreeSet<Hash>,
    /// How much of [`MANIFESTS_MAX_BYTES`] is left.
    room_bytes: usize,
    at: CopyProgress,
    copied: Copied,
}

impl Copying<'_> {
    /// Pins and reads the versions that can be copied, and counts what is missing.
    fn plan<'w>(
        &mut self,
        what: &'w [(Image, Vec<Version>)],
        progress: &mut OnProgress<'_>,
    ) -> Result<Vec<(&'w Image, Vec<Planned<'w>>)>, StoreError> {
        let mut planned = Vec::new();
        for (image, versions) in what {
            let there = self.target.image(&image.name)?;
            let mut readable = Vec::new();
            for version in versions {
                // Reading the manifests of a large store takes minutes, and the user may want to stop the
                // copy meanwhile.
                progress(self.at)?;
                match self.read(image, version) {
                    Ok((mut read, manifest)) => {
                        let is_whole = self.count_missing(&read.objects, &manifest)?;
                        read.keep(manifest, &mut self.room_bytes);
                        if is_whole && there.as_ref().is_some_and(|there| lists(there, version)) {
                            read.pin = None;
                        }
                        readable.push(read);
                    }
                    Err(e) => {
                        self.failed(image, version, e, progress)?;
                        self.count_done();
                    }
                }
                self.at.read_versions = self.at.read_versions.saturating_add(1);
            }
            // Ascending, so that production's version comes before newer versions, or its failure is known
            // before them.
            readable.sort_by_key(|read| read.version.number);
            planned.push((image, readable));
        }
        Ok(planned)
    }

    fn read<'w>(&self, image: &Image, version: &'w Version) -> Result<(Planned<'w>, Vec<u8>), StoreError> {
        let pin = self.source.pin(version.manifest)?;
        let manifest = self.source.manifest(version.manifest)?;
        let objects = self.needs.objects(&manifest)?;
        must_list_all(self.source, image, version, &objects)?;
        Ok((Planned { version, manifest: None, objects, pin: Some(pin) }, manifest))
    }

    /// Returns whether the target has everything that this manifest needs of these objects.
    fn count_missing(&mut self, objects: &[(Hash, u64)], manifest: &[u8]) -> Result<bool, StoreError> {
        let mut is_whole = true;
        let lacking = self.lacking(objects, manifest)?;
        for (id, len_bytes) in objects {
            if self.missing.contains(id) {
                is_whole = false;
                continue;
            }
            if !lacking.contains(id) {
                continue;
            }
            is_whole = false;
            self.missing.insert(*id);
            self.at.total_bytes = self.at.total_bytes.saturating_add(*len_bytes);
        }
        Ok(is_whole)
    }

    /// The objects of which the target lacks something that the version with this manifest needs.
    fn lacking(&mut self, objects: &[(Hash, u64)], manifest: &[u8]) -> Result<BTreeSet<Hash>, StoreError> {
        let (mut lacking, mut with_holes) = (BTreeSet::new(), BTreeMap::new());
        for (id, _) in objects {
            let known = self.there.get(id).cloned();
            let holes = known.map_or_else(|| self.target.open_object(*id).and_then(|it| it.holes()), Ok);
            match holes {
                Ok(holes) => {
                    if !holes.is_empty() {
                        with_holes.insert(*id, Arc::clone(&holes));
                    }
                    self.there.insert(*id, holes);
                }
                // A damaged list of holes does not show which bytes exist. A copy of the object repairs it.
                Err(e) if matches!(e.kind(), StoreErrorKind::NotFound | StoreErrorKind::Damaged) => {
                    lacking.insert(*id);
                }
                Err(e) => return Err(e),
            }
        }
        self.add_needed(manifest, &with_holes, &mut lacking)?;
        Ok(lacking)
    }

    /// Adds the objects whose holes overlap something that the version with this manifest needs.
    fn add_needed(
        &self,
        manifest: &[u8],
        with_holes: &BTreeMap<Hash, Arc<Holes>>,
        lacking: &mut BTreeSet<Hash>,
    ) -> Result<(), StoreError> {
        if with_holes.is_empty() {
            return Ok(());
        }
        self.needs.stretches(manifest, &mut |id, stretch| {
            if with_holes.get(&id).is_some_and(|holes| holes.overlap(&stretch)) {
                lacking.insert(id);
            }
        })
    }

    /// The objects that are missing for the version with this manifest. The target may have an object with
    /// holes that only affect other versions; that object is not missing.
    fn missing_of(&self, objects: &[(Hash, u64)], manifest: &[u8]) -> Result<BTreeSet<Hash>, StoreError> {
        let (mut missing, mut with_holes) = (BTreeSet::new(), BTreeMap::new());
        for (id, _) in objects.iter().filter(|(id, _)| self.missing.contains(id)) {
            match self.there.get(id) {
                Some(holes) => drop(with_holes.insert(*id, Arc::clone(holes))),
                None => drop(missing.insert(*id)),
            }
        }
        self.add_needed(manifest, &with_holes, &mut missing)?;
        Ok(missing)
    }

    /// Copies the copyable versions of an image, and reports what that did.
    fn image(
        &mut self,
        image: &Image,
        versions: Vec<Planned<'_>>,
        (progress, told): (&mut OnProgress<'_>, &mut OnImage<'_>),
    ) -> Result<(), StoreError> {
        let mut did = CopiedImage::nothing(&image.name);
        let outcome = self.versions(image, versions, &mut did, progress);
        did.tried = outcome.as_ref().err().filter(|e| e.kind() == StoreErrorKind::Unknown).cloned();
        self.copied.followed = self.copied.followed.saturating_add(u32::from(did.is_followed));
        if did.is_something() {
            told(did);
        }
        outcome
    }

    /// Copies the versions of an image, then its channels.
    fn versions(
        &mut self,
        image: &Image,
        versions: Vec<Planned<'_>>,
        did: &mut CopiedImage,
        progress: &mut OnProgress<'_>,
    ) -> Result<(), StoreError> {
        if self.channels {
            keep_production(self.target, image, did)?;
        }
        let mut is_there = false;
        for planned in versions {
            progress(self.at)?;
            let version = planned.version;
            if let Some(why) = self.held_back(image, version)? {
                self.not_copied(image, version, why);
                self.count_done();
                continue;
            }
            match self.version(image, planned, did, progress)? {
                Ok(()) => is_there = true,
                Err(e) => self.failed(image, version, e, progress)?,
            }
            self.count_done();
        }
        if self.channels && is_there {
            follow(self.target, image, &self.failed_of(image), did)?;
        }
        Ok(())
    }

    fn version(
        &mut self,
        image: &Image,
        planned: Planned<'_>,
        did: &mut CopiedImage,
        progress: &mut OnProgress<'_>,
    ) -> Outcome<()> {
        let version = planned.version;
        let manifest = match planned.manifest.map_or_else(|| self.source.manifest(version.manifest), Ok) {
            Ok(manifest) => manifest,
            // The target had all of it, so it was not pinned, and it has been removed at the source since.
            Err(e)
                if e.kind() == StoreErrorKind::NotFound
                    && planned.pin.is_none()
                    && !self.is_listed(image, version)? =>
            {
                self.copied.present = self.copied.present.saturating_add(1);
                return Ok(Ok(()));
            }
            Err(e) => return Ok(Err(e)),
        };
        let missing = self.missing_of(&planned.objects, &manifest)?;
        if let Err(e) = self.objects(&planned.objects, &missing, progress)? {
            return Ok(Err(e));
        }
        let (mut publication, mut lacking) = self.begin(&planned.objects, &manifest)?;
        // Since its first answer the source may have reclaimed parts that it no longer needs. With several
        // servers, one of them may have done so.
        if !lacking.is_empty() {
            drop(publication);
            if let Err(e) = self.objects_again(&planned.objects, &lacking, progress)? {
                return Ok(Err(e));
            }
            (publication, lacking) = self.begin(&planned.objects, &manifest)?;
        }
        if let Some(id) = lacking.first() {
            return Ok(Err(StoreError::new(
                StoreErrorKind::Damaged,
                format!(
                    "{} lacks parts of the data object {id} that the version needs; it was not copied",
                    self.source.shown()
                ),
            )));
        }
        match publication.adopt(&image.name, version, &manifest)? {
            Some(adopted) => {
                self.copied.versions = self.copied.versions.saturating_add(1);
                did.adopted(version.number, adopted);
            }
            None => self.copied.present = self.copied.present.saturating_add(1),
        }
        // Set at once: newer versions follow, the other channels may follow hours later, and the copy may be
        // stopped in between.
        let is_production = |to: &Pointer| to.version == version.number;
        if self.channels && image.channel(Channel::Production).is_some_and(is_production) {
            keep_production(self.target, image, did)?;
        }
        if self.traced.insert(version.manifest) {
            copy_trace(self.source, self.target, version.manifest);
        }
        Ok(Ok(()))
    }

    /// Begins to publish a version. Returns also the objects of which the target still lacks something that
    /// the version needs.
    fn begin(
        &mut self,
        objects: &[(Hash, u64)],
        manifest: &[u8],
    ) -> Result<(Box<dyn Publication>, BTreeSet<Hash>), StoreError> {
        let publication = self.target.publish()?;
        // The new publication protects only from reclaims since its beginning, but the objects were found or
        // copied earlier. If this host was suspended in between, others may have considered it dead.
        self.holder.confirm()?;
        let lacking = self.lacking(objects, manifest)?;
        Ok((publication, lacking))
    }

    /// Copies those objects that are missing.
    fn objects(
        &mut self,
        objects: &[(Hash, u64)],
        missing: &BTreeSet<Hash>,
        progress: &mut OnProgress<'_>,
    ) -> Outcome<()> {
        for (id, len_bytes) in objects.iter().filter(|(id, _)| missing.contains(id)) {
            if let Some(e) = self.no_good.get(&(*id, *len_bytes)) {
                return Ok(Err(e.clone()));
            }
            if let Err(e) = self.object(*id, *len_bytes, progress)? {
                self.no_good.insert((*id, *len_bytes), e.clone());
                return Ok(Err(e));
            }
            self.missing.remove(id);
            self.there.remove(id);
            self.copied.objects = self.copied.objects.saturating_add(1);
            self.copied.bytes = self.copied.bytes.saturating_add(*len_bytes);
        }
        Ok(Ok(()))
    }

    /// Copies the lacking objects once more, each at most once during the whole copy.
    fn objects_again(
        &mut self,
        objects: &[(Hash, u64)],
        lacking: &BTreeSet<Hash>,
        progress: &mut OnProgress<'_>,
    ) -> Outcome<()> {
        for (id, len_bytes) in objects.iter().filter(|(id, _)| lacking.contains(id)) {
            if let Some(e) = self.no_good.get(&(*id, *len_bytes)) {
                return Ok(Err(e.clone()));
            }
            if !self.again.insert(*id) {
                continue;
            }
            // Waiting for the source may take long.
            progress(self.at)?;
            let there = self.there.get(id).cloned();
            let copied = match self.open_again(*id, *len_bytes, there.as_deref()) {
                Ok(Some(object)) => {
                    self.at.total_bytes = self.at.total_bytes.saturating_add(*len_bytes);
                    self.copy_opened(&object, progress)?
                }
                Ok(None) => continue,
                Err(e) => Err(e),
            };
            if let Err(e) = copied {
                self.no_good.insert((*id, *len_bytes), e.clone());
                return Ok(Err(e));
            }
            self.there.remove(id);
        }
        Ok(Ok(()))
    }

    /// Opens an object again. `None`: everything in the holes `before` is still missing at the source.
    fn open_again(
        &self,
        id: Hash,
        len_bytes: u64,
        before: Option<&Holes>,
    ) -> Result<Option<Watched>, StoreError> {
        let object = self.open(id, len_bytes)?;
        let now = object.holes_uncached()?;
        // Compared by bytes, because the same range may be divided into smaller nodes.
        let is_as_before = before.is_some_and(|before| now.common(before).bytes() == before.bytes());
        Ok((!is_as_before).then_some(object))
    }

    fn object(&mut self, id: Hash, len_bytes: u64, progress: &mut OnProgress<'_>) -> Outcome<()> {
        let object = match self.open(id, len_bytes) {
            Ok(object) => object,
            Err(e) => return Ok(Err(e)),
        };
        let copied = self.copy_opened(&object, progress)?;
        // If the source turns out to have all of the object, another copy repairs the damaged object in the
        // target.
        if copied.as_ref().is_err_and(StoreError::is_of_own_object)
            && self.again.insert(id)
            && let Ok(before) = object.holes()
        {
            return match self.open_again(id, len_bytes, Some(&before)) {
                Ok(Some(object)) => self.copy_opened(&object, progress),
                Ok(None) => Ok(copied),
                Err(e) => Ok(Err(e)),
            };
        }
        Ok(copied)
    }

    /// Opens an object with the length from the manifest. One of several servers may have it with another
    /// length.
    fn open(&self, id: Hash, len_bytes: u64) -> Result<Watched, StoreError> {
        let object = self.source.open_object_of(id, len_bytes)?;
        Ok(Watched { object, failed: Mutex::new(None) })
    }

    fn copy_opened(&mut self, object: &Watched, progress: &mut OnProgress<'_>) -> Outcome<()> {
        let len_bytes = object.len_bytes();
        let (before, at) = (self.settled_bytes, &mut self.at);
        let copied = copy_object(self.holder.as_mut(), object, &mut |bytes| {
            at.done_bytes = before.saturating_add(bytes);
            progress(*at)
        });
        let Err(e) = copied else {
            self.settled_bytes = before.saturating_add(len_bytes);
            self.at.done_bytes = self.settled_bytes;
            return Ok(Ok(()));
        };
        let is_source = e.kind() == StoreErrorKind::Damaged || *object.failed.lock() == Some(e.kind());
        if is_source || e.is_of_own_object() {
            return Ok(Err(e));
        }
        // The length comes from a manifest. If the source has less than that, the source is to blame and not
        // the target.
        if e.kind() == StoreErrorKind::NoSpace
            && let Some(last) = len_bytes.checked_sub(1)
            && !object.holes().is_ok_and(|holes| holes.overlap(&(last..len_bytes)))
            && let Err(short) = object.read_range(last, &mut [0])
            && short.kind() == StoreErrorKind::Damaged
        {
            return Ok(Err(short));
        }
        Err(e)
    }

    /// Records why a version is not copied. Ends the copy if other versions would fail for the same reason.
    fn failed(
        &mut self,
        image: &Image,
        version: &Version,
        error: StoreError,
        progress: &mut OnProgress<'_>,
    ) -> Result<(), StoreError> {
        // If the copy is to stop, reads of the source fail, too.
        progress(self.at)?;
        if error.kind() == StoreErrorKind::Unreachable {
            return Err(error);
        }
        let error = match error.kind() {
            // A version that is listed but missing is lost.
            StoreErrorKind::NotFound if self.is_listed(image, version)? => {
                StoreError::new(StoreErrorKind::Damaged, error.to_string())
            }
            _ => error,
        };
        self.not_copied(image, version, error);
        Ok(())
    }

    /// Counts a version as finished.
    fn count_done(&mut self) {
        self.at.done_versions = self.at.done_versions.saturating_add(1);
    }

    fn not_copied(&mut self, image: &Image, version: &Version, error: StoreError) {
        self.copied.failed.push(NotCopied { image: image.name.clone(), number: version.number, error });
    }

    /// Whether the source still lists a version.
    fn is_listed(&self, image: &Image, version: &Version) -> Result<bool, StoreError> {
        Ok(self.source.image(&image.name)?.is_some_and(|there| lists(&there, version)))
    }

    /// The versions of an image that were not copied.
    fn failed_of(&self, image: &Image) -> Vec<u32> {
        let of_image = self.copied.failed.iter().filter(|failed| failed.image == image.name);
        of_image.map(|failed| failed.number).collect()
    }

    /// A reason not to copy a version although it could be copied. If production is not set in the target,
    /// machines boot the newest version, and production cannot be set to a missing version. So if
    /// production's version was not copied, no newer version is copied, because machines would boot it. The
    /// error has the same kind as that of production's version.
    fn held_back(&self, image: &Image, version: &Version) -> Result<Option<StoreError>, StoreError> {
        let Some(pointer) = image.channel(Channel::Production).filter(|_| self.channels) else {
            return Ok(None);
        };
        if pointer.version >= version.number {
            return Ok(None);
        }
        let is_production = |it: &&NotCopied| it.image == image.name && it.number == pointer.version;
        let Some(lacking) = self.copied.failed.iter().find(is_production) else { return Ok(None) };
        if let Some(there) = self.target.image(&image.name)?
            && (there.channel(Channel::Production).is_some() || has(&there, version.number))
        {
            return Ok(None);
        }
        let mut why = format!(
            "machines would boot it instead of version {}, which production points to and which was not copied",
            pointer.version
        );
        if lacking.error.kind() == StoreErrorKind::NotFound {
            why.push_str("; the source was changed in the meantime: run the command again");
        }
        Ok(Some(StoreError::new(lacking.error.kind(), why)))
    }
}

fn has(image: &Image, number: u32) -> bool {
    image.versions.iter().any(|version| version.number == number)
}

fn lists(image: &Image, version: &Version) -> bool {
    let is_it = |there: &Version| there.number == version.number && there.manifest == version.manifest;
    image.versions.iter().any(is_it)
}

/// An object of the source that remembers the kind of its last read error. Any other error comes from the
/// target.
struct Watched {
    object: Arc<dyn Object>,
    failed: Mutex<Option<StoreErrorKind>>,
}

impl Object for Watched {
    fn id(&self) -> Hash {
        self.object.id()
    }

    fn len_bytes(&self) -> u64 {
        self.object.len_bytes()
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let outcome = self.object.read_range(offset, into);
        *self.failed.lock() = outcome.as_ref().err().map(StoreError::kind);
        outcome
    }

    fn was_wrong(&self) -> bool {
        self.object.was_wrong()
    }

    fn holes(&self) -> Result<Arc<Holes>, StoreError> {
        let outcome = self.object.holes();
        *self.failed.lock() = outcome.as_ref().err().map(StoreError::kind);
        outcome
    }

    fn holes_uncached(&self) -> Result<Arc<Holes>, StoreError> {
        let outcome = self.object.holes_uncached();
        *self.failed.lock() = outcome.as_ref().err().map(StoreError::kind);
        outcome
    }
}

/// Sets production before newer versions are copied, if the copy is going to set it. Without production,
/// machines boot the newest version.
fn keep_production(target: &dyn Store, image: &Image, did: &mut CopiedImage) -> Result<(), StoreError> {
    let Some(pointer) = image.channel(Channel::Production) else { return Ok(()) };
    let manifest_in = |image: &Image| {
        image.versions.iter().find(|it| it.number == pointer.version && !it.retired).map(|it| it.manifest)
    };
    let is_meant = |there: &Image| {
        there.channel(Channel::Production).is_none()
            && manifest_in(there).is_some()
            && manifest_in(there) == manifest_in(image)
    };
    if !target.image(&image.name)?.as_ref().is_some_and(is_meant) {
        return Ok(());
    }
    // Others may change the image at any time, so the condition is checked again inside the change.
    change(target, &image.name, did, &mut |there| {
        if is_meant(there) { there.promote(pointer.clone()).map(drop) } else { Ok(()) }
    })
}

/// Changes the channels to match the source. If a channel points to a version that was not copied, all
/// channels stay as they are: the channel would be unset, and without production machines boot the newest
/// version. Earlier positions of a channel at versions that were not copied are left out.
fn follow(
    target: &dyn Store,
    image: &Image,
    failed: &[u32],
    did: &mut CopiedImage,
) -> Result<(), StoreError> {
    change(target, &image.name, did, &mut |there| {
        let is_lacking = |to: &Pointer| failed.contains(&to.version) && !has(there, to.version);
        let now = Channel::ALL.into_iter().filter_map(|channel| image.channel(channel));
        if !now.chain(image.scheduled()).any(is_lacking) {
            there.follow(image);
        }
        Ok(())
    })
}

/// Changes an image of the target, and records only what was finally stored.
fn change(
    target: &dyn Store,
    name: &ImageName,
    did: &mut CopiedImage,
    change: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let mut last = None;
    target.change(name, &mut |there| {
        let before = there.clone();
        change(there)?;
        last = Some((before, there.clone()));
        Ok(())
    })?;
    if let Some((before, after)) = last {
        did.changed(before, &after);
    }
    Ok(())
}

fn must_list_all(
    source: &dyn Store,
    image: &Image,
    version: &Version,
    needed: &[(Hash, u64)],
) -> Result<(), StoreError> {
    let needed: BTreeSet<Hash> = needed.iter().map(|(id, _)| *id).collect();
    if needed == version.objects.iter().copied().collect() {
        return Ok(());
    }
    Err(StoreError::new(
        StoreErrorKind::Damaged,
        format!(
            "the list of versions of '{}' in {} is wrong: the manifest of version {} needs data objects that the list does not \
             name; the version was not copied",
            image.name,
            source.shown(),
            version.number
        ),
    ))
}

/// Copies an object to a store. If wrong bytes arrive, it tries again as long as the source has another copy
/// to read. `there` is called with the number of bytes that the store has, and can end the copy with an
/// error.
pub fn copy_object(
    target: &mut dyn Publication,
    object: &dyn Object,
    there: &mut dyn FnMut(u64) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    loop {
        let mut bytes = 0u64;
        let copied = target.copy_object(object, &mut |more| {
            bytes = bytes.saturating_add(more);
            there(bytes)
        });
        match copied {
            Err(e) if e.kind() == StoreErrorKind::Damaged && object.was_wrong() => {
                tracing::warn!(error = %e, "a data object arrived with wrong bytes, and is copied once more");
            }
            outcome => return outcome,
        }
    }
}

/// Copies a boot trace. A trace is only a hint: without it a boot is slower, and the copy is still good.
fn copy_trace(source: &dyn Store, target: &dyn Store, manifest: Hash) {
    let outcome = target.trace(manifest).and_then(|there| match there {
        Some(_) => Ok(()),
        None => match source.trace(manifest) {
            Ok(Some(trace)) => target.set_trace(manifest, Some(&trace)),
            Ok(None) => Ok(()),
            // The servers that answered have no trace, as for most versions. Servers that are away probably
            // have none either.
            Err(e) if e.kind() == StoreErrorKind::Unreachable && has_several_servers(source) => {
                tracing::debug!(error = %e, "no boot trace of version {} is known", manifest.short());
                Ok(())
            }
            Err(e) => Err(e),
        },
    });
    if let Err(e) = outcome {
        tracing::warn!(error = %e, "the boot trace of version {} is not copied", manifest.short());
    }
}

fn has_several_servers(store: &dyn Store) -> bool {
    store.traffic().is_some_and(|traffic| traffic.servers > 1)
}

/// Fails if both stores have a different version under the same number. Checked before anything is copied. An
/// error of `go_on` ends the check.
fn refuse_conflicts(
    target: &dyn Store,
    what: &[(Image, Vec<Version>)],
    go_on: &mut dyn FnMut() -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    for (image, versions) in what {
        go_on()?;
        let Some(mut there) = target.image(&image.name)? else { continue };
        for version in versions {
            there.adopt(version)?;
        }
    }
    Ok(())
}

/// All versions of all images, for [`copy`].
pub fn everything(source: &dyn Store) -> Result<Vec<(Image, Vec<Version>)>, StoreError> {
    let images = source.images()?;
    Ok(images.into_iter().map(|image| (image.clone(), image.versions)).collect())
}

/// As [`everything`], but images whose list of versions is damaged or of a later format are returned
/// separately with the reason.
pub fn everything_readable(source: &dyn Store) -> Result<Readable, StoreError> {
    let listed = source.listed()?;
    let what = listed.images.into_iter().map(|image| (image.clone(), image.versions)).collect();
    Ok(Readable { what, unreadable: listed.unreadable })
}

impl Readable {
    /// Leaves out images whose list of versions in the target is damaged or of a later format, because
    /// nothing can be added to them.
    pub fn writable_in(mut self, target: &dyn Store) -> Result<Self, StoreError> {
        for (name, e) in target.listed()?.unreadable {
            if self.what.iter().any(|(image, _)| image.name == name) {
                self.what.retain(|(image, _)| image.name != name);
                self.unreadable.push((name, e));
            }
        }
        Ok(self)
    }
}

/// The readable versions of a store.
pub struct Readable {
    /// All versions of the images, for [`copy`].
    pub what: Vec<(Image, Vec<Version>)>,
    /// The other images, and why they cannot be read.
    pub unreadable: Vec<(ImageName, StoreError)>,
}

/// The versions that references select, by image, for [`copy`].
pub fn selected(
    source: &dyn Store,
    references: &[crate::name::ImageReference],
) -> Result<Vec<(Image, Vec<Version>)>, StoreError> {
    let mut by_image: BTreeMap<ImageName, (Image, Vec<Version>)> = BTreeMap::new();
    for reference in references {
        let image = match by_image.get(&reference.name) {
            Some((image, _)) => image.clone(),
            None => match source.image(&reference.name)? {
                Some(image) => image,
                None => {
                    return Err(StoreError::new(
                        StoreErrorKind::NotFound,
                        format!("there is no image '{}' in {}", reference.name, source.shown()),
                    ));
                }
            },
        };
        let version = image.select(&reference.selector)?.clone();
        let (_, versions) =
            by_image.entry(reference.name.clone()).or_insert_with(|| (image.clone(), Vec::new()));
        if !versions.contains(&version) {
            versions.push(version);
        }
    }
    Ok(by_image.into_values().collect())
}
