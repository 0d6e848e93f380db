//! Random NTFS volumes, compared with what ntfs-3g shows of them, with their bitmap and with `ntfscluster`.
//!
//! The bitmap is the oracle of owners: each cluster in use has an owner, and no free cluster has. `ntfscluster` then says
//! of some files which clusters are theirs. `HEADWATER_VOLUMES=200` makes more volumes than `make test` does.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::process::Command;

use headwater_filesystems::ntfs::Ntfs;
use headwater_filesystems::{FileSystem, Node, NodeKind, Owner, Scanned};
use headwater_testkit::{Rng, run};

use crate::ntfs::{Image, contents, set_attribute, visits};

/// From 1601, when the clock of NTFS began, to 1970.
const EPOCH_S: i64 = 11_644_473_600;
/// How many files of a volume `ntfscluster` is asked about.
const FILES_ASKED: usize = 12;
/// How many volumes are made at a time.
const WORKERS: usize = 4;

/// The size of a volume and of its parts.
struct Plan {
    size_mib: u64,
    sector_bytes: u64,
    cluster_bytes: u64,
    steps: u64,
}

impl Plan {
    fn of(rng: &mut Rng) -> Self {
        let cluster_bytes = 512 << rng.below(10);
        let size_mib = if cluster_bytes > 16 << 10 { 64 } else { rng.between(8, 24) };
        let sector_bytes = if cluster_bytes >= 4096 && rng.chance(1, 4) { 4096 } else { 512 };
        Self { size_mib, sector_bytes, cluster_bytes, steps: rng.between(100, 400) }
    }

    fn clusters(&self) -> u64 {
        // The last sector has the copy of the boot sector.
        ((self.size_mib << 20) / self.sector_bytes - 1) * self.sector_bytes / self.cluster_bytes
    }

    fn image(&self) -> Image {
        let (sector, cluster) = (self.sector_bytes.to_string(), self.cluster_bytes.to_string());
        Image::new(self.size_mib, &["-s", &sector, "-c", &cluster])
    }
}

fn name(rng: &mut Rng) -> String {
    let len = if rng.chance(1, 10) { rng.between(1, 60) } else { rng.between(1, 12) };
    let letters: Vec<char> = "abcXYZ0123 .-_\u{e4}\u{df}\u{3b1}\u{4e2d}\u{1f600}".chars().collect();
    let name: String = (0..len).map(|_| letters[rng.index(letters.len())]).collect();
    // Some names are long ones of a directory with many files.
    format!("{}{}", name.trim_matches([' ', '.']), rng.below(100_000))
}

/// Changes a mounted volume. A step that fails, because the volume is full or a name is there, is no step.
struct Changes<'a> {
    rng: &'a mut Rng,
    at: PathBuf,
    directories: Vec<PathBuf>,
    files: Vec<PathBuf>,
}

impl Changes<'_> {
    fn directory(&mut self) -> PathBuf {
        self.directories[self.rng.index(self.directories.len())].clone()
    }

    fn file(&mut self) -> Option<PathBuf> {
        (!self.files.is_empty()).then(|| self.files[self.rng.index(self.files.len())].clone())
    }

    fn bytes(&mut self, most: u64) -> Vec<u8> {
        let len = self.rng.below(most + 1) as usize;
        // Some pack, some do not.
        if self.rng.chance(1, 2) { self.rng.runs(len, 40) } else { self.rng.bytes(len) }
    }

    fn step(&mut self) -> Option<()> {
        match self.rng.below(20) {
            0..5 => {
                let path = self.directory().join(name(self.rng));
                let most = [600, 5000, 200_000][self.rng.index(3)];
                fs::write(&path, self.bytes(most)).ok()?;
                self.files.push(path);
            }
            5 | 6 => {
                let path = self.directory().join(name(self.rng));
                fs::create_dir(&path).ok()?;
                self.directories.push(path);
            }
            7..10 => self.append()?,
            10 | 11 => {
                let path = self.file()?;
                self.files.retain(|other| *other != path);
                fs::remove_file(path).ok()?;
            }
            12 => {
                let (from, to) = (self.file()?, self.directory().join(name(self.rng)));
                fs::rename(&from, &to).ok()?;
                self.files.retain(|other| *other != from);
                self.files.push(to);
            }
            13 => {
                let (from, to) = (self.file()?, self.directory().join(name(self.rng)));
                fs::hard_link(from, &to).ok()?;
                self.files.push(to);
            }
            14 | 15 => {
                // A hole, or a file that is cut.
                let file = File::options().write(true).open(self.file()?).ok()?;
                file.set_len(self.rng.below(300_000)).ok()?;
            }
            16 | 17 => {
                let mut file = File::options().write(true).open(self.file()?).ok()?;
                file.seek(SeekFrom::Start(self.rng.below(500_000))).ok()?;
                file.write_all(&self.bytes(20_000)).ok()?;
            }
            18 => {
                let directory = self.directory();
                for number in 0..self.rng.below(200) {
                    let path = directory.join(format!("one of many {number}"));
                    fs::write(&path, self.bytes(30)).ok()?;
                    self.files.push(path);
                }
            }
            _ => self.attribute()?,
        }
        Some(())
    }

    /// Appends to two files by turns, so that both are in many pieces.
    fn append(&mut self) -> Option<()> {
        let paths = [self.file()?, self.file()?];
        for _ in 0..self.rng.below(60) {
            for path in &paths {
                let bytes = self.bytes(5000);
                File::options().append(true).open(path).ok()?.write_all(&bytes).ok()?;
            }
        }
        Some(())
    }

    fn attribute(&mut self) -> Option<()> {
        let path = if self.rng.chance(1, 4) { self.directory() } else { self.file()? };
        if path == self.at {
            return None;
        }
        let is_linked = fs::metadata(&path).ok()?.nlink() > 1;
        if self.rng.chance(1, 3) && !is_linked {
            let short = format!("S{}.TXT", self.rng.below(1000));
            // Another one may have it.
            if !path.parent()?.join(&short).exists() {
                let _ = set_attribute(&path, "system.ntfs_dos_name", short.as_bytes());
            }
        } else {
            let stream = format!("user.{}", self.rng.below(3));
            let most = [100, 30_000][self.rng.index(2)];
            let bytes = self.bytes(most);
            let _ = set_attribute(&path, &stream, &bytes);
        }
        Some(())
    }
}

fn change(image: &Image, plan: &Plan, rng: &mut Rng) {
    image.mounted("rw", |at| {
        let mut directories = vec![at.to_owned()];
        // Files in this directory are compressed. Clusters may have 4 KiB at most for that.
        if plan.cluster_bytes <= 4096 {
            let packed = at.join("packed");
            fs::create_dir(&packed).unwrap();
            assert!(set_attribute(&packed, "system.ntfs_attrib_be", &[0, 0, 8, 0]));
            directories.push(packed);
        }
        let mut changes = Changes { rng, at: at.to_owned(), directories, files: Vec::new() };
        for _ in 0..plan.steps {
            let _ = changes.step();
        }
    });
}

/// The streams of all files that are mounted: by path, name and contents.
fn streams(at: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut left = vec![at.to_owned()];
    let mut buffer = vec![0; 64 << 10];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
            let path = entry.path();
            let len = rustix::fs::listxattr(&path, &mut buffer).unwrap();
            let names = buffer[..len].to_vec();
            for name in names.split(|byte| *byte == 0) {
                let Some(stream) = name.strip_prefix(b"user.") else { continue };
                let len = rustix::fs::getxattr(&path, name, &mut buffer).unwrap();
                let at_bytes = at.as_os_str().len();
                let shown = [&path.as_os_str().as_bytes()[at_bytes..], b":", stream].concat();
                found.insert(shown, buffer[..len].to_vec());
            }
            if entry.file_type().unwrap().is_dir() {
                left.push(path);
            }
        }
    }
    found
}

/// Compares a directory and everything in it. Returns how many entries there are.
fn compare(ntfs: &mut Ntfs, at: &Path, directory: &Node, streams: &mut BTreeMap<Vec<u8>, Vec<u8>>) -> u64 {
    let mut entries = ntfs.list(directory, &mut visits()).unwrap();
    let mut count = 0;
    for mounted in fs::read_dir(at).unwrap().map(Result::unwrap) {
        count += 1;
        let name = mounted.file_name();
        let Some(node) = entries.remove(name.as_bytes()) else {
            panic!("{} is missing", mounted.path().display())
        };
        let found = mounted.metadata().unwrap();
        let modified = (found.mtime() + EPOCH_S) as u128 * 10_000_000 + found.mtime_nsec() as u128 / 100;
        assert_eq!((node.modified, node.id, node.fault.as_ref()), (modified, found.ino(), None), "{name:?}");
        assert_eq!(node.path, directory.child(name.as_bytes()));
        if found.is_dir() {
            assert_eq!(node.kind, NodeKind::Directory, "{name:?}");
            count += compare(ntfs, &mounted.path(), &node, streams);
        } else {
            assert_eq!((node.kind, node.size_bytes), (NodeKind::File, found.len()), "{name:?}");
            let same = contents(ntfs, &node) == fs::read(mounted.path()).unwrap();
            assert!(same, "{} has other contents", mounted.path().display());
        }
    }
    for (name, node) in entries {
        let Some(expected) = streams.remove(&node.path) else { panic!("{name:?} is not there") };
        assert!(contents(ntfs, &node) == expected, "{name:?} has other contents");
    }
    count
}

/// What a scan finds: the clusters of each owner, and the names of each file.
#[derive(Default)]
struct Found {
    clusters: BTreeMap<Owner, BTreeSet<u64>>,
    names: BTreeMap<u64, Vec<(u64, Vec<u8>)>>,
}

fn scan(ntfs: &mut Ntfs, cluster_bytes: u64) -> Found {
    let mut found = Found::default();
    let add = &mut |scanned| {
        match scanned {
            Scanned::Run { bytes, owner } => {
                let its = found.clusters.entry(owner).or_default();
                for cluster in bytes.start / cluster_bytes..bytes.end.div_ceil(cluster_bytes) {
                    assert!(its.insert(cluster), "{owner:?} has cluster {cluster} twice");
                }
            }
            Scanned::Name { id, parent, name } => found.names.entry(id).or_default().push((parent, name)),
            Scanned::Unreadable { id, why } => panic!("{id} is unreadable: {why}"),
        }
        Ok(())
    };
    ntfs.scan(&mut visits(), add).unwrap();
    found
}

/// The clusters of a file by `ntfscluster`.
fn asked(image: &Image, record: u64) -> BTreeSet<u64> {
    let printed = run("ntfs-3g", "ntfscluster", &["-f", "-I", &record.to_string(), &image.text()]);
    let numbers = printed.lines().filter_map(|line| {
        let numbers: Vec<i64> = line.split_whitespace().map_while(|word| word.parse().ok()).collect();
        <[i64; 3]>::try_from(numbers).ok()
    });
    let runs = numbers.filter(|[_, place, _]| *place >= 0);
    runs.flat_map(|[_, place, clusters]| place as u64..(place + clusters) as u64).collect()
}

fn check_owners(image: &Image, found: &Found, clusters: u64, rng: &mut Rng) {
    let bitmap = Command::new("ntfscat").args(["-f", "-i", "6", &image.text()]).output().unwrap().stdout;
    let is_used = |cluster: u64| bitmap[cluster as usize / 8] >> (cluster % 8) & 1 == 1;
    let all: BTreeSet<u64> = found.clusters.values().flatten().copied().filter(|c| *c < clusters).collect();
    let count: usize = found.clusters.values().map(|its| its.range(..clusters).count()).sum();
    assert_eq!(count, all.len(), "two files have one cluster");
    let wrong: Vec<_> = (0..clusters).filter(|cluster| is_used(*cluster) != all.contains(cluster)).collect();
    assert!(wrong.is_empty(), "in use by the bitmap or by a file, and not by both: {wrong:?}");

    let mut records: Vec<u64> =
        found.names.keys().map(|id| id & 0xffff_ffff).filter(|id| *id >= 16).collect();
    records.dedup();
    rng.shuffle(&mut records);
    for record in records.into_iter().take(FILES_ASKED).chain([5]) {
        let is_its = |owner: &Owner| matches!(owner, Owner::File(id) if id & 0xffff_ffff == record);
        let its = found.clusters.iter().filter(|(owner, _)| is_its(owner));
        let its: BTreeSet<u64> = its.flat_map(|(_, clusters)| clusters).copied().collect();
        assert_eq!(its, asked(image, record), "record {record}");
    }
}

/// Returns how many entries the volume has.
fn check_volume(seed: u64) -> u64 {
    let mut rng = Rng::new(seed);
    let plan = Plan::of(&mut rng);
    let image = plan.image();
    change(&image, &plan, &mut rng);
    let mut ntfs = image.reader();
    let root = ntfs.root();
    let entries = image.mounted("ro", |at| {
        let mut streams = streams(at);
        let entries = compare(&mut ntfs, at, &root, &mut streams);
        assert!(streams.is_empty(), "streams are missing: {:?}", streams.keys());
        entries
    });
    let found = scan(&mut image.reader(), plan.cluster_bytes);
    let clusters = plan.clusters();
    check_owners(&image, &found, clusters, &mut rng);
    entries
}

#[test]
fn random_volumes_read_as_ntfs_3g_reads_them() {
    let volumes = std::env::var("HEADWATER_VOLUMES").map_or(20, |count| count.parse().unwrap());
    let from = std::env::var("HEADWATER_SEED").map_or(0, |seed| seed.parse().unwrap());
    // Most of the time is waiting for programs.
    let of_worker = |worker| -> u64 {
        let seeds = (from..from + volumes).skip(worker).step_by(WORKERS);
        seeds.map(|seed| catch_unwind(|| check_volume(seed)).unwrap_or_else(|_| panic!("seed {seed}"))).sum()
    };
    let entries: u64 = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS).map(|worker| scope.spawn(move || of_worker(worker))).collect();
        workers.into_iter().map(|worker| worker.join().expect("a volume is read differently")).sum()
    });
    assert!(entries > 20 * volumes, "only {entries} files and directories were compared");
}
