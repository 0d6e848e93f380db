//! A segment of the chunk cache: records, one after another.
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | 4 | `HWCK` |
//! | 4 | 4 | length of the chunk as it is stored |
//! | 8 | 32 | hash of the chunk |
//! | 40 | 8 | first bytes of the BLAKE3 of the 40 before |
//! | 48 | | the chunk |

use std::fs::File;
use std::os::unix::fs::FileExt;

use headwater_store::{CHUNK_BYTES_MAX, Hash};

use crate::units::u64_of;

pub(super) const RECORD_HEADER_BYTES: usize = 48;
const MAGIC: [u8; 4] = *b"HWCK";

/// What goes in front of a stored chunk.
pub(super) fn record_header(hash: &Hash, stored_bytes: u32) -> [u8; RECORD_HEADER_BYTES] {
    let mut out = [0; RECORD_HEADER_BYTES];
    let parts = [&MAGIC[..], &stored_bytes.to_le_bytes(), &hash.0];
    for (to, from) in out.iter_mut().zip(parts.into_iter().flatten()) {
        *to = *from;
    }
    let sum = Hash::of(out.get(..40).unwrap_or_default()).0;
    for (to, from) in out.iter_mut().skip(40).zip(sum) {
        *to = from;
    }
    out
}

/// The hash and the stored length, if these bytes are the start of a record.
fn parse(header: &[u8; RECORD_HEADER_BYTES]) -> Option<(Hash, u32)> {
    let rest = header.strip_prefix(&MAGIC)?;
    let (len, rest) = rest.split_first_chunk::<4>()?;
    let hash = Hash(*rest.first_chunk::<32>()?);
    let len = u32::from_le_bytes(*len);
    let fits = (1..=CHUNK_BYTES_MAX).contains(&len);
    (fits && record_header(&hash, len) == *header).then_some((hash, len))
}

/// The records of a segment of `len` bytes: hash, where the chunk starts, its stored length. Ends at the first
/// place that is no record: a crash left it so, and what follows is not found again.
pub(crate) fn scan(file: &File, len: u64) -> Vec<(Hash, u64, u32)> {
    let mut found = Vec::new();
    let mut at = 0u64;
    let mut header = [0; RECORD_HEADER_BYTES];
    while at + u64_of(RECORD_HEADER_BYTES) < len && file.read_exact_at(&mut header, at).is_ok() {
        let Some((hash, stored_bytes)) = parse(&header) else { break };
        let start = at + u64_of(RECORD_HEADER_BYTES);
        at = start + u64::from(stored_bytes);
        if at > len {
            break;
        }
        found.push((hash, start, stored_bytes));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes() {
        let hash = Hash::of(b"chunk");
        let header = record_header(&hash, 513);
        assert_eq!(&header[..8], b"HWCK\x01\x02\0\0");
        assert_eq!(header[8..40], hash.0);
        assert_eq!(header[40..], Hash::of(&header[..40]).0[..8]);
        assert_eq!(parse(&header), Some((hash, 513)));
        for at in 0..RECORD_HEADER_BYTES {
            let mut bad = header;
            bad[at] ^= 1;
            assert_eq!(parse(&bad), None, "byte {at}");
        }
        assert_eq!(parse(&record_header(&hash, 0)), None);
        assert_eq!(parse(&[0; RECORD_HEADER_BYTES]), None);
    }
}
