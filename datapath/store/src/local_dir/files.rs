//! Reads and writes whole files of a store in a directory, and syncs and renames them, so that a crash
//! never leaves an incomplete file under its final name.

use std::fs::{self, File, Permissions, TryLockError};
use std::io::{Error, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::error::StoreError;

/// The time between two attempts at a lock.
const LOCK_INTERVAL: Duration = Duration::from_millis(20);

/// Reads a file of at most `max_bytes`.
pub(super) fn read_small(path: &Path, max_bytes: u64) -> Result<Vec<u8>, Error> {
    let file = File::open(path)?;
    let mut bytes = Vec::new();
    file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > max_bytes {
        return Err(Error::new(ErrorKind::InvalidData, format!("it is larger than {max_bytes} bytes")));
    }
    Ok(bytes)
}

/// Opens a file for an exclusive lock. On NFS, the server grants that lock only if the file is open for
/// writing.
pub(super) fn open_to_lock(path: &Path) -> Result<File, Error> {
    match File::options().read(true).write(true).open(path) {
        // The file was copied here as read-only. File systems other than NFS lock it anyway.
        Err(e) if e.kind() == ErrorKind::PermissionDenied => File::open(path),
        opened => opened,
    }
}

/// Takes a shared lock on a file. `false`: another process held an exclusive lock for all of `timeout`.
pub(super) fn lock_shared(file: &File, timeout: Duration) -> Result<bool, Error> {
    let until = Instant::now() + timeout;
    loop {
        match file.try_lock_shared() {
            Ok(()) => return Ok(true),
            Err(TryLockError::WouldBlock) if Instant::now() < until => std::thread::sleep(LOCK_INTERVAL),
            Err(TryLockError::WouldBlock) => return Ok(false),
            Err(TryLockError::Error(e)) => return Err(e),
        }
    }
}

/// Writes `bytes` to `path`, durably: writes `temporary`, which is on the same file system, and renames it.
/// After an error `path` is unchanged and `temporary` does not exist.
pub(super) fn replace_file(temporary: &Path, path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let written = write_synced(temporary, path, bytes).and_then(|()| rename(temporary, path));
    if let Err(e) = written {
        remove_quietly(temporary);
        return Err(StoreError::from_os(format!("cannot write {}", path.display()), e));
    }
    match path.parent() {
        Some(dir) => sync_dir(dir),
        None => Ok(()),
    }
}

fn write_synced(temporary: &Path, path: &Path, bytes: &[u8]) -> Result<(), Error> {
    step()?;
    room()?;
    let mut file = File::create(temporary)?;
    write(&mut file, bytes)?;
    share_file(&file, path)?;
    sync_file(&file, temporary)
}

/// Gives a file the read permissions of the directory in which it will be `path`. The owner of the store
/// decides there who may read it, not the umask of a process that has secrets elsewhere.
pub(super) fn share_file(file: &File, path: &Path) -> Result<(), Error> {
    path.parent().map_or(Ok(()), |dir| share(file, dir, 0o044))
}

/// As [`share_file`], for a directory that is created later than `like`, another directory of the store.
pub(super) fn share_dir(path: &Path, like: &Path) -> Result<(), Error> {
    share(&File::open(path)?, like, 0o055)
}

fn share(file: &File, dir: &Path, bits: u32) -> Result<(), Error> {
    let granted = fs::metadata(dir)?.mode() & bits;
    let mode = file.metadata()?.mode() & 0o7777;
    if mode | granted == mode {
        return Ok(());
    }
    match file.set_permissions(Permissions::from_mode(mode | granted)) {
        // On some file systems the mount decides who may read.
        Err(e) if matches!(e.kind(), ErrorKind::PermissionDenied | ErrorKind::Unsupported) => {
            tracing::warn!(dir = %dir.display(), error = %e, "cannot give a new file the read permissions of its directory: other users may be unable to read it");
            Ok(())
        }
        set => set,
    }
}

/// Makes what was written to a file durable.
pub(super) fn sync_file(file: &File, path: &Path) -> Result<(), Error> {
    step()?;
    sync(file)?;
    is_durable(path);
    Ok(())
}

/// These tests track what would be durable, and do not wait for the disk thousands of times.
fn sync(file: &File) -> Result<(), Error> {
    if cfg!(test) { Ok(()) } else { file.sync_all() }
}

/// In tests: what is synced here survives a simulated power cut.
#[cfg(not(test))]
pub(super) fn is_durable(_: &Path) {}

#[cfg(test)]
pub(super) use crate::local_dir::power_tests::is_durable;

/// Called before every change on disk. It does nothing except in tests, in which the process can "end" here.
#[cfg(not(test))]
#[expect(clippy::unnecessary_wraps, reason = "in tests it can fail")]
pub(super) fn step() -> Result<(), Error> {
    Ok(())
}

#[cfg(test)]
pub(super) use crate::local_dir::crash_tests::step;

/// Called before a change that needs space. In tests the disk can be full.
#[cfg(not(test))]
#[expect(clippy::unnecessary_wraps, reason = "in tests it can fail")]
fn room() -> Result<(), Error> {
    Ok(())
}

#[cfg(test)]
use crate::local_dir::crash_tests::room;

/// Appends to a file. A crash can leave only a part of the bytes.
pub(super) fn write(file: &mut File, bytes: &[u8]) -> Result<(), Error> {
    step()?;
    room()?;
    let (head, tail) = bytes.split_at(bytes.len() / 2);
    file.write_all(head)?;
    if cfg!(test) {
        step()?;
    }
    file.write_all(tail)
}

/// Renames a file.
pub(super) fn rename(from: &Path, to: &Path) -> Result<(), Error> {
    step()?;
    fs::rename(from, to)
}

/// Removes a file.
pub(super) fn remove(path: &Path) -> Result<(), Error> {
    step()?;
    fs::remove_file(path)
}

/// Makes renames and removals in a directory durable.
pub(super) fn sync_dir(dir: &Path) -> Result<(), StoreError> {
    step()
        .and_then(|()| File::open(dir))
        .and_then(|file| sync(&file))
        .map(|()| is_durable(dir))
        .map_err(|e| StoreError::from_os(format!("cannot sync the directory {}", dir.display()), e))
}

/// Removes a temporary file after another error, which the caller reports.
pub(super) fn remove_quietly(path: &Path) {
    match remove(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), error = %e, "cannot remove a temporary file");
        }
        _ => {}
    }
}

/// The disk space of all files below a directory.
pub(super) fn directory_bytes(dir: &Path) -> Result<u64, Error> {
    let mut total = 0u64;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        // A file that was removed meanwhile takes no space.
        let Ok(metadata) = entry.metadata() else { continue };
        let bytes = if metadata.is_dir() {
            directory_bytes(&entry.path())?
        } else {
            metadata.blocks().saturating_mul(512)
        };
        total = total.saturating_add(bytes);
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn waiting_for_a_lock_has_a_timeout() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("manifest");
        let other = File::create(&path).unwrap();
        other.try_lock().unwrap();
        let [one, two] = [File::open(&path).unwrap(), File::open(&path).unwrap()];
        assert!(!lock_shared(&one, Duration::ZERO).unwrap());
        assert!(!lock_shared(&one, 2 * LOCK_INTERVAL).unwrap());
        drop(other);
        assert!(lock_shared(&one, Duration::ZERO).unwrap() && lock_shared(&two, Duration::ZERO).unwrap());
    }

    #[test]
    fn files_with_an_exclusive_lock_are_opened_for_writing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("manifest");
        fs::write(&path, "as it was").unwrap();
        let file = open_to_lock(&path).unwrap();
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).unwrap();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
        assert_eq!(u32::from_str_radix(flags, 8).unwrap() & 3, 2, "{info}");
        file.try_lock().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"as it was");
        drop(file);
        fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
        open_to_lock(&path).unwrap().try_lock().unwrap();
        assert_eq!(open_to_lock(&dir.path().join("none")).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
