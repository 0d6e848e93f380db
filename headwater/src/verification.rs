//! Verifying the versions of a store and repairing them from other stores: for `store verify`, `image verify` and the scrub.

use std::sync::Arc;

use headwater_image::{
    Cancel, ImageError, ImageErrorKind, Progress, Round, files_touched, repair, repair_manifest, verify_in,
    versions_touched,
};
use headwater_store::{Access, Hash, Image, Store, StoreError, StoreErrorKind, Version};
use serde::Serialize;

use crate::stores::{self, Credentials};

/// How a store is checked.
pub struct Scrub {
    /// Bytes a second, at most.
    pub rate: Option<u64>,
    /// Stores that may have what is damaged here.
    pub repair_from: Vec<String>,
    /// What servers need to be shown.
    pub credentials: Credentials,
}

impl Scrub {
    /// Opens the stores that may have what is damaged.
    pub fn open_sources(&self) -> Result<Vec<Arc<dyn Store>>, StoreError> {
        open_sources(&self.repair_from, &self.credentials)
    }
}

/// Opens stores that may have what is damaged in another one.
pub fn open_sources(names: &[String], credentials: &Credentials) -> Result<Vec<Arc<dyn Store>>, StoreError> {
    names.iter().map(|name| stores::open(name, Access::Read, credentials)).collect()
}

/// What came of one version.
#[derive(Debug, Default, Serialize)]
pub struct Checked {
    /// Chunks that were checked; those that versions checked before have in common with it were read with them.
    pub chunks: u64,
    /// Chunks and objects that were repaired.
    pub repaired: u64,
    /// Chunks that are damaged still, more of them than have a line where there are very many.
    pub damaged_chunks: u64,
    /// What is damaged still, a line each.
    pub damage: Vec<String>,
    /// Files that it touches.
    pub files: Vec<String>,
    /// Versions of this store that hold some of it, as `IMAGE@NUMBER`.
    pub versions: Vec<String>,
}

/// Contents are checked once, whatever the number of versions that have them.
pub fn distinct(what: &[(Image, Vec<Version>)]) -> Vec<(Hash, Vec<String>)> {
    let mut out: Vec<(Hash, Vec<String>)> = Vec::new();
    for (image, version) in what.iter().flat_map(|(image, versions)| versions.iter().map(move |v| (image, v)))
    {
        let name = format!("{}@{}", image.name, version.number);
        match out.iter_mut().find(|(hash, _)| *hash == version.manifest) {
            Some((_, names)) => names.push(name),
            None => out.push((version.manifest, vec![name])),
        }
    }
    out
}

/// Verifies a version, which was found under these names, in a round of checks, repairs what can be repaired, and says what the
/// rest touches. `None`: it was removed meanwhile.
pub fn check(
    store: &dyn Store,
    hash: Hash,
    names: &[String],
    (round, sources): (&Round, &[Arc<dyn Store>]),
    cancel: &Cancel,
    progress: &mut dyn FnMut(Progress),
) -> Result<Option<Checked>, ImageError> {
    match check_whole(store, hash, (round, sources), cancel, progress) {
        Ok(checked) => Ok(Some(checked)),
        Err(error) => without_manifest(store, hash, names, error),
    }
}

fn check_whole(
    store: &dyn Store,
    hash: Hash,
    (round, sources): (&Round, &[Arc<dyn Store>]),
    cancel: &Cancel,
    progress: &mut dyn FnMut(Progress),
) -> Result<Checked, ImageError> {
    let manifest = !sources.is_empty() && repair_manifest(store, hash, sources)?;
    let found = verify_in(store, hash, round, cancel, progress)?;
    let chunks = found.chunks;
    let (mut left, mut repaired, mut reasons) = (found, u64::from(manifest), Vec::new());
    if !left.is_sound() && !sources.is_empty() {
        let done = repair(store, hash, &left, sources, round, cancel)?;
        repaired = repaired.saturating_add(done.chunks).saturating_add(done.objects);
        (left, reasons) = (done.left, done.reasons);
    }
    let (mut files, mut versions) = (Vec::new(), Vec::new());
    if !left.is_sound() {
        versions = versions_touched(store, &left, round, cancel)?;
        let touched = files_touched(store, hash, &left.damaged, round, cancel)?;
        files = touched.files.into_iter().chain(touched.remarks).collect();
    }
    let damaged_chunks = left.damaged_chunks;
    let damage = left.damage().into_iter().chain(reasons).collect();
    Ok(Checked { chunks, repaired, damaged_chunks, damage, files, versions })
}

/// What came of a version whose manifest is damaged or lost, which is no reason not to look at the others: all of it is, and all
/// versions that are the same. All other errors stay errors.
fn without_manifest(
    store: &dyn Store,
    hash: Hash,
    names: &[String],
    error: ImageError,
) -> Result<Option<Checked>, ImageError> {
    use ImageErrorKind::{Damaged, NotFound, Unsupported};
    if !matches!(error.kind(), NotFound | Damaged | Unsupported) {
        return Err(error);
    }
    let mut versions = match store.listed() {
        Ok(listed) => versions_of(&listed.images, hash),
        // What is damaged is said whether there is a list or not.
        Err(_) if error.kind() != NotFound => names.to_vec(),
        // A plain web server has no list, or one for people: what was named there is missed.
        Err(e)
            if store.is_remote()
                && matches!(e.kind(), StoreErrorKind::NotFound | StoreErrorKind::Invalid) =>
        {
            names.to_vec()
        }
        Err(e) => return Err(e.into()),
    };
    if error.kind() == NotFound && versions.is_empty() {
        return Ok(None);
    }
    if versions.is_empty() {
        versions = names.to_vec();
    }
    Ok(Some(Checked { damage: vec![error.to_string()], versions, ..Checked::default() }))
}

/// The versions with this manifest, as `IMAGE@NUMBER`.
fn versions_of(images: &[Image], manifest: Hash) -> Vec<String> {
    let all = images.iter().flat_map(|image| image.versions.iter().map(move |version| (image, version)));
    let same = all.filter(|(_, version)| version.manifest == manifest);
    same.map(|(image, version)| format!("{}@{}", image.name, version.number)).collect()
}
