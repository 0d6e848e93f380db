//! Visiting all chunks of a version on all cores: what export and verify have in common.

use std::sync::mpsc;

use parking_lot::Mutex;

use crate::error::ImageError;
use crate::manifest::{ChunkRef, Manifest};
use crate::progress::Cancel;
use crate::units::{u64_of, usize_of_u32};

/// The most threads of a walk.
const WALK_THREADS_MAX: usize = 64;
/// Chunks that a thread takes at a time.
const TAKE_CHUNKS: usize = 16;
/// Reports on their way to the caller; a thread waits for room.
const REPORTS_MAX: usize = 256;

/// Visits every chunk that holds data, in any order and on several threads. `visit` gets the chunk's number, its
/// ref and a buffer of a chunk's size, which it hands back; what it returns beside goes to `report` on the calling
/// thread, with the number of chunks done since the report before. The first error ends the walk.
pub(crate) fn walk<T: Send>(
    manifest: &Manifest,
    cancel: &Cancel,
    what: &str,
    visit: impl Fn(u64, &ChunkRef, Vec<u8>) -> Result<(Vec<u8>, Option<T>), ImageError> + Sync,
    mut report: impl FnMut(u64, Vec<T>),
) -> Result<(), ImageError> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(WALK_THREADS_MAX);
    let chunk_bytes = usize_of_u32(manifest.chunk_bytes());
    let left = Mutex::new(manifest.data());
    let (tx, rx) = mpsc::sync_channel(REPORTS_MAX);
    let worker = |tx: mpsc::SyncSender<Result<(u64, Vec<T>), ImageError>>| {
        let mut buffer = vec![0; chunk_bytes];
        loop {
            let taken: Vec<(u64, &ChunkRef)> = left.lock().by_ref().take(TAKE_CHUNKS).collect();
            if taken.is_empty() {
                return;
            }
            let mut found = Vec::new();
            let mut visit_all = || -> Result<(), ImageError> {
                for (index, chunk) in &taken {
                    cancel.check(what)?;
                    let (handed_back, more) = visit(*index, chunk, std::mem::take(&mut buffer))?;
                    buffer = handed_back;
                    buffer.resize(chunk_bytes, 0);
                    found.extend(more);
                }
                Ok(())
            };
            let visited = visit_all();
            let failed = visited.is_err();
            // If the caller is gone, another thread failed first.
            if tx.send(visited.map(|()| (u64_of(taken.len()), found))).is_err() || failed {
                return;
            }
        }
    };
    std::thread::scope(|scope| {
        for number in 0..threads {
            let (worker, tx) = (&worker, tx.clone());
            std::thread::Builder::new()
                .name(format!("walk-{number}"))
                .spawn_scoped(scope, move || worker(tx))
                .map_err(|e| ImageError::from_os(format!("cannot start a thread for the {what}"), &e))?;
        }
        drop(tx);
        // Taken in, so that it goes on the way out and nobody waits for room in it.
        let rx = rx;
        for result in &rx {
            let (chunks, found) = result?;
            report(chunks, found);
        }
        Ok(())
    })
}
