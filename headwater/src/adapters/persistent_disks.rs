//! The files of disks that are kept: a persistent write cache in `cache/disk-UUID`, and its key in `keys/disk-UUID`.
//!
//! ```text
//!   keys/disk-UUID.new -> cache/disk-UUID with its map -> keys/disk-UUID
//! ```
//! The key is made before the cache and goes before it. So a cache without a key is left over and cannot be read, and a
//! key without a cache means that the cache was lost: that is an error, and no reason to begin with an empty disk. The key
//! has its name only once the map is there: with the other one, whoever was to make the disk died before anything was
//! written to it, and it is begun again.
//!
//! `keys/disk-UUID.incomplete` is there from a close that could not save the last writes to one that could: the file system of
//! the keys is another one than that which failed, where there are two. Where there is one and it cannot be noted there either, this
//! daemon remembers it, and tries again when the disk is next opened or asked about.
//!
//! The caches of several daemons may lie side by side, where a link or a mount leads to. Their keys do not: what has nothing in `keys/` is
//! no disk of this daemon. So something is there until a cache that goes is gone, in place of its key such a note.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use headwater_api::ProblemKind;
use headwater_service::backend::{BackendError, PersistentDiskRef};
use headwater_store::Hash;
use headwater_volume::PersistentOptions;
use parking_lot::Mutex;
use uuid::Uuid;

use crate::keys;

/// Where persistent disks are.
#[derive(Clone, Debug)]
pub struct PersistentDiskFiles {
    /// Of their write caches.
    pub cache_dir: PathBuf,
    /// Of their keys.
    pub keys_dir: PathBuf,
    /// Disks that are incomplete, and that could not be noted.
    unrecorded: Arc<Mutex<HashSet<Uuid>>>,
}

/// What the directory of a disk's write cache is called.
pub fn name(id: Uuid) -> String {
    format!("disk-{id}")
}

/// The end of the name of a key whose cache is not there yet.
const NEW: &str = ".new";

/// The end of the name of a file that says: what was written last is not there.
const INCOMPLETE: &str = ".incomplete";

/// The disk that a file or directory belongs to.
fn id_of(name: &std::ffi::OsStr) -> Option<Uuid> {
    let name = name.to_str()?.strip_prefix("disk-")?;
    let id = [NEW, INCOMPLETE].iter().find_map(|end| name.strip_suffix(end));
    Uuid::parse_str(id.unwrap_or(name)).ok()
}

impl PersistentDiskFiles {
    /// Disks in these directories.
    pub fn new(cache_dir: PathBuf, keys_dir: PathBuf) -> Self {
        Self { cache_dir, keys_dir, unrecorded: Arc::default() }
    }

    /// Opens a disk over a version with what `open` is given: as it was left, or for the first time. Where that fails before
    /// there is a cache, there is no key either: nothing was written, and the next time is the first one again.
    pub fn open<T>(
        &self,
        kept: PersistentDiskRef,
        manifest: Hash,
        open: impl FnOnce(PersistentOptions) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let id = kept.id;
        self.note_again(id);
        let opened = self.options(kept, manifest).and_then(open);
        let new_key = self.new_key(id);
        if !new_key.exists() {
            return opened;
        }
        if opened.is_ok() || self.is_there(id) {
            self.settle(id)?;
            // Of one that went before it, if this daemon's last one died then.
            self.set_incomplete(id, false).map_err(|e| {
                BackendError::from_io(format!("cannot remove {}", self.incomplete(id).display()), e)
            })?;
        } else if let Err(e) = std::fs::remove_file(&new_key) {
            tracing::warn!("cannot remove {}, which is the key of nothing: {e}", new_key.display());
        }
        opened
    }

    fn key(&self, id: Uuid) -> PathBuf {
        self.keys_dir.join(name(id))
    }

    fn new_key(&self, id: Uuid) -> PathBuf {
        self.keys_dir.join(name(id) + NEW)
    }

    /// Gives the key of a cache that is there its name: from now on there is something to lose.
    fn settle(&self, id: Uuid) -> Result<(), BackendError> {
        let key = self.key(id);
        std::fs::rename(self.new_key(id), &key)
            .and_then(|()| File::open(&self.keys_dir)?.sync_all())
            .map_err(|e| BackendError::from_io(format!("cannot rename the new key to {}", key.display()), e))
    }

    /// Whether there is anything of a disk; if that is not all of it, to open it is an error.
    pub fn is_begun(&self, id: Uuid) -> bool {
        self.is_there(id) || self.key(id).exists()
    }

    fn incomplete(&self, id: Uuid) -> PathBuf {
        self.keys_dir.join(name(id) + INCOMPLETE)
    }

    /// Whether the last writes of whoever had a disk open are not on it.
    pub fn is_incomplete(&self, id: Uuid) -> bool {
        self.note_again(id) || self.incomplete(id).exists()
    }

    /// Notes whether a disk has all that was written to it.
    pub fn set_incomplete(&self, id: Uuid, is_incomplete: bool) -> std::io::Result<()> {
        let note = self.incomplete(id);
        if is_incomplete {
            self.unrecorded.lock().insert(id);
            File::create(note)?;
            File::open(&self.keys_dir)?.sync_all()?;
        } else {
            match std::fs::remove_file(note) {
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                removed => removed.and_then(|()| File::open(&self.keys_dir)?.sync_all())?,
            }
        }
        self.unrecorded.lock().remove(&id);
        Ok(())
    }

    /// Notes what could not be noted of a disk before; whether there was such a thing.
    fn note_again(&self, id: Uuid) -> bool {
        let is_unrecorded = self.unrecorded.lock().contains(&id);
        if is_unrecorded && let Err(error) = self.set_incomplete(id, true) {
            tracing::error!(disk = %id, %error, "cannot note that a persistent disk lacks its last writes");
        }
        is_unrecorded
    }

    /// Whether there is a cache.
    fn is_there(&self, id: Uuid) -> bool {
        self.cache_dir.join(name(id)).join("map").exists()
    }

    fn options(&self, kept: PersistentDiskRef, manifest: Hash) -> Result<PersistentOptions, BackendError> {
        let PersistentDiskRef { id, is_begun } = kept;
        let failed = |what: String| BackendError::new(ProblemKind::Failed, what);
        let (name, key_file, new_key) = (name(id), self.key(id), self.new_key(id));
        let exists = self.is_there(id);
        if !key_file.exists() && new_key.exists() {
            // Whoever began the disk died on the way.
            if exists { self.settle(id)? } else { self.discard(id)? }
        }
        if !exists && (is_begun || key_file.exists()) {
            let message = format!(
                "what the machine wrote is gone: its persistent disk {} is not there",
                self.cache_dir.join(&name).display()
            );
            return Err(BackendError::new(ProblemKind::Damaged, message).advise(
                "bring that directory back, or give up what was written: 'headwater image discard' where the machine edits \
                 an image, and 'headwater machine reset' otherwise",
            ));
        }
        keys::make_directory(&self.keys_dir)
            .map_err(|e| BackendError::from_io(format!("cannot make {}", self.keys_dir.display()), e))?;
        let key_file = if exists { &key_file } else { &new_key };
        let key = keys::key(key_file, &self.cache_dir, exists).map_err(|e| {
            failed("cannot use the key of the machine's persistent disk".to_owned()).because(e)
        })?;
        Ok(PersistentOptions { name, key, base_id: manifest.0 })
    }

    /// Removes a disk: its key first.
    pub fn discard(&self, id: Uuid) -> Result<(), BackendError> {
        let failed = |path: &Path, e| BackendError::from_io(format!("cannot remove {}", path.display()), e);
        let cache = self.cache_dir.join(name(id));
        if cache.exists()
            && let Err(error) = self.set_incomplete(id, true)
        {
            // A full file system is no reason to keep it. Only what a crash leaves in this moment stays then.
            tracing::warn!(disk = %id, %error, "cannot note that a persistent disk goes");
        }
        for key in [self.key(id), self.new_key(id)] {
            keys::destroy(&key).map_err(|e| failed(&key, e))?;
        }
        match std::fs::remove_dir_all(&cache) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(failed(&cache, e)),
            _ => {}
        }
        self.set_incomplete(id, false).map_err(|e| failed(&self.incomplete(id), e))
    }

    /// The keys of all disks that something was written to.
    pub fn settled_keys(&self) -> Result<Vec<PathBuf>, BackendError> {
        let failed = |e| BackendError::from_io(format!("cannot read {}", self.keys_dir.display()), e);
        let mut keys = Vec::new();
        let entries = match std::fs::read_dir(&self.keys_dir) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(keys),
            entries => entries.map_err(failed)?,
        };
        for entry in entries {
            let entry = entry.map_err(failed)?;
            let key = id_of(&entry.file_name()).map(|id| self.key(id));
            keys.extend(key.filter(|key| *key == entry.path()));
        }
        Ok(keys)
    }

    /// Removes all disks of this daemon but some. Returns what was removed.
    pub fn sweep(&self, keep: &[Uuid]) -> Result<Vec<String>, BackendError> {
        let mut removed = Vec::new();
        // A disk may have a key and a note.
        for (id, path) in entries(&self.keys_dir)?.into_iter().collect::<BTreeMap<_, _>>() {
            if !keep.contains(&id) {
                self.discard(id)?;
                removed.push(path.display().to_string());
            }
        }
        for (id, path) in entries(&self.cache_dir)? {
            if !keep.contains(&id) {
                tracing::warn!(
                    "{} is a persistent disk without a key here: it is left alone, as it may be another daemon's; if it is nobody's, \
                     nobody can read it any more, and it can be removed",
                    path.display()
                );
            }
        }
        Ok(removed)
    }
}

/// What there is of disks in a directory.
fn entries(dir: &Path) -> Result<Vec<(Uuid, PathBuf)>, BackendError> {
    let failed = |e| BackendError::from_io(format!("cannot clean up {}", dir.display()), e);
    let entries = match std::fs::read_dir(dir) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        found.extend(id_of(&entry.file_name()).map(|id| (id, entry.path())));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(dir: &Path) -> PersistentDiskFiles {
        let files = PersistentDiskFiles::new(dir.join("cache"), dir.join("keys"));
        std::fs::create_dir(&files.cache_dir).unwrap();
        files
    }

    /// A disk that no machine is known to have had open.
    fn kept(id: Uuid) -> PersistentDiskRef {
        PersistentDiskRef { id, is_begun: false }
    }

    fn make(files: &PersistentDiskFiles, id: Uuid) -> PersistentOptions {
        let make = |options: PersistentOptions| {
            make_cache(files, &options.name);
            Ok(options)
        };
        files.open(kept(id), Hash([1; 32]), make).unwrap()
    }

    fn make_cache(files: &PersistentDiskFiles, name: &str) {
        let dir = files.cache_dir.join(name);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("map"), "").unwrap();
    }

    #[test]
    fn a_disk_has_one_key_and_goes_whole() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        let id = Uuid::from_u128(7);
        let first = make(&files, id);
        let again = files.options(kept(id), Hash([1; 32])).unwrap();
        assert!(first == again && first.base_id == [1; 32]);
        assert_ne!(make(&files, Uuid::from_u128(8)).key, first.key);
        files.set_incomplete(id, true).unwrap();
        files.discard(id).unwrap();
        files.discard(id).unwrap();
        assert!(!files.is_incomplete(id));
        assert!(!files.cache_dir.join(&first.name).exists() && !files.keys_dir.join(&first.name).exists());
        assert_ne!(files.options(kept(id), Hash([1; 32])).unwrap().key, first.key);
    }

    #[test]
    fn a_cache_that_is_lost_is_no_empty_disk() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        let options = make(&files, Uuid::from_u128(7));
        std::fs::remove_dir_all(files.cache_dir.join(&options.name)).unwrap();
        let error = files.options(kept(Uuid::from_u128(7)), Hash([1; 32])).unwrap_err();
        assert_eq!(error.kind(), ProblemKind::Damaged);
        let advice = error.advice().unwrap();
        assert!(advice.contains("machine reset") && advice.contains("image discard"), "{advice}");
        // Nor where its key went with it, once a machine had it open.
        let lost = PersistentDiskRef { id: Uuid::from_u128(8), is_begun: true };
        let opened = files.open::<()>(lost, Hash([1; 32]), |_| panic!("it is not there"));
        assert_eq!(opened.unwrap_err().kind(), ProblemKind::Damaged);
    }

    #[test]
    fn a_disk_whose_maker_died_is_begun_again() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        let (id, version) = (Uuid::from_u128(7), Hash([1; 32]));
        let die = |options: PersistentOptions| -> Result<(), BackendError> {
            std::fs::create_dir(files.cache_dir.join(&options.name)).unwrap();
            panic!("killed");
        };
        let dies = std::panic::AssertUnwindSafe(|| files.open(kept(id), version, die));
        assert!(std::panic::catch_unwind(dies).is_err());
        assert!(!files.is_begun(id));
        let die = |options: PersistentOptions| -> Result<(), BackendError> {
            make_cache(&files, &options.name);
            std::fs::write(dir.path().join("key"), options.key).unwrap();
            panic!("killed");
        };
        let dies = std::panic::AssertUnwindSafe(|| files.open(kept(id), version, die));
        assert!(std::panic::catch_unwind(dies).is_err());
        // This one has a map, and opens with the key that it was made with.
        assert!(files.is_begun(id));
        let key = files.open(kept(id), version, |options| Ok(options.key)).unwrap();
        assert!(std::fs::read(dir.path().join("key")).unwrap() == key);
        let keys = std::fs::read_dir(&files.keys_dir).unwrap();
        assert_eq!(keys.map(|key| key.unwrap().file_name()).collect::<Vec<_>>(), [name(id).as_str()]);
    }

    #[test]
    fn a_first_open_that_fails_leaves_no_key() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        let (id, version) = (Uuid::from_u128(7), Hash([1; 32]));
        let failed = || BackendError::new(ProblemKind::Failed, "that directory cannot be written");
        let fails = || files.open::<()>(kept(id), version, |_| Err(failed())).unwrap_err().kind();
        assert_eq!((fails(), fails()), (ProblemKind::Failed, ProblemKind::Failed));
        let key = files.open(kept(id), version, |options| Ok(options.key)).unwrap();
        // It was opened once, so that it is not there means that it is lost, however often one tries.
        assert_eq!((fails(), fails()), (ProblemKind::Damaged, ProblemKind::Damaged));
        // One that is there keeps its key.
        make_cache(&files, &name(id));
        assert_eq!(fails(), ProblemKind::Failed);
        assert_eq!(files.open(kept(id), version, |options| Ok(options.key)).unwrap(), key);
        // It failed after the cache was made.
        let other = Uuid::from_u128(8);
        let failed = files.open::<()>(kept(other), version, |options| {
            make_cache(&files, &options.name);
            Err(failed())
        });
        assert_eq!(failed.unwrap_err().kind(), ProblemKind::Failed);
        assert!(files.open(kept(other), version, |_| Ok(())).is_ok());
    }

    #[test]
    fn sweeping_leaves_what_is_kept_and_what_is_not_ours() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        let (kept, gone) = (Uuid::from_u128(1), Uuid::from_u128(2));
        make(&files, kept);
        make(&files, gone);
        // A key whose cache went first, and those of `headwater export --persistent`.
        std::fs::write(files.keys_dir.join(name(Uuid::from_u128(3))), "").unwrap();
        std::fs::write(files.keys_dir.join("mine"), "").unwrap();
        std::fs::write(files.keys_dir.join(name(Uuid::from_u128(4)) + NEW), "").unwrap();
        files.set_incomplete(Uuid::from_u128(5), true).unwrap();
        std::fs::create_dir(files.cache_dir.join("mine")).unwrap();
        let mut keys = files.settled_keys().unwrap();
        keys.sort();
        assert_eq!(keys, [1, 2, 3].map(|id| files.key(Uuid::from_u128(id))));
        assert_eq!(files.sweep(&[kept]).unwrap().len(), 4);
        for (dir, count) in [(&files.cache_dir, 2), (&files.keys_dir, 2)] {
            assert_eq!(std::fs::read_dir(dir).unwrap().count(), count, "{}", dir.display());
        }
        assert!(files.options(PersistentDiskRef { id: kept, is_begun: false }, Hash([1; 32])).is_ok());
    }

    #[test]
    fn what_another_daemon_keeps_in_the_same_place_stays() {
        let dir = tempfile::tempdir().unwrap();
        let theirs = files(dir.path());
        let (id, gone) = (Uuid::from_u128(1), Uuid::from_u128(2));
        make(&theirs, id);
        let ours = PersistentDiskFiles::new(theirs.cache_dir.clone(), dir.path().join("ours"));
        assert_eq!(ours.sweep(&[]).unwrap(), [""; 0]);
        make(&ours, gone);
        assert_eq!(ours.sweep(&[]).unwrap().len(), 1);
        assert!(theirs.is_there(id) && !ours.is_there(gone));
        assert!(theirs.open(PersistentDiskRef { id, is_begun: true }, Hash([1; 32]), |_| Ok(())).is_ok());
    }

    #[test]
    fn a_disk_of_which_only_the_key_went_goes_at_the_next_start() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        let id = Uuid::from_u128(1);
        let options = make(&files, id);
        // Its directory cannot be removed at first.
        let cache = files.cache_dir.join(&options.name);
        let aside = dir.path().join("aside");
        std::fs::rename(&cache, &aside).unwrap();
        std::fs::write(&cache, "").unwrap();
        files.discard(id).unwrap_err();
        assert_eq!(files.settled_keys().unwrap(), [""; 0].map(PathBuf::from));
        std::fs::remove_file(&cache).unwrap();
        std::fs::rename(&aside, &cache).unwrap();
        assert_eq!(files.sweep(&[]).unwrap().len(), 1);
        assert!(!cache.exists());
        assert_eq!(std::fs::read_dir(&files.keys_dir).unwrap().count(), 0);
    }
}
