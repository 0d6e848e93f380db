//! What holds requests back: the limit of data in flight, and the order of writes that share a block.

use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of requests that the device has, or that wait for their turn.
pub(crate) struct InFlight {
    limit_bytes: usize,
    bytes: Mutex<usize>,
    freed: Condvar,
}

impl InFlight {
    pub(crate) fn new(limit_bytes: usize) -> Self {
        Self { limit_bytes, bytes: Mutex::new(0), freed: Condvar::new() }
    }

    /// Waits until less than the limit is in flight, and adds `bytes`.
    pub(crate) fn add(&self, bytes: usize) {
        let mut now = self.bytes.lock();
        while *now >= self.limit_bytes {
            self.freed.wait(&mut now);
        }
        *now = now.saturating_add(bytes);
    }

    /// Adds `bytes` if less than the limit is in flight.
    pub(crate) fn try_add(&self, bytes: usize) -> bool {
        let mut now = self.bytes.lock();
        let has_room = *now < self.limit_bytes;
        if has_room {
            *now = now.saturating_add(bytes);
        }
        has_room
    }

    /// Takes `bytes` away.
    pub(crate) fn remove(&self, bytes: usize) {
        let mut now = self.bytes.lock();
        *now = now.saturating_sub(bytes);
        if *now < self.limit_bytes {
            self.freed.notify_all();
        }
    }
}

/// Lets writes of whole blocks pass together, and writes of parts of a block alone, because such a write reads the block,
/// changes some bytes and writes it back: a write in between would be lost. Only one thread writes parts of blocks.
///
/// Interleaving that this prevents: A reads block 7 to change its first byte; B's write of the whole block is carried out
/// and answered; A writes block 7 back as it was before B.
pub(crate) struct Gate {
    /// Writes of whole blocks under way, and [`CLOSED`].
    state: AtomicU64,
    asleep: Mutex<()>,
    changed: Condvar,
}

/// The writer of parts of blocks is alone, or wants to be.
const CLOSED: u64 = 1 << 63;

impl Gate {
    pub(crate) fn new() -> Self {
        Self { state: AtomicU64::new(0), asleep: Mutex::new(()), changed: Condvar::new() }
    }

    /// Begins a write of whole blocks, which [`Gate::leave`] ends, on any thread; `false` while somebody is alone.
    pub(crate) fn try_enter(&self) -> bool {
        if self.state.fetch_add(1, Ordering::SeqCst) & CLOSED == 0 {
            return true;
        }
        self.leave();
        false
    }

    pub(crate) fn leave(&self) {
        if self.state.fetch_sub(1, Ordering::SeqCst) & CLOSED != 0 {
            let _asleep = self.asleep.lock();
            self.changed.notify_all();
        }
    }

    /// Runs `work` while no other write is under way. Only for one thread.
    pub(crate) fn alone<T>(&self, work: impl FnOnce() -> T) -> T {
        self.state.fetch_or(CLOSED, Ordering::SeqCst);
        {
            let mut asleep = self.asleep.lock();
            while self.state.load(Ordering::SeqCst) != CLOSED {
                self.changed.wait(&mut asleep);
            }
        }
        let result = work();
        self.state.fetch_and(!CLOSED, Ordering::SeqCst);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn nobody_writes_beside_one_who_is_alone() {
        let gate = Arc::new(Gate::new());
        let inside = Arc::new(AtomicU32::new(0));
        let refused = Arc::new(AtomicU32::new(0));
        let threads: Vec<_> = (0..4_u32)
            .map(|number| {
                let (gate, inside, refused) = (Arc::clone(&gate), Arc::clone(&inside), Arc::clone(&refused));
                std::thread::spawn(move || {
                    for _ in 0..5000 {
                        if number == 0 {
                            gate.alone(|| {
                                assert_eq!(inside.load(Ordering::SeqCst), 0);
                                assert!(!gate.try_enter());
                            });
                        } else if gate.try_enter() {
                            inside.fetch_add(1, Ordering::SeqCst);
                            inside.fetch_sub(1, Ordering::SeqCst);
                            gate.leave();
                        } else {
                            refused.fetch_add(1, Ordering::SeqCst);
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(gate.state.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_full_limit_holds_the_next_one_back() {
        let flow = Arc::new(InFlight::new(10));
        flow.add(10);
        let waiter = std::thread::spawn({
            let flow = Arc::clone(&flow);
            move || flow.add(5)
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!waiter.is_finished());
        flow.remove(10);
        waiter.join().unwrap();
        assert_eq!(*flow.bytes.lock(), 5);
    }
}
