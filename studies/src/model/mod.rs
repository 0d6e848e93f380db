//! Model disks: an I/O engine that completes operations no faster than the modelled disk would. The real disk below
//! must be faster.
//!
//! A model computes when an operation is due, from its arrival time and the operations before it. It does not store
//! data; the real disk does.

mod array;
mod buckets;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use headwater_writecache::overflow::io::{Direction, IoEngine, IoOp};

pub use array::{Array, MOST_SPINDLES, SpindleOperations};
use buckets::Buckets;
pub use buckets::Caps;

/// Azure's P10 during its burst, which can last 30 minutes. The latency is assumed.
pub const P10: Caps = Caps { iops: 3500, bytes_per_s: 170 << 20, latency: Duration::from_micros(2500) };

/// The ephemeral disk of Azure's D8s_v3. The latency is assumed.
pub const EPHEMERAL: Caps =
    Caps { iops: 16_000, bytes_per_s: 128_000_000, latency: Duration::from_micros(300) };

/// A model of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// A disk with limits of operations and bytes per second.
    Caps(Caps),
    /// A RAID 5 of this number of disks with 15,000 revolutions per minute.
    Sas15k(u32),
}

impl Model {
    /// Parses `real` (no model), `p10`, `ephemeral` or `sas15k:N:raid5`.
    pub fn parse(text: &str) -> Result<Option<Self>, String> {
        let spindles = text.strip_prefix("sas15k:").and_then(|rest| rest.strip_suffix(":raid5"));
        match (text, spindles) {
            ("real", _) => Ok(None),
            ("p10", _) => Ok(Some(Self::Caps(P10))),
            ("ephemeral", _) => Ok(Some(Self::Caps(EPHEMERAL))),
            (_, Some(spindles)) => match spindles.parse() {
                Ok(spindles) if (3..=MOST_SPINDLES).contains(&spindles) => Ok(Some(Self::Sas15k(spindles))),
                _ => Err(format!("RAID 5 has 3 to {MOST_SPINDLES} disks, not {spindles:?}")),
            },
            _ => Err("the storage must be one of real, p10, ephemeral and sas15k:N:raid5".into()),
        }
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Caps(P10) => f.write_str("p10"),
            Self::Caps(EPHEMERAL) => f.write_str("ephemeral"),
            Self::Caps(caps) => write!(f, "{} IOPS, {} bytes/s", caps.iops, caps.bytes_per_s),
            Self::Sas15k(spindles) => write!(f, "sas15k:{spindles}:raid5"),
        }
    }
}

/// The range of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Access {
    is_write: bool,
    offset: u64,
    bytes: u64,
}

enum State {
    Buckets(Buckets),
    Array(Array),
}

impl State {
    fn new(model: Model) -> Self {
        match model {
            Model::Caps(caps) => Self::Buckets(Buckets::new(caps)),
            Model::Sas15k(spindles) => Self::Array(Array::new(spindles)),
        }
    }

    /// The time at which an operation that arrives now is completed.
    fn due_ns(&mut self, now_ns: u64, access: Access) -> u64 {
        match self {
            Self::Buckets(buckets) => buckets.due_ns(now_ns, access.bytes),
            Self::Array(array) => array.due_ns(now_ns, access.is_write, access.offset, access.bytes),
        }
    }
}

/// The distance between two files on a model disk, in bytes.
const BETWEEN_FILES_BYTES: u64 = 1 << 40;

/// The I/O engine of a model disk, over the engine of a real disk.
pub struct ModelEngine {
    arrived: mpsc::Sender<(Instant, IoOp)>,
}

impl ModelEngine {
    /// Starts the thread that delays operations. It ends when the engine is dropped. The model's time runs `speed`
    /// times as fast as real time.
    pub fn start(model: Model, speed: f64, real: Arc<dyn IoEngine>) -> io::Result<Self> {
        let (arrived, waiting) = mpsc::channel::<(Instant, IoOp)>();
        let hold = Hold { began: Instant::now(), speed, state: State::new(model), files: Vec::new(), real };
        std::thread::Builder::new().name("model-disk".into()).spawn(move || hold.run(&waiting))?;
        Ok(Self { arrived })
    }
}

impl IoEngine for ModelEngine {
    fn submit(&self, op: IoOp) {
        if let Err(mpsc::SendError((_, op))) = self.arrived.send((Instant::now(), op)) {
            (op.done)(Err(io::Error::other("the model disk has ended")), op.buffer);
        }
    }
}

struct Hold {
    began: Instant,
    speed: f64,
    state: State,
    /// Files by the address of their handles, in their order on the model disk.
    files: Vec<usize>,
    real: Arc<dyn IoEngine>,
}

impl Hold {
    fn run(mut self, waiting: &mpsc::Receiver<(Instant, IoOp)>) {
        // Sorted by due time, then by arrival.
        let (mut held, mut number) = (BTreeMap::<(Instant, u64), IoOp>::new(), 0);
        loop {
            let next = match held.first_key_value() {
                Some(((due, _), _)) => waiting.recv_timeout(due.saturating_duration_since(Instant::now())),
                None => waiting.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match next {
                Ok((at, op)) => {
                    held.insert((self.due(at, &op), number), op);
                    number += 1;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    for ((due, _), op) in held {
                        std::thread::sleep(due.saturating_duration_since(Instant::now()));
                        self.real.submit(op);
                    }
                    return;
                }
            }
            let now = Instant::now();
            while let Some(first) = held.first_entry().filter(|first| first.key().0 <= now) {
                self.real.submit(first.remove());
            }
        }
    }

    fn due(&mut self, at: Instant, op: &IoOp) -> Instant {
        let address = Arc::as_ptr(&op.file) as usize;
        let file = self.files.iter().position(|file| *file == address).unwrap_or_else(|| {
            self.files.push(address);
            self.files.len() - 1
        });
        let access = Access {
            is_write: op.direction == Direction::Write,
            offset: file as u64 * BETWEEN_FILES_BYTES + op.offset,
            bytes: op.len as u64,
        };
        let now_ns = at.saturating_duration_since(self.began).as_nanos() as f64 * self.speed;
        let due_ns = self.state.due_ns(now_ns as u64, access);
        self.began + Duration::from_nanos((due_ns as f64 / self.speed) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storages_are_parsed_and_printed_in_the_same_words() {
        for text in ["p10", "ephemeral", "sas15k:8:raid5"] {
            assert_eq!(Model::parse(text).unwrap().unwrap().to_string(), text);
        }
        assert_eq!(Model::parse("real"), Ok(None));
        for (text, why) in
            [("p11", "one of real"), ("sas15k:2:raid5", "3 to 64"), ("sas15k:8:raid6", "one of real")]
        {
            assert!(Model::parse(text).unwrap_err().contains(why), "{text}");
        }
    }

    /// Completes each operation immediately.
    struct Instantly;

    impl IoEngine for Instantly {
        fn submit(&self, op: IoOp) {
            (op.done)(Ok(()), op.buffer);
        }
    }

    #[test]
    fn operations_complete_once_and_not_too_early() {
        let slow = Caps { iops: 1_000_000, bytes_per_s: u64::MAX, latency: Duration::from_millis(30) };
        let engine = ModelEngine::start(Model::Caps(slow), 1.0, Arc::new(Instantly)).unwrap();
        let file = Arc::new(tempfile::tempfile().unwrap());
        let (answer, answers) = mpsc::channel();
        let began = Instant::now();
        for number in 0..20_u64 {
            let answer = answer.clone();
            engine.submit(IoOp {
                file: Arc::clone(&file),
                direction: Direction::Write,
                offset: number * 4096,
                buffer: headwater_writecache::AlignedBuffer::new(4096).unwrap(),
                len: 4096,
                done: Box::new(move |result, _| {
                    answer.send((number, result.is_ok(), began.elapsed())).unwrap()
                }),
            });
        }
        drop((engine, answer));
        let all: Vec<(u64, bool, Duration)> = answers.iter().collect();
        let numbers: Vec<u64> = all.iter().map(|(number, ..)| *number).collect();
        assert_eq!(numbers, (0..20).collect::<Vec<u64>>());
        assert!(all.iter().all(|(_, is_ok, took)| *is_ok && *took >= Duration::from_millis(30)), "{all:?}");
    }
}
