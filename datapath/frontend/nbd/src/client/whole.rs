//! One request of the caller, which consists of one or more commands.

use std::sync::Arc;

use headwater_block::{Completion, IoError};
use parking_lot::Mutex;

/// Collects the results of parts and answers after the last one. The first error wins.
pub(super) struct Whole(Mutex<Collected>);

struct Collected {
    left: usize,
    error: Option<IoError>,
    buffer: Vec<u8>,
    payload: Option<Arc<Vec<u8>>>,
    /// The extents of the only context that is ever requested.
    extents: Option<(u32, Vec<(u32, u32)>)>,
    done: Option<Completion>,
}

impl Whole {
    pub(super) fn new(parts: usize, done: Completion) -> Arc<Self> {
        Self::build(parts, Vec::new(), None, done)
    }

    /// For a read in several parts: they are collected in `buffer`.
    pub(super) fn with_buffer(parts: usize, buffer: Vec<u8>, done: Completion) -> Arc<Self> {
        Self::build(parts, buffer, None, done)
    }

    /// For a write: `payload` is handed back at the end.
    pub(super) fn with_payload(parts: usize, payload: Arc<Vec<u8>>, done: Completion) -> Arc<Self> {
        Self::build(parts, Vec::new(), Some(payload), done)
    }

    fn build(parts: usize, buffer: Vec<u8>, payload: Option<Arc<Vec<u8>>>, done: Completion) -> Arc<Self> {
        let collected =
            Collected { left: parts, error: None, buffer, payload, extents: None, done: Some(done) };
        Arc::new(Self(Mutex::new(collected)))
    }

    /// Adds the result of a part that has finished: the bytes that it read, and their offset if the request
    /// has several parts.
    pub(super) fn part_done(&self, result: Result<(), IoError>, data: Vec<u8>, at: Option<usize>) {
        let mut collected = self.0.lock();
        match at {
            None if !data.is_empty() => collected.buffer = data,
            None => {}
            Some(at) => {
                let end = at.saturating_add(data.len());
                if let Some(place) = collected.buffer.get_mut(at..end) {
                    place.copy_from_slice(&data);
                }
            }
        }
        if let Err(error) = result {
            collected.error.get_or_insert(error);
        }
        collected.left = collected.left.saturating_sub(1);
        if collected.left > 0 {
            return;
        }
        let Some(done) = collected.done.take() else { return };
        let result = collected.error.take().map_or(Ok(()), Err);
        let buffer = match collected.payload.take() {
            // The writer thread may still hold the payload for a moment after sending it.
            Some(payload) => Arc::try_unwrap(payload).unwrap_or_else(|shared| shared.as_ref().clone()),
            None => std::mem::take(&mut collected.buffer),
        };
        drop(collected);
        done.complete(result, buffer);
    }

    /// Stores the extents of a context; `false` if there are some already.
    pub(super) fn set_extents(&self, context: u32, extents: Vec<(u32, u32)>) -> bool {
        let mut collected = self.0.lock();
        let is_first = collected.extents.is_none();
        if is_first {
            collected.extents = Some((context, extents));
        }
        is_first
    }

    /// The extents of a context; empty if there were none.
    pub(super) fn extents(&self, context: u32) -> Vec<(u32, u32)> {
        let collected = self.0.lock();
        let found = collected.extents.as_ref().filter(|(id, _)| *id == context);
        found.map(|(_, extents)| extents.clone()).unwrap_or_default()
    }
}
