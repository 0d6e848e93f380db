//! Disks with sectors of 4,096 bytes, made by sfdisk on a loop device with such sectors, mke2fs and debugfs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use crate::fixture::{disk_of, read_all, store};
use headwater_block::Device;
use headwater_image::{
    Basis, Cancel, ChunkCache, FileChange, ImportOptions, VersionReader, diff, import, open_file, open_source,
};
use headwater_store::{Hash, LocalDir};
use headwater_testkit::{output, run, succeed};

const PARTITION_AT: usize = 1 << 20;
const PARTITION_BYTES: usize = 16 << 20;

/// A loop device with sectors of 4,096 bytes, detached when dropped.
struct Loop(PathBuf);

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = output("mount", Command::new("losetup").arg("--detach").arg(&self.0));
    }
}

/// Only root may create its loop devices.
fn attach(disk: &Path) -> Loop {
    let mut command = Command::new("losetup");
    command.args(["--find", "--show", "--sector-size", "4096"]).arg(disk);
    Loop(succeed("mount", &mut command).trim().into())
}

fn partition(disk: &Path, label: &str) {
    let device = attach(disk);
    let script = disk.with_extension("sfdisk");
    fs::write(&script, format!("label: {label}\nstart=256, size=4096, type=L\n")).unwrap();
    let mut command = Command::new("sfdisk");
    command.args(["--quiet", "--no-reread", "--no-tell-kernel"]).arg(&device.0);
    command.stdin(fs::File::open(script).unwrap());
    succeed("fdisk", &mut command);
}

/// A disk with one partition, and in it an ext4 file system.
fn disk(dir: &Path, label: &str) -> PathBuf {
    let (path, file_system, tree) = (dir.join("disk.raw"), dir.join("fs.img"), dir.join("tree"));
    fs::create_dir_all(&tree).unwrap();
    fs::write(tree.join("motd"), "hello").unwrap();
    let (tree, image) = (tree.to_str().unwrap(), file_system.to_str().unwrap());
    run("e2fsprogs", "mke2fs", &["-q", "-F", "-t", "ext4", "-b", "4096", "-d", tree, image, "16M"]);
    fs::write(&path, vec![0; 32 << 20]).unwrap();
    partition(&path, label);
    put(&path, &file_system);
    path
}

fn put(disk: &Path, file_system: &Path) {
    let mut bytes = fs::read(disk).unwrap();
    bytes[PARTITION_AT..PARTITION_AT + PARTITION_BYTES].copy_from_slice(&fs::read(file_system).unwrap());
    fs::write(disk, bytes).unwrap();
}

fn add(store: &LocalDir, path: &Path) -> Hash {
    let options = ImportOptions::new("disk".parse().unwrap(), 0);
    import(open_source(path, None).unwrap(), store, &options, &mut |_| {}).unwrap().version.manifest
}

#[test]
fn a_version_keeps_the_sectors_of_its_disk_and_is_compared() {
    let dir = tempfile::tempdir().unwrap();
    let path = disk(dir.path(), "gpt");
    assert_eq!(open_file(&path).unwrap().geometry().logical_block_bytes, 4096);
    let (_kept, store) = store();
    let first = add(&store, &path);
    let version = VersionReader::open(&store, first, ChunkCache::new(64 << 20)).unwrap();
    assert_eq!(version.geometry().logical_block_bytes, 4096);
    assert!(read_all(version.as_ref()) == fs::read(&path).unwrap());

    let image = dir.path().join("fs.img");
    fs::write(dir.path().join("new"), "new").unwrap();
    let write = format!("write {} added", dir.path().join("new").display());
    run("e2fsprogs", "debugfs", &["-w", "-R", &write, image.to_str().unwrap()]);
    put(&path, &image);
    let second = add(&store, &path);
    let found = diff(&store, first, second, &Cancel::new(), &mut |_| {}).unwrap();
    let partition = found.partitions.iter().find(|partition| partition.number == 1).unwrap();
    assert_eq!(partition.offset_bytes, PARTITION_AT as u64);
    let files = partition.files.as_ref().expect("the file system is read");
    assert!(files.iter().any(|file| file.path == "/added" && file.change == FileChange::Added), "{files:?}");
}

fn sectors_of(path: &Path, given: Option<u32>) -> Result<u32, headwater_image::ImageError> {
    let (_kept, store) = store();
    let options = ImportOptions { sector_bytes: given, ..ImportOptions::new("disk".parse().unwrap(), 0) };
    let imported = import(open_source(path, None).unwrap(), &store, &options, &mut |_| {})?;
    let version = VersionReader::open(&store, imported.version.manifest, ChunkCache::new(64 << 20)).unwrap();
    Ok(version.geometry().logical_block_bytes)
}

#[test]
fn partitions_of_an_mbr_show_the_sector_size() {
    let dir = tempfile::tempdir().unwrap();
    let large = disk(dir.path(), "dos");
    assert_eq!(sectors_of(&large, None).unwrap(), 4096);
    assert_eq!(sectors_of(&large, Some(512)).unwrap(), 512);
    // A disk with sectors of 512 bytes, copied to a device with larger ones.
    let mut bytes = fs::read(&large).unwrap();
    let table = [0, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 128, 0, 0];
    bytes[446..462].copy_from_slice(&table);
    let small = dir.path().join("small.raw");
    fs::write(&small, bytes).unwrap();
    let device = attach(&small);
    assert_eq!(open_file(&device.0).unwrap().geometry().logical_block_bytes, 4096);
    assert_eq!(sectors_of(&device.0, None).unwrap(), 512);
}

#[test]
fn the_sector_size_can_be_given_at_the_import() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.raw");
    fs::write(&path, vec![7; 1 << 20]).unwrap();
    assert_eq!((sectors_of(&path, None).unwrap(), sectors_of(&path, Some(4096)).unwrap()), (512, 4096));
    fs::write(&path, vec![7; (1 << 20) + 512]).unwrap();
    for (given, why) in [(4096, "not a multiple"), (2048, "512 or 4096")] {
        let refused = sectors_of(&path, Some(given)).unwrap_err();
        assert_eq!(refused.kind(), headwater_image::ImageErrorKind::Invalid);
        assert!(refused.to_string().contains(why), "{refused}");
    }
}

#[test]
fn a_disk_with_sectors_of_512_keeps_these() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.raw");
    fs::write(&path, vec![0; 32 << 20]).unwrap();
    let script = dir.path().join("script");
    fs::write(&script, "label: gpt\nstart=2048, size=8192, type=L\n").unwrap();
    let mut command = Command::new("sfdisk");
    command.arg("--quiet").arg(&path).stdin(fs::File::open(script).unwrap());
    succeed("fdisk", &mut command);
    let (_kept, store) = store();
    let version = VersionReader::open(&store, add(&store, &path), ChunkCache::new(64 << 20)).unwrap();
    assert_eq!(version.geometry().logical_block_bytes, 512);
}

#[test]
fn a_sealed_disk_keeps_the_sectors_of_its_version() {
    let dir = tempfile::tempdir().unwrap();
    let path = disk(dir.path(), "gpt");
    let (_kept, store) = store();
    let parent = add(&store, &path);
    // The guest removes its partition table, which alone shows the sector size on the disk.
    let mut bytes = fs::read(&path).unwrap();
    bytes[..8192].fill(0);
    let basis = Basis { parent, changes: Arc::new(|range, _| vec![(range.len(), true)]) };
    let options = ImportOptions { basis: Some(basis), ..ImportOptions::new("disk".parse().unwrap(), 0) };
    let sealed = import(disk_of(bytes), &store, &options, &mut |_| {}).unwrap();
    let version = VersionReader::open(&store, sealed.version.manifest, ChunkCache::new(64 << 20)).unwrap();
    assert_eq!(version.geometry().logical_block_bytes, 4096);
}

#[test]
fn the_sector_size_of_a_block_device_is_used() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.raw");
    fs::write(&path, vec![0; 1 << 20]).unwrap();
    let device = attach(&path);
    assert_eq!(open_file(&device.0).unwrap().geometry().logical_block_bytes, 4096);
    assert_eq!(open_file(&path).unwrap().geometry().logical_block_bytes, 512);
}
