//! Disks that lie in local files: a blocking trait for their formats, and the one device over it.

use std::sync::Arc;

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, Op, Request,
};

use crate::fetch_pool::{FetchPool, PREFETCH_MAX_BYTES, Place, Urgency, read_only};
use crate::reader::read_only_geometry;

/// A read-only disk whose calls block. Ranges lie inside the disk.
pub(crate) trait FileDisk: Send + Sync + 'static {
    /// Size in bytes.
    fn size_bytes(&self) -> u64;

    /// Fills `into` from `offset`.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), IoError>;

    /// As [`Device::extents`].
    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError>;

    /// Says that the range will be read soon.
    fn will_read(&self, range: ByteRange);
}

/// A [`FileDisk`] as a device: every read goes to the fetch pool, because nobody can tell without a system
/// call whether it would block.
pub(crate) struct PooledDisk {
    disk: Arc<dyn FileDisk>,
    pool: Arc<FetchPool>,
}

impl PooledDisk {
    pub(crate) fn open(disk: Arc<dyn FileDisk>) -> Result<Arc<dyn Device>, IoError> {
        Ok(Arc::new(Self { disk, pool: FetchPool::shared(Place::Here)? }))
    }
}

impl Device for PooledDisk {
    fn geometry(&self) -> Geometry {
        read_only_geometry(self.disk.size_bytes())
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        match op {
            Op::Read { .. } => Ok(Attempt::MustWait),
            Op::Flush => Ok(Attempt::Done),
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Discard { .. } => Err(read_only()),
        }
    }

    fn submit(&self, request: Request, done: Completion) {
        match request {
            Request::Read { range, mut buffer } => {
                let disk = Arc::clone(&self.disk);
                self.pool.push(Urgency::Waited, move || {
                    let result = disk.read(range.offset(), &mut buffer);
                    done.complete(result, buffer);
                });
            }
            Request::Prefetch { range } => {
                if !self.pool.has_room_ahead() {
                    return done.complete(Ok(()), Vec::new());
                }
                let disk = Arc::clone(&self.disk);
                let range = range.clipped_to(range.offset().saturating_add(PREFETCH_MAX_BYTES));
                self.pool.push(Urgency::Ahead, move || {
                    disk.will_read(range);
                    done.complete(Ok(()), Vec::new());
                });
            }
            Request::Flush => done.complete(Ok(()), Vec::new()),
            other => done.complete(Err(read_only()), other.into_buffer()),
        }
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        self.disk.extents(range, max_extents)
    }
}

/// Adds an extent to a list, joining it with the last one if that is of the same kind.
pub(crate) fn push_extent(extents: &mut Vec<Extent>, len: u64, kind: ExtentKind) {
    match extents.last_mut() {
        Some(last) if last.kind == kind => last.len = last.len.saturating_add(len),
        _ => extents.push(Extent { len, kind }),
    }
}
