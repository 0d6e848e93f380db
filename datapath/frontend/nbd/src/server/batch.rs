//! Replies that are collected and sent with one system call.

use std::io::IoSlice;

use crate::socket::Socket;

/// Where a read of at most this length goes, instead of into a buffer of its own.
pub(super) const INLINE_BYTES: usize = 64 << 10;

/// Room that each reply may count on: an inline read and the longest head or error.
const REPLY_ROOM_BYTES: usize = INLINE_BYTES + 1024;

/// Bytes to send; fixed size, initialised once.
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

    /// Whether it must be sent before another reply of any inline kind is added.
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

    /// Adds bytes. `false`: no room.
    #[inline]
    pub(super) fn put(&mut self, bytes: &[u8]) -> bool {
        let Some(room) = self.room(bytes.len()) else { return false };
        room.copy_from_slice(bytes);
        self.advance(bytes.len());
        true
    }

    /// Sends all, followed by `more`.
    pub(super) fn send<'a>(
        &'a mut self,
        socket: &Socket,
        more: impl Iterator<Item = &'a [u8]>,
    ) -> std::io::Result<()> {
        let bytes = self.bytes.get(..self.used).unwrap_or_default();
        let mut first = [IoSlice::new(bytes), IoSlice::new(&[])];
        let mut more = more.map(IoSlice::new);
        let second = more.next();
        let sent = match (second, more.next()) {
            (second, None) => {
                // By far the most frequent, and no allocation.
                let [_, place] = &mut first;
                *place = second.unwrap_or(IoSlice::new(&[]));
                let count = if second.is_some() { 2 } else { 1 };
                socket.send_all(first.get_mut(..count).unwrap_or_default())
            }
            (second, third) => {
                let all = std::iter::once(IoSlice::new(bytes)).chain(second).chain(third).chain(more);
                socket.send_all(&mut all.collect::<Vec<IoSlice<'_>>>())
            }
        };
        self.used = 0;
        sent
    }
}
