//! The server: listening, accepting, the registers of connections and sessions, and stopping.
//!
//! - `serve`: one connection from its first byte to its last; the login with its deadline.
//! - `registry`: who is connected, which session is whose, and replacing one by a new login.
//! - `session`: the full feature phase, one thread for each session; `commands`, `data_out`, `functions` and `texts` are what
//!   each PDU does, `replies` what is sent, `tasks` and `window` what is under way.
//! - `inbound`, `batch`: the buffers of a session. `event`: what other threads tell it.

mod batch;
mod commands;
mod data_out;
mod event;
mod functions;
mod inbound;
mod registry;
mod replies;
mod serve;
pub(crate) mod session;
mod tasks;
mod texts;
mod window;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use headwater_block::{Budget, FaultLog};
use headwater_connections::{BindError, Listener, Peer, Socket, host_port};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags};

use crate::Limits;
use crate::address::Address;
use crate::name::IscsiName;
use crate::targets::Targets;
use registry::{Registry, Seat};

/// How often a silent connection's thread looks at the clock, at least.
const TICK_MS_MAX: u64 = 1_000;

/// A running server. Dropping it stops it.
pub struct Server {
    shared: Arc<Shared>,
    host: String,
    port: u16,
    acceptor: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    targets: Arc<dyn Targets>,
    limits: Limits,
    faults: FaultLog,
    budget: Arc<Budget>,
    /// For data that came unasked. It waits for memory of the other budget, which therefore may not be taken by it.
    unasked: Arc<Budget>,
    registry: Registry,
    stopping: AtomicBool,
    stop_event: OwnedFd,
}

impl Server {
    /// Listens and serves until [`Server::stop`]. Initiators can connect when this returns.
    pub fn bind(address: &Address, targets: Arc<dyn Targets>, limits: Limits) -> Result<Self, BindError> {
        let (listener, port) = Listener::tcp(&address.host, address.port)?;
        let failed = listener.failed();
        let stop_event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| failed(errno.into()))?;
        let limits = limits.sane();
        let shared = Arc::new(Shared {
            faults: FaultLog::shared("iSCSI", limits.warnings_per_10_s),
            budget: Budget::new(limits.shared_bytes),
            unasked: Budget::new(limits.shared_bytes / 4),
            registry: Registry::default(),
            targets,
            limits,
            stopping: AtomicBool::new(false),
            stop_event,
        });
        let acceptor = std::thread::Builder::new()
            .name("iscsi-accept".into())
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.accept(&listener)
            })
            .map_err(failed)?;
        let host = address.host.clone();
        Ok(Self { shared, host, port, acceptor: Mutex::new(Some(acceptor)) })
    }

    /// The port, also where a free one was asked for.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of a logical unit as libiscsi, QEMU and others take it: `iscsi://HOST:PORT/TARGET/LUN`.
    pub fn url(&self, target: &IscsiName, lun: u16) -> String {
        format!("iscsi://{}/{target}/{lun}", host_port::join(&self.host, self.port))
    }

    /// How many initiators are connected now, half-open logins included.
    pub fn connections(&self) -> usize {
        self.shared.registry.connections()
    }

    /// How many sessions are in the full feature phase, discoveries included.
    pub fn sessions(&self) -> usize {
        self.shared.registry.sessions()
    }

    /// What commands of all sessions have taken of [`Limits::shared_bytes`], and of the quarter besides, now.
    pub fn shared_bytes_used(&self) -> u64 {
        self.shared.budget.used_bytes().saturating_add(self.shared.unasked.used_bytes())
    }

    /// Stops: no new connections; initiators are asked to log out, then commands in flight are finished and answered, and
    /// connections closed. Takes at most the time of [`Limits::logout_grace_ms`], [`Limits::stop_timeout_ms`] and a second.
    /// Harmless when repeated.
    pub fn stop(&self) {
        let Some(acceptor) = self.acceptor.lock().take() else { return };
        self.shared.stopping.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&self.shared.stop_event, &1_u64.to_ne_bytes());
        let _ = acceptor.join();
        let registry = &self.shared.registry;
        registry.for_each_socket(Socket::stop_receiving);
        let limits = &self.shared.limits;
        let patience = limits.logout_grace_ms.saturating_add(limits.stop_timeout_ms);
        if !registry.wait_until_empty(Duration::from_millis(patience)) {
            tracing::warn!(
                connections = registry.connections(),
                "iSCSI initiators did not take their replies within {patience} ms, or the device did not answer; \
                 cutting them off"
            );
            registry.for_each_socket(Socket::cut);
            registry.wait_until_empty(Duration::from_secs(1));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    fn accept(self: &Arc<Self>, listener: &Listener) {
        loop {
            let mut fds =
                [PollFd::new(listener, PollFlags::IN), PollFd::new(&self.stop_event, PollFlags::IN)];
            let polled = rustix::event::poll(&mut fds, None);
            if self.is_stopping() {
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
        let limits = &self.limits;
        let who = format!("initiator at {peer}");
        let admitted = self.registry.admit(&socket, limits.connections, limits.half_open_logins);
        let Some(id) = admitted else {
            let limit = limits.connections;
            self.faults
                .warn(&who, &format_args!("refused: {limit} initiators are connected, which is the limit"));
            return;
        };
        let seat = Seat { shared: Arc::clone(self), id };
        let spawned = std::thread::Builder::new().name(format!("iscsi-{id}")).spawn(move || {
            serve::serve(&seat, &socket, &peer);
            drop(socket);
            drop(seat);
        });
        if let Err(error) = spawned {
            self.faults.warn(&"listener", &format_args!("cannot start a thread for a connection: {error}"));
        }
    }
}
