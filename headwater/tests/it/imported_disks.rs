//! Disks as imports see them, with partition tables made by sfdisk: what an import says, which machines are refused, which sectors are
//! served.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::support::{Daemon, headwater, run, short_dir, signal};
use headwater_block::{Device, blocking};
use headwater_testkit::vhost::{Setup, VhostDisk};
use headwater_testkit::{succeed, wait_until};

/// A loop device with sectors of 4,096 bytes, given back when dropped. Only root may make its loop devices.
struct Loop(String);

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

/// A program that a failed test ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn loop_device(path: &Path) -> Loop {
    let made =
        run(Command::new("losetup").args(["--find", "--show", "--sector-size", "4096"]).arg(path)).ok();
    Loop(made.trim().to_owned())
}

fn sfdisk(device: &str, dir: &Path, table: &str) {
    let script = dir.join("script");
    std::fs::write(&script, table).unwrap();
    let mut command = Command::new("sfdisk");
    command.args(["--quiet", "--no-reread", "--no-tell-kernel", device]);
    succeed("fdisk", command.stdin(std::fs::File::open(script).unwrap()));
}

fn disk(dir: &Path) -> PathBuf {
    let path = dir.join("disk.raw");
    std::fs::write(&path, vec![0; 16 << 20]).unwrap();
    path
}

/// A disk with sectors of 4,096 bytes and a GPT.
fn large_sectors(dir: &Path) -> PathBuf {
    let path = disk(dir);
    let device = loop_device(&path);
    sfdisk(&device.0, dir, "label: gpt\nsize=512, type=linux\n");
    path
}

#[test]
fn an_import_says_that_sectors_have_4096_bytes() {
    let daemon = Daemon::start();
    let path = large_sectors(daemon.path());
    let imported = daemon.cli(&["image", "import", path.to_str().unwrap(), "--name", "large"]);
    assert!(imported.code == 0 && imported.err.contains("sectors of 4096 bytes"), "{imported:?}");
    let args = ["--json", "image", "import", path.to_str().unwrap(), "--name", "again"];
    let imported: serde_json::Value = serde_json::from_str(&daemon.cli(&args).ok()).unwrap();
    assert_eq!(imported["remarks"].as_array().unwrap().len(), 2, "{imported}");
    let why = ["a machine with BIOS cannot boot", "large@1", "sectors have 4096 bytes"];
    daemon.cli(&["machine", "create", "lab", "large"]).fails(2, &why);
    // The firmware of a machine that boots from the network is its own.
    let args = ["machine", "create", "thin", "large", "--boot", "network", "--mac", "52:54:00:00:00:01"];
    daemon.cli(&args).ok();
}

#[test]
fn a_version_with_large_sectors_is_served_with_them() {
    let daemon = Daemon::start();
    let path = large_sectors(daemon.path());
    daemon.cli(&["image", "import", path.to_str().unwrap(), "--name", "large"]).ok();
    let (code, dir) = daemon.terminate();
    assert_eq!(code, Some(0));
    let socket = dir.path().join("vhost");
    let target = "iqn.2026-01.org.example:large";
    let mut command = headwater();
    command.args(["export", "large@1", "--cache", "ram", "--ram", "64M", "--data-dir"]).arg(dir.path());
    command.arg("--vhost-user").arg(&socket);
    command.args(["--iscsi", "tcp:127.0.0.1:0", "--iscsi-target", target]);
    let mut child = Running(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let url = lines.find(|line| line.starts_with("iscsi://")).expect("it says where the target is");
    let capacity = run(Command::new("iscsi-readcapacity16").arg(&url)).ok();
    assert!(capacity.contains("LOGICAL BLOCK LENGTH IN BYTES:4096"), "{capacity}");
    let copy = dir.path().join("copy.raw");
    run(Command::new("qemu-img").args(["convert", "-O", "raw", &url]).arg(&copy)).ok();
    let disk = VhostDisk::connect(&socket, Setup { queues: 1, event_idx: true });
    assert_eq!(disk.geometry().logical_block_bytes, 4096);
    let mut read = vec![0; 16 << 20];
    for (number, piece) in read.chunks_mut(64 << 10).enumerate() {
        blocking::read(&disk, number as u64 * (64 << 10), piece).unwrap();
    }
    drop(disk);
    signal(child.0.id(), "TERM");
    assert!(child.0.wait().unwrap().success());
    assert!(read == std::fs::read(&path).unwrap() && read == std::fs::read(&copy).unwrap());
    // What a kernel with such sectors makes of it.
    let device = loop_device(&copy);
    let table = run(Command::new("sfdisk").args(["--dump", &device.0])).ok();
    assert!(table.contains("sector-size: 4096") && table.contains("start=         256"), "{table}");
}

#[test]
fn a_file_with_large_sectors_is_exported_with_them() {
    let dir = short_dir();
    let path = large_sectors(dir.path());
    let socket = dir.path().join("nbd");
    let address = format!("unix:{}", socket.display());
    let mut command = headwater();
    command.arg("export").arg(&path).args(["--cache", "ram", "--ram", "64M", "--nbd", &address]);
    let mut child = command.spawn().unwrap();
    wait_until("the export listens", || socket.exists());
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let shown = run(Command::new("nbdinfo").args(["--json", &uri]));
    child.kill().unwrap();
    child.wait().unwrap();
    let shown: serde_json::Value = serde_json::from_str(&shown.ok()).unwrap();
    assert_eq!(shown["exports"][0]["block_size_minimum"], 4096, "{shown}");
}

#[test]
fn a_machine_gets_uefi_if_its_disk_boots_with_nothing_else() {
    let daemon = Daemon::start();
    let path = disk(daemon.path());
    sfdisk(
        path.to_str().unwrap(),
        daemon.path(),
        "label: gpt\nsize=4096, type=uefi\nsize=4096, type=linux\n",
    );
    let imported = daemon.cli(&["image", "import", path.to_str().unwrap(), "--name", "uefi"]);
    assert_eq!(imported.code, 0, "{imported:?}");
    assert!(imported.err.contains("boots with UEFI only"), "{imported:?}");
    daemon
        .cli(&["machine", "create", "lab", "uefi", "--firmware", "bios"])
        .fails(2, &["uefi@1", "boots with UEFI only"]);
    daemon.create("lab", "uefi", &[]);
    assert_eq!(daemon.machine("lab")["firmware"], "uefi");
    // A channel can lead an older machine to such a version.
    daemon.with_tiny_machine("old");
    assert_eq!(daemon.machine("old")["firmware"], "bios");
    daemon.cli(&["image", "import", path.to_str().unwrap(), "--name", "tiny"]).ok();
    daemon.cli(&["image", "promote", "tiny@2", "production"]).ok();
    daemon.cli(&["machine", "start", "old"]).fails(2, &["tiny@2", "boots with UEFI only"]);
}

#[test]
fn a_wait_ends_with_what_the_firmware_says() {
    let daemon = Daemon::start();
    let path = disk(daemon.path());
    sfdisk(path.to_str().unwrap(), daemon.path(), "label: gpt\nsize=4096, type=linux\n");
    // SeaBIOS boots no first sector without its mark.
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[510] = 0;
    std::fs::write(&path, bytes).unwrap();
    daemon.cli(&["image", "import", path.to_str().unwrap(), "--name", "empty"]).ok();
    daemon.cli(&["machine", "create", "lab", "empty"]).ok();
    daemon.cli(&["machine", "start", "lab", "--wait"]).fails(1, &["No bootable device"]);
}
