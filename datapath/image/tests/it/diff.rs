//! What changed between versions, with file systems made and changed by the tools that are used for them: mke2fs and
//! debugfs, mkfs.vfat and mtools; and sfdisk. NTFS is in `diff_ntfs`.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::diff_ntfs::ntfs;
use crate::fixture::{disk_of, noise, store};
use headwater_image::{
    Cancel, ChunkCache, DiffProgress, Difference, FileChange, ImageErrorKind, ImportOptions, VersionReader,
    diff, import, partitions_with, read_file,
};
use headwater_store::{Hash, LocalDir};
use headwater_testkit::{run, succeed};

pub(crate) fn add(store: &LocalDir, disk: Vec<u8>) -> Hash {
    let options = ImportOptions::new("disk".parse().unwrap(), 0);
    import(disk_of(disk), store, &options, &mut |_| {}).unwrap().version.manifest
}

pub(crate) fn compare(store: &LocalDir, from: Hash, to: Hash) -> Difference {
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
    let remark = found.partitions[0].remark.as_deref();
    let none = "no ext2, ext3, ext4, FAT or NTFS that can be read in both versions: there is none";
    assert_eq!(remark, Some(none));
    assert_eq!(compare(&store, second, first).changed_bytes, found.changed_bytes);
    // A larger disk: the added part counts unless it is zero.
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
    run("e2fsprogs", "mke2fs", &["-q", "-t", "ext4", "-d", tree, image, "16M"]);
    fs::read(image).unwrap()
}

fn debugfs(dir: &Path, commands: &str) -> Vec<u8> {
    let (script, image) = (dir.join("script"), dir.join("fs.img"));
    fs::write(&script, commands).unwrap();
    run("e2fsprogs", "debugfs", &["-w", "-f", script.to_str().unwrap(), image.to_str().unwrap()]);
    fs::read(image).unwrap()
}

/// The file system as the second partition of a disk, after one that is not read.
pub(crate) fn on_disk(fs: &[u8], gpt: bool) -> Vec<u8> {
    let (first, sectors) = (2048u64, (fs.len() / 512) as u64);
    let mut disk = vec![0; (first as usize) * 512 + fs.len() + (1 << 20)];
    if gpt {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.img");
        fs::File::create(&path).unwrap().set_len(disk.len() as u64).unwrap();
        sfdisk(&path, &[], &format!("label: gpt\np2 : start={first}, size={sectors}\n"));
        disk = fs::read(&path).unwrap();
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
fn a_comparison_is_cancelled_while_it_looks_at_files() {
    let dir = tempfile::tempdir().unwrap();
    let before = file_system(dir.path());
    let after = debugfs(dir.path(), "rm /gone\n");
    let (_kept, store) = store();
    let (from, to) = (add(&store, before), add(&store, after));
    // From then on, the comparison reports no chunks.
    let (is_told, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let (all, asks) = (Arc::clone(&is_told), Arc::clone(&asked));
    let cancel =
        Cancel::when(move || all.load(Ordering::Relaxed) && asks.fetch_add(1, Ordering::Relaxed) >= 3);
    let outcome = diff(&store, from, to, &cancel, &mut |at| {
        if let DiffProgress::Chunks(at) = at {
            is_told.store(at.done_bytes == at.total_bytes, Ordering::Relaxed);
        }
    });
    assert_eq!(outcome.unwrap_err().kind(), ImageErrorKind::Cancelled);
    assert!(asked.load(Ordering::Relaxed) > 3);
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
        // In the other direction, what was added counts as removed.
        let back = compare(&store, to, from).partitions[0].files.clone().unwrap();
        assert!(back.iter().any(|file| file.path == "/added/file" && file.change == FileChange::Removed));
    }
}

/// Images are built with one time for all files, and copies keep the time of what they copy.
#[test]
fn files_of_equal_size_and_time_are_compared_if_the_change_is_unexplained() {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir_all(tree.join("etc")).unwrap();
    let mut large = vec![0; 3 << 20];
    noise(&mut large, 7);
    let build = |version: &str, large: &[u8]| {
        for (name, content) in
            [("etc/version", version.as_bytes()), ("large", large), ("kept", b"kept"), ("empty", b"")]
        {
            fs::write(tree.join(name), content).unwrap();
            let file = fs::File::options().write(true).open(tree.join(name)).unwrap();
            file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_600_000_000)).unwrap();
        }
        let image = dir.path().join("fs.img");
        let _ = fs::remove_file(&image);
        let (tree, path) = (tree.to_str().unwrap(), image.to_str().unwrap());
        run("e2fsprogs", "mke2fs", &["-q", "-t", "ext4", "-d", tree, path, "16M"]);
        fs::read(image).unwrap()
    };
    let before = build("1.2.3", &large);
    // The difference is behind the first piece that is compared.
    large[2_900_000] ^= 1;
    let after = build("1.2.4", &large);
    let (_kept, store) = store();
    let (from, to) = (add(&store, before), add(&store, after));
    let expected = [("/etc/version", FileChange::Changed), ("/large", FileChange::Changed)];
    let mut reported = Vec::new();
    let found = diff(&store, from, to, &Cancel::new(), &mut |at| reported.push(at)).unwrap();
    expect(&found, &expected);
    // The progress: chunks first, and then the contents of all files.
    let of_files = reported.iter().position(|at| matches!(at, DiffProgress::Files { .. })).unwrap();
    assert!(of_files > 0 && reported[of_files] == DiffProgress::Files { compared_bytes: 0 }, "{reported:?}");
    let compared_bytes = (large.len() + "1.2.4".len() + "kept".len()) as u64;
    assert_eq!(reported.last(), Some(&DiffProgress::Files { compared_bytes }));
    // The same files in another image, in which the changed bytes are outside of them.
    let again = add(&store, build("1.2.4", &large));
    expect(&compare(&store, to, again), &[]);
}

/// Changes bytes without the file system noticing.
fn with_other_content(disk: &[u8], content: &[u8]) -> Vec<u8> {
    let mut disk = disk.to_vec();
    let at = disk.windows(content.len()).position(|window| window == content).unwrap();
    disk[at] ^= 1;
    disk
}

#[test]
fn content_changes_with_equal_times_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let (_kept, store) = store();
    let before = fat(dir.path(), "12", 2).0;
    let after = with_other_content(&before, b"hello");
    let expected = [("/EFI/lower.txt", FileChange::Changed)];
    expect(&compare(&store, add(&store, before), add(&store, after)), &expected);

    file_system(dir.path());
    // Reading as many zeroes as it claims would take hours.
    let before = debugfs(dir.path(), "set_inode_field /large size 1099511627776\n");
    let after = with_other_content(&before, b"hello");
    let partition = compare(&store, add(&store, before), add(&store, after)).partitions.remove(0);
    let files: Vec<_> = partition.files.unwrap().into_iter().map(|f| (f.path, f.change)).collect();
    assert_eq!(files, [("/etc/motd".to_owned(), FileChange::Changed)]);
    let remark = partition.remark.unwrap();
    assert!(remark.contains("were not compared: 1"), "{remark}");
}

pub(crate) fn expect(found: &Difference, expected: &[(&str, FileChange)]) {
    let partition = &found.partitions[0];
    assert_eq!(partition.remark, None);
    let files: Vec<(String, FileChange)> =
        partition.files.clone().unwrap().into_iter().map(|file| (file.path, file.change)).collect();
    let expected: Vec<_> = expected.iter().map(|(path, change)| ((*path).to_owned(), *change)).collect();
    assert_eq!(files, expected);
}

/// A file outside of the image, with this content and time of modification.
fn outside(dir: &Path, content: &[u8], minutes: u64) -> String {
    let path = dir.join("content");
    fs::write(&path, content).unwrap();
    let time =
        std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_600_000_000 + 60 * minutes);
    fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
    path.to_str().unwrap().to_owned()
}

/// A FAT with this many bits, some files, and the function that changes them.
fn fat(dir: &Path, bits: &str, megabytes: u64) -> (Vec<u8>, Vec<u8>) {
    let path = dir.join("fat.img");
    let image = path.to_str().unwrap();
    let _ = fs::remove_file(&path);
    fs::File::create(&path).unwrap().set_len(megabytes << 20).unwrap();
    run("dosfstools", "mkfs.vfat", &["-F", bits, "-s", "1", "-n", "LABEL", image]);
    let copy = |content: &[u8], minutes: u64, to: &str| {
        run(
            "mtools",
            "mcopy",
            &["-o", "-m", "-i", image, &outside(dir, content, minutes), &format!("::{to}")],
        );
    };
    run("mtools", "mmd", &["-i", image, "::/EFI", "::/EFI/A directory with a long name"]);
    let mut large = vec![0; 1 << 20];
    noise(&mut large, 7);
    for (name, content) in [
        ("/EFI/BOOT.EFI", &large[..]),
        ("/EFI/lower.txt", b"hello"),
        ("/EFI/A directory with a long name/A file with a long name that takes three entries.conf", b"old"),
        ("/gone", b"x"),
        ("/touched", b"same"),
        ("/kept", b"kept"),
    ] {
        copy(content, 0, name);
    }
    let before = fs::read(&path).unwrap();
    large[1_000_000] ^= 1;
    copy(&large, 1, "/EFI/BOOT.EFI");
    copy(
        b"new",
        1,
        "/EFI/A directory with a long name/A file with a long name that takes three entries.conf",
    );
    copy(b"same", 1, "/touched");
    run("mtools", "mdel", &["-i", image, "::/gone"]);
    run("mtools", "mmd", &["-i", image, "::/added"]);
    for number in 0..40 {
        copy(&[number], 1, &format!("/added/file number {number}"));
    }
    (before, fs::read(&path).unwrap())
}

#[test]
fn changed_files_of_fat_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let (_kept, store) = store();
    for (bits, megabytes) in [("12", 2), ("16", 12), ("32", 40)] {
        let (before, after) = fat(dir.path(), bits, megabytes);
        let (from, to) = (add(&store, before.clone()), add(&store, after.clone()));
        let mut expected = vec![
            (
                "/EFI/A directory with a long name/A file with a long name that takes three entries.conf",
                FileChange::Changed,
            ),
            ("/EFI/BOOT.EFI", FileChange::Changed),
            ("/added", FileChange::Added),
        ];
        let names: Vec<String> = (0..40).map(|number| format!("/added/file number {number}")).collect();
        expected.extend(names.iter().map(|name| (name.as_str(), FileChange::Added)));
        expected.extend([("/gone", FileChange::Removed), ("/touched", FileChange::Attributes)]);
        expected.sort_by_key(|(path, _)| *path);
        expect(&compare(&store, from, to), &expected);
        let back = compare(&store, to, from).partitions[0].files.clone().unwrap();
        assert!(
            back.iter()
                .any(|file| file.path == "/added/file number 39" && file.change == FileChange::Removed)
        );
        // In a partition, as firmware finds it.
        let (from, to) = (add(&store, on_disk(&before, true)), add(&store, on_disk(&after, true)));
        expect(&compare(&store, from, to), &expected);
    }
}

/// Linux reads it. mtools would treat it as a FAT16, so the file is written by hand.
#[test]
fn changed_files_of_a_fat32_with_few_clusters_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let (_kept, store) = store();
    let path = dir.path().join("fat.img");
    fs::File::create(&path).unwrap().set_len(40 << 20).unwrap();
    run("dosfstools", "mkfs.vfat", &["-F", "32", "-s", "8", path.to_str().unwrap()]);
    let before = fs::read(&path).unwrap();
    let word = |at: usize| usize::from(u16::from_le_bytes([before[at], before[at + 1]]));
    let table_bytes = 512 * (word(36) | word(38) << 16);
    let table = 512 * word(14);
    let root = table + 2 * table_bytes;
    let mut after = before.clone();
    // The file is in cluster 3 and ends there.
    for copy in [table, table + table_bytes] {
        after[copy + 12..copy + 16].copy_from_slice(&0x0FFF_FFFF_u32.to_le_bytes());
    }
    after[root + 8 * 512..][..5].copy_from_slice(b"hello");
    after[root..root + 32].copy_from_slice(b"HELLO   TXT\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x03\0\x05\0\0\0");
    let found = compare(&store, add(&store, before), add(&store, after));
    let files = found.partitions[0].files.clone().unwrap();
    let named: Vec<_> =
        files.iter().map(|file| (file.path.to_lowercase(), file.change, file.size_bytes)).collect();
    assert_eq!(named, [("/hello.txt".to_owned(), FileChange::Added, 5)]);
}

#[test]
fn a_fat_without_room_for_its_root_directory_is_a_remark() {
    let dir = tempfile::tempdir().unwrap();
    let (_kept, store) = store();
    let before = fat(dir.path(), "16", 12).0;
    let mut after = before.clone();
    after[17..19].fill(0);
    let found = compare(&store, add(&store, before), add(&store, after));
    let remark = found.partitions[0].remark.clone().unwrap();
    assert!(remark.contains("the root directory has no entries"), "{remark}");
}

/// Runs sfdisk with a script on a disk.
fn sfdisk(disk: &Path, options: &[&str], script: &str) {
    let path = disk.with_extension("sfdisk");
    fs::write(&path, script).unwrap();
    let mut command = Command::new("sfdisk");
    command.arg("--quiet").args(options).arg(disk).stdin(fs::File::open(path).unwrap());
    succeed("fdisk", &mut command);
}

/// The numbers of a disk's partitions and their first sectors, as sfdisk reports them.
fn sfdisk_says(disk: &Path) -> Vec<(u32, usize)> {
    let name = disk.to_str().unwrap();
    let dump = run("fdisk", "sfdisk", &["--dump", name]);
    let place = |line: &str| {
        let (number, rest) = line.strip_prefix(name)?.split_once(" : start=")?;
        let (start, _) = rest.split_once(',')?;
        Some((number.parse().unwrap(), start.trim().parse().unwrap()))
    };
    dump.lines().filter_map(place).collect()
}

#[test]
fn changed_files_of_logical_partitions_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.img");
    fs::File::create(&path).unwrap().set_len(32 << 20).unwrap();
    let table = [
        "label: dos",
        "p1 : start=2048, size=2048, type=83",
        "p2 : start=4096, size=53248, type=f",
        "p3 : start=57344, size=2048, type=83",
        "p4 : start=59392, size=2048, type=83",
        "p5 : size=32768, type=83",
        "p6 : size=8192, type=83",
        "p7 : size=2048, type=83",
    ];
    sfdisk(&path, &[], &table.join("\n"));
    // 7 becomes 6, and the new 7 lies between 5 and 6: the chain of tables goes back to it.
    run("fdisk", "sfdisk", &["--quiet", "--delete", path.to_str().unwrap(), "6"]);
    sfdisk(&path, &["--append"], "size=4096, type=6\n");
    let places = sfdisk_says(&path);
    assert_eq!(places.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7]);
    let start_of = |number: usize| places[number - 1].1;
    assert!(start_of(5) < start_of(7) && start_of(7) < start_of(6), "{places:?}");

    let empty = fs::read(&path).unwrap();
    let disk = |ext: &[u8], fat: &[u8]| {
        let mut disk = empty.clone();
        for (number, content) in [(5, ext), (7, fat)] {
            disk[start_of(number) * 512..][..content.len()].copy_from_slice(content);
        }
        disk
    };
    let (ext_before, ext_after) = (file_system(dir.path()), debugfs(dir.path(), "rm /gone\n"));
    let (fat_before, fat_after) = fat(dir.path(), "12", 2);
    let (_kept, store) = store();
    let (from, to) = (add(&store, disk(&ext_before, &fat_before)), add(&store, disk(&ext_after, &fat_after)));
    let found = compare(&store, from, to);
    let found_places: Vec<_> =
        found.partitions.iter().map(|p| (p.number, (p.offset_bytes / 512) as usize)).collect();
    let expected: Vec<_> = places.iter().copied().filter(|(number, _)| *number != 2).collect();
    assert_eq!(found_places, expected);
    for partition in &found.partitions {
        assert_eq!(partition.remark, None, "{}", partition.number);
        let files = partition.files.iter().flatten().map(|file| (file.path.as_str(), file.change));
        let files: Vec<_> = files.collect();
        match partition.number {
            5 => assert_eq!(files, [("/gone", FileChange::Removed)]),
            7 => assert!(files.contains(&("/EFI/BOOT.EFI", FileChange::Changed)), "{files:?}"),
            _ => assert!(partition.changed_bytes == 0 && files.is_empty(), "{partition:?}"),
        }
    }
}

/// A file system of each kind, and where the tables begin whose damage matters most.
fn one_of_each(dir: &Path) -> Vec<(Vec<u8>, usize)> {
    let ntfs = ntfs(dir).0;
    // Its tables begin with the record of the root directory, or of the first file.
    let record = |number: usize| ntfs.windows(5).position(|w| w == b"FILE0").unwrap() + number * 1024;
    let (root, first) = (record(5), record(64));
    vec![
        (file_system(dir), 1024),
        (fat(dir, "12", 2).0, 0),
        (fat(dir, "32", 40).0, 32 * 512),
        (ntfs.clone(), 0),
        (ntfs.clone(), root),
        (ntfs, first),
    ]
}

#[test]
fn a_damaged_file_system_is_a_remark_and_no_failure() {
    let dir = tempfile::tempdir().unwrap();
    let (_kept, store) = store();
    for (before, tables) in one_of_each(dir.path()) {
        let from = add(&store, before.clone());
        for round in 0..30usize {
            let mut after = before.clone();
            let at = tables + round * 97;
            noise(&mut after[at..at + 64], round as u64);
            let to = add(&store, after);
            let found = compare(&store, from, to);
            assert!(found.changed_bytes >= 4096 && found.partitions.len() == 1, "{at}");
        }
    }
}

/// A failed allocation of memory would end the program, and cannot be caught.
#[test]
fn comparisons_beyond_the_memory_limit_become_remarks() {
    let dir = tempfile::tempdir().unwrap();
    let (_kept, store) = store();
    let before = file_system(dir.path());
    let from = add(&store, before.clone());
    let partition = |after| compare(&store, from, add(&store, after)).partitions.remove(0);
    let remark = |after| partition(after).remark.unwrap();
    let link = debugfs(dir.path(), "set_inode_field /link size 1099511627776\n");
    // The file is not read: its size alone shows that it changed.
    let files: Vec<_> = partition(link).files.unwrap().into_iter().map(|f| (f.path, f.change)).collect();
    assert_eq!(files, [("/link".to_owned(), FileChange::Changed)]);
    // Without the checksum that would be wrong.
    let with = |at: usize, value: u32| {
        let mut after = before.clone();
        after[1024 + 0x64..][..4].copy_from_slice(&0u32.to_le_bytes());
        after[1024 + at..][..4].copy_from_slice(&value.to_le_bytes());
        after
    };
    assert!(remark(with(0x150, 1 << 18)).contains("block groups"));
    assert!(remark(with(0x18, 20)).contains("it has blocks of 2^30 bytes"));
}

/// Reading as many zeroes as it claims would take hours.
#[test]
fn a_sparse_file_larger_than_its_partition_counts_as_changed() {
    let dir = tempfile::tempdir().unwrap();
    let (_kept, store) = store();
    file_system(dir.path());
    let before = debugfs(dir.path(), "set_inode_field /large size 1099511627776\n");
    let after = debugfs(dir.path(), "set_inode_field /large mtime 20200101000000\nrm /gone\n");
    let partition = compare(&store, add(&store, before), add(&store, after)).partitions.remove(0);
    let files: Vec<_> = partition.files.unwrap().into_iter().map(|f| (f.path, f.change)).collect();
    let expected = [("/gone", FileChange::Removed), ("/large", FileChange::Changed)];
    assert_eq!(files, expected.map(|(path, change)| (path.to_owned(), change)));
    let remark = partition.remark.unwrap();
    assert!(remark.contains("were not read: 1"), "{remark}");
}

/// If the inode of a file is invalid, it is unknown whether the file changed.
#[test]
fn an_entry_that_cannot_be_read_is_a_remark() {
    let dir = tempfile::tempdir().unwrap();
    let (_kept, store) = store();
    let from = add(&store, file_system(dir.path()));
    let to = add(&store, debugfs(dir.path(), "set_inode_field /gone mode 0\n"));
    for (from, to) in [(from, to), (to, from)] {
        let partition = compare(&store, from, to).partitions.remove(0);
        assert!(partition.files.is_none());
        let remark = partition.remark.unwrap();
        assert!(remark.contains("no ext2, ext3, ext4, FAT or NTFS that can be read"), "{remark}");
    }
}

#[test]
fn endless_directories_and_files_are_a_remark() {
    let dir = tempfile::tempdir().unwrap();
    let before = fat(dir.path(), "12", 2).0;
    let (_kept, store) = store();
    let from = add(&store, before.clone());
    // The two copies of the table begin behind the boot sector. Each chain now leads back to its first cluster, and
    // the first directory's entry names the directory that it is in.
    let mut loops = before.clone();
    for entry in loops[512 + 3..4096].chunks_exact_mut(3) {
        entry.copy_from_slice(&[2, 0x20, 0]);
    }
    let remark = compare(&store, from, add(&store, loops)).partitions[0].remark.clone().unwrap();
    assert!(remark.contains("the cluster chain of a directory is a loop"), "{remark}");
    let mut within = before.clone();
    let entry = before.windows(11).position(|window| window == b"EFI        ").unwrap();
    within[entry + 26..entry + 28].copy_from_slice(&[0, 0]);
    let remark = compare(&store, from, add(&store, within)).partitions[0].remark.clone().unwrap();
    assert!(remark.contains("a directory has no first cluster"), "{remark}");
}

#[test]
fn ext4_with_short_inodes_and_checksums_is_compared() {
    let dir = tempfile::tempdir().unwrap();
    let (source, image) = (dir.path().join("source"), dir.path().join("image"));
    fs::create_dir(&source).unwrap();
    fs::write(source.join("f"), "x").unwrap();
    let (source, image_name) = (source.to_str().unwrap(), image.to_str().unwrap());
    let made =
        ["-q", "-F", "-t", "ext4", "-I", "128", "-O", "metadata_csum", "-d", source, image_name, "16M"];
    run("e2fsprogs", "mke2fs", &made);
    let before = fs::read(&image).unwrap();
    run("e2fsprogs", "debugfs", &["-w", "-R", "rm f", image_name]);
    let (_kept, store) = store();
    let (from, to) = (add(&store, before), add(&store, fs::read(&image).unwrap()));
    let found = compare(&store, from, to);
    assert_eq!(found.partitions[0].remark, None);
    expect(&found, &[("/f", FileChange::Removed)]);
}

/// A disk with these bytes at this place, which changed elsewhere.
fn named(magic: &[(usize, &[u8])]) -> String {
    let mut disk = vec![0; 2 << 20];
    for (at, bytes) in magic {
        disk[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    let (_kept, store) = store();
    let from = add(&store, disk.clone());
    disk[1 << 20] = 1;
    let to = add(&store, disk);
    compare(&store, from, to).partitions[0].remark.clone().unwrap()
}

#[test]
fn unread_file_systems_are_named() {
    let cases: [(usize, &[u8], &str); 12] = [
        (0, b"XFSB", "XFS"),
        (0x1_0040, b"_BHRfS_M", "Btrfs"),
        (1024, b"\x10\x20\xf5\xf2", "F2FS"),
        (3, b"EXFAT   ", "exFAT"),
        (3, b"ReFS\0\0\0\0", "ReFS"),
        (3, b"-FVE-FS-", "BitLocker"),
        (0, b"LUKS\xba\xbe", "LUKS"),
        (4086, b"SWAPSPACE2", "swap space"),
        (0x8001, b"CD001", "ISO 9660"),
        (0, b"hsqs", "SquashFS"),
        (128 << 10, b"\x0c\xb1\xba\0\0\0\0\0", "ZFS"),
        (4096, b"\xfc\x4e\x2b\xa9", "a member of a Linux RAID"),
    ];
    for (at, magic, name) in cases {
        let remark = named(&[(at, magic)]);
        assert!(remark.contains(&format!("it is {name}")), "{name}: {remark}");
    }
}

#[test]
fn the_volumes_of_an_lvm_are_named() {
    let text = b"vg0 {\nlogical_volumes {\nroot {\n}\nhome {\n}\n}\n}\n";
    let len = (text.len() as u64).to_le_bytes();
    let remark = named(&[
        (512, b"LABELONE"),
        (512 + 20, &32u32.to_le_bytes()),
        (512 + 24, b"LVM2 001"),
        // After its name and size: an area of data from 1 MiB on, the end of that list, and an area of metadata.
        (512 + 32 + 40, &(1u64 << 20).to_le_bytes()),
        (512 + 32 + 72, &4096u64.to_le_bytes()),
        (4096 + 4, b" LVM2 x[5A%r0N*>"),
        (4096 + 32, &65_536u64.to_le_bytes()),
        (4096 + 40, &512u64.to_le_bytes()),
        (4096 + 48, &len),
        (4096 + 512, text),
    ]);
    assert!(remark.contains("LVM with the volumes vg0/root, vg0/home"), "{remark}");
}

#[test]
fn single_files_are_read_by_name_in_their_partition() {
    for gpt in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let disk = on_disk(&file_system(dir.path()), gpt);
        let (_kept, store) = store();
        let manifest = add(&store, disk);
        let reader = VersionReader::open(&store, manifest, ChunkCache::new(64 << 20)).unwrap();
        let disk: Arc<dyn headwater_block::Device> = reader;
        assert_eq!(partitions_with(&disk, "/etc/motd").unwrap(), [2]);
        assert!(partitions_with(&disk, "etc/motd/none").unwrap().is_empty());
        assert_eq!(read_file(&disk, 2, "/etc/deep/same", 100).unwrap().as_deref(), Some(&b"same"[..]));
        let large = read_file(&disk, 2, "large", 3 << 20).unwrap().unwrap();
        assert!(large == fs::read(dir.path().join("tree/large")).unwrap());
        for (partition, path) in
            [(2, "etc/none"), (2, "etc/deep"), (2, "link"), (1, "etc/motd"), (9, "etc/motd")]
        {
            assert!(!matches!(read_file(&disk, partition, path, 100), Ok(Some(_))), "{partition} {path}");
        }
        let why = read_file(&disk, 2, "large", 1 << 20).unwrap_err().to_string();
        assert!(why.contains("it has 3.0 MiB, and the limit is 1.0 MiB"), "{why}");
    }
}
