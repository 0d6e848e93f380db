//! What `headwater export --persistent` needs beside the cache: the key's file, and the identity of the base.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use headwater_store::Hash;
use headwater_volume::PersistentOptions;

use crate::data_dir::DataDir;
use crate::failure::invalid;
use crate::keys;

/// Puts the options together: reads the key, or makes one for a new cache.
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

/// `keys/NAME` in the data directory.
fn default_key_file(data_dir: &DataDir, name: &str) -> anyhow::Result<PathBuf> {
    let keys = data_dir.keys();
    keys::make_directory(&keys).with_context(|| {
        format!("cannot make {} (give the file of the key with --key-file)", keys.display())
    })?;
    if name.contains('/') {
        return Err(invalid(format!("'{name}' is no name for a persistent cache: it has a '/'")));
    }
    Ok(keys.join(name))
}

/// Identity of an empty disk.
pub fn null_id(size_bytes: u64) -> [u8; 32] {
    Hash::of(format!("headwater base: null {size_bytes}").as_bytes()).0
}

/// Identity of a disk in a file: a file that was replaced or written to is another base.
pub fn file_id(path: &Path, size_bytes: u64) -> anyhow::Result<[u8; 32]> {
    let failed = || format!("cannot identify {}", path.display());
    let whole = path.canonicalize().with_context(failed)?;
    let metadata = whole.metadata().with_context(failed)?;
    let mut text = format!(
        "headwater base: file {size_bytes} {} {}.{:09} ",
        metadata.len(),
        metadata.mtime(),
        metadata.mtime_nsec()
    )
    .into_bytes();
    text.extend(whole.as_os_str().as_encoded_bytes());
    Ok(Hash::of(&text).0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_changes_is_another_base() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("disk");
        std::fs::write(&file, b"one").unwrap();
        let first = file_id(&file, 512).unwrap();
        assert_eq!(file_id(&dir.path().join(".").join("disk"), 512).unwrap(), first);
        assert_ne!(file_id(&file, 1024).unwrap(), first);
        std::fs::write(&file, b"other").unwrap();
        assert_ne!(file_id(&file, 512).unwrap(), first);
        assert_ne!(null_id(512), null_id(1024));
    }
}
