//! A logical unit: a device, its identity, and the state that all nexuses share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use headwater_block::{ByteRange, Device, Geometry, IoError, MAX_REQUEST_BYTES};
use parking_lot::Mutex;

use crate::cdb::Span;
use crate::identity::Identity;
use crate::link::{Link, NexusId};
use crate::mode::{Mode, Values};
use crate::queue::TaskSet;
use crate::reservation::Reservations;
use crate::sense::{Code, Fault, Status};
use crate::task::Reply;
use crate::worker::Worker;

/// How a logical unit is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Refuse writes, even if the device accepts them.
    pub read_only: bool,
    /// Start with the write cache enabled (WCE), if the device has one; otherwise each write is made durable before
    /// it is answered. The initiator may change it.
    pub write_cache_enabled: bool,
    /// Report to each new nexus that the logical unit was reset (unit attention 29h/00h), as disks do after
    /// power on.
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
            transfer_bytes: MAX_REQUEST_BYTES,
        }
    }
}

/// [`Options`] in blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) transfer_blocks: u32,
    pub(crate) compare_and_write_blocks: u8,
}

/// A disk as initiators see it. It may belong to several targets.
pub struct LogicalUnit {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) geometry: Geometry,
    /// Size in logical blocks.
    pub(crate) blocks: u64,
    pub(crate) identity: Identity,
    pub(crate) options: Options,
    pub(crate) limits: Limits,
    pub(crate) mode: Mode,
    pub(crate) reservations: Reservations,
    pub(crate) tasks: TaskSet,
    pub(crate) worker: Worker,
    links: Mutex<Vec<Weak<Link>>>,
    faults: AtomicU64,
}

impl LogicalUnit {
    /// Serves `device`.
    pub fn new(device: Arc<dyn Device>, identity: Identity, options: Options) -> Arc<Self> {
        let geometry = device.geometry();
        let block_bytes = geometry.logical_block_bytes.max(1);
        let transfer = options.transfer_bytes.min(MAX_REQUEST_BYTES).max(block_bytes);
        let limits = Limits {
            transfer_blocks: transfer / block_bytes,
            // The command sends twice the length, and both halves are in memory.
            compare_and_write_blocks: u8::try_from((transfer / 2 / block_bytes).clamp(1, 255)).unwrap_or(1),
        };
        let values = default_values(&geometry, &options);
        Arc::new(Self {
            blocks: geometry.size_bytes / u64::from(block_bytes),
            device,
            geometry,
            identity,
            options,
            limits,
            mode: Mode::new(values),
            reservations: Reservations::default(),
            tasks: TaskSet::default(),
            worker: Worker::default(),
            links: Mutex::default(),
            faults: AtomicU64::new(0),
        })
    }

    /// Size and granularity of the device.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    pub(crate) fn default_mode(&self) -> Values {
        default_values(&self.geometry, &self.options)
    }

    /// Whether writes are refused for any reason.
    pub(crate) fn is_write_protected(&self) -> bool {
        self.geometry.read_only || self.options.read_only || self.mode.write_protect()
    }

    /// Refuses changes if the unit is write protected.
    pub(crate) fn check_writable(&self) -> Result<(), Fault> {
        use crate::sense::SenseKey::DataProtect;
        if self.geometry.read_only || self.options.read_only {
            return Err(Fault::new(DataProtect, Code::WRITE_PROTECTED));
        }
        if self.mode.write_protect() {
            return Err(Fault::new(DataProtect, Code::SOFTWARE_WRITE_PROTECTED));
        }
        Ok(())
    }

    /// The bytes of a run of blocks, which must lie within the unit.
    pub(crate) fn range(&self, span: Span) -> Result<ByteRange, Fault> {
        let out_of_range = Fault::illegal(Code::LBA_OUT_OF_RANGE);
        let end = span.lba.checked_add(span.blocks).filter(|end| *end <= self.blocks);
        if end.is_none() {
            return Err(out_of_range);
        }
        let bytes = u64::from(self.geometry.logical_block_bytes);
        let (Some(offset), Some(len)) = (span.lba.checked_mul(bytes), span.blocks.checked_mul(bytes)) else {
            return Err(out_of_range);
        };
        ByteRange::new(offset, len).ok_or(out_of_range)
    }

    /// Like [`LogicalUnit::range`], for commands to which [`Options::transfer_bytes`] applies.
    pub(crate) fn transfer_range(&self, span: Span) -> Result<ByteRange, Fault> {
        let range = self.range(span)?;
        if span.blocks > u64::from(self.limits.transfer_blocks) {
            return Err(Fault::illegal(Code::INVALID_FIELD_IN_CDB));
        }
        Ok(range)
    }

    /// The longest transfer.
    pub(crate) fn transfer_bytes(&self) -> u64 {
        u64::from(self.limits.transfer_blocks).saturating_mul(u64::from(self.geometry.logical_block_bytes))
    }

    /// If the length is 0, the run of blocks up to the end (SYNCHRONIZE CACHE, WRITE SAME, PRE-FETCH).
    pub(crate) fn or_to_the_end(&self, span: Span) -> Span {
        if span.blocks == 0 && span.lba <= self.blocks {
            return Span { lba: span.lba, blocks: self.blocks.saturating_sub(span.lba) };
        }
        span
    }

    pub(crate) fn check_condition(&self, fault: &Fault) -> Reply {
        Reply { status: Status::CheckCondition, sense: Some(fault.sense(self.mode.descriptor_sense())) }
    }

    /// Whether a change has to be durable before its answer: with FUA, or with the write cache disabled.
    #[inline]
    pub(crate) fn must_be_durable(&self, fua: bool) -> bool {
        self.geometry.volatile_cache && (fua || !self.mode.write_cache())
    }

    /// Logs an error of the device: the 1st, 2nd, 4th, 8th.. of this unit, so that a broken disk does not
    /// flood the log.
    pub(crate) fn log_fault(&self, what: &str, error: &IoError) {
        let count = self.faults.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        if !count.is_power_of_two() {
            return;
        }
        let mut causes = String::new();
        let mut next = std::error::Error::source(error);
        while let Some(cause) = next {
            causes.push_str(": ");
            causes.push_str(&cause.to_string());
            next = cause.source();
        }
        let serial = self.identity.serial.escape_debug();
        tracing::warn!("SCSI: {what} on the disk {serial} failed (failure {count}): {error}{causes}");
    }

    pub(crate) fn attach(&self, link: &Arc<Link>) {
        let mut links = self.links.lock();
        links.retain(|link| link.strong_count() > 0);
        links.push(Arc::downgrade(link));
    }

    /// The links of all nexuses.
    pub(crate) fn links(&self) -> Vec<Arc<Link>> {
        self.links.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Establishes a unit attention for all nexuses but one.
    pub(crate) fn notify_others(&self, except: Option<NexusId>, code: Code) {
        for link in self.links().iter().filter(|link| Some(link.nexus) != except) {
            link.attention.establish(code);
        }
    }

    /// Applies the effects of a reset, except for aborting tasks: modes return to their defaults, and the
    /// reservation by RESERVE ends. Persistent reservations stay.
    pub(crate) fn reset(&self) {
        self.mode.set(self.default_mode());
        self.reservations.clear_simple();
        self.notify_others(None, Code::RESET_FUNCTION_OCCURRED);
    }
}

fn default_values(geometry: &Geometry, options: &Options) -> Values {
    Values {
        write_cache: geometry.volatile_cache && options.write_cache_enabled,
        write_protect: false,
        descriptor_sense: false,
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
