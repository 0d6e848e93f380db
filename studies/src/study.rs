//! A study: cases with the figures that a publication prints, and variants of the load that each case is run with.

use headwater_volume::{Buffering, CacheMode};
use serde::Serialize;

use crate::load::{Content, Job};

/// The origin of a figure of the publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// The study prints it.
    Printed,
    /// It follows from printed figures.
    Derived,
}

/// A write cache over an empty disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// The mode of the cache.
    pub mode: CacheMode,
    /// Its limit of RAM. Mode `disk` has a small limit of its own.
    pub ram_bytes: u64,
    /// Whether its overflow goes past the page cache.
    pub buffering: Buffering,
}

/// One case of a study.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Short name, for files.
    pub name: &'static str,
    /// For people.
    pub title: &'static str,
    /// `None`: the raw disk.
    pub cache: Option<Cache>,
    /// Bytes that are worked on.
    pub set_bytes: u64,
    /// IOPS of the publication.
    pub printed_iops: f64,
    /// Their origin.
    pub source: Source,
}

/// One way to run all cases: what a publication leaves open is run in several.
#[derive(Clone, Debug, Serialize)]
pub struct Variant {
    /// Short name, for files.
    pub name: &'static str,
    /// For people.
    pub title: &'static str,
    /// Whether the plots show it. All tables do.
    pub is_plotted: bool,
    /// Length of each request.
    pub request_bytes: u32,
    /// Alignment of random requests.
    pub alignment_bytes: u32,
    /// Share of reads.
    pub read_percent: u8,
    /// Share of requests that go anywhere.
    pub random_percent: u8,
    /// Workers.
    pub workers: usize,
    /// Requests of each worker in flight.
    pub depth: usize,
    /// What is written.
    pub content: Content,
}

impl Variant {
    /// The load of a case.
    pub fn job(&self, set_bytes: u64) -> Job {
        Job {
            set_bytes,
            request_bytes: self.request_bytes,
            alignment_bytes: self.alignment_bytes,
            read_percent: self.read_percent,
            random_percent: self.random_percent,
            workers: self.workers,
            depth: self.depth,
            content: self.content,
        }
    }
}

/// A published experiment.
#[derive(Clone, Debug)]
pub struct Study {
    /// Its number.
    pub number: &'static str,
    /// The publication.
    pub origin: &'static str,
    /// What it asks.
    pub title: &'static str,
    /// The load in a sentence.
    pub load: &'static str,
    /// Facts that a reader needs to judge the figures.
    pub notes: &'static [&'static str],
    /// The case that all ratios are to.
    pub baseline: &'static str,
    /// The case in each large figure of the page.
    pub headlines: &'static [&'static str],
    /// The cases, in the publication's order.
    pub cases: Vec<Case>,
    /// Ways to run them.
    pub variants: Vec<Variant>,
}

impl Study {
    /// A case by its name.
    pub fn case(&self, name: &str) -> Option<&Case> {
        self.cases.iter().find(|case| case.name == name)
    }

    /// The publication's ratio of a case to its baseline.
    pub fn printed_ratio(&self, case: &Case) -> f64 {
        self.case(self.baseline).map_or(f64::NAN, |baseline| case.printed_iops / baseline.printed_iops)
    }
}
