//! `headwater backup` and `headwater restore`, with daemons that run, nodes, and files that are damaged.

use std::collections::BTreeSet;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};

use headwater_db::Database;
use headwater_db::sqlite::SqliteDatabase;
use headwater_testkit::wait_until;
use serde_json::Value;

use crate::nodes::Controller;
use crate::support::{Daemon, Ran, headwater, open_to_others, run, short_dir};

fn restore(file: &Path, into: &Path) -> Ran {
    run(headwater().arg("--data-dir").arg(into).arg("restore").arg(file))
}

fn json(daemon: &Daemon, args: &[&str]) -> Value {
    serde_json::from_str(&daemon.cli(&[&["--json"], args].concat()).ok()).unwrap()
}

/// The names of machines in a database, and those that its history knows.
fn machines_and_history(data_dir: &Path) -> (BTreeSet<String>, BTreeSet<String>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let database = SqliteDatabase::open(&data_dir.join("headwater.db")).await.unwrap();
        let mut repo = database.read().await.unwrap();
        let machines = repo.machines().list().await.unwrap();
        let mut known = BTreeSet::new();
        for event in repo.events().newer(None, 0, 10_000).await.unwrap() {
            let Some(name) = event.subject.strip_prefix("machine ") else { continue };
            match event.action.as_str() {
                "created" => assert!(known.insert(name.to_owned()), "{name} was created twice"),
                "removed" => assert!(known.remove(name), "{name} was not there"),
                _ => {}
            }
        }
        drop(repo);
        database.close().await;
        (machines.into_iter().map(|machine| machine.name).collect(), known)
    })
}

#[test]
fn a_backup_under_load_has_each_change_with_its_event() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("steady");
    let create = ["catalog", "create", "class", "tiny", "--memory", "64M", "--disk", "1G"];
    daemon.cli(&create).ok();
    let kept = short_dir();
    let is_over = AtomicBool::new(false);
    let changes = std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut changes = 0;
            while !is_over.load(Ordering::SeqCst) {
                daemon.cli(&["catalog", "scale", "class", "12"]).ok();
                daemon.cli(&["catalog", "scale", "class", "0"]).ok();
                changes += 24;
            }
            changes
        });
        for round in 0..4 {
            let file = kept.path().join(format!("{round}.backup"));
            daemon.cli(&["backup", file.to_str().unwrap()]).ok();
        }
        is_over.store(true, Ordering::SeqCst);
        load.join().unwrap()
    });
    assert!(changes > 0);
    for round in 0..4 {
        let into = kept.path().join(format!("{round}.data"));
        restore(&kept.path().join(format!("{round}.backup")), &into).ok();
        let (machines, known) = machines_and_history(&into);
        assert_eq!(machines, known);
        assert!(machines.contains("steady"));
    }
    // Nothing is left beside the backups.
    assert_eq!(std::fs::read_dir(kept.path()).unwrap().count(), 8);
    assert!(open_to_others(kept.path()).is_empty());
}

#[test]
fn a_restored_controller_has_all_and_lets_its_nodes_in() {
    let controller = Controller::start();
    let daemon = &controller.daemon;
    daemon.with_tiny_machine("here");
    daemon.create("kept", "tiny", &["--persistent"]);
    daemon.cli(&["machine", "start", "kept", "--wait"]).ok();
    daemon.cli(&["machine", "stop", "kept", "--force"]).ok();
    let create = ["catalog", "create", "class", "tiny", "--memory", "64M", "--disk", "1G", "--count", "3"];
    daemon.cli(&create).ok();
    daemon.cli(&["catalog", "set", "class", "tiny@1"]).ok();
    let token = daemon.cli(&["token", "create", "ci", "--role", "viewer"]).ok();
    let node = controller.node("b");
    daemon.create("there", "tiny", &["--host", "b"]);
    daemon.cli(&["machine", "start", "there", "--wait"]).ok();
    let pid = node.machine("there")["pid"].clone();

    let elsewhere = short_dir();
    let (file, store) = (elsewhere.path().join("fleet.backup"), elsewhere.path().join("store"));
    let said = daemon.cli(&["backup", file.to_str().unwrap()]);
    assert!(said.err.contains("store sync"), "{said:?}");
    assert!(said.ok().contains("the database"));
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    daemon.cli(&["backup", file.to_str().unwrap()]).fails(4, &["exists already", "choose another name"]);
    let from = daemon.path().join("store");
    run(headwater().args(["store", "sync"]).args([&from, &store])).ok();
    let seen = |daemon: &Daemon| {
        let machines = json(daemon, &["machine", "list"]);
        let of = |machine: &Value| {
            ["name", "uuid", "mac", "host", "catalog", "image", "cache"].map(|field| machine[field].clone())
        };
        let machines: Vec<_> = machines["machines"].as_array().unwrap().iter().map(of).collect();
        let tokens = json(daemon, &["token", "list"]);
        (machines, json(daemon, &["catalog", "list"]), tokens, json(daemon, &["image", "list"]))
    };
    let before = seen(daemon);
    let keys = |dir: &Path| {
        let keys = std::fs::read_dir(dir.join("keys")).unwrap().map(|key| key.unwrap().file_name());
        keys.collect::<BTreeSet<_>>()
    };
    let keys_before = keys(daemon.path());
    assert_eq!(keys_before.len(), 1);
    let flags = controller.flags.clone();
    let (_, old) = controller.daemon.terminate();
    // The node connects once more, of which the backup knows nothing.
    let controller = Controller::again(old, flags.clone());
    // The database says that the host is up also before that. Only the node says which process the machine has.
    wait_until("the node is connected again", || controller.daemon.machine("there")["pid"] == pid);
    let (_, old) = controller.daemon.terminate();

    // As on another host: nothing of the old directory is there.
    let dir = short_dir();
    let restored = restore(&file, dir.path());
    assert!(restored.err.contains("headwater node accept b"), "{restored:?}");
    assert!(restored.ok().contains("1 keys of persistent disks"));
    assert!(open_to_others(dir.path()).is_empty());
    assert_eq!(keys(dir.path()), keys_before);
    let identity = |dir: &Path| std::fs::read(dir.join("daemon.id")).unwrap();
    assert_eq!(identity(dir.path()), identity(old.path()));
    run(headwater().args(["store", "sync"]).arg(&store).arg(dir.path().join("store"))).ok();
    let controller = Controller::again(dir, flags);
    assert_eq!(seen(&controller.daemon), before);
    let history = controller.daemon.cli(&["events", "--subject", "daemon"]).ok();
    assert!(history.contains("restored") && history.contains("from the backup of"), "{history}");
    // The copy does not know the latest connection of the node; its machine went on meanwhile.
    node.wait_for_log(&["cannot connect to the controller", "node accept"]);
    controller.daemon.cli(&["node", "accept", "b"]).ok();
    controller.wait_for_host("b", "up");
    controller.daemon.wait_for("there", "running");
    assert_eq!(node.machine("there")["pid"], pid);
    controller.daemon.cli(&["machine", "start", "here", "--wait"]).ok();
    assert!(!token.is_empty());
}

#[test]
fn a_directory_that_is_in_use_or_not_empty_is_not_changed() {
    let daemon = Daemon::start();
    let elsewhere = short_dir();
    let file = elsewhere.path().join("a.backup");
    daemon.cli(&["backup", file.to_str().unwrap()]).ok();
    restore(&file, daemon.path()).fails(4, &["the directory is not empty", "stop its daemon"]);
    let full = short_dir();
    std::fs::write(full.path().join("precious"), "mine").unwrap();
    restore(&file, full.path()).fails(4, &["it has 'precious'"]);
    assert_eq!(std::fs::read_dir(full.path()).unwrap().count(), 1);
    // A store that is there already stays as it is.
    let with_store = short_dir();
    std::fs::create_dir(with_store.path().join("store")).unwrap();
    std::fs::write(with_store.path().join("store/x"), "x").unwrap();
    restore(&file, with_store.path()).ok();
    assert_eq!(std::fs::read(with_store.path().join("store/x")).unwrap(), b"x");
    // A restore that was interrupted is no data directory.
    let half = short_dir();
    std::fs::create_dir(half.path().join("restoring")).unwrap();
    restore(&file, half.path()).fails(4, &["an earlier restore was interrupted"]);
    let serve = run(headwater().args(["serve", "--data-dir"]).arg(half.path()));
    serve.fails(4, &["a restore of it did not end", "restore again"]);
}

#[test]
fn a_damaged_backup_leaves_nothing_behind() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("desk");
    let elsewhere = short_dir();
    let file = elsewhere.path().join("a.backup");
    daemon.cli(&["backup", file.to_str().unwrap()]).ok();
    let good = std::fs::read(&file).unwrap();
    let bad = elsewhere.path().join("b.backup");
    let into = elsewhere.path().join("data");
    let refused = |bytes: &[u8], code: i32, words: &[&str]| {
        std::fs::write(&bad, bytes).unwrap();
        restore(&bad, &into).fails(code, words);
        assert!(!into.exists(), "{words:?}");
    };
    // The last byte is of the database, the hundredth of the list of files.
    let changed = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        bytes
    };
    refused(
        &changed(good.len() - 1),
        6,
        &["the checksum of headwater.db does not match", "an earlier backup"],
    );
    refused(&changed(100), 6, &["the checksum of its list of files does not match"]);
    refused(&good[..good.len() - 1], 6, &["the checksum of headwater.db does not match"]);
    refused(&[&good[..], b"x"].concat(), 6, &["there is data after its last file"]);
    refused(b"a poem\nof two lines\n", 2, &["was not made by 'headwater backup'"]);
    refused(b"headwater backup 9\n", 6, &["has format 9"]);
    restore(&elsewhere.path().join("none"), &into).fails(3, &["none"]);
    // From a pipe, as from another host.
    let mut child = headwater()
        .arg("--data-dir")
        .arg(&into)
        .args(["--json", "restore", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&good).unwrap();
    let restored = Ran::from(child.wait_with_output().unwrap()).ok();
    let restored: Value = serde_json::from_str(&restored).unwrap();
    assert_eq!(restored["database_format"], 1);
    assert!(machines_and_history(&into).0.contains("desk"));
}

#[test]
fn what_cannot_be_backed_up_is_told_with_what_to_do() {
    let dir = short_dir();
    let file = dir.path().join("x.backup");
    let backup = |data: &Path, more: &[&str]| {
        run(headwater().arg("--data-dir").arg(data).arg("backup").arg(&file).args(more))
    };
    backup(&dir.path().join("nothing"), &[]).fails(3, &["headwater.db", "--data-dir"]);
    run(headwater().args(["--context", "lab", "backup", "x"])).fails(2, &["on the host of the daemon"]);
    // The database is elsewhere, and the rest is here.
    let data = dir.path().join("data");
    std::fs::create_dir_all(data.join("keys")).unwrap();
    for (name, text) in [
        ("database.place", "postgres://anna@db/hw"),
        ("daemon.id", "1"),
        ("keys/disk-1", "a key"),
        ("keys/disk-1.incomplete", ""),
    ] {
        std::fs::write(data.join(name), text).unwrap();
    }
    let dump = "pg_dump --format custom --file DUMP postgres://anna@db/hw";
    backup(&data, &[]).fails(2, &["it is in PostgreSQL", dump, "--without-database"]);
    assert!(!file.exists());
    backup(&data, &["--without-database"]).ok();
    let into = dir.path().join("into");
    let restored = restore(&file, &into);
    assert!(restored.err.contains("pg_restore"), "{restored:?}");
    restored.ok();
    assert_eq!(std::fs::read(into.join("keys/disk-1")).unwrap(), b"a key");
    // A write cache that is there may lack its last writes, and no other one does.
    assert!(!into.join("keys/disk-1.incomplete").exists());
    let kept = dir.path().join("kept");
    std::fs::create_dir_all(kept.join("cache/disk-1")).unwrap();
    restore(&file, &kept).ok();
    assert!(kept.join("keys/disk-1.incomplete").exists());
    let own = Daemon::start();
    let other = dir.path().join("y.backup");
    own.cli(&["backup", other.to_str().unwrap(), "--without-database"]).fails(2, &["leave it out"]);
    own.cli(&["backup", "/dev/null/x"]).fails(1, &["cannot write the backup /dev/null/x"]);
}

#[test]
fn root_restores_for_the_user_who_has_the_directory() {
    let daemon = Daemon::start();
    let dir = short_dir();
    let file = dir.path().join("a.backup");
    let settings = dir.path().join("settings.toml");
    std::fs::write(&settings, "resume = true\n").unwrap();
    daemon.cli(&["backup", file.to_str().unwrap(), "--config", settings.to_str().unwrap()]).ok();
    let into = short_dir();
    chown(into.path(), Some(1234), Some(1234)).unwrap();
    let restored = restore(&file, into.path());
    assert!(restored.err.contains("compare it with /etc/headwater/headwater.toml"), "{restored:?}");
    restored.ok();
    for name in ["headwater.db", "daemon.id", "headwater.toml"] {
        use std::os::unix::fs::MetadataExt;
        let found = into.path().join(name).metadata().unwrap();
        assert_eq!((found.uid(), found.mode() & 0o777), (1234, 0o600), "{name}");
    }
    assert_eq!(std::fs::read_to_string(into.path().join("headwater.toml")).unwrap(), "resume = true\n");
}

#[test]
fn a_copy_of_the_database_alone_reveals_no_secret() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("desk");
    let word = "the password of the desk";
    let user_data = daemon.path().join("user-data");
    std::fs::write(&user_data, format!("#!/bin/sh\n: {word}\n")).unwrap();
    daemon.create("other", "tiny", &["--user-data", user_data.to_str().unwrap()]);
    let (_, dir) = daemon.terminate();
    let database = std::fs::read(dir.path().join("headwater.db")).unwrap();
    let has = |text: &str| database.windows(text.len()).any(|part| part == text.as_bytes());
    assert!(has("ssh-ed25519") && !has(word) && !has("PRIVATE KEY"));

    let serve = || run(headwater().args(["serve", "--data-dir"]).arg(dir.path()));
    let (key, kept) = (dir.path().join("secrets.key"), dir.path().join("kept"));
    assert_eq!(key.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    std::fs::rename(&key, &kept).unwrap();
    serve()
        .fails(3, &["the secrets in the database are encrypted", "secrets.key is missing", "--secrets-key"]);
    assert!(!key.exists());
    std::fs::write(&key, "0".repeat(64)).unwrap();
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
    serve().fails(2, &["are encrypted with another key than that in", "restore that file"]);
    std::fs::rename(&kept, &key).unwrap();

    let former = std::fs::read(&key).unwrap();
    let rotate = || run(headwater().arg("--data-dir").arg(dir.path()).args(["secrets", "rotate-key"]));
    // The private keys of two machines, and user data.
    let rotated = rotate();
    assert!(rotated.err.contains("earlier backups need the earlier key"), "{rotated:?}");
    assert!(rotated.ok().contains("encrypted 3 secret(s) with a new key"));
    assert_ne!(std::fs::read(&key).unwrap(), former);
    let daemon = Daemon::start_in(dir, |_| {});
    daemon.cli(&["secrets", "rotate-key"]).fails(4, &["process"]);
    daemon.cli(&["machine", "start", "desk", "--wait"]).ok();
    daemon.cli(&["machine", "stop", "desk", "--force"]).ok();

    // A backup has the key, unless it is kept elsewhere.
    let elsewhere = short_dir();
    let (file, into) = (elsewhere.path().join("a.backup"), elsewhere.path().join("into"));
    daemon.cli(&["backup", file.to_str().unwrap()]).ok();
    restore(&file, &into).ok();
    let kept = std::fs::read(into.join("secrets.key")).unwrap();
    assert_eq!(kept, std::fs::read(daemon.path().join("secrets.key")).unwrap());
}
