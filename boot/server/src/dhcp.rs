//! Ports 67 and 4011: packets in, what `headwater-dhcp` decides out.

use std::collections::HashSet;
use std::net::{SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::time::Instant;

use headwater_dhcp::decide::is_asked;
use headwater_dhcp::{
    Histories, Loader, Mac, MessageType, PACKET_BYTES_MAX, Packet, Past, Port, Reason, Server, Verdict,
    decide,
};
use parking_lot::Mutex;
use tokio::net::UdpSocket;

use crate::targets::{Known, Targets};

/// So many unknown machines are remembered, so that each is logged once; then all are forgotten.
pub const UNKNOWN_MAX: usize = 1000;

/// What both ports share.
pub(crate) struct Dhcp {
    pub(crate) targets: Arc<dyn Targets>,
    pub(crate) server: Server,
    histories: Mutex<Histories>,
    unknown: Mutex<HashSet<Mac>>,
    started: Instant,
}

impl Dhcp {
    pub(crate) fn new(targets: Arc<dyn Targets>, server: Server, started: Instant) -> Self {
        Self { targets, server, histories: Mutex::default(), unknown: Mutex::default(), started }
    }

    /// Answers what comes to one of the ports, without end.
    pub(crate) async fn serve(self: Arc<Self>, socket: UdpSocket, port: Port) {
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
            let Some((bytes, to)) = self.answer(&asked, port, from).await else { continue };
            if let Err(error) = socket.send_to(&bytes, to).await {
                tracing::warn!(mac = %asked.mac, %to, %error, "a DHCP answer cannot be sent");
            }
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
            Loader::Bios | Loader::EfiX64 => {
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
