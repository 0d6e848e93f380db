//! Measures the volume without any protocol, and two limits: a bare copy of random 4 KiB blocks in as much
//! memory, and the disk's own sequential direct writes.
//!
//! `cargo bench -p headwater-volume`. Data is random, so nothing compresses. `HEADWATER_BENCH_DIR` says
//! which disk to use (default: the temporary directory). `examples/figures` does the same work in turns, and says
//! whether goals are reached; here it is measured long enough to compare one version with another.

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use headwater_block::blocking;
use headwater_testkit::Rng;
use headwater_volume::CacheMode;

use crate::work::{GIB, MIB};

#[path = "../examples/figures/work.rs"]
mod work;

const BLOCK: usize = work::BLOCK as usize;
const SET_BYTES: u64 = GIB;
const BLOCKS: u64 = SET_BYTES / work::BLOCK;

/// Bytes of one sample of the sustained cases.
const SUSTAINED_BYTES: u64 = 4 * GIB;

fn disk_dir() -> PathBuf {
    std::env::var_os("HEADWATER_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from)
}

fn in_ram(c: &mut Criterion) {
    let mut rng = Rng::new(1);
    let host = work::host();
    let volume = work::open(&work::options(CacheMode::Ram, SET_BYTES + 64 * MIB, 0, Path::new("/")), &host);
    let data = rng.bytes(MIB as usize);
    (0..SET_BYTES / MIB).for_each(|number| blocking::write(&*volume, number * MIB, &data).expect("it fits"));
    let data = &data[..BLOCK];
    let mut memory = vec![1u8; SET_BYTES as usize];
    let mut out = vec![0u8; BLOCK];
    let mut group = c.benchmark_group("ram");
    group.throughput(Throughput::Bytes(BLOCK as u64)).sample_size(20);
    group.bench_function("limit: memcpy in", |b| {
        b.iter(|| {
            let start = rng.below(BLOCKS) as usize * BLOCK;
            memory[start..start + BLOCK].copy_from_slice(black_box(data));
        })
    });
    group
        .bench_function("overwrite", |b| b.iter(|| work::write(&volume, rng.below(BLOCKS), black_box(data))));
    group.bench_function("limit: memcpy out", |b| {
        b.iter(|| {
            let start = rng.below(BLOCKS) as usize * BLOCK;
            out.copy_from_slice(black_box(&memory[start..start + BLOCK]));
        })
    });
    group.bench_function("read", |b| b.iter(|| work::read(&volume, rng.below(BLOCKS), black_box(&mut out))));
    for threads in [1u64, 2] {
        group.throughput(Throughput::Bytes(BLOCK as u64 * threads));
        group.bench_function(format!("overwrite and read, {threads} threads"), |b| {
            b.iter_custom(|iterations| work::together(&volume, BLOCKS, threads, iterations))
        });
    }
    group.finish();
}

fn sustained(c: &mut Criterion) {
    let (host, dir) = (work::host(), disk_dir());
    let mut group = c.benchmark_group("overflow");
    group.throughput(Throughput::Bytes(SUSTAINED_BYTES)).sample_size(10);
    group.measurement_time(Duration::from_secs(20)).warm_up_time(Duration::from_millis(1));
    group.bench_function("limit: sequential 2 MiB direct writes", |b| {
        b.iter_custom(|iterations| (0..iterations).map(|_| work::sequential(SUSTAINED_BYTES, &dir)).sum())
    });
    for (name, mode) in [("64 MiB of RAM", CacheMode::RamDisk), ("disk mode", CacheMode::Disk)] {
        group.bench_function(format!("random 4 KiB writes, {name}"), |b| {
            b.iter_custom(|iterations| {
                (0..iterations).map(|_| work::random_writes(&host, mode, SUSTAINED_BYTES, &dir)).sum()
            })
        });
    }
    group.finish();
}

criterion_group!(engine, in_ram, sustained);
criterion_main!(engine);
