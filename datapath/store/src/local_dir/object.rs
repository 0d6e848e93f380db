//! Reading a data object, also when another file has taken its place.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::error::StoreError;
use crate::hash::Hash;
use crate::store::{Check, Object};

pub(super) struct LocalObject {
    id: Hash,
    path: PathBuf,
    /// What was damaged as a whole is repaired by another file of its name: that is opened when this one fails.
    file: RwLock<Arc<File>>,
    len_bytes: u64,
}

impl LocalObject {
    pub(super) fn new(id: Hash, path: PathBuf, file: File, len_bytes: u64) -> Self {
        Self { id, path, file: RwLock::new(Arc::new(file)), len_bytes }
    }

    /// Reads from the file that is open, and once more where that is no good and another one has its name.
    fn read(&self, offset: u64, into: &mut [u8], check: &mut Check<'_>) -> Result<(), StoreError> {
        let file = Arc::clone(&self.file.read());
        let outcome = self.read_from(&file, offset, into).and_then(|()| check(into));
        if outcome.is_err()
            && let Some(file) = self.replaced(&file)
        {
            self.read_from(&file, offset, into)?;
            return check(into);
        }
        outcome
    }

    fn read_from(&self, file: &File, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        file.read_exact_at(into, offset).map_err(|e| {
            StoreError::from_read(
                format!("cannot read {} bytes at {offset} of {}", into.len(), self.path.display()),
                e,
            )
        })
    }

    /// The file that has taken the place of this one, if any has.
    fn replaced(&self, file: &Arc<File>) -> Option<Arc<File>> {
        let mut current = self.file.write();
        // Another reader may have opened it.
        if Arc::ptr_eq(&current, file) {
            let named = File::open(&self.path).ok()?;
            let (old, new) = (file.metadata().ok()?, named.metadata().ok()?);
            if (old.dev(), old.ino()) == (new.dev(), new.ino()) {
                return None;
            }
            *current = Arc::new(named);
        }
        Some(Arc::clone(&current))
    }
}

impl Object for LocalObject {
    fn id(&self) -> Hash {
        self.id
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.read(offset, into, &mut |_| Ok(()))
    }

    fn read_checked(&self, offset: u64, into: &mut [u8], check: &mut Check<'_>) -> Result<(), StoreError> {
        self.read(offset, into, check)
    }
}
