//! What all caches of a process share: memory, the disk engine, one thread that spills, cleans and wakes.
//!
//! The thread sleeps without a time-out while there is nothing to do, so an idle host costs no CPU.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::cache::WriteCache;
use crate::memory::{AlignedBuffer, MemoryPool};
use crate::overflow::io::{IoEngine, open_engine};
use crate::overflow::seal::SEALED_SEGMENT_BYTES;
use crate::packed::Packer;

/// Buffers for segments on their way to or from the disk, for all caches together.
pub const STAGING_BUFFERS: usize = 3;

/// Free memory goes back to the system, and surplus overflow space is punched out, this often.
const TRIM_INTERVAL: Duration = Duration::from_millis(300);

/// A cache whose disk failed is tried again after this.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Shared by the caches of a host; see the file's head.
pub struct HostShared {
    pub(crate) pool: Arc<MemoryPool>,
    pub(crate) engine: Arc<dyn IoEngine>,
    pub(crate) packer: Mutex<Packer>,
    staging: Mutex<Staging>,
    signal: Mutex<bool>,
    wake: Condvar,
    stop: AtomicBool,
    caches: Mutex<Vec<Weak<WriteCache>>>,
    limit_bytes: AtomicU64,
    used_bytes: AtomicU64,
}

#[derive(Default)]
struct Staging {
    free: Vec<AlignedBuffer>,
    made: usize,
}

/// The host's side of all caches. Dropping it ends the thread, once the caches are gone.
pub struct Host {
    shared: Arc<HostShared>,
}

impl Host {
    /// Starts the host. `limit_bytes` bounds the RAM of all its caches together.
    pub fn start(limit_bytes: u64) -> Result<Self, String> {
        let engine = open_engine().map_err(|e| format!("cannot start disk I/O: {e}"))?;
        Self::with_engine(limit_bytes, engine)
    }

    /// As [`Host::start`], with a given disk engine: for tests that inject faults.
    pub fn with_engine(limit_bytes: u64, engine: Arc<dyn IoEngine>) -> Result<Self, String> {
        let shared = Arc::new(HostShared {
            pool: MemoryPool::new(),
            engine,
            packer: Mutex::default(),
            staging: Mutex::default(),
            signal: Mutex::new(false),
            wake: Condvar::new(),
            stop: AtomicBool::new(false),
            caches: Mutex::default(),
            limit_bytes: AtomicU64::new(limit_bytes),
            used_bytes: AtomicU64::new(0),
        });
        let worker = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("hw-cache".into())
            .spawn(move || worker.run())
            .map_err(|e| format!("cannot start the cache thread: {e}"))?;
        Ok(Self { shared })
    }

    /// What caches need to know of their host.
    pub fn shared(&self) -> Arc<HostShared> {
        Arc::clone(&self.shared)
    }

    /// Changes the bound of all caches together.
    pub fn set_limit_bytes(&self, limit_bytes: u64) {
        self.shared.limit_bytes.store(limit_bytes, Ordering::Relaxed);
        self.shared.signal();
    }

    /// RAM in use by all caches.
    pub fn used_bytes(&self) -> u64 {
        self.shared.used_bytes.load(Ordering::Relaxed)
    }

    /// The disk engine's name.
    pub fn engine_name(&self) -> &'static str {
        self.shared.engine.name()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.signal();
    }
}

impl HostShared {
    /// Wakes the host's thread.
    pub fn signal(&self) {
        let mut pending = self.signal.lock();
        if !*pending {
            *pending = true;
            self.wake.notify_one();
        }
    }

    pub(crate) fn register(&self, cache: &Arc<WriteCache>) {
        let mut caches = self.caches.lock();
        caches.retain(|c| c.strong_count() > 0);
        caches.push(Arc::downgrade(cache));
    }

    /// Whether `bytes` more fit under the host's limit; if so they are counted.
    pub(crate) fn take_ram(&self, bytes: u64) -> bool {
        let limit = self.limit_bytes.load(Ordering::Relaxed);
        self.used_bytes
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |used| {
                used.checked_add(bytes).filter(|total| *total <= limit)
            })
            .is_ok()
    }

    /// Counts RAM that is taken in any case (index).
    pub(crate) fn add_ram(&self, bytes: u64) {
        self.used_bytes.fetch_add(bytes, Ordering::AcqRel);
    }

    pub(crate) fn give_ram(&self, bytes: u64) {
        self.used_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }

    /// A staging buffer, while there is one.
    pub(crate) fn take_staging(&self) -> Option<AlignedBuffer> {
        let mut staging = self.staging.lock();
        if let Some(buffer) = staging.free.pop() {
            return Some(buffer);
        }
        if staging.made == STAGING_BUFFERS {
            return None;
        }
        let buffer = AlignedBuffer::new(SEALED_SEGMENT_BYTES)?;
        staging.made += 1;
        Some(buffer)
    }

    pub(crate) fn give_staging(&self, buffer: AlignedBuffer) {
        self.staging.lock().free.push(buffer);
    }

    fn live_caches(&self) -> Vec<Arc<WriteCache>> {
        self.caches.lock().iter().filter_map(Weak::upgrade).collect()
    }

    fn run(&self) {
        let mut last_trim = Instant::now();
        let mut first = 0usize;
        loop {
            let caches = self.live_caches();
            if self.stop.load(Ordering::Acquire) && caches.is_empty() {
                return;
            }
            let now = Instant::now();
            // Each round begins with another cache, so that the staging buffers go round.
            first = first.wrapping_add(1);
            let (before, after) = caches.split_at(first % caches.len().max(1));
            let mut deadline: Option<Instant> = None;
            let mut failed = false;
            for cache in after.iter().chain(before) {
                let turn = cache.work(now);
                failed |= turn.disk_failed;
                deadline = deadline.into_iter().chain(turn.deadline).min();
            }
            let trim_due = self.pool.warm_bytes() > 0 || caches.iter().any(|c| c.wants_trim());
            if trim_due && now.duration_since(last_trim) >= TRIM_INTERVAL {
                self.pool.trim();
                caches.iter().for_each(|c| c.trim());
                last_trim = now;
            }
            drop(caches);
            let mut sleep = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            if trim_due {
                sleep = Some(sleep.unwrap_or(TRIM_INTERVAL).min(TRIM_INTERVAL));
            }
            if failed {
                sleep = Some(sleep.unwrap_or(RETRY_INTERVAL).min(RETRY_INTERVAL));
            }
            self.sleep(sleep);
        }
    }

    fn sleep(&self, limit: Option<Duration>) {
        let mut pending = self.signal.lock();
        while !*pending {
            match limit {
                None => self.wake.wait(&mut pending),
                Some(limit) => {
                    self.wake.wait_for(&mut pending, limit);
                    break;
                }
            }
        }
        *pending = false;
    }
}
