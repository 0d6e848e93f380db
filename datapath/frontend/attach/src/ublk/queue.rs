//! The thread of a queue: takes requests from its ring, answers hits at once, and gets all other answers
//! through its inbox.
#![expect(unsafe_code, reason = "commands point to memory, which only the caller of io_uring can vouch for")]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use headwater_block::{
    Attempt, ByteRange, Completion, Device, FaultLog, IoError, IoErrorKind, Op, Outcome, Request,
};
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use parking_lot::Mutex;
use rustix::event::EventfdFlags;
use rustix::io::Errno;

use super::abi::{self, Descriptor, Operation};
use super::memory::{Buffers, Descriptors};

/// User data of the poll that ends a sleep; no request has this value.
const POST_EVENT: u64 = u64::MAX;

/// The parameters of a queue.
#[derive(Clone)]
pub(super) struct Setup {
    pub(super) device: Arc<dyn Device>,
    pub(super) character: Arc<OwnedFd>,
    pub(super) queue: u16,
    pub(super) depth: u16,
    pub(super) max_io_bytes: u32,
    pub(super) name: String,
    /// Shared by all queues of the device: a full write cache refuses thousands of requests a second.
    pub(super) faults: Arc<FaultLog>,
}

/// An answer of the device.
struct Post {
    tag: u16,
    descriptor: Descriptor,
    outcome: Outcome,
}

struct PostBox {
    posts: Mutex<Vec<Post>>,
    event: OwnedFd,
}

impl PostBox {
    fn push(&self, post: Post) {
        let mut posts = self.posts.lock();
        posts.push(post);
        if posts.len() == 1 {
            // If the counter is at its limit, the write fails, but the event is readable.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }
}

/// A queue, on the thread that serves it.
pub(super) struct Queue {
    setup: Setup,
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    descriptors: Descriptors,
    buffers: Buffers,
    posts: Arc<PostBox>,
    /// Tags that the kernel may still use.
    live: u16,
    in_flight: u16,
}

impl Queue {
    pub(super) fn new(setup: Setup) -> std::io::Result<Self> {
        let ring = IoUring::<squeue::Entry128, cqueue::Entry>::builder()
            .build(u32::from(setup.depth).saturating_add(2))?;
        let descriptors = Descriptors::map(setup.character.as_fd(), setup.queue, setup.depth)?;
        let buffers = Buffers::new(setup.depth, usize::try_from(setup.max_io_bytes).unwrap_or(0))?;
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let posts = Arc::new(PostBox { posts: Mutex::default(), event });
        Ok(Self { live: setup.depth, setup, ring, descriptors, buffers, posts, in_flight: 0 })
    }

    /// Serves until the device is removed.
    pub(super) fn run(mut self) -> std::io::Result<()> {
        for tag in 0..self.setup.depth {
            self.ask(abi::FETCH_REQ, tag, -1)?;
        }
        self.watch_posts()?;
        let mut arrived: Vec<(u64, i32)> = Vec::new();
        while self.live > 0 || self.in_flight > 0 {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            arrived.extend(self.ring.completion().map(|entry| (entry.user_data(), entry.result())));
            for (data, result) in arrived.drain(..) {
                if data == POST_EVENT {
                    let _ = rustix::io::read(&self.posts.event, &mut [0_u8; 8]);
                    self.watch_posts()?;
                    self.answer_posts()?;
                    continue;
                }
                let Ok(tag) = u16::try_from(data) else { continue };
                if result == 0 {
                    self.serve(tag)?;
                    continue;
                }
                self.live = self.live.saturating_sub(1);
                if result != abi::RESULT_ABORT {
                    let errno = Errno::from_raw_os_error(result.saturating_neg());
                    self.warn(&format_args!("request {tag} ended by the kernel: {errno}"));
                }
            }
        }
        Ok(())
    }

    fn push(&mut self, entry: &squeue::Entry128) -> std::io::Result<()> {
        loop {
            // SAFETY: commands point to a tag's buffer, which lives as long as the ring, and to descriptors that are
            // open as long as the queue is; the poll points to nothing.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            self.ring.submit()?;
        }
    }

    fn ask(&mut self, command: u32, tag: u16, result: i32) -> std::io::Result<()> {
        let bytes = abi::io_command(self.setup.queue, tag, result, self.buffers.address(tag));
        let fd = types::Fd(self.setup.character.as_raw_fd());
        let entry = opcode::UringCmd80::new(fd, command).cmd(bytes).build().user_data(u64::from(tag));
        self.push(&entry)
    }

    fn watch_posts(&mut self) -> std::io::Result<()> {
        let flags = u32::from(rustix::event::PollFlags::IN.bits());
        let entry = opcode::PollAdd::new(types::Fd(self.posts.event.as_raw_fd()), flags).build();
        self.push(&entry.user_data(POST_EVENT).into())
    }

    fn serve(&mut self, tag: u16) -> std::io::Result<()> {
        let Some(descriptor) = self.descriptors.get(tag) else { return Ok(()) };
        let result = match self.attempt(tag, descriptor) {
            Ok(Some(request)) => {
                self.submit(tag, descriptor, request);
                return Ok(());
            }
            Ok(None) => done(&descriptor),
            Err(error) => self.failed(&descriptor, &error),
        };
        self.ask(abi::COMMIT_AND_FETCH_REQ, tag, result)
    }

    /// Executes the request at once, or returns it for [`Device::submit`].
    fn attempt(&mut self, tag: u16, descriptor: Descriptor) -> Result<Option<Request>, IoError> {
        let invalid = |why: &str| IoError::new(IoErrorKind::Invalid, why);
        let Descriptor { offset_bytes, len_bytes, fua, may_unmap, .. } = descriptor;
        let range = ByteRange::new(offset_bytes, len_bytes)
            .ok_or_else(|| invalid("the range does not fit in 64 bits"))?;
        let (device, geometry) = (&self.setup.device, self.setup.device.geometry());
        let len = usize::try_from(len_bytes).unwrap_or(usize::MAX);
        let too_long = || invalid("longer than the buffer");
        let buffers = &mut self.buffers;
        if descriptor.operation != Operation::Flush {
            geometry.check(range)?;
        }
        let (op, request): (Op<'_>, _) = match descriptor.operation {
            Operation::Read => (Op::Read { range, into: buffers.get(tag, len).ok_or_else(too_long)? }, None),
            Operation::Write => {
                (Op::Write { range, from: buffers.get(tag, len).ok_or_else(too_long)?, fua }, None)
            }
            Operation::Flush => (Op::Flush, Some(Request::Flush)),
            Operation::Discard => (Op::Discard { range }, Some(Request::Discard { range })),
            Operation::WriteZeroes => (
                Op::WriteZeroes { range, may_unmap, fua },
                Some(Request::WriteZeroes { range, may_unmap, fua }),
            ),
            Operation::Unknown(_) => {
                return Err(IoError::new(IoErrorKind::Unsupported, "an unknown kind of request"));
            }
        };
        if device.try_now(op)? == Attempt::Done {
            return Ok(None);
        }
        Ok(Some(match request {
            Some(request) => request,
            None if descriptor.operation == Operation::Read => Request::Read { range, buffer: vec![0; len] },
            None => {
                let buffer = buffers.get(tag, len).ok_or_else(too_long)?.to_vec();
                Request::Write { range, buffer, fua }
            }
        }))
    }

    fn submit(&mut self, tag: u16, descriptor: Descriptor, request: Request) {
        self.in_flight = self.in_flight.saturating_add(1);
        let posts = Arc::clone(&self.posts);
        let done = move |outcome| posts.push(Post { tag, descriptor, outcome });
        self.setup.device.submit(request, Completion::new(done));
    }

    fn answer_posts(&mut self) -> std::io::Result<()> {
        let posts = std::mem::take(&mut *self.posts.posts.lock());
        for Post { tag, descriptor, outcome } in posts {
            self.in_flight = self.in_flight.saturating_sub(1);
            let result = match outcome.result {
                Ok(()) => {
                    if descriptor.operation == Operation::Read
                        && let Some(into) = self.buffers.get(tag, outcome.buffer.len())
                    {
                        into.copy_from_slice(&outcome.buffer);
                    }
                    done(&descriptor)
                }
                Err(error) => self.failed(&descriptor, &error),
            };
            self.ask(abi::COMMIT_AND_FETCH_REQ, tag, result)?;
        }
        Ok(())
    }

    fn warn(&self, what: &dyn std::fmt::Display) {
        self.setup.faults.warn(&self.setup.name, what);
    }

    fn failed(&self, descriptor: &Descriptor, error: &IoError) -> i32 {
        let Descriptor { operation, offset_bytes, len_bytes, .. } = descriptor;
        self.warn(&format_args!("{operation:?} of {offset_bytes}+{len_bytes} failed: {error}"));
        let errno = match error.kind() {
            IoErrorKind::Invalid => Errno::INVAL,
            IoErrorKind::ReadOnly => Errno::PERM,
            IoErrorKind::NoSpace => Errno::NOSPC,
            IoErrorKind::Corrupt | IoErrorKind::Device | IoErrorKind::Closed => Errno::IO,
            IoErrorKind::Unsupported => Errno::OPNOTSUPP,
        };
        errno.raw_os_error().saturating_neg()
    }
}

/// The result of a request that succeeded: the number of bytes that it moved.
fn done(descriptor: &Descriptor) -> i32 {
    match descriptor.operation {
        Operation::Read | Operation::Write => i32::try_from(descriptor.len_bytes).unwrap_or(i32::MAX),
        _ => 0,
    }
}
