//! Receives bytes from the initiator, and finds whole PDUs in them.

use std::ops::Range;

use crate::wire::digest::{DIGEST_BYTES, digest};
use crate::wire::header::{BHS_BYTES, Bhs, ahs_bytes, padded, segment_bytes};

/// The receive buffer: `start .. end` has arrived and is not processed yet. It has space for two of the
/// longest PDUs.
#[derive(Default)]
pub(super) struct Inbound {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

/// Which digests PDUs carry, and how long their data may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Framing {
    pub(super) header_digest: bool,
    pub(super) data_digest: bool,
    pub(super) segment_bytes: u32,
}

/// A whole PDU in the buffer; the ranges are for [`Inbound::bytes`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) header: Bhs,
    pub(super) ahs: Range<usize>,
    pub(super) data: Range<usize>,
    /// The data digest is right, or there is none.
    pub(super) data_is_intact: bool,
    /// Total length.
    pub(super) total: usize,
}

/// What is at the front of the buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Front {
    /// A part of a PDU, or nothing.
    NeedBytes,
    /// A PDU.
    Pdu(Found),
    /// Its data segment is longer than was negotiated.
    TooLong(Bhs),
    /// The header is corrupt, so the start of the next one is unknown.
    BadHeaderDigest,
}

impl Inbound {
    pub(super) fn new(segment_bytes: u32) -> Self {
        // Header, the longest AHS, both digests and padding.
        let longest = usize::try_from(segment_bytes).unwrap_or(0).saturating_add(BHS_BYTES + 1020 + 12);
        Self { bytes: vec![0; longest.saturating_mul(2)].into_boxed_slice(), start: 0, end: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// The bytes of a range of a [`Found`].
    #[inline]
    pub(super) fn bytes(&self, range: &Range<usize>) -> &[u8] {
        self.bytes.get(range.clone()).unwrap_or_default()
    }

    #[inline]
    pub(super) fn consume(&mut self, len: usize) {
        self.start = self.start.saturating_add(len).min(self.end);
    }

    /// Where to receive. Moves the rest to the front when less than half of the buffer is free behind it. The
    /// rest is a part of one PDU, and so shorter than half.
    pub(super) fn room(&mut self) -> &mut [u8] {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        } else if self.bytes.len().saturating_sub(self.end) < self.bytes.len() / 2 {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end = self.end.saturating_sub(self.start);
            self.start = 0;
        }
        self.bytes.get_mut(self.end..).unwrap_or_default()
    }

    pub(super) fn received(&mut self, len: usize) {
        self.end = self.end.saturating_add(len).min(self.bytes.len());
    }

    /// Examines the front of the buffer.
    pub(super) fn front(&self, framing: Framing) -> Front {
        let Some(here) = self.bytes.get(self.start..self.end) else { return Front::NeedBytes };
        let Some(header) = here.first_chunk::<BHS_BYTES>() else { return Front::NeedBytes };
        let ahs_end = BHS_BYTES.saturating_add(ahs_bytes(header));
        let mut at = ahs_end;
        if framing.header_digest {
            let Some((covered, rest)) = here.split_at_checked(ahs_end) else { return Front::NeedBytes };
            let Some(sent) = rest.first_chunk::<DIGEST_BYTES>() else { return Front::NeedBytes };
            if *sent != digest(&[covered]) {
                return Front::BadHeaderDigest;
            }
            at = at.saturating_add(DIGEST_BYTES);
        }
        let len = segment_bytes(header);
        if len > framing.segment_bytes {
            return Front::TooLong(*header);
        }
        let len = usize::try_from(len).unwrap_or(0);
        let data_end = at.saturating_add(len);
        let padded_end = at.saturating_add(padded(len));
        let with_digest = framing.data_digest && len > 0;
        let total = if with_digest { padded_end.saturating_add(DIGEST_BYTES) } else { padded_end };
        if here.len() < total {
            return Front::NeedBytes;
        }
        let data_is_intact = !with_digest || {
            let covered = here.get(at..padded_end).unwrap_or_default();
            here.get(padded_end..total) == Some(&digest(&[covered]))
        };
        let offset = |at: usize| self.start.saturating_add(at);
        Front::Pdu(Found {
            header: *header,
            ahs: offset(BHS_BYTES)..offset(ahs_end),
            data: offset(at)..offset(data_end),
            data_is_intact,
            total,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::header::set_segment_bytes;

    const FRAMING: Framing = Framing { header_digest: true, data_digest: true, segment_bytes: 8192 };

    fn pdu(fill: u8, len: usize) -> Vec<u8> {
        let mut header = [fill; BHS_BYTES];
        header[4] = 1;
        set_segment_bytes(&mut header, len);
        let mut bytes = header.to_vec();
        bytes.extend_from_slice(&[1, 2, 3, 4]);
        bytes.extend_from_slice(&digest(&[&bytes]));
        let mut data = vec![fill; len];
        data.resize(padded(len), 0);
        bytes.extend_from_slice(&data);
        if len > 0 {
            bytes.extend_from_slice(&digest(&[&data]));
        }
        bytes
    }

    /// PDUs are found, in whatever pieces their bytes arrive.
    #[test]
    fn pdus_are_found_however_they_are_cut() {
        let lengths = [0_usize, 1, 2, 3, 4, 5, 511, 512, 8191, 8192, 0, 7];
        let stream: Vec<u8> = lengths.iter().enumerate().flat_map(|(n, len)| pdu(n as u8, *len)).collect();
        for piece in [1, 7, 48, 1000, 100_000] {
            let mut inbound = Inbound::new(FRAMING.segment_bytes);
            let mut found = Vec::new();
            let mut rest = &stream[..];
            while !rest.is_empty() {
                let room = inbound.room();
                let count = piece.min(rest.len()).min(room.len());
                assert!(count > 0, "no room");
                room[..count].copy_from_slice(&rest[..count]);
                inbound.received(count);
                rest = &rest[count..];
                loop {
                    match inbound.front(FRAMING) {
                        Front::Pdu(pdu) => {
                            assert!(pdu.data_is_intact);
                            assert_eq!(inbound.bytes(&pdu.ahs), [1, 2, 3, 4]);
                            found.push((pdu.header[8], inbound.bytes(&pdu.data).to_vec()));
                            inbound.consume(pdu.total);
                        }
                        Front::NeedBytes => break,
                        other => panic!("{other:?}"),
                    }
                }
            }
            assert!(inbound.is_empty());
            let expected: Vec<_> =
                lengths.iter().enumerate().map(|(n, len)| (n as u8, vec![n as u8; *len])).collect();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn a_flipped_bit_is_found_and_a_long_segment_refused() {
        let good = pdu(3, 100);
        for at in 0..good.len() {
            let mut bytes = good.clone();
            bytes[at] ^= 4;
            let mut inbound = Inbound::new(FRAMING.segment_bytes);
            inbound.room()[..bytes.len()].copy_from_slice(&bytes);
            inbound.received(bytes.len());
            match inbound.front(FRAMING) {
                Front::BadHeaderDigest => assert!(at < 56),
                // A longer AHS has not arrived as a whole.
                Front::NeedBytes => assert_eq!(at, 4),
                Front::Pdu(pdu) => assert!(at >= 56 && !pdu.data_is_intact, "{at}"),
                other => panic!("{at}: {other:?}"),
            }
        }
        let long = pdu(1, 8193);
        let mut inbound = Inbound::new(FRAMING.segment_bytes);
        inbound.room()[..long.len()].copy_from_slice(&long);
        inbound.received(long.len());
        assert!(matches!(inbound.front(FRAMING), Front::TooLong(_)));
    }
}
