//! Verifying the versions of a store and repairing them from other stores: for `store verify`, `image verify` and the scrub.

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
        let opened = self.repair_from.iter().map(|name| stores::open(name, Access::Read, &self.credentials));
        Ok(not_waited_for(opened.collect::<Result<Vec<_>, _>>()?))
    }
}

/// Stores that may have what is damaged in another one, each as one for which nobody waits: the next one may have it, too.
pub fn not_waited_for(stores: Vec<Arc<dyn Store>>) -> Vec<Arc<dyn Store>> {
    stores.into_iter().map(|store| store.fail_fast().unwrap_or(store)).collect()
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
    /// Why there may be more of them: what could not be looked into.
    pub remarks: Vec<String>,
    /// Versions of this store that hold some of it, as `IMAGE@NUMBER`.
    pub versions: Vec<String>,
}

/// What is wrong with a version, in words. Lines of damage are no count: some say why a repair failed.
pub fn is_damaged(chunks: u64) -> String {
    match chunks {
        // All of it is, or something that no chunk needs.
        0 => "is damaged".to_owned(),
        1 => "is damaged in 1 chunk".to_owned(),
        chunks => format!("is damaged in {chunks} chunks"),
    }
}

/// How what was found damaged is put right, where no store was named to repair it from; `command` is what found it.
pub fn how_to_repair(command: &str) -> String {
    format!("'headwater {command} --repair-from STORE' repairs what STORE, another store, has right")
}

/// What a remark means for who reads the list of files.
pub fn not_named(remark: &str) -> String {
    format!("more files may be affected: {}", printable(remark))
}

/// What a check does, and how far that is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// It reads the version.
    Reading(Progress),
    /// It repairs what it found, and reads that again.
    Repairing(RepairProgress),
    /// It looks for versions that hold what is damaged.
    LookingForVersions {
        /// Versions that were looked at.
        seen: u64,
        /// Versions of the store.
        all: u64,
    },
    /// It looks for files that cannot be read.
    LookingForFiles {
        /// Bytes of files that were read for that.
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
                write!(f, "repairing: {done} of {listed} places")?;
                match copied_bytes {
                    0 => Ok(()),
                    bytes => write!(f, ", {} copied", size::format(*bytes)),
                }
            }
            Self::Repairing(RepairProgress::Verifying(at)) => {
                write!(f, "reading what was repaired: {}", of(at))
            }
            Self::LookingForVersions { seen, all } => {
                write!(f, "looking for versions that are touched: {seen} of {all}")
            }
            Self::LookingForFiles { read_bytes } => {
                write!(f, "looking for files that are touched: {} read", size::format(*read_bytes))
            }
        }
    }
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
    use std::path::{Path, PathBuf};

    use headwater_image::{ImportOptions, Imported, import, open_source};
    use headwater_store::LocalDir;
    use headwater_testkit::{FileServer, HttpFault, Rng, run, wait_until};

    use super::*;

    /// A store with a disk of 2 MiB that nothing makes smaller, and a copy of it, both below `dir`.
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
        // There is no file system, which is no file.
        assert_eq!(checked.remarks.len(), 1, "{:?}", checked.remarks);
        let reading = told.iter().position(|told| *told == format!("reading: {whole}")).unwrap();
        assert_eq!(
            told[reading + 1..],
            ["looking for versions that are touched: 0 of 1", "looking for files that are touched: 0 B read"]
        );

        let sources = sources(&[copy.display().to_string()]);
        let (checked, told) = check_from(&sources);
        assert_eq!((checked.damaged_chunks, checked.repaired, checked.remarks.len()), (0, 1, 0));
        let reading = told.iter().position(|told| *told == format!("reading: {whole}")).unwrap();
        for says in ["repairing: 0 of 1 places", "repairing: 1 of 1 places"] {
            assert!(told[reading + 1..].contains(&says.to_owned()), "no '{says}' in {told:?}");
        }
        assert_eq!(told.last(), Some(&format!("reading what was repaired: {whole}")));
        assert!(std::fs::read(&object).unwrap() == good);
        let copying = RepairProgress::Repairing { done: 2, listed: 9, copied_bytes: 3 << 20 };
        assert_eq!(Doing::Repairing(copying).to_string(), "repairing: 2 of 9 places, 3.0 MiB copied");
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
            // The good one may have been too slow as well, on a busy host.
            let mut checks = (0..5).map(once).map(|checked| checked.unwrap().unwrap());
            checks.find(|checked| checked.repaired > 0 && checked.damage.is_empty())
        });
        wait_until("the repair ends", || checking.is_finished());
        assert!(checking.join().unwrap().is_some(), "it is not repaired");
        assert!(silent.object_requests() > 0);
    }
}
