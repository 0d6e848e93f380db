//! Wake-on-LAN: has a computer that is off switch itself on.
//!
//! The network card of such a computer waits for its own address, sixteen times after six bytes of ones ("magic packet"). The firmware of the
//! computer must permit that. Nothing answers, and a packet can be lost, so three are sent.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use headwater_dhcp::Mac;

use crate::interface;

/// The port that nobody listens on ("discard").
const PORT: u16 = 9;

/// How many packets are sent.
const PACKETS: usize = 3;

/// The packet for which the card with this address waits.
pub fn magic_packet(mac: Mac) -> Vec<u8> {
    [[0xff; 6].as_slice(), mac.0.repeat(16).as_slice()].concat()
}

/// Sends the packet to all computers in the network of an interface.
pub fn wake(interface: &str, mac: Mac) -> io::Result<()> {
    let socket = interface::udp(interface, 0)?;
    let packet = magic_packet(mac);
    for _ in 0..PACKETS {
        socket.send_to(&packet, SocketAddr::from((Ipv4Addr::BROADCAST, PORT)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_magic_packet_has_the_address_sixteen_times() {
        let packet = magic_packet(Mac([1, 2, 3, 4, 5, 6]));
        assert_eq!((packet.len(), &packet[..6]), (102, &[0xff; 6][..]));
        assert!(packet[6..].chunks(6).all(|part| part == [1, 2, 3, 4, 5, 6]));
    }
}
