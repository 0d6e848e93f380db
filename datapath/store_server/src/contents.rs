//! A cache of manifests, lists and traces: those requested most recently, and those being sent to clients.
//!
//! All answers that send a content share its memory. It counts until the last of them is sent and the cache
//! has dropped it. Contents that are not being sent are evicted for requested ones. If all memory is being
//! sent, further requests are refused, because a client that reads nothing must not fill the host's memory.

use std::sync::Arc;

use bytes::Bytes;
use headwater_store::{Hash, StoreError, StoreErrorKind};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::send_memory::{SMALL_PIECE_BYTES, SendMemoryPermit};

/// The limit of memory for manifests, lists and traces in the cache or being sent. Those of at most
/// [`SMALL_PIECE_BYTES`] do not count. A larger content is allowed if there is no other.
pub const CONTENTS_BYTES: usize = 256 << 20;
/// The most contents in the cache.
const CONTENTS_MAX: usize = 1024;

/// A content, with its memory permit.
pub(crate) struct Content {
    pub id: Hash,
    bytes: Vec<u8>,
    _held: SendMemoryPermit,
}

/// An answer's reference to a content.
struct Shared(Arc<Content>);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        &self.0.bytes
    }
}

impl Content {
    pub(crate) fn len_bytes(&self) -> u64 {
        u64::try_from(self.bytes.len()).unwrap_or(u64::MAX)
    }

    /// At most `len_bytes` from `at`. The content stays in memory as long as these bytes.
    pub(crate) fn part(self: &Arc<Self>, at: u64, len_bytes: u64) -> Bytes {
        let index = |number: u64| usize::try_from(number).unwrap_or(usize::MAX).min(self.bytes.len());
        Bytes::from_owner(Shared(Arc::clone(self))).slice(index(at)..index(at.saturating_add(len_bytes)))
    }
}

/// The contents in memory.
pub(crate) struct Contents {
    send_memory: Arc<Semaphore>,
    most_bytes: usize,
    /// The cache; the most recently used content is last.
    kept: Mutex<Vec<Arc<Content>>>,
}

impl Contents {
    pub(crate) fn new(most_bytes: usize) -> Self {
        Self { send_memory: Arc::new(Semaphore::new(most_bytes)), most_bytes, kept: Mutex::default() }
    }

    pub(crate) fn kept(&self, id: Hash) -> Option<Arc<Content>> {
        newest(&mut self.kept.lock(), id)
    }

    /// Adds a content to the cache, so that concurrent answers share it.
    pub(crate) fn keep(&self, id: Hash, mut bytes: Vec<u8>) -> Result<Arc<Content>, StoreError> {
        // Reading to an unknown end may have allocated twice the length.
        bytes.shrink_to_fit();
        let mut kept = self.kept.lock();
        if let Some(content) = newest(&mut kept, id) {
            return Ok(content);
        }
        let held = loop {
            if let Some(held) = self.take(bytes.len()) {
                break held;
            }
            // A content in use would stay in memory, and the next request would no longer find it.
            let Some(unused) = kept.iter().position(|content| Arc::strong_count(content) == 1) else {
                let why = "the memory for manifests, lists and traces is full of answers that clients have not read yet";
                return Err(StoreError::new(StoreErrorKind::NoSpace, why));
            };
            kept.remove(unused);
        };
        let content = Arc::new(Content { id, bytes, _held: held });
        kept.push(Arc::clone(&content));
        if kept.len() > CONTENTS_MAX {
            kept.remove(0);
        }
        Ok(content)
    }

    /// Takes memory for `len` bytes. A request for the file `store` always gets it.
    fn take(&self, len: usize) -> Option<SendMemoryPermit> {
        if len <= SMALL_PIECE_BYTES {
            return Some(SendMemoryPermit::nothing());
        }
        SendMemoryPermit::of(&self.send_memory, len.min(self.most_bytes))
    }
}

/// Finds the content with this hash, and makes it the most recently used one.
fn newest(kept: &mut Vec<Arc<Content>>, id: Hash) -> Option<Arc<Content>> {
    let at = kept.iter().position(|content| content.id == id)?;
    let content = kept.remove(at);
    kept.push(Arc::clone(&content));
    Some(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: usize = 100 << 10;

    fn keep(contents: &Contents, name: u8, len: usize) -> Result<Arc<Content>, StoreError> {
        contents.keep(Hash::of(&[name]), vec![name; len])
    }

    /// A byte of a content, held as by an answer that a client does not read.
    fn byte(contents: &Contents, name: u8, len: usize) -> Bytes {
        keep(contents, name, len).unwrap().part(0, 1)
    }

    fn is_refused(contents: &Contents, name: u8, len: usize) -> bool {
        keep(contents, name, len).is_err_and(|e| e.kind() == StoreErrorKind::NoSpace)
    }

    #[test]
    fn contents_being_sent_count_once() {
        let contents = Contents::new(MOST);
        let sent: Vec<Bytes> = (0..100).map(|_| byte(&contents, b'a', MOST * 2 / 3)).collect();
        assert!(sent.iter().all(|one| one.as_ptr() == sent[0].as_ptr()));
        assert!(is_refused(&contents, b'b', MOST / 2));
        // The content is still found, and is not read a second time.
        assert!(contents.kept(Hash::of(b"a")).is_some());
        // The last content counts like the first one.
        let last = sent.into_iter().next_back().unwrap();
        assert!(is_refused(&contents, b'b', MOST / 2));
        let small = byte(&contents, b's', SMALL_PIECE_BYTES);
        drop(last);
        let other = byte(&contents, b'b', MOST / 2);
        assert!(contents.kept(Hash::of(b"a")).is_none() && contents.kept(Hash::of(b"b")).is_some());
        drop((small, other));
    }

    #[test]
    fn one_of_any_size_has_room_when_there_is_no_other() {
        let contents = Contents::new(MOST);
        let one = byte(&contents, b'a', SMALL_PIECE_BYTES + 1);
        assert!(is_refused(&contents, b'l', MOST * 10));
        drop(one);
        let large = byte(&contents, b'l', MOST * 10);
        assert!(is_refused(&contents, b'a', SMALL_PIECE_BYTES + 1));
        drop(large);
        byte(&contents, b'a', SMALL_PIECE_BYTES + 1);
    }

    #[test]
    fn no_more_than_so_many_are_kept() {
        let contents = Contents::new(MOST);
        for number in 0..=CONTENTS_MAX {
            contents.keep(Hash::of(&number.to_le_bytes()), vec![0; 64]).unwrap();
        }
        assert_eq!(contents.kept.lock().len(), CONTENTS_MAX);
        assert!(contents.kept(Hash::of(&0usize.to_le_bytes())).is_none());
    }
}
