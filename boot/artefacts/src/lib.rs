//! Extracts kernel and initramfs from a version of an image, so that a rollback of the version also rolls back its
//! kernel.
//!
//! ```text
//!   version --/boot/headwater/{vmlinuz, initrd, options}--> DIR/HASH/{vmlinuz, initrd, about} --> boot server
//! ```
//! The package `headwater-boot` puts these files into an image, with `boot/initramfs/build`.
//!
//! # Guarantees
//! - Files of a version are stored under the hash of its manifest, either all of them or none.
//! - The partition with the root file system is found here, once, by the files on it: the machine searches for no
//!   label and no UUID.
//!
//! # Limits
//! [`KERNEL_BYTES_MAX`], [`INITRD_BYTES_MAX`], [`OPTIONS_BYTES_MAX`]; the files of [`VERSIONS_MAX`] versions are
//! kept, those that were extracted last. A version whose files were removed is extracted again when it is needed.
//!
//! # Errors
//! [`ArtefactError`] says what a version lacks; of a version that is not prepared for network boot, also what to do.
//!
//! # Not here
//! Which machine boots which version, HTTP, the agent in the initramfs.

#![cfg_attr(
    not(test),
    warn(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::todo,
        clippy::unimplemented,
        clippy::indexing_slicing,
        clippy::string_slice,
        clippy::get_unwrap,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss
    )
)]

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use headwater_block::Device;
use headwater_image::{ImageError, partitions_with, read_file};

/// The largest kernel.
pub const KERNEL_BYTES_MAX: u64 = 64 << 20;
/// The largest initramfs.
pub const INITRD_BYTES_MAX: u64 = 128 << 20;
/// The longest kernel command line.
pub const OPTIONS_BYTES_MAX: u64 = 4096;
/// The most versions whose files are kept.
pub const VERSIONS_MAX: usize = 8;

/// The directory in the image's file system; the second path applies if `/boot` is a partition of its own.
const DIRECTORIES: [&str; 2] = ["boot/headwater", "headwater"];
const KERNEL: &str = "vmlinuz";
const INITRD: &str = "initrd";
const OPTIONS: &str = "options";
/// File with the root partition's number and the kernel command line of an extracted version.
const ABOUT: &str = "about";
/// A file that every current Linux system has in its root file system.
const ROOT_MARK: &str = "usr/lib/os-release";

/// Why a version cannot boot from the network.
#[derive(Debug, thiserror::Error)]
pub enum ArtefactError {
    /// The version was not prepared for network boot.
    #[error(
        "the version is not prepared for network boot: no ext4 partition has /boot/headwater/{0}; install the package \
         headwater-boot in a maintenance session of the image, and seal it"
    )]
    Missing(&'static str),
    /// The version has no partition with a root file system, or several.
    #[error("the version has {0} partitions with an ext4 root file system; one is needed")]
    Roots(usize),
    /// The kernel command line is not UTF-8, or has several lines.
    #[error("/boot/headwater/options of the version is not text of one line")]
    Options,
    /// The version cannot be read.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The extracted files cannot be stored.
    #[error("cannot store the kernel of the version in {path}")]
    Keep {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// The files and parameters with which a version boots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artefacts {
    /// The kernel's file.
    pub kernel: PathBuf,
    /// The path of the initramfs.
    pub initrd: PathBuf,
    /// The kernel command line, of the image.
    pub options: String,
    /// The partition with the root file system; 0 is the whole disk.
    pub root_partition: u32,
}

/// Stored files of versions: a subdirectory for each version, named by the hash of its manifest.
#[derive(Debug)]
pub struct Kept {
    dir: PathBuf,
}

impl Kept {
    /// Uses this directory, which is created when the first version is stored.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// The stored files of a version, or `None`. `hash` is that of its manifest, in hexadecimal digits.
    pub fn find(&self, hash: &str) -> Option<Artefacts> {
        let dir = self.dir_of(hash)?;
        let about = fs::read_to_string(dir.join(ABOUT)).ok()?;
        let (root, options) = about.split_once('\n')?;
        Some(Artefacts {
            kernel: dir.join(KERNEL),
            initrd: dir.join(INITRD),
            options: options.trim().to_owned(),
            root_partition: root.parse().ok()?,
        })
    }

    /// The stored files of a version; extracts them first if they are not stored yet. Extracting reads the version,
    /// which can take seconds.
    pub fn take(&self, hash: &str, version: &Arc<dyn Device>) -> Result<Artefacts, ArtefactError> {
        if let Some(found) = self.find(hash) {
            return Ok(found);
        }
        let (partition, directory) = place(version)?;
        let file = |name: &'static str, most_bytes| {
            read_file(version, partition, &format!("{directory}/{name}"), most_bytes)
        };
        let kernel = file(KERNEL, KERNEL_BYTES_MAX)?.ok_or(ArtefactError::Missing(KERNEL))?;
        let initrd = file(INITRD, INITRD_BYTES_MAX)?.ok_or(ArtefactError::Missing(INITRD))?;
        let options = file(OPTIONS, OPTIONS_BYTES_MAX)?.unwrap_or_default();
        let options = String::from_utf8(options).map_err(|_| ArtefactError::Options)?;
        let options = options.trim();
        if options.contains('\n') {
            return Err(ArtefactError::Options);
        }
        let roots = partitions_with(version, ROOT_MARK)?;
        let [root] = roots.as_slice() else { return Err(ArtefactError::Roots(roots.len())) };
        let about = format!("{root}\n{options}\n");
        self.store(hash, &[(KERNEL, &kernel), (INITRD, &initrd), (ABOUT, about.as_bytes())])
            .map_err(|source| ArtefactError::Keep { path: self.dir.clone(), source })?;
        self.find(hash).ok_or_else(|| ArtefactError::Keep {
            path: self.dir.clone(),
            source: std::io::Error::new(ErrorKind::NotFound, "the files are missing after they were written"),
        })
    }

    /// The directory of a version, or `None` if this is not a hash.
    fn dir_of(&self, hash: &str) -> Option<PathBuf> {
        let is_hash = hash.len() == 64 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_hash.then(|| self.dir.join(hash))
    }

    /// Writes to a temporary directory and renames it, so that all files of a version appear at once.
    fn store(&self, hash: &str, files: &[(&str, &[u8])]) -> std::io::Result<()> {
        let wrong = || {
            std::io::Error::new(
                ErrorKind::InvalidInput,
                "the hash of the version is not 64 hexadecimal digits",
            )
        };
        let dir = self.dir_of(hash).ok_or_else(wrong)?;
        fs::create_dir_all(&self.dir)?;
        self.remove_oldest();
        let new = self.dir.join(format!("{hash}.new"));
        match fs::remove_dir_all(&new) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
            _ => fs::create_dir(&new)?,
        }
        for (name, bytes) in files {
            let mut file = fs::File::create_new(new.join(name))?;
            file.write_all(bytes)?;
            file.sync_all()?;
        }
        fs::rename(&new, &dir)
    }

    /// Makes space for one more version: removes those that were extracted first.
    fn remove_oldest(&self) {
        let Ok(entries) = fs::read_dir(&self.dir) else { return };
        let mut kept: Vec<_> = entries
            .flatten()
            .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
            .collect();
        kept.sort();
        let over = (kept.len() + 1).saturating_sub(VERSIONS_MAX);
        for (_, path) in kept.iter().take(over) {
            if let Err(error) = fs::remove_dir_all(path) {
                tracing::warn!(path = %path.display(), %error, "cannot remove the kernel of the version that was extracted first");
            }
        }
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

/// The partition and directory that contain a version's kernel.
fn place(version: &Arc<dyn Device>) -> Result<(u32, &'static str), ArtefactError> {
    for directory in DIRECTORIES {
        if let Some(partition) = partitions_with(version, &format!("{directory}/{KERNEL}"))?.first() {
            return Ok((*partition, directory));
        }
    }
    Err(ArtefactError::Missing(KERNEL))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use headwater_image::open_source;

    use super::*;

    const HASH: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    /// A disk that is one ext4 file system with these files.
    fn disk(dir: &Path, files: &[(&str, &str)]) -> Arc<dyn Device> {
        let tree = dir.join("tree");
        let _ = fs::remove_dir_all(&tree);
        fs::create_dir_all(&tree).unwrap();
        for (name, text) in files {
            fs::create_dir_all(tree.join(name).parent().unwrap()).unwrap();
            fs::write(tree.join(name), text).unwrap();
        }
        let image = dir.join("fs.raw");
        let _ = fs::remove_file(&image);
        let made = Command::new("mke2fs")
            .args(["-q", "-t", "ext4", "-d"])
            .arg(&tree)
            .arg(&image)
            .arg("16M")
            .status();
        assert!(made.expect("mke2fs is installed (Debian package e2fsprogs)").success());
        open_source(&image, None).unwrap()
    }

    const PREPARED: [(&str, &str); 4] = [
        ("boot/headwater/vmlinuz", "a kernel"),
        ("boot/headwater/initrd", "an initramfs"),
        ("boot/headwater/options", "console=ttyS0 quiet\n"),
        ("usr/lib/os-release", "ID=debian"),
    ];

    #[test]
    fn kernel_and_initramfs_are_taken_out_once_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let kept = Kept::new(dir.path().join("kept"));
        let version = disk(dir.path(), &PREPARED);
        assert_eq!(kept.find(HASH), None);
        let taken = kept.take(HASH, &version).unwrap();
        assert_eq!((taken.options.as_str(), taken.root_partition), ("console=ttyS0 quiet", 0));
        assert_eq!(fs::read_to_string(&taken.kernel).unwrap(), "a kernel");
        assert_eq!(fs::read_to_string(&taken.initrd).unwrap(), "an initramfs");
        // Another disk is not looked at for the same version.
        assert_eq!(kept.take(HASH, &disk(dir.path(), &[])).unwrap(), taken);
        assert_eq!(kept.find("../kept"), None);
    }

    #[test]
    fn a_version_that_was_not_prepared_is_refused_with_what_it_lacks() {
        let dir = tempfile::tempdir().unwrap();
        let kept = Kept::new(dir.path().join("kept"));
        for (without, why) in [
            ("boot/headwater/vmlinuz", "no ext4 partition has /boot/headwater/vmlinuz"),
            ("boot/headwater/initrd", "no ext4 partition has /boot/headwater/initrd"),
            ("usr/lib/os-release", "has 0 partitions with an ext4 root file system"),
        ] {
            let files: Vec<_> = PREPARED.into_iter().filter(|(name, _)| *name != without).collect();
            let refused = kept.take(HASH, &disk(dir.path(), &files)).unwrap_err().to_string();
            assert!(refused.contains(why), "{refused}");
            assert_eq!(kept.find(HASH), None);
        }
        let mut files = PREPARED.to_vec();
        files[2].1 = "quiet\nroot=/dev/sda1";
        let refused = kept.take(HASH, &disk(dir.path(), &files)).unwrap_err();
        assert!(matches!(refused, ArtefactError::Options), "{refused}");
    }

    #[test]
    fn versions_that_were_extracted_first_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let kept = Kept::new(dir.path().join("kept"));
        let version = disk(dir.path(), &PREPARED);
        for number in 0..VERSIONS_MAX + 3 {
            let hash = format!("{number:064x}");
            kept.take(&hash, &version).unwrap();
            assert!(kept.find(&hash).is_some());
        }
        assert_eq!(fs::read_dir(kept.dir()).unwrap().count(), VERSIONS_MAX);
    }
}
