//! Subcommands and options of `headwater boot`, which prepares a site for machines that boot from the network:
//! options for a DHCP server, and images for USB sticks. (The boot server itself is a part of `headwater serve`.)

use std::net::Ipv4Addr;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum, ValueHint};

/// `headwater boot ...`.
#[derive(Debug, Subcommand)]
pub enum BootCommand {
    /// Print what to add to the configuration of a site's DHCP server so that it announces the boot loaders of
    /// 'headwater serve --boot'
    Options(BootOptionsArgs),
    /// Write an image for a USB stick that boots registered machines with BIOS, UEFI and Secure Boot, without changes
    /// to DHCP (not yet tried together with headwater itself)
    Media(BootMediaArgs),
}

/// `headwater boot media`.
#[derive(Debug, Args)]
pub struct BootMediaArgs {
    /// The image, a new file
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub out: PathBuf,
    /// The addresses of boot servers, which are tried in turn
    #[arg(long, value_name = "ADDRESS,..", required = true, value_delimiter = ',')]
    pub server: Vec<Ipv4Addr>,
    /// Their port for scripts, kernels and settings: --boot-http of 'headwater serve'
    #[arg(long, value_name = "PORT", default_value_t = 80, value_parser = clap::value_parser!(u16).range(1..))]
    pub http: u16,
    /// Take shimx64.efi.signed and grubnetx64.efi.signed from this directory [default: those of the packages shim-signed and
    /// grub-efi-amd64-signed]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub signed: Option<PathBuf>,
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
    /// Its port for scripts, kernels and settings: --boot-http of 'headwater serve'
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
    /// dnsmasq: a separate configuration file
    Dnsmasq,
    /// The DHCP server of Windows: PowerShell
    Windows,
}
