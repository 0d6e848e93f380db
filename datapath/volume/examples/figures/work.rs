//! The measured work: volumes on an empty disk, writes and reads of blocks, and the same work by the disk
//! alone.
//! Shared with the benchmark in `benches/engine.rs`.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, IoErrorKind, Op, Request,
    blocking,
};
use headwater_testkit::Rng;
use headwater_volume::{Buffering, CacheMode, DEFAULT_WEIGHT, LittleSpace, Volume, VolumeOptions};
use headwater_writecache::Host;

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;
pub const BLOCK: u64 = 4096;

/// An empty disk of 64 GiB, without memory of its own.
struct Empty;

fn read_only() -> IoError {
    IoError::new(IoErrorKind::ReadOnly, "the base is never written")
}

impl Device for Empty {
    fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: 64 * GIB,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            read_only: true,
            volatile_cache: false,
        }
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        match op {
            Op::Read { into, .. } => into.fill(0),
            Op::Flush => {}
            _ => return Err(read_only()),
        }
        Ok(Attempt::Done)
    }

    fn submit(&self, request: Request, done: Completion) {
        match request {
            Request::Read { mut buffer, .. } => {
                buffer.fill(0);
                done.complete(Ok(()), buffer);
            }
            Request::Prefetch { .. } | Request::Flush => done.complete(Ok(()), Vec::new()),
            other => done.complete(Err(read_only()), other.into_buffer()),
        }
    }

    fn extents(&self, range: ByteRange, _max_extents: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Hole }])
    }
}

/// Options of a volume over this disk.
pub fn options(mode: CacheMode, ram_bytes: u64, disk_bytes: u64, dir: &Path) -> VolumeOptions {
    VolumeOptions {
        name: "figures".into(),
        base: Arc::new(Empty),
        mode,
        ram_bytes,
        weight: DEFAULT_WEIGHT,
        buffering: Buffering::Direct,
        little_space: LittleSpace::Refused,
        disk_bytes,
        cache_dir: dir.to_path_buf(),
        pause_limit: Duration::from_secs(60),
        persistent: None,
    }
}

pub fn open(options: &VolumeOptions, host: &Host) -> Arc<Volume> {
    Volume::open(options, host).expect("the volume opens")
}

pub fn host() -> Host {
    Host::start(u64::MAX).expect("the host starts")
}

/// Writes a block, on this thread if there is space.
pub fn write(volume: &Volume, block: u64, data: &[u8]) {
    let range = ByteRange::new(block * BLOCK, BLOCK).expect("in range");
    match volume.try_now(Op::Write { range, from: data, fua: false }) {
        Ok(Attempt::Done) => {}
        _ => blocking::write(volume, block * BLOCK, data).expect("the write is taken"),
    }
}

/// Reads a block, in whatever place it is.
pub fn read(volume: &Volume, block: u64, into: &mut [u8]) {
    let range = ByteRange::new(block * BLOCK, BLOCK).expect("in range");
    match volume.try_now(Op::Read { range, into }) {
        Ok(Attempt::Done) => {}
        _ => blocking::read(volume, block * BLOCK, into).expect("it reads"),
    }
}

/// Half overwrites, half reads of random blocks below `blocks`, `operations` by each of some threads.
pub fn together(volume: &Volume, blocks: u64, threads: u64, operations: u64) -> Duration {
    let start = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let mut rng = Rng::new(thread + 7);
                let data = rng.bytes(BLOCK as usize);
                let mut into = vec![0; BLOCK as usize];
                for _ in 0..operations / 2 {
                    write(volume, rng.below(blocks), &data);
                    read(volume, rng.below(blocks), &mut into);
                }
            });
        }
    });
    start.elapsed()
}

/// Random writes of as many bytes into a new volume of twice that size, until the last is answered.
pub fn random_writes(host: &Host, mode: CacheMode, total_bytes: u64, dir: &Path) -> Duration {
    let volume = open(&options(mode, 64 * MIB, total_bytes * 3, dir), host);
    let mut rng = Rng::new(2);
    let data = rng.bytes(2 * MIB as usize);
    let start = Instant::now();
    for number in 0..total_bytes / BLOCK {
        let from = ((number % 512) * BLOCK) as usize;
        write(&volume, rng.below(2 * total_bytes / BLOCK), &data[from..from + BLOCK as usize]);
    }
    start.elapsed()
}

/// A new file without a name, past the page cache.
pub fn direct_file(dir: &Path) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_TMPFILE | libc::O_DIRECT)
        .open(dir)
        .expect("the disk takes direct I/O")
}

/// What the disk can do: four writers of 2 MiB each, in order, into a new file whose space was reserved before.
pub fn sequential(total_bytes: u64, dir: &Path) -> Duration {
    let file = direct_file(dir);
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, total_bytes).expect("there is room");
    let data = Rng::new(3).bytes(2 * MIB as usize);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (file, data) = (&file, &data);
            scope.spawn(move || {
                let mut memory = vec![0; data.len() + 4096];
                let skip = memory.as_ptr().align_offset(4096);
                let aligned = &mut memory[skip..][..data.len()];
                aligned.copy_from_slice(data);
                for offset in (thread * 2 * MIB..total_bytes).step_by(8 * MIB as usize) {
                    file.write_all_at(aligned, offset).expect("it writes");
                }
            });
        }
    });
    start.elapsed()
}
