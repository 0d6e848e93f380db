//! Knows what a read may return: which halves of blocks were written, each recognisable, and when.
//!
//! It knows no schedule, only the order of beginnings and ends. A read cannot return a change any more if
//! another change of the same half began after that change's end and had taken effect before the read began:
//! because it was answered, or because a read had returned it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

pub const BLOCK: usize = 4096;
pub const HALF: usize = BLOCK / 2;

/// The contents of half a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// As in the image.
    Image,
    /// Zeroes.
    Zero,
    /// Written; each write has its own number.
    Written(u32),
}

impl Value {
    /// The bytes of the value.
    pub fn bytes(self, block: u32, half: usize) -> Vec<u8> {
        let number = match self {
            Value::Zero => return vec![0; HALF],
            Value::Image => 0,
            Value::Written(number) => number,
        };
        let first = (u64::from(number) << 32) | (u64::from(block) << 8) | (half as u64 + 1);
        // One value in four does not compress.
        let packs = !number.is_multiple_of(4) || number == 0;
        let mut word = first;
        let mut bytes = vec![0; HALF];
        for place in bytes.as_chunks_mut().0 {
            *place = word.to_le_bytes();
            if !packs {
                word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                word ^= word >> 29;
            }
        }
        bytes
    }

    /// The value of these bytes.
    fn of(block: u32, half: usize, bytes: &[u8]) -> Self {
        let first = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let place = (u32::try_from((first >> 8) & 0xff_ffff).unwrap(), (first & 0xff) as usize);
        assert!(
            first == 0 || place == (block, half + 1),
            "half {half} of block {block} holds what belongs to block {}",
            place.0
        );
        let value = match u32::try_from(first >> 32).unwrap() {
            _ if first == 0 => Value::Zero,
            0 => Value::Image,
            number => Value::Written(number),
        };
        assert!(
            bytes == value.bytes(block, half),
            "half {half} of block {block} is torn; it begins as {value:?}"
        );
        value
    }
}

struct Change {
    value: Value,
    halves: [bool; 2],
    begun: u64,
    /// When the change was answered.
    ended: u64,
    /// When it was known to have taken effect, for each half.
    seen: [u64; 2],
}

/// All changes of all blocks.
pub struct Oracle {
    clock: AtomicU64,
    numbers: AtomicU32,
    blocks: Vec<Mutex<Vec<Change>>>,
}

impl Oracle {
    /// A volume that equals the image.
    pub fn new(blocks: u32) -> Self {
        let image = || Change { value: Value::Image, halves: [true; 2], begun: 0, ended: 0, seen: [0; 2] };
        Self {
            clock: AtomicU64::new(1),
            numbers: AtomicU32::new(1),
            blocks: (0..blocks).map(|_| Mutex::new(vec![image()])).collect(),
        }
    }

    /// A value that was not written yet.
    pub fn fresh(&self) -> Value {
        Value::Written(self.numbers.fetch_add(1, Ordering::Relaxed))
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u32 {
        u32::try_from(self.blocks.len()).unwrap()
    }

    /// The next moment.
    pub fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    /// Records that a change begins. Returns its number among those of its block.
    pub fn begin(&self, block: u32, value: Value, halves: [bool; 2]) -> usize {
        let mut changes = self.blocks[block as usize].lock().unwrap();
        changes.push(Change { value, halves, begun: self.tick(), ended: u64::MAX, seen: [u64::MAX; 2] });
        changes.len() - 1
    }

    /// Records that a change was answered.
    pub fn end(&self, block: u32, number: usize) {
        let now = self.tick();
        let mut changes = self.blocks[block as usize].lock().unwrap();
        let change = &mut changes[number];
        change.ended = now;
        change.seen = change.seen.map(|seen| seen.min(now));
    }

    /// Checks the result of a read that began at `begun`.
    pub fn check(&self, block: u32, begun: u64, bytes: &[u8]) {
        let values = [0, 1].map(|half| Value::of(block, half, &bytes[half * HALF..(half + 1) * HALF]));
        let now = self.tick();
        let mut changes = self.blocks[block as usize].lock().unwrap();
        let possible = [0, 1].map(|half| {
            let found = possible(&changes, half, values[half], begun);
            assert!(
                !found.is_empty(),
                "half {half} of block {block} is {:?}, which was overwritten before the read began",
                values[half]
            );
            found
        });
        let whole = |change: usize| changes[change].halves == [true; 2];
        let fit = possible[0].iter().any(|a| possible[1].iter().any(|b| a == b || !whole(*a) || !whole(*b)));
        assert!(fit, "block {block} is half {:?} and half {:?}", values[0], values[1]);
        for (half, found) in possible.iter().enumerate() {
            if let [change] = found[..] {
                changes[change].seen[half] = changes[change].seen[half].min(now);
            }
        }
    }
}

impl Oracle {
    /// Checks all blocks of a state that was frozen between `begun` and `ended`: no block is older than the
    /// state at `begun` or newer than `ended`; and if a change is in it, so is each change that had taken
    /// effect before that one began.
    pub fn check_cut(&self, begun: u64, ended: u64, found: &[Vec<u8>]) {
        let mut newest = begun;
        for (block, bytes) in found.iter().enumerate() {
            let certain = self.frozen(block, begun, ended, bytes).into_iter().min();
            newest = newest.max(certain.unwrap_or(0));
        }
        for (block, bytes) in found.iter().enumerate() {
            self.frozen(block, newest, ended, bytes);
        }
    }

    /// The beginnings of the changes that a block of a frozen state may contain.
    fn frozen(&self, block: usize, begun: u64, ended: u64, bytes: &[u8]) -> Vec<u64> {
        let number = u32::try_from(block).unwrap();
        let changes = self.blocks[block].lock().unwrap();
        let possible = [0, 1].map(|half| {
            let value = Value::of(number, half, &bytes[half * HALF..(half + 1) * HALF]);
            let mut found = possible(&changes, half, value, begun);
            found.retain(|change| changes[*change].begun < ended);
            assert!(
                !found.is_empty(),
                "half {half} of block {block} is {value:?} in a state frozen {begun}..{ended}"
            );
            found
        });
        let whole = |change: usize| changes[change].halves == [true; 2];
        let fit = possible[0].iter().any(|a| possible[1].iter().any(|b| a == b || !whole(*a) || !whole(*b)));
        assert!(fit, "block {block} of a frozen state mixes two states");
        possible.concat().into_iter().map(|change| changes[change].begun).collect()
    }
}

/// The changes that a read may return.
fn possible(changes: &[Change], half: usize, value: Value, begun: u64) -> Vec<usize> {
    let touching = || changes.iter().enumerate().filter(|(_, change)| change.halves[half]);
    touching()
        .filter(|(_, change)| change.value == value)
        .filter(|(_, change)| {
            !touching().any(|(_, later)| change.ended < later.begun && later.seen[half] < begun)
        })
        .map(|(number, _)| number)
        .collect()
}
