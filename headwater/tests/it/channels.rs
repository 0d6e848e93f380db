//! Channels, pins and retired versions through the command line: who boots what, when it changes, what is held.

use std::path::Path;

use crate::support::{self, Daemon, http};
use headwater_testkit::wait_until;

/// Imports one more version of `tiny`: its boot sector prints `writes`.
fn import(daemon: &Daemon, writes: u8, note: &str) {
    let path = daemon.path().join("tiny.raw");
    let mut disk = support::tiny_disk();
    disk[512] = writes;
    std::fs::write(&path, disk).unwrap();
    daemon.cli(&["image", "import", text(&path), "--note", note]).ok();
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn image(daemon: &Daemon, reference: &str) -> serde_json::Value {
    serde_json::from_str(&daemon.cli(&["--json", "image", "versions", reference]).ok()).unwrap()
}

/// The version that a machine would boot.
fn number(daemon: &Daemon, reference: &str) -> u64 {
    let shown = image(daemon, reference);
    let versions = shown["versions"].as_array().unwrap();
    let with = |channel: &str| {
        let points = |it: &&serde_json::Value| it["channels"].as_array().unwrap().contains(&channel.into());
        versions.iter().find(points)
    };
    let one = if versions.len() == 1 { versions.first() } else { with("production").or(with("maintenance")) };
    one.unwrap_or_else(|| panic!("{shown}"))["number"].as_u64().unwrap()
}

#[test]
fn a_promotion_reaches_a_running_machine_at_its_next_boot_only() {
    let daemon = Daemon::start();
    import(&daemon, 1, "the first");
    import(&daemon, 2, "");
    daemon.cli(&["image", "promote", "tiny@1", "production"]).ok();
    daemon.create("lab", "tiny", &[]);
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    let lab = daemon.machine("lab");
    assert_eq!((&lab["version"], &lab["old"]), (&"tiny@1".into(), &false.into()));
    assert!(!daemon.cli(&["machine", "list"]).ok().contains("(old)"));

    let said = daemon.cli(&["image", "promote", "tiny@2", "production"]).ok();
    assert!(said.contains("production of tiny is version 2") && said.contains("next boot: lab"), "{said}");
    let lab = daemon.machine("lab");
    assert_eq!((&lab["version"], &lab["next_version"]), (&"tiny@1".into(), &"tiny@2".into()));
    assert!(daemon.cli(&["machine", "list"]).ok().contains("tiny@1 (old)"));
    // It follows another channel than these are of.
    for other in [&["promote", "tiny@1", "test"][..], &["revert", "tiny", "test"]] {
        let said = daemon.cli(&[&["image"], other].concat()).ok();
        assert!(said.contains("test of tiny") && !said.contains("lab"), "{said}");
    }
    daemon.cli(&["image", "remove", "tiny@1"]).fails(4, &["machine 'lab' runs it"]);

    daemon.cli(&["machine", "reset", "lab", "--wait"]).ok();
    assert_eq!(daemon.machine("lab")["version"], "tiny@2");
    assert!(daemon.cli(&["machine", "console", "lab", "--log"]).ok().contains("2 writes"));

    // Back, and a pin wins over any channel.
    assert!(daemon.cli(&["image", "revert", "tiny", "production"]).ok().contains("version 1 again"));
    let said = daemon.cli(&["image", "revert", "tiny", "production"]).ok();
    assert!(
        said.contains("not set any more")
            && said.contains("machines that name only tiny boot its newest version"),
        "{said}"
    );
    assert_eq!(number(&daemon, "tiny"), 2);
    daemon.cli(&["image", "revert", "tiny", "production"]).fails(3, &["not set"]);
    daemon.cli(&["image", "promote", "tiny@1", "production"]).ok();
    daemon.cli(&["image", "pin", "lab", "tiny@2"]).ok();
    assert_eq!(daemon.machine("lab")["next_version"], "tiny@2");
    let versions = daemon.cli(&["image", "versions", "tiny"]).ok();
    assert!(versions.contains("production") && versions.contains("the first"), "{versions}");
    assert!(versions.contains("uid "), "the author is told: {versions}");
    daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
    daemon.cli(&["image", "remove", "tiny@2"]).fails(4, &["machine 'lab' is pinned to it"]);
    assert!(daemon.cli(&["image", "unpin", "lab"]).ok().contains("tiny@1"));
    assert!(
        daemon.cli(&["machine", "list"]).ok().contains("tiny@2 (old)"),
        "it is off, and boots another next"
    );
    daemon.cli(&["image", "remove", "tiny@2"]).ok();
    let refused = daemon.cli(&["image", "remove", "tiny@1"]);
    refused.fails(4, &["channel production points to it", "machine 'lab' boots it"]);
    let history = daemon.cli(&["image", "history", "tiny"]).ok();
    for word in ["imported", "promoted", "production from version 1 to 2", "back to not being set", "removed"]
    {
        assert!(history.contains(word), "{word}: {history}");
    }
}

#[test]
fn a_channel_is_chosen_by_name_and_what_cannot_be_is_said() {
    let daemon = Daemon::start();
    for writes in 1..=3 {
        import(&daemon, writes, "");
    }
    assert_eq!(number(&daemon, "tiny:maintenance"), 3);
    daemon.cli(&["image", "show", "tiny:test"]).fails(3, &["channel test", "not set", "image promote tiny@"]);
    daemon.cli(&["machine", "create", "a", "tiny:test"]).fails(3, &["channel test"]);
    daemon.cli(&["image", "promote", "tiny@2", "test"]).ok();
    assert_eq!(number(&daemon, "tiny:test"), 2);
    daemon.create("a", "tiny:test", &[]);
    assert_eq!(daemon.machine("a")["next_version"], "tiny@2");

    daemon.cli(&["image", "promote", "tiny", "test"]).fails(2, &["does not say which version"]);
    daemon.cli(&["image", "promote", "tiny@9", "test"]).fails(3, &["no version 9", "1, 2, 3"]);
    daemon.cli(&["image", "promote", "tiny@1", "maintenance"]).fails(2, &["cannot be set"]);
    daemon.cli(&["image", "revert", "tiny", "production"]).fails(3, &["not set"]);
    daemon.cli(&["image", "pin", "a", "other@1"]).fails(3, &["no image 'other'"]);
    daemon.cli(&["image", "pin", "b", "tiny@1"]).fails(3, &["no machine 'b'"]);
    daemon.cli(&["image", "history", "other"]).fails(3, &["no image 'other'"]);

    daemon.cli(&["image", "retire", "tiny@2"]).fails(4, &["test points to it"]);
    let retired = daemon.cli(&["image", "retire", "tiny@3"]).ok();
    assert!(
        retired.contains("machines that boot 'tiny' boot version 2 from their next boot on"),
        "{retired}"
    );
    assert_eq!(number(&daemon, "tiny"), 2);
    daemon.cli(&["image", "promote", "tiny@3", "test"]).fails(2, &["retired", "--undo"]);
    let back = daemon.cli(&["image", "retire", "tiny@3", "--undo"]).ok();
    assert!(back.contains("machines that boot 'tiny' boot version 3 from their next boot on"), "{back}");
    assert_eq!(number(&daemon, "tiny"), 3);
    let older = daemon.cli(&["image", "retire", "tiny@1"]).ok();
    assert_eq!(older, "tiny@1 is retired\n");
    daemon.cli(&["image", "retire", "tiny@1", "--undo"]).ok();

    // Numbers go on, also after the last version.
    daemon.cli(&["machine", "remove", "a"]).ok();
    for reference in ["tiny@1", "tiny@3"] {
        daemon.cli(&["image", "remove", reference]).ok();
    }
    import(&daemon, 4, "");
    assert_eq!(number(&daemon, "tiny"), 4);
}

#[test]
fn a_hash_that_numbers_share_means_the_newest_and_promotes_the_newest_in_use() {
    let daemon = Daemon::start();
    for writes in [1, 2, 1] {
        import(&daemon, writes, "");
    }
    let versions = || image(&daemon, "tiny")["versions"].as_array().unwrap().clone();
    let numbers = |are: &dyn Fn(&serde_json::Value) -> bool| -> Vec<u64> {
        versions().iter().filter(|it| are(it)).map(|it| it["number"].as_u64().unwrap()).collect()
    };
    let hash = versions()[0]["hash"].as_str().unwrap().to_owned();
    assert_eq!(numbers(&|it| it["hash"] == hash.as_str()), [1, 3]);
    let retired = || numbers(&|it| it["retired"] == true);
    let by_hash = format!("tiny@{hash}");
    let ask = |arguments: &[&str]| daemon.cli(&[&["image"], arguments].concat());

    // Twice is no more than once.
    for _ in 0..2 {
        assert!(ask(&["retire", &by_hash]).ok().contains("tiny@3 is retired"));
        assert_eq!(retired(), [3]);
    }
    ask(&["promote", "tiny@3", "test"]).fails(2, &["retired", "--undo"]);
    assert!(ask(&["promote", &by_hash, "test"]).ok().contains("test of tiny is version 1"));
    let later = ask(&["promote", &by_hash, "production", "--at", "+1d"]).ok();
    assert!(later.contains("will be version 1 at 20"), "{later}");
    assert!(ask(&["retire", &by_hash, "--undo"]).ok().contains("tiny@3 is in use again"));
    assert_eq!(retired(), [] as [u64; 0]);
    assert!(ask(&["promote", &by_hash, "test"]).ok().contains("test of tiny is version 3"));
    ask(&["promote", "tiny@1", "test"]).ok();
    // What goes is what was retired.
    ask(&["retire", &by_hash]).ok();
    ask(&["remove", &by_hash]).ok();
    assert_eq!(numbers(&|_| true), [1, 2]);
    assert_eq!(retired(), [] as [u64; 0]);
}

#[test]
fn an_image_that_a_channel_points_into_is_removed_only_with_its_channels() {
    let daemon = Daemon::start();
    import(&daemon, 1, "");
    import(&daemon, 2, "");
    daemon.create("lab", "tiny", &[]);
    daemon.cli(&["image", "pin", "lab", "tiny@1"]).ok();
    daemon.cli(&["image", "promote", "tiny@2", "production"]).ok();
    // What a machine or a pin uses goes in no way.
    daemon.cli(&["image", "remove", "tiny", "--force"]).fails(4, &["machine 'lab' boots it"]);
    daemon.cli(&["machine", "remove", "lab"]).ok();
    let refused = |words: &[&str]| daemon.cli(&["image", "remove", "tiny"]).fails(4, words);
    let with = "'headwater image remove tiny --force' removes it with its channels";
    refused(&["cannot remove image 'tiny'", "production points to version 2", with]);
    // So is what only will be.
    daemon.cli(&["image", "promote", "tiny@1", "test", "--at", "+1d"]).ok();
    refused(&["production points to version 2, and version 1 will be promoted to test", with]);
    daemon.cli(&["image", "revert", "tiny", "production"]).ok();
    refused(&["version 1 will be promoted to test", with]);
    let (status, answer) = http(&daemon.socket(), "DELETE", "/api/v1/images/tiny?force=false", None);
    assert!(status == 409 && answer.contains("promoted to test"), "{status} {answer}");
    daemon.cli(&["image", "remove", "tiny@2", "--force"]).fails(2, &["'tiny@2'", "this names one version"]);
    let removed = daemon.cli(&["--json", "image", "remove", "tiny", "--force"]).ok();
    let removed: serde_json::Value = serde_json::from_str(&removed).unwrap();
    assert_eq!(removed["removed"], serde_json::json!(["tiny@1", "tiny@2"]));
    // Without channels it needs no more than that nobody boots it.
    import(&daemon, 3, "");
    daemon.cli(&["image", "remove", "tiny"]).ok();
    daemon.cli(&["image", "show", "tiny"]).fails(3, &["no image 'tiny'"]);
}

#[test]
fn a_note_is_changed_after_its_version_was_made_and_the_history_says_so() {
    let daemon = Daemon::start();
    import(&daemon, 1, "the frist");
    import(&daemon, 2, "");
    let note = |arguments: &[&str]| daemon.cli(&[&["image", "note"], arguments].concat());
    let said = note(&["tiny@1", "the first"]).ok();
    assert!(said.contains("tiny@1 has the note 'the first'"), "{said}");
    let version: serde_json::Value =
        serde_json::from_str(&note(&["tiny@2", "the second", "--json"]).ok()).unwrap();
    assert_eq!((&version["number"], &version["note"]), (&2.into(), &"the second".into()));
    let versions = daemon.cli(&["image", "versions", "tiny"]).ok();
    assert!(versions.contains("the first") && versions.contains("the second"), "{versions}");
    assert!(!versions.contains("the frist"), "{versions}");

    // Also of a version that is retired, and by the hash. No note is no field.
    daemon.cli(&["image", "retire", "tiny@1"]).ok();
    let first = || image(&daemon, "tiny")["versions"][0].clone();
    let by_hash = format!("tiny@{}", first()["hash"].as_str().unwrap());
    assert!(note(&[by_hash.as_str(), ""]).ok().contains("tiny@1 has no note"));
    assert_eq!((&first()["note"], &first()["retired"]), (&serde_json::Value::Null, &true.into()));

    // What it is already is no change.
    note(&["tiny@2", "the second"]).ok();
    note(&["tiny@2", &"x".repeat(1025)]).fails(2, &["the note has 1025 bytes, and at most 1024"]);
    for no_version in ["tiny", "tiny:production"] {
        note(&[no_version, "none"]).fails(2, &["does not say which version"]);
    }
    note(&["tiny@9", "none"]).fails(3, &["no version 9", "1, 2"]);
    note(&["other@1", "none"]).fails(3, &["no image 'other'"]);
    daemon.cli(&["image", "remove", "tiny@1"]).ok();
    note(&["tiny@1", "none"]).fails(3, &["no version 1"]);
    let history = daemon.cli(&["image", "history", "tiny"]).ok();
    let changes: Vec<&str> = history.lines().filter(|line| line.contains("note changed")).collect();
    assert!(changes.iter().all(|line| line.contains("uid ")), "{history}");
    let told = ["from 'the frist' to 'the first'", "from none to 'the second'", "from 'the first' to none"];
    assert_eq!(changes.len(), told.len(), "{history}");
    for (line, told) in changes.iter().zip(told) {
        assert!(line.contains(told), "{told}: {history}");
    }
    // It outlives the daemon.
    let daemon = Daemon::start_in(daemon.kill(), |_| {});
    assert_eq!(image(&daemon, "tiny")["versions"][0]["note"], "the second");
}

#[test]
fn a_scheduled_promotion_survives_the_daemon_and_happens() {
    let daemon = Daemon::start();
    import(&daemon, 1, "");
    import(&daemon, 2, "");
    daemon.cli(&["image", "promote", "tiny@1", "production"]).ok();
    daemon
        .cli(&["image", "promote", "tiny@2", "production", "--at", "1999-01-01T00:00Z"])
        .fails(2, &["at 1999-01-01 00:00:00Z", "s ago"]);
    daemon.cli(&["image", "promote", "tiny@2", "production", "--at", "soon"]).fails(2, &["+90m"]);
    daemon.cli(&["image", "promote", "tiny@2", "test", "--at", "+1d"]).ok();
    let said = daemon.cli(&["image", "promote", "tiny@2", "production", "--at", "+1d"]).ok();
    assert!(said.contains("will be version 2 at 20"), "{said}");
    assert_eq!(number(&daemon, "tiny"), 1);
    let history = daemon.cli(&["image", "history", "tiny"]).ok();
    assert!(history.contains("production to version 2 at 20") && !history.contains(" ms"), "{history}");
    assert!(daemon.cli(&["image", "versions", "tiny"]).ok().contains("production will be version 2"));
    daemon.cli(&["image", "remove", "tiny@2"]).fails(4, &["will be promoted to production", "to test"]);

    // This one takes its place. Whether its time comes before the next daemon or in it, it is carried out. Not sooner: the
    // time is reckoned before the daemon is asked, and what is past then is refused.
    let said = daemon.cli(&["image", "promote", "tiny@2", "production", "--at", "+5s"]).ok();
    assert!(
        said.contains("; cancels the promotion to version 2 at 20") && said.contains(", scheduled by uid "),
        "{said}"
    );
    let history = daemon.cli(&["image", "history", "tiny"]).ok();
    assert!(history.contains("; cancels the promotion to version 2 at 20"), "{history}");
    let daemon = Daemon::start_in(daemon.kill(), |_| {});
    wait_until("the promotion happens", || number(&daemon, "tiny") == 2);
    wait_until("it is noted", || daemon.cli(&["image", "history", "tiny"]).ok().contains("as uid"));
    daemon.cli(&["image", "revert", "tiny", "production"]).ok();
    let left = image(&daemon, "tiny");
    assert_eq!(left["scheduled"].as_array().unwrap().len(), 1, "{left}");
    // So does one that is carried out at once, and says it to programs, too.
    let answer = daemon.cli(&["--json", "image", "promote", "tiny@1", "test"]).ok();
    let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
    assert_eq!((&answer["version"], &answer["forgets"]["version"]), (&1.into(), &2.into()));
    assert_eq!(image(&daemon, "tiny")["scheduled"].as_array().unwrap().len(), 0);
    daemon.cli(&["image", "promote", "tiny@2", "test", "--at", "+1d"]).ok();
    daemon.cli(&["image", "promote", "tiny", "test", "--cancel"]).ok();
    daemon.cli(&["image", "promote", "tiny", "test", "--cancel"]).fails(3, &["no promotion to test"]);

    let (status, answer) = http(
        &daemon.socket(),
        "POST",
        "/api/v1/images/tiny@1/promotion",
        Some(r#"{"channel":"test","at":5}"#),
    );
    assert!(status == 400 && answer.contains("unknown field"), "{status} {answer}");
}

#[test]
fn a_comparison_says_what_changed() {
    let daemon = Daemon::start();
    import(&daemon, 1, "");
    import(&daemon, 2, "");
    assert!(daemon.cli(&["image", "diff", "tiny@1", "tiny@1"]).ok().contains("are the same"));
    let told = daemon.cli(&["image", "diff", "tiny@1", "tiny@2"]).ok();
    assert!(told.contains("differ in 4.0 KiB, in 1 chunks") && told.contains("the whole disk"), "{told}");
    let json = daemon.cli(&["--json", "image", "diff", "tiny@1", "tiny"]).ok();
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&report["changed_bytes"], &report["to"]["number"]), (&4096.into(), &2.into()));
    daemon.cli(&["image", "diff", "tiny@1", "tiny@7"]).fails(3, &["no version 7"]);
}

#[test]
fn a_version_is_promoted_or_removed_and_never_both() {
    let daemon = Daemon::start();
    import(&daemon, 1, "it stays");
    let socket = daemon.socket();
    for round in 0..12u8 {
        import(&daemon, 10 + round, "");
        let newest = image(&daemon, "tiny")["versions"].as_array().unwrap().last().unwrap()["number"].clone();
        let path = format!("/api/v1/images/tiny@{newest}");
        let promotion = format!("{path}/promotion");
        let remove = || http(&socket, "DELETE", &path, None);
        let promote = || http(&socket, "POST", &promotion, Some(r#"{"channel":"test"}"#));
        let (removed, promoted) = std::thread::scope(|scope| {
            // Who begins takes turns; either may be first in the store.
            let first = scope.spawn(|| if round % 2 == 0 { remove() } else { promote() });
            let second = if round % 2 == 0 { promote() } else { remove() };
            let first = first.join().unwrap();
            if round % 2 == 0 { (first, second) } else { (second, first) }
        });
        let shown = image(&daemon, "tiny");
        let versions = shown["versions"].as_array().unwrap();
        let there = versions.iter().find(|version| version["number"] == newest);
        let is_test = there.is_some_and(|it| it["channels"].as_array().unwrap().contains(&"test".into()));
        match (removed.0, promoted.0) {
            (200, 404) => assert!(there.is_none(), "{shown}"),
            (409, 200) => assert!(is_test, "{shown}"),
            _ => panic!("removed: {removed:?}, promoted: {promoted:?}, {shown}"),
        }
    }
}

#[test]
fn the_second_of_a_promotion_to_come_is_the_same_wherever_it_is_told() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    // Each begins at another part of a second.
    for _ in 0..4 {
        let said = daemon.cli(&["image", "promote", "tiny@1", "test", "--at", "+1m"]).ok();
        let at = said
            .split(" at ")
            .nth(1)
            .and_then(|rest| rest.get(.."2026-11-20 11:34:29Z".len()))
            .expect("a time");
        let versions = daemon.cli(&["image", "versions", "tiny"]).ok();
        assert!(versions.contains(&format!("test will be version 1 at {at},")), "{at}: {versions}");
        let history = daemon.cli(&["image", "history", "tiny", "--limit", "1"]).ok();
        assert!(history.contains(&format!("at {at}")), "{at}: {history}");
        std::thread::sleep(std::time::Duration::from_millis(230));
    }
}
