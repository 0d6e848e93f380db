//! `headwater stats`: prints the metrics of the host and its machines.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::Duration;

use headwater_api::metrics::{Kind, Stats, family};
use headwater_block::size;

use crate::cli::StatsArgs;
use crate::client::Client;
use crate::show;

/// The interval of `--watch`.
const INTERVAL: Duration = Duration::from_secs(1);

/// Shows the metrics once, or each second until Ctrl-C.
pub async fn run(client: Client, args: StatsArgs, json: bool) -> anyhow::Result<u8> {
    let mut before: Option<Stats> = None;
    loop {
        let stats = client.stats(args.machine.as_deref()).await?;
        if json {
            show::line(&serde_json::to_string(&stats)?)?;
        } else {
            if args.watch && std::io::stdout().is_terminal() {
                show::bytes(b"\x1b[H\x1b[2J")?;
            }
            show::line(&text(&stats, before.as_ref()))?;
        }
        if !args.watch {
            return Ok(0);
        }
        before = Some(stats);
        tokio::time::sleep(INTERVAL).await;
    }
}

/// A row for each value. With the previous values, also the rates of counters.
fn text(stats: &Stats, before: Option<&Stats>) -> String {
    let old: BTreeMap<_, _> =
        before.iter().flat_map(|b| &b.samples).map(|s| ((&s.metric, &s.labels), s.value)).collect();
    let passed_s = before.map_or(0.0, |b| stats.at_ms.saturating_sub(b.at_ms) as f64 / 1e3);
    let rows = stats.samples.iter().map(|sample| {
        let machine = sample.labels.get("machine").map_or("-", String::as_str);
        let labels: Vec<String> = sample
            .labels
            .iter()
            .filter(|(name, _)| *name != "machine")
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        let mut row = vec![
            machine.to_owned(),
            sample.metric.clone(),
            labels.join(" "),
            value(&sample.metric, sample.value),
        ];
        if passed_s > 0.0 {
            let is_counter = family(&sample.metric).is_some_and(|family| family.kind == Kind::Counter);
            let grown = old.get(&(&sample.metric, &sample.labels)).map(|old| {
                // The counter of a machine that was restarted begins at zero.
                if sample.value < *old { sample.value } else { sample.value - old }
            });
            row.push(match grown {
                Some(grown) if is_counter => {
                    let rate = grown / passed_s;
                    let is_time = sample.metric.contains("_seconds");
                    format!("{}/s", value(&sample.metric, if is_time { rate } else { rate.round() }))
                }
                _ => String::new(),
            });
        }
        row
    });
    let headings = ["MACHINE", "METRIC", "", "VALUE", "RATE"];
    let shown = if passed_s > 0.0 { &headings[..] } else { &headings[..4] };
    let rows: Vec<_> = rows.collect();
    show::table_text(shown, rows)
}

/// A value in the unit of the metric's name.
fn value(metric: &str, value: f64) -> String {
    let stem = metric.trim_end_matches("_total").trim_end_matches("_sum");
    if stem.ends_with("_bytes") {
        // Values in bytes are whole and not negative.
        size::format(value as u64)
    } else if stem.ends_with("_time_seconds") {
        show::time((value * 1e3) as u64)
    } else if stem.ends_with("_seconds") && !metric.ends_with("_count") {
        time(value)
    } else {
        format!("{value}")
    }
}

fn time(seconds: f64) -> String {
    match seconds {
        0.0 => "0 s".to_owned(),
        s if s < 1e-3 => format!("{:.1} us", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.1} s"),
    }
}

#[cfg(test)]
mod tests {
    use headwater_api::Sample;

    use super::*;

    #[test]
    fn values_are_shown_in_their_units_and_counters_with_rates() {
        assert_eq!(value("headwater_spilled_bytes_total", 1048576.0), "1.0 MiB");
        assert_eq!(value("headwater_latency_seconds", 0.000_001_25), "1.2 us");
        assert_eq!(value("headwater_latency_seconds_sum", 2.0), "2.0 s");
        assert_eq!(value("headwater_latency_seconds_count", 7.0), "7");
        assert_eq!(value("headwater_boot_seconds", 0.25), "250.00 ms");
        let stats = |at_ms, reads| {
            let samples = vec![
                Sample::new("headwater_reads_total", reads).with("machine", "a"),
                Sample::new("headwater_cache_ram_used_bytes", 4096).with("machine", "a"),
            ];
            Stats::new(at_ms, samples)
        };
        let shown = text(&stats(3000, 50), Some(&stats(1000, 10)));
        let lines: Vec<&str> = shown.lines().collect();
        assert!(lines[0].ends_with("RATE") && lines[2].ends_with("20/s"), "{shown}");
        assert!(lines[1].ends_with("4.0 KiB"), "{shown}");
        assert!(!text(&stats(1, 1), None).contains("RATE"));
        // It was reset between the two.
        let shown = text(&stats(3000, 10), Some(&stats(1000, 50)));
        assert!(shown.lines().nth(2).unwrap().ends_with(" 5/s"), "{shown}");
        let paused = |at_ms, seconds: f64| {
            Stats::new(
                at_ms,
                vec![Sample::real("headwater_paused_seconds_total", seconds).with("machine", "a")],
            )
        };
        let shown = text(&paused(2000, 3.4), Some(&paused(1000, 3.0)));
        assert!(shown.ends_with("400.00 ms/s"), "{shown}");
    }
}
