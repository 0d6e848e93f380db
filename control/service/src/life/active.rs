//! A machine that is on: its disk, its VM, and its rate of requests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use headwater_api::DiskCounters;

use crate::backend::{Disk, Vm};
use crate::life::alarm::Raised;

/// What belongs to a machine while it is on.
pub struct Active {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) vm: Arc<dyn Vm>,
    pub(crate) version_hash: String,
    rate: Mutex<Option<Sample>>,
    iops: AtomicU64,
    alarm: Mutex<Option<Raised>>,
    boot_bytes: OnceLock<u64>,
}

struct Sample {
    at: Instant,
    operations: u64,
}

impl Active {
    pub(crate) fn new(disk: Arc<dyn Disk>, vm: Arc<dyn Vm>, version_hash: String) -> Self {
        Self {
            disk,
            vm,
            version_hash,
            rate: Mutex::new(None),
            iops: AtomicU64::new(0),
            alarm: Mutex::new(None),
            boot_bytes: OnceLock::new(),
        }
    }

    /// The disk's counters, with the rate of the last sample.
    pub(crate) fn counters(&self) -> DiskCounters {
        DiskCounters { iops: self.iops.load(Ordering::Relaxed), ..self.disk.counters() }
    }

    /// The guest is up: notes what was read from the image until now.
    pub(crate) fn has_booted(&self) {
        self.boot_bytes.get_or_init(|| self.disk.counters().image_read_bytes);
    }

    /// Bytes that were read from the image until the guest was up.
    pub(crate) fn boot_bytes(&self) -> Option<u64> {
        self.boot_bytes.get().copied()
    }

    /// What stands in its way.
    pub(crate) fn alarm(&self) -> MutexGuard<'_, Option<Raised>> {
        self.alarm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a sample. The rate is that between this one and the one before.
    pub(crate) fn sample(&self, now: Instant) {
        let counters = self.disk.counters();
        let operations = counters.reads.saturating_add(counters.writes);
        let mut last = self.rate.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = &*last {
            let passed_ms = now.saturating_duration_since(before.at).as_millis();
            let done = u128::from(operations.saturating_sub(before.operations));
            if let Some(rate) = (done * 1000).checked_div(passed_ms) {
                self.iops.store(u64::try_from(rate).unwrap_or(u64::MAX), Ordering::Relaxed);
            }
        }
        *last = Some(Sample { at: now, operations });
    }
}

impl std::fmt::Debug for Active {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Active").field("pid", &self.vm.pid()).finish_non_exhaustive()
    }
}
