//! XFS of several features, compared with `xfs_db`: the owner of blocks, and the paths of their files.
//!
//! `mkfs.xfs` fills a volume from a list of files, so nothing is mounted.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use headwater_filesystems::{Bytes, Kind, Owner, Owners, Partition, ReadAt, Visits, identify, open_for_scan};
use headwater_testkit::output;

const SIZE_BYTES: u64 = 320 << 20;
/// How many blocks are compared that begin a run, and how many of all blocks.
const ASKED: usize = 1500;

/// Features of volumes.
const FEATURES: [&[&str]; 5] = [
    &[],
    &["-m", "crc=0"],
    &["-b", "size=1024", "-n", "size=4096", "-d", "agcount=3"],
    &["-m", "rmapbt=0,reflink=0,finobt=0", "-i", "size=1024,sparse=0"],
    &["-b", "size=2048", "-i", "size=512,nrext64=0", "-m", "rmapbt=1"],
];

/// The list of files that a volume is made with: deep and wide directories, long names, small and large files, links.
fn files(dir: &Path) -> String {
    let source = |name: &str, len: usize| {
        let path = dir.join(name);
        std::fs::write(&path, vec![b'x'; len]).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (empty, small, large) = (source("empty", 0), source("small", 5000), source("large", 9 << 20));
    let mut list = "/dev/null\n0 0\nd--755 0 0\n".to_owned();
    let mut line = |text: String| writeln!(list, "{text}").unwrap();
    line(format!("large ---644 0 0 {large}"));
    line("link l--777 0 0 large".to_owned());
    line(format!("far l--777 0 0 {}", "there/".repeat(100)));
    for directory in 0..6 {
        line(format!("directory-{directory} d--755 0 0"));
        for file in 0..[3, 40, 400, 1500, 1, 0][directory] {
            let name = format!("{file}-{}", "n".repeat(file % 200));
            line(format!("{name} ---644 0 0 {}", if file % 3 == 0 { &small } else { &empty }));
        }
        line("below d--755 0 0".to_owned());
        line(format!("file ---644 0 0 {small}"));
        line("$".to_owned());
        line("$".to_owned());
    }
    line("$".to_owned());
    list
}

fn run(program: &str, arguments: &[&str]) {
    let done = output("xfsprogs", Command::new(program).args(arguments));
    let errors = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{program} {arguments:?}: {errors}");
}

/// What `xfs_db` says of blocks: `type data inode 131 directory-1/file`.
fn asked(image: &Path, blocks: &[u64]) -> Vec<String> {
    let mut command = Command::new("xfs_db");
    command.args(["-r", "-c", "blockget -n"]);
    for block in blocks {
        command.args(["-c", &format!("fsblock {block}"), "-c", "blockuse -n"]);
    }
    let output = output("xfsprogs", command.arg(image));
    let output = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = output.lines().filter_map(|line| line.split_once(" type ").map(|(_, said)| said.to_owned()));
    said.collect()
}

/// The owner that `xfs_db` means.
fn owner_of(said: &str, paths: &Owners) -> Option<Owner> {
    let mut words = said.split(' ');
    let kind = words.next().unwrap();
    match kind {
        "log" => Some(Owner::Journal),
        "data" | "dir" | "attr" | "symlink" | "btbmapa" | "btbmapd" => {
            let inode = words.nth(1).and_then(|inode| inode.parse().ok()).unwrap_or_else(|| panic!("{said}"));
            if let Some(path) = words.next() {
                let own = paths.path(inode).map(|path| String::from_utf8(path).unwrap());
                // The root has no name there.
                let expected = format!("/{}", path.trim_start_matches(['.', '/']));
                assert_eq!(own.as_deref(), Some(&*expected), "{said}");
            }
            Some(Owner::File(inode))
        }
        "free1" | "free2" => None,
        _ => Some(Owner::Metadata),
    }
}

#[test]
fn owners_of_blocks_are_those_of_xfs_db() {
    for features in FEATURES {
        let dir = tempfile::tempdir().unwrap();
        let (image, list) = (dir.path().join("xfs"), dir.path().join("list"));
        std::fs::write(&list, files(dir.path())).unwrap();
        std::fs::File::create(&image).unwrap().set_len(SIZE_BYTES).unwrap();
        let (image_name, list_name) = (image.to_str().unwrap(), list.to_str().unwrap());
        run("mkfs.xfs", &[&["-q", "-f", "-p", list_name], features, &[image_name]].concat());

        let disk: Arc<dyn ReadAt> = Arc::new(std::fs::read(&image).unwrap());
        let whole = Partition { number: 0, offset_bytes: 0, len_bytes: SIZE_BYTES };
        let mut bytes = Bytes::new(disk, &whole);
        assert_eq!(identify(&mut bytes).unwrap().unwrap().kind, Kind::Xfs);
        let mut head = [0; 512];
        bytes.read(0, &mut head).unwrap();
        let at = |place: usize| u64::from(u32::from_be_bytes(head[place..place + 4].try_into().unwrap()));
        let (block_bytes, group_blocks, group_bits) = (at(4), at(84), head[124]);
        let mut xfs = open_for_scan(bytes).unwrap();
        let owners = Owners::of_scan(&mut *xfs, &mut Visits::new(|| false)).unwrap();
        assert_eq!((owners.unreadable(), owners.overlapping_bytes()), ((0, None), 0), "{features:?}");

        // Blocks all over the volume, and the first one of each run.
        let all = SIZE_BYTES / block_bytes;
        let step = (all / ASKED as u64).max(1);
        let mut blocks: Vec<u64> = (0..all).step_by(step as usize).collect();
        let runs = owners.runs();
        let every = (runs.len() / ASKED).max(1);
        blocks.extend(runs.iter().step_by(every).map(|run| run.bytes.start / block_bytes));
        blocks.retain(|block| *block < u64::from_be_bytes(head[8..16].try_into().unwrap()));
        let numbers: Vec<u64> = blocks
            .iter()
            .map(|block| ((block / group_blocks) << group_bits) | (block % group_blocks))
            .collect();
        let said = asked(&image, &numbers);
        assert_eq!(said.len(), blocks.len(), "{features:?}");
        for (block, said) in blocks.iter().zip(&said) {
            let range = block * block_bytes..(block + 1) * block_bytes;
            let own = owners.within(range).next().map(|run| run.owner);
            assert_eq!(own, owner_of(said, &owners), "block {block} of {features:?}: {said}");
        }
    }
}
