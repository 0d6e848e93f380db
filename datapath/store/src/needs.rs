//! What versions need. The store does not know what manifests say: who does tells it.

use std::ops::Range;

use crate::error::StoreError;
use crate::hash::Hash;

/// Reads manifests.
pub trait Needs: Sync {
    /// The data objects that the version with this manifest needs, and how long each is.
    fn objects(&self, manifest: &[u8]) -> Result<Vec<(Hash, u64)>, StoreError>;

    /// Tells each stretch of a data object that the version needs, in any order; one may be told several times.
    fn stretches(&self, manifest: &[u8], needed: &mut dyn FnMut(Hash, Range<u64>)) -> Result<(), StoreError>;
}

/// What a function says of objects, all of which are needed whole.
impl<F: Fn(&[u8]) -> Result<Vec<(Hash, u64)>, StoreError> + Sync> Needs for F {
    fn objects(&self, manifest: &[u8]) -> Result<Vec<(Hash, u64)>, StoreError> {
        self(manifest)
    }

    fn stretches(&self, manifest: &[u8], needed: &mut dyn FnMut(Hash, Range<u64>)) -> Result<(), StoreError> {
        self(manifest)?.into_iter().for_each(|(id, len_bytes)| needed(id, 0..len_bytes));
        Ok(())
    }
}
