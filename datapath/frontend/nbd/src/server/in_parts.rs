//! Requests for any range of bytes: requests that do not cover whole sectors, and requests longer than the
//! device takes at once.
//!
//! Clients that never ask for block sizes send them. A sector is the device's logical block.
//!
//! | request | what happens |
//! |---|---|
//! | read of parts of sectors | the whole sectors are read; only the requested bytes are sent |
//! | write, trim or zero write of parts of sectors | the rest of these sectors is read, and whole sectors are written |
//! | longer read | read and sent in parts of [`PART_BYTES`] |
//! | longer write | written in parts as its data arrives, which are cut at blocks of 4 KiB |
//!
//! A partial-sector change starts when nothing of its connection is in flight, and the connection takes no
//! other request until it is done. While it reads a sector and writes it again, no other connection changes
//! the device ([`super::gate`]).

use headwater_block::{BLOCK_BYTES, ByteRange, IoError, IoErrorKind, Outcome, Request};

use super::commands::{Refusal, has};
use super::connection::{Connection, Progress, Stage, answered};
use super::inbound::LARGE_BYTES;
use super::serve::End;
use crate::error::NbdError;
use crate::wire::transmission::{RequestHead, command, command_flag};

/// A read that exceeds the limit is executed in parts of this length.
pub(super) const PART_BYTES: u64 = 1 << 20;

/// A write whose data is stored as it arrives.
pub(super) struct Parts {
    pub(super) head: RequestHead,
    /// The range that is not stored yet.
    pub(super) left: ByteRange,
}

/// The bytes from `start` to `end`.
fn between(start: u64, end: u64) -> Result<ByteRange, End> {
    ByteRange::new(start, end.saturating_sub(start))
        .ok_or_else(|| End::Fault("a request ends past 64 bits".into()))
}

fn zeroes(range: ByteRange) -> Vec<u8> {
    vec![0; usize::try_from(range.len()).unwrap_or(0)]
}

impl Connection<'_> {
    fn sector_bytes(&self) -> u64 {
        u64::from(self.geometry.logical_block_bytes.max(1))
    }

    /// The whole sectors that `range` touches. They are on the device if the range is.
    pub(super) fn sectors(&self, range: ByteRange) -> ByteRange {
        let sector = self.sector_bytes();
        let start = range.offset().saturating_sub(range.offset() % sector);
        let end = range.end().checked_next_multiple_of(sector).unwrap_or(range.end());
        ByteRange::new(start, end.saturating_sub(start)).unwrap_or(range)
    }

    /// Whether the request does not cover whole sectors.
    pub(super) fn is_ragged(&self, head: &RequestHead) -> bool {
        let sector = self.sector_bytes();
        !head.offset.is_multiple_of(sector) || !head.length.is_multiple_of(sector)
    }

    /// Whether the device takes the request only in parts.
    pub(super) fn is_long(&self, range: ByteRange) -> bool {
        self.sectors(range).len() > u64::from(self.limits.request_bytes)
    }

    /// Whether the request is executed with nothing else in flight.
    pub(super) fn is_alone(&self, head: &RequestHead) -> bool {
        match head.command {
            command::READ => {
                ByteRange::new(head.offset, head.length).is_some_and(|range| self.is_long(range))
            }
            command::WRITE => self.is_ragged(head) || head.length > u64::from(self.limits.request_bytes),
            command::TRIM | command::WRITE_ZEROES => self.is_ragged(head),
            _ => false,
        }
    }

    /// Executes one request of whole sectors and waits for it. Nothing else is in flight.
    fn execute_alone(&mut self, head: &RequestHead, request: Request) -> Result<Outcome, End> {
        if !self.batch.is_empty() {
            self.flush_batch(&[])?;
        }
        if matches!(request, Request::Write { .. } | Request::Discard { .. } | Request::WriteZeroes { .. })
            && !self.lane.enter()
        {
            return Err(End::Fault("a write in parts began inside of another: this is a bug".into()));
        }
        self.submit(head, 0, request);
        self.answer_of_device()
    }

    /// Waits for the answer to the only request in flight.
    fn answer_of_device(&mut self) -> Result<Outcome, End> {
        loop {
            self.take_answers();
            if let Some((ticket, outcome)) = self.answers.pop() {
                self.landed(&ticket);
                return Ok(outcome);
            }
            self.sleep(false)?;
        }
    }

    /// Sends a long read in parts.
    pub(super) fn read_in_parts(&mut self, head: &RequestHead, range: ByteRange) -> Result<(), End> {
        let to = answered(head);
        if has(head, command_flag::DF) {
            let why = format!("a read of {} bytes does not fit one chunk", head.length);
            return self.refuse(head, &Refusal { code: NbdError::EOVERFLOW, why });
        }
        let mut at = range.offset();
        while at < range.end() {
            let next = at.saturating_sub(at % PART_BYTES).saturating_add(PART_BYTES).min(range.end());
            let part = between(at, next)?;
            let sectors = self.sectors(part);
            let buffer = self.pool.take(usize::try_from(sectors.len()).unwrap_or(0));
            let outcome = self.execute_alone(head, Request::Read { range: sectors, buffer })?;
            let skip = usize::try_from(at.saturating_sub(sectors.offset())).unwrap_or(0);
            let len = usize::try_from(part.len()).unwrap_or(0);
            let data = outcome.buffer.get(skip..skip.saturating_add(len));
            let data = match (outcome.result, data) {
                (Ok(()), Some(data)) => data,
                (result, _) => {
                    let lost = || IoError::new(IoErrorKind::Device, "the device returned a short buffer");
                    let error = result.err().unwrap_or_else(lost);
                    let refusal = self.failed(head.command, &error)?;
                    if at > range.offset() && !self.form.has_chunks() {
                        // A simple reply has said that the read succeeded.
                        return Err(End::Fault(format!(
                            "a read failed after a part of it was sent: {}",
                            refusal.why
                        )));
                    }
                    return self.put_error(to, refusal.code, &refusal.why);
                }
            };
            if let Some(bytes) = self.form.part_head(to, at, data.len(), next == range.end()) {
                self.put(&bytes)?;
            }
            self.flush_batch(data)?;
            self.pool.give(outcome.buffer);
            at = next;
        }
        Ok(())
    }

    /// Stores the data of a write that has arrived, if it is enough for a part.
    pub(super) fn write_part(&mut self, parts: Parts) -> Result<Progress, End> {
        let Parts { head, left } = parts;
        let left_bytes = usize::try_from(left.len()).unwrap_or(usize::MAX);
        let here = self.inbound.available(left_bytes).len();
        if here < left_bytes.min(LARGE_BYTES) {
            self.stage = Stage::Parts(Parts { head, left });
            return Ok(Progress::NeedBytes);
        }
        let mut end = left.offset().saturating_add(here as u64);
        if end < left.end() {
            end = end.saturating_sub(end % u64::from(BLOCK_BYTES));
        }
        let part = between(left.offset(), end)?;
        let len = usize::try_from(part.len()).unwrap_or(0);
        let data = self.inbound.available(len).to_vec();
        self.inbound.consume(len);
        let rest = between(end, left.end())?;
        if let Err(error) = self.merge(&head, part, data)? {
            let error = self.failed(head.command, &error)?;
            let left = usize::try_from(rest.len()).unwrap_or(usize::MAX);
            self.stage = Stage::Drain { head, left, error };
            return Ok(Progress::Again);
        }
        if rest.is_empty() {
            self.finish(&head)?;
        } else {
            self.stage = Stage::Parts(Parts { head, left: rest });
        }
        Ok(Progress::Again)
    }

    /// Trims or clears a range that does not cover whole sectors.
    pub(super) fn clear_ragged(&mut self, head: &RequestHead, range: ByteRange) -> Result<(), End> {
        let sector = self.sector_bytes();
        let start = range.offset().checked_next_multiple_of(sector).unwrap_or(range.end()).min(range.end());
        let end = range.end().saturating_sub(range.end() % sector).max(start);
        let is_trim = head.command == command::TRIM;
        let may_unmap = !has(head, command_flag::NO_HOLE);
        for (part, is_edge) in [
            (between(range.offset(), start)?, true),
            (between(start, end)?, false),
            (between(end, range.end())?, true),
        ] {
            if part.is_empty() {
                continue;
            }
            let result = if is_edge {
                self.merge(head, part, zeroes(part))?
            } else if is_trim {
                self.execute_alone(head, Request::Discard { range: part })?.result
            } else {
                self.execute_alone(head, Request::WriteZeroes { range: part, may_unmap, fua: false })?.result
            };
            match result {
                // The edges of a trim may keep their data if there is no space for them.
                Err(error) if is_trim && is_edge && error.kind() == IoErrorKind::NoSpace => {}
                Err(error) => return self.fail(answered(head), head.command, &error),
                Ok(()) => {}
            }
        }
        self.finish(head)
    }

    /// Answers a change whose parts are all done.
    fn finish(&mut self, head: &RequestHead) -> Result<(), End> {
        let result = if has(head, command_flag::FUA) {
            self.execute_alone(head, Request::Flush)?.result
        } else {
            Ok(())
        };
        self.settle(head, result)
    }

    /// Writes bytes at any offset; keeps the rest of the sectors at both ends.
    fn merge(
        &mut self,
        head: &RequestHead,
        range: ByteRange,
        data: Vec<u8>,
    ) -> Result<Result<(), IoError>, End> {
        let sectors = self.sectors(range);
        if sectors == range {
            return Ok(self.execute_alone(head, Request::Write { range, buffer: data, fua: false })?.result);
        }
        if !self.batch.is_empty() {
            self.flush_batch(&[])?;
        }
        let gate = self.lane.gate();
        let _exclusion = gate.exclude();
        let mut buffer = match self.read_now(head, between(sectors.offset(), range.offset())?)? {
            Ok(before) => before,
            Err(error) => return Ok(Err(error)),
        };
        buffer.extend_from_slice(&data);
        match self.read_now(head, between(range.end(), sectors.end())?)? {
            Ok(after) => buffer.extend_from_slice(&after),
            Err(error) => return Ok(Err(error)),
        }
        // Not through the gate, which this change has already.
        self.submit(head, 0, Request::Write { range: sectors, buffer, fua: false });
        Ok(self.answer_of_device()?.result)
    }

    /// The bytes of `range`, which is less than a sector.
    fn read_now(&mut self, head: &RequestHead, range: ByteRange) -> Result<Result<Vec<u8>, IoError>, End> {
        if range.is_empty() {
            return Ok(Ok(Vec::new()));
        }
        let sector = self.sectors(range);
        let outcome = self.execute_alone(head, Request::Read { range: sector, buffer: zeroes(sector) })?;
        if let Err(error) = outcome.result {
            return Ok(Err(error));
        }
        let skip = usize::try_from(range.offset().saturating_sub(sector.offset())).unwrap_or(0);
        let len = usize::try_from(range.len()).unwrap_or(0);
        let bytes = outcome.buffer.get(skip..skip.saturating_add(len));
        let lost = || IoError::new(IoErrorKind::Device, "the device returned a short buffer");
        Ok(bytes.map(<[u8]>::to_vec).ok_or_else(lost))
    }
}
