//! Study 004: a cloud disk with the limits of Azure's P10, against one with the limits of an ephemeral disk (2020).

use headwater_volume::{Buffering, CacheMode};

use super::{MIB, mix};
use crate::load::Content;
use crate::model::{EPHEMERAL, Model, P10};
use crate::study::{Cache, Case, Source, Study, System, Variant};

/// The study; with small sizes for a quick run.
pub fn study_004(is_quick: bool) -> Study {
    let (set_bytes, ram_bytes) = if is_quick { (24 * MIB, 16 * MIB) } else { (1000 * MIB, 256 * MIB) };
    let cache = System::Cache(Cache { mode: CacheMode::RamDisk, ram_bytes, buffering: Buffering::Direct });
    let case = |name, title, system, model, iops: Option<f64>| Case {
        name,
        title,
        system,
        model: Some(Model::Caps(model)),
        set_bytes,
        printed: iops.map(|iops| (iops, Source::Printed)),
    };
    let variant = Variant::uniform(
        "8x32",
        "8 workers, 32 in flight each",
        mix(4096, 80),
        8,
        32,
        Content::Incompressible,
    );
    Study {
        number: "004",
        origin: "A study of ephemeral OS disks in a cloud (2020)".into(),
        title: "Does a small RAM cache make a slow disk feel like a fast one?",
        load: "4 KiB requests, 80 % writes, 80 % random, 8 workers, 32 requests in flight each".into(),
        notes: &[
            "The two disks are models: operations on a local file are started no faster than the caps of the disks. \
             The local disk must be faster than the caps. All else is measured.",
            "P10 has 3,500 IOPS and 170 MiB/s while it bursts, the ephemeral disk 16,000 IOPS and 128 MB/s. \
             Their latencies, 2.5 and 0.3 ms, are assumptions.",
            "The original prints 88 % of the cap of P10. A model disk without other limits reaches its cap.",
            "The fio figures of the original, 42.8 to 4,003 MiB/s, exceed every cap, because they measure the page cache. Here fio runs its three jobs \
             on the local disk itself, through the page cache and past it: the difference is the effect of the page cache. These figures are not compared with the original's.",
            "The original's sizes and depths of the last two jobs are not printed; those here are assumptions. Sizes are limited to half of the free disk.",
            "Volumes run inside the program that sends the load, over an empty disk: no guest, and no protocol unless the run names one.",
        ],
        baseline: "p10",
        against: "the plain P10",
        headlines: &["p10-headwater", "ephemeral", "ephemeral-headwater"],
        cases: vec![
            case("p10", "P10", System::Raw, P10, Some(3064.59)),
            case("p10-headwater", "P10 + 256 MB RAM", cache, P10, None),
            case("ephemeral", "Ephemeral disk", System::Raw, EPHEMERAL, Some(15_977.28)),
            case("ephemeral-headwater", "Ephemeral disk + 256 MB RAM", cache, EPHEMERAL, None),
        ],
        variants: vec![variant],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_printed_ratio_and_depth_follow_from_the_printed_figures() {
        let study = study_004(false);
        let ratio = study.printed_ratio(study.case("ephemeral").unwrap()).unwrap();
        assert_eq!(format!("{ratio:.2}"), "5.21");
        let in_flight: usize = study.variants[0].jobs.iter().map(|job| job.depth).sum();
        // Little's law: IOPS times mean latency is the number of requests in flight.
        for (iops, latency_ms) in [(3064.59, 83.5275), (15_977.28, 16.0204)] {
            let found: f64 = iops * latency_ms / 1000.0;
            assert_eq!(found.round(), in_flight as f64);
        }
    }
}
