//! Generates the sequence of a worker's requests by Iometer's rules.
//!
//! For each request, the direction is random, and so is whether the offset is random. A random offset is rounded up
//! to the alignment. Otherwise the request begins where the previous request ended, in either direction. A request
//! that would end beyond the working set begins at its start.

use super::{Job, Line};
use crate::random::Random;

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the device.
    Read,
    /// To the device.
    Write,
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Its direction.
    pub direction: Direction,
    /// Its offset.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
    /// The delay before it is sent, in milliseconds; only the first request of a burst can have a delay.
    pub delay_ms: u32,
}

/// The endless sequence of requests of one worker.
pub struct Requests {
    job: Job,
    random: Random,
    /// The end of the previous request, relative to the start of the working set.
    cursor: u64,
    /// The index of the chosen line, and the number of requests that follow with it.
    line: (usize, u32),
}

impl Requests {
    /// The sequence of this seed.
    pub fn new(job: Job, seed: u64) -> Self {
        Self { job, random: Random::new(seed), cursor: 0, line: (0, 0) }
    }

    /// The line of the next request, and whether a burst begins. If there are several lines, a new one is chosen
    /// after each burst.
    fn line(&mut self) -> (Line, bool) {
        let (mut index, mut left) = self.line;
        let begins = left == 0;
        if begins {
            let drawn = if self.job.lines.len() > 1 { self.random.below(100) } else { 0 };
            let mut before = 0;
            let is_drawn = |line: &Line| {
                before += u64::from(line.share_percent);
                drawn < before
            };
            index = self.job.lines.iter().position(is_drawn).unwrap_or(0);
            left = self.job.lines[index].burst.max(1);
        }
        self.line = (index, left - 1);
        (self.job.lines[index], begins)
    }

    /// Generates the next request.
    pub fn draw(&mut self) -> Item {
        let (line, begins) = self.line();
        let is_read = self.random.below(100) < u64::from(line.read_percent);
        let is_random = self.random.below(100) < u64::from(line.random_percent);
        let mut offset = if is_random {
            let alignment = u64::from(line.alignment_bytes.max(1));
            self.random.below(self.job.set_bytes).next_multiple_of(alignment)
        } else {
            self.cursor
        };
        let len = u64::from(line.request_bytes);
        if offset + len > self.job.set_bytes {
            offset = 0;
        }
        self.cursor = offset + len;
        let direction = if is_read { Direction::Read } else { Direction::Write };
        Item {
            direction,
            offset: self.job.start_bytes + offset,
            len: line.request_bytes,
            delay_ms: if begins { line.delay_ms } else { 0 },
        }
    }
}
