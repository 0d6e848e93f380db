//! Objects of other stores, and bytes in place of damaged ones, also of manifests.
//!
//! A copy grows in `tmp/HASH.part` and is renamed when its hash is right. Where the store was opened to copy versions to it, one
//! that was interrupted goes on where it was: until another writer opens the store, which empties `tmp`, or for a week. A power cut may
//! leave other bytes than were written: where the hash at the end is wrong, it begins once more, before the source is blamed. What fills
//! the disk is not kept. Where an object is being copied already, as two repairs at once do, the second copy grows in a file of
//! its own, which is not kept either.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::local_dir::Inner;
use crate::local_dir::files::{
    remove_quietly, rename, replace_file, share_file, step, sync_dir, sync_file, write,
};
use crate::store::{Object, Patch};

/// How much is read and written at a time.
const PIECE_BYTES: usize = 1 << 20;
/// How long a part of an object is kept for the copy to go on with.
const ABANDONED_AFTER: Duration = Duration::from_secs(7 * 24 * 3600);

impl Inner {
    pub(super) fn copy_object(
        &self,
        source: &dyn Object,
        copied: &mut dyn FnMut(u64) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let mut part = Part::new(self, source.id());
        let outcome = self.copy_to(&part, source, copied);
        part.is_kept = match &outcome {
            Ok(()) => true,
            Err(e) => self.keeps_parts && part.is_named && e.kind() != StoreErrorKind::NoSpace,
        };
        outcome
    }

    fn copy_to(
        &self,
        part: &Part<'_>,
        source: &dyn Object,
        copied: &mut dyn FnMut(u64) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let (id, len_bytes) = (source.id(), source.len_bytes());
        let target = self.layout.object(id);
        let failed = |e| StoreError::from_os(format!("cannot write {}", part.path.display()), e);
        let mut file = step().and_then(|()| part.open()).map_err(failed)?;
        let mut hasher = blake3::Hasher::new();
        let taken_up = take_up(&file, len_bytes, &mut hasher).map_err(failed)?;
        copied(taken_up)?;
        part.append(&mut file, source, (taken_up, &mut hasher), copied)?;
        if taken_up > 0 && Hash::from(hasher.finalize()) != id {
            tracing::warn!(%id, "what an interrupted copy left of it may be wrong: it is copied anew");
            step().and_then(|()| file.set_len(0)).map_err(failed)?;
            hasher = blake3::Hasher::new();
            // All its bytes were told once.
            part.append(&mut file, source, (0, &mut hasher), &mut |_| copied(0))?;
        }
        if Hash::from(hasher.finalize()) != id {
            remove_quietly(&part.path);
            return Err(StoreError::new(
                StoreErrorKind::Damaged,
                format!(
                    "the data object {id} is damaged where it was to be copied from, or on its way; it was not copied"
                ),
            ));
        }
        share_file(&file, &target).and_then(|()| sync_file(&file, &part.path)).map_err(failed)?;
        rename(&part.path, &target)
            .map_err(|e| StoreError::from_os(format!("cannot write {}", target.display()), e))?;
        sync_dir(&self.layout.objects())
    }

    /// Writes right bytes over damaged ones. In place: whoever has the object open has them too.
    pub(super) fn mend(&self, object: Hash, patches: &[Patch]) -> Result<(), StoreError> {
        self.must_be_writable()?;
        let path = self.layout.object(object);
        let failed = |e| StoreError::from_os(format!("cannot mend {}", path.display()), e);
        let file = File::options().write(true).open(&path).map_err(failed)?;
        let len_bytes = file.metadata().map_err(failed)?.len();
        for patch in patches {
            let end = u64::try_from(patch.bytes.len()).ok().and_then(|len| patch.offset.checked_add(len));
            if end.is_none_or(|end| end > len_bytes) {
                return Err(StoreError::new(
                    StoreErrorKind::Damaged,
                    format!("cannot mend {}: it is cut off before {:?}", path.display(), patch),
                ));
            }
            step().and_then(|()| file.write_all_at(&patch.bytes, patch.offset)).map_err(failed)?;
        }
        sync_file(&file, &path).map_err(failed)
    }
}

impl Inner {
    /// Writes a manifest over what is there. In place, because pins are locks on the file: a crash leaves it as damaged as
    /// it was.
    pub(super) fn mend_manifest(&self, id: Hash, bytes: &[u8]) -> Result<(), StoreError> {
        self.must_be_writable()?;
        if Hash::of(bytes) != id {
            return Err(StoreError::new(
                StoreErrorKind::Damaged,
                format!("these bytes are not the manifest {id}"),
            ));
        }
        let path = self.layout.manifest(id);
        let failed = |e| StoreError::from_os(format!("cannot mend {}", path.display()), e);
        let file = match File::options().write(true).open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return replace_file(&self.temporary("manifest"), &path, bytes);
            }
            Err(e) => return Err(failed(e)),
        };
        let len_bytes = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        let written =
            step().and_then(|()| file.write_all_at(bytes, 0)).and_then(|()| file.set_len(len_bytes));
        written.map_err(failed)?;
        sync_file(&file, &path).map_err(failed)
    }
}

impl Inner {
    /// Removes from `tmp` what no copy will go on with. Where that fails there is less room, and copying is tried all the same.
    pub(super) fn remove_abandoned(&self) {
        let modified = |file: io::Result<fs::Metadata>| file.and_then(|file| file.modified()).ok();
        // It was written just now, on the clock of the file system.
        let now = self.writer_lock.as_ref().and_then(|lock| modified(lock.metadata()));
        let Ok(entries) = fs::read_dir(self.layout.tmp()) else { return };
        for entry in entries.flatten() {
            let path = entry.path();
            let is_part = path.extension().is_some_and(|suffix| suffix == "part");
            let age = || now?.duration_since(modified(entry.metadata())?).ok();
            if is_part && age().is_none_or(|age| age <= ABANDONED_AFTER) {
                continue;
            }
            tracing::info!(path = %path.display(), "removing what an interrupted copy left");
            remove_quietly(&path);
        }
    }
}

/// Where a copy grows. It goes with this, unless it is kept.
struct Part<'a> {
    store: &'a Inner,
    id: Hash,
    path: PathBuf,
    /// It has the object's name, and no other copy uses it.
    is_named: bool,
    /// It is in place, or the next copy of the object can go on with it.
    is_kept: bool,
}

impl<'a> Part<'a> {
    fn new(store: &'a Inner, id: Hash) -> Self {
        let is_named = store.copying.lock().insert(id);
        let path = match is_named {
            true => store.layout.tmp().join(format!("{id}.part")),
            false => store.temporary("copy"),
        };
        Self { store, id, path, is_named, is_kept: false }
    }

    fn open(&self) -> std::io::Result<File> {
        let mut options = File::options();
        match self.is_named {
            true => options.append(true),
            // A process that was killed may have left one of this name.
            false => options.write(true).truncate(true),
        };
        options.read(true).create(true).open(&self.path)
    }

    /// Appends what an object has from an offset on, and hashes it.
    fn append(
        &self,
        file: &mut File,
        source: &dyn Object,
        (mut at, hasher): (u64, &mut blake3::Hasher),
        copied: &mut dyn FnMut(u64) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let failed = |e| StoreError::from_os(format!("cannot write {}", self.path.display()), e);
        let len_bytes = source.len_bytes();
        let mut buffer = vec![0; PIECE_BYTES];
        while at < len_bytes {
            let len = usize::try_from(len_bytes - at).map_or(PIECE_BYTES, |left| left.min(PIECE_BYTES));
            let piece = buffer.get_mut(..len).unwrap_or_default();
            source.read_range(at, piece)?;
            hasher.update(piece);
            write(file, piece).map_err(failed)?;
            let len = u64::try_from(len).unwrap_or(u64::MAX);
            at = at.saturating_add(len);
            copied(len)?;
        }
        Ok(())
    }
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        // Before another copy can take it up.
        if !self.is_kept {
            remove_quietly(&self.path);
        }
        if self.is_named {
            self.store.copying.lock().remove(&self.id);
        }
    }
}

/// Reads what an interrupted copy left. Returns where to go on.
fn take_up(file: &File, len_bytes: u64, hasher: &mut blake3::Hasher) -> std::io::Result<u64> {
    let there = file.metadata()?.len();
    if there > len_bytes {
        file.set_len(0)?;
        return Ok(0);
    }
    let mut at = 0;
    let mut buffer = vec![0; PIECE_BYTES];
    while at < there {
        let len = usize::try_from(there - at).map_or(PIECE_BYTES, |left| left.min(PIECE_BYTES));
        let piece = buffer.get_mut(..len).unwrap_or_default();
        file.read_exact_at(piece, at)?;
        hasher.update(piece);
        at = at.saturating_add(u64::try_from(len).unwrap_or(u64::MAX));
    }
    Ok(there)
}
