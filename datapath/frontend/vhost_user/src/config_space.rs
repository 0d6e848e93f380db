//! Features and configuration space (virtio 5.2.3 and 5.2.4): the description of the disk for the guest.

use headwater_block::{Geometry, MAX_REQUEST_BYTES};

use crate::queue::request::{RANGE_SECTORS, RANGES, SECTOR_BYTES};

/// Bits of the feature set.
pub(crate) mod feature {
    pub(crate) const SIZE_MAX: u64 = 1 << 1;
    pub(crate) const SEG_MAX: u64 = 1 << 2;
    pub(crate) const READ_ONLY: u64 = 1 << 5;
    pub(crate) const BLOCK_SIZE: u64 = 1 << 6;
    pub(crate) const FLUSH: u64 = 1 << 9;
    pub(crate) const TOPOLOGY: u64 = 1 << 10;
    pub(crate) const CONFIG_WCE: u64 = 1 << 11;
    pub(crate) const MULTI_QUEUE: u64 = 1 << 12;
    pub(crate) const DISCARD: u64 = 1 << 13;
    pub(crate) const WRITE_ZEROES: u64 = 1 << 14;
    pub(crate) const INDIRECT: u64 = 1 << 28;
    pub(crate) const EVENT_IDX: u64 = 1 << 29;
    pub(crate) const VHOST_USER_PROTOCOL: u64 = 1 << 30;
    pub(crate) const VERSION_1: u64 = 1 << 32;
}

/// Buffers of one request: a queue of 128 entries, the usual size, has this many besides header and status.
pub(crate) const SEGMENTS: u32 = 126;

/// Longest buffer, so that no request is longer than a device accepts.
pub(crate) const SEGMENT_BYTES: u32 = 256 << 10;

const _: () = assert!(SEGMENTS * SEGMENT_BYTES <= MAX_REQUEST_BYTES);

/// Offset of the write-back field, the only one that a guest may write.
pub(crate) const WRITE_BACK_OFFSET: u32 = 32;

/// Length of the space that has contents; the rest reads as zeroes.
const BYTES: usize = 60;

/// Most bytes that a front-end may ask for (vhost-user: `VHOST_USER_MAX_CONFIG_SIZE`).
pub(crate) const MOST_BYTES: u32 = 256;

/// The features that are offered.
pub(crate) fn features(geometry: &Geometry) -> u64 {
    let mut features = feature::SIZE_MAX
        | feature::SEG_MAX
        | feature::BLOCK_SIZE
        | feature::TOPOLOGY
        | feature::MULTI_QUEUE
        | feature::INDIRECT
        | feature::EVENT_IDX
        | feature::VHOST_USER_PROTOCOL
        | feature::VERSION_1;
    if geometry.volatile_cache {
        features |= feature::FLUSH | feature::CONFIG_WCE;
    }
    features | if geometry.read_only { feature::READ_ONLY } else { feature::DISCARD | feature::WRITE_ZEROES }
}

/// The space, little-endian.
pub(crate) fn bytes(geometry: &Geometry, queues: u16, write_back: bool) -> [u8; BYTES] {
    let logical = geometry.logical_block_bytes.max(1);
    let physical_in_logical = (geometry.physical_block_bytes / logical).max(1);
    let exponent = u8::try_from(physical_in_logical.ilog2()).unwrap_or(0);
    let alignment = geometry.physical_block_bytes.max(logical) / 512;
    let mut space = [0_u8; BYTES];
    let mut rest = &mut space[..];
    let mut put = |bytes: &[u8]| {
        if let Some((field, after)) = std::mem::take(&mut rest).split_at_mut_checked(bytes.len()) {
            field.copy_from_slice(bytes);
            rest = after;
        }
    };
    put(&(geometry.size_bytes / SECTOR_BYTES).to_le_bytes());
    put(&SEGMENT_BYTES.to_le_bytes());
    put(&SEGMENTS.to_le_bytes());
    // Cylinders, heads, sectors: not offered.
    put(&[0; 4]);
    put(&logical.to_le_bytes());
    put(&[exponent, 0]);
    put(&u16::try_from(physical_in_logical).unwrap_or(1).to_le_bytes());
    // No optimal size: every multiple of the smallest is as good.
    put(&0_u32.to_le_bytes());
    put(&[u8::from(write_back), 0]);
    put(&queues.to_le_bytes());
    if !geometry.read_only {
        put(&RANGE_SECTORS.to_le_bytes());
        put(&RANGES.to_le_bytes());
        put(&alignment.to_le_bytes());
        put(&RANGE_SECTORS.to_le_bytes());
        put(&RANGES.to_le_bytes());
        put(&[1, 0, 0, 0]);
    }
    space
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry() -> Geometry {
        Geometry {
            size_bytes: 1 << 30,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            read_only: false,
            volatile_cache: true,
        }
    }

    #[test]
    fn the_space_is_laid_out_as_the_specification_says() {
        let space = bytes(&geometry(), 7, true);
        let u32_at = |at: usize| u32::from_le_bytes(space[at..at + 4].try_into().unwrap());
        assert_eq!(u64::from_le_bytes(space[..8].try_into().unwrap()), (1 << 30) / 512);
        assert_eq!((u32_at(8), u32_at(12), u32_at(20)), (SEGMENT_BYTES, SEGMENTS, 512));
        assert_eq!((space[24], space[25], space[26], space[27], u32_at(28)), (3, 0, 8, 0, 0));
        assert_eq!((space[32], space[34], space[35]), (1, 7, 0));
        assert_eq!((u32_at(36), u32_at(40), u32_at(44)), (RANGE_SECTORS, RANGES, 8));
        assert_eq!((u32_at(48), u32_at(52), space[56]), (RANGE_SECTORS, RANGES, 1));
    }

    #[test]
    fn a_read_only_disk_offers_nothing_that_writes() {
        let geometry = Geometry { read_only: true, volatile_cache: false, ..geometry() };
        let offered = features(&geometry);
        assert_ne!(offered & feature::READ_ONLY, 0);
        assert_eq!(offered & (feature::DISCARD | feature::WRITE_ZEROES | feature::FLUSH), 0);
        assert!(bytes(&geometry, 1, false)[36..].iter().all(|b| *b == 0));
    }
}
