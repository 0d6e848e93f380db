//! Describes a study: cases with their published figures, and variants of the load for each case.

use headwater_volume::{Buffering, CacheMode};
use serde::Serialize;

use crate::load::{Content, Job, Line, Sample};
use crate::model::Model;
use crate::peers::Peer;

/// The origin of a published figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// The publication prints it.
    Printed,
    /// It is computed from published figures.
    Derived,
}

/// A write cache over an empty disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// The mode of the write cache.
    pub mode: CacheMode,
    /// Its RAM limit. Mode `disk` has a small limit of its own.
    pub ram_bytes: u64,
    /// Whether its overflow uses direct I/O.
    pub buffering: Buffering,
}

/// The system under test in a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    /// The raw disk.
    Raw,
    /// Headwater's write cache.
    Cache(Cache),
    /// The overlay of another program. The case is skipped if the program is missing.
    Peer(Peer),
}

/// One case of a study.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Short name for files.
    pub name: &'static str,
    /// Title for people.
    pub title: &'static str,
    /// The system under test.
    pub system: System,
    /// The model to whose speed the raw disk or the overflow is slowed down.
    pub model: Option<Model>,
    /// Size of the working set, in bytes.
    pub set_bytes: u64,
    /// Published IOPS, and the origin of the figure.
    pub printed: Option<(f64, Source)>,
}

/// One variant of the load. Parameters that a publication does not state are run in several variants.
#[derive(Clone, Debug, Serialize)]
pub struct Variant {
    /// Short name for files.
    pub name: String,
    /// Title for people.
    pub title: String,
    /// Whether it is plotted. Tables contain all variants.
    pub is_plotted: bool,
    /// One job for each worker. A job with a set of 0 bytes uses the whole working set of a case.
    pub jobs: Vec<Job>,
}

impl Variant {
    /// One kind of request from several equal workers, on the whole working set of a case.
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

    /// The jobs for a working set of this size.
    pub fn jobs(&self, set_bytes: u64) -> Vec<Job> {
        let of_case = |job: &Job| Job {
            set_bytes: if job.set_bytes == 0 { set_bytes } else { job.set_bytes },
            ..job.clone()
        };
        self.jobs.iter().map(of_case).collect()
    }

    /// The class of the written data.
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
    /// Its question.
    pub title: &'static str,
    /// The load in one sentence.
    pub load: String,
    /// Facts that a reader needs to judge the figures.
    pub notes: &'static [&'static str],
    /// The name of the case that is the denominator of all ratios.
    pub baseline: &'static str,
    /// The baseline's name in a sentence.
    pub against: &'static str,
    /// The cases that the page shows in large type.
    pub headlines: &'static [&'static str],
    /// The cases, in the publication's order.
    pub cases: Vec<Case>,
    /// The variants of the load.
    pub variants: Vec<Variant>,
}

impl Study {
    /// Replaces random data of writes by blocks of a sample.
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

    /// The case with this name.
    pub fn case(&self, name: &str) -> Option<&Case> {
        self.cases.iter().find(|case| case.name == name)
    }

    /// The published ratio of a case to its baseline.
    pub fn printed_ratio(&self, case: &Case) -> Option<f64> {
        Some(case.printed?.0 / self.case(self.baseline)?.printed?.0)
    }

    /// Whether the study has published figures.
    pub fn is_published(&self) -> bool {
        self.cases.iter().any(|case| case.printed.is_some())
    }
}
