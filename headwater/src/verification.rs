//! Verifies the versions of a store and repairs them from other stores: for `store verify`, `image verify` and the
//! scrub.

use std::fmt;
use std::sync::Arc;

use headwater_block::size;
use headwater_image::{
    Cancel, ImageError, ImageErrorKind, Progress, RepairProgress, Touched, VerifyRound, files_touched,
    repair, repair_manifest, verify_in, versions_touched,
};
use headwater_store::{Access, Hash, Image, Store, StoreError, StoreErrorKind, Version};
use serde::Serialize;

use crate::show::printable;
use crate::stores::{self, Credentials};

/// The options of a verification.
pub struct Scrub {
    /// The most bytes per second.
    pub rate: Option<u64>,
    /// Stores that may have intact copies of damaged data.
    pub repair_from: Vec<String>,
    /// Token and certificate authorities for servers.
    pub credentials: Credentials,
}

impl Scrub {
    /// Opens the stores that may have intact copies.
    pub fn open_sources(&self) -> Result<Vec<Arc<dyn Store>>, StoreError> {
        let opened = self.repair_from.iter().map(|name| stores::open(name, Access::Read, &self.credentials));
        Ok(not_waited_for(opened.collect::<Result<Vec<_>, _>>()?))
    }
}

/// Makes these stores fail fast instead of waiting for servers, because the next store may have a copy too.
pub fn not_waited_for(stores: Vec<Arc<dyn Store>>) -> Vec<Arc<dyn Store>> {
    stores.into_iter().map(|store| store.fail_fast().unwrap_or(store)).collect()
}

/// The result of one version.
#[derive(Debug, Default, Serialize)]
pub struct Checked {
    /// The number of verified chunks, including those that were read with earlier versions which share them.
    pub chunks: u64,
    /// The number of chunks and data objects that were repaired.
    pub repaired: u64,
    /// The number of chunks that remain damaged. It can exceed the number of lines.
    pub damaged_chunks: u64,
    /// The damage that remains, one line each.
    pub damage: Vec<String>,
    /// The affected files.
    pub files: Vec<String>,
    /// Why more files may be affected: what could not be examined.
    pub remarks: Vec<String>,
    /// Versions of this store that contain some of the damage, as `IMAGE@NUMBER`.
    pub versions: Vec<String>,
}

/// The damage of a version, in words. Counts chunks, because some lines of damage only say why a repair failed.
pub fn is_damaged(chunks: u64) -> String {
    match chunks {
        // The whole version is damaged, or an object that no chunk needs.
        0 => "is damaged".to_owned(),
        1 => "is damaged in 1 chunk".to_owned(),
        chunks => format!("is damaged in {chunks} chunks"),
    }
}

/// The advice if no store to repair from was named; `command` is the command that found the damage.
pub fn how_to_repair(command: &str) -> String {
    format!(
        "'headwater {command} --repair-from STORE' repairs damage from STORE, another store with intact copies"
    )
}

/// Explains a remark to a reader of the list of files.
pub fn not_named(remark: &str) -> String {
    format!("more files may be affected: {}", printable(remark))
}

/// The present step of a verification, and its progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// Reads the version.
    Reading(Progress),
    /// Repairs damage, and reads the repaired data again.
    Repairing(RepairProgress),
    /// Searches for versions that share the damage.
    LookingForVersions {
        /// The versions that were searched.
        seen: u64,
        /// The versions of the store.
        all: u64,
    },
    /// Searches for files that cannot be read.
    LookingForFiles {
        /// The bytes of files that were read.
        read_bytes: u64,
    },
}

impl fmt::Display for Doing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of =
            |at: &Progress| format!("{} of {}", size::format(at.done_bytes), size::format(at.total_bytes));
        match self {
            Self::Reading(at) => write!(f, "reading: {}", of(at)),
            Self::Repairing(RepairProgress::Repairing { done, listed, copied_bytes }) => {
                write!(f, "repairing: {done} of {listed} chunks or data objects")?;
                match copied_bytes {
                    0 => Ok(()),
                    bytes => write!(f, ", {} copied", size::format(*bytes)),
                }
            }
            Self::Repairing(RepairProgress::Verifying(at)) => {
                write!(f, "reading what was repaired: {}", of(at))
            }
            Self::LookingForVersions { seen, all } => {
                write!(f, "searched {seen} of {all} versions for the same damage")
            }
            Self::LookingForFiles { read_bytes } => {
                write!(f, "looking for affected files: {} read", size::format(*read_bytes))
            }
        }
    }
}

/// Groups versions with the same contents, which are verified once.
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

/// Verifies a version with these names, repairs what can be repaired, and determines what the remaining damage
/// affects. `None`: it was removed meanwhile.
pub fn check(
    store: &dyn Store,
    hash: Hash,
    names: &[String],
    (round, sources): (&VerifyRound, &[Arc<dyn Store>]),
    cancel: &Cancel,
    progress: &mut dyn FnMut(Doing),
) -> Result<Option<Checked>, ImageError> {
    match check_whole(store, hash, (round, sources), cancel, progress) {
        Ok(checked) => Ok(Some(checked)),
        Err(error) => without_manifest(store, hash, names, error),
    }
}

fn check_whole(
    store: &dyn Store,
    hash: Hash,
    (round, sources): (&VerifyRound, &[Arc<dyn Store>]),
    cancel: &Cancel,
    progress: &mut dyn FnMut(Doing),
) -> Result<Checked, ImageError> {
    let manifest = !sources.is_empty() && repair_manifest(store, hash, sources)?;
    let found = verify_in(store, hash, round, cancel, &mut |at| progress(Doing::Reading(at)))?;
    let chunks = found.chunks;
    let (mut left, mut repaired, mut reasons) = (found, u64::from(manifest), Vec::new());
    if !left.is_sound() && !sources.is_empty() {
        let told = &mut |at| progress(Doing::Repairing(at));
        let done = repair(store, hash, &left, (round, sources), cancel, told)?;
        repaired = repaired.saturating_add(done.chunks).saturating_add(done.objects);
        (left, reasons) = (done.left, done.reasons);
    }
    let (mut touched, mut versions) = (Touched::default(), Vec::new());
    if !left.is_sound() {
        let told = &mut |seen, all| progress(Doing::LookingForVersions { seen, all });
        versions = versions_touched(store, &left, round, cancel, told)?;
        let told = &mut |read_bytes| progress(Doing::LookingForFiles { read_bytes });
        touched = files_touched(store, hash, &left, round, cancel, told)?;
    }
    let damaged_chunks = left.damaged_chunks;
    let damage = left.damage().into_iter().chain(reasons).collect();
    let Touched { files, remarks } = touched;
    Ok(Checked { chunks, repaired, damaged_chunks, damage, files, remarks, versions })
}

/// The result for a version whose manifest is damaged or lost: all of it is damaged, and so are all versions with the
/// same manifest. Other errors stay errors, so that a damaged manifest does not prevent the verification of other
/// versions.
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
        // The damage is reported even if the list of versions cannot be read.
        Err(_) if error.kind() != NotFound => names.to_vec(),
        // A plain web server has no list, or a page for people. There, a missing manifest may be a mistyped name.
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
    use std::path::{Path, PathBuf};

    use headwater_image::{ImportOptions, Imported, import, open_source};
    use headwater_store::LocalDir;
    use headwater_testkit::{FileServer, HttpFault, Rng, run, wait_until};

    use super::*;

    /// A store with an incompressible disk of 2 MiB, and a copy of the store, both below `dir`.
    fn two_stores(dir: &Path) -> (PathBuf, PathBuf, LocalDir, Imported) {
        let (raw, at, copy) = (dir.join("disk.raw"), dir.join("store"), dir.join("copy"));
        let mut rng = Rng::new(5);
        let disk: Vec<u8> = (0..2u64 << 17).flat_map(|_| rng.next_u64().to_le_bytes()).collect();
        std::fs::write(&raw, &disk).unwrap();
        let store = LocalDir::open(&at, Access::WRITE).unwrap();
        let options = ImportOptions::new("disk".parse().unwrap(), 0);
        let imported = import(open_source(&raw, None).unwrap(), &store, &options, &mut |_| {}).unwrap();
        run("coreutils", "cp", &["-r", &at.display().to_string(), &copy.display().to_string()]);
        (at, copy, store, imported)
    }

    fn sources(names: &[String]) -> Vec<Arc<dyn Store>> {
        let scrub = Scrub { rate: None, repair_from: names.to_vec(), credentials: Credentials::default() };
        scrub.open_sources().unwrap()
    }

    #[test]
    fn a_check_tells_what_it_does_after_it_has_read_all() {
        let dir = tempfile::tempdir().unwrap();
        let (at, copy, store, imported) = two_stores(dir.path());
        let object = at.join("objects").join(imported.version.objects[0].to_string());
        let good = std::fs::read(&object).unwrap();
        let mut bad = good.clone();
        bad[100_000] ^= 1;
        std::fs::remove_file(&object).unwrap();
        std::fs::write(&object, &bad).unwrap();
        let names = ["disk@1".to_owned()];
        let check_from = |sources: &[Arc<dyn Store>]| {
            let (round, mut told) = (VerifyRound::new(None), Vec::new());
            let hash = imported.version.manifest;
            let tell = &mut |doing: Doing| told.push(doing.to_string());
            let checked = check(&store, hash, &names, (&round, sources), &Cancel::new(), tell);
            (checked.unwrap().unwrap(), told)
        };
        let whole = "2.0 MiB of 2.0 MiB";
        let (checked, told) = check_from(&[]);
        assert_eq!((checked.damaged_chunks, checked.repaired, checked.files.len()), (1, 0, 0));
        // There is no file system, so there are no files.
        assert_eq!(checked.remarks.len(), 1, "{:?}", checked.remarks);
        let reading = told.iter().position(|told| *told == format!("reading: {whole}")).unwrap();
        assert_eq!(
            told[reading + 1..],
            ["searched 0 of 1 versions for the same damage", "looking for affected files: 0 B read"]
        );

        let sources = sources(&[copy.display().to_string()]);
        let (checked, told) = check_from(&sources);
        assert_eq!((checked.damaged_chunks, checked.repaired, checked.remarks.len()), (0, 1, 0));
        let reading = told.iter().position(|told| *told == format!("reading: {whole}")).unwrap();
        for says in ["repairing: 0 of 1 chunks or data objects", "repairing: 1 of 1 chunks or data objects"] {
            assert!(told[reading + 1..].contains(&says.to_owned()), "no '{says}' in {told:?}");
        }
        assert_eq!(told.last(), Some(&format!("reading what was repaired: {whole}")));
        assert!(std::fs::read(&object).unwrap() == good);
        let copying = RepairProgress::Repairing { done: 2, listed: 9, copied_bytes: 3 << 20 };
        assert_eq!(
            Doing::Repairing(copying).to_string(),
            "repairing: 2 of 9 chunks or data objects, 3.0 MiB copied"
        );
    }

    #[test]
    fn a_source_that_goes_silent_in_the_middle_of_an_object_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let (at, copy, store, imported) = two_stores(dir.path());
        for object in std::fs::read_dir(at.join("objects")).unwrap() {
            std::fs::remove_file(object.unwrap().path()).unwrap();
        }
        let (silent, good) = (FileServer::start(&copy, None), FileServer::start(&copy, None));
        silent.fail(HttpFault::HangAfter(100_000));
        let sources = sources(&[silent.url(), good.url()]);
        let checking = std::thread::spawn(move || {
            let (round, names) = (VerifyRound::new(None), ["disk@1".to_owned()]);
            let hash = imported.version.manifest;
            let once = |_| check(&store, hash, &names, (&round, &sources), &Cancel::new(), &mut |_| {});
            // On a busy host, the good store may have been too slow as well.
            let mut checks = (0..5).map(once).map(|checked| checked.unwrap().unwrap());
            checks.find(|checked| checked.repaired > 0 && checked.damage.is_empty())
        });
        wait_until("the repair ends", || checking.is_finished());
        assert!(checking.join().unwrap().is_some(), "it is not repaired");
        assert!(silent.object_requests() > 0);
    }
}
