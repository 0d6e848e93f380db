//! Images in files, and what changes between two states of one.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use headwater_attribution::{Changed, Contents, Place, scan};
use headwater_block::IoError;
use headwater_filesystems::{Fault, ReadAt};
use headwater_testkit::{output, wait_until};

pub(crate) const BLOCK: usize = 4096;

/// A file as a disk.
pub(crate) struct Disk(File, u64);

impl Disk {
    pub(crate) fn open(path: &Path) -> Arc<dyn ReadAt> {
        let file = File::open(path).unwrap();
        let len_bytes = file.metadata().unwrap().len();
        Arc::new(Self(file, len_bytes))
    }
}

impl ReadAt for Disk {
    fn len_bytes(&self) -> u64 {
        self.1
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<(), IoError> {
        self.0.read_exact_at(into, at).map_err(|e| IoError::from_os("reading the image", e))
    }
}

pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).env("MKE2FS_SKIP_PROGRESS", "1").output();
    let output = output.unwrap_or_else(|e| {
        panic!("{program} is needed (apt-get install e2fsprogs dosfstools mtools fdisk): {e}")
    });
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {text}{errors}");
    text
}

/// A file that is mounted until this is dropped.
pub(crate) struct Mount(pub(crate) PathBuf);

impl Mount {
    pub(crate) fn new(image: &Path, options: &str) -> Self {
        let at = image.with_extension("mounted");
        std::fs::create_dir_all(&at).unwrap();
        run("mount", &["-t", "ext4", "-o", options, image.to_str().unwrap(), at.to_str().unwrap()]);
        Self(at)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let umount = || output("mount", Command::new("umount").arg(&self.0)).status.success();
        if std::thread::panicking() {
            umount();
        } else {
            // Between its fork and its program, a child of another test has our files open.
            wait_until("it is not busy", umount);
        }
    }
}

/// Writes what is cached.
pub(crate) fn sync(at: &Path) {
    rustix::fs::syncfs(File::open(at).unwrap()).unwrap();
}

/// The places of blocks, by their numbers.
pub(crate) fn place_of(block: u32) -> Place {
    match block / 64 % 3 {
        0 => Place::Ram,
        1 => Place::Packed,
        _ => Place::Disk,
    }
}

/// The blocks in which two images differ.
pub(crate) fn changed_blocks(before: &Path, after: &Path) -> Vec<u32> {
    let (before, after) = (std::fs::read(before).unwrap(), std::fs::read(after).unwrap());
    let pairs = before.chunks(BLOCK).zip(after.chunks(BLOCK)).enumerate();
    pairs.filter(|(_, (before, after))| before != after).map(|(block, _)| block as u32).collect()
}

pub(crate) fn changed(blocks: &[u32]) -> Changed {
    let mut changed = Changed::default();
    blocks.iter().for_each(|block| changed.add(*block, 1, place_of(*block)).unwrap());
    changed
}

pub(crate) fn scanned(image: &Path, changed: &Changed) -> Result<Contents, Fault> {
    let is_cancelled: Arc<dyn Fn() -> bool + Send + Sync> = Arc::new(|| false);
    scan(&Disk::open(image), 512, changed, &is_cancelled)
}
