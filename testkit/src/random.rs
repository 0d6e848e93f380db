//! A small seeded generator, so that a failing test can be repeated from its seed.

/// A seeded generator (xoshiro256++, seeded by splitmix64). Not for keys.
#[derive(Clone, Debug)]
pub struct Rng {
    state: [u64; 4],
}

impl Rng {
    /// A generator; equal seeds give equal sequences.
    pub fn new(seed: u64) -> Self {
        let mut mix = seed;
        let mut next = || {
            mix = mix.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = mix;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        };
        Self { state: [next(), next(), next(), next()] }
    }

    /// An independent generator, for another thread or another purpose.
    pub fn fork(&mut self) -> Self {
        Self::new(self.next_u64())
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        let [s0, s1, s2, s3] = &mut self.state;
        let out = s0.wrapping_add(*s3).rotate_left(23).wrapping_add(*s0);
        let t = *s1 << 17;
        *s2 ^= *s0;
        *s3 ^= *s1;
        *s1 ^= *s2;
        *s0 ^= *s3;
        *s2 ^= t;
        *s3 = s3.rotate_left(45);
        out
    }

    /// A number in `0 .. limit`; 0 for a limit of 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        // The high half of a 128-bit product; the bias is below limit / 2^64.
        ((u128::from(self.next_u64()) * u128::from(limit)) >> 64) as u64
    }

    /// A number in `low ..= high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        assert!(low <= high, "between({low}, {high})");
        match (high - low).checked_add(1) {
            Some(count) => low + self.below(count),
            None => self.next_u64(),
        }
    }

    /// An index into a slice of `len` elements.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// True in `numerator` of `denominator` cases.
    pub fn chance(&mut self, numerator: u64, denominator: u64) -> bool {
        self.below(denominator) < numerator
    }

    /// Fills with incompressible bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next_u64().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }

    /// A buffer of incompressible bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.fill(&mut bytes);
        bytes
    }

    /// A buffer of random bytes, each repeated `run` times: it packs to little more than a fraction of
    /// 1/`run`.
    pub fn runs(&mut self, len: usize, run: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        for (place, byte) in bytes.chunks_mut(run).zip(self.bytes(len.div_ceil(run))) {
            place.fill(byte);
        }
        bytes
    }

    /// Puts a slice in random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.index(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_equal_seeds_give_equal_sequences() {
        let take = |seed| {
            let mut rng = Rng::new(seed);
            (0..64).map(|_| rng.next_u64()).collect::<Vec<_>>()
        };
        assert_eq!(take(7), take(7));
        assert_ne!(take(7), take(8));
    }

    #[test]
    fn bounds_hold_and_both_ends_occur() {
        let mut rng = Rng::new(1);
        let mut seen = [false; 4];
        for _ in 0..1000 {
            seen[rng.between(3, 6) as usize - 3] = true;
            assert!(rng.below(10) < 10);
        }
        assert_eq!(seen, [true; 4]);
        assert_eq!(rng.below(0), 0);
        rng.between(0, u64::MAX);
    }

    #[test]
    fn bits_are_balanced() {
        let mut rng = Rng::new(42);
        let ones: u32 = rng.bytes(1 << 16).iter().map(|b| b.count_ones()).sum();
        // 2^19 bits: 1 % off would be 14 standard deviations.
        assert!((259_000..265_300).contains(&ones), "{ones}");
    }
}
