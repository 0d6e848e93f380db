//! Requests of a block device as they are in guest memory (virtio 5.2.6): decoding without I/O.

use headwater_block::{ByteRange, IoErrorKind};

/// Unit of all offsets and lengths in the protocol, whatever the block size is.
pub(crate) const SECTOR_BYTES: u64 = 512;

/// Length of the identification string.
pub(crate) const ID_BYTES: usize = 20;

/// Most ranges in one discard or zero write.
pub(crate) const RANGES: u32 = 16;

/// Longest range of a discard or zero write, in sectors: 2 GiB.
pub(crate) const RANGE_SECTORS: u32 = 1 << 22;

/// One range of a discard or zero write in memory.
pub(crate) const RANGE_BYTES: usize = 16;

/// Flag of a range: its space may be freed.
const UNMAP: u32 = 1;

/// The last byte of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// `VIRTIO_BLK_S_OK`
    Ok,
    /// `VIRTIO_BLK_S_IOERR`
    IoError,
    /// `VIRTIO_BLK_S_UNSUPP`
    Unsupported,
}

impl Status {
    /// The byte.
    pub(crate) fn byte(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::IoError => 1,
            Self::Unsupported => 2,
        }
    }

    /// Converts device errors to statuses. The protocol distinguishes only "not supported".
    pub(crate) fn from_kind(kind: IoErrorKind) -> Self {
        match kind {
            IoErrorKind::Unsupported => Self::Unsupported,
            IoErrorKind::Invalid
            | IoErrorKind::ReadOnly
            | IoErrorKind::NoSpace
            | IoErrorKind::Corrupt
            | IoErrorKind::Device
            | IoErrorKind::Closed => Self::IoError,
        }
    }
}

/// The operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Read,
    Write,
    Flush,
    Id,
    Discard,
    WriteZeroes,
    Unknown(u32),
}

/// The first 16 bytes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) command: Command,
    /// Offset of a read or write in bytes; `None` if it exceeds 64 bits.
    pub(crate) offset: Option<u64>,
}

impl Header {
    pub(crate) const BYTES: usize = 16;

    pub(crate) fn decode(bytes: [u8; Self::BYTES]) -> Self {
        let [a, b, c, d, _, _, _, _, sector @ ..] = bytes;
        let command = match u32::from_le_bytes([a, b, c, d]) {
            0 => Command::Read,
            1 => Command::Write,
            4 => Command::Flush,
            8 => Command::Id,
            11 => Command::Discard,
            13 => Command::WriteZeroes,
            other => Command::Unknown(other),
        };
        Self { command, offset: u64::from_le_bytes(sector).checked_mul(SECTOR_BYTES) }
    }
}

/// One range of a discard or zero write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) range: ByteRange,
    pub(crate) may_unmap: bool,
}

/// Decodes the ranges of a discard or zero write; the error is the status and the reason.
pub(crate) fn decode_ranges(bytes: &[u8], command: Command) -> Result<Vec<Piece>, (Status, String)> {
    let (ranges, rest) = bytes.as_chunks::<RANGE_BYTES>();
    if ranges.is_empty() || !rest.is_empty() {
        let why = format!("its list has {} bytes, not one or more ranges of {RANGE_BYTES}", bytes.len());
        return Err((Status::IoError, why));
    }
    let mut pieces = Vec::with_capacity(ranges.len());
    for range in ranges {
        let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, flags @ ..] = *range;
        let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
        let sectors = u32::from_le_bytes([n0, n1, n2, n3]);
        let flags = u32::from_le_bytes(flags);
        // A discard frees space without the flag, which is reserved for it (virtio 5.2.6.2).
        let known = if command == Command::Discard { 0 } else { UNMAP };
        if flags & !known != 0 {
            return Err((Status::Unsupported, format!("a range has the unknown flags {flags:#x}")));
        }
        if sectors > RANGE_SECTORS {
            let why = format!("a range has {sectors} sectors, and at most {RANGE_SECTORS} are allowed");
            return Err((Status::IoError, why));
        }
        let range = sector
            .checked_mul(SECTOR_BYTES)
            .and_then(|offset| ByteRange::new(offset, u64::from(sectors).wrapping_mul(SECTOR_BYTES)))
            .ok_or_else(|| (Status::IoError, format!("a range at sector {sector} ends past 64 bits")))?;
        pieces.push(Piece { range, may_unmap: command == Command::Discard || flags & UNMAP != 0 });
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_decoded() {
        let mut bytes = [0; 16];
        bytes[0] = 13;
        bytes[8..].copy_from_slice(&3_u64.to_le_bytes());
        assert_eq!(Header::decode(bytes), Header { command: Command::WriteZeroes, offset: Some(1536) });
        bytes[8..].copy_from_slice(&u64::MAX.to_le_bytes());
        bytes[0] = 99;
        assert_eq!(Header::decode(bytes), Header { command: Command::Unknown(99), offset: None });
    }

    fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
        [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
    }

    #[test]
    fn ranges_are_decoded_and_bad_ones_refused() {
        let two = [range(8, 16, 1), range(0, 1, 0)].concat();
        let pieces = decode_ranges(&two, Command::WriteZeroes).unwrap();
        assert_eq!(pieces[0], Piece { range: ByteRange::new(4096, 8192).unwrap(), may_unmap: true });
        assert_eq!(pieces[1], Piece { range: ByteRange::new(0, 512).unwrap(), may_unmap: false });
        assert!(decode_ranges(&range(0, 1, 0), Command::Discard).unwrap()[0].may_unmap);
        let refused = |bytes: &[u8], command| decode_ranges(bytes, command).unwrap_err().0;
        assert_eq!(refused(&range(0, 1, 1), Command::Discard), Status::Unsupported);
        assert_eq!(refused(&range(0, 1, 2), Command::WriteZeroes), Status::Unsupported);
        assert_eq!(refused(&range(0, RANGE_SECTORS + 1, 0), Command::Discard), Status::IoError);
        assert_eq!(refused(&range(u64::MAX / 512, 8, 0), Command::Discard), Status::IoError);
        assert_eq!(refused(&range(u64::MAX, 8, 0), Command::Discard), Status::IoError);
        assert_eq!(refused(&two[1..], Command::Discard), Status::IoError);
        assert_eq!(refused(&[], Command::Discard), Status::IoError);
    }
}
