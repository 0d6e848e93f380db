//! Opens the device of a case: a raw file, a volume over an empty disk, or a peer. Also provides a null device.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use headwater_block::{
    Attempt, ByteRange, Completion, CompletionQueue, Device, Extent, ExtentKind, Geometry, IoError,
    IoErrorKind, Op, Request,
};
use headwater_volume::{
    Buffering, CacheMode, DEFAULT_WEIGHT, LittleSpace, Volume, VolumeCounters, VolumeOptions,
};
use headwater_writecache::overflow::io::{Direction, IoEngine, IoOp, open_engine};
use headwater_writecache::{AlignedBuffer, Host};

use crate::model::{Model, ModelEngine};
use crate::over::{Front, Over};
use crate::peers;
use crate::series::Counts;
use crate::started::Started;
use crate::study::{Case, System};

fn geometry(size_bytes: u64, read_only: bool) -> Geometry {
    Geometry {
        size_bytes,
        logical_block_bytes: 512,
        physical_block_bytes: 4096,
        read_only,
        volatile_cache: true,
    }
}

fn refused() -> IoError {
    IoError::new(IoErrorKind::Unsupported, "a study's disk is read and written only")
}

/// A disk of zeroes that uses no memory.
struct Empty(u64);

impl Device for Empty {
    fn geometry(&self) -> Geometry {
        geometry(self.0, true)
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        match op {
            Op::Read { into, .. } => into.fill(0),
            Op::Flush => {}
            _ => return Err(refused()),
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
            other => done.complete(Err(refused()), other.into_buffer()),
        }
    }

    fn extents(&self, range: ByteRange, _max_extents: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Hole }])
    }
}

/// A null device that accepts writes and discards them.
struct Sink(u64);

impl Device for Sink {
    fn geometry(&self) -> Geometry {
        geometry(self.0, false)
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        if let Op::Read { into, .. } = op {
            into.fill(0);
        }
        Ok(Attempt::Done)
    }

    fn submit(&self, request: Request, done: Completion) {
        done.complete(Ok(()), request.into_buffer());
    }

    fn extents(&self, range: ByteRange, _max_extents: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Data }])
    }
}

/// A null device: for tests, and in place of a device that was closed.
pub fn sink(size_bytes: u64) -> Arc<dyn Device> {
    Arc::new(Sink(size_bytes))
}

/// A file without a name, opened with O_DIRECT, accessed through the same I/O engine as the write cache's overflow.
pub struct RawDisk {
    file: Arc<File>,
    engine: Arc<dyn IoEngine>,
    size_bytes: u64,
    /// Free buffers: as many as were ever in flight. Mapping memory for each request would slow the disk down.
    spare: Arc<Mutex<Vec<AlignedBuffer>>>,
    done: Done,
}

/// Numbers of requests and bytes in both directions.
#[derive(Default)]
struct Done {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    write_bytes: AtomicU64,
}

impl RawDisk {
    /// A file of `size_bytes` with reserved space. It is deleted when this is dropped.
    pub fn create(dir: &Path, size_bytes: u64, engine: Arc<dyn IoEngine>) -> Result<Self> {
        let flags = libc::O_TMPFILE | libc::O_DIRECT;
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(dir);
        let file = file.with_context(|| {
            let dir = dir.display();
            format!("cannot create a file for direct I/O in {dir}; choose a directory on a local file system with --work-dir")
        })?;
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, size_bytes)
            .with_context(|| format!("cannot reserve {size_bytes} bytes in {}", dir.display()))?;
        Ok(Self { file: Arc::new(file), engine, size_bytes, spare: Arc::default(), done: Done::default() })
    }

    /// The counts so far. Each request is one operation of the disk.
    fn counts(&self) -> Counts {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (reads, writes) = (load(&self.done.reads), load(&self.done.writes));
        Counts {
            reads,
            writes,
            disk_reads: reads,
            disk_read_bytes: load(&self.done.read_bytes),
            disk_writes: writes,
            disk_write_bytes: load(&self.done.write_bytes),
            ..Counts::default()
        }
    }

    fn buffer(&self, len: usize) -> Option<AlignedBuffer> {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        spare.filter(|buffer| buffer.len() >= len).or_else(|| AlignedBuffer::new(len))
    }
}

impl Device for RawDisk {
    fn geometry(&self) -> Geometry {
        geometry(self.size_bytes, false)
    }

    fn try_now(&self, _op: Op<'_>) -> Result<Attempt, IoError> {
        Ok(Attempt::MustWait)
    }

    fn submit(&self, request: Request, done: Completion) {
        let (direction, offset, mut back) = match request {
            Request::Read { range, buffer } => (Direction::Read, range.offset(), buffer),
            Request::Write { range, buffer, .. } => (Direction::Write, range.offset(), buffer),
            other => return done.complete(Err(refused()), other.into_buffer()),
        };
        let len = back.len();
        let (count, bytes) = match direction {
            Direction::Read => (&self.done.reads, &self.done.read_bytes),
            Direction::Write => (&self.done.writes, &self.done.write_bytes),
        };
        count.fetch_add(1, Ordering::Relaxed);
        bytes.fetch_add(len as u64, Ordering::Relaxed);
        let Some(mut buffer) = self.buffer(len) else {
            return done.complete(Err(IoError::new(IoErrorKind::Device, "no memory")), back);
        };
        if direction == Direction::Write {
            buffer[..len].copy_from_slice(&back);
        }
        let spare = Arc::clone(&self.spare);
        let finished = Box::new(move |result: std::io::Result<()>, buffer: AlignedBuffer| {
            if direction == Direction::Read {
                back.copy_from_slice(&buffer[..len]);
            }
            spare.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
            let failed =
                |error| IoError::with_source(IoErrorKind::Device, "the disk reported an error", error);
            done.complete(result.map_err(failed), back);
        });
        self.engine.submit(IoOp {
            file: Arc::clone(&self.file),
            direction,
            offset,
            buffer,
            len,
            done: finished,
        });
    }

    fn completion_queue(&self) -> Option<Box<dyn CompletionQueue>> {
        self.engine.completion_queue()
    }

    fn extents(&self, range: ByteRange, _max_extents: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Data }])
    }
}

/// An open device under test.
pub struct Opened {
    /// The device that gets the load.
    pub device: Arc<dyn Device>,
    /// The volume below the device, if it is one.
    pub volume: Option<Arc<Volume>>,
    /// The raw disk below the device, if it is one.
    raw: Option<Arc<RawDisk>>,
    /// The protocol server and client between the load and the volume, if any.
    front: Option<Front>,
    /// The server process of a peer. It is dropped after the device, which is its only client.
    _peer: Option<Started>,
    _host: Option<Host>,
}

impl Opened {
    /// The counts so far. `None` if the device is a peer, which has no counters.
    pub fn counts(&self) -> Option<Counts> {
        match (&self.volume, &self.raw) {
            (Some(volume), _) => Some(Counts::from(&volume.counters())),
            (None, raw) => raw.as_ref().map(|raw| raw.counts()),
        }
    }
}

/// A cache that has written nothing for this time counts as idle.
const SETTLED: Duration = Duration::from_millis(100);

/// Waits until a volume writes nothing more, at most 10 seconds, and returns its counters.
pub fn settled(volume: &Volume) -> VolumeCounters {
    let mut counters = volume.counters();
    for _ in 0..100 {
        std::thread::sleep(SETTLED);
        let now = volume.counters();
        let is_settled = now.cache.spilled_segments == counters.cache.spilled_segments;
        counters = now;
        if is_settled {
            break;
        }
    }
    counters
}

impl Drop for Opened {
    fn drop(&mut self) {
        // Order: the client is closed before its server, and the server before the volume.
        if let Some(front) = self.front.take() {
            self.device = sink(0);
            front.stop();
        }
        if let Some(volume) = &self.volume {
            volume.close();
        }
    }
}

/// The overflow limit for a working set.
pub fn overflow_bytes(set_bytes: u64) -> u64 {
    set_bytes + set_bytes / 4 + (64 << 20)
}

/// The I/O engine, slowed down to the model's speed if there is a model. The model's time runs `speed` times as fast
/// as real time.
pub fn engine(model: Option<Model>, speed: f64) -> Result<Arc<dyn IoEngine>> {
    let real = open_engine().context("cannot start the I/O engine")?;
    let Some(model) = model else { return Ok(real) };
    Ok(Arc::new(ModelEngine::start(model, speed, real).context("cannot start the model disk")?))
}

/// The configuration of a write cache over an empty disk.
#[derive(Clone, Debug)]
pub struct VolumeSpec {
    /// Name in messages.
    pub name: String,
    /// Size of the disk.
    pub size_bytes: u64,
    /// The mode of the write cache.
    pub mode: CacheMode,
    /// The RAM limit.
    pub ram_bytes: u64,
    /// The overflow limit.
    pub disk_bytes: u64,
    /// Whether the overflow is opened with O_DIRECT.
    pub buffering: Buffering,
}

/// Opens a write cache on a host of its own.
pub fn open_volume(spec: &VolumeSpec, dir: &Path, engine: Arc<dyn IoEngine>) -> Result<Opened> {
    let host = Host::with_engine(u64::MAX, engine)
        .map_err(|error| anyhow!("cannot start a host of volumes: {error}"))?;
    let volume = volume_of(spec, dir, &host)?;
    let device = Arc::clone(&volume) as Arc<dyn Device>;
    Ok(Opened { device, volume: Some(volume), raw: None, front: None, _peer: None, _host: Some(host) })
}

/// Opens a write cache on an existing host.
pub fn volume_of(spec: &VolumeSpec, dir: &Path, host: &Host) -> Result<Arc<Volume>> {
    let options = VolumeOptions {
        name: spec.name.clone(),
        base: Arc::new(Empty(spec.size_bytes)),
        mode: spec.mode,
        ram_bytes: spec.ram_bytes,
        weight: DEFAULT_WEIGHT,
        buffering: spec.buffering,
        little_space: LittleSpace::Refused,
        disk_bytes: spec.disk_bytes,
        cache_dir: dir.to_path_buf(),
        pause_limit: Duration::from_secs(60),
        persistent: None,
    };
    Volume::open(&options, host).with_context(|| format!("cannot open the volume of {}", spec.name))
}

/// Opens the device of a case. `storage`: the model of the disk for a case that has no model itself. `over`: how
/// the load reaches a volume. `in_flight`: requests that the load keeps in flight.
pub fn open(
    case: &Case,
    dir: &Path,
    (storage, over): (Option<Model>, Over),
    in_flight: usize,
) -> Result<Opened> {
    let engine = engine(case.model.or(storage), 1.0)?;
    let cache = match case.system {
        System::Cache(cache) => cache,
        System::Raw => {
            let raw = Arc::new(RawDisk::create(dir, case.set_bytes, engine)?);
            let device = Arc::clone(&raw) as Arc<dyn Device>;
            return Ok(Opened {
                device,
                volume: None,
                raw: Some(raw),
                front: None,
                _peer: None,
                _host: None,
            });
        }
        System::Peer(peer) => {
            let peers::Open { device, server } = peers::open(peer, dir, case.set_bytes, in_flight)
                .with_context(|| format!("cannot open {}", case.title))?;
            return Ok(Opened {
                device,
                volume: None,
                raw: None,
                front: None,
                _peer: Some(server),
                _host: None,
            });
        }
    };
    let spec = VolumeSpec {
        name: case.name.into(),
        size_bytes: case.set_bytes,
        mode: cache.mode,
        ram_bytes: cache.ram_bytes,
        disk_bytes: if cache.mode == CacheMode::Ram { 0 } else { overflow_bytes(case.set_bytes) },
        buffering: cache.buffering,
    };
    let mut opened = open_volume(&spec, dir, engine)?;
    if let Some((front, client)) = Front::open(over, &opened.device, in_flight)
        .with_context(|| format!("cannot connect to the volume of {} over {over}", case.name))?
    {
        (opened.front, opened.device) = (Some(front), client);
    }
    Ok(opened)
}

#[cfg(test)]
mod tests {
    use super::*;
    use headwater_block::blocking;

    #[test]
    fn the_raw_disk_stores_writes_of_single_sectors() {
        // Not in /tmp, because tmpfs may have no direct I/O.
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let disk = RawDisk::create(dir.path(), 1 << 20, engine(None, 1.0).unwrap()).unwrap();
        let data = headwater_testkit::Rng::new(1).bytes(4096);
        blocking::write(&disk, 512, &data).unwrap();
        let mut found = vec![0; 4096];
        blocking::read(&disk, 512, &mut found).unwrap();
        assert!(found == data);
        assert!(blocking::discard(&disk, 0, 512).is_err());
    }
}
