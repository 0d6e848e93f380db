//! Reads VHD images (Virtual PC, first generation of Hyper-V), fixed and dynamic, as read-only disks.
//!
//! ```text
//!   fixed:    the disk's bytes | footer
//!   dynamic:  copy of the footer | header | table of blocks | blocks, each after a bitmap of its sectors | footer
//! ```
//! The length of the disk is the current size in the footer, which differs from the original size after the
//! disk was enlarged. The table is checked against the file once, when the image is opened, so that a
//! truncated file is an error then. Zeroes after the footer of a fixed disk are padding and not part of the
//! disk. Bitmaps are ignored, as in QEMU: in a present block, unwritten sectors are zeroes.
//!
//! Not read: differencing disks.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use headwater_block::{ByteRange, Extent, ExtentKind, IoError};

use crate::file_disk::{FileDisk, push_extent};
use crate::foreign::TABLE_BYTES_MAX;
use crate::units::{u64_of, usize_of};
use crate::vhdx::{Refusal, unread};

/// The first bytes of the footer and of its copy.
pub(crate) const COOKIE: &[u8] = b"conectix";
const SECTOR_BYTES: u64 = 512;
/// The largest disk: 2,040 GiB by the format's own limit.
pub(crate) const DISK_BYTES_MAX: u64 = 2040 << 30;
/// The type of a disk of fixed size, in the footer.
pub(crate) const FIXED: u32 = 2;
/// In the table: the block is absent.
const ABSENT: u32 = u32::MAX;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |four| u32::from_be_bytes(*four))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |eight| u64::from_be_bytes(*eight))
}

/// The checksum at `at`: the ones' complement of the sum of all other bytes.
pub(crate) fn checksum(bytes: &[u8], at: usize) -> u32 {
    let counts = |(index, _): &(usize, &u8)| !(at..at + 4).contains(index);
    let sum = bytes
        .iter()
        .enumerate()
        .filter(counts)
        .fold(0u32, |sum, (_, byte)| sum.wrapping_add(u32::from(*byte)));
    !sum
}

fn is_sound(bytes: &[u8], at: usize) -> bool {
    u32_at(bytes, at) == checksum(bytes, at)
}

/// The most bytes of padding after a footer. An LVM volume is padded to 4 MiB; upload tools pad to 1 MiB.
const PADDING_BYTES_MAX: u64 = 4 << 20;

/// Where a VHD of fixed size ends in a file, if the file is one: after its footer, which padding may follow.
/// A footer outside the last sector counts only if it is valid, is where its disk ends, and only zeroes
/// follow. Otherwise the file is a disk that happens to contain such bytes.
pub(crate) fn end_of_fixed(file: &File, file_bytes: u64) -> std::io::Result<Option<u64>> {
    let Some(last) = file_bytes.checked_sub(SECTOR_BYTES) else { return Ok(None) };
    let mut cookie = [0; COOKIE.len()];
    file.read_exact_at(&mut cookie, last)?;
    if cookie == COOKIE {
        return Ok(Some(file_bytes));
    }
    let from = last.saturating_sub(PADDING_BYTES_MAX).next_multiple_of(SECTOR_BYTES);
    let mut tail = vec![0; usize_of(file_bytes.saturating_sub(from))];
    file.read_exact_at(&mut tail, from)?;
    // The last sector that is not zero.
    let sectors = tail.chunks(usize_of(SECTOR_BYTES)).enumerate();
    let found = sectors.rev().find(|(_, sector)| sector.iter().any(|byte| *byte != 0));
    let Some((index, footer)) = found else { return Ok(None) };
    let at = from + u64_of(index) * SECTOR_BYTES;
    let is_footer = footer.starts_with(COOKIE)
        && footer.len() == usize_of(SECTOR_BYTES)
        && is_sound(footer, 64)
        && u32_at(footer, 60) == FIXED
        && u64_at(footer, 48) == at;
    Ok(is_footer.then_some(at + SECTOR_BYTES))
}

/// The places of a disk's blocks.
#[derive(Debug)]
struct Blocks {
    block_bytes: u64,
    bitmap_bytes: u64,
    /// The sector at which each block's bitmap starts, or [`ABSENT`].
    table: Vec<u32>,
}

/// Reads bytes of the file.
type ReadAt<'a> = &'a dyn Fn(u64, &mut [u8]) -> Result<(), String>;

/// QEMU opens such a file as if there were no parent, and would read zeroes where the parent has data.
pub(crate) const DIFFERENCE: &str = "it contains only the difference to a parent: merge it into the parent first (Hyper-V: Merge-VHD; VirtualBox: \
     VBoxManage clonemedium), and import the result";

/// An open VHD.
#[derive(Debug)]
pub(crate) struct Vhd {
    path: PathBuf,
    file: File,
    size_bytes: u64,
    /// `None`: of fixed size.
    blocks: Option<Blocks>,
}

impl Vhd {
    /// Opens the image in an open file. The error is a short reason.
    pub(crate) fn open(path: &Path, file: File, file_bytes: u64) -> Result<Arc<dyn FileDisk>, Refusal> {
        let mut start = [0; COOKIE.len()];
        let read = file.read_exact_at(&mut start, 0);
        read.map_err(|e| Refusal::Damaged(unread(&e)))?;
        // A dynamic disk has a copy of the footer at its start, which is used if the last sector is something
        // else.
        let end = if start == COOKIE {
            None
        } else {
            end_of_fixed(&file, file_bytes).map_err(|e| Refusal::Damaged(unread(&e)))?
        };
        Self::read_tables(path, file, end.unwrap_or(file_bytes)).map(|vhd| Arc::new(vhd) as Arc<dyn FileDisk>)
    }

    fn read_tables(path: &Path, file: File, file_bytes: u64) -> Result<Self, Refusal> {
        let read = |at: u64, into: &mut [u8]| file.read_exact_at(into, at).map_err(|e| unread(&e));
        let mut footer = [0; 512];
        read(file_bytes.checked_sub(SECTOR_BYTES).ok_or_else(|| "it is too short".to_owned())?, &mut footer)?;
        let is_footer = |bytes: &[u8]| bytes.starts_with(COOKIE) && is_sound(bytes, 64);
        if !is_footer(&footer) {
            // The last write to a dynamic disk may have been interrupted; then the copy at the start is used.
            read(0, &mut footer)?;
            if !is_footer(&footer) || u32_at(&footer, 60) != 3 {
                return Err("its footer is damaged".to_owned().into());
            }
        }
        let size_bytes = u64_at(&footer, 48);
        if !(1..=DISK_BYTES_MAX).contains(&size_bytes) || !size_bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(format!("its footer is wrong: a disk of {size_bytes} bytes is not possible").into());
        }
        let blocks = match u32_at(&footer, 60) {
            FIXED if size_bytes > file_bytes - SECTOR_BYTES => {
                return Err(format!("the file is shorter than its disk of {size_bytes} bytes").into());
            }
            FIXED => None,
            3 => {
                let mut header = [0; 1024];
                read(u64_at(&footer, 16), &mut header)?;
                Some(blocks(&header, size_bytes, file_bytes, &read)?)
            }
            4 => return Err(Refusal::Unsupported(DIFFERENCE.to_owned())),
            other => {
                return Err(Refusal::Unsupported(format!("it has the unknown type {other}")));
            }
        };
        Ok(Self { path: path.to_owned(), file, size_bytes, blocks })
    }

    /// Where the disk's byte `at` is in the file, `None` for zeroes; and for how many bytes the disk
    /// continues there.
    fn find(&self, at: u64) -> (Option<u64>, u64) {
        let Some(blocks) = &self.blocks else { return (Some(at), self.size_bytes.saturating_sub(at)) };
        let (number, within) = (at / blocks.block_bytes, at % blocks.block_bytes);
        let place = match blocks.table.get(usize_of(number)) {
            None | Some(&ABSENT) => None,
            Some(sector) => Some(u64::from(*sector) * SECTOR_BYTES + blocks.bitmap_bytes + within),
        };
        (place, blocks.block_bytes - within)
    }
}

fn blocks(
    header: &[u8; 1024],
    size_bytes: u64,
    file_bytes: u64,
    read: ReadAt<'_>,
) -> Result<Blocks, Refusal> {
    if !header.starts_with(b"cxsparse") || !is_sound(header, 36) {
        return Err("its header is damaged".to_owned().into());
    }
    let (table_at, entries) = (u64_at(header, 16), u64::from(u32_at(header, 28)));
    let block_bytes = u64::from(u32_at(header, 32));
    if !block_bytes.is_power_of_two() || block_bytes < SECTOR_BYTES {
        return Err(format!("its header is wrong: blocks of {block_bytes} bytes are not possible").into());
    }
    let needed = size_bytes.div_ceil(block_bytes);
    let table_end = needed.checked_mul(4).and_then(|len| table_at.checked_add(len));
    if needed.saturating_mul(4) > TABLE_BYTES_MAX {
        return Err(Refusal::ForQemu(format!(
            "its table of blocks has {} bytes (blocks of {block_bytes}), and the limit is {TABLE_BYTES_MAX}",
            needed.saturating_mul(4)
        )));
    }
    if needed > entries || table_end.is_none_or(|end| end > file_bytes) {
        return Err("its table of blocks is too short".to_owned().into());
    }
    let mut bytes = vec![0; usize_of(needed * 4)];
    read(table_at, &mut bytes)?;
    let table: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|entry| u32::from_be_bytes(*entry)).collect();
    // One bit for each sector, in whole sectors.
    let bitmap_bytes = block_bytes.div_ceil(SECTOR_BYTES * 8).next_multiple_of(SECTOR_BYTES);
    for (number, sector) in (0u64..).zip(&table).filter(|(_, sector)| **sector != ABSENT) {
        let used = block_bytes.min(size_bytes - number * block_bytes);
        let end = u64::from(*sector) * SECTOR_BYTES + bitmap_bytes + used;
        if end > file_bytes {
            let why = format!("block {number} should end at {end}, but the file has only {file_bytes} bytes");
            return Err(why.into());
        }
    }
    Ok(Blocks { block_bytes, bitmap_bytes, table })
}

impl FileDisk for Vhd {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), IoError> {
        let (mut at, mut rest) = (offset, into);
        while !rest.is_empty() {
            let (place, holds) = self.find(at);
            let (piece, tail) = rest.split_at_mut(usize_of(holds).min(rest.len()));
            let len = piece.len();
            match place {
                None => piece.fill(0),
                Some(place) => self.file.read_exact_at(piece, place).map_err(|e| {
                    IoError::from_os(
                        format!("cannot read {len} bytes at {place} of {}", self.path.display()),
                        e,
                    )
                })?,
            }
            at += u64_of(len);
            rest = tail;
        }
        Ok(())
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        let mut out: Vec<Extent> = Vec::new();
        let mut at = range.offset();
        while at < range.end() && out.len() <= max_extents {
            let (place, holds) = self.find(at);
            let len = holds.min(range.end() - at);
            push_extent(&mut out, len, if place.is_some() { ExtentKind::Data } else { ExtentKind::Hole });
            at += len;
        }
        out.truncate(max_extents.max(1));
        Ok(out)
    }

    fn will_read(&self, range: ByteRange) {
        let mut at = range.offset();
        while at < range.end() {
            let (place, holds) = self.find(at);
            let len = holds.min(range.end() - at);
            if let (Some(place), Some(len)) = (place, std::num::NonZeroU64::new(len)) {
                // A hint: it does not matter whether the file system accepts it.
                let _ = rustix::fs::fadvise(&self.file, place, Some(len), rustix::fs::Advice::WillNeed);
            }
            at += len;
        }
    }
}
