//! Recognises files that are neither a readable disk format nor a raw disk, such as archives and disks of
//! other programs, so that an import refuses them with advice and does not take them for raw disks.

use std::path::Path;

use crate::error::{ImageError, ImageErrorKind};
use crate::units::u64_of;

/// QEMU reads seSparse only through the file that describes the disk.
const JOIN_SESPARSE: &str = "It needs the small .vmdk file that describes it, and a snapshot needs the files of its parents: clone the disk on \
     the ESXi host (vmkfstools -i DISK.vmdk NEW.vmdk -d thin), or join all of its files where they are: qemu-img convert -O qcow2 \
     DISK.vmdk DISK.qcow2";

const MOUNT_EWF: &str =
    "Show its disk as a raw file first, with ewfmount of ewf-tools (it needs all segments, .E01, .E02 ..)";

/// Advice for a file of another format.
enum Advice {
    Qemu,
    Unpack(&'static str),
    /// A sentence.
    Do(&'static str),
    /// The file may still be a raw disk.
    Raw,
    None,
}

/// Files that are not raw disks: offset of the magic bytes, the magic bytes, the format, what to do.
const KNOWN: &[(usize, &[u8], &str, Advice)] = &[
    (0, b"COWD", "a VMDK image of the old kind (COWD)", Advice::Qemu),
    (0, b"# Disk DescriptorFile", "the description of a VMDK image", Advice::Qemu),
    (64, b"\x7f\x10\xda\xbe", "a VDI image", Advice::Qemu),
    (0, b"QED\0", "a QED image", Advice::Qemu),
    (
        0,
        b"\xbe\xba\xfe\xca\0\0\0\0",
        "the data of a VMDK snapshot or disk of ESXi (seSparse)",
        Advice::Do(JOIN_SESPARSE),
    ),
    (0, b"#!/bin/sh\n#V2.0 Format\n", "a cloop image", Advice::Qemu),
    (0, b"Bochs Virtual HD Image", "a Bochs image", Advice::Qemu),
    (0, b"EVF\x09\x0d\x0a\xff\0", "an EWF (EnCase, E01) image", Advice::Do(MOUNT_EWF)),
    (0, b"EVF2\x0d\x0a\x81\0", "an EWF (EnCase, Ex01) image", Advice::Do(MOUNT_EWF)),
    (
        0,
        b"AFF10\x0d\x0a\0",
        "an AFF image",
        Advice::Do("Convert it first, with affconvert -r of afflib-tools"),
    ),
    (0, b"\x3a\xff\x26\xed", "an Android sparse image", Advice::Unpack("simg2img")),
    (0, b"VMA\0", "a backup of Proxmox VE (VMA)", Advice::Unpack("vma extract")),
    (
        0,
        b"partclone-image",
        "a backup of a partition by partclone",
        Advice::Do("Restore it to a disk first, with partclone.restore"),
    ),
    (0, b"QEVM", "the saved state of a QEMU machine, not its disk", Advice::None),
    (
        0,
        b"MSWIM\0\0\0",
        "a Windows image of files (WIM)",
        Advice::Do("Apply it to a partition of a disk first, with wimapply"),
    ),
    (
        0,
        b"sprs",
        "an Apple sparse image",
        Advice::Do("Convert it on macOS first: hdiutil convert -format UDTO"),
    ),
    (0, b"WithoutFreeSpace", "a Parallels image", Advice::Qemu),
    (0, b"WithouFreSpacExt", "a Parallels image", Advice::Qemu),
    (0, b"LUKS\xba\xbe", "an encrypted LUKS container", Advice::Raw),
    (0, b"\x1f\x8b", "compressed with gzip", Advice::Unpack("gunzip --keep")),
    (0, b"\xfd7zXZ\0", "compressed with xz", Advice::Unpack("unxz --keep")),
    (0, b"\x28\xb5\x2f\xfd", "compressed with zstd", Advice::Unpack("unzstd")),
    (0, b"BZh", "compressed with bzip2", Advice::Unpack("bunzip2 --keep")),
    (0, b"\x04\x22\x4d\x18", "compressed with lz4", Advice::Unpack("unlz4")),
    (0, b"LZIP", "compressed with lzip", Advice::Unpack("lzip --decompress --keep")),
    (0, b"\x89LZO\0\x0d\x0a\x1a\x0a", "compressed with lzop", Advice::Unpack("lzop --decompress")),
    (0, b"Rar!\x1a\x07", "a RAR archive", Advice::Unpack("unrar x")),
    (0, b"MSCF\0\0\0\0", "a cabinet archive", Advice::Unpack("cabextract")),
    (0, b"PK\x03\x04", "a zip archive", Advice::Unpack("unzip")),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", Advice::Unpack("7z x")),
    (257, b"ustar", "a tar archive", Advice::Unpack("tar --extract --file")),
    (0, b"\x7fELF", "an ELF program", Advice::None),
    (0, b"%PDF", "a PDF document", Advice::None),
    (0, b"\x89PNG", "a picture", Advice::None),
    (0, b"SQLite format 3\0", "an SQLite database", Advice::None),
];

/// Fails for a file that is known not to be a raw disk. `start` and `end` are its first and last bytes;
/// `via_qemu` says how QEMU can serve it.
pub(crate) fn refuse_known_formats(
    path: &Path,
    file_bytes: u64,
    (start, end): (&[u8], &[u8]),
    via_qemu: &str,
) -> Result<(), ImageError> {
    let shown = path.display();
    let refuse = |what: &str, advice: &Advice| {
        let advice = match advice {
            Advice::Qemu => format!(". {via_qemu}"),
            Advice::Unpack(tool) => format!(". Unpack it first: {tool} {shown}"),
            Advice::Do(what) => format!(". {what}"),
            Advice::Raw => {
                format!(
                    ". If this is the content of a machine's disk: headwater image import --format raw {shown}"
                )
            }
            Advice::None => String::new(),
        };
        let why = format!(
            "cannot use {shown} as a disk image: it is {what}; raw, qcow2, VHD, VHDX and VMDK in one file can be read{advice}"
        );
        ImageError::new(ImageErrorKind::Unsupported, why)
    };
    for (at, mark, what, advice) in KNOWN {
        if start.get(*at..).is_some_and(|tail| tail.starts_with(mark)) {
            return Err(refuse(what, advice));
        }
    }
    if end.starts_with(b"koly\0\0\0\x04") {
        return Err(refuse("a disk image of macOS (DMG)", &Advice::Qemu));
    }
    let first = start.get(..start.len().min(512)).unwrap_or_default();
    if looks_like_text(first) {
        return Err(refuse("text", &Advice::None));
    }
    if !u64_of(start.len()).is_multiple_of(512) || !file_bytes.is_multiple_of(512) {
        return Err(ImageError::new(
            ImageErrorKind::Invalid,
            format!(
                "cannot use {shown} as a disk image: it is not qcow2, VHD, VHDX or VMDK, and its size of {file_bytes} \
                 bytes is not a multiple of 512, so it is not a raw disk either"
            ),
        ));
    }
    Ok(())
}

/// Whether a first sector is text. No boot sector, partition table or file system has text there.
fn looks_like_text(first: &[u8]) -> bool {
    let text = match std::str::from_utf8(first) {
        Ok(text) => text,
        // A character may be cut at the end of the sector.
        Err(e) if first.len().saturating_sub(e.valid_up_to()) < 4 => {
            std::str::from_utf8(first.get(..e.valid_up_to()).unwrap_or_default()).unwrap_or_default()
        }
        Err(_) => return false,
    };
    !text.is_empty() && text.chars().all(|c| !c.is_control() || matches!(c, '\n' | '\r' | '\t' | '\u{c}'))
}
