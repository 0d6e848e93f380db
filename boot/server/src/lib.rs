//! The boot server: DHCP answers beside the site's own server or in its place, TFTP for loaders, HTTP for scripts, kernels and
//! settings.
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
//! - Only machines that [`Targets`] knows get an answer. Each unknown machine is logged once.
//! - A token for settings is valid for one use, by the address that fetched the script, within [`tokens::TOKEN_LIFE`].
//! - It listens on one interface only.
//! - A lease is in its file before it is confirmed.
//!
//! # Limits
//! [`tftp::TRANSFERS_MAX`] transfers, [`tftp::TRANSFERS_OF_ADDRESS_MAX`] of one address; [`http::CONNECTIONS_MAX`]
//! connections; [`dhcp::UNKNOWN_MAX`] unknown machines are remembered, [`tokens::TOKENS_MAX`] tokens;
//! [`leases::PROBES_MAX`] addresses are probed at a time.
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

pub use error::BootError;
pub use headwater_boot_script::medium;
pub use headwater_dhcp::{Mac, Subnet, SubnetError, Subnets};
pub use leases::AddressOptions;
pub use loaders::{Loaders, Uefi};
pub use server::{BootServer, Options, Ports};
pub use targets::{Artefact, Boot, Known, Targets};
