//! Compares leases with a model: random clients lose packets, change networks, find conflicts and return, and the
//! server restarts.

use std::collections::HashMap;
use std::net::Ipv4Addr;

use headwater_dhcp::leases::{DECLINED_S, Entry, OFFER_S, Outcome, Silence, State};
use headwater_dhcp::{Leases, Mac, MessageType, Packet, Record, Subnet, Subnets, option};
use headwater_testkit::random::Rng;

const SERVER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const RELAY: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 1);
const LEASE_S: u32 = 600;
const FIXED: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 105);

fn mac(number: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, number])
}

fn subnets() -> Subnets {
    let subnet = |network: u8, first, last, fixed| Subnet {
        network: Ipv4Addr::new(10, network, 0, 0),
        prefix: 24,
        range: Some((Ipv4Addr::new(10, network, 0, first), Ipv4Addr::new(10, network, 0, last))),
        router: Some(Ipv4Addr::new(10, network, 0, 1)),
        dns: vec![Ipv4Addr::new(9, 9, 9, 9)],
        domain: None,
        lease_s: LEASE_S,
        fixed,
    };
    let fixed = HashMap::from([(mac(0), FIXED)]);
    Subnets::new(vec![subnet(77, 100, 109, fixed), subnet(78, 10, 12, HashMap::new())]).unwrap()
}

fn packet(message: MessageType, of: Mac) -> Packet {
    Packet::of_client(1, of, message)
}

/// The model: which client uses which address by its own clock, and which addresses the server may reserve.
struct World {
    leases: Leases,
    kept: Vec<Record>,
    now_s: u64,
    rng: Rng,
    /// For each client: its address, and the time at which it stops using it.
    held: HashMap<(u8, bool), (Ipv4Addr, u64)>,
    /// Addresses that a host uses without a lease.
    squatted: Vec<Ipv4Addr>,
    /// For each address: the client that it is reserved for, and the end of the reservation.
    reserved: HashMap<Ipv4Addr, (u8, u64)>,
    /// For each address: the last client, according to records that survive restarts.
    last: HashMap<Ipv4Addr, u8>,
    /// The last address of each client.
    newest: HashMap<(u8, bool), Ipv4Addr>,
    acks: u32,
    full: u32,
    conflicts: u32,
    returned: u32,
}

impl World {
    fn new(seed: u64) -> Self {
        Self {
            leases: Leases::new(subnets(), SERVER),
            kept: Vec::new(),
            now_s: 1_000_000,
            rng: Rng::new(seed),
            held: HashMap::new(),
            squatted: Vec::new(),
            reserved: HashMap::new(),
            last: HashMap::new(),
            newest: HashMap::new(),
            acks: 0,
            full: 0,
            conflicts: 0,
            returned: 0,
        }
    }

    fn packet(&self, message: MessageType, client: u8, is_remote: bool) -> Packet {
        let mut packet = packet(message, mac(client));
        if is_remote {
            packet.giaddr = RELAY;
        }
        packet
    }

    fn uses(&self, address: Ipv4Addr) -> Vec<(u8, bool)> {
        let used = |(holder, (held, until)): (&(u8, bool), &(Ipv4Addr, u64))| {
            (*held == address && *until > self.now_s).then_some(*holder)
        };
        self.held.iter().filter_map(used).collect()
    }

    fn keep(&mut self) {
        self.kept.extend(self.leases.take_changes());
    }

    /// Sends a DISCOVER, and probes addresses as the boot server does.
    fn discover(&mut self, client: u8, is_remote: bool, wanted: Option<Ipv4Addr>) -> Option<Packet> {
        let mut asked = self.packet(MessageType::Discover, client, is_remote);
        if let Some(wanted) = wanted {
            asked = asked.with(option::REQUESTED_ADDRESS, wanted.octets());
        }
        let mut outcome = self.leases.handle(&asked, self.now_s);
        loop {
            self.keep();
            match outcome {
                Outcome::Answer(offer, _) => {
                    assert_eq!(offer.message_type(), Some(MessageType::Offer));
                    self.check_offer(client, is_remote, offer.yiaddr);
                    return Some(*offer);
                }
                Outcome::Probe(address) => {
                    let is_others = self.uses(address).iter().any(|user| *user != (client, is_remote));
                    let is_used = is_others || self.squatted.contains(&address);
                    if is_used {
                        self.conflicts += 1;
                        self.reserved.insert(address, (u8::MAX, self.now_s + DECLINED_S));
                        self.last.remove(&address);
                    }
                    outcome = self.leases.probed(&asked, address, is_used, self.now_s);
                }
                Outcome::Silent(Silence::Full) => {
                    self.full += 1;
                    self.check_full(client, is_remote);
                    return None;
                }
                Outcome::Silent(other) => panic!("a DISCOVER got no answer: {other:?}"),
            }
        }
    }

    fn check_offer(&mut self, client: u8, is_remote: bool, address: Ipv4Addr) {
        let subnet = subnets().of(address).unwrap().clone();
        assert_eq!(subnet.contains(RELAY), is_remote, "{address} belongs to another network");
        if client == 0 && !is_remote {
            assert_eq!(address, FIXED);
        } else {
            let (first, last) = subnet.range.unwrap();
            assert!((first..=last).contains(&address) && address != FIXED, "{address}");
        }
        let others: Vec<_> =
            self.uses(address).into_iter().filter(|user| *user != (client, is_remote)).collect();
        assert!(others.is_empty(), "{address} is offered to {client}, and {others:?} has it");
        let newest = self.newest.get(&(client, is_remote));
        if let Some(newest) = newest.filter(|newest| self.last.get(newest) == Some(&client)) {
            assert_eq!(*newest, address, "client {client} did not get its address again");
            self.returned += 1;
        }
        if self.last.get(&address) != Some(&client) {
            self.last.remove(&address);
        }
        let until = self.now_s + OFFER_S;
        let reserved = self.reserved.entry(address).or_insert((client, 0));
        *reserved = (client, if reserved.0 == client { reserved.1.max(until) } else { until });
    }

    fn check_full(&self, client: u8, is_remote: bool) {
        let is_reserved =
            |address: &Ipv4Addr| self.reserved.get(address).is_some_and(|(_, until)| *until > self.now_s);
        let (first, last) = subnets().of(if is_remote { RELAY } else { SERVER }).unwrap().range.unwrap();
        for address in (u32::from(first)..=u32::from(last)).map(Ipv4Addr::from) {
            let is_fixed = address == FIXED;
            assert!(is_fixed || is_reserved(&address), "{address} is free, and {client} gets none");
        }
    }

    /// Sends a REQUEST; the answer may be lost.
    fn request(&mut self, asked: &Packet, client: u8, is_remote: bool) -> Option<MessageType> {
        let outcome = self.leases.handle(asked, self.now_s);
        self.keep();
        let Outcome::Answer(answer, _) = outcome else { return None };
        let message = answer.message_type().unwrap();
        if message == MessageType::Ack {
            self.acks += 1;
            let (address, until) = (answer.yiaddr, self.now_s + u64::from(LEASE_S));
            self.reserved.insert(address, (client, until));
            self.last.insert(address, client);
            self.newest.insert((client, is_remote), address);
            assert_eq!(answer.number(option::LEASE_TIME), Some(LEASE_S));
        }
        // A client that misses the ACK does not use the address.
        if self.rng.chance(1, 8) {
            return None;
        }
        match message {
            MessageType::Ack => {
                self.held.insert((client, is_remote), (answer.yiaddr, self.now_s + u64::from(LEASE_S)));
            }
            MessageType::Nak => {
                self.held.remove(&(client, is_remote));
            }
            other => panic!("a REQUEST is answered by {other:?}"),
        }
        Some(message)
    }

    fn boot(&mut self, client: u8, is_remote: bool) {
        let wanted = self.rng.chance(1, 2).then(|| self.any_address(is_remote));
        let Some(offer) = self.discover(client, is_remote, wanted) else { return };
        match self.rng.below(10) {
            // The offer is lost.
            0 => return,
            // The client accepts another server's offer.
            1 => {
                let asked = self
                    .packet(MessageType::Request, client, is_remote)
                    .with(option::SERVER_ID, [10, 77, 0, 3])
                    .with(option::REQUESTED_ADDRESS, [10, 77, 0, 200]);
                assert_eq!(self.request(&asked, client, is_remote), None);
                return;
            }
            2 => self.restart(),
            _ => {}
        }
        let asked = self
            .packet(MessageType::Request, client, is_remote)
            .with(option::SERVER_ID, SERVER.octets())
            .with(option::REQUESTED_ADDRESS, offer.yiaddr.octets());
        self.request(&asked, client, is_remote);
        let held = self.held.get(&(client, is_remote)).copied();
        if let Some((address, _)) = held.filter(|(address, _)| self.squatted.contains(address)) {
            // The client's own probe finds a host that uses the address.
            let asked = self
                .packet(MessageType::Decline, client, is_remote)
                .with(option::REQUESTED_ADDRESS, address.octets());
            assert_eq!(self.leases.handle(&asked, self.now_s), Outcome::Silent(Silence::Noted));
            self.keep();
            self.held.remove(&(client, is_remote));
            self.last.remove(&address);
            self.reserved.insert(address, (u8::MAX, self.now_s + DECLINED_S));
        }
    }

    fn any_address(&mut self, is_remote: bool) -> Ipv4Addr {
        let (network, first) = if is_remote { (78, 8) } else { (77, 98) };
        Ipv4Addr::new(10, network, 0, first + self.rng.below(14) as u8)
    }

    fn restart(&mut self) {
        self.leases = Leases::new(subnets(), SERVER);
        for record in &self.kept {
            assert!(self.leases.restore(*record));
        }
        assert!(self.leases.take_changes().is_empty());
        // The records at a restart replace the journal; they say the same.
        self.kept = self.leases.records();
    }

    fn step(&mut self) {
        let (client, is_remote) = (self.rng.below(14) as u8, self.rng.chance(1, 4));
        let holder = (client, is_remote);
        let held = self.held.get(&holder).copied().filter(|(_, until)| *until > self.now_s);
        match (self.rng.below(12), held) {
            (0..=3, _) => self.boot(client, is_remote),
            (4..=6, Some((address, _))) => {
                let mut asked = packet(MessageType::Request, mac(client));
                asked.ciaddr = address;
                self.request(&asked, client, is_remote);
            }
            (7, _) => {
                // The client restarts with the address that it had.
                let Some(address) = self.newest.get(&holder).copied() else { return };
                let asked = self.packet(MessageType::Request, client, is_remote);
                self.request(&asked.with(option::REQUESTED_ADDRESS, address.octets()), client, is_remote);
            }
            (8, Some((address, _))) => {
                let mut asked = packet(MessageType::Release, mac(client));
                asked.ciaddr = address;
                assert_eq!(self.leases.handle(&asked, self.now_s), Outcome::Silent(Silence::Noted));
                self.keep();
                self.held.remove(&holder);
                self.reserved.insert(address, (client, self.now_s));
            }
            (9, _) => self.restart(),
            (10, _) => {
                self.squatted = (0..self.rng.below(3)).map(|_| self.any_address(is_remote)).collect();
            }
            _ => self.now_s += self.rng.below(400),
        }
        let mut seen: HashMap<Ipv4Addr, (u8, bool)> = HashMap::new();
        for (holder, (address, until)) in &self.held {
            if *until > self.now_s
                && let Some(other) = seen.insert(*address, *holder)
            {
                panic!("{address} is held by {holder:?} and {other:?}");
            }
        }
    }
}

#[test]
fn no_address_has_two_clients_whatever_is_lost() {
    let (mut acks, mut full, mut conflicts, mut returned) = (0, 0, 0, 0);
    for seed in 0..60 {
        let mut world = World::new(seed);
        for _ in 0..2000 {
            world.step();
        }
        acks += world.acks;
        full += world.full;
        conflicts += world.conflicts;
        returned += world.returned;
    }
    // Each kind of event occurred.
    assert!(
        acks > 10_000 && full > 100 && conflicts > 100 && returned > 1000,
        "{acks} {full} {conflicts} {returned}"
    );
}

fn answer(outcome: Outcome) -> (MessageType, Packet, String) {
    match outcome {
        Outcome::Answer(packet, to) => (packet.message_type().unwrap(), *packet, to.to_string()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_answer_has_the_options_of_its_network_and_echoes_the_client_id() {
    let mut leases = Leases::new(subnets(), SERVER);
    let asked = packet(MessageType::Discover, mac(0)).with(option::CLIENT_ID, [0, 1, 2, 3]);
    let (message, offer, to) = answer(leases.handle(&asked, 5));
    assert_eq!((message, offer.yiaddr, to.as_str()), (MessageType::Offer, FIXED, "255.255.255.255:68"));
    assert_eq!(offer.address(option::SUBNET_MASK), Some(Ipv4Addr::new(255, 255, 255, 0)));
    assert_eq!(offer.address(option::ROUTER), Some(Ipv4Addr::new(10, 77, 0, 1)));
    assert_eq!(offer.address(option::DNS), Some(Ipv4Addr::new(9, 9, 9, 9)));
    assert_eq!(offer.number(option::LEASE_TIME), Some(LEASE_S));
    assert_eq!(offer.option(option::CLIENT_ID), Some(&[0, 1, 2, 3][..]));
    let mut inform = packet(MessageType::Inform, mac(7));
    inform.ciaddr = Ipv4Addr::new(10, 77, 0, 222);
    let (message, ack, to) = answer(leases.handle(&inform, 5));
    assert_eq!(
        (message, ack.yiaddr, to.as_str()),
        (MessageType::Ack, Ipv4Addr::UNSPECIFIED, "10.77.0.222:68")
    );
    assert_eq!((ack.number(option::LEASE_TIME), ack.address(option::ROUTER).is_some()), (None, true));
}

#[test]
fn a_relayed_client_gets_an_address_of_its_relays_network() {
    let mut leases = Leases::new(subnets(), SERVER);
    let mut asked = packet(MessageType::Discover, mac(5)).with(option::RELAY, [1, 2, 8, 9]);
    asked.giaddr = RELAY;
    let Outcome::Probe(address) = leases.handle(&asked, 5) else { panic!("no probe") };
    assert_eq!(leases.handle(&asked, 5), Outcome::Silent(Silence::Probing));
    let (_, offer, to) = answer(leases.probed(&asked, address, false, 5));
    assert!(subnets().of(offer.yiaddr).unwrap().contains(RELAY));
    assert_eq!(to, "10.78.0.1:67");
    let sent = offer.with_relay_of(&asked);
    assert_eq!(sent.options.last(), Some(&(option::RELAY, vec![1, 2, 8, 9])));
    asked.giaddr = Ipv4Addr::new(10, 99, 0, 1);
    assert_eq!(leases.handle(&asked, 5), Outcome::Silent(Silence::Network));
}

#[test]
fn an_address_of_another_server_is_left_alone_and_a_wrong_address_is_refused() {
    let mut leases = Leases::new(subnets(), SERVER);
    let mut renewal = packet(MessageType::Request, mac(5));
    // An address of the network but not of the range belongs to another server.
    renewal.ciaddr = Ipv4Addr::new(10, 77, 0, 20);
    assert_eq!(leases.handle(&renewal, 5), Outcome::Silent(Silence::NoRecord));
    // A lease whose record was lost continues.
    renewal.ciaddr = Ipv4Addr::new(10, 77, 0, 101);
    let (message, ack, _) = answer(leases.handle(&renewal, 5));
    // The address was not probed, so the lease continues for a minute only. Then there is a record.
    assert_eq!((message, ack.number(option::LEASE_TIME)), (MessageType::Ack, Some(60)));
    let (_, ack, _) = answer(leases.handle(&renewal, 35));
    assert!(ack.number(option::LEASE_TIME).is_some_and(|seconds| seconds > 60));
    // The address now belongs to another client, and the NAK is broadcast.
    renewal.mac = mac(6);
    let (message, nak, to) = answer(leases.handle(&renewal, 5));
    assert_eq!(
        (message, nak.yiaddr, to.as_str()),
        (MessageType::Nak, Ipv4Addr::UNSPECIFIED, "255.255.255.255:68")
    );
    let reboot =
        |address: [u8; 4]| packet(MessageType::Request, mac(8)).with(option::REQUESTED_ADDRESS, address);
    assert_eq!(leases.handle(&reboot([10, 77, 0, 102]), 5), Outcome::Silent(Silence::NoRecord));
    assert_eq!(answer(leases.handle(&reboot([192, 168, 0, 9]), 5)).0, MessageType::Nak);
}

#[test]
fn a_fixed_address_waits_until_its_lease_of_another_card_is_over() {
    let mut leases = Leases::new(subnets(), SERVER);
    let entry = Entry { mac: mac(9), state: State::Bound, until_s: 100 };
    assert!(leases.restore(Record { address: FIXED, entry }));
    let asked = packet(MessageType::Discover, mac(0));
    let Outcome::Probe(other) = leases.handle(&asked, 50) else { panic!("no probe") };
    assert_ne!(other, FIXED);
    let later = answer(leases.handle(&asked, 100));
    assert_eq!(later.1.yiaddr, FIXED);
    // The other card cannot renew the lease.
    let mut renewal = packet(MessageType::Request, mac(9));
    renewal.ciaddr = FIXED;
    assert_eq!(answer(leases.handle(&renewal, 60)).0, MessageType::Nak);
    let gone = Ipv4Addr::new(10, 90, 0, 1);
    assert!(!leases.restore(Record { address: gone, entry }));
}
