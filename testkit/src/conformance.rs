//! A test suite that every [`Device`] must pass. It compares the device with an exact model.
//!
//! 1. The part of the device that is used ([`Options::span_bytes`]: half at its start, half at its end) is
//!    read and becomes the model.
//! 2. It is divided among threads at logical blocks that are *not* 4 KiB boundaries, so neighbours share
//!    blocks. Each thread executes random operations on its own part and compares each read with its own
//!    model. It alternates between single requests through `try_now` and `submit`, rounds of disjoint
//!    requests in flight together, and rounds of overlapping writes. After the latter each 4 KiB block must
//!    contain the whole of one of the writes. Every other time the writes of a round are offered to
//!    `write_together`.
//! 3. When all threads have finished, everything is read once more, and `extents` is checked over all of it.
//!
//! Written contents are random, compressible, zero, or equal to the existing ones, because devices treat
//! these differently. Discarded and zeroed ranges must read as zeroes, and extents may call a range `Hole` or
//! `Zero` only where the model has zeroes. A device that may be full ([`Options::may_refuse`]) may refuse
//! writes and zero writes, never a read or a discard. The suite then determines which blocks the refused
//! request has changed.

use std::fmt::Write as _;
use std::sync::{Arc, mpsc};

use headwater_block::{
    Attempt, ByteRange, Completion, Device, ExtentKind, IoError, IoErrorKind, Op, Outcome, Request, blocking,
};

use crate::random::Rng;

/// The unit in which overlapping writes are atomic.
const BLOCK_BYTES: u64 = 4096;

/// The amount of work.
#[derive(Clone, Debug)]
pub struct Options {
    /// Seed of all randomness.
    pub seed: u64,
    /// Operations of each thread.
    pub operations: u32,
    /// Concurrent threads, each on its own part.
    pub threads: u32,
    /// How much of the device is used, at most.
    pub span_bytes: u64,
    /// Longest request.
    pub max_request_bytes: u64,
    /// Requests in flight together from one thread.
    pub in_flight: u32,
    /// Writes and zero writes may be refused with [`IoErrorKind::NoSpace`]. After a refusal each 4 KiB block
    /// of the request has either its old or its new contents completely, and nothing else has changed. A
    /// discard is not refused, and may leave parts of blocks at its ends as they are.
    pub may_refuse: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            seed: 1,
            operations: 600,
            threads: 3,
            span_bytes: 8 << 20,
            max_request_bytes: 256 << 10,
            in_flight: 8,
            may_refuse: false,
        }
    }
}

impl Options {
    /// The defaults with another seed.
    pub fn seeded(seed: u64) -> Self {
        Self { seed, ..Self::default() }
    }
}

/// Runs the suite; panics with the seed and the operation at the first error.
///
/// A read-only device is checked by [`check_read_only`] instead. Returns the bytes of the used part, for
/// comparison after reopening: see [`verify`].
pub fn check(device: &Arc<dyn Device>, options: &Options) -> Model {
    if device.geometry().read_only {
        return check_read_only(device, options);
    }
    let model = Model::read(&**device, options.span_bytes);
    let mut rng = Rng::new(options.seed);
    let parts = model.cut(options.threads, device.geometry().logical_block_bytes, &mut rng);
    let workers: Vec<_> = parts
        .into_iter()
        .enumerate()
        .map(|(number, part)| {
            let mut worker = Worker {
                device: Arc::clone(device),
                name: format!("seed {} thread {number}", options.seed),
                options: options.clone(),
                rng: rng.fork(),
                part,
            };
            std::thread::spawn(move || worker.run())
        })
        .collect();
    // All threads are joined before the first failure is passed on, so that its message is printed last.
    let ends: Vec<_> = workers.into_iter().map(std::thread::JoinHandle::join).collect();
    let mut parts = Vec::new();
    for end in ends {
        match end {
            Ok(part) => parts.push(part),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
    let model = Model { parts };
    verify(&**device, &model);
    blocking::flush(&**device).expect("flush after the suite");
    model
}

/// Checks that reads are stable, that extents agree with contents, and that every change is refused with
/// [`IoErrorKind::ReadOnly`] and has no effect.
pub fn check_read_only(device: &Arc<dyn Device>, options: &Options) -> Model {
    assert!(device.geometry().read_only, "the device says that it can be written");
    let model = Model::read(&**device, options.span_bytes);
    let block = u64::from(device.geometry().logical_block_bytes);
    let mut rng = Rng::new(options.seed);
    for number in 0..options.operations {
        let part = &model.parts[rng.index(model.parts.len())];
        if part.bytes.is_empty() {
            continue;
        }
        let range = part.random_range(&mut rng, block, options.max_request_bytes);
        let name = format!("seed {} operation {number} on {range}", options.seed);
        if rng.chance(3, 4) {
            part.check_shared(&**device, range, &name);
            let bytes = carry_out(&**device, read_of(range), rng.chance(1, 2))
                .unwrap_or_else(|e| panic!("{name}: read failed: {e}"));
            part.compare(range, &bytes, &name);
            continue;
        }
        let request = match rng.below(3) {
            0 => Request::Write { range, buffer: rng.bytes(range.len() as usize), fua: false },
            1 => Request::WriteZeroes { range, may_unmap: true, fua: false },
            _ => Request::Discard { range },
        };
        let text = format!("{name}: {}", describe(&request));
        let error =
            carry_out(&**device, request, rng.chance(1, 2)).expect_err(&format!("{text} was not refused"));
        assert_eq!(error.kind(), IoErrorKind::ReadOnly, "{text}: {error}");
    }
    verify(&**device, &model);
    model
}

/// Compares a device with a model: contents, and that extents agree with contents.
pub fn verify(device: &dyn Device, model: &Model) {
    for part in &model.parts {
        let mut at = part.offset;
        for chunk in part.bytes.chunks(1 << 20) {
            let range = ByteRange::new(at, chunk.len() as u64).expect("a range of the device");
            let mut bytes = vec![0xa5; chunk.len()];
            blocking::read(device, at, &mut bytes)
                .unwrap_or_else(|e| panic!("verify: read of {range} failed: {e}"));
            part.compare(range, &bytes, "verify");
            at += chunk.len() as u64;
        }
        part.walk_extents(device, usize::MAX);
        part.walk_extents(device, 3);
    }
}

/// The expected contents of a part of a device.
#[derive(Clone)]
pub struct Model {
    parts: Vec<Part>,
}

#[derive(Clone)]
struct Part {
    offset: u64,
    bytes: Vec<u8>,
}

impl Model {
    /// Reads the first and the last `span_bytes / 2` of a device.
    pub fn read(device: &dyn Device, span_bytes: u64) -> Self {
        let geometry = device.geometry();
        let block = u64::from(geometry.logical_block_bytes);
        let size = geometry.size_bytes;
        let half = (span_bytes / 2).next_multiple_of(block);
        let parts = if size <= half.saturating_mul(2) {
            vec![(0, size)]
        } else {
            vec![(0, half), (size - half, half)]
        };
        let parts = parts
            .into_iter()
            .map(|(offset, len)| {
                let mut bytes = vec![0; len as usize];
                for (number, chunk) in bytes.chunks_mut(1 << 20).enumerate() {
                    let at = offset + ((number as u64) << 20);
                    blocking::read(device, at, chunk)
                        .unwrap_or_else(|e| panic!("first read of {} at {at}: {e}", chunk.len()));
                }
                Part { offset, bytes }
            })
            .collect();
        Self { parts }
    }

    /// How many bytes the model covers.
    pub fn len(&self) -> usize {
        self.parts.iter().map(|p| p.bytes.len()).sum()
    }

    /// Whether it covers no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Divides each part among `threads` at random logical blocks.
    fn cut(self, threads: u32, block_bytes: u32, rng: &mut Rng) -> Vec<Part> {
        let block = block_bytes as usize;
        let each = (threads as usize).div_ceil(self.parts.len().max(1)).max(1);
        let mut out = Vec::new();
        for mut part in self.parts {
            let blocks = part.bytes.len() / block;
            for left in (1..each).rev() {
                let share = blocks / each;
                // Moves the boundary by up to seven blocks: with 512-byte blocks it falls inside a 4 KiB
                // block.
                let keep = (share * left).saturating_sub(rng.index(8)) * block;
                let tail = part.bytes.split_off(keep.min(part.bytes.len()));
                out.push(Part { offset: part.offset + part.bytes.len() as u64, bytes: tail });
            }
            out.push(part);
        }
        out
    }
}

impl Part {
    fn end(&self) -> u64 {
        self.offset + self.bytes.len() as u64
    }

    fn slice(&mut self, range: ByteRange) -> &mut [u8] {
        let start = (range.offset() - self.offset) as usize;
        &mut self.bytes[start..start + range.len() as usize]
    }

    /// Mostly short, sometimes 4 KiB aligned, sometimes long.
    fn random_range(&self, rng: &mut Rng, block: u64, max_bytes: u64) -> ByteRange {
        let mut unit = block;
        if rng.chance(1, 2) && self.bytes.len() as u64 > 3 * 4096 {
            unit = 4096;
        }
        let first = self.offset.div_ceil(unit);
        let end = self.end() / unit;
        let longest = if rng.chance(1, 8) { (max_bytes / unit).max(1) } else { (16384 / unit).max(1) };
        let at = first + rng.below(end - first);
        let count = rng.between(1, longest.min(end - at));
        ByteRange::new(at * unit, count * unit).expect("a range of the device")
    }

    fn compare(&self, range: ByteRange, got: &[u8], name: &str) {
        assert_eq!(got.len() as u64, range.len(), "{name}: length of the answer for {range}");
        let start = (range.offset() - self.offset) as usize;
        let expected = &self.bytes[start..start + got.len()];
        if expected == got {
            return;
        }
        let at = expected.iter().zip(got).position(|(a, b)| a != b).unwrap_or(0);
        let wrong = expected.iter().zip(got).filter(|(a, b)| a != b).count();
        let mut text = String::new();
        for (title, bytes) in [("expected", expected), ("got", got)] {
            let _ = write!(text, "\n  {title}: {:02x?}", &bytes[at..(at + 16).min(bytes.len())]);
        }
        panic!(
            "{name}: read of {range} differs in {wrong} bytes, first at {} (block {} of 4096, +{}){text}",
            range.offset() + at as u64,
            (range.offset() + at as u64) / 4096,
            (range.offset() + at as u64) % 4096,
        );
    }

    /// Checks that the pages that the device shares for a range, if any, equal the result of a read.
    fn check_shared(&self, device: &dyn Device, range: ByteRange, name: &str) {
        let mut parts = Vec::new();
        if device.read_shared(range, &mut parts) {
            self.compare(range, &parts.iter().map(|part| part.to_vec()).collect::<Vec<_>>().concat(), name);
        } else {
            assert!(parts.is_empty(), "{name}: parts of {range} were left behind");
        }
    }

    fn walk_extents(&self, device: &dyn Device, max_extents: usize) {
        let mut at = self.offset;
        while at < self.end() {
            let range = ByteRange::new(at, self.end() - at).expect("a range of the device");
            at += self.check_extents(device, range, max_extents, "verify");
        }
    }

    /// Checks one answer against the contents and returns how much it covers.
    fn check_extents(&self, device: &dyn Device, range: ByteRange, max: usize, name: &str) -> u64 {
        let extents =
            device.extents(range, max).unwrap_or_else(|e| panic!("{name}: extents of {range} failed: {e}"));
        assert!(!extents.is_empty(), "{name}: extents of {range} is empty");
        assert!(extents.len() <= max, "{name}: extents of {range}: {} runs of {max}", extents.len());
        let mut at = range.offset();
        for extent in &extents {
            assert!(extent.len > 0, "{name}: extents of {range} has an empty run at {at}");
            assert!(
                at + extent.len <= range.end(),
                "{name}: extents of {range}: run {at}+{} passes the end",
                extent.len
            );
            let start = (at - self.offset) as usize;
            let bytes = &self.bytes[start..start + extent.len as usize];
            if extent.kind != ExtentKind::Data
                && let Some(bad) = bytes.iter().position(|b| *b != 0)
            {
                panic!(
                    "{name}: extents of {range} has a {:?} at {at}+{}, but byte {} is not zero",
                    extent.kind,
                    extent.len,
                    at + bad as u64
                );
            }
            at += extent.len;
        }
        let covered = at - range.offset();
        let block = u64::from(device.geometry().logical_block_bytes);
        assert!(covered >= block.min(range.len()), "{name}: extents of {range} covers {covered} bytes");
        covered
    }
}

struct Worker {
    device: Arc<dyn Device>,
    name: String,
    options: Options,
    rng: Rng,
    part: Part,
}

impl Worker {
    fn run(&mut self) -> Part {
        if !self.part.bytes.is_empty() {
            let mut number = 0;
            while number < self.options.operations {
                if self.rng.chance(1, 6) {
                    number += self.round(number);
                } else if self.rng.chance(1, 40) {
                    number += self.overlapping(number);
                } else {
                    self.single(number);
                    number += 1;
                }
            }
        }
        Part { offset: self.part.offset, bytes: std::mem::take(&mut self.part.bytes) }
    }

    fn single(&mut self, number: u32) {
        let range = self.random_range();
        let name = format!("{} operation {number}", self.name);
        if self.rng.chance(1, 12) {
            let max = self.rng.between(1, 8) as usize;
            self.part.check_extents(&*self.device, range, max, &name);
            return;
        }
        let request = self.random_request(range);
        let sent = self.expect(&request, &name);
        if sent.is_read {
            self.part.check_shared(&*self.device, range, &sent.text);
        }
        match carry_out(&*self.device, request, self.rng.chance(1, 3)) {
            Ok(bytes) if sent.is_read => self.part.compare(range, &bytes, &sent.text),
            Ok(_) => self.find_changed_ends(&sent),
            Err(error) => {
                self.check_refusal(&sent, &error);
                self.find_changed_blocks(&sent, sent.range);
            }
        }
    }

    /// Panics unless the request may be refused.
    fn check_refusal(&self, sent: &Sent, error: &IoError) {
        let may_be = self.options.may_refuse
            && sent.old.is_some()
            && !sent.is_discard
            && error.kind() == IoErrorKind::NoSpace;
        assert!(may_be, "{} failed: {error}", sent.text);
    }

    /// Determines whether a discard has cleared the parts of blocks at its ends, which is optional.
    fn find_changed_ends(&mut self, sent: &Sent) {
        if !(self.options.may_refuse && sent.is_discard) {
            return;
        }
        let (start, end) = (sent.range.offset(), sent.range.end());
        let first = start.next_multiple_of(BLOCK_BYTES).min(end);
        let last = (end / BLOCK_BYTES * BLOCK_BYTES).max(first);
        for (from, to) in [(start, first), (last, end)] {
            let part = ByteRange::new(from, to - from).expect("a part of the range");
            if !part.is_empty() {
                self.find_changed_blocks(sent, part);
            }
        }
    }

    /// Determines which blocks of `range` a request has changed. `range` is a part of the request's range, in
    /// which changes are optional.
    fn find_changed_blocks(&mut self, sent: &Sent, range: ByteRange) {
        let old = sent.old.as_deref().unwrap_or_default();
        let old = &old[(range.offset() - sent.range.offset()) as usize..][..range.len() as usize];
        let found = carry_out(&*self.device, read_of(range), self.rng.chance(1, 2))
            .unwrap_or_else(|e| panic!("{} may be executed in part, and reading it failed: {e}", sent.text));
        let mut at = range.offset();
        while at < range.end() {
            let end = (at / BLOCK_BYTES + 1).saturating_mul(BLOCK_BYTES).min(range.end());
            let bytes = (at - range.offset()) as usize..(end - range.offset()) as usize;
            let block = ByteRange::new(at, end - at).expect("a part of the range");
            let model = self.part.slice(block);
            assert!(
                found[bytes.clone()] == *model || found[bytes.clone()] == old[bytes.clone()],
                "{} may be executed in part, but {block} has neither its old nor its new contents",
                sent.text
            );
            model.copy_from_slice(&found[bytes]);
            at = end;
        }
    }

    /// Several requests on disjoint ranges, in flight together. Returns their number.
    fn round(&mut self, number: u32) -> u32 {
        let mut ranges: Vec<ByteRange> = Vec::new();
        for _ in 0..self.options.in_flight {
            let range = self.random_range();
            if ranges.iter().all(|r| range.end() <= r.offset() || r.end() <= range.offset()) {
                ranges.push(range);
            }
        }
        let (tx, rx) = mpsc::channel::<(usize, Outcome)>();
        let (mut all, mut requests) = (Vec::new(), Vec::new());
        for (index, range) in ranges.into_iter().enumerate() {
            let request = self.random_request(range);
            let name = format!("{} operation {number}.{index}", self.name);
            all.push(self.expect(&request, &name));
            requests.push((index, request));
        }
        let stored = self.store_together(&mut requests).len();
        for (index, request) in requests {
            let tx = tx.clone();
            self.device.submit(
                request,
                Completion::new(move |outcome| {
                    // The receiver waits for all answers unless a check has failed.
                    let _ = tx.send((index, outcome));
                }),
            );
        }
        drop(tx);
        let mut answers = 0;
        let (mut refused, mut changed) = (Vec::new(), Vec::new());
        while let Ok((index, outcome)) = rx.recv() {
            let sent = &all[index];
            match outcome.result {
                Ok(()) if sent.is_read => self.part.compare(sent.range, &outcome.buffer, &sent.text),
                Ok(()) => changed.push(index),
                Err(error) => {
                    self.check_refusal(sent, &error);
                    refused.push(index);
                }
            }
            answers += 1;
        }
        assert_eq!(answers + stored, all.len(), "{} operation {number}: answers", self.name);
        refused.into_iter().for_each(|index| self.find_changed_blocks(&all[index], all[index].range));
        changed.into_iter().for_each(|index| self.find_changed_ends(&all[index]));
        all.len() as u32
    }

    /// Every other time, offers the writes among these requests to the device together. Writes that it stored
    /// are removed from the list, and returned.
    fn store_together<N: Copy>(&mut self, requests: &mut Vec<(N, Request)>) -> Vec<(N, ByteRange)> {
        let mut writes = Vec::new();
        let mut names = Vec::new();
        for (name, request) in requests.iter() {
            if let Request::Write { range, buffer, fua: false } = request {
                writes.push((*range, &**buffer));
                names.push((*name, *range));
            }
        }
        let mut done = vec![true; writes.len()];
        if self.rng.chance(1, 2) {
            self.device.write_together(&writes, &mut done);
        } else {
            done.fill(false);
        }
        let mut is_stored = done.iter();
        requests.retain(|(_, request)| match request {
            Request::Write { fua: false, .. } => !is_stored.next().expect("an answer for each write"),
            _ => true,
        });
        names.into_iter().zip(done).filter_map(|(name, done)| done.then_some(name)).collect()
    }

    /// Overlapping writes of whole 4 KiB blocks, in flight together. Returns their number.
    fn overlapping(&mut self, number: u32) -> u32 {
        let (first, end) = (self.part.offset.div_ceil(BLOCK_BYTES), self.part.end() / BLOCK_BYTES);
        if end <= first {
            return 1;
        }
        let span = self.rng.between(1, (end - first).min(8));
        let start = first + self.rng.below(end - first - span + 1);
        let (tx, rx) = mpsc::channel::<(ByteRange, bool, Outcome)>();
        // The contents that each block may have afterwards.
        let mut allowed = vec![Vec::new(); span as usize];
        let mut requests = Vec::new();
        for fill in 0..self.options.in_flight as u8 {
            let from = self.rng.below(span);
            let count = self.rng.between(1, span - from);
            let range = ByteRange::new((start + from) * BLOCK_BYTES, count * BLOCK_BYTES)
                .expect("inside of the part");
            allowed[from as usize..(from + count) as usize].iter_mut().for_each(|fills| fills.push(fill));
            let request = match (fill, self.rng.chance(1, 2)) {
                (0, true) => Request::Discard { range },
                (0, false) => Request::WriteZeroes { range, may_unmap: true, fua: false },
                _ => Request::Write { range, buffer: vec![fill; range.len() as usize], fua: false },
            };
            requests.push((range, request));
        }
        for (range, _) in self.store_together(&mut requests) {
            // The receiver is there until all answers are.
            let _ = tx.send((range, false, Outcome { result: Ok(()), buffer: Vec::new() }));
        }
        for (range, request) in requests {
            let tx = tx.clone();
            // The receiver waits for all answers unless a check has failed.
            let is_discard = matches!(request, Request::Discard { .. });
            let done = Completion::new(move |outcome| drop(tx.send((range, is_discard, outcome))));
            self.device.submit(request, done);
        }
        drop(tx);
        let name = format!("{} operation {number}, overlapping writes", self.name);
        // Blocks that at least one of the writes has stored for certain.
        let mut stored = vec![false; span as usize];
        for (range, is_discard, outcome) in rx {
            match outcome.result {
                Ok(()) => {
                    let blocks = range.first_block() - start..range.end_block() - start;
                    stored[blocks.start as usize..blocks.end as usize].fill(true);
                }
                Err(error) => {
                    let may_be =
                        self.options.may_refuse && !is_discard && error.kind() == IoErrorKind::NoSpace;
                    assert!(may_be, "{name} failed: {error}");
                }
            }
        }
        let whole = ByteRange::new(start * BLOCK_BYTES, span * BLOCK_BYTES).expect("inside of the part");
        let bytes = carry_out(&*self.device, read_of(whole), self.rng.chance(1, 2))
            .unwrap_or_else(|e| panic!("{name}: read of {whole} failed: {e}"));
        let mut at = whole.offset();
        for ((block, fills), stored) in bytes.chunks(BLOCK_BYTES as usize).zip(&allowed).zip(stored) {
            let range = ByteRange::new(at, BLOCK_BYTES).expect("inside of the part");
            let is_one = fills.contains(&block[0]) && block.iter().all(|byte| *byte == block[0]);
            if !stored && !is_one {
                self.part.compare(range, block, &name);
            }
            assert!(
                !stored || is_one,
                "{name} of {whole}: a block of {:02x?}.. is none of {fills:?}",
                &block[..16]
            );
            self.part.slice(range).copy_from_slice(block);
            at += BLOCK_BYTES;
        }
        u32::from(self.options.in_flight as u8)
    }

    fn random_range(&mut self) -> ByteRange {
        let block = u64::from(self.device.geometry().logical_block_bytes);
        self.part.random_range(&mut self.rng, block, self.options.max_request_bytes)
    }

    fn random_request(&mut self, range: ByteRange) -> Request {
        let fua = self.rng.chance(1, 16);
        match self.rng.below(100) {
            0..40 => read_of(range),
            40..80 => Request::Write { range, buffer: self.random_data(range), fua },
            80..88 => {
                let may_unmap = self.rng.chance(1, 2);
                Request::WriteZeroes { range, may_unmap, fua }
            }
            88..96 => Request::Discard { range },
            96..98 => Request::Prefetch { range },
            _ => Request::Flush,
        }
    }

    fn random_data(&mut self, range: ByteRange) -> Vec<u8> {
        let len = range.len() as usize;
        match self.rng.below(8) {
            0 => vec![0; len],
            1 => self.part.slice(range).to_vec(),
            2 | 3 => {
                let word = self.rng.bytes(24);
                word.iter().copied().cycle().take(len).collect()
            }
            4 => {
                // Zero blocks between others.
                let mut bytes = self.rng.bytes(len);
                for block in bytes.chunks_mut(4096) {
                    if self.rng.chance(1, 2) {
                        block.fill(0);
                    }
                }
                bytes
            }
            _ => self.rng.bytes(len),
        }
    }

    /// The contents that the device must have afterwards, and the previous contents in case the request is
    /// refused.
    fn expect(&mut self, request: &Request, name: &str) -> Sent {
        let text = format!("{name}: {}", describe(request));
        let is_read = matches!(request, Request::Read { .. });
        let is_discard = matches!(request, Request::Discard { .. });
        let (range, old) = match request {
            Request::Write { range, buffer, .. } => {
                let model = self.part.slice(*range);
                let old = model.to_vec();
                model.copy_from_slice(buffer);
                (*range, Some(old))
            }
            Request::WriteZeroes { range, .. } | Request::Discard { range } => {
                let model = self.part.slice(*range);
                let old = model.to_vec();
                model.fill(0);
                (*range, Some(old))
            }
            Request::Read { range, .. } | Request::Prefetch { range } => (*range, None),
            Request::Flush => (ByteRange::new(0, 0).expect("an empty range"), None),
        };
        Sent { range, text, is_read, is_discard, old }
    }
}

/// A request that was sent.
struct Sent {
    range: ByteRange,
    /// For people.
    text: String,
    is_read: bool,
    is_discard: bool,
    /// The previous contents, if the request changes something.
    old: Option<Vec<u8>>,
}

fn read_of(range: ByteRange) -> Request {
    // Not zeroes: a device that forgets to fill the buffer must be noticed.
    Request::Read { range, buffer: vec![0xa5; range.len() as usize] }
}

/// Executes a request, first through `try_now` unless `submit_only`. Returns the buffer.
fn carry_out(device: &dyn Device, mut request: Request, submit_only: bool) -> Result<Vec<u8>, IoError> {
    if !submit_only {
        let op = match &mut request {
            Request::Read { range, buffer } => Some(Op::Read { range: *range, into: buffer }),
            Request::Write { range, buffer, fua } => {
                Some(Op::Write { range: *range, from: buffer, fua: *fua })
            }
            Request::WriteZeroes { range, may_unmap, fua } => {
                Some(Op::WriteZeroes { range: *range, may_unmap: *may_unmap, fua: *fua })
            }
            Request::Discard { range } => Some(Op::Discard { range: *range }),
            Request::Flush => Some(Op::Flush),
            Request::Prefetch { .. } => None,
        };
        if let Some(op) = op
            && device.try_now(op)? == Attempt::Done
        {
            return Ok(request.into_buffer());
        }
    }
    blocking::wait(device, request)
}

fn describe(request: &Request) -> String {
    match request {
        Request::Read { range, .. } => format!("read {range}"),
        Request::Write { range, fua, .. } => format!("write {range} fua={fua}"),
        Request::WriteZeroes { range, may_unmap, fua } => {
            format!("write zeroes {range} may_unmap={may_unmap} fua={fua}")
        }
        Request::Discard { range } => format!("discard {range}"),
        Request::Flush => "flush".into(),
        Request::Prefetch { range } => format!("prefetch {range}"),
    }
}
