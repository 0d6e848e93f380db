//! What domains of libvirt need of `headwater`, without libvirt: XML for the addresses that an export prints, and word for
//! the service manager when their disks are served. `tests/libvirt.rs` has the domains.

use std::io::{BufRead, BufReader};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::Stdio;
use std::time::Duration;

use crate::support::{headwater, run, short_dir, signal};

#[test]
fn an_export_is_ready_when_its_sockets_accept_domains() {
    let dir = short_dir();
    let notify = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    notify.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let (disk, nbd) = (dir.path().join("disk.sock"), dir.path().join("nbd.sock"));
    let mut export = headwater()
        .env("NOTIFY_SOCKET", dir.path().join("notify"))
        .args(["export", "null:16M", "--cache", "ram", "--ram", "64M", "--vhost-user"])
        .arg(&disk)
        .arg(format!("--nbd=unix:{}", nbd.display()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut message = [0; 200];
    let n = notify.recv(&mut message).unwrap();
    assert_eq!(String::from_utf8_lossy(&message[..n]).trim(), "READY=1");
    for socket in [&disk, &nbd] {
        UnixStream::connect(socket).unwrap();
    }
    let lines = BufReader::new(export.stdout.take().unwrap()).lines().take(2);
    let addresses: Vec<String> = lines.map(Result::unwrap).collect();
    for (address, socket) in [(&addresses[0], &nbd), (&addresses[1], &disk)] {
        let xml = run(headwater().args(["libvirt", "disk", address])).ok();
        assert!(xml.contains(&format!("='{}'", socket.display())), "{address}: {xml}");
        let json = run(headwater().args(["--json", "libvirt", "domain", "desk-1", address])).ok();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert!(json["xml"].as_str().unwrap().contains("<name>desk-1</name>"), "{json}");
    }
    signal(export.id(), "TERM");
    assert_eq!(export.wait().unwrap().code(), Some(0));
}

#[test]
fn addresses_without_a_socket_of_this_host_are_refused() {
    run(headwater().args(["libvirt", "disk", "nbd://host/x"]))
        .fails(2, &["nbd://host/x", "unix socket of its host"]);
    run(headwater().args(["libvirt", "domain", "desk 1", "vhost-user:/run/s"])).fails(2, &["desk 1"]);
    for wrong in [["--target", "sda"], ["--target", "vd1"]] {
        assert_eq!(
            run(headwater().args(["libvirt", "disk", "vhost-user:/run/s"]).args(wrong)).code,
            2,
            "{wrong:?}"
        );
    }
}
