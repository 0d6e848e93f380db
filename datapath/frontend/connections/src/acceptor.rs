//! A server of many connections: one thread accepts them, each is served by a thread of its own, and stopping ends them all.

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

/// How long to wait where no connection can be accepted: for lack of descriptors or memory, of which those that end give back some.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(100);

/// How long connections that were cut may take to end.
const CUT_GRACE: Duration = Duration::from_secs(1);

/// What a front-end does with its connections, and how it speaks of them.
pub trait FrontEnd: Send + Sync + 'static {
    /// The protocol, in logs.
    const PROTOCOL: &'static str;
    /// Those who connect, in logs.
    const CLIENTS: &'static str;
    /// What the names of its threads begin with.
    const THREADS: &'static str;

    /// What its connections receive and send by.
    type Socket: AsRef<Socket> + Send + Sync + 'static;

    /// Such a socket.
    fn socket(fd: OwnedFd) -> Self::Socket;

    /// Who connects from there, in logs.
    fn client(peer: &Peer) -> String;

    /// Where faults of clients are told.
    fn faults(&self) -> &FaultLog;

    /// Serves a connection until its end, on a thread of its own. When the server stops, its socket receives nothing more.
    fn serve(&self, permit: &Permit<Self::Socket>, socket: &Arc<Self::Socket>, peer: &Peer);
}

/// Accepts connections and has them served. Dropping it stops that.
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
    /// Begins to accept. Once told to stop, connections have `stop_timeout` before they are cut.
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

    /// How many are connected now, half-open ones included.
    pub fn connections(&self) -> usize {
        self.shared.register.count()
    }

    /// Stops: nobody is accepted any more, and what was listened on is gone; sockets receive nothing more, so that connections end when
    /// what they have taken is done; those that have not ended in time are cut. Takes a second more at most. Harmless when repeated.
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
                "{} {} did not take their replies within {} ms, or the device did not answer; cutting them off",
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
            // The seat last: when the last one has left, all sockets are closed, and nobody but the server has the front-end.
            drop(socket);
            drop(front_end);
            drop(permit);
        });
        if let Err(error) = spawned {
            faults.warn(&"listener", &format_args!("cannot start a thread for a connection: {error}"));
        }
    }
}
