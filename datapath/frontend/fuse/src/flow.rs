//! Limits and orders requests: the limit of data in flight, and exclusive access for writes of parts of a
//! block.

use headwater_block::ByteRange;
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counts the bytes of requests that the device has, or that wait for the partial-block thread (`super::parts`), which
/// executes changes of parts of blocks.
///
/// Writes may wait long for space in the device. Reads continue meanwhile: beyond the limit, a further quarter of it is
/// admitted for reads, or a single read of any size.
pub(crate) struct InFlight {
    limit_bytes: usize,
    bytes: Mutex<Bytes>,
    freed: Condvar,
    is_over: AtomicBool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Bytes {
    all: usize,
    /// The bytes of reads alone.
    of_reads: usize,
}

/// The direction of a request's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

impl Bytes {
    /// Whether a request may be added: below the limit, or a read while reads have less than a quarter of the limit.
    fn admits(self, direction: Direction, limit: usize) -> bool {
        self.all < limit
            || (direction == Direction::Read && (self.of_reads == 0 || self.of_reads < limit / 4))
    }

    fn add(&mut self, direction: Direction, bytes: usize) {
        self.all = self.all.saturating_add(bytes);
        if direction == Direction::Read {
            self.of_reads = self.of_reads.saturating_add(bytes);
        }
    }
}

impl InFlight {
    pub(crate) fn new(limit_bytes: usize) -> Self {
        Self { limit_bytes, bytes: Mutex::default(), freed: Condvar::new(), is_over: AtomicBool::new(false) }
    }

    /// No further requests come, so nobody needs to wait any more.
    pub(crate) fn end(&self) {
        let _now = self.bytes.lock();
        self.is_over.store(true, Ordering::SeqCst);
        self.freed.notify_all();
    }

    /// Waits until [`Bytes::admits`] allows it, and adds `bytes`.
    pub(crate) fn add(&self, direction: Direction, bytes: usize) {
        let mut now = self.bytes.lock();
        while !now.admits(direction, self.limit_bytes) && !self.is_over.load(Ordering::SeqCst) {
            self.freed.wait(&mut now);
        }
        now.add(direction, bytes);
    }

    /// Adds `bytes` if [`Bytes::admits`] allows it.
    pub(crate) fn try_add(&self, direction: Direction, bytes: usize) -> bool {
        let mut now = self.bytes.lock();
        let has_room = now.admits(direction, self.limit_bytes);
        if has_room {
            now.add(direction, bytes);
        }
        has_room
    }

    /// Subtracts `bytes`.
    pub(crate) fn remove(&self, direction: Direction, bytes: usize) {
        let mut now = self.bytes.lock();
        now.all = now.all.saturating_sub(bytes);
        if direction == Direction::Read {
            now.of_reads = now.of_reads.saturating_sub(bytes);
        }
        if now.admits(Direction::Read, self.limit_bytes) {
            self.freed.notify_all();
        }
    }
}

/// Admits changes of whole blocks together, and gives writes of parts of a block exclusive access. Such a
/// write reads the block, changes some bytes and writes it back, so a write in between would be lost. Only
/// one thread writes parts of blocks.
///
/// Interleaving that this prevents: A reads block 7 to change its first byte; B writes the whole block and is
/// answered; A writes block 7 back with the contents from before B.
///
/// Discards are also admitted while the partial-block thread waits for writes in flight to end, and while it
/// has exclusive access to other blocks: they may free the space that these writes need. Once the writes have ended,
/// no further discard is admitted, and exclusive access begins when the discards in flight have ended.
pub(crate) struct Gate {
    /// The number of writes and discards of whole blocks in flight, and the flags [`CLOSED`] and [`ALONE`].
    state: AtomicU64,
    /// The blocks to which the partial-block thread has exclusive access.
    changing: Mutex<Option<ByteRange>>,
    changed: Condvar,
    is_over: AtomicBool,
}

/// The kinds of changes that pass the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Writes and zero writes: may need space.
    Write,
    Discard,
}

impl Entry {
    fn count(self) -> u64 {
        match self {
            Entry::Write => 1,
            Entry::Discard => 1 << 31,
        }
    }
}

/// The bits of the state that count writes.
const WRITES: u64 = (1 << 31) - 1;
/// The partial-block thread has exclusive access.
const ALONE: u64 = 1 << 62;
/// It has exclusive access, or waits for it.
const CLOSED: u64 = 1 << 63;

impl Gate {
    pub(crate) fn new() -> Self {
        Self {
            state: AtomicU64::new(0),
            changing: Mutex::new(None),
            changed: Condvar::new(),
            is_over: AtomicBool::new(false),
        }
    }

    /// Begins a change of whole blocks, which [`Gate::leave`] ends, on any thread. `false`: the partial-block
    /// thread has exclusive access to these blocks, or waits for it. The caller then gives the change to that thread.
    pub(crate) fn try_enter(&self, entry: Entry, range: ByteRange) -> bool {
        let state = self.state.fetch_add(entry.count(), Ordering::SeqCst);
        let may_enter = match entry {
            _ if state & CLOSED == 0 => true,
            Entry::Write => false,
            // This discard is counted already: if the partial-block thread has exclusive access, `changing`
            // names its blocks, and it gets no further access before this discard leaves.
            Entry::Discard if state & ALONE != 0 => self
                .changing
                .lock()
                .is_none_or(|other| range.end() <= other.offset() || other.end() <= range.offset()),
            Entry::Discard => state & WRITES != 0,
        };
        if !may_enter {
            self.leave(entry);
        }
        may_enter
    }

    pub(crate) fn leave(&self, entry: Entry) {
        if self.state.fetch_sub(entry.count(), Ordering::SeqCst) & CLOSED != 0 {
            let _changing = self.changing.lock();
            self.changed.notify_all();
        }
    }

    /// From now on nobody gets exclusive access or waits for it.
    pub(crate) fn end(&self) {
        let _changing = self.changing.lock();
        self.is_over.store(true, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// Runs `work`, which changes these blocks, with exclusive access to them. May be called by one thread
    /// only. `None`: [`Gate::end`] was called.
    pub(crate) fn alone<T>(&self, blocks: ByteRange, work: impl FnOnce() -> T) -> Option<T> {
        self.state.fetch_or(CLOSED, Ordering::SeqCst);
        {
            let mut changing = self.changing.lock();
            *changing = Some(blocks);
            let (free, alone) = (CLOSED, CLOSED | ALONE);
            loop {
                if self.is_over.load(Ordering::SeqCst) {
                    self.state.fetch_and(!CLOSED, Ordering::SeqCst);
                    return None;
                }
                if self.state.compare_exchange(free, alone, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                    break;
                }
                self.changed.wait(&mut changing);
            }
        }
        let result = work();
        self.state.fetch_and(!(CLOSED | ALONE), Ordering::SeqCst);
        Some(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;

    fn blocks(first: u64, count: u64) -> ByteRange {
        ByteRange::new(first * 512, count * 512).unwrap()
    }

    #[test]
    fn discards_pass_while_somebody_waits_for_writes_to_be_alone() {
        let gate = Arc::new(Gate::new());
        assert!(gate.try_enter(Entry::Write, blocks(0, 1)));
        let (begun, begins) = std::sync::mpsc::channel();
        let (go_on, waits) = std::sync::mpsc::channel::<()>();
        let other = Arc::clone(&gate);
        let alone = std::thread::spawn(move || {
            other.alone(blocks(2, 2), || {
                begun.send(()).unwrap();
                waits.recv().unwrap();
            });
        });
        while gate.state.load(Ordering::SeqCst) & CLOSED == 0 {
            std::thread::yield_now();
        }
        assert!(!gate.try_enter(Entry::Write, blocks(8, 1)));
        assert!(gate.try_enter(Entry::Discard, blocks(2, 1)));
        gate.leave(Entry::Write);
        assert!(!gate.try_enter(Entry::Discard, blocks(8, 1)), "discards delay nobody");
        gate.leave(Entry::Discard);
        begins.recv().unwrap();
        assert!(!gate.try_enter(Entry::Discard, blocks(3, 1)));
        assert!(gate.try_enter(Entry::Discard, blocks(4, 1)));
        go_on.send(()).unwrap();
        alone.join().unwrap();
        gate.leave(Entry::Discard);
        assert_eq!(gate.state.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn nobody_writes_beside_one_who_is_alone() {
        let gate = Arc::new(Gate::new());
        let inside = Arc::new(AtomicU32::new(0));
        let refused = Arc::new(AtomicU32::new(0));
        let threads: Vec<_> = (0..4_u32)
            .map(|number| {
                let (gate, inside, refused) = (Arc::clone(&gate), Arc::clone(&inside), Arc::clone(&refused));
                let entry = if number == 1 { Entry::Discard } else { Entry::Write };
                std::thread::spawn(move || {
                    for _ in 0..5000 {
                        if number == 0 {
                            gate.alone(blocks(2, 2), || {
                                assert_eq!(inside.load(Ordering::SeqCst), 0);
                                assert!(!gate.try_enter(Entry::Write, blocks(8, 1)));
                                assert!(!gate.try_enter(Entry::Discard, blocks(3, 9)));
                            });
                        } else if gate.try_enter(entry, blocks(3, 1)) {
                            inside.fetch_add(1, Ordering::SeqCst);
                            inside.fetch_sub(1, Ordering::SeqCst);
                            gate.leave(entry);
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
        flow.add(Direction::Write, 10);
        let waiter = std::thread::spawn({
            let flow = Arc::clone(&flow);
            move || flow.add(Direction::Write, 5)
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!waiter.is_finished());
        flow.remove(Direction::Write, 10);
        waiter.join().unwrap();
        assert_eq!(flow.bytes.lock().all, 5);
    }

    #[test]
    fn reads_have_a_quarter_besides_that_writes_cannot_fill() {
        let flow = InFlight::new(8);
        flow.add(Direction::Write, 8);
        assert!(!flow.try_add(Direction::Write, 1));
        flow.add(Direction::Read, 1);
        flow.add(Direction::Read, 1);
        assert!(!flow.try_add(Direction::Read, 1));
        flow.remove(Direction::Read, 2);
        flow.add(Direction::Read, 100);
        flow.remove(Direction::Write, 8);
        assert!(!flow.try_add(Direction::Read, 1), "100 bytes are in flight");
        flow.remove(Direction::Read, 100);
        assert_eq!(*flow.bytes.lock(), Bytes::default());
    }
}
