//! A machine that is on, in memory: its disk, its VM, its counters, and who uses its console and display. `start.rs` and `adopt.rs`
//! create an [`Active`], and the end of the VM drops it. What the database records of a machine is in `record.rs`.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use headwater_api::{CacheSettings, DiskCounters};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::backend::{BackendError, Disk, Vm};
use crate::lifecycle::alarm::RaisedAlarm;
use crate::lifecycle::guest_facts::GuestFacts;

/// A boot that ends with a reboot of the guest within this time counts as quick.
const QUICK_BOOT: Duration = Duration::from_secs(10);

/// The same for a boot that ends before the guest was up.
const QUICK_BOOT_NOT_UP: Duration = Duration::from_secs(300);

/// The file in the directory of a machine in whose guest nobody has worked: it holds the process of the machine.
const UNUSED_NOTE: &str = "unused";

/// How long the console's last client may take to let go of it.
const CONSOLE_TIMEOUT: Duration = Duration::from_secs(10);

/// The most pages that have a machine's display at a time: QEMU packs the picture for each of them.
pub(crate) const DISPLAYS_MAX: usize = 8;

/// A machine that is on: what belongs to it until its VM has ended.
pub struct Active {
    pub(crate) name: String,
    pub(crate) catalog: Option<String>,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) vm: Arc<dyn Vm>,
    pub(crate) version_hash: String,
    /// Limits of its disk that could not be written to the database yet.
    pending_limits: Mutex<Option<CacheSettings>>,
    rate: Mutex<Option<Sample>>,
    iops: AtomicU64,
    peaks: Mutex<Peaks>,
    alarm: Mutex<Option<RaisedAlarm>>,
    boot: OnceLock<BootEnd>,
    /// When its start began. An `Instant`, because setting the clock would otherwise change the boot time.
    asked_at: Instant,
    since: Instant,
    /// The number of quick boots in a row before this one.
    quick_boots: AtomicU32,
    /// Serialises console clients, because QEMU serves only one and lets others wait silently.
    console: Arc<Semaphore>,
    console_client: Mutex<String>,
    displays: Arc<Semaphore>,
    /// Somebody worked in its guest.
    is_used: AtomicBool,
    /// The file that says to a later daemon that nobody has worked in its guest.
    unused_note: OnceLock<PathBuf>,
    guest: GuestFacts,
}

/// The duration of the boot, and the bytes read from the image until then.
struct BootEnd {
    took: Duration,
    read_bytes: u64,
}

struct Sample {
    at: Instant,
    operations: u64,
}

/// The most that a write cache took at one time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Peaks {
    pub(crate) live_bytes: u64,
    pub(crate) ram_used_bytes: u64,
    pub(crate) disk_used_bytes: u64,
}

impl Active {
    /// Limits of its disk that could not be written to the database yet.
    pub(super) fn pending_limits(&self) -> MutexGuard<'_, Option<CacheSettings>> {
        self.pending_limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn new(
        (name, catalog): (String, Option<String>),
        disk: Arc<dyn Disk>,
        vm: Arc<dyn Vm>,
        version_hash: String,
        asked_at: Instant,
    ) -> Self {
        Self {
            name,
            catalog,
            disk,
            vm,
            version_hash,
            pending_limits: Mutex::new(None),
            rate: Mutex::new(None),
            iops: AtomicU64::new(0),
            peaks: Mutex::default(),
            alarm: Mutex::new(None),
            boot: OnceLock::new(),
            asked_at,
            since: Instant::now(),
            quick_boots: AtomicU32::new(0),
            console: Arc::new(Semaphore::new(1)),
            console_client: Mutex::default(),
            displays: Arc::new(Semaphore::new(DISPLAYS_MAX)),
            is_used: AtomicBool::new(false),
            unused_note: OnceLock::new(),
            guest: GuestFacts::default(),
        }
    }

    /// The disk's counters, with the rate of the last sample.
    pub(crate) fn counters(&self) -> DiskCounters {
        DiskCounters { iops: self.iops.load(Ordering::Relaxed), ..self.disk.counters() }
    }

    /// The accelerator and process, for the history.
    pub(crate) fn in_words(&self) -> String {
        format!("{} with process {}", self.vm.accelerator(), self.vm.pid())
    }

    /// Records that the guest is up: the duration of the boot, and the bytes read from the image until now.
    pub(crate) fn has_booted(&self) {
        let took = self.asked_at.elapsed();
        self.disk.has_booted();
        self.boot.get_or_init(|| BootEnd { took, read_bytes: self.disk.counters().image_read_bytes });
    }

    /// The duration of the boot, once the guest is up.
    pub(crate) fn boot_time(&self) -> Option<Duration> {
        self.boot.get().map(|boot| boot.took)
    }

    /// Bytes that were read from the image until the guest was up.
    pub(crate) fn boot_bytes(&self) -> Option<u64> {
        self.boot.get().map(|boot| boot.read_bytes)
    }

    /// The number of quick boots in a row, if this boot ends now.
    pub(crate) fn quick_boots(&self) -> u32 {
        let before = self.quick_boots.load(Ordering::Relaxed);
        let quick = if self.boot_time().is_some() { QUICK_BOOT } else { QUICK_BOOT_NOT_UP };
        if self.since.elapsed() < quick { before.saturating_add(1) } else { 0 }
    }

    /// Sets the number of quick boots in a row before this one.
    pub(crate) fn follows_quick_boots(&self, count: u32) {
        self.quick_boots.store(count, Ordering::Relaxed);
    }

    /// Reserves the console for a client until the permit is dropped. The error names the present client.
    pub(crate) async fn take_console(&self, client: &str) -> Result<OwnedSemaphorePermit, String> {
        // A client that has just disconnected may not be noticed yet.
        let turn = tokio::time::timeout(CONSOLE_TIMEOUT, self.console.clone().acquire_owned()).await;
        let mut holder = self.console_client.lock().unwrap_or_else(PoisonError::into_inner);
        match turn {
            Ok(Ok(permit)) => {
                client.clone_into(&mut holder);
                Ok(permit)
            }
            _ => Err(holder.clone()),
        }
    }

    /// Takes one of the machine's displays until the permit is dropped. `None`: all are in use.
    pub(crate) fn take_display(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.displays).try_acquire_owned().ok()
    }

    /// What its guest said.
    pub(crate) fn guest(&self) -> &GuestFacts {
        &self.guest
    }

    /// Notes that somebody works in its guest: nobody else is to get the machine before it is reset, also if another daemon takes the
    /// machine over.
    pub(crate) fn use_it(&self) -> Result<(), BackendError> {
        self.is_used.store(true, Ordering::SeqCst);
        let Some(note) = self.unused_note.get() else { return Ok(()) };
        match std::fs::remove_file(note) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                let message = format!("cannot record that somebody works in machine '{}'", self.name);
                Err(BackendError::from_io(message, e))
            }
            _ => Ok(()),
        }
    }

    /// Says in the directory of the machine that nobody has worked in its guest yet. The note is for this process only: that of an earlier
    /// run may be there still.
    pub(crate) fn note_unused(&self, run_dir: &Path) {
        let note = run_dir.join(UNUSED_NOTE);
        match std::fs::write(&note, self.vm.pid().to_string()) {
            Ok(()) => drop(self.unused_note.set(note)),
            Err(error) => {
                let machine = &self.name;
                tracing::warn!(
                    machine,
                    "cannot record that the machine is unused, so a later daemon takes it for used, and resets it: {error}"
                );
            }
        }
    }

    /// Finds out whether somebody worked in the guest of a machine that was taken over.
    pub(super) fn read_unused_note(&self, run_dir: &Path) {
        let note = run_dir.join(UNUSED_NOTE);
        if std::fs::read_to_string(&note).is_ok_and(|pid| pid == self.vm.pid().to_string()) {
            // It is set once.
            let _ = self.unused_note.set(note);
        } else {
            self.is_used.store(true, Ordering::SeqCst);
        }
    }

    /// Whether somebody has used its guest.
    pub(crate) fn is_used(&self) -> bool {
        self.is_used.load(Ordering::SeqCst)
    }

    /// Its alarm.
    pub(crate) fn alarm(&self) -> MutexGuard<'_, Option<RaisedAlarm>> {
        self.alarm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_peaks(&self, counters: &DiskCounters) -> Peaks {
        let mut peaks = self.peaks.lock().unwrap_or_else(PoisonError::into_inner);
        *peaks = Peaks {
            live_bytes: peaks.live_bytes.max(counters.live_bytes),
            ram_used_bytes: peaks.ram_used_bytes.max(counters.ram_used_bytes),
            disk_used_bytes: peaks.disk_used_bytes.max(counters.disk_used_bytes),
        };
        *peaks
    }

    /// The most that its write cache took.
    pub(crate) fn peaks(&self) -> Peaks {
        self.take_peaks(&self.disk.counters())
    }

    /// How long it is on.
    pub(crate) fn on_for_ms(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Takes a sample. The rate is that between this one and the one before.
    pub(crate) fn sample(&self, now: Instant) {
        let counters = self.disk.counters();
        self.take_peaks(&counters);
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
