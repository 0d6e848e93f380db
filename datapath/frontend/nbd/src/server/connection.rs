//! The transmission phase of one connection, on its own thread.
//!
//! The thread repeats: send the answers from the inbox, execute all whole requests in the receive buffer,
//! send once, receive once. If nothing is in flight it sleeps in `recv`, because only the client can wake it
//! then. Otherwise it sleeps in `poll` on the socket and the inbox's event.
//!
//! | state ([`Stage`]) | the next bytes are | leaves when |
//! |---|---|---|
//! | `Head` | a request, with its payload if short | - |
//! | `Payload` | the rest of a long write's payload, received into its own buffer | it is complete: the write is done or submitted |
//! | `Parts` | the rest of a write that is stored as it arrives | all of it is stored, or a part failed |
//! | `Drain` | the payload of a refused write | it is complete: the error is sent |
//! | `Closing` | not read any more | nothing is in flight |
//!
//! A long request is taken once the memory that all connections share ([`Share`]) has room for it. If
//! [`Limits::requests_in_flight`] or [`Limits::bytes_in_flight`] is reached, writes that would wait for the
//! device are not taken, and requests behind them cannot be seen. Other requests are taken while they use
//! less than another quarter. So writes that wait for space in the write cache delay neither reads nor the
//! trim that frees space. A client that does not read its replies is no longer served, and costs at most
//! these limits, until [`Limits::send_stall_ms`] has passed.

mod receive;

use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_block::{
    ByteRange, Completion, CompletionQueue, Device, Geometry, Inbox, IoError, IoErrorKind, Outcome, Polling,
    Request, Share, SharedSlice,
};

use super::batch::{Batch, INLINE_BYTES};
use super::commands::Refusal;
use super::gate::Lane;
use super::handshake::Chosen;
use super::in_flight::InFlight;
use super::in_parts::Parts;
use super::inbound::Inbound;
use super::pool::Pool;
use super::serve::End;
use super::ticket::Ticket;
use super::{Permit, Shared};
use crate::error::NbdError;
use crate::limits::Limits;
use crate::socket::{PagePipe, Socket};
use crate::wire::reply::{Answered, Form};
use crate::wire::transmission::{EXTENDED_REQUEST_BYTES, REQUEST_BYTES, RequestHead, command};

pub(super) struct Connection<'a> {
    pub(super) shared: &'a Shared,
    permit: &'a Permit,
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
    /// Receives the device's answers to this thread, if the device supports that. The answers also go to the
    /// inbox.
    own: Option<Box<dyn CompletionQueue>>,
    /// Answers taken from the inbox; empty between rounds.
    pub(super) answers: Vec<(Ticket, Outcome)>,
    pub(super) pool: Pool,
    /// Scratch for replies of variable length.
    pub(super) scratch: Vec<u8>,
    /// Parts of a read that the device shares; empty between requests.
    pub(super) slices: Vec<SharedSlice>,
    /// The pipe through which shared pages are sent.
    pub(super) pipe: PagePipe,
    pub(super) in_flight: InFlight,
    /// Separates changes from partial-sector changes of other connections.
    pub(super) lane: Lane,
    /// Memory of requests under way; each long request asks for memory before it is taken from the receive
    /// buffer.
    pub(super) share: Share,
    polling: Polling,
    /// Polling for the disk's answers to this thread.
    disk_polling: Polling,
    /// Rounds since requests that wait for the disk were started.
    rounds_unstarted: u32,
    /// Requests taken since the last receive.
    pub(super) requests_in_round: u32,
    /// Rounds in a row that had one request.
    lone_rounds: u32,
}

/// After this many rounds with one request, a client is assumed to have no more in flight. A client with many
/// in flight also has such rounds, now and then.
const LONE_ROUNDS: u32 = 16;

/// Requests for the disk are started at the latest after this many rounds, and at once if there is nothing
/// else to do. Starting any number of requests rings the disk's doorbell once, which costs more than the rest
/// of a read.
const MOST_ROUNDS_UNSTARTED: u32 = 2;

pub(super) enum Stage {
    Head,
    Payload(Payload),
    Parts(Parts),
    Drain { head: RequestHead, left: usize, error: Refusal },
    Closing(&'static str),
}

/// A long write whose data is on its way.
pub(super) struct Payload {
    pub(super) head: RequestHead,
    pub(super) range: ByteRange,
    pub(super) buffer: Vec<u8>,
    pub(super) have: usize,
    /// When it began. Time in which replies are sent does not count.
    pub(super) since: Instant,
    /// When the client was first found to have sent nothing since its last byte.
    pub(super) silent_since: Option<Instant>,
}

/// Whether the receive buffer may have more to give.
pub(super) enum Progress {
    Again,
    NeedBytes,
    /// A limit is reached: answers must be processed first.
    Throttled,
}

impl<'a> Connection<'a> {
    pub(super) fn new(
        shared: &'a Shared,
        permit: &'a Permit,
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
            permit,
            socket,
            who,
            limits: &shared.limits,
            name: chosen.name,
            geometry: chosen.export.device.geometry(),
            lane: shared.gates.lane(&chosen.export.device),
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
            slices: Vec::new(),
            pipe: PagePipe::default(),
            in_flight: InFlight::default(),
            polling: Polling::new(Duration::from_micros(shared.limits.polling_us)),
            rounds_unstarted: 0,
            disk_polling: Polling::new(Duration::from_micros(shared.limits.polling_us)),
            requests_in_round: 0,
            lone_rounds: 0,
        })
    }

    /// Serves until the connection ends. Requests in flight are finished in any case.
    pub(super) fn run(&mut self) -> End {
        let end = loop {
            match self.round() {
                Ok(()) => {}
                Err(end) => break end,
            }
        };
        // Others may wait for the memory of requests that are not executed any more, and the device may take
        // long with the rest.
        if let Stage::Payload(payload) = std::mem::replace(&mut self.stage, Stage::Closing("it has ended")) {
            self.give_back(payload.buffer.len(), true);
        }
        self.share.withdraw();
        // Nobody reads the replies any more, but [`crate::Server::stop`] promises that no request is in
        // flight afterwards.
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
        // Memory is granted without an answer in the inbox, and taking the answers has consumed the wake-up.
        let made_room = self.send_answers()? || self.share.is_granted();
        if !self.batch.is_empty() {
            self.flush_batch(&[])?;
        }
        match (progress, &self.stage) {
            (Progress::NeedBytes, Stage::Closing(why)) if !self.in_flight.any() => Err(End::Orderly(why)),
            (Progress::NeedBytes, Stage::Closing(_)) => self.sleep(false).map(drop),
            (Progress::NeedBytes, _) => self.receive(),
            // These answers may have freed memory for requests that are here.
            (Progress::Throttled, _) if !made_room => self.sleep(false).map(drop),
            (Progress::Throttled | Progress::Again, _) => Ok(()),
        }
    }

    /// Whether no more requests that need space may wait for the device.
    pub(super) fn is_full(&self) -> bool {
        self.in_flight.is_full(self.limits)
    }

    /// Takes whole requests until there is none or a limit is reached.
    fn take_requests(&mut self) -> Result<Progress, End> {
        while self.in_flight.has_room_for_others(self.limits) {
            if self.batch.is_full() {
                self.flush_batch(&[])?;
            }
            let progress = match std::mem::replace(&mut self.stage, Stage::Head) {
                Stage::Head => self.take_head()?,
                Stage::Payload(payload) if payload.have < payload.buffer.len() => {
                    self.stage = Stage::Payload(payload);
                    Progress::NeedBytes
                }
                Stage::Payload(payload) => self.write_owned(payload)?,
                Stage::Parts(parts) => self.write_part(parts)?,
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

    /// Gives a request to the device, with memory that was reserved; the answer comes through the inbox.
    pub(super) fn submit(&mut self, head: &RequestHead, bytes: usize, request: Request) {
        let done = self.begin(head, bytes);
        self.device.submit(request, done);
    }

    /// Like [`Connection::submit`], for a request without data that must be durable when it is answered.
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
        let sector = u64::from(self.geometry.logical_block_bytes.max(1));
        let ticket = Ticket {
            to: answered(head),
            command: head.command,
            bytes,
            skip: usize::try_from(head.offset % sector).unwrap_or(0),
            data_bytes: usize::try_from(head.length).unwrap_or(usize::MAX),
            needs_room,
        };
        self.in_flight.add(bytes, needs_room);
        let inbox = Arc::clone(&self.inbox);
        let change = self.lane.waits();
        Completion::new(move |outcome| {
            // Before the answer, because the answer wakes a connection that waits until no change is in
            // flight.
            drop(change);
            inbox.post((ticket, outcome));
        })
    }

    /// Reserves memory for a request's data. `false`: not now, the request stays in the buffer.
    pub(super) fn set_aside(&mut self, bytes: usize, needs_room: bool) -> bool {
        let is_taken = self.share.take(u64::try_from(bytes).unwrap_or(u64::MAX), needs_room);
        // Only this request waits: the connection has one waiting request at most.
        if is_taken && self.share.is_waiting() {
            self.share.withdraw();
        }
        is_taken
    }

    pub(super) fn give_back(&mut self, bytes: usize, needs_room: bool) {
        self.share.give(u64::try_from(bytes).unwrap_or(u64::MAX), needs_room);
    }

    pub(super) fn landed(&mut self, ticket: &Ticket) {
        self.in_flight.remove(ticket.bytes, ticket.needs_room);
    }

    /// Moves what the device has answered to `answers`, which is empty.
    pub(super) fn take_answers(&mut self) {
        if let Some(own) = &self.own
            && (own.is_ready() || self.rounds_unstarted >= MOST_ROUNDS_UNSTARTED)
        {
            own.take();
            self.rounds_unstarted = 0;
        }
        self.inbox.take(&mut self.answers);
    }

    /// Starts requests that wait for the disk, because there is nothing else to do.
    fn start_waiting(&mut self) {
        if let Some(own) = &self.own {
            own.take();
            self.rounds_unstarted = 0;
        }
    }

    /// Turns answers into replies. Returns whether there were any.
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
                let data = outcome.buffer.get(ticket.skip..ticket.skip.saturating_add(ticket.data_bytes));
                match data.filter(|_| outcome.buffer.len() == ticket.bytes) {
                    Some(data) => self.reply_data(ticket.to, data),
                    None => {
                        let why = "the device returned a buffer of another length";
                        self.fail(ticket.to, ticket.command, &IoError::new(IoErrorKind::Device, why))
                    }
                }
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

    /// Answers with an error of the device, and logs it. Exception: if a closed device refuses a change, the
    /// connection is closed without an answer. The client can then reconnect to a new server and repeat the
    /// change, and its guest sees no error.
    pub(super) fn fail(&mut self, to: Answered, number: u16, error: &IoError) -> Result<(), End> {
        let refusal = self.failed(number, error)?;
        self.put_error(to, refusal.code, &refusal.why)
    }

    /// Logs an error of the device. The caller sends the answer, unless the connection ends.
    pub(super) fn failed(&mut self, number: u16, error: &IoError) -> Result<Refusal, End> {
        let code = NbdError::from(error);
        self.shared.faults.warn(
            &self.who,
            &format_args!(
                "{} on the export '{}' failed with {code}: {}",
                command::Named(number),
                self.name.escape_debug(),
                Chain(error)
            ),
        );
        let is_change =
            matches!(number, command::WRITE | command::TRIM | command::WRITE_ZEROES | command::FLUSH);
        if error.kind() == IoErrorKind::Closed && is_change && !self.geometry.read_only {
            // Send the answers of all earlier requests.
            self.flush_batch(&[])?;
            return Err(End::Orderly("the device is closed"));
        }
        Ok(Refusal { code, why: error.to_string() })
    }

    /// Answers a request with an error before it reaches the device.
    pub(super) fn refuse(&mut self, head: &RequestHead, error: &Refusal) -> Result<(), End> {
        self.lane.leave();
        tracing::debug!("NBD: {}: refused with {}: {}", self.who, error.code, error.why);
        self.put_error(answered(head), error.code, &error.why)
    }

    pub(super) fn put_error(&mut self, to: Answered, code: NbdError, why: &str) -> Result<(), End> {
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

    /// Adds to the batch, or sends the batch and `bytes` if there is no space.
    pub(super) fn put(&mut self, bytes: &[u8]) -> Result<(), End> {
        if self.batch.put(bytes) { Ok(()) } else { self.flush_batch(bytes) }
    }

    pub(super) fn flush_batch(&mut self, more: &[u8]) -> Result<(), End> {
        let begun = matches!(self.stage, Stage::Payload(_)).then(Instant::now);
        let sent = self.batch.send(self.socket, more);
        if let (Some(begun), Stage::Payload(payload)) = (begun, &mut self.stage) {
            // The time of this send does not count for a write's data: nothing was received meanwhile.
            let took = begun.elapsed();
            payload.since += took;
            if let Some(silent_since) = &mut payload.silent_since {
                *silent_since += took;
            }
        }
        sent.map_err(|error| End::unsent(&error, self.limits))
    }
}

pub(super) fn answered(head: &RequestHead) -> Answered {
    Answered { cookie: head.cookie, offset: head.offset }
}

/// Formats an error with its causes.
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
