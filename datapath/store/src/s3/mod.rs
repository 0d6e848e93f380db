//! A store in an S3 bucket, or on any server with the S3 protocol. It has the same contents as a store in a
//! directory ([`crate::local_dir`]). `bucket` sends the requests; the other modules decide which.
//!
//! ```text
//!   s3://BUCKET/PREFIX/store            as in a directory: the same keys, the same bytes
//!                      images/NAME      replaced as a whole, if no other process has changed it
//!                      manifests/HASH   immutable
//!                      objects/HASH     immutable, and always complete
//!                      holed/HASH.LIST  immutable: the object HASH without the bytes in its holes; see `partial_copies`
//!                      traces/HASH
//!                      locks/, pins/    which process uses what: see `mark`; and temporarily the key of a `probe`
//!                      holds/           who needs what, even while its daemon does not run: see `crate::retention`
//!                      tmp/HASH.upload, tmp/HASH.LIST.upload
//!                                       the progress of an interrupted copy
//! ```
//!
//! # Many writers
//! Unlike a directory, a bucket can have several writers. The list of versions of an image is written with
//! `If-Match` (with `If-None-Match` for a new image). The second writer reads the list again and applies its
//! change to the new content, so no update is lost. If an attempt got no answer, and the list afterwards is
//! not the one that was to be written, the change fails. Its error says that the change may have been made or
//! may still be made, because a repetition could apply it twice. Removals need `locks/exclusive`, and space
//! is reclaimed only while no publication is in progress.
//!
//! # After a crash
//! An interrupted publication leaves one of these states: nothing; an upload in parts that never appears; an
//! unneeded object; an unneeded object and an unneeded manifest; the complete version. It also leaves a mark
//! that becomes stale. The next [`S3Store::open`] for writing after that removes what is unneeded.

mod body;
mod bucket;
mod busy;
mod failure;
mod keys;
mod listing;
mod mark;
mod object;
mod part;
mod partial_copies;
mod probe;
mod publication;
mod reclaim;
mod replica_rotation;
mod retention;
pub(crate) mod upload;
mod url;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::local_dir::{Access, chunk_bytes_of, settings_bytes};
use crate::name::ImageName;
use crate::refs::{self, Image};
use crate::retention::RetentionRoot;
use crate::retrying::RetryingStore;
use crate::s3::bucket::{Bucket, Condition, Entry, Refusal};
use crate::s3::failure::Unchanged;
use crate::s3::mark::{LOCKS, Marks, PINS, Renewal, SWEEP_WANTED, WRITER_PREFIX};
use crate::s3::object::S3Object;
use crate::s3::publication::S3Publication;
use crate::s3::replica_rotation::ReplicaRotation;
use crate::store::{
    Listed, MANIFEST_MAX_BYTES, Object, Patch, Pin, Publication, Removed, Store, TRACE_MAX_BYTES,
};
use crate::while_busy::WhileBusy;

pub use crate::s3::mark::STALE_AFTER;
pub use crate::s3::url::{REQUEST_ATTEMPTS, REQUEST_PAUSE, REQUEST_TIMEOUT, S3Url};

/// The largest list of versions.
const REFS_MAX_BYTES: u64 = 1 << 30;
/// How often a change of a list of versions is tried if others change it at the same time.
const CHANGES_MAX: u32 = 50;

/// The source of S3 credentials.
#[derive(Clone, PartialEq, Eq)]
pub enum Keys {
    /// `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and the related variables, or the role of the machine, of
    /// its container or of its pod.
    Environment,
    /// This access key.
    Given {
        /// The id of the access key.
        id: String,
        /// The secret.
        secret: String,
    },
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if matches!(self, Self::Environment) { "Environment" } else { "Given(..)" })
    }
}

/// How a store in S3 is used.
#[derive(Clone, Debug)]
pub struct S3Options {
    /// The source of credentials.
    pub keys: Keys,
    /// The name of this process in messages to others that wait for it. Each process that opens the store has
    /// a different one.
    pub owner: String,
    /// The directory in which an object is written until its hash, and so its key, is known.
    pub spool_dir: PathBuf,
    /// The timeout of one request, instead of the time in the URL.
    pub timeout: Option<Duration>,
    /// How long establishing a connection may take.
    pub connect_timeout: Duration,
    /// The most attempts for one request.
    pub attempts: u32,
    /// The pause before the second attempt.
    pub pause: Duration,
    /// The age from which a mark that is not renewed is stale.
    pub stale_after: Duration,
    /// How long a request waits for a busy server.
    pub while_busy: WhileBusy,
}

impl S3Options {
    /// The default options, for an owner name that nobody else has.
    pub fn new(owner: impl Into<String>) -> Self {
        Self {
            keys: Keys::Environment,
            owner: owner.into(),
            spool_dir: std::env::temp_dir(),
            timeout: None,
            connect_timeout: Duration::from_secs(5),
            attempts: REQUEST_ATTEMPTS,
            pause: REQUEST_PAUSE,
            stale_after: STALE_AFTER,
            while_busy: WhileBusy::default(),
        }
    }
}

/// A store in S3, open for reading or writing. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct S3Store {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    bucket: Bucket,
    marks: Marks,
    chunk_bytes: u32,
    is_writable: bool,
    /// Whether it was checked that the bucket has a store of this chunk size and, if the store is writable,
    /// that its server respects conditions.
    is_seen: AtomicBool,
    spool_dir: PathBuf,
    replica_rotation: Arc<ReplicaRotation>,
}

impl S3Store {
    /// Opens the store at `url`; with write access, creates it if it is missing. The bucket must exist.
    pub fn open(url: &S3Url, access: Access, options: &S3Options) -> Result<Self, StoreError> {
        let bucket = Bucket::new(url, options)?;
        let marks = Marks::new(bucket.clone(), &options.owner, options.stale_after);
        let mut is_seen = true;
        let chunk_bytes = match (settings(&bucket)?, access) {
            (Some(chunk_bytes), Access::Read) => chunk_bytes,
            (Some(chunk_bytes), Access::Write { .. } | Access::Copy { .. }) => {
                match probe::check_conditional_writes(&bucket, &marks.unique()) {
                    // Nothing can be written now. The first write after that tests the server again.
                    Err(e) if e.kind() == StoreErrorKind::NoSpace => is_seen = false,
                    kept => kept?,
                }
                chunk_bytes
            }
            (None, Access::Read) => {
                return Err(StoreError::new(
                    StoreErrorKind::NotFound,
                    format!("there is no image store at {url}"),
                ));
            }
            (None, Access::Write { new_chunk_bytes } | Access::Copy { new_chunk_bytes }) => {
                make(&bucket, &marks, new_chunk_bytes)?
            }
        };
        let inner = Inner::new(bucket, marks, access, options, chunk_bytes);
        inner.is_seen.store(is_seen, Ordering::Release);
        if matches!(access, Access::Write { .. }) {
            inner.clean_up_after_others()?;
        }
        Ok(Self { inner: Arc::new(inner) })
    }

    /// As [`S3Store::open`] with a known chunk size, whether or not the bucket can be reached. The remains of
    /// a dead writer are removed by the next writer that reaches the bucket.
    pub fn open_unseen(
        url: &S3Url,
        access: Access,
        options: &S3Options,
        chunk_bytes: u32,
    ) -> Result<Self, StoreError> {
        let bucket = Bucket::new(url, options)?;
        let marks = Marks::new(bucket.clone(), &options.owner, options.stale_after);
        let inner = Inner::new(bucket, marks, access, options, chunk_bytes);
        Ok(Self { inner: Arc::new(inner) })
    }
}

/// The chunk size of the existing store, if there is one.
fn settings(bucket: &Bucket) -> Result<Option<u32>, StoreError> {
    let url = bucket.url().to_string();
    bucket.get("store", 4096)?.map(|(bytes, _)| chunk_bytes_of(&url, &bytes)).transpose()
}

/// The advice for a prefix that has only marks. A process with an open version renews its marks, even if
/// everything else was deleted.
const MARKS_ARE_LEFT: &str = "; or, if a store was here and was deleted, end the daemons and commands that used it, and delete the \
                              remaining keys below pins/ and locks/";

/// Whether a key can be a mark.
fn is_of_a_mark(entry: &Entry) -> bool {
    entry.name.split_once('/').is_some_and(|(folder, _)| [PINS, LOCKS].contains(&folder))
}

/// Writes the file `store`, unless another process does so at the same time.
fn make(bucket: &Bucket, marks: &Marks, chunk_bytes: u32) -> Result<u32, StoreError> {
    let bytes = Bytes::from(settings_bytes(chunk_bytes)?);
    // An interrupted creation leaves nothing, because this is its only key. Everything else here belongs to
    // something else, whatever its name.
    let mut there = bucket.list("")?;
    there.retain(|entry| !probe::is_of_a_probe(&entry.name));
    if let Some(other) = there.first() {
        // Another process may have created the store since the first check.
        if let Some(chunk_bytes) = settings(bucket)? {
            return Ok(chunk_bytes);
        }
        return Err(StoreError::new(
            StoreErrorKind::Invalid,
            format!(
                "{} is not an image store, and is not empty (it has {}): choose another prefix{}",
                bucket.url(),
                other.name,
                if there.iter().all(is_of_a_mark) { MARKS_ARE_LEFT } else { "" }
            ),
        ));
    }
    probe::check_conditional_writes(bucket, &marks.unique())?;
    match bucket.put("store", &bytes, &Condition::Absent) {
        Ok(_) => Ok(chunk_bytes),
        Err(Refusal::Failed(e)) => Err(e),
        Err(_) => settings(bucket)?
            .ok_or_else(|| StoreError::new(StoreErrorKind::Io, format!("cannot make {}", bucket.url()))),
    }
}

fn image_key(name: &ImageName) -> String {
    format!("images/{name}")
}

fn manifest_key(id: Hash) -> String {
    format!("manifests/{id}")
}

fn object_key(id: Hash) -> String {
    format!("objects/{id}")
}

fn trace_key(manifest: Hash) -> String {
    format!("traces/{manifest}")
}

impl Inner {
    fn new(bucket: Bucket, marks: Marks, access: Access, options: &S3Options, chunk_bytes: u32) -> Self {
        Self {
            marks,
            bucket,
            chunk_bytes,
            is_writable: access != Access::Read,
            is_seen: AtomicBool::new(false),
            spool_dir: options.spool_dir.clone(),
            replica_rotation: Arc::default(),
        }
    }

    fn must_be_writable(&self) -> Result<(), StoreError> {
        if !self.is_writable {
            let message = format!("the store {} was opened for reading only", self.bucket.url());
            return Err(StoreError::new(StoreErrorKind::ReadOnly, message));
        }
        if self.is_seen.load(Ordering::Acquire) {
            return Ok(());
        }
        // The known chunk size may be outdated, and versions of another chunk size could not be read.
        if settings(&self.bucket)? == Some(self.chunk_bytes) {
            probe::check_conditional_writes(&self.bucket, &self.marks.unique())?;
            self.is_seen.store(true, Ordering::Release);
            return Ok(());
        }
        let message = format!("the store {} was replaced or removed: open it again", self.bucket.url());
        Err(StoreError::new(StoreErrorKind::Invalid, message))
    }

    /// The list of versions of an image, and its tag.
    fn image(&self, name: &ImageName) -> Result<Option<(Image, String)>, StoreError> {
        let Some((bytes, tag)) = self.bucket.get(&image_key(name), REFS_MAX_BYTES)? else { return Ok(None) };
        Ok(Some((Image::decode(name, &bytes)?, tag)))
    }

    fn image_names(&self) -> Result<Vec<ImageName>, StoreError> {
        let mut names: Vec<ImageName> = Vec::new();
        for entry in self.bucket.list("images")? {
            let Ok(name) = entry.name.parse::<ImageName>() else {
                tracing::warn!(key = entry.name, "not an image; ignored");
                continue;
            };
            // Some programs write an empty key for a folder, `images/NAME/`, which a listing shows without
            // its last slash. If a key of exactly that name exists, it is a list that is lost, and the needs
            // of its image are unknown.
            if entry.len_bytes > 0 || self.bucket.head(&image_key(&name))?.is_some() {
                names.push(name);
            }
        }
        names.sort_unstable();
        // A list and a folder beside it have the same name.
        names.dedup();
        Ok(names)
    }

    fn images(&self) -> Result<Vec<Image>, StoreError> {
        let names = self.image_names()?;
        let mut images = Vec::with_capacity(names.len());
        for name in &names {
            // An image that was removed since the listing is missing, which is no error.
            images.extend(self.image(name)?.map(|(image, _)| image));
        }
        Ok(images)
    }

    fn put_image(&self, image: &Image, condition: &Condition) -> Result<(), Refusal> {
        let bytes = Bytes::from(image.encode()?);
        self.bucket.put(&image_key(&image.name), &bytes, condition).map(drop)
    }

    /// Applies `change` to the list of versions of an image, again if another writer interferes. `change`
    /// gets an empty image if none exists, and returns whether to write.
    fn change_image<T>(
        &self,
        name: &ImageName,
        mut change: impl FnMut(&mut Image, bool) -> Result<(T, bool), StoreError>,
    ) -> Result<T, Unchanged> {
        for _ in 0..CHANGES_MAX {
            let (mut image, condition, is_there) = match self.image(name)? {
                Some((image, tag)) => (image, Condition::Tag(tag), true),
                None => (Image::empty(name.clone()), Condition::Absent, false),
            };
            let (outcome, write) = change(&mut image, is_there)?;
            if !write {
                return Ok(outcome);
            }
            match self.put_image(&image, &condition) {
                Ok(()) => return Ok(outcome),
                Err(Refusal::Failed(e)) => return Err(e.into()),
                // A repetition could apply the change twice.
                Err(Refusal::Unknown(why)) => return Err(self.not_known(name, why)),
                Err(_) => {
                    tracing::debug!(%name, "another process changed the image at the same time; trying again")
                }
            }
        }
        let message = format!(
            "cannot change image '{name}' in {}: other processes changed it {CHANGES_MAX} times at the same moment; try again",
            self.bucket.url()
        );
        Err(StoreError::new(StoreErrorKind::Locked, message).into())
    }

    fn not_known(&self, name: &ImageName, why: Option<StoreError>) -> Unchanged {
        let why = match why {
            Some(e) => e.to_string(),
            None => "the server did not answer in time, and other processes change the image too".to_owned(),
        };
        Unchanged::Unknown(StoreError::new(
            StoreErrorKind::Unknown,
            format!(
                "it is unknown whether image '{name}' in {} was changed: {why}. Check its versions and channels, and try \
                 again if the change is missing",
                self.bucket.url()
            ),
        ))
    }

    fn pin(&self, manifest: Hash) -> Result<Pin, StoreError> {
        let key = format!("{PINS}/{manifest}/{}", self.marks.unique());
        let mark = match self.marks.shared(&key, Renewal::Always) {
            Ok(mark) => Some(mark),
            Err(e)
                if !self.is_writable
                    && matches!(e.kind(), StoreErrorKind::Io | StoreErrorKind::Unreachable) =>
            {
                tracing::warn!(error = %e, "cannot pin version {}: other processes can remove it while it is read here", manifest.short());
                None
            }
            Err(e) => return Err(e),
        };
        if self.bucket.head(&manifest_key(manifest))?.is_none() {
            return Err(StoreError::new(
                StoreErrorKind::NotFound,
                format!("version {} is not in the store {}", manifest.short(), self.bucket.url()),
            ));
        }
        Ok(Pin::new(mark))
    }

    fn pin_later(&self, manifest: Hash) -> Pin {
        let key = format!("{PINS}/{manifest}/{}", self.marks.unique());
        Pin::new(self.marks.later(&key, self.is_writable))
    }

    fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError> {
        let key = manifest_key(id);
        // Tried twice, in case the bytes were damaged in transit.
        for _ in 0..2 {
            let found = self.bucket.get(&key, MANIFEST_MAX_BYTES)?;
            let Some((bytes, _)) = found else {
                let message = format!("the manifest {} does not exist", self.bucket.shown(&key));
                return Err(StoreError::new(StoreErrorKind::NotFound, message));
            };
            if Hash::of(&bytes) == id {
                return Ok(bytes.to_vec());
            }
        }
        Err(StoreError::new(
            StoreErrorKind::Damaged,
            format!(
                "the manifest {} is damaged: the hash of its bytes is not the one in its name",
                self.bucket.shown(&key)
            ),
        ))
    }
}

impl Store for S3Store {
    fn chunk_bytes(&self) -> u32 {
        self.inner.chunk_bytes
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn close(&self) {
        self.inner.bucket.close();
    }

    fn retrying(&self) -> Option<Arc<dyn Store>> {
        Some(Arc::new(RetryingStore::new(self.clone())))
    }

    fn with_short_timeout(&self) -> Option<Arc<dyn Store>> {
        let inner = Inner {
            bucket: self.inner.bucket.without_busy_wait(),
            marks: self.inner.marks.clone(),
            is_seen: AtomicBool::new(self.inner.is_seen.load(Ordering::Acquire)),
            spool_dir: self.inner.spool_dir.clone(),
            replica_rotation: Arc::clone(&self.inner.replica_rotation),
            ..*self.inner
        };
        Some(Arc::new(Self { inner: Arc::new(inner) }))
    }

    fn shown(&self) -> String {
        self.inner.bucket.url().to_string()
    }

    fn images(&self) -> Result<Vec<Image>, StoreError> {
        self.inner.images()
    }

    fn listed(&self) -> Result<Listed, StoreError> {
        Listed::read(&self.inner.image_names()?, |name| self.image(name))
    }

    fn image(&self, name: &ImageName) -> Result<Option<Image>, StoreError> {
        Ok(self.inner.image(name)?.map(|(image, _)| image))
    }

    fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError> {
        self.inner.manifest(id)
    }

    fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        Ok(Arc::new(S3Object::find(&self.inner, id)?))
    }

    /// The first read shows whether the object exists and has that length.
    fn open_object_of(&self, id: Hash, len_bytes: u64) -> Result<Arc<dyn Object>, StoreError> {
        Ok(Arc::new(S3Object::unseen(&self.inner, id, len_bytes)))
    }

    fn trace(&self, manifest: Hash) -> Result<Option<Vec<u8>>, StoreError> {
        let found = self.inner.bucket.get(&trace_key(manifest), TRACE_MAX_BYTES)?;
        Ok(found.map(|(bytes, _)| bytes.to_vec()))
    }

    fn set_trace(&self, manifest: Hash, trace: Option<&[u8]>) -> Result<(), StoreError> {
        let key = trace_key(manifest);
        let Some(trace) = trace else { return self.inner.bucket.remove(&key) };
        // The pin keeps the trace from outliving a version that is being removed.
        let _pin = self.inner.pin(manifest)?;
        match self.inner.bucket.put(&key, &Bytes::copy_from_slice(trace), &Condition::Any) {
            Err(Refusal::Failed(e)) => Err(e),
            _ => Ok(()),
        }
    }

    fn pin(&self, manifest: Hash) -> Result<Pin, StoreError> {
        self.inner.pin(manifest)
    }

    fn keeps_roots(&self) -> bool {
        self.inner.is_writable
    }

    fn retain(&self, root: &RetentionRoot) -> Result<(), StoreError> {
        self.inner.retain(root)
    }

    fn release(&self, root: &RetentionRoot) -> Result<(), StoreError> {
        self.inner.release(root)
    }

    fn roots_of(&self, daemon: &str) -> Result<Vec<RetentionRoot>, StoreError> {
        self.inner.roots_of(daemon)
    }

    fn pin_later(&self, manifest: Hash) -> Result<Pin, StoreError> {
        Ok(self.inner.pin_later(manifest))
    }

    fn publish(&self) -> Result<Box<dyn Publication>, StoreError> {
        self.inner.must_be_writable()?;
        let key = format!("{LOCKS}/{WRITER_PREFIX}{}", self.inner.marks.unique());
        let mark = self.inner.marks.shared(&key, Renewal::OnlyMine)?;
        Ok(Box::new(S3Publication::new(Arc::clone(&self.inner), mark)))
    }

    fn change(
        &self,
        name: &ImageName,
        change: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.inner.must_be_writable()?;
        let changed = self.inner.change_image(name, |image, is_there| {
            if !is_there {
                return Err(refs::no_such_image(name));
            }
            let before = image.clone();
            change(image)?;
            Ok(((), *image != before))
        });
        Ok(changed?)
    }

    fn remove(&self, name: &ImageName, number: Option<u32>) -> Result<Removed, StoreError> {
        self.inner.remove(name, number, true)
    }

    fn remove_unless_promoted(&self, name: &ImageName) -> Result<Removed, StoreError> {
        self.inner.remove(name, None, false)
    }

    fn reclaim_left(&self) -> Result<u64, StoreError> {
        if !self.inner.is_writable || self.inner.bucket.head(SWEEP_WANTED)?.is_none() {
            return Ok(0);
        }
        self.inner.sweep()
    }

    fn stored_bytes(&self) -> Result<u64, StoreError> {
        let all = self.inner.bucket.list("")?;
        Ok(all.iter().fold(0, |sum, entry| sum.saturating_add(entry.len_bytes)))
    }

    fn repair_object(&self, object: Hash, patches: &[Patch]) -> Result<(), StoreError> {
        self.inner.must_be_writable()?;
        let damaged = S3Object::find(&self.inner, object)?;
        if damaged.is_partial() {
            let shown = self.inner.bucket.shown(&object_key(object));
            return Err(StoreError::new(
                StoreErrorKind::Damaged,
                format!(
                    "cannot repair {shown}: the bucket has it only with holes, so it must be copied as a whole"
                ),
            ));
        }
        publication::send_object(&self.inner, &damaged, patches, None, &mut |_| Ok(()))
    }

    fn repair_manifest(&self, id: Hash, bytes: &[u8]) -> Result<(), StoreError> {
        self.inner.must_be_writable()?;
        if Hash::of(bytes) != id {
            return Err(StoreError::new(
                StoreErrorKind::Damaged,
                format!("these bytes are not the manifest {id}"),
            ));
        }
        publication::send_manifest(&self.inner, id, bytes)
    }
}
