//! `make bench`: a volume without any protocol, beside what memory and the disk can do by themselves.
//!
//! Compare within one run: `bare/*` is the loop that a figure of `volume/*` is measured against.
//!
//! ```text
//!   bare/memcpy            volume/overwrite, volume/read     4 KiB at random offsets of 1 GiB in RAM
//!   bare/disk-2m           volume/overflow                   sustained writes, 64 MiB of RAM, encrypted
//! ```

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{
    BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime,
};
use headwater_block::{Attempt, ByteRange, Device, Op, blocking};
use headwater_image::null_device;
use headwater_volume::{CacheMode, Volume, VolumeOptions};
use headwater_writecache::Host;

const BLOCK: usize = 4096;
const MIB: u64 = 1 << 20;
const SET_BYTES: u64 = 1024 * MIB;
const DISK_SET_BYTES: u64 = 4096 * MIB;

/// Where overflow files go: a disk, which a temporary directory may not be.
const WORK_DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../build/bench");

/// Offsets and data: a small fast generator, the same in every loop that is compared.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn block_of(&mut self, set_bytes: u64) -> u64 {
        self.next() % (set_bytes / BLOCK as u64) * BLOCK as u64
    }

    fn data(&mut self, len: usize) -> Vec<u8> {
        (0..len / 8).flat_map(|_| self.next().to_le_bytes()).collect()
    }
}

fn open(host: &Host, size_bytes: u64, mode: CacheMode, ram_bytes: u64) -> Arc<Volume> {
    let base = null_device(size_bytes).expect("an empty image");
    let options = VolumeOptions {
        base,
        mode,
        ram_bytes,
        disk_bytes: 2 * size_bytes,
        cache_dir: WORK_DIR.into(),
        pause_limit: Duration::from_secs(30),
    };
    Volume::open(&options, host).expect("a volume")
}

fn fill(volume: &Volume, set_bytes: u64) {
    let data = Dice(7).data(MIB as usize);
    for number in 0..set_bytes / MIB {
        blocking::write(volume, number * MIB, &data).expect("filling");
    }
}

fn write_now(volume: &Volume, offset: u64, from: &[u8]) {
    let range = ByteRange::new(offset, BLOCK as u64).expect("a range");
    let done = volume.try_now(Op::Write { range, from, fua: false }).expect("a write");
    assert_eq!(done, Attempt::Done, "the set fits in RAM");
}

fn in_ram(criterion: &mut Criterion) {
    let host = Host::start(u64::MAX).expect("a host");
    let volume = open(&host, 10 * SET_BYTES, CacheMode::Ram, 2 * SET_BYTES);
    fill(&volume, SET_BYTES);
    let data = Dice(5).data(BLOCK);
    let mut group = criterion.benchmark_group("ram");
    group.throughput(Throughput::Bytes(BLOCK as u64));
    let mut memory = vec![1_u8; SET_BYTES as usize];
    let mut dice = Dice(3);
    group.bench_function("bare/memcpy", |bencher| {
        bencher.iter(|| {
            let at = dice.block_of(SET_BYTES) as usize;
            black_box(&mut memory[at..at + BLOCK]).copy_from_slice(black_box(&data));
        });
    });
    drop(memory);
    group.bench_function("volume/overwrite", |bencher| {
        bencher.iter(|| write_now(&volume, dice.block_of(SET_BYTES), black_box(&data)));
    });
    let mut into = vec![0; BLOCK];
    group.bench_function("volume/read", |bencher| {
        bencher.iter(|| {
            let range = ByteRange::new(dice.block_of(SET_BYTES), BLOCK as u64).expect("a range");
            volume.try_now(Op::Read { range, into: black_box(&mut into) }).expect("a read")
        });
    });
    two_threads(&mut group, &volume, &data);
    group.finish();
}

/// The same number of overwrites, half of them on each of two threads.
fn two_threads(group: &mut BenchmarkGroup<'_, WallTime>, volume: &Volume, data: &[u8]) {
    group.bench_function("volume/overwrite, two threads", |bencher| {
        bencher.iter_custom(|iterations| {
            let start = Instant::now();
            std::thread::scope(|scope| {
                for seed in [11, 12] {
                    scope.spawn(move || {
                        let mut dice = Dice(seed);
                        for _ in 0..iterations / 2 {
                            write_now(volume, dice.block_of(SET_BYTES), data);
                        }
                    });
                }
            });
            start.elapsed()
        });
    });
}

fn over_the_edge(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("overflow");
    group.sample_size(10).measurement_time(Duration::from_secs(20));
    let path = Path::new(WORK_DIR).join("bare.img");
    let file = direct_file(&path);
    // Direct I/O wants an aligned buffer: cut one out of a larger one.
    let raw = Dice(9).data(3 * MIB as usize);
    let skip = raw.as_ptr().align_offset(BLOCK);
    let segment = &raw[skip..skip + 2 * MIB as usize];
    let mut at = 0;
    group.throughput(Throughput::Bytes(2 * MIB));
    group.bench_function("bare/disk-2m", |bencher| {
        bencher.iter(|| {
            file.write_all_at(segment, at).expect("a direct write");
            at = (at + 2 * MIB) % DISK_SET_BYTES;
        });
    });
    drop(file);
    std::fs::remove_file(&path).expect("removing the file");
    let host = Host::start(u64::MAX).expect("a host");
    let volume = open(&host, DISK_SET_BYTES, CacheMode::RamDisk, 64 * MIB);
    fill(&volume, DISK_SET_BYTES);
    let data = Dice(5).data(BLOCK);
    let mut dice = Dice(3);
    group.throughput(Throughput::Bytes(BLOCK as u64));
    group.bench_function("volume/overflow", |bencher| {
        bencher.iter(|| blocking::write(&*volume, dice.block_of(DISK_SET_BYTES), &data).expect("a write"));
    });
    group.finish();
}

fn direct_file(path: &Path) -> File {
    use rustix::fs::{FallocateFlags, Mode, OFlags};
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC | OFlags::DIRECT;
    let file =
        File::from(rustix::fs::open(path, flags, Mode::from_raw_mode(0o600)).expect("a file for direct I/O"));
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, DISK_SET_BYTES).expect("room for the file");
    file
}

fn opening(criterion: &mut Criterion) {
    let host = Host::start(u64::MAX).expect("a host");
    criterion.bench_function("open a volume of 64 GiB", |bencher| {
        bencher.iter_with_large_drop(|| open(&host, 64 << 30, CacheMode::RamDisk, 64 * MIB));
    });
}

fn all(criterion: &mut Criterion) {
    std::fs::create_dir_all(WORK_DIR).expect("the work directory");
    in_ram(criterion);
    over_the_edge(criterion);
    opening(criterion);
    std::fs::remove_dir(WORK_DIR).expect("nothing is left in the work directory");
}

criterion_group!(engine, all);
criterion_main!(engine);
