//! The available studies, by number.

mod configuration;
mod copies_page;
pub mod guest_copies;
pub mod lifecycle;
pub mod lifecycle_report;
mod modelled;
pub mod placement;
pub mod s000;
mod s001;
mod s002;
pub mod s003;
mod s004;

pub use configuration::{iometer_results, study_icf};
pub use s001::study_001;
pub use s002::study_002;
pub use s004::study_004;

use crate::load::Line;

const MIB: u64 = 1 << 20;

/// The load of the desktop studies: 4 KiB, 80 % writes.
fn mix(alignment_bytes: u32, random_percent: u8) -> Line {
    Line {
        request_bytes: 4096,
        share_percent: 100,
        alignment_bytes,
        read_percent: 20,
        random_percent,
        burst: 1,
        delay_ms: 0,
    }
}
