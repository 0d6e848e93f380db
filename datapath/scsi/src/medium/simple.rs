//! READ, WRITE, SYNCHRONIZE CACHE and PRE-FETCH: one request each.

use headwater_block::{ByteRange, Request};

use super::{broken, memory};
use crate::run::{Buffers, ErrorContext, Step, Work};

/// READ. With FUA it comes after a flush, so that the medium itself is read.
pub(super) struct Read {
    range: ByteRange,
    flush_first: bool,
    submitted: bool,
}

impl Read {
    pub(super) fn new(range: ByteRange, flush_first: bool) -> Self {
        Self { range, flush_first, submitted: false }
    }
}

impl Work for Read {
    fn step(&mut self, buffers: &mut Buffers, completed: Option<Vec<u8>>) -> Step {
        if std::mem::take(&mut self.flush_first) {
            return Step::Submit(Request::Flush);
        }
        let len = memory(self.range.len());
        match completed {
            Some(buffer) if self.submitted => {
                if buffer.len() != len {
                    return Step::End(Err(broken()));
                }
                buffers.data_in = buffer;
                Step::End(Ok(()))
            }
            _ => {
                self.submitted = true;
                let mut buffer = std::mem::take(&mut buffers.data_in);
                buffer.resize(len, 0);
                Step::Submit(Request::Read { range: self.range, buffer })
            }
        }
    }

    fn is_single(&self) -> bool {
        self.submitted
    }

    fn error_context(&self) -> ErrorContext {
        ErrorContext { name: "READ", is_write_error: false }
    }
}

/// WRITE.
pub(super) struct Write {
    range: ByteRange,
    fua: bool,
}

impl Write {
    pub(super) fn new(range: ByteRange, fua: bool) -> Self {
        Self { range, fua }
    }
}

impl Work for Write {
    fn step(&mut self, buffers: &mut Buffers, completed: Option<Vec<u8>>) -> Step {
        if let Some(buffer) = completed {
            buffers.data_out = buffer;
            return Step::End(Ok(()));
        }
        let mut buffer = std::mem::take(&mut buffers.data_out);
        buffer.truncate(memory(self.range.len()));
        Step::Submit(Request::Write { range: self.range, buffer, fua: self.fua })
    }

    fn is_single(&self) -> bool {
        true
    }

    fn error_context(&self) -> ErrorContext {
        ErrorContext { name: "WRITE", is_write_error: true }
    }
}

/// SYNCHRONIZE CACHE: flushes everything, whatever range was requested.
pub(super) struct Flush;

impl Work for Flush {
    fn step(&mut self, _: &mut Buffers, completed: Option<Vec<u8>>) -> Step {
        if completed.is_some() { Step::End(Ok(())) } else { Step::Submit(Request::Flush) }
    }

    fn is_single(&self) -> bool {
        true
    }

    fn error_context(&self) -> ErrorContext {
        ErrorContext { name: "SYNCHRONIZE CACHE", is_write_error: true }
    }
}

/// PRE-FETCH.
pub(super) struct Prefetch {
    range: ByteRange,
}

impl Prefetch {
    pub(super) fn new(range: ByteRange) -> Self {
        Self { range }
    }
}

impl Work for Prefetch {
    fn step(&mut self, _: &mut Buffers, completed: Option<Vec<u8>>) -> Step {
        if completed.is_some() {
            return Step::End(Ok(()));
        }
        Step::Submit(Request::Prefetch { range: self.range })
    }

    fn is_single(&self) -> bool {
        true
    }

    fn error_context(&self) -> ErrorContext {
        ErrorContext { name: "PRE-FETCH", is_write_error: false }
    }
}
