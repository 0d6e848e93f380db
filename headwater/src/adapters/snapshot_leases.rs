//! Gives external readers (NBD clients of the daemon, scans) a snapshot of a machine's disk, and revokes it when the machine needs its
//! disk. Each open disk of [`super::disks`] has one [`SnapshotLeases`]. Snapshots for a seal do not come from here: see
//! [`super::frozen`].
//!
//! ```text
//!   no reader --first reader--> a snapshot (View) --further readers--> the same View
//!        ^                                              |
//!        +--------- the last reader ends, or revoked ---+      a reader that still holds it gets errors
//! ```
//!
//! A scan of the write cache has its own snapshot, which ends as soon as somebody wants to read or seal the disk. A scan begins only if
//! nobody reads.
//!
//! All concurrent readers see the same instant, so a client may open several connections. Blocks that only the snapshot needs are freed
//! when the last reader ends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_api::ProblemKind;
use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, Geometry, IoError, IoErrorKind, Op, Request,
};
use headwater_service::backend::BackendError;
use headwater_store::Pin;
use headwater_volume::FrozenView;
use parking_lot::{Mutex, MutexGuard, RwLock};
use tokio::runtime::{Handle, RuntimeFlavor};

use crate::adapters::frozen::FrozenVolume;

/// The snapshot of one disk for readers. Clones share their state.
#[derive(Clone, Default)]
pub struct SnapshotLeases(Arc<Mutex<Option<SnapshotLease>>>);

struct SnapshotLease {
    view: Arc<View>,
    readers: usize,
    /// Whether it belongs to a scan, which ends when anybody else needs the disk.
    is_scan: bool,
}

impl SnapshotLease {
    fn of(frozen: FrozenVolume, is_scan: bool) -> Self {
        let geometry = frozen.view().geometry();
        let view = Arc::new(View { geometry, frozen: RwLock::new(Some(frozen)) });
        Self { view, readers: 0, is_scan }
    }
}

impl SnapshotLease {
    fn outside_readers(&self) -> usize {
        if self.is_scan { 0 } else { self.readers }
    }
}

/// Timeout of the last read of a scan that was ended. That read is from this host.
const SCAN_END_LIMIT: Duration = Duration::from_secs(5);
const SCAN_END_POLL: Duration = Duration::from_millis(1);

struct View {
    geometry: Geometry,
    /// `None` after it was revoked.
    frozen: RwLock<Option<FrozenVolume>>,
}

/// A reader of the snapshot.
pub struct Reader {
    snapshot_leases: SnapshotLeases,
    view: Arc<View>,
    is_first: bool,
}

impl SnapshotLeases {
    /// The snapshot of the present readers, or a new one from `freeze`. Ends a scan.
    pub fn borrow(
        &self,
        freeze: impl Fn() -> Result<FrozenVolume, BackendError>,
    ) -> Result<Reader, BackendError> {
        let mut lease = self.0.lock();
        let ended = end_scan(&mut lease);
        let is_first = lease.is_none();
        let held = match lease.take() {
            Some(held) => held,
            None => SnapshotLease::of(freeze_after(&ended, &freeze)?, false),
        };
        let reader = self.reader(lease.insert(held), is_first);
        drop(lease);
        drop(ended);
        Ok(reader)
    }

    fn reader(&self, held: &mut SnapshotLease, is_first: bool) -> Reader {
        held.readers += 1;
        Reader { snapshot_leases: self.clone(), view: Arc::clone(&held.view), is_first }
    }

    /// A new snapshot from `freeze` for a scan. Fails while there is a reader or a scan.
    pub fn borrow_for_scan(
        &self,
        freeze: impl FnOnce() -> Result<FrozenVolume, BackendError>,
    ) -> Result<Reader, BackendError> {
        let mut lease = self.0.lock();
        match &*lease {
            Some(held) if held.is_scan => Err(being_scanned()),
            Some(held) => Err(being_read(held.readers)),
            None => {
                let held = SnapshotLease::of(freeze()?, true);
                Ok(self.reader(lease.insert(held), true))
            }
        }
    }

    /// A snapshot that is not shared, for a seal. Ends a scan; fails while there is a reader.
    pub fn freeze_alone(
        &self,
        freeze: impl Fn() -> Result<FrozenVolume, BackendError>,
    ) -> Result<FrozenVolume, BackendError> {
        let mut lease = self.0.lock();
        let ended = end_scan(&mut lease);
        let frozen = match &*lease {
            Some(held) => Err(being_read(held.readers)),
            // The lock stays held, because otherwise another scan could begin first.
            None => freeze_after(&ended, &freeze),
        };
        drop(lease);
        drop(ended);
        frozen
    }

    /// Ends a scan, if there is one, before somebody makes a snapshot of the disk.
    pub fn end_scan(&self) {
        let ended = end_scan(&mut self.0.lock());
        drop(ended);
    }

    /// The number of readers. A scan does not count.
    pub fn readers(&self) -> usize {
        self.0.lock().as_ref().map_or(0, SnapshotLease::outside_readers)
    }

    /// Keeps readers out while the result lives. Fails while there is a reader: a seal can be repeated later, but a
    /// backup that breaks is worse. Ends a scan.
    pub fn keep_unread(&self) -> Result<RevokedLease<'_>, BackendError> {
        let mut lease = self.0.lock();
        let pin = end_scan(&mut lease).flatten();
        match lease.as_ref().map_or(0, |lease| lease.readers) {
            0 => Ok(RevokedLease { readers: 0, _lease: lease, _pin: pin }),
            readers => Err(being_read(readers)),
        }
    }

    /// Revokes the snapshot of all readers. Nobody gets another one while the result lives.
    pub fn take_back(&self) -> RevokedLease<'_> {
        let mut lease = self.0.lock();
        let (readers, pin) =
            lease.take().map_or((0, None), |lease| (lease.outside_readers(), lease.view.end()));
        RevokedLease { readers, _lease: lease, _pin: pin }
    }
}

/// Ends the snapshot of a scan, if there is one. Returns the pin of its version, whose release may take long.
fn end_scan(lease: &mut Option<SnapshotLease>) -> Option<Option<Arc<Pin>>> {
    let scan = lease.take_if(|held| held.is_scan)?;
    Some(scan.view.end())
}

/// Makes a snapshot. If a scan was ended before, its last read may still run.
fn freeze_after<E>(
    ended: &Option<E>,
    freeze: &impl Fn() -> Result<FrozenVolume, BackendError>,
) -> Result<FrozenVolume, BackendError> {
    let begun = Instant::now();
    loop {
        match freeze() {
            Err(error) if ended.is_some() && begun.elapsed() < SCAN_END_LIMIT => {
                tracing::debug!(%error, "a scan ends");
                wait(SCAN_END_POLL);
            }
            outcome => return outcome,
        }
    }
}

/// Sleeps. Within a runtime, other tasks can run meanwhile.
fn wait(duration: Duration) {
    let sleep = || std::thread::sleep(duration);
    let flavor = Handle::try_current().map(|handle| handle.runtime_flavor());
    if matches!(flavor, Ok(RuntimeFlavor::MultiThread)) {
        tokio::task::block_in_place(sleep)
    } else {
        sleep()
    }
}

/// While this exists, nobody gets a snapshot of the disk ([`SnapshotLeases::take_back`]).
pub struct RevokedLease<'a> {
    /// The number of readers that had it.
    pub readers: usize,
    _lease: MutexGuard<'a, Option<SnapshotLease>>,
    /// A field after the guard, so that it is dropped after it.
    _pin: Option<Arc<Pin>>,
}

impl View {
    /// Ends the snapshot; running requests complete. Returns the pin of the version: a caller that opens the disk again
    /// must not wait for its release.
    fn end(&self) -> Option<Arc<Pin>> {
        // Closing it may take long, so the lock is released first.
        let frozen = self.frozen.write().take();
        frozen.map(FrozenVolume::end)
    }
}

impl Reader {
    /// Whether the snapshot was made for this reader.
    pub fn is_first(&self) -> bool {
        self.is_first
    }

    /// Whether the snapshot was revoked.
    pub fn has_ended(&self) -> bool {
        self.view.frozen.read().is_none()
    }

    /// The snapshot, for one request: no lock is held during the request, so a revocation does not wait for it.
    pub fn frozen(&self) -> Result<Arc<FrozenView>, IoError> {
        let frozen = self.view.frozen.read();
        frozen.as_ref().map(|frozen| Arc::clone(frozen.view())).ok_or_else(taken)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut lease = self.snapshot_leases.0.lock();
        // After a revocation there may be another snapshot.
        let Some(held) = lease.as_mut().filter(|held| Arc::ptr_eq(&held.view, &self.view)) else { return };
        held.readers = held.readers.saturating_sub(1);
        if held.readers == 0 {
            *lease = None;
            // With the lock held: the next reader finds no snapshot, and can make a new one.
            let pin = self.view.end();
            drop(lease);
            drop(pin);
        }
    }
}

/// The error of a second snapshot.
pub fn being_read(readers: usize) -> BackendError {
    let message = format!(
        "its disk is being read over NBD by {readers} connection(s), and can have one snapshot at a time"
    );
    BackendError::new(ProblemKind::Conflict, message).advise("try again when that is done")
}

/// The error of a second scan of a disk.
pub fn being_scanned() -> BackendError {
    BackendError::new(ProblemKind::Conflict, "another scan of its write cache is running")
        .advise("try again when that is done")
}

fn taken() -> IoError {
    let why = "this snapshot has ended, because the machine needed its disk, was stopped or has no space left; open the disk again";
    IoError::new(IoErrorKind::Closed, why)
}

impl Device for Reader {
    fn geometry(&self) -> Geometry {
        self.view.geometry
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        self.frozen()?.try_now(op)
    }

    fn submit(&self, request: Request, done: Completion) {
        match self.frozen() {
            Ok(frozen) => frozen.submit(request, done),
            Err(error) => done.complete(Err(error), request.into_buffer()),
        }
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        self.frozen()?.extents(range, max_extents)
    }
}
