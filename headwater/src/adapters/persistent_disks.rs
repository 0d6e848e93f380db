//! The files of persistent disks: the write cache in `cache/disk-UUID`, and its key in `keys/disk-UUID`.
//!
//! ```text
//!   keys/disk-UUID.new -> cache/disk-UUID with its map -> keys/disk-UUID
//! ```
//! A disk is created in this order: the key under its temporary name, the cache with its map, the final name of the key. If there is
//! only the temporary key and no map, the creation was interrupted before any write, and the next open creates the disk again. A
//! removal deletes the key first and then the cache. So a cache without a key cannot be read, and a key without a cache means that
//! the cache was lost: that is an error, and no reason to begin with an empty disk.
//!
//! Before a machine can write to its disk, `keys/disk-UUID.incomplete` is created. A close that saves all writes removes it. So the mark
//! stays if the last writes cannot be saved, and if the process or the host ends before it has saved them. The mark is beside the keys
//! because they may be on another file system than the cache that failed.
//!
//! Several daemons may share the directory of caches, by a link or a mount, but each has its own keys: a cache with no file in `keys/`
//! belongs to another daemon. So a removal creates `disk-UUID.incomplete` before it deletes the key, and deletes this file last.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use headwater_api::ProblemKind;
use headwater_service::backend::{BackendError, PersistentDiskRef};
use headwater_store::Hash;
use headwater_volume::PersistentOptions;
use uuid::Uuid;

use crate::keys;

/// Where persistent disks are.
#[derive(Clone, Debug)]
pub struct PersistentDiskFiles {
    /// The directory of their write caches.
    pub cache_dir: PathBuf,
    /// The directory of their keys.
    pub keys_dir: PathBuf,
}

/// The name of the directory of a disk's write cache.
pub fn name(id: Uuid) -> String {
    format!("disk-{id}")
}

/// The ending of the name of a key whose cache does not exist yet.
const NEW: &str = ".new";

/// The ending of the name of a file that marks a disk: a machine uses it, the last writes may be missing, or the disk is being removed.
pub const INCOMPLETE: &str = ".incomplete";

/// The disk that a file or directory belongs to.
fn id_of(name: &std::ffi::OsStr) -> Option<Uuid> {
    let name = name.to_str()?.strip_prefix("disk-")?;
    let id = [NEW, INCOMPLETE].iter().find_map(|end| name.strip_suffix(end));
    Uuid::parse_str(id.unwrap_or(name)).ok()
}

/// A file that marks a disk in a directory of keys. `None`: no machine uses a disk, and none lacks its last writes.
pub fn mark_in(keys_dir: &Path) -> std::io::Result<Option<PathBuf>> {
    let entries = match std::fs::read_dir(keys_dir) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        if id_of(&name).is_some() && name.as_encoded_bytes().ends_with(INCOMPLETE.as_bytes()) {
            return Ok(Some(entry.path()));
        }
    }
    Ok(None)
}

impl PersistentDiskFiles {
    /// Disks in these directories.
    pub fn new(cache_dir: PathBuf, keys_dir: PathBuf) -> Self {
        Self { cache_dir, keys_dir }
    }

    /// Calls `open` with the options of the disk, and creates the disk if it does not exist. If `open` fails before the cache exists, the
    /// new key is removed, so the next call creates the disk again.
    pub fn open<T>(
        &self,
        kept: PersistentDiskRef,
        manifest: Hash,
        open: impl FnOnce(PersistentOptions) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let id = kept.id;
        let opened = self.options(kept, manifest).and_then(open);
        let new_key = self.new_key(id);
        if !new_key.exists() {
            return opened;
        }
        if opened.is_ok() || self.is_there(id) {
            self.publish_key(id)?;
            // An interrupted removal may have left the mark of an earlier disk with this number.
            self.set_incomplete(id, false).map_err(|e| {
                BackendError::from_io(format!("cannot remove {}", self.incomplete(id).display()), e)
            })?;
        } else if let Err(e) = std::fs::remove_file(&new_key) {
            tracing::warn!(
                "cannot remove {}, the key of a disk that was not created: {e}",
                new_key.display()
            );
        }
        opened
    }

    fn key(&self, id: Uuid) -> PathBuf {
        self.keys_dir.join(name(id))
    }

    fn new_key(&self, id: Uuid) -> PathBuf {
        self.keys_dir.join(name(id) + NEW)
    }

    /// Gives the new key of a cache its final name. From now on the disk has data to lose.
    fn publish_key(&self, id: Uuid) -> Result<(), BackendError> {
        let key = self.key(id);
        std::fs::rename(self.new_key(id), &key)
            .and_then(|()| File::open(&self.keys_dir)?.sync_all())
            .map_err(|e| BackendError::from_io(format!("cannot rename the new key to {}", key.display()), e))
    }

    /// Whether a disk has a cache or a key. If it has only the key, opening it fails.
    pub fn is_begun(&self, id: Uuid) -> bool {
        self.is_there(id) || self.key(id).exists()
    }

    fn incomplete(&self, id: Uuid) -> PathBuf {
        self.keys_dir.join(name(id) + INCOMPLETE)
    }

    /// Whether a machine uses a disk, or the last writes to it may be missing.
    pub fn is_incomplete(&self, id: Uuid) -> bool {
        // If that cannot be found out, the writes may be missing.
        !matches!(self.incomplete(id).try_exists(), Ok(false))
    }

    /// Marks a disk before its machine can write to it. Returns whether its last writes may be missing from an earlier use.
    pub fn begin_use(&self, id: Uuid) -> Result<bool, BackendError> {
        let was_incomplete = self.is_incomplete(id);
        self.set_incomplete(id, true).map_err(|e| {
            let message = format!(
                "cannot record that the machine uses its persistent disk: cannot create {}",
                self.incomplete(id).display()
            );
            BackendError::from_io(message, e)
        })?;
        Ok(was_incomplete)
    }

    /// Creates or removes the mark of a disk.
    pub fn set_incomplete(&self, id: Uuid, is_incomplete: bool) -> std::io::Result<()> {
        let note = self.incomplete(id);
        if is_incomplete {
            File::create(note)?;
        } else {
            match std::fs::remove_file(note) {
                Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
                removed => removed?,
            }
        }
        File::open(&self.keys_dir)?.sync_all()
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
            // The creation was interrupted.
            if exists { self.publish_key(id)? } else { self.discard(id)? }
        }
        if !exists && (is_begun || key_file.exists()) {
            let message = format!(
                "the machine's data is lost: its persistent disk {} does not exist",
                self.cache_dir.join(&name).display()
            );
            return Err(BackendError::new(ProblemKind::Damaged, message).advise(
                "restore that directory, or discard the data: 'headwater image discard' if the machine edits \
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

    /// Removes a disk, first its key.
    pub fn discard(&self, id: Uuid) -> Result<(), BackendError> {
        let failed = |path: &Path, e| BackendError::from_io(format!("cannot remove {}", path.display()), e);
        let cache = self.cache_dir.join(name(id));
        if cache.exists()
            && let Err(error) = self.set_incomplete(id, true)
        {
            // A full file system must not prevent a removal. After a crash here, the cache stays.
            tracing::warn!(disk = %id, %error, "cannot record that a persistent disk is being removed");
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

    /// The keys of all disks with data.
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

    /// Removes all disks of this daemon except `keep`. Returns what was removed.
    pub fn sweep(&self, keep: &[Uuid]) -> Result<Vec<String>, BackendError> {
        let mut removed = Vec::new();
        // A disk may have a key and a mark.
        for (id, path) in entries(&self.keys_dir)?.into_iter().collect::<BTreeMap<_, _>>() {
            if !keep.contains(&id) {
                self.discard(id)?;
                removed.push(format!(
                    "the persistent disk of {}: no machine of the database has it",
                    path.display()
                ));
            }
        }
        for (id, path) in entries(&self.cache_dir)? {
            if !keep.contains(&id) {
                tracing::warn!(
                    "{} is a persistent disk without a key here. It is left alone, because another daemon may own it. If no daemon owns it, \
                     remove it: without a key it cannot be read",
                    path.display()
                );
            }
        }
        Ok(removed)
    }
}

/// The files and directories of disks in a directory.
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

    /// A disk that no machine has opened yet.
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
        // The same if its key was removed with it, after a machine had it open.
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
        // This disk has a map, and opens with the key that it was made with.
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
        // The disk was opened before, so a missing cache always means that it is lost.
        assert_eq!((fails(), fails()), (ProblemKind::Damaged, ProblemKind::Damaged));
        // A cache that exists keeps its key.
        make_cache(&files, &name(id));
        assert_eq!(fails(), ProblemKind::Failed);
        assert_eq!(files.open(kept(id), version, |options| Ok(options.key)).unwrap(), key);
        // The open failed after the cache was created.
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
        // A key whose cache was removed first, and the keys of `headwater export --persistent`.
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
