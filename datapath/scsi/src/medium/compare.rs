//! The steps of COMPARE AND WRITE and ORWRITE: each reads a range and then writes it.
//!
//! The task set makes them atomic: while one of them runs, no other command changes the range
//! ([`crate::queue::Hold::Exclusive`]). [`super`] checks the fields of the command.

use headwater_block::{ByteRange, Request};

use super::verify::{first_difference, miscompare};
use super::{broken, memory};
use crate::run::{Buffers, ErrorContext, Step, Work};

/// The progress of the command.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Start,
    Reading,
    Writing,
}

/// COMPARE AND WRITE: the first half of the data is the expected content, the second half is what is written.
pub(super) struct CompareAndWrite {
    range: ByteRange,
    fua: bool,
    stage: Stage,
}

impl CompareAndWrite {
    pub(super) fn new(range: ByteRange, fua: bool) -> Self {
        Self { range, fua, stage: Stage::Start }
    }
}

impl Work for CompareAndWrite {
    fn step(&mut self, buffers: &mut Buffers, completed: Option<Vec<u8>>) -> Step {
        let len = memory(self.range.len());
        match (self.stage, completed) {
            (Stage::Reading, Some(there)) => {
                if there.len() != len || buffers.data_out.len() < len.saturating_mul(2) {
                    return Step::End(Err(broken()));
                }
                if let Some(offset) = first_difference(&there, &buffers.data_out) {
                    return Step::End(Err(miscompare(offset)));
                }
                self.stage = Stage::Writing;
                buffers.data_out.truncate(len.saturating_mul(2));
                let buffer = buffers.data_out.split_off(len);
                Step::Submit(Request::Write { range: self.range, buffer, fua: self.fua })
            }
            (Stage::Writing, Some(_)) => Step::End(Ok(())),
            _ => {
                self.stage = Stage::Reading;
                let mut buffer = std::mem::take(&mut buffers.data_in);
                buffer.resize(len, 0);
                Step::Submit(Request::Read { range: self.range, buffer })
            }
        }
    }

    fn is_single(&self) -> bool {
        self.stage == Stage::Writing
    }

    fn error_context(&self) -> ErrorContext {
        ErrorContext { name: "COMPARE AND WRITE", is_write_error: self.stage == Stage::Writing }
    }
}

/// ORWRITE: the data is combined with the content by OR.
pub(super) struct OrWrite {
    range: ByteRange,
    fua: bool,
    stage: Stage,
}

impl OrWrite {
    pub(super) fn new(range: ByteRange, fua: bool) -> Self {
        Self { range, fua, stage: Stage::Start }
    }
}

impl Work for OrWrite {
    fn step(&mut self, buffers: &mut Buffers, completed: Option<Vec<u8>>) -> Step {
        let len = memory(self.range.len());
        match (self.stage, completed) {
            (Stage::Reading, Some(mut there)) => {
                if there.len() != len {
                    return Step::End(Err(broken()));
                }
                for (to, from) in there.iter_mut().zip(&buffers.data_out) {
                    *to |= from;
                }
                self.stage = Stage::Writing;
                Step::Submit(Request::Write { range: self.range, buffer: there, fua: self.fua })
            }
            (Stage::Writing, Some(_)) => Step::End(Ok(())),
            _ => {
                self.stage = Stage::Reading;
                let mut buffer = std::mem::take(&mut buffers.data_in);
                buffer.resize(len, 0);
                Step::Submit(Request::Read { range: self.range, buffer })
            }
        }
    }

    fn is_single(&self) -> bool {
        self.stage == Stage::Writing
    }

    fn error_context(&self) -> ErrorContext {
        ErrorContext { name: "ORWRITE", is_write_error: self.stage == Stage::Writing }
    }
}
