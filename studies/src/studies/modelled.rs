//! The parts of a report that all studies of the desktop model share.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_report::number::grouped;
use headwater_report::page::{Column, Page};

use crate::desktop::Profile;
use crate::model::Model;
use crate::run::{self, is_quiet};

/// What a run was, as far as its report warns of it.
pub struct Run<'a> {
    /// The warning of a quick run, if it is one.
    pub quick: Option<&'a str>,
    /// Whether the user ended it early.
    pub interrupted: bool,
    /// Why it ended early, if it failed.
    pub failure: Option<&'a str>,
    /// The largest delay of a request in the model's time.
    pub late_us: u64,
    /// The time between two looks at the counters.
    pub interval_us: u64,
    /// IOPS of the disk alone, before and after.
    pub probes_iops: &'a [f64],
}

impl Run<'_> {
    /// The warnings, in order.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings: Vec<String> = self.quick.map(str::to_owned).into_iter().collect();
        if let Some(failure) = self.failure {
            warnings.push(format!("The study failed: {failure}. The report has what was measured before."));
        } else if self.interrupted {
            warnings.push("The study was interrupted. The report has what was measured before.".into());
        }
        if self.late_us > self.interval_us {
            warnings.push(format!(
                "Unquiet machine: requests were sent up to {:.0} s of the model's time late.",
                self.late_us as f64 / 1e6
            ));
        }
        warnings.extend(unquiet(self.probes_iops));
        warnings
    }
}

/// The warning if the disk alone was not as fast after a run as before.
pub fn unquiet(probes_iops: &[f64]) -> Option<String> {
    let probes: Vec<String> = probes_iops.iter().copied().map(grouped).collect();
    (is_quiet(probes_iops) == Some(false)).then(|| {
        format!(
            "Unquiet machine: the disk alone did {} IOPS before and after, which differ by more than 15 %.",
            probes.join(" and ")
        )
    })
}

/// IOPS of the disk alone.
pub fn probe(dir: &Path, is_quick: bool, stop: &AtomicBool) -> Result<Option<f64>> {
    let (set_bytes, ms) = if is_quick { (8 << 20, 100) } else { (64 << 20, 3000) };
    run::probe(dir, set_bytes, Duration::from_millis(ms), 1, stop).context("cannot probe the disk")
}

/// The disk below, in a word.
pub fn storage(model: Option<Model>) -> String {
    model.map_or("real".into(), |model| model.to_string())
}

/// The probes for the facts of a run.
pub fn probes_fact(probes_iops: &[f64]) -> (String, String) {
    let probes: Vec<String> = probes_iops.iter().map(|iops| format!("{} IOPS", grouped(*iops))).collect();
    ("Disk alone, before and after".into(), probes.join(", "))
}

/// Adds the parameters of the model, and the machine and settings of the run: the end of each page.
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
    facts.push(("Speed".into(), format!("{speed} times that of the model")));
    facts.push(("Seed".into(), seed.to_string()));
    facts.push(("Program".into(), format!("headwater-study {}", env!("CARGO_PKG_VERSION"))));
    let rows: Vec<Vec<String>> = facts.into_iter().map(|(what, value)| vec![what, value]).collect();
    page.table("", &[Column::Text("What"), Column::Text("Value")], &rows);
}
