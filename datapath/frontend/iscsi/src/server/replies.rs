//! Builds replies: adds PDUs to the batch, and answers SCSI commands.

use std::time::Instant;

use headwater_scsi::{Reply, Sense, Status};

use super::batch::INLINE_BYTES;
use super::serve::End;
use super::session::Session;
use super::tasks::Order;
use crate::wire::digest::digest;
use crate::wire::header::{BHS_BYTES, Bhs, padding, set_segment_bytes};
use crate::wire::response::{DataIn, Numbers, Reject, RejectReason, Residual, ScsiResponse};

/// Zeroes to pad with.
const PAD: [u8; 4] = [0; 4];

/// How a command ended: SCSI status and sense data.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ending<'a> {
    pub(super) status: Status,
    /// Empty if there is none.
    pub(super) sense: &'a [u8],
}

impl<'a> Ending<'a> {
    #[inline]
    pub(super) fn of(reply: &'a Reply) -> Self {
        Self { status: reply.status, sense: reply.sense.as_ref().map(Sense::bytes).unwrap_or_default() }
    }

    /// Whether the status may be sent in the last Data-In PDU.
    fn is_plain(self) -> bool {
        self.status == Status::Good && self.sense.is_empty()
    }
}

impl Session<'_> {
    /// The numbers for a PDU that does not use up a status number.
    #[inline]
    pub(super) fn numbers(&self) -> Numbers {
        Numbers { stat_sn: self.stat_sn, exp_cmd_sn: self.window.next(), max_cmd_sn: self.window.max() }
    }

    /// The numbers for a PDU that uses up a status number.
    #[inline]
    pub(super) fn next_numbers(&mut self) -> Numbers {
        let numbers = self.numbers();
        self.stat_sn = self.stat_sn.wrapping_add(1);
        numbers
    }

    /// Adds a PDU to the batch; long data is sent at once, without copying it.
    pub(super) fn put_pdu(&mut self, header: &Bhs, data: &[u8]) -> Result<(), End> {
        if self.batch.is_full() {
            self.flush_batch(&[])?;
        }
        let mut header = *header;
        set_segment_bytes(&mut header, data.len());
        self.batch.put(&header);
        if self.parameters.header_digest {
            self.batch.put(&digest(&[&header]));
        }
        if data.is_empty() {
            return Ok(());
        }
        if data.len() > INLINE_BYTES {
            self.flush_batch(data)?;
        } else {
            self.batch.put(data);
        }
        let pad = PAD.get(..padding(data.len())).unwrap_or_default();
        self.batch.put(pad);
        if self.parameters.data_digest {
            self.batch.put(&digest(&[data, pad]));
        }
        Ok(())
    }

    pub(super) fn put_reject(&mut self, header: &Bhs, reason: RejectReason) -> Result<(), End> {
        let reject = Reject { reason: reason as u8, numbers: self.next_numbers() };
        self.put_pdu(&reject.encode(), header)
    }

    pub(super) fn flush_batch(&mut self, more: &[u8]) -> Result<(), End> {
        // The session receives nothing during this send, so the time does not count for the initiator's data.
        let begun = (!self.tasks.is_clear()).then(Instant::now);
        let sent = self.batch.send(self.socket, more);
        if let Some(begun) = begun {
            self.pace.exclude(begun.elapsed());
        }
        sent.map_err(|error| {
            End::Fault(match error.kind() {
                std::io::ErrorKind::TimedOut => {
                    format!("the initiator accepted no bytes of replies for {} ms", self.limits.send_stall_ms)
                }
                _ => format!("sending replies failed: {error}"),
            })
        })
    }

    /// Answers a SCSI command whose data-in is in a buffer.
    pub(super) fn reply(
        &mut self,
        order: &Order,
        r2ts: u32,
        ending: Ending<'_>,
        data_in: &[u8],
    ) -> Result<(), End> {
        let takes = usize::try_from(order.takes()).unwrap_or(usize::MAX);
        let mut left = data_in.get(..takes).unwrap_or(data_in);
        let residuals = Residuals::of(order, data_in.len());
        let segment = usize::try_from(self.parameters.send_segment_bytes).unwrap_or(8192);
        let burst = usize::try_from(self.parameters.max_burst_bytes).unwrap_or(usize::MAX);
        let mut burst_left = burst;
        let mut data_sn = r2ts;
        let mut offset = 0_u32;
        while !left.is_empty() {
            let (now, rest) = left.split_at(left.len().min(segment).min(burst_left));
            left = rest;
            burst_left = burst_left.saturating_sub(now.len());
            let with_status = left.is_empty() && ending.is_plain() && residuals.read.is_none();
            let pdu = DataIn {
                is_final: left.is_empty() || burst_left == 0,
                status: with_status.then_some((ending.status.byte(), residuals.main)),
                task_tag: order.tag,
                numbers: if with_status { self.next_numbers() } else { self.numbers() },
                data_sn,
                offset,
            };
            self.put_pdu(&pdu.encode(), now)?;
            if with_status {
                return Ok(());
            }
            data_sn = data_sn.wrapping_add(1);
            offset = offset.wrapping_add(u32::try_from(now.len()).unwrap_or(0));
            if burst_left == 0 {
                burst_left = burst;
            }
        }
        self.put_response(order, data_sn, ending, residuals)
    }

    /// Answers a command that was executed at once: its data-in, `len` bytes of it, is already in the batch's
    /// buffer, after the space for its header.
    #[inline]
    pub(super) fn reply_in_place(
        &mut self,
        order: &Order,
        ending: Ending<'_>,
        len: usize,
    ) -> Result<(), End> {
        let takes = usize::try_from(order.takes()).unwrap_or(usize::MAX);
        let sent = len.min(takes);
        let residuals = Residuals::of(order, len);
        if sent == 0 {
            return self.put_response(order, 0, ending, residuals);
        }
        let with_status = ending.is_plain() && residuals.read.is_none();
        let pdu = DataIn {
            is_final: true,
            status: with_status.then_some((ending.status.byte(), residuals.main)),
            task_tag: order.tag,
            numbers: if with_status { self.next_numbers() } else { self.numbers() },
            data_sn: 0,
            offset: 0,
        };
        let mut header = pdu.encode();
        set_segment_bytes(&mut header, sent);
        let (header_digest, data_digest) = (self.parameters.header_digest, self.parameters.data_digest);
        let data_at = data_offset(header_digest);
        let padded_end = data_at.saturating_add(sent).saturating_add(padding(sent));
        let total = if data_digest { padded_end.saturating_add(4) } else { padded_end };
        let room = self.batch.room(total);
        if let Some((front, rest)) = room.split_at_mut_checked(data_at) {
            if let Some(to) = front.get_mut(..BHS_BYTES) {
                to.copy_from_slice(&header);
            }
            if header_digest && let Some(to) = front.get_mut(BHS_BYTES..) {
                to.copy_from_slice(&digest(&[&header]));
            }
            let padded = sent.saturating_add(padding(sent));
            if let Some(pad) = rest.get_mut(sent..padded) {
                pad.fill(0);
            }
            if data_digest && let Some((covered, to)) = rest.split_at_mut_checked(padded) {
                to.copy_from_slice(&digest(&[covered]));
            }
        }
        self.batch.advance(total);
        if with_status { Ok(()) } else { self.put_response(order, 1, ending, residuals) }
    }

    fn put_response(
        &mut self,
        order: &Order,
        exp_data_sn: u32,
        ending: Ending<'_>,
        residuals: Residuals,
    ) -> Result<(), End> {
        let response = ScsiResponse {
            response: 0,
            status: ending.status.byte(),
            task_tag: order.tag,
            numbers: self.next_numbers(),
            exp_data_sn,
            residual: residuals.main,
            read_residual: residuals.read.unwrap_or_default(),
        };
        let header = response.encode();
        let bytes = ending.sense;
        if bytes.is_empty() {
            return self.put_pdu(&header, &[]);
        }
        let mut data = Vec::with_capacity(bytes.len().saturating_add(2));
        data.extend_from_slice(&u16::try_from(bytes.len()).unwrap_or(0).to_be_bytes());
        data.extend_from_slice(bytes);
        self.put_pdu(&header, &data)
    }
}

/// Where data-in begins in a PDU.
#[inline]
pub(super) fn data_offset(header_digest: bool) -> usize {
    if header_digest { BHS_BYTES + 4 } else { BHS_BYTES }
}

/// The residuals of data that was not moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Residuals {
    main: Residual,
    /// The residual of the data-in, if the initiator announced both directions.
    read: Option<Residual>,
}

impl Residuals {
    fn of(order: &Order, data_in_bytes: usize) -> Self {
        let data_in = u64::try_from(data_in_bytes).unwrap_or(u64::MAX);
        let data_out = order.expected.data_out_bytes;
        match (order.read, order.write) {
            (true, true) => Self {
                main: Residual::of(order.announced, data_out),
                read: Some(Residual::of(order.announced_read.unwrap_or(0), data_in)),
            },
            (true, false) => Self { main: Residual::of(order.announced, data_in), read: None },
            (false, true) => Self { main: Residual::of(order.announced, data_out), read: None },
            // No data was announced in either direction.
            (false, false) => Self { main: Residual::of(0, data_in.max(data_out)), read: None },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headwater_scsi::{Arrival, Attribute, Cdb, Expected, Lun};

    #[test]
    fn residuals_tell_the_difference_in_each_direction() {
        let order = |read, write, announced, announced_read, data_out_bytes| Order {
            tag: 0,
            lun: Lun::single(0),
            attribute: Attribute::Simple,
            cdb: Cdb::new(&[]),
            read,
            write,
            announced,
            announced_read,
            expected: Expected { data_out_bytes, ..Expected::default() },
            arrival: Arrival::default(),
            immediate: false,
        };
        let of = |order: Order, data_in| {
            let residuals = Residuals::of(&order, data_in);
            (residuals.main, residuals.read)
        };
        use Residual::{None as Exact, Overflow, Underflow};
        assert_eq!(of(order(true, false, 512, None, 0), 512), (Exact, None));
        assert_eq!(of(order(true, false, 512, None, 0), 100), (Underflow(412), None));
        assert_eq!(of(order(true, false, 100, None, 0), 512), (Overflow(412), None));
        assert_eq!(of(order(false, true, 512, None, 1024), 0), (Overflow(512), None));
        assert_eq!(of(order(false, true, 512, None, 0), 0), (Underflow(512), None));
        assert_eq!(of(order(false, false, 0, None, 0), 36), (Overflow(36), None));
        assert_eq!(of(order(true, true, 10, Some(20), 10), 0), (Exact, Some(Underflow(20))));
    }
}
