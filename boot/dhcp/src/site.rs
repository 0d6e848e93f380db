//! Generates configuration for the DHCP server of a site. That server then names the loaders itself, and no proxy
//! DHCP is needed.
//!
//! | client | gets |
//! |---|---|
//! | iPXE (option 175) | the URL of its script; otherwise iPXE would load itself again and again |
//! | architecture 0 | iPXE for BIOS, by TFTP |
//! | architectures 7 and 9 | the loader for UEFI, by TFTP |
//! | architecture 16, class HTTPClient | the URL of the loader for UEFI, and the class HTTPClient in the answer |

use crate::decide::Server;

/// A DHCP server product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Product {
    /// ISC DHCP (`dhcpd.conf`).
    Isc,
    /// Kea (`kea-dhcp4.conf`).
    Kea,
    /// dnsmasq.
    Dnsmasq,
    /// The DHCP server of Windows, configured by PowerShell.
    Windows,
}

/// The text to add to the configuration of a DHCP server.
pub fn configuration(product: Product, server: &Server) -> String {
    let values = Values {
        server: server.address.to_string(),
        bios: server.bios_loader.clone(),
        efi: server.efi_loader.clone(),
        http: server.loader_url(),
        // iPXE replaces the variable by the hardware address of the card that it boots from.
        script: format!("http://{}:{}/b/${{netX/mac:hexhyp}}/boot.ipxe", server.address, server.http_port),
    };
    match product {
        Product::Isc => values.isc(),
        Product::Kea => values.kea(),
        Product::Dnsmasq => values.dnsmasq(),
        Product::Windows => values.windows(),
    }
}

struct Values {
    server: String,
    bios: String,
    efi: String,
    http: String,
    script: String,
}

impl Values {
    fn dnsmasq(&self) -> String {
        let Self { server, bios, efi, http, script } = self;
        format!(
            "# Boot from headwater at {server}: a file for conf-dir= of dnsmasq\n\
             dhcp-match=set:headwater-ipxe,175\n\
             dhcp-match=set:headwater-bios,option:client-arch,0\n\
             dhcp-match=set:headwater-efi,option:client-arch,7\n\
             dhcp-match=set:headwater-efi,option:client-arch,9\n\
             dhcp-match=set:headwater-http,option:client-arch,16\n\
             dhcp-boot=tag:headwater-ipxe,{script}\n\
             dhcp-boot=tag:!headwater-ipxe,tag:headwater-bios,{bios},,{server}\n\
             dhcp-boot=tag:!headwater-ipxe,tag:headwater-efi,{efi},,{server}\n\
             dhcp-boot=tag:!headwater-ipxe,tag:headwater-http,{http}\n\
             dhcp-option-force=tag:!headwater-ipxe,tag:headwater-http,60,HTTPClient\n"
        )
    }

    fn isc(&self) -> String {
        let Self { server, bios, efi, http, script } = self;
        format!(
            "# Boot from headwater at {server}: for dhcpd.conf, outside of all subnets\n\
             option headwater-arch code 93 = string;\n\
             option headwater-ipxe code 175 = string;\n\
             if exists headwater-ipxe {{\n\
             \x20   filename \"{script}\";\n\
             }} elsif option headwater-arch = 00:00 {{\n\
             \x20   next-server {server};\n\
             \x20   filename \"{bios}\";\n\
             }} elsif option headwater-arch = 00:07 or option headwater-arch = 00:09 {{\n\
             \x20   next-server {server};\n\
             \x20   filename \"{efi}\";\n\
             }} elsif option headwater-arch = 00:10 {{\n\
             \x20   option vendor-class-identifier \"HTTPClient\";\n\
             \x20   filename \"{http}\";\n\
             }}\n"
        )
    }

    fn kea(&self) -> String {
        let Self { server, bios, efi, http, script } = self;
        format!(
            "// Boot from headwater at {server}: for \"Dhcp4\" of kea-dhcp4.conf\n\
             \"client-classes\": [\n\
             \x20   {{ \"name\": \"headwater-ipxe\", \"test\": \"option[175].exists\",\n\
             \x20     \"boot-file-name\": \"{script}\" }},\n\
             \x20   {{ \"name\": \"headwater-bios\", \"test\": \"not option[175].exists and option[93].hex == 0x0000\",\n\
             \x20     \"next-server\": \"{server}\", \"boot-file-name\": \"{bios}\" }},\n\
             \x20   {{ \"name\": \"headwater-efi\",\n\
             \x20     \"test\": \"not option[175].exists and (option[93].hex == 0x0007 or option[93].hex == 0x0009)\",\n\
             \x20     \"next-server\": \"{server}\", \"boot-file-name\": \"{efi}\" }},\n\
             \x20   {{ \"name\": \"headwater-http\", \"test\": \"not option[175].exists and option[93].hex == 0x0010\",\n\
             \x20     \"option-data\": [ {{ \"name\": \"vendor-class-identifier\", \"data\": \"HTTPClient\", \"always-send\": true }} ],\n\
             \x20     \"boot-file-name\": \"{http}\" }}\n\
             ],\n"
        )
    }

    fn windows(&self) -> String {
        let Self { server, bios, efi, http, script } = self;
        let class = |name: &str, kind: &str, data: &str| {
            format!("Add-DhcpServerv4Class -Name 'Headwater {name}' -Type {kind} -Data '{data}'\n")
        };
        let policy = |name: &str, condition: &str, options: &str| {
            format!("Add-DhcpServerv4Policy -Name 'Headwater {name}' {condition}\n{options}")
        };
        let value = |name: &str, option: u8, value: &str| {
            format!(
                "Set-DhcpServerv4OptionValue -PolicyName 'Headwater {name}' -OptionId {option} -Value '{value}'\n"
            )
        };
        let firmware = |name: &str, file: &str| {
            let condition =
                format!("-Condition AND -VendorClass EQ,'Headwater {name}*' -UserClass NE,'Headwater iPXE*'");
            policy(name, &condition, &(value(name, 66, server) + &value(name, 67, file)))
        };
        let mut text = format!(
            "# Boot from headwater at {server}: for PowerShell as administrator of the DHCP server\n"
        );
        text += &class("iPXE", "User", "iPXE");
        text += &class("BIOS", "Vendor", "PXEClient:Arch:00000");
        text += &class("UEFI 7", "Vendor", "PXEClient:Arch:00007");
        text += &class("UEFI 9", "Vendor", "PXEClient:Arch:00009");
        text += &class("UEFI HTTP", "Vendor", "HTTPClient:Arch:00016");
        let is_ipxe = "-Condition OR -UserClass EQ,'Headwater iPXE*'";
        text += &policy("iPXE", is_ipxe, &value("iPXE", 67, script));
        text += &firmware("BIOS", bios);
        text += &firmware("UEFI 7", efi);
        text += &firmware("UEFI 9", efi);
        text += &firmware("UEFI HTTP", http);
        text += &format!(
            "if (-not (Get-DhcpServerv4OptionDefinition -OptionId 60 -ErrorAction SilentlyContinue)) {{\n\
             \x20   Add-DhcpServerv4OptionDefinition -OptionId 60 -Name 'Class' -Type String\n\
             }}\n{}",
            value("UEFI HTTP", 60, "HTTPClient")
        );
        text
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn each_product_names_all_loaders_the_script_and_the_server() {
        let server = Server {
            address: Ipv4Addr::new(10, 77, 0, 2),
            http_port: 8069,
            bios_loader: "undionly.kpxe".into(),
            efi_loader: "ipxe.efi".into(),
        };
        for product in [Product::Isc, Product::Kea, Product::Dnsmasq, Product::Windows] {
            let text = configuration(product, &server);
            for part in [
                "10.77.0.2",
                "undionly.kpxe",
                "http://10.77.0.2:8069/l/ipxe.efi",
                "http://10.77.0.2:8069/b/${netX/mac:hexhyp}/boot.ipxe",
                "HTTPClient",
            ] {
                assert!(text.contains(part), "{product:?} has no {part}: {text}");
            }
        }
    }
}
