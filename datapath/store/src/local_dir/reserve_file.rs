//! The file `spare` reserves space, so that the list of an image can be changed on a full disk.
//!
//! A changed list replaces the old one by a rename, so it needs space for a second file. On a full disk, even
//! the removal of a version would fail, although it frees space. So a writer keeps the reserve file. A change
//! that finds no space overwrites that file with its list, in the blocks that the file already has, and
//! renames it into place. No other process can take the space in between. The reserve file is created again
//! when there is space. Publications do not use it: a publication that finds no space removes what it wrote.
//!
//! The content has no meaning, but it is random, so that no file system compresses it or omits its blocks.

use std::fs::{self, File};
use std::io::Error;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering;

use crate::error::{StoreError, StoreErrorKind};
use crate::local_dir::Inner;
use crate::local_dir::files::{
    remove_quietly, rename, replace_file, share_file, step, sync_dir, sync_file, write,
};
use crate::refs::Image;

/// The length of the reserve file is a multiple of this.
const UNIT_BYTES: u64 = 64 << 10;
/// The most bytes by which a list grows in a change that adds no version, such as setting a channel or
/// scheduling a promotion.
const GROWTH_BYTES: u64 = 16 << 10;

impl Inner {
    /// Puts a changed list of versions in place, durably, even on a full disk.
    pub(super) fn put_changed(&self, image: &Image) -> Result<(), StoreError> {
        match self.put_image(image) {
            Err(e) if e.kind() == StoreErrorKind::NoSpace => self.put_in_reserve(image).map_err(|second| {
                let lacks_reserve =
                    matches!(second.kind(), StoreErrorKind::NoSpace | StoreErrorKind::NotFound);
                // After an error of the second attempt, the list may be in place without being durable.
                if lacks_reserve { e } else { second }
            }),
            outcome => outcome,
        }
    }

    /// Writes the list into the reserve file and renames that, which uses up the reserve file.
    fn put_in_reserve(&self, image: &Image) -> Result<(), StoreError> {
        let (path, bytes) = (self.layout.image(&image.name), image.encode()?);
        let temporary = self.temporary("image");
        rename(&self.layout.reserve_file(), &temporary).map_err(|e| {
            StoreError::from_os(format!("cannot use the reserve file for {}", path.display()), e)
        })?;
        let placed = overwrite(&temporary, &path, &bytes).and_then(|()| rename(&temporary, &path));
        if let Err(error) = placed {
            // The file belongs to another user, or the file system allocates new blocks for overwrites. The
            // space freed by its removal may still be enough.
            tracing::debug!(%error, "the reserve file cannot be overwritten, and is removed");
            remove_quietly(&temporary);
            return replace_file(&temporary, &path, &bytes);
        }
        sync_dir(&self.layout.images())
    }

    /// Creates or extends the reserve file if it is too short for the longest list.
    pub(super) fn keep_reserve(&self) {
        let path = self.layout.reserve_file();
        let wanted = self.longest_list_bytes().saturating_add(GROWTH_BYTES).next_multiple_of(UNIT_BYTES);
        let there = fs::metadata(&path).map_or(0, |file| file.len());
        let made = if there >= wanted { Ok(()) } else { extend(&path, there, wanted) };
        // Tried on each call, and logged once.
        let lacked = self.lacks_reserve.swap(made.is_err(), Ordering::Relaxed);
        if let Err(error) = made.as_ref()
            && !lacked
        {
            tracing::warn!(
                path = %path.display(), %error,
                "there is no space for the reserve file: if the disk becomes full, versions cannot be promoted or removed. Free some space"
            );
        }
    }

    /// The length of the longest list.
    fn longest_list_bytes(&self) -> u64 {
        let Ok(entries) = fs::read_dir(self.layout.images()) else { return 0 };
        entries.flatten().filter_map(|entry| entry.metadata().ok()).map(|file| file.len()).max().unwrap_or(0)
    }
}

/// Overwrites a file with the future content of `path`. No block is freed before the bytes are in the blocks
/// that they need.
fn overwrite(file_path: &Path, path: &Path, bytes: &[u8]) -> Result<(), Error> {
    step()?;
    let file = File::options().write(true).open(file_path)?;
    file.write_all_at(bytes, 0)?;
    step()?;
    file.set_len(u64::try_from(bytes.len()).unwrap_or(u64::MAX))?;
    share_file(&file, path)?;
    sync_file(&file, file_path)
}

/// Extends the reserve file to this length. If that fails, it stays as it was.
fn extend(path: &Path, from: u64, to: u64) -> Result<(), Error> {
    step()?;
    let mut file = File::options().append(true).create(true).open(path)?;
    let mut filling = vec![0; usize::try_from(to.saturating_sub(from)).unwrap_or_default()];
    blake3::Hasher::new().finalize_xof().fill(&mut filling);
    // Without the sync a file system may detect later that it has no space.
    let written = write(&mut file, &filling).and_then(|()| sync_file(&file, path));
    if written.is_err() {
        match from {
            0 => remove_quietly(path),
            _ => file.set_len(from)?,
        }
    }
    written
}
