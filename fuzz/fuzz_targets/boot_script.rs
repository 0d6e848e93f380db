//! Feeds bytes to `headwater_boot_script::fuzzing::boot_script`, which says what must hold of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| headwater_boot_script::fuzzing::boot_script(bytes));
