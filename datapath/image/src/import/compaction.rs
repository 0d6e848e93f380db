//! Compaction: a new version copies the chunks that it needs out of mostly unused data objects. (A data
//! object is a file of the store with the chunks that one version added.) These objects can then be removed
//! together with the older versions that need them.
//!
//! In a bucket, and on a file system without holes, an object stays as long as any version needs a single
//! chunk of it. A store in which versions come and go every week would grow by everything that was ever
//! added. (In other stores `Store::trim` frees the unneeded parts of objects, so no object is mostly unused.)
//! Like the cleaner of a log-structured file system, a new version copies the needed part of each object of
//! which less than a third is needed. For each byte that is copied in this way, at least two unused bytes
//! become free, and each byte that was added becomes unused at most once. So in the long run at most half as
//! many bytes are copied as were added.
//!
//! An import of a whole disk treats these chunks as new chunks. With a [`Basis`](super::Basis), which lists
//! only the differences to its parent version, they are read as if they differed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::import::Changes;
use crate::index::ChunkIndex;
use crate::manifest::Manifest;
use crate::units::usize_of;

/// The most bytes that one seal compacts, because the snapshot of the machine's disk needs space in the write cache until
/// the seal ends. The next seal continues.
const COMPACTED_BYTES_MAX: u64 = 1 << 30;

/// The chunks of the parent version that should be compacted, and how many of their bytes were reported as changes so far.
pub(super) struct Compaction {
    chunk_bytes: u64,
    size_bytes: u64,
    /// In ascending order of their numbers.
    chunks: Vec<u64>,
    compacted_bytes: AtomicU64,
}

impl Compaction {
    /// The chunks of the parent version that are only in objects that the index avoids.
    pub(super) fn of(parent: &Manifest, index: &ChunkIndex) -> Self {
        let (chunk_bytes, size_bytes) = (u64::from(parent.chunk_bytes()), parent.size_bytes());
        let to_copy = parent.data().filter(|(_, chunk)| index.is_only_avoided(&chunk.hash));
        let most = usize_of(COMPACTED_BYTES_MAX / chunk_bytes.max(1));
        let chunks = to_copy.map(|(number, _)| number).take(most).collect();
        Self { chunk_bytes, size_bytes, chunks, compacted_bytes: AtomicU64::new(0) }
    }

    /// The differences, with these chunks as if they differed.
    pub(super) fn add_to(self: Arc<Self>, changes: Changes) -> Changes {
        if self.chunks.is_empty() {
            return changes;
        }
        Arc::new(move |range, max_runs| self.runs(range.offset(), &changes(range, max_runs)))
    }

    /// How many bytes were reported as changes only because of the compaction.
    pub(super) fn compacted_bytes(&self) -> u64 {
        self.compacted_bytes.load(Ordering::Relaxed)
    }

    fn runs(&self, start: u64, runs: &[(u64, bool)]) -> Vec<(u64, bool)> {
        let (mut out, mut at) = (Vec::with_capacity(runs.len()), start);
        for (len, changed) in runs {
            let end = at.saturating_add(*len);
            if *changed {
                out.push((*len, true));
            } else {
                self.split(at, end, &mut out);
            }
            at = end;
        }
        out
    }

    /// Splits a range without changes. A chunk that is only partly in the range is left out. Either it has a change elsewhere, so it is read
    /// anyway, or the answer ended early; then the next answer begins inside of the chunk, and the chunk is left to
    /// the next seal.
    fn split(&self, mut at: u64, end: u64, out: &mut Vec<(u64, bool)>) {
        let first = at.div_ceil(self.chunk_bytes);
        let from = self.chunks.partition_point(|number| *number < first);
        for number in self.chunks.get(from..).unwrap_or_default() {
            let chunk_start = number.saturating_mul(self.chunk_bytes);
            let chunk_end = chunk_start.saturating_add(self.chunk_bytes).min(self.size_bytes);
            if chunk_end > end {
                break;
            }
            if chunk_start > at {
                out.push((chunk_start.saturating_sub(at), false));
            }
            let len = chunk_end.saturating_sub(chunk_start);
            match out.last_mut() {
                // Merged, so that they are read together.
                Some((before, true)) if chunk_start == at => *before = before.saturating_add(len),
                _ => out.push((len, true)),
            }
            self.compacted_bytes.fetch_add(len, Ordering::Relaxed);
            at = chunk_end;
        }
        if at < end {
            out.push((end.saturating_sub(at), false));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compaction(chunks: &[u64]) -> Compaction {
        let compacted_bytes = AtomicU64::new(0);
        Compaction { chunk_bytes: 100, size_bytes: 950, chunks: chunks.to_vec(), compacted_bytes }
    }

    #[test]
    fn chunks_to_compact_are_reported_as_changes() {
        let it = compaction(&[1, 2, 5, 9]);
        // Chunk 5 has a change of its own, and a change begins in chunk 2.
        let runs = it.runs(0, &[(250, false), (50, true), (200, false), (60, true), (390, false)]);
        let expected = [
            (100, false),
            (100, true),
            (50, false),
            (50, true),
            (200, false),
            (60, true),
            (340, false),
            (50, true),
        ];
        assert_eq!(runs, expected);
        assert_eq!(it.compacted_bytes(), 150);
        // A request from the middle of the disk, whose answer is shorter than the request.
        let it = compaction(&[1, 4, 6]);
        assert_eq!(it.runs(400, &[(150, false)]), [(100, true), (50, false)]);
        assert_eq!(it.runs(550, &[(150, false)]), [(50, false), (100, true)]);
        assert_eq!(it.compacted_bytes(), 200);
    }
}
