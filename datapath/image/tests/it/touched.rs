//! Damage is reported with the files that it affects. If there is more damage than can be listed, it is
//! reported with all versions that may be affected.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::fixture::{flip, import_bytes, noise, store};
use crate::repair::{CHUNK_BYTES, check, object_path, place, spoil};
use headwater_image::verify::DAMAGED_LISTED_MAX;
use headwater_image::{Cancel, Manifest, Verified, VerifyRound, files_touched, versions_touched};
use headwater_store::{Access, LocalDir, Store};
use headwater_testkit::run;

#[test]
fn damage_is_reported_with_the_affected_files() {
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
    // The flipped byte is in the chunk with the middle of the file `two`.
    let object = fs::read(&path).unwrap();
    let at = object.windows(64).position(|window| window == &disk[place..place + 64]).unwrap();
    flip(&path, at as u64);
    let found = check(&store, &version);
    assert_eq!(found.damaged_chunks, 1);
    let search = |damage: &Verified, round: &VerifyRound, progress: &mut dyn FnMut(u64)| {
        files_touched(&store, version.manifest, damage, round, &Cancel::new(), progress).unwrap()
    };
    let mut reported = Vec::new();
    let touched = search(&found, &VerifyRound::new(None), &mut |read_bytes| reported.push(read_bytes));
    assert_eq!((touched.files, touched.remarks), (vec!["the whole disk: /two".to_owned()], vec![]));
    // Two of the files can be read to the end.
    assert!(reported.is_sorted() && reported.last() >= Some(&(2 << 20)), "{reported:?}");
    // The search reads 2 MiB and more, and also keeps to the rate of its round.
    let (began, round) = (Instant::now(), VerifyRound::new(Some(4 << 20)));
    let touched = search(&found, &round, &mut |_| {});
    assert_eq!(touched.files, ["the whole disk: /two"]);
    assert!(began.elapsed() >= Duration::from_millis(400), "{:?}", began.elapsed());
    assert!(search(&Verified::default(), &VerifyRound::new(None), &mut |_| {}).files.is_empty());
    // A version that cannot be opened at all gets a remark.
    fs::remove_file(&path).unwrap();
    let touched = search(&found, &VerifyRound::new(None), &mut |_| {});
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

/// The files that are affected by damage of the chunks at these places.
fn touched_by(disk: &[u8], places: &[usize]) -> headwater_image::Touched {
    let (kept, store) = store();
    let version = import_bytes(&store, "disk", disk).version;
    for at in places {
        spoil(kept.path(), place(&store, &version, (at / CHUNK_BYTES) as u64));
    }
    let found = check(&store, &version);
    assert_eq!(found.damaged_chunks, places.len() as u64);
    let round = VerifyRound::new(None);
    files_touched(&store, version.manifest, &found, &round, &Cancel::new(), &mut |_| {}).unwrap()
}

/// The place of a file's inode, as debugfs reports it.
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
    let is_named = |path: &str| touched.files.contains(&format!("the whole disk: {path}"));
    assert!(is_named("/many/file-890") && is_named("/many/large"), "{:?}", touched.files);
    for sound in ["/", "/many", "/many/file-0", "/many/file-300"] {
        assert!(!is_named(sound), "{sound} in {:?}", touched.files);
    }
}

/// Reading as many zeroes as it claims would take hours.
#[test]
fn the_search_in_a_sparse_file_ends_with_its_partition() {
    let dir = tempfile::tempdir().unwrap();
    let commands = "write \"EMPTY\" /many/sparse\nset_inode_field /many/sparse size 1099511627776\n";
    let (image, large) = ext4_with(dir.path(), commands);
    let disk = fs::read(image).unwrap();
    let content = disk.windows(64).position(|window| window == &large[500_000..500_064]).unwrap();
    let touched = touched_by(&disk, &[content]);
    assert_eq!(touched.files, ["the whole disk: /many/large"]);
    assert_eq!(touched.remarks.len(), 1);
    assert!(touched.remarks[0].contains("end: 1, the first is /many/sparse"), "{:?}", touched.remarks);
}

/// Puts a primary partition, in bytes, into the table of a disk.
fn put_primary(disk: &mut [u8], slot: usize, (kind, start, len): (u8, usize, usize)) {
    let entry = &mut disk[446 + 16 * slot..][..16];
    entry[4] = kind;
    entry[8..12].copy_from_slice(&((start / 512) as u32).to_le_bytes());
    entry[12..].copy_from_slice(&((len / 512) as u32).to_le_bytes());
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
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
    put_primary(&mut disk, 0, (0x83, start, primary.len()));
    put_primary(&mut disk, 1, (0x05, extended, 2 << 20));
    // What the table says does not matter: it cannot be read.
    noise(&mut disk[extended..extended + CHUNK_BYTES], 3);
    let content = disk.windows(64).position(|window| window == &large[500_000..500_064]).unwrap();
    let touched = touched_by(&disk, &[content, extended]);
    assert_eq!(touched.files, ["partition 1: /many/large"]);
    assert_eq!(touched.remarks.len(), 1, "{:?}", touched.remarks);
    assert!(touched.remarks[0].contains("logical partitions may be missing"), "{:?}", touched.remarks);
}

#[test]
fn unlisted_damage_affects_versions_and_files_too() {
    const SMALL: usize = 4096;
    /// Chunks of the first partition. Threads read chunks out of order by less than a thousand, so no chunk
    /// after this partition is listed.
    const CHUNKS: usize = DAMAGED_LISTED_MAX + 2000;
    let dir = tempfile::tempdir().unwrap();
    let (image, large) = ext4_with(dir.path(), "write \"EMPTY\" /many/empty\n");
    let files = fs::read(image).unwrap();
    let first = 1_usize << 20;
    let second = first + CHUNKS * SMALL;
    let mut disk = vec![0; second + files.len()];
    for (chunk, number) in disk[first..second].chunks_mut(SMALL).zip(1_u64..) {
        chunk[..8].copy_from_slice(&number.to_le_bytes());
    }
    disk[second..].copy_from_slice(&files);
    put_primary(&mut disk, 0, (0x83, first, second - first));
    put_primary(&mut disk, 1, (0x83, second, files.len()));

    let kept = tempfile::tempdir().unwrap();
    let store = LocalDir::open(kept.path(), Access::Write { new_chunk_bytes: SMALL as u32 }).unwrap();
    let version = import_bytes(&store, "disk", &disk).version;
    // One version has only the content of the second partition, and one has nothing of the disk.
    let shared = import_bytes(&store, "shares", &files).version;
    assert_eq!((version.objects.len(), &shared.objects), (1, &version.objects));
    let mut apart = vec![0; 1 << 20];
    noise(&mut apart, 9);
    import_bytes(&store, "apart", &apart);

    let content = second + files.windows(64).position(|window| window == &large[500_000..500_064]).unwrap();
    let rots = |index: u64| {
        let chunk = index as usize * SMALL;
        (first..second).contains(&chunk) || chunk == content / SMALL * SMALL
    };
    let manifest = Manifest::decode(&store.manifest(version.manifest).unwrap()).unwrap();
    let path = object_path(kept.path(), &version);
    let mut object = fs::read(&path).unwrap();
    for (_, chunk) in manifest.data().filter(|(index, _)| rots(*index)) {
        object[chunk.offset as usize..][..chunk.stored_bytes as usize].fill(0);
    }
    File::options().write(true).open(&path).unwrap().write_all_at(&object, 0).unwrap();
    let found = check(&store, &version);
    assert_eq!((found.damaged_chunks, found.unlisted()), (CHUNKS as u64 + 1, 2001));
    assert!(found.damaged.iter().all(|chunk| chunk.image_offset < second as u64));

    let round = VerifyRound::new(None);
    let mut versions = versions_touched(&store, &found, &round, &Cancel::new(), &mut |_, _| {}).unwrap();
    versions.sort();
    assert_eq!(versions, ["disk@1", "shares@1"]);
    let touched =
        files_touched(&store, version.manifest, &found, &round, &Cancel::new(), &mut |_| {}).unwrap();
    assert_eq!(touched.files, ["partition 2: /many/large"]);
    // The first partition has no file system.
    assert_eq!(touched.remarks.len(), 1, "{:?}", touched.remarks);
}

#[test]
fn a_large_lost_object_does_not_affect_unrelated_versions() {
    const SMALL: usize = 4096;
    let kept = tempfile::tempdir().unwrap();
    let store = LocalDir::open(kept.path(), Access::Write { new_chunk_bytes: SMALL as u32 }).unwrap();
    let mut many = vec![0; (DAMAGED_LISTED_MAX + 2000) * SMALL];
    for (chunk, number) in many.chunks_mut(SMALL).zip(1_u64..) {
        chunk[..8].copy_from_slice(&number.to_le_bytes());
    }
    let old = import_bytes(&store, "disk", &many).version;
    // These chunks come first, so they are listed.
    let mut few = vec![0; 2 * SMALL];
    noise(&mut few, 7);
    let new = import_bytes(&store, "disk", &[&few[..], &many].concat()).version;
    let shared = import_bytes(&store, "shares", &few[SMALL..]).version;
    assert_eq!((old.objects.len(), new.objects.len(), shared.objects.len()), (1, 2, 1));
    assert!(new.objects.contains(&shared.objects[0]) && shared.objects != old.objects);

    fs::remove_file(object_path(kept.path(), &old)).unwrap();
    let manifest = Manifest::decode(&store.manifest(new.manifest).unwrap()).unwrap();
    let (index, first) = manifest.data().next().unwrap();
    assert_eq!(index, 0);
    flip(&object_path(kept.path(), &shared), first.offset);
    let found = check(&store, &new);
    assert_eq!((found.damaged_chunks, found.unlisted()), (DAMAGED_LISTED_MAX as u64 + 2001, 2001));
    let versions = versions_touched(&store, &found, &VerifyRound::new(None), &Cancel::new(), &mut |_, _| {});
    let mut versions = versions.unwrap();
    versions.sort();
    assert_eq!(versions, ["disk@1", "disk@2"]);
}
