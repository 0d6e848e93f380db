//! A thread that takes the answers to its own reads, as connections and queues do, sees the same disk.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::{JoinHandle, ThreadId};

use headwater_block::{Attempt, ByteRange, Completion, Device, Extent, Geometry, IoError, Op, Request};
use headwater_testkit::conformance::{self, Options};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng};
use headwater_volume::CacheMode;
use rustix::event::{EventfdFlags, PollFd, PollFlags};

use crate::setup;

const MIB: u64 = 1 << 20;

/// A device all of whose requests are submitted by one thread, which has a completion queue.
struct Served {
    device: Arc<dyn Device>,
    orders: Option<Sender<(Request, Completion)>>,
    event: Arc<OwnedFd>,
    /// Reads that were answered on the thread, after they were submitted.
    taken: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    fn new(device: Arc<dyn Device>) -> Self {
        let (orders, inbox) = channel();
        let event = Arc::new(rustix::event::eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let taken = Arc::new(AtomicU64::new(0));
        let thread = std::thread::spawn({
            let (device, event, taken) = (Arc::clone(&device), Arc::clone(&event), Arc::clone(&taken));
            move || serve(&*device, &inbox, &event, &taken)
        });
        Self { device, orders: Some(orders), event, taken, thread: Some(thread) }
    }

    fn wake(&self) {
        rustix::io::write(&self.event, &1_u64.to_ne_bytes()).unwrap();
    }
}

fn serve(
    device: &dyn Device,
    inbox: &Receiver<(Request, Completion)>,
    event: &OwnedFd,
    taken: &Arc<AtomicU64>,
) {
    let own = device.completion_queue().expect("the engine has queues, and this thread has none yet");
    assert!(device.completion_queue().is_none(), "a thread has one queue");
    loop {
        own.take();
        match inbox.try_recv() {
            Ok((request, done)) => device.submit(request, marked(done, taken)),
            // Operations in flight end while the queue is dropped.
            Err(TryRecvError::Disconnected) => return,
            Err(TryRecvError::Empty) => {
                let mut fds =
                    [PollFd::new(event, PollFlags::IN), PollFd::from_borrowed_fd(own.ready(), PollFlags::IN)];
                rustix::event::poll(&mut fds, None).unwrap();
                let _ = rustix::io::read(event, &mut [0_u8; 8]);
            }
        }
    }
}

/// Counts the answer if it comes on this thread.
fn marked(done: Completion, taken: &Arc<AtomicU64>) -> Completion {
    let (taken, home): (_, ThreadId) = (Arc::clone(taken), std::thread::current().id());
    Completion::new(move |outcome| {
        if std::thread::current().id() == home {
            taken.fetch_add(1, Ordering::Relaxed);
        }
        done.complete(outcome.result, outcome.buffer);
    })
}

impl Device for Served {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn try_now(&self, _: Op<'_>) -> Result<Attempt, IoError> {
        Ok(Attempt::MustWait)
    }

    fn submit(&self, request: Request, done: Completion) {
        self.orders.as_ref().unwrap().send((request, done)).unwrap();
        self.wake();
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        self.device.extents(range, max_extents)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.orders.take());
        self.wake();
        self.thread.take().unwrap().join().unwrap();
    }
}

fn image(size_bytes: u64) -> Arc<dyn Device> {
    let contents = Rng::new(3).bytes(size_bytes as usize);
    let options = ReferenceOptions { read_only: true, ..Default::default() };
    Arc::new(ReferenceDisk::with_contents(contents, options))
}

#[test]
fn the_conformance_suite_passes_on_a_thread_with_a_queue() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let options = setup::options(&image(40 * MIB), CacheMode::RamDisk, 16, 60, dir.path());
    let (volume, device) = setup::open(&options, &host);
    let served = Arc::new(Served::new(device));
    let suite = Options {
        operations: 2500,
        span_bytes: 40 * MIB,
        max_request_bytes: 512 << 10,
        ..Options::seeded(41)
    };
    let as_device: Arc<dyn Device> = Arc::clone(&served) as _;
    conformance::check(&as_device, &suite);
    let cache = volume.counters().cache;
    assert!(cache.read_disk_blocks > 100 && cache.cleaned_segments > 0, "{cache:?}");
    assert_eq!((cache.corrupt_blocks, cache.disk_errors, cache.refused_writes), (0, 0, 0));
    assert!(served.taken.load(Ordering::Relaxed) > 0);
}

/// More reads than a ring has entries, some of which fail, and a thread that ends while it has them.
#[test]
fn a_queue_that_is_dropped_answers_what_it_has() {
    const BLOCKS: u64 = 4096;
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(64 * MIB));
    let (volume, device) = setup::open(&setup::options(&base, CacheMode::Disk, 16, 256, dir.path()), &host);
    let data = Rng::new(9).bytes((BLOCKS * 4096 * 2) as usize);
    headwater_block::blocking::write(&*device, 0, &data).unwrap();
    faults.read_error_every.store(10, Ordering::Relaxed);
    let served = Served::new(Arc::clone(&device));
    let (tx, rx) = channel();
    for block in 0..BLOCKS {
        let range = ByteRange::new(block * 4096, 4096).unwrap();
        let tx = tx.clone();
        let done = Completion::new(move |outcome| tx.send((block, outcome)).unwrap());
        served.submit(Request::Read { range, buffer: vec![0; 4096] }, done);
    }
    drop(served);
    drop(tx);
    let answers: Vec<_> = rx.iter().collect();
    assert_eq!(answers.len() as u64, BLOCKS);
    let mut failed = 0;
    for (block, outcome) in answers {
        let at = (block * 4096) as usize;
        match outcome.result {
            Ok(()) => assert!(outcome.buffer == data[at..at + 4096], "block {block}"),
            Err(_) => failed += 1,
        }
    }
    let cache = volume.counters().cache;
    assert!(cache.read_disk_blocks > 1000 && failed > 0, "{failed} failed; {cache:?}");
}
