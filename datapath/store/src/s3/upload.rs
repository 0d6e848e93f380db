//! Sending an object to S3: at once when it is small, otherwise in parts, several at a time.
//!
//! The parts of an object that is copied from another store are written down in `tmp/HASH.upload`, so that a copy
//! that was interrupted goes on where it was, from whatever host. All of the source is read again then: a part that is
//! there counts only where it was made of the same bytes, so that the hash of what was read is that of what is there.
//! What nobody went on with for [`ABANDONED_AFTER`] is given back with the next space that is.

use std::time::Duration;

use bytes::Bytes;

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::s3::bucket::{Bucket, Condition, Entry, Refusal};
use crate::s3::object_key;

/// Larger objects are sent in parts of this size, or of larger ones where there would be too many.
pub(super) const PART_BYTES: u64 = 16 << 20;
/// The most parts that S3 allows is 10,000.
const PARTS_MAX: u64 = 9_000;
/// Parts that are sent at the same time; each is in memory meanwhile.
const PARTS_AT_ONCE: usize = 4;
const STATE_MAX_BYTES: u64 = 4 << 20;

/// Where states are kept.
pub(super) const STATES: &str = "tmp";
const STATE_SUFFIX: &str = ".upload";
/// How long an interrupted sending is kept to go on with: parts cost as much as objects, and no listing shows them.
pub(super) const ABANDONED_AFTER: Duration = Duration::from_secs(7 * 24 * 3600);

/// Where the state of the sending of an object is kept.
pub(super) fn state_key(id: Hash) -> String {
    format!("{STATES}/{id}{STATE_SUFFIX}")
}

/// Fills a buffer with the bytes at an offset.
pub(super) type Read<'a> = dyn FnMut(u64, &mut [u8]) -> Result<(), StoreError> + 'a;

/// What is sent: where to, how much, and from where.
pub(super) struct Sending<'a> {
    pub(super) key: &'a str,
    pub(super) len_bytes: u64,
    /// Where the state of an interrupted sending is kept, for one that can go on.
    pub(super) state_key: Option<String>,
    /// Called for all bytes, in order, also for those that an earlier sending sent.
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
    let part_bytes = PART_BYTES.max(sending.len_bytes.div_ceil(PARTS_MAX).next_multiple_of(1 << 20));
    let mut parts = begin(bucket, &sending, part_bytes)?;
    let outcome = send_parts(bucket, &mut sending, &mut parts).and_then(|()| {
        (sending.check)().map_err(|e| (e, true))?;
        bucket
            .complete_parts(sending.key, &parts.upload, &parts.names())
            .map_err(|e| (must(bucket, sending.key, e), true))
    });
    let keep = sending.state_key.is_some() && !matches!(outcome, Err((_, true)));
    if let (Some(state), true) = (&sending.state_key, outcome.is_ok() || !keep) {
        bucket.remove(state)?;
    }
    let Err((e, _)) = outcome else { return Ok(()) };
    if !keep && let Err(also) = bucket.abort_parts(sending.key, &parts.upload) {
        tracing::warn!(error = %also, "parts are left in S3; a lifecycle rule of the bucket removes them");
    }
    Err(e)
}

fn begin(bucket: &Bucket, sending: &Sending<'_>, part_bytes: u64) -> Result<Parts, StoreError> {
    if let Some(state) = &sending.state_key
        && let Some((bytes, _)) = bucket.get(state, STATE_MAX_BYTES)?
    {
        if let Some(parts) = Parts::decode(&bytes, part_bytes) {
            return Ok(parts);
        }
        // Of another release, or of parts of another size: nobody will go on with it.
        if let Some(upload) = upload_in(&bytes)
            && let Err(e) = bucket.abort_parts(sending.key, upload)
        {
            tracing::warn!(error = %e, "parts are left in S3; a lifecycle rule of the bucket removes them");
        }
    }
    Ok(Parts { upload: bucket.begin_parts(sending.key)?, part_bytes, there: Vec::new() })
}

/// Gives back the parts of a sending that was abandoned, and its state after them.
pub(super) fn forget(bucket: &Bucket, abandoned: &Entry) -> Result<(), StoreError> {
    let id = abandoned.name.strip_suffix(STATE_SUFFIX).and_then(|id| id.parse::<Hash>().ok());
    let Some(id) = id else { return Ok(()) };
    let state = state_key(id);
    if let Some((bytes, _)) = bucket.get(&state, STATE_MAX_BYTES)?
        && let Some(upload) = upload_in(&bytes)
    {
        bucket.abort_parts(&object_key(id), upload)?;
    }
    bucket.remove(&state)
}

/// An error, and whether what was sent so far is of no use any more.
type Stopped = (StoreError, bool);

fn send_parts(bucket: &Bucket, sending: &mut Sending<'_>, parts: &mut Parts) -> Result<(), Stopped> {
    let keep = |e: StoreError| (e, false);
    let count = sending.len_bytes.div_ceil(parts.part_bytes);
    parts.there.truncate(usize_of(count));
    let mut number = 0;
    let (mut wave, mut hashes) = (Vec::new(), Vec::new());
    while number < count {
        let offset = number * parts.part_bytes;
        let len = parts.part_bytes.min(sending.len_bytes - offset);
        let bytes = read_part(sending, offset, len).map_err(keep)?;
        let hash = Hash::of(&bytes);
        if parts.there.get(usize_of(number)).is_some_and(|there| there.hash == hash) {
            (sending.sent)(len).map_err(keep)?;
        } else {
            wave.push((usize_of(number), bytes));
            hashes.push(hash);
        }
        number += 1;
        if wave.len() < PARTS_AT_ONCE && number < count || wave.is_empty() {
            continue;
        }
        let bytes: usize = wave.iter().map(|(_, bytes)| bytes.len()).sum();
        match bucket.put_parts(sending.key, &parts.upload, std::mem::take(&mut wave)) {
            Ok(sent) => {
                for ((number, name), hash) in sent.into_iter().zip(hashes.drain(..)) {
                    parts.sent(number, Part { name, hash });
                }
            }
            // The server has forgotten the upload.
            Err(Refusal::Absent) => return Err((must(bucket, sending.key, Refusal::Absent), true)),
            Err(e) => return Err(keep(must(bucket, sending.key, e))),
        }
        if let Some(state) = &sending.state_key {
            let written = bucket.put(state, &parts.encode(), &Condition::Any);
            written.map_err(|e| keep(must(bucket, state, e)))?;
        }
        (sending.sent)(u64::try_from(bytes).unwrap_or(u64::MAX)).map_err(keep)?;
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
    fn golden_bytes() {
        let parts = parts(16 << 20);
        let (a, b) = (Hash::of(b"a"), Hash::of(b"\"b\""));
        let text = format!("headwater upload 2\n16777216\nu-1\n{a} a\n{b} \"b\"\n");
        assert_eq!(&parts.encode()[..], text.as_bytes());
        let begun = Parts { there: Vec::new(), ..parts };
        assert_eq!(&begun.encode()[..], b"headwater upload 2\n16777216\nu-1\n");
    }
}
