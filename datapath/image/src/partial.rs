//! A file that is being written, in the directory of its destination and under a unique temporary name,
//! which gets its name when it is complete. For exports and other long files.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;

/// The longest name of a file, on Linux.
const FILE_NAME_MAX_BYTES: usize = 255;

/// A file that is being written, `.NAME.ID.partial`. It is removed on drop, unless it was put in place.
#[derive(Debug)]
pub struct Partial {
    path: PathBuf,
    /// Its directory, open from the beginning, so that a directory that cannot be synced is detected before
    /// anything is written.
    dir: File,
    in_place: bool,
}

/// Why a file did not get its final name durably.
#[derive(Debug)]
pub enum NotPlaced {
    /// The file was removed, and an existing file of that name is unchanged.
    Removed(io::Error),
    /// The file is in place and complete, but may be lost in a power cut.
    Unsynced(io::Error),
}

impl From<io::Error> for NotPlaced {
    fn from(error: io::Error) -> Self {
        Self::Removed(error)
    }
}

impl Partial {
    /// Creates an empty file in the directory of `to`, with a temporary name that begins with that of `to`.
    /// Existing files are left alone, whatever their names, and no link is followed.
    pub fn create(to: &Path) -> io::Result<(Self, File)> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // The parent of a plain file name is the empty path.
        let dir = to.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let dir = File::open(dir)?;
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = to.with_file_name(name_of(to, number));
            match File::options().write(true).create_new(true).open(&path) {
                Ok(file) => return Ok((Self { path, dir, in_place: false }, file)),
                // The file of a process that was killed, or of one in another container.
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the file its final name, durably. `to` is in the directory in which the file was created. Fails if
    /// a file of that name exists. On a file system without hard links, and without a rename that never
    /// replaces, a file that is created under that name at this moment is overwritten.
    pub fn put_in_place(mut self, to: &Path) -> Result<(), NotPlaced> {
        self.name(to)?;
        self.dir.sync_all().map_err(NotPlaced::Unsynced)
    }

    fn name(&mut self, to: &Path) -> io::Result<()> {
        match rustix::fs::renameat_with(CWD, &self.path, CWD, to, RenameFlags::NOREPLACE) {
            // Some file systems, such as NFS, do not support this.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => return self.link(to),
            renamed => renamed?,
        }
        self.in_place = true;
        Ok(())
    }

    /// As [`Partial::name`], by a hard link, which also fails if the name exists.
    fn link(&mut self, to: &Path) -> io::Result<()> {
        let no_links = |e: &io::Error| {
            matches!(
                e.raw_os_error().map(Errno::from_raw_os_error),
                Some(Errno::PERM | Errno::NOSYS | Errno::OPNOTSUPP)
            )
        };
        match fs::hard_link(&self.path, to) {
            Err(e) if no_links(&e) => return self.rename(to),
            // The server created the link, its answer was lost, and the request was repeated.
            Err(e) if e.kind() == ErrorKind::AlreadyExists && self.is_at(to) => {}
            linked => linked?,
        }
        // Before the directory is synced. If the removal fails, it is tried again on drop.
        self.in_place = fs::remove_file(&self.path).is_ok();
        Ok(())
    }

    /// As [`Partial::link`], on a file system without hard links. A file that another process creates under
    /// that name at this moment is overwritten.
    fn rename(&mut self, to: &Path) -> io::Result<()> {
        match fs::symlink_metadata(to) {
            Err(e) if e.kind() == ErrorKind::NotFound => {
                fs::rename(&self.path, to)?;
                self.in_place = true;
                Ok(())
            }
            Err(e) => Err(e),
            Ok(_) => Err(ErrorKind::AlreadyExists.into()),
        }
    }

    fn is_at(&self, to: &Path) -> bool {
        let id = |path: &Path| fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()));
        matches!((id(&self.path), id(to)), (Ok(own), Ok(there)) if own == there)
    }
}

fn name_of(to: &Path, number: u64) -> OsString {
    let end = format!(".{}-{number}.partial", std::process::id());
    // As much of the name as fits: the suffix alone makes it unique.
    let name = to.file_name().unwrap_or_default().as_bytes();
    let room = FILE_NAME_MAX_BYTES.saturating_sub(end.len()).saturating_sub(1);
    let mut partial = OsString::from(".");
    partial.push(OsStr::from_bytes(name.get(..room).unwrap_or(name)));
    partial.push(end);
    partial
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.in_place
            && let Err(e) = fs::remove_file(&self.path)
            && e.kind() != ErrorKind::NotFound
        {
            tracing::warn!(path = %self.path.display(), error = %e, "cannot remove the temporary name of a file");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_names_fit_for_file_names_of_any_length() {
        let dir = tempfile::tempdir().unwrap();
        for len in [1, 213, 246, FILE_NAME_MAX_BYTES] {
            let target = dir.path().join("n".repeat(len));
            let ((partial, _), (other, _)) =
                (Partial::create(&target).unwrap(), Partial::create(&target).unwrap());
            assert_ne!(partial.path(), other.path());
            assert_eq!(partial.path().extension(), Some(OsStr::new("partial")));
            partial.put_in_place(&target).unwrap();
            let refused = other.put_in_place(&target).unwrap_err();
            assert!(matches!(refused, NotPlaced::Removed(e) if e.kind() == ErrorKind::AlreadyExists));
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
            fs::remove_file(target).unwrap();
        }
    }

    #[test]
    fn an_existing_file_stays_on_every_kind_of_file_system() {
        type Put = fn(&mut Partial, &Path) -> io::Result<()>;
        for put in [Partial::name as Put, Partial::link, Partial::rename] {
            let put = |mut partial: Partial, target: &Path| put(&mut partial, target);
            let dir = tempfile::tempdir().unwrap();
            let target = dir.path().join("disk.raw");
            let make = |text: &str| {
                let (partial, _) = Partial::create(&target).unwrap();
                fs::write(partial.path(), text).unwrap();
                partial
            };
            let (first, second) = (make("first"), make("second"));
            put(first, &target).unwrap();
            assert_eq!(put(second, &target).unwrap_err().kind(), ErrorKind::AlreadyExists);
            assert_eq!(fs::read(&target).unwrap(), b"first");
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
            fs::remove_file(&target).unwrap();
            std::os::unix::fs::symlink("nowhere", &target).unwrap();
            assert_eq!(put(make("third"), &target).unwrap_err().kind(), ErrorKind::AlreadyExists);
        }
    }

    #[test]
    fn a_repeated_request_for_a_hard_link_succeeds() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("disk.raw");
        let (mut partial, _) = Partial::create(&target).unwrap();
        fs::hard_link(partial.path(), &target).unwrap();
        partial.link(&target).unwrap();
        drop(partial);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
