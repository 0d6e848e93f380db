//! What firmware finds on a disk: boot code in the first sector, and the partitions that boot loaders are on.
//!
//! A BIOS runs the first sector. On a disk with a GPT, the boot loader for that lies in a BIOS boot partition, or in a gap or a file
//! system, which only the boot code knows. UEFI reads the EFI system partition and does not look at the first sector's code.
//!
//! Partition editors write generic code into the first sector, and a disk that gets a GPT may keep it. That code starts the active
//! partition of the MBR's table, so without an active partition nothing boots.

use headwater_block::IoError;

use crate::ReadAt;
use crate::partitions::{Disk, Sector, primary};

/// The types of partitions in a GPT, as they lie on the disk: C12A7328-F81F-11D2-BA4B-00A0C93EC93B and
/// 21686148-6449-6E6F-744E-656564454649.
const EFI_SYSTEM: [u8; 16] = *b"\x28\x73\x2a\xc1\x1f\xf8\xd2\x11\xba\x4b\x00\xa0\xc9\x3e\xc9\x3b";
const BIOS_BOOT: [u8; 16] = *b"Hah!IdontNeedEFI";
/// The type of an EFI system partition in an MBR.
const EFI_SYSTEM_OF_MBR: u8 = 0xef;
/// How much of a first sector is boot code.
const BOOT_CODE_BYTES: usize = 440;
/// What generic code loads the address of the MBR's table with, after it moved itself to 0x600: `mov si`, `mov bp` or `mov bx, 7be`.
const READS_TABLE: [&[u8]; 3] = [b"\xbe\xbe\x07", b"\xbd\xbe\x07", b"\xbb\xbe\x07"];
/// The attribute "legacy BIOS bootable" of a partition in a GPT: the loaders that look for it have code like the generic one.
const LEGACY_BOOTABLE: u8 = 1 << 2;
/// Where an entry of a GPT has its attributes.
const ATTRIBUTES_AT: usize = 48;

/// What firmware finds on a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BootRecords {
    /// Whether there is a partition table.
    pub has_partitions: bool,
    /// Whether the first sector has boot code that finds something to start, and the mark without which a BIOS does not run it.
    pub has_boot_code: bool,
    /// Whether a GPT has a partition for the boot loader of BIOS machines.
    pub has_bios_partition: bool,
    /// Whether there is an EFI system partition.
    pub has_efi_partition: bool,
}

impl BootRecords {
    /// Whether UEFI boots the disk, as far as this can be seen, and a BIOS cannot.
    pub fn is_uefi_only(&self) -> bool {
        self.has_efi_partition && !self.has_boot_code && !self.has_bios_partition
    }
}

/// Looks for what firmware boots on a disk whose sectors have so many bytes: 512 or 4,096.
pub fn boot_records(disk: &dyn ReadAt, sector_bytes: u64) -> Result<BootRecords, IoError> {
    let disk = Disk::new(disk, sector_bytes);
    let first = disk.table(0)?;
    let mut found = BootRecords { has_boot_code: has_boot_code(&first), ..BootRecords::default() };
    if let Some(header) = disk.gpt_header(&first)? {
        found.has_partitions = true;
        let mut is_legacy_bootable = false;
        for entry in disk.gpt_entries(&header)? {
            is_legacy_bootable |= entry.get(ATTRIBUTES_AT).is_some_and(|byte| byte & LEGACY_BOOTABLE != 0);
            let kind = entry.first_chunk::<16>();
            found.has_efi_partition |= kind == Some(&EFI_SYSTEM);
            found.has_bios_partition |= kind == Some(&BIOS_BOOT);
        }
        let starts_nothing = is_generic(&first) && !has_active(&first) && !is_legacy_bootable;
        found.has_boot_code &= !starts_nothing;
    } else {
        for (_, entry) in primary(&first) {
            found.has_partitions = true;
            found.has_efi_partition |= entry.kind == EFI_SYSTEM_OF_MBR;
        }
    }
    Ok(found)
}

/// Whether the boot code starts the active partition of the MBR's table.
fn is_generic(first: &Sector) -> bool {
    let code = first.get(..BOOT_CODE_BYTES).unwrap_or_default();
    code.windows(3).any(|bytes| READS_TABLE.contains(&bytes))
}

fn has_active(first: &Sector) -> bool {
    primary(first).any(|(_, entry)| entry.is_active())
}

fn has_boot_code(first: &Sector) -> bool {
    let code = first.get(..BOOT_CODE_BYTES).unwrap_or_default();
    first.ends_with(&[0x55, 0xaa]) && code.iter().any(|byte| *byte != 0)
}
