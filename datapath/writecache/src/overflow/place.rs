//! Opens the file or device of an overflow, checks its space, and finds the alignment of direct I/O.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Seek};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use headwater_block::{IoError, IoErrorKind, size};
use rustix::fs::{OFlags, StatVfs};

use super::signature;
use crate::persist::DATA_FILE;

/// Prefix of the temporary name of an overflow file on file systems without O_TMPFILE; PID and a counter
/// follow. The file is unlinked at once.
pub const BRIEF_NAME: &str = ".headwater-overflow-";

/// How to open an overflow file or device without a name of its own.
pub(super) fn open_file(at: &Path, direct: bool) -> io::Result<File> {
    let flag = |flags: OFlags| i32::try_from(flags.bits()).unwrap_or(0);
    let direct_flag = if direct { flag(OFlags::DIRECT) } else { 0 };
    let kind = std::fs::metadata(at)?.file_type();
    if kind.is_block_device() {
        if let Some(what) = signature::found(at)? {
            let why = format!(
                "it holds {what}, which would be overwritten: choose another device, or clear this one with 'wipefs --all {}'",
                at.display()
            );
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
        }
        let exclusive = flag(OFlags::EXCL);
        return OpenOptions::new().read(true).write(true).custom_flags(direct_flag | exclusive).open(at);
    }
    if !kind.is_dir() {
        return Err(io::Error::new(io::ErrorKind::NotADirectory, "not a directory or block device"));
    }
    let unnamed = OpenOptions::new()
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(flag(OFlags::TMPFILE) | direct_flag)
        .open(at);
    match unnamed {
        // For file systems without O_TMPFILE: create the file with a name and unlink it at once.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            static NEXT: AtomicU64 = AtomicU64::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = at.join(format!("{BRIEF_NAME}{}-{number}", std::process::id()));
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .mode(0o600)
                .custom_flags(direct_flag)
                .open(&name)?;
            std::fs::remove_file(&name)?;
            Ok(file)
        }
        other => other,
    }
}

/// Refuses a limit that the device, or the free space of the file system, cannot hold: better before a
/// machine starts than while it runs.
pub(super) fn check_space(file: &File, at: &Path, limit_bytes: u64) -> Result<(), IoError> {
    let Ok(metadata) = file.metadata() else { return Ok(()) };
    if metadata.file_type().is_block_device() {
        let size_bytes = device_bytes(file);
        let asked = || too_little(at, limit_bytes, size_bytes, ": choose another device, or");
        return if limit_bytes <= size_bytes {
            Ok(())
        } else {
            Err(IoError::new(IoErrorKind::Invalid, asked()))
        };
    }
    if !metadata.is_file() {
        return Ok(());
    }
    rustix::fs::fstatvfs(file).map_or(Ok(()), |space| check_free(&space, at, Some(&metadata), limit_bytes))
}

/// Refuses a limit for which a directory has no free space, as opening a cache there would: a persistent
/// cache of this name, or an ephemeral one.
pub fn check_directory(at: &Path, persistent: Option<&str>, limit_bytes: u64) -> Result<(), IoError> {
    let data = persistent.and_then(|name| at.join(name).join(DATA_FILE).metadata().ok());
    rustix::fs::statvfs(at).map_or(Ok(()), |space| check_free(&space, at, data.as_ref(), limit_bytes))
}

fn check_free(space: &StatVfs, at: &Path, own: Option<&Metadata>, limit_bytes: u64) -> Result<(), IoError> {
    // Space that the persistent cache has already counts as available.
    let own = own.map_or(0, |file| file.blocks().saturating_mul(512));
    let free = space.f_bavail.saturating_mul(space.f_frsize).saturating_add(own);
    if free >= limit_bytes {
        return Ok(());
    }
    // If the limit is larger than the whole file system, the error does not depend on the free space.
    let is_larger = space.f_blocks.saturating_mul(space.f_frsize) < limit_bytes;
    let kind = if is_larger { IoErrorKind::Invalid } else { IoErrorKind::NoSpace };
    Err(IoError::new(kind, too_little(at, limit_bytes, free, " free: free space there, or")))
}

/// The advice must be something that every user can do: users cannot choose the directory of a daemon's
/// machines.
fn too_little(at: &Path, limit_bytes: u64, has_bytes: u64, do_what: &str) -> String {
    format!(
        "the write cache may take {} on disk, but {} has only {}{do_what} give a lower limit with --disk",
        size::format(limit_bytes),
        at.display(),
        size::format(has_bytes),
    )
}

/// Size of a block device in bytes; 0 if unknown.
pub(super) fn device_bytes(mut file: &File) -> u64 {
    file.seek(io::SeekFrom::End(0)).unwrap_or(0)
}

/// File systems in memory, by their `statfs` magic: `tmpfs` and `ramfs`.
const IN_MEMORY: [rustix::fs::FsWord; 2] = [0x0102_1994, 0x8584_58f6];

/// Whether the file's data is in memory and not on a disk. Device files are on a `devtmpfs`, but their data
/// is elsewhere.
pub(super) fn is_memory(file: &File) -> bool {
    let is_device = file.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device());
    !is_device && rustix::fs::fstatfs(file).is_ok_and(|found| IN_MEMORY.contains(&found.f_type))
}

/// The alignment of offsets and lengths for direct I/O, as the kernel reports it; 4096 if it does not.
pub(super) fn direct_alignment(file: &File) -> usize {
    use rustix::fs::{AtFlags, StatxFlags};
    let asked = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    match asked {
        Ok(answer) if answer.stx_dio_offset_align != 0 => {
            usize::try_from(answer.stx_dio_offset_align).unwrap_or(4096).clamp(512, 4096)
        }
        _ => 4096,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_in_memory_is_told_from_others() {
        // The kernel keeps such files on a tmpfs of its own.
        let file = rustix::fs::memfd_create("overflow", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert!(is_memory(&File::from(file)));
        assert!(!is_memory(&File::open("/proc/version").unwrap()));
    }
}
