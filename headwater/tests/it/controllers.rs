//! Several controllers of one database, and a node: one controller works at a time.

use std::thread::JoinHandle;

use crate::stores::{in_bucket, with_keys};
use crate::support::{Daemon, Ran, headwater, run, short_dir, signal, tiny_disk};
use headwater_testkit::{Postgres, wait_until};
use serde_json::Value;
use tempfile::TempDir;

/// Two controllers. They have the same flags and different ports, which stay the same over restarts.
struct Pair {
    url: String,
    /// A bucket, which both can use.
    store: String,
    /// The directory of the key of the secrets, which the first controller makes and both use.
    common: TempDir,
    ports: [u16; 2],
}

impl Pair {
    fn new(bucket: &str) -> Self {
        let server = Postgres::shared();
        let url = server.url(&server.new_database());
        let listeners = [(); 2].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let ports = listeners.map(|listener| listener.local_addr().unwrap().port());
        Self { url, store: in_bucket(bucket), common: short_dir(), ports }
    }

    fn nodes_url(&self, which: usize) -> String {
        format!("https://127.0.0.1:{}", self.ports[which])
    }

    fn flags(&self, which: usize) -> Vec<String> {
        let nodes = format!("127.0.0.1:{}", self.ports[which]);
        let key = self.common.path().join("secrets.key").display().to_string();
        let flags = ["--standby", "--database", &self.url, "--secrets-key", &key, "--nodes", &nodes];
        [&flags[..], &["--store", &self.store]].concat().into_iter().map(str::to_owned).collect()
    }

    /// Starts one, which is waited for until it works.
    fn start(&self, which: usize, dir: TempDir) -> JoinHandle<Daemon> {
        let flags = self.flags(which);
        std::thread::spawn(move || {
            Daemon::start_in(dir, |command| {
                with_keys(command).args(&flags);
            })
        })
    }
}

fn node_list(daemon: &Daemon) -> Vec<Value> {
    let list: Value = serde_json::from_str(&daemon.cli(&["--json", "node", "list"]).ok()).unwrap();
    list["hosts"].as_array().unwrap().clone()
}

fn is_up(daemon: &Daemon, name: &str) -> bool {
    node_list(daemon).iter().any(|host| host["name"] == name && host["state"] == "up")
}

fn join(pair: &Pair, dir: &TempDir, token: &str) -> Ran {
    let urls = [pair.nodes_url(1), pair.nodes_url(0)];
    let mut command = headwater();
    let command = command.arg("--data-dir").arg(dir.path()).args(["node", "join"]).args(urls);
    run(command.args(["--token", token, "--name", "b"]))
}

/// A controller that works, with a machine on a node.
fn with_node(pair: &Pair) -> (Daemon, Daemon) {
    let first = pair.start(0, short_dir()).join().unwrap();
    let disk = first.path().join("tiny.raw");
    std::fs::write(&disk, tiny_disk()).unwrap();
    first.cli(&["image", "import", disk.to_str().unwrap()]).ok();
    let dir = short_dir();
    let token = first.cli(&["node", "token"]).ok();
    // The second URL is that of the controller which works.
    join(pair, &dir, token.trim()).ok();
    let node = Daemon::start_in(dir, |command| {
        with_keys(command).args(["--store", &pair.store]);
    });
    wait_until("the node is connected", || is_up(&first, "b"));
    (first, node)
}

#[test]
fn another_controller_goes_on_when_one_is_killed() {
    let pair = Pair::new("one-is-killed");
    let (first, node) = with_node(&pair);
    let second = pair.start(1, short_dir());
    first.create("there", "tiny", &["--host", "b"]);
    // Machines belong on nodes here.
    assert!(node_list(&first).iter().any(|host| host["own"] == true && host["cordoned"] == true));
    first.cli(&["machine", "start", "there", "--wait"]).ok();
    let pid = node.machine("there")["pid"].as_u64().unwrap();
    assert!(!second.is_finished(), "two controllers work at a time");

    let first_dir = first.kill();
    let second = second.join().unwrap();
    wait_until("its node says that the machine runs as before", || {
        let machine = second.machine("there");
        machine["state"] == "running" && machine["pid"].as_u64() == Some(pid)
    });
    second.console("there", "w", Some("W"));
    assert!(second.history("there").contains("created"));
    second.cli(&["machine", "reset", "there", "--wait"]).ok();

    // The first one is back, waits, and has its turn as soon as the second one ends in order.
    let first = pair.start(0, first_dir);
    second.cli(&["machine", "stop", "there", "--force"]).ok();
    assert!(!first.is_finished(), "two controllers work at a time");
    let (code, _second_dir) = second.terminate();
    assert_eq!(code, Some(0));
    let first = first.join().unwrap();
    // The database says that the host is up also before that.
    wait_until("the node is connected again", || {
        first.cli(&["machine", "start", "there", "--wait"]).code == 0
    });
    first.cli(&["machine", "stop", "there", "--force"]).ok();
}

#[test]
fn a_controller_that_stood_still_ends_when_another_one_has_the_database() {
    let pair = Pair::new("one-stands-still");
    let (mut first, node) = with_node(&pair);
    first.create("there", "tiny", &["--host", "b"]);
    let second = pair.start(1, short_dir());
    signal(first.pid(), "STOP");
    let second = second.join().unwrap();
    // The node notices that nobody answers.
    wait_until("the node is connected to the second one", || {
        second.cli(&["machine", "start", "there", "--wait"]).code == 0
    });
    signal(first.pid(), "CONT");
    assert_eq!(first.wait(), Some(4), "it goes on beside another controller");
    first.wait_for_log(&["another controller may have the database", "was taken over by the daemon of"]);
    assert_eq!(second.machine("there")["state"], "running");
    assert_eq!(node.machine("there")["state"], "running");
    second.cli(&["machine", "stop", "there", "--force"]).ok();
}
