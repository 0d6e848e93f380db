//! Study 002: repeats a publication of 2013 about the effect of buffering on a cache on disk.

use headwater_volume::{Buffering, CacheMode};

use super::{MIB, mix};
use crate::load::Content;
use crate::peers::Peer;
use crate::study::{Cache, Case, Source, Study, System, Variant};

/// The study; with small sizes for a quick run.
pub fn study_002(is_quick: bool) -> Study {
    let set_bytes = if is_quick { 32 * MIB } else { 1000 * MIB };
    let cache = |buffering| System::Cache(Cache { mode: CacheMode::Disk, ram_bytes: 0, buffering });
    let case = |name, title, system, printed| Case { name, title, system, model: None, set_bytes, printed };
    let printed = |iops| Some((iops, Source::Printed));
    let variant = |depth: usize| {
        let (name, title) = (format!("depth-{depth}"), format!("{depth} in flight"));
        Variant::uniform(&name, &title, mix(4096, 100), 1, depth, Content::Incompressible)
    };
    Study {
        number: "002",
        origin: "A study of intermediate buffering of a cache on device disk (2013)".into(),
        title: "Must a cache on disk be slower than its disk?",
        load: "4 KiB requests, 80 % writes, all random, on a set of 1,000 MiB".into(),
        notes: &[
            "The original switched a setting of the driver of a commercial product. Here, direct I/O stands for the setting off, \
             and I/O through the page cache for on. The original prints \"more than 20,000\" IOPS for the latter. A later hotfix \
             of the product removed the penalty.",
            "A working set that fits in the machine's memory is served partly from the page cache. Results through the page cache \
             therefore show the speed of memory as well as that of the disk.",
            "The mode auto measures the disk once and then chooses direct or buffered. There is no published figure for it.",
            "The qcow2 overlays show the same choice in another program. qemu-nbd serves them on a unix socket, and the load reaches them \
             over NBD, which costs time. --over nbd puts the same protocol before the caches. The original does not have them.",
            "The original does not print the queue depth, so three depths are run. It ran for 900 s.",
            "Each working set is written once before it is measured. Each ratio divides a case's result by the raw disk's result of the same round.",
        ],
        baseline: "raw",
        against: "the raw disk",
        headlines: &["direct", "buffered", "auto"],
        cases: vec![
            case("raw", "Raw disk", System::Raw, printed(27_000.0)),
            case("direct", "Cache on disk, direct", cache(Buffering::Direct), printed(1000.0)),
            case("buffered", "Cache on disk, buffered", cache(Buffering::Buffered), printed(20_000.0)),
            case("auto", "Cache on disk, auto", cache(Buffering::Auto), None),
            case("qcow2-none", "qcow2 overlay, cache=none", System::Peer(Peer::Direct), None),
            case("qcow2-writeback", "qcow2 overlay, cache=writeback", System::Peer(Peer::Writeback), None),
        ],
        variants: vec![variant(16), variant(1), variant(32)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_ratios_are_those_of_the_publication() {
        let study = study_002(false);
        let ratio = |name| study.printed_ratio(study.case(name).unwrap());
        let shown = ["direct", "buffered"].map(|name| format!("{:.2}", ratio(name).unwrap()));
        assert_eq!(shown, ["0.04", "0.74"]);
        assert_eq!(ratio("auto"), None);
    }
}
