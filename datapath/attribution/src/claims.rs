//! Which changed sectors have an owner already: a bit for each of them.

use std::ops::Range;

use headwater_block::BLOCK_BYTES;

use crate::changed::{Changed, Held};

/// Owners have whole sectors: file systems have no smaller blocks.
const SECTOR_BYTES: u64 = 512;
const BLOCK_SECTORS: u64 = BLOCK_BYTES as u64 / SECTOR_BYTES;
const WORD_BITS: u64 = u64::BITS as u64;

/// The changed sectors that were claimed.
pub(crate) struct Claims<'a> {
    changed: &'a Changed,
    /// In the order of the changed blocks.
    words: Vec<u64>,
}

impl<'a> Claims<'a> {
    pub(crate) fn new(changed: &'a Changed) -> Self {
        let sectors = u64::from(changed.blocks()) * BLOCK_SECTORS;
        let words = usize::try_from(sectors.div_ceil(WORD_BITS)).unwrap_or(usize::MAX);
        Self { changed, words: vec![0; words] }
    }

    /// Claims what is changed of these bytes of the disk. Returns what nobody claimed before.
    pub(crate) fn claim(&mut self, bytes: Range<u64>) -> Held {
        let (start, end) = (bytes.start / SECTOR_BYTES, bytes.end / SECTOR_BYTES);
        let mut held = Held::default();
        let changed = self.changed;
        for run in changed.runs_after(start / BLOCK_SECTORS) {
            let first = u64::from(run.first) * BLOCK_SECTORS;
            if first >= end {
                break;
            }
            let from = start.max(first) - first;
            let to = end.min(run.end() * BLOCK_SECTORS).saturating_sub(first);
            let before = u64::from(run.before) * BLOCK_SECTORS;
            let sectors = self.set(before + from..before + to);
            held.add(run.place, sectors * SECTOR_BYTES);
        }
        held
    }

    /// Sets bits. Returns how many were not set before.
    fn set(&mut self, bits: Range<u64>) -> u64 {
        let (mut at, mut fresh) = (bits.start, 0);
        while at < bits.end {
            let (word, skip) = (at / WORD_BITS, at % WORD_BITS);
            let count = (WORD_BITS - skip).min(bits.end - at);
            let mask = u64::MAX >> (WORD_BITS - count) << skip;
            let word = usize::try_from(word).ok().and_then(|word| self.words.get_mut(word));
            let Some(word) = word else { return fresh };
            fresh += u64::from((mask & !*word).count_ones());
            *word |= mask;
            at += count;
        }
        fresh
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::changed::Place;

    #[test]
    fn a_sector_is_counted_once() {
        let mut changed = Changed::default();
        changed.add(10, 20, Place::Ram).unwrap();
        changed.add(100, 1000, Place::Packed).unwrap();
        changed.add(1100, 1, Place::Disk).unwrap();
        let mut claims = Claims::new(&changed);
        assert_eq!(claims.claim(0..10 * 4096), Held::default());
        let half = claims.claim(10 * 4096 + 512..10 * 4096 + 1536);
        assert_eq!(half, Held { ram_bytes: 1024, ..Held::default() });
        let rest = claims.claim(9 * 4096..200 * 4096);
        let expected = Held { ram_bytes: 20 * 4096 - 1024, packed_bytes: 100 * 4096, disk_bytes: 0 };
        assert_eq!(rest, expected);
        assert_eq!(claims.claim(9 * 4096..200 * 4096), Held::default());
        let end = claims.claim(0..u64::MAX);
        assert_eq!(end, Held { ram_bytes: 0, packed_bytes: 900 * 4096, disk_bytes: 4096 });
    }
}
