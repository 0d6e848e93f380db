//! `headwater status`: prints the state of the daemon and its host.

use headwater_api::HostRam;
use headwater_block::size;

use crate::client::Client;
use crate::show;

/// Figures of the store are queried again after a minute; if that takes long, older ones are shown, with their age if
/// they are older than this.
const OLD_S: u64 = 75;

/// Prints the status.
pub async fn run(client: Client, json: bool) -> anyhow::Result<u8> {
    let status = client.status().await?;
    if json {
        return show::json(&status).map(|()| 0);
    }
    let active = format!("{}, {} of them on", status.machines, status.machines_active);
    let asked = asked(status.store_age_ms, status.store_outdated);
    let unknown = || unknown(status.store_outdated);
    let or_none = |url: Option<String>| url.unwrap_or_else(|| "-".to_owned());
    show::pairs(&[
        ("version", status.version),
        ("process", status.pid.to_string()),
        ("running since", show::time(status.started_at_ms)),
        ("API over TCP", or_none(status.api_url)),
        ("web console", or_none(status.console_url)),
        ("its certificate", or_none(status.fingerprint)),
        ("data directory", status.data_dir),
        ("free there", size::format(status.free_bytes)),
        ("machines run by", status.hypervisor),
        ("images", status.images.map_or_else(unknown, |images| format!("{images}{asked}"))),
        ("store takes", status.store_bytes.map_or_else(unknown, |bytes| size::format(bytes) + &asked)),
        ("machines", active),
        ("tasks", format!("{} running, {} waiting", status.tasks_running, status.tasks_waiting)),
        ("write caches in RAM", size::format(status.ram_used_bytes)),
        ("of the host's limit", budget(&status.host_ram)),
        ("write caches on disk", size::format(status.disk_used_bytes)),
        (
            "alarms",
            if status.alarms.is_empty() { "none".to_owned() } else { status.alarms.len().to_string() },
        ),
    ])?;
    for alarm in status.alarms {
        let (since, text) = (show::time(alarm.since_ms), show::printable(&alarm.to_string()));
        show::line(&format!("ALARM: {} since {since}: {text}", alarm.subject))?;
    }
    Ok(0)
}

fn unknown(outdated: bool) -> String {
    let why = if outdated { "the store does not answer" } else { "this kind of store does not report it" };
    format!("not known: {why}")
}

/// The age of the store's figures, if they are outdated or old.
fn asked(age_ms: Option<u64>, outdated: bool) -> String {
    match age_ms.map(|ms| ms / 1000) {
        Some(age_s) if outdated => {
            format!(", as of {age_s} s ago: the store has not answered since, or was changed")
        }
        Some(age_s) if age_s >= OLD_S => format!(", as of {age_s} s ago"),
        _ => String::new(),
    }
}

/// The memory that all write caches share, in words.
pub fn budget(ram: &HostRam) -> String {
    let (used, limit) = (size::format(ram.used_bytes), size::format(ram.limit_bytes));
    let mut text = format!("{used} of {limit}");
    if ram.limit_bytes < ram.configured_bytes {
        let configured = size::format(ram.configured_bytes);
        text.push_str(&format!(", lowered from {configured} under memory pressure"));
    } else if ram.pressure_shrinks > 0 {
        text.push_str(&format!(", lowered {} times under memory pressure", ram.pressure_shrinks));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_that_memory_pressure_lowered_says_so() {
        let ram = |limit_mib: u64, pressure_shrinks| HostRam {
            configured_bytes: 4 << 30,
            limit_bytes: limit_mib << 20,
            used_bytes: 1 << 30,
            pressure_shrinks,
        };
        for (ram, words) in [
            (ram(4096, 0), "1.0 GiB of 4.0 GiB"),
            (ram(2048, 3), "1.0 GiB of 2.0 GiB, lowered from 4.0 GiB under memory pressure"),
            (ram(4096, 3), "1.0 GiB of 4.0 GiB, lowered 3 times under memory pressure"),
        ] {
            assert_eq!(budget(&ram), words);
        }
    }
}
