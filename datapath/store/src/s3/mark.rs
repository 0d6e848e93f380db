//! Marks: small keys that say who uses what, renewed while they are held.
//!
//! ```text
//!   locks/writer-OWNER-N   a publication is under way: nothing may be reclaimed
//!   locks/exclusive        somebody removes versions or reclaims: no publication or pin may begin
//!   locks/sweep            there may be something to reclaim; not held by anybody
//!   locks/clock-OWNER-N    written to learn the server's time, and removed at once
//!   pins/HASH/OWNER-N      the version with this manifest is in use
//! ```
//! Those in `holds/` (see [`crate::root`]) are set in the same order, and are neither renewed nor lapse.
//!
//! # Why nothing in use is removed
//! S3 shows every write to every later read. Who starts to publish or to pin writes a mark first and looks for
//! `locks/exclusive` then; who removes takes `locks/exclusive` first and looks for marks then. So at least one of two
//! that start at the same time sees the other, and gives way.
//!
//! # When a holder dies
//! A mark that was not renewed for [`STALE_AFTER`] by the server's own clock (the time that the server gives a key
//! that was just written, against the time it gave the mark) counts for nothing, and is removed. A holder that was
//! only asleep finds its mark gone: a publication then fails before it commits, a pin is set again. Who finds
//! `locks/exclusive` stale takes it before going on, to publish or to pin as well, so that a holder that wakes up removes nothing
//! that came to be needed meanwhile. Clocks of hosts do not matter.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::task::AbortHandle;

use crate::error::{StoreError, StoreErrorKind};
use crate::s3::bucket::{Bucket, Condition, Entry, Refusal};

/// How long a mark counts that is not renewed.
pub const STALE_AFTER: Duration = Duration::from_secs(600);
/// Renewals in that time.
const RENEWALS: u32 = 10;
/// How long an operation waits for another that removes.
pub(super) const EXCLUSIVE_WAIT: Duration = Duration::from_secs(30);
/// The pause between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(200);

pub(super) const EXCLUSIVE: &str = "locks/exclusive";
pub(super) const SWEEP_WANTED: &str = "locks/sweep";
pub(super) const LOCKS: &str = "locks";
pub(super) const PINS: &str = "pins";
pub(super) const HOLDS: &str = "holds";
pub(super) const WRITER_PREFIX: &str = "writer-";
const MARK_MAX_BYTES: u64 = 4096;
/// The pause before a mark is tried again that could not be set yet.
const SET_AGAIN: Duration = Duration::from_secs(5);

/// Whether a holder that lost its mark may set it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Renewal {
    /// No: somebody may have acted on its absence.
    OnlyMine,
    /// Yes.
    Always,
    /// Yes, unless the server refuses it.
    IfAllowed,
}

/// Makes marks for one opened store.
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

    /// A name that nobody else uses.
    pub(super) fn unique(&self) -> String {
        format!("{}-{}", self.owner, self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Sets a mark, and then waits until nobody removes.
    pub(super) fn shared(&self, key: &str, renewal: Renewal) -> Result<Mark, StoreError> {
        let until = Instant::now() + EXCLUSIVE_WAIT;
        loop {
            let mark = self.set(key, renewal)?;
            let Some((_, at_s)) = self.bucket.head(EXCLUSIVE)? else { return Ok(mark) };
            // Not held while waiting, or who removes would wait for us in turn.
            drop(mark);
            // Its holder may only be asleep, and would go on removing: it must find that the lock is not its own any more.
            if self.is_stale(at_s)? && self.exclusive(Duration::ZERO)?.is_some() {
                continue;
            }
            if Instant::now() >= until {
                return Err(self.busy());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Writes a key that does not lapse, and then waits until nobody removes. After an error it may be there.
    pub(super) fn lasting(&self, key: &str, content: &Bytes) -> Result<(), StoreError> {
        let until = Instant::now() + EXCLUSIVE_WAIT;
        match self.bucket.put(key, content, &Condition::Any) {
            Ok(_) => {}
            Err(Refusal::Failed(e)) => return Err(e),
            Err(_) => return Err(self.busy()),
        }
        // It stays meanwhile: who removes does not wait for it, and one who begins now heeds it.
        while let Some((_, at_s)) = self.bucket.head(EXCLUSIVE)? {
            if self.is_stale(at_s)? && self.exclusive(Duration::ZERO)?.is_some() {
                continue;
            }
            if Instant::now() >= until {
                return Err(self.busy());
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// A mark that is set as soon as the bucket can be reached, and again whenever it is lost. Who may not write there
    /// (`must_be_set` says that it may) does without.
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

    /// Takes the right to remove, which one at a time has. Waits for it as long as that is said.
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
                        std::thread::sleep(LOOK_EVERY);
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
                Err(_) => std::thread::sleep(LOOK_EVERY),
            }
        }
    }

    /// Makes a stale mark one of ours, so that its holder finds that it was taken for dead. `false`: it lives.
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

    /// The error where the right to remove is not to be had.
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
                "the store {} is being cleaned up by {holder}: try again when that is done; the lock of one that \
                 died ({}) lapses {} s after its last sign of life",
                self.bucket.url(),
                self.bucket.shown(EXCLUSIVE),
                self.stale_after.as_secs()
            ),
        )
    }

    /// Whether a mark of this age counts for nothing.
    pub(super) fn is_stale(&self, at_s: i64) -> Result<bool, StoreError> {
        Ok(self.age_s(self.server_time_s()?, at_s) > self.stale_after.as_secs())
    }

    fn age_s(&self, now_s: i64, at_s: i64) -> u64 {
        u64::try_from(now_s.saturating_sub(at_s)).unwrap_or(0)
    }

    fn server_time_s(&self) -> Result<i64, StoreError> {
        let key = format!("{LOCKS}/clock-{}", self.unique());
        let told = match self.bucket.put(&key, &Bytes::from_static(b"what time is it\n"), &Condition::Any) {
            Ok(_) => self.bucket.head(&key)?.map(|(_, at_s)| at_s),
            Err(Refusal::Failed(e)) => return Err(e),
            Err(_) => None,
        };
        self.bucket.remove(&key)?;
        // Without an answer nothing is stale.
        Ok(told.unwrap_or(i64::MIN))
    }

    /// Keys below `folder` that were not written for so long.
    pub(super) fn older_than(&self, folder: &str, age: Duration) -> Result<Vec<Entry>, StoreError> {
        let mut found = self.bucket.list(folder)?;
        if !found.is_empty() {
            let now_s = self.server_time_s()?;
            found.retain(|entry| self.age_s(now_s, entry.at_s) > age.as_secs());
        }
        Ok(found)
    }

    /// Marks below `folder` that count, and those that do not and can be removed.
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

/// A mark that is held. Dropping it removes it.
pub(super) struct Mark {
    bucket: Bucket,
    held: Arc<Held>,
    renewing: AbortHandle,
    /// From when it was written on nobody takes its holder for dead for twice as long.
    sure_for: Duration,
}

/// What the holder and the renewing task share.
struct Held {
    key: String,
    /// Nobody else writes this. Behind it is the number of the write, so that each has a tag of its own: that of many servers is a hash of
    /// what was written.
    content: Bytes,
    writes: AtomicU64,
    /// The tag of the last write. Whoever writes the mark holds this meanwhile, so that nobody takes a write of our own
    /// for that of another. It is never waited for by a thread, but by tasks: the threads that wait for S3 are few,
    /// and the writer that holds it needs one of them.
    tag: tokio::sync::Mutex<String>,
    lost: AtomicBool,
}

impl Mark {
    /// One that was written with this tag, or is yet to be.
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

    /// Makes sure that the mark was there all the time, right now.
    pub(super) fn confirm(&self) -> Result<(), StoreError> {
        let (bucket, held) = (self.bucket.clone(), Arc::clone(&self.held));
        match self.bucket.wait(async move { held.write(&bucket, Renewal::OnlyMine).await })? {
            Ok(()) => Ok(()),
            Err(Refusal::Failed(e)) => Err(e),
            Err(_) => Err(StoreError::new(
                StoreErrorKind::Locked,
                format!(
                    "this process did not reach {} for so long that others took it for dead and may have removed \
                     what it wrote: try again",
                    self.bucket.url()
                ),
            )),
        }
    }
}

impl Mark {
    /// Confirms it and removes keys, which ends long before others may take us for dead and need them: what is left then stays.
    pub(super) fn remove_all(&self, keys: Vec<String>) -> Result<(), StoreError> {
        if keys.is_empty() {
            return Ok(());
        }
        // The server takes the mark after that.
        let until = Instant::now() + self.sure_for;
        self.confirm()?;
        self.bucket.remove_all_until(keys, until)
    }

    /// Stops renewing it, and leaves it to lapse.
    pub(super) fn leave(self) {
        self.held.lost.store(true, Ordering::Release);
    }
}

impl Held {
    /// Writes the mark once more. Where it may not be set again and is not ours any more, it is lost for good.
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
            // What is there may be ours all the same, written by a request whose answer was lost, and its tag with it.
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
                tracing::warn!(error = %e, key, "a version can be removed while it is read here");
                held.lost.store(true, Ordering::Release);
                return;
            }
            Err(Refusal::Failed(e)) if !is_set && e.kind() == StoreErrorKind::Unreachable => {
                // What it is to keep from being removed is in use already.
                tracing::debug!(error = %e, "a mark in S3 cannot be set yet");
                pause = every.min(SET_AGAIN);
            }
            Err(Refusal::Failed(e)) => tracing::warn!(error = %e, "a mark in S3 is not renewed now"),
            Err(_) => {
                let key = bucket.shown(&held.key);
                tracing::warn!(key, "a mark was removed by somebody who took us for dead");
                return;
            }
        }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.renewing.abort();
        // The exclusive lock has one name for all: what is there now may be that of who took us for dead. Once it is
        // written anew nobody does so for long enough to remove it. All other marks have names of their own.
        let removed = if self.held.key == EXCLUSIVE { self.confirm() } else { Ok(()) };
        if self.held.lost.load(Ordering::Acquire) {
            return;
        }
        if let Err(e) = removed.and_then(|()| self.bucket.remove(&self.held.key)) {
            tracing::warn!(error = %e, "a mark is left in S3, and lapses by itself");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::s3::bucket::{Operation, PROMPT_MAX};
    use crate::s3::{Keys, S3Options, S3Url};

    #[test]
    fn marks_and_removals_are_over_before_a_mark_is_stale() {
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
        // One that is shorter stays.
        options.timeout = Some(Duration::from_secs(5));
        let marks = Marks::new(Bucket::new(&url, &options).unwrap(), "tester", STALE_AFTER);
        assert_eq!(marks.bucket.timeout(Operation::Write), Duration::from_secs(5));
    }
}
