//! Feeds bytes to `headwater_writecache::fuzzing::cache_map`, which says what must hold of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| headwater_writecache::fuzzing::cache_map(bytes));
