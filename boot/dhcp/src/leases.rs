//! Leases of addresses, and the answers of a DHCP server (RFC 2131). Pure: packets, times and results of probes are
//! passed in.
//!
//! ```text
//!            DISCOVER                    no answer to the probe             REQUEST
//!   free ----------------> probing ----------------------------> offered -----------> bound --- expiry or RELEASE --> free
//!                             |  another host answers             |                   |
//!                             +----------------> declined <---------+---- DECLINE ------+          declined, offered: free after a while
//! ```
//!
//! | packet | answer |
//! |---|---|
//! | DISCOVER | OFFER of the first that applies: the card's fixed address; the address that the card has or had; the address it asks for; an address that no card has had |
//! | REQUEST with our server id | ACK; NAK if the address is not available |
//! | REQUEST with another server id | none; our offer is withdrawn |
//! | REQUEST after a restart of the client (no `ciaddr`) | ACK; NAK if the address is wrong; none for a client without a record |
//! | REQUEST to renew (`ciaddr`) | ACK, without a record only for a minute and if the address is free; NAK if it is wrong |
//! | DECLINE | none; the address is given to no client for [`DECLINED_S`] |
//! | RELEASE | none; the address is free, but other clients get it only if no other address is free |
//! | INFORM | ACK with options and no address |
//!
//! The hardware address identifies a client. A client identifier (option 61) is echoed and otherwise ignored: the
//! firmware, the loader and the system of one PC send different identifiers, and would occupy three addresses.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;

use crate::decide::destination;
use crate::mac::Mac;
use crate::packet::{MessageType, Packet, option};
use crate::subnet::{LEASE_MIN_S, Subnet, Subnets};

/// How long an offered address is reserved for its client, in seconds.
pub const OFFER_S: u64 = 60;
/// How long an address is given to no client after another host was found to use it, in seconds.
pub const DECLINED_S: u64 = 3600;

/// The state of an address. Each state has an end; then the address is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// A probe checks whether a host already uses the address.
    Probing,
    /// The address was offered to a client.
    Offered,
    /// The address is leased to a client.
    Bound,
    /// A host uses the address without a lease.
    Declined,
}

/// The state of one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The hardware address of the last client.
    pub mac: Mac,
    /// Its state.
    pub state: State,
    /// The end of the state, in seconds since 1970.
    pub until_s: u64,
}

/// An entry that must survive a restart: [`State::Bound`] or [`State::Declined`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The address.
    pub address: Ipv4Addr,
    /// Its entry.
    pub entry: Entry,
}

/// The result of handling a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// No answer.
    Silent(Silence),
    /// The caller must probe whether a host uses this address, and then call [`Leases::probed`].
    Probe(Ipv4Addr),
    /// The answer, and its destination. The caller must store the changes ([`Leases::take_changes`]) before it sends
    /// the answer.
    Answer(Box<Packet>, SocketAddrV4),
}

/// Why a packet gets no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Silence {
    /// The client's network is not in the table.
    Network,
    /// The packet is not a client's request.
    NotForUs,
    /// The packet concerns an address of another server.
    OtherServer,
    /// The server has no record of the client.
    NoRecord,
    /// The address is being probed.
    Probing,
    /// All addresses are in use.
    Full,
    /// The packet was handled: RELEASE and DECLINE have no answer.
    Noted,
}

/// The addresses of all networks.
#[derive(Debug)]
pub struct Leases {
    subnets: Subnets,
    server: Ipv4Addr,
    entries: HashMap<Ipv4Addr, Entry>,
    /// The newest address of each card in each network; the key has the network's first address. The item is stale if
    /// the address's entry names another card.
    clients: HashMap<(Mac, Ipv4Addr), Ipv4Addr>,
    /// Fixed addresses with the cards that they are reserved for.
    reserved: HashMap<Ipv4Addr, Mac>,
    changes: Vec<Record>,
}

impl Leases {
    /// An empty table. `server` is the server's address in answers.
    pub fn new(subnets: Subnets, server: Ipv4Addr) -> Self {
        let fixed = subnets.iter().flat_map(|subnet| subnet.fixed.iter());
        let reserved = fixed.map(|(mac, address)| (*address, *mac)).collect();
        let (entries, clients, changes) = (HashMap::new(), HashMap::new(), Vec::new());
        Self { subnets, server, entries, clients, reserved, changes }
    }

    /// Restores a record of an earlier run. Returns `false` if no configured network contains the address.
    pub fn restore(&mut self, record: Record) -> bool {
        let Some(subnet) = self.subnets.of(record.address) else { return false };
        let key = (record.entry.mac, subnet.network);
        if record.entry.state == State::Declined {
            self.clients.remove(&key);
        } else {
            self.clients.insert(key, record.address);
        }
        self.entries.insert(record.address, record.entry);
        true
    }

    /// All records that must survive a restart.
    pub fn records(&self) -> Vec<Record> {
        let kept = self.entries.iter().filter(|(_, entry)| is_kept(entry));
        let mut records: Vec<Record> =
            kept.map(|(address, entry)| Record { address: *address, entry: *entry }).collect();
        // The newest record of a card comes last, because the last one wins when they are read.
        let is_newest = |record: &Record| {
            let subnet = self.subnets.of(record.address);
            subnet.is_some_and(|subnet| self.address_of(record.entry.mac, subnet) == Some(record.address))
        };
        records.sort_by_cached_key(|record| (is_newest(record), record.entry.until_s, record.address));
        records
    }

    /// The records that have changed since the last call.
    pub fn take_changes(&mut self) -> Vec<Record> {
        std::mem::take(&mut self.changes)
    }

    /// Handles a packet that arrived at port 67.
    pub fn handle(&mut self, asked: &Packet, now_s: u64) -> Outcome {
        let Some(subnet) = self.subnet_of(asked) else { return Outcome::Silent(Silence::Network) };
        match asked.message_type() {
            _ if asked.is_reply => Outcome::Silent(Silence::NotForUs),
            Some(MessageType::Discover) => self.discover(asked, &subnet, now_s),
            Some(MessageType::Request) => self.request(asked, &subnet, now_s),
            Some(MessageType::Decline) => {
                self.decline(asked, &subnet, now_s);
                Outcome::Silent(Silence::Noted)
            }
            Some(MessageType::Release) => {
                let is_its_own = |entry: &Entry| entry.mac == asked.mac && entry.state == State::Bound;
                if self.entries.get(&asked.ciaddr).is_some_and(is_its_own) {
                    self.free(asked.ciaddr, now_s);
                }
                Outcome::Silent(Silence::Noted)
            }
            Some(MessageType::Inform) if subnet.contains(asked.ciaddr) => {
                self.answer(asked, &subnet, MessageType::Ack, None)
            }
            _ => Outcome::Silent(Silence::NotForUs),
        }
    }

    /// Continues a DISCOVER after the probe of its address.
    pub fn probed(&mut self, asked: &Packet, address: Ipv4Addr, is_in_use: bool, now_s: u64) -> Outcome {
        let Some(subnet) = self.subnet_of(asked) else { return Outcome::Silent(Silence::Network) };
        let entry = self.entries.get(&address).copied();
        if entry.is_none_or(|entry| entry.mac != asked.mac || entry.state != State::Probing) {
            return Outcome::Silent(Silence::NotForUs);
        }
        if is_in_use {
            self.set_declined(asked.mac, address, &subnet, now_s);
            return self.discover(asked, &subnet, now_s);
        }
        self.set(address, Entry { mac: asked.mac, state: State::Offered, until_s: now_s + OFFER_S });
        self.answer(asked, &subnet, MessageType::Offer, Some((address, subnet.lease_s)))
    }

    /// The network of a client: the network of its relay, of its present address, or the server's own.
    fn subnet_of(&self, asked: &Packet) -> Option<Arc<Subnet>> {
        if !asked.giaddr.is_unspecified() {
            return self.subnets.of(asked.giaddr).cloned();
        }
        self.subnets.of(asked.ciaddr).or_else(|| self.subnets.of(self.server)).cloned()
    }

    fn discover(&mut self, asked: &Packet, subnet: &Subnet, now_s: u64) -> Outcome {
        let Some(address) = self.choose(asked, subnet, now_s) else {
            return Outcome::Silent(Silence::Full);
        };
        let entry =
            self.entries.get(&address).filter(|entry| entry.mac == asked.mac && entry.until_s > now_s);
        match entry.map(|entry| entry.state) {
            Some(State::Probing) => Outcome::Silent(Silence::Probing),
            // No probe is needed: the client itself would answer it.
            Some(State::Bound | State::Offered) => {
                self.answer(asked, subnet, MessageType::Offer, Some((address, subnet.lease_s)))
            }
            _ if self.fixed_address(asked.mac, subnet, now_s) == Some(address) => {
                self.answer(asked, subnet, MessageType::Offer, Some((address, subnet.lease_s)))
            }
            _ => {
                self.set(address, Entry { mac: asked.mac, state: State::Probing, until_s: now_s + OFFER_S });
                self.clients.insert((asked.mac, subnet.network), address);
                Outcome::Probe(address)
            }
        }
    }

    fn request(&mut self, asked: &Packet, subnet: &Subnet, now_s: u64) -> Outcome {
        let server = asked.address(option::SERVER_ID);
        if server.is_some_and(|server| server != self.server) {
            self.withdraw(asked.mac, subnet, now_s);
            return Outcome::Silent(Silence::OtherServer);
        }
        let is_renewal = !asked.ciaddr.is_unspecified();
        let wanted = asked.address(option::REQUESTED_ADDRESS).filter(|_| !is_renewal).unwrap_or(asked.ciaddr);
        let entry = self.entries.get(&wanted).copied();
        let is_its_own = |entry: &Entry| entry.mac == asked.mac && entry.state != State::Declined;
        let is_fixed = self.fixed_address(asked.mac, subnet, now_s).map(|fixed| fixed == wanted);
        let is_given = is_fixed.unwrap_or_else(|| {
            self.is_givable(wanted, asked.mac, subnet) && entry.as_ref().is_some_and(is_its_own)
        });
        if is_given {
            return self.bind(asked, subnet, wanted, (now_s, subnet.lease_s));
        }
        let is_free = is_fixed.is_none() && self.is_free(wanted, asked.mac, subnet, now_s);
        let record = self.address_of(asked.mac, subnet);
        if server.is_some() {
            // The offer was made before this server restarted.
            let is_forgotten = record.is_none() && is_free;
            return match is_forgotten {
                true => self.bind(asked, subnet, wanted, (now_s, subnet.lease_s)),
                false => self.refuse(asked),
            };
        }
        if is_renewal && is_free {
            // Nobody was asked whether somebody uses it. A client that is there renews again after half of this time.
            return self.bind(asked, subnet, wanted, (now_s, subnet.lease_s.min(LEASE_MIN_S)));
        }
        // The address may belong to another server, because this server does not give it to clients.
        let may_be_others = subnet.contains(wanted) && !self.is_givable(wanted, asked.mac, subnet);
        let is_unknown = record.is_none() && is_fixed.is_none();
        if is_unknown && (may_be_others || (is_free && !is_renewal)) {
            return Outcome::Silent(Silence::NoRecord);
        }
        self.refuse(asked)
    }

    fn bind(
        &mut self,
        asked: &Packet,
        subnet: &Subnet,
        address: Ipv4Addr,
        (now_s, lease_s): (u64, u32),
    ) -> Outcome {
        let earlier = self.address_of(asked.mac, subnet).filter(|earlier| *earlier != address);
        if let Some(earlier) = earlier {
            self.free(earlier, now_s);
        }
        self.clients.insert((asked.mac, subnet.network), address);
        let until_s = now_s + u64::from(lease_s);
        self.set(address, Entry { mac: asked.mac, state: State::Bound, until_s });
        self.answer(asked, subnet, MessageType::Ack, Some((address, lease_s)))
    }

    fn decline(&mut self, asked: &Packet, subnet: &Subnet, now_s: u64) {
        let Some(address) = asked.address(option::REQUESTED_ADDRESS) else { return };
        let is_its_own = |entry: &Entry| entry.mac == asked.mac && entry.state != State::Declined;
        if self.entries.get(&address).is_some_and(is_its_own) {
            self.set_declined(asked.mac, address, subnet, now_s);
        }
    }

    fn set_declined(&mut self, mac: Mac, address: Ipv4Addr, subnet: &Subnet, now_s: u64) {
        self.clients.remove(&(mac, subnet.network));
        self.set(address, Entry { mac, state: State::Declined, until_s: now_s + DECLINED_S });
    }

    /// Ends an offer that the client did not accept.
    fn withdraw(&mut self, mac: Mac, subnet: &Subnet, now_s: u64) {
        let offered = self.address_of(mac, subnet);
        let offered = offered.and_then(|address| Some((address, self.entries.get(&address)?.state)));
        if let Some((address, State::Offered | State::Probing)) = offered {
            self.free(address, now_s);
        }
    }

    fn free(&mut self, address: Ipv4Addr, now_s: u64) {
        if let Some(entry) = self.entries.get(&address).copied() {
            self.set(address, Entry { until_s: entry.until_s.min(now_s), ..entry });
        }
    }

    fn set(&mut self, address: Ipv4Addr, entry: Entry) {
        let before = self.entries.insert(address, entry);
        if let Some(before) = before.filter(|before| before.mac != entry.mac)
            && let Some(subnet) = self.subnets.of(address)
        {
            let key = (before.mac, subnet.network);
            if self.clients.get(&key) == Some(&address) {
                self.clients.remove(&key);
            }
        }
        if is_kept(&entry) {
            self.changes.push(Record { address, entry });
        }
    }

    /// The address that a card has or had, unless another card has had it since.
    fn address_of(&self, mac: Mac, subnet: &Subnet) -> Option<Ipv4Addr> {
        let address = *self.clients.get(&(mac, subnet.network))?;
        let entry = self.entries.get(&address)?;
        (entry.mac == mac && entry.state != State::Declined).then_some(address)
    }

    fn choose(&self, asked: &Packet, subnet: &Subnet, now_s: u64) -> Option<Ipv4Addr> {
        if let Some(fixed) = self.fixed_address(asked.mac, subnet, now_s) {
            return Some(fixed);
        }
        let is_givable = |address: &Ipv4Addr| self.is_givable(*address, asked.mac, subnet);
        if let Some(address) = self.address_of(asked.mac, subnet).filter(is_givable) {
            return Some(address);
        }
        let is_free = |address: &Ipv4Addr| self.is_free(*address, asked.mac, subnet, now_s);
        if let Some(wanted) = asked.address(option::REQUESTED_ADDRESS).filter(is_free) {
            return Some(wanted);
        }
        let (first, last) = subnet.range.map(|(first, last)| (u32::from(first), u32::from(last)))?;
        // The search starts at an address derived from the card, so that a card usually gets the same address even if
        // the leases were lost.
        let start = first + hash(asked.mac) % (last - first + 1);
        let all = || (start..=last).chain(first..start).map(Ipv4Addr::from);
        let unused = all().filter(is_givable).find(|address| !self.entries.contains_key(address));
        let oldest = || {
            all().filter(is_free).min_by_key(|address| self.entries.get(address).map(|entry| entry.until_s))
        };
        unused.or_else(oldest)
    }

    /// The fixed address of a card. `None` also if another card still has a lease of it from before the address was
    /// fixed.
    fn fixed_address(&self, mac: Mac, subnet: &Subnet, now_s: u64) -> Option<Ipv4Addr> {
        let fixed = *subnet.fixed.get(&mac)?;
        let is_others = |entry: &Entry| entry.mac != mac && entry.until_s > now_s;
        (!self.entries.get(&fixed).is_some_and(is_others)).then_some(fixed)
    }

    /// Whether the configuration lets a card have an address of the range.
    fn is_givable(&self, address: Ipv4Addr, mac: Mac, subnet: &Subnet) -> bool {
        let is_in_range = subnet.range.is_some_and(|(first, last)| (first..=last).contains(&address));
        let is_others = self.reserved.get(&address).is_some_and(|other| *other != mac);
        is_in_range && address != self.server && Some(address) != subnet.router && !is_others
    }

    /// Whether a card can get an address that it does not have yet.
    fn is_free(&self, address: Ipv4Addr, mac: Mac, subnet: &Subnet, now_s: u64) -> bool {
        self.is_givable(address, mac, subnet)
            && self.entries.get(&address).is_none_or(|entry| entry.until_s <= now_s)
    }

    fn answer(
        &self,
        asked: &Packet,
        subnet: &Subnet,
        message: MessageType,
        lease: Option<(Ipv4Addr, u32)>,
    ) -> Outcome {
        let mut packet = Packet::reply_to(asked, message);
        packet.ciaddr = if message == MessageType::Ack { asked.ciaddr } else { Ipv4Addr::UNSPECIFIED };
        packet.yiaddr = lease.map_or(Ipv4Addr::UNSPECIFIED, |(address, _)| address);
        packet = packet.with(option::SERVER_ID, self.server.octets());
        if let Some((_, lease_s)) = lease {
            packet = packet.with(option::LEASE_TIME, lease_s.to_be_bytes());
        }
        packet = packet.with(option::SUBNET_MASK, subnet.mask().octets());
        if let Some(router) = subnet.router {
            packet = packet.with(option::ROUTER, router.octets());
        }
        if !subnet.dns.is_empty() {
            packet =
                packet.with(option::DNS, subnet.dns.iter().flat_map(Ipv4Addr::octets).collect::<Vec<_>>());
        }
        if let Some(domain) = &subnet.domain {
            packet = packet.with(option::DOMAIN, domain.as_bytes());
        }
        Outcome::Answer(Box::new(with_client_id(packet, asked)), destination(asked))
    }

    fn refuse(&self, asked: &Packet) -> Outcome {
        let mut packet = Packet::reply_to(asked, MessageType::Nak);
        // The client may have no valid address here; the broadcast flag makes a relay broadcast the answer.
        packet.broadcast = true;
        let packet = with_client_id(packet.with(option::SERVER_ID, self.server.octets()), asked);
        let has_no_address = Packet { ciaddr: Ipv4Addr::UNSPECIFIED, ..asked.clone() };
        Outcome::Answer(Box::new(packet), destination(&has_no_address))
    }
}

/// Echoes the client identifier (RFC 6842).
fn with_client_id(packet: Packet, asked: &Packet) -> Packet {
    match asked.option(option::CLIENT_ID) {
        Some(id) => packet.with(option::CLIENT_ID, id),
        None => packet,
    }
}

const fn is_kept(entry: &Entry) -> bool {
    matches!(entry.state, State::Bound | State::Declined)
}

/// FNV-1a: stable over runs and releases.
fn hash(mac: Mac) -> u32 {
    mac.0.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}
