//! A disk in memory. Its threads take operations in any order and execute them in two halves. Some of the
//! first operations fail after their first half, and some writes are dropped without an answer. It knows what
//! a power cut would leave.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use headwater_writecache::overflow::io::{Direction, IoEngine, IoOp};
use shuttle::rand::Rng;
use shuttle::sync::atomic::AtomicBool;
use shuttle::sync::{Condvar, Mutex};

#[derive(Default)]
struct Queue {
    ops: Vec<IoOp>,
    stopped: bool,
}

/// The contents of a file, and the part of them that survives for certain.
#[derive(Clone, Default)]
struct Contents {
    live: Vec<u8>,
    durable: Vec<u8>,
}

/// By the real file's inode number. The real files stay empty; their lengths and names are real.
type Files = HashMap<u64, Contents>;

/// A disk in memory; see the module's documentation.
pub struct Disk {
    queue: Mutex<Queue>,
    wake: Condvar,
    /// Locked for one copy, in which no thread switch happens.
    files: std::sync::Mutex<Files>,
    faults: AtomicU32,
    given_up: AtomicU32,
    renames: AtomicU32,
}

fn number(file: &File) -> u64 {
    file.metadata().unwrap().ino()
}

fn put(bytes: &mut Vec<u8>, at: usize, from: &[u8]) {
    if bytes.len() < at + from.len() {
        bytes.resize(at + from.len(), 0);
    }
    bytes[at..at + from.len()].copy_from_slice(from);
}

/// Lets other threads run.
fn point() {
    AtomicBool::new(false).load(Ordering::SeqCst);
}

impl Disk {
    /// An empty disk on which at most `faults` operations fail.
    pub fn new(faults: u32) -> Self {
        Self {
            queue: Mutex::default(),
            wake: Condvar::new(),
            files: std::sync::Mutex::default(),
            faults: AtomicU32::new(faults),
            given_up: AtomicU32::new(0),
            renames: AtomicU32::new(0),
        }
    }

    /// From now on at most `faults` operations fail.
    pub fn fail_some(&self, faults: u32) {
        self.faults.store(faults, Ordering::Relaxed);
    }

    /// Number of writes that were dropped without an answer.
    pub fn given_up(&self) -> u32 {
        self.given_up.load(Ordering::Relaxed)
    }

    /// Number of renames over an existing file.
    pub fn renames(&self) -> u32 {
        self.renames.load(Ordering::Relaxed)
    }

    /// A disk with a file of these bytes.
    pub fn with_file(file: &File, bytes: Vec<u8>) -> Self {
        let disk = Self::new(0);
        disk.files.lock().unwrap().insert(number(file), Contents { live: bytes.clone(), durable: bytes });
        disk
    }

    /// The contents of a file if the power is cut now: the last synced ones, or all that was written.
    pub fn left_of(&self, file: &File) -> Vec<u8> {
        let all = shuttle::rand::thread_rng().gen_bool(0.5);
        let files = self.files.lock().unwrap();
        let contents = files.get(&number(file)).cloned().unwrap_or_default();
        if all { contents.live } else { contents.durable }
    }

    /// Runs a disk thread.
    pub fn run(&self) {
        loop {
            let mut queue = self.queue.lock().unwrap();
            while queue.ops.is_empty() {
                if queue.stopped {
                    return;
                }
                queue = self.wake.wait(queue).unwrap();
            }
            let which = shuttle::rand::thread_rng().gen_range(0..queue.ops.len());
            let op = queue.ops.swap_remove(which);
            drop(queue);
            self.carry_out(op);
        }
    }

    /// Ends the threads when all operations are done.
    pub fn stop(&self) {
        self.queue.lock().unwrap().stopped = true;
        self.wake.notify_all();
    }

    fn fails(&self) -> bool {
        let fails = self.faults.load(Ordering::Relaxed) > 0 && shuttle::rand::thread_rng().gen_bool(0.3);
        if fails {
            self.faults.fetch_sub(1, Ordering::Relaxed);
        }
        fails
    }

    fn carry_out(&self, mut op: IoOp) {
        let half = op.len / 2;
        self.transfer(&mut op, 0..half);
        point();
        let result = if self.fails() {
            if op.direction == Direction::Write && shuttle::rand::thread_rng().gen_bool(0.5) {
                // As if the thread that executes it panicked.
                self.given_up.fetch_add(1, Ordering::Relaxed);
                return;
            }
            Err(io::Error::other("injected"))
        } else {
            let len = op.len;
            self.transfer(&mut op, half..len);
            Ok(())
        };
        (op.done)(result, op.buffer);
    }

    fn transfer(&self, op: &mut IoOp, range: Range<usize>) {
        let start = usize::try_from(op.offset).unwrap() + range.start;
        let end = start + range.len();
        let mut files = self.files.lock().unwrap();
        let bytes = &mut files.entry(number(&op.file)).or_default().live;
        match op.direction {
            Direction::Write => put(bytes, start, &op.buffer[range]),
            Direction::Read => {
                bytes.resize(bytes.len().max(end), 0);
                op.buffer[range].copy_from_slice(&bytes[start..end]);
            }
        }
    }
}

impl IoEngine for Disk {
    fn submit(&self, op: IoOp) {
        self.queue.lock().unwrap().ops.push(op);
        self.wake.notify_one();
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        point();
        let mut files = self.files.lock().unwrap();
        let contents = files.entry(number(file)).or_default();
        contents.durable.clone_from(&contents.live);
        drop(files);
        point();
        Ok(())
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        let at = usize::try_from(offset).unwrap();
        if at == 0 && bytes.starts_with(b"HWCACHE") {
            // A new map may have the inode number of a removed file.
            self.files.lock().unwrap().remove(&number(file));
        }
        let (first, rest) = bytes.split_at(bytes.len() / 2);
        put(&mut self.files.lock().unwrap().entry(number(file)).or_default().live, at, first);
        point();
        if self.fails() {
            return Err(io::Error::other("injected"));
        }
        put(&mut self.files.lock().unwrap().entry(number(file)).or_default().live, at + first.len(), rest);
        Ok(())
    }

    fn set_len(&self, file: &File, len: u64) -> io::Result<()> {
        let len = usize::try_from(len).unwrap();
        self.files.lock().unwrap().entry(number(file)).or_default().live.resize(len, 0);
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.renames.fetch_add(1, Ordering::Relaxed);
        std::fs::rename(from, to)
    }

    fn sync_dir(&self, _: &File) -> io::Result<()> {
        Ok(())
    }
}
