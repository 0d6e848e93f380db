//! Ports 67 and 4011: packets in, what `headwater-dhcp` decides out.
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

/// So many unknown machines are remembered, so that each is logged once; then all are forgotten.
pub const UNKNOWN_MAX: usize = 1000;

/// How often it is said that a network has no free address.
const FULL_EVERY: Duration = Duration::from_secs(60);

/// So many addresses are probed for one request. The client asks again.
const PROBES_OF_ONE_MAX: usize = 4;

/// Whether a packet that no relay sent comes from another address than that of its client.
fn is_foreign(asked: &Packet, from: SocketAddr) -> bool {
    let std::net::IpAddr::V4(from) = from.ip() else { return true };
    asked.giaddr.is_unspecified() && !from.is_unspecified() && from != asked.ciaddr
}

/// What both ports share.
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

    /// What is remembered of machines.
    pub(crate) fn histories(&self) -> Arc<Mutex<Histories>> {
        Arc::clone(&self.histories)
    }

    /// Answers what comes to one of the ports, without end.
    pub(crate) async fn serve(self: Arc<Self>, socket: UdpSocket, port: Port) {
        let socket = Arc::new(socket);
        let mut buffer = [0; PACKET_BYTES_MAX];
        loop {
            let received = socket.recv_from(&mut buffer).await;
            let (len, from) = match received {
                Ok(received) => received,
                Err(error) => {
                    tracing::debug!(%error, "a DHCP packet cannot be received");
                    continue;
                }
            };
            let Ok(asked) = Packet::parse(buffer.get(..len).unwrap_or_default()) else { continue };
            let outcome = match &self.addresses {
                // A client sends from no address or from its own one: others speak for somebody else, or from another network.
                Some(_) if port == Port::Dhcp && is_foreign(&asked, from) => continue,
                Some(addresses) if port == Port::Dhcp => addresses.handle(&asked),
                _ => Outcome::Silent(Silence::Network),
            };
            match outcome {
                // Another server gives addresses there.
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

    /// Answers beside another server.
    async fn propose(&self, socket: &UdpSocket, asked: &Packet, port: Port, from: SocketAddr) {
        if let Some((bytes, to)) = self.answer(asked, port, from).await {
            send(socket, asked, &bytes, to).await;
        }
    }

    /// Finds an address that nobody uses, and offers it.
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
            "{PROBES_OF_ONE_MAX} addresses in a row are in use by others: look for a host that answers for all addresses"
        );
    }

    /// Sends an answer with an address, and tells firmware and loaders what to load.
    async fn give(&self, socket: &UdpSocket, asked: &Packet, mut answer: Packet, to: SocketAddrV4) {
        let message = answer.message_type();
        tracing::debug!(mac = %asked.mac, address = %answer.yiaddr, ?message, "answered with an address");
        if message != Some(MessageType::Nak) && is_firmware(asked) {
            let known = match self.targets.find(asked.mac).await {
                Ok(known) => known,
                Err(error) => {
                    tracing::error!(mac = %asked.mac, error, "a machine that boots cannot be looked up");
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
                "no address is free, and a client gets none: make the range longer or the leases shorter in the file of --boot-dhcp"
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
                tracing::error!(mac = %asked.mac, error, "a machine that boots cannot be looked up");
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
            // Offers that are repeated are one, and so are an offer and what is asked of port 4011 after it.
            Loader::Bios | Loader::EfiX64 | Loader::EfiX64Http => {
                let is_first = port == Port::Dhcp && histories.request(mac, now_ms).repeats == 0;
                if is_first && histories.gave_loader(mac, now_ms) {
                    tracing::error!(
                        machine = name, %mac,
                        "the machine loads loader after loader and never asks for its script: it gets no answer for 5 minutes. Look \
                         whether another DHCP server names a boot file"
                    );
                }
            }
        }
        tracing::info!(machine = name, %mac, ?port, ?loader, "boots: answered");
    }

    fn explain(&self, mac: Mac, reason: Reason, known: Option<&Known>) {
        let name = known.map_or("", |known| known.name.as_str());
        match reason {
            Reason::NotForUs | Reason::Looping => {}
            Reason::Architecture(number) => {
                tracing::warn!(machine = name, %mac, number, "the machine's architecture has no loader");
            }
            Reason::Unknown => {
                let mut unknown = self.unknown.lock();
                if unknown.len() >= UNKNOWN_MAX {
                    unknown.clear();
                }
                if unknown.insert(mac) {
                    tracing::info!(
                        %mac,
                        "a machine that nobody registered looks for a boot server, and gets no answer; 'headwater machine create NAME \
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
        tracing::warn!(mac = %asked.mac, %to, %error, "a DHCP answer cannot be sent");
    }
}
