//! The trait that each disk of the data path implements.

use std::sync::Arc;

use crate::completion::Completion;
use crate::completion_queue::CompletionQueue;
use crate::error::{IoError, IoErrorKind};
use crate::pages::SharedSlice;
use crate::range::{ByteRange, MAX_REQUEST_BYTES};

/// Size and granularity of a device. Fixed while the device is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size in bytes; a multiple of `logical_block_bytes`.
    pub size_bytes: u64,
    /// Requests start and end on multiples of this: 512 or 4096.
    pub logical_block_bytes: u32,
    /// Requests aligned to this avoid read-modify-write.
    pub physical_block_bytes: u32,
    /// Whether writes, discards and zero writes are refused.
    pub read_only: bool,
    /// Whether a write may be lost by a power cut until it is flushed. A device that says `false` makes
    /// flushing a no-op.
    pub volatile_cache: bool,
}

impl Geometry {
    /// Checks the range of a request: alignment, length and end. Front-ends call this before a device.
    pub fn check(&self, range: ByteRange) -> Result<(), IoError> {
        let mask = u64::from(self.logical_block_bytes).wrapping_sub(1);
        if (range.offset() | range.len()) & mask != 0 {
            return Err(IoError::new(
                IoErrorKind::Invalid,
                format!("request {range} is not aligned to {} bytes", self.logical_block_bytes),
            ));
        }
        if range.end() > self.size_bytes {
            return Err(IoError::new(
                IoErrorKind::Invalid,
                format!("request {range} ends past the device, which has {} bytes", self.size_bytes),
            ));
        }
        Ok(())
    }

    /// As [`Geometry::check`], and the length limit of requests that carry data.
    pub fn check_data(&self, range: ByteRange) -> Result<(), IoError> {
        if range.len() > u64::from(MAX_REQUEST_BYTES) {
            return Err(IoError::new(
                IoErrorKind::Invalid,
                format!("request {range} is longer than {MAX_REQUEST_BYTES} bytes"),
            ));
        }
        self.check(range)
    }
}

/// A request with a borrowed buffer, for [`Device::try_now`].
#[derive(Debug)]
pub enum Op<'a> {
    /// Fill `into` (exactly the range's length).
    Read {
        /// What to read.
        range: ByteRange,
        /// Where to.
        into: &'a mut [u8],
    },
    /// Store `from` (exactly the range's length).
    Write {
        /// Where to.
        range: ByteRange,
        /// What to write.
        from: &'a [u8],
        /// Answer only when the data is durable (FUA).
        fua: bool,
    },
    /// Make the range read as zeroes. `may_unmap` allows freeing the space behind it.
    WriteZeroes {
        /// What to clear.
        range: ByteRange,
        /// Whether the space may be freed.
        may_unmap: bool,
        /// Answer only when durable (FUA).
        fua: bool,
    },
    /// The contents are no longer needed. Reads normally give zeroes afterwards. A discard never fails for lack of
    /// space: if there is no space to store the rest of a partly discarded 4 KiB block, or to record that a block is
    /// zero, these blocks keep their contents. A caller that needs zeroes uses [`Op::WriteZeroes`].
    Discard {
        /// What to discard.
        range: ByteRange,
    },
    /// Make durable the changes of all requests that were answered before this one was submitted.
    Flush,
}

/// A request that owns its buffer, for [`Device::submit`].
#[derive(Debug)]
pub enum Request {
    /// As [`Op::Read`]; `buffer.len()` is the range's length.
    Read {
        /// What to read.
        range: ByteRange,
        /// Filled and handed back through the [`Completion`].
        buffer: Vec<u8>,
    },
    /// As [`Op::Write`]; `buffer.len()` is the range's length.
    Write {
        /// Where to.
        range: ByteRange,
        /// What to write; handed back through the [`Completion`].
        buffer: Vec<u8>,
        /// Answer only when the data is durable (FUA).
        fua: bool,
    },
    /// As [`Op::WriteZeroes`].
    WriteZeroes {
        /// What to clear.
        range: ByteRange,
        /// Whether the space may be freed.
        may_unmap: bool,
        /// Answer only when durable (FUA).
        fua: bool,
    },
    /// As [`Op::Discard`].
    Discard {
        /// What to discard.
        range: ByteRange,
    },
    /// As [`Op::Flush`].
    Flush,
    /// Fetch the range in advance (NBD_CMD_CACHE). A hint: answered when done or abandoned.
    Prefetch {
        /// What will be read soon.
        range: ByteRange,
    },
}

impl Request {
    /// Takes the buffer out, to hand it back in an error path.
    pub fn into_buffer(self) -> Vec<u8> {
        match self {
            Request::Read { buffer, .. } | Request::Write { buffer, .. } => buffer,
            _ => Vec::new(),
        }
    }
}

/// What [`Device::try_now`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// The request is finished.
    Done,
    /// It needs I/O or has to wait: give the same request, whole, to [`Device::submit`]. Part of it may
    /// have been carried out already; doing it again is harmless.
    MustWait,
}

/// The state of a range of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Written bytes.
    Data,
    /// Reads as zeroes and takes no space (NBD: HOLE and ZERO).
    Hole,
    /// Reads as zeroes but takes space (NBD: ZERO).
    Zero,
}

/// A run of bytes of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes; never 0.
    pub len: u64,
    /// State of the range.
    pub kind: ExtentKind,
}

/// A disk. Front-ends serve it. Volumes implement it, on top of a base device.
///
/// # Contract
/// - The caller has checked the range with [`Geometry::check_data`] (or `check` for requests without
///   data) and gives buffers of exactly the range's length. An implementer may rely on both, but must
///   not be unsound if they are wrong.
/// - Requests in flight at the same time may be carried out in any order. Overlapping ones have no
///   defined order, but each 4 KiB block is afterwards as if one had been carried out after the other.
/// - A write is visible to every read that starts after it was answered.
/// - `Flush` covers writes answered before it was submitted, not those in flight.
/// - After an error the device works on; only the contents of the failed request's blocks are uncertain.
/// - A request is not cancelled: it completes even if the client that submitted it is gone.
pub trait Device: Send + Sync + 'static {
    /// Size and granularity.
    fn geometry(&self) -> Geometry;

    /// Completes the request if that needs no I/O and no waiting. Never blocks for longer than a copy of the
    /// data takes. For a request that changes data, a closed device returns [`Attempt::MustWait`], and
    /// [`Device::submit`] then answers [`IoErrorKind::Closed`].
    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError>;

    /// Stores those of `writes` that [`Device::try_now`] could complete, if storing them together is cheaper
    /// than one by one, and sets `done` for each stored write. The caller continues with the others one by
    /// one. All of them are in flight together, so their order is undefined.
    fn write_together(&self, writes: &[(ByteRange, &[u8])], done: &mut [bool]) {
        let _ = writes;
        done.fill(false);
    }

    /// Copies the range into `into` if that needs no I/O and no waiting. Unlike a read by the machine, it is
    /// not recorded, triggers no readahead and does not count as use. Returns whether it copied. A device that records
    /// reads, reads ahead or counts use must override this default, because the default calls [`Device::try_now`].
    fn peek(&self, range: ByteRange, into: &mut [u8]) -> bool {
        matches!(self.try_now(Op::Read { range, into }), Ok(Attempt::Done))
    }

    /// The same disk for readers other than the machine, such as a backup: their reads are not recorded as
    /// reads of a boot. `None` if nothing is recorded.
    fn unrecorded(self: Arc<Self>) -> Option<Arc<dyn Device>> {
        None
    }

    /// Appends what a read of `range` would return to `parts`, in order and without a copy. Returns `false`,
    /// and appends nothing, if that is impossible: then use a read. Never blocks. A device without immutable
    /// data in memory keeps this default.
    fn read_shared(&self, range: ByteRange, parts: &mut Vec<SharedSlice>) -> bool {
        let _ = (range, parts);
        false
    }

    /// Starts the request and returns; `done` is called when it is finished, possibly before this returns.
    /// Blocks the caller only if a documented queue limit is reached.
    fn submit(&self, request: Request, done: Completion);

    /// A queue for the calling thread: while it exists, requests that this thread submits may be completed by
    /// [`CompletionQueue::take`]. `None` if the device has none, or the thread has one already.
    fn completion_queue(&self) -> Option<Box<dyn CompletionQueue>> {
        None
    }

    /// The states of `range`, in order and without gaps, as at most `max_extents` extents. The answer may
    /// cover less than the range, but always at least its first block. May block for metadata I/O.
    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_checked_for_alignment_end_and_length() {
        let geometry = Geometry {
            size_bytes: 1 << 30,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            read_only: false,
            volatile_cache: false,
        };
        let range = |offset, len| ByteRange::new(offset, len).unwrap();
        assert!(geometry.check(range(512, 1024)).is_ok());
        assert!(geometry.check(range(1, 512)).is_err());
        assert!(geometry.check(range((1 << 30) - 512, 1024)).is_err());
        assert!(geometry.check_data(range(0, 32 << 20)).is_ok());
        assert!(geometry.check_data(range(0, (32 << 20) + 512)).is_err());
        assert!(geometry.check(range(0, (32 << 20) + 512)).is_ok());
    }
}
