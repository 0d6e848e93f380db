//! Bytes that are read as a Btrfs, and a small volume to begin with.

use super::{
    Btrfs, CHUNK_ITEM, EXTENT_DATA, EXTENT_TREE, FIRST_SUBVOLUME, INODE_REF, METADATA_ITEM, ROOT_BACKREF,
    ROOT_DIRECTORY, ROOT_ITEM, TOP_SUBVOLUME,
};
use crate::Scanned;
use crate::fuzzing::{check_scan, scan_all};

/// What a scan of a disk finds. `None`: it is no Btrfs.
pub(crate) fn scanned(bytes: &[u8]) -> Option<Vec<Scanned>> {
    scan_all(bytes, |bytes| Ok(Box::new(Btrfs::open(bytes)?)))
}

/// See [`check_scan`].
pub fn btrfs_volume(bytes: &[u8]) {
    if let Some(all) = scanned(bytes) {
        check_scan(&all, bytes.len());
    }
}

/// The volume of [`sample`]: a superblock, and a chunk in two places.
const DISK_BYTES: usize = 320 << 10;
const NODE_BYTES: usize = 4096;
const CHUNK_AT: u64 = 16 << 20;
const CHUNK_BYTES: u64 = 64 << 10;
const PLACES: [u64; 2] = [128 << 10, 192 << 10];

type Item = (u64, u8, u64, Vec<u8>);

fn put(disk: &mut [u8], at: usize, bytes: &[u8]) {
    disk[at..at + bytes.len()].copy_from_slice(bytes);
}

/// The address of a block of the chunk.
fn address(block: u64) -> u64 {
    CHUNK_AT + block * NODE_BYTES as u64
}

fn put_leaf(disk: &mut [u8], block: u64, items: &[Item]) {
    let mut leaf = vec![0; NODE_BYTES];
    put(&mut leaf, 48, &address(block).to_le_bytes());
    put(&mut leaf, 96, &(items.len() as u32).to_le_bytes());
    let mut end = NODE_BYTES - 101;
    for (number, (object, kind, offset, data)) in items.iter().enumerate() {
        end -= data.len();
        let at = 101 + number * 25;
        put(&mut leaf, at, &object.to_le_bytes());
        leaf[at + 8] = *kind;
        put(&mut leaf, at + 9, &offset.to_le_bytes());
        put(&mut leaf, at + 17, &(end as u32).to_le_bytes());
        put(&mut leaf, at + 21, &(data.len() as u32).to_le_bytes());
        put(&mut leaf, 101 + end, data);
    }
    for place in PLACES {
        put(disk, place as usize + block as usize * NODE_BYTES, &leaf);
    }
}

fn chunk() -> Vec<u8> {
    let mut item = vec![0; 48 + 2 * 32];
    put(&mut item, 0, &CHUNK_BYTES.to_le_bytes());
    put(&mut item, 24, &0x22_u64.to_le_bytes());
    put(&mut item, 44, &2_u16.to_le_bytes());
    for (number, place) in PLACES.iter().enumerate() {
        put(&mut item, 48 + number * 32 + 8, &place.to_le_bytes());
    }
    item
}

fn root(block: u64, generation: u64) -> Vec<u8> {
    let mut item = vec![0; 239];
    put(&mut item, 160, &generation.to_le_bytes());
    put(&mut item, 176, &address(block).to_le_bytes());
    item
}

/// A name with whatever is before it and its length.
fn named(head: &[u8], name: &[u8]) -> Vec<u8> {
    [head, &(name.len() as u16).to_le_bytes(), name].concat()
}

fn extent(block: u64, blocks: u64) -> Vec<u8> {
    let mut item = vec![0; 53];
    item[20] = 1;
    put(&mut item, 21, &address(block).to_le_bytes());
    put(&mut item, 29, &(blocks * NODE_BYTES as u64).to_le_bytes());
    item
}

/// A volume with a file in the top subvolume, and a file in a subvolume in its root.
pub(crate) fn sample() -> Vec<u8> {
    let mut disk = vec![0; DISK_BYTES];
    let superblock = 64 << 10;
    put(&mut disk, superblock + 48, &(64_u64 << 10).to_le_bytes());
    put(&mut disk, superblock + 64, b"_BHRfS_M");
    put(&mut disk, superblock + 80, &address(1).to_le_bytes());
    put(&mut disk, superblock + 88, &address(0).to_le_bytes());
    put(&mut disk, superblock + 136, &1_u64.to_le_bytes());
    put(&mut disk, superblock + 148, &(NODE_BYTES as u32).to_le_bytes());
    let key = [&256_u64.to_le_bytes()[..], &[CHUNK_ITEM], &CHUNK_AT.to_le_bytes()].concat();
    let array = [key, chunk()].concat();
    put(&mut disk, superblock + 160, &(array.len() as u32).to_le_bytes());
    put(&mut disk, superblock + 811, &array);
    put_leaf(&mut disk, 0, &[(256, CHUNK_ITEM, CHUNK_AT, chunk())]);
    let own = FIRST_SUBVOLUME;
    put_leaf(
        &mut disk,
        1,
        &[
            (EXTENT_TREE, ROOT_ITEM, 0, root(4, 9)),
            (TOP_SUBVOLUME, ROOT_ITEM, 0, root(2, 7)),
            (own, ROOT_ITEM, 0, root(3, 8)),
            (own, ROOT_BACKREF, TOP_SUBVOLUME, {
                let head = [ROOT_DIRECTORY.to_le_bytes(), 2_u64.to_le_bytes()].concat();
                named(&head, b"snapshot")
            }),
        ],
    );
    put_leaf(
        &mut disk,
        2,
        &[
            (257, INODE_REF, ROOT_DIRECTORY, named(&2_u64.to_le_bytes(), b"top")),
            (257, EXTENT_DATA, 0, extent(8, 2)),
        ],
    );
    put_leaf(
        &mut disk,
        3,
        &[
            (ROOT_DIRECTORY, INODE_REF, ROOT_DIRECTORY, named(&0_u64.to_le_bytes(), b"..")),
            (257, INODE_REF, ROOT_DIRECTORY, named(&2_u64.to_le_bytes(), b"below")),
            (257, EXTENT_DATA, 0, extent(10, 3)),
        ],
    );
    let blocks: Vec<Item> = (0..5).map(|block| (address(block), METADATA_ITEM, 0, vec![0; 24])).collect();
    put_leaf(&mut disk, 4, &blocks);
    disk
}

/// Inputs to begin with.
pub(crate) fn btrfs_samples() -> Vec<Vec<u8>> {
    vec![sample()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Owner;

    #[test]
    fn the_small_volume_has_these_owners_and_names() {
        let all = scanned(&sample()).unwrap();
        let below = 1_u64 << super::super::INODE_BITS;
        let mut owned = std::collections::BTreeMap::new();
        for scanned in &all {
            match scanned {
                Scanned::Run { bytes, owner } => *owned.entry(*owner).or_insert(0) += bytes.end - bytes.start,
                Scanned::Unreadable { id, why } => panic!("{id}: {why}"),
                Scanned::Name { .. } => {}
            }
        }
        let node = NODE_BYTES as u64;
        // Each block is there twice. The beginning of the disk counts as a whole.
        assert_eq!(owned[&Owner::File(257)], 2 * 2 * node);
        assert_eq!(owned[&Owner::File(below | 257)], 2 * 3 * node);
        assert_eq!(owned[&Owner::Metadata], DISK_BYTES as u64 + 2 * 5 * node);
        let names: Vec<(u64, u64, &[u8])> = all
            .iter()
            .filter_map(|scanned| match scanned {
                Scanned::Name { id, parent, name } => Some((*id, *parent, &name[..])),
                _ => None,
            })
            .collect();
        let expected: [(u64, u64, &[u8]); 3] =
            [(below | 256, 256, b"snapshot"), (below | 257, below | 256, b"below"), (257, 256, b"top")];
        assert_eq!(names, expected);
    }

    #[test]
    fn a_damaged_subvolume_hides_only_its_own_files() {
        let mut disk = sample();
        disk[PLACES[0] as usize + 3 * NODE_BYTES + 48] ^= 1;
        let all = scanned(&disk).unwrap();
        assert!(
            all.iter().any(|it| matches!(it, Scanned::Unreadable { id: FIRST_SUBVOLUME, .. })),
            "{all:?}"
        );
        assert!(all.iter().any(|it| matches!(it, Scanned::Name { name, .. } if name == b"top")), "{all:?}");
    }
}
