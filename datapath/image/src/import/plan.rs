//! The planner of an import: decides which parts of the source are read, in order. These are the parts that
//! are not known to be zero or, with a basis (a known version to which the source has known differences),
//! those that differ from it.

use std::collections::VecDeque;
use std::sync::Arc;

use headwater_block::{ByteRange, Device, ExtentKind};

use crate::error::{ImageError, ImageErrorKind};
use crate::import::Changes;

/// The length of a request for extents.
const ASK_BYTES: u64 = 1 << 30;
/// The most extents of a request.
const ASK_EXTENTS: usize = 256;

/// A range to read: whole chunks from `offset`. `sequence` is the order in which they are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) sequence: u64,
    pub(super) offset: u64,
    pub(super) len: u64,
}

pub(super) struct Planner {
    source: Arc<dyn Device>,
    changes: Option<Changes>,
    size_bytes: u64,
    chunk_bytes: u64,
    batch_bytes: u64,
    sequence: u64,
    /// Where the next batch may start: the start of a chunk.
    at: u64,
    /// What is known about the source from `at` on: the end of each extent, and whether it must be read.
    known: VecDeque<(u64, bool)>,
}

impl Planner {
    pub(super) fn new(
        source: Arc<dyn Device>,
        changes: Option<Changes>,
        chunk_bytes: u32,
        batch_bytes: u64,
    ) -> Self {
        let size_bytes = source.geometry().size_bytes;
        let chunk_bytes = u64::from(chunk_bytes);
        let known = VecDeque::new();
        Self { source, changes, size_bytes, chunk_bytes, batch_bytes, sequence: 0, at: 0, known }
    }

    /// The next range, or `None` at the end. Holes, or parts without differences, are skipped in whole
    /// chunks.
    pub(super) fn next(&mut self) -> Result<Option<Batch>, ImageError> {
        while self.at < self.size_bytes {
            let (end, data) = self.extent()?;
            if data {
                let whole = end.next_multiple_of(self.chunk_bytes).min(self.size_bytes);
                let batch_end = whole.min(self.at.saturating_add(self.batch_bytes));
                let batch = Batch {
                    sequence: self.sequence,
                    offset: self.at,
                    len: batch_end.saturating_sub(self.at),
                };
                self.sequence += 1;
                self.at = batch_end;
                return Ok(Some(batch));
            }
            if end >= self.size_bytes {
                self.at = self.size_bytes;
                break;
            }
            let skip_to = end - end % self.chunk_bytes;
            if skip_to > self.at {
                self.at = skip_to;
                continue;
            }
            // The hole ends inside this chunk, so data follows in it: read the chunk.
            let chunk_end = self.at.saturating_add(self.chunk_bytes).min(self.size_bytes);
            self.known.push_front((chunk_end, true));
        }
        Ok(None)
    }

    /// The end of the extent that covers `at`, and whether it must be read.
    fn extent(&mut self) -> Result<(u64, bool), ImageError> {
        loop {
            while self.known.front().is_some_and(|(end, _)| *end <= self.at) {
                self.known.pop_front();
            }
            if let Some(extent) = self.known.front() {
                return Ok(*extent);
            }
            let len = ASK_BYTES.min(self.size_bytes.saturating_sub(self.at));
            let range = ByteRange::new(self.at, len).ok_or_else(nonsense)?;
            let mut end = self.at;
            for (len, read) in self.ask(range)? {
                end = end.checked_add(len).ok_or_else(nonsense)?;
                self.known.push_back((end, read));
            }
            if end <= self.at {
                return Err(nonsense());
            }
        }
    }
}

impl Planner {
    /// Runs of bytes from the start of a range, and whether each must be read.
    fn ask(&self, range: ByteRange) -> Result<Vec<(u64, bool)>, ImageError> {
        if let Some(changes) = &self.changes {
            return Ok(changes(range, ASK_EXTENTS));
        }
        let extents = self.source.extents(range, ASK_EXTENTS)?;
        Ok(extents.iter().map(|extent| (extent.len, extent.kind == ExtentKind::Data)).collect())
    }
}

fn nonsense() -> ImageError {
    ImageError::new(ImageErrorKind::Io, "the source (file system or NBD server) reports invalid extents")
}
