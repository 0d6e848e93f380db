//! Allocates disk offsets for the files of simulated users.

use crate::random::Random;

/// Disk space of each user, in bytes.
pub const USER_BYTES: u64 = 16 << 30;

const REGION_BYTES: u64 = 1 << 20;

/// The allocator of one user: permanent files from the beginning of the user's space, temporary files from its
/// middle. No offset is used twice.
pub struct Files {
    begin: u64,
    kept_bytes: u64,
    new_bytes: u64,
}

impl Files {
    pub fn new(user: u64) -> Self {
        Self { begin: user * USER_BYTES, kept_bytes: 0, new_bytes: 0 }
    }

    /// A new offset for a permanent file.
    pub fn permanent_offset(&mut self, bytes: u64) -> u64 {
        let offset = self.begin + self.kept_bytes;
        self.kept_bytes += bytes.next_multiple_of(4096);
        offset
    }

    /// A new offset for a temporary file.
    pub fn temporary_offset(&mut self, bytes: u64) -> u64 {
        let offset = self.begin + USER_BYTES / 2 + self.new_bytes;
        self.new_bytes = (self.new_bytes + bytes.next_multiple_of(4096)) % (USER_BYTES / 2 - (1 << 30));
        offset
    }

    /// An offset in a permanent region that was written before. Some regions are chosen much more often than others.
    pub fn rewritten_offset(&self, random: &mut Random) -> Option<u64> {
        let regions = self.kept_bytes.div_ceil(REGION_BYTES);
        // The cube of a uniform random number approximates Zipf's law with exponent 2/3.
        let drawn = random.share().powi(3);
        let region = (regions as f64 * drawn) as u64;
        let begin = region * REGION_BYTES;
        let blocks = (self.kept_bytes.min(begin + REGION_BYTES)).saturating_sub(begin) / 4096;
        (blocks > 0).then(|| self.begin + begin + random.below(blocks) * 4096)
    }
}
