//! The directory of a persistent cache and its files, opened so that what another user has put in their place is not followed.
//!
//! The default place of `headwater export`'s caches is `/var/tmp`, where everybody can make a directory of a cache's name before
//! the cache is there. So the directory must be this user's own, and nobody else may write to it; then what is in it is this
//! user's doing, and in a sticky directory nobody else can put another one in its place.

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

/// Opens the cache's directory, and makes it where it is missing.
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
                "{} is a symbolic link or no directory, and no persistent cache: give another name, or the directory that \
                 the cache is in",
                dir.display()
            )));
        }
        opened => opened.map_err(|e| failed("open", e))?,
    };
    let found = opened.metadata().map_err(|e| failed("open", e))?;
    let user = rustix::process::geteuid().as_raw();
    if found.uid() != user {
        return Err(invalid(format!(
            "{} belongs to user {} and this process to user {user}, so it is not opened as a persistent cache: give another \
             name or directory, or, if the cache is yours, give it to this user (chown -R)",
            dir.display(),
            found.uid()
        )));
    }
    if found.mode() & OTHERS_WRITE != 0 {
        return Err(invalid(format!(
            "others can write to {} (mode {:o}), so it is not opened as a persistent cache: look what is in it, then chmod \
             700 it, or give another name",
            dir.display(),
            found.mode() & 0o7777
        )));
    }
    Ok(opened)
}

/// Opens a file of the cache, and makes it where it is missing.
pub fn open_rw(path: &Path, direct: bool) -> io::Result<File> {
    let direct = if direct { OFlags::DIRECT } else { OFlags::empty() };
    open_regular(OpenOptions::new().create(true).truncate(false).mode(0o600), direct, path)
}

/// Opens a file of the cache that should be there.
pub fn open_found(path: &Path) -> io::Result<File> {
    open_regular(&mut OpenOptions::new(), OFlags::empty(), path)
}

/// Only a file: no link is followed, and nothing else taken. For reading and writing always, so that opening a pipe does not
/// wait.
fn open_regular(options: &mut OpenOptions, direct: OFlags, path: &Path) -> io::Result<File> {
    let opened = options.read(true).write(true).custom_flags(flags(OFlags::NOFOLLOW | direct)).open(path);
    // What is no file may also be the reason why it is not opened.
    let found = opened.as_ref().map_or_else(|_| std::fs::symlink_metadata(path), File::metadata);
    if found.is_ok_and(|found| !found.is_file()) {
        let why = format!(
            "{} is a link, a device or a pipe, and no file of a persistent cache: remove it",
            path.display()
        );
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    opened
}

/// A cache's lock, held until it is dropped. Closing the file is not enough: a process that is being started by another thread just now
/// has it open, too, until it runs its program, and who opens the cache again would find it in use.
pub struct Lock(File);

impl Lock {
    /// Its file, in place of one that is not there yet.
    pub fn try_clone(&self) -> io::Result<File> {
        self.0.try_clone()
    }

    /// Gives it back.
    pub fn release(&self) {
        if let Err(error) = rustix::fs::flock(&self.0, FlockOperation::Unlock) {
            tracing::debug!(%error, "the lock of a persistent cache goes with its file");
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        self.release();
    }
}

/// Opens and locks the cache's lock.
pub fn lock(dir: &Path) -> Result<Lock, IoError> {
    let path = dir.join("lock");
    let file =
        open_rw(&path, false).map_err(|e| IoError::from_os(format!("cannot open {}", path.display()), e))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Lock(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let why = "a volume has it open already; close that one first";
            let busy = io::Error::new(io::ErrorKind::ResourceBusy, why);
            let what = format!("the persistent cache {} is in use", dir.display());
            Err(IoError::with_source(IoErrorKind::Invalid, what, busy))
        }
        Err(error) => Err(IoError::from_os(format!("cannot lock {}", path.display()), error.into())),
    }
}

/// What tells a cache from every other one, whatever they are called: made at random with it, and once more where it is
/// missing or no identity. The caller syncs the directory.
pub fn identity(dir: &Path, is_new: bool) -> io::Result<[u8; ID_BYTES]> {
    let path = dir.join("id");
    let mut id = [0; ID_BYTES];
    if !is_new {
        match open_found(&path) {
            Ok(mut file) if file.metadata()?.len() == ID_BYTES as u64 => {
                file.read_exact(&mut id)?;
                return Ok(id);
            }
            Ok(_) => tracing::warn!("{} is no identity of a cache; it gets a new one", path.display()),
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
        // As a fork has it before it runs its program.
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
