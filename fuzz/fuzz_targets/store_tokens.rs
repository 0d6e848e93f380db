//! Feeds bytes to `headwater_store_server::fuzzing::store_tokens`, which says what must hold of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| headwater_store_server::fuzzing::store_tokens(bytes));
