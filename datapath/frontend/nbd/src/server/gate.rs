//! Separates a partial-sector change from the changes of other connections to the same device.
//!
//! A partial-sector change reads the sector, replaces some bytes, and writes the whole sector. A change by
//! another connection between the read and the write would be lost. So a partial-sector change has exclusive
//! use of the device:
//!
//! | a connection | may continue |
//! |---|---|
//! | changes whole sectors ([`Lane::enter`]) | at once, unless a partial-sector change is in progress or waits |
//! | changes parts of sectors ([`Gate::exclude`]) | when no change of another connection is in flight |
//!
//! While no connection changes partial sectors, a change of whole sectors costs one atomic exchange in its
//! connection's own cache line and one load of a number that is not written. It takes no lock. Otherwise
//! changes take a fair lock.
//!
//! A change of whole sectors first announces itself, then looks for partial-sector changes. A partial-sector
//! change first counts itself, then looks at all lanes. These four steps have one order for all threads
//! (`SeqCst`), so at least one of the two sees the other.
//!
//! Not covered: a device that another server or front-end changes at the same time.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use headwater_block::Device;
use parking_lot::{Condvar, Mutex, RwLock, RwLockWriteGuard};

/// The gates of all devices that connections of one server have open.
#[derive(Default)]
pub(super) struct Gates(Mutex<Vec<(usize, Weak<Gate>)>>);

/// One device.
#[derive(Default)]
pub(super) struct Gate {
    /// How many partial-sector changes are in progress, or wait.
    partial: AtomicUsize,
    /// Locked exclusively while partial sectors are changed; locked shared until a change of whole sectors
    /// has announced itself.
    lock: RwLock<()>,
    lanes: Mutex<Vec<Weak<Changes>>>,
    /// Notified, with `lanes`, when a connection's last change has ended and `partial` is not 0.
    ended: Condvar,
}

/// One connection to a device. It belongs to the connection's thread.
pub(super) struct Lane {
    gate: Arc<Gate>,
    changes: Arc<Changes>,
}

/// The changes of whole sectors of one connection. The alignment gives it a cache line of its own.
#[repr(align(64))]
struct Changes {
    /// A change is being given to the device. Only the connection's thread writes this flag, and never waits
    /// while it is set.
    is_entered: AtomicBool,
    /// How many changes wait for the device.
    waiting: AtomicUsize,
    gate: Arc<Gate>,
}

/// A change of whole sectors that waits for the device, until it is dropped.
pub(super) struct Change(Arc<Changes>);

/// Exclusive use of the device for one change, until it is dropped.
pub(super) struct Exclusion<'a> {
    gate: &'a Gate,
    _lock: RwLockWriteGuard<'a, ()>,
}

impl Gates {
    /// A lane for a new connection.
    pub(super) fn lane(&self, device: &Arc<dyn Device>) -> Lane {
        let address = Arc::as_ptr(device).cast::<()>().addr();
        let gate = {
            let mut gates = self.0.lock();
            gates.retain(|(_, gate)| gate.strong_count() > 0);
            let known = gates.iter().find(|(other, _)| *other == address);
            known.and_then(|(_, gate)| gate.upgrade()).unwrap_or_else(|| {
                let gate = Arc::new(Gate::default());
                gates.push((address, Arc::downgrade(&gate)));
                gate
            })
        };
        let changes = Arc::new(Changes {
            is_entered: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            gate: Arc::clone(&gate),
        });
        {
            let mut lanes = gate.lanes.lock();
            // The lane of a closed connection ends when the device has answered the last of its changes.
            lanes.retain(|lane| lane.strong_count() > 0);
            lanes.push(Arc::downgrade(&changes));
        }
        Lane { gate, changes }
    }
}

impl Lane {
    /// Admits a change of whole sectors, until [`Lane::leave`]. `false`: changes of this connection wait for
    /// the device, and must end first. If there are none, waits for the lock.
    #[inline]
    #[must_use]
    pub(super) fn enter(&self) -> bool {
        self.changes.is_entered.swap(true, Ordering::SeqCst);
        self.gate.partial.load(Ordering::SeqCst) == 0 || self.enter_with_lock()
    }

    #[cold]
    fn enter_with_lock(&self) -> bool {
        self.leave();
        // The partial-sector change waits for these changes, and the device may need this thread to complete
        // them.
        if self.changes.waiting.load(Ordering::SeqCst) > 0 {
            return false;
        }
        let _lock = self.gate.lock.read();
        self.changes.is_entered.store(true, Ordering::SeqCst);
        true
    }

    /// Called when the device has executed the change, or has not taken it.
    #[inline]
    pub(super) fn leave(&self) {
        self.changes.is_entered.store(false, Ordering::Release);
    }

    /// Counts the admitted change, if there is one, as waiting for the device, instead of [`Lane::leave`].
    pub(super) fn waits(&self) -> Option<Change> {
        let change = self.changes.is_entered.load(Ordering::Relaxed).then(|| {
            self.changes.waiting.fetch_add(1, Ordering::SeqCst);
            Change(Arc::clone(&self.changes))
        });
        self.leave();
        change
    }

    pub(super) fn gate(&self) -> Arc<Gate> {
        Arc::clone(&self.gate)
    }
}

impl Gate {
    /// Waits until no change of any connection is in flight, and excludes new ones. The calling connection
    /// has none in flight.
    pub(super) fn exclude(&self) -> Exclusion<'_> {
        self.partial.fetch_add(1, Ordering::SeqCst);
        let lock = self.lock.write();
        let mut lanes = self.lanes.lock();
        while lanes.iter().any(|lane| lane.upgrade().is_some_and(|changes| changes.any())) {
            self.ended.wait(&mut lanes);
        }
        drop(lanes);
        Exclusion { gate: self, _lock: lock }
    }
}

impl Changes {
    /// Whether any change is in flight. Waits for a change that is being given to the device, which takes no
    /// longer than copying its data.
    fn any(&self) -> bool {
        while self.is_entered.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        self.waiting.load(Ordering::SeqCst) > 0
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        let Changes { waiting, gate, .. } = &*self.0;
        if waiting.fetch_sub(1, Ordering::SeqCst) == 1 && gate.partial.load(Ordering::SeqCst) > 0 {
            // With the lock, because the waiting thread may have counted this change without sleeping yet.
            let _lanes = gate.lanes.lock();
            gate.ended.notify_all();
        }
    }
}

impl Drop for Exclusion<'_> {
    fn drop(&mut self) {
        self.gate.partial.fetch_sub(1, Ordering::SeqCst);
    }
}
