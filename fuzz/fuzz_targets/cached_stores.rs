//! Feeds bytes to `headwater_image::fuzzing::cached_stores`, which says what must hold of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| headwater_image::fuzzing::cached_stores(bytes));
