//! Versions that a daemon brings from another store while it runs.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};

use crate::support::{self, Daemon, headwater, pseudo_random, run, short_dir};
use headwater_store::{Access, LocalDir, Store};
use headwater_testkit::{FileServer, HttpFault, wait_until};
use serde_json::Value;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// What the version of an image is made of.
fn disk(seed: u64) -> Vec<u8> {
    pseudo_random(2 << 20, seed)
}

fn import(daemon: &Daemon, name: &str, seed: u64) {
    let raw = daemon.path().join("disk.raw");
    std::fs::write(&raw, disk(seed)).unwrap();
    daemon.cli(&["image", "import", text(&raw), "--name", name, "--note", "made there"]).ok();
}

/// Has a daemon add versions to the store of a data directory, and end: of `disk`, the last of which is production's.
fn added_by_a_daemon(dir: tempfile::TempDir, seeds: &[u64]) -> tempfile::TempDir {
    let daemon = Daemon::start_in(dir, |_| {});
    for seed in seeds {
        import(&daemon, "disk", *seed);
    }
    let image: Value = serde_json::from_str(&daemon.cli(&["--json", "image", "show", "disk"]).ok()).unwrap();
    let newest = image["versions"].as_array().unwrap().len();
    daemon.cli(&["image", "promote", &format!("disk@{newest}"), "production"]).ok();
    let (code, dir) = daemon.terminate();
    assert_eq!(code, Some(0));
    dir
}

/// All files of a part of a store.
fn files(store: &Path, part: &str) -> BTreeMap<OsString, Vec<u8>> {
    let entries = std::fs::read_dir(store.join(part)).unwrap().map(Result::unwrap);
    entries.map(|entry| (entry.file_name(), std::fs::read(entry.path()).unwrap())).collect()
}

/// The numbers of an image's versions, and the channels of the last.
fn versions(daemon: &Daemon) -> (Vec<u64>, Value) {
    let image: Value =
        serde_json::from_str(&daemon.cli(&["--json", "image", "versions", "disk"]).ok()).unwrap();
    let versions = image["versions"].as_array().unwrap();
    let numbers = versions.iter().map(|version| version["number"].as_u64().unwrap()).collect();
    (numbers, versions.last().unwrap()["channels"].clone())
}

#[test]
fn a_daemon_brings_the_versions_of_another_store_while_it_runs() {
    let there = added_by_a_daemon(short_dir(), &[1]);
    let source = there.path().join("store");
    let opened = LocalDir::open(&source, Access::Read).unwrap();
    let first = opened.resolve(&"disk@1".parse().unwrap()).unwrap();
    opened.set_trace(first.manifest, Some(b"what its boots read")).unwrap();

    let daemon = Daemon::start();
    let own = daemon.path().join("store");
    let sync = ["store", "sync", text(&source), text(&own)];
    run(headwater().args(sync)).fails(4, &["in use by another process", "headwater image pull STORE"]);
    let said = daemon.cli(&["image", "pull", text(&source)]).ok();
    assert!(said.contains("copied to the daemon's store"), "{said}");
    for part in ["images", "manifests", "objects", "traces"] {
        let (theirs, ours) = (files(&source, part), files(&own, part));
        assert!(!theirs.is_empty() && theirs == ours, "{part}: {:?}, {:?}", theirs.keys(), ours.keys());
    }
    let history = daemon.cli(&["image", "history", "disk"]).ok();
    assert!(history.contains("pulled") && history.contains(text(&source)), "{history}");

    // Machines follow the channel that came with it.
    daemon.create("desk", "disk", &[]);
    assert_eq!(daemon.machine("desk")["next_version"], "disk@1");
    let there = added_by_a_daemon(there, &[2, 3]);
    let said = daemon.cli(&["image", "pull", text(&source)]).ok();
    let moved = "machines that boot 'disk' boot version 3 instead of version 1 from their next boot on";
    assert!(said.contains(moved), "{said}");
    assert_eq!(versions(&daemon), (vec![1, 2, 3], serde_json::json!(["maintenance", "production"])));
    assert_eq!(daemon.machine("desk")["next_version"], "disk@3");
    let out = daemon.path().join("out.raw");
    daemon.cli(&["image", "export", "disk@2", text(&out)]).ok();
    assert!(std::fs::read(&out).unwrap() == disk(2));
    let again = daemon.cli(&["image", "pull", text(&source)]).ok();
    assert!(again.starts_with("nothing to copy: all 3 versions are in the daemon's store"), "{again}");
    // A directory is named as it is seen from where the command is given.
    let mut command = headwater();
    command.current_dir(there.path()).arg("--data-dir").arg(daemon.path());
    assert_eq!(run(command.args(["image", "pull", "store"])).ok().lines().count(), 1);

    // Only what is named, and no channels.
    let other = Daemon::start();
    let report: Value =
        serde_json::from_str(&other.cli(&["--json", "image", "pull", text(&source), "disk@2"]).ok()).unwrap();
    assert_eq!((&report["versions"], &report["followed"]), (&1.into(), &0.into()), "{report}");
    assert_eq!(versions(&other), (vec![2], serde_json::json!(["maintenance"])));
    let said = other.cli(&["image", "pull", text(&source), "disk", "disk@1"]).ok();
    let moved = "boot version 3 from their next boot on; 'headwater image promote disk@2 production'";
    assert!(said.contains(moved), "{said}");
}

#[test]
fn what_cannot_be_pulled_is_told_with_its_reason() {
    let there = added_by_a_daemon(short_dir(), &[1]);
    let source = there.path().join("store");
    let daemon = Daemon::start();
    let pull = |source: &str, more: &[&str]| daemon.cli(&[&["image", "pull", source][..], more].concat());
    pull("/nowhere/store", &[]).fails(3, &["cannot pull from '/nowhere/store'", "no image store"]);
    pull("ftp://x", &[]).fails(2, &["ftp:// cannot be a store"]);
    pull("/proc/self/cwd", &[]).fails(2, &["/proc/self/cwd"]);
    pull(text(&source), &["disk@9"]).fails(3, &["disk"]);
    pull(text(&source), &["other"]).fails(3, &["there is no image 'other'"]);
    let own = daemon.path().join("store/../store");
    pull(text(&own), &[]).fails(2, &["cannot pull from", "the daemon's own store"]);
    // Both have made a version of their own under one number.
    import(&daemon, "disk", 7);
    let before = files(&daemon.path().join("store"), "objects");
    pull(text(&source), &[]).fails(4, &["disk@1 exists in both stores with different contents"]);
    assert!(files(&daemon.path().join("store"), "objects") == before);

    let server = FileServer::start(&source, None);
    let reader = Daemon::start_in(short_dir(), |command| {
        command.args(["--from", &server.url()]);
    });
    let read_only = "the store of this daemon is read-only";
    reader.cli(&["image", "pull", text(&source)]).fails(2, &[read_only]);
}

#[test]
fn what_another_store_has_lost_is_named_and_the_rest_is_brought() {
    let there = Daemon::start();
    import(&there, "disk", 1);
    import(&there, "lost", 2);
    let (_, there) = there.terminate();
    let source = there.path().join("store");
    let opened = LocalDir::open(&source, Access::Read).unwrap();
    let lost = opened.resolve(&"lost@1".parse().unwrap()).unwrap();
    std::fs::remove_file(source.join("objects").join(lost.objects[0].to_string())).unwrap();
    let daemon = Daemon::start();
    daemon.cli(&["image", "pull", text(&source)]).fails(6, &["not copied: lost@1"]);
    let ran = daemon.cli(&["--json", "image", "pull", text(&source)]);
    let report: Value = serde_json::from_str(&ran.out).unwrap_or_else(|e| panic!("{e}: {ran:?}"));
    assert_eq!((ran.code, &report["present"]), (6, &1.into()), "{ran:?}");
    assert_eq!(report["not_copied"][0]["kind"], "damaged", "{report}");
    assert!(daemon.cli(&["image", "verify", "disk@1"]).ok().contains("is intact"));
    assert!(!daemon.cli(&["image", "list"]).ok().contains("lost"));
}

fn begin_to_pull(daemon: &Daemon, args: &[&str]) -> Child {
    let mut command = headwater();
    command.arg("--data-dir").arg(daemon.path()).args(["image", "pull"]).args(args);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

/// Ends a pull that goes on, and waits until the daemon has.
fn end(daemon: &Daemon, mut pulling: Child) {
    assert!(pulling.try_wait().unwrap().is_none(), "it has ended by itself");
    // Not SIGINT, which programs ignore that were started in the background.
    support::signal(pulling.id(), "TERM");
    assert!(!pulling.wait().unwrap().success());
    wait_until("the daemon has ended it", || {
        let status = daemon.cli(&["--json", "status"]).ok();
        serde_json::from_str::<Value>(&status).unwrap()["tasks_running"] == 0
    });
}

#[test]
fn an_image_is_in_the_history_as_soon_as_it_is_done() {
    let there = Daemon::start();
    let raw = there.path().join("small.raw");
    std::fs::write(&raw, pseudo_random(64 << 10, 3)).unwrap();
    there.cli(&["image", "import", text(&raw), "--name", "apt"]).ok();
    import(&there, "disk", 1);
    let (_, there) = there.terminate();
    let server = FileServer::start(&there.path().join("store"), None);
    // In the middle of the data of the second one.
    server.fail(HttpFault::HangAfter(100_000));
    let daemon = Daemon::start();
    let pulled = |image: &str| daemon.cli(&["image", "history", image]).out.contains("pulled");
    let pulling = begin_to_pull(&daemon, &[&server.url(), "apt", "disk"]);
    wait_until("the first one is noted", || pulled("apt"));
    end(&daemon, pulling);
    assert!(!pulled("disk"));
}

/// A server that refuses everybody, and the heads of the requests to it.
fn refusing() -> (String, Arc<Mutex<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let heads = Arc::new(Mutex::new(String::new()));
    let kept = Arc::clone(&heads);
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let (mut stream, mut head) = (BufReader::new(stream), String::new());
            while stream.read_line(&mut head).is_ok_and(|read| read > 2) {}
            kept.lock().unwrap().push_str(&head);
            let refusal = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            // Who asked may be gone.
            let _ = stream.get_mut().write_all(refusal);
        }
    });
    (url, heads)
}

#[test]
fn the_token_of_the_daemon_goes_only_to_servers_that_were_named_when_it_was_started() {
    let dir = short_dir();
    let token = dir.path().join("token");
    std::fs::write(&token, "the-word-of-the-class").unwrap();
    let ((named, to_named), (other, to_other)) = (refusing(), refusing());
    let daemon = Daemon::start_in(short_dir(), |command| {
        command.args(["--token", text(&token), "--repair-from", &named]);
    });
    import(&daemon, "disk", 1);
    let refused = |args: &[&str], words: &[&str]| daemon.cli(args).fails(1, words);
    refused(&["image", "pull", &named], &["status 401"]);
    assert!(to_named.lock().unwrap().contains("Bearer the-word-of-the-class"));
    let advice = format!("start it with --repair-from {other}");
    refused(&["image", "pull", &other], &["status 401", &advice]);
    refused(&["image", "pull", &format!("{named},{other}")], &["status 401", &advice]);
    refused(&["image", "verify", "disk", "--repair-from", &other], &["status 401", &advice]);
    let heads = to_other.lock().unwrap();
    assert!(heads.starts_with("GET ") && !heads.contains("the-word-of-the-class"), "{heads}");
}

#[test]
fn a_pull_that_is_ended_leaves_nothing_half_and_can_be_given_again() {
    let there = added_by_a_daemon(short_dir(), &[1]);
    let server = FileServer::start(&there.path().join("store"), None);
    // In the middle of the data, so that a read waits.
    server.fail(HttpFault::HangAfter(100_000));
    let daemon = Daemon::start();
    let own = daemon.path().join("store");
    let pulling = begin_to_pull(&daemon, &[&server.url(), "disk@1"]);
    wait_until("the data is asked for", || server.object_requests() > 0);
    end(&daemon, pulling);
    for part in ["images", "manifests", "objects", "tmp"] {
        assert!(files(&own, part).is_empty(), "{part}");
    }
    server.fail(HttpFault::None);
    let said = daemon.cli(&["image", "pull", &server.url(), "disk@1"]).ok();
    assert!(said.contains("copied to the daemon's store"), "{said}");
    assert!(daemon.cli(&["image", "verify", "disk@1"]).ok().contains("is intact"));
    assert!(files(&own, "tmp").is_empty());
}
