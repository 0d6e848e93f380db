//! Filling volumes with known data, MiB by MiB, and looking whether it is there.

use std::sync::Arc;

use headwater_block::{Device, IoErrorKind, blocking};
use headwater_testkit::{ReferenceDisk, Rng};

pub const MIB: u64 = 1 << 20;

pub fn empty(size_mib: u64) -> Arc<dyn Device> {
    Arc::new(ReferenceDisk::new(size_mib * MIB))
}

pub fn pattern(seed: u64) -> Vec<u8> {
    Rng::new(seed).bytes(MIB as usize)
}

/// Writes MiB after MiB until one is refused; how many were taken.
pub fn fill(device: &dyn Device, limit_mib: u64) -> (u64, Option<IoErrorKind>) {
    for number in 0..limit_mib {
        if let Err(error) = blocking::write(device, number * MIB, &pattern(number)) {
            return (number, Some(error.kind()));
        }
    }
    (limit_mib, None)
}

pub fn assert_holds(device: &dyn Device, count_mib: u64) {
    let mut read = vec![0; MIB as usize];
    for number in 0..count_mib {
        blocking::read(device, number * MIB, &mut read).unwrap();
        assert!(read == pattern(number), "MiB {number} was lost");
    }
}
