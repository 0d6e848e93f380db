//! Fetches that somebody may wait for, as tasks of the pool.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use headwater_block::{IoError, IoErrorKind, Pages};
use headwater_store::{ReadFor, Waiting};

use super::{PACKED, Source, put_each};
use crate::chunk_cache::{ChunkCache, ChunkPlace};
use crate::error::ImageErrorKind;
use crate::fetch_pool::{Task, Urgency};
use crate::manifest::ChunkRef;

/// A fetch of a chunk under way. Whatever happens to it, those who wait are told.
pub(crate) struct Fetch {
    cache: Arc<ChunkCache>,
    pub chunk: ChunkRef,
    place: ChunkPlace,
    ended: bool,
}

impl Fetch {
    /// For a chunk that [`ChunkCache::join`] said must be fetched from this place.
    pub(crate) fn new(cache: &Arc<ChunkCache>, chunk: ChunkRef, place: ChunkPlace) -> Self {
        Self { cache: Arc::clone(cache), chunk, place, ended: false }
    }

    pub(crate) fn end(mut self, outcome: Result<Pages, IoError>) {
        self.tell(outcome);
    }

    /// The same where it is a part of a read that goes on. Once only: whoever comes after that begins another one.
    fn tell(&mut self, outcome: Result<Pages, IoError>) {
        if !std::mem::replace(&mut self.ended, true) {
            self.cache.fetched(&self.chunk.hash, &self.place, outcome);
        }
    }

    /// Whether anybody still waits for it.
    fn is_needed(&self) -> bool {
        !self.ended && self.cache.is_awaited_from(&self.chunk.hash, &self.place)
    }

    /// Ends it where nobody waits for it: whoever comes now begins another one.
    fn end_unneeded(mut self) {
        self.ended = true;
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        if !self.ended {
            self.tell(Err(IoError::new(IoErrorKind::Device, "reading the chunk was given up")));
        }
    }
}

/// Fetches of chunks that lie side by side: one task of a pool.
pub(crate) struct Fetching {
    source: Source,
    /// Nobody waited for it when it was made.
    is_ahead: bool,
    /// It was not run yet.
    is_new: bool,
    /// The read that waits for its store, with all that it was asked for: of that some may have come otherwise, and ended.
    asked: Vec<Fetch>,
    waiting: Waiting,
    /// What is left to be read after it, each in one read.
    parts: VecDeque<Vec<Fetch>>,
    /// What was read and is still to be kept on the local disk, packed: that may make room first, which nobody is to wait for.
    to_keep: Vec<(Vec<ChunkRef>, Vec<u8>)>,
}

impl Fetching {
    pub(crate) fn new(source: Source, fetches: Vec<Fetch>, urgency: Urgency) -> Self {
        Self {
            source,
            is_ahead: urgency == Urgency::Ahead,
            is_new: true,
            asked: Vec::new(),
            waiting: Waiting::default(),
            parts: VecDeque::from([fetches]),
            to_keep: Vec::new(),
        }
    }

    /// What has not ended.
    fn left(&self) -> impl Iterator<Item = &Fetch> {
        self.asked.iter().chain(self.parts.iter().flatten()).filter(|fetch| !fetch.ended)
    }

    /// Whether the read that waits is to be asked for again.
    fn goes_on(&self, now: Instant) -> bool {
        // A store may have kept room for what somebody waits for.
        self.waiting.is_due(now) || (self.waiting.read_for() == ReadFor::Later && self.is_waited_for())
    }

    /// Whether something came while this waited for its store: to the local disk, with a copy, or from another place.
    fn has_come(&self) -> bool {
        let disk = self.source.keeps_on();
        let is_here = |fetch: &Fetch| disk.is_some_and(|disk| disk.has_now(&fetch.chunk.hash));
        self.left().any(|fetch| !fetch.is_needed() || is_here(fetch))
    }

    /// Takes out what is on the local disk, and what came from another place. The read that waits goes on as it was asked for: its
    /// bytes may be on their way, and whoever is away is asked less and less often.
    fn take_out(&mut self, packed: &mut Vec<u8>) {
        for fetch in self.asked.iter_mut().filter(|fetch| !fetch.ended) {
            if !fetch.is_needed() {
                fetch.ended = true;
            } else if let Some(bytes) = self.source.kept_on_disk(&fetch.chunk, packed) {
                fetch.tell(Ok(bytes));
            }
        }
        let mut parts = VecDeque::new();
        for part in self.parts.drain(..) {
            let mut rest = Vec::new();
            for fetch in part {
                match self.source.kept_on_disk(&fetch.chunk, packed) {
                    Some(bytes) => fetch.end(Ok(bytes)),
                    None if fetch.is_needed() => {
                        rest.push(fetch);
                        continue;
                    }
                    None => fetch.end_unneeded(),
                }
                // What lies before this one is not beside what comes after it.
                parts.push_back(std::mem::take(&mut rest));
            }
            parts.push_back(rest);
        }
        self.parts = parts;
    }

    /// Gives the read that waits up where nobody needs anything of it any more.
    fn give_up_unneeded(&mut self) {
        if !self.asked.iter().any(Fetch::is_needed) {
            self.asked.drain(..).for_each(Fetch::end_unneeded);
            self.waiting = Waiting::default();
        }
    }

    /// Whether there is something to read: the next part, where no read waits.
    fn has_next(&mut self) -> bool {
        while self.asked.is_empty() {
            let Some(part) = self.parts.pop_front() else { return false };
            self.asked = part;
        }
        true
    }

    /// Reads what was asked for. Whether it waits.
    fn read_asked(&mut self, packed: &mut Vec<u8>) -> bool {
        let chunks: Vec<ChunkRef> = self.asked.iter().map(|fetch| fetch.chunk).collect();
        let read = self.source.read(&chunks, packed, &mut self.waiting);
        let Some(read) = read.transpose() else { return true };
        let asked = std::mem::take(&mut self.asked);
        match read {
            Ok(unpacked) => {
                asked.into_iter().zip(unpacked).for_each(|(fetch, bytes)| fetch.end(Ok(bytes)));
                if self.source.keeps_on().is_some() {
                    self.to_keep.push((chunks, std::mem::take(packed)));
                }
            }
            // Damage is that of one chunk: the others are good.
            Err(e) if e.kind() == ImageErrorKind::Damaged && asked.len() > 1 => {
                let left = asked.into_iter().filter(|fetch| !fetch.ended);
                left.rev().for_each(|fetch| self.parts.push_front(vec![fetch]));
            }
            Err(e) => {
                let error = IoError::from(e);
                for fetch in asked.into_iter().filter(|fetch| !fetch.ended) {
                    // It may have come with a copy while this waited.
                    let kept = self.source.kept_on_disk(&fetch.chunk, packed);
                    fetch.end(kept.ok_or_else(|| error.clone()));
                }
            }
        }
        false
    }

    /// Keeps what was read on the local disk, as far as that takes it. The memory is used again.
    fn keep(&mut self, packed: &mut Vec<u8>) {
        for (chunks, stored) in self.to_keep.drain(..) {
            if let Some(disk) = self.source.keeps_on() {
                put_each(disk, &chunks, &stored);
            }
            *packed = stored;
        }
    }
}

impl Task for Fetching {
    fn run(mut self: Box<Self>) -> Option<Box<dyn Task>> {
        PACKED.with_borrow_mut(|packed| {
            if std::mem::take(&mut self.is_new) {
                if self.source.keeps_on().is_some() {
                    self.take_out(packed);
                }
            } else {
                // A copy or another version's fetch may bring something while this waits. Where the read is due all of it may be here.
                if !self.goes_on(Instant::now()) && self.has_come() {
                    self.take_out(packed);
                }
                self.give_up_unneeded();
                // What waits is not asked for again before its time because others came.
                if !self.goes_on(Instant::now()) {
                    return Some(self as Box<dyn Task>);
                }
            }
            while self.has_next() {
                let later = self.is_ahead && !self.is_waited_for();
                self.waiting.set_read_for(if later { ReadFor::Later } else { ReadFor::Now });
                if self.read_asked(packed) {
                    return Some(self as Box<dyn Task>);
                }
            }
            self.keep(packed);
            None
        })
    }

    fn is_due(&self, now: Instant) -> bool {
        self.goes_on(now) || self.has_come()
    }

    fn is_waited_for(&self) -> bool {
        self.left().any(|fetch| self.source.cache.is_waited_for(&fetch.chunk.hash))
    }
}
