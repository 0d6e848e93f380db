//! The file under real tools: fio, qemu-img, cp, dd, loop devices with a file system.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::fixture::Mounted;
use headwater_block::{Device, blocking};
use headwater_fuse::Options;
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, Waits, output, succeed, wait_until};

const SIZE: u64 = 64 << 20;

fn mounted() -> Mounted {
    let options = ReferenceOptions { waits: Waits::PerMille(100), ..Default::default() };
    Mounted::with(ReferenceDisk::with_options(SIZE, options), Options::default())
}

/// Random data with holes, like an image.
fn fill(disk: &dyn Device) {
    let mut rng = Rng::new(7);
    for piece in 0..16 {
        blocking::write(disk, piece * (4 << 20), &rng.bytes(512 << 10)).unwrap();
    }
}

/// Registered files and buffers, as Firecracker's asynchronous engine uses them.
const REGISTERED: [&str; 3] = ["--ioengine=io_uring", "--registerfiles=1", "--fixedbufs=1"];

/// Containers forbid io_uring, and little locked memory forbids registered buffers.
fn has_registered_io_uring() -> bool {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new("fio");
    command.args(["--name=probe", "--rw=write", "--bs=4k", "--size=64k"]).args(REGISTERED);
    command.arg(format!("--filename={}", dir.path().join("probe").display()));
    output("fio", &mut command).status.success()
}

#[test]
fn fio_verifies_what_it_wrote() {
    let mounted = mounted();
    let mut ways = vec![
        vec!["--ioengine=libaio", "--direct=1"],
        vec!["--ioengine=psync", "--direct=1"],
        vec!["--ioengine=psync", "--direct=0"],
    ];
    if has_registered_io_uring() {
        ways.push([&REGISTERED[..], &["--direct=1"]].concat());
        ways.push([&REGISTERED[..], &["--direct=0"]].concat());
    } else {
        println!("not with io_uring, which fio cannot use here");
    }
    for way in ways {
        let mut command = Command::new("fio");
        command.args(["--name=v", "--rw=randrw", "--bsrange=512-128k", "--size=32M", "--io_size=32M"]);
        command.args(["--iodepth=16", "--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0"]);
        command.args(["--allow_file_create=0", "--fallocate=none"]).args(way);
        command.arg(format!("--filename={}", mounted.file().display()));
        succeed("fio", &mut command);
    }
}

#[test]
fn images_go_in_and_come_out_through_qemu_img_and_stay_sparse_in_cp() {
    let mounted = mounted();
    let dir = tempfile::tempdir().unwrap();
    let raw = dir.path().join("in.raw");
    fill(&*mounted.disk);
    let contents = mounted.disk.contents();
    std::fs::write(&raw, &contents).unwrap();
    let file = mounted.file();
    let copy = dir.path().join("copy.raw");
    succeed("coreutils", Command::new("cp").arg("--sparse=auto").arg(&file).arg(&copy));
    assert!(std::fs::read(&copy).unwrap() == contents);
    let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&copy).unwrap());
    assert!(blocks * 512 <= (16 << 20), "{blocks} blocks");
    let compare = |format: &str, other: &Path| {
        succeed(
            "qemu-utils",
            Command::new("qemu-img").args(["compare", "-f", "raw", "-F", format]).arg(&file).arg(other),
        );
    };
    compare("raw", &raw);
    let qcow2 = dir.path().join("out.qcow2");
    succeed(
        "qemu-utils",
        Command::new("qemu-img").args(["convert", "-f", "raw", "-O", "qcow2"]).arg(&file).arg(&qcow2),
    );
    compare("qcow2", &qcow2);
    // The other direction, onto a disk with other contents.
    blocking::write(&*mounted.disk, 1 << 20, &[0xee; 1 << 20]).unwrap();
    succeed(
        "qemu-utils",
        Command::new("qemu-img").args(["convert", "-n", "-f", "qcow2", "-O", "raw"]).arg(&qcow2).arg(&file),
    );
    assert!(mounted.disk.contents() == contents);
    succeed(
        "coreutils",
        Command::new("dd")
            .args(["bs=1000", "count=3000", "conv=notrunc", "status=none"])
            .arg(format!("if={}", raw.display()))
            .arg(format!("of={}", file.display())),
    );
    assert!(mounted.disk.contents() == contents);
    let refused = output("coreutils", Command::new("cp").arg(&raw).arg(&file));
    assert!(!refused.status.success() && String::from_utf8_lossy(&refused.stderr).contains("not permitted"));
}

/// A loop device, detached when dropped.
struct Loop(PathBuf);

impl Loop {
    fn over(file: &Path, direct: bool) -> Self {
        let mut command = Command::new("losetup");
        command
            .args(["--find", "--show", if direct { "--direct-io=on" } else { "--direct-io=off" }])
            .arg(file);
        Self(succeed("mount", &mut command).trim().into())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = output("mount", Command::new("losetup").arg("--detach").arg(&self.0));
    }
}

/// Retries while the mount is busy: between fork and exec, a child process of another test has this test's
/// files open.
fn unmount(at: &Path) {
    wait_until("it is not busy", || output("mount", Command::new("umount").arg(at)).status.success());
}

#[test]
fn a_loop_device_carries_a_file_system_and_trims_it() {
    for direct in [true, false] {
        let mounted = mounted();
        let dir = tempfile::tempdir().unwrap();
        let device = Loop::over(&mounted.file(), direct);
        succeed("e2fsprogs", Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&device.0));
        succeed("mount", Command::new("mount").arg(&device.0).arg(dir.path()));
        let bytes = Rng::new(3).bytes(16 << 20);
        std::fs::write(dir.path().join("file"), &bytes).unwrap();
        unmount(dir.path());
        assert_ne!(mounted.disk.counts().flushes, 0);
        succeed("mount", Command::new("mount").arg(&device.0).arg(dir.path()));
        assert!(std::fs::read(dir.path().join("file")).unwrap() == bytes);
        std::fs::remove_file(dir.path().join("file")).unwrap();
        let before = mounted.disk.counts();
        succeed("util-linux", Command::new("fstrim").arg(dir.path()));
        let after = mounted.disk.counts();
        assert!(after.discards + after.zeroes > before.discards + before.zeroes);
        unmount(dir.path());
        succeed("e2fsprogs", Command::new("fsck.ext4").args(["-f", "-n"]).arg(&device.0));
    }
}
