//! What the studies that run the desktop model (`crate::desktop`) share: the measurement of the raw disk, and parts of the report.
//! A quick run (`--quick`) has small sizes, and only shows that the study runs.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_report::number::grouped;
use headwater_report::page::{Column, Page};

use crate::desktop::Profile;
use crate::model::Model;
use crate::run::{self, is_quiet};

/// The properties of a run that can cause a warning.
pub struct Run<'a> {
    /// The warning of a quick run, if it is one.
    pub quick: Option<&'a str>,
    /// Whether the user interrupted it.
    pub interrupted: bool,
    /// The error that ended it early, if any.
    pub failure: Option<&'a str>,
    /// How late the latest request was sent, in model time.
    pub late_us: u64,
    /// The interval between two samples of the counters, in model time.
    pub interval_us: u64,
    /// IOPS of the raw disk, before and after.
    pub probes_iops: &'a [f64],
}

impl Run<'_> {
    /// The warnings, in order.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings: Vec<String> = self.quick.map(str::to_owned).into_iter().collect();
        if let Some(failure) = self.failure {
            warnings.push(format!(
                "The study failed: {failure}. The report contains the measurements up to then."
            ));
        } else if self.interrupted {
            warnings
                .push("The study was interrupted. The report contains the measurements up to then.".into());
        }
        if self.late_us > self.interval_us {
            warnings.push(format!(
                "The host was not idle, or is too slow: requests were sent up to {:.0} s of model time too late.",
                self.late_us as f64 / 1e6
            ));
        }
        warnings.extend(unquiet(self.probes_iops));
        warnings
    }
}

/// The warning if the speed of the raw disk changed during a run.
pub fn unquiet(probes_iops: &[f64]) -> Option<String> {
    let probes: Vec<String> = probes_iops.iter().copied().map(grouped).collect();
    (is_quiet(probes_iops) == Some(false)).then(|| {
        format!(
            "The host was not idle: the raw disk reached {} IOPS before and after the study; the values differ by more than 15 %.",
            probes.join(" and ")
        )
    })
}

/// Measures IOPS of the raw disk.
pub fn probe(dir: &Path, is_quick: bool, stop: &AtomicBool) -> Result<Option<f64>> {
    let (set_bytes, ms) = if is_quick { (8 << 20, 100) } else { (64 << 20, 3000) };
    run::probe(dir, set_bytes, Duration::from_millis(ms), 1, stop).context("cannot measure the raw disk")
}

/// The storage below the caches, in a word.
pub fn storage(model: Option<Model>) -> String {
    model.map_or("real".into(), |model| model.to_string())
}

/// The measurements of the raw disk, as a fact of the report.
pub fn probes_fact(probes_iops: &[f64]) -> (String, String) {
    let probes: Vec<String> = probes_iops.iter().map(|iops| format!("{} IOPS", grouped(*iops))).collect();
    ("Raw disk, before and after".into(), probes.join(", "))
}

/// Adds the parameters of the model and the facts about host and run, which end each page.
pub fn add_model_and_machine(
    page: &mut Page,
    profile: &Profile,
    mut facts: Vec<(String, String)>,
    (speed, seed): (f64, u64),
) {
    page.heading("The desktop model");
    let head =
        [Column::Text("Parameter"), Column::Figure("Value"), Column::Text("Grade"), Column::Text("Source")];
    page.table("R: read in the source, D: derived, A: assumption", &head, &profile.rows());
    page.heading("Machine and run");
    facts.push(("Speed".into(), format!("model time runs {speed} times as fast as real time")));
    facts.push(("Seed".into(), seed.to_string()));
    facts.push(("Program".into(), format!("headwater-study {}", env!("CARGO_PKG_VERSION"))));
    let rows: Vec<Vec<String>> = facts.into_iter().map(|(what, value)| vec![what, value]).collect();
    page.table("", &[Column::Text("What"), Column::Text("Value")], &rows);
}
