//! A long file that goes to the disk while the rest of it is made, rather than all at the end.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::ScopedJoinHandle;

/// So much is left to the last sync, or to the next one: enough for a disk to be busy with, and little beside what
/// the system lets wait in memory.
const STEP_BYTES: u64 = 16 << 20;
/// Steps that may wait while others are synced. Who writes faster than the disk waits for it: else one sync would come to have
/// a part of all memory before it, and whoever cancels would wait for that.
const STEPS_AHEAD: usize = 4;

/// What is told of what was written.
pub(crate) struct EarlySync {
    written_bytes: AtomicU64,
    wake: SyncSender<()>,
}

impl EarlySync {
    /// Runs `write`, which tells what it wrote to `file`, with a thread beside it that syncs that. The file is not durable
    /// afterwards: its last part is not, and what the system keeps of the file itself.
    ///
    /// What the thread met is the error first: the system tells it once, so that a later sync knows nothing of it, and
    /// `write` only heard that there is one.
    pub(crate) fn beside<E>(
        file: &File,
        failed: impl Fn(io::Error) -> E,
        write: impl FnOnce(&Self) -> Result<(), E>,
    ) -> Result<(), E> {
        std::thread::scope(|scope| {
            let (wake, woken) = sync_channel(STEPS_AHEAD);
            let thread = std::thread::Builder::new()
                .name("sync".into())
                .spawn_scoped(scope, move || sync_each_time(file, &woken))
                .map_err(&failed)?;
            let early = Self { written_bytes: AtomicU64::new(0), wake };
            let wrote = write(&early);
            drop(early);
            join(thread).map_err(failed)?;
            wrote
        })
    }

    /// More was written. Waits for the disk where that is far behind, and fails where a sync has failed, so that nobody writes on in vain.
    pub(crate) fn wrote(&self, bytes: u64) -> io::Result<()> {
        let before = self.written_bytes.fetch_add(bytes, Ordering::Relaxed);
        if before / STEP_BYTES == before.saturating_add(bytes) / STEP_BYTES {
            return Ok(());
        }
        self.wake.send(()).map_err(|_| io::Error::other("the disk took no more"))
    }
}

fn sync_each_time(file: &File, woken: &Receiver<()>) -> io::Result<()> {
    for () in woken {
        // One sync is for all steps that were written before it.
        woken.try_iter().for_each(drop);
        file.sync_data()?;
    }
    Ok(())
}

fn join(thread: ScopedJoinHandle<'_, io::Result<()>>) -> io::Result<()> {
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that syncs panicked")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sync_that_fails_ends_the_writing_and_is_the_error() {
        // What is no file on a disk cannot be synced.
        let file = File::options().write(true).open("/dev/null").unwrap();
        let mut steps = 0;
        let ended = EarlySync::beside(
            &file,
            |e| e,
            |early| {
                loop {
                    early.wrote(STEP_BYTES)?;
                    steps += 1;
                }
            },
        );
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert!(steps >= 1);
    }

    #[test]
    fn a_sync_of_each_step_is_asked_for_and_the_writers_error_is_told() {
        let file = tempfile::tempfile().unwrap();
        let ended = EarlySync::beside(
            &file,
            |e| e,
            |early| {
                // Less than a step, a step, and a part that is over one.
                for bytes in [STEP_BYTES - 1, 1, 5 * STEP_BYTES + 3, 0] {
                    early.wrote(bytes)?;
                }
                assert_eq!(early.written_bytes.load(Ordering::Relaxed), 6 * STEP_BYTES + 3);
                Err(io::Error::from(io::ErrorKind::StorageFull))
            },
        );
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
