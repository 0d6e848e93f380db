//! The conformance suite of devices, through the queues of a real driver.

use std::sync::Arc;
use std::time::Duration;

use headwater_block::Device;
use headwater_testkit::vhost::{Setup, VhostDisk};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Waits, conformance};
use headwater_vhost_user::{Options, Server};

fn check(disk: ReferenceDisk, setup: Setup, seed: u64) -> Arc<ReferenceDisk> {
    let dir = tempfile::tempdir().unwrap();
    let disk = Arc::new(disk);
    let options = Options { name: "test".into(), ..Options::default() };
    let server = Server::bind(&dir.path().join("disk.sock"), Arc::clone(&disk) as _, options).unwrap();
    let client: Arc<dyn Device> = Arc::new(VhostDisk::connect(server.path(), setup));
    let geometry = disk.geometry();
    assert_eq!(client.geometry(), geometry);
    let options = conformance::Options { operations: 400, ..conformance::Options::seeded(seed) };
    let model = conformance::check(&client, &options);
    drop(client);
    server.stop();
    conformance::verify(&*disk, &model);
    disk
}

#[test]
fn hits_of_one_queue() {
    let disk = check(ReferenceDisk::new(16 << 20), Setup { queues: 1, event_idx: true }, 1);
    assert_eq!(disk.counts().submitted, 0);
    assert!(disk.counts().together > 0);
}

#[test]
fn hits_of_four_queues_without_event_indices() {
    check(ReferenceDisk::new(16 << 20), Setup { queues: 4, event_idx: false }, 2);
}

#[test]
fn late_and_out_of_order_completions() {
    for (seed, event_idx) in [(3, true), (4, false)] {
        let options = ReferenceOptions { waits: Waits::Always, seed, ..Default::default() };
        let disk =
            check(ReferenceDisk::with_options(16 << 20, options), Setup { queues: 2, event_idx }, seed);
        assert_ne!(disk.counts().submitted, 0);
    }
}

#[test]
fn some_requests_wait_and_take_their_time() {
    let options = ReferenceOptions {
        waits: Waits::PerMille(200),
        delay: Duration::from_micros(50),
        seed: 5,
        ..Default::default()
    };
    check(ReferenceDisk::with_options(16 << 20, options), Setup { queues: 3, event_idx: true }, 5);
}

#[test]
fn blocks_of_4096_bytes_and_no_cache_to_flush() {
    let options = ReferenceOptions { logical_block_bytes: 4096, volatile_cache: false, ..Default::default() };
    check(ReferenceDisk::with_options(16 << 20, options), Setup { queues: 1, event_idx: true }, 6);
}

#[test]
fn a_read_only_disk_refuses_writes_and_stays_as_it_is() {
    let contents: Vec<u8> = (0..8_u32 << 20).map(|i| (i / 512 * 7 + i) as u8).collect();
    let options = ReferenceOptions { read_only: true, ..Default::default() };
    let disk = ReferenceDisk::with_contents(contents.clone(), options);
    let disk = check(disk, Setup { queues: 2, event_idx: true }, 7);
    assert!(disk.contents() == contents);
}
