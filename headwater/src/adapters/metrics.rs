//! Converts the counters of the data plane (volumes, write caches, chunk caches, streaming) to metrics with names and labels, for
//! `/metrics`, `headwater stats` and the counters of `headwater export`. Nothing is counted here.

use headwater_api::CacheMode;
use headwater_api::metrics::Sample;
use headwater_image::{BackgroundProgress, ChunkCacheCounters};
use headwater_volume::{Latency, VolumeCounters};
use headwater_writecache::{HostSnapshot, Snapshot};

use crate::streaming::StreamCounters;

/// The metrics of a volume, without the label of the machine.
pub fn volume(counters: &VolumeCounters) -> Vec<Sample> {
    let mut samples = requests(counters);
    samples.extend(cache(counters));
    let latency = &counters.latency;
    let all = [
        ("read", "ram", &latency.read_ram),
        ("read", "packed", &latency.read_packed),
        ("read", "zero", &latency.read_zero),
        ("read", "disk", &latency.read_disk),
        ("read", "image", &latency.read_image),
        ("write", "ram", &latency.write),
        ("write", "waited", &latency.write_waited),
    ];
    for (operation, served, latency) in all {
        samples.extend(
            summary(latency).into_iter().map(|s| s.with("operation", operation).with("served", served)),
        );
    }
    samples
}

/// The properties of a volume's write cache that are not numbers.
pub fn cache_info(mode: CacheMode, cache: &Snapshot) -> Sample {
    // Without the measured value in parentheses, which differs at each start.
    let buffering = cache.buffering.split(" (").next().unwrap_or_default();
    Sample::new("headwater_cache_info", 1)
        .with("mode", mode.to_string())
        .with("buffering", buffering)
        .with("key_memory", cache.key_memory.as_str())
}

/// The progress of copying a volume's image to this host; zeroes if it is not copied.
pub fn hydration(copied: BackgroundProgress) -> [Sample; 2] {
    [
        Sample::new("headwater_hydration_whole_bytes", copied.total_bytes),
        Sample::new("headwater_hydration_done_bytes", copied.done_bytes),
    ]
}

fn requests(counters: &VolumeCounters) -> Vec<Sample> {
    let cache = &counters.cache;
    let read = |served, blocks| Sample::new("headwater_read_blocks_total", blocks).with("served", served);
    let stored = |how, blocks| Sample::new("headwater_written_blocks_total", blocks).with("stored", how);
    let elided = |reason, blocks| Sample::new("headwater_elided_blocks_total", blocks).with("reason", reason);
    let reads = |served, count| Sample::new("headwater_read_operations_total", count).with("served", served);
    vec![
        Sample::new("headwater_reads_total", counters.read_ops),
        reads("ram", counters.reads.ram),
        reads("packed", counters.reads.packed),
        reads("zero", counters.reads.zero),
        reads("disk", counters.reads.disk),
        reads("image", counters.reads.image),
        Sample::new("headwater_read_bytes_total", counters.read_bytes),
        read("ram", cache.read_ram_blocks),
        read("packed", cache.read_packed_blocks),
        read("zero", cache.read_zero_blocks),
        read("disk", cache.read_disk_blocks),
        Sample::new("headwater_image_read_bytes_total", counters.image_read_bytes),
        Sample::new("headwater_writes_total", counters.write_ops),
        Sample::new("headwater_written_bytes_total", counters.write_bytes),
        stored("in_place", cache.write_in_place_blocks),
        stored("new", cache.write_new_blocks),
        Sample::new("headwater_discards_total", counters.discard_ops),
        elided("zero", cache.elided_zero_blocks),
        elided("equal", cache.elided_equal_blocks),
        elided("discarded", cache.discarded_blocks),
    ]
}

fn cache(counters: &VolumeCounters) -> Vec<Sample> {
    let cache = &counters.cache;
    let disk = |name: &str, direction, value| Sample::new(name, value).with("direction", direction);
    let (operations, bytes) = ("headwater_overflow_operations_total", "headwater_overflow_bytes_total");
    vec![
        disk(operations, "read", cache.disk_read_ops),
        disk(operations, "write", cache.disk_write_ops),
        disk(bytes, "read", cache.disk_read_bytes),
        disk(bytes, "write", cache.disk_write_bytes),
        Sample::new("headwater_cache_ram_target_bytes", cache.ram_target_bytes),
        Sample::new("headwater_cache_ram_share_bytes", cache.ram_share_bytes),
        Sample::new("headwater_cache_ram_used_bytes", cache.ram_used_bytes),
        Sample::new("headwater_cache_live_bytes", cache.live_bytes),
        Sample::new("headwater_cache_index_bytes", cache.index_bytes),
        Sample::new("headwater_cache_packed_bytes", cache.packed_bytes),
        Sample::new("headwater_cache_packed_holds_bytes", cache.packed_holds_bytes),
        Sample::new("headwater_cache_disk_limit_bytes", cache.disk_limit_bytes),
        Sample::new("headwater_cache_disk_used_bytes", cache.disk_used_bytes),
        Sample::new("headwater_packed_segments_total", cache.packed_segments),
        Sample::new("headwater_packed_blocks_total", cache.packed_blocks),
        Sample::new("headwater_spilled_segments_total", cache.spilled_segments),
        Sample::new("headwater_spilled_blocks_total", cache.spilled_blocks),
        Sample::new("headwater_spilled_bytes_total", cache.spilled_bytes),
        Sample::new("headwater_cleaned_segments_total", cache.cleaned_segments),
        Sample::new("headwater_cleaned_blocks_total", cache.cleaned_blocks),
        Sample::new("headwater_evicted_segments_total", cache.evicted_segments),
        Sample::new("headwater_paused_writes_total", cache.paused_writes),
        Sample::real("headwater_paused_seconds_total", seconds(cache.paused_ns)),
        Sample::new("headwater_throttled_writes_total", cache.throttled_writes),
        Sample::new("headwater_refused_writes_total", cache.refused_writes),
        Sample::new("headwater_disk_errors_total", cache.disk_errors),
        Sample::new("headwater_corrupt_blocks_total", cache.corrupt_blocks),
        Sample::new("headwater_commits_total", cache.commits),
    ]
}

/// A summary. Without quantiles if nothing was counted.
fn summary(latency: &Latency) -> Vec<Sample> {
    let name = "headwater_latency_seconds";
    let quantile = |q: &str, ns| Sample::real(name, seconds(ns)).with("quantile", q);
    let mut samples = Vec::new();
    if latency.count > 0 {
        samples.extend([
            quantile("0.5", latency.p50_ns),
            quantile("0.99", latency.p99_ns),
            quantile("0.999", latency.p999_ns),
        ]);
    }
    samples.extend([
        Sample::real(format!("{name}_sum"), seconds(latency.sum_ns)),
        Sample::new(format!("{name}_count"), latency.count),
    ]);
    samples
}

/// The metrics of the host.
pub fn host(host: &HostSnapshot, chunks: &ChunkCacheCounters) -> Vec<Sample> {
    vec![
        Sample::new("headwater_host_ram_configured_bytes", host.configured_limit_bytes),
        Sample::new("headwater_host_ram_limit_bytes", host.limit_bytes),
        Sample::new("headwater_host_ram_used_bytes", host.used_bytes),
        Sample::new("headwater_host_pressure_shrinks_total", host.pressure_shrinks),
        Sample::new("headwater_chunk_cache_limit_bytes", chunks.capacity_bytes),
        Sample::new("headwater_chunk_cache_used_bytes", chunks.held_bytes),
        Sample::new("headwater_chunk_cache_hits_total", chunks.hits),
        Sample::new("headwater_chunk_cache_misses_total", chunks.fetches.saturating_sub(chunks.ahead)),
        Sample::new("headwater_chunk_cache_joined_total", chunks.joined),
        Sample::new("headwater_chunk_cache_failures_total", chunks.failures),
        Sample::new("headwater_chunk_cache_evictions_total", chunks.evictions),
    ]
}

/// The RAM limit that an export's volumes share, and how often memory pressure lowered it. Each volume has the same values.
pub fn limit(any: &VolumeCounters) -> [Sample; 2] {
    [
        Sample::new("headwater_host_ram_limit_bytes", any.cache.host_limit_bytes),
        Sample::new("headwater_host_pressure_shrinks_total", any.cache.pressure_shrinks),
    ]
}

/// The metrics of an export's chunk cache. (The daemon has one chunk cache for all machines.)
pub fn chunk_cache(image: &StreamCounters) -> [Sample; 4] {
    [
        Sample::new("headwater_chunk_cache_hits_total", image.ram_hits),
        Sample::new("headwater_chunk_cache_misses_total", image.fetches.saturating_sub(image.ahead)),
        Sample::new("headwater_chunk_cache_joined_total", image.joined),
        Sample::new("headwater_chunk_cache_failures_total", image.failures),
    ]
}

/// The metrics of reading images: readahead, the chunk cache on disk, and the servers of other hosts.
pub fn streaming(image: &StreamCounters) -> Vec<Sample> {
    vec![
        Sample::new("headwater_chunk_cache_ahead_total", image.ahead),
        Sample::new("headwater_chunk_cache_read_bytes_total", image.store_bytes),
        Sample::new("headwater_chunk_disk_used_bytes", image.disk_bytes),
        Sample::new("headwater_chunk_disk_hits_total", image.disk_hits),
        Sample::new("headwater_chunk_disk_evictions_total", image.disk_evictions),
        Sample::new("headwater_chunk_disk_damaged_total", image.disk_damaged),
        Sample::new("headwater_image_servers", image.servers),
        Sample::new("headwater_image_servers_up", image.servers_up),
        Sample::new("headwater_image_requests_total", image.requests),
        Sample::new("headwater_image_received_bytes_total", image.received_bytes),
        Sample::new("headwater_image_failovers_total", image.failovers),
        Sample::new("headwater_image_wrong_answers_total", image.wrong_answers),
        Sample::new("headwater_image_waits_total", image.waits),
        Sample::real("headwater_image_waited_seconds_total", image.waited_ms as f64 / 1e3),
        Sample::real("headwater_image_longest_read_seconds", image.longest_read_ms as f64 / 1e3),
    ]
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// Gives each number a unique value, and returns the values with their names.
    fn number_all(name: &str, value: &mut Value, found: &mut Vec<(String, u64)>) {
        match value {
            Value::Object(fields) => {
                for (field, value) in fields {
                    number_all(&format!("{name}.{field}"), value, found);
                }
            }
            Value::Number(_) => {
                // The values are distinct, and stay distinct when nanoseconds are converted to seconds.
                let own = (found.len() as u64 + 1) * 1_000_000_007;
                *value = own.into();
                found.push((name.to_owned(), own));
            }
            _ => {}
        }
    }

    /// The words of a metric and of its labels.
    fn words(sample: &Sample) -> Vec<&str> {
        let labels = sample.labels.values().map(String::as_str);
        let names = std::iter::once(sample.metric.as_str()).chain(labels);
        names.flat_map(|name| name.split('_')).map(plain).collect()
    }

    fn plain(word: &str) -> &str {
        WORDS.iter().find(|(form, _)| *form == word).map_or(word, |(_, plain)| *plain)
    }

    /// Inflected words, and words for which metrics use another one.
    const WORDS: [(&str, &str); 9] = [
        ("0.5", "p50"),
        ("0.99", "p99"),
        ("0.999", "p999"),
        ("reads", "read"),
        ("writes", "write"),
        ("written", "write"),
        ("discards", "discard"),
        ("seconds", "ns"),
        ("overflow", "disk"),
    ];

    /// Asserts that each counter is in a metric with a matching name. `path` is the field, for instance `read_ram.p50_ns`.
    fn assert_told(path: &str, number: u64, samples: &[Sample]) {
        let wanted = if path.ends_with("_ns") { seconds(number) } else { number as f64 };
        let told = samples.iter().find(|sample| sample.value == wanted);
        let told = told.unwrap_or_else(|| panic!("no metric tells {path}"));
        let words = words(told);
        for word in path.split(['.', '_']).filter(|word| !["ops", "cache", "latency"].contains(word)) {
            assert!(words.contains(&plain(word)), "{path} stands in {told:?}");
        }
    }

    #[test]
    fn every_counter_of_a_volume_is_a_metric() {
        let mut counters = serde_json::to_value(VolumeCounters::default()).unwrap();
        let mut numbers = Vec::new();
        number_all("", &mut counters, &mut numbers);
        let counters = serde_json::from_value(counters).unwrap();
        // With the host's limits, because `VolumeCounters` contains them too.
        let samples: Vec<_> = volume(&counters).into_iter().chain(limit(&counters)).collect();
        assert!(numbers.len() > 60, "{numbers:?}");
        for (path, number) in &numbers {
            assert_told(path.trim_start_matches('.'), *number, &samples);
        }
        for sample in &samples {
            assert!(headwater_api::metrics::family(&sample.metric).is_some(), "{}", sample.metric);
        }
    }
    #[test]
    fn what_the_host_has_is_told_by_its_name() {
        let memory = HostSnapshot {
            configured_limit_bytes: 1,
            limit_bytes: 2,
            used_bytes: 3,
            pressure_shrinks: 4,
            ..HostSnapshot::default()
        };
        let chunks = ChunkCacheCounters {
            capacity_bytes: 5,
            held_bytes: 6,
            hits: 7,
            fetches: 28,
            ahead: 20,
            joined: 9,
            failures: 10,
            evictions: 11,
            ..ChunkCacheCounters::default()
        };
        let expected = [
            "host_ram_configured_bytes",
            "host_ram_limit_bytes",
            "host_ram_used_bytes",
            "host_pressure_shrinks_total",
            "chunk_cache_limit_bytes",
            "chunk_cache_used_bytes",
            "chunk_cache_hits_total",
            "chunk_cache_misses_total",
            "chunk_cache_joined_total",
            "chunk_cache_failures_total",
            "chunk_cache_evictions_total",
        ];
        let samples = host(&memory, &chunks);
        assert_eq!(samples.len(), expected.len());
        for (name, number) in expected.into_iter().zip(1..) {
            let value = samples.iter().find(|sample| sample.metric == format!("headwater_{name}"));
            assert_eq!(value.map(|sample| sample.value), Some(f64::from(number)), "{name}");
        }
    }
}
