//! Builds the report of a study that measures, which [`Files`] writes: text tables, `results.json` with all samples, an
//! HTML page, and `series.csv.zst` with per-second values. In the code, *printed* means published by the original.

use std::path::Path;

use anyhow::{Context, Result, bail};
use headwater_report::number::{grouped, latency};
use headwater_report::page::{Column, Page, Tile, Tone, text_table};
use headwater_report::statistics::{Estimate, estimate, paired_ratios};
use headwater_report::svg::{Bar, BarChart, Curve, CurveChart, Group, Scale};
use serde::Serialize;

use crate::files::Files;
use crate::load::Outcomes;
use crate::machine::Machine;
use crate::optional_fio::Done;
use crate::over::Over;
use crate::run::{Plan, Results, Sample};
use crate::series;
use crate::study::{Case, Source, Variant};

/// The format version of `results.json`.
const SCHEMA: u32 = 1;

/// The columns of a variant's table.
const HEAD: [Column; 8] = [
    Column::Text("Case"),
    Column::Figure("Published IOPS"),
    Column::Figure("Published ratio"),
    Column::Figure("Our ratio [95 %]"),
    Column::Text("Faster?"),
    Column::Figure("Our IOPS [95 %]"),
    Column::Figure("Mean latency"),
    Column::Figure("p99"),
];

/// The columns of [`HEAD`] with published values.
const PRINTED: [usize; 2] = [1, 2];

/// The contents of a report.
pub struct Report<'a> {
    /// The plan of the study.
    pub plan: &'a Plan,
    /// The measurements.
    pub results: &'a Results,
    /// The machine.
    pub machine: Machine,
    /// The error that ended the study early, if any.
    pub failure: Option<String>,
    /// Whether this is a quick run with small sizes.
    pub is_quick: bool,
    /// Additional tables.
    pub tables: Vec<Table>,
    /// Skipped parts, with reasons.
    pub left_out: Vec<String>,
    /// Versions of the measured peers.
    pub programs: Vec<String>,
    /// The file whose blocks are written; `None`: random data.
    pub data: Option<String>,
    /// Results of fio jobs.
    pub fio: Vec<Done>,
}

/// A table of a report.
#[derive(Clone, Debug)]
pub struct Table {
    /// Its caption.
    pub caption: String,
    /// Its columns.
    pub head: Vec<Column>,
    /// Its rows.
    pub rows: Vec<Vec<String>>,
}

#[derive(Serialize)]
struct Json<'a> {
    schema: u32,
    study: &'static str,
    version: &'static str,
    is_quick: bool,
    seed: u64,
    run_ms: u64,
    rounds: usize,
    machine: &'a Machine,
    is_quiet: Option<bool>,
    failure: Option<&'a str>,
    over: Over,
    storage: String,
    left_out: &'a [String],
    programs: &'a [String],
    data: Option<&'a str>,
    fio: &'a [Done],
    baseline: &'static str,
    cases: Vec<JsonCase>,
    variants: &'a [Variant],
    #[serde(flatten)]
    results: &'a Results,
}

#[derive(Serialize)]
struct JsonCase {
    name: &'static str,
    title: &'static str,
    set_bytes: u64,
    printed_iops: Option<f64>,
    source: Option<Source>,
    printed_ratio: Option<f64>,
}

/// Creates the output directory. Fails if it exists and is not empty.
pub fn prepare(out: &Path) -> Result<()> {
    check_unused(out)?;
    std::fs::create_dir_all(out)
        .with_context(|| format!("cannot create the output directory {}", out.display()))
}

/// Fails if the output directory exists and is not empty.
pub fn check_unused(out: &Path) -> Result<()> {
    if out.exists() {
        let mut entries = std::fs::read_dir(out)
            .with_context(|| format!("cannot read the output directory {}", out.display()))?;
        if entries.next().is_some() {
            bail!(
                "the output directory {} is in use: it is not empty; choose another with --out",
                out.display()
            );
        }
    }
    Ok(())
}

impl Report<'_> {
    fn samples(&self, case: &str, variant: &Variant) -> impl Iterator<Item = &Sample> {
        self.results.samples.iter().filter(move |s| s.case == case && s.variant == variant.name)
    }

    /// IOPS of one case in each round.
    fn iops(&self, case: &str, variant: &Variant) -> Vec<(usize, f64)> {
        self.samples(case, variant).map(|sample| (sample.round, sample.outcomes.iops)).collect()
    }

    fn median_of(&self, case: &Case, variant: &Variant, figure: fn(&Outcomes) -> f64) -> Option<f64> {
        let figures: Vec<f64> = self.samples(case.name, variant).map(|s| figure(&s.outcomes)).collect();
        headwater_report::statistics::median(&figures)
    }

    /// Ratios to the raw disk in each round.
    fn ratios(&self, case: &Case, variant: &Variant) -> Vec<f64> {
        paired_ratios(&self.iops(case.name, variant), &self.iops(self.plan.study.baseline, variant))
    }

    fn ratio(&self, case: &Case, variant: &Variant) -> Option<Estimate> {
        estimate(&self.ratios(case, variant), self.plan.seed)
    }

    /// A table of one case as a share of another case, for each variant, with the published share.
    pub fn shares(&self, caption: &str, (case, of): (&str, &str)) -> Table {
        let study = &self.plan.study;
        let printed = |name: &str| study.case(name)?.printed;
        let printed = printed(case).zip(printed(of)).map_or("-".into(), |((case, source), (of, other))| {
            let is_derived = [source, other].iter().any(|source| matches!(source, Source::Derived));
            format!("{}{}", two_digits(case / of), if is_derived { " derived" } else { "" })
        });
        let row = |variant: &Variant| {
            let ratios = paired_ratios(&self.iops(case, variant), &self.iops(of, variant));
            vec![
                capitalised(&variant.title),
                printed.clone(),
                shown(estimate(&ratios, self.plan.seed), two_digits),
            ]
        };
        Table {
            caption: caption.into(),
            head: vec![
                Column::Text("Variant"),
                Column::Figure("Printed share"),
                Column::Figure("Our share [95 %]"),
            ],
            rows: study.variants.iter().map(row).collect(),
        }
    }

    fn row(&self, case: &Case, variant: &Variant) -> Vec<String> {
        let iops: Vec<f64> = self.iops(case.name, variant).into_iter().map(|(_, iops)| iops).collect();
        let iops = estimate(&iops, self.plan.seed);
        let ratio = self.ratio(case, variant);
        let time = |us: Option<f64>| us.map_or("-".into(), latency);
        vec![
            case.title.into(),
            match case.printed {
                Some((iops, Source::Printed)) => grouped(iops),
                Some((iops, Source::Derived)) => format!("{} derived", grouped(iops)),
                None => "-".into(),
            },
            self.plan.study.printed_ratio(case).map_or("-".into(), two_digits),
            shown(ratio, two_digits),
            self.verdict(case, ratio),
            shown(iops, grouped),
            time(self.median_of(case, variant, |outcomes| outcomes.mean_us)),
            time(self.median_of(case, variant, |outcomes| outcomes.p99_us)),
        ]
    }

    /// Whether a case is faster than the raw disk, here and in the publication. If the interval contains 1, no
    /// difference was found, and the answer is "as fast".
    fn verdict(&self, case: &Case, ratio: Option<Estimate>) -> String {
        if case.name == self.plan.study.baseline {
            return self.plan.study.against.into();
        }
        let Some(Estimate { interval: (low, high), .. }) = ratio else { return "-".into() };
        let ours = match (low > 1.0, high < 1.0) {
            (true, _) => "yes",
            (_, true) => "no",
            _ => "as fast",
        };
        let Some(printed) = self.plan.study.printed_ratio(case) else { return ours.into() };
        let printed = if printed > 1.0 { "yes" } else { "no" };
        if printed == ours {
            format!("{ours}, as published")
        } else {
            format!("{ours}; published: {printed}")
        }
    }

    /// The table of a variant. A study without a publication has no columns for published values.
    fn table(&self, variant: &Variant) -> (Vec<Column>, Vec<Vec<String>>) {
        let is_shown = |column: usize| self.plan.study.is_published() || !PRINTED.contains(&column);
        let head =
            HEAD.into_iter().enumerate().filter(|(column, _)| is_shown(*column)).map(|(_, title)| title);
        let row = |case| {
            let cells = self.row(case, variant).into_iter().enumerate();
            cells.filter(|(column, _)| is_shown(*column)).map(|(_, cell)| cell).collect()
        };
        (head.collect(), self.plan.study.cases.iter().map(row).collect())
    }

    /// Warnings. The page shows them before the figures, the text after them.
    fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.is_quick {
            warnings.push(
                "Quick run: short runs, with working sets and RAM limits that are much smaller than the names say. \
                 The figures say nothing about speed."
                    .into(),
            );
        }
        if let Some(failure) = &self.failure {
            warnings.push(format!(
                "The study failed: {failure}. The report contains the measurements up to then."
            ));
        } else if self.results.interrupted {
            warnings
                .push("The study was interrupted. The report contains the measurements up to then.".into());
        }
        if self.results.is_quiet() == Some(false) {
            let probes: Vec<String> = self.results.probes_iops.iter().copied().map(grouped).collect();
            warnings.push(format!(
                "The host was not idle: the raw disk reached {} IOPS before and after the study; the values differ by more than 15 %.",
                probes.join(" and ")
            ));
        }
        warnings
    }

    /// The tables as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for variant in &self.plan.study.variants {
            text.push_str(&format!("\n{}\n", variant.title));
            let (head, rows) = self.table(variant);
            text.push_str(&text_table(&head, &rows));
        }
        for table in &self.tables {
            text.push_str(&format!("\n{}\n{}", table.caption, text_table(&table.head, &table.rows)));
        }
        self.warnings().iter().for_each(|warning| text.push_str(&format!("\n{warning}\n")));
        self.left_out.iter().for_each(|line| text.push_str(&format!("\nSkipped: {line}.\n")));
        text
    }

    /// The storage below the volumes, in a word.
    fn storage(&self) -> String {
        self.plan.storage.map_or("real".into(), |model| model.to_string())
    }

    /// The HTML page.
    pub fn html(&self) -> String {
        let study = &self.plan.study;
        let mut page = Page::new(&format!("Headwater study {}", study.number), study.title);
        page.paragraph(Tone::Plain, &format!("{}. {}.", study.origin, study.load));
        self.warnings().iter().for_each(|warning| page.paragraph(Tone::Warning, warning));
        if let Some(first) = study.variants.first() {
            page.tiles(&self.tiles(first));
        }
        page.heading(&format!("Ratio to {}", study.against));
        page.plot(
            "Right of the line: faster; left of it: slower. Bar: the median of our rounds. Dot: one round. Whisker: the 95 % interval of the median. \
             Only ratios within one machine are compared: IOPS of the publication's disk are not compared with ours.",
            &self.bars(),
        );
        if let Some(first) = study.variants.first() {
            page.heading("Latency");
            page.plot(
                &format!(
                    "Share of requests that were answered within a given time, {}, in the round with the median IOPS of each case.",
                    first.title
                ),
                &self.curves(first),
            );
        }
        page.heading("All figures");
        for variant in &study.variants {
            let (head, rows) = self.table(variant);
            page.table(&capitalised(&variant.title), &head, &rows);
        }
        self.tables.iter().for_each(|table| page.table(&table.caption, &table.head, &table.rows));
        page.heading("How to read the figures");
        let mut notes: Vec<String> = study.notes.iter().map(|note| (*note).to_owned()).collect();
        notes.push(
            "Intervals are 95 % percentile bootstrap intervals of the median over the rounds. An interval that \
             holds 1 means: as fast."
                .into(),
        );
        notes.extend(self.left_out.iter().map(|line| format!("Skipped: {line}.")));
        if let Some(model) = self.plan.storage {
            notes.push(format!(
                "The disk is a model, {model}: operations of the local disk are delayed to the model's latency, so the local disk must be faster than the model."
            ));
        }
        if self.plan.over != Over::InProcess {
            notes.push(format!(
                "Volumes are accessed over {}, by one client in this program; the raw disk is accessed directly.",
                self.plan.over
            ));
        }
        page.list(&notes);
        page.heading("Machine and run");
        page.table("", &[Column::Text("What"), Column::Text("Value")], &self.facts());
        page.finish()
    }

    /// The main cases of a variant in large type.
    fn tiles(&self, variant: &Variant) -> Vec<Tile> {
        let study = &self.plan.study;
        let cases = study.headlines.iter().filter_map(|name| study.case(name));
        cases
            .map(|case| Tile {
                value: self.ratio(case, variant).map_or("-".into(), |ratio| format!("{:.2} x", ratio.median)),
                label: case.title.into(),
                note: match study.printed_ratio(case) {
                    Some(printed) => format!("{}; published: {printed:.2} x", study.against),
                    None => study.against.into(),
                },
            })
            .collect()
    }

    fn bars(&self) -> String {
        let study = &self.plan.study;
        let plotted: Vec<&Variant> = study.variants.iter().filter(|variant| variant.is_plotted).collect();
        let bar = |case: &Case, variant: &Variant| {
            let ratio = self.ratio(case, variant);
            Bar {
                value: ratio.map(|ratio| ratio.median),
                interval: ratio.map(|ratio| ratio.interval),
                samples: self.ratios(case, variant),
            }
        };
        // The baseline is the reference line at 1.
        let cases = study.cases.iter().filter(|case| case.name != study.baseline);
        let groups = cases.map(|case| {
            let (label, note) = case.title.split_once(", ").unwrap_or((case.title, ""));
            Group {
                label: label.into(),
                note: note.into(),
                printed: study.printed_ratio(case),
                bars: plotted.iter().map(|variant| bar(case, variant)).collect(),
            }
        });
        BarChart {
            scale: Scale::Ratios,
            axis: format!("IOPS, as a multiple of those of {}", study.against),
            reference: Some((1.0, study.against.into())),
            printed: if study.is_published() { "published".into() } else { String::new() },
            series: plotted.iter().map(|variant| format!("ours, {}", variant.title)).collect(),
            groups: groups.collect(),
            digits: 2,
        }
        .svg()
    }

    fn curves(&self, variant: &Variant) -> String {
        let curve = |case: &Case| {
            let outcomes = &self.results.median_of(case.name, &variant.name)?.outcomes;
            let points = outcomes.percentiles_us.iter().map(|(percent, us)| (*us, percent / 100.0));
            Some(Curve { label: case.title.into(), points: points.collect(), is_dots: false })
        };
        let curves = self.plan.study.cases.iter().filter_map(curve).collect();
        CurveChart { axis: "latency".into(), label: latency, curves }.svg()
    }

    fn facts(&self) -> Vec<Vec<String>> {
        let plan = self.plan;
        let probes: Vec<String> =
            self.results.probes_iops.iter().map(|iops| format!("{} IOPS", grouped(*iops))).collect();
        let runs = format!("{} rounds of {:.1} s in rotated order", plan.rounds, plan.run_ms as f64 / 1000.0);
        let mut facts = self.machine.facts();
        facts.push(("Raw disk, before and after".into(), probes.join(", ")));
        facts.push(("Runs of each case".into(), runs));
        facts.push(("Storage".into(), self.storage()));
        facts.push(("Access to volumes".into(), plan.over.to_string()));
        facts.push(("Seed".into(), plan.seed.to_string()));
        facts.extend(self.data.iter().map(|file| ("Data of writes".into(), format!("blocks of {file}"))));
        if !self.programs.is_empty() {
            facts.push(("Other programs".into(), self.programs.join(", ")));
        }
        facts.push(("Program".into(), format!("headwater-study {}", env!("CARGO_PKG_VERSION"))));
        facts.into_iter().map(|(what, value)| vec![what, value]).collect()
    }

    /// All samples, and the parameters that are needed to repeat the study.
    pub fn json(&self) -> Result<String> {
        let study = &self.plan.study;
        let cases = study.cases.iter().map(|case| JsonCase {
            name: case.name,
            title: case.title,
            set_bytes: case.set_bytes,
            printed_iops: case.printed.map(|(iops, _)| iops),
            source: case.printed.map(|(_, source)| source),
            printed_ratio: study.printed_ratio(case),
        });
        let json = Json {
            schema: SCHEMA,
            study: study.number,
            version: env!("CARGO_PKG_VERSION"),
            is_quick: self.is_quick,
            seed: self.plan.seed,
            run_ms: self.plan.run_ms,
            rounds: self.plan.rounds,
            machine: &self.machine,
            is_quiet: self.results.is_quiet(),
            failure: self.failure.as_deref(),
            over: self.plan.over,
            storage: self.storage(),
            left_out: &self.left_out,
            programs: &self.programs,
            data: self.data.as_deref(),
            fio: &self.fio,
            baseline: study.baseline,
            cases: cases.collect(),
            variants: &study.variants,
            results: self.results,
        };
        serde_json::to_string_pretty(&json).context("cannot write the results as JSON")
    }

    /// The files of the report.
    pub fn files(&self) -> Result<Files> {
        let series = series::packed(&self.results.series)?;
        Ok(Files::new(self.json()?, self.html()).with("series.csv.zst", series))
    }
}

/// An estimate with its interval, as text.
fn shown(estimate: Option<Estimate>, number: fn(f64) -> String) -> String {
    match estimate {
        Some(Estimate { median, interval: (low, high) }) => {
            format!("{} [{}, {}]", number(median), number(low), number(high))
        }
        None => "not measured".into(),
    }
}

fn two_digits(value: f64) -> String {
    format!("{value:.2}")
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::studies::study_001;

    fn report(check: impl FnOnce(&Report<'_>)) {
        let plan = Plan {
            study: study_001(true),
            rounds: 2,
            ramp_up_ms: 0,
            run_ms: 500,
            probe_ms: 100,
            seed: 1,
            storage: None,
            over: Over::InProcess,
        };
        let variant = plan.study.variants[0].name.clone();
        let sample = |case, round, iops| {
            let outcomes = Outcomes { iops, ..Outcomes::default() };
            Sample { case, variant: variant.clone(), round, outcomes, counters: None }
        };
        let (baseline, ours) = (plan.study.baseline, "ram-64m-set-10g");
        let samples = vec![sample(baseline, 0, 100.0), sample(baseline, 1, 200.0), sample(ours, 0, 130.0)];
        let results =
            Results { samples, probes_iops: vec![100.0, 50.0], interrupted: true, series: Vec::new() };
        check(&Report {
            plan: &plan,
            results: &results,
            machine: Machine::default(),
            failure: None,
            is_quick: true,
            tables: Vec::new(),
            left_out: Vec::new(),
            programs: Vec::new(),
            data: None,
            fio: Vec::new(),
        });
    }

    #[test]
    fn a_ratio_is_shown_beside_the_printed_ratio() {
        report(|report| {
            let rows = report.table(&report.plan.study.variants[0]).1;
            let row = rows.iter().find(|row| row[0].starts_with("64 MB")).unwrap();
            assert_eq!(
                row[1..6],
                ["4,923", "0.17", "1.30 [1.30, 1.30]", "yes; published: no", "130 [130, 130]"]
            );
            assert_eq!(rows[0][1..5], ["63,700 derived", "2.24", "not measured", "-"]);
            assert_eq!(rows[2][3..5], ["1.00 [1.00, 1.00]", "the raw disk"]);
        });
    }

    #[test]
    fn a_share_of_another_case_pairs_the_runs_of_a_round() {
        report(|report| {
            let table = report.shares("x", ("ram-64m-set-10g", "raw-10g"));
            assert_eq!(table.rows[0][1..], ["0.17", "1.30 [1.30, 1.30]"]);
            assert_eq!(table.rows.len(), report.plan.study.variants.len());
            let table = report.shares("x", ("ram-4g-set-10g", "ram-4g-set-1g"));
            assert_eq!(table.rows[0][1..], ["0.50 derived", "not measured"]);
        });
    }

    #[test]
    fn warnings_come_before_the_figures() {
        report(|report| {
            let page = report.html();
            let figures = page.find("class=\"tiles\"").unwrap();
            for warning in
                ["Quick run", "was interrupted", "The host was not idle: the raw disk reached 100 and 50"]
            {
                assert!(page.find(warning).unwrap() < figures, "{warning}");
                assert!(report.text().contains(warning), "{warning}");
            }
        });
    }

    #[test]
    fn an_output_directory_in_use_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(prepare(&dir.path().join("new")).is_ok());
        let error = prepare(dir.path()).unwrap_err().to_string();
        assert!(error.contains("is in use") && error.contains("--out"), "{error}");
    }
}
