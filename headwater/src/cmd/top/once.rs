//! `headwater top --once`: prints the same figures as text or JSON, for scripts and logs.

use headwater_api::{Machine, Status};
use headwater_block::size;
use serde::Serialize;

use super::Figures;
use crate::cmd::status::budget;
use crate::show;
use crate::show::machines::{ram_limit_bytes, state, version};

/// The figures as JSON.
#[derive(Serialize)]
struct Json<'a> {
    status: &'a Status,
    total: u64,
    matching: u64,
    machines: &'a [Machine],
}

pub fn print(figures: &Figures, json: bool) -> anyhow::Result<()> {
    let Figures { status, list, .. } = figures;
    if json {
        let (total, matching, machines) = (list.total, list.matching, &list.machines[..]);
        return show::json(&Json { status, total, matching, machines });
    }
    let free = size::format(status.free_bytes);
    show::pairs(&[
        ("machines", format!("{} of {} on", status.machines_active, status.machines)),
        ("cache RAM", budget(&status.host_ram)),
        ("cache disk", format!("{}, {free} free", size::format(status.disk_used_bytes))),
    ])?;
    for alarm in &status.alarms {
        let (since, text) = (show::time(alarm.since_ms), show::printable(&alarm.to_string()));
        show::line(&format!("ALARM: {} since {since}: {text}", alarm.subject))?;
    }
    show::line("")?;
    let headings = ["MACHINE", "STATE", "RAM", "OF", "DISK", "OF", "SPILLED", "IOPS", "VERSION"];
    show::table(&headings, list.machines.iter().map(row))?;
    let shown = list.machines.len() as u64;
    if shown < list.matching {
        show::aside(&format!("{shown} of {} that match\n", list.matching));
    }
    Ok(())
}

fn row(machine: &Machine) -> Vec<String> {
    let counter = |value: fn(&headwater_api::DiskCounters) -> u64| {
        machine.disk.as_ref().map_or_else(|| "-".to_owned(), |disk| size::format(value(disk)))
    };
    vec![
        machine.name.clone(),
        state(machine),
        counter(|disk| disk.ram_used_bytes),
        size::format(ram_limit_bytes(&machine.cache)),
        counter(|disk| disk.disk_used_bytes),
        size::format(machine.cache.disk_bytes),
        counter(|disk| disk.spilled_bytes),
        machine.disk.map_or_else(|| "-".to_owned(), |disk| disk.iops.to_string()),
        version(machine),
    ]
}
