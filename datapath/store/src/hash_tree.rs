//! A hash tree to check a part of a file with a known BLAKE3 hash, without reading the rest.
//!
//! BLAKE3 hashes a tree: each kibibyte is a leaf, and each inner node is the hash of its two children
//! (section 2.1 of the BLAKE3 paper). [`HashTree`] stores one node for each [`GROUP_BYTES`] of the file. The
//! nodes are right if they merge to the root hash, and a group is right if its hash is its node. So the tree
//! may come from an untrusted source.

use blake3::hazmat::{HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};

use crate::hash::Hash;

/// Bytes that are checked together. A power of two, so that each group is a complete subtree.
pub const GROUP_BYTES: u64 = 64 << 10;

const MAGIC: [u8; 8] = *b"HWTREE\n\0";
const FORMAT: u32 = 1;
const HEADER_BYTES: usize = 24;

/// The nodes above the groups of some bytes. There are at least two groups, because the hash of a single
/// group is the root itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HashTree {
    len_bytes: u64,
    groups: Vec<[u8; 32]>,
}

/// The offset of a group.
fn start_of(group: usize) -> u64 {
    u64::try_from(group).unwrap_or(u64::MAX).saturating_mul(GROUP_BYTES)
}

fn node_of(group: usize, bytes: &[u8]) -> [u8; 32] {
    blake3::Hasher::new().set_input_offset(start_of(group)).update(bytes).finalize_non_root()
}

/// The number of groups below the left child of a node above `groups` groups: the largest power of two that
/// is smaller.
fn left_of(groups: usize) -> usize {
    groups.next_power_of_two() / 2
}

/// The node above several groups, unless it is the root.
fn merge(groups: &[[u8; 32]]) -> [u8; 32] {
    match groups {
        [] => [0; 32],
        [one] => *one,
        _ => {
            let (left, right) = groups.split_at(left_of(groups.len()));
            merge_subtrees_non_root(&merge(left), &merge(right), Mode::Hash)
        }
    }
}

impl HashTree {
    /// The tree of `bytes`; `None` if they are a single group.
    pub fn of(bytes: &[u8]) -> Option<Self> {
        let len_bytes = u64::try_from(bytes.len()).ok().filter(|len| *len > GROUP_BYTES)?;
        let group_bytes = usize::try_from(GROUP_BYTES).ok()?;
        let groups =
            bytes.chunks(group_bytes).enumerate().map(|(group, bytes)| node_of(group, bytes)).collect();
        Some(Self { len_bytes, groups })
    }

    /// The hash of all the bytes.
    pub fn root(&self) -> Hash {
        let (left, right) = self.groups.split_at(left_of(self.groups.len()));
        merge_subtrees_root(&merge(left), &merge(right), Mode::Hash).into()
    }

    /// Whether `bytes` are those of a group. The answer is reliable only if the tree's root hash is right.
    pub fn holds(&self, group: usize, bytes: &[u8]) -> bool {
        let len = self.len_bytes.saturating_sub(start_of(group)).min(GROUP_BYTES);
        u64::try_from(bytes.len()).is_ok_and(|given| given == len && given > 0)
            && self.groups.get(group).is_some_and(|node| *node == node_of(group, bytes))
    }

    /// The file's bytes, as in `docs/format.md`.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER_BYTES + 32 * self.groups.len());
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&FORMAT.to_le_bytes());
        out.extend_from_slice(&u32::try_from(GROUP_BYTES).unwrap_or(u32::MAX).to_le_bytes());
        out.extend_from_slice(&self.len_bytes.to_le_bytes());
        self.groups.iter().for_each(|node| out.extend_from_slice(node));
        out
    }

    /// Decodes a tree file for `len_bytes` bytes with the hash `root`. `None`: it is not such a file.
    pub fn decode(bytes: &[u8], root: Hash, len_bytes: u64) -> Option<Self> {
        Self::parse(bytes, len_bytes).filter(|tree| tree.root() == root)
    }

    /// A tree of `len_bytes` bytes with any root.
    pub(crate) fn parse(bytes: &[u8], len_bytes: u64) -> Option<Self> {
        let groups = bytes.get(HEADER_BYTES..)?.as_chunks::<32>().0.to_vec();
        let tree = Self { len_bytes, groups };
        let count = usize::try_from(len_bytes.div_ceil(GROUP_BYTES)).ok()?;
        (count >= 2 && tree.groups.len() == count && tree.encode() == bytes).then_some(tree)
    }
}

/// The most bytes in the file of a tree of `len_bytes` bytes.
pub fn tree_bytes_max(len_bytes: u64) -> u64 {
    len_bytes.div_ceil(GROUP_BYTES).saturating_mul(32).saturating_add(24)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: usize = GROUP_BYTES as usize;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|at| (at * 7 + at / 251) as u8).collect()
    }

    #[test]
    fn the_root_is_the_hash_of_the_bytes_whatever_their_length() {
        for len in [0, 1, GROUP - 1, GROUP] {
            assert_eq!(HashTree::of(&bytes(len)), None, "{len} bytes are one group");
        }
        for groups in [1, 2, 3, 4, 5, 7, 8, 9, 17] {
            for more in [1, 1023, 1024, 1025, GROUP / 2, GROUP - 1, GROUP] {
                let bytes = bytes(groups * GROUP + more);
                let tree = HashTree::of(&bytes).unwrap();
                assert_eq!(tree.root(), Hash::of(&bytes), "{} bytes", bytes.len());
                assert!(bytes.chunks(GROUP).enumerate().all(|(group, part)| tree.holds(group, part)));
            }
        }
    }

    #[test]
    fn a_changed_or_moved_group_is_detected() {
        let bytes = bytes(5 * GROUP + 100);
        let tree = HashTree::of(&bytes).unwrap();
        for (group, part) in bytes.chunks(GROUP).enumerate() {
            for at in [0, part.len() / 2, part.len() - 1] {
                let mut part = part.to_vec();
                part[at] ^= 4;
                assert!(!tree.holds(group, &part), "byte {at} of group {group}");
            }
            assert!(!tree.holds(group, &part[..part.len() - 1]) && !tree.holds(group, &[]));
            assert!((0..8).filter(|other| tree.holds(*other, part)).eq([group]));
        }
    }

    #[test]
    fn golden_bytes() {
        let bytes = bytes(GROUP + 1);
        let file = HashTree::of(&bytes).unwrap().encode();
        assert_eq!(file.len(), 24 + 64);
        assert_eq!(&file[..24], b"HWTREE\n\0\x01\0\0\0\0\0\x01\0\x01\0\x01\0\0\0\0\0");
    }

    #[test]
    fn a_file_with_any_changed_byte_is_rejected() {
        let bytes = bytes(3 * GROUP);
        let (tree, root, len) = (HashTree::of(&bytes).unwrap(), Hash::of(&bytes), bytes.len() as u64);
        let file = tree.encode();
        assert_eq!(file.len() as u64, tree_bytes_max(len));
        assert_eq!(HashTree::decode(&file, root, len), Some(tree));
        for at in 0..file.len() {
            let mut file = file.clone();
            file[at] ^= 1;
            assert_eq!(HashTree::decode(&file, root, len), None, "byte {at}");
        }
        for cut in 0..file.len() {
            assert_eq!(HashTree::decode(&file[..cut], root, len), None, "{cut} bytes");
        }
        assert_eq!(HashTree::decode(&[&file[..], &[0]].concat(), root, len), None);
        assert_eq!(HashTree::decode(&file, Hash::of(b"other"), len), None);
        assert_eq!(HashTree::decode(&file, root, len + 1), None);
        assert_eq!(HashTree::decode(&file, root, len + GROUP_BYTES), None);
        assert_eq!(HashTree::decode(&file, root, u64::MAX), None);
    }
}
