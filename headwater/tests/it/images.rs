//! Images through the command line and the API: what goes in comes out, and what is no image leaves nothing.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use crate::support::{self, Daemon, begin, headwater, http, pseudo_random, run};
use headwater_block::VOLUME_MAX_BYTES;
use headwater_nbd::{Address, Limits, Server, SingleExport};
use headwater_testkit::pki::{Authority, CertificateOptions};
use headwater_testkit::{FileServer, HttpFault, ReferenceDisk, ReferenceOptions, Waits, wait_until};

fn qemu_img(args: &[&str]) {
    let status = Command::new("qemu-img").args(args).output();
    let output = status.expect("qemu-img is needed: apt-get install qemu-utils");
    assert!(output.status.success(), "{output:?}");
}

fn files_in(dir: &Path) -> usize {
    let count = |sub: &str| std::fs::read_dir(dir.join(sub)).map_or(0, Iterator::count);
    count("objects") + count("manifests") + count("images") + count("tmp")
}

#[test]
fn an_image_comes_out_as_it_went_in() {
    let daemon = Daemon::start();
    let dir = support::short_dir();
    let (raw, qcow2, out) =
        (dir.path().join("a.raw"), dir.path().join("b.qcow2"), dir.path().join("out.raw"));
    let mut disk = pseudo_random(3 << 20, 1);
    disk.extend(vec![0; 5 << 20]);
    disk.extend(pseudo_random(512, 2));
    std::fs::write(&raw, &disk).unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", &text(&raw), &text(&qcow2)]);

    assert!(daemon.cli(&["image", "import", &text(&raw), "--name", "disk"]).ok().contains("disk@1"));
    // The same bytes by another way are the same version.
    assert!(
        daemon
            .cli(&["image", "import", &text(&qcow2), "--name", "disk"])
            .ok()
            .contains("unchanged; it is disk@1")
    );
    // A note that came to nothing is not passed over.
    let noted = |source: &Path, note: &str| {
        daemon.cli(&["image", "import", &text(source), "--name", "noted", "--note", note])
    };
    assert!(!noted(&raw, "one").err.contains("its note stays"));
    let said = noted(&raw, "two").err;
    assert!(said.contains("noted@1 already has these bytes, and its note stays 'one'"), "{said}");
    assert!(said.contains("'headwater image note noted@1 TEXT' changes the note"), "{said}");
    assert!(!noted(&raw, "one").err.contains("its note stays"));
    daemon.cli(&["image", "note", "noted@1", "two"]).ok();
    assert!(!noted(&raw, "two").err.contains("its note stays"));
    assert!(daemon.cli(&["image", "verify", "disk"]).ok().contains("disk@1 is intact"));
    daemon.cli(&["image", "export", "disk@1", &text(&out)]).ok();
    assert!(std::fs::read(&out).unwrap() == disk, "the export differs");
    daemon.cli(&["image", "export", "disk", &text(&out)]).fails(4, &["a file of that name exists"]);
    for output in ["-", "/dev/stdout"] {
        daemon.cli(&["image", "export", "disk", output]).fails(2, &["the daemon writes", "name a new file"]);
    }

    let shown: serde_json::Value =
        serde_json::from_str(&daemon.cli(&["image", "show", "disk", "--json"]).ok()).unwrap();
    let hash = shown["versions"][0]["hash"].as_str().unwrap();
    assert_eq!(shown["versions"][0]["size_bytes"], disk.len());
    daemon.cli(&["image", "show", &format!("disk@{}", &hash[..12])]).ok();
    // What is there already takes nothing more.
    let list = daemon.cli(&["image", "list"]).ok();
    let noted = list.lines().find(|line| line.starts_with("noted ")).expect("it is listed");
    assert!(list.contains(" ADDED ") && noted.contains("8.0 MiB"), "{list}");
}

#[test]
fn a_disk_that_is_said_to_be_raw_is_not_looked_into() {
    let daemon = Daemon::start();
    let dir = support::short_dir();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (secret, trap, out) = (path("secret.raw"), path("trap.raw"), path("out.raw"));
    std::fs::write(&secret, pseudo_random(1 << 20, 1)).unwrap();
    qemu_img(&["create", "-f", "qcow2", "-F", "raw", "-b", &secret, &trap]);
    std::fs::File::options().write(true).open(&trap).unwrap().set_len(1 << 20).unwrap();
    daemon.cli(&["image", "import", &trap, "--format", "raw"]).ok();
    daemon.cli(&["image", "export", "trap", &out]).ok();
    assert!(std::fs::read(&out).unwrap() == std::fs::read(&trap).unwrap(), "it was read as something else");
    daemon.cli(&["image", "import", &trap, "--format", "vmdk"]).fails(2, &["as VMDK", "another format"]);
    let unknown = daemon.cli(&["image", "import", &trap, "--format", "vdi"]);
    assert!(unknown.code == 2 && unknown.err.contains("vhd (or vpc)"), "{unknown:?}");
    daemon.cli(&["image", "import", "nbd://127.0.0.1:1/x", "--format", "raw"]).fails(2, &["NBD server"]);
    let url = "https://127.0.0.1:1/disk.qcow2";
    daemon.cli(&["image", "import", url]).fails(2, &[url, "curl URL |", "image pull STORE"]);
    daemon.cli(&["image", "import", "s3://bucket/disk"]).fails(2, &["image pull STORE", "--from STORE"]);
}

#[test]
fn damage_is_named_and_has_its_own_exit_code() {
    let daemon = Daemon::start();
    let raw = daemon.path().join("d.raw");
    std::fs::write(&raw, pseudo_random(2 << 20, 3)).unwrap();
    daemon.cli(&["image", "import", raw.to_str().unwrap()]).ok();
    let objects = daemon.path().join("store/objects");
    let object = std::fs::read_dir(&objects).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&object).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    let mut permissions = std::fs::metadata(&object).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o600);
    std::fs::set_permissions(&object, permissions).unwrap();
    std::fs::write(&object, bytes).unwrap();
    let verified = daemon.cli(&["image", "verify", "d"]);
    assert_eq!(verified.code, 6, "{verified:?}");
    assert!(verified.out.contains("of the image") && verified.out.contains("damaged in"), "{verified:?}");
    let json = daemon.cli(&["--json", "image", "verify", "d"]);
    assert_eq!(json.code, 6);
    let report: serde_json::Value = serde_json::from_str(&json.out).unwrap();
    assert!(!report["damage"].as_array().unwrap().is_empty());
    // The good source makes a version that is sound, and says what is not.
    let again = daemon.cli(&["image", "import", raw.to_str().unwrap()]);
    assert_eq!(again.code, 0, "{again:?}");
    assert!(again.out.contains("imported as d@2"), "{again:?}");
    assert!(again.err.contains("1 chunks") && again.err.contains("store verify"), "{again:?}");
    let json = daemon.cli(&["image", "import", raw.to_str().unwrap(), "--json"]);
    assert!(json.code == 0 && json.err.is_empty(), "{json:?}");
    assert!(daemon.cli(&["image", "verify", "d@2"]).ok().contains("d@2 is intact"));
    assert_eq!(daemon.cli(&["image", "verify", "d@1"]).code, 6);
}

#[test]
fn damage_is_told_with_who_it_touches_and_repaired_from_another_store() {
    let daemon = Daemon::start();
    let raw = daemon.path().join("d.raw");
    let mut disk = pseudo_random(2 << 20, 3);
    let import = |disk: &[u8], name: &str| {
        std::fs::write(&raw, disk).unwrap();
        daemon.cli(&["image", "import", raw.to_str().unwrap(), "--name", name]).ok();
    };
    import(&disk, "d");
    let objects = daemon.path().join("store/objects");
    let object = std::fs::read_dir(&objects).unwrap().next().unwrap().unwrap().path();
    // Shares all but its end with the first; a third image shares nothing.
    disk[2 << 20 >> 1..].fill(7);
    import(&disk, "d");
    import(&pseudo_random(1 << 20, 9), "other");
    let copy = daemon.path().join("copy");
    let store = daemon.path().join("store");
    daemon.cli(&["store", "sync", store.to_str().unwrap(), copy.to_str().unwrap()]).ok();
    daemon.create("desk", "d@1", &[]);
    daemon.create("lab", "other", &[]);
    daemon.cli(&["catalog", "create", "class", "d", "--memory", "64M"]).ok();
    daemon.cli(&["image", "pin", "class", "d@2"]).ok();

    let good = std::fs::read(&object).unwrap();
    let mut bytes = good.clone();
    bytes[1000] ^= 1;
    let mut permissions = std::fs::metadata(&object).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o600);
    std::fs::set_permissions(&object, permissions).unwrap();
    std::fs::write(&object, bytes).unwrap();
    let verified = daemon.cli(&["--json", "image", "verify", "d@1"]);
    assert_eq!(verified.code, 6, "{verified:?}");
    let report: serde_json::Value = serde_json::from_str(&verified.out).unwrap();
    assert_eq!(report["versions"], serde_json::json!(["d@1", "d@2"]));
    let uses = report["uses"].to_string();
    for (who, told) in [
        ("d@1: machine 'desk' boots it", true),
        ("d@2: catalog 'class' is pinned to it", true),
        ("lab", false),
    ] {
        assert_eq!(uses.contains(who), told, "{who}: {uses}");
    }
    let text = daemon.cli(&["image", "verify", "d@1"]);
    assert!(text.out.contains("affected: d@1: machine 'desk'"), "{text:?}");
    assert!(text.out.contains("d@2 contains some of the damaged data, too"), "{text:?}");

    // A store that is not there is told before anything is read; one that has it repairs.
    daemon
        .cli(&["image", "verify", "d@1", "--repair-from", "ftp://x"])
        .fails(2, &["ftp:// cannot be a store"]);
    let repaired = daemon.cli(&["image", "verify", "d@1", "--repair-from", copy.to_str().unwrap()]).ok();
    assert!(
        repaired.contains("1 damaged chunks or data objects repaired") && repaired.contains("d@1 is intact"),
        "{repaired}"
    );
    assert!(std::fs::read(&object).unwrap() == good);
    assert!(daemon.cli(&["image", "verify", "d@2"]).ok().contains("d@2 is intact"));
}

/// Imports a file system and has some of the bytes of its one file go wrong in the store.
fn damage_a_file_of_ext4(daemon: &Daemon, name: &str) {
    let (tree, disk) = (daemon.path().join("tree"), daemon.path().join("ext4.raw"));
    std::fs::create_dir_all(tree.join("etc")).unwrap();
    std::fs::write(tree.join("etc/large.conf"), pseudo_random(2 << 20, 6)).unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut mke2fs = Command::new("mke2fs");
    mke2fs.env("PATH", format!("{path}:/usr/sbin:/sbin")).args(["-q", "-t", "ext4", "-d"]);
    run(mke2fs.arg(&tree).arg(&disk).arg("16M")).ok();
    daemon.cli(&["image", "import", disk.to_str().unwrap(), "--name", name]).ok();
    let store = daemon.path().join("store");
    let open = headwater_store::LocalDir::open(&store, headwater_store::Access::Read).unwrap();
    let version = headwater_store::Store::resolve(&open, &name.parse().unwrap()).unwrap();
    let object = store.join("objects").join(version.objects[0].to_string());
    let mut bytes = std::fs::read(&object).unwrap();
    // The file's contents cannot be packed, and are most of what there is.
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&object, bytes).unwrap();
}

#[test]
fn damage_that_cannot_be_repaired_is_told_with_who_it_touches_by_verify_and_by_the_scrub() {
    let daemon = Daemon::start();
    let raw = daemon.path().join("d.raw");
    for (name, seed) in [("chunk", 3), ("manifest", 4), ("sound", 5)] {
        std::fs::write(&raw, pseudo_random(1 << 20, seed)).unwrap();
        daemon.cli(&["image", "import", raw.to_str().unwrap(), "--name", name]).ok();
        daemon.create(&format!("m-{name}"), name, &[]);
        daemon.cli(&["catalog", "create", &format!("c-{name}"), name, "--memory", "64M"]).ok();
    }
    damage_a_file_of_ext4(&daemon, "files");
    // A second image with the same bytes is damaged with it.
    std::fs::write(&raw, pseudo_random(1 << 20, 4)).unwrap();
    daemon.cli(&["image", "import", raw.to_str().unwrap(), "--name", "twin"]).ok();
    let shown = |image: &str| {
        let shown = daemon.cli(&["--json", "image", "show", image]).ok();
        serde_json::from_str::<serde_json::Value>(&shown).unwrap()["versions"][0].clone()
    };
    let store = daemon.path().join("store");
    let manifest = store.join("manifests").join(shown("manifest")["hash"].as_str().unwrap());
    let mut bytes = std::fs::read(&manifest).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&manifest, bytes).unwrap();
    // Of the objects that are not needed by others the one of this image.
    let chunk = headwater_store::LocalDir::open(&store, headwater_store::Access::Read).unwrap();
    let chunk = headwater_store::Store::resolve(&chunk, &"chunk@1".parse().unwrap()).unwrap();
    let object = store.join("objects").join(chunk.objects[0].to_string());
    let mut bytes = std::fs::read(&object).unwrap();
    bytes[1000] ^= 1;
    std::fs::remove_file(&object).unwrap();
    std::fs::write(&object, bytes).unwrap();

    let verified = daemon.cli(&["--json", "image", "verify", "manifest"]);
    assert_eq!(verified.code, 6, "{verified:?}");
    let report: serde_json::Value = serde_json::from_str(&verified.out).unwrap();
    assert_eq!(report["versions"], serde_json::json!(["manifest@1", "twin@1"]));
    assert!(report["damage"][0].as_str().unwrap().contains("the manifest"), "{report}");
    let uses = report["uses"].to_string();
    assert!(uses.contains("machine 'm-manifest'") && uses.contains("catalog 'c-manifest'"), "{uses}");
    let files = daemon.cli(&["image", "verify", "files"]);
    assert_eq!(files.code, 6, "{files:?}");
    assert!(
        files.out.contains("files@1: a file cannot be read: the whole disk: /etc/large.conf"),
        "{files:?}"
    );
    let text = daemon.cli(&["image", "verify", "manifest"]).out;
    for says in
        ["manifest@1: the manifest", "affected: manifest@1: machine 'm-manifest'", "twin@1 contains some"]
    {
        assert!(text.contains(says), "no '{says}' in {text}");
    }

    let (_, dir) = daemon.terminate();
    let log = dir.path().join("scrub.log");
    let mut scrubbing = support::headwater();
    scrubbing.args(["serve", "--scrub", "1G", "--data-dir"]).arg(dir.path());
    let mut scrubbing = scrubbing.stderr(std::fs::File::create(&log).unwrap()).spawn().unwrap();
    let logged = || std::fs::read_to_string(&log).unwrap();
    wait_until("a round is over", || logged().contains("the scrub read all versions once"));
    let status = run(headwater().arg("--data-dir").arg(dir.path()).args(["--json", "status"])).ok();
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let alarms = status["alarms"].as_array().unwrap();
    assert_eq!(alarms.len(), 4, "{status}");
    for (version, says) in [
        ("chunk@1", "1 chunk of the version is damaged; it affects chunk@1: machine 'm-chunk' boots it"),
        ("manifest@1", "the version is damaged: the manifest"),
        ("twin@1", "it affects manifest@1: machine 'm-manifest' boots it"),
        ("files@1", "cannot be read because of that: the whole disk: /etc/large.conf"),
    ] {
        let of_it = |alarm: &&serde_json::Value| alarm["subject"] == format!("image {version}");
        let message = alarms.iter().find(of_it).and_then(|alarm| alarm["message"].as_str());
        assert!(message.is_some_and(|message| message.contains(says)), "{version}: {status}");
    }
    support::signal(scrubbing.id(), "TERM");
    scrubbing.wait().unwrap();
    let logged = logged();
    for says in [
        "damaged: the manifest",
        "affected by the damage: manifest@1: machine 'm-manifest'",
        "affected by the damage: manifest@1: catalog 'c-manifest'",
        "damaged: bytes ",
        "affected by the damage: chunk@1: machine 'm-chunk'",
        "affected by the damage: chunk@1: catalog 'c-chunk'",
        "a file cannot be read because of the damage: the whole disk: /etc/large.conf",
    ] {
        assert!(logged.contains(says), "no '{says}' in {logged}");
    }
    assert!(!logged.contains("m-sound"), "{logged}");

    // The history has what was found wrong, once for each contents.
    let daemon = Daemon::start_in(dir, |_| {});
    let events: serde_json::Value = serde_json::from_str(&daemon.cli(&["events", "--json"]).ok()).unwrap();
    let all = events["events"].as_array().unwrap().iter();
    let found: Vec<&serde_json::Value> = all.filter(|event| event["action"] == "damaged").collect();
    let of = |image: &str| {
        let mut of = found.iter().filter(|event| event["subject"] == format!("image {image}"));
        of.next().map(|event| event["detail"].as_str().unwrap().to_owned()).unwrap_or_default()
    };
    assert_eq!(found.len(), 3, "{events}");
    assert!(of("manifest").starts_with("manifest@1, twin@1: the manifest"), "{events}");
    assert!(
        of("chunk").starts_with("chunk@1: bytes ") && of("files").starts_with("files@1: bytes "),
        "{events}"
    );
    for image in ["chunk", "manifest"] {
        let touched = format!("; it affects {image}@1: machine 'm-{image}' boots it");
        assert!(of(image).contains(&touched), "{events}");
    }
}

#[test]
fn a_verification_reads_at_its_rate_and_names_the_damaged_file() {
    let daemon = Daemon::start();
    damage_a_file_of_ext4(&daemon, "files");
    // So slowly that there are lines of progress.
    let request = Some(r#"{"rate_bytes_s":524288}"#);
    let (status, lines) = support::http(&daemon.socket(), "POST", "/api/v1/images/files/verify", request);
    assert_eq!(status, 200, "{lines}");
    let lines: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let progress = lines.iter().filter(|line| line["event"] == "progress");
    let done: Vec<u64> = progress.map(|line| line["done_bytes"].as_u64().unwrap()).collect();
    assert!(done.len() > 3 && done.is_sorted() && done.last() > Some(&0), "{lines:?}");
    let report = &lines.last().unwrap()["result"];
    assert_eq!(report["files"], serde_json::json!(["the whole disk: /etc/large.conf"]));
    assert_eq!(report["remarks"], serde_json::json!([]));
    let text = daemon.cli(&["image", "verify", "files"]);
    assert!(text.out.contains("files@1 is damaged in 1 chunk; "), "{text:?}");
}

#[test]
fn what_is_no_image_is_refused_and_leaves_nothing() {
    let daemon = Daemon::start();
    let dir = support::short_dir();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let store = daemon.path().join("store");
    let before = files_in(&store);
    let refused = |name: &str, code: i32, words: &[&str]| {
        let file = path(name);
        let mut words = words.to_vec();
        words.extend(["cannot import", &file]);
        daemon.cli(&["image", "import", &file, "--name", "x"]).fails(code, &words);
        assert_eq!(files_in(&store), before, "{name} left something");
    };
    refused("missing.raw", 3, &[]);
    std::fs::write(path("odd.raw"), [1; 1000]).unwrap();
    refused("odd.raw", 2, &["512"]);
    std::fs::write(path("empty.raw"), []).unwrap();
    refused("empty.raw", 2, &["empty"]);
    qemu_img(&["create", "-q", "-f", "qcow2", &path("large.qcow2"), "20T"]);
    refused("large.qcow2", 2, &["a machine's disk can have at most 17592186036224", "16 TiB"]);
    std::fs::create_dir(path("dir")).unwrap();
    refused("dir", 2, &["directory"]);

    std::fs::write(path("data.raw"), pseudo_random(1 << 20, 4)).unwrap();
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", &path("data.raw"), &path("cut.qcow2")]);
    let whole = std::fs::read(path("cut.qcow2")).unwrap();
    std::fs::write(path("cut.qcow2"), &whole[..whole.len() / 2]).unwrap();
    refused("cut.qcow2", 6, &[]);
    std::fs::write(path("head.qcow2"), &whole[..50]).unwrap();
    refused("head.qcow2", 6, &[]);

    qemu_img(&["create", "-q", "-f", "qcow2", &path("base.qcow2"), "1M"]);
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        &path("base.qcow2"),
        "-F",
        "qcow2",
        &path("child.qcow2"),
    ]);
    std::fs::remove_file(path("base.qcow2")).unwrap();
    let child = path("child.qcow2");
    let ran = daemon.cli(&["image", "import", &child, "--name", "x"]);
    assert!(ran.code != 0 && ran.err.contains("base.qcow2"), "{ran:?}");
    assert_eq!(files_in(&store), before);
    let secret = "--object=secret,id=s,data=abc";
    let aes = path("aes.qcow2");
    qemu_img(&[
        "create",
        "-q",
        secret,
        "-f",
        "qcow2",
        "-o",
        "encrypt.format=aes,encrypt.key-secret=s",
        &aes,
        "1M",
    ]);
    refused("aes.qcow2", 6, &["ncrypt"]);
    assert!(daemon.cli(&["image", "list", "--json"]).ok().contains("\"images\": []"));
}

#[test]
fn an_import_into_a_full_disk_fails_as_such_and_leaves_nothing() {
    let daemon = Daemon::start_on_full_disk(4 << 20);
    let dir = support::short_dir();
    let raw = dir.path().join("large.raw");
    std::fs::write(&raw, pseudo_random(16 << 20, 8)).unwrap();
    let store = daemon.path().join("store");
    let before = files_in(&store);
    daemon.cli(&["image", "import", raw.to_str().unwrap()]).fails(5, &["cannot import"]);
    assert_eq!(files_in(&store), before);
    // Room for something smaller is there, and the daemon goes on.
    std::fs::write(&raw, pseudo_random(1 << 20, 9)).unwrap();
    daemon.cli(&["image", "import", raw.to_str().unwrap()]).ok();
}

#[test]
fn an_import_goes_on_without_its_client_and_leaves_nothing_if_it_is_cancelled() {
    let daemon = Daemon::start();
    let raw = daemon.path().join("big.raw");
    std::fs::write(&raw, pseudo_random(512 << 20, 5)).unwrap();
    let store = daemon.path().join("store");
    let before = files_in(&store);
    let body = format!(r#"{{"name":"big","source":"{}"}}"#, raw.display());
    let (connection, first) = begin(&daemon.socket(), "POST", "/api/v1/images", &body);
    assert!(first.contains("200 OK") && first.contains("application/x-ndjson"), "{first}");
    drop(connection);
    let tasks =
        || serde_json::from_str::<serde_json::Value>(&daemon.cli(&["task", "list", "--json"]).ok()).unwrap();
    let task = tasks()["tasks"][0].clone();
    assert_eq!(
        (&task["kind"], &task["subject"], &task["state"]),
        (&"import".into(), &"image big".into(), &"running".into())
    );
    let id = task["id"].to_string();
    assert!(daemon.cli(&["task", "cancel", &id]).ok().contains(&format!("task {id} is cancelled")));
    assert_eq!(files_in(&store), before);
    assert!(daemon.cli(&["image", "list", "--json"]).ok().contains("\"images\": []"));

    // One whose command is interrupted is cancelled, too. One whose command is killed goes on.
    let import = |signal: &str| {
        let mut command = headwater();
        command.arg("--data-dir").arg(daemon.path()).args(["image", "import", raw.to_str().unwrap()]);
        let mut child = command.stderr(std::process::Stdio::null()).spawn().unwrap();
        wait_until("the import runs", || {
            let newest = tasks()["tasks"][0].clone();
            newest["state"] == "running" && newest["progress"]["done_bytes"].as_u64() > Some(0)
        });
        support::signal(child.id(), signal);
        child.wait().unwrap()
    };
    assert_eq!(import("INT").code(), Some(130));
    wait_until("it is cancelled", || tasks()["tasks"][0]["state"] == "cancelled");
    assert_eq!(files_in(&store), before);
    import("KILL");
    daemon.cli(&["task", "wait", &tasks()["tasks"][0]["id"].to_string()]).ok();
    assert!(daemon.cli(&["image", "list"]).ok().contains("big"));
}

#[test]
fn a_daemon_that_ends_cancels_the_import_and_nothing_is_left() {
    let daemon = Daemon::start();
    let raw = daemon.path().join("big.raw");
    std::fs::write(&raw, pseudo_random(512 << 20, 6)).unwrap();
    let before = files_in(&daemon.path().join("store"));
    let body = format!(r#"{{"name":"big","source":"{}"}}"#, raw.display());
    let (mut connection, mut answer) = begin(&daemon.socket(), "POST", "/api/v1/images", &body);
    let (code, dir) = daemon.terminate();
    assert_eq!(code, Some(0));
    // The request in flight was answered all the same.
    std::io::Read::read_to_string(&mut connection, &mut answer).unwrap();
    assert!(answer.contains("\"failed\"") && answer.contains("\"cancelled\""), "{answer}");
    assert_eq!(files_in(&dir.path().join("store")), before);
}

#[test]
fn an_nbd_export_is_imported_like_a_file() {
    let daemon = Daemon::start();
    let dir = support::short_dir();
    let (raw, socket) = (dir.path().join("n.raw"), dir.path().join("n.sock"));
    std::fs::write(&raw, pseudo_random(1 << 20, 7)).unwrap();
    let mut server = Command::new("qemu-nbd")
        .args(["-r", "-f", "raw", "-k"])
        .args([&socket, &raw])
        .spawn()
        .expect("qemu-nbd is needed: apt-get install qemu-utils");
    wait_until("qemu-nbd listens", || socket.exists());
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    // The daemon has another working directory.
    let mut command = headwater();
    command.current_dir(dir.path()).arg("--data-dir").arg(daemon.path());
    run(command.args(["image", "import", "nbd+unix:///?socket=n.sock", "--name", "n"])).ok();
    // It ends with its last client.
    server.wait().unwrap();
    let again = daemon.cli(&["image", "import", raw.to_str().unwrap(), "--name", "n"]).ok();
    assert!(again.contains("unchanged; it is n@1"), "{again}");
    daemon.cli(&["image", "import", &uri, "--name", "n"]).fails(1, &["cannot import", "NBD"]);
    for (path, body) in [
        ("images", r#"{"name":"n","source":"rel.raw"}"#),
        // Begins as a URI does, and is a file.
        ("images", r#"{"name":"n","source":"nbd-disk.img"}"#),
        ("images/n/verify", r#"{"repair_from":["copy"]}"#),
    ] {
        let (status, answer) = http(&daemon.socket(), "POST", &format!("/api/v1/{path}"), Some(body));
        assert!(status == 400 && answer.contains("absolute path"), "{status}: {answer}");
    }
    for (refused, told) in [
        ("nbd+unix:///?socket=n.sock", "not an absolute path"),
        ("nbds://127.0.0.1:1/?tls-certificates=pki", "not an absolute path"),
        ("nbd+vsock://2:10809/n", "vsock is not supported"),
        ("nbds+vsock://2:10809/n", "vsock is not supported"),
    ] {
        let request = format!(r#"{{"name":"n","source":"{refused}"}}"#);
        let (_, answer) = http(&daemon.socket(), "POST", "/api/v1/images", Some(&request));
        assert!(answer.contains(told), "{answer}");
    }
}

#[test]
fn an_nbd_export_is_imported_over_tcp_with_and_without_tls() {
    let daemon = Daemon::start();
    let dir = support::short_dir();
    let raw = dir.path().join("t.raw");
    std::fs::write(&raw, pseudo_random(1 << 20, 8)).unwrap();
    daemon.cli(&["image", "import", raw.to_str().unwrap(), "--name", "t"]).ok();
    let authority = Authority::new("here");
    let good = CertificateOptions { is_expired: false, serial: 0 };
    let roles = [("server", "localhost", good), ("client", "desk", good)];
    let pki = authority.write_certificates(&dir.path().join("pki"), &roles);
    let stranger = Authority::new("elsewhere").write_certificates(&dir.path().join("stranger"), &roles);
    for tls in [false, true] {
        let mut command = headwater();
        command.args(["export", "--cache", "ram", "--nbd", "tcp:localhost:0"]).arg(&raw);
        if tls {
            command.args(["--tls-verify-peer", "--tls-certificates"]).arg(&pki);
        }
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        let mut server = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut uri = String::new();
        BufReader::new(server.stdout.take().unwrap()).read_line(&mut uri).unwrap();
        let uri = uri.trim();
        assert!(uri.starts_with(if tls { "nbds://" } else { "nbd://" }), "{uri}");
        let import = |uri: &str| daemon.cli(&["image", "import", uri, "--name", "t"]);
        let with = |files: &Path| format!("{uri}?tls-certificates={}", files.display());
        let said = import(&if tls { with(&pki) } else { uri.to_owned() }).ok();
        // The same bytes as those of the file.
        assert!(said.contains("unchanged; it is t@1"), "{said}");
        if tls {
            import(&with(&stranger)).fails(1, &["cannot import", "certificate"]);
            import(&uri.replace("nbds://", "nbd://")).fails(1, &["cannot import", "TLS"]);
        }
        support::signal(server.id(), "TERM");
        server.wait().unwrap();
    }
    let help = run(headwater().args(["image", "import", "--help"])).ok();
    assert!(help.contains("nbds://HOST[:PORT]/NAME[?tls-certificates=DIR]"), "{help}");
}

#[test]
fn a_long_verification_says_how_far_it_is_and_how_fast() {
    let writer = Daemon::start();
    let raw = writer.path().join("v.raw");
    std::fs::write(&raw, pseudo_random(48 << 20, 9)).unwrap();
    writer.cli(&["image", "import", raw.to_str().unwrap(), "--name", "v"]).ok();
    let (_, dir) = writer.terminate();
    let server = FileServer::start(&dir.path().join("store"), None);
    let daemon = Daemon::start_in(support::short_dir(), |command| {
        command.args(["--from", &server.url()]);
    });
    // Each answer comes late, so that there is time for a line.
    server.fail(HttpFault::Delay(std::time::Duration::from_secs(2)));
    let said = daemon.path().join("said");
    let mut command = headwater();
    command.arg("--data-dir").arg(daemon.path()).args(["image", "verify", "v"]);
    let mut verifying =
        command.stdout(Stdio::null()).stderr(std::fs::File::create(&said).unwrap()).spawn().unwrap();
    let lines = || std::fs::read_to_string(&said).unwrap();
    wait_until("a line with a rate, or the end", || {
        lines().contains("/s") || verifying.try_wait().unwrap().is_some()
    });
    server.fail(HttpFault::None);
    assert_eq!(verifying.wait().unwrap().code(), Some(0), "{}", lines());
    let line = lines();
    assert!(line.contains("verify v: ") && line.contains(" of 48.0 MiB") && line.contains("B/s"), "{line}");
}

#[test]
fn a_verification_at_a_rate_leaves_the_disk_to_others_and_ends_when_told() {
    let daemon = Daemon::start();
    let (raw, said) = (daemon.path().join("v.raw"), daemon.path().join("said"));
    std::fs::write(&raw, pseudo_random(4 << 20, 9)).unwrap();
    daemon.cli(&["image", "import", raw.to_str().unwrap(), "--name", "v"]).ok();
    let mut command = headwater();
    // An hour and more.
    command.arg("--data-dir").arg(daemon.path()).args(["image", "verify", "v", "--rate", "1K"]);
    let mut verifying =
        command.stdout(Stdio::null()).stderr(std::fs::File::create(&said).unwrap()).spawn().unwrap();
    let lines = || std::fs::read_to_string(&said).unwrap();
    let mut ended = None;
    wait_until("a line, or the end", || {
        ended = verifying.try_wait().unwrap();
        ended.is_some() || lines().contains("verify v: ")
    });
    assert!(ended.is_none(), "it is over: {}", lines());
    // Not SIGINT, which programs ignore that were started in the background.
    support::signal(verifying.id(), "TERM");
    assert!(!verifying.wait().unwrap().success(), "{}", lines());
    assert!(daemon.cli(&["image", "verify", "v", "--rate", "1G"]).ok().contains("v@1 is intact"));
    let refused = daemon.cli(&["image", "verify", "v", "--rate", "0"]);
    assert!(refused.code == 2 && refused.err.contains("would read nothing"), "{refused:?}");
    let (status, answer) =
        support::http(&daemon.socket(), "POST", "/api/v1/images/v/verify", Some("{\"rate_bytes_s\": 0}"));
    assert!(status == 400 && answer.contains("at a rate of 0 bytes a second"), "{status} {answer}");
}

#[test]
fn an_import_from_a_server_that_hangs_ends_when_it_is_cancelled() {
    let daemon = Daemon::start();
    let options = ReferenceOptions { waits: Waits::Always, ..Default::default() };
    let disk = Arc::new(ReferenceDisk::with_contents(vec![0; 8 << 20], options));
    disk.hold();
    let address = Address::Unix(daemon.path().join("nbd.sock"));
    let server = Server::bind(address, SingleExport::new(disk.clone(), ""), Limits::default()).unwrap();
    let mut import = support::headwater()
        .arg("--data-dir")
        .arg(daemon.path())
        .args(["image", "import", &server.uri(), "--name", "n"])
        .spawn()
        .unwrap();
    wait_until("the server is asked", || disk.waiting() > 0);
    let works = || {
        let threads = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
        let names =
            threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
        names.into_iter().any(|name| name.starts_with("import-"))
    };
    assert!(works());
    support::signal(import.id(), "INT");
    assert_eq!(import.wait().unwrap().code(), Some(130));
    wait_until("the import has ended", || !works());
    // Whoever has started its threads cleans up.
    let tmp = daemon.path().join("store/tmp");
    wait_until("nothing of it is left", || std::fs::read_dir(&tmp).unwrap().count() == 0);
    // Every reply can be given now, to nobody.
    disk.release();
}

#[test]
fn an_export_to_other_formats_is_what_qemu_reads_as_the_disk() {
    let daemon = Daemon::start();
    let dir = support::short_dir();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let mut disk = pseudo_random(3 << 20, 1);
    disk.extend(vec![0; 5 << 20]);
    disk.extend(pseudo_random(1 << 20, 2));
    std::fs::write(path("a.raw"), &disk).unwrap();
    daemon.cli(&["image", "import", &path("a.raw"), "--name", "disk"]).ok();
    for (format, driver) in [("qcow2", "qcow2"), ("vhd", "vpc"), ("vhdx", "vhdx"), ("vmdk", "vmdk")] {
        let out = path(&format!("out.{format}"));
        let said = daemon.cli(&["image", "export", "disk", &out]).ok();
        assert!(said.contains(&format!("disk@1 written to {out} as {format}, ")), "{said}");
        qemu_img(&["compare", "-f", "raw", "-F", driver, &path("a.raw"), &out]);
        // And in again: the same content is the same version.
        let again = daemon.cli(&["image", "import", &out, "--name", "disk"]).ok();
        assert!(again.contains("unchanged; it is disk@1"), "{format}: {again}");
    }
    // The form that Azure needs is not the one that the name says.
    let fixed = path("fixed.vhd");
    let said = daemon.cli(&["image", "export", "disk", &fixed, "--format", "vhd-fixed"]).ok();
    assert!(said.contains(&format!("disk@1 written to {fixed} as vhd-fixed, ")), "{said}");
    assert_eq!(std::fs::metadata(&fixed).unwrap().len(), (9 << 20) + 512);
    qemu_img(&["compare", "-f", "raw", "-F", "vpc", &path("a.raw"), &fixed]);
    std::fs::remove_file(fixed).unwrap();
    // What is said counts more than the name.
    let odd = path("odd.qcow2");
    assert!(daemon.cli(&["image", "export", "disk", &odd, "--format", "raw"]).ok().contains("as raw, "));
    assert!(std::fs::read(&odd).unwrap() == disk);
    let left: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 6, "{left:?}");
    // Nobody would take that for a raw disk.
    daemon
        .cli(&["image", "export", "disk", &path("a.vdi")])
        .fails(2, &["a.vdi", "vhd, vhd-fixed, vhdx and vmdk", "--format"]);
    daemon.cli(&["image", "export", "disk", &path("a.VDI"), "--format", "raw"]).ok();
    assert_eq!(std::fs::read_dir(daemon.path().join("store/tmp")).unwrap().count(), 0);
    daemon
        .cli(&["image", "export", "disk", &path("nowhere/x"), "--format", "vhdx"])
        .fails(3, &["nowhere", "No such file"]);
}

/// A daemon for which a script stands in for qemu-img, which it finds in the rest of its `PATH`.
fn with_stand_in(tools: &Path, script: &str, change: impl FnOnce(&mut std::process::Command)) -> Daemon {
    let stand_in = tools.join("qemu-img");
    std::fs::write(&stand_in, format!("#!/bin/sh\n{script}PATH=${{PATH#*:}}\nexec qemu-img \"$@\"\n"))
        .unwrap();
    std::fs::set_permissions(&stand_in, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", tools.display(), std::env::var("PATH").unwrap());
    Daemon::start_in(support::short_dir(), |command| change(command.env("PATH", path)))
}

#[test]
fn qemu_img_gets_no_secrets_and_writes_where_no_link_leads_it() {
    let (tools, dir) = (support::short_dir(), support::short_dir());
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let told = tools.path().join("told");
    // What others do who can write to the directory.
    let script = format!(
        "env > {}\ncd {}\nfor name in .*.partial; do rm \"$name\"; ln -s precious \"$name\"; done\n",
        told.display(),
        dir.path().display()
    );
    let daemon = with_stand_in(tools.path(), &script, |command| {
        command.env("AWS_SECRET_ACCESS_KEY", "for the bucket alone");
    });
    std::fs::write(path("d.raw"), pseudo_random(1 << 20, 3)).unwrap();
    std::fs::write(path("precious"), "mine").unwrap();
    daemon.cli(&["image", "import", &path("d.raw")]).ok();
    let _ = daemon.cli(&["image", "export", "d", &path("out.vhdx"), "--format", "vhdx"]);
    assert_eq!(std::fs::read(path("precious")).unwrap(), b"mine");
    let told = std::fs::read_to_string(told).unwrap();
    assert!(told.contains("PATH=") && !told.contains("for the bucket"), "{told}");
    assert!(!told.lines().any(|line| line.starts_with("HEADWATER_")), "{told}");
}

#[test]
fn two_exports_to_one_name_do_not_mix() {
    let tools = support::short_dir();
    // Neither writes before the other is there.
    let script = format!(
        "printf x >> {0}/ready\nn=0\nwhile [ $(wc -c < {0}/ready) -lt 2 ] && [ $n -lt 600 ]; do sleep 0.1; n=$((n + 1)); done\n",
        tools.path().display()
    );
    let daemon = with_stand_in(tools.path(), &script, |_| {});
    let dir = support::short_dir();
    let (raw, out) = (dir.path().join("d.raw"), dir.path().join("out.vhdx"));
    std::fs::write(&raw, pseudo_random(8 << 20, 3)).unwrap();
    daemon.cli(&["image", "import", raw.to_str().unwrap()]).ok();
    let export = || daemon.cli(&["image", "export", "d", out.to_str().unwrap(), "--format", "vhdx"]);
    let (one, other) = std::thread::scope(|scope| {
        let other = scope.spawn(export);
        (export(), other.join().unwrap())
    });
    let (ready, late) = if one.code == 0 { (one, other) } else { (other, one) };
    ready.ok();
    late.fails(4, &["another export"]);
    qemu_img(&["compare", "-f", "raw", "-F", "vhdx", raw.to_str().unwrap(), out.to_str().unwrap()]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn only_formats_that_need_qemu_img_are_refused_where_there_is_none() {
    let empty = support::short_dir();
    let daemon = Daemon::start_in(support::short_dir(), |command| {
        command.env("PATH", empty.path());
    });
    let raw = daemon.path().join("d.raw");
    std::fs::write(&raw, pseudo_random(1 << 20, 3)).unwrap();
    daemon.cli(&["image", "import", raw.to_str().unwrap()]).ok();
    let out = daemon.path().join("out.vhdx");
    let ran = daemon.cli(&["image", "export", "d", out.to_str().unwrap(), "--format", "vhdx"]);
    ran.fails(1, &["qemu-img", "not installed", "apt-get install qemu-utils", "qcow2"]);
    assert!(!out.exists());
    let out = daemon.path().join("out.qcow2");
    daemon.cli(&["image", "export", "d", out.to_str().unwrap()]).ok();
    qemu_img(&["check", "-f", "qcow2", out.to_str().unwrap()]);
    qemu_img(&["compare", "-f", "raw", "-F", "qcow2", raw.to_str().unwrap(), out.to_str().unwrap()]);
    assert_eq!(std::fs::read_dir(daemon.path().join("store/tmp")).unwrap().count(), 0);
}

#[test]
fn standard_input_is_imported_like_a_file_and_leaves_nothing() {
    let daemon = Daemon::start();
    let disk = daemon.path().join("d.raw");
    let mut bytes = pseudo_random(1 << 20, 3);
    bytes.extend(vec![0; 3 << 20]);
    std::fs::write(&disk, bytes).unwrap();
    let qcow2 = daemon.path().join("d.qcow2");
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", disk.to_str().unwrap(), qcow2.to_str().unwrap()]);
    let import = |file: &Path, more: &[&str]| {
        let mut command = support::headwater();
        command.arg("--data-dir").arg(daemon.path()).args(["image", "import", "-"]).args(more);
        let output = command.stdin(std::fs::File::open(file).unwrap()).output().unwrap();
        support::Ran::from(output)
    };
    let before = std::fs::read_dir(daemon.path()).unwrap().count();
    assert!(import(&disk, &["--name", "d"]).ok().contains("imported as d@1"));
    assert!(import(&qcow2, &["--name", "d"]).ok().contains("unchanged; it is d@1"));
    assert!(daemon.cli(&["image", "show", "d"]).ok().contains("standard input"));
    // By its path, too; the daemon's own standard input is another.
    for path in ["/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"] {
        let mut command = support::headwater();
        command.arg("--data-dir").arg(daemon.path()).args(["image", "import", path, "--name", "d"]);
        let output = command.stdin(std::fs::File::open(&disk).unwrap()).output().unwrap();
        assert!(support::Ran::from(output).ok().contains("unchanged; it is d@1"), "{path}");
    }
    import(&disk, &[]).fails(2, &["--name"]);
    // What cannot become an image is refused before it is read: of an input that has no end.
    let refuse = |data_dir: &Path, name: &str, note: &str| {
        let mut command = support::headwater();
        command
            .arg("--data-dir")
            .arg(data_dir)
            .args(["image", "import", "-", "--name", name, "--note", note]);
        let (input, _open) = std::io::pipe().unwrap();
        support::Ran::from(command.stdin(input).output().unwrap())
    };
    refuse(daemon.path(), "No Name", "").fails(2, &["'No Name' is not an image name"]);
    refuse(daemon.path(), "e", &"x".repeat(1025)).fails(2, &["the note has 1025 bytes, and at most 1024"]);
    let nobody = support::short_dir();
    assert_eq!(refuse(nobody.path(), "e", "").code, 7);
    // Refused before it is read.
    let large = daemon.path().join("large.raw");
    std::fs::File::create(&large).unwrap().set_len(VOLUME_MAX_BYTES + 512).unwrap();
    import(&large, &["--name", "e"]).fails(2, &["more than 17592186036224 bytes"]);
    std::fs::remove_file(&large).unwrap();
    import(Path::new("/dev/null"), &["--name", "e"]).fails(2, &["cannot import 'standard input'", "empty"]);
    assert_eq!(std::fs::read_dir(daemon.path()).unwrap().count(), before);
}

/// Others than root cannot reach the daemon of another user.
#[test]
fn standard_input_that_the_daemon_may_not_open_is_refused_with_what_to_do() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let daemon = Daemon::start_as_user(65534);
    let disk = daemon.path().join("d.raw");
    std::fs::write(&disk, pseudo_random(1 << 20, 3)).unwrap();
    let mut command = support::headwater();
    command.arg("--data-dir").arg(daemon.path()).args(["image", "import", "-", "--name", "d"]);
    let output = command.stdin(std::fs::File::open(&disk).unwrap()).output().unwrap();
    support::Ran::from(output)
        .fails(1, &["'standard input'", "runs as user 65534", "-u #65534", "give the path of a file"]);
    daemon.cli(&["image", "import", disk.to_str().unwrap()]).ok();
}

#[test]
fn what_a_process_has_open_is_not_looked_for_in_the_daemon() {
    let daemon = Daemon::start();
    let link = daemon.path().join("link");
    std::os::unix::fs::symlink("/dev/fd/12", &link).unwrap();
    for path in ["/dev/fd/12", "/proc/self/fd/12", "/proc/thread-self/fd/12", link.to_str().unwrap()] {
        daemon
            .cli(&["image", "import", path, "--name", "d"])
            .fails(2, &[path, "the daemon", "image import -"]);
        let body = serde_json::json!({ "name": "d", "source": path }).to_string();
        let (status, answer) = http(&daemon.socket(), "POST", "/api/v1/images", Some(&body));
        assert!(answer.contains("open file of each process"), "{status} {answer}");
    }
    let disk = daemon.path().join("d.raw");
    std::fs::write(&disk, pseudo_random(1 << 20, 3)).unwrap();
    daemon.cli(&["image", "import", disk.to_str().unwrap()]).ok();
    daemon
        .cli(&["image", "verify", "d", "--repair-from", "/dev/fd/12"])
        .fails(2, &["/dev/fd/12", "the daemon"]);
    daemon.cli(&["image", "trace", "merge", "d", "/dev/fd/12"]).fails(2, &["/dev/fd/12", "the daemon"]);
}

#[test]
fn a_path_that_means_another_file_to_the_daemon_is_refused() {
    use std::os::unix::fs::MetadataExt;

    let daemon = Daemon::start();
    let (disk, other) = (daemon.path().join("d.raw"), daemon.path().join("other.raw"));
    for file in [&disk, &other] {
        std::fs::write(file, pseudo_random(1 << 20, 3)).unwrap();
    }
    let found = std::fs::metadata(&disk).unwrap();
    let import = |source: &Path, device: u64, inode: u64| {
        let body = serde_json::json!({
            "name": "d", "source": source, "source_name": "standard input",
            "source_id": { "device": device, "inode": inode },
        });
        http(&daemon.socket(), "POST", "/api/v1/images", Some(&body.to_string())).1
    };
    let gone = daemon.path().join("gone.raw");
    for (source, device, inode) in [
        (&other, found.dev(), found.ino()),
        (&disk, found.dev() + 1, found.ino()),
        (&gone, found.dev(), found.ino()),
    ] {
        let answer = import(source, device, inode);
        for words in ["cannot import 'standard input'", "means another file for the daemon", "container"] {
            assert!(answer.contains(words), "{answer}");
        }
    }
    assert!(!daemon.cli(&["image", "list"]).ok().contains("d.raw"));
    let answer = import(&disk, found.dev(), found.ino());
    assert!(answer.contains(r#""created":true"#), "{answer}");
}

#[test]
fn an_operation_that_waits_for_others_says_so() {
    let daemon = Daemon::start();
    let options = ReferenceOptions { waits: Waits::Always, ..Default::default() };
    let disk = Arc::new(ReferenceDisk::with_contents(vec![0; 8 << 20], options));
    disk.hold();
    let address = Address::Unix(daemon.path().join("nbd.sock"));
    let server = Server::bind(address, SingleExport::new(disk.clone(), ""), Limits::default()).unwrap();
    let import = |name: &str| {
        let mut command = headwater();
        command.arg("--data-dir").arg(daemon.path());
        command.args(["image", "import", &server.uri(), "--name", name]);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let counts = || {
        let status: serde_json::Value =
            serde_json::from_str(&daemon.cli(&["--json", "status"]).ok()).unwrap();
        (status["tasks_running"].as_u64().unwrap(), status["tasks_waiting"].as_u64().unwrap())
    };
    let first: Vec<_> = ["a", "b", "c", "d"].into_iter().map(import).collect();
    wait_until("four imports run", || counts() == (4, 0));
    let mut fifth = import("e");
    let _watchdog = support::Watchdog::on(fifth.id());
    let mut line = String::new();
    BufReader::new(fifth.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("import e: waiting, because 4 other long operations"), "{line}");
    assert_eq!(counts(), (4, 1));
    assert!(daemon.cli(&["status"]).ok().contains("4 running, 1 waiting"));
    disk.release();
    for mut import in first.into_iter().chain([fifth]) {
        let _watchdog = support::Watchdog::on(import.id());
        assert!(import.wait().unwrap().success());
    }
    assert_eq!(counts(), (0, 0));
}
