//! Reads an object of a copy's source, with its holes filled from the target's own copy of the object. So a
//! copy that repairs an object in the target does not lose the bytes that only the target has.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::holes::{Holes, hash_of};
use crate::store::Object;

/// An object with the bytes of `source` and, in its holes, those of `own`. Without `own`, a copy of `source`
/// would overwrite bytes that only versions of the target store need.
pub(crate) struct Filled<'a> {
    source: &'a dyn Object,
    own: Arc<dyn Object>,
    /// The holes of the source.
    holes: Arc<Holes>,
    /// The holes that both objects have.
    common: Arc<Holes>,
    /// Whether a read of the source failed.
    source_failed: AtomicBool,
}

impl<'a> Filled<'a> {
    /// Creates the filled object of a source with these holes.
    pub(crate) fn new(
        source: &'a dyn Object,
        holes: Arc<Holes>,
        own: Arc<dyn Object>,
    ) -> Result<Self, StoreError> {
        let common = Arc::new(holes.common(&*own.holes()?));
        Ok(Self { source, own, holes, common, source_failed: AtomicBool::new(false) })
    }

    /// Finds which object caused the error of a failed copy. If the target's object is damaged, returns
    /// `ours` with the reason: a retry with another server of the source cannot help then. For this the
    /// target's object is read and, if it is damaged, the source as well. `copied` is called during the
    /// reads, and its error cancels them.
    pub(crate) fn blame(
        &self,
        error: StoreError,
        ours: &dyn Fn(&str) -> StoreError,
        copied: &mut dyn FnMut(u64) -> Result<(), StoreError>,
    ) -> StoreError {
        if error.kind() != StoreErrorKind::Damaged || self.source_failed.load(Ordering::Acquire) {
            return error;
        }
        let why = match hash_of(self.own.as_ref(), &mut |_| copied(0)) {
            Ok(hash) if hash == self.id() => return error,
            Ok(_) => "the hash of its bytes is not the one in its name".to_owned(),
            // The target's object is too short, or its disk cannot read it.
            Err(e) if e.kind() == StoreErrorKind::Damaged => e.to_string(),
            // The check was cancelled, or failed for another reason: the source is not read.
            Err(e) => return e,
        };
        // Only a source whose whole hash is right proves that the target's object is to blame.
        match hash_of(self.source, &mut |_| copied(0)) {
            Ok(hash) if hash == self.id() => ours(&why),
            Ok(_) => error,
            Err(e) => e,
        }
    }

    fn read_source(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let outcome = self.source.read_range(offset, into);
        if outcome.is_err() {
            self.source_failed.store(true, Ordering::Release);
        }
        outcome
    }
}

impl Object for Filled<'_> {
    fn id(&self) -> Hash {
        self.source.id()
    }

    fn len_bytes(&self) -> u64 {
        self.source.len_bytes()
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let end = offset.saturating_add(u64::try_from(into.len()).unwrap_or(u64::MAX));
        let (mut at, mut rest) = (offset, into);
        for hole in self.holes.within(&(offset..end)) {
            let (before, after) = split(rest, hole.start.saturating_sub(at));
            let (inside, after) = split(after, hole.end.saturating_sub(hole.start));
            if !before.is_empty() {
                self.read_source(at, before)?;
            }
            self.own.read_range(hole.start, inside)?;
            (at, rest) = (hole.end, after);
        }
        if rest.is_empty() { Ok(()) } else { self.read_source(at, rest) }
    }

    fn was_wrong(&self) -> bool {
        self.source.was_wrong()
    }

    fn holes(&self) -> Result<Arc<Holes>, StoreError> {
        Ok(Arc::clone(&self.common))
    }
}

fn split(bytes: &mut [u8], at: u64) -> (&mut [u8], &mut [u8]) {
    let at = usize::try_from(at).unwrap_or(usize::MAX).min(bytes.len());
    bytes.split_at_mut(at)
}
