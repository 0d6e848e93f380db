//! Catalogs as a whole: machines by number, rolls with canaries, and what becomes of them when the daemon is killed. Real daemons and
//! QEMU, with a boot sector that says how often its disk was written.

use std::time::Duration;

use headwater_testkit::wait_until;

use crate::support::{self, Daemon};

/// Imports a version of `tiny`; each count makes another one.
fn import(daemon: &Daemon, count: u8) {
    let path = daemon.path().join("tiny.raw");
    let mut disk = support::tiny_disk();
    disk[512] = count;
    std::fs::write(&path, disk).unwrap();
    daemon.cli(&["image", "import", path.to_str().unwrap()]).ok();
}

fn json(daemon: &Daemon, arguments: &[&str]) -> serde_json::Value {
    serde_json::from_str(&daemon.cli(&[&["--json"], arguments].concat()).ok()).unwrap()
}

/// The machines of `class`, each with its version and process.
fn machines(daemon: &Daemon) -> Vec<(String, String, Option<u64>)> {
    let list = json(daemon, &["machine", "list"]);
    let of_class = list["machines"].as_array().unwrap().iter().filter(|it| it["catalog"] == "class");
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    of_class.map(|it| (text(&it["name"]), text(&it["version"]), it["pid"].as_u64())).collect()
}

fn versions(daemon: &Daemon) -> Vec<String> {
    machines(daemon).into_iter().map(|(_, version, _)| version).collect()
}

/// A catalog of machines that are on.
fn class(daemon: &Daemon, count: &str) {
    import(daemon, 1);
    let size = ["--cache", "ram", "--memory", "64M"];
    let made =
        ["catalog", "create", "class", "tiny@1", "--count", count, "--name", "class-##", "--first", "7"];
    daemon.cli(&[&made[..], &["--start"], &size].concat()).ok();
    for (name, _, _) in machines(daemon) {
        daemon.wait_for(&name, "running");
    }
    import(daemon, 2);
}

/// A change of settings is a version, which a machine has from its next boot on; a revert is a version too.
#[test]
fn machines_take_new_settings_of_their_catalog_at_their_next_boot() {
    let daemon = Daemon::start();
    class(&daemon, "2");
    let memory =
        |name: &str| json(&daemon, &["machine", "show", name])["memory_bytes"].as_u64().unwrap() >> 20;
    daemon.cli(&["machine", "stop", "class-08", "--force"]).ok();
    let set = daemon.cli(&["catalog", "set", "class", "--memory", "96M"]).ok();
    assert!(set.contains("version 2") && set.contains("class-07, class-08"), "{set}");
    daemon.cli(&["machine", "start", "class-08"]).ok();
    assert_eq!((memory("class-07"), memory("class-08")), (64, 96));
    let shown = daemon.cli(&["catalog", "show", "class"]).ok();
    assert!(shown.contains("version 2; 1 of 2 machines has an older one: class-07"), "{shown}");
    let old = daemon.cli(&["machine", "list", "scheme:old"]).ok();
    assert!(old.contains("class-07") && !old.contains("class-08"), "{old}");
    let differences = daemon.cli(&["catalog", "scheme", "diff", "class", "1"]).ok();
    assert!(
        differences.contains("memory_bytes") && differences.contains(&(96 << 20).to_string()),
        "{differences}"
    );
    daemon
        .cli(&["catalog", "scheme", "revert", "class", "7"])
        .fails(3, &["no version 7", "scheme list class"]);
    daemon.cli(&["catalog", "scheme", "revert", "class", "1"]).ok();
    let list = daemon.cli(&["catalog", "scheme", "list", "class"]).ok();
    let rows: Vec<&str> = list.lines().skip(1).map(|line| line.trim_start()).collect();
    assert!(rows.len() == 3 && rows[0].starts_with('3') && rows[2].starts_with('1'), "{list}");
    daemon.cli(&["machine", "reset", "class-08"]).ok();
    assert_eq!(memory("class-08"), 64);
    daemon.cli(&["catalog", "set", "class", "--cache", "disk", "--ram", "32M"]).fails(2, &["--ram"]);
    assert_eq!(json(&daemon, &["catalog", "show", "class"])["scheme"], 3);
}

#[test]
fn a_catalog_has_as_many_machines_as_it_is_told() {
    let daemon = Daemon::start();
    import(&daemon, 1);
    daemon.cli(&["catalog", "create", "bad", "tiny", "--name", "no-number"]).fails(2, &["no-number", "'#'"]);
    let made = daemon.cli(&["catalog", "create", "class", "tiny", "--count", "3", "--cache", "ram"]).ok();
    assert!(made.contains("created class-01, class-02, class-03\nclass has 3 machines"), "{made}");
    // Somebody has the next name, and one machine keeps its place by a pin.
    daemon.create("class-04", "tiny", &[]);
    daemon.cli(&["image", "pin", "class-03", "tiny@1"]).ok();
    assert!(daemon.cli(&["catalog", "scale", "class", "4"]).ok().contains("created class-05\n"));
    let names = || machines(&daemon).into_iter().map(|(name, _, _)| name).collect::<Vec<_>>();
    assert_eq!(names(), ["class-01", "class-02", "class-03", "class-05"]);
    // Machines that are off go first, those with the highest numbers before others.
    daemon.cli(&["machine", "start", "class-05"]).ok();
    assert!(daemon.cli(&["catalog", "scale", "class", "3"]).ok().contains("removed class-02\n"));
    daemon.cli(&["catalog", "scale", "class", "0"]).fails(4, &["pinned", "class-03", "--force"]);
    assert_eq!(names(), ["class-01", "class-03", "class-05"]);
    daemon.cli(&["catalog", "scale", "class", "1"]).ok();
    assert_eq!(names(), ["class-03"]);
    daemon.cli(&["catalog", "scale", "class", "0", "--force"]).ok();
    assert!(names().is_empty());
    daemon.cli(&["catalog", "scale", "class", "10001"]).fails(2, &["10001", "10000"]);
    daemon.cli(&["catalog", "scale", "lab", "1"]).fails(3, &["lab"]);
    let tasks = json(&daemon, &["task", "list"]);
    let first = &tasks["tasks"].as_array().unwrap()[0];
    assert_eq!(
        (&first["kind"], &first["subject"], &first["state"]),
        (&"scale".into(), &"catalog class".into(), &"done".into())
    );
}

#[test]
fn machines_of_a_file_have_its_names_and_addresses() {
    let daemon = Daemon::start();
    import(&daemon, 1);
    daemon.create("lab", "tiny", &["--mac", "52-54-00-77-00-AA"]);
    let file = |name: &str, text: &str| {
        let path = daemon.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let template = file("user-data", "## template: headwater\n#!/bin/sh\necho {{ machine.mac }}\n");
    let create = |list: &str| {
        let size = ["--cache", "ram", "--memory", "64M", "--user-data", template.as_str()];
        daemon.cli(&[&["catalog", "create", "class", "tiny", "--machines", list][..], &size].concat())
    };
    for (text, code, why) in [
        ("name,mac,owner\n", 2, "line 1: there is no column 'owner'"),
        (
            "name,mac\npc-1,52:54:00:77:00:01\npc-2,52:54:00:77:00:01\n",
            2,
            "line 3: '52:54:00:77:00:01' is in line 2",
        ),
        ("name,mac\npc-1,\npc-2,52:54:00:77:00:aa\n", 4, "line 3: machine 'lab' has the MAC address"),
        ("name\npc-1\nlab\n", 4, "line 3: a machine 'lab' exists"),
        ("name,address\npc-1,\npc-2,10.1.2.255/24\n", 2, "line 3: no machine can have the address"),
        ("name,address\npc-1,\npc-2,10.1.2.31/24\n", 2, "line 3 has an IP address, but"),
    ] {
        create(&file("bad.csv", text)).fails(code, &[why]);
        daemon.cli(&["catalog", "show", "class"]).fails(3, &["class"]);
    }
    let said = create(&file("good.csv", "name,mac\npc-1,52:54:00:77:00:01\npc-2,\n")).ok();
    assert!(said.contains("created pc-1, pc-2\nclass has 2 machines"), "{said}");
    let show = |name: &str| json(&daemon, &["machine", "show", name]);
    let (first, second) = (show("pc-1"), show("pc-2"));
    assert_eq!(first["mac"], "52:54:00:77:00:01");
    assert_eq!(first["identity"]["user_data"], "#!/bin/sh\necho 52:54:00:77:00:01\n");
    assert!(second["mac"].as_str().unwrap().starts_with("52:54:00:") && second["mac"] != first["mac"]);
    // More of them, with the machines that are there.
    let more = file("more.csv", "mac,name\n02:00:00:00:00:03,pc-3\n");
    let said = daemon.cli(&["catalog", "scale", "class", "--machines", &more, "--start"]).ok();
    assert!(said.contains("created pc-3\nclass has 3 machines"), "{said}");
    // The same list again adds what is not there yet.
    let again = file("again.csv", "mac,name\n02:00:00:00:00:03,pc-3\n,pc-4\n");
    let said = daemon.cli(&["catalog", "scale", "class", "--machines", &again]).ok();
    assert!(said.contains("created pc-4\nclass has 4 machines"), "{said}");
    let other = file("other.csv", "mac,name\n02:00:00:00:00:04,pc-3\n");
    daemon
        .cli(&["catalog", "scale", "class", "--machines", &other])
        .fails(4, &["line 2: a machine 'pc-3' exists"]);
    daemon.wait_for("pc-3", "running");
    let qemu = format!("/proc/{}/cmdline", show("pc-3")["pid"]);
    let arguments = std::fs::read(qemu).unwrap();
    assert!(String::from_utf8_lossy(&arguments).contains("mac=02:00:00:00:00:03"));
    daemon.cli(&["catalog", "scale", "class", "0"]).ok();
    assert!(machines(&daemon).is_empty());
}

#[test]
fn a_roll_moves_all_machines_and_the_catalog_follows() {
    let daemon = Daemon::start();
    class(&daemon, "4");
    daemon.cli(&["machine", "stop", "class-10", "--force"]).ok();
    daemon.cli(&["image", "pin", "class-09", "tiny@1"]).ok();
    for (to, code, words) in
        [("tiny@9", 3, "tiny@9"), ("other@1", 2, "boots image 'tiny'"), ("tiny@1", 4, "run that version")]
    {
        daemon.cli(&["catalog", "roll", "class", "--to", to]).fails(code, &[words]);
    }
    let rolled = daemon.cli(&["catalog", "roll", "class", "--to", "tiny@2", "--batch", "1"]).ok();
    assert!(rolled.contains("2 machines of class moved from tiny@1 to tiny@2\n"), "{rolled}");
    assert!(rolled.contains("not moved: class-09 is pinned"), "{rolled}");
    assert!(rolled.contains("not moved: class-10 is off"), "{rolled}");
    assert_eq!(versions(&daemon), ["tiny@2", "tiny@2", "tiny@1", "tiny@1"]);
    // Nothing is left of the pins that the roll set, and a machine that is started takes the version.
    assert_eq!(daemon.machine("class-09")["pin"], "tiny@1");
    assert_eq!(daemon.machine("class-07")["pin"], "tiny@2", "that of its catalog");
    assert_eq!(json(&daemon, &["catalog", "show", "class"])["pin"], "tiny@2");
    daemon.cli(&["machine", "start", "class-10", "--wait"]).ok();
    assert_eq!(daemon.machine("class-10")["version"], "tiny@2");
    let events = daemon.cli(&["events", "--subject", "catalog class"]).ok();
    assert!(events.contains("rolled") && events.contains("from tiny@1 to tiny@2"), "{events}");
}

#[test]
fn a_canary_that_is_not_healthy_is_taken_back_and_no_other_is_touched() {
    let daemon = Daemon::start();
    class(&daemon, "3");
    let before = machines(&daemon);
    // No agent answers in a boot sector.
    let roll = ["catalog", "roll", "class", "--to", "tiny@2", "--health", "true", "--health-timeout", "1s"];
    daemon.cli(&roll).fails(1, &["class-07", "cannot be checked", "taken back to tiny@1"]);
    daemon.wait_for("class-07", "running");
    let after = machines(&daemon);
    assert_eq!(after[1..], before[1..], "they run as before");
    assert_eq!(after[0].1, "tiny@1");
    assert_ne!(after[0].2, before[0].2, "it was moved, and taken back");
    assert_eq!(json(&daemon, &["catalog", "show", "class"])["pin"], serde_json::Value::Null);
    assert_eq!(daemon.machine("class-07")["pin"], serde_json::Value::Null);
    let task = json(&daemon, &["task", "list", "--limit", "1"])["tasks"][0].clone();
    assert_eq!((&task["kind"], &task["state"]), (&"roll".into(), &"failed".into()));
}

#[test]
fn a_roll_goes_on_after_the_daemon_was_killed_and_can_be_cancelled() {
    let daemon = Daemon::start();
    class(&daemon, "3");
    let begin = ["catalog", "roll", "class", "--to", "tiny@2", "--batch", "1", "--no-wait", "--pause"];
    daemon.cli(&[&begin[..], &["2s"]].concat()).ok();
    daemon.cli(&["catalog", "scale", "class", "9"]).fails(4, &["task", "changes the catalog"]);
    wait_until("the canary is moved", || versions(&daemon)[0] == "tiny@2");
    let dir = daemon.kill();
    let daemon = Daemon::start_in(dir, |command| {
        command.arg("--resume");
    });
    let task = json(&daemon, &["task", "list", "--unended"])["tasks"][0]["id"].to_string();
    daemon.cli(&["task", "wait", &task]).ok();
    assert_eq!(versions(&daemon), ["tiny@2", "tiny@2", "tiny@2"]);

    // A roll that is cancelled takes its machines back.
    import(&daemon, 3);
    let begin = ["catalog", "roll", "class", "--to", "tiny@3", "--no-wait", "--pause", "1h"];
    let begun = json(&daemon, &begin);
    wait_until("the canary is moved", || versions(&daemon)[0] == "tiny@3");
    std::thread::sleep(Duration::from_millis(100));
    let id = begun["id"].to_string();
    let ended = daemon.cli(&["task", "cancel", &id]).ok();
    assert!(ended.contains(&format!("task {id} is cancelled")), "{ended}");
    assert_eq!(versions(&daemon), ["tiny@2", "tiny@2", "tiny@2"]);
    assert_eq!(json(&daemon, &["catalog", "show", "class"])["pin"], "tiny@2");
}

#[test]
fn a_roll_waits_for_its_hours_and_its_time() {
    let daemon = Daemon::start();
    class(&daemon, "2");
    let before = machines(&daemon);
    let roll = ["catalog", "roll", "class", "--to", "tiny@2", "--no-wait"];
    for (more, told) in [
        (&["--window", "sun 02:00-02:00"][..], "have no length"),
        (
            &["--window", "sun 02:00-05:00 Mars/Olympus"],
            "this host does not know the time zone 'Mars/Olympus'",
        ),
        (&["--at", "2020-01-01T00:00Z"], "that time is in the past"),
        (&["--at", "+400d"], "the time until it begins is longer than"),
        (&["--at", "soon"], "'soon' is not a time"),
    ] {
        let refused = daemon.cli(&[&roll[..], more].concat());
        assert!(refused.code == 2 && refused.err.contains(told), "{refused:?}");
    }
    assert_eq!(json(&daemon, &["catalog", "show", "class"])["pin"], serde_json::Value::Null);
    let hours = format!("{} 02:00-05:00 Europe/Berlin", support::another_day());
    let id = json(&daemon, &[&roll[..], &["--window", &hours]].concat())["id"].to_string();
    let shown = || daemon.cli(&["task", "show", &id]).ok();
    wait_until("the task says that it waits", || shown().contains("waits until") && shown().contains(&hours));
    daemon.cli(&["catalog", "scale", "class", "9"]).fails(4, &["task", "changes the catalog"]);
    // It waits over a restart of the daemon, too, and its catalog stays at the version from before.
    let dir = daemon.kill();
    let daemon = Daemon::start_in(dir, |_| {});
    assert_eq!(machines(&daemon), before);
    daemon.cli(&["machine", "reset", "class-07", "--wait"]).ok();
    assert_eq!(versions(&daemon), ["tiny@1", "tiny@1"]);
    daemon.cli(&["task", "cancel", &id]).ok();
    assert_eq!(json(&daemon, &["catalog", "show", "class"])["pin"], serde_json::Value::Null);
    // A machine that is switched on while a roll waits is moved, and one that is switched off is not.
    daemon.cli(&["machine", "stop", "class-08", "--force"]).ok();
    let begun = json(&daemon, &[&roll[..], &["--at", "+30s", "--window", "daily 00:00-24:00"]].concat());
    daemon.cli(&["machine", "start", "class-08"]).ok();
    daemon.cli(&["machine", "stop", "class-07", "--force"]).ok();
    daemon.cli(&["task", "wait", &begun["id"].to_string()]).ok();
    assert_eq!(versions(&daemon), ["tiny@1", "tiny@2"]);
    assert_eq!(json(&daemon, &["catalog", "show", "class"])["pin"], "tiny@2");
}

#[test]
fn events_are_followed_as_they_come() {
    use std::io::{BufRead, BufReader};
    let daemon = Daemon::start();
    import(&daemon, 1);
    let mut follower = support::headwater();
    follower.args([
        "--data-dir",
        daemon.path().to_str().unwrap(),
        "--json",
        "events",
        "--follow",
        "--limit",
        "1",
    ]);
    let mut follower = follower.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines();
    let mut next = || serde_json::from_str::<serde_json::Value>(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!(next()["action"], "imported");
    daemon.cli(&["catalog", "create", "class", "tiny", "--cache", "ram", "--count", "2"]).ok();
    let seen: Vec<_> = (0..3).map(|_| next()["subject"].as_str().unwrap().to_owned()).collect();
    assert_eq!(seen, ["catalog class", "machine class-01", "machine class-02"]);
    follower.kill().unwrap();
    follower.wait().unwrap();
}

#[test]
fn machines_are_listed_and_changed_by_filter() {
    let daemon = Daemon::start();
    class(&daemon, "3");
    daemon.create("other", "tiny@1", &[]);
    let names = |arguments: &[&str]| {
        let list = json(&daemon, &[&["machine", "list"], arguments].concat());
        let machines = list["machines"].as_array().unwrap().iter();
        machines.map(|it| it["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(&["catalog:class", "!name:*-08"]), ["class-07", "class-09"]);
    assert_eq!(names(&["is:off"]), ["other"]);
    assert_eq!(names(&["--sort", "state", "--limit", "2"]), ["other", "class-07"]);
    daemon.cli(&["machine", "list", "colour:red"]).fails(2, &["colour", "name, state"]);
    assert!(daemon.cli(&["machine", "list", "--limit", "1"]).ok().contains("CATALOG"));
    let stop = ["machine", "stop", "--force", "--filter", "state:running -name:class-07"];
    daemon.cli(&[&stop[..], &["--expect", "3"]].concat()).fails(4, &["2 machines match", "3 were expected"]);
    assert!(names(&["state:running"]).len() == 3);
    daemon.cli(&[&stop[..], &["--expect", "2"]].concat()).ok();
    assert_eq!(names(&["state:running"]), ["class-07"]);
    daemon.cli(&["machine", "start", "--catalog", "class", "--wait"]).ok();
    assert_eq!(names(&["is:on"]), ["class-07", "class-08", "class-09"]);
    daemon.cli(&["machine", "start", "--catalog", "nothing"]).fails(3, &["nothing"]);
}

#[test]
fn guests_get_the_personality_of_their_machine_and_catalog() {
    let daemon = Daemon::start();
    class(&daemon, "1");
    let said = daemon
        .cli(&["catalog", "set", "class", "--personality", "room=7", "--personality", "school=north"])
        .ok();
    assert_eq!(said, "personality of class from the next boot on: room=7, school=north\n");
    daemon.cli(&["machine", "set", "class-07", "--personality", "room=8", "--weight", "200"]).ok();
    let seed = || {
        String::from_utf8_lossy(&std::fs::read(daemon.path().join("run/class-07/seed.img")).unwrap())
            .into_owned()
    };
    assert!(!seed().contains("room="));
    daemon.cli(&["machine", "reset", "class-07"]).ok();
    assert!(seed().contains("room=8\nschool=north\n") && seed().contains(r#""school":"north""#));
    let shown = daemon.cli(&["machine", "show", "class-07"]).ok();
    assert!(shown.contains("room=8, school=north") && shown.contains("north"), "{shown}");
    assert_eq!(json(&daemon, &["machine", "show", "class-07"])["identity"]["personality"]["room"], "8");
    daemon.cli(&["machine", "set", "class-07", "--no-personality", "room"]).ok();
    assert_eq!(json(&daemon, &["machine", "show", "class-07"])["identity"]["personality"]["room"], "7");
    daemon
        .cli(&["machine", "set", "class-07", "--no-personality", "room"])
        .fails(3, &["no personality string 'room'"]);
    let wrong = daemon.cli(&["machine", "set", "class-07", "--personality", "room"]);
    assert!(wrong.code == 2 && wrong.err.contains("NAME=VALUE"), "{wrong:?}");
    let long = format!("room={}", "x".repeat(1001));
    daemon.cli(&["catalog", "set", "class", "--personality", &long]).fails(2, &["at most 1000 characters"]);
    let shown = daemon.cli(&["catalog", "show", "class"]).ok();
    assert!(shown.contains("room=7, school=north"), "{shown}");
}

#[test]
fn keys_and_user_data_of_a_catalog_are_set_and_checked() {
    let daemon = Daemon::start();
    import(&daemon, 1);
    daemon.cli(&["catalog", "create", "class", "tiny"]).ok();
    let set = daemon.cli(&["catalog", "set", "class", "--rotate-after", "30d"]).ok();
    assert_eq!(set, "SSH host keys of machines of class: replaced at a boot after 30 d\n");
    assert!(daemon.cli(&["catalog", "show", "class"]).ok().contains("replaced at a boot after 30 d"));
    daemon.cli(&["catalog", "set", "class", "--rotate-after", "1m"]).fails(2, &["an hour to ten years"]);
    daemon.cli(&["catalog", "set", "nothing", "--rotate-after", "30d"]).fails(3, &["nothing"]);
    assert_eq!(json(&daemon, &["catalog", "show", "class"])["rotate_after_s"], 30 * 86_400);
    daemon.cli(&["catalog", "set", "class", "--rotate-after", "never"]).ok();
    assert_eq!(json(&daemon, &["catalog", "show", "class"])["rotate_after_s"], 0);

    let file = daemon.path().join("user-data");
    let create =
        ["catalog", "create", "desks", "tiny", "--count", "1", "--user-data", file.to_str().unwrap()];
    std::fs::write(&file, "## template: headwater\n#!/bin/sh\nseat {{ machine.seat }}\n").unwrap();
    daemon.cli(&create).fails(2, &["in line 3: 'machine.seat' is unknown", "machine.number"]);
    daemon.cli(&["catalog", "show", "desks"]).fails(3, &["desks"]);
    std::fs::write(&file, "## template: headwater\n#!/bin/sh\nseat {{ machine.number }}\n").unwrap();
    daemon.cli(&create).ok();
    assert_eq!(daemon.machine("desks-01")["identity"]["user_data"], "#!/bin/sh\nseat 01\n");
    // It has no Wake-on-LAN: this daemon has no boot server.
    let pc = ["machine", "create", "pc", "tiny", "--boot", "network", "--mac", "52:54:00:00:00:0e"];
    daemon.cli(&pc).ok();
    daemon.cli(&["machine", "start", "pc"]).fails(4, &["it boots from the network"]);
}
