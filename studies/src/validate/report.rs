//! Writes the result of a validation, which is a comparison of the desktop model with recorded guests, as text, as an HTML page
//! and as JSON.

use anyhow::{Context, Result};
use headwater_block::size;
use headwater_report::number::grouped;
use headwater_report::page::{Column, Page, Tile, Tone, text_table};
use headwater_report::statistics::median;
use serde::Serialize;

use super::figures::{Figures, distance};
use super::{ENOUGH, Kind, Overflowed, Recorded, Size, TOLERANCE, Validation};
use crate::desktop::Profile;
use crate::files::Files;
use crate::machine::Machine;

/// The format version of `results.json`.
const SCHEMA: u32 = 1;

/// The contents of the report.
pub struct Report<'a> {
    /// The recordings.
    pub recorded: &'a Recorded,
    /// The files of the recordings, as text.
    pub source: String,
    /// The model.
    pub profile: &'a Profile,
    /// Its first seed.
    pub seed: u64,
    /// The results.
    pub validation: &'a Validation,
}

#[derive(Serialize)]
struct Json<'a> {
    schema: u32,
    study: &'static str,
    version: &'static str,
    source: &'a str,
    seed: u64,
    machine: &'a Machine,
    interrupted: bool,
    failure: Option<&'a str>,
    notes: &'a [String],
    profile: &'a Profile,
    recorded: &'a [Vec<(Kind, Figures)>],
    modelled: &'a [Vec<(Kind, Figures)>],
    caches: Vec<JsonSize<'a>>,
}

#[derive(Serialize)]
struct JsonSize<'a> {
    #[serde(flatten)]
    size: &'a Size,
    bytes_deviation: Option<f64>,
    operations_deviation: Option<f64>,
    agrees: bool,
}

const PHASE_HEAD: [Column; 4] = [
    Column::Text("Figure"),
    Column::Figure("guests: median [least, most]"),
    Column::Figure("model: median [least, most]"),
    Column::Figure("model / guests"),
];

const CACHE_HEAD: [Column; 8] = [
    Column::Figure("RAM"),
    Column::Figure("spilled, guests"),
    Column::Figure("spilled, model"),
    Column::Figure("difference"),
    Column::Figure("overflow operations, guests"),
    Column::Figure("overflow operations, model"),
    Column::Figure("difference"),
    Column::Text("Within the tolerance?"),
];

/// A figure of a phase: its name, its value, and how the value is formatted.
type Row = (&'static str, fn(&Figures) -> f64, fn(f64) -> String);

fn bytes(value: f64) -> String {
    size::format(value as u64)
}

fn percent(value: f64) -> String {
    format!("{:.1} %", value * 100.0)
}

const ROWS: [Row; 9] = [
    ("Seconds", |figures| figures.seconds, grouped),
    ("Writes", |figures| figures.writes, grouped),
    ("Bytes written", |figures| figures.written_bytes, bytes),
    ("Bytes discarded", |figures| figures.discarded_bytes, bytes),
    (
        "Reads of written blocks, as a share of these reads and the writes",
        |figures| figures.read_share,
        percent,
    ),
    ("Rewritten blocks", |figures| figures.rewritten_share, percent),
    ("Blocks that compress to less than half", |figures| figures.packs_share, percent),
    ("Blocks that are zero or equal to the image", |figures| figures.free_share, percent),
    ("Live bytes at the end", |figures| figures.live_bytes, bytes),
];

/// A deviation, as text for people.
fn difference(of: Option<f64>) -> String {
    of.map_or("only the model has any".into(), |by| format!("{:+.0} %", by * 100.0))
}

/// A deviation beyond the tolerance, in words.
fn missed(what: &str, of: Option<f64>) -> Option<String> {
    match of {
        None => Some(format!("only the model has {what}")),
        Some(by) if by.abs() <= TOLERANCE => None,
        Some(by) => {
            let more = if by > 0.0 { "more" } else { "fewer" };
            Some(format!("the model has {:.0} % {more} {what}", by.abs() * 100.0))
        }
    }
}

impl Report<'_> {
    fn kinds(&self) -> Vec<Kind> {
        self.validation
            .recorded
            .first()
            .map(|of| of.iter().map(|(kind, _)| *kind).collect())
            .unwrap_or_default()
    }

    fn phase_table(&self, kind: Kind) -> Vec<Vec<String>> {
        let each = |desktops: &[Vec<(Kind, Figures)>], of: fn(&Figures) -> f64| -> Vec<f64> {
            let figures = desktops.iter().flatten().filter(|(other, _)| *other == kind);
            figures.map(|(_, figures)| of(figures)).collect()
        };
        let shown = |values: &[f64], show: fn(f64) -> String| {
            let least = values.iter().copied().min_by(f64::total_cmp);
            let most = values.iter().copied().max_by(f64::total_cmp);
            match (median(values), least, most) {
                (Some(middle), Some(least), Some(most)) => {
                    format!("{} [{}, {}]", show(middle), show(least), show(most))
                }
                _ => "-".into(),
            }
        };
        let row = |(name, of, show): Row| {
            let (guests, models) = (each(&self.validation.recorded, of), each(&self.validation.modelled, of));
            let ratio = median(&models).zip(median(&guests)).filter(|(_, guests)| *guests > 0.0);
            vec![
                name.to_owned(),
                shown(&guests, show),
                shown(&models, show),
                ratio.map_or("-".into(), |(models, guests)| format!("{:.2}", models / guests)),
            ]
        };
        let mut rows: Vec<Vec<String>> = ROWS.into_iter().map(row).collect();
        let lengths = |desktops: &[Vec<(Kind, Figures)>]| -> Vec<u64> {
            let figures = desktops.iter().flatten().filter(|(other, _)| *other == kind);
            figures.flat_map(|(_, figures)| figures.lengths.iter().copied()).collect()
        };
        let (guests, models) = (lengths(&self.validation.recorded), lengths(&self.validation.modelled));
        let distance = distance(&guests, &models);
        rows.push(vec![
            "Distance of the lengths of writes, 0 (equal) to 1".into(),
            String::new(),
            String::new(),
            distance.map_or("-".into(), |distance| format!("{distance:.2}")),
        ]);
        rows
    }

    fn cache_table(&self) -> Vec<Vec<String>> {
        let middle = |desktops: &[Overflowed], of: fn(&Overflowed) -> u64| {
            let values: Vec<f64> = desktops.iter().map(|overflowed| of(overflowed) as f64).collect();
            median(&values).unwrap_or(0.0)
        };
        let row = |size: &Size| {
            let of_bytes = |overflowed: &Overflowed| overflowed.spilled_bytes;
            let of_operations = |overflowed: &Overflowed| overflowed.operations;
            vec![
                size::format(size.ram_bytes),
                bytes(middle(&size.recorded, of_bytes)),
                bytes(middle(&size.modelled, of_bytes)),
                difference(size.bytes_deviation()),
                grouped(middle(&size.recorded, of_operations)),
                grouped(middle(&size.modelled, of_operations)),
                difference(size.operations_deviation()),
                if size.agrees() { "yes" } else { "no" }.into(),
            ]
        };
        self.validation.sizes.iter().map(row).collect()
    }

    /// The main result for each size: whether the model agrees, or by how much it deviates.
    fn answers(&self) -> Vec<String> {
        let tolerance = format!("{:.0} %", TOLERANCE * 100.0);
        let of_size = |size: &Size| {
            let misses: Vec<String> = [
                missed("spilled bytes", size.bytes_deviation()),
                missed("operations of the overflow", size.operations_deviation()),
            ]
            .into_iter()
            .flatten()
            .collect();
            let ram = size::format(size.ram_bytes);
            if size.spills_nothing() && misses.is_empty() {
                format!("With {ram} of RAM, neither the guests nor the model spill.")
            } else if misses.is_empty() {
                format!(
                    "With {ram} of RAM, the model agrees with the guests within {tolerance} in spilled bytes and in \
                     overflow operations."
                )
            } else {
                format!(
                    "With {ram} of RAM, the model is not within {tolerance} of the guests: {}.",
                    misses.join(", and ")
                )
            }
        };
        self.validation.sizes.iter().map(of_size).collect()
    }

    fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if let Some(failure) = &self.validation.failure {
            warnings.push(format!(
                "The study failed: {failure}. The report contains the measurements up to then."
            ));
        } else if self.validation.interrupted {
            warnings.push(
                "The study was interrupted. The report contains results for the cache sizes that had been \
                 measured on all desktops."
                    .into(),
            );
        }
        let count = self.recorded.desktops.len();
        if count < ENOUGH {
            warnings.push(format!("Recorded desktops: {count}. {ENOUGH} or more should be compared."));
        }
        warnings.extend(self.recorded.notes.iter().cloned());
        warnings
    }

    /// The report as text for a terminal.
    pub fn text(&self) -> String {
        let mut text = format!("\nThe desktop model compared with recorded guests: {}\n", self.source);
        for kind in self.kinds() {
            text.push_str(&format!(
                "\n{}\n{}",
                kind.title(),
                text_table(&PHASE_HEAD, &self.phase_table(kind))
            ));
        }
        text.push_str(&format!(
            "\nThe same write cache with recordings and model\n{}",
            text_table(&CACHE_HEAD, &self.cache_table())
        ));
        self.answers().iter().for_each(|answer| text.push_str(&format!("\n{answer}")));
        text.push('\n');
        self.warnings().iter().for_each(|warning| text.push_str(&format!("\n{warning}\n")));
        text
    }

    /// The HTML page.
    pub fn html(&self) -> String {
        let mut page = Page::new("Headwater study: validation", "Is the desktop model like a real guest?");
        page.paragraph(
            Tone::Plain,
            "Recorded boots and sessions of real guests, and as many desktops of the model, each with a seed of its own. \
             The same write cache is given either, at three limits of RAM.",
        );
        self.answers().iter().for_each(|answer| page.paragraph(Tone::Plain, answer));
        self.warnings().iter().for_each(|warning| page.paragraph(Tone::Warning, warning));
        let tile = |size: &Size| Tile {
            value: difference(size.bytes_deviation()),
            label: format!(
                "spilled bytes with {} of RAM, model against guests",
                size::format(size.ram_bytes)
            ),
            note: format!("operations: {}", difference(size.operations_deviation())),
        };
        page.tiles(&self.validation.sizes.iter().map(tile).collect::<Vec<_>>());
        page.heading("The same write cache with recordings and model");
        page.table("Medians of the desktops", &CACHE_HEAD, &self.cache_table());
        page.heading("By phase");
        for kind in self.kinds() {
            page.table(kind.title(), &PHASE_HEAD, &self.phase_table(kind));
        }
        page.heading("How to read the figures");
        page.list(&NOTES.map(str::to_owned));
        page.heading("Machine and run");
        let mut facts = self.validation.machine.facts();
        facts.push(("Recordings".into(), self.source.clone()));
        facts.push(("Recorded desktops".into(), self.recorded.desktops.len().to_string()));
        facts.push(("First seed of the model".into(), self.seed.to_string()));
        facts.push(("Program".into(), format!("headwater-study {}", env!("CARGO_PKG_VERSION"))));
        let rows: Vec<Vec<String>> = facts.into_iter().map(|(what, value)| vec![what, value]).collect();
        page.table("", &[Column::Text("What"), Column::Text("Value")], &rows);
        page.heading("The desktop model");
        let head = [
            Column::Text("Parameter"),
            Column::Figure("Value"),
            Column::Text("Grade"),
            Column::Text("Source"),
        ];
        page.table("R: read in the source, D: derived, A: assumption", &head, &self.profile.rows());
        page.finish()
    }

    /// The files of the report.
    pub fn files(&self) -> Result<Files> {
        let caches = self.validation.sizes.iter().map(|size| JsonSize {
            size,
            bytes_deviation: size.bytes_deviation(),
            operations_deviation: size.operations_deviation(),
            agrees: size.agrees(),
        });
        let json = Json {
            schema: SCHEMA,
            study: "validate",
            version: env!("CARGO_PKG_VERSION"),
            source: &self.source,
            seed: self.seed,
            machine: &self.validation.machine,
            interrupted: self.validation.interrupted,
            failure: self.validation.failure.as_deref(),
            notes: &self.recorded.notes,
            profile: self.profile,
            recorded: &self.validation.recorded,
            modelled: &self.validation.modelled,
            caches: caches.collect(),
        };
        let json = serde_json::to_string_pretty(&json).context("cannot write the results as JSON")?;
        Ok(Files::new(json, self.html()))
    }
}

const NOTES: [&str; 5] = [
    "The guests are Debians under QEMU, and the model has the counts of Windows desktops: a difference is expected. Another model is given with --profile.",
    "Guests under emulation take longer for the same work. So sums of a phase are compared instead of rates.",
    "Reads of the image are not in the model. Of the reads, only those that find a written block are counted.",
    "The requests of each desktop are sent to a write cache of its own as fast as it keeps up. After each 2 MiB that are written, the next request \
     waits until the cache has spilled what the simulated cache has spilled by then, so that a busy machine changes little.",
    "The limits of RAM are a quarter, half and all of the median of the recordings' peaks of live data.",
];
