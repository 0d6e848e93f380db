//! The buffer into which an import reads a source, aligned to pages.
//!
//! A copy from the page cache copies whole pages, and allocators place a large buffer 16 bytes after a page
//! start. On some processors that is the slowest alignment (see `headwater_block::Pages`).

const PAGE_BYTES: usize = 4096;

/// The bytes of one batch. The memory is reused. A read that waits for its source has a buffer of its own.
#[derive(Default)]
pub(super) struct Input {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Input {
    /// For batches of at most `bytes`, including padding.
    pub(super) fn with_capacity(bytes: usize) -> Self {
        Self { memory: Vec::with_capacity(bytes.saturating_add(PAGE_BYTES)), start: 0, len: 0 }
    }

    /// Space for `len` bytes, with arbitrary content.
    pub(super) fn page_of(&mut self, len: usize) -> &mut [u8] {
        let room = len.saturating_add(PAGE_BYTES);
        self.memory.reserve_exact(room.saturating_sub(self.memory.len()));
        self.memory.resize(room, 0);
        self.start = self.memory.as_ptr().align_offset(PAGE_BYTES).min(PAGE_BYTES);
        self.len = len;
        self.memory.get_mut(self.start..self.start.saturating_add(len)).unwrap_or_default()
    }

    /// A buffer of `len` bytes from the same memory, for a read that waits for its source.
    pub(super) fn take(&mut self, len: usize) -> Vec<u8> {
        let mut memory = std::mem::take(self).memory;
        memory.resize(len, 0);
        memory
    }

    /// Adds zeroes up to a multiple of `chunk_bytes`.
    pub(super) fn fill_up(&mut self, chunk_bytes: usize) {
        let end = self.start.saturating_add(self.len);
        self.len = self.len.next_multiple_of(chunk_bytes);
        self.memory.truncate(end);
        self.memory.resize(self.start.saturating_add(self.len), 0);
    }

    /// The bytes that were read.
    pub(super) fn bytes(&self) -> &[u8] {
        self.memory.get(self.start..self.start.saturating_add(self.len)).unwrap_or_default()
    }
}

impl From<Vec<u8>> for Input {
    fn from(memory: Vec<u8>) -> Self {
        let len = memory.len();
        Self { memory, start: 0, len }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reused_input_memory_is_padded_with_zeroes() {
        let mut input = Input::default();
        for (len, chunk_bytes) in [(1 << 20, 65_536), (512, 65_536), (300_032, 4096), (65_536, 65_536)] {
            let into = input.page_of(len);
            assert_eq!((into.len(), into.as_ptr().addr() % PAGE_BYTES), (len, 0));
            into.fill(5);
            input.fill_up(chunk_bytes);
            let expected = [vec![5; len], vec![0; len.next_multiple_of(chunk_bytes) - len]].concat();
            assert_eq!(input.bytes(), expected);
            // The same for a read that waited for its source.
            let mut buffer = input.take(len);
            assert_eq!(buffer.len(), len);
            buffer.fill(6);
            input = Input::from(buffer);
            input.fill_up(chunk_bytes);
            assert_eq!(&input.bytes()[..len], vec![6; len]);
            assert_eq!(&input.bytes()[len..], vec![0; len.next_multiple_of(chunk_bytes) - len]);
        }
    }
}
