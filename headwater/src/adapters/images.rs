//! Images in the local store.

use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use headwater_api::name::ImageRef;
use headwater_api::{Image, ImageVersion, ProblemKind, Removed, VerifyReport};
use headwater_block::Device;
use headwater_image::{Cancel, ImageError, ImportOptions, Verified};
use headwater_nbd::NbdUri;
use headwater_nbd::client::ClientOptions;
use headwater_service::backend::{BackendError, Images, ImportOutcome, JobControl};
use headwater_store::{Hash, ImageName, ImageReference, LocalDir, Selector, Store, StoreError, Version};

use crate::adapters::disks::blocking;
use crate::failure::{image_kind, store_kind};

/// The images of one store.
#[derive(Debug)]
pub struct StoredImages {
    store: LocalDir,
}

impl StoredImages {
    /// The images of `store`.
    pub fn new(store: LocalDir) -> Self {
        Self { store }
    }
}

#[async_trait]
impl Images for StoredImages {
    async fn list(&self) -> Result<Vec<Image>, BackendError> {
        let store = self.store.clone();
        blocking("list the images", move || {
            let images = store.images().map_err(store_failed)?;
            let image = |image: headwater_store::Image| Image {
                versions: image.versions.iter().map(|version| version_of(&image.name, version)).collect(),
                name: image.name.to_string(),
            };
            Ok(images.into_iter().map(image).collect())
        })
        .await
    }

    async fn resolve(&self, reference: &ImageRef) -> Result<ImageVersion, BackendError> {
        let (store, reference) = (self.store.clone(), parse(reference)?);
        blocking("look an image up", move || {
            let version = store.resolve(&reference).map_err(store_failed)?;
            Ok(version_of(&reference.name, &version))
        })
        .await
    }

    async fn import(
        &self,
        name: &str,
        source: &str,
        job: Arc<JobControl>,
    ) -> Result<ImportOutcome, BackendError> {
        let name: ImageName = name.parse().map_err(store_failed)?;
        let (store, source) = (self.store.clone(), source.to_owned());
        blocking("import an image", move || import(&store, name, &source, &job)).await
    }

    async fn verify(
        &self,
        version: &ImageVersion,
        job: Arc<JobControl>,
    ) -> Result<VerifyReport, BackendError> {
        let (store, version) = (self.store.clone(), version.clone());
        blocking("verify an image", move || {
            let cancel = Cancel::new();
            let found =
                headwater_image::verify(&store, hash_of(&version)?, &cancel, &mut forward(&job, &cancel))
                    .map_err(image_failed)?;
            let checked_bytes = found.chunks.saturating_mul(u64::from(store.chunk_bytes()));
            Ok(VerifyReport { version, checked_bytes, damage: damage_of(&found) })
        })
        .await
    }

    async fn export(
        &self,
        version: &ImageVersion,
        target: &Path,
        job: Arc<JobControl>,
    ) -> Result<u64, BackendError> {
        let (store, version, target) = (self.store.clone(), version.clone(), target.to_owned());
        blocking("export an image", move || export(&store, &version, &target, &job)).await
    }

    async fn remove(&self, reference: &ImageRef) -> Result<Removed, BackendError> {
        let (store, reference) = (self.store.clone(), parse(reference)?);
        blocking("remove an image", move || {
            let number = match reference.selector {
                Selector::Newest => None,
                Selector::Number(_) | Selector::HashPrefix(_) => {
                    Some(store.resolve(&reference).map_err(store_failed)?.number)
                }
            };
            let removed = store.remove(&reference.name, number).map_err(store_failed)?;
            let names = removed.versions.iter().map(|number| format!("{}@{number}", reference.name));
            Ok(Removed { removed: names.collect(), freed_bytes: removed.freed_bytes })
        })
        .await
    }

    async fn stored_bytes(&self) -> Result<u64, BackendError> {
        let root = self.store.path().to_owned();
        blocking("measure the store", move || {
            directory_bytes(&root)
                .map_err(|e| BackendError::from_io(format!("cannot measure {}", root.display()), e))
        })
        .await
    }
}

fn import(
    store: &LocalDir,
    name: ImageName,
    source: &str,
    job: &JobControl,
) -> Result<ImportOutcome, BackendError> {
    let device = open_source(source)?;
    let before = store.image(&name).map_err(store_failed)?;
    let newest = before.as_ref().and_then(|image| image.newest().cloned());
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut options = ImportOptions::new(name.clone(), since_1970.as_secs());
    options.note = note_of(source);
    let cancel = options.cancel.clone();
    let imported =
        headwater_image::import(device, store, &options, &mut forward(job, &cancel)).map_err(image_failed)?;
    if let Some(newest) = newest.filter(|newest| newest.manifest == imported.version.manifest) {
        // The same bytes: a second version would only be a second name for the first.
        store.remove(&name, Some(imported.version.number)).map_err(store_failed)?;
        return Ok(ImportOutcome { version: version_of(&name, &newest), created: false });
    }
    Ok(ImportOutcome { version: version_of(&name, &imported.version), created: true })
}

/// Any device is a source: a file, or what an NBD server serves.
fn open_source(source: &str) -> Result<Arc<dyn Device>, BackendError> {
    if NbdUri::is_uri(source) {
        let uri: NbdUri =
            source.parse().map_err(|e| BackendError::new(ProblemKind::Invalid, format!("{e}")))?;
        let client = headwater_nbd::Client::connect(&uri, &ClientOptions::default()).map_err(|e| {
            BackendError::new(ProblemKind::Failed, "cannot read from the NBD server").because(e)
        })?;
        return Ok(client);
    }
    headwater_image::open_file(Path::new(source)).map_err(image_failed)
}

fn export(
    store: &LocalDir,
    version: &ImageVersion,
    target: &Path,
    job: &JobControl,
) -> Result<u64, BackendError> {
    let cancel = Cancel::new();
    let mut progress = forward(job, &cancel);
    headwater_image::export_raw(store, hash_of(version)?, target, &cancel, &mut progress)
        .map_err(image_failed)?;
    Ok(version.size_bytes)
}

/// What is damaged, a line each. Only the first places are named where there are very many.
fn damage_of(found: &Verified) -> Vec<String> {
    let objects =
        found.objects.iter().map(|object| format!("data object {}: {}", object.object, object.reason));
    let mut damage: Vec<String> = objects.chain(found.damaged.iter().map(ToString::to_string)).collect();
    let listed = u64::try_from(found.damaged.len()).unwrap_or(u64::MAX);
    let more = found.damaged_chunks.saturating_sub(listed);
    if more > 0 {
        damage.push(format!("{more} chunks more"));
    }
    damage
}

/// Passes progress on to the job, and the job's cancellation to the operation.
fn forward<'a>(job: &'a JobControl, cancel: &'a Cancel) -> impl FnMut(headwater_image::Progress) + 'a {
    move |progress| {
        job.report(progress.done_bytes, progress.total_bytes);
        if job.is_cancelled() {
            cancel.cancel();
        }
    }
}

fn parse(reference: &ImageRef) -> Result<ImageReference, BackendError> {
    reference.to_string().parse().map_err(store_failed)
}

fn hash_of(version: &ImageVersion) -> Result<Hash, BackendError> {
    let odd = || BackendError::new(ProblemKind::Failed, format!("'{}' is no hash", version.hash));
    version.hash.parse().map_err(|_| odd())
}

fn version_of(name: &ImageName, version: &Version) -> ImageVersion {
    ImageVersion {
        image: name.to_string(),
        number: u64::from(version.number),
        hash: version.manifest.to_string(),
        size_bytes: version.size_bytes,
        stored_bytes: version.stored_bytes,
        created_at_ms: version.created_at_s.saturating_mul(1000),
        source: version.note.clone(),
    }
}

/// The source as a note: its end, where it is longer than a note may be.
fn note_of(source: &str) -> String {
    let mut start = source.len().saturating_sub(headwater_store::NOTE_MAX_BYTES);
    while !source.is_char_boundary(start) {
        start += 1;
    }
    source.get(start..).unwrap_or_default().to_owned()
}

fn directory_bytes(dir: &Path) -> std::io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let mut total = 0u64;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        // A file that was removed meanwhile takes no space.
        let Ok(metadata) = entry.metadata() else { continue };
        let bytes = if metadata.is_dir() { directory_bytes(&entry.path())? } else { metadata.blocks() * 512 };
        total = total.saturating_add(bytes);
    }
    Ok(total)
}

/// A failure of the store, in the service's words.
pub fn store_failed(error: StoreError) -> BackendError {
    BackendError::new(store_kind(error.kind()), error.to_string())
}

/// A failure of an image, in the service's words.
pub fn image_failed(error: ImageError) -> BackendError {
    BackendError::new(image_kind(error.kind()), error.to_string())
}
