//! Executes requests: each is checked, tried at once, and otherwise submitted.
//!
//! An invalid request is answered here ([`Refusal`]); the device only gets requests that keep its contract.
//! The payload of a refused write is still read, so that the stream stays in step. A payload that is longer
//! than the limit ends the connection instead.
//!
//! - A change first enters the connection's lane ([`super::gate`]). The code that answers the request leaves
//!   the lane, also `refuse`.
//! - A request whose data needs memory first reserves it (`set_aside`).
//! - [`Progress::Throttled`]: the request stays in the receive buffer until an answer was processed.
//! - A request of parts of sectors, or a very long one, is executed in parts, with nothing else in flight
//!   ([`super::in_parts`]).

use std::time::Instant;

use headwater_block::{Attempt, BLOCK_BYTES, ByteRange, ExtentKind, Op, Request};

use super::batch::INLINE_BYTES;
use super::connection::{Connection, Payload, Progress, Stage, answered, is_zero};
use super::handshake::BASE_ALLOCATION_ID;
use super::in_parts::{PART_BYTES, Parts};
use super::inbound::LARGE_BYTES;
use super::serve::End;
use crate::error::NbdError;
use crate::wire::reply::Form;
use crate::wire::transmission::{RequestHead, command, command_flag, state};

/// Reads of at least this length are sent directly from the device's memory, if the device shares it. That
/// saves a copy, and takes one system call more than collecting small replies.
const SHARED_BYTES: usize = 32 << 10;

/// Why a request is answered with an error before it reaches the device.
pub(super) struct Refusal {
    pub(super) code: NbdError,
    pub(super) why: String,
}

impl Refusal {
    pub(super) fn invalid(why: impl Into<String>) -> Self {
        Self { code: NbdError::EINVAL, why: why.into() }
    }
}

impl Connection<'_> {
    /// Takes one request from the receive buffer, if it has arrived completely.
    pub(super) fn take_head(&mut self) -> Result<Progress, End> {
        let head = if self.form == Form::Extended {
            self.inbound.head().map(RequestHead::decode_extended)
        } else {
            self.inbound.head().map(RequestHead::decode)
        };
        let Some(head) = head else { return Ok(Progress::NeedBytes) };
        let mut head = head.map_err(|error| End::Fault(error.to_string()))?;
        self.requests_in_round = self.requests_in_round.saturating_add(1);
        // With extended headers a flag announces a payload, and only writes may have one. A write's payload
        // follows even without the flag, which should be set: QEMU does not set it (seen with 10.0).
        let announced = self.form == Form::Extended && has(&head, command_flag::PAYLOAD_LEN);
        if announced {
            head.flags &= !command_flag::PAYLOAD_LEN;
        }
        if head.command == command::WRITE {
            return self.take_write(&head);
        }
        if self.is_full() && self.needs_room(&head) {
            return Ok(Progress::Throttled);
        }
        if !announced && self.in_flight.any() && self.is_alone(&head) {
            return Ok(Progress::Throttled);
        }
        let read_bytes = if announced { 0 } else { self.read_bytes(&head) };
        if !self.set_aside(read_bytes, false) {
            return Ok(Progress::Throttled);
        }
        let is_change = matches!(head.command, command::TRIM | command::WRITE_ZEROES);
        if is_change && !announced && !self.is_ragged(&head) && !self.lane.enter() {
            return Ok(Progress::Throttled);
        }
        self.inbound.consume(self.head_bytes());
        if announced {
            return self.refuse_payload(&head);
        }
        let Some(range) = ByteRange::new(head.offset, head.length) else {
            let error = Refusal::invalid("the request ends past 64 bits");
            return self.refuse(&head, &error).map(|()| Progress::Again);
        };
        match head.command {
            command::READ => {
                let waiting = self.in_flight.requests();
                self.read(&head, range)?;
                // If the read was submitted, its memory is returned when the device's answer has been sent.
                if self.in_flight.requests() == waiting {
                    self.give_back(read_bytes, false);
                }
            }
            command::FLUSH => self.flush(&head)?,
            command::TRIM => self.trim(&head, range)?,
            command::WRITE_ZEROES => self.write_zeroes(&head, range)?,
            command::CACHE => self.cache(&head, range)?,
            command::BLOCK_STATUS => self.block_status(&head, range)?,
            command::DISC => self.stage = Stage::Closing("the client sent DISC"),
            other => self.refuse(&head, &Refusal::invalid(format!("unknown command {other}")))?,
        }
        Ok(Progress::Again)
    }

    /// The number of bytes that a request reads if it is executed; 0 for other requests.
    fn read_bytes(&self, head: &RequestHead) -> usize {
        match ByteRange::new(head.offset, head.length) {
            Some(range)
                if head.command == command::READ
                    && head.length <= self.limits.longest_request_bytes.into() =>
            {
                let bytes = if self.is_long(range) { PART_BYTES } else { self.sectors(range).len() };
                usize::try_from(bytes).unwrap_or(0)
            }
            _ => 0,
        }
    }

    /// Refuses a payload where none is allowed.
    fn refuse_payload(&mut self, head: &RequestHead) -> Result<Progress, End> {
        if head.length > self.limits.longest_request_bytes.into() {
            return Err(self.too_long(head));
        }
        let error = Refusal::invalid(format!("{} takes no payload", command::Named(head.command)));
        self.stage = Stage::Drain { head: *head, left: length(head), error };
        Ok(Progress::Again)
    }

    fn too_long(&self, head: &RequestHead) -> End {
        End::Fault(format!(
            "the client sent a payload of {} bytes to the export '{}'; the limit is {}",
            head.length,
            self.name.escape_debug(),
            self.limits.longest_request_bytes
        ))
    }

    fn take_write(&mut self, head: &RequestHead) -> Result<Progress, End> {
        let (head_bytes, len) = (self.head_bytes(), length(head));
        let range = match self.check_write(head) {
            Ok(range) => range,
            Err(error) => {
                if head.length > self.limits.longest_request_bytes.into() {
                    return Err(self.too_long(head));
                }
                self.inbound.consume(head_bytes);
                self.stage = Stage::Drain { head: *head, left: len, error };
                return Ok(Progress::Again);
            }
        };
        if self.is_alone(head) {
            if self.in_flight.any() {
                return Ok(Progress::Throttled);
            }
            self.inbound.consume(head_bytes);
            self.stage = Stage::Parts(Parts { head: *head, left: range });
            return Ok(Progress::Again);
        }
        if len >= LARGE_BYTES && self.inbound.payload(head_bytes, len).is_none() {
            if self.is_full() || !self.set_aside(len, true) {
                return Ok(Progress::Throttled);
            }
            self.inbound.consume(head_bytes);
            let mut buffer = self.pool.take(len);
            let here = self.inbound.available(len);
            let have = here.len();
            if let Some(place) = buffer.get_mut(..have) {
                place.copy_from_slice(here);
            }
            self.inbound.consume(have);
            let since = Instant::now();
            self.stage =
                Stage::Payload(Payload { head: *head, range, buffer, have, since, silent_since: None });
            return Ok(Progress::Again);
        }
        let Some(payload) = self.inbound.payload(head_bytes, len) else { return Ok(Progress::NeedBytes) };
        let fua = has(head, command_flag::FUA);
        if !self.lane.enter() {
            return Ok(Progress::Throttled);
        }
        let attempt = self.device.try_now(Op::Write { range, from: payload, fua });
        if matches!(attempt, Ok(Attempt::MustWait)) {
            if self.is_full() || !self.set_aside(len, true) {
                // The request stays in the buffer and is tried again after the next answer.
                self.lane.leave();
                return Ok(Progress::Throttled);
            }
            let payload = self.inbound.payload(head_bytes, len).unwrap_or_default();
            let buffer = self.pool.copy_of(payload);
            self.inbound.consume(head_bytes.saturating_add(len));
            self.submit(head, len, Request::Write { range, buffer, fua });
            return Ok(Progress::Again);
        }
        self.lane.leave();
        if self.share.is_waiting() {
            // The write had to wait, but the device has space now.
            self.share.withdraw();
        }
        self.inbound.consume(head_bytes.saturating_add(len));
        self.settle(head, attempt.map(drop))?;
        Ok(Progress::Again)
    }

    /// Whether the request may wait for space in the device: it stores data, or leaves parts of blocks
    /// behind.
    pub(super) fn needs_room(&self, head: &RequestHead) -> bool {
        match head.command {
            command::WRITE => true,
            command::TRIM | command::WRITE_ZEROES => {
                let block = u64::from(BLOCK_BYTES);
                let is_edge = |at: u64| !at.is_multiple_of(block) && at != self.geometry.size_bytes;
                is_edge(head.offset) || is_edge(head.offset.saturating_add(head.length))
            }
            _ => false,
        }
    }

    /// A write whose payload has a buffer of its own.
    pub(super) fn write_owned(&mut self, payload: Payload) -> Result<Progress, End> {
        if !self.lane.enter() {
            self.stage = Stage::Payload(payload);
            return Ok(Progress::Throttled);
        }
        let Payload { head, range, buffer, .. } = payload;
        let fua = has(&head, command_flag::FUA);
        let bytes = buffer.len();
        match self.device.try_now(Op::Write { range, from: &buffer, fua }) {
            Ok(Attempt::MustWait) => {
                self.submit(&head, bytes, Request::Write { range, buffer, fua });
            }
            attempt => {
                self.lane.leave();
                self.pool.give(buffer);
                self.give_back(bytes, true);
                self.settle(&head, attempt.map(drop))?;
            }
        }
        Ok(Progress::Again)
    }

    fn check_write(&self, head: &RequestHead) -> Result<ByteRange, Refusal> {
        self.check_flags(head, command_flag::FUA)?;
        let range = self.check_change(head)?;
        if head.length > self.limits.longest_request_bytes.into() {
            return Err(Refusal { code: NbdError::EOVERFLOW, why: "the write is too long".into() });
        }
        Ok(range)
    }

    /// The checks that all changes have in common.
    fn check_change(&self, head: &RequestHead) -> Result<ByteRange, Refusal> {
        if self.geometry.read_only {
            return Err(Refusal { code: NbdError::EPERM, why: "the export is read-only".into() });
        }
        // A trim needs no space.
        let code = if head.command == command::TRIM { NbdError::EINVAL } else { NbdError::ENOSPC };
        let past_end = |why: String| Refusal { code, why };
        let range = ByteRange::new(head.offset, head.length)
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
        if range.end() > self.geometry.size_bytes {
            return Err(Refusal::invalid(format!(
                "request {range} ends past the export, which has {} bytes",
                self.geometry.size_bytes
            )));
        }
        Ok(())
    }

    fn check_flags(&self, head: &RequestHead, legal: u16) -> Result<(), Refusal> {
        // FUA is legal with all commands once it was announced, and has no effect on reads.
        let unknown = head.flags & !(legal | command_flag::FUA);
        if unknown != 0 {
            return Err(Refusal::invalid(format!(
                "flags {unknown:#x} do not belong to {}",
                command::Named(head.command)
            )));
        }
        Ok(())
    }

    fn read(&mut self, head: &RequestHead, range: ByteRange) -> Result<(), End> {
        let legal = if self.form.has_chunks() { command_flag::DF } else { 0 };
        let checked = self.check_flags(head, legal).and_then(|()| self.check_range(range)).and_then(|()| {
            if head.length > self.limits.longest_request_bytes.into() {
                let limit = self.limits.longest_request_bytes;
                return Err(Refusal::invalid(format!(
                    "the read has {} bytes; the limit is {limit}",
                    head.length
                )));
            }
            Ok(())
        });
        if let Err(error) = checked {
            return self.refuse(head, &error);
        }
        let len = length(head);
        if self.is_long(range) {
            return self.read_in_parts(head, range);
        }
        let sectors = self.sectors(range);
        if sectors != range {
            return self.read_buffered(head, sectors);
        }
        if len >= SHARED_BYTES && self.device.read_shared(range, &mut self.slices) {
            return self.send_shared(head, len);
        }
        if len > INLINE_BYTES {
            return self.read_buffered(head, range);
        }
        let head_bytes = self.form.data_head_bytes();
        let attempt = {
            let Some((_, into)) = self
                .batch
                .room(head_bytes.saturating_add(len))
                .and_then(|r| r.split_at_mut_checked(head_bytes))
            else {
                return Err(End::Fault(
                    "a reply does not fit its buffer: this is a bug of the server".into(),
                ));
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
            Err(error) => self.fail(answered(head), head.command, &error),
        }
    }

    /// Writes the head before data that is in the batch's buffer already.
    fn finish_inline_read(&mut self, head: &RequestHead, head_bytes: usize, len: usize) {
        let Some((place, data)) =
            self.batch.room(head_bytes.saturating_add(len)).and_then(|r| r.split_at_mut_checked(head_bytes))
        else {
            return;
        };
        let to = answered(head);
        if self.form.has_chunks()
            && is_zero(data)
            && let Some(hole) = self.form.hole(to, len)
        {
            self.batch.put(&hole);
            return;
        }
        if let Some(bytes) = self.form.data_head(to, len) {
            place.copy_from_slice(&bytes);
        }
        self.batch.advance(head_bytes.saturating_add(len));
    }

    /// Sends data directly from the device's memory. Zero chunks of an image are not shared, so holes are not
    /// looked for.
    fn send_shared(&mut self, head: &RequestHead, len: usize) -> Result<(), End> {
        let sent = match self.form.data_head(answered(head), len) {
            Some(bytes) => self.put(&bytes).and_then(|()| {
                self.batch
                    .send_shared(self.socket, &self.slices, &mut self.pipe)
                    .map_err(|error| End::unsent(&error, self.limits))
            }),
            None => Err(End::Fault(format!(
                "a reply of {len} bytes exceeds the length field of NBD: this is a bug of the server"
            ))),
        };
        self.slices.clear();
        sent
    }

    /// A read of the request's data, or of the whole sectors that contain it.
    fn read_buffered(&mut self, head: &RequestHead, range: ByteRange) -> Result<(), End> {
        let len = usize::try_from(range.len()).unwrap_or(usize::MAX);
        let skip = usize::try_from(head.offset.saturating_sub(range.offset())).unwrap_or(0);
        let mut buffer = self.pool.take(len);
        match self.device.try_now(Op::Read { range, into: &mut buffer }) {
            Ok(Attempt::Done) => {
                let data = buffer.get(skip..skip.saturating_add(length(head))).unwrap_or_default();
                let sent = self.reply_data(answered(head), data);
                self.pool.give(buffer);
                sent
            }
            Ok(Attempt::MustWait) => {
                self.submit(head, len, Request::Read { range, buffer });
                Ok(())
            }
            Err(error) => {
                self.pool.give(buffer);
                self.fail(answered(head), head.command, &error)
            }
        }
    }

    fn flush(&mut self, head: &RequestHead) -> Result<(), End> {
        if let Err(error) = self.check_flags(head, 0) {
            return self.refuse(head, &error);
        }
        self.change(head, Request::Flush)
    }

    fn trim(&mut self, head: &RequestHead, range: ByteRange) -> Result<(), End> {
        if let Err(error) = self.check_flags(head, 0).and_then(|()| self.check_change(head).map(drop)) {
            return self.refuse(head, &error);
        }
        if self.is_ragged(head) {
            return self.clear_ragged(head, range);
        }
        if !has(head, command_flag::FUA) {
            return self.change(head, Request::Discard { range });
        }
        // A discard has no FUA, and a zero write, which has FUA, may be refused because space is missing. So
        // the discard is flushed afterwards.
        let attempt = self.device.try_now(Op::Discard { range });
        if matches!(attempt, Ok(Attempt::MustWait)) {
            self.submit_and_flush(head, Request::Discard { range });
            return Ok(());
        }
        self.lane.leave();
        match attempt {
            Ok(_) => self.change(head, Request::Flush),
            Err(error) => self.fail(answered(head), head.command, &error),
        }
    }

    fn write_zeroes(&mut self, head: &RequestHead, range: ByteRange) -> Result<(), End> {
        let legal = command_flag::NO_HOLE | command_flag::FAST_ZERO;
        if let Err(error) = self.check_flags(head, legal).and_then(|()| self.check_change(head).map(drop)) {
            return self.refuse(head, &error);
        }
        let may_unmap = !has(head, command_flag::NO_HOLE);
        let fua = has(head, command_flag::FUA);
        if has(head, command_flag::FAST_ZERO) {
            let slow = Refusal { code: NbdError::ENOTSUP, why: "zeroing this range is not fast".into() };
            // A request is fast if it needs no waiting. Partial blocks may need to wait, which shows only
            // when the blocks between them are cleared already. But a refused request must change nothing.
            if self.needs_room(head) {
                return self.refuse(head, &slow);
            }
            let attempt = self.device.try_now(Op::WriteZeroes { range, may_unmap, fua });
            self.lane.leave();
            return match attempt {
                Ok(Attempt::MustWait) => self.refuse(head, &slow),
                attempt => self.settle(head, attempt.map(drop)),
            };
        }
        if self.is_ragged(head) {
            return self.clear_ragged(head, range);
        }
        self.change(head, Request::WriteZeroes { range, may_unmap, fua })
    }

    /// Executes a request without data.
    fn change(&mut self, head: &RequestHead, request: Request) -> Result<(), End> {
        let op = match &request {
            Request::Discard { range } => Op::Discard { range: *range },
            Request::WriteZeroes { range, may_unmap, fua } => {
                Op::WriteZeroes { range: *range, may_unmap: *may_unmap, fua: *fua }
            }
            _ => Op::Flush,
        };
        let attempt = self.device.try_now(op);
        if matches!(attempt, Ok(Attempt::MustWait)) {
            self.submit(head, 0, request);
            return Ok(());
        }
        self.lane.leave();
        self.settle(head, attempt.map(drop))
    }

    fn cache(&mut self, head: &RequestHead, range: ByteRange) -> Result<(), End> {
        if let Err(error) = self.check_flags(head, 0).and_then(|()| self.check_range(range)) {
            return self.refuse(head, &error);
        }
        self.submit(head, 0, Request::Prefetch { range: self.sectors(range) });
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
        let sectors = self.sectors(range);
        let extents = match self.device.extents(sectors, max) {
            Ok(extents) => extents,
            Err(error) => return self.fail(answered(head), head.command, &error),
        };
        let mut left = range.len();
        // The bytes before the range in its first sector.
        let mut skip = range.offset().saturating_sub(sectors.offset());
        let mut pairs: Vec<(u64, u32)> = Vec::with_capacity(extents.len());
        for extent in extents.iter().take(max) {
            let len = extent.len.saturating_sub(std::mem::take(&mut skip)).min(left);
            left = left.saturating_sub(len);
            let flags = match extent.kind {
                ExtentKind::Data => 0,
                ExtentKind::Hole => state::HOLE | state::ZERO,
                ExtentKind::Zero => state::ZERO,
            };
            pairs.push((len, flags));
        }
        if pairs.is_empty() {
            let error = Refusal { code: NbdError::EIO, why: "the device returned no extents".into() };
            return self.refuse(head, &error);
        }
        self.scratch.clear();
        self.form.block_status(&mut self.scratch, answered(head), BASE_ALLOCATION_ID, &pairs);
        self.put_scratch()
    }
}

pub(super) fn has(head: &RequestHead, flag: u16) -> bool {
    head.flags & flag != 0
}

fn length(head: &RequestHead) -> usize {
    usize::try_from(head.length).unwrap_or(usize::MAX)
}
