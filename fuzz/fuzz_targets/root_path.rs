//! Feeds bytes to `headwater_store::fuzzing::root_path`, which says what must hold of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| headwater_store::fuzzing::root_path(bytes));
