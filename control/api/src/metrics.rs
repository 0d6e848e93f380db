//! Metrics: what is counted, under which name, and as Prometheus text.
//!
//! Each metric has one [`Family`] in [`FAMILIES`]: its name with the unit at the end, its kind and its meaning.
//! `docs/metrics.md` lists the same, and a test compares the two.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How a metric behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows, until what it counts ends.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Quantiles, a sum and a count.
    Summary,
}

impl Kind {
    /// The word in Prometheus text.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Summary => "summary",
        }
    }
}

/// A metric.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// Its name.
    pub name: &'static str,
    /// How it behaves.
    pub kind: Kind,
    /// The names of its labels.
    pub labels: &'static [&'static str],
    /// What it means.
    pub help: &'static str,
}

/// One value of a metric.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Sample {
    /// The metric's name; for a summary also with `_sum` or `_count` at its end.
    pub metric: String,
    /// Which one: `machine`, `served`, ...
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// The value.
    pub value: f64,
}

impl Sample {
    /// A value without labels. Above 2^53 it is rounded.
    pub fn new(metric: impl Into<String>, value: u64) -> Self {
        Self::real(metric, value as f64)
    }

    /// A value that is no whole number.
    pub fn real(metric: impl Into<String>, value: f64) -> Self {
        Self { metric: metric.into(), labels: BTreeMap::new(), value }
    }

    /// The same, with a label.
    #[must_use]
    pub fn with(mut self, label: &str, value: impl Into<String>) -> Self {
        self.labels.insert(label.to_owned(), value.into());
        self
    }
}

/// All metrics at a moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Stats {
    /// When.
    pub at_ms: u64,
    /// In the order of [`FAMILIES`], then by labels.
    pub samples: Vec<Sample>,
}

impl Stats {
    /// Sorts the samples.
    pub fn new(at_ms: u64, mut samples: Vec<Sample>) -> Self {
        samples.sort_by(|a, b| {
            let key = |sample: &Sample| {
                let place = FAMILIES.iter().position(|family| belongs(family, &sample.metric));
                (place, sample.labels.get("machine").cloned())
            };
            key(a).cmp(&key(b))
        });
        Self { at_ms, samples }
    }

    /// In Prometheus' text format, version 0.0.4.
    pub fn to_prometheus(&self) -> String {
        let mut text = String::new();
        for family in FAMILIES {
            let mut samples = self.samples.iter().filter(|sample| belongs(family, &sample.metric)).peekable();
            if samples.peek().is_none() {
                continue;
            }
            // Writing to a string does not fail.
            let _ = writeln!(text, "# HELP {} {}", family.name, family.help);
            let _ = writeln!(text, "# TYPE {} {}", family.name, family.kind.name());
            for sample in samples {
                let labels: Vec<String> = sample
                    .labels
                    .iter()
                    .map(|(name, value)| format!("{name}=\"{}\"", escape(value)))
                    .collect();
                let labels =
                    if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
                let _ = writeln!(text, "{}{labels} {}", sample.metric, sample.value);
            }
        }
        text
    }
}

/// The family of a sample's metric.
pub fn family(metric: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| belongs(family, metric))
}

fn belongs(family: &Family, metric: &str) -> bool {
    match metric.strip_prefix(family.name) {
        Some("") => true,
        Some("_sum" | "_count") => family.kind == Kind::Summary,
        _ => false,
    }
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

const MACHINE: &[&str] = &["machine"];

const fn counter(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Family {
    Family { name, kind: Kind::Counter, labels, help }
}

const fn gauge(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Family {
    Family { name, kind: Kind::Gauge, labels, help }
}

/// All metrics. A machine's begin when it starts and end when it is off.
#[rustfmt::skip]
pub const FAMILIES: &[Family] = &[
    gauge("headwater_build_info", &["version"], "Always 1; the label is the daemon's version."),
    gauge("headwater_start_time_seconds", &[], "When the daemon started, in seconds since 1970."),
    gauge("headwater_machines", &["state"], "Machines in a state."),
    gauge("headwater_alarms", &["kind"], "Alarms at this moment: of machines, of images (versions that are damaged), and of a store that does not answer."),
    gauge("headwater_damaged_versions", &[], "Versions that a scrub or an image verify found damaged, until one finds them whole or has repaired them, and images whose list of versions is; 1000 at most."),
    gauge("headwater_damaged_chunks", &[], "Damaged chunks of these versions: those that several versions share count for each. None are counted of one whose manifest is damaged."),
    gauge("headwater_store_answers", &[], "1 while the store answers, or was not asked; 0 where it failed to, or took more than ten seconds. The next three are as it answered last."),
    gauge("headwater_images", &[], "Images in the store."),
    gauge("headwater_store_bytes", &[], "Bytes that the store's files take."),
    gauge("headwater_store_age_seconds", &[], "How long ago the store was asked for the two: more than a minute where it does not answer soon."),
    gauge("headwater_free_bytes", &[], "Free bytes on the file system of the data directory."),
    gauge("headwater_host_ram_configured_bytes", &[], "RAM that all write caches together may use, as configured."),
    gauge("headwater_host_ram_limit_bytes", &[], "The same now: less under memory pressure."),
    gauge("headwater_host_ram_used_bytes", &[], "RAM that all write caches use, their index and buffers included."),
    counter("headwater_host_pressure_shrinks_total", &[], "How often memory pressure lowered the limit."),
    counter("headwater_host_reads_total", &[], "headwater_reads_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_read_operations_total", &["served"], "headwater_read_operations_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_read_bytes_total", &[], "headwater_read_bytes_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_read_blocks_total", &["served"], "headwater_read_blocks_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_image_read_bytes_total", &[], "headwater_image_read_bytes_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_writes_total", &[], "headwater_writes_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_written_bytes_total", &[], "headwater_written_bytes_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_written_blocks_total", &["stored"], "headwater_written_blocks_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_discards_total", &[], "headwater_discards_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_elided_blocks_total", &["reason"], "headwater_elided_blocks_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_packed_segments_total", &[], "headwater_packed_segments_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_packed_blocks_total", &[], "headwater_packed_blocks_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_spilled_segments_total", &[], "headwater_spilled_segments_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_spilled_blocks_total", &[], "headwater_spilled_blocks_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_spilled_bytes_total", &[], "headwater_spilled_bytes_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_overflow_operations_total", &["direction"], "headwater_overflow_operations_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_overflow_bytes_total", &["direction"], "headwater_overflow_bytes_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_cleaned_segments_total", &[], "headwater_cleaned_segments_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_cleaned_blocks_total", &[], "headwater_cleaned_blocks_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_evicted_segments_total", &[], "headwater_evicted_segments_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_paused_writes_total", &[], "headwater_paused_writes_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_paused_seconds_total", &[], "headwater_paused_seconds_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_throttled_writes_total", &[], "headwater_throttled_writes_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_refused_writes_total", &[], "headwater_refused_writes_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_disk_errors_total", &[], "headwater_disk_errors_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_corrupt_blocks_total", &[], "headwater_corrupt_blocks_total of all machines since the daemon started, those that are off included."),
    counter("headwater_host_commits_total", &[], "headwater_commits_total of all machines since the daemon started, those that are off included."),
    Family {
        name: "headwater_host_latency_seconds",
        kind: Kind::Summary,
        labels: &["operation", "served"],
        help: "headwater_latency_seconds of all machines since the daemon started, those that are off included: sums and counts, which can be added up.",
    },
    gauge("headwater_chunk_cache_limit_bytes", &[], "RAM that chunks of images may use, for all machines together."),
    gauge("headwater_chunk_cache_used_bytes", &[], "RAM that chunks of images use."),
    counter("headwater_chunk_cache_hits_total", &[], "Lookups of a chunk that found it in RAM."),
    counter("headwater_chunk_cache_misses_total", &[], "Chunks that were needed and not in RAM: they came from the chunk cache on disk, or from the store."),
    counter("headwater_chunk_cache_joined_total", &[], "Requests that joined a fetch that was under way."),
    counter("headwater_chunk_cache_failures_total", &[], "Fetches that failed, for instance because the chunk is damaged."),
    counter("headwater_chunk_cache_evictions_total", &[], "Chunks dropped from RAM to make room."),
    counter("headwater_chunk_cache_ahead_total", &[], "Chunks fetched before anybody asked for them: readahead and boot traces."),
    counter("headwater_chunk_cache_read_bytes_total", &[], "Bytes of chunks read from the store, packed."),
    gauge("headwater_chunk_disk_used_bytes", &[], "Disk that the chunk cache on disk uses."),
    counter("headwater_chunk_disk_hits_total", &[], "Chunks found in the chunk cache on disk."),
    counter("headwater_chunk_disk_evictions_total", &[], "Chunks dropped from it to make room."),
    counter("headwater_chunk_disk_damaged_total", &[], "Chunks in it that were damaged and were fetched again."),
    gauge("headwater_image_servers", &[], "Servers that images are read from."),
    gauge("headwater_image_servers_up", &[], "Of which can be used at this moment."),
    counter("headwater_image_requests_total", &[], "Requests sent to them."),
    counter("headwater_image_received_bytes_total", &[], "Bytes that came from them and were used."),
    counter("headwater_image_failovers_total", &[], "Reads that went on at another server after one had failed."),
    counter("headwater_image_wrong_answers_total", &[], "Answers of servers whose bytes were wrong."),
    counter("headwater_image_waits_total", &[], "Reads that waited because no server was left."),
    counter("headwater_image_waited_seconds_total", &[], "How long they waited, together."),
    gauge("headwater_image_longest_read_seconds", &[], "How long the longest read of the servers took since the daemon started, waits included."),
    gauge("headwater_machine_alarm", MACHINE, "1 while the machine's disk has no room for its writes, its flushes fail until it is started again, its reads wait because no server of its image answers, or its guest restarted and its start fails; else 0."),
    gauge("headwater_boot_seconds", MACHINE, "How long the last boot took, until the guest was up."),
    gauge("headwater_boot_bytes", MACHINE, "Bytes that were read from the image until the guest was up."),
    gauge("headwater_hydration_whole_bytes", MACHINE, "Bytes of the image, as they are stored, that --hydrate copies to this host; 0 without it."),
    gauge("headwater_hydration_done_bytes", MACHINE, "Of which are here: the image needs no server once these are all."),
    gauge("headwater_cache_info", &["machine", "mode", "buffering", "key_memory"], "Always 1; the labels are the write cache's mode, how its overflow disk is written and read (direct, buffered, auto: direct or auto: buffered), and where its key is: secret, locked or unlocked. The last two are empty without an overflow disk."),
    gauge("headwater_cache_ram_target_bytes", MACHINE, "RAM that the write cache may use."),
    gauge("headwater_cache_ram_share_bytes", MACHINE, "The same now: less where the host's limit is short."),
    gauge("headwater_cache_ram_used_bytes", MACHINE, "RAM that the write cache uses, index and packed blocks included."),
    gauge("headwater_cache_index_bytes", MACHINE, "Of which: the map of blocks and the records of segments."),
    gauge("headwater_cache_packed_bytes", MACHINE, "Of which: packed segments."),
    gauge("headwater_cache_packed_holds_bytes", MACHINE, "What the blocks in them would take as they are."),
    gauge("headwater_cache_disk_limit_bytes", MACHINE, "Overflow disk that the write cache may use."),
    gauge("headwater_cache_disk_used_bytes", MACHINE, "Overflow disk that the write cache uses."),
    counter("headwater_reads_total", MACHINE, "Read requests answered."),
    counter("headwater_read_operations_total", &["machine", "served"], "The same by where they were served: ram, packed (RAM), zero, disk (overflow), image. A request that is served from several counts for the slowest. Each write is stored in RAM first, so headwater_writes_total has those."),
    counter("headwater_read_bytes_total", MACHINE, "Bytes that they asked for."),
    counter("headwater_read_blocks_total", &["machine", "served"], "4 KiB blocks read from the write cache, by where they were: ram, packed (RAM), zero, disk (overflow)."),
    counter("headwater_image_read_bytes_total", MACHINE, "Bytes read from the image."),
    counter("headwater_writes_total", MACHINE, "Write requests answered."),
    counter("headwater_written_bytes_total", MACHINE, "Bytes that they brought."),
    counter("headwater_written_blocks_total", &["machine", "stored"], "4 KiB blocks stored: in_place, or in a new slot."),
    counter("headwater_discards_total", MACHINE, "Discards and zero writes answered."),
    counter("headwater_elided_blocks_total", &["machine", "reason"], "4 KiB blocks that take no space: written as zero, written equal to the image, or discarded."),
    counter("headwater_packed_segments_total", MACHINE, "2 MiB segments that were packed."),
    counter("headwater_packed_blocks_total", MACHINE, "Live blocks in them."),
    counter("headwater_spilled_segments_total", MACHINE, "2 MiB segments written to the overflow disk."),
    counter("headwater_spilled_blocks_total", MACHINE, "Live blocks in them."),
    counter("headwater_spilled_bytes_total", MACHINE, "Bytes written to the overflow disk."),
    counter("headwater_overflow_operations_total", &["machine", "direction"], "Reads and writes of overflow files, those of cleaning included. Commits of a persistent disk to its map are not counted."),
    counter("headwater_overflow_bytes_total", &["machine", "direction"], "Bytes of these reads and writes."),
    counter("headwater_cleaned_segments_total", MACHINE, "Segments on the overflow disk that were cleaned."),
    counter("headwater_cleaned_blocks_total", MACHINE, "Live blocks that cleaning moved."),
    counter("headwater_evicted_segments_total", MACHINE, "Segments whose copy in RAM was dropped, because the disk has them too."),
    counter("headwater_paused_writes_total", MACHINE, "Writes that had to wait for room."),
    counter("headwater_paused_seconds_total", MACHINE, "How long they waited, in all."),
    counter("headwater_throttled_writes_total", MACHINE, "Writes answered microseconds to milliseconds later, because room was short and the disk slower than the machine."),
    counter("headwater_refused_writes_total", MACHINE, "Writes refused for lack of room."),
    counter("headwater_disk_errors_total", MACHINE, "Reads, writes, syncs and reservations of the overflow disk that failed."),
    counter("headwater_corrupt_blocks_total", MACHINE, "Blocks on the overflow disk that were not what was written."),
    counter("headwater_commits_total", MACHINE, "Commits of a persistent disk: flushes that arrive together share one, and some are made for room."),
    Family {
        name: "headwater_latency_seconds",
        kind: Kind::Summary,
        labels: &["machine", "operation", "served", "quantile"],
        help: "How long requests took, since the machine started: read from ram, packed or zero (finished at once: where the slowest block was), from disk or from the image; write at once (ram) or after a wait (waited). One of 64 that were finished at once is timed.",
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_unit_and_kind() {
        for (index, family) in FAMILIES.iter().enumerate() {
            assert!(family.name.starts_with("headwater_"), "{}", family.name);
            assert_eq!(family.kind == Kind::Counter, family.name.ends_with("_total"), "{}", family.name);
            assert!(family.help.ends_with('.') && !family.help.contains('\n'), "{}", family.name);
            assert!(FAMILIES[..index].iter().all(|other| other.name != family.name), "{} twice", family.name);
        }
    }

    #[test]
    fn text_is_grouped_and_escaped() {
        let stats = Stats::new(
            1,
            vec![
                Sample::new("headwater_reads_total", 3).with("machine", "b"),
                Sample::real("headwater_latency_seconds_sum", 0.5).with("machine", "a\"\\"),
                Sample::new("headwater_reads_total", 1 << 40).with("machine", "a"),
                Sample::new("headwater_images", 2),
            ],
        );
        let text = stats.to_prometheus();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "# HELP headwater_images Images in the store.");
        assert_eq!(lines[1..3], ["# TYPE headwater_images gauge", "headwater_images 2"]);
        assert_eq!(
            lines[5..7],
            ["headwater_reads_total{machine=\"a\"} 1099511627776", "headwater_reads_total{machine=\"b\"} 3"]
        );
        assert_eq!(lines[9], "headwater_latency_seconds_sum{machine=\"a\\\"\\\\\"} 0.5");
    }
}
