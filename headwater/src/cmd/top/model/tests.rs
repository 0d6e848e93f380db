//! Keys, the machine that stays chosen, and rates.

use headwater_api::{Alarm, HostRam, MachineList};
use ratatui::crossterm::event::KeyEvent;
use serde_json::json;

use super::*;

/// A machine that has written `disk_mib` to its disk, or is off.
pub fn machine(name: &str, state: &str, disk_mib: Option<u64>) -> Machine {
    let number = name.rsplit('-').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    let disk = disk_mib.map(|mib| {
        json!({
            "reads": 0, "writes": 0, "read_bytes": 0, "written_bytes": mib << 20, "image_read_bytes": 0,
            "ram_used_bytes": mib << 18, "disk_used_bytes": mib << 20, "spilled_bytes": mib << 19, "pauses": 0,
            "iops": mib, "to_copy_bytes": 0, "copied_bytes": 0,
        })
    });
    serde_json::from_value(json!({
        "name": name, "uuid": Uuid::from_u128(number), "mac": "", "image": "debian", "version": "debian@3",
        "cache": { "mode": "ram+disk", "ram_bytes": 64 << 20, "disk_bytes": 1024 << 20, "weight": 100 },
        "memory_bytes": 512 << 20, "cpus": 1, "wanted": "running", "state": state, "created_at_ms": 0,
        "identity": { "host_name": name, "machine_id": "", "ssh_host_key_public": "" }, "disk": disk,
    }))
    .unwrap()
}

/// The host, with alarms on these machines.
pub fn figures(machines: Vec<Machine>, alarms: &[&str]) -> Figures {
    let alarm = |name: &&str| Alarm {
        subject: format!("machine {name}"),
        since_ms: 0,
        message: "the disk has no space".to_owned(),
        advice: format!("headwater machine set {name} --disk 20G"),
    };
    let total = machines.len() as u64;
    let status = Status {
        version: "0.1.0".to_owned(),
        pid: 1,
        data_dir: String::new(),
        started_at_ms: 0,
        api_url: None,
        console_url: None,
        fingerprint: None,
        images: Some(1),
        store_bytes: None,
        store_age_ms: None,
        store_read_only: false,
        boots_unrecorded: None,
        store_outdated: false,
        machines: total,
        machines_active: machines.iter().filter(|machine| machine.state.is_active()).count() as u64,
        tasks_running: 0,
        tasks_waiting: 0,
        alarms: alarms.iter().map(alarm).collect(),
        ram_used_bytes: 1 << 30,
        host_ram: HostRam {
            configured_bytes: 4 << 30,
            limit_bytes: 4 << 30,
            used_bytes: 1 << 30,
            pressure_shrinks: 0,
        },
        disk_used_bytes: 10 << 30,
        free_bytes: 90 << 30,
        hypervisor: "TCG".to_owned(),
    };
    Figures { status, list: MachineList { total, matching: total, machines, next: None }, detail: None }
}

pub fn top_of(figures: Figures) -> Top {
    let question = Question { filter: String::new(), sort: MachineSort::Cache, detail: None };
    let mut top = Top::new(question, Ok(()));
    top.take(figures, 1_000);
    top
}

fn press(top: &mut Top, keys: &str) -> Effect {
    let keys = keys.chars().map(|c| match c {
        '\n' => KeyCode::Enter,
        '\u{1b}' => KeyCode::Esc,
        other => KeyCode::Char(other),
    });
    keys.map(|code| top.press(KeyEvent::from(code))).last().unwrap()
}

fn chosen(top: &Top) -> &str {
    &top.machines()[top.chosen().unwrap()].name
}

#[test]
fn the_chosen_machine_stays_chosen_when_the_order_changes() {
    let (a, b, c) = (
        machine("pc-1", "running", Some(3)),
        machine("pc-2", "running", Some(2)),
        machine("pc-3", "running", Some(1)),
    );
    let mut top = top_of(figures(vec![a.clone(), b.clone(), c.clone()], &[]));
    press(&mut top, "j");
    assert_eq!(chosen(&top), "pc-2");
    top.take(figures(vec![b, c.clone(), a.clone()], &[]), 2_000);
    assert_eq!((chosen(&top), top.chosen()), ("pc-2", Some(0)));
    // It was removed: the machine in its place is chosen.
    top.take(figures(vec![c, a], &[]), 3_000);
    assert_eq!(chosen(&top), "pc-3");
    top.take(figures(Vec::new(), &[]), 4_000);
    assert_eq!((top.chosen(), press(&mut top, "jjG\n")), (None, Effect::Nothing));
}

#[test]
fn rates_are_differences_and_begin_again_with_the_machine() {
    let mut top = top_of(figures(vec![machine("pc-1", "running", Some(10))], &[]));
    assert_eq!(top.rates(&top.machines()[0]), None);
    top.take(figures(vec![machine("pc-1", "running", Some(30))], &[]), 3_000);
    assert_eq!(top.rates(&top.machines()[0]).unwrap().written_bytes, 10 << 20);
    top.take(figures(vec![machine("pc-1", "running", Some(4))], &[]), 5_000);
    assert_eq!(top.rates(&top.machines()[0]).unwrap().written_bytes, 2 << 20);
    // A clock that was set back gives no rate.
    top.take(figures(vec![machine("pc-1", "running", Some(9))], &[]), 4_000);
    assert_eq!(top.rates(&top.machines()[0]), None);
}

#[test]
fn a_filter_applies_while_it_is_typed_if_it_can_be_read() {
    let mut top = top_of(figures(vec![machine("pc-1", "running", Some(1))], &[]));
    assert_eq!(press(&mut top, "/state:"), Effect::Nothing);
    assert!(top.odd.is_some() && top.filter() == "state", "{top:?}");
    assert_eq!(press(&mut top, "running"), Effect::Refresh);
    assert_eq!((top.filter(), &top.odd), ("state:running", &None));
    // A letter that is a command elsewhere is text here.
    press(&mut top, " q");
    assert_eq!(top.filter(), "state:running q");
    assert_eq!(press(&mut top, "\n"), Effect::Nothing);
    assert_eq!((press(&mut top, "\u{1b}"), top.filter()), (Effect::Refresh, ""));
}

#[test]
fn a_machine_changes_only_after_a_second_key() {
    let machines = vec![machine("pc-1", "running", Some(100)), machine("pc-2", "stopped", None)];
    let mut top = top_of(figures(machines, &[]));
    assert_eq!(press(&mut top, "S"), Effect::Nothing);
    assert_eq!(top.asked.as_ref().unwrap().text, "stop pc-1? forgets the 125.0 MiB of its write cache");
    assert_eq!(press(&mut top, "q"), Effect::Nothing);
    assert_eq!(press(&mut top, "Sy"), Effect::Change { verb: "stop", name: "pc-1".to_owned() });
    assert_eq!(press(&mut top, "s"), Effect::Nothing);
    assert_eq!((&top.asked, top.said()), (&None, Some("pc-1 is running")));
    assert_eq!(press(&mut top, "jsy"), Effect::Change { verb: "start", name: "pc-2".to_owned() });

    top.may_change = Err("read only".to_owned());
    assert_eq!(press(&mut top, "ky"), Effect::Nothing);
    press(&mut top, "R");
    assert_eq!((&top.asked, top.said()), (&None, Some("read only")));
}

#[test]
fn the_last_figures_stay_when_the_daemon_does_not_answer() {
    let mut top = top_of(figures(vec![machine("pc-1", "running", Some(1))], &[]));
    top.fail("the daemon does not answer".to_owned());
    assert_eq!(top.stale(61_000), Some(("the daemon does not answer", 60)));
    assert_eq!(top.machines().len(), 1);
    top.take(figures(Vec::new(), &[]), 62_000);
    assert_eq!(top.stale(62_000), None);
}
