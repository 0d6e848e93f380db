//! EXTENDED COPY: each segment read and written, chunk by chunk.

use std::collections::VecDeque;
use std::sync::Arc;

use headwater_block::{ByteRange, Request};

use super::{CHUNK_BYTES, Given, Plan, memory};
use crate::copies::{self, Progress, Segment};
use crate::link::Link;
use crate::queue::Hold;
use crate::run::{Buffers, ErrorContext, Step, Work};
use crate::sense::{Code, Fault};

pub(super) fn plan(link: &Arc<Link>, list_bytes: u32, given: Given<'_>) -> Result<Option<Plan>, Fault> {
    link.unit.check_writable()?;
    let list = given.data_out.get(..memory(u64::from(list_bytes)));
    let list = list.ok_or(Fault::illegal(Code::PARAMETER_LIST_LENGTH_ERROR))?;
    let Some(request) = copies::parse(&link.unit, list)? else { return Ok(None) };
    let start = request.segments.iter().map(|segment| segment.to.offset()).min().unwrap_or(0);
    let end = request.segments.iter().map(|segment| segment.to.end()).max().unwrap_or(0);
    let hull = ByteRange::new(start, end.saturating_sub(start));
    let Some(hull) = hull.filter(|hull| !hull.is_empty()) else {
        if let Some(id) = request.list_id {
            link.copies.note(id, Progress::Done, 0, 0);
        }
        return Ok(None);
    };
    let work = Copy {
        link: Arc::clone(link),
        list_id: request.list_id,
        left: request.segments.into(),
        copied_bytes: 0,
        segments: 0,
        bytes: 0,
        stage: Stage::Between,
        fua: link.unit.must_be_durable(false),
    };
    work.note(Progress::Running);
    Ok(Some(Plan { hold: Hold::Changes(hull), work: Box::new(work), immediate: false }))
}

/// The part of the chunk that is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Between,
    Reading,
    Writing,
}

struct Copy {
    link: Arc<Link>,
    list_id: Option<u8>,
    /// Bytes of the first segment that are copied.
    left: VecDeque<Segment>,
    copied_bytes: u64,
    segments: usize,
    bytes: u64,
    stage: Stage,
    fua: bool,
}

impl Copy {
    fn note(&self, progress: Progress) {
        if let Some(id) = self.list_id {
            self.link.copies.note(id, progress, self.segments, self.bytes);
        }
    }

    /// The next chunk: source and destination. If the destination overlaps a later part of the source,
    /// copying goes backwards from the end.
    fn chunk(&self) -> Option<(ByteRange, ByteRange)> {
        let Segment { from, to } = self.left.front()?;
        let left = from.len().saturating_sub(self.copied_bytes);
        let len = left.min(CHUNK_BYTES);
        let backwards = to.offset() > from.offset() && to.offset() < from.end();
        let at = if backwards { left.saturating_sub(len) } else { self.copied_bytes };
        let part = |range: &ByteRange| ByteRange::new(range.offset().checked_add(at)?, len);
        Some((part(from)?, part(to)?))
    }

    fn advance(&mut self, bytes: u64) {
        self.copied_bytes = self.copied_bytes.saturating_add(bytes);
        self.bytes = self.bytes.saturating_add(bytes);
        if self.left.front().is_some_and(|segment| self.copied_bytes >= segment.from.len()) {
            self.left.pop_front();
            self.copied_bytes = 0;
            self.segments = self.segments.saturating_add(1);
        }
    }
}

impl Work for Copy {
    fn step(&mut self, _: &mut Buffers, completed: Option<Vec<u8>>) -> Step {
        let mut buffer = completed.unwrap_or_default();
        match (self.stage, self.chunk()) {
            (Stage::Reading, Some((_, to))) => {
                if u64::try_from(buffer.len()).unwrap_or(0) != to.len() {
                    return Step::End(Err(super::broken()));
                }
                self.stage = Stage::Writing;
                return Step::Submit(Request::Write { range: to, buffer, fua: self.fua });
            }
            (Stage::Writing, Some((_, to))) => self.advance(to.len()),
            _ => {}
        }
        let Some((from, _)) = self.chunk() else {
            self.note(Progress::Done);
            return Step::End(Ok(()));
        };
        self.stage = Stage::Reading;
        buffer.resize(memory(from.len()), 0);
        Step::Submit(Request::Read { range: from, buffer })
    }

    fn is_single(&self) -> bool {
        let rest = self.chunk().map_or(0, |(_, to)| to.len()).saturating_add(self.copied_bytes);
        let is_last = self.left.front().is_some_and(|last| rest >= last.from.len());
        self.stage == Stage::Writing && self.left.len() == 1 && is_last
    }

    fn error_context(&self) -> ErrorContext {
        ErrorContext { name: "EXTENDED COPY", is_write_error: self.stage == Stage::Writing }
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        if !self.left.is_empty() {
            self.note(Progress::Failed);
        }
    }
}
