//! VERIFY and WRITE AND VERIFY: reading, and comparing with the data that was sent.

use headwater_block::{ByteRange, Request};

use super::{CHUNK_BYTES, broken, memory, split_chunk};
use crate::cdb::Check;
use crate::run::{Buffers, ErrorContext, Step, Work};
use crate::sense::{Code, Fault, SenseKey};

/// MISCOMPARE, with the offset of the first byte that differs.
pub(super) fn miscompare(offset: u64) -> Fault {
    Fault::new(SenseKey::Miscompare, Code::MISCOMPARE_DURING_VERIFY).with_information(offset)
}

/// The offset of the first byte in which the two differ. Bytes beyond the shorter one do not count.
pub(super) fn first_difference(a: &[u8], b: &[u8]) -> Option<u64> {
    let common = a.len().min(b.len());
    if a.get(..common) == b.get(..common) {
        return None;
    }
    a.iter().zip(b).position(|(a, b)| a != b).and_then(|at| u64::try_from(at).ok())
}

/// VERIFY: chunk by chunk, so that a whole disk can be read with one command.
pub(super) struct Verify {
    range: ByteRange,
    check: Check,
    block_bytes: u64,
    done: u64,
    chunk: Option<ByteRange>,
}

impl Verify {
    pub(super) fn new(range: ByteRange, check: Check, block_bytes: u64) -> Self {
        Self { range, check, block_bytes, done: 0, chunk: None }
    }

    fn compare(&self, chunk: &[u8], data_out: &[u8]) -> Result<(), Fault> {
        let difference = match self.check {
            Check::Medium => None,
            Check::Data => {
                let data = data_out.get(memory(self.done)..).unwrap_or_default();
                first_difference(chunk, data).map(|at| at.saturating_add(self.done))
            }
            // With one block, the offset is that within the block.
            Check::OneBlock => {
                let block = data_out.get(..memory(self.block_bytes)).unwrap_or_default();
                chunk.chunks(memory(self.block_bytes)).find_map(|part| first_difference(part, block))
            }
        };
        difference.map_or(Ok(()), |offset| Err(miscompare(offset)))
    }
}

impl Work for Verify {
    fn step(&mut self, buffers: &mut Buffers, completed: Option<Vec<u8>>) -> Step {
        let mut buffer = std::mem::take(&mut buffers.data_in);
        if let (Some(chunk), Some(completed)) = (self.chunk, completed) {
            if u64::try_from(completed.len()) != Ok(chunk.len()) {
                return Step::End(Err(broken()));
            }
            if let Err(fault) = self.compare(&completed, &buffers.data_out) {
                return Step::End(Err(fault));
            }
            self.done = self.done.saturating_add(chunk.len());
            buffer = completed;
        }
        let Some(chunk) = split_chunk(self.range, self.done, CHUNK_BYTES) else {
            return Step::End(Ok(()));
        };
        self.chunk = Some(chunk);
        buffer.resize(memory(chunk.len()), 0);
        Step::Submit(Request::Read { range: chunk, buffer })
    }

    fn is_single(&self) -> bool {
        self.chunk.is_some_and(|chunk| chunk.end() == self.range.end())
    }

    fn error_context(&self) -> ErrorContext {
        ErrorContext { name: "VERIFY", is_write_error: false }
    }
}

/// WRITE AND VERIFY: durable, then read back.
pub(super) struct WriteVerify {
    range: ByteRange,
    written: bool,
    verify: Verify,
}

impl WriteVerify {
    pub(super) fn new(range: ByteRange, compare: bool) -> Self {
        let check = if compare { Check::Data } else { Check::Medium };
        Self { range, written: false, verify: Verify::new(range, check, 1) }
    }
}

impl Work for WriteVerify {
    fn step(&mut self, buffers: &mut Buffers, completed: Option<Vec<u8>>) -> Step {
        if self.written {
            return self.verify.step(buffers, completed);
        }
        match completed {
            None => {
                let mut buffer = std::mem::take(&mut buffers.data_out);
                buffer.truncate(memory(self.range.len()));
                Step::Submit(Request::Write { range: self.range, buffer, fua: true })
            }
            Some(buffer) => {
                self.written = true;
                buffers.data_out = buffer;
                self.verify.step(buffers, None)
            }
        }
    }

    fn is_single(&self) -> bool {
        self.written && self.verify.is_single()
    }

    fn error_context(&self) -> ErrorContext {
        ErrorContext { name: "WRITE AND VERIFY", is_write_error: !self.written }
    }
}
