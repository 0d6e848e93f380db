//! A study: cases with the figures that a publication prints, and variants of the load that each case is run with.

use headwater_volume::{Buffering, CacheMode};
use serde::Serialize;

use crate::load::{Content, Job, Line, Sample};
use crate::model::Model;
use crate::peers::Peer;

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

/// What a case measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    /// The raw disk.
    Raw,
    /// Our write cache.
    Cache(Cache),
    /// Another program's overlay. It is left out if the program is missing.
    Peer(Peer),
}

/// One case of a study.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Short name, for files.
    pub name: &'static str,
    /// For people.
    pub title: &'static str,
    /// What is measured.
    pub system: System,
    /// A model that the raw disk or the overflow is slowed down to.
    pub model: Option<Model>,
    /// Bytes that are worked on.
    pub set_bytes: u64,
    /// IOPS of the publication, and their origin.
    pub printed: Option<(f64, Source)>,
}

/// One way to run all cases: what a publication leaves open is run in several.
#[derive(Clone, Debug, Serialize)]
pub struct Variant {
    /// Short name, for files.
    pub name: String,
    /// For people.
    pub title: String,
    /// Whether the plots show it. All tables do.
    pub is_plotted: bool,
    /// A job of each worker. A job whose set is 0 works on the whole set of a case.
    pub jobs: Vec<Job>,
}

impl Variant {
    /// One kind of request from alike workers, on the whole set of a case.
    pub fn uniform(
        name: &str,
        title: &str,
        line: Line,
        workers: usize,
        depth: usize,
        content: Content,
    ) -> Self {
        let job = Job { start_bytes: 0, set_bytes: 0, lines: vec![line], depth, content };
        Self { name: name.into(), title: title.into(), is_plotted: true, jobs: vec![job; workers] }
    }

    /// The load of a case.
    pub fn jobs(&self, set_bytes: u64) -> Vec<Job> {
        let of_case = |job: &Job| Job {
            set_bytes: if job.set_bytes == 0 { set_bytes } else { job.set_bytes },
            ..job.clone()
        };
        self.jobs.iter().map(of_case).collect()
    }

    /// Class of the contents that are written.
    pub fn content(&self) -> Content {
        self.jobs.first().map_or(Content::Incompressible, |job| job.content)
    }
}

/// A published experiment.
#[derive(Clone, Debug)]
pub struct Study {
    /// Its number.
    pub number: &'static str,
    /// The publication.
    pub origin: String,
    /// What it asks.
    pub title: &'static str,
    /// The load in a sentence.
    pub load: String,
    /// Facts that a reader needs to judge the figures.
    pub notes: &'static [&'static str],
    /// The case that all ratios are to.
    pub baseline: &'static str,
    /// Name of that case in a sentence.
    pub against: &'static str,
    /// The case in each large figure of the page.
    pub headlines: &'static [&'static str],
    /// The cases, in the publication's order.
    pub cases: Vec<Case>,
    /// Ways to run them.
    pub variants: Vec<Variant>,
}

impl Study {
    /// The study with writes that bring blocks of a sample in place of random bytes.
    pub fn with_data(mut self, sample: Sample) -> Self {
        for variant in &mut self.variants {
            let jobs = variant.jobs.iter_mut().filter(|job| job.content == Content::Incompressible);
            let changed = jobs.map(|job| job.content = Content::Sample(sample)).count();
            if changed > 0 {
                variant.title.push_str(", data of a file");
            }
        }
        self
    }

    /// A case by its name.
    pub fn case(&self, name: &str) -> Option<&Case> {
        self.cases.iter().find(|case| case.name == name)
    }

    /// The publication's ratio of a case to its baseline.
    pub fn printed_ratio(&self, case: &Case) -> Option<f64> {
        Some(case.printed?.0 / self.case(self.baseline)?.printed?.0)
    }

    /// Whether there are printed figures.
    pub fn is_published(&self) -> bool {
        self.cases.iter().any(|case| case.printed.is_some())
    }
}
