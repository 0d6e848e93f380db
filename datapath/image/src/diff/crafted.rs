//! File systems for tests that no tool creates.

use std::sync::Arc;

use headwater_block::Device;
use headwater_testkit::{ReferenceDisk, ReferenceOptions};

use crate::units::u64_of;
use headwater_filesystems::Partition;

const CLUSTER_BYTES: usize = 64 << 10;
/// The offset of the root directory; the first cluster follows. Boot sector, table and root directory have a
/// sector each.
pub(super) const ROOT_AT: usize = 2 * 512;
pub(super) const CLUSTER_AT: usize = 3 * 512;

/// A FAT12 with one directory that contains itself, followed by `files` empty files. The directory is called
/// `AGAIN`; inside itself it has the given long name, whose length is a multiple of 13 because a part of a
/// long name has 13 characters.
pub(super) fn fat_in_itself(long_name: &str, files: usize) -> Vec<u8> {
    let mut disk = vec![0; CLUSTER_AT + 2 * CLUSTER_BYTES];
    let sectors = u16::try_from(disk.len() / 512).unwrap();
    let fields: [(usize, &[u8]); 9] = [
        (11, &512u16.to_le_bytes()),
        (13, &[128]),
        (14, &1u16.to_le_bytes()),
        (16, &[1]),
        (17, &16u16.to_le_bytes()),
        (19, &sectors.to_le_bytes()),
        (22, &1u16.to_le_bytes()),
        (54, b"FAT12"),
        (510, &[0x55, 0xaa]),
    ];
    for (at, value) in fields {
        disk[at..at + value.len()].copy_from_slice(value);
    }
    // Each chain ends with its first cluster.
    disk[512..ROOT_AT].fill(0xff);
    let itself = entry(b"AGAIN      ", 0x10, 2);
    disk[ROOT_AT..ROOT_AT + 32].copy_from_slice(&itself);
    let mut directory = long_entries(long_name, b"AGAIN      ");
    directory.extend(itself);
    for number in 0..files {
        directory.extend(entry(format!("F{number:07}   ").as_bytes(), 0x20, 0));
    }
    disk[CLUSTER_AT..CLUSTER_AT + directory.len()].copy_from_slice(&directory);
    disk
}

/// An entry with a short name.
pub(super) fn entry(name: &[u8], flags: u8, cluster: u8) -> [u8; 32] {
    let mut entry = [0; 32];
    entry[..11].copy_from_slice(name);
    entry[11] = flags;
    entry[26] = cluster;
    entry
}

/// The entries with the parts of a long name, last one first.
fn long_entries(name: &str, short: &[u8]) -> Vec<u8> {
    let sum = short.iter().fold(0u8, |sum, byte| sum.rotate_right(1).wrapping_add(*byte));
    let parts: Vec<_> = (1u8..).zip(name.as_bytes().chunks_exact(13)).collect();
    let mut out: Vec<u8> = Vec::new();
    for (number, part) in parts.iter().rev() {
        let mut entry = [0; 32];
        entry[0] = if out.is_empty() { number | 0x40 } else { *number };
        (entry[11], entry[13]) = (0x0f, sum);
        for (at, letter) in [1, 3, 5, 7, 9, 14, 16, 18, 20, 22, 24, 28, 30].into_iter().zip(*part) {
            entry[at] = *letter;
        }
        out.extend(entry);
    }
    out
}

/// A disk with these bytes, with one partition that covers all of it.
pub(super) fn device(bytes: Vec<u8>) -> (Arc<dyn Device>, Partition) {
    let partition = Partition { number: 0, offset_bytes: 0, len_bytes: u64_of(bytes.len()) };
    (Arc::new(ReferenceDisk::with_contents(bytes, ReferenceOptions::default())), partition)
}
