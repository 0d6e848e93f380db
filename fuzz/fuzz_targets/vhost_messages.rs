//! Feeds bytes to `headwater_vhost_user::fuzzing::vhost_messages`, which says what must hold of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| headwater_vhost_user::fuzzing::vhost_messages(bytes));
