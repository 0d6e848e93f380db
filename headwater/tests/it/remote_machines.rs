//! Machines whose images lie on servers, and the boot traces that make them start sooner.

use std::io::BufRead;
use std::path::Path;
use std::process::Stdio;

use crate::support::{self, Daemon, headwater, pseudo_random, run, short_dir, signal, tiny_disk};
use headwater_nbd::Client;
use headwater_testkit::{FileServer, TestTls, wait_until};

/// A data directory with the image `tiny` in its store, which no daemon uses any more.
fn store() -> tempfile::TempDir {
    let daemon = Daemon::start();
    let disk = daemon.path().join("tiny.raw");
    std::fs::write(&disk, tiny_disk()).expect("the disk can be written");
    daemon.cli(&["image", "import", text(&disk)]).ok();
    daemon.terminate().1
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn metric(stats: &str, name: &str) -> f64 {
    let stats: serde_json::Value = serde_json::from_str(stats).expect("JSON");
    let samples = stats["samples"].as_array().expect("samples").iter();
    let found = samples.filter(|sample| sample["metric"] == name).find_map(|sample| sample["value"].as_f64());
    found.unwrap_or_else(|| panic!("no {name} in {stats}"))
}

#[test]
fn run_boots_from_servers_and_goes_on_when_one_of_them_dies() {
    let dir = store();
    let (tls, root) = (TestTls::new(), dir.path().join("store"));
    let (mut a, mut b) = (FileServer::start(&root, Some(&tls)), FileServer::start(&root, Some(&tls)));
    let data = short_dir();
    let ca = data.path().join("ca.pem");
    std::fs::write(&ca, &tls.ca_pem).expect("the authority is written");
    // A file that is called like the image is not what is meant where nothing can be imported.
    std::fs::write(data.path().join("tiny"), "no disk").expect("a file");
    let cache = format!("{}:64M", data.path().join("chunks").display());
    let mut child = headwater()
        .args(["run", "tiny", "--from", &format!("{},{}", a.url(), b.url()), "--ca", text(&ca)])
        .args(["--chunk-cache", &cache, "--chunk-memory", "32M"])
        .args(["--memory", "64M", "--disk", "1G", "--data-dir"])
        .arg(data.path().join("d"))
        .current_dir(data.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let mut out = std::io::BufReader::new(child.stdout.take().expect("piped"));
    let mut said = String::new();
    let watchdog = support::Watchdog::on(child.id());
    while !said.contains("tiny-1 is running, booted in") {
        assert!(out.read_line(&mut said).expect("text") > 0, "it ended after {said:?}");
    }
    drop(watchdog);
    let cli = |args: &[&str]| run(headwater().arg("--data-dir").arg(data.path().join("d")).args(args));
    let stats = cli(&["--json", "stats"]).ok();
    assert!(metric(&stats, "headwater_image_servers") > 1.5, "{stats}");
    assert!(metric(&stats, "headwater_image_requests_total") >= 1.0, "{stats}");
    assert!(metric(&stats, "headwater_image_longest_read_seconds") < 60.0, "{stats}");
    let disk = data.path().join("other.raw");
    std::fs::write(&disk, tiny_disk()).expect("the disk can be written");
    cli(&["image", "import", text(&disk)]).fails(2, &["only read"]);
    a.kill();
    cli(&["machine", "reset", "tiny-1", "--wait"]).ok();
    // What it read is on this host's disk and in memory: the last server may go too, and what is known of the machine stays known.
    b.kill();
    for known in ["status", "stats"] {
        cli(&["--json", known]).ok();
    }
    assert!(cli(&["machine", "list"]).ok().contains("tiny-1"));
    // The boot sector knows no ACPI: the second signal ends it.
    signal(child.id(), "INT");
    std::thread::sleep(std::time::Duration::from_millis(500));
    signal(child.id(), "INT");
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
    // Nothing was kept in the data directory's own store.
    assert!(!data.path().join("d/store/images").exists());
    let gone = run(headwater()
        .args(["run", "tiny", "--from", &a.url(), "--ca", text(&ca), "--data-dir"])
        .arg(data.path().join("e")));
    gone.fails(1, &[&a.url(), "refused"]);
}

#[test]
fn a_machine_tells_how_far_the_copy_of_its_image_is() {
    let daemon = Daemon::start();
    let raw = daemon.path().join("big.raw");
    let disk = [tiny_disk(), pseudo_random(8 << 20, 3)].concat();
    std::fs::write(&raw, disk).expect("the disk can be written");
    daemon.cli(&["image", "import", text(&raw)]).ok();
    let dir = daemon.terminate().1;
    let mut server = FileServer::start(&dir.path().join("store"), None);
    let cache = short_dir();
    let place = format!("{}:64M", cache.path().display());
    let start = |rate: &str| {
        Daemon::start_in(short_dir(), |command| {
            command.args(["--from", &server.url(), "--chunk-cache", &place, "--hydrate", rate]);
        })
    };
    let copied = |daemon: &Daemon| {
        let disk = &daemon.machine("lab")["disk"];
        (disk["copied_bytes"].as_f64().expect("bytes"), disk["to_copy_bytes"].as_f64().expect("bytes"))
    };
    let shown = |daemon: &Daemon| {
        let text = daemon.cli(&["machine", "show", "lab"]).ok();
        text.lines().find(|line| line.starts_with("image on this host")).expect("a line about it").to_owned()
    };

    // At a byte a second it comes no further than its first request.
    let daemon = start("1");
    daemon.create("lab", "big", &[]);
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    wait_until("a part of the image is here", || copied(&daemon).0 > 0.0);
    let (done, whole) = copied(&daemon);
    assert!(done < whole && whole > f64::from(8 << 20), "{done} of {whole}");
    assert!(shown(&daemon).contains(" of 8.0 MiB ("), "{}", shown(&daemon));
    let stats = daemon.cli(&["--json", "stats", "lab"]).ok();
    assert!((metric(&stats, "headwater_hydration_whole_bytes") - whole).abs() < 0.5, "{stats}");
    assert!(metric(&stats, "headwater_hydration_done_bytes") < whole, "{stats}");
    drop(daemon);

    let daemon = start("max");
    daemon.create("lab", "big", &[]);
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    wait_until("all of the image is here", || copied(&daemon) == (whole, whole));
    assert!(shown(&daemon).contains("no server is needed"), "{}", shown(&daemon));
    let stats = daemon.cli(&["--json", "stats", "lab"]).ok();
    assert!((metric(&stats, "headwater_hydration_done_bytes") - whole).abs() < 0.5, "{stats}");

    // Nor does it when it is started again.
    server.kill();
    daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    // The copy is looked through again, in the background.
    wait_until("it knows that all of the image is here", || copied(&daemon) == (whole, whole));
}

#[test]
fn a_machine_whose_image_is_here_does_not_wait_for_servers() {
    let daemon = Daemon::start();
    let disks = [("large", [tiny_disk(), pseudo_random(8 << 20, 3)].concat()), ("small", tiny_disk())];
    for (name, disk) in disks {
        let raw = daemon.path().join(format!("{name}.raw"));
        std::fs::write(&raw, disk).expect("the disk can be written");
        daemon.cli(&["image", "import", text(&raw)]).ok();
    }
    let dir = daemon.terminate().1;
    let mut server = FileServer::start(&dir.path().join("store"), None);
    let cache = short_dir();
    let (place, socket) = (format!("{}:64M", cache.path().display()), cache.path().join("nbd"));
    let nbd = format!("unix:{}", socket.display());
    let daemon = Daemon::start_in(short_dir(), |command| {
        // The small one comes with the first request, and the large one never.
        command.args(["--from", &server.url(), "--chunk-cache", &place, "--hydrate", "1", "--nbd", &nbd]);
    });
    for (name, image) in [("a", "large"), ("b", "small")] {
        daemon.create(name, image, &[]);
        daemon.cli(&["machine", "start", name, "--wait"]).ok();
    }
    let is_here = |name: &str| {
        let disk = &daemon.machine(name)["disk"];
        disk["copied_bytes"] == disk["to_copy_bytes"] && disk["to_copy_bytes"] != 0
    };
    wait_until("all of the small image is here", || is_here("b"));
    assert!(!is_here("a"));
    let large = Client::open(&format!("nbd+unix:///a?socket={}", socket.display())).expect("it opens");
    server.kill();
    // Of the large one only the beginning was read.
    let reading =
        std::thread::spawn(move || headwater_block::blocking::read(&*large, 4 << 20, &mut [0; 512]).is_ok());
    wait_until("there is an alarm", || daemon.machine("a").get("alarm").is_some());
    let alarm = daemon.machine("a")["alarm"]["message"].clone();
    assert!(alarm.as_str().expect("text").contains("no server of its image answers"), "{alarm}");
    assert_eq!(daemon.machine("b").get("alarm"), None);
    server.revive();
    assert!(reading.join().expect("it ends"), "the read failed");
}

#[test]
fn boots_are_recorded_on_demand_and_traces_travel_between_hosts() {
    let daemon = Daemon::start_in(store(), |_| {});
    daemon
        .cli(&["image", "trace", "show", "tiny"])
        .fails(3, &["no boot of tiny@1 was recorded", "trace record"]);
    daemon.cli(&["image", "trace", "show", "none"]).fails(3, &["no image 'none'"]);
    let record = |daemon: &Daemon| {
        daemon.cli(&["image", "trace", "record", "tiny", "--memory", "64M", "--disk", "1G"]).ok()
    };
    let first = record(&daemon);
    assert!(first.starts_with("tiny@1: 1 boot in the first"), "{first}");
    assert!(first.contains("kept in the store, 3 more will be recorded"), "{first}");
    assert!(record(&daemon).starts_with("tiny@1: 2 boots"));
    assert!(!daemon.cli(&["machine", "list"]).ok().contains("trace-"), "its machine is left");

    let saved = daemon.path().join("saved.trace");
    daemon.cli(&["image", "trace", "save", "tiny", text(&saved)]).ok();
    daemon.cli(&["image", "trace", "save", "tiny", text(&saved)]).fails(4, &["exists already"]);
    assert!(daemon.cli(&["image", "trace", "remove", "tiny"]).ok().contains("of 2 boots, is removed"));
    daemon.cli(&["image", "trace", "remove", "tiny"]).fails(3, &["no boot of tiny@1"]);
    daemon.cli(&["image", "trace", "merge", "tiny", text(&saved)]).ok();
    let merged = daemon.cli(&["image", "trace", "merge", "tiny", text(&saved)]).ok();
    assert!(merged.starts_with("tiny@1: 4 boots") && merged.contains("no more are recorded"), "{merged}");
    daemon
        .cli(&["image", "trace", "record", "tiny"])
        .fails(4, &["its trace already has 4 boots", "trace remove tiny@1"]);
    let history = daemon.cli(&["image", "history", "tiny"]).ok();
    assert!(history.contains("boot trace merged") && history.contains("boot trace removed"), "{history}");

    // What is no trace, or that of another version, is refused and changes nothing.
    let junk = daemon.path().join("junk");
    std::fs::write(&junk, "no trace").expect("a file");
    daemon
        .cli(&["image", "trace", "merge", "tiny", text(&junk)])
        .fails(6, &["junk", "its first bytes are wrong"]);
    let mut other = tiny_disk();
    other[700_000] = 1;
    std::fs::write(daemon.path().join("tiny.raw"), other).expect("the disk can be written");
    daemon.cli(&["image", "import", text(&daemon.path().join("tiny.raw"))]).ok();
    daemon.cli(&["image", "trace", "merge", "tiny@2", text(&saved)]).fails(2, &["not of tiny@2"]);
    daemon.cli(&["image", "trace", "merge", "tiny", "/nowhere"]).fails(3, &["/nowhere"]);
    daemon.cli(&["image", "trace", "remove", "tiny@1"]).ok();
    record_other(&daemon);
}

#[test]
fn what_servers_stand_in_the_way_of_is_named_with_what_helps() {
    let dir = store();
    let mut server = FileServer::start(&dir.path().join("store"), None);
    let daemon = Daemon::start_in(short_dir(), |command| {
        command.args(["--from", &server.url()]);
    });
    daemon.create("desk", "tiny", &[]);
    let read_only = format!("cannot change image 'tiny' at {}: a store is only read", server.url());
    for change in [&["promote", "tiny@1", "test"][..], &["retire", "tiny@1"], &["note", "tiny@1", "x"]] {
        daemon.cli(&[&["image"][..], change].concat()).fails(2, &[&read_only]);
    }
    // Of an image that was looked up before, it goes on with what that was then.
    server.kill();
    let why = [
        "cannot find out whether image 'other' exists: no server gives images/other: ",
        "check that this host can reach one",
    ];
    let away = |args: &[&str], tried: &str| daemon.cli(args).fails(1, &[&[tried][..], &why[..]].concat());
    away(&["catalog", "create", "class", "other"], "cannot create catalog 'class': ");
    away(&["image", "pin", "desk", "other@1"], "cannot pin machine 'desk' to 'other@1': ");
    away(&["machine", "create", "lab", "other"], "cannot create machine 'lab': ");
}

#[test]
fn a_boot_that_could_not_be_kept_is_not_begun() {
    let dir = store();
    let server = FileServer::start(&dir.path().join("store"), None);
    let cache = short_dir();
    let place = format!("{}:64M", cache.path().display());
    let no_place: (&[&str], &str) = (&[], "there is no chunk cache on disk");
    let off: (&[&str], &str) =
        (&["--chunk-cache", &place, "--boot-trace", "off"], "the daemon was started with --boot-trace off");
    for (more, why) in [no_place, off] {
        let daemon = Daemon::start_in(short_dir(), |command| {
            command.args(["--from", &server.url()]).args(more);
        });
        let record = ["image", "trace", "record", "tiny", "--memory", "64M", "--disk", "1G"];
        let says = ["cannot record a boot of 'tiny'", why, "--boot-trace off", "--chunk-cache DIR:SIZE"];
        daemon.cli(&record).fails(2, &says);
        // No machine was made for it.
        assert!(!daemon.cli(&["events"]).ok().contains("trace-"));
    }
}

/// A host that reads from servers has their trace, keeps its own beside the chunks, and hands it over as a file.
fn record_other(daemon: &Daemon) {
    let server = FileServer::start(&daemon.path().join("store"), None);
    let cache = short_dir();
    let place = format!("{}:64M", cache.path().display());
    let reader = Daemon::start_in(short_dir(), |command| {
        command.args(["--from", &server.url(), "--chunk-cache", &place]);
    });
    // Machines of a catalog over servers, like any others.
    reader.cli(&["catalog", "create", "lab", "tiny@1", "--memory", "64M", "--disk", "1G"]).ok();
    reader.cli(&["machine", "create", "desk", "--catalog", "lab"]).ok();
    reader.cli(&["machine", "start", "desk", "--wait"]).ok();
    reader.cli(&["machine", "stop", "desk", "--force"]).ok();
    let shown = reader.cli(&["image", "trace", "show", "tiny@1"]).ok();
    assert!(shown.starts_with("tiny@1: 1 boot") && shown.contains("kept on this host"), "{shown}");
    let saved = reader.path().join("saved.trace");
    reader.cli(&["image", "trace", "save", "tiny@1", text(&saved)]).ok();
    let there = daemon.cli(&["image", "trace", "merge", "tiny@1", text(&saved)]).ok();
    assert!(there.starts_with("tiny@1: 1 boot") && there.contains("kept in the store"), "{there}");
    // Now the servers have one that only their host removes.
    reader.cli(&["image", "trace", "remove", "tiny@1"]).fails(4, &["servers", "their host"]);
    assert!(reader.cli(&["image", "trace", "show", "tiny@1"]).ok().contains("kept in the store"));
    reader.cli(&["image", "promote", "tiny@1", "production"]).fails(2, &["only read"]);
    // An edit could never be sealed there.
    let edit = ["image", "edit", "tiny", "--machine", "desk"];
    reader.cli(&edit).fails(
        2,
        &["cannot edit an image on machine 'desk'", "reads its store from servers", "has the store itself"],
    );
    reader.cli(&["machine", "start", "desk", "--wait"]).ok();
    reader.cli(&["machine", "seal", "desk"]).fails(2, &["reads its store from servers"]);
}
