//! Export: a version as a raw file, bit for bit, with holes where the image has none of its data.

use std::fs::{self, File, TryLockError};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use headwater_store::{Hash, Store};

use crate::error::{ImageError, ImageErrorKind};
use crate::fetch::fetch_chunk;
use crate::manifest::Manifest;
use crate::progress::{Cancel, Progress};
use crate::reader::open_version;
use crate::units::{usize_of, usize_of_u32};
use crate::walk::walk;

/// Writes the version with this manifest to the file `to`. A file of that name is replaced, but only when
/// everything is written and durable; after an error it is as it was, and nothing is left behind.
///
/// A process that is killed leaves `.NAME.partial` beside it, which the next export to the same name replaces.
pub fn export_raw(
    store: &dyn Store,
    manifest: Hash,
    to: &Path,
    cancel: &Cancel,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), ImageError> {
    let _pin = store.pin(manifest)?;
    let (parsed, objects) = open_version(store, manifest, None)
        .map_err(|e| e.context(format!("cannot export version {}", manifest.short())))?;
    let partial = Partial::create(to)?;
    let failed = |e: std::io::Error| {
        ImageError::from_os(format!("cannot write {} (what was written is removed)", to.display()), &e)
    };
    partial.file.set_len(parsed.size_bytes()).map_err(failed)?;

    let chunk_bytes = u64::from(parsed.chunk_bytes());
    let mut done_bytes = hole_bytes(&parsed);
    let total_bytes = parsed.size_bytes();
    progress(Progress { done_bytes, total_bytes });
    walk::<()>(
        &parsed,
        cancel,
        "export",
        |index, chunk, buffer| {
            let object = objects.get(usize_of_u32(chunk.object)).ok_or_else(no_object)?;
            let bytes = fetch_chunk(object.as_ref(), chunk, buffer)?;
            let offset = index * chunk_bytes;
            // The last chunk is filled up with zeroes that are not part of the image.
            let len = chunk_bytes.min(total_bytes - offset);
            let part = bytes.get(..usize_of(len)).unwrap_or(&bytes);
            partial.file.write_all_at(part, offset).map_err(failed)?;
            Ok((bytes, None))
        },
        |chunks, _| {
            done_bytes = done_bytes.saturating_add(chunks * chunk_bytes).min(total_bytes);
            progress(Progress { done_bytes, total_bytes });
        },
    )?;
    cancel.check("the export")?;
    partial.put_in_place(to).map_err(failed)
}

/// Bytes of the image that nothing has to be written for.
fn hole_bytes(manifest: &Manifest) -> u64 {
    let data_bytes = manifest.data_chunks() * u64::from(manifest.chunk_bytes());
    manifest.size_bytes().saturating_sub(data_bytes)
}

fn no_object() -> ImageError {
    ImageError::new(ImageErrorKind::Damaged, "a chunk lies in no object")
}

/// The file while it is written. Goes away unless it was put in place.
struct Partial {
    path: PathBuf,
    file: File,
    in_place: bool,
}

impl Partial {
    fn create(to: &Path) -> Result<Self, ImageError> {
        let shown = to.display();
        let invalid =
            |why: &str| ImageError::new(ImageErrorKind::Invalid, format!("cannot export to {shown}: {why}"));
        let failed = |e: std::io::Error| ImageError::from_os(format!("cannot export to {shown}"), &e);
        match fs::metadata(to) {
            Ok(there) if there.is_dir() => return Err(invalid("it is a directory; name a file")),
            Ok(there) if !there.is_file() => {
                return Err(invalid("it is not a regular file; export to a file and copy that"));
            }
            _ => {}
        }
        let name = to.file_name().ok_or_else(|| invalid("it has no file name"))?;
        let mut partial = std::ffi::OsString::from(".");
        partial.push(name);
        partial.push(".partial");
        let path = to.with_file_name(partial);
        let options = File::options().write(true).create(true).truncate(false).clone();
        let file = loop {
            let file = options.open(&path).map_err(failed)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(invalid("another export to it is under way")),
                Err(TryLockError::Error(e)) => return Err(failed(e)),
            }
            // An export that ended before the lock has put this file in its place: it is whole, and not ours.
            if has_name(&file, &path).map_err(failed)? {
                break file;
            }
        };
        let partial = Self { path, file, in_place: false };
        // Of an export that was killed: none of its bytes may shine through the holes of this one.
        partial.file.set_len(0).map_err(failed)?;
        Ok(partial)
    }

    fn put_in_place(mut self, to: &Path) -> Result<(), std::io::Error> {
        self.file.sync_all()?;
        fs::rename(&self.path, to)?;
        self.in_place = true;
        // The parent of a plain file name is the empty path.
        let dir = to.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(dir)?.sync_all()
    }
}

fn has_name(file: &File, path: &Path) -> Result<bool, std::io::Error> {
    let held = file.metadata()?;
    match fs::metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (held.dev(), held.ino())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.in_place
            && let Err(e) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), error = %e, "cannot remove the unfinished export");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_put_in_place_or_removed_has_its_name_no_more() {
        let dir = tempfile::tempdir().unwrap();
        let (path, to) = (dir.path().join("partial"), dir.path().join("disk.raw"));
        let file = File::create(&path).unwrap();
        assert!(has_name(&file, &path).unwrap());
        fs::rename(&path, &to).unwrap();
        assert!(!has_name(&file, &path).unwrap());
        let next = File::create(&path).unwrap();
        assert!(!has_name(&file, &path).unwrap());
        assert!(has_name(&next, &path).unwrap());
    }
}
