//! Disks with partitions and file systems, as the comparison of versions and the search for damaged files
//! read them.
//!
//! The input consists of pieces of a disk, as for whole files. Nothing here may panic.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, Op, Request,
};

use headwater_filesystems::partitions::PARTITIONS_MAX;
use headwater_filesystems::{Fault, FileSystem, Node, NodeKind, Partition, crc32};

use crate::diff::tree;
use crate::fetch_pool::read_only;
use crate::fuzzing::files::{pieces_of, whole_of};
use crate::inspection::Inspection;
use crate::progress::Cancel;
use crate::reader::read_only_geometry;
use crate::units::{u64_of, usize_of};

/// How many partitions are examined.
const PARTITIONS_LOOKED_INTO: usize = 4;
/// How many entries of each partition are examined.
const ENTRIES_LOOKED_AT: usize = 200;
/// How many bytes the search for partitions may read: a GPT, or the tables of four extended partitions.
const TABLES_BYTES_MAX: u64 = 1 << 20;
/// How many bytes of a file are read at a time.
const READ_BYTES: usize = 64 << 10;
/// How many bytes one step (opening, a directory, a piece of a file) may read of a disk of 12 MiB, even
/// repeatedly if its tables refer to each other. If a step read more, a user would wait for damaged tables.
const STEP_BYTES_MAX: u64 = 4 << 30;

/// A disk in memory that counts how much is read.
struct Disk {
    bytes: Vec<u8>,
    read_bytes: AtomicU64,
}

impl Disk {
    fn part(&self, range: ByteRange) -> &[u8] {
        self.read_bytes.fetch_add(range.len(), Ordering::Relaxed);
        self.bytes.get(usize_of(range.offset())..usize_of(range.end())).unwrap_or_default()
    }
}

impl Device for Disk {
    fn geometry(&self) -> Geometry {
        read_only_geometry(u64_of(self.bytes.len()))
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        match op {
            Op::Read { range, into } => into.copy_from_slice(self.part(range)),
            Op::Flush => {}
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Discard { .. } => return Err(read_only()),
        }
        Ok(Attempt::Done)
    }

    fn submit(&self, request: Request, done: Completion) {
        match request {
            Request::Read { range, mut buffer } => {
                buffer.copy_from_slice(self.part(range));
                done.complete(Ok(()), buffer);
            }
            Request::Prefetch { .. } | Request::Flush => done.complete(Ok(()), Vec::new()),
            other => done.complete(Err(read_only()), other.into_buffer()),
        }
    }

    fn extents(&self, range: ByteRange, _: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Data }])
    }
}

/// A disk of these pieces, in whole sectors.
fn disk_of(pieces: &[u8]) -> Arc<Disk> {
    let mut bytes = whole_of(pieces);
    bytes.truncate(bytes.len() / 512 * 512);
    // Without this, no change would pass the checksum.
    if bytes.get(GPT_AT..).is_some_and(|header| header.starts_with(b"EFI PART")) {
        sum_gpt(&mut bytes);
    }
    Arc::new(Disk { bytes, read_bytes: AtomicU64::new(0) })
}

/// A disk: its partitions are inside it, each with a number of its own. They and their contents are read in
/// bounded steps, or refused. A file has the same content however it is read.
pub fn file_systems(pieces: &[u8]) {
    let disk = disk_of(pieces);
    if disk.bytes.is_empty() {
        return;
    }
    let device: Arc<dyn Device> = disk.clone();
    let found = tree::find(device.as_ref());
    assert!(found.is_ok(), "the partitions of a disk that can be read: {found:?}");
    let found = found.unwrap_or_default();
    assert!((1..=PARTITIONS_MAX).contains(&found.len()), "{} partitions", found.len());
    assert!(found.is_sorted_by(|one, next| one.number < next.number), "{found:?}");
    let read_bytes = disk.read_bytes.load(Ordering::Relaxed);
    assert!(read_bytes <= TABLES_BYTES_MAX, "{read_bytes} bytes were read to find the partitions");
    for partition in &found {
        let end = partition.offset_bytes.checked_add(partition.len_bytes);
        let fits = end.is_some_and(|end| end <= u64_of(disk.bytes.len()));
        assert!(fits && partition.len_bytes > 0, "{partition:?} lies outside the disk");
    }
    let inspected = Inspection::of(&device, None);
    assert!(inspected.is_ok(), "a disk that can be read: {inspected:?}");
    let has_partitions = inspected.is_ok_and(|it| it.sector_bytes != 512 || it.boot.has_partitions);
    assert!(has_partitions || found.iter().all(|partition| partition.number == 0), "{found:?}");
    for partition in found.iter().take(PARTITIONS_LOOKED_INTO) {
        let mut look = Look { disk: &disk, seen: 0, most_bytes: 0, wrong: None };
        look.partition(&device, partition);
        assert!(look.most_bytes <= STEP_BYTES_MAX, "one step read {} bytes", look.most_bytes);
        assert!(look.wrong.is_none(), "{}", look.wrong.unwrap_or_default());
    }
}

struct Look<'a> {
    disk: &'a Disk,
    seen: usize,
    most_bytes: u64,
    /// A broken property, reported outside the code that catches panics.
    wrong: Option<String>,
}

impl Look<'_> {
    fn step<R>(&mut self, work: impl FnOnce() -> Result<R, Fault>) -> Option<R> {
        let before = self.disk.read_bytes.load(Ordering::Relaxed);
        let result = work();
        let took = self.disk.read_bytes.load(Ordering::Relaxed).saturating_sub(before);
        self.most_bytes = self.most_bytes.max(took);
        result.ok()
    }

    fn partition(&mut self, device: &Arc<dyn Device>, partition: &Partition) {
        let Some(mut tree) = self.step(|| tree::open(device, partition)) else { return };
        let mut left = vec![tree.root()];
        let mut visits = tree::visits(&Cancel::new());
        while let Some(directory) = left.pop() {
            let Some(entries) = self.step(|| tree.list(&directory, &mut visits)) else { continue };
            for (name, node) in entries {
                self.seen += 1;
                if self.seen > ENTRIES_LOOKED_AT {
                    return;
                }
                if node.path != directory.child(&name) {
                    self.wrong = Some(format!("{name:?} has the path {:?}", node.path));
                }
                match node.kind {
                    NodeKind::Directory => left.push(node),
                    NodeKind::Link => drop(self.step(|| tree.link(&node))),
                    NodeKind::File => self.file(&mut *tree, &node),
                    NodeKind::Other => {}
                }
            }
        }
    }

    /// Reads the start of a file, at once and in parts, and its end.
    fn file(&mut self, tree: &mut dyn FileSystem, file: &Node) {
        let (mut whole, mut parts) = (vec![0xaa; READ_BYTES], vec![0x55; READ_BYTES]);
        let Some(len) = self.step(|| tree.read(file, 0, &mut whole)) else { return };
        if len > READ_BYTES || u64_of(len) > file.size_bytes {
            self.wrong = Some(format!("{len} bytes were read of a file of {}", file.size_bytes));
        }
        let mut at = 0;
        for part in parts.chunks_mut(9000) {
            let Some(len) = self.step(|| tree.read(file, u64_of(at), part)) else { return };
            at += len;
            if len < part.len() {
                break;
            }
        }
        if whole.get(..len) != parts.get(..at) {
            self.wrong = Some(format!("{} reads differently in parts", String::from_utf8_lossy(&file.path)));
        }
        let end = file.size_bytes.saturating_sub(100);
        let _ = self.step(|| tree.read(file, end, &mut whole));
    }
}

/// Small file systems, created by programs that the tests need anyway. Each has a directory and two files,
/// alone and in partitions.
pub(super) fn samples() -> Vec<Vec<u8>> {
    // Tests of one process create them concurrently.
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let dir = std::env::temp_dir().join(format!("headwater-file-systems-{}-{call}", std::process::id()));
    let made = std::fs::create_dir_all(dir.join("tree/inner"));
    assert!(made.is_ok(), "cannot make {}: {made:?}", dir.display());
    for (name, len) in [("hello", 5), ("inner/large", 20_000)] {
        let written = std::fs::write(dir.join("tree").join(name), vec![b'x'; len]);
        assert!(written.is_ok(), "cannot write to {}: {written:?}", dir.display());
    }
    let (fat, ext, ntfs) = (fat_sample(&dir), ext_sample(&dir), ntfs_sample(&dir));
    let _ = std::fs::remove_dir_all(&dir);
    let logical = with_logical_partition(&fat);
    let disks = [with_mbr(&fat), with_gpt(&ext), fat, ext, ntfs, logical];
    disks.iter().map(|disk| pieces_of(disk)).collect()
}

fn run(program: &str, package: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output();
    let done = output.as_ref().is_ok_and(|output| output.status.success());
    assert!(done, "{program} is needed (apt-get install {package}): {output:?}");
}

/// Creates a file system in a new file of this size, and returns its bytes.
fn made(dir: &Path, kib: u64, make: impl FnOnce(&str, &str)) -> Vec<u8> {
    let (image, tree) = (dir.join("image"), dir.join("tree"));
    let sized = std::fs::File::create(&image).and_then(|file| file.set_len(kib << 10));
    assert!(sized.is_ok(), "cannot make {}: {sized:?}", image.display());
    make(&image.to_string_lossy(), &tree.to_string_lossy());
    std::fs::read(&image).unwrap_or_default()
}

fn fat_sample(dir: &Path) -> Vec<u8> {
    made(dir, 64, |image, tree| {
        run("mkfs.vfat", "dosfstools", &["-F", "12", "-s", "1", image]);
        let (hello, inner) = (format!("{tree}/hello"), format!("{tree}/inner"));
        run("mcopy", "mtools", &["-s", "-i", image, &hello, &inner, "::"]);
    })
}

fn ext_sample(dir: &Path) -> Vec<u8> {
    made(dir, 128, |image, tree| {
        // Without checksums, because no change would pass them.
        let features = "^has_journal,^resize_inode,^metadata_csum";
        let arguments = ["-q", "-F", "-b", "1024", "-N", "16", "-O", features, "-d", tree, image];
        run("mkfs.ext4", "e2fsprogs", &arguments);
    })
}

fn ntfs_sample(dir: &Path) -> Vec<u8> {
    const SECTOR: usize = 512;
    let mut bytes = made(dir, 1200, |image, tree| {
        let fixed = ["-q", "-F", "-Q", "-p", "0", "-s", "512", "-c", "512", "-H", "0", "-S", "0", image];
        run("mkntfs", "ntfs-3g", &fixed);
        run("ntfscp", "ntfs-3g", &["-f", image, &format!("{tree}/hello"), "/hello"]);
    });
    // The log and the upcase table are most of it and are not read; neither are unused records.
    for sector in bytes.chunks_mut(SECTOR).skip(400) {
        sector.fill(0);
    }
    for record in bytes.chunks_mut(2 * SECTOR).take(200) {
        let is_used = record.get(22).is_some_and(|flags| flags & 1 == 1);
        if record.starts_with(b"FILE") && !is_used {
            record.fill(0);
        }
    }
    bytes
}

/// The header of a GPT, which has 92 bytes.
const GPT_AT: usize = 512;

/// Corrects the checksum in the header of a GPT.
fn sum_gpt(disk: &mut [u8]) {
    let header = disk.get_mut(GPT_AT..GPT_AT + 92).unwrap_or_default();
    header.get_mut(16..20).unwrap_or_default().fill(0);
    let sum = crc32(header).to_le_bytes();
    if let Some(place) = header.get_mut(16..20) {
        place.copy_from_slice(&sum);
    }
}

/// Where the only partition starts, in sectors.
const FIRST_SECTOR: u32 = 64;

fn in_partition(inner: &[u8], patches: &[(usize, &[u8])]) -> Vec<u8> {
    let mut disk = vec![0; 512 * usize_of(u64::from(FIRST_SECTOR))];
    for (at, value) in patches {
        if let Some(place) = disk.get_mut(*at..).and_then(|rest| rest.get_mut(..value.len())) {
            place.copy_from_slice(value);
        }
    }
    disk.extend_from_slice(inner);
    disk
}

fn sectors(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len() / 512).unwrap_or(0)
}

fn with_mbr(inner: &[u8]) -> Vec<u8> {
    let (first, len) = (FIRST_SECTOR.to_le_bytes(), sectors(inner).to_le_bytes());
    in_partition(inner, &[(446, &[0x80]), (450, &[6]), (454, &first), (458, &len), (510, &[0x55, 0xaa])])
}

/// In an extended partition, which begins with its table in the third sector.
fn with_logical_partition(inner: &[u8]) -> Vec<u8> {
    const EXTENDED_SECTOR: u32 = 2;
    let (table, before) = (1024, FIRST_SECTOR - EXTENDED_SECTOR);
    let (extended, extended_len) = (EXTENDED_SECTOR.to_le_bytes(), (before + sectors(inner)).to_le_bytes());
    let (first, len) = (before.to_le_bytes(), sectors(inner).to_le_bytes());
    in_partition(
        inner,
        &[
            (450, &[0x0f]),
            (454, &extended),
            (458, &extended_len),
            (510, &[0x55, 0xaa]),
            (table + 450, &[6]),
            (table + 454, &first),
            (table + 458, &len),
            (table + 510, &[0x55, 0xaa]),
        ],
    )
}

fn with_gpt(inner: &[u8]) -> Vec<u8> {
    let (first, last) =
        (u64::from(FIRST_SECTOR).to_le_bytes(), u64::from(FIRST_SECTOR + sectors(inner) - 1).to_le_bytes());
    let (header, table) = (GPT_AT, 1024);
    let (table_sector, count, entry_bytes) = (2u64.to_le_bytes(), 4u32.to_le_bytes(), 128u32.to_le_bytes());
    let mut disk = in_partition(
        inner,
        &[
            (450, &[0xee]),
            (510, &[0x55, 0xaa]),
            (header, b"EFI PART"),
            (header + 12, &92u32.to_le_bytes()),
            (header + 72, &table_sector),
            (header + 80, &count),
            (header + 84, &entry_bytes),
            (table, &[7; 16]),
            (table + 32, &first),
            (table + 40, &last),
        ],
    );
    sum_gpt(&mut disk);
    disk
}

#[cfg(test)]
mod tests {
    use headwater_filesystems::Visits;

    use super::*;

    fn visits() -> Visits {
        tree::visits(&Cancel::new())
    }

    #[test]
    fn listing_a_directory_has_a_limit() {
        let dir = tempfile::tempdir().unwrap();
        let (tree, image) = (dir.path().join("tree"), dir.path().join("image"));
        std::fs::create_dir_all(tree.join("many/deep")).unwrap();
        for number in 0..300 {
            std::fs::write(tree.join(format!("many/deep/file-{number}")), "hello").unwrap();
        }
        let made = std::process::Command::new("mke2fs")
            .args(["-q", "-t", "ext4", "-d"])
            .args([&tree, &image])
            .arg("8M")
            .status();
        assert!(made.as_ref().is_ok_and(std::process::ExitStatus::success), "{made:?}");
        let device: Arc<dyn Device> = disk_of(&pieces_of(&std::fs::read(image).unwrap()));
        let mut tree = tree::open(&device, &tree::find(device.as_ref()).unwrap()[0]).unwrap();
        let root = tree.root();
        let many = tree.list(&root, &mut visits()).unwrap()[&b"many"[..]].clone();
        let deep = tree.list(&many, &mut visits()).unwrap()[&b"deep"[..]].clone();
        let entries = tree.list(&deep, &mut visits()).unwrap();
        assert_eq!((entries.len(), entries[&b"file-7"[..]].size_bytes), (300, 5));
        let refused = tree.list(&deep, &mut Visits::of(100, || false)).unwrap_err();
        assert!(refused.to_string().contains("entries"), "{refused}");
        let cancel = Cancel::new();
        cancel.cancel();
        assert!(tree.list(&deep, &mut tree::visits(&cancel)).is_err());
    }

    #[test]
    fn samples_contain_the_intended_file_systems() {
        for (number, sample) in samples().iter().enumerate() {
            assert!(
                sample.len() < 65_536,
                "sample {number} is longer than the fuzzers take: {}",
                sample.len()
            );
            let device: Arc<dyn Device> = disk_of(sample);
            let found = tree::find(device.as_ref()).unwrap();
            assert_eq!(found.len(), 1, "sample {number}");
            assert_eq!(found[0].number, [1, 1, 0, 0, 0, 5][number], "sample {number}");
            let mut tree = tree::open(&device, &found[0]).unwrap();
            let root = tree.root();
            let entries = tree.list(&root, &mut visits()).unwrap();
            let mut read = [0; 10];
            assert_eq!(tree.read(&entries[&b"hello"[..]], 0, &mut read).unwrap(), 5, "sample {number}");
            assert_eq!(&read[..5], b"xxxxx");
            if let Some(inner) = entries.get(&b"inner"[..]) {
                let large = &tree.list(inner, &mut visits()).unwrap()[&b"large"[..]];
                assert_eq!(large.size_bytes, 20_000, "sample {number}");
            }
        }
    }

    #[test]
    fn a_file_that_claims_more_than_its_file_system_has_is_refused() {
        let mut bytes = whole_of(&samples()[2]);
        let entry = bytes.windows(11).position(|name| name == b"HELLO      ").unwrap();
        bytes[entry + 28..entry + 32].copy_from_slice(&u32::MAX.to_le_bytes());
        let device: Arc<dyn Device> = disk_of(&pieces_of(&bytes));
        let mut tree = tree::open(&device, &tree::find(device.as_ref()).unwrap()[0]).unwrap();
        let root = tree.root();
        let hello = &tree.list(&root, &mut visits()).unwrap()[&b"hello"[..]];
        let refused = tree.read(hello, 0, &mut [0; 10]).unwrap_err();
        assert!(refused.to_string().contains("larger than its file system"), "{refused}");
    }

    #[test]
    fn a_table_of_an_odd_number_of_partitions_is_read() {
        let disk = with_gpt(&[0; 4096]);
        let device: Arc<dyn Device> = disk_of(&pieces_of(&disk));
        for count in 1..6u32 {
            let mut disk = disk.clone();
            disk[512 + 80..512 + 84].copy_from_slice(&count.to_le_bytes());
            let device: Arc<dyn Device> = disk_of(&pieces_of(&disk));
            assert_eq!(tree::find(device.as_ref()).unwrap()[0].number, 1, "{count}");
        }
        assert_eq!(tree::find(device.as_ref()).unwrap()[0].len_bytes, 4096);
    }
}
