//! A disk in memory. Its threads take operations in any order and carry them out in two halves; of the first
//! ones some fail, after their first half.

use std::io;
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

/// See the file's head.
pub struct Disk {
    queue: Mutex<Queue>,
    wake: Condvar,
    /// Of all caches: the file is not looked at. Locked for one copy, without a change of threads in it.
    bytes: std::sync::Mutex<Vec<u8>>,
    faults: AtomicU32,
}

impl Disk {
    /// An empty disk; so many operations fail at most.
    pub fn new(faults: u32) -> Self {
        Self {
            queue: Mutex::default(),
            wake: Condvar::new(),
            bytes: std::sync::Mutex::default(),
            faults: AtomicU32::new(faults),
        }
    }

    /// A disk thread.
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

    /// Ends the threads, once nothing is left to do.
    pub fn stop(&self) {
        self.queue.lock().unwrap().stopped = true;
        self.wake.notify_all();
    }

    fn carry_out(&self, mut op: IoOp) {
        let half = op.len / 2;
        self.transfer(&mut op, 0..half);
        // Others go on here.
        AtomicBool::new(false).load(Ordering::SeqCst);
        let fails = self.faults.load(Ordering::Relaxed) > 0 && shuttle::rand::thread_rng().gen_bool(0.3);
        let result = if fails {
            self.faults.fetch_sub(1, Ordering::Relaxed);
            Err(io::Error::other("injected"))
        } else {
            let len = op.len;
            self.transfer(&mut op, half..len);
            Ok(())
        };
        (op.done)(result, op.buffer);
    }

    fn transfer(&self, op: &mut IoOp, range: std::ops::Range<usize>) {
        let start = usize::try_from(op.offset).unwrap() + range.start;
        let end = start + range.len();
        let mut bytes = self.bytes.lock().unwrap();
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        match op.direction {
            Direction::Write => bytes[start..end].copy_from_slice(&op.buffer[range]),
            Direction::Read => op.buffer[range].copy_from_slice(&bytes[start..end]),
        }
    }
}

impl IoEngine for Disk {
    fn submit(&self, op: IoOp) {
        self.queue.lock().unwrap().ops.push(op);
        self.wake.notify_one();
    }

    fn name(&self) -> &'static str {
        "explored"
    }
}
