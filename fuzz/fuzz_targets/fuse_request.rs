//! Feeds bytes to `headwater_fuse::fuzzing::fuse_request`, which says what must hold of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| headwater_fuse::fuzzing::fuse_request(bytes));
