//! One RAM budget for all volumes of a host: shares by weight, unused shares that go to others, and memory
//! pressure.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use headwater_block::{Device, blocking};
use headwater_testkit::{ReferenceDisk, Rng, wait_until};
use headwater_volume::{CacheMode, Volume};
use headwater_writecache::Host;
use headwater_writecache::host::STAGING_BUFFERS;
use headwater_writecache::overflow::encrypt::ENCRYPTED_SEGMENT_BYTES;
use headwater_writecache::overflow::io::open_engine;
use headwater_writecache::pressure::{Level, PressureSource};

use crate::setup;

const MIB: u64 = 1 << 20;
const SPAN_MIB: u64 = 256;

fn volume(host: &Host, weight: u32, ram_mib: u64, at: &Path) -> (Arc<Volume>, Arc<dyn Device>) {
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(SPAN_MIB * MIB));
    let mut options = setup::options(&base, CacheMode::RamDisk, ram_mib, 1024, at);
    options.weight = weight;
    options.pause_limit = Duration::from_secs(60);
    setup::open(&options, host)
}

/// Writes incompressible data all over the volume until it is stopped.
fn keep_writing(device: &dyn Device, seed: u64, stop: &AtomicBool) {
    let mut rng = Rng::new(seed);
    let data = rng.bytes(64 << 10);
    while !stop.load(Ordering::Relaxed) {
        let offset = rng.below(SPAN_MIB * MIB / (64 << 10)) * (64 << 10);
        blocking::write(device, offset, &data).unwrap();
    }
}

fn used_mib(volume: &Volume) -> u64 {
    volume.counters().cache.ram_used_bytes / MIB
}

/// Stops the writers even if the test panics, so that their scope ends.
struct StopOnDrop<'a>(&'a [AtomicBool]);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|stop| stop.store(true, Ordering::Relaxed));
    }
}

#[test]
fn two_volumes_under_pressure_share_by_weight_and_one_that_stops_lends() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(160 * MIB);
    let (light, light_device) = volume(&host, 100, 150, dir.path());
    let (heavy, heavy_device) = volume(&host, 300, 150, dir.path());
    let stops = [AtomicBool::new(false), AtomicBool::new(false)];
    let ratio_is_near_three = || {
        let (light, heavy) = (used_mib(&light) as f64, used_mib(&heavy) as f64);
        light + heavy > 120.0 && (2.5..=3.7).contains(&(heavy / light))
    };
    std::thread::scope(|scope| {
        let _guard = StopOnDrop(&stops);
        // The light volume comes first and takes all it may have, because no other volume needs memory.
        scope.spawn(|| keep_writing(&*light_device, 1, &stops[0]));
        wait_until("the light volume fills its maximum", || used_mib(&light) > 125);
        scope.spawn(|| keep_writing(&*heavy_device, 2, &stops[1]));
        wait_until("the two use memory by their weights", ratio_is_near_three);
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(50));
            let (light_mib, heavy_mib) = (used_mib(&light), used_mib(&heavy));
            assert!(light_mib <= 46 && heavy_mib <= 126, "{light_mib} and {heavy_mib} MiB");
            assert!(host.used_bytes() <= 161 * MIB, "{} in use", host.used_bytes());
        }
        // The heavy volume stops: its unused memory goes to the other.
        stops[1].store(true, Ordering::Relaxed);
        wait_until("the light volume uses what the heavy one lends", || used_mib(&light) > 125);
        wait_until("the heavy volume keeps little", || used_mib(&heavy) <= 14);
        assert!(light.counters().cache.ram_share_bytes > 125 * MIB);
        // And back.
        let again = AtomicBool::new(false);
        let again = std::slice::from_ref(&again);
        std::thread::scope(|scope| {
            let _guard = StopOnDrop(again);
            scope.spawn(|| keep_writing(&*heavy_device, 3, &again[0]));
            wait_until("the heavy volume has its share again", ratio_is_near_three);
        });
    });
}

#[test]
fn changed_weights_move_memory() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(128 * MIB);
    let volumes = [volume(&host, 100, 128, dir.path()), volume(&host, 100, 128, dir.path())];
    let stops = [AtomicBool::new(false)];
    std::thread::scope(|scope| {
        let _guard = StopOnDrop(&stops);
        for (seed, (_, device)) in (1..).zip(&volumes) {
            let stop = &stops[0];
            scope.spawn(move || keep_writing(&**device, seed, stop));
        }
        let ratio = || used_mib(&volumes[0].0) as f64 / used_mib(&volumes[1].0).max(1) as f64;
        let all = || used_mib(&volumes[0].0) + used_mib(&volumes[1].0) > 90;
        wait_until("both have the same", || all() && (0.8..=1.25).contains(&ratio()));
        volumes[0].0.set_weight(400);
        wait_until("the first has four times as much", || all() && (3.0..=5.5).contains(&ratio()));
    });
}

#[test]
fn what_the_volumes_and_the_buffers_take_is_what_the_host_counts() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let mut volumes = vec![volume(&host, 100, 48, dir.path()), volume(&host, 100, 48, dir.path())];
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(SPAN_MIB * MIB));
    let mut options = setup::options(&base, CacheMode::Ram, 32, 0, dir.path());
    options.pause_limit = Duration::from_secs(60);
    volumes.push(setup::open(&options, &host));
    let mut rng = Rng::new(9);
    // Memory above the sum of the volumes' own counts. The host is informed of a volume's index when the
    // volume begins a segment, so its count may lag by a segment's index.
    // segment's part behind.
    const BEHIND: u64 = 3 * (16 << 10);
    let counters = |volumes: &[(Arc<Volume>, Arc<dyn Device>)], of: fn(&Volume) -> u64| {
        volumes.iter().map(|(volume, _)| of(volume)).sum::<u64>()
    };
    let is_beyond = |volumes: &[(Arc<Volume>, Arc<dyn Device>)], bytes: u64| {
        let sum = counters(volumes, |volume| volume.counters().cache.ram_used_bytes);
        host.used_bytes().abs_diff(sum + bytes) <= BEHIND
    };
    // All buffers are taken, and stay so.
    faults.hold.store(true, Ordering::Relaxed);
    for (_, device) in &volumes[..2] {
        (0..40).for_each(|mib| blocking::write(&**device, mib * MIB, &rng.bytes(1 << 20)).unwrap());
    }
    for mib in 0..48 {
        let data = rng.runs(1 << 20, 8);
        blocking::write(&*volumes[2].1, mib * MIB, &data).unwrap();
    }
    wait_until("the buffers are counted", || {
        is_beyond(&volumes, (STAGING_BUFFERS * ENCRYPTED_SEGMENT_BYTES) as u64)
    });
    // Index and packed segments are a considerable part of it.
    assert!(counters(&volumes, |volume| volume.counters().cache.index_bytes) > 4 * BEHIND);
    assert!(counters(&volumes, |volume| volume.counters().cache.packed_bytes) > 4 * BEHIND);
    faults.hold.store(false, Ordering::Relaxed);
    wait_until("the buffers are given back", || is_beyond(&volumes, 0));
    assert!(counters(&volumes, |volume| volume.counters().cache.spilled_segments) > 4);
    volumes.pop();
    wait_until("what a volume had is given back", || is_beyond(&volumes, 0));
    drop(volumes);
    wait_until("everything is given back", || host.used_bytes() == 0);
}

/// A source whose level a test sets.
#[derive(Clone)]
struct Lever(Arc<AtomicU8>, Arc<AtomicU8>);

impl PressureSource for Lever {
    fn level(&mut self, _now: Instant) -> Level {
        self.1.fetch_add(1, Ordering::SeqCst);
        match self.0.load(Ordering::SeqCst) {
            0 => Level::Ample,
            1 => Level::Tight,
            _ => Level::Critical,
        }
    }

    fn name(&self) -> &'static str {
        "lever"
    }
}

#[test]
fn memory_pressure_shrinks_the_limit_and_its_end_restores_it() {
    let dir = tempfile::tempdir().unwrap();
    let (level, looks) = (Arc::new(AtomicU8::new(0)), Arc::new(AtomicU8::new(0)));
    let lever = Lever(Arc::clone(&level), Arc::clone(&looks));
    let host = Host::with_parts(u64::MAX, open_engine().unwrap(), lever).unwrap();
    let (volume, device) = volume(&host, 100, 96, dir.path());
    std::thread::sleep(Duration::from_millis(1200));
    assert_eq!(looks.load(Ordering::SeqCst), 0, "an idle host looks at nothing");
    let data = Rng::new(5).bytes(MIB as usize);
    (0..200).for_each(|number| blocking::write(&*device, number * MIB, &data).unwrap());
    assert!(used_mib(&volume) > 70);
    level.store(2, Ordering::SeqCst);
    wait_until("the caches give memory back", || used_mib(&volume) < 50);
    let cache = volume.counters().cache;
    assert!(cache.pressure_shrinks >= 2 && cache.host_limit_bytes < 60 * MIB, "{cache:?}");
    assert_eq!(cache.ram_target_bytes, 96 * MIB);
    // It continues to shrink between the two counts.
    wait_until("both tell the same", || {
        host.snapshot().pressure_shrinks == volume.counters().cache.pressure_shrinks
    });
    level.store(0, Ordering::SeqCst);
    wait_until("the whole limit is back", || host.snapshot().limit_bytes == u64::MAX);
    (0..200).for_each(|number| blocking::write(&*device, number * MIB, &data).unwrap());
    assert!(used_mib(&volume) > 70);
    let mut read = vec![0; MIB as usize];
    for number in 0..200 {
        blocking::read(&*device, number * MIB, &mut read).unwrap();
        assert!(read == data, "MiB {number} was lost");
    }
}

/// Zero blocks over an image take index memory and no segment, and another write does not take what discards
/// free.
#[test]
fn the_budget_knows_of_an_index_that_comes_and_goes_without_data() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start(u64::MAX).unwrap();
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(4096 * MIB));
    let (volume, device) = setup::open(&setup::options(&base, CacheMode::Ram, 64, 0, dir.path()), &host);
    let index_bytes = || volume.counters().cache.index_bytes;
    for number in 0..1000 {
        blocking::write(&*device, number * 4 * MIB, &[0; 4096]).unwrap();
    }
    assert!(index_bytes() >= 1000 * 2048);
    wait_until("all of it is counted", || host.used_bytes() == index_bytes());
    blocking::discard(&*device, 0, 4096 * MIB).unwrap();
    assert!(index_bytes() < 2048);
    wait_until("it is given back", || host.used_bytes() == index_bytes());
}
