//! A segment of the chunk cache: a file of records, one after another. Numbers are little-endian.
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | 4 | `HWCK` |
//! | 4 | 4 | length of the chunk as it is stored |
//! | 8 | 32 | hash of the chunk, uncompressed |
//! | 40 | 8 | first 8 bytes of the BLAKE3 of the 40 bytes before |
//! | 48 | | the chunk as it is stored |

use std::fs::File;
use std::os::unix::fs::FileExt;

use headwater_store::{CHUNK_BYTES_MAX, Hash};

use crate::units::{u64_of, usize_of};

pub(super) const RECORD_HEADER_BYTES: usize = 48;
const MAGIC: [u8; 4] = *b"HWCK";
/// How many bytes are read at a time in the search for records.
const SEARCH_BYTES: usize = 256 << 10;

/// The header of a stored chunk.
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

/// The records of a segment of `len` bytes: hash, offset of the chunk, its stored length. Bytes that are not
/// a record are skipped. A failed write or a crash can leave such bytes between records, even between records
/// written at the same time. Contents of chunks are not checked here: the reader of a chunk compares its hash.
pub(crate) fn scan(file: &File, len: u64) -> Vec<(Hash, u64, u32)> {
    let mut found = Vec::new();
    let mut at = 0u64;
    let mut header = [0; RECORD_HEADER_BYTES];
    while at + u64_of(RECORD_HEADER_BYTES) < len && file.read_exact_at(&mut header, at).is_ok() {
        if let Some((hash, stored_bytes)) = record_at(&header, at, len) {
            let start = at + u64_of(RECORD_HEADER_BYTES);
            at = start + u64::from(stored_bytes);
            found.push((hash, start, stored_bytes));
        } else if let Some(next) = next_record(file, at + 1, len) {
            at = next;
        } else {
            break;
        }
    }
    found
}

/// The record that begins at `at` in a segment of `len` bytes, if there is a complete one.
fn record_at(header: &[u8; RECORD_HEADER_BYTES], at: u64, len: u64) -> Option<(Hash, u32)> {
    let end = |stored_bytes| at + u64_of(RECORD_HEADER_BYTES) + u64::from(stored_bytes);
    parse(header).filter(|(_, stored_bytes)| end(*stored_bytes) <= len)
}

/// The offset of the first record from `at` on.
fn next_record(file: &File, mut at: u64, len: u64) -> Option<u64> {
    let mut block = vec![0; SEARCH_BYTES];
    while at + u64_of(RECORD_HEADER_BYTES) < len {
        let size = usize_of((len - at).min(u64_of(SEARCH_BYTES)));
        let part = block.get_mut(..size)?;
        file.read_exact_at(part, at).ok()?;
        let mut headers = (at..).zip(part.windows(RECORD_HEADER_BYTES));
        let is_record = |(at, header): &(u64, &[u8])| {
            header.first_chunk().is_some_and(|header| record_at(header, *at, len).is_some())
        };
        if let Some((found, _)) = headers.find(is_record) {
            return Some(found);
        }
        // A record may begin in the last bytes.
        at += u64_of(size - (RECORD_HEADER_BYTES - 1));
    }
    None
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
