//! Study 001: the cases of a comparison of write caches (2015), with its published figures.
//!
//! One worker keeps 16 requests of 4 KiB in flight, 80 % writes, 80 % random. The publication does not state the
//! depth. It follows from the latencies: 16 / 4,923 IOPS = 3.25 ms ("> 3 ms"), and 16 / 28,412 = 0.56 ms ("< 1 ms").

use headwater_volume::{Buffering, CacheMode};

use super::{MIB, mix};
use crate::load::Content;
use crate::study::{Cache, Case, Source, Study, System, Variant};

struct Sizes {
    small_set_bytes: u64,
    large_set_bytes: u64,
    large_ram_bytes: u64,
    small_ram_bytes: u64,
}

/// The published sizes.
const FULL: Sizes = Sizes {
    small_set_bytes: 1000 * MIB,
    large_set_bytes: 10_000 * MIB,
    large_ram_bytes: 4096 * MIB,
    small_ram_bytes: 64 * MIB,
};

/// Small sizes for a quick run: they show that all cases run, but not how fast they are.
const QUICK: Sizes = Sizes {
    small_set_bytes: 8 * MIB,
    large_set_bytes: 40 * MIB,
    large_ram_bytes: 28 * MIB,
    small_ram_bytes: 16 * MIB,
};

/// The study; with small sizes for a quick run.
pub fn study_001(is_quick: bool) -> Study {
    let sizes = if is_quick { QUICK } else { FULL };
    let cache = |mode, ram_bytes| System::Cache(Cache { mode, ram_bytes, buffering: Buffering::Direct });
    let case = |name, title, system, set_bytes, printed| Case {
        name,
        title,
        system,
        model: None,
        set_bytes,
        printed,
    };
    let (ram_disk, large, small) = (CacheMode::RamDisk, sizes.large_ram_bytes, sizes.small_ram_bytes);
    let (large_set, small_set) = (sizes.large_set_bytes, sizes.small_set_bytes);
    let printed = |iops| Some((iops, Source::Printed));
    let derived = |iops| Some((iops, Source::Derived));
    Study {
        number: "001",
        origin: "A comparison of write caches for provisioned desktops (2015)".into(),
        title: "Is a RAM cache with overflow faster than the plain disk?",
        load: "4 KiB requests, 80 % writes, 80 % random, one worker, 16 requests in flight".into(),
        notes: &[
            "The original ran in a Windows guest with the driver of a commercial product. Here the volumes run inside the \
             program that sends the load, over an empty disk: no guest, and no protocol unless the run names one. Nothing is modelled, and \
             no parameter is fitted to the printed figures.",
            "The original does not print the queue depth, the alignment, the content of writes or the number of \
             runs. The depth follows from its latencies. Alignment and content are run both ways.",
            "Requests follow Iometer's rules: direction and randomness are drawn for each request. A sequential \
             request begins where the request before it ended, whatever its direction.",
            "Each working set is written once before it is measured. Each ratio divides a case's result by the raw disk's result of the same round.",
        ],
        baseline: "raw-10g",
        against: "the raw disk",
        headlines: &["ram-64m-set-10g", "ram-4g-set-10g", "ram-4g-set-1g", "disk-set-10g"],
        cases: vec![
            case(
                "ram-4g-set-1g",
                "4 GB RAM + overflow, 1 GB set",
                cache(ram_disk, large),
                small_set,
                derived(63_700.0),
            ),
            case(
                "ram-4g-set-10g",
                "4 GB RAM + overflow, 10 GB set",
                cache(ram_disk, large),
                large_set,
                derived(31_850.0),
            ),
            case("raw-10g", "Raw disk, 10 GB set", System::Raw, large_set, printed(28_412.0)),
            case(
                "disk-set-10g",
                "Cache on disk, 10 GB set",
                cache(CacheMode::Disk, small),
                large_set,
                derived(14_400.0),
            ),
            case(
                "ram-64m-set-10g",
                "64 MB RAM + overflow, 10 GB set",
                cache(ram_disk, small),
                large_set,
                printed(4923.0),
            ),
        ],
        variants: vec![
            variant("4096-incompressible", "aligned to 4,096 bytes", 4096, Content::Incompressible),
            variant("512-incompressible", "aligned to 512 bytes", 512, Content::Incompressible),
            variant(
                "4096-reused",
                "aligned to 4,096 bytes, one buffer for all writes",
                4096,
                Content::Reused,
            ),
            variant("512-reused", "aligned to 512 bytes, one buffer for all writes", 512, Content::Reused),
        ],
    }
}

fn variant(name: &str, title: &str, alignment_bytes: u32, content: Content) -> Variant {
    let line = mix(alignment_bytes, 80);
    // A buffer that all writes share favours a cache that compresses, so this variant is not plotted.
    Variant {
        is_plotted: content == Content::Incompressible,
        ..Variant::uniform(name, title, line, 1, 16, content)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_ratios_are_those_of_the_publication() {
        let study = study_001(false);
        let ratios: Vec<String> =
            study.cases.iter().map(|case| format!("{:.2}", study.printed_ratio(case).unwrap())).collect();
        assert_eq!(ratios, ["2.24", "1.12", "1.00", "0.51", "0.17"]);
        // "12.93 times the 64 MB case", and "half of the case that fits".
        let iops = |name| study.case(name).unwrap().printed.unwrap().0;
        assert!((iops("ram-4g-set-1g") / iops("ram-64m-set-10g") - 12.93).abs() < 0.02);
        assert_eq!(iops("ram-4g-set-10g") * 2.0, iops("ram-4g-set-1g"));
    }

    #[test]
    fn the_depth_follows_from_the_printed_latencies() {
        let study = study_001(false);
        let depth = study.variants[0].jobs[0].depth as f64;
        let ms = |name| depth / study.case(name).unwrap().printed.unwrap().0 * 1000.0;
        assert!(ms("ram-64m-set-10g") > 3.0 && ms(study.baseline) < 1.0);
    }
}
