//! The loop of a queue's thread.
//!
//! ```text
//!   +--> inbox: answers of the device become used entries, orders are followed; requests for the disk are started now and then
//!   |    available requests: served, or submitted to the device
//!   |    used entries become visible to the driver together, with one interrupt if it wants one
//!   +--- something was done?
//!   |    no: start requests for the disk, poll for as long as that was worthwhile recently
//!   +--- still nothing: ask for a kick, check once more, sleep until a kick or a post
//! ```

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use headwater_block::{CompletionQueue, Polling};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::chain::Chain;
use super::job::Job;
use super::marks::Marks;
use super::post::{Post, PostBox};
use super::request::Status;
use super::rings::{RingAddresses, Rings};
use super::signal::Signal;
use super::together::{self, Gathered};
use super::{Setup, serve};
use crate::disk::Disk;
use crate::fault::RingFault;
use crate::memory::GuestMemory;

/// Requests that are served before the inbox is checked and the driver is interrupted.
const BATCH: usize = 64;
/// Data that is moved before the inbox is checked, in bytes.
const BATCH_BYTES: u64 = 512 << 10;
/// Used entries that become visible to the driver at a time, so that it continues while the rest of the batch
/// is served.
const SHOWN_TOGETHER: u16 = 8;

/// Requests for the disk are started at the latest after this many rounds, and at once if there is nothing
/// else to do. Starting any number of requests rings the disk's doorbell once, which costs more than the rest
/// of a read.
const MOST_ROUNDS_UNSTARTED: u32 = 2;

const NO_ROOM_AT_STOP: &str =
    "a write fails: it found no space on the device before the machine stopped its disk";
const CLOSED_AT_STOP: &str = "the disk was closed before all requests of the machine were answered";

/// A queue in service.
pub(super) struct QueueThread {
    pub(super) disk: Arc<Disk>,
    pub(super) rings: Rings,
    pub(super) posts: Arc<PostBox>,
    pub(super) chain: Chain,
    pub(super) scratch: Vec<u8>,
    /// Writes of this round that are not executed yet.
    pub(super) gathered: Vec<Gathered>,
    pub(super) free: Vec<Vec<u8>>,
    /// Requests that the device has.
    pub(super) in_flight: usize,
    pub(super) bytes_in_flight: usize,
    /// The part of the bytes in flight that belongs to reads.
    pub(super) read_bytes_in_flight: usize,
    /// Writes that have no buffer yet, because the limit of bytes in flight is reached.
    held: VecDeque<Job>,
    /// Requests that found no space, to be tried again.
    pub(super) starved: Vec<Job>,
    /// Requests that the closed device did not accept. They are not answered.
    left: Vec<Job>,
    stopping: bool,
    number: usize,
    addresses: RingAddresses,
    event_idx: bool,
    indirect: bool,
    kick: OwnedFd,
    call: Option<Signal>,
    error: Option<Signal>,
    broken: bool,
    /// The marks of requests that are taken and not answered.
    marks: Option<Marks>,
    /// Requests that the previous server took and did not answer; they are served before others.
    again: VecDeque<u16>,
    next_available: u16,
    next_used: u16,
    shown: u16,
    /// The used index when the driver was last asked whether it wants an interrupt.
    signalled: u16,
    retry_at: Option<Instant>,
    polling: Polling,
    inbox: Vec<Post>,
    /// Receives the device's answers to this thread, if the device supports that; they are posted too.
    own: Option<Box<dyn CompletionQueue>>,
    /// Rounds since requests that wait for the disk were started.
    rounds_unstarted: u32,
}

impl QueueThread {
    pub(super) fn new(
        setup: Setup,
        rings: Rings,
        posts: Arc<PostBox>,
        (marks, again): (Option<Marks>, Vec<u16>),
    ) -> Self {
        let used = rings.used_index();
        let polling = Polling::new(Duration::from_micros(setup.disk.limits.polling_us));
        let own = setup.disk.device.completion_queue();
        Self {
            disk: setup.disk,
            rings,
            posts,
            chain: Chain::default(),
            scratch: Vec::new(),
            gathered: Vec::new(),
            free: Vec::new(),
            in_flight: 0,
            bytes_in_flight: 0,
            read_bytes_in_flight: 0,
            held: VecDeque::new(),
            starved: Vec::new(),
            left: Vec::new(),
            stopping: false,
            number: setup.number,
            addresses: setup.addresses,
            event_idx: setup.event_idx,
            indirect: setup.indirect,
            kick: setup.kick,
            call: setup.call,
            error: setup.error,
            broken: false,
            marks,
            again: again.into(),
            next_available: setup.base,
            next_used: used,
            shown: used,
            signalled: used,
            retry_at: None,
            polling,
            inbox: Vec::new(),
            own,
            rounds_unstarted: 0,
        }
    }

    /// Serves until told to stop. Returns the next available entry, or none if some entries before it are not
    /// answered.
    pub(super) fn run(mut self) -> Option<u16> {
        self.rings.ask_for_silence();
        loop {
            let worked = self.round();
            if self.stopping && self.in_flight == 0 && self.held.is_empty() && !self.has_more_again() {
                return self.end();
            }
            self.rounds_unstarted = self.rounds_unstarted.saturating_add(1);
            if !worked {
                self.idle();
            }
        }
    }

    /// Does all work that can be done now. Returns whether there was any.
    pub(super) fn round(&mut self) -> bool {
        let mut worked = self.read_posts();
        worked |= self.retry_starved();
        worked |= self.release_held();
        worked |= self.take_available();
        self.show_used();
        self.interrupt();
        worked
    }

    fn read_posts(&mut self) -> bool {
        if self.rounds_unstarted >= MOST_ROUNDS_UNSTARTED
            || self.own.as_ref().is_some_and(|own| own.is_ready())
        {
            self.start_waiting();
        }
        if !self.posts.is_filled() {
            return false;
        }
        let mut inbox = std::mem::take(&mut self.inbox);
        self.posts.take(&mut inbox);
        for post in inbox.drain(..) {
            match post {
                Post::Answer(job, outcome) => self.answer(job, outcome),
                Post::Memory(memory, done) => {
                    self.use_memory(&memory);
                    // Fails if the control thread has given up waiting.
                    let _ = done.send(());
                }
                Post::Call(call) => {
                    self.call = call;
                    // Signals to the old descriptor may have been missed; an additional signal does no harm.
                    signal(self.call.as_ref());
                }
                Post::Error(error) => self.error = error,
                Post::Stop => self.stop(),
            }
        }
        self.inbox = inbox;
        true
    }

    /// Starts requests that wait for the disk, and posts finished ones.
    fn start_waiting(&mut self) {
        if let Some(own) = &self.own {
            own.take();
        }
        self.rounds_unstarted = 0;
    }

    fn use_memory(&mut self, memory: &Arc<GuestMemory>) {
        match Rings::new(memory, self.rings.entries(), self.addresses, self.event_idx) {
            Ok(rings) => self.rings = rings,
            Err(fault) => self.break_down(fault),
        }
    }

    fn stop(&mut self) {
        self.stopping = true;
        self.retry_at = None;
        self.give_back();
    }

    /// Called when the device has no more requests. Returns the next available entry; `None` if some entries
    /// before it are not answered.
    fn end(mut self) -> Option<u16> {
        self.give_back();
        let starved = self.take_starved();
        if !self.left.is_empty() {
            // Later requests were answered, so no server can continue with this machine. The guest does not
            // get an error for these requests, because the disk had none.
            self.warn(&CLOSED_AT_STOP);
            return None;
        }
        for job in starved {
            self.warn(&NO_ROOM_AT_STOP);
            self.finish(job.head, job.status, Status::IoError, 1, &job.memory);
        }
        self.show_used();
        self.interrupt();
        if let Some(marks) = &self.marks {
            // The request that broke the queue is not answered, and must not be taken again.
            marks.clear();
        }
        Some(self.next_available)
    }

    /// Whether another request may be taken.
    fn has_room(&self) -> bool {
        (!self.stopping || !self.again.is_empty())
            && !self.broken
            && self.unanswered() < usize::from(self.rings.entries())
            && self.has_room_for_reads()
    }

    /// Whether requests of the previous server are left. They are served even while the queue stops, because
    /// they were taken.
    fn has_more_again(&self) -> bool {
        !self.again.is_empty() && !self.broken
    }

    /// Requests that were taken and not answered.
    fn unanswered(&self) -> usize {
        let kept = self.starved.len().saturating_add(self.left.len()).saturating_add(self.held.len());
        self.in_flight.saturating_add(kept)
    }

    /// Whether another request with data may be given to the device: one always may, however small the limit
    /// is.
    fn has_room_for_data(&self) -> bool {
        self.bytes_in_flight == 0 || self.bytes_in_flight < self.disk.bytes_in_flight_of_a_queue()
    }

    /// Like [`Self::has_room_for_data`], for a read. Writes may wait long for space; reads continue meanwhile,
    /// with another quarter of the limit.
    fn has_room_for_reads(&self) -> bool {
        self.has_room_for_data()
            || self.read_bytes_in_flight == 0
            || self.read_bytes_in_flight < self.disk.bytes_in_flight_of_a_queue() / 4
    }

    /// Gives a new request to the device, or holds it back until others have been answered.
    pub(super) fn submit_in_turn(&mut self, job: Job) {
        // A discard has no data, and may free the space for which the others wait.
        let waits = job.is_write() && (!self.held.is_empty() || !self.has_room_for_data());
        if waits { self.held.push_back(job) } else { self.submit(job) }
    }

    /// Returns waiting requests to the ring, from the newest on, up to the first request that was executed.
    /// The next server takes them again. Waiting for them would delay the stop, and those without space would
    /// fail.
    fn give_back(&mut self) {
        while !self.broken {
            let last = self.next_available.wrapping_sub(1);
            let head = self.rings.available_head(last);
            // Neither list is in the order of the ring: gathered writes come after others of their batch, and
            // the device answers in its own order.
            if let Some(place) = self.held.iter().rposition(|job| job.head == head) {
                self.held.remove(place);
            } else if let Some(place) = self.starved.iter().position(|job| job.head == head) {
                self.starved.swap_remove(place);
                self.disk.waiting_writes.fetch_sub(1, Ordering::Relaxed);
            } else if let Some(place) = self.left.iter().position(|job| job.head == head) {
                self.left.swap_remove(place);
            } else {
                return;
            }
            if let Some(marks) = &self.marks {
                marks.give_back(head);
            }
            self.next_available = last;
        }
    }

    fn release_held(&mut self) -> bool {
        let mut released = false;
        while self.has_room_for_data()
            && let Some(job) = self.held.pop_front()
        {
            self.submit(job);
            released = true;
        }
        released
    }

    fn take_available(&mut self) -> bool {
        if !self.has_room() {
            return false;
        }
        let available = self.rings.available_index();
        let mut ahead = available.wrapping_sub(self.next_available);
        if ahead > self.rings.entries() {
            self.break_down(RingFault::IndexJump(ahead));
            return true;
        }
        if self.stopping {
            ahead = 0;
        }
        let ahead = usize::from(ahead).saturating_add(self.again.len());
        if ahead == 0 {
            return false;
        }
        let memory = Arc::clone(self.rings.memory());
        let mut bytes = 0_u64;
        for _ in 0..ahead.min(BATCH) {
            let head = self.next_head();
            let served = self
                .chain
                .load(&self.rings, head, self.indirect)
                .and_then(|()| serve::request(self, head, &memory));
            match served {
                Ok(moved) => bytes = bytes.saturating_add(moved),
                Err(fault) => self.break_down(fault),
            }
            if self.next_used.wrapping_sub(self.shown) >= SHOWN_TOGETHER {
                self.show_used();
            }
            if bytes >= BATCH_BYTES || !self.has_room() {
                break;
            }
        }
        together::store(self, &memory);
        true
    }

    /// The next request to serve. It is marked from now on.
    #[inline]
    fn next_head(&mut self) -> u16 {
        if let Some(head) = self.again.pop_front() {
            return head;
        }
        let head = self.rings.available_head(self.next_available);
        self.next_available = self.next_available.wrapping_add(1);
        if let Some(marks) = &mut self.marks {
            marks.take(head);
        }
        head
    }

    /// Writes the status and returns the chain; the driver sees it with the next [`Self::show_used`].
    pub(super) fn finish(&mut self, head: u16, at: u64, status: Status, written: u32, memory: &GuestMemory) {
        // The status byte was found in the same memory when the request was taken.
        if let Some(mut segment) = memory.segment(at, 1) {
            segment.copy_from(&[status.byte()]);
        }
        self.rings.set_used(self.next_used, head, written);
        if let Some(marks) = &mut self.marks {
            marks.answer(head);
        }
        self.next_used = self.next_used.wrapping_add(1);
    }

    fn show_used(&mut self) {
        if self.shown != self.next_used {
            self.rings.publish(self.next_used);
            if let Some(marks) = &mut self.marks {
                marks.seen(self.next_used);
            }
            self.shown = self.next_used;
        }
    }

    fn interrupt(&mut self) {
        if self.signalled == self.shown {
            return;
        }
        if self.rings.interrupt_wanted(self.signalled, self.shown) {
            signal(self.call.as_ref());
        }
        self.signalled = self.shown;
    }

    fn break_down(&mut self, fault: RingFault) {
        if self.broken {
            return;
        }
        self.broken = true;
        self.warn(&format_args!(
            "the queue is stopped until the machine resets its disk, because the guest's driver made an error: {fault}"
        ));
        signal(self.error.as_ref());
    }

    pub(super) fn warn(&self, what: &dyn std::fmt::Display) {
        self.disk.faults.warn(&format_args!("{} queue {}", self.disk.name, self.number), what);
    }

    /// Keeps a write that found no space, and tries again later. The protocol has no such error, and the
    /// guest would treat any other error as a broken disk.
    pub(super) fn starve(&mut self, job: Job) {
        if self.starved.is_empty() && !self.stopping {
            self.warn(&"a write finds no space on the device; it waits until there is space");
        }
        self.starved.push(job);
        self.disk.waiting_writes.fetch_add(1, Ordering::Relaxed);
        if self.retry_at.is_none() && !self.stopping {
            self.retry_later();
        }
    }

    /// Keeps a request other than a read that the device did not accept because it is closed: the next server
    /// of the machine takes it from the ring again. The guest would treat any error as a broken disk.
    pub(super) fn leave(&mut self, job: Job) {
        if self.left.is_empty() && !self.stopping {
            self.warn(&"the disk is closed; the machine's writes are not answered");
        }
        self.left.push(job);
    }

    fn retry_later(&mut self) {
        self.retry_at = Instant::now().checked_add(Duration::from_millis(self.disk.limits.no_space_retry_ms));
    }

    fn take_starved(&mut self) -> Vec<Job> {
        self.disk.waiting_writes.fetch_sub(self.starved.len(), Ordering::Relaxed);
        std::mem::take(&mut self.starved)
    }

    fn retry_starved(&mut self) -> bool {
        let Some(at) = self.retry_at else { return false };
        if Instant::now() < at {
            return false;
        }
        self.retry_at = None;
        let mut jobs = self.take_starved().into_iter();
        while self.has_room_for_data()
            && let Some(job) = jobs.next()
        {
            self.submit(job);
        }
        // These requests had no buffers while they waited. Giving all of them a buffer at once would exceed
        // the limit.
        self.disk.waiting_writes.fetch_add(jobs.len(), Ordering::Relaxed);
        self.starved.extend(jobs);
        if !self.starved.is_empty() {
            self.retry_later();
        }
        true
    }

    fn something_new(&self, take: bool) -> bool {
        self.posts.is_filled()
            || self.own.as_ref().is_some_and(|own| own.is_ready())
            || (take && self.rings.available_index() != self.next_available)
    }

    fn idle(&mut self) {
        // Only this thread adds requests for the disk, in the other steps of a round; a completion here only
        // adds to the inbox. So no request is left unstarted while the thread polls or sleeps. While it
        // works, the rounds are counted.
        self.start_waiting();
        if self.posts.is_filled() {
            return;
        }
        let started = Instant::now();
        let take = self.has_room();
        let window = self.polling.window();
        while started.elapsed() < window {
            if self.something_new(take) {
                self.polling.found();
                return;
            }
            std::hint::spin_loop();
        }
        if take && !self.rings.ask_for_kick(self.next_available) {
            self.rings.ask_for_silence();
            return;
        }
        if self.posts.fall_asleep() {
            self.sleep(take);
        }
        self.rings.ask_for_silence();
        self.polling.slept(started.elapsed());
    }

    fn sleep(&mut self, take: bool) {
        let timeout = self.retry_at.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|left| Timespec::try_from(left).ok());
        let posts = Arc::clone(&self.posts);
        let own = self.own.as_ref();
        let mut fds = [
            PollFd::from_borrowed_fd(posts.event(), PollFlags::IN),
            own.map_or(PollFd::from_borrowed_fd(posts.event(), PollFlags::empty()), |own| {
                PollFd::from_borrowed_fd(own.ready(), PollFlags::IN)
            }),
            PollFd::new(&self.kick, PollFlags::IN),
        ];
        // If no request may be taken, kicks are ignored: they would wake the thread for nothing.
        let watched = if take { fds.as_mut_slice() } else { fds.split_at_mut(2).0 };
        let polled = rustix::event::poll(watched, timeout.as_ref());
        let [event, _, kick] = &fds;
        let (event, kick) = (event.revents(), kick.revents());
        posts.wake_up(event.contains(PollFlags::IN));
        match polled {
            Ok(_) | Err(Errno::INTR) => {}
            // Out of memory: continue slowly.
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
        if !take {
            return;
        }
        let read = || rustix::io::read(&self.kick, &mut [0_u8; 8]);
        let gone = kick.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL);
        if gone
            || (kick.contains(PollFlags::IN) && !matches!(read(), Ok(8) | Err(Errno::AGAIN | Errno::INTR)))
        {
            self.break_down(RingFault::Kick);
        }
    }
}

fn signal(event: Option<&Signal>) {
    if let Some(event) = event {
        event.send();
    }
}
