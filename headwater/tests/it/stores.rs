//! Stores by name, through the command line: a daemon over S3, copies between stores, a store offered over HTTP,
//! checks and repairs.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use crate::support::{self, Daemon, headwater, pseudo_random, run};
use headwater_store::retention::RetentionPurpose;
use headwater_store::{
    Access, ImageReference, Keys, LocalDir, NewVersion, RetentionRoot, S3Options, S3Store, Store,
};
use headwater_testkit::s3::{KEY_ID, KEY_SECRET, S3Server, serve_if_asked};
use headwater_testkit::{FileServer, HttpFault, TestTls, test_name, wait_until};
use rustix::process::{Pid, Signal, kill_process};

/// The server is this program once more, in this test.
fn served_by() -> &'static str {
    test_name(a_daemon_keeps_images_in_a_bucket)
}

fn server() -> &'static S3Server {
    static SERVER: OnceLock<(S3Server, tempfile::TempDir)> = OnceLock::new();
    let started = SERVER.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        (S3Server::start(dir.path(), served_by()), dir)
    });
    &started.0
}

/// A place for a store in S3.
pub fn in_bucket(bucket: &str) -> String {
    server().bucket(bucket);
    format!("s3://{bucket}/golden?endpoint=http://{}", server().address())
}

pub fn with_keys(command: &mut Command) -> &mut Command {
    command
        .env("AWS_ACCESS_KEY_ID", KEY_ID)
        // The URL names the server.
        .env("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
        .env("AWS_SECRET_ACCESS_KEY", KEY_SECRET)
        .env("NO_PROXY", "127.0.0.1")
}

pub fn store(args: &[&str]) -> support::Ran {
    run(with_keys(headwater().arg("store").args(args)))
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A directory with the version `disk@1`, as a daemon leaves it.
pub fn made_by_a_daemon() -> (tempfile::TempDir, Vec<u8>) {
    let daemon = Daemon::start();
    let dir = support::short_dir();
    let raw = dir.path().join("a.raw");
    let disk = pseudo_random(2 << 20, 7);
    std::fs::write(&raw, &disk).unwrap();
    daemon.cli(&["image", "import", text(&raw), "--name", "disk", "--note", "first"]).ok();
    daemon.cli(&["image", "promote", "disk@1", "production"]).ok();
    let (code, data_dir) = daemon.terminate();
    assert_eq!(code, Some(0));
    (data_dir, disk)
}

/// A process that serves a store, until this is dropped.
pub struct Served(Child);

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn serve(args: &[&str]) -> (Served, String) {
    let mut command = headwater();
    with_keys(&mut command).args(["store", "serve"]).args(args).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut url = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
    (Served(child), url.trim().to_owned())
}

/// A server of a store for those who show the token of the returned file.
fn serve_to_those_with_a_token(args: &[&str], dir: &Path) -> (Served, String, PathBuf) {
    let (tokens, shown) = (dir.join("tokens"), dir.join("token"));
    let token = store(&["token", "reader", "--token-file", text(&tokens)]).ok();
    std::fs::write(&shown, token.trim()).unwrap();
    let listen = ["--listen", "127.0.0.1:0", "--token-file", text(&tokens)];
    let (served, url) = serve(&[args, &listen].concat());
    (served, url, shown)
}

/// Turns a bit of a store's data over. Returns which object that is, and its bytes as they were.
fn damage(store: &Path) -> (PathBuf, Vec<u8>) {
    let object = std::fs::read_dir(store.join("objects")).unwrap().next().unwrap().unwrap().path();
    let good = std::fs::read(&object).unwrap();
    let mut bad = good.clone();
    bad[100_000] ^= 1;
    std::fs::write(&object, &bad).unwrap();
    (object, good)
}

#[test]
fn a_server_over_a_bucket_that_does_not_answer_ends_when_it_is_told() {
    serve_if_asked();
    let dir = tempfile::tempdir().unwrap();
    let test = test_name(a_server_over_a_bucket_that_does_not_answer_ends_when_it_is_told);
    let bucket = S3Server::start(dir.path(), test);
    bucket.bucket("hangs");
    let url = format!("s3://hangs/golden?endpoint=http://{}", bucket.address());
    let (made, _) = made_by_a_daemon();
    store(&["sync", text(&made.path().join("store")), &url]).ok();
    let (mut served, server) = serve(&[&url, "--listen", "127.0.0.1:0"]);
    // For which it has a mark in the bucket, to be taken away at the end.
    store(&["verify", &server]).ok();
    let bucket_pid = Pid::from_raw(i32::try_from(bucket.pid()).unwrap()).unwrap();
    kill_process(bucket_pid, Signal::STOP).unwrap();
    let server_pid = Pid::from_raw(i32::try_from(served.0.id()).unwrap()).unwrap();
    kill_process(server_pid, Signal::TERM).unwrap();
    // A mark that is not taken away is tried for longer than is waited for here.
    let mut ended = None;
    wait_until("the server ends", || {
        ended = served.0.try_wait().unwrap();
        ended.is_some()
    });
    kill_process(bucket_pid, Signal::CONT).unwrap();
    assert!(ended.is_some_and(|status| status.success()));
}

#[test]
fn a_daemon_keeps_images_in_a_bucket() {
    serve_if_asked();
    let url = in_bucket("daemon-images");
    let over_s3 = || {
        Daemon::start_in(support::short_dir(), |command| {
            with_keys(command).args(["--store", &url, "--scrub", "100M"]);
        })
    };
    let daemon = over_s3();
    let dir = support::short_dir();
    let (raw, out) = (dir.path().join("a.raw"), dir.path().join("out.raw"));
    let disk = pseudo_random(3 << 20, 1);
    std::fs::write(&raw, &disk).unwrap();
    assert!(daemon.cli(&["image", "import", text(&raw), "--name", "disk"]).ok().contains("disk@1"));
    // Another daemon beside it, with a data directory of its own, sees it and adds to it.
    let other = over_s3();
    other.cli(&["image", "export", "disk@1", text(&out)]).ok();
    assert!(std::fs::read(&out).unwrap() == disk);
    std::fs::write(&raw, pseudo_random(1 << 20, 2)).unwrap();
    assert!(other.cli(&["image", "import", text(&raw), "--name", "disk"]).ok().contains("disk@2"));
    assert!(daemon.cli(&["image", "list"]).ok().contains("disk"));
    assert!(daemon.cli(&["image", "verify", "disk@2"]).ok().contains("intact"));
    assert!(daemon.cli(&["image", "remove", "disk@1"]).ok().contains("removed disk@1"));
    // A bucket is one place however its URL is written.
    let own = url.replace("/golden?", "/golden/?timeout=9&");
    daemon.cli(&["image", "pull", &own]).fails(2, &["the daemon's own store"]);
}

#[test]
fn without_keys_it_is_said_who_was_asked_for_them() {
    let url = in_bucket("no-keys");
    let mut command = headwater();
    for set in ["ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SKIP_SIGNATURE", "ROLE_ARN"] {
        command.env_remove(format!("AWS_{set}"));
    }
    // Where nobody listens.
    command.env("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9").env("NO_PROXY", "127.0.0.1");
    run(command.args(["store", "verify", &url])).fails(
        1,
        &[
            "no AWS_ACCESS_KEY_ID is set, and the credentials of the machine's role could not be obtained from http://127.0.0.1:9: ",
            "refused",
            ". Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ],
    );
}

/// Has the daemon of a data directory hold a version for nothing.
fn left_by_a_crash(url: &str, data_dir: &Path, version: &str) {
    let id = std::fs::read_to_string(data_dir.join("daemon.id")).unwrap();
    let mut options = S3Options::new("test");
    options.keys = Keys::Given { id: KEY_ID.to_owned(), secret: KEY_SECRET.to_owned() };
    let opened = S3Store::open(&url.parse().unwrap(), Access::WRITE, &options).unwrap();
    let reference: ImageReference = version.parse().unwrap();
    let hold = RetentionRoot {
        manifest: opened.resolve(&reference).unwrap().manifest,
        image: reference.name,
        purpose: RetentionPurpose::Disk,
        daemon: id.trim().to_owned(),
        id: "begun".to_owned(),
        holder: "machine 'never'".to_owned(),
    };
    opened.retain(&hold).unwrap();
}

#[test]
fn daemons_of_one_bucket_do_not_remove_what_another_needs() {
    let url = in_bucket("held-images");
    let over_s3 = |dir| {
        Daemon::start_in(dir, |command| {
            with_keys(command).args(["--store", &url]);
        })
    };
    let (one, other) = (over_s3(support::short_dir()), over_s3(support::short_dir()));
    one.with_tiny_machine("desk");
    one.create("lab", "tiny", &["--persistent"]);
    one.cli(&["machine", "start", "lab", "--wait"]).ok();
    one.cli(&["machine", "stop", "lab", "--force"]).ok();
    let import = |daemon: &Daemon, seed: u8| {
        let raw = daemon.path().join("tiny.raw");
        let mut disk = support::tiny_disk();
        disk[512] = seed;
        std::fs::write(&raw, disk).unwrap();
        daemon.cli(&["image", "import", text(&raw)]).ok();
    };
    // Below a persistent disk whose machine is off, below an edit, pinned, named, and free.
    import(&one, 2);
    one.cli(&["image", "edit", "tiny", "--machine", "desk"]).ok();
    import(&other, 3);
    import(&other, 4);
    import(&other, 5);
    import(&other, 6);
    one.cli(&["catalog", "create", "class", "tiny", "--memory", "64M"]).ok();
    one.cli(&["image", "pin", "class", "tiny@3"]).ok();
    one.create("fixed", "tiny@4", &[]);
    let is_held = |version: &str, holder: &str| {
        let says = [holder, text(one.path()), "gone for ever", "/holds/"];
        other.cli(&["image", "remove", version]).fails(4, &says);
    };
    is_held("tiny@1", "machine 'lab'");
    is_held("tiny@2", "machine 'desk' of host");
    is_held("tiny@3", "catalog 'class'");
    is_held("tiny@4", "machine 'fixed'");
    other.cli(&["image", "remove", "tiny"]).fails(4, &["gone for ever"]);
    other.create("hers", "tiny", &[]);
    other
        .cli(&["image", "edit", "tiny", "--machine", "hers"])
        .fails(4, &["machine 'desk' of host", "edits image 'tiny' already"]);

    // Not while its daemon is gone, either. The next one lets go of what its database does not say.
    let dir = one.kill();
    other.cli(&["image", "remove", "tiny@1"]).fails(4, &["machine 'lab'"]);
    left_by_a_crash(&url, dir.path(), "tiny@5");
    let one = over_s3(dir);
    let goes = |version: &str| {
        wait_until(format!("others can remove {version}"), || {
            other.cli(&["image", "remove", version]).code == 0
        });
    };
    goes("tiny@5");
    other.cli(&["image", "remove", "tiny@1"]).fails(4, &["machine 'lab'"]);
    one.cli(&["machine", "start", "lab", "--wait"]).ok();
    one.cli(&["machine", "stop", "lab", "--force"]).ok();

    one.cli(&["machine", "reset", "lab"]).ok();
    goes("tiny@1");
    one.cli(&["image", "discard", "tiny"]).ok();
    // What a store is not told in time it is told later.
    wait_until("the image can be edited", || {
        other.cli(&["image", "edit", "tiny", "--machine", "hers"]).code == 0
    });
    goes("tiny@2");
    one.cli(&["image", "unpin", "class"]).ok();
    goes("tiny@3");

    // What follows the channels of an image needs one version at least.
    other.cli(&["image", "discard", "tiny"]).ok();
    other.cli(&["machine", "remove", "hers"]).ok();
    for name in ["lab", "fixed", "desk"] {
        one.cli(&["machine", "remove", name]).ok();
    }
    goes("tiny@4");
    for what in ["tiny", "tiny@6"] {
        let says = ["all of image 'tiny'", text(one.path()), "follows its channels", "/follow."];
        other.cli(&["image", "remove", what]).fails(4, &says);
    }
    one.cli(&["catalog", "remove", "class"]).ok();
    goes("tiny");
}

#[test]
fn versions_travel_between_a_directory_a_bucket_and_a_server() {
    let (data_dir, _) = made_by_a_daemon();
    let here = data_dir.path().join("store");
    let url = in_bucket("copies");
    assert!(store(&["copy", text(&here), &url, "disk@1"]).ok().contains("1 versions copied"));
    assert!(store(&["sync", text(&here), &url]).ok().contains("nothing to copy: the version is in s3://"));
    assert!(store(&["verify", &url]).ok().contains("disk@1 is intact"));

    let dir = support::short_dir();
    let (_served, server, shown) = serve_to_those_with_a_token(&[&url], dir.path());
    let tokens = dir.path().join("tokens");
    store(&["token", "reader", "--token-file", text(&tokens)]).fails(4, &["already"]);
    let token = std::fs::read_to_string(&shown).unwrap();
    assert!(!std::fs::read_to_string(&tokens).unwrap().contains(&token));
    let copy = dir.path().join("copy");
    store(&["sync", &server, text(&copy)]).fails(1, &["401", "--token FILE"]);
    let report = store(&["sync", &server, text(&copy), "--token", text(&shown)]).ok();
    assert!(report.contains("1 versions copied"), "{report}");
    let report: serde_json::Value =
        serde_json::from_str(&run(headwater().args(["--json", "store", "verify", text(&copy)])).ok())
            .unwrap();
    assert_eq!(report["versions"][0]["names"][0], "disk@1");
    let same = |file: &str| {
        std::fs::read(here.join("images").join(file)).unwrap()
            == std::fs::read(copy.join("images").join(file)).unwrap()
    };
    let open = support::open_to_others(dir.path()).into_iter().find(|path| path.starts_with(&copy));
    assert_eq!(open, None, "a copy is its owner's only");
    assert!(same("disk"), "note, author, time and channels came along");
    // What cannot be is refused with a reason.
    store(&["copy", &server, "https://localhost:1", "disk", "--token", text(&shown)])
        .fails(2, &["read-only"]);
    store(&["copy", text(&here), text(&copy), "disk@9"]).fails(3, &["disk"]);
    store(&["sync", "ftp://x", text(&copy)]).fails(2, &["ftp:// cannot be a store"]);
    store(&["serve", text(&copy), "--listen", "0.0.0.0:0"]).fails(2, &["--tls-cert"]);
    let (others, file) = (dir.path().join("others"), dir.path().join("others/a.raw"));
    std::fs::create_dir(&others).unwrap();
    std::fs::write(&file, "a disk").unwrap();
    store(&["sync", text(&here), text(&others)]).fails(2, &["not an image store", "a.raw"]);
    store(&["sync", text(&here), text(&file)]).fails(2, &["a.raw as a store: it is a file"]);
    let certificate = dir.path().join("cert.pem");
    std::fs::write(&certificate, TestTls::new().ca_pem).unwrap();
    // The one in the place of the other.
    let pair = ["--tls-cert", text(&certificate), "--tls-key", text(&certificate)];
    let listen = ["serve", text(&copy), "--listen", "127.0.0.1:0", "--token-file", text(&tokens)];
    store(&[&listen[..], &pair].concat()).fails(2, &["cert.pem for TLS: it holds no private key"]);
}

#[test]
fn damage_is_repaired_from_another_store_or_named() {
    let (data_dir, _) = made_by_a_daemon();
    let here = data_dir.path().join("store");
    let dir = support::short_dir();
    let copy = dir.path().join("copy");
    store(&["sync", text(&here), text(&copy)]).ok();
    let (object, good) = damage(&here);
    let found = store(&["verify", text(&here)]);
    assert_eq!(found.code, 6, "{found:?}");
    for says in ["bytes ", "disk@1: more files may be affected: ", "disk@1 is damaged in 1 chunk: "] {
        assert!(found.out.contains(says), "no '{says}' in {found:?}");
    }
    let report = store(&["verify", text(&here), "--repair-from", text(&copy)]).ok();
    assert!(
        report.contains("1 damaged chunks or data objects repaired") && report.contains("is intact"),
        "{report}"
    );
    assert!(std::fs::read(&object).unwrap() == good);
    // A manifest, which says what there is to verify.
    let manifest = std::fs::read_dir(here.join("manifests")).unwrap().next().unwrap().unwrap().path();
    let good = std::fs::read(&manifest).unwrap();
    std::fs::write(&manifest, &good[..good.len() - 1]).unwrap();
    let found = store(&["verify", text(&here)]);
    assert_eq!(found.code, 6, "{found:?}");
    assert!(
        found.out.contains("disk@1: the manifest") && found.out.contains("disk@1 is damaged"),
        "{found:?}"
    );
    let report = store(&["verify", text(&here), "--repair-from", text(&copy)]).ok();
    assert!(
        report.contains("1 damaged chunks or data objects repaired") && report.contains("is intact"),
        "{report}"
    );
    std::fs::write(&manifest, &good[1..]).unwrap();
    let daemon = Daemon::start_in(data_dir, |_| {});
    let found = daemon.cli(&["image", "verify", "disk"]);
    assert!(found.code == 6 && found.out.contains("disk@1: the manifest"), "{found:?}");
    let report = daemon.cli(&["image", "verify", "disk", "--repair-from", text(&copy)]).ok();
    assert!(
        report.contains("1 damaged chunks or data objects repaired") && report.contains("is intact"),
        "{report}"
    );
    assert!(std::fs::read(&manifest).unwrap() == good);
    store(&["verify", text(&dir.path().join("nothing"))]).fails(3, &["no image store"]);
    assert!(!dir.path().join("nothing").exists());
}

#[test]
fn a_check_of_servers_ends_when_it_is_told_and_when_they_are_gone() {
    let (data_dir, _) = made_by_a_daemon();
    let mut server = FileServer::start(&data_dir.path().join("store"), None);
    let url = server.url();
    let verify = |server: &FileServer| {
        let asked = server.object_requests();
        let args = ["store", "verify", &url, "disk", "--rate", "100K"];
        let child = headwater().args(args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        // The object was opened, and its chunks are being read.
        wait_until("it reads", || server.object_requests() >= asked + 3);
        Served(child)
    };
    let ended = |mut child: Served| {
        let mut status = None;
        wait_until("it ends", || {
            status = child.0.try_wait().unwrap();
            status.is_some()
        });
        let mut said = String::new();
        child.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (status.unwrap().code(), said)
    };
    // It ends by itself once nothing came for some seconds, which may be before it is told to on a busy host: then once more.
    let mut tries = 0..5;
    loop {
        let told = verify(&server);
        server.fail(HttpFault::Hang);
        let asked = server.object_requests();
        wait_until("a read waits for its answer", || server.object_requests() > asked);
        support::signal(told.0.id(), "INT");
        let (code, said) = ended(told);
        server.fail(HttpFault::None);
        if code == Some(130) {
            break;
        }
        assert!(
            code == Some(1) && said.contains("no server gives") && tries.next().is_some(),
            "{code:?}: {said}"
        );
    }

    let left = verify(&server);
    server.kill();
    let (code, said) = ended(left);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("cannot verify disk@1") && said.contains("no server gives"), "{said}");
}

/// A directory with `disk@1`, `other@1` and `third@1`, as a daemon leaves it.
fn three_made_by_a_daemon() -> tempfile::TempDir {
    let (data_dir, _) = made_by_a_daemon();
    let dir = support::short_dir();
    let daemon = Daemon::start_in(data_dir, |_| {});
    for (name, seed) in [("other", 8), ("third", 9)] {
        let raw = dir.path().join(name);
        std::fs::write(&raw, pseudo_random(1 << 20, seed)).unwrap();
        daemon.cli(&["image", "import", text(&raw), "--name", name]).ok();
    }
    daemon.terminate().1
}

/// The bytes of a list of versions or a manifest, damaged.
fn flipped(file: &Path) -> Vec<u8> {
    let mut bytes = std::fs::read(file).unwrap();
    let last = bytes.len() - 1;
    bytes[40] ^= 1;
    bytes[last] ^= 1;
    bytes
}

fn flip(file: &Path) {
    std::fs::write(file, flipped(file)).unwrap();
}

#[test]
fn damaged_lists_stand_in_the_way_of_themselves_only_between_servers_and_buckets_too() {
    let data_dir = three_made_by_a_daemon();
    let here = data_dir.path().join("store");
    let (_served, url) = serve(&[text(&here), "--listen", "127.0.0.1:0"]);
    let [bucket, other_bucket] = ["sync-damaged", "sync-from-damaged"].map(in_bucket);
    assert!(store(&["sync", &url, &bucket]).ok().contains("3 versions copied"));
    let third = server().bucket("sync-damaged").join("golden/images/third");
    server().replace("sync-damaged", "golden/images/third", &flipped(&third));
    let synced_with = |source: &str, target: &str, says: &[&str]| {
        let synced = store(&["sync", source, target]);
        assert_eq!(synced.code, 6, "{synced:?}");
        for said in says {
            assert!(synced.out.contains(said) || synced.err.contains(said), "no '{said}' in {synced:?}");
        }
    };
    let of_bucket = "third (its list of versions in s3://sync-damaged/";
    synced_with(&url, &bucket, &["0 versions copied", "2 were already there", of_bucket]);
    synced_with(&bucket, &other_bucket, &["2 versions copied", of_bucket]);
    flip(&here.join("images/other"));
    let of_server = format!("other (its list of versions in {url}");
    synced_with(&url, &bucket, &["0 versions copied", "1 were already there", of_bucket, &of_server]);
    // Taken away, the bucket's comes anew.
    std::fs::remove_file(&third).unwrap();
    synced_with(&url, &bucket, &["1 versions copied", "not copied: other"]);
    assert!(store(&["verify", &bucket]).ok().contains("third@1 is intact"));
}

#[test]
fn what_cannot_be_read_stands_in_the_way_of_itself_only() {
    let data_dir = three_made_by_a_daemon();
    let dir = support::short_dir();
    let here = data_dir.path().join("store");
    flip(&here.join("images/other"));
    let copy = dir.path().join("copy");
    let synced = store(&["sync", text(&here), text(&copy)]);
    assert_eq!(synced.code, 6, "{synced:?}");
    assert!(
        synced.out.contains("2 versions copied") && synced.err.contains("not copied: other"),
        "{synced:?}"
    );
    let report = store(&["verify", text(&copy)]).ok();
    assert!(report.contains("disk@1 is intact") && report.contains("third@1 is intact"), "{report}");
    // And so does a list of the target. Where that is taken away, the next one brings it anew.
    flip(&copy.join("images/third"));
    let synced = store(&["sync", text(&here), text(&copy)]);
    assert_eq!(synced.code, 6, "{synced:?}");
    for says in [format!("other (its list of versions in {}", text(&here)), format!("in {}", text(&copy))] {
        assert!(synced.err.contains(&says), "no '{says}' in {synced:?}");
    }
    assert!(
        synced.out.contains("0 versions copied") && synced.out.contains("1 were already there"),
        "{synced:?}"
    );
    std::fs::remove_file(copy.join("images/third")).unwrap();
    let synced = store(&["sync", text(&here), text(&copy)]);
    assert!(synced.out.contains("1 versions copied") && !synced.err.contains("third"), "{synced:?}");

    let opened = LocalDir::open(&here, Access::Read).unwrap();
    let version = opened.resolve(&"disk@1".parse().unwrap()).unwrap();
    flip(&here.join("manifests").join(version.manifest.to_string()));
    let found = store(&["verify", text(&here)]);
    assert_eq!(found.code, 6, "{found:?}");
    for says in ["disk@1: the manifest", "disk@1 is damaged", "third@1 is intact", "other is damaged: "] {
        assert!(found.out.contains(says), "no '{says}' in {found:?}");
    }
    let found = run(headwater().args(["--json", "store", "verify", text(&here)]));
    assert_eq!(found.code, 6, "{found:?}");
    let report: serde_json::Value = serde_json::from_str(&found.out).unwrap();
    assert_eq!(report["versions"].as_array().unwrap().len(), 2, "{report}");
    assert_eq!(report["images"][0]["image"], "other", "{report}");
}

#[test]
fn a_daemon_repairs_its_store_from_directories_and_from_servers_that_ask_for_a_token() {
    let (mut data_dir, _) = made_by_a_daemon();
    let here = data_dir.path().join("store");
    let dir = support::short_dir();
    let copy = dir.path().join("copy");
    store(&["sync", text(&here), text(&copy)]).ok();
    let (_served, server, token) = serve_to_those_with_a_token(&[text(&copy)], dir.path());

    // In the background, a round each.
    for source in [text(&copy), &server] {
        let (object, good) = damage(&here);
        let daemon = Daemon::start_in(data_dir, |command| {
            command.args(["--scrub", "100M", "--repair-from", source, "--token", text(&token)]);
        });
        wait_until(format!("the damage is repaired from {source}"), || {
            std::fs::read(&object).is_ok_and(|bytes| bytes == good)
        });
        wait_until("the history has it", || {
            let history = daemon.cli(&["image", "history", "disk"]).ok();
            history.contains("repaired")
                && history.contains("disk@1: damaged chunks or data objects that were repaired: 1")
        });
        let (code, dir) = daemon.terminate();
        assert_eq!(code, Some(0));
        data_dir = dir;
    }

    // On demand. A daemon without the token is told that it needs one.
    let (object, good) = damage(&here);
    let daemon = Daemon::start_in(data_dir, |_| {});
    let verify = |daemon: &Daemon| daemon.cli(&["image", "verify", "disk", "--repair-from", &server]);
    let advice = format!("start it with --repair-from {server}");
    verify(&daemon).fails(1, &["401", &advice]);
    let (_, data_dir) = daemon.terminate();
    // Nor is a server shown it that was not named when the daemon was started.
    let daemon = Daemon::start_in(data_dir, |command| {
        command.args(["--token", text(&token)]);
    });
    verify(&daemon).fails(1, &["401", &advice]);
    let (_, data_dir) = daemon.terminate();
    let daemon = Daemon::start_in(data_dir, |command| {
        command.args(["--token", text(&token), "--repair-from", &server]);
    });
    let found = daemon.cli(&["image", "verify", "disk"]);
    assert_eq!(found.code, 6, "{found:?}");
    let report = verify(&daemon).ok();
    assert!(
        report.contains("1 damaged chunks or data objects repaired") && report.contains("intact"),
        "{report}"
    );
    assert!(std::fs::read(&object).unwrap() == good);
}

/// What a daemon got from the servers of its store.
fn received_bytes(daemon: &Daemon) -> f64 {
    let stats: serde_json::Value = serde_json::from_str(&daemon.cli(&["--json", "stats"]).ok()).unwrap();
    let mut samples = stats["samples"].as_array().unwrap().iter();
    let received = samples.find(|it| it["metric"] == "headwater_image_received_bytes_total");
    received.unwrap()["value"].as_f64().unwrap()
}

#[test]
fn a_scrub_reads_no_faster_than_it_is_told() {
    let maker = Daemon::start();
    let raw = maker.path().join("v.raw");
    std::fs::write(&raw, pseudo_random(4 << 20, 9)).unwrap();
    maker.cli(&["image", "import", text(&raw), "--name", "v"]).ok();
    let (_, data_dir) = maker.terminate();
    let (_served, url) = serve(&[text(&data_dir.path().join("store")), "--listen", "127.0.0.1:0"]);
    let scrubs_at = |rate: &str| {
        Daemon::start_in(support::short_dir(), |command| {
            command.args(["--from", &url, "--scrub", rate]);
        })
    };
    // That takes more than an hour. The first chunks come when the manifest is paid for.
    let slow = scrubs_at("1K");
    wait_until("the slow one reads chunks", || received_bytes(&slow) > f64::from(64 << 10));
    // This one begins later, and ends its round.
    let fast = scrubs_at("1G");
    let ended = "the scrub read all versions once";
    if !fast.log.contains(ended) {
        fast.wait_for_log(&[ended]);
    }
    let (all, some) = (received_bytes(&fast), received_bytes(&slow));
    assert!(all >= f64::from(4 << 20), "{all} bytes were all");
    assert!(some < f64::from(4 << 20), "{some} bytes were read at 1 KiB a second");
}

/// All files of a part of a store, by name.
fn files(store: &Path, part: &str) -> BTreeMap<std::ffi::OsString, Vec<u8>> {
    let entries = std::fs::read_dir(store.join(part)).unwrap().map(Result::unwrap);
    entries.map(|entry| (entry.file_name(), std::fs::read(entry.path()).unwrap())).collect()
}

#[test]
fn who_offers_a_store_to_everybody_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let (here, tokens) = (dir.path().join("store"), dir.path().join("tokens"));
    LocalDir::open(&here, Access::WRITE).unwrap();
    store(&["token", "reader", "--token-file", text(&tokens)]).ok();
    let told = |more: &[&str]| {
        let mut command = headwater();
        command.args(["store", "serve", text(&here), "--listen", "127.0.0.1:0"]).args(more);
        let mut served = Served(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
        let (out, err) = (served.0.stdout.take().unwrap(), served.0.stderr.take().unwrap());
        // It is told first.
        BufReader::new(out).read_line(&mut String::new()).unwrap();
        drop(served);
        std::io::read_to_string(err).unwrap()
    };
    assert_eq!(told(&[]).matches("without tokens: every user of this host can read").count(), 1);
    assert_eq!(told(&["--token-file", text(&tokens)]), "");
}

#[test]
fn a_daemon_offers_its_store_to_others() {
    let (data_dir, _) = made_by_a_daemon();
    let here = data_dir.path().join("store");
    let daemon = Daemon::start_in(data_dir, |command| {
        command.args(["--store-listen", "127.0.0.1:0"]);
    });
    let (_, after) = daemon.log.split_once("http://127.0.0.1:").expect("it says where it listens");
    let port: String = after.chars().take_while(char::is_ascii_digit).collect();
    let url = format!("http://127.0.0.1:{port}");
    assert_eq!(
        daemon.log.matches("without tokens: every user of this host can read").count(),
        1,
        "{}",
        daemon.log
    );

    let dir = support::short_dir();
    let (copy, raw) = (dir.path().join("copy"), dir.path().join("a.raw"));
    assert!(store(&["sync", &url, text(&copy)]).ok().contains("1 versions copied"));
    // What is made while it serves is served, too.
    std::fs::write(&raw, pseudo_random(1 << 20, 3)).unwrap();
    daemon.cli(&["image", "import", text(&raw), "--name", "disk"]).ok();
    assert!(store(&["sync", &url, text(&copy)]).ok().contains("1 versions copied"));
    for part in ["images", "manifests", "objects"] {
        let (theirs, ours) = (files(&here, part), files(&copy, part));
        assert!(!theirs.is_empty() && theirs == ours, "{part}: {:?}, {:?}", theirs.keys(), ours.keys());
    }
    assert_eq!(daemon.terminate().0, Some(0));
    store(&["sync", &url, text(&copy)]).fails(1, &["refused"]);
}

#[test]
fn a_volume_is_read_from_a_bucket() {
    let (data_dir, disk) = made_by_a_daemon();
    let url = in_bucket("volumes");
    store(&["copy", text(&data_dir.path().join("store")), &url, "disk@1"]).ok();
    assert!(exported(&["disk", "--from", &url]) == disk);
}

#[test]
fn a_url_says_where_an_image_is_and_which() {
    let (data_dir, disk) = made_by_a_daemon();
    let here = data_dir.path().join("store");
    let (_served, server) = serve(&[text(&here), "--listen", "127.0.0.1:0"]);
    assert!(exported(&[&format!("{}/disk@1", server.trim_end_matches('/'))]) == disk);
    let bucket = in_bucket("urls");
    store(&["copy", text(&here), &bucket, "disk@1"]).ok();
    let (place, query) = bucket.split_once('?').unwrap();
    assert!(exported(&[&format!("{place}/disk?{query}")]) == disk);
    let fails = |command: &str, args: &[&str], code, words: &[&str]| {
        let mut ran = headwater();
        run(with_keys(&mut ran).args([command, "--cache", "ram"]).args(args)).fails(code, words);
    };
    let nbd = "--nbd=unix:/nowhere/x";
    let missing = format!("{server}/none");
    fails("export", &[&missing, nbd], 3, &["cannot export 'none' from http://", "no image 'none'"]);
    fails("attach", &["http://127.0.0.1:1/x"], 1, &["cannot export 'x' from http://127.0.0.1:1", "refused"]);
    fails("attach", &["nbd+unix:///?socket=/nowhere/x"], 2, &["image import URI"]);
    fails("export", &[&missing, nbd, "--from", &server], 2, &["so does --from"]);
}

/// All bytes of what an export with these arguments serves.
pub fn exported(args: &[&str]) -> Vec<u8> {
    let dir = support::short_dir();
    let socket = dir.path().join("nbd");
    let mut command = headwater();
    with_keys(&mut command)
        .args(["export", "--cache", "ram"])
        .args(args)
        .arg(format!("--nbd=unix:{}", socket.display()))
        .stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    let _exported = Served(child);
    assert!(ready.starts_with("nbd+unix:"), "{ready}");
    let listed = run(headwater().args(["cache", "list"])).ok();
    assert!(listed.contains(&format!(" {} ", args[0])), "the source is not listed as it was given: {listed}");
    let out = dir.path().join("out.raw");
    let copied =
        Command::new("nbdcopy").arg(format!("nbd+unix:///?socket={}", socket.display())).arg(&out).status();
    assert!(copied.expect("nbdcopy is needed: apt-get install libnbd-bin").success());
    std::fs::read(&out).unwrap()
}

#[test]
fn a_copy_to_a_full_disk_fails_as_such_and_leaves_nothing_half() {
    let (data_dir, _) = made_by_a_daemon();
    let here = data_dir.path().join("store");
    let dir = support::short_dir();
    let copy = dir.path().join("copy");
    // The one object has 2 MiB.
    let full =
        run(support::headwater_on_full_disk(1 << 20).args(["store", "sync", text(&here), text(&copy)]));
    full.fails(5, &["cannot copy from", text(&here), text(&copy)]);
    for part in ["images", "manifests", "objects", "traces"] {
        assert!(files(&copy, part).is_empty(), "{part}");
    }
    store(&["verify", text(&copy)]).ok();
    // With room the same command does it.
    assert!(store(&["sync", text(&here), text(&copy)]).ok().contains("1 versions copied"));
    assert!(store(&["verify", text(&copy)]).ok().contains("disk@1 is intact"));
    for part in ["images", "manifests", "objects"] {
        assert!(files(&here, part) == files(&copy, part), "{part}");
    }
    assert!(files(&copy, "tmp").is_empty());
}

#[test]
fn a_list_that_leaves_out_what_a_version_needs_brings_no_version() {
    let (data_dir, _) = made_by_a_daemon();
    let here = LocalDir::open(&data_dir.path().join("store"), Access::Read).unwrap();
    let version = here.resolve(&"disk@1".parse().unwrap()).unwrap();
    let dir = support::short_dir();
    let (lying, copy) = (dir.path().join("lying"), dir.path().join("copy"));
    let liar = LocalDir::open(&lying, Access::WRITE).unwrap();
    let listed = NewVersion {
        name: &"disk".parse().unwrap(),
        manifest: &here.manifest(version.manifest).unwrap(),
        objects: &[],
        size_bytes: version.size_bytes,
        created_at_s: 0,
        source: "",
        note: "",
        author: "",
        unless_newest: false,
        newest_at_most: None,
        is_sealed: false,
        keeps_identity: false,
    };
    liar.publish().unwrap().commit(listed).unwrap();
    store(&["copy", text(&lying), text(&copy), "disk@1"]).fails(6, &["the manifest of version 1 needs"]);
    assert!(files(&copy, "images").is_empty());
}

#[test]
fn a_volume_waits_for_a_bucket_that_is_gone_and_goes_on_when_it_is_back() {
    let (data_dir, disk) = made_by_a_daemon();
    let dir = support::short_dir();
    let keys = tempfile::tempdir().unwrap();
    let mut server = S3Server::start(keys.path(), served_by());
    server.bucket("away");
    let url = format!("s3://away/golden?endpoint=http://{}", server.address());
    store(&["copy", text(&data_dir.path().join("store")), &url, "disk@1"]).ok();
    let (socket, log, stats) = (dir.path().join("nbd"), dir.path().join("log"), dir.path().join("stats"));
    let mut command = headwater();
    with_keys(&mut command)
        .args(["export", "disk", "--cache", "ram", "--from", &url, "--readahead", "off", "--stats"])
        .arg(&stats)
        .arg(format!("--nbd=unix:{}", socket.display()))
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(&log).unwrap());
    let mut child = command.spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    let mut exported = Served(child);
    assert!(ready.starts_with("nbd+unix:"), "{ready}");

    server.kill();
    let out = dir.path().join("out.raw");
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let mut copying = Command::new("nbdcopy").arg(&uri).arg(&out).spawn().expect("nbdcopy");
    let logged = |words: &str| std::fs::read_to_string(&log).is_ok_and(|log| log.contains(words));
    wait_until("it says that reads wait", || logged("reads wait until one is back"));
    // What is no read of a guest fails as ever.
    store(&["verify", &url]).fails(1, &["can be reached"]);
    assert!(copying.try_wait().unwrap().is_none(), "the read waits");
    server.revive();
    assert!(copying.wait().unwrap().success());
    assert!(std::fs::read(&out).unwrap() == disk);
    wait_until("it says that reads go on", || logged("reads go on"));
    support::signal(exported.0.id(), "TERM");
    exported.0.wait().unwrap();
    let stats: serde_json::Value = serde_json::from_slice(&std::fs::read(&stats).unwrap()).unwrap();
    let image = &stats["image"];
    assert!(image["waits"].as_u64() > Some(0) && image["failures"] == 0, "{image}");
    assert_eq!((&image["servers"], &image["servers_up"]), (&1.into(), &1.into()), "{image}");
}

#[test]
fn a_daemon_ends_while_reads_wait_for_a_bucket_that_is_gone() {
    let dir = support::short_dir();
    let keys = tempfile::tempdir().unwrap();
    let mut server = S3Server::start(keys.path(), served_by());
    server.bucket("lost");
    let url = format!("s3://lost/golden?endpoint=http://{}", server.address());
    let address = format!("unix:{}", dir.path().join("nbd").display());
    let daemon = Daemon::start_in(dir, |command| {
        with_keys(command).args(["--store", &url, "--nbd", &address]).args([
            "--readahead",
            "off",
            "--boot-trace",
            "off",
        ]);
    });
    let raw = daemon.path().join("big.raw");
    std::fs::write(&raw, [support::tiny_disk(), pseudo_random(8 << 20, 3)].concat()).unwrap();
    daemon.cli(&["image", "import", text(&raw)]).ok();
    daemon.create("kept", "big", &["--persistent"]);
    daemon.cli(&["machine", "start", "kept", "--wait"]).ok();
    daemon.cli(&["machine", "stop", "kept", "--force"]).ok();
    let uri = format!("nbd+unix:///kept?socket={}", daemon.path().join("nbd").display());
    let reader = headwater_nbd::Client::open(&uri).unwrap();
    server.kill();
    let reading = std::thread::spawn(move || {
        let mut bytes = vec![0; 64 << 10];
        headwater_block::blocking::read(&*reader, 4 << 20, &mut bytes)
    });
    wait_until("the read waits", || {
        let stats: serde_json::Value = serde_json::from_str(&daemon.cli(&["--json", "stats"]).ok()).unwrap();
        let samples = stats["samples"].as_array().unwrap();
        samples.iter().any(|it| it["metric"] == "headwater_image_servers_up" && it["value"] == 0.0)
    });
    wait_until("the status says so", || {
        let status = daemon.cli(&["--json", "status"]).ok();
        let status: serde_json::Value = serde_json::from_str(&status).unwrap();
        let alarms = status["alarms"].as_array().unwrap();
        status["store_outdated"] == true && alarms.iter().any(|alarm| alarm["subject"] == "store")
    });
    let shown = daemon.cli(&["status"]).ok();
    assert!(
        shown.contains("the store has not answered since") && shown.contains("ALARM: store since"),
        "{shown}"
    );
    let watchdog = support::Watchdog::on(daemon.pid());
    assert_eq!(daemon.terminate().0, Some(0));
    drop(watchdog);
    assert!(reading.join().unwrap().is_err());
}

#[test]
fn an_export_ends_while_a_bucket_does_not_answer() {
    let (data_dir, _) = made_by_a_daemon();
    let dir = support::short_dir();
    let relay = headwater_testkit::HttpRelay::start(server().address());
    server().bucket("silent");
    let url = format!("s3://silent/golden?endpoint=http://{}", relay.address());
    store(&["copy", text(&data_dir.path().join("store")), &url, "disk@1"]).ok();
    relay.fail("GET", "/objects/", headwater_testkit::Fault::Silence, u32::MAX);
    let socket = dir.path().join("nbd");
    let mut command = headwater();
    with_keys(&mut command)
        .args([
            "export",
            "disk",
            "--cache",
            "ram",
            "--from",
            &url,
            "--readahead",
            "off",
            "--boot-trace",
            "off",
        ])
        .arg(format!("--nbd=unix:{}", socket.display()))
        .stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    let mut exported = Served(child);
    let reader = headwater_nbd::Client::open(ready.trim()).unwrap();
    relay.take_seen();
    let reading = std::thread::spawn(move || headwater_block::blocking::read(&*reader, 0, &mut [0; 4096]));
    wait_until("a chunk is asked for", || {
        relay.take_seen().iter().any(|request| request.contains("/objects/"))
    });
    // Nobody knows yet that there will be no answer.
    let watchdog = support::Watchdog::on(exported.0.id());
    support::signal(exported.0.id(), "TERM");
    assert_eq!(exported.0.wait().unwrap().code(), Some(0));
    drop(watchdog);
    assert!(reading.join().unwrap().is_err());
}

#[test]
fn a_machine_is_switched_off_and_a_daemon_ends_while_a_bucket_does_not_answer() {
    let keys = tempfile::tempdir().unwrap();
    let server = S3Server::start(keys.path(), served_by());
    server.bucket("asleep");
    let url = format!("s3://asleep/golden?endpoint=http://{}", server.address());
    let dir = support::short_dir();
    let socket = dir.path().join("nbd");
    // Their boots are being recorded, which is to be kept in the bucket, as are their pins.
    let daemon = Daemon::start_in(dir, |command| {
        with_keys(command).args(["--store", &url, "--nbd", &format!("unix:{}", socket.display())]);
    });
    daemon.with_tiny_machine("first");
    daemon.create("second", "tiny", &[]);
    daemon.create("kept", "tiny", &["--persistent"]);
    for machine in ["first", "second", "kept"] {
        daemon.cli(&["machine", "start", machine, "--wait"]).ok();
    }
    daemon.cli(&["machine", "stop", "kept", "--force"]).ok();
    let reader = headwater_nbd::Client::open(&format!("nbd+unix:///kept?socket={}", socket.display()));
    support::signal(server.pid(), "STOP");
    let watchdog = support::Watchdog::on(daemon.pid());
    daemon.cli(&["machine", "stop", "first", "--force"]).ok();
    assert_eq!(daemon.machine("first")["state"], "stopped");
    drop(watchdog);
    let watchdog = support::Watchdog::on(daemon.pid());
    // Its disk is taken from the reader, who held the version.
    daemon.cli(&["machine", "reset", "kept"]).ok();
    drop(watchdog);
    let watchdog = support::Watchdog::on(daemon.pid());
    // The boot sector knows no ACPI.
    support::signal(daemon.pid(), "TERM");
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert_eq!(daemon.terminate().0, Some(0));
    drop(watchdog);
    drop(reader.unwrap());
}
