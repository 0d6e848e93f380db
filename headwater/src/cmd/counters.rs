//! Prints the counters of `headwater export`: a table for people (`SIGUSR1`), JSON for programs, and the file of
//! `--stats`. A daemon shows its counters elsewhere (`headwater stats`).

use std::fmt::Write as _;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::Context;
use headwater_api::CacheMode;
use headwater_api::metrics::Stats;
use headwater_block::size;
use headwater_image::BackgroundProgress;
use headwater_volume::{Latency, LatencySnapshot, VolumeCounters};
use headwater_writecache::Snapshot;
use serde::Serialize;

use crate::adapters::metrics;
use crate::failure::invalid;
use crate::replace::replace;
use crate::streaming::StreamCounters;

/// The counters of one machine, as JSON.
#[derive(Serialize)]
struct StatsOfOne<'a> {
    #[serde(flatten)]
    volume: &'a VolumeCounters,
    image: Option<StreamCounters>,
}

/// The counters of several machines, as JSON, in the order of their sockets.
#[derive(Serialize)]
struct StatsOfMachines<'a> {
    machines: &'a [VolumeCounters],
    image: Option<StreamCounters>,
}

/// The content of the file of `--stats`, for one or several machines.
pub fn stats_json(counters: &[VolumeCounters], image: Option<StreamCounters>) -> serde_json::Result<String> {
    match counters {
        [volume] => serde_json::to_string_pretty(&StatsOfOne { volume, image }),
        machines => serde_json::to_string_pretty(&StatsOfMachines { machines, image }),
    }
}

/// The machines to which counters belong, by their names in metrics.
pub struct Owners<'a> {
    pub machines: &'a [String],
    pub mode: CacheMode,
    /// The progress of copying the image, if it is copied.
    pub copied: Option<BackgroundProgress>,
}

impl Owners<'_> {
    /// The metrics in the format of Prometheus, with labels for machine and export, so that files of several exports
    /// have no sample in common.
    fn prometheus(&self, file: &Path, counters: &[VolumeCounters], image: Option<StreamCounters>) -> String {
        let mut samples = Vec::new();
        for (machine, counters) in self.machines.iter().zip(counters) {
            let info = metrics::cache_info(self.mode, &counters.cache);
            let copied = self.copied.into_iter().flat_map(metrics::hydration);
            let all = metrics::volume(counters).into_iter().chain([info]).chain(copied);
            samples.extend(all.map(|sample| sample.with("machine", machine)));
        }
        samples.extend(counters.first().into_iter().flat_map(metrics::limit));
        samples.extend(image.iter().flat_map(metrics::streaming));
        samples.extend(image.iter().flat_map(metrics::chunk_cache));
        let export = file.file_stem().unwrap_or_default().to_string_lossy();
        let samples = samples.into_iter().map(|sample| sample.with("export", &*export)).collect();
        Stats::new(0, samples).to_prometheus()
    }
}

/// Replaces the file atomically, so that a reader never sees a partial file. The extension decides the format.
pub fn write_stats(
    file: &Path,
    whose: &Owners<'_>,
    counters: &[VolumeCounters],
    image: Option<StreamCounters>,
) -> anyhow::Result<()> {
    let failed = || format!("cannot write the counters to {}", file.display());
    let text = if file.extension().is_some_and(|end| end == "prom") {
        whose.prometheus(file, counters, image)
    } else {
        stats_json(counters, image).with_context(failed)?
    };
    replace(file, text.as_bytes(), 0o666).map_err(|error| match error.kind() {
        ErrorKind::InvalidInput => invalid(format!("{}: {error}", failed())),
        _ => anyhow::Error::new(error).context(failed()),
    })
}

/// The table of one machine, for people.
pub fn table(counters: &VolumeCounters) -> String {
    let rows =
        requests(counters).into_iter().chain(latencies(&counters.latency)).chain(cache(&counters.cache));
    let mut text = String::new();
    for (name, value) in rows {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name:<32}{value}");
    }
    text
}

/// A row of the table.
type Row = (&'static str, String);

/// A number of blocks, as bytes.
fn blocks(count: u64) -> String {
    size::format(count.saturating_mul(u64::from(headwater_block::BLOCK_BYTES)))
}

fn requests(counters: &VolumeCounters) -> Vec<Row> {
    let (cache, reads) = (&counters.cache, counters.reads);
    let served = |requests: u64, bytes: String| format!("{requests} requests, {bytes}");
    vec![
        ("reads", format!("{} requests, {}", counters.read_ops, size::format(counters.read_bytes))),
        ("  from RAM", served(reads.ram, blocks(cache.read_ram_blocks))),
        ("  from packed RAM", served(reads.packed, blocks(cache.read_packed_blocks))),
        ("  from the overflow disk", served(reads.disk, blocks(cache.read_disk_blocks))),
        ("  from the image", served(reads.image, size::format(counters.image_read_bytes))),
        ("  zeroes", served(reads.zero, blocks(cache.read_zero_blocks))),
        ("writes", format!("{} requests, {}", counters.write_ops, size::format(counters.write_bytes))),
        ("  overwritten in place in RAM", blocks(cache.write_in_place_blocks)),
        ("  to a new slot", blocks(cache.write_new_blocks)),
        ("  zeroes, not stored", blocks(cache.elided_zero_blocks)),
        ("  equal to the image, not stored", blocks(cache.elided_equal_blocks)),
        ("discards", format!("{} requests, {}", counters.discard_ops, blocks(cache.discarded_blocks))),
    ]
}

/// The durations of requests, for those that occurred.
fn latencies(latency: &LatencySnapshot) -> Vec<Row> {
    let all = [
        ("time of reads from RAM", &latency.read_ram),
        ("  from packed RAM", &latency.read_packed),
        ("  of zeroes", &latency.read_zero),
        ("  from the overflow disk", &latency.read_disk),
        ("  from the image", &latency.read_image),
        ("time of writes stored at once", &latency.write),
        ("  that waited", &latency.write_waited),
    ];
    all.into_iter().filter(|(_, of)| of.count > 0).map(|(name, of)| (name, quantiles(of))).collect()
}

fn quantiles(latency: &Latency) -> String {
    let Latency { count, sum_ns, p50_ns, p99_ns, p999_ns } = *latency;
    let (p50, p99, p999) = (time(p50_ns), time(p99_ns), time(p999_ns));
    format!("p50 {p50}, p99 {p99}, p99.9 {p999}; {count} requests, {} in all", time(sum_ns))
}

/// A duration with one decimal, in the largest unit that is not above it.
fn time(ns: u64) -> String {
    const UNITS: [(u64, &str); 3] = [(1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")];
    match UNITS.into_iter().find(|(unit_ns, _)| ns >= *unit_ns) {
        Some((unit_ns, unit)) => format!("{:.1} {unit}", ns as f64 / unit_ns as f64),
        None => format!("{ns} ns"),
    }
}

fn cache(cache: &Snapshot) -> Vec<Row> {
    let of = |used: u64, limit: u64| format!("{} of {}", size::format(used), size::format(limit));
    let segments = |held: String, segments: u64| format!("{held} in {segments} segments");
    let disk = |count: u64, bytes: u64| format!("{count} operations, {}", size::format(bytes));
    // Empty without an overflow disk.
    let shown = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    let packed = format!(
        "{}, uncompressed {}",
        size::format(cache.packed_bytes),
        size::format(cache.packed_holds_bytes)
    );
    let times = if cache.pressure_shrinks == 1 { "time" } else { "times" };
    let host_limit = format!(
        "{} now; memory pressure lowered it {} {times}",
        size::format(cache.host_limit_bytes),
        cache.pressure_shrinks
    );
    let spilled = segments(size::format(cache.spilled_bytes), cache.spilled_segments);
    vec![
        ("blocks in the cache", size::format(cache.live_bytes)),
        ("cache memory", of(cache.ram_used_bytes, cache.ram_target_bytes)),
        ("  present limit", size::format(cache.ram_share_bytes)),
        ("  of which index", size::format(cache.index_bytes)),
        ("  of which packed", packed),
        ("limit of all write caches", host_limit),
        ("cache disk", of(cache.disk_used_bytes, cache.disk_limit_bytes)),
        ("  written and read", shown(&cache.buffering)),
        ("  key in memory", shown(&cache.key_memory)),
        ("packed", segments(blocks(cache.packed_blocks), cache.packed_segments)),
        ("spilled", format!("{spilled}, of which {} were blocks in use", blocks(cache.spilled_blocks))),
        ("overflow disk reads", disk(cache.disk_read_ops, cache.disk_read_bytes)),
        ("overflow disk writes", disk(cache.disk_write_ops, cache.disk_write_bytes)),
        ("cleaned", segments(blocks(cache.cleaned_blocks), cache.cleaned_segments)),
        ("RAM copies of spilled segments", format!("{} evicted", cache.evicted_segments)),
        ("commits of a persistent cache", cache.commits.to_string()),
        ("writes throttled", cache.throttled_writes.to_string()),
        ("writes paused", format!("{}, {:.3} s in all", cache.paused_writes, cache.paused_ns as f64 / 1e9)),
        ("writes refused", cache.refused_writes.to_string()),
        ("overflow disk errors", format!("{}, damaged blocks {}", cache.disk_errors, cache.corrupt_blocks)),
    ]
}

/// How the image was read, for people.
pub fn image_table(image: &StreamCounters) -> String {
    let mut rows = vec![
        ("image chunks", format!("{} fetched, {} ahead of time", image.fetches, image.ahead)),
        ("  from the store", size::format(image.store_bytes)),
    ];
    if image.disk_bytes > 0 || image.disk_hits > 0 {
        let used = format!("{} chunks found, {} damaged", image.disk_hits, image.disk_damaged);
        rows.push(("  chunk cache on disk", format!("{used}, {} in use", size::format(image.disk_bytes))));
    }
    if image.servers > 0 {
        let asked = format!("{} of {} up, {} requests", image.servers_up, image.servers, image.requests);
        let received = size::format(image.received_bytes);
        rows.push(("servers", format!("{asked}, {received}, {} failovers", image.failovers)));
        let longest_s = image.longest_wait_ms as f64 / 1e3;
        rows.push(("  reads without a server", format!("{}, longest wait {longest_s:.3} s", image.waits)));
        rows.push(("  longest read", format!("{:.3} s", image.longest_read_ms as f64 / 1e3)));
    }
    let mut text = String::new();
    for (name, value) in rows {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name:<32}{value}");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    const WHOSE: Owners<'static> = Owners { machines: &[], mode: CacheMode::Ram, copied: None };

    /// The first column of the tables below a heading of a document.
    fn documented(file: &str, heading: &str) -> BTreeSet<String> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(file);
        let text = std::fs::read_to_string(&path).unwrap();
        let (_, section) = text.split_once(&format!("\n## {heading}\n")).unwrap();
        let section = section.split("\n## ").next().unwrap();
        let rows = section.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
        rows.flat_map(|names| names.split(", "))
            .map(|name| name.trim_matches('`').to_owned())
            .filter(|name| !name.ends_with('.'))
            .collect()
    }

    /// Gives each number a unique value, from 101 MiB on, and returns them with their names.
    fn number_all(name: &str, value: &mut Value, found: &mut Vec<(String, u64)>) {
        match value {
            Value::Object(fields) => {
                fields
                    .iter_mut()
                    .for_each(|(part, field)| number_all(&format!("{name}.{part}"), field, found));
            }
            Value::Number(_) => {
                let own = (found.len() as u64 + 101) << 20;
                *value = own.into();
                found.push((name.to_owned(), own));
            }
            _ => {}
        }
    }

    #[test]
    fn the_table_has_all_numbers() {
        let mut counters = serde_json::to_value(VolumeCounters::default()).unwrap();
        let mut numbers = Vec::new();
        number_all("", &mut counters, &mut numbers);
        assert!((60..400).contains(&numbers.len()), "{numbers:?}");
        let table = table(&serde_json::from_value(counters).unwrap());
        for (name, number) in numbers {
            // No two numbers have the same digits in any of the formats.
            let shown = match name.rsplit('_').next().unwrap_or_default() {
                "ns" if name == ".cache.paused_ns" => format!("{:.3} s", number as f64 / 1e9),
                "ns" => format!("{:.1} ms", number as f64 / 1e6),
                "bytes" => format!("{}.0 MiB", number >> 20),
                "blocks" if name != ".cache.corrupt_blocks" => format!("{}.0 GiB", number >> 18),
                _ => number.to_string(),
            };
            assert!(table.contains(&shown), "{name} is missing, as {shown}:\n{table}");
        }
    }

    #[test]
    fn times_are_short_and_those_of_nothing_are_left_out() {
        let told = [0, 999, 1_500, 2_000_000, 137_000_000_000].map(time);
        assert_eq!(told, ["0 ns", "999 ns", "1.5 us", "2.0 ms", "137.0 s"]);
        let mut counters = VolumeCounters::default();
        assert!(!table(&counters).contains("p99"));
        counters.latency.read_disk =
            Latency { count: 3, sum_ns: 9000, p50_ns: 2000, p99_ns: 4000, p999_ns: 4100 };
        let row = "p50 2.0 us, p99 4.0 us, p99.9 4.1 us; 3 requests, 9.0 us in all";
        assert!(
            table(&counters).contains(&format!("  from the overflow disk        {row}\n")),
            "{}",
            table(&counters)
        );
        assert_eq!(table(&counters).matches("p99.9").count(), 1);
    }

    fn names(of: &Value) -> BTreeSet<String> {
        of.as_object().unwrap().keys().cloned().collect()
    }

    #[test]
    fn the_documentation_has_a_row_for_each_counter_and_no_other() {
        let (volume, image) = (VolumeCounters::default(), Some(StreamCounters::default()));
        let stats = serde_json::to_value(StatsOfOne { volume: &volume, image }).unwrap();
        let groups = ["cache", "latency", "image"];
        let mut wanted: BTreeSet<_> =
            names(&stats).into_iter().filter(|name| !groups.contains(&name.as_str())).collect();
        for group in [&stats["cache"], &stats["latency"], &stats["latency"]["write"]] {
            wanted.extend(names(group));
        }
        assert_eq!(documented("write-cache.md", "Counters"), wanted);
        assert_eq!(documented("streaming.md", "Counters"), names(&stats["image"]));
    }

    #[test]
    fn the_counters_are_a_table_and_a_file_that_is_replaced_as_a_whole() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("stats.json");
        let counters = VolumeCounters { read_ops: 7, read_bytes: 28 << 10, ..Default::default() };
        write_stats(&file, &WHOSE, &[VolumeCounters::default()], None).unwrap();
        write_stats(&file, &WHOSE, std::slice::from_ref(&counters), Some(StreamCounters::default())).unwrap();
        let back: VolumeCounters = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(back, counters);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        write_stats(&file, &WHOSE, &[VolumeCounters::default(), counters.clone()], None).unwrap();
        let both: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(both["machines"][1]["read_ops"], 7);
        assert!(table(&counters).contains("7 requests, 28.0 KiB"));
        let mut of_disk = counters;
        (of_disk.cache.buffering, of_disk.cache.key_memory) = ("direct".into(), "locked".into());
        let of_disk = table(&of_disk);
        let row = |name: &str, value: &str| of_disk.contains(&format!("{name:<32}{value}\n"));
        assert!(row("  written and read", "direct") && row("  key in memory", "locked"), "{of_disk}");
    }
}
