//! Reading spilled blocks back, for requests that missed RAM.

use std::io;
use std::sync::Arc;

use headwater_block::{BLOCK_BYTES, CompletionQueue, IoError, IoErrorKind};

use crate::cache::{Ticket, WriteCache};
use crate::counters::count;
use crate::overflow::{MAX_READ_SLOTS, SealedRun};
use crate::units::Slot;

/// What became of one block of a fetch.
#[derive(Debug)]
pub enum Fetched<'a> {
    /// The plain contents.
    Data(&'a [u8; BLOCK_BYTES as usize]),
    /// The block is somewhere else by now: look it up again.
    Moved,
    /// It cannot be read.
    Failed(IoError),
}

/// Longest run for one [`WriteCache::fetch`].
pub const MAX_FETCH_BLOCKS: usize = MAX_READ_SLOTS;

impl Ticket {
    /// Whether `next` is the slot right behind the `count` slots that begin with this one.
    pub fn is_followed_by(&self, next: &Ticket, count: usize) -> bool {
        self.id == next.id
            && self.position == next.position
            && self.generation == next.generation
            && usize::from(self.slot.0) + count == usize::from(next.slot.0)
            && count < MAX_FETCH_BLOCKS
    }
}

impl WriteCache {
    /// A queue of the calling thread's own, for what it fetches from now on; `None` without a disk, or where its engine
    /// has none.
    pub fn completion_queue(&self) -> Option<Box<dyn CompletionQueue>> {
        self.overflow.as_ref()?.completion_queue()
    }

    /// Reads a run of tickets, each in the slot behind the one before, with one disk read. `each` is called
    /// for every ticket of the run, in order, on a disk thread or in the calling thread's [`CompletionQueue`].
    pub fn fetch(
        self: &Arc<Self>,
        run: Vec<Ticket>,
        mut each: impl FnMut(usize, Fetched<'_>) + Send + 'static,
    ) {
        let (Some(overflow), Some(first)) = (&self.overflow, run.first().copied()) else {
            for index in 0..run.len() {
                each(index, Fetched::Moved);
            }
            return;
        };
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

    /// Where a block is, for a message.
    pub(crate) fn place_of(&self, ticket: &Ticket) -> String {
        let Slot(slot) = ticket.slot;
        format!(
            "the block at byte {} of volume '{}' (position {} of the overflow disk, slot {slot})",
            u64::from(ticket.block.0) * u64::from(BLOCK_BYTES),
            self.name,
            ticket.position
        )
    }

    /// What to do about a block that cannot be read.
    pub(crate) fn advice(&self) -> &'static str {
        match &self.persist {
            None => "check that disk, and reset the machine",
            Some(_) => {
                "check that disk, and copy from this one what can still be read: writing the block anew, or \
                        beginning with an empty cache, ends the error"
            }
        }
    }

    fn opened<'a>(
        &self,
        ticket: &Ticket,
        index: usize,
        result: &io::Result<SealedRun<'_>>,
        plain: &'a mut [u8; BLOCK_BYTES as usize],
    ) -> Fetched<'a> {
        let Some(overflow) = &self.overflow else { return Fetched::Moved };
        let failed = match result {
            Ok(run) => {
                let sealed = run.slot(index);
                if sealed.is_some_and(|s| overflow.open_slot(ticket.generation, ticket.slot, s, plain)) {
                    return Fetched::Data(plain);
                }
                None
            }
            Err(error) => Some(error.to_string()),
        };
        // A slot that was given up while it was read may hold anything; that is no damage.
        if !self.is_current(ticket) {
            return Fetched::Moved;
        }
        let (place, advice) = (self.place_of(ticket), self.advice());
        Fetched::Failed(match failed {
            None => {
                count(&self.counters.corrupt_blocks, 1);
                let what = format!("{place} is damaged: its authentication tag does not match; {advice}");
                tracing::error!("{what}");
                IoError::new(IoErrorKind::Corrupt, what)
            }
            Some(error) => {
                count(&self.counters.disk_errors, 1);
                let what = format!("{place} cannot be read: {error}; {advice}");
                tracing::error!("{what}");
                IoError::new(IoErrorKind::Device, what)
            }
        })
    }
}
