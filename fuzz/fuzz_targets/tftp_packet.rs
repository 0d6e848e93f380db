//! Feeds bytes to `headwater_tftp::fuzzing::tftp_packet`, which says what must hold of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| headwater_tftp::fuzzing::tftp_packet(bytes));
