//! Scans of write caches: what they find, and who ends them.

use std::path::Path;
use std::process::Command;

use headwater_api::ContentsKind;
use headwater_nbd::Client;
use headwater_service::backend::TaskControl;
use headwater_testkit::{Rng, succeed};

use super::*;

const BLOCK: usize = 4096;

/// An ext4, and the same after files were written.
fn two_states(dir: &Path) -> (Vec<u8>, Vec<u8>) {
    let (image, script) = (dir.join("image"), dir.join("script"));
    let mut mke2fs = Command::new("mke2fs");
    succeed("e2fsprogs", mke2fs.args(["-q", "-F", "-t", "ext4", "-b", "4096"]).arg(&image).arg("64M"));
    let before = std::fs::read(&image).unwrap();
    // Not packed and not elided.
    std::fs::write(dir.join("noise"), Rng::new(3).bytes(3 << 20)).unwrap();
    std::fs::write(dir.join("more"), Rng::new(4).bytes(1 << 20)).unwrap();
    let (noise, more) = (dir.join("noise"), dir.join("more"));
    let commands = format!(
        "mkdir /var\nmkdir /var/log\nwrite {} /var/log/app.log\nwrite {} /gone\nrm /gone\n",
        noise.display(),
        more.display()
    );
    std::fs::write(&script, commands).unwrap();
    let mut debugfs = Command::new("debugfs");
    succeed("e2fsprogs", debugfs.arg("-w").arg("-f").arg(&script).arg(&image));
    (before, std::fs::read(&image).unwrap())
}

fn image(bytes: Vec<u8>) -> Arc<dyn Device> {
    Arc::new(ReferenceDisk::with_contents(bytes, ReferenceOptions::default()))
}

/// Writes what differs, as a machine does.
fn write(device: &dyn Device, before: &[u8], after: &[u8]) {
    let pairs = before.chunks(BLOCK).zip(after.chunks(BLOCK)).enumerate();
    for (number, (_, block)) in pairs.filter(|(_, (before, after))| before != after) {
        blocking::write(device, (number * BLOCK) as u64, block).unwrap();
    }
}

fn control() -> Arc<TaskControl> {
    Arc::default()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().build().unwrap()
}

#[test]
fn a_scan_names_the_files_of_a_machine_that_is_on() {
    let dir = tempfile::tempdir().unwrap();
    let (before, after) = two_states(dir.path());
    let fixture = Fixture::over(image(before.clone()), CacheArgs::default());
    let runtime = runtime();
    let disk = runtime.block_on(fixture.volumes.open(fixture.disk(small()))).unwrap();
    let empty = runtime.block_on(disk.contents(control())).unwrap();
    assert_eq!((empty.held.total_bytes, empty.kinds.len()), (0, 0));
    let client = Client::open(&format!("nbd+unix:///?socket={}", disk.socket().display())).unwrap();
    write(&*client, &before, &after);
    let found = runtime.block_on(disk.contents(control())).unwrap();
    let log = found.files.iter().find(|file| file.path == "/var/log/app.log").unwrap();
    assert_eq!(log.held.total_bytes, 3 << 20, "{found:?}");
    let of = |kind| {
        let its = found.kinds.iter().find(|its| its.kind == kind);
        its.map_or(0, |its| its.held.total_bytes)
    };
    assert_eq!(of(ContentsKind::Free), 1 << 20, "{found:?}");
    assert_eq!(found.partitions[0].free_bytes, 1 << 20);
    let sum: u64 = found.kinds.iter().map(|kind| kind.held.total_bytes).sum();
    assert_eq!(sum, found.held.total_bytes);
    // All places: nothing was spilled, so nothing is on disk.
    assert_eq!(found.held.ram_bytes + found.held.packed_bytes, found.held.total_bytes, "{:?}", found.held);
    let directories: Vec<_> =
        found.directories.iter().map(|its| (&*its.path, its.held.total_bytes)).collect();
    for (path, bytes) in &directories {
        assert!(*bytes >= 3 << 20, "{path}: {bytes}");
    }
    assert_eq!(directories.len(), 3, "{directories:?}");
    runtime.block_on(disk.close()).unwrap();
}

#[test]
fn a_seal_and_a_reader_end_a_scan_and_go_on() {
    let fixture = Fixture::new();
    let runtime = runtime();
    let disk = runtime.block_on(fixture.volumes.open(fixture.disk(small()))).unwrap();
    let served = fixture.volumes.readable.of_machine("lab").unwrap();
    let permit = || ScanPermit::take(&served.scans).unwrap();
    // A scan that has begun.
    let scan = served.open_scan().unwrap();
    let second = served.open_scan().err().unwrap();
    assert!(
        second.kind() == ProblemKind::Conflict && second.to_string().contains("another scan"),
        "{second}"
    );
    disk.can_freeze().unwrap();
    assert!(scan.has_ended());
    let frozen = disk.freeze().unwrap();
    let ended = contents::scan(scan, permit(), control()).unwrap_err();
    assert_eq!(ended.kind(), ProblemKind::Conflict);
    // Nor does a scan begin while a version is made.
    let refused = runtime.block_on(disk.contents(control())).unwrap_err();
    assert_eq!(refused.kind(), ProblemKind::Conflict);
    drop(frozen);
    let scan = served.open_scan().unwrap();
    let reader = fixture.volumes.open_reader("lab").unwrap().unwrap();
    assert!(scan.has_ended() && reader.is_first());
    // The end of the scan is not that of the reader.
    drop(scan);
    blocking::read(&reader, 0, &mut [0; BLOCK]).unwrap();
    let refused = runtime.block_on(disk.contents(control())).unwrap_err();
    assert!(refused.to_string().contains("being read over NBD"), "{refused}");
    drop(reader);
    runtime.block_on(disk.contents(control())).unwrap();
    runtime.block_on(disk.close()).unwrap();
}

#[test]
fn a_seal_waits_for_the_last_read_of_a_scan_and_no_longer() {
    let fixture = Fixture::new();
    let runtime = runtime();
    let disk = runtime.block_on(fixture.volumes.open(fixture.disk(small()))).unwrap();
    let served = fixture.volumes.readable.of_machine("lab").unwrap();
    let scan = served.open_scan().unwrap();
    // A read that is under way has the view.
    let read = scan.frozen().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wait_until("the scan is ended", || scan.has_ended());
            drop(read);
        });
        drop(disk.freeze().unwrap());
    });
    runtime.block_on(disk.close()).unwrap();
}

#[test]
fn a_scan_ends_with_its_task_and_with_its_machine() {
    let fixture = Fixture::new();
    let runtime = runtime();
    let disk = runtime.block_on(fixture.volumes.open(fixture.disk(small()))).unwrap();
    let cancelled = control();
    cancelled.cancel();
    let refused = runtime.block_on(disk.contents(cancelled)).unwrap_err();
    assert_eq!(refused.kind(), ProblemKind::Cancelled);
    let served = fixture.volumes.readable.of_machine("lab").unwrap();
    let scan = served.open_scan().unwrap();
    runtime.block_on(disk.close()).unwrap();
    assert!(scan.has_ended());
    assert_eq!(runtime.block_on(disk.contents(control())).unwrap_err().kind(), ProblemKind::Conflict);
}

#[test]
fn a_host_has_a_limit_of_scans() {
    let fixture = Fixture::new();
    let runtime = runtime();
    let disk = runtime.block_on(fixture.volumes.open(fixture.disk(small()))).unwrap();
    let scans = &fixture.volumes.readable.scans;
    let permit = ScanPermit::take(scans).unwrap();
    let refused = runtime.block_on(disk.contents(control())).unwrap_err();
    assert!(refused.kind() == ProblemKind::Conflict && refused.advice().is_some(), "{refused}");
    drop(permit);
    runtime.block_on(disk.contents(control())).unwrap();
    runtime.block_on(disk.close()).unwrap();
}

#[test]
fn a_scan_of_a_persistent_disk_keeps_neither_a_seal_nor_its_machine_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let (before, after) = two_states(dir.path());
    let mut fixture = Fixture::over(image(before.clone()), CacheArgs::default());
    let runtime = runtime();
    let refused = runtime.block_on(fixture.volumes.persistent_contents(fixture.request.clone(), control()));
    assert_eq!(refused.unwrap_err().kind(), ProblemKind::Conflict);
    let kept = DiskRequest { kept: Some(fixture.request.kept), ..fixture.disk(fixture.request.cache) };
    let disk = runtime.block_on(fixture.volumes.open(kept)).unwrap();
    let client = Client::open(&format!("nbd+unix:///?socket={}", disk.socket().display())).unwrap();
    write(&*client, &before, &after);
    drop(client);
    runtime.block_on(disk.close()).unwrap();
    fixture.request.kept.is_begun = true;
    let found =
        runtime.block_on(fixture.volumes.persistent_contents(fixture.request.clone(), control())).unwrap();
    let log = found.files.iter().find(|file| file.path == "/var/log/app.log").unwrap();
    assert_eq!(log.held.total_bytes, 3 << 20, "{found:?}");
    assert_eq!(found.held.disk_bytes, found.held.total_bytes, "{:?}", found.held);
    let scan = || {
        let opener = fixture.volumes.opener();
        let leases = fixture.volumes.readable.of_kept(fixture.request.kept.id);
        leases.borrow_for_scan(|| opener.left(&fixture.request)).unwrap()
    };
    let under_way = scan();
    let frozen = runtime.block_on(fixture.volumes.open_persistent(fixture.request.clone())).unwrap();
    assert!(under_way.has_ended());
    drop((frozen, under_way));
    let under_way = scan();
    fixture.open_reader().unwrap();
    assert!(under_way.has_ended());
    let under_way = scan();
    fixture.begin().unwrap();
    assert!(under_way.has_ended());
}
