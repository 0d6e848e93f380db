//! Feeds bytes to `headwater_iscsi::fuzzing::iscsi_session`, which says what must hold of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| headwater_iscsi::fuzzing::iscsi_session(bytes));
