//! Writes a version to S3: its data object, its manifest, and its entry in the image's list of versions, in that order.
//!
//! While a publication runs, its *mark* (a key in `locks/`, see [`super::mark`]) keeps other processes from reclaiming
//! objects that no version needs yet. *Commit* gives a new version the next number. *Adopt* lists a version that was
//! copied from another store, with the number it has there.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::name::ImageName;
use crate::refs::Version;
use crate::s3::failure::Unchanged;
use crate::s3::mark::{Mark, SWEEP_WANTED};
use crate::s3::upload::{self, Sending};
use crate::s3::{Inner, manifest_key, object_key};
use crate::store::{
    Adopted, Committed, NewVersion, Object, Patch, Publication, check_manifest_size, patched,
};

pub(super) struct S3Publication {
    store: Arc<Inner>,
    /// `None` after the publication has ended.
    mark: Option<Mark>,
    writing: Option<Writing>,
    /// Hash and length of the data object, once it is in the bucket.
    finished: Option<(Hash, u64)>,
    /// Whether the bucket has keys that no version needs unless the commit succeeds.
    left_something: bool,
}

/// The data object that is being written, in a local file without a name. Its key is known at its end.
struct Writing {
    file: File,
    hasher: blake3::Hasher,
    len_bytes: u64,
}

impl S3Publication {
    pub(super) fn new(store: Arc<Inner>, mark: Mark) -> Self {
        Self { store, mark: Some(mark), writing: None, finished: None, left_something: false }
    }

    fn spool_failed(&self, e: std::io::Error) -> StoreError {
        let dir = self.store.spool_dir.display();
        StoreError::from_os(
            format!(
                "cannot store the data object in {dir} until it is sent (to use another directory, set TMPDIR)"
            ),
            e,
        )
    }

    fn start(&self) -> Result<Writing, StoreError> {
        let path = self.store.spool_dir.join(format!("headwater-{}.part", self.store.marks.unique()));
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        let file = file.and_then(|file| std::fs::remove_file(&path).map(|()| file));
        let file = file.map_err(|e| self.spool_failed(e))?;
        Ok(Writing { file, hasher: blake3::Hasher::new(), len_bytes: 0 })
    }

    /// If the server may still add the version to the list, no process may reclaim what the version needs:
    /// the mark stays until it becomes stale.
    fn not_listed(&mut self, why: Unchanged) -> StoreError {
        if matches!(why, Unchanged::Unknown(_))
            && let Some(mark) = self.mark.take()
        {
            mark.leave();
        }
        why.into()
    }

    fn put_manifest(&self, id: Hash, bytes: &[u8]) -> Result<u64, StoreError> {
        let key = manifest_key(id);
        let len_bytes = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        match self.store.bucket.get(&key, len_bytes) {
            Ok(Some((there, _))) if there == bytes => return Ok(0),
            Ok(_) => {}
            // The existing manifest is longer, so it is not the same.
            Err(e) if e.kind() == StoreErrorKind::Damaged => {}
            Err(e) => return Err(e),
        }
        send_manifest(&self.store, id, bytes)?;
        Ok(len_bytes)
    }
}

/// Writes a manifest, even over an existing one.
pub(super) fn send_manifest(store: &Inner, id: Hash, bytes: &[u8]) -> Result<(), StoreError> {
    let sending = Sending {
        key: &manifest_key(id),
        len_bytes: u64::try_from(bytes.len()).unwrap_or(u64::MAX),
        state_key: None,
        read: &mut |offset, into: &mut [u8]| {
            let start = usize::try_from(offset).unwrap_or(usize::MAX);
            let part = bytes.get(start..).and_then(|tail| tail.get(..into.len()));
            if let Some(part) = part {
                into.copy_from_slice(part);
            }
            Ok(())
        },
        sent: &mut |_| Ok(()),
        check: &mut || Ok(()),
    };
    upload::send(&store.bucket, sending)
}

impl Publication for S3Publication {
    fn append(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        let mut writing = match self.writing.take() {
            Some(writing) => writing,
            None => self.start()?,
        };
        let written = writing.file.write_all(bytes);
        writing.hasher.update(bytes);
        writing.len_bytes = writing.len_bytes.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        self.writing = Some(writing);
        written.map_err(|e| self.spool_failed(e))
    }

    fn finish_object_telling(
        &mut self,
        sent: &mut dyn FnMut(u64) -> Result<(), StoreError>,
    ) -> Result<Option<(Hash, u64)>, StoreError> {
        let Some(writing) = self.writing.take() else { return Ok(self.finished) };
        sent(0)?;
        let id = Hash::from(writing.hasher.finalize());
        self.left_something = true;
        let spool_dir = self.store.spool_dir.clone();
        let sending = Sending {
            key: &object_key(id),
            len_bytes: writing.len_bytes,
            state_key: None,
            read: &mut |offset, into: &mut [u8]| {
                writing.file.read_exact_at(into, offset).map_err(|e| {
                    StoreError::from_os(
                        format!("cannot read back the data object in {}", spool_dir.display()),
                        e,
                    )
                })
            },
            sent,
            check: &mut || Ok(()),
        };
        upload::send(&self.store.bucket, sending)?;
        self.finished = Some((id, writing.len_bytes));
        Ok(self.finished)
    }

    fn copy_object(
        &mut self,
        source: &dyn Object,
        copied: &mut dyn FnMut(u64) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let holes = source.holes()?;
        if !holes.is_empty() {
            return self.store.copy_partial(source, holes, copied);
        }
        send_object(&self.store, source, &[], Some(upload::state_key(&object_key(source.id()))), copied)
    }

    fn confirm(&self) -> Result<(), StoreError> {
        self.mark.as_ref().map_or(Ok(()), Mark::confirm)
    }

    fn commit(mut self: Box<Self>, new: NewVersion<'_>) -> Result<Committed, StoreError> {
        check_manifest_size(new.name, new.manifest)?;
        let object_bytes = self.finish_object()?.map_or(0, |(_, len_bytes)| len_bytes);
        let id = Hash::of(new.manifest);
        let store = Arc::clone(&self.store);
        if new.unless_newest
            && let Some((image, _)) = store.image(new.name)?
            && let Some(newest) = image.newest().filter(|newest| newest.manifest == id)
        {
            let newest = newest.clone();
            // The existing manifest may have been damaged since.
            self.put_manifest(id, new.manifest)?;
            return Ok(Committed { version: newest, is_new: false, production: None });
        }
        self.left_something = true;
        let stored_bytes = object_bytes.saturating_add(self.put_manifest(id, new.manifest)?);
        let committed = store.change_image(new.name, |image, _| {
            if new.unless_newest
                && let Some(newest) = image.newest().filter(|newest| newest.manifest == id)
            {
                return Ok((Committed { version: newest.clone(), is_new: false, production: None }, false));
            }
            let committed = image.add(&new, id, stored_bytes)?;
            self.confirm()?;
            Ok((committed, true))
        });
        let committed = committed.map_err(|e| self.not_listed(e))?;
        self.left_something = false;
        Ok(committed)
    }

    fn adopt(
        mut self: Box<Self>,
        name: &ImageName,
        version: &Version,
        manifest: &[u8],
    ) -> Result<Option<Adopted>, StoreError> {
        check_manifest_size(name, manifest)?;
        // If this fails, the manifest and the objects are part of an incomplete copy. They are not reclaimed,
        // so that the next copy continues with them.
        self.put_manifest(version.manifest, manifest)?;
        let store = Arc::clone(&self.store);
        let adopted = store.change_image(name, |image, _| {
            let adopted = image.adopt(version)?;
            self.confirm()?;
            Ok((adopted, adopted.is_some()))
        });
        adopted.map_err(|e| self.not_listed(e))
    }
}

impl Drop for S3Publication {
    fn drop(&mut self) {
        // No process reclaims while the mark exists. So the request for a sweep is written before the mark is removed:
        // after a crash in between, the next process still removes the unneeded keys.
        let requested = if self.left_something { self.store.want_sweep() } else { Ok(()) };
        self.mark = None;
        let outcome = requested.and_then(|()| self.store.bucket.head(SWEEP_WANTED)).and_then(|wanted| {
            if wanted.is_some() {
                self.store.sweep()?;
            }
            Ok(())
        });
        if let Err(e) = outcome {
            tracing::warn!(error = %e, "cannot free the space of unneeded objects now; it is freed when the store is next opened");
        }
    }
}

/// Copies an object of another store, or the same object with `patches`, and checks its hash before the copy
/// appears.
pub(super) fn send_object(
    store: &Inner,
    source: &dyn Object,
    patches: &[Patch],
    state_key: Option<String>,
    copied: &mut dyn FnMut(u64) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let id = source.id();
    let mut hasher = blake3::Hasher::new();
    let checked = std::cell::RefCell::new(&mut hasher);
    let sending = Sending {
        key: &object_key(id),
        len_bytes: source.len_bytes(),
        state_key,
        read: &mut |offset, into: &mut [u8]| {
            source.read_range(offset, into)?;
            patched(patches, offset, into);
            // The source may be read a second time from its beginning.
            if offset == 0 {
                checked.borrow_mut().reset();
            }
            checked.borrow_mut().update(into);
            Ok(())
        },
        sent: copied,
        check: &mut || {
            if Hash::from(checked.borrow().finalize()) == id {
                return Ok(());
            }
            Err(damaged_source(id))
        },
    };
    upload::send(&store.bucket, sending)
}

pub(super) fn damaged_source(id: Hash) -> StoreError {
    StoreError::new(
        StoreErrorKind::Damaged,
        format!("the data object {id} is damaged at the source; it was not copied"),
    )
}
