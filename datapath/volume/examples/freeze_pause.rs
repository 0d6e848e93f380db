//! Measures a freeze of a volume with MIB MiB of changes: the call, and the release of the frozen view. The longest write in half a
//! second before the call is compared with the longest write from the call to half a second after it. The mean time of a write is
//! that of the half second after the call.
//!
//! `cargo run --release -p headwater-volume --example freeze_pause -- [MIB] [ROUNDS]`

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use headwater_block::{Device, blocking};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng};
use headwater_volume::{Buffering, CacheMode, DEFAULT_WEIGHT, LittleSpace, Volume, VolumeOptions};
use headwater_writecache::Host;

const BLOCK: usize = 4096;

/// How long writes are watched before and after each freeze.
const WATCH: Duration = Duration::from_millis(500);

fn main() {
    let mut args = std::env::args().skip(1);
    let mut number = |default: u64| args.next().and_then(|text| text.parse().ok()).unwrap_or(default);
    let (mib, rounds) = (number(4096), number(5));
    let span_bytes = mib << 20;
    let host = Host::start(u64::MAX).expect("the host starts");
    let read_only = ReferenceOptions { read_only: true, ..ReferenceOptions::default() };
    let options = VolumeOptions {
        name: "freeze_pause".into(),
        base: Arc::new(ReferenceDisk::with_options(span_bytes, read_only)),
        mode: CacheMode::Ram,
        ram_bytes: span_bytes * 2,
        weight: DEFAULT_WEIGHT,
        buffering: Buffering::Direct,
        little_space: LittleSpace::Refused,
        persistent: None,
        disk_bytes: 0,
        cache_dir: std::env::temp_dir(),
        pause_limit: Duration::from_secs(60),
    };
    let volume = Volume::open(&options, &host).expect("the volume opens");
    let block = Rng::new(1).bytes(1 << 20);
    for number in 0..mib {
        blocking::write(&*volume, number << 20, &block).expect("there is room");
    }
    let changed_mib = volume.counters().cache.ram_used_bytes >> 20;
    println!("{changed_mib} MiB of changes");
    println!(
        "{:>10} {:>23} {:>23} {:>20} {:>10}",
        "freeze us",
        "longest write before us",
        "longest write during us",
        "mean write during ns",
        "release ms"
    );
    for round in 0..rounds {
        let (longest, over) = (AtomicU64::new(0), AtomicBool::new(false));
        let written = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| write_on(&*volume, span_bytes, round, (&longest, &written), &over));
            std::thread::sleep(WATCH);
            let before_us = longest.swap(0, Ordering::Relaxed) / 1000;
            let since = Instant::now();
            let view = volume.freeze().expect("one at a time");
            let freeze = since.elapsed();
            written.store(0, Ordering::Relaxed);
            std::thread::sleep(WATCH);
            let mean_ns = WATCH.as_nanos() as u64 / written.load(Ordering::Relaxed).max(1);
            let frozen_us = longest.load(Ordering::Relaxed) / 1000;
            let since = Instant::now();
            drop(view);
            let release_ms = since.elapsed().as_secs_f64() * 1e3;
            over.store(true, Ordering::Relaxed);
            let freeze_us = freeze.as_secs_f64() * 1e6;
            println!("{freeze_us:>10.1} {before_us:>23} {frozen_us:>23} {mean_ns:>20} {release_ms:>10.1}");
        });
    }
}

/// Writes random blocks one after the other, and notes the longest.
fn write_on(
    device: &dyn Device,
    span_bytes: u64,
    seed: u64,
    (longest, written): (&AtomicU64, &AtomicU64),
    over: &AtomicBool,
) {
    let mut rng = Rng::new(seed + 7);
    let data = rng.bytes(BLOCK);
    while !over.load(Ordering::Relaxed) {
        let offset = rng.below(span_bytes / BLOCK as u64) * BLOCK as u64;
        let since = Instant::now();
        blocking::write(device, offset, &data).expect("there is room");
        longest.fetch_max(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
        written.fetch_add(1, Ordering::Relaxed);
    }
}
