//! Bytes that are read as an XFS, and a small volume to begin with.

#[cfg(test)]
use std::collections::BTreeMap;

use super::Xfs;
#[cfg(test)]
use crate::Owner;
use crate::Scanned;
use crate::fuzzing::{check_scan, scan_all};

const SECTOR: usize = 512;

/// What a scan of a disk finds. `None`: it is no XFS.
pub(crate) fn scanned(bytes: &[u8]) -> Option<Vec<Scanned>> {
    scan_all(bytes, |bytes| Ok(Box::new(Xfs::open(bytes)?)))
}

/// See [`check_scan`].
pub fn xfs_volume(bytes: &[u8]) {
    if let Some(all) = scanned(bytes) {
        check_scan(&all, bytes.len());
    }
}

/// The volume of [`sample`] in blocks of 512 bytes.
const BLOCKS: usize = 128;
const CHUNK_AT: usize = 32;

fn put(disk: &mut [u8], at: usize, bytes: &[u8]) {
    disk[at..at + bytes.len()].copy_from_slice(bytes);
}

fn extent(offset: u64, block: u64, count: u64) -> [u8; 16] {
    let bits = (u128::from(offset) << 73) | (u128::from(block) << 21) | u128::from(count);
    bits.to_be_bytes()
}

/// Puts an inode: its number in the chunk, mode, format, number of extents, and its data fork.
fn put_inode(disk: &mut [u8], number: usize, mode: u16, format: u8, extents: u32, fork: &[u8]) {
    let at = CHUNK_AT * SECTOR + number * 256;
    put(disk, at, b"IN");
    put(disk, at + 2, &mode.to_be_bytes());
    disk[at + 4] = 2;
    disk[at + 5] = format;
    put(disk, at + 76, &extents.to_be_bytes());
    put(disk, at + 100, fork);
}

/// A volume of version 4 with one allocation group: a directory in its inode, a directory in a block, a file with an extent, and a file with
/// a tree of extents.
pub(crate) fn sample() -> Vec<u8> {
    let mut disk = vec![0; BLOCKS * SECTOR];
    let first_inode = (CHUNK_AT * 2) as u32;
    put(&mut disk, 0, b"XFSB");
    put(&mut disk, 4, &512_u32.to_be_bytes());
    put(&mut disk, 8, &(BLOCKS as u64).to_be_bytes());
    put(&mut disk, 48, &100_u64.to_be_bytes());
    put(&mut disk, 56, &u64::from(first_inode).to_be_bytes());
    put(&mut disk, 84, &(BLOCKS as u32).to_be_bytes());
    put(&mut disk, 88, &1_u32.to_be_bytes());
    put(&mut disk, 96, &10_u32.to_be_bytes());
    put(&mut disk, 100, &(4 | super::DIRECTORIES_V2).to_be_bytes());
    // Bits of blocks, sectors, inodes, inodes in a block, blocks in a group.
    put(&mut disk, 120, &[9, 9, 8, 1, 7]);
    let (space, inodes, list) = (SECTOR, 2 * SECTOR, 3 * SECTOR);
    put(&mut disk, space, b"XAGF");
    for (at, value) in [(16, 4_u32), (20, 5), (28, 1), (32, 1), (40, 126), (44, 0), (48, 2)] {
        put(&mut disk, space + at, &value.to_be_bytes());
    }
    put(&mut disk, inodes, b"XAGI");
    put(&mut disk, inodes + 20, &6_u32.to_be_bytes());
    put(&mut disk, inodes + 24, &1_u32.to_be_bytes());
    // The list is a ring: its last two entries.
    put(&mut disk, list + 126 * 4, &[10_u32, 11].map(u32::to_be_bytes).concat());
    put(&mut disk, 4 * SECTOR, b"ABTB");
    put(&mut disk, 5 * SECTOR, b"ABTC");
    put(&mut disk, 6 * SECTOR, b"IABT");
    put(&mut disk, 6 * SECTOR + 6, &1_u16.to_be_bytes());
    put(&mut disk, 6 * SECTOR + 16, &first_inode.to_be_bytes());
    put(&mut disk, 6 * SECTOR + 16 + 8, &(!0b1111_u64).to_be_bytes());
    let inode = |number: u32| (first_inode + number).to_be_bytes();
    // The root: two names, and the number of its parent.
    let mut root = vec![2, 0];
    root.extend(inode(0));
    root.extend([3, 0, 0]);
    root.extend(b"dir");
    root.extend(inode(1));
    root.extend([4, 0, 0]);
    root.extend(b"long");
    root.extend(inode(3));
    put_inode(&mut disk, 0, 0x41ed, 1, 0, &root);
    put_inode(&mut disk, 1, 0x41ed, 2, 1, &extent(0, 8, 1));
    put_inode(&mut disk, 2, 0x81a4, 2, 2, &[extent(0, 70, 3), extent(3, 80, 1)].concat());
    let mut tree = vec![0; 156];
    put(&mut tree, 0, &[0, 1, 0, 1]);
    put(&mut tree, 4 + 9 * 8, &7_u64.to_be_bytes());
    put_inode(&mut disk, 3, 0x81a4, 3, 1, &tree);
    put(&mut disk, 7 * SECTOR, b"BMAP");
    put(&mut disk, 7 * SECTOR + 6, &1_u16.to_be_bytes());
    put(&mut disk, 7 * SECTOR + 24, &extent(0, 90, 5));
    // The block of the directory: one name, bytes that are not used, and no hashes.
    let block = 8 * SECTOR;
    put(&mut disk, block, b"XD2B");
    put(&mut disk, block + 16, &u64::from(first_inode + 2).to_be_bytes());
    put(&mut disk, block + 24, &[4]);
    put(&mut disk, block + 25, b"file");
    put(&mut disk, block + 32, &[0xff, 0xff]);
    put(&mut disk, block + 34, &(512_u16 - 8 - 32).to_be_bytes());
    disk
}

/// By owner: bytes that belong to it. For tests.
#[cfg(test)]
fn owned(all: &[Scanned]) -> BTreeMap<Owner, u64> {
    let mut owned = BTreeMap::new();
    for scanned in all {
        if let Scanned::Run { bytes, owner } = scanned {
            *owned.entry(*owner).or_default() += bytes.end - bytes.start;
        }
    }
    owned
}

/// Inputs to begin with.
pub(crate) fn xfs_samples() -> Vec<Vec<u8>> {
    vec![sample()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_small_volume_has_these_owners_and_names() {
        let all = scanned(&sample()).unwrap();
        let first = (CHUNK_AT * 2) as u64;
        let blocks = |count: u64| count * SECTOR as u64;
        let expected = BTreeMap::from([
            (Owner::File(first + 1), blocks(1)),
            (Owner::File(first + 2), blocks(4)),
            // With the block of its tree.
            (Owner::File(first + 3), blocks(6)),
            (Owner::Journal, blocks(10)),
            // Four headers, three trees, two blocks for trees, and the inodes.
            (Owner::Metadata, blocks(4 + 3 + 2 + 32)),
        ]);
        assert_eq!(owned(&all), expected, "{all:?}");
        let name = |id: u64, parent: u64, name: &[u8]| Scanned::Name {
            id: first + id,
            parent: first + parent,
            name: name.to_vec(),
        };
        let names: Vec<_> = all.into_iter().filter(|it| matches!(it, Scanned::Name { .. })).collect();
        assert_eq!(names, [name(1, 0, b"dir"), name(3, 0, b"long"), name(2, 1, b"file")]);
    }

    #[test]
    fn damage_of_one_file_hides_only_that_file() {
        let mut disk = sample();
        disk[7 * SECTOR] = 0;
        let all = scanned(&disk).unwrap();
        let unreadable: Vec<_> = all.iter().filter(|it| matches!(it, Scanned::Unreadable { .. })).collect();
        let [Scanned::Unreadable { id, .. }] = unreadable[..] else { panic!("{unreadable:?}") };
        assert_eq!(*id, (CHUNK_AT * 2) as u64 + 3);
        assert!(all.contains(&Scanned::Name {
            id: (CHUNK_AT * 2) as u64 + 2,
            parent: (CHUNK_AT * 2) as u64 + 1,
            name: b"file".to_vec(),
        }));
    }
}
