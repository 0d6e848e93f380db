//! The full feature phase, PDU by PDU.

mod commands;
mod data;
mod gone;
mod sessions;

use crate::fixture::Fixture;
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Waits};

const MIB: u64 = 1 << 20;

fn fixture() -> Fixture {
    Fixture::new(ReferenceDisk::new(4 * MIB))
}

fn slow() -> Fixture {
    let options = ReferenceOptions { waits: Waits::Always, ..ReferenceOptions::default() };
    Fixture::new(ReferenceDisk::with_options(4 * MIB, options))
}
