//! Disk I/O through one io_uring, shared by all volumes of a host.
//!
//! The submitting thread itself adds its entry to the ring and enters the kernel; one thread waits for
//! completions and calls the callbacks. Reads of a thread with a ring of its own use that ring instead
//! (`own`).
//!
//! `unsafe` here: the kernel reads and writes buffers outside the compiler's view. Each buffer and its file
//! are in a boxed [`Flight`] whose address is the entry's `user_data`; the box is taken back only when the
//! kernel reports the end of the operation.
#![expect(unsafe_code, reason = "the kernel uses the buffers of submitted entries; see above")]

mod flight;
mod own;
mod write_split;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use headwater_block::CompletionQueue;
use io_uring::{IoUring, opcode, squeue};
use parking_lot::Mutex;

use self::flight::{Flight, Landing};
use self::write_split::WriteSplit;
use super::io::{Direction, IoEngine, IoOp};
use crate::panic_guard::without_panic;

/// Entries of the ring, and the most operations in flight. Further operations queue here, without a waiting
/// thread: a thread that completes an operation may submit the next one, and would wait for itself. Their
/// number is bounded by the front-ends' limits.
const DEPTH: u32 = 256;

/// `user_data` of the entry that ends the completion thread.
const STOP: u64 = 0;

struct Shared {
    ring: IoUring,
    submit: Mutex<()>,
    in_flight: AtomicU32,
    queued: Mutex<VecDeque<Box<Flight>>>,
    write_split: WriteSplit,
}

impl Shared {
    /// Adds an entry and enters the kernel. `false`: the queue was full, and the kernel never saw the entry.
    fn push(&self, entry: &squeue::Entry) -> bool {
        let _guard = self.submit.lock();
        // SAFETY: the lock makes us the only user of the submission side.
        let mut queue = unsafe { self.ring.submission_shared() };
        // SAFETY: the entry's buffer and file live until its completion was seen (see `Flight`).
        if unsafe { queue.push(entry) }.is_err() {
            return false;
        }
        drop(queue);
        loop {
            let Err(error) = self.ring.submit() else { return true };
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                // The completion queue or the kernel's memory is full for a moment.
                Some(libc::EBUSY | libc::EAGAIN) => std::thread::yield_now(),
                _ => {
                    // The entry stays in the ring and is submitted with the next one, so its buffer stays,
                    // too.
                    tracing::error!(%error, "cannot start a read or write of the disk now: it is started with the next one");
                    return true;
                }
            }
        }
    }

    fn launch(&self, mut flight: Box<Flight>) {
        let entry = flight.entry(self.write_split.write_bytes());
        let address = Box::into_raw(flight);
        let entry = entry.user_data(address.expose_provenance() as u64);
        if !self.push(&entry) {
            // SAFETY: the kernel never saw the entry, so the box is still ours alone.
            let flight = unsafe { Box::from_raw(address) };
            self.land();
            flight.end(Err(io::Error::other("the disk queue is full")));
        }
    }

    /// Starts an operation, or queues it if too many are in flight.
    fn start(&self, flight: Box<Flight>) {
        {
            let mut queued = self.queued.lock();
            if self.in_flight.load(Ordering::Acquire) >= DEPTH {
                queued.push_back(flight);
                return;
            }
            self.in_flight.fetch_add(1, Ordering::AcqRel);
        }
        self.launch(flight);
    }

    /// Called when an operation has ended: starts the next one.
    fn land(&self) {
        let next = {
            let mut queued = self.queued.lock();
            let next = queued.pop_front();
            if next.is_none() {
                self.in_flight.fetch_sub(1, Ordering::AcqRel);
            }
            next
        };
        if let Some(flight) = next {
            self.launch(flight);
        }
    }

    /// Handles one completion. Returns whether the thread continues.
    fn complete(&self, user_data: u64, result: i32) -> bool {
        if user_data == STOP {
            return false;
        }
        #[expect(clippy::cast_possible_truncation, reason = "it was an address, and so fits in one")]
        let address = std::ptr::with_exposed_provenance_mut::<Flight>(user_data as usize);
        // SAFETY: the address came from `Box::into_raw` in `launch`, and its one completion is here.
        let mut flight = unsafe { Box::from_raw(address) };
        match flight.landed(result) {
            Landing::Again => self.launch(flight),
            Landing::Over(outcome) => {
                self.land();
                flight.end(outcome);
            }
        }
        true
    }
}

/// The engine of one ring; see the module's documentation.
pub struct UringEngine {
    shared: Arc<Shared>,
}

impl UringEngine {
    /// Sets the ring up. Fails where containers or the system forbid io_uring.
    pub fn open() -> io::Result<Arc<Self>> {
        let ring = IoUring::builder().setup_cqsize(2 * DEPTH).build(DEPTH)?;
        let mut probe = io_uring::Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) || !probe.is_supported(opcode::Write::CODE) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel's io_uring is too old"));
        }
        let shared = Arc::new(Shared {
            ring,
            submit: Mutex::new(()),
            in_flight: AtomicU32::new(0),
            queued: Mutex::default(),
            write_split: WriteSplit::new(),
        });
        let reaper = Arc::clone(&shared);
        std::thread::Builder::new().name("hw-disk".into()).spawn(move || reap(&reaper))?;
        Ok(Arc::new(Self { shared }))
    }
}

fn reap(shared: &Shared) {
    loop {
        match shared.ring.submitter().submit_and_wait(1) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => {
                tracing::error!(%error, "cannot wait for reads and writes of the disk; trying again");
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
        }
        loop {
            // SAFETY: this thread is the only user of the completion side.
            let next = unsafe { self::next(shared) };
            let Some((user_data, result)) = next else { break };
            // The callbacks belong to the caches; a panic in one must not stop the others' operations.
            let mut goes_on = true;
            without_panic("the thread of the disk", || goes_on = shared.complete(user_data, result));
            if !goes_on {
                return;
            }
        }
    }
}

/// Takes one completion off the ring.
///
/// # Safety
/// Only one thread at a time may be here.
unsafe fn next(shared: &Shared) -> Option<(u64, i32)> {
    // SAFETY: promised by the caller.
    let mut queue = unsafe { shared.ring.completion_shared() };
    let entry = queue.next()?;
    Some((entry.user_data(), entry.result()))
}

impl IoEngine for UringEngine {
    fn submit(&self, op: IoOp) {
        if op.buffer.len() < op.len || op.len == 0 {
            let error = io::Error::new(io::ErrorKind::InvalidInput, "the buffer is too small");
            (op.done)(Err(error), op.buffer);
            return;
        }
        let (reads, len) = (op.direction == Direction::Read, op.len);
        let mut flight = Flight::new(op);
        if reads {
            self.shared.write_split.read_starts(len);
            match own::start(flight) {
                Ok(()) => return,
                Err(back) => flight = back,
            }
        }
        self.shared.start(flight);
    }

    fn completion_queue(&self) -> Option<Box<dyn CompletionQueue>> {
        own::OwnQueue::open()
    }
}

impl Drop for UringEngine {
    fn drop(&mut self) {
        // Operations in flight complete first: a no-op with the drain flag then ends the thread.
        let stop = opcode::Nop::new().build().flags(squeue::Flags::IO_DRAIN).user_data(STOP);
        if !self.shared.push(&stop) {
            tracing::warn!("cannot stop the thread that waits for the disk: it stays until the process ends");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_may_submit_while_the_ring_is_full() {
        // Where containers forbid io_uring there is no ring to fill.
        let Ok(engine) = UringEngine::open() else { return };
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.set_len(4096).unwrap();
        let (tx, rx) = std::sync::mpsc::channel();
        let read = |file: &Arc<std::fs::File>, done: super::super::io::IoDone| IoOp {
            file: Arc::clone(file),
            direction: Direction::Read,
            offset: 0,
            buffer: crate::memory::AlignedBuffer::new(4096).unwrap(),
            len: 4096,
            done,
        };
        for _ in 0..4 * DEPTH {
            let (again, second, tx) = (Arc::clone(&engine), Arc::clone(&file), tx.clone());
            engine.submit(read(
                &file,
                Box::new(move |_, _| {
                    again.submit(read(&second, Box::new(move |result, _| tx.send(result).unwrap())));
                }),
            ));
        }
        for _ in 0..4 * DEPTH {
            rx.recv_timeout(std::time::Duration::from_secs(60)).unwrap().unwrap();
        }
    }

    #[test]
    fn the_ring_reads_what_it_wrote() {
        // Where containers forbid io_uring, the threads are the engine, and their test stands for both.
        match UringEngine::open() {
            Ok(engine) => super::super::io::tests::round_trip(&*engine),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
}
