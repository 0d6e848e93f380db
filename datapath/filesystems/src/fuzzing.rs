//! What must hold of every byte sequence that a reader of a file system can be given: for the fuzzers in `fuzz/`, and for a
//! bounded test.
//!
//! Each function takes bytes, reads them, and panics if what was read breaks a promise. Refusing them is always right.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use headwater_block::{IoError, IoErrorKind};

pub use crate::btrfs::fuzzing::btrfs_volume;
pub use crate::ntfs::fuzzing::ntfs_volume;
use crate::units::{u64_of, usize_of};
pub use crate::xfs::fuzzing::xfs_volume;
use crate::{Bytes, Fault, Partition, ReadAt, Scan, Scanned, Visits};

/// The most that a scan reads of a disk, as a multiple of its length: with more than this, somebody waits for damaged tables.
const READ_TIMES: u64 = 256;
/// The length that a scan may read of every disk so often.
const READ_BYTES_MIN: u64 = 64 << 10;
const SECTOR: usize = 512;

/// What a fuzzer or a test feeds with bytes.
pub type Oracle = fn(&[u8]);

/// All of them, with their names and bytes to begin with.
pub fn targets() -> Vec<(&'static str, Oracle, Vec<Vec<u8>>)> {
    vec![
        ("ntfs_volume", ntfs_volume, crate::ntfs::fuzzing::ntfs_samples()),
        ("btrfs_volume", btrfs_volume, crate::btrfs::fuzzing::btrfs_samples()),
        ("xfs_volume", xfs_volume, crate::xfs::fuzzing::xfs_samples()),
    ]
}

struct Disk {
    bytes: Vec<u8>,
    read_bytes: AtomicU64,
}

impl ReadAt for Disk {
    fn len_bytes(&self) -> u64 {
        u64_of(self.bytes.len())
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<(), IoError> {
        self.read_bytes.fetch_add(u64_of(into.len()), Ordering::Relaxed);
        let part = self.bytes.get(usize_of(at)..).and_then(|rest| rest.get(..into.len()));
        into.copy_from_slice(part.ok_or_else(|| IoError::new(IoErrorKind::Invalid, "past the end"))?);
        Ok(())
    }
}

/// All that a scan of a disk finds, damage included. `None`: the disk cannot be opened.
pub(crate) fn scan_all(
    bytes: &[u8],
    open: impl FnOnce(Bytes) -> Result<Box<dyn Scan>, Fault>,
) -> Option<Vec<Scanned>> {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().next_multiple_of(SECTOR), 0);
    let disk = Arc::new(Disk { bytes, read_bytes: AtomicU64::new(0) });
    let len_bytes = disk.len_bytes();
    let partition = Partition { number: 0, offset_bytes: 0, len_bytes };
    let opened = open(Bytes::new(Arc::clone(&disk) as Arc<dyn ReadAt>, &partition));
    let mut all = Vec::new();
    let scanned = opened.ok().map(|mut file_system| {
        file_system.scan(&mut Visits::new(|| false), &mut |scanned| {
            all.push(scanned);
            Ok(())
        })
    });
    let read_bytes = disk.read_bytes.load(Ordering::Relaxed);
    let most = READ_TIMES * len_bytes.max(READ_BYTES_MIN);
    assert!(read_bytes <= most, "{read_bytes} bytes of {len_bytes} were read");
    // Damage is among what is found.
    assert!(scanned.as_ref().is_none_or(Result::is_ok), "{scanned:?}");
    scanned.map(|_| all)
}

/// Runs lie on the disk, and names have a length that names have.
pub(crate) fn check_scan(all: &[Scanned], len: usize) {
    let len_bytes = u64_of(len.next_multiple_of(SECTOR));
    for scanned in all {
        match scanned {
            Scanned::Run { bytes, .. } => {
                assert!(bytes.start <= bytes.end && bytes.end <= len_bytes, "{bytes:?} of {len_bytes}");
            }
            Scanned::Name { name, .. } => assert!((1..=255).contains(&name.len()), "{name:?}"),
            Scanned::Unreadable { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fuzzers' work in small.
    #[test]
    fn no_bytes_break_a_promise() {
        headwater_testkit::mutate::all(targets());
    }
}
