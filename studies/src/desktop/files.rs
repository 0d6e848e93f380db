//! Where a user's files are on the disk.

use crate::random::Random;

/// Space of each user on a disk.
pub const USER_BYTES: u64 = 16 << 30;

const REGION_BYTES: u64 = 1 << 20;

/// The places of one user: kept ones from the beginning, temporary ones from the middle, each once.
pub struct Files {
    begin: u64,
    kept_bytes: u64,
    new_bytes: u64,
}

impl Files {
    pub fn new(user: u64) -> Self {
        Self { begin: user * USER_BYTES, kept_bytes: 0, new_bytes: 0 }
    }

    /// A new place of a file that stays.
    pub fn kept_place(&mut self, bytes: u64) -> u64 {
        let offset = self.begin + self.kept_bytes;
        self.kept_bytes += bytes.next_multiple_of(4096);
        offset
    }

    /// A new place of a file that goes.
    pub fn new_place(&mut self, bytes: u64) -> u64 {
        let offset = self.begin + USER_BYTES / 2 + self.new_bytes;
        self.new_bytes = (self.new_bytes + bytes.next_multiple_of(4096)) % (USER_BYTES / 2 - (1 << 30));
        offset
    }

    /// A place that stays and was written before: some regions much more often than others.
    pub fn old_place(&self, random: &mut Random) -> Option<u64> {
        let regions = self.kept_bytes.div_ceil(REGION_BYTES);
        // The third power of an even share is near to Zipf's law with exponent 2/3.
        let drawn = random.share().powi(3);
        let region = (regions as f64 * drawn) as u64;
        let begin = region * REGION_BYTES;
        let blocks = (self.kept_bytes.min(begin + REGION_BYTES)).saturating_sub(begin) / 4096;
        (blocks > 0).then(|| self.begin + begin + random.below(blocks) * 4096)
    }
}
