//! Cuts a byte range into the parts that fall into its blocks.

use headwater_block::{BLOCK_BYTES, ByteRange};
use headwater_writecache::BlockNumber;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// The part of a request that falls into one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The block.
    pub block: BlockNumber,
    /// First byte in the block.
    pub skip: usize,
    /// First byte in the request.
    pub start: usize,
    /// Bytes.
    pub len: usize,
}

impl Piece {
    /// Whether the piece is a whole block.
    #[inline]
    pub fn is_whole(&self) -> bool {
        self.len == BLOCK_BYTES as usize
    }

    /// The range of the piece in the volume.
    pub fn range(&self) -> Option<ByteRange> {
        ByteRange::new(u64::from(self.block.0) * BLOCK + self.skip as u64, self.len as u64)
    }
}

/// The first piece of a request that covers the end of one block and the beginning of the next, if it is not
/// longer than a block.
pub fn straddling(range: ByteRange) -> Option<Piece> {
    let first = piece_at(range, 0).filter(|first| !first.is_whole())?;
    let is_pair = range.len() <= BLOCK && (first.len as u64) < range.len();
    is_pair.then_some(first)
}

/// The piece of `range` that begins at its byte `start`; `None` at the end of the range.
#[inline]
pub fn piece_at(range: ByteRange, start: usize) -> Option<Piece> {
    let left = range.len().checked_sub(start as u64).filter(|left| *left > 0)?;
    let offset = range.offset() + start as u64;
    let skip = offset % BLOCK;
    Some(Piece {
        block: BlockNumber(u32::try_from(offset / BLOCK).ok()?),
        skip: usize::try_from(skip).ok()?,
        start,
        len: usize::try_from(left.min(BLOCK - skip)).ok()?,
    })
}

/// All pieces of `range`, in order.
pub fn pieces(range: ByteRange) -> impl Iterator<Item = Piece> {
    let first = piece_at(range, 0);
    std::iter::successors(first, move |piece| piece_at(range, piece.start + piece.len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_of_two_parts_of_blocks_straddles_them() {
        let cut = |offset, len| straddling(ByteRange::new(offset, len).unwrap()).map(|piece| piece.len);
        assert_eq!(cut(4096 + 512, 4096), Some(3584));
        assert_eq!(cut(4096 - 512, 1024), Some(512));
        for (offset, len) in [(4096, 4096), (4096, 512), (512, 3584), (512, 4608), (4096 - 512, 8192)] {
            assert_eq!(cut(offset, len), None, "{offset} {len}");
        }
    }

    #[test]
    fn a_range_is_cut_at_block_boundaries() {
        let cut: Vec<_> = pieces(ByteRange::new(4096 + 512, 8192).unwrap())
            .map(|p| (p.block.0, p.skip, p.start, p.len))
            .collect();
        assert_eq!(cut, vec![(1, 512, 0, 3584), (2, 0, 3584, 4096), (3, 0, 7680, 512)]);
        assert_eq!(pieces(ByteRange::new(0, 0).unwrap()).count(), 0);
    }
}
