//! The server: its exports, and the handling of connections. Listening, admission and stopping are in
//! `headwater-connections`.
//!
//! - `handshake`: options, until an export is chosen.
//! - `named`: several exports by name.
//! - `connection`: the transmission phase, one thread for each connection; `commands`: executes each request.
//! - `in_parts`: requests that do not cover whole sectors, or exceed what the device takes at once; `gate`:
//!   separates partial-sector changes from changes of other connections.
//! - `inbound`, `batch`, `pool`: the buffers of a connection. `ticket`: the data of a request that must wait;
//!   `in_flight`: counts such requests.

mod batch;
mod commands;
mod connection;
mod gate;
mod handshake;
mod in_flight;
mod in_parts;
mod inbound;
mod named;
mod pool;
mod serve;
mod ticket;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use headwater_block::{Budget, Device, FaultLog, Geometry};
use headwater_connections::{Acceptor, BindError, FrontEnd, Listener, Peer, host_port};

use crate::socket::Socket;
use crate::tls::{ClientIdentity, ServerTls};
use crate::{Address, Limits};
pub use named::{NamedExports, Right};

/// One export: a device and a text for people.
#[derive(Clone)]
pub struct Export {
    /// What is served.
    pub device: Arc<dyn Device>,
    /// Shown by clients; may be empty.
    pub description: String,
}

/// A line in the list of exports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// The name to open it by.
    pub name: String,
    /// Shown by clients; may be empty.
    pub description: String,
}

/// Information about an export that is not opened yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// The same as that of the device that [`Exports::open`] returns.
    pub geometry: Geometry,
    /// Shown by clients; may be empty.
    pub description: String,
}

/// Why a client gets no export. The text is sent to the client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotOpened {
    /// There is no export of that name.
    #[error("no export has this name")]
    Unknown,
    /// This client may not use it.
    #[error("the names in this client's certificate do not allow this export")]
    Forbidden,
    /// The export exists, but cannot be used at present.
    #[error("{0}")]
    Unavailable(String),
    /// It exists, but opening it failed.
    #[error("{0}")]
    Failed(String),
}

/// What a server offers, and to whom. Called on connections' threads, in the handshake.
pub trait Exports: Send + Sync + 'static {
    /// All exports that this client may see.
    fn list(&self, client: &ClientIdentity) -> Vec<ExportInfo>;

    /// Describes the export of that name, for clients that only ask. It costs less than opening.
    fn describe(&self, name: &str, client: &ClientIdentity) -> Result<Described, NotOpened> {
        let export = self.open(name, client)?;
        Ok(Described { geometry: export.device.geometry(), description: export.description })
    }

    /// The export of that name, for one connection. The empty name asks for the default one.
    fn open(&self, name: &str, client: &ClientIdentity) -> Result<Export, NotOpened>;
}

/// One export, whatever name the client asks for.
pub struct SingleExport {
    export: Export,
    /// The client's certificate must have one of these names.
    allowed: Option<Vec<String>>,
}

impl SingleExport {
    /// An export for `device`.
    pub fn new(device: Arc<dyn Device>, description: impl Into<String>) -> Arc<Self> {
        Arc::new(Self { export: Export { device, description: description.into() }, allowed: None })
    }

    /// Like [`SingleExport::new`], but only for clients whose certificate has one of these names.
    pub fn for_clients(
        device: Arc<dyn Device>,
        description: impl Into<String>,
        names: Vec<String>,
    ) -> Arc<Self> {
        Arc::new(Self { export: Export { device, description: description.into() }, allowed: Some(names) })
    }

    fn allows(&self, client: &ClientIdentity) -> bool {
        self.allowed.as_ref().is_none_or(|allowed| client.names.iter().any(|name| allowed.contains(name)))
    }
}

impl Exports for SingleExport {
    fn list(&self, client: &ClientIdentity) -> Vec<ExportInfo> {
        if !self.allows(client) {
            return Vec::new();
        }
        vec![ExportInfo { name: String::new(), description: self.export.description.clone() }]
    }

    fn open(&self, _name: &str, client: &ClientIdentity) -> Result<Export, NotOpened> {
        if self.allows(client) { Ok(self.export.clone()) } else { Err(NotOpened::Forbidden) }
    }
}

/// How a server serves.
#[derive(Clone, Default)]
pub struct Options {
    /// Limits for clients.
    pub limits: Limits,
    /// TLS; `None`: not offered.
    pub tls: Option<ServerTls>,
}

impl From<Limits> for Options {
    fn from(limits: Limits) -> Self {
        Self { limits, tls: None }
    }
}

/// A running server. Dropping it stops it.
pub struct Server {
    shared: Arc<Shared>,
    /// With the actual port.
    address: Address,
    acceptor: Acceptor<Shared>,
}

struct Shared {
    exports: Arc<dyn Exports>,
    limits: Limits,
    tls: Option<ServerTls>,
    faults: FaultLog,
    budget: Arc<Budget>,
    gates: gate::Gates,
}

impl Server {
    /// Listens and serves until [`Server::stop`]. Clients can connect when this returns.
    pub fn bind(
        address: Address,
        exports: Arc<dyn Exports>,
        options: impl Into<Options>,
    ) -> Result<Self, BindError> {
        let Options { limits, tls } = options.into();
        let (listener, address) = match address {
            Address::Unix(path) => {
                let listener = Listener::unix(&path)?;
                (listener, Address::Unix(std::path::absolute(&path).unwrap_or(path)))
            }
            Address::Tcp { host, port } => {
                let (listener, port) = Listener::tcp(&host, port)?;
                (listener, Address::Tcp { host, port })
            }
        };
        let limits = limits.sane();
        let seats =
            headwater_connections::Limits { connections: limits.connections, half_open: limits.half_open };
        let stop_timeout = Duration::from_millis(limits.stop_timeout_ms);
        let shared = Arc::new(Shared {
            faults: FaultLog::shared(Shared::PROTOCOL, limits.warnings_per_10_s),
            budget: Budget::new(limits.shared_bytes),
            gates: gate::Gates::default(),
            exports,
            limits,
            tls,
        });
        let acceptor = Acceptor::start(listener, Arc::clone(&shared), seats, stop_timeout)?;
        Ok(Self { shared, address, acceptor })
    }

    /// The URI of the default export, as clients accept it.
    pub fn uri(&self) -> String {
        self.uri_of("")
    }

    /// The URI of an export.
    pub fn uri_of(&self, export: &str) -> String {
        let name = crate::client::uri::escape(export.as_bytes(), false);
        let scheme = if self.shared.tls.as_ref().is_some_and(|tls| tls.is_required) { "nbds" } else { "nbd" };
        match &self.address {
            Address::Unix(path) => {
                use std::os::unix::ffi::OsStrExt;
                let path = crate::client::uri::escape(path.as_os_str().as_bytes(), true);
                format!("{scheme}+unix:///{name}?socket={path}")
            }
            Address::Tcp { host, port } => format!("{scheme}://{}/{name}", host_port::join(host, *port)),
        }
    }

    /// How many clients are connected now, including half-open handshakes.
    pub fn connections(&self) -> usize {
        self.acceptor.connections()
    }

    /// Bytes of [`Limits::shared_bytes`] that requests of all connections use now.
    pub fn shared_bytes_used(&self) -> u64 {
        self.shared.budget.used_bytes()
    }

    /// Stops the server. No new connection or request is accepted. Requests in flight are finished and
    /// answered, then connections close and the socket file is removed. Takes at most
    /// [`Limits::stop_timeout_ms`] and a second. Harmless when repeated.
    pub fn stop(&self) {
        self.acceptor.stop();
    }
}

impl FrontEnd for Shared {
    const PROTOCOL: &'static str = "NBD";
    const CLIENTS: &'static str = "clients";
    const THREADS: &'static str = "nbd";

    type Socket = Socket;

    fn socket(fd: OwnedFd) -> Socket {
        Socket::new(fd)
    }

    fn client(peer: &Peer) -> String {
        format!("client {peer}")
    }

    fn faults(&self) -> &FaultLog {
        &self.faults
    }

    fn serve(&self, permit: &Permit, socket: &Arc<Socket>, peer: &Peer) {
        serve::serve(self, permit, socket, peer);
    }
}

/// The permit of a connection.
type Permit = headwater_connections::Permit<Socket>;
