//! Writes the report of study 000: steady state, 95th percentile, disks and savings, next to the published figures.

use anyhow::{Context, Result};
use headwater_report::number::grouped;
use headwater_report::page::{Column, Page, Tile, Tone, text_table};
use headwater_report::statistics::{Estimate, estimate_mean};
use headwater_report::svg::{Line, LineChart};
use serde::Serialize;

use super::lifecycle::{Cache, DRAWS, Drawn, Machines, Measured, Results, Setup, Stand, USERS};
use super::modelled::{self, Run};
use super::s000;
use crate::desktop::Profile;
use crate::files::Files;
use crate::machine::Machine as Hardware;
use crate::random::Random;
use crate::run::is_quiet;
use crate::series;

/// The format version of `results.json`.
const SCHEMA: u32 = 1;

/// The contents of the report.
pub struct Report<'a> {
    /// The parameters.
    pub setup: &'a Setup,
    /// The measurements.
    pub results: &'a Results,
    /// For each platform: the 95th percentile with each cache.
    p95: Vec<Vec<(Cache, Drawn)>>,
}

#[derive(Serialize)]
struct Json<'a> {
    schema: u32,
    study: &'static str,
    version: &'static str,
    is_quick: bool,
    seed: u64,
    speed: f64,
    interval_us: u64,
    loops: u32,
    users: u32,
    machine: &'a Hardware,
    interrupted: bool,
    failure: Option<&'a str>,
    storage: String,
    probes_iops: &'a [f64],
    is_quiet: Option<bool>,
    profile: &'a Profile,
    machines: &'a [Machines],
    platforms: Vec<JsonPlatform>,
    measured: &'a [Measured],
}

#[derive(Serialize)]
struct JsonPlatform {
    name: &'static str,
    printed_p95_iops: (f64, f64),
    p95_iops: Vec<(Cache, Drawn)>,
}

const STEADY: [Column; 6] = [
    Column::Text("IOPS of an active user"),
    Column::Figure("published, disk"),
    Column::Figure("one operation per request [95 %]"),
    Column::Figure("our cache on disk [95 %]"),
    Column::Figure("our RAM with overflow [95 %]"),
    Column::Figure("published, RAM"),
];

const P95: [Column; 6] = [
    Column::Text("p95 IOPS of 500 users"),
    Column::Figure("published, disk"),
    Column::Figure("one operation per request [95 %]"),
    Column::Figure("our cache on disk [95 %]"),
    Column::Figure("our RAM with overflow [95 %]"),
    Column::Figure("published, RAM"),
];

const DISKS: [Column; 6] = [
    Column::Text("Disks for 500 users"),
    Column::Figure("published, disk / RAM"),
    Column::Figure("one operation per request"),
    Column::Figure("our RAM with overflow"),
    Column::Figure("saving"),
    Column::Figure("published saving"),
];

impl<'a> Report<'a> {
    /// Draws the users of each platform.
    pub fn new(setup: &'a Setup, results: &'a Results) -> Self {
        let of = |stand: &Stand| {
            let title = setup.machines[stand.machines].title;
            let drawn = |cache| Some((cache, setup.p95(stand, results.of(title, cache)?)));
            Cache::ALL.into_iter().filter_map(drawn).collect()
        };
        Self { setup, results, p95: setup.stands().iter().map(of).collect() }
    }

    fn measured(&self, machines: usize, cache: Cache) -> Option<&Measured> {
        self.results.of(self.setup.machines[machines].title, cache)
    }

    /// The mean of the machines, with its interval.
    fn steady(&self, measured: &Measured) -> String {
        match estimate_mean(&measured.steady_iops_by_machine, self.setup.seed) {
            Some(Estimate { median, interval: (low, high) }) if low < high => {
                format!("{median:.3} [{low:.3}, {high:.3}]")
            }
            _ => format!("{:.3}", measured.steady_iops),
        }
    }

    fn p95(&self, platform: usize, cache: Cache) -> Option<Drawn> {
        let drawn = self.p95.get(platform)?.iter().find(|(of, _)| *of == cache);
        drawn.map(|(_, drawn)| *drawn)
    }

    fn steady_rows(&self) -> Vec<Vec<String>> {
        let printed = |value: Option<f64>| value.map_or("-".into(), |value| value.to_string());
        let row = |(number, machines): (usize, &Machines)| {
            let (disk, ram) = machines.printed_steady;
            let ours = Cache::ALL.map(|cache| {
                self.measured(number, cache).map_or("not measured".into(), |measured| self.steady(measured))
            });
            let mut row = vec![machines.title.to_owned(), printed(disk)];
            row.extend(ours);
            row.push(printed(ram));
            row
        };
        self.setup.machines.iter().enumerate().map(row).collect()
    }

    fn p95_rows(&self) -> Vec<Vec<String>> {
        let shown = |drawn: Option<Drawn>| match drawn {
            Some(Drawn { median, interval: (low, high) }) => {
                format!("{} [{}, {}]", grouped(median), grouped(low), grouped(high))
            }
            None => "not measured".into(),
        };
        let row = |(number, stand): (usize, &Stand)| {
            let mut row = vec![stand.platform.name.to_owned(), grouped(stand.platform.disk_p95_iops)];
            row.extend(Cache::ALL.map(|cache| shown(self.p95(number, cache))));
            row.push(grouped(stand.platform.ram_p95_iops));
            row
        };
        self.setup.stands().iter().enumerate().map(row).collect()
    }

    fn disk_rows(&self) -> Vec<Vec<String>> {
        let row = |(number, stand): (usize, &Stand)| {
            let platform = &stand.platform;
            let (printed_disk, printed_ram) = platform.published_disks;
            let (count, ram) = (self.p95(number, Cache::Count), self.p95(number, Cache::Ram));
            let disks = |drawn: Option<Drawn>| {
                drawn.map_or("-".into(), |drawn| s000::disks(drawn.median).to_string())
            };
            let saving = count.zip(ram).map(|(count, ram)| s000::saving_percent(count.median, ram.median));
            vec![
                platform.name.to_owned(),
                format!("{printed_disk} / {printed_ram}"),
                disks(count),
                disks(ram),
                saving.map_or("-".into(), |saving| format!("{saving} %")),
                format!("{} %", platform.published_saving_percent),
            ]
        };
        self.setup.stands().iter().enumerate().map(row).collect()
    }

    fn warnings(&self) -> Vec<String> {
        let quick =
            "Quick run: few machines, short boots and sessions, little RAM. The figures have no meaning.";
        Run {
            quick: self.setup.is_quick.then_some(quick),
            interrupted: self.results.interrupted,
            failure: self.results.failure.as_deref(),
            late_us: self.results.measured.iter().map(|measured| measured.late_us).max().unwrap_or(0),
            interval_us: self.setup.interval_us,
            probes_iops: &self.results.probes_iops,
        }
        .warnings()
    }

    /// The report as text for a terminal.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let tables = [(&STEADY, self.steady_rows()), (&P95, self.p95_rows()), (&DISKS, self.disk_rows())];
        for (head, rows) in tables {
            text.push_str(&format!("\n{}", text_table(head, &rows)));
        }
        self.warnings().iter().for_each(|warning| text.push_str(&format!("\n{warning}\n")));
        text.push_str(&format!("\n{}", s000::text()));
        text
    }

    fn tiles(&self) -> Vec<Tile> {
        let steady = |machines: usize, cache: Cache| Some(self.measured(machines, cache)?.steady_iops);
        let share = |machines: usize| {
            let (count, ram) = (steady(machines, Cache::Count)?, steady(machines, Cache::Ram)?);
            Some(format!("{:.2} %", ram / count * 100.0))
        };
        let tile = |value: Option<String>, label: &str, note: &str| Tile {
            value: value.unwrap_or("-".into()),
            label: label.into(),
            note: note.into(),
        };
        let ram = steady(0, Cache::Ram).map(|iops| format!("{iops:.3}"));
        vec![
            tile(ram, "IOPS of an active desktop", "RAM with overflow; published: 0.09"),
            tile(share(0), "of the disk cache's IOPS, desktops", "published: 1 %"),
            tile(share(1), "of the disk cache's IOPS, session hosts", "published: 76 and 20 %"),
        ]
    }

    /// One random choice of 500 users over time.
    fn chart(&self, stand: &Stand) -> String {
        let minutes = |look: usize| (look + 1) as f64 * self.setup.interval_us as f64 / 60e6;
        let series = Cache::ALL.into_iter().filter_map(|cache| {
            let mut random = Random::new(self.setup.seed);
            let iops = self.setup.draw(stand, self.measured(stand.machines, cache)?, &mut random);
            let points = iops.into_iter().enumerate().map(|(look, iops)| (minutes(look), iops)).collect();
            Some(Line { label: cache.title().into(), points, ..Line::default() })
        });
        LineChart {
            x_axis: "minutes".into(),
            y_axis: "IOPS".into(),
            lines: series.collect(),
            phases: Vec::new(),
        }
        .svg()
    }

    /// The HTML page.
    pub fn html(&self) -> String {
        let mut page =
            Page::new("Headwater study 000", "How many disks do the write caches of 500 users need?");
        page.paragraph(
            Tone::Plain,
            "A study of write caches in RAM with overflow (2014). Desktops are models with the parameters below. The count of one disk \
             operation for each request stands for the study's cache on disk. It is fitted to a published column, and the times of boots and \
             logons are chosen so that the published 95th percentile of desktops comes out: neither is a check. What our caches make of the same \
             requests is measured.",
        );
        self.warnings().iter().for_each(|warning| page.paragraph(Tone::Warning, warning));
        page.tiles(&self.tiles());
        page.table("Steady state", &STEADY, &self.steady_rows());
        page.table("The whole run, boots and logons included", &P95, &self.p95_rows());
        page.table("Disks of 180 IOPS, at least 3", &DISKS, &self.disk_rows());
        page.heading("500 users over time");
        for stand in self.setup.stands() {
            let storm = stand.storm;
            let caption = format!(
                "{}: machines boot within {:.0} s, users log on within {:.0} s. One random choice of {DRAWS}.",
                stand.platform.name, storm.boots_s, storm.logons_s
            );
            page.plot(&caption, &self.chart(&stand));
        }
        page.heading("How to read the figures");
        let ran: Vec<String> = self
            .setup
            .machines
            .iter()
            .map(|machines| {
                format!("{} {} of {} users", machines.count, machines.title.to_lowercase(), machines.users)
            })
            .collect();
        let mut notes = vec![format!(
            "{} were run. In the steady state, the interval is that of the mean of the machines, by bootstrap. {USERS} users are drawn from them with replacement, each started at a random time, {DRAWS} times; the interval \
             holds 95 % of the draws. It says how much machines differ, and nothing of an error of the model.",
            ran.join(" and ")
        )];
        notes.extend(NOTES.map(str::to_owned));
        page.list(&notes);
        let mut facts = self.results.hardware.facts();
        facts.push(("Storage".into(), modelled::storage(self.setup.storage)));
        facts.push(modelled::probes_fact(&self.results.probes_iops));
        let pace = (self.setup.speed, self.setup.seed);
        modelled::add_model_and_machine(&mut page, &self.setup.profile, facts, pace);
        page.finish()
    }

    /// The files of the report.
    pub fn files(&self) -> Result<Files> {
        let platform = |(stand, p95): (&Stand, &Vec<(Cache, Drawn)>)| JsonPlatform {
            name: stand.platform.name,
            printed_p95_iops: (stand.platform.disk_p95_iops, stand.platform.ram_p95_iops),
            p95_iops: p95.clone(),
        };
        let json = Json {
            schema: SCHEMA,
            study: "000",
            version: env!("CARGO_PKG_VERSION"),
            is_quick: self.setup.is_quick,
            seed: self.setup.seed,
            speed: self.setup.speed,
            interval_us: self.setup.interval_us,
            loops: self.setup.loops,
            users: USERS,
            machine: &self.results.hardware,
            interrupted: self.results.interrupted,
            failure: self.results.failure.as_deref(),
            storage: modelled::storage(self.setup.storage),
            probes_iops: &self.results.probes_iops,
            is_quiet: is_quiet(&self.results.probes_iops),
            profile: &self.setup.profile,
            machines: &self.setup.machines,
            platforms: self.setup.stands().iter().zip(&self.p95).map(platform).collect(),
            measured: &self.results.measured,
        };
        let json = serde_json::to_string_pretty(&json).context("cannot write the results as JSON")?;
        let all: Vec<_> = self.results.measured.iter().flat_map(|measured| measured.series.clone()).collect();
        Ok(Files::new(json, self.html()).with("series.csv.zst", series::packed(&all)?))
    }
}

const NOTES: [&str; 7] = [
    "Hyper-V and vSphere of the study are two storms here: boots of all machines at nearly the same time, and boots one after the other. \
     The published study does not say its schedule; the start times were chosen to match its published percentile.",
    "Percentiles are computed by the nearest-rank method over all sampling intervals, from the first boot to the last logoff. The published \
     study does not say its sampling interval.",
    "Operations of our caches are counted where they go to the disk: a write of the overflow is 2 MiB. Reads of the image are not counted; \
     in the study a server has them.",
    "Session hosts of the study are heavier than the model: its count of a request as an operation gives less than the published percentiles.",
    "A cache in RAM has 512 MB for a desktop and 2 GB for a session host of 25 users.",
    "The model runs faster than its time. The caches' own times, such as that between looks for free space, stay as they are.",
    "Not included: that a small write costs four operations on RAID 5 (the arithmetic on the terminal shows it), and disks by busy time.",
];
