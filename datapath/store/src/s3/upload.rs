//! Sends an object to S3: in one request if it is small, otherwise in parts, several at a time.
//!
//! # Continuing an interrupted copy
//! The parts of an object that is copied from another store are recorded in a state file: `tmp/HASH.upload`,
//! or `tmp/HASH.LIST.upload` for a copy with holes. With it any host can continue an interrupted copy. All of
//! the source is then read again. A part counts only if it was made of the same bytes, so the hash of what
//! was read is also the hash of what was sent. If a copy is not continued for [`ABANDONED_AFTER`], the next
//! reclaim discards its parts.
//!
//! # Two copies of one object at the same time
//! If the second copy finds the state of the first, both send parts of the same upload. One of them completes
//! or aborts it, and the server then no longer knows the upload for the other. If the object exists by then,
//! the other copy is done. Otherwise it starts again with an upload of its own. That upload is not recorded,
//! because the state may belong to a third copy by then. If that upload fails, its parts are discarded.
//!
//! A state is written only if there is none, or over a state of the same upload, or over one that no copy can
//! continue. So if two copies begin at the same moment, each with an upload, one of them writes its state,
//! and the upload of the other is not recorded.

use std::time::Duration;

use bytes::Bytes;

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::s3::bucket::{Bucket, Condition, Entry, Refusal};
use crate::s3::object_key;
use crate::s3::partial_copies::{self, PARTIAL};

/// Larger objects are sent in parts of this size, or of a larger size if there would be too many parts.
pub(super) const PART_BYTES: u64 = 16 << 20;
/// S3 allows at most 10,000 parts.
const PARTS_MAX: u64 = 9_000;
/// Parts that are sent concurrently. Each of them is in memory until it is sent.
const PARTS_AT_ONCE: usize = 4;
/// The largest part. An object that would need larger parts is refused.
const PART_MAX_BYTES: u64 = 1 << 30;
const STATE_MAX_BYTES: u64 = 4 << 20;

/// The folder of states.
pub(super) const STATES: &str = "tmp";
const STATE_SUFFIX: &str = ".upload";
/// How long an interrupted upload is kept so that a copy can continue it. Its parts cost as much as objects,
/// and no listing shows them.
pub(super) const ABANDONED_AFTER: Duration = Duration::from_secs(7 * 24 * 3600);

/// The key of the state for an upload to `key`.
pub(super) fn state_key(key: &str) -> String {
    let name = key.rsplit_once('/').map_or(key, |(_, name)| name);
    format!("{STATES}/{name}{STATE_SUFFIX}")
}

/// The key whose upload the state with this name describes.
fn key_of(state: &str) -> Option<String> {
    let name = state.strip_suffix(STATE_SUFFIX)?;
    let whole = name.parse::<Hash>().ok().map(object_key);
    whole.or_else(|| partial_copies::named(name).map(|_| format!("{PARTIAL}/{name}")))
}

/// Fills a buffer with the bytes at an offset.
pub(super) type Read<'a> = dyn FnMut(u64, &mut [u8]) -> Result<(), StoreError> + 'a;

/// What to send: the destination, the length and the source.
pub(super) struct Sending<'a> {
    pub(super) key: &'a str,
    pub(super) len_bytes: u64,
    /// The key for the state of an interrupted upload. `None`: the upload cannot be continued.
    pub(super) state_key: Option<String>,
    /// Called for all bytes in order, including those that an earlier upload sent. If the upload starts
    /// again, the calls start again from the first byte.
    pub(super) read: &'a mut Read<'a>,
    /// Called when this many more bytes have been sent.
    pub(super) sent: &'a mut dyn FnMut(u64) -> Result<(), StoreError>,
    /// Called before the object appears: the last chance to refuse it.
    pub(super) check: &'a mut dyn FnMut() -> Result<(), StoreError>,
}

/// A part that the server has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// The server's name of the part.
    pub(crate) name: String,
    /// The hash of its bytes as they were sent.
    pub(crate) hash: Hash,
}

/// The progress of an upload in parts.
pub(crate) struct Parts {
    pub(crate) upload: String,
    part_bytes: u64,
    /// The parts that the server has, from the first one on.
    pub(crate) there: Vec<Part>,
}

impl Parts {
    pub(crate) fn encode(&self) -> Bytes {
        let mut text = format!("headwater upload 2\n{}\n{}\n", self.part_bytes, self.upload);
        for part in &self.there {
            text.push_str(&format!("{} {}\n", part.hash, part.name));
        }
        Bytes::from(text)
    }

    pub(crate) fn decode(bytes: &[u8], part_bytes: u64) -> Option<Self> {
        let mut lines = std::str::from_utf8(bytes).ok()?.lines();
        let (magic, size, upload) = (lines.next()?, lines.next()?, lines.next()?);
        let fits = magic == "headwater upload 2" && size.parse() == Ok(part_bytes) && !upload.is_empty();
        let part = |line: &str| {
            let (hash, name) = line.split_once(' ').filter(|(_, name)| !name.is_empty())?;
            Some(Part { name: name.to_owned(), hash: hash.parse().ok()? })
        };
        let parts =
            Self { upload: upload.to_owned(), part_bytes, there: lines.map(part).collect::<Option<_>>()? };
        // A state that was cut off or edited could name a wrong part, so the upload starts again.
        (fits && parts.encode() == bytes).then_some(parts)
    }

    /// Records a part that was sent: replaces an existing one, or adds one at the end.
    fn sent(&mut self, number: usize, part: Part) {
        match self.there.get_mut(number) {
            Some(there) => *there = part,
            None => self.there.push(part),
        }
    }

    fn names(&self) -> Vec<String> {
        self.there.iter().map(|part| part.name.clone()).collect()
    }
}

/// The key that records the progress of an upload.
struct State {
    key: String,
    /// The content of the key when it was last read. Any other content is not overwritten.
    there: Condition,
    /// Whether that content is the state of this upload.
    is_ours: bool,
}

impl State {
    /// Records the progress of the upload. `false`: the key has the state of another upload, or this upload
    /// was aborted.
    fn write(&mut self, bucket: &Bucket, parts: &Parts) -> Result<bool, StoreError> {
        match bucket.put(&self.key, &parts.encode(), &self.there) {
            Ok(tag) => {
                (self.there, self.is_ours) = (Condition::Tag(tag), true);
                return Ok(true);
            }
            Err(Refusal::Failed(e) | Refusal::Unknown(Some(e))) => return Err(e),
            Err(Refusal::Absent | Refusal::Conflict | Refusal::Unknown(None)) => {}
        }
        match bucket.get(&self.key, STATE_MAX_BYTES)? {
            // Another copy sends the same upload, and its recorded progress can be continued as well.
            Some((there, tag)) if upload_in(&there) == Some(parts.upload.as_str()) => {
                (self.there, self.is_ours) = (Condition::Tag(tag), true);
                Ok(true)
            }
            _ => Ok(false),
        }
    }
}

/// The upload that a state of any format names.
fn upload_in(state: &[u8]) -> Option<&str> {
    let mut lines = std::str::from_utf8(state).ok()?.lines();
    let is_state = lines.next()?.starts_with("headwater upload ");
    lines.nth(1).filter(|upload| is_state && !upload.is_empty())
}

fn usize_of(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

fn read_part(sending: &mut Sending<'_>, offset: u64, len: u64) -> Result<Bytes, StoreError> {
    let mut bytes = vec![0; usize_of(len)];
    (sending.read)(offset, &mut bytes)?;
    Ok(Bytes::from(bytes))
}

fn must(bucket: &Bucket, key: &str, refusal: Refusal) -> StoreError {
    match refusal {
        Refusal::Failed(e) => e,
        Refusal::Absent | Refusal::Conflict | Refusal::Unknown(_) => StoreError::new(
            StoreErrorKind::Io,
            format!(
                "cannot write {}: the server lost the parts that were sent; try again",
                bucket.shown(key)
            ),
        ),
    }
}

/// Sends an object.
pub(super) fn send(bucket: &Bucket, mut sending: Sending<'_>) -> Result<(), StoreError> {
    if sending.len_bytes <= PART_BYTES {
        let len_bytes = sending.len_bytes;
        let bytes = read_part(&mut sending, 0, len_bytes)?;
        (sending.check)()?;
        bucket.put(sending.key, &bytes, &Condition::Any).map_err(|e| must(bucket, sending.key, e))?;
        return (sending.sent)(len_bytes);
    }
    let part_bytes = part_bytes_of(bucket, &sending)?;
    let before = bucket.head(sending.key)?;
    let (mut parts, mut state) = begin(bucket, &sending, part_bytes)?;
    let mut reported_bytes = 0;
    loop {
        let lost = match send_as(bucket, &mut sending, parts, state, &mut reported_bytes) {
            Ok(()) => return Ok(()),
            Err(Stopped::Lost(e)) => e,
            Err(Stopped::ForNow(e) | Stopped::ForGood(e)) => return Err(e),
        };
        // Another copy, or an attempt whose answer was lost, may have completed the upload. An object that
        // existed before proves nothing: during a repair it is the damaged one.
        let there = bucket.head(sending.key)?;
        if there != before && there.is_some_and(|(len_bytes, _)| len_bytes == sending.len_bytes) {
            return (sending.sent)(sending.len_bytes.saturating_sub(reported_bytes));
        }
        if sending.state_key.is_none() {
            return Err(lost);
        }
        tracing::info!(
            key = bucket.shown(sending.key),
            "the server lost the parts that were sent: sending all of them again"
        );
        sending.state_key = None;
        (parts, state) = (begin_again_from_start(bucket, sending.key, part_bytes)?, None);
    }
}

/// The size of the parts of an object.
fn part_bytes_of(bucket: &Bucket, sending: &Sending<'_>) -> Result<u64, StoreError> {
    let part_bytes = PART_BYTES.max(sending.len_bytes.div_ceil(PARTS_MAX).next_multiple_of(1 << 20));
    if part_bytes <= PART_MAX_BYTES {
        return Ok(part_bytes);
    }
    Err(StoreError::new(
        StoreErrorKind::NoSpace,
        format!(
            "cannot write {}: the object has {} GiB, and an object in a bucket can have at most {} GiB: use a store in a directory",
            bucket.shown(sending.key),
            sending.len_bytes >> 30,
            (PARTS_MAX * PART_MAX_BYTES) >> 30
        ),
    ))
}

/// Sends an object as one upload. If no copy can continue it after a failure, its parts are discarded.
fn send_as(
    bucket: &Bucket,
    sending: &mut Sending<'_>,
    mut parts: Parts,
    mut state: Option<State>,
    reported_bytes: &mut u64,
) -> Result<(), Stopped> {
    let outcome = send_parts(bucket, sending, &mut parts, &mut state, reported_bytes).and_then(|()| {
        (sending.check)().map_err(Stopped::ForGood)?;
        let completed = bucket.complete_parts(sending.key, &parts.upload, &parts.names());
        completed.map_err(|e| stopped(bucket, sending.key, e, Stopped::ForGood))
    });
    let is_ours = state.as_ref().is_some_and(|state| state.is_ours);
    if is_ours && matches!(outcome, Err(Stopped::ForNow(_))) {
        return outcome;
    }
    // Whatever happens to the state, a finished upload stays finished, and the parts of a failed upload are
    // discarded.
    if let Some(state) = state
        && let Err(e) = remove_state(bucket, &state.key, &parts.upload)
    {
        tracing::warn!(error = %e, "cannot remove the record of a finished upload; S3 keeps it for a week");
    }
    if outcome.is_err()
        && let Err(also) = bucket.abort_parts(sending.key, &parts.upload)
    {
        tracing::warn!(error = %also, "parts are left in S3; a lifecycle rule of the bucket removes them");
    }
    outcome
}

/// Removes the state of an upload. If the key has the state of another copy's upload by now, it stays.
fn remove_state(bucket: &Bucket, state: &str, upload: &str) -> Result<(), StoreError> {
    match bucket.get(state, STATE_MAX_BYTES)? {
        Some((bytes, _)) if upload_in(&bytes) == Some(upload) => bucket.remove(state),
        _ => Ok(()),
    }
}

fn begin(
    bucket: &Bucket,
    sending: &Sending<'_>,
    part_bytes: u64,
) -> Result<(Parts, Option<State>), StoreError> {
    let Some(key) = sending.state_key.clone() else {
        return Ok((begin_again_from_start(bucket, sending.key, part_bytes)?, None));
    };
    let mut state = State { key, there: Condition::Absent, is_ours: false };
    if let Some((bytes, tag)) = bucket.get(&state.key, STATE_MAX_BYTES)? {
        state.there = Condition::Tag(tag);
        if let Some(parts) = Parts::decode(&bytes, part_bytes) {
            state.is_ours = true;
            return Ok((parts, Some(state)));
        }
        // The state has another format or part size, so no copy will continue it.
        if let Some(upload) = upload_in(&bytes)
            && let Err(e) = bucket.abort_parts(sending.key, upload)
        {
            tracing::warn!(error = %e, "parts are left in S3; a lifecycle rule of the bucket removes them");
        }
    }
    Ok((begin_again_from_start(bucket, sending.key, part_bytes)?, Some(state)))
}

fn begin_again_from_start(bucket: &Bucket, key: &str, part_bytes: u64) -> Result<Parts, StoreError> {
    Ok(Parts { upload: bucket.begin_parts(key)?, part_bytes, there: Vec::new() })
}

/// Discards the parts of an abandoned upload, and then its state.
pub(super) fn forget(bucket: &Bucket, abandoned: &Entry) -> Result<(), StoreError> {
    let Some(key) = key_of(&abandoned.name) else { return Ok(()) };
    let state = state_key(&key);
    if let Some((bytes, _)) = bucket.get(&state, STATE_MAX_BYTES)?
        && let Some(upload) = upload_in(&bytes)
    {
        bucket.abort_parts(&key, upload)?;
    }
    bucket.remove(&state)
}

/// Why an upload stopped.
enum Stopped {
    /// The upload can be continued.
    ForNow(StoreError),
    /// The upload is useless.
    ForGood(StoreError),
    /// The server no longer knows the upload or one of its parts.
    Lost(StoreError),
}

/// Converts a refusal to the reason why the upload stopped; `otherwise` is the reason unless the upload is
/// lost.
fn stopped(bucket: &Bucket, key: &str, refusal: Refusal, otherwise: fn(StoreError) -> Stopped) -> Stopped {
    let means: fn(StoreError) -> Stopped = match refusal {
        Refusal::Absent => Stopped::Lost,
        _ => otherwise,
    };
    means(must(bucket, key, refusal))
}

/// Reports the bytes sent so far. Bytes that are sent a second time are reported once.
fn report(sending: &mut Sending<'_>, there_bytes: u64, reported_bytes: &mut u64) -> Result<(), Stopped> {
    let more_bytes = there_bytes.saturating_sub(*reported_bytes);
    *reported_bytes = there_bytes.max(*reported_bytes);
    (sending.sent)(more_bytes).map_err(Stopped::ForNow)
}

fn send_parts(
    bucket: &Bucket,
    sending: &mut Sending<'_>,
    parts: &mut Parts,
    state: &mut Option<State>,
    reported_bytes: &mut u64,
) -> Result<(), Stopped> {
    let count = sending.len_bytes.div_ceil(parts.part_bytes);
    parts.there.truncate(usize_of(count));
    let (mut number, mut there_bytes) = (0, 0u64);
    let (mut wave, mut hashes) = (Vec::new(), Vec::new());
    while number < count {
        let offset = number * parts.part_bytes;
        let len = parts.part_bytes.min(sending.len_bytes - offset);
        let bytes = read_part(sending, offset, len).map_err(Stopped::ForNow)?;
        let hash = Hash::of(&bytes);
        if parts.there.get(usize_of(number)).is_some_and(|there| there.hash == hash) {
            there_bytes = there_bytes.saturating_add(len);
            report(sending, there_bytes, reported_bytes)?;
        } else {
            wave.push((usize_of(number), bytes));
            hashes.push(hash);
        }
        number += 1;
        if wave.len() < PARTS_AT_ONCE && number < count || wave.is_empty() {
            continue;
        }
        let bytes: usize = wave.iter().map(|(_, bytes)| bytes.len()).sum();
        let sent = bucket.put_parts(sending.key, &parts.upload, std::mem::take(&mut wave));
        let sent = sent.map_err(|e| stopped(bucket, sending.key, e, Stopped::ForNow))?;
        for ((number, name), hash) in sent.into_iter().zip(hashes.drain(..)) {
            parts.sent(number, Part { name, hash });
        }
        if let Some(ours) = state.as_mut()
            && !ours.write(bucket, parts).map_err(Stopped::ForNow)?
        {
            *state = None;
        }
        there_bytes = there_bytes.saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX));
        report(sending, there_bytes, reported_bytes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(part_bytes: u64) -> Parts {
        let part = |name: &str| Part { name: name.into(), hash: Hash::of(name.as_bytes()) };
        Parts { upload: "u-1".into(), part_bytes, there: vec![part("a"), part("\"b\"")] }
    }

    #[test]
    fn an_upload_state_is_read_back_only_if_it_fits() {
        let parts = parts(7);
        let bytes = parts.encode();
        let back = Parts::decode(&bytes, 7).unwrap();
        assert_eq!((back.upload.as_str(), back.there), ("u-1", parts.there));
        assert!(Parts::decode(&bytes, 8).is_none());
        let hash = Hash::of(b"a");
        let decode = |text: String| Parts::decode(text.as_bytes(), 7);
        assert!(decode("headwater upload 2\n7\nu\n".into()).is_some());
        assert!(decode("headwater upload 1\n7\nu\n".into()).is_none(), "without hashes");
        assert!(decode(String::new()).is_none());
        assert!(decode(format!("headwater upload 2\n7\nu\n{hash} a\r\n")).is_none(), "another end of line");
        assert!(Parts::decode(&bytes[..bytes.len() - 1], 7).is_none(), "cut");
        assert!(decode(format!("headwater upload 2\n7\nu\n{hash} \n")).is_none(), "a part without a name");
        assert!(decode("headwater upload 2\n7\nu\na\n".into()).is_none(), "a part without a hash");
    }

    #[test]
    fn a_state_key_names_the_key_of_its_upload() {
        let (id, list) = (Hash::of(b"object"), "0123456789abcdef0123456789abcdef");
        for key in [object_key(id), format!("holed/{id}.{list}")] {
            let state = state_key(&key);
            assert_eq!(key_of(state.strip_prefix("tmp/").unwrap()), Some(key));
        }
        for other in
            [format!("{id}"), format!("{id}.{list}.{list}.upload"), format!("{id}..upload"), ".upload".into()]
        {
            assert_eq!(key_of(&other), None, "{other}");
        }
    }

    #[test]
    fn golden_bytes() {
        let parts = parts(16 << 20);
        let (a, b) = (Hash::of(b"a"), Hash::of(b"\"b\""));
        let text = format!("headwater upload 2\n16777216\nu-1\n{a} a\n{b} \"b\"\n");
        assert_eq!(&parts.encode()[..], text.as_bytes());
        let begun = Parts { there: Vec::new(), ..parts };
        assert_eq!(&begun.encode()[..], b"headwater upload 2\n16777216\nu-1\n");
    }
}
