//! Volumes for tests, on a host whose disk engine can be made to fail.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use headwater_block::{CompletionQueue, Device};
use headwater_volume::{Buffering, CacheMode, DEFAULT_WEIGHT, LittleSpace, Volume, VolumeOptions};
use headwater_writecache::Host;
use headwater_writecache::overflow::io::{Direction, IoEngine, IoOp, open_engine};

/// The faults of the disk.
#[derive(Default)]
pub struct Faults {
    /// Writes say "no space".
    pub full: AtomicBool,
    /// Every n-th write fails with EIO; 0: none.
    pub write_error_every: AtomicU64,
    /// Every n-th read fails with EIO; 0: none.
    pub read_error_every: AtomicU64,
    /// Reads that touch one of these bytes of the file fail with EIO.
    pub unreadable: Mutex<Vec<u64>>,
    /// Reads return data with one flipped bit.
    pub flip: AtomicBool,
    /// Every n-th write writes half of its bytes, then fails with EIO; 0: none.
    pub half_write_every: AtomicU64,
    /// Writes begin after this delay.
    pub write_delay_ms: AtomicU64,
    /// Writes take this time, one after another, and write nothing; 0: off.
    pub nowhere_us: AtomicU64,
    /// Locked by the write that is in progress.
    one: Mutex<()>,
    /// Writes do not begin while this is set.
    pub hold: AtomicBool,
    /// Writes and syncs panic on the calling thread, as a bug would.
    pub panics: AtomicBool,
    /// Reads and writes that are not answered yet.
    pub in_flight: AtomicU64,
    /// Reads and writes that were begun.
    pub count: AtomicU64,
}

impl Faults {
    /// Whether a write has to wait before it begins.
    fn are_late(&self) -> bool {
        self.hold.load(Ordering::Relaxed) || self.write_delay_ms.load(Ordering::Relaxed) != 0
    }

    fn hits_unreadable(&self, offset: u64, len: usize) -> bool {
        let read = offset..offset + len as u64;
        self.unreadable.lock().unwrap().iter().any(|at| read.contains(at))
    }

    fn wait(&self) {
        std::thread::sleep(Duration::from_millis(self.write_delay_ms.load(Ordering::Relaxed)));
        while self.hold.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The real engine, with faults.
pub struct FaultyEngine {
    real: Arc<dyn IoEngine>,
    pub faults: Arc<Faults>,
}

/// Counts the operation as in flight until it is answered.
fn counted(mut op: IoOp, faults: &Arc<Faults>) -> IoOp {
    let faults = Arc::clone(faults);
    faults.in_flight.fetch_add(1, Ordering::SeqCst);
    let done = op.done;
    op.done = Box::new(move |result, buffer| {
        done(result, buffer);
        faults.in_flight.fetch_sub(1, Ordering::SeqCst);
    });
    op
}

/// Writes the first half, in whole pages as direct I/O wants it, and fails.
fn write_half(op: IoOp) {
    let half = op.len / 2 / 4096 * 4096;
    let written = op.file.write_all_at(&op.buffer[..half], op.offset);
    let error = written.err().unwrap_or_else(|| io::Error::from_raw_os_error(5));
    (op.done)(Err(error), op.buffer);
}

impl IoEngine for FaultyEngine {
    fn submit(&self, op: IoOp) {
        assert!(op.direction == Direction::Read || !self.faults.panics.load(Ordering::SeqCst), "{ASKED_FOR}");
        let mut op = counted(op, &self.faults);
        let count = self.faults.count.fetch_add(1, Ordering::Relaxed) + 1;
        let due = |every: &AtomicU64| {
            let every = every.load(Ordering::Relaxed);
            every != 0 && count.is_multiple_of(every)
        };
        let error = match op.direction {
            Direction::Write if self.faults.full.load(Ordering::Relaxed) => {
                Some(io::Error::from_raw_os_error(28))
            }
            Direction::Write if due(&self.faults.write_error_every) => Some(io::Error::from_raw_os_error(5)),
            Direction::Read if due(&self.faults.read_error_every) => Some(io::Error::from_raw_os_error(5)),
            Direction::Read if self.faults.hits_unreadable(op.offset, op.len) => {
                Some(io::Error::from_raw_os_error(5))
            }
            _ => None,
        };
        if let Some(error) = error {
            // Completed from another thread, as a disk does.
            std::thread::spawn(move || (op.done)(Err(error), op.buffer));
            return;
        }
        if op.direction == Direction::Write && self.faults.nowhere_us.load(Ordering::Relaxed) != 0 {
            let faults = Arc::clone(&self.faults);
            std::thread::spawn(move || {
                let one = faults.one.lock().unwrap();
                std::thread::sleep(Duration::from_micros(faults.nowhere_us.load(Ordering::Relaxed)));
                drop(one);
                (op.done)(Ok(()), op.buffer);
            });
            return;
        }
        if op.direction == Direction::Read && self.faults.flip.load(Ordering::Relaxed) {
            let done = op.done;
            op.done = Box::new(move |result, mut buffer| {
                let middle = buffer.len() / 4;
                buffer[middle] ^= 0x10;
                done(result, buffer);
            });
        }
        let half = op.direction == Direction::Write && due(&self.faults.half_write_every);
        if half || (op.direction == Direction::Write && self.faults.are_late()) {
            let (real, faults) = (Arc::clone(&self.real), Arc::clone(&self.faults));
            std::thread::spawn(move || {
                faults.wait();
                if half { write_half(op) } else { real.submit(op) }
            });
            return;
        }
        self.real.submit(op);
    }

    fn completion_queue(&self) -> Option<Box<dyn CompletionQueue>> {
        self.real.completion_queue()
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        assert!(!self.faults.panics.load(Ordering::SeqCst), "{ASKED_FOR}");
        self.real.sync(file)
    }
}

/// The message of a panic that a test causes.
const ASKED_FOR: &str = "as asked for";

/// Ends the process if a thread that serves all caches panics. Such panics are caught so that others
/// continue, and would pass unnoticed.
pub fn end_with_a_panic_of_ours() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            report(panic);
            let is_ours = std::thread::current().name().is_some_and(|name| name.starts_with("hw-"));
            if is_ours && !panic.to_string().contains(ASKED_FOR) {
                // The test runner holds back earlier output, which would be lost with the process.
                let _ = writeln!(io::stderr(), "{panic}\n{}", std::backtrace::Backtrace::force_capture());
                std::process::abort();
            }
        }));
    });
}

/// A host with faults to switch on.
pub fn host(limit_bytes: u64) -> (Host, Arc<Faults>) {
    end_with_a_panic_of_ours();
    let faults = Arc::new(Faults::default());
    let engine = FaultyEngine { real: open_engine().unwrap(), faults: Arc::clone(&faults) };
    (Host::with_engine(limit_bytes, Arc::new(engine)).unwrap(), faults)
}

/// Options for a volume with the given limits in MiB.
pub fn options(
    base: &Arc<dyn Device>,
    mode: CacheMode,
    ram_mib: u64,
    disk_mib: u64,
    at: &Path,
) -> VolumeOptions {
    VolumeOptions {
        name: "tested".into(),
        base: Arc::clone(base),
        mode,
        ram_bytes: ram_mib << 20,
        weight: DEFAULT_WEIGHT,
        buffering: Buffering::Direct,
        little_space: LittleSpace::Refused,
        disk_bytes: disk_mib << 20,
        cache_dir: at.to_path_buf(),
        // So long that no test waits for a refusal by accident: a disk that others use may be slow. A test
        // that waits for a refusal sets less.
        pause_limit: Duration::from_secs(60),
        persistent: None,
    }
}

/// Opens a volume.
pub fn open(options: &VolumeOptions, host: &Host) -> (Arc<Volume>, Arc<dyn Device>) {
    let volume = Volume::open(options, host).unwrap();
    let device: Arc<dyn Device> = Arc::clone(&volume) as Arc<dyn Device>;
    (volume, device)
}
