//! Opens all ports of the boot server, and serves them. They are opened together, so that an error is known before
//! any packet is answered.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use headwater_boot_script::grub;
use headwater_dhcp::{Port, Server};
use tokio::net::{TcpListener, UdpSocket};
use tokio::sync::watch;

use crate::dhcp::Dhcp;
use crate::error::BootError;
use crate::http::Http;
use crate::leases::{AddressOptions, Addresses};
use crate::loaders::{BIOS_NAME, EFI_NAME, Loaders};
use crate::targets::Targets;
use crate::{interface, tftp};

/// The port numbers. 0 means any free port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    /// DHCP; default 67.
    pub dhcp: u16,
    /// PXE boot server, which firmware asks after an offer in BINL form; default 4011.
    pub boot_server: u16,
    /// TFTP; default 69.
    pub tftp: u16,
    /// HTTP; default 80.
    pub http: u16,
}

impl Default for Ports {
    fn default() -> Self {
        Self { dhcp: 67, boot_server: 4011, tftp: 69, http: 80 }
    }
}

/// The configuration of a boot server.
#[derive(Clone, Debug)]
pub struct Options {
    /// The interface of the machines' network.
    pub interface: String,
    /// Its ports.
    pub ports: Ports,
    /// The loaders.
    pub loaders: Loaders,
    /// The addresses that it gives to clients. `None`: another DHCP server gives addresses.
    pub addresses: Option<AddressOptions>,
}

/// A boot server whose ports are open. The ports close when [`BootServer::run`] returns.
pub struct BootServer {
    server: Server,
    interface: String,
    loaders: Loaders,
    addresses: Option<Addresses>,
    dhcp: UdpSocket,
    boot_server: UdpSocket,
    tftp: UdpSocket,
    http: TcpListener,
}

impl BootServer {
    /// Opens all ports. Nothing is answered before [`BootServer::run`].
    pub fn bind(options: &Options) -> Result<Self, BootError> {
        let Options { interface, ports, loaders, addresses } = options;
        let failed = |source| BootError::Interface { interface: interface.clone(), source };
        let address: Ipv4Addr = interface::address(interface).map_err(failed)?;
        let listen = |what: &str, port: u16| {
            let what = format!("{what} (port {port})");
            move |source| BootError::Listen { what: what.clone(), interface: interface.clone(), source }
        };
        let udp = |what, port| {
            interface::udp(interface, port).and_then(UdpSocket::from_std).map_err(listen(what, port))
        };
        let http = interface::tcp(interface, ports.http).and_then(TcpListener::from_std);
        let http = http.map_err(listen("HTTP", ports.http))?;
        let open = |given: &AddressOptions| Addresses::open(given.clone(), address, interface);
        let http_port = http.local_addr().map_err(listen("HTTP", ports.http))?.port();
        Ok(Self {
            server: Server {
                address,
                http_port,
                bios_loader: BIOS_NAME.to_owned(),
                efi_loader: EFI_NAME.to_owned(),
            },
            interface: interface.clone(),
            loaders: loaders.clone().with_start(&grub::start(address, http_port)),
            addresses: addresses.as_ref().map(open).transpose()?,
            dhcp: udp("DHCP", ports.dhcp)?,
            boot_server: udp("PXE", ports.boot_server)?,
            tftp: udp("TFTP", ports.tftp)?,
            http,
        })
    }

    /// The URL of its HTTP server.
    pub fn url(&self) -> String {
        format!("http://{}:{}", self.server.address, self.server.http_port)
    }

    /// Its address in the machines' network.
    pub fn address(&self) -> Ipv4Addr {
        self.server.address
    }

    /// The address of its TFTP server.
    pub fn tftp_address(&self) -> std::io::Result<SocketAddr> {
        self.tftp.local_addr()
    }

    /// Serves until `stop` becomes true.
    pub async fn run(self, targets: Arc<dyn Targets>, mut stop: watch::Receiver<bool>) {
        let started = Instant::now();
        let dhcp = Dhcp::new(Arc::clone(&targets), self.server.clone(), self.addresses, started);
        let http = Http::new(targets, self.server, self.loaders.clone(), dhcp.histories(), started);
        let (dhcp, http) = (Arc::new(dhcp), Arc::new(http));
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(Arc::clone(&dhcp).serve(self.dhcp, Port::Dhcp));
        tasks.spawn(dhcp.serve(self.boot_server, Port::BootServer));
        tasks.spawn(tftp::serve(self.tftp, self.interface, self.loaders));
        tasks.spawn(http.serve(self.http));
        // Interrupted transfers need no care: the machines try again, here or at another server.
        let _ = stop.wait_for(|stop| *stop).await;
        tasks.shutdown().await;
    }
}
