//! The journal (jbd2): which of its blocks are committed and not yet in their places.
//!
//! ```text
//!   | superblock | .. | descriptor: tags | block | block | revoked blocks | commit | descriptor ..
//!                       ^ start, sequence                                   sequence + 1 ..
//! ```
//! A transaction counts if its commit block is there and all of its checksums fit. The first one that does not count is the
//! end. A block that a later transaction revokes is not replayed. Nothing is written: the blocks lie over the disk in memory.
//!
//! Not read are fast commits (a list of small changes at the end of the journal) and a journal on another device. If there
//! are any, a remark says so.

use std::collections::HashMap;

use crate::crc::crc32c;
use crate::fields::{be16_at, be32_at, has, u16_at, u32_at};
use crate::units::{usize_of, usize_of_u32};
use crate::{Fault, fault};

/// The most blocks of a journal: 8 GiB of 4 KiB.
const JOURNAL_BLOCKS_MAX: u64 = 2 << 20;
/// The most blocks that one transaction revokes. A block of the list has a thousand of them, and a transaction is shorter than a
/// quarter of its journal.
const REVOKED_MAX: usize = 4 << 20;
const MAGIC: [u8; 4] = [0xc0, 0x3b, 0x39, 0x98];
const HEADER_BYTES: usize = 12;
const DESCRIPTOR: u32 = 1;
const COMMIT: u32 = 2;
const SUPERBLOCK_1: u32 = 3;
const SUPERBLOCK_2: u32 = 4;
const REVOKED: u32 = 5;

const WIDE: u32 = 0x2;
const ASYNCHRONOUS: u32 = 0x4;
const SUMS_2: u32 = 0x8;
const SUMS_3: u32 = 0x10;
const FAST_COMMIT: u32 = 0x20;
const KNOWN: u32 = 0x1 | WIDE | ASYNCHRONOUS | SUMS_2 | SUMS_3 | FAST_COMMIT;

const ESCAPED: u32 = 1;
const SAME_UUID: u32 = 2;
const LAST_TAG: u32 = 8;
/// The tag of a block of fast commits that begins a list of them.
const FAST_COMMIT_HEAD: u16 = 9;
/// How many blocks of fast commits there are if the superblock does not say.
const FAST_COMMIT_BLOCKS: u32 = 256;

/// A block of the journal that lies over a block of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Replayed {
    /// Where it is, in bytes.
    pub(super) at: u64,
    /// Its first bytes were the magic number of a journal, which is zero in the journal.
    is_escaped: bool,
}

impl Replayed {
    /// Puts the first bytes of the block into a piece of it that begins at `skip`.
    pub(super) fn restore(&self, skip: u64, piece: &mut [u8]) {
        if self.is_escaped {
            let magic = MAGIC.get(usize_of(skip)..).unwrap_or_default();
            piece.iter_mut().zip(magic).for_each(|(to, from)| *to = *from);
        }
    }
}

/// What reading a journal needs of the rest.
pub(super) trait JournalBlocks {
    /// Where a block of the journal is, in bytes.
    fn place(&mut self, block: u64) -> Result<u64, Fault>;

    /// A block of the journal.
    fn read(&mut self, block: u64) -> Result<Vec<u8>, Fault>;
}

/// What a journal has.
#[derive(Debug, Default)]
pub(super) struct Committed {
    pub(super) blocks: HashMap<u64, Replayed>,
    /// What was not read of it.
    pub(super) remark: Option<String>,
}

struct Journal<'a> {
    from: &'a mut dyn JournalBlocks,
    incompat: u32,
    block_bytes: usize,
    first: u64,
    end: u64,
    seed: u32,
}

/// A tag: where a block belongs.
struct Tag {
    block: u64,
    flags: u32,
    sum: u32,
}

/// Reads the committed blocks of a journal.
pub(super) fn committed(from: &mut dyn JournalBlocks, block_bytes: u64) -> Result<Committed, Fault> {
    let superblock = from.read(0)?;
    let kind = be32_at(&superblock, 4);
    if !superblock.starts_with(&MAGIC) || !matches!(kind, SUPERBLOCK_1 | SUPERBLOCK_2) {
        return Err(fault("its journal has no superblock"));
    }
    let feature = |at: usize| if kind == SUPERBLOCK_2 { be32_at(&superblock, at) } else { 0 };
    let (incompat, blocks) = (feature(0x28), be32_at(&superblock, 0x10));
    if u64::from(be32_at(&superblock, 0x0c)) != block_bytes {
        return Err(fault("the block size of its journal is not that of the file system"));
    }
    if incompat & !KNOWN != 0 {
        let unknown = incompat & !KNOWN;
        return Err(fault(format!("its journal has features that headwater cannot read: {unknown:#x}")));
    }
    let fast_blocks = match (incompat & FAST_COMMIT, feature(0x54)) {
        (0, _) => 0,
        (_, 0) => FAST_COMMIT_BLOCKS,
        (_, blocks) => blocks,
    };
    let (start, sequence) = (be32_at(&superblock, 0x1c), be32_at(&superblock, 0x18));
    let mut journal = Journal {
        from,
        incompat,
        block_bytes: usize_of(block_bytes),
        first: be32_at(&superblock, 0x14).into(),
        end: blocks.saturating_sub(fast_blocks).into(),
        seed: crc32c(u32::MAX, superblock.get(0x30..0x40).unwrap_or_default()),
    };
    if journal.first == 0 || journal.end <= journal.first || u64::from(blocks) > JOURNAL_BLOCKS_MAX {
        let first = journal.first;
        return Err(fault(format!(
            "its journal has {blocks} blocks, and a log that begins at block {first}"
        )));
    }
    let mut found = Committed::default();
    let mut sequence = sequence;
    if start != 0 {
        if incompat & ASYNCHRONOUS != 0 && !journal.has_sums() {
            found.remark = Some(
                "its journal was not read, because it commits in any order and has no checksums".to_owned(),
            );
            return Ok(found);
        }
        sequence = journal.transactions(start.into(), sequence, &mut found)?;
    }
    if fast_blocks > 0 && journal.has_fast_commits(sequence)? {
        found.remark = Some(
            "its journal has fast commits that were not read: the last changes before it was switched off are missing"
                .to_owned(),
        );
    }
    Ok(found)
}

impl Journal<'_> {
    fn has_sums(&self) -> bool {
        self.incompat & (SUMS_2 | SUMS_3) != 0
    }

    fn next(&self, block: u64) -> u64 {
        if block + 1 >= self.end { self.first } else { block + 1 }
    }

    /// Adds the blocks of all transactions that count. Returns the sequence number of the first one that does not.
    fn transactions(&mut self, start: u64, first: u32, found: &mut Committed) -> Result<u32, Fault> {
        if !(self.first..self.end).contains(&start) {
            return Err(fault(format!("its journal starts at block {start}, outside of its log")));
        }
        let (mut at, mut sequence, mut left) = (start, first, self.end - self.first);
        while let Some((next, used)) = self.transaction(at, sequence, left, found)? {
            left -= used;
            at = next;
            sequence = sequence.wrapping_add(1);
        }
        Ok(sequence)
    }

    /// Adds the blocks of a transaction. Returns where the next one begins, and how many blocks this one has. `None`: it does
    /// not count.
    fn transaction(
        &mut self,
        start: u64,
        sequence: u32,
        left: u64,
        found: &mut Committed,
    ) -> Result<Option<(u64, u64)>, Fault> {
        let (mut at, mut used) = (start, 0u64);
        let (mut blocks, mut revoked) = (Vec::new(), Vec::new());
        loop {
            if used >= left {
                return Ok(None);
            }
            let block = self.from.read(at)?;
            if !block.starts_with(&MAGIC) || be32_at(&block, 8) != sequence {
                return Ok(None);
            }
            (at, used) = (self.next(at), used + 1);
            match be32_at(&block, 4) {
                DESCRIPTOR if self.tail_fits(&block) => {
                    for tag in self.tags(&block) {
                        if used >= left || !self.data_fits(&tag, at, sequence)? {
                            return Ok(None);
                        }
                        let place = self.from.place(at)?;
                        blocks
                            .push((tag.block, Replayed { at: place, is_escaped: tag.flags & ESCAPED != 0 }));
                        (at, used) = (self.next(at), used + 1);
                    }
                }
                REVOKED if self.tail_fits(&block) => {
                    revoked.extend(self.revoked(&block));
                    if revoked.len() > REVOKED_MAX {
                        let why =
                            format!("a transaction of its journal revokes more than {REVOKED_MAX} blocks");
                        return Err(fault(why));
                    }
                }
                COMMIT if self.commit_fits(&block) => break,
                _ => return Ok(None),
            }
        }
        found.blocks.extend(blocks);
        for block in revoked {
            found.blocks.remove(&block);
        }
        Ok(Some((at, used)))
    }

    fn tags(&self, descriptor: &[u8]) -> Vec<Tag> {
        let sums_3 = self.incompat & SUMS_3 != 0;
        let is_wide = self.incompat & WIDE != 0;
        let tag_bytes = match () {
            () if sums_3 => 16,
            () => 8 + if is_wide { 4 } else { 0 } + if self.incompat & SUMS_2 != 0 { 2 } else { 0 },
        };
        let end = self.block_bytes - if self.has_sums() { 4 } else { 0 };
        let mut rest = descriptor.get(HEADER_BYTES..end).unwrap_or_default();
        let mut tags = Vec::new();
        while let Some(tag) = rest.get(..tag_bytes) {
            let (flags, sum) = match sums_3 {
                true => (be32_at(tag, 4), be32_at(tag, 12)),
                false => (be16_at(tag, 6).into(), be16_at(tag, 4).into()),
            };
            let high = if is_wide { u64::from(be32_at(tag, 8)) << 32 } else { 0 };
            tags.push(Tag { block: high | u64::from(be32_at(tag, 0)), flags, sum });
            let uuid_bytes = if flags & SAME_UUID == 0 { 16 } else { 0 };
            rest = rest.get(tag_bytes + uuid_bytes..).unwrap_or_default();
            if flags & LAST_TAG != 0 {
                break;
            }
        }
        tags
    }

    fn revoked(&self, block: &[u8]) -> Vec<u64> {
        let end = usize_of_u32(be32_at(block, 12)).min(self.block_bytes);
        let records = block.get(16..end).unwrap_or_default();
        let wide = |record: &[u8]| u64::from(be32_at(record, 0)) << 32 | u64::from(be32_at(record, 4));
        match self.incompat & WIDE {
            0 => records.chunks_exact(4).map(|record| be32_at(record, 0).into()).collect(),
            _ => records.chunks_exact(8).map(wide).collect(),
        }
    }

    /// The checksum of a block with these four bytes zero.
    fn sum_without(&self, block: &[u8], at: usize) -> u32 {
        let (before, after) = block.split_at_checked(at).unwrap_or_default();
        let sum = crc32c(crc32c(self.seed, before), &[0; 4]);
        crc32c(sum, after.get(4..).unwrap_or_default())
    }

    fn tail_fits(&self, block: &[u8]) -> bool {
        let at = self.block_bytes - 4;
        !self.has_sums() || be32_at(block, at) == self.sum_without(block, at)
    }

    fn commit_fits(&self, block: &[u8]) -> bool {
        !self.has_sums() || be32_at(block, 0x10) == self.sum_without(block, 0x10)
    }

    fn data_fits(&mut self, tag: &Tag, at: u64, sequence: u32) -> Result<bool, Fault> {
        if !self.has_sums() {
            return Ok(true);
        }
        let block = self.from.read(at)?;
        let sum = crc32c(crc32c(self.seed, &sequence.to_be_bytes()), &block);
        let mask = if self.incompat & SUMS_3 != 0 { u32::MAX } else { 0xffff };
        Ok(sum & mask == tag.sum)
    }

    /// Whether there are fast commits after the last transaction that counts.
    fn has_fast_commits(&mut self, sequence: u32) -> Result<bool, Fault> {
        let block = self.from.read(self.end)?;
        let is_head = u16_at(&block, 0) == FAST_COMMIT_HEAD && u16_at(&block, 2) == 8;
        Ok(is_head && has(&block, 8, &sequence.to_le_bytes()) && u32_at(&block, 4) == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct InMemory(Vec<Vec<u8>>);

    impl JournalBlocks for InMemory {
        fn place(&mut self, block: u64) -> Result<u64, Fault> {
            Ok(block * 1024)
        }

        fn read(&mut self, block: u64) -> Result<Vec<u8>, Fault> {
            self.0.get(usize_of(block)).cloned().ok_or_else(|| fault("outside"))
        }
    }

    fn header(kind: u32, sequence: u32, rest: &[u8]) -> Vec<u8> {
        let mut block = [&MAGIC[..], &kind.to_be_bytes(), &sequence.to_be_bytes(), rest].concat();
        block.resize(1024, 0);
        block
    }

    /// A journal of 16 blocks without checksums that starts here, with these blocks from its second one on.
    fn journal(start: u32, blocks: &[Vec<u8>]) -> InMemory {
        let words = [1024u32, 16, 1, 7, start, 0, 0, 0];
        let fields: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        let mut all = vec![header(SUPERBLOCK_2, 0, &fields)];
        all.extend_from_slice(blocks);
        all.resize(16, vec![0; 1024]);
        InMemory(all)
    }

    fn tag(block: u32, flags: u16) -> Vec<u8> {
        let head = [&block.to_be_bytes()[..], &[0; 2], &flags.to_be_bytes()].concat();
        if flags & 2 == 0 { [head, vec![0; 16]].concat() } else { head }
    }

    #[test]
    fn only_transactions_with_a_commit_block_count() {
        let two = [tag(100, 0), tag(101, 2 | 8)].concat();
        let blocks = [
            header(DESCRIPTOR, 7, &two),
            vec![1; 1024],
            vec![2; 1024],
            header(COMMIT, 7, &[]),
            header(DESCRIPTOR, 8, &tag(102, 8)),
            vec![3; 1024],
            header(COMMIT, 8, &[]),
        ];
        let places = |blocks: &[Vec<u8>]| {
            let found = committed(&mut journal(1, blocks), 1024).unwrap().blocks;
            let mut places: Vec<_> = found.into_iter().map(|(block, over)| (block, over.at / 1024)).collect();
            places.sort_unstable();
            places
        };
        assert_eq!(places(&blocks), [(100, 2), (101, 3), (102, 6)]);
        assert_eq!(places(&blocks[..6]), [(100, 2), (101, 3)]);
        assert_eq!(places(&blocks[..3]), []);
        let mut of_another_time = blocks.clone();
        of_another_time[6] = header(COMMIT, 9, &[]);
        assert_eq!(places(&of_another_time), [(100, 2), (101, 3)]);
        assert!(committed(&mut journal(0, &blocks), 1024).unwrap().blocks.is_empty());
    }

    #[test]
    fn a_revoked_block_is_replayed_only_if_it_was_written_again() {
        let revoked = [&24u32.to_be_bytes()[..], &100u32.to_be_bytes(), &101u32.to_be_bytes()].concat();
        let blocks = [
            header(DESCRIPTOR, 7, &[tag(100, 0), tag(101, 2 | 8)].concat()),
            vec![1; 1024],
            vec![2; 1024],
            header(COMMIT, 7, &[]),
            header(REVOKED, 8, &revoked),
            header(COMMIT, 8, &[]),
            header(DESCRIPTOR, 9, &tag(101, 8 | 1)),
            vec![0; 1024],
            header(COMMIT, 9, &[]),
        ];
        let found = committed(&mut journal(1, &blocks), 1024).unwrap().blocks;
        assert_eq!(found, HashMap::from([(101, Replayed { at: 8 * 1024, is_escaped: true })]));
        let mut piece = [7; 6];
        found[&101].restore(1, &mut piece);
        assert_eq!(piece, [0x3b, 0x39, 0x98, 7, 7, 7]);
    }

    #[test]
    fn a_journal_goes_on_at_its_beginning_and_ends_where_it_started() {
        let mut journal = journal(14, &[]);
        journal.0[14] = header(DESCRIPTOR, 7, &tag(100, 8));
        journal.0[15] = vec![1; 1024];
        journal.0[1] = header(COMMIT, 7, &[]);
        let found = committed(&mut journal, 1024).unwrap().blocks;
        assert_eq!(found.len(), 1);
        // One that fills the journal with descriptors has no end.
        for block in 1..16 {
            journal.0[block] = header(DESCRIPTOR, 7, &[]);
        }
        assert!(committed(&mut journal, 1024).unwrap().blocks.is_empty());
    }
}
