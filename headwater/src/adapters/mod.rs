//! Adapters: implement the traits of the service (`headwater_service::backend`) with the crates of the data plane and of hosting.
//!
//! The daemon creates them at its start and gives them to the service, which decides what happens. An adapter decides nothing about
//! machines or images: it does what the service asks, and converts errors. The disk process uses [`disks`] and its parts, too.
//!
//! | trait | implemented by |
//! |---|---|
//! | `Disks`, `DiskHost` | [`disks`] in this process, or the client of the disk process ([`crate::disk_process`]) |
//! | `Images` | [`images`] with [`pulls`], [`sources`], [`convert`], [`boot_traces`], [`promotions`] |
//! | `Hypervisor` | [`hypervisor`] |
//! | `Cloud` | [`cloud`] |
//! | `Targets`, `Wake` | [`targets`], [`wake`] |

mod boot_traces;
pub mod cloud;
pub mod contents;
mod convert;
pub mod disk_host;
pub mod disks;
pub mod frozen;
pub mod hypervisor;
mod identity;
pub mod images;
pub mod metrics;
pub mod persistent_disks;
mod promotions;
mod pulls;
pub mod release;
pub mod retention;
pub mod snapshot_leases;
pub mod sources;
pub mod targets;
mod totals;
pub mod wake;
