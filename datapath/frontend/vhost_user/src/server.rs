//! The server of one volume: a listener, and the thread that accepts a front-end and processes its messages.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex as StdMutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use headwater_block::Device;
use headwater_connections::{BindError, Listener, Peer};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use vhost::vhost_user::{BackendReqHandler, Error};

use crate::arrival::{self, Next};
use crate::control::Control;
use crate::disk::Disk;
use crate::limits::Limits;
use crate::positions::Positions;
use crate::queue::request::ID_BYTES;

/// The longest serial number that virtio has room for, in bytes.
pub const SERIAL_BYTES: usize = ID_BYTES;

/// How long a front-end may leave its replies unread while the server stops. If half of the stop's time limit
/// is less, that applies, so that as much is left for its queues.
const REPLIES_TAKEN_WITHIN: Duration = Duration::from_secs(1);

/// How much longer to wait for queues that did not end in time, after the device was closed.
const ENDS_WITHIN: Duration = Duration::from_secs(1);

/// What a guest sees besides the device's geometry, and limits.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Name for logs: the machine, or what is served.
    pub name: String,
    /// Serial number, as the guest shows it in `/dev/disk/by-id`; at most [`SERIAL_BYTES`] are used.
    pub serial: String,
    /// The positions of the previous server's machine, from [`Server::positions`], if nothing that it
    /// answered is lost. Then that machine may continue here. Any other running machine is refused, because
    /// it would continue with a disk that is not its own.
    pub resume: Option<Positions>,
    /// The device has every write that a server answered which was killed. Then the machine of that server
    /// may continue, if its front-end hands over the region of requests in flight.
    pub recovered: bool,
    /// Refuse memory that its owner could take away while it is used, so that no front-end can end this
    /// process. Otherwise such memory is trusted, with a line in the log: files other than a memfd cannot be
    /// sealed.
    pub sealed_memory: bool,
    /// Limits.
    pub limits: Limits,
}

/// A running server. Dropping it stops it.
pub struct Server {
    shared: Arc<Shared>,
    path: PathBuf,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    disk: Arc<Disk>,
    stop_event: OwnedFd,
    /// When to stop waiting for the device; set when the server is told to stop.
    deadline: Arc<Mutex<Option<Instant>>>,
    /// The front-end's connection, to wake a thread that waits for the rest of a message, or for space for a
    /// reply.
    connection: Mutex<Option<Arc<UnixStream>>>,
    connected: AtomicBool,
}

impl Server {
    /// Listens at `path` and serves one front-end at a time, one after the other, until [`Server::stop`].
    pub fn bind(path: &Path, device: Arc<dyn Device>, options: Options) -> Result<Self, BindError> {
        let listener = Listener::unix(path)?;
        let failed = listener.failed();
        let stop_event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| failed(errno.into()))?;
        let disk = Disk::new(device, options);
        let shared = Arc::new(Shared {
            disk: Arc::new(disk),
            stop_event,
            deadline: Arc::default(),
            connection: Mutex::default(),
            connected: AtomicBool::new(false),
        });
        let thread = std::thread::Builder::new()
            .name("vhost-control".into())
            .stack_size(256 << 10)
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.serve(&listener)
            })
            .map_err(failed)?;
        let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
        Ok(Self { shared, path, thread: Mutex::new(Some(thread)) })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a front-end is connected.
    pub fn is_connected(&self) -> bool {
        self.shared.connected.load(Ordering::Relaxed)
    }

    /// Number of writes that found no space on the device, and wait here until they are tried again.
    pub fn waiting_writes(&self) -> usize {
        self.shared.disk.waiting_writes.load(Ordering::Relaxed)
    }

    /// Stops the server. No new request is taken; those taken are finished and answered, then the connection
    /// is closed and the socket removed. Takes at most [`Limits::stop_timeout_ms`] and a short time; queues
    /// that the device has not answered by then end by themselves. Harmless when repeated.
    pub fn stop(&self) {
        let Some(thread) = self.thread.lock().take() else { return };
        let timeout = Duration::from_millis(self.shared.disk.limits.stop_timeout_ms);
        *self.shared.deadline.lock() = Some(Instant::now().checked_add(timeout).unwrap_or_else(Instant::now));
        let _ = rustix::io::write(&self.shared.stop_event, &1_u64.to_ne_bytes());
        let connection = self.shared.connection.lock().clone();
        if let Some(connection) = connection {
            // Only for reading: the thread may be in the middle of a message, and ends after it.
            let _ = connection.shutdown(std::net::Shutdown::Read);
            // From now on it sends at most one reply. If there is space for that, sending cannot block.
            // Without space it would block for ever on a front-end that does not read.
            if !takes_replies(&connection, REPLIES_TAKEN_WITHIN.min(timeout / 2)) {
                let why = format_args!("the front-end does not read its replies, and is disconnected");
                self.shared.disk.faults.warn(&self.shared.disk.name, &why);
                let _ = connection.shutdown(std::net::Shutdown::Both);
            }
        }
        if thread.join().is_err() {
            tracing::error!("vhost-user: the control thread of {} has panicked", self.shared.disk.name);
        }
    }

    /// The positions of its machine, for the next server. Call it after [`Server::stop`], and when the device
    /// was closed. Requests that the device then refuses go back into the ring if possible, and remaining
    /// queues end, for which this waits a moment. A queue that has not ended has no position.
    pub fn positions(&self) -> Positions {
        let began = Instant::now();
        while self.shared.disk.has_running_queues() && began.elapsed() < ENDS_WITHIN {
            std::thread::sleep(Duration::from_millis(10));
        }
        self.shared.disk.positions()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Whether the connection has space for a reply, or is closed at the other end, within this time.
fn takes_replies(connection: &UnixStream, within: Duration) -> bool {
    let until = Instant::now().checked_add(within);
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now())).unwrap_or_default();
        let timeout = Timespec::try_from(left).unwrap_or_default();
        let mut fds = [PollFd::new(connection, PollFlags::OUT)];
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Ok(ready) => return ready > 0,
            Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

/// The result of a wait.
enum Event {
    Stop,
    Message,
    Connection,
}

impl Shared {
    fn is_stopping(&self) -> bool {
        self.deadline.lock().is_some()
    }

    fn serve(&self, listener: &Listener) {
        loop {
            if matches!(self.wait(listener, None), Event::Stop) {
                return;
            }
            match listener.accept() {
                Ok(Some((socket, peer))) => self.session(listener, socket.into(), peer),
                Ok(None) => {}
                Err(error) => self.cannot_accept(&error),
            }
        }
    }

    /// Descriptors or memory are used up, which may be temporary. New connections stay in the queue, and are
    /// not accepted again at once.
    fn cannot_accept(&self, error: &std::io::Error) {
        self.disk.faults.warn(&self.disk.name, &format_args!("cannot accept a front-end: {error}"));
        std::thread::sleep(Duration::from_millis(100));
    }

    fn wait(&self, listener: &Listener, stream: Option<&UnixStream>) -> Event {
        loop {
            let connection = stream.map_or(listener.as_fd(), AsFd::as_fd);
            let mut fds = [
                PollFd::from_borrowed_fd(connection, PollFlags::IN),
                PollFd::new(listener, PollFlags::IN),
                PollFd::new(&self.stop_event, PollFlags::IN),
            ];
            let polled = rustix::event::poll(&mut fds, None);
            if self.is_stopping() {
                return Event::Stop;
            }
            if polled.is_err() {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            let [first, second, _] = &fds;
            // The connection first: a front-end that has ended makes room for the next one.
            if stream.is_some() && !first.revents().is_empty() {
                return Event::Message;
            }
            if !second.revents().is_empty() {
                return Event::Connection;
            }
        }
    }

    fn session(&self, listener: &Listener, stream: UnixStream, peer: Peer) {
        tracing::info!("vhost-user: {}: front-end {peer} connected", self.disk.name);
        let (Ok(watched), Ok(kept)) = (stream.try_clone(), stream.try_clone()) else {
            let why = "this process has no free file descriptors; a front-end was disconnected";
            self.disk.faults.warn(&self.disk.name, &why);
            return;
        };
        // The time-outs are for cases that `arrives_whole` does not see: out-of-band bytes, which count as
        // present but are never received, and replies that are not read.
        let timeout = Some(Duration::from_millis(self.disk.limits.message_timeout_ms));
        if let Err(error) =
            watched.set_read_timeout(timeout).and_then(|()| watched.set_write_timeout(timeout))
        {
            let why = format_args!(
                "a front-end was disconnected: cannot set a time-out on its connection: {error}"
            );
            self.disk.faults.warn(&self.disk.name, &why);
            return;
        }
        *self.connection.lock() = Some(Arc::new(kept));
        self.connected.store(true, Ordering::Relaxed);
        let deadline = Arc::clone(&self.deadline);
        let give_up = move || deadline.lock().is_some_and(|deadline| Instant::now() >= deadline);
        let control = Arc::new(StdMutex::new(Control::new(Arc::clone(&self.disk), Box::new(give_up))));
        let mut messages = BackendReqHandler::from_stream(stream, Arc::clone(&control));
        if let Some(why) = self.follow(listener, &watched, &mut messages)
            && !self.is_stopping()
        {
            self.disk.faults.warn(&self.disk.name, &format_args!("front-end {peer} is disconnected: {why}"));
        }
        // A poisoned lock means a panic in a message; its queues must end anyway.
        let mut control = control.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !control.stop_all() {
            tracing::warn!(
                "vhost-user: {}: the device did not answer within {} ms of being told to stop",
                self.disk.name,
                self.disk.limits.stop_timeout_ms
            );
        }
        *self.connection.lock() = None;
        self.connected.store(false, Ordering::Relaxed);
        tracing::info!("vhost-user: {}: front-end {peer} has disconnected", self.disk.name);
    }

    /// Processes a front-end's messages until it disconnects or must be disconnected; then returns the
    /// reason.
    fn follow(
        &self,
        listener: &Listener,
        stream: &UnixStream,
        messages: &mut BackendReqHandler<StdMutex<Control>>,
    ) -> Option<String> {
        let timeout = Duration::from_millis(self.disk.limits.message_timeout_ms);
        let connected = Instant::now();
        let mut has_sent = false;
        loop {
            match self.wait(listener, Some(stream)) {
                Event::Stop => return None,
                // A silent front-end may be a machine that is still being created, but it must not keep
                // another one out.
                Event::Connection if !has_sent && connected.elapsed() >= timeout => {
                    let within = timeout.as_millis();
                    return Some(format!(
                        "it has sent nothing within {within} ms, and another front-end has connected"
                    ));
                }
                Event::Connection => self.turn_away(listener),
                Event::Message if !self.arrives_whole(listener, stream, timeout) => {
                    let within = timeout.as_millis();
                    return Some(format!("it began a message and did not finish it within {within} ms"));
                }
                // The message layer would wait for space for ever, and nobody else would be served.
                Event::Message if !takes_replies(stream, timeout) => {
                    let within = timeout.as_millis();
                    return Some(format!("it has read no replies for {within} ms"));
                }
                Event::Message => match messages.handle_request() {
                    Ok(()) => has_sent = true,
                    Err(Error::Disconnected) => return None,
                    // All bytes had arrived, so even "try again" is an error here: a part of a message is
                    // lost.
                    Err(error) => return Some(error.to_string()),
                },
            }
        }
    }

    /// Waits until a message that has begun has arrived completely. `false`: the front-end disconnected, the
    /// time is over, or the server stops.
    fn arrives_whole(&self, listener: &Listener, stream: &UnixStream, timeout: Duration) -> bool {
        let began = Instant::now();
        while !arrival::is_whole(stream) {
            let also = [PollFd::new(listener, PollFlags::IN), PollFd::new(&self.stop_event, PollFlags::IN)];
            match arrival::wait_for_more(stream, also) {
                Next::End => return true,
                Next::CheckAgain if self.is_stopping() || began.elapsed() >= timeout => return false,
                // A front-end that connects meanwhile gets the answer at once that the disk is in use.
                Next::CheckAgain => self.turn_away(listener),
            }
        }
        true
    }

    fn turn_away(&self, listener: &Listener) {
        match listener.accept() {
            Ok(Some((_, peer))) => {
                let why = format_args!("{peer} was disconnected: another front-end uses this disk already");
                self.disk.faults.warn(&self.disk.name, &why);
            }
            Ok(None) => {}
            Err(error) => self.cannot_accept(&error),
        }
    }
}
