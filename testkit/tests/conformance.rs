//! The suite passes on the reference disk however it behaves, and fails on devices that are wrong.

use std::sync::Arc;
use std::time::Duration;

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, Op, Request,
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

/// One way to be wrong.
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

#[test]
fn each_way_to_be_wrong_is_noticed() {
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
