//! The paths of all files of a store in a directory, and the file `store`, which identifies the directory
//! as a store and has its chunk size.

use std::fs;
use std::io::Error;
use std::path::{Path, PathBuf};

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::local_dir::files::{read_small, replace_file, sync_dir};
use crate::name::ImageName;

/// Smallest chunk size of a store.
pub const CHUNK_BYTES_MIN: u32 = 4096;
/// Largest chunk size of a store.
pub const CHUNK_BYTES_MAX: u32 = 4 << 20;
/// The chunk size of a new store unless said otherwise.
pub const CHUNK_BYTES_DEFAULT: u32 = 64 << 10;

const MAGIC: [u8; 8] = *b"HWSTORE\n";
const FORMAT: u32 = 1;
/// The format of a store with holes. A release that does not know holes would treat an object with holes as
/// whole.
const FORMAT_WITH_HOLES: u32 = 2;
const SETTINGS_BYTES: usize = 64;
/// The longest file that an interrupted creation leaves. Neither the settings nor the lock are longer.
const UNFINISHED_MAX_BYTES: u64 = 64;
const DIRS: [&str; 7] = ["images", "manifests", "objects", "holes", "traces", "trees", "tmp"];

#[derive(Debug)]
pub(super) struct Layout {
    pub(super) root: PathBuf,
}

impl Layout {
    pub(super) fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    pub(super) fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }

    pub(super) fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    pub(super) fn image(&self, name: &ImageName) -> PathBuf {
        self.images().join(name.as_str())
    }

    pub(super) fn manifests(&self) -> PathBuf {
        self.root.join("manifests")
    }

    pub(super) fn manifest(&self, id: Hash) -> PathBuf {
        self.manifests().join(id.to_string())
    }

    pub(super) fn objects(&self) -> PathBuf {
        self.root.join("objects")
    }

    pub(super) fn object(&self, id: Hash) -> PathBuf {
        self.objects().join(id.to_string())
    }

    pub(super) fn holes(&self) -> PathBuf {
        self.root.join("holes")
    }

    pub(super) fn holes_of(&self, object: Hash) -> PathBuf {
        self.holes().join(object.to_string())
    }

    /// The list of objects to trim.
    pub(super) fn trim(&self) -> PathBuf {
        self.root.join("trim")
    }

    pub(super) fn traces(&self) -> PathBuf {
        self.root.join("traces")
    }

    pub(super) fn trace(&self, manifest: Hash) -> PathBuf {
        self.traces().join(manifest.to_string())
    }

    pub(super) fn trees(&self) -> PathBuf {
        self.root.join("trees")
    }

    pub(super) fn tree(&self, manifest: Hash) -> PathBuf {
        self.trees().join(manifest.to_string())
    }

    pub(super) fn tmp(&self) -> PathBuf {
        self.root.join("tmp")
    }

    pub(super) fn reserve_file(&self) -> PathBuf {
        self.root.join("spare")
    }

    fn settings(&self) -> PathBuf {
        self.root.join("store")
    }

    /// The temporary file of the settings.
    fn new_settings(&self) -> PathBuf {
        self.tmp().join("store")
    }

    /// The chunk size of an existing store.
    pub(super) fn read_settings(&self) -> Result<u32, StoreError> {
        match read_small(&self.settings(), 4096) {
            Ok(bytes) => chunk_bytes_of(&self.root.display().to_string(), &bytes),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Err(StoreError::new(
                StoreErrorKind::NotFound,
                format!("there is no image store in {}", self.root.display()),
            )),
            Err(e) => Err(StoreError::from_os(format!("cannot read the store {}", self.root.display()), e)),
        }
    }

    /// Reads the chunk size of the store, and creates the store if it does not exist. The caller holds the
    /// writer's lock.
    pub(super) fn read_or_make_settings(&self, new_chunk_bytes: u32) -> Result<u32, StoreError> {
        match self.read_settings() {
            Err(e) if e.kind() == StoreErrorKind::NotFound => {}
            settled => return settled,
        }
        let settings = settings_bytes(new_chunk_bytes)?;
        let failed = |e| StoreError::from_os(format!("cannot make the store {}", self.root.display()), e);
        for dir in DIRS.map(|dir| self.root.join(dir)) {
            fs::create_dir_all(&dir).map_err(failed)?;
        }
        sync_dir(&self.root)?;
        // Written last: a directory without this file is an interrupted creation, and is created again.
        replace_file(&self.new_settings(), &self.settings(), &settings)?;
        Ok(new_chunk_bytes)
    }

    /// Changes the format version, so that releases that do not know holes refuse the store from now on.
    pub(super) fn allow_holes(&self, temporary: &Path, chunk_bytes: u32) -> Result<(), StoreError> {
        let settings = encode_settings(chunk_bytes, FORMAT_WITH_HOLES);
        if read_small(&self.settings(), 4096).is_ok_and(|there| there == settings) {
            return Ok(());
        }
        replace_file(temporary, &self.settings(), &settings)
    }

    /// Fails for a directory without a store that has files which no interrupted creation leaves. Its name
    /// may be a typing error, and files of another program in `tmp` or `objects` would be removed as
    /// unneeded.
    pub(super) fn refuse_foreign_files(&self) -> Result<(), StoreError> {
        let is_store = || match self.read_settings() {
            Err(e) if e.kind() == StoreErrorKind::NotFound => Ok(false),
            settled => settled.map(|_| true),
        };
        if is_store()? {
            return Ok(());
        }
        let foreign = self.foreign_file();
        let foreign = foreign
            .map_err(|e| StoreError::from_os(format!("cannot make the store {}", self.root.display()), e))?;
        let Some(foreign) = foreign else { return Ok(()) };
        // Another process may have created the store since the first check, and may have written to it.
        if is_store()? {
            return Ok(());
        }
        Err(StoreError::new(
            StoreErrorKind::Invalid,
            format!(
                "{} is not an image store, and is not empty (it has {}): choose another directory",
                self.root.display(),
                foreign.strip_prefix(&self.root).unwrap_or(&foreign).display()
            ),
        ))
    }

    /// Finds a file that no interrupted creation left. A creation makes the lock, empty folders, and the
    /// settings in `tmp`.
    fn foreign_file(&self) -> Result<Option<PathBuf>, Error> {
        for entry in fs::read_dir(&self.root)? {
            let path = entry?.path();
            if path == self.lock() && is_left(&path, is_lock) {
                continue;
            }
            let is_folder = DIRS.iter().any(|dir| path == self.root.join(dir)) && path.is_dir();
            if !is_folder {
                return Ok(Some(path));
            }
            for entry in fs::read_dir(&path)? {
                let inside = entry?.path();
                if inside != self.new_settings() || !is_left(&inside, begins_settings) {
                    return Ok(Some(inside));
                }
            }
        }
        Ok(None)
    }
}

/// Whether a file exists and its content can come from a creation.
fn is_left(path: &Path, is_ours: fn(&[u8]) -> bool) -> bool {
    path.is_file() && read_small(path, UNFINISHED_MAX_BYTES).is_ok_and(|bytes| is_ours(&bytes))
}

/// A process id, or nothing yet.
fn is_lock(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| byte.is_ascii_digit() || *byte == b'\n')
}

/// The settings, or a beginning of them.
fn begins_settings(bytes: &[u8]) -> bool {
    bytes.iter().zip(MAGIC).all(|(there, ours)| *there == ours)
}

/// The bytes of the file `store` of a store with this chunk size.
pub fn settings_bytes(chunk_bytes: u32) -> Result<Vec<u8>, StoreError> {
    if chunk_bytes.is_power_of_two() && (CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&chunk_bytes) {
        return Ok(encode_settings(chunk_bytes, FORMAT));
    }
    Err(StoreError::new(
        StoreErrorKind::Invalid,
        format!(
            "{chunk_bytes} bytes is not a chunk size: it must be a power of two from {CHUNK_BYTES_MIN} to \
             {CHUNK_BYTES_MAX}"
        ),
    ))
}

/// As [`settings_bytes`] for a store with holes, which a release that does not know holes refuses.
pub fn settings_bytes_with_holes(chunk_bytes: u32) -> Result<Vec<u8>, StoreError> {
    settings_bytes(chunk_bytes)?;
    Ok(encode_settings(chunk_bytes, FORMAT_WITH_HOLES))
}

fn encode_settings(chunk_bytes: u32, format: u32) -> Vec<u8> {
    let mut out = Vec::with_capacity(SETTINGS_BYTES);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&format.to_le_bytes());
    out.extend_from_slice(&chunk_bytes.to_le_bytes());
    out.extend_from_slice(&[0; 16]);
    let sum = Hash::of(&out);
    out.extend_from_slice(&sum.0);
    out
}

/// The chunk size of a store, from the bytes of its file `store`. `place` says where the bytes were read
/// from.
pub fn chunk_bytes_of(place: &str, bytes: &[u8]) -> Result<u32, StoreError> {
    let damaged = |why: &str| {
        StoreError::new(StoreErrorKind::Damaged, format!("the file 'store' in {place} is damaged: {why}"))
    };
    let Some((magic, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(damaged("it is incomplete"));
    };
    let Some((format, rest)) = rest.split_first_chunk::<4>() else {
        return Err(damaged("it is incomplete"));
    };
    if *magic != MAGIC {
        return Err(damaged("its first bytes are wrong"));
    }
    let format = u32::from_le_bytes(*format);
    if ![FORMAT, FORMAT_WITH_HOLES].contains(&format) {
        return Err(StoreError::new(
            StoreErrorKind::UnknownFormat,
            format!(
                "the store {place} has format {format}; this release reads formats {FORMAT} and {FORMAT_WITH_HOLES}: use \
                 the release that made it, or a later one"
            ),
        ));
    }
    let Some((chunk_bytes, _)) = rest.split_first_chunk::<4>() else {
        return Err(damaged("it is incomplete"));
    };
    let chunk_bytes = u32::from_le_bytes(*chunk_bytes);
    // One comparison checks everything that is fixed: length, reserved bytes and checksum.
    if bytes != encode_settings(chunk_bytes, format) {
        return Err(damaged("its checksum does not match"));
    }
    if !chunk_bytes.is_power_of_two() || !(CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&chunk_bytes) {
        return Err(damaged("it has an invalid chunk size"));
    }
    Ok(chunk_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes() {
        for (format, number) in [(FORMAT, 1), (FORMAT_WITH_HOLES, 2)] {
            let bytes = encode_settings(65_536, format);
            assert_eq!(bytes.len(), SETTINGS_BYTES);
            assert_eq!((&bytes[..8], bytes[8]), (&b"HWSTORE\n"[..], number));
            assert_eq!(bytes[9..16], *b"\0\0\0\0\0\x01\0");
            assert_eq!(bytes[16..32], [0; 16]);
            assert_eq!(Hash(bytes[32..].try_into().unwrap()), Hash::of(&bytes[..32]));
            assert_eq!(chunk_bytes_of("x", &bytes).unwrap(), 65_536);
        }
        let later = chunk_bytes_of("x", &encode_settings(65_536, 3)).unwrap_err();
        assert_eq!(later.kind(), StoreErrorKind::UnknownFormat);
    }

    #[test]
    fn any_changed_byte_is_noticed() {
        for at in 0..SETTINGS_BYTES {
            let mut bytes = encode_settings(65_536, FORMAT);
            bytes[at] ^= 1;
            assert!(chunk_bytes_of("x", &bytes).is_err(), "byte {at}");
        }
    }
}
