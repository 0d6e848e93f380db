//! Bytes from the client that are not requests yet.

/// Payloads of at least this length that have not arrived completely are received into a buffer of their own.
pub(super) const LARGE_BYTES: usize = 64 << 10;

/// The receive buffer: `start .. end` has arrived and is not processed yet.
pub(super) struct Inbound {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Inbound {
    pub(super) fn new(size_bytes: usize) -> Self {
        Self { bytes: vec![0; size_bytes].into_boxed_slice(), start: 0, end: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.end.saturating_sub(self.start)
    }

    /// The head of a request, if it has arrived.
    #[inline]
    pub(super) fn head<const N: usize>(&self) -> Option<&[u8; N]> {
        self.bytes.get(self.start..self.end)?.first_chunk()
    }

    /// The payload after a head of this length, if it has arrived completely.
    #[inline]
    pub(super) fn payload(&self, head: usize, len: usize) -> Option<&[u8]> {
        self.bytes.get(self.start..self.end)?.get(head..head.checked_add(len)?)
    }

    /// Everything that has arrived, at most `limit`.
    pub(super) fn available(&self, limit: usize) -> &[u8] {
        let end = self.start.saturating_add(limit).min(self.end);
        self.bytes.get(self.start..end).unwrap_or_default()
    }

    #[inline]
    pub(super) fn consume(&mut self, len: usize) {
        self.start = self.start.saturating_add(len).min(self.end);
    }

    /// Where to receive. Moves the rest to the front when the free part behind it gets short. The rest is
    /// less than one request with a payload below [`LARGE_BYTES`], so the free part is never empty.
    pub(super) fn room(&mut self) -> &mut [u8] {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        } else if self.bytes.len().saturating_sub(self.end) < LARGE_BYTES {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end = self.end.saturating_sub(self.start);
            self.start = 0;
        }
        self.bytes.get_mut(self.end..).unwrap_or_default()
    }

    pub(super) fn received(&mut self, len: usize) {
        self.end = self.end.saturating_add(len).min(self.bytes.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rest_survives_being_moved_to_the_front() {
        let mut inbound = Inbound::new(192 << 10);
        let size = inbound.room().len();
        for (at, byte) in inbound.room().iter_mut().enumerate() {
            *byte = (at % 251) as u8;
        }
        inbound.received(size);
        inbound.consume(size - 1000);
        assert_eq!(inbound.len(), 1000);
        assert_eq!(inbound.room().len(), size - 1000);
        let expected: Vec<u8> = (size - 1000..size).map(|at| (at % 251) as u8).collect();
        assert_eq!(inbound.available(usize::MAX), expected);
        assert_eq!(inbound.payload(28, 1000 - 28).unwrap(), &expected[28..]);
        assert!(inbound.payload(28, 1000).is_none());
    }
}
