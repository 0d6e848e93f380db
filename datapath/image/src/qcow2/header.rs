//! Parses the header of a qcow2 image. No I/O.

use crate::units::{u64_of, usize_of, usize_of_u32};

pub(crate) const MAGIC: [u8; 4] = *b"QFI\xfb";

/// The most bytes of an L1 table, as in QEMU.
const L1_MAX_BYTES: u64 = 32 << 20;
const BACKING_FORMAT: u32 = 0xe279_2aca;

const INCOMPATIBLE_DIRTY: u64 = 1;
const INCOMPATIBLE_CORRUPT: u64 = 1 << 1;
const INCOMPATIBLE_DATA_FILE: u64 = 1 << 2;
const INCOMPATIBLE_COMPRESSION: u64 = 1 << 3;
const INCOMPATIBLE_EXTENDED_L2: u64 = 1 << 4;

/// Why a header is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It is invalid.
    Damaged(String),
    /// It is valid, but not supported here; QEMU may be able to read it.
    Unsupported(String),
    /// Its data is encrypted.
    Encrypted,
}

/// The compression of clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    Deflate,
    Zstd,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) size_bytes: u64,
    pub(crate) cluster_bits: u32,
    pub(crate) l1_entries: u64,
    pub(crate) l1_offset: u64,
    pub(crate) compression: Compression,
    pub(crate) extended_l2: bool,
    /// The name of the backing file, as written in the header.
    pub(crate) backing: Option<String>,
    /// The format of the backing file, if the header specifies it.
    pub(crate) backing_format: Option<String>,
}

impl Header {
    /// How many bytes at the start of a file [`Header::decode`] needs: the header is inside the first
    /// cluster.
    pub(crate) const MAX_BYTES: u64 = 2 << 20;

    pub(crate) fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Entries of an L2 table.
    pub(crate) fn l2_entries(&self) -> u64 {
        self.cluster_bytes() / self.l2_entry_bytes()
    }

    pub(crate) fn l2_entry_bytes(&self) -> u64 {
        if self.extended_l2 { 16 } else { 8 }
    }

    /// Reads the header from the first bytes of a file.
    pub(crate) fn decode(start: &[u8]) -> Result<Self, Refusal> {
        let damaged = |why: &str| Refusal::Damaged(why.to_owned());
        let fields = Fields(start);
        let short = || damaged("it ends inside its header");
        if start.get(..4) != Some(&MAGIC) {
            return Err(damaged("its first bytes are not those of a qcow2 image"));
        }
        let version = fields.u32(4).ok_or_else(short)?;
        if !(2..=3).contains(&version) {
            return Err(Refusal::Unsupported(format!(
                "it has qcow version {version}; versions 2 and 3 can be read"
            )));
        }
        let cluster_bits = fields.u32(20).ok_or_else(short)?;
        if !(9..=21).contains(&cluster_bits) {
            return Err(damaged("its cluster size is invalid"));
        }
        // Checked before everything else that can be wrong in an encrypted image.
        if fields.u32(32).ok_or_else(short)? != 0 {
            return Err(Refusal::Encrypted);
        }
        let (features, header_bytes) = if version == 2 {
            (0, 72)
        } else {
            (fields.u64(72).ok_or_else(short)?, fields.u32(100).ok_or_else(short)?)
        };
        check_features(features)?;
        let (compression, extended_l2) = features_of(&fields, features, header_bytes)?;
        let backing = fields.backing()?;
        let backing_format = fields.backing_format(header_bytes, 1 << cluster_bits)?;
        let header = Self {
            version,
            size_bytes: fields.u64(24).ok_or_else(short)?,
            cluster_bits,
            l1_entries: u64::from(fields.u32(36).ok_or_else(short)?),
            l1_offset: fields.u64(40).ok_or_else(short)?,
            compression,
            extended_l2,
            backing,
            backing_format,
        };
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<(), Refusal> {
        let damaged = |why: String| Refusal::Damaged(why);
        if self.size_bytes == 0 {
            return Err(damaged("its disk has no bytes".into()));
        }
        if !self.size_bytes.is_multiple_of(512) {
            return Err(damaged(format!("its disk has {} bytes, not a multiple of 512", self.size_bytes)));
        }
        if self.size_bytes > crate::manifest::IMAGE_MAX_BYTES {
            let (size, most) = (self.size_bytes, crate::manifest::IMAGE_MAX_BYTES);
            return Err(Refusal::Unsupported(format!(
                "its disk has {size} bytes, and the maximum is {most}"
            )));
        }
        if self.extended_l2 && self.cluster_bits < 14 {
            return Err(damaged("its clusters are too small for extended L2 entries".into()));
        }
        let covered = self.cluster_bytes() * self.l2_entries();
        if self.l1_entries < self.size_bytes.div_ceil(covered) {
            return Err(damaged("its L1 table is too short for its size".into()));
        }
        if self.l1_entries * 8 > L1_MAX_BYTES {
            return Err(damaged("its L1 table is too long".into()));
        }
        if !self.l1_offset.is_multiple_of(self.cluster_bytes()) {
            return Err(damaged("its L1 table is not at the start of a cluster".into()));
        }
        Ok(())
    }
}

fn check_features(features: u64) -> Result<(), Refusal> {
    if features & INCOMPATIBLE_CORRUPT != 0 {
        return Err(Refusal::Damaged(
            "it is marked as corrupt; repair it first: qemu-img check -r all FILE".into(),
        ));
    }
    if features & INCOMPATIBLE_DATA_FILE != 0 {
        return Err(Refusal::Unsupported(
            "its data is in another file. First check which file that is (qemu-img info FILE, 'data file'): QEMU opens whatever \
             path the image contains, even a file of this host that did not come with the image"
                .into(),
        ));
    }
    let known = INCOMPATIBLE_DIRTY | INCOMPATIBLE_COMPRESSION | INCOMPATIBLE_EXTENDED_L2;
    // Dirty means that refcounts may be wrong, and a reader needs none.
    let unknown = features & !known;
    if unknown != 0 {
        return Err(Refusal::Unsupported(format!("it uses unknown features ({unknown:#x})")));
    }
    Ok(())
}

fn features_of(
    fields: &Fields<'_>,
    features: u64,
    header_bytes: u32,
) -> Result<(Compression, bool), Refusal> {
    let compression = if features & INCOMPATIBLE_COMPRESSION == 0 {
        Compression::Deflate
    } else {
        match (header_bytes > 104).then(|| fields.0.get(104).copied()).flatten() {
            Some(0) => Compression::Deflate,
            Some(1) => Compression::Zstd,
            Some(other) => {
                return Err(Refusal::Unsupported(format!("its compression type {other} is unknown")));
            }
            None => return Err(Refusal::Unsupported("its header names no compression type".into())),
        }
    };
    Ok((compression, features & INCOMPATIBLE_EXTENDED_L2 != 0))
}

/// Big-endian numbers at offsets.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn u32(&self, at: usize) -> Option<u32> {
        self.0.get(at..)?.first_chunk().map(|bytes| u32::from_be_bytes(*bytes))
    }

    fn u64(&self, at: usize) -> Option<u64> {
        self.0.get(at..)?.first_chunk().map(|bytes| u64::from_be_bytes(*bytes))
    }

    fn text(&self, offset: u64, len: u32) -> Result<String, Refusal> {
        let end = offset.saturating_add(u64::from(len));
        let bytes = self.0.get(usize_of(offset)..usize_of(end));
        let bytes = bytes.ok_or_else(|| Refusal::Damaged("it ends inside its header".into()))?;
        let text = std::str::from_utf8(bytes).ok().filter(|text| !text.contains('\0'));
        text.map(str::to_owned)
            .ok_or_else(|| Refusal::Damaged("its header has a name that is not UTF-8 text".into()))
    }

    fn backing(&self) -> Result<Option<String>, Refusal> {
        match (self.u64(8), self.u32(16)) {
            (Some(0), _) | (_, Some(0)) => Ok(None),
            (Some(offset), Some(len @ 1..=1023)) => self.text(offset, len).map(Some),
            _ => Err(Refusal::Damaged("the name of its backing file is too long".into())),
        }
    }

    /// Extensions are between the header and the name of the backing file, or the end of the first cluster.
    /// An image of version 2 may have no space for extensions, and then has no end mark either.
    fn backing_format(&self, header_bytes: u32, cluster_bytes: u64) -> Result<Option<String>, Refusal> {
        let end = self.u64(8).filter(|offset| *offset != 0).unwrap_or(cluster_bytes);
        let mut at = usize_of_u32(header_bytes);
        while u64_of(at) < end {
            let (Some(kind), Some(len)) = (self.u32(at), self.u32(at.saturating_add(4))) else {
                return Err(Refusal::Damaged("it ends inside its header".into()));
            };
            match kind {
                0 => return Ok(None),
                BACKING_FORMAT => return self.text(u64_of(at.saturating_add(8)), len).map(Some),
                _ => {}
            }
            at = usize_of_u32(len).saturating_add(8).saturating_add(at).next_multiple_of(8);
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A version 2 image that consists of a header and `after`.
    fn version_2(backing_offset: u64, backing_bytes: u32, after: &[u8]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&2_u32.to_be_bytes());
        bytes.extend_from_slice(&backing_offset.to_be_bytes());
        bytes.extend_from_slice(&backing_bytes.to_be_bytes());
        bytes.extend_from_slice(&16_u32.to_be_bytes());
        bytes.extend_from_slice(&(1_u64 << 20).to_be_bytes());
        bytes.extend_from_slice(&0_u32.to_be_bytes());
        bytes.extend_from_slice(&1_u32.to_be_bytes());
        bytes.extend_from_slice(&0x30000_u64.to_be_bytes());
        bytes.extend_from_slice(&0x10000_u64.to_be_bytes());
        bytes.resize(72, 0);
        bytes.extend_from_slice(after);
        bytes.resize(1 << 16, 0);
        bytes
    }

    #[test]
    fn a_name_right_after_the_header_is_no_extension() {
        let header = Header::decode(&version_2(72, 9, b"/base.raw")).unwrap();
        assert_eq!((header.backing.as_deref(), header.backing_format), (Some("/base.raw"), None));
    }

    #[test]
    fn the_format_of_the_backing_file_is_read_if_present() {
        let mut after = BACKING_FORMAT.to_be_bytes().to_vec();
        after.extend_from_slice(&3_u32.to_be_bytes());
        after.extend_from_slice(b"raw\0\0\0\0\0/base.img");
        let header = Header::decode(&version_2(88, 9, &after)).unwrap();
        assert_eq!(header.backing_format.as_deref(), Some("raw"));
        assert_eq!(header.backing.as_deref(), Some("/base.img"));
    }
}
