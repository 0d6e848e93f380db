//! A record of the table of files (MFT record), or a block of a directory (INDX block): its update sequence, and the
//! attributes of a file's record. The runs of clusters of an attribute are decoded elsewhere.
//!
//! The last two bytes of each 512 bytes (a stride) of such a record are a number that changes with each write. The bytes that
//! belong there are kept at the start of the record. A record that was written in part has different numbers and is refused.

use super::boot::STRIDE_BYTES;
use super::fields::{place_at, u8_at, u16_at, u32_at, u64_at};
use crate::units::usize_of;
use crate::{Fault, fault};

/// The types of attributes that are read.
pub(super) mod types {
    pub(in super::super) const STANDARD_INFORMATION: u32 = 0x10;
    pub(in super::super) const ATTRIBUTE_LIST: u32 = 0x20;
    pub(in super::super) const FILE_NAME: u32 = 0x30;
    pub(in super::super) const VOLUME_INFORMATION: u32 = 0x70;
    pub(in super::super) const DATA: u32 = 0x80;
    pub(in super::super) const INDEX_ROOT: u32 = 0x90;
    pub(in super::super) const INDEX_ALLOCATION: u32 = 0xa0;
    pub(in super::super) const BITMAP: u32 = 0xb0;
    pub(in super::super) const REPARSE_POINT: u32 = 0xc0;
}

/// The type that marks the end of the attributes.
const END: u32 = 0xffff_ffff;
const IN_USE: u16 = 1;
const DIRECTORY: u16 = 2;
/// The bits of an attribute's flags that say how it is compressed.
const COMPRESSED: u16 = 0x00ff;

/// Puts the bytes back in place that the update sequence replaced, and checks the magic number.
pub(super) fn fix_up(bytes: &mut [u8], magic: [u8; 4]) -> Result<(), Fault> {
    let wrong =
        || fault(format!("a record does not begin with the signature {}", String::from_utf8_lossy(&magic)));
    if !bytes.starts_with(&magic) {
        return Err(wrong());
    }
    let at = place_at(bytes, 4).ok_or_else(wrong)?;
    let count = place_at(bytes, 6).ok_or_else(wrong)?;
    // The sequence must not reach the last two bytes of the first stride, which are replaced themselves.
    let end = at.saturating_add(2 * count);
    let is_sound = (count.saturating_sub(1)) * STRIDE_BYTES == bytes.len()
        && count > 1
        && at % 2 == 0
        && at >= 8
        && end <= STRIDE_BYTES - 2;
    let sequence = bytes.get(at..end).filter(|_| is_sound).map(<[u8]>::to_vec);
    let sequence = sequence.ok_or_else(|| fault("a record has an invalid update sequence"))?;
    let (number, kept) = sequence.split_at_checked(2).ok_or_else(wrong)?;
    for (stride, kept) in bytes.chunks_exact_mut(STRIDE_BYTES).zip(kept.chunks_exact(2)) {
        let (_, mark) = stride.split_at_mut(STRIDE_BYTES - 2);
        if mark != number {
            return Err(fault("a record was written only partly"));
        }
        mark.copy_from_slice(kept);
    }
    Ok(())
}

/// A record's number, and its sequence number: how often the record was used before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Reference {
    pub(super) number: u64,
    pub(super) sequence: u16,
}

impl Reference {
    pub(super) fn of(value: u64) -> Self {
        let sequence = u16::try_from(value >> 48).unwrap_or(u16::MAX);
        Self { number: value & (u64::MAX >> 16), sequence }
    }

    /// Whether it means a record that has this number of uses. A reference with 0 means any.
    pub(super) fn fits(self, sequence: u16) -> bool {
        self.sequence == 0 || self.sequence == sequence
    }
}

/// A record of the table of files, fixed up.
pub(super) struct Record {
    bytes: Vec<u8>,
    attributes_at: usize,
    end: usize,
    pub(super) sequence: u16,
    pub(super) is_directory: bool,
    /// The record that this one continues.
    pub(super) base: Option<Reference>,
}

impl Record {
    /// A record from its bytes on the disk. `None`: nobody uses it.
    pub(super) fn of(mut bytes: Vec<u8>) -> Result<Option<Self>, Fault> {
        fix_up(&mut bytes, *b"FILE")?;
        let short = || fault("damaged NTFS: a record of its file table (MFT) is too short");
        let flags = u16_at(&bytes, 22).ok_or_else(short)?;
        if flags & IN_USE == 0 {
            return Ok(None);
        }
        let attributes_at = place_at(&bytes, 20).ok_or_else(short)?;
        let end = usize_of(u32_at(&bytes, 24).ok_or_else(short)?.into());
        if end > bytes.len() || attributes_at > end || attributes_at < 42 {
            return Err(fault("an MFT record has attributes past its end"));
        }
        let base = u64_at(&bytes, 32).ok_or_else(short)?;
        Ok(Some(Self {
            sequence: u16_at(&bytes, 16).ok_or_else(short)?,
            is_directory: flags & DIRECTORY != 0,
            base: (base != 0).then(|| Reference::of(base)),
            attributes_at,
            end,
            bytes,
        }))
    }

    pub(super) fn attributes(&self) -> Attributes<'_> {
        let used = self.bytes.get(self.attributes_at..self.end).unwrap_or_default();
        Attributes { rest: used, is_over: false }
    }
}

/// The attributes of a record, one after the other. An unsound one is a fault and the last.
pub(super) struct Attributes<'a> {
    rest: &'a [u8],
    is_over: bool,
}

impl<'a> Iterator for Attributes<'a> {
    type Item = Result<Attribute<'a>, Fault>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let kind = match u32_at(self.rest, 0) {
            Some(END) => {
                self.is_over = true;
                return None;
            }
            kind => kind.unwrap_or(0),
        };
        let len = u32_at(self.rest, 4).map_or(0, |len| usize_of(len.into()));
        let parted = self.rest.split_at_checked(len).filter(|_| kind != 0 && len >= 24);
        let attribute = parted.and_then(|(bytes, rest)| {
            self.rest = rest;
            Attribute::of(kind, bytes)
        });
        self.is_over = attribute.is_none();
        Some(attribute.ok_or_else(|| fault(format!("an MFT record has an invalid attribute ({kind:#x})"))))
    }
}

/// An attribute, or a part of one whose other parts are in other records.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attribute<'a> {
    pub(super) kind: u32,
    /// In UTF-16, little-endian. The contents of a file have no name.
    pub(super) name: &'a [u8],
    flags: u16,
    pub(super) value: Value<'a>,
}

/// An attribute's value, or its place.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value<'a> {
    /// In the record.
    Resident(&'a [u8]),
    /// In clusters (non-resident).
    Clusters(Clusters<'a>),
}

/// The clusters of an attribute's part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clusters<'a> {
    /// First and last cluster of the value (VCN) that `runs` describes.
    pub(super) first: u64,
    pub(super) last: u64,
    pub(super) runs: &'a [u8],
    /// Only in the first part: sizes of the whole value.
    pub(super) sizes: Option<Sizes>,
    /// The number of clusters that are compressed together (compression unit), as a power of two; 0: none.
    pub(super) unit_power: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) size_bytes: u64,
    /// How much of it was ever written: the rest reads as zeroes.
    pub(super) written_bytes: u64,
}

impl<'a> Attribute<'a> {
    fn of(kind: u32, bytes: &'a [u8]) -> Option<Self> {
        let name_bytes = 2 * usize::from(u8_at(bytes, 9)?);
        let name_at = place_at(bytes, 10)?;
        let name = if name_bytes == 0 { &[][..] } else { bytes.get(name_at..)?.get(..name_bytes)? };
        let value = if u8_at(bytes, 8)? == 0 {
            let len = usize_of(u32_at(bytes, 16)?.into());
            Value::Resident(bytes.get(place_at(bytes, 20)?..)?.get(..len)?)
        } else {
            let (first, last) = (u64_at(bytes, 16)?, u64_at(bytes, 24)?);
            let sizes = Sizes { size_bytes: u64_at(bytes, 48)?, written_bytes: u64_at(bytes, 56)? };
            Value::Clusters(Clusters {
                first,
                last,
                runs: bytes.get(place_at(bytes, 32)?..)?,
                sizes: (first == 0).then_some(sizes),
                unit_power: u8_at(bytes, 34)?,
            })
        };
        Some(Self { kind, name, flags: u16_at(bytes, 12)?, value })
    }

    pub(super) fn is_compressed(&self) -> bool {
        self.flags & COMPRESSED != 0
    }

    /// The value, if it is in the record.
    pub(super) fn resident(&self) -> Option<&'a [u8]> {
        match self.value {
            Value::Resident(value) => Some(value),
            Value::Clusters(_) => None,
        }
    }
}

/// Which of the names of a file a name is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NameKind {
    /// A short name that stands beside a long one.
    Short,
    /// Any other.
    Full,
}

/// A name of a file in a directory, as records of files and entries of directories have it.
#[derive(Clone, Copy, Debug)]
pub(super) struct FileName<'a> {
    pub(super) parent: Reference,
    pub(super) kind: NameKind,
    /// In UTF-16, little-endian.
    pub(super) name: &'a [u8],
}

impl<'a> FileName<'a> {
    pub(super) fn of(value: &'a [u8]) -> Option<Self> {
        let name_bytes = 2 * usize::from(u8_at(value, 64)?);
        Some(Self {
            parent: Reference::of(u64_at(value, 0)?),
            kind: if u8_at(value, 65)? == 2 { NameKind::Short } else { NameKind::Full },
            name: value.get(66..)?.get(..name_bytes).filter(|name| !name.is_empty())?,
        })
    }
}

/// Appends a name in UTF-16 as UTF-8. Half of a pair of surrogates is encoded alone, so that different names stay different;
/// a slash, which no name has, becomes U+FFFD.
pub(super) fn push_name(utf16: &[u8], into: &mut Vec<u8>) {
    let units =
        utf16.chunks_exact(2).map(|unit| unit.iter().rev().fold(0u16, |n, byte| n << 8 | u16::from(*byte)));
    for unit in char::decode_utf16(units) {
        match unit {
            Ok('/' | '\0') => into.extend_from_slice("\u{fffd}".as_bytes()),
            Ok(letter) => into.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes()),
            Err(half) => {
                let bits = half.unpaired_surrogate().to_be_bytes();
                let value = u16::from_be_bytes(bits);
                let low = |shift: u32| u8::try_from(value >> shift & 0x3f).unwrap_or(0);
                into.extend_from_slice(&[0xed, 0x80 | low(6), 0x80 | low(0)]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_differ_stay_different() {
        let utf8 = |units: &[u16]| {
            let bytes: Vec<u8> = units.iter().flat_map(|unit| unit.to_le_bytes()).collect();
            let mut out = Vec::new();
            push_name(&bytes, &mut out);
            out
        };
        let long: Vec<u16> = "a\u{fc}\u{20ac}\u{1f600}".encode_utf16().collect();
        assert_eq!(utf8(&long), "a\u{fc}\u{20ac}\u{1f600}".as_bytes());
        assert_eq!(utf8(&[0xd800]), [0xed, 0xa0, 0x80]);
        assert_eq!(utf8(&[0xdfff, 65]), [0xed, 0xbf, 0xbf, 65]);
        assert_eq!(utf8(&[47, 0]), "\u{fffd}\u{fffd}".as_bytes());
    }

    #[test]
    fn a_record_that_was_written_in_part_is_refused() {
        let mut bytes = vec![0; 1024];
        bytes[..8].copy_from_slice(&[b'F', b'I', b'L', b'E', 48, 0, 3, 0]);
        bytes[48..54].copy_from_slice(&[7, 0, 1, 2, 3, 4]);
        for end in [510, 1022] {
            bytes[end] = 7;
        }
        let mut sound = bytes.clone();
        fix_up(&mut sound, *b"FILE").unwrap();
        assert_eq!((&sound[510..512], &sound[1022..]), (&[1, 2][..], &[3, 4][..]));
        let mut partly = bytes.clone();
        partly[1022] = 6;
        assert!(fix_up(&mut partly, *b"FILE").unwrap_err().to_string().contains("written only partly"));
        for (at, value) in [(4, 0), (4, 49), (5, 3), (6, 2), (6, 4), (0, b'B')] {
            let mut bad = bytes.clone();
            bad[at] = value;
            assert!(fix_up(&mut bad, *b"FILE").is_err(), "{at}");
        }
    }
}
