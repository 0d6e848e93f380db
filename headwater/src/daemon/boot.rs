//! Sets up the boot server of `headwater serve --boot`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use headwater_boot_artefacts::Kept;
use headwater_boot_server::{AddressOptions, BootServer, Loaders, Options, Ports, Targets, Uefi};
use headwater_service::Service;
use headwater_store::Store;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::adapters::targets::{IssuedTokens, NetworkTargets};
use crate::daemon::dhcp_table;
use crate::data_dir::DataDir;
use crate::failure::invalid;

/// The boot server's settings.
#[derive(Clone, Debug)]
pub struct BootOffer {
    /// The interface of the machines' network.
    pub interface: String,
    /// The port of its HTTP server.
    pub http_port: u16,
    /// The file with the networks in which it assigns addresses.
    pub dhcp: Option<PathBuf>,
    /// The boot loader for machines with UEFI.
    pub uefi: Uefi,
    /// A directory with signed loaders, instead of those of the packages.
    pub signed: Option<PathBuf>,
    /// The CA certificates (PEM) that machines trust for the store server.
    pub ca: PathBuf,
}

/// A boot server with open ports, which does not serve yet.
pub struct Opened {
    server: BootServer,
    issued: IssuedTokens,
    kept: Kept,
    ca: Vec<u8>,
}

impl Opened {
    /// Opens the ports, before the daemon changes the database or the store: most wrong options show here.
    pub fn new(offer: &BootOffer, data_dir: &DataDir) -> anyhow::Result<Self> {
        let failed = || format!("cannot boot machines of {}", offer.interface);
        let ca = std::fs::read(&offer.ca);
        let ca = ca.with_context(|| format!("cannot read {}", offer.ca.display())).with_context(failed)?;
        let ports = Ports { http: offer.http_port, ..Ports::default() };
        let loaders = Loaders::installed(offer.uefi, offer.signed.as_deref()).with_context(failed)?;
        let subnets = offer.dhcp.as_deref().map(dhcp_table::read).transpose()?;
        let dir = data_dir.boot();
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let addresses = subnets.map(|subnets| AddressOptions { subnets, leases: dir.join("leases"), now_s });
        let interface = offer.interface.clone();
        let server = BootServer::bind(&Options { interface, ports, loaders, addresses });
        Ok(Self {
            server: server.with_context(failed)?,
            issued: IssuedTokens::open(&dir.join("tokens"))?,
            kept: Kept::new(dir.join("versions")),
            ca,
        })
    }

    /// The file with hashes of the tokens that were issued to machines.
    pub fn issued(&self) -> PathBuf {
        self.issued.path().to_owned()
    }

    /// The URL of its HTTP server.
    pub fn url(&self) -> String {
        self.server.url()
    }

    /// Begins to serve. `offered` is the address of the store server.
    pub async fn serve(
        self,
        service: Service,
        store: Arc<dyn Store>,
        offered: SocketAddr,
        stopped: watch::Receiver<bool>,
    ) -> anyhow::Result<JoinHandle<std::io::Result<()>>> {
        self.issued.forget_unknown_targets(&service).await?;
        let address = if offered.ip().is_unspecified() { self.server.address().into() } else { offered.ip() };
        let targets: Arc<dyn Targets> = Arc::new(NetworkTargets {
            service,
            store,
            kept: Arc::new(self.kept),
            issued: self.issued,
            servers: format!("https://{}", SocketAddr::new(address, offered.port())),
            ca: self.ca,
            refusals: Default::default(),
        });
        let server = self.server;
        Ok(tokio::spawn(async move {
            server.run(targets, stopped).await;
            Ok(())
        }))
    }
}

/// Fails if the machines could not read the store.
pub fn check(listen: Option<SocketAddr>, has_tls: bool) -> anyhow::Result<()> {
    let why = match listen {
        None => "give --store-listen, where they read their images",
        Some(listen) if listen.ip().is_loopback() => {
            "--store-listen is a loopback address: give one that the machines can reach"
        }
        Some(_) if !has_tls => "give --tls-cert and --tls-key for --store-listen",
        Some(_) => return Ok(()),
    };
    Err(invalid(format!("cannot boot machines with --boot: {why}")))
}

/// Seconds since 1970, the unit of DHCP leases.
fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_machines_cannot_read_is_refused() {
        let refused = |listen: Option<&str>, has_tls| {
            let listen = listen.map(|listen| listen.parse().unwrap());
            check(listen, has_tls).err().map(|why| why.to_string())
        };
        assert!(refused(None, false).unwrap().contains("give --store-listen"));
        assert!(refused(Some("127.0.0.1:1"), true).unwrap().contains("one that the machines can reach"));
        assert!(refused(Some("10.0.0.1:1"), false).unwrap().contains("give --tls-cert"));
        assert_eq!(refused(Some("10.0.0.1:1"), true), None);
    }
}
