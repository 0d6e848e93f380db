//! Saves the standard input of `image import -` to a file that the daemon can open, because disks are not read from
//! front to back.
//!
//! The file is in the data directory, where images are stored, has no name, and disappears when this process ends in
//! any way. The daemon opens it through `/proc`, which it may because both run as the same user. If the daemon sees other
//! processes (one of the two is in a container), the path could mean another file or none, so the daemon also gets
//! the file's identity.
//!
//! A daemon of another user may not open files of this process. If that daemon gives access to its group, the file is
//! in its directory `exchange` instead, with a name, and is removed when the import ends. If this process is killed,
//! the file stays there.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use headwater_api::{FileId, Problem, ProblemKind};
use headwater_block::VOLUME_MAX_BYTES;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::data_dir;

/// The size of one read. Pieces of zeroes become holes.
const PIECE_BYTES: usize = 64 << 10;

/// A file with the data of standard input.
pub struct Spooled {
    file: File,
    /// Its name, if it has one.
    name: Option<PathBuf>,
}

impl Spooled {
    /// Saves standard input in `dir`. `progress` gets the number of bytes so far.
    pub fn standard_input(dir: &Path, progress: &mut dyn FnMut(u64)) -> anyhow::Result<Self> {
        let mut input = std::io::stdin().lock();
        // Fails before terabytes of zeroes are read.
        if left_bytes(&input)? > VOLUME_MAX_BYTES {
            return Err(too_large());
        }
        let failed = || format!("cannot save the standard input in {}", dir.display());
        let exchange = data_dir::other_owner(dir).map(|_| data_dir::exchange(dir)).filter(|dir| dir.exists());
        let mut spooled = match exchange {
            Some(exchange) => Self::named_in(&exchange).with_context(failed)?,
            None => Self { file: unnamed(dir).with_context(failed)?, name: None },
        };
        if spooled.fill(&mut input, progress).with_context(failed)? > VOLUME_MAX_BYTES {
            return Err(too_large());
        }
        Ok(spooled)
    }

    /// Creates a file that the directory's group, which is the daemon's, can read.
    fn named_in(exchange: &Path) -> io::Result<Self> {
        let name = exchange.join(format!("import-{}", uuid::Uuid::new_v4().simple()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o640).open(&name)?;
        let spooled = Self { file, name: Some(name) };
        let group = exchange.metadata()?.gid();
        std::os::unix::fs::fchown(&spooled.file, None, Some(group))?;
        // The umask may have removed the group's right to read.
        spooled.file.set_permissions(Permissions::from_mode(0o640))?;
        Ok(spooled)
    }

    /// Saves the input, up to just more than the largest disk. Returns the number of bytes.
    fn fill(&mut self, from: &mut impl Read, progress: &mut dyn FnMut(u64)) -> io::Result<u64> {
        let mut piece = vec![0; PIECE_BYTES];
        let mut len_bytes = 0u64;
        while len_bytes <= VOLUME_MAX_BYTES {
            let len = match from.read(&mut piece) {
                Ok(0) => break,
                Ok(len) => len,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            let data = piece.get(..len).unwrap_or_default();
            if data.iter().all(|byte| *byte == 0) {
                self.file.seek(SeekFrom::Current(i64::try_from(len).unwrap_or(0)))?;
            } else {
                self.file.write_all(data)?;
            }
            len_bytes += u64::try_from(len).unwrap_or(0);
            progress(len_bytes);
        }
        self.file.set_len(len_bytes)?;
        Ok(len_bytes)
    }

    /// The path at which the daemon opens the file.
    pub fn path(&self) -> String {
        if let Some(name) = &self.name {
            return name.display().to_string();
        }
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// The identity of the file, which the daemon checks.
    pub fn id(&self) -> anyhow::Result<FileId> {
        let metadata =
            self.file.metadata().context("cannot examine the file with the saved standard input")?;
        Ok(FileId { device: metadata.dev(), inode: metadata.ino() })
    }
}

impl Drop for Spooled {
    fn drop(&mut self) {
        if let Some(name) = &self.name
            && let Err(e) = std::fs::remove_file(name)
        {
            crate::show::aside(&format!("headwater: cannot remove {}: {e}\n", name.display()));
        }
    }
}

/// The minimum number of remaining bytes; 0 for inputs other than files and devices.
fn left_bytes(input: impl AsFd) -> io::Result<u64> {
    let Ok(at) = rustix::fs::seek(&input, rustix::fs::SeekFrom::Current(0)) else { return Ok(0) };
    let end = rustix::fs::seek(&input, rustix::fs::SeekFrom::End(0));
    rustix::fs::seek(&input, rustix::fs::SeekFrom::Start(at))?;
    Ok(end.unwrap_or(0).saturating_sub(at))
}

fn too_large() -> anyhow::Error {
    let why = format!(
        "cannot import the standard input: it has more than {VOLUME_MAX_BYTES} bytes (8 KiB less than 16 TiB), the most that a \
         machine's disk may have"
    );
    let advice = "a larger file that holds a smaller disk in another format is imported by its path";
    Problem::new(ProblemKind::Invalid, why).advise(advice).into()
}

/// Creates an unlinked file.
fn unnamed(dir: &Path) -> io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR) {
        // For file systems without O_TMPFILE, such as NFS and some over FUSE.
        Err(Errno::OPNOTSUPP | Errno::ISDIR) => named_for_a_moment(dir),
        opened => Ok(opened?.into()),
    }
}

/// Creates a file and unlinks it at once.
fn named_for_a_moment(dir: &Path) -> io::Result<File> {
    let name = dir.join(format!(".headwater-import-{}", uuid::Uuid::new_v4().simple()));
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&name)?;
    std::fs::remove_file(&name)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_way_of_making_it_leaves_a_file_of_ours_and_no_name() {
        let dir = tempfile::tempdir().unwrap();
        for make in [unnamed, named_for_a_moment] {
            let mut spooled = Spooled { file: make(dir.path()).unwrap(), name: None };
            let mut told = 0;
            let input = [&[7; 1000][..], &[0; 1 << 20]].concat();
            spooled.fill(&mut input.as_slice(), &mut |bytes| told = bytes).unwrap();
            assert_eq!(told, 1000 + (1 << 20));
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
            let seen = std::fs::metadata(spooled.path()).unwrap();
            assert_eq!((seen.len(), seen.mode() & 0o777), (1000 + (1 << 20), 0o600));
            assert_eq!(spooled.id().unwrap(), FileId { device: seen.dev(), inode: seen.ino() });
        }
        assert_eq!(unnamed(&dir.path().join("none")).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
