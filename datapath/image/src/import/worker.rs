//! The parallel part of an import, on several threads: reads a range of the source, detects zeroes, hashes
//! each chunk, looks it up in the store, checks a chunk that the store has, and compresses a new one.

use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use headwater_block::{Attempt, ByteRange, Completion, Device, Op, Request};
use headwater_store::Hash;
use parking_lot::Mutex;

use crate::chunk::{Packer, is_zero};
use crate::error::{ImageError, ImageErrorKind};
use crate::import::input::Input;
use crate::import::known::KnownChunks;
use crate::import::plan::{Batch, Planner};
use crate::index::HashTable;
use crate::manifest::ChunkRef;
use crate::units::usize_of;

/// How long a worker waits for the source before it checks whether the import is over.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// The result for one chunk of a [`Work`].
pub(super) enum Found {
    /// It is zero.
    Zero,
    /// The store has it.
    Known(ChunkRef),
    /// The chunk is new, and compressed in `start .. start + len` of [`Work::output`].
    Packed { hash: Hash, start: usize, len: usize },
    /// The chunk is new, and this or another `Work` of this import has compressed it.
    Elsewhere(Hash),
}

/// A range of the image on its way from the source to the store. The memory is reused.
pub(super) struct Work {
    pub(super) batch: Batch,
    input: Input,
    pub(super) found: Vec<Found>,
    pub(super) output: Vec<u8>,
}

impl Work {
    pub(super) fn new(work_bytes: usize) -> Self {
        let batch = Batch { sequence: 0, offset: 0, len: 0 };
        Self {
            batch,
            input: Input::with_capacity(work_bytes),
            found: Vec::new(),
            output: vec![0; work_bytes],
        }
    }
}

/// The hashes of new chunks that a worker of this import compresses or has compressed.
#[derive(Default)]
pub(super) struct Claims([Mutex<HashTable<()>>; 16]);

impl Claims {
    /// Whether the caller is the first with this hash, and therefore must compress the chunk.
    fn claim(&self, hash: Hash) -> bool {
        let [.., last] = hash.0;
        match self.0.get(usize::from(last) % self.0.len()) {
            Some(part) => match part.lock().entry(hash) {
                Entry::Occupied(_) => false,
                Entry::Vacant(new) => {
                    new.insert(());
                    true
                }
            },
            None => true,
        }
    }
}

pub(super) type Done = Result<Box<Work>, ImageError>;

pub(super) struct Shared<'a> {
    pub(super) source: Arc<dyn Device>,
    pub(super) planner: Mutex<Planner>,
    pub(super) chunk_bytes: usize,
    pub(super) level: i32,
    pub(super) known: &'a KnownChunks<'a>,
    pub(super) claims: Claims,
    pub(super) free: Mutex<mpsc::Receiver<Box<Work>>>,
    /// The results of the workers are no longer needed.
    pub(super) is_over: AtomicBool,
}

impl Shared<'_> {
    /// One worker: it runs until the plan ends, or the writer has ended.
    pub(super) fn run(&self, done: &mpsc::Sender<Done>) {
        if let Err(e) = self.work(done) {
            // The receiver is gone if another worker failed first.
            let _ = done.send(Err(e));
        }
    }

    fn work(&self, done: &mpsc::Sender<Done>) -> Result<(), ImageError> {
        let mut packer = Packer::new(self.level)?;
        let mut known = vec![0; self.chunk_bytes];
        loop {
            // First a free `Work`, then the next batch: so the batch that the writer waits for always has a
            // `Work`, and a slow worker cannot be starved by the others.
            let Ok(mut work) = self.free.lock().recv() else {
                return Ok(());
            };
            let Some(batch) = self.planner.lock().next()? else {
                return Ok(());
            };
            work.batch = batch;
            self.read(&mut work)?;
            self.process(&mut work, &mut packer, &mut known)?;
            if done.send(Ok(work)).is_err() {
                return Ok(());
            }
        }
    }

    /// Fills `work.input` with the batch, and with zeroes after the end of the image.
    fn read(&self, work: &mut Work) -> Result<(), ImageError> {
        let Batch { offset, len, .. } = work.batch;
        let range = ByteRange::new(offset, len)
            .ok_or_else(|| ImageError::new(ImageErrorKind::Invalid, "the source is too large"))?;
        let into = work.input.page_of(usize_of(len));
        if self.source.try_now(Op::Read { range, into })? == Attempt::MustWait {
            let buffer = work.input.take(usize_of(len));
            work.input = Input::from(self.wait(Request::Read { range, buffer })?);
        }
        work.input.fill_up(self.chunk_bytes);
        Ok(())
    }

    /// Waits for the source, unless the import is over. An abandoned request owns its buffer, and its
    /// completion does nothing.
    fn wait(&self, request: Request) -> Result<Vec<u8>, ImageError> {
        let (tx, rx) = mpsc::sync_channel(1);
        // The receiver may be dropped by then.
        self.source.submit(request, Completion::new(move |outcome| drop(tx.send(outcome))));
        loop {
            match rx.recv_timeout(LOOK_INTERVAL) {
                Ok(outcome) => return Ok(outcome.result.map(|()| outcome.buffer)?),
                Err(RecvTimeoutError::Timeout) if !self.is_over.load(Ordering::Acquire) => {}
                Err(_) => {
                    let why = "the import ended before the source answered a read";
                    return Err(ImageError::new(ImageErrorKind::Cancelled, why));
                }
            }
        }
    }

    fn process(&self, work: &mut Work, packer: &mut Packer, known: &mut Vec<u8>) -> Result<(), ImageError> {
        work.found.clear();
        let mut used = 0;
        for chunk in work.input.bytes().chunks_exact(self.chunk_bytes) {
            if is_zero(chunk) {
                work.found.push(Found::Zero);
                continue;
            }
            let hash = Hash::of(chunk);
            let found = if let Some(known) = self.known.find(&hash, known)? {
                Found::Known(known)
            } else if self.claims.claim(hash) {
                let target = work.output.get_mut(used..).unwrap_or_default();
                let len = packer.pack(chunk, target);
                let start = used;
                used += len;
                Found::Packed { hash, start, len }
            } else {
                Found::Elsewhere(hash)
            };
            work.found.push(found);
        }
        Ok(())
    }
}
