//! Frozen views of disks, lent to readers outside, and taken back when the machine needs its disk.
//!
//! ```text
//!   nobody reads --first reader--> frozen, a View --further readers--> the same View
//!        ^                                               |
//!        +--------- the last one goes, or taken back ----+      a reader that still holds it gets errors
//! ```
//!
//! The view of a scan of the write cache is nobody else's, and ends as soon as somebody wants to read or to seal the disk. A scan begins only
//! if nobody reads.
//!
//! All who read at the same time see the same moment, so a client may open several connections. What the view alone needs is given
//! back when the last of them goes.

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

/// The view of one disk. Cloning is cheap; all clones lend the same.
#[derive(Clone, Default)]
pub struct SnapshotLeases(Arc<Mutex<Option<SnapshotLease>>>);

struct SnapshotLease {
    view: Arc<View>,
    readers: usize,
    /// Of a scan, which ends when anybody else needs the disk.
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

/// How long it is waited for the last read of a scan that was ended: it reads from this host.
const SCAN_END_LIMIT: Duration = Duration::from_secs(5);
const SCAN_END_POLL: Duration = Duration::from_millis(1);

struct View {
    geometry: Geometry,
    /// Gone once it was taken back.
    frozen: RwLock<Option<FrozenVolume>>,
}

/// What one reader holds.
pub struct Reader {
    snapshot_leases: SnapshotLeases,
    view: Arc<View>,
    is_first: bool,
}

impl SnapshotLeases {
    /// The view that others read, or else a new one by `freeze`. A scan is ended.
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

    /// A new view by `freeze` for a scan. Refused while somebody reads, or scans.
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

    /// Freezes the disk for somebody who does not share it, as a seal. A scan is ended; refused while somebody reads.
    pub fn freeze_alone(
        &self,
        freeze: impl Fn() -> Result<FrozenVolume, BackendError>,
    ) -> Result<FrozenVolume, BackendError> {
        let mut lease = self.0.lock();
        let ended = end_scan(&mut lease);
        let frozen = match &*lease {
            Some(held) => Err(being_read(held.readers)),
            // With the lock held, or another scan could come first.
            None => freeze_after(&ended, &freeze),
        };
        drop(lease);
        drop(ended);
        frozen
    }

    /// Ends a scan, if there is one, before somebody freezes the disk.
    pub fn end_scan(&self) {
        let ended = end_scan(&mut self.0.lock());
        drop(ended);
    }

    /// How many read now. A scan does not count.
    pub fn readers(&self) -> usize {
        self.0.lock().as_ref().map_or(0, SnapshotLease::outside_readers)
    }

    /// Keeps others from beginning to read while the answer lives. Refused while somebody reads: who seals can do so later, and a
    /// backup that breaks is worse. A scan is ended.
    pub fn keep_unread(&self) -> Result<RevokedLease<'_>, BackendError> {
        let mut lease = self.0.lock();
        let pin = end_scan(&mut lease).flatten();
        match lease.as_ref().map_or(0, |lease| lease.readers) {
            0 => Ok(RevokedLease { readers: 0, _lease: lease, _pin: pin }),
            readers => Err(being_read(readers)),
        }
    }

    /// Takes the view away from all who read it. Nobody gets another one while the answer lives.
    pub fn take_back(&self) -> RevokedLease<'_> {
        let mut lease = self.0.lock();
        let (readers, pin) =
            lease.take().map_or((0, None), |lease| (lease.outside_readers(), lease.view.end()));
        RevokedLease { readers, _lease: lease, _pin: pin }
    }
}

/// Ends the view of a scan, if there is one. The answer holds its version; it may take its time to let go of that.
fn end_scan(lease: &mut Option<SnapshotLease>) -> Option<Option<Arc<Pin>>> {
    let scan = lease.take_if(|held| held.is_scan)?;
    Some(scan.view.end())
}

/// Freezes a disk. If a scan was ended for that, its last read may still be under way.
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

/// Keeps no other task of the runtime waiting, if there is one.
fn wait(duration: Duration) {
    let sleep = || std::thread::sleep(duration);
    let flavor = Handle::try_current().map(|handle| handle.runtime_flavor());
    if matches!(flavor, Ok(RuntimeFlavor::MultiThread)) {
        tokio::task::block_in_place(sleep)
    } else {
        sleep()
    }
}

/// See [`SnapshotLeases::take_back`].
pub struct RevokedLease<'a> {
    /// How many had it.
    pub readers: usize,
    _lease: MutexGuard<'a, Option<SnapshotLease>>,
    /// Dropped after the guard.
    _pin: Option<Arc<Pin>>,
}

impl View {
    /// Requests that are under way end as they would have. What is left holds the version; whoever opens the disk again must not wait
    /// until a store has let go of that.
    fn end(&self) -> Option<Arc<Pin>> {
        // Closing it may take its time: not with the lock held.
        let frozen = self.frozen.write().take();
        frozen.map(FrozenVolume::end)
    }
}

impl Reader {
    /// Whether the view began with this reader.
    pub fn is_first(&self) -> bool {
        self.is_first
    }

    /// Whether the view was taken back.
    pub fn has_ended(&self) -> bool {
        self.view.frozen.read().is_none()
    }

    /// The view, for one request: no lock is held while it is carried out, and who takes the view back waits for none.
    pub fn frozen(&self) -> Result<Arc<FrozenView>, IoError> {
        let frozen = self.view.frozen.read();
        frozen.as_ref().map(|frozen| Arc::clone(frozen.view())).ok_or_else(taken)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut lease = self.snapshot_leases.0.lock();
        // Another view has taken the place of one that was taken back.
        let Some(held) = lease.as_mut().filter(|held| Arc::ptr_eq(&held.view, &self.view)) else { return };
        held.readers = held.readers.saturating_sub(1);
        if held.readers == 0 {
            *lease = None;
            // With the lock held: who comes now finds the disk thawed, and can freeze it again.
            let pin = self.view.end();
            drop(lease);
            drop(pin);
        }
    }
}

/// Why a disk is not frozen once more.
pub fn being_read(readers: usize) -> BackendError {
    let message = format!(
        "its disk is being read over NBD, by {readers} connection(s), and can be frozen once at a time"
    );
    BackendError::new(ProblemKind::Conflict, message).advise("try again when that is done")
}

/// Why a second scan of a disk does not begin.
pub fn being_scanned() -> BackendError {
    BackendError::new(ProblemKind::Conflict, "another scan of its write cache is under way")
        .advise("try again when that is done")
}

fn taken() -> IoError {
    let why = "the machine needed its disk, was stopped or has no room left, so this view of it has ended; open it again";
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
