//! Computes medians, and their confidence intervals by bootstrap.

/// Number of bootstrap resamples for one interval.
const RESAMPLES: usize = 2000;

/// A median and its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The median of the samples.
    pub median: f64,
    /// Lower and upper end of the percentile bootstrap interval.
    pub interval: (f64, f64),
}

/// The median; `None` without samples.
pub fn median(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        len if len % 2 == 1 => sorted.get(middle).copied(),
        _ => Some(f64::midpoint(*sorted.get(middle - 1)?, *sorted.get(middle)?)),
    }
}

/// The median with its interval, from medians of samples drawn with replacement. Equal seeds give equal intervals.
pub fn estimate(samples: &[f64], seed: u64) -> Option<Estimate> {
    let mut draws = Draws(seed);
    let medians = (0..RESAMPLES).filter_map(|_| median(&draws.of(samples))).collect();
    Some(Estimate { median: median(samples)?, interval: interval(medians)? })
}

/// The mean with its interval, by the same method as [`estimate`].
pub fn estimate_mean(samples: &[f64], seed: u64) -> Option<Estimate> {
    let mean =
        |samples: &[f64]| (!samples.is_empty()).then(|| samples.iter().sum::<f64>() / samples.len() as f64);
    let mut draws = Draws(seed);
    let means = (0..RESAMPLES).filter_map(|_| mean(&draws.of(samples))).collect();
    Some(Estimate { median: mean(samples)?, interval: interval(means)? })
}

/// The ratio of the median of `ours` to the median of `theirs`, with its interval. The samples are not paired.
pub fn estimate_ratio(ours: &[f64], theirs: &[f64], seed: u64) -> Option<Estimate> {
    let ratio = |ours: &[f64], theirs: &[f64]| {
        let (ours, theirs) = (median(ours)?, median(theirs)?);
        (theirs > 0.0).then(|| ours / theirs)
    };
    let mut draws = Draws(seed);
    let ratios = (0..RESAMPLES).filter_map(|_| ratio(&draws.of(ours), &draws.of(theirs))).collect();
    Some(Estimate { median: ratio(ours, theirs)?, interval: interval(ratios)? })
}

/// The interval that contains 95 % of the values.
fn interval(mut values: Vec<f64>) -> Option<(f64, f64)> {
    values.sort_by(f64::total_cmp);
    let last = values.len().checked_sub(1)? as f64;
    let at = |share: f64| values.get((share * last).round() as usize).copied();
    Some((at(0.025)?, at(0.975)?))
}

/// Draws of samples with replacement.
struct Draws(u64);

impl Draws {
    fn of(&mut self, samples: &[f64]) -> Vec<f64> {
        let drawn = (0..samples.len()).filter_map(|_| {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            samples.get((mixed(self.0) % samples.len() as u64) as usize).copied()
        });
        drawn.collect()
    }
}

/// The last step of splitmix64.
fn mixed(state: u64) -> u64 {
    let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// `ours / theirs` for each round that has both. Ratios are paired, because disturbances affect all measurements of a
/// round.
pub fn paired_ratios(ours: &[(usize, f64)], theirs: &[(usize, f64)]) -> Vec<f64> {
    ours.iter()
        .filter_map(|(round, value)| {
            let (_, other) = theirs.iter().find(|(other, value)| other == round && *value > 0.0)?;
            Some(value / other)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_contains_the_median_and_narrows_with_samples() {
        let few: Vec<f64> = (0..5).map(f64::from).collect();
        let many: Vec<f64> = (0..500).map(|n| f64::from(n % 5)).collect();
        let (few, many) = (estimate(&few, 1).unwrap(), estimate(&many, 1).unwrap());
        assert_eq!((few.median, many.median), (2.0, 2.0));
        assert!(few.interval.0 <= 2.0 && few.interval.1 >= 2.0);
        assert!(many.interval.1 - many.interval.0 < few.interval.1 - few.interval.0);
        assert_eq!(estimate(&[], 1), None);
        let one = estimate(&[7.0], 1).unwrap();
        assert_eq!(one.interval, (7.0, 7.0));
    }

    #[test]
    fn means_and_ratios_have_intervals_that_hold_them() {
        let samples: Vec<f64> = (0..40).map(|n| f64::from(n % 8)).collect();
        let mean = estimate_mean(&samples, 1).unwrap();
        assert_eq!(mean.median, 3.5);
        assert!(
            mean.interval.0 > 2.5 && mean.interval.0 < 3.5 && mean.interval.1 > 3.5 && mean.interval.1 < 4.5
        );
        assert_eq!(estimate_mean(&[], 1), None);
        let twice: Vec<f64> = samples.iter().map(|sample| sample * 2.0).collect();
        let ratio = estimate_ratio(&twice, &samples, 1).unwrap();
        assert!(ratio.median == 2.0 && ratio.interval.0 < 2.0 && ratio.interval.1 > 2.0, "{ratio:?}");
        assert_eq!(estimate_ratio(&twice, &[0.0], 1), None);
    }

    #[test]
    fn ratios_pair_runs_of_one_round() {
        let ours = [(0, 10.0), (1, 20.0), (2, 30.0)];
        let theirs = [(2, 10.0), (0, 5.0), (1, 0.0)];
        assert_eq!(paired_ratios(&ours, &theirs), [2.0, 3.0]);
    }
}
