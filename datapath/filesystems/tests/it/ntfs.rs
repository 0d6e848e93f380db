//! NTFS made and changed by ntfs-3g, compared with what ntfs-3g and its tools read.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use headwater_block::IoError;
use headwater_filesystems::ntfs::Ntfs;
use headwater_filesystems::{
    Bytes, Entries, FileSystem, Node, NodeKind, Owner, Partition, ReadAt, Scanned, Visits,
};
use headwater_testkit::{output, run, succeed, wait_until};

/// A volume in a file.
pub(crate) struct Image(tempfile::TempDir);

struct Disk(File, u64);

impl ReadAt for Disk {
    fn len_bytes(&self) -> u64 {
        self.1
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<(), IoError> {
        self.0.read_exact_at(into, at).map_err(|e| IoError::from_os("reading the image", e))
    }
}

impl Image {
    /// A new volume of so many MiB.
    pub(crate) fn new(size_mib: u64, options: &[&str]) -> Self {
        let image = Self(tempfile::tempdir().unwrap());
        fs::create_dir(image.0.path().join("mounted")).unwrap();
        File::create(image.path()).unwrap().set_len(size_mib << 20).unwrap();
        let fixed = ["-q", "-F", "-Q", "-p", "0", "-H", "0", "-S", "0"];
        let mut command = Command::new("mkntfs");
        succeed("ntfs-3g", command.args(fixed).args(options).arg(image.path()));
        image
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.0.path().join("ntfs.img")
    }

    pub(crate) fn text(&self) -> String {
        self.path().to_str().unwrap().to_owned()
    }

    /// Mounts it while `work` is done in it.
    pub(crate) fn mounted<R>(&self, options: &str, work: impl FnOnce(&Path) -> R) -> R {
        let at = self.0.path().join("mounted");
        let options = format!("no_detach,{options}");
        let mut command = Command::new("ntfs-3g");
        command.args(["-o", &options]).arg(self.path()).arg(&at).stderr(Stdio::piped());
        let mut child = command.spawn().expect("ntfs-3g is needed (apt-get install ntfs-3g)");
        let is_mounted = || fs::read_to_string("/proc/self/mounts").unwrap().contains(at.to_str().unwrap());
        wait_until("it is mounted", || is_mounted() || child.try_wait().unwrap().is_some());
        assert!(is_mounted(), "{:?}", child.wait_with_output());
        let done = catch_unwind(AssertUnwindSafe(|| work(&at)));
        // Between its fork and its program, a child of another test has our files open.
        wait_until("it is not busy", || output("mount", Command::new("umount").arg(&at)).status.success());
        assert!(child.wait().unwrap().success());
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    pub(crate) fn reader(&self) -> Ntfs {
        let file = File::open(self.path()).unwrap();
        let len_bytes = file.metadata().unwrap().len();
        let partition = Partition { number: 0, offset_bytes: 0, len_bytes };
        Ntfs::open(Bytes::new(Arc::new(Disk(file, len_bytes)), &partition)).unwrap()
    }

    /// Its first bytes, which have the records of all files.
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        File::open(self.path()).unwrap().take(32 << 20).read_to_end(&mut bytes).unwrap();
        bytes
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        File::options().write(true).open(self.path()).unwrap().write_all_at(bytes, at as u64).unwrap();
    }

    /// The place of the record of the file with this name.
    fn record_of(&self, name: &str) -> usize {
        let bytes = self.bytes();
        let name: Vec<u8> = name.encode_utf16().flat_map(u16::to_le_bytes).collect();
        let is_its = |record: &[u8]| {
            record.starts_with(b"FILE") && record.windows(name.len()).any(|part| part == name)
        };
        // The record of a small directory has the names of its files, too.
        let is_file = |record: &[u8]| is_its(record) && record[22] == 1;
        (0..bytes.len()).step_by(1024).find(|at| is_file(&bytes[*at..*at + 1024])).unwrap()
    }
}

/// Sets an extended attribute: ntfs-3g has streams, DOS names and reparse data as these. `false`: there is no space for it.
pub(crate) fn set_attribute(path: &Path, name: &str, value: &[u8]) -> bool {
    rustix::fs::setxattr(path, name, value, rustix::fs::XattrFlags::empty()).is_ok()
}

pub(crate) fn visits() -> Visits {
    Visits::new(|| false)
}

pub(crate) fn list(ntfs: &mut Ntfs, directory: &Node) -> Entries {
    ntfs.list(directory, &mut visits()).unwrap()
}

pub(crate) fn names(entries: &Entries) -> Vec<String> {
    entries.keys().map(|name| String::from_utf8(name.clone()).unwrap()).collect()
}

pub(crate) fn contents(ntfs: &mut Ntfs, node: &Node) -> Vec<u8> {
    let mut out = vec![0xaa; node.size_bytes as usize];
    let mut at = 0;
    for piece in out.chunks_mut(100_000) {
        assert_eq!(ntfs.read(node, at, piece).unwrap(), piece.len(), "{node:?} at {at}");
        at += piece.len() as u64;
    }
    assert_eq!(ntfs.read(node, at, &mut [0; 10]).unwrap(), 0);
    out
}

fn in_root(ntfs: &mut Ntfs, name: &str) -> Node {
    let root = ntfs.root();
    list(ntfs, &root)[name.as_bytes()].clone()
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    headwater_testkit::random::Rng::new(seed).bytes(len)
}

/// The crate that was used before stopped at the first record: `a /big (0 B)`, or no change at all.
#[test]
fn a_file_whose_runs_are_in_several_records_is_read_whole() {
    let image = Image::new(64, &[]);
    let mut big = Vec::new();
    image.mounted("rw", |at| {
        let mut file = File::options().append(true).create(true).open(at.join("big")).unwrap();
        for number in 0..900 {
            let piece = noise(4096, number);
            file.write_all(&piece).unwrap();
            big.extend(piece);
            fs::write(at.join(format!("x{number}")), noise(4096, 1000 + number)).unwrap();
        }
    });
    let info = run("ntfs-3g", "ntfsinfo", &["-f", "-F", "/big", &image.text()]);
    assert!(info.matches("$DATA (0x80) from mft record").count() > 1, "it is in one record: {info}");
    let mut ntfs = image.reader();
    let before = in_root(&mut ntfs, "big");
    assert_eq!(before.size_bytes, 900 * 4096);
    assert!(contents(&mut ntfs, &before) == big);
    // The same time and the same size, and one other byte.
    image.mounted("rw", |at| {
        let file = File::options().write(true).open(at.join("big")).unwrap();
        let modified = file.metadata().unwrap().modified().unwrap();
        big[2_000_000] ^= 1;
        file.write_all_at(&big[2_000_000..2_000_001], 2_000_000).unwrap();
        file.set_modified(modified).unwrap();
    });
    let mut ntfs = image.reader();
    let after = in_root(&mut ntfs, "big");
    assert_eq!((after.size_bytes, after.modified), (before.size_bytes, before.modified));
    assert!(contents(&mut ntfs, &after) == big);
}

/// With clusters of more than 4 KiB, the numbers of blocks of an index count in 512 bytes.
#[test]
fn directories_are_read_whatever_the_size_of_clusters() {
    for (cluster_bytes, size_mib) in [
        (512, 8),
        (1024, 8),
        (4096, 16),
        (8192, 16),
        (16_384, 16),
        (32_768, 16),
        (65_536, 16),
        (131_072, 32),
        (2 << 20, 512),
    ] {
        let image = Image::new(size_mib, &["-c", &cluster_bytes.to_string()]);
        image.mounted("rw", |at| {
            fs::create_dir(at.join("many")).unwrap();
            for number in 10..70 {
                let name = format!("a name that is long enough {number}");
                fs::write(at.join("many").join(name), number.to_string()).unwrap();
            }
            fs::remove_file(at.join("many/a name that is long enough 33")).unwrap();
        });
        let mut ntfs = image.reader();
        let many = in_root(&mut ntfs, "many");
        let entries = list(&mut ntfs, &many);
        let expected = (10..70).filter(|number| *number != 33);
        let expected: Vec<_> =
            expected.map(|number| format!("a name that is long enough {number}")).collect();
        assert_eq!(names(&entries), expected, "{cluster_bytes}");
        let last = &entries[expected.last().unwrap().as_bytes()];
        assert_eq!(contents(&mut ntfs, last), b"69", "{cluster_bytes}");
        assert_eq!(ntfs.remark(), None);

        // The name of a file whose record is damaged is only in the index now.
        let name = "a name that is long enough 47";
        image.write(image.record_of(name) + 510, b"??");
        let mut ntfs = image.reader();
        let entries = list(&mut ntfs, &many);
        assert_eq!(names(&entries), expected, "{cluster_bytes}");
        let damaged =
            entries.values().filter_map(|node| Some((&node.path, node.fault.as_ref()?.to_string())));
        let damaged: Vec<_> = damaged.collect();
        assert_eq!(damaged.len(), 1, "{cluster_bytes}: {damaged:?}");
        assert_eq!(damaged[0].0, format!("/many/{name}").as_bytes());
        assert!(damaged[0].1.contains("written only partly"), "{damaged:?}");
        let mut unreadable = 0;
        let count = &mut |scanned| {
            unreadable += u32::from(matches!(scanned, Scanned::Unreadable { .. }));
            Ok(())
        };
        ntfs.scan(&mut visits(), count).unwrap();
        assert_eq!(unreadable, 1, "{cluster_bytes}");
    }
}

#[test]
fn a_damaged_index_hides_no_file() {
    let image = Image::new(8, &["-c", "1024"]);
    image.mounted("rw", |at| {
        fs::create_dir(at.join("many")).unwrap();
        (0..300).for_each(|n| fs::write(at.join(format!("many/file {n}")), n.to_string()).unwrap());
    });
    let bytes = image.bytes();
    let root_has: Vec<u8> = "many".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let is_its = |block: &[u8]| block.starts_with(b"INDX") && !block.windows(8).any(|name| name == root_has);
    let blocks = (0..bytes.len() - 4096).step_by(1024).filter(|at| is_its(&bytes[*at..*at + 4096]));
    assert!(blocks.map(|at| image.write(at, b"????")).count() > 5);
    let mut ntfs = image.reader();
    let many = in_root(&mut ntfs, "many");
    let entries = list(&mut ntfs, &many);
    assert_eq!(entries.len(), 300);
    assert_eq!(contents(&mut ntfs, &entries[&b"file 123"[..]]), b"123");
    // Now the names of damaged files are nowhere, so their directories are damaged.
    image.write(image.record_of("file 7") + 510, b"??");
    let mut ntfs = image.reader();
    assert!(in_root(&mut ntfs, "many").fault.is_some());
}

#[test]
fn what_is_only_in_the_log_is_said_to_be_missing() {
    let image = Image::new(8, &["-c", "4096"]);
    assert_eq!(image.reader().remark(), None);
    let layout = run("ntfs-3g", "ntfscluster", &["-f", "-I", "2", &image.text()]);
    let run_of_log = layout.lines().skip_while(|line| !line.contains("VCN")).nth(1).unwrap();
    let log_at = run_of_log.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096;
    // Two restart pages; the second one was written last.
    for (flags, is_open) in [(0u8, true), (2, false)] {
        for (page, lsn, flags) in [(0, 5u8, 2 - flags), (1, 6, flags)] {
            let mut bytes = vec![0; 4096];
            bytes[..8].copy_from_slice(b"RSTR\x1e\0\x09\0");
            bytes[17] = 0x10;
            bytes[24] = 48;
            bytes[30] = 1;
            (bytes[48], bytes[48 + 14]) = (lsn, flags);
            (0..8).for_each(|stride| bytes[stride * 512 + 510] = 1);
            image.write(log_at + page * 4096, &bytes);
        }
        assert_eq!(image.reader().remark().is_some(), is_open, "{flags}");
    }
    // This also sets the flag that has Windows check the volume.
    run("ntfs-3g", "ntfsfix", &[&image.text()]);
    assert!(image.reader().remark().unwrap().contains("not unmounted"));
}

#[test]
fn links_and_what_only_windows_unpacks_are_told_apart() {
    let image = Image::new(16, &["-c", "4096"]);
    let reparse = |tag: u32, data: &[u8]| {
        let head = [&tag.to_le_bytes()[..], &(data.len() as u16).to_le_bytes(), &[0, 0]].concat();
        [&head[..], data].concat()
    };
    image.mounted("rw", |at| {
        fs::create_dir(at.join("mount point")).unwrap();
        let target: Vec<u8> = "\\??\\D:\\da/ta".encode_utf16().flat_map(u16::to_le_bytes).collect();
        let len = target.len() as u8;
        let data = [&[0, 0, len, 0, len + 2, 0, 0, 0][..], &target, &[0, 0, 0, 0]].concat();
        assert!(set_attribute(
            &at.join("mount point"),
            "system.ntfs_reparse_data",
            &reparse(0xa000_0003, &data)
        ));
        fs::write(at.join("system.dll"), "").unwrap();
        assert!(set_attribute(&at.join("system.dll"), "user.WofCompressedData", &noise(9000, 1)));
        let packed = [1, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
        assert!(set_attribute(
            &at.join("system.dll"),
            "system.ntfs_reparse_data",
            &reparse(0x8000_0017, &packed)
        ));
    });
    image.mounted("rw,special_files=wsl", |at| {
        std::os::unix::fs::symlink("../some/where", at.join("wsl")).unwrap();
    });
    let mut ntfs = image.reader();
    let root = ntfs.root();
    let entries = list(&mut ntfs, &root);
    assert_eq!(names(&entries), ["mount point", "system.dll", "system.dll:WofCompressedData", "wsl"]);
    let kinds: Vec<_> = entries.values().map(|node| node.kind).collect();
    assert_eq!(kinds, [NodeKind::Link, NodeKind::Other, NodeKind::File, NodeKind::Link]);
    assert_eq!(ntfs.link(&entries[&b"mount point"[..]]).unwrap(), b"\\??\\D:\\da/ta");
    assert_eq!(ntfs.link(&entries[&b"wsl"[..]]).unwrap(), b"../some/where");
    assert!(contents(&mut ntfs, &entries[&b"system.dll:WofCompressedData"[..]]) == noise(9000, 1));
}

/// The journal of changes is such a stream on a volume of Windows.
#[test]
fn a_stream_in_several_records_is_read_and_owned_by_its_name() {
    let image = Image::new(32, &["-c", "4096"]);
    image.mounted("rw,streams_interface=windows", |at| {
        fs::create_dir(at.join("in")).unwrap();
        fs::write(at.join("in/file"), "contents").unwrap();
        let mut stream = File::create(at.join("in/file:$J")).unwrap();
        for number in 0..700 {
            stream.write_all(&noise(4096, number)).unwrap();
            fs::write(at.join(format!("x{number}")), noise(4096, 1000 + number)).unwrap();
        }
    });
    let expected: Vec<u8> = (0..700).flat_map(|number| noise(4096, number)).collect();
    let mut ntfs = image.reader();
    let directory = in_root(&mut ntfs, "in");
    let entries = list(&mut ntfs, &directory);
    assert_eq!(names(&entries), ["file", "file:$J"]);
    assert_eq!(contents(&mut ntfs, &entries[&b"file"[..]]), b"contents");
    let stream = &entries[&b"file:$J"[..]];
    assert!(contents(&mut ntfs, stream) == expected);
    let (mut owned_bytes, mut found_names) = (0, Vec::new());
    let is_its = |scanned: Scanned| {
        match scanned {
            Scanned::Run { bytes, owner: Owner::File(id) } if id == stream.id => {
                owned_bytes += bytes.end - bytes.start;
            }
            Scanned::Name { id, parent, name } if id == stream.id => found_names.push((parent, name)),
            _ => {}
        }
        Ok(())
    };
    let mut is_its = is_its;
    ntfs.scan(&mut visits(), &mut is_its).unwrap();
    assert_eq!(owned_bytes, 700 * 4096);
    assert_eq!(found_names, [(directory.id, b"file:$J".to_vec())]);
}
