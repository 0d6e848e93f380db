//! Copies of objects with holes in a bucket, each under a key of its own.
//!
//! ```text
//!   holed/HASH.LIST    | the object's bytes, with zeroes in its holes | the list of its holes | length of that list |
//!                        as many as the object HASH has                 its hash begins with LIST  8 bytes
//! ```
//! A bucket cannot punch holes. But an object that is copied from a directory may have holes, and then the
//! copy in the bucket is not complete. Another writer may copy the missing parts at the same time. So
//! `objects/HASH` is always complete, and a partial copy gets a key that names its list of holes. The same
//! holes always give the same bytes, so no key is ever overwritten with different bytes. If there is no
//! complete copy, the object is read from all of these keys. Its holes are those that all copies share.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::holes::{Filled, HOLES_MAX_BYTES, Holes, ObjectHashing};
use crate::s3::bucket::{Bucket, Entry};
use crate::s3::object::{Piece, S3Object};
use crate::s3::publication::{damaged_source, send_object};
use crate::s3::replica_rotation::Replica;
use crate::s3::upload::{self, Sending};
use crate::s3::{Inner, object_key};
use crate::store::Object;

/// The folder of partial copies.
pub(super) const PARTIAL: &str = "holed";
/// The length of the field that holds the list's length.
const LENGTH_BYTES: usize = 8;
/// How many bytes at the end of a key are read at once: enough for a list of more than a thousand holes.
const END_BYTES: u64 = 64 << 10;

/// The number of digits of a list's hash in the name of a key. With all digits the name would be too long for
/// some servers that store keys as files.
const LIST_DIGITS: usize = 32;

/// The digits of a list's hash that go into a key's name.
fn digits_of(list: &[u8]) -> String {
    Hash::of(list).to_string().chars().take(LIST_DIGITS).collect()
}

/// Parses a key's name into the object and the digits of its list.
pub(super) fn named(name: &str) -> Option<(Hash, &str)> {
    let (id, list) = name.split_once('.')?;
    let is_hex = list.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    Some((id.parse().ok()?, Some(list).filter(|list| list.len() == LIST_DIGITS && is_hex)?))
}

fn u64_of(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

fn usize_of(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

impl Inner {
    /// Copies an object of another store except its holes, and checks its hash before the copy appears.
    pub(super) fn copy_partial(
        &self,
        source: &dyn Object,
        holes: Arc<Holes>,
        copied: &mut dyn FnMut(u64) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let (id, len_bytes) = (source.id(), source.len_bytes());
        let whole = object_key(id);
        if self.bucket.head(&whole)?.is_some() {
            // Readers use the complete copy, so that copy has to be repaired.
            let own: Arc<dyn Object> = Arc::new(S3Object::whole(self, id, len_bytes));
            let filled = Filled::new(source, holes, own)?;
            let sent = send_object(self, &filled, &[], Some(upload::state_key(&whole)), copied);
            let shown = self.bucket.shown(&whole);
            let ours = |why: &str| {
                StoreError::of_own_object(format!(
                    "{shown} in the target is damaged ({why}), and the source has only a part of this object: run 'headwater store \
                     verify TARGET --repair-from STORE' with a store that has all of it"
                ))
            };
            return sent.map_err(|e| filled.blame(e, &ours, copied));
        }
        let mut end = holes.encode(len_bytes);
        let key = format!("{PARTIAL}/{id}.{}", digits_of(&end));
        end.extend_from_slice(&u64_of(end.len()).to_le_bytes());
        let begun = || ObjectHashing::new(&holes, len_bytes);
        let hashing = RefCell::new(begun());
        // The list is not part of the object.
        let mut left_bytes = len_bytes;
        let sending = Sending {
            key: &key,
            len_bytes: len_bytes.saturating_add(u64_of(end.len())),
            state_key: Some(upload::state_key(&key)),
            read: &mut |offset, into: &mut [u8]| {
                let (object, rest) = split(into, len_bytes.saturating_sub(offset));
                read_around(source, &holes, offset, object)?;
                // The source may be read a second time from its beginning.
                if offset == 0 {
                    *hashing.borrow_mut() = begun();
                }
                hashing.borrow_mut().update(object);
                let from = end.get(usize_of(offset.saturating_sub(len_bytes))..);
                if let Some(from) = from.and_then(|from| from.get(..rest.len())) {
                    rest.copy_from_slice(from);
                }
                Ok(())
            },
            sent: &mut |bytes| {
                let bytes = bytes.min(left_bytes);
                left_bytes = left_bytes.saturating_sub(bytes);
                copied(bytes)
            },
            check: &mut || {
                if hashing.replace(begun()).finish() == id { Ok(()) } else { Err(damaged_source(id)) }
            },
        };
        upload::send(&self.bucket, sending)
    }
}

/// Reads the parts outside the holes, and fills the holes with zeroes.
fn read_around(source: &dyn Object, holes: &Holes, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
    let end = offset.saturating_add(u64_of(into.len()));
    let (mut at, mut rest) = (offset, into);
    for hole in holes.within(&(offset..end)) {
        let (there, after) = split(rest, hole.start.saturating_sub(at));
        let (gone, after) = split(after, hole.end.saturating_sub(hole.start));
        if !there.is_empty() {
            source.read_range(at, there)?;
        }
        gone.fill(0);
        (at, rest) = (hole.end, after);
    }
    if rest.is_empty() { Ok(()) } else { source.read_range(at, rest) }
}

fn split(bytes: &mut [u8], at: u64) -> (&mut [u8], &mut [u8]) {
    let at = usize_of(at).min(bytes.len());
    bytes.split_at_mut(at)
}

/// The partial copies of an object that has no complete copy.
pub(super) struct PartialCopies {
    pub(super) len_bytes: u64,
    /// Ordered by the number of missing bytes; the fewest first.
    copies: Vec<PartialCopy>,
    /// The holes that all copies share.
    pub(super) common: Arc<Holes>,
    /// The index of the copy that is read first.
    first: AtomicUsize,
}

struct PartialCopy {
    key: String,
    /// Ranges that this copy lacks and another copy has, in order. Ranges that all copies lack are zeroes in
    /// each copy, so they can be read from any.
    lacks: Vec<Range<u64>>,
}

impl PartialCopy {
    /// The end of the stretch that this copy has from `at` on.
    fn ends(&self, at: u64) -> u64 {
        let next = self.lacks.partition_point(|lack| lack.end <= at);
        self.lacks.get(next).map_or(u64::MAX, |lack| lack.start.max(at))
    }

    /// The next offset after `at` at which this copy changes between having and lacking.
    fn changes(&self, at: u64) -> u64 {
        let next = self.lacks.partition_point(|lack| lack.end <= at);
        self.lacks.get(next).map_or(u64::MAX, |lack| if lack.start > at { lack.start } else { lack.end })
    }

    fn lacks_bytes(&self) -> u64 {
        self.lacks.iter().fold(0, |sum, lack| sum.saturating_add(lack.end.saturating_sub(lack.start)))
    }

    fn piece(&self, stretch: &Range<u64>) -> Piece {
        let len = usize_of(stretch.end.saturating_sub(stretch.start));
        Piece { key: self.key.clone(), offset: stretch.start, len }
    }
}

impl PartialCopies {
    /// Looks for copies of an object, of this length if it is known. Damaged copies are left out, unless
    /// there are no others.
    pub(super) fn find(
        bucket: &Bucket,
        id: Hash,
        len_bytes: Option<u64>,
    ) -> Result<Option<Self>, StoreError> {
        let mut found: Vec<(String, Holes)> = Vec::new();
        let (mut len_bytes, mut damaged) = (len_bytes, None);
        for entry in bucket.list_beginning(PARTIAL, &format!("{id}."))? {
            let Some((_, list)) = named(&entry.name) else { continue };
            match holes_of(bucket, &entry, list, len_bytes) {
                Ok((of_bytes, holes)) => {
                    len_bytes = Some(of_bytes);
                    found.push((format!("{PARTIAL}/{}", entry.name), holes));
                }
                // The key was removed after the listing.
                Err(e) if e.kind() == StoreErrorKind::NotFound => {}
                Err(e) if matches!(e.kind(), StoreErrorKind::Damaged | StoreErrorKind::UnknownFormat) => {
                    tracing::warn!(error = %e, "ignoring an unreadable copy of a data object with holes");
                    damaged = Some(e);
                }
                Err(e) => return Err(e),
            }
        }
        match (len_bytes, damaged) {
            (Some(len_bytes), _) if !found.is_empty() => Ok(Some(Self::of(len_bytes, found))),
            (_, Some(e)) => Err(e),
            _ => Ok(None),
        }
    }

    fn of(len_bytes: u64, found: Vec<(String, Holes)>) -> Self {
        let all = found.iter().map(|(_, holes)| holes);
        let common = all.fold(None, |common: Option<Holes>, holes| {
            Some(common.map_or_else(|| holes.clone(), |common| common.common(holes)))
        });
        let common = common.unwrap_or_default();
        let in_none = common.stretches();
        let copy = |(key, holes): (String, Holes)| {
            let lacks = without(&holes.stretches(), &in_none);
            PartialCopy { key, lacks }
        };
        let mut copies: Vec<PartialCopy> = found.into_iter().map(copy).collect();
        copies.sort_by_key(PartialCopy::lacks_bytes);
        Self { len_bytes, copies, common: Arc::new(common), first: AtomicUsize::new(0) }
    }

    /// Whether both lookups found the same copies.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let keys = |partial_copies: &Self| {
            partial_copies.copies.iter().map(|copy| copy.key.clone()).collect::<Vec<_>>()
        };
        keys(self) == keys(other)
    }

    /// Reads the next copy first from now on. `false`: every copy has been first already.
    pub(super) fn turn(&self) -> bool {
        let last = self.copies.len().saturating_sub(1);
        let next = |first: usize| (first < last).then(|| first.saturating_add(1));
        self.first.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).is_ok()
    }

    fn in_order(&self) -> impl Iterator<Item = &PartialCopy> {
        let first = self.first.load(Ordering::Acquire).min(self.copies.len());
        let (later, sooner) = self.copies.split_at(first);
        sooner.iter().chain(later)
    }

    /// The alternatives to read a range, in order. Each is tried if the bytes of the previous one were wrong.
    pub(super) fn ways(&self, stretch: &Range<u64>, turn: Replica) -> Vec<Vec<Piece>> {
        let whole = self.in_order().filter(|copy| copy.ends(stretch.start) >= stretch.end);
        let mut ways: Vec<Vec<Piece>> = whole.map(|copy| vec![copy.piece(stretch)]).collect();
        if ways.is_empty() {
            ways.push(self.pieces(stretch));
        }
        // Tried twice, in case the bytes were damaged in transit.
        let again = match ways.as_slice() {
            [only] => Some(only.clone()),
            _ => None,
        };
        ways.extend(again);
        if let Some(usual) = ways.first()
            && !matches!(turn, Replica::Usual | Replica::Reading(0))
        {
            let others = self.of_others(stretch, turn, usual);
            ways.insert(0, others);
        }
        ways
    }

    /// Assembles a range that no single copy has completely.
    fn pieces(&self, stretch: &Range<u64>) -> Vec<Piece> {
        let (mut pieces, mut at) = (Vec::new(), stretch.start);
        while at < stretch.end {
            // Some copy has this offset, because ranges that all copies lack count as present.
            let Some(copy) = self.in_order().find(|copy| copy.ends(at) > at) else { break };
            let end = copy.ends(at).min(stretch.end);
            pieces.push(copy.piece(&(at..end)));
            at = end;
        }
        pieces
    }

    /// Assembles a range without the copy that `turn` leaves out, wherever other copies have the bytes.
    /// `usual` is the normal way to read it. A damaged copy may adjoin a range that only the damaged copy
    /// has, so the choice is made for each part.
    fn of_others(&self, stretch: &Range<u64>, turn: Replica, usual: &[Piece]) -> Vec<Piece> {
        let (mut pieces, mut at) = (Vec::<Piece>::new(), stretch.start);
        while at < stretch.end {
            let gave = || usual.iter().rfind(|piece| piece.offset <= at).map(|piece| piece.key.as_str());
            let (left_out, times) = match turn {
                Replica::Usual => (None, 0),
                Replica::Other(times) => (gave(), times),
                // The first re-read leaves out the copy that was first before, because it gave most of the
                // bytes. Bytes that several other copies have come from each of them in turn.
                Replica::Reading(reading) => {
                    let number = usize::try_from(reading).unwrap_or(usize::MAX).saturating_sub(1);
                    let number = number.checked_rem(self.copies.len()).unwrap_or(0);
                    (self.in_order().nth(number).map(|copy| copy.key.as_str()), number)
                }
            };
            let having = || self.in_order().filter(move |copy| copy.ends(at) > at);
            let others: Vec<&PartialCopy> =
                having().filter(|copy| Some(copy.key.as_str()) != left_out).collect();
            let other = times.checked_rem(others.len()).and_then(|number| others.get(number).copied());
            // Some copy has this offset, because ranges that all copies lack count as present.
            let Some(copy) = other.or_else(|| having().next()) else { break };
            let ends = self.copies.iter().map(|copy| copy.changes(at));
            let piece = copy.piece(&(at..ends.fold(stretch.end, u64::min)));
            at = at.saturating_add(u64_of(piece.len));
            match pieces.last_mut().filter(|last| last.key == piece.key) {
                Some(last) => last.len = last.len.saturating_add(piece.len),
                None => pieces.push(piece),
            }
        }
        pieces
    }
}

/// The parts of `stretches` that are in none of `others`. Both are sorted, and no two ranges in one list
/// touch.
fn without(stretches: &[Range<u64>], others: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut rest = Vec::new();
    for stretch in stretches {
        let mut at = stretch.start;
        let first = others.partition_point(|other| other.end <= at);
        let within = others.get(first..).unwrap_or_default().iter();
        for other in within.take_while(|other| other.start < stretch.end) {
            if at < other.start {
                rest.push(at..other.start);
            }
            at = other.end;
        }
        if at < stretch.end {
            rest.push(at..stretch.end);
        }
    }
    rest
}

/// Reads the length of the copied object, and its holes, from the end of a key.
fn holes_of(
    bucket: &Bucket,
    entry: &Entry,
    list: &str,
    wanted_bytes: Option<u64>,
) -> Result<(u64, Holes), StoreError> {
    let key = format!("{PARTIAL}/{}", entry.name);
    let shown = bucket.shown(&key);
    let damaged =
        |why: &str| StoreError::new(StoreErrorKind::Damaged, format!("the copy {shown} is damaged: {why}"));
    let cut = || damaged("it does not end with a list of holes");
    if entry.len_bytes < u64_of(LENGTH_BYTES) {
        return Err(cut());
    }
    let end_bytes = entry.len_bytes.min(END_BYTES);
    let end = bucket.get_range(&key, entry.len_bytes.saturating_sub(end_bytes), usize_of(end_bytes))?;
    let (before, length) = end.split_last_chunk::<LENGTH_BYTES>().ok_or_else(cut)?;
    let list_bytes = u64::from_le_bytes(*length);
    let len_bytes = entry.len_bytes.saturating_sub(u64_of(LENGTH_BYTES)).checked_sub(list_bytes);
    let len_bytes = len_bytes.filter(|_| list_bytes <= HOLES_MAX_BYTES).ok_or_else(cut)?;
    let bytes = match before.len().checked_sub(usize_of(list_bytes)) {
        Some(at) => Bytes::copy_from_slice(before.get(at..).unwrap_or_default()),
        None => bucket.get_range(&key, len_bytes, usize_of(list_bytes))?,
    };
    if digits_of(&bytes) != list {
        return Err(cut());
    }
    if wanted_bytes.is_some_and(|wanted_bytes| wanted_bytes != len_bytes) {
        return Err(damaged(&format!("it belongs to an object of {len_bytes} bytes")));
    }
    Ok((len_bytes, Holes::decode(&shown, &bytes, len_bytes)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::holes::{Needed, plan_holes};

    const K: u64 = 1024;

    fn bytes(len: u64) -> Vec<u8> {
        (0..len).map(|at| (at / 3) as u8 | 1).collect()
    }

    fn holes(bytes: &[u8], needed: &[Range<u64>]) -> Holes {
        let mut map = Needed::of(bytes.len() as u64);
        needed.iter().for_each(|stretch| map.mark(stretch));
        let mut read = |offset: u64, into: &mut [u8]| {
            into.copy_from_slice(&bytes[offset as usize..][..into.len()]);
            Ok(())
        };
        plan_holes(&map, &Holes::default(), &mut read).unwrap().holes
    }

    /// An object that panics if it is read in its holes.
    struct Careful {
        bytes: Vec<u8>,
        holes: Arc<Holes>,
    }

    impl Object for Careful {
        fn id(&self) -> Hash {
            Hash::of(&self.bytes)
        }

        fn len_bytes(&self) -> u64 {
            self.bytes.len() as u64
        }

        fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
            let end = offset + into.len() as u64;
            assert!(!self.holes.overlap(&(offset..end)), "{offset}..{end} is read");
            into.copy_from_slice(&self.bytes[offset as usize..end as usize]);
            Ok(())
        }

        fn holes(&self) -> Result<Arc<Holes>, StoreError> {
            Ok(Arc::clone(&self.holes))
        }
    }

    #[test]
    fn holes_are_zeroes_and_are_not_read() {
        let bytes = bytes(100 * K + 5);
        let holes = holes(&bytes, &[9 * K..10 * K, 33 * K..40 * K]);
        let mut right = bytes.clone();
        for gone in holes.stretches() {
            right[gone.start as usize..gone.end as usize].fill(0);
        }
        assert!(holes.bytes() > 60 * K);
        let object = Careful { bytes, holes: Arc::new(holes) };
        for piece in [1000, 4096, 10_000, 1 << 20] {
            let mut sent = vec![0xaa; right.len()];
            for (at, into) in (0..).step_by(piece).zip(sent.chunks_mut(piece)) {
                read_around(&object, &object.holes, at, into).unwrap();
            }
            assert!(sent == right, "{piece} bytes at a time");
        }
    }

    #[test]
    fn subtracting_ranges_leaves_the_uncovered_parts() {
        let stretches = [4..16, 32..36, 40..50, 60..64];
        let is_left = |others: &[Range<u64>], rest: &[Range<u64>]| {
            assert_eq!(without(&stretches, others), rest, "{others:?}");
        };
        is_left(&[], &stretches);
        is_left(&stretches, &[]);
        is_left(&[4..8, 10..12, 32..36, 49..50], &[8..10, 12..16, 40..49, 60..64]);
        is_left(&[0..5, 15..33, 44..45, 64..99], &[5..15, 33..36, 40..44, 45..50, 60..64]);
    }

    #[test]
    fn a_range_is_read_from_copies_that_have_it() {
        let bytes = bytes(128 * K);
        let (one, other) = (
            holes(&bytes, &[16 * K..24 * K, 100 * K..101 * K]),
            holes(&bytes, &[24 * K..40 * K, 40 * K..64 * K]),
        );
        let partial_copies = PartialCopies::of(128 * K, vec![("a".to_owned(), one), ("b".to_owned(), other)]);
        // Both copies have the first block.
        assert_eq!(partial_copies.common.stretches(), [4 * K..16 * K, 64 * K..100 * K, 104 * K..128 * K]);
        let ways = |stretch: Range<u64>| -> Vec<String> {
            let shown = |piece: &Piece| format!("{}{}+{}", piece.key, piece.offset / K, piece.len as u64 / K);
            let way = |way: &Vec<Piece>| way.iter().map(shown).collect::<Vec<_>>().join(" ");
            partial_copies.ways(&stretch, Replica::Usual).iter().map(way).collect()
        };
        for ordered in 0..2 {
            assert_eq!(ways(16 * K..24 * K), ["a16+8"; 2]);
            assert_eq!(ways(24 * K..104 * K), ["b24+76 a100+4"; 2]);
            // An alternative may cross ranges that all copies lack.
            assert_eq!(ways(4 * K..24 * K), ["a4+20"; 2]);
            let both = if ordered == 0 { ["b0+16", "a0+16"] } else { ["a0+16", "b0+16"] };
            assert_eq!(ways(0..16 * K), both);
            assert_eq!(partial_copies.turn(), ordered == 0);
        }
    }

    #[test]
    fn wrong_bytes_are_reread_from_other_copies() {
        let bytes = bytes(128 * K);
        let (at_16, at_24, at_40) = (16 * K..24 * K, 24 * K..40 * K, 40 * K..64 * K);
        let needed =
            [vec![at_16.clone()], vec![at_16.clone(), at_40.clone()], vec![at_24.clone(), at_40.clone()]];
        let copies = ["a", "b", "c"].iter().zip(needed);
        let found = copies.map(|(key, needed)| ((*key).to_owned(), holes(&bytes, &needed))).collect();
        let partial_copies = PartialCopies::of(128 * K, found);
        let shown = |piece: &Piece| format!("{}{}+{}", piece.key, piece.offset / K, piece.len as u64 / K);
        let way = |way: &Vec<Piece>| way.iter().map(shown).collect::<Vec<_>>().join(" ");
        let ways = |stretch: &Range<u64>, turn: Replica| -> Vec<String> {
            partial_copies.ways(stretch, turn).iter().map(way).collect()
        };
        // The copy that lacks least comes first.
        let usual = ways(&(0..4 * K), Replica::Usual);
        assert_eq!(usual, ["c0+4", "b0+4", "a0+4"]);
        let first = |stretch: &Range<u64>, turn: Replica| ways(stretch, turn).remove(0);
        for (times, other) in ["b0+4", "a0+4", "b0+4"].iter().enumerate() {
            let again = ways(&(0..4 * K), Replica::Other(times));
            assert_eq!(again[0], *other);
            // If the other alternative fails too, the normal ones follow.
            assert_eq!(again[1..], usual);
        }
        for (reading, next) in (0..).zip(["c0+4", "b0+4", "a0+4", "c0+4", "b0+4"]) {
            assert_eq!(first(&(0..4 * K), Replica::Reading(reading)), next);
        }
        for times in 0..3 {
            assert_eq!(first(&at_16, Replica::Other(times)), "a16+8");
            assert_eq!(first(&at_24, Replica::Other(times)), "c24+16");
            assert_eq!(first(&at_40, Replica::Other(times)), "b40+24");
        }
        // The copy that gave the bytes may be the only one that has them, or some of them.
        let to_64 = 0..64 * K;
        assert_eq!(ways(&to_64, Replica::Usual), ["c0+16 b16+8 c24+40"; 2]);
        assert_eq!(first(&to_64, Replica::Other(0)), "b0+16 a16+8 c24+16 b40+24");
        assert_eq!(first(&to_64, Replica::Other(1)), "a0+24 c24+16 b40+24");
        assert_eq!(ways(&(0..24 * K), Replica::Usual), ["b0+24", "a0+24"]);
        assert_eq!(first(&(0..24 * K), Replica::Other(0)), "c0+16 a16+8");
        // Each re-read leaves out one copy, except for ranges that only that copy has.
        assert_eq!(first(&to_64, Replica::Reading(1)), "b0+24 c24+16 b40+24");
        assert_eq!(first(&to_64, Replica::Reading(2)), "a0+24 c24+40");
        assert_eq!(first(&to_64, Replica::Reading(3)), "c0+16 b16+8 c24+40");
    }
}
