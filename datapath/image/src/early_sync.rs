//! A long file that goes to the disk while the rest of it is made, rather than all at the end.

use std::fs::File;
use std::io;
use std::thread::ScopedJoinHandle;

use parking_lot::{Condvar, Mutex};

/// So much is left to the last sync, or to the next one: enough for a disk to be busy with, and little beside what
/// the system lets wait in memory.
const STEP_BYTES: u64 = 16 << 20;
/// So much may be written before the disk has it. Who writes faster waits: else one sync would come to have a part of all
/// memory before it, and whoever cancels would wait for that.
const AHEAD_MAX_BYTES: u64 = 64 << 20;

#[derive(Default)]
struct State {
    written_bytes: u64,
    /// Of which so many were written before a sync that has ended.
    synced_bytes: u64,
    /// Nobody writes any more, or wants what was written.
    is_over: bool,
    /// Nothing is synced any more: a sync failed, if it is not over.
    has_ended: bool,
}

/// What is told of what was written.
#[derive(Default)]
pub(crate) struct EarlySync {
    state: Mutex<State>,
    /// There is a step to be synced, or the end.
    to_sync: Condvar,
    /// The disk has more of it, or takes no more.
    synced: Condvar,
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

    /// More was written. Waits for the disk where that is far behind, and fails where a sync has failed, so that nobody writes on in vain.
    pub(crate) fn wrote(&self, bytes: u64) -> io::Result<()> {
        let mut state = self.state.lock();
        state.written_bytes = state.written_bytes.saturating_add(bytes);
        if state.waiting_bytes() >= STEP_BYTES {
            self.to_sync.notify_one();
        }
        while state.waiting_bytes() > AHEAD_MAX_BYTES && !state.has_ended {
            self.synced.wait(&mut state);
        }
        if state.has_ended { Err(io::Error::other("the disk took no more")) } else { Ok(()) }
    }

    fn sync_each_step(&self, file: &File) -> io::Result<()> {
        let mut state = self.state.lock();
        loop {
            while !state.is_over && state.waiting_bytes() < STEP_BYTES {
                self.to_sync.wait(&mut state);
            }
            // What is left is for the sync of all, or goes with the file.
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

/// Ends the thread, also where the writer panics.
struct Over<'a>(&'a EarlySync);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.state.lock().is_over = true;
        self.0.to_sync.notify_one();
    }
}

/// Lets nobody wait for a thread that is gone.
struct Ended<'a>(&'a EarlySync);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.state.lock().has_ended = true;
        self.0.synced.notify_all();
    }
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
