//! Implements `compare A B`: compares two reports of the same study.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use headwater_report::page::{Column, text_table};
use headwater_report::statistics::{Estimate, estimate, estimate_ratio};
use serde_json::Value;

/// A figure of a report: its name and its samples.
struct Figure {
    name: String,
    samples: Vec<f64>,
}

const HEAD: [Column; 5] = [
    Column::Text("Figure"),
    Column::Figure("A [95 %]"),
    Column::Figure("B [95 %]"),
    Column::Figure("B / A [95 %]"),
    Column::Text("Differs?"),
];

/// The columns if the loads differ: without ratio and verdict.
const HEAD_OF_OTHER_LOADS: [Column; 3] = [HEAD[0], HEAD[1], HEAD[2]];

/// The format version of `results.json` that this program reads.
const SCHEMA: u64 = 1;

/// The most names in a list.
const LISTED: usize = 6;

/// Fields that are part of the load. Figures of reports with different loads are not compared.
const LOAD: [(&str, &str); 11] = [
    ("/is_quick", "quick run"),
    ("/is_guest", "a guest instead of the model"),
    ("/guest_work", "work of the guest"),
    ("/is_emulated", "an emulated processor of the guest"),
    ("/image_sha256", "image of the guest"),
    ("/seed", "seed"),
    ("/data", "data of writes"),
    ("/speed", "speed of the model"),
    ("/interval_us", "interval between two samples, in us"),
    ("/loops", "loops of a session"),
    ("/users", "users"),
];

/// Fields that are not part of the load, but can explain a difference.
const CONDITIONS: [(&str, &str); 7] = [
    ("/rounds", "rounds"),
    ("/run_ms", "length of a run, in ms"),
    ("/over", "protocol"),
    ("/storage", "storage"),
    ("/machine/processor", "processor"),
    ("/machine/disk", "disk"),
    ("/version", "version of the program"),
];

/// Compares two reports: a table, and the facts that limit the comparison.
pub fn text(a: &Path, b: &Path) -> Result<String> {
    let (left, right) = (results(a)?, results(b)?);
    let study = |of: &Value| text_of(&of["study"]).to_owned();
    if study(&left) != study(&right) {
        bail!(
            "{} is a report of study {}, and {} of study {}: only reports of one study can be compared",
            a.display(),
            study(&left),
            b.display(),
            study(&right)
        );
    }
    let (of_a, of_b) = (figures(&left), figures(&right));
    let both: Vec<(&Figure, &Figure)> = of_a
        .iter()
        .filter_map(|figure| Some((figure, of_b.iter().find(|other| other.name == figure.name)?)))
        .collect();
    if both.is_empty() {
        bail!(
            "{} and {} have no figure in common; perhaps one of them was interrupted",
            a.display(),
            b.display()
        );
    }
    let mut lines = vec![format!("Study {}: A is {}, B is {}", study(&left), a.display(), b.display())];
    for (name, of) in [("A", &left), ("B", &right)] {
        lines.extend(faults(name, of));
    }
    let loads = different_loads(&left, &right);
    if !loads.is_empty() {
        lines.push("A and B had different loads, so their figures are not compared:".into());
        lines.extend(loads.iter().map(|load| format!("- {load}")));
    }
    for (pointer, what) in CONDITIONS {
        let difference = different(&left, &right, pointer, what);
        lines.extend(difference.map(|difference| format!("Different {difference}.")));
    }
    lines.extend(different_counts(&left, &right));
    lines.extend(only_in("A", &of_a, &of_b));
    lines.extend(only_in("B", &of_b, &of_a));
    let rows: Vec<Vec<String>> = both.iter().map(|(a, b)| row(a, b)).collect();
    let table = if loads.is_empty() {
        text_table(&HEAD, &rows)
    } else {
        let short: Vec<Vec<String>> = rows.into_iter().map(|row| row[..3].to_vec()).collect();
        text_table(&HEAD_OF_OTHER_LOADS, &short)
    };
    Ok(format!("{}\n\n{table}", lines.join("\n")))
}

/// Reads `results.json` of a report.
fn results(dir: &Path) -> Result<Value> {
    let path = dir.join("results.json");
    let cannot = || format!("{} is not a report of headwater-study", dir.display());
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}", path.display()))
        .with_context(cannot)?;
    let results: Value = serde_json::from_str(&text)
        .with_context(|| format!("{} is broken", path.display()))
        .with_context(cannot)?;
    if results["study"].as_str().is_none() {
        return Err(anyhow!("{} does not name its study", path.display())).with_context(cannot);
    }
    match results["schema"].as_u64() {
        Some(SCHEMA) => Ok(results),
        found => {
            let found = found.map_or("none".into(), |found| found.to_string());
            bail!(
                "{} has schema {found}, but this program reads schema {SCHEMA}: compare with the program that wrote the report",
                path.display()
            )
        }
    }
}

/// Reasons to distrust the figures of a report.
fn faults(name: &str, of: &Value) -> Vec<String> {
    let mut faults = Vec::new();
    if let Some(failure) = of["failure"].as_str() {
        faults.push(format!("{name} failed, and contains only the figures up to then: {failure}."));
    }
    if of["interrupted"] == true {
        faults.push(format!("{name} was interrupted, and contains only the figures up to then."));
    }
    if of["is_quiet"] == false {
        faults.push(format!("{name} was measured on a host that was not idle."));
    }
    faults
}

/// A different value: its name, and the value in each report.
fn different(left: &Value, right: &Value, pointer: &str, what: &str) -> Option<String> {
    let (left, right) = (left.pointer(pointer), right.pointer(pointer));
    let shown = |value: Option<&Value>| value.map_or("unknown".into(), Value::to_string);
    // A field that only one of the programs wrote counts as false in the other report.
    let is_same = left == right || (left.is_none() && right == Some(&Value::Bool(false)));
    let is_same = is_same || (right.is_none() && left == Some(&Value::Bool(false)));
    (!is_same).then(|| format!("{what}: {} and {}", shown(left), shown(right)))
}

/// Pairs of list entries with the same name in both reports.
fn named<'a>(
    left: &'a Value,
    right: &'a Value,
    list_name: &'static str,
    name: &'static str,
) -> impl Iterator<Item = (String, &'a Value, &'a Value)> {
    list(left, list_name).filter_map(move |ours| {
        let theirs = list(right, list_name).find(|theirs| theirs[name] == ours[name])?;
        Some((text_of(&ours[name]).to_owned(), ours, theirs))
    })
}

/// The differences between the loads of two reports.
fn different_loads(left: &Value, right: &Value) -> Vec<String> {
    let mut found: Vec<String> =
        LOAD.iter().filter_map(|(pointer, what)| different(left, right, pointer, what)).collect();
    let parts = [
        ("cases", "name", "/set_bytes", "bytes of the set"),
        ("machines", "title", "/users", "users of a machine"),
        ("machines", "title", "/ram_bytes", "limit of RAM"),
        ("scenarios", "title", "/ram_bytes", "limit of RAM"),
    ];
    for (list_name, name, pointer, what) in parts {
        for (entry, ours, theirs) in named(left, right, list_name, name) {
            found.extend(different(ours, theirs, pointer, &format!("{what}, {entry}")));
        }
    }
    for (variant, ours, theirs) in named(left, right, "variants", "name") {
        if ours["jobs"] != theirs["jobs"] {
            found.push(format!("requests of the variant {variant}"));
        }
    }
    found.extend(different_models(left, right));
    found.extend(different_traces(left, right));
    found
}

/// Parameters of the desktop model that differ.
fn different_models(left: &Value, right: &Value) -> Vec<String> {
    let empty = serde_json::Map::new();
    let [ours, theirs] = [left, right].map(|of| of["profile"].as_object().unwrap_or(&empty));
    let mut names: Vec<&String> = ours.keys().chain(theirs.keys()).collect();
    names.sort();
    names.dedup();
    let value = |of: &serde_json::Map<String, Value>, name: &str| {
        of.get(name).map_or("unknown".into(), |parameter| parameter["value"].to_string())
    };
    let pairs = names.into_iter().map(|name| (name, value(ours, name), value(theirs, name)));
    pairs
        .filter(|(_, ours, theirs)| ours != theirs)
        .map(|(name, ours, theirs)| format!("{name} of the desktop model: {ours} and {theirs}"))
        .collect()
}

/// Whether two sizings used different traces. Traces are recognised by the number of requests of each desktop.
fn different_traces(left: &Value, right: &Value) -> Option<String> {
    let desktops = |of: &Value| -> Vec<(Value, Value)> {
        list(of, "desktops").map(|of| (of["requests"].clone(), of["written_bytes"].clone())).collect()
    };
    let (ours, theirs) = (desktops(left), desktops(right));
    (ours != theirs).then(|| {
        let shown = |of: &[(Value, Value)]| {
            let requests: u64 = of.iter().filter_map(|(requests, _)| requests.as_u64()).sum();
            format!("{} desktops with {requests} requests", of.len())
        };
        format!("trace: {} and {}", shown(&ours), shown(&theirs))
    })
}

/// The number of machines in study 000, as a condition: figures are per machine, so more machines only make them more
/// precise.
fn different_counts(left: &Value, right: &Value) -> Vec<String> {
    let counts = named(left, right, "machines", "title");
    let differences = counts.filter_map(|(title, ours, theirs)| {
        different(ours, theirs, "/count", &format!("number of machines, {title}"))
    });
    differences.map(|difference| format!("Different {difference}.")).collect()
}

/// Figures that only one report contains.
fn only_in(name: &str, of: &[Figure], other: &[Figure]) -> Option<String> {
    let lone: Vec<&str> = of
        .iter()
        .map(|figure| figure.name.as_str())
        .filter(|name| !other.iter().any(|figure| figure.name == *name))
        .collect();
    let more = lone.len().saturating_sub(LISTED);
    let more = if more == 0 { String::new() } else { format!(", and {more} more") };
    let shown = lone[..lone.len().min(LISTED)].join("; ");
    (!lone.is_empty()).then(|| format!("Only in {name}: {shown}{more}."))
}

fn row(a: &Figure, b: &Figure) -> Vec<String> {
    const SEED: u64 = 1;
    let shown = |of: Option<Estimate>| match of {
        Some(Estimate { median, interval: (low, high) }) if low < high => {
            format!("{} [{}, {}]", number(median), number(low), number(high))
        }
        Some(Estimate { median, .. }) => number(median),
        None => "-".into(),
    };
    let ratio = estimate_ratio(&b.samples, &a.samples, SEED);
    let verdict = match ratio {
        // A single sample has no interval.
        _ if a.samples.len() < 2 || b.samples.len() < 2 => "one sample each",
        Some(Estimate { interval: (low, high), .. }) if low <= 1.0 && high >= 1.0 => "no",
        Some(Estimate { median, .. }) if median > 1.0 => "B is higher",
        Some(_) => "B is lower",
        None => "-",
    };
    vec![
        a.name.clone(),
        shown(estimate(&a.samples, SEED)),
        shown(estimate(&b.samples, SEED)),
        shown(ratio),
        verdict.into(),
    ]
}

/// A number with three significant digits.
fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => headwater_report::number::grouped(value),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 0.1 || size == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

/// The figures of a report of any study.
fn figures(of: &Value) -> Vec<Figure> {
    let mut all = measured(of);
    all.extend(modelled(of));
    all.extend(copies(of));
    all.extend(sized(of));
    all
}

fn list<'a>(of: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    of[name].as_array().map_or(&[][..], Vec::as_slice).iter()
}

fn numbers(of: &Value) -> Vec<f64> {
    of.as_array().map_or(&[][..], Vec::as_slice).iter().filter_map(Value::as_f64).collect()
}

fn text_of(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// IOPS, ratios to the baseline and latencies for each case and variant.
fn measured(of: &Value) -> Vec<Figure> {
    let mut figures: Vec<Figure> = Vec::new();
    let mut add = |name: String, sample: Option<f64>| {
        let Some(sample) = sample else { return };
        match figures.iter_mut().find(|figure| figure.name == name) {
            Some(figure) => figure.samples.push(sample),
            None => figures.push(Figure { name, samples: vec![sample] }),
        }
    };
    for sample in list(of, "samples") {
        let of_case = format!("{}, {}", text_of(&sample["case"]), text_of(&sample["variant"]));
        let iops = sample["outcomes"]["iops"].as_f64();
        let mut same = list(of, "samples").filter(|other| {
            other["case"] == of["baseline"]
                && ["variant", "round"].iter().all(|name| other[name] == sample[name])
        });
        let baseline = same.next().and_then(|other| other["outcomes"]["iops"].as_f64());
        add(format!("{of_case}: IOPS"), iops);
        if sample["case"] != of["baseline"] {
            let ratio = iops.zip(baseline).filter(|(_, baseline)| *baseline > 0.0);
            add(format!("{of_case}: ratio"), ratio.map(|(iops, baseline)| iops / baseline));
        }
        add(format!("{of_case}: p99 in us"), sample["outcomes"]["p99_us"].as_f64());
    }
    figures
}

/// Study 000: IOPS of active users, and percentiles.
fn modelled(of: &Value) -> Vec<Figure> {
    let steady = list(of, "measured").filter_map(|measured| {
        let name =
            format!("{}, {}: IOPS of a user", text_of(&measured["machines"]), text_of(&measured["cache"]));
        let mut samples = numbers(&measured["steady_iops_by_machine"]);
        if samples.is_empty() {
            samples.extend(measured["steady_iops"].as_f64());
        }
        (!samples.is_empty()).then_some(Figure { name, samples })
    });
    let percentiles = list(of, "platforms").flat_map(|platform| {
        list(platform, "p95_iops").filter_map(|drawn| {
            let name =
                format!("{}, {}: p95 IOPS of 500 users", text_of(&platform["name"]), text_of(&drawn[0]));
            Some(Figure { name, samples: vec![drawn[1]["median"].as_f64()?] })
        })
    });
    steady.chain(percentiles).collect()
}

/// Study 003: operations of the storage (the mean of each run), and the sums of a guest's session.
fn copies(of: &Value) -> Vec<Figure> {
    let mut figures: Vec<Figure> = Vec::new();
    let mut add = |name: String, sample: f64| match figures.iter_mut().find(|figure| figure.name == name) {
        Some(figure) => figure.samples.push(sample),
        None => figures.push(Figure { name, samples: vec![sample] }),
    };
    for outcome in list(of, "outcomes") {
        let title = text_of(&outcome["title"]);
        for name in ["storage_writes", "storage_reads"] {
            match outcome["totals"][name].as_f64() {
                // Guests take different times for the same work, so sums are compared instead of rates.
                Some(total) => add(format!("{title}: {name} of the session"), total),
                None => {
                    let samples = numbers(&outcome[name]);
                    let mean = samples.iter().sum::<f64>() / samples.len().max(1) as f64;
                    add(format!("{title}: mean {name}/s"), mean);
                }
            }
        }
        if let Some(cpu_ms) = outcome["totals"]["cpu_ms"].as_f64() {
            add(format!("{title}: CPU ms for 1,000 requests"), cpu_ms);
        }
    }
    figures
}

/// Sizing: the recommended values.
fn sized(of: &Value) -> Vec<Figure> {
    let advised = of["advised_bytes"].as_f64();
    let figure = |bytes: f64| Figure { name: "RAM advised, MiB".into(), samples: vec![bytes / 1_048_576.0] };
    advised.map(figure).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn report(dir: &Path, of: &Value) {
        std::fs::create_dir_all(dir).unwrap();
        std::fs::write(dir.join("results.json"), of.to_string()).unwrap();
    }

    fn measured_report(seed: u64, iops: [f64; 3]) -> Value {
        let sample = |case: &str, round: usize, iops: f64| json!({"case": case, "variant": "v", "round": round, "outcomes": {"iops": iops, "p99_us": 5.0}});
        let samples: Vec<Value> = iops
            .iter()
            .enumerate()
            .flat_map(|(round, iops)| [sample("raw", round, 100.0), sample("ours", round, *iops)])
            .collect();
        json!({
            "schema": 1, "study": "001", "seed": seed, "is_quick": false, "baseline": "raw", "samples": samples,
            "cases": [{"name": "raw", "set_bytes": 1000}, {"name": "ours", "set_bytes": 1000}],
            "variants": [{"name": "v", "title": "V", "jobs": [{"depth": 16}]}]
        })
    }

    /// The comparison of two reports as text.
    fn compared(left: &Value, right: &Value) -> String {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        report(&a, left);
        report(&b, right);
        text(&a, &b).unwrap()
    }

    /// A copy of a report with one value changed.
    fn with(of: &Value, pointer: &str, value: Value) -> Value {
        let mut of = of.clone();
        *of.pointer_mut(pointer).unwrap() = value;
        of
    }

    #[test]
    fn significant_differences_are_marked() {
        let left = measured_report(1, [100.0, 101.0, 102.0]);
        let mut right = measured_report(1, [200.0, 203.0, 201.0]);
        right["rounds"] = json!(3);
        let text = compared(&left, &right);
        let row = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
        let ours = row("ours, v: IOPS");
        assert!(
            ours.contains("101 [100, 102]") && ours.contains("1.99 [") && ours.ends_with("B is higher"),
            "{ours}"
        );
        assert!(row("ours, v: ratio").contains("1.01 [1.00, 1.02]"), "{text}");
        assert!(row("raw, v: IOPS").ends_with("no"), "{text}");
        assert!(text.contains("Different rounds: unknown and 3."), "{text}");
        assert!(!text.contains("different loads"), "{text}");
    }

    #[test]
    fn reports_of_different_loads_are_shown_but_not_compared() {
        let left = measured_report(1, [100.0, 101.0, 102.0]);
        let changes = [
            ("/seed", json!(2), "- seed: 1 and 2"),
            ("/is_quick", json!(true), "- quick run: false and true"),
            ("/cases/1/set_bytes", json!(99), "- bytes of the set, ours: 1000 and 99"),
            ("/variants/0/jobs/0/depth", json!(1), "- requests of the variant v"),
        ];
        for (pointer, value, said) in changes {
            let text = compared(&left, &with(&left, pointer, value));
            assert!(text.contains("so their figures are not compared:") && text.contains(said), "{text}");
            assert!(!text.contains("B / A") && !text.contains("Differs?"), "{text}");
            let row = text.lines().find(|line| line.starts_with("ours, v: IOPS")).unwrap();
            assert_eq!(row.matches("101 [100, 102]").count(), 2, "{row}");
        }
        // The title of a variant is not part of the load.
        let text = compared(&left, &with(&left, "/variants/0/title", json!("other")));
        assert!(text.contains("B / A") && !text.contains("different loads"), "{text}");
    }

    #[test]
    fn parameters_and_sizes_of_the_desktop_studies_are_loads() {
        let left = json!({
            "schema": 1, "study": "000", "speed": 10.0, "loops": 2, "users": 500,
            "profile": {"loop_write_iops": {"value": 9.2, "source": "x"}},
            "machines": [{"title": "Desktops", "count": 40, "users": 1, "ram_bytes": 512}],
            "measured": [{"machines": "Desktops", "cache": "Ram", "steady_iops_by_machine": [1.0, 1.1]}]
        });
        let loads = [
            ("/profile/loop_write_iops/value", json!(8), "loop_write_iops of the desktop model: 9.2 and 8"),
            ("/loops", json!(4), "loops of a session: 2 and 4"),
            ("/speed", json!(60.0), "speed of the model: 10.0 and 60.0"),
            ("/machines/0/ram_bytes", json!(256), "limit of RAM, Desktops: 512 and 256"),
        ];
        for (pointer, value, said) in loads {
            let text = compared(&left, &with(&left, pointer, value));
            assert!(text.contains(&format!("- {said}")) && !text.contains("B / A"), "{text}");
        }
        // The number of machines that fit in RAM: the load of each machine is the same.
        let text = compared(&left, &with(&left, "/machines/0/count", json!(20)));
        assert!(text.contains("Different number of machines, Desktops: 40 and 20."), "{text}");
        assert!(text.contains("B / A"), "{text}");
        let text = compared(&left, &with(&left, "/profile/loop_write_iops/source", json!("y")));
        assert!(text.contains("B / A"), "{text}");
    }

    #[test]
    fn rounds_of_a_guest_are_samples_and_its_work_is_a_load() {
        let outcome = |writes: u64| json!({"title": "256 MB", "storage_writes": [9.0], "totals": {"storage_writes": writes, "storage_reads": 5, "cpu_ms": 2.5}});
        let left = json!({"schema": 1, "study": "003", "is_guest": true, "guest_work": {"segments": 4},
            "outcomes": [outcome(10), outcome(12)]});
        let text = compared(&left, &left);
        assert!(
            text.contains("256 MB: storage_writes of the session") && text.contains("11.0 [10.0, 12.0]"),
            "{text}"
        );
        let text = compared(&left, &with(&left, "/guest_work/segments", json!(1)));
        assert!(text.contains("- work of the guest: ") && !text.contains("B / A"), "{text}");
        let mut emulated = left.clone();
        emulated["is_emulated"] = json!(true);
        let text = compared(&left, &emulated);
        assert!(text.contains("- an emulated processor of the guest: unknown and true"), "{text}");
        let model =
            json!({"schema": 1, "study": "003", "outcomes": [{"title": "256 MB", "storage_writes": [1.0]}]});
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        report(&a, &left);
        report(&b, &model);
        let refused = text_of_error(&a, &b);
        assert!(refused.contains("have no figure in common"), "{refused}");
    }

    fn text_of_error(a: &Path, b: &Path) -> String {
        format!("{:#}", text(a, b).unwrap_err())
    }

    #[test]
    fn sizings_of_different_traces_are_not_compared() {
        let left = json!({"schema": 1, "study": "sizing", "advised_bytes": 1 << 20, "source": "a.rec",
            "desktops": [{"requests": 10, "written_bytes": 4096}]});
        let text = compared(&left, &with(&left, "/desktops/0/requests", json!(11)));
        assert!(
            text.contains("- trace: 1 desktops with 10 requests and 1 desktops with 11 requests"),
            "{text}"
        );
        assert!(compared(&left, &with(&left, "/source", json!("copy.rec"))).contains("B / A"));
    }

    #[test]
    fn faults_and_unpaired_figures_are_reported() {
        let left = measured_report(1, [100.0, 101.0, 102.0]);
        let mut right = left.clone();
        right["failure"] = json!("the disk is full");
        right["interrupted"] = json!(true);
        right["is_quiet"] = json!(false);
        right["samples"].as_array_mut().unwrap().retain(|sample| sample["case"] == "raw");
        let text = compared(&left, &right);
        for said in [
            "B failed, and contains only the figures up to then: the disk is full.",
            "B was interrupted",
            "B was measured on a host that was not idle.",
            "Only in A: ours, v: IOPS; ours, v: ratio; ours, v: p99 in us.",
        ] {
            assert!(text.contains(said), "{said}: {text}");
        }
        assert!(!text.contains("Only in B"), "{text}");
    }

    #[test]
    fn directories_without_a_report_and_other_studies_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        report(&a, &measured_report(1, [1.0, 1.0, 1.0]));
        let refused = || format!("{:#}", text(&a, &b).unwrap_err());
        let missing = refused();
        assert!(missing.contains("b is not a report") && missing.contains("results.json"), "{missing}");
        report(&b, &json!({"study": "002", "schema": 1}));
        let other = refused();
        assert!(other.contains("study 001") && other.contains("study 002"), "{other}");
        report(&b, &json!({"study": "001", "schema": 1, "samples": []}));
        assert!(refused().contains("have no figure in common"), "{}", refused());
        report(&b, &json!({"study": "001", "schema": 9}));
        assert!(refused().contains("has schema 9, but this program reads schema 1"), "{}", refused());
        for broken in ["{", "[]", "{\"schema\": 1}"] {
            std::fs::write(b.join("results.json"), broken).unwrap();
            let said = refused();
            assert!(said.contains("b is not a report") && said.contains("results.json"), "{said}");
        }
    }
}
