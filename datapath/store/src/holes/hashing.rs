//! Computes the hash of an object with holes, from its existing bytes and the tree nodes of the holes.
//!
//! ```text
//!   bytes       0        4k        8k                  16k       20k   21k
//!               | data   | hole    | hole              | data    | ... |
//!   nodes       4k       4k        8k                  4k        1k
//!   stack       4  ->  4 4 -> 8    8 8 -> 16           16 4      16 4 1   from the right: ((16)((4)(1)))
//! ```
//! Data between holes is divided into nodes of the tree, as holes are. Two adjacent nodes of one length are
//! merged, but only when something follows them: the last merge needs the root flag, and only the end shows
//! which merge is the last.

use blake3::hazmat::{HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};

use crate::error::StoreError;
use crate::hash::Hash;
use crate::holes::{Hole, Holes, Node};
use crate::store::Object;

/// The longest node into which data is divided, and the length of the pieces in which it is read.
const STRETCH_BYTES_MAX: u64 = 1 << 20;

/// Hashes an object from its first to its last byte. For holes it uses the nodes instead of the bytes.
#[derive(Debug)]
pub struct ObjectHashing(How);

#[derive(Debug)]
enum How {
    Whole(Box<blake3::Hasher>),
    Nodes(Nodes),
}

/// Hashing node by node.
#[derive(Debug)]
struct Nodes {
    len_bytes: u64,
    at: u64,
    /// The holes to come; the next one is last.
    holes: Vec<Hole>,
    /// The node that is in progress.
    now: Option<Now>,
    /// Finished nodes in order, with their lengths.
    stack: Vec<(u64, Node)>,
}

/// A node that is not finished.
#[derive(Debug)]
struct Now {
    start: u64,
    end: u64,
    what: Stretch,
}

#[derive(Debug)]
enum Stretch {
    Hole(Node),
    Data(Box<blake3::Hasher>),
}

impl ObjectHashing {
    /// Begins to hash an object of this length.
    pub fn new(holes: &Holes, len_bytes: u64) -> Self {
        if holes.is_empty() {
            return Self(How::Whole(Box::default()));
        }
        let holes = holes.0.iter().rev().copied().collect();
        Self(How::Nodes(Nodes { len_bytes, at: 0, holes, now: None, stack: Vec::new() }))
    }

    /// Adds the next bytes. The values of bytes in holes do not matter.
    pub fn update(&mut self, bytes: &[u8]) {
        match &mut self.0 {
            How::Whole(hasher) => {
                hasher.update(bytes);
            }
            How::Nodes(nodes) => nodes.update(bytes),
        }
    }

    /// Skips `bytes` bytes that are all in holes.
    pub fn pass(&mut self, bytes: u64) {
        if let How::Nodes(nodes) = &mut self.0 {
            nodes.pass(bytes);
        }
    }

    /// The hash of the object. If it got too few or too many bytes, the result is the hash of no object.
    pub fn finish(self) -> Hash {
        match self.0 {
            How::Whole(hasher) => hasher.finalize().into(),
            How::Nodes(nodes) => nodes.finish(),
        }
    }
}

/// Hashes an object by reading it; the result should be its name. Holes are not read. `goes_on` is called
/// before each read with its length, and its error ends the hashing.
pub fn hash_of(
    object: &dyn Object,
    goes_on: &mut dyn FnMut(usize) -> Result<(), StoreError>,
) -> Result<Hash, StoreError> {
    let (holes, len_bytes) = (object.holes()?, object.len_bytes());
    let (mut hashing, mut piece) = (ObjectHashing::new(&holes, len_bytes), Vec::<u8>::new());
    let mut at = 0_u64;
    for hole in holes.stretches().into_iter().chain(std::iter::once(len_bytes..len_bytes)) {
        while at < hole.start {
            let len = hole.start.saturating_sub(at).min(STRETCH_BYTES_MAX);
            let bytes = usize::try_from(len).unwrap_or(usize::MAX);
            goes_on(bytes)?;
            piece.resize(bytes, 0);
            object.read_range(at, &mut piece)?;
            hashing.update(&piece);
            at = at.saturating_add(len);
        }
        hashing.pass(hole.end.saturating_sub(at));
        at = hole.end;
    }
    Ok(hashing.finish())
}

impl Nodes {
    fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let Some(mut now) = self.take_now() else {
                return self.count(bytes.len());
            };
            let room = usize::try_from(now.end.saturating_sub(self.at)).unwrap_or(usize::MAX);
            let (taken, rest) = bytes.split_at(room.min(bytes.len()));
            if let Stretch::Data(hasher) = &mut now.what {
                hasher.update(taken);
            }
            bytes = rest;
            self.count(taken.len());
            self.put_back(now);
        }
    }

    fn pass(&mut self, bytes: u64) {
        let to = self.at.saturating_add(bytes);
        while self.at < to {
            let Some(now) = self.take_now() else {
                self.at = to;
                return;
            };
            if let Stretch::Data(_) = now.what {
                // The caller has wrong holes, so the hash must be wrong too.
                self.at = u64::MAX;
                return;
            }
            self.at = to.min(now.end);
            self.put_back(now);
        }
    }

    fn count(&mut self, bytes: usize) {
        self.at = self.at.saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX));
    }

    /// Takes the node in progress, or the one that begins here. `None` after the end.
    fn take_now(&mut self) -> Option<Now> {
        if self.at >= self.len_bytes {
            return None;
        }
        self.now.take().or_else(|| Some(self.next()))
    }

    fn put_back(&mut self, now: Now) {
        if self.at < now.end {
            self.now = Some(now);
            return;
        }
        let node = match now.what {
            Stretch::Hole(node) => node,
            Stretch::Data(hasher) => hasher.finalize_non_root(),
        };
        // More bytes follow these nodes, so none of these merges is the last.
        while let [.., (_, _), (_, _)] = self.stack.as_slice()
            && self.merge_two()
        {}
        self.stack.push((now.end.saturating_sub(now.start), node));
    }

    /// Merges the last two nodes if they are the children of one node.
    fn merge_two(&mut self) -> bool {
        let [.., left, right] = self.stack.as_slice() else { return false };
        if left.0 != right.0 {
            return false;
        }
        let merged = (left.0.saturating_mul(2), merge_subtrees_non_root(&left.1, &right.1, Mode::Hash));
        self.stack.truncate(self.stack.len().saturating_sub(2));
        self.stack.push(merged);
        true
    }

    fn next(&mut self) -> Now {
        let start = self.at;
        if let Some(hole) = self.holes.pop_if(|hole| hole.offset == start) {
            return Now { start, end: hole.end(), what: Stretch::Hole(hole.node) };
        }
        let next_hole = self.holes.last();
        let left = next_hole.map_or(self.len_bytes, |hole| hole.offset).saturating_sub(start);
        // The longest node that can begin here.
        let most = match start {
            0 => STRETCH_BYTES_MAX,
            _ => (1 << start.trailing_zeros()).min(STRETCH_BYTES_MAX),
        };
        let is_last = next_hole.is_none() && left <= most;
        let len = if is_last { left } else { most.min(1 << left.checked_ilog2().unwrap_or(0)) };
        let mut hasher = Box::<blake3::Hasher>::default();
        hasher.set_input_offset(start);
        Now { start, end: start.saturating_add(len), what: Stretch::Data(hasher) }
    }

    fn finish(mut self) -> Hash {
        let no_objects = Hash([0; 32]);
        if self.at != self.len_bytes {
            return no_objects;
        }
        let Some((_, mut right)) = self.stack.pop() else { return no_objects };
        while let Some((_, left)) = self.stack.pop() {
            if self.stack.is_empty() {
                return merge_subtrees_root(&left, &right, Mode::Hash).into();
            }
            right = merge_subtrees_non_root(&left, &right, Mode::Hash);
        }
        // There is more than one node, because the first block is never a hole.
        no_objects
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::holes::{Needed, plan_holes};

    const K: u64 = 1024;

    fn bytes(len: u64) -> Vec<u8> {
        (0..len).map(|at| (at * 7 + at / 251) as u8).collect()
    }

    /// The holes of these bytes if only `needed` is needed.
    fn holes(bytes: &[u8], needed: &[(u64, u64)]) -> Holes {
        let mut map = Needed::of(bytes.len() as u64);
        needed.iter().for_each(|(from, to)| map.mark(&(*from..*to)));
        let mut read = |offset: u64, into: &mut [u8]| {
            into.copy_from_slice(&bytes[offset as usize..][..into.len()]);
            Ok(())
        };
        plan_holes(&map, &Holes::default(), &mut read).unwrap().holes
    }

    fn hash_in_pieces(holes: &Holes, bytes: &[u8], piece: usize) -> Hash {
        let mut hashing = ObjectHashing::new(holes, bytes.len() as u64);
        bytes.chunks(piece).for_each(|piece| hashing.update(piece));
        hashing.finish()
    }

    #[test]
    fn an_object_has_its_hash_whatever_lies_in_its_holes() {
        let lens = [8 * K, 8 * K + 1, 12 * K, 13 * K, 64 * K - 1, 64 * K, 65 * K, 100 * K + 77, 3000 * K + 5];
        for len in lens {
            let right = bytes(len);
            let places = [&[][..], &[(0, 1)], &[(len / 2, len / 2 + 1)], &[(5 * K, 6 * K), (len - 1, len)]];
            for needed in places {
                let holes = holes(&right, needed);
                assert!(!holes.is_empty() || len < 13 * K, "{len} {needed:?}");
                let mut gone = right.clone();
                for hole in holes.stretches() {
                    gone[hole.start as usize..hole.end as usize].fill(0xaa);
                }
                for piece in [1000, 4096, 1 << 20, usize::MAX] {
                    assert_eq!(
                        hash_in_pieces(&holes, &gone, piece),
                        Hash::of(&right),
                        "{len} {needed:?} {piece}"
                    );
                }
                // A wrong byte outside the holes; a truncated object; an object that is too long.
                gone[1] ^= 1;
                assert_ne!(hash_in_pieces(&holes, &gone, 4096), Hash::of(&right));
                gone[1] ^= 1;
                if !holes.is_empty() {
                    let mut hashing = ObjectHashing::new(&holes, len);
                    hashing.update(&gone[..gone.len() - 1]);
                    assert_ne!(hashing.finish(), Hash::of(&right));
                    let mut hashing = ObjectHashing::new(&holes, len);
                    hashing.update(&gone);
                    hashing.update(b"more");
                    assert_ne!(hashing.finish(), Hash::of(&right));
                }
            }
        }
    }

    #[test]
    fn holes_are_hashed_without_their_bytes() {
        let right = bytes(100 * K + 77);
        let holes = holes(&right, &[(20 * K, 30 * K), (64 * K, 65 * K)]);
        let mut hashing = ObjectHashing::new(&holes, right.len() as u64);
        let mut at = 0;
        for hole in holes.stretches() {
            hashing.update(&right[at as usize..hole.start as usize]);
            // Two steps, neither of which ends at the end of a node.
            hashing.pass(5000.min(hole.end - hole.start));
            hashing.pass((hole.end - hole.start).saturating_sub(5000));
            at = hole.end;
        }
        hashing.update(&right[at as usize..]);
        assert_eq!(hashing.finish(), Hash::of(&right));
        let mut hashing = ObjectHashing::new(&holes, right.len() as u64);
        hashing.pass(right.len() as u64);
        assert_ne!(hashing.finish(), Hash::of(&right));
    }

    #[test]
    fn a_node_that_is_wrong_is_noticed() {
        let right = bytes(77 * K);
        let holes = holes(&right, &[(20 * K, 21 * K)]);
        for at in 0..holes.0.len() {
            let mut wrong = holes.clone();
            wrong.0[at].node[3] ^= 1;
            assert_ne!(hash_in_pieces(&wrong, &right, 1 << 20), Hash::of(&right), "{at}");
        }
    }
}
