//! When requests that wait for the disk are started: not one by one while more requests arrive, but before
//! the queue's thread polls or sleeps.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use crate::guest::{FREE, Guest, PATIENCE, WRITE};
use headwater_block::{
    Attempt, ByteRange, Completion, CompletionQueue, Device, Extent, Geometry, IoError, Op, Request,
};
use headwater_testkit::{ReferenceDisk, wait_until};
use headwater_vhost_user::{Limits, Options, Server};
use rustix::event::EventfdFlags;

#[derive(Debug, PartialEq)]
enum Step {
    /// The queue's thread tried a read.
    Tried,
    /// The queue's thread started this number of reads.
    Started(usize),
}

/// A disk whose reads all wait until the queue's thread starts them.
struct Shared {
    disk: ReferenceDisk,
    waiting: Mutex<Vec<(Request, Completion)>>,
    steps: Mutex<Vec<Step>>,
    takes: AtomicUsize,
}

/// Reports each read that is tried, and continues when it is released.
struct StepByStep {
    shared: Arc<Shared>,
    tried: Sender<()>,
    release: Mutex<Receiver<()>>,
}

struct Own {
    shared: Arc<Shared>,
    /// Never readable: no request completes before the thread takes its answers.
    never: OwnedFd,
}

impl Device for StepByStep {
    fn geometry(&self) -> Geometry {
        self.shared.disk.geometry()
    }

    fn try_now(&self, _: Op<'_>) -> Result<Attempt, IoError> {
        self.shared.steps.lock().unwrap().push(Step::Tried);
        // The receiver is gone if a check has failed.
        let _ = self.tried.send(());
        let _ = self.release.lock().unwrap().recv();
        Ok(Attempt::MustWait)
    }

    fn submit(&self, request: Request, done: Completion) {
        self.shared.waiting.lock().unwrap().push((request, done));
    }

    fn completion_queue(&self) -> Option<Box<dyn CompletionQueue>> {
        let never = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        Some(Box::new(Own { shared: Arc::clone(&self.shared), never }))
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        self.shared.disk.extents(range, max_extents)
    }
}

impl CompletionQueue for Own {
    fn take(&self) {
        let waiting = std::mem::take(&mut *self.shared.waiting.lock().unwrap());
        if !waiting.is_empty() {
            self.shared.steps.lock().unwrap().push(Step::Started(waiting.len()));
        }
        for (request, done) in waiting {
            self.shared.disk.submit(request, done);
        }
        self.shared.takes.fetch_add(1, Ordering::SeqCst);
    }

    fn is_ready(&self) -> bool {
        false
    }

    fn ready(&self) -> BorrowedFd<'_> {
        self.never.as_fd()
    }
}

/// Offers a read of one sector, with its own chain and buffers.
fn offer_read(guest: &mut Guest, number: u16) {
    let at = FREE + 0x1000 * u64::from(number);
    guest.write(at, &[0; 16]);
    guest.write(at + 0x800, &[0xee]);
    guest.chain(number * 3, &[(at, 16, 0), (at + 0x400, 512, WRITE), (at + 0x800, 1, WRITE)]);
    guest.offer(number * 3);
    guest.kick();
}

#[test]
fn reads_of_two_busy_rounds_are_started_together() {
    // The thread sleeps at once, or it polls for longer than the test takes.
    for polling_us in [0, 3_600_000_000] {
        let dir = tempfile::tempdir().unwrap();
        let shared = Arc::new(Shared {
            disk: ReferenceDisk::new(1 << 20),
            waiting: Mutex::default(),
            steps: Mutex::default(),
            takes: AtomicUsize::new(0),
        });
        let (tried, is_tried) = channel();
        let (release, released) = channel();
        let device =
            Arc::new(StepByStep { shared: Arc::clone(&shared), tried, release: Mutex::new(released) });
        let limits = Limits { polling_us, ..Limits::default() };
        let options = Options { limits, ..Options::default() };
        let server = Server::bind(&dir.path().join("s"), device, options).unwrap();
        let mut guest = Guest::start(server.path());
        wait_until("the thread has nothing to do", || shared.takes.load(Ordering::SeqCst) > 0);

        // Each but the first arrives while the thread executes the previous one, so each has its own round.
        offer_read(&mut guest, 0);
        for number in 1..=3 {
            is_tried.recv_timeout(PATIENCE).unwrap();
            if number < 3 {
                offer_read(&mut guest, number);
            }
            release.send(()).unwrap();
        }
        let heads: Vec<u16> = (0..3).map(|_| guest.next_used().0).collect();
        assert_eq!(heads, [0, 3, 6]);
        assert!((0..3).all(|number| guest.read(FREE + 0x1000 * number + 0x800, 1) == [0]));
        let steps = &*shared.steps.lock().unwrap();
        assert_eq!(
            steps,
            &[Step::Tried, Step::Tried, Step::Started(2), Step::Tried, Step::Started(1)],
            "looking for {polling_us} us"
        );
    }
}
