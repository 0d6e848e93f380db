//! Percentiles, and how sure they are.

/// How sure a bound is.
const CERTAINTY: f64 = 0.95;

/// A percentile of values in order; 0 without values.
pub(super) fn percentile(sorted: &[u64], percent: usize) -> u64 {
    let at = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(at).copied().unwrap_or(0)
}

/// The least of these values that is, with a certainty of 95 %, at least the 95th percentile of where they come from. `None`: there are too
/// few of them.
///
/// So many values are below that percentile as a coin shows heads that does so in 95 of 100 throws. The value at `rank` (from 1) is at least
/// the percentile if fewer than `rank` values are below it.
pub(super) fn bound_of_p95(sorted: &[u64]) -> Option<u64> {
    const P: f64 = 0.95;
    let count = sorted.len();
    // The probability of no value below it, by logarithms: it is too small for a number.
    let mut log_term = count as f64 * (1.0_f64 - P).ln();
    let mut below = 0.0;
    for rank in 1..=count {
        below += log_term.exp();
        if below >= CERTAINTY {
            return sorted.get(rank - 1).copied();
        }
        log_term += ((count - rank + 1) as f64 / rank as f64).ln() + (P / (1.0 - P)).ln();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fifty_nine_values_are_the_fewest() {
        let values: Vec<u64> = (1..=59).collect();
        assert_eq!(bound_of_p95(&values[..58]), None);
        assert_eq!(bound_of_p95(&values), Some(59));
        assert_eq!(bound_of_p95(&[]), None);
        // Tables of order statistics: of 93 values the second largest will do, of 124 the third largest, of 1000 the 39th largest.
        for (count, from_top) in [(92, 1), (93, 2), (123, 2), (124, 3)] {
            let values: Vec<u64> = (1..=count).collect();
            assert_eq!(bound_of_p95(&values), Some(count + 1 - from_top), "{count}");
        }
    }

    #[test]
    fn a_bound_is_too_low_for_few_samples_of_a_hundred() {
        // Values from 0 to 999,999, of which 95 % are below 950,000.
        let mut seed = 40_u64;
        let mut next = || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % 1_000_000
        };
        let mut too_low = 0;
        for _ in 0..1000 {
            let mut values: Vec<u64> = (0..150).map(|_| next()).collect();
            values.sort_unstable();
            too_low += u32::from(bound_of_p95(&values).unwrap() < 950_000);
        }
        assert!((5..=60).contains(&too_low), "{too_low} of 1000");
    }

    #[test]
    fn a_percentile_is_one_of_the_values() {
        let values = [10, 20, 30, 40];
        let found = [0, 1, 25, 26, 50, 99, 100].map(|percent| percentile(&values, percent));
        assert_eq!(found, [10, 10, 10, 20, 20, 40, 40]);
        assert_eq!(percentile(&[], 50), 0);
    }
}
