//! Which requests a worker sends, in order: Iometer's rules.
//!
//! Each request draws its direction and whether it is random. A random one starts anywhere, rounded up to the alignment; the others go
//! on where the request before ended, whatever its direction. Past the end of the set a request goes to its start.

use super::{Job, Line};
use crate::random::Random;

/// Which way.
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
    /// Which way.
    pub direction: Direction,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
    /// Milliseconds before it is sent: the first one of a burst may have to wait.
    pub delay_ms: u32,
}

/// The endless sequence of one worker.
pub struct Requests {
    job: Job,
    random: Random,
    /// The end of the request before, from the start of the set.
    cursor: u64,
    /// Index of the line that was drawn, and requests that follow it still.
    line: (usize, u32),
}

impl Requests {
    /// The sequence of a seed.
    pub fn new(job: Job, seed: u64) -> Self {
        Self { job, random: Random::new(seed), cursor: 0, line: (0, 0) }
    }

    /// The line of the next request, and whether a burst begins: drawn after each burst, if there is a choice.
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

    /// The next request.
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
