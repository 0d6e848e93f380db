//! Reading an object of the bucket.

use std::sync::Arc;

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::s3::bucket::Bucket;
use crate::s3::part::Part;
use crate::store::{Check, Object};
use crate::waiting::Waiting;

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
        self.must_hold(offset, into.len())?;
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

    fn read_or_wait(
        &self,
        offset: u64,
        into: &mut [u8],
        check: &mut Check<'_>,
        waiting: &mut Waiting,
    ) -> Result<bool, StoreError> {
        self.must_hold(offset, into.len())?;
        let mut read = waiting.end::<Asked>().unwrap_or_default();
        let read_for = waiting.read_for();
        loop {
            let ask = || Part::ask(&self.bucket, &self.key, offset, into.len(), read_for);
            let part = read.part.take().or_else(ask);
            let Some(part) = part else {
                let parts = Arc::clone(self.bucket.parts());
                waiting.begin(read, move |_| parts.has_room(read_for));
                return Ok(false);
            };
            let bytes = match part.wait() {
                Ok(outcome) => outcome?,
                Err(part) => {
                    let is_over = part.is_over();
                    read.part = Some(part);
                    waiting.begin(read, move |_| is_over());
                    return Ok(false);
                }
            };
            into.copy_from_slice(&bytes);
            match check(into) {
                Ok(()) => return Ok(true),
                // As in `read_checked`.
                Err(e) if !read.was_refused && e.kind() == StoreErrorKind::Damaged => read.was_refused = true,
                Err(e) => return Err(e),
            }
        }
    }
}

/// A read under way.
#[derive(Default)]
struct Asked {
    part: Option<Part>,
    /// The first bytes that came were wrong.
    was_refused: bool,
}

impl S3Object {
    fn must_hold(&self, offset: u64, len: usize) -> Result<(), StoreError> {
        let end = u64::try_from(len).ok().and_then(|len| offset.checked_add(len));
        if end.is_some_and(|end| end <= self.len_bytes) {
            return Ok(());
        }
        Err(StoreError::new(
            StoreErrorKind::Damaged,
            format!(
                "cannot read {len} bytes at {offset} of {}: it ends at {}",
                self.bucket.shown(&self.key),
                self.len_bytes
            ),
        ))
    }
}
