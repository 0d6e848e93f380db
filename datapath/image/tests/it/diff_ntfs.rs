//! What changed between versions of an NTFS that mkntfs made and ntfs-3g changed.

use std::fs;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use crate::diff::{add, compare, expect, on_disk};
use crate::fixture::{noise, store};
use headwater_image::FileChange;
use headwater_testkit::{output, run, wait_until};

/// An NTFS in a file, mounted while `work` is done in it.
fn in_ntfs(dir: &Path, work: impl FnOnce(&Path)) -> Vec<u8> {
    let (image, at) = (dir.join("ntfs.img"), dir.join("mounted"));
    fs::create_dir_all(&at).unwrap();
    run("ntfs-3g", "ntfs-3g", &[image.to_str().unwrap(), at.to_str().unwrap()]);
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(&at)));
    // Between its fork and its exec, a child process of another test has our files open.
    wait_until("it is not busy", || output("mount", Command::new("umount").arg(&at)).status.success());
    // The file system's process writes its last blocks after that.
    wait_until("its process ends", || !is_open_elsewhere(&image));
    done.unwrap();
    fs::read(image).unwrap()
}

fn is_open_elsewhere(file: &Path) -> bool {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let mut open = processes.filter_map(|p| fs::read_dir(p.path().join("fd")).ok()).flatten().flatten();
    open.any(|fd| fs::read_link(fd.path()).is_ok_and(|target| target == file))
}

/// An NTFS before and after changes.
pub(crate) fn ntfs(dir: &Path) -> (Vec<u8>, Vec<u8>) {
    let image = dir.join("ntfs.img");
    let _ = fs::remove_file(&image);
    fs::File::create(&image).unwrap().set_len(24 << 20).unwrap();
    run(
        "ntfs-3g",
        "mkntfs",
        &["-q", "-F", "-Q", "-p", "0", "-s", "512", "-H", "0", "-S", "0", image.to_str().unwrap()],
    );
    let long = "People/A directory/A file with a long name.txt";
    let mut large = vec![0; 5 << 20];
    noise(&mut large, 3);
    let before = in_ntfs(dir, |at| {
        fs::create_dir_all(at.join("People/A directory")).unwrap();
        fs::create_dir_all(at.join("many")).unwrap();
        fs::write(at.join("People/large.bin"), &large).unwrap();
        for name in [long, "touched", "gone", "Gr\u{fc}\u{df}e.txt"] {
            fs::write(at.join(name), "hello").unwrap();
        }
        // More than fit in the directory's own record.
        for number in 0..300 {
            fs::write(at.join(format!("many/file number {number}")), [number as u8; 700]).unwrap();
        }
    });
    let after = in_ntfs(dir, |at| {
        large[4_000_000] ^= 1;
        fs::write(at.join("People/large.bin"), &large).unwrap();
        fs::write(at.join(long), "bye").unwrap();
        let touched = fs::File::options().write(true).open(at.join("touched")).unwrap();
        touched.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(60)).unwrap();
        fs::remove_file(at.join("gone")).unwrap();
        fs::write(at.join("many/file number 250"), [1; 700]).unwrap();
        fs::create_dir_all(at.join("added/deep")).unwrap();
        fs::write(at.join("added/deep/file"), "new").unwrap();
    });
    (before, after)
}

#[test]
fn changed_files_of_ntfs_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let (_kept, store) = store();
    let (before, after) = ntfs(dir.path());
    let expected = [
        ("/People/A directory/A file with a long name.txt", FileChange::Changed),
        ("/People/large.bin", FileChange::Changed),
        ("/added", FileChange::Added),
        ("/added/deep", FileChange::Added),
        ("/added/deep/file", FileChange::Added),
        ("/gone", FileChange::Removed),
        ("/many/file number 250", FileChange::Changed),
        ("/touched", FileChange::Attributes),
    ];
    for disk in [<[u8]>::to_vec as fn(&[u8]) -> Vec<u8>, |fs| on_disk(fs, true)] {
        let (from, to) = (add(&store, disk(&before)), add(&store, disk(&after)));
        expect(&compare(&store, from, to), &expected);
        let back = compare(&store, to, from).partitions[0].files.clone().unwrap();
        assert!(
            back.iter().any(|file| file.path == "/added/deep/file" && file.change == FileChange::Removed)
        );
    }
}

/// Marks in an NTFS that only the start of a file was ever written.
fn write_only_start(image: &mut [u8], file: &str, bytes: u64) {
    let name: Vec<u8> = file.encode_utf16().flat_map(u16::to_le_bytes).collect();
    // The directory's record has the name too.
    let is_its = |record: &[u8]| {
        record.starts_with(b"FILE") && record[22] == 1 && record.windows(name.len()).any(|part| part == name)
    };
    let start = (0..image.len()).step_by(1024).find(|at| is_its(&image[*at..at + 1024])).unwrap();
    let record = &mut image[start..start + 1024];
    let word = |record: &[u8], at: usize| usize::from(u16::from_le_bytes([record[at], record[at + 1]]));
    let mut attribute = word(record, 20);
    while record[attribute] != 0x80 {
        attribute += word(record, attribute + 4);
    }
    // Its last two bytes may be those of the sector, which NTFS stores elsewhere.
    record[attribute + 56..attribute + 62].copy_from_slice(&bytes.to_le_bytes()[..6]);
}

#[test]
fn unwritten_parts_of_ntfs_files_are_not_compared() {
    let dir = tempfile::tempdir().unwrap();
    let (_kept, store) = store();
    let (mut before, mut after) = ntfs(dir.path());
    // The files differ in the byte 4,000,000.
    for (bytes, change) in [(4_000_001, FileChange::Changed), (4_000_000, FileChange::Attributes)] {
        write_only_start(&mut before, "large.bin", bytes);
        write_only_start(&mut after, "large.bin", bytes);
        let (from, to) = (add(&store, before.clone()), add(&store, after.clone()));
        let files = compare(&store, from, to).partitions[0].files.clone().unwrap();
        let large = files.iter().find(|file| file.path == "/People/large.bin").unwrap();
        assert_eq!(large.change, change, "{bytes}");
    }
}

/// An empty NTFS of so many MiB.
fn mkntfs(dir: &Path, size_mib: u64, options: &[&str]) {
    let image = dir.join("ntfs.img");
    fs::File::create(&image).unwrap().set_len(size_mib << 20).unwrap();
    run("ntfs-3g", "mkntfs", &[&["-q", "-F", "-Q"], options, &[image.to_str().unwrap()]].concat());
}

#[test]
fn a_change_in_a_file_of_several_records_is_found() {
    let dir = tempfile::tempdir().unwrap();
    mkntfs(dir.path(), 64, &[]);
    // The pieces are not adjacent, so one record cannot describe them all.
    let before = in_ntfs(dir.path(), |at| {
        let mut piece = [0; 4096];
        for number in 0..900 {
            noise(&mut piece, number);
            let mut big = fs::File::options().create(true).append(true).open(at.join("big")).unwrap();
            big.write_all(&piece).unwrap();
            drop(big);
            fs::write(at.join(format!("x{number}")), piece).unwrap();
        }
    });
    let image = dir.path().join("ntfs.img");
    let shown = run("ntfs-3g", "ntfsinfo", &["-f", "-F", "/big", image.to_str().unwrap()]);
    assert!(shown.contains("$ATTRIBUTE_LIST"), "{shown}");
    let mut time = None;
    let after = in_ntfs(dir.path(), |at| {
        let big = fs::File::options().read(true).write(true).open(at.join("big")).unwrap();
        time = Some(big.metadata().unwrap().modified().unwrap());
        big.write_all_at(b"Z", 2_000_000).unwrap();
    });
    let (_kept, store) = store();
    let (from, to) = (add(&store, before), add(&store, after));
    let found = compare(&store, from, to);
    expect(&found, &[("/big", FileChange::Changed)]);
    assert_eq!(found.partitions[0].files.as_ref().unwrap()[0].size_bytes, 900 * 4096);
    // Then the time does not show the change.
    let restored = in_ntfs(dir.path(), |at| {
        let big = fs::File::options().write(true).open(at.join("big")).unwrap();
        big.set_modified(time.unwrap()).unwrap();
    });
    let restored = add(&store, restored);
    expect(&compare(&store, from, restored), &[("/big", FileChange::Changed)]);
}

#[test]
fn directories_with_large_clusters_are_compared() {
    for cluster_bytes in ["8192", "65536"] {
        let dir = tempfile::tempdir().unwrap();
        mkntfs(dir.path(), 64, &["-c", cluster_bytes]);
        let before = in_ntfs(dir.path(), |at| {
            fs::create_dir(at.join("d")).unwrap();
            for number in 0..60 {
                fs::write(at.join(format!("d/a name of some length {number}")), "x").unwrap();
            }
        });
        let after = in_ntfs(dir.path(), |at| {
            fs::remove_file(at.join("d/a name of some length 30")).unwrap();
        });
        let (_kept, store) = store();
        let (from, to) = (add(&store, before), add(&store, after));
        expect(&compare(&store, from, to), &[("/d/a name of some length 30", FileChange::Removed)]);
    }
}

#[test]
fn a_volume_that_was_not_unmounted_is_a_remark() {
    let dir = tempfile::tempdir().unwrap();
    mkntfs(dir.path(), 8, &[]);
    let image = dir.path().join("ntfs.img");
    let before = fs::read(&image).unwrap();
    in_ntfs(dir.path(), |at| fs::write(at.join("new"), "x").unwrap());
    // This sets the flag that has Windows check the volume.
    run("ntfs-3g", "ntfsfix", &[image.to_str().unwrap()]);
    let (_kept, store) = store();
    let (from, to) = (add(&store, before), add(&store, fs::read(&image).unwrap()));
    let found = compare(&store, from, to).partitions.remove(0);
    assert!(found.files.unwrap().iter().any(|file| file.path == "/new"));
    let remark = found.remark.unwrap();
    assert!(remark.contains("file system of the newer version: it was not unmounted"), "{remark}");
}
