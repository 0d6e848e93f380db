//! Limits how many bytes of the files of a file system a comparison or a search for damaged files reads.
//!
//! A hole takes no space, so any number of files may claim any size: 16 TiB in an ext4, 2^60 bytes in an
//! NTFS. Reading all these zeroes would never end.

use headwater_filesystems::Partition;

/// The limit for all files together, as a multiple of the partition's size. It is more than one because of
/// holes and of hard links, as in backups.
const PARTITION_TIMES: u64 = 32;

/// How many bytes of one file may be read, and how many are left for all files.
pub(super) struct Allowance {
    file_bytes: u64,
    left_bytes: u64,
}

impl Allowance {
    pub(super) fn of(partition: &Partition) -> Self {
        let file_bytes = partition.len_bytes;
        Self { file_bytes, left_bytes: file_bytes.saturating_mul(PARTITION_TIMES) }
    }

    /// How many bytes of a file of this size may be read: at most the size of its partition, and at most what
    /// is left.
    pub(super) fn of_file(&self, size_bytes: u64) -> u64 {
        size_bytes.min(self.file_bytes).min(self.left_bytes)
    }

    /// Counts bytes that were read.
    pub(super) fn spend(&mut self, bytes: u64) {
        self.left_bytes = self.left_bytes.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_one_file_or_all_files_has_a_limit() {
        let mut allowance = Allowance::of(&Partition { number: 0, offset_bytes: 0, len_bytes: 1000 });
        assert_eq!([0, 1000, 1001, u64::MAX].map(|size| allowance.of_file(size)), [0, 1000, 1000, 1000]);
        for _ in 0..PARTITION_TIMES - 1 {
            assert_eq!(allowance.of_file(2000), 1000);
            allowance.spend(1000);
        }
        allowance.spend(900);
        assert_eq!((allowance.of_file(60), allowance.of_file(2000)), (60, 100));
        allowance.spend(u64::MAX);
        assert_eq!(allowance.of_file(1), 0);
    }
}
