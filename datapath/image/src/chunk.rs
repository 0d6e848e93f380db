//! Processes one chunk, a piece of an image of fixed length that is stored and checked as a whole: tests it
//! for zeroes, hashes, compresses and decompresses it. Also the header of data objects, which contain the
//! chunks. No I/O.

use std::cell::RefCell;

use headwater_store::Hash;

use crate::error::{ImageError, ImageErrorKind};

const OBJECT_MAGIC: [u8; 8] = *b"HWDATA\n\0";
const OBJECT_FORMAT: u32 = 1;

/// The start of every data object: magic, format version, chunk size.
pub(crate) fn object_header(chunk_bytes: u32) -> [u8; 16] {
    let mut out = [0; 16];
    let parts = [&OBJECT_MAGIC[..], &OBJECT_FORMAT.to_le_bytes(), &chunk_bytes.to_le_bytes()];
    for (to, from) in out.iter_mut().zip(parts.into_iter().flatten()) {
        *to = *from;
    }
    out
}

/// Why the start of a data object is invalid; `None` if it is valid.
pub(crate) fn header_fault(header: &[u8; 16], chunk_bytes: u32) -> Option<String> {
    if *header == object_header(chunk_bytes) {
        return None;
    }
    let format = header.strip_prefix(&OBJECT_MAGIC).and_then(|rest| rest.first_chunk());
    match format.map(|format| u32::from_le_bytes(*format)) {
        Some(later) if later > OBJECT_FORMAT => {
            Some(format!("it has format {later}; this release reads format {OBJECT_FORMAT}"))
        }
        _ => Some("its header is damaged".to_owned()),
    }
}

/// Whether all bytes are zero. Stops at the first 128 bytes that are not.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    let (groups, rest) = bytes.as_chunks::<128>();
    // A whole group is combined before the test, so that the compiler can use wide registers.
    groups.iter().all(|group| group.iter().fold(0, |all, byte| all | byte) == 0)
        && rest.iter().all(|byte| *byte == 0)
}

/// Compresses chunks one after another with one zstd context.
pub(crate) struct Packer(zstd::bulk::Compressor<'static>);

impl Packer {
    pub(crate) fn new(level: i32) -> Result<Self, ImageError> {
        zstd::bulk::Compressor::new(level)
            .map(Self)
            .map_err(|e| ImageError::from_os(format!("cannot set up compression at level {level}"), &e))
    }

    /// Compresses `chunk` into the start of `into`, which must be at least as long. Returns the compressed
    /// length. If that is the chunk's length, the chunk is stored uncompressed.
    pub(crate) fn pack(&mut self, chunk: &[u8], into: &mut [u8]) -> usize {
        let shorter = chunk.len().saturating_sub(1).min(into.len());
        let (target, _) = into.split_at_mut(shorter);
        // With a working context the only error is that the result would not be shorter.
        if let Ok(len) = self.0.compress_to_buffer(chunk, target) {
            return len;
        }
        if let Some(target) = into.get_mut(..chunk.len()) {
            target.copy_from_slice(chunk);
        }
        chunk.len()
    }
}

thread_local! {
    /// A zstd context takes about 160 KiB. Only a few long-lived threads decompress.
    static UNPACKER: RefCell<Option<zstd::bulk::Decompressor<'static>>> = const { RefCell::new(None) };
}

/// Decompresses a chunk and checks its hash. `into` has the size of a chunk.
pub(crate) fn unpack(stored: &[u8], into: &mut [u8], hash: &Hash) -> Result<(), ImageError> {
    let damaged = |why: &str| ImageError::new(ImageErrorKind::Damaged, why);
    if stored.len() == into.len() {
        into.copy_from_slice(stored);
    } else {
        let len = UNPACKER.with_borrow_mut(|context| {
            let context = match context {
                Some(context) => context,
                None => context.insert(
                    zstd::bulk::Decompressor::new()
                        .map_err(|e| ImageError::from_os("cannot set up decompression", &e))?,
                ),
            };
            context
                .decompress_to_buffer(stored, into)
                .map_err(|e| damaged(&format!("it cannot be decompressed ({e})")))
        })?;
        if len != into.len() {
            return Err(damaged("it is too short after decompression"));
        }
    }
    if Hash::of(into) != *hash {
        return Err(damaged("the hash of its bytes is not the one in the manifest"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn zero_detection_checks_every_byte() {
        for len in [0, 1, 127, 128, 129, 1000] {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes));
            for at in 0..len {
                bytes[at] = 1;
                assert!(!is_zero(&bytes), "byte {at} of {len}");
                bytes[at] = 0;
            }
        }
    }

    #[test]
    fn golden_object_header() {
        assert_eq!(&object_header(65_536), b"HWDATA\n\0\x01\0\0\0\0\0\x01\0");
        assert_eq!(header_fault(&object_header(65_536), 65_536), None);
        let later = *b"HWDATA\n\0\x02\0\0\0\0\0\x01\0";
        assert!(header_fault(&later, 65_536).unwrap().contains("it has format 2"));
        for other in [b"HWDATA\n\0\0\0\0\0\0\0\x01\0", b"HWDATA\0\0\x02\0\0\0\0\0\x01\0"] {
            assert!(header_fault(other, 65_536).unwrap().contains("damaged"));
        }
        assert!(header_fault(&object_header(4096), 65_536).unwrap().contains("damaged"));
    }

    proptest! {
        #[test]
        fn packing_round_trips_and_damage_is_noticed(
            seed in any::<u64>(), random in 0usize..4096, flip in 1u8.., at in any::<usize>(),
        ) {
            // From all random (stored uncompressed) to all equal.
            let mut state = seed | 1;
            let chunk: Vec<u8> = (0..4096).map(|i| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                if i < random { (state >> 56) as u8 } else { 7 }
            }).collect();
            let mut packed = vec![0; 4096];
            let len = Packer::new(3).unwrap().pack(&chunk, &mut packed);
            packed.truncate(len);
            let mut out = vec![0; 4096];
            unpack(&packed, &mut out, &Hash::of(&chunk)).unwrap();
            prop_assert_eq!(&out, &chunk);
            let at = at % len;
            packed[at] ^= flip;
            let unpacked = unpack(&packed, &mut out, &Hash::of(&chunk));
            // zstd ignores one bit, so changing it gives the right bytes. Any other change is an error.
            prop_assert!(unpacked.is_err() || out == chunk);
        }
    }
}
