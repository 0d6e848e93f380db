//! RAM that a volume no longer needs is returned to the system, by the system's own count. (A test in
//! `writecache/src/host.rs` checks how soon, with a set clock.) A program of its own, because other tests'
//! memory would count, too.

#[path = "it/filling/mod.rs"]
#[expect(dead_code, reason = "it is for others, too")]
mod filling;
#[path = "it/setup/mod.rs"]
mod setup;

use std::sync::Arc;

use filling::{MIB, empty};
use headwater_block::{Device, blocking};
use headwater_testkit::{FileDevice, Rng, resident_bytes, wait_until};
use headwater_volume::CacheMode;

/// Writes 128 MiB; returns the resident memory.
fn filled(device: &dyn Device, before: u64) -> u64 {
    let data = Rng::new(7).bytes(MIB as usize);
    for number in 0..128 {
        blocking::write(device, number * MIB, &data).unwrap();
    }
    let full = resident_bytes();
    assert!(full > before + 120 * MIB, "{before} bytes before and {full} after: not in RAM?");
    full
}

#[test]
fn ram_that_is_free_goes_back_to_the_system() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) =
        setup::open(&setup::options(&empty(256), CacheMode::Ram, 192, 0, dir.path()), &host);
    let before = resident_bytes();
    let full = filled(&*device, before);
    blocking::discard(&*device, 0, 256 * MIB).unwrap();
    wait_until("what was discarded is free for others", || resident_bytes() + 100 * MIB < full);
    // Overwriting takes no more memory, and the rest is freed when the volume is dropped. Some discarded
    // memory may not be returned yet, and does not count as used before.
    let full = filled(&*device, before);
    filled(&*device, full - 128 * MIB);
    drop((volume, device));
    wait_until("what a volume had is free for others", || resident_bytes() + 100 * MIB < full);

    // One block in each 2 MiB takes half as much index as data.
    let path = dir.path().join("image");
    std::fs::File::create(&path).unwrap().set_len(32 << 30).unwrap();
    let image: Arc<dyn Device> = Arc::new(FileDevice::open(&path, true, 512).unwrap());
    let (volume, device) = setup::open(&setup::options(&image, CacheMode::Ram, 256, 0, dir.path()), &host);
    let before = resident_bytes();
    let block = Rng::new(8).bytes(4096);
    for number in 0..16 << 10 {
        blocking::write(&*device, number * 2 * MIB, &block).unwrap();
    }
    let full = resident_bytes();
    assert!(full > before + 60 * MIB, "{before} bytes before and {full} after");
    blocking::discard(&*device, 0, 30 << 30).unwrap();
    wait_until("the index of what was discarded is free", || resident_bytes() < full - 50 * MIB);
    drop((volume, device));
    wait_until("the index of a volume is free", || resident_bytes() < before + 16 * MIB);
}
