//! Other programs as clients: the tools of libnbd, QEMU and fio. `make test` installs them.

use std::sync::Arc;
use std::time::Duration;

use crate::fixture::Fixture;
use headwater_block::blocking;
use headwater_nbd::{Address, ClientIdentity, Export, ExportInfo, Exports, Limits, NotOpened, Server};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, Waits, run};

const MIB: u64 = 1 << 20;

fn late() -> ReferenceOptions {
    ReferenceOptions { waits: Waits::PerMille(300), delay: Duration::from_micros(10), ..Default::default() }
}

/// Data, zeroes and holes, in runs of odd lengths.
fn mixed_disk(seed: u64, options: ReferenceOptions) -> ReferenceDisk {
    let disk = ReferenceDisk::with_options(32 * MIB, options);
    let mut rng = Rng::new(seed);
    let mut at = 0;
    while at < 32 * MIB {
        let len = (rng.between(1, 300) * 4096).min(32 * MIB - at);
        if rng.chance(1, 2) {
            blocking::write(&disk, at, &rng.bytes(len as usize)).unwrap();
        }
        at += len;
    }
    disk
}

#[test]
fn nbdinfo_sees_size_flags_and_extents() {
    let fixture = Fixture::new(ReferenceDisk::new(32 * MIB));
    blocking::write(&*fixture.disk, 4096, &[1; 8192]).unwrap();
    let uri = fixture.server.uri();
    let info = run("libnbd-bin", "nbdinfo", &["--json", &uri]);
    for expected in [
        "\"export-size\": 33554432",
        "\"description\": \"a test disk\"",
        "\"can_multi_conn\": true",
        "\"can_fast_zero\": true",
        "\"can_cache\": true",
        "\"can_df\": true",
        "\"is_read_only\": false",
        "\"block_size_minimum\": 512",
        "base:allocation",
    ] {
        assert!(info.contains(expected), "{expected} in {info}");
    }
    // libnbd requests the newest kind of replies that it supports: extended headers from 1.18 on.
    let versions = run("libnbd-bin", "nbdinfo", &["--version"]);
    let version: Vec<u32> = versions
        .lines()
        .find_map(|line| line.strip_prefix("libnbd "))
        .unwrap_or_else(|| panic!("no version of libnbd in {versions}"))
        .split('.')
        .map_while(|part| part.trim().parse().ok())
        .collect();
    let packets = if version >= vec![1, 18] { "extended" } else { "structured" };
    let text = run("libnbd-bin", "nbdinfo", &[&uri]);
    assert!(text.contains(&format!("using {packets} packets")), "{packets}, {versions}: {text}");
    let map = run("libnbd-bin", "nbdinfo", &["--map", &uri]);
    let lines: Vec<Vec<&str>> = map.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["0", "4096", "3", "hole,zero"]);
    assert_eq!(lines[1], ["4096", "8192", "0", "data"]);
    assert_eq!(lines[2][..3], ["12288", "33542144", "3"]);
    let list = run("libnbd-bin", "nbdinfo", &["--list", &uri]);
    assert!(list.contains("export=\"\""), "{list}");
}

/// Exports the same disk under many names.
struct Many(Arc<ReferenceDisk>);

impl Exports for Many {
    fn list(&self, _: &ClientIdentity) -> Vec<ExportInfo> {
        let info = |number| ExportInfo { name: format!("machine-{number:02}"), description: "a disk".into() };
        (0..30).map(info).collect()
    }

    fn open(&self, name: &str, client: &ClientIdentity) -> Result<Export, NotOpened> {
        let is_there = self.list(client).iter().any(|info| info.name == name);
        let export = || Export { device: self.0.clone(), description: "a disk".into() };
        is_there.then(export).ok_or(NotOpened::Unknown)
    }
}

#[test]
fn qemu_nbd_lists_many_exports() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("nbd.sock");
    let exports = Arc::new(Many(Arc::new(ReferenceDisk::new(MIB))));
    let _server = Server::bind(Address::Unix(socket.clone()), exports, Limits::default()).unwrap();
    let text = run("qemu-utils", "qemu-nbd", &["--list", "-k", socket.to_str().unwrap()]);
    assert!(text.contains("exports available: 30"), "{text}");
    let is_told = |number: u32| text.contains(&format!("machine-{number:02}"));
    assert!((0..30).all(is_told), "{text}");
    assert_eq!(text.matches("base:allocation").count(), 30, "{text}");
}

#[test]
fn nbdcopy_copies_both_ways() {
    let from = Fixture::new(mixed_disk(31, late()));
    let to = Fixture::new(ReferenceDisk::with_options(32 * MIB, late()));
    let file = from.file("copy.raw");
    run("libnbd-bin", "nbdcopy", &[&from.server.uri(), &file]);
    assert!(std::fs::read(&file).unwrap() == from.disk.contents(), "the file differs");
    run("libnbd-bin", "nbdcopy", &["--flush", &file, &to.server.uri()]);
    assert!(to.disk.contents() == from.disk.contents(), "the disk differs");
    assert!(to.disk.counts().flushes > 0);
    let third = Fixture::new(ReferenceDisk::with_options(32 * MIB, late()));
    run("libnbd-bin", "nbdcopy", &[&from.server.uri(), &third.server.uri()]);
    assert!(third.disk.contents() == from.disk.contents(), "the copy from server to server differs");
}

#[test]
fn qemu_img_converts_and_compares() {
    let from = Fixture::new(mixed_disk(32, late()));
    let to = Fixture::new(ReferenceDisk::with_options(32 * MIB, late()));
    let file = from.file("copy.qcow2");
    run("qemu-utils", "qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &from.server.uri(), &file]);
    run("qemu-utils", "qemu-img", &["compare", "-f", "raw", "-F", "qcow2", &from.server.uri(), &file]);
    let uri = to.server.uri();
    run("qemu-utils", "qemu-img", &["convert", "-n", "-f", "qcow2", "-O", "raw", &file, &uri]);
    run("qemu-utils", "qemu-img", &["compare", "-f", "raw", "-F", "raw", &from.server.uri(), &uri]);
    assert!(to.disk.contents() == from.disk.contents(), "the disk differs");
}

#[test]
fn qemu_io_patterns_read_back() {
    let fixture = Fixture::new(ReferenceDisk::with_options(32 * MIB, late()));
    let commands = [
        "write -P 0x11 0 64k",
        "read -P 0x11 0 64k",
        "write -f -P 0x22 1M 4M",
        "read -P 0x22 1M 4M",
        "write -P 0x33 512 512",
        "read -P 0x33 512 512",
        "read -P 0x11 1024 63k",
        "discard 1M 1M",
        "write -z 3M 1M",
        "read -P 0 1M 1M",
        "read -P 0x22 2M 1M",
        "read -P 0 3M 1M",
        "write -z -u 4M 64k",
        "read -P 0 4M 64k",
        "aio_write -P 0x44 8M 1M",
        "aio_write -P 0x55 9M 1M",
        "aio_flush",
        "read -P 0x44 8M 1M",
        "read -P 0x55 9M 1M",
        "flush",
    ];
    let uri = fixture.server.uri();
    let mut arguments = vec!["-f", "raw"];
    for command in &commands {
        arguments.extend(["-c", command]);
    }
    arguments.push(&uri);
    let text = run("qemu-utils", "qemu-io", &arguments);
    assert!(!text.contains("failed") && !text.contains("rror"), "{text}");
    let counts = fixture.disk.counts();
    assert!(counts.fua >= 1 && counts.flushes >= 1 && counts.zeroes >= 2, "{counts:?}");
    assert!(counts.discards >= 1, "{counts:?}");
}

#[test]
fn fio_verifies_checksums_with_many_requests_in_flight() {
    let options = ReferenceOptions { waits: Waits::PerMille(200), ..Default::default() };
    let fixture = Fixture::new(ReferenceDisk::with_options(64 * MIB, options));
    let uri = format!("--uri={}", fixture.server.uri());
    let text = run(
        "fio",
        "fio",
        &[
            "--name=verify",
            "--ioengine=nbd",
            &uri,
            "--rw=randrw",
            "--bsrange=512-128k",
            "--bs_unaligned=0",
            "--blockalign=512",
            "--size=64M",
            "--iodepth=16",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--verify_state_save=0",
            "--verify_backlog=256",
            "--serialize_overlap=1",
            "--randrepeat=1",
            "--loops=4",
        ],
    );
    assert!(text.contains("err= 0"), "{text}");
    assert!(fixture.disk.counts().writes > 100);
}
