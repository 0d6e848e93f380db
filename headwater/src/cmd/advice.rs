//! `headwater catalog advice`: prints the daemon's advice on the sizes of a catalog's write caches as text. The
//! daemon computes it.

use headwater_api::advice::RUNS_NEEDED;
use headwater_api::{CacheMode, CatalogAdvice, HostAdvice};
use headwater_block::size;

use crate::show;

/// Writes the advice, and the commands that follow it.
pub fn show(advice: &CatalogAdvice) -> anyhow::Result<()> {
    for line in lines(advice) {
        show::line(&line)?;
    }
    Ok(())
}

fn lines(advice: &CatalogAdvice) -> Vec<String> {
    let CatalogAdvice { catalog, runs, limited_runs, now, .. } = advice;
    let mut lines = vec![match limited_runs {
        0 => format!("catalog {catalog}: {runs} runs"),
        limited => format!("catalog {catalog}: {runs} runs, in {limited} of which writes waited for space"),
    }];
    if *runs > 0 {
        lines.push(format!(
            "peak of live data in the write cache: {} in the largest run, {} in the median run",
            size::format(advice.live_max_bytes),
            size::format(advice.live_median_bytes)
        ));
    }
    if let Some(share) = advice.ram_share {
        lines.push(format!(
            "stayed in RAM: {:.1} % of the written data, with the limits that the machines had",
            share * 100.0
        ));
    }
    lines.push(String::new());
    match advice.advised {
        Some(sizes) => {
            let (ram, disk) = (size::format(sizes.ram_bytes), size::format(sizes.disk_bytes));
            lines.push(format!("RAM   {:>8} now, {ram:>8} so that nothing is spilled", ram_now(advice)));
            lines.push(format!("disk  {:>8} now, {disk:>8} for all that may be spilled", disk_now(advice)));
            lines.push(format!("with a certainty of 95 %, {}", advice.reason));
            lines.push(String::new());
            lines.push("to change an existing machine, also while it is on:".to_owned());
            let (ram, disk) = (sizes.ram_bytes >> 20, sizes.disk_bytes >> 20);
            let flags = match now.mode {
                CacheMode::Ram => format!("--ram {ram}M"),
                CacheMode::Disk => format!("--disk {disk}M"),
                CacheMode::RamDisk => format!("--ram {ram}M --disk {disk}M"),
            };
            lines.push(format!("  headwater machine set MACHINE {flags}"));
        }
        None => {
            lines.push(format!("no advice: {}", advice.reason));
            lines.push(
                "until then, a rule of thumb: 256M to 512M of RAM for a desktop, 2G to 8G for a host of sessions"
                    .to_owned(),
            );
            if *runs < RUNS_NEEDED {
                lines.push(
                    "each start of a machine of the catalog, until it is off or reset, is a run".to_owned(),
                );
            }
        }
    }
    lines.push(String::new());
    lines.extend(of_host(&advice.host));
    lines
}

fn ram_now(advice: &CatalogAdvice) -> String {
    if advice.now.mode == CacheMode::Disk { "none".to_owned() } else { size::format(advice.now.ram_bytes) }
}

fn disk_now(advice: &CatalogAdvice) -> String {
    if advice.now.mode == CacheMode::Ram { "none".to_owned() } else { size::format(advice.now.disk_bytes) }
}

fn of_host(host: &HostAdvice) -> Vec<String> {
    let mut lines = Vec::new();
    match (host.live_p99_bytes, host.ram_bytes) {
        (Some(live), Some(ram)) => lines.push(format!(
            "host: all write caches together held at most {} in 99 % of {} samples: --cache-ram {}M is enough for that, and {} is configured",
            size::format(live),
            host.samples,
            ram >> 20,
            size::format(host.configured_bytes)
        )),
        _ => lines.push(format!(
            "host: not enough samples of its write caches yet: {} of 100, one every five minutes",
            host.samples
        )),
    }
    match (host.days_to_full, host.days_to_full_at_least) {
        (Some(days), Some(earliest)) => lines.push(format!(
            "host: {} of disk are free; as it goes on now, they are used up in about {days:.0} days (with a certainty of 95 % \
             not before {earliest:.0} days)",
            size::format(host.free_bytes)
        )),
        _ => lines.push(format!(
            "host: {} of disk are free; the samples show no certain decrease",
            size::format(host.free_bytes)
        )),
    }
    lines
}

#[cfg(test)]
mod tests {
    use headwater_api::{AdvisedSizes, CacheSettings};

    use super::*;

    #[test]
    fn an_advice_names_the_sizes_or_says_what_is_missing() {
        let advice = CatalogAdvice {
            catalog: "class".to_owned(),
            runs: 12,
            runs_needed: RUNS_NEEDED,
            limited_runs: 0,
            now: CacheSettings::default(),
            live_median_bytes: 80 << 20,
            live_max_bytes: 140 << 20,
            ram_share: Some(0.972),
            advised: None,
            reason: "not enough runs yet: 12 of 59".to_owned(),
            host: HostAdvice { samples: 3, free_bytes: 1 << 30, ..HostAdvice::default() },
        };
        let text = lines(&advice).join("\n");
        for part in ["no advice: not enough runs yet: 12 of 59", "97.2 %", "rule of thumb", "3 of 100"] {
            assert!(text.contains(part), "no {part} in {text}");
        }
        let advised = Some(AdvisedSizes { ram_bytes: 224 << 20, disk_bytes: 240 << 20 });
        let host = HostAdvice {
            live_p99_bytes: Some(1 << 30),
            ram_bytes: Some(1500 << 20),
            days_to_full: Some(43.2),
            days_to_full_at_least: Some(41.0),
            ..advice.host.clone()
        };
        let text = lines(&CatalogAdvice { advised, host, limited_runs: 2, ..advice }).join("\n");
        for part in
            ["--ram 224M --disk 240M", "in 2 of which writes waited", "--cache-ram 1500M", "about 43 days"]
        {
            assert!(text.contains(part), "no {part} in {text}");
        }
    }
}
