//! A device whose changes are durable when they are answered; needed below a device that outlives its server.

use std::sync::Arc;

use headwater_block::{
    Attempt, ByteRange, Completion, CompletionQueue, Device, Extent, Geometry, IoError, Op, Request,
    SharedSlice,
};

/// The same device without a volatile cache: each change is sent with FUA, and a discard is followed by a
/// flush.
pub fn write_through(device: Arc<dyn Device>) -> Arc<dyn Device> {
    if device.geometry().volatile_cache { Arc::new(WriteThrough(device)) } else { device }
}

struct WriteThrough(Arc<dyn Device>);

impl WriteThrough {
    /// Makes a completion that flushes before it answers.
    fn flushed(&self, done: Completion) -> Completion {
        let device = Arc::clone(&self.0);
        Completion::new(move |outcome| match outcome.result {
            Ok(()) => device.submit(Request::Flush, done),
            Err(error) => done.complete(Err(error), outcome.buffer),
        })
    }
}

impl Device for WriteThrough {
    fn geometry(&self) -> Geometry {
        Geometry { volatile_cache: false, ..self.0.geometry() }
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        self.0.try_now(match op {
            Op::Write { range, from, .. } => Op::Write { range, from, fua: true },
            Op::WriteZeroes { range, may_unmap, .. } => Op::WriteZeroes { range, may_unmap, fua: true },
            // A discard has no FUA, and a zero write, which has FUA, may be refused for lack of space: so the
            // discard is flushed afterwards.
            Op::Discard { .. } => return Ok(Attempt::MustWait),
            other @ (Op::Read { .. } | Op::Flush) => other,
        })
    }

    fn read_shared(&self, range: ByteRange, parts: &mut Vec<SharedSlice>) -> bool {
        self.0.read_shared(range, parts)
    }

    fn submit(&self, request: Request, done: Completion) {
        let request = match request {
            Request::Write { range, buffer, .. } => Request::Write { range, buffer, fua: true },
            Request::WriteZeroes { range, may_unmap, .. } => {
                Request::WriteZeroes { range, may_unmap, fua: true }
            }
            Request::Discard { .. } => return self.0.submit(request, self.flushed(done)),
            other @ (Request::Read { .. } | Request::Flush | Request::Prefetch { .. }) => other,
        };
        self.0.submit(request, done);
    }

    fn completion_queue(&self) -> Option<Box<dyn CompletionQueue>> {
        self.0.completion_queue()
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        self.0.extents(range, max_extents)
    }
}

#[cfg(test)]
mod tests {
    use headwater_testkit::conformance::{Options, check, verify};
    use headwater_testkit::{ReferenceDisk, ReferenceOptions, Waits};

    use super::*;

    #[test]
    fn it_is_a_device_and_each_change_is_durable() {
        for waits in [Waits::Never, Waits::PerMille(500), Waits::Always] {
            let options = ReferenceOptions { waits, volatile_cache: true, ..Default::default() };
            let disk = Arc::new(ReferenceDisk::with_options(4 << 20, options));
            let device = write_through(Arc::clone(&disk) as Arc<dyn Device>);
            assert!(!device.geometry().volatile_cache);
            let model = check(&device, &Options { operations: 200, ..Options::seeded(31) });
            verify(&*disk, &model);
            let counts = disk.counts();
            assert!(counts.writes > 100 && counts.zeroes > 10, "{counts:?}");
            assert_eq!(counts.fua, counts.writes + counts.zeroes, "{waits:?}");
            assert!(counts.discards > 10 && counts.flushes >= counts.discards, "{waits:?}: {counts:?}");
        }
    }

    #[test]
    fn what_has_no_volatile_cache_is_left_alone() {
        let options = ReferenceOptions { volatile_cache: false, ..Default::default() };
        let disk: Arc<dyn Device> = Arc::new(ReferenceDisk::with_options(1 << 20, options));
        assert!(Arc::ptr_eq(&write_through(Arc::clone(&disk)), &disk));
    }
}
