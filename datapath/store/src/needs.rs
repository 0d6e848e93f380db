//! The trait with which a caller tells the store which data a version needs. The store cannot read
//! manifests, because their format belongs to the crate headwater-image, which implements the trait.

use std::ops::Range;

use crate::error::StoreError;
use crate::hash::Hash;

/// Lists the data that a version needs, by reading its manifest.
pub trait Needs: Sync {
    /// The data objects that the version with this manifest needs, and their lengths.
    fn objects(&self, manifest: &[u8]) -> Result<Vec<(Hash, u64)>, StoreError>;

    /// Calls `needed` for each range of a data object that the version needs, in any order. A range may be
    /// reported several times.
    fn stretches(&self, manifest: &[u8], needed: &mut dyn FnMut(Hash, Range<u64>)) -> Result<(), StoreError>;
}

/// A function that lists objects, all of which are needed as a whole.
impl<F: Fn(&[u8]) -> Result<Vec<(Hash, u64)>, StoreError> + Sync> Needs for F {
    fn objects(&self, manifest: &[u8]) -> Result<Vec<(Hash, u64)>, StoreError> {
        self(manifest)
    }

    fn stretches(&self, manifest: &[u8], needed: &mut dyn FnMut(Hash, Range<u64>)) -> Result<(), StoreError> {
        self(manifest)?.into_iter().for_each(|(id, len_bytes)| needed(id, 0..len_bytes));
        Ok(())
    }
}
