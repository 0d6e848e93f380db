//! Feeds bytes to `headwater_store::fuzzing::list_of_holes`, which says what must hold of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| headwater_store::fuzzing::list_of_holes(bytes));
