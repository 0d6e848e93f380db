//! Damage is reported with the files that it touches.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::fixture::{flip, import_bytes, noise, store};
use crate::repair::{CHUNK_BYTES, check, object_path, place, spoil};
use headwater_image::{Cancel, DamagedChunk, Round, files_touched};
use headwater_testkit::run;

#[test]
fn damage_is_reported_with_the_files_that_it_touches() {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir_all(tree.join("etc")).unwrap();
    for (name, seed) in [("one", 1), ("two", 2), ("etc/three", 3)] {
        let mut bytes = vec![0; 1 << 20];
        noise(&mut bytes, seed);
        fs::write(tree.join(name), bytes).unwrap();
    }
    let image = dir.path().join("fs.img");
    run(
        "e2fsprogs",
        "mke2fs",
        &["-q", "-t", "ext4", "-d", tree.to_str().unwrap(), image.to_str().unwrap(), "16M"],
    );
    let disk = fs::read(&image).unwrap();
    let mut second = vec![0; 1 << 20];
    noise(&mut second, 2);
    let place = disk.windows(64).position(|window| window == &second[500_000..500_064]).unwrap();

    let (kept, store) = store();
    let version = import_bytes(&store, "disk", &disk).version;
    let path = object_path(kept.path(), &version);
    // The chunk of the image that holds the middle of the file, found by the verification that it breaks.
    let object = fs::read(&path).unwrap();
    let at = object.windows(64).position(|window| window == &disk[place..place + 64]).unwrap();
    flip(&path, at as u64);
    let found = check(&store, &version);
    assert_eq!(found.damaged_chunks, 1);
    let search = |damaged: &[DamagedChunk], round: &Round, progress: &mut dyn FnMut(u64)| {
        files_touched(&store, version.manifest, damaged, round, &Cancel::new(), progress).unwrap()
    };
    let mut told = Vec::new();
    let touched = search(&found.damaged, &Round::new(None), &mut |read_bytes| told.push(read_bytes));
    assert_eq!((touched.files, touched.remarks), (vec!["partition 0: /two".to_owned()], vec![]));
    // Two of the files can be read to the end.
    assert!(told.is_sorted() && told.last() >= Some(&(2 << 20)), "{told:?}");
    // The search reads 3 MiB and more, and holds the rate of its round, too.
    let (began, round) = (Instant::now(), Round::new(Some(6 << 20)));
    let touched = search(&found.damaged, &round, &mut |_| {});
    assert_eq!(touched.files, ["partition 0: /two"]);
    assert!(began.elapsed() >= Duration::from_millis(400), "{:?}", began.elapsed());
    assert!(search(&[], &Round::new(None), &mut |_| {}).files.is_empty());
    // A version that cannot be opened at all is told so.
    fs::remove_file(&path).unwrap();
    let touched = search(&found.damaged, &Round::new(None), &mut |_| {});
    assert_eq!((touched.files.len(), touched.remarks.len()), (0, 1));
}

/// An ext4 with `/many/large`, of 1 MiB, changed by commands in which `EMPTY` is an empty file outside.
fn ext4_with(dir: &Path, commands: &str) -> (PathBuf, Vec<u8>) {
    let (tree, image, script) = (dir.join("tree"), dir.join("fs.img"), dir.join("script"));
    fs::create_dir_all(tree.join("many")).unwrap();
    let mut large = vec![0; 1 << 20];
    noise(&mut large, 2);
    fs::write(tree.join("many/large"), &large).unwrap();
    let (tree, text) = (tree.to_str().unwrap(), image.to_str().unwrap());
    let options = ["-q", "-t", "ext4", "-b", "4096", "-I", "256", "-N", "2048", "-d", tree, text, "16M"];
    run("e2fsprogs", "mke2fs", &options);
    let empty = dir.join("empty");
    fs::write(&empty, "").unwrap();
    fs::write(&script, commands.replace("EMPTY", empty.to_str().unwrap())).unwrap();
    run("e2fsprogs", "debugfs", &["-w", "-f", script.to_str().unwrap(), text]);
    (image, large)
}

/// The files that damage touches of an image, in which the chunks with these places are damaged.
fn touched_by(disk: &[u8], places: &[usize]) -> headwater_image::Touched {
    let (kept, store) = store();
    let version = import_bytes(&store, "disk", disk).version;
    for at in places {
        spoil(kept.path(), place(&store, &version, (at / CHUNK_BYTES) as u64));
    }
    let found = check(&store, &version);
    assert_eq!(found.damaged_chunks, places.len() as u64);
    let round = Round::new(None);
    files_touched(&store, version.manifest, &found.damaged, &round, &Cancel::new(), &mut |_| {}).unwrap()
}

/// Where debugfs says that the inode of a file lies.
fn inode_place(image: &Path, file: &str) -> usize {
    let said = run("e2fsprogs", "debugfs", &["-R", &format!("imap {file}"), image.to_str().unwrap()]);
    let (_, said) = said.split_once("located at block ").expect("no place in what debugfs says");
    let (block, offset) = said.trim().split_once(", offset 0x").unwrap();
    block.parse::<usize>().unwrap() * 4096 + usize::from_str_radix(offset, 16).unwrap()
}

#[test]
fn a_file_whose_inode_is_damaged_hides_no_other_one() {
    let dir = tempfile::tempdir().unwrap();
    // Inodes are given out one after another, and read up to 96 KiB ahead. Those of 300 files have 75 KiB.
    let commands: String = (0..900).map(|n| format!("write \"EMPTY\" /many/file-{n}\n")).collect();
    let (image, large) = ext4_with(dir.path(), &commands);
    let disk = fs::read(&image).unwrap();
    let content = disk.windows(64).position(|window| window == &large[500_000..500_064]).unwrap();
    let touched = touched_by(&disk, &[inode_place(&image, "/many/file-890"), content]);
    assert_eq!(touched.remarks, Vec::<String>::new());
    let is_named = |path: &str| touched.files.contains(&format!("partition 0: {path}"));
    assert!(is_named("/many/file-890") && is_named("/many/large"), "{:?}", touched.files);
    for sound in ["/", "/many", "/many/file-0", "/many/file-300"] {
        assert!(!is_named(sound), "{sound} in {:?}", touched.files);
    }
}

/// Reading as many zeroes as it claims would take hours.
#[test]
fn a_sparse_file_is_searched_for_damage_no_further_than_its_partition_is_large() {
    let dir = tempfile::tempdir().unwrap();
    let commands = "write \"EMPTY\" /many/sparse\nset_inode_field /many/sparse size 1099511627776\n";
    let (image, large) = ext4_with(dir.path(), commands);
    let disk = fs::read(image).unwrap();
    let content = disk.windows(64).position(|window| window == &large[500_000..500_064]).unwrap();
    let touched = touched_by(&disk, &[content]);
    assert_eq!(touched.files, ["partition 0: /many/large"]);
    assert_eq!(touched.remarks.len(), 1);
    assert!(touched.remarks[0].contains("end: 1, the first is /many/sparse"), "{:?}", touched.remarks);
}

/// Each table of logical partitions says where the next one is.
#[test]
fn a_damaged_table_of_logical_partitions_hides_no_primary_one() {
    let dir = tempfile::tempdir().unwrap();
    let (image, large) = ext4_with(dir.path(), "write \"EMPTY\" /many/empty\n");
    let primary = fs::read(image).unwrap();
    let start = 1_usize << 20;
    let extended = start + primary.len();
    let mut disk = vec![0; extended + (2 << 20)];
    disk[start..extended].copy_from_slice(&primary);
    for (slot, kind, start, len) in [(0, 0x83, start, primary.len()), (1, 0x05, extended, 2 << 20)] {
        let entry = &mut disk[446 + 16 * slot..][..16];
        entry[4] = kind;
        entry[8..12].copy_from_slice(&((start / 512) as u32).to_le_bytes());
        entry[12..].copy_from_slice(&((len / 512) as u32).to_le_bytes());
    }
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    // What the table says does not matter: it cannot be read.
    noise(&mut disk[extended..extended + CHUNK_BYTES], 3);
    let content = disk.windows(64).position(|window| window == &large[500_000..500_064]).unwrap();
    let touched = touched_by(&disk, &[content, extended]);
    assert_eq!(touched.files, ["partition 1: /many/large"]);
    assert_eq!(touched.remarks.len(), 1, "{:?}", touched.remarks);
    assert!(touched.remarks[0].contains("logical partitions may be missing"), "{:?}", touched.remarks);
}
