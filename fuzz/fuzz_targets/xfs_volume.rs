//! Feeds bytes to `headwater_filesystems::fuzzing::xfs_volume`, which says what must hold of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| headwater_filesystems::fuzzing::xfs_volume(bytes));
