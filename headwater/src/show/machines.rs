//! Machines as rows of a table.

use headwater_api::Machine;
use headwater_block::size;

use crate::show::{seconds, table_text};

const HEADINGS: [&str; 11] = [
    "MACHINE",
    "STATE",
    "VERSION",
    "BOOT S",
    "IMAGE READ",
    "RAM USED",
    "OF",
    "DISK USED",
    "SPILLED",
    "IOPS",
    "REASON",
];

/// The table of machines.
pub fn machines(machines: &[Machine]) -> String {
    table_text(&HEADINGS, machines.iter().map(row))
}

fn row(machine: &Machine) -> Vec<String> {
    let counter = |value: fn(&headwater_api::DiskCounters) -> u64| {
        machine.disk.as_ref().map_or_else(|| "-".to_owned(), |disk| size::format(value(disk)))
    };
    vec![
        machine.name.clone(),
        machine.state.to_string(),
        machine.version.clone().unwrap_or_else(|| machine.image.clone()),
        machine.boot_ms.map_or_else(|| "-".to_owned(), seconds),
        counter(|disk| disk.image_read_bytes),
        counter(|disk| disk.ram_used_bytes),
        size::format(machine.cache.ram_bytes),
        counter(|disk| disk.disk_used_bytes),
        counter(|disk| disk.spilled_bytes),
        machine.disk.as_ref().map_or_else(|| "-".to_owned(), |disk| disk.iops.to_string()),
        machine.reason.clone().unwrap_or_default(),
    ]
}
