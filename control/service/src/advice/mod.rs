//! Advice on the sizes of write caches: what runs took, and what all write caches of the host take together.
//!
//! ```text
//!   each second: counters of a machine that is on --> its peaks --its disk is closed--> a run in the database
//!   each SAMPLE_INTERVAL: sum of all machines, free space --> samples, in memory
//! ```
//! Peaks are taken here and not in the data path, so that they cost nothing there; a peak of less than a second can be missed. Machines that
//! run on without the daemon (`serve --keep-machines`) are measured from the start of the next daemon.

mod percentiles;
mod samples;

use headwater_api::advice::{LIMITED_MAX, RUNS_NEEDED, disk_for, ram_without_spilling};
use headwater_api::{AdvisedSizes, CatalogAdvice, HostAdvice};
use headwater_db::{CatalogRecord, DbError, RunRecord};

use crate::Service;
use crate::answer::problem;
use crate::lifecycle::Active;
use percentiles::{bound_of_p95, percentile};
pub(crate) use samples::AdviceState;

/// The advice from these runs.
fn advise(catalog: &CatalogRecord, runs: &[RunRecord], host: HostAdvice) -> CatalogAdvice {
    let count = u64::try_from(runs.len()).unwrap_or(u64::MAX);
    let limited = u64::try_from(runs.iter().filter(|run| run.is_limited).count()).unwrap_or(u64::MAX);
    let mut live: Vec<u64> = runs.iter().map(|run| run.live_peak_bytes).collect();
    live.sort_unstable();
    let (written, spilled) = runs.iter().fold((0_u64, 0_u64), |(written, spilled), run| {
        (written.saturating_add(run.written_bytes), spilled.saturating_add(run.spilled_bytes))
    });
    let is_limited = limited as f64 > LIMITED_MAX * count as f64;
    let bound = bound_of_p95(&live).filter(|_| !is_limited);
    let advised =
        bound.map(|live| AdvisedSizes { ram_bytes: ram_without_spilling(live), disk_bytes: disk_for(live) });
    let reason = match (&bound, is_limited) {
        (Some(_), _) => "95 % of all runs had less live data than these sizes hold".to_owned(),
        (None, true) if count > 0 => format!(
            "in {limited} of {count} runs writes waited for space, so their need is unknown: give the machines more RAM or disk first"
        ),
        (None, _) if count == 0 => {
            format!(
                "no runs on this host yet; advice needs {RUNS_NEEDED}; runs on other hosts are not counted"
            )
        }
        (None, _) => format!("not enough runs yet: {count} of {RUNS_NEEDED}"),
    };
    CatalogAdvice {
        catalog: catalog.name.clone(),
        runs: count,
        runs_needed: RUNS_NEEDED,
        limited_runs: limited,
        now: catalog.cache,
        live_median_bytes: percentile(&live, 50),
        live_max_bytes: live.last().copied().unwrap_or(0),
        ram_share: (written > 0).then(|| 1.0 - (spilled as f64 / written as f64).min(1.0)),
        advised,
        reason,
        host,
    }
}

impl Service {
    /// The advice on a catalog.
    pub(crate) async fn advice(&self, catalog: &CatalogRecord) -> Result<CatalogAdvice, DbError> {
        let runs = self.db().read().await?.runs().of_catalog(&catalog.name).await?;
        Ok(advise(catalog, &runs, self.host_advice()))
    }

    /// Records the run of a machine whose VM has ended, if the machine has a catalog. Saves it in the background, because the database may
    /// be unavailable.
    pub(crate) fn note_run(&self, active: &Active) {
        let Some(catalog) = active.catalog.clone() else { return };
        let (counters, peaks) = (active.counters(), active.peaks());
        let run = RunRecord {
            catalog,
            machine: active.name.clone(),
            began_at_ms: self.now_ms().saturating_sub(active.on_for_ms()),
            ended_at_ms: self.now_ms(),
            written_bytes: counters.written_bytes,
            spilled_bytes: counters.spilled_bytes,
            live_peak_bytes: peaks.live_bytes,
            ram_peak_bytes: peaks.ram_used_bytes,
            disk_peak_bytes: peaks.disk_used_bytes,
            is_limited: counters.pauses > 0,
        };
        let (service, under_way) = (self.clone(), self.begin_operation());
        tokio::spawn(async move {
            if let Err(error) = service.add_run(&run).await {
                tracing::warn!(machine = %run.machine, "cannot record the peak use of its write cache, so 'headwater catalog advice' will lack this run: {}", problem(&error));
            }
            drop(under_way);
        });
    }

    async fn add_run(&self, run: &RunRecord) -> Result<(), DbError> {
        let mut repo = self.db().write().await?;
        repo.runs().add(run).await?;
        repo.save().await
    }
}

#[cfg(test)]
mod tests {
    use headwater_api::platform::Platform;
    use headwater_api::{CacheSettings, DiskTransport, OnHostLoss};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn run(n: u64) -> RunRecord {
        RunRecord {
            catalog: "class".to_owned(),
            machine: "class-1".to_owned(),
            began_at_ms: 0,
            ended_at_ms: 1,
            written_bytes: 1000,
            spilled_bytes: 50,
            live_peak_bytes: n * MIB,
            ram_peak_bytes: 0,
            disk_peak_bytes: 0,
            is_limited: false,
        }
    }

    fn catalog() -> CatalogRecord {
        CatalogRecord {
            name: "class".to_owned(),
            image: "debian".to_owned(),
            pin: None,
            scheme: 1,
            cache: CacheSettings::default(),
            transport: DiskTransport::default(),
            memory_bytes: 0,
            cpus: 1,
            platform: Platform::default(),
            user_data: None,
            name_rule: "class-##".to_owned(),
            first_number: 1,
            keep_ready: 0,
            ready_hours: None,
            stop_idle_s: 0,
            seal_removes: Vec::new(),
            on_host_loss: OnHostLoss::default(),
            cloud: None,
            created_at_ms: 0,
        }
    }

    #[test]
    fn advice_needs_enough_runs_with_space() {
        let of = |runs: &[RunRecord]| advise(&catalog(), runs, HostAdvice::default());
        let mut runs: Vec<RunRecord> = (1..59).map(run).collect();
        let early = of(&runs);
        assert_eq!((early.advised, early.reason.as_str()), (None, "not enough runs yet: 58 of 59"));
        runs.push(run(200));
        let advice = of(&runs);
        let expected =
            AdvisedSizes { ram_bytes: ram_without_spilling(200 * MIB), disk_bytes: disk_for(200 * MIB) };
        assert_eq!(advice.advised, Some(expected));
        assert_eq!((advice.live_median_bytes, advice.live_max_bytes), (30 * MIB, 200 * MIB));
        assert_eq!(advice.ram_share, Some(0.95));
        runs.iter_mut().take(12).for_each(|run| run.is_limited = true);
        let limited = of(&runs);
        assert_eq!((limited.advised, limited.limited_runs), (None, 12));
        assert!(limited.reason.starts_with("in 12 of 59 runs writes waited"), "{}", limited.reason);
        assert_eq!(of(&[]).ram_share, None);
    }
}
