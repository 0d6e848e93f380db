//! A publication writes a new version to a store in a directory: its data object, its manifest, and its
//! entry in the image's list, in that order. If it ends before the last step, the version does not exist.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use crate::error::StoreError;
use crate::hash::Hash;
use crate::holes::Holes;
use crate::local_dir::Inner;
use crate::local_dir::files::{
    read_small, remove_quietly, rename, share_file, step, sync_dir, sync_file, write,
};
use crate::name::ImageName;
use crate::refs::{Image, Version};
use crate::store::{
    Adopted, Committed, MANIFEST_MAX_BYTES, NewVersion, Object, Publication, check_manifest_size,
};

pub(super) struct LocalPublication {
    store: Arc<Inner>,
    writing: Option<Writing>,
    /// The data object, once it is in place.
    finished: Option<(Hash, u64)>,
    /// Whether files are in place that only a commit makes needed.
    left_something: bool,
}

/// The data object that is being written.
struct Writing {
    path: PathBuf,
    file: File,
    hasher: blake3::Hasher,
    len_bytes: u64,
}

impl LocalPublication {
    pub(super) fn new(store: Arc<Inner>) -> Self {
        Self { store, writing: None, finished: None, left_something: false }
    }

    fn start(&self) -> Result<Writing, StoreError> {
        let path = self.store.temporary("object");
        let file = step()
            .and_then(|()| File::create_new(&path))
            .map_err(|e| StoreError::from_os(format!("cannot create {}", path.display()), e))?;
        Ok(Writing { path, file, hasher: blake3::Hasher::new(), len_bytes: 0 })
    }

    /// Writes the manifest unless it exists and is undamaged. Replacing a good manifest would invalidate the
    /// pins on it.
    fn put_manifest(&self, id: Hash, bytes: &[u8]) -> Result<u64, StoreError> {
        let path = self.store.layout.manifest(id);
        let is_there = read_small(&path, MANIFEST_MAX_BYTES).is_ok_and(|there| there == bytes);
        if !is_there {
            self.store.repair_manifest(id, bytes)?;
        }
        self.store.put_tree(id, bytes);
        Ok(if is_there { 0 } else { len_u64(bytes) })
    }
}

fn len_u64(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).unwrap_or(u64::MAX)
}

impl Publication for LocalPublication {
    fn append(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        let mut writing = match self.writing.take() {
            Some(writing) => writing,
            None => self.start()?,
        };
        let written = write(&mut writing.file, bytes);
        writing.hasher.update(bytes);
        writing.len_bytes = writing.len_bytes.saturating_add(len_u64(bytes));
        let result =
            written.map_err(|e| StoreError::from_os(format!("cannot write {}", writing.path.display()), e));
        self.writing = Some(writing);
        result
    }

    /// The object was written while its bytes arrived, so there is nothing to report.
    fn finish_object_telling(
        &mut self,
        _: &mut dyn FnMut(u64) -> Result<(), StoreError>,
    ) -> Result<Option<(Hash, u64)>, StoreError> {
        let Some(writing) = self.writing.take() else {
            return Ok(self.finished);
        };
        let id = Hash::from(writing.hasher.finalize());
        let path = self.store.layout.object(id);
        self.left_something = true;
        let synced = share_file(&writing.file, &path).and_then(|()| sync_file(&writing.file, &writing.path));
        let _placing = self.store.placing.lock();
        if let Err(e) = synced.and_then(|()| rename(&writing.path, &path)) {
            remove_quietly(&writing.path);
            return Err(StoreError::from_os(format!("cannot write {}", path.display()), e));
        }
        sync_dir(&self.store.layout.objects())?;
        // If the object existed with holes, it is complete again.
        self.store.put_holes(id, &Holes::default(), writing.len_bytes)?;
        self.finished = Some((id, writing.len_bytes));
        Ok(self.finished)
    }

    fn copy_object(
        &mut self,
        source: &dyn Object,
        copied: &mut dyn FnMut(u64) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.store.copy_object(source, copied)
    }

    fn adopt(
        self: Box<Self>,
        name: &ImageName,
        version: &Version,
        manifest: &[u8],
    ) -> Result<Option<Adopted>, StoreError> {
        check_manifest_size(name, manifest)?;
        // If this fails, the manifest and the objects are part of an incomplete copy. They are not reclaimed,
        // so that the next copy continues with them.
        let store = Arc::clone(&self.store);
        let _giving_out_numbers = store.state.lock();
        let mut image = store.image(name)?.unwrap_or_else(|| Image::empty(name.clone()));
        let adopted = image.adopt(version)?;
        self.put_manifest(version.manifest, manifest)?;
        if adopted.is_some() {
            store.put_image(&image)?;
        }
        Ok(adopted)
    }

    fn commit(mut self: Box<Self>, new: NewVersion<'_>) -> Result<Committed, StoreError> {
        check_manifest_size(new.name, new.manifest)?;
        let object_bytes = self.finish_object()?.map_or(0, |(_, len_bytes)| len_bytes);
        let id = Hash::of(new.manifest);

        let store = Arc::clone(&self.store);
        // Numbers are assigned under the lock, and a removal must not run between manifest and reference.
        // (Dropped before `self`, whose drop takes the same lock.)
        let _giving_out_numbers = store.state.lock();
        let mut image = store.image(new.name)?.unwrap_or_else(|| Image::empty(new.name.clone()));
        if new.unless_newest
            && let Some(newest) = image.newest().filter(|newest| newest.manifest == id)
        {
            let newest = newest.clone();
            // The existing manifest may have been damaged since.
            self.put_manifest(id, new.manifest)?;
            return Ok(Committed { version: newest, is_new: false, production: None });
        }
        self.left_something = true;
        let manifest_bytes = self.put_manifest(id, new.manifest)?;
        let committed = image.add(&new, id, object_bytes.saturating_add(manifest_bytes))?;
        store.put_image(&image)?;
        self.left_something = false;
        Ok(committed)
    }
}

impl Drop for LocalPublication {
    fn drop(&mut self) {
        if let Some(writing) = self.writing.take() {
            remove_quietly(&writing.path);
        }
        self.store.publication_over(self.left_something);
    }
}
