//! A walk: reads and checks all chunks of a version on several threads, and hands them or their faults to
//! the caller. Exports and verifications use it.

use std::slice;
use std::sync::{Arc, mpsc};

use headwater_store::Object;
use parking_lot::Mutex;

use crate::error::{ImageError, ImageErrorKind};
use crate::fetch::{MergeLimit, fetch_group, group};
use crate::fetch_pool::FETCH_THREADS;
use crate::manifest::{ChunkRef, Manifest};
use crate::progress::Cancel;
use crate::units::{u64_of, usize_of_u32};
use crate::verify_round::{ChunkKey, VerifyRound};

/// The most threads of a walk.
const WALK_THREADS_MAX: usize = 64;
/// Chunks that a thread takes at a time.
const TAKE_CHUNKS: usize = 16;
/// The most decompressed bytes of one read, unless it is a single chunk.
const READ_MAX_BYTES: usize = 1 << 20;
/// The most reports in transit to the caller; a thread waits if there are more.
const REPORTS_MAX: usize = 256;

/// The parameters of a walk.
pub(crate) struct Walk<'a> {
    pub manifest: &'a Manifest,
    /// The data objects by their numbers; `None` if one is lost.
    pub objects: &'a [Option<Arc<dyn Object>>],
    /// Whether a read crosses a network.
    pub is_remote: bool,
    /// Chunks that were found right in this round are not read, and the round's rate applies.
    pub round: Option<&'a VerifyRound>,
    pub cancel: &'a Cancel,
    /// The name of the operation, for people.
    pub what: &'a str,
}

/// A chunk with its number.
type Numbered = (u64, ChunkRef);

impl Walk<'_> {
    /// Reads every chunk with data, in any order and on several threads. `visit` gets the chunk's number, its
    /// reference, and its checked bytes or an error. Its result goes to `report` on the calling thread, with
    /// the number of chunks done since the previous report. The first error of `visit` ends the walk.
    pub(crate) fn run<T: Send>(
        &self,
        visit: impl Fn(u64, &ChunkRef, Result<&[u8], ImageError>) -> Result<Option<T>, ImageError> + Sync,
        mut report: impl FnMut(u64, Vec<T>),
    ) -> Result<(), ImageError> {
        let left = Mutex::new(self.manifest.data());
        let (tx, rx) = mpsc::sync_channel(REPORTS_MAX);
        let worker = |tx: mpsc::SyncSender<Result<(u64, Vec<T>), ImageError>>| {
            let mut buffers = Vec::new();
            loop {
                let taken: Vec<Numbered> =
                    left.lock().by_ref().take(TAKE_CHUNKS).map(|(index, chunk)| (index, *chunk)).collect();
                if taken.is_empty() {
                    return;
                }
                let mut found = Vec::new();
                let visited = self.visit_all(&taken, &mut buffers, &mut |index, chunk, bytes| {
                    found.extend(visit(index, chunk, bytes)?);
                    Ok(())
                });
                let failed = visited.is_err();
                // If the caller is gone, another thread failed first.
                if tx.send(visited.map(|()| (u64_of(taken.len()), found))).is_err() || failed {
                    return;
                }
            }
        };
        std::thread::scope(|scope| {
            for number in 0..self.threads() {
                let (worker, tx) = (&worker, tx.clone());
                std::thread::Builder::new()
                    .name(format!("walk-{number}"))
                    .spawn_scoped(scope, move || worker(tx))
                    .map_err(|e| {
                        ImageError::from_os(format!("cannot start a thread for the {}", self.what), &e)
                    })?;
            }
            drop(tx);
            // Moved in, so that it is dropped on return and no thread waits for space in it.
            let rx = rx;
            for result in &rx {
                let (chunks, found) = result?;
                report(chunks, found);
            }
            Ok(())
        })
    }

    /// One thread for each processor. For a remote store as many as volumes have reads, because the threads
    /// wait most of the time.
    fn threads(&self) -> usize {
        if self.is_remote {
            return FETCH_THREADS;
        }
        std::thread::available_parallelism().map_or(1, usize::from).min(WALK_THREADS_MAX)
    }

    /// A local store is read chunk by chunk, because the system reads ahead by itself.
    fn merge_limit(&self) -> MergeLimit {
        let chunks = if self.is_remote {
            let most = READ_MAX_BYTES / usize_of_u32(self.manifest.chunk_bytes()).max(1);
            MergeLimit::REMOTE.chunks.min(most).max(1)
        } else {
            1
        };
        MergeLimit { chunks, ..MergeLimit::REMOTE }
    }

    fn visit_all(
        &self,
        taken: &[Numbered],
        buffers: &mut Vec<Vec<u8>>,
        visit: &mut Visit<'_>,
    ) -> Result<(), ImageError> {
        self.cancel.check(self.what)?;
        let mut wanted = Vec::with_capacity(taken.len());
        for (index, chunk) in taken {
            if self.object(chunk).is_none() {
                let lost = ImageError::new(ImageErrorKind::Damaged, "its data object is lost");
                visit(*index, chunk, Err(lost))?;
            } else if !self.is_known_sound(chunk) {
                wanted.push((*index, *chunk));
            }
        }
        let mut numbers = wanted.iter().map(|(index, _)| *index);
        for chunks in group(wanted.iter().map(|(_, chunk)| *chunk), self.merge_limit()) {
            let numbers: Vec<u64> = numbers.by_ref().take(chunks.len()).collect();
            self.visit_group(&numbers, &chunks, buffers, visit)?;
        }
        Ok(())
    }

    /// Reads adjacent chunks in one read.
    fn visit_group(
        &self,
        numbers: &[u64],
        chunks: &[ChunkRef],
        buffers: &mut Vec<Vec<u8>>,
        visit: &mut Visit<'_>,
    ) -> Result<(), ImageError> {
        let Some(object) = chunks.first().and_then(|chunk| self.object(chunk)) else { return Ok(()) };
        if let Some(round) = self.round {
            round.take(chunks.iter().map(|chunk| u64::from(chunk.stored_bytes)).sum(), self.cancel);
        }
        self.cancel.check(self.what)?;
        let chunk_bytes = usize_of_u32(self.manifest.chunk_bytes());
        buffers.resize_with(buffers.len().max(chunks.len()), || vec![0; chunk_bytes]);
        let each = numbers.iter().zip(chunks);
        match fetch_group(object.as_ref(), chunks, buffers) {
            Ok(()) => {
                for ((index, chunk), bytes) in each.zip(buffers.iter()) {
                    visit(*index, chunk, Ok(bytes))?;
                }
            }
            // The damage affects one chunk; the others are good.
            Err(e) if e.kind().is_damage() && chunks.len() > 1 => {
                for (index, chunk) in each {
                    self.visit_group(slice::from_ref(index), slice::from_ref(chunk), buffers, visit)?;
                }
            }
            Err(e) => {
                for (index, chunk) in each {
                    visit(*index, chunk, Err(e.clone()))?;
                }
            }
        }
        Ok(())
    }

    fn object(&self, chunk: &ChunkRef) -> Option<&Arc<dyn Object>> {
        self.objects.get(usize_of_u32(chunk.object))?.as_ref()
    }

    fn is_known_sound(&self, chunk: &ChunkRef) -> bool {
        let object = self.manifest.objects().get(usize_of_u32(chunk.object));
        self.round.zip(object).is_some_and(|(round, object)| round.is_sound(ChunkKey::new(&object.id, chunk)))
    }
}

type Visit<'a> = dyn FnMut(u64, &ChunkRef, Result<&[u8], ImageError>) -> Result<(), ImageError> + 'a;
