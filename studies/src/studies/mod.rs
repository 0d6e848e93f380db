//! The studies that are here, by number.

mod s001;

pub use s001::study_001;

const MIB: u64 = 1 << 20;
