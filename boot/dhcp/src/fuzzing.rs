//! Fuzzing oracles for DHCP packets: properties that hold for every datagram that reaches a boot server or the agent.
//! The fuzzers in `fuzz/` and a bounded test run them.

use std::net::Ipv4Addr;

use dhcproto::v4::{Decodable, Decoder, Message};

use crate::client::{Lease, discover, request};
use crate::decide::{Port, Server, Verdict, decide};
use crate::history::Past;
use crate::leases::{Leases, Outcome};
use crate::mac::Mac;
use crate::packet::{MessageType, Packet, option};
use crate::subnet::{Subnet, Subnets};

/// An oracle: takes arbitrary bytes, and panics if a property is violated.
pub type Oracle = fn(&[u8]);

/// All oracles, each with its name and seed inputs.
pub fn targets() -> Vec<(&'static str, Oracle, Vec<Vec<u8>>)> {
    let mac = Mac([0x52, 0x54, 0, 1, 2, 3]);
    let firmware = Packet::of_client(1, mac, MessageType::Discover)
        .with(option::VENDOR_CLASS, *b"PXEClient:Arch:00007:UNDI:003016")
        .with(option::ARCHITECTURE, [0, 7])
        .with(option::MACHINE_ID, [0; 17]);
    let ipxe = firmware.clone().with(option::USER_CLASS, *b"iPXE").with(option::IPXE, [0x13, 1, 1]);
    let mut ack = Packet::reply_to(&discover(1, mac), MessageType::Ack);
    ack.yiaddr = Ipv4Addr::new(10, 0, 0, 9);
    let ack = ack.with(option::SERVER_ID, [10, 0, 0, 1]).with(option::SUBNET_MASK, [255, 255, 255, 0]);
    let relayed = Packet { giaddr: Ipv4Addr::new(10, 0, 0, 1), ..discover(1, mac) };
    let relayed = relayed.with(option::RELAY, [1, 1, 7]);
    let offer =
        Packet { yiaddr: Ipv4Addr::new(10, 0, 0, 60), ..Packet::reply_to(&firmware, MessageType::Offer) };
    let taken = request(1, mac, &offer.with(option::SERVER_ID, [10, 0, 0, 2])).unwrap_or(relayed.clone());
    let samples = [firmware, ipxe, ack, relayed, taken].map(|packet| packet.bytes()).to_vec();
    vec![("dhcp_packet", dhcp_packet, samples)]
}

/// The oracle for one datagram. It parses to the same values as with another implementation, survives writing and
/// parsing, and its answer gives no address or an address of the range.
pub fn dhcp_packet(bytes: &[u8]) {
    let Ok(packet) = Packet::parse(bytes) else { return };
    compare(bytes, &packet);
    let has_overload = packet.option(option::OVERLOAD).is_some();
    let is_empty_part = packet.options.iter().any(|(_, value)| value.is_empty());
    // A name may fill its field without a terminating zero; a written name always ends with a zero.
    let is_full = packet.file.len() > 127 || packet.sname.len() > 63;
    let written = packet.bytes();
    if !has_overload && !is_empty_part && !is_full && written.len() <= crate::PACKET_BYTES_MAX {
        assert_eq!(Packet::parse(&written), Ok(packet.clone()), "the packet changes when it is written");
    }
    let server = Server {
        address: Ipv4Addr::new(10, 0, 0, 2),
        http_port: 80,
        bios_loader: "b".into(),
        efi_loader: "e".into(),
    };
    for port in [Port::Dhcp, Port::BootServer] {
        assert!(
            matches!(decide(&packet, port, false, Past::default(), &server), Verdict::Silent(_)),
            "a machine that is not registered got an answer"
        );
        if let Verdict::Answer(answer) = decide(&packet, port, true, Past::default(), &server) {
            assert!(!packet.is_reply, "a reply got an answer");
            let read = Packet::parse(&answer.packet.bytes()).unwrap_or_else(|e| panic!("{e}: {answer:?}"));
            assert!(read.is_reply && read.yiaddr.is_unspecified() && read.xid == packet.xid, "{read:?}");
            assert_eq!((read.mac, read.siaddr), (packet.mac, server.address));
        }
    }
    lease_is_of_the_range(&packet, server.address);
    if let Some(lease) = Lease::of(packet.xid, packet.mac, &packet) {
        assert!(!lease.address.is_unspecified() && lease.prefix <= 32 && lease.seconds >= 30, "{lease:?}");
    }
    let _ = request(packet.xid, packet.mac, &packet);
}

/// Checks that the DHCP server answers with an address of the range or none, and that the answer can be parsed.
fn lease_is_of_the_range(packet: &Packet, server: Ipv4Addr) {
    let (first, last) = (Ipv4Addr::new(10, 0, 0, 50), Ipv4Addr::new(10, 0, 0, 99));
    let subnet = Subnet {
        network: Ipv4Addr::new(10, 0, 0, 0),
        prefix: 24,
        range: Some((first, last)),
        router: Some(Ipv4Addr::new(10, 0, 0, 60)),
        dns: Vec::new(),
        domain: None,
        lease_s: 600,
        fixed: std::collections::HashMap::new(),
    };
    let subnets = Subnets::new(vec![subnet]).unwrap_or_else(|e| panic!("{e}"));
    let mut leases = Leases::new(subnets, server);
    let outcome = match leases.handle(packet, 1000) {
        Outcome::Probe(address) => leases.probed(packet, address, false, 1000),
        outcome => outcome,
    };
    let Outcome::Answer(answer, _) = outcome else { return };
    assert!(!packet.is_reply, "a reply got an answer");
    let given = answer.yiaddr;
    assert!(
        given.is_unspecified() || (first..=last).contains(&given) && given.octets() != [10, 0, 0, 60],
        "{given}"
    );
    let read = Packet::parse(&answer.with_relay_of(packet).bytes());
    let is_long = packet.option(option::CLIENT_ID).map_or(0, <[u8]>::len)
        + packet.option(option::RELAY).map_or(0, <[u8]>::len)
        > 1000;
    assert!(
        is_long || read.is_ok_and(|read| read.is_reply && read.yiaddr == given),
        "the answer cannot be parsed"
    );
}

/// Options whose values dhcproto does not interpret. For some other options, dhcproto asserts properties that a
/// packet may violate.
const COMPARED: [u8; 6] = [
    option::REQUESTED_ADDRESS,
    option::LEASE_TIME,
    option::MESSAGE_TYPE,
    option::SERVER_ID,
    option::VENDOR_CLASS,
    option::USER_CLASS,
];

/// Compares the header with dhcproto's, and the message type if dhcproto can parse all options.
fn compare(bytes: &[u8], packet: &Packet) {
    let header = [bytes.get(..240).unwrap_or_default(), &[option::END]].concat();
    let other = Message::decode(&mut Decoder::new(&header))
        .unwrap_or_else(|e| panic!("dhcproto refuses the header: {e}"));
    assert_eq!(other.xid(), packet.xid);
    assert_eq!((other.ciaddr(), other.yiaddr()), (packet.ciaddr, packet.yiaddr));
    assert_eq!((other.siaddr(), other.giaddr()), (packet.siaddr, packet.giaddr));
    assert_eq!(other.chaddr(), packet.mac.0);
    assert_eq!(other.flags().broadcast(), packet.broadcast);
    let is_plain = packet.option(option::MESSAGE_TYPE).is_some_and(|value| value.len() == 1)
        && packet.options.iter().all(|(code, _)| COMPARED.contains(code));
    if !is_plain {
        return;
    }
    let Ok(whole) = Message::decode(&mut Decoder::new(bytes)) else { return };
    if let Some(theirs) = whole.opts().msg_type() {
        let number = packet.option(option::MESSAGE_TYPE).and_then(<[u8]>::first).copied();
        assert_eq!(Some(u8::from(theirs)), number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_datagram_is_read_in_two_ways() {
        let fed = headwater_testkit::mutate::all(targets());
        assert!(fed > 2000, "{fed} inputs");
    }
}
