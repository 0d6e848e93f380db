//! Syncs a long file to the disk while an export writes it, instead of all of it at the end: at most 64 MiB
//! are written and not yet synced. The end of the file and its metadata are still for the caller to sync.

use std::fs::File;
use std::io;
use std::thread::ScopedJoinHandle;

use parking_lot::{Condvar, Mutex};

/// The bytes between two syncs: enough to keep a disk busy, and little compared with what the system buffers
/// in memory.
const STEP_BYTES: u64 = 16 << 20;
/// The most bytes that may be written but not synced. A faster writer waits. Otherwise a sync could have to
/// write a large part of all memory, and a cancellation would wait for that.
const AHEAD_MAX_BYTES: u64 = 64 << 20;

#[derive(Default)]
struct State {
    written_bytes: u64,
    /// How many of these bytes were written before a sync that has ended.
    synced_bytes: u64,
    /// The writer has ended, or the file is no longer needed.
    is_over: bool,
    /// The syncing thread has ended. If `is_over` is false, a sync failed.
    has_ended: bool,
}

/// Tracks what was written and synced.
#[derive(Default)]
pub(crate) struct EarlySync {
    state: Mutex<State>,
    /// Signals that there are bytes to sync, or the end.
    to_sync: Condvar,
    /// Signals that more of the file is on the disk, or that the thread has ended.
    synced: Condvar,
}

impl EarlySync {
    /// Runs `write`, which reports what it wrote to `file`, while another thread syncs the file. Afterwards
    /// the file is not durable yet: its last part and its metadata must still be synced.
    ///
    /// An error of the thread takes precedence. The system reports a failed sync only once, so a later sync
    /// would not notice it, and `write` only knows that there was an error.
    pub(crate) fn beside<E>(
        file: &File,
        failed: impl Fn(io::Error) -> E,
        write: impl FnOnce(&Self) -> Result<(), E>,
    ) -> Result<(), E> {
        let early = Self::default();
        std::thread::scope(|scope| {
            let syncs = || {
                let _ended = Ended(&early);
                early.sync_each_step(file)
            };
            let thread = std::thread::Builder::new()
                .name("sync".into())
                .spawn_scoped(scope, syncs)
                .map_err(&failed)?;
            let over = Over(&early);
            let wrote = write(&early);
            drop(over);
            join(thread).map_err(failed)?;
            wrote
        })
    }

    /// Reports that more was written. Waits if the disk is far behind. Fails if a sync has failed, so that
    /// the caller stops writing.
    pub(crate) fn wrote(&self, bytes: u64) -> io::Result<()> {
        let mut state = self.state.lock();
        state.written_bytes = state.written_bytes.saturating_add(bytes);
        if state.waiting_bytes() >= STEP_BYTES {
            self.to_sync.notify_one();
        }
        while state.waiting_bytes() > AHEAD_MAX_BYTES && !state.has_ended {
            self.synced.wait(&mut state);
        }
        if state.has_ended { Err(io::Error::other("an earlier sync failed")) } else { Ok(()) }
    }

    fn sync_each_step(&self, file: &File) -> io::Result<()> {
        let mut state = self.state.lock();
        loop {
            while !state.is_over && state.waiting_bytes() < STEP_BYTES {
                self.to_sync.wait(&mut state);
            }
            // The rest is left to the final sync, or is removed with the file.
            if state.is_over {
                return Ok(());
            }
            let written_bytes = state.written_bytes;
            drop(state);
            let result = file.sync_data();
            state = self.state.lock();
            result?;
            state.synced_bytes = written_bytes;
            self.synced.notify_all();
        }
    }
}

impl State {
    fn waiting_bytes(&self) -> u64 {
        self.written_bytes.saturating_sub(self.synced_bytes)
    }
}

/// Ends the thread, even if the writer panics.
struct Over<'a>(&'a EarlySync);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.state.lock().is_over = true;
        self.0.to_sync.notify_one();
    }
}

/// Releases waiting writers if the thread ends.
struct Ended<'a>(&'a EarlySync);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.state.lock().has_ended = true;
        self.0.synced.notify_all();
    }
}

fn join(thread: ScopedJoinHandle<'_, io::Result<()>>) -> io::Result<()> {
    thread.join().unwrap_or_else(|_| Err(io::Error::other("a bug: the thread that syncs the file panicked")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sync_that_fails_ends_the_writing_and_is_the_error() {
        // A file that is not on a disk cannot be synced.
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
    fn each_step_is_synced_and_writer_errors_are_returned() {
        let file = tempfile::tempfile().unwrap();
        let ended = EarlySync::beside(
            &file,
            |e| e,
            |early| {
                // Less than a step, a step, and a part that exceeds one.
                for bytes in [STEP_BYTES - 1, 1, 5 * STEP_BYTES + 3, 0] {
                    early.wrote(bytes)?;
                }
                let state = early.state.lock();
                assert_eq!(state.written_bytes, 6 * STEP_BYTES + 3);
                assert!(state.waiting_bytes() <= AHEAD_MAX_BYTES, "it waited for the disk");
                drop(state);
                Err(io::Error::from(io::ErrorKind::StorageFull))
            },
        );
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
