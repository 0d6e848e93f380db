//! Properties of every file from which a persistent cache can be recovered; used by the fuzzers in `fuzz/`
//! and by a bounded test.
//!
//! A map is read twice: by [`crate::persist::format`], and by a second reader here that follows the tables of
//! `docs/format-cache.md`. The two must agree on what is valid, on what a crash lost, and on what is damage.

use std::io::Cursor;

use crate::overflow::encrypt::ENCRYPTED_SLOT_BYTES;
use crate::persist::format::{Encoder, HEADER_BYTES, Header, HeaderFault, NO_BLOCK, Part, Record, decode};
use crate::persist::scan::{Scan, ScanFault, Window, scan};

/// A check of bytes from a fuzzer or a test.
pub type Oracle = fn(&[u8]);

/// All checks, with their names and seed bytes.
pub fn targets() -> Vec<(&'static str, Oracle, Vec<Vec<u8>>)> {
    let mut map = header().encode().to_vec();
    let mut sequence = 7;
    for epoch in 1..4u64 {
        let mut encoder = Encoder::new(sequence);
        encoder.extent(3, epoch, 5, &[9, NO_BLOCK, 11]);
        encoder.ranges(false, &[(1, 2)]);
        encoder.ranges(true, &[(3, 4), (5, 6)]);
        let in_slot = Part { block: 12, sectors: 0xe0, slot: Some((3, epoch, 6)) };
        encoder.parts(&[in_slot, Part { block: 13, sectors: 0x1f, slot: None }]);
        encoder.commit(epoch, 99);
        let (records, next) = encoder.finish();
        map.extend(records);
        sequence = next;
    }
    let mut with_slots = Header { first_sequence: sequence, ..header() }.encode().to_vec();
    let mut encoder = Encoder::new(sequence);
    encoder.encrypted((3, 9), 6, &[12, NO_BLOCK], &[0x5a; 2 * ENCRYPTED_SLOT_BYTES]);
    encoder.commit(4, 99);
    with_slots.extend(encoder.finish().0);
    // Zeroes for later commits.
    with_slots.extend([0; 64]);
    vec![("cache_map", cache_map, vec![map, with_slots])]
}

fn header() -> Header {
    let size_bytes = 1 << 30;
    Header { size_bytes, base_id: [0xab; 32], key_check: [0xcd; 16], first_sequence: 7 }
}

/// The little-endian number of `len` bytes at `at`.
fn number(bytes: &[u8], at: usize, len: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(len)?)?;
    Some(field.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

/// Block, sectors, and position, generation and slot.
type PlainPart = (u64, u64, Option<[u64; 3]>);

/// A record, read by the document's tables.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Plain {
    Extent(u64, u64, u64, Vec<u64>),
    Sealed(u64, u64, u64, Vec<u64>, Vec<u8>),
    Absent(Vec<u64>),
    Zero(Vec<u64>),
    Parts(Vec<PlainPart>),
    Commit(u64, u64),
}

/// The length of a record at `at`, by its kind and count.
fn length(bytes: &[u8], at: usize) -> Option<usize> {
    let count = usize::try_from(number(bytes, at + 6, 2)?).ok()?;
    match number(bytes, at + 4, 1)? {
        1 if count <= 512 => Some(16 + 16 + (count + count % 2) * 4),
        2 | 3 if count <= 1024 => Some(16 + count * 8),
        4 if count == 0 => Some(16 + 16),
        6 if count <= 256 => Some(16 + count * 24),
        5 if count <= 16 => Some(16 + 16 + (count + count % 2) * 4 + count * 4112),
        _ => None,
    }
}

/// The record at `at`, its sequence number and its length, if it is complete and undamaged.
fn plain(bytes: &[u8], at: usize) -> Option<(u64, Plain, usize)> {
    let len = length(bytes, at)?;
    let record = bytes.get(at..at + len)?;
    if number(record, 0, 4)? != u64::from(crc32c::crc32c(record.get(4..)?)) {
        return None;
    }
    let count = usize::try_from(number(record, 6, 2)?).ok()?;
    let words = |at: usize, count: usize| {
        (0..count).map(|n| number(record, at + 4 * n, 4)).collect::<Option<Vec<_>>>()
    };
    let found = match number(record, 4, 1)? {
        kind @ (1 | 5) => {
            let first_slot = number(record, 20, 2)?;
            if first_slot + number(record, 6, 2)? > 512 {
                return None;
            }
            let (position, generation) = (number(record, 16, 4)?, number(record, 24, 8)?);
            let blocks = words(32, count)?;
            if kind == 1 {
                Plain::Extent(position, generation, first_slot, blocks)
            } else {
                let slots = record.get(record.len() - count * 4112..)?.to_vec();
                Plain::Sealed(position, generation, first_slot, blocks, slots)
            }
        }
        2 => Plain::Absent(words(16, 2 * count)?),
        3 => Plain::Zero(words(16, 2 * count)?),
        6 => Plain::Parts(plain_parts(record, count)?),
        _ => Plain::Commit(number(record, 16, 8)?, number(record, 24, 8)?),
    };
    Some((number(record, 8, 8)?, found, len))
}

/// The parts of a record, if all of them are valid by the document.
fn plain_parts(record: &[u8], count: usize) -> Option<Vec<PlainPart>> {
    let part = |at: usize| {
        let field = |from: usize, len| number(record, at + from, len);
        let (block, sectors, kind) = (field(0, 4)?, field(18, 1)?, field(19, 1)?);
        let slot = [field(4, 4)?, field(8, 8)?, field(16, 2)?];
        let is_sound = match kind {
            0 => slot[2] < 512,
            1 => slot == [0; 3],
            _ => false,
        };
        let is_sound = is_sound && sectors != 0 && field(20, 4)? == 0;
        is_sound.then_some((block, sectors, (kind == 0).then_some(slot)))
    };
    (16..).step_by(24).take(count).map(part).collect()
}

fn as_plain(record: &Record<'_>) -> Plain {
    let words = |words: crate::persist::format::Words<'_>| words.iter().map(u64::from).collect::<Vec<_>>();
    match *record {
        Record::Extent { position, generation, first_slot, blocks } => {
            assert_eq!(blocks.len(), words(blocks).len());
            Plain::Extent(position.into(), generation, first_slot.into(), words(blocks))
        }
        Record::Encrypted { position, generation, first_slot, blocks, slots } => {
            Plain::Sealed(position.into(), generation, first_slot.into(), words(blocks), slots.to_vec())
        }
        Record::Absent(ranges) => {
            assert!(ranges.pairs().flat_map(|(first, count)| [first, count]).eq(ranges.iter()));
            Plain::Absent(words(ranges))
        }
        Record::Zero(ranges) => Plain::Zero(words(ranges)),
        Record::Parts(parts) => Plain::Parts(
            parts
                .iter()
                .map(|Part { block, sectors, slot }| {
                    let slot =
                        slot.map(|(position, generation, slot)| [position.into(), generation, slot.into()]);
                    (block.into(), sectors.into(), slot)
                })
                .collect(),
        ),
        Record::Commit { epoch, generation_limit } => Plain::Commit(epoch, generation_limit),
    }
}

/// The valid part of a map, by the document.
fn plain_scan(bytes: &[u8], first_sequence: u64) -> Result<Scan, ScanFault> {
    let (mut at, mut sequence) = (HEADER_BYTES, first_sequence);
    let mut last: Option<Scan> = None;
    while let Some((number, record, len)) = plain(bytes, at).filter(|(number, ..)| *number == sequence) {
        at += len;
        sequence = number.wrapping_add(1);
        if let Plain::Commit(epoch, generation_limit) = record {
            if last.is_some_and(|last| last.epoch.wrapping_add(1) != epoch) {
                return Err(ScanFault::Damaged(at as u64));
            }
            last = Some(Scan { end: at as u64, next_sequence: sequence, epoch, generation_limit });
        }
    }
    // A commit whose number is higher by more than one was begun after the one between them was durable.
    let epoch = last.map_or(0, |last| last.epoch);
    let starts = (0..bytes.len()).step_by(8).skip_while(|start| *start <= at);
    let is_later = |start: usize| matches!(plain(bytes, start), Some((number, Plain::Commit(later, _), _)) if number > sequence && later > epoch.saturating_add(1));
    if starts.into_iter().any(is_later) {
        return Err(ScanFault::Damaged(at as u64));
    }
    last.ok_or(ScanFault::NoCommit)
}

/// Corrects the checksums of the header and of the records after it, and the sequence numbers.
fn encrypt(bytes: &mut [u8]) {
    let Some(head) = bytes.get(..124).map(crc32c::crc32c) else { return };
    if let Some(place) = bytes.get_mut(124..128) {
        place.copy_from_slice(&head.to_le_bytes());
    }
    let (mut at, mut sequence) = (HEADER_BYTES, number(bytes, 72, 8).unwrap_or(0));
    while let Some(len) = length(bytes, at) {
        let Some(record) = bytes.get_mut(at..at + len) else { return };
        let (sum, rest) = record.split_at_mut(4);
        if let Some(place) = rest.get_mut(4..12) {
            place.copy_from_slice(&sequence.to_le_bytes());
        }
        sum.copy_from_slice(&crc32c::crc32c(rest).to_le_bytes());
        sequence = sequence.wrapping_add(1);
        at += len;
    }
}

/// Checks a map as it is, and with corrected checksums.
pub fn cache_map(bytes: &[u8]) {
    check(bytes);
    let mut encrypted = bytes.to_vec();
    encrypt(&mut encrypted);
    check(&encrypted);
}

fn check(bytes: &[u8]) {
    let expected = match bytes {
        _ if !bytes.starts_with(b"HWCACHE\n") => Err(HeaderFault::NotAMap),
        _ => match number(bytes, 8, 4).and_then(|version| u32::try_from(version).ok()) {
            None => Err(HeaderFault::NotAMap),
            Some(version) if version != 1 => Err(HeaderFault::Version(version)),
            Some(_) if bytes.len() < 124 => Err(HeaderFault::NotAMap),
            Some(_) => {
                let sum = bytes.get(..124).map(|head| u64::from(crc32c::crc32c(head)));
                if bytes.len() < HEADER_BYTES
                    || number(bytes, 124, 4) != sum
                    || number(bytes, 12, 4) != Some(128)
                {
                    Err(HeaderFault::Damaged)
                } else {
                    Ok((number(bytes, 16, 8), bytes.get(24..56), bytes.get(56..72), number(bytes, 72, 8)))
                }
            }
        },
    };
    let decoded = Header::decode(bytes);
    let fields = decoded.as_ref().map(|header| {
        (
            Some(header.size_bytes),
            Some(&header.base_id[..]),
            Some(&header.key_check[..]),
            Some(header.first_sequence),
        )
    });
    assert_eq!(fields.map_err(|fault| *fault), expected);
    if let Ok(header) = &decoded {
        assert_eq!(Header::decode(&header.encode()).as_ref(), Ok(header));
    }

    let mut at = HEADER_BYTES;
    while let Some((sequence, record, next)) = decode(bytes, at) {
        let expected = plain(bytes, at);
        assert_eq!(Some((sequence, as_plain(&record), next - at)), expected);
        encoded_again(bytes.get(at..next).unwrap_or_default(), sequence, &record);
        at = next;
    }
    assert_eq!(plain(bytes, at), None);
    let first = decoded.map_or(0, |header| header.first_sequence);
    let scanned = Window::of_bytes(Cursor::new(bytes), 0).and_then(|mut map| scan(&mut map, first));
    assert_eq!(scanned.ok(), Some(plain_scan(bytes, first)));
}

/// A record is encoded to the same bytes from which it was decoded, except reserved ones.
fn encoded_again(bytes: &[u8], sequence: u64, record: &Record<'_>) {
    // Sequence numbers never reach their maximum.
    if sequence == u64::MAX {
        return;
    }
    let mut encoder = Encoder::new(sequence);
    let reserved = match record {
        Record::Extent { position, generation, first_slot, blocks } => {
            let blocks: Vec<u32> = blocks.iter().collect();
            encoder.extent(*position, *generation, *first_slot, &blocks);
            let end = 32 + blocks.len() * 4;
            vec![0..4, 5..6, 22..24, end..end + blocks.len() % 2 * 4]
        }
        Record::Encrypted { position, generation, first_slot, blocks, slots } => {
            let blocks: Vec<u32> = blocks.iter().collect();
            encoder.encrypted((*position, *generation), *first_slot, &blocks, slots);
            let end = 32 + blocks.len() * 4;
            vec![0..4, 5..6, 22..24, end..end + blocks.len() % 2 * 4]
        }
        Record::Absent(ranges) | Record::Zero(ranges) => {
            let ranges: Vec<(u32, u32)> = ranges.pairs().collect();
            if ranges.is_empty() {
                return;
            }
            encoder.ranges(matches!(record, Record::Zero(_)), &ranges);
            vec![0..4, 5..6]
        }
        Record::Parts(parts) => {
            let parts: Vec<Part> = parts.iter().collect();
            if parts.is_empty() {
                return;
            }
            encoder.parts(&parts);
            vec![0..4, 5..6]
        }
        Record::Commit { epoch, generation_limit } => {
            encoder.commit(*epoch, *generation_limit);
            vec![0..4, 5..6]
        }
    };
    let counts = |at: usize| !reserved.iter().any(|range: &std::ops::Range<usize>| range.contains(&at));
    let (again, _) = encoder.finish();
    assert_eq!(again.len(), bytes.len());
    let same = again.iter().zip(bytes).enumerate().all(|(at, (again, byte))| again == byte || !counts(at));
    assert!(same, "a record is encoded differently from what was decoded");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small version of the fuzzers' work.
    #[test]
    fn no_bytes_break_a_promise() {
        headwater_testkit::mutate::all(targets());
    }
}
