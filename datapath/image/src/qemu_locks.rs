//! QEMU's locks on image files. They are held while a file is read, so that QEMU does not write to it, and
//! checked, so that no file is read while QEMU writes to it.
//!
//! A process that opens an image with permission `p` locks byte 100+p, and byte 200+p if no other process may
//! have `p`. All these locks are shared locks. To check whether another process has or forbids a permission,
//! test whether the byte could be locked exclusively. The locks belong to the open file (`F_OFD_SETLK`), so
//! the file must stay open for as long as the image is used.
#![expect(unsafe_code, reason = "neither std nor rustix has locks of ranges that belong to an open file")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use crate::error::{ImageError, ImageErrorKind};

const READS: i64 = 100;
const WRITES: i64 = 101;
const RESIZES: i64 = 103;
const ALONE_READS: i64 = 200;
const ALONE_WRITES: i64 = 201;
const ALONE_RESIZES: i64 = 203;

/// Takes locks with which QEMU sees that this file is read and must not change. Fails if QEMU has the file
/// open in a conflicting way. On a file system without such locks nothing is checked.
pub(crate) fn take(file: &File, path: &Path) -> Result<(), ImageError> {
    for byte in [READS, ALONE_WRITES, ALONE_RESIZES] {
        match lock(file, libc::F_OFD_SETLK, libc::F_RDLCK, byte) {
            Ok(_) => {}
            Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => return Err(in_use(path)),
            Err(error) => {
                tracing::debug!(path = %path.display(), %error, "the file system has no locks: the file is not protected from writes of QEMU");
                return Ok(());
            }
        }
    }
    // Checked after our own locks are set: if two processes open the file at the same time, at least one of
    // them sees the other.
    for byte in [WRITES, RESIZES, ALONE_READS] {
        if lock(file, libc::F_OFD_GETLK, libc::F_WRLCK, byte).is_ok_and(|held| held != libc::F_UNLCK) {
            return Err(in_use(path));
        }
    }
    Ok(())
}

/// Locks a byte, or tests whether another process has locked it. Returns the kind of lock that the kernel
/// answers.
fn lock(file: &File, command: i32, kind: i32, byte: i64) -> io::Result<i32> {
    // SAFETY: all zeroes are a value of this struct of integers.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = i16::try_from(kind).unwrap_or_default();
    lock.l_whence = i16::try_from(libc::SEEK_SET).unwrap_or_default();
    lock.l_start = byte;
    lock.l_len = 1;
    // SAFETY: the descriptor is open, and the struct is valid for reading and writing during the call.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(i32::from(lock.l_type)) }
}

fn in_use(path: &Path) -> ImageError {
    let why = format!(
        "cannot use {}: QEMU, or another program with the same locks, has it open for writing, so it would change while it is \
         read. Shut down the machine that uses it, or make a copy or a snapshot of it and use that",
        path.display()
    );
    ImageError::new(ImageErrorKind::Busy, why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backing, open_file, open_file_backed, raw_file};

    /// Opens a file as QEMU does, with this byte locked.
    fn with_byte(path: &Path, byte: i64) -> File {
        let file = File::options().read(true).write(true).open(path).unwrap();
        lock(&file, libc::F_OFD_SETLK, libc::F_RDLCK, byte).unwrap();
        file
    }

    /// Undoes `with_byte`. A child process that another test starts at this moment may still have the file
    /// open.
    fn without_byte(file: File, byte: i64) {
        lock(&file, libc::F_OFD_SETLK, libc::F_UNLCK, byte).unwrap();
        drop(file);
    }

    #[test]
    fn files_open_for_writing_elsewhere_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.raw");
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        for byte in [WRITES, RESIZES, ALONE_READS] {
            let other = with_byte(&path, byte);
            for error in [open_file(&path), raw_file(&path)].map(|opened| opened.map(drop).unwrap_err()) {
                assert_eq!(error.kind(), ImageErrorKind::Busy);
                assert!(error.to_string().contains("open for writing"), "{error}");
            }
            without_byte(other, byte);
        }
        for byte in [READS, ALONE_WRITES, ALONE_RESIZES, 102, 202] {
            let other = with_byte(&path, byte);
            open_file(&path).unwrap();
            without_byte(other, byte);
        }
        // Two readers of this program do not conflict, and the locks last as long as the disk.
        let one = open_file(&path).unwrap();
        let two = open_file_backed(&path, Backing::Anywhere).unwrap();
        let other = File::options().read(true).write(true).open(&path).unwrap();
        let found = |byte| lock(&other, libc::F_OFD_GETLK, libc::F_WRLCK, byte).unwrap();
        drop(one);
        assert_eq!([READS, ALONE_WRITES, ALONE_RESIZES].map(found), [libc::F_RDLCK; 3]);
        drop(two);
        headwater_testkit::wait_until("the locks are released with the last disk", || {
            [READS, ALONE_WRITES, ALONE_RESIZES].map(found) == [libc::F_UNLCK; 3]
        });
    }
}
