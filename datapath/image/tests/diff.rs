//! What changed between versions, with file systems made by mke2fs and changed by debugfs.

mod fixture;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use fixture::{MemoryDisk, noise, run_ok, store};
use headwater_image::{Cancel, Difference, FileChange, ImportOptions, diff, import};
use headwater_store::{Hash, LocalDir};

fn add(store: &LocalDir, disk: Vec<u8>) -> Hash {
    let options = ImportOptions::new("disk".parse().unwrap(), 0);
    import(Arc::new(MemoryDisk::new(disk)), store, &options, &mut |_| {}).unwrap().version.manifest
}

fn compare(store: &LocalDir, from: Hash, to: Hash) -> Difference {
    diff(store, from, to, &Cancel::new(), &mut |_| {}).unwrap()
}

#[test]
fn changed_chunks_and_blocks_are_counted() {
    let (_kept, store) = store();
    let mut disk = vec![0; 1 << 20];
    noise(&mut disk[..300_000], 1);
    let first = add(&store, disk.clone());
    assert_eq!(compare(&store, first, first).changed_chunks, 0);
    // One byte; a block that becomes zero; two blocks in one chunk of what was zero.
    disk[5000] ^= 1;
    disk[65_536..65_536 + 4096].fill(0);
    disk[700_000] = 1;
    disk[700_000 + 8192] = 1;
    let second = add(&store, disk.clone());
    let found = compare(&store, first, second);
    assert_eq!((found.changed_chunks, found.changed_bytes), (3, 4 * 4096));
    assert_eq!(found.partitions[0].number, 0);
    assert!(found.partitions[0].files.is_none());
    assert!(found.partitions[0].remark.as_ref().unwrap().contains("no ext2, ext3 or ext4"));
    assert_eq!(compare(&store, second, first).changed_bytes, found.changed_bytes);
    // A larger disk: what is new counts unless it is zero.
    disk.resize(3 << 20, 0);
    disk[2 << 20] = 1;
    let third = add(&store, disk);
    let found = compare(&store, second, third);
    assert_eq!((found.from_bytes, found.to_bytes, found.changed_bytes), (1 << 20, 3 << 20, 4096));
}

/// An ext4 file system with some files.
fn file_system(dir: &Path) -> Vec<u8> {
    let tree = dir.join("tree");
    fs::create_dir_all(tree.join("etc/deep")).unwrap();
    for (name, text) in
        [("etc/motd", "hello"), ("etc/deep/same", "same"), ("etc/touched", "touched"), ("gone", "x")]
    {
        fs::write(tree.join(name), text).unwrap();
    }
    let mut large = vec![0; 3 << 20];
    noise(&mut large, 7);
    fs::write(tree.join("large"), large).unwrap();
    std::os::unix::fs::symlink("etc/motd", tree.join("link")).unwrap();
    let image = dir.join("fs.img");
    let _ = fs::remove_file(&image);
    let (tree, image) = (tree.to_str().unwrap(), image.to_str().unwrap());
    run_ok("mke2fs", &["-q", "-t", "ext4", "-d", tree, image, "16M"]);
    fs::read(image).unwrap()
}

fn debugfs(dir: &Path, commands: &str) -> Vec<u8> {
    let (script, image) = (dir.join("script"), dir.join("fs.img"));
    fs::write(&script, commands).unwrap();
    run_ok("debugfs", &["-w", "-f", script.to_str().unwrap(), image.to_str().unwrap()]);
    fs::read(image).unwrap()
}

/// The file system as the second partition of a disk, after one that is not looked into.
fn on_disk(fs: &[u8], gpt: bool) -> Vec<u8> {
    let (first, sectors) = (2048u64, (fs.len() / 512) as u64);
    let mut disk = vec![0; (first as usize) * 512 + fs.len() + (1 << 20)];
    if gpt {
        disk[512..520].copy_from_slice(b"EFI PART");
        disk[512 + 72..512 + 80].copy_from_slice(&2u64.to_le_bytes());
        disk[512 + 80..512 + 84].copy_from_slice(&128u32.to_le_bytes());
        disk[512 + 84..512 + 88].copy_from_slice(&128u32.to_le_bytes());
        let entry = 1024 + 128;
        disk[entry..entry + 16].fill(7);
        disk[entry + 32..entry + 40].copy_from_slice(&first.to_le_bytes());
        disk[entry + 40..entry + 48].copy_from_slice(&(first + sectors - 1).to_le_bytes());
    } else {
        let entry = 446 + 16;
        disk[entry + 4] = 0x83;
        disk[entry + 8..entry + 12].copy_from_slice(&(first as u32).to_le_bytes());
        disk[entry + 12..entry + 16].copy_from_slice(&(sectors as u32).to_le_bytes());
        disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    }
    disk[(first as usize) * 512..][..fs.len()].copy_from_slice(fs);
    disk
}

#[test]
fn changed_files_of_ext4_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let before = file_system(dir.path());
    fs::write(dir.path().join("new text"), "another hello").unwrap();
    let new = dir.path().join("new text");
    let after = debugfs(
        dir.path(),
        &format!(
            "rm /etc/motd\nwrite \"{0}\" /etc/motd\nrm /gone\nmkdir /added\nwrite \"{0}\" /added/file\n\
             set_inode_field /etc/touched mtime 20200101000000\nset_inode_field /etc/deep mode 040700\n",
            new.display()
        ),
    );
    let (_kept, store) = store();
    for layout in [None, Some(true), Some(false)] {
        let disk = |fs: &[u8]| layout.map_or_else(|| fs.to_vec(), |gpt| on_disk(fs, gpt));
        let (from, to) = (add(&store, disk(&before)), add(&store, disk(&after)));
        let found = compare(&store, from, to);
        let partition = &found.partitions[0];
        assert_eq!(partition.number, if layout.is_some() { 2 } else { 0 });
        assert_eq!(partition.remark, None);
        let files: Vec<(String, FileChange)> =
            partition.files.clone().unwrap().into_iter().map(|file| (file.path, file.change)).collect();
        let expected = [
            ("/added", FileChange::Added),
            ("/added/file", FileChange::Added),
            ("/etc/deep", FileChange::Attributes),
            ("/etc/motd", FileChange::Changed),
            ("/etc/touched", FileChange::Attributes),
            ("/gone", FileChange::Removed),
        ];
        assert_eq!(files, expected.map(|(path, change)| (path.to_owned(), change)), "{layout:?}");
        assert!(partition.changed_bytes > 0 && partition.changed_bytes <= found.changed_bytes);
        // Back again, what was added is gone.
        let back = compare(&store, to, from).partitions[0].files.clone().unwrap();
        assert!(back.iter().any(|file| file.path == "/added/file" && file.change == FileChange::Removed));
    }
}

#[test]
fn a_damaged_file_system_is_a_remark_and_no_failure() {
    let dir = tempfile::tempdir().unwrap();
    let before = file_system(dir.path());
    let (_kept, store) = store();
    let from = add(&store, before.clone());
    for round in 0..40usize {
        let mut after = before.clone();
        let at = 1024 + round * 97;
        noise(&mut after[at..at + 64], round as u64);
        let to = add(&store, after);
        let found = compare(&store, from, to);
        assert!(found.changed_bytes >= 4096 && found.partitions.len() == 1, "{at}");
    }
}
