//! Metrics: as text for Prometheus, as JSON, on the command line, and in the documentation.

use std::collections::{BTreeMap, BTreeSet};
use std::io::BufRead;
use std::path::Path;
use std::process::Stdio;

use crate::support::{self, Daemon, headwater, http, short_dir, signal};
use headwater_api::metrics::{FAMILIES, Family, Kind, Stats, family};

/// A value of Prometheus' text format.
#[derive(Clone, Debug)]
struct Line {
    metric: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

/// Reads the text format as strictly as its specification is: help, type, then values, each family once.
fn parse(text: &str) -> (Vec<Line>, BTreeMap<String, String>) {
    let (mut lines, mut types) = (Vec::new(), BTreeMap::new());
    let (mut helped, mut current) = (String::new(), String::new());
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            helped = help.split_once(' ').expect("a help text").0.to_owned();
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').expect("a type");
            assert_eq!(name, helped, "a type without its help");
            assert_eq!(types.insert(name.to_owned(), kind.to_owned()), None, "{name} comes twice");
            name.clone_into(&mut current);
        } else {
            let (name, value) = line.rsplit_once(' ').expect("a value");
            let (metric, labels) = name
                .split_once('{')
                .map_or((name, ""), |(metric, rest)| (metric, rest.strip_suffix('}').expect("labels end")));
            assert!(metric.starts_with(&current), "{metric} among those of {current}");
            let labels = labels.split(',').filter(|label| !label.is_empty()).map(|label| {
                let (name, value) = label.split_once('=').expect("a label");
                let value =
                    value.strip_prefix('"').and_then(|v| v.strip_suffix('"')).expect("a quoted value");
                (name.to_owned(), value.to_owned())
            });
            let value = value.parse().unwrap_or_else(|e| panic!("{line}: {e}"));
            lines.push(Line { metric: metric.to_owned(), labels: labels.collect(), value });
        }
    }
    (lines, types)
}

fn check_family(line: &Line, types: &BTreeMap<String, String>) {
    let family = family(&line.metric).unwrap_or_else(|| panic!("{} has no family", line.metric));
    assert_eq!(types.get(family.name).map(String::as_str), Some(family.kind.name()));
    let mut labels: BTreeSet<&str> = family.labels.iter().copied().collect();
    if line.metric != family.name {
        // The sum and the count of a summary have no quantile.
        labels.remove("quantile");
    }
    assert_eq!(line.labels.keys().map(String::as_str).collect::<BTreeSet<_>>(), labels, "{line:?}");
    assert!(line.value.is_finite() && line.value >= 0.0, "{line:?}");
}

#[test]
fn prometheus_gets_all_metrics_and_they_are_true() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    daemon.create("off", "tiny", &[]);
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    for _ in 0..3 {
        daemon.console("lab", "w", Some("W"));
    }
    let (status, text) = http(&daemon.socket(), "GET", "/metrics", None);
    assert_eq!(status, 200, "{text}");
    let (lines, types) = parse(&text);
    lines.iter().for_each(|line| check_family(line, &types));
    let missing: Vec<_> = FAMILIES.iter().map(|f| f.name).filter(|name| !types.contains_key(*name)).collect();
    assert!(missing.is_empty(), "documented and not printed: {missing:?}");

    let value = |metric: &str, labels: &[(&str, &str)]| {
        let fits = |line: &&Line| {
            line.metric == metric
                && labels.iter().all(|(name, value)| line.labels.get(*name).is_some_and(|v| v == value))
        };
        let found: Vec<&Line> = lines.iter().filter(fits).collect();
        assert_eq!(found.len(), 1, "{metric} {labels:?}: {found:?}");
        found[0].value
    };
    let machine = daemon.machine("lab");
    let lab = ("machine", "lab");
    assert_eq!(value("headwater_writes_total", &[lab]), 3.0);
    assert_eq!(value("headwater_written_bytes_total", &[lab]), 3.0 * 512.0);
    assert_eq!(value("headwater_boot_seconds", &[lab]), machine["boot_ms"].as_f64().unwrap() / 1e3);
    assert!(value("headwater_boot_bytes", &[lab]) >= 512.0);
    assert_eq!(value("headwater_cache_ram_target_bytes", &[lab]), 67_108_864.0);
    assert_eq!(value("headwater_cache_info", &[lab, ("mode", "ram+disk"), ("buffering", "direct")]), 1.0);
    let info = lines.iter().find(|line| line.metric == "headwater_cache_info").unwrap();
    assert!(["secret", "locked", "unlocked"].contains(&info.labels["key_memory"].as_str()), "{info:?}");
    assert_eq!(value("headwater_machine_alarm", &[lab]), 0.0);
    assert_eq!(value("headwater_machines", &[("state", "running")]), 1.0);
    assert_eq!(value("headwater_machines", &[("state", "created")]), 1.0);
    assert_eq!(value("headwater_images", &[]), 1.0);
    // The first write fetches the rest of its block: it waits, and is timed.
    let waited = [lab, ("operation", "write"), ("served", "waited")];
    assert!(value("headwater_latency_seconds_count", &waited) <= 3.0);
    assert!(lines.iter().all(|line| line.labels.get("machine").is_none_or(|name| name == "lab")));
    assert_eq!(value("headwater_host_writes_total", &[]), 3.0);
}

#[test]
fn an_export_writes_the_same_metrics_to_a_file() {
    let dir = short_dir();
    let file = dir.path().join("disks.prom");
    let mut export = headwater()
        .args([
            "export",
            "null:16M",
            "--cache",
            "ram",
            "--ram",
            "16M",
            "--cache-ram",
            "64M",
            "--nbd-export",
            "one",
            "--nbd-export",
            "two",
        ])
        .arg(format!("--nbd=unix:{}", dir.path().join("nbd").display()))
        .arg("--stats")
        .arg(&file)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let _watchdog = support::Watchdog::on(export.id());
    let mut lines = std::io::BufReader::new(export.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().starts_with("nbd"));
    // Of volumes that are open, from the time on when their clients can come.
    let (first, _) = parse(&std::fs::read_to_string(&file).unwrap());
    let targets = first.iter().filter(|line| line.metric == "headwater_cache_ram_target_bytes");
    assert!(targets.map(|line| line.value).eq([f64::from(16 << 20); 2]));
    let uri = format!("nbd+unix:///two?socket={}", dir.path().join("nbd").display());
    let client = headwater_nbd::Client::open(&uri).unwrap();
    headwater_block::blocking::write(&*client, 0, &[7; 8192]).unwrap();
    drop(client);
    signal(export.id(), "TERM");
    assert!(export.wait().unwrap().success());
    let (lines, types) = parse(&std::fs::read_to_string(&file).unwrap());
    for mut line in lines.iter().cloned() {
        assert_eq!(line.labels.remove("export").as_deref(), Some("disks"), "{line:?}");
        check_family(&line, &types);
    }
    let written = lines.iter().filter(|line| line.metric == "headwater_written_bytes_total");
    let written: Vec<_> = written.map(|line| (line.labels["machine"].as_str(), line.value)).collect();
    assert_eq!(written, [("nbd:one", 0.0), ("nbd:two", 8192.0)]);
    // Once for all of them; less where this host is short of memory.
    let of_all = |metric: &str| {
        let found: Vec<_> = lines.iter().filter(|line| line.metric == metric).collect();
        assert_eq!(found.len(), 1, "{metric}: {found:?}");
        found[0].value
    };
    let (limit, shrinks) =
        (of_all("headwater_host_ram_limit_bytes"), of_all("headwater_host_pressure_shrinks_total"));
    assert!(
        limit == f64::from(64 << 20) || (shrinks > 0.0 && limit < f64::from(64 << 20)),
        "{limit}, {shrinks}"
    );
}

#[test]
fn what_machines_counted_stays_in_the_sums_of_the_host() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    let host_writes = || {
        let (status, text) = http(&daemon.socket(), "GET", "/metrics", None);
        assert_eq!(status, 200, "{text}");
        let (lines, _) = parse(&text);
        assert!(lines.iter().any(|line| line.metric == "headwater_host_read_blocks_total"));
        let line = lines.iter().find(|line| line.metric == "headwater_host_writes_total");
        line.unwrap_or_else(|| panic!("{text}")).value
    };
    assert_eq!(host_writes(), 0.0);
    for run in 1..=2 {
        daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
        for _ in 0..3 {
            daemon.console("lab", "w", Some("W"));
        }
        assert_eq!(host_writes(), f64::from(3 * run));
        daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
        assert_eq!(host_writes(), f64::from(3 * run));
    }
}

#[test]
fn people_and_programs_get_the_same_numbers() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    daemon.cli(&["stats", "lab"]).fails(4, &["'lab' has no metrics", "created", "start it"]);
    daemon.cli(&["stats", "nobody"]).fails(3, &["no machine 'nobody'"]);
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    daemon.console("lab", "w", Some("W"));
    let json = daemon.cli(&["stats", "lab", "--json"]).ok();
    let stats: Stats = serde_json::from_str(&json).unwrap();
    let writes = stats.samples.iter().find(|sample| sample.metric == "headwater_writes_total").unwrap();
    assert_eq!(writes.value, 1.0);
    assert!(
        stats.samples.iter().all(|sample| sample.labels.get("machine").is_some_and(|name| name == "lab"))
    );
    let text = daemon.cli(&["stats", "lab"]).ok();
    let row = text.lines().find(|line| line.contains("headwater_cache_ram_target_bytes")).unwrap();
    assert!(row.starts_with("lab ") && row.ends_with("64.0 MiB"), "{row}");
    let all = daemon.cli(&["stats"]).ok();
    assert!(
        all.contains("headwater_host_ram_limit_bytes") && all.contains("headwater_writes_total"),
        "{all}"
    );
}

#[test]
fn watching_goes_on_and_shows_rates() {
    let daemon = Daemon::start();
    let mut watch = headwater()
        .args(["stats", "--watch", "--data-dir"])
        .arg(daemon.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let _watchdog = support::Watchdog::on(watch.id());
    let mut lines = std::io::BufReader::new(watch.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().ends_with("RATE")), "it ended before it looked again");
    // Not INT: whoever runs tests in the background may have it ignored.
    signal(watch.id(), "TERM");
    watch.wait().unwrap();
}

/// What the documentation says about a metric.
fn row(family: &Family) -> String {
    let labels: Vec<String> = family.labels.iter().map(|label| format!("`{label}`")).collect();
    format!("| `{}` | {} | {} | {} |", family.name, family.kind.name(), labels.join(", "), family.help)
}

#[test]
fn the_documentation_lists_what_there_is() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
    let document = std::fs::read_to_string(&path).unwrap();
    let wanted: Vec<String> = FAMILIES.iter().map(row).collect();
    // Other tables name metrics, too, and have no column for the kind.
    let kinds = [" | counter | ", " | gauge | ", " | summary | "];
    let is_row =
        |line: &&str| line.starts_with("| `headwater_") && kinds.iter().any(|kind| line.contains(kind));
    if std::env::var_os("HEADWATER_BLESS").is_some() {
        let prose: Vec<&str> = document.lines().filter(|line| !is_row(line)).collect();
        std::fs::write(&path, format!("{}\n{}\n", prose.join("\n"), wanted.join("\n"))).unwrap();
        return;
    }
    let there: Vec<&str> = document.lines().filter(is_row).collect();
    assert_eq!(
        there, wanted,
        "docs/metrics.md is outdated; run this test with HEADWATER_BLESS=1 to update it"
    );
    assert!(FAMILIES.iter().any(|family| family.kind == Kind::Summary));
}
