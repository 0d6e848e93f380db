//! Byte ranges and the block size.

/// The unit of the write cache and of read-modify-write: 4 KiB.
pub const BLOCK_BYTES: u32 = 4096;

/// `log2(BLOCK_BYTES)`.
pub const BLOCK_SHIFT: u32 = 12;

/// The largest disk of a machine, 8 KiB less than 16 TiB: a write cache numbers its blocks with 32 bits, and
/// the last number means "no block".
pub const VOLUME_MAX_BYTES: u64 = (u32::MAX as u64 - 1) * BLOCK_BYTES as u64;

/// The longest read or write that a device must accept. Longer ones are split by the front-end.
pub const MAX_REQUEST_BYTES: u32 = 32 << 20;

/// A half-open range of bytes of a device: `offset .. offset + len`, never overflowing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ByteRange {
    offset: u64,
    len: u64,
}

impl ByteRange {
    /// Creates a range. `None` if its end does not fit in 64 bits.
    pub const fn new(offset: u64, len: u64) -> Option<Self> {
        if offset.checked_add(len).is_none() {
            return None;
        }
        Some(Self { offset, len })
    }

    /// First byte.
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// Length in bytes.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// One past the last byte.
    pub const fn end(&self) -> u64 {
        // Cannot overflow: `new` checked it.
        self.offset.wrapping_add(self.len)
    }

    /// Whether the range holds no byte.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of the first block that the range touches.
    pub const fn first_block(&self) -> u64 {
        self.offset >> BLOCK_SHIFT
    }

    /// One past the number of the last block that the range touches.
    pub const fn end_block(&self) -> u64 {
        if self.len == 0 {
            return self.first_block();
        }
        (self.end().wrapping_sub(1) >> BLOCK_SHIFT).wrapping_add(1)
    }

    /// The part of `self` below `limit`.
    pub const fn clipped_to(&self, limit: u64) -> Self {
        let end = if self.end() < limit { self.end() } else { limit };
        let offset = if self.offset < end { self.offset } else { end };
        Self { offset, len: end.wrapping_sub(offset) }
    }
}

impl std::fmt::Display for ByteRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}+{}", self.offset, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_past_64_bits_is_refused() {
        assert!(ByteRange::new(u64::MAX, 1).is_none());
        assert!(ByteRange::new(u64::MAX, 0).is_some());
    }

    #[test]
    fn blocks_touched() {
        let blocks = |offset, len| {
            let r = ByteRange::new(offset, len).unwrap();
            (r.first_block(), r.end_block())
        };
        assert_eq!(blocks(0, 4096), (0, 1));
        assert_eq!(blocks(4095, 2), (0, 2));
        assert_eq!(blocks(8192, 0), (2, 2));
    }
}
