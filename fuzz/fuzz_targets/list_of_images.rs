//! Feeds bytes to `headwater_remote::fuzzing::list_of_images`, which says what must hold of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| headwater_remote::fuzzing::list_of_images(bytes));
