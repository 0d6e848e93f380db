//! Waits for the client's bytes and for the device's answers, with time limits.

use std::time::{Duration, Instant};

use headwater_block::Polling;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::{Connection, LONE_ROUNDS, Payload, Stage};
use crate::limits::Limits;
use crate::server::serve::End;
use crate::socket::{Received, Socket};

/// While others wait for buffer memory, a write's data must arrive within [`Limits::send_stall_ms`] plus one
/// second per this many bytes received: about 1 Mbit/s.
const SLOWEST_BYTES_S: u64 = 128 << 10;

impl Connection<'_> {
    /// Receives once; sleeps until bytes or answers arrive.
    pub(super) fn receive(&mut self) -> Result<(), End> {
        let mut may_block = !self.in_flight.any();
        if may_block {
            self.start_waiting();
        }
        let requests = std::mem::take(&mut self.requests_in_round);
        self.lone_rounds = if requests == 1 { self.lone_rounds.saturating_add(1) } else { 0 };
        loop {
            let polling = (may_block && self.lone_rounds >= LONE_ROUNDS).then_some(&mut self.polling);
            let received = {
                let into = match &mut self.stage {
                    Stage::Payload(Payload { buffer, have, .. }) => {
                        buffer.get_mut(*have..).unwrap_or_default()
                    }
                    _ => self.inbound.room(),
                };
                match polling {
                    Some(polling) => receive_polling(self.socket, into, polling),
                    None => self.socket.receive(into, may_block),
                }
            };
            match received {
                Ok(Received::Bytes(count)) => {
                    if let Stage::Payload(payload) = &mut self.stage {
                        payload.have = payload.have.saturating_add(count);
                        payload.silent_since = None;
                        return in_time(payload, self.share.is_wanted(true), self.limits);
                    }
                    self.inbound.received(count);
                    return Ok(());
                }
                Ok(Received::Nothing) => {
                    if let Stage::Payload(payload) = &mut self.stage {
                        payload.silent_since.get_or_insert_with(Instant::now);
                        in_time(payload, self.share.is_wanted(true), self.limits)?;
                        // The receive timed out, or returned only part of a TLS record: receive again.
                        if may_block {
                            continue;
                        }
                    }
                    // `wait` returned false: the device has answers. They are sent first.
                    if !self.wait()? {
                        return Ok(());
                    }
                    may_block = false;
                }
                Ok(Received::End) => return self.hung_up(),
                Err(error) => return Err(End::Fault(format!("receiving failed: {error}"))),
            }
        }
    }

    fn hung_up(&mut self) -> Result<(), End> {
        if self.permit.is_stopping() {
            self.stage = Stage::Closing("the server stops");
            return Ok(());
        }
        if matches!(self.stage, Stage::Head) && self.inbound.len() == 0 {
            self.stage = Stage::Closing("the client hung up");
            return Ok(());
        }
        if matches!(self.stage, Stage::Parts(_)) {
            return Err(End::Fault(
                "the client hung up in the middle of a write, of which the first parts may be stored".into(),
            ));
        }
        let why = "the client hung up in the middle of a request, which was not executed";
        Err(End::Fault(why.into()))
    }

    /// Waits for bytes or answers, like [`Connection::sleep`] with the socket. If the disk answers to this
    /// thread, and polling was worthwhile recently, polls for a while before sleeping. A disk's answer takes
    /// about as long as a few wake-ups, and the client waits for it with everything that it has in flight.
    fn wait(&mut self) -> Result<bool, End> {
        self.start_waiting();
        let started = Instant::now();
        if let Some(own) = &self.own {
            let window = self.disk_polling.window();
            while started.elapsed() < window {
                let is_answered = own.is_ready() || self.inbox.is_filled();
                if is_answered || is_readable(self.socket) {
                    self.disk_polling.found();
                    return Ok(!is_answered);
                }
                // The client may need this processor to continue.
                std::thread::yield_now();
            }
        }
        let is_readable = self.sleep(true)?;
        self.disk_polling.slept(started.elapsed());
        Ok(is_readable)
    }

    /// Sleeps until there are answers or, if `for_socket`, bytes have arrived. Returns whether bytes have
    /// arrived. In the middle of a write's data it also ends when the time limit has to be checked.
    pub(in crate::server) fn sleep(&mut self, for_socket: bool) -> Result<bool, End> {
        self.start_waiting();
        if !self.inbox.fall_asleep() {
            return Ok(false);
        }
        let event = self.inbox.event();
        let own = self.own.as_ref();
        let mut fds = [
            PollFd::from_borrowed_fd(event, PollFlags::IN),
            own.map_or(PollFd::from_borrowed_fd(event, PollFlags::empty()), |own| {
                PollFd::from_borrowed_fd(own.ready(), PollFlags::IN)
            }),
            PollFd::new(self.socket, PollFlags::IN),
        ];
        // If only answers count, the socket is not polled: poll would always report a hang-up.
        let watched = if for_socket { 3 } else { 2 };
        let limit = matches!(self.stage, Stage::Payload(_)).then(|| self.limits.send_check());
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let polled = rustix::event::poll(fds.get_mut(..watched).unwrap_or_default(), limit.as_ref());
        let [event, _, socket] = &fds;
        self.inbox.wake_up(event.revents().contains(PollFlags::IN));
        match polled {
            Ok(_) | Err(Errno::INTR) => Ok(for_socket && !socket.revents().is_empty()),
            Err(errno) => Err(End::Fault(format!("poll failed: {errno}"))),
        }
    }
}

/// Fails if a write's data stops or arrives too slowly while others wait for the buffer memory that it
/// occupies.
fn in_time(payload: &Payload, is_wanted: bool, limits: &Limits) -> Result<(), End> {
    let Payload { buffer, have, since, silent_since, .. } = payload;
    if !is_wanted || *have == buffer.len() {
        return Ok(());
    }
    let stall = Duration::from_millis(limits.send_stall_ms);
    if silent_since.is_some_and(|silent_since| silent_since.elapsed() >= stall) {
        let limit = limits.send_stall_ms;
        return Err(End::Fault(format!(
            "the client sent no data of a write for {limit} ms, while other clients waited for the memory reserved for that write"
        )));
    }
    let longest = stall.saturating_add(Duration::from_secs(*have as u64 / SLOWEST_BYTES_S));
    if since.elapsed() < longest {
        return Ok(());
    }
    Err(End::Fault(format!(
        "the client sent only {have} of the {} bytes of a write in {:.1} s, while other clients waited for the memory reserved for that write",
        buffer.len(),
        since.elapsed().as_secs_f64()
    )))
}

/// Whether a receive would return at once, with bytes or with the end.
fn is_readable(socket: &Socket) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    // If a signal interrupts the call, the caller's loop checks again.
    rustix::event::poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Receives, and polls for bytes for a while before it sleeps.
///
/// For a client with one request at a time. Without polling, client and server would sleep and wake each
/// other for each request, which takes several times as long as the request. If more requests are in flight,
/// sleeping lets them accumulate, which is cheaper.
fn receive_polling(socket: &Socket, into: &mut [u8], polling: &mut Polling) -> std::io::Result<Received> {
    polling.receive(|wait| socket.receive(into, wait), |received| *received != Received::Nothing)
}
