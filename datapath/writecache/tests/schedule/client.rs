//! Makes requests to the cache as the volume does: with the image below, fetches of blocks on disk, and waits
//! if there is no space.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use headwater_block::{IoError, IoErrorKind};
use headwater_writecache::{
    Admission, Block, BlockNumber, Cleared, EachPart, Fetched, FetchedOld, Found, FrozenCache, Location, Old,
    QueuedWrite, ReadTally, RetryResult, Ticket, UnloggedBlocks, WriteCache, WriteResult,
};
use shuttle::rand::Rng;
use shuttle::sync::mpsc;
use shuttle::thread;

use super::oracle::{BLOCK, HALF, Oracle, Value};

/// A client that makes requests one after the other.
#[derive(Clone)]
pub struct Client {
    cache: Arc<WriteCache>,
    oracle: Arc<Oracle>,
    together: Arc<AtomicU64>,
    paired: Arc<AtomicU64>,
}

fn random(below: u32) -> u32 {
    shuttle::rand::thread_rng().gen_range(0..below)
}

pub fn image(block: u32) -> Vec<u8> {
    [Value::Image.bytes(block, 0), Value::Image.bytes(block, 1)].concat()
}

impl Client {
    /// For a cache, and the oracle of its contents.
    pub fn new(cache: &Arc<WriteCache>, oracle: &Arc<Oracle>) -> Self {
        Self {
            cache: Arc::clone(cache),
            oracle: Arc::clone(oracle),
            together: Arc::default(),
            paired: Arc::default(),
        }
    }

    fn some_block(&self) -> u32 {
        random(self.oracle.blocks())
    }

    /// Writes of all kinds, and a read now and then.
    pub fn write_some(&self, steps: usize) {
        for _ in 0..steps {
            let block = self.some_block();
            match random(20) {
                0 => self.write(block, Value::Zero, [true; 2]),
                1 => self.write(block, Value::Image, [true; 2]),
                2..=4 => {
                    let first = random(2) == 0;
                    self.write(block, self.oracle.fresh(), [first, !first]);
                }
                5 => self.read(block),
                6 => self.write_pair(),
                7..=9 => self.overwrite_together(),
                _ => self.write_whole(block),
            }
        }
    }

    /// Overwrites whole blocks in any leaves, sometimes the same block twice. Blocks that are not stored then
    /// are written one by one.
    fn overwrite_together(&self) {
        let first = self.some_block();
        let blocks = [first, self.some_block(), first + u32::from(first + 1 < self.oracle.blocks())];
        let begun = blocks.map(|block| {
            let value = self.oracle.fresh();
            let data: [u8; BLOCK] = [0, 1].map(|half| value.bytes(block, half)).concat().try_into().unwrap();
            (block, data, self.oracle.begin(block, value, [true; 2]))
        });
        let writes = begun.each_ref().map(|(block, data, _)| Block { number: BlockNumber(*block), data });
        let mut stored = [false; 3];
        self.cache.overwrite_together(&writes, &mut stored, |_, _| false);
        let (stored, left): (Vec<_>, Vec<_>) = begun.iter().zip(stored).partition(|(_, stored)| *stored);
        for ((block, _, number), _) in stored {
            self.oracle.end(*block, *number);
            self.together.fetch_add(1, Ordering::Relaxed);
        }
        for ((block, data, number), _) in left {
            self.write_begun((*block, *number), 0, data, false);
        }
    }

    /// Writes the end of a block and the beginning of the next one; one by one if they cannot be stored
    /// together.
    fn write_pair(&self) {
        let block = random(self.oracle.blocks() - 1);
        let value = self.oracle.fresh();
        let data = [value.bytes(block, 1), value.bytes(block + 1, 0)];
        let begun = [(block, [false, true]), (block + 1, [true, false])]
            .map(|(block, halves)| (block, self.oracle.begin(block, value, halves)));
        let wrote = loop {
            match self.cache.write_pair(BlockNumber(block), HALF, &data.concat(), Admission::New, || false) {
                Some(WriteResult::NoRoom) if self.cache.make_room() => {}
                wrote => break wrote,
            }
        };
        if wrote == Some(WriteResult::Done) {
            begun.into_iter().for_each(|(block, number)| self.oracle.end(block, number));
            self.paired.fetch_add(1, Ordering::Relaxed);
            return;
        }
        for ((begun, data), skip) in begun.into_iter().zip(data).zip([HALF, 0]) {
            self.write_begun(begun, skip, &data, false);
        }
    }

    /// Number of pairs of parts that were stored together.
    pub fn stored_in_pairs(&self) -> u64 {
        self.paired.load(Ordering::Relaxed)
    }

    /// Number of blocks that were stored with others.
    pub fn stored_together(&self) -> u64 {
        self.together.load(Ordering::Relaxed)
    }

    /// Reads twice as many blocks.
    pub fn read_some(&self, steps: usize) {
        (0..2 * steps).for_each(|_| self.read(self.some_block()));
    }

    /// Discards and zeroes, and writes after some of them.
    pub fn clear_some(&self, steps: usize) {
        for _ in 0..steps {
            let first = self.some_block();
            let end = (first + 1 + random(6)).min(self.oracle.blocks());
            let to = if random(2) == 0 { Location::ABSENT } else { Location::ZERO };
            self.clear(first..end, to);
            if random(2) == 0 {
                self.write_whole(first);
            }
        }
    }

    /// Makes blocks zero or absent.
    pub fn clear(&self, blocks: std::ops::Range<u32>, to: Location) {
        let value = if to == Location::ZERO { Value::Zero } else { Value::Image };
        let begun: Vec<_> =
            blocks.clone().map(|block| (block, self.oracle.begin(block, value, [true; 2]))).collect();
        let mut first = BlockNumber(blocks.start);
        while let Cleared::UpTo(left) =
            self.cache.clear(first, BlockNumber(blocks.end), to, UnloggedBlocks::Wait)
        {
            first = left;
            thread::yield_now();
        }
        begun.into_iter().for_each(|(block, number)| self.oracle.end(block, number));
    }

    /// Reads a block and checks it.
    pub fn read(&self, block: u32) {
        let begun = self.oracle.tick();
        let bytes = self.bytes(block);
        self.oracle.check(block, begun, &bytes);
    }

    /// Looks up all parts of a partial block, and fetches those on disk. `None`: a part has moved.
    fn parts(&self, block: u32, look_up: impl FnOnce(&mut [u8], EachPart<'_>)) -> Option<Vec<u8>> {
        let mut bytes = vec![0xee; BLOCK];
        let mut parts = Vec::new();
        look_up(&mut bytes, &mut |at, len, found| parts.push((at..at + len, found)));
        assert!(parts.iter().map(|(part, _)| part.len()).sum::<usize>() == BLOCK, "{parts:?}");
        for (part, found) in parts {
            let from = match found {
                Found::Done(_) => continue,
                Found::Absent => image(block),
                Found::Spilled(ticket) => self.fetch(ticket)?,
                Found::Partial => panic!("a part of block {block} is a partial block"),
            };
            bytes[part.clone()].copy_from_slice(&from[part]);
        }
        Some(bytes)
    }

    fn bytes(&self, block: u32) -> Vec<u8> {
        let mut bytes = vec![0xee; BLOCK];
        loop {
            match self.cache.read(BlockNumber(block), 0, &mut bytes) {
                Found::Partial => {
                    let look_up = |into: &mut [u8], each: EachPart<'_>| {
                        self.cache.read_parts(BlockNumber(block), 0, into, each);
                    };
                    if let Some(bytes) = self.parts(block, look_up) {
                        return bytes;
                    }
                }
                Found::Done(from) => {
                    let mut tally = ReadTally::default();
                    tally.add(from);
                    self.cache.count_reads(tally);
                    return bytes;
                }
                Found::Absent => return image(block),
                Found::Spilled(ticket) => {
                    if let Some(fetched) = self.fetch(ticket) {
                        return fetched;
                    }
                }
            }
        }
    }

    /// Checks all blocks of the cache after a crash: they are the state of one moment, at or after `begun`
    /// and before `ended`.
    pub fn check_recovered(&self, begun: u64, ended: u64) {
        let found: Vec<_> = (0..self.oracle.blocks()).map(|block| self.bytes(block)).collect();
        self.oracle.check_cut(begun, ended, &found);
    }

    /// Writes and flushes alternately. The moment before each successful flush is stored in `flushed`.
    pub fn flush_some(&self, steps: usize, flushed: &AtomicU64) {
        for _ in 0..steps {
            if random(3) > 0 {
                self.write_whole(self.some_block());
            }
            self.flush(flushed);
        }
    }

    /// Flushes. Returns whether that succeeded.
    pub fn flush(&self, flushed: &AtomicU64) -> bool {
        let begun = self.oracle.tick();
        let (sender, receiver) = mpsc::channel();
        self.cache.flush(Box::new(move |result| sender.send(result.is_ok()).unwrap()));
        let worked = receiver.recv().unwrap();
        if worked {
            flushed.fetch_max(begun, Ordering::Relaxed);
        }
        worked
    }

    /// Freezes the cache and reads all of it, some blocks again later: it is the state of one moment, and
    /// does not change.
    pub fn freeze_some(&self, times: usize) {
        for _ in 0..times {
            let begun = self.oracle.tick();
            let frozen = self.cache.freeze().unwrap();
            let ended = self.oracle.tick();
            let found: Vec<_> =
                (0..self.oracle.blocks()).map(|block| self.read_frozen(&frozen, block)).collect();
            self.oracle.check_cut(begun, ended, &found);
            for _ in 0..4 {
                let block = self.some_block();
                let again = self.read_frozen(&frozen, block);
                assert!(again == found[block as usize], "block {block} of a frozen state has changed");
            }
        }
    }

    fn read_frozen(&self, frozen: &FrozenCache, block: u32) -> Vec<u8> {
        let mut bytes = vec![0xee; BLOCK];
        loop {
            match frozen.read(BlockNumber(block), 0, &mut bytes) {
                Found::Partial => {
                    let look_up = |into: &mut [u8], each: EachPart<'_>| {
                        frozen.read_parts(BlockNumber(block), 0, into, each);
                    };
                    if let Some(bytes) = self.parts(block, look_up) {
                        return bytes;
                    }
                }
                Found::Done(_) => return bytes,
                Found::Absent => return image(block),
                Found::Spilled(ticket) => {
                    if let Some(fetched) = self.fetch(ticket) {
                        return fetched;
                    }
                }
            }
        }
    }

    /// `None`: the block has moved, or the disk failed this time.
    fn fetch(&self, ticket: Ticket) -> Option<Vec<u8>> {
        let (sender, receiver) = mpsc::channel();
        self.cache.fetch(vec![ticket], move |_, fetched| {
            let answer = match fetched {
                Fetched::Data(bytes) => Some(bytes.to_vec()),
                Fetched::Moved => None,
                Fetched::Failed(error) => {
                    assert_eq!(error.kind(), IoErrorKind::Device, "{error}");
                    None
                }
            };
            sender.send(answer).unwrap();
        });
        receiver.recv().unwrap()
    }

    /// Writes a whole block with new contents.
    pub fn write_whole(&self, block: u32) {
        self.write(block, self.oracle.fresh(), [true; 2]);
    }

    fn write(&self, block: u32, value: Value, halves: [bool; 2]) {
        // In halves: this is called so often that a copy byte by byte would take half of the exploration.
        let data = (0..2).filter(|half| halves[*half]).map(|half| value.bytes(block, half));
        let data = data.collect::<Vec<_>>().concat();
        let skip = if halves[0] { 0 } else { HALF };
        let number = self.oracle.begin(block, value, halves);
        // Equal blocks that are not noticed here are left to the dedup scan.
        let same = value == Value::Image && random(2) == 0;
        self.write_begun((block, number), skip, &data, same);
    }

    /// Executes a write that the oracle knows.
    fn write_begun(&self, (block, number): (u32, usize), skip: usize, data: &[u8], same: bool) {
        let (answer, answers) = mpsc::channel();
        let mut fetched = Vec::new();
        loop {
            let task = Task {
                client: self.clone(),
                block,
                number,
                skip,
                data: data.to_vec(),
                same,
                fetched: fetched.clone(),
                answer: answer.clone(),
            };
            let stepped = match task.step(Admission::New) {
                Ok(stepped) => stepped,
                Err(waits) => {
                    match waits {
                        Waits::ForRoom => self.cache.queue_for_space(Box::new(task)),
                        Waits::ForDisk => self.cache.queue_for_disk(Box::new(task)),
                    }
                    answers.recv().unwrap()
                }
            };
            match stepped {
                Stepped::Done => return,
                Stepped::Fetch(old) => {
                    let bytes = match old {
                        Old::Absent => Some(image(block)),
                        Old::Spilled(ticket) => self.fetch(ticket),
                    };
                    fetched.extend(bytes.map(|bytes| (old, bytes)));
                }
            }
        }
    }
}

/// The result of a step of a write.
enum Stepped {
    Done,
    Fetch(Old),
}

/// The reason for which a write waits.
enum Waits {
    ForRoom,
    ForDisk,
}

/// A write in progress.
struct Task {
    client: Client,
    block: u32,
    number: usize,
    skip: usize,
    data: Vec<u8>,
    same: bool,
    fetched: Vec<FetchedOld>,
    answer: mpsc::Sender<Stepped>,
}

impl Task {
    /// The error is the reason for which the write waits.
    fn step(&self, admission: Admission) -> Result<Stepped, Waits> {
        let (cache, block) = (&self.client.cache, BlockNumber(self.block));
        loop {
            let wrote = match &*self.fetched {
                _ if self.data.len() == BLOCK => {
                    cache.write_unless(block, &self.data, admission, |_| self.same)
                }
                [] => cache.write_part(block, self.skip, &self.data, admission, || false),
                fetched => cache.merge(block, self.skip, &self.data, fetched, admission),
            };
            match wrote {
                WriteResult::Done => {
                    self.client.oracle.end(self.block, self.number);
                    return Ok(Stepped::Done);
                }
                WriteResult::NeedOld(old) => return Ok(Stepped::Fetch(old)),
                WriteResult::Closed => panic!("the cache is not closed"),
                WriteResult::NoRoom if cache.make_room() => {}
                WriteResult::NoRoom | WriteResult::Queued => return Err(Waits::ForRoom),
                WriteResult::Throttled => return Err(Waits::ForDisk),
            }
        }
    }
}

impl QueuedWrite for Task {
    fn retry(self: Box<Self>) -> Result<RetryResult, Box<dyn QueuedWrite>> {
        match self.step(Admission::Waited) {
            Ok(stepped) => {
                let retried = match stepped {
                    Stepped::Done => RetryResult::Stored,
                    Stepped::Fetch(_) => RetryResult::Gone,
                };
                self.answer.send(stepped).unwrap();
                Ok(retried)
            }
            Err(_) => Err(self),
        }
    }

    fn refuse(self: Box<Self>, error: IoError) {
        panic!("a write was refused: {error}");
    }
}
