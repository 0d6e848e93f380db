//! Reads a data object of the bucket range by range, from its complete copy or, if there is none, from
//! copies with holes (`partial_copies`).

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::RwLock;

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::holes::Holes;
use crate::s3::bucket::Bucket;
use crate::s3::part::Part;
use crate::s3::partial_copies::PartialCopies;
use crate::s3::replica_rotation::{Replica, ReplicaRotation};
use crate::s3::{Inner, object_key};
use crate::store::{Check, Object};
use crate::waiting::Waiting;

/// An object that is read range by range.
pub(super) struct S3Object {
    id: Hash,
    bucket: Bucket,
    len_bytes: u64,
    kept: RwLock<Kept>,
    /// Shared with the store, because a reader that got wrong bytes opens the object again.
    replica_rotation: Arc<ReplicaRotation>,
}

/// The form in which the bucket has an object.
#[derive(Clone)]
enum Kept {
    /// Not looked up yet: assumed to be complete until the complete object turns out to be missing.
    Unknown,
    Whole,
    PartialCopies(Arc<PartialCopies>),
}

impl Kept {
    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::PartialCopies(one), Self::PartialCopies(other)) => one.is_same(other),
            (Self::PartialCopies(_), _) | (_, Self::PartialCopies(_)) => false,
            (Self::Unknown | Self::Whole, Self::Unknown | Self::Whole) => true,
        }
    }
}

/// A part of a key.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) key: String,
    pub(super) offset: u64,
    pub(super) len: usize,
}

impl S3Object {
    /// An object that is assumed to be complete. If the complete object is missing, copies with holes are
    /// looked up.
    pub(super) fn unseen(store: &Inner, id: Hash, len_bytes: u64) -> Self {
        Self::of(store, id, len_bytes, Kept::Unknown)
    }

    /// An object that is known to exist completely.
    pub(super) fn whole(store: &Inner, id: Hash, len_bytes: u64) -> Self {
        Self::of(store, id, len_bytes, Kept::Whole)
    }

    /// Looks up the complete object or, if it is missing, copies with holes.
    pub(super) fn find(store: &Inner, id: Hash) -> Result<Self, StoreError> {
        let (len_bytes, kept) = look(&store.bucket, id, None)?;
        Ok(Self::of(store, id, len_bytes, kept))
    }

    fn of(store: &Inner, id: Hash, len_bytes: u64, kept: Kept) -> Self {
        let (bucket, replica_rotation) = (store.bucket.clone(), Arc::clone(&store.replica_rotation));
        Self { id, bucket, len_bytes, kept: RwLock::new(kept), replica_rotation }
    }

    /// Whether only copies with holes were found.
    pub(super) fn is_partial(&self) -> bool {
        matches!(*self.kept.read(), Kept::PartialCopies(_))
    }

    /// Looks the object up again. Returns whether its form has changed.
    fn look_again(&self) -> Result<bool, StoreError> {
        let (_, kept) = look(&self.bucket, self.id, Some(self.len_bytes))?;
        let mut before = self.kept.write();
        let is_same = before.is_same(&kept);
        // If the copies are the same, their order is kept.
        if !is_same || matches!(*before, Kept::Unknown) {
            *before = kept;
        }
        Ok(!is_same)
    }

    fn begin(&self, (offset, len): (u64, usize), turn: Replica, has_looked: bool) -> Reading {
        let kept = self.kept.read().clone();
        let ways = match &kept {
            Kept::Unknown | Kept::Whole => {
                let all = Piece { key: object_key(self.id), offset, len };
                // Tried twice, in case the bytes were damaged in transit.
                vec![vec![all.clone()], vec![all]]
            }
            Kept::PartialCopies(partial_copies) => {
                let end = offset.saturating_add(u64::try_from(len).unwrap_or(u64::MAX));
                partial_copies.ways(&(offset..end), turn)
            }
        };
        let mut reading = Reading {
            kept,
            ways: ways.into(),
            pieces: VecDeque::new(),
            came: Vec::new(),
            part: None,
            turn,
            has_looked,
        };
        reading.next_way();
        reading
    }

    /// Decides how to continue after a piece could not be read, or after all bytes arrived and failed the
    /// check.
    fn go_on(
        &self,
        reading: &mut Reading,
        (offset, len): (u64, usize),
        error: StoreError,
    ) -> Result<(), StoreError> {
        let were_refused = reading.pieces.is_empty();
        let is_partial = matches!(reading.kept, Kept::PartialCopies(_));
        let is_of_copy =
            is_partial && matches!(error.kind(), StoreErrorKind::NotFound | StoreErrorKind::Damaged);
        if (were_refused || is_of_copy) && reading.next_way() {
            return Ok(());
        }
        let may_be_elsewhere = is_of_copy || (!were_refused && error.kind() == StoreErrorKind::NotFound);
        if reading.has_looked || !may_be_elsewhere {
            return Err(error);
        }
        // A thread waits here, but rarely: once for each object with holes, and its server has just answered.
        match self.look_for(reading) {
            Ok(true) => {
                *reading = self.begin((offset, len), reading.turn, true);
                Ok(())
            }
            Ok(false) => Err(error),
            Err(e) if e.kind() == StoreErrorKind::NotFound => Err(error),
            Err(e) => Err(e),
        }
    }

    /// Returns whether the form of the object differs from what the read assumed. Another read may have
    /// looked it up already.
    fn look_for(&self, reading: &Reading) -> Result<bool, StoreError> {
        if self.kept.read().is_same(&reading.kept) {
            self.look_again()?;
        }
        Ok(!self.kept.read().is_same(&reading.kept))
    }

    /// Records that all bytes arrived and were right.
    fn was_read(&self, reading: &Reading) {
        if matches!(reading.kept, Kept::Unknown) {
            let mut kept = self.kept.write();
            if matches!(*kept, Kept::Unknown) {
                *kept = Kept::Whole;
            }
        }
    }

    fn read(
        &self,
        offset: u64,
        into: &mut [u8],
        turn: Replica,
        check: &mut Check<'_>,
    ) -> Result<(), StoreError> {
        self.must_hold(offset, into.len())?;
        let mut reading = self.begin((offset, into.len()), turn, false);
        loop {
            let outcome = match reading.pieces.front() {
                Some(piece) => {
                    let read = self.bucket.get_range(&piece.key, piece.offset, piece.len);
                    read.map(|bytes| reading.takes(bytes))
                }
                None => {
                    reading.fill(into);
                    match check(into) {
                        Ok(()) => {
                            self.was_read(&reading);
                            return Ok(());
                        }
                        refused => refused,
                    }
                }
            };
            if let Err(e) = outcome {
                self.go_on(&mut reading, (offset, into.len()), e)?;
            }
        }
    }

    fn must_hold(&self, offset: u64, len: usize) -> Result<(), StoreError> {
        let end = u64::try_from(len).ok().and_then(|len| offset.checked_add(len));
        if end.is_some_and(|end| end <= self.len_bytes) {
            return Ok(());
        }
        Err(StoreError::new(
            StoreErrorKind::Damaged,
            format!(
                "cannot read {len} bytes at {offset} of {}: the object ends at {}",
                self.bucket.shown(&object_key(self.id)),
                self.len_bytes
            ),
        ))
    }
}

/// The form of an object, and its length. A partial copy counts if it is not damaged and, if the length is
/// known, has that length.
fn look(bucket: &Bucket, id: Hash, len_bytes: Option<u64>) -> Result<(u64, Kept), StoreError> {
    let key = object_key(id);
    if let Some((len_bytes, _)) = bucket.head(&key)? {
        return Ok((len_bytes, Kept::Whole));
    }
    if let Some(partial_copies) = PartialCopies::find(bucket, id, len_bytes)? {
        return Ok((partial_copies.len_bytes, Kept::PartialCopies(Arc::new(partial_copies))));
    }
    let message = format!("the data object {} does not exist", bucket.shown(&key));
    Err(StoreError::new(StoreErrorKind::NotFound, message))
}

/// A read under way.
struct Reading {
    kept: Kept,
    /// Alternatives to try if the current one fails.
    ways: VecDeque<Vec<Piece>>,
    /// Pieces that have not arrived yet. The first one has been requested.
    pieces: VecDeque<Piece>,
    /// The bytes that arrived before these pieces.
    came: Vec<Bytes>,
    part: Option<Part>,
    /// Which of the copies with holes to read.
    turn: Replica,
    /// Whether this read has looked up the object's form again.
    has_looked: bool,
}

impl Reading {
    fn next_way(&mut self) -> bool {
        let Some(pieces) = self.ways.pop_front() else { return false };
        (self.pieces, self.part) = (pieces.into(), None);
        self.came.clear();
        true
    }

    fn takes(&mut self, bytes: Bytes) {
        self.pieces.pop_front();
        self.came.push(bytes);
    }

    /// Assembles the bytes that arrived.
    fn fill(&self, into: &mut [u8]) {
        let mut rest = into;
        for bytes in &self.came {
            let len = bytes.len().min(rest.len());
            let (part, after) = rest.split_at_mut(len);
            if part.len() == bytes.len() {
                part.copy_from_slice(bytes);
            }
            rest = after;
        }
    }
}

impl Object for S3Object {
    fn id(&self) -> Hash {
        self.id
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.read_checked(offset, into, &mut |_| Ok(()))
    }

    /// Reads from the other copies with holes in turn. A complete object has no other copies and is read once
    /// more.
    fn read_range_past_caches(
        &self,
        offset: u64,
        into: &mut [u8],
        reading: Option<u32>,
    ) -> Result<(), StoreError> {
        let is_whole = matches!(*self.kept.read(), Kept::Whole);
        let turn = match reading {
            _ if is_whole => Replica::Usual,
            Some(reading) => Replica::Reading(reading),
            None => self.replica_rotation.next(self.id, offset),
        };
        self.read(offset, into, turn, &mut |_| Ok(()))
    }

    fn read_checked(&self, offset: u64, into: &mut [u8], check: &mut Check<'_>) -> Result<(), StoreError> {
        self.read(offset, into, Replica::Usual, check)
    }

    fn read_or_wait(
        &self,
        offset: u64,
        into: &mut [u8],
        check: &mut Check<'_>,
        waiting: &mut Waiting,
    ) -> Result<bool, StoreError> {
        self.must_hold(offset, into.len())?;
        let begin = || self.begin((offset, into.len()), Replica::Usual, false);
        let mut reading = waiting.end::<Reading>().unwrap_or_else(begin);
        let read_for = waiting.read_for();
        loop {
            let Some(piece) = reading.pieces.front() else {
                reading.fill(into);
                match check(into) {
                    Ok(()) => {
                        self.was_read(&reading);
                        return Ok(true);
                    }
                    // As in `read_checked`.
                    Err(e) if e.kind() == StoreErrorKind::Damaged => {
                        self.go_on(&mut reading, (offset, into.len()), e)?;
                    }
                    Err(e) => return Err(e),
                }
                continue;
            };
            let ask = || Part::ask(&self.bucket, &piece.key, piece.offset, piece.len, read_for);
            let part = reading.part.take().or_else(ask);
            let Some(part) = part else {
                let parts = Arc::clone(self.bucket.range_reads());
                waiting.begin(reading, move |_| parts.has_permits(read_for));
                return Ok(false);
            };
            match part.wait() {
                Ok(Ok(bytes)) => reading.takes(bytes),
                Ok(Err(e)) => self.go_on(&mut reading, (offset, into.len()), e)?,
                Err(part) => {
                    let is_over = part.is_over();
                    reading.part = Some(part);
                    waiting.begin(reading, move |_| is_over());
                    return Ok(false);
                }
            }
        }
    }

    /// The holes that all copies share. Asks the bucket only if the object was never looked up.
    fn holes(&self) -> Result<Arc<Holes>, StoreError> {
        if matches!(*self.kept.read(), Kept::Unknown) {
            self.look_again()?;
        }
        Ok(match &*self.kept.read() {
            Kept::PartialCopies(partial_copies) => Arc::clone(&partial_copies.common),
            Kept::Unknown | Kept::Whole => Arc::default(),
        })
    }

    /// One of several copies with holes may be damaged, and others may have been added.
    fn was_wrong(&self) -> bool {
        let kept = self.kept.read().clone();
        let Kept::PartialCopies(partial_copies) = kept else { return false };
        self.look_again().unwrap_or(false) || partial_copies.turn()
    }
}
