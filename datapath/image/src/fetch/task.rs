//! Fetches that a request may wait for, as tasks of the pool of threads ([`crate::fetch_pool`]). A fetch
//! answers all requests that wait for its chunk.

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

/// A fetch of a chunk in progress. Its waiters always get an answer, even if it is dropped.
pub(crate) struct Fetch {
    cache: Arc<ChunkCache>,
    pub chunk: ChunkRef,
    place: ChunkPlace,
    ended: bool,
}

impl Fetch {
    /// Creates a fetch for a chunk that [`ChunkCache::join`] said must be fetched from this place.
    pub(crate) fn new(cache: &Arc<ChunkCache>, chunk: ChunkRef, place: ChunkPlace) -> Self {
        Self { cache: Arc::clone(cache), chunk, place, ended: false }
    }

    pub(crate) fn end(mut self, outcome: Result<Pages, IoError>) {
        self.tell(outcome);
    }

    /// Answers the waiters while the read continues for other chunks. It answers only once; a later request
    /// begins another fetch.
    fn tell(&mut self, outcome: Result<Pages, IoError>) {
        if !std::mem::replace(&mut self.ended, true) {
            self.cache.fetched(&self.chunk.hash, &self.place, outcome);
        }
    }

    /// Whether a request or prefetch still waits for it.
    fn is_needed(&self) -> bool {
        !self.ended && self.cache.is_awaited_from(&self.chunk.hash, &self.place)
    }

    /// Ends a fetch that no request waits for. A later request begins another one.
    fn end_unneeded(mut self) {
        self.ended = true;
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        if !self.ended {
            self.tell(Err(IoError::new(IoErrorKind::Device, "reading the chunk was cancelled")));
        }
    }
}

/// Fetches of adjacent chunks: one task of a pool.
pub(crate) struct Fetching {
    source: Source,
    /// It began as a prefetch.
    is_ahead: bool,
    /// It has not run yet.
    is_new: bool,
    /// The fetches of the waiting read. Some of these chunks may have arrived from elsewhere, and their
    /// fetches ended.
    asked: Vec<Fetch>,
    waiting: Waiting,
    /// Fetches to read after it, each group in one read.
    parts: VecDeque<Vec<Fetch>>,
    /// Compressed chunks that were read and must still be written to the disk cache. That may have to make
    /// space first, and no request should wait for it.
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

    /// The fetches that have not ended.
    fn left(&self) -> impl Iterator<Item = &Fetch> {
        self.asked.iter().chain(self.parts.iter().flatten()).filter(|fetch| !fetch.ended)
    }

    /// Whether to repeat the waiting read.
    fn goes_on(&self, now: Instant) -> bool {
        // A store may reserve capacity for reads that a request waits for.
        self.waiting.is_due(now) || (self.waiting.read_for() == ReadFor::Later && self.is_waited_for())
    }

    /// Whether a chunk arrived from elsewhere while this task waited for its store: on the local disk,
    /// through a background copy, or from another place.
    fn has_come(&self) -> bool {
        let disk = self.source.keeps_on();
        let is_here = |fetch: &Fetch| disk.is_some_and(|disk| disk.has_now(&fetch.chunk.hash));
        self.left().any(|fetch| !fetch.is_needed() || is_here(fetch))
    }

    /// Takes out the chunks that are on the local disk or arrived from another place. The waiting read
    /// continues unchanged, because its bytes may be in transit, and because a server that is away is asked
    /// less and less often.
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
                // The chunks before this one are not adjacent to those after it.
                parts.push_back(std::mem::take(&mut rest));
            }
            parts.push_back(rest);
        }
        self.parts = parts;
    }

    /// Cancels the waiting read if no part of it is needed any more.
    fn give_up_unneeded(&mut self) {
        if !self.asked.iter().any(Fetch::is_needed) {
            self.asked.drain(..).for_each(Fetch::end_unneeded);
            self.waiting = Waiting::default();
        }
    }

    /// Whether there is something to read: the next group, unless a read waits.
    fn has_next(&mut self) -> bool {
        while self.asked.is_empty() {
            let Some(part) = self.parts.pop_front() else { return false };
            self.asked = part;
        }
        true
    }

    /// Reads what was requested. Returns whether it waits.
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
            // The damage affects one chunk; the others are good.
            Err(e) if e.kind() == ImageErrorKind::Damaged && asked.len() > 1 => {
                let left = asked.into_iter().filter(|fetch| !fetch.ended);
                left.rev().for_each(|fetch| self.parts.push_front(vec![fetch]));
            }
            Err(e) => {
                let error = IoError::from(e);
                for fetch in asked.into_iter().filter(|fetch| !fetch.ended) {
                    // A background copy may have brought it while this task waited.
                    let kept = self.source.kept_on_disk(&fetch.chunk, packed);
                    fetch.end(kept.ok_or_else(|| error.clone()));
                }
            }
        }
        false
    }

    /// Writes what was read to the disk cache, if that accepts it. The memory is reused.
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
                // A background copy or another version's fetch may bring chunks while this task waits. If the
                // read is due, all its bytes may have arrived.
                if !self.goes_on(Instant::now()) && self.has_come() {
                    self.take_out(packed);
                }
                self.give_up_unneeded();
                // A waiting read is not repeated early because other chunks arrived.
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
