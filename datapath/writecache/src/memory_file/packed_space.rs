//! Allocates space for packed segments in a memory file: runs of pages, first fit. The region is the part of
//! the file from `start` to `end`, for packed segments. Its parts are mapped as they are needed, and stay mapped.

use std::collections::BTreeMap;
use std::fs::File;

use parking_lot::Mutex;

use super::{Mapping, PAGE, reserve};

/// Size of the parts of the region that are mapped at a time.
const CHUNK: u64 = 64 << 20;

#[derive(Debug, Default)]
struct Space {
    /// Mapped parts of the region, by offset in the file.
    mapped: BTreeMap<u64, Mapping>,
    /// Free runs in these parts: offset and length. Neighbouring runs in one part are merged.
    free: BTreeMap<u64, u64>,
}

/// The allocator of one memory file.
#[derive(Debug)]
pub(super) struct PackedSpace {
    start: u64,
    end: u64,
    space: Mutex<Space>,
}

fn pages(len: usize) -> u64 {
    len.next_multiple_of(PAGE) as u64
}

impl Space {
    fn address_of(&self, offset: u64) -> Option<usize> {
        let (start, mapping) = self.mapped.range(..=offset).next_back()?;
        mapping.address().checked_add(usize::try_from(offset - start).ok()?)
    }

    fn map(&mut self, file: &File, start: u64) -> Option<()> {
        let len = usize::try_from(CHUNK).ok()?;
        match Mapping::new(file, start, len, PAGE) {
            Ok(mapping) => self.mapped.insert(start, mapping),
            Err(error) => {
                tracing::debug!(%error, "no address space for packed segments in a memory file");
                return None;
            }
        };
        self.free.insert(start, CHUNK);
        Some(())
    }

    /// Removes a part of a free run from the free runs.
    fn cut(&mut self, run: u64, from: u64, len: u64) -> Option<()> {
        let run_len = self.free.remove(&run)?;
        let end = run + run_len;
        if from > run {
            self.free.insert(run, from - run);
        }
        if from + len < end {
            self.free.insert(from + len, end - from - len);
        }
        Some(())
    }

    fn put(&mut self, mut from: u64, mut len: u64) {
        // Parts are mapped separately, so a run ends at the end of its part.
        if let Some((before, before_len)) = self.free.range(..from).next_back().map(|(at, len)| (*at, *len))
            && before + before_len == from
            && !self.mapped.contains_key(&from)
        {
            self.free.remove(&before);
            (from, len) = (before, before_len + len);
        }
        let after = from + len;
        if !self.mapped.contains_key(&after)
            && let Some(after_len) = self.free.remove(&after)
        {
            len += after_len;
        }
        self.free.insert(from, len);
    }
}

impl PackedSpace {
    pub(super) fn new(start: u64, end: u64) -> Self {
        Self { start, end, space: Mutex::default() }
    }

    /// Allocates a run with pages for `len` bytes, at most `CHUNK`. Returns address, length and offset.
    /// `None`: there is no space, or it cannot be mapped or reserved.
    pub(super) fn take(&self, file: &File, len: usize) -> Option<(usize, usize, u64)> {
        let wanted = pages(len);
        if wanted > CHUNK {
            return None;
        }
        let mut space = self.space.lock();
        let fits = |space: &Space| space.free.iter().find(|(_, len)| **len >= wanted).map(|(at, _)| *at);
        let offset = match fits(&space) {
            Some(offset) => offset,
            None => {
                // Recovery maps only the parts that have data, so there may be gaps between them.
                let mut starts = (self.start..self.end).step_by(usize::try_from(CHUNK).ok()?);
                let start = starts.find(|start| !space.mapped.contains_key(start))?;
                space.map(file, start)?;
                start
            }
        };
        space.cut(offset, offset, wanted)?;
        let address = space.address_of(offset)?;
        let len = usize::try_from(wanted).ok()?;
        if !reserve(file, (address, offset), len) {
            space.put(offset, wanted);
            return None;
        }
        Some((address, len, offset))
    }

    /// Frees a run, whose pages were freed.
    pub(super) fn give(&self, offset: u64, len: usize) {
        self.space.lock().put(offset, pages(len));
    }

    /// Takes over a run that another process left. Returns address and length. `None`: the offset is invalid,
    /// the run overlaps another one or crosses the end of a part, or the part cannot be mapped.
    pub(super) fn adopt(&self, file: &File, offset: u64, len: usize) -> Option<(usize, usize)> {
        let wanted = pages(len);
        let is_inside = offset >= self.start && offset.checked_add(wanted)? <= self.end;
        if !is_inside || !offset.is_multiple_of(PAGE as u64) || wanted == 0 {
            return None;
        }
        let mut space = self.space.lock();
        let start = self.start + (offset - self.start) / CHUNK * CHUNK;
        if !space.mapped.contains_key(&start) {
            space.map(file, start)?;
        }
        let (run, run_len) = space.free.range(..=offset).next_back().map(|(at, len)| (*at, *len))?;
        if run + run_len < offset + wanted {
            return None;
        }
        space.cut(run, offset, wanted)?;
        Some((space.address_of(offset)?, usize::try_from(wanted).ok()?))
    }
}
