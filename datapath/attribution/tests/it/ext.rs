//! ext2, ext3 and ext4: each changed block beside `debugfs`, on disks that are quiet and on one that was mounted.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use headwater_attribution::{Class, Contents, Held};

use crate::image::{BLOCK, Mount, changed, changed_blocks, place_of, run, scanned, sync};

/// What `debugfs` says of changed blocks.
#[derive(Debug, Default, PartialEq, Eq)]
struct Expected {
    classes: BTreeMap<Class, Held>,
    files: BTreeMap<u64, Held>,
    /// By path, each with everything below it.
    directories: BTreeMap<String, Held>,
}

/// Answers of `debugfs`, a line for each number.
fn ask(image: &Path, request: &str, numbers: &BTreeSet<u64>) -> Vec<String> {
    let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
    let shown = numbers.chunks(2000).map(|some| {
        run("debugfs", &["-R", &format!("{request} {}", some.join(" ")), image.to_str().unwrap()])
    });
    shown.flat_map(|shown| shown.lines().skip(1).map(str::to_owned).collect::<Vec<_>>()).collect()
}

/// Which of these blocks the bitmaps call free, as `dumpe2fs` shows them.
fn free_blocks(image: &Path) -> BTreeSet<u64> {
    let shown = run("dumpe2fs", &[image.to_str().unwrap()]);
    let mut free = BTreeSet::new();
    for line in shown.lines().filter_map(|line| line.strip_prefix("  Free blocks: ")) {
        for range in line.split(", ").filter(|range| !range.is_empty()) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let number = |text: &str| text.trim().parse::<u64>().unwrap();
            free.extend(number(first)..=number(last));
        }
    }
    free
}

fn block_bytes(image: &Path) -> u64 {
    let shown = run("dumpe2fs", &["-h", image.to_str().unwrap()]);
    let line = shown.lines().find_map(|line| line.strip_prefix("Block size:")).unwrap();
    line.trim().parse().unwrap()
}

fn expected(image: &Path, blocks: &[u32]) -> Expected {
    let (bytes, free) = (block_bytes(image), free_blocks(image));
    let held = |block: u64| {
        let mut held = Held::default();
        held.add(place_of((block * bytes / BLOCK as u64) as u32), bytes);
        held
    };
    let per_block = BLOCK as u64 / bytes;
    let all: BTreeSet<u64> = blocks.iter().map(|block| u64::from(*block) * per_block).collect();
    let all: BTreeSet<u64> = all.iter().flat_map(|first| *first..first + per_block).collect();
    let mut expected = Expected::default();
    for line in ask(image, "icheck", &all) {
        let (block, inode) = line.split_once('\t').unwrap();
        let block: u64 = block.parse().unwrap();
        let class = match inode.parse::<u64>() {
            Ok(8) => Class::Journal,
            Ok(0..=1 | 3..=10) => Class::Metadata,
            Ok(inode) => {
                expected.files.entry(inode).or_default().plus(held(block));
                Class::File
            }
            Err(_) if free.contains(&block) => Class::Free,
            Err(_) => Class::Metadata,
        };
        expected.classes.entry(class).or_default().plus(held(block));
    }
    let inodes: BTreeSet<u64> = expected.files.keys().copied().collect();
    let mut seen = BTreeSet::new();
    for line in ask(image, "ncheck", &inodes) {
        let (inode, path) = line.split_once('\t').unwrap();
        let (inode, path) = (inode.trim().parse::<u64>().unwrap(), path.replace("//", "/"));
        if !seen.insert(inode) {
            continue;
        }
        let parts = path.match_indices('/').map(|(at, _)| if at == 0 { "/" } else { &path[..at] });
        for directory in parts.collect::<BTreeSet<_>>() {
            let sum = expected.directories.entry(directory.to_owned()).or_default();
            sum.plus(expected.files[&inode]);
        }
    }
    if let Some(root) = expected.files.get(&2) {
        expected.directories.entry("/".to_owned()).or_default().plus(*root);
    }
    expected
}

/// Compares all that was found with what `debugfs` says. Hard links are left out: both take the first name they find.
fn compare(found: &Contents, expected: &Expected, told: &str) {
    assert_eq!(found.classes, expected.classes, "{told}: {:?}", found.partitions);
    let directories: BTreeMap<String, Held> = found
        .directories
        .iter()
        .map(|item| (String::from_utf8(item.path.clone().unwrap()).unwrap(), item.held))
        .collect();
    for (path, held) in &expected.directories {
        let its = directories.get(path);
        // Changed blocks of a directory itself are in its sum, and it has no line of its own among the files.
        assert!(its.is_some_and(|its| its.total_bytes() >= held.total_bytes()), "{told}: {path}");
    }
    assert_eq!(directories.get("/"), expected.directories.get("/"), "{told}");
    let is_directory: BTreeSet<u64> = found.directories.iter().map(|item| item.id).collect();
    let files: BTreeMap<u64, Held> = found.files.iter().map(|item| (item.id, item.held)).collect();
    let of_files = expected.files.iter().filter(|(id, _)| !is_directory.contains(id));
    let of_files: BTreeMap<u64, Held> = of_files.map(|(id, held)| (*id, *held)).collect();
    assert_eq!(files, of_files, "{told}");
    assert_eq!(found.files_total, files.len() as u64, "{told}");
}

/// Writes, overwrites and removes files.
fn change(at: &Path) {
    let logs = at.join("var/log");
    std::fs::create_dir_all(&logs).unwrap();
    for number in 0..200usize {
        std::fs::write(at.join(format!("file {number}")), vec![number as u8; number * 97]).unwrap();
    }
    std::fs::write(logs.join("app.log"), vec![7; 5_000_000]).unwrap();
    std::fs::write(logs.join("gone.log"), vec![8; 3_000_000]).unwrap();
    sync(at);
    std::fs::remove_file(logs.join("gone.log")).unwrap();
    for number in (0..200).step_by(3) {
        std::fs::remove_file(at.join(format!("file {number}"))).unwrap();
    }
    // In pieces, so that its map has blocks of its own.
    let many = std::fs::File::create(logs.join("in pieces")).unwrap();
    for piece in 0..900u64 {
        std::os::unix::fs::FileExt::write_all_at(&many, &[9; 100], piece * 8192).unwrap();
    }
    sync(at);
}

#[test]
fn changed_blocks_have_the_owners_that_debugfs_names() {
    let variants: [&[&str]; 7] = [
        &["-t", "ext4"],
        &["-t", "ext4", "-b", "1024"],
        &["-t", "ext4", "-b", "2048", "-O", "^metadata_csum,^64bit"],
        &["-t", "ext4", "-O", "inline_data,ea_inode", "-I", "256"],
        &["-t", "ext4", "-O", "^flex_bg,^resize_inode,meta_bg"],
        &["-t", "ext3", "-b", "1024"],
        &["-t", "ext2"],
    ];
    std::thread::scope(|scope| {
        for variant in variants {
            scope.spawn(move || {
                let dir = tempfile::tempdir().unwrap();
                let (image, before) = (dir.path().join("image"), dir.path().join("before"));
                let path = image.to_str().unwrap();
                run("mke2fs", &[&["-q", "-F"], variant, &[path, "96M"]].concat());
                {
                    let mount = Mount::new(&image, "loop,barrier=0");
                    std::fs::create_dir_all(mount.0.join("usr/share")).unwrap();
                    for number in 0..100 {
                        let file = mount.0.join(format!("usr/share/{number}"));
                        std::fs::write(file, vec![1; 30_000]).unwrap();
                    }
                }
                std::fs::copy(&image, &before).unwrap();
                change(&Mount::new(&image, "loop,barrier=0").0);
                let blocks = changed_blocks(&before, &image);
                assert!(blocks.len() > 2000, "{variant:?}: {}", blocks.len());
                let found = scanned(&image, &changed(&blocks)).unwrap();
                compare(&found, &expected(&image, &blocks), &format!("{variant:?}"));
                assert_eq!(found.held.total_bytes(), (blocks.len() * BLOCK) as u64);
                // The file that was removed is there to be trimmed.
                assert!(found.free[&0].total_bytes() >= 2_900_000, "{variant:?}: {:?}", found.free);
            });
        }
    });
}

#[test]
fn what_only_the_journal_says_counts() {
    let dir = tempfile::tempdir().unwrap();
    let mut journals_that_mattered = 0;
    for options in [&["-b", "4096"][..], &["-b", "1024"], &["-O", "^metadata_csum,^64bit"]] {
        let (image, before, cut) =
            (dir.path().join("image"), dir.path().join("before"), dir.path().join("cut"));
        let arguments = [&["-q", "-F", "-t", "ext4"], options, &[image.to_str().unwrap(), "96M"]].concat();
        run("mke2fs", &arguments);
        std::fs::copy(&image, &before).unwrap();
        {
            let mount = Mount::new(&image, "loop");
            change(&mount.0);
            // These files are written out and committed. Their metadata stay in the journal.
            std::fs::remove_file(mount.0.join("var/log/in pieces")).unwrap();
            std::fs::create_dir(mount.0.join("late")).unwrap();
            for number in 0..50 {
                let late = std::fs::File::create(mount.0.join(format!("late/{number}"))).unwrap();
                std::io::Write::write_all(&mut &late, &vec![3; 40_000]).unwrap();
                late.sync_all().unwrap();
            }
            // The journal is written and nothing else, as by a power cut just then (EXT4_IOC_SHUTDOWN, with a flush of the log).
            let cut_power = "import fcntl, os, sys; fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587d, (1).to_bytes(4, 'little'))";
            run("python3", &["-c", cut_power, mount.0.to_str().unwrap()]);
            // An unmount would write the blocks to their places.
            std::fs::copy(&image, &cut).unwrap();
        }
        let blocks = changed_blocks(&before, &cut);
        let found = scanned(&cut, &changed(&blocks)).unwrap();
        // Without its journal it is another one.
        let mut bytes = std::fs::read(&cut).unwrap();
        assert_eq!(bytes[1024 + 0x60] & 4, 4, "it was unmounted");
        bytes[1024 + 0x60] &= !4;
        let without = dir.path().join("without");
        std::fs::write(&without, bytes).unwrap();
        let classes = scanned(&without, &changed(&blocks)).map(|contents| contents.classes);
        journals_that_mattered += usize::from(classes.as_ref().ok() != Some(&found.classes));
        // e2fsck replays it, and debugfs then says whose the blocks are.
        let replayed = dir.path().join("replayed");
        std::fs::copy(&cut, &replayed).unwrap();
        run("e2fsck", &["-p", "-E", "journal_only", replayed.to_str().unwrap()]);
        compare(&found, &expected(&replayed, &blocks), &format!("{options:?}"));
        let log = found.files.iter().find(|item| item.path.as_deref() == Some(b"/var/log/app.log"));
        assert!(log.unwrap().held.total_bytes() >= 5_000_000 - 1024, "{log:?}");
        let late = found.directories.iter().find(|item| item.path.as_deref() == Some(b"/late"));
        assert!(late.unwrap().held.total_bytes() >= 50 * 40_000, "{late:?}");
    }
    assert!(journals_that_mattered > 0, "everything was in its place already");
}
