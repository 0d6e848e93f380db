//! The parts of a report that all studies of the desktop model share.

use headwater_report::page::{Column, Page};

use crate::desktop::Profile;

/// What a run was, as far as its report warns of it.
pub struct Run<'a> {
    /// The warning of a quick run, if it is one.
    pub quick: Option<&'a str>,
    /// Whether the user ended it early.
    pub interrupted: bool,
    /// The largest delay of a request in the model's time.
    pub late_us: u64,
    /// The time between two looks at the counters.
    pub interval_us: u64,
}

impl Run<'_> {
    /// The warnings, in order.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings: Vec<String> = self.quick.map(str::to_owned).into_iter().collect();
        if self.interrupted {
            warnings.push("The study was interrupted. The report has what was measured before.".into());
        }
        if self.late_us > self.interval_us {
            warnings.push(format!(
                "Unquiet machine: requests were sent up to {:.0} s of the model's time late.",
                self.late_us as f64 / 1e6
            ));
        }
        warnings
    }
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
