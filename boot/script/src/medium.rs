//! Boot loader configuration on removable media: each gets an address by DHCP, and asks the boot servers one after
//! the other for the machine's script.
//!
//! The site's DHCP server needs no boot options, because the medium contains the addresses of the boot servers.

use std::net::SocketAddrV4;

use crate::grub::device;
use crate::script::RETRY_S;

/// The number of network cards that are tried, because GRUB cannot list them.
const CARDS: u32 = 8;

/// The configuration of GRUB: `grub/grub.cfg`.
pub fn grub(servers: &[SocketAddrV4]) -> String {
    let cards: Vec<String> = (0..CARDS).map(|card| format!("$net_efinet{card}_dhcp_mac")).collect();
    let mut text = format!(
        "while true; do\n\
         \x20 echo \"headwater: looking for an address\"\n\
         \x20 if net_bootp; then\n\
         \x20   for mac in {}; do\n",
        cards.join(" ")
    );
    for server in servers {
        text += &format!(
            "\x20     echo \"headwater: asking {server} what $mac boots\"\n\
             \x20     configfile {}/b/$mac/grub.cfg\n",
            device(*server.ip(), server.port())
        );
    }
    text + &format!(
        "\x20   done\n\
         \x20 fi\n\
         \x20 echo \"headwater: trying again in {RETRY_S} s\"\n\
         \x20 sleep {RETRY_S}\n\
         done\n"
    )
}

/// The script of iPXE.
pub fn ipxe(servers: &[SocketAddrV4]) -> String {
    let mut text = "#!ipxe\n\
                    :again\n\
                    echo headwater: looking for an address\n\
                    dhcp || goto failed\n"
        .to_owned();
    for server in servers {
        text += &format!(
            "echo headwater: asking {server} what ${{netX/mac}} boots\n\
             chain http://{server}/b/${{netX/mac:hexhyp}}/boot.ipxe ||\n"
        );
    }
    text + &format!(
        ":failed\n\
         echo headwater: trying again in {RETRY_S} s\n\
         sleep {RETRY_S}\n\
         goto again\n"
    )
}

/// The configuration `syslinux.cfg` of the loader that starts iPXE on BIOS.
pub fn syslinux(ipxe: &str, script: &str) -> String {
    format!("SERIAL 0\nDEFAULT headwater\nLABEL headwater\n  LINUX /{ipxe}\n  INITRD /{script}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_server_is_asked_in_turn() {
        let servers = ["10.0.0.2:80".parse().unwrap(), "10.0.0.3:8069".parse().unwrap()];
        let text = grub(&servers);
        let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part}: {text}"));
        assert!(at("configfile (http,10.0.0.2)/b/$mac/") < at("configfile (http,10.0.0.3:8069)/b/$mac/"));
        assert!(text.contains("for mac in $net_efinet0_dhcp_mac $net_efinet1_dhcp_mac "), "{text}");
        let text = ipxe(&servers);
        let second = "chain http://10.0.0.3:8069/b/${netX/mac:hexhyp}/boot.ipxe ||\n:failed\n";
        assert!(text.contains(second), "{text}");
        assert!(syslinux("a", "b").contains("  LINUX /a\n  INITRD /b\n"));
    }
}
