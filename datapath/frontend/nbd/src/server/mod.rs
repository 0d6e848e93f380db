//! The server: listening, accepting, the register of connections, and stopping.
//!
//! - `handshake`: options, until an export is chosen.
//! - `named`: several exports by name.
//! - `connection`: the transmission phase, one thread for each connection; `commands`: what each request does.
//! - `inbound`, `batch`, `pool`: the buffers of a connection. `ticket`: what goes with a request that must wait; `in_flight`: how much
//!   does.

mod batch;
mod commands;
mod connection;
mod handshake;
mod in_flight;
mod inbound;
mod named;
mod pool;
mod serve;
mod ticket;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use headwater_block::{Budget, Device, FaultLog, Geometry};
use headwater_connections::{BindError, Listener, Peer, host_port};
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, PollFd, PollFlags};

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

/// What is told about an export that is not opened yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// As the device that [`Exports::open`] gives has it.
    pub geometry: Geometry,
    /// Shown by clients; may be empty.
    pub description: String,
}

/// Why a client gets no export. Its text is sent to the client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotOpened {
    /// There is none of that name.
    #[error("no export has this name")]
    Unknown,
    /// This client may not have it.
    #[error("the names in this client's certificate do not allow this export")]
    Forbidden,
    /// It cannot be opened now.
    #[error("{0}")]
    Unavailable(String),
}

/// What a server offers, and to whom. Called on connections' threads, in the handshake.
pub trait Exports: Send + Sync + 'static {
    /// All that this client may see.
    fn list(&self, client: &ClientIdentity) -> Vec<ExportInfo>;

    /// What the export of that name is, for clients that only ask. Costs less than opening it.
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
    /// Names of which a client's certificate must have one.
    allowed: Option<Vec<String>>,
}

impl SingleExport {
    /// An export for `device`.
    pub fn new(device: Arc<dyn Device>, description: impl Into<String>) -> Arc<Self> {
        Arc::new(Self { export: Export { device, description: description.into() }, allowed: None })
    }

    /// The same for clients only whose certificate has one of these names.
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
    /// What clients may cost.
    pub limits: Limits,
    /// TLS; none is offered without this.
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
    uri: UriBase,
    acceptor: Mutex<Option<JoinHandle<()>>>,
}

enum UriBase {
    Unix(std::path::PathBuf),
    Tcp { host: String, port: u16 },
}

struct Shared {
    exports: Arc<dyn Exports>,
    limits: Limits,
    tls: Option<ServerTls>,
    faults: FaultLog,
    budget: Arc<Budget>,
    register: Mutex<Register>,
    emptied: Condvar,
    stopping: AtomicBool,
    stop_event: OwnedFd,
}

#[derive(Default)]
struct Register {
    next: u64,
    /// By age.
    connections: BTreeMap<u64, Registered>,
}

struct Registered {
    socket: Arc<Socket>,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Handshake,
    /// Cut in its handshake, to make room for another client.
    Evicted,
    Open,
}

impl Server {
    /// Listens and serves until [`Server::stop`]. Clients can connect when this returns.
    pub fn bind(
        address: Address,
        exports: Arc<dyn Exports>,
        options: impl Into<Options>,
    ) -> Result<Self, BindError> {
        let Options { limits, tls } = options.into();
        let (listener, uri) = match address {
            Address::Unix(path) => {
                let listener = Listener::unix(&path)?;
                (listener, UriBase::Unix(std::path::absolute(&path).unwrap_or(path)))
            }
            Address::Tcp { host, port } => {
                let (listener, port) = Listener::tcp(&host, port)?;
                (listener, UriBase::Tcp { host, port })
            }
        };
        let failed = listener.failed();
        let stop_event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| failed(errno.into()))?;
        let limits = limits.sane();
        let shared = Arc::new(Shared {
            faults: FaultLog::shared("NBD", limits.warnings_per_10_s),
            budget: Budget::new(limits.shared_bytes),
            exports,
            limits,
            tls,
            register: Mutex::default(),
            emptied: Condvar::new(),
            stopping: AtomicBool::new(false),
            stop_event,
        });
        let acceptor = std::thread::Builder::new()
            .name("nbd-accept".into())
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.accept(&listener)
            })
            .map_err(failed)?;
        Ok(Self { shared, uri, acceptor: Mutex::new(Some(acceptor)) })
    }

    /// The URI of the default export, as clients take it.
    pub fn uri(&self) -> String {
        self.uri_of("")
    }

    /// The URI of an export.
    pub fn uri_of(&self, export: &str) -> String {
        let name = crate::client::uri::escape(export.as_bytes(), false);
        let scheme = if self.shared.tls.as_ref().is_some_and(|tls| tls.is_required) { "nbds" } else { "nbd" };
        match &self.uri {
            UriBase::Unix(path) => {
                use std::os::unix::ffi::OsStrExt;
                let path = crate::client::uri::escape(path.as_os_str().as_bytes(), true);
                format!("{scheme}+unix:///{name}?socket={path}")
            }
            UriBase::Tcp { host, port } => format!("{scheme}://{}/{name}", host_port::join(host, *port)),
        }
    }

    /// How many clients are connected now, half-open handshakes included.
    pub fn connections(&self) -> usize {
        self.shared.register.lock().connections.len()
    }

    /// What requests of all connections have taken of [`Limits::shared_bytes`] now.
    pub fn shared_bytes_used(&self) -> u64 {
        self.shared.budget.used_bytes()
    }

    /// Stops: no new connections or requests; requests in flight are finished and answered, then connections
    /// close and the socket file is removed. Takes at most [`Limits::stop_timeout_ms`] and a second. Harmless when repeated.
    pub fn stop(&self) {
        let Some(acceptor) = self.acceptor.lock().take() else { return };
        self.shared.stopping.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&self.shared.stop_event, &1_u64.to_ne_bytes());
        let _ = acceptor.join();
        for connection in self.shared.register.lock().connections.values() {
            connection.socket.stop_receiving();
        }
        let patience = Duration::from_millis(self.shared.limits.stop_timeout_ms);
        if !self.shared.wait_until_empty(patience) {
            let register = self.shared.register.lock();
            tracing::warn!(
                connections = register.connections.len(),
                "NBD clients did not take their replies within {} ms, or the device did not answer; cutting them off",
                self.shared.limits.stop_timeout_ms
            );
            for connection in register.connections.values() {
                connection.socket.cut();
            }
            drop(register);
            self.shared.wait_until_empty(Duration::from_secs(1));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn wait_until_empty(&self, patience: Duration) -> bool {
        let deadline = Instant::now().checked_add(patience);
        let mut register = self.register.lock();
        while !register.connections.is_empty() {
            let timed_out = match deadline {
                Some(deadline) => self.emptied.wait_until(&mut register, deadline).timed_out(),
                None => {
                    self.emptied.wait(&mut register);
                    false
                }
            };
            if timed_out {
                return register.connections.is_empty();
            }
        }
        true
    }

    fn accept(self: &Arc<Self>, listener: &Listener) {
        loop {
            let mut fds =
                [PollFd::new(listener, PollFlags::IN), PollFd::new(&self.stop_event, PollFlags::IN)];
            let polled = rustix::event::poll(&mut fds, None);
            if self.stopping.load(Ordering::SeqCst) {
                return;
            }
            let accepted = match polled {
                Ok(_) => listener.accept(),
                Err(errno) => Err(errno.into()),
            };
            match accepted {
                Ok(Some((socket, peer))) => self.admit(Socket::new(socket), peer),
                Ok(None) => {}
                Err(error) => {
                    // Out of descriptors or memory: connections that end make room again.
                    self.faults.warn(&"listener", &format_args!("cannot accept a connection: {error}"));
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }

    fn admit(self: &Arc<Self>, socket: Socket, peer: Peer) {
        let socket = Arc::new(socket);
        let who = format!("client {peer}");
        let id = {
            let mut register = self.register.lock();
            register.make_room(self.limits.half_open);
            if register.connections.len() >= self.limits.connections {
                drop(register);
                let limit = self.limits.connections;
                self.faults
                    .warn(&who, &format_args!("refused: {limit} clients are connected, which is the limit"));
                return;
            }
            register.next = register.next.wrapping_add(1);
            let id = register.next;
            let registered = Registered { socket: Arc::clone(&socket), stage: Stage::Handshake };
            register.connections.insert(id, registered);
            id
        };
        let seat = Seat { shared: Arc::clone(self), id };
        let spawned = std::thread::Builder::new().name(format!("nbd-{id}")).spawn(move || {
            serve::serve(&seat, &socket, &who);
            drop(socket);
            drop(seat);
        });
        if let Err(error) = spawned {
            self.faults.warn(&"listener", &format_args!("cannot start a thread for a connection: {error}"));
        }
    }
}

/// A connection's place in the register; leaves it when dropped, also by a panic.
struct Seat {
    shared: Arc<Shared>,
    id: u64,
}

impl Seat {
    /// The handshake is over. `false`: it was cut before.
    fn open(&self) -> bool {
        let mut register = self.shared.register.lock();
        let Some(connection) = register.connections.get_mut(&self.id) else { return false };
        let is_there = connection.stage == Stage::Handshake;
        if is_there {
            connection.stage = Stage::Open;
        }
        is_there
    }

    /// Whether it was cut to make room for another client.
    fn is_evicted(&self) -> bool {
        let register = self.shared.register.lock();
        register.connections.get(&self.id).is_some_and(|connection| connection.stage == Stage::Evicted)
    }
}

impl Register {
    /// Ends the oldest handshake where there are `limit`.
    fn make_room(&mut self, limit: usize) {
        let is_half_open = |connection: &&mut Registered| connection.stage == Stage::Handshake;
        if self.connections.values_mut().filter(is_half_open).count() >= limit
            && let Some(oldest) = self.connections.values_mut().find(is_half_open)
        {
            oldest.stage = Stage::Evicted;
            oldest.socket.cut();
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut register = self.shared.register.lock();
        register.connections.remove(&self.id);
        if register.connections.is_empty() {
            self.shared.emptied.notify_all();
        }
    }
}
