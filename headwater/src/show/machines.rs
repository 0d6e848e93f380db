//! Tables of machines.

use headwater_api::{CacheMode, CacheSettings, Machine};
use headwater_block::size;
use headwater_volume::disk_mode_ram_bytes;

use crate::show::{printable, seconds, table_text};

/// The columns of the live table, which fits on a terminal of 80 columns and begins each full row.
const LIVE: [&str; 8] =
    ["MACHINE", "STATE", "BOOT S", "IMAGE READ", "RAM USED", "DISK USED", "SPILLED", "IOPS"];

/// The further columns of a full row.
const MORE: [&str; 4] = ["RAM LIMIT", "VERSION", "CATALOG", "REASON"];

/// The memory limit of a write cache. In mode `disk` it is fixed and not in the settings.
pub fn ram_limit_bytes(cache: &CacheSettings) -> u64 {
    if cache.mode == CacheMode::Disk { disk_mode_ram_bytes(cache.persistent) } else { cache.ram_bytes }
}

/// The table of machines.
pub fn machines(machines: &[Machine]) -> String {
    // The column of hosts is shown only if there are several hosts, or machines in clouds.
    let has_hosts = machines.iter().any(|machine| host(machine).is_some());
    let headings: Vec<&str> = LIVE.into_iter().chain(has_hosts.then_some("HOST")).chain(MORE).collect();
    let rows = machines.iter().map(|machine| {
        let mut row = row(machine);
        if has_hosts {
            row.insert(LIVE.len(), host(machine).unwrap_or_else(|| "-".to_owned()));
        }
        row
    });
    table_text(&headings, rows)
}

/// The host of a machine, or the connection of its cloud.
pub fn host(machine: &Machine) -> Option<String> {
    let cloud = machine.connection.as_ref().map(|connection| format!("{connection} (Azure)"));
    cloud.or_else(|| machine.host.clone())
}

/// The table without the columns that rarely change.
pub fn live(machines: &[Machine]) -> String {
    let rows = machines.iter().map(|machine| row(machine).into_iter().take(LIVE.len()).collect());
    let mut text = table_text(&LIVE, rows);
    for alarm in machines.iter().filter_map(|machine| machine.alarm.as_ref()) {
        text.push_str(&format!("\n(!) {}: {}", alarm.subject, printable(&alarm.to_string())));
    }
    text
}

/// The state, with a mark if there is an alarm, because the last column may be out of sight.
pub fn state(machine: &Machine) -> String {
    let mark = if machine.alarm.is_some() { " (!)" } else { "" };
    format!("{}{mark}", machine.state)
}

fn row(machine: &Machine) -> Vec<String> {
    let counter = |value: fn(&headwater_api::DiskCounters) -> u64| {
        machine.disk.as_ref().map_or_else(|| "-".to_owned(), |disk| size::format(value(disk)))
    };
    vec![
        machine.name.clone(),
        state(machine),
        machine.boot_ms.map_or_else(|| "-".to_owned(), seconds),
        counter(|disk| disk.image_read_bytes),
        counter(|disk| disk.ram_used_bytes),
        counter(|disk| disk.disk_used_bytes),
        counter(|disk| disk.spilled_bytes),
        machine.disk.as_ref().map_or_else(|| "-".to_owned(), |disk| disk.iops.to_string()),
        match machine.connection {
            None => size::format(ram_limit_bytes(&machine.cache)),
            Some(_) => "-".to_owned(),
        },
        version(machine),
        machine.catalog.clone().unwrap_or_else(|| "-".to_owned()),
        machine
            .alarm
            .as_ref()
            .map_or_else(|| machine.reason.clone().unwrap_or_default(), |alarm| format!("ALARM: {alarm}")),
    ]
}

/// The version that the machine runs or ran last, with remarks.
pub fn version(machine: &Machine) -> String {
    let mut text = machine.version.clone().unwrap_or_else(|| machine.image.clone());
    if machine.old {
        text.push_str(" (old)");
    }
    match &machine.pin {
        Some(pin) if machine.version.as_ref().is_none_or(|version| version == pin) => {
            text.push_str(" (pinned)")
        }
        Some(pin) => text.push_str(&format!(" (pinned to @{})", pin.rsplit('@').next().unwrap_or(pin))),
        None => {}
    }
    if machine.edits.is_some() {
        text.push_str(" (edits)");
    } else if machine.kept.is_some() {
        text.push_str(" (kept)");
    }
    text
}
