//! Feeds bytes to `headwater_dhcp::fuzzing::dhcp_packet`, which says what must hold of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| headwater_dhcp::fuzzing::dhcp_packet(bytes));
