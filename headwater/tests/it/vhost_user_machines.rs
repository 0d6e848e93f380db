//! `headwater export` with a vhost-user socket for each of many machines.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Stdio;

use crate::support::{headwater, run, short_dir, signal};
use headwater_block::blocking;
use headwater_testkit::vhost::{Setup, VhostDisk};

const AT: u64 = 8192;
const BLOCK: usize = 4096;

#[test]
fn each_of_many_sockets_is_a_machine_with_a_disk_of_its_own() {
    let dir = short_dir();
    let stats = dir.path().join("stats.json");
    let sockets: Vec<PathBuf> = (0..5).map(|number| dir.path().join(number.to_string())).collect();
    let mut command = headwater();
    command.args(["export", "null:16M", "--cache", "ram", "--ram", "16M", "--stats"]).arg(&stats);
    for socket in &sockets {
        command.arg("--vhost-user").arg(socket);
    }
    let log = dir.path().join("log");
    let log_file = std::fs::File::create(&log).expect("a log");
    let mut child = command.stdout(Stdio::piped()).stderr(log_file).spawn().expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    for socket in &sockets {
        let line = lines.next().expect("a line for each").expect("text");
        assert_eq!(line, format!("vhost-user:{}", socket.display()));
    }
    let rest = std::thread::spawn(move || lines.map(|line| line.expect("text")).collect::<Vec<_>>());
    // One machine's front-end talks nonsense.
    let mut garbage = UnixStream::connect(&sockets[3]).expect("it listens");
    // It may be thrown out before all is sent.
    let _ = garbage.write_all(&[0xee; 4096]);
    let _ = garbage.read_to_end(&mut Vec::new());
    drop(garbage);
    let setup = Setup { queues: 1, event_idx: true };
    let disks: Vec<_> = sockets.iter().map(|socket| VhostDisk::connect(socket, setup)).collect();
    let of = |number: usize| vec![u8::try_from(number).expect("small") + 1; BLOCK];
    for (number, disk) in disks.iter().enumerate() {
        blocking::write(disk, AT, &of(number)).expect("written");
    }
    for (number, disk) in disks.iter().enumerate() {
        let mut seen = vec![0; BLOCK];
        blocking::read(disk, AT, &mut seen).expect("read");
        assert_eq!(seen, of(number));
    }
    drop(disks);
    signal(child.id(), "TERM");
    assert!(child.wait().expect("it ends").success());
    let shown = rest.join().expect("its output was read");
    for socket in &sockets {
        assert!(shown.contains(&format!("vhost-user:{}", socket.display())), "{shown:?}");
    }
    let log = std::fs::read_to_string(&log).expect("a log");
    for (number, socket) in sockets.iter().enumerate() {
        let is_named = log.contains(&format!("vhost-user: {}: front-end process", socket.display()));
        assert_eq!(is_named, number == 3, "{}: {log}", socket.display());
    }
    let stats: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&stats).expect("counters")).expect("JSON");
    let written: Vec<_> =
        stats["machines"].as_array().expect("a list").iter().map(|m| m["write_ops"].as_u64()).collect();
    assert_eq!(written, [Some(1); 5]);
}

#[test]
fn what_has_one_disk_does_not_go_with_many_sockets() {
    for other in [["--persistent", "lab"], ["--nbd", "unix:/nowhere/nbd"], ["--fuse", "/nowhere"]] {
        let many = ["export", "null:1M", "--vhost-user", "/nowhere/a", "--vhost-user", "/nowhere/b"];
        run(headwater().args(many).args(other)).fails(2, &["2 times", other[0], "an export of its own"]);
    }
}
