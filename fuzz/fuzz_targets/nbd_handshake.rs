//! Feeds bytes to `headwater_nbd::fuzzing::nbd_handshake`, which says what must hold of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| headwater_nbd::fuzzing::nbd_handshake(bytes));
