//! `headwater status`: the daemon and its host.

use headwater_api::HostRam;
use headwater_block::size;

use crate::client::Client;
use crate::show;

/// Shows what the daemon does.
pub async fn run(client: Client, json: bool) -> anyhow::Result<u8> {
    let status = client.status().await?;
    if json {
        return show::json(&status).map(|()| 0);
    }
    let active = format!("{}, {} of them on", status.machines, status.machines_active);
    show::pairs(&[
        ("version", status.version),
        ("process", status.pid.to_string()),
        ("running since", show::time(status.started_at_ms)),
        ("data directory", status.data_dir),
        ("free there", size::format(status.free_bytes)),
        ("machines run by", status.hypervisor),
        ("images", status.images.map_or_else(unknown, |images| images.to_string())),
        ("store takes", status.store_bytes.map_or_else(unknown, size::format)),
        ("machines", active),
        ("write caches in RAM", size::format(status.ram_used_bytes)),
        ("of the host's budget", budget(&status.host_ram)),
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

fn unknown() -> String {
    "not known: the store does not tell".to_owned()
}

/// The memory that all write caches share, in words.
fn budget(ram: &HostRam) -> String {
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
