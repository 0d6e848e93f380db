//! ext2, ext3 and ext4 of random features, compared with debugfs, dumpe2fs and a kernel mount.
//!
//! A volume is made by mke2fs and filled through a loop mount, with files removed in between so that it is fragmented. The
//! number of volumes is that of `HEADWATER_VOLUMES`, and 12 without it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use headwater_filesystems::{
    Bytes, FileSystem, Kind, Node, NodeKind, Owner, Owners, Partition, Visits, open,
};
use headwater_testkit::{output, wait_until};

use crate::ntfs::set_attribute;

const VOLUMES: u64 = 12;
/// How many volumes are made at a time.
const WORKERS: u64 = 4;
const ICHECKED: usize = 400;

/// Numbers that look random (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }

    fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).env("MKE2FS_SKIP_PROGRESS", "1").output();
    let output =
        output.unwrap_or_else(|e| panic!("{program} is needed (apt-get install e2fsprogs mount): {e}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {text}{errors}");
    text
}

/// A file that is mounted until this is dropped.
struct Mount(PathBuf);

impl Mount {
    fn new(image: &Path, options: &str) -> Self {
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

/// Makes a file system with random features. Returns what mke2fs was given.
fn make(image: &Path, random: &mut Random) -> Vec<String> {
    let kind = random.one(&["ext2", "ext3", "ext4", "ext4", "ext4"]);
    let block = random.one(&["1024", "2048", "4096"]);
    let mut features: Vec<String> = vec![];
    let maybe = |random: &mut Random, feature: &str| match random.below(2) {
        0 => format!("^{feature}"),
        _ => feature.to_owned(),
    };
    for feature in ["dir_index", "filetype", "sparse_super"] {
        features.push(maybe(random, feature));
    }
    let inode = random.one(&["128", "256"]);
    if kind == "ext4" {
        for feature in
            ["extent", "flex_bg", "has_journal", "large_dir", "metadata_csum", "huge_file", "ea_inode"]
        {
            features.push(maybe(random, feature));
        }
        let has_extents = features.iter().any(|feature| feature == "extent");
        if has_extents {
            features.push(maybe(random, "64bit"));
        } else {
            features.push("^64bit".to_owned());
        }
        if inode == "256" {
            features.push(maybe(random, "inline_data"));
        }
        if has_extents && random.below(4) == 0 {
            features.push("bigalloc".to_owned());
        }
    }
    features.push(
        random
            .one(&["^resize_inode,meta_bg", "resize_inode", "^resize_inode", "^resize_inode,sparse_super2"])
            .to_owned(),
    );
    if features.iter().any(|feature| feature == "^sparse_super") || features.iter().any(|f| f == "bigalloc") {
        features.pop();
        features.push("^resize_inode".to_owned());
    }
    let size = if block == "4096" { "96M" } else { random.one(&["24M", "40M"]) };
    let groups = match block {
        "1024" => random.one(&["8192", "2048", "1024"]),
        _ => random.one(&["8192", "4096"]),
    };
    let mut arguments: Vec<String> =
        ["-q", "-F", "-t", kind, "-b", block, "-I", inode, "-O"].map(str::to_owned).to_vec();
    arguments.push(features.join(","));
    if !features.iter().any(|feature| feature == "bigalloc") {
        arguments.extend(["-g".to_owned(), groups.to_owned()]);
    }
    arguments.extend([image.to_str().unwrap().to_owned(), size.to_owned()]);
    let borrowed: Vec<&str> = arguments.iter().map(String::as_str).collect();
    run("mke2fs", &borrowed);
    arguments
}

/// Fills a mounted file system, and removes some of it again.
fn fill(at: &Path, random: &mut Random) {
    use std::io::{Seek, SeekFrom, Write};
    let mut directories = vec![at.to_owned()];
    let mut files: Vec<PathBuf> = Vec::new();
    for step in 0..300 {
        let inside = directories[random.below(directories.len() as u64) as usize].clone();
        let name = format!("{step}-{}", "n".repeat(random.below(90) as usize));
        let path = inside.join(name);
        match random.below(12) {
            0 => {
                std::fs::create_dir(&path).unwrap();
                directories.push(path);
            }
            1 => std::os::unix::fs::symlink("t".repeat(1 + random.below(900) as usize), &path).unwrap(),
            2 if !files.is_empty() => {
                let linked = &files[random.below(files.len() as u64) as usize];
                std::fs::hard_link(linked, &path).unwrap();
            }
            3 | 4 if !files.is_empty() => {
                let gone = files.swap_remove(random.below(files.len() as u64) as usize);
                std::fs::remove_file(gone).unwrap();
            }
            5 if !files.is_empty() => {
                // In pieces between others, and beyond its end.
                let file = &files[random.below(files.len() as u64) as usize];
                let mut file = std::fs::OpenOptions::new().write(true).open(file).unwrap();
                for _ in 0..1 + random.below(20) {
                    file.seek(SeekFrom::Start(random.below(3 << 20))).unwrap();
                    file.write_all(&vec![step as u8; 1 + random.below(6000) as usize]).unwrap();
                }
            }
            _ => {
                let len = random.one(&[0, 30, 100, 5000, 40_000, 200_000]);
                let content: Vec<u8> = (0..len).map(|n| (n * 7 + step) as u8).collect();
                std::fs::write(&path, content).unwrap();
                files.push(path);
            }
        }
        if random.below(8) == 0 {
            sync(at);
        }
    }
    let many = at.join("many");
    std::fs::create_dir(&many).unwrap();
    for number in 0..200 + random.below(600) {
        std::fs::write(many.join(format!("a file in a large directory {number}")), b"").unwrap();
    }
}

/// Writes what is cached, so that later files lie elsewhere.
fn sync(at: &Path) {
    rustix::fs::syncfs(std::fs::File::open(at).unwrap()).unwrap();
}

fn opened(image: &Path) -> Box<dyn FileSystem> {
    let bytes = std::fs::read(image).unwrap();
    let partition = Partition { number: 0, offset_bytes: 0, len_bytes: bytes.len() as u64 };
    open(Bytes::new(std::sync::Arc::new(bytes), &partition)).unwrap()
}

fn visits() -> Visits {
    Visits::new(|| false)
}

/// All entries by path, read by directory.
fn walked(file_system: &mut dyn FileSystem) -> BTreeMap<Vec<u8>, Node> {
    let mut found = BTreeMap::new();
    let mut left = vec![file_system.root()];
    while let Some(directory) = left.pop() {
        for node in file_system.list(&directory, &mut visits()).unwrap().into_values() {
            if node.kind == NodeKind::Directory {
                left.push(node.clone());
            }
            assert!(found.insert(node.path.clone(), node).is_none());
        }
    }
    found
}

fn contents(file_system: &mut dyn FileSystem, node: &Node) -> Vec<u8> {
    let mut found = Vec::new();
    let mut piece = vec![0; 60_000];
    loop {
        let len = file_system.read(node, found.len() as u64, &mut piece).unwrap();
        found.extend_from_slice(&piece[..len]);
        if len < piece.len() {
            return found;
        }
    }
}

/// Compares everything that is in a mounted directory with what was read. Returns how many entries there are.
fn compare_with_mount(
    at: &Path,
    path: &str,
    file_system: &mut dyn FileSystem,
    read: &BTreeMap<Vec<u8>, Node>,
) -> usize {
    let mut count = 0;
    for entry in std::fs::read_dir(at).unwrap() {
        let entry = entry.unwrap();
        let path = format!("{path}/{}", entry.file_name().to_str().unwrap());
        let node = read.get(path.as_bytes()).unwrap_or_else(|| panic!("{path} is missing"));
        let metadata = entry.path().symlink_metadata().unwrap();
        let modified = u128::from(metadata.mtime().cast_unsigned()) << 32 | metadata.mtime_nsec() as u128;
        let expected = (metadata.ino(), metadata.len(), modified, u128::from(metadata.mode()));
        assert_eq!((node.id, node.size_bytes, node.modified, node.attributes & 0xffff), expected, "{path}");
        count += 1;
        if metadata.is_dir() {
            count += compare_with_mount(&entry.path(), &path, file_system, read);
        } else if metadata.is_symlink() {
            let target = std::fs::read_link(entry.path()).unwrap();
            assert_eq!(file_system.link(node).unwrap(), target.to_str().unwrap().as_bytes(), "{path}");
        } else {
            assert!(contents(file_system, node) == std::fs::read(entry.path()).unwrap(), "{path}");
        }
    }
    count
}

/// A field of dumpe2fs.
fn field(shown: &str, name: &str) -> u64 {
    let line = shown.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("no {name}"));
    line.trim().parse().unwrap()
}

/// Compares which blocks are free with the bitmaps, as dumpe2fs shows them.
fn compare_free_blocks(image: &Path, owners: &Owners) {
    let shown = run("dumpe2fs", &[image.to_str().unwrap()]);
    let block_bytes = field(&shown, "Block size:");
    let cluster = shown.lines().find_map(|line| line.strip_prefix("Cluster size:"));
    let cluster_bytes = cluster.map_or(block_bytes, |bytes| bytes.trim().parse().unwrap());
    let ratio = cluster_bytes / block_bytes;
    let mut free = BTreeSet::new();
    for line in shown.lines().filter_map(|line| line.strip_prefix("  Free blocks: ")) {
        for range in line.split(", ").filter(|range| !range.is_empty()) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let number = |text: &str| text.trim().parse::<u64>().unwrap() / ratio;
            free.extend(number(first)..=number(last));
        }
    }
    let mut owned = BTreeSet::new();
    for run in owners.runs() {
        owned.extend(run.bytes.start / cluster_bytes..run.bytes.end.div_ceil(cluster_bytes));
    }
    let all: BTreeSet<u64> = (0..field(&shown, "Block count:").div_ceil(ratio)).collect();
    let expected: BTreeSet<u64> = all.difference(&owned).copied().collect();
    let (more, fewer): (Vec<_>, Vec<_>) =
        (free.difference(&expected).take(5).collect(), expected.difference(&free).take(5).collect());
    assert!(free == expected, "free but owned: {more:?}; neither free nor owned: {fewer:?}");
}

/// Compares the owners of random blocks with `debugfs icheck`, and their paths with `ncheck`.
fn compare_owners(image: &Path, owners: &Owners, block_bytes: u64, random: &mut Random) {
    let blocks: Vec<u64> =
        (0..ICHECKED).map(|_| random.below(std::fs::metadata(image).unwrap().len() / block_bytes)).collect();
    let list: Vec<String> = blocks.iter().map(u64::to_string).collect();
    let shown = run("debugfs", &["-R", &format!("icheck {}", list.join(" ")), image.to_str().unwrap()]);
    let mut inodes = BTreeSet::new();
    for line in shown.lines().skip(1) {
        let (block, inode) = line.split_once('\t').unwrap();
        let block: u64 = block.parse().unwrap();
        let found: Vec<Owner> =
            owners.within(block * block_bytes..(block + 1) * block_bytes).map(|run| run.owner).collect();
        match inode.parse::<u64>() {
            Ok(8) => assert_eq!(found, [Owner::Journal], "block {block}"),
            Ok(inode @ (0..=1 | 3..=10)) => assert_eq!(found, [Owner::Metadata], "block {block} of {inode}"),
            Ok(inode) => {
                // The inode of a list of orphans has a number like files have.
                assert!(
                    found == [Owner::File(inode)] || found == [Owner::Metadata],
                    "block {block} of {inode}"
                );
                inodes.insert(inode);
            }
            Err(_) => {
                assert!(found.is_empty() || found == [Owner::Metadata], "block {block}: {inode} {found:?}")
            }
        }
    }
    let list: Vec<String> = inodes.iter().take(100).map(u64::to_string).collect();
    let shown = run("debugfs", &["-R", &format!("ncheck {}", list.join(" ")), image.to_str().unwrap()]);
    let mut paths: HashMap<u64, Vec<String>> = HashMap::new();
    for line in shown.lines().skip(1) {
        let (inode, path) = line.split_once('\t').unwrap();
        paths.entry(inode.trim().parse().unwrap()).or_default().push(path.replace("//", "/"));
    }
    for (inode, paths) in paths {
        let path = String::from_utf8(owners.path(inode).unwrap()).unwrap();
        assert!(paths.contains(&path), "inode {inode}: {path}, {paths:?}");
    }
}

/// Attributes that need an inode of their own, where the file system allows this.
fn set_large_attributes(at: &Path) {
    for number in 0..3u8 {
        let path = at.join(format!("with attributes {number}"));
        std::fs::write(&path, "x").unwrap();
        assert!(set_attribute(&path, "user.large", &vec![number; 9000]));
    }
}

/// Switches features on that not each kernel writes to, or mounts.
fn tune(image: &Path, feature: &str) {
    run("tune2fs", &["-O", feature, image.to_str().unwrap()]);
}

fn volume(seed: u64) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let made = make(&image, &mut random);
    let told = format!("volume {seed}: mke2fs {}", made.join(" "));
    let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        {
            // Without barriers, because a flush would wait for the disk that the image is on.
            let mount = Mount::new(&image, "loop,barrier=0");
            fill(&mount.0, &mut random);
            if made.iter().any(|argument| argument.split(',').any(|feature| feature == "ea_inode")) {
                set_large_attributes(&mount.0);
            }
        }
        let is_ext4 = made.iter().any(|argument| argument == "ext4");
        if is_ext4 && random.below(2) == 0 {
            tune(&image, "quota");
        }
        let mut file_system = opened(&image);
        assert_eq!(file_system.remark(), None);
        let read = walked(&mut *file_system);
        let mount = Mount::new(&image, "loop,ro,noload");
        assert_eq!(compare_with_mount(&mount.0, "", &mut *file_system, &read), read.len());
        drop(mount);
        if is_ext4 && random.below(2) == 0 {
            tune(&image, "casefold");
            file_system = opened(&image);
            assert!(walked(&mut *file_system) == read);
        }
        let owners = Owners::of(&mut *file_system, &mut visits()).unwrap();
        assert_eq!((owners.unreadable(), owners.overlapping_bytes()), ((0, None), 0));
        let shown = run("dumpe2fs", &["-h", image.to_str().unwrap()]);
        compare_free_blocks(&image, &owners);
        compare_owners(&image, &owners, field(&shown, "Block size:"), &mut random);
        for (path, node) in read.iter().filter(|(_, node)| node.kind == NodeKind::Directory) {
            assert_eq!(owners.path(node.id).as_ref(), Some(path));
        }
        let named: u64 = read.len() as u64;
        assert_eq!(owners.names(), named);
    }));
    if let Err(why) = checked {
        let why = why.downcast_ref::<String>().cloned().unwrap_or_default();
        panic!("{told}: {why}");
    }
}

#[test]
fn random_volumes_read_like_the_kernel_and_debugfs_read_them() {
    let volumes = std::env::var("HEADWATER_VOLUMES").map_or(VOLUMES, |text| text.parse().unwrap());
    // Most of the time is waiting for programs and mounts.
    std::thread::scope(|scope| {
        for worker in 1..=WORKERS {
            scope.spawn(move || (worker..=volumes).step_by(WORKERS as usize).for_each(volume));
        }
    });
}

#[test]
fn kinds_are_told_by_their_features() {
    let dir = tempfile::tempdir().unwrap();
    for (name, kind) in [("ext2", Kind::Ext2), ("ext3", Kind::Ext3), ("ext4", Kind::Ext4)] {
        let image = dir.path().join(name);
        run("mke2fs", &["-q", "-F", "-t", name, image.to_str().unwrap(), "8M"]);
        assert_eq!(opened(&image).kind(), kind);
    }
}

#[test]
fn a_journal_that_was_not_replayed_is_read_over_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let mut journals_that_mattered = 0;
    for options in [&["-O", "^64bit"][..], &["-O", "^metadata_csum"], &["-b", "1024"]] {
        let (image, cut) = (dir.path().join("image"), dir.path().join("cut"));
        let arguments = [&["-q", "-F", "-t", "ext4"], options, &[image.to_str().unwrap(), "64M"]].concat();
        run("mke2fs", &arguments);
        {
            let mount = Mount::new(&image, "loop,data=journal");
            std::fs::write(mount.0.join("before"), b"before").unwrap();
            // The first bytes of a block of a journal, which it keeps in another way.
            std::fs::write(mount.0.join("escaped"), [b"\xc0\x3b\x39\x98", &[7; 9000][..]].concat()).unwrap();
            sync(&mount.0);
            std::fs::remove_file(mount.0.join("before")).unwrap();
            std::fs::create_dir(mount.0.join("directory")).unwrap();
            std::fs::write(mount.0.join("directory/after"), vec![9; 70_000]).unwrap();
            // The journal is written and nothing else, as by a power cut just then (EXT4_IOC_SHUTDOWN, with a flush of the log).
            let cut_power = "import fcntl, os, sys; fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587d, (1).to_bytes(4, 'little'))";
            run("python3", &["-c", cut_power, mount.0.to_str().unwrap()]);
            // An unmount would write the blocks to their places.
            std::fs::copy(&image, &cut).unwrap();
        }
        let mut file_system = opened(&cut);
        assert_eq!(file_system.remark(), None);
        let read = walked(&mut *file_system);
        let owners = Owners::of(&mut *file_system, &mut visits()).unwrap();
        assert_eq!((owners.unreadable(), owners.overlapping_bytes()), ((0, None), 0));
        // Without its journal it is another one.
        let mut bytes = std::fs::read(&cut).unwrap();
        assert_eq!(bytes[1024 + 0x60] & 4, 4, "it was unmounted");
        bytes[1024 + 0x60] &= !4;
        let without = dir.path().join("without");
        std::fs::write(&without, bytes).unwrap();
        let mut without = opened(&without);
        let of_root = without.root();
        let differs = match without.list(&of_root, &mut visits()) {
            Ok(entries) => !entries.contains_key(&b"directory"[..]),
            Err(_) => true,
        };
        // The kernel may have put everything in its place already, but hardly each time.
        journals_that_mattered += usize::from(differs);
        // The kernel replays it.
        let mount = Mount::new(&cut, "loop");
        assert_eq!(compare_with_mount(&mount.0, "", &mut *file_system, &read), read.len());
    }
    assert!(journals_that_mattered > 0, "everything was in its place already");
}
