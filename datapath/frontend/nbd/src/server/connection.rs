//! The transmission phase of one connection, on its own thread.
//!
//! The thread goes round: answers from the outbox, then all whole requests in the receive buffer, then one
//! send, then one receive. It sleeps in `recv` when nothing is in flight, since only the client can have
//! something to say then; else in `poll` on the socket and the outbox's event.
//!
//! | state ([`Stage`]) | the next bytes are | leaves when |
//! |---|---|---|
//! | `Head` | a request, with its payload if short | - |
//! | `Payload` | the rest of a long write's payload, received into its own buffer | it is whole: the write is done or submitted |
//! | `Drain` | the payload of a refused write | it is whole: the error is sent |
//! | `Closing` | not read any more | nothing is in flight |
//!
//! No requests are taken while [`Limits::requests_in_flight`] or [`Limits::bytes_in_flight`] is reached, so a client that
//! does not read its replies stops being served and costs what these allow.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use headwater_block::{
    Attempt, ByteRange, Completion, Device, ExtentKind, Geometry, IoError, Op, Outcome, Request,
};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::Shared;
use super::batch::{Batch, INLINE_BYTES};
use super::handshake::{BASE_ALLOCATION_ID, Chosen};
use super::inbound::{Inbound, LARGE_BYTES};
use super::listener::Peer;
use super::outbox::{Outbox, Ticket};
use super::pool::Pool;
use super::serve::End;
use crate::error::NbdError;
use crate::limits::Limits;
use crate::socket::{Received, Socket};
use crate::wire::transmission::{
    DATA_HEAD_BYTES, REPLY_BYTES, REQUEST_BYTES, RequestHead, block_status_chunk, command, command_flag,
    data_chunk_head, error_chunk, hole_chunk, simple_reply, state,
};

pub(super) struct Connection<'a> {
    shared: &'a Shared,
    socket: &'a Socket,
    peer: &'a Peer,
    limits: &'a Limits,
    name: String,
    device: Arc<dyn Device>,
    geometry: Geometry,
    structured: bool,
    base_allocation: bool,
    inbound: Inbound,
    batch: Batch,
    stage: Stage,
    outbox: Arc<Outbox>,
    /// Answers taken from the outbox; empty between rounds.
    answers: Vec<(Ticket, Outcome)>,
    pool: Pool,
    /// Scratch for replies of variable length.
    scratch: Vec<u8>,
    requests_in_flight: usize,
    bytes_in_flight: usize,
}

enum Stage {
    Head,
    Payload { head: RequestHead, range: ByteRange, buffer: Vec<u8>, have: usize },
    Drain { head: RequestHead, left: usize, error: Refusal },
    Closing(&'static str),
}

/// Why a request is answered with an error before the device saw it.
struct Refusal {
    code: NbdError,
    why: String,
}

impl Refusal {
    fn invalid(why: impl Into<String>) -> Self {
        Self { code: NbdError::EINVAL, why: why.into() }
    }
}

/// Whether the receive buffer may have more to give.
enum Progress {
    Again,
    NeedBytes,
}

impl<'a> Connection<'a> {
    pub(super) fn new(
        shared: &'a Shared,
        socket: &'a Socket,
        peer: &'a Peer,
        chosen: Chosen,
    ) -> std::io::Result<Self> {
        Ok(Self {
            shared,
            socket,
            peer,
            limits: &shared.limits,
            name: chosen.name,
            geometry: chosen.export.device.geometry(),
            device: chosen.export.device,
            structured: chosen.structured,
            base_allocation: chosen.base_allocation,
            inbound: Inbound::new(shared.limits.receive_buffer_bytes),
            batch: Batch::new(shared.limits.batch_bytes),
            stage: Stage::Head,
            outbox: Arc::new(Outbox::new()?),
            answers: Vec::new(),
            pool: Pool::default(),
            scratch: Vec::new(),
            requests_in_flight: 0,
            bytes_in_flight: 0,
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
        while self.requests_in_flight > 0 {
            self.outbox.take(&mut self.answers);
            for (ticket, _) in std::mem::take(&mut self.answers) {
                self.landed(&ticket);
            }
            if self.requests_in_flight > 0 && self.sleep(false).is_err() {
                break;
            }
        }
        end
    }

    fn round(&mut self) -> Result<(), End> {
        self.send_answers()?;
        let progress = self.take_requests()?;
        self.send_answers()?;
        if !self.batch.is_empty() {
            self.flush_batch(&[])?;
        }
        match (progress, &self.stage) {
            (Progress::NeedBytes, Stage::Closing(why)) if self.requests_in_flight == 0 => {
                Err(End::Orderly(why))
            }
            (Progress::NeedBytes, Stage::Closing(_)) => self.sleep(false).map(drop),
            (Progress::NeedBytes, _) => self.receive(),
            // Answers that came since may have made room for requests that are here.
            (Progress::Again, _) if !self.is_throttled() => Ok(()),
            (Progress::Again, _) => self.sleep(false).map(drop),
        }
    }

    fn is_throttled(&self) -> bool {
        self.requests_in_flight >= self.limits.requests_in_flight
            || self.bytes_in_flight >= self.limits.bytes_in_flight
    }

    /// Receives once, sleeping if there is nothing.
    fn receive(&mut self) -> Result<(), End> {
        let mut wait = self.requests_in_flight == 0;
        loop {
            let received = {
                let into = match &mut self.stage {
                    Stage::Payload { buffer, have, .. } => buffer.get_mut(*have..).unwrap_or_default(),
                    _ => self.inbound.room(),
                };
                self.socket.receive(into, wait)
            };
            match received {
                Ok(Received::Bytes(count)) => {
                    match &mut self.stage {
                        Stage::Payload { have, .. } => *have = have.saturating_add(count),
                        _ => self.inbound.received(count),
                    }
                    return Ok(());
                }
                Ok(Received::Nothing) => {
                    // Woken by the outbox: its answers go first.
                    if !self.sleep(true)? {
                        return Ok(());
                    }
                    wait = false;
                }
                Ok(Received::End) => return self.hung_up(),
                Err(error) => return Err(End::Fault(format!("receiving failed: {error}"))),
            }
        }
    }

    fn hung_up(&mut self) -> Result<(), End> {
        if self.shared.stopping.load(Ordering::SeqCst) {
            self.stage = Stage::Closing("the server stops");
            return Ok(());
        }
        if matches!(self.stage, Stage::Head) && self.inbound.len() == 0 {
            self.stage = Stage::Closing("it hung up");
            return Ok(());
        }
        Err(End::Fault("it hung up in the middle of a request, which was not carried out".into()))
    }

    /// Sleeps until the outbox has answers, or, if `for_socket`, bytes have arrived. Returns whether they have.
    fn sleep(&self, for_socket: bool) -> Result<bool, End> {
        if !self.outbox.fall_asleep() {
            return Ok(false);
        }
        let mut fds = [
            PollFd::from_borrowed_fd(self.outbox.event(), PollFlags::IN),
            PollFd::new(self.socket, PollFlags::IN),
        ];
        // Without the socket where only the outbox counts: poll reports a hang-up whatever is asked for.
        let watched = if for_socket { 2 } else { 1 };
        let polled = rustix::event::poll(fds.get_mut(..watched).unwrap_or_default(), None);
        let [event, socket] = &fds;
        self.outbox.wake_up(event.revents().contains(PollFlags::IN));
        match polled {
            Ok(_) | Err(Errno::INTR) => Ok(for_socket && !socket.revents().is_empty()),
            Err(errno) => Err(End::Fault(format!("poll failed: {errno}"))),
        }
    }

    /// Takes whole requests until there is none (`NeedBytes`) or a limit is reached (`Again`).
    fn take_requests(&mut self) -> Result<Progress, End> {
        while !self.is_throttled() {
            if self.batch.is_full() {
                self.flush_batch(&[])?;
            }
            let progress = match std::mem::replace(&mut self.stage, Stage::Head) {
                Stage::Head => self.take_head()?,
                Stage::Payload { head, range, buffer, have } if have < buffer.len() => {
                    self.stage = Stage::Payload { head, range, buffer, have };
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
            if matches!(progress, Progress::NeedBytes) {
                return Ok(progress);
            }
        }
        Ok(Progress::Again)
    }

    /// Takes one request from the receive buffer, if it is whole.
    fn take_head(&mut self) -> Result<Progress, End> {
        let Some(bytes) = self.inbound.head() else { return Ok(Progress::NeedBytes) };
        let head = RequestHead::decode(bytes).map_err(|error| End::Fault(error.to_string()))?;
        if head.command == command::WRITE {
            return self.take_write(&head);
        }
        self.inbound.consume(REQUEST_BYTES);
        let Some(range) = ByteRange::new(head.offset, u64::from(head.length)) else {
            let error = Refusal::invalid("the request ends past 64 bits");
            return self.refuse(&head, &error).map(|()| Progress::Again);
        };
        match head.command {
            command::READ => self.read(&head, range)?,
            command::FLUSH => self.flush(&head)?,
            command::TRIM => self.trim(&head, range)?,
            command::WRITE_ZEROES => self.write_zeroes(&head, range)?,
            command::CACHE => self.cache(&head, range)?,
            command::BLOCK_STATUS => self.block_status(&head, range)?,
            command::DISC => self.stage = Stage::Closing("it said so"),
            other => self.refuse(&head, &Refusal::invalid(format!("unknown command {other}")))?,
        }
        Ok(Progress::Again)
    }

    fn take_write(&mut self, head: &RequestHead) -> Result<Progress, End> {
        let len = length(head);
        let range = match self.check_write(head) {
            Ok(range) => range,
            Err(error) => {
                if head.length > self.limits.request_bytes {
                    return Err(End::Fault(format!(
                        "it sent a write of {} bytes to the export '{}', the limit is {}",
                        head.length,
                        self.name.escape_debug(),
                        self.limits.request_bytes
                    )));
                }
                self.inbound.consume(REQUEST_BYTES);
                self.stage = Stage::Drain { head: *head, left: len, error };
                return Ok(Progress::Again);
            }
        };
        if len >= LARGE_BYTES {
            self.inbound.consume(REQUEST_BYTES);
            let mut buffer = self.pool.take(len);
            let here = self.inbound.available(len);
            let have = here.len();
            if let Some(place) = buffer.get_mut(..have) {
                place.copy_from_slice(here);
            }
            self.inbound.consume(have);
            self.stage = Stage::Payload { head: *head, range, buffer, have };
            return Ok(Progress::Again);
        }
        let Some(payload) = self.inbound.payload(len) else { return Ok(Progress::NeedBytes) };
        let fua = has(head, command_flag::FUA);
        let attempt = self.device.try_now(Op::Write { range, from: payload, fua });
        if matches!(attempt, Ok(Attempt::MustWait)) {
            let buffer = self.pool.copy_of(payload);
            self.inbound.consume(REQUEST_BYTES.saturating_add(len));
            self.submit(head, len, Request::Write { range, buffer, fua });
            return Ok(Progress::Again);
        }
        self.inbound.consume(REQUEST_BYTES.saturating_add(len));
        self.settle(head, attempt.map(drop))?;
        Ok(Progress::Again)
    }

    /// A write whose payload has a buffer of its own.
    fn write_owned(&mut self, head: &RequestHead, range: ByteRange, buffer: Vec<u8>) -> Result<(), End> {
        let fua = has(head, command_flag::FUA);
        match self.device.try_now(Op::Write { range, from: &buffer, fua }) {
            Ok(Attempt::MustWait) => {
                let bytes = buffer.len();
                self.submit(head, bytes, Request::Write { range, buffer, fua });
                Ok(())
            }
            attempt => {
                self.pool.give(buffer);
                self.settle(head, attempt.map(drop))
            }
        }
    }

    fn check_write(&self, head: &RequestHead) -> Result<ByteRange, Refusal> {
        self.check_flags(head, command_flag::FUA)?;
        let range = self.check_change(head)?;
        if head.length > self.limits.request_bytes {
            return Err(Refusal { code: NbdError::EOVERFLOW, why: "the write is too long".into() });
        }
        Ok(range)
    }

    /// Checks what all requests that change something have in common.
    fn check_change(&self, head: &RequestHead) -> Result<ByteRange, Refusal> {
        if self.geometry.read_only {
            return Err(Refusal { code: NbdError::EPERM, why: "the export is read-only".into() });
        }
        let past_end = |why: String| Refusal { code: NbdError::ENOSPC, why };
        let range = ByteRange::new(head.offset, u64::from(head.length))
            .ok_or_else(|| past_end("the request ends past 64 bits".into()))?;
        if range.end() > self.geometry.size_bytes {
            return Err(past_end(format!(
                "request {range} ends past the export, which has {} bytes",
                self.geometry.size_bytes
            )));
        }
        self.check_range(range)?;
        Ok(range)
    }

    fn check_range(&self, range: ByteRange) -> Result<(), Refusal> {
        if range.is_empty() {
            return Err(Refusal::invalid("the request has no length"));
        }
        self.geometry.check(range).map_err(|error| Refusal::invalid(error.to_string()))
    }

    fn check_flags(&self, head: &RequestHead, legal: u16) -> Result<(), Refusal> {
        // FUA is legal with all commands once it was announced, and means nothing for those that read.
        let unknown = head.flags & !(legal | command_flag::FUA);
        if unknown != 0 {
            return Err(Refusal::invalid(format!(
                "flags {unknown:#x} do not belong to command {}",
                head.command
            )));
        }
        Ok(())
    }

    fn read(&mut self, head: &RequestHead, range: ByteRange) -> Result<(), End> {
        let legal = if self.structured { command_flag::DF } else { 0 };
        let checked = self.check_flags(head, legal).and_then(|()| self.check_range(range)).and_then(|()| {
            if head.length > self.limits.request_bytes {
                let limit = self.limits.request_bytes;
                return Err(Refusal::invalid(format!(
                    "a read of {} bytes, the limit is {limit}",
                    head.length
                )));
            }
            Ok(())
        });
        if let Err(error) = checked {
            return self.refuse(head, &error);
        }
        let len = length(head);
        if len > INLINE_BYTES {
            return self.read_large(head, range, len);
        }
        let head_bytes = if self.structured { DATA_HEAD_BYTES } else { REPLY_BYTES };
        let attempt = {
            let Some((_, into)) = self
                .batch
                .room(head_bytes.saturating_add(len))
                .and_then(|r| r.split_at_mut_checked(head_bytes))
            else {
                return Err(End::Fault("a reply does not fit the batch".into()));
            };
            self.device.try_now(Op::Read { range, into })
        };
        match attempt {
            Ok(Attempt::Done) => {
                self.finish_inline_read(head, head_bytes, len);
                Ok(())
            }
            Ok(Attempt::MustWait) => {
                let buffer = self.pool.take(len);
                self.submit(head, len, Request::Read { range, buffer });
                Ok(())
            }
            Err(error) => self.fail(head.cookie, head.command, &error),
        }
    }

    /// Puts the head before data that is in the batch's room already.
    fn finish_inline_read(&mut self, head: &RequestHead, head_bytes: usize, len: usize) {
        let Some((place, data)) =
            self.batch.room(head_bytes.saturating_add(len)).and_then(|r| r.split_at_mut_checked(head_bytes))
        else {
            return;
        };
        if !self.structured {
            place.copy_from_slice(&simple_reply(0, head.cookie));
        } else if is_zero(data) {
            self.batch.put(&hole_chunk(head.cookie, head.offset, head.length));
            return;
        } else if let Some(bytes) = data_chunk_head(head.cookie, head.offset, len) {
            place.copy_from_slice(&bytes);
        }
        self.batch.advance(head_bytes.saturating_add(len));
    }

    fn read_large(&mut self, head: &RequestHead, range: ByteRange, len: usize) -> Result<(), End> {
        let mut buffer = self.pool.take(len);
        match self.device.try_now(Op::Read { range, into: &mut buffer }) {
            Ok(Attempt::Done) => {
                let sent = self.reply_data(head.cookie, head.offset, &buffer);
                self.pool.give(buffer);
                sent
            }
            Ok(Attempt::MustWait) => {
                self.submit(head, len, Request::Read { range, buffer });
                Ok(())
            }
            Err(error) => {
                self.pool.give(buffer);
                self.fail(head.cookie, head.command, &error)
            }
        }
    }

    fn flush(&mut self, head: &RequestHead) -> Result<(), End> {
        if let Err(error) = self.check_flags(head, 0) {
            return self.refuse(head, &error);
        }
        match self.device.try_now(Op::Flush) {
            Ok(Attempt::MustWait) => {
                self.submit(head, 0, Request::Flush);
                Ok(())
            }
            attempt => self.settle(head, attempt.map(drop)),
        }
    }

    fn trim(&mut self, head: &RequestHead, range: ByteRange) -> Result<(), End> {
        if let Err(error) = self.check_flags(head, 0).and_then(|()| self.check_change(head).map(drop)) {
            return self.refuse(head, &error);
        }
        // A discard has no FUA in the device's contract: a zero write that may unmap is the same, with it.
        if has(head, command_flag::FUA) {
            return self.change(head, Request::WriteZeroes { range, may_unmap: true, fua: true });
        }
        self.change(head, Request::Discard { range })
    }

    fn write_zeroes(&mut self, head: &RequestHead, range: ByteRange) -> Result<(), End> {
        let legal = command_flag::NO_HOLE | command_flag::FAST_ZERO;
        if let Err(error) = self.check_flags(head, legal).and_then(|()| self.check_change(head).map(drop)) {
            return self.refuse(head, &error);
        }
        let may_unmap = !has(head, command_flag::NO_HOLE);
        let fua = has(head, command_flag::FUA);
        if has(head, command_flag::FAST_ZERO) {
            // Fast is what needs no waiting. A part may be zero already when it turns out not to be, which
            // the client is about to overwrite with zeroes anyway.
            return match self.device.try_now(Op::WriteZeroes { range, may_unmap, fua }) {
                Ok(Attempt::MustWait) => self.refuse(
                    head,
                    &Refusal { code: NbdError::ENOTSUP, why: "zeroing this range is not fast".into() },
                ),
                attempt => self.settle(head, attempt.map(drop)),
            };
        }
        self.change(head, Request::WriteZeroes { range, may_unmap, fua })
    }

    /// Carries out a request without data.
    fn change(&mut self, head: &RequestHead, request: Request) -> Result<(), End> {
        let op = match &request {
            Request::Discard { range } => Op::Discard { range: *range },
            Request::WriteZeroes { range, may_unmap, fua } => {
                Op::WriteZeroes { range: *range, may_unmap: *may_unmap, fua: *fua }
            }
            _ => Op::Flush,
        };
        match self.device.try_now(op) {
            Ok(Attempt::MustWait) => {
                self.submit(head, 0, request);
                Ok(())
            }
            attempt => self.settle(head, attempt.map(drop)),
        }
    }

    fn cache(&mut self, head: &RequestHead, range: ByteRange) -> Result<(), End> {
        if let Err(error) = self.check_flags(head, 0).and_then(|()| self.check_range(range)) {
            return self.refuse(head, &error);
        }
        self.submit(head, 0, Request::Prefetch { range });
        Ok(())
    }

    fn block_status(&mut self, head: &RequestHead, range: ByteRange) -> Result<(), End> {
        if !self.base_allocation {
            let error = Refusal::invalid("block status needs SET_META_CONTEXT with base:allocation");
            return self.refuse(head, &error);
        }
        let checked = self.check_flags(head, command_flag::REQ_ONE).and_then(|()| self.check_range(range));
        if let Err(error) = checked {
            return self.refuse(head, &error);
        }
        let one = has(head, command_flag::REQ_ONE);
        let max = if one { 1 } else { self.limits.extents_per_reply };
        let extents = match self.device.extents(range, max) {
            Ok(extents) => extents,
            Err(error) => return self.fail(head.cookie, head.command, &error),
        };
        let mut left = range.len();
        let mut pairs: Vec<(u32, u32)> = Vec::with_capacity(extents.len());
        for extent in extents.iter().take(max) {
            let len = extent.len.min(left);
            left = left.saturating_sub(len);
            let flags = match extent.kind {
                ExtentKind::Data => 0,
                ExtentKind::Hole => state::HOLE | state::ZERO,
                ExtentKind::Zero => state::ZERO,
            };
            // It fits: it is no longer than the request.
            pairs.push((u32::try_from(len).unwrap_or(u32::MAX), flags));
        }
        if pairs.is_empty() {
            let error = Refusal { code: NbdError::EIO, why: "the device told no extents".into() };
            return self.refuse(head, &error);
        }
        self.scratch.clear();
        block_status_chunk(&mut self.scratch, head.cookie, BASE_ALLOCATION_ID, &pairs);
        self.put_scratch()
    }

    /// Hands a request to the device; the answer comes through the outbox.
    fn submit(&mut self, head: &RequestHead, bytes: usize, request: Request) {
        let ticket = Ticket { cookie: head.cookie, offset: head.offset, command: head.command, bytes };
        self.requests_in_flight = self.requests_in_flight.saturating_add(1);
        self.bytes_in_flight = self.bytes_in_flight.saturating_add(bytes);
        let outbox = Arc::clone(&self.outbox);
        self.device.submit(request, Completion::new(move |outcome| outbox.post(ticket, outcome)));
    }

    fn landed(&mut self, ticket: &Ticket) {
        self.requests_in_flight = self.requests_in_flight.saturating_sub(1);
        self.bytes_in_flight = self.bytes_in_flight.saturating_sub(ticket.bytes);
    }

    /// Turns what is in the outbox into replies.
    fn send_answers(&mut self) -> Result<(), End> {
        let mut answers = std::mem::take(&mut self.answers);
        self.outbox.take(&mut answers);
        let mut end = Ok(());
        for (ticket, outcome) in answers.drain(..) {
            self.landed(&ticket);
            if end.is_ok() {
                end = self.answer(&ticket, &outcome);
            }
            self.pool.give(outcome.buffer);
        }
        self.answers = answers;
        end
    }

    fn answer(&mut self, ticket: &Ticket, outcome: &Outcome) -> Result<(), End> {
        if self.batch.is_full() {
            self.flush_batch(&[])?;
        }
        match &outcome.result {
            Err(error) => self.fail(ticket.cookie, ticket.command, error),
            Ok(()) if ticket.command == command::READ => {
                if outcome.buffer.len() != ticket.bytes {
                    let error = IoError::new(
                        headwater_block::IoErrorKind::Device,
                        "the device returned a buffer of another length",
                    );
                    return self.fail(ticket.cookie, ticket.command, &error);
                }
                self.reply_data(ticket.cookie, ticket.offset, &outcome.buffer)
            }
            Ok(()) => self.put(&simple_reply(0, ticket.cookie)),
        }
    }

    fn reply_data(&mut self, cookie: u64, offset: u64, data: &[u8]) -> Result<(), End> {
        if !self.structured {
            self.put(&simple_reply(0, cookie))?;
        } else if is_zero(data)
            && let Ok(len) = u32::try_from(data.len())
        {
            return self.put(&hole_chunk(cookie, offset, len));
        } else if let Some(head) = data_chunk_head(cookie, offset, data.len()) {
            self.put(&head)?;
        }
        if data.len() > INLINE_BYTES { self.flush_batch(data) } else { self.put(data) }
    }

    fn settle(&mut self, head: &RequestHead, result: Result<(), IoError>) -> Result<(), End> {
        match result {
            Ok(()) => self.put(&simple_reply(0, head.cookie)),
            Err(error) => self.fail(head.cookie, head.command, &error),
        }
    }

    /// Answers with an error of the device, and tells it.
    fn fail(&mut self, cookie: u64, number: u16, error: &IoError) -> Result<(), End> {
        let code = NbdError::from(error);
        self.shared.faults.warn(
            self.peer,
            &format_args!(
                "command {number} on the export '{}' failed with {code}: {}",
                self.name.escape_debug(),
                Chain(error)
            ),
        );
        self.put_error(cookie, code, &error.to_string())
    }

    /// Answers a request that the device did not see with an error.
    fn refuse(&mut self, head: &RequestHead, error: &Refusal) -> Result<(), End> {
        tracing::debug!("NBD: {}: refused with {}: {}", self.peer, error.code, error.why);
        self.put_error(head.cookie, error.code, &error.why)
    }

    fn put_error(&mut self, cookie: u64, code: NbdError, why: &str) -> Result<(), End> {
        if !self.structured {
            return self.put(&simple_reply(code.0, cookie));
        }
        self.scratch.clear();
        error_chunk(&mut self.scratch, cookie, code.0, why);
        self.put_scratch()
    }

    fn put_scratch(&mut self) -> Result<(), End> {
        let scratch = std::mem::take(&mut self.scratch);
        let put = self.put(&scratch);
        self.scratch = scratch;
        put
    }

    /// Adds to the batch, or sends all of it with `bytes` where there is no room.
    fn put(&mut self, bytes: &[u8]) -> Result<(), End> {
        if self.batch.put(bytes) { Ok(()) } else { self.flush_batch(bytes) }
    }

    fn flush_batch(&mut self, more: &[u8]) -> Result<(), End> {
        self.batch
            .send(self.socket, more)
            .map_err(|error| End::Fault(format!("sending replies failed: {error}")))
    }
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

fn has(head: &RequestHead, flag: u16) -> bool {
    head.flags & flag != 0
}

fn length(head: &RequestHead) -> usize {
    usize::try_from(head.length).unwrap_or(usize::MAX)
}

/// Whether all bytes are zero; ends at the first 64 that are not.
fn is_zero(bytes: &[u8]) -> bool {
    let (blocks, rest) = bytes.as_chunks::<64>();
    blocks.iter().all(|block| block.iter().fold(0, |all, byte| all | byte) == 0)
        && rest.iter().all(|byte| *byte == 0)
}
