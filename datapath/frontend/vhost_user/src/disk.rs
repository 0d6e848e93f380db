//! What a listener serves: the device with what the guest sees of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use headwater_block::{Device, Geometry};

use crate::fault::FaultLog;
use crate::limits::Limits;
use crate::queue::request::ID_BYTES;

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
}

impl Disk {
    pub(crate) fn new(device: Arc<dyn Device>, name: String, serial: &str, limits: Limits) -> Self {
        let mut bytes = [0_u8; ID_BYTES];
        for (byte, from) in bytes.iter_mut().zip(serial.bytes()) {
            *byte = from;
        }
        Self {
            geometry: device.geometry(),
            device,
            name,
            serial: bytes,
            faults: FaultLog::new(limits.warnings_per_10_s),
            limits,
            write_back: AtomicBool::new(true),
        }
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
