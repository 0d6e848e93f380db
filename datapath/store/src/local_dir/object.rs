//! Reads a data object of a store in a directory, even after a repair has replaced its file by another one.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use crate::error::StoreError;
use crate::hash::Hash;
use crate::holes::{HOLES_MAX_BYTES, Holes};
use crate::local_dir::files::read_small;
use crate::local_dir::layout::Layout;
use crate::store::{Check, Object};

pub(super) struct LocalObject {
    id: Hash,
    path: PathBuf,
    /// An object that is damaged as a whole is repaired by a new file of the same name. If a read of this
    /// file fails, the new file is opened.
    file: RwLock<Arc<File>>,
    len_bytes: u64,
    /// The list of its holes.
    holes_path: PathBuf,
    /// The list as it was last read.
    holes: Mutex<Option<Arc<Holes>>>,
}

/// The holes of an object of this length, from their file.
pub(super) fn read_holes(path: &Path, len_bytes: u64) -> Result<Holes, StoreError> {
    match read_small(path, HOLES_MAX_BYTES) {
        Ok(bytes) => Holes::decode(&path.display().to_string(), &bytes, len_bytes),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Holes::default()),
        Err(e) => Err(StoreError::from_read(format!("cannot read {}", path.display()), e)),
    }
}

impl LocalObject {
    pub(super) fn open(layout: &Layout, id: Hash) -> Result<Self, StoreError> {
        let path = layout.object(id);
        let failed = |e| StoreError::from_read(format!("cannot open the data object {}", path.display()), e);
        let file = File::open(&path).map_err(failed)?;
        let len_bytes = file.metadata().map_err(failed)?.len();
        let (file, holes_path) = (RwLock::new(Arc::new(file)), layout.holes_of(id));
        Ok(Self { id, path, file, len_bytes, holes_path, holes: Mutex::default() })
    }

    /// Reads from the open file. If the bytes are wrong and another file has the object's name now, reads
    /// that file.
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

    /// The file that has replaced this one, if any.
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

    fn holes(&self) -> Result<Arc<Holes>, StoreError> {
        let mut known = self.holes.lock();
        if let Some(holes) = &*known {
            return Ok(Arc::clone(holes));
        }
        let holes = Arc::new(read_holes(&self.holes_path, self.len_bytes)?);
        *known = Some(Arc::clone(&holes));
        Ok(holes)
    }

    /// The object may have got holes while it was read, even from another process, or another file may have
    /// replaced it.
    fn was_wrong(&self) -> bool {
        let before = self.holes.lock().take();
        let file = Arc::clone(&self.file.read());
        if self.replaced(&file).is_some() {
            return true;
        }
        let Some(before) = before else { return false };
        read_holes(&self.holes_path, self.len_bytes).is_ok_and(|now| now != *before)
    }
}
