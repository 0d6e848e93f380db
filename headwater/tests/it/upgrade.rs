//! `headwater upgrade`: another program serves the disks, and machines go on.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::support::{Daemon, headwater, is_alive, run, short_dir, signal};

/// A program that is a script. `$0` of the script is of no use; `$REAL` is this project's program.
fn script(dir: &Path, name: &str, text: &str) -> PathBuf {
    let path = dir.join(name);
    let text = format!("#!/bin/sh\nREAL={}\n{text}\n", env!("CARGO_BIN_EXE_headwater"));
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn machines_go_on_when_another_program_serves_their_disks() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("ran");
    daemon.create("kept", "tiny", &["--persistent", "--scratch", "64M"]);
    for machine in ["ran", "kept"] {
        daemon.cli(&["machine", "start", machine, "--wait"]).ok();
        daemon.console(machine, "w", Some("W"));
    }
    let pid = |machine: &str| daemon.machine(machine)["pid"].as_u64().unwrap();
    let before = (pid("ran"), pid("kept"), daemon.disk_process());
    for _ in 0..2 {
        let said = daemon.cli(&["upgrade"]).ok();
        assert!(said.contains("serves the disks of 2 machines"), "{said}");
        for machine in ["ran", "kept"] {
            daemon.console(machine, "w", Some("W"));
        }
    }
    assert_eq!((pid("ran"), pid("kept")), (before.0, before.1));
    assert_ne!(daemon.disk_process(), before.2);
    // A persistent disk is saved by the process that had it, and a crash after that ends its machine.
    signal(daemon.disk_process(), "KILL");
    daemon.wait_for("kept", "crashed");
    assert!(!is_alive(before.1));
    daemon.console("ran", "w", Some("W"));
    daemon.cli(&["machine", "start", "kept", "--wait"]).ok();
    assert!(daemon.cli(&["machine", "console", "kept", "--log"]).ok().contains("3 writes"));
}

#[test]
fn programs_that_cannot_take_the_disks_over_change_nothing() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("ran");
    daemon.cli(&["machine", "start", "ran", "--wait"]).ok();
    daemon.console("ran", "w", Some("W"));
    let before = daemon.disk_process();
    let dir = daemon.path();
    let foreign = dir.join("foreign");
    let mut elf = std::fs::read("/bin/true").unwrap();
    // The processor in its header.
    elf[18..20].copy_from_slice(&[0xff, 0x7f]);
    std::fs::write(&foreign, elf).unwrap();
    std::fs::set_permissions(&foreign, std::fs::Permissions::from_mode(0o755)).unwrap();
    let older = r#"printf '{"program":"0.0.1","keeper":1,"memory_format":1,"persistent":1,"protocol":0}'"#;
    for (program, words) in [
        (PathBuf::from("/bin/false"), "cannot say its versions"),
        (PathBuf::from("/bin/true"), "does not say its versions"),
        (foreign, "cannot be started"),
        (script(dir, "older", older), "is older than"),
        (dir.join("missing"), "cannot open"),
    ] {
        let refused = daemon.cli(&["upgrade", "--program", program.to_str().unwrap()]);
        assert!(refused.code != 0 && refused.err.contains(words), "{refused:?}");
        assert_eq!(daemon.disk_process(), before, "{program:?}");
    }
    // These run, and do not serve the disks then.
    let versions = r#"case "$*" in *--versions*) exec "$REAL" "$@" ;; esac"#;
    for (name, then) in [("crashes", "kill -SEGV $$"), ("ends", "exit 0")] {
        let program = script(dir, name, &format!("{versions}\n{then}"));
        let refused = daemon.cli(&["upgrade", "--program", program.to_str().unwrap()]);
        refused.fails(
            1,
            &["the new program has ended before it served", "the old program serves the disks again"],
        );
        daemon.console("ran", "w", Some("W"));
    }
    assert_eq!(daemon.machine("ran")["state"], "running");
}

#[test]
fn an_upgrade_without_a_disk_process_is_refused() {
    let dir = short_dir();
    run(headwater().arg("upgrade").arg("--data-dir").arg(dir.path()))
        .fails(3, &["no keeper of disks answers"]);
}
