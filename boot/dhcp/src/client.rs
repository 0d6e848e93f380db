//! The DHCP client of the agent: builds requests, and converts an acknowledgement to a lease.
//!
//! ```text
//!   discover() --> offer --request()--> ack --Lease::of--> address, until it expires
//!                                                |
//!   half of lease time over --renew()--> ack ----+
//! ```

use std::net::Ipv4Addr;

use crate::mac::Mac;
use crate::packet::{MessageType, Packet, option};

/// Options that the client requests.
const WANTED: [u8; 4] = [option::SUBNET_MASK, option::ROUTER, option::DNS, option::LEASE_TIME];
/// The duration of a lease whose acknowledgement names none: an hour.
const DEFAULT_LEASE_S: u32 = 3600;
/// The shortest lease time, in seconds. Shorter values are raised, because the client would do nothing but renew.
const LEASE_MIN_S: u32 = 30;

/// An address that a server has leased to the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The address.
    pub address: Ipv4Addr,
    /// Length of the network prefix, in bits.
    pub prefix: u8,
    /// The default gateway.
    pub router: Option<Ipv4Addr>,
    /// Name servers.
    pub dns: Vec<Ipv4Addr>,
    /// The address of the server that gave the lease.
    pub server: Ipv4Addr,
    /// The duration of the lease, in seconds.
    pub seconds: u32,
}

/// A DISCOVER. It asks for broadcast answers, because the client has no address yet.
pub fn discover(xid: u32, mac: Mac) -> Packet {
    let packet = Packet { broadcast: true, ..Packet::of_client(xid, mac, MessageType::Discover) };
    packet.with(option::PARAMETERS, WANTED).with(option::CLIENT_ID, client_id(mac))
}

/// The REQUEST for an offered address. `None`: the packet offers no address, or belongs to another exchange.
pub fn request(xid: u32, mac: Mac, offer: &Packet) -> Option<Packet> {
    let is_offer = offer.message_type() == Some(MessageType::Offer) && !offer.yiaddr.is_unspecified();
    let server = offer.address(option::SERVER_ID).filter(|_| is_offer && is_for(offer, xid, mac))?;
    let packet = Packet { broadcast: true, ..Packet::of_client(xid, mac, MessageType::Request) };
    Some(
        packet
            .with(option::REQUESTED_ADDRESS, offer.yiaddr.octets())
            .with(option::SERVER_ID, server.octets())
            .with(option::PARAMETERS, WANTED)
            .with(option::CLIENT_ID, client_id(mac)),
    )
}

/// The REQUEST that renews a lease.
pub fn renew(xid: u32, mac: Mac, lease: &Lease) -> Packet {
    let packet = Packet { ciaddr: lease.address, ..Packet::of_client(xid, mac, MessageType::Request) };
    packet.with(option::PARAMETERS, WANTED).with(option::CLIENT_ID, client_id(mac))
}

impl Lease {
    /// The lease in an acknowledgement. `None`: the packet is no acknowledgement, or belongs to another exchange.
    pub fn of(xid: u32, mac: Mac, packet: &Packet) -> Option<Self> {
        let is_ack = packet.message_type() == Some(MessageType::Ack) && !packet.yiaddr.is_unspecified();
        let server = packet.address(option::SERVER_ID).filter(|_| is_ack && is_for(packet, xid, mac))?;
        let mask = packet.address(option::SUBNET_MASK).map_or(u32::MAX << 8, u32::from);
        let dns = packet.option(option::DNS).unwrap_or_default().chunks_exact(4);
        Some(Self {
            address: packet.yiaddr,
            // If the mask is not contiguous, only its leading ones count.
            prefix: u8::try_from(mask.leading_ones()).unwrap_or(32),
            router: packet.address(option::ROUTER).filter(|router| !router.is_unspecified()),
            dns: dns.filter_map(|four| Some(Ipv4Addr::from(<[u8; 4]>::try_from(four).ok()?))).collect(),
            server,
            seconds: packet.number(option::LEASE_TIME).unwrap_or(DEFAULT_LEASE_S).max(LEASE_MIN_S),
        })
    }
}

fn is_for(packet: &Packet, xid: u32, mac: Mac) -> bool {
    packet.is_reply && packet.xid == xid && packet.mac == mac
}

fn client_id(mac: Mac) -> Vec<u8> {
    [&[1][..], &mac.0].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = Mac([0x52, 0x54, 0, 1, 2, 3]);
    const SERVER: [u8; 4] = [10, 0, 0, 1];

    fn answer(message: MessageType) -> Packet {
        let mut packet = Packet::reply_to(&discover(7, MAC), message);
        packet.yiaddr = Ipv4Addr::new(10, 0, 0, 50);
        packet.with(option::SERVER_ID, SERVER)
    }

    #[test]
    fn an_offer_is_requested_and_its_confirmation_is_a_lease() {
        let asked = request(7, MAC, &answer(MessageType::Offer)).unwrap();
        assert_eq!(asked.address(option::REQUESTED_ADDRESS), Some(Ipv4Addr::new(10, 0, 0, 50)));
        assert_eq!(asked.address(option::SERVER_ID), Some(SERVER.into()));
        let ack = answer(MessageType::Ack)
            .with(option::SUBNET_MASK, [255, 255, 240, 0])
            .with(option::ROUTER, SERVER)
            .with(option::DNS, [1, 1, 1, 1, 9, 9, 9, 9])
            .with(option::LEASE_TIME, 600u32.to_be_bytes());
        let lease = Lease::of(7, MAC, &ack).unwrap();
        assert_eq!((lease.prefix, lease.seconds, lease.router), (20, 600, Some(SERVER.into())));
        assert_eq!(lease.dns, [Ipv4Addr::new(1, 1, 1, 1), Ipv4Addr::new(9, 9, 9, 9)]);
        assert_eq!(renew(8, MAC, &lease).ciaddr, lease.address);
    }

    #[test]
    fn packets_of_other_exchanges_are_no_lease() {
        let ack = answer(MessageType::Ack);
        assert!(Lease::of(7, MAC, &ack).is_some());
        assert_eq!(Lease::of(8, MAC, &ack), None);
        assert_eq!(Lease::of(7, Mac([2, 0, 0, 0, 0, 9]), &ack), None);
        assert_eq!(Lease::of(7, MAC, &answer(MessageType::Nak)), None);
        let own = Packet { is_reply: false, ..ack };
        assert_eq!(Lease::of(7, MAC, &own), None);
        // An offer of a proxy has no address.
        let proxy = Packet { yiaddr: Ipv4Addr::UNSPECIFIED, ..answer(MessageType::Offer) };
        assert_eq!(request(7, MAC, &proxy), None);
    }
}
