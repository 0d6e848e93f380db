//! A client on the `virtio-driver` crate that is a `Device`, so that the conformance suite runs through
//! queues.
//!
//! Requests are divided into buffers in different ways, and each queue has a thread that processes
//! completions.
#![expect(unsafe_code, reason = "buffers are shared with the server by address, as a guest does")]

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, IoErrorKind, Op, Request,
};
use parking_lot::Mutex;
use rustix::mm::{MapFlags, ProtFlags};
use virtio_driver::{
    EventFd, QueueNotifier, VhostUser, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags, iovec,
};

const SLOT_BYTES: usize = 1 << 20;
const SLOTS: usize = 16;
const QUEUE_SIZE: u16 = 128;

/// The client's settings.
#[derive(Clone, Copy)]
pub struct Setup {
    /// Queues, each with a thread here.
    pub queues: usize,
    /// Whether to negotiate event indices.
    pub event_idx: bool,
}

struct Ticket {
    request: Request,
    done: Completion,
    slot: usize,
    descriptors: usize,
}

struct Queue {
    rings: VirtioBlkQueue<'static, Ticket>,
    free: Vec<usize>,
    waiting: VecDeque<(Request, Completion)>,
    /// First byte of this queue's slots.
    first_slot: usize,
    /// Free descriptors; the crate loses the context of a request that finds too few.
    descriptors: usize,
    count: usize,
}

struct Shared {
    queues: Vec<Mutex<Queue>>,
    notifiers: Vec<Mutex<Box<dyn QueueNotifier>>>,
    completions: Vec<Arc<EventFd>>,
    closing: AtomicBool,
    geometry: Geometry,
}

/// A connected disk. It panics if the server breaks the protocol.
pub struct VhostDisk {
    shared: Arc<Shared>,
    next: AtomicUsize,
    threads: Vec<JoinHandle<()>>,
    _transport: Mutex<Box<VirtioBlkTransport>>,
}

impl VhostDisk {
    /// Connects to a server's socket.
    pub fn connect(path: &Path, setup: Setup) -> Self {
        let mut features = VirtioFeatureFlags::VERSION_1;
        features.set(VirtioFeatureFlags::RING_EVENT_IDX, setup.event_idx);
        // Read-only, block size, flush, multi-queue, discard, zero writes.
        let block = 1 << 5 | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 12 | 1 << 13 | 1 << 14;
        let transport = VhostUser::new(path.to_str().unwrap(), features.bits() | block).unwrap();
        let mut transport: Box<VirtioBlkTransport> = Box::new(transport);
        let rings = VirtioBlkQueue::setup_queues(&mut *transport, setup.queues, QUEUE_SIZE).unwrap();
        let bytes = SLOT_BYTES * SLOTS * setup.queues;
        let memory = shared_memory(&mut *transport, bytes);
        let config = transport.get_config().unwrap();
        let logical = u32::from(config.blk_size);
        let geometry = Geometry {
            size_bytes: u64::from(config.capacity) * 512,
            logical_block_bytes: logical,
            physical_block_bytes: logical << config.physical_block_exp,
            read_only: transport.get_features() & 1 << 5 != 0,
            volatile_cache: transport.get_features() & 1 << 9 != 0,
        };
        let queue = |(number, mut rings): (usize, VirtioBlkQueue<'static, Ticket>)| {
            rings.set_used_notif_enabled(true);
            let first_slot = memory + number * SLOT_BYTES * SLOTS;
            let free = (0..SLOTS).collect();
            Mutex::new(Queue {
                rings,
                free,
                waiting: VecDeque::new(),
                first_slot,
                descriptors: QUEUE_SIZE.into(),
                count: 0,
            })
        };
        let numbers = 0..setup.queues;
        let shared = Arc::new(Shared {
            queues: rings.into_iter().enumerate().map(queue).collect(),
            notifiers: numbers.clone().map(|q| Mutex::new(transport.get_submission_notifier(q))).collect(),
            completions: numbers.clone().map(|q| transport.get_completion_fd(q)).collect(),
            closing: AtomicBool::new(false),
            geometry,
        });
        let threads = numbers
            .map(|number| {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || shared.take_completions(number))
            })
            .collect();
        Self { shared, next: AtomicUsize::new(0), threads, _transport: Mutex::new(transport) }
    }
}

impl Drop for VhostDisk {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        for event in &self.shared.completions {
            event.write(1).unwrap();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn shared_memory(transport: &mut VirtioBlkTransport, bytes: usize) -> usize {
    let file: File = rustix::fs::memfd_create("buffers", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into();
    file.set_len(bytes as u64).unwrap();
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a new mapping at an address of the kernel's choice, never unmapped.
    let first =
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, flags, &file, 0) }.unwrap();
    transport.map_mem_region(first as usize, bytes, file.as_raw_fd(), 0).unwrap();
    first as usize
}

impl Queue {
    fn slot(&self, slot: usize, len: usize) -> &'static mut [u8] {
        assert!(len <= SLOT_BYTES, "the client's slots are too small for {len} bytes");
        // SAFETY: a slot is used by one request at a time, and the mapping stays.
        unsafe { std::slice::from_raw_parts_mut((self.first_slot + slot * SLOT_BYTES) as *mut u8, len) }
    }

    /// Divided as one buffer, in pages, in odd sectors, or in pieces that are not whole sectors.
    fn divided(&mut self, slot: usize, len: usize) -> Vec<iovec> {
        self.count += 1;
        let piece = match self.count % 4 {
            0 => len,
            1 => 4096,
            2 => 512 * 13,
            _ => 5000,
        };
        // No more buffers than fit into a queue.
        let piece = piece * len.div_ceil(piece * 100).max(1);
        let first = self.slot(slot, len).as_mut_ptr();
        (0..len)
            .step_by(piece)
            // SAFETY: inside the slot.
            .map(|at| iovec { iov_base: unsafe { first.add(at) }.cast(), iov_len: piece.min(len - at) })
            .collect()
    }

    /// Puts as many requests as possible into the rings. `true`: the server has to be notified.
    fn fill(&mut self) -> bool {
        let mut any = false;
        while let Some(slot) = self.free.pop() {
            let Some((request, done)) = self.waiting.pop_front() else {
                self.free.push(slot);
                break;
            };
            if let Err((request, done)) = self.add(slot, request, done) {
                self.waiting.push_front((request, done));
                self.free.push(slot);
                break;
            }
            any = true;
        }
        any && self.rings.avail_notif_needed()
    }

    fn add(&mut self, slot: usize, request: Request, done: Completion) -> Result<(), (Request, Completion)> {
        let buffers = match &request {
            Request::Read { buffer, .. } => self.divided(slot, buffer.len()),
            Request::Write { buffer, .. } => {
                self.slot(slot, buffer.len()).copy_from_slice(buffer);
                self.divided(slot, buffer.len())
            }
            _ => Vec::new(),
        };
        // Header, ranges and status in addition to the data.
        let descriptors = buffers.len() + 3;
        if self.descriptors < descriptors {
            return Err((request, done));
        }
        self.descriptors -= descriptors;
        enum Kind {
            Read,
            Write,
            Discard,
            Zeroes(bool),
            Flush,
        }
        let (kind, range) = match &request {
            Request::Read { range, .. } => (Kind::Read, Some(*range)),
            Request::Write { range, .. } => (Kind::Write, Some(*range)),
            Request::Discard { range } => (Kind::Discard, Some(*range)),
            Request::WriteZeroes { range, may_unmap, .. } => (Kind::Zeroes(*may_unmap), Some(*range)),
            Request::Prefetch { .. } | Request::Flush => (Kind::Flush, None),
        };
        let (at, len) = range.map_or((0, 0), |range| (range.offset(), range.len()));
        let ticket = Ticket { request, done, slot, descriptors };
        // SAFETY: the buffers are in the request's own slot until it is completed.
        let added = unsafe {
            match kind {
                Kind::Read => self.rings.readv(at, buffers.as_ptr(), buffers.len(), ticket),
                Kind::Write => self.rings.writev(at, buffers.as_ptr(), buffers.len(), ticket),
                Kind::Discard => self.rings.discard(at, len, ticket),
                Kind::Zeroes(unmap) => self.rings.write_zeroes(at, len, unmap, ticket),
                Kind::Flush => self.rings.flush(ticket),
            }
        };
        added.unwrap();
        Ok(())
    }
}

impl Shared {
    fn take_completions(&self, number: usize) {
        loop {
            self.completions[number].read().unwrap();
            if self.closing.load(Ordering::SeqCst) {
                return;
            }
            let mut queue = self.queues[number].lock();
            let mut ended = Vec::new();
            while let Some(completion) = queue.rings.completions().next() {
                ended.push((completion.context, completion.ret));
            }
            let mut answers = Vec::new();
            for (ticket, ret) in ended {
                let Ticket { mut request, done, slot, descriptors } = ticket;
                if let Request::Read { buffer, .. } = &mut request {
                    let len = buffer.len();
                    buffer.copy_from_slice(queue.slot(slot, len));
                }
                queue.free.push(slot);
                queue.descriptors += descriptors;
                answers.push((done, ret, request));
            }
            let kick = queue.fill();
            drop(queue);
            if kick {
                self.notifiers[number].lock().notify().unwrap();
            }
            for (done, ret, request) in answers {
                done.complete(self.result(ret, &request), request.into_buffer());
            }
        }
    }

    fn result(&self, ret: i32, request: &Request) -> Result<(), IoError> {
        // The protocol does not distinguish errors, but a refused write to a read-only disk can be nothing
        // else.
        let reads = matches!(request, Request::Read { .. } | Request::Flush);
        match ret {
            0 => Ok(()),
            _ if self.geometry.read_only && !reads => Err(IoError::new(IoErrorKind::ReadOnly, "read-only")),
            libc::EPROTO => Err(IoError::new(IoErrorKind::Device, "no status")),
            _ => Err(IoError::new(IoErrorKind::Device, format!("the server answered {ret}"))),
        }
    }
}

impl Device for VhostDisk {
    fn geometry(&self) -> Geometry {
        self.shared.geometry
    }

    fn try_now(&self, _: Op<'_>) -> Result<Attempt, IoError> {
        Ok(Attempt::MustWait)
    }

    fn submit(&self, request: Request, done: Completion) {
        let number = self.next.fetch_add(1, Ordering::Relaxed) % self.shared.queues.len();
        let mut queue = self.shared.queues[number].lock();
        queue.waiting.push_back((request, done));
        let kick = queue.fill();
        drop(queue);
        if kick {
            self.shared.notifiers[number].lock().notify().unwrap();
        }
    }

    fn extents(&self, range: ByteRange, _: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Data }])
    }
}
