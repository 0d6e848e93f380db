//! A disk operation in the kernel, and the meaning of its results.

use std::io;
use std::os::fd::AsRawFd;

use io_uring::{opcode, squeue, types};

use crate::overflow::io::{Direction, IoOp};

/// An operation and its progress.
pub(super) struct Flight {
    pub(super) op: IoOp,
    moved: usize,
}

/// The meaning of a result of the kernel.
pub(super) enum Landing {
    /// The operation has ended.
    Over(io::Result<()>),
    /// Only a part was transferred, or the operation was interrupted: start the rest.
    Again,
}

impl Flight {
    pub(super) fn new(op: IoOp) -> Box<Self> {
        Box::new(Self { op, moved: 0 })
    }

    /// The entry for the rest of the transfer; for a write, at most `write_bytes` of it.
    pub(super) fn entry(&mut self, write_bytes: u32) -> squeue::Entry {
        let fd = types::Fd(self.op.file.as_raw_fd());
        let left = u32::try_from(self.op.len - self.moved).unwrap_or(u32::MAX);
        let offset = self.op.offset + self.moved as u64;
        // In bounds: `moved <= len <= buffer.len()`, checked when the operation was submitted.
        let at = self.op.buffer.as_mut_ptr().wrapping_add(self.moved);
        match self.op.direction {
            Direction::Read => opcode::Read::new(fd, at, left).offset(offset).build(),
            Direction::Write => opcode::Write::new(fd, at, left.min(write_bytes)).offset(offset).build(),
        }
    }

    /// Processes the result of its entry.
    pub(super) fn landed(&mut self, result: i32) -> Landing {
        let Ok(moved) = u32::try_from(result) else {
            let error = io::Error::from_raw_os_error(result.wrapping_neg());
            return match error.kind() {
                io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => Landing::Again,
                _ => Landing::Over(Err(error)),
            };
        };
        if moved == 0 {
            let why = "the file ends before the data";
            return Landing::Over(Err(io::Error::new(io::ErrorKind::UnexpectedEof, why)));
        }
        self.moved += moved as usize;
        if self.moved < self.op.len { Landing::Again } else { Landing::Over(Ok(())) }
    }

    /// Calls the operation's `done`.
    pub(super) fn end(self, outcome: io::Result<()>) {
        (self.op.done)(outcome, self.op.buffer);
    }
}
