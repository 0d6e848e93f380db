//! Stores the whole blocks of one long write, or of several writes, together.

use headwater_block::{BLOCK_BYTES, ByteRange};
use headwater_writecache::{Block, BlockNumber, TOGETHER};

use crate::counters::Own;
use crate::latency::{self, Class};
use crate::pieces::Piece;
use crate::volume::Inner;

const BLOCK: usize = BLOCK_BYTES as usize;

const NOTHING: Block<'_> = Block { number: BlockNumber(0), data: &[0; BLOCK] };

/// Blocks to store, each with the write that it belongs to.
struct Group<'a> {
    blocks: [Block<'a>; TOGETHER],
    writes: [usize; TOGETHER],
    len: usize,
}

impl<'a> Group<'a> {
    fn new() -> Self {
        Self { blocks: [NOTHING; TOGETHER], writes: [0; TOGETHER], len: 0 }
    }

    /// Adds the blocks of a write. `false`: the write is not of whole blocks, or has too many.
    fn take(&mut self, write: usize, range: ByteRange, from: &'a [u8]) -> bool {
        let (parts, rest) = from.as_chunks::<BLOCK>();
        let free = self.blocks.iter_mut().zip(&mut self.writes).skip(self.len);
        if !rest.is_empty() || !range.offset().is_multiple_of(BLOCK as u64) || free.len() < parts.len() {
            return false;
        }
        let Ok(first) = u32::try_from(range.first_block()) else { return false };
        for (((block, owner), data), number) in free.zip(parts).zip(first..) {
            *block = Block { number: BlockNumber(number), data };
            *owner = write;
        }
        self.len += parts.len();
        true
    }
}

/// The whole blocks of one write, stored in groups before they are stored one by one.
#[derive(Default)]
pub(crate) struct SideBySide {
    first: u32,
    len: u32,
    stored: u32,
    is_useless: bool,
}

impl SideBySide {
    /// Whether the block of this piece of a write is stored: by an earlier call, or now together with the
    /// blocks after it.
    #[inline]
    pub(crate) fn has(&mut self, inner: &Inner, piece: &Piece, from: &[u8]) -> bool {
        let number = piece.block.0;
        if number.wrapping_sub(self.first) >= self.len {
            if self.is_useless || from.len() <= BLOCK {
                return false;
            }
            self.store(inner, piece, from);
        }
        self.stored >> number.wrapping_sub(self.first) & 1 == 1
    }

    fn store(&mut self, inner: &Inner, piece: &Piece, from: &[u8]) {
        let (blocks, _) = from.get(piece.start..).unwrap_or_default().as_chunks::<BLOCK>();
        let blocks = blocks.get(..TOGETHER).unwrap_or(blocks);
        self.stored = inner.store_side_by_side(piece.block, blocks);
        (self.first, self.len) = (piece.block.0, u32::try_from(blocks.len()).unwrap_or(0));
        // Blocks that follow new blocks are usually new, too. In a persistent cache the result says little,
        // because the first block may hold up the others, and the attempt costs little, because the others
        // are then not examined.
        self.is_useless = self.stored == 0 && !inner.cache.is_persistent();
    }
}

impl Inner {
    pub(crate) fn write_together(&self, writes: &[(ByteRange, &[u8])], done: &mut [bool]) {
        done.fill(false);
        let mut group = Group::new();
        for (number, (range, from)) in writes.iter().enumerate() {
            if !group.take(number, *range, from) && group.len > 0 {
                self.store(&mut group, done);
                group.take(number, *range, from);
            }
        }
        self.store(&mut group, done);
        let mut of_all = (0, 0);
        for ((range, _), _) in writes.iter().zip(done).filter(|(_, done)| **done) {
            of_all = (of_all.0 + 1, of_all.1 + range.len());
        }
        self.counters.add(Own::WriteOps, of_all.0);
        self.counters.add(Own::WriteBytes, of_all.1);
    }

    /// Stores the blocks that can be stored at once; the result has a bit for each block that was.
    fn store_side_by_side(&self, first: BlockNumber, data: &[[u8; BLOCK]]) -> u32 {
        let mut blocks = [NOTHING; TOGETHER];
        for ((block, data), number) in blocks.iter_mut().zip(data).zip(first.0..) {
            *block = Block { number: BlockNumber(number), data };
        }
        let mut stored = [false; TOGETHER];
        let len = data.len().min(TOGETHER);
        if let (Some(blocks), Some(stored)) = (blocks.get(..len), stored.get_mut(..len)) {
            self.overwrite(blocks, stored);
        }
        stored.iter().rev().fold(0, |bits, stored| bits << 1 | u32::from(*stored))
    }

    fn overwrite(&self, blocks: &[Block<'_>], stored: &mut [bool]) {
        let same = |block: &Block<'_>, now| self.is_same(block.number, block.data, now);
        self.cache.overwrite_together(blocks, stored, same);
    }

    fn store(&self, group: &mut Group<'_>, done: &mut [bool]) {
        let mut stored = [false; TOGETHER];
        let (Some(blocks @ [_, ..]), Some(stored)) =
            (group.blocks.get(..group.len), stored.get_mut(..group.len))
        else {
            return;
        };
        let sampled = latency::sample();
        self.overwrite(blocks, stored);
        let mut last = None;
        for (write, stored) in group.writes.iter().zip(stored) {
            if let Some(done) = done.get_mut(*write) {
                // A write of several blocks is done if all of them are stored.
                *done = *stored && (last != Some(*write) || *done);
            }
            last = Some(*write);
        }
        group.len = 0;
        if let Some(since) = sampled {
            self.latencies.sampled(Class::Write, since);
        }
    }
}
