//! Full DHCP: combines the configured networks, the leases, the lease file and the probes.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use headwater_dhcp::{Leases, Outcome, Packet, Subnets};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::error::BootError;
use crate::lease_file::LeaseFile;
use crate::probe;

/// The most addresses that are probed at a time; further probes wait.
pub const PROBES_MAX: usize = 256;

/// The configuration of a server that gives addresses.
#[derive(Clone, Debug)]
pub struct AddressOptions {
    /// The networks.
    pub subnets: Subnets,
    /// The file of leases.
    pub leases: PathBuf,
    /// The clock: seconds since 1970.
    pub now_s: fn() -> u64,
}

/// The state of a server that gives addresses.
pub(crate) struct Addresses {
    kept: Mutex<(Leases, LeaseFile)>,
    now_s: fn() -> u64,
    interface: String,
    probes: Semaphore,
    number: AtomicU32,
}

impl Addresses {
    /// Reads the lease file. `server` is the server's address in answers.
    pub(crate) fn open(
        options: AddressOptions,
        server: Ipv4Addr,
        interface: &str,
    ) -> Result<Self, BootError> {
        let what = "answers to probes of addresses (ICMP)".to_owned();
        let failed = |source| BootError::Listen { what, interface: interface.to_owned(), source };
        probe::socket(interface).map_err(failed)?;
        let mut leases = Leases::new(options.subnets, server);
        let file = LeaseFile::open(&options.leases, &mut leases)?;
        Ok(Self {
            kept: Mutex::new((leases, file)),
            now_s: options.now_s,
            interface: interface.to_owned(),
            probes: Semaphore::new(PROBES_MAX),
            number: AtomicU32::new(std::process::id() << 16),
        })
    }

    /// Handles a packet. Changes are written to the lease file before this returns.
    pub(crate) fn handle(&self, asked: &Packet) -> Outcome {
        self.change(|leases| leases.handle(asked, (self.now_s)()))
    }

    /// Probes an address, and continues the DISCOVER with the result.
    pub(crate) async fn probe(&self, asked: &Packet, address: Ipv4Addr) -> Outcome {
        let permit = self.probes.acquire().await;
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let is_in_use = probe::is_in_use(&self.interface, address, number).await.unwrap_or_else(|error| {
            // An address that cannot be reached is not used by a reachable host.
            tracing::debug!(%address, %error, "cannot probe an address");
            false
        });
        drop(permit);
        if is_in_use {
            tracing::warn!(
                %address, mac = %asked.mac,
                "a host uses an address without a lease: the address is given to no client for an hour"
            );
        }
        self.change(|leases| leases.probed(asked, address, is_in_use, (self.now_s)()))
    }

    fn change(&self, change: impl FnOnce(&mut Leases) -> Outcome) -> Outcome {
        let mut kept = self.kept.lock();
        let (leases, file) = &mut *kept;
        let outcome = change(leases);
        match file.keep(leases) {
            Ok(()) => outcome,
            Err(error) => {
                tracing::error!(%error, "cannot write a lease to its file, so the client gets no answer");
                Outcome::Silent(headwater_dhcp::leases::Silence::NotForUs)
            }
        }
    }
}
