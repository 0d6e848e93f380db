//! Machines without a disk, from power on to power off: firmware, the site's DHCP server, `headwater serve --boot`, the agent, a
//! small system. `boot/run` has the steps, in a network namespace of its own. `make boot-demo` does the same with Debian, and
//! reboots the machines.

use std::path::Path;
use std::process::{Command, Stdio};

/// Boots the machines. Their messages are shown if one fails.
#[test]
fn a_bios_and_a_uefi_machine_boot_and_work() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../boot/run");
    let mut command = Command::new(&script);
    command.env("HEADWATER_BOOT_ONCE", "1").env("HEADWATER_BOOT_SMALL", "1");
    command.args([env!("CARGO_BIN_EXE_headwater"), "bios", "uefi"]).stdin(Stdio::null());
    let output = command.output().unwrap_or_else(|e| panic!("cannot run {}: {e}", script.display()));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("passed: bios uefi"), "{said}");
}
