//! The counters of `headwater export`: a table for people, JSON for programs, and the file of `--stats`.

use std::fmt::Write as _;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::Context;
use headwater_api::CacheMode;
use headwater_api::metrics::Stats;
use headwater_block::size;
use headwater_image::BackgroundProgress;
use headwater_volume::VolumeCounters;
use serde::Serialize;

use crate::adapters::metrics;
use crate::failure::invalid;
use crate::replace::replace;
use crate::streaming::StreamCounters;

/// The counters of one machine.
#[derive(Serialize)]
struct StatsOfOne<'a> {
    #[serde(flatten)]
    volume: &'a VolumeCounters,
    image: Option<StreamCounters>,
}

/// The same of several machines, in the order of their sockets.
#[derive(Serialize)]
struct StatsOfMachines<'a> {
    machines: &'a [VolumeCounters],
    image: Option<StreamCounters>,
}

/// What `--stats` writes, of one machine or of several.
pub fn stats_json(counters: &[VolumeCounters], image: Option<StreamCounters>) -> serde_json::Result<String> {
    match counters {
        [volume] => serde_json::to_string_pretty(&StatsOfOne { volume, image }),
        machines => serde_json::to_string_pretty(&StatsOfMachines { machines, image }),
    }
}

/// Of which machines counters are, as metrics name them.
pub struct Whose<'a> {
    pub machines: &'a [String],
    pub mode: CacheMode,
    /// How far the copy of their image is, where there is one.
    pub copied: Option<BackgroundProgress>,
}

impl Whose<'_> {
    /// The same as the daemon has of its machines, and whose they are: a collector that reads several such files takes no sample twice.
    fn prometheus(&self, file: &Path, counters: &[VolumeCounters], image: Option<StreamCounters>) -> String {
        let mut samples = Vec::new();
        for (machine, counters) in self.machines.iter().zip(counters) {
            let info = metrics::cache_info(self.mode, &counters.cache);
            let copied = self.copied.into_iter().flat_map(metrics::hydration);
            let all = metrics::volume(counters).into_iter().chain([info]).chain(copied);
            samples.extend(all.map(|sample| sample.with("machine", machine)));
        }
        samples.extend(image.iter().flat_map(metrics::streaming));
        samples.extend(image.iter().flat_map(metrics::chunk_cache));
        let export = file.file_stem().unwrap_or_default().to_string_lossy();
        let samples = samples.into_iter().map(|sample| sample.with("export", &*export)).collect();
        Stats::new(0, samples).to_prometheus()
    }
}

/// Replaces the file as a whole, so that a reader never sees half of it. The end of its name says what is written.
pub fn write_stats(
    file: &Path,
    whose: &Whose<'_>,
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

/// The same of one machine for people.
pub fn table(counters: &VolumeCounters) -> String {
    let cache = &counters.cache;
    let blocks = |count: u64| size::format(count * u64::from(headwater_block::BLOCK_BYTES));
    let of = |used: u64, limit: u64| format!("{} of {}", size::format(used), size::format(limit));
    // Without a disk there is neither.
    let shown = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    let packed = format!(
        "{}, which holds {}",
        size::format(cache.packed_bytes),
        size::format(cache.packed_holds_bytes)
    );
    let rows = [
        ("reads", format!("{} requests, {}", counters.read_ops, size::format(counters.read_bytes))),
        ("  from RAM", blocks(cache.read_ram_blocks)),
        ("  from packed RAM", blocks(cache.read_packed_blocks)),
        ("  from the overflow disk", blocks(cache.read_disk_blocks)),
        ("  from the image", size::format(counters.image_read_bytes)),
        ("  zeroes", blocks(cache.read_zero_blocks)),
        ("writes", format!("{} requests, {}", counters.write_ops, size::format(counters.write_bytes))),
        ("  over their own place in RAM", blocks(cache.write_in_place_blocks)),
        ("  to a new place", blocks(cache.write_new_blocks)),
        ("  zeroes, not stored", blocks(cache.elided_zero_blocks)),
        ("discards", format!("{} requests, {}", counters.discard_ops, blocks(cache.discarded_blocks))),
        ("cache memory", of(cache.ram_used_bytes, cache.ram_target_bytes)),
        ("  of which index", size::format(cache.index_bytes)),
        ("  of which packed", packed),
        ("cache disk", of(cache.disk_used_bytes, cache.disk_limit_bytes)),
        ("  written and read", shown(&cache.buffering)),
        ("  key in memory", shown(&cache.key_memory)),
        ("spilled", format!("{} in {} segments", size::format(cache.spilled_bytes), cache.spilled_segments)),
        ("cleaned", format!("{} in {} segments", blocks(cache.cleaned_blocks), cache.cleaned_segments)),
        ("commits of a persistent cache", cache.commits.to_string()),
        ("writes paused", format!("{}, {:.3} s in all", cache.paused_writes, cache.paused_ns as f64 / 1e9)),
        ("writes refused", cache.refused_writes.to_string()),
        ("overflow disk errors", format!("{}, damaged blocks {}", cache.disk_errors, cache.corrupt_blocks)),
    ];
    let mut text = String::new();
    for (name, value) in rows {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name:<32}{value}");
    }
    text
}

/// How its image was read, for people.
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
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name:<32}{value}");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    const WHOSE: Whose<'static> = Whose { machines: &[], mode: CacheMode::Ram, copied: None };

    /// The names in the first column of the tables below a heading of a document.
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
