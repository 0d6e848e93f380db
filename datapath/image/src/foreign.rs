//! Reads disk images of other virtual machines: VHD, with code of this crate ([`crate::vhd`]), and VHDX and
//! VMDK in one file, with other crates.
//!
//! These crates read sequentially, one caller at a time; several workers of an import take turns. They are
//! young, so a panic in one of them, which malicious bytes may cause, becomes an error of the request.
//!
//! Not read: a VHDX with a log ([`crate::vhdx`]), disks that contain only the difference to a parent, and
//! VMDK descriptions with their extents in other files. QEMU (`qemu-nbd`) can serve such a VMDK. It reads a
//! differencing VHD without its parent, and cannot read a differencing VHDX at all.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use headwater_block::{ByteRange, Extent, ExtentKind, IoError, IoErrorKind};
use parking_lot::Mutex;

use crate::error::{ImageError, ImageErrorKind};
use crate::file_disk::FileDisk;
use crate::inspection::{LARGE_SECTOR_BYTES, SECTOR_BYTES};
use crate::open::FileFormat;
use crate::vhd::{self, Vhd};
use crate::vhdx::{Refusal, unread};

/// The largest table that is read into memory as a whole: the blocks of a VHD or VHDX, and the metadata of a
/// VHDX. It is enough for 64 TiB in blocks of 8 MiB and 8 TiB in blocks of 1 MiB (VHDX), and for 8 TiB in
/// blocks of 512 KiB (VHD).
pub(crate) const TABLE_BYTES_MAX: u64 = 64 << 20;

/// The most grain tables of a VMDK, which its crate keeps after reading them: enough for 4 TiB in grains of
/// 64 KiB.
const GRAIN_TABLES_BYTES_MAX: u64 = 256 << 20;

/// A format of another virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Foreign {
    Vhd,
    Vhdx,
    Vmdk,
}

impl Foreign {
    /// The format of a file by its first bytes. A VHD of fixed size can only be recognised by its end:
    /// [`vhd::end_of_fixed`].
    pub(crate) fn detect(start: &[u8]) -> Option<Self> {
        if start.starts_with(b"vhdxfile") {
            Some(Self::Vhdx)
        } else if start.starts_with(b"KDMV") {
            Some(Self::Vmdk)
        } else if start.starts_with(vhd::COOKIE) {
            Some(Self::Vhd)
        } else {
            None
        }
    }

    pub(crate) const fn format(self) -> FileFormat {
        match self {
            Self::Vhd => FileFormat::Vhd,
            Self::Vhdx => FileFormat::Vhdx,
            Self::Vmdk => FileFormat::Vmdk,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Vhd => "VHD",
            Self::Vhdx => "VHDX",
            Self::Vmdk => "VMDK",
        }
    }

    /// Opens the disk in an open file. The path is only used in messages. `hint` advises what to do with a
    /// file that is not read here.
    pub(crate) fn open_file(
        self,
        path: &Path,
        file: File,
        file_bytes: u64,
        hint: &str,
    ) -> Result<Arc<dyn FileDisk>, ImageError> {
        let refuse = |kind: ImageErrorKind, why: String| {
            ImageError::new(kind, format!("cannot open the {} image {}: {why}", self.name(), path.display()))
        };
        let damaged = |why: String| refuse(ImageErrorKind::Damaged, format!("{why}. {COPY_AGAIN}"));
        let refused = |refusal| match refusal {
            Refusal::NotClosed => not_closed(path),
            Refusal::Unsupported(why) => refuse(ImageErrorKind::Unsupported, why),
            Refusal::ForQemu(why) => refuse(ImageErrorKind::Unsupported, format!("{why}. {hint}")),
            Refusal::Damaged(why) => damaged(why),
        };
        if self == Self::Vhd {
            return Vhd::open(path, file, file_bytes).map_err(refused);
        }
        let opened = catch_unwind(|| {
            if self == Self::Vhdx {
                crate::vhdx::check(&file, file_bytes)?;
            }
            self.open_reader(file, file_bytes)
        });
        let (reader, (size_bytes, sector_bytes)) = match opened {
            Ok(opened) => opened.map_err(refused)?,
            Err(_) => return Err(damaged("its headers are invalid".into())),
        };
        if size_bytes == 0 || !size_bytes.is_multiple_of(u64::from(sector_bytes.unwrap_or(SECTOR_BYTES))) {
            return Err(damaged(format!(
                "its header is wrong: a disk of {size_bytes} bytes is not possible"
            )));
        }
        let (path, name) = (path.to_owned(), self.name());
        Ok(Arc::new(ForeignDisk { path, name, size_bytes, sector_bytes, reader: Mutex::new(reader) }))
    }

    fn open_reader(self, mut file: File, file_bytes: u64) -> Result<(Box<dyn ReadSeek>, Sizes), Refusal> {
        match self {
            Self::Vhd => Err(Refusal::Damaged("a bug: another reader opened this VHD".to_owned())),
            Self::Vhdx => {
                // For a whole file the crate would use the length in the metadata, which is 0 for a block
                // device.
                let part = vhdx::Backing::sub(Arc::new(file), 0, file_bytes);
                let reader = vhdx::VhdxReader::from_backing(part, None).map_err(|e| match e {
                    vhdx::VhdxError::DifferencingNotSupported => {
                        Refusal::Unsupported(vhd::DIFFERENCE.to_owned())
                    }
                    e => damaged(e),
                })?;
                let sector_bytes = reader.logical_sector_size();
                if !matches!(sector_bytes, SECTOR_BYTES | LARGE_SECTOR_BYTES) {
                    return Err(damaged(format!(
                        "its header is wrong: its sectors have {sector_bytes} bytes, not 512 or 4096"
                    )));
                }
                let size_bytes = reader.virtual_disk_size();
                Ok((Box::new(reader), (size_bytes, Some(sector_bytes))))
            }
            Self::Vmdk => {
                check_grain_tables(&file)?;
                // The crate reads from the file's present position.
                file.rewind().map_err(damaged)?;
                let reader = vmdk::VmdkReader::open(file).map_err(of_vmdk)?;
                // A delta disk would read as zeroes where its parent has data.
                if !matches!(reader.parent_cid(), 0 | u32::MAX) {
                    let why = format!("it is a delta disk (snapshot) of another file. {JOIN_DELTA}");
                    return Err(Refusal::Unsupported(why));
                }
                check_description(reader.disk_type(), reader.descriptor_text())?;
                let size_bytes = reader.virtual_disk_size();
                Ok((Box::new(reader), (size_bytes, None)))
            }
        }
    }
}

fn damaged(why: impl std::fmt::Display) -> Refusal {
    Refusal::Damaged(why.to_string())
}

/// Converts an error of the crate. QEMU can read the older and other kinds that it refuses.
fn of_vmdk(error: vmdk::VmdkError) -> Refusal {
    use vmdk::VmdkError::{CompressedNotSupported, Io, UnsupportedDiskType, UnsupportedVersion};
    match error {
        Io(e) => Refusal::Damaged(unread(&e)),
        e @ (CompressedNotSupported | UnsupportedDiskType(_) | UnsupportedVersion(_)) => {
            Refusal::ForQemu(shown(&e.to_string()))
        }
        e => damaged(e),
    }
}

/// Refuses a VMDK whose tables would fill the memory, judged by the header that the crate uses.
fn check_grain_tables(file: &File) -> Result<(), Refusal> {
    let mut bytes = [0; 512];
    file.read_exact_at(&mut bytes, 0).map_err(|e| unread(&e))?;
    let header = vmdk::header::SparseExtentHeader::parse(&bytes).map_err(of_vmdk)?;
    let entries = u64::from(header.num_gtes_per_gt);
    let tables = header.capacity.div_ceil(header.grain_size.max(1)).div_ceil(entries.max(1));
    match tables.saturating_mul(entries * 4) {
        0..=GRAIN_TABLES_BYTES_MAX => Ok(()),
        all => Err(Refusal::ForQemu(format!(
            "its grain tables need {all} bytes, and the limit is {GRAIN_TABLES_BYTES_MAX}"
        ))),
    }
}

/// The advice if bytes changed or are missing. QEMU does not read such a file either.
const COPY_AGAIN: &str = "The file is damaged or truncated: copy it again";

/// The advice if a VMDK consists of several files.
const JOIN_VMDK: &str = "Join all of its files into one, where they are: qemu-img convert -O qcow2 DISK.vmdk DISK.qcow2 (of a disk in \
     pieces DISK.vmdk is the file that describes them)";

/// The advice if a VMDK contains only the difference to another file.
const JOIN_DELTA: &str =
    "In the directory with both files, run: qemu-img convert -O qcow2 THIS.vmdk DISK.qcow2";

/// Refuses a disk that consists of more than this file.
fn check_description(kind: &str, text: &str) -> Result<(), Refusal> {
    if kind.is_empty() {
        let why = format!("it is one piece of a disk, which another file describes. {JOIN_VMDK}");
        return Err(Refusal::Unsupported(why));
    }
    if !matches!(kind, "monolithicSparse" | "streamOptimized") {
        return Err(Refusal::Unsupported(format!(
            "it says that it is '{}', but only monolithicSparse and streamOptimized can be read. {JOIN_VMDK}",
            shown(kind)
        )));
    }
    let parent = text.lines().find_map(|line| {
        let (key, parent) = line.split_once('=')?;
        key.trim().eq_ignore_ascii_case("parentFileNameHint").then(|| parent.trim().trim_matches('"'))
    });
    match parent.filter(|parent| !parent.is_empty()) {
        Some(parent) => Err(Refusal::Unsupported(format!(
            "it is a delta disk (snapshot) of '{}'. {JOIN_DELTA}",
            shown(parent)
        ))),
        None => Ok(()),
    }
}

/// Text from a file, for a message.
fn shown(text: &str) -> String {
    text.chars().take(80).flat_map(char::escape_debug).collect()
}

fn not_closed(path: &Path) -> ImageError {
    let shown = path.display();
    let why = format!(
        "cannot open the VHDX image {shown}: it was not closed cleanly, so its last writes are only in its log. Start and \
         shut down its machine, or run 'qemu-img check -r all {shown}', and try again"
    );
    ImageError::new(ImageErrorKind::Unsupported, why)
}

/// The size of the disk, and of its sectors if the file specifies it.
type Sizes = (u64, Option<u32>);

trait ReadSeek: Read + Seek + Send {}

impl<T: Read + Seek + Send> ReadSeek for T {}

struct ForeignDisk {
    path: PathBuf,
    name: &'static str,
    size_bytes: u64,
    /// Only a VHDX specifies it.
    sector_bytes: Option<u32>,
    reader: Mutex<Box<dyn ReadSeek>>,
}

impl FileDisk for ForeignDisk {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), IoError> {
        let len = into.len();
        let tried = || {
            format!("cannot read {len} bytes at {offset} of the {} image {}", self.name, self.path.display())
        };
        let mut reader = self.reader.lock();
        let read = catch_unwind(AssertUnwindSafe(|| {
            reader.seek(SeekFrom::Start(offset))?;
            reader.read_exact(into)
        }));
        match read {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) if e.raw_os_error().is_some() => Err(IoError::from_os(tried(), e)),
            Ok(Err(e)) => {
                let why = unread(&e);
                Err(IoError::new(IoErrorKind::Corrupt, format!("{}: {why}. {COPY_AGAIN}", tried())))
            }
            Err(_) => Err(IoError::new(IoErrorKind::Corrupt, format!("{}. {COPY_AGAIN}", tried()))),
        }
    }

    fn sector_bytes(&self) -> Option<u32> {
        self.sector_bytes
    }

    fn extents(&self, range: ByteRange, _max_extents: usize) -> Result<Vec<Extent>, IoError> {
        // The crates do not report holes; a hole reads as zeroes.
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Data }])
    }

    fn will_read(&self, _range: ByteRange) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw_file::{find_file, open_disk_file};
    use headwater_testkit::run;

    #[test]
    fn a_disk_is_read_from_the_opened_file_not_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let (raw, path) = (dir.path().join("disk.raw"), dir.path().join("image"));
        let disk = vec![0x5au8; 1 << 20];
        std::fs::write(&raw, &disk).unwrap();
        for (format, name) in [(Foreign::Vhd, "vpc"), (Foreign::Vhdx, "vhdx"), (Foreign::Vmdk, "vmdk")] {
            let (from, to) = (raw.to_str().unwrap(), path.to_str().unwrap());
            run("qemu-utils", "qemu-img", &["convert", "-f", "raw", "-O", name, from, to]);
            let (file, file_bytes) = open_disk_file(&path, &find_file(&path).unwrap()).unwrap();
            std::fs::remove_file(&path).unwrap();
            let opened = format.open_file(&path, file, file_bytes, "").unwrap();
            let mut bytes = vec![0; disk.len()];
            FileDisk::read(&*opened, 0, &mut bytes).unwrap();
            assert!(bytes == disk, "{name}");
        }
    }
}
