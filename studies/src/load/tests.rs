//! Tests which requests the load generator sends to a device.

use std::sync::Mutex;

use headwater_block::{Completion, Extent, Geometry, IoError};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Waits};

use super::*;

const MIB: u64 = 1 << 20;

fn job() -> Job {
    let line = Line {
        request_bytes: 4096,
        share_percent: 100,
        alignment_bytes: 512,
        read_percent: 20,
        random_percent: 80,
        burst: 1,
        delay_ms: 0,
    };
    Job { start_bytes: 0, set_bytes: 4 * MIB, lines: vec![line], depth: 16, content: Content::Incompressible }
}

/// Records each request in order of arrival, and passes it on.
struct Recorder {
    disk: ReferenceDisk,
    seen: Mutex<Vec<Item>>,
}

impl Recorder {
    fn new(waits: Waits) -> Arc<Self> {
        let options = ReferenceOptions { waits, ..Default::default() };
        Arc::new(Self { disk: ReferenceDisk::with_options(4 * MIB, options), seen: Mutex::default() })
    }
}

impl Device for Recorder {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        let (direction, range) = match &op {
            Op::Read { range, .. } => (Direction::Read, *range),
            Op::Write { range, .. } => (Direction::Write, *range),
            other => panic!("unexpected operation: {other:?}"),
        };
        let len = u32::try_from(range.len()).unwrap();
        self.seen.lock().unwrap().push(Item { direction, offset: range.offset(), len, delay_ms: 0 });
        self.disk.try_now(op)
    }

    fn submit(&self, request: Request, done: Completion) {
        self.disk.submit(request, done);
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        self.disk.extents(range, max_extents)
    }
}

fn seen(waits: Waits, seed: u64) -> Vec<Item> {
    let recorder = Recorder::new(waits);
    let device: Arc<dyn Device> = recorder.clone();
    let outcomes = run(&device, &[job()], seed, Until::Requests(2000), &AtomicBool::new(false)).unwrap();
    assert_eq!(outcomes.requests, 2000);
    recorder.seen.lock().unwrap().clone()
}

#[test]
fn equal_seeds_send_equal_requests_if_some_wait() {
    let all = seen(Waits::Never, 7);
    assert_eq!(all, seen(Waits::PerMille(500), 7));
    assert_ne!(all, seen(Waits::Never, 8));
}

#[test]
fn a_device_gets_the_shares_of_the_job() {
    let all = seen(Waits::Never, 7);
    let reads = all.iter().filter(|item| item.direction == Direction::Read).count();
    assert!((340..=460).contains(&reads), "{reads} of 2000 are reads");
    let sequential = all.windows(2).filter(|pair| pair[0].offset + 4096 == pair[1].offset).count();
    assert!((340..=460).contains(&sequential), "{sequential} of 2000 are sequential");
    assert!(all.iter().all(|item| item.offset % 512 == 0 && item.offset + 4096 <= 4 * MIB));
    assert!(all.iter().any(|item| item.offset % 4096 != 0), "the alignment is 512 bytes");
}

#[test]
fn no_more_than_the_depth_is_in_flight() {
    let options = ReferenceOptions { waits: Waits::Always, ..Default::default() };
    let disk = Arc::new(ReferenceDisk::with_options(4 * MIB, options));
    let device: Arc<dyn Device> = disk.clone();
    disk.hold();
    std::thread::scope(|scope| {
        let stop = AtomicBool::new(false);
        let runs =
            scope.spawn(move || run(&device, &[job()], 1, Until::Requests(100), &stop).unwrap().requests);
        headwater_testkit::wait_until("the depth is reached", || disk.waiting() >= 16);
        disk.release();
        assert_eq!(runs.join().unwrap(), 100);
    });
    assert!(disk.most_waiting() <= 16, "{}", disk.most_waiting());
}

#[test]
fn a_fill_writes_every_byte_of_the_set() {
    let disk = Arc::new(ReferenceDisk::new(4 * MIB));
    let device: Arc<dyn Device> = disk.clone();
    fill(&device, 4 * MIB, Content::Incompressible, 3, &AtomicBool::new(false)).unwrap();
    assert_eq!(disk.counts().writes, 64);
    assert!(disk.contents().chunks(4096).all(|block| block.iter().any(|byte| *byte != 0)));
}

#[test]
fn a_failed_request_ends_the_run_with_its_reason() {
    let disk = Arc::new(ReferenceDisk::new(4 * MIB));
    disk.fail(ByteRange::new(0, 4 * MIB).unwrap(), headwater_block::IoErrorKind::NoSpace);
    let device: Arc<dyn Device> = disk;
    let error = run(&device, &[job()], 1, Until::Requests(100), &AtomicBool::new(false)).unwrap_err();
    assert!(error.to_string().contains("a request failed"), "{error}");
}

#[test]
fn a_mix_of_sizes_sends_bursts_in_its_part_of_the_disk() {
    let line = |request_bytes, share_percent, read_percent, random_percent, burst| Line {
        request_bytes,
        share_percent,
        alignment_bytes: 4096,
        read_percent,
        random_percent,
        burst,
        delay_ms: 0,
    };
    // Writes of 4 KiB at random offsets, and bursts of four sequential reads of 64 KiB.
    let lines = vec![line(4096, 75, 0, 100, 1), line(65536, 25, 100, 0, 4)];
    let mixed = Job { start_bytes: MIB, set_bytes: 2 * MIB, lines, ..job() };
    let recorder = Recorder::new(Waits::PerMille(500));
    let device: Arc<dyn Device> = recorder.clone();
    run(&device, &[mixed], 1, Until::Requests(4000), &AtomicBool::new(false)).unwrap();
    let seen = recorder.seen.lock().unwrap().clone();
    assert!(seen.iter().all(|item| item.offset >= MIB && item.offset + u64::from(item.len) <= 3 * MIB));
    assert!(seen.iter().all(|item| (item.direction == Direction::Read) == (item.len == 65536)));
    // Three of four choices give one write, the fourth gives four reads.
    let writes = seen.iter().filter(|item| item.direction == Direction::Write).count();
    assert!((1550..=1880).contains(&writes), "{writes} of 4000 are writes");
    let runs: Vec<usize> =
        seen.chunk_by(|a, b| a.len == b.len).filter(|run| run[0].len == 65536).map(<[Item]>::len).collect();
    assert!(runs[..runs.len() - 1].iter().all(|run| run.is_multiple_of(4)), "{runs:?}");
    let read_pairs = seen.windows(2).filter(|pair| pair[0].len == 65536 && pair[1].len == 65536);
    assert!(
        read_pairs.into_iter().all(|pair| pair[1].offset == pair[0].offset + 65536 || pair[1].offset == MIB)
    );
}

#[test]
fn a_worker_waits_before_each_burst() {
    let mut job = job();
    (job.lines[0].burst, job.lines[0].delay_ms) = (10, 20);
    let device: Arc<dyn Device> = Arc::new(ReferenceDisk::new(4 * MIB));
    let began = Instant::now();
    let outcomes = run(&device, &[job.clone()], 1, Until::Requests(30), &AtomicBool::new(false)).unwrap();
    assert_eq!(outcomes.requests, 30);
    // Three bursts, each at least 20 ms after the previous one.
    assert!(began.elapsed() >= Duration::from_millis(60), "{:?}", began.elapsed());
    let mut requests = Requests::new(job, 1);
    let delays: Vec<u32> = (0..21).map(|_| requests.draw().delay_ms).collect();
    let of_bursts: Vec<usize> = (0..21).filter(|number| delays[*number] == 20).collect();
    assert_eq!(of_bursts, [0, 10, 20]);
    assert_eq!(delays.iter().sum::<u32>(), 60);
}

#[test]
fn a_run_ends_while_a_worker_waits() {
    let mut job = job();
    (job.lines[0].burst, job.lines[0].delay_ms) = (4, 3_600_000);
    let options = ReferenceOptions { waits: Waits::Always, ..Default::default() };
    let device: Arc<dyn Device> = Arc::new(ReferenceDisk::with_options(4 * MIB, options));
    let until = Until::Elapsed(Duration::from_millis(100));
    let outcomes = run(&device, &[job], 1, until, &AtomicBool::new(false)).unwrap();
    assert_eq!(outcomes.requests, 0);
}
