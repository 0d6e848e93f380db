//! Feeds bytes to `headwater_remote::fuzzing::http_head`, which says what must hold of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| headwater_remote::fuzzing::http_head(bytes));
