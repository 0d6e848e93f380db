//! `headwater boot`: prepares a site for machines that boot from the network. Prints options for its DHCP server;
//! `boot_media.rs` writes USB sticks. The boot server itself is a part of `headwater serve`.

use std::net::Ipv4Addr;

use headwater_boot_server::loaders::{BIOS_NAME, EFI_NAME};
use headwater_boot_server::site::{self, Server};
use serde_json::json;

use crate::cli::{BootCommand, BootOptionsArgs, Product};
use crate::cmd::boot_media;
use crate::failure::invalid;
use crate::show;

/// Runs a command.
pub fn run(command: &BootCommand, json: bool) -> anyhow::Result<u8> {
    match command {
        BootCommand::Options(args) => options(args, json)?,
        BootCommand::Media(args) => boot_media::run(args, json)?,
    }
    Ok(0)
}

/// Fails for an address that machines cannot reach.
pub fn check_server(address: Ipv4Addr) -> anyhow::Result<()> {
    if address.is_unspecified() || address.is_broadcast() || address.is_multicast() || address.is_loopback() {
        return Err(invalid(format!(
            "--server {address} is not an address that machines can reach: give that of the boot server in their network"
        )));
    }
    Ok(())
}

fn options(args: &BootOptionsArgs, json: bool) -> anyhow::Result<()> {
    let address = args.server;
    check_server(address)?;
    let server = Server {
        address,
        http_port: args.http,
        bios_loader: BIOS_NAME.to_owned(),
        efi_loader: EFI_NAME.to_owned(),
    };
    let product = match args.product {
        Product::Isc => site::Product::Isc,
        Product::Kea => site::Product::Kea,
        Product::Dnsmasq => site::Product::Dnsmasq,
        Product::Windows => site::Product::Windows,
    };
    let text = site::configuration(product, &server);
    show::if_read(match json {
        true => show::json(&json!({ "configuration": text })),
        false => show::bytes(text.as_bytes()),
    })
}
