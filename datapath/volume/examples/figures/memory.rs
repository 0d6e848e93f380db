//! Measures the index, opening, freezing, and the memory that is freed.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use headwater_block::blocking;
use headwater_testkit::{Rng, resident_bytes};
use headwater_volume::CacheMode;

use crate::rows::{Goal, Report, Row, median};
use crate::work::{self, GIB, MIB};

/// A GiB of contiguous changed blocks: the memory of its index.
pub fn index(_dir: &Path, report: &mut Report) {
    let host = work::host();
    let volume = work::open(&work::options(CacheMode::Ram, GIB + 64 * MIB, 0, Path::new("/")), &host);
    let data = Rng::new(1).bytes(MIB as usize);
    for number in 0..1024 {
        blocking::write(&*volume, number * MIB, &data).expect("it fits");
    }
    let cache = volume.counters().cache;
    let part = cache.index_bytes as f64 / GIB as f64 * 100.0;
    let figure = "index of 1 GiB of changed blocks, dense";
    report.add(Row::plain("index", figure, part, "%", Goal::AtMost(0.2)));
}

/// Opening a volume on a disk of 64 GiB without data; freezing it with 4 GiB of changes. What an image costs, open already or not, is
/// `open_time` of the image crate's examples.
pub fn open_and_freeze(dir: &Path, report: &mut Report) {
    let host = work::host();
    let options = work::options(CacheMode::RamDisk, 512 * MIB, 6 * GIB, dir);
    let opened = |_| {
        let start = Instant::now();
        let volume = work::open(&options, &host);
        let ms = start.elapsed().as_secs_f64() * 1e3;
        drop(volume);
        ms
    };
    let ms = median(&(0..50).map(opened).collect::<Vec<f64>>());
    report.add(Row::plain(
        "open",
        "open a volume on a disk of 64 GiB without data, median of 50",
        ms,
        "ms",
        Goal::AtMost(5.0),
    ));
    let volume = work::open(&options, &host);
    let data = Rng::new(2).bytes(MIB as usize);
    for number in 0..4096 {
        blocking::write(&*volume, number * MIB, &data).expect("there is room");
    }
    let frozen = |_| {
        let start = Instant::now();
        let view = volume.freeze().expect("it can be frozen");
        let ms = start.elapsed().as_secs_f64() * 1e3;
        drop(view);
        ms
    };
    let ms: Vec<f64> = (0..20).map(frozen).collect();
    let most = ms.iter().copied().fold(0.0, f64::max);
    let figure = "freeze it with 4 GiB of changes, longest of 20";
    report.add(Row::plain("open", figure, most, "ms", Goal::AtMost(20.0)));
}

/// Disk blocks of this process's unnamed files.
fn disk_bytes(dir: &Path) -> u64 {
    let dir = dir.canonicalize().expect("it is there");
    let links = std::fs::read_dir("/proc/self/fd").expect("it is there").filter_map(Result::ok);
    links
        .filter(|link| std::fs::read_link(link.path()).is_ok_and(|target| target.starts_with(&dir)))
        .filter_map(|link| std::fs::metadata(link.path()).ok())
        .map(|metadata| metadata.blocks() * 512)
        .sum()
}

/// RAM and disk after a machine has discarded all of its 1 GiB.
pub fn resident(dir: &Path, report: &mut Report) {
    let host = work::host();
    let before = resident_bytes();
    let volume = work::open(&work::options(CacheMode::RamDisk, 256 * MIB, 4 * GIB, dir), &host);
    let data = Rng::new(3).bytes(MIB as usize);
    let mut most = 0;
    for number in 0..1024 {
        blocking::write(&*volume, number * MIB, &data).expect("there is room");
        most = most.max(resident_bytes().saturating_sub(before));
    }
    let limit = 256.0 * 1.03 + 32.0;
    let figure = "resident while 1 GiB is written, 256 MiB of RAM";
    report.add(Row::plain("resident", figure, most as f64 / MIB as f64, "MiB", Goal::AtMost(limit)));
    let full = disk_bytes(dir);
    let start = Instant::now();
    blocking::discard(&*volume, 0, GIB).expect("it discards");
    let (mut ram_ms, mut disk_ms) = (None, None);
    while (ram_ms.is_none() || disk_ms.is_none()) && start.elapsed() < Duration::from_secs(20) {
        let ms = start.elapsed().as_secs_f64() * 1e3;
        if resident_bytes() <= before + 12 * MIB {
            ram_ms.get_or_insert(ms);
        }
        // Sixteen positions stay claimed.
        if disk_bytes(dir) <= 17 * 514 * 4096 {
            disk_ms.get_or_insert(ms);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let never = f64::INFINITY;
    let figure = "RAM back after a discard of 1 GiB";
    report.add(Row::plain("resident", figure, ram_ms.unwrap_or(never), "ms", Goal::AtMost(1000.0)));
    let figure = format!("disk back ({} MiB) after a discard of 1 GiB", full / MIB);
    report.add(Row::plain("resident", figure, disk_ms.unwrap_or(never), "ms", Goal::AtMost(1000.0)));
}
