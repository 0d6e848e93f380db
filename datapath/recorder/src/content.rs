//! The content class of a write. A recording stores only this class and never the data.

use std::cell::RefCell;

use headwater_block::BLOCK_BYTES;
use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};

const BLOCK: usize = BLOCK_BYTES as usize;

/// The most blocks of one request that are compressed as a sample. They are spread over the request.
const SAMPLES: usize = 4;

/// The unit of a compressed size: one sixteenth of the block.
pub const PARTS: u8 = 16;

/// The content class of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Content {
    /// Only zeroes.
    Zero,
    /// The data compresses with LZ4, block by block, to this many sixteenths (1 to 16) of its size.
    Packs(u8),
    /// The image has equal bytes in the same place.
    Equal,
    /// Not known.
    Unknown,
}

impl Content {
    /// The byte in a record.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Zero => 0,
            Self::Packs(parts) => parts.clamp(1, PARTS),
            Self::Equal => 17,
            Self::Unknown => 255,
        }
    }

    /// The class of a byte in a record.
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::Zero),
            1..=PARTS => Some(Self::Packs(code)),
            17 => Some(Self::Equal),
            255 => Some(Self::Unknown),
            _ => None,
        }
    }

    /// The class of `data`, without a comparison with the image: never `Equal`.
    pub fn of(data: &[u8]) -> Self {
        if data.iter().all(|byte| *byte == 0) {
            return Self::Zero;
        }
        let blocks = data.len().div_ceil(BLOCK);
        let step = blocks.div_ceil(SAMPLES).max(1);
        let (mut packed, mut whole) = (0, 0);
        for block in data.chunks(BLOCK).step_by(step) {
            whole += block.len();
            packed += packed_bytes(block).min(block.len());
        }
        let parts = (packed * usize::from(PARTS)).div_ceil(whole.max(1));
        Self::Packs(u8::try_from(parts).unwrap_or(PARTS).clamp(1, PARTS))
    }
}

thread_local! {
    /// The LZ4 hash table and the output buffer.
    static PACKER: RefCell<(CompressTable, Vec<u8>)> =
        RefCell::new((CompressTable::small(), vec![0; get_maximum_output_size(BLOCK)]));
}

fn packed_bytes(block: &[u8]) -> usize {
    PACKER
        .with_borrow_mut(|(table, into)| compress_into_with_table(block, into, table).unwrap_or(block.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_have_the_class_of_what_packing_makes_of_them() {
        let mut rng = headwater_testkit::Rng::new(1);
        assert_eq!(Content::of(&[0; 8192]), Content::Zero);
        assert_eq!(Content::of(&rng.bytes(65_536)), Content::Packs(16));
        assert_eq!(Content::of(&[7; 4096]), Content::Packs(1));
        // Half of each block is random.
        let half: Vec<u8> =
            (0..16).flat_map(|_| [rng.bytes(BLOCK / 2), vec![7; BLOCK / 2]].concat()).collect();
        assert!(matches!(Content::of(&half), Content::Packs(8 | 9)), "{:?}", Content::of(&half));
        assert_eq!(Content::of(&rng.bytes(512)), Content::Packs(16));
    }

    #[test]
    fn every_class_comes_back_from_its_byte() {
        let classes =
            (1..=PARTS).map(Content::Packs).chain([Content::Zero, Content::Equal, Content::Unknown]);
        for class in classes {
            assert_eq!(Content::from_code(class.code()), Some(class));
        }
        assert_eq!(Content::from_code(99), None);
    }
}
