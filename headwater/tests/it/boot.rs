//! Machines without a disk, from power on to power off: firmware, the site's DHCP server, `headwater serve --boot`, the agent, Debian.
//! `boot/run` has the steps, in a network namespace of its own. `make boot-demo` runs it for a UEFI machine too, and reboots both.

use std::path::Path;
use std::process::{Command, Stdio};

/// Runs it for one machine. Its messages are shown if it fails.
fn boot(machine: &str) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../boot/run");
    let mut command = Command::new(&script);
    command.env("HEADWATER_BOOT_ONCE", "1");
    let output = command.arg(env!("CARGO_BIN_EXE_headwater")).arg(machine).stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|e| panic!("cannot run {}: {e}", script.display()));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains(&format!("passed: {machine}")), "{said}");
}

#[test]
fn a_bios_machine_boots_over_nbd_and_works() {
    boot("bios");
}
