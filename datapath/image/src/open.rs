//! Opens a disk image in a file for an import or an export, whatever its format. Raw, qcow2, VHD, VHDX and
//! VMDK can be read; other formats are refused by name.

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use headwater_block::Device;

use crate::error::{ImageError, ImageErrorKind};
use crate::fetch_pool::Place;
use crate::file_disk::{FileDisk, PooledDisk};
use crate::foreign::Foreign;
use crate::known_formats::refuse_known_formats;
use crate::qcow2::disk::Qcow2Disk;
use crate::qcow2::header::{self, Header, Refusal};
use crate::raw_file::{find_file, link_of, open_disk_file, open_raw};
use crate::units::usize_of;
use crate::vhd;

/// The most files in a chain of qcow2 images.
pub const BACKING_CHAIN_MAX: usize = 64;

/// The format of an image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileFormat {
    /// The bytes of the file are the disk.
    Raw,
    /// QEMU's format, with backing files.
    Qcow2,
    /// The older format of Virtual PC and Hyper-V, fixed or dynamic.
    Vhd,
    /// The format of Hyper-V.
    Vhdx,
    /// The format of VMware, in one file.
    Vmdk,
}

impl FileFormat {
    const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Vhd => "VHD",
            Self::Vhdx => "VHDX",
            Self::Vmdk => "VMDK",
        }
    }
}

/// Which files and devices a qcow2 image may use as its backing file. Everything in them can be read through
/// the image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// Files in the directory of the opened image, or below it, because they probably came together with the
    /// image.
    #[default]
    Beside,
    /// Every file that this process may read.
    Anywhere,
}

/// Opens an image file that a machine reads, whatever its format. All formats except raw are recognised by
/// their bytes, and a file that is recognised as something else is refused. The files of the chain must not
/// change while it is used.
///
/// A raw disk that an untrusted guest has written could imitate a qcow2 image whose backing file is another
/// file in its directory. Open such a disk with its format ([`open_chain`], [`open_source`]).
pub fn open_file(path: &Path) -> Result<Arc<dyn Device>, ImageError> {
    open_file_backed(path, Backing::Beside)
}

/// As [`open_file`], with backing files from elsewhere if `backing` allows it.
pub fn open_file_backed(path: &Path, backing: Backing) -> Result<Arc<dyn Device>, ImageError> {
    Ok(open_chain(path, None, backing)?.0)
}

/// As [`open_file_backed`]. Also returns the files that are read: its own, then its backing files. The format
/// can be given as for [`open_source`].
pub fn open_chain(
    path: &Path,
    format: Option<FileFormat>,
    backing: Backing,
) -> Result<(Arc<dyn Device>, Vec<PathBuf>), ImageError> {
    let mut chain = Chain { is_served: true, ..Chain::default() };
    let within = place(path, backing);
    let disk = open_layer(path, &find_file(path)?, format, within.as_deref(), &mut chain)?;
    Ok((PooledDisk::open(disk, Place::Here, chain.locks)?, chain.files))
}

/// Opens an image file from which an image is made. Its reads have threads of their own, so a slow file
/// delays no machine. Without a format it works as [`open_file`]. With a format, a file of another format is
/// refused. A file given as raw is the disk whatever its bytes are. The backing files of a qcow2 image are
/// opened as its header specifies.
pub fn open_source(path: &Path, format: Option<FileFormat>) -> Result<Arc<dyn Device>, ImageError> {
    open_source_backed(path, format, Backing::Beside)
}

/// As [`open_source`], with backing files from elsewhere if `backing` allows it.
pub fn open_source_backed(
    path: &Path,
    format: Option<FileFormat>,
    backing: Backing,
) -> Result<Arc<dyn Device>, ImageError> {
    let mut chain = Chain::default();
    let within = place(path, backing);
    let disk = open_layer(path, &find_file(path)?, format, within.as_deref(), &mut chain)?;
    Ok(PooledDisk::open(disk, Place::Source, chain.locks)?)
}

/// The files that were opened, from the top.
#[derive(Default)]
struct Chain {
    /// Whether the files are served as they are, instead of being imported. Disks of an NBD server can only
    /// be imported.
    is_served: bool,
    /// Device and inode of the qcow2 images, which may have a backing file.
    above: Vec<(u64, u64)>,
    files: Vec<PathBuf>,
    /// The same files, open, with their locks.
    locks: Vec<File>,
}

/// Opens a file that was found at this path, and the files below it.
fn open_layer(
    path: &Path,
    found: &File,
    format: Option<FileFormat>,
    within: Option<&Path>,
    chain: &mut Chain,
) -> Result<Arc<dyn FileDisk>, ImageError> {
    let (file, file_bytes) = open_disk_file(path, found)?;
    chain.files.push(path.to_owned());
    chain.locks.push(file.try_clone().map_err(|e| cannot_open(path, &e))?);
    let start = read_start(&file, file_bytes).map_err(|e| cannot_open(path, &e))?;
    if format == Some(FileFormat::Raw) {
        return open_raw(path, file, file_bytes);
    }
    if !start.starts_with(&header::MAGIC) {
        let foreign = foreign(path, &file, file_bytes, &start)?;
        if let Some(expected) = format {
            return match foreign.filter(|foreign| foreign.format() == expected) {
                Some(foreign) => foreign.open_file(path, file, file_bytes, &chain.via_qemu(path)),
                None => Err(is_another(path, expected)),
            };
        }
        if let Some(foreign) = foreign {
            return foreign.open_file(path, file, file_bytes, &chain.via_qemu(path));
        }
        let file_end = read_end(&file, file_bytes).map_err(|e| cannot_open(path, &e))?;
        refuse_known_formats(path, file_bytes, (&start, &file_end), &chain.via_qemu(path))?;
        return open_raw(path, file, file_bytes);
    }
    if let Some(expected) = format.filter(|format| *format != FileFormat::Qcow2) {
        return Err(is_another(path, expected));
    }
    let metadata = file.metadata().map_err(|e| cannot_open(path, &e))?;
    let identity = (metadata.dev(), metadata.ino());
    if chain.above.contains(&identity) || chain.above.len() >= BACKING_CHAIN_MAX {
        let why = if chain.above.contains(&identity) { "goes in a circle" } else { "is too long" };
        return Err(ImageError::new(
            ImageErrorKind::Invalid,
            format!("cannot open {}: the chain of its backing files {why}", path.display()),
        ));
    }
    chain.above.push(identity);
    let header = Header::decode(&start).map_err(|refusal| refused(path, refusal, chain))?;
    let backing = match &header.backing {
        Some(name) => Some(open_backing(path, name, header.backing_format.as_deref(), within, chain)?),
        None => None,
    };
    let disk = Qcow2Disk::open(path, file, file_bytes, header, backing).map_err(|e| {
        ImageError::from(e).context(format!("cannot open the qcow2 image {}", path.display()))
    })?;
    Ok(Arc::new(disk))
}

fn open_backing(
    above: &Path,
    name: &str,
    format: Option<&str>,
    within: Option<&Path>,
    chain: &mut Chain,
) -> Result<Arc<dyn FileDisk>, ImageError> {
    let advice = chain.via_qemu(above);
    let unsupported = |what: String| {
        let why = format!("cannot open {}: {what}. {advice}", above.display());
        ImageError::new(ImageErrorKind::Unsupported, why)
    };
    let format = match format {
        Some("raw") => Some(FileFormat::Raw),
        Some("qcow2") => Some(FileFormat::Qcow2),
        // The names that QEMU uses.
        Some("vpc") => Some(FileFormat::Vhd),
        Some("vhdx") => Some(FileFormat::Vhdx),
        Some("vmdk") => Some(FileFormat::Vmdk),
        None => None,
        Some(other) => return Err(unsupported(format!("its backing file '{name}' has the format {other}"))),
    };
    if name.starts_with("json:") {
        let why = format!(
            "cannot open {}: its backing file is not given as a path but as QEMU options, '{name}', and Headwater does not \
             read them. Look at the options. If they only name a file, replace them by its path: qemu-img rebase -u -b \
             FILE -F FORMAT {}. If not, join both into one image where both are: qemu-img convert",
            above.display(),
            above.display()
        );
        return Err(ImageError::new(ImageErrorKind::Unsupported, why));
    }
    let plain = name.strip_prefix("file:").unwrap_or(name);
    // As in QEMU, a colon before the first slash means a protocol.
    if plain.split('/').next().is_some_and(|first| first.contains(':')) {
        return Err(unsupported(format!("its backing file '{name}' is not a local file")));
    }
    let path = match above.parent() {
        Some(dir) => dir.join(plain),
        None => PathBuf::from(plain),
    };
    let failed = |e: ImageError| {
        let hint = if e.kind() == ImageErrorKind::NotFound {
            ". Put it there, or join both into one image on the host that has both: qemu-img convert"
        } else {
            ""
        };
        let kind = if e.kind() == ImageErrorKind::NotFound { ImageErrorKind::Invalid } else { e.kind() };
        ImageError::new(
            kind,
            format!("cannot use {} without its backing file '{name}': {e}{hint}", above.display()),
        )
    };
    let found = find_file(&path).map_err(failed)?;
    if let Some(within) = within {
        refuse_elsewhere(above, name, &found, within)?;
    }
    open_layer(&path, &found, format, within, chain).map_err(failed)
}

/// The directory that must contain all files of the chain.
fn place(path: &Path, backing: Backing) -> Option<PathBuf> {
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    // If the directory does not exist, opening the image fails anyway.
    (backing == Backing::Beside).then(|| dir.canonicalize().unwrap_or_else(|_| dir.to_owned()))
}

/// Fails for a file outside the directory. The author of the image may have meant any file or device of this
/// host. The open file itself is checked, because its path may lead elsewhere before it is opened, and paths
/// through `/proc` lead to files that have no path.
fn refuse_elsewhere(above: &Path, name: &str, found: &File, within: &Path) -> Result<(), ImageError> {
    let refuse = |what: &str| {
        let why = format!(
            "cannot use {}: its backing file '{name}' is {what}, so the image could expose any file of this \
             host. If that is what you expect (look with 'qemu-img info --backing-chain'), allow it with --backing, or put \
             both files into one directory and say so: qemu-img rebase -u",
            above.display()
        );
        Err(ImageError::new(ImageErrorKind::Invalid, why))
    };
    let failed = |e: std::io::Error| {
        let tried = format!("cannot find out where the backing file '{name}' of {} is", above.display());
        ImageError::from_os(tried, &e)
    };
    let metadata = found.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return refuse("not a regular file");
    }
    let whole = std::fs::read_link(link_of(found)).map_err(failed)?;
    if !whole.starts_with(within) {
        return refuse("outside its directory");
    }
    // If the file no longer has a name (`.. (deleted)`), or belongs to the root directory of another process,
    // the link shows a path that is another file here, or none.
    let is_it = |named: Metadata| (named.dev(), named.ino()) == (metadata.dev(), metadata.ino());
    if !std::fs::symlink_metadata(&whole).is_ok_and(is_it) {
        return refuse("a file that has no name in its directory");
    }
    Ok(())
}

fn is_another(path: &Path, expected: FileFormat) -> ImageError {
    let why = format!("cannot open {} as {}: it has another format", path.display(), expected.name());
    ImageError::new(ImageErrorKind::Invalid, why)
}

fn read_start(file: &File, file_bytes: u64) -> Result<Vec<u8>, std::io::Error> {
    let mut start = vec![0; usize_of(file_bytes.min(Header::MAX_BYTES))];
    file.read_exact_at(&mut start, 0)?;
    Ok(start)
}

/// The last 512 bytes, or fewer if the file is shorter.
fn read_end(file: &File, file_bytes: u64) -> Result<Vec<u8>, std::io::Error> {
    let len = file_bytes.min(512);
    let mut end = vec![0; usize_of(len)];
    file.read_exact_at(&mut end, file_bytes.saturating_sub(len))?;
    Ok(end)
}

/// The format of another virtual machine, if the file has one.
fn foreign(path: &Path, file: &File, file_bytes: u64, start: &[u8]) -> Result<Option<Foreign>, ImageError> {
    if let Some(by_start) = Foreign::detect(start) {
        return Ok(Some(by_start));
    }
    // A VHD of fixed size is a raw disk with a footer.
    let has_footer = vhd::end_of_fixed(file, file_bytes).map_err(|e| cannot_open(path, &e))?.is_some();
    Ok(has_footer.then_some(Foreign::Vhd))
}

fn cannot_open(path: &Path, error: &std::io::Error) -> ImageError {
    ImageError::from_os(format!("cannot open {}", path.display()), error)
}

impl Chain {
    /// The advice for a file that only QEMU can read.
    fn via_qemu(&self, path: &Path) -> String {
        let uri = "nbd+unix:///?socket=/tmp/disk.sock";
        let then = if self.is_served {
            format!("make an image of it ('headwater image import {uri} --name IMAGE'), and use that")
        } else {
            format!("use {uri} in place of the file")
        };
        format!(
            "Let QEMU read it: run 'qemu-nbd --read-only --persistent --socket=/tmp/disk.sock {}' and {then}",
            path.display()
        )
    }
}

fn refused(path: &Path, refusal: Refusal, chain: &Chain) -> ImageError {
    let shown = path.display();
    match refusal {
        Refusal::Damaged(why) => {
            ImageError::new(ImageErrorKind::Damaged, format!("cannot open the qcow2 image {shown}: {why}"))
        }
        Refusal::Unsupported(why) => ImageError::new(
            ImageErrorKind::Unsupported,
            format!("cannot open the qcow2 image {shown}: {why}. {}", chain.via_qemu(path)),
        ),
        Refusal::Encrypted => ImageError::new(
            ImageErrorKind::Unsupported,
            format!(
                "cannot open the qcow2 image {shown}: it is encrypted. Decrypt it with 'qemu-img convert', or let \
                 qemu-nbd serve it with its key and {}",
                if chain.is_served {
                    "make an image of that ('headwater image import URI --name IMAGE')"
                } else {
                    "use the NBD URI in place of the file"
                }
            ),
        ),
    }
}
