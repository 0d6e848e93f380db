//! Checks once, before the first write, that a server respects the conditional headers with which a store is
//! written.
//!
//! Lists of versions and the lock of removals are written with `If-None-Match` and `If-Match`. A server that
//! ignores these headers answers 200 to two writers at the same time, and the change of the first writer is
//! lost.
//!
//! The probe writes a key of its own three times. The server must accept the first write and refuse the other
//! two:
//!
//! | write | condition | answer |
//! |---|---|---|
//! | 1 | `If-None-Match: *` | 200 |
//! | 2 | `If-None-Match: *` | 412 or 409 |
//! | 3 | `If-Match` with a tag that the key does not have | 412 or 409 |
//!
//! The key is removed at the end. A process that dies before that leaves its key. The next probe removes keys
//! of probes that are older than [`STALE_AFTER`] by the server's clock. The cleanup of stale marks (`mark`)
//! removes them too. A probe takes far less than `STALE_AFTER`.

use bytes::Bytes;

use crate::error::{StoreError, StoreErrorKind};
use crate::s3::STALE_AFTER;
use crate::s3::bucket::{Bucket, Condition, Refusal};
use crate::s3::mark::LOCKS;

/// The prefix of a probe's key, in the folder of the marks.
const PREFIX: &str = "probe-";
/// A tag that no key has.
const WRONG_TAG: &str = "\"00000000000000000000000000000000\"";

/// Whether a key belongs to a probe. `name` is its name below the store's prefix.
pub(super) fn is_of_a_probe(name: &str) -> bool {
    name.split_once('/').is_some_and(|(folder, name)| folder == LOCKS && name.starts_with(PREFIX))
}

/// Fails unless the server respects both conditions. No other process uses `unique`.
pub(super) fn check_conditional_writes(bucket: &Bucket, unique: &str) -> Result<(), StoreError> {
    let bucket = &bucket.prompt();
    let name = format!("{PREFIX}{unique}");
    let key = format!("{LOCKS}/{name}");
    let kept = test_conditions(bucket, &key);
    // A key that is left does no harm, and the next probe tries to remove it again.
    if let Err(e) = clean_up(bucket, &name, &key) {
        tracing::warn!(error = %e, "cannot remove the key of a test write from S3");
    }
    kept
}

fn test_conditions(bucket: &Bucket, key: &str) -> Result<(), StoreError> {
    match bucket.put(key, &Bytes::from_static(&[1]), &Condition::Absent) {
        Ok(_) => {}
        Err(Refusal::Failed(e)) => return Err(e),
        Err(_) => {
            let shown = bucket.shown(key);
            let message = format!("cannot write {shown}: the server says that it exists already; try again");
            return Err(StoreError::new(StoreErrorKind::Io, message));
        }
    }
    for (number, condition, feature) in
        [(2, Condition::Absent, "If-None-Match: *"), (3, Condition::Tag(WRONG_TAG.to_owned()), "If-Match")]
    {
        match bucket.put_once(key, &Bytes::from(vec![number]), condition) {
            Err(Refusal::Conflict) => {}
            Err(Refusal::Failed(e)) => return Err(e),
            Ok(_) | Err(Refusal::Absent | Refusal::Unknown(_)) => return Err(ignored(bucket, feature)),
        }
    }
    Ok(())
}

fn ignored(bucket: &Bucket, feature: &str) -> StoreError {
    let url = bucket.url();
    let server = url.endpoint.as_deref().unwrap_or("Amazon S3");
    StoreError::new(
        StoreErrorKind::Invalid,
        format!(
            "cannot write to {url}: {server} ignores conditional writes (it accepted a PUT with '{feature}' that it must refuse), \
             so concurrent writers would lose versions. Use a server that supports If-None-Match and If-Match on PUT; an \
             existing store can still be read"
        ),
    )
}

/// Removes the key of this probe, and those that other probes left.
fn clean_up(bucket: &Bucket, name: &str, key: &str) -> Result<(), StoreError> {
    let found = bucket.list_beginning(LOCKS, PREFIX);
    bucket.remove(key)?;
    let found = found?;
    let Some(now_s) = found.iter().find(|entry| entry.name == name).map(|entry| entry.at_s) else {
        return Ok(());
    };
    for entry in found {
        let age_s = u64::try_from(now_s.saturating_sub(entry.at_s)).unwrap_or(0);
        if age_s > STALE_AFTER.as_secs() {
            bucket.remove(&format!("{LOCKS}/{}", entry.name))?;
        }
    }
    Ok(())
}
