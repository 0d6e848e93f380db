//! Whether the boot loader that UEFI starts from a disk has a signature, as Secure Boot needs.
//!
//! A firmware without boot entries starts [`LOADER`] of an EFI system partition. That is a PE file. Its header names a table of
//! signatures, and in a file that nobody signed this table is empty. Who signed it, and whether the signature is right, is for
//! the firmware to say.

use std::sync::Arc;

use crate::fields::{u16_at, u32_at};
use crate::units::usize_of;
use crate::{Bytes, Fault, FileSystem, Kind, Node, NodeKind, ReadAt, Visits, identify, open, partitions};

/// The path of the loader, without the directory separators. FAT does not know upper and lower case.
pub const LOADER: [&str; 3] = ["EFI", "BOOT", "BOOTX64.EFI"];

/// Entries of directories on the way to the loader: some dozens in fact.
const ENTRIES_MAX: u64 = 10_000;

/// How much of a PE file is read: its headers are shorter in all loaders.
const HEADER_BYTES: u64 = 4096;

/// The offset of the field with the offset of the PE header.
const PE_AT: usize = 0x3c;
/// From there: the magic number of the optional header, and the number of its tables and the size of the table of signatures in a
/// 64-bit program.
const MAGIC_AT: usize = 24;
const TABLES_AT: usize = MAGIC_AT + 108;
const SIGNATURES_BYTES_AT: usize = MAGIC_AT + 112 + 4 * 8 + 4;
const MAGIC_64: u16 = 0x20b;
/// The table of signatures is the fifth one.
const TABLES_MIN: u32 = 5;

/// Whether the loader of a disk is signed. `None`: there is none at its path, or it cannot be read.
pub fn is_loader_signed(disk: &Arc<dyn ReadAt>, sector_bytes: u64) -> Option<bool> {
    let found = partitions(disk, sector_bytes).ok()?;
    let signed =
        found.partitions.iter().filter_map(|partition| of_partition(Bytes::new(Arc::clone(disk), partition)));
    // Firmware that refuses the loader of one partition tries the next one.
    signed.reduce(|one, other| one || other)
}

fn of_partition(mut bytes: Bytes) -> Option<bool> {
    let found = identify(&mut bytes).ok()??;
    if found.kind != Kind::Fat {
        return None;
    }
    let mut fat = open(bytes).ok()?;
    let header = loader_header(&mut *fat).ok()??;
    is_signed(&header)
}

fn loader_header(fat: &mut dyn FileSystem) -> Result<Option<Vec<u8>>, Fault> {
    let mut visits = Visits::of(ENTRIES_MAX, || false);
    let mut node: Node = fat.root();
    for name in LOADER {
        let entries = fat.list(&node, &mut visits)?;
        let found = entries.into_iter().find(|(found, _)| found.eq_ignore_ascii_case(name.as_bytes()));
        let Some((_, found)) = found else { return Ok(None) };
        node = found;
    }
    if node.kind != NodeKind::File {
        return Ok(None);
    }
    let mut header = vec![0; usize_of(node.size_bytes.min(HEADER_BYTES))];
    let len = fat.read(&node, 0, &mut header)?;
    header.truncate(len);
    Ok(Some(header))
}

/// Whether a PE file names signatures. `None`: it is not a program for 64-bit UEFI, or its header is not in these bytes.
fn is_signed(start: &[u8]) -> Option<bool> {
    let at = usize::try_from(u32_at(start, PE_AT)).ok()?;
    let header = start.get(at..)?;
    let is_whole = header.len() >= SIGNATURES_BYTES_AT + 4;
    if !start.starts_with(b"MZ") || !header.starts_with(b"PE\0\0") || !is_whole {
        return None;
    }
    if u16_at(header, MAGIC_AT) != MAGIC_64 {
        return None;
    }
    Some(u32_at(header, TABLES_AT) >= TABLES_MIN && u32_at(header, SIGNATURES_BYTES_AT) > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The start of a program with a table of signatures of this length.
    fn program(signatures_bytes: u32) -> Vec<u8> {
        let mut bytes = vec![0; 1024];
        bytes[..2].copy_from_slice(b"MZ");
        bytes[PE_AT] = 0x80;
        bytes[0x80..0x84].copy_from_slice(b"PE\0\0");
        bytes[0x80 + MAGIC_AT..0x80 + MAGIC_AT + 2].copy_from_slice(&MAGIC_64.to_le_bytes());
        bytes[0x80 + TABLES_AT] = 16;
        let at = 0x80 + SIGNATURES_BYTES_AT;
        bytes[at..at + 4].copy_from_slice(&signatures_bytes.to_le_bytes());
        bytes
    }

    #[test]
    fn a_program_is_signed_if_it_names_signatures() {
        assert_eq!(is_signed(&program(0)), Some(false));
        assert_eq!(is_signed(&program(1944)), Some(true));
    }

    #[test]
    fn bytes_that_are_no_program_say_nothing() {
        let whole = program(1944);
        for len in [0, 2, 0x3f, 0x80, 0x80 + SIGNATURES_BYTES_AT + 3] {
            assert_eq!(is_signed(&whole[..len]), None, "{len}");
        }
        for (at, byte) in [(0, b'X'), (0x80, b'X'), (PE_AT + 3, 0xff), (0x80 + MAGIC_AT, 0)] {
            let mut other = whole.clone();
            other[at] = byte;
            assert_eq!(is_signed(&other), None, "{at}");
        }
    }
}
