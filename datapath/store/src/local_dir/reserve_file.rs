//! The file `reserve_file`: room that is kept, so that the list of an image can be changed on a full disk too.
//!
//! A list is replaced by a new file, and a disk without any room has none for it: then the very change that gives space back, the
//! removal of a version, would fail. So a writer keeps a file that nobody reads. A change that finds no room writes its list over that
//! one, in the blocks that it has, and renames it into place: no other process can take the room in between. It is made again when
//! there is room. Publications do not use it: one that finds no room gives back what it wrote.
//!
//! What it contains does not matter, but is such that no file system packs it or leaves it out.

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

/// The spare file has a multiple of this.
const UNIT_BYTES: u64 = 64 << 10;
/// By how much a list can get longer, at the most, by a change that makes no version: it sets a channel, or schedules that.
const GROWTH_BYTES: u64 = 16 << 10;

impl Inner {
    /// Puts a changed list of versions in place, durably, and on a full disk too.
    pub(super) fn put_changed(&self, image: &Image) -> Result<(), StoreError> {
        match self.put_image(image) {
            Err(e) if e.kind() == StoreErrorKind::NoSpace => self.put_in_reserve(image).map_err(|second| {
                let lacks_spare = matches!(second.kind(), StoreErrorKind::NoSpace | StoreErrorKind::NotFound);
                // Else it may be in place, and not on the disk.
                if lacks_spare { e } else { second }
            }),
            outcome => outcome,
        }
    }

    /// Takes the place of the spare file, which is gone then.
    fn put_in_reserve(&self, image: &Image) -> Result<(), StoreError> {
        let (path, bytes) = (self.layout.image(&image.name), image.encode()?);
        let temporary = self.temporary("image");
        rename(&self.layout.reserve_file(), &temporary).map_err(|e| {
            StoreError::from_os(format!("cannot use the spare file for {}", path.display()), e)
        })?;
        let placed = overwrite(&temporary, &path, &bytes).and_then(|()| rename(&temporary, &path));
        if let Err(error) = placed {
            // Of another user, or on a file system that gives new blocks to what is overwritten: its room may do all the same.
            tracing::debug!(%error, "the spare file cannot be written over, and is removed");
            remove_quietly(&temporary);
            return replace_file(&temporary, &path, &bytes);
        }
        sync_dir(&self.layout.images())
    }

    /// Makes the spare file, or makes it longer, where it is too short for the longest list.
    pub(super) fn keep_reserve(&self) {
        let path = self.layout.reserve_file();
        let wanted = self.longest_list_bytes().saturating_add(GROWTH_BYTES).next_multiple_of(UNIT_BYTES);
        let there = fs::metadata(&path).map_or(0, |file| file.len());
        let made = if there >= wanted { Ok(()) } else { extend(&path, there, wanted) };
        // Tried again and again, and said once.
        let lacked = self.lacks_spare.swap(made.is_err(), Ordering::Relaxed);
        if let Err(error) = made.as_ref()
            && !lacked
        {
            tracing::warn!(
                path = %path.display(), %error,
                "no spare file can be kept: without any room on the disk, versions cannot be promoted or removed. Make room"
            );
        }
    }

    /// What the longest list takes.
    fn longest_list_bytes(&self) -> u64 {
        let Ok(entries) = fs::read_dir(self.layout.images()) else { return 0 };
        entries.flatten().filter_map(|entry| entry.metadata().ok()).map(|file| file.len()).max().unwrap_or(0)
    }
}

/// Writes over a file what is to be at `path`. No block is freed before the bytes are in those that are needed.
fn overwrite(file_path: &Path, path: &Path, bytes: &[u8]) -> Result<(), Error> {
    step()?;
    let file = File::options().write(true).open(file_path)?;
    file.write_all_at(bytes, 0)?;
    step()?;
    file.set_len(u64::try_from(bytes.len()).unwrap_or(u64::MAX))?;
    share_file(&file, path)?;
    sync_file(&file, file_path)
}

/// Has the spare file be so long, or as it was.
fn extend(path: &Path, from: u64, to: u64) -> Result<(), Error> {
    step()?;
    let mut file = File::options().append(true).create(true).open(path)?;
    let mut filling = vec![0; usize::try_from(to.saturating_sub(from)).unwrap_or_default()];
    blake3::Hasher::new().finalize_xof().fill(&mut filling);
    // Without the sync a file system may find out later that it has no room.
    let written = write(&mut file, &filling).and_then(|()| sync_file(&file, path));
    if written.is_err() {
        match from {
            0 => remove_quietly(path),
            _ => file.set_len(from)?,
        }
    }
    written
}
