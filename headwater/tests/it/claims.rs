//! `catalog claim` with guests that write.

use serde_json::Value;

use crate::support::{self, Daemon};
use headwater_testkit::wait_until;

fn with_class(more: &[&str]) -> Daemon {
    let daemon = Daemon::start();
    let disk = daemon.path().join("tiny.raw");
    std::fs::write(&disk, support::tiny_disk()).unwrap();
    daemon.cli(&["image", "import", disk.to_str().unwrap()]).ok();
    let create = ["catalog", "create", "class", "tiny", "--cache", "ram", "--memory", "64M"];
    daemon.cli(&[&create, more].concat()).ok();
    daemon
}

#[test]
fn the_next_holder_sees_nothing_of_the_last_one() {
    let daemon = with_class(&["--count", "1", "--keep-ready", "1"]);
    let claim = |holder: &str| {
        daemon.cli(&["catalog", "claim", "class", "--for", holder, "--wait", "120s"]).ok().trim().to_owned()
    };
    let machine = claim("anna");
    assert_eq!(machine, "class-01");
    daemon.console(&machine, "w", Some("W"));
    assert_eq!(daemon.machine(&machine)["disk"]["writes"], 1);
    assert_eq!(daemon.machine(&machine)["claimed_for"], "anna");
    assert!(daemon.cli(&["machine", "list", "is:claimed"]).ok().contains("class-01"));
    let claims = daemon.cli(&["catalog", "claims"]).ok();
    assert!(claims.contains("anna") && claims.contains("class-01"), "{claims}");
    daemon
        .cli(&["catalog", "claim", "class", "--for", "bert"])
        .fails(4, &["none is ready", "1 are claimed", "--wait"]);
    // Nobody takes it away by accident.
    daemon.cli(&["catalog", "scale", "class", "0"]).fails(4, &["class-01"]);

    daemon.cli(&["catalog", "release", &machine]).ok();
    assert_eq!(claim("bert"), machine);
    assert_eq!(daemon.machine(&machine)["disk"]["writes"], 0);
    // Had the write survived, this would be "1 writes".
    assert!(daemon.cli(&["machine", "console", &machine, "--log"]).ok().contains("0 writes"));
    let history = daemon.history(&machine);
    assert!(history.contains("for anna") && history.contains("of anna: released by uid 0"), "{history}");
}

#[test]
fn a_claim_ends_when_the_guest_switches_itself_off_or_the_time_is_over() {
    let daemon = with_class(&["--count", "2", "--keep-ready", "1"]);
    let claim = |more: &[&str]| -> Value {
        let args = ["--json", "catalog", "claim", "class", "--for", "ci", "--wait", "120s"];
        serde_json::from_str(&daemon.cli(&[&args, more].concat()).ok()).unwrap()
    };
    let first = claim(&["--key", "job-1"]);
    assert_eq!(claim(&["--key", "job-1"])["id"], first["id"]);
    let machine = first["machine"].as_str().unwrap();
    daemon.console(machine, "p", None);
    let count = || -> usize {
        let list: Value = serde_json::from_str(&daemon.cli(&["--json", "catalog", "claims"]).ok()).unwrap();
        list["claims"].as_array().unwrap().len()
    };
    wait_until("the claim ends with its machine", || count() == 0);
    assert!(claim(&["--ttl", "1s"])["expires_at_ms"].is_u64());
    wait_until("its time is over", || count() == 0);
    daemon.cli(&["catalog", "set", "class", "--keep-ready", "2"]).ok();
    let is_on = |machine: &Value| machine["state"] == "running" && machine["claimed_for"].is_null();
    wait_until("both machines are ready", || {
        let list: Value = serde_json::from_str(&daemon.cli(&["--json", "machine", "list"]).ok()).unwrap();
        list["machines"].as_array().unwrap().iter().filter(|machine| is_on(machine)).count() == 2
    });
    daemon.cli(&["catalog", "release", "nobody"]).fails(3, &["no claim 'nobody'"]);
    daemon.cli(&["catalog", "create", "kept", "tiny", "--persistent"]).ok();
    daemon.cli(&["catalog", "claim", "kept", "--for", "x"]).fails(2, &["have persistent disks"]);
    daemon.cli(&["catalog", "set", "kept", "--keep-ready", "1"]).fails(2, &["have persistent disks"]);
}

#[test]
fn a_pool_is_ready_in_its_hours_only() {
    let day = support::another_day();
    let hours = ["--from", "00:00", "--to", "24:00", "--days", day, "--zone", "Europe/Berlin"];
    let daemon = with_class(&[&["--count", "2", "--keep-ready", "1"], &hours[..]].concat());
    let shown = daemon.cli(&["catalog", "show", "class"]).ok();
    let kept = format!("1 {day} 00:00-24:00 Europe/Berlin, others are switched off after 900 s");
    assert!(shown.contains(&kept), "{shown}");
    let on = || -> usize {
        let list: Value = serde_json::from_str(&daemon.cli(&["--json", "machine", "list"]).ok()).unwrap();
        list["machines"].as_array().unwrap().iter().filter(|machine| machine["state"] == "running").count()
    };
    daemon.cli(&["catalog", "claim", "class", "--for", "x"]).fails(4, &["none is ready"]);
    daemon.cli(&["catalog", "set", "class", "--always"]).ok();
    wait_until("a machine is ready", || on() == 1);
    let set = [&["catalog", "set", "class"], &hours[..], &["--stop-idle", "1s"]].concat();
    daemon.cli(&set).ok();
    wait_until("it is switched off", || on() == 0);
    let history = daemon.cli(&["events", "--subject", "catalog class"]).ok();
    assert!(
        history.contains(&format!("1 kept ready {day} 00:00-24:00 Europe/Berlin, stop idle 1 s")),
        "{history}"
    );
    for (more, told) in [
        (&["--from", "7", "--to", "19:00"][..], "'7' is not a time of day"),
        (&["--from", "07:00", "--to", "07:00"], "have no length"),
        (&["--from", "07:00", "--to", "19:00", "--days", "mo"], "names no days"),
        (
            &["--from", "07:00", "--to", "19:00", "--zone", "Europe/Atlantis"],
            "this host does not know the time zone",
        ),
        (&["--from", "07:00"], "--to"),
        (&["--zone", "UTC"], "--from"),
        (&["--stop-idle", "8d"], "it may have 7 days at most"),
        (&["--stop-idle", "soon"], "soon"),
    ] {
        let refused = daemon.cli(&[&["catalog", "set", "class"], more].concat());
        assert!(refused.code == 2 && refused.err.contains(told), "{refused:?}");
    }
    assert!(daemon.cli(&["catalog", "show", "class"]).ok().contains("after 1 s"));
}

/// With the Debian guest, whose agent answers.
#[test]
fn a_guest_knows_the_secret_of_its_claim_and_its_addresses_are_told() {
    let daemon = Daemon::start();
    daemon.cli(&["image", "import", &crate::guests::guest(), "--name", "debian"]).ok();
    let create = ["catalog", "create", "desk", "debian", "--count", "1", "--ram", "64M", "--disk", "2G"];
    daemon.cli(&[&create[..], &["--keep-ready", "1"]].concat()).ok();
    let claim = |more: &[&str]| {
        daemon
            .cli(&[&["--json", "catalog", "claim", "desk", "--for", "anna", "--wait", "600s"], more].concat())
    };
    let claimed: Value = serde_json::from_str(&claim(&["--secret", "--reset-on", "logoff"]).ok()).unwrap();
    let secret = claimed["secret"].as_str().unwrap();
    let sh = |script: &str| {
        daemon.cli(&["machine", "exec", "desk-01", "--", "sh", "-c", script]).ok().trim().to_owned()
    };
    assert_eq!(claimed["console"], "headwater machine console desk-01");
    let note: Value = serde_json::from_str(&sh("cat /run/headwater/claim.json")).unwrap();
    assert_eq!((note["secret"].as_str(), &note["claim"]), (Some(secret), &claimed["id"]));
    assert_eq!(sh("stat -c %a:%U /run/headwater/claim.json"), "600:root");
    // Its address, now or a moment later.
    let claims =
        || -> Value { serde_json::from_str(&daemon.cli(&["--json", "catalog", "claims"]).ok()).unwrap() };
    wait_until("the address of the guest is known", || claims()["claims"][0]["addresses"][0] == "10.0.2.15");
    assert_eq!(claims()["claims"][0]["secret"], Value::Null);
    assert!(daemon.cli(&["catalog", "claims"]).ok().contains("10.0.2.15"));
    assert!(!daemon.cli(&["events"]).ok().contains(secret));
    let run = daemon.path();
    let files = std::process::Command::new("grep").args(["-rl", secret]).arg(run).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&files.stdout), "", "a file has the secret");
    // A session as systemd knows it, which ends.
    sh("mkdir -p /run/systemd/sessions; printf 'CLASS=user\\nSTATE=active\\n' >/run/systemd/sessions/test");
    // A read changes the time of the last access. The second look begins when the daemon has the answer of the first one.
    for look in ["first", "second"] {
        sh("touch -a -d 2001-01-01 /run/systemd/sessions/test");
        let accessed = "stat -c %X /run/systemd/sessions/test";
        let before = sh(accessed);
        wait_until(format!("the {look} look for sessions"), || sh(accessed) != before);
    }
    assert_eq!(claims()["claims"][0]["ended"], Value::Null);
    sh("rm /run/systemd/sessions/test");
    wait_until("the claim ends with the session", || {
        daemon.history("desk-01").contains("of anna: its user has logged off")
    });
}
