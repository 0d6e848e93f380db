//! Opens the directory of a persistent cache and its files, so that another user's links or files in their
//! place are refused. Also locks the directory, and gives the cache an identity.
//!
//! The default place of `headwater export`'s caches is `/var/tmp`, where any user can make a directory with a
//! cache's name before the cache exists. So the directory must belong to this user, and nobody else may have
//! write permission. Then all its contents are this user's, and in a sticky directory nobody else can replace
//! it.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use headwater_block::{IoError, IoErrorKind};
use rustix::fs::{FlockOperation, OFlags};

/// Length of a cache's identity.
pub const ID_BYTES: usize = 16;

/// Write permission of group and others.
const OTHERS_WRITE: u32 = 0o022;

fn flags(flags: OFlags) -> i32 {
    i32::try_from(flags.bits()).unwrap_or(0)
}

fn invalid(why: String) -> IoError {
    IoError::new(IoErrorKind::Invalid, why)
}

/// Opens the cache's directory; makes it if it is missing.
pub fn open_dir(parent: &Path, dir: &Path) -> Result<File, IoError> {
    let failed =
        |what: &str, e| IoError::from_os(format!("cannot {what} the persistent cache {}", dir.display()), e);
    match DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => File::open(parent).and_then(|p| p.sync_all()).map_err(|e| failed("make", e))?,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed("make", error)),
    }
    let no_follow = flags(OFlags::DIRECTORY | OFlags::NOFOLLOW);
    let opened = match OpenOptions::new().read(true).custom_flags(no_follow).open(dir) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::ENOTDIR)) => {
            return Err(invalid(format!(
                "{} is a symbolic link or not a directory, so it is not opened as a persistent cache: give another name, or \
                 the directory of the cache itself",
                dir.display()
            )));
        }
        opened => opened.map_err(|e| failed("open", e))?,
    };
    let found = opened.metadata().map_err(|e| failed("open", e))?;
    let user = rustix::process::geteuid().as_raw();
    if found.uid() != user {
        return Err(invalid(format!(
            "{} belongs to user {}, but this process runs as user {user}, so it is not opened as a persistent cache: give \
             another name or directory; or check who made it and what is in it, and, if the cache is yours, give it to this \
             user (chown -R)",
            dir.display(),
            found.uid()
        )));
    }
    if found.mode() & OTHERS_WRITE != 0 {
        return Err(invalid(format!(
            "others can write to {} (mode {:o}), so it is not opened as a persistent cache: check who made it and what is in it, \
             then chmod 700 it, or give another name",
            dir.display(),
            found.mode() & 0o7777
        )));
    }
    Ok(opened)
}

/// Opens a file of the cache; makes it if it is missing.
pub fn open_rw(path: &Path, direct: bool) -> io::Result<File> {
    let direct = if direct { OFlags::DIRECT } else { OFlags::empty() };
    open_regular(OpenOptions::new().create(true).truncate(false).mode(0o600), direct, path)
}

/// Opens a file of the cache that must exist.
pub fn open_found(path: &Path) -> io::Result<File> {
    open_regular(&mut OpenOptions::new(), OFlags::empty(), path)
}

/// Opens only regular files: follows no link, and refuses other kinds. Always opens for reading and writing,
/// so that opening a pipe does not block.
fn open_regular(options: &mut OpenOptions, direct: OFlags, path: &Path) -> io::Result<File> {
    let opened = options.read(true).write(true).custom_flags(flags(OFlags::NOFOLLOW | direct)).open(path);
    // The open may also have failed because the path is not a file.
    let found = opened.as_ref().map_or_else(|_| std::fs::symlink_metadata(path), File::metadata);
    if found.is_ok_and(|found| !found.is_file()) {
        let why = format!(
            "{} is a link, a device or a pipe, not a file of a persistent cache: remove it",
            path.display()
        );
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    opened
}

/// A cache's lock, held until it is dropped. Closing the file would not release it at once: a process that
/// another thread is starting has the file open, too, until it executes its program. Opening the cache again
/// in that time would find it in use.
pub struct Lock(File);

impl Lock {
    /// A further descriptor of the lock's file.
    pub fn try_clone(&self) -> io::Result<File> {
        self.0.try_clone()
    }

    /// Releases the lock.
    pub fn release(&self) {
        if let Err(error) = rustix::fs::flock(&self.0, FlockOperation::Unlock) {
            tracing::debug!(%error, "the lock of a persistent cache could not be released before its file is closed");
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        self.release();
    }
}

/// Opens the cache's lock file and locks it.
pub fn lock(dir: &Path) -> Result<Lock, IoError> {
    let path = dir.join("lock");
    let file =
        open_rw(&path, false).map_err(|e| IoError::from_os(format!("cannot open {}", path.display()), e))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Lock(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let why = "another process, or another disk of this process, has it open; end that first";
            let busy = io::Error::new(io::ErrorKind::ResourceBusy, why);
            let what = format!("the persistent cache {} is in use", dir.display());
            Err(IoError::with_source(IoErrorKind::Invalid, what, busy))
        }
        Err(error) => Err(IoError::from_os(format!("cannot lock {}", path.display()), error.into())),
    }
}

/// A random number that identifies a cache, whatever its name is. Made with the cache (`is_new`), and made
/// again if the file is missing or invalid. The caller syncs the directory.
pub fn identity(dir: &Path, is_new: bool) -> io::Result<[u8; ID_BYTES]> {
    let path = dir.join("id");
    let mut id = [0; ID_BYTES];
    if !is_new {
        match open_found(&path) {
            Ok(mut file) if file.metadata()?.len() == ID_BYTES as u64 => {
                file.read_exact(&mut id)?;
                return Ok(id);
            }
            Ok(_) => {
                tracing::warn!(
                    "{} has a wrong length, so it is not the identity of a cache; a new identity is made",
                    path.display()
                )
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    aws_lc_rs::rand::fill(&mut id)
        .map_err(|_| io::Error::other("no random bytes for the identity of a cache"))?;
    let new = dir.join("id.new");
    let _ = std::fs::remove_file(&new);
    let mut file = open_rw(&new, false)?;
    file.write_all(&id)?;
    file.sync_all()?;
    std::fs::rename(&new, &path)?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_free_when_it_is_dropped_although_a_process_that_starts_has_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let held = lock(dir.path()).unwrap();
        // As a forked process has it before it executes its program.
        let inherited = held.0.try_clone().unwrap();
        assert!(lock(dir.path()).is_err_and(|e| e.to_string().contains("in use")));
        drop(held);
        let again = lock(dir.path()).unwrap();
        drop(inherited);
        assert!(lock(dir.path()).is_err());
        again.release();
        lock(dir.path()).unwrap();
    }
}
