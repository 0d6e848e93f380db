//! `headwater attach` and `detach` where they refuse, which needs no block device; what they do with one is in `guest/attach-test`.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::support::{headwater, run, short_dir};

/// Warnings of a host where little memory may be locked do not belong to what is tested.
const ATTACH: [&str; 6] = ["attach", "null:1M", "--cache", "ram", "--log", "error"];

#[test]
fn a_device_that_is_not_there_cannot_be_detached() {
    let detach = |device: &str| run(headwater().args(["detach", device]));
    detach("no-such-device").fails(3, &["'no-such-device'", "headwater attachments"]);
    detach("/dev/ublkb999").fails(3, &["'/dev/ublkb999'"]);
}

#[test]
fn names_that_are_none_are_refused_before_anything_else() {
    let attach = |args: &[&str]| run(headwater().args(ATTACH).args(args));
    for name in ["a b", "../up", ".hidden", "", "/dev/sda/1", &"x".repeat(64)] {
        attach(&["--device", name]).fails(2, &[&format!("'{name}'"), "1 to 63 letters"]);
    }
    attach(&["--device", "nbd0", "--via", "ublk"]).fails(2, &["nbd0 is not a device of --via ublk"]);
    attach(&["--device", "/dev/ublkb3", "--via", "nbd"]).fails(2, &["ublkb3 is not a device of --via nbd"]);
    assert_eq!(attach(&["--queues", "0"]).code, 2);
    assert_eq!(attach(&["--via", "floppy"]).code, 2);
}

#[test]
fn who_is_not_root_is_told_so() {
    let dir = short_dir();
    let mut command = if rustix::process::geteuid().is_root() {
        // Another user may not reach the program where it was built.
        let program = dir.path().join("headwater");
        let built = env!("CARGO_BIN_EXE_headwater");
        std::fs::hard_link(built, &program)
            .or_else(|_| std::fs::copy(built, &program).map(drop))
            .expect("copied");
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).expect("changed");
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(program);
        command
    } else {
        headwater()
    };
    run(command.args(ATTACH)).fails(1, &["cannot attach 'null:1M'", "only be made by root", "--fuse"]);
}
