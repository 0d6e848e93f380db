//! Writes the page of study 003, for the model and for a guest.

use headwater_report::page::{Column, Page, Tile, Tone};

use super::s003::Scenario;

/// The contents of the page.
pub struct Copies<'a> {
    /// The first paragraph: the load, and which parts of it are modelled.
    pub introduction: &'a str,
    /// Warnings, shown before the figures.
    pub warnings: &'a [String],
    /// Storage writes of each scenario with a RAM cache, in percent of those without a RAM cache.
    pub shares: Vec<(&'a Scenario, Option<f64>)>,
    /// The caption of the table.
    pub caption: &'a str,
    /// Its columns.
    pub head: &'a [Column],
    /// Its rows.
    pub rows: &'a [Vec<String>],
    /// Captions and plots.
    pub plots: Vec<(&'a str, String)>,
    /// Explanations of the figures.
    pub notes: &'a [&'static str],
}

impl Copies<'_> {
    /// The page. The caller adds the facts about the host and the run.
    pub fn page(&self) -> Page {
        let mut page =
            Page::new("Headwater study 003", "What does a RAM cache do for a desktop that copies files?");
        page.paragraph(Tone::Plain, self.introduction);
        self.warnings.iter().for_each(|warning| page.paragraph(Tone::Warning, warning));
        let tile = |(scenario, share): &(&Scenario, Option<f64>)| Tile {
            value: share.map_or("-".into(), |percent| format!("{percent:.1} %")),
            label: format!("of the storage writes, {}", scenario.title),
            note: format!("published: {} %", scenario.printed_writes_percent),
        };
        page.tiles(&self.shares.iter().map(tile).collect::<Vec<_>>());
        page.table(self.caption, self.head, self.rows);
        if !self.plots.is_empty() {
            page.heading("Over time");
            self.plots.iter().for_each(|(caption, plot)| page.plot(caption, plot));
        }
        page.heading("How to read the figures");
        page.list(&self.notes.iter().map(|note| (*note).to_owned()).collect::<Vec<_>>());
        page
    }
}
