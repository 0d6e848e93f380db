//! Parses and writes DHCPv4 packets (RFC 2131, RFC 2132).
//!
//! ```text
//!   0        4     8          28        44      108     236      240
//!   op .. xid secs addresses  chaddr    sname   file    cookie   options .. 255
//! ```
//! An option that is split (RFC 3396) is joined. Options may continue in the fields `file` and `sname` (option 52).

use std::net::Ipv4Addr;

use crate::mac::Mac;

/// The longest packet that is accepted: one Ethernet frame.
pub const PACKET_BYTES_MAX: usize = 1500;
/// Written packets are padded to this length, because some firmware and relays drop shorter packets.
const PACKET_BYTES_MIN: usize = 300;
const COOKIE: [u8; 4] = [99, 130, 83, 99];
const HEADER_BYTES: usize = 240;
const SNAME: std::ops::Range<usize> = 44..108;
const FILE: std::ops::Range<usize> = 108..236;
const BROADCAST: u16 = 0x8000;
const ETHERNET: u8 = 1;
/// The longest value of one option, in bytes; longer values are split.
const OPTION_BYTES_MAX: usize = 255;

/// Codes of options.
pub mod option {
    #![expect(missing_docs, reason = "the names are those of RFC 2132, RFC 4578 and the PXE specification")]
    pub const PAD: u8 = 0;
    pub const SUBNET_MASK: u8 = 1;
    pub const ROUTER: u8 = 3;
    pub const DNS: u8 = 6;
    pub const DOMAIN: u8 = 15;
    pub const VENDOR: u8 = 43;
    pub const REQUESTED_ADDRESS: u8 = 50;
    pub const LEASE_TIME: u8 = 51;
    pub const OVERLOAD: u8 = 52;
    pub const MESSAGE_TYPE: u8 = 53;
    pub const SERVER_ID: u8 = 54;
    pub const PARAMETERS: u8 = 55;
    pub const VENDOR_CLASS: u8 = 60;
    pub const CLIENT_ID: u8 = 61;
    pub const USER_CLASS: u8 = 77;
    pub const RELAY: u8 = 82;
    pub const ARCHITECTURE: u8 = 93;
    pub const MACHINE_ID: u8 = 97;
    pub const IPXE: u8 = 175;
    pub const END: u8 = 255;
}

/// The type of a DHCP message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageType {
    /// A client looks for servers.
    Discover,
    /// A server offers an address or a boot file.
    Offer,
    /// A client accepts an offer, or renews a lease.
    Request,
    /// A server confirms a request.
    Ack,
    /// A server refuses a request.
    Nak,
    /// A client found that its address is in use.
    Decline,
    /// A client returns its address.
    Release,
    /// A client that has an address asks for options.
    Inform,
    /// Another type, by its number.
    Other(u8),
}

impl MessageType {
    const fn of(number: u8) -> Self {
        match number {
            1 => Self::Discover,
            2 => Self::Offer,
            3 => Self::Request,
            4 => Self::Decline,
            5 => Self::Ack,
            6 => Self::Nak,
            7 => Self::Release,
            8 => Self::Inform,
            other => Self::Other(other),
        }
    }

    const fn number(self) -> u8 {
        match self {
            Self::Discover => 1,
            Self::Offer => 2,
            Self::Request => 3,
            Self::Decline => 4,
            Self::Ack => 5,
            Self::Nak => 6,
            Self::Release => 7,
            Self::Inform => 8,
            Self::Other(number) => number,
        }
    }
}

/// Why bytes are not a DHCP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PacketError {
    /// Shorter than a header, or longer than a frame.
    #[error("the packet has {0} bytes; a DHCP packet has {HEADER_BYTES} to {PACKET_BYTES_MAX}")]
    Length(usize),
    /// No DHCP cookie: a BOOTP packet, or another protocol.
    #[error("the packet has no DHCP cookie")]
    Cookie,
    /// The hardware address is not an Ethernet address.
    #[error("the packet's hardware address is not an Ethernet address")]
    Hardware,
    /// An option extends beyond the end of the packet.
    #[error("option {0} extends beyond the end of the packet")]
    Option(u8),
}

/// A DHCP packet. Fields have their raw values; absent texts are empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Whether a server sent it.
    pub is_reply: bool,
    /// The number of relays that forwarded it.
    pub hops: u8,
    /// The number of its exchange, which the client chose.
    pub xid: u32,
    /// Seconds since the client began to ask.
    pub secs: u16,
    /// Whether the client wants answers by broadcast.
    pub broadcast: bool,
    /// The address that the client has.
    pub ciaddr: Ipv4Addr,
    /// The address that the server gives it.
    pub yiaddr: Ipv4Addr,
    /// The address of the boot file's server.
    pub siaddr: Ipv4Addr,
    /// The address of the relay.
    pub giaddr: Ipv4Addr,
    /// The hardware address of the client's card.
    pub mac: Mac,
    /// The server's name.
    pub sname: Vec<u8>,
    /// The boot file's name.
    pub file: Vec<u8>,
    /// Options by code, in the order of their first part.
    pub options: Vec<(u8, Vec<u8>)>,
}

impl Packet {
    /// A packet of a client, with only a message type.
    pub fn of_client(xid: u32, mac: Mac, message: MessageType) -> Self {
        Self {
            is_reply: false,
            hops: 0,
            xid,
            secs: 0,
            broadcast: false,
            ciaddr: Ipv4Addr::UNSPECIFIED,
            yiaddr: Ipv4Addr::UNSPECIFIED,
            siaddr: Ipv4Addr::UNSPECIFIED,
            giaddr: Ipv4Addr::UNSPECIFIED,
            mac,
            sname: Vec::new(),
            file: Vec::new(),
            options: vec![(option::MESSAGE_TYPE, vec![message.number()])],
        }
    }

    /// An answer to a packet, with only a message type.
    pub fn reply_to(asked: &Self, message: MessageType) -> Self {
        Self {
            is_reply: true,
            hops: 0,
            secs: 0,
            ciaddr: Ipv4Addr::UNSPECIFIED,
            yiaddr: Ipv4Addr::UNSPECIFIED,
            siaddr: Ipv4Addr::UNSPECIFIED,
            sname: Vec::new(),
            file: Vec::new(),
            options: vec![(option::MESSAGE_TYPE, vec![message.number()])],
            ..asked.clone()
        }
    }

    /// Parses a packet.
    pub fn parse(bytes: &[u8]) -> Result<Self, PacketError> {
        let header = bytes.first_chunk::<HEADER_BYTES>().filter(|_| bytes.len() <= PACKET_BYTES_MAX);
        let header = header.ok_or(PacketError::Length(bytes.len()))?;
        if header.get(236..) != Some(&COOKIE) {
            return Err(PacketError::Cookie);
        }
        let [op, hardware, mac_bytes, hops, ..] = *header;
        let mac = header.get(28..).and_then(<[u8]>::first_chunk).copied();
        let mac = mac.filter(|_| hardware == ETHERNET && mac_bytes == 6).ok_or(PacketError::Hardware)?;
        let mut options = Options::default();
        options.read(bytes.get(HEADER_BYTES..).unwrap_or_default())?;
        let overload = options.find(option::OVERLOAD).and_then(|value| value.first().copied()).unwrap_or(0);
        let mut text = |range: std::ops::Range<usize>, is_options: bool| {
            let field = header.get(range).unwrap_or_default();
            if is_options { options.read(field).map(|()| Vec::new()) } else { Ok(up_to_nul(field)) }
        };
        let file = text(FILE, overload & 1 != 0)?;
        let sname = text(SNAME, overload & 2 != 0)?;
        Ok(Self {
            is_reply: op == 2,
            hops,
            xid: u32::from_be_bytes(four(header, 4)),
            secs: u16::from_be_bytes(two(header, 8)),
            broadcast: u16::from_be_bytes(two(header, 10)) & BROADCAST != 0,
            ciaddr: four(header, 12).into(),
            yiaddr: four(header, 16).into(),
            siaddr: four(header, 20).into(),
            giaddr: four(header, 24).into(),
            mac: Mac(mac),
            sname,
            file,
            options: options.0,
        })
    }

    /// Writes the packet. `sname` and `file` are truncated to their fields; a value that is too long for one option
    /// is split.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(PACKET_BYTES_MIN);
        out.extend([if self.is_reply { 2 } else { 1 }, ETHERNET, 6, self.hops]);
        out.extend(self.xid.to_be_bytes());
        out.extend(self.secs.to_be_bytes());
        out.extend(if self.broadcast { BROADCAST } else { 0 }.to_be_bytes());
        for address in [self.ciaddr, self.yiaddr, self.siaddr, self.giaddr] {
            out.extend(address.octets());
        }
        out.extend(self.mac.0);
        out.extend([0; 10]);
        for (text, field) in [(&self.sname, SNAME), (&self.file, FILE)] {
            // The last byte of the field stays zero, to end the text.
            out.extend(text.iter().take(field.len() - 1));
            out.resize(field.end, 0);
        }
        out.extend(COOKIE);
        for (code, value) in &self.options {
            if value.is_empty() {
                out.extend([*code, 0]);
            }
            for part in value.chunks(OPTION_BYTES_MAX) {
                out.extend([*code, u8::try_from(part.len()).unwrap_or(u8::MAX)]);
                out.extend(part);
            }
        }
        out.push(option::END);
        out.resize(out.len().max(PACKET_BYTES_MIN), 0);
        out
    }

    /// The value of an option.
    pub fn option(&self, code: u8) -> Option<&[u8]> {
        self.options.iter().find(|(found, _)| *found == code).map(|(_, value)| value.as_slice())
    }

    /// Adds an option. The packet must not contain the option yet.
    #[must_use]
    pub fn with(mut self, code: u8, value: impl Into<Vec<u8>>) -> Self {
        self.options.push((code, value.into()));
        self
    }

    /// Copies the relay's option (RFC 3046) from the request to the end of the answer.
    #[must_use]
    pub fn with_relay_of(self, asked: &Self) -> Self {
        match asked.option(option::RELAY) {
            Some(relay) => self.with(option::RELAY, relay),
            None => self,
        }
    }

    /// The type of the message.
    pub fn message_type(&self) -> Option<MessageType> {
        self.option(option::MESSAGE_TYPE).and_then(<[u8]>::first).copied().map(MessageType::of)
    }

    /// The first address in an option.
    pub fn address(&self, code: u8) -> Option<Ipv4Addr> {
        self.option(code).and_then(<[u8]>::first_chunk::<4>).copied().map(Ipv4Addr::from)
    }

    /// The value of a four-byte option.
    pub fn number(&self, code: u8) -> Option<u32> {
        self.option(code).and_then(|value| value.try_into().ok()).map(u32::from_be_bytes)
    }
}

#[derive(Default)]
struct Options(Vec<(u8, Vec<u8>)>);

impl Options {
    fn read(&mut self, mut bytes: &[u8]) -> Result<(), PacketError> {
        while let Some((&code, rest)) = bytes.split_first() {
            bytes = rest;
            match code {
                option::PAD => continue,
                option::END => break,
                _ => {}
            }
            let Some((&len, rest)) = bytes.split_first() else { return Err(PacketError::Option(code)) };
            let (value, rest) = rest.split_at_checked(usize::from(len)).ok_or(PacketError::Option(code))?;
            bytes = rest;
            match self.0.iter_mut().find(|(found, _)| *found == code) {
                Some((_, found)) => found.extend(value),
                None => self.0.push((code, value.to_vec())),
            }
        }
        Ok(())
    }

    fn find(&self, code: u8) -> Option<&[u8]> {
        self.0.iter().find(|(found, _)| *found == code).map(|(_, value)| value.as_slice())
    }
}

fn up_to_nul(field: &[u8]) -> Vec<u8> {
    field.iter().copied().take_while(|byte| *byte != 0).collect()
}

fn four(header: &[u8], at: usize) -> [u8; 4] {
    header.get(at..).and_then(<[u8]>::first_chunk).copied().unwrap_or_default()
}

fn two(header: &[u8], at: usize) -> [u8; 2] {
    header.get(at..).and_then(<[u8]>::first_chunk).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = Mac([0x52, 0x54, 0, 1, 2, 3]);

    #[test]
    fn a_packet_survives_writing_and_reading() {
        let packet = Packet {
            broadcast: true,
            secs: 4,
            siaddr: Ipv4Addr::new(10, 0, 0, 2),
            file: b"ipxe.efi".to_vec(),
            ..Packet::of_client(0xdead_beef, MAC, MessageType::Discover)
        };
        let packet = packet.with(option::ARCHITECTURE, [0, 7]).with(option::VENDOR, [9; 300]);
        assert_eq!(Packet::parse(&packet.bytes()), Ok(packet.clone()));
        assert_eq!(packet.message_type(), Some(MessageType::Discover));
    }

    #[test]
    fn another_implementation_reads_what_is_written() {
        use dhcproto::v4::{Decodable, Decoder, DhcpOption, Message, OptionCode};
        let asked = Packet::of_client(7, MAC, MessageType::Discover);
        let mut packet = Packet::reply_to(&asked, MessageType::Offer);
        packet.siaddr = Ipv4Addr::new(10, 0, 0, 2);
        packet.file = b"undionly.kpxe".to_vec();
        let packet = packet.with(option::VENDOR_CLASS, *b"PXEClient").with(option::SERVER_ID, [10, 0, 0, 2]);
        let read = Message::decode(&mut Decoder::new(&packet.bytes())).unwrap();
        assert_eq!((read.xid(), read.siaddr(), read.chaddr()), (7, packet.siaddr, &MAC.0[..]));
        // dhcproto keeps the terminating zero.
        assert_eq!(read.fname(), Some(&b"undionly.kpxe\0"[..]));
        assert_eq!(read.opts().msg_type(), Some(dhcproto::v4::MessageType::Offer));
        let class = read.opts().get(OptionCode::ClassIdentifier);
        assert_eq!(class, Some(&DhcpOption::ClassIdentifier(b"PXEClient".to_vec())));
    }

    #[test]
    fn options_overflow_into_the_file_field() {
        let packet = Packet::of_client(1, MAC, MessageType::Discover).with(option::OVERLOAD, [1]);
        let mut bytes = packet.bytes();
        bytes[108..120].copy_from_slice(&[60, 9, b'P', b'X', b'E', b'C', b'l', b'i', b'e', b'n', b't', 255]);
        let read = Packet::parse(&bytes).unwrap();
        assert_eq!(read.option(option::VENDOR_CLASS), Some(&b"PXEClient"[..]));
        assert!(read.file.is_empty());
    }

    #[test]
    fn a_name_that_is_too_long_is_cut_and_ends_with_a_zero() {
        let mut packet = Packet::of_client(1, MAC, MessageType::Discover);
        packet.file = vec![b'x'; 200];
        let bytes = packet.bytes();
        assert_eq!((bytes[108 + 126], bytes[108 + 127]), (b'x', 0));
        assert_eq!(&bytes[236..240], &COOKIE);
    }

    #[test]
    fn malformed_packets_are_refused_with_a_reason() {
        let whole = Packet::of_client(1, MAC, MessageType::Discover).bytes();
        let parse = |change: fn(&mut Vec<u8>)| {
            let mut bytes = whole.clone();
            change(&mut bytes);
            Packet::parse(&bytes).unwrap_err()
        };
        assert_eq!(parse(|bytes| bytes.truncate(239)), PacketError::Length(239));
        assert_eq!(parse(|bytes| bytes.resize(1501, 0)), PacketError::Length(1501));
        assert_eq!(parse(|bytes| bytes[236] = 0), PacketError::Cookie);
        assert_eq!(parse(|bytes| bytes[2] = 16), PacketError::Hardware);
        assert_eq!(parse(|bytes| bytes[241] = 60), PacketError::Option(53));
        assert_eq!(parse(|bytes| bytes.truncate(241)), PacketError::Option(53));
    }
}
