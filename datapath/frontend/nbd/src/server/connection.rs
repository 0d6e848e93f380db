//! The transmission phase of one connection, on its own thread.
//!
//! The thread goes round: answers from the inbox, then all whole requests in the receive buffer, then one
//! send, then one receive. It sleeps in `recv` when nothing is in flight, since only the client can have
//! something to say then; else in `poll` on the socket and the inbox's event.
//!
//! | state ([`Stage`]) | the next bytes are | leaves when |
//! |---|---|---|
//! | `Head` | a request, with its payload if short | - |
//! | `Payload` | the rest of a long write's payload, received into its own buffer | it is whole: the write is done or submitted |
//! | `Drain` | the payload of a refused write | it is whole: the error is sent |
//! | `Closing` | not read any more | nothing is in flight |
//!
//! A long request is taken once there is memory for it in what all connections share ([`Share`]). Where
//! [`Limits::requests_in_flight`] or [`Limits::bytes_in_flight`] is reached, writes that would wait for the device are not taken, and
//! what is behind them cannot be seen; other requests are taken while they use less than a quarter besides, so that writes that wait
//! for room in the write cache do not hold up reads, nor the trim that makes room. So a client that does not read its replies stops
//! being served and costs what these allow, until [`Limits::send_stall_ms`] has passed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_block::{
    ByteRange, Completion, CompletionQueue, Device, Geometry, Inbox, IoError, Lent, Outcome, Polling,
    Request, Share,
};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::batch::{Batch, INLINE_BYTES};
use super::commands::Refusal;
use super::handshake::Chosen;
use super::in_flight::InFlight;
use super::inbound::Inbound;
use super::pool::Pool;
use super::serve::End;
use super::ticket::Ticket;
use super::{Seat, Shared};
use crate::error::NbdError;
use crate::limits::Limits;
use crate::socket::{PagePipe, Received, Socket};
use crate::wire::reply::{Answered, Form};
use crate::wire::transmission::{EXTENDED_REQUEST_BYTES, REQUEST_BYTES, RequestHead, command};

pub(super) struct Connection<'a> {
    pub(super) shared: &'a Shared,
    seat: &'a Seat,
    pub(super) socket: &'a Socket,
    pub(super) who: &'a str,
    pub(super) limits: &'a Limits,
    pub(super) name: String,
    pub(super) device: Arc<dyn Device>,
    pub(super) geometry: Geometry,
    pub(super) form: Form,
    pub(super) base_allocation: bool,
    pub(super) inbound: Inbound,
    pub(super) batch: Batch,
    pub(super) stage: Stage,
    pub(super) inbox: Arc<Inbox<(Ticket, Outcome)>>,
    /// Where the device's answers to this thread are taken, if it has such; they go to the inbox too.
    own: Option<Box<dyn CompletionQueue>>,
    /// Answers taken from the inbox; empty between rounds.
    pub(super) answers: Vec<(Ticket, Outcome)>,
    pub(super) pool: Pool,
    /// Scratch for replies of variable length.
    pub(super) scratch: Vec<u8>,
    /// Parts of a read that the device lends; empty between requests.
    pub(super) lent: Vec<Lent>,
    /// What those pass through on their way.
    pub(super) pipe: PagePipe,
    pub(super) in_flight: InFlight,
    /// Memory of requests under way; each long one asks before it is taken from the receive buffer.
    pub(super) share: Share,
    polling: Polling,
    /// The same for what the disk answers to this thread.
    disk_polling: Polling,
    /// Rounds since requests that wait for the disk were started.
    rounds_unstarted: u32,
    /// Requests taken since the last receive.
    pub(super) requests_in_round: u32,
    /// Rounds in a row that had one request.
    lone_rounds: u32,
}

/// After so many rounds of one request a client is taken to have no more in flight. One with many in flight has such rounds
/// too, now and then.
const LONE_ROUNDS: u32 = 16;

/// Requests for the disk are started at the latest at the end of so many rounds, and at once when nothing else is to be done: to
/// start them, however many, is to ring the disk's bell, which costs more than all the rest of a read.
const MOST_ROUNDS_UNSTARTED: u32 = 2;

/// Where others wait for its memory, a write's data has [`Limits::send_stall_ms`], and a second more for each so many bytes that came:
/// 1 Mbit/s.
const SLOWEST_BYTES_S: u64 = 128 << 10;

pub(super) enum Stage {
    Head,
    Payload { head: RequestHead, range: ByteRange, buffer: Vec<u8>, have: usize, since: Instant },
    Drain { head: RequestHead, left: usize, error: Refusal },
    Closing(&'static str),
}

/// Whether the receive buffer may have more to give.
pub(super) enum Progress {
    Again,
    NeedBytes,
    /// A limit is reached: answers come first.
    Throttled,
}

impl<'a> Connection<'a> {
    pub(super) fn new(
        shared: &'a Shared,
        seat: &'a Seat,
        socket: &'a Socket,
        who: &'a str,
        chosen: Chosen,
    ) -> std::io::Result<Self> {
        let own = chosen.export.device.completion_queue();
        let inbox = Arc::new(Inbox::new()?);
        let share = {
            let inbox = Arc::clone(&inbox);
            shared.budget.share(move || inbox.nudge())
        };
        Ok(Self {
            shared,
            seat,
            socket,
            who,
            limits: &shared.limits,
            name: chosen.name,
            geometry: chosen.export.device.geometry(),
            device: chosen.export.device,
            form: chosen.form,
            base_allocation: chosen.base_allocation,
            inbound: Inbound::new(shared.limits.receive_buffer_bytes),
            batch: Batch::new(shared.limits.batch_bytes),
            stage: Stage::Head,
            inbox,
            share,
            own,
            answers: Vec::new(),
            pool: Pool::default(),
            scratch: Vec::new(),
            lent: Vec::new(),
            pipe: PagePipe::default(),
            in_flight: InFlight::default(),
            polling: Polling::new(Duration::from_micros(shared.limits.polling_us)),
            rounds_unstarted: 0,
            disk_polling: Polling::new(Duration::from_micros(shared.limits.polling_us)),
            requests_in_round: 0,
            lone_rounds: 0,
        })
    }

    /// Serves until the end. Requests in flight are finished whatever the end is.
    pub(super) fn run(&mut self) -> End {
        let end = loop {
            match self.round() {
                Ok(()) => {}
                Err(end) => break end,
            }
        };
        // Nobody reads the replies any more, but who stops the server may rely on the device being at rest.
        while self.in_flight.any() {
            self.take_answers();
            for (ticket, _) in std::mem::take(&mut self.answers) {
                self.landed(&ticket);
            }
            if self.in_flight.any() && self.sleep(false).is_err() {
                break;
            }
        }
        end
    }

    fn round(&mut self) -> Result<(), End> {
        self.send_answers()?;
        let progress = self.take_requests()?;
        self.rounds_unstarted = self.rounds_unstarted.saturating_add(1);
        // What is granted comes without an answer, and taking the answers has taken its call to wake up.
        let made_room = self.send_answers()? || self.share.is_granted();
        if !self.batch.is_empty() {
            self.flush_batch(&[])?;
        }
        match (progress, &self.stage) {
            (Progress::NeedBytes, Stage::Closing(why)) if !self.in_flight.any() => Err(End::Orderly(why)),
            (Progress::NeedBytes, Stage::Closing(_)) => self.sleep(false).map(drop),
            (Progress::NeedBytes, _) => self.receive(),
            // Those answers may have made room for requests that are here.
            (Progress::Throttled, _) if !made_room => self.sleep(false).map(drop),
            (Progress::Throttled | Progress::Again, _) => Ok(()),
        }
    }

    /// Whether no more requests may wait for the device that need room in it.
    pub(super) fn is_full(&self) -> bool {
        self.in_flight.is_full(self.limits)
    }

    /// Receives once, sleeping if there is nothing.
    fn receive(&mut self) -> Result<(), End> {
        let mut wait = !self.in_flight.any();
        if wait {
            self.start_waiting();
        }
        let requests = std::mem::take(&mut self.requests_in_round);
        self.lone_rounds = if requests == 1 { self.lone_rounds.saturating_add(1) } else { 0 };
        loop {
            let polling = (wait && self.lone_rounds >= LONE_ROUNDS).then_some(&mut self.polling);
            let received = {
                let into = match &mut self.stage {
                    Stage::Payload { buffer, have, .. } => buffer.get_mut(*have..).unwrap_or_default(),
                    _ => self.inbound.room(),
                };
                match polling {
                    Some(polling) => receive_polling(self.socket, into, polling),
                    None => self.socket.receive(into, wait),
                }
            };
            match received {
                Ok(Received::Bytes(count)) => {
                    match &mut self.stage {
                        Stage::Payload { have, .. } => *have = have.saturating_add(count),
                        _ => self.inbound.received(count),
                    }
                    return self.in_time();
                }
                // A receive that may wait has waited for as long as it may. In the middle of a write it goes on, unless others need what
                // was set aside for it.
                Ok(Received::Nothing) if wait && matches!(self.stage, Stage::Payload { .. }) => {
                    if self.share.is_wanted(true) {
                        let limit = self.limits.send_stall_ms;
                        return Err(End::Fault(format!(
                            "it sent nothing of a write's data for {limit} ms, and others waited for its memory"
                        )));
                    }
                }
                Ok(Received::Nothing) => {
                    // Woken by the inbox: its answers go first.
                    if !self.wait()? {
                        return Ok(());
                    }
                    wait = false;
                }
                Ok(Received::End) => return self.hung_up(),
                Err(error) => return Err(End::Fault(format!("receiving failed: {error}"))),
            }
        }
    }

    /// A write whose data comes bit by bit keeps its memory from others that wait for it no longer than on the slowest line.
    fn in_time(&self) -> Result<(), End> {
        let Stage::Payload { buffer, have, since, .. } = &self.stage else { return Ok(()) };
        let longest = Duration::from_millis(self.limits.send_stall_ms)
            + Duration::from_secs(*have as u64 / SLOWEST_BYTES_S);
        if *have == buffer.len() || !self.share.is_wanted(true) || since.elapsed() < longest {
            return Ok(());
        }
        Err(End::Fault(format!(
            "it sent {have} of the {} bytes of a write's data in {:.1} s, and others waited for its memory",
            buffer.len(),
            since.elapsed().as_secs_f64()
        )))
    }

    fn hung_up(&mut self) -> Result<(), End> {
        if self.seat.is_stopping() {
            self.stage = Stage::Closing("the server stops");
            return Ok(());
        }
        if matches!(self.stage, Stage::Head) && self.inbound.len() == 0 {
            self.stage = Stage::Closing("it hung up");
            return Ok(());
        }
        Err(End::Fault("it hung up in the middle of a request, which was not carried out".into()))
    }

    /// As [`Connection::sleep`] for the socket too, but looks for a while first where the disk answers to this thread and that paid
    /// off lately: a disk's answer comes in a few wake-ups' time, and the client waits for it with all that it has in flight.
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
                // The client may need this very processor to go on.
                std::thread::yield_now();
            }
        }
        let is_readable = self.sleep(true)?;
        self.disk_polling.slept(started.elapsed());
        Ok(is_readable)
    }

    /// Sleeps until there are answers, or, if `for_socket`, bytes have arrived. Returns whether they have.
    fn sleep(&mut self, for_socket: bool) -> Result<bool, End> {
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
        // Without the socket where only answers count: poll reports a hang-up whatever is asked for.
        let watched = if for_socket { 3 } else { 2 };
        let polled = rustix::event::poll(fds.get_mut(..watched).unwrap_or_default(), None);
        let [event, _, socket] = &fds;
        self.inbox.wake_up(event.revents().contains(PollFlags::IN));
        match polled {
            Ok(_) | Err(Errno::INTR) => Ok(for_socket && !socket.revents().is_empty()),
            Err(errno) => Err(End::Fault(format!("poll failed: {errno}"))),
        }
    }

    /// Takes whole requests until there is none or a limit is reached.
    fn take_requests(&mut self) -> Result<Progress, End> {
        while self.in_flight.has_room_for_others(self.limits) {
            if self.batch.is_full() {
                self.flush_batch(&[])?;
            }
            let progress = match std::mem::replace(&mut self.stage, Stage::Head) {
                Stage::Head => self.take_head()?,
                Stage::Payload { head, range, buffer, have, since } if have < buffer.len() => {
                    self.stage = Stage::Payload { head, range, buffer, have, since };
                    Progress::NeedBytes
                }
                Stage::Payload { head, range, buffer, .. } => {
                    self.write_owned(&head, range, buffer)?;
                    Progress::Again
                }
                Stage::Drain { head, left, error } => {
                    let count = self.inbound.len().min(left);
                    self.inbound.consume(count);
                    let left = left.saturating_sub(count);
                    if left > 0 {
                        self.stage = Stage::Drain { head, left, error };
                        Progress::NeedBytes
                    } else {
                        self.refuse(&head, &error)?;
                        Progress::Again
                    }
                }
                Stage::Closing(why) => {
                    self.stage = Stage::Closing(why);
                    Progress::NeedBytes
                }
            };
            if !matches!(progress, Progress::Again) {
                return Ok(progress);
            }
        }
        Ok(Progress::Throttled)
    }

    /// Length of a request's head.
    pub(super) fn head_bytes(&self) -> usize {
        if self.form == Form::Extended { EXTENDED_REQUEST_BYTES } else { REQUEST_BYTES }
    }

    /// Hands a request to the device, with memory that was set aside; the answer comes through the inbox.
    pub(super) fn submit(&mut self, head: &RequestHead, bytes: usize, request: Request) {
        let done = self.begin(head, bytes);
        self.device.submit(request, done);
    }

    /// The same for one that has no data, and is durable when it is answered.
    pub(super) fn submit_and_flush(&mut self, head: &RequestHead, request: Request) {
        let done = self.begin(head, 0);
        let device = Arc::clone(&self.device);
        let flush = Completion::new(move |outcome| match outcome.result {
            Ok(()) => device.submit(Request::Flush, done),
            Err(error) => done.complete(Err(error), outcome.buffer),
        });
        self.device.submit(request, flush);
    }

    /// Counts a request as under way; its answer comes through the inbox.
    fn begin(&mut self, head: &RequestHead, bytes: usize) -> Completion {
        let needs_room = self.needs_room(head);
        let ticket = Ticket { to: answered(head), command: head.command, bytes, needs_room };
        self.in_flight.add(bytes, needs_room);
        let inbox = Arc::clone(&self.inbox);
        Completion::new(move |outcome| inbox.post((ticket, outcome)))
    }

    /// Asks for memory for a request's data. `false`: not now, the request stays where it is.
    pub(super) fn set_aside(&mut self, bytes: usize, needs_room: bool) -> bool {
        let is_taken = self.share.take(u64::try_from(bytes).unwrap_or(u64::MAX), needs_room);
        // One waits at a time, and it is this one.
        if is_taken && self.share.is_waiting() {
            self.share.withdraw();
        }
        is_taken
    }

    pub(super) fn give_back(&mut self, bytes: usize, needs_room: bool) {
        self.share.give(u64::try_from(bytes).unwrap_or(u64::MAX), needs_room);
    }

    fn landed(&mut self, ticket: &Ticket) {
        self.in_flight.remove(ticket.bytes, ticket.needs_room);
    }

    /// Moves what the device has answered to `answers`, which is empty.
    fn take_answers(&mut self) {
        if let Some(own) = &self.own
            && (own.is_ready() || self.rounds_unstarted >= MOST_ROUNDS_UNSTARTED)
        {
            own.take();
            self.rounds_unstarted = 0;
        }
        self.inbox.take(&mut self.answers);
    }

    /// Starts what waits for the disk: nothing else is to be done.
    fn start_waiting(&mut self) {
        if let Some(own) = &self.own {
            own.take();
            self.rounds_unstarted = 0;
        }
    }

    /// Turns answers into replies. Whether there were any.
    fn send_answers(&mut self) -> Result<bool, End> {
        self.take_answers();
        let mut answers = std::mem::take(&mut self.answers);
        let any = !answers.is_empty();
        let mut end = Ok(());
        for (ticket, outcome) in answers.drain(..) {
            self.landed(&ticket);
            if end.is_ok() {
                end = self.answer(&ticket, &outcome);
            }
            self.pool.give(outcome.buffer);
            self.give_back(ticket.bytes, ticket.needs_room);
        }
        self.answers = answers;
        end.map(|()| any)
    }

    fn answer(&mut self, ticket: &Ticket, outcome: &Outcome) -> Result<(), End> {
        if self.batch.is_full() {
            self.flush_batch(&[])?;
        }
        match &outcome.result {
            Err(error) => self.fail(ticket.to, ticket.command, error),
            Ok(()) if ticket.command == command::READ => {
                if outcome.buffer.len() != ticket.bytes {
                    let error = IoError::new(
                        headwater_block::IoErrorKind::Device,
                        "the device returned a buffer of another length",
                    );
                    return self.fail(ticket.to, ticket.command, &error);
                }
                self.reply_data(ticket.to, &outcome.buffer)
            }
            Ok(()) => self.put(&self.form.done(ticket.to)),
        }
    }

    pub(super) fn reply_data(&mut self, to: Answered, data: &[u8]) -> Result<(), End> {
        if self.form.has_chunks()
            && is_zero(data)
            && let Some(hole) = self.form.hole(to, data.len())
        {
            return self.put(&hole);
        }
        if let Some(head) = self.form.data_head(to, data.len()) {
            self.put(&head)?;
        }
        if data.len() > INLINE_BYTES { self.flush_batch(data) } else { self.put(data) }
    }

    pub(super) fn settle(&mut self, head: &RequestHead, result: Result<(), IoError>) -> Result<(), End> {
        match result {
            Ok(()) => self.put(&self.form.done(answered(head))),
            Err(error) => self.fail(answered(head), head.command, &error),
        }
    }

    /// Answers with an error of the device, and tells it.
    pub(super) fn fail(&mut self, to: Answered, number: u16, error: &IoError) -> Result<(), End> {
        let code = NbdError::from(error);
        self.shared.faults.warn(
            &self.who,
            &format_args!(
                "command {number} on the export '{}' failed with {code}: {}",
                self.name.escape_debug(),
                Chain(error)
            ),
        );
        self.put_error(to, code, &error.to_string())
    }

    /// Answers a request that the device did not see with an error.
    pub(super) fn refuse(&mut self, head: &RequestHead, error: &Refusal) -> Result<(), End> {
        tracing::debug!("NBD: {}: refused with {}: {}", self.who, error.code, error.why);
        self.put_error(answered(head), error.code, &error.why)
    }

    fn put_error(&mut self, to: Answered, code: NbdError, why: &str) -> Result<(), End> {
        self.scratch.clear();
        self.form.error(&mut self.scratch, to, code.0, why);
        self.put_scratch()
    }

    pub(super) fn put_scratch(&mut self) -> Result<(), End> {
        let scratch = std::mem::take(&mut self.scratch);
        let put = self.put(&scratch);
        self.scratch = scratch;
        put
    }

    /// Adds to the batch, or sends all of it with `bytes` where there is no room.
    pub(super) fn put(&mut self, bytes: &[u8]) -> Result<(), End> {
        if self.batch.put(bytes) { Ok(()) } else { self.flush_batch(bytes) }
    }

    pub(super) fn flush_batch(&mut self, more: &[u8]) -> Result<(), End> {
        let begun = matches!(self.stage, Stage::Payload { .. }).then(Instant::now);
        let sent = self.batch.send(self.socket, more);
        if let (Some(begun), Stage::Payload { since, .. }) = (begun, &mut self.stage) {
            // Nothing was read meanwhile, whatever the client sent.
            *since += begun.elapsed();
        }
        sent.map_err(|error| End::unsent(&error, self.limits))
    }
}

pub(super) fn answered(head: &RequestHead) -> Answered {
    Answered { cookie: head.cookie, offset: head.offset }
}

/// Whether there is something to receive now, be it the end.
fn is_readable(socket: &Socket) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    // A signal is as good as nothing: it is looked at again.
    rustix::event::poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Receives, looking for bytes for a while before it sleeps.
///
/// For a client with one request at a time: then client and server would sleep and wake each other for each request, and
/// that takes several times as long as the request. With more in flight, sleeping lets them gather, which is cheaper.
fn receive_polling(socket: &Socket, into: &mut [u8], polling: &mut Polling) -> std::io::Result<Received> {
    polling.receive(|wait| socket.receive(into, wait), |received| *received != Received::Nothing)
}

/// An error with what caused it.
struct Chain<'a>(&'a IoError);

impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut next = std::error::Error::source(self.0);
        while let Some(error) = next {
            write!(f, ": {error}")?;
            next = error.source();
        }
        Ok(())
    }
}

/// Whether all bytes are zero; ends at the first 64 that are not.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    let (blocks, rest) = bytes.as_chunks::<64>();
    blocks.iter().all(|block| block.iter().fold(0, |all, byte| all | byte) == 0)
        && rest.iter().all(|byte| *byte == 0)
}
