//! Adapters: the service's traits, implemented with the crates of the data plane and of hosting.

mod boot_traces;
pub mod contents;
mod convert;
pub mod disk_host;
pub mod disks;
pub mod frozen;
pub mod hypervisor;
mod identity;
pub mod images;
pub mod metrics;
mod persistent_disks;
mod promotions;
mod pulls;
pub mod release;
pub mod retention;
pub mod snapshot_leases;
pub mod sources;
pub mod targets;
mod totals;
pub mod wake;
