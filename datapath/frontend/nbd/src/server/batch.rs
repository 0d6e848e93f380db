//! Replies that are collected and sent with one system call. The caller checks [`Batch::is_full`] and sends;
//! if a send fails, the batch's bytes are lost.

use std::io::IoSlice;

use headwater_block::SharedSlice;

use crate::socket::{PagePipe, Socket};

/// A read of at most this length is copied into the batch, instead of into a buffer of its own.
pub(super) const INLINE_BYTES: usize = 64 << 10;

/// The space that each reply may use: an inline read and the longest reply header or error.
const REPLY_ROOM_BYTES: usize = INLINE_BYTES + 1024;

/// Bytes to send, in a buffer of fixed size that is initialised once.
pub(super) struct Batch {
    bytes: Box<[u8]>,
    used: usize,
}

impl Batch {
    pub(super) fn new(size_bytes: usize) -> Self {
        Self { bytes: vec![0; size_bytes].into_boxed_slice(), used: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Whether it must be sent before another reply with inline data is added.
    pub(super) fn is_full(&self) -> bool {
        self.bytes.len().saturating_sub(self.used) < REPLY_ROOM_BYTES
    }

    /// The next `len` bytes, to be filled and then counted by [`Batch::advance`].
    #[inline]
    pub(super) fn room(&mut self, len: usize) -> Option<&mut [u8]> {
        self.bytes.get_mut(self.used..self.used.checked_add(len)?)
    }

    #[inline]
    pub(super) fn advance(&mut self, len: usize) {
        self.used = self.used.saturating_add(len).min(self.bytes.len());
    }

    /// Appends bytes. `false`: no space.
    #[inline]
    pub(super) fn put(&mut self, bytes: &[u8]) -> bool {
        let Some(room) = self.room(bytes.len()) else { return false };
        room.copy_from_slice(bytes);
        self.advance(bytes.len());
        true
    }

    /// Sends all, followed by `more`, which may be empty.
    pub(super) fn send(&mut self, socket: &Socket, more: &[u8]) -> std::io::Result<()> {
        let bytes = self.bytes.get(..self.used).unwrap_or_default();
        let mut parts = [IoSlice::new(bytes), IoSlice::new(more)];
        // One part is sent with a cheaper call.
        let count = if more.is_empty() { 1 } else { 2 };
        let sent = socket.send_all(parts.get_mut(..count).unwrap_or_default());
        self.used = 0;
        sent
    }

    /// Sends everything, then pages of the device's memory without copying them.
    pub(super) fn send_shared(
        &mut self,
        socket: &Socket,
        slices: &[SharedSlice],
        pipe: &mut PagePipe,
    ) -> std::io::Result<()> {
        let bytes = self.bytes.get(..self.used).unwrap_or_default();
        let sent = socket.send_shared(bytes, slices, pipe);
        self.used = 0;
        sent
    }
}
