//! The networks in which a DHCP server gives addresses: ranges, fixed addresses, and options for clients.

use std::collections::{HashMap, HashSet};
use std::net::Ipv4Addr;
use std::sync::Arc;

use crate::mac::Mac;

/// The most addresses in a range.
pub const RANGE_MAX: u32 = 65_536;
/// The shortest lease, in seconds. Clients renew after half of the lease time.
pub const LEASE_MIN_S: u32 = 60;
/// The longest lease, in seconds: 30 days.
pub const LEASE_MAX_S: u32 = 30 * 24 * 3600;

/// A network, as an administrator configures it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subnet {
    /// Its first address, such as 10.77.0.0.
    pub network: Ipv4Addr,
    /// Length of the network prefix, in bits.
    pub prefix: u8,
    /// The first and the last address for any client.
    pub range: Option<(Ipv4Addr, Ipv4Addr)>,
    /// The default gateway.
    pub router: Option<Ipv4Addr>,
    /// Name servers.
    pub dns: Vec<Ipv4Addr>,
    /// The domain name of the clients.
    pub domain: Option<String>,
    /// How long a lease lasts, in seconds.
    pub lease_s: u32,
    /// Fixed addresses of cards, inside or outside the range. No other card gets these addresses.
    pub fixed: HashMap<Mac, Ipv4Addr>,
}

/// Why the configuration of the networks is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubnetError {
    /// Not the address of a network.
    #[error("{0}/{1} is not a network: write its first address and 8 to 30 bits, such as 10.77.0.0/24")]
    Network(Ipv4Addr, u8),
    /// Two networks have addresses in common.
    #[error("the networks {0} and {1} have addresses in common")]
    Overlap(String, String),
    /// An address is not one of the network's hosts.
    #[error("{what} {address} is not the address of a host in {network}")]
    Outside {
        /// What the address is for.
        what: &'static str,
        /// The address.
        address: Ipv4Addr,
        /// The network.
        network: String,
    },
    /// The range ends before it begins, or is too long.
    #[error("the range {0} to {1} has no addresses, or more than {RANGE_MAX}")]
    Range(Ipv4Addr, Ipv4Addr),
    /// Two cards have the same fixed address, or the router has it.
    #[error("the fixed address {0} of {1} is also that of another card or of the router")]
    Twice(Ipv4Addr, Mac),
    /// The lease time is out of bounds.
    #[error("a lease of {0} s is not possible; it must be {LEASE_MIN_S} to {LEASE_MAX_S} s")]
    Lease(u32),
    /// Not a domain name.
    #[error("'{0}' is not a domain; a domain has letters, digits, '-' and '.', at most 253 characters")]
    Domain(String),
    /// The table has no network.
    #[error("the table of networks is empty")]
    None,
}

impl Subnet {
    /// The network as `10.77.0.0/24`.
    pub fn name(&self) -> String {
        format!("{}/{}", self.network, self.prefix)
    }

    /// Its mask.
    pub fn mask(&self) -> Ipv4Addr {
        Ipv4Addr::from(self.mask_bits())
    }

    /// Whether the network contains an address.
    pub fn contains(&self, address: Ipv4Addr) -> bool {
        u32::from(address) & self.mask_bits() == u32::from(self.network)
    }

    fn mask_bits(&self) -> u32 {
        u32::MAX.checked_shl(32 - u32::from(self.prefix)).unwrap_or(0)
    }

    /// Whether a host may have the address: it is neither the first nor the last of the network.
    fn is_host(&self, address: Ipv4Addr) -> bool {
        let host = u32::from(address) & !self.mask_bits();
        self.contains(address) && host != 0 && host != !self.mask_bits()
    }

    fn check(&self) -> Result<(), SubnetError> {
        if !(8..=30).contains(&self.prefix) || !self.contains(self.network) {
            return Err(SubnetError::Network(self.network, self.prefix));
        }
        let host = |what, address| {
            let wrong = || SubnetError::Outside { what, address, network: self.name() };
            if self.is_host(address) { Ok(()) } else { Err(wrong()) }
        };
        if let Some((first, last)) = self.range {
            host("the first address of the range,", first)?;
            host("the last address of the range,", last)?;
            let more = u32::from(last).checked_sub(u32::from(first));
            more.filter(|more| *more < RANGE_MAX).ok_or(SubnetError::Range(first, last))?;
        }
        self.router.map_or(Ok(()), |router| host("the router", router))?;
        if !(LEASE_MIN_S..=LEASE_MAX_S).contains(&self.lease_s) {
            return Err(SubnetError::Lease(self.lease_s));
        }
        if let Some(domain) = self.domain.as_ref().filter(|domain| !is_domain(domain)) {
            return Err(SubnetError::Domain(domain.clone()));
        }
        let mut seen: HashSet<Ipv4Addr> = self.router.into_iter().collect();
        let mut fixed: Vec<_> = self.fixed.iter().collect();
        fixed.sort();
        for (mac, address) in fixed {
            host("the fixed address", *address)?;
            if !seen.insert(*address) {
                return Err(SubnetError::Twice(*address, *mac));
            }
        }
        Ok(())
    }
}

fn is_domain(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    !text.is_empty() && text.len() <= 253 && text.bytes().all(is_plain)
}

/// Valid networks that do not overlap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subnets(Vec<Arc<Subnet>>);

impl Subnets {
    /// Checks the networks.
    pub fn new(subnets: Vec<Subnet>) -> Result<Self, SubnetError> {
        if subnets.is_empty() {
            return Err(SubnetError::None);
        }
        for (at, subnet) in subnets.iter().enumerate() {
            subnet.check()?;
            let is_common =
                |other: &&Subnet| other.contains(subnet.network) || subnet.contains(other.network);
            if let Some(other) = subnets.iter().take(at).find(is_common) {
                return Err(SubnetError::Overlap(other.name(), subnet.name()));
            }
        }
        Ok(Self(subnets.into_iter().map(Arc::new).collect()))
    }

    /// The network that contains an address.
    pub fn of(&self, address: Ipv4Addr) -> Option<&Arc<Subnet>> {
        self.0.iter().find(|subnet| subnet.contains(address))
    }

    /// All networks.
    pub fn iter(&self) -> impl Iterator<Item = &Subnet> {
        self.0.iter().map(Arc::as_ref)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subnet() -> Subnet {
        let at = |last| Ipv4Addr::new(10, 77, 0, last);
        Subnet {
            network: at(0),
            prefix: 24,
            range: Some((at(100), at(199))),
            router: Some(at(1)),
            dns: vec![at(1)],
            domain: Some("lab.example".into()),
            lease_s: 3600,
            fixed: HashMap::from([(Mac([2, 0, 0, 0, 0, 1]), at(50))]),
        }
    }

    #[test]
    fn a_network_that_cannot_be_served_is_refused_with_its_reason() {
        let at = |last| Ipv4Addr::new(10, 77, 0, last);
        type Change<'a> = &'a dyn Fn(&mut Subnet);
        let refused = |change: Change<'_>| {
            let mut subnet = subnet();
            change(&mut subnet);
            Subnets::new(vec![subnet]).unwrap_err().to_string()
        };
        let table: [(&str, Change<'_>); 12] = [
            ("10.77.0.1/24 is not a network", &|s| s.network = at(1)),
            ("10.77.0.0/31 is not a network", &|s| s.prefix = 31),
            ("10.77.0.0/7 is not a network", &|s| s.prefix = 7),
            ("first address of the range, 10.77.0.0", &|s| s.range = Some((at(0), at(9)))),
            ("last address of the range, 10.77.0.255", &|s| s.range = Some((at(9), at(255)))),
            ("10.77.0.9 to 10.77.0.8", &|s| s.range = Some((at(9), at(8)))),
            ("the router 10.78.0.1 is not the address", &|s| s.router = Some(Ipv4Addr::new(10, 78, 0, 1))),
            ("a lease of 59 s", &|s| s.lease_s = 59),
            ("'a b' is not a domain", &|s| s.domain = Some("a b".into())),
            ("the fixed address 10.77.1.1", &|s| {
                s.fixed.insert(Mac([2; 6]), Ipv4Addr::new(10, 77, 1, 1));
            }),
            ("10.77.0.50 of 02:02", &|s| {
                s.fixed.insert(Mac([2; 6]), at(50));
            }),
            ("10.77.0.1 of 02:02", &|s| {
                s.fixed.insert(Mac([2; 6]), at(1));
            }),
        ];
        for (expected, change) in table {
            let why = refused(change);
            assert!(why.contains(expected), "{expected}: {why}");
        }
        assert_eq!(Subnets::new(Vec::new()), Err(SubnetError::None));
        let wide = Subnet { prefix: 16, range: None, ..subnet() };
        let common = Subnets::new(vec![subnet(), wide]).unwrap_err();
        assert_eq!(common, SubnetError::Overlap("10.77.0.0/24".into(), "10.77.0.0/16".into()));
    }

    #[test]
    fn an_address_is_found_in_its_network() {
        let other = Subnet {
            network: Ipv4Addr::new(10, 78, 0, 0),
            range: None,
            router: None,
            fixed: HashMap::new(),
            ..subnet()
        };
        let both = Subnets::new(vec![subnet(), other]).unwrap();
        let name = |address: [u8; 4]| both.of(address.into()).map(|subnet| subnet.name());
        assert_eq!(name([10, 77, 0, 9]).as_deref(), Some("10.77.0.0/24"));
        assert_eq!(name([10, 78, 0, 9]).as_deref(), Some("10.78.0.0/24"));
        assert_eq!(name([10, 79, 0, 9]), None);
        assert_eq!(both.iter().next().unwrap().mask(), Ipv4Addr::new(255, 255, 255, 0));
    }
}
