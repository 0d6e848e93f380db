//! A request that could not be finished at once: the work that is left, and its conversion to a request to
//! the volume.

use std::sync::Arc;

use headwater_block::{IoError, IoErrorKind, Request};

use super::chain::{Buffer, total_bytes};
use super::request::Piece;
use super::transfer::{Direction, Transfer};
use crate::memory::GuestMemory;

/// The work that is left.
#[derive(Debug)]
pub(crate) enum Work {
    /// A read or write of these buffers from this offset.
    Transfer { direction: Direction, at: u64, buffers: Vec<Buffer> },
    /// Discards or zero writes; the first one is next.
    Ranges { pieces: std::collections::VecDeque<Piece>, discard: bool, fua: bool },
    /// A flush.
    Flush,
}

/// A request on its way through the volume.
pub(crate) struct Job {
    /// The head of the chain to return.
    pub(crate) head: u16,
    /// Guest address of the status byte.
    pub(crate) status: u64,
    /// How many bytes this back-end will have written into the chain on success, including the status.
    pub(crate) written: u32,
    /// The memory in which the request's addresses are valid, even if the machine's memory changes meanwhile.
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) work: Work,
}

impl Job {
    /// Data in flight for this request.
    pub(crate) fn bytes(&self) -> usize {
        match &self.work {
            Work::Transfer { buffers, .. } => usize::try_from(total_bytes(buffers)).unwrap_or(usize::MAX),
            Work::Ranges { .. } | Work::Flush => 0,
        }
    }

    pub(crate) fn is_read(&self) -> bool {
        matches!(self.work, Work::Transfer { direction: Direction::Read, .. })
    }

    pub(crate) fn is_write(&self) -> bool {
        matches!(self.work, Work::Transfer { direction: Direction::Write { .. }, .. })
    }

    /// Whether the volume may refuse the request for lack of space, so that it is tried again until there is space. (A discard is
    /// never refused for that reason.)
    pub(crate) fn may_lack_space(&self) -> bool {
        match &self.work {
            Work::Transfer { direction, .. } => *direction != Direction::Read,
            Work::Ranges { .. } => true,
            Work::Flush => false,
        }
    }

    /// The request to the volume, with a buffer from `buffer_of` if it carries data.
    pub(crate) fn request(&self, buffer_of: impl FnOnce(usize) -> Vec<u8>) -> Result<Request, IoError> {
        match &self.work {
            Work::Transfer { direction, at, buffers } => {
                let transfer = Transfer { memory: &self.memory, direction: *direction, at: *at, buffers };
                let range = headwater_block::ByteRange::new(*at, total_bytes(buffers))
                    .ok_or_else(|| IoError::new(IoErrorKind::Invalid, "a range past 64 bits"))?;
                let mut buffer = buffer_of(self.bytes());
                match *direction {
                    Direction::Read => Ok(Request::Read { range, buffer }),
                    Direction::Write { fua } => {
                        transfer.gather(&mut buffer)?;
                        Ok(Request::Write { range, buffer, fua })
                    }
                }
            }
            Work::Ranges { pieces, discard, fua } => {
                let piece = pieces
                    .front()
                    .ok_or_else(|| IoError::new(IoErrorKind::Device, "a request without ranges"))?;
                Ok(match discard {
                    true => Request::Discard { range: piece.range },
                    false => {
                        Request::WriteZeroes { range: piece.range, may_unmap: piece.may_unmap, fua: *fua }
                    }
                })
            }
            Work::Flush => Ok(Request::Flush),
        }
    }

    /// Processes a successful answer. `true`: the request is done; `false`: more work is left.
    pub(crate) fn answered(&mut self, buffer: &[u8]) -> Result<bool, IoError> {
        match &mut self.work {
            Work::Transfer { direction: Direction::Read, at, buffers } => {
                let transfer =
                    Transfer { memory: &self.memory, direction: Direction::Read, at: *at, buffers };
                transfer.scatter(buffer)?;
                Ok(true)
            }
            Work::Ranges { pieces, .. } => {
                pieces.pop_front();
                Ok(pieces.is_empty())
            }
            Work::Transfer { .. } | Work::Flush => Ok(true),
        }
    }
}
