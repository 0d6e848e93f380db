//! Writes the result of a sizing as text, as an HTML page and as JSON.

use anyhow::{Context, Result};
use headwater_block::size;
use headwater_report::number::grouped;
use headwater_report::page::{Column, Page, Tile, Tone, text_table};
use headwater_report::svg::{Curve, CurveChart, Line, LineChart};
use serde::Serialize;

use super::Sizing;
use super::check::TOLERANCE;
use super::curve::{Analysis, NEARLY_ALL, percentile};
use super::model::Counts;
use crate::files::Files;
use crate::machine::Machine;
use crate::trace::Trace;

/// The format version of `results.json`.
const SCHEMA: u32 = 1;

const MIB: f64 = (1_u64 << 20) as f64;

/// The contents of the report.
pub struct Report<'a> {
    /// The trace.
    pub trace: &'a Trace,
    /// The files of the trace, as text.
    pub source: String,
    /// The results.
    pub sizing: &'a Sizing,
    /// The seed of random numbers.
    pub seed: u64,
}

#[derive(Serialize)]
struct Json<'a> {
    schema: u32,
    study: &'static str,
    version: &'static str,
    source: &'a str,
    seed: u64,
    machine: &'a Machine,
    notes: &'a [String],
    has_contents: bool,
    checked_desktop: &'a str,
    checked: &'a [super::check::Checked],
    unchecked: Option<&'a str>,
    #[serde(flatten)]
    analysis: &'a Analysis,
}

fn percent(share: f64) -> String {
    if share > 0.999 && share < 1.0 { "> 99.9 %".into() } else { format!("{:.1} %", share * 100.0) }
}

/// A limit in the notation of the command line.
fn limit(bytes: u64) -> String {
    let mib = bytes.div_ceil(1 << 20);
    if mib.is_multiple_of(1024) { format!("{}G", mib / 1024) } else { format!("{mib}M") }
}

/// The share of all desktops' writes that stays in RAM.
fn share_of_all(counts: &[Counts]) -> f64 {
    let sum = |of: fn(&Counts) -> u64| counts.iter().map(of).sum::<u64>();
    1.0 - (sum(|counts| counts.spilled) as f64 / sum(|counts| counts.written).max(1) as f64).min(1.0)
}

/// The 5th percentile of the desktops' shares: 95 % of the desktops have at least this share.
fn share_at_p95(counts: &[Counts]) -> f64 {
    let mut shares: Vec<f64> = counts.iter().map(Counts::ram_share).collect();
    shares.sort_by(|a, b| b.total_cmp(a));
    let rank = (shares.len() * 95).div_ceil(100).max(1);
    shares.get(rank - 1).copied().unwrap_or(1.0)
}

impl Report<'_> {
    fn analysis(&self) -> &Analysis {
        &self.sizing.analysis
    }

    fn per_s(&self, count: u64) -> f64 {
        count as f64 / self.analysis().duration_s.max(1e-6)
    }

    /// The main result in one paragraph.
    fn answer(&self) -> String {
        let analysis = self.analysis();
        let advised = size::format(analysis.advised_bytes);
        let mut all: Vec<u64> = analysis.desktops.iter().map(|desktop| desktop.all_bytes).collect();
        let without = percentile(&mut all, 95);
        let desktops = analysis.desktops.len();
        let whose =
            if desktops == 1 { "this desktop".into() } else { format!("95 % of the {desktops} desktops") };
        let mut text = format!(
            "With {advised} of RAM, {} of the writes of {whose} stay in RAM. To keep all writes in RAM, {whose} would need {}.",
            percent(NEARLY_ALL),
            size::format(without)
        );
        if let Some(pool) = analysis.pools.iter().find(|pool| pool.desktops == 100) {
            text.push_str(&format!(
                " If they start at random times, 100 desktops hold {} each at one time (starts within {:.0} minutes).",
                size::format(pool.p95_live_bytes),
                (analysis.spread_s / 60.0).ceil()
            ));
        }
        text
    }

    fn commands(&self) -> [String; 2] {
        let (ram, disk) = (limit(self.analysis().advised_bytes), limit(self.analysis().disk_bytes));
        [
            format!("headwater machine set NAME --ram {ram} --disk {disk}"),
            format!("headwater export IMAGE --ram {ram} --disk {disk} ..."),
        ]
    }

    fn curve_table(&self) -> (Vec<Column>, Vec<Vec<String>>) {
        let mut head = vec![
            Column::Figure("RAM"),
            Column::Figure("Writes that stay in RAM"),
            Column::Figure("Overflow writes/s"),
            Column::Figure("Overflow bytes/h"),
            Column::Figure("Overflow reads/s"),
        ];
        let is_many = self.analysis().desktops.len() > 1;
        if is_many {
            head.extend([Column::Figure("Least of 95 % of desktops"), Column::Figure("In one pool")]);
        }
        let row = |point: &super::curve::Point| {
            let sum = |of: fn(&Counts) -> u64| point.alone.iter().map(of).sum::<u64>();
            let desktops = point.alone.len().max(1) as f64;
            let segments = sum(|counts| counts.spilled_segments);
            let hours = self.analysis().duration_s.max(1e-6) / 3600.0;
            let mut row = vec![
                size::format(point.ram_bytes),
                percent(share_of_all(&point.alone)),
                format!("{:.3}", self.per_s(segments) / desktops),
                size::format((segments as f64 * 2.0 * MIB / hours / desktops) as u64),
                format!("{:.3}", self.per_s(sum(|counts| counts.read_disk)) / desktops),
            ];
            if is_many {
                row.push(percent(share_at_p95(&point.alone)));
                row.push(point.pooled.map_or("-".into(), |counts| percent(counts.ram_share())));
            }
            row
        };
        (head, self.analysis().points.iter().map(row).collect())
    }

    fn check_table(&self) -> (Vec<Column>, Vec<Vec<String>>) {
        let head = vec![
            Column::Figure("RAM"),
            Column::Figure("In RAM, model"),
            Column::Figure("In RAM, real"),
            Column::Figure("Blocks to disk, model"),
            Column::Figure("Blocks to disk, real"),
            Column::Figure("Deviation of the model"),
            Column::Text(""),
        ];
        let rows = self.sizing.checked.iter().map(|checked| {
            let deviation = checked.deviation();
            vec![
                size::format(checked.ram_bytes),
                percent(checked.model.ram_share()),
                percent(checked.ram_share()),
                grouped(checked.model.spilled as f64),
                grouped(checked.spilled_blocks as f64),
                format!("{:.1} %", deviation * 100.0),
                if deviation > TOLERANCE { "DEVIATES by more than 15 %".into() } else { "agrees".into() },
            ]
        });
        (head, rows.collect())
    }

    fn pool_table(&self) -> (Vec<Column>, Vec<Vec<String>>) {
        let head = vec![
            Column::Figure("Desktops"),
            Column::Figure("Live at one time, each"),
            Column::Figure("95 % of draws"),
            Column::Figure("All together"),
        ];
        let rows = self.analysis().pools.iter().map(|pool| {
            vec![
                pool.desktops.to_string(),
                size::format(pool.live_bytes),
                size::format(pool.p95_live_bytes),
                size::format(pool.p95_live_bytes * pool.desktops as u64),
            ]
        });
        (head, rows.collect())
    }

    fn warnings(&self) -> Vec<String> {
        let mut warnings = self.trace.notes.clone();
        if let Some(failure) = &self.sizing.failure {
            warnings.push(format!(
                "The check of the model with the real write cache failed: {failure}. The report contains the results up to then."
            ));
        } else if self.analysis().interrupted {
            warnings.push("The study was interrupted. The report contains the results up to then.".into());
        }
        if let Some(why) = &self.sizing.unchecked {
            warnings.push(format!("The model was not checked with the real write cache: {why}."));
        }
        if self.sizing.checked.iter().any(|checked| checked.deviation() > TOLERANCE) {
            warnings
                .push("The model differs from the real write cache by more than 15 %: see the check.".into());
        }
        if !self.trace.has_contents {
            warnings.push(
                "The trace does not contain the written data. All of it is assumed to be incompressible, so the RAM is an upper bound."
                    .into(),
            );
        }
        warnings
    }

    /// The report as text for a terminal.
    pub fn text(&self) -> String {
        let mut text = String::new();
        if !self.analysis().points.is_empty() {
            let (head, rows) = self.curve_table();
            text.push_str(&format!("\nEach desktop by itself\n{}", text_table(&head, &rows)));
            let (head, rows) = self.pool_table();
            text.push_str(&format!("\nDesktops that share RAM\n{}", text_table(&head, &rows)));
        }
        if !self.sizing.checked.is_empty() {
            let (head, rows) = self.check_table();
            let desktop = &self.sizing.checked_desktop;
            text.push_str(&format!(
                "\nThe model compared with the real write cache (desktop {desktop})\n{}",
                text_table(&head, &rows)
            ));
        }
        self.warnings().iter().for_each(|warning| text.push_str(&format!("\n{warning}\n")));
        if !self.analysis().points.is_empty() {
            text.push_str(&format!("\n{}\n", self.answer()));
            self.commands().iter().for_each(|command| text.push_str(&format!("  {command}\n")));
        }
        text
    }

    fn tiles(&self) -> Vec<Tile> {
        let analysis = self.analysis();
        let tile = |value: u64, label: &str, note: String| Tile {
            value: size::format(value),
            label: label.into(),
            note,
        };
        let at_95 = |of: fn(&super::curve::Desktop) -> u64| {
            let mut values: Vec<u64> = analysis.desktops.iter().map(of).collect();
            percentile(&mut values, 95)
        };
        let mut tiles = vec![
            tile(analysis.advised_bytes, "RAM, advised", "99 % of the writes stay in RAM".into()),
            tile(at_95(|desktop| desktop.all_bytes), "RAM without overflow", "nothing is spilled".into()),
            tile(
                at_95(|desktop| desktop.peak_bytes),
                "Live data, peak",
                "blocks in the cache at one time".into(),
            ),
        ];
        if let Some(pool) = analysis.pools.iter().find(|pool| pool.desktops == 100) {
            tiles.push(tile(
                pool.p95_live_bytes,
                "Live data, each of 100 desktops",
                "at one time, if they share RAM".into(),
            ));
        }
        tiles
    }

    fn chart(&self) -> String {
        let points = &self.analysis().points;
        let curve = |label: &str, share: &dyn Fn(&super::curve::Point) -> Option<f64>| Curve {
            label: label.into(),
            points: points
                .iter()
                .filter_map(|point| Some((point.ram_bytes as f64 / MIB, share(point)?)))
                .collect(),
            is_dots: false,
        };
        let is_many = self.analysis().desktops.len() > 1;
        let mut curves = vec![curve("desktops alone", &|point| Some(share_of_all(&point.alone)))];
        if is_many {
            curves.push(curve("minimum of 95 % of the desktops", &|point| Some(share_at_p95(&point.alone))));
            curves.push(curve("all in one pool", &|point| Some(point.pooled?.ram_share())));
        }
        let checked = self.sizing.checked.iter();
        curves.push(Curve {
            label: "the real write cache".into(),
            points: checked.map(|checked| (checked.ram_bytes as f64 / MIB, checked.ram_share())).collect(),
            is_dots: true,
        });
        CurveChart { axis: "RAM of each desktop".into(), label: |mib| format!("{mib:.0} MiB"), curves }.svg()
    }

    fn live_chart(&self) -> String {
        let analysis = self.analysis();
        let samples = analysis.desktops.first().map_or(0, |desktop| desktop.live_bytes.len());
        let minutes =
            |sample: usize| (sample + 1) as f64 / samples.max(1) as f64 * analysis.duration_s / 60.0;
        let mut series = Line { label: "held, median".into(), ..Line::default() };
        for sample in 0..samples {
            let mut lives: Vec<u64> = analysis
                .desktops
                .iter()
                .filter_map(|desktop| desktop.live_bytes.get(sample).copied())
                .collect();
            let mib = |bytes: u64| bytes as f64 / MIB;
            let (low, high) = (mib(percentile(&mut lives, 5)), mib(percentile(&mut lives, 95)));
            series.points.push((minutes(sample), mib(percentile(&mut lives, 50))));
            if analysis.desktops.len() > 1 {
                series.band.push((minutes(sample), low, high));
            }
        }
        LineChart { x_axis: "minutes".into(), y_axis: "MiB".into(), lines: vec![series], phases: Vec::new() }
            .svg()
    }

    /// The HTML page.
    pub fn html(&self) -> String {
        let analysis = self.analysis();
        let mut page = Page::new("Headwater sizing", "How much RAM does a desktop need?");
        page.paragraph(
            Tone::Plain,
            &format!(
                "{}: {} requests of {} desktops in {:.0} minutes. A model of the write cache processed all of them at each size; \
                 the real write cache carried out those of one desktop at three sizes.",
                self.source,
                grouped(self.trace.requests() as f64),
                self.trace.volumes.len(),
                (analysis.duration_s / 60.0).ceil()
            ),
        );
        self.warnings().iter().for_each(|warning| page.paragraph(Tone::Warning, warning));
        if analysis.points.is_empty() {
            return page.finish();
        }
        page.tiles(&self.tiles());
        page.paragraph(Tone::Plain, &self.answer());
        self.commands().iter().for_each(|command| page.command(command));
        page.heading("RAM and what stays in it");
        page.plot(
            "Share of the written blocks that never went to the overflow disk. Dots: the real write cache.",
            &self.chart(),
        );
        let (head, rows) = self.curve_table();
        page.table("Each desktop by itself", &head, &rows);
        page.heading("Live data of a desktop over time");
        page.plot("Live blocks in the write cache. Band: 90 % of the desktops.", &self.live_chart());
        page.heading("Desktops that share RAM");
        let (head, rows) = self.pool_table();
        page.table("Desktops drawn from the trace, each started at a random time", &head, &rows);
        if !self.sizing.checked.is_empty() {
            page.heading("Is the model right?");
            let (head, rows) = self.check_table();
            page.table(
                &format!("The model compared with the real write cache: {}", self.sizing.checked_desktop),
                &head,
                &rows,
            );
        }
        page.heading("How to read the figures");
        page.list(&NOTES.map(str::to_owned));
        page.heading("Machine and run");
        let mut facts = self.sizing.machine.facts();
        facts.push(("Seed".into(), self.seed.to_string()));
        facts.push(("Program".into(), format!("headwater-study {}", env!("CARGO_PKG_VERSION"))));
        let rows: Vec<Vec<String>> = facts.into_iter().map(|(what, value)| vec![what, value]).collect();
        page.table("", &[Column::Text("What"), Column::Text("Value")], &rows);
        page.finish()
    }

    /// The results, and the parameters that are needed to repeat them.
    pub fn json(&self) -> Result<String> {
        let json = Json {
            schema: SCHEMA,
            study: "sizing",
            version: env!("CARGO_PKG_VERSION"),
            source: &self.source,
            seed: self.seed,
            machine: &self.sizing.machine,
            notes: &self.trace.notes,
            has_contents: self.trace.has_contents,
            checked_desktop: &self.sizing.checked_desktop,
            checked: &self.sizing.checked,
            unchecked: self.sizing.unchecked.as_deref(),
            analysis: self.analysis(),
        };
        serde_json::to_string_pretty(&json).context("cannot write the results as JSON")
    }

    /// The files of the report.
    pub fn files(&self) -> Result<Files> {
        Ok(Files::new(self.json()?, self.html()))
    }
}

const NOTES: [&str; 6] = [
    "A written block of 4 KiB counts as kept in RAM if it is overwritten or discarded before the cache spills it to disk, or if the \
     cache never spills it. Spilling begins as soon as blocks without a copy on disk fill more than 70 % of the cache's RAM.",
    "The model has the cache's rules: segments of 2 MiB, overwriting in place, second chance, packing up to half of the RAM, the index. \
     It has no threads and no disk: moving takes no time, and the disk never lacks space.",
    "A write that begins within a block counts as a write that begins at the start of the block.",
    "The deviation of the model is the difference between the numbers of blocks that the model and the real cache write to the disk, as \
     a share of the number of the real cache. If both are less than 1 % of all written blocks, the deviation is 0.",
    "'In one pool' is the share if all desktops used one cache whose limit is the sum of theirs. On a real host, write caches share \
     RAM (serve --cache-ram), and come close to this value while some desktops are idle.",
    "The overflow disk of the command has room for what the largest desktop holds, a quarter more, and 64 MiB.",
];
