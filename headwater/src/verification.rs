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

/// Opens stores that may have what is damaged in another one. None of them is waited for: the next one may have it, too.
pub fn open_sources(names: &[String], credentials: &Credentials) -> Result<Vec<Arc<dyn Store>>, StoreError> {
    let open = |name: &String| {
        let store = stores::open(name, Access::Read, credentials)?;
        Ok(store.impatient().unwrap_or(store))
    };
    names.iter().map(open).collect()
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

#[cfg(test)]
mod tests {
    use headwater_image::{ImportOptions, import, open_source};
    use headwater_store::LocalDir;
    use headwater_testkit::{FileServer, HttpFault, Rng, run, wait_until};

    use super::*;

    #[test]
    fn a_source_that_goes_silent_in_the_middle_of_an_object_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let (raw, at, copy) =
            (dir.path().join("disk.raw"), dir.path().join("store"), dir.path().join("copy"));
        let mut rng = Rng::new(5);
        let disk: Vec<u8> = (0..2u64 << 17).flat_map(|_| rng.next_u64().to_le_bytes()).collect();
        std::fs::write(&raw, &disk).unwrap();
        let store = LocalDir::open(&at, Access::WRITE).unwrap();
        let options = ImportOptions::new("disk".parse().unwrap(), 0);
        let imported = import(open_source(&raw, None).unwrap(), &store, &options, &mut |_| {}).unwrap();
        run("coreutils", "cp", &["-r", &at.display().to_string(), &copy.display().to_string()]);
        for object in std::fs::read_dir(at.join("objects")).unwrap() {
            std::fs::remove_file(object.unwrap().path()).unwrap();
        }
        let (silent, good) = (FileServer::start(&copy, None), FileServer::start(&copy, None));
        silent.fail(HttpFault::HangAfter(100_000));
        let sources = open_sources(&[silent.url(), good.url()], &Credentials::default()).unwrap();
        let checking = std::thread::spawn(move || {
            let (round, names) = (Round::new(None), ["disk@1".to_owned()]);
            let hash = imported.version.manifest;
            let once = |_| check(&store, hash, &names, (&round, &sources), &Cancel::new(), &mut |_| {});
            // The good one may have been too slow as well, on a busy host.
            let mut checks = (0..5).map(once).map(|checked| checked.unwrap().unwrap());
            checks.find(|checked| checked.repaired > 0 && checked.damage.is_empty())
        });
        wait_until("the repair ends", || checking.is_finished());
        assert!(checking.join().unwrap().is_some(), "it is not repaired");
        assert!(silent.object_requests() > 0);
    }
}
