//! Disk I/O behind a small trait: io_uring if the system allows it, otherwise threads.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;

use headwater_block::CompletionQueue;
use parking_lot::Mutex;

use crate::memory::AlignedBuffer;
use crate::panic_guard::without_panic;

/// Called when an operation has ended, on a thread of the engine or in [`CompletionQueue::take`]; must not
/// block.
pub type IoDone = Box<dyn FnOnce(io::Result<()>, AlignedBuffer) + Send>;

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From disk.
    Read,
    /// To disk.
    Write,
}

/// One read or write of `buffer[..len]` at `offset`.
pub struct IoOp {
    /// The file or device.
    pub file: Arc<File>,
    /// The direction.
    pub direction: Direction,
    /// Offset in the file.
    pub offset: u64,
    /// The data, or the space for it; passed back to `done`.
    pub buffer: AlignedBuffer,
    /// Number of bytes.
    pub len: usize,
    /// Receives the result.
    pub done: IoDone,
}

/// Executes [`IoOp`]s. A short transfer is continued; the end of the file before `len` bytes is an error.
pub trait IoEngine: Send + Sync + 'static {
    /// Starts the operation.
    fn submit(&self, op: IoOp);

    /// A queue for the operations that the calling thread submits from now on, if the engine has such queues.
    fn completion_queue(&self) -> Option<Box<dyn CompletionQueue>> {
        None
    }

    /// Makes the file's data durable. This and the following functions are for persistent caches; they block,
    /// and are called on the cache's own thread. Tests replace them.
    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_data()
    }

    /// Writes through the page cache.
    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        file.write_all_at(bytes, offset)
    }

    /// Sets the length of the file.
    fn set_len(&self, file: &File, len: u64) -> io::Result<()> {
        file.set_len(len)
    }

    /// Renames a file, replacing the file with that name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    /// Makes the names in a directory durable.
    fn sync_dir(&self, dir: &File) -> io::Result<()> {
        dir.sync_all()
    }
}

/// The best engine that works on this system.
pub fn open_engine() -> io::Result<Arc<dyn IoEngine>> {
    match super::uring::UringEngine::open() {
        Ok(engine) => Ok(engine),
        Err(error) => {
            tracing::warn!(%error, "io_uring cannot be used here; overflow I/O goes through threads");
            Ok(Arc::new(ThreadEngine::open()?))
        }
    }
}

/// Number of threads of the fallback engine: its queue depth on the disk.
const THREADS: usize = 8;

/// Blocking reads and writes on a few threads. They end when the engine is dropped.
pub struct ThreadEngine {
    queue: mpsc::Sender<IoOp>,
}

impl ThreadEngine {
    /// Starts the threads.
    pub fn open() -> io::Result<Self> {
        let (queue, ops) = mpsc::channel::<IoOp>();
        let ops = Arc::new(Mutex::new(ops));
        for number in 0..THREADS {
            let ops = Arc::clone(&ops);
            std::thread::Builder::new().name(format!("hw-disk-{number}")).spawn(move || {
                loop {
                    let next = ops.lock().recv();
                    let Ok(op) = next else { return };
                    without_panic("a thread of the disk", || run(op));
                }
            })?;
        }
        Ok(Self { queue })
    }
}

fn run(mut op: IoOp) {
    let result = match op.buffer.get_mut(..op.len) {
        None => Err(io::Error::new(io::ErrorKind::InvalidInput, "the buffer is too small")),
        Some(bytes) => match op.direction {
            Direction::Read => op.file.read_exact_at(bytes, op.offset),
            Direction::Write => op.file.write_all_at(bytes, op.offset),
        },
    };
    (op.done)(result, op.buffer);
}

impl IoEngine for ThreadEngine {
    fn submit(&self, op: IoOp) {
        if let Err(mpsc::SendError(op)) = self.queue.send(op) {
            let gone = io::Error::other("the disk threads have ended");
            (op.done)(Err(gone), op.buffer);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn round_trip(engine: &dyn IoEngine) {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let (tx, rx) = mpsc::channel();
        for number in 0..64u8 {
            let mut buffer = AlignedBuffer::new(8192).unwrap();
            buffer.fill(number);
            let tx = tx.clone();
            engine.submit(IoOp {
                file: Arc::clone(&file),
                direction: Direction::Write,
                offset: u64::from(number) * 8192,
                buffer,
                len: 8192,
                done: Box::new(move |result, _| tx.send(result).unwrap()),
            });
        }
        for _ in 0..64 {
            rx.recv().unwrap().unwrap();
        }
        let read = |offset, len| {
            let (tx, rx) = mpsc::channel();
            engine.submit(IoOp {
                file: Arc::clone(&file),
                direction: Direction::Read,
                offset,
                buffer: AlignedBuffer::new(len).unwrap(),
                len,
                done: Box::new(move |result, buffer| tx.send((result, buffer)).unwrap()),
            });
            rx.recv().unwrap()
        };
        for number in 0..64u8 {
            let (result, buffer) = read(u64::from(number) * 8192, 8192);
            result.unwrap();
            assert!(buffer.iter().all(|b| *b == number));
        }
        let (result, _) = read(63 * 8192, 16384);
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn threads_read_what_they_wrote() {
        round_trip(&ThreadEngine::open().unwrap());
    }
}
