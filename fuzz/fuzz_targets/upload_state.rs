//! Feeds bytes to `headwater_store::fuzzing::upload_state`, which says what must hold of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| headwater_store::fuzzing::upload_state(bytes));
