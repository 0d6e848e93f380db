//! The suite passes on the reference disk in all its modes, and fails on wrong devices.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, IoErrorKind, Op, Request,
};
use headwater_testkit::conformance::{self, Options};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Waits};

fn disk(options: ReferenceOptions) -> Arc<dyn Device> {
    Arc::new(ReferenceDisk::with_options(3 << 20, options))
}

#[test]
fn a_disk_that_answers_at_once_passes() {
    conformance::check(&disk(ReferenceOptions::default()), &Options::seeded(11));
}

#[test]
fn a_disk_of_4096_byte_blocks_passes() {
    let options = ReferenceOptions { logical_block_bytes: 4096, ..Default::default() };
    conformance::check(&disk(options), &Options::seeded(12));
}

#[test]
fn a_disk_that_answers_late_and_out_of_order_passes() {
    let options = ReferenceOptions {
        waits: Waits::PerMille(500),
        delay: Duration::from_micros(20),
        ..Default::default()
    };
    conformance::check(&disk(options), &Options { operations: 200, ..Options::seeded(13) });
}

#[test]
fn a_read_only_disk_passes_and_stays_as_it_is() {
    let options = ReferenceOptions { read_only: true, ..Default::default() };
    let disk = Arc::new(ReferenceDisk::with_contents(vec![7; 1 << 20], options));
    let device: Arc<dyn Device> = disk.clone();
    conformance::check(&device, &Options::seeded(14));
    assert!(disk.contents().iter().all(|b| *b == 7));
}

/// A way in which a device is wrong.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    ForgetsDiscards,
    ShiftsSubmittedReads,
    LosesUnalignedWrites,
    CallsDataAHole,
}

struct Faulty(ReferenceDisk, Fault);

impl Device for Faulty {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        match op {
            Op::Discard { .. } if self.1 == Fault::ForgetsDiscards => Ok(Attempt::Done),
            Op::Write { range, .. }
                if self.1 == Fault::LosesUnalignedWrites && range.offset() % 4096 != 0 =>
            {
                Ok(Attempt::Done)
            }
            op => self.0.try_now(op),
        }
    }

    fn submit(&self, request: Request, done: Completion) {
        let shifts = self.1 == Fault::ShiftsSubmittedReads;
        self.0.submit(
            request,
            Completion::new(move |mut outcome| {
                if shifts && outcome.buffer.len() > 512 {
                    outcome.buffer.rotate_left(512);
                }
                done.complete(outcome.result, outcome.buffer);
            }),
        );
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        if self.1 == Fault::CallsDataAHole {
            return Ok(vec![Extent { len: range.len(), kind: ExtentKind::Hole }]);
        }
        self.0.extents(range, max_extents)
    }
}

/// Refuses some writes like a full disk, after it has stored a part of them.
struct Full {
    disk: ReferenceDisk,
    /// Also stores half a block, which no device may do.
    tears: bool,
    writes: AtomicU64,
}

impl Device for Full {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        let Op::Write { range, from, fua } = op else { return self.disk.try_now(op) };
        if !self.writes.fetch_add(1, Ordering::Relaxed).is_multiple_of(5) {
            return self.disk.try_now(Op::Write { range, from, fua });
        }
        // Up to the end of the first block, or to its middle.
        let block = 4096 - range.offset() % 4096;
        let stored = (if self.tears { block / 2 / 512 * 512 } else { block }).min(range.len());
        let part = ByteRange::new(range.offset(), stored).expect("inside of the range");
        self.disk.try_now(Op::Write { range: part, from: &from[..stored as usize], fua })?;
        Err(IoError::new(IoErrorKind::NoSpace, "the disk is full"))
    }

    fn submit(&self, request: Request, done: Completion) {
        match request {
            Request::Write { range, buffer, fua } => {
                let result = self.try_now(Op::Write { range, from: &buffer, fua });
                done.complete(result.map(drop), buffer);
            }
            request => self.disk.submit(request, done),
        }
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        self.disk.extents(range, max_extents)
    }
}

fn full(tears: bool) -> Arc<dyn Device> {
    Arc::new(Full { disk: ReferenceDisk::new(1 << 20), tears, writes: AtomicU64::new(0) })
}

#[test]
fn a_disk_that_may_be_full_passes() {
    conformance::check(&full(false), &Options { may_refuse: true, ..Options::seeded(16) });
    for (tears, may_refuse, why) in [(true, true, "neither its old"), (false, false, "the disk is full")] {
        // One request at a time, so that the check of a refused write finds the torn block.
        let options = Options { threads: 1, in_flight: 1, may_refuse, ..Options::seeded(17) };
        let caught = std::thread::spawn(move || conformance::check(&full(tears), &options)).join();
        let Err(panic) = caught else { panic!("it passed; tears: {tears}") };
        let text = panic.downcast_ref::<String>().expect("a message");
        assert!(text.contains("seed 17") && text.contains(why), "{text}");
    }
}

#[test]
fn each_fault_is_found() {
    for fault in [
        Fault::ForgetsDiscards,
        Fault::ShiftsSubmittedReads,
        Fault::LosesUnalignedWrites,
        Fault::CallsDataAHole,
    ] {
        let device: Arc<dyn Device> = Arc::new(Faulty(ReferenceDisk::new(1 << 20), fault));
        let options = Options { threads: 1, ..Options::seeded(15) };
        let caught = std::thread::spawn(move || conformance::check(&device, &options)).join();
        let Err(panic) = caught else { panic!("fault {} was not noticed", fault as u32) };
        let text = panic.downcast_ref::<String>().expect("a message");
        assert!(text.contains("seed 15") || text.contains("verify"), "{text}");
    }
}
