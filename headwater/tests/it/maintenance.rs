//! Disks that are kept, editing an image on a machine, versions of running machines, and catalogs: through the real
//! daemon and QEMU, with a boot sector that counts its writes.

use std::time::Duration;

use crate::support::{self, Daemon, signal};

/// How many writes the disk of a machine holds, as its boot sector found.
fn writes(daemon: &Daemon, machine: &str) -> u32 {
    let log = daemon.cli(&["machine", "console", machine, "--log"]).ok();
    let (before, _) = log.rsplit_once(" writes").unwrap_or_else(|| panic!("{log:?}"));
    before.chars().last().and_then(|digit| digit.to_digit(10)).unwrap_or_else(|| panic!("{log:?}"))
}

fn boot(daemon: &Daemon, machine: &str) -> u32 {
    daemon.cli(&["machine", "start", machine, "--wait"]).ok();
    writes(daemon, machine)
}

fn stop(daemon: &Daemon, machine: &str) {
    daemon.cli(&["machine", "stop", machine, "--force"]).ok();
}

fn json(daemon: &Daemon, arguments: &[&str]) -> serde_json::Value {
    serde_json::from_str(&daemon.cli(&[&["--json"], arguments].concat()).ok()).unwrap()
}

/// Imports a version of `tiny` that says that it was written so often.
fn import(daemon: &Daemon, count: u8) {
    let path = daemon.path().join("tiny.raw");
    let mut disk = support::tiny_disk();
    disk[512] = count;
    std::fs::write(&path, disk).unwrap();
    daemon.cli(&["image", "import", path.to_str().unwrap()]).ok();
}

fn create(daemon: &Daemon, machine: &str, rest: &[&str]) {
    daemon.create(machine, "tiny", rest);
}

#[test]
fn a_persistent_machine_keeps_its_disk_until_it_is_reset() {
    let daemon = Daemon::start();
    import(&daemon, 0);
    daemon
        .cli(&["machine", "create", "a", "tiny", "--persistent", "--cache", "ram"])
        .fails(2, &["persistent"]);
    create(&daemon, "lab", &["--persistent", "--weight", "300"]);
    assert_eq!(boot(&daemon, "lab"), 0);
    daemon.console("lab", "w", Some("W"));
    daemon.console("lab", "w", Some("W"));
    stop(&daemon, "lab");
    // A newer version does not reach it: its disk belongs to the old one.
    import(&daemon, 5);
    assert_eq!(boot(&daemon, "lab"), 2);
    let lab = daemon.machine("lab");
    assert_eq!(
        (&lab["version"], &lab["kept"], &lab["old"]),
        (&"tiny@1".into(), &"tiny@1".into(), &true.into())
    );
    assert!(daemon.cli(&["machine", "list"]).ok().contains("tiny@1 (old) (kept)"));
    daemon
        .cli(&["image", "remove", "tiny@1"])
        .fails(4, &["'lab' runs it", "'lab' has a persistent disk over it"]);

    // All of it is killed; what was there when it was stopped is there.
    daemon.console("lab", "w", Some("W"));
    let daemon = Daemon::start_in(daemon.kill_all(), |_| {});
    let lost = daemon.machine("lab");
    assert!(lost["reason"].as_str().unwrap().contains("its persistent disk"), "{lost}");
    let found = boot(&daemon, "lab");
    assert!(found == 2 || found == 3, "{found} writes");
    stop(&daemon, "lab");

    // Lost files are no empty disk.
    let kept = std::fs::read_dir(daemon.path().join("cache")).unwrap().next().unwrap().unwrap().path();
    let key = daemon.path().join("keys").join(kept.file_name().unwrap());
    assert!(key.exists() && kept.join("map").exists());
    let aside = daemon.path().join("aside");
    std::fs::rename(&kept, &aside).unwrap();
    daemon
        .cli(&["machine", "start", "lab"])
        .fails(6, &["persistent disk", "does not exist", "machine reset"]);
    std::fs::rename(&aside, &kept).unwrap();
    assert_eq!(boot(&daemon, "lab"), found);
    daemon.cli(&["machine", "set", "lab", "--weight", "9"]).ok();
    daemon.cli(&["machine", "set", "lab", "--ram", "33M"]).ok();
    let history = daemon.history("lab");
    assert!(history.contains("-> 33 MiB\n") && !history.contains("33 MiB, "), "{history}");
    assert!(!history.contains("bytes, disk"), "{history}");
    daemon.cli(&["machine", "set", "lab", "--weight", "0"]).fails(2, &["weight", "1 to 10000"]);
    assert_eq!(daemon.machine("lab")["cache"]["weight"], 9);

    daemon.cli(&["machine", "reset", "lab", "--wait"]).ok();
    assert_eq!(writes(&daemon, "lab"), 5);
    assert!(!kept.exists() && !key.exists());
    stop(&daemon, "lab");
    daemon.cli(&["machine", "remove", "lab"]).ok();
    for dir in ["cache", "keys"] {
        assert_eq!(std::fs::read_dir(daemon.path().join(dir)).unwrap().count(), 0, "{dir}");
    }
}

#[test]
fn an_image_is_edited_on_one_machine_and_sealed_for_all() {
    let daemon = Daemon::start();
    import(&daemon, 0);
    create(&daemon, "lab", &[]);
    create(&daemon, "desk", &[]);
    daemon.cli(&["image", "seal", "tiny"]).fails(3, &["no machine edits image 'tiny'", "image edit"]);
    daemon.cli(&["image", "edit", "other", "--machine", "lab"]).fails(3, &["other"]);
    daemon.cli(&["image", "edit", "tiny", "--machine", "lab"]).ok();
    daemon
        .cli(&["image", "edit", "tiny", "--machine", "desk"])
        .fails(4, &["machine 'lab' edits it already", "image seal tiny", "image discard tiny"]);
    assert_eq!(json(&daemon, &["image", "show", "tiny"])["edit"]["machine"], "lab");
    for table in ["show", "versions"] {
        let told = daemon.cli(&["image", table, "tiny"]).ok();
        assert!(told.contains("machine lab edits the image over version 1 since 20"), "{told}");
    }
    daemon.cli(&["image", "remove", "tiny@1"]).fails(4, &["'lab' edits it"]);
    daemon
        .cli(&["image", "seal", "tiny"])
        .fails(4, &["has not created its persistent disk yet", "start the machine first"]);

    assert_eq!(boot(&daemon, "lab"), 0);
    stop(&daemon, "lab");
    daemon.cli(&["image", "seal", "tiny"]).fails(2, &["nothing differs", "'headwater image discard tiny'"]);
    assert_eq!(boot(&daemon, "lab"), 0);
    daemon.console("lab", "w", Some("W"));
    daemon.console("lab", "w", Some("W"));
    // The other one sees nothing of it, and a restart in between keeps it.
    assert_eq!(boot(&daemon, "desk"), 0);
    stop(&daemon, "lab");
    assert_eq!(boot(&daemon, "lab"), 2);
    assert!(daemon.cli(&["machine", "list"]).ok().contains("tiny@1 (edits)"));
    daemon.cli(&["image", "seal", "tiny"]).fails(4, &["lab", "stop it first"]);
    daemon.cli(&["machine", "reset", "lab"]).fails(4, &["edits image 'tiny'"]);
    stop(&daemon, "lab");
    let sealed = json(&daemon, &["image", "seal", "tiny", "--note", "two writes"]);
    assert_eq!((&sealed["version"]["number"], &sealed["parent"]), (&2.into(), &"tiny@1".into()));
    assert!(sealed["version"]["stored_bytes"].as_u64().unwrap() < 4096, "{sealed}");
    let versions = daemon.cli(&["image", "versions", "tiny"]).ok();
    assert!(versions.contains("two writes") && versions.contains("maintenance"), "{versions}");
    assert_eq!(std::fs::read_dir(daemon.path().join("cache")).unwrap().count(), 0);
    assert_eq!(json(&daemon, &["image", "show", "tiny"])["edit"], serde_json::Value::Null);

    // Promoted, it reaches the other machine at its next boot.
    daemon.cli(&["image", "promote", "tiny@2", "production"]).ok();
    assert_eq!(daemon.machine("desk")["old"], true);
    daemon.cli(&["machine", "reset", "desk", "--wait"]).ok();
    assert_eq!((writes(&daemon, "desk"), boot(&daemon, "lab")), (2, 2));

    // What is discarded leaves no trace.
    stop(&daemon, "lab");
    daemon.cli(&["image", "edit", "tiny", "--machine", "lab"]).ok();
    boot(&daemon, "lab");
    daemon.console("lab", "w", Some("W"));
    stop(&daemon, "lab");
    let left = |dir| std::fs::read_dir(daemon.path().join(dir)).unwrap().count();
    assert_eq!((left("cache"), left("keys")), (1, 1));
    let told = json(&daemon, &["image", "discard", "tiny"]);
    assert_eq!(told, serde_json::json!({ "discarded": ["tiny"] }));
    assert_eq!((left("cache"), left("keys")), (0, 0));
    assert_eq!(boot(&daemon, "lab"), 2);
    assert_eq!(json(&daemon, &["image", "show", "tiny"])["versions"].as_array().unwrap().len(), 2);
    let history = daemon.cli(&["image", "history", "tiny"]).ok();
    for word in ["edit", "sealed", "discarded", "promoted"] {
        assert!(history.contains(word), "{word}: {history}");
    }
}

#[test]
fn a_seal_leaves_out_what_came_since_its_edit_began_only_where_that_is_said() {
    let daemon = Daemon::start();
    import(&daemon, 0);
    create(&daemon, "lab", &[]);
    create(&daemon, "desk", &[]);
    boot(&daemon, "desk");
    daemon.cli(&["image", "edit", "tiny", "--machine", "lab"]).ok();
    boot(&daemon, "lab");
    daemon.console("lab", "w", Some("W"));
    stop(&daemon, "lab");
    let mut disk = support::tiny_disk();
    disk[512] = 5;
    let path = daemon.path().join("five.raw");
    std::fs::write(&path, disk).unwrap();
    let imported = daemon.cli(&["image", "import", path.to_str().unwrap(), "--name", "tiny"]);
    assert!(imported.err.contains("machine 'lab' edits tiny over an older version"), "{imported:?}");
    imported.ok();
    for refused in [["image", "seal", "tiny"], ["machine", "seal", "lab"]] {
        let says = ["over tiny@1: tiny@2 is newer", "image discard tiny", "--over-newer"];
        daemon.cli(&refused).fails(4, &says);
    }
    assert_eq!(json(&daemon, &["image", "show", "tiny"])["versions"].as_array().unwrap().len(), 2);
    // A machine that edits nothing is sealed as it is.
    daemon.console("desk", "w", Some("W"));
    let said = daemon.cli(&["machine", "seal", "desk"]).ok();
    assert!(said.contains("sealed as tiny@3 over tiny@1") && said.contains("tiny@2 is newer"), "{said}");
    let sealed = json(&daemon, &["image", "seal", "tiny", "--over-newer"]);
    assert_eq!((&sealed["version"]["number"], &sealed["newer"]), (&4.into(), &"tiny@3".into()));
    daemon.cli(&["image", "promote", "tiny@4", "production"]).ok();
    assert_eq!(boot(&daemon, "lab"), 1);
}

#[test]
fn a_daemon_that_is_killed_while_it_seals_has_the_edit_or_the_version() {
    let mut daemon = Daemon::start();
    import(&daemon, 0);
    create(&daemon, "lab", &[]);
    let mut sealed = 0;
    for round in 0..6u64 {
        let before = json(&daemon, &["image", "show", "tiny"])["versions"].as_array().unwrap().len();
        if json(&daemon, &["image", "show", "tiny"])["edit"].is_null() {
            daemon.cli(&["image", "edit", "tiny", "--machine", "lab"]).ok();
            boot(&daemon, "lab");
            daemon.console("lab", "w", Some("W"));
            stop(&daemon, "lab");
        }
        let mut seal = support::headwater()
            .arg("--data-dir")
            .arg(daemon.path())
            .args(["image", "seal", "tiny"])
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(3 + round * 5));
        signal(daemon.pid(), "KILL");
        seal.wait().unwrap();
        daemon = Daemon::start_in(daemon.kill(), |_| {});
        let image = json(&daemon, &["image", "show", "tiny"]);
        let now = image["versions"].as_array().unwrap().len();
        assert_eq!(image["edit"].is_null(), now == before + 1, "round {round}: {image}");
        sealed += now - before;
        assert!(daemon.cli(&["image", "verify", "tiny"]).ok().contains("intact"));
        let left = std::fs::read_dir(daemon.path().join("cache")).unwrap().count();
        assert_eq!(left, usize::from(now == before), "round {round}: {left} disks are left");
    }
    if !json(&daemon, &["image", "show", "tiny"])["edit"].is_null() {
        daemon.cli(&["image", "seal", "tiny"]).ok();
        sealed += 1;
    }
    // Each sealed edit brought one write.
    let newest = format!("tiny@{}", sealed + 1);
    daemon.cli(&["image", "promote", &newest, "production"]).ok();
    assert_eq!(boot(&daemon, "lab") as usize, sealed);
}

#[test]
fn a_version_is_made_of_a_machine_that_goes_on() {
    let daemon = Daemon::start();
    import(&daemon, 0);
    create(&daemon, "lab", &[]);
    create(&daemon, "desk", &[]);
    daemon.cli(&["machine", "seal", "lab"]).fails(4, &["cannot seal machine 'lab'", "start it"]);
    boot(&daemon, "lab");
    daemon.console("lab", "w", Some("W"));
    let pid = daemon.machine("lab")["pid"].clone();
    let refused = daemon.cli(&["machine", "seal", "lab", "--note", &"x".repeat(1025)]);
    assert!(!refused.err.contains("change something"), "{refused:?}");
    refused.fails(2, &["the note has 1025 bytes"]);
    let said = daemon.cli(&["machine", "seal", "lab", "--note", "as it was"]).ok();
    assert!(said.contains("sealed as tiny@2 over tiny@1") && said.contains("as after a power cut"), "{said}");
    assert!(said.contains("production of tiny was not set; it now points to version 1"), "{said}");
    // It goes on, and what it writes now is not in the version.
    daemon.console("lab", "w", Some("W"));
    assert_eq!(daemon.machine("lab")["pid"], pid);
    // Nobody has promoted it, and so nobody boots it.
    assert_eq!(boot(&daemon, "desk"), 0);
    daemon.cli(&["image", "promote", "tiny@2", "production"]).ok();
    daemon.cli(&["machine", "reset", "desk", "--wait"]).ok();
    assert_eq!(writes(&daemon, "desk"), 1);
    let sealed = json(&daemon, &["machine", "seal", "lab"]);
    assert_eq!((&sealed["version"]["number"], &sealed["parent"]), (&3.into(), &"tiny@1".into()));
    assert!(sealed["pause"]["disk_us"].as_u64().is_some() && sealed["production"].is_null(), "{sealed}");
    daemon.cli(&["image", "promote", "tiny@3", "production"]).ok();
    daemon.cli(&["machine", "reset", "desk", "--wait"]).ok();
    assert_eq!(writes(&daemon, "desk"), 2);
    assert!(daemon.history("lab").contains("its disk is tiny@2"));
}

#[test]
fn answers_to_changes_say_what_a_machine_edits_keeps_and_runs() {
    let daemon = Daemon::start();
    import(&daemon, 1);
    import(&daemon, 2);
    create(&daemon, "editor", &[]);
    create(&daemon, "keeper", &["--persistent"]);
    daemon.create("fixed", "tiny@2", &[]);
    daemon.cli(&["image", "edit", "tiny", "--machine", "editor"]).ok();
    let changed = |args: &[&str]| {
        let answer = json(&daemon, &[&["machine"], args].concat());
        answer.get(0).cloned().unwrap_or(answer)
    };
    let set = |name: &str| changed(&["set", name, "--weight", "9"]);
    assert_eq!((&set("editor")["edits"], &set("editor")["old"]), (&"tiny@2".into(), &false.into()));
    assert_eq!(changed(&["start", "editor"])["edits"], "tiny@2");
    assert_eq!(changed(&["stop", "--force", "editor"])["edits"], "tiny@2");
    let keeper = changed(&["start", "keeper"]);
    assert_eq!((&keeper["kept"], &keeper["old"]), (&"tiny@2".into(), &false.into()));
    daemon.cli(&["machine", "start", "fixed"]).ok();
    assert_eq!(set("fixed")["old"], false);
    // What a pin names needs no store to be compared.
    for name in ["keeper", "fixed"] {
        daemon.cli(&["image", "pin", name, "tiny@1"]).ok();
        assert_eq!((&set(name)["old"], &daemon.machine(name)["old"]), (&true.into(), &true.into()), "{name}");
    }
    let (kept, gone) = (changed(&["stop", "--force", "keeper"]), changed(&["stop", "--force", "fixed"]));
    assert_eq!((&kept["kept"], &kept["old"]), (&"tiny@2".into(), &true.into()));
    // What they ran last is not what they boot next, though nothing of it is left.
    assert_eq!((&gone["kept"], &gone["old"]), (&serde_json::Value::Null, &true.into()));
    let reset = changed(&["reset", "keeper"]);
    assert_eq!((&reset["kept"], &reset["old"]), (&serde_json::Value::Null, &true.into()), "{reset}");
    for name in ["keeper", "fixed"] {
        assert_eq!(daemon.machine(name)["old"], true, "{name}");
    }
    assert!(daemon.cli(&["machine", "list"]).ok().contains("tiny@2 (old) (pinned to @1)"));
    daemon.cli(&["image", "pin", "fixed", "tiny@2"]).ok();
    assert_eq!(daemon.machine("fixed")["old"], false);
    assert!(daemon.cli(&["machine", "list"]).ok().contains("tiny@2 (pinned)"));
}

#[test]
fn the_machines_of_a_catalog_are_made_alike_and_boot_what_it_says() {
    let daemon = Daemon::start();
    import(&daemon, 1);
    import(&daemon, 2);
    daemon.cli(&["image", "promote", "tiny@1", "test"]).ok();
    daemon.cli(&["catalog", "create", "class", "nothing"]).fails(3, &["nothing"]);
    let size = ["--memory", "64M", "--ram", "32M", "--disk", "1G", "--weight", "7"];
    daemon.cli(&[&["catalog", "create", "class", "tiny:test"][..], &size].concat()).ok();
    daemon.cli(&["catalog", "create", "class", "tiny"]).fails(4, &["'class'", "of that name exists"]);
    daemon.cli(&["machine", "create", "class", "tiny"]).fails(4, &["catalog of that name"]);
    daemon.cli(&["machine", "create", "a", "--catalog", "nobody"]).fails(3, &["no catalog 'nobody'"]);
    daemon.cli(&["machine", "create", "a", "--catalog", "class"]).ok();
    daemon.cli(&["machine", "create", "b", "--catalog", "class", "--ram", "48M"]).ok();
    daemon.cli(&["catalog", "create", "a", "tiny"]).fails(4, &["machine of that name"]);
    let (a, b) = (daemon.machine("a"), daemon.machine("b"));
    assert_eq!((&a["image"], &a["next_version"]), (&"tiny:test".into(), &"tiny@1".into()));
    assert_eq!(
        (&a["cache"]["ram_bytes"], &b["cache"]["ram_bytes"]),
        (&(32 << 20).into(), &(48 << 20).into())
    );
    assert_eq!((&b["cache"]["weight"], &b["memory_bytes"]), (&7.into(), &(64 << 20).into()));
    assert_eq!(boot(&daemon, "a"), 1);

    // A promotion, a pin of all and another channel: each from the next boot on.
    daemon.cli(&["image", "promote", "tiny@2", "test"]).ok();
    let shown = json(&daemon, &["catalog", "show", "class"]);
    assert_eq!((&shown["next_version"], &shown["old"][0]), (&"tiny@2".into(), &"a".into()));
    daemon.cli(&["image", "remove", "tiny"]).fails(4, &["catalog 'class' boots it"]);
    assert!(daemon.cli(&["image", "pin", "class", "tiny@1"]).ok().contains("class boot tiny@1"));
    assert_eq!(daemon.machine("b")["next_version"], "tiny@1");
    daemon.cli(&["image", "remove", "tiny@1"]).fails(4, &["catalog 'class' is pinned to it"]);
    daemon.cli(&["image", "pin", "b", "tiny@2"]).ok();
    assert_eq!(boot(&daemon, "b"), 2);
    daemon.cli(&["image", "unpin", "class"]).ok();
    assert!(daemon.cli(&["catalog", "set", "class", "tiny@1"]).ok().contains("boot tiny@1"));
    assert_eq!(daemon.machine("a")["old"], false);
    assert!(daemon.cli(&["catalog", "list"]).ok().contains("class"));
    daemon.cli(&["catalog", "remove", "class"]).fails(4, &["it has machines: a, b"]);
    for machine in ["a", "b"] {
        daemon.cli(&["machine", "remove", machine, "--force"]).ok();
    }
    let told = json(&daemon, &["catalog", "remove", "class"]);
    assert_eq!(told, serde_json::json!({ "removed": ["class"] }));
    let history = daemon.cli(&["events", "--subject", "catalog class"]).ok();
    for word in ["created", "pinned", "unpinned", "set", "tiny:test -> tiny@1", "removed"] {
        assert!(history.contains(word), "{word}: {history}");
    }
    let history = json(&daemon, &["events", "--subject", "catalog class"]);
    let changes: Vec<_> =
        history["events"].as_array().unwrap().iter().map(|event| &event["change"]).collect();
    let set = serde_json::json!({ "before": { "image": "tiny:test" }, "after": { "image": "tiny@1" } });
    assert!(changes.contains(&&set), "{changes:?}");
}
