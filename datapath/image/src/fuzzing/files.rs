//! Checks readers of whole image files: qcow2 is compared with a second reader of its tables; VHD, VHDX and
//! VMDK must be consistent with themselves.
//!
//! A file with tables far apart is mostly holes, so the input consists of its pieces: offset (4 bytes),
//! length (2 bytes) and contents of each, until the bytes end. Checksums of a format are corrected, because
//! otherwise no change would pass them.

use std::cell::Cell;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Once;

use headwater_block::{ByteRange, ExtentKind};
use rustix::fs::MemfdFlags;

use crate::file_disk::FileDisk;
use crate::foreign::Foreign;
use crate::qcow2::disk::{Qcow2Disk, inflate, unpack_zstd};
use crate::qcow2::header::{Compression, Header};
use crate::units::{u64_of, usize_of};

/// The limit for the end of a piece: as much as the smallest VHDX with a few blocks needs.
const FILE_BYTES: u64 = 12 << 20;
/// How many bytes of a disk are read: at its start, and at its end.
const READ_BYTES: u64 = 256 << 10;

/// Calls `read` with a file that has these bytes.
pub(super) fn with_file<R>(bytes: &[u8], read: impl FnOnce(&File) -> R) -> R {
    let file = memfd();
    let written = (&file).write_all(bytes);
    assert!(written.is_ok(), "no memory for a file: {written:?}");
    read(&file)
}

fn memfd() -> File {
    match rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC) {
        Ok(file) => file.into(),
        Err(e) => panic!("no memory for a file: {e}"),
    }
}

/// A path with which a file without a name can be opened again.
fn path_of(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// A file of the pieces, with its length.
fn file_of(mut pieces: &[u8]) -> (File, u64) {
    let file = memfd();
    let mut len = 0;
    while let Some(([a, b, c, d, low, high], rest)) = pieces.split_first_chunk() {
        let offset = u64::from(u32::from_le_bytes([*a, *b, *c, *d]));
        let (piece, rest) = rest.split_at(usize::from(u16::from_le_bytes([*low, *high])).min(rest.len()));
        let end = offset + u64_of(piece.len());
        if end <= FILE_BYTES {
            let written = file.write_all_at(piece, offset);
            assert!(written.is_ok(), "no memory for a file: {written:?}");
            len = end.max(len);
        }
        pieces = rest;
    }
    // A last piece without contents extends the file.
    let sized = file.set_len(len);
    assert!(sized.is_ok(), "no memory for a file: {sized:?}");
    (file, len)
}

/// All bytes of a file of the pieces.
pub(super) fn whole_of(pieces: &[u8]) -> Vec<u8> {
    let (file, len) = file_of(pieces);
    let mut bytes = vec![0; usize_of(len)];
    let whole = file.read_exact_at(&mut bytes, 0);
    assert!(whole.is_ok(), "{whole:?}");
    bytes
}

/// The pieces of a file that are not zero.
pub(super) fn pieces_of(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut put = |at: usize, piece: &[u8]| {
        out.extend(u32::try_from(at).unwrap_or(u32::MAX).to_le_bytes());
        out.extend(u16::try_from(piece.len()).unwrap_or(0).to_le_bytes());
        out.extend(piece);
    };
    for (number, sector) in bytes.chunks(512).enumerate() {
        let end = sector.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        if end > 0 {
            put(number * 512, sector.get(..end).unwrap_or_default());
        }
    }
    // The file's length counts, too.
    put(bytes.len().saturating_sub(1), bytes.last_chunk::<1>().map_or(&[], |last| last));
    out
}

/// A qcow2 image: every byte that is read equals the byte that a second walk through its tables finds.
pub fn qcow2_file(pieces: &[u8]) {
    let (file, len) = file_of(pieces);
    let mut start = vec![0; usize_of(len.min(Header::MAX_BYTES))];
    if file.read_exact_at(&mut start, 0).is_err() {
        return;
    }
    let Ok(header) = Header::decode(&start) else { return };
    let mut bytes = vec![0; usize_of(len)];
    let whole = file.read_exact_at(&mut bytes, 0);
    assert!(whole.is_ok(), "{whole:?}");
    // Parts of a backing file read as zeroes here.
    let plain = PlainQcow2 { bytes, header: header.clone() };
    let path = path_of(&file);
    let Ok(disk) = Qcow2Disk::open(&path, file, len, header, None) else { return };
    let size = disk.size_bytes();
    for at in [0, size.saturating_sub(READ_BYTES)] {
        let len = READ_BYTES.min(size - at);
        let mut found = vec![0xaa; usize_of(len)];
        match (disk.read(at, &mut found), plain.read(at, len)) {
            (Ok(()), Some(expected)) => assert!(found == expected, "other bytes from {at} on"),
            (Ok(()), None) => panic!("damaged tables were read from {at} on"),
            // A refusal is right only if the range has a compressed cluster, or an invalid entry.
            (Err(e), expected) => assert!(expected.is_none(), "valid bytes from {at} on were refused: {e}"),
        }
        extents(&disk, at, &found);
        let Some(range) = ByteRange::new(at, len) else { continue };
        disk.will_read(range);
    }
}

/// Holes read as zeroes, and extents cover the requested range.
fn extents(disk: &dyn FileDisk, at: u64, found: &[u8]) {
    let Some(range) = ByteRange::new(at, u64_of(found.len())).filter(|range| !range.is_empty()) else {
        return;
    };
    let Ok(extents) = disk.extents(range, 64) else { return };
    assert!(!extents.is_empty() && extents.len() <= 64, "{} extents", extents.len());
    let mut from = 0usize;
    for extent in extents {
        assert!(extent.len > 0, "an empty extent");
        let to = from.saturating_add(usize_of(extent.len)).min(found.len());
        let part = found.get(from..to).unwrap_or_default();
        let is_hole = extent.kind == ExtentKind::Hole;
        assert!(
            !is_hole || part.iter().all(|byte| *byte == 0 || *byte == 0xaa),
            "a hole with data from {from} on"
        );
        from = to;
    }
}

/// A qcow2 image as its specification describes it, sector by sector.
struct PlainQcow2 {
    bytes: Vec<u8>,
    header: Header,
}

impl PlainQcow2 {
    fn word(&self, at: u64) -> Option<u64> {
        let bytes = self.bytes.get(usize::try_from(at).ok()?..)?.first_chunk()?;
        Some(u64::from_be_bytes(*bytes))
    }

    fn read(&self, from: u64, len: u64) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        let mut at = from;
        while at < from + len {
            let end = (at / 512 + 1) * 512;
            let sector = self.sector(at / 512)?;
            let first = usize_of(at % 512);
            let last = usize_of(end.min(from + len) - at) + first;
            out.extend_from_slice(sector.get(first..last)?);
            at = end;
        }
        Some(out)
    }

    /// 512 bytes of the disk; `None` if its tables are invalid.
    fn sector(&self, number: u64) -> Option<Vec<u8>> {
        let bits = self.header.cluster_bits;
        let (cluster, within) = ((number * 512) >> bits, (number * 512) & ((1 << bits) - 1));
        let entry_bytes = if self.header.extended_l2 { 16 } else { 8 };
        let l2_entries = (1 << bits) / entry_bytes;
        let l1_entry = self.word(self.header.l1_offset + cluster / l2_entries * 8)?;
        // Bits 9 to 55 are an offset.
        let table = l1_entry & 0x00ff_ffff_ffff_fe00;
        let zeroes = || Some(vec![0; 512]);
        if table == 0 {
            return zeroes();
        }
        let at = table + cluster % l2_entries * entry_bytes;
        let entry = self.word(at)?;
        if entry & 1 << 62 != 0 {
            return self.unpacked(entry, within);
        }
        let offset = entry & 0x00ff_ffff_ffff_fe00;
        if offset.trailing_zeros() < bits && offset != 0 {
            return None;
        }
        if self.header.extended_l2 {
            let bitmap = self.word(at + 8)?;
            let subcluster = (within * 32) >> bits;
            if bitmap >> (32 + subcluster) & 1 == 1 || bitmap >> subcluster & 1 == 0 {
                return zeroes();
            }
        } else if offset == 0 || self.header.version > 2 && entry & 1 == 1 {
            return zeroes();
        }
        // The last cluster may be incomplete.
        let start = usize::try_from(offset + within).ok()?.min(self.bytes.len());
        let mut sector = self.bytes.get(start..(start + 512).min(self.bytes.len()))?.to_vec();
        sector.resize(512, 0);
        Some(sector)
    }

    fn unpacked(&self, entry: u64, within: u64) -> Option<Vec<u8>> {
        let bits = self.header.cluster_bits;
        let sectors_bits = bits - 8;
        let offset = entry & ((1 << (62 - sectors_bits)) - 1);
        let sectors = (entry & ((1 << 62) - 1)) >> (62 - sectors_bits);
        let end = (offset / 512 + sectors + 1) * 512;
        let from = usize::try_from(offset).ok()?;
        let to = usize::try_from(end).ok()?.min(self.bytes.len());
        let packed = self.bytes.get(from..to)?;
        let mut cluster = vec![0; 1 << bits];
        let whole = match self.header.compression {
            Compression::Deflate => inflate(packed, &mut cluster),
            Compression::Zstd => unpack_zstd(packed, &mut cluster),
        };
        if !whole {
            return None;
        }
        cluster.get(usize_of(within)..)?.get(..512).map(<[u8]>::to_vec)
    }
}

/// Images with every kind of table entry: present, absent, zero, compressed and truncated clusters.
pub(super) fn qcow2_samples() -> Vec<Vec<u8>> {
    [(9, false, 2), (9, false, 3), (12, false, 3), (14, true, 3)]
        .into_iter()
        .map(|(bits, extended, version)| pieces_of(&qcow2(bits, extended, version)))
        .collect()
}

fn put(bytes: &mut [u8], at: u64, value: &[u8]) {
    if let Some(place) = bytes.get_mut(usize_of(at)..).and_then(|rest| rest.get_mut(..value.len())) {
        place.copy_from_slice(value);
    }
}

fn qcow2(bits: u32, extended: bool, version: u32) -> Vec<u8> {
    let cluster = 1u64 << bits;
    let mut out = vec![0; usize_of(cluster * 5 + 100)];
    let features: u64 = if extended { 16 } else { 0 };
    put(&mut out, 0, b"QFI\xfb");
    for (at, value) in [(4, version), (20, bits), (36, 2), (96, 4), (100, 104)] {
        put(&mut out, at, &value.to_be_bytes());
    }
    for (at, value) in [(24, cluster * 40 + 512), (40, cluster), (72, features), (cluster, 2 * cluster)] {
        put(&mut out, at, &value.to_be_bytes());
    }
    let packed = miniz_oxide::deflate::compress_to_vec(&vec![0x5a; usize_of(cluster)], 6);
    put(&mut out, 4 * cluster, &packed);
    put(&mut out, 3 * cluster, &[7; 500]);
    let entries = [(3 * cluster) | (1 << 63), 0, 1, (4 * cluster) | (1 << 62), 5 * cluster];
    let entry_bytes = if extended { 16 } else { 8 };
    for (at, entry) in (0u64..).map(|n| 2 * cluster + n * entry_bytes).zip(entries) {
        put(&mut out, at, &entry.to_be_bytes());
        if extended && entry & 1 << 62 == 0 {
            put(&mut out, at + 8, &0x0000_00f0_0000_ff0f_u64.to_be_bytes());
        }
    }
    out
}

thread_local! {
    /// Set while a crate is called that may panic on damaged bytes. The panic is caught.
    static MAY_PANIC: Cell<bool> = const { Cell::new(false) };
}

/// Calls into a crate whose panics are caught, and are not reported as findings.
pub(super) fn tolerant<R>(call: impl FnOnce() -> R) -> R {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !MAY_PANIC.get() {
                before(info);
            }
        }));
    });
    MAY_PANIC.set(true);
    let result = call();
    MAY_PANIC.set(false);
    result
}

/// A VHD, VHDX or VMDK: it is refused, or its size is valid and it has the same content however it is read.
pub fn foreign_file(pieces: &[u8]) {
    let (file, len) = file_of(pieces);
    let mut start = [0; 512];
    if len < 1024 || file.read_exact_at(&mut start, 0).is_err() {
        return;
    }
    let mut last = [0; 512];
    let there = file.read_exact_at(&mut last, len - 512);
    assert!(there.is_ok(), "{there:?}");
    let by_footer = last.starts_with(b"conectix").then_some(Foreign::Vhd);
    let Some(format) = Foreign::detect(&start).or(by_footer) else { return };
    seal(format, &file, len);
    let open = || format.open_file(&path_of(&file), file.try_clone().unwrap(), len, "");
    let Ok(disk) = tolerant(open) else { return };
    let size = disk.size_bytes();
    assert!(size > 0 && size.is_multiple_of(512), "{size} bytes");
    let plain = (format == Foreign::Vhd).then(|| PlainVhd::new(&file, len)).flatten();
    for at in [0, size.saturating_sub(READ_BYTES)] {
        let len = usize_of(READ_BYTES.min(size - at));
        let mut whole = vec![0xaa; len];
        let read = tolerant(|| disk.read(at, &mut whole));
        let mut parts = vec![0x55; len];
        let step = 512 * 9;
        let parts_read = parts
            .chunks_mut(step)
            .zip((at..).step_by(step))
            .try_for_each(|(part, at)| tolerant(|| disk.read(at, part)));
        assert_eq!(read.is_ok(), parts_read.is_ok(), "{read:?} and {parts_read:?}");
        assert!(
            read.is_err() || whole == parts,
            "the {len} bytes at {at} differ when they are read in parts of {step} bytes"
        );
        extents(&*disk, at, &whole);
        if format == Foreign::Vhd && read.is_ok() {
            let expected = plain.as_ref().and_then(|plain| plain.read(at, len));
            assert!(expected.as_ref() == Some(&whole), "other bytes from {at} on");
        }
    }
}

/// A VHD as its specification describes it, sector by sector.
struct PlainVhd {
    bytes: Vec<u8>,
    footer: usize,
}

impl PlainVhd {
    fn new(file: &File, len: u64) -> Option<Self> {
        let mut bytes = vec![0; usize_of(len)];
        file.read_exact_at(&mut bytes, 0).ok()?;
        let last = bytes.len().checked_sub(512)?;
        let is_whole = bytes.get(last..)?.starts_with(b"conectix");
        Some(Self { bytes, footer: if is_whole { last } else { 0 } })
    }

    fn number(&self, at: usize, len: usize) -> Option<usize> {
        let field = self.bytes.get(at..at.checked_add(len)?)?;
        usize::try_from(field.iter().fold(0u64, |number, byte| number << 8 | u64::from(*byte))).ok()
    }

    fn read(&self, at: u64, len: usize) -> Option<Vec<u8>> {
        let first = usize_of(at) / 512;
        let mut out = Vec::new();
        for sector in first..first + len / 512 {
            let place = match self.number(self.footer + 60, 4)? {
                2 => Some(sector * 512),
                _ => {
                    let header = self.number(self.footer + 16, 8)?;
                    let (table, block) = (self.number(header + 16, 8)?, self.number(header + 32, 4)?);
                    let sectors = block / 512;
                    let bitmap = sectors.div_ceil(8 * 512) * 512;
                    let entry = self.number(table + sector / sectors * 4, 4)?;
                    (entry != 0xffff_ffff).then_some(entry * 512 + bitmap + sector % sectors * 512)
                }
            };
            match place {
                Some(place) => out.extend_from_slice(self.bytes.get(place..place + 512)?),
                None => out.resize(out.len() + 512, 0),
            }
        }
        Some(out)
    }
}

/// Corrects checksums.
fn seal(format: Foreign, file: &File, len: u64) {
    let patch = |at: u64, block_bytes: usize, field: usize, sum: &dyn Fn(&[u8]) -> [u8; 4]| {
        let mut block = vec![0; block_bytes];
        if file.read_exact_at(&mut block, at).is_ok()
            && let Some(place) = block.get_mut(field..field + 4)
        {
            place.fill(0);
            let sum = sum(&block);
            let written = file.write_all_at(&sum, at + u64_of(field));
            assert!(written.is_ok(), "{written:?}");
        }
    };
    // The ones' complement of the sum of all bytes.
    let bytes_sum = |block: &[u8]| {
        (!block.iter().fold(0u32, |sum, byte| sum.wrapping_add(u32::from(*byte)))).to_be_bytes()
    };
    let crc = |block: &[u8]| crc32c_of(block).to_le_bytes();
    match format {
        Foreign::Vhd => {
            patch(0, 512, 64, &bytes_sum);
            patch(512, 1024, 36, &bytes_sum);
            patch(len - 512, 512, 64, &bytes_sum);
        }
        Foreign::Vhdx => {
            for at in [64 << 10, 128 << 10] {
                patch(at, 4096, 4, &crc);
            }
            for at in [192 << 10, 256 << 10] {
                patch(at, 64 << 10, 4, &crc);
            }
        }
        Foreign::Vmdk => {}
    }
}

/// CRC-32C, one byte at a time.
fn crc32c_of(bytes: &[u8]) -> u32 {
    let table: [u32; 256] = std::array::from_fn(|n| {
        (0..8).fold(u32::try_from(n).unwrap_or(0), |crc, _| (crc >> 1) ^ ((crc & 1) * 0x82f6_3b78))
    });
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        let index = usize::from(crc.to_le_bytes()[0] ^ byte);
        crc >> 8 ^ table.get(index).copied().unwrap_or(0)
    })
}

/// Images of a small disk, created with `qemu-img`, which the tests need anyway.
pub(super) fn foreign_samples() -> Vec<Vec<u8>> {
    let forms = [
        ("vpc", "subformat=dynamic"),
        ("vpc", "subformat=fixed"),
        ("vhdx", "subformat=dynamic,block_size=1M,log_size=1M"),
        ("vmdk", "subformat=monolithicSparse"),
        ("vmdk", "subformat=streamOptimized"),
    ];
    forms.map(|(format, options)| pieces_of(&made_by_qemu(format, options))).to_vec()
}

fn made_by_qemu(format: &str, options: &str) -> Vec<u8> {
    let dir = std::env::temp_dir().join(format!("headwater-samples-{}", std::process::id()));
    let (raw, image) = (dir.join("raw"), dir.join("image"));
    let mut disk = vec![0; 1 << 20];
    put(&mut disk, 0, &[0x5a; 700]);
    put(&mut disk, 70_000, &[0xa5; 100]);
    let made = std::fs::create_dir_all(&dir).and_then(|()| std::fs::write(&raw, &disk));
    assert!(made.is_ok(), "cannot write {}: {made:?}", raw.display());
    let converted = std::process::Command::new("qemu-img")
        .args(["convert", "-f", "raw", "-O", format, "-o", options])
        .args([&raw, &image])
        .status();
    assert!(
        converted.as_ref().is_ok_and(|status| status.success()),
        "qemu-img is needed (apt-get install qemu-utils) to make a {format} image: {converted:?}"
    );
    let bytes = std::fs::read(&image);
    let _ = std::fs::remove_dir_all(&dir);
    assert!(bytes.is_ok(), "cannot read {}: {bytes:?}", image.display());
    bytes.unwrap_or_default()
}
