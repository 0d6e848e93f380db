//! Reads a map from its first record to its last, a piece at a time, because it may be as large as the
//! memory.

use std::io::{self, Read, Seek, SeekFrom};

use super::format::{HEADER_BYTES, MAX_RECORD_BYTES, Record, decode};

/// The most bytes of a map in memory.
const WINDOW_BYTES: usize = 1 << 20;

/// A map, read through a window that moves over it.
#[derive(Debug)]
pub struct Window<R> {
    map: R,
    len: u64,
    /// Offset of the bytes in memory.
    at: u64,
    bytes: Vec<u8>,
    most_bytes: usize,
}

impl<R: Read + Seek> Window<R> {
    /// A window over a whole map.
    pub fn new(map: R) -> io::Result<Self> {
        Self::of_bytes(map, WINDOW_BYTES)
    }

    /// With this many bytes in memory, or a record's if that is more.
    pub fn of_bytes(mut map: R, most_bytes: usize) -> io::Result<Self> {
        let len = map.seek(SeekFrom::End(0))?;
        Ok(Self { map, len, at: 0, bytes: Vec::new(), most_bytes: most_bytes.max(MAX_RECORD_BYTES) })
    }

    /// Length of the map in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the map has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes from `at` on: at least as many as the longest record has, except at the end of the map.
    pub fn from(&mut self, at: u64) -> io::Result<&[u8]> {
        let in_memory = self.at..=self.at + self.bytes.len() as u64;
        let end = self.len.min(at.saturating_add(MAX_RECORD_BYTES as u64));
        if !(in_memory.contains(&at) && in_memory.contains(&end)) {
            let at = at.min(self.len);
            self.bytes.clear();
            self.map.seek(SeekFrom::Start(at))?;
            (&mut self.map).take(self.most_bytes as u64).read_to_end(&mut self.bytes)?;
            self.at = at;
        }
        let skip = usize::try_from(at.saturating_sub(self.at)).unwrap_or(usize::MAX);
        Ok(self.bytes.get(skip..).unwrap_or_default())
    }

    /// Whether all bytes from `at` on are zero.
    pub fn is_zero_from(&mut self, mut at: u64) -> io::Result<bool> {
        while at < self.len {
            let bytes = self.from(at)?;
            if bytes.iter().any(|byte| *byte != 0) {
                return Ok(false);
            }
            at += bytes.len().max(1) as u64;
        }
        Ok(true)
    }

    /// The record at `at`: its sequence number, the record, and the offset of the next one. `None`: there is
    /// no complete and undamaged record.
    pub fn record(&mut self, at: u64) -> io::Result<Option<(u64, Record<'_>, u64)>> {
        let found = decode(self.from(at)?, 0);
        Ok(found.map(|(sequence, record, bytes)| (sequence, record, at + bytes as u64)))
    }
}

/// The result of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scan {
    /// Offset of the end of the last valid commit.
    pub end: u64,
    /// Sequence number of the next record.
    pub next_sequence: u64,
    /// Number of the last valid commit.
    pub epoch: u64,
    /// Its generation limit.
    pub generation_limit: u64,
}

/// Why a map cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScanFault {
    /// No commit is complete.
    NoCommit,
    /// The records at this offset are damaged, and later ones prove that they were complete once.
    Damaged(u64),
}

/// Scans the records after the header, up to the last valid commit.
///
/// Any bytes after it are of one commit that a crash left incomplete and that was never answered; they are
/// dropped. Only one commit can be lost like that, because the next is begun only when the last one is
/// durable. So a later commit proves damage, and the map is refused instead of being cut back to a state
/// before answered flushes.
///
/// The outer error: the map cannot be read.
pub fn scan<R: Read + Seek>(map: &mut Window<R>, first_sequence: u64) -> io::Result<Result<Scan, ScanFault>> {
    let mut found: Option<Scan> = None;
    let (mut at, mut sequence) = (HEADER_BYTES as u64, first_sequence);
    while let Some((number, record, next)) = map.record(at)? {
        if number != sequence {
            break;
        }
        (at, sequence) = (next, sequence.wrapping_add(1));
        if let Record::Commit { epoch, generation_limit } = record {
            if found.is_some_and(|last| epoch != last.epoch.wrapping_add(1)) {
                return Ok(Err(ScanFault::Damaged(at)));
            }
            found = Some(Scan { end: at, next_sequence: sequence, epoch, generation_limit });
        }
    }
    let last_epoch = found.map_or(0, |scan| scan.epoch);
    let limit = last_epoch.saturating_add(1);
    // Records begin at multiples of 8.
    let mut later = at.saturating_add(1).next_multiple_of(8);
    while later < map.len() {
        if let Some((number, Record::Commit { epoch, .. }, _)) = map.record(later)?
            && number > sequence
            && epoch > limit
        {
            return Ok(Err(ScanFault::Damaged(at)));
        }
        later += 8;
    }
    Ok(found.ok_or(ScanFault::NoCommit))
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use proptest::prelude::*;

    use super::super::format::{Encoder, Header, Part};
    use super::*;
    use crate::overflow::encrypt::ENCRYPTED_SLOT_BYTES;

    /// Scans through the smallest possible window.
    fn scanned(bytes: &[u8]) -> Result<Scan, ScanFault> {
        scan(&mut Window::of_bytes(Cursor::new(bytes), 0).unwrap(), 7).unwrap()
    }

    /// A map with three commits, and the offset of the end of each.
    fn map() -> (Vec<u8>, Vec<usize>) {
        let size_bytes = 1 << 30;
        let header = Header { size_bytes, base_id: [0xab; 32], key_check: [0xcd; 16], first_sequence: 7 };
        let mut bytes = header.encode().to_vec();
        let mut ends = Vec::new();
        let mut sequence = 7;
        for epoch in 1..=3u64 {
            let mut encoder = Encoder::new(sequence);
            encoder.extent(epoch as u32, epoch, 0, &[1, 2, 3, 4, 5]);
            encoder.ranges(true, &[(10, 20)]);
            encoder.parts(&[Part { block: 6, sectors: 3, slot: Some((epoch as u32, epoch, 5)) }]);
            encoder.commit(epoch, 100);
            let (more, next) = encoder.finish();
            bytes.extend(more);
            sequence = next;
            ends.push(bytes.len());
        }
        (bytes, ends)
    }

    #[test]
    fn a_map_cut_anywhere_is_recovered_to_the_last_commit_before() {
        let (bytes, ends) = map();
        for len in HEADER_BYTES..=bytes.len() {
            let whole = ends.iter().filter(|end| **end <= len).count();
            let found = scanned(&bytes[..len]);
            if whole == 0 {
                assert_eq!(found, Err(ScanFault::NoCommit));
            } else {
                let scan = found.unwrap();
                assert_eq!((scan.epoch, scan.end), (whole as u64, ends[whole - 1] as u64), "cut at {len}");
            }
        }
    }

    #[test]
    fn a_flipped_byte_is_refused_or_costs_the_last_commit_only() {
        let (bytes, ends) = map();
        for at in HEADER_BYTES..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x40;
            match scanned(&flipped) {
                Ok(scan) => assert!(at >= ends[1] && scan.epoch == 2, "byte {at}: {scan:?}"),
                Err(ScanFault::Damaged(place)) => {
                    assert!(at < ends[1] && place <= at as u64 + 1, "byte {at}")
                }
                Err(ScanFault::NoCommit) => panic!("byte {at}: two commits are complete"),
            }
        }
    }

    #[test]
    fn zeroes_behind_the_last_commit_are_nothing() {
        let (mut bytes, ends) = map();
        let whole = scanned(&bytes);
        bytes.resize(bytes.len() + 3000, 0);
        assert_eq!(scanned(&bytes), whole);
        // The last commit, of which a crash left a part, in the middle of the zeroes.
        bytes[ends[1]..ends[1] + 40].fill(0);
        let scan = scanned(&bytes).unwrap();
        assert_eq!((scan.epoch, scan.end), (2, ends[1] as u64));
        // A commit that was durable.
        bytes[ends[0]..ends[0] + 40].fill(0);
        assert_eq!(scanned(&bytes), Err(ScanFault::Damaged(ends[0] as u64)));
    }

    #[test]
    fn a_map_is_read_the_same_through_any_window() {
        let mut bytes = vec![0; HEADER_BYTES];
        let mut encoder = Encoder::new(7);
        for round in 0..40u32 {
            let ranges: Vec<(u32, u32)> = (0..round * 30).map(|n| (n * 3, 1)).collect();
            encoder.ranges(round % 2 == 0, &ranges);
            encoder.extent(round, 1, 0, &[round; 300]);
            encoder.encrypted((round, 1), 300, &[round; 2], &[7; 2 * ENCRYPTED_SLOT_BYTES]);
            encoder.commit(u64::from(round), 9);
        }
        let (records, next) = encoder.finish();
        bytes.extend(records);
        let whole = Scan { end: bytes.len() as u64, next_sequence: next, epoch: 39, generation_limit: 9 };
        for window in [0, 70_001, 100_000, 1 << 20] {
            let mut map = Window::of_bytes(Cursor::new(&bytes), window).unwrap();
            assert_eq!(scan(&mut map, 7).unwrap(), Ok(whole));
            assert!(!map.is_zero_from(whole.end - 32).unwrap() && map.is_zero_from(whole.end).unwrap());
            for at in [0, 5000, 70_001, bytes.len() - 9, bytes.len(), 3] {
                let seen = map.from(at as u64).unwrap();
                assert!(seen.len() >= MAX_RECORD_BYTES.min(bytes.len() - at));
                assert_eq!(seen, &bytes[at..at + seen.len()]);
            }
            assert!(map.bytes.len() <= window.max(MAX_RECORD_BYTES));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..4096)) {
            let _ = scanned(&bytes);
        }

        #[test]
        fn damage_never_adds_commits(
            places in proptest::collection::vec((0usize..10_000, any::<u8>()), 1..6),
        ) {
            let (mut bytes, ends) = map();
            let len = bytes.len();
            for (at, value) in places {
                bytes[HEADER_BYTES + at % (len - HEADER_BYTES)] = value;
            }
            if let Ok(scan) = scanned(&bytes) {
                prop_assert!(ends.contains(&(scan.end as usize)));
                prop_assert_eq!(ends[scan.epoch as usize - 1] as u64, scan.end);
            }
        }
    }
}
