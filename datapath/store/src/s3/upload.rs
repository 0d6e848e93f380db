//! Sending an object to S3: at once when it is small, otherwise in parts, several at a time.
//!
//! The parts of an object that is copied from another store are written down in `tmp/HASH.upload`, those of a copy with holes in
//! `tmp/HASH.LIST.upload`, so that a copy that was interrupted goes on where it was, from whatever host. All of the source is read again
//! then: a part that is there counts only where it was made of the same bytes, so that the hash of what was read is that of what is there.
//! What nobody went on with for [`ABANDONED_AFTER`] is given back with the next space that is.
//!
//! Two copies of one object at the same time send the parts of one upload, where the second one finds the state of the first. One of
//! them completes it, or gives it up; the other finds that the server knows it no more. If the object is there by then, it is done, else
//! it begins anew, with an upload that is its own: that is not written down, as the state may by then be that of a third copy, and
//! nothing is left of it where it fails.
//!
//! A state is written only where there is none, or over one of the same upload, or that nobody can go on with. So of two copies that
//! begin at the same time, each with an upload, one writes its state, and the upload of the other is not written down, either.

use std::time::Duration;

use bytes::Bytes;

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::s3::bucket::{Bucket, Condition, Entry, Refusal};
use crate::s3::object_key;
use crate::s3::partial_copies::{self, PARTIAL};

/// Larger objects are sent in parts of this size, or of larger ones where there would be too many.
pub(super) const PART_BYTES: u64 = 16 << 20;
/// The most parts that S3 allows is 10,000.
const PARTS_MAX: u64 = 9_000;
/// Parts that are sent at the same time; each is in memory meanwhile.
const PARTS_AT_ONCE: usize = 4;
/// The largest part. What would take larger ones is not sent.
const PART_MAX_BYTES: u64 = 1 << 30;
const STATE_MAX_BYTES: u64 = 4 << 20;

/// Where states are kept.
pub(super) const STATES: &str = "tmp";
const STATE_SUFFIX: &str = ".upload";
/// How long an interrupted sending is kept to go on with: parts cost as much as objects, and no listing shows them.
pub(super) const ABANDONED_AFTER: Duration = Duration::from_secs(7 * 24 * 3600);

/// Where the state of the sending of an object, or of a copy with holes, is kept: under the name of its key.
pub(super) fn state_key(key: &str) -> String {
    let name = key.rsplit_once('/').map_or(key, |(_, name)| name);
    format!("{STATES}/{name}{STATE_SUFFIX}")
}

/// The key of which the state with this name says how far it is.
fn key_of(state: &str) -> Option<String> {
    let name = state.strip_suffix(STATE_SUFFIX)?;
    let whole = name.parse::<Hash>().ok().map(object_key);
    whole.or_else(|| partial_copies::named(name).map(|_| format!("{PARTIAL}/{name}")))
}

/// Fills a buffer with the bytes at an offset.
pub(super) type Read<'a> = dyn FnMut(u64, &mut [u8]) -> Result<(), StoreError> + 'a;

/// What is sent: where to, how much, and from where.
pub(super) struct Sending<'a> {
    pub(super) key: &'a str,
    pub(super) len_bytes: u64,
    /// Where the state of an interrupted sending is kept, for one that can go on.
    pub(super) state_key: Option<String>,
    /// Called for all bytes, in order, also for those that an earlier sending sent. From the first one on again where it begins anew.
    pub(super) read: &'a mut Read<'a>,
    /// Called when this many bytes more are there.
    pub(super) sent: &'a mut dyn FnMut(u64) -> Result<(), StoreError>,
    /// Called before the object appears: its last chance to be refused.
    pub(super) check: &'a mut dyn FnMut() -> Result<(), StoreError>,
}

/// A part that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// The server's name of it.
    pub(crate) name: String,
    /// Of its bytes, as they were sent.
    pub(crate) hash: Hash,
}

/// A sending in parts, as far as it is.
pub(crate) struct Parts {
    pub(crate) upload: String,
    part_bytes: u64,
    /// The parts that the server has, from the first on.
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
        // What was cut or changed by hand could name a part that is another one: the sending begins anew.
        (fits && parts.encode() == bytes).then_some(parts)
    }

    /// Takes note of a part that was sent, in place of another one or after the last.
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

/// Where it is written down how far a sending is.
struct State {
    key: String,
    /// What was there when it was last looked at: another one is not written over.
    there: Condition,
    /// Whether that is the state of this upload.
    is_ours: bool,
}

impl State {
    /// Writes down how far the sending is. `false`: what is there is that of another upload, or this one was given up.
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
            // Of another copy that sends the same one: what it has written down can be gone on with as well.
            Some((there, tag)) if upload_in(&there) == Some(parts.upload.as_str()) => {
                (self.there, self.is_ours) = (Condition::Tag(tag), true);
                Ok(true)
            }
            _ => Ok(false),
        }
    }
}

/// The upload that a state of any release names.
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
            format!("cannot write {}: the server lost what was sent; try again", bucket.shown(key)),
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
    let mut told_bytes = 0;
    loop {
        let lost = match send_as(bucket, &mut sending, parts, state, &mut told_bytes) {
            Ok(()) => return Ok(()),
            Err(Stopped::Lost(e)) => e,
            Err(Stopped::ForNow(e) | Stopped::ForGood(e)) => return Err(e),
        };
        // Completed by another copy, or by an attempt whose answer was lost. What was there before tells nothing: where an object is mended
        // it is the damaged one.
        let there = bucket.head(sending.key)?;
        if there != before && there.is_some_and(|(len_bytes, _)| len_bytes == sending.len_bytes) {
            return (sending.sent)(sending.len_bytes.saturating_sub(told_bytes));
        }
        if sending.state_key.is_none() {
            return Err(lost);
        }
        tracing::info!(key = bucket.shown(sending.key), "what was sent of it is lost: it is sent anew");
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
            "cannot write {}: it has {} GiB, and a bucket gets at most {} GiB of one object: keep it in a directory",
            bucket.shown(sending.key),
            sending.len_bytes >> 30,
            (PARTS_MAX * PART_MAX_BYTES) >> 30
        ),
    ))
}

/// Sends an object as one upload. Of one that nobody will go on with nothing is left.
fn send_as(
    bucket: &Bucket,
    sending: &mut Sending<'_>,
    mut parts: Parts,
    mut state: Option<State>,
    told_bytes: &mut u64,
) -> Result<(), Stopped> {
    let outcome = send_parts(bucket, sending, &mut parts, &mut state, told_bytes).and_then(|()| {
        (sending.check)().map_err(Stopped::ForGood)?;
        let completed = bucket.complete_parts(sending.key, &parts.upload, &parts.names());
        completed.map_err(|e| stopped(bucket, sending.key, e, Stopped::ForGood))
    });
    let is_ours = state.as_ref().is_some_and(|state| state.is_ours);
    if is_ours && matches!(outcome, Err(Stopped::ForNow(_))) {
        return outcome;
    }
    // What was sent is sent, and what was not has its parts given back, whatever becomes of the state.
    if let Some(state) = state
        && let Err(e) = remove_state(bucket, &state.key, &parts.upload)
    {
        tracing::warn!(error = %e, "the state of an upload that is over is left in S3; it goes in a week");
    }
    if outcome.is_err()
        && let Err(also) = bucket.abort_parts(sending.key, &parts.upload)
    {
        tracing::warn!(error = %also, "parts are left in S3; a lifecycle rule of the bucket removes them");
    }
    outcome
}

/// Removes the state of an upload. What is there may by now be that of another copy's upload, which stays.
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
        // Of another release, or of parts of another size: nobody will go on with it.
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

/// Gives back the parts of a sending that was abandoned, and its state after them.
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

/// Why a sending stopped.
enum Stopped {
    /// What was sent so far can be gone on with.
    ForNow(StoreError),
    /// It is of no use any more.
    ForGood(StoreError),
    /// The server knows the upload, or a part of it, no more.
    Lost(StoreError),
}

/// What a refusal means for the upload, and what it does unless the upload is lost.
fn stopped(bucket: &Bucket, key: &str, refusal: Refusal, otherwise: fn(StoreError) -> Stopped) -> Stopped {
    let means: fn(StoreError) -> Stopped = match refusal {
        Refusal::Absent => Stopped::Lost,
        _ => otherwise,
    };
    means(must(bucket, key, refusal))
}

/// Tells how much is there by now. What is sent a second time is told once.
fn tell(sending: &mut Sending<'_>, there_bytes: u64, told_bytes: &mut u64) -> Result<(), Stopped> {
    let more_bytes = there_bytes.saturating_sub(*told_bytes);
    *told_bytes = there_bytes.max(*told_bytes);
    (sending.sent)(more_bytes).map_err(Stopped::ForNow)
}

fn send_parts(
    bucket: &Bucket,
    sending: &mut Sending<'_>,
    parts: &mut Parts,
    state: &mut Option<State>,
    told_bytes: &mut u64,
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
            tell(sending, there_bytes, told_bytes)?;
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
        tell(sending, there_bytes, told_bytes)?;
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
    fn the_state_of_a_sending_is_read_back_only_where_it_fits() {
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
    fn a_state_names_the_key_whose_parts_it_has() {
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
