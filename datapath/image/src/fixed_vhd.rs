//! Computes the layout of a fixed VHD: the bytes of the disk, zeroes up to a multiple of 1 MiB, and a footer
//! of 512 bytes. No I/O.
//!
//! Azure accepts only this format. A fixed VHD is a raw disk with a footer, so every byte of the disk keeps
//! its offset, and a client that uploads a version needs no file.
//!
//! ```text
//!   0              disk_bytes        data_bytes (whole MiB)   file_bytes
//!   | disk         | zeroes          | footer (512 bytes)     |
//! ```
//! Field names are those of Microsoft's "Virtual Hard Disk Image Format Specification", "Hard Disk Footer
//! Format".

use headwater_store::Hash;

use crate::error::{ImageError, ImageErrorKind};
use crate::vhd::{COOKIE, DISK_BYTES_MAX, FIXED, checksum};

/// The length of the footer, and of a sector of the disk.
pub const FOOTER_BYTES: u64 = 512;

/// The disk in a fixed VHD is padded with zeroes to a multiple of this.
const ALIGNMENT_BYTES: u64 = 1 << 20;

/// "Time Stamp" counts seconds from the first day of 2000, in UTC.
const EPOCH_2000_S: u64 = 946_684_800;

/// "Creator Application". Readers such as QEMU take the length of the disk from the footer if this is `win `,
/// otherwise from the geometry, which is a smaller number for most disks.
const CREATOR: &[u8] = b"win ";

/// "Creator Host OS": `Wi2k`. The other known value is Macintosh.
const CREATOR_HOST: &[u8] = b"Wi2k";

/// The layout of a fixed VHD, and its footer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FixedVhd {
    /// The length of the disk in the file: that of the image, padded to whole MiB.
    pub data_bytes: u64,
    /// The bytes after the disk.
    pub footer: [u8; 512],
}

impl FixedVhd {
    /// The layout for the disk of a version. The version and the time when it was made determine all bytes,
    /// so two exports of a version are equal.
    pub fn new(
        disk_bytes: u64,
        sector_bytes: u32,
        manifest: Hash,
        created_at_ms: u64,
    ) -> Result<Self, ImageError> {
        let refused = |why: String| {
            let what = format!("cannot write version {} as a fixed VHD: {why}", manifest.short());
            Err(ImageError::new(ImageErrorKind::Unsupported, what))
        };
        if u64::from(sector_bytes) != FOOTER_BYTES {
            return refused(format!(
                "its sectors have {sector_bytes} bytes, but a VHD has sectors of 512; export it as raw or VHDX"
            ));
        }
        let data_bytes = disk_bytes.checked_next_multiple_of(ALIGNMENT_BYTES).unwrap_or(u64::MAX);
        if data_bytes > DISK_BYTES_MAX {
            return refused(format!(
                "its disk has {disk_bytes} bytes, but a VHD has at most {DISK_BYTES_MAX} (2,040 GiB); export it as \
                 raw or VHDX"
            ));
        }
        let mut id = [0; 16];
        id.iter_mut().zip(manifest.0).for_each(|(to, from)| *to = from);
        // A UUID of version 8, whose content is free, and of the variant of RFC 9562.
        id[6] = (id[6] & 0x0f) | 0x80;
        id[8] = (id[8] & 0x3f) | 0x80;
        let created_s = (created_at_ms / 1000).saturating_sub(EPOCH_2000_S);
        let created_s = u32::try_from(created_s).unwrap_or(u32::MAX);
        Ok(Self { data_bytes, footer: footer(data_bytes, created_s, &id) })
    }

    /// The length of the file.
    pub const fn file_bytes(&self) -> u64 {
        self.data_bytes.saturating_add(FOOTER_BYTES)
    }
}

fn footer(data_bytes: u64, created_s: u32, id: &[u8; 16]) -> [u8; 512] {
    let (cylinders, heads, sectors) = geometry(data_bytes / FOOTER_BYTES);
    let mut footer = [0; 512];
    let fields: [&[u8]; 15] = [
        COOKIE,
        // "Features": only the bit that is always set.
        &2u32.to_be_bytes(),
        // "File Format Version": 1.0.
        &0x0001_0000u32.to_be_bytes(),
        // "Data Offset": none, because only the footer describes the disk.
        &u64::MAX.to_be_bytes(),
        &created_s.to_be_bytes(),
        CREATOR,
        // "Creator Version".
        &0x000a_0000u32.to_be_bytes(),
        CREATOR_HOST,
        // "Original Size" and "Current Size".
        &data_bytes.to_be_bytes(),
        &data_bytes.to_be_bytes(),
        // "Disk Geometry".
        &cylinders.to_be_bytes(),
        &[heads, sectors],
        &FIXED.to_be_bytes(),
        // "Checksum", of all other bytes.
        &[0; 4],
        id,
    ];
    let mut at = 0;
    for field in fields {
        for byte in field {
            if let Some(place) = footer.get_mut(at) {
                *place = *byte;
            }
            at += 1;
        }
    }
    let sum = checksum(&footer, CHECKSUM_AT).to_be_bytes();
    footer.iter_mut().skip(CHECKSUM_AT).zip(sum).for_each(|(to, from)| *to = from);
    footer
}

/// The offset of the checksum in the footer.
const CHECKSUM_AT: usize = 64;

/// Cylinders, heads and sectors per track for this number of sectors: the algorithm of the specification's
/// appendix "CHS Calculation". The result is the largest such disk that is not larger.
fn geometry(sectors: u64) -> (u16, u8, u8) {
    const MOST: u64 = 65_535 * 16 * 255;
    let total = sectors.min(MOST);
    if total >= 65_535 * 16 * 63 {
        let (track, heads) = (255, 16);
        return shape(total / track / heads, heads, track);
    }
    let mut track = 17;
    let mut rows = total / track;
    let mut heads = rows.div_ceil(1024).max(4);
    if rows >= heads * 1024 || heads > 16 {
        (track, heads) = (31, 16);
        rows = total / track;
    }
    if rows >= heads * 1024 {
        (track, heads) = (63, 16);
        rows = total / track;
    }
    shape(rows / heads, heads, track)
}

fn shape(cylinders: u64, heads: u64, track: u64) -> (u16, u8, u8) {
    let byte = |number: u64| u8::try_from(number).unwrap_or(u8::MAX);
    (u16::try_from(cylinders).unwrap_or(u16::MAX), byte(heads), byte(track))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vhd(disk_bytes: u64) -> FixedVhd {
        FixedVhd::new(disk_bytes, 512, Hash::of(b"a manifest"), 1_000_000_000_000).unwrap()
    }

    #[test]
    fn a_footer_has_these_bytes() {
        let vhd = vhd((5 << 20) - 512);
        assert_eq!((vhd.data_bytes, vhd.file_bytes()), (5 << 20, (5 << 20) + 512));
        let hex = |from: usize, to: usize| -> String {
            vhd.footer[from..to].iter().map(|byte| format!("{byte:02x}")).collect()
        };
        assert_eq!(hex(0, 24), "636f6e65637469780000000200010000ffffffffffffffff");
        // 53,315,200 s after 2000.
        assert_eq!(hex(24, 40), "032d8680".to_owned() + "77696e20" + "000a0000" + "5769326b");
        assert_eq!(hex(40, 56), "0000000000500000".repeat(2));
        // 150 cylinders of 4 heads of 17 sectors: 10,200 of the 10,240 sectors.
        assert_eq!(hex(56, 64), "0096041100000002");
        assert!(vhd.footer[84..].iter().all(|byte| *byte == 0));
        assert_eq!(vhd.footer[74] >> 4, 8);
        let sum = vhd.footer.iter().enumerate().filter(|(at, _)| !(64..68).contains(at));
        let sum: u32 = sum.map(|(_, byte)| u32::from(*byte)).sum();
        assert_eq!(vhd.footer[64..68], (!sum).to_be_bytes());
    }

    #[test]
    fn each_version_has_its_own_identifier() {
        let other = FixedVhd::new(5 << 20, 512, Hash::of(b"another"), 1_000_000_000_000).unwrap();
        assert_eq!(vhd(5 << 20), vhd(5 << 20));
        assert_ne!(vhd(5 << 20).footer[68..84], other.footer[68..84]);
    }

    #[test]
    fn geometries_are_those_of_the_specification() {
        // In MiB; computed from the text of the specification by another program.
        for (mib, expected) in [
            (1, (30, 4, 17)),
            (40, (963, 5, 17)),
            (504, (1_024, 16, 63)),
            (2_048, (4_161, 16, 63)),
            (130_048, (65_278, 16, 255)),
            (1 << 20, (65_535, 16, 255)),
        ] {
            assert_eq!(geometry(mib << 11), expected, "{mib} MiB");
        }
    }

    #[test]
    fn large_disks_and_large_sectors_are_refused() {
        let new = |disk_bytes, sector_bytes| FixedVhd::new(disk_bytes, sector_bytes, Hash::of(b"m"), 0);
        assert_eq!(new(DISK_BYTES_MAX, 512).unwrap().data_bytes, DISK_BYTES_MAX);
        for (wrong, part) in [
            (new(DISK_BYTES_MAX + 1, 512), "2,040 GiB"),
            (new(u64::MAX, 512), "2,040"),
            (new(1 << 30, 4096), "4096"),
        ] {
            let error = wrong.unwrap_err();
            assert_eq!(error.kind(), ImageErrorKind::Unsupported);
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
