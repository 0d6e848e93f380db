//! Converts a disk's requests to blocks of 4 KiB, as the write cache handles them, for the model that sizes write caches. Blocks
//! are numbered without gaps.
//!
//! Only blocks that a write request writes at least once have a number; write-zeroes does not count. A write of N bytes counts as
//! N / 4 KiB blocks, rounded up. The first of them is the block of its first byte. So an unaligned write of 4 KiB counts as one
//! block, as the cache uses a single slot for it.

use headwater_block::BLOCK_BYTES;
use headwater_recorder::Content;

use super::{Kind, Volume};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Blocks of one table of the cache's map.
const TABLE_BLOCKS: u64 = 512;

/// The compressed size, in sixteenths, of a block with unknown data: it counts as incompressible.
const DOES_NOT_PACK: u8 = 16;

/// An operation on blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The blocks are read.
    Read,
    /// The blocks are written. The number is their compressed size in sixteenths.
    Write(u8),
    /// The blocks become zero.
    Zero,
    /// The blocks are removed from the cache: reads return the data of the image. A discard counts as this, as over an
    /// empty image.
    Forget,
}

/// The numbered blocks of one request; their numbers are consecutive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Microseconds since the trace began.
    pub time_us: u64,
    /// The number of its first block.
    pub first: u32,
    /// The number of blocks; 0 if no block of the request is ever written.
    pub count: u32,
    /// Blocks of the request that are never written. A read takes them from the image; other operations skip them.
    pub others: u32,
    /// The operation.
    pub action: Action,
}

/// The requests of one disk.
#[derive(Clone, Debug, Default)]
pub struct Blocks {
    /// The number of distinct written blocks.
    pub count: u32,
    /// The operations, in order.
    pub steps: Vec<Step>,
    /// For each block, the number of its table in the cache's map. Tables are numbered without gaps.
    pub tables: Vec<u32>,
    /// The highest offset at which a write ended; of merged disks, the sum.
    pub end_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
}

/// The range of blocks on the disk of a request: the first, and the one after the last.
fn span(kind: Kind, offset: u64, bytes: u64) -> (u64, u64) {
    match kind {
        Kind::Write => (offset / BLOCK, offset / BLOCK + bytes.div_ceil(BLOCK)),
        Kind::Read => (offset / BLOCK, (offset + bytes).div_ceil(BLOCK)),
        // Blocks that are covered only in part keep their data.
        Kind::WriteZeroes | Kind::Discard => {
            let first = offset.div_ceil(BLOCK);
            (first, ((offset + bytes) / BLOCK).max(first))
        }
    }
}

/// The written ranges of the disk, in order, each with the number of its first block.
struct Numbers(Vec<(u64, u64, u64)>);

impl Numbers {
    fn new(volume: &Volume) -> Self {
        let writes = volume.requests.iter().filter(|request| request.kind == Kind::Write);
        let mut spans: Vec<(u64, u64)> =
            writes.map(|request| span(request.kind, request.offset, request.bytes)).collect();
        spans.sort_unstable();
        let mut ranges: Vec<(u64, u64, u64)> = Vec::new();
        for (first, end) in spans.into_iter().filter(|(first, end)| end > first) {
            match ranges.last_mut() {
                Some((_, last_end, _)) if first <= *last_end => *last_end = (*last_end).max(end),
                _ => ranges.push((first, end, 0)),
            }
        }
        let mut number = 0;
        for (first, end, begins_at) in &mut ranges {
            *begins_at = number;
            number += *end - *first;
        }
        Self(ranges)
    }

    fn count(&self) -> u64 {
        self.0.last().map_or(0, |(first, end, number)| number + end - first)
    }

    /// The number of the first numbered block at or after this one.
    fn at(&self, block: u64) -> u64 {
        let index = self.0.partition_point(|(_, end, _)| *end <= block);
        match self.0.get(index) {
            Some((first, _, number)) => number + block.saturating_sub(*first),
            None => self.count(),
        }
    }
}

impl Blocks {
    /// Numbers the blocks of a disk.
    pub fn of(volume: &Volume) -> Self {
        let numbers = Numbers::new(volume);
        let mut blocks =
            Self { count: u32::try_from(numbers.count()).unwrap_or(u32::MAX), ..Self::default() };
        for request in &volume.requests {
            let (first, end) = span(request.kind, request.offset, request.bytes);
            let (number, past) = (numbers.at(first), numbers.at(end));
            let action = match (request.kind, request.content) {
                (Kind::Read, _) => Action::Read,
                (Kind::Write, Content::Zero) | (Kind::WriteZeroes, _) => Action::Zero,
                (Kind::Write, Content::Equal) | (Kind::Discard, _) => Action::Forget,
                (Kind::Write, Content::Packs(parts)) => Action::Write(parts),
                (Kind::Write, Content::Unknown) => Action::Write(DOES_NOT_PACK),
            };
            if request.kind == Kind::Write {
                blocks.written_bytes += request.bytes;
                blocks.end_bytes = blocks.end_bytes.max(request.offset + request.bytes);
            }
            // Fits, because a disk has fewer than 2^32 blocks.
            blocks.steps.push(Step {
                time_us: request.time_us,
                first: number as u32,
                count: (past - number) as u32,
                others: ((end - first) - (past - number)) as u32,
                action,
            });
        }
        blocks.tables.reserve(blocks.count as usize);
        let (mut table, mut last) = (0, None);
        for (first, end, _) in &numbers.0 {
            for block in *first..*end {
                let of_block = block / TABLE_BLOCKS;
                table += u32::from(last.is_some_and(|last| last != of_block));
                last = Some(of_block);
                blocks.tables.push(table);
            }
        }
        blocks
    }

    /// Merges several disks into one, by time. The block numbers of each disk follow those of the previous one.
    pub fn together(disks: &[Self]) -> Self {
        let mut all = Self::default();
        for disk in disks {
            let (blocks, tables) = (all.count, all.tables.last().map_or(0, |last| last + 1));
            all.steps.extend(disk.steps.iter().map(|step| Step { first: step.first + blocks, ..*step }));
            all.tables.extend(disk.tables.iter().map(|table| table + tables));
            all.count += disk.count;
            all.end_bytes += disk.end_bytes;
            all.written_bytes += disk.written_bytes;
        }
        all.steps.sort_by_key(|step| step.time_us);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::super::Request;
    use super::*;

    fn blocks(requests: &[(Kind, u64, u64, Content)]) -> Blocks {
        let requests = requests.iter().zip(0..).map(|((kind, offset, bytes, content), time_us)| Request {
            time_us,
            offset: *offset,
            bytes: *bytes,
            kind: *kind,
            content: *content,
        });
        Blocks::of(&Volume { name: "v".into(), requests: requests.collect() })
    }

    #[test]
    fn blocks_are_numbered_without_gaps_in_the_order_of_the_disk() {
        let far = 1 << 30;
        let found = blocks(&[
            (Kind::Write, far, 8192, Content::Unknown),
            (Kind::Write, 4096, 4096, Content::Packs(3)),
            // Begins within block 1, and uses one slot.
            (Kind::Write, 4608, 4096, Content::Zero),
            (Kind::Read, 0, far + 4096, Content::Unknown),
            // Blocks that are covered only in part keep their data.
            (Kind::Discard, 4096 + 512, far, Content::Unknown),
            (Kind::Write, far + 4096, 512, Content::Equal),
        ]);
        let whole = (far / 4096) as u32 + 1;
        let step = |time_us, first, count, others, action| Step { time_us, first, count, others, action };
        let expected = [
            step(0, 1, 2, 0, Action::Write(16)),
            step(1, 0, 1, 0, Action::Write(3)),
            step(2, 0, 1, 0, Action::Zero),
            step(3, 0, 2, whole - 2, Action::Read),
            step(4, 1, 1, far as u32 / 4096 - 2, Action::Forget),
            step(5, 2, 1, 0, Action::Forget),
        ];
        assert_eq!(found.steps, expected);
        assert_eq!((found.count, found.tables, found.end_bytes), (3, vec![0, 1, 1], far + 8192));
    }

    #[test]
    fn merged_disks_share_no_block_and_are_sorted_by_time() {
        let one =
            blocks(&[(Kind::Write, 0, 8192, Content::Unknown), (Kind::Write, 0, 4096, Content::Unknown)]);
        let all = Blocks::together(&[one.clone(), one]);
        let firsts: Vec<u32> = all.steps.iter().map(|step| step.first).collect();
        assert_eq!((all.count, firsts, all.tables), (4, vec![0, 2, 0, 2], vec![0, 0, 1, 1]));
    }
}
