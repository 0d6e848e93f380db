//! A device that records its requests and passes them on to the device below.

use std::sync::Arc;

use headwater_block::pages::SharedSlice;
use headwater_block::{
    Attempt, BLOCK_BYTES, ByteRange, Completion, CompletionQueue, Device, Extent, Geometry, IoError, Op,
    Request,
};

use crate::content::Content;
use crate::format::{Entry, Kind};
use crate::recorder::Recorder;

const BLOCK: usize = BLOCK_BYTES as usize;

pub(crate) struct RecordedDevice {
    recorder: Arc<Recorder>,
    volume: u16,
    device: Arc<dyn Device>,
    base: Option<Arc<dyn Device>>,
}

impl RecordedDevice {
    pub(crate) fn new(
        recorder: Arc<Recorder>,
        volume: u16,
        device: Arc<dyn Device>,
        base: Option<Arc<dyn Device>>,
    ) -> Self {
        Self { recorder, volume, device, base }
    }

    fn add(&self, kind: Kind, range: Option<ByteRange>, data: Option<&[u8]>) {
        if self.recorder.is_over() {
            return;
        }
        let time_us = self.recorder.time_us();
        let content = match (data, range) {
            (Some(data), Some(range)) => self.class(range, data),
            _ => Content::Unknown,
        };
        let (offset, bytes) = range.map_or((0, 0), |range| (range.offset(), range.len()));
        self.recorder.add(Entry { time_us, offset, bytes, volume: self.volume, kind, content });
    }

    fn class(&self, range: ByteRange, data: &[u8]) -> Content {
        let content = Content::of(data);
        if content != Content::Zero && self.base.as_deref().is_some_and(|base| is_equal(base, range, data)) {
            return Content::Equal;
        }
        content
    }
}

/// Whether the image has exactly these bytes, as far as its memory shows. The first sector is compared first
/// because most writes differ there.
fn is_equal(base: &dyn Device, range: ByteRange, data: &[u8]) -> bool {
    let mut image = [0; BLOCK];
    let first = data.len().min(512);
    let parts = std::iter::once((0, first)).chain((first..data.len()).step_by(BLOCK).map(|at| (at, BLOCK)));
    for (at, len) in parts {
        let part = data.get(at..data.len().min(at + len)).unwrap_or_default();
        let place = ByteRange::new(range.offset() + at as u64, part.len() as u64);
        let (Some(place), Some(image)) = (place, image.get_mut(..part.len())) else { return false };
        if !base.peek(place, image) || image != part {
            return false;
        }
    }
    true
}

impl Device for RecordedDevice {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        let (kind, range, data) = match &op {
            Op::Read { range, .. } => (Kind::Read, Some(*range), None),
            Op::Write { range, from, .. } => (Kind::Write, Some(*range), Some(*from)),
            Op::WriteZeroes { range, .. } => (Kind::WriteZeroes, Some(*range), None),
            Op::Discard { range } => (Kind::Discard, Some(*range), None),
            Op::Flush => (Kind::Flush, None, None),
        };
        let attempt = self.device.try_now(op);
        // A request that must wait is submitted again and recorded then.
        if matches!(attempt, Ok(Attempt::Done)) {
            self.add(kind, range, data);
        }
        attempt
    }

    fn write_together(&self, writes: &[(ByteRange, &[u8])], done: &mut [bool]) {
        self.device.write_together(writes, done);
        for ((range, data), _) in writes.iter().zip(done.iter()).filter(|(_, done)| **done) {
            self.add(Kind::Write, Some(*range), Some(data));
        }
    }

    fn peek(&self, range: ByteRange, into: &mut [u8]) -> bool {
        self.device.peek(range, into)
    }

    fn unrecorded(self: Arc<Self>) -> Option<Arc<dyn Device>> {
        let below = Arc::clone(&self.device);
        Some(Arc::clone(&below).unrecorded().unwrap_or(below))
    }

    fn read_shared(&self, range: ByteRange, parts: &mut Vec<SharedSlice>) -> bool {
        let is_read = self.device.read_shared(range, parts);
        if is_read {
            self.add(Kind::Read, Some(range), None);
        }
        is_read
    }

    fn submit(&self, request: Request, done: Completion) {
        match &request {
            Request::Read { range, .. } => self.add(Kind::Read, Some(*range), None),
            Request::Write { range, buffer, .. } => self.add(Kind::Write, Some(*range), Some(buffer)),
            Request::WriteZeroes { range, .. } => self.add(Kind::WriteZeroes, Some(*range), None),
            Request::Discard { range } => self.add(Kind::Discard, Some(*range), None),
            Request::Flush => self.add(Kind::Flush, None, None),
            Request::Prefetch { .. } => {}
        }
        self.device.submit(request, done);
    }

    fn completion_queue(&self) -> Option<Box<dyn CompletionQueue>> {
        self.device.completion_queue()
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        self.device.extents(range, max_extents)
    }
}
