//! Reading an object of the bucket.

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::s3::bucket::Bucket;
use crate::store::{Check, Object};

/// An object that is read range by range.
pub(super) struct S3Object {
    pub id: Hash,
    pub key: String,
    pub bucket: Bucket,
    pub len_bytes: u64,
}

impl Object for S3Object {
    fn id(&self) -> Hash {
        self.id
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let end = u64::try_from(into.len()).ok().and_then(|len| offset.checked_add(len));
        if end.is_none_or(|end| end > self.len_bytes) {
            return Err(StoreError::new(
                StoreErrorKind::Damaged,
                format!(
                    "cannot read {} bytes at {offset} of {}: it ends at {}",
                    into.len(),
                    self.bucket.shown(&self.key),
                    self.len_bytes
                ),
            ));
        }
        let bytes = self.bucket.get_range(&self.key, offset, into.len())?;
        into.copy_from_slice(&bytes);
        Ok(())
    }

    fn read_checked(&self, offset: u64, into: &mut [u8], check: &mut Check<'_>) -> Result<(), StoreError> {
        self.read_range(offset, into)?;
        if check(into).is_ok() {
            return Ok(());
        }
        // What was changed on its way here is right the second time.
        self.read_range(offset, into)?;
        check(into)
    }
}
