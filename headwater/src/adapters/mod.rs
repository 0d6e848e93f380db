//! The service's traits, implemented with the crates of the data path and of hosting.

mod boot_traces;
mod convert;
pub mod disks;
mod frozen;
pub mod holds;
pub mod hypervisor;
mod identity;
pub mod images;
mod kept;
pub mod lending;
pub mod metrics;
mod promotions;
mod pulls;
pub mod release;
pub mod sources;
pub mod targets;
mod totals;
