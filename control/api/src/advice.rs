//! Advice on the sizes of write caches, from what they took in earlier runs. A run is the time from a start of a
//! machine to its end. The types of the answer to `headwater catalog advice`, and the formulas from bytes to sizes;
//! `control/service` evaluates the runs.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::machine::CacheSettings;

/// The runs that an advice needs: with a confidence of 95 %, the largest of so many peaks covers 95 % of all runs.
pub const RUNS_NEEDED: u64 = 59;

/// If more than this share of the runs had to wait for space, their peaks say little: they could have been higher.
pub const LIMITED_MAX: f64 = 0.2;

const MIB: u64 = 1 << 20;

/// Sizes are advised in steps of this.
const STEP_BYTES: u64 = 16 * MIB;

/// RAM with which a write cache spills nothing while so many bytes live in it. A cache spills ahead of need: as soon as more than 70 % of
/// the RAM that its index leaves is filled. A segment that is being filled and buffers take 16 MiB.
pub fn ram_without_spilling(live_bytes: u64) -> u64 {
    let filled = live_bytes.saturating_mul(10).div_ceil(7);
    let index = live_bytes / 500;
    filled.saturating_add(index).saturating_add(16 * MIB).next_multiple_of(STEP_BYTES)
}

/// Overflow disk that takes all of a write cache, a quarter more, and 64 MiB.
pub fn disk_for(live_bytes: u64) -> u64 {
    live_bytes.saturating_add(live_bytes / 4).saturating_add(64 * MIB).next_multiple_of(STEP_BYTES)
}

/// Sizes of a write cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AdvisedSizes {
    /// RAM with which nothing is spilled in 95 % of all runs, with a certainty of 95 %.
    pub ram_bytes: u64,
    /// Overflow disk that is enough for the same runs if nothing stays in RAM.
    pub disk_bytes: u64,
}

/// What the write caches of a host take together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostAdvice {
    /// Number of measurements since the daemon started: one every five minutes, at most those of a week.
    pub samples: u64,
    /// The most bytes that lived in all write caches at the same time, except in 1 % of the samples. Machines do not peak together, so that
    /// this is less than the sum of their peaks. Absent with fewer than 100 samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live_p99_bytes: Option<u64>,
    /// RAM with which nothing of that is spilled: a value for `serve --cache-ram`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram_bytes: Option<u64>,
    /// RAM that all write caches may use, as configured.
    pub configured_bytes: u64,
    /// Free bytes of the file system of the data directory.
    pub free_bytes: u64,
    /// Days until that is full, if it goes on as in the samples. Absent if the free space does not shrink, or not surely.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub days_to_full: Option<f64>,
    /// Lower bound of `days_to_full`, with a certainty of 95 %.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub days_to_full_at_least: Option<f64>,
}

/// How much RAM and disk the write caches of a catalog's machines need.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CatalogAdvice {
    /// The catalog.
    pub catalog: String,
    /// Runs from which the advice is computed: the newest 1,000 on this host.
    pub runs: u64,
    /// Runs that are needed for an advice.
    pub runs_needed: u64,
    /// Runs in which writes waited for space. They could have needed more.
    pub limited_runs: u64,
    /// The write cache of a machine that is made now.
    pub now: CacheSettings,
    /// The median over all runs of a run's peak of live bytes.
    pub live_median_bytes: u64,
    /// The highest peak of live bytes of all runs.
    pub live_max_bytes: u64,
    /// The share of all written bytes that never went to the overflow disk, with the limits of that time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram_share: Option<f64>,
    /// The advice. Absent if there are not enough runs, or if too many ran out of space.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advised: Option<AdvisedSizes>,
    /// The reason for the advice, or for its absence, in one sentence.
    pub reason: String,
    /// The host that the runs are of.
    pub host: HostAdvice,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_grow_with_what_lives_and_have_room() {
        let mut last = (0, 0);
        for live in (0..4000).map(|mib| mib * MIB) {
            let sizes = (ram_without_spilling(live), disk_for(live));
            assert!(sizes >= last && sizes.0 * 7 / 10 > live && sizes.1 > live, "{live}: {sizes:?}");
            last = sizes;
        }
        assert_eq!(ram_without_spilling(100 * MIB), 160 * MIB);
        assert_eq!(disk_for(100 * MIB), 192 * MIB);
        // Nonsense does not overflow.
        let _ = (ram_without_spilling(u64::MAX / 32), disk_for(u64::MAX / 4));
    }
}
