//! The simplest correct device: a `Vec<u8>`, with delays, disorder and errors on demand.
//!
//! `try_now` answers a request that "waits" ([`Waits`]) with `MustWait`. `submit` then puts it on a list,
//! from which one worker thread takes requests in random order. So completions come late, from another thread
//! and out of order. [`ReferenceDisk::hold`] stops that thread until [`ReferenceDisk::release`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, IoErrorKind, Op, Pages,
    Request, SharedSlice,
};
use parking_lot::{Condvar, Mutex};

use crate::random::Rng;

/// Which requests `try_now` does not finish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// None: all are finished on the caller's thread.
    Never,
    /// This many of a thousand, by the disk's seed.
    PerMille(u32),
    /// All.
    Always,
}

/// How a [`ReferenceDisk`] behaves.
#[derive(Clone, Debug)]
pub struct ReferenceOptions {
    /// 512 or 4096.
    pub logical_block_bytes: u32,
    /// Refuse writes.
    pub read_only: bool,
    /// The volatile caching that the geometry reports.
    pub volatile_cache: bool,
    /// Which requests must wait.
    pub waits: Waits,
    /// Share pages for reads, in parts like an image's chunks.
    pub lends: bool,
    /// How long the worker sleeps before each late request.
    pub delay: Duration,
    /// Seed for which requests wait, and for the order of late requests.
    pub seed: u64,
}

impl Default for ReferenceOptions {
    fn default() -> Self {
        Self {
            logical_block_bytes: 512,
            read_only: false,
            volatile_cache: true,
            waits: Waits::Never,
            lends: false,
            delay: Duration::ZERO,
            seed: 1,
        }
    }
}

/// How many requests of each kind a disk executed, successful or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Writes and zero writes with FUA.
    pub fua: u64,
    /// Zero writes.
    pub zeroes: u64,
    /// Zero writes that may unmap.
    pub unmapping_zeroes: u64,
    /// Discards.
    pub discards: u64,
    /// Flushes.
    pub flushes: u64,
    /// Prefetches.
    pub prefetches: u64,
    /// Requests that went through `submit`.
    pub submitted: u64,
    /// Writes that were stored together with others.
    pub together: u64,
}

struct Content {
    bytes: Vec<u8>,
    /// One for each logical block.
    kinds: Vec<ExtentKind>,
    rng: Rng,
    failures: Vec<(ByteRange, IoErrorKind)>,
    counts: Counts,
}

#[derive(Default)]
struct Late {
    requests: Vec<(Request, Completion)>,
    held: bool,
    closing: bool,
}

struct Shared {
    geometry: Geometry,
    waits: Waits,
    lends: bool,
    delay: Duration,
    content: Mutex<Content>,
    late: Mutex<Late>,
    wake: Condvar,
    most_waiting: AtomicU64,
}

/// Shared pages are cut at multiples of this.
const SHARED_BYTES: u64 = 64 << 10;

/// A disk in memory. See the module's documentation.
pub struct ReferenceDisk {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
}

impl ReferenceDisk {
    /// An empty disk that answers at once.
    pub fn new(size_bytes: u64) -> Self {
        Self::with_options(size_bytes, ReferenceOptions::default())
    }

    /// An empty disk.
    pub fn with_options(size_bytes: u64, options: ReferenceOptions) -> Self {
        let block = u64::from(options.logical_block_bytes);
        assert!(size_bytes.is_multiple_of(block), "size {size_bytes} is no multiple of {block}");
        let blocks = (size_bytes / block) as usize;
        Self::build(vec![0; size_bytes as usize], vec![ExtentKind::Hole; blocks], options)
    }

    /// A disk with contents, all of it data, zeroes included.
    pub fn with_contents(bytes: Vec<u8>, options: ReferenceOptions) -> Self {
        let block = options.logical_block_bytes as usize;
        assert!(bytes.len().is_multiple_of(block), "size {} is no multiple of {block}", bytes.len());
        let blocks = bytes.len() / block;
        Self::build(bytes, vec![ExtentKind::Data; blocks], options)
    }

    fn build(bytes: Vec<u8>, kinds: Vec<ExtentKind>, options: ReferenceOptions) -> Self {
        let geometry = Geometry {
            size_bytes: bytes.len() as u64,
            logical_block_bytes: options.logical_block_bytes,
            physical_block_bytes: 4096,
            read_only: options.read_only,
            volatile_cache: options.volatile_cache,
        };
        let mut rng = Rng::new(options.seed);
        let worker_rng = rng.fork();
        let shared = Arc::new(Shared {
            geometry,
            waits: options.waits,
            lends: options.lends,
            delay: options.delay,
            content: Mutex::new(Content {
                bytes,
                kinds,
                rng,
                failures: Vec::new(),
                counts: Counts::default(),
            }),
            late: Mutex::new(Late::default()),
            wake: Condvar::new(),
            most_waiting: AtomicU64::new(0),
        });
        let worker = (options.waits != Waits::Never).then(|| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name("reference-disk".into())
                .spawn(move || shared.work(worker_rng))
                .expect("a thread for the reference disk")
        });
        Self { shared, worker }
    }

    /// A copy of the contents.
    pub fn contents(&self) -> Vec<u8> {
        self.shared.content.lock().bytes.clone()
    }

    /// The requests that the disk has received so far.
    pub fn counts(&self) -> Counts {
        self.shared.content.lock().counts
    }

    /// Fails each request that touches `range`, until [`ReferenceDisk::heal`].
    pub fn fail(&self, range: ByteRange, kind: IoErrorKind) {
        self.shared.content.lock().failures.push((range, kind));
    }

    /// Ends all failures.
    pub fn heal(&self) {
        self.shared.content.lock().failures.clear();
    }

    /// Keeps late requests unanswered from now on.
    pub fn hold(&self) {
        self.shared.late.lock().held = true;
    }

    /// Answers late requests again.
    pub fn release(&self) {
        self.shared.late.lock().held = false;
        self.shared.wake.notify_one();
    }

    /// How many requests wait now.
    pub fn waiting(&self) -> usize {
        self.shared.late.lock().requests.len()
    }

    /// The most requests that ever waited at the same time.
    pub fn most_waiting(&self) -> u64 {
        self.shared.most_waiting.load(Ordering::Relaxed)
    }
}

impl Drop for ReferenceDisk {
    fn drop(&mut self) {
        {
            let mut late = self.shared.late.lock();
            late.closing = true;
            late.held = false;
        }
        self.shared.wake.notify_one();
        if let Some(worker) = self.worker.take() {
            // The last completion may drop the last reference to the disk on the worker itself.
            if worker.thread().id() != std::thread::current().id() {
                let _ = worker.join();
            }
        }
    }
}

impl Shared {
    fn work(&self, mut rng: Rng) {
        loop {
            {
                let mut late = self.late.lock();
                while late.held || late.requests.is_empty() {
                    if late.closing && late.requests.is_empty() {
                        return;
                    }
                    self.wake.wait(&mut late);
                }
            }
            if !self.delay.is_zero() {
                std::thread::sleep(self.delay);
            }
            let (request, done) = {
                let mut late = self.late.lock();
                if late.held {
                    continue;
                }
                let pick = rng.index(late.requests.len());
                late.requests.swap_remove(pick)
            };
            self.finish(request, done);
        }
    }

    fn finish(&self, mut request: Request, done: Completion) {
        let result = match &mut request {
            Request::Read { range, buffer } => self.apply(Op::Read { range: *range, into: buffer }),
            Request::Write { range, buffer, fua } => {
                self.apply(Op::Write { range: *range, from: buffer, fua: *fua })
            }
            Request::WriteZeroes { range, may_unmap, fua } => {
                self.apply(Op::WriteZeroes { range: *range, may_unmap: *may_unmap, fua: *fua })
            }
            Request::Discard { range } => self.apply(Op::Discard { range: *range }),
            Request::Flush => self.apply(Op::Flush),
            Request::Prefetch { .. } => {
                self.content.lock().counts.prefetches += 1;
                Ok(())
            }
        };
        done.complete(result, request.into_buffer());
    }

    fn apply(&self, op: Op<'_>) -> Result<(), IoError> {
        let mut content = self.content.lock();
        let range = range_of(&op);
        content.count(&op);
        if let Some(range) = range {
            self.geometry.check(range)?;
            content.injected(range)?;
        }
        if self.geometry.read_only && !matches!(op, Op::Read { .. } | Op::Flush) {
            return Err(IoError::new(IoErrorKind::ReadOnly, "write to a read-only reference disk"));
        }
        let block = self.geometry.logical_block_bytes as usize;
        match op {
            Op::Read { range, into } => into.copy_from_slice(&content.bytes[span(range, 1)]),
            Op::Write { range, from, .. } => {
                content.bytes[span(range, 1)].copy_from_slice(from);
                content.kinds[span(range, block)].fill(ExtentKind::Data);
            }
            Op::WriteZeroes { range, may_unmap, .. } => {
                let kind = if may_unmap { ExtentKind::Hole } else { ExtentKind::Zero };
                content.clear(range, block, kind);
            }
            Op::Discard { range } => content.clear(range, block, ExtentKind::Hole),
            Op::Flush => {}
        }
        Ok(())
    }
}

impl Content {
    fn clear(&mut self, range: ByteRange, block: usize, kind: ExtentKind) {
        self.bytes[span(range, 1)].fill(0);
        self.kinds[span(range, block)].fill(kind);
    }

    fn injected(&self, range: ByteRange) -> Result<(), IoError> {
        for (bad, kind) in &self.failures {
            if range.offset() < bad.end() && bad.offset() < range.end() {
                return Err(IoError::new(*kind, format!("injected failure of {range}")));
            }
        }
        Ok(())
    }

    fn count(&mut self, op: &Op<'_>) {
        match op {
            Op::Read { .. } => self.counts.reads += 1,
            Op::Write { fua, .. } => {
                self.counts.writes += 1;
                self.counts.fua += u64::from(*fua);
            }
            Op::WriteZeroes { may_unmap, fua, .. } => {
                self.counts.zeroes += 1;
                self.counts.unmapping_zeroes += u64::from(*may_unmap);
                self.counts.fua += u64::from(*fua);
            }
            Op::Discard { .. } => self.counts.discards += 1,
            Op::Flush => self.counts.flushes += 1,
        }
    }
}

impl Device for ReferenceDisk {
    fn geometry(&self) -> Geometry {
        self.shared.geometry
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        let waits = match self.shared.waits {
            Waits::Never => false,
            Waits::Always => true,
            Waits::PerMille(share) => self.shared.content.lock().rng.chance(u64::from(share), 1000),
        };
        if waits {
            return Ok(Attempt::MustWait);
        }
        self.shared.apply(op).map(|()| Attempt::Done)
    }

    fn write_together(&self, writes: &[(ByteRange, &[u8])], done: &mut [bool]) {
        for ((range, from), done) in writes.iter().zip(done) {
            // Some are left to their caller.
            let tries = self.shared.content.lock().rng.chance(3, 4);
            let op = Op::Write { range: *range, from, fua: false };
            *done = tries && matches!(self.try_now(op), Ok(Attempt::Done));
            self.shared.content.lock().counts.together += u64::from(*done);
        }
    }

    fn read_shared(&self, range: ByteRange, parts: &mut Vec<SharedSlice>) -> bool {
        let content = self.shared.content.lock();
        if !self.shared.lends || content.injected(range).is_err() {
            return false;
        }
        let mut at = range.offset();
        while at < range.end() {
            let end = (at + 1).next_multiple_of(SHARED_BYTES).min(range.end());
            let part = Pages::copy_of(&content.bytes[at as usize..end as usize]).unwrap();
            parts.extend(SharedSlice::new(part.share(), 0, (end - at) as usize));
            at = end;
        }
        true
    }

    fn submit(&self, request: Request, done: Completion) {
        self.shared.content.lock().counts.submitted += 1;
        if self.worker.is_none() {
            self.shared.finish(request, done);
            return;
        }
        let mut late = self.shared.late.lock();
        late.requests.push((request, done));
        self.shared.most_waiting.fetch_max(late.requests.len() as u64, Ordering::Relaxed);
        drop(late);
        self.shared.wake.notify_one();
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        self.shared.geometry.check(range)?;
        let content = self.shared.content.lock();
        content.injected(range)?;
        let block = u64::from(self.shared.geometry.logical_block_bytes);
        let mut extents: Vec<Extent> = Vec::new();
        for kind in &content.kinds[span(range, block as usize)] {
            let room = extents.len() < max_extents;
            match extents.last_mut() {
                Some(last) if last.kind == *kind => last.len += block,
                _ if !room => break,
                _ => extents.push(Extent { len: block, kind: *kind }),
            }
        }
        Ok(extents)
    }
}

fn range_of(op: &Op<'_>) -> Option<ByteRange> {
    match op {
        Op::Read { range, .. }
        | Op::Write { range, .. }
        | Op::WriteZeroes { range, .. }
        | Op::Discard { range } => Some(*range),
        Op::Flush => None,
    }
}

/// The range in units of `unit` bytes, as indices.
fn span(range: ByteRange, unit: usize) -> std::ops::Range<usize> {
    range.offset() as usize / unit..range.end() as usize / unit
}

#[cfg(test)]
mod tests {
    use super::*;
    use headwater_block::blocking;
    use std::sync::mpsc;

    #[test]
    fn late_requests_complete_out_of_order_and_only_when_released() {
        let options = ReferenceOptions { waits: Waits::Always, ..Default::default() };
        let disk = ReferenceDisk::with_options(1 << 20, options);
        disk.hold();
        let (tx, rx) = mpsc::channel();
        for number in 0..32_u64 {
            let tx = tx.clone();
            let range = ByteRange::new(number * 4096, 4096).unwrap();
            let request = Request::Read { range, buffer: vec![1; 4096] };
            disk.submit(request, Completion::new(move |_| tx.send(number).unwrap()));
        }
        assert_eq!(disk.waiting(), 32);
        assert!(rx.try_recv().is_err());
        disk.release();
        let mut order: Vec<u64> = (0..32).map(|_| rx.recv().unwrap()).collect();
        assert!(!order.is_sorted());
        order.sort_unstable();
        assert_eq!(order, (0..32).collect::<Vec<_>>());
    }

    #[test]
    fn injected_failures_hit_their_range_until_healed() {
        let disk = ReferenceDisk::new(1 << 20);
        disk.fail(ByteRange::new(4096, 4096).unwrap(), IoErrorKind::NoSpace);
        let error = blocking::write(&disk, 0, &[1; 8192]).unwrap_err();
        assert_eq!(error.kind(), IoErrorKind::NoSpace);
        blocking::write(&disk, 8192, &[1; 512]).unwrap();
        disk.heal();
        blocking::write(&disk, 0, &[1; 8192]).unwrap();
    }

    #[test]
    fn extents_tell_data_holes_and_zeroes_apart() {
        let disk = ReferenceDisk::new(16384);
        blocking::write(&disk, 512, &[1; 1024]).unwrap();
        let zeroes =
            Op::WriteZeroes { range: ByteRange::new(8192, 4096).unwrap(), may_unmap: false, fua: false };
        assert_eq!(disk.try_now(zeroes).unwrap(), Attempt::Done);
        let all = disk.extents(ByteRange::new(0, 16384).unwrap(), 16).unwrap();
        let kinds: Vec<_> = all.iter().map(|e| (e.len, e.kind)).collect();
        let expected = [
            (512, ExtentKind::Hole),
            (1024, ExtentKind::Data),
            (6656, ExtentKind::Hole),
            (4096, ExtentKind::Zero),
            (4096, ExtentKind::Hole),
        ];
        assert_eq!(kinds, expected);
        assert_eq!(disk.extents(ByteRange::new(0, 16384).unwrap(), 2).unwrap().len(), 2);
    }
}
