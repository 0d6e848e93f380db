//! What a listener serves: the device with what the guest sees of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use headwater_block::{Device, FaultLog, Geometry};
use parking_lot::Mutex;

use crate::limits::Limits;
use crate::memory::Addresses;
use crate::positions::{Positions, ResumePositionFault};
use crate::queue::request::ID_BYTES;
use crate::server::Options;

/// A device on its way to one machine; shared by all its queues.
pub(crate) struct Disk {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) geometry: Geometry,
    /// For logs.
    pub(crate) name: String,
    pub(crate) serial: [u8; ID_BYTES],
    pub(crate) limits: Limits,
    /// Of the machine's memory.
    pub(crate) addresses: Arc<Addresses>,
    /// Whether memory is refused that can be taken away.
    pub(crate) sealed_memory: bool,
    /// Whether the log says that such memory is in use.
    pub(crate) told_of_memory: AtomicBool,
    pub(crate) faults: FaultLog,
    /// Writes of all queues that found no room and are to be tried again.
    pub(crate) waiting_writes: AtomicUsize,
    /// Queues that have a thread now.
    running_queues: AtomicUsize,
    /// The driver of this moment knows how to flush.
    flushes: AtomicBool,
    /// The guest wants writes answered when they are durable.
    chose_write_through: AtomicBool,
    /// Where queues stood when they ended, here or in the server before this one.
    positions: Mutex<Positions>,
}

impl Disk {
    pub(crate) fn new(device: Arc<dyn Device>, options: Options) -> Self {
        let limits = options.limits.sane();
        let mut bytes = [0_u8; ID_BYTES];
        for (byte, from) in bytes.iter_mut().zip(options.serial.bytes()) {
            *byte = from;
        }
        Self {
            geometry: device.geometry(),
            device,
            name: options.name,
            serial: bytes,
            faults: FaultLog::new("vhost-user", limits.warnings_per_10_s),
            waiting_writes: AtomicUsize::new(0),
            running_queues: AtomicUsize::new(0),
            addresses: Addresses::new(limits.mapped_bytes),
            limits,
            sealed_memory: options.sealed_memory,
            told_of_memory: AtomicBool::new(false),
            flushes: AtomicBool::new(true),
            chose_write_through: AtomicBool::new(
                options.resume.as_ref().is_some_and(Positions::write_through),
            ),
            positions: Mutex::new(options.resume.unwrap_or_default()),
        }
    }

    /// Data that each queue may have in flight. A fixed part rather than what the others leave: a queue would have to be
    /// woken when they give something back, and one that waits for room would hold up the reads of all.
    pub(crate) fn bytes_in_flight_of_a_queue(&self) -> usize {
        self.limits.bytes_in_flight / self.running_queues.load(Ordering::Relaxed).max(1)
    }

    /// Where a queue starts: at 0 if the guest has reset its disk, else where it ended. A guest that stands anywhere
    /// else has used another server, and what it believes to be on the disk may not be on this one.
    ///
    /// `base` is what the front-end says, `used` what the ring says. All that was taken is answered before a queue ends, or back in the ring,
    /// so that both say the same; but a front-end that lost its connection asks the ring, perhaps before the last answers.
    ///
    /// Indices have 16 bits, so that a running guest stands at 0 now and then. Its used ring is full of answers then
    /// (`went_round`), and that of a reset one is not: drivers begin with a ring of zeroes. Where the queue has ended in order
    /// at another entry only a reset leads to 0, so the ring is not asked, in case a driver leaves old answers in it.
    pub(crate) fn start_of(
        &self,
        queue: usize,
        base: u16,
        used: u16,
        went_round: impl FnOnce() -> bool,
    ) -> Result<u16, ResumePositionFault> {
        let ended_at = self.positions.lock().get(queue);
        match ended_at {
            Some(position) if position == base || position == used => Ok(position),
            Some(_) if base == 0 && used == 0 => Ok(0),
            None if base == 0 && used == 0 && !went_round() => Ok(0),
            _ => Err(ResumePositionFault { base, ended_at }),
        }
    }

    /// A queue has ended here, all that it took being answered or in the ring again; `None` if not, or it was given up.
    pub(crate) fn ended(&self, queue: usize, position: Option<u16>) {
        self.positions.lock().set(queue, position);
    }

    /// Whether any queue has a thread, and so has not said where it ended.
    pub(crate) fn has_running_queues(&self) -> bool {
        self.running_queues.load(Ordering::Acquire) != 0
    }

    /// Where all queues stood at their ends.
    pub(crate) fn positions(&self) -> Positions {
        let mut positions = self.positions.lock().clone();
        positions.set_write_through(self.chose_write_through.load(Ordering::Relaxed));
        positions
    }

    /// Whether writes are answered only when durable.
    pub(crate) fn write_through(&self) -> bool {
        self.geometry.volatile_cache
            && (!self.flushes.load(Ordering::Relaxed) || self.chose_write_through.load(Ordering::Relaxed))
    }

    /// Whether the guest has write-back caching on, as far as it is its choice.
    pub(crate) fn write_back(&self) -> bool {
        self.geometry.volatile_cache && !self.chose_write_through.load(Ordering::Relaxed)
    }

    /// Follows the guest's choice, for requests taken from now on. It stays over resets and reconnections: QEMU tells it
    /// when it is made, and has the guest read it from then on without asking or telling again.
    pub(crate) fn choose_write_back(&self, on: bool) {
        self.chose_write_through.store(!on, Ordering::Relaxed);
    }

    /// A driver that cannot flush gets a disk that needs no flush (virtio 5.2.6.2).
    pub(crate) fn set_flushes(&self, on: bool) {
        self.flushes.store(on, Ordering::Relaxed);
    }
}

/// A queue that has a thread, for as long as it lives.
pub(crate) struct RunningQueue(Arc<Disk>);

impl RunningQueue {
    pub(crate) fn new(disk: &Arc<Disk>) -> Self {
        disk.running_queues.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(disk))
    }
}

impl Drop for RunningQueue {
    fn drop(&mut self) {
        self.0.running_queues.fetch_sub(1, Ordering::Release);
    }
}
