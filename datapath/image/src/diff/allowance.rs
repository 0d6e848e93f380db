//! How much is read of the files of a file system.
//!
//! A hole takes no room, so a file may claim any size: 16 TiB in an ext4, 2^60 bytes in an NTFS, and that in as many files
//! as there are. Whoever read all of these zeroes would never come to an end.

use headwater_filesystems::Partition;

/// What is read of all files, in sizes of the partition: holes and second names of files, as backups have many, make it more than one.
const PARTITION_TIMES: u64 = 32;

/// What may be read of a file, and still of all files.
pub(super) struct Allowance {
    file_bytes: u64,
    left_bytes: u64,
}

impl Allowance {
    pub(super) fn of(partition: &Partition) -> Self {
        let file_bytes = partition.len_bytes;
        Self { file_bytes, left_bytes: file_bytes.saturating_mul(PARTITION_TIMES) }
    }

    /// How much of a file of this size may be read: no more than its partition has, and than is left.
    pub(super) fn of_file(&self, size_bytes: u64) -> u64 {
        size_bytes.min(self.file_bytes).min(self.left_bytes)
    }

    /// Notes what was read.
    pub(super) fn spend(&mut self, bytes: u64) {
        self.left_bytes = self.left_bytes.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neither_one_file_nor_all_of_them_are_read_without_an_end() {
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
