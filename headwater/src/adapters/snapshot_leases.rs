//! Frozen views of disks, lent to readers outside, and taken back when the machine needs its disk.
//!
//! ```text
//!   nobody reads --first reader--> frozen, a View --further readers--> the same View
//!        ^                                               |
//!        +--------- the last one goes, or taken back ----+      a reader that still holds it gets errors
//! ```
//!
//! All who read at the same time see the same moment, so a client may open several connections. What the view alone needs is given
//! back when the last of them goes.

use std::sync::Arc;

use headwater_api::ProblemKind;
use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, Geometry, IoError, IoErrorKind, Op, Request,
};
use headwater_service::backend::BackendError;
use headwater_store::Pin;
use headwater_volume::FrozenView;
use parking_lot::{Mutex, MutexGuard, RwLock};

use crate::adapters::frozen::FrozenVolume;

/// The view of one disk. Cloning is cheap; all clones lend the same.
#[derive(Clone, Default)]
pub struct SnapshotLeases(Arc<Mutex<Option<SnapshotLease>>>);

struct SnapshotLease {
    view: Arc<View>,
    readers: usize,
}

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
    /// The view that others read, or else a new one by `freeze`.
    pub fn borrow(
        &self,
        freeze: impl FnOnce() -> Result<FrozenVolume, BackendError>,
    ) -> Result<Reader, BackendError> {
        let mut lease = self.0.lock();
        let is_first = lease.is_none();
        let held = match lease.take() {
            Some(held) => held,
            None => {
                let frozen = freeze()?;
                let geometry = frozen.view().geometry();
                SnapshotLease {
                    view: Arc::new(View { geometry, frozen: RwLock::new(Some(frozen)) }),
                    readers: 0,
                }
            }
        };
        let held = lease.insert(held);
        held.readers += 1;
        Ok(Reader { snapshot_leases: self.clone(), view: Arc::clone(&held.view), is_first })
    }

    /// How many read now.
    pub fn readers(&self) -> usize {
        self.0.lock().as_ref().map_or(0, |lease| lease.readers)
    }

    /// Keeps others from beginning to read while the answer lives. Refused while somebody reads: who seals can do so later, and a
    /// backup that breaks is worse.
    pub fn keep_unread(&self) -> Result<RevokedLease<'_>, BackendError> {
        let lease = self.0.lock();
        match lease.as_ref().map_or(0, |lease| lease.readers) {
            0 => Ok(RevokedLease { readers: 0, _lease: lease, _pin: None }),
            readers => Err(being_read(readers)),
        }
    }

    /// Takes the view away from all who read it. Nobody gets another one while the answer lives.
    pub fn take_back(&self) -> RevokedLease<'_> {
        let mut lease = self.0.lock();
        let (readers, pin) = lease.take().map_or((0, None), |lease| (lease.readers, lease.view.end()));
        RevokedLease { readers, _lease: lease, _pin: pin }
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

    /// The view, for one request: no lock is held while it is carried out, and who takes the view back waits for none.
    fn frozen(&self) -> Result<Arc<FrozenView>, IoError> {
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
