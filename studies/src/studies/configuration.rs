//! Makes a study from a configuration of Iometer, to be run on the raw disk and on write caches, and writes its results in
//! Iometer's format.

use anyhow::{Result, anyhow, bail};
use headwater_sizes::Date;
use headwater_volume::{Buffering, CacheMode};

use super::MIB;
use crate::icf::{Configuration, WorkerPlan};
use crate::iometer_csv::{self, Run, Worker};
use crate::load::{Content, Job, Part};
use crate::run::{Plan, Results};
use crate::study::{Cache, Case, Study, System, Variant};

const SMALL_RAM_BYTES: u64 = 64 * MIB;

/// The study of a configuration. `whole_bytes`: the size of the disk for workers that use the whole disk.
pub fn study_icf(configuration: &Configuration, origin: &str, whole_bytes: Option<u64>) -> Result<Study> {
    let set_bytes = configuration.end_bytes().or(whole_bytes).ok_or_else(|| {
        anyhow!(
            "a worker of {origin} uses the whole disk (maximum size 0); give the size of the disk with --size"
        )
    })?;
    let variants = variants(configuration, set_bytes)?;
    let cache = |mode, ram_bytes| System::Cache(Cache { mode, ram_bytes, buffering: Buffering::Direct });
    let case = |name, title, system| Case { name, title, system, model: None, set_bytes, printed: None };
    let (workers, ram_disk) = (configuration.workers.len(), CacheMode::RamDisk);
    Ok(Study {
        number: "icf",
        origin: format!("Configuration of Iometer: {origin}"),
        title: "An Iometer configuration on the raw disk and on write caches",
        load: format!("Workers: {workers}, on {}", headwater_block::size::format(set_bytes)),
        notes: &[
            "Requests follow Iometer's rules. All workers share one disk, whatever targets the configuration names. \
             Requests of the ramp up time do not count. Writes are incompressible.",
            "Volumes run inside the program that sends the load, over an empty disk: no guest, and no protocol unless the run names one.",
            "The working set is written once before it is measured. Each ratio divides a case's result by the raw disk's result of the same round.",
        ],
        baseline: "raw",
        against: "the raw disk",
        headlines: &["ram-fits", "ram-64m", "disk"],
        cases: vec![
            case("raw", "Raw disk", System::Raw),
            case(
                "ram-fits",
                "RAM cache, all fits",
                cache(ram_disk, set_bytes + set_bytes / 8 + SMALL_RAM_BYTES),
            ),
            case("ram-64m", "64 MB RAM + overflow", cache(ram_disk, SMALL_RAM_BYTES)),
            case("disk", "Cache on disk", cache(CacheMode::Disk, 0)),
        ],
        variants,
    })
}

/// One variant for each step. In step N, each worker that has a specification N runs it.
fn variants(configuration: &Configuration, set_bytes: u64) -> Result<Vec<Variant>> {
    let steps = configuration.workers.iter().map(|worker| worker.specifications.len()).max().unwrap_or(0);
    let mut variants = Vec::new();
    for step in 0..steps {
        let (mut jobs, mut names) = (Vec::new(), Vec::new());
        for worker in &configuration.workers {
            let Some(name) = worker.specifications.get(step) else { continue };
            let Some(specification) = configuration.specification(name) else { continue };
            let size_bytes = match worker.size_bytes {
                0 => set_bytes.saturating_sub(worker.start_bytes),
                size_bytes => size_bytes,
            };
            if specification.lines.iter().any(|line| u64::from(line.request_bytes) > size_bytes) {
                bail!(
                    "requests of {name:?} are longer than the part of the disk that {:?} uses",
                    worker.name
                );
            }
            jobs.push(Job {
                start_bytes: worker.start_bytes,
                set_bytes: size_bytes,
                lines: specification.lines.clone(),
                depth: worker.outstanding,
                content: Content::Incompressible,
            });
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        let name = format!("step-{}", step + 1);
        variants.push(Variant { name, title: names.join(" and "), is_plotted: true, jobs });
    }
    Ok(variants)
}

/// The results in Iometer's format: for each system, the round with the median IOPS. `now_s`: seconds since 1970.
pub fn iometer_results(configuration: &Configuration, plan: &Plan, results: &Results, now_s: u64) -> String {
    let mut runs = Vec::new();
    for (step, variant) in plan.study.variants.iter().enumerate() {
        for case in &plan.study.cases {
            let Some(sample) = results.median_of(case.name, &variant.name) else { continue };
            let working = configuration.workers.iter().filter_map(|worker| {
                let specification = worker.specifications.get(step)?;
                configuration.specification(specification).map(|_| (worker, specification))
            });
            let parts = working.zip(&variant.jobs).zip(&sample.outcomes.workers);
            let worker =
                |(((worker, specification), job), part): (((&WorkerPlan, &String), &Job), &Part)| Worker {
                    name: worker.name.clone(),
                    specification: specification.clone(),
                    depth: job.depth,
                    first_sector: job.start_bytes / 512,
                    sectors: job.set_bytes / 512,
                    part: part.clone(),
                };
            runs.push((case.title, variant.title.as_str(), parts.map(worker).collect::<Vec<_>>()));
        }
    }
    let runs: Vec<Run<'_>> = runs
        .iter()
        .map(|(system, specifications, workers)| Run { system, specifications, workers })
        .collect();
    let (date, second) = (Date::of_seconds(now_s), now_s % 86_400);
    let written = format!("{date} {:02}:{:02}:{:02} UTC", second / 3600, second / 60 % 60, second % 60);
    iometer_csv::text(configuration, &runs, &written)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::icf::TWO_WORKERS;
    use crate::load::{Direction, Item, Requests};

    #[test]
    fn each_worker_runs_its_specifications_in_order() {
        let configuration = Configuration::parse(TWO_WORKERS).unwrap();
        let study = study_icf(&configuration, "two.icf", None).unwrap();
        assert!(study.cases.iter().all(|case| case.set_bytes == (1000 << 20) + (512 << 10)));
        let titles: Vec<&str> = study.variants.iter().map(|variant| variant.title.as_str()).collect();
        assert_eq!(titles, ["boot and VDI, 4K; mixed", "VDI, 4K; mixed"]);
        let depths: Vec<usize> = study.variants[0].jobs.iter().map(|job| job.depth).collect();
        assert_eq!((depths, study.variants[1].jobs.len()), (vec![16, 1], 1));
    }

    #[test]
    fn a_sequential_specification_sends_the_expected_list() {
        // 20 sectors from sector 8, in requests of 8 sectors of 512 bytes: the third would exceed the range.
        let text = TWO_WORKERS
            .replace("4096,75,20,80,0,1,0,0\n\t65536,25,100,0,0,4,4096,0", "4096,100,100,0,0,1,0,0")
            .replace("1024,2048000,2", "20,8,2");
        let configuration = Configuration::parse(&text).unwrap();
        let study = study_icf(&configuration, "hand.icf", None).unwrap();
        let job = study.variants[0].jobs[1].clone();
        let mut requests = Requests::new(job, 1);
        let sent: Vec<Item> = (0..5).map(|_| requests.draw()).collect();
        let read = |offset| Item { direction: Direction::Read, offset, len: 4096, delay_ms: 0 };
        assert_eq!(sent, [read(4096), read(8192), read(4096), read(8192), read(4096)]);
    }

    #[test]
    fn a_worker_on_the_whole_disk_needs_its_size() {
        let text = TWO_WORKERS.replace("2048000,0,2", "0,0,2");
        let configuration = Configuration::parse(&text).unwrap();
        let error = study_icf(&configuration, "whole.icf", None).unwrap_err().to_string();
        assert!(error.contains("whole.icf") && error.contains("--size"), "{error}");
        let study = study_icf(&configuration, "whole.icf", Some(2000 << 20)).unwrap();
        assert_eq!(study.variants[0].jobs[0].set_bytes, 2000 << 20);
    }
}
