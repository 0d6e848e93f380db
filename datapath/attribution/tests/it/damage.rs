//! Damaged file systems: all changed bytes are counted once whatever the disk says, and scans end.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use headwater_attribution::{Changed, Class, Place, scan};
use headwater_filesystems::ReadAt;
use headwater_testkit::Rng;

use crate::image::{BLOCK, Mount, run, scanned, sync};

/// A small file system with files of some kinds.
fn filled(dir: &Path, options: &[&str]) -> Vec<u8> {
    let image = dir.join("image");
    let path = image.to_str().unwrap();
    run("mke2fs", &[&["-q", "-F", "-t", "ext4", "-N", "256"], options, &[path, "12M"]].concat());
    {
        let mount = Mount::new(&image, "loop");
        for number in 0..60 {
            let directory = mount.0.join(format!("directory {}", number % 7));
            std::fs::create_dir_all(&directory).unwrap();
            std::fs::write(directory.join(format!("{number}")), vec![1; number * 500]).unwrap();
        }
        sync(&mount.0);
    }
    std::fs::read(&image).unwrap()
}

fn all(blocks: usize) -> Changed {
    let mut changed = Changed::default();
    changed.add(0, blocks as u32, Place::Ram).unwrap();
    changed
}

fn of_memory(bytes: Vec<u8>, changed: &Changed) -> headwater_attribution::Contents {
    let disk: Arc<dyn ReadAt> = Arc::new(bytes);
    let never: Arc<dyn Fn() -> bool + Send + Sync> = Arc::new(|| false);
    scan(&disk, 512, changed, &never).unwrap()
}

#[test]
fn damaged_metadata_is_counted_once_and_ends() {
    let dir = tempfile::tempdir().unwrap();
    let mut rng = Rng::new(1);
    for options in [&[][..], &["-b", "1024"], &["-O", "^extent,^64bit"]] {
        let whole = filled(dir.path(), options);
        let changed = all(whole.len() / BLOCK);
        let sound = of_memory(whole.clone(), &changed);
        assert!(!sound.classes.contains_key(&Class::Unknown), "{:?}", sound.partitions);
        // Not zero: metadata is where something is written.
        let written: Vec<usize> =
            (1024..whole.len()).filter(|at| whole[*at] != 0 && whole[*at] != 1).collect();
        let mut differed = 0;
        for _ in 0..120 {
            let mut damaged = whole.clone();
            for _ in 0..1 + rng.below(30) {
                damaged[written[rng.below(written.len() as u64) as usize]] = rng.below(256) as u8;
            }
            let found = of_memory(damaged, &changed);
            assert_eq!(found.held.total_bytes(), whole.len() as u64);
            differed += usize::from(found.classes != sound.classes);
        }
        assert!(differed > 10, "only {differed} of 120 were damaged in what counts");
    }
}

#[test]
fn blocks_of_a_file_system_that_cannot_be_opened_are_unknown() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = filled(dir.path(), &[]);
    // A feature that nobody knows.
    bytes[1024 + 0x63] |= 0x80;
    let found = of_memory(bytes.clone(), &all(bytes.len() / BLOCK));
    assert_eq!(found.classes.keys().collect::<Vec<_>>(), [&Class::Unknown]);
    assert!(found.partitions[0].remarks[0].contains("headwater cannot read"), "{:?}", found.partitions);
}

#[test]
fn a_table_of_inodes_that_cannot_be_read_leaves_nothing_free() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = filled(dir.path(), &["-O", "^has_journal"]);
    let shown = run("dumpe2fs", &[dir.path().join("image").to_str().unwrap()]);
    let line = shown.lines().find_map(|line| line.strip_prefix("  Inode table at ")).unwrap();
    let table: u64 = line.split('-').next().unwrap().parse().unwrap();
    struct Failing(Vec<u8>, std::ops::Range<u64>);
    impl ReadAt for Failing {
        fn len_bytes(&self) -> u64 {
            self.0.len() as u64
        }
        fn read_at(&self, at: u64, into: &mut [u8]) -> Result<(), headwater_block::IoError> {
            if at < self.1.end && at + into.len() as u64 > self.1.start {
                let kind = headwater_block::IoErrorKind::Corrupt;
                return Err(headwater_block::IoError::new(kind, "damaged"));
            }
            self.0.read_at(at, into)
        }
    }
    let block_bytes = 1024;
    let place = table * block_bytes..table * block_bytes + 4096;
    let changed = all(bytes.len() / BLOCK);
    let disk: Arc<dyn ReadAt> = Arc::new(Failing(bytes, place));
    let never: Arc<dyn Fn() -> bool + Send + Sync> = Arc::new(|| false);
    let found = scan(&disk, 512, &changed, &never).unwrap();
    assert!(!found.classes.contains_key(&Class::Free), "{:?}", found.classes);
    assert!(found.classes.contains_key(&Class::Unknown));
    assert!(!found.partitions[0].remarks.is_empty());
}

#[test]
fn a_scan_that_nobody_wants_any_more_ends() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = filled(dir.path(), &[]);
    let changed = all(bytes.len() / BLOCK);
    assert!(scanned(&dir.path().join("image"), &changed).is_ok());
    let cancelled = Arc::new(AtomicBool::new(true));
    let is_cancelled: Arc<dyn Fn() -> bool + Send + Sync> =
        Arc::new(move || cancelled.load(Ordering::SeqCst));
    let disk: Arc<dyn ReadAt> = Arc::new(bytes);
    assert!(scan(&disk, 512, &changed, &is_cancelled).unwrap_err().to_string().contains("cancelled"));
}
