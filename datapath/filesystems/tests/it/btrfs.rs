//! Btrfs of several features, compared with what is in the blocks, and with `btrfs inspect-internal`.
//!
//! `mkfs.btrfs` fills a volume from a directory, so nothing is mounted. Each block of each file has the file's path, so that the owner of
//! a block is in the block.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use headwater_filesystems::{Bytes, Kind, Owner, Owners, Partition, ReadAt, Visits, identify, open_for_scan};
use headwater_testkit::output;

const SIZE_BYTES: u64 = 256 << 20;
const BLOCK: usize = 4096;
const MARK: &[u8] = b"a block of ";

/// Features of volumes, and in how many places a block of a tree is.
const FEATURES: [(&[&str], u64); 4] = [
    (&[], 2),
    (&["-n", "4096", "-m", "single"], 1),
    (&["-M"], 1),
    (&["--csum", "xxhash", "-n", "65536", "-O", "^no-holes"], 2),
];

/// Makes a file of so many blocks.
fn make(root: &Path, path: &str, blocks: usize) {
    let mut block = [MARK, path.as_bytes(), b"\n"].concat();
    block.resize(BLOCK, b'x');
    let target = root.join(path.trim_start_matches('/'));
    std::fs::create_dir_all(target.parent().unwrap()).unwrap();
    std::fs::write(target, block.repeat(blocks)).unwrap();
}

fn run(program: &str, arguments: &[&str]) -> String {
    let done = output("btrfs-progs", Command::new(program).args(arguments));
    let errors = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{program} {arguments:?}: {errors}");
    String::from_utf8_lossy(&done.stdout).into_owned()
}

/// The path that a block of a file has.
fn path_in(block: &[u8]) -> Option<&[u8]> {
    block.strip_prefix(MARK)?.split(|byte| *byte == b'\n').next()
}

#[test]
fn owners_of_blocks_are_those_that_the_blocks_name() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    make(&root, "/large", 5000);
    make(&root, "/deep/deeper/deepest/file", 3);
    for number in 0..700 {
        make(&root, &format!("/many/{number}-{}", "n".repeat(number % 200)), 1 + number % 5);
    }
    std::fs::write(root.join("inline"), b"short").unwrap();
    std::fs::hard_link(root.join("large"), root.join("many/another name")).unwrap();
    for (features, places) in FEATURES {
        let image = dir.path().join("btrfs");
        std::fs::File::create(&image).unwrap().set_len(SIZE_BYTES).unwrap();
        let (root, name) = (root.to_str().unwrap(), image.to_str().unwrap());
        run("mkfs.btrfs", &[&["-q", "-f", "--rootdir", root], features, &[name]].concat());

        let disk: Arc<dyn ReadAt> = Arc::new(std::fs::read(&image).unwrap());
        let whole = Partition { number: 0, offset_bytes: 0, len_bytes: SIZE_BYTES };
        let mut bytes = Bytes::new(disk, &whole);
        assert_eq!(identify(&mut bytes).unwrap().unwrap().kind, Kind::Btrfs);
        let mut btrfs = open_for_scan(bytes).unwrap();
        let owners = Owners::of_scan(&mut *btrfs, &mut Visits::new(|| false)).unwrap();
        assert_eq!((owners.unreadable(), owners.overlapping_bytes()), ((0, None), 0), "{features:?}");

        let contents = std::fs::read(&image).unwrap();
        let mut of_files = 0;
        for (number, block) in contents.chunks(BLOCK).enumerate() {
            let range = (number * BLOCK) as u64..((number + 1) * BLOCK) as u64;
            let own = owners.within(range).next().map(|run| run.owner);
            let path = if let Some(Owner::File(id)) = own { owners.path(id) } else { None };
            let is_large = path.as_deref() == Some(b"/many/another name");
            let path = if is_large { Some(b"/large".to_vec()) } else { path };
            assert_eq!(path.as_deref(), path_in(block), "block {number} of {features:?}: {own:?}");
            of_files += u64::from(path.is_some());
        }
        assert_eq!(of_files, 5000 + 3 + (0..700).map(|number| 1 + number % 5).sum::<u64>());

        // Blocks of trees, besides the beginning of the disk and a copy of the superblock.
        let dump = run("btrfs", &["inspect-internal", "dump-tree", "-t", "extent", name]);
        let is_item = |line: &&str| line.trim_start().starts_with("item ") && line.contains("METADATA_ITEM");
        let blocks = dump.lines().filter(is_item).count() as u64;
        let node = run("btrfs", &["inspect-internal", "dump-super", name]);
        let node = node.lines().find_map(|line| line.strip_prefix("nodesize")).unwrap().trim().parse::<u64>();
        let of_trees: u64 = owners
            .within(1 << 20..SIZE_BYTES)
            .filter(|run| run.owner == Owner::Metadata)
            .map(|run| run.bytes.end - run.bytes.start)
            .sum();
        assert!(blocks > 5, "{dump}");
        assert_eq!(of_trees, blocks * node.unwrap() * places + BLOCK as u64, "{features:?}");
    }
}
