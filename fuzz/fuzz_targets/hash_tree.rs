//! Feeds bytes to `headwater_store::fuzzing::hash_tree`, which says what must hold of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| headwater_store::fuzzing::hash_tree(bytes));
