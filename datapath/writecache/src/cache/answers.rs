//! Types of the parameters and results of [`WriteCache`](super::WriteCache):
//!
//! | function | takes | returns |
//! |---|---|---|
//! | `read` | | [`Found`], with a [`Residence`] or a [`Ticket`] |
//! | `count_reads` | [`ReadTally`] | |
//! | `write`, `write_unless` | [`Admission`]; the closure gets [`Now`] | [`WriteResult`], perhaps with [`Old`] |
//! | `clear` | [`UnloggedBlocks`] | [`Cleared`] |

use crate::units::{BlockNumber, Location, SegmentId, Slot};

/// The place of a write in the order of admission when space is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// A new request: it queues behind writes that wait for space or for the disk.
    New,
    /// The rest of a request that is partly stored: it queues behind writes that wait for space.
    Rest,
    /// A write that has waited already.
    Waited,
}

/// The result of [`WriteCache::read`](super::WriteCache::read).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The bytes were copied, or zeroes filled in; the block's residence.
    Done(Residence),
    /// The block was not changed: read the image.
    Absent,
    /// The block is on the overflow disk.
    Spilled(Ticket),
    /// The sectors of the block are in several places: use
    /// [`WriteCache::read_parts`](super::WriteCache::read_parts).
    Partial,
}

/// The place of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residence {
    /// In RAM.
    Ram,
    /// In RAM, packed.
    Packed,
    /// Not stored: the block is all zero.
    Zero,
    /// On the overflow disk only.
    Disk,
    /// Not in the cache: it is as in the image.
    Absent,
}

/// The number of blocks that a read found in RAM, packed or zero. Blocks from the disk or the image are not
/// counted. A request counts them when it is clear that it need
/// not be repeated: [`WriteCache::count_reads`](super::WriteCache::count_reads).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadTally {
    pub(crate) ram: u64,
    pub(crate) packed: u64,
    pub(crate) zero: u64,
}

impl ReadTally {
    /// The slowest of the three places from which a block came.
    #[inline]
    pub fn slowest(&self) -> Residence {
        match self {
            Self { packed: 1.., .. } => Residence::Packed,
            Self { ram: 1.., .. } => Residence::Ram,
            _ => Residence::Zero,
        }
    }

    /// Counts a block if it is in RAM, packed or zero.
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

/// The position of a block on the overflow disk when it was looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    pub(crate) block: BlockNumber,
    pub(crate) id: SegmentId,
    pub(crate) slot: Slot,
    pub(crate) position: u32,
    pub(crate) generation: u64,
}

/// The result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteResult {
    /// Stored.
    Done,
    /// There is no free slot: make space ([`WriteCache::make_room`](super::WriteCache::make_room)), or wait
    /// for it.
    NoRoom,
    /// Other writes wait for space: queue behind them
    /// ([`WriteCache::queue_for_space`](super::WriteCache::queue_for_space)).
    Queued,
    /// Writers are faster than the disk: wait until it has caught up
    /// ([`WriteCache::queue_for_disk`](super::WriteCache::queue_for_disk)).
    Throttled,
    /// The write covers a part of a block. Fetch this further part, then call
    /// [`WriteCache::merge`](super::WriteCache::merge) with all fetched parts.
    NeedOld(Old),
    /// A persistent cache is closed or being closed.
    Closed,
}

/// What [`WriteCache::clear`](super::WriteCache::clear) does with a block that has no slot, if a persistent
/// cache cannot log the change before its next commit ([`WriteCache::takes_notes`]).
///
/// [`WriteCache::takes_notes`]: crate::WriteCache::takes_notes
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnloggedBlocks {
    /// They stay unchanged, as is allowed after a discard.
    Stay,
    /// They are cleared later, as is required for a zero write.
    Wait,
}

/// The result of making blocks absent or zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cleared {
    /// All of them.
    All,
    /// The blocks before this one. The others wait for a commit.
    UpTo(BlockNumber),
    /// A persistent cache is closed or being closed.
    Closed,
}

/// The state of a block before a write to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Now {
    /// It would be overwritten in place.
    InPlace,
    /// It would take a new slot.
    Elsewhere,
}

/// The kind of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Not in the cache: the image has it.
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

/// The place of a part of a block that is needed before another part is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Old {
    /// In the image.
    Absent,
    /// On the overflow disk.
    Spilled(Ticket),
}
