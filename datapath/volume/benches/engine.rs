//! The engine without any protocol, beside the limits that it is measured against: a bare copy of random
//! 4 KiB blocks in as much memory, and the disk's own sequential direct writes.
//!
//! `cargo bench -p headwater-volume`. Data is random, so nothing compresses. `HEADWATER_BENCH_DIR` says
//! which disk to use (default: the temporary directory).

use std::hint::black_box;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use headwater_block::{Attempt, ByteRange, Device, Op, blocking};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng};
use headwater_volume::{Buffering, CacheMode, DEFAULT_WEIGHT, Volume, VolumeOptions};
use headwater_writecache::Host;

const BLOCK: usize = 4096;
const SET_BYTES: u64 = 1 << 30;
const BLOCKS: u64 = SET_BYTES / BLOCK as u64;

fn disk_dir() -> PathBuf {
    std::env::var_os("HEADWATER_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from)
}

fn volume(host: &Host, mode: CacheMode, size_bytes: u64, ram_bytes: u64, disk_bytes: u64) -> Arc<Volume> {
    let options = ReferenceOptions { read_only: true, ..ReferenceOptions::default() };
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::with_options(size_bytes, options));
    let options = VolumeOptions {
        base,
        mode,
        ram_bytes,
        weight: DEFAULT_WEIGHT,
        buffering: Buffering::Direct,
        disk_bytes,
        cache_dir: disk_dir(),
        pause_limit: Duration::from_secs(60),
        persistent: None,
    };
    Volume::open(&options, host).expect("the volume opens")
}

fn at(block: u64) -> ByteRange {
    ByteRange::new(block * BLOCK as u64, BLOCK as u64).expect("in range")
}

fn write(volume: &Volume, block: u64, data: &[u8]) {
    match volume.try_now(Op::Write { range: at(block), from: data, fua: false }) {
        Ok(Attempt::Done) => {}
        _ => blocking::write(volume, block * BLOCK as u64, data).expect("the write is taken"),
    }
}

fn filled(host: &Host, rng: &mut Rng) -> Arc<Volume> {
    let volume = volume(host, CacheMode::Ram, SET_BYTES, SET_BYTES + (64 << 20), 0);
    let data = rng.bytes(1 << 20);
    for mib in 0..SET_BYTES >> 20 {
        blocking::write(&*volume, mib << 20, &data).expect("it fits");
    }
    volume
}

fn in_ram(c: &mut Criterion) {
    let mut rng = Rng::new(1);
    let host = Host::start(u64::MAX).expect("the host starts");
    let volume = filled(&host, &mut rng);
    let mut memory = vec![1u8; SET_BYTES as usize];
    let data = rng.bytes(BLOCK);
    let mut out = vec![0u8; BLOCK];
    let mut group = c.benchmark_group("ram");
    group.throughput(Throughput::Bytes(BLOCK as u64)).sample_size(20);
    group.bench_function("limit: memcpy in", |b| {
        b.iter(|| {
            let start = rng.below(BLOCKS) as usize * BLOCK;
            memory[start..start + BLOCK].copy_from_slice(black_box(&data));
        })
    });
    group.bench_function("overwrite", |b| b.iter(|| write(&volume, rng.below(BLOCKS), black_box(&data))));
    group.bench_function("limit: memcpy out", |b| {
        b.iter(|| {
            let start = rng.below(BLOCKS) as usize * BLOCK;
            out.copy_from_slice(black_box(&memory[start..start + BLOCK]));
        })
    });
    group.bench_function("read", |b| {
        b.iter(|| {
            let op = Op::Read { range: at(rng.below(BLOCKS)), into: black_box(&mut out) };
            assert_eq!(volume.try_now(op).expect("it reads"), Attempt::Done);
        })
    });
    for threads in [1u64, 2] {
        group.throughput(Throughput::Bytes(BLOCK as u64 * threads));
        group.bench_function(format!("overwrite and read, {threads} threads"), |b| {
            b.iter_custom(|iterations| together(&volume, threads, iterations))
        });
    }
    group.finish();
}

/// Half overwrites, half reads, from each of some threads.
fn together(volume: &Volume, threads: u64, iterations: u64) -> Duration {
    let start = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let mut rng = Rng::new(thread + 7);
                let data = rng.bytes(BLOCK);
                let mut out = vec![0u8; BLOCK];
                for _ in 0..iterations / 2 {
                    write(volume, rng.below(BLOCKS), &data);
                    let op = Op::Read { range: at(rng.below(BLOCKS)), into: &mut out };
                    assert_eq!(volume.try_now(op).expect("it reads"), Attempt::Done);
                }
            });
        }
    });
    start.elapsed()
}

/// Bytes of one sample of the sustained cases.
const SUSTAINED_BYTES: u64 = 4 << 30;

fn sustained(c: &mut Criterion) {
    let host = Host::start(u64::MAX).expect("the host starts");
    let mut rng = Rng::new(2);
    let data = rng.bytes(2 << 20);
    let mut group = c.benchmark_group("overflow");
    group.throughput(Throughput::Bytes(SUSTAINED_BYTES)).sample_size(10);
    group.measurement_time(Duration::from_secs(20)).warm_up_time(Duration::from_millis(1));
    group.bench_function("limit: sequential 2 MiB direct writes", |b| {
        b.iter_custom(|iterations| (0..iterations).map(|_| sequential(&data)).sum())
    });
    for (name, mode) in [("64 MiB of RAM", CacheMode::RamDisk), ("disk mode", CacheMode::Disk)] {
        group.bench_function(format!("random 4 KiB writes, {name}"), |b| {
            b.iter_custom(|iterations| {
                (0..iterations)
                    .map(|_| {
                        let volume = volume(&host, mode, SUSTAINED_BYTES * 2, 64 << 20, SUSTAINED_BYTES * 3);
                        let start = Instant::now();
                        for number in 0..SUSTAINED_BYTES / BLOCK as u64 {
                            let from = (number as usize % 512) * BLOCK;
                            write(&volume, rng.below(BLOCKS * 8), &data[from..from + BLOCK]);
                        }
                        start.elapsed()
                    })
                    .sum()
            })
        });
    }
    group.finish();
}

/// Four writers of 2 MiB each, into a new file whose space is reserved: what the disk can do.
fn sequential(data: &[u8]) -> Duration {
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_TMPFILE | libc::O_DIRECT)
        .open(disk_dir())
        .expect("the disk takes direct I/O");
    let len = data.len() as u64;
    let start = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let file = &file;
            scope.spawn(move || {
                let mut aligned = vec![0u8; data.len() + 4096];
                let skip = aligned.as_ptr().align_offset(4096);
                aligned[skip..skip + data.len()].copy_from_slice(data);
                for number in (thread..SUSTAINED_BYTES / len).step_by(4) {
                    file.write_all_at(&aligned[skip..skip + data.len()], number * len).expect("it writes");
                }
            });
        }
    });
    start.elapsed()
}

criterion_group!(engine, in_ram, sustained);
criterion_main!(engine);
