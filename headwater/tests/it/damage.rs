//! Damage in the store: its alarm and its metrics, from the check that finds it to what ends them.

use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;

use crate::support::{Daemon, headwater, http, pseudo_random, run};
use headwater_store::{Access, LocalDir, Store};
use headwater_testkit::wait_until;
use serde_json::Value;

/// What the log says at the end of each round.
const ROUND: &str = "the scrub read all versions once";

/// A byte of a version's data object, in one chunk.
struct Place {
    object: PathBuf,
    right: u8,
}

impl Place {
    const OFFSET: u64 = 1000;

    fn of(daemon: &Daemon, version: &str) -> Self {
        let store = daemon.path().join("store");
        let opened = LocalDir::open(&store, Access::Read).unwrap();
        let version = opened.resolve(&version.parse().unwrap()).unwrap();
        let object = store.join("objects").join(version.objects[0].to_string());
        std::fs::set_permissions(&object, Permissions::from_mode(0o600)).unwrap();
        let mut byte = [0];
        File::open(&object).unwrap().read_exact_at(&mut byte, Self::OFFSET).unwrap();
        Self { object, right: byte[0] }
    }

    fn write(&self, byte: u8) {
        let file = File::options().write(true).open(&self.object).unwrap();
        file.write_all_at(&[byte], Self::OFFSET).unwrap();
    }

    fn damage(&self) {
        self.write(!self.right);
    }

    fn put_right(&self) {
        self.write(self.right);
    }
}

fn import(daemon: &Daemon, name: &str, seed: u64) {
    let raw = daemon.path().join("disk.raw");
    std::fs::write(&raw, pseudo_random(1 << 20, seed)).unwrap();
    daemon.cli(&["image", "import", raw.to_str().unwrap(), "--name", name]).ok();
}

fn alarms(daemon: &Daemon) -> Vec<Value> {
    let status: Value = serde_json::from_str(&daemon.cli(&["--json", "status"]).ok()).unwrap();
    status["alarms"].as_array().unwrap().clone()
}

#[test]
fn an_import_over_damage_says_how_the_versions_are_found_that_have_it() {
    let daemon = Daemon::start();
    import(&daemon, "d", 3);
    Place::of(&daemon, "d@1").damage();
    let (raw, store) = (daemon.path().join("disk.raw"), daemon.path().join("store"));
    let again = daemon.cli(&["image", "import", raw.to_str().unwrap(), "--name", "fresh"]);
    let advice = format!("'headwater store verify {}'", store.display());
    assert!(again.code == 0 && again.err.contains(&advice), "{again:?}");
    // Beside the daemon.
    let found = run(headwater().args(["store", "verify"]).arg(&store));
    assert_eq!(found.code, 6, "{found:?}");
    for says in ["d@1 is damaged in 1 chunk: ", "fresh@1 is intact"] {
        assert!(found.out.contains(says), "no '{says}' in {found:?}");
    }
}

#[test]
fn a_lost_data_object_is_told_in_one_line_with_how_it_is_repaired() {
    let daemon = Daemon::start();
    import(&daemon, "d", 3);
    std::fs::remove_file(Place::of(&daemon, "d@1").object).unwrap();
    let store = daemon.path().join("store");
    let beside = run(headwater().args(["store", "verify"]).arg(&store));
    let through = daemon.cli(&["image", "verify", "d@1"]);
    let commands = [format!("store verify {}", store.display()), "image verify d@1".to_owned()];
    for (found, command) in [beside, through].into_iter().zip(commands) {
        assert_eq!(found.code, 6, "{found:?}");
        // One for each chunk would be sixteen.
        let lines = found.out.lines().filter(|line| line.starts_with("d@1: data object "));
        assert_eq!(lines.count(), 1, "{found:?}");
        assert!(found.out.contains("; it is lost, with 16 chunks of this version\n"), "{found:?}");
        assert!(!found.out.contains("bytes 0+65536"), "{found:?}");
        let repair = format!("'headwater {command} --repair-from STORE' repairs");
        assert!(found.out.lines().next_back().is_some_and(|last| last.starts_with(&repair)), "{found:?}");
    }
}

/// What Prometheus gets for alarms, versions and chunks.
fn counted(daemon: &Daemon) -> [f64; 3] {
    let (status, text) = http(&daemon.socket(), "GET", "/metrics", None);
    assert_eq!(status, 200, "{text}");
    ["headwater_alarms{kind=\"image\"}", "headwater_damaged_versions", "headwater_damaged_chunks"].map(
        |metric| {
            let value = text.lines().find_map(|line| line.strip_prefix(metric)?.strip_prefix(' '));
            value.unwrap_or_else(|| panic!("no {metric} in {text}")).parse().unwrap()
        },
    )
}

fn assert_is_whole(daemon: &Daemon) {
    let none: [Value; 0] = [];
    assert_eq!(alarms(daemon), none);
    assert_eq!(counted(daemon), [0.0; 3]);
}

#[test]
fn what_the_scrub_finds_damaged_is_an_alarm_until_a_later_round_finds_it_whole() {
    let daemon = Daemon::start();
    import(&daemon, "d", 3);
    import(&daemon, "sound", 4);
    daemon.create("desk", "d", &[]);
    let place = Place::of(&daemon, "d@1");
    let (_, dir) = daemon.terminate();
    let daemon = Daemon::start_in(dir, |command| {
        command.args(["--scrub", "1G", "--scrub-pause", "1"]);
    });
    wait_until("a round ends", || daemon.count_in_log(ROUND) > 0);
    assert_is_whole(&daemon);

    place.damage();
    wait_until("there is an alarm", || !alarms(&daemon).is_empty());
    let raised = alarms(&daemon);
    assert_eq!((raised.len(), &raised[0]["subject"]), (1, &Value::from("image d@1")));
    let message = raised[0]["message"].as_str().unwrap();
    assert!(
        message.starts_with("1 chunk of the version is damaged; it affects d@1: machine 'desk' boots it"),
        "{message}"
    );
    // The damage is where a partition table would be: that none can be looked for is no file.
    let remark = "; more files may be affected: the partition table cannot be read: ";
    assert!(message.contains(remark), "{message}");
    assert!(!message.contains("cannot be read because of that"), "{message}");
    let advice = raised[0]["advice"].as_str().unwrap();
    assert!(advice.contains("'headwater image verify d@1 --repair-from STORE'"), "{advice}");
    assert_eq!(counted(&daemon), [1.0; 3]);
    let shown = daemon.cli(&["status"]).ok();
    assert!(shown.contains("ALARM: image d@1 since 20") && shown.contains("machine 'desk'"), "{shown}");
    wait_until("the history has it, with the machine", || {
        let events = daemon.cli(&["--json", "events", "--subject", "image d"]).ok();
        let events: Value = serde_json::from_str(&events).unwrap();
        let mut events = events["events"].as_array().unwrap().iter();
        let found = events.find(|event| event["action"] == "damaged");
        found.is_some_and(|event| event["detail"].as_str().unwrap().contains("d@1: machine 'desk' boots it"))
    });
    // While the next rounds are under way, and after them.
    let rounds = daemon.count_in_log(ROUND);
    wait_until("two more rounds end", || {
        assert_eq!(alarms(&daemon), raised);
        daemon.count_in_log(ROUND) >= rounds + 2
    });

    place.put_right();
    wait_until("the alarm is over", || alarms(&daemon).is_empty());
    assert_is_whole(&daemon);
    assert!(daemon.cli(&["status"]).ok().contains("alarms                none"));
    place.damage();
    wait_until("there is an alarm again", || counted(&daemon) == [1.0; 3]);
}

#[test]
fn what_a_verification_finds_damaged_is_an_alarm_until_it_is_verified_or_removed() {
    let daemon = Daemon::start();
    import(&daemon, "d", 3);
    import(&daemon, "d", 4);
    let place = Place::of(&daemon, "d@1");
    let is_damaged = |daemon: &Daemon| {
        let verified = daemon.cli(&["--json", "image", "verify", "d@1"]);
        assert_eq!(verified.code, 6, "{verified:?}");
        let report: Value = serde_json::from_str(&verified.out).unwrap();
        assert_eq!(report["damaged_chunks"], 1, "{report}");
        assert_eq!(counted(daemon), [1.0; 3]);
        assert_eq!(alarms(daemon)[0]["subject"], "image d@1");
    };
    place.damage();
    assert_eq!(counted(&daemon), [0.0; 3]);
    is_damaged(&daemon);
    // Another version says nothing of this one.
    daemon.cli(&["image", "verify", "d@2"]).ok();
    is_damaged(&daemon);

    // A daemon that has not looked yet does not know.
    let (_, dir) = daemon.terminate();
    let daemon = Daemon::start_in(dir, |_| {});
    assert_eq!(counted(&daemon), [0.0; 3]);
    is_damaged(&daemon);
    place.put_right();
    daemon.cli(&["image", "verify", "d@1"]).ok();
    assert_is_whole(&daemon);

    place.damage();
    is_damaged(&daemon);
    daemon.cli(&["image", "remove", "d@1"]).ok();
    assert_is_whole(&daemon);
}
