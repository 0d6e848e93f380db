//! Fills volumes with known data, MiB by MiB, and checks it.

use std::ops::Range;
use std::sync::Arc;

use headwater_block::{Device, IoErrorKind, blocking};
use headwater_testkit::{ReferenceDisk, Rng, wait_until};

pub const MIB: u64 = 1 << 20;

pub fn empty(size_mib: u64) -> Arc<dyn Device> {
    Arc::new(ReferenceDisk::new(size_mib * MIB))
}

pub fn pattern(seed: u64) -> Vec<u8> {
    Rng::new(seed).bytes(MIB as usize)
}

/// Writes MiB after MiB until a write is refused; returns how many were stored.
pub fn fill(device: &dyn Device, limit_mib: u64) -> (u64, Option<IoErrorKind>) {
    fill_on(device, 0..limit_mib)
}

/// Like [`fill`], after the MiB before these were written.
pub fn fill_on(device: &dyn Device, mib: Range<u64>) -> (u64, Option<IoErrorKind>) {
    for number in mib.clone() {
        if let Err(error) = blocking::write(device, number * MIB, &pattern(number)) {
            return (number, Some(error.kind()));
        }
    }
    (mib.end, None)
}

/// Writes MiB after MiB, and repeats each until it is stored, for volumes with a short pause limit on a busy
/// disk.
pub fn fill_patiently(device: &dyn Device, mib: Range<u64>) {
    for number in mib {
        wait_until(format!("MiB {number} is taken"), || {
            blocking::write(device, number * MIB, &pattern(number)).is_ok()
        });
    }
}

pub fn assert_holds(device: &dyn Device, count_mib: u64) {
    let mut read = vec![0; MIB as usize];
    for number in 0..count_mib {
        blocking::read(device, number * MIB, &mut read).unwrap();
        assert!(read == pattern(number), "MiB {number} was lost");
    }
}
