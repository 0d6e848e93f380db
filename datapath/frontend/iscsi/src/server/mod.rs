//! The server: handles connections. Listening, admission and stopping are in `headwater-connections`.
//!
//! - `serve`: one connection from its first byte to its last; the login with its deadline.
//! - `sessions`: the register of sessions, and replacing a session by a new login.
//! - `session`: the full feature phase, one thread for each session. `commands`, `data_out`, `functions` and
//!   `texts` process the kinds of PDUs, `replies` builds answers, `tasks` and `window` track what is under
//!   way. (`functions` are task management functions, which end commands.)
//! - `inbound`, `batch`: the buffers of a session. `pace`: detects data that arrives too slowly. `event`:
//!   reports from other threads.

mod batch;
mod commands;
mod data_out;
mod event;
mod functions;
mod inbound;
mod pace;
mod replies;
mod serve;
pub(crate) mod session;
mod sessions;
mod tasks;
mod texts;
mod window;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use headwater_block::{Budget, FaultLog};
use headwater_connections::{Acceptor, BindError, FrontEnd, Listener, Peer, Socket, host_port};

use crate::Limits;
use crate::address::Address;
use crate::name::IscsiName;
use crate::targets::Targets;
use sessions::Sessions;

/// How often the thread of a silent connection checks the clock, at least.
const TICK_MS_MAX: u64 = 1_000;

/// A running server. Dropping it stops it.
pub struct Server {
    shared: Arc<Shared>,
    host: String,
    port: u16,
    acceptor: Acceptor<Shared>,
}

struct Shared {
    targets: Arc<dyn Targets>,
    limits: Limits,
    faults: FaultLog,
    budget: Arc<Budget>,
    /// Memory for unsolicited data. A session may hold some while it waits for memory of the other budget, so
    /// the two must be separate.
    unsolicited: Arc<Budget>,
    /// How many commands were refused because there was no memory for their unsolicited data.
    refused: AtomicU64,
    sessions: Sessions,
}

impl Server {
    /// Listens and serves until [`Server::stop`]. Initiators can connect when this returns.
    pub fn bind(address: &Address, targets: Arc<dyn Targets>, limits: Limits) -> Result<Self, BindError> {
        let (listener, port) = Listener::tcp(&address.host, address.port)?;
        let limits = limits.sane();
        let seats = headwater_connections::Limits {
            connections: limits.connections,
            half_open: limits.half_open_logins,
        };
        let stop_timeout =
            Duration::from_millis(limits.logout_grace_ms.saturating_add(limits.stop_timeout_ms));
        let shared = Arc::new(Shared {
            faults: FaultLog::shared(Shared::PROTOCOL, limits.warnings_per_10_s),
            budget: Budget::new(limits.shared_bytes),
            unsolicited: Budget::new(limits.shared_bytes / 4),
            refused: AtomicU64::new(0),
            sessions: Sessions::default(),
            targets,
            limits,
        });
        let acceptor = Acceptor::start(listener, Arc::clone(&shared), seats, stop_timeout)?;
        Ok(Self { shared, host: address.host.clone(), port, acceptor })
    }

    /// The port, even if a free one was requested.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of a logical unit in the form of libiscsi and QEMU: `iscsi://HOST:PORT/TARGET/LUN`.
    pub fn url(&self, target: &IscsiName, lun: u16) -> String {
        format!("iscsi://{}/{target}/{lun}", host_port::join(&self.host, self.port))
    }

    /// How many connections are open now, including unfinished logins. An initiator may have several.
    pub fn connections(&self) -> usize {
        self.acceptor.connections()
    }

    /// How many sessions are in the full feature phase, including discoveries.
    pub fn sessions(&self) -> usize {
        self.shared.sessions.count()
    }

    /// Memory that commands of all sessions use now, of [`Limits::shared_bytes`] and of the additional memory
    /// for unsolicited data.
    pub fn shared_bytes_used(&self) -> u64 {
        self.shared.budget.used_bytes().saturating_add(self.shared.unsolicited.used_bytes())
    }

    /// Stops the server. No new connection is accepted. Initiators are asked to log out; then commands in
    /// flight are finished and answered, and connections closed. Takes at most [`Limits::logout_grace_ms`],
    /// [`Limits::stop_timeout_ms`] and a second. A second call does nothing.
    pub fn stop(&self) {
        self.acceptor.stop();
    }
}

impl FrontEnd for Shared {
    const PROTOCOL: &'static str = "iSCSI";
    const CLIENTS: &'static str = "initiators";
    const THREADS: &'static str = "iscsi";

    type Socket = Socket;

    fn socket(fd: OwnedFd) -> Socket {
        Socket::new(fd)
    }

    fn client(peer: &Peer) -> String {
        format!("initiator at {peer}")
    }

    fn faults(&self) -> &FaultLog {
        &self.faults
    }

    fn serve(&self, permit: &Permit, socket: &Arc<Socket>, peer: &Peer) {
        serve::serve(self, permit, socket, peer);
    }
}

/// The permit that admits a connection, which it holds until it ends.
type Permit = headwater_connections::Permit<Socket>;
