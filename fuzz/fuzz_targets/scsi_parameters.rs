//! Feeds bytes to `headwater_scsi::fuzzing::scsi_parameters`, which says what must hold of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| headwater_scsi::fuzzing::scsi_parameters(bytes));
