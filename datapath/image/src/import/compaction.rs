//! Carrying out: what a new version needs of data objects that are mostly out of use is stored again, so that these objects go
//! with the older versions that need them.
//!
//! In a bucket, and on a file system without holes, an object stays as
//! long as any version needs a single chunk of it, and a store in which versions come and go week by week would grow by all that
//! these weeks brought (elsewhere `Store::trim` gives back what nobody needs of it, so that none is mostly out of use). As the cleaner of a log does, a new version copies what is still needed of an object of which less than a
//! third is. Each byte that is copied so has two beside it that are out of use, so that in the long run at most half as much is copied as
//! came.
//!
//! An import of a whole disk finds those chunks by itself, as new ones. With a [`Basis`](super::Basis), which names only what
//! differs from the version below, they are read as if they did.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::import::Changes;
use crate::index::ChunkIndex;
use crate::manifest::Manifest;
use crate::units::usize_of;

/// A seal carries no more than this: a machine's disk is frozen meanwhile. The next one goes on.
const COMPACTED_BYTES_MAX: u64 = 1 << 30;

/// The chunks of the version below that are to be carried out, and how much of them was.
pub(super) struct Compaction {
    chunk_bytes: u64,
    size_bytes: u64,
    /// By ascending number.
    chunks: Vec<u64>,
    compacted_bytes: AtomicU64,
}

impl Compaction {
    /// Of a version, what lies in objects that the index avoids, and nowhere else.
    pub(super) fn of(below: &Manifest, index: &ChunkIndex) -> Self {
        let (chunk_bytes, size_bytes) = (u64::from(below.chunk_bytes()), below.size_bytes());
        let to_carry = below.data().filter(|(_, chunk)| index.is_only_avoided(&chunk.hash));
        let most = usize_of(COMPACTED_BYTES_MAX / chunk_bytes.max(1));
        let chunks = to_carry.map(|(number, _)| number).take(most).collect();
        Self { chunk_bytes, size_bytes, chunks, compacted_bytes: AtomicU64::new(0) }
    }

    /// What differs, with these chunks as if they did.
    pub(super) fn beside(self: Arc<Self>, changes: Changes) -> Changes {
        if self.chunks.is_empty() {
            return changes;
        }
        Arc::new(move |range, max_runs| self.runs(range.offset(), &changes(range, max_runs)))
    }

    /// How many bytes were read only because of this.
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

    /// A stretch without changes. A chunk that has some outside it is read anyway.
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
                // Together, so that they are read together.
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
    fn chunks_to_carry_are_told_as_changes_where_they_have_none() {
        let it = compaction(&[1, 2, 5, 9]);
        // Chunk 5 has a change of its own, and chunk 2 one that begins in it.
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
        // Asked from the middle of the disk, and told less than was asked for.
        let it = compaction(&[1, 4, 6]);
        assert_eq!(it.runs(400, &[(150, false)]), [(100, true), (50, false)]);
        assert_eq!(it.runs(550, &[(150, false)]), [(50, false), (100, true)]);
        assert_eq!(it.compacted_bytes(), 200);
    }
}
