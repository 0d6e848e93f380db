//! A store in a local directory. One process may write to it at a time (make, copy and remove versions), and
//! any number may read. A *pin* keeps a version from being removed while a process uses it; a *publication* writes a
//! new version.
//!
//! ```text
//!   DIR/store          format version and chunk size
//!   DIR/lock           locked by the one process that writes
//!   DIR/images/NAME    the versions of an image
//!   DIR/manifests/HASH immutable; a shared lock on it is a pin
//!   DIR/objects/HASH   immutable, except that it may get holes where no version needs it
//!   DIR/holes/HASH     the holes of an object, and the hash tree nodes above them
//!   DIR/traces/HASH    the boot trace of the version with this manifest: a hint, replaced as a whole
//!   DIR/trees/HASH     the hash tree of a long manifest, to check parts of it
//!   DIR/trim           objects of which less is needed since a version was removed
//!   DIR/spare          reserved space for the list of an image on a full disk
//!   DIR/tmp/           files being written; a writer empties it when it opens the store, except for interrupted copies
//! ```
//!
//! # After a crash
//! An interrupted publication leaves one of these states: nothing; files in `tmp`; an unneeded object; an
//! unneeded object and an unneeded manifest; the complete version. An interrupted removal leaves everything
//! or unneeded files. The next writer removes unneeded files first, unless a process has pinned a version
//! that is no longer listed.
//!
//! # Lock order
//! `Inner::trimming`, which is held while bytes of objects are read, then `Inner::state` or `Inner::placing`,
//! then the lock of a manifest. None of the last three is held while bytes of objects are read or written.

mod copying;
#[cfg(test)]
mod crash_tests;
mod files;
mod layout;
mod object;
mod parts;
#[cfg(test)]
mod power_tests;
mod publication;
mod reserve_file;
mod trim;

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, TryLockError};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::local_dir::files::{lock_shared, read_small, remove, replace_file, share_dir, sync_dir};
use crate::local_dir::layout::Layout;
use crate::local_dir::object::LocalObject;
use crate::local_dir::publication::LocalPublication;
use crate::local_dir::trim::Trim;
use crate::name::ImageName;
use crate::needs::Needs;
use crate::refs::{self, Image, Version};
use crate::store::{
    Listed, MANIFEST_MAX_BYTES, Object, Parts, Patch, Pin, Publication, Removed, Store, TRACE_MAX_BYTES,
};

pub use crate::local_dir::layout::{
    CHUNK_BYTES_DEFAULT, CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, chunk_bytes_of, settings_bytes,
    settings_bytes_with_holes,
};

/// The largest file in `images/`: far more than [`refs::VERSIONS_MAX`] versions of a few objects need.
const REFS_MAX_BYTES: u64 = 1 << 30;

/// How long a pin waits for an exclusive lock on its manifest. A removal takes far less time, even on a disk
/// with slow syncs.
const PIN_TIMEOUT: Duration = Duration::from_secs(60);

/// What a store is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading. The store must exist; another process may write to it.
    Read,
    /// Reading and writing, as the only writer. The store is created if it does not exist. An existing store
    /// ignores this chunk size.
    Write {
        /// Chunk size of a new store: a power of two from [`CHUNK_BYTES_MIN`] to [`CHUNK_BYTES_MAX`].
        new_chunk_bytes: u32,
    },
    /// As `Write`, to copy versions to this store: the file of an interrupted copy is kept for a week so that
    /// the copy can continue.
    Copy {
        /// Chunk size of a new store.
        new_chunk_bytes: u32,
    },
}

impl Access {
    /// Writing; a new store gets the default chunk size.
    pub const WRITE: Self = Self::Write { new_chunk_bytes: CHUNK_BYTES_DEFAULT };
}

/// A store in a local directory, open for reading or writing. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct LocalDir {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    layout: Layout,
    chunk_bytes: u32,
    /// Locked while this process writes; `None` when reading.
    writer_lock: Option<File>,
    state: Mutex<State>,
    next_temporary: AtomicU64,
    /// Whether it was logged that there is no space for the reserve file.
    lacks_reserve: AtomicBool,
    /// Whether files of interrupted copies are kept.
    keeps_parts: bool,
    /// Objects that are being copied to the file named after them.
    copying: Mutex<HashSet<Hash>>,
    /// Held while an object and its list of holes are put in place, because two copies of one object may have
    /// different holes.
    placing: Mutex<()>,
    /// Held while trimming.
    trimming: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    /// Publications in progress. Meanwhile no object may be reclaimed, because they may refer to it.
    publications: usize,
    /// Whether a reclaim was postponed, or something in use was left.
    sweep_wanted: bool,
    /// Counts the publications and removals that began. While it is unchanged, no additional bytes are
    /// needed.
    changes: u64,
    /// Objects to be trimmed.
    trim: Trim,
}

/// The outcome of a reclaim.
#[derive(Debug, Default)]
struct Reclaimed {
    freed_bytes: u64,
    /// Whether something was left because a version that is no longer listed is pinned.
    is_postponed: bool,
}

impl LocalDir {
    /// Opens the store in `dir`, and with write access creates it if it is missing.
    pub fn open(dir: &Path, access: Access) -> Result<Self, StoreError> {
        if dir.metadata().is_ok_and(|found| !found.is_dir()) {
            let why =
                format!("cannot use {} as a store: it is a file, and a store is a directory", dir.display());
            return Err(StoreError::new(StoreErrorKind::Invalid, why));
        }
        let layout = Layout::new(dir);
        let (writer_lock, chunk_bytes) = match access {
            Access::Read => (None, layout.read_settings()?),
            Access::Write { new_chunk_bytes } | Access::Copy { new_chunk_bytes } => {
                fs::create_dir_all(dir).map_err(|e| {
                    StoreError::from_os(format!("cannot make the store {}", dir.display()), e)
                })?;
                // Checked first, because a file `lock` of another program would be overwritten.
                layout.refuse_foreign_files()?;
                let lock = lock_for_writing(&layout)?;
                let chunk_bytes = layout.read_or_make_settings(new_chunk_bytes)?;
                (Some(lock), chunk_bytes)
            }
        };
        let inner = Inner {
            layout,
            chunk_bytes,
            writer_lock,
            state: Mutex::new(State::default()),
            next_temporary: AtomicU64::new(1),
            lacks_reserve: AtomicBool::new(false),
            keeps_parts: matches!(access, Access::Copy { .. }),
            copying: Mutex::default(),
            placing: Mutex::default(),
            trimming: Mutex::default(),
        };
        if access != Access::Read {
            inner.take_up_trim();
        }
        match access {
            Access::Read => {}
            Access::Write { .. } => inner.sweep_orphans()?,
            Access::Copy { .. } => inner.remove_abandoned(),
        }
        if access != Access::Read {
            inner.keep_reserve();
        }
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.inner.layout.root
    }

    /// Whether this process may write.
    pub fn is_writable(&self) -> bool {
        self.inner.writer_lock.is_some()
    }
}

/// Takes the writer's lock, which is released when the process ends, in whatever way.
fn lock_for_writing(layout: &Layout) -> Result<File, StoreError> {
    let path = layout.lock();
    let tried = || format!("cannot lock the store {}", layout.root.display());
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(|e| StoreError::from_os(tried(), e))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let holder = read_small(&path, 64).ok().and_then(|b| String::from_utf8(b).ok());
            let holder = holder.as_deref().map(str::trim).filter(|h| !h.is_empty()).unwrap_or("unknown");
            return Err(StoreError::new(
                StoreErrorKind::Locked,
                format!(
                    "the store {} is in use by another process (pid {holder}), and only one may write to it: \
                     end that process, or, if it is the daemon, let the daemon do the work ('headwater image pull STORE' \
                     copies versions of another store, 'headwater image import FILE' makes one)",
                    layout.root.display()
                ),
            ));
        }
        Err(TryLockError::Error(e)) => return Err(StoreError::from_os(tried(), e)),
    }
    // The process id is only for the message above. The lock itself is what counts, even on a full disk. The
    // file is overwritten in place, so that no other process can take its space in between.
    let note = format!("{}\n", std::process::id());
    let noted = file
        .write_all_at(note.as_bytes(), 0)
        .and_then(|()| file.set_len(u64::try_from(note.len()).unwrap_or(u64::MAX)))
        .map_err(|e| StoreError::from_os(tried(), e));
    match noted {
        Err(e) if e.kind() != StoreErrorKind::NoSpace => Err(e),
        _ => Ok(file),
    }
}

impl Inner {
    fn must_be_writable(&self) -> Result<(), StoreError> {
        if self.writer_lock.is_some() {
            return Ok(());
        }
        Err(StoreError::new(
            StoreErrorKind::ReadOnly,
            format!("the store {} was opened for reading only", self.layout.root.display()),
        ))
    }

    fn temporary(&self, what: &str) -> PathBuf {
        let number = self.next_temporary.fetch_add(1, Ordering::Relaxed);
        self.layout.tmp().join(format!("{what}-{number}"))
    }

    fn image(&self, name: &ImageName) -> Result<Option<Image>, StoreError> {
        let path = self.layout.image(name);
        match read_small(&path, REFS_MAX_BYTES) {
            Ok(bytes) => Image::decode(name, &bytes).map(Some),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(StoreError::from_os(format!("cannot read {}", path.display()), e)),
        }
    }

    fn image_names(&self) -> Result<Vec<ImageName>, StoreError> {
        let dir = self.layout.images();
        let failed = |e| StoreError::from_os(format!("cannot list {}", dir.display()), e);
        let mut names: Vec<ImageName> = Vec::new();
        for entry in fs::read_dir(&dir).map_err(failed)? {
            let file_name = entry.map_err(failed)?.file_name();
            match file_name.to_str().map(str::parse) {
                Some(Ok(name)) => names.push(name),
                _ => tracing::warn!(file = ?file_name, dir = %dir.display(), "not an image; ignored"),
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn images(&self) -> Result<Vec<Image>, StoreError> {
        let names = self.image_names()?;
        let images = names.iter().map(|name| self.image(name));
        // An image that was removed since the directory was read is missing, which is no error.
        images.filter_map(Result::transpose).collect()
    }

    /// Removes the list of versions, durably.
    fn remove_image(&self, name: &ImageName) -> Result<(), StoreError> {
        let path = self.layout.image(name);
        remove(&path).map_err(|e| StoreError::from_os(format!("cannot remove {}", path.display()), e))?;
        sync_dir(&self.layout.images())
    }

    /// Puts a new list of versions in place, durably.
    fn put_image(&self, image: &Image) -> Result<(), StoreError> {
        let path = self.layout.image(&image.name);
        replace_file(&self.temporary("image"), &path, &image.encode()?)
    }

    /// Empties `tmp` and removes what no version needs.
    fn sweep_orphans(&self) -> Result<(), StoreError> {
        let tmp = self.layout.tmp();
        let failed = |e| StoreError::from_os(format!("cannot clean up {}", tmp.display()), e);
        for entry in fs::read_dir(&tmp).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            tracing::info!(path = %path.display(), "removing a file of an interrupted import");
            remove(&path).map_err(failed)?;
        }
        match self.reclaim(&HashMap::new()) {
            Ok(reclaimed) => {
                self.state.lock().sweep_wanted = reclaimed.is_postponed;
                Ok(())
            }
            // Unless every list can be read, it is unknown what is needed, so nothing is removed.
            Err(e) if e.kind() == StoreErrorKind::Damaged || e.kind() == StoreErrorKind::UnknownFormat => {
                tracing::warn!(error = %e, "the store is not cleaned up, because not all lists of versions can be read");
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    /// Removes what no version needs. If an unneeded manifest is still pinned, it stays together with all
    /// objects, because it is not known here which objects it needs. The caller has locked the manifests in
    /// `locked`, and holds `state` or is the only user.
    fn reclaim(&self, locked: &HashMap<Hash, File>) -> Result<Reclaimed, StoreError> {
        let mut needed: HashSet<Hash> = HashSet::new();
        for image in self.images()? {
            for version in image.versions {
                needed.insert(version.manifest);
                needed.extend(version.objects);
            }
        }
        let mut reclaimed = Reclaimed::default();
        let layout = &self.layout;
        for dir in [layout.manifests(), layout.objects(), layout.holes(), layout.traces(), layout.trees()] {
            self.reclaim_in(&dir, &needed, locked, &mut reclaimed)?;
            if reclaimed.is_postponed {
                break;
            }
        }
        Ok(reclaimed)
    }

    fn reclaim_in(
        &self,
        dir: &Path,
        needed: &HashSet<Hash>,
        locked: &HashMap<Hash, File>,
        reclaimed: &mut Reclaimed,
    ) -> Result<(), StoreError> {
        let failed = |e| StoreError::from_os(format!("cannot clean up {}", dir.display()), e);
        // A store of an earlier release lacks these folders. Another user may have created them, and files
        // that are left in them do no harm.
        let is_advice =
            [self.layout.holes(), self.layout.traces(), self.layout.trees()].iter().any(|it| dir == it);
        let (mut is_told, mut are_holes_gone) = (false, false);
        let mut stays = |e: std::io::Error| {
            // One line for each folder.
            if !std::mem::replace(&mut is_told, true) {
                tracing::warn!(error = %failed(e), "unneeded files stay in the store");
            }
        };
        let entries = match fs::read_dir(dir) {
            Err(e) if is_advice => {
                if e.kind() != std::io::ErrorKind::NotFound {
                    stays(e);
                }
                return Ok(());
            }
            entries => entries.map_err(failed)?,
        };
        for entry in entries {
            let entry = match entry {
                Err(e) if is_advice => {
                    stays(e);
                    break;
                }
                entry => entry.map_err(failed)?,
            };
            let name = entry.file_name();
            // An interrupted trace is removed with its version.
            let stem = name.to_str().map(|name| name.split_once('.').map_or(name, |(stem, _)| stem));
            let hash = stem.and_then(|stem| stem.parse::<Hash>().ok());
            let Some(hash) = hash.filter(|hash| !needed.contains(hash)) else { continue };
            let mut lock = None;
            if dir == self.layout.manifests() && !locked.contains_key(&hash) {
                lock = lock_unless_pinned(&entry.path()).map_err(failed)?;
                if lock.is_none() {
                    reclaimed.is_postponed = true;
                    continue;
                }
            }
            // An object with holes frees only the space that it occupies.
            let len = entry.metadata().map_or(0, |file| file.len().min(file.blocks().saturating_mul(512)));
            match remove(&entry.path()) {
                Err(e) if is_advice => {
                    stays(e);
                    continue;
                }
                removed => removed.map_err(failed)?,
            }
            reclaimed.freed_bytes = reclaimed.freed_bytes.saturating_add(len);
            // Held until the file is removed. Otherwise a pin could lock a file that no longer has a name.
            drop(lock);
            are_holes_gone |= dir == self.layout.holes();
        }
        // If a power cut restored a removed list, it would claim holes in an object of that name that is
        // written later.
        if are_holes_gone { sync_dir(dir) } else { Ok(()) }
    }

    fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError> {
        let path = self.layout.manifest(id);
        let bytes = read_small(&path, MANIFEST_MAX_BYTES)
            .map_err(|e| StoreError::from_os(format!("cannot read the manifest {}", path.display()), e))?;
        if Hash::of(&bytes) != id {
            return Err(StoreError::new(
                StoreErrorKind::Damaged,
                format!(
                    "the manifest {} is damaged: the hash of its bytes is not the one in its name",
                    path.display()
                ),
            ));
        }
        Ok(bytes)
    }

    fn trace(&self, manifest: Hash) -> Result<Option<Vec<u8>>, StoreError> {
        let path = self.layout.trace(manifest);
        match read_small(&path, TRACE_MAX_BYTES) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(StoreError::from_os(format!("cannot read {}", path.display()), e)),
        }
    }

    /// Needs no writer's lock. The temporary file has this process's id in its name, and is beside the trace,
    /// where no writer removes it before the rename.
    fn set_trace(&self, manifest: Hash, trace: Option<&[u8]>) -> Result<(), StoreError> {
        let path = self.layout.trace(manifest);
        let failed = |e| StoreError::from_os(format!("cannot write {}", path.display()), e);
        let Some(trace) = trace else {
            return match remove(&path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(failed(e)),
                _ => Ok(()),
            };
        };
        // While this pin is held, no removal of the version can leave the trace behind. If another process
        // removes the version in the meantime, the next start of a writer removes the trace.
        let _pin = self.pin(manifest)?;
        let traces = self.layout.traces();
        self.make_folder(&traces).map_err(failed)?;
        let number = self.next_temporary.fetch_add(1, Ordering::Relaxed);
        let part = format!("{}.{}-{number}.part", manifest, std::process::id());
        replace_file(&traces.join(part), &path, trace)
    }

    /// Creates a folder that a store of an earlier release lacks.
    fn make_folder(&self, folder: &Path) -> Result<(), std::io::Error> {
        if folder.exists() {
            return Ok(());
        }
        fs::create_dir_all(folder)?;
        share_dir(folder, &self.layout.objects())?;
        // The folder itself must be durable before its contents are.
        sync_dir(&self.layout.root).map_err(std::io::Error::other)
    }

    /// Called when a publication ends. `left_something`: an object without a version may exist.
    fn publication_over(&self, left_something: bool) {
        let mut state = self.state.lock();
        state.publications = state.publications.saturating_sub(1);
        state.sweep_wanted |= left_something;
        if let Err(e) = self.reclaim_if_wanted(&mut state, &HashMap::new()) {
            tracing::warn!(error = %e, "cannot free the space of unneeded objects now; a later write or removal frees it");
        }
    }

    fn reclaim_if_wanted(&self, state: &mut State, locked: &HashMap<Hash, File>) -> Result<u64, StoreError> {
        if state.publications > 0 || !state.sweep_wanted {
            return Ok(0);
        }
        let reclaimed = self.reclaim(locked)?;
        state.sweep_wanted = reclaimed.is_postponed;
        Ok(reclaimed.freed_bytes)
    }

    fn pin(&self, manifest: Hash) -> Result<File, StoreError> {
        let path = self.layout.manifest(manifest);
        let gone = || {
            StoreError::new(
                StoreErrorKind::NotFound,
                format!("version {} is not in the store {}", manifest.short(), self.layout.root.display()),
            )
        };
        let tried = || format!("cannot pin {}", path.display());
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err(gone()),
            Err(e) => return Err(StoreError::from_os(tried(), e)),
        };
        // Usually only a removal holds an exclusive lock, and it may still fail, so the pin waits for it. But
        // any process that may read the file can lock it as well.
        if !lock_shared(&file, PIN_TIMEOUT).map_err(|e| StoreError::from_os(tried(), e))? {
            let why = "another process has locked the file for a minute (headwater does that only for moments): find \
                       the process with 'lslocks', and end it";
            return Err(StoreError::new(StoreErrorKind::InUse, format!("{}: {why}", tried())));
        }
        // A removal may have come before the lock. Then the lock is on a file without a name, and protects
        // nothing.
        let locked = file.metadata().map_err(|e| StoreError::from_os(tried(), e))?;
        match fs::metadata(&path) {
            Ok(named) if (named.dev(), named.ino()) == (locked.dev(), locked.ino()) => Ok(file),
            _ => Err(gone()),
        }
    }

    /// Removes a version or the whole image. With `with_channels`, the image is removed even if its channels
    /// point to versions.
    fn remove(
        &self,
        name: &ImageName,
        number: Option<u32>,
        with_channels: bool,
    ) -> Result<Removed, StoreError> {
        self.must_be_writable()?;
        let mut state = self.state.lock();
        let mut image = self.image(name)?.ok_or_else(|| refs::no_such_image(name))?;
        if number.is_some() || !with_channels {
            image.check_removal(number)?;
        }
        let going: Vec<Version> =
            image.versions.iter().filter(|v| number.is_none_or(|n| v.number == n)).cloned().collect();
        for version in &going {
            image.forget(version.number);
        }

        let mut still_needed: HashSet<Hash> = HashSet::new();
        let others = self.images()?.into_iter().filter(|other| other.name != *name);
        for version in others.chain([image.clone()]).flat_map(|image| image.versions) {
            still_needed.insert(version.manifest);
            still_needed.extend(version.objects);
        }
        state.changes = state.changes.wrapping_add(1);
        // Held until the files are removed, so that no process pins a version that is being removed.
        let mut locks = HashMap::new();
        for version in going.iter().filter(|v| !still_needed.contains(&v.manifest)) {
            // Two numbers can have one manifest, and the second lock would wait for the first.
            if locks.contains_key(&version.manifest) {
                continue;
            }
            if let Some(lock) = self.lock_manifest_for_removal(name, version.number, version.manifest)? {
                locks.insert(version.manifest, lock);
            }
        }
        let objects = going.iter().flat_map(|version| version.objects.iter().copied());
        // Recorded before the versions are removed, so that the record survives a crash after that.
        self.want_trim(&mut state, objects.filter(|id| still_needed.contains(id)).collect());
        match number {
            Some(_) => self.put_changed(&image)?,
            None => self.remove_image(name)?,
        }
        state.sweep_wanted = true;
        // The versions are removed, whether or not their space can be freed.
        let freed_bytes = self.reclaim_if_wanted(&mut state, &locks).unwrap_or_else(|e| {
            tracing::warn!(error = %e, "cannot free the space of unneeded objects now; a later write or removal frees it");
            0
        });
        drop(locks);
        self.keep_reserve();
        Ok(Removed { versions: going.iter().map(|v| v.number).collect(), freed_bytes })
    }

    fn lock_manifest_for_removal(
        &self,
        name: &ImageName,
        number: u32,
        manifest: Hash,
    ) -> Result<Option<File>, StoreError> {
        match lock_unless_pinned(&self.layout.manifest(manifest)) {
            Ok(Some(file)) => Ok(Some(file)),
            Ok(None) => Err(StoreError::new(
                StoreErrorKind::InUse,
                format!(
                    "cannot remove {name}@{number}: a machine, an export, a check or a copy is using it; stop that first"
                ),
            )),
            // A version whose manifest is lost can still be removed.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(StoreError::from_os(format!("cannot remove {name}@{number}"), e)),
        }
    }
}

/// Takes an exclusive lock on a manifest that is to be removed; `None` if it is pinned.
fn lock_unless_pinned(path: &Path) -> std::io::Result<Option<File>> {
    let file = files::open_to_lock(path)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(e)) => Err(e),
    }
}

impl Store for LocalDir {
    fn chunk_bytes(&self) -> u32 {
        self.inner.chunk_bytes
    }

    fn images(&self) -> Result<Vec<Image>, StoreError> {
        self.inner.images()
    }

    fn listed(&self) -> Result<Listed, StoreError> {
        Listed::read(&self.inner.image_names()?, |name| self.inner.image(name))
    }

    fn is_there(&self) -> Result<(), StoreError> {
        let dir = self.inner.layout.images();
        let failed = |e| StoreError::from_os(format!("cannot open {}", dir.display()), e);
        fs::read_dir(&dir).map(drop).map_err(failed)
    }

    fn image(&self, name: &ImageName) -> Result<Option<Image>, StoreError> {
        self.inner.image(name)
    }

    fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError> {
        self.inner.manifest(id)
    }

    fn manifest_parts(&self, id: Hash) -> Result<Option<Arc<dyn Parts>>, StoreError> {
        parts::open(&self.inner.layout, id)
    }

    fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        Ok(Arc::new(LocalObject::open(&self.inner.layout, id)?))
    }

    fn trace(&self, manifest: Hash) -> Result<Option<Vec<u8>>, StoreError> {
        self.inner.trace(manifest)
    }

    fn set_trace(&self, manifest: Hash, trace: Option<&[u8]>) -> Result<(), StoreError> {
        self.inner.set_trace(manifest, trace)
    }

    fn pin(&self, manifest: Hash) -> Result<Pin, StoreError> {
        self.inner.pin(manifest).map(Pin::new)
    }

    fn publish(&self) -> Result<Box<dyn Publication>, StoreError> {
        self.inner.must_be_writable()?;
        let mut state = self.inner.state.lock();
        state.publications += 1;
        state.changes = state.changes.wrapping_add(1);
        drop(state);
        Ok(Box::new(LocalPublication::new(Arc::clone(&self.inner))))
    }

    fn change(
        &self,
        name: &ImageName,
        change: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.inner.must_be_writable()?;
        let _alone = self.inner.state.lock();
        let mut image = self.inner.image(name)?.ok_or_else(|| refs::no_such_image(name))?;
        let before = image.clone();
        change(&mut image)?;
        if image == before {
            return Ok(());
        }
        self.inner.put_changed(&image)?;
        self.inner.keep_reserve();
        Ok(())
    }

    fn remove(&self, name: &ImageName, number: Option<u32>) -> Result<Removed, StoreError> {
        self.inner.remove(name, number, true)
    }

    fn remove_unless_promoted(&self, name: &ImageName) -> Result<Removed, StoreError> {
        self.inner.remove(name, None, false)
    }

    fn reclaim_left(&self) -> Result<u64, StoreError> {
        if self.inner.writer_lock.is_none() {
            return Ok(0);
        }
        let mut state = self.inner.state.lock();
        let freed_bytes = self.inner.reclaim_if_wanted(&mut state, &HashMap::new())?;
        self.inner.keep_reserve();
        Ok(freed_bytes)
    }

    fn trim(&self, needs: &dyn Needs) -> Result<u64, StoreError> {
        self.inner.trim(needs)
    }

    fn directory(&self) -> Option<&Path> {
        Some(&self.inner.layout.root)
    }

    fn shown(&self) -> String {
        self.inner.layout.root.display().to_string()
    }

    fn stored_bytes(&self) -> Result<u64, StoreError> {
        let root = &self.inner.layout.root;
        files::directory_bytes(root)
            .map_err(|e| StoreError::from_os(format!("cannot measure {}", root.display()), e))
    }

    fn repair_object(&self, object: Hash, patches: &[Patch]) -> Result<(), StoreError> {
        self.inner.repair_object(object, patches)
    }

    fn repair_manifest(&self, id: Hash, bytes: &[u8]) -> Result<(), StoreError> {
        self.inner.repair_manifest(id, bytes)
    }
}
