//! A server of many connections: one thread accepts them, and a thread per connection serves it. Stopping the
//! server ends all of them.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use headwater_block::FaultLog;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags};

use crate::listener::{BindError, Listener, Peer};
use crate::register::{Limits, Permit, Register};
use crate::socket::Socket;

/// How long to wait before the next accept if descriptors or memory are short. Connections that end meanwhile
/// give some back.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(100);

/// How long a cut connection may take to end.
const CUT_GRACE: Duration = Duration::from_secs(1);

/// A protocol's part of a server: how it serves a connection, and the words for its log lines.
pub trait FrontEnd: Send + Sync + 'static {
    /// Name of the protocol in logs.
    const PROTOCOL: &'static str;
    /// Plural noun for the clients in logs, such as "initiators".
    const CLIENTS: &'static str;
    /// Prefix of the names of its threads.
    const THREADS: &'static str;

    /// The socket type of its connections.
    type Socket: AsRef<Socket> + Send + Sync + 'static;

    /// Wraps a new connection.
    fn socket(fd: OwnedFd) -> Self::Socket;

    /// Describes the client at this address in logs.
    fn client(peer: &Peer) -> String;

    /// The log of faults that clients cause.
    fn faults(&self) -> &FaultLog;

    /// Serves a connection until it ends, on a thread of its own. When the server stops, the socket receives
    /// nothing more.
    fn serve(&self, permit: &Permit<Self::Socket>, socket: &Arc<Self::Socket>, peer: &Peer);
}

/// Accepts connections and starts a thread for each. Dropping it stops the server.
pub struct Acceptor<F: FrontEnd> {
    shared: Arc<Shared<F>>,
    stop_timeout: Duration,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared<F: FrontEnd> {
    front_end: Arc<F>,
    register: Arc<Register<F::Socket>>,
    limits: Limits,
    stop_event: OwnedFd,
}

impl<F: FrontEnd> Acceptor<F> {
    /// Starts to accept. After [`Acceptor::stop`], connections have `stop_timeout` to end before they are
    /// cut.
    pub fn start(
        listener: Listener,
        front_end: Arc<F>,
        limits: Limits,
        stop_timeout: Duration,
    ) -> Result<Self, BindError> {
        let failed = listener.failed();
        let stop_event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| failed(errno.into()))?;
        let register = Register::new(limits);
        let shared = Arc::new(Shared { front_end, register, limits, stop_event });
        let thread = std::thread::Builder::new()
            .name(format!("{}-accept", F::THREADS))
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.accept(&listener)
            })
            .map_err(failed)?;
        Ok(Self { shared, stop_timeout, thread: Mutex::new(Some(thread)) })
    }

    /// Number of connections now, including half-open ones.
    pub fn connections(&self) -> usize {
        self.shared.register.count()
    }

    /// Stops the server. It accepts no more connections and closes the listener. Sockets receive nothing
    /// more, so connections end when their requests are answered. Connections that have not ended after
    /// `stop_timeout` are cut, which takes at most one second more. A second call does nothing.
    pub fn stop(&self) {
        let Some(thread) = self.thread.lock().take() else { return };
        let register = &self.shared.register;
        register.begin_stop();
        let _ = rustix::io::write(&self.shared.stop_event, &1_u64.to_ne_bytes());
        let _ = thread.join();
        register.for_each_socket(Socket::stop_receiving);
        if !register.wait_until_empty(self.stop_timeout) {
            tracing::warn!(
                connections = register.count(),
                "{} {} did not take their replies within {} ms, or the device did not answer; closing their connections",
                F::PROTOCOL,
                F::CLIENTS,
                self.stop_timeout.as_millis()
            );
            register.for_each_socket(Socket::cut);
            register.wait_until_empty(CUT_GRACE);
        }
    }
}

impl<F: FrontEnd> Drop for Acceptor<F> {
    fn drop(&mut self) {
        self.stop();
    }
}

impl<F: FrontEnd> Shared<F> {
    fn accept(&self, listener: &Listener) {
        loop {
            let mut fds =
                [PollFd::new(listener, PollFlags::IN), PollFd::new(&self.stop_event, PollFlags::IN)];
            let polled = rustix::event::poll(&mut fds, None);
            if self.register.is_stopping() {
                return;
            }
            let accepted = match polled {
                Ok(_) => listener.accept(),
                Err(errno) => Err(errno.into()),
            };
            match accepted {
                Ok(Some((socket, peer))) => self.admit(F::socket(socket), peer),
                Ok(None) => {}
                Err(error) => {
                    self.front_end
                        .faults()
                        .warn(&"listener", &format_args!("cannot accept a connection: {error}"));
                    std::thread::sleep(PAUSE_AFTER_FAILURE);
                }
            }
        }
    }

    fn admit(&self, socket: F::Socket, peer: Peer) {
        let socket = Arc::new(socket);
        let faults = self.front_end.faults();
        let Some(permit) = self.register.admit(&socket, &peer) else {
            let limit = self.limits.connections;
            let why = format_args!("refused: {limit} {} are connected, which is the limit", F::CLIENTS);
            faults.warn(&F::client(&peer), &why);
            return;
        };
        let front_end = Arc::clone(&self.front_end);
        let name = format!("{}-{}", F::THREADS, permit.id());
        let spawned = std::thread::Builder::new().name(name).spawn(move || {
            front_end.serve(&permit, &socket, &peer);
            // Drop the permit last: when the register is empty, all sockets are closed and only the server
            // holds the front-end.
            drop(socket);
            drop(front_end);
            drop(permit);
        });
        if let Err(error) = spawned {
            faults.warn(&"listener", &format_args!("cannot start a thread for a connection: {error}"));
        }
    }
}
