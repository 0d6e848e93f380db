//! Buffers for requests that must wait; they are reused.

/// The most bytes of free buffers that a pool keeps; further buffers are freed.
const KEPT_BYTES: usize = 1 << 20;

/// The free buffers of one connection.
#[derive(Default)]
pub(super) struct Pool {
    free: Vec<Vec<u8>>,
    bytes: usize,
}

impl Pool {
    /// A buffer of `len` bytes, with any contents.
    pub(super) fn take(&mut self, len: usize) -> Vec<u8> {
        let mut buffer = match self.free.pop() {
            Some(buffer) => {
                self.bytes = self.bytes.saturating_sub(buffer.capacity());
                buffer
            }
            None => return vec![0; len],
        };
        buffer.resize(len, 0);
        buffer
    }

    /// A buffer with a copy of `bytes`.
    pub(super) fn copy_of(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut buffer = self.take(0);
        buffer.extend_from_slice(bytes);
        buffer
    }

    pub(super) fn give(&mut self, buffer: Vec<u8>) {
        let bytes = self.bytes.saturating_add(buffer.capacity());
        if buffer.capacity() == 0 || bytes > KEPT_BYTES {
            return;
        }
        self.bytes = bytes;
        self.free.push(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_used_again_and_bounded() {
        let mut pool = Pool::default();
        let buffer = pool.copy_of(&[7; 4096]);
        let place = buffer.as_ptr();
        pool.give(buffer);
        let again = pool.take(100);
        assert_eq!((again.as_ptr(), again.len()), (place, 100));
        pool.give(again);
        for _ in 0..100 {
            pool.give(vec![0; 64 << 10]);
        }
        assert!(pool.bytes <= KEPT_BYTES);
        let held: usize = pool.free.iter().map(Vec::capacity).sum();
        assert_eq!(held, pool.bytes);
    }
}
