//! What all write caches of the host take together, and whether the disk fills.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use headwater_api::HostAdvice;
use headwater_api::advice::ram_without_spilling;

use super::percentiles::percentile;
use crate::Service;

/// How often a sample is taken.
const SAMPLE_INTERVAL_MS: u64 = 5 * 60_000;

/// The most samples: of a week.
const SAMPLES_MAX: usize = 7 * 24 * 12;

/// The fewest samples of which 1 % can be left out.
const SAMPLES_FOR_P99: usize = 100;

/// The fewest samples of a trend: of half a day.
const SAMPLES_FOR_TREND: usize = 144;

/// So many of them are compared with each other.
const COMPARED_MAX: usize = 200;

const DAY_MS: f64 = 86_400_000.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sample {
    at_ms: u64,
    live_bytes: u64,
    free_bytes: u64,
}

/// Samples of the host.
#[derive(Debug, Default)]
pub(crate) struct AdviceState(Mutex<VecDeque<Sample>>);

impl AdviceState {
    fn samples(&self) -> MutexGuard<'_, VecDeque<Sample>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_due(&self, now_ms: u64) -> bool {
        // A clock that was set back takes a sample, too.
        self.samples().back().is_none_or(|last| now_ms.abs_diff(last.at_ms) >= SAMPLE_INTERVAL_MS)
    }

    fn add(&self, sample: Sample) {
        let mut samples = self.samples();
        if samples.len() >= SAMPLES_MAX {
            samples.pop_front();
        }
        samples.push_back(sample);
    }
}

/// By how much values fall in a day: the middle of the slopes of all pairs (Theil and Sen), and the least that it is with a certainty of
/// 95 %. A wave or a single jump moves neither far.
fn falls_in_a_day(points: &[(u64, u64)]) -> Option<(f64, f64)> {
    let step = points.len().div_ceil(COMPARED_MAX).max(1);
    let points: Vec<(f64, f64)> = points.iter().step_by(step).map(|(x, y)| (*x as f64, *y as f64)).collect();
    let mut falls = Vec::new();
    for (number, (x, y)) in points.iter().enumerate() {
        let later = points.iter().skip(number + 1).filter(|(later, _)| later > x);
        falls.extend(later.map(|(later, end)| (y - end) / ((later - x) / DAY_MS)));
    }
    falls.sort_by(f64::total_cmp);
    let (pairs, count) = (falls.len() as f64, points.len() as f64);
    // The spread of the number of pairs that fall if there is no trend (Kendall), and 1.645 of it on one side.
    let spread = (count * (count - 1.0) * (2.0 * count + 5.0) / 18.0).sqrt();
    let rank = ((pairs - 1.645 * spread) / 2.0).floor();
    let at = |rank: f64| falls.iter().copied().enumerate().find(|(number, _)| *number as f64 >= rank);
    let (_, middle) = at((pairs / 2.0).floor())?;
    let (_, least) = at(rank.max(0.0)).filter(|_| rank >= 0.0)?;
    Some((middle, least))
}

/// The days until free space is gone, and the same at the earliest. `None`: it does not surely shrink.
fn days_to_full(points: &[(u64, u64)]) -> Option<(f64, f64)> {
    let free = points.last()?.1 as f64;
    let (middle, least) = falls_in_a_day(points)?;
    if points.len() < SAMPLES_FOR_TREND || least <= 0.0 {
        return None;
    }
    // As far above the middle as the least is below it.
    let most = 2.0 * middle - least;
    Some((free / middle, free / most))
}

impl Service {
    /// Takes a sample of the host, if it is time.
    pub(crate) fn sample_host(&self) {
        let now_ms = self.now_ms();
        if !self.advice_state().is_due(now_ms) {
            return;
        }
        let Ok(free_bytes) = crate::operations::get_status::free_bytes(self.data_dir()) else { return };
        let live_bytes = self.active_map().values().map(|active| active.counters().live_bytes).sum();
        self.advice_state().add(Sample { at_ms: now_ms, live_bytes, free_bytes });
    }

    /// The advice on the host.
    pub(super) fn host_advice(&self) -> HostAdvice {
        let samples: Vec<Sample> = self.advice_state().samples().iter().copied().collect();
        let configured_bytes = self.disks().host_ram().configured_bytes;
        let free_bytes = crate::operations::get_status::free_bytes(self.data_dir()).unwrap_or(0);
        of_samples(&samples, HostAdvice { configured_bytes, free_bytes, ..HostAdvice::default() })
    }
}

fn of_samples(samples: &[Sample], advice: HostAdvice) -> HostAdvice {
    let mut live: Vec<u64> = samples.iter().map(|sample| sample.live_bytes).collect();
    live.sort_unstable();
    let live_p99_bytes = (live.len() >= SAMPLES_FOR_P99).then(|| percentile(&live, 99));
    let free: Vec<(u64, u64)> = samples.iter().map(|sample| (sample.at_ms, sample.free_bytes)).collect();
    let days = days_to_full(&free);
    HostAdvice {
        samples: u64::try_from(samples.len()).unwrap_or(u64::MAX),
        live_p99_bytes,
        ram_bytes: live_p99_bytes.map(ram_without_spilling),
        days_to_full: days.map(|(days, _)| days),
        days_to_full_at_least: days.map(|(_, earliest)| earliest),
        ..advice
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// Free space each five minutes: so much less a day, and a wave or noise on top.
    fn points(count: u64, falls_in_a_day: f64, other: impl Fn(u64) -> f64) -> Vec<(u64, u64)> {
        let at = |n: u64| n * SAMPLE_INTERVAL_MS;
        let free = |n: u64| 500.0 * GIB as f64 - falls_in_a_day * at(n) as f64 / DAY_MS + other(n);
        (0..count).map(|n| (at(n), free(n) as u64)).collect()
    }

    #[test]
    fn a_disk_that_fills_steadily_is_full_when_it_is() {
        let noise = |n: u64| (n * 7919 % 1000) as f64 / 1000.0 * GIB as f64;
        let (days, earliest) = days_to_full(&points(2016, 10.0 * GIB as f64, noise)).unwrap();
        // 70 GiB went in a week: 430 are left.
        assert!((42.0..44.0).contains(&days) && earliest <= days && earliest > 41.0, "{days} {earliest}");
    }

    #[test]
    fn waves_and_jumps_are_no_trend() {
        let day = |n: u64| (n as f64 / 288.0 * std::f64::consts::TAU).cos() * 5.0 * GIB as f64;
        assert_eq!(days_to_full(&points(2016, 0.0, day)), None);
        let jump = |n: u64| if n > 1000 { -30.0 * GIB as f64 } else { 0.0 };
        let once = days_to_full(&points(2016, 0.0, jump));
        assert!(once.is_none_or(|(days, _)| days > 100.0), "{once:?}");
        assert_eq!(days_to_full(&points(2016, -10.0 * GIB as f64, |_| 0.0)), None);
        assert_eq!(days_to_full(&points(100, 10.0 * GIB as f64, |_| 0.0)), None);
        assert_eq!(days_to_full(&[]), None);
    }

    #[test]
    fn machines_that_peak_in_turn_need_less_than_the_sum_of_their_peaks() {
        let sample =
            |n: u64| Sample { at_ms: n, live_bytes: if n == 7 { 90 * GIB } else { 10 * GIB }, free_bytes: 1 };
        let samples: Vec<Sample> = (0..100).map(sample).collect();
        let advice = of_samples(&samples, HostAdvice::default());
        assert_eq!(advice.live_p99_bytes, Some(10 * GIB));
        assert_eq!(advice.ram_bytes, Some(ram_without_spilling(10 * GIB)));
        assert_eq!(of_samples(&samples[..99], HostAdvice::default()).live_p99_bytes, None);
    }

    #[test]
    fn samples_are_taken_each_five_minutes_for_a_week() {
        let state = AdviceState::default();
        let mut taken = 0;
        for minute in 0..8 * 24 * 60_u64 {
            let at_ms = minute * 60_000;
            if state.is_due(at_ms) {
                taken += 1;
                state.add(Sample { at_ms, live_bytes: 0, free_bytes: 0 });
            }
        }
        assert_eq!((taken, state.samples().len()), (8 * 24 * 12, SAMPLES_MAX));
    }
}
