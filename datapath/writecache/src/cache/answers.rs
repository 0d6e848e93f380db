//! What the hit path asks and answers: where a block is, what a write did.

use crate::units::{BlockNumber, Location, SegmentId, Slot};

/// Which write goes first when space is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// A new request: it queues behind those that wait for space, or for the disk.
    New,
    /// The rest of a request of which a part is stored: it queues behind those that wait for space.
    Rest,
    /// One of those that waited.
    Waited,
}

/// What [`WriteCache::read`](super::WriteCache::read) found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The bytes were copied (or zeroes filled in), from there.
    Done(Residence),
    /// The block was not changed: read the image.
    Absent,
    /// The block is on the overflow disk.
    Spilled(Ticket),
    /// The sectors of the block are in several places: [`WriteCache::read_parts`](super::WriteCache::read_parts).
    Partial,
}

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residence {
    /// In RAM.
    Ram,
    /// In RAM, packed.
    Packed,
    /// Nowhere: it is all zero.
    Zero,
    /// On the overflow disk only.
    Disk,
    /// Not in the cache: it is as in the image.
    Absent,
}

/// The blocks that a read found in the cache, by where. A request counts them once it is clear that it need not be tried
/// again: [`WriteCache::count_reads`](super::WriteCache::count_reads).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadTally {
    pub(crate) ram: u64,
    pub(crate) packed: u64,
    pub(crate) zero: u64,
}

impl ReadTally {
    /// The slowest place that a block came from.
    #[inline]
    pub fn slowest(&self) -> Residence {
        match self {
            Self { packed: 1.., .. } => Residence::Packed,
            Self { ram: 1.., .. } => Residence::Ram,
            _ => Residence::Zero,
        }
    }

    /// One more block.
    #[inline]
    pub fn add(&mut self, from: Residence) {
        match from {
            Residence::Ram => self.ram += 1,
            Residence::Packed => self.packed += 1,
            Residence::Zero => self.zero += 1,
            Residence::Disk | Residence::Absent => {}
        }
    }
}

/// Where on the overflow disk a block was when it was looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    pub(crate) block: BlockNumber,
    pub(crate) id: SegmentId,
    pub(crate) slot: Slot,
    pub(crate) position: u32,
    pub(crate) generation: u64,
}

/// What a write did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteResult {
    /// Stored.
    Done,
    /// There is no slot now: make room ([`WriteCache::make_room`](super::WriteCache::make_room)), or wait for it.
    NoRoom,
    /// Others wait for room: wait behind them ([`WriteCache::queue_for_space`](super::WriteCache::queue_for_space)).
    Behind,
    /// Writers are ahead of the disk: wait until it has caught up ([`WriteCache::queue_for_disk`](super::WriteCache::queue_for_disk)).
    Ahead,
    /// Part of a block of which this has to be fetched first, besides what was fetched already.
    NeedOld(Old),
    /// Nothing: a persistent cache is being closed, or is.
    Closed,
}

/// What becomes of blocks without a slot while a persistent cache notes no more of them ([`WriteCache::takes_notes`]).
///
/// [`WriteCache::takes_notes`]: crate::WriteCache::takes_notes
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnloggedBlocks {
    /// They stay as they are, as after a discard they may.
    Stay,
    /// They are cleared later: a zero write.
    Wait,
}

/// How far blocks were made absent or zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cleared {
    /// All of them.
    All,
    /// Those before this one. The others wait for a commit.
    UpTo(BlockNumber),
    /// Nothing more: a persistent cache is being closed, or is.
    Closed,
}

/// What is known of a block before a write to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Now {
    /// It would be overwritten where it is.
    InPlace,
    /// It would take a new slot.
    Elsewhere,
}

/// What the cache holds of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Nothing: the image has it.
    Absent,
    /// It reads as zeroes.
    Zero,
    /// Data.
    Data,
}

impl Kind {
    pub(super) fn of(location: Location) -> Self {
        match location {
            Location::ABSENT => Kind::Absent,
            Location::ZERO => Kind::Zero,
            _ => Kind::Data,
        }
    }
}

/// Where a part of a block is that is needed before another part is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Old {
    /// In the image.
    Absent,
    /// On the overflow disk.
    Spilled(Ticket),
}
