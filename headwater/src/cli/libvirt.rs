//! Subcommands and options of `headwater libvirt`, which prints XML for domains of libvirt whose disks
//! `headwater export` serves.

use clap::{Args, Subcommand};
use headwater_block::size;

/// `headwater libvirt ...`.
#[derive(Debug, Subcommand)]
pub enum LibvirtCommand {
    /// Print the disk element of a domain: for 'virsh attach-device --config' and 'virsh edit'
    Disk(LibvirtDiskArgs),
    /// Print a small domain that boots from the disk: for 'virsh define'
    Domain(LibvirtDomainArgs),
}

/// `headwater libvirt disk`.
#[derive(Debug, Args)]
pub struct LibvirtDiskArgs {
    /// The address of the disk, as 'headwater export' prints it: vhost-user:PATH, or for a disk that is kept
    /// (--persistent) nbd+unix:///NAME?socket=PATH
    pub address: String,
    /// The disk's name in the domain: vda, vdb and so on
    #[arg(long, value_name = "NAME", default_value = "vda", value_parser = target)]
    pub target: String,
}

/// `headwater libvirt domain`.
#[derive(Debug, Args)]
pub struct LibvirtDomainArgs {
    /// The domain's name
    pub name: String,
    /// The address of its disk, as 'headwater export' prints it: vhost-user:PATH, or for a disk that is kept
    /// (--persistent) nbd+unix:///NAME?socket=PATH
    pub address: String,
    /// Its memory
    #[arg(long, value_name = "SIZE", default_value = "2G", value_parser = size::parse)]
    pub memory: u64,
    /// Its processors
    #[arg(long, value_name = "COUNT", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub cpus: u32,
    /// The network of libvirt that it is connected to, for instance default; if not given, it has no network card
    #[arg(long, value_name = "NAME", value_parser = network)]
    pub network: Option<String>,
    /// Emulate the processors, for a host without KVM
    #[arg(long)]
    pub emulated: bool,
}

/// Checks a name of a virtio disk.
fn target(text: &str) -> Result<String, String> {
    let letters = text.strip_prefix("vd").unwrap_or_default();
    let fits = (1..=2).contains(&letters.len()) && letters.bytes().all(|byte| byte.is_ascii_lowercase());
    if fits { Ok(text.to_owned()) } else { Err("it is not vda, vdb or so on".to_owned()) }
}

/// Checks a name of a network.
fn network(text: &str) -> Result<String, String> {
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let fits = (1..=63).contains(&text.len()) && text.bytes().all(is_good);
    if fits { Ok(text.to_owned()) } else { Err("1 to 63 letters, digits, '-', '_' and '.'".to_owned()) }
}
