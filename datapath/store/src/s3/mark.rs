//! Marks: small keys in the bucket that say which process uses what, because a bucket has no locks. The process
//! that wrote a mark is its holder, and renews it.
//!
//! ```text
//!   locks/writer-OWNER-N   a publication is in progress: nothing may be reclaimed
//!   locks/exclusive        a process removes versions or reclaims: no publication or pin may begin
//!   locks/sweep            there may be something to reclaim; it has no holder
//!   locks/clock-OWNER-N    written to learn the server's time, and removed at once
//!   pins/HASH/OWNER-N      the version with this manifest is in use
//! ```
//! Keys in `holds/` (see [`crate::retention`]) are set in the same order. They are not renewed and never
//! become stale.
//!
//! # Why nothing in use is removed
//! S3 shows every write to every later read. A process that publishes or pins first writes a mark, and then
//! checks `locks/exclusive`. A process that removes first takes `locks/exclusive`, and then checks for marks.
//! So if two start at the same time, at least one of them sees the other and gives up.
//!
//! # When a holder dies
//! A mark is stale if it was not renewed for [`STALE_AFTER`]. Its age is measured by the server's clock: the
//! time of a key that was just written, minus the time of the mark. Clocks of hosts do not matter. A stale
//! mark is ignored and removed. A holder that was only suspended then finds its mark gone: a publication
//! fails before it commits, and a pin is set again.
//!
//! A process that finds a stale `locks/exclusive` takes that lock before it continues, even to publish or to
//! pin. So if the previous holder wakes up, it no longer has the lock, and removes nothing that is needed by
//! then.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::task::AbortHandle;

use crate::error::{StoreError, StoreErrorKind};
use crate::s3::bucket::{Bucket, Condition, Entry, Refusal};

/// The age from which a mark that is not renewed is stale.
pub const STALE_AFTER: Duration = Duration::from_secs(600);
/// Renewals of a mark in that time.
const RENEWALS: u32 = 10;
/// How long an operation waits for another process to finish removing.
pub(super) const EXCLUSIVE_WAIT: Duration = Duration::from_secs(30);
/// The pause between two checks of the lock.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

pub(super) const EXCLUSIVE: &str = "locks/exclusive";
pub(super) const SWEEP_WANTED: &str = "locks/sweep";
pub(super) const LOCKS: &str = "locks";
pub(super) const PINS: &str = "pins";
pub(super) const HOLDS: &str = "holds";
pub(super) const WRITER_PREFIX: &str = "writer-";
const MARK_MAX_BYTES: u64 = 4096;
/// The pause after a failed attempt to set a mark.
const SET_AGAIN: Duration = Duration::from_secs(5);

/// Whether a holder may set a lost mark again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Renewal {
    /// No: another process may have acted because the mark was missing.
    OnlyMine,
    /// Yes.
    Always,
    /// Yes, unless the server refuses it.
    IfAllowed,
}

/// Creates the marks of one opened store.
#[derive(Clone, Debug)]
pub(super) struct Marks {
    bucket: Bucket,
    owner: String,
    stale_after: Duration,
    next: Arc<AtomicU64>,
}

impl Marks {
    pub(super) fn new(bucket: Bucket, owner: &str, stale_after: Duration) -> Self {
        let sound = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '-') { c } else { '-' };
        let owner = owner.chars().map(sound).take(128).collect();
        Self { bucket: bucket.prompt(), owner, stale_after, next: Arc::new(AtomicU64::new(1)) }
    }

    /// A name that no other process uses.
    pub(super) fn unique(&self) -> String {
        format!("{}-{}", self.owner, self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Sets a mark, and then waits until no process is removing.
    pub(super) fn shared(&self, key: &str, renewal: Renewal) -> Result<Mark, StoreError> {
        let until = Instant::now() + EXCLUSIVE_WAIT;
        loop {
            let mark = self.set(key, renewal)?;
            let Some((_, at_s)) = self.bucket.head(EXCLUSIVE)? else { return Ok(mark) };
            // The mark does not exist during the wait. Otherwise the process that removes would wait for this
            // one in turn.
            drop(mark);
            // The holder may only be suspended, and would continue to remove when it wakes up. It must find
            // that it no longer has the lock.
            if self.is_stale(at_s)? && self.exclusive(Duration::ZERO)?.is_some() {
                continue;
            }
            if Instant::now() >= until {
                return Err(self.busy());
            }
            std::thread::sleep(CHECK_INTERVAL);
        }
    }

    /// Writes a key that never becomes stale, and then waits until no process is removing. After an error the
    /// key may exist.
    pub(super) fn lasting(&self, key: &str, content: &Bytes) -> Result<(), StoreError> {
        let until = Instant::now() + EXCLUSIVE_WAIT;
        match self.bucket.put(key, content, &Condition::Any) {
            Ok(_) => {}
            Err(Refusal::Failed(e)) => return Err(e),
            Err(_) => return Err(self.busy()),
        }
        // The key stays during the wait. A process that is removing now does not wait for it, and one that
        // begins later respects it.
        while let Some((_, at_s)) = self.bucket.head(EXCLUSIVE)? {
            if self.is_stale(at_s)? && self.exclusive(Duration::ZERO)?.is_some() {
                continue;
            }
            if Instant::now() >= until {
                return Err(self.busy());
            }
            std::thread::sleep(CHECK_INTERVAL);
        }
        Ok(())
    }

    /// Creates a mark that is set as soon as the bucket can be reached, and again whenever it is lost. If
    /// `must_be_set` is false, a process without the permission to write works without the mark.
    pub(super) fn later(&self, key: &str, must_be_set: bool) -> Mark {
        let renewal = if must_be_set { Renewal::Always } else { Renewal::IfAllowed };
        Mark::keep(self, key, self.content(), None, renewal)
    }

    fn set(&self, key: &str, renewal: Renewal) -> Result<Mark, StoreError> {
        let content = self.content();
        match self.bucket.put(key, &content, &Condition::Any) {
            Ok(tag) => Ok(Mark::keep(self, key, content, Some(tag), renewal)),
            Err(Refusal::Failed(e)) => Err(e),
            Err(_) => Err(self.busy()),
        }
    }

    fn content(&self) -> Bytes {
        Bytes::from(format!("{}\n", self.unique()))
    }

    /// Takes the exclusive right to remove, and waits up to `wait` for it. `None`: another process has it.
    pub(super) fn exclusive(&self, wait: Duration) -> Result<Option<Mark>, StoreError> {
        let until = Instant::now() + wait;
        let content = self.content();
        loop {
            let mut condition = Condition::Absent;
            if let Some((_, tag)) = self.bucket.get(EXCLUSIVE, MARK_MAX_BYTES)? {
                match self.bucket.head(EXCLUSIVE)? {
                    Some((_, at_s)) if self.is_stale(at_s)? => condition = Condition::Tag(tag),
                    Some(_) if Instant::now() >= until => return Ok(None),
                    Some(_) => {
                        std::thread::sleep(CHECK_INTERVAL);
                        continue;
                    }
                    None => continue,
                }
            }
            match self.bucket.put(EXCLUSIVE, &content, &condition) {
                Ok(tag) => {
                    return Ok(Some(Mark::keep(self, EXCLUSIVE, content, Some(tag), Renewal::OnlyMine)));
                }
                Err(Refusal::Failed(e) | Refusal::Unknown(Some(e))) => return Err(e),
                Err(_) if Instant::now() >= until => return Ok(None),
                Err(_) => std::thread::sleep(CHECK_INTERVAL),
            }
        }
    }

    /// Replaces a stale mark by one of this process, so that its holder notices that it was considered dead.
    /// `false`: the holder is alive.
    pub(super) fn take_over(&self, key: &str) -> Result<bool, StoreError> {
        let Some((_, tag)) = self.bucket.get(key, MARK_MAX_BYTES)? else { return Ok(true) };
        let Some((_, at_s)) = self.bucket.head(key)? else { return Ok(true) };
        if !self.is_stale(at_s)? {
            return Ok(false);
        }
        match self.bucket.put(key, &self.content(), &Condition::Tag(tag)) {
            Ok(_) => Ok(true),
            Err(Refusal::Failed(e) | Refusal::Unknown(Some(e))) => Err(e),
            Err(_) => Ok(false),
        }
    }

    /// The error if another process has the right to remove.
    pub(super) fn busy(&self) -> StoreError {
        let holder = self.bucket.get(EXCLUSIVE, MARK_MAX_BYTES).ok().flatten();
        let first_line =
            |bytes: &[u8]| String::from_utf8_lossy(bytes).lines().next().unwrap_or_default().to_owned();
        let holder = holder.map(|(bytes, _)| first_line(&bytes));
        let holder =
            holder.filter(|holder| !holder.is_empty()).unwrap_or_else(|| "another process".to_owned());
        StoreError::new(
            StoreErrorKind::Locked,
            format!(
                "the store {} is being cleaned up by {holder}: try again when that is done; if the holder died, its lock ({}) \
                 expires {} s after it was last renewed",
                self.bucket.url(),
                self.bucket.shown(EXCLUSIVE),
                self.stale_after.as_secs()
            ),
        )
    }

    /// Whether a mark written at this time is stale.
    pub(super) fn is_stale(&self, at_s: i64) -> Result<bool, StoreError> {
        Ok(self.age_s(self.server_time_s()?, at_s) > self.stale_after.as_secs())
    }

    fn age_s(&self, now_s: i64, at_s: i64) -> u64 {
        u64::try_from(now_s.saturating_sub(at_s)).unwrap_or(0)
    }

    fn server_time_s(&self) -> Result<i64, StoreError> {
        let key = format!("{LOCKS}/clock-{}", self.unique());
        let written = match self.bucket.put(&key, &Bytes::from_static(b"what time is it\n"), &Condition::Any)
        {
            Ok(_) => self.bucket.head(&key)?.map(|(_, at_s)| at_s),
            Err(Refusal::Failed(e)) => return Err(e),
            Err(_) => None,
        };
        self.bucket.remove(&key)?;
        // If the time is unknown, nothing is stale.
        Ok(written.unwrap_or(i64::MIN))
    }

    /// Keys below `folder` that were last written longer ago than `age`.
    pub(super) fn older_than(&self, folder: &str, age: Duration) -> Result<Vec<Entry>, StoreError> {
        let mut found = self.bucket.list(folder)?;
        if !found.is_empty() {
            let now_s = self.server_time_s()?;
            found.retain(|entry| self.age_s(now_s, entry.at_s) > age.as_secs());
        }
        Ok(found)
    }

    /// Marks below `folder`: the valid ones, and the stale ones, which can be removed.
    pub(super) fn live_and_stale(
        &self,
        folder: &str,
        prefix: &str,
    ) -> Result<(Vec<Entry>, Vec<Entry>), StoreError> {
        let found = self.bucket.list(folder)?;
        let marks: Vec<Entry> = found.into_iter().filter(|entry| entry.name.starts_with(prefix)).collect();
        if marks.is_empty() {
            return Ok((marks, Vec::new()));
        }
        let now_s = self.server_time_s()?;
        let limit_s = self.stale_after.as_secs();
        Ok(marks.into_iter().partition(|mark| self.age_s(now_s, mark.at_s) <= limit_s))
    }
}

/// A mark that is held. Dropping it removes the mark.
pub(super) struct Mark {
    bucket: Bucket,
    held: Arc<Held>,
    renewing: AbortHandle,
    /// After each write of the mark, no process considers its holder dead for twice this time.
    sure_for: Duration,
}

/// What the holder and the renewing task share.
struct Held {
    key: String,
    /// Content that no other process writes. The number of the write is appended, so that each write has a
    /// tag of its own: on many servers the tag is a hash of the content.
    content: Bytes,
    writes: AtomicU64,
    /// The tag of the last write. A task that writes the mark holds this lock, so that it does not mistake a
    /// write of this process for a foreign one. Only tasks wait for the lock, never threads: few threads wait
    /// for S3, and the task that holds the lock needs one of them.
    tag: tokio::sync::Mutex<String>,
    lost: AtomicBool,
}

impl Mark {
    /// Creates a mark that was written with this tag or, without a tag, has yet to be written.
    fn keep(marks: &Marks, key: &str, content: Bytes, tag: Option<String>, renewal: Renewal) -> Self {
        let is_set = tag.is_some();
        let held = Held {
            key: key.to_owned(),
            content,
            writes: AtomicU64::new(0),
            tag: tokio::sync::Mutex::new(tag.unwrap_or_default()),
            lost: AtomicBool::new(false),
        };
        let (bucket, held) = (marks.bucket.clone(), Arc::new(held));
        let every = marks.stale_after / RENEWALS;
        let renewing = keep_renewing(bucket.clone(), Arc::clone(&held), every, renewal, is_set);
        let renewing = bucket.spawn(renewing);
        Self { bucket, held, renewing, sure_for: marks.stale_after / 2 }
    }

    /// Makes sure that the mark existed without interruption until now.
    pub(super) fn confirm(&self) -> Result<(), StoreError> {
        let (bucket, held) = (self.bucket.clone(), Arc::clone(&self.held));
        match self.bucket.wait(async move { held.write(&bucket, Renewal::OnlyMine).await })? {
            Ok(()) => Ok(()),
            Err(Refusal::Failed(e)) => Err(e),
            Err(_) => Err(StoreError::new(
                StoreErrorKind::Locked,
                format!(
                    "this process did not reach {} for so long that other processes considered it dead, and may have removed \
                     what it wrote: try again",
                    self.bucket.url()
                ),
            )),
        }
    }
}

impl Mark {
    /// Confirms the mark and then removes keys. The removal ends long before other processes may consider
    /// this one dead and need the keys. Keys that are left by then stay.
    pub(super) fn remove_all(&self, keys: Vec<String>) -> Result<(), StoreError> {
        if keys.is_empty() {
            return Ok(());
        }
        // Measured from before the write, because the server receives the mark after this moment.
        let until = Instant::now() + self.sure_for;
        self.confirm()?;
        self.bucket.remove_all_until(keys, until)
    }

    /// Stops renewing the mark and lets it become stale.
    pub(super) fn leave(self) {
        self.held.lost.store(true, Ordering::Release);
    }
}

impl Held {
    /// Writes the mark once more. If it belongs to another process by now and may not be set again, it is
    /// lost for good.
    async fn write(&self, bucket: &Bucket, renewal: Renewal) -> Result<(), Refusal> {
        let mut tag = self.tag.lock().await;
        if self.lost.load(Ordering::Acquire) {
            return Err(Refusal::Conflict);
        }
        let mut condition = match renewal {
            Renewal::OnlyMine => Condition::Tag(tag.clone()),
            Renewal::Always | Renewal::IfAllowed => Condition::Any,
        };
        let number = self.writes.fetch_add(1, Ordering::Relaxed);
        let content = Bytes::from([&self.content[..], format!("{number}\n").as_bytes()].concat());
        let mut is_first = true;
        loop {
            let written = bucket.clone().put_later(self.key.clone(), content.clone(), condition).await;
            let refusal = match written {
                Ok(new) => {
                    *tag = new;
                    return Ok(());
                }
                Err((Refusal::Failed(e), _)) => return Err(Refusal::Failed(e)),
                Err((refusal, _)) => refusal,
            };
            // The key may still hold this process's mark: a request whose answer was lost wrote it, with a
            // tag that is not known here.
            if is_first
                && let Some((there, found)) =
                    bucket.clone().get_later(self.key.clone(), MARK_MAX_BYTES).await?
                && there.starts_with(&self.content)
            {
                is_first = false;
                condition = Condition::Tag(found);
                continue;
            }
            self.lost.store(true, Ordering::Release);
            return Err(refusal);
        }
    }
}

async fn keep_renewing(bucket: Bucket, held: Arc<Held>, every: Duration, renewal: Renewal, mut is_set: bool) {
    let mut pause = if is_set { every } else { Duration::ZERO };
    loop {
        tokio::time::sleep(pause).await;
        pause = every;
        match held.write(&bucket, renewal).await {
            Ok(()) => is_set = true,
            Err(Refusal::Failed(e))
                if renewal == Renewal::IfAllowed && e.kind() != StoreErrorKind::Unreachable =>
            {
                let key = bucket.shown(&held.key);
                tracing::warn!(error = %e, key, "cannot pin a version in S3: other processes can remove it while it is read here");
                held.lost.store(true, Ordering::Release);
                return;
            }
            Err(Refusal::Failed(e)) if !is_set && e.kind() == StoreErrorKind::Unreachable => {
                // The version that the mark protects is in use already.
                tracing::debug!(error = %e, "cannot write the key in S3 that protects a version yet");
                pause = every.min(SET_AGAIN);
            }
            Err(Refusal::Failed(e)) => {
                tracing::warn!(error = %e, "cannot renew a lock or pin of this process in S3; trying again")
            }
            Err(_) => {
                let key = bucket.shown(&held.key);
                tracing::warn!(
                    key,
                    "this process did not renew its key in S3 for {} s, so another process removed the key: an import or removal that \
                     needs it fails; check the connection to S3, and run the command again",
                    (every * RENEWALS).as_secs()
                );
                return;
            }
        }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.renewing.abort();
        // All processes use the same key for the exclusive lock, so the key may belong to a process that
        // considered this one dead. After a fresh write no process does so for long enough to remove the key.
        // All other marks have unique names.
        let removed = if self.held.key == EXCLUSIVE { self.confirm() } else { Ok(()) };
        if self.held.lost.load(Ordering::Acquire) {
            return;
        }
        if let Err(e) = removed.and_then(|()| self.bucket.remove(&self.held.key)) {
            tracing::warn!(error = %e, "cannot remove a lock or pin in S3; it stays until it expires");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::s3::bucket::{Operation, PROMPT_MAX};
    use crate::s3::{Keys, S3Options, S3Url};

    #[test]
    fn writes_of_marks_and_removals_end_before_a_mark_is_stale() {
        let url: S3Url = "s3://images?endpoint=http://127.0.0.1:1&region=a&timeout=600".parse().unwrap();
        let mut options = S3Options::new("tester");
        options.keys = Keys::Given { id: "id".into(), secret: "secret".into() };
        let bucket = Bucket::new(&url, &options).unwrap();
        assert_eq!(bucket.timeout(Operation::Read), Duration::from_secs(600));
        assert_eq!(bucket.timeout(Operation::Remove), PROMPT_MAX);
        let marks = Marks::new(bucket, "tester", STALE_AFTER);
        for operation in [Operation::Read, Operation::Write, Operation::Remove] {
            assert_eq!(marks.bucket.timeout(operation), PROMPT_MAX);
        }
        assert!(PROMPT_MAX * options.attempts < marks.stale_after / 2);
        // A shorter timeout is kept.
        options.timeout = Some(Duration::from_secs(5));
        let marks = Marks::new(Bucket::new(&url, &options).unwrap(), "tester", STALE_AFTER);
        assert_eq!(marks.bucket.timeout(Operation::Write), Duration::from_secs(5));
    }
}
