//! Sockets on the DHCP ports 67 and 4011: receives packets, and sends the answers that `headwater-dhcp` decides on.
//!
//! ```text
//!   the packet's network is in the table of --boot-dhcp?   yes: Addresses --> OFFER, ACK, NAK, with a loader for firmware
//!                                                          no:  decide    --> an offer without an address (proxy DHCP)
//! ```

use std::collections::HashSet;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_dhcp::decide::{is_asked, is_firmware};
use headwater_dhcp::leases::Silence;
use headwater_dhcp::{
    Histories, Loader, Mac, MessageType, Outcome, PACKET_BYTES_MAX, Packet, Past, Port, Reason, Server,
    Verdict, choose, decide, with_loader,
};
use parking_lot::Mutex;
use tokio::net::UdpSocket;

use crate::leases::Addresses;
use crate::targets::{Known, Targets};

/// The most unknown machines that are remembered, so that each is logged once. When the set is full, it is emptied.
pub const UNKNOWN_MAX: usize = 1000;

/// The shortest time between two log lines about a network without a free address.
const FULL_EVERY: Duration = Duration::from_secs(60);

/// The most addresses that are probed for one DISCOVER. The client repeats its DISCOVER if none was found.
const PROBES_OF_ONE_MAX: usize = 4;

/// Whether a packet that came without a relay has a source address other than its client's.
fn is_foreign(asked: &Packet, from: SocketAddr) -> bool {
    let std::net::IpAddr::V4(from) = from.ip() else { return true };
    asked.giaddr.is_unspecified() && !from.is_unspecified() && from != asked.ciaddr
}

/// The state that both ports share.
pub(crate) struct Dhcp {
    pub(crate) targets: Arc<dyn Targets>,
    pub(crate) server: Server,
    addresses: Option<Addresses>,
    histories: Arc<Mutex<Histories>>,
    unknown: Mutex<HashSet<Mac>>,
    full_said: Mutex<Option<Instant>>,
    started: Instant,
}

impl Dhcp {
    pub(crate) fn new(
        targets: Arc<dyn Targets>,
        server: Server,
        addresses: Option<Addresses>,
        started: Instant,
    ) -> Self {
        let (histories, unknown, full_said) = (Arc::default(), Mutex::default(), Mutex::default());
        Self { targets, server, addresses, histories, unknown, full_said, started }
    }

    /// The histories of the machines.
    pub(crate) fn histories(&self) -> Arc<Mutex<Histories>> {
        Arc::clone(&self.histories)
    }

    /// Answers packets on one of the ports, without end.
    pub(crate) async fn serve(self: Arc<Self>, socket: UdpSocket, port: Port) {
        let socket = Arc::new(socket);
        let mut buffer = [0; PACKET_BYTES_MAX];
        loop {
            let received = socket.recv_from(&mut buffer).await;
            let (len, from) = match received {
                Ok(received) => received,
                Err(error) => {
                    tracing::debug!(%error, "cannot receive a DHCP packet");
                    continue;
                }
            };
            let Ok(asked) = Packet::parse(buffer.get(..len).unwrap_or_default()) else { continue };
            let outcome = match &self.addresses {
                // A client sends from the zero address or from its own. Any other source speaks for another host, or
                // comes from another network.
                Some(_) if port == Port::Dhcp && is_foreign(&asked, from) => continue,
                Some(addresses) if port == Port::Dhcp => addresses.handle(&asked),
                _ => Outcome::Silent(Silence::Network),
            };
            match outcome {
                // Another server gives the addresses in that network.
                Outcome::Silent(Silence::Network) => self.propose(&socket, &asked, port, from).await,
                Outcome::Silent(reason) => self.explain_silence(&asked, reason),
                Outcome::Answer(answer, to) => self.give(&socket, &asked, *answer, to).await,
                Outcome::Probe(address) => {
                    let (dhcp, socket) = (Arc::clone(&self), Arc::clone(&socket));
                    tokio::spawn(async move { dhcp.probe_and_give(&socket, &asked, address).await });
                }
            }
        }
    }

    /// Names a boot file in addition to another server's answer (proxy DHCP).
    async fn propose(&self, socket: &UdpSocket, asked: &Packet, port: Port, from: SocketAddr) {
        if let Some((bytes, to)) = self.answer(asked, port, from).await {
            send(socket, asked, &bytes, to).await;
        }
    }

    /// Finds an address that no host uses, and offers it.
    async fn probe_and_give(&self, socket: &UdpSocket, asked: &Packet, mut address: Ipv4Addr) {
        let Some(addresses) = &self.addresses else { return };
        for _ in 0..PROBES_OF_ONE_MAX {
            match addresses.probe(asked, address).await {
                Outcome::Probe(next) => address = next,
                Outcome::Answer(answer, to) => return self.give(socket, asked, *answer, to).await,
                Outcome::Silent(reason) => return self.explain_silence(asked, reason),
            }
        }
        tracing::error!(
            mac = %asked.mac,
            "{PROBES_OF_ONE_MAX} addresses in a row are already in use: check whether a host answers for all addresses"
        );
    }

    /// Sends an answer with an address. An answer to firmware or a loader also names the boot file.
    async fn give(&self, socket: &UdpSocket, asked: &Packet, mut answer: Packet, to: SocketAddrV4) {
        let message = answer.message_type();
        tracing::debug!(mac = %asked.mac, address = %answer.yiaddr, ?message, "answered with an address");
        if message != Some(MessageType::Nak) && is_firmware(asked) {
            let known = match self.targets.find(asked.mac).await {
                Ok(known) => known,
                Err(error) => {
                    tracing::error!(mac = %asked.mac, error, "cannot look up a machine that asks for an address");
                    None
                }
            };
            match choose(asked, known.is_some(), self.past(asked)) {
                Ok((loader, _)) => {
                    answer = with_loader(answer, asked, loader, &self.server);
                    if message == Some(MessageType::Offer) {
                        self.note(asked, Port::Dhcp, loader, known.as_ref());
                    }
                }
                Err(reason) => self.explain(asked.mac, reason, known.as_ref()),
            }
        }
        send(socket, asked, &answer.with_relay_of(asked).bytes(), to.into()).await;
    }

    fn explain_silence(&self, asked: &Packet, reason: Silence) {
        if reason != Silence::Full {
            tracing::debug!(mac = %asked.mac, message = ?asked.message_type(), ?reason, "no DHCP answer");
            return;
        }
        let mut said = self.full_said.lock();
        if said.is_none_or(|said| said.elapsed() >= FULL_EVERY) {
            *said = Some(Instant::now());
            tracing::error!(
                mac = %asked.mac, relay = %asked.giaddr,
                "no address is free for a client: enlarge the range or shorten the leases in the file of --boot-dhcp"
            );
        }
    }

    async fn answer(&self, asked: &Packet, port: Port, from: SocketAddr) -> Option<(Vec<u8>, SocketAddr)> {
        if !is_asked(asked, port) {
            return None;
        }
        let known = match self.targets.find(asked.mac).await {
            Ok(known) => known,
            Err(error) => {
                tracing::error!(mac = %asked.mac, error, "cannot look up a machine that asks for a boot server");
                return None;
            }
        };
        let past = self.past(asked);
        match decide(asked, port, known.is_some(), past, &self.server) {
            Verdict::Answer(answer) => {
                self.note(asked, port, answer.loader, known.as_ref());
                let to = answer.to.map_or(from, |to: SocketAddrV4| to.into());
                Some((answer.packet.bytes(), to))
            }
            Verdict::Silent(reason) => {
                self.explain(asked.mac, reason, known.as_ref());
                None
            }
        }
    }

    fn past(&self, asked: &Packet) -> Past {
        let now_ms = self.now_ms();
        let mut histories = self.histories.lock();
        match asked.message_type() {
            Some(MessageType::Discover) => histories.discover(asked.mac, asked.xid, now_ms),
            _ => histories.request(asked.mac, now_ms),
        }
    }

    fn note(&self, asked: &Packet, port: Port, loader: Loader, known: Option<&Known>) {
        let (mac, name) = (asked.mac, known.map_or("", |known| known.name.as_str()));
        let now_ms = self.now_ms();
        let mut histories = self.histories.lock();
        match loader {
            Loader::Script => histories.gave_script(mac, now_ms),
            // Only the first offer of an exchange counts: not a repeated offer, and not the answer on port 4011 after
            // it.
            Loader::Bios | Loader::EfiX64 | Loader::EfiX64Http => {
                let is_first = port == Port::Dhcp && histories.request(mac, now_ms).repeats == 0;
                if is_first && histories.gave_loader(mac, now_ms) {
                    tracing::error!(
                        machine = name, %mac,
                        "the machine loads loader after loader and never fetches its script: it gets no answer for 5 minutes. \
                         Check whether another DHCP server names a boot file"
                    );
                }
            }
        }
        tracing::info!(machine = name, %mac, ?port, ?loader, "answered a machine that boots");
    }

    fn explain(&self, mac: Mac, reason: Reason, known: Option<&Known>) {
        let name = known.map_or("", |known| known.name.as_str());
        match reason {
            Reason::NotForUs | Reason::Looping => {}
            Reason::Architecture(number) => {
                tracing::warn!(machine = name, %mac, number, "there is no loader for the machine's architecture");
            }
            Reason::Unknown => {
                let mut unknown = self.unknown.lock();
                if unknown.len() >= UNKNOWN_MAX {
                    unknown.clear();
                }
                if unknown.insert(mac) {
                    tracing::info!(
                        %mac,
                        "a machine that is not registered looks for a boot server and gets no answer; 'headwater machine create NAME \
                         IMAGE --boot network --mac {mac}' registers it"
                    );
                }
            }
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

async fn send(socket: &UdpSocket, asked: &Packet, bytes: &[u8], to: SocketAddr) {
    if let Err(error) = socket.send_to(bytes, to).await {
        tracing::warn!(mac = %asked.mac, %to, %error, "cannot send a DHCP answer");
    }
}
