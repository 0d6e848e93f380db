//! A small fuzzer without coverage: the same changed bytes each time, for a bounded test of what real fuzzers do for hours.

use crate::random::Rng;

/// Values that break arithmetic.
const ODD: [u64; 8] = [0, 1, 0x7f, 0xff, 1 << 31, u32::MAX as u64, 1 << 63, u64::MAX];

/// Calls `check` with `rounds` changed copies of `sample`: bytes flipped, cut, doubled, numbers made odd.
pub fn rounds(sample: &[u8], seed: u64, rounds: u32, check: impl Fn(&[u8])) {
    let mut rng = Rng::new(seed);
    for _ in 0..rounds {
        let mut bytes = sample.to_vec();
        for _ in 0..=rng.below(3) {
            change(&mut bytes, &mut rng);
        }
        check(&bytes);
    }
}

fn index(rng: &mut Rng, below: usize) -> usize {
    usize::try_from(rng.below(below.max(1) as u64)).unwrap_or(0)
}

fn change(bytes: &mut Vec<u8>, rng: &mut Rng) {
    let at = index(rng, bytes.len());
    match rng.below(6) {
        0 => bytes.truncate(at),
        1 => bytes.extend_from_slice(&ODD[index(rng, ODD.len())].to_le_bytes()),
        2 => {
            let end = at + index(rng, bytes.len() - at + 1);
            let piece = bytes[at..end].to_vec();
            bytes.splice(at..at, piece);
        }
        3 | 4 => {
            let number = ODD[index(rng, ODD.len())].to_le_bytes();
            let len = if rng.below(2) == 0 { 4 } else { 8 };
            for (byte, new) in bytes.iter_mut().skip(at).zip(&number[..len]) {
                *byte = *new;
            }
        }
        _ => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << rng.below(8);
            }
        }
    }
}
