//! WRITE SAME: zeroes as one request, other patterns piece by piece.

use headwater_block::{ByteRange, Request};

use super::{CHUNK_BYTES, CLEAR_BYTES, memory, split_chunk};
use crate::run::{Buffers, ErrorContext, Step, Work};

/// WRITE SAME.
pub(super) struct Fill {
    range: ByteRange,
    /// One block; empty for zeroes.
    pattern: Vec<u8>,
    unmap: bool,
    fua: bool,
    done: u64,
    chunk: Option<ByteRange>,
}

impl Fill {
    pub(super) fn new(range: ByteRange, mut pattern: Vec<u8>, unmap: bool, fua: bool) -> Self {
        if pattern.iter().all(|byte| *byte == 0) {
            pattern.clear();
        }
        Self { range, pattern, unmap, fua, done: 0, chunk: None }
    }

    fn request(&self, chunk: ByteRange, completed: Option<Vec<u8>>) -> Request {
        if self.pattern.is_empty() {
            return Request::WriteZeroes { range: chunk, may_unmap: self.unmap, fua: self.fua };
        }
        let len = memory(chunk.len());
        let mut buffer = completed.unwrap_or_default();
        // A buffer that comes back holds the pattern already.
        buffer.truncate(len);
        while buffer.len() < len {
            buffer.extend_from_slice(&self.pattern);
        }
        Request::Write { range: chunk, buffer, fua: self.fua }
    }
}

impl Work for Fill {
    fn step(&mut self, _: &mut Buffers, completed: Option<Vec<u8>>) -> Step {
        if let Some(chunk) = self.chunk {
            self.done = self.done.saturating_add(chunk.len());
        }
        let chunk_bytes = if self.pattern.is_empty() { CLEAR_BYTES } else { CHUNK_BYTES };
        let Some(chunk) = split_chunk(self.range, self.done, chunk_bytes) else {
            return Step::End(Ok(()));
        };
        self.chunk = Some(chunk);
        Step::Submit(self.request(chunk, completed))
    }

    fn is_single(&self) -> bool {
        self.chunk.is_some_and(|chunk| chunk.end() == self.range.end())
    }

    fn error_context(&self) -> ErrorContext {
        ErrorContext { name: "WRITE SAME", is_write_error: true }
    }
}
