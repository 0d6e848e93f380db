//! `headwater export --fuse`: the life of a mount, with the real program: its end, its death, and directories in the way.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::support::{self, headwater, run, short_dir, signal};
use headwater_testkit::wait_until;

/// A running export, killed and unmounted at the end of a test.
struct Export {
    child: Child,
    dir: std::path::PathBuf,
}

impl Export {
    fn start(dir: &Path, more: &[&str]) -> Self {
        let mut command = headwater();
        command.args(["export", "null:16M", "--cache", "ram", "--fuse"]).arg(dir).args(more);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("it starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let line = lines.next().expect("a line").expect("text");
        assert!(line.starts_with(&format!("fuse:{}/", dir.display())), "{line}");
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, dir: dir.to_owned() }
    }

    fn end(mut self) {
        signal(self.child.id(), "TERM");
        let status = self.child.wait().expect("it ends");
        assert!(status.success(), "{status}");
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if is_mounted(&self.dir) {
            let _ = Command::new("umount").arg("-l").arg(&self.dir).status();
        }
    }
}

fn is_mounted(dir: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("it can be read");
    mounts.lines().any(|line| line.split(' ').nth(1) == dir.to_str())
}

fn export(dir: &Path) -> support::Ran {
    run(headwater().args(["export", "null:16M", "--cache", "ram", "--fuse"]).arg(dir))
}

#[test]
fn the_end_unmounts_and_umount_ends_it() {
    let dir = short_dir();
    let export = Export::start(dir.path(), &["--fuse-name", "c.img"]);
    assert_eq!(std::fs::metadata(dir.path().join("c.img")).expect("it is there").len(), 16 << 20);
    export.end();
    assert!(!is_mounted(dir.path()));
    let mut export = Export::start(dir.path(), &[]);
    assert!(Command::new("umount").arg(dir.path()).status().expect("umount runs").success());
    wait_until("the export ends", || export.child.try_wait().expect("it can be asked").is_some());
    assert!(export.child.wait().expect("it has ended").success());
}

#[test]
fn a_killed_server_gives_errors_and_leaves_a_directory_that_the_next_one_takes() {
    let dir = short_dir();
    let mut export = Export::start(dir.path(), &[]);
    let file = dir.path().join("disk");
    let mut open = std::fs::OpenOptions::new().read(true).write(true).open(&file).expect("it opens");
    open.write_all_at(&[1; 8192], 0).expect("it takes writes");
    export.child.kill().expect("it can be killed");
    export.child.wait().expect("it ends");
    assert!(open.read(&mut [0; 512]).is_err());
    assert!(std::fs::metadata(&file).is_err());
    let again = Export::start(dir.path(), &[]);
    // A new write cache: what the dead one held is gone.
    let mut bytes = [9; 512];
    std::fs::File::open(&file).expect("it opens").read_exact_at(&mut bytes, 0).expect("it reads");
    assert_eq!(bytes, [0; 512]);
    again.end();
    assert!(!is_mounted(dir.path()));
}

#[test]
fn directories_in_the_way_are_refused_with_a_code() {
    let dir = short_dir();
    export(&dir.path().join("none")).fails(3, &["no such directory", "create it"]);
    let file = dir.path().join("file");
    std::fs::write(&file, "x").expect("it can be written");
    export(&file).fails(2, &["not a directory"]);
    export(dir.path()).fails(2, &["files in it"]);
    std::fs::remove_file(&file).expect("it can be removed");
    let first = Export::start(dir.path(), &[]);
    export(dir.path()).fails(4, &["another headwater"]);
    assert_eq!(run(headwater().args(["export", "null:16M", "--fuse-name", "x"])).code, 2);
    first.end();
}

/// A loop device over the partition at sector 63, given back when dropped.
struct Partition(String);

impl Partition {
    fn of(disk: &Path) -> Self {
        let offset = format!("--offset={}", 63 * 512);
        let found =
            run(Command::new("losetup").args(["--find", "--show", "--sector-size=512", &offset]).arg(disk));
        Self(found.ok().trim().to_owned())
    }
}

impl Drop for Partition {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn file_systems_that_begin_at_sector_63_stay_whole_through_an_overflow() {
    let (dir, files, cache) = (short_dir(), tempfile::tempdir().expect("a directory"), short_dir());
    let mut command = headwater();
    command.args(["export", "null:96M", "--cache", "ram+disk", "--ram", "16M", "--disk", "256M"]);
    command.arg("--cache-dir").arg(cache.path()).arg("--fuse").arg(dir.path());
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    lines.next().expect("a line").expect("text");
    let export = Export { child, dir: dir.path().to_owned() };
    let bytes = |number: usize| support::pseudo_random(5_000_000 + number * 777, number as u64 + 1);
    let paths: Vec<_> = (0..8).map(|number| files.path().join(format!("file{number}"))).collect();
    for (number, path) in paths.iter().enumerate() {
        std::fs::write(path, bytes(number)).expect("it is written");
    }
    for kind in ["vfat", "ntfs"] {
        let partition = Partition::of(&dir.path().join("disk"));
        let device = partition.0.as_str();
        match kind {
            "vfat" => run(Command::new("mkfs.vfat").args(["-F", "32", device])).ok(),
            _ => run(Command::new("mkntfs").args(["-q", "-F", "-Q", device])).ok(),
        };
        for (number, path) in paths.iter().enumerate() {
            match kind {
                "vfat" => run(Command::new("mcopy").args(["-i", device]).arg(path).arg("::")).ok(),
                _ => run(Command::new("ntfscp").args(["-f", device]).arg(path).arg(format!("/file{number}")))
                    .ok(),
            };
        }
        // What is read next comes from the server, and not from the kernel's page cache.
        drop(partition);
        std::fs::write("/proc/sys/vm/drop_caches", "1").expect("caches can be dropped");
        let partition = Partition::of(&dir.path().join("disk"));
        let device = partition.0.as_str();
        for number in 0..paths.len() {
            let back = files.path().join("back");
            let _ = std::fs::remove_file(&back);
            if kind == "vfat" {
                run(Command::new("mcopy").args(["-i", device, &format!("::file{number}")]).arg(&back)).ok();
            } else {
                let to = std::fs::File::create(&back).expect("a file");
                let mut cat = Command::new("ntfscat");
                let status = cat.args(["-f", device, &format!("/file{number}")]).stdout(to).status();
                assert!(status.expect("ntfscat runs").success());
            }
            assert!(std::fs::read(&back).expect("it is there") == bytes(number), "{kind}: file {number}");
        }
        if kind == "vfat" {
            run(Command::new("fsck.vfat").args(["-n", device])).ok();
        }
    }
    export.end();
}
