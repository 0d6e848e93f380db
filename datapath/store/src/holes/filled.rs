//! An object of another store, with what is missing there taken from the store that it is copied to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::holes::{Holes, hash_of};
use crate::store::Object;

/// An object with the bytes of `source`, and in its holes those of `own`. A copy of `source` alone would take from the versions of this store what only
/// they need.
pub(crate) struct Filled<'a> {
    source: &'a dyn Object,
    own: Arc<dyn Object>,
    /// Those of the source.
    holes: Arc<Holes>,
    /// What neither has.
    common: Arc<Holes>,
    /// Whether a read of the source failed.
    source_failed: AtomicBool,
}

impl<'a> Filled<'a> {
    /// Where `own` has what the source, with these holes, has not.
    pub(crate) fn new(
        source: &'a dyn Object,
        holes: Arc<Holes>,
        own: Arc<dyn Object>,
    ) -> Result<Self, StoreError> {
        let common = Arc::new(holes.common(&*own.holes()?));
        Ok(Self { source, own, holes, common, source_failed: AtomicBool::new(false) })
    }

    /// What a copy of this that failed with `error` fails with: where what is here is to blame, with what `ours` makes of the reason. Then
    /// it makes no difference what other bytes the source gives. What is here is read for that, and the source where that is wrong; `copied` is
    /// told that it goes on, and can end it.
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
            Ok(_) => "it does not have the hash that is its name".to_owned(),
            // It is cut off, or its disk cannot read it.
            Err(e) if e.kind() == StoreErrorKind::Damaged => e.to_string(),
            // It was ended, or it is not known who is wrong, so that the source is not to be asked again.
            Err(e) => return e,
        };
        // What is wrong here may be what the source has, as where it is being repaired.
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
