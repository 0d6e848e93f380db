//! Feeds bytes to `headwater_nbd::fuzzing::nbd_request`, which says what must hold of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| headwater_nbd::fuzzing::nbd_request(bytes));
