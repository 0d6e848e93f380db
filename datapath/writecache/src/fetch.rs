//! Reads spilled blocks from the overflow disk, for requests that missed RAM.

use std::io;
use std::sync::Arc;

use headwater_block::{BLOCK_BYTES, CompletionQueue, IoError, IoErrorKind};

use crate::cache::{Ticket, WriteCache};
use crate::counters::count;
use crate::map::split;
use crate::overflow::{EncryptedRun, MAX_READ_SLOTS};
use crate::segment::NOWHERE;
use crate::units::{Location, Slot};

/// The result for one block of a fetch.
#[derive(Debug)]
pub enum Fetched<'a> {
    /// The plain contents.
    Data(&'a [u8; BLOCK_BYTES as usize]),
    /// The block has moved: look it up again.
    Moved,
    /// It cannot be read.
    Failed(IoError),
}

/// The most blocks of one [`WriteCache::fetch`].
pub const MAX_FETCH_BLOCKS: usize = MAX_READ_SLOTS;

impl Ticket {
    /// Whether both tickets are of the same slot, in the same state: parts of neighbouring blocks, or of one
    /// block.
    pub fn is_same_slot(&self, other: &Ticket) -> bool {
        (self.id, self.slot) == (other.id, other.slot)
            && (self.position, self.generation) == (other.position, other.generation)
    }

    /// Whether `next` is the slot after the `count` slots that start with this one.
    pub fn is_followed_by(&self, next: &Ticket, count: usize) -> bool {
        self.id == next.id
            && self.position == next.position
            && self.generation == next.generation
            && usize::from(self.slot.0) + count == usize::from(next.slot.0)
            && count < MAX_FETCH_BLOCKS
    }
}

impl WriteCache {
    /// A queue of the calling thread's own for the blocks that it fetches from now on. `None` without a disk,
    /// or if the disk's engine has no such queues.
    pub fn completion_queue(&self) -> Option<Box<dyn CompletionQueue>> {
        self.overflow.as_ref()?.completion_queue()
    }

    /// Reads a run of tickets, each in the slot after the previous one, with one disk read. `each` is called
    /// for every ticket of the run, in order, on a disk thread or in the calling thread's
    /// [`CompletionQueue`].
    pub fn fetch(
        self: &Arc<Self>,
        run: Vec<Ticket>,
        mut each: impl FnMut(usize, Fetched<'_>) + Send + 'static,
    ) {
        let first = run.first().copied().filter(|first| first.position != NOWHERE);
        let (Some(overflow), Some(first)) = (&self.overflow, first) else {
            for (index, ticket) in run.iter().enumerate() {
                each(index, self.without_disk(ticket));
            }
            return;
        };
        if overflow.begins_to_keep_buffers() {
            self.host.signal();
        }
        let this = Arc::clone(self);
        let slots = run.len();
        overflow.read_slots(first.position, first.slot, slots, move |result| {
            count(&this.counters.read_disk_blocks, run.len() as u64);
            let mut plain = [0u8; BLOCK_BYTES as usize];
            for (index, ticket) in run.iter().enumerate() {
                each(index, this.opened(ticket, index, &result, &mut plain));
            }
        });
    }

    /// The result for a block without a position on disk: it has moved, or its packed form is damaged.
    fn without_disk(&self, ticket: &Ticket) -> Fetched<'static> {
        let (leaf, index) = split(ticket.block);
        let named = Location::at(ticket.id, ticket.slot);
        let leaf = self.map.read(leaf);
        let is_there = leaf.as_ref().is_some_and(|leaf| leaf.needs(index, named));
        let is_packed = || self.segments.get(ticket.id).is_some_and(|s| s.word().is_packed());
        // The leaf is locked, so the block does not move between the two checks.
        if !is_there || !is_packed() || self.unpack(ticket.id, ticket.slot, &mut [0; BLOCK_BYTES as usize]) {
            return Fetched::Moved;
        }
        count(&self.counters.corrupt_blocks, 1);
        let at = u64::from(ticket.block.0) * u64::from(BLOCK_BYTES);
        let what = format!(
            "the block at byte {at} of volume '{}' is damaged in memory, where it was packed: it cannot be unpacked; \
             check the memory of this host, and reset the machine",
            self.name
        );
        self.faults.error(&"memory", &what);
        Fetched::Failed(IoError::new(IoErrorKind::Corrupt, what))
    }

    /// Describes the place of a block in messages.
    pub(crate) fn place_of(&self, ticket: &Ticket) -> String {
        let Slot(slot) = ticket.slot;
        format!(
            "the block at byte {} of volume '{}' (position {} of the overflow disk, slot {slot})",
            u64::from(ticket.block.0) * u64::from(BLOCK_BYTES),
            self.name,
            ticket.position
        )
    }

    /// Advice to the user about a block that cannot be read.
    pub(crate) fn advice(&self) -> &'static str {
        match &self.persist {
            None => "check that disk, and reset the machine",
            Some(_) => {
                "check that disk, and copy from this volume what can still be read; writing the block again, or \
                        starting with an empty cache, ends the error"
            }
        }
    }

    fn opened<'a>(
        &self,
        ticket: &Ticket,
        index: usize,
        result: &io::Result<EncryptedRun<'_>>,
        plain: &'a mut [u8; BLOCK_BYTES as usize],
    ) -> Fetched<'a> {
        let Some(overflow) = &self.overflow else { return Fetched::Moved };
        let failed = match result {
            Ok(run) => {
                let encrypted = run.slot(index);
                if encrypted.is_some_and(|s| overflow.open_slot(ticket.generation, ticket.slot, s, plain)) {
                    return Fetched::Data(plain);
                }
                None
            }
            Err(error) => Some(error.to_string()),
        };
        // A slot that was freed while it was read may hold anything; that is not damage.
        if !self.is_current(ticket) {
            return Fetched::Moved;
        }
        let (place, advice) = (self.place_of(ticket), self.advice());
        Fetched::Failed(match failed {
            None => {
                count(&self.counters.corrupt_blocks, 1);
                let what = format!("{place} is damaged: its authentication tag does not match; {advice}");
                self.faults.error(&"disk", &what);
                IoError::new(IoErrorKind::Corrupt, what)
            }
            Some(error) => {
                count(&self.counters.disk_errors, 1);
                let what = format!("{place} cannot be read: {error}; {advice}");
                self.faults.error(&"disk", &what);
                IoError::new(IoErrorKind::Device, what)
            }
        })
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use headwater_testkit::{Rng, wait_until};

    use super::*;
    use crate::budget::DEFAULT_WEIGHT;
    use crate::cache::{
        Admission, CacheOptions, Found, LittleSpace, OverflowOptions, Residence, WriteResult,
    };
    use crate::host::Host;
    use crate::overflow::buffering::Buffering;
    use crate::units::BlockNumber;

    fn options() -> CacheOptions {
        CacheOptions {
            name: "test".into(),
            size_bytes: 1 << 30,
            ram_bytes: 32 << 20,
            weight: DEFAULT_WEIGHT,
            overflow: None,
            pause_limit: Duration::from_secs(1),
            persistent: None,
            base: None,
        }
    }

    #[test]
    fn a_packed_block_that_cannot_be_unpacked_is_an_error_and_no_endless_search() {
        let host = Host::start(u64::MAX).unwrap();
        let cache = WriteCache::open(&options(), &host.shared()).unwrap();
        let mut block = 0;
        while cache.snapshot().packed_segments == 0 {
            match cache.write(BlockNumber(block), &[block as u8 | 1; BLOCK_BYTES as usize], Admission::New) {
                WriteResult::Done => block += 1,
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        // A segment is counted before its packed form replaces it.
        let mut at = None;
        wait_until("a block is packed", || {
            at = (0..block).map(BlockNumber).find(|b| cache.residence(*b) == Residence::Packed);
            at.is_some()
        });
        let at = at.unwrap();
        let mut read = [0; BLOCK_BYTES as usize];
        assert!(matches!(cache.read(at, 0, &mut read), Found::Done(Residence::Packed)));
        cache.packed.damage();
        let Found::Spilled(ticket) = cache.read(at, 0, &mut read) else { panic!("it is damaged") };
        let (tell, told) = mpsc::channel();
        cache.fetch(vec![ticket], move |_, fetched| {
            tell.send(match fetched {
                Fetched::Failed(error) => Some(error),
                Fetched::Data(_) | Fetched::Moved => None,
            })
            .unwrap();
        });
        let error = told.recv().unwrap().expect("the error was sent");
        assert_eq!(error.kind(), IoErrorKind::Corrupt);
        assert!(error.to_string().contains("volume 'test'"), "{error}");
    }

    #[test]
    fn read_buffers_are_given_back_once_nobody_reads() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::start(u64::MAX).unwrap();
        let options = CacheOptions {
            overflow: Some(OverflowOptions {
                at: dir.path().to_owned(),
                limit_bytes: 64 << 20,
                buffering: Buffering::Buffered,
                little_space: LittleSpace::Refused,
            }),
            ..options()
        };
        let cache = WriteCache::open(&options, &host.shared()).unwrap();
        let overflow = cache.overflow.as_ref().unwrap();
        let mut rng = Rng::new(1);
        let mut block = 0;
        while cache.snapshot().spilled_segments == 0 {
            match cache.write(BlockNumber(block), &rng.bytes(BLOCK_BYTES as usize), Admission::New) {
                WriteResult::Done => block += 1,
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        // A segment is counted before its copy in RAM is dropped.
        let mut at = None;
        wait_until("a block is on disk alone", || {
            while cache.evict_one() {}
            at = (0..block).map(BlockNumber).find(|b| cache.residence(*b) == Residence::Disk);
            at.is_some()
        });
        let at = at.unwrap();
        let Found::Spilled(ticket) = cache.read(at, 0, &mut [0; BLOCK_BYTES as usize]) else {
            panic!("it is on disk")
        };
        let (tell, told) = mpsc::channel();
        cache.fetch(vec![ticket], move |_, fetched| tell.send(matches!(fetched, Fetched::Data(_))).unwrap());
        assert!(told.recv().unwrap());
        wait_until("the host's thread gives them back", || !overflow.has_spare_buffers());
        assert!(overflow.begins_to_keep_buffers(), "the next read has some again");
    }
}
