//! What a listener serves: the device with what the guest sees of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use headwater_block::{Device, Geometry};

use crate::fault::FaultLog;
use crate::limits::Limits;
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
    pub(crate) faults: FaultLog,
    /// Whether the guest wants writes answered before they are durable.
    write_back: AtomicBool,
    /// Whether rings may start in the middle: the guest that uses them has seen this disk before.
    may_resume: AtomicBool,
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
            faults: FaultLog::new(limits.warnings_per_10_s),
            limits,
            write_back: AtomicBool::new(true),
            may_resume: AtomicBool::new(options.resume),
        }
    }

    /// Whether a queue may start at this entry. A guest starts its rings at 0; one that is in the middle has
    /// used another server, and what it believes to be on the disk may not be on this one.
    pub(crate) fn may_start_at(&self, base: u16) -> bool {
        if base == 0 {
            self.may_resume.store(true, Ordering::Relaxed);
        }
        self.may_resume.load(Ordering::Relaxed)
    }

    /// Whether writes are answered only when durable.
    pub(crate) fn write_through(&self) -> bool {
        self.geometry.volatile_cache && !self.write_back.load(Ordering::Relaxed)
    }

    /// Whether the guest has write-back caching on.
    pub(crate) fn write_back(&self) -> bool {
        self.geometry.volatile_cache && self.write_back.load(Ordering::Relaxed)
    }

    /// Follows the guest's choice, for requests taken from now on.
    pub(crate) fn set_write_back(&self, on: bool) {
        self.write_back.store(on, Ordering::Relaxed);
    }
}
