//! Finds a copy of a damaged chunk by its hash, anywhere in a store: in data objects other than the damaged
//! one. [`super`] calls it if the same object of another store has no good copy.

use std::cell::OnceCell;

use headwater_store::{Hash, Store};

use super::read_checked;
use crate::chunk::unpack;
use crate::index::ChunkIndex;
use crate::manifest::{ChunkRef, Manifest};
use crate::progress::Cancel;
use crate::verify_round::{ChunkKey, FAILURES_MAX, VerifyRound};

/// A store in which chunks are searched by their hash.
pub(super) struct ByHash<'a> {
    pub(super) store: &'a dyn Store,
    round: &'a VerifyRound,
    /// Whether it is the store that is repaired, which is read at the rate of the round.
    is_own: bool,
    /// The places of one version's chunks in this store, according to all manifests of the store. They are read
    /// once, when the first chunk of the version is searched. `None`: the store's chunks have another size, so it has none of
    /// them.
    index: OnceCell<Result<Option<ChunkIndex>, String>>,
}

/// Why a store gave no copy of a chunk.
struct NoCopy {
    why: String,
    /// The store answered, and has no usable copy.
    is_certain: bool,
}

impl<'a> ByHash<'a> {
    pub(super) fn new(store: &'a dyn Store, round: &'a VerifyRound, is_own: bool) -> Self {
        Self { store, round, is_own, index: OnceCell::new() }
    }

    /// The bytes of a chunk from a data object other than `object`, if they have the stored length, otherwise
    /// the reason. If a store answered that it lacks a chunk, it is not asked again in the round, whatever
    /// the other stores answered.
    pub(super) fn read(
        &self,
        chunk: &ChunkRef,
        object: Hash,
        version: &Manifest,
        cancel: &Cancel,
    ) -> Result<Vec<u8>, String> {
        let shown = self.store.shown();
        let place = ChunkKey::new(&object, chunk).sought_in(&shown);
        if self.round.is_unfound(place) {
            return Err("no other data object has a usable copy (searched for another version)".to_owned());
        }
        self.look_for(chunk, object, version, cancel).map_err(|NoCopy { why, is_certain }| {
            // A store that did not answer now may do so when the next version is repaired.
            if is_certain {
                self.round.not_found(place);
            }
            why
        })
    }

    fn look_for(
        &self,
        chunk: &ChunkRef,
        object: Hash,
        version: &Manifest,
        cancel: &Cancel,
    ) -> Result<Vec<u8>, NoCopy> {
        let index = self.index(version, cancel).map_err(|why| NoCopy { why, is_certain: false })?;
        let Some(index) = index else {
            let why = "the store has chunks of another size".to_owned();
            return Err(NoCopy { why, is_certain: true });
        };
        let (mut why, mut is_certain) = ("no other data object has the chunk".to_owned(), true);
        for copy in index.copies(&chunk.hash) {
            let Some(there) = index.object(copy.object).filter(|there| there.id != object) else { continue };
            let (id, stored_bytes) = (there.id, chunk.stored_bytes);
            if copy.stored_bytes != stored_bytes {
                why = format!(
                    "data object {id} has it in another compression: {} bytes instead of {stored_bytes}",
                    copy.stored_bytes
                );
                continue;
            }
            self.take(u64::from(stored_bytes), cancel);
            // The compressed bytes are checked together with the whole object.
            match read_checked(self.store, there, &copy, version.chunk_bytes(), unpack) {
                Ok(stored) => return Ok(stored),
                Err(e) => {
                    why = format!("the copy of the chunk in data object {id} cannot be used: {e}");
                    // A damaged copy does not count.
                    is_certain &= e.kind().is_damage();
                }
            }
        }
        Err(NoCopy { why, is_certain })
    }

    fn index(&self, version: &Manifest, cancel: &Cancel) -> Result<Option<&ChunkIndex>, String> {
        let index = self.index.get_or_init(|| {
            if self.store.chunk_bytes() != version.chunk_bytes() {
                return Ok(None);
            }
            if self.round.is_given_up(&self.store.shown()) {
                return Err(format!(
                    "the store's manifests could not be read for {FAILURES_MAX} versions; the next round reads them again"
                ));
            }
            let built = ChunkIndex::build_for(self.store, version, &mut |bytes| {
                self.take(bytes, cancel);
                cancel.check("the repair")
            });
            self.round.has_told(&self.store.shown(), built.is_ok());
            built.map(Some).map_err(|e| format!("the manifests of the store cannot be read: {e}"))
        });
        index.as_ref().map(Option::as_ref).map_err(String::clone)
    }

    fn take(&self, bytes: u64, cancel: &Cancel) {
        if self.is_own {
            self.round.take(bytes, cancel);
        }
    }
}
