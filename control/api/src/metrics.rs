//! The metrics of the daemon and of exports: their names, kinds, labels and meaning, and their output as Prometheus
//! text. The values come from elsewhere: the daemon and exports fill in each [`Sample`].
//!
//! Each metric has one [`Family`] in [`FAMILIES`]: its name with the unit at the end, its kind and its meaning.
//! `docs/metrics.md` lists the same, and a test compares the two.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The kind of a metric, as in Prometheus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only increases, until its subject ends.
    Counter,
    /// Increases and decreases.
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

/// One value of a metric at a moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Sample {
    /// The metric's name; for parts of a summary with `_sum` or `_count` at its end.
    pub metric: String,
    /// The labels, for instance `machine` or `served`.
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

    /// A value that is not a whole number.
    pub fn real(metric: impl Into<String>, value: f64) -> Self {
        Self { metric: metric.into(), labels: BTreeMap::new(), value }
    }

    /// Adds a label.
    #[must_use]
    pub fn with(mut self, label: &str, value: impl Into<String>) -> Self {
        self.labels.insert(label.to_owned(), value.into());
        self
    }
}

/// The values of all metrics at a moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Stats {
    /// When they were read.
    pub at_ms: u64,
    /// In the order of [`FAMILIES`], then by labels.
    pub samples: Vec<Sample>,
}

impl Stats {
    /// Creates the list and sorts the samples.
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

    /// The Prometheus text format, version 0.0.4.
    pub fn to_prometheus(&self) -> String {
        let mut text = String::new();
        for family in FAMILIES {
            let mut samples = self.samples.iter().filter(|sample| belongs(family, &sample.metric)).peekable();
            if samples.peek().is_none() {
                continue;
            }
            // Writing to a string cannot fail.
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

/// All metrics. Those with the label `machine` exist from the machine's start until it is off.
#[rustfmt::skip]
pub const FAMILIES: &[Family] = &[
    gauge("headwater_build_info", &["version"], "Always 1; the label is the daemon's version."),
    gauge("headwater_start_time_seconds", &[], "When the daemon started, in seconds since 1970."),
    gauge("headwater_machines", &["state"], "Machines in a state."),
    gauge("headwater_alarms", &["kind"], "Alarms at this moment: of machines, of images (versions that are damaged), and of a store that does not answer."),
    gauge("headwater_damaged_versions", &[], "Versions that a scrub or an image verify found damaged, until a later one finds them undamaged or repairs them, and images whose list of versions is damaged. The daemon remembers 1000 at most."),
    gauge("headwater_damaged_chunks", &[], "Damaged chunks of the versions that headwater_damaged_versions counts. A chunk that several versions share counts once for each of them. Of a version whose manifest is damaged, no chunk counts."),
    gauge("headwater_store_answers", &[], "1 if the store answers, or was not asked yet; 0 if it failed to answer, or took more than ten seconds. headwater_images, headwater_store_bytes and headwater_store_age_seconds are those of its last answer."),
    gauge("headwater_images", &[], "Images in the store."),
    gauge("headwater_store_bytes", &[], "Bytes of the store's files."),
    gauge("headwater_store_age_seconds", &[], "Age of headwater_images and headwater_store_bytes; more than a minute if the store answers slowly or not at all."),
    gauge("headwater_free_bytes", &[], "Free bytes on the file system of the data directory."),
    gauge("headwater_host_ram_configured_bytes", &[], "RAM that all write caches together may use, as configured."),
    gauge("headwater_host_ram_limit_bytes", &[], "The present limit of all write caches together: lower than the configured one under memory pressure."),
    gauge("headwater_host_ram_used_bytes", &[], "RAM that all write caches use, including index and buffers."),
    counter("headwater_host_pressure_shrinks_total", &[], "How often memory pressure lowered the limit."),
    counter("headwater_host_reads_total", &[], "Sum of headwater_reads_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_read_operations_total", &["served"], "Sum of headwater_read_operations_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_read_bytes_total", &[], "Sum of headwater_read_bytes_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_read_blocks_total", &["served"], "Sum of headwater_read_blocks_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_image_read_bytes_total", &[], "Sum of headwater_image_read_bytes_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_writes_total", &[], "Sum of headwater_writes_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_written_bytes_total", &[], "Sum of headwater_written_bytes_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_written_blocks_total", &["stored"], "Sum of headwater_written_blocks_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_discards_total", &[], "Sum of headwater_discards_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_elided_blocks_total", &["reason"], "Sum of headwater_elided_blocks_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_packed_segments_total", &[], "Sum of headwater_packed_segments_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_packed_blocks_total", &[], "Sum of headwater_packed_blocks_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_spilled_segments_total", &[], "Sum of headwater_spilled_segments_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_spilled_blocks_total", &[], "Sum of headwater_spilled_blocks_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_spilled_bytes_total", &[], "Sum of headwater_spilled_bytes_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_overflow_operations_total", &["direction"], "Sum of headwater_overflow_operations_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_overflow_bytes_total", &["direction"], "Sum of headwater_overflow_bytes_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_cleaned_segments_total", &[], "Sum of headwater_cleaned_segments_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_cleaned_blocks_total", &[], "Sum of headwater_cleaned_blocks_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_evicted_segments_total", &[], "Sum of headwater_evicted_segments_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_paused_writes_total", &[], "Sum of headwater_paused_writes_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_paused_seconds_total", &[], "Sum of headwater_paused_seconds_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_throttled_writes_total", &[], "Sum of headwater_throttled_writes_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_refused_writes_total", &[], "Sum of headwater_refused_writes_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_disk_errors_total", &[], "Sum of headwater_disk_errors_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_corrupt_blocks_total", &[], "Sum of headwater_corrupt_blocks_total over all machines since the daemon started, including machines that are off now."),
    counter("headwater_host_commits_total", &[], "Sum of headwater_commits_total over all machines since the daemon started, including machines that are off now."),
    Family {
        name: "headwater_host_latency_seconds",
        kind: Kind::Summary,
        labels: &["operation", "served"],
        help: "Sum of headwater_latency_seconds over all machines since the daemon started, including machines that are off now. Sums and counts only: quantiles cannot be added.",
    },
    gauge("headwater_chunk_cache_limit_bytes", &[], "RAM limit of the cache for chunks of images, which all machines share."),
    gauge("headwater_chunk_cache_used_bytes", &[], "RAM that the cache for chunks of images uses."),
    counter("headwater_chunk_cache_hits_total", &[], "Lookups of a chunk that found it in RAM."),
    counter("headwater_chunk_cache_misses_total", &[], "Lookups of a chunk that was not in RAM and came from the chunk cache on disk, or from the store."),
    counter("headwater_chunk_cache_joined_total", &[], "Requests for a chunk that another request was already fetching."),
    counter("headwater_chunk_cache_failures_total", &[], "Fetches of chunks that failed, for instance because the chunk is damaged."),
    counter("headwater_chunk_cache_evictions_total", &[], "Chunks evicted from RAM."),
    counter("headwater_chunk_cache_ahead_total", &[], "Chunks fetched before a machine requested them: readahead and boot traces."),
    counter("headwater_chunk_cache_read_bytes_total", &[], "Compressed bytes of chunks read from the store."),
    gauge("headwater_chunk_disk_used_bytes", &[], "Disk space that the chunk cache on disk uses."),
    counter("headwater_chunk_disk_hits_total", &[], "Chunks found in the chunk cache on disk."),
    counter("headwater_chunk_disk_evictions_total", &[], "Chunks evicted from the chunk cache on disk."),
    counter("headwater_chunk_disk_damaged_total", &[], "Chunks that were damaged in the chunk cache on disk, and were fetched again."),
    gauge("headwater_image_servers", &[], "Number of servers from which images are read."),
    gauge("headwater_image_servers_up", &[], "Number of servers from which images are read and that can be used now."),
    counter("headwater_image_requests_total", &[], "Requests sent to the servers from which images are read."),
    counter("headwater_image_received_bytes_total", &[], "Bytes received from the servers of images and used."),
    counter("headwater_image_failovers_total", &[], "Reads that were retried on another server after a server failed."),
    counter("headwater_image_wrong_answers_total", &[], "Answers of servers with wrong bytes (the hash did not match)."),
    counter("headwater_image_waits_total", &[], "Reads that waited because no server could be used."),
    counter("headwater_image_waited_seconds_total", &[], "Total time that reads waited because no server could be used."),
    gauge("headwater_image_longest_read_seconds", &[], "Duration of the longest read from an image server since the daemon started, including waits for a server that can be used."),
    gauge("headwater_machine_alarm", MACHINE, "1 if the machine's writes find no space, its flushes fail permanently (a restart of the machine helps), its reads wait because no server of its image answers, or its guest restarted and the start fails; else 0."),
    gauge("headwater_boot_seconds", MACHINE, "Duration of the last boot, until the guest was up."),
    gauge("headwater_boot_bytes", MACHINE, "Bytes read from the image until the guest was up."),
    gauge("headwater_hydration_whole_bytes", MACHINE, "Compressed bytes of the image that --hydrate copies to this host; 0 without --hydrate."),
    gauge("headwater_hydration_done_bytes", MACHINE, "Compressed bytes that --hydrate has copied. When all are copied, the image needs no server."),
    gauge("headwater_cache_info", &["machine", "mode", "buffering", "key_memory"], "Always 1; the labels are the write cache's mode, the access to its overflow disk (direct, buffered, auto: direct or auto: buffered), and the memory of its key: secret (memfd_secret), locked (mlock) or unlocked. The last two are empty without an overflow disk."),
    gauge("headwater_cache_ram_target_bytes", MACHINE, "RAM limit of the write cache, as configured."),
    gauge("headwater_cache_ram_share_bytes", MACHINE, "Present RAM limit of the write cache: lower than the configured one if the host's limit is short."),
    gauge("headwater_cache_ram_used_bytes", MACHINE, "RAM that the write cache uses, including index and packed (compressed) blocks."),
    gauge("headwater_cache_live_bytes", MACHINE, "Size of the blocks in the write cache, in RAM, packed and on the overflow disk. A packed block counts with its unpacked size."),
    gauge("headwater_cache_index_bytes", MACHINE, "RAM of the write cache's index: the map of blocks and the records of segments."),
    gauge("headwater_cache_packed_bytes", MACHINE, "RAM of the write cache's packed (compressed) segments."),
    gauge("headwater_cache_packed_holds_bytes", MACHINE, "Uncompressed size of the blocks in packed segments."),
    gauge("headwater_cache_disk_limit_bytes", MACHINE, "Limit of the overflow disk space of the write cache."),
    gauge("headwater_cache_disk_used_bytes", MACHINE, "Overflow disk space that the write cache uses."),
    counter("headwater_reads_total", MACHINE, "Read requests answered."),
    counter("headwater_read_operations_total", &["machine", "served"], "Read requests by the source of their data: ram, packed (RAM), zero, disk (overflow), image. A request with several sources counts for the slowest. For writes, which are all stored in RAM first, use headwater_writes_total."),
    counter("headwater_read_bytes_total", MACHINE, "Bytes that read requests asked for."),
    counter("headwater_read_blocks_total", &["machine", "served"], "4 KiB blocks read from the write cache, by their location: ram, packed (RAM), zero, disk (overflow)."),
    counter("headwater_image_read_bytes_total", MACHINE, "Bytes read from the image."),
    counter("headwater_writes_total", MACHINE, "Write requests answered."),
    counter("headwater_written_bytes_total", MACHINE, "Bytes of write requests."),
    counter("headwater_written_blocks_total", &["machine", "stored"], "4 KiB blocks stored: in_place (overwritten) or new (in a new slot)."),
    counter("headwater_discards_total", MACHINE, "Discard and write-zeroes requests answered."),
    counter("headwater_elided_blocks_total", &["machine", "reason"], "4 KiB blocks stored without space, by reason: zero, equal (to the image) or discarded."),
    counter("headwater_packed_segments_total", MACHINE, "2 MiB segments that were packed (compressed in RAM)."),
    counter("headwater_packed_blocks_total", MACHINE, "Live blocks in the segments that were packed."),
    counter("headwater_spilled_segments_total", MACHINE, "2 MiB segments written to the overflow disk."),
    counter("headwater_spilled_blocks_total", MACHINE, "Live blocks in the segments that were spilled."),
    counter("headwater_spilled_bytes_total", MACHINE, "Bytes of spilled segments, and of blocks that a commit of a persistent disk writes. headwater_overflow_bytes_total counts all writes of overflow files."),
    counter("headwater_overflow_operations_total", &["machine", "direction"], "Reads and writes of overflow files, including those of cleaning. Commits of a persistent disk to its map are not counted."),
    counter("headwater_overflow_bytes_total", &["machine", "direction"], "Bytes of the reads and writes that headwater_overflow_operations_total counts."),
    counter("headwater_cleaned_segments_total", MACHINE, "Segments on the overflow disk that were cleaned (compacted to free space)."),
    counter("headwater_cleaned_blocks_total", MACHINE, "Live blocks that cleaning moved."),
    counter("headwater_evicted_segments_total", MACHINE, "Segments evicted from RAM, because the overflow disk has a copy."),
    counter("headwater_paused_writes_total", MACHINE, "Writes that waited for space in the write cache."),
    counter("headwater_paused_seconds_total", MACHINE, "Total time that writes waited for space in the write cache."),
    counter("headwater_throttled_writes_total", MACHINE, "Writes whose answers were delayed by microseconds to milliseconds, because space was short and the machine wrote faster than the overflow disk."),
    counter("headwater_refused_writes_total", MACHINE, "Refusals of writes for lack of space. A write that is tried again and refused again counts again."),
    counter("headwater_disk_errors_total", MACHINE, "Failed reads, writes, syncs and space reservations on the overflow disk."),
    counter("headwater_corrupt_blocks_total", MACHINE, "Blocks whose contents on the overflow disk differ from what was written."),
    counter("headwater_commits_total", MACHINE, "Commits of a persistent disk. Flushes that arrive together share a commit; some commits are made to free space."),
    Family {
        name: "headwater_latency_seconds",
        kind: Kind::Summary,
        labels: &["machine", "operation", "served", "quantile"],
        help: "Duration of requests since the machine started, by the source of their data. Reads: ram, packed or zero (finished at once; the slowest block counts), disk or image. Writes: ram (finished at once) or waited. Of requests finished at once, one in 64 is timed.",
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
