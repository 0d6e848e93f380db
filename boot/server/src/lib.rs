//! The boot server: DHCP answers in addition to the site's own DHCP server or instead of it, TFTP for loaders, HTTP
//! for scripts, kernels and settings.
//!
//! ```text
//!   firmware --67, 4011--> dhcp ---+
//!            --69--------> tftp    +--> Targets (trait): known machines, and what each boots
//!   iPXE     --HTTP------> http ---+
//! ```
//! This is the only crate under `boot/` with sockets. `headwater-dhcp`, `headwater-tftp` and `headwater-boot-script`
//! decide how each packet is answered.
//!
//! # Guarantees
//! - Only machines that [`Targets`] knows get a boot file. Each unknown machine is logged once.
//! - A token for settings is valid for one use, by the address that fetched the script, within [`tokens::TOKEN_LIFE`].
//! - It listens on one interface only.
//! - A lease is written to its file before it is confirmed to the client.
//!
//! - [`tftp::TRANSFERS_MAX`] TFTP transfers at a time, [`tftp::TRANSFERS_OF_ADDRESS_MAX`] to one address
//! - [`http::CONNECTIONS_MAX`] HTTP connections
//! - [`dhcp::UNKNOWN_MAX`] unknown machines that are remembered, [`tokens::TOKENS_MAX`] unused tokens
//! - [`leases::PROBES_MAX`] probes of addresses at a time
//!
//! # Errors
//! [`BootError`] if the server cannot serve at all. A machine whose image cannot boot gets a script that says why.
//!
//! # Not here
//! Which machine boots what, HTTPS.
//!
//! Start reading at [`server`].

#![cfg_attr(
    not(test),
    warn(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::todo,
        clippy::unimplemented,
        clippy::indexing_slicing,
        clippy::string_slice,
        clippy::get_unwrap,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss
    )
)]

mod addresses;

pub mod dhcp;
pub mod efi;
pub mod error;
pub mod http;
pub mod interface;
mod lease_file;
pub mod leases;
pub mod loaders;
mod probe;
pub mod server;
pub mod site;
pub mod targets;
pub mod tftp;
pub mod tokens;
pub mod wake;

pub use error::BootError;
pub use headwater_boot_script::medium;
pub use headwater_dhcp::{Mac, Subnet, SubnetError, Subnets};
pub use leases::AddressOptions;
pub use loaders::{Loaders, Uefi};
pub use server::{BootServer, Options, Ports};
pub use targets::{Artefact, Boot, Known, Targets};
