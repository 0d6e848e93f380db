//! The conformance suite of devices, through the mounted file.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use crate::fixture::{Mounted, tight};
use headwater_block::Device;
use headwater_fuse::Options;
use headwater_testkit::{FileDevice, ReferenceDisk, ReferenceOptions, Waits, conformance, wait_until};

fn check(mounted: Mounted, block_bytes: u32, seed: u64) -> Arc<ReferenceDisk> {
    let read_only = mounted.disk.geometry().read_only;
    let client: Arc<dyn Device> =
        Arc::new(FileDevice::open(&mounted.file(), read_only, block_bytes).unwrap());
    assert_eq!(client.geometry().size_bytes, mounted.disk.geometry().size_bytes);
    let options = conformance::Options { operations: 400, ..conformance::Options::seeded(seed) };
    let model = conformance::check(&client, &options);
    drop(client);
    mounted.server.stop();
    if block_bytes >= mounted.disk.geometry().logical_block_bytes {
        conformance::verify(&*mounted.disk, &model);
    }
    mounted.disk
}

#[test]
fn whole_blocks_that_need_no_waiting() {
    let disk = check(Mounted::new(16 << 20, ReferenceOptions::default()), 512, 1);
    assert_eq!(disk.counts().submitted, 0);
    assert_ne!(disk.counts().unmapping_zeroes, 0);
    assert_eq!(disk.counts().discards, 0);
    assert_ne!(disk.counts().flushes, 0);
}

#[test]
fn late_and_out_of_order_completions() {
    let options = ReferenceOptions { waits: Waits::Always, seed: 2, ..Default::default() };
    let disk = check(Mounted::new(16 << 20, options), 512, 2);
    assert_ne!(disk.counts().submitted, 0);
}

#[test]
fn ranges_of_any_length_at_any_byte() {
    for (seed, logical_block_bytes, waits) in
        [(3, 512, Waits::Never), (4, 512, Waits::PerMille(300)), (5, 4096, Waits::PerMille(300))]
    {
        let options = ReferenceOptions { waits, seed, logical_block_bytes, ..Default::default() };
        check(Mounted::new(2 << 20, options), 1, seed);
    }
}

#[test]
fn blocks_of_4096_bytes_written_in_parts_of_512() {
    let options = ReferenceOptions { logical_block_bytes: 4096, seed: 6, ..Default::default() };
    check(Mounted::new(4 << 20, options), 512, 6);
}

#[test]
fn one_reader_and_little_room_in_flight() {
    let waits = ReferenceOptions {
        waits: Waits::PerMille(700),
        delay: Duration::from_micros(50),
        seed: 7,
        ..Default::default()
    };
    let disk = ReferenceDisk::with_options(8 << 20, waits);
    check(Mounted::with(disk, Options { limits: tight(), ..Options::default() }), 256, 7);
}

/// Memory for waiting requests is bounded, however many programs send some.
#[test]
fn what_waits_for_the_device_is_bounded() {
    const BYTES: usize = 4096;
    let options = ReferenceOptions { waits: Waits::Always, ..Default::default() };
    let limits = tight();
    let fits = (limits.bytes_in_flight / BYTES) as u64;
    let disk = ReferenceDisk::with_options(1 << 20, options);
    disk.hold();
    let mounted = Mounted::with(disk, Options { limits, ..Options::default() });
    let file = mounted.open();
    std::thread::scope(|scope| {
        for number in 0..32 {
            let file = &file;
            scope.spawn(move || file.read_exact_at(&mut [0; BYTES], number * BYTES as u64).unwrap());
        }
        wait_until("as many wait as may", || mounted.disk.most_waiting() >= fits);
        mounted.disk.release();
    });
    assert_eq!(mounted.disk.counts().reads, 32);
    assert!(mounted.disk.most_waiting() <= fits, "{} waited", mounted.disk.most_waiting());
}

#[test]
fn a_read_only_disk() {
    check(Mounted::new(4 << 20, ReferenceOptions { read_only: true, ..Default::default() }), 512, 8);
}
