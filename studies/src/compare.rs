//! `compare A B`: two reports of one study beside each other.

use std::path::Path;

use anyhow::{Context, Result, bail};
use headwater_report::page::{Column, text_table};
use headwater_report::statistics::{Estimate, estimate, estimate_ratio};
use serde_json::Value;

/// A figure of a report: what it is, and its samples.
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

/// Facts of both reports that should be the same, where they are to be compared.
const CONDITIONS: [(&str, &str); 8] = [
    ("/is_quick", "quick runs"),
    ("/seed", "seed"),
    ("/rounds", "rounds"),
    ("/run_ms", "length of a run, in ms"),
    ("/over", "protocol"),
    ("/storage", "storage"),
    ("/machine/processor", "processor"),
    ("/machine/disk", "disk"),
];

/// The table of two reports, and what makes them hard to compare.
pub fn text(a: &Path, b: &Path) -> Result<String> {
    let (left, right) = (results(a)?, results(b)?);
    let study = |of: &Value| of["study"].as_str().unwrap_or("unknown").to_owned();
    if study(&left) != study(&right) {
        bail!(
            "{} is a report of study {}, and {} of study {}: only reports of one study can be compared",
            a.display(),
            study(&left),
            b.display(),
            study(&right)
        );
    }
    let (ours, theirs) = (figures(&right), figures(&left));
    let rows: Vec<Vec<String>> = theirs
        .iter()
        .filter_map(|figure| Some(row(figure, ours.iter().find(|other| other.name == figure.name)?)))
        .collect();
    if rows.is_empty() {
        bail!("{} and {} have no figure in common: was one of them interrupted?", a.display(), b.display());
    }
    let mut text = format!(
        "Study {}: A is {}, B is {}\n\n{}",
        study(&left),
        a.display(),
        b.display(),
        text_table(&HEAD, &rows)
    );
    for (pointer, what) in CONDITIONS {
        let (left, right) = (left.pointer(pointer), right.pointer(pointer));
        if left != right {
            let shown = |value: Option<&Value>| value.map_or("unknown".into(), Value::to_string);
            text.push_str(&format!("\nDifferent {what}: {} and {}.", shown(left), shown(right)));
        }
    }
    for (name, of) in [("A", &left), ("B", &right)] {
        if of["is_quiet"] == false {
            text.push_str(&format!("\n{name} was measured on an unquiet machine."));
        }
        if of["interrupted"] == true {
            text.push_str(&format!("\n{name} was interrupted."));
        }
    }
    Ok(text)
}

/// The results of a report.
fn results(dir: &Path) -> Result<Value> {
    let path = dir.join("results.json");
    let cannot = || format!("{} is no report of headwater-study", dir.display());
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}", path.display()))
        .with_context(cannot)?;
    serde_json::from_str(&text).with_context(|| format!("{} is broken", path.display())).with_context(cannot)
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
        // One sample has no interval.
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

/// Three digits that count.
fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => headwater_report::number::grouped(value),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 0.1 || size == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

/// The figures of a report, whatever study it is of.
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

/// IOPS, ratios to the baseline and latencies of each case and variant.
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

/// Of study 000: IOPS of users at work, and percentiles.
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

/// Of study 003: the operations of the storage in each interval.
fn copies(of: &Value) -> Vec<Figure> {
    let of_outcome = |outcome: &Value| {
        let title = text_of(&outcome["title"]).to_owned();
        ["storage_writes", "storage_reads"].map(|name| {
            let samples = numbers(&outcome[name]);
            let mean = samples.iter().sum::<f64>() / samples.len().max(1) as f64;
            Figure { name: format!("{title}: mean {name}/s"), samples: vec![mean] }
        })
    };
    list(of, "outcomes").flat_map(of_outcome).collect()
}

/// Of a sizing: the advice.
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
        json!({"study": "001", "seed": seed, "baseline": "raw", "samples": samples})
    }

    #[test]
    fn figures_that_differ_are_told_from_those_that_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        report(&a, &measured_report(1, [100.0, 101.0, 102.0]));
        report(&b, &measured_report(2, [200.0, 203.0, 201.0]));
        let text = text(&a, &b).unwrap();
        let row = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
        let ours = row("ours, v: IOPS");
        assert!(
            ours.contains("101 [100, 102]") && ours.contains("1.99 [") && ours.ends_with("B is higher"),
            "{ours}"
        );
        assert!(row("ours, v: ratio").contains("1.01 [1.00, 1.02]"), "{text}");
        assert!(row("raw, v: IOPS").ends_with("no"), "{text}");
        assert!(text.contains("Different seed: 1 and 2"), "{text}");
    }

    #[test]
    fn what_is_no_report_or_of_another_study_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        report(&a, &measured_report(1, [1.0, 1.0, 1.0]));
        let missing = format!("{:#}", text(&a, &b).unwrap_err());
        assert!(missing.contains("b is no report") && missing.contains("results.json"), "{missing}");
        report(&b, &json!({"study": "002"}));
        let other = text(&a, &b).unwrap_err().to_string();
        assert!(other.contains("study 001") && other.contains("study 002"), "{other}");
        std::fs::write(b.join("results.json"), "{").unwrap();
        let broken = format!("{:#}", text(&a, &b).unwrap_err());
        assert!(broken.contains("is broken"), "{broken}");
    }
}
