//! A disk that executes operations only on command. Writes that are left when its process ends may complete
//! later.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

use crate::memory_file::crash;
use crate::overflow::io::{Direction, IoEngine, IoOp};

#[derive(Default)]
pub(super) struct LateDisk {
    ops: Mutex<Vec<IoOp>>,
}

/// A write that the kernel still has when its process ends.
pub(super) struct LateWrite {
    file: Arc<File>,
    offset: u64,
    bytes: Vec<u8>,
}

impl LateWrite {
    pub(super) fn arrive(&self) {
        self.file.write_all_at(&self.bytes, self.offset).unwrap();
    }
}

impl IoEngine for LateDisk {
    fn submit(&self, op: IoOp) {
        self.ops.lock().unwrap().push(op);
    }
}

impl LateDisk {
    /// Executes one operation, or lets it fail.
    pub(super) fn run(&self, which: usize, fails: bool) {
        crash::point();
        let op = {
            let mut ops = self.ops.lock().unwrap();
            if ops.is_empty() {
                return;
            }
            let which = which % ops.len();
            ops.remove(which)
        };
        Self::carry_out(op, fails);
    }

    /// Executes all reads, and leaves writes in flight.
    pub(super) fn run_reads(&self) {
        loop {
            let op = {
                let mut ops = self.ops.lock().unwrap();
                let Some(at) = ops.iter().position(|op| op.direction == Direction::Read) else { return };
                ops.remove(at)
            };
            Self::carry_out(op, false);
        }
    }

    fn carry_out(mut op: IoOp, fails: bool) {
        let (offset, len) = (op.offset, op.len);
        let result = match op.direction {
            _ if fails => Err(std::io::Error::other("injected")),
            Direction::Read => op.file.read_exact_at(&mut op.buffer[..len], offset),
            Direction::Write => op.file.write_all_at(&op.buffer[..len], offset),
        };
        crash::point();
        (op.done)(result, op.buffer);
    }

    pub(super) fn run_all(&self) {
        while self.has_any() {
            self.run(0, false);
        }
    }

    pub(super) fn has_any(&self) -> bool {
        !self.ops.lock().unwrap().is_empty()
    }

    /// The writes that are left when the process ends.
    pub(super) fn left(&self) -> Vec<LateWrite> {
        let ops = std::mem::take(&mut *self.ops.lock().unwrap());
        let writes = ops.into_iter().filter(|op| op.direction == Direction::Write);
        writes
            .map(|op| LateWrite {
                file: Arc::clone(&op.file),
                offset: op.offset,
                bytes: op.buffer[..op.len].to_vec(),
            })
            .collect()
    }
}
