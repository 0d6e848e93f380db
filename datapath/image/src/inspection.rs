//! Inspects a disk at its import: the size of its sectors, which firmware boots it, and whether its content
//! is recognised.
//!
//! A raw file does not specify its sector size: 512 bytes, or 4,096 (4Kn). A GPT shows it, because its header
//! is in the second sector. An MBR counts in sectors, so the right size is the one with which its partitions
//! begin with recognised contents. Otherwise the file format, the host's device or the source's server
//! specifies the size, and 512 is the default. The tables have precedence: a server may prefer requests of
//! 4,096 bytes only because its own disk has such sectors. A size that the user gives overrides everything.

use std::sync::Arc;

use headwater_block::{Device, Geometry, blocking};
use headwater_filesystems::{
    BootRecords, Bytes, GPT_START_BYTES, Partition, boot_records, gpt_sector_bytes, identify, partitions,
};

use crate::error::{ImageError, ImageErrorKind};
use crate::file_disk::FileDisk;
use crate::units::usize_of;

/// The usual size of a disk's sectors.
pub(crate) const SECTOR_BYTES: u32 = 512;
/// The size of the sectors of a 4Kn disk.
pub(crate) const LARGE_SECTOR_BYTES: u32 = 4096;

/// The result of an inspection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inspection {
    /// Size of its sectors: 512 or 4,096.
    pub sector_bytes: u32,
    /// Its boot code and boot partitions.
    pub boot: BootRecords,
    /// Whether a partition table, boot code, a file system or a volume was recognised. Also if that could not
    /// be determined, because a read failed: the import then reports the failure.
    pub is_known: bool,
}

impl Inspection {
    /// Inspects a disk that is imported. `told` is the sector size that the user gave.
    pub(crate) fn of(disk: &Arc<dyn Device>, told: Option<u32>) -> Result<Self, ImageError> {
        let geometry = disk.geometry();
        let sector_bytes = told.map_or_else(|| sector_bytes_of(disk, geometry), Ok)?;
        let boot = boot_records(&disk.as_ref(), sector_bytes.into())?;
        let whole = Partition { number: 0, offset_bytes: 0, len_bytes: geometry.size_bytes };
        let is_known = boot.has_partitions
            || boot.has_boot_code
            || !matches!(identify(&mut Bytes::new(Arc::new(Arc::clone(disk)), &whole)), Ok(None));
        Ok(Self { sector_bytes, boot, is_known })
    }

    /// Remarks for the user who imports the disk, one on each line.
    pub fn remarks(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if self.sector_bytes == LARGE_SECTOR_BYTES {
            lines.push("the disk has sectors of 4096 bytes, and is served with them".to_owned());
        }
        if !self.is_known {
            lines.push(
                "the disk has no known partition table, boot sector or file system: if the file is a container of another kind, \
                 convert it first"
                    .to_owned(),
            );
        } else if let Some(why) = why_bios_cannot_boot(self.sector_bytes, self.boot.is_uefi_only()) {
            lines.push(format!("machines with a BIOS cannot boot the disk: {why}"));
        } else if !self.boot.has_boot_code {
            lines.push(
                "the disk has no boot loader in its first sector: machines with a BIOS cannot boot it"
                    .to_owned(),
            );
        }
        lines
    }
}

/// Why a BIOS cannot boot a disk, as far as that can be seen.
pub(crate) fn why_bios_cannot_boot(sector_bytes: u32, is_uefi_only: bool) -> Option<String> {
    if sector_bytes == LARGE_SECTOR_BYTES {
        return Some("its sectors have 4096 bytes, and a BIOS boots only from sectors of 512".to_owned());
    }
    is_uefi_only.then(|| {
        "it boots with UEFI only: it has an EFI system partition, no boot code in its first sector and no BIOS boot partition"
            .to_owned()
    })
}

/// Fails for a sector size that a disk cannot have.
pub(crate) fn check_sector_bytes(told: Option<u32>, size_bytes: u64) -> Result<(), ImageError> {
    match told {
        None | Some(SECTOR_BYTES) => Ok(()),
        Some(LARGE_SECTOR_BYTES) if size_bytes.is_multiple_of(u64::from(LARGE_SECTOR_BYTES)) => Ok(()),
        Some(LARGE_SECTOR_BYTES) => {
            let message = format!(
                "a disk of {size_bytes} bytes cannot have sectors of 4096 bytes: its size is not a multiple"
            );
            Err(ImageError::new(ImageErrorKind::Invalid, message))
        }
        Some(other) => {
            let message = format!("sectors have 512 or 4096 bytes, not {other}");
            Err(ImageError::new(ImageErrorKind::Invalid, message))
        }
    }
}

/// The sector size with which the partitions of an MBR begin with recognised file systems or volumes.
fn sector_bytes_of_mbr(disk: &Arc<dyn Device>) -> Option<u32> {
    let is_known = |partition: &Partition| {
        partition.number > 0
            && matches!(identify(&mut Bytes::new(Arc::new(Arc::clone(disk)), partition)), Ok(Some(_)))
    };
    [SECTOR_BYTES, LARGE_SECTOR_BYTES].into_iter().find(|size| {
        partitions(&disk.as_ref(), u64::from(*size)).is_ok_and(|found| found.partitions.iter().any(is_known))
    })
}

fn sector_bytes_of(disk: &Arc<dyn Device>, geometry: Geometry) -> Result<u32, ImageError> {
    if !can_be_large(geometry.size_bytes) {
        return Ok(SECTOR_BYTES);
    }
    let mut start = [0; GPT_START_BYTES];
    blocking::read(disk.as_ref(), 0, &mut start)?;
    let is_large = geometry.logical_block_bytes == LARGE_SECTOR_BYTES;
    let said = if is_large { LARGE_SECTOR_BYTES } else { SECTOR_BYTES };
    Ok(gpt_sector_bytes(&start).or_else(|| sector_bytes_of_mbr(disk)).unwrap_or(said))
}

/// The sector size of a disk in a file, by its GPT or its format. This is a quick look when the file is opened:
/// [`Inspection::of`] also examines an MBR. A disk that cannot be read fails later, when it is used.
pub(crate) fn sector_bytes_of_file(disk: &dyn FileDisk) -> u32 {
    if !can_be_large(disk.size_bytes()) {
        return SECTOR_BYTES;
    }
    let mut start = [0; GPT_START_BYTES];
    let of_gpt = disk.read(0, &mut start).ok().and_then(|()| gpt_sector_bytes(&start));
    of_gpt.or(disk.sector_bytes()).unwrap_or(SECTOR_BYTES)
}

fn can_be_large(size_bytes: u64) -> bool {
    usize_of(size_bytes) >= GPT_START_BYTES && size_bytes.is_multiple_of(u64::from(LARGE_SECTOR_BYTES))
}
