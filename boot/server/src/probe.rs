//! Probes whether a host uses an address: sends an ICMP echo request and waits half a second for the answer.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use tokio::net::UdpSocket;

/// How long an answer may take. A client waits at least a second for its offer.
const TIMEOUT: Duration = Duration::from_millis(500);
const ECHO_REQUEST: u8 = 8;
const ECHO_REPLY: u8 = 0;

/// A socket for echo requests on this interface. It needs the capability `CAP_NET_RAW`.
pub(crate) fn socket(interface: &str) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::ICMPV4))?;
    socket.bind_device(Some(interface.as_bytes()))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Whether a host answers at the address. `number` is sent in the request, so that only the answer to this probe
/// counts.
pub(crate) async fn is_in_use(interface: &str, address: Ipv4Addr, number: u32) -> io::Result<bool> {
    let socket = socket(interface)?;
    // After this, only packets from that address are received.
    socket.connect(&SockAddr::from(SocketAddrV4::new(address, 0)))?;
    // Tokio can wait for a raw socket as for a UDP socket.
    let socket = UdpSocket::from_std(socket.into())?;
    socket.send(&echo_request(number)).await?;
    let answered = async {
        let mut buffer = [0; 576];
        loop {
            let len = socket.recv(&mut buffer).await?;
            if is_reply(buffer.get(..len).unwrap_or_default(), number) {
                return Ok(());
            }
        }
    };
    match tokio::time::timeout(TIMEOUT, answered).await {
        Ok(result) => result.map(|()| true),
        Err(_) => Ok(false),
    }
}

fn echo_request(number: u32) -> [u8; 8] {
    let [a, b, c, d] = number.to_be_bytes();
    let [high, low] = checksum(&[ECHO_REQUEST, 0, 0, 0, a, b, c, d]).to_be_bytes();
    [ECHO_REQUEST, 0, high, low, a, b, c, d]
}

/// Whether a packet, with its IP header, is the answer to the probe.
fn is_reply(packet: &[u8], number: u32) -> bool {
    let Some(&first) = packet.first() else { return false };
    let header_bytes = usize::from(first & 0xf) * 4;
    let [a, b, c, d] = number.to_be_bytes();
    packet.get(header_bytes..).is_some_and(
        |echo| matches!(echo, [ECHO_REPLY, 0, _, _, e, f, g, h, ..] if [a, b, c, d] == [*e, *f, *g, *h]),
    )
}

fn checksum(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes
        .chunks(2)
        .map(|pair| {
            u32::from(u16::from_be_bytes([
                pair.first().copied().unwrap_or(0),
                pair.get(1).copied().unwrap_or(0),
            ]))
        })
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_distinguished_from_other_packets() {
        let mut answer = [&[0x45; 20][..], &echo_request(7)].concat();
        assert!(!is_reply(&answer, 7), "a request");
        answer[20] = ECHO_REPLY;
        assert!(is_reply(&answer, 7));
        assert!(!is_reply(&answer, 8));
        assert!(!is_reply(&answer[..24], 7));
        assert!(!is_reply(&[], 7));
        // The sum over a packet with its checksum is zero.
        assert_eq!(checksum(&echo_request(0xdead_beef)), 0);
    }
}
