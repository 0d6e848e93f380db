//! Reads the file of `--boot-dhcp`, with the networks in which the boot server assigns addresses.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::path::Path;

use headwater_boot_server::{Mac, Subnet, Subnets};
use serde::Deserialize;

use crate::failure::invalid;

/// The default duration of a lease: 12 hours.
const LEASE_S: u32 = 12 * 3600;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    network: Vec<Network>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Network {
    address: String,
    range: Option<[Ipv4Addr; 2]>,
    router: Option<Ipv4Addr>,
    #[serde(default)]
    dns: Vec<Ipv4Addr>,
    domain: Option<String>,
    lease_seconds: Option<u32>,
    #[serde(default)]
    fixed: HashMap<String, Ipv4Addr>,
}

/// Reads the file.
pub fn read(path: &Path) -> anyhow::Result<Subnets> {
    let failed = |why: String| invalid(format!("cannot use the networks in {}: {why}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|e| failed(e.to_string()))?;
    parse(&text).map_err(failed)
}

fn parse(text: &str) -> Result<Subnets, String> {
    let table: Table = toml::from_str(text).map_err(|e| e.to_string().trim_end().to_owned())?;
    let subnets: Result<Vec<Subnet>, String> = table.network.into_iter().map(subnet).collect();
    Subnets::new(subnets?).map_err(|e| e.to_string())
}

fn subnet(network: Network) -> Result<Subnet, String> {
    let wrong =
        || format!("'{}' is not a network; write for instance 10.77.0.0/24", network.address.escape_debug());
    let (first, prefix) = network.address.split_once('/').ok_or_else(wrong)?;
    let fixed = network.fixed.iter().map(|(card, address)| Ok((card.parse::<Mac>()?, *address)));
    let fixed = fixed.collect::<Result<HashMap<Mac, Ipv4Addr>, String>>()?;
    if fixed.len() < network.fixed.len() {
        return Err(format!("the network {} has two fixed addresses for a card", network.address));
    }
    Ok(Subnet {
        network: first.parse().map_err(|_| wrong())?,
        prefix: prefix.parse().map_err(|_| wrong())?,
        range: network.range.map(|[first, last]| (first, last)),
        router: network.router,
        dns: network.dns,
        domain: network.domain,
        lease_s: network.lease_seconds.unwrap_or(LEASE_S),
        fixed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_ranges_and_fixed_addresses() {
        let subnets = parse(
            "[[network]]\naddress = '10.77.0.0/24'\nrange = ['10.77.0.100', '10.77.0.199']\nrouter = '10.77.0.1'\n\
             dns = ['10.77.0.1']\n[network.fixed]\n'52:54:00:77:00:01' = '10.77.0.50'\n\
             [[network]]\naddress = '10.78.0.0/24'\nlease_seconds = 600\n",
        )
        .unwrap();
        let found: Vec<_> =
            subnets.iter().map(|subnet| (subnet.name(), subnet.lease_s, subnet.fixed.len())).collect();
        assert_eq!(found, [("10.77.0.0/24".into(), 43_200, 1), ("10.78.0.0/24".into(), 600, 0)]);
    }

    #[test]
    fn a_wrong_table_is_refused_with_its_reason() {
        for (text, expected) in [
            ("", "missing field `network`"),
            ("network = []", "the table of networks is empty"),
            ("[[network]]\naddress = '10.77.0.0'", "'10.77.0.0' is not a network"),
            ("[[network]]\naddress = '10.77.0.9/24'", "10.77.0.9/24 is not a network"),
            ("[[network]]\naddress = '10.77.0.0/24'\nrage = 1", "unknown field `rage`"),
            ("[[network]]\naddress = '10.77.0.0/24'\n[network.fixed]\nx = '10.77.0.5'", "'x' is not a hard"),
            (
                "[[network]]\naddress = '10.77.0.0/24'\n[network.fixed]\n'02:00:00:00:00:0a' = '10.77.0.5'\n\
                 '02-00-00-00-00-0A' = '10.77.0.6'",
                "two fixed addresses for a card",
            ),
        ] {
            let why = parse(text).unwrap_err();
            assert!(why.contains(expected), "{text}: {why}");
        }
    }
}
