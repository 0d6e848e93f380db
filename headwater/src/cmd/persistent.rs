//! Persistent write caches of `headwater export --persistent`: the file with the key, and the identities by which a
//! later export recognises the cache and its base, which is the disk (of a file or a version) below the cache. (Persistent
//! disks of machines are kept by the daemon.)

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use headwater_api::SourceFormat;
use headwater_store::Hash;
use headwater_volume::PersistentOptions;

use crate::data_dir::DataDir;
use crate::failure::invalid;
use crate::keys;

/// The first bytes of files in other formats than raw, by which formats are detected.
const MARKS: [&[u8]; 4] = [b"QFI\xfb", b"vhdxfile", b"KDMV", VHD_MARK];

/// The last sector of a VHD of fixed size begins with this; the rest is a raw disk.
const VHD_MARK: &[u8] = b"conectix";

/// Makes the options of the cache: reads the key, or creates one for a new cache.
pub fn options(
    name: &str,
    key_file: Option<&Path>,
    cache_dir: &Path,
    base_id: [u8; 32],
    data_dir: impl FnOnce() -> anyhow::Result<DataDir>,
) -> anyhow::Result<PersistentOptions> {
    let key_file = match key_file {
        Some(file) => file.to_path_buf(),
        None => default_key_file(&data_dir()?, name)?,
    };
    let exists = cache_dir.join(name).join("map").exists();
    let key = keys::key(&key_file, cache_dir, exists)
        .with_context(|| format!("cannot use the key of the persistent cache '{name}'"))?;
    Ok(PersistentOptions { name: name.to_owned(), key, base_id })
}

/// The default: `keys/NAME` in the data directory.
fn default_key_file(data_dir: &DataDir, name: &str) -> anyhow::Result<PathBuf> {
    let keys = data_dir.keys();
    keys::make_directory(&keys).with_context(|| {
        format!("cannot make {} (give the file of the key with --key-file)", keys.display())
    })?;
    Ok(keys.join(name))
}

/// Removes a cache that was created for a start that failed. The cache is closed and empty. Its key stays: other
/// caches may use it, and a new cache under the same key never repeats a nonce.
pub fn remove_new(dir: &Path) -> std::io::Result<()> {
    use std::io::ErrorKind;
    // Fails if another process has opened it meanwhile.
    let lock = std::fs::File::open(dir.join("lock"))?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive)?;
    // Removes only the cache's own files, because the directory may have existed with other files. `data` first: if
    // this is interrupted, the rest is a new cache.
    for name in ["data", "map", "map.new", "id", "id.new", "lock"] {
        match std::fs::remove_file(dir.join(name)) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    match std::fs::remove_dir(dir) {
        Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(()),
        done => done,
    }
}

/// An open persistent cache. Two processes serve the same volume if [`Kept::identity`] is equal: names and paths say
/// nothing about that.
#[derive(Clone)]
pub struct Kept {
    /// The cache's directory.
    pub dir: PathBuf,
    base_id: [u8; 32],
    cache_id: [u8; 16],
}

impl Kept {
    /// The cache `name` in `cache_dir`, which is already open.
    pub fn new(cache_dir: &Path, name: &str, base_id: [u8; 32], cache_id: [u8; 16]) -> anyhow::Result<Self> {
        let dir = cache_dir.join(name);
        let dir = dir.canonicalize().with_context(|| format!("cannot find {}", dir.display()))?;
        Ok(Self { dir, base_id, cache_id })
    }

    /// The identity of the cache, which does not depend on its path. A new cache in the same place has another
    /// identity.
    pub fn identity(&self) -> String {
        self.base_id.iter().chain(&self.cache_id).map(|byte| format!("{byte:02x}")).collect()
    }
}

/// The identity of an empty disk.
pub fn null_id(size_bytes: u64) -> [u8; 32] {
    Hash::of(format!("headwater base: null {size_bytes}").as_bytes()).0
}

/// The identity of a disk in a file and its backing files, the top file first. `format` is the format that the user
/// gave. If the bytes of the file look like another format, the given format is part of the identity, because without
/// it the same file has other contents.
pub fn file_id(files: &[PathBuf], size_bytes: u64, format: Option<SourceFormat>) -> anyhow::Result<[u8; 32]> {
    let mut forced_format = None;
    // Only raw needs this check: a file that is not in another named format fails to open.
    if let (Some(SourceFormat::Raw), Some(top)) = (format, files.first()) {
        let is_marked =
            is_marked(top).with_context(|| format!("cannot detect the disk format of {}", top.display()))?;
        forced_format = format.filter(|_| is_marked);
    }
    chain_id(files, size_bytes, forced_format)
}

/// Whether a file would be detected as another format than raw (`datapath/image/src/open.rs`).
fn is_marked(path: &Path) -> std::io::Result<bool> {
    use std::io::{Seek, SeekFrom};
    use std::os::unix::fs::FileExt;
    let mut file = std::fs::File::open(path)?;
    // `seek` instead of metadata, because it also works for a block device.
    let Some(last_sector) = file.seek(SeekFrom::End(0))?.checked_sub(512) else { return Ok(false) };
    let (mut start, mut footer) = ([0; 8], [0; 8]);
    file.read_exact_at(&mut start, 0)?;
    file.read_exact_at(&mut footer, last_sector)?;
    Ok(MARKS.iter().any(|mark| start.starts_with(mark)) || footer == VHD_MARK)
}

/// The identity of a chain of files. A file that was replaced or written to is another base.
fn chain_id(
    files: &[PathBuf],
    size_bytes: u64,
    forced_format: Option<SourceFormat>,
) -> anyhow::Result<[u8; 32]> {
    let said = forced_format.map(|format| format!("{} ", format.name())).unwrap_or_default();
    let mut text = format!("headwater base: {said}file {size_bytes} ").into_bytes();
    for (at, path) in files.iter().enumerate() {
        let failed = || format!("cannot identify {}", path.display());
        let whole = path.canonicalize().with_context(failed)?;
        let metadata = whole.metadata().with_context(failed)?;
        if at > 0 {
            // No path contains this byte, so paths cannot run into each other.
            text.push(0);
        }
        let state = format!("{} {}.{:09} ", metadata.len(), metadata.mtime(), metadata.mtime_nsec());
        text.extend(state.into_bytes());
        text.extend(whole.as_os_str().as_encoded_bytes());
    }
    Ok(Hash::of(&text).0)
}

/// Whether `cache_dir` has a cache `name`.
pub fn is_there(cache_dir: &Path, name: &str) -> bool {
    base_of(cache_dir, name).is_some()
}

/// The base of the cache `name` in `cache_dir`, if there is one (`docs/format-cache.md`, the header of `map`).
fn base_of(cache_dir: &Path, name: &str) -> Option<[u8; 32]> {
    use std::os::unix::fs::FileExt;
    let (mut magic, mut base) = ([0; 8], [0; 32]);
    let map = std::fs::File::open(cache_dir.join(name).join("map")).ok()?;
    map.read_exact_at(&mut magic, 0).and_then(|()| map.read_exact_at(&mut base, 24)).ok()?;
    (magic == *b"HWCACHE\n").then_some(base)
}

/// Fails if the cache `name` was not created over these files, and for block devices, because writes to a device
/// cannot be detected.
pub fn check_files(
    files: &[PathBuf],
    cache_dir: &Path,
    name: &str,
    base_id: &[u8; 32],
) -> anyhow::Result<()> {
    let is_device = |path: &&PathBuf| path.metadata().is_ok_and(|found| found.file_type().is_block_device());
    let found = base_of(cache_dir, name);
    if let Some(device) = files.iter().find(is_device) {
        let why = format!("writes to the block device {} cannot be detected", device.display());
        return Err(invalid(format!(
            "a persistent cache is only valid over unchanged contents, and {why}: import the device \
             ('headwater image import'), as an image is known by its hash"
        )));
    }
    match (files, found) {
        ([file, ..], Some(found)) if found != *base_id => Err(invalid(format!(
            "the persistent cache {} belongs to base {}, and {} is another base now: a file and its backing files are recognised \
             by path, size and time of modification, and by --format if it differs from the format of the content. Restore the \
             files as they were and give the same --format, or give another name, or use an image of a store, which can be moved",
            cache_dir.join(name).display(),
            Hash(found),
            file.display()
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headwater_image::{Backing, FileFormat};

    #[test]
    fn a_cache_is_known_by_its_base_and_itself_and_by_no_name() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("a/lab")).unwrap();
        std::fs::create_dir_all(dir.path().join("b/lab")).unwrap();
        let kept =
            |at: &str, base, cache| Kept::new(&dir.path().join(at), "lab", [base; 32], [cache; 16]).unwrap();
        let first = kept("a", 1, 2);
        assert_eq!(first.identity(), format!("{}{}", "01".repeat(32), "02".repeat(16)));
        assert_eq!(first.identity(), kept("b", 1, 2).identity());
        assert_ne!(first.identity(), kept("a", 1, 3).identity());
        assert_ne!(first.identity(), kept("a", 3, 2).identity());
        assert_eq!(first.dir, kept("b/../a", 1, 2).dir);
    }

    #[test]
    fn a_file_that_changes_is_another_base() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("disk");
        let below = dir.path().join("below");
        std::fs::write(&file, b"one").unwrap();
        std::fs::write(&below, b"one").unwrap();
        let id = |files: &[&PathBuf], size_bytes| {
            let files: Vec<_> = files.iter().map(|&file| file.clone()).collect();
            file_id(&files, size_bytes, None).unwrap()
        };
        let (first, both) = (id(&[&file], 512), id(&[&file, &below], 512));
        assert_eq!(id(&[&dir.path().join(".").join("disk")], 512), first);
        assert_ne!(id(&[&file], 1024), first);
        assert_ne!(both, first);
        std::fs::write(&below, b"other").unwrap();
        assert_eq!(id(&[&file], 512), first);
        assert_ne!(id(&[&file, &below], 512), both);
        std::fs::write(&file, b"other").unwrap();
        assert_ne!(id(&[&file], 512), first);
        assert_ne!(null_id(512), null_id(1024));
    }

    #[test]
    fn a_format_makes_another_base_where_the_bytes_say_another_one_and_nowhere_else() {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk");
        let files = [disk.clone()];
        let id = |format| file_id(&files, 1 << 20, format).unwrap();
        let raw = Some(SourceFormat::Raw);
        let plain = vec![1; 1 << 20];
        std::fs::write(&disk, &plain).unwrap();
        assert!(headwater_image::open_file(&disk).is_ok());
        assert_eq!(id(raw), id(None));
        let places = MARKS.map(|mark| (0, mark)).into_iter().chain([(plain.len() - 512, VHD_MARK)]);
        for (at, mark) in places {
            let mut marked = plain.clone();
            marked[at..at + mark.len()].copy_from_slice(mark);
            std::fs::write(&disk, marked).unwrap();
            // The file is valid as a raw disk, but not in the format that it looks like.
            let opened = |format| headwater_image::open_chain(&disk, format, Backing::Beside);
            assert!(opened(Some(FileFormat::Raw)).is_ok() && opened(None).is_err(), "{mark:?} at {at}");
            assert_ne!(id(raw), id(None), "{mark:?} at {at}");
            assert_eq!(id(Some(SourceFormat::Qcow2)), id(None), "{mark:?} at {at}");
        }
        std::fs::write(&disk, b"short").unwrap();
        assert_eq!(id(raw), id(None));
    }
}
