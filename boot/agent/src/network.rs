//! The network card that the machine booted from: waits for its link, gets its address by DHCP, and renews the lease.

use std::fs;
use std::io::{self, ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use headwater_dhcp::{Lease, Mac, PACKET_BYTES_MAX, Packet, discover, renew, request};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::console::say;

/// How long the link may take to come up: a switch with spanning tree blocks a port for up to 50 s.
pub const LINK_TIMEOUT: Duration = Duration::from_secs(120);
/// How long DHCP may take to give an address.
pub const LEASE_TIMEOUT: Duration = Duration::from_secs(180);
/// How often the agent checks for the card and its link.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Timeouts for successive DHCP requests, in seconds. All further requests use the last timeout.
const DHCP_WAITS_S: [u64; 4] = [1, 2, 4, 8];
/// The shortest time between two attempts to renew a lease.
const RENEW_MIN: Duration = Duration::from_secs(15);
const CARDS: &str = "/sys/class/net";

/// A network card.
#[derive(Clone, Debug)]
pub(crate) struct Card {
    pub(crate) name: String,
    pub(crate) mac: Mac,
}

/// Waits for the card with this hardware address, whatever its name.
pub(crate) fn find_card(mac: &str) -> anyhow::Result<Card> {
    let mac: Mac = mac.parse().map_err(anyhow::Error::msg).context("cannot use the settings")?;
    let begin = Instant::now();
    loop {
        if let Some(name) = card_of(Path::new(CARDS), mac) {
            say(&format!("card {name}, {mac}"));
            return Ok(Card { name, mac });
        }
        if begin.elapsed() > LINK_TIMEOUT {
            bail!(
                "there is no network card {mac} after {} s; the initramfs lacks its driver, or the kernel does: a cloud kernel has \
                 none for physical cards",
                LINK_TIMEOUT.as_secs()
            );
        }
        std::thread::sleep(CHECK_INTERVAL);
    }
}

fn card_of(cards: &Path, mac: Mac) -> Option<String> {
    let entries = fs::read_dir(cards).ok()?;
    entries.flatten().find_map(|entry| {
        let address = fs::read_to_string(entry.path().join("address")).ok()?;
        let is_it = address.trim().parse() == Ok(mac);
        is_it.then(|| entry.file_name().to_string_lossy().into_owned())
    })
}

/// Brings the card up and gives it an address by DHCP.
pub(crate) fn configure(card: &Card) -> anyhow::Result<Lease> {
    let name = card.name.as_str();
    ip(&["link", "set", "lo", "up"])?;
    ip(&["link", "set", name, "up"])?;
    let begin = Instant::now();
    while fs::read_to_string(format!("{CARDS}/{name}/carrier")).unwrap_or_default().trim() != "1" {
        if begin.elapsed() > LINK_TIMEOUT {
            bail!("card {name} has no link after {} s", LINK_TIMEOUT.as_secs());
        }
        std::thread::sleep(CHECK_INTERVAL);
    }
    let lease = lease(card).with_context(|| format!("card {name} has no address"))?;
    ip(&["addr", "add", &format!("{}/{}", lease.address, lease.prefix), "broadcast", "+", "dev", name])?;
    if let Some(router) = lease.router {
        ip(&["route", "add", "default", "via", &router.to_string(), "dev", name])?;
    }
    say(&format!("address {}/{} for {} s", lease.address, lease.prefix, lease.seconds));
    Ok(lease)
}

fn ip(arguments: &[&str]) -> anyhow::Result<()> {
    let status = Command::new("/bin/ip").args(arguments).status().context("cannot run /bin/ip")?;
    if !status.success() {
        bail!("'ip {}' failed: {status}", arguments.join(" "));
    }
    Ok(())
}

fn socket(card: &Card) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_reuse_address(true)?;
    socket.bind_device(Some(card.name.as_bytes()))?;
    socket.set_broadcast(true)?;
    socket.bind(&SockAddr::from(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 68)))?;
    Ok(socket.into())
}

fn exchange_number() -> io::Result<u32> {
    let mut bytes = [0; 4];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u32::from_ne_bytes(bytes))
}

/// Sends DHCP requests until a server gives an address.
fn lease(card: &Card) -> anyhow::Result<Lease> {
    let socket = socket(card).context("cannot make a socket for DHCP")?;
    let begin = Instant::now();
    let mut waits = DHCP_WAITS_S.into_iter().chain(std::iter::repeat(DHCP_WAITS_S[3]));
    loop {
        let (xid, wait) = (exchange_number()?, Duration::from_secs(waits.next().unwrap_or(8)));
        let offer = ask(&socket, &discover(xid, card.mac), wait, |packet| request(xid, card.mac, packet));
        if let Ok(Some(asked)) = &offer
            && let Some(lease) = ask(&socket, asked, wait, |packet| Lease::of(xid, card.mac, packet))?
        {
            return Ok(lease);
        }
        if let Err(error) = offer {
            say(&format!("cannot send a DHCP request: {error}"));
            std::thread::sleep(wait);
        }
        if begin.elapsed() > LEASE_TIMEOUT {
            bail!("no DHCP server gave an address within {} s", LEASE_TIMEOUT.as_secs());
        }
        say("waiting for an address by DHCP");
    }
}

/// Broadcasts a packet, and returns the first answer that `made` accepts; `None` after the timeout `wait`.
fn ask<T>(
    socket: &UdpSocket,
    packet: &Packet,
    wait: Duration,
    mut made: impl FnMut(&Packet) -> Option<T>,
) -> io::Result<Option<T>> {
    socket.send_to(&packet.bytes(), (Ipv4Addr::BROADCAST, 67))?;
    let begin = Instant::now();
    let mut buffer = [0; PACKET_BYTES_MAX];
    while let Some(left) = wait.checked_sub(begin.elapsed()).filter(|left| !left.is_zero()) {
        socket.set_read_timeout(Some(left))?;
        let len = match socket.recv(&mut buffer) {
            Ok(len) => len,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let made = buffer.get(..len).and_then(|bytes| Packet::parse(bytes).ok()).as_ref().and_then(&mut made);
        if made.is_some() {
            return Ok(made);
        }
    }
    Ok(None)
}

/// Renews the lease as long as the process lives. The address stays even if no server renews the lease: without the
/// address the root disk is gone.
pub(crate) fn keep(card: Card, lease: Lease) {
    let work = move || {
        let mut lease = lease;
        let mut pause = Duration::from_secs(u64::from(lease.seconds) / 2);
        loop {
            std::thread::sleep(pause.max(RENEW_MIN));
            match renewed(&card, &lease) {
                Ok(Some(new)) if new.address == lease.address => {
                    tracing::info!("the DHCP lease of {} was renewed for {} s", new.address, new.seconds);
                    pause = Duration::from_secs(u64::from(new.seconds) / 2);
                    lease = new;
                }
                Ok(Some(new)) => {
                    tracing::error!(
                        "the DHCP server offers {}, but the machine keeps its address {}",
                        new.address,
                        lease.address
                    );
                }
                Ok(None) => {
                    tracing::warn!(
                        "no DHCP server renews the lease of {}; the machine keeps the address",
                        lease.address
                    );
                    pause /= 2;
                }
                Err(error) => tracing::warn!(
                    "cannot renew the DHCP lease of {}; the machine keeps the address: {error}",
                    lease.address
                ),
            }
        }
    };
    if let Err(error) = std::thread::Builder::new().name("lease".into()).spawn(work) {
        tracing::error!("cannot start the thread that renews the DHCP lease: {error}");
    }
}

fn renewed(card: &Card, lease: &Lease) -> io::Result<Option<Lease>> {
    // udev may have renamed the card since the system started.
    let name = card_of(Path::new(CARDS), card.mac).unwrap_or_else(|| card.name.clone());
    let card = Card { name, ..card.clone() };
    // Opened for each renewal, because the system's own DHCP client may need the port in between.
    let socket = socket(&card)?;
    let xid = exchange_number()?;
    ask(&socket, &renew(xid, card.mac, lease), Duration::from_secs(8), |packet| {
        Lease::of(xid, card.mac, packet)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_found_by_its_address_and_not_by_its_name() {
        let dir = tempfile::tempdir().unwrap();
        for (name, address) in [
            ("eth0", "52:54:00:00:00:01\n"),
            ("enp3s0", "52:54:00:00:00:02\n"),
            ("lo", "00:00:00:00:00:00\n"),
        ] {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("address"), address).unwrap();
        }
        let found = |mac: &str| card_of(dir.path(), mac.parse().unwrap());
        assert_eq!(found("52-54-00-00-00-02").as_deref(), Some("enp3s0"));
        assert_eq!(found("52:54:00:00:00:03"), None);
    }
}
