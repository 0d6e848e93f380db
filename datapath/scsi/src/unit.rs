//! A logical unit: a device, who it is, and what all nexuses share.

use std::sync::Arc;

use headwater_block::{Device, Geometry};

use crate::identity::Identity;

/// How a logical unit is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Refuse writes, also where the device takes them.
    pub read_only: bool,
    /// Start with the write cache enabled (WCE), if the device has one; otherwise each write is made durable before
    /// it is answered. The initiator may change it.
    pub write_cache_enabled: bool,
    /// Tell each new nexus that the logical unit was reset (unit attention 29h/00h), as disks do after power on.
    pub power_on_attention: bool,
    /// Longest transfer of one command, in bytes; at most [`headwater_block::MAX_REQUEST_BYTES`].
    pub transfer_bytes: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            read_only: false,
            write_cache_enabled: true,
            power_on_attention: true,
            transfer_bytes: 16 << 20,
        }
    }
}

/// A disk as initiators see it. It may belong to several targets.
pub struct LogicalUnit {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) geometry: Geometry,
    pub(crate) identity: Identity,
    pub(crate) options: Options,
}

impl LogicalUnit {
    /// Serves `device`.
    pub fn new(device: Arc<dyn Device>, identity: Identity, options: Options) -> Arc<Self> {
        let geometry = device.geometry();
        Arc::new(Self { device, geometry, identity, options })
    }

    /// Size and granularity of the device.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }
}

impl std::fmt::Debug for LogicalUnit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogicalUnit")
            .field("identity", &self.identity)
            .field("geometry", &self.geometry)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
