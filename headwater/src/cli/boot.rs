//! Flags of `headwater boot`.

use std::net::Ipv4Addr;

use clap::{Args, Subcommand, ValueEnum};

/// `headwater boot ...`.
#[derive(Debug, Subcommand)]
pub enum BootCommand {
    /// Print what to add to the configuration of a site's DHCP server, so that it names the loaders of 'headwater serve --boot' itself
    Options(BootOptionsArgs),
}

/// `headwater boot options`.
#[derive(Debug, Args)]
pub struct BootOptionsArgs {
    /// The DHCP server
    #[arg(long = "for", value_name = "PRODUCT", value_enum)]
    pub product: Product,
    /// The address of the boot server in the machines' network
    #[arg(long, value_name = "ADDRESS")]
    pub server: Ipv4Addr,
    /// Its port of scripts, kernels and settings, as --boot-http of 'headwater serve'
    #[arg(long, value_name = "PORT", default_value_t = 80, value_parser = clap::value_parser!(u16).range(1..))]
    pub http: u16,
}

/// A DHCP server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Product {
    /// ISC DHCP: for dhcpd.conf
    Isc,
    /// Kea: for "Dhcp4" of kea-dhcp4.conf
    Kea,
    /// dnsmasq: a file of its own
    Dnsmasq,
    /// The DHCP server of Windows: PowerShell
    Windows,
}
