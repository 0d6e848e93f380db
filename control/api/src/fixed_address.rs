//! A fixed IPv4 address of a machine's network card. Its guest gets the address on the seed disk, and asks no DHCP server.

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::problem::{Problem, ProblemKind};

/// The most DNS servers: guests use no more.
const DNS_MAX: usize = 3;

/// A fixed IPv4 address of a machine's network card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FixedAddress {
    /// The address.
    #[schema(value_type = String)]
    pub ip: Ipv4Addr,
    /// The length of the network's prefix: 1 to 30.
    pub prefix: u8,
    /// The router of the network. Absent: the guest reaches only its own network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub gateway: Option<Ipv4Addr>,
    /// The DNS servers, 3 at most.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub dns: Vec<Ipv4Addr>,
}

fn invalid(message: String) -> Problem {
    Problem::new(ProblemKind::Invalid, message)
}

/// Whether a host may have the address.
fn is_unicast(ip: Ipv4Addr) -> bool {
    matches!(ip.octets(), [1..=126 | 128..=223, ..])
}

/// Parses an IPv4 address.
pub(crate) fn parse_ip(text: &str) -> Result<Ipv4Addr, Problem> {
    text.parse().map_err(|_| invalid(format!("'{}' is not an IPv4 address", text.escape_debug())))
}

impl FixedAddress {
    /// Parses an address with the length of its network's prefix, such as `10.1.2.31/24`.
    pub fn parse(text: &str) -> Result<Self, Problem> {
        let wrong = || {
            let message = format!("'{}' is not an IPv4 address with a prefix length", text.escape_debug());
            invalid(message).advise("write for instance 10.1.2.31/24")
        };
        let (ip, prefix) = text.split_once('/').ok_or_else(wrong)?;
        let ip: Ipv4Addr = ip.parse().map_err(|_| wrong())?;
        let prefix: u8 = prefix.parse().map_err(|_| wrong())?;
        Ok(Self { ip, prefix, gateway: None, dns: Vec::new() })
    }

    /// Fails if no machine can have the address, or if the gateway or a DNS server is not possible with it.
    pub fn check(&self) -> Result<(), Problem> {
        let (ip, prefix) = (self.ip, self.prefix);
        if !(1..=30).contains(&prefix) {
            return Err(invalid(format!("the prefix length of {ip}/{prefix} is not 1 to 30")));
        }
        let host_bits = u32::MAX >> prefix;
        let network = |ip: Ipv4Addr| u32::from(ip) & !host_bits;
        // All other bits 0 is the network itself, and all 1 is every host of it.
        let is_host = |ip: Ipv4Addr| is_unicast(ip) && ![0, host_bits].contains(&(u32::from(ip) & host_bits));
        if !is_host(ip) {
            return Err(invalid(format!("no machine can have the address {ip}/{prefix}")));
        }
        if let Some(gateway) = self.gateway
            && (!is_host(gateway) || network(gateway) != network(ip) || gateway == ip)
        {
            let why = format!("the gateway {gateway} is not another host of the network of {ip}/{prefix}");
            return Err(invalid(why));
        }
        if let Some(dns) = self.dns.iter().find(|dns| !is_unicast(**dns)) {
            return Err(invalid(format!("{dns} is not the address of a DNS server")));
        }
        match self.dns.len() {
            0..=DNS_MAX => Ok(()),
            count => Err(invalid(format!("there are {count} DNS servers, and {DNS_MAX} are the most"))),
        }
    }

    /// As text in the database.
    pub fn to_text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Parses the output of [`FixedAddress::to_text`].
    pub fn from_text(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }
}

impl std::fmt::Display for FixedAddress {
    /// As text: `10.1.2.31/24, gateway 10.1.2.1, DNS 10.1.2.2 10.1.2.3`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix)?;
        if let Some(gateway) = self.gateway {
            write!(f, ", gateway {gateway}")?;
        }
        for (at, dns) in self.dns.iter().enumerate() {
            let before = if at == 0 { ", DNS " } else { " " };
            write!(f, "{before}{dns}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str, gateway: &str, dns: &[&str]) -> FixedAddress {
        let gateway = (!gateway.is_empty()).then(|| parse_ip(gateway).unwrap());
        let dns = dns.iter().map(|dns| parse_ip(dns).unwrap()).collect();
        FixedAddress { gateway, dns, ..FixedAddress::parse(text).unwrap() }
    }

    #[test]
    fn addresses_are_read_and_stored() {
        let whole = address("10.1.2.31/24", "10.1.2.1", &["10.1.2.2", "9.9.9.9"]);
        assert!(whole.check().is_ok());
        assert_eq!(whole.to_string(), "10.1.2.31/24, gateway 10.1.2.1, DNS 10.1.2.2 9.9.9.9");
        let plain = address("192.168.0.1/30", "", &[]);
        assert!(plain.check().is_ok());
        assert_eq!(plain.to_string(), "192.168.0.1/30");
        for address in [whole, plain] {
            assert_eq!(FixedAddress::from_text(&address.to_text()), Some(address));
        }
        for text in ["", "10.1.2.31", "10.1.2/24", "10.1.2.31/", "10.1.2.31/x", "10.1.2.31/300", "::1/64"] {
            assert!(FixedAddress::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn addresses_that_no_machine_can_have_are_refused() {
        for (text, gateway, dns, why) in [
            ("10.1.2.31/0", "", "", "prefix length"),
            ("10.1.2.31/31", "", "", "prefix length"),
            ("10.1.2.0/24", "", "", "no machine"),
            ("10.1.2.255/24", "", "", "no machine"),
            ("127.0.0.1/8", "", "", "no machine"),
            ("224.0.0.5/8", "", "", "no machine"),
            ("10.1.2.31/24", "10.1.3.1", "", "the gateway 10.1.3.1"),
            ("10.1.2.31/24", "10.1.2.31", "", "the gateway 10.1.2.31"),
            ("10.1.2.31/24", "10.1.2.255", "", "the gateway 10.1.2.255"),
            ("10.1.2.31/24", "", "0.0.0.0", "0.0.0.0 is not the address of a DNS server"),
            ("10.1.2.31/24", "", "1.1.1.1 1.1.1.2 1.1.1.3 1.1.1.4", "4 DNS servers"),
        ] {
            let dns: Vec<&str> = dns.split_whitespace().collect();
            let refused = address(text, gateway, &dns).check().unwrap_err();
            assert!(refused.kind == ProblemKind::Invalid && refused.message.contains(why), "{refused}");
        }
    }
}
