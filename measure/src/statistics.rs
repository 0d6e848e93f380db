//! Medians and ratios of a few samples.

/// The median: for an even count the mean of the two middle values, `None` for no value.
pub fn median(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        len if len % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// Minimum and maximum.
pub fn range(samples: &[f64]) -> Option<(f64, f64)> {
    let least = samples.iter().copied().min_by(f64::total_cmp)?;
    let greatest = samples.iter().copied().max_by(f64::total_cmp)?;
    Some((least, greatest))
}

/// `ours / theirs`; `None` if one of them is missing or `theirs` is zero.
pub fn ratio(ours: Option<f64>, theirs: Option<f64>) -> Option<f64> {
    let theirs = theirs.filter(|value| *value > 0.0)?;
    Some(ours? / theirs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_even_and_nothing() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median(&[7.0]), Some(7.0));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn one_outlier_does_not_move_the_median_but_shows_in_the_range() {
        let samples = [10.0, 11.0, 1000.0, 9.0, 10.5];
        assert_eq!(median(&samples), Some(10.5));
        assert_eq!(range(&samples), Some((9.0, 1000.0)));
    }

    #[test]
    fn a_ratio_needs_both_sides() {
        assert_eq!(ratio(Some(3.0), Some(2.0)), Some(1.5));
        assert_eq!(ratio(None, Some(2.0)), None);
        assert_eq!(ratio(Some(3.0), None), None);
        assert_eq!(ratio(Some(3.0), Some(0.0)), None);
    }
}
