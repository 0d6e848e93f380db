//! The disk that a listener serves: the device, and its properties for the guest.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use headwater_block::{Device, FaultLog, Geometry};
use parking_lot::Mutex;

use crate::limits::Limits;
use crate::memory::Addresses;
use crate::positions::{Positions, ResumePositionFault};
use crate::queue::request::ID_BYTES;
use crate::server::Options;

/// The positions of a queue at its start.
#[derive(Clone, Copy)]
pub(crate) struct RingState {
    /// According to the front-end.
    pub(crate) base: u16,
    /// According to the ring.
    pub(crate) used: u16,
    /// How many requests the region of requests in flight marks, if the queue has one.
    pub(crate) marked: Option<u16>,
}

/// A device on its way to one machine; shared by all its queues.
pub(crate) struct Disk {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) geometry: Geometry,
    /// For logs.
    pub(crate) name: String,
    pub(crate) serial: [u8; ID_BYTES],
    pub(crate) limits: Limits,
    /// The addresses of the machine's memory.
    pub(crate) addresses: Arc<Addresses>,
    /// Whether memory that its owner can truncate is refused.
    pub(crate) sealed_memory: bool,
    /// Whether the warning about such memory was logged.
    pub(crate) warned_of_memory: AtomicBool,
    pub(crate) faults: FaultLog,
    /// Writes of all queues that found no space and are to be tried again.
    pub(crate) waiting_writes: AtomicUsize,
    /// Queues that have a thread now.
    running_queues: AtomicUsize,
    /// The present driver can flush.
    flushes: AtomicBool,
    /// The guest wants writes to be answered only when they are durable.
    chose_write_through: AtomicBool,
    /// The device has all writes that a killed server answered.
    recovered: bool,
    /// The positions at which queues ended, here or in the previous server.
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
            warned_of_memory: AtomicBool::new(false),
            flushes: AtomicBool::new(true),
            chose_write_through: AtomicBool::new(
                options.resume.as_ref().is_some_and(Positions::write_through),
            ),
            recovered: options.recovered,
            positions: Mutex::new(options.resume.unwrap_or_default()),
        }
    }

    /// The bytes that each queue may have in flight: a fixed share, and not what the other queues leave.
    /// Otherwise queues would have to be woken when others free bytes, and a queue that waits for disk space
    /// would delay the reads of all.
    pub(crate) fn bytes_in_flight_of_a_queue(&self) -> usize {
        self.limits.bytes_in_flight / self.running_queues.load(Ordering::Relaxed).max(1)
    }

    /// The position at which a queue starts: 0 if the guest has reset its disk, or else the position at which
    /// the queue ended. A guest at any other position has used another server since, so its cached contents
    /// of the disk may be wrong.
    ///
    /// When a queue ends, everything that it took is answered or back in the ring, so the front-end's position
    /// and that of the ring agree. But a front-end that lost its connection reads the ring, perhaps before the
    /// last answers.
    ///
    /// Indices have 16 bits, so a running guest has position 0 now and then. Then its used ring is full of
    /// answers (`went_round`). The ring of a reset guest is not, because drivers begin with a ring of zeroes.
    /// If the queue ended in order at another position, only a reset leads to position 0. Then the ring is not
    /// checked, in case a driver leaves old answers in it.
    ///
    /// After the crash of a server there is no position. If the device has everything that was answered, a
    /// queue with marks starts after the requests that were taken: each of them is answered or marked.
    pub(crate) fn start_of(
        &self,
        queue: usize,
        ring: RingState,
        went_round: impl FnOnce() -> bool,
    ) -> Result<u16, ResumePositionFault> {
        let RingState { base, used, marked } = ring;
        let after_taken = used.wrapping_add(marked.unwrap_or(0));
        let ended_at = self.positions.lock().get(queue);
        let is_reset = base == 0 && used == 0;
        match ended_at {
            // The queue ended in order: nothing is marked, unless the region belongs to another disk.
            Some(_) if marked.is_some_and(|taken| taken > 0) => {}
            Some(position) if position == base || position == used => return Ok(position),
            Some(_) if is_reset => return Ok(0),
            None if is_reset && !went_round() => return Ok(after_taken),
            None if self.recovered && marked.is_some() && (base == used || base == after_taken) => {
                return Ok(after_taken);
            }
            _ => {}
        }
        Err(ResumePositionFault { base, ended_at })
    }

    /// Stores the position at which a queue ended, with all requests that it took answered or back in the
    /// ring. `None`: some are not, or the wait was given up.
    pub(crate) fn ended(&self, queue: usize, position: Option<u16>) {
        self.positions.lock().set(queue, position);
    }

    /// Whether any queue has a thread, and so no final position yet.
    pub(crate) fn has_running_queues(&self) -> bool {
        self.running_queues.load(Ordering::Acquire) != 0
    }

    /// The final positions of all queues.
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

    /// Whether the guest has write-back caching on; without the choice, whether the device has it.
    pub(crate) fn write_back(&self) -> bool {
        self.geometry.volatile_cache && !self.chose_write_through.load(Ordering::Relaxed)
    }

    /// Follows the guest's choice, for requests taken from now on. The choice survives resets and
    /// reconnections: QEMU reports it once when it is made, and from then on answers the guest's reads
    /// itself.
    pub(crate) fn choose_write_back(&self, on: bool) {
        self.chose_write_through.store(!on, Ordering::Relaxed);
    }

    /// A driver that cannot flush gets a disk that needs no flush (virtio 5.2.6.2).
    pub(crate) fn set_flushes(&self, on: bool) {
        self.flushes.store(on, Ordering::Relaxed);
    }
}

/// A queue that has a thread, while it lives.
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
