//! A raw image file or block device as a read-only disk: the bytes of the file are those of the disk.

use std::fs::File;
use std::io::{IoSliceMut, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use headwater_block::{ByteRange, Device, Extent, ExtentKind, IoError, IoErrorKind};
use rustix::fs::SeekFrom as RawSeek;
use rustix::io::{Errno, ReadWriteFlags};

use crate::error::{ImageError, ImageErrorKind};
use crate::fetch_pool::Place;
use crate::file_disk::{FileDisk, PooledDisk};
use crate::inspection::LARGE_SECTOR_BYTES;
use crate::qemu_locks;

/// Opens a file or block device whose bytes are a machine's disk, whatever they look like. The file must not
/// change while it is used.
pub fn raw_file(path: &Path) -> Result<Arc<dyn Device>, ImageError> {
    let (file, size_bytes) = open_disk_file(path, &find_file(path)?)?;
    let lock =
        file.try_clone().map_err(|e| ImageError::from_os(format!("cannot use {}", path.display()), &e))?;
    Ok(PooledDisk::open(open_raw(path, file, size_bytes)?, Place::Here, vec![lock])?)
}

/// Uses a file that [`open_disk_file`] opened.
pub(crate) fn open_raw(path: &Path, file: File, size_bytes: u64) -> Result<Arc<dyn FileDisk>, ImageError> {
    if !size_bytes.is_multiple_of(512) {
        return Err(ImageError::new(
            ImageErrorKind::Invalid,
            format!(
                "cannot use {} as a raw disk: its size of {size_bytes} bytes is not a multiple of 512. If it is a \
                 disk image nevertheless, extend it: truncate --size=%512 FILE",
                path.display()
            ),
        ));
    }
    let may_not_wait = AtomicBool::new(true);
    Ok(Arc::new(RawFile { path: path.to_owned(), file, size_bytes, may_not_wait }))
}

/// Finds a file without opening it, which never blocks and has no effect on a device. [`open_disk_file`]
/// opens the same file, even if the path leads elsewhere by then.
pub(crate) fn find_file(path: &Path) -> Result<File, ImageError> {
    let found = File::options().read(true).custom_flags(libc::O_PATH).open(path);
    found.map_err(|e| ImageError::from_os(format!("cannot open {}", path.display()), &e))
}

/// The kernel's link to an open file, which shows its path.
pub(crate) fn link_of(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Opens a found file that may be a disk: a regular file or a block device, not empty, that no other program
/// writes. Also returns its size. While the file, or a clone of it, is open, QEMU does not write to it.
pub(crate) fn open_disk_file(path: &Path, found: &File) -> Result<(File, u64), ImageError> {
    let shown = path.display();
    let refuse = |why: &str| ImageError::new(ImageErrorKind::Invalid, format!("cannot use {shown}: {why}"));
    let failed = |e: std::io::Error| ImageError::from_os(format!("cannot open {shown}"), &e);
    // Checked before it is opened, because opening a FIFO waits for a writer.
    let kind = found.metadata().map_err(failed)?.file_type();
    if kind.is_dir() {
        return Err(refuse("it is a directory, not a disk image"));
    }
    if !kind.is_file() && !kind.is_block_device() {
        return Err(refuse("it is neither a file nor a block device"));
    }
    let mut file = File::open(link_of(found)).map_err(failed)?;
    qemu_locks::take(&file, path)?;
    // The length in the metadata of a block device is 0, so seek to its end.
    let size_bytes = file.seek(SeekFrom::End(0)).map_err(failed)?;
    if size_bytes == 0 {
        return Err(refuse("it is empty"));
    }
    Ok((file, size_bytes))
}

struct RawFile {
    path: PathBuf,
    file: File,
    size_bytes: u64,
    /// Whether its file system may support reads that only use memory.
    may_not_wait: AtomicBool,
}

impl RawFile {
    /// The error if the file is shorter than it was when it was opened. Then it is unknown what is missing.
    fn cut_short(&self) -> Option<IoError> {
        let found =
            self.file.metadata().ok().filter(|found| found.is_file() && found.len() < self.size_bytes)?;
        let why = format!(
            "{} became shorter while it was used: {} bytes are left of {}",
            self.path.display(),
            found.len(),
            self.size_bytes
        );
        Some(IoError::new(IoErrorKind::Device, why))
    }

    /// The offset at which data or a hole next starts, at or after `from`.
    fn next(&self, seek: RawSeek) -> Result<u64, IoError> {
        match rustix::fs::seek(&self.file, seek) {
            Ok(at) => Ok(at.min(self.size_bytes)),
            // There is none up to the end of the file, which may have been truncated: the missing part is not
            // a hole.
            Err(Errno::NXIO) => match self.cut_short() {
                Some(cut) => Err(cut),
                None => Ok(self.size_bytes),
            },
            Err(e) => {
                let tried = format!("cannot find the holes of {}", self.path.display());
                Err(IoError::from_os(tried, e.into()))
            }
        }
    }
}

impl FileDisk for RawFile {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), IoError> {
        let len = into.len();
        self.file.read_exact_at(into, offset).map_err(|e| {
            let tried = format!("cannot read {len} bytes at {offset} of {}", self.path.display());
            match self.cut_short() {
                Some(cut) => IoError::new(IoErrorKind::Device, format!("{tried}: {cut}")),
                None => IoError::from_os(tried, e),
            }
        })
    }

    fn read_now(&self, offset: u64, into: &mut [u8]) -> bool {
        if !self.may_not_wait.load(Ordering::Relaxed) {
            return false;
        }
        let len = into.len();
        match rustix::io::preadv2(&self.file, &mut [IoSliceMut::new(into)], offset, ReadWriteFlags::NOWAIT) {
            Ok(read) => read == len,
            Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {
                self.may_not_wait.store(false, Ordering::Relaxed);
                false
            }
            Err(_) => false,
        }
    }

    fn sector_bytes(&self) -> Option<u32> {
        let is_device = self.file.metadata().is_ok_and(|found| found.file_type().is_block_device());
        let said = is_device.then(|| rustix::fs::ioctl_blksszget(&self.file).ok()).flatten();
        said.filter(|bytes| *bytes == LARGE_SECTOR_BYTES)
    }

    fn will_read(&self, range: ByteRange) {
        let len = std::num::NonZeroU64::new(range.len());
        let advice = rustix::fs::Advice::WillNeed;
        if let Err(e) = rustix::fs::fadvise(&self.file, range.offset(), len, advice) {
            tracing::debug!(path = %self.path.display(), error = %e, "the file system accepts no hint for readahead");
        }
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        let mut out: Vec<Extent> = Vec::new();
        let mut at = range.offset();
        while at < range.end() && out.len() < max_extents.max(1) {
            // Block devices and some file systems do not know their holes. Then everything counts as data,
            // including a truncated part, of which a read fails.
            let data = match self.next(RawSeek::Data(at)) {
                Ok(data) => data,
                Err(_) => at,
            };
            let (end, kind) = if data > at {
                (data, ExtentKind::Hole)
            } else {
                match self.next(RawSeek::Hole(at)) {
                    Ok(hole) if hole > at => (hole, ExtentKind::Data),
                    _ => (range.end(), ExtentKind::Data),
                }
            };
            let end = end.min(range.end());
            out.push(Extent { len: end - at, kind });
            at = end;
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headwater_block::{Attempt, Op, blocking};
    use headwater_testkit::wait_until;

    fn sparse_file() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.raw");
        let file = File::create(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(&[7; 65_536], 131_072).unwrap();
        (dir, path)
    }

    #[test]
    fn a_sparse_file_is_read_and_its_holes_are_found() {
        let (_dir, path) = sparse_file();
        let disk = raw_file(&path).unwrap();
        assert_eq!(disk.geometry().size_bytes, 1 << 20);
        let mut bytes = vec![1; 8192];
        blocking::read(disk.as_ref(), 131_072 - 4096, &mut bytes).unwrap();
        assert_eq!((bytes[0], bytes[4095], bytes[4096], bytes[8191]), (0, 0, 7, 7));
        assert_eq!(blocking::write(disk.as_ref(), 0, &bytes).unwrap_err().kind(), IoErrorKind::ReadOnly);
        let extents = disk.extents(ByteRange::new(512, (1 << 20) - 512).unwrap(), 16).unwrap();
        assert_eq!(extents.iter().map(|e| e.len).sum::<u64>(), (1 << 20) - 512);
        assert_eq!(
            extents.iter().map(|e| e.kind).collect::<Vec<_>>(),
            [ExtentKind::Hole, ExtentKind::Data, ExtentKind::Hole]
        );
        let one = disk.extents(ByteRange::new(0, 1 << 20).unwrap(), 1).unwrap();
        assert_eq!(one, [Extent { len: 131_072, kind: ExtentKind::Hole }]);
    }

    #[test]
    fn bytes_in_memory_are_read_on_the_calling_thread() {
        let (_dir, path) = sparse_file();
        let disk = raw_file(&path).unwrap();
        let read_now = |offset| {
            let (range, mut into) = (ByteRange::new(offset, 8192).unwrap(), vec![1; 8192]);
            let attempt = disk.try_now(Op::Read { range, into: &mut into }).unwrap();
            (attempt == Attempt::Done).then_some(into)
        };
        // Some file systems do not support this.
        let (file, mut into) = (File::open(&path).unwrap(), [0; 512]);
        let flags = ReadWriteFlags::NOWAIT;
        let asked = rustix::io::preadv2(&file, &mut [IoSliceMut::new(&mut into)], 131_072, flags);
        if !matches!(asked, Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS)) {
            wait_until("bytes that were just read are in memory", || {
                blocking::read(disk.as_ref(), 131_072, &mut [0; 8192]).unwrap();
                read_now(131_072).is_some_and(|bytes| bytes == [7; 8192])
            });
        }
        // The pool reports the part that no longer exists.
        File::options().write(true).open(&path).unwrap().set_len(131_072 + 4096).unwrap();
        assert_eq!(read_now(131_072), None);
        let error = blocking::read(disk.as_ref(), 131_072, &mut [0; 8192]).unwrap_err();
        assert!(error.to_string().contains("became shorter while it was used"), "{error}");
    }

    #[test]
    fn a_part_cut_off_during_use_is_not_a_hole() {
        let (_dir, path) = sparse_file();
        let disk = raw_file(&path).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(393_216).unwrap();
        for (at, len) in [(0, 1 << 20), (262_144, 786_432), (524_288, 524_288)] {
            let extents = disk.extents(ByteRange::new(at, len).unwrap(), 16).unwrap();
            let last = extents.last().unwrap();
            assert_eq!(last.kind, ExtentKind::Data, "{at}: {extents:?}");
            assert!(last.len >= 524_288 && extents.iter().map(|e| e.len).sum::<u64>() == len, "{extents:?}");
        }
        let error = blocking::read(disk.as_ref(), 524_288, &mut [0; 512]).unwrap_err();
        assert_eq!(error.kind(), IoErrorKind::Device);
        assert!(
            error.to_string().contains("became shorter while it was used: 393216 bytes are left of 1048576")
        );
    }

    #[test]
    fn the_found_file_is_opened_although_its_path_changed() {
        let (dir, path) = sparse_file();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let found = find_file(&link).unwrap();
        std::fs::remove_file(&link).unwrap();
        std::fs::write(&link, [9u8; 512]).unwrap();
        let (file, size_bytes) = open_disk_file(&link, &found).unwrap();
        assert_eq!(size_bytes, 1 << 20);
        let mut bytes = [0; 512];
        file.read_exact_at(&mut bytes, 131_072).unwrap();
        assert_eq!(bytes, [7; 512]);
    }

    #[test]
    fn files_that_are_not_disks_are_refused_with_the_reason() {
        let (dir, path) = sparse_file();
        let error = |path: &Path| raw_file(path).map(drop).unwrap_err().to_string();
        File::options().write(true).open(&path).unwrap().set_len(1000).unwrap();
        assert!(error(&path).contains("not a multiple of 512"), "{}", error(&path));
        File::create(&path).unwrap();
        assert!(error(&path).contains("it is empty"));
        assert!(error(dir.path()).contains("directory"));
        assert!(error(Path::new("/dev/zero")).contains("neither a file nor a block device"));
        assert!(error(&dir.path().join("none")).contains("No such file"));
    }
}
