//! Which requests a worker sends, in order: Iometer's rules.
//!
//! Each request draws its direction and whether it is random. A random one starts anywhere, rounded up to the alignment; the others go
//! on where the request before ended, whatever its direction. Past the end of the set a request goes to its start.

use super::Job;
use super::random::Random;

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the device.
    Read,
    /// To the device.
    Write,
}

/// One request of the job's length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Which way.
    pub direction: Direction,
    /// First byte.
    pub offset: u64,
}

/// The endless sequence of one worker.
pub struct Requests {
    job: Job,
    random: Random,
    /// The end of the request before.
    cursor: u64,
}

impl Requests {
    /// The sequence of a seed.
    pub fn new(job: Job, seed: u64) -> Self {
        Self { job, random: Random::new(seed), cursor: 0 }
    }

    /// The next request.
    pub fn draw(&mut self) -> Item {
        let is_read = self.random.below(100) < u64::from(self.job.read_percent);
        let is_random = self.random.below(100) < u64::from(self.job.random_percent);
        let mut offset = if is_random {
            let alignment = u64::from(self.job.alignment_bytes.max(1));
            self.random.below(self.job.set_bytes).next_multiple_of(alignment)
        } else {
            self.cursor
        };
        let len = u64::from(self.job.request_bytes);
        if offset + len > self.job.set_bytes {
            offset = 0;
        }
        self.cursor = offset + len;
        Item { direction: if is_read { Direction::Read } else { Direction::Write }, offset }
    }
}
