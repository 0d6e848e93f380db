//! The keys of persistent write caches. Each is in a file that only its owner can read, and never in the cache's
//! directory.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use anyhow::Context;

use crate::failure::invalid;

/// More than the size of a key file.
const KEY_FILE_MAX_BYTES: usize = 256;

/// Creates the directory of keys if it is missing.
pub fn make_directory(keys: &Path) -> std::io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(keys)
}

/// Reads the key; creates one if neither the file nor the cache exists.
pub fn key(file: &Path, cache_dir: &Path, exists: bool) -> anyhow::Result<[u8; 16]> {
    let parent = match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let within = |dir: &Path| Some(parent.canonicalize().ok()?.starts_with(dir.canonicalize().ok()?));
    if within(cache_dir) == Some(true) {
        return Err(invalid(format!(
            "{} is in the cache's own directory, where everybody who can read the cache can read it too: choose another \
             place with --key-file",
            file.display()
        )));
    }
    match File::open(file) {
        Ok(opened) => read_key(opened, file),
        Err(error) if error.kind() == ErrorKind::NotFound && !exists => new_key(file, parent),
        Err(error) if error.kind() == ErrorKind::NotFound => Err(error).with_context(|| {
            format!(
                "the cache exists, but {} does not (name the file of its key with --key-file)",
                file.display()
            )
        }),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", file.display())),
    }
}

fn read_key(mut opened: File, file: &Path) -> anyhow::Result<[u8; 16]> {
    let mode = opened.metadata().with_context(|| format!("cannot read {}", file.display()))?.mode();
    anyhow::ensure!(
        mode & 0o077 == 0,
        "{} can be read by other users (mode {:o}): run 'chmod 600' on it",
        file.display(),
        mode & 0o777
    );
    // A fixed buffer: one that grows would leave copies of the key in memory.
    let mut text = [0; KEY_FILE_MAX_BYTES];
    let read = read_up_to(&mut opened, &mut text).with_context(|| format!("cannot read {}", file.display()));
    let key = read.map(|len| {
        let digits = std::str::from_utf8(text.get(..len)?).ok()?;
        parse(digits.trim())
    });
    wipe(&mut text);
    key?.with_context(|| format!("{} does not contain 32 hexadecimal digits", file.display()))
}

fn read_up_to(from: &mut File, into: &mut [u8]) -> std::io::Result<usize> {
    let mut len = 0;
    while let Some(rest) = into.get_mut(len..).filter(|rest| !rest.is_empty()) {
        match from.read(rest) {
            Ok(0) => break,
            Ok(more) => len += more,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(len)
}

/// Overwrites a buffer in a way that the compiler does not remove.
fn wipe(bytes: &mut [u8]) {
    bytes.fill(0);
    std::hint::black_box(&bytes);
}

fn parse(text: &str) -> Option<[u8; 16]> {
    if text.len() != 32 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    Some(u128::from_str_radix(text, 16).ok()?.to_be_bytes())
}

fn new_key(file: &Path, parent: &Path) -> anyhow::Result<[u8; 16]> {
    let failed = || format!("cannot make {}", file.display());
    let mut key = [0; 16];
    File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut key)).with_context(failed)?;
    let mut made =
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(file).with_context(failed)?;
    let mut text = format!("{:032x}\n", u128::from_be_bytes(key)).into_bytes();
    // Durable before anything is encrypted with it.
    let done = made
        .set_permissions(Permissions::from_mode(0o600))
        .and_then(|()| made.write_all(&text))
        .and_then(|()| made.sync_all())
        .and_then(|()| File::open(parent)?.sync_all());
    wipe(&mut text);
    done.with_context(failed)?;
    Ok(key)
}

/// Destroys a key as far as the disk permits: its file is overwritten before it is removed.
pub fn destroy(file: &Path) -> std::io::Result<()> {
    let gone = |e: std::io::Error| if e.kind() == ErrorKind::NotFound { Ok(()) } else { Err(e) };
    // If it cannot be overwritten (for instance on a full copy-on-write file system), it is removed anyway.
    if let Err(error) = overwrite(file).or_else(gone) {
        tracing::warn!("removing {} without overwriting it: {error}", file.display());
    }
    std::fs::remove_file(file).or_else(gone)?;
    match file.parent() {
        Some(parent) => File::open(parent).and_then(|dir| dir.sync_all()).or_else(gone),
        None => Ok(()),
    }
}

fn overwrite(file: &Path) -> std::io::Result<()> {
    let no_follow = i32::try_from(rustix::fs::OFlags::NOFOLLOW.bits()).unwrap_or(0);
    let mut opened = OpenOptions::new().write(true).custom_flags(no_follow).open(file)?;
    let len = usize::try_from(opened.metadata()?.len()).unwrap_or(KEY_FILE_MAX_BYTES);
    opened.write_all(&vec![0; len.min(KEY_FILE_MAX_BYTES)])?;
    opened.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_made_once_and_kept_from_others() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, keys) = (dir.path().join("cache"), dir.path().join("keys"));
        std::fs::create_dir(&cache).unwrap();
        std::fs::create_dir(&keys).unwrap();
        let file = keys.join("k");
        let made = key(&file, &cache, false).unwrap();
        assert_ne!(made, [0; 16]);
        assert_eq!(key(&file, &cache, true).unwrap(), made);
        assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o600);
        std::fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        assert!(key(&file, &cache, true).unwrap_err().to_string().contains("chmod"));
        // A cache whose key is lost gets no new key, which could not open it.
        assert!(key(&keys.join("lost"), &cache, true).is_err());
        assert!(!keys.join("lost").exists());
        assert!(key(&cache.join("k"), &cache, false).unwrap_err().to_string().contains("own directory"));
        // A destroyed key is overwritten: a second link to the file shows that.
        let other_name = keys.join("other");
        std::fs::hard_link(&file, &other_name).unwrap();
        destroy(&file).unwrap();
        destroy(&file).unwrap();
        assert!(!file.exists());
        assert_eq!(std::fs::read(&other_name).unwrap(), [0; 33]);
        std::fs::write(&file, "secret").unwrap();
        std::fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        assert!(key(&file, &cache, true).unwrap_err().to_string().contains("32 hexadecimal"));
    }
}
