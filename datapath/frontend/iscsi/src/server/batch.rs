//! Replies that are collected and sent with one system call. The caller checks [`Batch::is_full`] and sends.

use std::io::IoSlice;

use headwater_connections::Socket;

/// Data of at most this length is copied into the batch; longer data is sent without copying.
pub(super) const INLINE_BYTES: usize = 64 << 10;

/// The space that each PDU may use: a header, inline data, padding and both digests.
const PDU_ROOM_BYTES: usize = INLINE_BYTES + 256;

/// Bytes to send, in a buffer of fixed size that is initialised once.
pub(super) struct Batch {
    bytes: Box<[u8]>,
    used: usize,
}

impl Batch {
    pub(super) fn new(size_bytes: usize) -> Self {
        Self { bytes: vec![0; size_bytes.max(PDU_ROOM_BYTES)].into_boxed_slice(), used: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Whether it must be sent before another PDU with inline data is added.
    pub(super) fn is_full(&self) -> bool {
        self.bytes.len().saturating_sub(self.used) < PDU_ROOM_BYTES
    }

    /// The next `len` bytes, to be filled and then counted by [`Batch::advance`].
    #[inline]
    pub(super) fn room(&mut self, len: usize) -> &mut [u8] {
        let end = self.used.saturating_add(len);
        self.bytes.get_mut(self.used..end).unwrap_or_default()
    }

    #[inline]
    pub(super) fn advance(&mut self, len: usize) {
        self.used = self.used.saturating_add(len).min(self.bytes.len());
    }

    /// Appends bytes, for which there must be space.
    #[inline]
    pub(super) fn put(&mut self, bytes: &[u8]) {
        let room = self.room(bytes.len());
        if room.len() == bytes.len() {
            room.copy_from_slice(bytes);
            self.advance(bytes.len());
        }
    }

    /// Sends all, followed by `more`.
    pub(super) fn send(&mut self, socket: &Socket, more: &[u8]) -> std::io::Result<()> {
        let bytes = self.bytes.get(..self.used).unwrap_or_default();
        let mut parts = [IoSlice::new(bytes), IoSlice::new(more)];
        // One part is sent with a cheaper call.
        let count = if more.is_empty() { 1 } else { 2 };
        let sent = socket.send(parts.get_mut(..count).unwrap_or_default(), None);
        self.used = 0;
        sent
    }
}
