//! Several hosts: a controller and its nodes, as daemons on this host.

use std::io::Write;
use std::process::Command;

use crate::support::{Daemon, Ran, headwater, run, short_dir, tiny_disk};
use headwater_testkit::wait_until;
use serde_json::Value;

/// A controller that offers its store.
pub struct Controller {
    pub daemon: Daemon,
    pub flags: Vec<String>,
}

impl Controller {
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// One with more flags.
    fn start_with(more: &[&str]) -> Self {
        // The port for nodes stays the same over a restart.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let store = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let flags = [
            "--nodes".to_owned(),
            format!("127.0.0.1:{port}"),
            "--store-listen".to_owned(),
            format!("127.0.0.1:{store}"),
        ];
        let flags: Vec<String> =
            flags.into_iter().chain(more.iter().map(|flag| (*flag).to_owned())).collect();
        let daemon = Daemon::start_in(short_dir(), |command| {
            command.args(&flags);
        });
        Self { daemon, flags }
    }

    fn url(&self) -> String {
        format!("https://{}", self.flags[1])
    }

    fn store(&self) -> String {
        format!("http://{}", self.flags[3])
    }

    fn token(&self) -> String {
        self.daemon.cli(&["node", "token"]).ok().trim().to_owned()
    }

    pub fn again(dir: tempfile::TempDir, flags: Vec<String>) -> Self {
        let daemon = Daemon::start_in(dir, |command| {
            command.args(&flags);
        });
        Self { daemon, flags }
    }

    fn host(&self, name: &str) -> Value {
        let list = self.daemon.cli(&["--json", "node", "list"]).ok();
        let list: Value = serde_json::from_str(&list).unwrap();
        let hosts = list["hosts"].as_array().unwrap();
        hosts.iter().find(|host| host["name"] == name).cloned().unwrap_or_default()
    }

    /// Has new machines go to nodes only.
    fn cordon_own(&self) {
        let list = self.daemon.cli(&["--json", "node", "list"]).ok();
        let list: Value = serde_json::from_str(&list).unwrap();
        let own = list["hosts"].as_array().unwrap().iter().find(|host| host["own"] == true).unwrap();
        self.daemon.cli(&["node", "cordon", own["name"].as_str().unwrap()]).ok();
    }

    pub fn wait_for_host(&self, name: &str, state: &str) {
        wait_until(format!("host {name} is {state}"), || self.host(name)["state"] == state);
    }

    /// A node that has joined and is connected.
    pub fn node(&self, name: &str) -> Daemon {
        let dir = short_dir();
        join(dir.path(), &self.url(), &self.token(), name).ok();
        let node = self.start_node(dir);
        self.wait_for_host(name, "up");
        node
    }

    fn start_node(&self, dir: tempfile::TempDir) -> Daemon {
        let (store, chunks) = (self.store(), dir.path().join("chunks"));
        Daemon::start_in(dir, |command: &mut Command| {
            // A copy of the whole version: starts need no server then.
            let chunks = chunks.display();
            command.args(["--store", &store, "--hydrate", "max"]).arg(format!("--chunk-cache={chunks}:64M"));
        })
    }
}

fn join(dir: &std::path::Path, url: &str, token: &str, name: &str) -> Ran {
    let mut command = headwater();
    run(command.arg("--data-dir").arg(dir).args(["node", "join", url, "--token", token, "--name", name]))
}

#[test]
fn a_machine_of_a_node_is_used_through_its_controller() {
    let controller = Controller::start();
    let daemon = &controller.daemon;
    daemon.with_tiny_machine("here");
    // One host alone is not named.
    assert!(!daemon.cli(&["machine", "list"]).ok().contains("HOST"));
    let node = controller.node("b");
    daemon.create("there", "tiny", &["--host", "b"]);
    let list = daemon.cli(&["machine", "list"]).ok();
    assert!(list.contains("HOST") && list.lines().any(|line| line.contains("there") && line.contains(" b ")));
    daemon.cli(&["machine", "start", "there", "--wait"]).ok();
    // It runs on the node, and not here.
    let machine = daemon.machine("there");
    assert_eq!((&machine["host"], &machine["state"]), (&"b".into(), &"running".into()));
    assert_eq!(node.machine("there")["pid"], machine["pid"]);
    assert_eq!(node.machine("there")["uuid"], machine["uuid"]);
    assert!(node.path().join("run/there").is_dir() && !daemon.path().join("run/there").exists());
    assert!(machine["disk"]["reads"].as_u64().unwrap() > 0, "{machine}");
    assert!(daemon.cli(&["stats", "there"]).ok().contains("there"));
    // Its console, both ways, and its log.
    daemon.console("there", "w", Some("W"));
    wait_until("the log has what was printed", || {
        daemon.cli(&["machine", "console", "there", "--log"]).ok().contains("0 writes")
    });
    // Its write cache is scanned where it runs: a tiny disk has no file system.
    let scanned = daemon.cli(&["cache", "contents", "there", "--by", "kind"]).ok();
    assert!(scanned.contains("4.0 KiB") && scanned.contains("unknown"), "{scanned}");
    wait_until("the history has the scan", || daemon.history("there").contains("cache scanned"));
    daemon.cli(&["machine", "reset", "there", "--wait"]).ok();
    daemon.console("there", "w", Some("W"));
    // A guest that switches itself off is noticed by the controller, which has the events of the node.
    daemon.console("there", "p", None);
    daemon.wait_for("there", "stopped");
    wait_until("the history has the events of the node", || {
        let history = daemon.history("there");
        history.contains("(host b)") && history.contains("by controller")
    });
    let set = daemon.cli(&["machine", "set", "there", "--ram", "32M", "--memory", "80M"]).ok();
    assert!(set.contains("RAM 32.0 MiB"), "{set}");
    assert_eq!(node.machine("there")["cache"]["ram_bytes"], 32 << 20);
    daemon.cli(&["image", "pin", "there", "tiny@1"]).ok();
    wait_until("the node has the pin", || node.machine("there")["pin"] == "tiny@1");
    // The node does what the controller says, and changes nothing by itself that the controller keeps.
    node.cli(&["machine", "remove", "there"]).fails(4, &["its controller", "manages that"]);
    node.cli(&["machine", "create", "own", "tiny"]).fails(4, &["its controller"]);
    daemon.cli(&["image", "edit", "tiny", "--machine", "there"]).fails(4, &["it is on host 'b'"]);
    daemon.cli(&["machine", "remove", "there"]).ok();
    assert!(!node.cli(&["machine", "list"]).ok().contains("there"));
    assert!(!daemon.cli(&["machine", "list"]).ok().contains("there"));
    drop(node);
}

#[test]
fn machines_of_a_node_go_on_while_the_controller_is_away() {
    let controller = Controller::start();
    controller.daemon.with_tiny_machine("here");
    let node = controller.node("b");
    for name in ["one", "two"] {
        controller.daemon.create(name, "tiny", &["--host", "b"]);
    }
    controller.daemon.cli(&["machine", "start", "one", "--wait"]).ok();
    let pid = node.machine("one")["pid"].clone();
    let flags = controller.flags.clone();
    let dir = controller.daemon.kill();
    node.wait_for_log(&["connection to the controller"]);
    // It was started before, and is known in full.
    assert_eq!(node.machine("one")["disk"]["copied_bytes"], node.machine("one")["disk"]["to_copy_bytes"]);
    assert_eq!((&node.machine("one")["state"], &node.machine("one")["pid"]), (&"running".into(), &pid));
    // A start and a stop are the node's own.
    node.cli(&["machine", "stop", "one", "--force"]).ok();
    node.cli(&["machine", "start", "two", "--wait"]).ok();
    // The store of the controller is back with it.
    let controller = Controller::again(dir, flags);
    controller.wait_for_host("b", "up");
    controller.daemon.wait_for("one", "stopped");
    controller.daemon.wait_for("two", "running");
    let pid = node.machine("two")["pid"].clone();
    // The node goes away without a word: its machine goes on, and nobody knows.
    let dir = node.kill();
    controller.daemon.cli(&["machine", "start", "one"]).fails(1, &["host 'b' is not connected"]);
    controller.daemon.cli(&["machine", "remove", "one"]).fails(1, &["host 'b' is not connected"]);
    controller.wait_for_host("b", "lost");
    let lost = controller.daemon.machine("two");
    assert_eq!(lost["state"], "unknown", "{lost}");
    assert!(lost["reason"].as_str().unwrap().contains("host 'b' is lost"), "{lost}");
    let node = controller.start_node(dir);
    controller.wait_for_host("b", "up");
    controller.daemon.wait_for("two", "running");
    assert_eq!((&node.machine("two")["state"], &node.machine("two")["pid"]), (&"running".into(), &pid));
}

#[test]
fn a_node_that_may_not_join_or_connect_is_told_why() {
    let controller = Controller::start();
    let (daemon, url) = (&controller.daemon, controller.url());
    let dir = short_dir();
    join(dir.path(), &url, "hwj_x", "b").fails(2, &["not a join token"]);
    let token = controller.token();
    let other = Controller::start();
    join(dir.path(), &other.url(), &token, "b").fails(1, &["is not the controller of this fleet"]);
    join(dir.path(), &url, &token, "B_").fails(2, &["host"]);
    let own = controller.daemon.cli(&["--json", "node", "list"]).ok();
    let own: Value = serde_json::from_str(&own).unwrap();
    let taken = own["hosts"][0]["name"].as_str().unwrap();
    // The name of the controller's own host may be no name of a node; then that is what is refused.
    assert_ne!(join(dir.path(), &url, &token, taken).code, 0);
    assert!(!dir.path().join("node").exists());
    join(dir.path(), &url, &token, "b").ok();
    join(dir.path(), &url, &token, "b").fails(4, &["has joined the fleet of", "already"]);
    join(short_dir().path(), &url, &token, "c").fails(1, &["host 'b' has joined with this token"]);
    join(short_dir().path(), &url, &controller.token(), "b").fails(4, &["there is a host 'b' already"]);
    // A refused name uses no token up.
    let short = daemon.cli(&["node", "token", "--expires", "1s"]).ok();
    wait_until("a token ends", || {
        join(short_dir().path(), &url, short.trim(), "b").err.contains("the join token ended at")
    });
    daemon.cli(&["node", "token", "--expires", "2d"]).fails(2, &["86400"]);
    // A host with machines of its own.
    let full = Daemon::start();
    full.with_tiny_machine("lab");
    let (_, full) = full.terminate();
    join(full.path(), &url, &controller.token(), "c").fails(4, &["1 machine(s)"]);

    // A copy of a node is refused while the node is connected.
    let copy = short_dir();
    for name in ["node", "daemon.id"] {
        let from = dir.path().join(name);
        assert!(Command::new("cp").arg("-a").arg(from).arg(copy.path()).status().unwrap().success());
    }
    let node = controller.start_node(dir);
    controller.wait_for_host("b", "up");
    let second = controller.start_node(copy);
    second.wait_for_log(&["a node of host 'b' is connected already, from 127.0.0.1"]);
    assert_eq!(controller.host("b")["state"], "up");
    drop(second);
    // A node is no controller.
    let (_, dir) = node.terminate();
    let refused = run(headwater().args(["serve", "--nodes", "127.0.0.1:0", "--data-dir"]).arg(dir.path()));
    assert!(refused.code == 4 && refused.err.contains("has no nodes of its own"), "{refused:?}");
    // The certificate of another fleet, for a node that knows this controller's authority.
    let stranger = short_dir();
    join(stranger.path(), &other.url(), &other.token(), "b").ok();
    for name in ["ca.pem", "fleet.json"] {
        std::fs::copy(dir.path().join("node").join(name), stranger.path().join("node").join(name)).unwrap();
    }
    let stranger = controller.start_node(stranger);
    stranger.wait_for_log(&["does not accept the certificate of this node"]);
    drop(stranger);
    // A host that was removed.
    let node = controller.start_node(dir);
    controller.wait_for_host("b", "up");
    daemon.cli(&["node", "remove", "b"]).ok();
    node.wait_for_log(&["the host of this certificate was removed from the fleet"]);
    // It joins again, with the directory of its certificate removed.
    let (_, dir) = node.terminate();
    std::fs::remove_dir_all(dir.path().join("node")).unwrap();
    let mut again = headwater();
    again.arg("--data-dir").arg(dir.path()).args(["node", "join", &url, "--token", "-", "--name", "b"]);
    let (reader, mut writer) = std::io::pipe().unwrap();
    writeln!(writer, "{}", controller.token()).unwrap();
    drop(writer);
    Ran::from(again.stdin(reader).output().unwrap()).ok();
    let node = controller.start_node(dir);
    controller.wait_for_host("b", "up");
    daemon.cli(&["node", "remove", "b"]).ok();
    drop(node);
    daemon.cli(&["node", "show", "b"]).fails(3, &["no host 'b'"]);
    assert_eq!(daemon.cli(&["node", "list"]).ok().lines().count(), 2);
    let own = own["hosts"][0]["name"].as_str().unwrap();
    daemon.cli(&["node", "remove", own]).fails(4, &["the controller's own host"]);
}

#[test]
fn a_catalog_is_spread_over_hosts_that_are_not_cordoned() {
    let controller = Controller::start();
    let daemon = &controller.daemon;
    daemon.with_tiny_machine("here");
    let _nodes = [controller.node("b"), controller.node("c")];
    daemon.cli(&["node", "cordon", "c"]).ok();
    daemon.cli(&["machine", "create", "x", "tiny", "--host", "c"]).fails(4, &["it is cordoned"]);
    daemon.cli(&["machine", "create", "x", "tiny", "--host", "d"]).fails(3, &["no such host"]);
    let small = ["--memory", "67109864", "--disk", "1G"];
    let create = ["catalog", "create", "class", "tiny", "--count", "4"];
    daemon.cli(&[&create[..], &small].concat()).ok();
    let hosts = |of: &str| -> Vec<String> {
        let list: Value = serde_json::from_str(&daemon.cli(&["--json", "machine", "list", of]).ok()).unwrap();
        let machines = list["machines"].as_array().unwrap().iter();
        machines.map(|machine| machine["host"].as_str().unwrap().to_owned()).collect()
    };
    let spread = hosts("catalog:class");
    let on = |host: &str| spread.iter().filter(|it| *it == host).count();
    assert_eq!((spread.len(), on("b"), on("c")), (4, 2, 0), "{spread:?}");
    daemon.cli(&["node", "uncordon", "c"]).ok();
    let list: Value = serde_json::from_str(&daemon.cli(&["--json", "node", "list"]).ok()).unwrap();
    let own = list["hosts"].as_array().unwrap().iter().find(|host| host["own"] == true).unwrap();
    let own = own["name"].as_str().unwrap();
    daemon.cli(&["node", "cordon", own]).ok();
    daemon.cli(&["machine", "create", "x", "tiny"]).fails(4, &["it is cordoned"]);
    daemon.cli(&["node", "uncordon", own]).ok();
    daemon.cli(&["catalog", "scale", "class", "6", "--start"]).ok();
    assert_eq!(hosts("catalog:class").iter().filter(|host| *host == "c").count(), 2);
    daemon.cli(&["node", "remove", "b"]).fails(4, &["it has 2 machine(s)"]);
    // A machine of a node that may keep a disk stays unless that is forced.
    daemon.cli(&["machine", "create", "kept", "--catalog", "class", "--host", "b", "--persistent"]).ok();
    daemon.cli(&["catalog", "scale", "class", "0"]).fails(4, &["kept"]);
    daemon.cli(&["catalog", "scale", "class", "0", "--force"]).ok();
    assert!(hosts("catalog:class").is_empty());
    daemon.cli(&["node", "remove", "b"]).ok();
}

/// Whether a process is there and is not one that has ended and was not waited for.
fn is_alive(pid: u64) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    state.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with('Z'))
}

#[test]
fn machines_of_a_lost_host_run_on_another_one() {
    let controller = Controller::start_with(&["--node-lease", "8s"]);
    let daemon = &controller.daemon;
    daemon.with_tiny_machine("here");
    let (b, c) = (controller.node("b"), controller.node("c"));
    controller.cordon_own();
    daemon.cli(&["node", "cordon", "c"]).ok();
    let small = ["--memory", "67109864", "--disk", "1G"];
    let refused = ["catalog", "create", "no", "tiny", "--persistent", "--on-host-loss", "restart"];
    daemon.cli(&refused).fails(2, &["they have persistent disks"]);
    for (name, what) in [("moves", "restart"), ("stays", "wait")] {
        let rule = format!("{name}-#");
        let create =
            ["catalog", "create", name, "tiny", "--count", "2", "--name", &rule, "--on-host-loss", what];
        daemon.cli(&[&create[..], &small].concat()).ok();
    }
    daemon.cli(&["node", "uncordon", "c"]).ok();
    for name in ["moves-1", "stays-1"] {
        daemon.cli(&["machine", "start", name, "--wait"]).ok();
    }
    let pid_of = |name: &str| b.machine(name)["pid"].as_u64().unwrap();
    let (moves, stays) = (pid_of("moves-1"), pid_of("stays-1"));
    wait_until("the node ends the machine if it is cut off", || daemon.machine("moves-1")["fenced"] == true);

    // The daemon of the node is killed: its machines go on, and the guard ends those that move.
    let dir = b.kill();
    wait_until("the machine runs on the other host", || {
        let machine = daemon.machine("moves-1");
        machine["host"] == "c" && machine["state"] == "running"
    });
    assert!(!is_alive(moves), "a machine runs on two hosts");
    assert!(is_alive(stays));
    assert_eq!(c.machine("moves-1")["state"], "running");
    let off = daemon.machine("moves-2");
    assert_eq!((&off["host"], &off["wanted"]), (&"c".into(), &"stopped".into()));
    let lost = daemon.machine("stays-1");
    assert_eq!((&lost["host"], &lost["state"]), (&"b".into(), &"unknown".into()));
    assert!(daemon.history("moves-1").contains("from host 'b', which is lost, to host 'c'"));

    // The node is back: it removes what is another host's, and has the others still.
    let b = controller.start_node(dir);
    controller.wait_for_host("b", "up");
    wait_until("the node has removed the machines", || !b.cli(&["machine", "list"]).ok().contains("moves-"));
    daemon.wait_for("stays-1", "running");
    assert_eq!(b.machine("stays-1")["pid"].as_u64(), Some(stays));
    assert_eq!(c.machine("moves-1")["state"], "running");

    // Without its controller, a node ends the machine itself, and starts it again when the controller is back.
    let flags = controller.flags.clone();
    let dir = controller.daemon.kill();
    wait_until("the machine is off", || c.machine("moves-1")["state"] == "stopped");
    c.cli(&["machine", "start", "moves-1"]).fails(1, &["has had no contact with its controller"]);
    assert_eq!(b.machine("stays-1")["state"], "running");
    let _controller = Controller::again(dir, flags);
    wait_until("the machine runs again", || c.machine("moves-1")["state"] == "running");
    c.cli(&["machine", "stop", "moves-1", "--force"]).ok();
    b.cli(&["machine", "stop", "stays-1", "--force"]).ok();
}

#[test]
fn a_drained_host_keeps_only_machines_that_cannot_move() {
    let controller = Controller::start();
    let daemon = &controller.daemon;
    daemon.with_tiny_machine("here");
    let (b, c) = (controller.node("b"), controller.node("c"));
    controller.cordon_own();
    let small = ["--memory", "67109864", "--disk", "1G"];
    let create = ["catalog", "create", "class", "tiny", "--count", "4", "--name", "class-#"];
    daemon.cli(&[&create[..], &small].concat()).ok();
    daemon.cli(&["machine", "create", "kept", "--catalog", "class", "--host", "b", "--persistent"]).ok();
    daemon.create("single", "tiny", &["--host", "b"]);
    let of_b: Vec<String> = (1..=4)
        .map(|number| format!("class-{number}"))
        .filter(|name| daemon.machine(name)["host"] == "b")
        .collect();
    let [on, off] = &of_b[..] else { panic!("two of four machines are on b, and not {of_b:?}") };
    daemon.cli(&["machine", "start", on, "--wait"]).ok();
    let uuid = daemon.machine(on)["uuid"].clone();

    daemon.cli(&["node", "drain", "d"]).fails(3, &["no host 'd'"]);
    // Tiny disks have no guest that answers the power button: a stop waits for half a minute, and then it kills.
    let drained = daemon.cli(&["node", "drain", "b"]).ok();
    for said in [
        &*format!("moved {off} to c\nmoved {on} to c\n"),
        "not moved: kept has a persistent write cache",
        "not moved: single has no catalog",
        "2 machines moved from b",
    ] {
        assert!(drained.contains(said), "{said} is not in {drained}");
    }
    daemon.wait_for(on, "running");
    let moved = c.machine(on);
    assert_eq!((&moved["uuid"], &moved["state"]), (&uuid, &"running".into()));
    assert_eq!(c.machine(off)["wanted"], "stopped");
    let left = b.cli(&["machine", "list"]).ok();
    assert!(left.contains("kept") && left.contains("single") && !left.contains("class-"), "{left}");
    assert!(controller.host("b")["cordoned"] == true);
    assert!(daemon.history(on).contains("from host 'b' to host 'c'"));
    // No host has so much, and nothing is made.
    let big = ["catalog", "create", "big", "tiny", "--memory", "1G", "--count", "9999", "--start"];
    daemon
        .cli(&big)
        .fails(4, &["cannot give catalog 'big' 9999 machines", "no host has room for", "'c' has"]);
    assert!(!daemon.cli(&["machine", "list"]).ok().contains("big-"));
    // No host is left for new machines.
    daemon.cli(&["node", "cordon", "c"]).ok();
    daemon
        .cli(&["catalog", "scale", "class", "6"])
        .fails(4, &["no host has room for", "'b' is cordoned", "'c' is cordoned"]);
    let drained = daemon.cli(&["node", "drain", "c"]).ok();
    assert!(drained.contains("not moved: class-1 stays: no host has room for"), "{drained}");
    daemon.cli(&["machine", "stop", on, "--force"]).ok();
}

#[test]
fn a_roll_moves_machines_of_nodes_and_takes_them_back() {
    let controller = Controller::start();
    let daemon = &controller.daemon;
    let import = |number: u8| {
        let disk = daemon.path().join("tiny.raw");
        let mut bytes = tiny_disk();
        // Another version.
        bytes[512] = number;
        std::fs::write(&disk, bytes).unwrap();
        daemon.cli(&["image", "import", disk.to_str().unwrap()]).ok();
    };
    import(1);
    let node = controller.node("b");
    controller.cordon_own();
    let small = ["--memory", "67109864", "--disk", "1G"];
    let create = ["catalog", "create", "class", "tiny@1", "--count", "2", "--name", "class-#", "--start"];
    daemon.cli(&[&create[..], &small].concat()).ok();
    for name in ["class-1", "class-2"] {
        daemon.wait_for(name, "running");
    }
    import(2);
    let before = node.machine("class-2")["pid"].clone();
    // No agent answers in a boot sector, so the canary is taken back.
    let roll = ["catalog", "roll", "class", "--to", "tiny@2"];
    let checked = [&roll[..], &["--health", "true", "--health-timeout", "1s"]].concat();
    daemon.cli(&checked).fails(1, &["class-1", "cannot be checked", "taken back to tiny@1"]);
    daemon.wait_for("class-1", "running");
    assert_eq!(node.machine("class-1")["version"], "tiny@1");
    assert_eq!(node.machine("class-2")["pid"], before, "a machine that is no canary was touched");

    let rolled = daemon.cli(&[&roll[..], &["--batch", "1"]].concat()).ok();
    assert!(rolled.contains("2 machines of class moved from tiny@1 to tiny@2\n"), "{rolled}");
    for name in ["class-1", "class-2"] {
        assert_eq!(node.machine(name)["version"], "tiny@2");
    }
    daemon.cli(&["machine", "stop", "class-1", "class-2", "--force"]).ok();
}
